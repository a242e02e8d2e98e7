"""The papers' claims, each a command: the published figure, our commands, our figures with intervals, and a verdict.

    python benchmarks/claims.py --list                        # the claims, what each takes, and verdicts so far
    python benchmarks/claims.py eagle-dynamic-tree            # run its commands; writes runs/claims/NAME.json
    python benchmarks/claims.py eagle-dynamic-tree --small    # the same in seconds, on the bundled target: no verdict
    python benchmarks/claims.py eagle-dynamic-tree --seed 1   # again with other prompts, training and samples
    python benchmarks/claims.py eagle-dynamic-tree --show     # its commands, to run by hand
    python benchmarks/claims.py --table                       # all results as a Markdown table
    python benchmarks/claims.py --keep                        # keep what was run here, and write docs/claims.md

A claim is that its judged figures are above a bound. It is confirmed if the 95 % intervals of all lie above, refuted
for those that lie below, and undecided otherwise: each verdict is only about the experiment in its row.
It holds where the results of all seeds have it, and is reproduced where their intervals overlap.
A claim about speed needs a machine that does nothing else. Drafters that a claim trains are made once and kept.
"""

import argparse
import datetime
import difflib
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_folder, json_object, write_json, write_text

ROOT = Path(__file__).resolve().parent.parent
RUNS, KEPT, PAGE = Path("runs/claims"), "benchmarks/claims.json", "docs/claims.md"


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims to run, as --list has them")
    parser.add_argument("--small", action="store_true", help="tiny versions, which show that the commands work")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, training and samples (%(default)s)")
    parser.add_argument("--show", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--list", action="store_true", help="list all claims")
    parser.add_argument("--table", action="store_true", help="print all results, kept ones and those of --out")
    parser.add_argument("--keep", action="store_true", help=f"add the results in --out to {KEPT}, write {PAGE}")
    parser.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help="of results and runs (%(default)s)")
    return parser


def check(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: there is nothing to do, or two things at once; --out cannot be written.
    """
    if sum([bool(args.names), args.list, args.table, args.keep]) != 1:
        raise ValueError("give the NAMEs of claims, or one of --list, --table and --keep")
    if (args.small or args.show or args.seed) and not args.names:
        raise ValueError("--small, --show and --seed need the NAME of a claim")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed}: must be 0 or more")
    check_folder("--out", args.out)


if __name__ == "__main__":
    before_imports(parser(), check)

import torch

from draftsmith.benchmarks.claim_figures import Figure
from draftsmith.benchmarks.documents import markdown_table
from draftsmith.benchmarks.published import CLAIMS, Claim
from draftsmith.benchmarks.tables import cell, print_table, table_of
from draftsmith.inference.commands.terminal import console
from draftsmith.models.artifact import device_name, versions

BY_NAME = {claim.name: claim for claim in CLAIMS}
ABOUT = f"""# The papers' claims

Written from {KEPT} by `python benchmarks/claims.py --keep`, which adds new results first. A verdict is only about the
experiment in its row; [how claims are run and judged](decoding.md#a-papers-claim-reproduced). †: a
figure noted from the paper earlier and not read again. Figures of ours that are not judged are printed by the claim's
command. If a figure has two values, the second is of `--seed 1`: other prompts, and other training and samples if there
are any.
"""
AWAITS, IMPOSSIBLE, QUIET = "awaits a GPU", "not comparable", "not run here"


def find(name: str) -> Claim:
    """
    Raises:
        ValueError: there is no such claim.
    """
    if name not in BY_NAME:
        close = difflib.get_close_matches(name, BY_NAME, n=1)
        raise ValueError(f"no claim '{name}'" + (f"; did you mean {close[0]}?" if close else "; see --list"))
    return BY_NAME[name]


def suffix(small: bool, seed: int) -> str:
    return "-small" * small + f"-seed{seed}" * bool(seed)


def commands_of(claim: Claim, small: bool, folder: Path, seed: int = 0) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """A claim's commands, each with the path that it makes (empty: it is run in any case), and their fields. Paths are
    relative to the project's folder, where commands run."""
    own, shared = (os.path.relpath(folder / (name + suffix(small, seed)), ROOT) for name in (claim.name, "shared"))
    fields: dict[str, Any] = {"out": own, "shared": shared, "seed": seed}
    for name, value in (claim.small if small else claim.full).items():
        placed = value.replace("{shared}", shared) if isinstance(value, str) else value
        fields[name] = placed
    found: list[tuple[str, str]] = []
    for command in (*(claim.first if small else ()), *claim.commands):
        words = " ".join(command.format_map(fields).split())
        made, separator, rest = words.partition(": ")
        found.append((made, rest) if separator and " " not in made else ("", words))
    return found, fields


def run(claim: Claim, small: bool, folder: Path, seed: int, ran: set[str]) -> dict[str, Any]:
    """Run a claim's commands, but for those that other claims ``ran``, and judge what they write.

    Raises:
        ValueError: a command failed, or the claim has none for this machine.
    """
    if claim.read is None:
        raise ValueError(f"{claim.name}: {claim.why_not or 'awaits a GPU; --show prints its commands'}")
    commands, fields = commands_of(claim, small, folder, seed)
    own = ROOT / fields["out"]
    own.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    write = claim.files
    for made, command in commands:
        if write and not made:  # the drafters are there by now
            write(own, fields)
            write = None
        if command in ran or (made and (ROOT / made).exists()):
            continue
        console.print(command, style="bold", markup=False, soft_wrap=True)
        ran.add(command)
        words = [sys.executable if word == "python" else word for word in shlex.split(command)]
        if (code := subprocess.run(words, cwd=ROOT, check=False).returncode) != 0:
            raise ValueError(f"{claim.name}: a command failed (exit code {code}): {command}")
    figures = claim.read(ROOT / fields[claim.at])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        "name": claim.name,
        "small": small,
        "seed": seed,
        "verdict": "none: a small run" if small else judge(figures),
        "tested": claim.tested,
        "figures": [vars(each) for each in figures],
        "command": f"python benchmarks/claims.py {claim.name}" + " --small" * small + f" --seed {seed}" * bool(seed),
        "commands": [command for _, command in commands],
        "seconds": round(time.monotonic() - began),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": re.sub(r", \d+ threads$", "", device_name(device)),  # each command says its own in its report
        "versions": versions(),
    }


def judge(figures: Sequence[Figure]) -> str:
    """The verdict on figures, from the intervals of those that have a bound."""
    judged = [each for each in figures if each.above is not None]
    if not all(each.interval for each in judged):
        return f"{IMPOSSIBLE}: too few texts for an interval"
    found = by_verdict(judged)
    if "refuted" in found and len(found) > 1:  # the rest stands in the table
        return f"refuted for {', '.join(found['refuted'])}"
    return next(iter(found)) if len(found) == 1 else "undecided"


def by_verdict(judged: Sequence[Figure]) -> dict[str, list[str]]:
    """Which judged figures are confirmed, refuted and undecided."""
    found: dict[str, list[str]] = {}
    for each in judged:
        low, high = each.interval or (math.nan,) * 2
        above = each.above or 0.0
        found.setdefault("confirmed" if low > above else "refuted" if high < above else "undecided", []).append(
            each.what
        )
    return found


# ---- results


def kept() -> dict[str, list[dict[str, Any]]]:
    """By claim: the kept results, by seed."""
    path = ROOT / KEPT
    return json_object(path, "results") if path.exists() else {}


def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By claim: the kept results, and, in the place of those with their seed, those of the folder; no small ones."""
    files = [json_object(path, "result") for path in sorted(folder.glob("*.json"))]
    own = [each for each in files if {"small", "name", "seed"} <= {*each}]  # other commands may write there, too
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for each in (*itertools.chain(*kept().values()), *own):
        if not each["small"] and each["name"] in BY_NAME:
            by_name.setdefault(each["name"], {})[each["seed"]] = each
    return {name: [own[seed] for seed in sorted(own)] for name, own in by_name.items()}


def judged_of(result: dict[str, Any]) -> list[Figure]:
    return [Figure(**each) for each in result["figures"] if each["above"] is not None]


def reproduced(found: Sequence[dict[str, Any]]) -> bool:
    """Whether the intervals of each judged figure overlap."""

    def overlap(group: Sequence[Figure]) -> bool:
        intervals = [each.interval for each in group if each.interval]
        return len(intervals) == len(group) and max(i[0] for i in intervals) <= min(i[1] for i in intervals)

    return all(map(overlap, zip(*map(judged_of, found), strict=True)))


def verdict_of(claim: Claim, found: Sequence[dict[str, Any]]) -> str:
    """Of all results of a claim: theirs, if they have the same."""
    if found:
        verdicts = [str(each["verdict"]) for each in found]
        if len(found) == 1:
            return verdicts[0]
        seeds = " and ".join(str(each["seed"]) for each in found)
        overlap = "intervals overlap" if reproduced(found) else "intervals apart"
        if len(set(verdicts)) == 1:
            return f"{verdicts[0]}, by seeds {seeds}; {overlap}"
        return f"undecided: {', '.join(verdicts)}, by seeds {seeds}; {overlap}"
    if claim.why_not:
        return f"{IMPOSSIBLE}: {claim.why_not}"
    return AWAITS if claim.awaits else QUIET


def of_earlier_form(claim: Claim, found: Sequence[dict[str, Any]]) -> list[str]:
    """What was tested by the results whose commands have changed since."""
    tested = dict.fromkeys(each.get("tested", claim.tested) for each in found)
    return [each for each in tested if each != claim.tested]


def in_short(claim: Claim, found: Sequence[dict[str, Any]]) -> str:
    """The verdict's first words, for how many of the judged figures it holds, if for the same ones by all seeds, and
    the number of seeds, if there are several."""
    word = re.split(":|, | for ", verdict_of(claim, found))[0]
    if not found:
        return word
    seeds = f", {len(found)} seeds" * (len(found) > 1) + ", of an earlier form" * bool(of_earlier_form(claim, found))
    judged = [judged_of(each) for each in found]
    holds = [by_verdict(figures).get(word, [each.what for each in figures]) for figures in judged]
    if len({each["verdict"] for each in found}) > 1 or holds.count(holds[0]) < len(holds):
        return word + seeds
    return f"{word} for {len(holds[0])} of {len(judged[0])}{seeds}"


def figure_text(figures: Sequence[Figure]) -> str:
    """One figure of all results."""
    cells = ", ".join(cell(each.value, each.interval, ".3f", " to ") for each in figures)
    bound = f" [judged: > {figures[0].above:g}]" if figures[0].above is not None else ""
    return f"{figures[0].what}: {cells}{bound}"


def print_result(result: dict[str, Any]) -> None:
    table = table_of("figure", "value", "95 % interval", "judged")
    for each in result["figures"]:
        low_high = " to ".join(f"{bound:.3f}" for bound in each["interval"] or ()) or "–"
        bound = "–" if each["above"] is None else f"> {each['above']:g}"
        table.add_row(each["what"], cell(each["value"], form=".3f"), low_high, bound)
    print_table(table, f"{result['name']}: {result['verdict']}")
    if not result["small"]:
        print(f"Tested: {result['tested']}.")


def print_list(folder: Path) -> None:
    found = results(folder)
    table = table_of("claim", "minutes", "verdict, figures", "paper", left=1)
    for claim in CLAIMS:
        minutes = f"{claim.minutes}{', alone' if claim.speed else ''}" if claim.minutes else "–"
        table.add_row(claim.name, minutes, in_short(claim, found.get(claim.name, [])), claim.paper)
    print_table(table)


def markdown(found: dict[str, list[dict[str, Any]]]) -> str:
    """One row for each claim: the paper's statement, what was tested, our judged figures, where and when, verdict."""
    columns = ("claim, paper", "published", "tested here", "ours (95 % interval)", "machine, date", "verdict")
    rows = list[Sequence[str]]()
    for claim in CLAIMS:
        own = found.get(claim.name, [])
        ours = "; ".join(map(figure_text, zip(*map(judged_of, own), strict=True))) or "–"
        where = "; ".join(dict.fromkeys(f"{each['device']}, {each['date']}" for each in own)) or "–"
        commands = "; ".join(f"`{command}`" for command in claim.commands) if claim.awaits else ""
        if claim.read is not None:
            commands = f"`python benchmarks/claims.py {claim.name}`"
        tested = " ".join(filter(None, (claim.tested, commands))) or "–"
        verdict = verdict_of(claim, own)
        for earlier in of_earlier_form(claim, own):
            verdict += f". **These figures are of an earlier form**, which has not run again: {earlier}"
        rows.append((f"**{claim.name}**, {claim.paper}", claim.published, tested, ours, where, verdict))
    return markdown_table(columns, rows)


def page() -> str:
    """The document of the kept results."""
    return f"{ABOUT}\n{markdown(kept())}\n"


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    claims, ran = [find(name) for name in args.names], set[str]()
    if args.list:
        print_list(args.out)
    elif args.table:
        print(markdown(results(args.out)))
    elif args.keep:
        together = results(args.out)
        write_json(ROOT / KEPT, {name: together[name] for name in BY_NAME if name in together})
        write_text(ROOT / PAGE, page())
        console.print(f"wrote {KEPT}: {len(together)} results; and {PAGE}", markup=False)
    for claim in claims:
        if args.show:
            commands, _ = commands_of(claim, args.small, args.out, args.seed)
            print("\n".join(command for _, command in commands) or claim.why_not)
            continue
        result = run(claim, args.small, args.out, args.seed, ran)
        print_result(result)
        file = args.out / f"{claim.name}{suffix(args.small, args.seed)}.json"
        write_json(file, result)
        console.print(f"wrote {file}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
