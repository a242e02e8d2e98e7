"""The best R tokens of a vocabulary projection, without the logits: features · weightᵀ, then top-R of every row.

    values, ids = topk(features @ weightᵀ, R)

A head's logits ``[M, V]`` serve only to find a few tokens. Each program multiplies a block of the vocabulary and
keeps its best R; a second kernel merges the blocks' lists. The weight is read once, nothing of size V is written, and
nothing is sorted.

Ties: the lowest id first. Logits are float32 sums, not rounded to the inputs' dtype, so that 16-bit inputs tie less
often than with ``F.linear``. (PyTorch's ``topk``, which the plain path uses, breaks ties in no documented order.)

Shape letters: M rows, d hidden width, V vocabulary, R tokens kept, C candidates of a row (R of each block).
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.backend import constexpr, jit, next_power, tl, why_not_triton

MAX_COUNT = 16  # largest R: the kernel extracts the best R one by one


def head_topk_reference(features: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The definition of :func:`head_topk`, ties included."""
    logits = F.linear(features.float(), weight.float())
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]


@jit
def _block_topk_kernel(
    features, weight, values, ids, rows, width, vocabulary, features_row, weight_row, candidates,
    COUNT: constexpr, BLOCK_M: constexpr, BLOCK_V: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """One program per block of rows and of the vocabulary: logits by tl.dot, then COUNT times the best remaining."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    known = token < vocabulary
    feature_place = features + row.to(tl.int64)[:, None] * features_row
    weight_place = weight + token.to(tl.int64)[None, :] * weight_row
    logits = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(feature_place + k[None, :], mask=(row < rows)[:, None] & (k < width)[None, :], other=0.0)
        w = tl.load(weight_place + k[:, None], mask=known[None, :] & (k < width)[:, None], other=0.0)
        logits = tl.dot(x, w, logits, input_precision="ieee")
    left = tl.where(known[None, :], logits, float("-inf"))
    place = row.to(tl.int64) * candidates + tl.program_id(0) * COUNT
    for rank in range(COUNT):
        best = tl.max(left, 1)
        # The lowest id among the best; a block with no token left stores −inf and an id beyond the vocabulary.
        best_id = tl.min(tl.where((left == best[:, None]) & known[None, :], token[None, :], vocabulary), 1)
        known_best = best > float("-inf")
        tl.store(values + place + rank, best, mask=row < rows)
        tl.store(ids + place + rank, tl.where(known_best, best_id, vocabulary), mask=row < rows)
        left = tl.where(token[None, :] == best_id[:, None], float("-inf"), left)


@jit
def _merge_topk_kernel(
    values, ids, out_values, out_ids, candidates, vocabulary, COUNT: constexpr, BLOCK: constexpr
):  # fmt: skip
    """One program per row: COUNT times the next candidate in the order (value falling, id rising)."""
    row = tl.program_id(0).to(tl.int64)
    last_value = float("inf")
    last_id = -1
    for rank in range(COUNT):
        best = tl.full([BLOCK], float("-inf"), tl.float32)  # by lane
        best_id = tl.full([BLOCK], 0, tl.int32) + vocabulary
        for start in range(0, candidates, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(values + row * candidates + place, mask=place < candidates, other=float("-inf"))
            token = tl.load(ids + row * candidates + place, mask=place < candidates, other=vocabulary)
            after = (value < last_value) | ((value == last_value) & (token > last_id))
            better = after & ((value > best) | ((value == best) & (token < best_id)))
            best, best_id = tl.where(better, value, best), tl.where(better, token, best_id)
        last_value = tl.max(best, 0)
        last_id = tl.min(tl.where(best == last_value, best_id, vocabulary), 0)
        tl.store(out_values + row * COUNT + rank, last_value)
        # Where all logits are NaN there is no best; the id stays inside the vocabulary, since embeddings are looked up.
        tl.store(out_ids + row * COUNT + rank, tl.minimum(last_id, vocabulary - 1).to(tl.int64))


def topk_tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """The projection's block sizes, warps and stages; M is small, so reading the weight takes most of the time."""
    block_m = min(next_power(rows, 16), 64)
    exact = dtype == torch.float32  # products without tensor cores
    return {
        "BLOCK_M": min(block_m, 32) if exact else block_m,
        "BLOCK_V": 64 if exact else 128,
        "BLOCK_K": 32 if exact else 64,
        "num_warps": 4,
        "num_stages": 2 if exact else 4,
    }


def head_topk(features: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best ``count`` tokens of each row, best first.

    Args:
        features: ``[M, d]`` float32, float16 or bfloat16; the last stride is 1.
        weight: ``[V, d]`` of the same dtype; the last stride is 1.
        count: R ≤ min(16, V).

    Returns:
        values ``[M, R]`` float32 logits, ids ``[M, R]`` int64.
    """
    if why_not_triton(features):
        best = F.linear(features, weight).float().topk(count, -1)
        return best.values, best.indices
    rows, width = features.shape
    vocabulary = weight.shape[0]
    if not 0 < count <= min(MAX_COUNT, vocabulary):
        raise ValueError(f"head_topk: {count} tokens of {vocabulary}; use 1 to {min(MAX_COUNT, vocabulary)}")
    assert features.stride(1) == weight.stride(1) == 1
    tile = topk_tile(rows, features.dtype)
    blocks = -(-vocabulary // tile["BLOCK_V"])
    values = features.new_empty((rows, blocks * count), dtype=torch.float32)
    ids = features.new_empty((rows, blocks * count), dtype=torch.int32)
    best_values = features.new_empty((rows, count), dtype=torch.float32)
    best_ids = features.new_empty((rows, count), dtype=torch.int64)
    with torch.cuda.device_of(features):
        _block_topk_kernel[(blocks, -(-rows // tile["BLOCK_M"]))](
            features, weight, values, ids, rows, width, vocabulary, features.stride(0), weight.stride(0),
            blocks * count, COUNT=count, **tile,
        )  # fmt: skip
        _merge_topk_kernel[(rows,)](
            values, ids, best_values, best_ids, blocks * count, vocabulary, COUNT=count,
            BLOCK=min(1024, next_power(blocks * count, 16)), num_warps=4,
        )  # fmt: skip
    return best_values, best_ids
