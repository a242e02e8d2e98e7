"""A model on disk: its folder, what its files hold, and a safetensors copy of pickled weights. Imports no torch.

A model folder is a path, a path inside this project, or a Hub id, which is downloaded. Weights are safetensors, single
or sharded. Pickled weights (``pytorch_model*.bin``) are never loaded as a model: they are converted once into a cached
folder, which is loaded and fingerprinted instead. A GGUF file, or a folder that holds one, stands for the cached folder
that it is converted into (:mod:`draftsmith.models.from_gguf`).
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from draftsmith.common.command import first_line
from draftsmith.common.files import (
    cache_folder,
    cached_about,
    json_object,
    parse_json,
    read_json,
    replacing,
    write_json,
)
from draftsmith.models.precision import say

if TYPE_CHECKING:
    from torch import Tensor

_ROOT = Path(__file__).resolve().parent.parent
_SLICE = 1024  # first bytes of each stored tensor that an older fingerprint covers
_PARTS = (40, 16, 16)  # characters of a fingerprint for the weights, the config and the tokenizer
_OPEN = "0" * 32  # in place of the last two, of a GGUF file: this machine's transformers made both out of the file
_REMEMBERED = 64 << 20  # bytes from which a file's hashes are kept in the cache
_SETTLED = 2_000_000_000  # nanoseconds: a file changed later may be changed again at the same time stamp
_AT_ONCE = 4  # files that are hashed at the same time
_HEADER = 100 << 20  # bytes; the safetensors format allows no more
_MARGIN = 64 << 20  # bytes that a conversion leaves free on the disk
# Left out of a download: pickles and other frameworks' files. Pickled weights are fetched if there are no others.
_NEVER = [
    "original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle",
    "*.msgpack", "*.h5", "*.ot", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.tflite", "*.mlmodel", "*.nemo",
    "*.npz", "*.zip", "*.tar", "*.tar.gz",
]  # fmt: skip
_PICKLED = ["pytorch_model.bin", "pytorch_model-*.bin"]
FETCHED = "models/smollm2"  # what `make models` fetches
FETCHES = {  # folder → the command that fetches it
    FETCHED: "make models (93 MB)",
    "models/qwen2.5-coder-0.5b": "make coder (478 MB)",
    "models/qwen2.5-coder-1.5b": "make coder SIZE=1.5b (1.1 GB)",
}
SINGLE, PICKLE = "model.safetensors", "pytorch_model.bin"
STAMP = "converted_from.json"  # in a converted copy: what it was made of
GGUF = "gguf_sha256"  # field of the stamp: SHA-256 of the GGUF file


# ---- the folder


def local_folder(name: str) -> Path | None:
    """A model's or drafter's folder on this machine: a path, or a path inside this project; None if there is none."""
    with contextlib.suppress(OSError, ValueError):  # a name too long, a NUL in it
        return next((folder for folder in (Path(name), _ROOT / name) if name and folder.is_dir()), None)
    return None


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a name stands for: its path, or that of a folder with one and no config.json, outside or
    inside this project; None if it stands for none.
    Raises ValueError: the folder holds several."""
    folder = local_folder(name)
    if folder is not None:
        files = [] if (folder / "config.json").exists() else sorted(folder.glob("*.gguf"))
        if len(files) > 1:
            listed = ", ".join(file.name for file in files[:3])
            raise ValueError(f"{folder}: holds {len(files)} GGUF files ({listed}); name one of them, not the folder")
        return files[0] if files else None
    if not name.endswith(".gguf"):
        return None
    return next((file for file in (Path(name), _ROOT / name) if file.is_file()), None)


def known_folder(name: str) -> Path | None:
    """:func:`local_folder`; None for a GGUF file and for what may be a Hub id.
    Raises FileNotFoundError: it can be none of these. ValueError: a folder with several GGUF files."""
    if gguf_file(name) is not None:
        return None
    folder = local_folder(name)
    fetch = FETCHES.get(name.rstrip("/"))
    if fetch and not (folder and (folder / "config.json").exists()):  # empty after a failed fetch
        raise FileNotFoundError(f"'{name}': not here yet; run: {fetch}")
    if folder is not None:
        return folder
    if os.path.lexists(name):
        kind = "a file" if Path(name).is_file() else "a symbolic link that leads to no folder"
        raise FileNotFoundError(f"'{name}': this is {kind}; a model's or drafter's folder, or a .gguf file, is needed")
    if name.endswith(".gguf"):
        raise FileNotFoundError(f"'{name}': there is no such file")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "-")):
        raise FileNotFoundError(f"'{name}': there is no such folder, and a Hub id would be USER/NAME")
    return None


def drafter_config(folder: Path, name: str) -> dict[str, Any]:
    """The config.json of a drafter's folder, which the user calls ``name``.
    Raises FileNotFoundError: there is none. ValueError: it is damaged, or the folder holds something else."""
    if not (folder / "config.json").exists():
        hint = "training has not finished; go on with --resume" if (folder / "checkpoints").exists() else "no drafter"
        raise FileNotFoundError(f"{folder}: no config.json here: {hint}")
    config = json_object(folder / "config.json", "drafter config")
    if "drafter_type" not in config:
        command = f"python models/import_drafter.py {name} --target TARGET --out runs/NAME"
        if is_published(folder, config):
            raise ValueError(f"{folder}: a published drafter in another format; import it: {command}")
        raise ValueError(f"{folder}: this is a model, not a drafter; to decode with it alone: none --target {name}")
    return config


def published_config(folder: Path) -> dict[str, Any] | None:
    """The config of a drafter in a published format; None: the folder holds something else.
    Raises ValueError: its config or safetensors file is damaged."""
    if not (folder / "config.json").exists():
        return None
    config = json_object(folder / "config.json", "drafter config")
    return config if "drafter_type" not in config and is_published(folder, config) else None


def exported(folder: Path) -> dict[str, Any]:
    """The content of provenance.json in a folder that models/export.py wrote; empty in others."""
    file = folder / "provenance.json"
    made = json_object(file) if file.exists() else {}
    return made if "max_logit_difference" in made else {}


def published_target(folder: Path, config: Mapping[str, Any], given: str | None, name: str) -> str:
    """The target of a published drafter, which the user calls ``name``: the ``given`` one, else the one that its folder
    names, which only those of models/export.py, speculators and Medusa do. Where the one that was exported for is not
    here, what servers load it by comes first.
    Raises ValueError: none is given or named."""
    verifier = config.get("speculators_config")
    for part in ("verifier", "name_or_path"):
        verifier = verifier.get(part) if isinstance(verifier, dict) else None
    made = exported(folder)
    own, served = made.get("target"), made.get("served_target")
    here = own if isinstance(own, str) and (local_folder(own) or gguf_file(own)) else None
    for stated in (given, here, served, verifier, config.get("base_model_name_or_path"), own):
        if stated and isinstance(stated, str):
            return stated
    raise ValueError(f"{name}: a published drafter, which does not say for which target it is: pass --target")


def is_published(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder holds a drafter in a format that models/import_drafter.py reads or knows of.
    Raises ValueError: its safetensors file is damaged."""
    fields = {"speculators_model_type", "eagle_config", "draft_vocab_size", "medusa_num_heads", "dflash_config"}
    if fields & config.keys() or config.get("model_type") == "medusa":
        return True
    file = folder / SINGLE  # EAGLE-1 has the config of a Llama model, of one layer
    if not file.exists():
        return config.get("num_hidden_layers") == 1 and (folder / PICKLE).exists()
    return "fc.weight" in safetensors_header(file)[1]


def check_drafter_name(name: str, target: str | None = None) -> None:
    """What can be said of a drafter's folder, ours or a published one, before torch is imported.
    ``target``: the one that is given for it.
    Raises FileNotFoundError, ValueError: as :func:`known_folder`, :func:`drafter_config`, :func:`published_target`."""
    folder = known_folder(name)
    if folder is not None:
        published = published_config(folder)
        if published is None:
            drafter_config(folder, name)
        else:
            known_folder(published_target(folder, published, target, name))


def resolve_folder(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """:func:`local_folder`, the converted copy of a :func:`gguf_file`, or the download of a Hub id (the last two are
    announced by a line on stderr if there is anything to do).
    ``weights``: whether to download its weights too.
    Raises FileNotFoundError: it is none of these, or cannot be downloaded. ValueError: a GGUF file cannot be converted.
    OSError: the cache cannot be written, or the disk is full."""
    file = gguf_file(name)
    if file is not None:
        from draftsmith.models import from_gguf  # it needs this module

        return from_gguf.with_safetensors(file)
    folder = known_folder(name)
    if folder is not None:
        return folder
    folder = _download(name, revision, ignore_patterns=[*_NEVER, "*.bin", *([] if weights else ["*.safetensors"])])
    if weights and not any(folder.glob("*.safetensors")):
        folder = _download(name, revision, ": its pickled weights, there are no others", allow_patterns=_PICKLED)
    return folder


_MEDUSA = "medusa_lm_head"  # .safetensors, or .pt: a pickle


def published_folder(name: str, revision: str | None = None, pickles: bool = False) -> Path:
    """The folder of a drafter that somebody published: a local one, or the download of a Hub id.
    ``pickles``: download pickled weights where there are no others.
    Raises FileNotFoundError: there is none, or it cannot be downloaded."""
    if gguf_file(name) is not None:
        raise FileNotFoundError(f"'{name}': a GGUF file is a model; a folder or Hub id of a drafter is needed")
    folder = known_folder(name)
    if folder is not None:
        return folder
    small = ["config.json", f"{SINGLE}.index.json", "README.md", "provenance.json", "chat_template.jinja"]
    folder = _download(name, revision, allow_patterns=[*small, "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        if not pickles:
            raise FileNotFoundError(f"'{name}': it has no safetensors files; pickled ones are read with --allow-pickle")
        pickled = [*_PICKLED, f"{PICKLE}.index.json", f"{_MEDUSA}.pt"]
        folder = _download(
            name, revision, ": its pickled weights, there are no others", allow_patterns=[*small, *pickled]
        )
    return folder


def published_files(folder: Path) -> list[Path]:
    """The files of a published drafter's weights. Raises FileNotFoundError: there are none, or some are missing."""
    single = (folder / f"{_MEDUSA}{suffix}" for suffix in (".safetensors", ".pt"))
    return [file for file in single if file.exists()][:1] or weight_files(folder)


def published_tensors(folder: Path, pickles: bool = False) -> "dict[str, Tensor]":
    """All tensors of a published drafter's folder, on the CPU.
    ``pickles``: pickled weights may be read, as tensors only.
    Raises FileNotFoundError: there are no weights, or some are missing. ValueError: a file is damaged, or it is a
    pickle and holds more than tensors or may not be read."""
    from safetensors.torch import load_file

    from draftsmith.models.pickled import read_pickle

    tensors: dict[str, Tensor] = {}
    for file in published_files(folder):
        if file.suffix == ".safetensors":
            safetensors_header(file)
        elif not pickles:
            raise ValueError(f"{file}: pickled weights; with --allow-pickle they are read, as tensors only")
        tensors |= load_file(file) if file.suffix == ".safetensors" else read_pickle(file)
    return tensors


def _download(name: str, revision: str | None, what: str = "", **patterns: list[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    hub, offline = constants.ENDPOINT, constants.HF_HUB_OFFLINE
    kwargs: dict[str, Any] = {"revision": revision, **patterns}
    try:
        try:
            snapshot_download(name, local_files_only=True, **kwargs)
        except Exception:  # it is not, or not all of it, in the cache
            if not offline:
                say(f"fetching '{name}' from {hub}{what}")
        with _bars_on_a_terminal():
            return Path(snapshot_download(name, **kwargs))
    except errors.GatedRepoError:
        why = f"it is gated: accept its licence at {hub}/{name}, then log in with hf auth login"
    except errors.RepositoryNotFoundError:
        why = f"{hub} has no such repository, or it is private: check the name, or log in with hf auth login"
    except errors.RevisionNotFoundError:
        why = f"it has no revision '{revision}' at {hub}"
    except errors.LocalEntryNotFoundError as error:
        unreachable = f"{hub} does not answer ({first_line(error.__cause__ or error)})"
        reason = "HF_HUB_OFFLINE forbids a download" if offline else unreachable
        why = f"it is not in the cache, or incomplete there, and {reason}"
    except Exception as error:  # the Hub's client raises a dozen unrelated types
        if isinstance(error, OSError) and error.errno is not None:
            place = str(error.filename or constants.HF_HUB_CACHE)
            if error.errno == errno.ENOSPC:
                raise OSError(error.errno, error.strerror, place) from None
            raise ValueError(
                f"{place}: the download cache cannot be used ({error.strerror}); set HF_HOME to another folder"
            ) from None
        why = f"it cannot be fetched from {hub} ({first_line(error)})"
    raise FileNotFoundError(f"'{name}': no such folder here; {why}")


@contextlib.contextmanager
def _bars_on_a_terminal() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's ``config.json``. Raises FileNotFoundError: there is none. ValueError: it is no JSON object."""
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder}: no config.json here, so this is no model folder")
    return json_object(folder / "config.json", "config")


def target_config(folder: Path) -> dict[str, Any]:
    """:func:`config_of` a target's folder. Raises ValueError: it is a drafter's."""
    stored = config_of(folder)
    if "drafter_type" in stored:
        described = stored.get("target")
        its = described.get("name_or_path") if isinstance(described, dict) else None
        raise ValueError(f"{folder}: this is a drafter, not a target" + (f"; its target is '{its}'" if its else ""))
    return stored


# ---- weights


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
    from draftsmith.models import pickled  # it needs this module, and torch

    return pickled.converted(folder, files)


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


def unhashed(folder: Path) -> int:
    """Bytes of large files of a model's weights whose hashes are not kept yet."""
    files = [file.resolve() for file in folder.glob("*.safetensors")]
    sizes = (file.stat().st_size for file in files if not cached_about("hashes", file).exists())
    return sum(size for size in sizes if size >= _REMEMBERED)


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


def check_safetensors(folder: Path) -> dict[str, list[int]]:
    """Check each safetensors file against its header, before a library reads it; returns the shape of every tensor.
    Raises ValueError: a file is truncated or damaged."""
    headers = (safetensors_header(file)[1] for file in sorted(folder.glob("*.safetensors")))
    return {name: entry["shape"] for header in headers for name, entry in header.items()}


def stored_dtype(folder: Path) -> str:
    """The dtype of a stored model by torch's name: as its config says, else that of its first floating-point tensor,
    else float32, which ``transformers`` then uses.
    Raises FileNotFoundError: there is no config. ValueError: the config or a file is damaged."""
    config = config_of(folder)
    for part in (config, config.get("text_config")):
        for name in ("dtype", "torch_dtype"):  # the older name
            if isinstance(part, dict) and isinstance(dtype := part.get(name), str):
                return dtype.removeprefix("torch.")
    names = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
    headers = (safetensors_header(file)[1] for file in sorted(folder.glob("*.safetensors")))
    dtypes = (entry["dtype"] for header in headers for entry in header.values())
    return next((names[dtype] for dtype in dtypes if dtype in names), "float32")


def fingerprint(folder: Path) -> str:
    """A stored model's identity: hashes of all bytes of its weights (40 characters), of its config (16) and of its
    tokenizer file (16).

    It covers the stored weights, not the loaded ones, which change with dtype, quantisation and sharding. The order and
    number of files do not matter. For pickled weights it is the fingerprint of their safetensors copy; of a GGUF file
    it is that of the weights converted from it, and names no config and tokenizer. The hashes of a large file are kept
    in the cache folder until the file changes, so that its weights are read once.
    Raises ValueError: a file is damaged. FileNotFoundError: there is no config, or pickled weights are incomplete."""
    folder = _as_safetensors(folder)
    gate, hashes = threading.Semaphore(_AT_ONCE), list[Callable[[], list[str]]]()
    for file in sorted(folder.glob("*.safetensors")):
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
        file = file.resolve()  # of a download, the links change and the files do not
        facts = file.stat()
        known = {"file": str(file), "of": [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]}
        kept = cached_about("hashes", file)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # not kept yet, or damaged
            if facts.st_size >= _REMEMBERED and known.items() <= (found := json_object(kept)).items():
                return [str(line) for line in found["tensors"]]
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
        if facts.st_size >= _REMEMBERED and time.time_ns() - max(facts.st_mtime_ns, facts.st_ctime_ns) > _SETTLED:
            with contextlib.suppress(OSError):  # no room for it, or a cache that is read alone
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_json(kept, {**known, "tensors": lines})
        return lines


# ---- conversions


def conversions(kind: str) -> Path:
    """The cache's folder of converted copies, made if missing. Raises ValueError: it cannot be made."""
    cache = cache_folder() / kind
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{cache}: the cache cannot be made here ({error.strerror}); set DRAFTSMITH_CACHE to another folder"
        ) from None
    return cache


@contextlib.contextmanager
def converting(copy: Path, size: int, source: Path, announcement: str) -> Iterator[None]:
    """Make a converted copy inside the block; an unfinished one is removed, before it and where it fails.
    Raises ValueError: ``size`` bytes do not fit on the disk."""
    shutil.rmtree(copy, ignore_errors=True)
    free = shutil.disk_usage(copy.parent).free
    if free < size + _MARGIN:
        raise ValueError(
            f"{copy.parent}: a safetensors copy of {source} needs {size / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; "
            "free some space, or set DRAFTSMITH_CACHE to a folder on another disk"
        )
    say(announcement)
    try:
        yield
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise


def save_tensors(tensors: "Mapping[str, Tensor]", path: Path) -> None:
    """Write a safetensors file, whole or not at all, of tensors on any device.
    Raises OSError: the disk is full, or it cannot be written."""
    from safetensors import SafetensorError
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
