"""The sweep of typical acceptance: quality by the target's own distribution, thresholds, intervals."""

import json
import math

import pytest
import torch

from draftsmith.benchmarks import typical
from draftsmith.inference.engine.engine import Generation


def test_nats_by_prompt(target):
    """Token by token, through the model alone."""
    prompts, results = [[5, 9, 30], [7]], [Generation([4, 60]), Generation([8, 8, 21])]
    expected = [[], []]
    for text, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        for at, token in enumerate(result.tokens):
            logits = target.model(torch.tensor([[*prompt, *result.tokens[:at]]])).logits[0, -1] / 0.7
            expected[text].append(-math.log(float(logits.softmax(-1)[token])))
    sums, counts = typical.nats_by_prompt(target, prompts, results, 0.7).tolist()
    assert counts == [2, 3] and sums == pytest.approx([*map(sum, expected)], rel=1e-4)


def test_a_threshold_apart_from_the_other(run_main, drafter, tmp_path, monkeypatch, write_prompts):
    """Acceptance is p > min(ε, δ e^(-entropy)): with ε = 1 it is δ's alone. Intervals are over prompts."""
    monkeypatch.setattr(typical, "available_cores", lambda: 1)
    prompts = write_prompts(["import os", "def f(x):", "class A:", "licence", "for i in", "return x"])
    words = [drafter, "--prompts", prompts, "--out", tmp_path, *"--epsilons 1 --deltas 0.001 1".split()]
    code, out, _ = run_main(typical.main, *words, *"--temperature 1.5 --max-new-tokens 30 --batch-size 6".split())
    assert code == 0 and "typical ε = 1, δ = 0.001 (lossy)" in out and (tmp_path / "typical.png").exists()
    rows = json.loads((tmp_path / "typical.json").read_text())["methods"]
    low, high = (row for row in rows if row["lossy"])
    assert (low["delta"], high["delta"]) == (0.001, 1.0)
    assert low["mean_accepted_length"] > high["mean_accepted_length"], "a lower threshold accepts more"
    exact = next(row for row in rows if row["name"] == "sampling")
    assert exact["nats_difference"] == 0 and exact["nats_interval"] == [0, 0]
    for row in rows:
        counted = [sum(each) for each in zip(*row["accepted_by_prompt"], strict=True)]
        assert row["mean_accepted_length"] == pytest.approx(counted[0] / counted[1], abs=1e-4)
        assert row["nats_difference"] == pytest.approx(row["nats_per_token"] - exact["nats_per_token"], abs=2e-4)
        below, above = row["mean_accepted_length_interval"]
        assert below <= row["mean_accepted_length"] <= above
