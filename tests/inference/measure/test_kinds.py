"""Figures by kind of text: which prompts are timed together, and that the kinds add up to the whole."""

import json

import pytest

from draftsmith.inference.engine.engine import Generation
from draftsmith.inference.measure import timing
from draftsmith.inference.measure.report import SPEEDUPS


def test_groups_hold_one_kind_and_mix_in_proportion():
    kinds = ["code"] * 70 + ["chat"] * 9 + ["code"] * 2
    groups = timing.group_prompts(kinds, 2)
    assert sorted(number for group in groups for number in group) == [*range(81)]
    assert all(len({kinds[number] for number in group}) == 1 for group in groups)
    found = [kinds[group[0]] for group in groups]
    assert (found.count("code"), found.count("chat")) == (36, 5)
    assert found[:16].count("chat") == 2 and found[:32].count("chat") == 4, "an early end keeps the proportion"
    assert [group[0] for group in groups if kinds[group[0]] == "code"] != sorted({*range(0, 70, 2), 79})


def test_parts_of_a_method():
    timed = timing.Timed({0: [1], 1: [1, 2], 2: [3]}, [2, 1, 1], [[1.0, 3.0], [2.0], [5.0]], [[1.0], [2.0], [5.0]])
    timed.groups = [[1], [0], [2]]
    part = timed.part([1, 2])
    assert part.groups == [[1], [2]] and part.outputs == {1: [1, 2], 2: [3]}
    assert part.tokens_per_second == 3 / 7.0
    assert timed.part([7]).tokens == [] and timed.part([]).groups == []
    timed.groups = [[0, 1], [2], []]
    assert timed.part([0]).groups == [[]], "a group with other prompts is left out"


def test_interval_of_the_mean_accepted_length():
    few = [Generation([1], [2, 3])] * 4 + [Generation([1], [])] * 9
    assert timing.accepted_interval(few) is None, "answers without a step are none to resample"
    assert timing.accepted_interval([Generation([1], [2, 4])] * 5) == [3.0, 3.0]
    unequal = [Generation([1], [1] * n + [4] * n) for n in range(1, 9)] + [Generation([1], [1] * 20)]
    low, high = timing.accepted_interval(unequal)
    tau = (36 * 5 + 20) / (36 * 2 + 20)
    assert low < tau - 0.2 and tau + 0.1 < high <= 2.5


@pytest.fixture(scope="module")
def reports(tiny_lm, tmp_path_factory, run_decode):
    """Reports of three kinds, one of them unnamed, with two drafters; and what was printed."""
    folder = tmp_path_factory.mktemp("kinds")
    rows = [{"prompt": f"def f{n}(x):\n    return", "kind": "code"} for n in range(6)]
    rows += [{"prompt": f"The {n} " * 9, "kind": "writing"} for n in range(5)] + [{"prompt": "import os\n"}]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"--max-new-tokens 40 --baseline transformers --report {folder}"
    code, _, printed = run_decode(f"ngram none --target {tiny_lm} --prompts {prompts} {options}")
    assert code == 0, printed
    return {name: json.loads((folder / name / "report.json").read_text()) for name in ("ngram", "none")}, printed


def test_kinds_add_up(reports):
    for report in reports[0].values():
        kinds = report["kinds"]
        assert {kind: figures["prompts"] for kind, figures in kinds.items()} == {"code": 6, "writing": 5, "other": 1}
        assert [*kinds] == ["code", "writing", "other"]
        looping = sum(figures["loops"]["looping_answers"] for figures in kinds.values())
        assert looping == report["loops"]["looping_answers"]
        for field in ("new_tokens", "steps", "timed_prompts", "pairs"):
            assert sum(figures[field] for figures in kinds.values()) == report[field], field
        committed = sum(figures["mean_accepted_length"] * figures["steps"] for figures in kinds.values())
        assert committed / report["steps"] == pytest.approx(report["mean_accepted_length"], abs=1e-3)
        seconds = sum(figures["new_tokens"] / figures["tokens_per_second"] for figures in kinds.values())
        assert report["new_tokens"] / seconds == pytest.approx(report["tokens_per_second"], rel=1e-2)
        for figures in kinds.values():
            ratio = figures["tokens_per_second"] / figures["baselines"]["transformers"]["tokens_per_second"]
            assert figures["speedup_vs_transformers"] == pytest.approx(ratio, rel=1e-2)
            assert figures["speedup"] is None and "engine" not in figures["baselines"]
            few = figures["prompts"] < timing.MIN_PAIRS
            for name in ("mean_accepted_length", SPEEDUPS["transformers"]):
                interval = figures[f"{name}_interval"]
                assert interval is None if few else interval[0] <= figures[name] <= interval[1]


def test_the_table_shows_kinds(reports):
    assert "code, 6 prompts" in reports[1] and "other, 1 prompt" in reports[1]


def test_one_kind_is_no_division(tiny_lm, tmp_path, report_of):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os", "kind": "code"}\n' * 2)
    report, printed = report_of(f"ngram --target {tiny_lm} --prompts {prompts} --max-new-tokens 4 --baseline none")
    assert "Tokens before the first loop" not in printed, printed
    assert report["kinds"] == {}
