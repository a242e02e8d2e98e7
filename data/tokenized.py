"""A recipe's sources as token ids with masks: read, encoded, kept on disk by what they were made of."""

import glob
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from draftsmith.data import sources
from draftsmith.data.chat import encode, read_row
from draftsmith.data.packing import Sample, Tokenized
from draftsmith.train.recipe import Data, Source

_VERSION = "2"  # of the encoding; a change of data/chat.py's results has to change it
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def cache_folder() -> Path:
    """Where tokenized data is kept: ``$DRAFTSMITH_CACHE``, else ``~/.cache/draftsmith``."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")


def read_template(template: str | None) -> str | None:
    """A recipe's ``data.template``: the text itself, or what the file of that name (or inside this project) holds.

    Raises:
        FileNotFoundError: it looks like a file and is none.
    """
    if template is None or "{%" in template or "{{" in template:
        return template
    for path in (Path(template), Path(__file__).resolve().parent.parent / template):  # ours, wherever one stands
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(f"data.template: '{template}' is neither a Jinja template nor a file")


def rows(source: Source, skip: int = 0) -> tuple[Iterator[dict[str, Any]], str]:
    """A source's rows behind the first ``skip`` ones, and a text that changes when they do (of a streamed source, only
    when what is asked for does).

    Raises:
        FileNotFoundError, ValueError: there is no such source, or it cannot be read.
    """
    if source.installed:
        split = cast(sources.Split, source.split)
        known = f"{source.form} {sources.fingerprint([(source.source, split)])}"
        if source.form == "chat":
            return ({"messages": chat} for chat in sources.dialogues(source.source, split)), known
        return ({"text": document.text} for document in sources.documents(source.source, split)), known
    if source.is_file:
        given = Path(source.source)
        files = [given] if given.is_file() else sorted(map(Path, glob.glob(source.source)))
        if not files:
            raise FileNotFoundError(f"data source '{source.source}': there is no such file")
        if source.streaming:
            known = " ".join(str(path.stat().st_size) for path in files)
        else:
            known = hashlib.sha256(b"".join(hashlib.sha256(p.read_bytes()).digest() for p in files)).hexdigest()
        if files[0].suffix == ".txt":
            return ({"text": path.read_text(encoding="utf-8")} for path in files), known
    import datasets  # takes a second, and only files and the Hub need it

    datasets.disable_progress_bars()
    try:
        if source.is_file:
            builder, split = _BUILDERS[Path(source.source).suffix], "train"
            name: dict[str, Any] = {"path": builder, "data_files": list(map(str, files))}
        else:
            name, split = {"path": source.source, "name": source.subset}, source.split
        found = datasets.load_dataset(**name, split=split, streaming=source.streaming)
        if not source.is_file:
            known = str(getattr(found, "_fingerprint", "streamed"))
        return _guarded(source, found.skip(skip) if source.streaming else found), known
    except Exception as error:
        raise _unreadable(source, error) from None


def _unreadable(source: Source, error: Exception) -> ValueError:  # datasets raises a dozen unrelated types
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return ValueError(f"data source '{source.source}' (split {source.split}): cannot be read ({reason})")


def _guarded(source: Source, found: Any) -> Iterator[dict[str, Any]]:
    """A stream may fail long after it was opened."""
    try:
        yield from found
    except Exception as error:
        raise _unreadable(source, error) from None


def tokenized(source: Source, data: Data, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """A source's samples. Made once, by whichever process comes first, and kept by the hash of everything that enters
    them; other processes wait as long as it takes.

    Raises:
        FileNotFoundError, ValueError: the source cannot be read, a row is malformed, or too many samples have no label.
    """
    template = read_template(data.template)
    found, known = rows(source)
    found = itertools.islice(found, source.limit)
    if source.streaming:  # nobody knows what a stream holds before it was read
        return check(Tokenized.of(encoded(source, found, data.max_length, tokenizer, template)), source, data)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    made_of = {
        "version": _VERSION,
        "source": source.model_dump(exclude={"weight", "answers"}),
        "rows": known,
        "tokenizer": backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        "template": template or tokenizer.chat_template,
        "max_length": data.max_length,
    }
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.safetensors"
    with FileLock(folder / f"{key}.lock"):  # held by the one that makes it; a killed one's lock is free again
        if path.exists():
            try:
                return check(Tokenized(**load_file(path)), source, data)
            except (SafetensorError, TypeError):
                path.unlink()  # damaged: made anew
        made = Tokenized.of(encoded(source, found, data.max_length, tokenizer, template))
        temporary = path.with_name(path.name + ".tmp")
        save_file({"tokens": made.tokens, "supervised": made.supervised, "starts": made.starts}, temporary)
        os.replace(temporary, path)
    return check(made, source, data)


def encoded(
    source: Source, found: Iterable[dict[str, Any]], max_length: int, tokenizer: PreTrainedTokenizerBase,
    template: str | None, first: int = 0,
) -> Iterator[Sample]:  # fmt: skip
    """Rows as samples; ``first`` is the number of the source's rows before them.

    Raises:
        ValueError: a row is malformed; its number is said.
    """
    for number, row in enumerate(found, first + 1):
        try:
            yield encode(read_row(row), tokenizer, template, max_length, row.get("finish_reason") or ())
        except ValueError as error:
            raise ValueError(f"data source '{source.source}', row {number}: {error}") from None


def check(samples: Tokenized, source: Source, data: Data) -> Tokenized:
    """Refuse a source too many of whose samples teach nothing; drop none silently."""
    if len(samples) == 0:
        raise ValueError(f"data source '{source.source}' (split {source.split}) is empty")
    without = samples.without_label()
    if without > data.max_unsupervised * len(samples):
        raise ValueError(
            f"data source '{source.source}': {without} of {len(samples)} samples have no label within "
            f"{data.max_length} tokens; raise data.max_length, or data.max_unsupervised if that is meant"
        )
    return samples
