"""What the decoding commands print: texts to stdout, byte for byte; everything else to stderr.

Off a terminal nothing is wrapped or coloured.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from draftsmith.inference.text import visible

SAY_EVERY = 10.0  # seconds between two lines of progress without a terminal
_WIDE = 10_000  # columns: nothing is wrapped


def make_console(*, stderr: bool) -> Console:
    """A console without markup in numbers and without emoji; off a terminal as wide as any line."""
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


console = make_console(stderr=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress bar with the time left; without a terminal a line every :data:`SAY_EVERY` seconds. The yielded function
    takes how many of ``total`` are done."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("eta"),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task(what, total=total)
    began = said = time.monotonic()

    def done(count: int) -> None:
        nonlocal said
        bar.update(task, completed=count)
        now = time.monotonic()
        if bar.disable and count and now - said > SAY_EVERY:
            left = (now - began) / count * (total - count)
            console.print(f"  {what} {count}/{total}  {left:.0f} s left", markup=False)
            said = now

    with bar:
        yield done


def write_text(text: str, *, drafted: bool = False) -> None:
    """Write a piece of a decoded text to stdout: as it is, in UTF-8; on a terminal with its control characters made
    visible, in the terminal's encoding, and green if it was drafted and accepted."""
    out = sys.stdout
    if out is None or not text:  # stdout was closed
        return
    if out.isatty():
        colour = drafted and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        text = visible(text)
        out.write(f"\x1b[32m{text}\x1b[0m" if colour else text)
    elif hasattr(out, "buffer"):
        out.flush()
        out.buffer.write(text.encode("utf-8", "replace"))
    else:  # a stream of text, in a test
        out.write(text)
    out.flush()


def separate_text() -> None:
    """A line feed between two texts, where no terminal has ended the line of the first."""
    if sys.stdout is not None and not sys.stdout.isatty():
        write_text("\n")


def end_text(text: str) -> None:
    """End the line of a whole text, by the terminal if one shows it, else on stderr, which may go to the same file;
    the text itself stays as it is."""
    if sys.stdout is None or text.endswith("\n"):
        return
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    if stream is not None:
        stream.write("\n")
        stream.flush()
