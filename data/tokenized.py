"""A recipe's sources as token ids with label masks: read, encoded, and cached on disk by a hash of their origin."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftsmith.common.command import available_cores
from draftsmith.common.data_sections import Data, Source
from draftsmith.common.files import cache_folder, locked, read_text, replacing
from draftsmith.common.processes import in_order
from draftsmith.data.chat import encode
from draftsmith.data.chat_template import check_template, rendered_today, template_of, with_arguments
from draftsmith.data.formats import FLAGS, REASONING, TokenIds, read_sample, read_token_ids, read_tools, unused_fields
from draftsmith.data.packing import Sample, Tokenized
from draftsmith.data.rows import Skipped, UnusableRow, rows, usable
from draftsmith.data.sampled import OTHER_TOKENIZER, encode_sampled

if TYPE_CHECKING:  # takes seconds to import, and a template is read without it
    from transformers import PreTrainedTokenizerBase

_VERSION = "9"  # of the encoding; to be raised with each change of what data/{chat,chat_template,rows,sampled}.py give
CHUNK = 500  # rows that a process encodes at a time
LOOKED_AT = 8  # conversations of a source whose labels are compared with its texts, and those with other roles


def template_for(data: Any, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """The chat template of a recipe's section, with its ``template_arguments``; None for the tokenizer's own.
    ``data``: the section ``data`` of a training recipe or of one for distillation.
    ``tokenizer``: None for a target that renders no chats.
    Raises FileNotFoundError, ValueError, OSError: as :func:`read_template`; or there are arguments and no template."""
    template = read_template(data.template)
    if not data.template_arguments or tokenizer is None:
        return template
    return with_arguments(template_of(tokenizer, template), data.template_arguments)


def read_template(template: str | None) -> str | None:
    """The text of a recipe's ``data.template``: itself, or the content of the file of that name (also inside this
    project).
    Raises FileNotFoundError: it is neither a template nor the name of a file. ValueError: it is no Jinja template.
    OSError: the file cannot be read."""
    if template is None:
        return None
    if "{%" in template or "{{" in template:
        check_template(template)
        return template
    root = Path(__file__).resolve().parents[1]
    for path in (Path(template), root / template):  # the project's files are found from any working directory
        if os.path.isfile(path):  # False also for a name that is too long
            text = read_text(path, "chat template")
            if "{%" not in text and "{{" not in text:
                raise ValueError(f"{path}: no chat template: no {{{{ … }}}} or {{% … %}} is in it")
            check_template(text, str(path))
            return text
    raise FileNotFoundError(f"data.template: '{template[:200]}' is neither a Jinja template nor a file")


def tokenizer_facts(tokenizer: PreTrainedTokenizerBase, template: str | None) -> dict[str, Any]:
    """What tokens depend on, apart from the text. ``template``: in place of the tokenizer's own, if there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "tokenizer": backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        # Not part of the above: appended to completions, and printed by templates.
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": template or tokenizer.chat_template,
        "transformers": importlib.metadata.version("transformers"),  # it renders the template
        "today": rendered_today(tokenizer, template),
    }


def tokenized(source: Source, data: Data, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """A source's samples. The first process encodes them and caches them by a hash of everything they depend on; other
    processes wait for it.
    Raises FileNotFoundError, ValueError: the source cannot be read, or too many of its rows cannot be used or have no
    label; the cache cannot be written. OSError: the disk is full."""
    template = template_for(data, tokenizer)
    source_rows, known = rows(source)
    source_rows = itertools.islice(source_rows, source.limit)
    if source.streaming:  # the content of a stream is unknown before it was read
        return check(encoded(source_rows, source, data, tokenizer, template), source, data)
    made_of = {
        "version": _VERSION,
        "source": source.model_dump(exclude={"weight", "answers"}),
        "rows": known,
        **tokenizer_facts(tokenizer, template),
        "max_length": data.max_length,
        "reasoning": data.reasoning,
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
        samples = _cached(path)
        if samples is None:
            samples = _encoded_by_processes(source_rows, source, data, tokenizer, template)
            arrays = {"tokens": samples.tokens, "supervised": samples.supervised, "starts": samples.starts}
            with replacing(path) as temporary:
                save_file(arrays, temporary, {"skipped": json.dumps(asdict(samples.skipped))})
    return check(samples, source, data)


def _cached(path: Path) -> Tokenized | None:
    """The samples in a cache file; None if it does not exist or is damaged."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            kept = json.loads(file.metadata()["skipped"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        for name in ("reasons", "notes", "unused"):
            kept[name] = {what: (count, place) for what, (count, place) in kept[name].items()}
        return Tokenized(**arrays, skipped=Skipped(**kept))
    except (SafetensorError, TypeError, ValueError, LookupError):  # damaged
        path.unlink()
        return None


def _encoded_by_processes(
    placed_rows: Iterable[tuple[str, Any]],
    source: Source,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
) -> Tokenized:
    """What :func:`encoded` makes of the rows, :data:`CHUNK` at a time, by as many processes as ``data.workers`` says.
    The result does not depend on how many."""
    remaining = iter(placed_rows)
    chunks = enumerate(iter(lambda: list(itertools.islice(remaining, CHUNK)), []))
    begun = list(itertools.islice(chunks, 2))
    processes = available_cores() if data.workers is None else data.workers

    def encode_chunk(chunk: tuple[int, list[tuple[str, Any]]]) -> Tokenized:
        return encoded(chunk[1], source, data, tokenizer, template, first=chunk[0] == 0)

    parts = in_order(encode_chunk, itertools.chain(begun, chunks), processes if len(begun) == 2 else 1)
    return Tokenized.joined(list(parts))


def encoded(
    placed_rows: Iterable[tuple[str, Any]],
    source: Source,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    *,
    first: bool = True,
) -> Tokenized:
    """Encode rows, each with its place, as samples; unusable rows are counted in ``skipped``.
    ``first``: they are the source's first ones, some of which are compared with its texts.
    Raises ValueError: an error of all rows."""
    used = set(FLAGS) if data.reasoning == "keep" else {*FLAGS, *REASONING}
    place, looked_at, skipped = "", 0 if first else LOOKED_AT, Skipped()
    left_out: dict[tuple[str, ...], Collection[str]] = {}  # by the roles of a conversation

    def placed() -> Iterator[tuple[str, Any]]:
        nonlocal place
        for one in placed_rows:
            place = one[0]
            yield one

    def read(row: Mapping[str, Any]) -> list[Sample]:
        nonlocal looked_at
        content, tools, look, roles = read_sample(row), [], False, ()
        if isinstance(content, list):
            tools, roles = read_tools(row), tuple(message["role"] for message in content)
            look = looked_at < LOOKED_AT or roles not in left_out
            looked_at += 1
        reasons = row.get("finish_reason")
        reasons = reasons if isinstance(reasons, list | str) else ()
        try:
            keep, to, done, ids = data.reasoning == "keep", data.max_length, None, list[TokenIds]()
            if keep and isinstance(content, list) and (ids := read_token_ids(row)):  # thinking is part of them
                done = encode_sampled(content, ids, tokenizer, template, to, tools, check=look)
            if done is None:
                done = encode(content, tokenizer, template, to, reasons, tools, reasoning=keep, check=look)
                done = replace(done, notes=(*done.notes, *[OTHER_TOKENIZER] * done.answers)) if ids else done
        except UnusableRow:
            raise
        except ValueError as error:
            raise ValueError(f"data source '{source.source}': {error} (first: {place})") from None
        if look:
            left_out[roles] = done.left_out
        unused = unused_fields(row, used | done.rendered)
        skipped.note(place, done.answers, done.notes, unused.union(left_out.get(roles, ())))
        return done.samples

    found = usable(placed(), read, skipped)
    samples = Tokenized.of(sample for _, samples in found for sample in samples)
    return replace(samples, skipped=skipped)


def check(samples: Tokenized, source: Source, data: Data, of: int = 0) -> Tokenized:
    """Refuse a source with too many unusable rows or too many samples without a label; returns the samples, with those.
    ``of``: number of rows that the shares refer to, if the source is known to have more than these.
    Raises ValueError: there are too many of either, or there is no sample at all."""
    samples.skipped.check(source.source, data.max_skipped, of)
    if len(samples) == 0 and not of:
        why = f"has no row left: {samples.skipped}" if samples.skipped.count else "is empty"
        raise ValueError(f"data source '{source.label}' {why}")
    without = samples.without_label()
    if without > data.max_unsupervised * max(of, len(samples)):
        raise ValueError(
            f"data source '{source.source}': {without} of {len(samples)} samples have no label within "
            f"{data.max_length} tokens; raise data.max_length, or data.max_unsupervised if that is meant"
        )
    return samples
