"""The one training loop: plumbing only. A script's loss, data and stages are in the script.

``module(batch, counts, step) → (loss, metrics)`` is one ``nn.Module`` that owns what trains; ``step`` counts from 0 in
each stage. ``module.count(batch)`` returns the number of labels of each term of the loss; the loop sums it over
micro-batches and processes before the forward pass, so that each term is a mean over all valid tokens of the step,
however they are split. A module with a method ``labels(batch)`` finds its result in the batch of both as ``labels``,
made once.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.common.command import interruptible
from draftsmith.common.files import parse_json, write_text
from draftsmith.common.progress import ProgressBar
from draftsmith.common.sections import R, Stage
from draftsmith.models.files.identity import difference, same_target
from draftsmith.train import checkpoint, sharded
from draftsmith.train.launch import console
from draftsmith.train.loading import MicroBatches, loading
from draftsmith.train.optim import make_optimizer
from draftsmith.train.run import Run
from draftsmith.train.samples import Batch, Batches, Sampler, StageSamples
from draftsmith.train.track import Trackers

Evaluate = Callable[[nn.Module], dict[str, float]]
FIGURES = 8  # of a printed line, at most; metrics.jsonl has them all
LOG_EVERY = 10  # steps between two lines of metrics.jsonl


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep no activations of the layers: the backward pass makes them again."""
    # The second is the first's older name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


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
    """How many sequences a process runs at once (with ``micro: auto``, which with_micro replaces, one).
    Raises ValueError: a step's sequences cannot be shared out evenly; with the nearest numbers that can."""
    batch, sequences = stage.batch, stage.batch.sequences
    asked = 1 if batch.micro == "auto" else batch.micro
    field, size = ("accumulate", batch.accumulate or 1) if asked is None else ("micro", asked)
    if rest := sequences % (unit := processes * size):
        nearest = [f"sequences={number}" for number in (sequences - rest, sequences - rest + unit) if number]
        share, uneven = divmod(sequences, processes)
        if not uneven:
            nearest.append(f"{field}={max(n for n in range(1, size + 1) if not share % n)}")
        raise ValueError(
            f"{stage.name}: batch.sequences={sequences} is not a multiple of processes × {field} ({processes} × "
            f"{size}); the nearest that can be shared out: {' or '.join(nearest)}"
        )
    return sequences // unit if asked is None else asked


class _InPrecision(nn.Module):
    """A module whose forward pass runs in bfloat16 autocast, if ``enabled``. It is entered inside of what a strategy
    wraps around the module: DeepSpeed's engine switches off an autocast that is entered around it."""

    def __init__(self, module: nn.Module, device_type: str, enabled: bool) -> None:
        super().__init__()
        self.module, self.cast = module, (device_type, torch.bfloat16, enabled)

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(*self.cast):
            return self.module(*inputs)


def seed_of_step(seed: int, step: int, process: int) -> int:
    """The seed of the random numbers, those of dropout, that a process draws in a step: a function of these alone, so
    that processes drop different elements and a resumed run the same as the uninterrupted one."""
    return int(np.random.SeedSequence([seed, step, process]).generate_state(1, np.uint64)[0])


def fit(
    run: Run[R],
    stage: Stage,
    module: nn.Module,
    rows: Sequence[Batches],
    evaluate: Evaluate,
    best_on: str,
    *,
    weights: Sequence[float] | None = None,
    beside: Mapping[str, Tensor] | None = None,
    take_best: bool = True,
) -> None:
    """Train one stage of the recipe; afterwards the module has the weights of its best evaluation.

    Args:
        rows: by training source, or parts of these with their own ``weights``.
        best_on: the metric that selects weights; ``"-x"`` where less is better.
        beside: tensors whose rows are added to the batches, in turn; so is ``visit``, the number of each sample among
            all of the run.
        take_best: False: the module keeps its last weights.
    """
    stage = run.with_steps(stage, rows)
    recipe = run.recipe
    run.at_once = micro_batch(stage, run.accelerator.num_processes) * max(part.length for part in rows)
    if run.main and not run.trackers:
        run.trackers = Trackers(recipe.track, run.folder, recipe.model_dump(mode="json"))
    before = sum(earlier.samples for earlier in recipe.stages[: run.place(stage)])
    sources = recipe.data.train
    names = [s.source for s in sources] if weights is None else [f"part {place}" for place in range(len(rows))]
    sampler = Sampler(rows, weights or [s.weight for s in sources], recipe.run.seed, names)
    visits = {"visit": torch.arange(before, before + stage.samples)}
    run.depends_on |= {"run.seed": str(recipe.run.seed), "batch.sequences": str(stage.batch.sequences)}
    run.depends_on |= {"optim.name": stage.optim.name, "optim.eight_bit": str(stage.optim.eight_bit)}
    run.depends_on["evaluate.sequences"] = str(recipe.evaluate.sequences)
    samples = sampler.stage(stage.samples, before, visits | dict(beside or {}))
    optimize(run, module, samples, stage, evaluate, best_on)
    labels = samples.labels((run.step - run.first) * stage.batch.sequences)  # its seconds may have ended it
    run.labels_seen = None if run.labels_seen is None or labels is None else run.labels_seen + labels
    if take_best:
        if 0 < run.best_step < run.step:
            console.print(
                f"{stage.name}: its weights are those of step {run.best_step}, the best by {best_on.lstrip('-')}; "
                f"the steps up to {run.step} made it worse"
            )
        _take_best(run, module, stage)


def _take_best(run: Run[R], module: nn.Module, stage: Stage) -> None:
    """Give the module the weights of the stage's best evaluation, on every process those that the main one reads:
    another machine may not see yet what was just written."""
    if run.main:
        module.load_state_dict(checkpoint.read_tensors(run.checkpoints / "best" / stage.name), strict=False)
    for parameter in module.parameters():
        if parameter.requires_grad:
            broadcast(parameter.data)


def optimize(
    run: Run[R], module: nn.Module, samples: StageSamples, stage: Stage, evaluate: Evaluate, best_on: str
) -> None:
    """Run the steps of one stage.

    Args:
        evaluate: metrics of the module, before the first step, every ``evaluate.every`` steps and at the end.
        best_on: the metric that selects the weights kept in ``checkpoints/best/STAGE`` (``"-x"``: less is better).

    Raises FloatingPointError: the loss is not finite. KeyboardInterrupt: the user asked to stop, and it was saved."""
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
    module = _InPrecision(module, accelerator.device.type, recipe.precision.autocast == "bfloat16")
    module, optimizer = sharded.prepare(accelerator, module, optimizer, micro, stage.optim.clip)
    zero_2 = sharded.strategy() == "zero2"  # DeepSpeed then has the optimizer
    if start:
        kept = sharded.load(module, run.checkpoints, run.step, processes) if zero_2 else bool(optimizer.state)
        if not kept:
            console.print("  the checkpoint has no optimizer state for this launch; it begins anew", style="yellow")
    stepped: Any = torch.compile(module) if recipe.precision.compile else module
    meter, note, began = _Meter(), "", time.monotonic() - run.used
    spent = run.used / stage.seconds if stage.seconds else 0.0
    if not start:
        _evaluate(run, original, stage, evaluate, best_on)
        meter.since = time.monotonic()
    original.train()
    since = time.monotonic()
    bar = ProgressBar(stage.name, stage.num_steps, console, start=start, disable=not run.main)
    made = MicroBatches(samples, per_step, micro, per_step // processes // micro, accelerator.process_index)
    ahead = loading(made, start, stage.num_steps, recipe.data.workers, accelerator.device)
    with bar, interruptible() as stop_requested, ahead as next_batches:
        for step in range(start, stage.num_steps if spent < 1 else start):
            rate = learning_rate(stage, step, spent)
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_factor", 1.0)
            torch.manual_seed(seed_of_step(recipe.run.seed, run.step, accelerator.process_index))
            asked = time.monotonic()
            batches = next_batches()
            waited = time.monotonic() - asked
            batches = [_moved(batch, accelerator.device, later="hidden") for batch in batches]
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
            totals = _backward(run, module, stepped, batches, counts, step)
            norm = torch.as_tensor(accelerator.clip_grad_norm_(trained, stage.optim.clip))
            if not torch.isfinite(norm) or not torch.isfinite(totals["loss"]):
                where = samples.describe(range(step * per_step, (step + 1) * per_step))
                _check_features(run, original, batches, f"{stage.name}: step {run.step + 1}, {where}")
                raise FloatingPointError(
                    f"{stage.name}: loss {float(totals['loss']):.4g}, gradient norm {float(norm):.4g} at step "
                    f"{run.step + 1} on {where}; "
                    f"{'' if zero_2 else 'no weights were changed by this step. '}Lower optim.lr ({stage.optim.lr:g}) "
                    "or optim.clip, then --resume from the last checkpoint"
                )
            optimizer.step()
            optimizer.zero_grad()
            run.step += 1
            meter.add(totals, sum(batch["tokens"].numel() for batch in batches) * processes, waited)
            ends = step == stage.num_steps - 1 or spent >= 1
            if run.step % LOG_EVERY == 0 or ends:
                note = meter.log(run, stage, rate)
            bar(step + 1, note)
            run.seconds, since = run.seconds + time.monotonic() - since, time.monotonic()
            if ends:
                console.print(f"  {stage.name}: the steps are done; evaluating …")
            if ends or (step + 1) % recipe.evaluate.every == 0:
                _evaluate(run, original, stage, evaluate, best_on, note)
                since = meter.pause(since)
            stops = stop_requested() if processes == 1 else bool(stop_all)
            if ends or stops or (step + 1) % recipe.checkpoint.every == 0:
                _save(run, original, module, optimizer, stage, step + 1)
                since = meter.pause(since)
            if stops:
                raise KeyboardInterrupt(f"stopped at step {run.step}; saved. Go on with --resume")
            if ends:
                if step < stage.num_steps - 1:
                    limit = f"{stage.seconds:g} seconds"
                    console.print(f"{stage.name} ends after {step + 1} of {stage.num_steps} steps, by its {limit}")
                break
    accelerator.free_memory()


def _moved(batch: Batch, device: torch.device, later: str = "") -> Batch:
    """A batch on a device, but for the tensor ``later``: features of a whole step would need room there, and the first
    forward pass would wait for them. From pinned memory the copies are asynchronous."""
    return {key: value if key == later else value.to(device, non_blocking=True) for key, value in batch.items()}


def _backward(
    run: Run[R], module: nn.Module, stepped: Any, batches: list[Batch], counts: Tensor, step: int
) -> dict[str, Tensor]:
    """The forward and backward passes of a step's micro-batches: the loss and the metrics, summed over them."""
    accelerator, totals = run.accelerator, dict[str, Tensor]()
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        if sharded.strategy() == "zero2":
            accelerator.gradient_state.sync_gradients = last  # DeepSpeed steps after the last backward pass
        batch = _moved(batch, accelerator.device)
        synchronise = nullcontext() if last else accelerator.no_sync(module)
        with synchronise:
            loss, metrics = stepped(batch, counts, step)
        # DDP averages gradients over processes; the counts already are over all of them.
        accelerator.backward(loss * accelerator.num_processes)
        for key, value in {"loss": loss.detach(), **metrics}.items():
            totals[key] = totals.get(key, 0) + value
    return totals


@torch.no_grad()
def _check_features(run: Run[Any], module: nn.Module, batches: Sequence[Batch], where: str) -> None:
    """Find out whether a loss is not finite because of what the frozen target makes of the batches."""
    target = getattr(module, "target", None)
    if target is None or sharded.spreads():  # a forward pass of a part of it is no process's own business
        return
    from draftsmith.models.adapter import switched_off  # imports peft

    found = torch.zeros(2, device=run.accelerator.device)  # numbers of batches: kept, and made now
    with switched_off(target.model), run.autocast():
        for batch in batches:
            made = target.features(batch["tokens"].long(), getattr(module, "captures", ()), batch.get("positions"))
            kept = _moved(batch, run.accelerator.device).get("hidden", made)
            found += torch.stack([~kept.isfinite().all(), ~made.isfinite().all()])
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
        self.waited = 0.0  # seconds, for data

    def add(self, totals: dict[str, Tensor], tokens: int, waited: float) -> None:
        """A step's metrics, which stay on the device until a line is written."""
        for key, value in totals.items():
            self.sums[key] = self.sums.get(key, 0) + value
        self.steps, self.tokens, self.waited = self.steps + 1, self.tokens + tokens, self.waited + waited

    def pause(self, since: float) -> float:
        """Leave out the time since then, in which no steps were made; returns the time."""
        now = time.monotonic()
        self.since += now - since
        return now

    def log(self, run: Run[R], stage: Stage, rate: float) -> str:
        """Write the line and begin anew; returns a note for the progress bar."""
        now, accelerator = time.monotonic(), run.accelerator
        sums = {**self.sums, "data_wait": torch.tensor(self.waited, device=accelerator.device)}
        reduced: dict[str, Any] = {k: accelerator.reduce(v.float(), "sum") for k, v in sums.items()}
        share = float(reduced.pop("data_wait")) / accelerator.num_processes / (now - self.since)
        means = {k: round(float(v) / self.steps, 5) for k, v in reduced.items()}
        speed = self.tokens / (now - self.since)
        speeds = {"tokens_per_second": round(speed), "data_wait": round(share, 4)}
        run.record({"step": run.step, "stage": stage.name, **means, "lr": rate, **speeds})
        self.sums, self.steps, self.tokens, self.since, self.waited = {}, 0, 0, now, 0.0
        return f"loss {means['loss']:.3f}  {speed:,.0f} tokens/s  {share:.0%} waiting for data"


def _resume(run: Run[R], module: nn.Module, optimizer: torch.optim.Optimizer, stage: Stage) -> int | None:
    """The step of the stage to begin at, 0 or, with its weights and optimizer restored, that of the checkpoint which a
    resumed run goes on from; None if that was written in a later stage."""
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
    was = state.get("depends_on", {})  # older ones have none
    changed = {what: now for what, now in run.depends_on.items() if was.get(what, now) != now}
    another, zero_2 = changed.keys() & {"optim.name", "optim.eight_bit"}, sharded.strategy() == "zero2"
    if another and zero_2:
        raise ValueError(f"{last}: its optimizer is another one; under ZeRO-2 set {min(another)} back, or --restart")
    checkpoint.restore(last, module, None if another or zero_2 else optimizer)
    # Metrics of other rows do not compare.
    run.best = -math.inf if "evaluate.sequences" in changed else state["best"]
    run.step, run.resumed = state["step"], True
    run.best_step = state.get("best_step", 0)  # older ones have none
    run.seconds = state.get("seconds", math.nan)  # older ones have none
    run.used = state.get("used", 0.0)
    if run.main:
        checkpoint.restore_best(last, run.checkpoints / "best" / name)
        _forget_after(run.folder / "metrics.jsonl", run.step, name)
        console.print(f"resuming {name} at step {step} of {stage.num_steps}")
        if changed:
            shown = (f"{what} ({was[what]}, now {now})" if 0 < len(now) < 32 else what for what, now in changed.items())
            console.print(
                f"  since the checkpoint has changed: {', '.join(shown)}; the steps from here on, or their best, are "
                "not those of a run without a stop",
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


def _evaluate(
    run: Run[R], module: nn.Module, stage: Stage, evaluate: Evaluate, best_on: str, note: str | None = None
) -> None:
    """Record and print the module's metrics, behind the ``note`` on the steps before, and keep its weights if they are
    the best of the stage so far. Without a note they are those that the stage begins with, and only measured."""
    with run.evaluating(module):
        metrics = evaluate(module)
    module.train()
    sign, metric = (-1, best_on[1:]) if best_on.startswith("-") else (1, best_on)
    better = note is not None and sign * metrics[metric] > run.best
    if better:
        run.best, run.best_step = sign * metrics[metric], run.step
    if run.main:
        run.record({"step": run.step, "stage": stage.name, **metrics, "best": better})
        few = [k for k in metrics if len(metrics) <= FIGURES or "top5" not in k][:FIGURES]
        shown = ", ".join(f"{k} {metrics[k]:.3f}" for k in few) + (", …" if len(few) < len(metrics) else "")
        trained = f"{note.partition('  ')[0]}, " if note else ""
        when = f"before {stage.name}" if note is None else f"step {run.step}"
        console.print(f"  {when}: {trained}{shown}{' (best so far)' if better else ''}")
        if better:
            checkpoint.write_tensors(run.checkpoints / "best" / stage.name, checkpoint.trainable_state(module))
    if run.page:
        run.page.write()


def _save(run: Run[R], module: nn.Module, prepared: Any, optimizer: Any, stage: Stage, step: int) -> None:
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
        own, best = None if zero_2 else optimizer.optimizer, run.checkpoints / "best" / stage.name
        checkpoint.save(run.checkpoints, run.step, module, own, state, keep, best if run.best_step else None)
    run.accelerator.wait_for_everyone()


def _forget_after(path: Path, step: int, stage: str) -> None:
    """Drop the lines of steps that will be run again, that on the weights with which a later stage than ``stage``
    began, and a line cut off by a kill."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found = parse_json(line, str(path))
            if found["step"] < step or (found["step"] == step and found["stage"] == stage):
                kept.append(line.decode() + "\n")
        except (ValueError, LookupError, TypeError):
            continue
    write_text(path, "".join(kept))
