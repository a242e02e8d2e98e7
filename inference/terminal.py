"""Output of the decoding commands: texts to stdout, byte for byte; everything else to stderr.

Off a terminal nothing is wrapped or coloured.
"""

import os
import sys

from rich.console import Console

from draftsmith.inference.text import visible

_WIDE = 10_000  # columns: nothing is wrapped


def make_console(*, stderr: bool) -> Console:
    """A console without highlighted numbers and emoji, and without line wrapping off a terminal."""
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


console = make_console(stderr=True)


def write_text(text: str, *, drafted: bool = False) -> None:
    """Write a piece of a decoded text to stdout, in UTF-8. On a terminal its encoding is used, control characters are
    made visible, and drafted text is green."""
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
    """Write a line feed between two texts; on a terminal :func:`end_text` has done so."""
    if sys.stdout is not None and not sys.stdout.isatty():
        write_text("\n")


def end_text(text: str) -> None:
    """End the line of a whole text: on the terminal, else on stderr, which may go to the same file; stdout gets the
    text alone."""
    if sys.stdout is None or text.endswith("\n"):
        return
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    if stream is not None:
        stream.write("\n")
        stream.flush()
