"""Precision by the hardware: dtypes that a device computes natively, the choice for ``auto``, and the line about it.

``precision.autocast: auto`` is bfloat16 where the device has it in hardware, else none. ``dtype: auto`` is the dtype
that the target is stored in on a GPU. On a CPU it is float32, except for decoding, that of distillation too, with
weights stored in bfloat16 that exceed its caches, where the CPU has bfloat16 instructions: a step reads all weights
from memory (SmolLM2 takes 28 ms in bfloat16 and 47 in float32 on one core of an Intel Xeon). torch is imported only
where a device is queried.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from draftsmith.common.command import cpu_facts

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
# A CPU's instruction sets for products in a dtype, by the names that Linux and torch have for them (x86, ARM).
_INSTRUCTIONS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp", "fp16_arith"},
}
# Environment variables that keep PyTorch, oneDNN or MKL below these instructions although the CPU has them.
_CEILINGS = {
    "ATEN_CPU_CAPABILITY": {"DEFAULT", "AVX2"},
    "ONEDNN_MAX_CPU_ISA": {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"},
    "MKL_ENABLE_INSTRUCTIONS": {"SSE4_2", "AVX", "AVX2", "AVX2_E1", "AVX512", "AVX512_E1", "AVX512_E2"},
}
_LARGE = 100 << 20  # bytes of weights that no processor's second-level cache holds
_REQUESTED = "as requested"
_BEGAN = "as this run began"


class Choice(NamedTuple):
    """A chosen value, and the reason in a few words."""

    value: str
    why: str


def _cpu_instructions() -> set[str]:
    """The instruction sets of this CPU, by the names that Linux and torch have for them."""
    import torch

    facts = cpu_facts()
    flags = facts.get("flags") or facts.get("Features") or ""  # x86, ARM
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # newer versions of torch have it
    return {*flags.split(), *(name for name, available in capabilities.items() if available is True)}


def lacking(dtype: str, device: "str | torch.device") -> str:
    """The reason why products in this dtype are emulated on a device; empty if it has them in hardware: bfloat16 on a
    GPU from compute capability 8.0 on, and on a CPU with AVX-512 BF16, AMX or ARM's BF16, that no environment variable
    hides from PyTorch and its libraries."""
    import torch

    device = torch.device(device)
    if dtype == "float32":
        return ""
    if device.type == "cpu":
        if not _INSTRUCTIONS[dtype] & _cpu_instructions():
            return f"this CPU has no {dtype} instructions"
        for name, low in _CEILINGS.items():
            if (value := os.environ.get(name, "")).upper() in low:
                return f"{name}={value} hides this CPU's {dtype} instructions"
        return ""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "" if dtype == "float16" or major >= 8 else f"this GPU ({major}.{minor}) has no {dtype} in hardware"
    return "" if dtype == "float16" else f"{dtype} is not used here ({device.type})"


def choose_autocast(requested: str, device: "str | torch.device", began: str | None = None) -> Choice:
    """Choose the autocast of training: ``none`` or ``bfloat16``.
    ``requested``: one of them, or ``auto``.
    ``began``: the choice with which a resumed run began, which ``auto`` keeps."""
    if requested != "auto":
        return Choice(requested, _REQUESTED)
    if began:
        return Choice(began, _BEGAN)
    if why := lacking("bfloat16", device):
        return Choice("none", why)
    return Choice("bfloat16", "in hardware here")


def choose_dtype(
    requested: str,
    device: "str | torch.device",
    stored: Callable[[], str],
    *,
    quantized: bool = False,
    began: str | None = None,
    weights: int = 0,
) -> Choice:
    """Choose one of :data:`DTYPES` for a target's weights.

    Args:
        requested: one of them, or ``auto``.
        stored: returns the dtype that the target is stored in; called only where it is needed.
        quantized: its linear layers are quantised; the dtype is that of their products and of the other weights.
        began: the choice with which a resumed run began, which ``auto`` keeps.
        weights: bytes of the stored weights, if the target decodes, as for distillation; 0 if it trains a drafter.
    """
    import torch

    if requested != "auto":
        return Choice(requested, _REQUESTED)
    if began:
        return Choice(began, _BEGAN)
    missing, on_cpu = lacking("bfloat16", device), torch.device(device).type == "cpu"
    if on_cpu:
        in_half = weights >= _LARGE and not quantized and not missing and stored() == "bfloat16"
        other = "the default on a CPU but for 100 MB and more stored in bfloat16, not quantised"
        why = missing or (other if weights else "the default of training on a CPU")
        return Choice("bfloat16", "as it is stored") if in_half else Choice("float32", why)
    if quantized:
        return Choice("float16", missing) if missing else Choice("bfloat16", "for what is not quantised")
    stored_in = stored()
    if stored_in == "bfloat16" and missing:
        return Choice("float32", f"it is stored in bfloat16, and {missing}; float16 takes half the memory")
    if stored_in in DTYPES:
        return Choice(stored_in, "as it is stored")
    return Choice("float32" if missing else "bfloat16", f"it is stored in {stored_in}")


def describe(device: "str | torch.device", dtype: Choice, autocast: Choice | None = None) -> list[str]:
    """The line about the chosen precision and the reasons; and a warning, if it is emulated on this device.
    ``autocast``: of training; None if nothing is trained."""
    weights = f"{dtype.value} weights"
    if autocast is None:
        lines = [f"precision: {weights} ({dtype.why})"]
    else:
        cast = "no autocast" if autocast.value == "none" else f"{autocast.value} autocast"
        between = ", " if dtype.why in ("", autocast.why) else f" ({dtype.why}), "
        lines = [f"precision: {weights}{between}{cast} ({autocast.why})"]
    slow = {weights: lacking(dtype.value, device)}
    if autocast and autocast.value != "none":
        slow[f"{autocast.value} autocast"] = lacking(autocast.value, device)
    if emulated := " and ".join(what for what, why in slow.items() if why):
        why = next(why for why in slow.values() if why)
        lines.append(f"warning: {emulated} can be many times slower than float32 here: {why}")
    return lines


def say(line: str) -> None:
    """Print a line on stderr; stdout is for a command's result."""
    print(line, file=sys.stderr, flush=True)


def matmul_rate(device: "torch.device", dtype: "torch.dtype", seconds: float = 0.4) -> float:
    """Floating-point operations per second of matrix products on this device: the best of those that fit into
    ``seconds``. Their size grows until it is large, or the next product would take longer than the remaining time."""
    import torch

    largest = 8192 if device.type == "cuda" else 2048
    ends = time.perf_counter() + seconds
    best, size, warm = 0.0, 64, False
    a = b = torch.empty(0)
    while True:
        if len(a) != size:
            a, b = torch.randn(2, size, size, device=device).to(dtype)
        began = time.perf_counter()
        float((a @ b)[0, 0])  # waits for the device
        now = time.perf_counter()
        if not warm:  # the first product starts threads and compiles
            warm = True
            continue
        best = max(best, 2 * size**3 / (now - began))
        # The next product is eight times the work, with new matrices.
        if size < largest and now + 10 * (now - began) < ends:
            size *= 2
        elif now + (now - began) > ends:
            return best
