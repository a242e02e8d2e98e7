"""Tree attention: Q tree nodes attend to a cached prefix and to their own ancestors (SpecInfer, arXiv 2305.09781 §4.2).

    out_i = softmax_j( q_i · k_j · scale + bias_ij ) v_j
    bias_ij = 0 if j < L (the prefix), or j − L is i or an ancestor of i; else −inf

The keys that a query sees are given in one of two ways. :func:`tree_attention` takes an additive bias, computed once
per step, and calls PyTorch's fused attention. :func:`tree_attention_cached` takes lengths and ancestor bitsets and
reads exactly the used slots of a preallocated cache: a Triton kernel whose shapes and grid do not depend on the
lengths, so that it can be captured in a CUDA graph.

That kernel reads a row's keys in tiles of 64 slots. Long rows are split (flash decoding): a fixed number of *items*,
each a range of a row's tiles, is divided among the rows by their lengths on the device, once per forward pass
(:func:`tree_work`). A row with several items has partial results, which a second kernel merges by their softmax sums.

Shape letters: B batch, Q queries, N tree nodes, T tree keys, W 64-bit words, I items, Hq query heads, Hkv key/value
heads, S cache slots seen, D head width, L the cached length of a row. Node i of a row is in slot L + i; its position
is L + depth(i).
"""
# ruff: noqa: ANN001, ANN201, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import ctypes
import math
import time
import warnings
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.common.command import first_line
from draftsmith.kernels import cpu
from draftsmith.kernels.backend import (
    INTERPRETING,
    dense,
    jit,
    multiprocessors,
    next_power,
    same_bits,
    tl,
    traceable,
    triton,
    why_not_triton,
)
from draftsmith.kernels.measured import gpu_seconds, read_measured, write_measured

TILE = 64  # slots; the bits of a tile of tree keys are one word
MIN_SHARE = 2  # tiles of an item of a row that is split, at least
PROGRAMS = 2  # per multiprocessor


def ancestor_mask(ancestors: Tensor, num_nodes: int) -> Tensor:
    """Unpack ancestor bitsets.

    Args:
        ancestors: ``[B, N, W]`` int64; bit j of row i (word j // 64) is set if node j is node i or an ancestor of it.

    Returns:
        ``[B, N, num_nodes]`` bool.
    """
    bit = torch.arange(num_nodes, device=ancestors.device)
    return (ancestors[..., bit // 64] >> (bit % 64)) & 1 != 0


def causal_ancestors(nodes: int, device: torch.device) -> Tensor:
    """Ancestor bitsets ``[1, N, W]`` of a chain: node i sees nodes 0 … i. Those of a shorter chain are their beginning:
    ``[:, :n, :w]`` for n nodes in w words."""
    first = torch.arange(0, nodes, 64, device=device)
    bits = (torch.arange(1, nodes + 1, device=device)[:, None] - first).clamp(0, 64)  # of each word: its lowest ones
    one = torch.ones_like(bits)
    return torch.where(bits == 64, -one, (one << bits.clamp(max=63)) - 1)[None]


class Work(NamedTuple):
    """The items of :func:`tree_attention_cached`: ranges of tiles, divided among the rows by :func:`tree_work`.

    items: ``[I, 3]`` int32: row (−1: the item is not in use), first tile, end tile. The tiles of a row are those of its
        prefix, from the first slot that some query sees, and then those of its tree.
    first, count: ``[B]`` int32, each row's first item and its number of items. Rows with several items come first.
    """

    items: Tensor
    first: Tensor
    count: Tensor


class TreeKeys(NamedTuple):
    """The keys that the Q queries of a forward pass see, as :func:`tree_attention_cached` takes them.

    lengths: ``[B]`` int64, cached tokens per row (L).
    ancestors: ``[B, Q, W]`` int64 bitsets over the tree keys.
    depth: ``[B, Q]`` int32 of the queries.
    key_depth: ``[B, T]`` int32 of the tree keys, which are in slots L, L + 1, ….
    work: by window, for all layers of the pass; a layer whose window is missing computes its own. A plan may be made
        for longer prefixes and more tree keys (:class:`Plans`).
    same_bits: a query's bits may depend on its keys by position alone (:mod:`draftsmith.kernels.step_attention`), which
        needs no plan; no node is deeper than ``TILE``.
    """

    lengths: Tensor
    ancestors: Tensor
    depth: Tensor
    key_depth: Tensor
    work: Mapping[int, Work] | None = None
    same_bits: bool = False


def tree_bias(
    lengths: Tensor,
    mask: Tensor,
    depth: Tensor,
    slots: int,
    window: int,
    dtype: torch.dtype,
    key_depth: Tensor | None = None,
) -> Tensor:
    """The additive mask of a tree that follows each row's prefix.

    Args:
        lengths: ``[B]`` int64, cached tokens per row (L).
        mask: ``[B, Q, T]`` bool, as :func:`ancestor_mask` makes it: which of the T tree keys a query sees.
        depth: ``[B, Q]`` depth of each query, the root's being 0.
        slots: S, the number of cache slots attended to; at least max(L) + T.
        window: a node at position p sees keys at positions > p − window; 0 for no window.
        key_depth: ``[B, T]`` depth of the tree keys; the queries' own if left out (T = Q).

    Returns:
        ``[B, 1, Q, S]`` of ``dtype``: 0 or −inf. Every query sees at least itself.
    """
    queries, keys = mask.shape[1:]
    offset = torch.arange(slots, device=lengths.device) - lengths[:, None]  # [B, S], ≥ 0 inside the tree
    inside = offset.clamp(0, keys - 1)
    seen = mask.expand(len(lengths), -1, -1).gather(2, inside[:, None, :].expand(-1, queries, -1))
    seen = seen & (offset < keys)[:, None] | (offset < 0)[:, None]
    if window:
        node_depth = (depth if key_depth is None else key_depth).expand(len(lengths), -1)
        position = torch.where(offset < 0, offset, node_depth.gather(1, inside).to(offset.dtype))  # minus L
        seen = seen & (depth[..., None] - position[:, None] < window)
    return torch.zeros(seen.shape, dtype=dtype, device=lengths.device).masked_fill_(~seen, float("-inf"))[:, None]


def tree_bias_one_row(mask: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """:func:`tree_bias` for a single row without a window whose prefix and tree fill all slots: L = S − T.

    Args:
        mask: ``[1, Q, T]`` bool.

    Returns:
        ``[1, 1, Q, S]``.
    """
    inside = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return F.pad(inside, (slots - mask.shape[2], 0))[:, None]


def causal_bias(start: int, queries: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask of a prompt's chunk ``[start, start + queries)`` over all slots up to its end.

    Returns:
        ``[1, 1, queries, start + queries]`` of ``dtype``: 0 or −inf.
    """
    distance = torch.arange(start, start + queries, device=device)[:, None] - torch.arange(
        start + queries, device=device
    )
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    return torch.zeros(distance.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))[None, None]


def tree_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """The definition of tree attention; heads of a group share keys and values.

    Args:
        q: ``[B, Hq, Q, D]``.
        k, v: ``[B, Hkv, S, D]``, the cache with the tree's own keys already in their slots.
        bias: ``[B or 1, 1, Q, S]`` additive, or None if every query sees every slot.
        scale: factor on q · k.
        softcap: scores become ``softcap · tanh(score / softcap)`` before the bias (Gemma 2).

    Returns:
        ``[B, Hq, Q, D]``.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """:func:`tree_attention_reference` by PyTorch's fused attention where there is no soft cap, which that lacks."""
    if softcap is not None:
        return tree_attention_reference(q, k, v, bias, scale, softcap)
    if q.shape[2] == 1 and q.shape[1] != k.shape[1]:  # the heads of a group as queries of one head
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        return F.scaled_dot_product_attention(grouped, k, v, bias, scale=scale).reshape(q.shape)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def tree_attention_cached_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    num_tree_keys: int,
    scale: float,
    depth: Tensor | None = None,
    key_depth: Tensor | None = None,
    window: int = 0,
    softcap: float | None = None,
) -> Tensor:
    """The definition of :func:`tree_attention_cached`, row by row (it synchronises to read each row's length)."""
    mask = ancestor_mask(ancestors, num_tree_keys)  # [B, Q, T]
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        end = length + num_tree_keys
        seen = F.pad(mask[row], (length, 0), value=True)  # [Q, L + T]
        if window:
            assert depth is not None and key_depth is not None
            position = torch.cat([torch.arange(-length, 0, device=q.device), key_depth[row]])  # minus L
            seen = seen & (depth[row][:, None] - position < window)
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
        of_row = slice(row, row + 1)
        attended = tree_attention_reference(
            q[of_row], k[of_row, :, :end], v[of_row, :, :end], bias[None, None], scale, softcap
        )
        out[of_row] = torch.where(seen.any(-1)[:, None], attended, 0)  # padding may see nothing
    return out


def tree_work_reference(
    lengths: Tensor, num_tree_keys: int, num_items: int, window: int = 0, min_share: int = MIN_SHARE
) -> Work:
    """The definition of :func:`tree_work`."""
    first_slot = (lengths - window + 1).clamp(min=0) if window else 0
    tiles = (lengths - first_slot + TILE - 1) // TILE + -(-num_tree_keys // TILE)  # [B]
    parts = num_items - len(lengths) + 1
    count = torch.minimum(tiles * parts // tiles.sum(), tiles // min_share).clamp(min=1)
    split = count > 1
    among_split, among_whole = (torch.where(part, count, 0) for part in (split, ~split))
    first = torch.where(split, among_split.cumsum(0), among_split.sum() + among_whole.cumsum(0)) - count
    number = torch.arange(num_items, device=lengths.device)[:, None] - first  # [I, B], within the row
    inside = (number >= 0) & (number < count)
    row = inside.int().argmax(1)
    number, of_row, many = number.gather(1, row[:, None])[:, 0], tiles[row], count[row]
    items = torch.stack((row, number * of_row // many, (number + 1) * of_row // many), 1)
    items = torch.where(inside.any(1, keepdim=True), items, torch.tensor([-1, 0, 0], device=items.device))
    return Work(items.int(), first.int(), count.int())


@jit(do_not_specialize=["rows", "num_tree_keys", "num_items"])
def _work_kernel(
    lengths,
    items,
    first,
    count,
    rows,
    num_tree_keys,
    num_items,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program per item; each looks at all rows, and the first one writes what is known of them."""
    item = tl.program_id(0)
    row = tl.arange(0, BLOCK_B)
    exists = row < rows
    length = tl.load(lengths + row, mask=exists, other=0)
    if WINDOW:
        length = tl.minimum(length, WINDOW - 1)
    tiles = tl.where(exists, tl.cdiv(length, TILE) + tl.cdiv(num_tree_keys, TILE), 0).to(tl.int64)
    parts = tiles * (num_items - rows + 1) // tl.sum(tiles, 0)
    parts = tl.maximum(tl.minimum(parts, tiles // MIN_SHARE), 1).to(tl.int32)
    among_split, among_whole = tl.where(exists & (parts > 1), parts, 0), tl.where(exists & (parts == 1), 1, 0)
    before = tl.cumsum(among_whole, 0) + tl.sum(among_split, 0)
    start = tl.where(parts > 1, tl.cumsum(among_split, 0), before) - parts
    if item == 0:
        tl.store(first + row, start, mask=exists)
        tl.store(count + row, parts, mask=exists)

    mine = exists & (item >= start) & (item < start + parts)
    many = tl.sum(tl.where(mine, parts, 0), 0)  # 0: the item is not in use
    number = tl.sum(tl.where(mine, item - start, 0), 0)
    of_row = tl.sum(tl.where(mine, tiles, 0), 0)
    tl.store(items + item * 3, tl.where(many > 0, tl.sum(tl.where(mine, row, 0), 0), -1))
    tl.store(items + item * 3 + 1, (number * of_row // tl.maximum(many, 1)).to(tl.int32))
    tl.store(items + item * 3 + 2, ((number + 1) * of_row // tl.maximum(many, 1)).to(tl.int32))


def _tree_work(
    lengths: Tensor, num_tree_keys: int, num_items: int, window: int, min_share: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; the arguments are those of :func:`tree_work`."""
    items = lengths.new_empty((num_items, 3), dtype=torch.int32)
    first = lengths.new_empty((len(lengths),), dtype=torch.int32)
    count = torch.empty_like(first)
    with torch.cuda.device_of(lengths):
        sizes = (len(lengths), num_tree_keys, num_items)
        tile = {"TILE": TILE, "MIN_SHARE": min_share, "BLOCK_B": next_power(len(lengths), 32), "num_warps": 1}
        traceable(_work_kernel)[(num_items,)](lengths, items, first, count, *sizes, WINDOW=window, **tile)
    return items, first, count


if triton is not None:
    # As an operator, so that torch.compile and torch.export see through it to the kernel.
    _tree_work_op = torch.library.triton_op("draftsmith::tree_work", _tree_work, mutates_args=())


def tree_work(lengths: Tensor, num_tree_keys: int, num_items: int, window: int = 0, min_share: int = MIN_SHARE) -> Work:
    """Divide the tiles of all rows among a fixed number of items, without host synchronisation.

    A row has ⌊(I − B + 1) · its tiles / all tiles⌋ items of about equal size, but at least one, and none of fewer than
    ``min_share`` tiles unless that is all the row has. Rows that are split have at most I − B + 1 items together.

    Args:
        lengths: ``[B]`` int64, cached tokens per row (L).
        num_tree_keys: T.
        num_items: I ≥ B, see :func:`attention_items`.
        window: as in :func:`tree_attention_cached`.
        min_share: tiles.
    """
    assert num_items >= len(lengths)
    if why_not_triton(lengths):
        return tree_work_reference(lengths, num_tree_keys, num_items, window, min_share)
    return Work(*_tree_work_op(lengths, num_tree_keys, num_items, window, min_share))


def runs_kernel(tensor: Tensor, width: int) -> bool:
    """Whether tree attention of heads of this width is a kernel for a tensor's device and dtype; its tiles hold at most
    256."""
    return (why_not_triton(tensor) is None or cpu.runs(tensor)) and width <= 256


class Plans:
    """The plans of a step's forward passes, those of drafters too, each made when it is first asked for.

    A plan also serves passes of shorter prefixes and fewer tree keys: the kernel reads no tile beyond a row's own.

    Args:
        lengths: ``[B]`` int64, the longest prefix of each row in any of the passes; unchanged until the last one.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.made: dict[tuple[int, int, int], Work] = {}

    def work(self, num_tree_keys: int, num_items: int, window: int = 0) -> Work | None:
        """:func:`tree_work` for at least ``num_tree_keys`` tree keys; None if no row is split."""
        if num_items == len(self.lengths):
            return None
        key = -(-num_tree_keys // TILE) * TILE, num_items, window
        if key not in self.made:
            self.made[key] = tree_work(self.lengths, *key)
        return self.made[key]


@jit
def add_tile(q, cache, slot, stored, seen, sums, log2_scale, softcap, SOFTCAP: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add a tile of keys to the running softmax (base 2): its maximum, its sum, and the weighted values.

    cache: pointers to keys and values, strides of their slots, the head width. stored ``[BLOCK_N]``: slots that hold
    keys; seen ``[BLOCK_M or 1, BLOCK_N]``: those that a row sees.
    """
    k, v, k_stride, v_stride, width = cache
    best, total, acc = sums
    d = tl.arange(0, BLOCK_D)
    place = slot.to(tl.int64)
    keys = tl.load(
        k + place[None, :] * k_stride + d[:, None], mask=stored[None, :] & (d < width)[:, None], other=0.0
    )  # [BLOCK_D, BLOCK_N]
    scores = tl.dot(q, keys, input_precision="ieee")
    if SOFTCAP:
        x = scores * (log2_scale / (softcap * 1.4426950408889634))
        # tanh: by its series near 0, where 1 − 2 / (e^2x + 1) would cancel
        x2 = x * x
        series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
        closed_form = 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1)
        scores = tl.where(x2 < 0.0625, series, closed_form) * (softcap * 1.4426950408889634)
    else:
        scores = scores * log2_scale
    scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    anchor = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row may have seen nothing yet
    weights = tl.exp2(scores - anchor[:, None])
    rescale = tl.exp2(best - anchor)
    values = tl.load(
        v + place[:, None] * v_stride + d[None, :], mask=stored[:, None] & (d < width)[None, :], other=0.0
    )  # [BLOCK_N, BLOCK_D]
    acc = acc * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_best, total * rescale + tl.sum(weights, 1), acc


@jit(
    do_not_specialize=[
        "ancestors",
        "depth",
        "key_depth",
        "num_queries",
        "num_tree_keys",
        "ancestors_batch",
        "ancestors_query",
        "depth_batch",
        "key_depth_batch",
    ]
)
def _tree_attention_kernel(
    q,
    k,
    v,
    lengths,
    ancestors,
    depth,
    key_depth,
    items,
    first_item,
    count,
    out,
    partial,
    partial_lse,
    arrived,
    num_queries,
    num_tree_keys,
    width,
    log2_scale,
    softcap,
    q_batch,
    q_head,
    q_query,
    k_batch,
    k_head,
    k_slot,
    v_batch,
    v_head,
    v_slot,
    out_batch,
    out_head,
    out_query,
    ancestors_batch,
    ancestors_query,
    depth_batch,
    key_depth_batch,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANNED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per block of (query, head of the group) rows, key/value head and item; without a plan, an item is all
    of a row of the batch.

    With ``arrived``, a zero for each row of the batch and key/value head, and one block of rows, the last of a row's
    items to come merges all of them and leaves a zero.

    The blocks of BLOCK_N keys divide a tile, so that the bits of a block of tree keys lie in one word.
    """
    log2_scale, softcap = tl.cast(log2_scale, tl.float32), tl.cast(softcap, tl.float32)  # float64 in torch.compile
    item = tl.program_id(2)
    batch, parts = item, 1
    if PLANNED:
        batch = tl.load(items + item * 3)
        if batch < 0:
            return
        parts = tl.load(count + batch)
    batch = batch.to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    exists = query < num_queries
    d = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (d < width)[None, :]
    length = tl.load(lengths + batch)

    rows_q = q + batch * q_batch + head * q_head + query * q_query
    queries = tl.load(rows_q[:, None] + d[None, :], mask=inside, other=0.0)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    cache = (k, v, k_slot, v_slot, width)
    first = length * 0  # the first slot that any query sees
    if WINDOW:
        first = tl.maximum(length - WINDOW + 1, 0)
        own_depth = tl.load(depth + batch * depth_batch + query, mask=exists, other=0)
    prefix_tiles = tl.cdiv(length - first, TILE)
    start = prefix_tiles * 0
    end = prefix_tiles + tl.cdiv(num_tree_keys, TILE)
    if PLANNED:
        start = tl.load(items + item * 3 + 1).to(tl.int64)
        end = tl.load(items + item * 3 + 2).to(tl.int64)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(
        start * (TILE // BLOCK_N), tl.minimum(end * (TILE // BLOCK_N), tl.cdiv(length - first, BLOCK_N))
    ):
        slot = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        stored = slot < length
        seen = stored[None, :]
        if WINDOW:
            seen = seen & (slot[None, :] - length > own_depth[:, None] - WINDOW)
        best, total, acc = add_tile(
            queries, cache, slot, stored, seen, (best, total, acc), log2_scale, softcap, SOFTCAP, BLOCK_D
        )
    start = tl.maximum(start - prefix_tiles, 0) * (TILE // BLOCK_N)
    end = (end - prefix_tiles) * (TILE // BLOCK_N)
    for block in range(start, tl.minimum(end, tl.cdiv(num_tree_keys, BLOCK_N))):
        begin = block * BLOCK_N
        node = begin + tl.arange(0, BLOCK_N)
        stored = node < num_tree_keys
        word = tl.load(
            ancestors + batch * ancestors_batch + query * ancestors_query + begin // 64, mask=exists, other=0
        )
        seen = ((word[:, None] >> (node % 64)[None, :]) & 1) != 0
        seen = seen & stored[None, :]
        if WINDOW:
            its_depth = tl.load(key_depth + batch * key_depth_batch + node, mask=stored, other=0)
            seen = seen & (own_depth[:, None] - its_depth[None, :] < WINDOW)
        best, total, acc = add_tile(
            queries, cache, length + node, stored, seen, (best, total, acc), log2_scale, softcap, SOFTCAP, BLOCK_D
        )

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if parts == 1:
        rows_out = out + batch * out_batch + head * out_head + query * out_query
        tl.store(rows_out[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:  # [I − B + 1, Q, Hq, D] and [I − B + 1, Q, Hq]
        place = (item.to(tl.int64) * num_queries + query) * (KV_HEADS * GROUP) + head
        tl.store(partial + place[:, None] * width + d[None, :], acc, mask=inside)
        lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + place, lse, mask=exists)
        if arrived is not None:
            tl.debug_barrier()  # every thread's part is stored before this program counts as arrived
            counter = arrived + batch * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
                tl.store(counter, 0)
                place = (tl.load(first_item + batch).to(tl.int64) * num_queries + query) * (KV_HEADS * GROUP) + head
                item_stride = num_queries.to(tl.int64) * (KV_HEADS * GROUP)
                best = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for begin in range(0, parts, 4):
                    for number in tl.static_range(4):  # unrolled: the loads do not wait for one another
                        used = exists & (row * 0 + begin + number < parts)
                        at = place + (begin + number) * item_stride
                        # Past the first-level cache: other multiprocessors wrote these.
                        lse = tl.load(partial_lse + at, mask=used, other=float("-inf"), cache_modifier=".cg")
                        values = tl.load(
                            partial + at[:, None] * width + d[None, :],
                            mask=inside & used[:, None],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        new_best = tl.maximum(best, lse)
                        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
                        weights, rescale = tl.exp2(lse - anchor), tl.exp2(best - anchor)
                        acc = acc * rescale[:, None] + values * weights[:, None]
                        total = total * rescale + weights
                        best = new_best
                acc = acc / tl.where(total > 0, total, 1.0)[:, None]
                rows_out = out + batch * out_batch + head * out_head + query * out_query
                tl.store(rows_out[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_queries"])
def _merge_items_kernel(
    partial,
    partial_lse,
    first,
    count,
    out,
    num_queries,
    width,
    HEADS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine a row's items, weighted by their softmax sums: one query and block of heads per program."""
    batch = tl.program_id(2).to(tl.int64)
    items = tl.load(count + batch)
    if items < 2:  # written directly
        return
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    start = tl.load(first + batch)
    best = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for begin in range(0, items, BLOCK_I):
        number = begin + tl.arange(0, BLOCK_I)
        used = (number < items)[:, None] & (head < HEADS)[None, :]
        place = ((start + number).to(tl.int64)[:, None] * num_queries + query) * HEADS + head[None, :]
        lse = tl.load(partial_lse + place, mask=used, other=float("-inf"))  # [BLOCK_I, BLOCK_H]
        new_best = tl.maximum(best, tl.max(lse, 0))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(lse - anchor[None, :])
        rescale = tl.exp2(best - anchor)
        values = tl.load(
            partial + place[:, :, None] * width + d[None, None, :],
            mask=used[:, :, None] & (d < width)[None, None, :],
            other=0.0,
        )
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * values, 0)
        total = total * rescale + tl.sum(weights, 0)
        best = new_best
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = (batch * num_queries + query) * HEADS + head
    inside = (head < HEADS)[:, None] & (d < width)[None, :]
    tl.store(out + place[:, None] * width + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


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


def _wide_key(rows: int, queries: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> str | None:
    """The key of a shape for which tiles are measured; None for any other. Shapes that give a GPU about as many blocks
    of rows share theirs."""
    of_head = queries * heads // kv_heads
    if of_head < 128 or width > 128 or dtype.itemsize != 2:
        return None
    blocks = next_power(rows * kv_heads * -(-of_head // 64))
    return f"{blocks} blocks, groups of {heads // kv_heads}, D {width}, {str(dtype).removeprefix('torch.')}"


def _tile(
    rows: int,
    queries: int,
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    capped: bool = False,
) -> dict[str, int]:
    """The measured tile of this shape, or that of :func:`attention_tile`."""
    of_head, key = queries * heads // kv_heads, _wide_key(rows, queries, heads, kv_heads, width, dtype)
    tile = attention_tile(of_head, width, dtype, rows * kv_heads, multiprocessors(device), capped)
    name = None if key is None or capped or same_bits() else _wide.get((device, key))
    if name is None:
        return tile
    block_m, block_n, warps, stages = WIDE_TILES[name]
    return tile | {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def _may_measure(device: torch.device) -> bool:
    """Measuring synchronises, which a CUDA graph's capture forbids, and ``torch.cuda.set_sync_debug_mode``."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() == 0


def _measure_tile(
    rows: int, queries: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Find the fastest tile of a shape, once on this machine: stored, or measured now while the budget lasts. One that
    fails, or whose results are far from those of the first, is never chosen."""
    global _spent
    key = _wide_key(rows, queries, heads, kv_heads, width, dtype)
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
            shape = (2, rows, kv_heads, _BEHIND + queries, width)
            q = torch.randn(rows, queries, heads, width, generator=generator, device=device).to(dtype).transpose(1, 2)
            keys, values = torch.randn(shape, generator=generator, device=device).to(dtype)
            generator.manual_seed(0)
            ancestors = causal_ancestors(queries, device).expand(rows, -1, -1)
            lengths = torch.full((rows,), _BEHIND, device=device)
            attend = partial(tree_attention_cached, q, keys, values, lengths, ancestors, queries, width**-0.5)
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


def attention_items(
    rows: int, queries: int, heads: int, kv_heads: int, width: int, slots: int, dtype: torch.dtype, device: torch.device
) -> int:
    """The number of items (I) for a batch: B, and as many more as the device runs at a time and the capacity can use.
    Where a GPU meets such a shape first, the kernel's tile for it is measured.

    It depends on the cache's capacity S, not on the cached lengths, so the grid is the same at every step.

    Args:
        rows, queries, heads, kv_heads, width, slots: B, Q, Hq, Hkv, D, S.
    """
    if device.type == "cpu" and not INTERPRETING:  # kernels/cpu.cpp does not split rows
        return rows
    _measure_tile(rows, queries, heads, kv_heads, width, dtype, device)
    tile = _tile(rows, queries, heads, kv_heads, width, dtype, device)
    at_a_time = PROGRAMS * multiprocessors(device) // (kv_heads * -(-(queries * heads // kv_heads) // tile["BLOCK_M"]))
    of_row = (-(-slots // TILE) + 1) // MIN_SHARE  # a prefix and a tree may each end within a tile
    return rows + max(0, min(at_a_time, rows * of_row) - 1) if of_row > 1 else rows


def _tree_attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    depth: Tensor | None,
    key_depth: Tensor | None,
    items: Tensor | None,
    first: Tensor | None,
    count: Tensor | None,
    num_tree_keys: int,
    scale: float,
    window: int,
    softcap: float,
    arrived: Tensor | None = None,
) -> Tensor:
    """Launch the kernels; the arguments are those of :func:`tree_attention_cached`, softcap 0 for None; without a plan
    (items, first, count) each row is one item. ``arrived``: zeros, at least as many as the kernel's; None: a second
    kernel merges the items."""
    rows, heads, queries, width = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    tile = _tile(rows, queries, heads, kv_heads, width, q.dtype, q.device, softcap != 0)
    row_blocks = -(-queries * group // tile["BLOCK_M"])
    num_items = rows if items is None else len(items)
    # In memory [B, Q, Hq, D]: the caller's next step is a projection over Hq · D.
    out = q.new_empty(rows, queries, heads, width).transpose(1, 2)
    parts = 0 if items is None else num_items - rows + 1  # only rows that are split have partial results
    partial = q.new_empty((parts, queries, heads, width), dtype=torch.float32)
    lse = q.new_empty((parts, queries, heads), dtype=torch.float32)
    depths = (0 if one is None else one.stride(0) for one in (depth, key_depth))
    caches = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    strides = (*caches, *out.stride()[:3], *ancestors.stride()[:2], *depths)  # computed from others, out's would spill
    tensors = (q, k, v, lengths, ancestors, depth, key_depth, items, first, count, out, partial, lse, arrived)
    numbers = (queries, num_tree_keys, width, scale * math.log2(math.e), softcap)
    tile |= {"KV_HEADS": kv_heads, "GROUP": group, "PLANNED": items is not None, "WINDOW": window}
    tile |= {"SOFTCAP": softcap != 0, "TILE": TILE}
    with torch.cuda.device_of(q):
        traceable(_tree_attention_kernel)[(row_blocks, kv_heads, num_items)](*tensors, *numbers, *strides, **tile)
        if items is not None and arrived is None:
            block_h = min(4, next_power(heads))
            merged = {"HEADS": heads, "BLOCK_I": 8, "BLOCK_H": block_h, "BLOCK_D": tile["BLOCK_D"], "num_warps": 4}
            traceable(_merge_items_kernel)[(queries, -(-heads // block_h), rows)](
                partial, lse, first, count, out, queries, width, **merged
            )
    return out


if triton is not None:
    # As an operator, so that torch.compile and torch.export see through it to the kernels.
    _tree_attention_op = torch.library.triton_op(
        "draftsmith::tree_attention_cached", _tree_attention_cached, mutates_args=()
    )

# Whether the last program of a row's items merges them, in place of a second kernel; to be decided by measuring.
LAST_MERGES = False
_arrived: dict[torch.device, Tensor] = {}
_COUNTERS = 4096


def _counters(number: int, device: torch.device) -> Tensor | None:
    """Zeros for the attention kernel, which leaves zeros: one launch at a time may use them. They are allocated once,
    since CUDA graphs keep their address. None for too many, and where they cannot be allocated for good: in a capture,
    or in ``torch.compile``."""
    if number > _COUNTERS or torch.compiler.is_compiling():
        return None
    if device not in _arrived:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            _arrived[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return _arrived[device]


def tree_attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    num_tree_keys: int,
    scale: float,
    depth: Tensor | None = None,
    key_depth: Tensor | None = None,
    window: int = 0,
    softcap: float | None = None,
    work: Work | None = None,
    last_merges: bool | None = None,
) -> Tensor:
    """Attention of Q queries to each row's cached prefix and to their ancestors among the T tree keys that follow it.

    Verification has Q = T; a drafter that drafts level by level has Q < T; a chunk of a prompt is a chain of T nodes.
    No slot from L + T on is read, and no length is copied to the host. Sums are in float32; products of float32 inputs
    are not rounded to TF32.

    Args:
        q: ``[B, Hq, Q, D]`` float32, float16 or bfloat16, of any strides.
        k, v: ``[B, Hkv, S, D]`` views of the cache, not copied; the tree's keys are already in their slots.
        lengths: ``[B]`` int64, cached tokens per row (L); may be 0.
        ancestors: ``[B, Q, W]`` int64; bit j of query i (word j // 64) is set if it sees the tree key in slot L + j.
            Every query sees the prefix. The output of one that sees nothing (padding) is 0.
        num_tree_keys: T ≥ Q.
        scale: factor on q · k.
        depth: ``[B, Q]`` depth of the queries; needed for a window.
        key_depth: ``[B, T]`` depth of the tree keys; needed for a window.
        window: a query at position p sees keys at positions > p − window; 0 for no window.
        softcap: scores become ``softcap · tanh(score / softcap)`` (Gemma 2).
        work: from :func:`tree_work` for these lengths or longer ones, T tree keys or more, and the window; computed
            here if left out.
        last_merges: the last program of a row's items merges them, in place of a second kernel, if a key/value head
            has at most 16 rows; ``LAST_MERGES`` if left out.

    Returns:
        ``[B, Hq, Q, D]``.
    """
    q, lengths, ancestors = dense(q), dense(lengths), dense(ancestors)
    if window:
        assert depth is not None and key_depth is not None, "a window needs depths"
        depth, key_depth = dense(depth), dense(key_depth)
    rows, heads, queries, width = q.shape
    depths, dense_cache = (depth, key_depth), k.stride(-1) == v.stride(-1) == 1
    if why_not_triton(q) and cpu.runs(q) and width <= 256 and dense_cache:
        out = q.new_empty(rows, queries, heads, width).transpose(1, 2)
        sizes = (rows, queries, num_tree_keys, heads, k.shape[1], width, window)
        strides = [stride for one in (q, k, v, out) for stride in one.stride()[:3]] + [*ancestors.stride()[:2]]
        strides += [0 if one is None else one.stride(0) for one in depths]
        shape = (ctypes.c_long * 23)(*sizes, *strides)
        tensors = map(cpu.address, (q, k, v, lengths, ancestors, *depths, out))
        cpu.function("attend", q.dtype)(*tensors, ctypes.addressof(shape), scale, softcap or 0.0)
        return out
    if why_not_triton(q):
        given = (q, k, v, lengths, ancestors, num_tree_keys, scale)
        return tree_attention_cached_reference(*given, *depths, window, softcap)
    assert dense_cache
    if work is None:
        num_items = attention_items(rows, queries, heads, k.shape[1], width, k.shape[2], q.dtype, q.device)
        if num_items > rows:
            work = tree_work(lengths, num_tree_keys, num_items, window)
    items, first, count = (None, None, None) if work is None or len(work.items) == rows else work
    given = (q, k, v, lengths, ancestors, depth, key_depth)
    arguments = (*given, items, first, count, num_tree_keys, scale, window, softcap or 0.0)
    # With more rows, the kernel has no registers left for the merge.
    few = items is not None and queries * heads <= 16 * k.shape[1]
    if few and (LAST_MERGES if last_merges is None else last_merges):
        arrived = _counters(rows * k.shape[1], q.device)
        if arrived is not None:
            return _tree_attention_cached(*arguments, arrived)  # the operator changes none of its arguments
    return _tree_attention_op(*arguments)
