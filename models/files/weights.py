"""Tensors in a folder: safetensors, single or sharded, and pickles, read as tensors only. Imports no torch."""

import contextlib
import errno
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from draftsmith.common.files import json_object, parse_json, replacing

if TYPE_CHECKING:
    from torch import Tensor

_HEADER = 100 << 20  # bytes; the safetensors format allows no more
SINGLE, PICKLE = "model.safetensors", "pytorch_model.bin"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}  # torch's names


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's ``config.json``. Raises FileNotFoundError: there is none. ValueError: it is no JSON object."""
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder}: no config.json here, so this is no model folder")
    return json_object(folder / "config.json", "config")


def weight_files(folder: Path) -> list[Path]:
    """The files of weights, found in the order in which ``transformers`` looks for them."""
    for single in (SINGLE, PICKLE):
        if (folder / single).exists():
            return [folder / single]
        index = folder / f"{single}.index.json"
        if index.exists():
            listed = json_object(index, "index of weights").get("weight_map")
            if not isinstance(listed, dict) or not listed or not all(isinstance(f, str) for f in listed.values()):
                raise ValueError(f"{index}: no weight_map of tensors and files; fetch it again")
            names = sorted(set(cast(dict[str, str], listed).values()))
            for name in names:
                if Path(name).name != name or not (folder / name).exists():
                    raise FileNotFoundError(f"{folder / name}: missing, but {index.name} lists it; fetch it again")
            return [folder / name for name in names]
    stray = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    if (folder / "adapter_config.json").exists():
        raise FileNotFoundError(f"{folder}: this is an adapter without its model; merge it into its base model first")
    if stray:
        raise FileNotFoundError(f"{folder}: {stray[0].name} is here, but no *.index.json that lists it; fetch it again")
    raise FileNotFoundError(f"{folder}: no weights here (model.safetensors, pytorch_model.bin or their shards)")


def stray_weights(folder: Path) -> str:
    """A line about files of weights beside those that are loaded; empty if there are none."""
    loaded = weight_files(folder)
    there = {*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")} - set(loaded)
    if not there:
        return ""
    names = ", ".join(sorted(file.name for file in there)[:3])
    more = ", …" if len(there) > 3 else ""
    return f"warning: {folder}: the weights are those of {loaded[0].name}; beside them {names}{more} is not loaded"


def safetensors_header(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The offset of a safetensors file's data, and ``dtype``, ``shape`` and ``data_offsets`` of each tensor.
    Raises ValueError: the file is damaged or truncated."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        try:
            if header_size > min(size, _HEADER):
                raise ValueError
            header = parse_json(stream.read(header_size), str(file))
            header.pop("__metadata__", None)
            for entry in header.values():
                begin, end = entry["data_offsets"]
                valid = all(type(n) is int and n >= 0 for n in (*entry["shape"], begin, end))
                if not valid or begin > end or type(entry["dtype"]) is not str:
                    raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file}: not a safetensors file, or truncated; fetch or write it again") from None
    promised = 8 + header_size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size < promised:
        raise ValueError(f"{file}: truncated ({size:,} of {promised:,} bytes); fetch or write it again")
    try:
        with safe_open(file, "np"):  # finds overlaps, gaps, left-over bytes and unknown types; reads no weights
            pass
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged ({str(error)[:200]}); fetch or write it again") from None
    return 8 + header_size, header


def tensor_entries(folder: Path) -> dict[str, dict[str, Any]]:
    """The header's entry of every tensor in a folder's safetensors files, each of which is checked before a library
    reads it. Raises ValueError: a file is truncated or damaged."""
    headers = (safetensors_header(file)[1] for file in sorted(folder.glob("*.safetensors")))
    return {name: entry for header in headers for name, entry in header.items()}


def check_safetensors(folder: Path) -> dict[str, list[int]]:
    """The shape of every tensor; raises as :func:`tensor_entries`."""
    return {name: entry["shape"] for name, entry in tensor_entries(folder).items()}


def stored_dtype(folder: Path) -> str:
    """The dtype of a stored model by torch's name: as its config says, else that of its first floating-point tensor,
    else float32, which ``transformers`` then uses.
    Raises FileNotFoundError: there is no config. ValueError: the config or a file is damaged."""
    config = config_of(folder)
    for part in (config, config.get("text_config")):
        for name in ("dtype", "torch_dtype"):  # the older name
            if isinstance(part, dict) and isinstance(dtype := part.get(name), str):
                return dtype.removeprefix("torch.")
    dtypes = (entry["dtype"] for entry in tensor_entries(folder).values())
    return next((_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES), "float32")


def read_tensors(folder: Path, files: Sequence[Path] | None = None, *, pickles: bool = False) -> "dict[str, Tensor]":
    """All tensors of a folder, on the CPU.
    ``files``: those that hold them; :func:`weight_files` if left out.
    ``pickles``: pickled weights may be read, as tensors only.
    Raises FileNotFoundError: there are no weights, or some are missing. ValueError: a file is damaged, or it is a
    pickle and holds more than tensors or may not be read."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder) if files is None else files:
        if file.suffix == ".safetensors":
            safetensors_header(file)
            tensors |= load_file(file)
        elif pickles:
            tensors |= read_pickle(file)
        else:
            raise ValueError(f"{file}: pickled weights; with --allow-pickle they are read, as tensors only")
    return tensors


def read_pickle(file: Path) -> "dict[str, Tensor]":
    """Read a state dict without running anything that the pickle may contain.
    Raises ValueError: it is damaged, or holds more than tensors."""
    import torch

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
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{file}: '{name}' is no plain tensor; these are not a model's weights alone")
    return content


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path) -> None:
    """Write a safetensors file, whole or not at all, of tensors on any device.
    Raises OSError: the disk is full, or it cannot be written."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        try:
            plain = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
            save_file(plain, temporary, metadata={"format": "pt"})
            os.umask(mask := os.umask(0))
            with contextlib.suppress(OSError):  # some file systems have no permissions
                temporary.chmod(0o666 & ~mask)  # as any new file; safetensors lets the owner alone read it
        except SafetensorError as error:  # it wraps the system's error in text of its own
            number = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error)) from None
