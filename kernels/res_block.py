"""The residual blocks of Medusa's heads for a few rows, all heads in one launch (arXiv 2401.10774 §2.1).

    y_k = x_k + SiLU(x_k W_k + b_k),   SiLU(z) = z / (1 + e^−z)

Drafting has a row or a few per text, so that reading W takes most of the time: a program reads a block of a head's
columns once, and applies bias, SiLU and residual to its sums before it writes them. Sums and SiLU are float32 and
rounded once, at the end.

Shape letters: K draft heads, P positions, d hidden width.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.backend import dense, jit, multiprocessors, next_power, tl, why_not_triton

MAX_ROWS = 64  # largest P of the kernel; with more, cuBLAS reuses W better


def res_block_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The definition of :func:`res_block`."""
    return x + F.silu(torch.baddbmm(bias, x, weight))


@jit(do_not_specialize="rows")
def _res_block_kernel(
    x, weight, bias, out, rows, width, strides, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """One program per block of outputs and head; all rows in one tile."""
    x_head, x_row, weight_head, weight_row, bias_head = strides
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_place = x + head * x_head + row.to(tl.int64)[:, None] * x_row
    weight_place = weight + head * weight_head + k.to(tl.int64)[:, None] * weight_row + column[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = start + k < width
        a = tl.load(x_place + (start + k)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_place, mask=inside[:, None] & (column < width)[None, :], other=0.0)
        total = tl.dot(a, w, total, input_precision="ieee")
        weight_place += BLOCK_K * weight_row
    total += tl.load(bias + head * bias_head + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    stored = (row < rows)[:, None] & (column < width)[None, :]
    residual = tl.load(x_place + column[None, :], mask=stored, other=0.0).to(tl.float32)
    y = residual + total / (1 + tl.exp(-total))
    out_place = out + (head * rows + row)[:, None] * width + column[None, :]
    tl.store(out_place, y.to(out.dtype.element_ty), mask=stored)


def res_block_tile(heads: int, rows: int, width: int, dtype: torch.dtype, multiprocessors: int) -> dict[str, int]:
    """The kernel's block sizes, warps and stages: narrower blocks where these would leave multiprocessors idle."""
    exact = dtype == torch.float32  # products without tensor cores
    block_n = 32 if exact else 64
    while block_n > 16 and heads * -(-width // block_n) < 2 * multiprocessors:
        block_n //= 2
    return {
        "BLOCK_M": next_power(rows, 16),
        "BLOCK_N": block_n,
        "BLOCK_K": 32 if exact else 64,
        "num_warps": 4,
        "num_stages": 2 if exact else 4,
    }


def res_block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The residual block of every head.

    The kernel runs in inference with up to 64 rows; with gradients, under autocast and in ``torch.compile`` the
    operations are PyTorch's, as they are without a GPU.

    Args:
        x: ``[K, P, d]`` float32, float16 or bfloat16; the stride of the heads may be 0.
        weight: ``[K, d, d]`` of the same dtype, inputs first; the last stride is 1.
        bias: ``[K, 1, d]`` of the same dtype; the last stride is 1.

    Returns:
        ``[K, P, d]``.
    """
    heads, rows, width = x.shape
    plain = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    if plain or why_not_triton(x) or not 0 < rows <= MAX_ROWS or not heads:
        return res_block_reference(x, weight, bias)
    x = dense(x)
    assert weight.stride(2) == bias.stride(2) == 1 and x.dtype == weight.dtype == bias.dtype
    out = x.new_empty(heads, rows, width)
    tile = res_block_tile(heads, rows, width, x.dtype, multiprocessors(x.device))
    strides = (*x.stride()[:2], *weight.stride()[:2], bias.stride(0))
    with torch.cuda.device_of(x):
        _res_block_kernel[(-(-width // tile["BLOCK_N"]), heads)](x, weight, bias, out, rows, width, strides, **tile)
    return out
