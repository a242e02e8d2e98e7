"""Attention of a forward pass: :mod:`draftsmith.kernels.tree_attention`, or, with ``DRAFTSMITH_SAME_BITS``, two kernels
whose result for a query depends on its values and position and on its keys by position alone: neither on the other
queries and rows, nor on the slots in which the keys lie, so that drafting never changes a bit.

A query at position p sums over blocks of TILE positions at fixed places, in order, in tiles of one shape. All keys
before s(p) = max(0, (p // TILE − 1) · TILE) are committed, as long as no node is deeper than TILE: slot = position. The
first kernel adds them up for all queries together, in parts of SPAN positions. The second one, with a program for each
query, merges these in order and adds the last keys, those of the query's own path gathered by their positions. A key
that a query does not see adds exactly 0 and rescales by exactly 1.

Shape letters: B rows, Q queries, T tree keys, W 64-bit words, I parts of SPAN positions, Hq query heads, Hkv key/value
heads, S cache slots, D head width, L the cached length of a row.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import math

import torch
from torch import Tensor

from draftsmith.kernels.attention_plan import KERNEL_TILE, TILE
from draftsmith.kernels.attention_tiles import attention_tile
from draftsmith.kernels.backend import constant, dense, jit, tl
from draftsmith.kernels.tree_attention import Segments, TreeKeys, add_tile, segment_attention, tree_attention_cached

SPAN = 512  # positions of a part, which one program adds up
_KERNEL_SPAN = constant(SPAN)
_CHANGING = "lengths depth num_queries parts depth_batch"


@jit
def _start(position):
    """s(p): the first of the positions whose keys are gathered."""
    return tl.maximum(position // KERNEL_TILE - 1, 0) * KERNEL_TILE


@jit(do_not_specialize=_CHANGING)
def _before_kernel(
    q,
    k,
    v,
    lengths,
    depth,
    sums,
    settings,
    num_queries,
    parts,
    depth_batch,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per block of (query, head of the group) rows, key/value head, and part of a row of the batch.

    q, k, v: pointer and strides of batch, head and query or slot. sums: values ``[B, I, Q, Hq, D]``, and the weights'
    maximum and sum ``[B, I, Q, Hq, 2]``. settings: D, scale · log2 e, soft cap or None.
    """
    q, q_batch, q_head, q_query = q
    k, k_batch, k_head, k_slot = k
    v, v_batch, v_head, v_slot = v
    partial, maxima_sums = sums
    width, log2_scale, softcap = settings
    batch = (tl.program_id(2) // parts).to(tl.int64)
    part = tl.program_id(2) % parts
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = (row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    exists = query < num_queries
    length = tl.load(lengths + batch).to(tl.int32)
    position = length + tl.load(depth + batch * depth_batch + query, mask=exists, other=0)
    end = tl.where(exists, _start(position), 0)  # [BLOCK_M]
    begin = part * _KERNEL_SPAN
    last = tl.minimum(begin + _KERNEL_SPAN, tl.max(end, 0))
    if begin >= last:
        return
    d = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (d < width)[None, :]
    rows_q = q + batch * q_batch + head * q_head + query * q_query
    queries = tl.load(rows_q[:, None] + d[None, :], mask=inside, other=0.0)
    cache = (k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head, k_slot, v_slot, width)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = begin
    if WINDOW:
        first = tl.maximum(begin, tl.maximum(length - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
    for at in range(first, last, BLOCK_N):
        slot = at + tl.arange(0, BLOCK_N)
        seen = slot[None, :] < end[:, None]
        if WINDOW:
            seen = seen & (slot[None, :] > position[:, None] - WINDOW)
        best, total, acc = add_tile(
            queries, cache, slot, slot < last, seen, (best, total, acc), log2_scale, softcap, BLOCK_D
        )
    place = ((batch * parts + part) * num_queries + query) * HEADS + head
    stored = exists & (end > begin)
    tl.store(partial + place[:, None] * width + d[None, :], acc, mask=inside & stored[:, None])
    tl.store(maxima_sums + place * 2, best, mask=stored)
    tl.store(maxima_sums + place * 2 + 1, total, mask=stored)


@jit(do_not_specialize=_CHANGING + " ancestors key_depth num_tree_keys key_depth_batch ancestors_batch ancestors_query")
def _path_kernel(
    q,
    k,
    v,
    lengths,
    depth,
    sums,
    settings,
    num_queries,
    parts,
    depth_batch,
    ancestors,
    key_depth,
    out,
    num_tree_keys,
    key_depth_batch,
    ancestors_batch,
    ancestors_query,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per query, block of the heads of a key/value head, and row of the batch; arguments as above."""
    q, q_batch, q_head, q_query = q
    k, k_batch, k_head, k_slot = k
    v, v_batch, v_head, v_slot = v
    partial, maxima_sums = sums
    width, log2_scale, softcap = settings
    query = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = (tl.program_id(1) // BLOCKS).to(tl.int64)
    member = tl.program_id(1) % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = member < GROUP
    head = kv_head * GROUP + member
    d = tl.arange(0, BLOCK_D)
    inside = exists[:, None] & (d < width)[None, :]
    length = tl.load(lengths + batch).to(tl.int32)
    position = length + tl.load(depth + batch * depth_batch + query)
    start = _start(position)
    rows_q = q + batch * q_batch + head * q_head + query * q_query
    queries = tl.load(rows_q[:, None] + d[None, :], mask=inside, other=0.0)
    cache = (k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head, k_slot, v_slot, width)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = start * 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0) // _KERNEL_SPAN
    for part in range(first, tl.cdiv(start, _KERNEL_SPAN)):
        place = ((batch * parts + part) * num_queries + query) * HEADS + head
        values = tl.load(partial + place[:, None] * width + d[None, :], mask=inside, other=0.0)
        its_best = tl.load(maxima_sums + place * 2, mask=exists, other=float("-inf"))
        its_total = tl.load(maxima_sums + place * 2 + 1, mask=exists, other=0.0)
        new_best = tl.maximum(best, its_best)
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)  # a window may have hidden all so far
        own, other = tl.exp2(best - anchor), tl.exp2(its_best - anchor)
        acc = acc * own[:, None] + values * other[:, None]
        total = total * own + its_total * other
        best = new_best
    ancestors += batch * ancestors_batch + query * ancestors_query
    key_depth += batch * key_depth_batch
    for at in range(start, position + 1, BLOCK_N):
        place = at + tl.arange(0, BLOCK_N)  # positions
        node = tl.zeros([BLOCK_N], tl.int32) - 1  # those of the path, −1 where there is none
        for begin in range(0, num_tree_keys, 64):
            number = begin + tl.arange(0, 64)
            on_path = ((tl.load(ancestors + begin // 64) >> (number % 64)) & 1) != 0
            level = tl.load(key_depth + number, mask=number < num_tree_keys, other=-1)
            its = (place[:, None] - length == level[None, :]) & (on_path & (number < num_tree_keys))[None, :]
            node = tl.maximum(node, tl.max(tl.where(its, number[None, :], -1), 1))
        stored = (place < length) | (node >= 0)
        seen = stored
        if WINDOW:
            seen = seen & (place > position - WINDOW)
        slot = tl.where(place < length, place, length + node)
        best, total, acc = add_tile(
            queries, cache, slot, stored, seen[None, :], (best, total, acc), log2_scale, softcap, BLOCK_D
        )
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    rows_out = out + ((batch * num_queries + query) * HEADS + head) * width
    tl.store(rows_out[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=inside)


def _attend_same_bits(
    q: Tensor, k: Tensor, v: Tensor, tree_keys: TreeKeys, scale: float, window: int, softcap: float | None
) -> Tensor:
    """Launch the two kernels; the arguments are those of :func:`attend_tree`."""
    q, lengths, ancestors, depth, key_depth = map(dense, (q, *tree_keys[:4]))
    (rows, heads, queries, width), kv_heads = q.shape, k.shape[1]
    group, most = heads // kv_heads, max(0, k.shape[2] - TILE)  # positions before s(p)
    parts = -(-most // SPAN)
    # In memory [B, Q, Hq, D]: the caller's next step is a projection over Hq · D.
    out = q.new_empty(rows, queries, heads, width)
    partial = q.new_empty((rows, parts, queries, heads, width), dtype=torch.float32)
    sums = q.new_empty((rows, parts, queries, heads, 2), dtype=torch.float32)
    strided = ((one, *one.stride()[:3]) for one in (q, k, v))
    settings = (width, scale * math.log2(math.e), softcap)
    given = (*strided, lengths, depth, (partial, sums), settings, queries, parts, depth.stride(0))
    options = {"HEADS": heads, "GROUP": group, "WINDOW": window}
    before, path = (attention_tile(count, width, q.dtype, capped=softcap is not None) for count in (64, 16))
    if q.dtype == torch.float32:
        path["num_warps"] = 8  # its products hold many registers
    with torch.cuda.device_of(q):
        if parts:
            _before_kernel[(-(-queries * group // before["BLOCK_M"]), kv_heads, rows * parts)](
                *given, **options, **before
            )
        tree = (ancestors, key_depth, out, key_depth.shape[1], key_depth.stride(0), *ancestors.stride()[:2])
        _path_kernel[(queries, kv_heads * -(-group // path["BLOCK_M"]), rows)](*given, *tree, **options, **path)
    return out.transpose(1, 2)


def attend_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree_keys: TreeKeys | Segments,
    scale: float,
    window: int = 0,
    softcap: float | None = None,
) -> Tensor:
    """Attention of a forward pass's keys: ``q [B, Hq, Q, D]``, ``k, v [B, Hkv, S, D]`` → ``[B, Hq, Q, D]``; scale,
    window and softcap as :func:`tree_attention_cached` takes them. With :class:`Segments` the pass is one of prompts,
    and q as :func:`segment_attention` takes it."""
    if isinstance(tree_keys, Segments):
        return segment_attention(q, k, v, tree_keys, scale, window, softcap)
    lengths, ancestors, depth, key_depth, plans, same_bits = tree_keys
    if same_bits:
        return _attend_same_bits(q, k, v, tree_keys, scale, window, softcap)
    work = None if plans is None else plans.get(window)
    return tree_attention_cached(
        q, k, v, lengths, ancestors, key_depth.shape[1], scale, depth, key_depth, window, softcap, work
    )
