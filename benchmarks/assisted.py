"""Compare our engine with a draft model and transformers' assisted generation with the same two models.

    python benchmarks/assisted.py --target models/tiny-lm --draft runs/tiny-draft --prompts runs/demo/prompts.jsonl
    python benchmarks/assisted.py --target T --draft D --prompts P.jsonl --expansion 2 2 1 --seconds 9 --out F.json

Four methods take turns on each prompt, greedily: our engine with the draft model; our engine alone (plain);
``generate(assistant_model=…)`` with its defaults (assisted); ``generate`` alone (generate). Ratios are of tokens/s,
with 95 % intervals over the prompts. Every output is compared with our plain decoding's; exit code 1 if our drafted
text differs. τ is the committed tokens of a step, the bonus token included.
"""

import argparse
from typing import Any

from draftsmith.benchmarks.options import check_options, chosen, list_option, machine_options, prompts_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.models.files.locate import known_folder
from draftsmith.models.options import choose_device

OURS, PLAIN, ASSISTED, GENERATE = "draft_model", "plain", "assisted", "generate"


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("--target", required=True, metavar="FOLDER", help="a folder or a Hub id")
    parser.add_argument("--draft", required=True, metavar="FOLDER", help="a smaller model with the same tokenizer")
    prompts_option(parser)
    list_option(parser, "--expansion", [1, 1, 1, 1], "K", "children of each node, by depth (default: a chain of four)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="rounds over all prompts (default 1)")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="end timing after so long (16 prompts are timed in any case)"
    )
    machine_options(parser, "of both models")
    return parser


if __name__ == "__main__":
    models = lambda args: (known_folder(args.target), known_folder(args.draft))  # noqa: E731
    before_imports(parser(), lambda args: (models(args), check_prompts(args.prompts)))

import torch

from draftsmith.benchmarks.common import decoding
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure import timing
from draftsmith.inference.measure.timing import Method, Timed, tokens_of, transformers_method
from draftsmith.models.precision import say
from draftsmith.models.target import Target, load_target


def methods_of(target: Target, draft: Target, expansion: list[int], max_new_tokens: int) -> dict[str, Method]:
    """The four methods by name; one prompt at a time."""
    return {
        OURS: decoding(SpeculativeDecoder(target, DraftModelDrafter(draft, target, expansion)), max_new_tokens),
        PLAIN: decoding(SpeculativeDecoder(target), max_new_tokens),
        ASSISTED: transformers_method(target, max_new_tokens, assistant_model=draft.model),
        GENERATE: transformers_method(target, max_new_tokens),
    }


def compare(timed: dict[str, Timed]) -> dict[str, dict[str, Any]]:
    """Tokens/s, speed-ups over the others and number of texts that differ from plain decoding's, by method."""
    expected = timed[PLAIN].outputs
    rows: dict[str, dict[str, Any]] = {}
    for name, method in timed.items():
        different = sum(tokens_of(method.outputs[number]) != expected[number].tokens for number in expected)
        rows[name] = method.summary() | {"texts": len(expected), "different": different, "tau": None}
        for base in (PLAIN, GENERATE, ASSISTED):
            found = timing.speedup(method, timed[base]) if base != name else None
            rows[name] |= timing.speedup_fields(f"speedup_vs_{base}", found)
    accepted = [length for result in timed[OURS].outputs.values() for length in result.accepted]
    rows[OURS]["tau"] = round(sum(accepted) / len(accepted), 4) if accepted else None
    return rows


def main() -> None:
    args = parser().parse_intermixed_args()
    check_options(args, "max_new_tokens", "repeat", "expansion")
    given = read_prompts(args.prompts)
    torch.set_num_threads(args.threads)
    options: dict[str, Any] = {"dtype": args.dtype, "device": choose_device(args.device)}
    target = load_target(args.target, say=say, **options)
    draft = load_target(args.draft, **options)
    prompts = encode_prompts(given, target)
    methods = methods_of(target, draft, args.expansion, args.max_new_tokens)
    timed = timing.run_rounds(methods, prompts, args.repeat, [prompts[0]], seconds=args.seconds)
    rows = compare(timed)
    bases = (PLAIN, GENERATE, ASSISTED)
    table = table_of("method", "tokens/s", "τ", *(f"× {base}" for base in bases), "identical")
    for name, row in rows.items():
        ratios = (cell(row[f"speedup_vs_{base}"], row[f"speedup_vs_{base}_interval"]) for base in bases)
        same = f"{row['texts'] - row['different']}/{row['texts']}"
        table.add_row(name, f"{row['tokens_per_second']:.1f}", cell(row["tau"]), *ratios, same)
    print_table(table)
    if args.out:
        own = chosen(args, "expansion", "max_new_tokens", "threads")
        facts = facts_of(__file__, target) | {"draft": draft.describe(), **own, "methods": rows}
        write_report(args.out, facts)
    if rows[OURS]["different"]:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
