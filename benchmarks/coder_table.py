"""The tables of drafters in README.md and RESULTS.md, made from reports of inference/decode.py.

    python benchmarks/coder_table.py runs/coder/report.json               # print the table of some reports
    python benchmarks/coder_table.py --keep runs/coder/*/report.json      # keep what it needs of them
    python benchmarks/coder_table.py --write README.md RESULTS.md         # the kept ones' tables, between their markers

A row is a target, a drafter and a device: training tokens and time, then τ and tokens/s over plain decoding on each of
four sets of prompts and on all of them, each with its 95 % interval, and how many tokens differ from plain decoding.
transformers' own decoding, its prompt lookup and its assisted generation are rows too where --baseline all timed them
beside the drafters.
Kept reports are benchmarks/results/coder/*.json, without paths and without figures of single prompts; a report of the
same target, drafter, device and dtype takes the place of the one before. A document's marker says which rows it has:
smollm2-table those of SmolLM2, and coder-table the others, with published figures (benchmarks/results/published.json)
below.

The reports are written by decode.py with the four sets as files, named humaneval.jsonl, mbpp.jsonl, gsm8k.jsonl and
mt-bench.jsonl (--prompts for each), --baseline engine or all, and --check-lossless.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.documents import between, markdown_table
from draftsmith.common.command import CommandLine, make_console, run_command
from draftsmith.common.files import json_object, read_text, write_json, write_text
from draftsmith.inference.drafters.names import short_name

ROOT = Path(__file__).resolve().parent.parent
KEPT = "benchmarks/results/coder"
PUBLISHED = "benchmarks/results/published.json"
SETS = {"humaneval": "HumanEval", "mbpp": "MBPP", "gsm8k": "GSM8K", "mt-bench": "MT-Bench"}
TABLES = ("coder-table", "smollm2-table")
PEERS = {
    "transformers": "transformers, generate",
    "prompt_lookup": "transformers, prompt lookup",
    "assisted": "transformers, assisted generation",
}
FIGURES = ("prompts", "timed_prompts", "mean_accepted_length", "mean_accepted_length_interval", "speedup")
FIGURES += ("speedup_interval", "tokens_per_second", "baselines")
FACTS = ("target_fingerprint", "device", "dtype", "mode", "lossy", "sampling", "max_new_tokens", "batch_size")
FACTS += ("tree_nodes", "execution", "training", "lossless", "versions", "date")


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("reports", nargs="*", type=Path, metavar="REPORT.json", help="the kept ones if left out")
    parser.add_argument("--keep", action="store_true", help=f"write what the table needs of them into {KEPT}/")
    parser.add_argument(
        "--write", type=Path, nargs="+", default=[], metavar="FILE.md", help="put the kept ones' tables there"
    )
    return parser


# ---- reports


def without_paths(command: str) -> str:
    """A command whose paths outside the project are file names."""
    words = [short_name(word) if word.startswith(("/", "~", "..")) else word for word in shlex.split(command)]
    return shlex.join(words)


def reduced(report: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the table needs of a report; one that is kept is returned as it is.

    Raises:
        ValueError: it is no report by kind of text, or of other kinds.
    """
    if "sets" in report:
        return dict(report)
    missing = [name for name in ("drafter", "target", "kinds", "lossless") if name not in report]
    if missing:
        raise ValueError(f"{where}: no report of inference/decode.py: it has no '{missing[0]}'")
    kinds = report["kinds"]
    if not kinds or kinds.keys() - SETS.keys():
        found = ", ".join(kinds) or "none"
        raise ValueError(
            f"{where}: its kinds of text are {found}; of {', '.join(SETS)}, at least two: give decode.py --prompts "
            "for each file of that name, in which rows have no kind or category of their own"
        )

    def figures(of: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: of.get(name) for name in FIGURES}
        plain = (of.get("baselines") or {}).get("engine") or {}
        return found | {"baselines": {"engine": {"tokens_per_second": plain.get("tokens_per_second")}}}

    return {
        "target": Path(report["target"]).name,
        "drafter": short_name(report["drafter"]),
        **{name: report[name] for name in FACTS if name in report},
        "command": without_paths(report.get("command", "")),
        "all": figures(report),
        "sets": {name: figures(kinds[name]) for name in SETS if name in kinds},
    }


def peers(report: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """What the table needs of transformers' methods that a report timed beside plain decoding by the engine."""
    bases: Mapping[str, Any] = report.get("per_group", {}).get("baselines", {})
    if not {*PEERS} & {*bases} or "engine" not in bases:
        return []
    from draftsmith.inference.measure.timing import Timed, speedup, speedup_fields

    of = report["per_prompt"]
    kind_of = dict(zip(of["group"], of["kind"], strict=True))  # of each timed group
    of_all = reduced(report, where) | {"training": None, "lossless": None, "tree_nodes": 0, "execution": "transformers"}

    def figures(peer: str, kind: str | None) -> dict[str, Any]:
        timed = list[Timed]()
        for method in (bases[peer], bases["engine"]):
            own = [n for n in range(len(method["seconds"])) if kind in (None, kind_of[n])]
            timed.append(Timed({}, [method["new_tokens"][n] for n in own], [[method["seconds"][n]] for n in own]))
        of_drafter = of_all["all"] if kind is None else of_all["sets"][kind]
        speed = {"mean_accepted_length": None, "mean_accepted_length_interval": None}
        speed |= speedup_fields("speedup", speedup(*timed))
        return of_drafter | speed | {"tokens_per_second": round(timed[0].tokens_per_second, 2)}

    return [
        of_all
        | {"drafter": name, "all": figures(peer, None), "sets": {kind: figures(peer, kind) for kind in of_all["sets"]}}
        for peer, name in PEERS.items()
        if peer in bases
    ]


def file_of(report: Mapping[str, Any]) -> Path:
    """Where a reduced report is kept."""
    device = re.sub(r", \d+ cores.*", "", report["device"])
    name = "-".join((report["target"], report["drafter"], device, report["dtype"])).lower()
    return ROOT / KEPT / f"{re.sub(r'[^a-z0-9.+]+', '-', name).strip('-')}.json"


def kept() -> list[dict[str, Any]]:
    return [json_object(path, "kept report") for path in sorted((ROOT / KEPT).glob("*.json"))]


# ---- the table


def count_text(count: float | None) -> str:
    if count is None:
        return "–"
    unit, size = next((pair for pair in ((" M", 1e6), (" k", 1e3)) if count >= pair[1]), ("", 1.0))
    return f"{count / size:.3g}{unit}"


def time_text(seconds: float | None) -> str:
    if seconds is None:
        return "time not known"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def training_text(training: Mapping[str, Any] | None) -> str:
    """Distinct answer tokens, the labels that training saw, its time and device."""
    if not training:
        return "none"
    seen = training.get("labels_seen")
    tokens = count_text(training.get("answer_tokens")) + (f", {count_text(seen)} seen" if seen else "")
    where = re.sub(r", \d+ cores.*", "", training["device"]) if training.get("device") else ""
    began = " (after an earlier training)" if training.get("init_from") else ""
    return f"{tokens}; {time_text(training.get('seconds'))}{f', {where}' if where else ''}{began}"


def with_bounds(value: float | None, bounds: Sequence[float] | None, sign: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:.2f}{sign}" + (f" ({bounds[0]:.2f}–{bounds[1]:.2f})" if bounds else "")


def figures_text(of: Mapping[str, Any] | None) -> str:
    """τ, if it has one, and × plain decoding."""
    if of is None:
        return "–"
    tau = with_bounds(of["mean_accepted_length"], of["mean_accepted_length_interval"])
    speed = with_bounds(of["speedup"], of["speedup_interval"], " ×")
    return speed if of["mean_accepted_length"] is None else f"{tau}; {speed}"


def exact_text(report: Mapping[str, Any]) -> str:
    """How many of the checked tokens differ from those of plain decoding."""
    lossless = report["lossless"]
    if report.get("lossy"):
        return "lossy"
    if not lossless:
        return "not compared"
    ties = f", {lossless['near_ties']} near-ties" if lossless["near_ties"] else ""
    return f"{lossless['mismatches']:,} of {lossless['checked']:,}{ties}"


def device_text(report: Mapping[str, Any]) -> str:
    """Device, dtype, and what plain decoding does there."""
    device = re.sub(r", (\d+) cores, (\d+) threads", r", \2 threads", report["device"])
    plain = report["all"]["baselines"]["engine"]["tokens_per_second"]
    batch = f", batch {report['batch_size']}" if report["batch_size"] > 1 else ""
    mode = "" if report["mode"] == "greedy" else f", {report['mode']}"
    return f"{device}, {report['dtype']}{batch}{mode}" + (f"; plain {plain:,.0f} tokens/s" if plain else "")


def setting_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """What was decoded in which rows."""
    said: dict[str, list[str]] = {}
    for report in reports:
        counts = {name: of["prompts"] for name, of in report["sets"].items()}
        same = len({*counts.values()}) == 1
        number = f"{next(iter(counts.values()))} prompts" if same else ", ".join(map(str, counts.values())) + " prompts"
        setting = f"{number} of each set, answers of at most {report['max_new_tokens']} tokens"
        said.setdefault(setting, []).append(report["target"])
    of = {setting: f" ({', '.join(dict.fromkeys(names))})" if len(said) > 1 else "" for setting, names in said.items()}
    whole = "; ".join(f"{setting}{of[setting]}" for setting in said)
    return whole[0].upper() + whole[1:]


def measured(reports: Sequence[Mapping[str, Any]]) -> str:
    """The table of measured drafters."""
    if not reports:
        return f"No report is kept in `{KEPT}` yet; `python benchmarks/coder_table.py` makes the table of them."
    rows: list[list[str]] = []
    for report in sorted(reports, key=lambda each: (each["target"], each["device"], each["drafter"])):
        whole = report["all"] if {*report["sets"]} == {*SETS} else None
        row = [report["target"], report["drafter"], device_text(report), training_text(report.get("training"))]
        row += [figures_text(report["sets"].get(name)) for name in SETS]
        of_all = figures_text(whole)
        if whole and (timed := whole["timed_prompts"]) < whole["prompts"]:
            of_all += f"; {timed} of {whole['prompts']} prompts"
        rows.append([*row, of_all, exact_text(report)])
    heads = ["target", "drafter", "device", "training: answer tokens; time", *SETS.values()]
    heads += ["all four", "tokens that differ"]
    said = "τ (bonus token included); × plain decoding by the same engine; in brackets 95 % intervals over prompts. If "
    said += "only some prompts were timed, τ and × are over those, whose number stands beside all four sets. "
    said += f"{setting_text(reports)}. Made by `python benchmarks/coder_table.py` "
    return f"{markdown_table(heads, rows)}\n\n{said}([how](docs/training.md#what-n-training-tokens-give))."


def published() -> str:
    """The table of published figures."""
    rows: list[list[str]] = []
    for row in json_object(ROOT / PUBLISHED, "published figures")["rows"]:
        shown = list[str]()
        for name in SETS:
            figures = row["sets"].get(name) or {}
            speedup = f"; {figures['x']:.2f} ×" if "x" in figures else ""
            shown.append(with_bounds(figures.get("tau"), None) + speedup)
        rows.append([row["target"], row["drafter"], row["setting"], row["training"] or "–", *shown, row["source"]])
    heads = ["target", "drafter", "setting", "training", *SETS.values(), "source"]
    return (
        "Published figures, as their authors give them: other targets, hardware, prompts and settings, so that they "
        f"show a range and rank nothing.\n\n{markdown_table(heads, rows)}"
    )


def block(reports: Sequence[Mapping[str, Any]], marker: str) -> str:
    """What stands between a marker and its end."""
    small = marker == "smollm2-table"
    rows = measured([report for report in reports if report["target"].startswith("smollm2") == small])
    return rows if small else f"{rows}\n\n{published()}"


def place(text: str, name: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """A document with the tables whose markers it has.

    Raises:
        ValueError: it has none, or one without its end.
    """
    markers = [marker for marker in TABLES if f"<!-- {marker} -->" in text]
    for marker in markers or TABLES:
        before, _, after = between(text, name, f"<!-- {marker} -->", f"<!-- /{marker} -->")
        text = before + block(reports, marker) + after
    return text


def main() -> None:
    args = parser().parse_intermixed_args()
    if args.keep and not args.reports:
        raise ValueError("--keep needs the REPORT.json files to keep")
    if args.write and args.reports and not args.keep:
        raise ValueError("--write takes the kept reports; add --keep, or leave out --write")
    console = make_console()
    read = [(json_object(path, "report"), str(path)) for path in args.reports]
    given = [reduced(*each) for each in read]
    # Each report of a run has the same ones.
    given += {(file_of(peer), peer["command"]): peer for each in read for peer in peers(*each)}.values()
    for report in given if args.keep else ():
        file = file_of(report)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, report)
        console.print(f"wrote {file.relative_to(ROOT)}", markup=False, soft_wrap=True)
    for path in args.write:
        write_text(path, place(read_text(path, "document"), str(path), kept()))
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if not args.write:
        print(f"{measured(given if args.reports and not args.keep else kept())}\n\n{published()}")


if __name__ == "__main__":
    run_command(main)
