"""Tree attention: Q tree nodes attend to a cached prefix and to their own ancestors (SpecInfer, arXiv 2305.09781 §4.2).

    out_i = softmax_j( q_i · k_j · scale + bias_ij ) v_j
    bias_ij = 0 if j < L (the prefix), or j − L is i or an ancestor of i; else −inf

The keys that a query sees are given in one of two ways. :func:`tree_attention` takes an additive bias, computed once
per step, and calls PyTorch's fused attention. :func:`tree_attention_cached` takes lengths and ancestor bitsets and
reads exactly the used slots of a preallocated cache: a Triton kernel whose shapes and grid do not depend on the
lengths, so that it can be captured in a CUDA graph.

Shape letters: B batch, Q queries, N tree nodes, T tree keys, W 64-bit words, Hq query heads, Hkv key/value heads, S
cache slots seen, D head width, L the cached length of a row. Node i of a row is in slot L + i; its position is
L + depth(i).
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.backend import (
    constexpr,
    jit,
    multiprocessors,
    next_power,
    tl,
    traceable,
    triton,
    why_not_triton,
)


def ancestor_mask(ancestors: Tensor, num_nodes: int) -> Tensor:
    """Unpack ancestor bitsets.

    Args:
        ancestors: ``[B, N, W]`` int64; bit j of row i (word j // 64) is set if node j is node i or an ancestor of it.

    Returns:
        ``[B, N, num_nodes]`` bool.
    """
    bit = torch.arange(num_nodes, device=ancestors.device)
    return (ancestors[..., bit // 64] >> (bit % 64)) & 1 != 0


class TreeKeys(NamedTuple):
    """The keys that the Q queries of a forward pass see, as :func:`tree_attention_cached` takes them.

    lengths: ``[B]`` int64, cached tokens per row (L).
    ancestors: ``[B, Q, W]`` int64 bitsets over the tree keys.
    depth: ``[B, Q]`` int32 of the queries.
    key_depth: ``[B, T]`` int32 of the tree keys, which are in slots L, L + 1, ….
    """

    lengths: Tensor
    ancestors: Tensor
    depth: Tensor
    key_depth: Tensor


def tree_bias(
    lengths: Tensor, mask: Tensor, depth: Tensor, slots: int, window: int, dtype: torch.dtype,
    key_depth: Tensor | None = None,
) -> Tensor:  # fmt: skip
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
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, ancestors: Tensor, num_tree_keys: int, scale: float,
    depth: Tensor | None = None, key_depth: Tensor | None = None, window: int = 0, softcap: float | None = None,
) -> Tensor:  # fmt: skip
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


@jit
def _add_tile(
    q, k, v, slot, stored, seen, width, k_stride, v_stride, best, total, acc, log2_scale, softcap,
    SOFTCAP: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Add a tile of keys to the running softmax (base 2): its maximum, its sum, and the weighted values.

    ``stored`` [BLOCK_N]: slots that hold keys; ``seen`` [BLOCK_M or 1, BLOCK_N]: those that a row sees.
    """
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


@jit
def _tree_attention_kernel(
    q, k, v, lengths, ancestors, depth, key_depth, out, partial, partial_lse,
    num_queries, num_tree_keys, width, log2_scale, softcap,
    q_batch, q_head, q_query, k_batch, k_head, k_slot, v_batch, v_head, v_slot, out_batch, out_head, out_query,
    ancestors_batch, ancestors_query, depth_batch, key_depth_batch,
    KV_HEADS: constexpr, GROUP: constexpr, SPLITS: constexpr, WINDOW: constexpr,
    SOFTCAP: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """One program per block of (query, head of the group) rows, key/value head and split of the keys.

    The tiles of a row of the batch: those of its prefix, then those of its tree, each starting at the tree's first slot
    plus a multiple of BLOCK_N (which divides 64), so that a tile's bits lie in one word.
    """
    split = tl.program_id(1)
    batch = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(2) % KV_HEADS
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    exists = query < num_queries
    d = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (d < width)[None, :]
    length = tl.load(lengths + batch)

    rows_q = q + batch * q_batch + head * q_head + query * q_query
    queries = tl.load(rows_q[:, None] + d[None, :], mask=inside, other=0.0)
    k += batch * k_batch + kv_head * k_head
    v += batch * v_batch + kv_head * v_head
    first = length * 0  # the first slot that any query sees
    if WINDOW:
        first = tl.maximum(length - WINDOW + 1, 0)
        own_depth = tl.load(depth + batch * depth_batch + query, mask=exists, other=0)
    prefix_tiles = tl.cdiv(length - first, BLOCK_N)
    tiles = prefix_tiles + tl.cdiv(num_tree_keys, BLOCK_N)
    tiles_per_split = tl.cdiv(tiles, SPLITS)
    start = split * tiles_per_split
    end = tl.minimum(start + tiles_per_split, tiles)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(start, tl.minimum(end, prefix_tiles)):
        slot = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
        stored = slot < length
        seen = stored[None, :]
        if WINDOW:
            seen = seen & (slot[None, :] - length > own_depth[:, None] - WINDOW)
        best, total, acc = _add_tile(
            queries, k, v, slot, stored, seen, width, k_slot, v_slot, best, total, acc, log2_scale, softcap,
            SOFTCAP, BLOCK_D,
        )  # fmt: skip
    for tile in range(tl.maximum(start, prefix_tiles), end):
        begin = (tile - prefix_tiles) * BLOCK_N
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
        best, total, acc = _add_tile(
            queries, k, v, length + node, stored, seen, width, k_slot, v_slot, best, total, acc, log2_scale, softcap,
            SOFTCAP, BLOCK_D,
        )  # fmt: skip

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS == 1:
        rows_out = out + batch * out_batch + head * out_head + query * out_query
        tl.store(rows_out[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:  # [B, Q, Hq, SPLITS, D] and [B, Q, Hq, SPLITS]
        place = ((batch * num_queries + query) * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(partial + place[:, None] * width + d[None, :], acc, mask=inside)
        lse = tl.where(total > 0, best + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(partial_lse + place, lse, mask=exists)


@jit
def _merge_splits_kernel(
    partial, partial_lse, out, num_queries, width, out_batch, out_head, out_query,
    HEADS: constexpr, SPLITS: constexpr, BLOCK_S: constexpr, BLOCK_D: constexpr,
):  # fmt: skip
    """Combine the splits, weighted by their softmax sums: one (row, query, head) per program."""
    place = tl.program_id(0).to(tl.int64)
    head, query, batch = place % HEADS, place // HEADS % num_queries, place // HEADS // num_queries
    split = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(partial_lse + place * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    best = tl.max(lse, 0)
    anchor = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp2(lse - anchor), 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for one in range(SPLITS):
        weight = tl.exp2(tl.load(partial_lse + place * SPLITS + one) - anchor)
        if weight > 0:  # most splits of a nearly empty cache have no keys
            acc += weight * tl.load(partial + (place * SPLITS + one) * width + d, mask=d < width, other=0.0)
    acc = acc / tl.where(total > 0, total, 1.0)
    row = out + batch * out_batch + head * out_head + query * out_query
    tl.store(row + d, acc.to(out.dtype.element_ty), mask=d < width)


def attention_tile(rows: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """The kernel's block sizes, warps and pipeline stages for ``rows`` = Q · Hq / Hkv rows of a key/value head.

    Sized by shared memory (K and V tiles of each stage, and the queries), for 227 KB.
    """
    block_d = next_power(width, 16)
    wide = block_d > 128
    if dtype == torch.float32:  # no tensor cores: products are exact, so tiles are small
        block_m, block_n, stages = 32, 16 if wide else 32, 2
    else:
        block_m, block_n, stages = 64 if wide else 128, 64, 2 if wide else 3
    block_m = min(block_m, next_power(rows, 16))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "num_warps": 8 if block_m == 128 else 4,
        "num_stages": stages,
    }


def attention_splits(programs: int, slots: int, multiprocessors: int) -> int:
    """The number of splits of the keys that gives about two programs per multiprocessor.

    It depends on the cache's capacity, not on the cached lengths, so the grid is the same at every step. A split has at
    least 256 slots of the capacity.
    """
    wanted = -(-2 * multiprocessors // programs)
    return max(1, min(wanted, slots // 256, 128))


def _tree_attention_cached(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, ancestors: Tensor, depth: Tensor | None,
    key_depth: Tensor | None, num_tree_keys: int, scale: float, window: int, softcap: float, splits: int,
) -> Tensor:  # fmt: skip
    """Launch the kernels; the arguments are those of :func:`tree_attention_cached`, softcap and splits 0 for None."""
    rows, heads, queries, width = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    tile = attention_tile(queries * group, width, q.dtype)
    row_blocks = -(-queries * group // tile["BLOCK_M"])
    splits = splits or attention_splits(rows * kv_heads * row_blocks, k.shape[2], multiprocessors(q.device))
    # In memory [B, Q, Hq, D]: the caller's next step is a projection over Hq · D.
    out = q.new_empty(rows, queries, heads, width).transpose(1, 2)
    parts = splits if splits > 1 else 0
    partial = q.new_empty((rows, queries, heads, parts, width), dtype=torch.float32)
    lse = q.new_empty((rows, queries, heads, parts), dtype=torch.float32)
    with torch.cuda.device_of(q):
        traceable(_tree_attention_kernel)[(row_blocks, splits, rows * kv_heads)](
            q, k, v, lengths, ancestors, depth, key_depth, out, partial, lse,
            queries, num_tree_keys, width, scale * math.log2(math.e), softcap,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            *ancestors.stride()[:2], 0 if depth is None else depth.stride(0),
            0 if key_depth is None else key_depth.stride(0),
            KV_HEADS=kv_heads, GROUP=group, SPLITS=splits, WINDOW=window, SOFTCAP=softcap != 0, **tile,
        )  # fmt: skip
        if splits > 1:
            traceable(_merge_splits_kernel)[(rows * queries * heads,)](
                partial, lse, out, queries, width, *out.stride()[:3],
                HEADS=heads, SPLITS=splits, BLOCK_S=next_power(splits), BLOCK_D=tile["BLOCK_D"], num_warps=1,
            )  # fmt: skip
    return out


if triton is not None:
    # As an operator, so that torch.compile and torch.export see through it to the kernels.
    _tree_attention_op = torch.library.triton_op(
        "draftsmith::tree_attention_cached", _tree_attention_cached, mutates_args=()
    )


def tree_attention_cached(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, ancestors: Tensor, num_tree_keys: int, scale: float,
    depth: Tensor | None = None, key_depth: Tensor | None = None, window: int = 0, softcap: float | None = None,
    splits: int = 0,
) -> Tensor:  # fmt: skip
    """Attention of Q queries to each row's cached prefix and to their ancestors among the T tree keys that follow it.

    Verification has Q = T; a drafter that drafts level by level has Q < T. No slot from L + T on is read, and no length
    is copied to the host. Sums are in float32; products of float32 inputs are not rounded to TF32.

    Args:
        q: ``[B, Hq, Q, D]`` float32, float16 or bfloat16; any strides but the last, which is 1.
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
        splits: number of splits of the keys; 0 chooses by the device and the cache's capacity.

    Returns:
        ``[B, Hq, Q, D]``.
    """
    if why_not_triton(q):
        return tree_attention_cached_reference(
            q, k, v, lengths, ancestors, num_tree_keys, scale, depth, key_depth, window, softcap
        )
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == ancestors.stride(-1) == 1
    if window:
        assert depth is not None and key_depth is not None, "a window needs depths"
        assert depth.stride(-1) == key_depth.stride(-1) == 1
    return _tree_attention_op(
        q, k, v, lengths, ancestors, depth, key_depth, num_tree_keys, scale, window, softcap or 0.0, splits
    )
