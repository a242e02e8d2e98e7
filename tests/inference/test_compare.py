"""Comparing reports: pairs of prompts and groups, what is compared, and what is refused."""

import copy
import json
import random

import pytest

from draftsmith.inference import compare
from draftsmith.inference.measure import timing
from draftsmith.inference.measure.paired import keys_of, pair_groups, pair_prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_decode):
    """Reports of two drafters, decoded by one command, on prompts of two kinds, one prompt twice."""
    folder = tmp_path_factory.mktemp("reports")
    rows = [{"prompt": f"def f{n}(x):\n    return", "kind": "code"} for n in range(6)]
    rows += [{"prompt": f"The {n} " * 9, "kind": "writing"} for n in range(5)] + [{"prompt": "def f0(x):\n    return"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"--max-new-tokens 100 --report {folder}"
    code, _, printed = run_decode(f"ngram none --target models/tiny-lm --prompts {folder / 'prompts.jsonl'} {options}")
    assert code == 0, printed
    return folder


@pytest.fixture
def reports(folder):
    return [json.loads((folder / name / "report.json").read_text()) for name in ("none", "ngram")]


def run(run_main, *paths):
    return run_main(compare.main, *paths)


def test_figures_of_prompts_and_groups_are_the_report(reports):
    for report in reports:
        prompts, groups = report["per_prompt"], report["per_group"]
        assert all(len(values) == report["prompts"] == 12 for values in prompts.values())
        assert prompts["kind"] == ["code"] * 6 + ["writing"] * 5 + [None]
        assert prompts["prompt"][0] == prompts["prompt"][11] and len({*prompts["prompt"]}) == 11
        assert sum(prompts["new_tokens"]) == report["new_tokens"] == sum(groups["new_tokens"])
        assert sum(prompts["steps"]) == report["steps"]
        assert sum(prompts["committed_tokens"]) / report["steps"] == pytest.approx(report["mean_accepted_length"], 1e-4)
        assert sorted(prompts["group"]) == [*range(12)]
        for figures, summary in ((groups, report), (groups["baselines"]["engine"], report["baselines"]["engine"])):
            assert sum(figures["new_tokens"]) / sum(figures["seconds"]) == pytest.approx(
                summary["tokens_per_second"], 1e-3
            )
        assert groups["new_tokens"] == [prompts["new_tokens"][prompts["group"].index(group)] for group in range(12)]


def test_pairs_are_of_the_same_prompts_in_any_order(reports):
    a, b = reports
    order = random.Random(0).sample(range(12), 12)
    shuffled = copy.deepcopy(b)
    shuffled["per_prompt"] = {name: [values[n] for n in order] for name, values in b["per_prompt"].items()}
    assert shuffled["per_prompt"]["prompt"] != b["per_prompt"]["prompt"]
    key = keys_of(a)[3]
    assert pair_prompts([a, shuffled])[key] == pair_prompts([a, b])[key]
    assert pair_prompts([a, shuffled])[key][1] == a["per_prompt"]["steps"][3]
    group = a["per_prompt"]["group"][3]
    of = [a["per_group"], a["per_group"]["baselines"]["engine"]]
    assert pair_groups([a, shuffled], "engine")[(key,)][:4] == [
        each[field][group] for each in of for field in ("new_tokens", "seconds")
    ]
    b["per_prompt"]["group"][3] = None
    assert (key,) not in pair_groups([a, b]) and len(pair_groups([a, b])) == 11


def test_intervals_are_of_pairs(reports):
    """The prompts differ, B is always 1.5 × A: the difference varies, the ratio does not."""
    rng = random.Random(0)
    steps = [rng.randint(10, 40) for _ in range(20)]
    found = compare.compare({n: [60, count, 90, count] for n, count in enumerate(steps)})
    assert found["a"] == pytest.approx(1200 / sum(steps)) and found["ratio"] == pytest.approx(1.5)
    assert found["ratio_interval"] == pytest.approx((1.5, 1.5))
    low, high = found["difference_interval"]
    assert low < found["difference"] - 0.1 < found["difference"] + 0.1 < high
    paired = compare.compare({n: [60, 10, 10, 10, 90, 10, 12, 10] for n in range(4)})
    assert paired["b"] == 7.5 and paired["difference"] == 1.5 and paired["ratio_interval"] is None, "of four"
    a, b = reports
    rows = {(kind, name): found for kind, name, found in compare.rows_of(a, b, True)}
    assert [*dict.fromkeys(kind for kind, _ in rows)] == [None, "code", "writing", "other"]
    for report, which in zip(reports, "ab", strict=True):
        for kind in (None, "code", "writing", "other"):
            figures = report["kinds"][kind] if kind else report
            assert rows[kind, "τ"][which] == pytest.approx(figures["mean_accepted_length"], 1e-4)
            assert rows[kind, "tokens/s"][which] == pytest.approx(figures["tokens_per_second"], 1e-3)
            assert rows[kind, "× plain"][which] == pytest.approx(figures["speedup"], 1e-3)
    assert (rows["other", "τ"]["ratio_interval"] is None) == (timing.MIN_PAIRS > 1)
    assert rows[None, "τ"]["difference_interval"][0] > 0, "n-grams accept more than nothing"


def test_the_table(folder, run_main):
    code, out, err = run(run_main, folder / "none", folder / "ngram/report.json")
    assert code == 0 and "warning" not in err and "different times" not in err
    assert err.startswith(f"A: none on {json.loads((folder / 'report.json').read_text())['target']}, ")
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines] == ["A", *(3 * ["all", "τ", "×", "tokens/s"])[:4]] + [
        word for kind in ("code", "writing", "other") for word in (kind, "τ", "×", "tokens/s")
    ]
    assert lines[2][1] == "1.00" and lines[2][3].startswith("+") and lines[2][5] == "to"
    assert err.endswith(
        "3 comparisons without 95 % interval: that needs 5 prompts, of speeds timed groups, in both reports\n"
    )


def test_several_reports_and_a_file(folder, run_main, tmp_path):
    """Each is compared with the first one; the file has the figures of the tables."""
    code, out, err = run(
        run_main, *(folder / name for name in ("none", "ngram", "none")), "--json", tmp_path / "c.json"
    )
    assert code == 0 and [line.split()[:3] for line in out.splitlines() if "95 %" in line] == [
        ["A", letter, letter] for letter in "BC"
    ]
    assert [line.partition(" on ")[0] for line in err.splitlines() if " on " in line] == [
        "A: none",
        "B: ngram",
        "C: none",
    ]
    first, second = json.loads((tmp_path / "c.json").read_text())["compared"]
    taus = [figures["figures"][0] for figures in (first, second)]
    assert [(each["kind"], each["figure"], each["b"] > each["a"]) for each in taus] == [
        (None, "τ", True),
        (None, "τ", False),
    ]
    assert first["report"] == str(folder / "ngram/report.json") and taus[1]["difference"] == 0
    assert "give at least one other report" in run(run_main, folder)[2]


def test_too_few_for_intervals(tmp_path, run_main, run_decode):
    """Neither the table nor the report speaks of intervals where there are none, and the page's figures say so."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"def f{n}(x):"}) + "\n" for n in range(4)))
    given = f"ngram --target models/tiny-lm --prompts {tmp_path / 'p.jsonl'} --max-new-tokens 16"
    code, _, said = run_decode(f"{given} --report {tmp_path / 'r'}")
    few = "Ratios of tokens/s: 4 prompts in 4 groups, each decoded by all methods in turn: too few for intervals, which"
    page = (tmp_path / "r/report.html").read_text()
    assert code == 0 and f"{few} need 5 groups\n" in said and few in page and page.count("<b>too few</b>") == 2, said
    code, out, err = run(run_main, tmp_path / "r", tmp_path / "r")
    assert code == 0 and "95 %" not in out and "no 95 % interval: that needs 5 prompts" in err


def changed(folder, tmp_path, **fields):
    report = json.loads((folder / "ngram/report.json").read_text())
    report = {name: value for name, value in (report | fields).items() if value is not None}
    (tmp_path / "b.json").write_text(json.dumps(report))
    return tmp_path / "b.json"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "Z80, 1 cores, 9 threads"}, "warning: speeds are not compared: device "),
        ({"dtype": "float16"}, "warning: speeds are not compared: dtype float32, float16\n"),
        ({"batch_size": 4}, "warning: speeds are not compared: batch size 1, 4\n"),
        ({"mode": "typical"}, "warning: the answers are not the same: mode greedy, typical\n"),
        ({"max_new_tokens": 41}, "warning: the answers are not the same: max new tokens 100, 41\n"),
        ({"versions": {}}, "warning: not the same versions: draftsmith "),
        ({"command": "another"}, "tokens/s were measured at different times"),
    ],
)
def test_what_differs_is_said(folder, tmp_path, run_main, fields, message):
    file = tmp_path / "figures.json"
    code, out, err = run(run_main, folder / "none", changed(folder, tmp_path, **fields), "--json", file)
    assert code == 0 and message in err and err.count("\n") == 5
    assert ("–" in out) == ("speeds are not" in message) and "+" in out
    for row in json.loads(file.read_text())["compared"][0]["figures"]:
        assert (row["difference"] is None) == ("speeds are not" in message and row["figure"] != "τ")


def regrouped(report, *groups):
    """The report, had it timed groups of these prompts (by number), each in a second for 100 tokens."""
    of = {number: place for place, group in enumerate(groups) for number in group}
    figures = {"new_tokens": [100] * len(groups), "seconds": [1.0] * len(groups)}
    figures |= {"baselines": {"engine": {"new_tokens": [100] * len(groups), "seconds": [2.0] * len(groups)}}}
    return {"per_prompt": report["per_prompt"] | {"group": [of.get(n) for n in range(12)]}, "per_group": figures}


def test_other_timed_groups(folder, tmp_path, run_main, reports):
    """Speeds of groups that only one report timed stand beside each other, and are not compared."""
    pairs = [[n, n + 1] for n in range(0, 10, 2)]
    by_two = regrouped(reports[1], *pairs, [10], [11]) | {"batch_size": 2}  # both reports have the last two groups
    apart = regrouped(reports[1], *pairs)
    for fields, said in ((by_two, ": batch size 1, 2\n"), (apart, ": not timed in the same groups\n")):
        code, out, err = run(run_main, folder / "none", changed(folder, tmp_path, **fields))
        assert code == 0 and said in err and err.count("\n") == 4
        rows = [line.split() for line in out.splitlines()]
        assert rows[2][0] == "τ" and rows[2][3].startswith("+")
        speedup, speed = rows[3].pop(2), rows[4].pop(1)  # from rounded seconds: their last digit may be another
        assert float(speedup) == pytest.approx(reports[0]["speedup"], 1e-3, abs=0.011)
        assert float(speed) == pytest.approx(reports[0]["tokens_per_second"], 1e-3, abs=0.11)
        assert rows[3] == ["×", "plain", "2.00", "–", "–"] and rows[4] == ["tokens/s", "100.0", "–", "–"]
    some = regrouped(reports[1], *([n] for n in range(6, 12)), [0, 1, 2], [3, 4, 5])  # the first kind's are others
    code, out, err = run(run_main, folder / "none", changed(folder, tmp_path, **some))
    assert "warning: speeds of 6 prompts not compared: not timed in the same groups\n" in err
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[-1] == "–") for row in rows[1:9]] == [
        *(("all", False), ("τ", False), ("×", False), ("tokens/s", False)),
        *(("code", False), ("τ", False), ("×", True), ("tokens/s", True)),
    ]


def test_threads_differ(folder, tmp_path, run_main):
    device = json.loads((folder / "report.json").read_text())["device"].replace("1 threads", "7 threads")
    _, _, err = run(run_main, folder / "none", changed(folder, tmp_path, device=device))
    assert "warning: speeds are not compared: threads 1, 7\n" in err


def test_some_of_the_prompts(folder, tmp_path, run_main):
    report = json.loads((folder / "ngram/report.json").read_text())
    report["per_prompt"]["prompt"][2:5] = ["x", "y", "z"]
    code, out, err = run(run_main, folder / "none", changed(folder, tmp_path, per_prompt=report["per_prompt"]))
    assert (
        code == 0
        and "warning: of 12 and 12 prompts, 9 in both reports; only these are compared\n" in err
        and "code" in out
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_fingerprint": "f" * 64}, "its target is "),
        ({"per_prompt": {"prompt": ["x"]}}, "has no prompt of "),
        ({"per_prompt": None}, "has no figures of each prompt (per_prompt), it is too old; decode with --report again"),
        ({"drafter": None}, "is no report of decode.py; give a report.json that its --report wrote"),
    ],
)
def test_what_cannot_be_compared(folder, tmp_path, run_main, fields, message):
    path = changed(folder, tmp_path, **fields)
    code, out, err = run(run_main, folder / "none", path)
    assert (code, out) == (2, "") and err.startswith(f"error: {path}: {message}") and err.count("\n") == 1


def test_missing_files(tmp_path, run_main):
    code, _, err = run(run_main, tmp_path, tmp_path / "b.json")
    assert code == 2 and err == f"error: {tmp_path / 'report.json'}: there is no such file\n"
