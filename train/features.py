"""The frozen target's last hidden states, made once and kept: in memory, or in files of the run's folder that training
reads as if they were memory. Training then does not run the target, nor Medusa-2 its teacher. For EAGLE the inputs of
some layers are kept with them.

A file has the rows of some batches; one process writes it, and it gets its name when it is on the disk. So what a
killed run had made is whole, and the processes, which open the files only after all are written, read them also from a
folder that several machines share.

Shape letters: S rows, T tokens, d hidden width, F features per token.
"""

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from draftsmith.common.command import counted
from draftsmith.common.files import replacing, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.data.packing import Rows
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.models.files.identity import was_asked
from draftsmith.models.target import Target
from draftsmith.train import sharded
from draftsmith.train.launch import console

SAME = 0.2  # of a token's features: relative difference by rounding at most, also of bfloat16 on another device
FILES = 4096  # of one source, at most: each process maps them all, and Linux lets it map 65,530 by default


class Kept:
    """Features ``[S, T, F]`` in files that are mapped. ``rows``: of each file, in turn; the last one may have fewer."""

    def __init__(self, files: Sequence[Tensor], rows: int) -> None:
        self.files, self.rows = files, rows

    def __getitem__(self, place: tuple[int, slice]) -> Tensor:
        """``kept[row, begin:end]``: the features of a row's tokens ``[T, F]``, mapped."""
        row, tokens = place
        return self.files[row // self.rows][row % self.rows, tokens]


def rows_at_once(length: int) -> int:
    """Rows of ``length`` tokens of a forward pass: 32,768 tokens, but no more than 64 rows, so that each process has a
    batch."""
    return min(64, max(1, 32_768 // length))


def hidden_states(
    target: Target,
    rows: Rows,
    dtype: torch.dtype,
    accelerator: Accelerator,
    stored: Path | None = None,
    batch_size: int = 16,
    captures: Sequence[int] = (),
) -> Tensor | Kept:
    """The hidden states of all rows, on the CPU: ``[S, T, F]``, F = d · (1 + number of captured layers).

    Args:
        stored: a folder to keep them in, None for memory. The processes share the work; what a killed run had made is
            not made again, also by another number of processes, except one batch, to compare.
        captures: layers whose inputs follow the last hidden state.

    Raises:
        ValueError: there is no room for them (nothing was written then), some are not finite, or what an earlier run
            kept is not what the target makes.
        OSError: a file cannot be written.
    """
    shape = (len(rows), rows.length, target.hidden_size * (1 + len(captures)))
    size = batch_size * math.ceil(len(rows) / batch_size / FILES)  # rows of a file
    starts, there = range(0, len(rows), size), list[int]()
    bytes_of_row = math.prod(shape[1:]) * dtype.itemsize
    what = f"{shape[0]:,} rows × {shape[1]:,} tokens × {shape[2]:,} take {shape[0] * bytes_of_row / 1e9:.2f} GB"
    if stored:
        request: dict[str, Any] = {"target": target.fingerprint, "rows": rows.samples.sha256(), "share": rows.share}
        request |= {"made_in": [str(target.dtype), torch.is_autocast_enabled(target.device.type)]}
        request |= {"quantized": str(getattr(target.model.config, "quantization_config", None))}
        request |= {"dtype": str(dtype), "shape": list(shape), "batch_size": batch_size, "rows_of_a_file": size}
        request |= {"captures": list(captures)} if captures else {}
        if accelerator.is_main_process and was_asked(stored / "asked.json", request, target.older_fingerprint):
            there = [start for start in starts if _file(stored, start).exists()]
        there = broadcast_object_list([there])[0]  # what one machine sees at once, another may see a minute later
        copies, where = 1, f"on disk in {stored}"
    else:
        copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        where = f"of memory for {counted(copies, 'process')}"
    missing, free = [start for start in starts if start not in set(there)], _free(stored)
    if sum(min(size, len(rows) - start) for start in missing) * bytes_of_row * copies > 0.8 * free:
        raise ValueError(
            f"cache_hidden: {what} {where}, and {free / 1e9:.1f} GB are free; set cache_hidden=none, or fewer rows "
            "(data.train.0.limit)"
        )
    if stored and accelerator.is_main_process and not there:
        shutil.rmtree(stored, ignore_errors=True)
        stored.mkdir(parents=True, exist_ok=True)
        write_json(stored / "asked.json", request)
    accelerator.wait_for_everyone()
    together = stored is None or sharded.spreads()  # each keeps its own, or runs its part of every layer
    own = missing if together else missing[accelerator.process_index :: accelerator.num_processes]

    def make(start: int) -> Iterator[Tensor]:
        """The features of the batches of a file."""
        for begin in range(start, min(start + size, len(rows)), batch_size):
            place = range(begin, min(begin + batch_size, len(rows)))
            batch = {key: value.to(target.device) for key, value in rows.batch(place).items()}
            made = target.features(batch["tokens"].long(), captures, batch.get("positions")).to(dtype)
            wrong = (~made.isfinite()).flatten(1).any(1).nonzero()[:, 0].tolist()
            if wrong:
                numbers = ", ".join(str(place.start + row) for row in wrong)
                raise ValueError(
                    f"cache_hidden: the target's hidden states of row {numbers} are not finite in {dtype}; set "
                    "target.dtype to bfloat16 or float32"
                )
            yield made.cpu()

    def read(start: int) -> Tensor:
        assert stored is not None
        of_file = (min(size, len(rows) - start), *shape[1:])
        return torch.from_file(str(_file(stored, start)), size=math.prod(of_file), dtype=dtype).view(of_file)

    if there:
        made = next(make(there[-1]))
        _compare(read(there[-1])[: len(made)], made, target.hidden_size, str(stored))
    console.print(f"  cache_hidden: {what} {where}, {free / 1e9:.1f} GB are free")
    kept = None if stored else torch.empty(shape, dtype=dtype)
    with ProgressBar("the target's hidden states", len(own), console) as bar:
        for count, start in enumerate(own, 1):
            if kept is not None:
                torch.cat([*make(start)], out=kept[start : start + size])
            elif sharded.spreads() and not accelerator.is_main_process:
                for _ in make(start):
                    pass
            else:
                assert stored is not None
                _write(_file(stored, start), make(start))
            bar(count)
    accelerator.wait_for_everyone()
    if kept is not None:
        return kept
    assert stored is not None
    if not all(_file(stored, start).exists() for start in starts):
        raise ValueError(
            f"{stored}: some rows are missing; on several machines the run's folder has to be shared storage"
        )
    return Kept([read(start) for start in starts], size)


def _file(folder: Path, start: int) -> Path:
    """The file whose first row is ``start``."""
    return folder / f"{start}.bin"


def _write(path: Path, batches: Iterator[Tensor]) -> None:
    """Write tensors one after the other; the file gets its name when all of it is on the disk."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        for made in batches:
            file.write(made.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _compare(kept: Tensor, made: Tensor, width: int, where: str) -> None:
    """Refuse kept features that differ from freshly made ones ``[S, T, F]`` by more than rounding, at any token."""
    parts = [features.float().unflatten(-1, (-1, width)) for features in (kept, made)]
    error = (parts[0] - parts[1]).norm(dim=-1) / parts[1].norm(dim=-1).clamp(min=1e-6)
    if not (error <= SAME).all():  # NaN is not
        raise ValueError(
            f"{where}: the target makes other hidden states than are kept there (relative difference "
            f"{float(error.nan_to_num(nan=torch.inf).max()):.2g}); delete that folder, then --resume"
        )


def _free(stored: Path | None) -> int:
    if stored is None:
        return free_bytes(torch.device("cpu"))
    return shutil.disk_usage(next(folder for folder in stored.parents if folder.exists())).free
