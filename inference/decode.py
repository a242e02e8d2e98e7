"""Decode with a drafter, and prove that it is exact and faster.

    python inference/decode.py runs/demo --prompt 'def read_config(path):' --raw
    python inference/decode.py runs/demo --prompts runs/demo/prompts.jsonl --baseline all --check-lossless --report DIR
    python inference/decode.py runs/demo --interactive               # a conversation; with --raw each line is continued
    python inference/decode.py runs/demo --prompts P.jsonl --live    # texts as they are decoded, in colours
    python inference/decode.py runs/demo --prompt 'import ' --raw --mode sample --temperature 0.8 --top-p 0.95 --seed 1
    python inference/decode.py runs/a runs/b --prompts P.jsonl --baseline engine        # two drafters, one table
    python inference/decode.py ngram --target models/tiny-lm --prompts P.jsonl          # drafts from the text itself
    python inference/decode.py runs/demo+ngram --prompts P.jsonl                        # both, in one token tree
    python inference/decode.py draft_model:runs/tiny-draft@2,2,1 --target models/tiny-lm --prompts P.jsonl
    python inference/decode.py snapkv:256 --target models/tiny-lm --prompts LONG.jsonl --batch-size 8   # long texts

DRAFTER is a run folder or a Hub id (of a drafter published for other programs, too, converted once: docs/import.md,
with its target by --target), or one that needs no training: `none` (plain decoding), `ngram` (`ngram:2-10` for
matches of 2 to 10 tokens), `draft_model:PATH` (any causal LM with the target's tokenizer; `@2,2,1` gives its children
by depth, else it drafts a chain), `snapkv:K` and `streamingllm:K` (the target itself, over K of the cached tokens; an
EAGLE drafter over K of them is `FOLDER,streamingllm:K`).
Several joined by `+` are merged into one token tree.

Exit codes: 0 done, 1 failed (also: output that is not the target's own under --check-lossless), 2 wrong usage or bad
input.
"""

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.common.command import CommandLine, available_cores, counted, run_command, slow_imports
from draftsmith.common.files import check_file, check_folder
from draftsmith.common.progress import ProgressBar
from draftsmith.data.formats import Message
from draftsmith.inference.commands.options import (
    SAMPLING,
    biases_by_id,
    check_counts,
    check_logprobs,
    check_threads,
    choose_mode,
    read_biases,
    read_standard_input,
)
from draftsmith.inference.commands.prompts import Prompt, encode_prompts, read_sets, with_later_turns
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.names import check_names, short_name
from draftsmith.models.options import DECODERS, target_arguments, target_options
from draftsmith.models.precision import say

if TYPE_CHECKING:
    from draftsmith.inference.engine.protocol import Drafter
    from draftsmith.inference.verify.sampling import Sampling
    from draftsmith.models.target import Target


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument(
        "drafters",
        nargs="*",
        metavar="DRAFTER",
        help="a run folder, a Hub id, none, ngram, draft_model:PATH, snapkv:K, or several joined by +",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", metavar="TEXT|-", help="one prompt; its answer is printed as it is decoded; -: read standard input"
    )
    what.add_argument(
        "--prompts",
        type=Path,
        action="append",
        metavar="FILE.jsonl",
        help='lines of {"prompt": …}, {"messages": …} or {"turns": …} (MT-Bench, Spec-Bench: later turns follow plain '
        "greedy answers), or a .parquet file of such rows (SPEED-Bench); several files: give --prompts for each; a row "
        "without a kind is then of the kind that its file is named by",
    )
    what.add_argument(
        "--interactive", action="store_true", help="a conversation; texts to continue where there is no chat template"
    )
    parser.add_argument(
        "--first", type=int, metavar="N", help="only the first N prompts of each file, turns counted (default: all)"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="--prompt and --interactive are texts to continue; without it, messages for the target's chat template "
        "where it has one",
    )
    parser.add_argument(
        "--system",
        metavar="TEXT|-",
        help="a system message before that of --prompt, or before a conversation; -: read standard input",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end an answer of --prompt, --interactive or --live before this text; repeat it for several",
    )
    add_sampling_options(parser)
    add_measuring_options(parser)
    target_options(parser)
    parser.add_argument("--threads", type=int, help="CPU threads; all cores if left out")
    return parser


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add options of how tokens are chosen and drafted."""
    parser.add_argument(
        "--mode",
        choices=["greedy", "sample", "typical"],
        help="greedy: the target's greedy text, token by token; sample: the text of plain sampling from the target "
        "with this seed, the default where one of the next options is given; typical: Medusa's criterion, lossy",
    )
    parser.add_argument(
        "--verify",
        choices=["coupled", "mss"],
        help="of --mode sample. coupled: a seed is one text, whatever the drafter, tree and batch (default); mss: "
        "SpecInfer's multi-step speculative sampling, whose texts have the same distribution",
    )
    parser.add_argument("--temperature", type=float, help="default 1")
    parser.add_argument("--top-k", type=int, help="only the K most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="only the most likely tokens that make up this share (default 1)")
    parser.add_argument("--min-p", type=float, help="only tokens this likely beside the likeliest (default 0)")
    parser.add_argument("--repetition-penalty", type=float, help="above 1: what the text holds becomes less likely")
    parser.add_argument(
        "--presence-penalty",
        type=float,
        help="-2 to 2: so much is taken from the logits of tokens that the answer holds (default 0). This and the next "
        "two work in greedy decoding, too, which they leave as it is if no other sampling option is given",
    )
    parser.add_argument("--frequency-penalty", type=float, help="the same, times how often it holds them (default 0)")
    parser.add_argument(
        "--logit-bias",
        action="append",
        metavar="ID=X",
        help="add X (-100 to 100) to a token's logit; '\"TEXT\"=X' names it by its text; repeat it for several",
    )
    parser.add_argument(
        "--samples", type=int, metavar="N", help="N texts of each prompt, with the seeds --seed, --seed + 1, …"
    )
    parser.add_argument("--epsilon", type=float, help="threshold of --mode typical: higher accepts less (default 0.09)")
    parser.add_argument("--delta", type=float, help="its second threshold, times e^(-entropy) (default √ε)")
    parser.add_argument("--seed", type=int, help="the same seed, the same text (default 0)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded at a time (%(default)s)")
    parser.add_argument(
        "--tree", default="auto", metavar="FILE|auto", help="a tree file; auto: the drafter's own tree.json"
    )
    parser.add_argument(
        "--all-nodes",
        action="store_true",
        help="run and verify whole trees, also where fewer nodes are faster here: to compare their τ",
    )
    parser.add_argument(
        "--max-draft-nodes", type=int, metavar="N", help="draft at most N tokens a step and text; 0: plain decoding"
    )
    parser.add_argument(
        "--plan",
        metavar="PLAN.json|auto",
        help="in place of DRAFTER: what inference/planner.py chose for this batch size and such long texts; auto: plan "
        "for these prompts now (a minute or so)",
    )


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Add options of what is measured and written."""
    parser.add_argument(
        "--baseline",
        choices=["none", "engine", "transformers", "all"],
        default="engine",
        help="what speeds are compared with: plain decoding by this engine, by transformers, or all: both, "
        "transformers' prompt lookup, and its assisted generation beside a draft_model (%(default)s)",
    )
    parser.add_argument("--check-lossless", action="store_true", help="compare every token with plain decoding")
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="rounds over all prompts, of which the median counts; fewer once every speed-up is known to within 3%%",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="end timing, of all methods together, after so long (16 prompts are timed in any case); the other prompts "
        "are then decoded in batches, and all are checked",
    )
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print N of the texts, drafted tokens coloured"
    )
    parser.add_argument(
        "--live", action="store_true", help="print each of --prompts' texts as it is decoded, and measure nothing else"
    )
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write report.html, report.json and report.png there"
    )
    parser.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="the log-probability of each token of an answer, and those of the K likeliest ones in its place (0 to "
        "20): a table below texts of --prompt, --interactive and --live, and in --answers",
    )
    parser.add_argument(
        "--logprobs-mode",
        choices=["raw_logprobs", "processed_logprobs"],
        help="raw_logprobs: of the target's logits (default); processed_logprobs: after the sampling options",
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE.jsonl",
        help="write the answers to --prompts there as Spec-Bench and FastChat do, with their times; of several "
        "drafters into FILE-DRAFTER.jsonl",
    )


def check(args: argparse.Namespace) -> None:
    """Choose the mode if it was left out, and refuse what can be known to be wrong before anything slow is imported or
    loaded.
    Raises ValueError: two options contradict each other, a value is out of its range, or --report cannot be written."""
    check_counts(max_new_tokens=args.max_new_tokens, batch_size=args.batch_size, repeat=args.repeat)
    check_counts(first=args.first, samples=args.samples)
    args.logit_bias = None if args.logit_bias is None else read_biases(args.logit_bias)
    if args.first and not args.prompts:
        raise ValueError("--first is for --prompts; leave it out")
    check_threads(args.threads)
    if args.seconds is not None and not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds:g}: must be above 0")
    if args.show < 0:
        raise ValueError(f"--show {args.show}: must be at least 0")
    if bool(args.drafters) == bool(args.plan):
        raise ValueError("give a DRAFTER, or --plan in its place" + (", not both" if args.plan else ""))
    if args.plan and args.plan != "auto" and not Path(args.plan).is_file():
        raise FileNotFoundError(f"--plan {args.plan}: there is no such file; python inference/planner.py writes one")
    if args.plan and (args.interactive or not args.target):
        raise ValueError("--plan is for --prompt and --prompts" if args.interactive else "--plan needs --target")
    if args.max_draft_nodes is not None and args.max_draft_nodes < 0:
        raise ValueError(f"--max-draft-nodes {args.max_draft_nodes}: must be at least 0")
    if len({short_name(name) for name in args.drafters}) < len(args.drafters):
        raise ValueError("two of the drafters have the same name, and so would their reports")
    choose_mode(args)
    if args.max_draft_nodes is not None and args.mode in ("mss", "typical"):
        raise ValueError("--max-draft-nodes is for greedy decoding and coupled sampling: other texts depend on it")
    if args.mode == "typical" and args.check_lossless:
        raise ValueError("--mode typical is lossy by design, so there is nothing for --check-lossless to check")
    measured = args.report or args.check_lossless
    if args.interactive and measured:
        raise ValueError("--interactive measures nothing; leave out --report and --check-lossless, or use --prompts")
    if args.live and not args.prompts:
        raise ValueError("--live is for --prompts; other texts are printed as they are decoded anyway; leave it out")
    if args.live and measured:
        raise ValueError(
            "--live prints the texts of --prompts and measures nothing; leave out --report and --check-lossless"
        )
    if not measured and (args.live or not args.prompts):
        for name, default in {"batch_size": 1, "repeat": 1, "seconds": None, "show": 0, "baseline": "engine"}.items():
            if getattr(args, name) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for what is measured, --prompts or --report; leave it out"
                )
    if args.samples and not (args.live or args.answers or (args.prompt is not None and not measured)):
        raise ValueError("--samples is for --prompt and --live, which measure nothing, and for --answers; leave it out")
    if args.interactive and sys.stdin is None:
        raise ValueError("--interactive reads stdin, which is closed; use --prompt or --prompts")
    if (args.live or not args.prompts) and not measured and len(args.drafters) > 1:
        raise ValueError("--prompt, --interactive and --live take one DRAFTER; compare several with --prompts alone")
    check_logprobs(args)
    if args.answers and (args.live or not args.prompts):
        raise ValueError("--answers is for --prompts without --live")
    if args.answers and args.batch_size > 1:
        raise ValueError(f"--answers has times of one text at a time; leave out --batch-size {args.batch_size}")
    for name in ("prompt", "system"):
        if getattr(args, name) == "":
            raise ValueError(f"--{name}: the text is empty; give it at least one character")
    if args.stop and ((args.prompts and not args.live) or measured):
        raise ValueError(
            "--stop is for --prompt, --interactive and --live, which measure nothing: baselines and --check-lossless "
            "do not stop there; leave it out"
        )
    if "" in (args.stop or ()):
        raise ValueError("--stop: the text is empty and would end every answer; leave it out")
    if args.system is not None and (args.prompts or args.raw):
        other = "--raw has no messages" if args.raw else '--prompts have theirs in {"messages": …}'
        raise ValueError(f"--system is for messages of --prompt and --interactive, and {other}; leave it out")
    if args.system == "-" and (args.interactive or args.prompt == "-"):
        other = "--interactive" if args.interactive else "--prompt -"
        raise ValueError(f"--system -: {other} reads standard input; give the text")
    if args.raw and args.prompts:
        raise ValueError('--raw is for --prompt and --interactive; of --prompts, lines of {"prompt": …} are raw text')
    check_folder("--report", args.report, {"report.json": "drafter"})
    for file in answer_files(args):
        check_file("--answers", file, ".jsonl")
    check_names(args.drafters or ["none"], args.target)


def answer_files(args: argparse.Namespace) -> list[Path]:
    """The files of --answers: one for each drafter, with its name where there are several."""
    file: Path | None = args.answers
    if file is None or len(args.drafters) < 2:
        return [] if file is None else [file]
    return [file.with_name(f"{file.stem}-{short_name(name)}{file.suffix}") for name in args.drafters]


def measure(
    args: argparse.Namespace,
    target: "Target",
    drafters: "Sequence[Drafter | None]",
    given: list[Prompt],
    prompts: list[list[int]],
    sampling: "Sampling",
    options_of: Callable[[list[int]], dict[str, Any]],
) -> None:
    """Decode the prompts with each drafter and the baselines, and report what was measured. Raises SystemExit(1): a
    text is not the target's own."""
    from draftsmith.inference.drafters.load import report_fields
    from draftsmith.inference.engine.engine import SpeculativeDecoder
    from draftsmith.inference.measure import report as reporting
    from draftsmith.inference.measure.evaluation import evaluate
    from draftsmith.inference.measure.page import render_pages
    from draftsmith.inference.measure.spec_bench import write_answers
    from draftsmith.inference.measure.timing import engine_options

    lean = DECODERS[args.decoder]
    decoders = [SpeculativeDecoder(target, drafter, lean=lean) for drafter in drafters]
    kinds = [prompt.kind for prompt in given]
    likely: dict[str, Any] = {"logprobs": args.logprobs, "logprobs_mode": args.logprobs_mode or "raw_logprobs"}

    def whole(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [report | report_fields(name) for report, name in zip(reports, args.drafters, strict=True)]

    reports, outputs = evaluate(
        target,
        dict(zip(args.drafters, drafters, strict=True)),
        prompts,
        mode=args.mode,
        sampling=sampling,
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        baseline=args.baseline,
        check_lossless=args.check_lossless,
        rounds=args.repeat,
        seconds=args.seconds,
        kinds=kinds,
        lean=lean,
        max_draft_nodes=args.max_draft_nodes,
        **likely,
        one_by_one=bool(args.answers),  # which have times
        command="python inference/decode.py " + shlex.join(sys.argv[1:]),
        keep=args.report and (lambda found: reporting.write_figures(whole(found), args.report)),
    )
    reports = whole(reports)
    if args.report:  # first: it must not be lost
        reporting.write_figures(reports, args.report)
    shown = max(args.show, 1) if args.prompt is not None else args.show
    for file, name, decoder, results in zip(
        answer_files(args), args.drafters, decoders, outputs, strict=bool(args.answers)
    ):
        if args.samples:
            own = engine_options(args.mode, sampling, prompts, range(1, args.samples))
            own |= {"max_draft_nodes": args.max_draft_nodes, **likely}
            more = prompts * (args.samples - 1)
            longest = [max(prompts, key=len)]  # the first call allocates, and captures graphs
            first = engine_options(args.mode, sampling, longest) | {"max_draft_nodes": args.max_draft_nodes, **likely}
            decoder.generate(longest, args.max_new_tokens, **first)
            with ProgressBar(f"samples of {name}", len(more), console) as bar:
                done = itertools.count(1)
                own["on_end"] = lambda *_, bar=bar, done=done: bar(next(done))
                results = [*results, *decoder.generate(more, args.max_new_tokens, batch_size=1, **own)]
        write_answers(file, target, name, given, results, sampling.seed)
        console.print(f"wrote {file}", markup=False, soft_wrap=True)
    sources = decoders[0].drafter.sources
    reporting.print_texts(target, prompts[:shown], outputs[0][:shown], console, args.drafters[0], sources)
    reporting.print_table(reports, console)
    if args.report:
        pages = render_pages(reports, decoders, prompts, kinds, options_of)
        reporting.write_pages(reports, pages, args.report, console)
    if any(report["lossless"] and not report["lossless"]["passed"] for report in reports):
        raise SystemExit(1)


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    given = read_sets(args.prompts or [], args.first)
    read_standard_input(args)

    with slow_imports():
        import torch

        from draftsmith.inference.commands.interactive import answer, interact, print_legend, stream_prompts
        from draftsmith.inference.commands.memory import check_memory, longest_text, target_name
        from draftsmith.inference.drafters.load import check_trees
        from draftsmith.inference.engine.engine import SpeculativeDecoder
        from draftsmith.inference.engine.text import answer_text
        from draftsmith.inference.load import load_drafter
        from draftsmith.inference.measure.planning import planned_drafter
        from draftsmith.inference.measure.timing import engine_options
        from draftsmith.inference.verify.sampling import Sampling
        from draftsmith.models.target import Target

    given_sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    biases = given_sampling.pop("logit_bias", {})
    known = {key: value for key, value in biases.items() if isinstance(key, int)}
    sampling = Sampling(**given_sampling, logit_bias=known)  # checks the ranges
    options = target_arguments(args)
    torch.set_num_threads(args.threads or available_cores())
    target, drafters, lean = None, [], DECODERS[args.decoder]

    system: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]

    def given_to(target: Target) -> list[Prompt]:
        if args.prompt is None:
            return given
        chat = has_template(target) and not args.raw
        return [Prompt([*system, {"role": "user", "content": args.prompt}] if chat else args.prompt, "--prompt")]

    def has_template(target: Target) -> bool:
        found = bool(target.tokenizer and target.tokenizer.chat_template)
        if system and not found:
            raise ValueError(f"--system: target '{target.name}' has no chat template; leave it out")
        return found

    asked = given or ([Prompt((args.system or "") + args.prompt)] if args.prompt is not None else [])
    if asked and (name := args.target or target_name(args.drafters)):
        longest = partial(longest_text, name, asked, args.max_new_tokens)
        check_memory(name, args.drafters, longest, max(args.samples or 1, min(args.batch_size, len(asked))), options)
    if args.tree == "auto":
        check_trees(args.drafters)
    if args.plan:
        target, _ = load_drafter("none", target_name=args.target, **options)
        prompts = encode_prompts(given_to(target), target)
        args.drafters = [planned_drafter(args.plan, target, prompts, args.batch_size, args.max_new_tokens, lean)]
    for name in args.drafters:
        before = target
        target, drafter = load_drafter(
            name, target, target_name=args.target, tree=args.tree, all_nodes=args.all_nodes, lean=lean, **options
        )
        if before is not None and target.fingerprint != before.fingerprint:
            raise ValueError(f"'{name}': its adapter changes the target of the drafters before it; name it first")
        drafters.append(drafter)
    assert target is not None
    first = SpeculativeDecoder(target, drafters[0], lean=lean)
    sampling = replace(sampling, logit_bias=biases_by_id(biases, target.tokenizer, target.vocab_size))
    seeds = [sampling.seed + number for number in range(args.samples or 0)]

    def options_of(prompt: list[int], samples: Sequence[int] = (0,)) -> dict[str, Any]:
        own = engine_options(args.mode, sampling, [prompt], samples)
        stops = {"stop_strings": args.stop} if args.stop else {}
        own |= {"logprobs": args.logprobs, "logprobs_mode": args.logprobs_mode or "raw_logprobs"}
        return {"max_new_tokens": args.max_new_tokens, "max_draft_nodes": args.max_draft_nodes, **stops, **own}

    if args.interactive:
        if system and has_template(target):  # whose template has to take it
            encode_prompts([Prompt([*system, {"role": "user", "content": "x"}], "--system")], target, say)
        return interact(first, args.drafters[0], options_of, raw=args.raw, system=system)
    given = given_to(target)
    prompts = encode_prompts(given, target, say)
    if any(prompt.later for prompt in given) and not args.live:
        plain = SpeculativeDecoder(target, lean=lean)

        def answers(asked: list[Prompt]) -> list[str]:
            console.print(f"answering {counted(len(asked), 'prompt')}, which later turns follow", markup=False)
            found = plain.generate(encode_prompts(asked, target), args.max_new_tokens, batch_size=args.batch_size)
            return [answer_text(target, result.tokens) for result in found]

        given = with_later_turns(given, answers)
        prompts = encode_prompts(given, target)
    if args.live:
        return stream_prompts(first, args.drafters[0], given, prompts, options_of, seeds)
    if args.prompt is not None and not args.report and not args.check_lossless:
        print_legend(first, args.drafters[0])
        answer(first, prompts[0], options_of, seeds)
        return
    measure(args, target, drafters, given, prompts, sampling, options_of)


if __name__ == "__main__":
    run_command(main)
