"""Whether the trees that steps choose pay (inference/engine/budget.py): speed over plain decoding, by kind of text,
temperature (0: greedy) and batch size.

    python benchmarks/budget.py models/smollm2-medusa models/smollm2-eagle3+ngram --prompts P.jsonl --out run.json

Plain decoding and a drafter take turns on the same prompts. With --fixed also trees of fixed sizes: the N likeliest
candidates in every step. Intervals of 95 % are over groups of prompts and rounds.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, list_option, machine_options, prompts_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="as for decode.py")
    prompts_option(parser)
    parser.add_argument("--target", help="as for decode.py")
    list_option(parser, "--temperatures", [0.0, 0.7, 1.0], "T", kind=float)
    list_option(parser, "--batch-sizes", [1, 8, 32], "B")
    list_option(parser, "--fixed", [], "N", "sizes of trees, without the root")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="tokens of every answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each group of prompts (%(default)s)")
    machine_options(parser, "of the target's weights")
    return parser


def check(args: argparse.Namespace) -> None:
    check_names(args.drafters, args.target)
    check_prompts(args.prompts)
    check_options(args, "max_new_tokens", "rounds", "batch_sizes", "fixed")
    if args.max_new_tokens < 2:
        raise ValueError("--max-new-tokens: at least 2, of which the first is the prompt's")
    check_once("--temperatures", args.temperatures)


if __name__ == "__main__":
    before_imports(parser(), check)

import torch

from draftsmith.benchmarks.common import by_kind, elapsed, load_for, take_turns, with_interval
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of
from draftsmith.common.files import write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.step import static_by_default
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.timing import with_own_seeds
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.target import Target


def groups_of(prompts: Sequence[list[int]], kinds: Sequence[str], rows: int) -> list[tuple[str, list[int]]]:
    """Kind and prompts' numbers of what is decoded together: of one kind each, repeated where they are fewer than the
    rows of a batch."""
    groups = []
    for kind, own in sorted(by_kind(kinds).items()):
        size = max(rows, 2)
        own = (own * -(-size // len(own)))[: max(size, len(own) // size * size)]
        groups += [(kind, own[first : first + size]) for first in range(0, len(own), size)]
    return groups


def measure(
    name: str,
    drafter: Drafter,
    target: Target,
    prompts: list[list[int]],
    kinds: Sequence[str],
    temperature: float,
    rows: int,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Speed by kind, of the budget's trees and of fixed ones, over plain decoding."""
    mode: Mode = "sample" if temperature else "greedy"
    groups = groups_of(prompts, kinds, rows)
    decoders = {"plain": SpeculativeDecoder(target), "budget": SpeculativeDecoder(target, drafter)}
    if args.fixed:
        fixed = SpeculativeDecoder(target, load_drafter(name, target, all_nodes=True)[1])
        decoders |= {f"{most} nodes": fixed for most in args.fixed}
    bounds = dict.fromkeys(decoders, None) | {f"{most} nodes": most for most in args.fixed}
    seconds: dict[str, list[list[float]]] = {method: [] for method in decoders}  # of each group
    steps = {kind: [0, 0, 0] for kind in sorted({*kinds})}  # committed tokens, steps and drafted nodes of the budget

    def decode(method: str, own: Sequence[int]) -> list[Generation]:
        samplings = with_own_seeds(Sampling(temperature or 1.0), [prompts[number] for number in own])
        requests = [
            Request(prompts[number], args.max_new_tokens, sampling, frozenset(), max_draft_nodes=bounds[method])
            for number, sampling in zip(own, samplings, strict=True)
        ]
        return decoders[method].serve(requests, rows, mode=mode)

    for kind, own in groups:
        texts = {method: decode(method, own) for method in decoders}  # the first time they allocate
        expected = [each.tokens for each in texts["plain"]]
        for method, found in texts.items():
            if decoders["plain"].bitwise and [each.tokens for each in found] != expected:
                raise ValueError(f"'{name}', {method}: its texts are not those of plain decoding")
        steps[kind][0] += sum(sum(each.accepted) for each in texts["budget"])
        steps[kind][1] += sum(len(each.accepted) for each in texts["budget"])
        steps[kind][2] += sum(each.drafted for each in texts["budget"])
        runs = [functools.partial(elapsed, functools.partial(decode, each, own), target.device) for each in decoders]
        for method, times in zip(decoders, take_turns(runs, args.rounds), strict=True):
            seconds[method].append(times)
    figures = []
    for kind in [*steps, "all"]:
        chosen = [place for place, (each, _) in enumerate(groups) if kind in (each, "all")]
        committed, count, drafted = (
            sum(values) for values in zip(*(steps[each] for each in steps if kind in (each, "all")), strict=True)
        )
        speeds = {}
        for method in list(seconds)[1:]:
            columns = torch.tensor([[t for p in chosen for t in seconds[each][p]] for each in ("plain", method)])
            speeds[method] = with_interval(columns, name="speedup")
        setting = {"drafter": name, "temperature": temperature, "batch": rows, "kind": kind}
        found = {"tau": round(committed / count, 3), "nodes": round(drafted / count, 2), "speeds": speeds}
        figures.append(setting | found | {"execution": decoders["budget"].execution})
    return figures


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    torch.set_num_threads(args.threads)
    given, target = read_prompts(args.prompts), None
    rows: list[dict[str, Any]] = []
    table = table_of("drafter", "T", "batch", "kind", "τ", "nodes", "× plain", *(f"{n} nodes" for n in args.fixed))
    settings = [(temperature, batch) for temperature in args.temperatures for batch in args.batch_sizes]
    with ProgressBar("decoding", len(args.drafters) * len(settings), console, transient=True) as advance:
        for done, name in enumerate(args.drafters):
            target, drafter = load_for(name, target, args)
            if args.fixed and static_by_default(target):
                raise ValueError("--fixed: on a GPU a step has one of its graphs' sizes; leave it out")
            prompts, kinds = encode_prompts(given, target), [prompt.kind or "other" for prompt in given]
            for number, (temperature, batch) in enumerate(settings, 1):
                found = measure(name, drafter, target, prompts, kinds, temperature, batch, args)
                rows += found
                for each in found:
                    speeds = [cell(one["speedup"], one["interval"]) for one in each["speeds"].values()]
                    setting = f"{temperature:g}", str(batch), each["kind"], f"{each['tau']:.2f}", f"{each['nodes']:.1f}"
                    table.add_row(name, *setting, *speeds)
                advance(done * len(settings) + number)
                if args.out:  # what is measured so far
                    facts = {"prompts": len(prompts), "planned": len(args.drafters) * len(settings), "rows": rows}
                    write_json(args.out, facts_of(__file__, target) | facts)
    print_table(table)


if __name__ == "__main__":
    run_command(main)
