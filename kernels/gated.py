"""The gated activation of an MLP (GLU variants, arXiv 2002.05202 §2):

    out = act(gate + b) · (up + b'),   gate, up = Σ_s gate_up_s

    silu:       act(g) = g · σ(g)
    gelu_tanh:  act(g) = g/2 · (1 + tanh u) = g · σ(2u),   u = √(2/π) · (g + 0.044715 g³)

gate_up may be the partial sums of a product (split-K), which are added up here. All arithmetic is in float32; out is
rounded once.

Shape letters: S partial sums, M rows, F intermediate width.
"""
# ruff: noqa: ANN001, ANN201, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.kernels import cpu
from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton

ACTS = ("silu", "gelu_tanh")
CPU_ACTS = (*ACTS, "gelu")  # in the order of kernels/cpu.cpp; the last is the exact GELU, g/2 · (1 + erf(g / √2))
# transformers' classes, by name: it is not imported here, and renames them. All of them are functions of their input
# alone.
_TRANSFORMERS_ACTS = {
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
}


def act_name(act: Callable[..., Any]) -> str | None:
    """The name in ``CPU_ACTS`` of an activation module or function of PyTorch's or transformers'; None for another."""
    kind = type(act)
    if act is functional.silu or kind is nn.SiLU:
        return "silu"
    if isinstance(act, nn.GELU) and kind is nn.GELU:
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    return _TRANSFORMERS_ACTS.get(kind.__name__) if kind.__module__ == "transformers.activations" else None


def gated_reference(gate_up: Tensor, out: Tensor, act: str, *, bias: Tensor | None = None) -> None:
    """The definition of :func:`gated`."""
    both = gate_up.sum(0, dtype=torch.float32)  # [M, 2F]
    if bias is not None:
        both = both + bias
    gate, up = both.chunk(2, -1)
    gate = functional.silu(gate) if act == "silu" else functional.gelu(gate, approximate="tanh")
    out.copy_(gate * up)


@jit
def activated(gate, ACT: tl.constexpr):
    """The activation of float32 values, by σ without tanh: nothing cancels, and where e^−a is infinite it is 0."""
    argument = gate
    if ACT == "gelu_tanh":
        argument = 1.5957691216057308 * (gate + 0.044715 * (gate * gate * gate))  # 2 √(2/π)
    return gate / (1 + tl.exp(-argument))


@jit
def _gated_kernel(gate_up, out, bias, width, strides, PARTS: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and block of the intermediate width."""
    part_stride, row_stride, out_row = strides
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gate_up += row * row_stride + place
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):  # unrolled: the loads do not wait for one another
        gate += tl.load(gate_up, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(gate_up + width, mask=inside, other=0.0).to(tl.float32)
        gate_up += part_stride
    if bias is not None:
        gate += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + width + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + place, (activated(gate, ACT) * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, out: Tensor, act: str, *, bias: Tensor | None = None) -> None:
    """Write the gated activation to ``out``. The last stride of ``out`` and ``bias`` is 1.

    Args:
        gate_up: ``[S, M, 2F]`` in the dtype of out or float32, the gate first; its parts are added up, and the code
            grows with S.
        out: ``[M, F]`` float32, float16 or bfloat16; it may not overlap ``gate_up``.
        act: "silu" or "gelu_tanh", see :func:`act_name`.
        bias: ``[2F]``, added before the activation.

    Raises:
        ValueError: for another activation.
    """
    if act not in ACTS:
        raise ValueError(f"act is {act!r}, which is none of {', '.join(ACTS)}.")
    if why_not_triton(gate_up):
        if cpu.runs(out) and len(gate_up) == 1 and gate_up.dtype == out.dtype and gate_up.stride(-1) == 1:
            tensors = map(cpu.address, (gate_up, out, bias))
            strides = (gate_up.stride(1), out.stride(0))
            cpu.function("gated", out.dtype)(*tensors, CPU_ACTS.index(act), *out.shape, *strides)
            return
        gated_reference(gate_up, out, act, bias=bias)
        return
    rows, width = out.shape
    assert gate_up.shape[1:] == (rows, 2 * width)
    gate_up = dense(gate_up)
    assert all(one is None or one.stride(-1) == 1 for one in (out, bias))
    # Small blocks, so that even a single row has many programs.
    tile: dict[str, Any] = {"BLOCK": min(next_power(width), 512), "num_warps": 4 if width > 256 else 1}
    tile |= {"PARTS": len(gate_up), "ACT": act}
    strides = (*gate_up.stride()[:2], out.stride(0))
    with torch.cuda.device_of(gate_up):
        _gated_kernel[(rows, -(-width // tile["BLOCK"]))](gate_up, out, bias, width, strides, **tile)
