"""Models in safetensors made of other forms, once: copies in the cache. Imports no torch.

Pickled weights are never loaded as a model. Their copy, like that of a GGUF file (from_gguf.py) and of a published
drafter (models/serving/from_published.py), is what is loaded and fingerprinted instead.
"""

import filecmp
import functools
import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftsmith.common.files import cache_folder, cached_about, file_sha256, json_object, locked, replacing, write_json
from draftsmith.models.files.weights import PICKLE, SINGLE, check_safetensors, read_pickle, save_tensors, weight_files
from draftsmith.models.precision import say

if TYPE_CHECKING:
    from torch import Tensor

STAMP = "converted_from.json"  # in a copy: what it was made of
GGUF = "gguf_sha256"  # field of the stamp: SHA-256 of the GGUF file
LARGE = 64 << 20  # bytes from which what was read of a whole file is kept in the cache
_SETTLED = 2_000_000_000  # nanoseconds: a file changed later may be changed again at the same time stamp
_MARGIN = 64 << 20  # bytes that a conversion leaves free on the disk
_BESIDE = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")  # copied with converted weights


class Conversion(NamedTuple):
    """How a copy is made. size: its bytes. announcement: the line that begins it. write: fills the copy's folder.
    note: fields of its stamp that do not decide whether it is made anew."""

    size: int
    announcement: str
    write: Callable[[Path], None]
    note: Mapping[str, Any] = {}


def cached_copy(
    kind: str, name: str, source: Path, key: Mapping[str, Any], plan: Callable[[Path], Conversion], *needed: str
) -> Path:
    """The copy ``name`` of ``source`` in the cache's folder ``kind``, made now if it is missing, incomplete or of
    another ``key``. An unfinished one is removed; its stamp is written last, and without it a copy is not used.
    ``plan``: called with the copy's folder where it has to be made, in one process at a time.
    ``needed``: files that it has besides weights.
    Raises ValueError: the cache cannot be made, or the copy does not fit on the disk. OSError: it cannot be written."""
    cache = cache_folder() / kind
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{cache}: the cache cannot be made here ({error.strerror}); set DRAFTSMITH_CACHE to another folder"
        ) from None
    copy = cache / name
    if _is_whole(copy, key, needed):
        return copy
    with locked(cache / f"{name}.lock"):
        if _is_whole(copy, key, needed):  # another process has made it meanwhile
            return copy
        size, announcement, write, note = plan(copy)
        shutil.rmtree(copy, ignore_errors=True)
        free = shutil.disk_usage(cache).free
        if free < size + _MARGIN:
            raise ValueError(
                f"{cache}: a safetensors copy of {source} needs {size / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; "
                "free some space, or set DRAFTSMITH_CACHE to a folder on another disk"
            )
        say(announcement)
        try:
            copy.mkdir()
            write(copy)
            write_json(copy / STAMP, {**key, **note})
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
    return copy


def _is_whole(copy: Path, key: Mapping[str, Any], needed: Sequence[str]) -> bool:
    with suppress(OSError, ValueError):
        made = key.items() <= json_object(copy / STAMP).items() and all((copy / name).exists() for name in needed)
        return made and bool(weight_files(copy)) and bool(check_safetensors(copy))
    return False


def remembered(kind: str, file: Path, read: Callable[[Path], list[str]]) -> list[str]:
    """What ``read`` finds in a file; of a large one it is kept in the cache's folder ``kind`` until the file
    changes."""
    file = file.resolve()  # of a download, the links change and the files do not
    facts = file.stat()
    known = {"file": str(file), "of": [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]}
    kept = cached_about(kind, file)
    with suppress(OSError, ValueError, LookupError, TypeError):  # not kept yet, or damaged
        if facts.st_size >= LARGE and known.items() <= (found := json_object(kept)).items():
            return [str(line) for line in found["lines"]]
    lines = read(file)
    if facts.st_size >= LARGE and time.time_ns() - max(facts.st_mtime_ns, facts.st_ctime_ns) > _SETTLED:
        with suppress(OSError):  # no room for it, or a cache that is read alone
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {**known, "lines": lines})
    return lines


def known_sha256(file: Path) -> str:
    """SHA-256 of a file, of a large one computed once."""
    return remembered("sha256", file, lambda each: [file_sha256(each)])[0]


# ---- pickled weights


def with_safetensors(folder: Path) -> Path:
    """The folder itself, or the cached safetensors copy of its pickled weights, made now if need be.
    Raises FileNotFoundError: there are no weights, or some are missing. ValueError: a file is damaged, a pickle holds
    more than tensors, or there is an adapter beside the weights. OSError: the cache cannot be written, or the disk is
    full."""
    files = weight_files(folder)
    if (folder / "adapter_config.json").exists():  # no file says whether the weights have it merged in already
        raise ValueError(
            f"{folder}: holds both a whole model ({files[0].name}) and an adapter (adapter_config.json), which "
            "transformers adds to it and servers leave out; if it is merged in already, or unwanted, move "
            "adapter_config.json away, else merge it first"
        )
    if files[0].suffix == ".safetensors":
        return folder
    folder = folder.resolve()
    facts = {file.name: file.resolve().stat() for file in files}
    size = sum(each.st_size for each in facts.values())
    key = {
        "folder": str(folder),
        "files": {name: [str((folder / name).resolve()), s.st_size, s.st_mtime_ns] for name, s in facts.items()},
    }
    name = f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"  # one for each source
    about = f"{folder}: pickled weights ({len(files)} files, {size / 1e9:,.2f} GB), read as tensors only and converted"

    def plan(copy: Path) -> Conversion:
        return Conversion(size, f"{about} once to safetensors in {copy}", functools.partial(_write, files))

    copy = cached_copy("models", name, folder, key, plan)
    with locked(copy.with_name(f"{name}.lock")):
        _copy_beside(folder, copy)
    return copy


def _write(files: list[Path], copy: Path) -> None:
    """Convert shard by shard, so that only one is in memory."""
    written: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        tensors, name = read_pickle(file), SINGLE
        if len(files) > 1:
            say(f"  {number}/{len(files)} {file.name}")
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
        repeated = sorted(written.keys() & tensors.keys())
        if repeated:
            raise ValueError(f"{file}: holds tensor '{repeated[0]}', which another file holds too; fetch it again")
        save_tensors(_alone(tensors), copy / name)
        written |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(written.items()))}
        write_json(copy / f"{SINGLE}.index.json", index)


def _alone(tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Copies of tensors that share memory with an earlier one, since a safetensors file stores each by itself."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return apart


def _copy_beside(folder: Path, copy: Path) -> None:
    """Copy config, tokenizer and code beside the converted weights, where they changed."""

    def small(where: Path) -> set[str]:
        kept = {f"{SINGLE}.index.json", f"{PICKLE}.index.json", STAMP}
        return {f.name for f in where.iterdir() if f.suffix in _BESIDE and f.is_file() and f.name not in kept}

    for name in small(folder):
        if not (copy / name).exists() or not filecmp.cmp(folder / name, copy / name):
            with replacing(copy / name) as temporary:
                shutil.copy2(folder / name, temporary)
    for name in small(copy) - small(folder):
        (copy / name).unlink()
