"""Products of a few rows with a matrix on a CPU, each in the form measured to be fastest on this machine.

    product(x, M) = x M;   linear(x, W, b) = x Wᵀ + b

BLAS libraries are tuned for one row and for many; between these the same product can take several times longer in one
form than in another, depending on shape, row count, instruction set and threads. So each shape is timed once, when it
first occurs, for row counts that are powers of two, and the choice is kept in a file for later processes. On a GPU,
with gradients and in ``torch.compile``, PyTorch's own product is used. For a frozen module's weight (an LM head) a copy
in oneDNN's own layout is kept too, where that is faster: a product of 8 rows then costs little more than one of a
single row.

Shape letters: M rows, N outputs, K inputs.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.kernels.measured import read_measured, write_measured

FILE = "linear.json"  # in the cache folder
BUDGET = 1.0  # seconds of processor time per process for timing; shapes that occur later use F.linear
_COUNTS = (1, 2, 4, 8, 16, 32, 64)  # timed row counts; others use the form of the next larger one, or of the largest
_SAMPLE = 1 << 21  # of a larger matrix only so many entries are timed
_LAYERS = 32  # matrices of a shape that are timed in turn, at most;
_POOL = 1 << 24  # entries of all of them, at most
_GAIN = 0.9  # another form is used if it takes less than this share of F.linear's time

Form = Callable[[Tensor, Tensor], Tensor]  # [M, K], [K, N] → [M, N]


def _transposed(x: Tensor, matrix: Tensor) -> Tensor:
    """(Mᵀ xᵀ)ᵀ: BLAS then sees N as the long side of its output."""
    return (matrix.t() @ x.t()).t()


def _onednn(x: Tensor, matrix: Tensor) -> Tensor:
    """oneDNN's product, which PyTorch does not use for float32, with the matrix in its plain layout."""
    return _pointwise(x, matrix.t())


def _pointwise(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _pack(matrix: Tensor) -> Tensor:
    """A copy of ``[K, N]`` in oneDNN's layout, tuned for 16 rows and valid for any number."""
    return torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), 16)


FORMS: dict[str, Form] = {"blas": torch.mm, "transposed": _transposed}
if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    FORMS["onednn"] = _onednn
PACKED = "packed"  # the form of a module's product with its packed copy
CAN_PACK = "onednn" in FORMS and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")

_packs: WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()
_chosen: dict[tuple[int, torch.Size, bool, torch.dtype, bool], str] = {}
_stored: dict[str, str] | None = None  # by _key, as in the file
_spent = 0.0


def product(form: str, x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``x matrix + bias``.

    Args:
        form: a name in ``FORMS``, see :func:`choose`.
        x: ``[M, K]``.
        matrix: ``[K, N]``.
        bias: ``[N]``.
        out: ``[M, N]``, written to if given.
    """
    if form == "blas":
        return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)
    output = FORMS[form](x, matrix)
    if bias is not None:
        return torch.add(output, bias, out=out)
    return output if out is None else out.copy_(output)


def add_product(form: str, total: Tensor, x: Tensor, matrix: Tensor, factor: float = 1.0) -> Tensor:
    """``total += factor · x matrix`` in place, in one operation where possible. ``total [M, N]``, ``x [M, K]``."""
    if form == "blas":
        return total.addmm_(x, matrix, alpha=factor)
    return total.add_(FORMS[form](x, matrix), alpha=factor)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in the form that is fastest on this machine.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]``.

    Returns:
        ``[..., N]``.
    """
    form = choose(x.numel() // x.shape[-1], weight.t())
    if form == "blas":
        return F.linear(x, weight, bias)
    return product(form, x.reshape(-1, x.shape[-1]), weight.t(), bias).view(*x.shape[:-1], -1)


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, as :func:`linear` or by a packed copy of its weight, if it is a plain ``nn.Linear``: no subclass,
    no hooks (offloading, ZeRO-3)."""
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:  # its weight may be sharded
        return module(x)
    if "forward" in module.__dict__ or torch.is_autocast_enabled("cpu"):
        return module(x)
    if module._forward_pre_hooks or module._forward_hooks:
        return module(x)
    weight, bias = module.weight, module.bias
    frozen = CAN_PACK and not weight.requires_grad
    if not frozen or choose(x.numel() // x.shape[-1], weight.t(), frozen) != PACKED:
        return linear(x, weight, bias)
    output = _pointwise(x.reshape(-1, x.shape[-1]), _packed(module)).view(*x.shape[:-1], -1)
    return output if bias is None else output.add_(bias)


def _packed(module: nn.Linear) -> Tensor:
    """The packed copy of a module's weight, made again after the weight was replaced or written to."""
    weight = module.weight
    stamp = weight.data_ptr(), 0 if weight.is_inference() else weight._version
    known = _packs.get(module)
    if known is None or known[0] != stamp:
        known = _packs[module] = stamp, _pack(weight.detach().t())
    return known[1]


def choose(rows: int, matrix: Tensor, packed: bool = False) -> str:
    """The name in ``FORMS`` of the fastest product of ``rows`` rows with ``matrix [K, N]``, in row-major or
    column-major layout; or ``PACKED``, if a packed copy may be kept."""
    if not matrix.is_cpu or torch.compiler.is_compiling() or torch.is_grad_enabled() or not rows:
        return "blas"
    count = min(1 << (rows - 1).bit_length(), _COUNTS[-1])
    key = count, matrix.shape, matrix.stride(1) == 1, matrix.dtype, packed
    form = _chosen.get(key)
    if form is None:
        form = _chosen[key] = _look_up(count, matrix, packed)
    return form


def _look_up(rows: int, matrix: Tensor, packed: bool) -> str:
    """The form for ``rows``, one of ``_COUNTS``: stored, or measured now while the budget lasts."""
    global _stored
    if _stored is None:
        _stored = {str(key): str(form) for key, form in read_measured(FILE).items()}
    form = _stored.get(_key(rows, matrix, packed), "")
    if form not in FORMS and not (packed and form == PACKED):
        if _spent >= BUDGET:
            return "blas"
        measured = {_key(count, matrix, packed): fastest for count, fastest in _measure(matrix, packed).items()}
        _stored.update(measured)
        write_measured(FILE, measured)
        form = _stored[_key(rows, matrix, packed)]
    return form


def _key(rows: int, matrix: Tensor, packed: bool) -> str:
    by = ("rows" if matrix.stride(1) == 1 else "columns") + (" or packed" if packed else "")
    return f"{rows} x {tuple(matrix.shape)} by {by}, {str(matrix.dtype).removeprefix('torch.')}"


def _measure(matrix: Tensor, packed: bool) -> dict[int, str]:
    """The fastest form for each row count. Forms are timed in turn, each time on another matrix, as in a model of many
    layers: a matrix that stays in the cache would be misleading. This thread's processor time is measured and the
    shortest counts, since other work on the machine can only add to it."""
    global _spent
    began = time.thread_time()
    inputs, outputs = matrix.shape
    outputs = max(1, min(outputs, _SAMPLE // inputs))
    count = min(_LAYERS, max(1, _POOL // (inputs * outputs)))
    if matrix.stride(1) == 1:
        pool = torch.ones(count, inputs, outputs, dtype=matrix.dtype)
    else:
        pool = torch.ones(count, outputs, inputs, dtype=matrix.dtype).transpose(1, 2)
    forms = {name: (form, pool.unbind()) for name, form in FORMS.items()}
    if packed:
        with suppress(RuntimeError):  # oneDNN has no product of this dtype on this machine
            forms[PACKED] = _pointwise, tuple(map(_pack, pool.unbind()))
    fastest: dict[int, str] = {}
    used = 0
    for rows in _COUNTS:
        x, since = pool.new_ones(rows, inputs), time.thread_time()
        best = dict.fromkeys(forms, float("inf"))
        for turn in range(12):
            for name, (form, matrices) in forms.items():
                used += 1
                start = time.thread_time()
                try:
                    form(x, matrices[used % count])
                except RuntimeError:
                    continue
                if turn:  # the first call includes one-time set-up
                    best[name] = min(best[name], time.thread_time() - start)
            if turn >= 3 and time.thread_time() - since > 0.02:
                break
        name = min(best, key=lambda name: best[name])
        fastest[rows] = name if best[name] < _GAIN * best["blas"] else "blas"
    _spent += time.thread_time() - began
    return fastest
