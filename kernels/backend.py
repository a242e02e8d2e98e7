"""The choice between Triton kernels and plain PyTorch, made in this file alone.

A kernel runs on CUDA tensors where triton is installed (it comes with a CUDA build of torch), and on CPU tensors under
``TRITON_INTERPRET=1``, for tests; set it before anything imports triton. Everywhere else the public functions of this
folder take their plain PyTorch path. Unlike PyTorch's own operations, a Triton kernel runs on the current CUDA device:
callers enter ``torch.cuda.device_of(tensor)``.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # Any: type checkers cannot check Triton's language
    triton: Any = None

    class tl(Any):
        constexpr = Any  # marks a kernel's compile-time constants
else:
    try:
        triton = import_module("triton")
        tl = import_module("triton.language")
    except ImportError:  # a CPU build of torch
        triton, tl = None, SimpleNamespace(constexpr=int)

constant: Any = tl.constexpr  # of a number of a module that kernels read

# Environment variable: if it is set, the bits of a row of a step, by Triton's kernels, depend neither on the number of
# rows nor on where its keys lie: drafting then never changes a bit. Kernels take one tile for any number of rows.
SAME_BITS = "DRAFTSMITH_SAME_BITS"
INTERPRETING = triton is not None and bool(triton.knobs.runtime.interpret)


def jit(kernel: Callable[..., Any] | None = None, *, do_not_specialize: str = "") -> Any:
    """``triton.jit``; without Triton the plain function, which is never launched.

    Triton compiles a kernel again for integer arguments that are 1, and for those that 16 divides or not, except for
    the arguments named in ``do_not_specialize``, with spaces between: counts and lengths, which change from step to
    step. It does not look for them in tuples.
    """
    if kernel is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    return kernel if triton is None else triton.jit(kernel, do_not_specialize=do_not_specialize.split())


def why_not_triton(tensor: Tensor) -> str | None:
    """The reason why an operation on this tensor takes the plain PyTorch path; None if it takes the Triton kernel."""
    if triton is None:
        return "triton is not installed"
    if not tensor.is_cuda and not INTERPRETING:
        return f"the tensors are on {tensor.device}, and Triton needs CUDA (or TRITON_INTERPRET=1)"
    return None


def same_bits() -> bool:
    """Whether :data:`SAME_BITS` is set."""
    return bool(os.environ.get(SAME_BITS))


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its last axis is not dense: kernels' public functions read tensors of any strides."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def next_power(number: int, minimum: int = 1) -> int:
    """The smallest power of two that is at least ``number`` and ``minimum`` (itself a power of two)."""
    return max(minimum, 1 << (number - 1).bit_length())


def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU; 4 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
