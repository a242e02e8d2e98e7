"""The loop on a toy model."""

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from training_runs import FORKED, become, both

from draftsmith.common import progress
from draftsmith.common.sections import Precision, Stage, TrainingRecipe
from draftsmith.train import checkpoint, launch, loop
from draftsmith.train.folders import begin
from draftsmith.train.run import Run

VOCAB, WIDTH, LENGTH = 13, 8, 6


class Toy(nn.Module):
    """Predicts each token's label from the token; the number of labels differs from sample to sample."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.dropout = nn.Dropout(dropout)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def count(self, batch):
        return (batch["labels"] != -100).sum().view(1)

    def forward(self, batch, counts, step):
        logits = self.out(self.dropout(self.embed(batch["tokens"])))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        hits = (logits.argmax(-1) == batch["labels"]).sum()
        return loss * batch["poison"].max() / counts[0], {"top1": hits / counts[0]}


def sample(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=generator)
    labels = (tokens * 5 + 1) % VOCAB
    labels[: number % LENGTH] = -100  # 1 to 6 labels
    return {"tokens": tokens, "labels": labels, "poison": torch.ones(())}


def samples(numbers: range) -> dict[str, torch.Tensor]:
    rows = [sample(n) for n in numbers]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def stage(steps=8, sequences=4, accumulate=None, micro=None, name="toy", seconds=None, **optim) -> Stage:
    optim = {"lr": 0.05, "schedule": "constant", **optim}
    batch = {"sequences": sequences, "accumulate": accumulate, "micro": micro}
    limits = {"steps": steps, "seconds": seconds}
    return Stage.model_validate({"name": name, "optim": optim, "batch": batch, **limits})


def evaluate(module):
    batch = samples(range(1000, 1016))
    loss, _ = module(batch, module.count(batch), 0)
    return {"validation_loss": float(loss)}


class Samples:
    """What ``make`` makes of numbers, as the loop takes it."""

    sequential = False

    def __init__(self, make) -> None:
        self.make = make

    def __call__(self, numbers: range) -> dict[str, torch.Tensor]:
        return self.make(numbers)

    def describe(self, numbers: range) -> str:
        return f"{numbers.start} to {numbers.stop - 1}"


def fit(run, module, stage, make=samples, evaluate=evaluate) -> None:
    loop.optimize(run, module, Samples(make), stage, evaluate, "-validation_loss")


def job(folder: Path, resume=False, every=4, keep=2, evaluate_every=3, stages=("toy",)) -> Run:
    content = {
        "run": {"name": folder.name, "output_dir": str(folder.parent)},
        "data": {"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib", "split": "validation"}]},
        "precision": {"autocast": "none"},
        "checkpoint": {"every": every, "keep": keep},
        "evaluate": {"every": evaluate_every},
        "stages": [stage(name=name).model_dump() for name in stages],
    }
    recipe = TrainingRecipe.model_validate(content)
    return Run(recipe, "toy", launch.make_accelerator(Precision(threads=1)), resume, "")


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- learning rate


def test_learning_rate():
    linear = stage(steps=110, lr=1.0, warmup_steps=10, schedule="linear", final_lr=0.1)
    assert loop.learning_rate(linear, 0) == pytest.approx(0.1)
    assert loop.learning_rate(linear, 9) == loop.learning_rate(linear, 10) == pytest.approx(1.0)
    assert loop.learning_rate(linear, 60) == pytest.approx(0.55)
    assert loop.learning_rate(linear, 109) == pytest.approx(0.1, abs=0.01)
    cosine = stage(steps=100, lr=2.0, schedule="cosine")
    assert loop.learning_rate(cosine, 0) == pytest.approx(2.0)
    assert loop.learning_rate(cosine, 25) == pytest.approx(1 + math.cos(math.pi / 4))
    assert loop.learning_rate(cosine, 50) == pytest.approx(1.0)
    assert loop.learning_rate(cosine, 99) == pytest.approx(0.0, abs=0.001)
    assert loop.learning_rate(stage(steps=3, lr=2.0), 2) == 2.0
    assert loop.learning_rate(stage(steps=5, lr=1.0, warmup_steps=5), 4) == 1.0  # nothing but warm-up


def test_learning_rate_by_seconds():
    """What is further on decides: the steps or the share of the seconds."""
    linear = stage(steps=110, lr=1.0, warmup_steps=10, schedule="linear", final_lr=0.1)
    assert loop.learning_rate(linear, 9, 0.9) == pytest.approx(1.0), "warm-up has its steps"
    assert loop.learning_rate(linear, 10, 0.5) == loop.learning_rate(linear, 60, 0.3) == pytest.approx(0.55)
    assert loop.learning_rate(linear, 10, 1.0) == loop.learning_rate(linear, 10, 7.0) == pytest.approx(0.1)
    assert loop.learning_rate(stage(steps=100, lr=2.0, schedule="cosine"), 3, 0.25) == pytest.approx(
        1 + math.cos(math.pi / 4)
    )
    assert loop.learning_rate(stage(steps=3, lr=2.0), 0, 1.0) == 2.0


# ---- a limit in seconds


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still: ``clock[0]`` are its seconds."""
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    return now


def timed(clock, seconds_each, make=samples):
    """Samples, each batch of which takes so long."""

    def take(numbers: range) -> dict[str, torch.Tensor]:
        clock[0] += seconds_each
        return make(numbers)

    return take


LIMITED = {"steps": 1000, "schedule": "linear", "final_lr": 0.1, "seconds": 60.0}


def test_a_stage_ends_by_its_seconds(tmp_path, clock, monkeypatch, capsys):
    """12 steps of 5 seconds: the schedule ends with them, the last weights are evaluated and saved, and a line says
    so."""
    rates, rate = [], loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda *arguments: rates.append(rate(*arguments)) or rates[-1])
    run = job(tmp_path, every=100, evaluate_every=100)
    fit(run, Toy(), stage(**LIMITED), timed(clock, 5))
    assert rates.pop() == pytest.approx(0.05 * 0.1), "which the checkpoint keeps"
    assert run.step == len(rates) == 12
    assert rates == pytest.approx([0.05 * (1 - 0.9 * used / 12) for used in range(12)], rel=1e-4)
    assert rates[-1] < 0.05 * 0.2, "near final_lr, of which a twelfth is left"
    assert "toy ends after 12 of 1000 steps, by its 60 seconds\n" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 12] and lines[-2]["lr"] == rates[-1]
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-12"]


def test_labels_are_those_of_the_steps_that_ran(tmp_path, clock, monkeypatch):
    """12 of 1,000 steps of four samples, after a stage that was trained before a stop."""

    class Counted(Samples):
        def labels(self, first):
            return 10 * first

    made = SimpleNamespace(stage=lambda *_: Counted(timed(clock, 5)))
    monkeypatch.setattr(loop, "Sampler", lambda *_: made)
    run = job(tmp_path, every=100, evaluate_every=100)
    run.step, run.labels_seen = 7, 90
    loop.fit(run, stage(**LIMITED), Toy(), [SimpleNamespace(length=3)], evaluate, "-validation_loss")
    assert (run.step, run.labels_seen) == (7 + 12, 90 + 10 * 12 * 4)


def test_evaluations_and_checkpoints_are_within_the_seconds(tmp_path, clock):
    def slow(module):
        clock[0] += 20
        return evaluate(module)

    run = job(tmp_path, evaluate_every=2)
    fit(run, Toy(), stage(**LIMITED), timed(clock, 5), slow)
    assert run.step == 4, "before the first step and after the second an evaluation of 20 seconds: 20 5 5 20 5 5"


def test_steps_that_are_done_before_the_limit_change_nothing(tmp_path, clock, capsys):
    """The weights are those of the stage without one, bit for bit."""
    found = []
    for seconds in (None, 1e6):
        toy, folder = Toy(), tmp_path / str(seconds)
        folder.mkdir()
        fit(job(folder), toy, stage(schedule="cosine", seconds=seconds), timed(clock, 0.01))
        found.append(weights(toy))
    assert same(*found) and "by its" not in capsys.readouterr().out


def test_a_run_that_its_seconds_ended_is_not_trained_again(tmp_path, clock, capsys):
    """Nor evaluated, unless it is given more of them."""
    toy, again, more = Toy(), Toy(), Toy()
    fit(job(tmp_path), toy, stage(**LIMITED), timed(clock, 5))
    before = (tmp_path / "metrics.jsonl").read_text()
    run = job(tmp_path, resume=True)
    fit(run, again, stage(**LIMITED), timed(clock, 5))
    assert run.step == 12 and same(weights(again), weights(toy))
    assert (tmp_path / "metrics.jsonl").read_text() == before
    run = job(tmp_path, resume=True)
    fit(run, more, stage(**LIMITED | {"seconds": 80.0}), timed(clock, 5))
    assert run.step == 16 and not same(weights(more), weights(toy))


def test_an_interrupted_run_has_the_seconds_that_are_left(tmp_path, clock):
    """And the weights of the run that nothing interrupted, up to the rounding of the seconds."""

    def interrupted(numbers: range) -> dict[str, torch.Tensor]:
        if numbers.start == 4 * 6:  # the seventh step
            os.kill(os.getpid(), signal.SIGINT)
        return samples(numbers)

    whole, parts = Toy(), Toy()
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    fit(job(tmp_path / "whole"), whole, stage(**LIMITED), timed(clock, 5))
    with pytest.raises(KeyboardInterrupt, match="stopped at step 7; saved"):
        fit(job(tmp_path / "parts"), Toy(), stage(**LIMITED), timed(clock, 5, interrupted))
    clock[0] += 1e5  # until it is resumed
    run = job(tmp_path / "parts", resume=True)
    fit(run, parts, stage(**LIMITED), timed(clock, 5))
    assert run.step == 12
    for name, weight in weights(parts).items():
        torch.testing.assert_close(weight, weights(whole)[name], atol=0.05 / 1e4, rtol=0)


def test_only_the_last_stage_is_limited_in_seconds(tmp_path):
    content = job(tmp_path, stages=("first", "second")).recipe.model_dump()
    content["stages"][1]["seconds"] = 9
    assert TrainingRecipe.model_validate(content).stages[1].seconds == 9
    content["stages"][0]["seconds"] = 9
    with pytest.raises(ValueError, match="stages: only the last one can be limited in seconds; the others have steps"):
        TrainingRecipe.model_validate(content)
    content["stages"] = [content["stages"][1] | {"seconds": 0}]
    with pytest.raises(ValueError, match="greater than 0"):
        TrainingRecipe.model_validate(content)


# ---- what a step computes


def reference(steps: int, norms: list[float] | None = None) -> dict[str, torch.Tensor]:
    """The same training, written out: 4 samples a step, weight decay 0.1, gradients clipped to 0.5; ``norms`` gets
    those of its gradients."""
    toy = Toy()
    groups = [
        {"params": [toy.embed.weight, toy.out.weight], "weight_decay": 0.1},
        {"params": [toy.out.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95))
    for step in range(steps):
        batch = samples(range(step * 4, step * 4 + 4))
        loss = F.cross_entropy(toy.out(toy.embed(batch["tokens"])).flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([p for p in toy.parameters() if p.requires_grad], 0.5)
        if norms is not None:
            norms.append(float(norm))
        optimizer.step()
    return weights(toy)


@pytest.mark.parametrize("split", [{}, {"accumulate": 2}, {"accumulate": 4}, {"micro": 4}, {"micro": 1}])
def test_a_step_is_the_mean_over_all_its_labels(split, tmp_path):
    """However the sequences are split; the micro-batches have 3 to 15 labels. AdamW divides by a gradient's size, so
    that the error of a small one shows in full: a hundredth of the learning rate is no difference."""
    toy = Toy()
    fit(job(tmp_path), toy, stage(**split, weight_decay=0.1, clip=0.5))
    expected = reference(8)
    for name, weight in weights(toy).items():
        torch.testing.assert_close(weight, expected[name], atol=0.05 / 100, rtol=0)
    assert not torch.equal(toy.out.weight, Toy().out.weight)


def rank_of_two(rank: int, port: int, folder: Path) -> None:
    """What one of two processes does; the gradient norms of its steps go to a file of its own."""
    become(rank, port)
    run, norms = job(folder, evaluate_every=100), []
    clip = run.accelerator.clip_grad_norm_

    def noted(*arguments):
        norms.append(float(clip(*arguments)))
        return norms[-1]

    run.accelerator.clip_grad_norm_ = noted
    fit(run, Toy(), stage(accumulate=2, weight_decay=0.1, clip=0.5))
    (folder / f"norms-{rank}.json").write_text(json.dumps(norms))


class Dropping(Toy):
    """With dropout; ``masks`` are what it drops of a row of ones, by step."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.masks: dict[int, list[bool]] = {}

    def forward(self, batch, counts, step):
        if self.training:
            self.masks[step] = (self.dropout(torch.ones(64)) == 0).tolist()
        return super().forward(batch, counts, step)


def resumed_of_two(rank: int, port: int, folder: Path, ends_at: int | None, resume: bool) -> None:
    """A rank of a run that ends abruptly at a step, or goes on; the moments it goes on with, and what it drops, go to
    files of its own."""
    become(rank, port)
    loop.LOG_EVERY = 1
    restore = checkpoint.restore

    def noted(path, module, optimizer):
        state = restore(path, module, optimizer)
        moments = checkpoint._optimizer_tensors(module, optimizer)
        torch.save(moments, folder / f"moments-{rank}")
        return state

    checkpoint.restore = noted

    def ending(numbers: range) -> dict[str, torch.Tensor]:
        if ends_at is not None and numbers.start >= ends_at * 4:
            os._exit(3)
        return samples(numbers)

    run = job(folder, resume=resume, evaluate_every=100)
    toy = Dropping()
    fit(run, toy, stage(schedule="cosine", warmup_steps=2, weight_decay=0.1), ending)
    (folder / f"masks-{rank}.json").write_text(json.dumps(toy.masks))


@FORKED
def test_two_processes_resume_as_if_they_had_not_stopped(tmp_path):
    """With the moments, the learning rates, the dropout and so the weights of a run without the stop."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
    assert both(resumed_of_two, whole, None, False) == [0, 0]
    assert both(resumed_of_two, stopped, 6, False) == [3, 3]
    assert [path.name for path in checkpoint.checkpoints(stopped / "checkpoints")] == ["step-4"]
    kept = load_file(stopped / "checkpoints/step-4/optimizer.safetensors")
    assert both(resumed_of_two, stopped, None, True) == [0, 0]
    for rank in (0, 1):
        moments = torch.load(stopped / f"moments-{rank}")
        assert moments.keys() == kept.keys() and all(torch.equal(moments[name], kept[name]) for name in kept)
        assert {name.split("|")[1] for name, moment in moments.items() if moment.any()} == {
            "step",
            "exp_avg",
            "exp_avg_sq",
        }
    rates = [
        [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines() if '"lr"' in line]
        for folder in (whole, stopped)
    ]
    assert rates[0] == rates[1] == [loop.learning_rate(stage(schedule="cosine", warmup_steps=2), n) for n in range(8)]
    found, wanted = (checkpoint.read_tensors(folder / "checkpoints/step-8") for folder in (stopped, whole))
    assert same(found, wanted)
    masks = [
        [json.loads((folder / f"masks-{rank}.json").read_text()) for rank in (0, 1)] for folder in (whole, stopped)
    ]
    assert [list(of_rank) for of_rank in masks[1]] == [["4", "5", "6", "7"]] * 2, "of the steps after the stop"
    assert all(masks[0][rank][step] == mask for rank in (0, 1) for step, mask in masks[1][rank].items())
    every = [tuple(mask) for of_rank in masks[0] for mask in of_rank.values()]
    assert len(set(every)) == len(every) == 16, "each process and step drops others"


def test_a_schedule_that_moves_is_said(tmp_path, capsys):
    """In one line, where a finished run gets more steps, and where the optimizer's section changes; else not at all."""
    fit(job(tmp_path), Toy(), stage(steps=4, schedule="linear", final_lr=0))
    for steps, lr, said in (
        (4, 0.05, ""),
        (8, 0.05, "from 0.025, not from 0:"),
        (12, 0.01, "from 0.00667, not from 0:"),
    ):
        folder = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{steps}")))
        capsys.readouterr()
        fit(job(folder, resume=True), Toy(), stage(steps=steps, schedule="linear", final_lr=0, lr=lr))
        lines = [line for line in capsys.readouterr().out.splitlines() if "learning rate goes on" in line]
        assert len(lines) == bool(said)
        assert all(said in line for line in lines)


def evaluated(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranks and sums of five held-out rows, two at a time: three batches."""
    tokens = samples(range(5))["tokens"]
    run.held_out, run.at_once = {"tokens": tokens, "supervised": tokens > 3}, 2 * LENGTH
    ranks = run.held_out_ranks(lambda part, marks: torch.where(marks, part, -1)[..., None])
    return ranks, run.held_out_sums(lambda part, marks: torch.stack([marks.sum(), (part * marks).sum()]).double())


def evaluated_of_two(rank: int, port: int, folder: Path) -> None:
    become(rank, port)
    torch.save(evaluated(job(folder)), folder / f"evaluated-{rank}")


def test_ranks_of_the_same_weights_are_not_computed_again(tmp_path):
    run, calls, module = job(tmp_path), [], nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))
    run.held_out = {"tokens": (tokens := samples(range(3))["tokens"]), "supervised": tokens > 3}

    def ranks(part, marks):
        calls.append(len(calls))
        return torch.full_like(part, len(calls))[..., None]

    first, again = (run.held_out_ranks(ranks, module) for _ in range(2))
    assert again is first and len(calls) == 1
    with torch.no_grad():
        module[1].weight.add_(1)  # which does not train
        assert run.held_out_ranks(ranks, module) is first
        module[0].weight[0, 0].add_(1)
    assert int(run.held_out_ranks(ranks, module).max()) == 2
    assert int(run.held_out_ranks(ranks).max()) == 3, "without a module always"


@FORKED
def test_two_processes_share_the_held_out_rows(tmp_path):
    """Each gets what one process finds, though one has a batch less."""
    assert both(evaluated_of_two, tmp_path) == [0, 0]
    tokens = samples(range(5))["tokens"]
    for ranks, sums in (evaluated(job(tmp_path)), *(torch.load(tmp_path / f"evaluated-{rank}") for rank in (0, 1))):
        assert torch.equal(ranks[..., 0], torch.where(tokens > 3, tokens, -1))
        assert sums.tolist() == [int((tokens > 3).sum()), int(tokens[tokens > 3].sum())]


@FORKED
def test_gradients_over_two_processes_are_the_whole_batchs(tmp_path):
    """Forked, so that they need not import torch again. Each has another number of labels; AdamW would hide a factor,
    the norms do not."""
    assert both(rank_of_two, tmp_path) == [0, 0]
    norms: list[float] = []
    expected = reference(8, norms)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"norms-{rank}.json").read_text()) == pytest.approx(norms, rel=1e-4)
    saved = checkpoint.read_tensors(tmp_path / "checkpoints/step-8")
    for name, weight in saved.items():
        torch.testing.assert_close(weight, expected[name], atol=0.05 / 100, rtol=0)
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines() if '"loss"' in text]
    losses = [toy_loss(step, reference(step)) for step in range(8)]
    assert line["loss"] == pytest.approx(sum(losses) / 8, abs=1e-4)


def toy_loss(step, weights):
    """Of the four samples of a step, under these weights."""
    toy, batch = Toy(), samples(range(step * 4, step * 4 + 4))
    toy.load_state_dict(weights, strict=False)
    return float(toy(batch, toy.count(batch), 0)[0].detach())


def test_metrics_are_means_over_labels(tmp_path):
    fit(job(tmp_path, evaluate_every=100), Toy(), stage(steps=12, lr=1e-12, accumulate=2))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 12, 12]
    losses = [toy_loss(step, Toy().state_dict()) for step in range(12)]
    assert lines[1]["loss"] == pytest.approx(sum(losses[:10]) / 10, abs=1e-4)
    assert lines[2]["loss"] == pytest.approx(sum(losses[10:]) / 2, abs=1e-4)
    assert "validation_loss" in lines[0] and "validation_loss" in lines[3]


def test_an_evaluation_is_without_dropout_and_training_goes_on_with_it(tmp_path):
    modes = []

    class Watched(Toy):
        def forward(self, batch, counts, step):
            modes.append(self.training and self.dropout.training)
            return super().forward(batch, counts, step)

    fit(job(tmp_path, evaluate_every=1), Watched(0.3), stage(steps=3))
    assert modes == [False, *[True, False] * 3]


def test_some_parameters_learn_faster(tmp_path):
    """AdamW's first step is as long as its learning rate."""
    toy, before = Toy(), Toy()
    toy.lr_factors = {"out.": 4.0}
    fit(job(tmp_path), toy, stage(steps=1, lr=1e-3))
    for name, factor in (("embed.weight", 1), ("out.weight", 4), ("out.bias", 4)):
        moved = (weights(toy)[name] - weights(before)[name]).abs().max()
        assert float(moved) == pytest.approx(factor * 1e-3, rel=1e-3), name


def test_the_best_weights_are_kept(tmp_path):
    run = job(tmp_path, evaluate_every=1)
    values = iter([0.5, 3.0, 1.0, 1.0, 5.0])  # the first of equals; what the stage begins with is only measured
    seen = []

    def evaluate(module):
        seen.append(weights(module))
        return {"validation_loss": next(values)}

    fit(run, Toy(), stage(steps=4), evaluate=evaluate)
    assert run.best == -1.0
    seen[2].pop("frozen")
    assert same(checkpoint.read_tensors(run.checkpoints / "best/toy"), seen[2])


def test_the_best_weights_are_of_the_run_that_went_on(tmp_path):
    """A checkpoint has those of its time: a later evaluation had replaced them when the run was killed."""

    def run(values, resume):
        given = iter(values)
        evaluate = lambda module: {"validation_loss": next(given)}  # noqa: E731
        fit(job(tmp_path, resume, every=2, evaluate_every=1), Toy(), stage(steps=5), evaluate=evaluate)

    with pytest.raises(StopIteration):  # in the place of a kill, at step 4
        run([9.0, 5.0, 3.0, 2.0], False)
    (last,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    wanted = checkpoint.read_tensors(last)
    assert not same(checkpoint.read_tensors(tmp_path / "checkpoints/best/toy"), wanted)
    run([4.0, 4.0, 4.0], True)
    assert same(checkpoint.read_tensors(tmp_path / "checkpoints/best/toy"), wanted)


# ---- stopping and going on


def train(folder: Path, resume: bool, kill_at: int | None = None, how: int = signal.SIGKILL) -> Toy:
    """Two stages of 6 and 8 steps of 4 samples, a checkpoint every 4 steps of a stage and at its end."""
    folder.mkdir(exist_ok=True)
    run = job(folder, begin(folder, resume, False), stages=("first", "second"))
    toy = Toy(dropout=0.3)
    torch.manual_seed(5)
    seen = 0

    def interrupted(numbers: range) -> dict[str, torch.Tensor]:
        nonlocal seen
        seen += len(numbers)
        if kill_at is not None and seen - len(numbers) <= kill_at < seen:
            os.kill(os.getpid(), how)
        return samples(numbers)

    fit(run, toy, stage(steps=6, schedule="cosine", name="first"), interrupted)
    second = stage(steps=8, accumulate=2, schedule="linear", warmup_steps=2, name="second")
    fit(run, toy, second, interrupted)
    return toy


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k in ("step", "stage", "validation_loss", "best")} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return weights(train(folder, False)), metrics(folder)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, uninterrupted):
    killed = multiprocessing.get_context("fork").Process(target=train, args=(tmp_path, False, 46))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert [p.name for p in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-6", "step-10"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "los')  # as a kill in the middle of a write leaves it
    (tmp_path / "checkpoints/.step-14.tmp").mkdir()
    assert same(weights(train(tmp_path, True)), uninterrupted[0])
    found, wanted = ([m for m in each if "validation_loss" in m] for each in (metrics(tmp_path), uninterrupted[1]))
    assert found == wanted


@pytest.mark.parametrize("kill_at", [0, 9, 20, 24, 53])
def test_an_interrupted_run_is_saved_and_goes_on_bit_for_bit(kill_at, tmp_path, uninterrupted):
    with pytest.raises(KeyboardInterrupt, match=f"stopped at step {kill_at // 4 + 1}; saved. Go on with --resume"):
        train(tmp_path, False, kill_at, signal.SIGINT)
    assert same(weights(train(tmp_path, True)), uninterrupted[0])


def test_a_finished_run_is_not_trained_again(tmp_path, uninterrupted):
    """And a damaged checkpoint of it is a clear error."""
    train(tmp_path, False)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert same(weights(train(tmp_path, True)), uninterrupted[0])
    assert (tmp_path / "metrics.jsonl").read_text() == before
    seconds = json.loads((tmp_path / "checkpoints/step-14/state.json").read_text())["seconds"]
    assert 0 < seconds < 100
    again = job(tmp_path, resume=True, stages=("second",))
    again.step = 6
    fit(again, Toy(dropout=0.3), stage(steps=8, accumulate=2, name="second"))
    assert again.seconds == seconds, "those of the steps before"
    state = tmp_path / "checkpoints/step-14/state.json"
    state.write_text(state.read_text()[:9])
    with pytest.raises(ValueError, match="damaged checkpoint"):
        train(tmp_path, True)


def test_a_recipe_that_ends_before_the_checkpoint_is_a_clear_error(tmp_path):
    fit(job(tmp_path), Toy(), stage(steps=8))
    with pytest.raises(ValueError, match=r"step-8: it is at step 8 of stage 'toy'.* has 5 steps\) does not reach"):
        fit(job(tmp_path, resume=True), Toy(), stage(steps=5))
    with pytest.raises(ValueError, match="stages other; 'other' has 8 steps"):
        fit(job(tmp_path, resume=True, stages=("other",)), Toy(), stage(steps=8, name="other"))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    toy = Toy()

    def poisoned(numbers: range) -> dict[str, torch.Tensor]:
        batch = samples(numbers)
        if 18 in numbers:  # the fifth step
            batch["poison"] *= float("nan")
        return batch

    with pytest.raises(FloatingPointError, match=r"toy: loss nan.* at step 5 on 16 to 19; no weights .*optim\.lr"):
        fit(job(tmp_path), toy, stage(), poisoned)
    (last,) = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert last.name == "step-4"
    saved = checkpoint.read_tensors(last)
    assert saved.keys() == {"embed.weight", "out.weight", "out.bias"}
    assert all(torch.equal(saved[name], weights(toy)[name]) for name in saved)


@pytest.mark.parametrize("kept", [False, True])
def test_a_target_that_overflows_is_named(tmp_path, kept):
    """Its rows and its dtype, not the learning rate; where only kept hidden states are damaged, their folder."""

    def features(tokens, captures, positions):
        return tokens[..., None].float() * (
            float("inf") if not kept and int(tokens[0, 0]) == int(sample(16)["tokens"][0]) else 1
        )

    def poisoned(numbers: range) -> dict[str, torch.Tensor]:
        batch = samples(numbers) | {"hidden": torch.zeros(len(numbers), LENGTH, 1)}
        if 18 in numbers:  # the fifth step
            batch["poison"] *= float("nan")
            batch["hidden"][1, 2] = float("nan")
        return batch if kept else {name: part for name, part in batch.items() if name != "hidden"}

    toy = Toy()
    toy.__dict__["target"] = SimpleNamespace(model=nn.Linear(1, 1), dtype=torch.float16, features=features)
    said = "toy: step 5, 16 to 19: the target's hidden states are not finite in torch.float16; set target.dtype to "
    if kept:
        said = r"toy: step 5, 16 to 19: the hidden states in .*/features are not finite, and .*; delete that folder"
    with pytest.raises(FloatingPointError, match=said):
        fit(job(tmp_path), toy, stage(), poisoned)


def test_batch_must_divide_over_processes(tmp_path, monkeypatch):
    run = job(tmp_path)
    monkeypatch.setattr(launch.Accelerator, "num_processes", property(lambda self: 3))
    said = r"batch\.sequences=4 is not a multiple of processes × accumulate \(3 × 1\); the nearest .*: sequences=3 or "
    with pytest.raises(ValueError, match=f"{said}sequences=6$"):
        fit(run, Toy(), stage())


@pytest.mark.parametrize(
    "batch, processes, wanted",
    [
        ({"sequences": 64, "micro": 2}, 1, 2),
        ({"sequences": 64, "micro": 2}, 8, 2),
        ({"sequences": 64, "micro": 2}, 32, 2),
        ({"sequences": 64, "accumulate": 4}, 8, 2),
        ({"sequences": 64}, 8, 8),
        ({"sequences": 64, "micro": "auto"}, 8, 1),
        ({"sequences": 64, "micro": 2}, 64, "processes × micro (64 × 2); … out: sequences=128 or micro=1"),
        ({"sequences": 48, "micro": 4}, 8, "processes × micro (8 × 4); … out: sequences=32 or sequences=64 or micro=3"),
        ({"sequences": 64, "micro": 2}, 12, "processes × micro (12 × 2); … out: sequences=48 or sequences=72"),
        ({"sequences": 64, "micro": "auto"}, 12, "processes × micro (12 × 1); … out: sequences=60 or sequences=72"),
        ({"sequences": 48, "accumulate": 4}, 8, "accumulate (8 × 4); … sequences=32 or sequences=64 or accumulate=3"),
    ],
)
def test_one_recipe_for_any_number_of_processes(batch, processes, wanted):
    """What cannot be shared out is said with the nearest that can, and that can."""
    given = stage(**batch)
    if isinstance(wanted, int):
        assert loop.micro_batch(given, processes) == wanted
        return
    begin, end = wanted.split("…")
    with pytest.raises(ValueError, match=f"^toy: batch.sequences=.*{re.escape(begin)}.*{re.escape(end)}$") as caught:
        loop.micro_batch(given, processes)
    nearest = re.findall(r"(sequences|micro|accumulate)=(\d+)", str(caught.value).split("shared out:")[1])
    for name, value in nearest:
        assert loop.micro_batch(stage(**batch | {name: int(value)}), processes) > 0


def test_a_launcher_that_ran_other_processes_is_found_out(monkeypatch):
    launch.make_accelerator(Precision(threads=1))  # accelerate has looked at the environment before
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were launched but accelerate sees 1; on CPU launch with"):
        launch.make_accelerator(Precision(threads=1))


def test_the_time_left_is_said_once_it_is_known(monkeypatch, capsys):
    """After the first of many it would be a guess; parts of one count."""
    monkeypatch.setattr(progress, "LINE_EVERY", -1.0)
    with progress.ProgressBar("answers", 40, launch.console) as bar:
        for count in (0, 0.5, 3.9, 4.0, 20.5, 40):
            bar(count)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "answers …" and lines[:3] == ["  answers 0/40", "  answers 0/40", "  answers 3/40"]
    assert [re.fullmatch(r"  answers (\d+)/40  \d+ s left", line).group(1) for line in lines[3:]] == ["4", "20", "40"]
