"""Losses: label shift, cross-entropy, normalisation per valid token.

Shape letters: B batch, T tokens, d hidden width, V vocabulary, S draft vocabulary, P positions, N rows of a teacher.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.kernels.soft_loss import Teacher, soft_loss
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import to_draft_ids

HEAD_DECAY = 0.8  # weight of Medusa head k in the loss: 0.8^k (arXiv 2401.10774 §2.2.1)
LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}  # logits that exist at one time; on a CPU, what malloc keeps and re-uses


class BesideTarget(nn.Module):
    """What trains beside a frozen target, its ``model``."""

    model: nn.Module

    def train(self, mode: bool = True) -> "BesideTarget":
        """The target stays in eval mode, without the dropout that some families have."""
        super().train(mode)
        self.model.eval()
        return self


def shifted_labels(tokens: Tensor, supervised: Tensor, shift: int, segment: Tensor | None = None) -> Tensor:
    """Labels of a head that reads position t and predicts x_{t+shift}; −100 where there is none.

    Args:
        tokens: ``[B, T]`` token ids.
        supervised: ``[B, T]`` bool, True where the token itself may be a label (an answer's token, no padding).
        shift: 1 for the LM head, k + 1 for Medusa head k (arXiv 2401.10774 §2.1).
        segment: ``[B, T]``, which sample of its row a token belongs to; no label crosses from one into the next.

    Returns:
        ``[B, T]`` int64 labels, aligned with the position that predicts them.
    """
    labels = torch.full(tokens.shape, -100, dtype=torch.int64, device=tokens.device)
    if shift < tokens.shape[1]:
        is_label = supervised[:, shift:]
        if segment is not None:
            is_label = is_label & (segment[:, shift:] == segment[:, :-shift])
        labels[:, :-shift] = torch.where(is_label, tokens[:, shift:].long(), -100)
    return labels


def labels_of(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """The labels that the training loop has put into a batch; outside of it, those that the module makes."""
    return batch["labels"] if "labels" in batch else module.labels(batch)


def at_once(device: torch.device, outputs: int) -> int:
    """The number of positions whose logits, so many each, exist at one time: :data:`LOGITS` together."""
    return max(1, LOGITS["cpu" if device.type == "cpu" else "cuda"] // outputs)


class _LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy whose gradients are computed with the loss, by chunks: no logits are kept or computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        with_gradients: bool,
        weigh: Callable[[Tensor, Tensor], Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        kind = features.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        needs = [with_gradients and bool(needed) for needed in ctx.needs_input_grad[:3]]
        flat, flat_labels = features.reshape(-1, features.shape[-1]).to(dtype), labels.reshape(-1)
        w, b = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
        d_features = torch.zeros_like(flat) if needs[0] else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs[1] else None
        d_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if needs[2] else None
        total_loss = torch.zeros((), dtype=torch.float32, device=flat.device)
        found = torch.empty(2, len(flat), dtype=torch.float32, device=flat.device)  # the loss, and whether it is a hit
        rows = min(chunk, len(flat))
        low = torch.empty(rows, weight.shape[0], dtype=dtype, device=flat.device)
        whole = low if dtype == torch.float32 else low.new_empty(low.shape, dtype=torch.float32)
        with torch.autocast(kind, enabled=False):
            for begin in range(0, len(flat), chunk):
                x, label = flat[begin : begin + chunk], flat_labels[begin : begin + chunk]
                logits, slope = whole[: len(x)], low[: len(x)]
                torch.mm(x, w.t(), out=slope)
                if b is not None:
                    slope += b
                if low is not whole:
                    logits.copy_(slope)
                right = label.clamp(min=0)[:, None]
                labelled = (label >= 0)[:, None]
                top = logits.amax(-1, keepdim=True)  # without its index, which would cost as much as the softmax
                chosen = logits.gather(1, right)
                logits.sub_(top).exp_()
                total = logits.sum(-1, keepdim=True)
                loss = torch.where(labelled, total.log() + top - chosen, 0.0)
                found[0, begin : begin + chunk] = loss[:, 0]
                found[1, begin : begin + chunk] = ((chosen == top) & labelled)[:, 0]
                scale = labelled.float() if weigh is None else weigh(loss[:, 0], label)[:, None] * labelled
                total_loss += (scale * loss).sum()
                if not any(needs):
                    continue
                # softmax − one-hot, nothing where there is no label
                logits.mul_(scale / total).scatter_add_(1, right, -scale)
                if d_bias is not None:
                    d_bias += logits.sum(0)
                slope.copy_(logits)
                if d_features is not None:
                    torch.mm(slope, w, out=d_features[begin : begin + chunk])
                if d_weight is not None:
                    _add_product(d_weight, slope, x)
        ctx.save_for_backward(d_features, d_weight, d_bias)
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (features, weight, bias)]
        ctx.mark_non_differentiable(found)
        return total_loss, found

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = (  # in place: nobody else sees them, and a second backward pass has no graph
            None if d is None else d.to(like[1]).mul_(d_loss).view(like[0])  # float16 may not hold 1 / labels times it
            for d, like in zip(ctx.saved_tensors, ctx.like, strict=True)
        )
        return *gradients, *[None] * 4


def linear_cross_entropy(
    features: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of ``features @ weightᵀ + bias`` and correct top-1 predictions, with the logits of ``chunk``
    positions alive at a time (by default as many as keep :data:`LOGITS` values), forward and backward.

    Products run in autocast's dtype, or the weight's; sums and softmax in fp32.

    Args:
        features: ``[..., d]``.
        weight, bias: of the LM head or a Medusa head's projection, ``[V, d]`` and ``[V]``.
        labels: ``[...]``, −100 where there is no label.

    Returns:
        (sum of the losses in fp32, number of labels that no token's logit exceeded), both scalars.
    """
    chunk = chunk or at_once(features.device, len(weight))
    losses, found = _LinearCrossEntropy.apply(features, weight, bias, labels, chunk, torch.is_grad_enabled(), None)
    return losses, found[1].sum().long()


def linear_block_loss(
    features: Tensor,
    weight: Tensor,
    labels: Tensor,
    weigh: Callable[[Tensor, Tensor], Tensor],
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`linear_cross_entropy`, of blocks of K positions whose weights depend on their losses: Σ w · loss.

    Args:
        features: ``[P, K, d]``.
        weight, bias: ``[S, d]`` and ``[S]``.
        labels: ``[P, K]``; a negative one is none.
        weigh: losses ``[P, K]``, 0 where there is no label, and labels → weights ``[P, K]``, constants to the gradient.

    Returns:
        The weighted sum, a scalar in fp32, and ``[2, P, K]`` without gradients: the loss of each position, and whether
        no token's logit exceeded that of its label.
    """
    slots = labels.shape[1]
    chunk = max(1, at_once(features.device, len(weight)) // slots) * slots

    def of_blocks(loss: Tensor, label: Tensor) -> Tensor:
        return weigh(loss.view(-1, slots), label.view(-1, slots)).flatten()

    flat = features.flatten(0, 1), weight, bias, labels.flatten(), chunk, torch.is_grad_enabled(), of_blocks
    total, found = _LinearCrossEntropy.apply(*flat)
    return total, found.view(2, -1, slots)


def _add_product(total: Tensor, slope: Tensor, x: Tensor) -> None:
    """Add slopeᵀ · x to a float32 gradient."""
    if slope.dtype == total.dtype:
        total.addmm_(slope.t(), x)
    else:
        total += slope.t() @ x


@torch.no_grad()
def teach(target: Target, hidden: Tensor, ids: Tensor | None, loss: str) -> Teacher:
    """A target's distributions on a draft vocabulary, from its last hidden states ``[N, d]``, by chunks.

    Args:
        ids: ``[S]`` int64, the draft vocabulary; None: all of the target's tokens.
        loss: one of :data:`draftsmith.kernels.soft_loss.LOSSES`.
    """
    dtype = next(target.lm_head.parameters()).dtype
    probs = torch.empty(len(hidden), target.vocab_size if ids is None else len(ids), device=hidden.device)
    best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    coverage = None if ids is None else probs.new_empty(len(hidden))
    entropy = probs.new_empty(len(hidden)) if loss == "lk" else None
    size = at_once(hidden.device, target.vocab_size)
    for begin in range(0, len(hidden), size):
        part = slice(begin, begin + size)
        logits = target.logits(hidden[part].to(dtype))
        chosen = logits.argmax(-1)
        p = probs[part] = (logits if ids is None else logits[:, ids]).float().softmax(-1)
        best[part] = chosen if ids is None else to_draft_ids(chosen, ids, outside=-1)
        if coverage is not None:  # of the likeliest token, by both distributions
            place = best[part, None]
            whole = logits.softmax(-1, dtype=torch.float32).gather(1, chosen[:, None])
            coverage[part] = torch.where(place < 0, 0.0, whole / p.gather(1, place.clamp(min=0)))[:, 0]
        if entropy is not None:
            entropy[part] = -torch.xlogy(p, p).sum(-1)
    return Teacher(probs, best, coverage, entropy, loss)


class _LinearSoftLoss(torch.autograd.Function):
    """Losses against a teacher's distributions; gradients are computed with the loss, by chunks of positions."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher,
        rows: Tensor,
        scale: Tensor,
        after: Callable[[Tensor], Tensor] | None,
        chunk: int,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = features.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        needs = [with_gradients and bool(needed) for needed in ctx.needs_input_grad[:2]]
        flat, w = features.to(dtype), weight.detach().to(dtype)
        d_features = torch.empty_like(flat) if needs[0] else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs[1] else None
        found = torch.empty(3, len(flat), dtype=torch.float32, device=flat.device)
        most = scale.amax().clamp(min=torch.finfo(scale.dtype).tiny) if len(scale) else scale.new_ones(())
        share = scale / most  # of which float16 holds the products
        with torch.autocast(kind, enabled=False):
            for begin in range(0, len(flat), chunk):
                part = slice(begin, begin + chunk)
                slope, given = flat[part] @ w.t(), (teacher, rows[part], share[part], found[:, part])
                if after is None:
                    soft_loss(slope, *given, bias)
                else:
                    slope = _through(after, slope if bias is None else slope + bias, given)
                if d_features is not None:
                    torch.mm(slope, w, out=d_features[part])
                if d_weight is not None:
                    _add_product(d_weight, slope, flat[part])
        ctx.save_for_backward(d_features, d_weight, most)
        ctx.dtypes = features.dtype, weight.dtype
        ctx.mark_non_differentiable(found)
        return (found[0] * scale).sum(), found

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *gradients, most = ctx.saved_tensors
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if d is None else d.to(dtype).mul_(d_loss * most) for d, dtype in pairs), *[None] * 7


def _through(after: Callable[[Tensor], Tensor], logits: Tensor, given: tuple[Any, ...]) -> Tensor:
    """The gradient at an LM head's output that a target scales or caps before the loss; see :func:`soft_loss`."""
    with torch.enable_grad():
        raw = logits.float().requires_grad_()
        made = after(raw)
    slope = made.detach().clone()
    soft_loss(slope, *given)
    return torch.autograd.grad(made, raw, slope)[0].to(logits.dtype)


def linear_soft_loss(
    features: Tensor,
    weight: Tensor,
    teacher: Teacher,
    rows: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`linear_cross_entropy`, of distributions instead of labels, and weighted: Σ_p scale_p · loss_p. The loss
    is the teacher's, of :mod:`draftsmith.kernels.soft_loss`.

    All positions of a module's forward pass belong into one call: it keeps one float32 gradient of the weight.

    Args:
        features: ``[P, d]``.
        weight, bias: ``[S, d]`` and ``[S]``; the bias does not train.
        teacher: its distributions, N of them.
        rows: ``[P]`` int64, the teacher's row for each position.
        scale: ``[P]`` float32.
        after: what is done to the logits, element by element (:meth:`Target.after_head`).

    Returns:
        The weighted sum, a scalar in fp32, and ``[3, P]`` of each position, without gradients: its loss, whether no
        token's logit exceeds that of the target's likeliest one, the probability that its draft is accepted.
    """
    chunk = chunk or at_once(features.device, len(weight))
    grad = torch.is_grad_enabled()
    return _LinearSoftLoss.apply(features, weight, bias, teacher, rows, scale, after, chunk, grad)


def in_chunks(function: Callable[..., Tensor], vocab_size: int, *parts: Tensor) -> Tensor:
    """Σ ``function(*chunk)`` over chunks of positions, with the logits of as many positions alive at a time as keep
    :data:`LOGITS` values; they are computed again in the backward pass.

    Args:
        function: a sum over the positions of its arguments, as a scalar in fp32, or several such sums. It calls the LM
            head as a module, which may be adapted or sharded.
        parts: ``[P, ...]`` each. With P = 0 the sum is 0, and a function of the LM head's weights all the same: a
            process without a label has to take part in the exchange of their gradients.
    """
    size = at_once(parts[0].device, vocab_size)
    total = parts[0].new_zeros((), dtype=torch.float32)
    for begin in range(0, max(1, len(parts[0])), size):
        chunk = [part[begin : begin + size] for part in parts]
        total = total + (
            checkpoint(function, *chunk, use_reentrant=False) if torch.is_grad_enabled() else function(*chunk)
        )
    return total
