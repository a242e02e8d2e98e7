"""Rotary embedding of new queries and keys, and the write of the keys and values to the cache, in one launch.

    z = Σ_s qkv_s + bias,   q and k: z ← RMSNorm(z) · norm, over each head, where the model norms them (Qwen 3)
    q, k ← z · cos + roll(z, D/2) · sin      (RoFormer, arXiv 2104.09864 §3.4.2; the halves of a head are the pairs)
    q → q_out[b, n];   k, v → cache[b, slot]

qkv may be the partial sums of a product (split-K), which are added up here. All arithmetic is in float32 and each
output is rounded once; the same steps as separate PyTorch operations round also after the product, after the norm and
between the two terms of the rotation.

Shape letters: S partial sums, B rows, N nodes, M = B · N, H query heads, G key/value heads, D head width, P positions.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels import cpu
from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton


def rotate_write_reference(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q_out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """The definition of :func:`rotate_write`."""
    rows, count, heads, width = q_out.shape
    kv_heads = cache.shape[3]
    z = qkv.sum(0, dtype=torch.float32)  # [M, (H + 2G) · D]
    if bias is not None:
        z = z + bias
    qk, v = z.view(rows, count, -1, width).split([heads + kv_heads, kv_heads], 2)
    if norm is not None:
        qk = F.rms_norm(qk, (width,), None, eps) * norm
    cos, sin = F.embedding(positions, table).float().view(rows, count, 2, 1, width).unbind(2)
    qk = qk * cos + qk.roll(width // 2, -1) * sin
    q_out.copy_(qk[:, :, :heads])
    kv = torch.stack((qk[:, :, heads:], v), 2)  # [B, N, 2, G, D]
    cache.index_put_((torch.arange(rows, device=cache.device)[:, None], slots), kv.to(cache.dtype))


@jit(do_not_specialize="count positions_batch positions_node slots_batch slots_node")
def _rotate_write_kernel(
    tensors,
    strides,
    eps,
    count,
    positions_batch,
    positions_node,
    slots_batch,
    slots_node,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per node and block of heads, of queries, keys and values alike. A head's two halves are two tiles
    [BLOCK_H, BLOCK_D], so that an element and its partner are in the same thread."""
    qkv, table, positions, slots, cache, q_out, bias, norm = tensors
    qkv_part, qkv_row, table_row, cache_batch, cache_slot, cache_kind, cache_head, norm_head = strides
    row = tl.program_id(0).to(tl.int64)
    batch = (tl.program_id(0) // count).to(tl.int64)
    node = (tl.program_id(0) % count).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    rotated = (head < HEADS + KV_HEADS)[:, None]
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & (d < HALF)[None, :]
    place = head[:, None] * (2 * HALF) + d[None, :]  # in a node's heads
    position = tl.load(positions + batch * positions_batch + node * positions_node)
    slot = tl.load(slots + batch * slots_batch + node * slots_node)

    qkv += row * qkv_row + place
    first = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    second = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for _ in tl.static_range(PARTS):  # unrolled: the loads do not wait for one another
        first += tl.load(qkv, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(qkv + HALF, mask=inside, other=0.0).to(tl.float32)
        qkv += qkv_part
    if bias is not None:
        first += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias + place + HALF, mask=inside, other=0.0).to(tl.float32)
    value_first, value_second = first, second
    if norm is not None:
        weight = norm + head[:, None] * norm_head + d[None, :]
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first = first * scale * tl.load(weight, mask=inside & rotated, other=0.0).to(tl.float32)
        second = second * scale * tl.load(weight + HALF, mask=inside & rotated, other=0.0).to(tl.float32)

    # cos of both halves, then sin of both: once for each head, so that every thread loads what it multiplies with
    angle = table + position * table_row + (head * 0)[:, None] + d[None, :]
    cos_first = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(angle + 2 * HALF, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(angle + 3 * HALF, mask=inside, other=0.0).to(tl.float32)
    out_first = tl.where(rotated, first * cos_first + second * sin_first, value_first)
    out_second = tl.where(rotated, second * cos_second + first * sin_second, value_second)

    is_query = (head < HEADS)[:, None]
    queries = q_out + row * HEADS * (2 * HALF) + place
    tl.store(queries, out_first.to(q_out.dtype.element_ty), mask=inside & is_query)
    tl.store(queries + HALF, out_second.to(q_out.dtype.element_ty), mask=inside & is_query)
    kind = ((head - HEADS) // KV_HEADS).to(tl.int64)  # 0 of a key, 1 of a value
    kv_head = ((head - HEADS) % KV_HEADS).to(tl.int64)
    stored = cache + batch * cache_batch + slot * cache_slot
    stored = stored + (kind * cache_kind + kv_head * cache_head)[:, None] + d[None, :]
    tl.store(stored, out_first.to(cache.dtype.element_ty), mask=inside & (is_query == 0))
    tl.store(stored + HALF, out_second.to(cache.dtype.element_ty), mask=inside & (is_query == 0))


def rotate_write(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q_out: Tensor,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate the queries and keys of new nodes; write the queries to ``q_out``, keys and values to the cache.

    Args:
        qkv: ``[S, M, (H + 2G) · D]`` in the dtype of q_out or float32: queries, keys, values; its parts are added up,
            and the code grows with S. D is even.
        table: ``[P, 2 · D]``: cos, then sin with its first half negated (``LeanDecoder.tables``); the last stride is 1.
        positions: ``[B, N]`` int64, < P: they are not checked.
        slots: ``[B or 1, N]`` int64 slots of the new nodes, different ones within a row; not checked either.
        cache: ``[B, slots, 2, G, D]`` in the dtype of q_out, keys and values of a layer; any strides but the last,
            which is 1.
        q_out: ``[B, N, H, D]`` float32, float16 or bfloat16, contiguous.
        bias: ``[(H + 2G) · D]``.
        norm: ``[H + G, D]`` in the dtype of q_out or float32: weights of the RMSNorm of each head of q and k; None for
            no norm.
        eps: of that norm.
    """
    (rows, count, heads, width), kv_heads = q_out.shape, cache.shape[3]
    qkv, positions, slots = dense(qkv), dense(positions), dense(slots)
    given = (positions.stride(0), positions.stride(1), 0 if len(slots) == 1 else slots.stride(0), slots.stride(1))
    if why_not_triton(qkv):
        if cpu.runs(q_out) and len(qkv) == 1 and qkv.dtype == table.dtype == q_out.dtype:
            norm = None if norm is None else norm.float()
            tensors = map(cpu.address, (qkv, table, positions, slots, cache, q_out, bias, norm))
            norm_head = 0 if norm is None else norm.stride(0)
            strides = (qkv.stride(1), table.stride(0), *given, *cache.stride()[:4], norm_head)
            cpu.function("rotate_write", q_out.dtype)(*tensors, eps, rows, count, heads, kv_heads, width, *strides)
            return
        rotate_write_reference(qkv, table, positions, slots, cache, q_out, bias=bias, norm=norm, eps=eps)
        return
    assert qkv.shape[1:] == (rows * count, (heads + 2 * kv_heads) * width) and width % 2 == 0
    assert q_out.is_contiguous() and table.shape[1] == 2 * width and positions.shape == (rows, count)
    assert all(one is None or one.stride(-1) == 1 for one in (table, cache, bias, norm))
    # About 512 elements, few, so that even a single node has several programs.
    all_heads, block_d = heads + 2 * kv_heads, next_power(width // 2)
    tile = {"BLOCK_H": min(next_power(all_heads), max(1, 256 // block_d)), "BLOCK_D": block_d, "num_warps": 2}
    tile |= {"PARTS": len(qkv), "HEADS": heads, "KV_HEADS": kv_heads, "HALF": width // 2}
    tensors = (qkv, table, positions, slots, cache, q_out, bias, norm)
    strides = (*qkv.stride()[:2], table.stride(0), *cache.stride()[:4], 0 if norm is None else norm.stride(0))
    with torch.cuda.device_of(qkv):
        _rotate_write_kernel[(rows * count, -(-all_heads // tile["BLOCK_H"]))](
            tensors, strides, eps, count, *given, **tile
        )
