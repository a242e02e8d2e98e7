"""Answers in Spec-Bench's format: a reader of that format finds the report's figures in them."""

import json

import pytest

from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.text import answer_text

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
    {"question_id": 82, "category": "qa", "turns": ["Who wrote Hamlet?"]},
    {"question_id": "x", "category": "qa", "turns": ["Where is Paris?"]},
    {"prompt": "import os"},
]


@pytest.fixture(scope="module")
def folder(tiny_lm, tmp_path_factory, run_decode):
    folder = tmp_path_factory.mktemp("answers")
    (folder / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    options = f"--max-new-tokens 40 --logprobs 1 --report {folder} --answers {folder / 'new/a.jsonl'}"
    code, _, err = run_decode(f"ngram none --target {tiny_lm} --prompts {folder / 'question.jsonl'} {options}")
    assert code == 0 and f"wrote {folder / 'new/a-ngram.jsonl'}\n" in err, err
    return folder


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_a_reader_finds_the_reports_figures(folder, tiny_lm, drafter):
    lines = read(folder / f"new/a-{drafter}.jsonl")
    report = json.loads((folder / drafter / "report.json").read_text())
    assert [line["question_id"] for line in lines] == [81, 82, "x", 4]
    assert [line["category"] for line in lines] == ["writing", "qa", "qa", "other"]
    assert {line["model_id"] for line in lines} == {f"{tiny_lm.name}-{drafter}"}
    assert len({line["answer_id"] for line in lines}) == 4 and all(line["tstamp"] > 1.7e9 for line in lines)
    (choices,) = zip(*(line["choices"] for line in lines), strict=True)
    assert [choice["index"] for choice in choices] == [0] * 4
    for name in ("turns", "new_tokens", "wall_time", "decoding_steps", "idxs"):
        assert [len(choice[name]) for choice in choices] == [2, 1, 1, 1], name
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    assert len(lengths) == report["steps"] == sum(sum(choice["decoding_steps"]) for choice in choices)
    assert sum(lengths) / len(lengths) == pytest.approx(report["mean_accepted_length"], 1e-4)
    assert [tokens for choice in choices for tokens in choice["new_tokens"]] == report["per_prompt"]["new_tokens"]
    for choice in choices:
        assert choice["idxs"] == [steps - 1 for steps in choice["decoding_steps"]]
        assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"]) - len(choice["turns"]), "not the prefill's"
    times = [seconds for choice in choices for seconds in choice["wall_time"]]
    groups = [report["per_group"]["seconds"][number] for number in report["per_prompt"]["group"]]
    assert all(0 < time <= group + 1e-6 for time, group in zip(times, groups, strict=True)), "of the same call"


def test_exact_answers_are_equal(folder, target):
    ngram, none = (read(folder / f"new/a-{drafter}.jsonl") for drafter in ("ngram", "none"))
    assert [line["choices"][0]["turns"] for line in ngram] == [line["choices"][0]["turns"] for line in none]
    (plain,) = SpeculativeDecoder(target).generate([target.tokenizer("import os")["input_ids"]], 40, logprobs=1)
    assert plain.logprobs
    for lines in (ngram, none):  # bit for bit the same
        assert lines[3]["choices"][0]["logprobs"] == [{"token_ids": plain.tokens, **plain.logprobs.as_json()}]
    assert ngram[3]["choices"][0]["turns"] == [answer_text(target, plain.tokens)]


def test_one_drafter_and_one_file(folder, tiny_lm, run_decode):
    line = f"none --target {tiny_lm} --prompts {folder / 'question.jsonl'} --max-new-tokens 4 --baseline none"
    for _ in "ab":  # its own file may be replaced
        code, _, err = run_decode(f"{line} --answers {folder / 'b.jsonl'}")
        assert code == 0, err
    assert len(read(folder / "b.jsonl")) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompts {0} --answers {0}", "--answers {0}: there is such a file, which draftsmith did not write here"),
        ("--prompts {0} --answers x.json", "--answers x.json: name a .jsonl file"),
        ("--prompts {0} --answers /dev/null/x.jsonl", "--answers /dev/null: cannot write here"),
        (
            "--prompts {0} --answers x.jsonl --batch-size 2",
            "--answers has times of one text at a time; leave out --bat",
        ),
        ("--prompts {0} --answers x.jsonl --live", "--answers is for --prompts without --live"),
        ("--prompt a --answers x.jsonl", "--answers is for --prompts without --live"),
    ],
)
def test_what_is_refused(folder, tiny_lm, run_decode, options, message):
    questions = folder / "question.jsonl"
    code, _, err = run_decode(f"none --target {tiny_lm} " + options.format(questions))
    assert code == 2 and err.startswith(f"error: {message.format(questions)}") and err.count("\n") == 1
    assert len(read(questions)) == 4
