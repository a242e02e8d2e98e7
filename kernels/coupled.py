"""Coupled sampling: the best tokens of log p + g, with Gumbel noise g that belongs to the text (algorithms.md §2.6).

    s(x) = (l(x) − max l) / T where top-k, top-p and min-p keep x (:mod:`draftsmith.kernels.distribution`), else −∞
    score(x) = s(x) + g(x),    g = −log E,    E = −log(1 − u)

u is a function of the request's seed, the position in the text of the token before x, and the target's token id: so the
token of highest score is a draw from p (the exponential race: argmin E / p), and the same one whatever the row of the
batch, the tree, or its node. A drafter that scores its own distribution with the same noise proposes the
tokens that the target is likely to take.

u comes from Philox 4×32-10 (Salmon et al., 2011) with the seed as key and the counter ((x // 64) · 16 + x % 16,
position, a constant): word x // 16 % 4 of its four, as (word + ½) · 2⁻³². Small u have the full resolution of float32,
so that E and the largest g have, too. Where the temperature is 0 there is no noise: the limit T → 0.

Shape letters: B rows, N nodes, V tokens of the logits, k tokens asked for.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor

from draftsmith.kernels import cpu
from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton
from draftsmith.kernels.distribution import distribution_reference, distribution_scalars, philox_words
from draftsmith.kernels.head_topk import MAX_COUNT, merge_topk, packed, tokens_at, unpacked

_STREAM = 0x434F5550  # the last word of the counter; the draws of other modes have small numbers there
_MOST_ON_CPU = 64  # tokens, in kernels/cpu.cpp
_BLOCK = 1024  # tokens of a program


def uniforms(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """u of tokens, float32 in (0, 1). ``seed, position, token``: int64, of shapes that broadcast to the result's."""
    counter = token // 64 * 16 + token % 16
    words = torch.stack(philox_words(counter, position, position >> 32, _STREAM, seed), -1)
    word = (token // 16 % 4).expand(words.shape[:-1])
    return ((words.gather(-1, word[..., None])[..., 0].double() + 0.5) * 2.0**-32).float().clamp(max=1 - 2.0**-24)


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The noise g of tokens, float32; arguments as :func:`uniforms`."""
    return -(-torch.log1p(-uniforms(seed, position, token))).log()


def coupled_topk_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    count: int,
    tokens: Tensor | None = None,
    uses: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of :func:`coupled_topk`."""
    x, noisy = logits.float(), (temperature > 0)[:, None, None]
    p = distribution_reference(
        x, torch.where(noisy[:, 0, 0], temperature, 1.0), top_k, top_p, min_p, (False, *uses[1:])
    )
    finite = torch.where(p[..., 0].isnan(), torch.nan, 1.0)
    gap = (x - x.amax(-1, keepdim=True)) / torch.where(noisy, temperature[:, None, None], 1.0)
    ids = torch.arange(x.shape[-1], device=x.device) if tokens is None else tokens
    ids = ids.expand(len(x), 1, -1) if ids.ndim == 1 else ids[:, None]
    g = gumbel(seed[:, None, None], positions[..., None], ids.clamp(min=0))
    score = torch.where(noisy, torch.where(p > 0, gap + g, -torch.inf), gap)
    score = score.masked_fill(score.isnan() | finite.isnan()[..., None], -torch.inf)
    score, place = score.sort(dim=-1, descending=True, stable=True)
    place = place[..., :count]
    return finite, score[..., :count], ids.clamp(min=0).expand(-1, x.shape[1], -1).gather(2, place)


@jit(do_not_specialize="nodes logits_row logits_node tokens_row seed_row")
def _coupled_kernel(
    tensors, sizes, nodes, logits_row, logits_node, tokens_row, seed_row, STREAM: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per node and block of the vocabulary: scores, then ``count`` times the best remaining."""
    logits, scalars, best, seed, positions, tokens, values, ids = tensors
    vocabulary, count = sizes
    node = tl.program_id(0).to(tl.int64)
    row = node // nodes
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = x < vocabulary
    value = tl.load(logits + row * logits_row + node % nodes * logits_node + x, mask=inside, other=float("-inf"))
    token = x
    if tokens is not None:
        token = tl.maximum(tl.load(tokens + row * tokens_row + x, mask=inside, other=0), 0).to(tl.int32)
    key, position = tl.load(seed + row * seed_row), tl.load(positions + node)
    zero = token * 0
    c0, c1, c2, c3 = tl.philox(
        key,
        (token // 64 * 16 + token % 16).to(tl.uint32),
        (zero + position).to(tl.uint32),
        (zero + (position >> 32)).to(tl.uint32),
        (zero + STREAM).to(tl.uint32),
    )
    word = token // 16 % 4
    words = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log1p, which Triton does not have everywhere: −log(1 − u) = u + u²/2 + u³/3 + … for small u
    series = uniform * (1 + uniform * (0.5 + uniform * (0.33333334 + uniform * (0.25 + uniform * 0.2))))
    exponential = tl.where(uniform < 0.03, series, -tl.log(1 - uniform))
    scaled = tl.div_rn(value.to(tl.float32) - tl.load(scalars + node * 4), tl.load(scalars + node * 4 + 1))
    score = scaled - tl.log(exponential)
    floor = tl.load(scalars + node * 4 + 2)
    if best is not None:
        greedy = tl.load(best + node) >= 0
        score = tl.where(greedy, scaled, score)
        floor = tl.where(greedy, float("-inf"), floor)
    # At a node whose logits are not finite Z is NaN, and no token is kept.
    floor = tl.where(tl.load(scalars + node * 4 + 3) > 0, floor, float("inf"))
    kept = inside & (scaled >= floor) & (scaled > float("-inf"))
    none = -0x7F80000100000000  # as in kernels/head_topk.py
    left = tl.where(inside, packed(tl.where(kept, score, -3e38), x), none)  # others in order of their ids
    place = (node * tl.num_programs(1) + tl.program_id(1)) * count
    for rank in range(count):
        first = tl.max(left, 0)
        best_score, best_id = unpacked(first)
        tl.store(values + place + rank, best_score)
        tl.store(ids + place + rank, best_id)
        left = tl.where(left < first, left, none)


def coupled_topk(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    count: int,
    tokens: Tensor | None = None,
    uses: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` tokens of highest score after each node, best first. The first one is a draw from the target's
    distribution, if the logits are the target's.

    Args:
        logits: ``[B, N, V]`` of any float dtype.
        temperature, top_p, min_p: ``[B]`` float32; top_k ``[B]`` int64: as ``distribution_scalars`` takes them.
        seed: ``[B]`` int64.
        positions: ``[B, N]`` int64, of the nodes in the text.
        count: k ≤ V.
        tokens: ``[V]`` or ``[B, V]`` int64, the target's token of each logit, −1 at padding, whose logits are −inf;
            its number if None.
        uses: whether some row has temperature 0, some row top-k or top-p, some row min-p; the rest is not read.

    Returns:
        A number ``[B, N]`` float32 that is NaN or infinite where the logits hold NaN or +∞, or −∞ only; the scores
        ``[B, N, k]`` float32, −∞ or −3e38 beyond the tokens that are kept; the target's tokens ``[B, N, k]`` int64, all
        different but for padding, where they are 0.
    """
    (rows, nodes, vocabulary), device = logits.shape, logits.device
    settings = (temperature, top_k, top_p, min_p)
    if cpu.runs(logits) and count <= _MOST_ON_CPU:
        logits, tokens = logits.contiguous(), None if tokens is None else tokens.contiguous()
        by_row = [x.contiguous() for x in (*settings, seed, positions)]
        finite = torch.empty(rows, nodes, device=device)
        scores = torch.empty(rows, nodes, count, device=device)
        ids = torch.empty(rows, nodes, count, dtype=torch.int64, device=device)
        tokens_row = 0 if tokens is None or tokens.ndim == 1 else vocabulary
        sizes, out = (rows, nodes, vocabulary), map(cpu.address, (finite, scores, ids))
        cpu.function("coupled", logits.dtype)(
            logits.data_ptr(), *sizes, cpu.address(tokens), tokens_row, *map(cpu.address, by_row), count, *out
        )
        return finite, scores, ids
    if why_not_triton(logits) or count > MAX_COUNT:
        return coupled_topk_reference(logits, *settings, seed, positions, count, tokens, uses)
    logits, positions = dense(logits), positions.contiguous()
    scalars, greedy, _ = distribution_scalars(logits, *settings, uses)
    block = min(_BLOCK, next_power(vocabulary))
    blocks = -(-vocabulary // block)
    values = torch.empty(rows * nodes, blocks * count, dtype=torch.float32, device=device)
    places = torch.empty(rows * nodes, blocks * count, dtype=torch.int32, device=device)
    with torch.cuda.device_of(logits):
        best, own = greedy if uses[0] else None, None if tokens is None else tokens.contiguous()
        tensors = (logits, scalars, best, seed, positions, own, values, places)
        strides = (*logits.stride()[:2], 0 if own is None or own.ndim == 1 else vocabulary, seed.stride(0))
        _coupled_kernel[(rows * nodes, blocks)](
            tensors, (vocabulary, count), nodes, *strides, STREAM=_STREAM, BLOCK=block, num_warps=4
        )
        scores, ids = merge_topk(values, places, count, vocabulary)
    scores, ids = scores.view(rows, nodes, count), ids.view(rows, nodes, count)
    return scalars[..., 3], scores, tokens_at(ids, tokens)
