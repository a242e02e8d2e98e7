"""Commit: move the accepted nodes' K/V next to the prefix, in every layer of a cache, in one launch.

    slot L + path[d]  →  slot L + d        for d = 1 … length

Parents precede their children, so a path increases and path[d] ≥ d: with d rising, no source was overwritten by an
earlier move. (A parallel gather and scatter in place would race.)

Shape letters: B rows, Hkv key/value heads, S slots, D head width, A depth of the deepest node + 1, L a row's cached
length.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor

from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton


def commit_reference(storage: Tensor, lengths: Tensor, path: Tensor, length: Tensor) -> None:
    """The definition of :func:`commit`: all of a path is read before any of it is written."""
    depth = torch.arange(path.shape[1], device=path.device)
    target = lengths[:, None] + depth
    source = torch.where(depth <= length[:, None], lengths[:, None] + path, target)
    if len(lengths) == 1:
        storage.index_copy_(4, target[0], storage.index_select(4, source[0]))
        return
    slots, row = storage.permute(2, 4, 0, 1, 3, 5), torch.arange(len(lengths), device=path.device)[:, None]
    slots.index_put_((row, target), slots[row, source])


@jit(do_not_specialize="slots path_stride")
def _commit_kernel(
    storage, lengths, path, length, heads, slots, width, path_stride, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program per (layer, key or value), row and block of heads. The same thread loads and
    stores an element at every depth, so the moves happen in the program's order without a barrier."""
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (head < heads)[:, None] & (d < width)[None, :]
    head_stride = slots.to(tl.int64) * width
    base = storage + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + row) * heads * head_stride
    base += tl.load(lengths + row) * width
    tile = base + head.to(tl.int64)[:, None] * head_stride + d[None, :]  # [BLOCK_H, BLOCK_D], of slot L
    for depth in range(1, tl.load(length + row) + 1):
        node = tl.load(path + row * path_stride + depth)
        if node != depth:
            values = tl.load(tile + node * width, mask=inside)
            tl.store(tile + depth * width, values, mask=inside)


def commit(storage: Tensor, lengths: Tensor, path: Tensor, length: Tensor) -> None:
    """Move the accepted nodes' K/V next to the prefix, in place; ``lengths`` stays as it is.

    Args:
        storage: ``[layers, 2, B, Hkv, S, D]``, contiguous; K and V of all layers of one shape.
        lengths: ``[B]`` int64, cached tokens per row before the step (L).
        path: ``[B, A]`` int64 node numbers by depth, the root (0) first; increasing, with path[d] ≥ d, up to the
            accepted length. Entries beyond it are not read.
        length: ``[B]`` int64, drafted tokens accepted (the root does not count), < A.
    """
    if why_not_triton(storage):
        commit_reference(storage, lengths, path, length)
        return
    assert storage.is_contiguous()
    lengths, path, length = dense(lengths), dense(path), dense(length)
    layers, _, rows, heads, slots, width = storage.shape
    # About 1024 elements, so that each thread moves a few elements of a depth at once.
    block_d = next_power(width)
    tile = {"BLOCK_H": min(next_power(heads), max(1, 1024 // block_d)), "BLOCK_D": block_d, "num_warps": 4}
    sizes = (heads, slots, width, path.stride(0))
    with torch.cuda.device_of(storage):
        _commit_kernel[(2 * layers, rows, -(-heads // tile["BLOCK_H"]))](storage, lengths, path, length, *sizes, **tile)
