"""How long training will take, judged from a few passes."""

import pytest

from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train import expect
from draftsmith.train.recipe import Answers, Evaluate, Optim, Stage


@pytest.fixture(scope="module")
def target(tiny_lm):
    return load_target(str(tiny_lm))


def stage(steps, sequences=4):
    return Stage.model_validate({"optim": Optim(lr=1e-3), "batch": {"sequences": sequences}, "steps": steps})


def test_each_part_is_work_times_its_measured_time(target, monkeypatch):
    """With every pass taking a second: rows and steps times what one of them takes."""

    def a_second(run):
        run()
        return 1.0

    monkeypatch.setattr(expect, "_seconds", a_second)
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    asked = [Answers(prompts=640, prompt_tokens=24, new_tokens=8, batch_size=5), Answers(prompts=64, prompt_tokens=24)]
    found = expect.training_seconds(target, heads, asked, 320, stage(70), Evaluate(every=30, sequences=32))
    assert found == {
        "answers": pytest.approx(1 / 16 * 24 / 32 * 704),  # both decodings take as long, so a step takes nothing
        "hidden states": 320 / 16,
        "steps": 70.0,
        "evaluation": 3 * 32 / 16,
    }
    assert all(tensor.equal(before[name]) and tensor.grad is None for name, tensor in heads.state_dict().items())
    uncached = expect.training_seconds(target, heads, asked, 0, stage(70), Evaluate(every=30, sequences=32))
    assert uncached["hidden states"] == 70 * 4 / 16


def test_real_passes_take_time(target):
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    asked = [Answers(prompts=100, prompt_tokens=24, new_tokens=8, batch_size=5)]
    found = expect.training_seconds(target, heads, asked, 100, stage(50, 64), Evaluate(every=10, sequences=32))
    assert all(0 < seconds < 60 for seconds in found.values())


def test_a_large_target_is_not_tried(target, monkeypatch):
    monkeypatch.setattr(expect, "SMALL", 100)
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    assert expect.training_seconds(target, heads, [Answers(prompts=9)], 9, stage(1), Evaluate()) is None
