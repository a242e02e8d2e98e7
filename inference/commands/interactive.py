"""Answers streamed to stdout as they are decoded, and --interactive: a conversation, or texts that are continued."""

import contextlib
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len

from draftsmith.common.command import interruptible
from draftsmith.data.chat import encode_prompt
from draftsmith.data.formats import Message
from draftsmith.inference.commands.prompts import Prompt
from draftsmith.inference.commands.terminal import Answer, console, legend, separate_text, shows_colours
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.engine.text import visible

# Prompt → the arguments of SpeculativeDecoder.generate beside it; with numbers of samples, those of so many texts.
Options = Callable[..., dict[str, Any]]
WARM_UP = 8  # tokens of a prompt, and steps, that run before a timed answer
SHOWN_LINES = 8  # of a prompt, above its answer
_HELP = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_HELP_RAW = "/exit or Ctrl-D leaves, Ctrl-C stops a text"


def answer(
    decoder: SpeculativeDecoder, prompt: list[int], options: Options, seeds: Sequence[int]
) -> tuple[list[Generation], float]:
    """:func:`stream` the answer to a prompt. With ``seeds``, decode so many texts of it together, and write them to
    stdout once all have ended; to stderr the seed of each and a line of statistics. Returns the results, and the
    seconds they took."""
    if not seeds:
        result, seconds = stream(decoder, prompt, options(prompt))
        return [result], seconds
    given = options(prompt, range(len(seeds)))
    began = time.perf_counter()
    results = decoder.generate([prompt] * len(seeds), **given)
    seconds = time.perf_counter() - began
    for number, (seed, result) in enumerate(zip(seeds, results, strict=True), 1):
        if number > 1:
            separate_text()
        console.print(f"sample {number}, seed {seed}, ended by {result.finish_reason}", style="dim", markup=False)
        text = Answer(decoder.target, given.get("stop_strings", ()))
        text.show(result)
        text.end()
        print_logprobs(decoder.target.tokenizer, result)
    console.print(statistics_of(results, seconds), style="dim", markup=False)
    return results, seconds


def stream(
    decoder: SpeculativeDecoder, prompt: list[int], options: dict[str, Any], stopped: Callable[[], bool] | None = None
) -> tuple[Generation, float]:
    """Decode one prompt by ``SpeculativeDecoder.generate``; write its text to stdout as it comes, without its stop
    token's or stop string, and a line of statistics to stderr. ``stopped`` is asked after each step; the answer ends
    there once it returns True. Returns the result, and the seconds it took."""
    text = Answer(decoder.target, options.get("stop_strings", ()))
    began = time.perf_counter()
    (result,) = decoder.generate(
        [prompt], on_tokens=lambda *_: not (stopped and stopped()), on_step=lambda _, new: text.show(new), **options
    )
    seconds = time.perf_counter() - began
    text.end()
    print_logprobs(decoder.target.tokenizer, result)
    reason = "Ctrl-C" if result.finish_reason == "cancelled" else result.finish_reason
    console.print(f"{statistics_of([result], seconds)}, ended by {reason}", style="dim", markup=False)
    return result, seconds


def print_logprobs(tokenizer: Any, result: Generation) -> None:
    """Write a line to stderr for each token of an answer that has log-probabilities: the token's, the token, and the
    likeliest ones with theirs."""
    if result.logprobs is None:
        return

    def shown(token: int) -> str:
        return json.dumps(visible(tokenizer.decode([token])), ensure_ascii=False)

    found = result.logprobs
    texts = [shown(token) for token in result.tokens]
    width = max(map(cell_len, texts), default=0)
    for text, own, ids, top in zip(texts, found.token_logprobs, found.top_ids, found.top_logprobs, strict=True):
        likeliest = "  ".join(f"{shown(token)} {value:.4f}" for token, value in zip(ids, top, strict=True))
        line = f"{own:10.4f}  {text}{' ' * (width - cell_len(text))}  {likeliest}"
        console.print(line.rstrip(), style="dim", markup=False, soft_wrap=True)


def statistics_of(results: Sequence[Generation], seconds: float) -> str:
    """Tokens, speed and mean accepted length of answers, in one line."""
    tokens = sum(len(result.tokens) for result in results)
    accepted = [length for result in results for length in result.accepted]
    tau = sum(accepted) / len(accepted) if accepted else 1.0
    return f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s, {len(accepted)} steps, τ {tau:.2f}"


def stream_prompts(
    decoder: SpeculativeDecoder,
    name: str,
    given: Sequence[Prompt],
    prompts: Sequence[list[int]],
    options: Options,
    seeds: Sequence[int] = (),
) -> None:
    """Stream the answers to prompts one after the other, each below its prompt, then what they took together.
    ``name``: of the drafter; ``prompts``: token ids of ``given``; ``seeds``: of the samples of each, if there are
    several."""
    # The first call allocates and tunes: for as many rows as a prompt has samples, and the longest prompt's length.
    short, rows, calls = prompts[0][:WARM_UP], range(max(1, len(seeds))), itertools.count(1)
    warm = options(short, rows)
    warm["max_new_tokens"] += max(map(len, prompts)) - len(short)
    decoder.generate([short] * len(rows), on_tokens=lambda *_: next(calls) < WARM_UP * len(rows), **warm)
    print_legend(decoder, name)
    answers, seconds = list[Generation](), 0.0
    for number, (asked, prompt) in enumerate(zip(given, prompts, strict=True)):
        if number:
            separate_text()
        content = asked.content if isinstance(asked.content, str) else asked.content[-1]["content"]
        lines = visible(content).splitlines()[-SHOWN_LINES:]
        said = "\n".join(f"> {line}" for line in lines)
        console.print(f"\n{said}", style="bold", markup=False)
        results, took = answer(decoder, prompt, options, seeds)
        answers, seconds = [*answers, *results], seconds + took
    if len(prompts) > 1:
        console.print(f"\n{len(answers)} answers: {statistics_of(answers, seconds)}", style="bold", markup=False)


def print_legend(decoder: SpeculativeDecoder, name: str) -> None:
    """Say what the colours mean, where there are any."""
    if shows_colours() and decoder.drafter.max_depth:
        console.print(legend(name, decoder.drafter.sources))


def read_line() -> str | None:
    """A line from stdin without its end; None at the end of the input. A ValueError if it is not UTF-8."""
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
        raise ValueError("this line was not sent: it is not UTF-8 text") from None
    return line


def interact(
    decoder: SpeculativeDecoder, name: str, options: Options, *, raw: bool, system: Sequence[Message] = ()
) -> None:
    """Answer lines from stdin until ``/exit``, the end of the input, or Ctrl-C between answers.

    With a chat template they are the user's messages of a conversation, which is rendered and prefilled anew each turn.
    Without one, or with ``raw``, each line is a separate text that the target continues. ``system``: the messages
    that a conversation begins with.
    """
    target = decoder.target
    tokenizer = target.tokenizer
    assert tokenizer is not None
    is_chat = bool(tokenizer.chat_template) and not raw
    chat: list[Message] = [*system]
    why = "--raw" if raw else "the target has no chat template"
    chat_start = f"A conversation with {target.name}; /help lists the commands"
    start = chat_start if is_chat else f"Each line is continued by itself ({why}); {_HELP_RAW}"
    console.print(start, style="dim", markup=False)
    print_legend(decoder, name)
    answers = 0
    while True:
        try:
            try:
                line = read_line()
            except KeyboardInterrupt:
                console.print()
                return
            if line is None or (asked := line.rstrip()) == "/exit":
                return
            if asked == "/help":
                console.print(_HELP if is_chat else _HELP_RAW, markup=False)
                continue
            if asked == "/reset" and is_chat:
                chat = [*system]
                console.print("a new conversation begins", markup=False)
                continue
            if not line:
                continue
            command = re.match(r"/[A-Za-z-]+(?=\s|$)", line)
            if is_chat and command:
                raise ValueError(
                    f"this line was not sent: {command[0]} is no command ({_HELP}); with a space before it, it would be"
                )
            messages: list[Message] = [*chat, {"role": "user", "content": line}]
            prompt = encode_prompt(messages if is_chat else line, tokenizer)
            if len(prompt) >= target.context:
                begun = len(chat) > len(system)
                what = f"{'with it the conversation' if begun else 'it'} has {len(prompt)} tokens"
                advice = "/reset begins a new conversation" if begun else "shorten it"
                raise ValueError(
                    f"this line was not sent: {what}, and the target's context of {target.context} has to hold the "
                    f"answer, too; {advice}"
                )
            if not prompt:
                raise ValueError("this line has no token; type another one")
        except ValueError as error:
            console.print(str(error), markup=False, soft_wrap=True)
            continue
        if answers:
            separate_text()
        answers += 1
        with interruptible(saves=False) as stopped:
            result, _ = stream(decoder, prompt, options(prompt), stopped)
        if is_chat:
            chat = [*messages, {"role": "assistant", "content": result.text}]
