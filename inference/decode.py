"""Decode with a drafter, and prove that it is exact and faster.

    python inference/decode.py runs/demo --prompt 'def read_config(path):' --raw
    python inference/decode.py runs/demo --prompts runs/demo/prompts.jsonl --baseline all --check-lossless --report DIR
    python inference/decode.py none --target models/tiny-lm --interactive --raw
    python inference/decode.py runs/demo --prompt 'import ' --raw --mode sample --temperature 0.8 --top-p 0.95 --seed 1
    python inference/decode.py runs/a runs/b --prompts P.jsonl --baseline engine        # two drafters, one table
    python inference/decode.py ngram --target models/tiny-lm --prompts P.jsonl          # drafts from the text itself
    python inference/decode.py runs/demo+ngram --prompts P.jsonl                        # both, in one token tree
    python inference/decode.py draft_model:runs/tiny-draft@2,2,1 --target models/tiny-lm --prompts P.jsonl

DRAFTER is a run folder or a Hub id, or one that needs no training: `none` (plain decoding), `ngram` (`ngram:2-10` for
matches of 2 to 10 tokens), `draft_model:PATH` (any causal LM with the target's tokenizer; `@2,2,1` gives its children
by depth, else it drafts a chain). Several joined by `+` are merged into one token tree.

Exit codes: 0 done, 1 failed (also: output that is not the target's own under --check-lossless), 2 wrong usage or bad
input.
"""

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.common.command import available_cores, run_command
from draftsmith.common.files import check_folder, write_json
from draftsmith.inference.options import SAMPLING, check_counts, check_threads, short_name
from draftsmith.inference.prompts import Prompt, encode_prompts, read_prompts
from draftsmith.inference.terminal import console, end_text, separate_text, write_text
from draftsmith.inference.text import TextStream, decode_text, visible
from draftsmith.models.options import DECODERS, target_arguments, target_options

if TYPE_CHECKING:  # torch and transformers take seconds: main imports them once the command line is known to be right
    from draftsmith.inference.engine import Generation, SpeculativeDecoder


def stream(decoder: "SpeculativeDecoder", prompt: list[int], args: argparse.Namespace) -> "Generation":
    """Decode one prompt and write its text as it comes: green is drafted and accepted, plain is the target's own."""
    from draftsmith.inference.timing import choice

    text = TextStream(decoder.target.tokenizer)
    written = ""  # the last piece

    def write(piece: str, drafted: bool) -> None:
        nonlocal written
        write_text(piece, drafted=drafted)
        written = piece or written

    def show(row: int, new: list[int]) -> None:
        for place, token in enumerate(new, 1):
            write(text.add([token]), place < len(new))

    began = time.perf_counter()
    (result,) = decoder.generate([prompt], args.max_new_tokens, on_tokens=show, **choice(args, [prompt]))
    seconds = time.perf_counter() - began
    write(text.end(), False)
    end_text(written)
    tau = sum(result.accepted) / len(result.accepted) if result.accepted else 1.0
    console.print(
        f"[dim]{len(result.tokens)} tokens in {seconds:.2f} s ({len(result.tokens) / seconds:.0f}/s), "
        f"{len(result.accepted)} steps, τ {tau:.2f}, ended by {result.finish_reason}[/dim]"
    )
    return result


def read_line() -> str | None:
    """A line from stdin without its end; None at the end of the input.

    Raises:
        ValueError: it is not UTF-8.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # not every Python is built with it
            import readline  # noqa: F401  # arrow keys and the history of lines, in input()

        try:
            line = input("> ")
        except EOFError:
            console.print()
            return None
    else:
        if sys.stdin.isatty():
            console.print("> ", end="")
        source = getattr(sys.stdin, "buffer", sys.stdin)
        given = source.readline()
        if not given:
            return None
        line = given.decode("utf-8", "surrogateescape") if isinstance(given, bytes) else given
    line = line.rstrip("\r\n")
    try:
        line.encode()
    except UnicodeEncodeError:
        raise ValueError("this line is not UTF-8 text; nothing was asked") from None
    return line


def interact(decoder: "SpeculativeDecoder", args: argparse.Namespace) -> None:
    """Prompts from stdin until an empty line or the end of the input. With a chat template they are the user's turns of
    a conversation, which begins anew when it fills the target's context; without one, or with --raw, each line is a
    prompt of its own."""
    target = decoder.target
    chat: list[dict[str, str]] | None = [] if is_chat(target.tokenizer, args) else None
    answers = 0
    what = "Type a message" if chat is not None else "Type a prompt"
    console.print(f"[dim]{what}; an empty line ends. Green: drafted and accepted; plain: the target's own.[/dim]")
    while True:
        try:
            line = read_line()
        except ValueError as error:
            console.print(str(error), markup=False)
            continue
        if not line:
            return
        if chat is None:
            ids = Prompt(line, "this line").encode(target)
        else:
            chat.append({"role": "user", "content": line})
            ids = Prompt(chat, "this line").encode(target)
            if len(ids) >= target.context and len(chat) > 1:
                console.print(f"the target's context of {target.context} tokens is full; a new conversation begins")
                chat = chat[-1:]
                ids = Prompt(chat, "this line").encode(target)
        if not 0 < len(ids) < target.context:
            console.print(
                f"this line has {len(ids)} tokens, and the target's context of {target.context} holds them with the "
                "answer; nothing was asked"
            )
            if chat is not None:
                chat = []
            continue
        if answers:
            separate_text()
        result = stream(decoder, ids, args)
        answers += 1
        if chat is not None:
            chat.append({"role": "assistant", "content": decode_text(target.tokenizer, result.tokens)})


def is_chat(tokenizer: Any, args: argparse.Namespace) -> bool:
    """Whether --prompt and --interactive are messages for the target's chat template."""
    return bool(tokenizer.chat_template) and not args.raw


def show_texts(tokenizer: Any, prompts: Sequence[list[int]], results: Sequence["Generation"]) -> None:
    """Write answers to stdout, a line feed between two; headings and the ends of the prompts to stderr."""
    from draftsmith.inference.report import pieces

    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), 1):
        if number > 1:
            separate_text()
        console.print(f"prompt {number}: [green]green[/green] was drafted and accepted, plain is the target's own")
        console.print(visible(decode_text(tokenizer, prompt[-48:])), style="dim", markup=False)
        found = pieces(tokenizer, result)
        for text, drafted in found:
            write_text(text, drafted=drafted)
        end_text(found[-1][0] if found else "")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "drafters",
        nargs="+",
        metavar="DRAFTER",
        help="a run folder, a Hub id, none, ngram, draft_model:PATH, or several joined by +",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="one prompt; the text is printed as it is decoded")
    what.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help='lines of {"prompt": …}, {"messages": …} or {"turns": …}'
    )
    what.add_argument(
        "--interactive", action="store_true", help="prompts from the terminal; with a template a conversation"
    )
    parser.add_argument(
        "--raw", action="store_true",
        help="--prompt and --interactive as they are; without it, messages for the target's chat template where it has "
        "one",
    )  # fmt: skip
    parser.add_argument(
        "--mode", choices=["greedy", "sample", "typical"], default="greedy",
        help="greedy: the target's greedy text, token by token; sample: the distribution of sampling from the target; "
        "typical: Medusa's criterion, lossy",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, help="default 1; for --mode sample and typical, as the next ones")
    parser.add_argument("--top-k", type=int, help="only the K most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="only the most likely tokens that make up this share (default 1)")
    parser.add_argument("--min-p", type=float, help="only tokens this likely beside the likeliest (default 0)")
    parser.add_argument("--repetition-penalty", type=float, help="above 1: what the text holds becomes less likely")
    parser.add_argument("--epsilon", type=float, help="threshold of --mode typical: higher accepts less (default 0.09)")
    parser.add_argument("--seed", type=int, help="the same seed, the same text (default 0)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument(
        "--tree", default="auto", metavar="FILE|auto", help="a tree file; auto: the drafter's own tree.json"
    )
    parser.add_argument("--baseline", choices=["none", "engine", "transformers", "all"], default="engine")
    parser.add_argument("--check-lossless", action="store_true", help="compare every token with plain decoding")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N",
        help="rounds over all prompts, of which the median counts; fewer once every speed-up is known to within 3%%",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, metavar="S",
        help="end timing after so long (16 prompts are timed in any case); all prompts are decoded and checked",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print N of the texts, drafted tokens coloured"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.json and report.png there")
    target_options(parser)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the target: slow to begin, then faster (also plain decoding)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads; all cores if left out")
    return parser


def check(args: argparse.Namespace) -> None:
    """Refuse what can be known to be wrong before anything slow is imported or loaded.

    Raises:
        ValueError: two options contradict each other, a value is out of its range, or --report cannot be written.
    """
    check_counts(max_new_tokens=args.max_new_tokens, batch_size=args.batch_size, repeat=args.repeat)
    check_threads(args.threads)
    if args.seconds is not None and not args.seconds > 0:
        raise ValueError(f"--seconds {args.seconds:g}: must be above 0")
    if args.show < 0:
        raise ValueError(f"--show {args.show}: must be at least 0")
    if args.compile and args.device_map != "none":
        raise ValueError("--compile needs the whole target on one device; leave out --device-map")
    if len({short_name(name) for name in args.drafters}) < len(args.drafters):
        raise ValueError("two of the drafters have the same name, and so would their reports")
    given_sampling = [name for name in SAMPLING if getattr(args, name) is not None]
    if args.mode == "greedy" and given_sampling:
        raise ValueError(f"--{given_sampling[0].replace('_', '-')} needs --mode sample (or typical)")
    if args.mode != "typical" and args.epsilon is not None:
        raise ValueError("--epsilon is the threshold of --mode typical")
    if args.mode == "typical" and args.check_lossless:
        raise ValueError("--mode typical is lossy by design, so there is nothing for --check-lossless to check")
    measured = args.report or args.check_lossless
    if args.interactive and measured:
        raise ValueError("--interactive measures nothing; leave out --report and --check-lossless, or use --prompts")
    if args.interactive and sys.stdin is None:
        raise ValueError("--interactive reads prompts from stdin, which is closed; use --prompt or --prompts")
    if not args.prompts and not measured and len(args.drafters) > 1:
        raise ValueError("--prompt and --interactive take one DRAFTER; compare several with --prompts")
    if args.prompt == "":
        raise ValueError("--prompt: the text is empty; give it at least one character")
    if args.raw and args.prompts:
        raise ValueError('--raw is for --prompt and --interactive; of --prompts, lines of {"prompt": …} are raw text')
    check_folder("--report", args.report)


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    given = read_prompts(args.prompts) if args.prompts else []
    if args.prompt is not None:
        try:
            args.prompt.encode()
        except UnicodeEncodeError:
            raise ValueError("--prompt: not UTF-8 text") from None

    import torch

    from draftsmith.inference import report as reporting
    from draftsmith.inference import timing
    from draftsmith.inference.drafters.load import load_drafter
    from draftsmith.inference.engine import SpeculativeDecoder

    timing.sampling_of(args)  # its ranges
    options = target_arguments(args)
    if args.compile and options["device"] == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise ValueError("--compile on a CPU needs a C++ compiler (g++ or clang++), and there is none on the path")
    torch.set_num_threads(args.threads or available_cores())
    target, drafters, lean = None, [], DECODERS[args.decoder]
    for name in args.drafters:
        target, drafter = load_drafter(name, target, target_name=args.target, tree=args.tree, lean=lean, **options)
        drafters.append(drafter)
    assert target is not None
    first = SpeculativeDecoder(target, drafters[0], compiled=args.compile, lean=lean)
    if args.interactive:
        return interact(first, args)
    if args.prompt is not None:
        chat = is_chat(target.tokenizer, args)
        given = [Prompt([{"role": "user", "content": args.prompt}] if chat else args.prompt, "--prompt")]
    prompts = encode_prompts(given, target)
    if args.prompt is not None and not args.report and not args.check_lossless:
        stream(first, prompts[0], args)
        return

    reports, outputs = timing.evaluate(args.drafters, target, drafters, prompts, args)
    shown = max(args.show, 1) if args.prompt is not None else args.show
    show_texts(target.tokenizer, prompts[:shown], outputs[0][:shown])
    reporting.print_table(reports, console)
    for report in reports:
        if args.report:
            # Of several drafters each one's is in a folder of its own, and the first one's in the given folder, too.
            folders = [args.report / short_name(report["drafter"])] if len(reports) > 1 else []
            for folder in [*folders, args.report] if report is reports[0] else folders:
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / "report.json", report)
                reporting.plot(report, folder / "report.png")
                written = f"wrote {folder / 'report.json'} and {folder / 'report.png'}"
                console.print(written, markup=False, soft_wrap=True)
    if any(report["lossless"] and not report["lossless"]["passed"] for report in reports):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
