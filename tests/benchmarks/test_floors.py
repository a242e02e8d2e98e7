"""Floors by hand; no goal of `make gpu` is below its floor on any of several devices."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.benchmarks.floors import BOUNDARY, JUDGED, Device, Work, goal
from draftsmith.benchmarks.gpu import kernel_judges as gpu_judges
from draftsmith.benchmarks.options import SHAPES
from draftsmith.benchmarks.shapes import grow_tree, random_heads, works_of_step
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.target import Target

# Copy bandwidth and matrix rate of the order of an H200, an H100, an A100 and an L4.
DEVICES = [Device(4.3e12, 7.9e14), Device(2.9e12, 7.5e14), Device(1.7e12, 2.6e14), Device(2.6e11, 1e14)]
SHARES = (gpu_judges.STEP, gpu_judges.ATTENTION, gpu_judges.SHORTLIST)


def test_floors_by_hand():
    device = Device(4e12, 1e15)
    read, multiply = Work(8e9, 1e9, 3), Work(4e6, 5e12)
    assert device.bound(read) == ("bytes", 2e-3) and device.bound(multiply) == ("operations", 5e-3)
    assert device.floor([read, multiply]) == pytest.approx(7e-3 + 3 * BOUNDARY)
    found = goal(device, [read, multiply], {"bytes": 0.8, "operations": 0.5})
    assert found.seconds == pytest.approx(2.5e-3 + 10e-3 + 3 * BOUNDARY)
    assert found.floor == device.floor([read, multiply])
    for size, judged in ((1.1 * JUDGED, True), (0.9 * JUDGED, False)):
        assert goal(device, [Work(size * 4e12)], {"bytes": 0.5}).judged is judged


def test_a_goal_below_its_floor_is_refused():
    with pytest.raises(ValueError, match="a goal of 0.00174 s is below the floor of 0.002 s"):
        goal(Device(4e12, 1e15), [Work(8e9)], {"bytes": 1.15})


@pytest.fixture(scope="module")
def targets():
    """Of a real model's sizes, without its weights."""
    made = {}
    for name in ("llama2-7b", "llama3-8b"):
        with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Target, "_check", lambda self: None)  # which runs the model
            config = LlamaConfig(**SHAPES[name])
            made[name] = Target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), None, name, "")
            made[name].kv_shapes = [(config.num_key_value_heads, 128)] * config.num_hidden_layers
    return made


@pytest.mark.parametrize("device", DEVICES, ids=["H200", "H100", "A100", "L4"])
def test_no_goal_is_below_its_floor(targets, device, monkeypatch):
    """Steps of both shapes, with what their heads read: a fixed ratio to the plain step may be out of reach."""
    monkeypatch.setattr("draftsmith.benchmarks.shapes.check_fits", lambda *_: None)
    for shares in SHARES:
        for work in (Work(1e9), Work(1e3, 1e13), Work(4e6, 1.14e9, 1)):
            assert goal(device, [work], shares).seconds >= device.floor([work])
    assert all(0 < share <= 1 for share in gpu_judges.TRAINING.values()) and gpu_judges.NOISE >= 1
    for target in targets.values():
        for context in (1024, 16384):
            plain = goal(device, works_of_step(target, None, Topology(()), 1, context), gpu_judges.STEP)
            for projection in ("shared", "own"):
                works = works_of_step(target, random_heads(target, 5, projection), grow_tree(64, 5), 1, context)
                found = goal(device, works, gpu_judges.STEP)
                assert found.seconds > found.floor > plain.floor and found.judged


def test_what_was_out_of_reach(targets, monkeypatch):
    """Goals that were written down once, by what they need on the first device."""
    monkeypatch.setattr("draftsmith.benchmarks.shapes.check_fits", lambda *_: None)
    h200 = DEVICES[0]
    for name, least in (("llama2-7b", 1.03), ("llama3-8b", 1.08)):  # 1.10 × plain left 2 % for 64 nodes' own work
        target = targets[name]
        works = works_of_step(target, random_heads(target, 5, "shared"), grow_tree(64, 5), 1, 1024)
        plain = works_of_step(target, None, Topology(()), 1, 1024)
        ratio = sum(work.moved for work in works) / sum(work.moved for work in plain)
        assert ratio == pytest.approx(least, abs=5e-3)
    attention = Work(2 * 2 * 8 * 1088 * 128 + 2 * 2 * 64 * 32 * 128, 4 * 64 * 32 * 1088 * 128, 1)  # L = 1,024, N = 64
    assert not goal(h200, [attention], gpu_judges.ATTENTION).judged, "60 % of the matrix rate were 2.4 µs"
    small = Work(49152 // 5 * 576 * 2)
    assert not goal(h200, [small], gpu_judges.SHORTLIST).judged, "80 % of the bandwidth were 3.3 µs"
    assert goal(h200, [Work(128256 // 5 * 4096 * 2)], gpu_judges.SHORTLIST).judged
