"""Rows of a source, as they are stored, and an account of those that cannot be used.

JSON is read here, a line or an array's element at a time, so that a malformed row costs only itself; parquet files and
the Hub's data sets are read by ``datasets``.
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
from typing import Any, TypeVar, cast

from draftsmith.common.command import first_line
from draftsmith.common.files import parse_json, read_text
from draftsmith.common.sections import Source
from draftsmith.data import sources

T = TypeVar("T")
MOST_REASONS = 20  # told apart; a template may give every row its own
_SPACE = re.compile(r"[ \t\r\n]*")


class UnusableRow(ValueError):
    """A row that cannot be used. The message is the reason, without values of the row, so that equal ones add up."""


@dataclass
class Skipped:
    """Rows that cannot be used.

    rows: how many rows were read, these among them.
    reasons: reason → how many rows, and the place of the first (``row 7``, ``line 3 of a.jsonl``).
    """

    rows: int = 0
    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many rows were skipped."""
        return sum(count for count, _ in self.reasons.values())

    def add(self, reason: str, place: str, count: int = 1) -> None:
        """Note that ``count`` rows, the first of them at ``place``, cannot be used."""
        if reason not in self.reasons and len(self.reasons) >= MOST_REASONS:
            reason = "other reasons"
        before, first = self.reasons.get(reason, (0, place))
        self.reasons[reason] = before + count, first

    def table(self) -> list[tuple[int, str, str]]:
        """Count, reason and place of the first row, the most frequent reason first."""
        found = [(count, reason, place) for reason, (count, place) in self.reasons.items()]
        return sorted(found, key=lambda line: -line[0])

    def __str__(self) -> str:
        reasons = "; ".join(f"{count:,} × {reason} (first: {place})" for count, reason, place in self.table())
        return f"{self.count:,} of {self.rows:,} rows skipped: {reasons}"

    def check(self, source: str, most: float, rows: int = 0) -> None:
        """Refuse a source that has too many of them.

        Args:
            most: the share of rows that may be skipped; one row always may, unless this is 0.
            rows: what the share is of, if more rows than were read are known to be there.

        Raises:
            ValueError: more rows were skipped; with the reasons.
        """
        if self.count > max(most * max(rows, self.rows), 1 if most else 0):
            raise ValueError(
                f"data source '{source}': {self}. That is more than data.max_skipped={most:g} of them; mend the data, "
                "or raise data.max_skipped"
            )


def usable(
    found: Iterable[tuple[str, Any]], read: Callable[[Mapping[str, Any]], T], skipped: Skipped
) -> Iterator[tuple[str, T]]:
    """Place and result of ``read`` for each row; a row on which it raises :class:`UnusableRow` is noted and skipped."""
    for place, row in found:
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


def rows(source: Source, skip: int = 0) -> tuple[Iterator[tuple[str, Any]], str]:
    """A source's rows, each with its place (of a streamed source those behind the first ``skip``), and a text that
    changes when they do (of a streamed source, only when what is asked for does). A row that cannot even be parsed
    is an :class:`UnusableRow`.

    Raises:
        FileNotFoundError, ValueError: there is no such source, or it cannot be read.
    """
    if source.installed:
        split = cast(sources.Split, source.split)
        known = f"{source.form} {sources.fingerprint([(source.source, split)])}"
        if source.form == "chat":
            found: Iterable[Any] = ({"messages": chat} for chat in sources.dialogues(source.source, split))
        else:
            found = ({"text": document.text} for document in sources.documents(source.source, split))
        return _numbered(found), known
    files = _files(source) if source.is_file else []
    known = _known(source, files)
    if files and files[0].suffix != ".parquet":
        read = _texts if files[0].suffix == ".txt" else _stored
        return ((place, _parsed(row)) for place, row in itertools.islice(read(source, files), skip, None)), known
    import datasets  # takes a second, and only parquet files and the Hub need it

    datasets.disable_progress_bars()
    try:
        if files:
            stored = datasets.load_dataset(
                "parquet", data_files=list(map(str, files)), split="train", streaming=source.streaming
            )
        else:
            stored = datasets.load_dataset(
                source.source, source.subset, data_files=source.files, split=source.split, streaming=source.streaming
            )
            known = str(getattr(stored, "_fingerprint", "streamed"))
        if source.streaming:
            stored = stored.skip(skip)
        return _numbered(_guarded(source, stored), skip), known
    except Exception as error:  # datasets raises a dozen unrelated types
        raise _unreadable(source, error) from None


def _numbered(found: Iterable[Any], before: int = 0) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(found, before + 1):
        yield f"row {number}", row


# ---- files


def _files(source: Source) -> list[Path]:
    given = Path(source.source)
    files = [given] if os.path.isfile(given) else sorted(map(Path, glob.glob(source.source)))
    if not files:
        raise FileNotFoundError(f"data source '{source.source}': there is no such file")
    return files


@contextmanager
def _reading(source: Source, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # a folder, a link to itself, no permission, a broken disk
        raise ValueError(f"data source '{source.source}': {path} cannot be read ({error.strerror or error})") from None


def _known(source: Source, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with _reading(source, path):
            if source.streaming:
                digest.update(f"{path.stat().st_size} ".encode())
            else:
                with path.open("rb") as file:
                    digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def _texts(source: Source, files: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in files:
        with _reading(source, path):
            yield f"file {path.name}", {"text": read_text(path, "text file in UTF-8")}


def _stored(source: Source, files: list[Path]) -> Iterator[tuple[str, Any]]:
    """Lines of .jsonl files, not parsed yet, and elements of .json arrays (a .json file may hold lines as well)."""
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
    """Elements of a JSON array, one after the other.

    Raises:
        ValueError: something in it is no JSON, so that nobody knows where the next element begins.
    """

    def behind_space(at: int) -> int:
        found = _SPACE.match(text, at)
        assert found is not None
        return found.end()

    decoder, number = json.JSONDecoder(), 0
    at = behind_space(text.index("[") + 1)
    more = text[at : at + 1] != "]"
    while more:
        number += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except RecursionError:
            raise ValueError(f"{path}: row {number}: JSON nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"{path}: row {number}: not valid JSON ({error})") from None
        try:  # once more, where half of a surrogate pair may be
            yield parse_json(text[at:end], "") if "\\u" in text[at:end] else value
        except ValueError as error:
            yield _reason(error)
        at = behind_space(end)
        more = text[at : at + 1] == ","
        if more:
            at = behind_space(at + 1)
        elif text[at : at + 1] != "]":
            raise ValueError(f"{path}: not valid JSON behind row {number}: ',' or ']' is needed (char {at})")
    if behind_space(at + 1) < len(text):
        raise ValueError(f"{path}: not valid JSON: there is something behind the array (char {at + 1})")


def _parsed(row: Any) -> Any:
    """A line as what it says; whatever is parsed already stays."""
    if not isinstance(row, bytes):
        return row
    try:
        return parse_json(row.decode(), "")
    except UnicodeDecodeError:
        return UnusableRow("not UTF-8 text")
    except ValueError as error:
        return _reason(error)


def _reason(error: ValueError) -> UnusableRow:
    return UnusableRow(str(error).removeprefix(": ").partition(" (")[0])  # less the place within the row


# ---- the Hub


def _unreadable(source: Source, error: Exception) -> ValueError:
    said = first_line(error)
    kind = f"{type(error).__name__} {said}".replace(source.source, "").lower()  # a name may hold any of these words
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
    return ValueError(f"data source '{source.source}' (split {source.split}): cannot be read ({said}){advice}")


def _guarded(source: Source, found: Iterable[Any]) -> Iterator[Any]:
    """A stream may fail long after it was opened."""
    try:
        yield from found
    except Exception as error:
        raise _unreadable(source, error) from None
