"""The frozen target's last hidden states, made once and kept: in memory, or in a file of the run's folder that training
reads as if it were memory. Training then does not run the target, nor Medusa-2 its teacher. For EAGLE the inputs of
some layers are kept with them.

Shape letters: S rows, T tokens, d hidden width, F features per token.
"""

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor

from draftsmith.common.command import counted
from draftsmith.common.files import write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.data.packing import Rows
from draftsmith.models.files.identity import was_asked
from draftsmith.models.target import Target
from draftsmith.train import sharded
from draftsmith.train.launch import console

SAME = 0.2  # of a token's features: relative difference by rounding at most, also of bfloat16 on another device


def hidden_states(
    target: Target,
    rows: Rows,
    dtype: torch.dtype,
    accelerator: Accelerator,
    stored: Path | None = None,
    batch_size: int = 16,
    captures: Sequence[int] = (),
) -> Tensor:
    """The hidden states of all rows, on the CPU: ``[S, T, F]``, F = d · (1 + number of captured layers).

    Args:
        stored: a file to keep them in (with ``.json`` and ``.done`` beside it), None for memory. The processes share
            the work and the file; what a killed run had made is not made again, except one batch, to compare.
        captures: layers whose inputs follow the last hidden state.

    Raises:
        ValueError: there is no room for them (nothing was written then), some are not finite, or what an earlier run
            kept is not what the target makes.
    """
    shape = (len(rows), rows.length, target.hidden_size * (1 + len(captures)))
    needed, free = math.prod(shape) * dtype.itemsize, _free(stored)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed *= 1 if stored else processes
    what = f"{shape[0]:,} rows × {shape[1]:,} tokens × {shape[2]:,} take {needed / 1e9:.2f} GB"
    where = f"on disk in {stored.parent}" if stored else f"of memory for {counted(processes, 'process')}"
    done = torch.zeros(-(-shape[0] // batch_size), dtype=torch.uint8)  # by batch
    if stored:
        request: dict[str, Any] = {"target": target.fingerprint, "rows": rows.samples.sha256(), "share": rows.share}
        request |= {"made_in": [str(target.dtype), torch.is_autocast_enabled(target.device.type)]}
        request |= {"quantized": str(getattr(target.model.config, "quantization_config", None))}
        request |= {"dtype": str(dtype), "shape": list(shape), "batch_size": batch_size}
        request |= {"captures": list(captures)} if captures else {}
        with accelerator.main_process_first():
            reusable = stored.exists() and was_asked(stored.with_suffix(".json"), request, target.older_fingerprint)
            if not reusable:
                _check(what, needed, free, where)
                if accelerator.is_main_process:
                    stored.parent.mkdir(parents=True, exist_ok=True)
                    for path, size in ((stored, needed), (stored.with_suffix(".done"), len(done))):
                        path.unlink(missing_ok=True)
                        _take_room(path, size)
                    write_json(stored.with_suffix(".json"), request)
            kept = torch.from_file(str(stored), shared=True, size=math.prod(shape), dtype=dtype).view(shape)
            done = torch.from_file(str(stored.with_suffix(".done")), shared=True, size=len(done), dtype=torch.uint8)
    else:
        _check(what, needed, free, where)
        kept = torch.empty(shape, dtype=dtype)
    accelerator.wait_for_everyone()
    missing, reused = (done == 0).nonzero()[:, 0].tolist(), done.nonzero()[:, 0].tolist()
    accelerator.wait_for_everyone()  # everyone has looked before anyone writes
    together = stored is None or sharded.spreads()  # each keeps its own, or runs its part of every layer
    numbers = missing if together else missing[accelerator.process_index :: accelerator.num_processes]

    def make(number: int) -> tuple[slice, Tensor]:
        place = range(number * batch_size, min((number + 1) * batch_size, len(rows)))
        batch = {key: value.to(target.device) for key, value in rows.batch(place).items()}
        made = target.features(batch["tokens"].long(), captures, batch.get("positions"))
        wrong = (~made.to(dtype).isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
        if wrong:
            numbers = ", ".join(str(place.start + row) for row in wrong)
            raise ValueError(
                f"cache_hidden: the target's hidden states of row {numbers} are not finite in {dtype}; set "
                "target.dtype to bfloat16 or float32"
            )
        return slice(place.start, place.stop), made

    if reused:
        place, made = make(reused[-1])  # the last one: what a crash of the machine is likeliest to lose
        _compare(kept[place], made.cpu().to(dtype), target.hidden_size, str(stored))
    writes = stored is None or not sharded.spreads() or accelerator.is_main_process
    console.print(f"  cache_hidden: {what} {where}, {free / 1e9:.1f} GB are free")
    with ProgressBar("the target's hidden states", len(numbers), console) as bar:
        for count, number in enumerate(numbers, 1):
            place, made = make(number)
            if writes:
                kept[place] = made
                done[number] = 1
            bar(count)
    accelerator.wait_for_everyone()
    if stored and not done.all():
        raise ValueError(
            f"{stored}: some rows are missing; on several machines the run's folder has to be shared storage"
        )
    return kept


def _compare(kept: Tensor, made: Tensor, width: int, where: str) -> None:
    """Refuse kept features that differ from freshly made ones ``[S, T, F]`` by more than rounding, at any token."""
    parts = [features.float().unflatten(-1, (-1, width)) for features in (kept, made)]
    error = (parts[0] - parts[1]).norm(dim=-1) / parts[1].norm(dim=-1).clamp(min=1e-6)
    if not (error <= SAME).all():  # NaN is not
        raise ValueError(
            f"{where}: the target makes other hidden states than are kept there (relative difference "
            f"{float(error.nan_to_num(nan=torch.inf).max()):.2g}); delete that file, then --resume"
        )


def _take_room(path: Path, size: int) -> None:
    """Write a file of zeros whose disk space is allocated: a full disk behind a memory map would kill the process."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _free(stored: Path | None) -> int:
    if stored is None:
        return psutil.virtual_memory().available
    return shutil.disk_usage(next(folder for folder in stored.parents if folder.exists())).free


def _check(what: str, needed: int, free: int, where: str) -> None:
    if needed > 0.8 * free:
        raise ValueError(
            f"cache_hidden: {what} {where}, and {free / 1e9:.1f} GB are free; set cache_hidden=none, or fewer rows "
            "(data.train.0.limit)"
        )
