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

import os
import re
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.backend import INTERPRETING, dense, jit, next_power, tl, why_not_triton
from draftsmith.kernels.gated import activated, gated_reference

MAX_ROWS = 64
MAX_PARTS = 8
# Environment variable: if it is set, products start while the kernel before them still runs (programmatic dependent
# launch). Each fetches its first weights then, and waits before it reads anything else.
PDL = "DRAFTSMITH_PDL"
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on sm_90


class FewRowsForm(NamedTuple):
    """How a product is computed.

    kernel: "vector" (one row), "rows" (tensor cores), or "same": the tile of 64 rows for any number of them, in slices
        of 64, so that the bits of a row do not depend on the others.
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
        r"(vector|rows|same) ([0-9]{1,5})x([0-9]{1,5}) /([0-9]{1,2}), ([0-9]{1,2}) warps, ([0-9]{1,2}) stages", name
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


def same_bits_form(inputs: int, outputs: int, dtype: torch.dtype, multiprocessors: int) -> FewRowsForm | None:
    """The form for any number of rows of a step with a matrix ``[inputs, outputs]``; None for other dtypes."""
    forms = candidates(MAX_ROWS, inputs, outputs, dtype, multiprocessors)
    return forms[0]._replace(kernel="same") if forms else None


def few_rows_reference(
    x: Tensor,
    matrix: Tensor,
    form: FewRowsForm,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    act: str = "",
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The definition of :func:`few_rows_product`, in float32; ``residual``: what ``out`` held, with ``add``."""
    if norm is not None:
        x = F.rms_norm(x.float(), norm[0].shape, norm[0].float(), norm[1])
    per_part = part_length(matrix.shape[0], form)
    starts = range(0, form.parts * per_part, per_part)
    parts = torch.stack([x[:, k : k + per_part].float() @ matrix[k : k + per_part].float() for k in starts])
    if bias is not None:
        parts = parts + bias.float()
    if act:
        out = torch.empty_like(parts[0, :, : matrix.shape[1] // 2])
        gated_reference(parts, out, act)
        parts = out[None]
    return parts if residual is None else residual.float() + factor * parts


def part_length(inputs: int, form: FewRowsForm) -> int:
    """Inputs of a part: a multiple of the block size. The last parts may have fewer, or none."""
    return -(-inputs // (form.inputs * form.parts)) * form.inputs


@jit
def _outputs(BLOCK_N: tl.constexpr, outputs, ACT: tl.constexpr):
    """The numbers of a program's outputs and of their rows of the matrix. With an activation, gate and up alternate."""
    lane = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * BLOCK_N + lane
    row = n
    if ACT != "":
        n = tl.program_id(0) * (BLOCK_N // 2) + lane // 2
        row = n + (lane % 2) * outputs
    return n, row


@jit
def _wait(matrix_place, inside, left, BLOCK_K: tl.constexpr):
    """Programmatic dependent launch: let the next kernel start, fetch the first weights to the L2 cache, which no other
    kernel writes, and wait for the kernels before."""
    tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, BLOCK_K // 32) * 32
    line, fetched = matrix_place + k[None, :], inside[:, None] & (k < left)[None, :]
    asm: tl.constexpr = "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }"
    tl.inline_asm_elementwise(asm, "=r,l,r", [line, fetched.to(tl.int32)], tl.int32, False, 1)
    tl.extra.cuda.gdc_wait()


@jit
def _vector_kernel(
    tensors,
    sizes,
    eps,
    factor,
    strides,
    ADD: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per block of outputs and part, for one row. ``matrix``: row n has the weights of output n."""
    x, matrix, out, norm, bias = tensors
    inputs, outputs, per_part = sizes
    _, matrix_row, out_part, _ = strides
    part = tl.program_id(1)
    n, matrix_n = _outputs(BLOCK_N, outputs, ACT)
    row = matrix + matrix_n.to(tl.int64)[:, None] * matrix_row
    begin = part * per_part
    if PDL:
        _wait(row + begin, n < outputs, inputs - begin, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)  # added up at the end alone
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + per_part, inputs), BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        own = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        if norm is not None:
            squares += own * own
            own *= tl.load(norm + k, mask=k < inputs, other=0.0).to(tl.float32)
        weight = tl.load(row + k[None, :], mask=(n < outputs)[:, None] & (k < inputs)[None, :], other=0.0)
        total += weight.to(tl.float32) * own[None, :]
    value = tl.sum(total, 1)
    if norm is not None:
        value *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    if bias is not None:
        value += tl.load(bias + matrix_n, mask=n < outputs, other=0.0).to(tl.float32)
    if ACT != "":
        gate, up = tl.split(tl.reshape(value, [BLOCK_N // 2, 2]))
        value = activated(gate, ACT) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    place = out + part.to(tl.int64) * out_part + n
    if ADD:
        value = tl.load(place, mask=n < outputs, other=0.0).to(tl.float32) + factor * value
    tl.store(place, value.to(out.dtype.element_ty), mask=n < outputs)


@jit(do_not_specialize="rows added")
def _few_rows_kernel(
    tensors,
    sizes,
    eps,
    factor,
    strides,
    rows,
    added,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per block of outputs and part, for all rows. ``matrix``: row n has the weights of output n."""
    x, matrix, out, norm, bias = tensors
    inputs, outputs, per_part = sizes
    x_row, matrix_row, out_part, out_row = strides
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n, matrix_n = _outputs(BLOCK_N, outputs, ACT)
    x_place = x + m.to(tl.int64)[None, :] * x_row
    matrix_place = matrix + matrix_n.to(tl.int64)[:, None] * matrix_row
    begin = part * per_part
    if PDL:
        _wait(matrix_place + begin, n < outputs, inputs - begin, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    SHIFT: tl.constexpr = (
        0.0625 if x.dtype.element_ty == tl.float16 else 1.0
    )  # x · norm may pass float16's largest number
    for start in range(begin, tl.minimum(begin + per_part, inputs), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weight = tl.load(matrix_place + k[None, :], mask=(n < outputs)[:, None] & (k < inputs)[None, :], other=0.0)
        own = tl.load(x_place + k[:, None], mask=(m < rows)[None, :] & (k < inputs)[:, None], other=0.0)
        if norm is not None:
            wide = own.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            scale = tl.load(norm + k, mask=k < inputs, other=0.0).to(tl.float32) * SHIFT
            own = (wide * scale[:, None]).to(x.dtype.element_ty)
        total = tl.dot(weight, own, total, input_precision="ieee")
    if norm is not None:
        total *= (tl.rsqrt(squares / inputs + eps) / SHIFT)[None, :]
    if bias is not None:
        total += tl.load(bias + matrix_n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if ACT != "":
        gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_N // 2, 2, BLOCK_M]), (0, 2, 1)))
        total = activated(gate, ACT) * up
        n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    place = out + part.to(tl.int64) * out_part + m.to(tl.int64)[None, :] * out_row + n[:, None]
    held = (n < outputs)[:, None] & (m < added)[None, :]  # rows of which out holds what is added to: all or none
    total = tl.load(place, mask=held, other=0.0).to(tl.float32) + factor * total
    inside = (n < outputs)[:, None] & (m < rows)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def few_rows_product(
    x: Tensor,
    matrix: Tensor,
    form: FewRowsForm,
    out: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    bias: Tensor | None = None,
    act: str = "",
    add: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """The parts of ``x matrix``; of one part also a layer's ``act(norm(x) matrix + bias)`` and ``out += factor · …``.

    Args:
        x: ``[M, K]`` float32, float16 or bfloat16, M ≤ 64, or 1 for a "vector" form, or any for a "same" form.
        matrix: ``[K, N]`` of the same dtype; the first stride is 1, as of ``nn.Linear.weight.t()``.
        form: one of :func:`candidates`.
        out: ``[S, M, N]``, written to if given, in any of these dtypes; the last stride is 1.
        norm: with S = 1, weight ``[K]`` and eps of an RMSNorm of x. x times the weight is rounded to the dtype of x
            ("rows" forms), and 1 / rms multiplies the sums.
        bias: ``[N]``, with S = 1.
        act: with S = 1, "silu" or "gelu_tanh" (:mod:`draftsmith.kernels.gated`): gate and up are the two halves of the
            outputs, and ``out`` is ``[1, M, N / 2]``.
        add: add ``factor ·`` the product to what ``out`` holds, with S = 1.

    Returns:
        ``[S, M, N]``: float32 if S > 1, in the dtype of x if S = 1 (or ``out``, in its own).
    """
    (rows, inputs), outputs = x.shape, matrix.shape[1] // (2 if act else 1)
    assert matrix.shape[0] == inputs and matrix.dtype == x.dtype
    assert form.kernel == "same" or rows <= (1 if form.kernel == "vector" else MAX_ROWS)
    assert form.parts == 1 or (norm is None and bias is None and not act and not add)
    if out is None:
        assert not add
        out = x.new_empty((form.parts, rows, outputs), dtype=x.dtype if form.parts == 1 else torch.float32)
    assert out.shape == (form.parts, rows, outputs)
    if rows > MAX_ROWS:
        for some, place in zip(x.split(MAX_ROWS), out.split(MAX_ROWS, 1), strict=True):
            few_rows_product(some, matrix, form, place, norm=norm, bias=bias, act=act, add=add, factor=factor)
        return out
    if why_not_triton(x):
        residual = out.clone() if add else None
        options: dict[str, Any] = {"norm": norm, "bias": bias, "act": act, "residual": residual, "factor": factor}
        return out.copy_(few_rows_reference(x, matrix, form, **options))
    x = dense(x)
    assert out.stride(2) == 1 and (matrix.stride(0) == 1 or inputs == 1)
    grid = (-(-outputs * (2 if act else 1) // form.outputs), form.parts)
    weight, eps = norm or (None, 0.0)
    pdl = bool(os.environ.get(PDL)) and not INTERPRETING
    tile = {"ACT": act, "PDL": pdl, "BLOCK_N": form.outputs, "BLOCK_K": form.inputs}
    options = {**tile, "num_warps": form.num_warps, **({"launch_pdl": True} if pdl else {})}
    tensors, sizes = (x, matrix, out, weight, bias), (inputs, outputs, part_length(inputs, form))
    given = (tensors, sizes, eps, factor if add else 1.0, (x.stride(0), matrix.stride(1), *out.stride()[:2]))
    with torch.cuda.device_of(x):
        if form.kernel == "vector":
            _vector_kernel[grid](*given, ADD=add, STAGES=form.num_stages, **options)
        else:
            block_m = MAX_ROWS if form.kernel == "same" else next_power(rows, 16)
            options |= {"BLOCK_M": block_m, "num_stages": form.num_stages}
            _few_rows_kernel[grid](*given, rows, rows if add else 0, **options)
    return out


def sum_parts_reference(parts: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition of :func:`sum_parts`, in float32."""
    total = parts.sum(0, dtype=torch.float32)
    return total if bias is None else total + bias.float()


@jit
def _sum_parts_kernel(
    parts, bias, out, outputs, part_stride, row_stride, out_row, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
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
    """``out = Σ_s parts[s] + bias``, rounded once; returns ``out [M, N]``. ``parts [S, M, N]``: from
    :func:`few_rows_product`; ``bias [N]``. The last strides of ``parts`` and ``out`` are 1."""
    if why_not_triton(parts):
        return out.copy_(sum_parts_reference(parts, bias))
    assert parts.shape[1:] == out.shape and parts.stride(2) == out.stride(1) == 1
    assert bias is None or bias.stride(0) == 1
    count, rows, outputs = parts.shape
    block = min(1024, next_power(outputs))
    strides = (*parts.stride()[:2], out.stride(0))
    with torch.cuda.device_of(parts):
        _sum_parts_kernel[(rows, -(-outputs // block))](
            parts, bias, out, outputs, *strides, PARTS=count, BLOCK=block, num_warps=4
        )
    return out
