"""An LM head over a shortlist: the rows of a few clusters of tokens, chosen anew for every text (DynaSpec, arXiv
2510.13847).

    logits = features · weight[rows]ᵀ,  −inf in padding

The head's rows are permuted once so that a cluster is a slab of consecutive rows: cluster c has rows ``starts[c]`` …
``starts[c + 1] − 1`` of ``weight``, and row r belongs to token ``ids[r]``. A shortlist has a fixed capacity in tokens,
so that shapes are static under CUDA graphs: clusters are taken in the order of their scores, of the last one as many
rows as fit, and padding fills what is left. Nothing is copied to the host on a GPU.

On a GPU the kernels gather the rows while they multiply: each weight is read once and not written, and sums are taken
in a fixed order. On a CPU, rows are copied together into a buffer that stays in the cache and multiplied there, always
in the same shape: oneDNN's first product of a shape takes several times as long as the following ones. Products with
each slab where it is take longer: a small one runs on one thread.

Shape letters: B texts, n nodes of a text, d hidden width, V vocabulary, M clusters, k clusters wanted, C capacity of a
shortlist, R tokens kept.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton
from draftsmith.kernels.head_topk import MAX_COUNT, best_tokens, merge_topk, topk_tile
from draftsmith.kernels.linear import linear

CHUNK_BYTES = 3 << 20  # of rows that are copied together on a CPU


class Shortlist(NamedTuple):
    """What :func:`pack_shortlist` selects.

    rows: ``[B, C]`` int64 rows of the permuted head, ascending, then padding (−1).
    count: ``[B]`` int64, rows before the padding.
    dropped: ``[B]`` int64, rows of the wanted clusters that were left out; their share is dropped / (count + dropped).
    """

    rows: Tensor
    count: Tensor
    dropped: Tensor


def pack_shortlist(scores: Tensor, starts: Tensor, clusters: int, capacity: int) -> Shortlist:
    """The rows of the best clusters of each text, as many as fit.

    The k best clusters are wanted, equal scores by the lower number, and taken in this order. Of the first that does
    not fit, as many rows are taken as fit, its first ones, which ends the list. Rows are in the order of the head, not
    of the scores: neighbouring clusters are one slab, and which of two equal logits comes first does not depend on the
    scores.

    Args:
        scores: ``[B, M]`` float; NaN counts as the highest.
        starts: ``[M + 1]`` int64, ascending from 0 to V; a cluster without rows counts as one of the wanted.
        clusters: k, 1 to M.
        capacity: C ≥ 1.

    Raises:
        ValueError: there are no clusters or fewer than k, or no capacity.
    """
    if not 1 <= clusters <= scores.shape[1]:
        raise ValueError(f"pack_shortlist: {clusters} clusters of {scores.shape[1]}; use 1 to {scores.shape[1]}")
    if capacity < 1:
        raise ValueError(f"pack_shortlist: a capacity of {capacity} tokens; use at least 1")
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :clusters]  # [B, k]
    wanted = starts.diff()[order]
    ends = wanted.cumsum(-1)
    fitting = torch.minimum((capacity - ends + wanted).clamp(min=0), wanted)
    taken = wanted.new_zeros(scores.shape).scatter(1, order, fitting)  # [B, M], in the order of the head
    until = taken.cumsum(-1)
    begin, count = until - taken, until[:, -1]
    # Where a taken cluster begins, note how far its rows are ahead of their places. This only grows, so that a running
    # maximum carries it on to the cluster's other places. Clusters not taken write to a place that is cut off.
    ahead = wanted.new_zeros(len(scores), capacity + 1)
    ahead = ahead.scatter(1, torch.where(taken > 0, begin, capacity), starts[:-1] - begin)[:, :-1].cummax(-1).values
    places = torch.arange(capacity, device=scores.device)
    rows = torch.where(places < count[:, None], ahead + places, -1)
    return Shortlist(rows, count, ends[:, -1] - count)


def _tokens(values: Tensor, places: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """The token ids of places in the shortlists, ``[B, n, R]``; the first one's where the value is −inf."""
    places = places.masked_fill(values == float("-inf"), 0)
    return ids[rows.gather(1, places.flatten(1)).clamp(min=0)].view(places.shape)


@jit(do_not_specialize="rows capacity features_text head_rows_text")
def _shortlist_kernel(
    head,
    outputs,
    rows,
    capacity,
    features_text,
    head_rows_text,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of nodes, block of the shortlist and text: its logits, −inf where there is no row of the
    head. COUNT = 0 stores them; else COUNT times the best remaining one and its place in the shortlist, −inf and any
    place where there is none.

    head: pointers to features, weight and the texts' rows of the head, the width, strides of features and weight.
    ``tops`` and ``sums``: each block's max l and Σ exp(l − max l), or None.
    """
    features, weight, head_rows, width, features_row, weight_row = head
    values, places, tops, sums = outputs
    text = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    head_row = tl.load(head_rows + text * head_rows_text + place, mask=place < capacity, other=-1)
    known = head_row >= 0
    feature_place = features + text * features_text + row.to(tl.int64)[:, None] * features_row
    weight_place = weight + head_row.to(tl.int64)[None, :] * weight_row
    logits = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(feature_place + k[None, :], mask=(row < rows)[:, None] & (k < width)[None, :], other=0.0)
        w = tl.load(weight_place + k[:, None], mask=known[None, :] & (k < width)[:, None], other=0.0)
        logits = tl.dot(x, w, logits, input_precision="ieee")
    left = tl.where(known[None, :], logits, float("-inf"))
    node, exists = text * rows + row, row < rows  # among the nodes of all texts
    if tops is not None:
        finite = tl.where(left == left, left, float("-inf"))  # not NaN
        top = tl.max(finite, 1)
        total = tl.sum(tl.exp(finite - tl.where(top > float("-inf"), top, 0.0)[:, None]), 1)  # 0 of a block of −inf
        block = node * tl.num_programs(1) + tl.program_id(1)
        tl.store(tops + block, top, mask=exists)
        tl.store(sums + block, total, mask=exists)
    if COUNT == 0:
        out = values + node[:, None] * capacity + place[None, :]
        tl.store(out, left, mask=exists[:, None] & (place < capacity)[None, :])
    else:
        out_place = (node * tl.num_programs(1) + tl.program_id(1)) * COUNT
        for rank in range(COUNT):
            best = tl.max(left, 1)
            best_place = tl.min(tl.where(left == best[:, None], place[None, :], capacity), 1)
            tl.store(values + out_place + rank, best, mask=exists)
            tl.store(places + out_place + rank, best_place, mask=exists)
            left = tl.where(place[None, :] == best_place[:, None], float("-inf"), left)


def _launch(
    features: Tensor, weight: Tensor, rows: Tensor, count: int, log_q: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The kernel's outputs. For a count of 0 logits ``[B, n, C]``; else values and places ``[B, n, P · count]`` of P
    blocks and, for ``log_q``, the blocks' ``tops`` and ``sums`` ``[B · n, P]``. None in place of the others."""
    features, rows = dense(features), dense(rows)
    assert weight.stride(1) == 1
    (texts, nodes, width), capacity = features.shape, rows.shape[1]
    tile = topk_tile(nodes, features.dtype)
    grid = (-(-nodes // tile["BLOCK_M"]), -(-capacity // tile["BLOCK_V"]), texts)
    values = features.new_empty((texts, nodes, grid[1] * count or capacity), dtype=torch.float32)
    places = torch.empty_like(values, dtype=torch.int32) if count else None
    tops, sums = features.new_empty((2, texts * nodes, grid[1]), dtype=torch.float32) if log_q else (None, None)
    head = (features, weight, rows, width, features.stride(1), weight.stride(0))
    with torch.cuda.device_of(features):
        sizes = (nodes, capacity, features.stride(0), rows.stride(0))
        _shortlist_kernel[grid](head, (values, places, tops, sums), *sizes, COUNT=count, **tile)
    return values, places, tops, sums


@jit(do_not_specialize="rows head_rows_text")
def _tokens_kernel(values, places, head_rows, ids, out, rows, head_rows_text, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """:func:`_tokens`, one program per node."""
    rank = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * COUNT + rank
    value = tl.load(values + at, mask=rank < COUNT, other=float("-inf"))
    place = tl.load(places + at, mask=rank < COUNT, other=0)
    place = tl.where(value > float("-inf"), place, 0)
    head_row = tl.load(head_rows + (tl.program_id(0) // rows).to(tl.int64) * head_rows_text + place)
    tl.store(out + at, tl.load(ids + tl.maximum(head_row, 0)), mask=rank < COUNT)


def shortlist_logits(features: Tensor, weight: Tensor, rows: Tensor, static: bool = False) -> Tensor:
    """Logits over each text's shortlist.

    A scale of the logits may be applied afterwards, a soft cap may not: it would make padding finite. On a CPU, logits
    of 16-bit inputs are rounded to the inputs' dtype, as ``F.linear`` does.

    Args:
        features: ``[B, n, d]`` float32, float16 or bfloat16.
        weight: ``[V, d]`` of the same dtype; the last stride is 1. No gradients are computed.
        rows: ``[B, C]`` int64, from :func:`pack_shortlist`; any other order is correct too, with padding (−1) at
            the end.
        static: read nothing on the host on a CPU either, as in a step that a CUDA graph could capture; slower there.

    Returns:
        ``[B, n, C]`` float32, −inf in padding.
    """
    if why_not_triton(features):
        if features.is_cpu and not static:
            return _logits_cpu(features, weight, rows)
        logits = (features @ weight[rows.clamp(min=0)].transpose(1, 2)).float()
        return logits.masked_fill((rows < 0)[:, None], float("-inf"))
    return _launch(features, weight, rows, 0)[0]


def _logits_cpu(features: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """Products with rows that are copied together, part by part, into a buffer that stays in the cache."""
    (texts, nodes, width), capacity = features.shape, rows.shape[1]
    parts = -(-capacity * width * weight.element_size() // CHUNK_BYTES)
    size = -(-capacity // parts)
    buffer = weight.new_empty(size, width)
    logits = features.new_full((texts, nodes, capacity), float("-inf"), dtype=torch.float32)
    counts = (rows >= 0).sum(1)
    for text in range(texts):
        count = int(counts[text])
        for place in range(0, count, size):
            part = rows[text, place : min(place + size, count)]
            torch.index_select(weight, 0, part, out=buffer[: len(part)])
            # The last part is multiplied with what the buffer held before: the product keeps its shape.
            logits[text, :, place : place + len(part)] = linear(features[text], buffer)[:, : len(part)]
    return logits


def shortlist_topk(
    features: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, count: int, static: bool = False, log_q: bool = False
) -> tuple[Tensor, Tensor]:
    """The best ``count`` tokens of each node's shortlist, best first; on a GPU without writing the logits.

    Ties: the first in the shortlist (on the plain path PyTorch's ``topk`` decides). A shortlist of fewer tokens is
    filled up with value −inf and the token of its first row, so that every id can be looked up.

    Args:
        features, weight, rows, static: as in :func:`shortlist_logits`. A row that occurs twice is two candidates.
        ids: ``[V]`` int64 token of each row of the head.
        count: R ≤ min(16, C).
        log_q: whether the values are log probabilities over the shortlist.

    Returns:
        values ``[B, n, R]`` float32 logits or log probabilities, ids ``[B, n, R]`` int64.

    Raises:
        ValueError: R is out of range.
    """
    (texts, nodes, _), capacity = features.shape, rows.shape[1]
    if not 0 < count <= min(MAX_COUNT, capacity):
        raise ValueError(f"shortlist_topk: {count} tokens of {capacity}; use 1 to {min(MAX_COUNT, capacity)}")
    if why_not_triton(features):
        values, places = best_tokens(shortlist_logits(features, weight, rows, static), count, log_q)
        return values, _tokens(values, places, rows, ids)
    rows, ids = dense(rows), dense(ids)
    values, places, tops, sums = _launch(features, weight, rows, count, log_q)
    assert places is not None
    with torch.cuda.device_of(features):
        best_values, best_places = merge_topk(values.flatten(0, 1), places.flatten(0, 1), count, capacity, tops, sums)
        best_ids = torch.empty_like(best_places)
        lists, sizes = (best_values, best_places, rows, ids, best_ids), (nodes, rows.stride(0))
        _tokens_kernel[(texts * nodes,)](*lists, *sizes, COUNT=count, BLOCK=next_power(count), num_warps=1)
    return best_values.view(texts, nodes, count), best_ids.view(texts, nodes, count)
