"""Attention of EAGLE's unrolled steps in training (training-time test, arXiv 2503.01840 §3.2).

    scores of query t in step i: q_t · k⁰_j for the first step's keys j that it sees, and q_t · kⁿ_t for n = 1 … i

Index t sees the first step's keys up to t of its own sample, and one key of each later step, its own. On a GPU,
FlexAttention computes the former without the blocks that no query sees, and the latter are merged by the logarithms of
the softmax's denominators, as FlashAttention merges its blocks (arXiv 2205.14135). Elsewhere, and without gradients, a
dense mask and chunks of queries take its place, which are the reference.

Shape letters: B batch, T tokens, P positions that draft, K unrolled steps, H query heads, G key/value heads, R = H / G,
D head width.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers.models.llama.modeling_llama import rotate_half

from draftsmith.common.command import first_line
from draftsmith.models.precision import say

Keys = tuple[Tensor, Tensor]  # rotated keys and values, each [B, G, T, D]
SCORES = {"cpu": 1 << 21, "cuda": 1 << 26}  # attention scores that exist at one time in training
NARROWEST = 16  # width of a head that FlexAttention's kernels take


def marked_places(marks: Tensor) -> Tensor:
    """The marked indices of each row, followed by unmarked ones where a row has fewer than another.
    ``marks``: ``[B, T]`` bool.
    Returns ``[B, P]`` int64, P ≥ 1 the largest number of marks in a row."""
    return marks.byte().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(marks.sum(1).max()))]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``x [B, heads, T, D]``, ``cos`` and ``sin`` ``[B, T, D]``."""
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def takes_blocks(q: Tensor) -> bool:
    """Whether FlexAttention runs for these queries ``[B, H, P, D]``: on a GPU, in training."""
    return q.is_cuda and torch.is_grad_enabled() and q.shape[-1] >= NARROWEST and _runs(q.device)


@cache
def _runs(device: torch.device) -> bool:
    """Whether FlexAttention compiles for a device, forward and backward. It is tried once; a line says if not."""
    length = 256  # several blocks
    q, *keys = (torch.zeros(1, 1, length, 64, device=device, requires_grad=True) for _ in range(5))
    try:
        mask = block_mask(torch.arange(length, device=device)[None], None, length)
        unrolled_attention(q, (keys[0], keys[1]), [(keys[2], keys[3])], mask).sum().backward()
    except Exception as error:  # of the compiler, which has many kinds
        say(f"flex_attention does not run here ({first_line(error)}): unrolled steps take whole masks, and longer")
        return False
    return True


def dense_mask(chosen: Tensor, segment: Tensor | None, length: int) -> Tensor:
    """Whether the query of an index sees a key of the first step: ``[B, P, T]`` bool.
    ``chosen``: ``[B, P]`` int64, the queries' indices.
    ``segment``: ``[B, T]``, which sample of its row a token belongs to; None: one sample a row."""
    mask = chosen[:, :, None] >= torch.arange(length, device=chosen.device)
    return mask if segment is None else mask & (segment.gather(1, chosen)[:, :, None] == segment[:, None])


def block_mask(chosen: Tensor, segment: Tensor | None, length: int) -> BlockMask:
    """:func:`dense_mask` for FlexAttention, by blocks of queries and keys."""
    segment = chosen.new_zeros(len(chosen), length) if segment is None else segment
    own = segment.gather(1, chosen)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (chosen[row, query] >= key) & (own[row, query] == segment[row, key])

    make = _on(chosen.device.type, create_block_mask)
    return make(sees, len(chosen), None, chosen.shape[1], length, device=chosen.device)


@cache
def _on(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of FlexAttention for a kind of device; only compiled it writes no dense mask and no scores."""
    return torch.compile(function) if kind == "cuda" else function


def unrolled_attention(
    q: Tensor, first: Keys, later: Sequence[Keys], mask: Tensor | BlockMask, chunk: int | None = None
) -> Tensor:
    """Attention ``[B, H, P, D]`` of an unrolled step, as one softmax: the first step's keys by the mask, and one key of
    each later step, the one in the query's own place.

    With a dense mask the weights of ``chunk`` queries exist at a time; the backward pass computes them again.

    Args:
        q: ``[B, H, P, D]``, rotated.
        first: rotated keys and values of the first step, ``[B, G, T, D]``.
        later: those of the steps after it, this one included, ``[B, G, P, D]``.
        mask: :func:`block_mask`, or ``[B or 1, P, T]`` bool; a query sees one key at least.
        chunk: by default as many as keep :data:`SCORES` scores.
    """
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    keys = [part.to(dtype) for pair in (first, *later) for part in pair]
    with torch.autocast(kind, enabled=False):
        if isinstance(mask, BlockMask):
            return _attention_by_blocks(q.to(dtype), keys, mask)
        scores = q.shape[0] * q.shape[1] * mask.shape[-1]  # of a query
        chunk = chunk or max(1, SCORES["cpu" if kind == "cpu" else "cuda"] // scores)
        groups = q.to(dtype).unflatten(1, (keys[0].shape[1], -1))
        return _UnrolledAttention.apply(groups, mask, chunk, *keys).flatten(1, 2)


def _attention_by_blocks(q: Tensor, keys: Sequence[Tensor], mask: BlockMask) -> Tensor:
    """:func:`unrolled_attention` by FlexAttention. ``keys``: keys and values of each step in turn."""
    options: dict[str, Any] = {"kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}  # its decoding limits grouping
    options |= {"enable_gqa": True, "block_mask": mask, "return_aux": AuxRequest(lse=True)}
    out, of_first = _on(q.device.type, flex_attention)(q, keys[0], keys[1], **options)
    if len(keys) == 2:
        return out
    grouped = q.unflatten(1, (keys[0].shape[1], -1))  # [B, G, R, P, D]
    scale, dtype = q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
    own = [(grouped * k[:, :, None]).sum(-1, dtype=dtype).flatten(1, 2) * scale for k in keys[2::2]]
    weights = torch.stack([of_first.lse.to(dtype), *own], -1).softmax(-1).to(q.dtype)  # [B, H, P, 1 + later steps]
    values = (v.repeat_interleave(grouped.shape[2], 1) for v in keys[3::2])
    return sum((w[..., None] * v for w, v in zip(weights.unbind(-1)[1:], values, strict=True)), weights[..., :1] * out)


class _UnrolledAttention(torch.autograd.Function):
    """q ``[B, G, R, P, D]``, R = H / G. Kept for the backward pass are inputs, output and the logarithm of each
    softmax's denominator (as in FlashAttention, arXiv 2205.14135)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, mask: Tensor, chunk: int, *keys: Tensor) -> Tensor:
        out, denominators = torch.empty_like(q), list[Tensor]()
        for begin in range(0, q.shape[3], chunk):
            part = slice(begin, begin + chunk)
            scores, own = _scores(q[..., part, :], mask[:, part], keys, part)
            denominator = torch.cat([scores.logsumexp(-1, keepdim=True), own], -1).logsumexp(-1, keepdim=True)
            weights, own = scores.sub_(denominator).exp_().to(q.dtype), own.sub_(denominator).exp_().to(q.dtype)
            mixed = (weights.flatten(2, 3) @ keys[1]).unflatten(2, weights.shape[2:4])
            for weight, values in zip(own.unbind(-1), keys[3::2], strict=True):
                mixed.addcmul_(weight[..., None], values[:, :, None, part])
            out[..., part, :] = mixed
            denominators.append(denominator)
        ctx.save_for_backward(q, mask, out, torch.cat(denominators, 3), *keys)
        ctx.chunk = chunk
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, mask, out, denominator, *keys = ctx.saved_tensors
        scale, dtype = q.shape[-1] ** -0.5, denominator.dtype
        d_q, d_keys = torch.empty_like(q), [torch.zeros_like(part) for part in keys]
        for begin in range(0, q.shape[3], ctx.chunk):
            part = slice(begin, begin + ctx.chunk)
            some, d_some = q[..., part, :], d_out[..., part, :]
            mean = (d_some.to(dtype) * out[..., part, :]).sum(-1, keepdim=True)  # of the weights' gradients
            scores, own = _scores(some, mask[:, part], keys, part)
            weights, own = scores.sub_(denominator[..., part, :]).exp_(), own.sub_(denominator[..., part, :]).exp_()
            flat = d_some.flatten(2, 3)
            d_keys[1] += weights.to(q.dtype).flatten(2, 3).transpose(-1, -2) @ flat
            slopes = (flat @ keys[1].transpose(-1, -2)).unflatten(2, weights.shape[2:4])
            slopes = weights.mul_(slopes - mean).mul_(scale).to(q.dtype).flatten(2, 3)
            d_keys[0] += slopes.transpose(-1, -2) @ some.flatten(2, 3)
            d_part = (slopes @ keys[0]).unflatten(2, weights.shape[2:4])
            for number, weight in enumerate(own.unbind(-1), 1):
                k, values = keys[2 * number][:, :, None, part], keys[2 * number + 1][:, :, None, part]
                slope = weight[..., None] * ((d_some * values).sum(-1, keepdim=True, dtype=dtype) - mean) * scale
                d_keys[2 * number][:, :, part] = (slope * some).sum(2)
                d_keys[2 * number + 1][:, :, part] = (weight[..., None] * d_some).sum(2)
                d_part = d_part + slope.to(q.dtype) * k
            d_q[..., part, :] = d_part
        return d_q, None, None, *d_keys


def _scores(q: Tensor, mask: Tensor, keys: Sequence[Tensor], part: slice) -> tuple[Tensor, Tensor]:
    """Scores of a chunk of queries: ``[B, G, R, P, T]`` of the first step's keys, ``[B, G, R, P, K − 1]`` of the later
    ones, in float32 at least."""
    scale, dtype = q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
    scores = (q.flatten(2, 3) @ keys[0].transpose(-1, -2)).unflatten(2, q.shape[2:4]).to(dtype).mul_(scale)
    scores.masked_fill_(~mask[:, None, None], float("-inf"))
    own = [(q * k[:, :, None, part]).sum(-1, dtype=dtype) * scale for k in keys[2::2]]
    return scores, torch.stack(own, -1) if own else scores[..., :0]
