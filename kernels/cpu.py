"""Products, and what stands between them in a decoder layer, for a few rows on a CPU: kernels/cpu.cpp and the files in
kernels/cpu/, compiled at first use.

Each row is computed by itself, in an order that does not depend on other rows or on where its keys lie: see there. The
library is built by the machine's C++ compiler in about two seconds, and kept in the cache folder. Without a compiler,
and for other dtypes than float32 and bfloat16, public functions of this folder take PyTorch's operations.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.common.command import cpu_facts
from draftsmith.common.files import cache_folder

_SOURCE = Path(__file__).with_suffix(".cpp")
_SOURCES = [_SOURCE, *sorted(_SOURCE.with_suffix("").glob("*.h"))]
_SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_LONG, _FLOAT, _POINTER = ctypes.c_long, ctypes.c_float, ctypes.c_void_p


class LayerArguments(ctypes.Structure):
    """A decoder layer's addresses, settings and strides, in the order of kernels/cpu/layers.h."""

    _fields_ = [
        *((name, _POINTER) for name in (
            "qkv", "qkv_bias", "out", "out_bias", "gate_up", "gate_up_bias", "down", "down_bias", "before_attention",
            "qk_norm", "after_attention", "before_mlp", "after_mlp", "before_attention_bias", "before_mlp_bias",
        )),
        *((name, ctypes.c_double) for name in (
            "attention_eps", "qk_eps", "after_attention_eps", "mlp_eps", "after_mlp_eps", "scale", "softcap", "factor",
        )),
        *((name, _LONG) for name in (
            "heads", "kv_heads", "width", "mlp", "window", "act", "gated", "parallel", "interleaved", "rotated",
        )),
        *((name, _POINTER) for name in ("table", "cache", "captured")),
        *((name, _LONG) for name in ("table_row", "cache_batch", "cache_slot", "cache_kind", "cache_head")),
    ]  # fmt: skip


class PassArguments(ctypes.Structure):
    """The sizes and strides of a forward pass, in the order of kernels/cpu/layers.h."""

    _fields_ = [
        *((name, _LONG) for name in ("rows", "queries", "tree_keys", "hidden", "inputs", "layers")),
        *((name, _LONG) for name in ("positions_batch", "positions_node", "slots_batch", "slots_node")),
        *((name, _LONG) for name in ("ancestors_batch", "ancestors_query", "depth_batch", "key_depth_batch")),
        ("norm_eps", ctypes.c_double),
    ]


_ARGUMENTS: dict[str, list[Any]] = {
    "add_norm": [*[_POINTER] * 4, _FLOAT, _FLOAT, _POINTER, _FLOAT, _POINTER, *[_LONG] * 5],
    "gated": [*[_POINTER] * 3, *[_LONG] * 5],
    "rotate_write": [*[_POINTER] * 8, _FLOAT, *[_LONG] * 16],
    "attend": [*[_POINTER] * 9, _FLOAT, _FLOAT],
    "product": [_POINTER, _LONG, *[_POINTER] * 3, *[_LONG] * 4],
    "coupled": [_POINTER, *[_LONG] * 3, _POINTER, _LONG, *[_POINTER] * 6, _LONG, *[_POINTER] * 3],
    "decoder_layers": [ctypes.POINTER(LayerArguments), ctypes.POINTER(PassArguments), *[_POINTER] * 11],
}


def runs(tensor: Tensor) -> bool:
    """Whether these functions compute on a tensor: on a CPU with a compiler, in float32 or bfloat16, outside of
    ``torch.compile`` and where no gradient is asked for."""
    return (
        tensor.is_cpu
        and tensor.dtype in _SUFFIX
        and not torch.compiler.is_compiling()
        and not tensor.requires_grad
        and library() is not None
    )


@cache
def function(name: str, dtype: torch.dtype) -> Any:
    """A function of the library, by ctypes."""
    found = getattr(library(), f"{name}_{_SUFFIX[dtype]}")
    found.argtypes, found.restype = _ARGUMENTS[name], None
    return found


def address(tensor: Tensor | None) -> int | None:
    """What a function takes for a tensor."""
    return None if tensor is None else tensor.data_ptr()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x weightᵀ + bias``: ``x [M, K]``, ``weight [N, K]``, ``bias [N]`` of one dtype → ``[M, N]``."""
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    out = x.new_empty(len(x), len(weight))
    tensors = (weight.data_ptr(), address(bias), out.data_ptr())
    function("product", x.dtype)(x.data_ptr(), x.stride(0), *tensors, out.stride(0), *x.shape, len(weight))
    return out


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where there is no compiler, or it fails."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if not compiler or os.environ.get("DRAFTSMITH_CPU_KERNELS") == "0":
        return None
    command = [*shlex.split(compiler), "-std=c++17", "-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
    for options in (["-fopenmp"], []):  # without OpenMP on one thread
        with suppress(OSError, subprocess.SubprocessError):
            try:
                return ctypes.CDLL(str(_build([*command, *options], cache_folder())))
            except (OSError, RuntimeError):  # it cannot be written, libraries in it cannot be run, or there is no home
                with tempfile.TemporaryDirectory() as folder:
                    return ctypes.CDLL(str(_build([*command, *options], Path(folder))))
    return None


def _build(command: list[str], folder: Path) -> Path:
    """The file of the library in a folder, compiled where it is missing. PyTorch's own OpenMP threads run it if both
    are GCC's: they have been loaded under the name that the library asks for."""
    facts = cpu_facts()  # a cache folder may be shared by several machines
    cpu = platform.machine() + "".join(facts.get(name, "") for name in ("model name", "flags", "Features"))
    sources = b"".join(file.read_bytes() for file in _SOURCES)
    key = hashlib.sha256("\n".join([cpu, *command]).encode() + sources).hexdigest()[:16]
    file = folder / f"cpu-{key}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as new:
            made = Path(new) / file.name
            subprocess.run([*command, str(_SOURCE), "-o", str(made)], check=True, capture_output=True, timeout=120)
            made.replace(file)
    return file
