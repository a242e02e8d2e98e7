"""Recipes: YAML read into strict typed objects. The only reader of YAML, and a leaf that any command may import.

A script adds its own sections by subclassing :class:`Recipe`. Unknown keys, wrong types and impossible combinations
are one ``ValueError`` line with file, field and the nearest valid key.
"""

import difflib
import os
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Run(Section):
    name: str = Field(min_length=1, description="the run's folder is output_dir/name")
    output_dir: str = "runs"
    seed: int = 0

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


class Target(Section):
    name: str = Field(description="a folder or a Hub id")
    revision: str | None = None
    model_type: str | None = Field(
        default=None, description="the target's family (llama, qwen3, …), so that --tiny and --dry-run need no download"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantize: Literal["none", "8bit", "4bit"] = Field(
        default="none", description="load the frozen target's weights in 8 or 4 bits (needs bitsandbytes)"
    )
    trust_remote_code: bool = False


class Answers(Section):
    """The target continues prompts cut from a source; what it wrote is what the drafter trains on."""

    prompts: Positive
    prompt_tokens: Positive = 64
    new_tokens: Positive = 128
    batch_size: Positive = 64


LOCAL_FILES = (".json", ".jsonl", ".parquet", ".txt")


class Source(Section):
    """Where samples come from."""

    source: str = Field(
        description="stdlib or package:NAME (text from this machine), a .json, .jsonl, .parquet or .txt file (one "
        "document) or several (runs/x/shard-*.jsonl), or the Hub id of a data set; rows hold messages, conversations, "
        "prompt and completion, or text"
    )
    subset: str | None = Field(default=None, description="a Hub data set's configuration")
    split: str = Field(default="train", description="stdlib and packages: train, validation or test, by module path")
    limit: int | None = Field(default=None, gt=0, description="only the first so many rows")
    weight: float = Field(default=1.0, gt=0, description="relative share of the samples")
    form: Literal["text", "chat"] = Field(
        default="text", description="stdlib and packages: whole files, or docstring → function dialogues"
    )
    streaming: bool = Field(
        default=False, description="files and Hub data sets: read while training, for what is too large to keep"
    )
    answers: Answers | None = None

    @property
    def installed(self) -> bool:
        """Whether it is text that every machine has, with splits by module path."""
        return self.source == "stdlib" or self.source.startswith("package:")

    @property
    def is_file(self) -> bool:
        return self.source.endswith(LOCAL_FILES)

    @model_validator(mode="after")
    def _known(self) -> "Source":
        if self.streaming and (self.installed or self.source.endswith(".txt")):
            raise ValueError(f"source {self.source!r}: 'streaming' is for .json, .jsonl, .parquet and Hub data sets")
        if self.installed:
            if self.source != "stdlib" and not re.fullmatch(r"package:[A-Za-z0-9_]+", self.source):
                raise ValueError(f"source {self.source!r}: after 'package:' comes the name it is imported by")
            if self.split not in ("train", "validation", "test"):
                raise ValueError(
                    f"source {self.source!r} has the splits train, validation and test, not {self.split!r}"
                )
            return self
        if not self.is_file and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.source):
            raise ValueError(
                f"source {self.source!r} is neither 'stdlib', 'package:NAME', a file ({', '.join(LOCAL_FILES)}) nor a "
                "data set's Hub id (USER/NAME)"
            )
        for name in ("answers", "form"):
            if getattr(self, name) not in (None, "text"):
                raise ValueError(f"source {self.source!r}: '{name}' is for stdlib and package:NAME")
        return self


class Data(Section):
    train: list[Source] = Field(min_length=1)
    validation: list[Source] = Field(min_length=1)
    max_length: Positive = Field(default=512, description="tokens in a row; longer samples are cut")
    packing: bool = Field(default=False, description="several samples to a row; they do not see each other")
    template: str | None = Field(
        default=None, description="a chat template (Jinja) or a file that holds one; the tokenizer's own if left out"
    )
    max_unsupervised: Share = Field(
        default=0.1, description="share of samples without a label (cut before the assistant speaks) that is an error"
    )

    @model_validator(mode="after")
    def _ends(self) -> "Data":
        for source in self.validation:
            if source.streaming and source.limit is None:
                raise ValueError(
                    f"validation source {source.source!r} is streamed; say with 'limit' how many rows of it"
                )
        return self


class Optim(Section):
    name: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: from scratch only; matrices by Muon, embeddings and norms by AdamW"
    )
    eight_bit: bool = Field(default=False, description="AdamW with a quarter of its memory (needs bitsandbytes)")
    lr: float = Field(gt=0)
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    final_lr: Share = Field(default=0.0, description="share of lr that a linear or cosine schedule ends at")
    clip: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _possible(self) -> "Optim":
        if self.eight_bit and self.name != "adamw":
            raise ValueError(f"eight_bit is for adamw, not for {self.name}")
        return self


class Batch(Section):
    sequences: Positive = Field(description="sequences per optimizer step, over all processes")
    accumulate: Positive = Field(default=1, description="micro-batches the sequences are split into")

    @model_validator(mode="after")
    def _even(self) -> "Batch":
        if self.sequences % self.accumulate:
            raise ValueError(f"sequences={self.sequences} is not a multiple of accumulate={self.accumulate}")
        return self


class Precision(Section):
    autocast: Literal["none", "bfloat16"] = "none"
    compile: bool = Field(default=False, description="torch.compile the training step (needs a C++ compiler)")
    threads: int | None = Field(default=None, gt=0, description="CPU threads; all cores if left out")
    gradient_checkpointing: bool = Field(
        default=False, description="make activations again in the backward pass: less memory, a third more time"
    )


class Checkpoint(Section):
    every: Positive = 200
    keep: Positive = 2


class Evaluate(Section):
    every: Positive = 200
    sequences: Positive = 64
    decode: int | None = Field(
        default=None, gt=0, description="decode held-out prompts with the engine every so many steps: the real τ"
    )
    prompts: Positive = Field(default=8, description="how many of them")

    @model_validator(mode="after")
    def _together(self) -> "Evaluate":
        if self.decode and self.decode % self.every:
            raise ValueError(f"decode={self.decode} is not a multiple of every={self.every}")
        return self


class Track(Section):
    """Where metrics go besides metrics.jsonl."""

    wandb: bool = False
    project: str = Field(default="draftsmith", description="the Weights & Biases project")
    offline: bool = Field(default=False, description="keep what wandb gets in the run folder, to be sent later")
    tensorboard: bool = Field(default=False, description="into the run folder's tensorboard/")


class Export(Section):
    """What happens to the finished run."""

    push_to_hub: str | None = Field(
        default=None,
        pattern=r"^[\w.-]+/[\w.-]+$",
        description="upload the run folder, without checkpoints, as USER/NAME",
    )
    private: bool = True
    merged: bool = Field(
        default=False,
        description="after joint training: write the target with its adapter merged in, too (target/); all of it has "
        "to fit into CPU memory",
    )


class Stage(Section):
    """One call of the training loop. A script with several stages lists them; one with a single stage inherits them."""

    optim: Optim
    batch: Batch
    steps: Positive


class Recipe(Section):
    """The sections that every recipe shares."""

    run: Run
    data: Data
    precision: Precision = Precision()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    track: Track = Track()
    export: Export = Export()


R = TypeVar("R", bound=Recipe)
S = TypeVar("S", bound=Section)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``2e-3`` as a string and lets the last of two equal keys win; neither is what a recipe means."""


def _mapping(loader: _Loader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf)$|^\.(nan|NaN)$"),
    list("-+0123456789."),
)


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"{where}{line}: not valid YAML: {problem}") from None


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation such as ``list[Stage]`` or ``Answers | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for a in typing.get_args(annotation) for section in _sections(a)]


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys below a section; those of a list's entries as an override of its first one."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        entry = "0." if typing.get_origin(field.annotation) is list else ""
        for section in _sections(field.annotation):
            keys += _keys(section, f"{prefix}{name}.{entry}")
    return keys


def _nearest(model: type[BaseModel], path: tuple[str | int, ...]) -> str:
    """«; nearest valid key: …» for a key that does not exist: among its siblings first, then everywhere."""
    section: type[BaseModel] | None = model
    for part in path[:-1]:
        if isinstance(part, int) or section is None:
            continue
        field = section.model_fields.get(part)
        found = _sections(field.annotation) if field else []
        section = found[0] if found else None
    siblings = list(section.model_fields) if section else []
    last = str(path[-1])
    near = difflib.get_close_matches(last, siblings, n=1)
    if near:
        return "; nearest valid key: " + ".".join([*(str(p) for p in path[:-1]), near[0]])
    everywhere = {key.rsplit(".", 1)[-1]: key for key in reversed(_keys(model))}  # the first of a name wins
    near = difflib.get_close_matches(last, everywhere, n=1)
    if near:
        return f"; nearest valid key: {everywhere[near[0]]}"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def _explain(error: ValidationError, model: type[BaseModel], where: str, overrides: typing.Sequence[str]) -> str:
    first = error.errors()[0]
    path = tuple(p for p in first["loc"] if not (isinstance(p, str) and p.startswith("function-")))
    field = ".".join(map(str, path)) or "recipe"
    for override in overrides:  # name those that reach this field, and no innocent one
        key = override.partition("=")[0] + "."
        if key.startswith(f"{field}.") or f"{field}.".startswith(key):
            where += f" with {override}"
    more = len(error.errors()) - 1
    tail = f" (and {more} more)" if more else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key '{field}'{_nearest(model, path)}{tail}"
    if first["type"] == "missing":
        return f"{where}: '{field}' is missing; add it{tail}"
    message = first["msg"].removeprefix("Value error, ")
    got = first["input"]
    shown = f", got {got!r}" if isinstance(got, (str, int, float, bool, type(None))) else ""
    return f"{where}: '{field}': {message[0].lower() + message[1:]}{shown}{tail}"


def read_recipe(path: str | Path, recipe: type[S], overrides: typing.Sequence[str] = ()) -> S:
    """Read ``path`` as a ``recipe``; ``overrides`` are ``section.field=value`` (the value is YAML; ``a.0.b`` reaches
    into lists).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: one line with file, field and the nearest valid key.
    """
    path = Path(path)
    if not path.is_file():
        there = sorted(p.stem for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.stem, there, n=1)
        hint = f"; did you mean {path.parent / (near[0] + '.yaml')}?" if near else ""
        raise FileNotFoundError(f"{path}: there is no such recipe{hint}")
    where = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not a text file; a recipe is YAML in UTF-8") from None
    content = _unshared(_yaml(text, where))
    if not isinstance(content, dict):
        raise ValueError(
            f"{where}: a recipe is a mapping of sections (run, data, optim, …), got {type(content).__name__}"
        )
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ValueError(f"'{override}' is no override; write section.field=value, for example optim.lr=1e-3")
        where = f"{path} with {override}"
        node: Any = content
        *parents, last = key.split(".")
        for part in parents:
            if isinstance(node, list):
                if not part.isdigit() or int(part) >= len(node):
                    raise ValueError(f"{where}: '{key}': the list has {len(node)} entries, counted from 0")
                node = node[int(part)]
            else:
                node = node.setdefault(part, {})
            if not isinstance(node, (dict, list)):
                raise ValueError(f"{where}: '{key}': '{part}' is a value, not a section")
        if isinstance(node, list):
            if not last.isdigit() or int(last) >= len(node):
                raise ValueError(f"{where}: '{key}': the list has {len(node)} entries, counted from 0")
            node[int(last)] = _yaml(value, where)
        else:
            node[last] = _yaml(value, where)
    try:
        return recipe.model_validate(content)
    except ValidationError as error:
        raise ValueError(_explain(error, recipe, str(path), overrides)) from None


def _unshared(node: Any) -> Any:
    """A copy in which what a YAML anchor names stands in each place by itself, so that an override changes one."""
    if isinstance(node, dict):
        return {key: _unshared(value) for key, value in node.items()}
    return [_unshared(value) for value in node] if isinstance(node, list) else node


def write_recipe(recipe: Section, path: Path, command: str) -> None:
    """Save the resolved recipe, atomically, headed by the command that ran it."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(f"# {command}\n{text}", encoding="utf-8")
    os.replace(temporary, path)


__all__ = [
    "Answers", "Batch", "Checkpoint", "Data", "Evaluate", "Export", "Optim", "Precision", "Recipe", "Run", "Section",
    "Source", "Stage", "Target", "Track", "read_recipe", "write_recipe",
]  # fmt: skip
