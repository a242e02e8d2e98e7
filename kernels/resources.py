"""What kernels need of a GPU of 132 multiprocessors (sm_90), found without one: the launches are intercepted.

    python kernels/resources.py [--triton FOLDER]    table of registers, memory and instructions, with checks

FOLDER is an unpacked wheel of another version of Triton. ptxas, cuobjdump and nvdisasm are inside each wheel.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from draftsmith.kernels.backend import triton

PROCESSORS = 132
SHARED_MEMORY = 227 * 1024  # bytes that a program may have on sm_90
ARCHITECTURE = ("cuda", 90, 32)


class Launch(NamedTuple):
    """An intercepted launch.

    kernel: Triton's function.
    grid: programs along each axis.
    key: what Triton's cache of compiled kernels distinguishes.
    pack: Triton's options, signature, constants and attributes of the launch.
    """

    kernel: Any
    grid: tuple[int, ...]
    key: str
    pack: Callable[[], tuple[Any, ...]]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@cache
def _binder(kernel: Any) -> tuple[Any, Any]:
    backend = triton.compiler.make_backend(triton.backends.compiler.GPUTarget(*ARCHITECTURE))
    create = importlib.import_module("triton.runtime.jit").create_function_from_signature
    return backend, create(kernel.signature, kernel.params, backend)


def _zeroed(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments, **named: empty(*arguments, **named).zero_()


@contextmanager
def intercepted(launched: Callable[[Launch], object]) -> Iterator[None]:
    """Context in which the rooms' modules imported so far take tensors of any device for those of a GPU, and every
    launch is given to ``launched`` in place of running. What kernels would have written is 0."""
    jit = importlib.import_module("triton.runtime.jit")

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def bind(*arguments: Any, **named: Any) -> None:
            backend, binder = _binder(kernel)
            bound, specialization, options = binder(*arguments, **named)
            key = jit.compute_cache_key({}, specialization, options)
            pack = partial(kernel._pack_args, backend, named, bound, specialization, options)
            launched(Launch(kernel, grid, f"{kernel.fn.__name__} {key}", pack))

        return bind

    on_gpu: dict[str, Any] = {
        "why_not_triton": lambda tensor: None,
        "traceable": lambda kernel: kernel,
        "multiprocessors": lambda device: PROCESSORS,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(jit.JITFunction, "__getitem__", launch))
        for name, module in list(sys.modules.items()):
            if name.startswith("draftsmith."):
                for function, replaced in on_gpu.items():
                    if hasattr(module, function):
                        stack.enter_context(patch.object(module, function, replaced))
        for empty in ("empty", "new_empty", "empty_like"):
            for owner in (torch, torch.Tensor):
                if hasattr(owner, empty):
                    stack.enter_context(patch.object(owner, empty, _zeroed(getattr(owner, empty))))
        yield
