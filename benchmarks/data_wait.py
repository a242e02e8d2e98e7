"""Measure the share of training time that waits for batches, with steps that only take time.

    python benchmarks/data_wait.py --shape llama3-8b --milliseconds 50 --out runs/bench/data-wait.json

Each step takes the micro-batches of random rows, as training does, then waits. Rows of tokens alone, and with the
target's features beside them (``cache_hidden``), without workers and with each number of them.
"""

import time
from typing import Any

from draftsmith.benchmarks.options import SHAPES, check_options, list_option, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command

PARSER = CommandLine(__doc__)
PARSER.add_argument(
    "--shape", default="llama3-8b", help="the target's, for the width of features: " + ", ".join(SHAPES)
)
PARSER.add_argument("--milliseconds", type=float, default=50.0, help="of a step without its batches")
PARSER.add_argument("--sequences", type=int, default=2, help="rows of a micro-batch")
PARSER.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
PARSER.add_argument("--tokens", type=int, default=2048, help="of a row")
PARSER.add_argument("--steps", type=int, default=100, help="that are timed")
list_option(PARSER, "--workers", [0, 2], help="numbers of workers (%(default)s)")
machine_options(PARSER)
if __name__ == "__main__":
    before_imports(PARSER)

import numpy as np
import torch

from draftsmith.benchmarks.shapes import config_of
from draftsmith.benchmarks.tables import facts_of, print_table, table_of, write_report
from draftsmith.data.packing import Rows, Tokenized
from draftsmith.models.options import choose_device
from draftsmith.train.loading import MicroBatches, loading
from draftsmith.train.samples import Sampler, WithHidden

ROWS, CAPTURES = 32, 3  # rows, which come again and again; layers whose inputs EAGLE-3 takes
WARM = 3  # steps that are not timed


def share_of_waiting(made: MicroBatches, steps: int, seconds: float, workers: int, device: torch.device) -> float:
    """The share of the time that ``steps`` steps of ``seconds`` wait for their batches."""
    waited = began = 0.0
    with loading(made, 0, WARM + steps, workers, device) as next_batches:
        for step in range(WARM + steps):
            asked = time.monotonic()
            if step == WARM:
                waited, began = 0.0, asked
            for batch in next_batches():
                moved = [part.to(device, non_blocking=True) for part in batch.values()]
            waited += time.monotonic() - asked
            time.sleep(seconds)
            del moved
    return waited / (time.monotonic() - began)


def main() -> None:
    args = PARSER.parse_intermixed_args()
    check_options(args, "sequences", "accumulate", "tokens", "steps")
    if min(args.workers) < 0 or not 0 <= args.milliseconds < 1e6 or args.tokens % 4:
        raise ValueError("--workers and --milliseconds are 0 or more, --tokens a multiple of 4")
    torch.set_num_threads(args.threads)
    device, generator = torch.device(choose_device(args.device)), np.random.default_rng(0)
    total = ROWS * args.tokens
    tokens = generator.integers(1000, size=total, dtype=np.int32)
    texts = Tokenized(tokens, np.ones(total, bool), np.arange(0, total + 1, args.tokens // 4))
    rows = Rows(texts, args.tokens, share=True)
    width = config_of(args.shape).hidden_size * (1 + CAPTURES)
    features = torch.zeros(len(rows), rows.length, width, dtype=torch.bfloat16).fill_(1.0)
    sources = {"tokens": rows, "with features": WithHidden(rows, features)}
    per_step, results = args.sequences * args.accumulate, list[dict[str, Any]]()
    table = table_of("rows", "workers", "MB a step", "share of waiting")
    for name, source in sources.items():
        samples = Sampler([source], [1.0], 0, [name]).stage((WARM + args.steps) * per_step)
        made = MicroBatches(samples, per_step, args.sequences, args.accumulate, 0)
        size = args.accumulate * sum(part.nbytes for part in samples(range(args.sequences)).values()) / 1e6
        for workers in args.workers:
            share = share_of_waiting(made, args.steps, args.milliseconds / 1e3, workers, device)
            results.append(
                {"rows": name, "workers": workers, "megabytes": round(size, 2), "data_wait": round(share, 4)}
            )
            table.add_row(name, str(workers), f"{size:.1f}", f"{share:.1%}")
    facts = facts_of(__file__, device) | {
        "shape": {k: v for k, v in vars(args).items() if k != "out"},
        "results": results,
    }
    print_table(table, f"{args.shape}, steps of {args.milliseconds:g} ms · {facts['device']}")
    if args.out:
        write_report(args.out, facts)


if __name__ == "__main__":
    run_command(main)
