"""Time EAGLE-3's training-time test, K unrolled steps forward and backward, with two forms of its attention.

    python benchmarks/unroll.py --shape llama3-8b --dtype bfloat16 --steps 1 4 7 --out runs/bench/unroll.json

    draftsmith   one softmax over the first step's keys and one key of each later step: Eagle.unroll as it is, which on
                 a GPU takes FlexAttention for the former
    dense        step i has the keys of all steps 0 … i and a mask for them: PyTorch's scaled_dot_product_attention

The layer has the sizes of the target's; weights (float32), features and tokens are random, and every position drafts.
The outputs and gradients of both forms are first compared with those of the dense one in float32: the error of ours may
be twice as large as that of dense attention in the same dtype. Then they run in turn. The ratio is ours over dense, of
the seconds of all rounds, with its 95 % bootstrap interval over rounds. Memory is a GPU's peak beyond weights and
features; the gradients are part of it.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

from draftsmith.benchmarks.options import check_options, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.models.options import choose_device

PARSER = CommandLine(__doc__)
PARSER.add_argument("--shape", default="llama3-8b", help="llama2-7b, llama3-8b, smollm2-135m, tiny-lm")
PARSER.add_argument("--sequences", type=int, default=1, help="of a step, at once (B)")
PARSER.add_argument("--tokens", type=int, default=2048, help="of a sequence (T)")
PARSER.add_argument("--steps", type=int, nargs="+", default=[7], help="unrolled (K), one or more numbers")
PARSER.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: by autocast")
PARSER.add_argument("--repeat", type=int, default=10, help="rounds; an interval needs five")
machine_options(PARSER)
if __name__ == "__main__":
    before_imports(PARSER)

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.benchmarks.common import elapsed, interval_of, take_turns
from draftsmith.benchmarks.shapes import config_of
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.common.files import write_json
from draftsmith.models import eagle as models

FORMS = ("draftsmith", "dense")
ROUNDING = 1e-4  # error of float32 products relative to a tensor's norm; a form that gives zeros has 1
Run = Callable[[str, int, bool], dict[str, Tensor]]  # (form, steps, autocast) → outputs and gradients by name


def dense_attention(q: Tensor, first: models.Keys, later: Sequence[models.Keys], mask: Tensor) -> Tensor:
    """:func:`unrolled_attention` from all keys: the mask for the first step's, the diagonal for each later step's. On
    a GPU, K and V are repeated for the query heads: its fast kernels that take a mask have no grouped queries."""
    kind, own = q.device.type, torch.eye(mask.shape[1], dtype=torch.bool, device=q.device).expand(len(mask), -1, -1)
    mask = torch.cat([mask, *[own] * len(later)], -1)[:, None]  # [B, 1, T, T · (i + 1)]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    each = 1 if kind == "cpu" else q.shape[1] // first[0].shape[1]
    k, v = (torch.cat(parts, 2).to(dtype).repeat_interleave(each, 1) for parts in zip(first, *later, strict=True))
    return F.scaled_dot_product_attention(q.to(dtype), k, v, attn_mask=mask, enable_gqa=kind == "cpu")


def make_run(args: argparse.Namespace, device: torch.device) -> Run:
    """A function that unrolls a random drafter on random inputs, forward and backward."""
    torch.manual_seed(0)
    target, context = config_of(args.shape), args.tokens + max(args.steps)
    config = models.EagleConfig.for_target(target, target.vocab_size, context, 3, "shared")
    eagle, d = models.Eagle(config).to(device), config.hidden_size
    embed = nn.Embedding(config.vocab_size, d, device=device).requires_grad_(False)
    tokens = torch.randint(config.vocab_size, (args.sequences, args.tokens), device=device)
    features = torch.randn(*tokens.shape, d * (1 + len(config.captured_layers)), device=device)
    slope = torch.randn(*tokens.shape, d, device=device)  # gradient of each step's output

    def run(form: str, steps: int, autocast: bool) -> dict[str, Tensor]:
        forms = {"unrolled_attention": dense_attention, "takes_blocks": lambda q: False}
        replaced = patch.multiple(models, **forms) if form == "dense" else nullcontext()
        with replaced, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            outs = [*eagle.unroll(features, embed, tokens, steps)]
        torch.autograd.backward(outs, [slope.to(out.dtype) for out in outs])
        found = {f"output {i}": out.detach() for i, out in enumerate(outs, 1)}
        found |= {f"gradient of {name}": p.grad for name, p in eagle.named_parameters() if p.grad is not None}
        eagle.zero_grad()
        return found

    return run


def compare(run: Run, steps: int, autocast: bool) -> dict[str, float]:
    """The largest error of each form, relative to a tensor's norm. ValueError: ours is wrong."""
    exact, errors = run("dense", steps, False), dict[str, dict[str, float]]()
    for form in FORMS:
        found = run(form, steps, autocast)
        errors[form] = {name: float((found[name] - each).norm() / each.norm()) for name, each in exact.items()}
    for name, error in errors["draftsmith"].items():
        if not error <= 2 * errors["dense"][name] + ROUNDING:
            dense = errors["dense"][name]
            raise ValueError(f"{steps} steps, {name}: off by {error:.1e}, with dense attention by {dense:.1e}; a bug")
    return {form: max(each.values()) for form, each in errors.items()}


def measure(run: Run, steps: int, autocast: bool, repeat: int, device: torch.device) -> dict[str, Any]:
    """Seconds and memory of each form in turn, after the comparison, which warms up."""
    errors, cuda = compare(run, steps, autocast), device.type == "cuda"
    memory: dict[str, int | None] = dict.fromkeys(FORMS)

    def timed(form: str) -> float:
        before = torch.cuda.memory_allocated(device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = elapsed(lambda: run(form, steps, autocast), device)
        memory[form] = torch.cuda.max_memory_allocated(device) - before if cuda else None
        return round(seconds, 6)

    ours, dense = times = take_turns([partial(timed, form) for form in FORMS], repeat)
    return {
        "steps": steps,
        "seconds": dict(zip(FORMS, map(statistics.median, times), strict=True)),
        "all_seconds": dict(zip(FORMS, times, strict=True)),
        "peak_memory_bytes": memory,
        "ratio": round(sum(ours) / sum(dense), 4),
        "ratio_interval": interval_of(torch.tensor(times)),
        "errors": errors,
    }


def main() -> None:
    args = PARSER.parse_intermixed_args()
    check_options(args, "sequences", "tokens", "steps", "repeat")
    torch.set_num_threads(args.threads)
    device = torch.device(choose_device(args.device))
    run, results = make_run(args, device), list[dict[str, Any]]()
    shape = {name: value for name, value in vars(args).items() if name != "out"}
    facts = facts_of(__file__, device) | {"shape": shape, "results": results}
    table = table_of("steps", *(f"{form}, s" for form in FORMS), "ratio", "peak memory")
    for steps in args.steps:
        r = measure(run, steps, args.dtype == "bfloat16", args.repeat, device)
        memory = " / ".join(f"{size / 1e9:.2f} GB" if size else "–" for size in r["peak_memory_bytes"].values())
        seconds = (f"{each:.4f}" for each in r["seconds"].values())
        table.add_row(str(steps), *seconds, cell(r["ratio"], r["ratio_interval"]), memory)
        results.append(r)
        if args.out:  # after each number of steps, so that a command that is killed keeps what it measured
            write_json(args.out, facts)
    print_table(table, f"{args.shape}, {args.dtype}, {args.sequences} × {args.tokens} tokens · {facts['device']}")
    if args.out:
        write_report(args.out, facts)


if __name__ == "__main__":
    run_command(main)
