"""Output of the decoding commands: texts to stdout, byte for byte; everything else to stderr.

On a terminal lines are broken at spaces; off one nothing is wrapped or coloured.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from draftsmith.inference.engine.text import TextStream, visible

if TYPE_CHECKING:
    from draftsmith.inference.engine.request import Generation
    from draftsmith.models.target import Target

_WIDE = 10_000  # columns: nothing is wrapped
_LONGEST = 40  # columns of a word that is kept together
# Colours of drafted text, by the number of its source: name and escape code.
COLOURS = (("green", 32), ("cyan", 36), ("magenta", 35), ("yellow", 33))


def make_console(*, stderr: bool) -> Console:
    """A console without highlighted numbers and emoji, and without line wrapping off a terminal."""
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


console = make_console(stderr=True)


def shows_colours() -> bool:
    """Whether stdout is a terminal on which :func:`write_text` colours drafted text."""
    out = sys.stdout
    return out is not None and out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def legend(drafter: str, sources: Sequence[str]) -> str:
    """What the colours of :func:`write_text` mean, in rich's markup: the drafter's ``sources`` in order, or its name if
    it names none."""
    names = [Path(name).name for name in sources or [drafter]]
    said = [f"[{COLOURS[n % len(COLOURS)][0]}]drafted by {escape(name)}[/]" for n, name in enumerate(names)]
    return f"{', '.join(said)}, the rest is the target's own"


def write_text(text: str, *, drafted: int = 0) -> None:
    """Write a piece of a decoded text to stdout, in UTF-8. On a terminal its encoding is used, control characters are
    made visible, and drafted text has the colour of the lowest of its sources, whose bits are ``drafted`` (0: none)."""
    out = sys.stdout
    if out is None or not text:  # stdout was closed
        return
    if out.isatty() and _columns():
        _line.add(visible(text), drafted)
    elif out.isatty():
        _line.write(visible(text), drafted)
    elif hasattr(out, "buffer"):
        out.flush()
        out.buffer.write(text.encode("utf-8", "replace"))
    else:  # a stream of text, in a test
        out.write(text)
    out.flush()


class _Line:
    """The last line on the terminal, which is broken at spaces: a word is written when it has ended, with a line feed
    before it if the line has no room for it. Words of more than :data:`_LONGEST` columns, as in scripts without spaces,
    are broken by the terminal."""

    def __init__(self) -> None:
        self.column, self.word = 0, list[tuple[str, int]]()  # the word's pieces, with what drafted them
        self.begun = False  # part of the word has been written: it is too long to be kept together

    def add(self, text: str, drafted: int) -> None:
        for part in re.findall(r"\s|\S+", text):
            if not part.isspace():
                self.word.append((part, drafted))
                if self.begun or self.width > _LONGEST:
                    self.flush()
                    self.begun = True
                continue
            self.flush()
            self.begun = False
            if 0 < _columns() <= self.column:
                part = "\n"
            self.write(part, drafted)
            self.column = 0 if part == "\n" else self.column + 1

    @property
    def width(self) -> int:
        """Columns of the unfinished word."""
        return sum(cell_len(part) for part, _ in self.word)

    def flush(self) -> None:
        """Write the unfinished word."""
        columns, width = _columns(), self.width
        if self.column and not self.begun and width <= _LONGEST and self.column + width > columns > 0:
            self.write("\n", 0)
            self.column = 0
        for part, drafted in self.word:
            self.write(part, drafted)
        self.column, self.word = self.column + width, []
        if columns and self.column > columns:  # the terminal has broken the line
            self.column %= columns

    def write(self, text: str, drafted: int) -> None:
        if drafted and shows_colours():
            lowest = (drafted & -drafted).bit_length() - 1
            text = f"\x1b[{COLOURS[lowest % len(COLOURS)][1]}m{text}\x1b[0m"
        sys.stdout.write(text)


_line = _Line()


def _columns() -> int:
    """Of stdout's terminal; 0 if it does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def separate_text() -> None:
    """Write a line feed between two texts; on a terminal :func:`end_text` has done so."""
    if sys.stdout is not None and not sys.stdout.isatty():
        write_text("\n")


def end_text(text: str) -> None:
    """End the line of a whole text: on the terminal, else on stderr, which may go to the same file. stdout gets only
    the text."""
    if sys.stdout is None:
        return
    if sys.stdout.isatty():
        _line.flush()
        _line.column = 0
        sys.stdout.flush()
    if text.endswith("\n"):
        return
    stream = sys.stdout if sys.stdout.isatty() else sys.stderr
    if stream is not None:
        stream.write("\n")
        stream.flush()


class Answer:
    """An answer that is written to stdout as it grows, without its stop token's text or stop string."""

    def __init__(self, target: "Target", stop_strings: Sequence[str] = ()) -> None:
        self.text = TextStream(target.tokenizer, stop_strings, target.stop_ids)
        self.shown, self.last = 0, ""

    def _write(self, piece: str, drafted: int) -> None:
        write_text(piece, drafted=drafted)
        self.last = piece or self.last

    def show(self, result: "Generation") -> None:
        """Write what is new."""
        for token, drafted_by in zip(result.tokens[self.shown :], result.drafted_by[self.shown :], strict=False):
            self._write(self.text.add([token]), drafted_by)
        self.shown = len(result.tokens)

    def end(self) -> None:
        self._write(self.text.end(), 0)
        end_text(self.last)
