"""The memory that --dry-run computes, beside what PyTorch allocates in the same steps on this CPU."""

import pytest
import torch
from allocations import peak_of
from training_runs import Runs, write_recipe

from draftsmith.benchmarks import memory_by_part
from draftsmith.benchmarks.shapes import config_of
from draftsmith.common.recipe import read_recipe
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.target import load_target
from draftsmith.train import dflash, eagle, lm, loop, medusa, memory, ssm
from draftsmith.train.machine import Machine
from draftsmith.train.memory import Micro, target_pass

LENGTH, NEAR = 128, 0.15
TEXT = {which: [{"source": "stdlib", "split": which, "limit": 40}] for which in ("train", "validation")}
RECIPES = {
    "eagle-3": (eagle, {"version": 3, "unroll": 5}, ["drafter.draft_vocab_size=200"]),
    "eagle-3, the target's LM head": (eagle, {"version": 3, "unroll": 3, "projection": "shared"}, []),
    "eagle-3 of three layers": (eagle, {"version": 3, "unroll": 5, "num_layers": 3, "projection": "shared"}, []),
    "eagle-3 of three layers, recomputed": (
        eagle,
        {"version": 3, "unroll": 5, "num_layers": 3, "draft_vocab_size": 200},
        ["precision.gradient_checkpointing=true"],
    ),
    "eagle-1": (eagle, {"version": 1}, []),
    "dflash": (dflash, {"block_size": 4, "num_layers": 2, "anchors": 32}, []),
    "medusa": (medusa, {"num_draft_heads": 4, "num_layers": 2}, []),
    "medusa, the target's LM head": (medusa, {"num_draft_heads": 3, "projection": "shared"}, []),
    "medusa, one micro-batch": (medusa, {"num_draft_heads": 4}, ["stages.0.batch.accumulate=1"]),
    "medusa, kept states": (medusa, {"num_draft_heads": 4}, ["cache_hidden=memory"]),
    "ssm": (ssm, {"layers": [0, 1]}, []),
    "ssm, the target's distributions": (ssm, {"layers": [0], "loss": "kl"}, []),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_takes_what_is_computed(wide, tmp_path, run_main, monkeypatch, name):
    """The whole: weights, moments, and the most that a step allocates at a time."""
    module, drafter, overrides = RECIPES[name]
    stages = [{"name": "s", "steps": 1, "batch": {"sequences": 8, "accumulate": 2}, "optim": {"lr": 1e-3}}]
    sections = {"data": {**TEXT, "max_length": LENGTH, "packing": True}}
    recipe = write_recipe(tmp_path, wide, drafter, stages, **sections)
    overrides = [*overrides, "target.dtype=float32"]
    (plan,) = module.plans(read_recipe(recipe, module.SCRIPT.recipe, overrides))
    backward, peaks = loop._backward, []

    def measured(*arguments):
        found = []
        peaks.append(peak_of(lambda: found.append(backward(*arguments))))
        return found[0]

    monkeypatch.setattr(loop, "_backward", measured)
    Runs(module.main, recipe, run_main)("run", *overrides)
    (peak,) = peaks
    held = 4 * (plan.frozen + 3 * plan.trained)  # with moments
    parts = plan.parts(Machine("cpu", 1, cuda=False))
    assert sum(parts.values()) == pytest.approx(held + peak, rel=NEAR), (parts, peak)
    assert sum(parts.values()) - held == pytest.approx(peak, rel=0.2), "also of a step alone"


@pytest.mark.parametrize("packed", [False, True])
def test_a_targets_pass_takes_what_is_computed(wide, packed):
    target = load_target(str(wide), dtype="float32")
    tokens, positions = torch.zeros(4, LENGTH, dtype=torch.int64), torch.arange(LENGTH).expand(4, -1) % 50
    with torch.no_grad():
        peak = peak_of(lambda: target.hidden(tokens, positions if packed else None))
    assert target_pass(target.config, Micro(4, LENGTH, packed, 4, 4, False)) == pytest.approx(peak, rel=2 * NEAR)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_language_model_takes_what_is_computed(recomputed):
    content = ["model.hidden_size=128", "model.num_layers=3", "stages.0.batch.sequences=4", "precision.autocast=none"]
    content += ["lookahead=null", f"precision.gradient_checkpointing={recomputed}".lower()]
    recipe = read_recipe("recipes/tiny-lm.yaml", lm.SCRIPT.recipe, content)
    plan, model = lm.plans(recipe)[0], lm.LlamaForCausalLM(lm.config_of(recipe.model, 0))
    if recomputed:
        loop.checkpoint_activations(model.train())
    module = lm.LanguageModel(model)
    micro = plan.micro(Machine("cpu", 1, cuda=False))
    batch = {"tokens": torch.zeros(micro.rows, micro.length, dtype=torch.int32)}

    def step():
        module(batch, module.count(batch), 0)[0].backward()

    found = plan.parts(Machine("cpu", 1, cuda=False))
    computed = sum(found.values()) - 12 * plan.trained  # weights and moments
    assert computed == pytest.approx(peak_of(step), rel=2 * NEAR)


def test_the_table_of_five_targets(run_main):
    """Llama-3.3-70B alone does not fit into the memory of one GPU."""
    code, out, err = run_main(memory_by_part.main)
    assert code == 0, err
    totals = {line.split()[0]: float(line.split()[-1]) for line in out.splitlines()[2:]}
    assert len(totals) == 5 and [name for name, total in totals.items() if total > 80] == ["Llama-3.3-70B"]
    assert totals["Llama-3.1-8B"] == pytest.approx(38, rel=NEAR)


H100 = Machine.named("h100")


@pytest.mark.parametrize("joint, measured", [(False, 28e9), (True, 32e9)])
def test_medusa_at_7b_on_an_h200(tmp_path, joint, measured):
    """What ``benchmarks/train_step.py`` of Llama-2-7B's shape took: 4 × 2,048 tokens at once, five heads with LM heads
    of their own, the second stage with gradient checkpointing (benchmarks/log/2026-11-26.md, in whole GB)."""
    config_of("llama2-7b").save_pretrained(tmp_path)
    stage = {
        "name": "s",
        "steps": 1,
        "batch": {"sequences": 4},
        "optim": {"lr": 1e-3},
        **({"joint": {}} if joint else {}),
    }
    content = write_recipe(tmp_path, tmp_path, {"num_draft_heads": 5}, [stage], data=TEXT | {"max_length": 2048})
    set_to = [
        "target.dtype=bfloat16",
        "precision.autocast=bfloat16",
        f"precision.gradient_checkpointing={joint}".lower(),
    ]
    (plan,) = medusa.plans(read_recipe(content, medusa.SCRIPT.recipe, set_to))
    assert sum(plan.parts(H100).values()) == pytest.approx(measured, rel=NEAR)


def test_unrolled_steps_at_8b_on_an_h200():
    """What ``benchmarks/unroll.py`` of Llama-3-8B's shape took: 1 × 2,048 tokens, seven steps, without a loss."""
    target = config_of("llama3-8b")
    config = EagleConfig.for_target(target, target.vocab_size, 2048, 3, "shared")
    micro = Micro(1, 2048)
    found = memory.eagle(config, target, micro, 7, given=True).activations
    features = 2048 * 4096 * 4 * (2 + 4)  # bfloat16, and float32
    assert found - features == pytest.approx(5.5e9, rel=NEAR)
