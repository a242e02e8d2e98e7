"""Products of a few rows with a matrix on a CPU, each in the form that is fastest on this machine.

    linear(x, W, b) = x Wᵀ + b

BLAS libraries are made for one row and for many; between them the same product can cost several times more in one form
than in another, by shape, row count, instruction set and threads. So each shape is timed once, when it is met, for row
counts that are powers of two, and the choice is kept in a file for the next process. On a GPU, with gradients, in
``torch.compile`` and above ``MOST`` rows it is ``F.linear``.

Shape letters: M rows, N outputs, K inputs.
"""

import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.train.files import cache_folder, write_json

MOST = 32  # rows; above, the forms differ little
BUDGET = 1.0  # seconds of processor time that a process spends on timing; shapes met later take F.linear
_COUNTS = (1, 2, 4, 8, 16, 32)  # rows that are timed; others take the next one's form
_SAMPLE = 1 << 21  # matrix entries that are timed of a larger matrix
_LAYERS = 32  # matrices of a shape that take turns,
_POOL = 1 << 24  # or fewer: this many entries in all
_GAIN = 0.9  # another form is taken if it needs less than this share of F.linear's time

Form = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(W xᵀ)ᵀ: BLAS then sees the matrix's N as the long side of its output."""
    out = (weight @ x.t()).t().contiguous()
    return out if bias is None else out.add_(bias)


def _doubled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same with every row twice: BLAS may take longer for a matrix times one vector than for two."""
    return _transposed(torch.cat((x, x)), weight, bias)[: len(x)]


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product, which ``F.linear`` does not take for float32; the matrix stays as it is."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


FORMS: dict[str, Form] = {"linear": F.linear, "transposed": _transposed, "doubled": _doubled}
if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    FORMS["onednn"] = _onednn

_chosen: dict[tuple[int, torch.Size, torch.dtype], str] = {}  # by row count as it comes, for speed
_stored: dict[str, str] | None = None  # by _key, as in the file
_spent = 0.0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in this machine's fastest form.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``.
        bias: ``[N]``.

    Returns:
        ``[..., N]``.
    """
    form = choose(x, weight)
    if form == "linear":
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return FORMS[form](x, weight, bias)
    return FORMS[form](x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


def add_linear(total: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """``total += factor · x Wᵀ`` in place, where it can be in one operation. ``total [M, N]``, ``x [M, K]``."""
    form = choose(x, weight)
    if form == "linear":
        return total.addmm_(x, weight.t(), alpha=factor)
    return total.add_(FORMS[form](x, weight, None), alpha=factor)


def apply_linear(module: nn.Module, x: Tensor) -> Tensor:
    """``module(x)``, by :func:`linear` if it is a plain ``nn.Linear``: no subclass, no hooks (offloading, ZeRO-3)."""
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:  # its weight may be divided
        return module(x)
    if "forward" in module.__dict__ or torch.is_autocast_enabled("cpu"):
        return module(x)
    if module._forward_pre_hooks or module._forward_hooks:
        return module(x)
    return linear(x, module.weight, module.bias)


def choose(x: Tensor, weight: Tensor) -> str:
    """The name in ``FORMS`` of the form that :func:`linear` takes for these."""
    if not weight.is_cpu or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return "linear"
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= MOST:
        return "linear"
    shape = weight.shape
    form = _chosen.get((rows, shape, weight.dtype))
    if form is None:
        form = _chosen[rows, shape, weight.dtype] = _look_up(1 << (rows - 1).bit_length(), weight)
    return form


def _look_up(rows: int, weight: Tensor) -> str:
    """The form for ``rows``, a power of two: known, or measured now while the budget lasts."""
    global _stored
    if _stored is None:
        _stored = _read()
    form = _stored.get(_key(rows, weight), "")
    if form not in FORMS:
        if _spent >= BUDGET:
            return "linear"
        found = {_key(count, weight): its for count, its in _measure(weight).items()}
        _stored.update(found)
        _write(found)
        form = _stored[_key(rows, weight)]
    return form


def _key(rows: int, weight: Tensor) -> str:
    return f"{rows} x {tuple(weight.shape)} {str(weight.dtype).removeprefix('torch.')}"


def _measure(weight: Tensor) -> dict[int, str]:
    """The fastest form for each row count. Forms take turns, each time on another matrix, as in a model of many layers:
    one that stays in the cache says little. This thread's time is taken, and the shortest counts: what else runs on
    the machine only ever adds to it."""
    global _spent
    begun = time.thread_time()
    shape = (max(1, min(weight.shape[0], _SAMPLE // weight.shape[1])), weight.shape[1])
    size = shape[0] * shape[1]
    pool = torch.ones(min(_LAYERS, max(1, _POOL // size)), *shape, dtype=weight.dtype)
    fastest: dict[int, str] = {}
    used = 0
    for rows in _COUNTS:
        x, since = pool.new_ones(rows, shape[1]), time.thread_time()
        best = dict.fromkeys(FORMS, float("inf"))
        for turn in range(12):
            for name, form in FORMS.items():
                used += 1
                start = time.thread_time()
                try:
                    form(x, pool[used % len(pool)], None)
                except RuntimeError:  # oneDNN has no product of this dtype on this machine
                    continue
                if turn:  # the first one pays for what is set up once
                    best[name] = min(best[name], time.thread_time() - start)
            if turn >= 3 and time.thread_time() - since > 0.02:
                break
        name = min(best, key=lambda name: best[name])
        fastest[rows] = name if best[name] < _GAIN * best["linear"] else "linear"
    _spent += time.thread_time() - begun
    return fastest


def _file() -> Path:
    return cache_folder() / "linear.json"


def _machine() -> str:
    """What the choices depend on besides the shape."""
    cpu = [platform.machine()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        parts = dict(line.split(":", 1) for line in lines if ":" in line)
        parts = {name.strip(): value.strip() for name, value in parts.items()}
        cpu = [parts.get(name, "?") for name in ("model name", "cpu family", "model")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{'/'.join(cpu)} {capability}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def _everything() -> dict[str, Any]:
    """The file's content: machine → shape → form. A file that is missing or damaged is begun anew."""
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home folder
        content = json.loads(_file().read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _read() -> dict[str, str]:
    known = _everything().get(_machine())
    return {str(key): str(form) for key, form in known.items()} if isinstance(known, dict) else {}


def _write(found: dict[str, str]) -> None:
    with suppress(OSError, RuntimeError):  # nowhere to keep it: the next process measures again
        _file().parent.mkdir(parents=True, exist_ok=True)
        content = _everything()
        known = content.get(_machine())
        content[_machine()] = {**(known if isinstance(known, dict) else {}), **found}
        write_json(_file(), content)
