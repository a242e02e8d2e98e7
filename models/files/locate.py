"""Where a model is: a folder, a path inside this project, a GGUF file, or a Hub id, which is downloaded.

A name is resolved once, by :func:`locate`, and its :class:`ModelFolder` handed on. A GGUF file, or a folder that holds
one, stands for the cached folder that it is converted into (from_gguf.py). Imports no torch.
"""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from draftsmith.common.command import first_line
from draftsmith.models.files.from_gguf import convert_gguf
from draftsmith.models.files.weights import PICKLE, SINGLE, config_of
from draftsmith.models.precision import say

_ROOT = Path(__file__).resolve().parents[2]
# Left out of a download: pickles (but for MASK, which is refused) and other frameworks' files. Pickled weights are
# fetched if there are no others.
_NEVER = [
    "original/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*", "*[!g].pt", "*.pth", "*.ckpt", "*.pkl",
    "*.pickle", "*.msgpack", "*.h5", "*.ot", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.tflite", "*.mlmodel",
    "*.nemo", "*.npz", "*.zip", "*.tar", "*.tar.gz",
]  # fmt: skip
_PICKLED = ["pytorch_model.bin", "pytorch_model-*.bin"]
FETCHED = "models/smollm2"  # what `make models` fetches
FETCHES = {  # folder → the command that fetches it
    FETCHED: "make models (93 MB)",
    "models/qwen2.5-coder-0.5b": "make coder (478 MB)",
    "models/qwen2.5-coder-1.5b": "make coder SIZE=1.5b (1.1 GB)",
}
_ONLY_PICKLES = ": its pickled weights, there are no others"
MASK = "mask_embedding.pt"  # of some DFlash drafters, beside their weights; fetched to be refused
MEDUSA = "medusa_lm_head"  # name of a file of heads: .safetensors, or .pt, a pickle


@dataclass(frozen=True)
class ModelFolder:
    """A model or drafter that was found by its name.

    name: as the user wrote it: a folder, a GGUF file or a Hub id.
    path: its folder; of a GGUF file that of the converted copy, of a Hub id that of the download.
    revision: of a Hub id.
    complete: False where the weights of a Hub id may not be here.
    """

    name: str
    path: Path
    revision: str | None = None
    complete: bool = True

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json. Raises FileNotFoundError: there is none. ValueError: it is no JSON object."""
        return config_of(self.path)

    def target_config(self) -> dict[str, Any]:
        """:attr:`config`, of a model. Raises ValueError: it is a drafter's."""
        if "drafter_type" in self.config:
            described = self.config.get("target")
            its = described.get("name_or_path") if isinstance(described, dict) else None
            hint = f"; its target is '{its}'" if its else ""
            raise ValueError(f"{self.path}: this is a drafter, not a target{hint}")
        return self.config


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


def locate(model: str | ModelFolder, revision: str | None = None, *, weights: bool = True) -> ModelFolder:
    """Where a model is, by its name: a :func:`local_folder`, the converted copy of a :func:`gguf_file`, or the download
    of a Hub id (the last two are announced by a line on stderr if there is anything to do). What was located before is
    returned as it is, unless its weights are to be downloaded now.
    ``weights``: whether to download its weights too.
    Raises FileNotFoundError: it is none of these, or cannot be downloaded. ValueError: a GGUF file cannot be converted.
    OSError: the cache cannot be written, or the disk is full."""
    if isinstance(model, ModelFolder):
        if model.complete or not weights:
            return model
        model, revision = model.name, model.revision
    file = gguf_file(model)
    if file is not None:
        return ModelFolder(model, convert_gguf(file), revision)
    folder = known_folder(model)
    if folder is not None:
        return ModelFolder(model, folder, revision)
    left_out = [*_NEVER, "*.bin", *([] if weights else ["*.safetensors"])]
    folder = _download(model, revision, ignore_patterns=left_out)
    if weights and not any(folder.glob("*.safetensors")):
        folder = _download(model, revision, _ONLY_PICKLES, allow_patterns=_PICKLED)
    return ModelFolder(model, folder, revision, complete=weights)


def published_folder(name: str, revision: str | None = None, pickles: bool = False) -> Path:
    """The folder of a drafter that somebody published: a local one, or the download of a Hub id.
    ``pickles``: download pickled weights where there are no others.
    Raises FileNotFoundError: there is none, or it cannot be downloaded."""
    if gguf_file(name) is not None:
        raise FileNotFoundError(f"'{name}': a GGUF file is a model; a folder or Hub id of a drafter is needed")
    folder = known_folder(name)
    if folder is not None:
        return folder
    small = ["config.json", f"{SINGLE}.index.json", "README.md", "provenance.json", "chat_template.jinja", MASK]
    folder = _download(name, revision, allow_patterns=[*small, "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        if not pickles:
            raise FileNotFoundError(f"'{name}': it has no safetensors files; pickled ones are read with --allow-pickle")
        pickled = [*_PICKLED, f"{PICKLE}.index.json", f"{MEDUSA}.pt"]
        folder = _download(name, revision, _ONLY_PICKLES, allow_patterns=[*small, *pickled])
    return folder


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
