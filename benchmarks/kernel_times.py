"""Measure the kernels on a GPU, each beside what PyTorch offers for the same result.

    python benchmarks/kernel_times.py                                           # every kernel, the whole grid of shapes
    python benchmarks/kernel_times.py attention --batches 1 8 --contexts 4096   # one kernel, some shapes
    python benchmarks/kernel_times.py shortlist --batches 1 --hidden 576        # measured on a CPU too
    python benchmarks/kernel_times.py --out kernels.json                        # as JSON too

    attention   beside SDPA with an additive mask, flex_attention, and FlashInfer where it is installed (batch 1);
                rows of one length or ragged, a prompt's chunk, and the plan that a forward pass makes once
    commit      beside gather + scatter
    verify      beside the same phases in plain PyTorch: drafts one-hot, also with top-k and top-p, or drawn without
                replacement
    head_topk   beside F.linear + topk
    shortlist   a fifth of an LM head's rows beside the full head: logits, best tokens, and the choice of the rows
    few_rows    products of few rows with the matrices of Llama-3-8B and Llama-2-7B, in the fastest form, beside
                torch.mm, and with --compiled torch.compile's (a minute for each shape); "parts": not added up, as for
                the kernel that follows in a model
    fused       what stands around the products of Llama-3-8B beside the same in separate operations: add_norm,
                rotate_write and gated, of a product's output or of four parts of it (S); res_block, accept_greedy and
                advance

Calls are captured in CUDA graphs, over as many copies of the data as do not fit in the L2 cache together: a model's
layers do not find their own data there either. A row gives the median time of one call, its 20 % and 80 % quantiles,
and the ratio of the lower bound of this device to the median: the bytes that have to move at the measured copy
bandwidth, or the products at the measured matrix rate, whichever takes longer. Each result is first compared with the
plain one's. Slow calls are repeated less often, so that one row takes a few seconds at most after compiling.

Under TRITON_INTERPRET=1 without a GPU the same runs on the CPU: the results are compared, the times mean nothing.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from draftsmith.benchmarks.options import list_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.options import check_counts

KERNELS = ("attention", "commit", "verify", "head_topk", "shortlist", "few_rows", "fused")
VOCABULARY, VOCABULARIES = 128256, (49152, 128256, 262144)  # the second of shortlists
# Inputs and outputs over d: q, k and v; output; gate and up; down. The first four are Llama-3-8B's, the others
# Llama-2-7B's, whose output is the same; then the LM heads of both.
PRODUCTS = ((1, 1.5), (1, 1), (1, 7), (3.5, 1), (1, 3), (1, 5.375), (2.6875, 1))
HEADS = (128256, 32000)


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"some of: {', '.join(KERNELS)}; all if left out")
    list_option(parser, "--batches", [1, 8, 32], help="rows (B)")
    list_option(parser, "--contexts", [1024, 4096, 16384], help="cached tokens (L)")
    list_option(parser, "--nodes", [16, 64, 128], help="nodes of the tree (N)")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="key/value heads")
    parser.add_argument("--width", type=int, default=128, help="head width (D)")
    parser.add_argument("--layers", type=int, default=32, help="layers that a commit moves")
    parser.add_argument("--hidden", type=int, default=4096, help="hidden width (d)")
    list_option(parser, "--level", [1, 8], help="nodes of a text (n) for shortlist")
    of_shortlist, of_few_rows = (" ".join(map(str, sizes)) for sizes in (VOCABULARIES, HEADS))
    sizes = f"V; {VOCABULARY} if left out, for shortlist {of_shortlist}, for few_rows {of_few_rows}"
    list_option(parser, "--vocabulary", None, help=sizes)
    list_option(parser, "--rows", [1, 8, 16, 64], help="rows (M) of few_rows")
    parser.add_argument("--compiled", action="store_true", help="few_rows beside torch.compile (max-autotune) too")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of weights and activations (%(default)s)",
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    return parser


if __name__ == "__main__":
    before_imports(parser())


import torch

from draftsmith.benchmarks import kernel_cases as cases
from draftsmith.benchmarks.kernel_timing import DTYPES, Table, measure_device
from draftsmith.common.files import check_file
from draftsmith.kernels import linear
from draftsmith.kernels.backend import INTERPRETING, triton
from draftsmith.kernels.few_rows import MAX_ROWS
from draftsmith.kernels.res_block import MAX_ROWS as MAX_POSITIONS


def main() -> None:
    args = parser().parse_intermixed_args()
    wanted = args.kernels or list(KERNELS)
    if unknown := set(wanted) - set(KERNELS):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such kernel; there are {', '.join(KERNELS)}")
    check_file("--out", args.out)
    for name in ("batches", "contexts", "level"):
        check_counts(**{name: min(getattr(args, name))})
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if set(wanted) != {"shortlist"} or args.device == "cuda":
        if triton is None:
            raise ValueError("triton is not installed; it comes with a CUDA build of torch")
        if args.device == "cpu" and not INTERPRETING:
            raise ValueError("the kernels but shortlist are measured on a CUDA GPU, and there is none here")
    least = 1 if set(wanted) == {"fused"} else 8  # a committed path has several nodes
    if min(args.nodes) < least:
        raise ValueError(f"--nodes {min(args.nodes)}: has to be at least {least}")
    if args.vocabulary and min(args.vocabulary) < 50:
        raise ValueError(f"--vocabulary {min(args.vocabulary)}: has to be at least 50")
    if not 0 < min(args.rows) <= max(args.rows) <= MAX_ROWS:
        raise ValueError(f"--rows {' '.join(map(str, args.rows))}: have to be from 1 to {MAX_ROWS}")
    linear.GPU_BUDGET = float("inf")  # the forms of products are measured for every shape

    with torch.inference_mode():
        name = "CPU, interpreted" if INTERPRETING else f"CPU, {torch.get_num_threads()} threads"
        if args.device == "cuda":
            name = torch.cuda.get_device_name()
        table = Table(measure_device(DTYPES[args.dtype], args.device), name, args)
        print(
            f"{name}: moves {table.device.bandwidth / 1e12:.3g} TB/s, multiplies "
            f"{args.dtype} at {table.device.matmul_rate / 1e12:.3g} TFLOP/s\n"
            f"{'kernel':10} {'way':16} {'shape':34} {'median µs':>10} {'20 %':>10} {'80 %':>10} {'of bound':>9} "
            f"{'difference':>11}"
        )
        table.run(benches_of(wanted, args))


def benches_of(wanted: Sequence[str], args: argparse.Namespace) -> list[tuple[Callable[..., None], Sequence[int]]]:
    """What is measured, in this order: a function of kernel_cases.py and its last arguments."""
    benches: list[tuple[Callable[..., None], Sequence[int]]] = []
    vocabularies = args.vocabulary or [VOCABULARY]
    for batch in args.batches:
        if "attention" in wanted:
            benches.append((cases.bench_prefill, (batch, max(args.contexts))))
        for nodes in args.nodes:
            if "attention" in wanted:
                for context in args.contexts:
                    benches += [
                        (cases.bench_attention, (batch, context, nodes, ragged)) for ragged in range(min(batch, 2))
                    ]
            if "commit" in wanted:
                benches.append((cases.bench_commit, (batch, nodes)))
            if "verify" in wanted:
                benches += [(cases.bench_verify, (batch, nodes, vocabulary)) for vocabulary in vocabularies]
            if "fused" in wanted:
                fused = (cases.bench_add_norm, cases.bench_rotate_write, cases.bench_gated)
                benches += [(bench, (batch, nodes, parts)) for bench in fused for parts in (1, 4)]
                benches.append((cases.bench_acceptance, (batch, nodes)))
        if "fused" in wanted and batch <= MAX_POSITIONS:  # with more, the kernel is not used
            benches.append((cases.bench_res_block, (batch,)))
        if "head_topk" in wanted:
            benches += [(cases.bench_head_topk, (batch, vocabulary)) for vocabulary in vocabularies]
        if "shortlist" in wanted:
            sizes = itertools.product(args.vocabulary or VOCABULARIES, args.level)
            benches += [(cases.bench_shortlist, (batch, nodes, vocabulary)) for vocabulary, nodes in sizes]
    if "few_rows" in wanted:
        width = args.hidden
        shapes = [(int(inputs * width), int(outputs * width)) for inputs, outputs in PRODUCTS]
        shapes += [(width, vocabulary) for vocabulary in args.vocabulary or HEADS]
        benches += [(cases.bench_few_rows, (rows, *shape)) for rows in args.rows for shape in shapes]
    return benches


if __name__ == "__main__":
    run_command(main)
