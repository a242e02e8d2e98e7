"""Tree attention: Q tree nodes attend to a cached prefix and to their own ancestors (SpecInfer, arXiv 2305.09781 §4.2).

    out_i = softmax_j( q_i · k_j · scale + bias_ij ) v_j
    bias_ij = 0 if j < L (the prefix), or j − L is i or an ancestor of i; else −inf

The keys that a query sees are given in one of two ways. :func:`tree_attention` takes an additive bias, computed once
per step, and calls PyTorch's fused attention. :func:`tree_attention_cached` takes lengths and ancestor bitsets and
reads exactly the used slots of a preallocated cache: a Triton kernel whose shapes and grid do not depend on the
lengths, so that it can be captured in a CUDA graph.

That kernel reads a row's keys in tiles of 64 slots. Long rows are split (flash decoding) by a plan
(kernels/attention_plan.py) into items, each a range of a row's tiles. A row with several items has partial results,
which a second kernel merges by their softmax sums. Block sizes: kernels/attention_tiles.py.

Shape letters: B batch, Q queries, N tree nodes, T tree keys, W 64-bit words, I items, Hq query heads, Hkv key/value
heads, S cache slots seen, D head width, L the cached length of a row. Node i of a row is in slot L + i; its position
is L + depth(i).
"""
# ruff: noqa: ANN001, ANN201, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels import cpu
from draftsmith.kernels.attention_plan import KERNEL_TILE, MIN_SHARE, TILE, Plan, make_plan
from draftsmith.kernels.attention_tiles import PROGRAMS, Shape, measure_tile, tile_of
from draftsmith.kernels.backend import INTERPRETING, dense, jit, multiprocessors, next_power, tl, why_not_triton


def ancestor_mask(ancestors: Tensor, num_nodes: int) -> Tensor:
    """Unpack ancestor bitsets ``[B, N, W]`` int64 to ``[B, N, num_nodes]`` bool: bit j of row i (word j // 64) is set
    if node j is node i or an ancestor of it."""
    bit = torch.arange(num_nodes, device=ancestors.device)
    return (ancestors[..., bit // 64] >> (bit % 64)) & 1 != 0


def causal_ancestors(nodes: int, device: torch.device) -> Tensor:
    """Ancestor bitsets ``[1, N, W]`` of a chain: node i sees nodes 0 … i. Those of a shorter chain are their beginning:
    ``[:, :n, :w]`` for n nodes in w words."""
    first = torch.arange(0, nodes, 64, device=device)
    bits = (torch.arange(1, nodes + 1, device=device)[:, None] - first).clamp(0, 64)  # of each word: its lowest ones
    one = torch.ones_like(bits)
    return torch.where(bits == 64, -one, (one << bits.clamp(max=63)) - 1)[None]


class Segments(NamedTuple):
    """Parts of prompts, one after the other in one pass of T queries: query i of a part is the token at position
    start + i of its row, and sees all positions up to its own.

    rows, starts, firsts, counts: ``[P]`` int64 each, contiguous: of a part its row of the cache, its first position,
        the place of its first query among the T, and the number of its queries.
    most: the largest of the counts.
    """

    rows: Tensor
    starts: Tensor
    firsts: Tensor
    counts: Tensor
    most: int


class SegmentBias(NamedTuple):
    """A part as :func:`tree_attention` reads it: its row of the cache, its first query and the one after its last, and
    the additive mask ``[1, 1, count, end]`` over the row's slots up to its own."""

    row: int
    first: int
    after: int
    bias: Tensor


class TreeKeys(NamedTuple):
    """The keys that the Q queries of a forward pass see, as :func:`tree_attention_cached` takes them.

    lengths: ``[B]`` int64, cached tokens per row (L).
    ancestors: ``[B, Q, W]`` int64 bitsets over the tree keys.
    depth: ``[B, Q]`` int32 of the queries.
    key_depth: ``[B, T]`` int32 of the tree keys, which are in slots L, L + 1, ….
    plans: by window, for all layers of the pass; a layer whose window is missing makes its own. A plan may be made for
        longer prefixes and more tree keys (:class:`draftsmith.kernels.attention_plan.Plans`).
    same_bits: a query's bits may depend on its keys by position alone (:mod:`draftsmith.kernels.step_attention`), which
        needs no plan; no node is deeper than ``TILE``.
    """

    lengths: Tensor
    ancestors: Tensor
    depth: Tensor
    key_depth: Tensor
    plans: Mapping[int, Plan] | None = None
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
    """:func:`tree_bias`, ``[1, 1, Q, S]``, of ``mask [1, Q, T]`` bool for a single row without a window whose prefix
    and tree fill all slots: L = S − T."""
    inside = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return F.pad(inside, (slots - mask.shape[2], 0))[:, None]


def causal_bias(start: int, queries: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask of a prompt's chunk ``[start, start + queries)`` over all slots up to its end:
    ``[1, 1, queries, start + queries]`` of ``dtype``, 0 or −inf."""
    slots = torch.arange(start + queries, device=device)
    distance = slots[start:, None] - slots
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | Sequence[SegmentBias] | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """:func:`tree_attention_reference` by PyTorch's fused attention where there is no soft cap, which that lacks. With
    parts of prompts in place of a bias, q is ``[1, Hq, T, D]``, and each part attends to its own row."""
    if isinstance(bias, Sequence):
        alone, parts = len(bias) == 1, list[Tensor]()
        for row, first, after, own in bias:
            queries = q if alone else q[:, :, first:after]  # the heads of a single token may come grouped
            keys, values = (each[row : row + 1, :, : own.shape[3]] for each in (k, v))
            parts.append(tree_attention(queries, keys, values, own, scale, softcap))
        return parts[0] if alone else torch.cat(parts, 2)
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


def runs_kernel(tensor: Tensor, width: int) -> bool:
    """Whether tree attention of heads of this width is a kernel for a tensor's device and dtype; its tiles hold at most
    256."""
    return (why_not_triton(tensor) is None or cpu.runs(tensor)) and width <= 256


@jit
def add_tile(q, cache, slot, stored, seen, sums, log2_scale, softcap, BLOCK_D: tl.constexpr):
    """Add a tile of keys to the running softmax (base 2): its maximum, its sum, and the weighted values.

    cache: pointers to keys and values, strides of their slots, the head width. stored ``[BLOCK_N]``: slots that hold
    keys; seen ``[BLOCK_M or 1, BLOCK_N]``: those that a row sees.
    softcap: None for no cap.
    """
    k, v, k_stride, v_stride, width = cache
    best, total, acc = sums
    d = tl.arange(0, BLOCK_D)
    place = slot.to(tl.int64)
    keys = tl.load(
        k + place[None, :] * k_stride + d[:, None], mask=stored[None, :] & (d < width)[:, None], other=0.0
    )  # [BLOCK_D, BLOCK_N]
    scores = tl.dot(q, keys, input_precision="ieee")
    if softcap is not None:
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
    do_not_specialize="ancestors depth key_depth num_queries num_tree_keys "
    "ancestors_batch ancestors_query depth_batch key_depth_batch"
)
def _tree_attention_kernel(
    q,
    k,
    v,
    out,
    lengths,
    ancestors,
    depth,
    key_depth,
    plan,
    partials,
    segments,
    num_queries,
    num_tree_keys,
    settings,
    ancestors_batch,
    ancestors_query,
    depth_batch,
    key_depth_batch,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The formula at the top of this file, as a running softmax in base 2 over tiles of keys. One program per block of
    (query, head of the group) rows, key/value head and item; without a plan, an item is all of a row of the batch.

    q, k, v, out: pointer and strides of batch, head and query or slot. plan: items, first, count, see
    :class:`draftsmith.kernels.attention_plan.Plan`. partials: values ``[I − B + 1, Q, Hq, D]`` and log2 of the softmax
    sums ``[I − B + 1, Q, Hq]`` of the items of rows that are split; and ``arrived``, None or a zero for each row of the
    batch and key/value head: with it, and one block of rows, the last of a row's items to come merges all of them and
    leaves a zero. segments: None, or the rows, first queries and counts of :class:`Segments`, each an item, with its
    positions before as ``lengths``; ancestors and depths are not read. settings: D, scale · log2 e, soft cap or None.

    The blocks of BLOCK_N keys divide a tile, so that the bits of a block of tree keys lie in one word.
    """
    q, q_batch, q_head, q_query = q
    k, k_batch, k_head, k_slot = k
    v, v_batch, v_head, v_slot = v
    out, out_batch, out_head, out_query = out
    width, log2_scale, softcap = settings
    item = tl.program_id(2)
    batch, parts = item, 1
    if plan is not None:
        items, first_item, count = plan
        batch = tl.load(items + item * 3)
        if batch < 0:
            return
        parts = tl.load(count + batch)
    batch = batch.to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    length = tl.load(lengths + batch)
    cache_row = batch
    if segments is None:
        q += batch * q_batch
        out += batch * out_batch
    else:
        cache_rows, firsts, counts = segments
        cache_row = tl.load(cache_rows + batch)
        q += tl.load(firsts + batch) * q_query
        out += tl.load(firsts + batch) * out_query
        num_queries = tl.load(counts + batch)
        if tl.program_id(0) * BLOCK_M >= num_queries * GROUP:
            return
        num_tree_keys = tl.minimum(num_queries, (tl.program_id(0) + 1) * BLOCK_M // GROUP + 1)  # no later one is seen
    exists = query < num_queries
    d = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (d < width)[None, :]

    rows_q = q + head * q_head + query * q_query
    queries = tl.load(rows_q[:, None] + d[None, :], mask=inside, other=0.0)
    k += cache_row * k_batch + kv_head * k_head
    v += cache_row * v_batch + kv_head * v_head
    cache = (k, v, k_slot, v_slot, width)
    first = length * 0  # the first slot that any query sees
    own_depth = query
    if WINDOW:
        first = tl.maximum(length - WINDOW + 1, 0)
    if WINDOW and segments is None:
        own_depth = tl.load(depth + batch * depth_batch + query, mask=exists, other=0)
    prefix_tiles = tl.cdiv(length - first, KERNEL_TILE)
    start = prefix_tiles * 0
    end = prefix_tiles + tl.cdiv(num_tree_keys, KERNEL_TILE)
    if plan is not None:
        start = tl.load(items + item * 3 + 1).to(tl.int64)
        end = tl.load(items + item * 3 + 2).to(tl.int64)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    BLOCKS: tl.constexpr = KERNEL_TILE // BLOCK_N  # of a tile
    for block in range(start * BLOCKS, tl.minimum(end * BLOCKS, tl.cdiv(length - first, BLOCK_N))):
        slot = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        stored = slot < length
        seen = stored[None, :]
        if WINDOW:
            seen = seen & (slot[None, :] - length > own_depth[:, None] - WINDOW)
        best, total, acc = add_tile(
            queries, cache, slot, stored, seen, (best, total, acc), log2_scale, softcap, BLOCK_D
        )
    start = tl.maximum(start - prefix_tiles, 0) * BLOCKS
    end = (end - prefix_tiles) * BLOCKS
    for block in range(start, tl.minimum(end, tl.cdiv(num_tree_keys, BLOCK_N))):
        begin = block * BLOCK_N
        node = begin + tl.arange(0, BLOCK_N)
        stored = node < num_tree_keys
        its_depth = node
        if segments is None:
            word = tl.load(
                ancestors + batch * ancestors_batch + query * ancestors_query + begin // 64, mask=exists, other=0
            )
            seen = ((word[:, None] >> (node % 64)[None, :]) & 1) != 0
        else:
            seen = node[None, :] <= query[:, None]
        seen = seen & stored[None, :]
        if WINDOW and segments is None:
            its_depth = tl.load(key_depth + batch * key_depth_batch + node, mask=stored, other=0)
        if WINDOW:
            seen = seen & (own_depth[:, None] - its_depth[None, :] < WINDOW)
        best, total, acc = add_tile(
            queries, cache, length + node, stored, seen, (best, total, acc), log2_scale, softcap, BLOCK_D
        )

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if parts == 1:
        rows_out = out + head * out_head + query * out_query
        tl.store(rows_out[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
    elif plan is not None:
        partial, partial_lse, arrived = partials
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
                rows_out = out + head * out_head + query * out_query
                tl.store(rows_out[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize="num_queries")
def _merge_items_kernel(
    plan,
    partials,
    out,
    num_queries,
    width,
    HEADS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combine a row's items, weighted by their softmax sums: one query and block of heads per program."""
    _, first, count = plan
    partial, partial_lse, _ = partials
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


def attention_items(
    rows: int, queries: int, heads: int, kv_heads: int, width: int, slots: int, dtype: torch.dtype, device: torch.device
) -> int:
    """The number of items (I) for a batch: B, and as many more as the device runs at a time and the capacity can use.
    Where a GPU meets such a shape first, the kernel's tile for it is measured.

    It depends on the cache's capacity S, not on the cached lengths, so the grid is the same at every step. The
    arguments from ``rows`` to ``slots`` are B, Q, Hq, Hkv, D, S.
    """
    if device.type == "cpu" and not INTERPRETING:  # kernels/cpu.cpp does not split rows
        return rows
    shape = Shape(rows, queries, heads, kv_heads, width, dtype, device)
    measure_tile(shape, _attend_chain)
    at_a_time = PROGRAMS * multiprocessors(device) // (kv_heads * -(-shape.of_head // tile_of(shape)["BLOCK_M"]))
    of_row = (-(-slots // TILE) + 1) // MIN_SHARE  # a prefix and a tree may each end within a tile
    return rows + max(0, min(at_a_time, rows * of_row) - 1) if of_row > 1 else rows


def _attend_chain(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attention of a chain behind the cached tokens, as of a prompt's chunk."""
    rows, _, queries, width = q.shape
    ancestors = causal_ancestors(queries, q.device).expand(rows, -1, -1)
    return tree_attention_cached(q, k, v, lengths, ancestors, queries, width**-0.5)


# Whether the last program of a row's items merges them, in place of a second kernel; to be decided by measuring.
LAST_MERGES = False
_arrived: dict[torch.device, Tensor] = {}
_COUNTERS = 4096


def _counters(number: int, device: torch.device) -> Tensor | None:
    """Zeros for the attention kernel, which leaves zeros: one launch at a time may use them. They are allocated once,
    since CUDA graphs keep their address. None for too many, and in a capture, where they would not stay allocated."""
    if number > _COUNTERS:
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
    plan: Plan | None = None,
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
        plan: from :func:`make_plan` for these lengths or longer ones, T tree keys or more, and the window; made here if
            left out.
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
    kv_heads, group, softcap = k.shape[1], heads // k.shape[1], softcap or None
    if plan is None:
        num_items = attention_items(rows, queries, heads, kv_heads, width, k.shape[2], q.dtype, q.device)
        if num_items > rows:
            plan = make_plan(lengths, num_tree_keys, num_items, window)
    num_items = rows if plan is None else len(plan.items)
    # In memory [B, Q, Hq, D]: the caller's next step is a projection over Hq · D.
    out = q.new_empty(rows, queries, heads, width).transpose(1, 2)
    partials = arrived = None
    if num_items == rows:
        plan = None  # each row is one item
    else:
        places = (num_items - rows + 1, queries, heads)  # only rows that are split have partial results
        # With more rows of a head, the kernel has no registers left for the merge.
        if queries * group <= 16 and (LAST_MERGES if last_merges is None else last_merges):
            arrived = _counters(rows * kv_heads, q.device)
        partials = (q.new_empty(*places, width, dtype=torch.float32), q.new_empty(places, dtype=torch.float32), arrived)
    tile = tile_of(Shape(rows, queries, heads, kv_heads, width, q.dtype, q.device), softcap is not None)
    grid = (-(-queries * group // tile["BLOCK_M"]), kv_heads, num_items)
    with torch.cuda.device_of(q):
        _tree_attention_kernel[grid](
            *((one, *one.stride()[:3]) for one in (q, k, v, out)),  # out's strides computed from others would spill
            *(lengths, ancestors, *depths, None if plan is None else (*plan,), partials, None),
            *(queries, num_tree_keys, (width, scale * math.log2(math.e), softcap), *ancestors.stride()[:2]),
            *(0 if one is None else one.stride(0) for one in depths),
            **{"KV_HEADS": kv_heads, "GROUP": group, "WINDOW": window, **tile},
        )
        if plan is not None and arrived is None:
            block_h = min(4, next_power(heads))
            merged = {"HEADS": heads, "BLOCK_I": 8, "BLOCK_H": block_h, "BLOCK_D": tile["BLOCK_D"], "num_warps": 4}
            grid = (queries, -(-heads // block_h), rows)
            _merge_items_kernel[grid]((*plan,), partials, out, queries, width, **merged)
    return out


def segment_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int = 0, softcap: float | None = None
) -> Tensor:
    """The definition of :func:`segment_attention`, part by part (it synchronises to read the parts)."""
    parts: list[SegmentBias] = []
    for row, start, first, count in torch.stack(segments[:4], 1).tolist():
        bias = causal_bias(start, count, window, q.dtype, q.device)
        parts.append(SegmentBias(row, first, first + count, bias))
    return tree_attention(q, k, v, parts, scale, softcap)


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int = 0, softcap: float | None = None
) -> Tensor:
    """Attention of the queries of several prompts' parts to the rows of the cache in which their keys already are.

    Args:
        q: ``[1, Hq, T, D]`` float32, float16 or bfloat16, of any strides, the parts one after the other.
        k, v: ``[B, Hkv, S, D]`` views of the cache.
        scale, window, softcap: as in :func:`tree_attention_cached`.

    Returns:
        ``[1, Hq, T, D]``.
    """
    if why_not_triton(q):
        return segment_attention_reference(q, k, v, segments, scale, window, softcap)
    q = dense(q)
    rows, starts, firsts, counts, most = segments
    (_, heads, queries, width), kv_heads, group = q.shape, k.shape[1], q.shape[1] // k.shape[1]
    out = q.new_empty(1, queries, heads, width).transpose(1, 2)
    shape = Shape(len(rows), most, heads, kv_heads, width, q.dtype, q.device)
    measure_tile(shape, _attend_chain)
    tile, softcap = tile_of(shape, softcap is not None), softcap or None
    with torch.cuda.device_of(q):
        _tree_attention_kernel[(-(-most * group // tile["BLOCK_M"]), kv_heads, len(rows))](
            *((one, *one.stride()[:3]) for one in (q, k, v, out)),
            *(starts, None, None, None, None, None, (rows, firsts, counts)),
            *(most, most, (width, scale * math.log2(math.e), softcap), 0, 0, 0, 0),
            **{"KV_HEADS": kv_heads, "GROUP": group, "WINDOW": window, **tile},
        )
    return out
