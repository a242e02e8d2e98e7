"""Definitions of kernels that only their tests need; the other kernels' stand beside them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.shortlist_linear import _tokens


def head_topk_reference(
    features: Tensor, weight: Tensor, count: int, log_q: bool = False, tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition of :func:`head_topk`, ties included."""
    logits = F.linear(features.float(), weight.float())
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :count], ids[:, :count]
    if log_q:
        values = values - logits.logsumexp(-1, keepdim=True)
    return values, ids if tokens is None else tokens[ids]


def head_argmax_reference(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of :func:`head_argmax`."""
    logits = F.linear(features.float(), weight.float()).to(features.dtype).float()
    return logits.masked_fill(logits.isnan(), torch.inf).max(-1)


def shortlist_logits_reference(features: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """The definition of :func:`shortlist_logits`."""
    logits = features.float() @ weight[rows.clamp(min=0)].float().transpose(1, 2)
    return logits.masked_fill((rows < 0)[:, None], float("-inf"))


def shortlist_topk_reference(
    features: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, count: int, log_q: bool = False
) -> tuple[Tensor, Tensor]:
    """The definition of :func:`shortlist_topk`, ties included."""
    logits = shortlist_logits_reference(features, weight, rows)
    values, places = logits.sort(dim=-1, descending=True, stable=True)
    values, places = values[..., :count], places[..., :count]
    tokens = _tokens(values, places, rows, ids)
    return values - logits.logsumexp(-1, keepdim=True) if log_q else values, tokens
