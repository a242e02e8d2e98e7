"""The launches of kernels on a GPU of 132 multiprocessors (sm_90), intercepted where there is none: what Triton would
compile for them."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from draftsmith.kernels.backend import triton

PROCESSORS = 132


class Launch(NamedTuple):
    """An intercepted launch.

    kernel: Triton's function.
    grid: programs along each axis.
    key: what Triton's cache of compiled kernels distinguishes.
    pack: the options, signature, constants and attributes that Triton compiles it with.
    """

    kernel: Any
    grid: tuple[int, ...]
    key: str
    pack: Callable[[], tuple[Any, ...]]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def compiled(self) -> Any:
        """Triton's compiled kernel."""
        options, signature, constants, attributes = self.pack()
        source = triton.compiler.ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=_target(), options=options.__dict__)


def _target() -> Any:
    return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)


@cache
def _binder(kernel: Any) -> tuple[Any, Any]:
    backend = triton.compiler.make_backend(_target())
    create = importlib.import_module("triton.runtime.jit").create_function_from_signature
    return backend, create(kernel.signature, kernel.params, backend)


class _Zeroed(TorchFunctionMode):
    """Zeros where memory would be left as it is. (PyTorch's own caches would keep a patched ``torch.empty``.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


_EMPTY = {torch.empty, torch.empty_like, torch.Tensor.new_empty}


@contextmanager
def intercepted(launched: Callable[[Launch], object]) -> Iterator[None]:
    """Context in which our modules imported so far take tensors of any device for those of a GPU, and every
    launch is given to ``launched`` in place of running. What kernels would have written is 0."""
    jit = importlib.import_module("triton.runtime.jit")

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def bind(*arguments: Any, **named: Any) -> None:
            backend, binder = _binder(kernel)
            bound, specialization, options = binder(*arguments, **named)
            key = f"{kernel.fn.__name__} {jit.compute_cache_key({}, specialization, options)}"
            launched(
                Launch(kernel, grid, key, partial(kernel._pack_args, backend, named, bound, specialization, options))
            )

        return bind

    on_gpu: dict[str, Any] = {
        "why_not_triton": lambda tensor: None,
        "multiprocessors": lambda device: PROCESSORS,
        "is_autocast_enabled": lambda *kind: False,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(jit.JITFunction, "__getitem__", launch))
        for name, module in list(sys.modules.items()):
            if name == "torch" or name.startswith("draftsmith."):
                for function, replaced in on_gpu.items():
                    if hasattr(module, function):
                        stack.enter_context(patch.object(module, function, replaced))
        stack.enter_context(_Zeroed())
        yield
