"""The stored rows of a source, and a count of those that cannot be used, by reason.

JSON is read here, one line or array element at a time, so that a malformed row affects no other; parquet files and the
Hub's data sets are read by ``datasets``.
"""

import codecs
import glob
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from draftsmith.common.command import first_line
from draftsmith.common.files import SLICE, file_sha256, parse_json, read_text
from draftsmith.data import sources

if TYPE_CHECKING:
    from draftsmith.common.data_sections import Source

T = TypeVar("T")
MOST_REASONS = 20  # counted separately; a template may give every row its own reason
_SPACE = re.compile(r"[ \t\r\n]*")


class UnusableRow(ValueError):
    """A row that cannot be used. The message is the reason, without values of the row, so that equal reasons count
    together."""


@dataclass
class Skipped:
    """Rows that cannot be used.

    rows: number of rows read, including these.
    reasons: reason → number of rows, and the place of the first (``row 7``, ``line 3 of a.jsonl``).
    answers: number of the assistant's messages in the other rows.
    notes: what is to be said of some of these answers → how many they are, and the place of the first.
    unused: field, or role of messages, without an effect → number of rows that have it, and the place of the first.
    """

    rows: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)
    answers: int = 0
    notes: dict[str, tuple[int, str]] = field(default_factory=dict)
    unused: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of skipped rows."""
        return sum(count for count, _ in self.reasons.values())

    def add(self, reason: str, place: str, count: int = 1) -> None:
        """Count ``count`` more rows, the first of them at ``place``."""
        _count(self.reasons, reason, place, count, "other reasons")

    def note(self, place: str, answers: int, notes: Iterable[str], unused: Iterable[str]) -> None:
        """Count a row that is used, in parts."""
        self.answers += answers
        for note in notes:
            _count(self.notes, note, place)
        for name in sorted(unused):
            _count(self.unused, name, place, rest="others")

    def merge(self, later: "Skipped") -> None:
        """Add the counts of rows that come after these."""
        self.rows, self.answers = self.rows + later.rows, self.answers + later.answers
        pairs = [(self.reasons, later.reasons, "other reasons"), (self.notes, later.notes, "others")]
        for counts, more, rest in [*pairs, (self.unused, later.unused, "others")]:
            for what, (count, place) in more.items():
                _count(counts, what, place, count, rest)

    def table(self) -> list[tuple[int, str, str]]:
        """Count, reason and place of the first row, the most frequent reason first."""
        lines = [(count, reason, place) for reason, (count, place) in self.reasons.items()]
        return sorted(lines, key=lambda line: -line[0])

    def __str__(self) -> str:
        reasons = "; ".join(f"{count:,} × {reason} (first: {place})" for count, reason, place in self.table())
        return f"{self.count:,} of {self.rows:,} rows skipped: {reasons}"

    def lines(self) -> list[str]:
        """What is to be said of the rows: which were skipped, and what of the others is not used."""
        found = [str(self)] if self.count else []
        found += [f"{n:,} of {self.answers:,} {note} (first: {place})" for note, (n, place) in self.notes.items()]
        unused = ((name, f"{n:,} row{'s' * (n > 1)}", place) for name, (n, place) in self.unused.items())
        names = ", ".join(f"{name} ({count}, first: {place})" for name, count, place in unused)
        return [*found, f"without an effect: {names}"] if names else found

    def check(self, source: str, max_share: float, rows: int = 0) -> None:
        """Refuse a source with too many unusable rows.
        ``max_share``: the share of rows that may be skipped; one row always may be, unless this is 0.
        ``rows``: number of rows that the share refers to, if the source is known to have more than were read.
        Raises ValueError: more rows were skipped; the message has the reasons."""
        if self.count > max(max_share * max(rows, self.rows), 1 if max_share else 0):
            raise ValueError(
                f"data source '{source}': {self}. That is more than data.max_skipped={max_share:g} of them; correct "
                "the data, or raise data.max_skipped"
            )


def _count(counts: dict[str, tuple[int, str]], what: str, place: str, count: int = 1, rest: str = "others") -> None:
    if what not in counts and len(counts) >= MOST_REASONS:
        what = rest
    before, first = counts.get(what, (0, place))
    counts[what] = before + count, first


def usable(
    placed_rows: Iterable[tuple[str, Any]], read: Callable[[Mapping[str, Any]], T], skipped: Skipped
) -> Iterator[tuple[str, T]]:
    """Place and result of ``read`` for each row; a row on which it raises :class:`UnusableRow` is counted and
    skipped."""
    for place, row in placed_rows:
        skipped.rows += 1
        try:
            if isinstance(row, UnusableRow):
                raise row
            if not isinstance(row, Mapping):
                raise UnusableRow("no mapping of fields")
            result = read(row)
        except UnusableRow as error:
            skipped.add(str(error), place)
            continue
        yield place, result


def rows(source: "Source", skip: int = 0) -> tuple[Iterator[tuple[str, Any]], str]:
    """The rows of a source, each with its place, and a text that changes when they do. Of a streamed source they begin
    after the first ``skip`` ones, and the text changes only with the source's description. A row that cannot be parsed
    is an :class:`UnusableRow`.
    Raises FileNotFoundError, ValueError: there is no such source, or it cannot be read."""
    if source.installed:
        split = cast(sources.Split, source.split)
        known = f"{source.form} {sources.fingerprint(source.source, split)}"
        if source.form == "chat":
            samples: Iterable[Any] = ({"messages": chat} for chat in sources.dialogues(source.source, split))
        else:
            samples = ({"text": document.text} for document in sources.documents(source.source, split))
        return _numbered(samples), known
    files = _files(source) if source.is_file else []
    known = _known(source, files)
    if files and files[0].suffix != ".parquet":
        read = _texts if files[0].suffix == ".txt" else _stored
        stored_rows = itertools.islice(read(source, files), *_bounds(source, lambda: read(source, files), skip))
        return ((place, _parsed(row)) for place, row in stored_rows), known
    import datasets  # takes a second, and only parquet files and the Hub need it

    datasets.disable_progress_bars()
    try:
        if files:
            stored = datasets.load_dataset(
                "parquet", data_files=list(map(str, files)), split=source.split, streaming=source.streaming
            )
        else:
            stored = datasets.load_dataset(
                source.source, source.subset, data_files=source.files, split=source.split, streaming=source.streaming
            )
            known = str(getattr(stored, "_fingerprint", "streamed"))
        if source.streaming:
            stored = stored.skip(skip)
        return _numbered(_guarded(source, stored), skip), known
    except Exception as error:  # datasets raises many unrelated types
        raise _unreadable(source, error) from None


def _bounds(source: "Source", stored: Callable[[], Iterator[Any]], skip: int) -> tuple[int, int | None]:
    """The numbers of the first row and of the one after the last, of the part that a file's split names, as
    ``datasets`` rounds them."""
    found = SLICE.fullmatch(source.split)
    assert found is not None
    if not any(found.groups()):
        return skip, None
    count = sum(1 for _ in stored())
    ends = (round(int(end[:-1]) * count / 100) if end.endswith("%") else int(end) for end in found.groups("") if end)
    numbers = [next(ends) if end else None for end in found.groups()]
    return slice(*numbers).indices(count)[:2]


def _numbered(unplaced: Iterable[Any], before: int = 0) -> Iterator[tuple[str, Any]]:
    """Rows with their number as place, counted from ``before`` + 1."""
    for number, row in enumerate(unplaced, before + 1):
        yield f"row {number}", row


# ---- files


def _files(source: "Source") -> list[Path]:
    given = Path(source.source)
    files = [given] if os.path.isfile(given) else sorted(map(Path, glob.glob(source.source)))
    if not files:
        raise FileNotFoundError(f"data source '{source.source}': there is no such file")
    return files


@contextmanager
def _reading(source: "Source", path: Path) -> Iterator[None]:
    """Turn errors of reading a file into one line."""
    try:
        yield
    except OSError as error:  # a folder, a link to itself, no permission, a broken disk
        raise ValueError(f"data source '{source.source}': {path} cannot be read ({error.strerror or error})") from None


def _known(source: "Source", files: list[Path]) -> str:
    """A hash of the files' contents; of streamed ones, of their sizes."""
    digest = hashlib.sha256()
    for path in files:
        with _reading(source, path):
            size = f"{path.stat().st_size} ".encode()
            digest.update(size if source.streaming else bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def _texts(source: "Source", files: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in files:
        with _reading(source, path):
            yield f"file {path.name}", {"text": read_text(path, "text file in UTF-8")}


def _stored(source: "Source", files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Unparsed lines of .jsonl files, and elements of .json arrays (a .json file may hold lines as well)."""
    for path in files:
        of = f" of {path.name}" if len(files) > 1 else ""
        with _reading(source, path), path.open("rb") as file:
            head = file.read(4096)
            if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ValueError(f"data source '{source.source}': {path} is UTF-16 text; save it as UTF-8")
            if path.suffix == ".json" and head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                for number, row in enumerate(_elements(read_text(path, "JSON file in UTF-8"), path), 1):
                    yield f"row {number}{of}", row
                continue
            file.seek(0)
            for number, line in enumerate(file, 1):
                content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                if content:
                    yield f"line {number}{of}", content


def _elements(text: str, path: Path) -> Iterator[Any]:
    """Parse a JSON array element by element."""

    def after_space(at: int) -> int:
        space = _SPACE.match(text, at)
        assert space is not None
        return space.end()

    decoder, number = json.JSONDecoder(), 0
    at = after_space(text.index("[") + 1)
    more = text[at : at + 1] != "]"
    while more:
        number += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except RecursionError:
            raise ValueError(f"{path}: row {number}: JSON nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: not valid JSON ({error})") from None
        try:  # parse again if half of a surrogate pair is possible
            yield parse_json(text[at:end], "") if "\\u" in text[at:end] else value
        except ValueError as error:
            yield _reason(error)
        at = after_space(end)
        more = text[at : at + 1] == ","
        if more:
            at = after_space(at + 1)
        elif text[at : at + 1] != "]":
            raise ValueError(f"{path}: not valid JSON after row {number}: ',' or ']' is needed (char {at})")
    if after_space(at + 1) < len(text):
        raise ValueError(f"{path}: not valid JSON: there is text after the array (char {at + 1})")


def _parsed(row: Any) -> Any:
    """The JSON value of a line; rows that are parsed already are returned as they are."""
    if not isinstance(row, bytes):
        return row
    try:
        return parse_json(row.decode(), "")
    except UnicodeDecodeError:
        return UnusableRow("not UTF-8 text")
    except ValueError as error:
        return _reason(error)


def _reason(error: ValueError) -> UnusableRow:
    """A parser's error without the place inside the row."""
    return UnusableRow(str(error).removeprefix(": ").partition(" (")[0])


# ---- the Hub


def _unreadable(source: "Source", error: Exception) -> ValueError:
    """An error of ``datasets`` as one line, with advice for common causes."""
    message = first_line(error)
    kind = f"{type(error).__name__} {message}".replace(source.source, "").lower()  # a name may hold any of these words
    advice = ""
    if source.is_file:
        pass
    elif any(word in kind for word in ("couldn't reach", "connection", "offline", "timeout")):
        advice = "; check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or name a downloaded file instead"
    elif any(word in kind for word in ("gated", "401", "403")):
        advice = "; accept its terms on its page on the Hub, then log in with: hf auth login"
    elif "datasetnotfound" in kind:
        advice = "; check its name (for a private one: hf auth login)"
    elif source.files is not None and "split" not in kind:
        advice = f"; check files={source.files}"
    return ValueError(f"data source '{source.label}': cannot be read ({message}){advice}")


def _guarded(source: "Source", stream: Iterable[Any]) -> Iterator[Any]:
    """The rows of a stream; its errors, which may come long after it was opened, are one line."""
    try:
        yield from stream
    except Exception as error:
        raise _unreadable(source, error) from None
