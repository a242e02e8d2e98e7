"""One answer streamed to stdout, and --interactive: a conversation, or texts that the target continues."""

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from draftsmith.data.chat import encode_prompt
from draftsmith.data.formats import Message
from draftsmith.inference.engine import Generation, SpeculativeDecoder
from draftsmith.inference.terminal import console, end_text, separate_text, write_text
from draftsmith.inference.text import TextStream, answer_text

Options = Callable[[list[int]], dict[str, Any]]  # prompt → the arguments of SpeculativeDecoder.generate beside it
_COLOURS = "green text was drafted and accepted, the rest is the target's own"
_HELP = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_HELP_RAW = "/exit or Ctrl-D leaves, Ctrl-C stops a text"


class _StoppedError(Exception):
    """The user has pressed Ctrl-C during an answer."""


@contextlib.contextmanager
def _first_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only makes the yielded function return True; a second one interrupts at once."""
    pressed = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def stream(
    decoder: SpeculativeDecoder, prompt: list[int], options: dict[str, Any], stopped: Callable[[], bool] | None = None
) -> Generation:
    """Decode one prompt; write its text to stdout as it comes and a line of statistics to stderr.

    Args:
        options: of ``SpeculativeDecoder.generate``.
        stopped: asked after each step; the answer ends there once it returns True.
    """
    text, steps, written = TextStream(decoder.target.tokenizer), list[list[int]](), ""

    def write(piece: str, drafted: bool) -> None:
        nonlocal written
        write_text(piece, drafted=drafted)
        written = piece or written

    def show(_: int, new: list[int]) -> None:
        steps.append(new)
        for place, token in enumerate(new, 1):
            write(text.add([token]), place < len(new))  # the last token of a step is the target's own
        if stopped and stopped():
            raise _StoppedError

    began = time.perf_counter()
    try:
        (result,) = decoder.generate([prompt], on_tokens=show, **options)
    except _StoppedError:
        result = Generation([token for new in steps for token in new], [len(new) for new in steps[1:]], "Ctrl-C")
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
        raise ValueError("this line was not sent: it is not UTF-8 text") from None
    return line


def interact(decoder: SpeculativeDecoder, options: Options, *, raw: bool) -> None:
    """Answer lines from stdin until ``/exit`` or the end of the input.

    With a chat template they are the user's messages of a conversation, which is rendered and prefilled anew each turn;
    without one, or with ``raw``, each line is a text of its own that the target continues.
    """
    target = decoder.target
    tokenizer = target.tokenizer
    assert tokenizer is not None
    is_chat = bool(tokenizer.chat_template) and not raw
    chat: list[Message] = []
    if is_chat:
        start = f"A conversation with {target.name}: {_COLOURS}; /help lists the commands"
    else:
        why = "--raw" if raw else "the target has no chat template"
        start = f"Each line is continued by itself ({why}): {_COLOURS}; {_HELP_RAW}"
    console.print(start, style="dim", markup=False)
    answers = 0
    while True:
        try:
            line = read_line()
            if line is None or line == "/exit":
                return
            if line == "/help":
                console.print(_HELP if is_chat else _HELP_RAW, markup=False)
                continue
            if line == "/reset" and is_chat:
                chat = []
                console.print("a new conversation begins", markup=False)
                continue
            if not line:
                continue
            messages: list[Message] = [*chat, {"role": "user", "content": line}]
            prompt = encode_prompt(messages if is_chat else line, tokenizer)
            if len(prompt) >= target.context:
                what = f"{'with it the conversation' if chat else 'it'} has {len(prompt)} tokens"
                advice = "/reset begins a new conversation" if chat else "shorten it"
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
        with _first_interrupt() as stopped:
            result = stream(decoder, prompt, options(prompt), stopped)
        if is_chat:
            chat = [*messages, {"role": "assistant", "content": answer_text(target, result.tokens)}]
