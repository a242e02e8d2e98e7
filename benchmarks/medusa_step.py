"""Time the Medusa-1 training step on the CPU beside the published loop, which materialises every head's logits.

    python benchmarks/medusa_step.py                                   # 5 heads, a vocabulary of 32,000, width 512
    python benchmarks/medusa_step.py --supervised 1.0 --width 1024     # every token is a label
    python benchmarks/medusa_step.py --out runs/bench-train.json

Both train the same heads on the same hidden states, labels, dtype and threads, each in a process of its own. The
published loop computes the logits of all heads at all positions, then one shifted cross-entropy per head. «heads»:
forward and backward of the heads. «step»: the same with the frozen target's forward pass and AdamW. Memory is the peak
of the process beyond weights, gradients and moments.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from draftsmith.benchmarks.options import check_options, machine_options
from draftsmith.common.command import CommandLine, before_imports, make_console, run_command

TURN = 128  # tokens
PARSER = CommandLine(__doc__)
PARSER.add_argument("--heads", type=int, default=5, help="Medusa heads (%(default)s)")
PARSER.add_argument("--vocab", type=int, default=32000, help="tokens of the vocabulary (%(default)s)")
PARSER.add_argument("--width", type=int, default=512, help="of the hidden states; a multiple of 64")
PARSER.add_argument("--layers", type=int, default=4, help="of the frozen target")
PARSER.add_argument("--rows", type=int, default=2, help="sequences of a step (%(default)s)")
PARSER.add_argument("--length", type=int, default=512, help="tokens of a sequence (%(default)s)")
PARSER.add_argument("--supervised", type=float, default=0.5, help="share of the tokens that are labels")
PARSER.add_argument(
    "--dtype",
    choices=["auto", "float32", "bfloat16"],
    default="auto",
    help="bfloat16: autocast; auto: that where this CPU has it in hardware (default)",
)
PARSER.add_argument("--repeat", type=int, default=5, help="timed steps after one to warm up; the median counts")
machine_options(PARSER, device=False)
if __name__ == "__main__":
    before_imports(PARSER)

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.benchmarks.common import alone
from draftsmith.benchmarks.tables import facts_of, print_table, table_of, write_report
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.precision import Choice, choose_autocast, describe, say
from draftsmith.models.target import Target
from draftsmith.train.losses import HEAD_DECAY
from draftsmith.train.medusa import Medusa1

console = make_console()


class Straightforward(nn.Module):
    """K heads, all logits at once, one cross-entropy per head over the shifted labels."""

    def __init__(self, width: int, vocab_size: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(heads))
        self.projections = nn.ModuleList(nn.Linear(width, vocab_size, bias=False) for _ in range(heads))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """``hidden [B, T, d]``, ``labels [B, T]`` (−100: none, not shifted)."""
        logits = torch.stack(
            [
                projection(hidden + F.silu(block(hidden)))
                for block, projection in zip(self.blocks, self.projections, strict=True)
            ]
        )
        loss = hidden.new_zeros(())
        for k in range(1, len(logits) + 1):
            shifted, wanted = logits[k - 1, :, : -k - 1].float(), labels[:, k + 1 :]
            loss = loss + HEAD_DECAY**k * F.cross_entropy(shifted.flatten(0, 1), wanted.flatten(), ignore_index=-100)
        return loss


def batch_of(args: argparse.Namespace) -> dict[str, Tensor]:
    """Rows of conversations: of each turn's tokens the last ones, in the given share, are the assistant's."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(args.vocab, (args.rows, args.length), generator=generator, dtype=torch.int32)
    place = torch.arange(args.length) % TURN
    return {"tokens": tokens, "supervised": (place >= TURN * (1 - args.supervised)).expand(args.rows, -1).contiguous()}


def measure(args: argparse.Namespace, ours: bool) -> dict[str, Any]:
    """Median seconds of a step and of the heads, its peak memory and all losses, in this process."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=args.width // 64,
    )
    target = Target(LlamaForCausalLM(config), None, "random", "")
    batch = batch_of(args)
    labels = torch.where(batch["supervised"], batch["tokens"].long(), -100)
    with torch.no_grad():
        hidden = target.hidden(batch["tokens"].long())
    module: nn.Module
    heads_loss: Callable[[Tensor], Tensor]
    if ours:
        module = Medusa1(target, MedusaHeads.for_target(target, args.heads, 1, "own"))
        counts = module.count(batch).float()
        heads_loss = lambda h: module({**batch, "hidden": h}, counts, 0)[0]  # noqa: E731
    else:
        module = Straightforward(args.width, args.vocab, args.heads)
        with torch.no_grad():  # as ours begin
            linears = zip(cast(list[nn.Linear], module.blocks), cast(list[nn.Linear], module.projections), strict=True)
            for block, projection in linears:
                block.weight.zero_()
                block.bias.zero_()
                projection.weight.copy_(target.model.get_output_embeddings().weight)
        heads_loss = lambda h: module(h, labels)  # noqa: E731
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the moments, so that they do not count as the step's memory
    before = resident()
    seconds: dict[str, list[float]] = {"heads": [], "step": []}
    losses = []
    for _ in range(args.repeat + 1):
        began = time.perf_counter()
        with torch.no_grad():
            hidden = target.hidden(batch["tokens"].long())
        middle = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = heads_loss(hidden)
        loss.backward()
        ended = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seconds["heads"].append(ended - middle)
        seconds["step"].append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
        del loss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    result = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {**result, "peak_bytes": peak, "losses": losses}


def resident() -> int:
    """Bytes of memory this process holds now, to compare with its later peak."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    args = PARSER.parse_intermixed_args()
    check_options(args, "heads", "vocab", "width", "layers", "rows", "length", "repeat")
    if args.width % 64:
        raise ValueError(f"--width {args.width}: must be a multiple of 64")
    if args.length % TURN:
        raise ValueError(f"--length {args.length}: must be a multiple of {TURN}, of which the last ones are labels")
    if not 1 / TURN <= args.supervised <= 1:
        raise ValueError(f"--supervised {args.supervised:g}: must be from {1 / TURN:g} to 1")
    chosen = choose_autocast("none" if args.dtype == "float32" else args.dtype, "cpu")
    for line in describe("cpu", Choice("float32", ""), chosen):
        say(line)
    args.dtype = chosen.value.replace("none", "float32")
    results = {}
    for name, ours in (("straightforward", False), ("draftsmith", True)):
        console.print(f"{name} …")
        results[name] = alone(measure, args, ours)
    mine, theirs = results["draftsmith"], results["straightforward"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(mine["losses"], theirs["losses"], strict=True))
    if not apart <= (1e-3 if args.dtype == "float32" else 2e-2):
        raise ValueError(f"the two loops do not train alike: losses {mine['losses']} and {theirs['losses']}")
    tokens = args.rows * args.length
    torch.set_num_threads(args.threads)
    table = table_of("", "heads, s", "step, s", "tokens/s", "peak memory, MB")
    for name, found in results.items():
        table.add_row(
            name,
            *(f"{found[k]:.3f}" for k in ("heads", "step")),
            f"{tokens / found['step']:,.0f}",
            f"{found['peak_bytes'] / 1e6:,.0f}",
        )
    print_table(table)
    ratios = {
        "heads_speedup": theirs["heads"] / mine["heads"],
        "step_speedup": theirs["step"] / mine["step"],
        "memory_ratio": mine["peak_bytes"] / theirs["peak_bytes"],
    }
    console.print(
        f"heads {ratios['heads_speedup']:.2f}× as fast, the whole step {ratios['step_speedup']:.2f}×, with "
        f"{ratios['memory_ratio']:.2f}× the memory; losses agree within {apart:.1g}"
    )
    if args.out:
        shape = {k: v for k, v in vars(args).items() if k != "out"}
        write_report(args.out, facts_of(__file__, torch.device("cpu")) | {"shape": shape, "results": results, **ratios})


if __name__ == "__main__":
    run_command(main)
