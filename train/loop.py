"""The one training loop: plumbing only. A script's loss, data and stages are in the script.

``module(batch, counts, step) → (loss, metrics)`` is one ``nn.Module`` that owns what trains; ``step`` counts from 0 in
each stage. ``module.count(batch)`` returns the number of labels of each term of the loss; the loop sums it over
micro-batches and processes before the forward pass, so that each term is a mean over all valid tokens of the step,
however they are split. A module with a method ``labels(batch)`` finds its result in the batch of both as ``labels``,
made once.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, Protocol

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.common.command import available_cores, interruptible, make_console
from draftsmith.common.files import append, parse_json, write_text
from draftsmith.common.progress import ProgressBar
from draftsmith.common.sections import DrafterRecipe, Precision, R, Stage, TargetSection
from draftsmith.models import precision
from draftsmith.models.files.identity import difference, same_target
from draftsmith.models.files.locate import locate
from draftsmith.models.files.weights import stored_dtype
from draftsmith.train import checkpoint, sharded
from draftsmith.train.optim import make_optimizer
from draftsmith.train.page import TrainingPage
from draftsmith.train.track import Trackers

Batch = dict[str, Tensor]
Evaluate = Callable[[nn.Module], dict[str, float]]
console = make_console()
FIGURES = 8  # of a printed line, at most; metrics.jsonl has them all
LIBRARIES = ("torch", "transformers", "tokenizers")  # with another version of which a step may differ
LOG_EVERY = 10  # steps between two lines of metrics.jsonl


def make_accelerator(wanted: Precision) -> Accelerator:
    """An ``Accelerator`` that really runs as many processes as were launched.

    Raises:
        ValueError: the launcher started another number of processes than accelerate sees.
    """
    # accelerate's launcher sets OMP_NUM_THREADS=1, which halves the speed of one process on two cores.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(wanted.threads or max(1, available_cores() // local))
    cpu = not torch.cuda.is_available()
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which others import, would look for one and warn
    if cpu and sharded.strategy() in ("zero2", "zero3"):
        sharded.leave_out_shared_memory()
    if cpu and "LOCAL_RANK" in os.environ:
        PartialState(cpu=True)  # without this, accelerate on CPU silently runs independent copies
    # Precision is the recipe's (autocast below); DeepSpeed's own would make bfloat16 of the weights that train.
    # With cpu=True accelerate would leave DeepSpeed out; the processes are on the CPU already.
    with sharded.hidden_from_accelerate():
        accelerator = Accelerator(mixed_precision="no", cpu=cpu and sharded.strategy() != "zero2")
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched but accelerate sees {accelerator.num_processes}; on CPU launch with "
            "--multi_gpu --num_processes N (sic) or torchrun, not --cpu"
        )
    return accelerator


def with_precision(recipe: R, accelerator: Accelerator, resume: bool = False) -> R:
    """The recipe with what ``precision.autocast: auto`` and ``target.dtype: auto`` are on this device, printed
    in a line, with a warning where that is slow here.

    Args:
        resume: ``auto`` is what the run's newest checkpoint was trained with.

    Raises:
        FileNotFoundError, ValueError: on a GPU, the target's config cannot be read.
    """
    newest = checkpoint.checkpoints(recipe.run.folder / "checkpoints")[-1:] if resume else []
    began = checkpoint.read_state(newest[0]) if newest else {}
    device, target = accelerator.device, getattr(recipe, "target", None)  # not every recipe has one
    cast = precision.choose_autocast(recipe.precision.autocast, device, began.get("autocast"))
    dtype, update = precision.Choice("float32", ""), {}
    if target is not None:
        dtype = dtype_of(target, device, began.get("dtype"))
        update["target"] = target.model_copy(update={"dtype": dtype.value})
    if accelerator.is_main_process:
        for line in precision.describe(device, dtype, cast):
            console.print(line, style="yellow" if line.startswith("warning") else None)
    update["precision"] = recipe.precision.model_copy(update={"autocast": cast.value})
    return recipe.model_copy(update=update)


def dtype_of(
    target: TargetSection, device: torch.device, began: str | None = None, weights: int = 0
) -> precision.Choice:
    """:func:`draftsmith.models.precision.choose_dtype` for a recipe's target, by its config alone."""

    def stored() -> str:
        return stored_dtype(locate(target.name, target.revision, weights=False).path)

    quantized = target.quantize != "none"
    return precision.choose_dtype(target.dtype, device, stored, quantized=quantized, began=began, weights=weights)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep no activations of the layers: the backward pass makes them again."""
    # The second is the first's older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@dataclass
class RunState(Generic[R]):
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
    depends_on: what else the steps depend on, by name: hashes, and versions of libraries.
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
    depends_on: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in LIBRARIES})
    resumed: bool = False

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


def learning_rate(stage: Stage, step: int, spent: float = 0.0) -> float:
    """The learning rate of step ``step`` (from 0) of a stage: linear warm-up, then the schedule, which would reach
    ``final_lr`` in the step after the last, or when the share ``spent`` of the stage's seconds is 1."""
    o = stage.optim
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    done = min(1.0, max((step - o.warmup_steps) / max(1, stage.num_steps - o.warmup_steps), spent))
    if o.schedule == "constant":
        return o.lr
    decay = 1 - done if o.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return o.lr * (o.final_lr + (1 - o.final_lr) * decay)


def micro_batch(stage: Stage, processes: int) -> int:
    """How many sequences a process runs at once.

    Raises:
        ValueError: the stage's sequences cannot be shared out evenly.
    """
    sequences, accumulate = stage.batch.sequences, stage.batch.accumulate
    if sequences % (processes * accumulate):
        raise ValueError(
            f"{stage.name}: batch.sequences={sequences} is not a multiple of processes × accumulate "
            f"({processes} × {accumulate}); lower accumulate, or raise sequences"
        )
    return sequences // processes // accumulate


class Samples(Protocol):
    """The samples of a stage: a pure function of their numbers, counted from 0, so that a resumed run sees what the
    uninterrupted one would have seen."""

    def __call__(self, numbers: range) -> Batch:
        """The batch of these samples."""
        ...

    def describe(self, numbers: range) -> str:
        """Where they come from, for the message about a loss that is not finite."""
        ...


def fit(run: RunState[R], module: nn.Module, samples: Samples, stage: Stage, evaluate: Evaluate, best_on: str) -> None:
    """Train one stage.

    Args:
        evaluate: metrics of the module, every ``evaluate.every`` steps and at the end.
        best_on: the metric that selects the weights kept in ``checkpoints/best/STAGE`` (``"-x"``: less is better).

    Raises:
        FloatingPointError: the loss is not finite.
        KeyboardInterrupt: the user asked to stop; a checkpoint was written first.
    """
    run.best, run.best_step, run.first, run.used = -math.inf, 0, run.step, 0.0
    accelerator, recipe = run.accelerator, run.recipe
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_optimizer(module, stage.optim)
    start = _resume(run, module, optimizer, stage)
    if start is None:
        return
    if run.page:
        run.page.begin(stage, start, best_on)
    per_step, processes = stage.batch.sequences, accelerator.num_processes
    micro = micro_batch(stage, processes)
    original: Any = module
    module, optimizer = sharded.prepare(accelerator, module, optimizer, micro, stage.optim.clip)
    zero_2 = sharded.strategy() == "zero2"  # DeepSpeed then has the optimizer
    if start:
        kept = sharded.load(module, run.checkpoints, run.step, processes) if zero_2 else bool(optimizer.state)
        if not kept and run.main:
            console.print("  the checkpoint has no optimizer state for this launch; it begins anew", style="yellow")
    stepped: Any = torch.compile(module) if recipe.precision.compile else module
    meter, note, began = _Meter(), "", time.monotonic() - run.used
    spent = run.used / stage.seconds if stage.seconds else 0.0
    original.train()
    since = time.monotonic()
    bar = ProgressBar(stage.name, stage.num_steps, console, start=start, disable=not run.main)
    with bar, interruptible() as stop_requested:
        for step in range(start, stage.num_steps if spent < 1 else start):
            rate = learning_rate(stage, step, spent)
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_factor", 1.0)
            numbers = range(step * per_step, (step + 1) * per_step)
            mine = numbers[accelerator.process_index * micro * stage.batch.accumulate :]
            batches = [samples(mine[i * micro : (i + 1) * micro]) for i in range(stage.batch.accumulate)]
            batches = [{k: v.to(accelerator.device) for k, v in batch.items()} for batch in batches]
            if labels := getattr(original, "labels", None):
                batches = [{**batch, "labels": labels(batch)} for batch in batches]
            counts = torch.stack([original.count(b) for b in batches]).sum(0).float()
            # A signal does not reach all processes at the same moment, nor do their clocks agree; they have to stop at
            # the same step, which the main process's clock decides.
            used = (time.monotonic() - began) / stage.seconds if stage.seconds and run.main else 0.0
            stop = counts.new_tensor([float(stop_requested()), used])
            reduced: Any = accelerator.reduce(torch.cat([counts, stop]), "sum")
            counts, stop_all = reduced[:-2], reduced[-2]
            if stage.seconds:
                spent = float(reduced[-1])
                run.used = spent * stage.seconds
            totals: dict[str, Tensor] = {}
            for i, batch in enumerate(batches):
                last = i == len(batches) - 1
                if zero_2:
                    accelerator.gradient_state.sync_gradients = last  # DeepSpeed steps after the last backward pass
                synchronise = nullcontext() if last else accelerator.no_sync(module)
                with synchronise, run.autocast():
                    loss, metrics = stepped(batch, counts, step)
                # DDP averages gradients over processes; the counts already are over all of them.
                accelerator.backward(loss * processes)
                for key, value in {"loss": loss.detach(), **metrics}.items():
                    totals[key] = totals.get(key, 0) + value
            norm = torch.as_tensor(accelerator.clip_grad_norm_(trained, stage.optim.clip))
            if not torch.isfinite(norm) or not torch.isfinite(totals["loss"]):
                _check_features(
                    run, original, batches, f"{stage.name}: step {run.step + 1}, {samples.describe(numbers)}"
                )
                raise FloatingPointError(
                    f"{stage.name}: loss {float(totals['loss']):.4g}, gradient norm {float(norm):.4g} at step "
                    f"{run.step + 1} on {samples.describe(numbers)}; "
                    f"{'' if zero_2 else 'no weights were changed by this step. '}Lower optim.lr ({stage.optim.lr:g}) "
                    "or optim.clip, then --resume from the last checkpoint"
                )
            optimizer.step()
            optimizer.zero_grad()
            run.step += 1
            meter.add(totals, sum(batch["tokens"].numel() for batch in batches) * processes)
            ends = step == stage.num_steps - 1 or spent >= 1
            if run.step % LOG_EVERY == 0 or ends:
                note = meter.log(run, stage, rate)
            bar(step + 1, note)
            run.seconds, since = run.seconds + time.monotonic() - since, time.monotonic()
            if ends and run.main:
                console.print(f"  {stage.name}: the steps are done; evaluating …")
            if ends or (step + 1) % recipe.evaluate.every == 0:
                _evaluate(run, original, stage, evaluate, best_on, note)
                meter.since = since = time.monotonic()
            stops = stop_requested() if processes == 1 else bool(stop_all)
            if ends or stops or (step + 1) % recipe.checkpoint.every == 0:
                _save(run, original, module, optimizer, stage, step + 1)
                meter.since = since = time.monotonic()
            if stops:
                raise KeyboardInterrupt(f"stopped at step {run.step}; saved. Go on with --resume")
            if ends:
                if run.main and step < stage.num_steps - 1:
                    limit = f"{stage.seconds:g} seconds"
                    console.print(f"{stage.name} ends after {step + 1} of {stage.num_steps} steps, by its {limit}")
                break
    accelerator.free_memory()


@torch.no_grad()
def _check_features(run: RunState[Any], module: nn.Module, batches: Sequence[Batch], where: str) -> None:
    """Find out whether a loss is not finite because of what the frozen target makes of the batches.

    Raises:
        FloatingPointError: it is.
    """
    target = getattr(module, "target", None)
    if target is None or sharded.spreads():  # a forward pass of a part of it is no process's own business
        return
    from draftsmith.models.adapter import switched_off  # imports peft

    found = torch.zeros(2, device=run.accelerator.device)  # numbers of batches: kept, and made now
    with switched_off(target.model), run.autocast():
        for batch in batches:
            made = target.features(batch["tokens"].long(), getattr(module, "captures", ()), batch.get("positions"))
            found += torch.stack([~batch.get("hidden", made).isfinite().all(), ~made.isfinite().all()])
    kept, now = (float(count) for count in run.accelerator.reduce(found, "sum"))  # every process comes here at once
    if now:
        raise FloatingPointError(
            f"{where}: the target's hidden states are not finite in {target.dtype}; set target.dtype to bfloat16 or "
            "float32, or leave these rows out"
        )
    if kept:
        raise FloatingPointError(
            f"{where}: the hidden states in {run.folder / 'features'} are not finite, and the target makes others; "
            "delete that folder, then --resume"
        )


class _Meter:
    """Means over the steps since the last line of ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.sums, self.steps, self.tokens, self.since = dict[str, Tensor](), 0, 0, time.monotonic()

    def add(self, totals: dict[str, Tensor], tokens: int) -> None:
        """A step's metrics, which stay on the device until a line is written."""
        for key, value in totals.items():
            self.sums[key] = self.sums.get(key, 0) + value
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens

    def log(self, run: RunState[R], stage: Stage, rate: float) -> str:
        """Write the line and begin anew; returns a note for the progress bar."""
        now = time.monotonic()
        reduced: dict[str, Any] = {k: run.accelerator.reduce(v.float(), "sum") for k, v in self.sums.items()}
        means = {k: round(float(v) / self.steps, 5) for k, v in reduced.items()}
        speed = self.tokens / (now - self.since)
        run.record({"step": run.step, "stage": stage.name, **means, "lr": rate, "tokens_per_second": round(speed)})
        self.sums, self.steps, self.tokens, self.since = {}, 0, 0, now
        return f"loss {means['loss']:.3f}  {speed:,.0f} tokens/s"


def _resume(run: RunState[R], module: nn.Module, optimizer: torch.optim.Optimizer, stage: Stage) -> int | None:
    """The step of the stage to begin at, 0 or, with its weights and optimizer restored, that of the checkpoint which a
    resumed run goes on from; None if that was written in a later stage.

    Raises:
        ValueError: the checkpoint is another target's, or the recipe does not reach it.
    """
    if not run.resume or run.resumed:
        return 0
    name, stages = stage.name, [each.name for each in run.recipe.stages]
    last = checkpoint.checkpoints(run.checkpoints)[-1]
    state = checkpoint.read_state(last)
    trained_for = str(state.get("target", run.fingerprint))  # older ones have none
    if not same_target(trained_for, run.fingerprint) and trained_for != run.older_fingerprint:
        raise ValueError(
            f"{last}: it was trained for another target: {difference(trained_for, run.fingerprint)}; set target back, "
            "or --restart"
        )
    step = state["step"] - run.first
    if state["stage"] not in stages or (state["stage"] == name and step > stage.num_steps):
        raise ValueError(
            f"{last}: it is at step {step} of stage '{state['stage']}', which the recipe (stages {', '.join(stages)}; "
            f"'{name}' has {stage.num_steps} steps) does not reach; raise steps, or --restart"
        )
    if state["stage"] != name:
        run.step = run.first + stage.num_steps
        return None
    if state.get("stage_step", step) != step:
        raise ValueError(
            f"{last}: it was written at step {state['stage_step']} of stage '{name}', which begins elsewhere now: "
            "the steps of a stage before it have changed; set them back, or --restart"
        )
    checkpoint.restore(last, module, None if sharded.strategy() == "zero2" else optimizer)
    run.best, run.step, run.resumed = state["best"], state["step"], True
    run.best_step = state.get("best_step", 0)  # older ones have none
    run.seconds = state.get("seconds", math.nan)  # older ones have none
    run.used = state.get("used", 0.0)
    if run.main:
        _forget_after(run.folder / "metrics.jsonl", run.step)
        console.print(f"resuming {name} at step {step} of {stage.num_steps}")
        was = state.get("depends_on", {})  # older ones have none
        changed = {what: now for what, now in run.depends_on.items() if was.get(what, now) != now}
        if changed:
            named = (f"{what} ({was[what]}, now {now})" if what in LIBRARIES else what for what, now in changed.items())
            console.print(
                f"  since the checkpoint has changed: {', '.join(named)}; the steps from here on are not to the bit "
                "those of a run without a stop",
                style="yellow",
            )
        rate = learning_rate(stage, step, run.used / stage.seconds if stage.seconds else 0.0)
        if not math.isclose(before := state.get("lr", rate), rate, rel_tol=1e-6):  # older ones have none
            console.print(
                f"  the learning rate goes on from {rate:.3g}, not from {before:.3g}: steps, seconds or optim are not "
                "those that the checkpoint was written with",
                style="yellow",
            )
    return step


def _evaluate(run: RunState[R], module: nn.Module, stage: Stage, evaluate: Evaluate, best_on: str, note: str) -> None:
    """Record and print the module's metrics, behind the ``note`` on the steps before, and keep its weights if they are
    the best of the stage so far."""
    with run.evaluating(module):
        metrics = evaluate(module)
    module.train()
    sign, metric = (-1, best_on[1:]) if best_on.startswith("-") else (1, best_on)
    better = sign * metrics[metric] > run.best
    if better:
        run.best, run.best_step = sign * metrics[metric], run.step
    if run.main:
        run.record({"step": run.step, "stage": stage.name, **metrics, "best": better})
        few = [k for k in metrics if len(metrics) <= FIGURES or "top5" not in k][:FIGURES]
        shown = ", ".join(f"{k} {metrics[k]:.3f}" for k in few) + (", …" if len(few) < len(metrics) else "")
        trained = f"{note.partition('  ')[0]}, " if note else ""
        console.print(f"  step {run.step}: {trained}{shown}{' (best so far)' if better else ''}")
        if better:
            checkpoint.write_tensors(run.checkpoints / "best" / stage.name, checkpoint.trainable_state(module))
    if run.page:
        run.page.write()


def _save(run: RunState[R], module: nn.Module, prepared: Any, optimizer: Any, stage: Stage, step: int) -> None:
    """Write a checkpoint after ``step`` steps of the stage. ``prepared``: the module under the launcher's strategy."""
    zero_2, keep = sharded.strategy() == "zero2", run.recipe.checkpoint.keep
    if zero_2:
        sharded.save(prepared, run.checkpoints, run.step, keep)
    if run.main:
        state = {"stage": stage.name, "best": run.best, "stage_step": step, "target": run.fingerprint}
        state |= {"best_step": run.best_step, "depends_on": run.depends_on}
        state |= {"autocast": run.recipe.precision.autocast, "dtype": run.dtype}
        state |= {"seconds": round(run.seconds, 3)} if math.isfinite(run.seconds) else {}
        state |= {"used": run.used} if stage.seconds else {}
        state |= {"lr": learning_rate(stage, step, run.used / stage.seconds if stage.seconds else 0.0)}  # the next one
        if not zero_2:
            sharded.forget(run.checkpoints)
        checkpoint.save(run.checkpoints, run.step, module, None if zero_2 else optimizer.optimizer, state, keep)
    run.accelerator.wait_for_everyone()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that will be run again, and a line cut off by a kill."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):
        try:
            if parse_json(line, str(path))["step"] <= step:
                kept.append(line.decode() + "\n")
        except (ValueError, LookupError, TypeError):
            continue
    write_text(path, "".join(kept))
