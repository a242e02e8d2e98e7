"""Coupled sampling beside multi-step speculative sampling: mean accepted length τ of the same trees, by temperature.

    python benchmarks/coupled.py models/smollm2-eagle3 models/smollm2-medusa --prompts P.jsonl --out coupled.json

    coupled         a drafter proposes the best tokens of log q + noise; a node is accepted iff it is the target's best
                    token of log p + the same noise (algorithms.md §2.6). T = 0 is greedy decoding
    without         SpecInfer's multi-step verification (arXiv 2305.09781 §4.3) of draws without replacement
    iid             the same of independent draws
    deterministic   the same of the drafter's likeliest tokens: a child is accepted with the target's probability of it

Every method verifies all nodes of the tree, so that τ does not depend on the machine. Drafters that run a model for
each level have a tree of --expansion, and EAGLE a dynamic tree of as many nodes; Medusa heads have their own tree, and
draw nothing. Intervals of 95 % are over prompts.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, list_option, machine_options, prompts_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="drafter folders, or draft_model:PATH")
    prompts_option(parser)
    parser.add_argument("--target", help="as for decode.py")
    list_option(parser, "--temperatures", [0.0, 0.3, 0.7, 1.0], "T", kind=float)
    list_option(parser, "--expansion", [3, 2, 1, 1], "K", "children by depth (%(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of all methods (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts decoded at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (%(default)s)")
    machine_options(parser, "of the target's weights")
    return parser


def check(args: argparse.Namespace) -> None:
    check_names(args.drafters, args.target)
    check_prompts(args.prompts)
    check_options(args, "max_new_tokens", "batch_size", "expansion")
    check_once("--temperatures", args.temperatures)


if __name__ == "__main__":
    before_imports(parser(), check)

import torch

from draftsmith.benchmarks.common import by_kind, decoding, load_for, ratio_of, share_of, steps_of, with_interval
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.parallel_eagle import ParallelEagleDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.target import Target

Tree = dict[str, tuple[Drafter, Mode]]  # by method


def trees_of(name: str, drafter: Drafter, expansion: Sequence[int]) -> dict[str, Tree]:
    """The methods of a drafter's trees, by the name of drafter and tree."""
    if not isinstance(drafter, EagleDrafter | DraftModelDrafter) or isinstance(drafter, ParallelEagleDrafter):
        return {name: {"coupled": (drafter, "sample"), "deterministic": (drafter, "mss")}}
    fixed: Tree = {
        "coupled": (drafter.with_tree(expansion), "sample"),
        "without": (drafter.with_tree(expansion), "mss"),
        "iid": (drafter.with_tree(expansion, draws="iid"), "mss"),
        "deterministic": (drafter.with_tree(expansion, draws="none"), "mss"),
    }
    nodes, trees = fixed["coupled"][0].num_nodes, {f"{name}, fixed": fixed}
    if isinstance(drafter, EagleDrafter):
        grown = drafter.with_tree(DynamicShape(max(expansion), len(expansion), nodes))
        trees[f"{name}, dynamic"] = {"coupled": (grown, "sample"), "deterministic": (grown, "mss")}
    return trees


def measure(
    target: Target,
    tree: Tree,
    prompts: list[list[int]],
    kinds: Sequence[str],
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """τ of each method over all prompts and by kind, and the ratio of coupled sampling's to the others'."""
    sampling = Sampling(temperature, top_p=args.top_p, seed=args.seed)
    columns: dict[str, torch.Tensor] = {}
    for method, (drafter, mode) in tree.items():
        if temperature == 0 and method != "coupled":
            continue
        decoder = SpeculativeDecoder(target, drafter)
        answers = decoding(decoder, args.max_new_tokens, args.batch_size, mode, sampling)(prompts)
        columns[method] = torch.tensor(steps_of(answers), dtype=torch.float64).t()  # [2, P]
    methods: dict[str, Any] = {}
    for method, own in columns.items():
        both = torch.cat((columns["coupled"], own))
        methods[method] = with_interval(own, name="tau", interval="tau_interval")
        methods[method] |= with_interval(both, ratio_of, "coupled_over", "coupled_over_interval")
        totals = {kind: own[:, numbers].sum(-1) for kind, numbers in sorted(by_kind(kinds).items())}
        methods[method]["tau_by_kind"] = {kind: round(float(share_of(total)), 4) for kind, total in totals.items()}
    return methods


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    torch.set_num_threads(args.threads)
    given, target = read_prompts(args.prompts), None
    trees: dict[str, Tree] = {}
    for name in args.drafters:
        target, drafter = load_for(name, target, args, all_nodes=True)
        trees |= trees_of(name, drafter, args.expansion)
    assert target is not None
    prompts, kinds = encode_prompts(given, target), [prompt.kind or "other" for prompt in given]
    rows: list[dict[str, Any]] = []
    table = table_of("tree", "nodes", "T", "method", "τ", "coupled ÷ it")
    with ProgressBar("decoding", len(trees) * len(args.temperatures), console, transient=True) as advance:
        for name, tree in trees.items():
            nodes = tree["coupled"][0].num_nodes
            for temperature in args.temperatures:
                methods = measure(target, tree, prompts, kinds, temperature, args)
                rows.append({"tree": name, "nodes": nodes, "temperature": temperature, "methods": methods})
                for method, found in methods.items():
                    over = cell(found["coupled_over"], found["coupled_over_interval"]) if method != "coupled" else ""
                    tau = cell(found["tau"], found["tau_interval"])
                    table.add_row(name, str(nodes), f"{temperature:g}", method, tau, over)
                advance(len(rows))
    print_table(table, f"{target.name} · {len(prompts)} prompts · {args.max_new_tokens} tokens")
    if args.out:
        facts = facts_of(__file__, target) | {"prompts": len(prompts), "top_p": args.top_p, "rows": rows}
        write_report(args.out, facts)


if __name__ == "__main__":
    run_command(main)
