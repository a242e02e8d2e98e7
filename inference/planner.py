"""When self-speculation over a compressed cache pays, and how (MagicDec, arXiv 2408.11049 §3): for batch sizes and
context lengths, the selector, the number of entries K and of drafted tokens γ with the highest predicted speed. With
--drafters also which drafter: draft models of any size and EAGLE drafters, over their whole cache or a compressed one.

    python inference/planner.py --target models/tiny-lm --contexts 512 2048 3584 --batch-sizes 1 4 16 --out PLAN.json
    python inference/decode.py --plan PLAN.json --target models/tiny-lm --prompts LONG.jsonl --batch-size 4
    python inference/planner.py --target TARGET --drafters draft_model:SMALL draft_model:LESS runs/eagle --out PLAN.json

Step costs are measured on this machine. Acceptance by depth is measured, by selector and K, on what the target itself
writes after texts of each length: held-out modules, or --prompts. Then, of B rows with S cached tokens each,

    speed-up = E · T(B, S, 1) / (γ · T(B, K, 1) + T(B, S, γ + 1) + T_select),   E = 1 + α₁ + α₁ α₂ + … + α₁ … α_γ

Where plain decoding is the fastest, the plan says so. PLAN.json has a plot beside it. With --drafters whole steps are
timed in each setting; the plan has each setting's best drafter, as decode.py takes it, and the best of the others.

Shape letters: B rows, S cached tokens, K entries, γ drafted tokens of a step.
"""
# ruff: noqa: E402

import argparse
from pathlib import Path

from draftsmith.common.command import CommandLine, available_cores, before_imports, counted, run_command
from draftsmith.common.files import check_file
from draftsmith.inference.commands.options import check_counts, check_threads
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import SELECTORS, TRIED, check_names
from draftsmith.models.files.locate import known_folder
from draftsmith.models.options import DECODERS, target_arguments, target_options


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[512, 1024, 2048], metavar="S", help="cached tokens (%(default)s)"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], metavar="B", help="(%(default)s)")
    parser.add_argument("--entries", type=int, nargs="+", default=[64, 128, 256], metavar="K", help="(%(default)s)")
    parser.add_argument(
        "--selectors", nargs="+", choices=SELECTORS, help=f"({' '.join(TRIED)}, where the target allows it)"
    )
    parser.add_argument(
        "--drafters",
        nargs="+",
        default=[],
        metavar="DRAFTER",
        help="to choose from, beside the target itself: draft_model:PATH, folders of EAGLE drafters",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="texts of at least S tokens, of which the first S count; held-out modules if left out",
    )
    parser.add_argument("--texts", type=int, default=4, help="of each length, for acceptance (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each text, and of an answer (%(default)s)")
    target_options(parser)
    parser.add_argument("--threads", type=int, default=available_cores(), help="CPU threads; all cores if left out")
    out = "write the plan there; without --drafters, its plot beside it"
    parser.add_argument("--out", type=Path, metavar="PLAN.json", help=out)
    return parser


def check(args: argparse.Namespace) -> None:
    if args.target is None:
        raise ValueError("--target is missing: the model that drafts for itself")
    known_folder(args.target)
    if args.drafters:
        check_names(args.drafters, args.target)
    for name in ("contexts", "batch_sizes", "entries"):
        for value in getattr(args, name):
            check_counts(**{name: value})
    check_counts(texts=args.texts, new_tokens=args.new_tokens)
    check_threads(args.threads)
    check_prompts(args.prompts)
    check_file("--out", args.out, beside=".png")


if __name__ == "__main__":
    before_imports(parser(), check)

import torch

from draftsmith.common.files import write_json
from draftsmith.inference.commands.memory import check_memory
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.measure.drafter_plans import candidates, plan_drafters
from draftsmith.inference.measure.plan_figures import draw, print_drafter_plan, print_plan
from draftsmith.inference.measure.planning import make_plan, possible_selectors
from draftsmith.inference.measure.prefilled import longest_context
from draftsmith.models.target import load_target


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    torch.set_num_threads(args.threads)
    largest = [f"{selector}:{max(args.entries)}" for selector in args.selectors or TRIED]
    longest, options = max(args.contexts) + 2 * args.new_tokens, target_arguments(args)
    check_memory(args.target, [*largest, *args.drafters], lambda: longest, max(args.batch_sizes), options, whole=True)
    target = load_target(args.target, **options)
    if max(args.contexts) > longest_context(target, args.new_tokens):
        raise ValueError(
            f"--contexts {max(args.contexts)}: '{target.name}' has {target.context} positions, of which "
            f"{longest_context(target, args.new_tokens)} are left beside --new-tokens {args.new_tokens}"
        )
    if min(args.entries) >= min(args.contexts) and not args.drafters:
        raise ValueError(
            f"--contexts {min(args.contexts)}: all --entries are as many or more; give one below {min(args.contexts)}"
        )
    given = [] if args.prompts is None else encode_prompts(read_prompts(args.prompts), target)
    if given and (most := max(map(len, given))) < max(args.contexts):
        raise ValueError(
            f"{args.prompts}: its longest text has {counted(most, 'token')}, too few for --contexts "
            f"{max(args.contexts)}; give longer ones, or leave out --prompts (held-out modules)"
        )
    selectors, lean = args.selectors or possible_selectors(target), DECODERS[args.decoder]
    sizes = args.contexts, args.batch_sizes
    if args.drafters:
        chosen = candidates(target, args.drafters, selectors, args.entries, options)
        texts = {size: [each[:size] for each in given if len(each) >= size][: args.texts] for size in args.contexts}
        facts = plan_drafters(target, chosen, *sizes, texts if given else args.texts, args.new_tokens, lean)
    else:
        settings = [(selector, each) for selector in selectors for each in args.entries]
        facts = make_plan(target, *sizes, settings, given, args.texts, args.new_tokens, lean)
    if args.out:  # first: it must not be lost
        write_json(args.out, facts)
    show = print_drafter_plan if args.drafters else print_plan
    show(facts)
    if args.out:
        written = [args.out] if args.drafters else [args.out, args.out.with_suffix(".png")]
        if not args.drafters:
            draw(facts, written[1])
        console.print(f"wrote {' and '.join(map(str, written))}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
