"""Pickled weights, read as tensors only: a safetensors copy of a model's folder, in the cache."""

import filecmp
import hashlib
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.common.files import json_object, locked, replacing, write_json
from draftsmith.models import stored
from draftsmith.models.precision import say

_BESIDE = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".py")  # copied with converted weights


def converted(folder: Path, files: list[Path]) -> Path:
    """The safetensors copy of a folder with pickled weights: one folder per source, written again if a file changed."""
    folder = folder.resolve()
    facts = {file.name: file.resolve().stat() for file in files}
    stamp = {
        "folder": str(folder),
        "files": {name: [str((folder / name).resolve()), s.st_size, s.st_mtime_ns] for name, s in facts.items()},
    }
    copy = stored.conversions("models") / f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    with locked(copy.with_name(f"{copy.name}.lock")):
        if not _is_whole(copy, stamp):
            size = sum(s.st_size for s in facts.values())
            announcement = (
                f"{folder}: pickled weights ({len(files)} files, {size / 1e9:,.2f} GB), read as tensors only and "
                f"converted once to safetensors in {copy}"
            )
            with stored.converting(copy, size, folder, announcement):
                _write(files, copy)
                write_json(copy / stored.STAMP, stamp)  # last, since a copy without it is not used
        _copy_beside(folder, copy)
    return copy


def _is_whole(copy: Path, stamp: Mapping[str, Any]) -> bool:
    """Whether a safetensors copy was made from these files and is still complete."""
    try:
        if json_object(copy / stored.STAMP) != stamp:
            return False
        stored.weight_files(copy)
        stored.check_safetensors(copy)
    except (OSError, ValueError):
        return False
    return True


def _write(files: list[Path], copy: Path) -> None:
    """Convert shard by shard, so that only one is in memory."""
    copy.mkdir()
    written: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        tensors, name = read_pickle(file), stored.SINGLE
        if len(files) > 1:
            say(f"  {number}/{len(files)} {file.name}")
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
        repeated = sorted(written.keys() & tensors.keys())
        if repeated:
            raise ValueError(f"{file}: holds tensor '{repeated[0]}', which another file holds too; fetch it again")
        stored.save_tensors(_alone(tensors), copy / name)
        written |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(written.items()))}
        write_json(copy / f"{stored.SINGLE}.index.json", index)


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Read a state dict without running anything that the pickle may contain."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickle protocols
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        unsafe = re.search(r"GLOBAL ([\w.]+)", str(error))
        if unsafe:
            raise ValueError(
                f"{file}: this pickle holds more than tensors ({unsafe[1]}) and could run any code; it is not loaded"
            ) from None
        raise ValueError(f"{file}: not a file of weights, or damaged; fetch it again") from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, IndexError, UnicodeDecodeError):
        raise ValueError(f"{file}: not a file of weights, or truncated; fetch it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}, not tensors by name; it is not a model's weights")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{file}: '{name}' is no plain tensor; these are not a model's weights alone")
    return content


def _alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
        kept = {f"{stored.SINGLE}.index.json", f"{stored.PICKLE}.index.json", stored.STAMP}
        return {f.name for f in where.iterdir() if f.suffix in _BESIDE and f.is_file() and f.name not in kept}

    for name in small(folder):
        if not (copy / name).exists() or not filecmp.cmp(folder / name, copy / name):
            with replacing(copy / name) as temporary:
                shutil.copy2(folder / name, temporary)
    for name in small(copy) - small(folder):
        (copy / name).unlink()
