"""A stored model's identity: its fingerprint, and that of earlier versions. Imports no torch."""

import hashlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from draftsmith.common.files import cached_about, json_object, read_json, write_json
from draftsmith.models.files.copies import GGUF, LARGE, STAMP, remembered, with_safetensors
from draftsmith.models.files.weights import SINGLE, config_of, safetensors_header, weight_files
from draftsmith.models.precision import say

_SLICE = 1024  # first bytes of each stored tensor that an older fingerprint covers
_PARTS = (40, 16, 16)  # characters of a fingerprint for the weights, the config and the tokenizer
_OPEN = "0" * 32  # in place of the last two, of a GGUF file: this machine's transformers made both out of the file
_AT_ONCE = 4  # files that are hashed at the same time


def fingerprint(folder: Path) -> str:
    """A stored model's identity: hashes of all bytes of its weights (40 characters), of its config (16) and of its
    tokenizer file (16).

    It covers the stored weights that are loaded (no ``consolidated.safetensors`` beside them), not as loaded, which
    changes with dtype, quantisation and sharding. The order and number of files do not matter. For pickled weights it
    is the fingerprint of their safetensors copy; of a GGUF file it is that of the weights converted from it, and names
    no config and tokenizer. The hashes of a large file are kept in the cache folder until the file changes, so that its
    weights are read once.
    Raises ValueError: a file is damaged. FileNotFoundError: there is no config, or weights are missing."""
    folder = _as_safetensors(folder)
    gate, hashes = threading.Semaphore(_AT_ONCE), list[Callable[[], list[str]]]()
    for file in weight_files(folder):
        hashes.append(in_background(_tensor_hashes, file, gate))
    weights = "\n".join(sorted({line for lines in hashes for line in lines()}))
    parts = (weights.encode(), *_settings(folder))
    found = "".join(hashlib.sha256(part).hexdigest()[:size] for part, size in zip(parts, _PARTS, strict=True))
    return found[: _PARTS[0]] + _OPEN if _gguf_sha256(folder) else found


def same_target(stored: str, found: str) -> bool:
    """Whether two fingerprints name one target: they are equal, or their weights are and one is of a GGUF file."""
    weights = _PARTS[0]
    of_gguf = _OPEN in (stored[weights:], found[weights:])
    return stored == found or (of_gguf and len(stored) == len(found) and stored[:weights] == found[:weights])


def older_fingerprint(folder: Path) -> str:
    """The fingerprint of earlier versions, which runs and drafters may still name: SHA-256 over the config, the
    tokenizer file and the first bytes of every tensor; of a GGUF file its SHA-256."""
    folder = _as_safetensors(folder)
    if whole := _gguf_sha256(folder):
        return whole
    digest = hashlib.sha256()
    for part in _settings(folder):
        digest.update(part)
    tensors: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data, header = safetensors_header(file)
        with file.open("rb") as stream:
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                stream.seek(data + begin)
                first = stream.read(min(_SLICE, end - begin))
                tensors[name] = f"{name}{entry['dtype']}{entry['shape']}".encode() + first
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def difference(stored: str, found: str) -> str:
    """What two different fingerprints say of their models, as part of a message."""
    shown = f"(fingerprint {stored[:12]}… ≠ {found[:12]}…)"
    if not len(stored) == len(found) == sum(_PARTS):  # an adapter's or an older one
        return f"other weights, config or tokenizer {shown}"
    weights, config, _ = _PARTS
    if stored[:weights] != found[:weights]:
        return f"other weights {shown}"
    parts = (slice(weights, weights + config), slice(weights + config, None))
    names = [n for n, part in zip(("config.json", "tokenizer"), parts, strict=True) if stored[part] != found[part]]
    return f"the same weights with another {' and '.join(names)}"


def was_asked(file: Path, request: dict[str, Any], older: str) -> bool:
    """Whether ``file`` is there and holds a request, whose field ``target`` is a fingerprint. Where it is the ``older``
    one of the same target, the file is written anew with a line."""
    try:
        kept = read_json(file)
    except (OSError, ValueError):
        return False
    if older and kept == {**request, "target": older} != request:
        say(f"{file}: kept under the target's fingerprint of an earlier version, which saw less of it; it is renewed")
        write_json(file, request)
        return True
    return kept == request


def in_background(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Call a function on a thread, which an interrupt does not wait for; returns what waits for its result."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result


def _as_safetensors(folder: Path) -> Path:
    stored = (folder / SINGLE).exists() or (folder / f"{SINGLE}.index.json").exists()
    return with_safetensors(folder) if not stored and any(folder.glob("pytorch_model*.bin")) else folder


def _gguf_sha256(folder: Path) -> str | None:
    made = json_object(folder / STAMP) if (folder / STAMP).exists() else {}
    return str(made[GGUF]) if GGUF in made else None


def _settings(folder: Path) -> tuple[bytes, bytes]:
    """The config, without what does not change the model, and the tokenizer file."""
    config = config_of(folder)
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    tokenizers = [folder / name for name in ("tokenizer.json", "tokenizer.model", "vocab.json")]
    found = (file for file in (*tokenizers, *sorted(folder.glob("*.tiktoken"))) if file.exists())
    file = next(found, None)
    return json.dumps(config, sort_keys=True).encode(), file.read_bytes() if file else b""


def _tensor_hashes(file: Path, gate: threading.Semaphore) -> list[str]:
    """A line of each tensor in a safetensors file: its name, dtype, shape and the SHA-256 of its bytes."""
    with gate:
        return remembered("hashes", file, _hashed)


def _hashed(file: Path) -> list[str]:
    data, header = safetensors_header(file)
    lines = list[str]()
    with file.open("rb", buffering=0) as stream:
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            digest, left = hashlib.sha256(), end - begin
            stream.seek(data + begin)
            while left and (block := stream.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
            lines.append(f"{name} {entry['dtype']} {entry['shape']} {digest.hexdigest()}")
    return lines


def unhashed(folder: Path) -> int:
    """Bytes of large files of a model's weights whose hashes are not kept yet."""
    files = [file.resolve() for file in weight_files(folder) if file.suffix == ".safetensors"]
    sizes = (file.stat().st_size for file in files if not cached_about("hashes", file).exists())
    return sum(size for size in sizes if size >= LARGE)
