"""Products of few rows with a matrix on a GPU, in partial sums: the time is that of reading the matrix once.

    parts[s] = Σ_{k in part s} x[:, k] · matrix[k, :],   x matrix = Σ_s parts[s]

The inputs are split into S parts (split-K), so that a matrix of few outputs occupies all multiprocessors too; the next
kernel adds the parts up, in a fixed order. One row is multiplied by plain arithmetic. Up to 64 rows are multiplied by
the tensor cores with swapped operands: the matrix is the left one, since its outputs are the long side, and the rows,
padded to 16, 32 or 64, are the short one. Which block sizes and how many parts are fastest depends on shape, dtype and
device: :func:`candidates` lists what :mod:`draftsmith.kernels.linear` measures.

Shape letters: M rows, K inputs, N outputs, S parts.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import re
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.backend import constexpr, jit, next_power, tl, why_not_triton

MAX_ROWS = 64
MAX_PARTS = 8
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on sm_90


class FewRowsForm(NamedTuple):
    """How a product is computed.

    kernel: "vector" (one row) or "rows" (tensor cores).
    outputs, inputs: the block sizes BLOCK_N and BLOCK_K.
    parts: S.
    """

    kernel: str
    outputs: int
    inputs: int
    parts: int
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """As :func:`parse_form` takes it: "rows 64x128 /2, 4 warps, 3 stages"."""
        return (
            f"{self.kernel} {self.outputs}x{self.inputs} /{self.parts}, {self.num_warps} warps, "
            f"{self.num_stages} stages"
        )


@cache
def parse_form(name: str) -> FewRowsForm | None:
    """The form of this name; None if it is no form's."""
    found = re.fullmatch(
        r"(vector|rows) ([0-9]{1,5})x([0-9]{1,5}) /([0-9]{1,2}), ([0-9]{1,2}) warps, ([0-9]{1,2}) stages", name
    )
    if found is None:
        return None
    kernel, *numbers = found.groups()
    outputs, inputs, parts, warps, stages = map(int, numbers)
    form = FewRowsForm(kernel, outputs, inputs, parts, warps, stages)
    powers = all(number and not number & (number - 1) for number in (outputs, inputs, warps))
    return form if form.name == name and powers and parts and stages else None


# BLOCK_N, BLOCK_K, warps, stages. Enough bytes have to be under way on every multiprocessor to hide the latency of its
# memory: in registers of many warps (one stage) or in shared memory.
_VECTOR_TILES = ((8, 1024, 4, 1), (16, 512, 4, 1), (16, 512, 4, 3), (32, 256, 4, 3))
_TILES = {  # by rows, padded
    16: ((32, 256, 4, 4), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 8, 4)),
    32: ((32, 256, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 5), (128, 128, 8, 4)),
    64: ((64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)),
}
_EXACT_TILES = ((32, 32, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2))  # float32: products without tensor cores


def candidates(rows: int, inputs: int, outputs: int, dtype: torch.dtype, multiprocessors: int) -> list[FewRowsForm]:
    """A dozen forms at most, of M = ``rows`` ≤ 64 rows, that may be the fastest with a matrix ``[inputs, outputs]``."""
    if not 0 < rows <= MAX_ROWS or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return []
    padded = next_power(rows, 16)
    tiles = [("rows", *tile) for tile in (_EXACT_TILES if dtype == torch.float32 else _TILES[padded])]
    if rows == 1:
        tiles = [("vector", *tile) for tile in _VECTOR_TILES] + tiles[:2]
    forms: list[FewRowsForm] = []
    for kernel, block_n, block_k, warps, stages in tiles:
        rows_held = 1 if kernel == "vector" else padded
        if stages * (block_n + rows_held) * block_k * dtype.itemsize > SHARED_MEMORY:
            continue
        blocks = -(-outputs // block_n)
        # A part is a few blocks long, for the pipeline to fill. Writing and reading the parts has to be cheap beside
        # reading the matrix: S · M · N · (4 + 4) bytes against K · N elements.
        most = min(MAX_PARTS, -(-inputs // block_k) // 4, inputs * dtype.itemsize // (32 * rows))
        splits = [parts for parts in (1, 2, 4, 8) if parts == 1 or parts <= most]
        # The fewest parts that give (nearly) every multiprocessor a program, and twice as many.
        enough = [parts for parts in splits if blocks * parts >= 0.9 * multiprocessors] or splits[-1:]
        for parts in enough[:2]:
            if parts == enough[0] or blocks * parts <= 8 * multiprocessors:
                forms.append(FewRowsForm(kernel, block_n, block_k, parts, warps, stages))
    return forms


def few_rows_reference(x: Tensor, matrix: Tensor, form: FewRowsForm) -> Tensor:
    """The definition of :func:`few_rows_product`, in float32."""
    per_part = part_length(matrix.shape[0], form)
    starts = range(0, form.parts * per_part, per_part)
    parts = [x[:, k : k + per_part].float() @ matrix[k : k + per_part].float() for k in starts]
    return torch.stack(parts)


def part_length(inputs: int, form: FewRowsForm) -> int:
    """Inputs of a part: a multiple of the block size. The last parts may have fewer, or none."""
    return -(-inputs // (form.inputs * form.parts)) * form.inputs


@jit
def _vector_kernel(
    x, matrix, out, inputs, outputs, per_part, matrix_row, out_part,
    BLOCK_N: constexpr, BLOCK_K: constexpr, STAGES: constexpr,
):  # fmt: skip
    """One program per block of outputs and part, for one row. ``matrix``: row n has the weights of output n."""
    part = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = matrix + n.to(tl.int64)[:, None] * matrix_row
    begin = part * per_part
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)  # added up at the end alone
    for start in tl.range(begin, tl.minimum(begin + per_part, inputs), BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        own = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        weight = tl.load(row + k[None, :], mask=(n < outputs)[:, None] & (k < inputs)[None, :], other=0.0)
        total += weight.to(tl.float32) * own[None, :]
    place = out + part.to(tl.int64) * out_part + n
    tl.store(place, tl.sum(total, 1).to(out.dtype.element_ty), mask=n < outputs)


@jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x, matrix, out, rows, inputs, outputs, per_part, x_row, matrix_row, out_part, out_row,
    BLOCK_M: constexpr, BLOCK_N: constexpr, BLOCK_K: constexpr,
):  # fmt: skip
    """One program per block of outputs and part, for all rows. ``matrix``: row n has the weights of output n."""
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_place = x + m.to(tl.int64)[None, :] * x_row
    matrix_place = matrix + n.to(tl.int64)[:, None] * matrix_row
    begin = part * per_part
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, tl.minimum(begin + per_part, inputs), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weight = tl.load(matrix_place + k[None, :], mask=(n < outputs)[:, None] & (k < inputs)[None, :], other=0.0)
        own = tl.load(x_place + k[:, None], mask=(m < rows)[None, :] & (k < inputs)[:, None], other=0.0)
        total = tl.dot(weight, own, total, input_precision="ieee")
    place = out + part.to(tl.int64) * out_part + m.to(tl.int64)[None, :] * out_row + n[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & (m < rows)[None, :])


def few_rows_product(x: Tensor, matrix: Tensor, form: FewRowsForm, out: Tensor | None = None) -> Tensor:
    """The parts of ``x matrix``.

    Args:
        x: ``[M, K]`` float32, float16 or bfloat16, M ≤ 64, or 1 for a "vector" form; the last stride is 1.
        matrix: ``[K, N]`` of the same dtype; the first stride is 1, as of ``nn.Linear.weight.t()``.
        form: one of :func:`candidates`.
        out: ``[S, M, N]``, written to if given, in any of these dtypes; the last stride is 1.

    Returns:
        ``[S, M, N]``: float32 if S > 1, in the dtype of x if S = 1 (or ``out``, in its own).
    """
    (rows, inputs), outputs = x.shape, matrix.shape[1]
    assert matrix.shape[0] == inputs and matrix.dtype == x.dtype
    assert rows <= (1 if form.kernel == "vector" else MAX_ROWS)
    if out is None:
        out = x.new_empty((form.parts, rows, outputs), dtype=x.dtype if form.parts == 1 else torch.float32)
    assert out.shape == (form.parts, rows, outputs)
    if why_not_triton(x):
        return out.copy_(few_rows_reference(x, matrix, form))
    assert x.stride(1) == out.stride(2) == 1 and (matrix.stride(0) == 1 or inputs == 1)
    grid, per_part = (-(-outputs // form.outputs), form.parts), part_length(inputs, form)
    with torch.cuda.device_of(x):
        if form.kernel == "vector":
            _vector_kernel[grid](
                x, matrix, out, inputs, outputs, per_part, matrix.stride(1), out.stride(0), BLOCK_N=form.outputs,
                BLOCK_K=form.inputs, STAGES=form.num_stages, num_warps=form.num_warps,
            )  # fmt: skip
        else:
            _few_rows_kernel[grid](
                x, matrix, out, rows, inputs, outputs, per_part, x.stride(0), matrix.stride(1), out.stride(0),
                out.stride(1), BLOCK_M=next_power(rows, 16), BLOCK_N=form.outputs, BLOCK_K=form.inputs,
                num_warps=form.num_warps, num_stages=form.num_stages,
            )  # fmt: skip
    return out


def sum_parts_reference(parts: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition of :func:`sum_parts`, in float32."""
    total = parts.sum(0, dtype=torch.float32)
    return total if bias is None else total + bias.float()


@jit
def _sum_parts_kernel(
    parts, bias, out, outputs, part_stride, row_stride, out_row, PARTS: constexpr, BLOCK: constexpr
):  # fmt: skip
    """One program per row and block of outputs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = parts + row * row_stride + n
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):  # unrolled: the loads do not wait for one another
        total += tl.load(place, mask=n < outputs, other=0.0).to(tl.float32)
        place += part_stride
    if bias is not None:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + n, total.to(out.dtype.element_ty), mask=n < outputs)


def sum_parts(parts: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """``out = Σ_s parts[s] + bias``, rounded once.

    Args:
        parts: ``[S, M, N]``, from :func:`few_rows_product`; the last stride is 1.
        out: ``[M, N]``, written to; the last stride is 1.
        bias: ``[N]``.

    Returns:
        ``out``.
    """
    if why_not_triton(parts):
        return out.copy_(sum_parts_reference(parts, bias))
    assert parts.shape[1:] == out.shape and parts.stride(2) == out.stride(1) == 1
    assert bias is None or bias.stride(0) == 1
    count, rows, outputs = parts.shape
    block = min(1024, next_power(outputs))
    with torch.cuda.device_of(parts):
        _sum_parts_kernel[(rows, -(-outputs // block))](
            parts, bias, out, outputs, parts.stride(0), parts.stride(1), out.stride(0), PARTS=count, BLOCK=block,
            num_warps=4,
        )  # fmt: skip
    return out
