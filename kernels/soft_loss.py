"""Losses of logits against a teacher's distribution, with their gradients, for training.

    q = softmax(z + b),   p̃ the teacher's row, a distribution on the same S tokens,   p = c · p̃
    CE = −Σ_v p̃_v log q_v                                      ∂CE/∂z_v = q_v − p̃_v
    α  = Σ_v min(p_v, q_v), the probability that a draft drawn from q is accepted (arXiv 2211.17192 §3)
    LK = λ · (CE − H(p̃)) + (1 − λ) · (1 − α),   λ = e^{−η α}, a constant to the gradient (arXiv 2602.23881)
    TV = 1 − α,   NLA = −log α,   the negative logarithm of acceptance (the same paper)
    ∂α/∂z_v = q_v · (1[q_v < p_v] − Σ_{u: q_u < p_u} q_u)

CE − H is KL(p̃ ‖ q), and 1 − α the total variation of p and q. c is the probability that the target gives to the draft
vocabulary: a token outside is never drafted, so that α takes p as it is, and KL, which would be infinite, p̃. The paper
has one λ for a batch, from its mean of α; here each position has its own (as in vLLM's speculators), so that the loss
does not depend on how a batch is split.

Shape letters: P positions, S tokens, N rows of the teacher.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.backend import jit, next_power, tl, why_not_triton

ETA = 3.0  # η of arXiv 2602.23881
LOSSES = ("ce", "lk", "tv", "nla")
LEAST = 1e-30  # α of −log α; where α is less, the gradient is that of TV over this


class Teacher(NamedTuple):
    """A target's distributions on a draft vocabulary.

    probs: ``[N, S]`` float32, p̃; each row sums to 1.
    best: ``[N]`` int64, the place of the target's likeliest token; −1 if it is outside.
    coverage: ``[N]`` float32, c; None without a draft vocabulary, where it is 1.
    entropy: ``[N]`` float32, H(p̃) in nats; of LK alone.
    loss: one of :data:`LOSSES`.
    """

    probs: Tensor
    best: Tensor
    coverage: Tensor | None = None
    entropy: Tensor | None = None
    loss: str = "ce"


def lk_weight(acceptance: Tensor) -> Tensor:
    """λ of positions with these acceptance probabilities, without a gradient."""
    return torch.exp(-ETA * acceptance.detach())


def soft_loss_reference(
    logits: Tensor, teacher: Teacher, rows: Tensor, scale: Tensor, found: Tensor, bias: Tensor | None = None
) -> None:
    """The definition of :func:`soft_loss`."""
    probs, best = teacher.probs[rows], teacher.best[rows, None]
    z = logits.float() if bias is None else logits.float() + bias
    top = z.amax(-1, keepdim=True)
    found[1] = ((z.gather(1, best.clamp(min=0)) == top) & (best >= 0))[:, 0]
    z = z.sub_(top) if bias is None else z - top
    loss = -(probs * z).sum(-1)
    q = z.exp_()
    total = q.sum(-1)
    loss += total.log()
    q.div_(total[:, None])
    p = probs if teacher.coverage is None else probs * teacher.coverage[rows, None]
    found[2] = torch.minimum(p, q).sum(-1)
    if teacher.loss == "ce":
        slope = q.sub_(probs)
    else:
        below = (q < p).float()
        slope = q * ((q * below).sum(-1, keepdim=True) - below)  # of 1 − α
        if teacher.loss == "lk" and teacher.entropy is not None:
            weight = lk_weight(found[2])
            loss = weight * (loss - teacher.entropy[rows]) + (1 - weight) * (1 - found[2])
            slope = weight[:, None] * (q - probs) + (1 - weight[:, None]) * slope
        elif teacher.loss == "tv":
            loss = 1 - found[2]
        else:
            accepted = found[2].clamp(min=LEAST)
            loss, slope = -accepted.log(), slope / accepted[:, None]
    found[0] = loss
    logits.copy_(slope.mul_(scale[:, None]))


@jit
def _values(logits, bias, place, width):
    """Logits with their bias in float32; −∞ behind the last one."""
    z = tl.load(logits + place, mask=place < width, other=-float("inf")).to(tl.float32)
    if bias is not None:
        z += tl.load(bias + place, mask=place < width, other=0.0).to(tl.float32)
    return z


@jit
def _soft_loss_kernel(
    logits,
    bias,
    probs,
    best,
    coverage,
    entropy,
    rows,
    scale,
    found,
    width,
    strides,
    LOSS: tl.constexpr,
    RATE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per position: its logits are read two or three times, but once from beyond the L2 cache."""
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + position)
    logits += position * strides[0]
    probs += row * strides[1]
    top = -float("inf")
    total = 0.0
    for begin in range(0, width, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        z = _values(logits, bias, place, width)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    likeliest = tl.load(best + row)
    chosen = _values(logits, bias, tl.maximum(likeliest, 0), width)
    covered = 1.0
    if coverage is not None:
        covered = tl.load(coverage + row)
    factor = tl.load(scale + position)
    loss = tl.log(total)
    accepted = 0.0
    share = 0.0
    for begin in range(0, width, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        z = _values(logits, bias, place, width)
        p = tl.load(probs + place, mask=place < width, other=0.0)
        q = tl.exp(z - top) / total
        loss -= tl.sum(p * tl.maximum(z - top, -3e38), 0)  # −∞ behind the last one, where p is 0
        accepted += tl.sum(tl.minimum(covered * p, q), 0)
        if LOSS == "ce":
            tl.store(logits + place, (factor * (q - p)).to(logits.dtype.element_ty), mask=place < width)
        else:
            share += tl.sum(tl.where(q < covered * p, q, 0.0), 0)
    if LOSS != "ce":
        weight = 0.0  # of the gradient of CE, and of that of 1 − α
        pull = 1.0
        if LOSS == "lk":
            weight = tl.exp(accepted * -RATE)
            pull = 1 - weight
            loss = weight * (loss - tl.load(entropy + row)) + pull * (1 - accepted)
        elif LOSS == "tv":
            loss = 1 - accepted
        else:
            pull = 1 / tl.maximum(accepted, LEAST)
            loss = tl.log(pull)
        for begin in range(0, width, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            z = _values(logits, bias, place, width)
            p = tl.load(probs + place, mask=place < width, other=0.0)
            q = tl.exp(z - top) / total
            of_acceptance = q * (tl.where(q < covered * p, 1.0, 0.0) - share)
            slope = factor * (weight * (q - p) - pull * of_acceptance)
            tl.store(logits + place, slope.to(logits.dtype.element_ty), mask=place < width)
    tl.store(found + position, loss)
    tl.store(found + strides[2] + position, tl.where((chosen == top) & (likeliest >= 0), 1.0, 0.0))
    tl.store(found + 2 * strides[2] + position, accepted)


def soft_loss(
    logits: Tensor, teacher: Teacher, rows: Tensor, scale: Tensor, found: Tensor, bias: Tensor | None = None
) -> None:
    """Replace logits by the gradient of each position's loss times its scale; all arithmetic is in float32.

    Args:
        logits: ``[P, S]`` float32, float16 or bfloat16, dense rows.
        rows: ``[P]`` int64, the teacher's row for each position.
        scale: ``[P]`` float32.
        found: ``[3, P]`` float32, written: the loss (without the scale), 1 where no token's logit exceeds that of the
            target's likeliest one, else 0, and α.
        bias: ``[S]``, added to the logits.
    """
    assert teacher.loss in LOSSES and (teacher.entropy is not None) == (teacher.loss == "lk")
    if why_not_triton(logits):
        soft_loss_reference(logits, teacher, rows, scale, found, bias)
        return
    assert logits.stride(-1) == found.stride(-1) == teacher.probs.stride(-1) == 1
    rows, scale = rows.contiguous(), scale.contiguous()
    width, block = logits.shape[1], min(next_power(logits.shape[1]), 4096)
    strides = (logits.stride(0), teacher.probs.stride(0), found.stride(0))
    with torch.cuda.device_of(logits):
        tile = {"BLOCK": block, "num_warps": 8 if block > 512 else 1, "LOSS": teacher.loss, "RATE": ETA, "LEAST": LEAST}
        _soft_loss_kernel[(len(logits),)](logits, bias, *teacher[:4], rows, scale, found, width, strides, **tile)
