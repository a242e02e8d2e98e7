"""An open run, which every training script shares: its state, folder, target, rows and export. No family of drafters
is named here."""

import hashlib
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftsmith.common.files import append, write_json
from draftsmith.common.recipe import write_recipe
from draftsmith.common.sections import DrafterRecipe, R, Stage
from draftsmith.data.packing import Rows
from draftsmith.data.streaming import StreamedRows
from draftsmith.data.tokenized import template_for, tokenized
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.measure.tree_statistics import AT_ONCE, draft_labels, in_batches, row_batches
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import check_target, device_name, in_dtype, provenance, read_drafter, write_drafter
from draftsmith.models.export import publish
from draftsmith.models.files.locate import ModelFolder
from draftsmith.models.serving.from_published import convert_if_published
from draftsmith.models.target import Target, load_target
from draftsmith.models.tokenizer import load_tokenizer, template_sha256
from draftsmith.models.vocabulary import check_draft_vocab
from draftsmith.train import checkpoint, folders, sharded
from draftsmith.train.features import hidden_states, rows_at_once
from draftsmith.train.launch import console
from draftsmith.train.page import TrainingPage
from draftsmith.train.samples import Batch, Batches, WithHidden, held_out_rows, prompts_of, rows_of, seen_in_training
from draftsmith.train.served import ServedTarget, WithServed, load_served
from draftsmith.train.track import Trackers

DECODED_TOKENS = 64  # of each prompt of evaluate.decode
LIBRARIES = ("torch", "transformers", "tokenizers")  # with another version of which a step may differ

S = TypeVar("S", bound=Stage)


def beginning(recipe: DrafterRecipe) -> ModelFolder | None:
    """The drafter of ``init_from``, if there is one; of a published one, its converted copy."""
    t, start = recipe.target, recipe.init_from
    if start is None:
        return None
    return convert_if_published(start, t.name, revision=t.revision, trust_remote_code=t.trust_remote_code)


def check_init_from(recipe: DrafterRecipe, kind: str) -> ModelFolder:
    """:func:`beginning`, checked for a drafter of this kind by its config alone, before the target is loaded."""
    where, drafter = f"init_from={recipe.init_from}", beginning(recipe)
    assert drafter is not None
    if not (drafter.path / "config.json").is_file():
        raise FileNotFoundError(f"{where}: no drafter there (config.json)")
    config = drafter.config
    if config.get("drafter_type") != kind:
        raise ValueError(f"{where}: its drafter_type is {config.get('drafter_type')!r}, not {kind!r}")
    shape = recipe.drafter.model_dump(mode="json")
    if config.get("projection") == "shared" and shape.get("draft_vocab_size", 0) is None:
        shape.pop("draft_vocab_size")  # the target's LM head has the rows of all tokens
    for name in ("captured_layers", "intermediate_size", "mask_token_id", "num_layers"):
        if shape.get(name, 0) is None:
            shape.pop(name)  # it then has the same ones
    if kind == "eagle" and shape.get("num_layers", 0) > config.get("num_layers", 1):
        shape.pop("num_layers")  # those behind its own begin as if they were not there
    if config.get("parallel") and not shape["one_pass"]:
        raise ValueError(f"{where}: it drafts in one pass; set drafter.one_pass=true")
    for name, value in shape.items():
        if config.get(name, value) != value:  # what a config leaves out only concerns training
            raise ValueError(f"{where}: its {name} is {config[name]!r}, the recipe's {value!r}; set drafter.{name}")
    return drafter


def digest_of(weights: Iterable[Tensor]) -> bytes:
    """A hash of all bytes of some weights."""
    digest = hashlib.blake2b()
    for weight in weights:
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()


@dataclass
class Run(Generic[R]):
    """An open run: nobody else works in its folder, and its recipe can run here. It goes on from stage to stage.

    kind: the script's name.
    resume: there is a checkpoint to go on from.
    small: it is the tiny form of a recipe.
    dry: it is of --dry-run, and its folder is deleted in the end.
    fingerprint: of the frozen target, if there is one; a checkpoint belongs to it.
    older_fingerprint: the same target's by earlier versions.
    best: highest value of the stage's selection metric so far.
    best_step: the step that had it; 0 if it is not known.
    step: over all stages.
    first: the step at which the stage began.
    seconds: of the steps so far, over all stages, without evaluations and checkpoints.
    used: seconds of the stage so far, evaluations and checkpoints included; counted only where the stage has a limit.
    at_once: tokens of a forward pass of the stage's training, which those of evaluations do not exceed.
    depends_on: what else the steps depend on, by name: hashes, versions of libraries, numbers of the recipe.
    resumed: the checkpoint's weights are restored.
    """

    recipe: R
    kind: str
    accelerator: Accelerator
    resume: bool
    command: str
    small: bool = False
    dry: bool = False
    fingerprint: str = ""
    older_fingerprint: str = ""
    trackers: Trackers | None = None
    page: TrainingPage | None = None
    best: float = -math.inf
    best_step: int = 0
    step: int = 0
    first: int = 0
    seconds: float = 0.0
    used: float = 0.0
    at_once: int = AT_ONCE
    depends_on: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in LIBRARIES})
    resumed: bool = False
    tokenizer: Any = None
    held_out: Batch = field(default_factory=dict)
    start: ModelFolder | None = None  # the drafter of ``init_from``, once it is checked; none where a run resumes
    data_sha256: list[str] = field(default_factory=list)
    data_labels: list[int | None] = field(default_factory=list)
    labels_seen: int | None = 0
    _ranked: tuple[bytes | None, Tensor] = (None, torch.empty(0))  # the weights of the last ranks, and these

    @property
    def folder(self) -> Path:
        return self.recipe.run.folder

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def dtype(self) -> str | None:
        """The frozen target's, if there is one."""
        return self.recipe.target.dtype if isinstance(self.recipe, DrafterRecipe) else None

    @property
    def remaining(self) -> list[str]:
        """Names of the stages that are still to be trained, the first one perhaps in part."""
        names = [stage.name for stage in self.recipe.stages]
        if not self.resume:
            return names
        last = checkpoint.read_state(checkpoint.checkpoints(self.checkpoints)[-1])["stage"]
        return names[names.index(last) if last in names else 0 :]

    def place(self, stage: Stage) -> int:
        """Number of a stage of the recipe."""
        return [each.name for each in self.recipe.stages].index(stage.name)

    def record(self, line: dict[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``, for the trackers too; on the main process."""
        if self.main:
            append(self.folder / "metrics.jsonl", json.dumps(line))
            if self.trackers:
                self.trackers.log(line)

    def autocast(self) -> torch.autocast:
        """The recipe's precision, for forward passes."""
        wanted = self.recipe.precision.autocast
        assert wanted != "auto", "with_precision comes first"
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=wanted == "bfloat16")

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[None]:
        """Inside, the module is in eval mode, without gradients, in the recipe's precision."""
        module.eval()
        with torch.no_grad(), self.autocast():
            yield

    # ---- before training

    def save_recipe(self) -> None:
        """Write the resolved recipe into the run's folder."""
        if self.main:
            write_recipe(self.recipe, self.folder / "recipe.yaml", self.command)

    def load_target(self) -> Target:
        """The frozen target of a :class:`DrafterRecipe`, spread over processes if the launcher says so."""
        recipe = self.recipe
        assert isinstance(recipe, DrafterRecipe)
        if recipe.init_from and not self.resume:
            self.start = check_init_from(recipe, self.kind)
        t = recipe.target
        self._tokenize(load_tokenizer(t.name, t.revision, t.trust_remote_code))
        if t.features:
            target: Target = load_served(t, str(self.accelerator.device))
        else:
            with sharded.placing(self.accelerator, t.dtype) as loader:
                target = load_target(t.name, **t.options, device=str(self.accelerator.device), loader=loader)
        self.save_recipe()
        self.fingerprint, self.tokenizer = target.fingerprint, target.tokenizer
        self.older_fingerprint = target.older_fingerprint
        torch.manual_seed(recipe.run.seed)  # for the weights that the script makes next
        return target

    def _tokenize(self, tokenizer: Any) -> None:
        """Tokenize the sources into the cache, from which :func:`rows_of` takes them: before the target takes memory,
        and what is wrong with a source is said before minutes of loading."""
        data = self.recipe.data
        for source in (*data.train, *data.validation):
            if not source.streaming and source.answers is None:
                tokenized(source, data, tokenizer)

    def start_weights(self, drafter: nn.Module, target: Target) -> None:
        """Put a new drafter on the run's device, with the weights of ``init_from``; check that there is room for its
        checkpoints, and print its size."""
        recipe = self.recipe
        assert isinstance(recipe, DrafterRecipe)
        drafter.to(self.accelerator.device)
        if self.start:
            folder, config, weights = read_drafter(self.start)
            check_target(folder, config, target)
            own = drafter.state_dict()
            if "midlayer.mlp.up_proj.weight" in own:
                # P-EAGLE may begin with an EAGLE-3 drafter, which has no mask pair, and both with fewer layers.
                further = (f"layers.{number}." for number in range(config.get("num_layers", 1), 64))
                new = ("mask_hidden", *further)
                weights = {name: own[name] for name in own if name.startswith(new)} | weights
            if "draft_vocab" not in own:  # check_init_from knows that no other weight depends on it
                weights.pop("draft_vocab", None)
            if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
                raise ValueError(f"init_from={recipe.init_from}: its weights have another shape than the recipe's")
            if "draft_vocab" in own:
                where = f"init_from={recipe.init_from}"
                check_draft_vocab(weights["draft_vocab"], len(own["draft_vocab"]), target.vocab_size, where)
            drafter.load_state_dict(weights)
        trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        self.check_room(trained)
        console.print(
            f"{trained / 1e6:.2f} M parameters to train beside a frozen target of "
            f"{sum(map(sharded.size, target.model.parameters())) / 1e6:.2f} M"
        )

    def check_room(self, parameters: int) -> None:
        """Refuse a run whose checkpoints of so many parameters do not fit on the disk."""
        if self.main:
            folders.check_room(self.folder, parameters, self.recipe, self.recipe.stages[0])

    def read_rows(self, target: Target, depth: int = 1) -> list[Batches]:
        """The training rows of each source. ``held_out`` becomes the validation rows, which are also stored in the
        run's folder: calibrate.py counts on them.

        Args:
            depth: of the drafts that evaluations measure on the validation rows.
        """
        recipe = self.recipe
        assert isinstance(recipe, DrafterRecipe)
        if recipe.data.packing:
            dense = recipe.precision.compile  # which compiles the target's attention with the rest
            line = target.prepare_packing("sdpa" if dense else recipe.target.attention)
            if line:
                console.print(line, style="yellow")
        rows = rows_of(recipe, "train", target)
        held_out = held_out_rows(recipe, target)
        if self.main:
            checkpoint.write_tensors(self.folder / "held_out", held_out)
        if self.main and not self.small and (seen := seen_in_training(held_out, rows)):
            console.print(
                f"warning: {seen} of {len(held_out['tokens'])} held-out rows are training rows too, so that what is "
                "measured on them is too high; hold others out, for example data.train.0.split=train[:95%] and "
                "data.validation.0.split=train[95%:]",
                style="yellow",
            )
        self.held_out = {key: value[: recipe.evaluate.sequences] for key, value in held_out.items()}
        if recipe.evaluate.decode and (sharded.spreads() or not prompts_of(self.held_out)):
            spread = "a target that is spread over processes decodes nothing"
            why = spread if sharded.spreads() else "no held-out row has a prompt before its answer, as chats have"
            console.print(f"evaluate.decode: {why}; τ is not measured by decoding", style="yellow")
        if not bool((draft_labels(**self.held_out, depth=depth) >= 0).all(-1).any()):
            raise ValueError(
                f"data.validation: evaluations measure drafts of {depth} tokens, and no answer of the "
                f"{len(self.held_out['tokens'])} rows that they use has {depth + 1} tokens in a row within "
                f"data.max_length={recipe.data.max_length}; use longer answers"
            )
        self.data_sha256 = [part.samples.sha256() if isinstance(part, Rows) else "streamed" for part in rows]
        streams = [str(part.request["of"]) for part in rows if isinstance(part, StreamedRows)]
        self.depends_on |= {
            "training rows": ",".join(self.data_sha256),
            "streamed sources": ",".join(streams),
            "chat template": template_sha256(template_for(recipe.data, self.tokenizer) or self.tokenizer.chat_template),
        }
        self.data_labels = [int(part.samples.supervised.sum()) if isinstance(part, Rows) else None for part in rows]
        return list(rows)

    def with_hidden(self, target: Target, rows: Sequence[Batches], captures: Sequence[int] = ()) -> list[Batches]:
        """The rows with the target's last hidden states beside them, and with the inputs of the captured layers, where
        the recipe's ``cache_hidden`` says so, or a server makes them."""
        recipe = self.recipe
        assert isinstance(recipe, DrafterRecipe)
        if recipe.cache_hidden == "none" and isinstance(target, ServedTarget):
            return [WithServed(part, target, captures) if isinstance(part, Rows) else part for part in rows]
        if recipe.cache_hidden == "none":
            return list(rows)
        dtype = torch.bfloat16 if recipe.precision.autocast == "bfloat16" else target.dtype
        cached: list[Batches] = []
        for number, part in enumerate(rows):
            assert isinstance(part, Rows)
            kept = self.folder / "features" / str(number) if recipe.cache_hidden == "disk" else None
            with torch.no_grad(), self.autocast():
                at_once = rows_at_once(part.length)
                made = hidden_states(target, part, dtype, self.accelerator, kept, at_once, captures)
                cached.append(WithHidden(part, made))
        return cached

    # ---- training

    def with_steps(self, stage: S, rows: Sequence[Batches]) -> S:
        """The stage with its epochs, if it has any, as steps; so is it in the run's recipe from then on."""
        if stage.epochs is None:
            return stage
        if not all(isinstance(part, Sized) for part in rows):
            raise ValueError(f"stage '{stage.name}': its rows are not counted before training; give steps, not epochs")
        count = sum(len(part) for part in rows if isinstance(part, Sized))
        counted, place = stage.with_rows(count), self.place(stage)
        if self.recipe.stages[place].epochs is not None:
            stages = [counted if at == place else other for at, other in enumerate(self.recipe.stages)]
            self.recipe = self.recipe.model_copy(update={"stages": stages})
            self.save_recipe()
            console.print(f"{stage.name}: {stage.epochs:g} epochs of {count:,} rows are {counted.steps:,} steps")
        return counted

    def held_out_ranks(self, ranks_of: Callable[[Tensor, Tensor], Tensor], module: nn.Module | None = None) -> Tensor:
        """Ranks ``[S, T, …]`` of the held-out rows, from a function that gives those of a batch (:func:`in_batches`).
        The processes share the work; each gets all ranks. ``module``: while what trains of it is the same as the last
        time, so are the ranks."""
        weights = module and digest_of(p for p in module.parameters() if p.requires_grad)
        if weights and weights == self._ranked[0]:
            return self._ranked[1]
        found = in_batches(ranks_of, self.held_out["tokens"], self.held_out["supervised"], *self._share)
        if self.accelerator.num_processes > 1:
            small = found.to(self.accelerator.device, torch.int8)  # −1 … MAX_RANK
            torch.distributed.all_reduce(small, torch.distributed.ReduceOp.MAX)
            found = small.cpu().long()
        self._ranked = weights, found
        return found

    def held_out_sums(self, sums_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The sum, over batches of the held-out rows and over the processes, of what a function gives for one."""
        rows = row_batches(self.held_out["tokens"], self.held_out["supervised"], *self._share)
        sums = sum(sums_of(tokens, marks) for _, tokens, marks in rows)
        return cast(Tensor, self.accelerator.reduce(cast(Tensor, sums), "sum")).cpu()

    @property
    def _share(self) -> tuple[int, int, int]:
        """What this process evaluates, as :func:`row_batches` takes it."""
        return self.at_once, self.accelerator.process_index, self.accelerator.num_processes

    def decode_tau(self, target: Target, make: Callable[[], Drafter]) -> dict[str, float]:
        """``tau``: mean accepted length on held-out prompts, decoded by the engine with a copy of the current weights;
        nothing at steps at which ``evaluate.decode`` does not ask for it. The processes share the prompts."""
        wanted, step = self.recipe.evaluate, self.step - self.first
        if not wanted.decode or not step or step % wanted.decode or sharded.spreads():
            return {}
        prompts = prompts_of(self.held_out)[: wanted.prompts]
        if not prompts:
            return {}
        mine = prompts[self.accelerator.process_index :: self.accelerator.num_processes]
        rows = max(1, self.at_once // (max(map(len, prompts)) + DECODED_TOKENS))
        with torch.autocast(target.device.type, enabled=False):
            decoder = SpeculativeDecoder(target, make())
            results = decoder.generate(mine, DECODED_TOKENS, batch_size=rows) if mine else []
            decoder.free()
        accepted = [count for result in results for count in result.accepted]
        sums = torch.tensor([sum(accepted), len(accepted)], dtype=torch.float64, device=target.device)
        total, steps = cast(Tensor, self.accelerator.reduce(sums, "sum")).tolist()
        return {"tau": total / steps if steps else 1.0}

    def show_ranks(self, ranks: Tensor, tree: Topology) -> None:
        """Show some held-out rows in ``training.html``, with the ranks ``[S, T, K]`` that the drafter gives to their
        tokens, as an evaluation has them, and the tree it measures τ with."""
        if self.page:
            self.page.keep_texts(self.held_out, ranks, tree, self.tokenizer)

    # ---- after training

    def facts(self, **more: Any) -> dict[str, Any]:
        """What provenance.json records of the training."""
        return provenance(
            command=self.command,
            device=device_name(self.accelerator.device),
            steps=self.step,
            data_sha256=self.data_sha256,
            autocast=self.recipe.precision.autocast,
            **more,
        )

    def export(
        self,
        shape: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        target: Target,
        facts: Mapping[str, Any],
        tree: Topology | Sequence[Topology] | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        """Write the drafter's folder.

        Args:
            shape, weights: of the drafter, as its loader reads them.
            facts: what provenance.json records besides.
            tree: what a drafter of --tiny proposes, which is not calibrated; of an ensemble, a tree for each part.
            parts: names of the folder's sub-folders that the drafter consists of, already written.
        """
        recipe, folder = self.recipe, self.folder
        assert isinstance(recipe, DrafterRecipe)
        if not self.main:
            return
        t = recipe.target
        own = {"target_fingerprint": self.fingerprint, "dtype": t.dtype, "init_from": recipe.init_from}
        own |= {"licence": recipe.export.licence}
        own |= {"data": [source.label for source in recipe.data.train], "max_length": recipe.data.max_length}
        own |= {"sequences_per_step": [stage.batch.sequences for stage in recipe.stages]}  # by stage, as the next two
        own |= {"optimizer": [stage.optim.name for stage in recipe.stages]}
        own |= {"learning_rate": [stage.optim.lr for stage in recipe.stages]}
        own |= {"data_labels": self.data_labels}  # tokens that training predicts, by source
        # The same, those of a row again each time it came; time of the steps, without evaluations.
        seconds = round(self.seconds, 1) if math.isfinite(self.seconds) else None
        own |= {"labels_seen": self.labels_seen, "training_seconds": seconds, **facts}
        template = template_for(recipe.data, target.tokenizer)
        if template is None and target.tokenizer is not None:  # else the folder has it
            own |= {"template_sha256": template_sha256(target.tokenizer.chat_template)}
        stored = in_dtype(weights, recipe.export.dtype)
        write_drafter(folder, self.kind, shape, stored, target, self.facts(**own), template, parts)
        if tree is not None and self.small and not (folder / "tree.json").exists():
            paths = {"paths": tree.paths} if isinstance(tree, Topology) else {"parts": [each.paths for each in tree]}
            write_json(folder / "tree.json", paths)
        if self.dry:
            return
        tau = f", simulated τ {facts['simulated_tau']:.2f}" if "simulated_tau" in facts else ""
        after = "" if recipe.export.push_to_hub else f"; next: python inference/calibrate.py {shlex.quote(str(folder))}"
        console.print(f"done: {folder}{tau}{after}")

    def publish(self) -> None:
        """Calibrate the finished drafter, by calibrate.py in a process of its own, and upload it as export.py does.

        Raises:
            ValueError: it cannot be calibrated, so that nothing is uploaded, or the Hub refuses; with what to run then.
        """
        recipe, folder = self.recipe, self.folder
        assert isinstance(recipe, DrafterRecipe) and recipe.export.push_to_hub
        repository, private, t = recipe.export.push_to_hub, recipe.export.private, recipe.target
        loaded = [f"--quantize={t.quantize}", *(["--trust-remote-code"] if t.trust_remote_code else [])]
        upload = [str(folder), "--to", "hf", "--push-to-hub", repository, *(["--private"] if private else [])]
        later = f"python inference/calibrate.py {shlex.join([str(folder), *loaded])}"
        later += f" && python models/export.py {shlex.join(upload)}"
        if sharded.spreads():
            console.print(
                f"not uploaded to {repository}: a spread target is not calibrated; in one process, run: {later}"
            )
            return
        console.print(f"calibrating, then uploading to {repository} …")
        self.accelerator.free_memory()  # for the process that loads the target again
        command = [sys.executable, "-m", "draftsmith.inference.calibrate", str(folder), *loaded]
        command += ["--device", str(self.accelerator.device)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("error: ")
            raise ValueError(
                f"not uploaded to {repository}: calibrating failed ({reason}); {folder} is whole; run: {later}"
            )
        console.print(done.stdout.strip())
        publish(str(folder), repository, private)
