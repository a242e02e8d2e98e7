"""How long training will take, judged from small pieces of it."""

import time

import pytest
import torch

from draftsmith.common.sections import Answers, Evaluate, Optim, Stage
from draftsmith.inference.answers import answer
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train import expect
from draftsmith.train.medusa_loss import Medusa1


@pytest.fixture(scope="module")
def target(tiny_lm):
    return load_target(str(tiny_lm))


def stage(steps, sequences=4):
    return Stage.model_validate({"optim": Optim(lr=1e-3), "batch": {"sequences": sequences}, "steps": steps})


def test_each_part_is_work_times_its_measured_time(target, monkeypatch):
    """With every pass taking a second, and a step of decoding half of one."""

    def a_second(run):
        run()
        return 1.0

    monkeypatch.setattr(expect, "_seconds", a_second)
    monkeypatch.setattr(expect, "_step_seconds", lambda *_: 0.5)
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    asked = [Answers(prompts=640, prompt_tokens=24, new_tokens=8, batch_size=5), Answers(prompts=64, prompt_tokens=24)]
    evaluate = Evaluate(every=30, sequences=32)
    found = expect.training_seconds(target, heads, asked, 320, stage(70), evaluate)
    assert found == {
        "answers": pytest.approx((640 + 64) * 1 / 4 * 24 / 32 + 640 * 8 * 0.5 / 5 + 64 * 128 * 0.5 / 5),
        "hidden states": 320 / 4,
        "steps": 70 * 4 / 2,
        "evaluation": 3 * 32 / 4,
    }
    uncached = expect.training_seconds(target, heads, asked, 0, stage(70), evaluate)
    assert uncached == {**found, "hidden states": 70 * 4 / 4}


def test_nothing_is_left_behind(target, monkeypatch):
    """A run that was told how long it takes is the same to the bit as one that was not."""

    def refuse(*_):
        raise AssertionError("training's own passes are counted, by training and by its tests")

    monkeypatch.setattr(Medusa1, "forward", refuse)
    monkeypatch.setattr(Medusa1, "count", refuse)
    heads = MedusaHeads.for_target(target, 3, 1, "own")
    before = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    weights = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    state, training = torch.get_rng_state(), target.model.training
    expect.training_seconds(target, heads, [Answers(prompts=9, prompt_tokens=24)], 9, stage(5), Evaluate())
    assert torch.get_rng_state().equal(state) and target.model.training == training
    assert all(tensor.equal(before[name]) for name, tensor in heads.state_dict().items())
    assert all(tensor.equal(weights[name]) for name, tensor in target.model.state_dict().items())
    assert all(p.grad is None for p in [*heads.parameters(), *target.model.parameters()])


def test_it_is_about_right(target):
    """Generously: other work comes and goes while this is timed. A time of all rows taken for one's is 32 times it."""
    ask = Answers(prompts=64, prompt_tokens=24, new_tokens=40, batch_size=32)
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    found = expect.training_seconds(target, heads, [ask], 64, stage(50, 64), Evaluate(every=10, sequences=32))
    assert all(seconds > 0 for seconds in found.values())
    prompts = torch.randint(target.vocab_size, (64, 24), generator=torch.Generator().manual_seed(1)).tolist()
    began = time.perf_counter()
    made = answer(target, prompts, 40, 32)["supervised"].sum()
    real = (time.perf_counter() - began) * 64 * 40 / float(made)
    assert real / 6 < found["answers"] < real * 6


def test_it_takes_a_moment():
    """Of the bundled target, at the sizes of `make demo`: little beside the minutes that it foretells."""
    target = load_target("models/tiny-lm")
    heads = MedusaHeads.for_target(target, 4, 2, "shared")
    asked = [Answers(prompts=2048, prompt_tokens=96, new_tokens=128, batch_size=96)]
    began = time.process_time()
    found = expect.training_seconds(target, heads, asked, 2048, stage(500, 16), Evaluate(every=500, sequences=96))
    assert time.process_time() - began < 8, "1.3 s of one core with AVX2"
    assert found["answers"] > found["evaluation"]


def test_what_is_not_tried(target, monkeypatch):
    """A context that is too short for what is asked: the run itself says so. A large target."""
    heads = MedusaHeads.for_target(target, 3, 1, "shared")

    def seconds(prompt_tokens):
        asked = [Answers(prompts=2, prompt_tokens=prompt_tokens, new_tokens=2)]
        return expect.training_seconds(target, heads, asked, 9, stage(1), Evaluate())

    assert seconds(target.context - expect.STEPS - 3) and seconds(target.context - expect.STEPS - 2) is None
    monkeypatch.setattr(expect, "SMALL", 100)
    assert seconds(20) is None
