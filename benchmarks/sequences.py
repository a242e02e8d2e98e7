"""Verify a token tree in one pass, and the same paths as sequences apart: one row of the batch for each leaf.

    python benchmarks/sequences.py --target models/smollm2 --expansion 1 1 5 1 1 1 1 1 --out runs/bench/sequences.json
    python benchmarks/sequences.py --shape llama2-7b --contexts 128 1024 --batches 1 2 4

SpecInfer (arXiv 2305.09781) compares its tree-based decoding with sequence-based decoding, in which every path has a
row, a copy of the prefix's K/V, and its own copy of the nodes that it shares with other paths. Both verify the same
tokens; what is timed is the target's pass over them with the LM head. The two take turns. The ratio is sequences over
tree, with a 95 % bootstrap interval over the rounds. On a GPU these passes are eager, without a CUDA graph.

Memory: what the tree's nodes add to the weights and the K/V of the texts, and what the copies add.
"""

import argparse
from typing import Any

from draftsmith.benchmarks.options import SHAPES, check_options, list_option, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.models.files.locate import known_folder
from draftsmith.models.options import DECODERS, choose_device, decoder_option


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", metavar="NAME", help=f"one of: {', '.join(SHAPES)}; random weights")
    what.add_argument("--target", metavar="FOLDER", help="a stored model instead")
    list_option(parser, "--expansion", [1, 1, 5, 1, 1, 1, 1, 1], "K", "children of every node, by depth (%(default)s)")
    list_option(parser, "--batches", [1], "B", "texts (%(default)s)")
    list_option(parser, "--contexts", [1024], "L", "cached tokens of each text (%(default)s)")
    parser.add_argument("--repeat", type=int, default=50, help="rounds (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights (%(default)s)")
    decoder_option(parser)
    machine_options(parser, "of the weights (those of a --shape count as stored in bfloat16)")
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: args.target and known_folder(args.target))

import itertools
import math

import torch

from draftsmith.benchmarks.common import ratio_of, with_interval
from draftsmith.benchmarks.shapes import dtype_of_shape, random_heads, random_target, release
from draftsmith.benchmarks.step_times import Case
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.inference.engine.runner import ATTENTION
from draftsmith.inference.verify.tree import MAX_NODES, product
from draftsmith.models.precision import say
from draftsmith.models.target import Target, load_target


def compare(target: Target, args: argparse.Namespace, batch: int, context: int) -> dict[str, Any]:
    """The row of one batch and context; seconds are medians of the rounds."""
    depth, leaves = len(args.expansion), math.prod(args.expansion)
    heads, lean = random_heads(target, depth, "shared"), DECODERS[args.decoder]
    tree = Case(target, heads, product(args.expansion), batch, context, lean)
    apart = Case(target, heads, product([1] * depth), batch * leaves, context, lean)
    rounds = [(apart.phases(1)["verify"], tree.phases(1)["verify"]) for _ in range(args.repeat)]
    seconds = torch.tensor(rounds, dtype=torch.float64).t()  # [2, rounds]
    ones = torch.ones_like(seconds[0])
    slot = sum(2 * kv_heads * width for kv_heads, width in target.kv_shapes) * target.dtype.itemsize
    weights = sum(each.nbytes for each in target.model.parameters())
    nodes, held = tree.topology.num_nodes, weights + batch * context * slot
    return {
        "batch": batch,
        "context": context,
        "nodes": nodes,
        "rows_apart": batch * leaves,
        "tokens_apart": leaves * (depth + 1),
        "tree_seconds": float(seconds[1].median()),
        "apart_seconds": float(seconds[0].median()),
        **with_interval(torch.stack([seconds[0], ones, seconds[1], ones]), ratio_of, "ratio"),
        "tree_memory": batch * (nodes - 1) * slot / held,
        "apart_memory": batch * ((leaves - 1) * context + leaves * depth) * slot / held,
    }


def main() -> None:
    args = parser().parse_intermixed_args()
    check_options(args, "expansion", "batches", "contexts", "repeat")
    if (nodes := product(args.expansion).num_nodes) > MAX_NODES:
        raise ValueError(f"--expansion: a tree of {nodes} nodes; there are at most {MAX_NODES}")
    device = torch.device(choose_device(args.device))
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    if args.shape:
        dtype = dtype_of_shape(args.dtype, device)
        positions = max(args.contexts) + len(args.expansion) + 1
        target = random_target(args.shape, positions, getattr(torch, dtype), device)
    else:
        target = load_target(args.target, dtype=args.dtype, device=str(device), say=say)
    facts = facts_of(__file__, device) | {"target": target.name, "expansion": args.expansion, "repeat": args.repeat}
    facts |= {"dtype": str(target.dtype).removeprefix("torch."), "rows": []}
    table = table_of("texts", "cached tokens", "nodes", "rows apart", "tree, ms", "apart, ms", "apart / tree", "memory")
    with torch.inference_mode(), target.attention(ATTENTION), torch.cuda.device_of(target.lm_head.weight):
        for batch, context in itertools.product(args.batches, args.contexts):
            release()
            facts["rows"].append(row := compare(target, args, batch, context))
            memory = f"+{row['tree_memory']:.1%}, apart +{row['apart_memory']:.0%}"
            times = (f"{row[key] * 1e3:.2f}" for key in ("tree_seconds", "apart_seconds"))
            counts = (str(row[key]) for key in ("batch", "context", "nodes", "rows_apart"))
            table.add_row(*counts, *times, cell(row["ratio"], row["interval"]), memory)
    print_table(table, f"{target.name}, ⟨{', '.join(map(str, args.expansion))}⟩, {facts['dtype']}")
    if args.out:
        write_report(args.out, facts)


if __name__ == "__main__":
    run_command(main)
