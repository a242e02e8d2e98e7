"""Compare our engine with a draft model and transformers' assisted generation with the same two models.

    python benchmarks/assisted.py --target models/tiny-lm --draft runs/tiny-draft --prompts runs/demo/prompts.jsonl
    python benchmarks/assisted.py --target T --draft D --prompts P.jsonl --expansion 2 2 1 --seconds 9 --out F.json

Four methods take turns on each prompt, greedily: our engine with the draft model; our engine alone (plain);
``generate(assistant_model=…)`` with its defaults (assisted); ``generate`` alone (generate). Ratios are of tokens/s,
with 95 % intervals over the prompts. Every output is compared with our plain decoding's; exit code 1 if our drafted
text differs. τ is the committed tokens of a step, the bonus token included.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from draftsmith.common.command import CommandLine, available_cores, before_imports, run_command
from draftsmith.inference.commands.early import check_prompts
from draftsmith.inference.commands.options import check_counts, check_threads
from draftsmith.models.options import choose_device, dtype_option
from draftsmith.models.stored import known_folder

OURS, PLAIN, ASSISTED, GENERATE = "draft_model", "plain", "assisted", "generate"


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("--target", required=True, metavar="FOLDER", help="a folder or a Hub id")
    parser.add_argument("--draft", required=True, metavar="FOLDER", help="a smaller model with the same tokenizer")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl", help="as for decode.py")
    parser.add_argument(
        "--expansion", type=int, nargs="+", default=[1, 1, 1, 1], metavar="K",
        help="children of each node, by depth (default: a chain of four)",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="rounds over all prompts (default 1)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="end timing after so long (16 prompts are timed in any case)"
    )
    dtype_option(parser, "of both models")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: cuda where there is one)")
    parser.add_argument("--threads", type=int, default=available_cores(), help="CPU threads; all cores if left out")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures there")
    return parser


if __name__ == "__main__":
    before_imports(
        parser(), lambda args: (known_folder(args.target), known_folder(args.draft), check_prompts(args.prompts))
    )

import torch
from rich.table import Table

from draftsmith.common.files import check_file, write_json
from draftsmith.inference.commands.prompts import encode_prompts, read_prompts
from draftsmith.inference.commands.terminal import console, make_console
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.evaluation.timing import (
    Method,
    Timed,
    run_rounds,
    speedup,
    speedup_fields,
    tokens_of,
    transformers_method,
)
from draftsmith.models.artifact import device_name, versions
from draftsmith.models.precision import say
from draftsmith.models.target import Target, load_target


def methods_of(target: Target, draft: Target, expansion: list[int], max_new_tokens: int) -> dict[str, Method]:
    """The four methods by name; one prompt at a time."""
    decoders = {
        OURS: SpeculativeDecoder(target, DraftModelDrafter(draft, target, expansion)),
        PLAIN: SpeculativeDecoder(target),
    }
    methods: dict[str, Method] = {
        name: lambda prompts, decoder=decoder: decoder.generate(prompts, max_new_tokens, batch_size=1)
        for name, decoder in decoders.items()
    }
    methods[ASSISTED] = transformers_method(target, max_new_tokens, assistant_model=draft.model)
    methods[GENERATE] = transformers_method(target, max_new_tokens)
    return methods


def compare(timed: dict[str, Timed]) -> dict[str, dict[str, Any]]:
    """Tokens/s, speed-ups over the others and number of texts that differ from plain decoding's, by method."""
    expected = timed[PLAIN].outputs
    rows: dict[str, dict[str, Any]] = {}
    for name, method in timed.items():
        different = sum(tokens_of(method.outputs[number]) != expected[number].tokens for number in expected)
        rows[name] = method.summary() | {"texts": len(expected), "different": different, "tau": None}
        for base in (PLAIN, GENERATE, ASSISTED):
            rows[name] |= speedup_fields(f"speedup_vs_{base}", speedup(method, timed[base]) if base != name else None)
    accepted = [length for result in timed[OURS].outputs.values() for length in result.accepted]
    rows[OURS]["tau"] = round(sum(accepted) / len(accepted), 4) if accepted else None
    return rows


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("method", "tokens/s", "τ", *(f"× {base}" for base in (PLAIN, GENERATE, ASSISTED)), "identical"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name, row in rows.items():
        cells = [f"{row['tokens_per_second']:.1f}", f"{row['tau']:.2f}" if row["tau"] else "–"]
        for base in (PLAIN, GENERATE, ASSISTED):
            ratio, interval = row[f"speedup_vs_{base}"], row[f"speedup_vs_{base}_interval"]
            bounds = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
            cells.append(f"{ratio:.2f}{bounds}" if ratio else "–")
        table.add_row(name, *cells, f"{row['texts'] - row['different']}/{row['texts']}")
    make_console(stderr=False).print(table)


def main() -> None:
    args = parser().parse_intermixed_args()
    check_counts(max_new_tokens=args.max_new_tokens, repeat=args.repeat)
    check_threads(args.threads)
    for children in args.expansion:
        check_counts(expansion=children)
    if args.seconds is not None and not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds:g}: must be above 0")
    check_file("--out", args.out)
    given = read_prompts(args.prompts)
    torch.set_num_threads(args.threads)
    options: dict[str, Any] = {"dtype": args.dtype, "device": choose_device(args.device)}
    target = load_target(args.target, say=say, **options)
    draft = load_target(args.draft, **options)
    prompts = encode_prompts(given, target)
    methods = methods_of(target, draft, args.expansion, args.max_new_tokens)
    timed = run_rounds(methods, prompts, args.repeat, [prompts[0]], seconds=args.seconds)
    rows = compare(timed)
    print_table(rows)
    if args.out:
        facts = {
            "target": target.describe(), "draft": draft.describe(), "expansion": args.expansion,
            "max_new_tokens": args.max_new_tokens, "threads": args.threads, "methods": rows,
            "dtype": str(target.dtype).removeprefix("torch."), "device": device_name(target.device),
            "versions": versions(),
            "command": "python benchmarks/assisted.py " + shlex.join(sys.argv[1:]),
        }  # fmt: skip
        write_json(args.out, facts)
        console.print(f"wrote {args.out}", markup=False, soft_wrap=True)
    if rows[OURS]["different"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
