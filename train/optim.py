"""Optimizers of the training loop."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.common.sections import Optim
from draftsmith.models.precision import lacking


class _Muon(torch.optim.Optimizer):
    """Muon (K. Jordan et al., 2024) as PyTorch's, for stacks of matrices ``[..., m, n]`` too, each matrix by itself.

    PyTorch's computes in bfloat16 everywhere, which on a CPU without its instructions takes four to five times as long.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})
        self.dtype = torch.float32 if lacking("bfloat16", params[0].device) else torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            if p.grad is None:
                continue
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            kept = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            update = orthogonalised(p.grad.lerp(kept, group["momentum"]).reshape(-1, *p.shape[-2:]).to(self.dtype))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            # To AdamW's usual size (arXiv 2502.16982 §2.2).
            p.add_(update.view_as(p), alpha=-0.2 * math.sqrt(max(p.shape[-2:])) * group["lr"])


def orthogonalised(x: Tensor) -> Tensor:
    """Of each matrix U S Vᵀ ``[N, m, n]`` about U Vᵀ: five quintic Newton–Schulz iterations, whose coefficients are
    those of K. Jordan et al., so that singular values end between 0.5 and 1.5."""
    a, b, c = 3.4445, -4.7750, 2.0315
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """:class:`_Muon` for matrices, AdamW for the rest, as one optimizer with one state and one learning rate."""

    def __init__(self, groups: list[dict[str, Any]], optim: Optim) -> None:
        matrices, *others = groups
        self.muon = _Muon(**matrices, lr=optim.lr)
        self.adamw = torch.optim.AdamW(others, lr=optim.lr, betas=optim.betas, fused=True)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {"lr": optim.lr})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        # Loading a state gives the groups and the state new objects, so the two are handed them each time.
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()


def make_optimizer(module: nn.Module, optim: Optim) -> torch.optim.Optimizer:
    """The optimizer of a stage over the parameters of ``module`` that train; biases and norms do not decay.

    With ``muon``, AdamW keeps the embeddings (and LM heads tied to them) and what begins with one of the names in the
    module's ``output_layers``, if it has them. Where the module has ``lr_factors``, ``{beginning of a name: factor}``,
    the groups of such parameters carry theirs for the training loop; not with ``muon``.
    """
    if optim.name != "muon":
        groups = _by_factor(module, optim.weight_decay)
        if optim.eight_bit:
            try:
                from bitsandbytes.optim.adamw import AdamW8bit
            except ImportError:
                raise ValueError("optim.eight_bit needs bitsandbytes: pip install bitsandbytes") from None
            return AdamW8bit(groups, lr=optim.lr, betas=optim.betas)
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    plain = [p for name, p in trained.items() if not _decays(name, p)]
    rest = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    rest |= {p for name, p in trained.items() if name.startswith(getattr(module, "output_layers", ()))}
    rest -= {*plain}
    matrices = [p for p in trained.values() if p not in rest.union(plain)]
    return MuonAdamW(
        [
            {"params": matrices, "weight_decay": optim.weight_decay},
            {"params": [p for p in trained.values() if p in rest], "weight_decay": optim.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        optim,
    )


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2 and "bias" not in name.split(".")  # biases may be stacks, too


def _by_factor(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: for each learning-rate factor, what decays and what does not."""
    factors: dict[str, float] = getattr(module, "lr_factors", {})
    found: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            factor = next((value for start, value in factors.items() if name.startswith(start)), 1.0)
            found.setdefault((factor, _decays(name, parameter)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "lr_factor": factor}
        for (factor, decays), parameters in found.items()
    ]
