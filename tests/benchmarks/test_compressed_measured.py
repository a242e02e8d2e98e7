"""benchmarks/compressed.py: acceptance, speed and selections of self-speculation over a compressed cache."""

import itertools
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


def test_acceptance_by_kind_and_setting(run):
    rows = run("acceptance", "--contexts 40 64 --count 2 --selectors snapkv topk")
    settings = [(row["kind"], row["context"], row["selector"], row["entries"]) for row in rows]
    assert settings == [
        (kind, context, selector, count)
        for kind in compressed.KINDS
        for context in (40, 64)
        for selector in ("snapkv", "topk")
        for count in (36, 40)
    ]
    for row in rows:
        assert 0 <= row["alpha"] <= 1 and len(row["by_depth"]) == 4
        whole = row["entries"] == row["context"]
        assert (row["memory_1"] == 1) == whole and row["memory_1"] <= 1
        assert not whole or row["alpha"] == 1 or row["selector"] == "topk"  # which selects from new tokens, too
        assert row["interval"] is None or row["interval"][0] <= row["alpha"] <= row["interval"][1]
        accepted, drafted = (sum(each) for each in zip(*row["accepted_by_text"], strict=True))
        assert len(row["accepted_by_text"]) == 2 and row["alpha"] == pytest.approx(accepted / drafted, abs=1e-4)


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


def test_speed_and_its_prediction(run):
    rows = run("speed", "--contexts 64 --batch-sizes 1 2 --drafts 1 2 --kinds books --count 1 --drafters ngram")
    names = [(row["batch"], row["selector"], row["entries"], row["drafts"]) for row in rows]
    settings = [*itertools.product(("streamingllm", "snapkv"), (36, 40), (1, 2))]
    assert names == [(batch, *each) for batch in (1, 2) for each in (*settings, ("ngram", None, 10))]
    for row in rows:
        if row["selector"] == "ngram":
            assert row["speedup"] > 0 and "predicted" not in row
            continue
        assert row["speedup"] > 0 and row["predicted"] > 0 and 1 <= row["tokens"] <= row["drafts"] + 1
        assert row["execution"].startswith("eager")
        time = row["verify"] + row["draft"] + row["select"]
        assert row["predicted"] == pytest.approx(row["tokens"] / time, rel=0.02)


def test_drafts_that_the_cache_has_no_room_for(run_main, capsys):
    words = "acceptance models/tiny-lm --contexts 64 --entries 40 --new-tokens 4 --kinds books --count 1 --drafts 40"
    code, _, err = run_main(compressed.main, *words.split(), script="benchmarks/compressed.py")
    assert code == 2 and "drafts of 40 tokens, 40 deep, have no room here" in err, err


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


def test_selections(run):
    rows = run("selection", "--contexts 64 --batch-sizes 1 3 --selectors streamingllm snapkv")
    assert len(rows) == 2 * 2 * 2 and all(row["seconds"] > 0 and row["plain_steps"] > 0 for row in rows)
