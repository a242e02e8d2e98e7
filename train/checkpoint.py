"""Checkpoints of a run: trainable weights, optimizer, step. Safetensors and JSON, written whole or not at all.

A checkpoint is a folder ``checkpoints/step-N``; it is filled under a temporary name and renamed, so a folder of that
name is always complete. It has the stage's best weights of its time as well, which a later evaluation may replace.
"""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from draftsmith.common.files import json_object
from draftsmith.models.files.weights import save_tensors
from draftsmith.models.precision import DTYPES

BEST = "best.safetensors"
_ADVICE = "delete that folder to fall back on the checkpoint before it, or pass --restart"


def trainable_state(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that train, by name; tied ones once."""
    return {name: p.detach().cpu().contiguous() for name, p in module.named_parameters() if p.requires_grad}


def save(
    folder: Path,
    step: int,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    state: dict[str, Any],
    keep: int,
    best: Path | None = None,
) -> Path:
    """Write ``folder/step-N`` and delete all but the newest ``keep``.

    Args:
        optimizer: None where its state is kept elsewhere (:mod:`draftsmith.train.sharded`).
        state: ``stage`` (its name), ``best`` (the selection metric's highest value so far), and whatever other JSON the
            caller wants back.
        best: the folder of the stage's best weights, if it was evaluated.

    Raises:
        OSError: the folder cannot be written or the disk is full; nothing that stood before is touched.
    """
    final = folder / f"step-{step}"
    temporary = folder / f".step-{step}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*.tmp"):  # by a killed process
        shutil.rmtree(left)
    try:
        temporary.mkdir()
        save_tensors(trainable_state(module), temporary / "model.safetensors")
        save_tensors(_optimizer_tensors(module, optimizer) if optimizer else {}, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        if best and (best / "model.safetensors").exists():
            _link(best / "model.safetensors", temporary / BEST)
        for file in temporary.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(final)) from None
        raise
    for old in checkpoints(folder)[:-keep]:
        _remove(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    paths = [folder / name for name in names if re.fullmatch(r"step-[0-9]{1,18}", name)]
    return sorted(paths, key=lambda p: int(p.name[5:]))


def _remove(path: Path) -> None:
    """Delete a checkpoint; killed half-way through, none of that name is left."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    path.rename(temporary)
    shutil.rmtree(temporary)


def clear(folder: Path) -> None:
    """Delete all that a run writes into its ``checkpoints``, and nothing else."""
    for path in checkpoints(folder):
        _remove(path)
    for path in [*folder.glob(".step-*.tmp"), folder / "best", folder / "deepspeed"]:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    with contextlib.suppress(OSError):  # it does not exist, or holds files that are not ours
        folder.rmdir()


def read_state(path: Path) -> dict[str, Any]:
    """The state given to :func:`save`, with ``step``."""
    try:
        state = json_object(path / "state.json")
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from None
    step = state.get("step")
    wrong = [] if isinstance(step, int) and f"step-{step}" == path.name else ["step"]
    wrong += [] if isinstance(state.get("stage"), str) else ["stage"]
    wrong += [] if isinstance(state.get("best"), float | int) else ["best"]
    wrong += [] if isinstance(state.get("stage_step", 0), int) else ["stage_step"]  # older ones have none
    wrong += [] if isinstance(state.get("best_step", 0), int) else ["best_step"]
    wrong += [name for name in ("seconds", "used", "lr") if not isinstance(state.get(name, 0), float | int)]  # the same
    wrong += [] if isinstance(state.get("depends_on", {}), dict) else ["depends_on"]
    wrong += [] if state.get("autocast", "none") in ("none", "bfloat16") else ["autocast"]
    wrong += [] if state.get("dtype") in (None, *DTYPES) else ["dtype"]
    if wrong:
        raise _damaged(path, ValueError(f"state.json: '{wrong[0]}' is {json.dumps(state.get(wrong[0]))[:60]}"))
    return state


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: damaged checkpoint ({error}); {_ADVICE}")


def _link(source: Path, path: Path) -> None:
    """Give a file another name, which keeps it when the first one is replaced; a copy where there are no links."""
    try:
        path.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, path)


def restore_best(path: Path, folder: Path) -> None:
    """Write the best weights at the time of a checkpoint into their ``folder``. Older checkpoints have none."""
    if (path / BEST).exists():
        try:
            write_tensors(folder, load_file(path / BEST))
        except (ValueError, SafetensorError) as error:
            raise _damaged(path, error) from None


def restore(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load a checkpoint's weights and optimizer in place."""
    try:
        weights = load_file(path / "model.safetensors")
        moments = load_file(path / "optimizer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, error) from None
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if parameters.keys() != weights.keys() or any(parameters[n].shape != w.shape for n, w in weights.items()):
        raise ValueError(f"{path}: this checkpoint is of a model of another shape; {_ADVICE}")
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    if any(key.rpartition("|")[0] not in parameters for key in moments):
        raise _damaged(path, ValueError("its files are not of one checkpoint"))
    for key, value in moments.items() if optimizer else ():
        assert optimizer is not None
        name, field = key.rsplit("|", 1)
        kept = value.to(parameters[name].device) if field != "step" else value
        optimizer.state[parameters[name]][field] = int(value) if value.dtype == torch.int64 else kept


def _optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``{"parameter|field": tensor}`` of an optimizer whose state is tensors per parameter."""
    names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    return {
        # bitsandbytes counts steps as int, and all its parameters share one qmap, which safetensors refuses.
        f"{names[p]}|{field}": torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
        for p, fields in optimizer.state.items()
        for field, value in fields.items()
    }


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write ``folder/model.safetensors`` whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / "model.safetensors")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read the tensors that :func:`write_tensors` wrote."""
    try:
        return load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: cannot read model.safetensors ({error}); train again with --restart") from None
