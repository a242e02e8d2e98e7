"""The memory of EAGLE-3's training for five targets, by part: what --dry-run computes, for shapes written here, so that
nothing is downloaded. Nothing is run or measured.

    python benchmarks/memory_by_part.py
    python benchmarks/memory_by_part.py --rows 1 --as h200

A draft vocabulary of 32,000 tokens, seven unrolled steps, packed rows, each token a label, two micro-batches a step.
"""

from functools import partial

from draftsmith.common.command import CommandLine, before_imports, run_command

PARSER = CommandLine(__doc__)
PARSER.add_argument("--rows", type=int, default=2, help="of a micro-batch (%(default)s)")
PARSER.add_argument("--as", dest="machine", default="h100", help="GPUs, as --dry-run takes them (%(default)s)")
if __name__ == "__main__":
    before_imports(PARSER)

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from draftsmith.benchmarks.tables import print_table, table_of
from draftsmith.common.sections import Batch, Optim, Stage
from draftsmith.models.eagle import Eagle, EagleConfig
from draftsmith.train import memory
from draftsmith.train.dry_run import Plan, TargetShape
from draftsmith.train.machine import Machine

STEPS, DRAFT_VOCABULARY = 7, 32000
TARGETS: dict[str, tuple[PreTrainedConfig, int]] = {  # and the length of a row
    "Qwen2.5-Coder-1.5B": (
        Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                    num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
        2048,
    ),
    "Llama-3.1-8B": (
        LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                    num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
        2048,
    ),
    "Qwen3-8B": (
        Qwen3Config(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                    num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False),
        4096,
    ),
    "Qwen3-30B-A3B": (
        Qwen3MoeConfig(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
                       num_experts_per_tok=8, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
                       head_dim=128, vocab_size=151936, tie_word_embeddings=False),  # pyright: ignore[reportCallIssue]
        2048,
    ),
    "Llama-3.3-70B": (
        LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
                    num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False),
        2048,
    ),
}  # fmt: skip


def plan_of(config: PreTrainedConfig, length: int, rows: int, processes: int) -> Plan:
    """A stage of EAGLE-3 with so many rows in each of two micro-batches of a process."""
    with torch.device("meta"):
        frozen = AutoModelForCausalLM.from_config(config).num_parameters()
        made = EagleConfig.for_target(config, config.vocab_size, length, 3, "own", DRAFT_VOCABULARY)
        trained = sum(p.numel() for p in Eagle(made).parameters())
    batch = Batch(sequences=2 * rows * processes, accumulate=2)
    stage = Stage(steps=1, batch=batch, optim=Optim(lr=1e-4))
    shape = TargetShape(frozen, frozen, config.hidden_size, config.vocab_size, 0, config)
    kept = partial(memory.eagle, made, config, steps=STEPS, given=False)
    return Plan(stage, length, trained, frozen, shape, 2.0, kept, packed=True, blocks=True)


def main() -> None:
    args = PARSER.parse_intermixed_args()
    if args.rows < 1:
        raise ValueError(f"--rows {args.rows}: a micro-batch has one row at least")
    machine = Machine.named(args.machine)
    table = None
    for name, (config, length) in TARGETS.items():
        parts = plan_of(config, length, args.rows, machine.processes).parts(machine)
        table = table or table_of("GB for", "rows", *parts, "in all")
        sizes = (f"{size / 1e9:.1f}" for size in (*parts.values(), sum(parts.values())))
        table.add_row(name, f"{args.rows} × {length:,}", *sizes)
    assert table is not None
    print_table(table, f"EAGLE-3, computed for {machine.name}")


if __name__ == "__main__":
    run_command(main)
