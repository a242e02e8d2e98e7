"""The arithmetic of a training step."""

import pytest

from draftsmith.benchmarks import train_step
from draftsmith.models.adapter import add_lora
from draftsmith.models.medusa import MedusaHeads
from draftsmith.train.medusa import Medusa1, Medusa2, MedusaStage

pytestmark = pytest.mark.measurement


def test_operations(make_target):
    """By hand, for two layers of width 32: attention 32·32 + 2·32·16 + 32·32, MLP 3·32·48, vocabulary 61."""
    inside, head = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 61 * 32
    target = make_target("llama")
    module = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "own"))
    blocks = 3 * 32 * 32
    assert train_step.operations(target, module, 10) == 10 * (2 * inside + 6 * blocks + 6 * 3 * head)
    shared = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "shared"))
    assert train_step.operations(target, shared, 10) == 10 * (2 * inside + 6 * blocks + 4 * 3 * head)
    add_lora(target, 4, 8, 0.0, ["q_proj", "o_proj"])
    stage = MedusaStage.model_validate({"optim": {"lr": 1e-3}, "batch": {"sequences": 4}, "steps": 4, "joint": {}})
    both = Medusa2(target, shared.heads, stage)
    lora = 2 * 2 * 4 * (32 + 32)
    expected = 10 * (6 * inside + 6 * head + 6 * (blocks + lora) + 4 * 3 * head)
    assert train_step.operations(target, both, 10) == expected
