"""Sections that recipes share; a script adds its own by subclassing :class:`TrainingRecipe` and :class:`Stage`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from draftsmith.common.data_sections import Data
from draftsmith.common.field_types import (
    SAMPLES,
    TINY_EVALUATE,
    TINY_STEPS,
    Factor,
    HubId,
    Licence,
    Name,
    Positive,
    Seed,
    Sequences,
    Share,
    Threads,
)
from draftsmith.common.recipe import Section


class RunSection(Section):
    name: Name = Field(description="the run's folder is output_dir/name")
    output_dir: Name = "runs"
    seed: Seed = 0

    @field_validator("name")
    @classmethod
    def _inside(cls, name: str) -> str:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError("the run's folder has to be inside of output_dir: a name without '.', '..' and outer '/'")
        if not name.isprintable() or name != name.strip() or len(name.encode()) > 200:
            raise ValueError("a name has at most 200 bytes, no control characters and no spaces around it")
        return name

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


class Features(Section):
    """A server that runs the target and writes its hidden states (vLLM, ``extract_hidden_states``)."""

    url: str = Field(pattern=r"^https?://[^\s@?#]+$", description="without /completions: http://localhost:8000/v1")
    concurrency: Threads = Field(default=16, description="requests at once, of each process that makes batches")
    timeout: float = Field(default=600.0, ge=0.001, le=86400, description="seconds without a byte from the server")


class TargetSection(Section):
    tiny: ClassVar[dict[str, Any]] = {"features": None}

    name: Name = Field(description="a folder, a .gguf file or a folder that holds one, or a Hub id")
    revision: Name | None = None
    model_type: Name | None = Field(
        default=None, description="the target's family (llama, qwen3, …), so that --tiny and --dry-run need no download"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of its weights; auto: on a GPU the dtype it is stored in, on a CPU float32"
    )
    quantize: Literal["none", "8bit", "4bit"] = Field(
        default="none", description="load the frozen target's weights in 8 or 4 bits (needs bitsandbytes)"
    )
    attention: Literal["auto", "sdpa", "flex_attention"] = Field(
        default="auto",
        description="of packed rows in training; sdpa: a mask of every two tokens of a row; flex_attention: of blocks, "
        "without those of other samples; auto: flex_attention on a GPU, if it runs there. EAGLE's unrolled steps take "
        "blocks on a GPU, but not with sdpa",
    )
    trust_remote_code: bool = False
    features: Features | None = Field(
        default=None,
        description="a server runs the frozen target, and only its embeddings, final norm and LM head are loaded here",
    )

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``load_target``, as the recipe has them."""
        return {name: getattr(self, name) for name in ("revision", "dtype", "quantize", "trust_remote_code")}


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optim(Section):
    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon: for matrices that begin from scratch, AdamW for embeddings, output layers, biases and norms",
    )
    eight_bit: bool = Field(default=False, description="AdamW with a quarter of its memory (needs bitsandbytes)")
    lr: float = Field(ge=1e-12, le=100)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0, le=SAMPLES)
    final_lr: Share = Field(default=0.0, description="share of lr that a linear or cosine schedule ends at")
    clip: float = Field(default=1.0, ge=1e-6, le=1e9, description="largest norm of a step's gradient")

    @model_validator(mode="after")
    def _possible(self) -> "Optim":
        if self.eight_bit and self.name != "adamw":
            raise ValueError(f"eight_bit is for adamw, not for {self.name}")
        return self


class Batch(Section):
    sequences: Sequences = Field(description="sequences per optimizer step, over all processes")
    micro: Sequences | Literal["auto"] | None = Field(
        default=None,
        description="how many of them a process runs at once; the number of micro-batches of a step follows, so that "
        "one recipe serves any number of processes. auto: as many as the memory of a GPU holds, by the estimate of "
        "--dry-run; at most four on a CPU",
    )
    accumulate: Positive | None = Field(
        default=None, description="in place of micro: micro-batches of a process and step; one if neither is given"
    )

    @field_validator("micro", mode="before")
    @classmethod
    def _number_or_auto(cls, micro: Any) -> Any:
        if micro not in (None, "auto") and not (type(micro) is int and 0 < micro <= 1 << 16):
            raise ValueError("write a number of sequences from 1 to 65536, or auto")
        return micro

    @model_validator(mode="after")
    def _even(self) -> "Batch":
        if self.micro is not None and self.accumulate is not None:
            raise ValueError(f"it has micro={self.micro} and accumulate={self.accumulate}; set one of them to null")
        if self.sequences % (self.accumulate or 1):
            raise ValueError(f"sequences={self.sequences} is not a multiple of accumulate={self.accumulate}")
        return self


class Precision(Section):
    tiny: ClassVar[dict[str, Any]] = {"autocast": "none", "compile": False}

    autocast: Literal["auto", "none", "bfloat16"] = Field(
        default="auto", description="of the products in training; auto: bfloat16 where the device has it in hardware"
    )
    compile: bool = Field(default=False, description="torch.compile the training step (needs a C++ compiler)")
    threads: Threads | None = Field(default=None, description="CPU threads; all cores if left out")
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, a third more time"
    )


class Launch(Section):
    timeout: float = Field(
        default=1800,
        ge=60,
        le=7 * 86400,
        description="seconds that a process waits for another one before the run ends with an error: so the others "
        "notice one that died; more than what the first one takes to write a checkpoint, or to mark an SSM's prompts",
    )


class Checkpoint(Section):
    tiny: ClassVar[dict[str, Any]] = {"every": 1}

    every: Positive = 200
    keep: Positive = 2


class Evaluate(Section):
    tiny: ClassVar[dict[str, Any]] = {**TINY_EVALUATE, "decode": TINY_STEPS, "prompts": 2}

    every: Positive = 200
    sequences: Positive = Field(
        default=64, description="held-out rows that an evaluation measures, of each validation source in turn"
    )
    decode: Positive | None = Field(
        default=None, description="decode held-out prompts with the engine every so many steps of a stage: the real τ"
    )
    prompts: Positive = Field(default=8, description="how many of them")

    @model_validator(mode="after")
    def _together(self) -> "Evaluate":
        if self.decode and self.decode % self.every:
            raise ValueError(f"decode={self.decode} is not a multiple of every={self.every}")
        return self


class Track(Section):
    """Trackers of metrics besides metrics.jsonl."""

    tiny: ClassVar[dict[str, Any]] = {"wandb": False, "tensorboard": False}

    wandb: bool = False
    project: Name = Field(default="draftsmith", description="the Weights & Biases project")
    offline: bool = Field(default=False, description="keep wandb's data in the run folder, to be uploaded later")
    tensorboard: bool = Field(default=False, description="into the run folder's tensorboard/")


class Export(Section):
    """Uploads and additional files of the finished run."""

    tiny: ClassVar[dict[str, Any]] = {"push_to_hub": None}

    push_to_hub: HubId | None = Field(
        default=None, description="calibrate the finished run and upload its folder, without checkpoints, as USER/NAME"
    )
    private: bool = True
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the drafter's and the adapter's stored weights; bfloat16 halves the files"
    )
    licence: Licence | None = Field(
        default=None,
        description="of the drafter, in its model card, for example apache-2.0; the target's if left out and known",
    )
    merged: bool = Field(
        default=False,
        description="after joint training: write the target with its adapter merged in, too (target/); all of it has "
        "to fit into CPU memory",
    )


# Also a folder's name.
StageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]


S = TypeVar("S", bound="Stage")


class Stage(Section):
    """One call of the training loop."""

    tiny: ClassVar[dict[str, Any]] = {"steps": TINY_STEPS, "epochs": None, "batch": {"sequences": 4}}

    name: StageName = "train"
    optim: Optim
    batch: Batch
    steps: Positive | None = Field(default=None, description="how many; or give epochs")
    epochs: Factor | None = Field(
        default=None,
        description="instead of steps: passes over the training rows, of all sources together; the number of steps is "
        "printed once the rows are read, and stands in the run's recipe.yaml",
    )
    seconds: float | None = Field(
        default=None,
        gt=0,
        description="end after so many seconds if the steps are not done by then; the schedule of the learning rate "
        "ends with them. For machines by the minute: such a run cannot be repeated to the bit",
    )

    @property
    def num_steps(self) -> int:
        """Its steps, once epochs have become steps."""
        assert self.steps is not None, "with_rows comes first"
        return self.steps

    @property
    def samples(self) -> int:
        """Number of sequences of all its steps."""
        return self.num_steps * self.batch.sequences

    def with_rows(self: S, rows: int) -> S:
        """The stage with steps in place of epochs, which are passes over so many rows."""
        assert self.epochs is not None
        steps = math.ceil(self.epochs * rows / self.batch.sequences)
        self._check_samples(steps, f"epochs={self.epochs:g} of {rows:,} rows", "epochs")
        return self.model_copy(update={"steps": steps, "epochs": None})

    def _check_samples(self, steps: int, what: str, field: str) -> None:
        if steps * self.batch.sequences > SAMPLES:
            raise ValueError(
                f"{what} × batch.sequences={self.batch.sequences} are more than the {SAMPLES:,} sequences that a stage "
                f"may have; lower {field}"
            )

    @model_validator(mode="after")
    def _schedulable(self) -> "Stage":
        if self.steps is None and self.epochs is None:
            raise ValueError("it has neither steps nor epochs; add one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"it has steps={self.steps} and epochs={self.epochs:g}; set one of them to null")
        if self.steps is not None:
            self._check_samples(self.steps, f"steps={self.steps}", "steps")
        return self


class Recipe(Section):
    """The sections that every recipe shares."""

    run: RunSection
    data: Data
    precision: Precision = Precision()
    launch: Launch = Launch()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    track: Track = Track()
    export: Export = Export()


def refuse_set(recipe: Recipe, names: Sequence[str], why: str) -> None:
    """Refuse fields (``section.field``) that the recipe's script does not read."""
    for name in names:
        section, field = name.split(".")
        found = getattr(recipe, section)
        if getattr(found, field) != type(found).model_fields[field].default:
            raise ValueError(f"{name}: {why}; leave it out")


class TrainingRecipe(Recipe):
    """The recipe of a training script. A script with its own kind of stage narrows ``stages`` to it."""

    stages: list[Stage] = Field(min_length=1, description="trained one after the other")

    @model_validator(mode="after")
    def _one_name_each(self) -> "TrainingRecipe":
        names = [stage.name for stage in self.stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stages: two are called {max(names, key=names.count)!r}; give each its own 'name'")
        if any(stage.seconds for stage in self.stages[:-1]):
            raise ValueError("stages: only the last one can be limited in seconds; the others have steps or epochs")
        return self


class DrafterRecipe(TrainingRecipe):
    """The recipe of a script that trains a drafter for a frozen target; the script narrows ``drafter``."""

    tiny: ClassVar[dict[str, Any]] = {"init_from": None}

    target: TargetSection
    drafter: Section
    init_from: Name | None = Field(default=None, description="a drafter of the same target to begin from")
    cache_hidden: Literal["none", "memory", "disk"] = Field(
        default="none",
        description="run the frozen target (also Medusa-2's teacher) once over all rows and keep its hidden states, in "
        "memory or in the run's folder; how much room that takes is printed first",
    )

    @model_validator(mode="after")
    def _rows_end(self) -> "DrafterRecipe":
        if self.cache_hidden != "none" and any(source.streaming for source in self.data.train):
            raise ValueError("cache_hidden keeps every row's hidden states, and a streamed source has no end; drop one")
        streamed = [source.source for source in self.data.train if source.streaming]
        if streamed and getattr(self.drafter, "draft_vocab_size", None):
            raise ValueError(
                "drafter.draft_vocab_size: its tokens are counted over all training rows, and a streamed source has no "
                "end; drop one"
            )
        asks = [source.source for source in [*self.data.train, *self.data.validation] if source.answers is not None]
        needs = {
            f"target.quantize={self.target.quantize}": self.target.quantize != "none",
            f"evaluate.decode={self.evaluate.decode}": self.evaluate.decode is not None,
            f"data source {asks[:1]}: answers": bool(asks),
            "drafter.replay": bool(getattr(self.drafter, "replay", 0)),
        }
        if self.target.features and (needed := next((what for what, found in needs.items() if found), None)):
            raise ValueError(
                f"{needed} needs the target's layers here, and with target.features a server has them; leave it out "
                "(train/distill.py lets a server answer)"
            )
        for place, stage in enumerate(self.stages):
            if streamed and stage.epochs is not None:
                raise ValueError(
                    f"stages.{place}.epochs={stage.epochs:g}: source {streamed[0]!r} is streamed, and its number of "
                    "rows unknown; give steps instead"
                )
        return self

    def check_answers(self, most: int, what: str) -> None:
        """Raises ValueError: the target's answers have at most so many tokens, as many as ``what``."""
        asks = [source.answers for source in [*self.data.train, *self.data.validation]]
        if any(ask is not None and ask.new_tokens <= most for ask in asks):
            raise ValueError(f"answers.new_tokens must exceed {what} = {most}")


R = TypeVar("R", bound=TrainingRecipe)
