"""Plans of inference/planner.py --drafters beside a grid of measured speeds, with acceptance from other texts than the
grid's: is the planned drafter within 10 % of the best one?

    python benchmarks/plan_grid.py models/tiny-lm --settings 1x512 4x512 4x2048 16x3584 --out GRID/tiny-lm.json
    python benchmarks/plan_grid.py models/smollm2 --drafters models/smollm2-eagle3 --entries 256 \\
        --settings 1x512 16x512 4x2048 1x6144 --out GRID/smollm2.json
    python benchmarks/plan_grid.py models/qwen2.5-coder-0.5b --entries 256 --settings 1x512 4x1024 --out GRID/0.5b.json
    python benchmarks/plan_grid.py models/qwen2.5-coder-1.5b --drafters draft_model:models/qwen2.5-coder-0.5b \\
        --entries 256 --settings 1x512 2x1024 --texts 1 --new-tokens 32 --out GRID/1.5b.json

A setting is rows x cached tokens. First it is planned, as planner.py does it. Then its texts are prefilled once, and
the planned drafter, each other drafter and cache with each of --drafts, and plain decoding continue them over real
steps: all of them once, then those within 20 % of the fastest, the planned one and plain decoding in --rounds further
rounds, which count. Each setting is written to --out when it is done; with the same --out it is not measured again.
"""

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, chosen, list_option, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import json_object
from draftsmith.inference.drafters.names import SELECTORS, check_names
from draftsmith.models.files.locate import known_folder

KINDS = ("books", "manuals", "passages", "values")
# The options that a setting's figures depend on.
MEASURED = "drafters entries selectors drafts kind plan_kind texts new_tokens rounds seed".split()
BAR, NEAR = 0.9, 0.8  # shares of the fastest speed: what a plan has to reach, and what is measured again


def setting(text: str) -> tuple[int, int]:
    """Rows and cached tokens."""
    given = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if given is None:
        raise argparse.ArgumentTypeError(f"{text}: write rows x cached tokens, for example 4x2048")
    return int(given[1]), int(given[2])


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("target", help="as for decode.py --target")
    list_option(parser, "--settings", [(1, 512)], "ROWSxTOKENS", "(1x512)", setting)
    list_option(parser, "--drafters", [], "DRAFTER", "as for planner.py", str)
    list_option(parser, "--entries", [64, 256], "K")
    parser.add_argument(
        "--selectors", nargs="+", choices=SELECTORS, default=["streamingllm", "snapkv"], help="(%(default)s)"
    )
    list_option(parser, "--drafts", [1, 2, 4], "N", "tokens a step, in the grid (%(default)s)")
    parser.add_argument("--kind", choices=KINDS, default="books", help="of the grid's texts (%(default)s)")
    parser.add_argument("--plan-kind", choices=KINDS, help="of the other texts, for acceptance (as --kind)")
    parser.add_argument("--texts", type=int, default=2, help="for acceptance, of each length (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=48, help="of each text (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="that count (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of texts (%(default)s)")
    machine_options(parser, "of the target's weights")
    return parser


def check(args: argparse.Namespace) -> None:
    known_folder(args.target)
    if args.drafters:
        check_names(args.drafters, args.target)
    check_options(args, "entries", "drafts", "texts", "new_tokens", "rounds")
    check_once("--settings", args.settings)


if __name__ == "__main__":
    before_imports(parser(), check)

import time

import torch

from draftsmith.benchmarks.common import take_turns
from draftsmith.benchmarks.tables import facts_of, print_table, table_of
from draftsmith.common.files import write_json
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.protocol import Drafter, PlainDrafter
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.measure.drafter_plans import Candidate, candidates, captures_of, plan_drafters
from draftsmith.inference.measure.prefilled import Prefilled, longest_context, windows
from draftsmith.models.options import choose_device
from draftsmith.models.target import Target, load_target


def say(text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def run_once(batch: Prefilled, make: partial[Drafter]) -> tuple[int, float]:
    """Tokens and seconds of a continuation by a drafter, in a step of its own, which is dropped afterwards."""
    run = batch.run(batch.step(make()))
    return sum(map(sum, run.committed)), run.seconds


def measure_grid(
    batch: Prefilled, grid: dict[str, partial[Drafter]], planned: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Tokens a second of each drafter; ``rounds``: in how many it counts, 0 for those that were too slow at first."""

    def measured(names: list[str], rounds: int) -> dict[str, float]:
        turns = take_turns([partial(run_once, batch, grid[name]) for name in names], rounds)
        totals = {name: torch.tensor(each).double().sum(0) for name, each in zip(names, turns, strict=True)}
        return {name: float(tokens / seconds) for name, (tokens, seconds) in totals.items()}

    found = {name: {"tokens_per_second": speed, "rounds": 0} for name, speed in measured([*grid], 1).items()}
    fastest = max(each["tokens_per_second"] for each in found.values())
    near = [name for name, each in found.items() if each["tokens_per_second"] >= NEAR * fastest]
    again = [*dict.fromkeys(["none", planned, *near])]
    return found | {
        name: {"tokens_per_second": speed, "rounds": rounds} for name, speed in measured(again, rounds).items()
    }


def measure_setting(
    target: Target, drafters: list[Candidate], rows: int, context: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Plan a setting, and measure the grid."""
    began, plan_kind = time.perf_counter(), args.plan_kind or args.kind
    texts = windows(target, args.kind, args.texts + rows, context, args.seed)
    other = texts[: args.texts]
    if plan_kind != args.kind:
        other = windows(target, plan_kind, args.texts, context, args.seed)
    facts = plan_drafters(target, drafters, [context], [rows], {context: other}, args.new_tokens, None)
    (cell,) = facts["cells"]
    expected = {option["drafter"]: option for option in cell["options"]}
    grid: dict[str, partial[Drafter]] = {"none": partial(PlainDrafter, target.device)}
    for each in drafters:
        options = {each.option(drafts): drafts for drafts in each.drafts}
        for name, drafts in options.items():
            if drafts in args.drafts or each.own_tree or name == cell["drafter"]:
                grid[name] = partial(each.make, drafts)
    planning = time.perf_counter() - began
    options = [expected[name] for name in grid if name in expected]
    seconds = sum(args.new_tokens / option["tokens"] * option["seconds"] for option in options)
    say(f"{rows}x{context}: planned in {planning:.0f} s; {len(grid)} methods take about {seconds:.0f} s a round")
    batch = Prefilled(target, texts[args.texts :], args.new_tokens, captures_of(drafters))
    methods = measure_grid(batch, grid, cell["drafter"], args.rounds)
    plain = methods["none"]["tokens_per_second"]
    for name, each in methods.items():
        own = expected.get(name, {"speedup": 1.0})
        each |= {"speedup": round(each["tokens_per_second"] / plain, 4), "predicted": own["speedup"]}
        each["tokens_per_second"] = round(each["tokens_per_second"], 2)
    counted = {name: each["speedup"] for name, each in methods.items() if each["rounds"]}
    best = max(counted, key=lambda name: counted[name])
    return {
        "batch": rows,
        "context": context,
        "planned": cell["drafter"],
        "predicted": cell["speedup"],
        "measured": counted[cell["drafter"]],
        "best": best,
        "best_measured": counted[best],
        "share": round(counted[cell["drafter"]] / counted[best], 4),
        "seconds": {"plan": round(planning, 1), "grid": round(time.perf_counter() - began - planning, 1)},
        "methods": methods,
        "plan": cell,
    }


def earlier(args: argparse.Namespace, target: Target) -> list[dict[str, Any]]:
    """The settings that --out holds already."""
    if args.out is None or not args.out.exists():
        return []
    facts = json_object(args.out, "grid")
    if facts.get("target") != target.describe() or facts.get("options") != chosen(args, *MEASURED):
        raise ValueError(f"{args.out}: has settings of another target or of other options; give another file")
    return [row for row in facts["rows"] if (row["batch"], row["context"]) in args.settings]


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    torch.set_num_threads(args.threads)
    target = load_target(args.target, device=choose_device(args.device), dtype=args.dtype)
    longest = max(context for _, context in args.settings)
    if longest > longest_context(target, args.new_tokens):
        raise ValueError(f"--settings: {longest} tokens are too many: '{target.name}' has {target.context} positions")
    rows = earlier(args, target)
    done = {(row["batch"], row["context"]) for row in rows}
    facts = facts_of(__file__, target) | {"options": chosen(args, *MEASURED), "bar": BAR}
    drafters = candidates(target, args.drafters, args.selectors, args.entries, {})
    models = {id(model): model for each in drafters for model in each.make(max(each.drafts)).models}
    for number, (batch, context) in enumerate(args.settings, 1):
        if (batch, context) in done:
            continue
        say(f"setting {number} of {len(args.settings)}")
        own = [each for each in drafters if each.selector is None or each.selector.entries < context]
        with torch.inference_mode(), engine_attention([target, *models.values()]):
            rows.append(measure_setting(target, own, batch, context, args))
        if args.out:
            write_json(args.out, facts | {"rows": rows})
    table = table_of("rows", "tokens", "planned", "predicted", "measured", "best", "its speed-up", "share")
    for row in rows:
        figures = (f"{row[name]:.2f}" for name in ("predicted", "measured"))
        best = (row["best"], f"{row['best_measured']:.2f}", f"{row['share']:.3f}")
        table.add_row(str(row["batch"]), str(row["context"]), row["planned"], *figures, *best)
    print_table(table, f"plans and grids, {Path(target.name).name}")
    within = sum(row["share"] >= BAR for row in rows)
    print(f"within {1 - BAR:.0%} of the best: {within} of {len(rows)}")


if __name__ == "__main__":
    run_command(main)
