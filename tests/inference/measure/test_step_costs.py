"""Step costs by rows: measured, kept, and interpolated."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.step import Step, static_by_default
from draftsmith.inference.measure import step_costs as costs
from draftsmith.inference.measure.step_costs import StepCosts, draft_time, step_costs
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels.measured import read_measured
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target


def test_interpolation_and_extrapolation():
    its = StepCosts({1: 2e-3, 4: 3e-3, 8: 5e-3})
    assert [its.relative(rows) for rows in (1, 2, 4, 6, 8, 12)] == pytest.approx([1, 1 + 0.5 / 3, 1.5, 2.0, 2.5, 3.5])
    assert its.seconds(2, 128, 2) == pytest.approx(3e-3), "of two rows and two nodes each"
    longer = StepCosts({1: 2e-3, 4: 3e-3, 8: 5e-3}, per_key=1e-6, per_key_and_node=1e-7)
    assert longer.seconds(2, 1128, 2) == pytest.approx(3e-3 + 1000 * 2 * (1e-6 + 2e-7))
    disturbed = StepCosts({1: 2e-3, 2: 9e-3, 4: 3e-3})
    assert disturbed.relative(2) == pytest.approx(1.5), "two rows never cost more than four"
    assert StepCosts({1: 2.0}).relative(11) == pytest.approx(2.0), "only one size was timed"


def test_timed_once_and_kept(tiny_lm, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "ROUNDS", costs.MIN_ROUNDS)  # as many as are kept, however long they take
    monkeypatch.setattr(costs, "SECONDS", 60.0)
    target = load_target(str(tiny_lm))
    first = step_costs(target)
    assert first.plain_seconds > 0 and all(cost >= 1 for _, cost in first.points) and first.points[-1][0] >= 8
    (kept,) = read_measured(costs.FILE).values()
    assert kept["rows"]["1"] >= first.plain_seconds and min(kept["per_key"], kept["per_key_and_node"]) >= 0
    monkeypatch.setattr(costs, "_measure", None)
    assert step_costs(target).points == first.points, "not measured again"
    with pytest.raises(TypeError):
        step_costs(target, lean=False)  # another decoder has other costs
    with pytest.raises(TypeError):
        step_costs(load_target(str(tiny_lm), dtype="bfloat16"))  # and another dtype


def test_measured_again_a_few_times(tiny_lm, tmp_path, monkeypatch):
    """What is measured again replaces what was kept; after some times that is all."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    target = load_target(str(tiny_lm))
    measured = []

    def measure(target, lean, seconds):
        measured.append(seconds)
        return costs.StepCosts({1: 1.0 / len(measured), 8: 2.0}), costs.MIN_ROUNDS

    monkeypatch.setattr(costs, "_measure", measure)
    found = costs.step_costs(target, tries=2)
    assert found.again is not None
    found = found.again()
    assert found.plain_seconds == 0.5 and found.again is not None
    assert costs.step_costs(target).plain_seconds == 0.5  # kept
    found = found.again()
    assert found.plain_seconds == pytest.approx(1 / 3) and found.again is None
    assert costs.step_costs(target, tries=0).again is None and len(measured) == 3


def test_draft_time(make_target):
    target = make_target("llama")
    drafter = MedusaDrafter(MedusaHeads.for_target(target, 2, 1, "shared"), Topology(((0,), (0, 0))), target)
    assert 0 < draft_time(drafter, target, StepCosts({1: 1.0, 2: 1.5})) < 0.1, "in plain steps of a second"


def test_on_a_gpu_steps_and_drafts_are_those_of_graphs(make_target, monkeypatch):
    """Where the engine's steps are static, so are those that are timed; drafts are timed by replays if a graph can hold
    them. Static steps and drafts run here on the CPU, and a function stands for the timer of a graph."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    cases = [(gpu, False, True), (gpu, True, False), (cpu, False, False)]
    for at, spread, its in cases:
        assert static_by_default(cast(Any, SimpleNamespace(device=at, spread=spread))) == its
    target = make_target("llama")
    assert not SpeculativeDecoder(target).static
    steps, drafters, replays = [], [], []

    class Watched(Step):
        def advance(self):
            steps.append((self, self.static, self.runner.static))
            return super().advance()

    class Allocated(MedusaDrafter):
        def allocate(self, cache, max_depth, static):
            drafters.append(static)
            super().allocate(cache, max_depth, static)

    def graph_timer(calls, device):
        replays.append(len(calls))
        for call in calls:
            call()
        return 0.25

    drafter = Allocated(MedusaHeads.for_target(target, 2, 1, "shared"), Topology(((0,), (0, 0))), target)
    its = StepCosts({1: 0.5, 2: 1.5})
    monkeypatch.setattr(costs, "Step", Watched)
    monkeypatch.setattr(costs, "gpu_seconds", graph_timer)
    monkeypatch.setattr(costs, "ROUNDS", 1)
    monkeypatch.setattr(costs, "SECONDS", 60.0)
    for on_gpu in (False, True):
        monkeypatch.setattr(costs, "static_by_default", lambda _, on_gpu=on_gpu: on_gpu)
        monkeypatch.setattr(costs, "_can_be_captured", lambda _, on_gpu=on_gpu: on_gpu)
        assert step_costs(target).plain_seconds > 0
        assert {(static, runner) for _, static, runner in steps} == {(on_gpu, on_gpu)}
        assert len({step for step, *_ in steps}) == 5 and len(steps) == 5 * (1 + costs.REPEATS)
        found = draft_time(drafter, target, its)
        assert drafters == [on_gpu] and bool(replays) == on_gpu and (found == 0.5) == on_gpu
        steps.clear()
        drafters.clear()
    monkeypatch.setattr(costs, "_can_be_captured", lambda _: False)
    assert draft_time(drafter, target, its) < 0.1 and replays == [1], "steps would be eager, too"


def test_a_target_with_a_tiny_context(make_target):
    """If no tree of several nodes fits, only a plain step is timed."""
    its = step_costs(make_target("llama", max_position_embeddings=3))
    assert its.points[0] == (1, 1.0) and its.relative(11) == pytest.approx(2.0)
