"""A recipe's sources as token ids with masks: read, encoded, kept on disk by what they were made of."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftsmith.common.files import cache_folder, locked, read_text, replacing
from draftsmith.common.sections import Data, Source
from draftsmith.data.chat import check_template, encode
from draftsmith.data.formats import read_sample
from draftsmith.data.packing import Sample, Tokenized
from draftsmith.data.rows import Skipped, UnusableRow, rows, usable

if TYPE_CHECKING:  # takes seconds to import, and a template is read without it
    from transformers import PreTrainedTokenizerBase

_VERSION = "4"  # of the encoding; a change of data/chat.py's or data/rows.py's results has to change it


def read_template(template: str | None) -> str | None:
    """A recipe's ``data.template``: the text itself, or what the file of that name (or inside this project) holds.

    Raises:
        FileNotFoundError: it looks like a file and is none.
        ValueError: it is no Jinja template.
        OSError: the file cannot be read.
    """
    if template is None:
        return None
    if "{%" in template or "{{" in template:
        check_template(template)
        return template
    for path in (Path(template), Path(__file__).resolve().parent.parent / template):  # ours, wherever one stands
        if os.path.isfile(path):  # False too for a name that is too long
            text = read_text(path, "chat template")
            check_template(text, str(path))
            return text
    raise FileNotFoundError(f"data.template: '{template[:200]}' is neither a Jinja template nor a file")


def tokenized(source: Source, data: Data, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """A source's samples. Made once, by whichever process comes first, and kept by the hash of everything that enters
    them; other processes wait as long as it takes.

    Raises:
        FileNotFoundError, ValueError: the source cannot be read, or too many of its rows cannot be used or have no
            label; the cache cannot be written.
        OSError: the disk is full.
    """
    template = read_template(data.template)
    found, known = rows(source)
    found = itertools.islice(found, source.limit)
    if source.streaming:  # nobody knows what a stream holds before it was read
        return check(encoded(found, source, data, tokenizer, template), source, data)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    made_of = {
        "version": _VERSION,
        "source": source.model_dump(exclude={"weight", "answers"}),
        "rows": known,
        "tokenizer": backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        # Not in the above: what is appended to completions, and what templates print.
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": template or tokenizer.chat_template,
        "max_length": data.max_length,
    }
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder()
    path = folder / f"{key}.safetensors"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / f"{key}.lock"))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"{folder}: tokenized data cannot be kept here ({reason}); set DRAFTSMITH_CACHE to another folder"
            ) from None
        made = _kept(path)
        if made is None:
            made = encoded(found, source, data, tokenizer, template)
            arrays = {"tokens": made.tokens, "supervised": made.supervised, "starts": made.starts}
            skipped = {"rows": made.skipped.rows, "reasons": made.skipped.reasons}
            with replacing(path) as temporary:
                save_file(arrays, temporary, {"skipped": json.dumps(skipped)})
    return check(made, source, data)


def _kept(path: Path) -> Tokenized | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            skipped = json.loads(file.metadata()["skipped"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        reasons = {reason: (count, place) for reason, (count, place) in skipped["reasons"].items()}
        return Tokenized(**arrays, skipped=Skipped(skipped["rows"], reasons))
    except (SafetensorError, TypeError, ValueError, LookupError):  # damaged: made anew
        path.unlink()
        return None


def encoded(
    found: Iterable[tuple[str, Any]], source: Source, data: Data, tokenizer: PreTrainedTokenizerBase,
    template: str | None,
) -> Tokenized:  # fmt: skip
    """Rows, each with its place, as samples; those that cannot be used are noted.

    Raises:
        ValueError: something is wrong with every row.
    """

    def read(row: Mapping[str, Any]) -> Sample:
        reasons = row.get("finish_reason")
        reasons = reasons if isinstance(reasons, list) else ()
        try:
            return encode(read_sample(row), tokenizer, template, data.max_length, reasons)
        except UnusableRow:
            raise
        except ValueError as error:
            raise ValueError(f"data source '{source.source}': {error}") from None

    skipped = Skipped()
    made = Tokenized.of(sample for _, sample in usable(found, read, skipped))
    return replace(made, skipped=skipped)


def check(samples: Tokenized, source: Source, data: Data, of: int = 0) -> Tokenized:
    """Refuse a source too many of whose rows cannot be used, or too many of whose samples teach nothing; the latter
    stay.

    Args:
        of: how many rows the shares are of, if more than these are known to be there.

    Raises:
        ValueError: they are too many, or there is no sample at all.
    """
    samples.skipped.check(source.source, data.max_skipped, of)
    if len(samples) == 0 and not of:
        why = f"has no row left: {samples.skipped}" if samples.skipped.count else "is empty"
        raise ValueError(f"data source '{source.source}' (split {source.split}) {why}")
    without = samples.without_label()
    if without > data.max_unsupervised * max(of, len(samples)):
        raise ValueError(
            f"data source '{source.source}': {without} of {len(samples)} samples have no label within "
            f"{data.max_length} tokens; raise data.max_length, or data.max_unsupervised if that is meant"
        )
    return samples
