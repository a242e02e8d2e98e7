"""Self-speculation over a compressed cache (MagicDec, arXiv 2408.11049): acceptance by selector and number of entries,
and speed over plain decoding by batch size and context length, beside what inference/planner.py predicts.

    python benchmarks/compressed.py acceptance models/smollm2 --contexts 2048 --entries 64 128 256 512
    python benchmarks/compressed.py acceptance models/tiny-lm --contexts 2048 --drafters draft_model:DRAFT@1,1,1,1 int8
    python benchmarks/compressed.py speed models/tiny-lm --contexts 1024 3584 --batch-sizes 1 8 --entries 64 256
    python benchmarks/compressed.py selection models/tiny-lm --contexts 3584 --batch-sizes 1 8

Texts are held-out windows as data/prompts.py cuts them: of modules (books), of packages' descriptions (manuals), and of
the latter with a passage to continue or a value to find, of which only tokens far back say how it goes on.

Every batch is prefilled once. Methods take turns to continue from there, over real steps of the engine. Times contain
drafting, verification and later selections, not the prefill and the first selection. α is the share of drafted tokens,
each after accepted ones, that the target accepts; memory_B, beside it, is what a drafting pass of B rows reads, weights
and K/V, as a share of what a plain step of the target does. Intervals of 95 % are over texts (acceptance) or over
batches and rounds (speed).
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, list_option, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.drafters.names import SELECTORS, check_names
from draftsmith.models.files.locate import known_folder

INT8 = "int8"
KINDS = ("books", "manuals", "passages", "values")


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("what", choices=["acceptance", "speed", "selection"], help="what to measure")
    parser.add_argument("target", help="as for decode.py --target")
    list_option(parser, "--contexts", [1024], "S")
    list_option(parser, "--batch-sizes", [1], "B", "of speeds, and of shares of memory (%(default)s)")
    list_option(parser, "--entries", [64, 256], "K")
    parser.add_argument(
        "--selectors", nargs="+", choices=SELECTORS, default=["streamingllm", "snapkv"], help="(%(default)s)"
    )
    list_option(parser, "--drafts", [4], "N", "tokens a step (%(default)s)")
    others = "others to compare with: draft models (of acceptance, chains) as for decode.py; ngram, for speeds; int8, "
    others += "for acceptance: the target with 8-bit linear layers (bitsandbytes)"
    list_option(parser, "--drafters", [], "DRAFTER", others, str)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="(%(default)s)")
    parser.add_argument("--count", type=int, default=4, help="texts of each kind, or batches (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each text (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of speeds (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of texts (%(default)s)")
    machine_options(parser, "of the target's weights")
    return parser


def check(args: argparse.Namespace) -> None:
    known_folder(args.target)
    check_names([name for name in args.drafters if name != INT8 or args.what != "acceptance"], args.target)
    check_options(args, "contexts", "batch_sizes", "entries", "drafts", "count", "new_tokens", "rounds")
    for option in ("contexts", "batch_sizes", "entries", "drafts"):
        check_once(f"--{option.replace('_', '-')}", getattr(args, option))
    alone = args.what == "selection" or not args.drafters
    if alone and min(args.entries) - (args.what == "acceptance") >= max(args.contexts):
        raise ValueError(f"--entries {min(args.entries)}: texts of {max(args.contexts)} tokens have no more")


if __name__ == "__main__":
    before_imports(parser(), check)

import functools
import itertools

import torch

from draftsmith.benchmarks.common import take_turns, with_interval
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of
from draftsmith.common.files import write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.engine.protocol import PlainDrafter
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.engine.step import Step
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.context_costs import context_costs
from draftsmith.inference.measure.planning import Setting, drafter_of, measure, predict_answers
from draftsmith.inference.measure.prefilled import Prefilled, by_depth, longest_context, windows
from draftsmith.models.options import choose_device
from draftsmith.models.sizes import kv_bytes
from draftsmith.models.target import Target, load_target


def settings_of(args: argparse.Namespace, context: int) -> list[Setting]:
    chosen = itertools.product(args.selectors, args.entries, args.drafts)
    return [Setting(selector, entries, drafts) for selector, entries, drafts in chosen if entries < context]


def chain_of(target: Target, name: str, drafts: int) -> DraftModelDrafter:
    """A draft model that drafts a chain."""
    if name == INT8:
        dtype = str(target.dtype).removeprefix("torch.")
        model = load_target(target.name, device=str(target.device), dtype=dtype, quantize="8bit")
        return DraftModelDrafter(model, target, (1,) * drafts)
    drafter = load_drafter(name, target, all_nodes=True)[1]
    if not isinstance(drafter, DraftModelDrafter) or drafter.num_nodes != drafter.max_depth + 1:
        raise ValueError(f"--drafters {name}: α is of chains of one model; write draft_model:PATH@1,1,1")
    return drafter


def bytes_read(model: Target, rows: int, entries: int) -> int:
    """Bytes that a pass of ``rows`` texts over so many entries of their caches reads: weights, but for embeddings that
    are only looked up, and K/V."""
    looked_up = model.embeddings.weight is not model.lm_head.weight
    weights = [p for p in model.model.parameters() if not (looked_up and p is model.embeddings.weight)]
    token = sum(kv_bytes(model.kv_shapes, model.dtype.itemsize))
    return sum(p.numel() * p.element_size() for p in weights) + rows * entries * token


def acceptance(target: Target, args: argparse.Namespace, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """α by kind, context and method."""
    chains = {name: chain_of(target, name, max(args.drafts)) for name in args.drafters}
    found: list[dict[str, Any]] = []
    for kind, context in itertools.product(args.kinds, args.contexts):
        methods = [*settings_of(args, context + 1), *chains]  # all entries, too
        counts: dict[Setting | str, list[list[list[int]]]] = {method: [] for method in methods}  # by text and depth
        for text in windows(target, kind, args.count, context, args.seed):
            batch = Prefilled(target, [text], args.new_tokens)
            for method in methods:
                drafter = drafter_of(target, method) if isinstance(method, Setting) else chains[method]
                with engine_attention(drafter.models):
                    run = batch.run(batch.step(drafter))
                counts[method].append(by_depth(run.committed, drafter.max_depth))
            advance()
        for method, of_texts in counts.items():
            drafted_accepted = torch.tensor(of_texts).sum(1)  # [texts, 2]
            columns = drafted_accepted.flip(1).t()
            total = torch.tensor(of_texts).sum(0)  # [depths, 2]
            if isinstance(method, Setting):
                model, own = target, vars(method)
            else:
                model, held = chains[method].model, chains[method].entries
                entries = None if held is None else min(held.selector.entries, context)
                own = {"selector": method, "entries": entries, "drafts": chains[method].max_depth}
            row = {"kind": kind, "context": context, **own, **with_interval(columns, name="alpha")}
            for rows in args.batch_sizes:
                share = bytes_read(model, rows, own["entries"] or context) / bytes_read(target, rows, context)
                row[f"memory_{rows}"] = round(share, 4)
            row["accepted_by_text"] = columns.t().tolist()  # accepted and drafted tokens
            shares = [round(accepted / max(drafted, 1), 4) for drafted, accepted in total.tolist()]
            found.append(row | {"by_depth": shares})
    return found


def speed(target: Target, args: argparse.Namespace, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """Speed-ups by batch, context and setting, and what is predicted from step costs and acceptance, by what single
    texts cost beyond these."""
    costs = context_costs(target, args.contexts, args.batch_sizes)
    loaded = {name: load_drafter(name, target, all_nodes=True)[1] for name in args.drafters}
    others = {name: drafter or PlainDrafter(target.device) for name, drafter in loaded.items()}
    found: list[dict[str, Any]] = []
    for context in args.contexts:
        settings = settings_of(args, context)
        pairs = sorted({(each.selector, each.entries) for each in settings})
        single, _ = measure(target, costs, windows(target, args.kinds[0], 2, context, args.seed), pairs, 32)
        for rows in args.batch_sizes:
            # Per token.
            seconds: dict[Setting | str, list[float]] = {each: [] for each in ("plain", *settings, *others)}
            depths = {setting: torch.zeros(setting.drafts, 2) for setting in settings}
            executions: dict[Setting | str, str] = {}
            for number in range(args.count):
                kind = args.kinds[number % len(args.kinds)]
                texts = windows(target, kind, (number + 1) * rows, context, args.seed)[number * rows :]
                batch = Prefilled(target, texts, args.new_tokens)
                steps: dict[Setting | str, Step] = {"plain": batch.plain}
                steps |= {each: batch.step(drafter_of(target, each)) for each in settings}
                steps |= {name: batch.step(drafter) for name, drafter in others.items()}
                runs = [functools.partial(batch.run, step) for step in steps.values()]
                turns = take_turns(runs, args.rounds)
                executions |= {method: step.execution for method, step in steps.items()}
                for method, results in zip(steps, turns, strict=True):
                    for run in results:
                        seconds[method].append(run.seconds / sum(map(sum, run.committed)))
                        if isinstance(method, Setting):
                            depths[method] += torch.tensor(by_depth(run.committed, method.drafts))
                advance()
            for setting in settings:
                columns = torch.tensor([seconds["plain"], seconds[setting]])
                conditional = (depths[setting][:, 1] / depths[setting][:, 0].clamp(min=1)).tolist()
                own = replace(single[setting.selector, setting.entries], alpha=conditional)
                plan = predict_answers(costs.seconds, rows, context, setting, own, args.new_tokens)
                row = {"batch": rows, "context": context, **vars(setting), **with_interval(columns, name="speedup")}
                row |= {"by_depth": [round(each, 4) for each in conditional], "tokens": round(plan.tokens, 3)}
                row["predicted"] = round(plan.speedup, 4)
                parts = ("verify", "draft", "select", "least_alpha")
                row |= {name: round(getattr(plan, name), 3) for name in parts}
                found.append(row | {"execution": executions[setting]})
            for name, drafter in others.items():
                columns = torch.tensor([seconds["plain"], seconds[name]])
                row = {"batch": rows, "context": context, "selector": name, "entries": None}
                row |= {"drafts": drafter.max_depth, **with_interval(columns, name="speedup")}
                found.append(row | {"execution": executions[name]})
    return found


def selection(target: Target, args: argparse.Namespace, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """T_select: seconds of a selection of all rows, in plain steps of the batch."""
    found: list[dict[str, Any]] = []
    for context, rows in itertools.product(args.contexts, args.batch_sizes):
        batch = Prefilled(target, windows(target, "books", rows, context, args.seed), args.new_tokens)
        plain = min(run.seconds / run.steps for run in (batch.run(batch.plain) for _ in range(args.rounds)))
        for selector, entries in itertools.product(args.selectors, args.entries):
            if entries >= context:
                continue
            step = batch.step(drafter_of(target, Setting(selector, entries, 1)))
            select = min(batch.run(step).select for _ in range(args.rounds + 1))
            row = {"batch": rows, "context": context, "selector": selector, "entries": entries}
            found.append(row | {"seconds": round(select, 6), "plain_steps": round(select / plain, 3)})
        advance()
    return found


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    torch.set_num_threads(args.threads)
    target = load_target(args.target, device=choose_device(args.device), dtype=args.dtype)
    if max(args.contexts) > longest_context(target, args.new_tokens):
        raise ValueError(f"--contexts {max(args.contexts)}: '{target.name}' has {target.context} positions")
    method = {"acceptance": acceptance, "speed": speed, "selection": selection}[args.what]
    groups = len(args.kinds) if args.what == "acceptance" else len(args.batch_sizes)
    total = len(args.contexts) * groups * (1 if args.what == "selection" else args.count)
    with (
        ProgressBar(args.what, total, console, transient=True) as advance,
        torch.inference_mode(),
        engine_attention([target]),
    ):
        done = itertools.count(1)
        rows = method(target, args, lambda: advance(next(done)))
    names = [name for name in rows[0] if name not in ("interval", "by_depth", "execution", "accepted_by_text")]
    table = table_of(*names)
    for row in rows:
        value = {**row, **{name: cell(row[name], row.get("interval")) for name in ("alpha", "speedup") if name in row}}
        table.add_row(*("–" if value.get(name) is None else str(value[name]) for name in names))
    print_table(table, f"{args.what}, {Path(target.name).name}")
    if args.out:
        write_json(args.out, facts_of(__file__, target) | {"what": args.what, "rows": rows})


if __name__ == "__main__":
    run_command(main)
