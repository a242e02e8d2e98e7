"""Optimizers of the training loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from draftsmith.common.sections import Optim


class _Muon(torch.optim.Muon):
    """PyTorch's Muon, which takes matrices alone, for stacks of them ``[..., m, n]`` too: each matrix by itself."""

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        torch.optim.Optimizer.__init__(self, params, torch.optim.Muon([torch.empty(0, 0)]).defaults)
        self.param_groups[0] |= {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}

    def _init_group(self, group: Any, params: list[Any], grads: list[Any], momenta: list[Any]) -> bool:
        found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        super()._init_group(group, *found)
        for whole, each in zip(found, (params, grads, momenta), strict=True):  # views: the updates are in place
            each.extend(matrix for tensor in whole for matrix in tensor.detach().view(-1, *tensor.shape[-2:]))
        return False


class MuonAdamW(torch.optim.Optimizer):
    """Muon (K. Jordan et al., 2024) for matrices, AdamW for the rest, as one optimizer with one state.

    Muon's updates are scaled to AdamW's usual size (arXiv 2502.16982 §2.2), so one learning rate serves both.
    """

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
