"""Products of a few rows with a matrix.

    product(x, M) = x M;   linear(x, W, b) = x Wᵀ + b

On a CPU steps take the product of kernels/cpu.cpp, which reads the weight as PyTorch holds it: 8 rows cost little more
than one, and each row of up to 512 has the same bits whatever the other rows are, so that a drafted token gets the
logits that plain decoding gives it. Measured (the layers of SmolLM2, one thread of an Intel Xeon, ms for 1, 8 and 16
rows): float32 36.2, 44.2, 52.7 (oneDNN with packed weights 38.8, 46.8, 57.8); bfloat16 by AMX 19.8, 21.9, 24.1 (24.2,
24.6, 25.1), without 17.6, 23.7, 36.7. Prompts, other dtypes, gradients and ``torch.compile`` take PyTorch's.

On a GPU the product of up to 64 rows with a weight ``[N, K]``, transposed, is measured beside the forms of
:mod:`draftsmith.kernels.few_rows`, each first compared with the exact product: a form that is wrong, or fails, is never
chosen. Only steps are measured, and smaller trees before larger ones (inference/engine/step.py): each row count takes
seconds, and their sum is limited. Shapes that first occur in prefill (:func:`prefill_products`), or while a CUDA graph
is captured, use PyTorch's product. What is fastest depends on who adds up a form's parts, :func:`product` or the caller
(:func:`partial_product`), so these are measured separately. With ``DRAFTSMITH_SAME_BITS`` nothing is measured: steps of
any number of rows take one form for a matrix.

Shape letters: M rows, N outputs, K inputs, S parts.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial as partial_of

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.kernels import cpu
from draftsmith.kernels.backend import multiprocessors, same_bits, why_not_triton
from draftsmith.kernels.few_rows import (
    MAX_ROWS,
    FewRowsForm,
    candidates,
    few_rows_product,
    parse_form,
    same_bits_form,
    sum_parts,
)
from draftsmith.kernels.measured import gpu_seconds, machine, read_measured, write_measured

FILE = "linear.json"  # in the cache folder: what was measured on GPUs
GPU_BUDGET = 20.0  # seconds per process for timing on GPUs, most of them for compiling
_GPU_LEAST = 1 << 20  # entries; smaller matrices are not measured
_GPU_GAIN = 0.98  # another form is used if it takes less than this share of the time of PyTorch's product
_EXACT = 1 << 24  # entries of a matrix that are converted to float64 at a time

_gpu_chosen: dict[tuple[torch.device, int, torch.Size, torch.dtype, bool], str] = {}
_gpu_stored: dict[str, dict[str, str]] = {}  # by machine and _gpu_key, as in the file
_gpu_spent = 0.0
_prefilling = False

MOST_ON_CPU = 512  # rows of a step's product of our own on a CPU; for more, PyTorch's is faster


def product(form: str, x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x matrix + bias``: ``x [M, K]``, ``matrix [K, N]``, ``bias [N]`` → ``[M, N]``, written to ``out`` if given.
    ``form``: from :func:`choose`: "blas", or one of ``few_rows.candidates``."""
    if form == "blas":
        return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)
    if out is None:
        out = x.new_empty(len(x), matrix.shape[1])
    if splits_of(form) == 1 and bias is None:
        partial_product(form, x, matrix, out[None])
        return out
    parts = x.new_empty((splits_of(form), *out.shape), dtype=torch.float32)
    return sum_parts(partial_product(form, x, matrix, parts), out, bias)  # rounded once, as by ``addmm``


def splits_of(form: str) -> int:
    """S, the number of parts of :func:`partial_product` in this form; 1 but for few rows.
    Raises ValueError: there is no such form."""
    if form == "blas":
        return 1
    few_rows = parse_form(form)
    if few_rows is None:
        raise ValueError(f"a product's form is {form!r}; take one from choose()")
    return few_rows.parts


def partial_buffer(form: str, rows: int, matrix: Tensor) -> Tensor:
    """An ``out`` for :func:`partial_product` of ``rows`` rows: ``[S, M, N]``, float32 if S > 1."""
    splits = splits_of(form)
    dtype = matrix.dtype if splits == 1 else torch.float32
    return matrix.new_empty((splits, rows, matrix.shape[1]), dtype=dtype)


def folding_form(form: str) -> FewRowsForm | None:
    """The form in which a product of one part does what stands around it (:func:`few_rows_product`); None if other
    kernels do."""
    few_rows = parse_form(form)
    return few_rows if few_rows is not None and few_rows.parts == 1 else None


def partial_product(form: str, x: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """``x matrix`` in S parts, for a caller that adds them up itself: ``x [M, K]``, ``matrix [K, N]`` → ``[S, M, N]``,
    float32 if S > 1, else in the dtype of x. ``form``: from :func:`choose` with ``partial``; ``out``: as
    :func:`partial_buffer` makes it, a new one if left out."""
    if out is None:
        out = partial_buffer(form, len(x), matrix)
    few_rows = parse_form(form)
    if few_rows is not None:
        return few_rows_product(x, matrix, few_rows, out)
    product(form, x, matrix, None, out[0])
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in the form that is fastest on this machine: ``x [..., K]``, ``weight [N, K]``, ``bias [N]`` →
    ``[..., N]``."""
    rows = x.numel() // x.shape[-1]
    in_step = not (_prefilling or torch.is_grad_enabled()) and 0 < rows <= MOST_ON_CPU
    if in_step and x.dtype == weight.dtype and cpu.runs(x):
        return cpu.product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
    form = choose(rows, weight.t())
    if form == "blas":
        return F.linear(x, weight, bias)
    return product(form, x.reshape(-1, x.shape[-1]), weight.t(), bias).view(*x.shape[:-1], -1)


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, as :func:`linear` if it is a plain ``nn.Linear``: no subclass, no hooks (offloading, ZeRO-3)."""
    if not _is_plain(module, x):
        return module(x)
    assert isinstance(module, nn.Linear)
    return linear(x, module.weight, module.bias)


def _is_plain(module: nn.Module, x: Tensor) -> bool:
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:  # its weight may be sharded
        return False
    if "forward" in module.__dict__ or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu"):
        return False
    return not (module._forward_pre_hooks or module._forward_hooks)


def kernel_weight(module: nn.Module, x: Tensor) -> Tensor | None:
    """The weight ``[N, K]`` of a plain ``nn.Linear`` without a bias, as :func:`apply_linear` has it, where a kernel may
    multiply ``x [..., K]`` with it; None elsewhere."""
    if why_not_triton(x) or not _is_plain(module, x):
        return None
    assert isinstance(module, nn.Linear)
    weight = module.weight
    same = weight.dtype == x.dtype and weight.device == x.device and weight.stride(1) == 1
    return weight if same and module.bias is None else None


def choose(rows: int, matrix: Tensor, partial: bool = False) -> str:
    """The name of the fastest form of the product of ``rows`` rows with ``matrix [K, N]``, in column-major layout:
    "blas", or on a GPU one of ``few_rows.candidates``. ``partial``: for :func:`partial_product`: the caller adds the
    parts up."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not rows:
        return "blas"
    if same_bits() and not why_not_triton(matrix):
        return "blas" if _prefilling and rows > MAX_ROWS else _same_bits_form(matrix)
    return _choose_on_gpu(rows, matrix, partial) if matrix.is_cuda else "blas"


def _same_bits_form(matrix: Tensor) -> str:
    """The form of steps of any number of rows; "blas" where the kernels cannot multiply with the matrix."""
    if matrix.stride(0) != 1 or torch.is_autocast_enabled(matrix.device.type):
        return "blas"
    inputs, outputs = matrix.shape
    form = same_bits_form(inputs, outputs, matrix.dtype, multiprocessors(matrix.device))
    return "blas" if form is None else form.name


def _choose_on_gpu(rows: int, matrix: Tensor, partial: bool) -> str:
    if rows > MAX_ROWS or matrix.stride(0) != 1 or matrix.numel() < _GPU_LEAST or why_not_triton(matrix):
        return "blas"
    if torch.is_autocast_enabled("cuda"):  # it would convert x
        return "blas"
    count = 1 << (rows - 1).bit_length()
    key = matrix.device, count, matrix.shape, matrix.dtype, partial
    form = _gpu_chosen.get(key)
    if form is None:
        form = _look_up_on_gpu(count, matrix, partial)
        if form is None:  # not now, but maybe later
            return "blas"
        _gpu_chosen[key] = form
    return form


def _look_up_on_gpu(rows: int, matrix: Tensor, partial: bool) -> str | None:
    """The form for ``rows``, a power of two: stored, or measured now while the budget lasts. None if nothing may be
    measured now: it synchronises, which a CUDA graph's capture forbids, and ``torch.cuda.set_sync_debug_mode``."""
    on, key = machine(matrix.device), _gpu_key(rows, matrix, partial)
    if on not in _gpu_stored:
        stored = read_measured(FILE, matrix.device)
        _gpu_stored[on] = {str(key): str(form) for key, form in stored.items()}
    form = _gpu_stored[on].get(key, "")
    if form == "blas" or form in {one.name for one in _candidates(rows, matrix)}:
        return form
    if _measuring_is_forbidden(matrix):
        return None
    if _gpu_spent >= GPU_BUDGET:
        return "blas"
    measured = _measure_on_gpu(rows, matrix, partial)
    if measured is None:
        return "blas"
    _gpu_stored[on][key] = measured
    write_measured(FILE, {key: measured}, matrix.device)
    return measured


@contextmanager
def prefill_products() -> Iterator[None]:
    """Context of prefill. On a GPU no form is measured inside: products take one that is known already, or PyTorch's.
    On a CPU they are PyTorch's, faster for many rows, but with bits that depend on the number of rows."""
    global _prefilling
    before, _prefilling = _prefilling, True
    try:
        yield
    finally:
        _prefilling = before


def _measuring_is_forbidden(matrix: Tensor) -> bool:
    if _prefilling:
        return True
    return matrix.is_cuda and (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() != 0)


def _candidates(rows: int, matrix: Tensor) -> list[FewRowsForm]:
    inputs, outputs = matrix.shape
    return candidates(rows, inputs, outputs, matrix.dtype, multiprocessors(matrix.device))


def _gpu_key(rows: int, matrix: Tensor, partial: bool) -> str:
    use = ", parts" if partial else ""
    return f"{rows} x {tuple(matrix.shape)} by columns, {str(matrix.dtype).removeprefix('torch.')}{use}"


def _measure_on_gpu(rows: int, matrix: Tensor, partial: bool) -> str | None:
    """The fastest form for ``rows``, "blas" unless another is right and faster. None if that cannot be found out: too
    little memory is free, or PyTorch's product of this matrix is zero or not finite, so that nothing can be compared.
    """
    global _gpu_spent
    began = time.perf_counter()
    try:
        return _fastest_on_gpu(rows, matrix, partial)
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        _gpu_spent += time.perf_counter() - began


def _fastest_on_gpu(rows: int, matrix: Tensor, partial: bool) -> str | None:
    generator = torch.Generator(matrix.device).manual_seed(0)  # nobody else's random numbers change
    x = torch.randn(rows, len(matrix), generator=generator, device=matrix.device).to(matrix.dtype)
    step = max(1, _EXACT // len(matrix))
    exact = torch.cat([x.double() @ part.double() for part in matrix.split(step, 1)], 1)  # [M, N]
    plain = float((torch.mm(x, matrix).double() - exact).abs().max())
    if not (float(exact.abs().max()) > 0 and plain < float("inf")):
        return None
    # Other orders of summation err by other amounts. In 16 bits most of the error is the result's rounding.
    tolerance = max(4 * plain, 1e-6 * float(exact.abs().max()))
    best = {"blas": time_on_gpu("blas", x, matrix, partial)}
    for one in _candidates(rows, matrix):
        try:
            found = product(one.name, x, matrix)
            if float((found.double() - exact).abs().max()) <= tolerance:  # not if it is NaN
                best[one.name] = time_on_gpu(one.name, x, matrix, partial)
        except (torch.cuda.OutOfMemoryError, torch.AcceleratorError):  # the device's own errors are not passed over
            raise
        except Exception:  # Triton's own errors have no common type: this form does not compile or fit here
            continue
    best["blas"] = min(best["blas"], time_on_gpu("blas", x, matrix, partial))  # the first may have met a slow clock
    name = min(best, key=lambda name: best[name])
    return name if best[name] < _GPU_GAIN * best["blas"] else "blas"


def time_on_gpu(form: str, x: Tensor, matrix: Tensor, partial: bool) -> float:
    """Seconds of a product in this form.

    With ``partial``, the split-K output of several parts is timed with its reduction (:func:`sum_parts`), in place of
    the kernel of the caller that fuses it; a form of one part (:func:`folding_form`) is timed alone, without the norm
    that it may compute. Each call reads another copy of the matrix, as in a model of many layers; together the copies
    are larger than the L2 cache.
    """
    size = matrix.numel() * matrix.element_size()
    cache = torch.cuda.get_device_properties(matrix.device).L2_cache_size if matrix.is_cuda else 0
    copies = [matrix] + [matrix.t().clone().t() for _ in range(3 * cache // size)]
    out = x.new_empty(len(x), matrix.shape[1])
    parts = partial_buffer(form, len(x), matrix)

    def call(copy: Tensor) -> None:
        if partial and folding_form(form) is not None:
            partial_product(form, x, copy, parts)
        elif partial:
            sum_parts(partial_product(form, x, copy, parts), out)
        else:
            product(form, x, copy, None, out)

    calls = [partial_of(call, copy) for copy in copies]
    return gpu_seconds(calls * -(-8 // len(calls)), matrix.device)
