"""The table of trained drafters: from reports of the real command, and as it stands in the documents."""

import json
import re
from pathlib import Path

import pytest

from draftsmith.benchmarks import coder_table
from draftsmith.benchmarks.coder_table import SETS, TABLES
from draftsmith.benchmarks.documents import between
from draftsmith.inference import decode
from draftsmith.models.artifact import write_json

ROOT = Path(__file__).parents[2]
TEXTS = ["import os", "def f(x):", "class A:", "for i in", "return x"]


BEGIN, END = ("<!-- coder-table -->", "<!-- /coder-table -->")


@pytest.mark.parametrize(("name", "tables"), [("README.md", TABLES[:1]), ("RESULTS.md", TABLES)])
def test_the_documents_have_the_tables_of_the_kept_reports(name, tables):
    text = (ROOT / name).read_text()
    assert all(text.count(f"<!-- {marker} -->\n| target ") == (marker in tables) for marker in TABLES)
    assert text == coder_table.place(text, name, coder_table.kept()), (
        "python benchmarks/coder_table.py --write README.md RESULTS.md"
    )


def test_a_marker_has_the_rows_of_its_targets():
    reports = [{**report, "target": name} for report in coder_table.kept()[:1] for name in ("smollm2", "another")]
    text = "".join(f"<!-- {marker} -->\nold\n<!-- /{marker} -->\n" for marker in TABLES)
    coder, smollm2 = coder_table.place(text, "page", reports).split("<!-- smollm2-table -->")
    assert "| another |" in coder and "| smollm2 |" not in coder and "Published figures" in coder
    assert "| smollm2 |" in smollm2 and "| another |" not in smollm2 and "Published figures" not in smollm2


def test_kept_reports_name_no_machine():
    for path in (ROOT / coder_table.KEPT).glob("*.json"):
        report = json.loads(path.read_text())
        assert coder_table.file_of(report) == path
        assert coder_table.reduced(report, "x") == report
        assert not re.search(r"[\s\"'+=](/|~)\w", path.read_text()), path


@pytest.fixture(scope="module")
def reports(run_main, drafter, target, tmp_path_factory):
    """Of two drafters, over the four sets, by decode.py."""
    folder = tmp_path_factory.mktemp("coder")
    write_json(drafter / "provenance.json", {"data_labels": [3000, 400], "labels_seen": 6800, "training_seconds": 75.4})
    words: list[object] = [drafter, f"{drafter}+ngram"]
    for name in SETS:
        turns = [[text, "x = 1"] if name == "mt-bench" else [text] for text in TEXTS + ["not read"]]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
        words += ["--prompts", file]
    words += ["--first", 5, "--max-new-tokens", 8, "--check-lossless", "--baseline", "all"]
    words += ["--report", folder / "out"]
    code, _, err = run_main(decode.main, *words, script="inference/decode.py")
    assert code == 0, err
    return [folder / "out" / name / "report.json" for name in ("heads", "heads+ngram")]


def test_prompts_that_were_not_timed_are_said(reports):
    report = coder_table.reduced(json.loads(reports[0].read_text()), "x")
    assert " of 20 prompts" not in coder_table.measured([report])
    report["all"]["timed_prompts"] = 7
    (row,) = [line for line in coder_table.measured([report]).splitlines() if "heads" in line]
    assert row.split(" | ")[-2].endswith("; 7 of 20 prompts")


def test_every_cell_is_a_figure_of_the_report(run_main, reports):
    code, out, err = run_main(coder_table.main, *reports)
    assert code == 0, err
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in out.splitlines() if "heads" in line]
    assert [row[1] for row in rows] == ["heads", "heads+ngram"]
    for row, path in zip(rows, reports, strict=True):
        report = json.loads(path.read_text())
        assert [*report["kinds"]] == [*SETS] and {of["prompts"] for of in report["kinds"].values()} == {5}
        assert row[3] == "3.4 k, 6.8 k seen; 75 s"
        for shown, of in zip(row[4:9], [*report["kinds"].values(), report], strict=True):
            low, high = of["mean_accepted_length_interval"]
            fast, faster = of["speedup_interval"]
            tau = f"{of['mean_accepted_length']:.2f} ({low:.2f}–{high:.2f})"
            assert shown == f"{tau}; {of['speedup']:.2f} × ({fast:.2f}–{faster:.2f})"
        assert row[9] == f"0 of {report['new_tokens']:,}"
    assert "5 prompts of each set, answers of at most 8 tokens" in out
    assert "Published figures" in out and "| Qwen3-1.7B | " in out


def test_transformers_own_methods_are_rows_of_the_same_run(run_main, reports):
    report = json.loads(reports[0].read_text())
    theirs, lookup = coder_table.peers(report, "x")
    assert theirs["all"]["speedup"] == pytest.approx(1 / report["baselines"]["engine"]["speedup_vs_transformers"], 1e-3)
    for kind, of in report["kinds"].items():
        speeds = {name: base["tokens_per_second"] for name, base in of["baselines"].items()}
        for peer, name in ((theirs, "transformers"), (lookup, "prompt_lookup")):
            low, high = peer["sets"][kind]["speedup_interval"]
            assert low < peer["sets"][kind]["speedup"] < high
            assert peer["sets"][kind]["speedup"] == pytest.approx(speeds[name] / speeds["engine"], 1e-3)
    code, out, err = run_main(coder_table.main, *reports)
    assert code == 0, err
    for peer in (theirs, lookup):
        (row,) = [line.split(" | ") for line in out.splitlines() if f"| {peer['drafter']} |" in line]
        low, high = peer["all"]["speedup_interval"]
        assert row[8] == f"{peer['all']['speedup']:.2f} × ({low:.2f}–{high:.2f})"
        assert row[3] == "none" and row[9].startswith("not compared")


def test_what_is_kept_and_written(run_main, reports, tmp_path, monkeypatch):
    monkeypatch.setattr(coder_table, "ROOT", tmp_path)
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    write_json(tmp_path / coder_table.PUBLISHED, {"rows": []})
    page = tmp_path / "page.md"
    page.write_text(f"# A\n\n{BEGIN}\nold\n{END}\n\nrest\n")
    for _ in range(2):  # a second time it takes the place of the first
        code, _, err = run_main(coder_table.main, "--keep", *reports, "--write", page)
        assert code == 0, err
        kept = sorted((tmp_path / coder_table.KEPT).glob("*.json"))
        assert len(kept) == 4, "two drafters, and transformers with and without prompt lookup"
    assert str(reports[0].parents[2]) not in "".join(path.read_text() for path in kept), "no path of this machine"
    assert len(kept[0].read_bytes()) < 8000
    text = page.read_text()
    assert text.startswith(f"# A\n\n{BEGIN}\n| target | ") and text.endswith(f"\n{END}\n\nrest\n")
    assert "| heads | " in text and "| transformers, generate | " in text and "old" not in text
    code, out, _ = run_main(coder_table.main)
    assert code == 0 and out.strip() == between(text, "page", BEGIN, END)[1]
    code, out, _ = run_main(coder_table.main, *kept)
    assert code == 0 and out.strip() == between(text, "page", BEGIN, END)[1], "of reduced reports it is the same"


def test_what_is_refused(run_main, reports, tmp_path):
    report = json.loads(reports[0].read_text())
    no_kinds = tmp_path / "a.json"
    write_json(no_kinds, report | {"kinds": {}})
    other = tmp_path / "b.json"
    write_json(other, report | {"kinds": {"code": {}}})
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / "page.md").write_text("# A\n")
    for words, message in (
        ([no_kinds], "its kinds of text are none; of humaneval, mbpp, gsm8k, mt-bench"),
        ([other], "its kinds of text are code"),
        ([tmp_path / "c.json"], "no report of inference/decode.py: it has no 'drafter'"),
        (["--keep"], "--keep needs"),
        ([reports[0], "--write", tmp_path / "page.md"], "--write takes the kept reports"),
        (["--write", tmp_path / "page.md"], f"has no lines {BEGIN}"),
    ):
        code, _, err = run_main(coder_table.main, *words)
        assert code == 2 and message in err, err

    ties = {"mismatches": 0, "checked": 100, "near_ties": 3}
    for report, shown in (
        ({"lossless": None}, "not compared"),
        ({"lossless": None, "lossy": True}, "lossy"),
        ({"lossless": {"mismatches": 2, "checked": 8192, "near_ties": 0}}, "2 of 8,192"),
        ({"lossless": ties}, "0 of 100, 3 near-ties"),
    ):
        assert coder_table.exact_text(report) == shown
