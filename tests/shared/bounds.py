"""Bounds on rounding errors, from the terms of the operation itself (N. J. Higham, Accuracy and Stability of Numerical
Algorithms, second edition, §3.1, §3.5). A test's tolerance is such a bound, never the error of another computation."""

import math

import torch
from torch import Tensor


def gamma(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """γ_n = n·u / (1 − n·u): the relative error of n roundings one after the other, u being half of ``dtype``'s eps."""
    error = roundings * torch.finfo(dtype).eps / 2
    return error / (1 - error)


def roundings_of_sum(terms: int) -> int:
    """Of a sum over a row as kernels and PyTorch compute it: runs of at most 32 terms, which are added by halves."""
    return min(terms, 32 + math.ceil(math.log2(terms)))


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of rounding ``value`` to ``dtype``: half a unit in the last place."""
    precision = torch.finfo(dtype)
    return 0.5 * precision.eps * torch.exp2(value.abs().double().clamp(min=precision.tiny).log2().floor())


def sum_bound(exact: Tensor, terms: Tensor, roundings: int, dtype: torch.dtype) -> Tensor:
    """Bound on the error of sums in float32 that are rounded to ``dtype`` at the end.

    Args:
        exact: the sums in float64.
        terms: sums of the terms' absolute values, of the shape of ``exact`` or of one that broadcasts to it.
        roundings: largest number of roundings that a term goes through before the last one.
    """
    error = gamma(roundings) * terms.double()
    return error + rounded(exact.abs() + error, dtype)


def product_bound(
    x: Tensor, w: Tensor, dtype: torch.dtype, bias: Tensor | None = None, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``x [..., M, n] @ w [..., n, N]``, plus a bias, times a factor, in float64 on the CPU, and the bound on the error
    of a product whose sums are in float32, in any order, and whose results are rounded to ``dtype``."""
    x, w = x.detach().cpu().double(), w.detach().cpu().double()
    exact, terms = x @ w, x.abs() @ w.abs()
    if bias is not None:
        exact, terms = exact + bias.detach().cpu().double(), terms + bias.detach().cpu().double().abs()
    return factor * exact, sum_bound(factor * exact, abs(factor) * terms, x.shape[-1] + 2, dtype)


def attention_bound(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention of one text in float64 on the CPU, and the bound on the error of one whose scores, weights and sums are
    in float32; weights and results are rounded to ``dtype``. A query that sees nothing gets 0.

    An error δ_j of score j moves the output by p_j · (v_j − output) · δ_j.

    Args:
        q: ``[Hq, Q, D]``.
        k, v: ``[Hkv, S, D]``.
        seen: ``[Q, S]`` bool.
    """
    groups = q.shape[0] // k.shape[0]
    q, k, v = (part.cpu().double() for part in (q, k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)))
    scores = q @ k.transpose(1, 2) * scale
    error = gamma(q.shape[2] + 4) * (q.abs() @ k.abs().transpose(1, 2)) * scale + gamma(8) * scores.abs()
    if softcap is not None:
        scores, error = softcap * torch.tanh(scores / softcap), error + gamma(16) * softcap
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)  # [Hq, Q, S]
    exact = weights @ v
    moved = torch.stack(
        [
            torch.einsum("qs,sqd->qd", moving, (values[:, None] - out).abs())
            for moving, values, out in zip(weights * error, v, exact, strict=True)
        ]
    )
    of_weights = 2 * gamma(k.shape[1] + 16) + (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0.0)
    bound = 1.01 * moved + of_weights * (weights @ v.abs())
    return exact, bound + rounded(exact.abs() + bound, dtype)


def assert_within(found: Tensor, exact: Tensor, bound: Tensor | float, slack: float = 1.0) -> None:
    """Each element within its bound, times ``slack``; and zeros would not pass."""
    assert found.shape == exact.shape, (found.shape, exact.shape)
    found, exact = found.detach().cpu().double(), exact.detach().cpu().double()
    bound = slack * torch.as_tensor(bound, dtype=torch.float64).cpu().expand_as(exact)
    if exact.any():
        assert float((exact.abs() > 4 * bound)[exact != 0].double().mean()) > 0.5, "the bound would let zeros pass"
    off = torch.where(found == exact, 0.0, (found - exact).abs())  # equal infinities too
    worst = (off / bound.clamp(min=1e-300)).nan_to_num(nan=torch.inf)
    at = int(worst.argmax()) if worst.numel() else 0
    assert worst.numel() == 0 or float(worst.max()) <= 1, (
        f"{float(found.flatten()[at])} instead of {float(exact.flatten()[at])} ± {float(bound.flatten()[at])}"
    )
