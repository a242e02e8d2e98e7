"""Counts of what the engine runs to answer conversations, against what one row has to run."""

import itertools
import json

import pytest

from draftsmith.benchmarks import answering
from draftsmith.models.tokenizer import load_tokenizer


def test_counts(run_main, tmp_path):
    answers = ["a", "def f(x):\n    return x", "import os", "x = 1", "class A:\n    pass", "no"]
    rows = [[{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": a}] for n, a in enumerate(answers)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ["--data", tmp_path / "chats.jsonl", "--tokenizer", "models/tiny-lm", "--out", tmp_path / "out.json"]
    code, out, err = run_main(answering.main, *words, *"--conversations 3 --turns 2 --batches 1 2".split())
    assert (code, err) == (0, "") and len(out.splitlines()) == 3
    tokenizer = load_tokenizer("models/tiny-lm")
    asked = answering.conversations(str(tmp_path / "chats.jsonl"), tokenizer, 3, 2)
    lengths = [[answer for _, answer in turns] for turns in asked]
    assert [*itertools.chain(*lengths)] == [
        len(tokenizer(a, add_special_tokens=False)["input_ids"]) + 1 for a in answers
    ]
    busy = sum(answer - 1 for each in lengths for answer in each)
    prompts = sum(2 * len(first) + one + len(second) for (first, one), (second, _) in asked)
    one, two = (json.loads((tmp_path / "out.json").read_text())["batches"][rows] for rows in "12")
    assert one["passes"] == 6
    assert (one["steps"] - 1) * (1 - one["idle"]) == pytest.approx(busy), "the last launch is not read"
    assert busy < one["steps"] <= busy + 6, "a step is launched before the last token is read"
    assert one["prompt tokens"] + one["reused"] == prompts and two["steps"] < one["steps"]
    code, _, err = run_main(answering.main, *words, "--conversations", "4", "--turns", "2")
    assert code == 2 and "has fewer than 8 rows" in err
