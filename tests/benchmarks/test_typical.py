"""The sweep of typical acceptance: quality by the target's own distribution, and the command."""

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


def test_the_command(run_main, drafter, tmp_path, monkeypatch, write_prompts):
    monkeypatch.setattr(typical, "available_cores", lambda: 1)
    prompts = write_prompts(["import os", "def f(x):"])
    words = [drafter, "--prompts", prompts, "--out", tmp_path / "out"]
    words += "--epsilons 0.001 0.9 --temperature 1.5 --max-new-tokens 30 --batch-size 2".split()
    code, out, err = run_main(typical.main, *words)
    assert code == 0 and "(lossy)" in out and f"wrote {tmp_path / 'out' / 'typical.json'}" in err
    found = json.loads((tmp_path / "out" / "typical.json").read_text())
    by_name = {row["name"]: row for row in found["methods"]}
    assert list(by_name) == ["plain sampling", "greedy", "sampling", "typical ε = 0.001", "typical ε = 0.9"]
    assert [row["lossy"] for row in found["methods"]] == [False, False, False, True, True]
    low, high = by_name["typical ε = 0.001"], by_name["typical ε = 0.9"]
    assert low["mean_accepted_length"] > high["mean_accepted_length"] >= 1, "a lower threshold accepts more"
    assert by_name["greedy"]["nats_per_token"] <= high["nats_per_token"] + 1e-4 < by_name["sampling"]["nats_per_token"]
    assert by_name["plain sampling"]["speedup"] == 1
    assert (tmp_path / "out" / "typical.png").stat().st_size > 10_000


def test_a_threshold_apart_from_the_other(run_main, drafter, tmp_path, monkeypatch, write_prompts):
    """Acceptance is p > min(ε, δ e^(-entropy)): with ε = 1 it is δ's alone. Intervals are over prompts."""
    monkeypatch.setattr(typical, "available_cores", lambda: 1)
    prompts = write_prompts(["import os", "def f(x):", "class A:", "licence", "for i in", "return x"])
    words = [drafter, "--prompts", prompts, "--out", tmp_path, *"--epsilons 1 --deltas 0.001 1".split()]
    code, out, _ = run_main(typical.main, *words, *"--temperature 1.5 --max-new-tokens 30 --batch-size 6".split())
    assert code == 0 and "typical ε = 1, δ = 0.001 (lossy)" in out
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


def test_answers_of_one_token(run_main, drafter, tmp_path, monkeypatch, write_prompts):
    """They have no τ: the picture shows 1, as the table."""
    monkeypatch.setattr(typical, "available_cores", lambda: 1)
    words = [
        drafter,
        "--prompts",
        write_prompts(["import os"]),
        "--out",
        tmp_path,
        "--epsilons",
        0.1,
        "--batch-size",
        1,
    ]
    code, _, err = run_main(typical.main, *words, "--max-new-tokens", 1)
    assert code == 0 and (tmp_path / "typical.png").exists(), err
    rows = json.loads((tmp_path / "typical.json").read_text())["methods"]
    assert [row["mean_accepted_length"] for row in rows] == [None] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", 0], "--temperature 0.0: must be at least 1e-10; below, every mode is greedy"),
        (["--epsilons", 2], "epsilon 2.0: must be above 0 and at most 1"),
        (["--deltas", 0], "delta 0.0: must be above 0 and at most 1"),
        (["--deltas", 0.1, 0.1], "--deltas 0.1 0.1: 0.1 is given twice; leave one out"),
        (["--temperature", "nan"], "temperature nan: must be at least 0"),
        (["--repeat", 0], "--repeat 0: must be at least 1"),
        (["--repeat", 10**12], "--repeat 1000000000000: must be at most 2147483647"),
        (["--epsilons", 0.1, 0.2, 0.1], "--epsilons 0.1 0.2 0.1: 0.1 is given twice; leave one out"),
        (["--seed", -1], "seed -1: "),
        (["--out", "/dev/null/x"], "--out /dev/null/x: cannot write here (Not a directory); choose another folder"),
    ],
)
def test_bad_input(run_main, options, message):
    code, _, err = run_main(typical.main, "x", "--prompts", "p.jsonl", *options)
    assert code == 2 and err.startswith(f"error: {message}") and err.count("\n") == 1
