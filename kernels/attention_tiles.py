"""Block sizes of the tree attention kernel (kernels/tree_attention.py): by shape and dtype; on a GPU, the fastest of
:data:`WIDE_TILES` where a key/value head has many rows, measured once on each machine."""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.common.command import first_line
from draftsmith.kernels.backend import multiprocessors, next_power, same_bits
from draftsmith.kernels.measured import gpu_seconds, read_measured, write_measured

PROGRAMS = 2  # per multiprocessor

# By the bytes of an element and the widest head: rows of a program, keys of a block, pipeline stages. Sized by shared
# memory (the queries, and K and V blocks of each stage) of 227 KB: two programs fit, or one of 128 rows or of heads
# wider than 128. Products of float32 are exact, without tensor cores, so their blocks are small.
_TILES = {(4, 128): (16, 16, 2), (4, 256): (16, 16, 2), (2, 128): (128, 64, 3), (2, 256): (64, 32, 2)}


def attention_tile(
    rows: int, width: int, dtype: torch.dtype, pairs: int = 1, multiprocessors: int = 0, capped: bool = False
) -> dict[str, int]:
    """The kernel's block sizes, warps and pipeline stages.

    Args:
        rows: Q · Hq / Hkv, the rows of a key/value head.
        pairs: B · Hkv; two programs of 64 rows take the place of one of 128 where there would be fewer than two per
            multiprocessor, since two of the smaller ones run on one at a time.
        capped: with a soft cap, whose arithmetic needs registers: blocks of fewer keys.
    """
    block_d = next_power(width, 16)
    block_m, block_n, stages = _TILES[dtype.itemsize, max(block_d, 128)]
    if block_m == 128 and pairs * -(-rows // 128) < PROGRAMS * multiprocessors:
        block_m = 64
    if rows <= 64:  # 17 to 32 rows share the kernel of 64: reading K and V takes the time, and compiling seconds
        block_m = min(block_m, 16 if rows <= 16 else 64)
    if capped:
        block_n = min(block_n, 32)
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "num_warps": 8 if block_m * max(block_d, 128) > 64 * 128 else 4,  # the sums are held in registers
        "num_stages": stages,
    }


# What is measured where 128 rows or more of a head meet, in 16 bits and for D ≤ 128: rows, keys, warps, stages.
WIDE_TILES = {
    f"{rows}x{keys}, {warps} warps, {stages} stages": (rows, keys, warps, stages)
    for rows, keys, warps, stages in ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2))
}
FILE = "attention.json"  # in the cache folder
BUDGET = 10.0  # seconds per process for measuring, most of them for compiling; shapes that occur later are not measured
_BEHIND = 1024  # cached tokens of the rows on which tiles are timed
_wide: dict[tuple[torch.device, str], str | None] = {}  # names of WIDE_TILES; None: not measured, for lack of time
_spent = 0.0


class Shape(NamedTuple):
    """What a tile is chosen by: B, Q, Hq, Hkv, D of tree attention, and where."""

    rows: int
    queries: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def of_head(self) -> int:
        """The rows of a key/value head: Q · Hq / Hkv."""
        return self.queries * self.heads // self.kv_heads

    @property
    def wide_key(self) -> str | None:
        """The key under which a tile is measured; None for a shape for which none is. Shapes that give a GPU about as
        many blocks of rows share theirs."""
        if self.of_head < 128 or self.width > 128 or self.dtype.itemsize != 2:
            return None
        blocks = next_power(self.rows * self.kv_heads * -(-self.of_head // 64))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{blocks} blocks, groups of {self.heads // self.kv_heads}, D {self.width}, {dtype}"


def tile_of(shape: Shape, capped: bool = False) -> dict[str, int]:
    """The measured tile of this shape, or that of :func:`attention_tile`."""
    rows, processors = shape.rows * shape.kv_heads, multiprocessors(shape.device)
    tile = attention_tile(shape.of_head, shape.width, shape.dtype, rows, processors, capped)
    key = None if capped or same_bits() else shape.wide_key
    name = None if key is None else _wide.get((shape.device, key))
    if name is None:
        return tile
    block_m, block_n, warps, stages = WIDE_TILES[name]
    return tile | {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def _may_measure(device: torch.device) -> bool:
    """Measuring synchronises, which a CUDA graph's capture forbids, and ``torch.cuda.set_sync_debug_mode``."""
    if device.type != "cuda":
        return False
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0


def measure_tile(shape: Shape, attention: Callable[..., Tensor]) -> None:
    """Find the fastest tile of a shape, once on this machine: stored, or measured now while the budget lasts. One that
    fails, or whose results are far from those of the first, is never chosen. ``attention``: ``(q, k, v, lengths)`` →
    the output, of a chain of queries, by the tile that :func:`tile_of` gives."""
    global _spent
    rows, queries, heads, kv_heads, width, dtype, device = shape
    key = shape.wide_key
    if key is None or (device, key) in _wide or same_bits() or not _may_measure(device):
        return
    stored = read_measured(FILE, device).get(key)
    if stored in WIDE_TILES or _spent >= BUDGET:
        _wide[device, key] = stored if stored in WIDE_TILES else None
        return
    began, seconds, why = time.perf_counter(), {}, "results differ"
    generator = torch.Generator(device).manual_seed(0)  # nobody else's random numbers change
    expected: Tensor | None = None
    for name in WIDE_TILES:
        _wide[device, key] = name
        try:
            q = torch.randn(rows, queries, heads, width, generator=generator, device=device).to(dtype).transpose(1, 2)
            cache = (2, rows, kv_heads, _BEHIND + queries, width)
            keys, values = torch.randn(cache, generator=generator, device=device).to(dtype)
            generator.manual_seed(0)
            attend = partial(attention, q, keys, values, torch.full((rows,), _BEHIND, device=device))
            found = attend().float()
            expected = found if expected is None else expected
            if float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max()):  # not if it is NaN
                seconds[name] = gpu_seconds([attend] * 8, device)
        except torch.AcceleratorError:  # the device's own errors are not passed over
            raise
        except Exception as error:  # Triton's own errors have no common type: this tile does not compile or fit here
            why = first_line(error)
    _spent += time.perf_counter() - began
    _wide[device, key] = min(seconds, key=lambda name: seconds[name]) if seconds else None
    if seconds:
        write_measured(FILE, {key: _wide[device, key]}, device)
    else:
        warnings.warn(f"no tile of attention could be timed for {key} ({why})", stacklevel=2)
