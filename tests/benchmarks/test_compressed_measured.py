"""benchmarks/compressed.py: memory of other models, and the planner's prediction."""

import json
from dataclasses import replace

import pytest

from draftsmith.benchmarks import compressed
from draftsmith.inference.measure.context_costs import ContextCosts
from draftsmith.inference.measure.planning import Measured, plan
from draftsmith.inference.measure.step_costs import StepCosts


@pytest.fixture
def run(run_main, tiny_lm, tmp_path):
    def run(what, options):
        out = tmp_path / "out.json"
        words = [what, tiny_lm, *"--entries 36 40 --new-tokens 8 --threads 1 --device cpu --out".split(), out]
        code, said, err = run_main(compressed.main, *words, *options.split(), script="benchmarks/compressed.py")
        assert code == 0 and said.startswith(f"{what}, tiny-lm"), err
        return json.loads(out.read_text())["rows"]

    return run


def test_acceptance_of_other_models_at_their_memory(run, tiny_lm):
    """The target as a draft model reads what it reads itself; over fewer entries, or in 8 bits, less."""
    pytest.importorskip("bitsandbytes")
    names = [f"draft_model:{tiny_lm}@1,1", f"draft_model:{tiny_lm},snapkv:36@1,1", "int8"]
    options = "--contexts 64 --batch-sizes 1 9 --kinds values --count 1 --selectors snapkv --drafts 2 --drafters "
    of = {row["selector"]: row for row in run("acceptance", options + " ".join(names)) if row["entries"] != 40}
    (full, few, eight, itself) = (of[name] for name in (*names, "snapkv"))
    assert (full["alpha"], full["memory_1"], full["memory_9"]) == (1, 1, 1)
    # It reads its own K/V of new tokens, made over fewer entries; which texts there are, depends on what is installed.
    assert few["alpha"] == pytest.approx(itself["alpha"], abs=0.25)
    assert few["memory_9"] == itself["memory_9"] < itself["memory_1"] < 1
    assert 0 < eight["memory_1"] < eight["memory_9"] < 1 and eight["entries"] is None and eight["drafts"] == 2


def test_a_plan_predicts_the_same(run, monkeypatch):
    """By the same figures, inference/planner.py's plan and the grid have one prediction."""
    costs = ContextCosts(
        StepCosts({1: 0.01, 65: 0.07}),
        {(1, s, n): 0.01 + 1e-3 * n + 1e-5 * s for s in (16, 32, 64, 96) for n in (1, 5)},
    )
    pairs = [(selector, entries) for selector in ("snapkv", "topk") for entries in (36, 40)]
    own = Measured([], 3e-3, 1e-4, 2e-4, 3e-4)
    monkeypatch.setattr(compressed, "context_costs", lambda *given: costs)
    monkeypatch.setattr(compressed, "measure", lambda *given: (dict.fromkeys(pairs, own), 0.1))
    for row in run("speed", "--contexts 64 --drafts 1 --selectors snapkv topk --kinds books --count 1"):
        alone = replace(own, alpha=[*row["by_depth"], *[0.0] * 7])  # more than one draft never pays
        (cell,) = plan(costs, {64: {(row["selector"], row["entries"]): alone}}, {64: 0.1}, [1], 8)
        assert cell["best"] == f"{row['selector']}:{row['entries']}@1"
        assert cell["speedup"] == pytest.approx(row["predicted"], rel=1e-3)
