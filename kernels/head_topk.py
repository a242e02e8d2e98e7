"""The best R tokens of a vocabulary projection, without the logits: features · weightᵀ, then top-R of every row.

    values, ids = topk(features @ weightᵀ, R)        of the logits l, or of
    log q = l − (max l + log Σ exp(l − max l)), from each block's maximum and sum

A head's logits ``[M, V]`` serve only to find a few tokens. Each program multiplies a block of the vocabulary and
keeps its best R; a second kernel merges the blocks' lists, a thousand candidates a program, again until one program
per row is left. The weight is read once, nothing of size V is written, and nothing is sorted.

A value and its id are compared as one integer: the value's bits, reordered so that they compare as the values do, above
the id counted downwards. One maximum then gives the best value and, among equal ones, the lowest id.

Ties: the lowest id first. Logits are float32 sums, not rounded to the inputs' dtype, so that 16-bit inputs tie less
often than with ``F.linear``. Tokens whose logit is NaN are left out. (PyTorch's ``topk``, which the plain path uses,
breaks ties in no documented order, and puts NaN first.) :func:`head_argmax` instead rounds each logit to the inputs'
dtype before it compares them, as the argmax of logits that were written does.

Shape letters: M rows, d hidden width, V vocabulary, R tokens kept, C candidates of a row (R of each block), P blocks.
"""
# ruff: noqa: ANN001, ANN201, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.backend import dense, jit, next_power, same_bits, tl, why_not_triton

MAX_COUNT = 16  # largest R: the kernel extracts the best R one by one
MERGED_AT_ONCE = 1024  # candidates that a program of the merge holds in registers


@jit
def packed(value, token):
    """A float32 value and an id ≥ 0 as int64: the larger of two has the larger value, or the same and the lower id."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -0x80000000, 0, bits)  # −0 = 0
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@jit
def unpacked(both):
    """The value and the id of :func:`packed`."""
    bits = (both >> 32).to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return value, 0x7FFFFFFF - (both & 0x7FFFFFFF).to(tl.int32)


@jit(do_not_specialize="rows count")
def _block_topk_kernel(
    head,
    outputs,
    rows,
    count,
    ARGMAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of rows and of the vocabulary: logits by tl.dot, then ``count`` times the best remaining.
    ``tops`` and ``sums``: each block's max l and Σ exp(l − max l), or None. ARGMAX: see :func:`head_argmax`."""
    features, weight, width, vocabulary, features_row, weight_row = head
    values, ids, tops, sums = outputs
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # first: programs that run together share the weight
    token = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    known = token < vocabulary
    feature_place = features + row.to(tl.int64)[:, None] * features_row
    weight_place = weight + token.to(tl.int64)[None, :] * weight_row
    logits = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(feature_place + k[None, :], mask=(row < rows)[:, None] & (k < width)[None, :], other=0.0)
        w = tl.load(weight_place + k[:, None], mask=known[None, :] & (k < width)[:, None], other=0.0)
        logits = tl.dot(x, w, logits, input_precision="ieee")
    if ARGMAX:
        logits = logits.to(features.dtype.element_ty).to(tl.float32)
        logits = tl.where(logits == logits, logits, float("inf"))
    candidate = known[None, :] & (logits == logits)  # not NaN
    if tops is not None:
        finite = tl.where(candidate, logits, float("-inf"))
        top = tl.max(finite, 1)
        total = tl.sum(tl.exp(finite - tl.where(top > float("-inf"), top, 0.0)[:, None]), 1)  # 0 of a block of −inf
        at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(tops + at, top, mask=row < rows)
        tl.store(sums + at, total, mask=row < rows)
    none = -0x7F80000100000000  # packed(−inf, 2³¹ − 1), for what was taken or is no candidate
    left = tl.where(candidate, packed(logits, token[None, :]), none)
    place = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * count
    for rank in range(count):
        best = tl.max(left, 1)
        value, best_id = unpacked(best)  # a block with no token left stores −inf and an id beyond the vocabulary
        tl.store(values + place + rank, value, mask=row < rows)
        tl.store(ids + place + rank, best_id, mask=row < rows)
        left = tl.where(left < best[:, None], left, none)


@jit(do_not_specialize="count candidates")
def _merge_topk_kernel(lists, last, vocabulary, count, candidates, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    """Several programs per row. Blocks of candidates are distributed round-robin over the programs of a row; each block
    is read once, and its best are merged with those of the program's earlier blocks.

    With ``tops`` and ``sums`` of the row's P = ``blocks`` blocks of the vocabulary, the values become log q; with
    ``tokens``, the ids their entries there.

    An id beyond the vocabulary marks no candidate. Where there are fewer than ``count``, as where logits are NaN, the
    values are −inf and the ids stay inside the vocabulary, since embeddings are looked up.
    """
    values, ids, out_values, out_ids = lists
    tops, sums, blocks, tokens = last
    row = tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, 16)  # MAX_COUNT
    none = -0x7F80000100000000  # as above
    best = tl.zeros([16], tl.int64) + none  # by rank
    for start in range(part * BLOCK, candidates, parts * BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(values + row * candidates + place, mask=place < candidates, other=float("-inf"))
        token = tl.load(ids + row * candidates + place, mask=place < candidates, other=vocabulary)
        left = tl.where((token < vocabulary) & (value == value), packed(value, token), none)
        earlier = best
        for rank in range(count):
            first = tl.maximum(tl.max(left, 0), tl.max(earlier, 0))
            left = tl.where(left < first, left, none)
            earlier = tl.where(earlier < first, earlier, none)
            best = tl.where(lane == rank, first, best)
    value, token = unpacked(best)
    token = tl.minimum(token, vocabulary - 1)
    if tops is not None:
        block = tl.arange(0, BLOCK_P)
        top = tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf"))
        total = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
        highest = tl.max(top, 0)
        total = tl.sum(tl.where(total > 0, total * tl.exp(top - highest), 0.0), 0)
        value = tl.where(value > float("-inf"), value - (highest + tl.log(total)), value)
    if tokens is not None:
        token = tl.load(tokens + token, mask=lane < count, other=0)
    place = (row * parts + part) * count + lane
    tl.store(out_values + place, value, mask=lane < count)
    tl.store(out_ids + place, token.to(out_ids.dtype.element_ty), mask=lane < count)


def merge_topk(
    values: Tensor,
    ids: Tensor,
    count: int,
    vocabulary: int,
    tops: Tensor | None = None,
    sums: Tensor | None = None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best ``count`` of each row's candidates by the kernel above, best first, among equal values the lowest id.

    Args:
        values: ``[M, C]`` float32, contiguous.
        ids: ``[M, C]`` int32, contiguous; those of ``vocabulary`` and above mark no candidate.
        count: R ≤ 16.
        tops, sums: ``[M, P]`` float32, max l and Σ exp(l − max l) of each block of the vocabulary: for log q.
        tokens: ``[vocabulary]`` int64, in place of the ids.

    Returns:
        values ``[M, R]`` float32, ids ``[M, R]`` int64.
    """
    blocks = 0 if tops is None else tops.shape[1]
    while True:
        rows, candidates = values.shape
        parts = -(-candidates // MERGED_AT_ONCE)
        best_values = values.new_empty(rows, parts * count)
        best_ids = ids.new_empty((rows, parts * count), dtype=torch.int64 if parts == 1 else torch.int32)
        with torch.cuda.device_of(values):
            lists = (values, ids, best_values, best_ids)
            last = (tops, sums, blocks, tokens) if parts == 1 else (None, None, 0, None)
            tile = {"BLOCK": 128 if candidates <= 128 else MERGED_AT_ONCE, "BLOCK_P": next_power(max(1, blocks))}
            _merge_topk_kernel[(rows, parts)](lists, last, vocabulary, count, candidates, **tile, num_warps=4)
        if parts == 1:
            return best_values, best_ids
        values, ids = best_values, best_ids


def topk_tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """The projection's block sizes, warps and stages; M is small, so reading the weight takes most of the time, and two
    numbers of rows are enough: each more is another kernel to compile."""
    exact = dtype == torch.float32  # products without tensor cores
    return {
        "BLOCK_M": 32 if exact or (rows <= 32 and not same_bits()) else 64,
        "BLOCK_V": 64 if exact else 128,
        "BLOCK_K": 32 if exact else 64,
        "num_warps": 4,
        "num_stages": 2 if exact else 4,
    }


def head_topk(
    features: Tensor, weight: Tensor, count: int, log_q: bool = False, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best ``count`` tokens of each row, best first.

    Args:
        features: ``[M, d]`` float32, float16 or bfloat16.
        weight: ``[V, d]`` of the same dtype; the last stride is 1.
        count: R ≤ min(16, V).
        log_q: whether the values are log probabilities.
        tokens: ``[V]`` int64, the token of each row of the weight; its number if None.

    Returns:
        values ``[M, R]`` float32 logits or log probabilities, ids ``[M, R]`` int64.
    """
    if why_not_triton(features):
        return best_tokens(F.linear(features, weight), count, log_q, tokens)
    if not 0 < count <= min(MAX_COUNT, len(weight)):
        raise ValueError(f"head_topk: {count} tokens of {len(weight)}; use 1 to {min(MAX_COUNT, len(weight))}")
    return _head_topk(features, weight, count, log_q, tokens)


def best_tokens(logits: Tensor, count: int, log_q: bool = False, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`head_topk` from the logits ``[…, V]``, by PyTorch: values and ids ``[…, R]``. ``tokens``: ``[V]`` as
    there, or ``[B, V]`` for logits ``[B, n, V]``, where −1 stands for padding, whose logits are −inf."""
    logits = logits.float()
    values = logits.log_softmax(-1) if log_q else logits
    values, ids = values.max(-1, keepdim=True) if count == 1 else values.topk(count, -1)  # max is faster
    return values, tokens_at(ids, tokens)


def tokens_at(places: Tensor, tokens: Tensor | None) -> Tensor:
    """The tokens of places ``[B, …]`` int64 in a vocabulary ``tokens [V]`` or ``[B, V]`` int64; places are tokens if
    it is None."""
    if tokens is None:
        return places
    if tokens.ndim == 1:
        return tokens[places]
    return tokens.gather(1, places.flatten(1)).clamp(min=0).view_as(places)  # padding has no token, and is not drafted


def head_argmax(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, as ``F.linear(features, weight).max(-1)`` has it: logits are rounded to the
    inputs' dtype, and among equal ones the lowest id counts.

    Args:
        features: ``[…, d]`` float32, float16 or bfloat16.
        weight: ``[V, d]`` of the same dtype; the last stride is 1.

    Returns:
        The token's logit ``[…]``, not finite (NaN, or +inf) if a logit is NaN or +inf, or all are −inf; its id ``[…]``
        int64.
    """
    if why_not_triton(features):
        return F.linear(features, weight).max(-1)
    values, ids = _head_topk(features.flatten(0, -2), weight, 1, argmax=True)
    return values.view(features.shape[:-1]), ids.view(features.shape[:-1])


def _head_topk(
    features: Tensor,
    weight: Tensor,
    count: int,
    log_q: bool = False,
    tokens: Tensor | None = None,
    argmax: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both kernels."""
    (rows, width), vocabulary = features.shape, len(weight)
    features = dense(features)
    assert weight.stride(1) == 1 and (tokens is None or tokens.is_contiguous())
    tile = topk_tile(rows, features.dtype)
    blocks = -(-vocabulary // tile["BLOCK_V"])
    values = features.new_empty((rows, blocks * count), dtype=torch.float32)
    ids = features.new_empty((rows, blocks * count), dtype=torch.int32)
    tops, sums = features.new_empty((2, rows, blocks), dtype=torch.float32) if log_q else (None, None)
    head = (features, weight, width, vocabulary, features.stride(0), weight.stride(0))
    with torch.cuda.device_of(features):
        _block_topk_kernel[(-(-rows // tile["BLOCK_M"]), blocks)](
            head, (values, ids, tops, sums), rows, count, ARGMAX=argmax, **tile
        )
    return merge_topk(values, ids, count, vocabulary, tops, sums, tokens)
