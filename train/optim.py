"""Optimizers of the training loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from draftsmith.common.sections import Optim


class MuonAdamW(torch.optim.Optimizer):
    """Muon (K. Jordan et al., 2024) for matrices, AdamW for the rest, as one optimizer with one state.

    Muon's updates are scaled to AdamW's usual size (arXiv 2502.16982 §2.2), so one learning rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: Optim) -> None:
        matrices, *others = groups
        self.muon = torch.optim.Muon(**matrices, lr=optim.lr, adjust_lr_fn="match_rms_adamw")
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

    With ``muon``, embeddings (and LM heads tied to them) are left to AdamW. Where the module has ``lr_factors``,
    ``{beginning of a name: factor}``, the groups of such parameters carry theirs for the training loop.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    plain = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
    if optim.name != "muon":
        groups = _by_factor(module, optim.weight_decay)
        if optim.eight_bit:
            try:
                from bitsandbytes.optim.adamw import AdamW8bit
            except ImportError:
                raise ValueError("optim.eight_bit needs bitsandbytes: pip install bitsandbytes") from None
            return AdamW8bit(groups, lr=optim.lr, betas=optim.betas)
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)
    embeddings = {p for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    matrices = [p for p in trained if p.ndim == 2 and p not in embeddings]
    rest = [p for p in trained if p.ndim > 2 or p in embeddings]
    return MuonAdamW(
        [
            {"params": matrices, "weight_decay": optim.weight_decay},
            {"params": rest, "weight_decay": optim.weight_decay},
            plain,
        ],
        optim,
    )


def _by_factor(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: for each learning-rate factor, what decays and what does not."""
    factors: dict[str, float] = getattr(module, "lr_factors", {})
    found: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            factor = next((value for start, value in factors.items() if name.startswith(start)), 1.0)
            found.setdefault((factor, parameter.ndim >= 2), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "lr_factor": factor}
        for (factor, decays), parameters in found.items()
    ]
