"""What the parts of `make gpu` measured: a judge reads the files of one part and compares with a goal.

Each judge takes the folder of all results and whether this is a rehearsal, in which no goal of speed is judged. A part
that was killed has measured less: what is missing is counted, not an error. ValueError: a result is wrong, whatever the
speed. Goals of time: kernel_judges.py.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.common.files import json_object


@dataclass(frozen=True)
class Finding:
    """What a part measured.

    value: for the table.
    met: whether the numeric goal is met; None where there is none. Not judged in a rehearsal.
    facts: for result.json.
    missing: figures that were asked for and not measured: «2 of 4 figures are missing», or nothing.
    """

    value: str
    met: bool | None = None
    facts: dict[str, Any] | None = None
    missing: str = ""


Judge = Callable[[Path, bool], Finding]  # of the folder of all results; whether this is a rehearsal


def missing(found: int, wanted: int) -> str:
    return f"{wanted - found} of {wanted} figures are missing" if found < wanted else ""


RESULTS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
# pytest -v, alone and in parallel processes: «tests/a.py::test PASSED [ 1%]», «[gw0] [  1%] PASSED tests/a.py::test»
TEST = re.compile(rf"^(?:(\S+::.*?) ({RESULTS})\b|\[gw\d+\] \[ *\d+%\] ({RESULTS}) (\S+::.*?) *$)", re.M)


def judge_tests(log: Path) -> Finding:
    """Counts of pytest -v, also of one that was killed."""
    found = [(a or b, kind or other) for a, kind, other, b in TEST.findall(log.read_text(errors="replace"))]
    names = {kind: [name for name, its in found if its == kind] for kind in RESULTS.split("|")}
    bad = names["FAILED"] + names["ERROR"]
    value = f"{len(names['PASSED'])} passed, {len(bad)} failed, {len(names['SKIPPED'])} skipped"
    if bad or not names["PASSED"]:
        raise ValueError(value + ("; " + ", ".join(name.rpartition("/")[2] for name in bad[:4]) if bad else ""))
    return Finding(value, facts={"skipped": names["SKIPPED"]})


def tests_of(part: str) -> Judge:
    return lambda out, rehearsal: judge_tests(out / part / "log.txt")


def judge_target(out: Path, rehearsal: bool) -> Finding:
    folder = model_folder(out, "target", rehearsal)
    size = (folder / "model.safetensors").stat().st_size
    return Finding(
        f"{size / 1e6:,.0f} MB of weights, validation loss {last(folder, 'validation_loss'):.2f}, "
        f"{last(folder, 'tokens_per_second'):,.0f} tokens/s"
    )


METRICS = {"simulated_tau": "simulated τ", "head1_held_out_top1": "top-1 of head 1"}


def judge_drafter(model: str, *metrics: str) -> Judge:
    """The last values of some of :data:`METRICS`, the speed of training and the calibrated tree."""

    def judge(out: Path, rehearsal: bool) -> Finding:
        folder = model_folder(out, model, rehearsal)
        shown = [f"{METRICS[name]} {last(folder, name):.2f}" for name in metrics]
        tree = json_object(folder / "tree.json")
        nodes = 1 + sum(map(len, tree.get("parts", [tree.get("paths", [])])))  # parts: of each SSM
        shown.append(f"{last(folder, 'tokens_per_second'):,.0f} tokens/s; calibrated tree of {nodes} nodes")
        return Finding(", ".join(shown))

    return judge


def last(folder: Path, name: str) -> float:
    """The last value of a metric in a run's folder; NaN while there is none."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next((float(line[name]) for line in reversed(lines) if name in line), float("nan"))


def check_graph(name: str, execution: str, rehearsal: bool) -> None:
    """Raises ValueError: steps ran outside CUDA graphs, and this is no rehearsal."""
    if not rehearsal and "cuda graph" not in execution:
        raise ValueError(f"{name}: steps ran {execution}")


def reports_of(folder: Path, *, graphs: bool, exact: bool = False) -> list[dict[str, Any]]:
    """The report of each drafter below a folder; the texts are the target's own. Raises ValueError: a text differs,
    with ``graphs`` steps ran outside CUDA graphs, or with ``exact`` a row's bits depended on other rows."""
    reports = {json_object(path)["drafter"]: json_object(path) for path in folder.rglob("report.json")}
    for report in reports.values():
        name, lossless = drafter_name(report), report["lossless"]
        if not lossless["passed"]:
            raise ValueError(f"{name}: {lossless['mismatches']} mismatches in {lossless['checked']} tokens")
        check_graph(name, report["execution"], not graphs)
        if exact and not lossless["bitwise"]:
            raise ValueError(f"{name}: the bits of a row depended on other rows")
    return list(reports.values())


def drafter_name(report: dict[str, Any]) -> str:
    return "+".join(Path(each).name for each in report["drafter"].split("+"))


def told(report: dict[str, Any]) -> str:
    """A report in one line."""
    bases = {"speedup": "plain", "speedup_vs_transformers": "generate", "speedup_vs_prompt_lookup": "its prompt lookup"}
    over = [f"{report[field]:.2f} × {base}" for field, base in bases.items() if report.get(field)]
    return (
        f"τ {report['mean_accepted_length']:.2f}, {', '.join([*over, report['execution']])}, "
        f"{report['lossless']['checked']} tokens checked, {report['lossless']['near_ties']} near-ties"
    )


def judge_decode(part: str, count: int, *, graphs: bool = True, exact: bool = False) -> Judge:
    """Every report below the part's folder, of which there are ``count``, as :func:`reports_of` checks them."""

    def judge(out: Path, rehearsal: bool) -> Finding:
        reports = reports_of(out / part, graphs=graphs and not rehearsal, exact=exact)
        shown = [f"{drafter_name(report)}: {told(report)}" for report in reports]
        return Finding("; ".join(shown), missing=missing(len(reports), count))

    return judge


CODER_GOALS = {  # on HumanEval: × plain decoding, and τ
    "coder-1.5b": {"eagle3": (2.0, 2.8), "medusa": (1.7, 0.0)},
    "coder-0.5b": {"eagle3": (1.9, 0.0)},
}


def slower(speeds: Mapping[str, float | None]) -> list[str]:
    """Of drafters' speeds over plain decoding, None where none was timed: n-grams alone below 0.97, and merges with
    n-grams below 0.97 × the drafter without them."""
    plain = {"ngram": 1.0, **{f"{name}+ngram": speed for name, speed in speeds.items()}}
    return [name for name, speed in speeds.items() if speed is not None and speed < 0.97 * (plain.get(name) or 0.0)]


def judge_coder(part: str) -> Judge:
    """What benchmarks/gpu/coder.py decoded, on all four sets and on HumanEval; no text may differ, and n-grams may not
    slow decoding down by more than 3 %."""

    def judge(out: Path, rehearsal: bool) -> Finding:
        folder = out / part
        reports = {drafter_name(each): each for each in reports_of(folder / "report", graphs=not rehearsal)}
        reports_of(folder / "report-same-bits", graphs=not rehearsal, exact=True)
        shown, met = list[str](), list[bool]()
        for name, report in reports.items():
            code = report["kinds"]["humaneval"]
            speed, tau = code["speedup"], code["mean_accepted_length"]
            shown.append(f"{name}: {told(report)}, HumanEval {speed or 0:.2f} × at τ {tau:.2f}")
            if goal := CODER_GOALS[part].get(name):
                met.append((speed or 0) >= goal[0] and tau >= goal[1])
        slow = slower({name: report["speedup"] for name, report in reports.items()})
        shown += [f"{name} is slower than without n-grams" for name in slow]
        met += [False] * bool(slow)
        data = json_object(folder / "data.json")
        shown.append(f"{data['answer_tokens']:,} answer tokens")
        return Finding(
            "; ".join(shown), all(met) if met else None, missing=missing(len(reports), 3 if rehearsal else 5)
        )

    return judge


def judge_streams(out: Path, rehearsal: bool) -> Finding:
    """Two merged SSMs, with a stream for the second and without; the texts and trees are the same."""
    folder = out / "ssm-streams"
    reports = [report for name in ("two", "one") for report in reports_of(folder / name, graphs=not rehearsal)]
    if len(reports) < 2:
        return Finding("; ".join(map(told, reports)), missing=missing(len(reports), 2))
    two, one = (report["tokens_per_second"] for report in reports)
    return Finding(
        f"two SSMs, τ {reports[0]['mean_accepted_length']:.2f}: {two:,.0f} tokens/s at the same time, {one:,.0f} one "
        f"after the other ({two / one:.2f} ×)",
        two > one,
    )


def judge_eagle_decode(out: Path, rehearsal: bool) -> Finding:
    """The calibrated fixed tree and a dynamic one, each its own text, and steps in CUDA graphs."""
    shown = [
        f"{tree} tree: {told(report)}"
        for tree in ("fixed", "dynamic")
        for report in reports_of(out / "eagle-decode" / tree, graphs=not rehearsal)
    ]
    return Finding("; ".join(shown), missing=missing(len(shown), 2))


def judge_serving(out: Path, rehearsal: bool) -> Finding:
    """Requests that arrive over time: where speculation pays, by number of rows."""
    report = json_object(out / "serving" / "serving.json")
    for name, texts in report["texts"].items():
        if texts["mismatches"]:
            raise ValueError(f"{name}: {texts['mismatches']} mismatches")
    for name, execution in report["execution"].items():
        check_graph(name, execution, rehearsal)
    figures = len(report["batches"]) + bool(report["texts"])  # the comparison of all texts comes last
    sentences = [sentence for batch in report["batches"] for sentence in batch["sentences"]]
    return Finding("; ".join(sentences), missing=missing(figures, report["planned"] + 1))


def judge_budget(out: Path, rehearsal: bool) -> Finding:
    """Trees of the sizes that steps choose are never slower than plain decoding, over all kinds of text."""
    report = json_object(out / "budget" / "budget.json")
    rows, shown, lowest = [row for row in report["rows"] if row["kind"] == "all"], [], []
    for row in rows:
        check_graph(row["drafter"], row["execution"], rehearsal)
        speed = row["speeds"]["budget"]
        lowest.append((speed["interval"] or [speed["speedup"]])[0])
        how = f"T {row['temperature']:g}, " if row["temperature"] else ""
        shown.append(f"{how}{row['batch']} rows: {speed['speedup']:.2f} ×, {row['nodes']:.1f} nodes")
    return Finding("; ".join(shown), min(lowest, default=0.0) >= 0.97, missing=missing(len(rows), report["planned"]))


def judge_magicdec(out: Path, rehearsal: bool) -> Finding:
    """Speed-ups of self-speculation, the best setting of each batch size and context, beside the predicted ones."""
    report = json_object(out / "magicdec" / "compressed.json")
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for row in report["rows"]:
        check_graph(f"{row['selector']}:{row['entries']}", row["execution"], rehearsal)
        key = row["batch"], row["context"]
        if key not in best or row["speedup"] > best[key]["speedup"]:
            best[key] = row
    shown = [
        f"{rows} × {context}: {row['speedup']:.2f} × ({row['predicted']:.2f} predicted)"
        for (rows, context), row in best.items()
    ]
    return Finding("; ".join(shown), missing="" if shown else "nothing was measured")


def judge_dynaspec(out: Path, rehearsal: bool) -> Finding:
    """Shortlists beside the drafter that they were made for, and with the router on the drafter's own stream: each its
    own text, and steps in CUDA graphs. Speeds within 3 %, to which decode.py knows them, count as equal."""
    folder = model_folder(out, "dynaspec", rehearsal)
    facts = json_object(folder / "provenance.json")
    shown = [f"simulated τ {facts['simulated_tau']:.2f}, with the whole LM head {facts['whole_simulated_tau']:.2f}"]
    both = {report["drafter"]: report for report in reports_of(out / "dynaspec" / "two", graphs=not rehearsal)}
    with_two = both.pop(str(folder), None)
    whole = next(iter(both.values()), None)
    with_one = next(iter(reports_of(out / "dynaspec" / "one", graphs=not rehearsal)), None)
    named = {"shortlists": with_two, "whole LM head": whole, "shortlists on one stream": with_one}
    shown += [f"{name}: {told(report)}" for name, report in named.items() if report]
    met = None
    if with_two and with_one:
        two, one = with_two["tokens_per_second"], with_one["tokens_per_second"]
        shown.append(f"{two:,.0f} tokens/s with a stream for the router, {one:,.0f} without ({two / one:.2f} ×)")
        met = two >= 0.97 * one
    return Finding("; ".join(shown), met, missing=missing(len(shown) - 1 - (met is not None), 3))


def model_folder(out: Path, name: str, rehearsal: bool) -> Path:
    """The run ``target``, ``drafter``, ``ssms``, ``eagle`` or ``dynaspec``; --tiny adds to its name."""
    return out / "models" / (f"{name}-tiny" if rehearsal else name)
