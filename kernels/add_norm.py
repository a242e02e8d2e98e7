"""Add a branch to the residual and norm the sum: what stands between two products of a decoder layer.

    x   ← x + factor · f(Σ_s y_s + bias),   f = RMSNorm with weight ``after`` (Gemma 2), or the identity
    out ← RMSNorm(x) · weight,              RMSNorm(x) = x / √(mean(x²) + eps)      (arXiv 1910.07467)

y may be the partial sums of a product (split-K), which are added up here. All arithmetic is in float32; x and out are
each rounded once, and out is the norm of the rounded x.

Shape letters: S partial sums, M rows, d hidden width.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels import cpu
from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton


def add_norm_reference(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    after: Tensor | None = None,
    after_eps: float | None = None,
    factor: float = 1.0,
) -> None:
    """The definition of :func:`add_norm`."""
    if y is not None:
        branch = y.sum(0, dtype=torch.float32)  # [M, d]
        if bias is not None:
            branch = branch + bias
        if after is not None:
            branch = F.rms_norm(branch, after.shape, after.float(), eps if after_eps is None else after_eps)
        x.copy_(x + factor * branch)
    out.copy_(F.rms_norm(x.float(), weight.shape, weight.float(), eps))


@jit
def _add_norm_kernel(
    tensors, width, eps, after_eps, factor, x_row, y_part, y_row, out_row, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row, which stays in registers."""
    x, y, weight, bias, after, out = tensors
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    at = x + row * x_row + place
    own = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    out_scale = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)  # before a store that it would wait for
    if y is not None:
        y += row * y_row + place
        branch = tl.zeros([BLOCK], tl.float32)
        for _ in tl.static_range(PARTS):  # unrolled: the loads do not wait for one another
            branch += tl.load(y, mask=inside, other=0.0).to(tl.float32)
            y += y_part
        if bias is not None:
            branch += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        if after is not None:
            scale = tl.load(after + place, mask=inside, other=0.0).to(tl.float32)
            branch = branch * tl.rsqrt(tl.sum(branch * branch, 0) / width + after_eps) * scale
        rounded = (own + factor * branch).to(x.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        own = rounded.to(tl.float32)
    own = own * tl.rsqrt(tl.sum(own * own, 0) / width + eps) * out_scale
    tl.store(out + row * out_row + place, own.to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    after: Tensor | None = None,
    after_eps: float | None = None,
    factor: float = 1.0,
) -> None:
    """Add a branch to the residual, in place, and write the norm of the sum to ``out``.

    The last stride of each tensor but y is 1; no tensor may overlap ``out``.

    Args:
        x: ``[M, d]`` float32, float16 or bfloat16, the residual; d ≤ 16384 for good speed (a row is held in registers).
        y: ``[S, M, d]`` in the dtype of x or float32, the parts of the branch; the code grows with S. None if there is
            no branch: x stays as it is.
        weight: ``[d]`` in the dtype of x or float32.
        eps: of the norm.
        out: ``[M, d]`` in the dtype of x.
        bias: ``[d]``, added to the branch.
        after: ``[d]`` in the dtype of x or float32, the weight of a norm of the branch; None for no such norm.
        after_eps: of that norm; ``eps`` if left out.
        factor: on the branch, after its norm (Granite).
    """
    assert y is not None or (bias is None and after is None), "a bias and a norm of the branch need a branch"
    after_eps = eps if after_eps is None else after_eps
    if why_not_triton(x):
        if cpu.runs(x) and (y is None or (len(y) == 1 and y.dtype == x.dtype and y.stride(-1) == 1)):
            weight, after = weight.float(), None if after is None else after.float()
            strides = (x.stride(0), 0 if y is None else y.stride(1), out.stride(0))
            branch = (*map(cpu.address, (x, y, bias, after)), after_eps, factor)
            norm = (weight.data_ptr(), eps, out.data_ptr())
            cpu.function("add_norm", x.dtype)(*branch, *norm, *x.shape, *strides)
            return
        add_norm_reference(x, y, weight, eps, out, bias=bias, after=after, after_eps=after_eps, factor=factor)
        return
    rows, width = x.shape
    assert out.shape == x.shape and (y is None or y.shape[1:] == x.shape)
    y = None if y is None else dense(y)
    assert all(one is None or one.stride(-1) == 1 for one in (x, weight, out, bias, after))
    parts, part, row = (0, 0, 0) if y is None else (len(y), *y.stride()[:2])
    sizes = (width, eps, after_eps, factor, x.stride(0), part, row, out.stride(0))
    block = next_power(width)
    warps = max(1, min(block // 256, 16))  # a few elements per thread, so that one row alone is loaded at once
    with torch.cuda.device_of(x):
        _add_norm_kernel[(rows,)]((x, y, weight, bias, after, out), *sizes, PARTS=parts, BLOCK=block, num_warps=warps)
