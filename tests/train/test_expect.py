"""How long training will take, judged from small pieces of it."""

import time

import pytest
import torch

from draftsmith.common.sections import Data
from draftsmith.inference.answers import answer
from draftsmith.inference.ranks import head_ranks
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train import expect
from draftsmith.train.medusa import Medusa1, MedusaRecipe


@pytest.fixture(scope="module")
def target(tiny_lm):
    return load_target(str(tiny_lm))


def recipe_of(steps=70, sequences=4, cached=False, evaluate_every=30, held_out=32, **ask):
    ask = {"prompts": 640, "prompt_tokens": 24, "new_tokens": 8, "batch_size": 5, **ask}
    source = {"source": "stdlib", "answers": ask}
    return MedusaRecipe.model_validate(
        {
            "run": {"name": "x"}, "target": {"name": "t"}, "drafter": {"num_draft_heads": 3},
            "data": {"train": [source], "validation": [{**source, "answers": {**ask, "prompts": 64}}]},
            "stages": [{"optim": {"lr": 1e-3}, "batch": {"sequences": sequences}, "steps": steps}],
            "cache_hidden": "memory" if cached else "none",
            "evaluate": {"every": evaluate_every, "sequences": held_out},
        }
    )  # fmt: skip


def ranks(module, held_out):
    head_ranks(module.target, module.heads, held_out["tokens"], held_out["supervised"])


def test_each_part_is_work_times_its_measured_time(target, monkeypatch):
    """With every pass taking a second, and a step of decoding half of one."""

    def a_second(run):
        run()
        return 1.0

    monkeypatch.setattr(expect, "_seconds", a_second)
    monkeypatch.setattr(expect, "_step_seconds", lambda *_: 0.5)
    module = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "shared"))
    found = expect.training_seconds(target, module, ranks, recipe_of(cached=True))
    assert found == {
        "answers": pytest.approx((640 + 64) * 1 / 4 * 24 / 32 + (640 + 64) * 8 * 0.5 / 5),
        "hidden states": 640 / 4,
        "steps": 70 * 4 / 2,
        "evaluation": 3 * 32 / 4,
    }
    uncached = expect.training_seconds(target, module, ranks, recipe_of())
    assert uncached == {name: seconds for name, seconds in found.items() if name != "hidden states"}


@pytest.mark.parametrize("cached", [False, True])
def test_nothing_is_left_behind(target, cached):
    """A run whose time was estimated is the same to the bit as one whose time was not."""
    module = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "own"))
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state, modes = torch.get_rng_state(), [part.training for part in module.modules()]
    expect.training_seconds(target, module, ranks, recipe_of(cached=cached))
    assert torch.get_rng_state().equal(state) and [part.training for part in module.modules()] == modes
    assert all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


class DropsOut(Medusa1):
    """With dropout and a parameter that no loss reaches, as other families have."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.unused = torch.nn.Parameter(torch.zeros(3))

    def forward(self, batch, counts, step):
        loss, metrics = super().forward(batch, counts, step)
        return torch.nn.functional.dropout(loss, 0.5), metrics


def test_random_numbers_are_drawn_again(target):
    module = DropsOut(target, MedusaHeads.for_target(target, 3, 1, "own"))
    state = torch.get_rng_state()
    assert expect.training_seconds(target, module, ranks, recipe_of())
    assert torch.get_rng_state().equal(state)


def test_it_is_about_right(target):
    """Generously: other work comes and goes while this is timed. A time of all rows taken for one's is 32 times it."""
    module = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "shared"))
    recipe = recipe_of(50, 64, True, 10, prompts=64, new_tokens=40, batch_size=32)
    found = expect.training_seconds(target, module, ranks, recipe)
    assert all(seconds > 0 for seconds in found.values())
    prompts = torch.randint(target.vocab_size, (64, 24), generator=torch.Generator().manual_seed(1)).tolist()
    began = time.perf_counter()
    made = answer(target, prompts, 40, 32)["supervised"].sum()
    real = 2 * (time.perf_counter() - began) * 64 * 40 / float(made)
    assert real / 16 < found["answers"] < real * 16


def test_it_takes_a_moment():
    """Of the bundled target, at the sizes of `make demo`: little beside the minutes that it estimates."""
    target = load_target("models/tiny-lm")
    module = Medusa1(target, MedusaHeads.for_target(target, 4, 2, "shared"))
    recipe = recipe_of(500, 16, True, 500, 96, prompts=2048, prompt_tokens=96, new_tokens=128, batch_size=96)
    began = time.process_time()
    found = expect.training_seconds(target, module, ranks, recipe)
    assert time.process_time() - began < 8, "1.3 s of one core with AVX2"
    assert found["answers"] > found["evaluation"]


def test_what_is_not_tried(target, monkeypatch):
    """A context that is too short for the answers, which the run itself says; other text; a large target."""
    module = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "shared"))

    def seconds(prompt_tokens, **fields):
        recipe = recipe_of(prompt_tokens=prompt_tokens, new_tokens=5).model_copy(update=fields)
        return expect.training_seconds(target, module, ranks, recipe)

    assert seconds(target.context - expect.STEPS - 6) and seconds(target.context - expect.STEPS - 5) is None
    text = {"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib"}]}
    assert seconds(20, data=Data.model_validate(text)) is None
    monkeypatch.setattr(expect, "SMALL", 100)
    assert seconds(20) is None
