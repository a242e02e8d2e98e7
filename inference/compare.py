"""Compare reports of decode.py on the same prompts: τ, speed-up and tokens/s, paired by prompt.

    python inference/compare.py runs/a/report.json runs/b/report.json
    python inference/compare.py runs/a runs/b runs/c                  # the folders that --report wrote; B and C with A

A and B are measured over the prompts, or timed groups of prompts, that are in both reports. A 95 % interval is a
bootstrap over them: a resampled prompt brings its figures of A and of B, so that what prompts differ in cancels out.
There is none of fewer than five.
Speeds are not compared where machine, threads, dtype, batch size or the timed groups differ. Those of two commands were
measured at different times: then speed-ups, whose baseline is decoded in turn with the drafter, say more than tokens/s.

Exit codes: 0 done, 1 failed, 2 wrong usage, or the reports have no target or no prompt in common.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from draftsmith.common.command import CommandLine, counted, run_command, slow_imports
from draftsmith.common.files import check_file, json_object, write_json
from draftsmith.inference.commands.terminal import console, make_console
from draftsmith.inference.measure.paired import MIN_PAIRS, Columns, keys_of, pair_groups, pair_prompts

BASES = {
    "engine": "× plain",
    "transformers": "× transformers",
    "prompt_lookup": "× its prompt lookup",
    "assisted": "× its assisted generation",
}
SAME_TEXTS = ("mode", "verify", "sampling", "max_new_tokens")  # or the answers are others
SAME_SPEED = ("dtype", "device", "threads", "batch_size")  # or speeds are not the drafters'


def read_report(path: Path) -> dict[str, Any]:
    """A report.json, or that of a folder. ``device`` loses a CPU's number of threads, which becomes ``threads``.
    Raises FileNotFoundError, ValueError: there is none, or it has no figures of each prompt."""
    path = path / "report.json" if path.is_dir() else path
    report = json_object(path)
    if "drafter" not in report or "device" not in report:
        raise ValueError(f"{path}: is no report of decode.py; give a report.json that its --report wrote")
    if "per_prompt" not in report or "per_group" not in report:
        raise ValueError(
            f"{path}: has no figures of each prompt (per_prompt), it is too old; decode with --report again"
        )
    device, _, threads = re.fullmatch(r"(.*?)(, (\d+) threads)?", report["device"]).groups()  # type: ignore[union-attr]
    return report | {"device": device, "threads": threads, "path": path}


def check_same(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Warnings about what the reports do not share, and whether speeds can be compared.
    Raises ValueError: they have other targets, or no prompt in common."""
    first, second = ((each.get("target_fingerprint") or each["target"]) for each in (a, b))
    if first != second:
        raise ValueError(
            f"{b['path']}: its target is '{b['target']}' ({second[:12]}), that of {a['path']} '{a['target']}' "
            f"({first[:12]}); compare reports of the same target" + ", of one version" * (len(first) != len(second))
        )
    keys = [{*keys_of(each)} for each in (a, b)]
    common = len(keys[0] & keys[1])
    if not common:
        raise ValueError(f"{b['path']}: has no prompt of {a['path']}; decode the same --prompts for both")
    warnings: list[str] = []
    if len({common, len(keys[0]), len(keys[1])}) > 1:
        warnings.append(
            f"of {len(keys[0])} and {len(keys[1])} prompts, {common} in both reports; only these are compared"
        )

    def in_words(value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{name.replace('_', ' ')} {in_words(each)}" for name, each in value.items())
        return "none" if value is None else str(value)

    def differing(one: Mapping[str, Any], other: Mapping[str, Any], names: Collection[str]) -> str:
        pairs = [(name.replace("_", " "), one.get(name), other.get(name)) for name in names]
        return "; ".join(f"{name} {in_words(a)}, {in_words(b)}" for name, a, b in pairs if a != b)

    if what := differing(a, b, SAME_TEXTS):
        warnings.append(f"the answers are not the same: {what}")
    if versions := differing(a["versions"], b["versions"], a["versions"] | b["versions"]):
        warnings.append(f"not the same versions: {versions}")
    if elsewhere := differing(a, b, SAME_SPEED):
        warnings.append(f"speeds are not compared: {elsewhere}")
    of_a, of_b, of_both = ({key for group in pair_groups(each) for key in group} for each in ([a], [b], [a, b]))
    if not elsewhere and (apart := len((of_a & of_b) - of_both)):
        warnings.append(f"speeds of {counted(apart, 'prompt')} not compared: not timed in the same groups")
    return warnings, not elsewhere


def compare(columns: Columns) -> dict[str, Any]:
    """A figure of A and of B over all prompts or groups, their difference and ratio, and the 95 % intervals of both.
    ``columns``: of each prompt or group two amounts, whose sums' ratio is the figure, or four: those of a method and of
    its baseline; of A, then of B."""
    import torch
    from torch import Tensor

    from draftsmith.inference.measure.timing import bootstrap_interval

    table = torch.tensor([*columns.values()], dtype=torch.float64).t()  # [4 or 8, G]

    def figures(sums: Tensor) -> tuple[Tensor, Tensor]:
        rates = sums[0::2] / sums[1::2]
        return (rates[0], rates[1]) if len(rates) == 2 else (rates[0] / rates[1], rates[2] / rates[3])

    def difference(sums: Tensor) -> Tensor:
        a, b = figures(sums)
        return b - a

    def ratio(sums: Tensor) -> Tensor:
        a, b = figures(sums)
        return b / a

    total = table.sum(1)
    a, b = map(float, figures(total))
    intervals = {"difference_interval": bootstrap_interval(table, difference)}
    intervals |= {"ratio_interval": bootstrap_interval(table, ratio)}
    return {"a": a, "b": b, "difference": float(difference(total)), "ratio": float(ratio(total)), **intervals}


def figure_of(columns: Columns) -> float | None:
    """A speed or speed-up over all groups of one report; None if there are none. ``columns``: two or four amounts of
    each group, as :func:`compare` takes them of A."""
    sums = [sum(amounts) for amounts in zip(*columns.values(), strict=True)]
    rates = [tokens / seconds for tokens, seconds in zip(sums[0::2], sums[1::2], strict=True)]
    return rates[0] / rates[1] if len(rates) == 2 else rates[0] if rates else None


def kinds_of(report: Mapping[str, Any]) -> dict[Any, str]:
    """The kind of each prompt, by its key, and of each timed group, by the keys of its prompts, which are of one."""
    kinds = dict(zip(keys_of(report), (kind or "other" for kind in report["per_prompt"]["kind"]), strict=True))
    return kinds | {group: kinds[group[0]] for group in pair_groups([report])}


def rows_of(a: Mapping[str, Any], b: Mapping[str, Any], speeds: bool) -> list[tuple[str | None, str, dict[str, Any]]]:
    """(kind of text, name of the figure, :func:`compare` of it): first of all prompts (kind None), then of each kind in
    A, where there are several. Without ``speeds``, and of those without a group that both reports timed, only A's and
    B's own figures."""
    kind_of, kinds_of_b = kinds_of(a), kinds_of(b)
    bases = [base for base in BASES if all(base in each["per_group"]["baselines"] for each in (a, b))]
    # Else a common group is what was left over in one of them.
    same = speeds and a.get("batch_size") == b.get("batch_size")
    kinds = list(dict.fromkeys(kind_of.values()))
    rows: list[tuple[str | None, str, dict[str, Any]]] = []
    for kind in [None, *(kinds if len(kinds) > 1 else [])]:

        def part(columns: Columns, of: Mapping[Any, str], kind: str | None = kind) -> Columns:
            return {key: amounts for key, amounts in columns.items() if kind in (None, of[key])}

        if paired := part(pair_prompts([a, b]), kind_of):
            rows.append((kind, "τ", compare(paired)))
        for base in [*bases, None]:
            name = BASES[base] if base else "tokens/s"
            if same and (paired := part(pair_groups([a, b], base), kind_of)):
                rows.append((kind, name, compare(paired)))
            else:
                first = figure_of(part(pair_groups([a], base), kind_of))
                second = figure_of(part(pair_groups([b], base), kinds_of_b))
                if first or second:
                    rows.append((kind, name, {"a": first, "b": second, "difference": None}))
    return rows


def print_rows(rows: Sequence[tuple[str | None, str, dict[str, Any]]], b: str = "B") -> None:
    """The table, to stdout, and on stderr which figures have no interval. ``b``: the name of the report that is
    compared with A."""
    compared = [found for _, _, found in rows if found["difference"] is not None]
    without = sum(found["ratio_interval"] is None for found in compared)
    heading = " (95 %)" * (without < len(compared))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "A", b, f"{b} − A{heading}", f"{b} ÷ A{heading}"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)

    def cell(value: float | None, interval: Sequence[float] | None, form: str) -> str:
        if value is None:
            return "–"
        return f"{value:{form}}" + (f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval else "")

    before: str | None = ""
    for kind, name, found in rows:
        if kind != before:
            table.add_row(f"[bold]{escape(kind or 'all')}[/bold]")
        before, digits = kind, ".1f" if name == "tokens/s" else ".2f"
        cells = ("–", "–")
        if found["difference"] is not None:
            difference = cell(found["difference"], found["difference_interval"], f"+{digits}")
            cells = (difference, cell(found["ratio"], found["ratio_interval"], ".2f"))
        table.add_row(f"  {name}", *(cell(found[each], None, digits) for each in "ab"), *cells)
    make_console(stderr=False).print(table)
    if without:
        which = f"{counted(without, 'comparison')} without" if heading else "no"
        console.print(f"{which} 95 % interval: that needs {MIN_PAIRS} prompts, of speeds timed groups, in both reports")


def parser() -> CommandLine:
    parser = CommandLine(__doc__)
    help = "A, B and further ones, each compared with A: a report.json of decode.py --report, or its folder"
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json", help=help)
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write the figures there, too")
    return parser


def main() -> None:
    args = parser().parse_args()
    if len(args.reports) < 2:
        raise ValueError(f"{args.reports[0]}: give at least one other report, with which it is compared")
    check_file("--json", args.json)
    a, *others = map(read_report, args.reports)
    checked = [(each, *check_same(a, each)) for each in others]
    with slow_imports():
        tables = [rows_of(a, each, speeds) for each, _, speeds in checked]

    if args.json:
        figures = [
            {
                "report": str(b["path"]),
                "warnings": warnings,
                "figures": [{"kind": kind, "figure": figure, **found} for kind, figure, found in rows],
            }
            for (b, warnings, _), rows in zip(checked, tables, strict=True)
        ]
        write_json(args.json, {"a": str(a["path"]), "compared": figures})  # first: it must not be lost

    def name(letter: str, report: Mapping[str, Any]) -> None:
        console.print(
            f"{letter}: {report['drafter']} on {report['target']}, {report['path']}", markup=False, soft_wrap=True
        )

    name("A", a)
    for letter, (b, warnings, speeds), rows in zip(map(chr, itertools.count(ord("B"))), checked, tables, strict=False):
        name(letter, b)
        for warning in warnings:
            console.print(f"warning: {warning}", markup=False, soft_wrap=True)
        print_rows(rows, letter)
        if speeds and a["command"] != b["command"]:
            console.print("tokens/s were measured at different times; speed-ups are over plain decoding at that time")
    if args.json:
        console.print(f"wrote {args.json}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
