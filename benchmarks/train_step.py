"""Time a training step for the shape of a target: Medusa-1 (heads alone), Medusa-2's second stage (with LoRA), EAGLE-3.

    python benchmarks/train_step.py --shape llama2-7b --dtype bfloat16 --tokens 2048 --out runs/bench/train_step.json
    python benchmarks/train_step.py --shape tiny-lm --sequences 2 --tokens 256 --stages medusa-1
    python benchmarks/train_step.py --shape llama3-8b --dtype bfloat16 --stages eagle-3 --tokens 2048 --samples 3

Random weights and random tokens, all of them labels: nothing is downloaded. A step is forward, backward, clipping and
AdamW. The share of the matrix rate counts the products that the method needs (passes through the target's matrices,
its LM head, the heads, the drafter), without those of attention's scores and those that gradient checkpointing repeats;
the rate is measured on a large product.
"""

import argparse
import statistics
from typing import Any, cast

from draftsmith.benchmarks.options import check_options, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.models.options import choose_device

STAGES = ("medusa-1", "medusa-2", "eagle-3")
PARSER = CommandLine(__doc__)
PARSER.add_argument("--shape", default="llama2-7b", help="llama2-7b, llama3-8b, tiny-lm")
PARSER.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES[:2]), help="what is timed (%(default)s)")
PARSER.add_argument("--sequences", type=int, default=4, help="of a step, at once")
PARSER.add_argument("--tokens", type=int, default=2048, help="of a sequence")
PARSER.add_argument("--heads", type=int, default=5, help="Medusa heads (%(default)s)")
PARSER.add_argument(
    "--projection",
    choices=["own", "shared"],
    default="own",
    help="own: an LM head each; shared: the target's (%(default)s)",
)
PARSER.add_argument("--gradient-checkpointing", action="store_true", help="of Medusa-2 and of EAGLE-3's steps")
PARSER.add_argument("--samples", type=int, default=1, help="packed into each sequence, equally long (%(default)s)")
PARSER.add_argument("--loss", choices=["ce", "lk", "tv", "nla"], default="ce", help="of EAGLE-3 (%(default)s)")
PARSER.add_argument("--repeat", type=int, default=5, help="timed steps (%(default)s)")
machine_options(PARSER, "of the target, which counts as stored in bfloat16 (what trains is float32)")
if __name__ == "__main__":
    before_imports(PARSER)

import torch
from torch import nn

from draftsmith.benchmarks.common import elapsed
from draftsmith.benchmarks.shapes import config_of, dtype_of_shape, random_target
from draftsmith.benchmarks.tables import facts_of, print_table, table_of, write_report
from draftsmith.common.files import write_json
from draftsmith.common.sections import Batch, Optim
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.precision import matmul_rate
from draftsmith.models.target import Target
from draftsmith.train.eagle import EagleTraining
from draftsmith.train.joint import add_adapters
from draftsmith.train.medusa import Medusa1, Medusa2
from draftsmith.train.optim import make_optimizer
from draftsmith.train.sections.eagle import EagleRecipe
from draftsmith.train.sections.medusa import Joint, MedusaStage


def operations(target: Target, module: Medusa1 | EagleTraining, positions: int) -> float:
    """Multiply-adds · 2 of a step, counted by passes: frozen matrices forward only (Medusa-1, EAGLE-3), or forward
    twice, for the teacher of the KL, and backward to their inputs (Medusa-2); trained ones forward and backward, those
    of EAGLE-3 in each unrolled step."""
    joint = isinstance(module, Medusa2)
    head = cast(nn.Linear, target.lm_head).weight.numel()
    inside = sum(p.numel() for p in target.decoder.parameters() if p.ndim == 2 and not p.requires_grad)
    inside -= cast(nn.Embedding, target.model.get_input_embeddings()).weight.numel()
    if isinstance(module, EagleTraining):
        trained = {name: p.numel() for name, p in module.eagle.named_parameters() if p.ndim == 2}
        once = trained.pop("fc.weight")
        return (2.0 * (inside + head) + 6.0 * (once + module.steps * sum(trained.values()))) * positions
    heads = module.heads
    blocks = heads.weight.numel()
    projections = heads.config.num_draft_heads * head
    lora = sum(p.numel() for name, p in target.model.named_parameters() if "lora_" in name)
    used = 2.0 * (3 if joint else 1) * inside + 2.0 * (3 if joint else 0) * head + 6.0 * (blocks + lora)
    used += (6.0 if heads.projection is not None else 4.0) * projections  # a shared one gets no gradient
    return used * positions


def eagle_training(target: Target, args: argparse.Namespace) -> EagleTraining:
    """A drafter with the settings of the recipes for large targets."""
    drafter = {"version": 3, "fc_norm": True, "norm_output": True, "loss": args.loss}
    source, stage = [{"source": "stdlib"}], {"optim": {"lr": 1e-4}, "batch": {"sequences": 1}, "steps": 1}
    content: dict[str, Any] = {"run": {"name": "timed"}, "target": {"name": args.shape}, "drafter": drafter}
    content |= {"data": {"train": source, "validation": source}, "stages": [stage]}
    content |= {"precision": {"gradient_checkpointing": args.gradient_checkpointing}}
    recipe = EagleRecipe.model_validate(content)
    size = min(32000, target.vocab_size)
    eagle = Eagle.for_target(target, 3, "own", size, (), None, **recipe.drafter.options)
    return EagleTraining(target, eagle, recipe)


def measure(target: Target, stage: str, args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of a step, tokens/s, peak memory and share of the matrix rate."""
    torch.manual_seed(0)
    optim = Optim(lr=1e-4, warmup_steps=0)
    joint = MedusaStage(optim=optim, batch=Batch(sequences=args.sequences), steps=100, joint=Joint())
    if stage == "medusa-2":
        add_adapters(target, Joint(), 0, args.gradient_checkpointing)
    if stage == "eagle-3":
        module: Medusa1 | EagleTraining = eagle_training(target, args)
    else:
        heads = MedusaHeads.for_target(target, args.heads, 1, args.projection).to(target.device)
        module = Medusa2(target, heads, joint) if stage == "medusa-2" else Medusa1(target, heads)
    module.train()
    optimizer = make_optimizer(module, optim)
    trained = [p for p in module.parameters() if p.requires_grad]
    shape = (args.sequences, args.tokens)
    tokens = torch.randint(target.vocab_size, shape, device=target.device)
    batch = {"tokens": tokens, "supervised": torch.ones(shape, dtype=torch.bool, device=target.device)}
    if args.samples > 1:
        target.prepare_packing()
        each = torch.arange(args.tokens, device=target.device).expand(shape)
        length = -(-args.tokens // args.samples)
        batch |= {"positions": each % length, "segment": 1 + each // length}
    cuda = target.device.type == "cuda"

    def step() -> None:
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            loss, _ = module(batch, module.count(batch), 50)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # warm up
        elapsed(step, target.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = [elapsed(step, target.device) for _ in range(args.repeat)]
    median = statistics.median(seconds)
    positions = args.sequences * args.tokens
    rate = matmul_rate(target.device, target.dtype)
    return {
        "stage": stage,
        "seconds": round(median, 5),
        "all_seconds": [round(s, 5) for s in seconds],
        "tokens_per_second": round(positions / median, 1),
        "hours_per_70M_tokens": round(70e6 / (positions / median) / 3600, 3),
        "operations": operations(target, module, positions),
        "matmul_rate": rate,
        "of_matmul_rate": round(operations(target, module, positions) / median / rate, 4),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "trained_parameters": sum(p.numel() for p in trained),
    }


def main() -> None:
    args = PARSER.parse_intermixed_args()
    check_options(args, "sequences", "tokens", "heads", "repeat", "samples")
    torch.set_num_threads(args.threads)
    config_of(args.shape)
    device = torch.device(choose_device(args.device))
    args.dtype = dtype_of_shape(args.dtype, device)  # what the report says
    results: list[dict[str, Any]] = []
    shape = {name: value for name, value in vars(args).items() if name != "out"}
    facts = facts_of(__file__, device) | {"shape": shape, "results": results}
    for stage in args.stages:  # each on a target of its own: the second one puts adapters on it
        try:
            target = random_target(args.shape, args.tokens, getattr(torch, args.dtype), device)
        except MemoryError as error:
            raise ValueError(f"{args.shape}: {error}; take a smaller --shape or --dtype bfloat16") from None
        results.append(measure(target, stage, args))
        del target
        if args.out:  # after each stage, so that a command that is killed keeps what it measured
            write_json(args.out, facts)
    table = table_of("stage", "s/step", "tokens/s", "h per 70 M", "of the matrix rate", "peak memory")
    for r in results:
        memory = f"{r['peak_memory_bytes'] / 1e9:.1f} GB" if r["peak_memory_bytes"] else "–"
        speed = f"{r['seconds']:.3f}", f"{r['tokens_per_second']:,.0f}", f"{r['hours_per_70M_tokens']:.2f}"
        table.add_row(r["stage"], *speed, f"{r['of_matmul_rate']:.0%}", memory)
    print_table(table, f"{args.shape}, {args.dtype}, {args.sequences} × {args.tokens} tokens · {facts['device']}")
    if args.out:
        write_report(args.out, facts)


if __name__ == "__main__":
    run_command(main)
