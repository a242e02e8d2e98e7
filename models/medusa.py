"""Medusa heads (arXiv 2401.10774 §2.1): head k reads the target's last hidden state h_t and predicts x_{t+k+1}.

    head_k(h) = projection_k( ResBlock_L(… ResBlock_1(h)) ),   ResBlock(x) = x + SiLU(W x + b)

W and b are initialised to zero and the projection to the target's LM head, so an untrained head equals the LM head.

Shape letters: K draft heads, L layers per head, P positions, d hidden width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.kernels.linear import apply_linear, choose, linear
from draftsmith.models.target import Target


@dataclass(frozen=True)
class MedusaConfig:
    """The shape of a set of heads. ``projection``: a V × d matrix per head (own), or the target's LM head (shared)."""

    num_draft_heads: int
    num_layers: int
    projection: Literal["own", "shared"]
    hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("num_draft_heads", "num_layers", "hidden_size", "vocab_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"field '{name}' is {value!r}; it has to be a whole number above 0")
        if not isinstance(self.projection, str) or self.projection not in ("own", "shared"):
            raise ValueError(f"field 'projection' is {self.projection!r}; it has to be 'own' or 'shared'")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _project(features: Tensor, lm_head: nn.Module) -> Tensor:
    """The shared projection, in the LM head's dtype (heads train in float32 beside a bfloat16 target) and on its device
    (a spread target's may be another one)."""
    return apply_linear(lm_head, features.to(next(lm_head.parameters()).dtype)).to(features.device)


class MedusaHeads(nn.Module):
    """All K heads, with stacked weights, so that one batched product computes all of them.

    Parameters: ``weight [L, K, d, d]`` and ``bias [L, K, 1, d]`` (x @ weight + bias), and for ``own`` projections
    ``projection [K, V, d]``.
    """

    def __init__(self, config: MedusaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        k, layers, d = config.num_draft_heads, config.num_layers, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(layers, k, d, d, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(layers, k, 1, d, dtype=dtype))
        self.projection: nn.Parameter | None = None
        if config.projection == "own":
            self.projection = nn.Parameter(torch.empty(k, config.vocab_size, d, dtype=dtype))

    @classmethod
    def for_target(
        cls, target: Target, num_draft_heads: int, num_layers: int, projection: Literal["own", "shared"]
    ) -> "MedusaHeads":
        """Untrained heads for a target: each equals its LM head.

        Raises:
            ValueError: the LM head has a bias, which a head's own projection lacks.
        """
        if projection == "own" and getattr(target.lm_head, "bias", None) is not None:
            raise ValueError(f"target '{target.name}': its LM head has a bias; use drafter.projection=shared")
        config = MedusaConfig(num_draft_heads, num_layers, projection, target.hidden_size, target.vocab_size)
        heads = cls(config).to(target.device)
        if heads.projection is not None:
            with torch.no_grad():
                weight = cast(nn.Linear, target.lm_head).weight
                heads.projection.copy_(weight.float().expand_as(heads.projection))
        return heads

    @classmethod
    def from_artifact(cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], where: str) -> "MedusaHeads":
        """Heads from a drafter folder's config and weights.

        Raises:
            ValueError: a key is missing, unknown or of another shape.
        """
        try:
            shape = MedusaConfig(**{name: config[name] for name in MedusaConfig.__dataclass_fields__})
            with torch.device("meta"):  # no memory is allocated before the shapes are checked against the file
                promised = cls(shape).state_dict()
        except KeyError as missing:
            raise ValueError(f"{where}/config.json: field {missing} is missing") from None
        except ValueError as wrong:
            raise ValueError(f"{where}/config.json: {wrong}") from None
        except (RuntimeError, TypeError):
            raise ValueError(f"{where}/config.json: heads of this size fit into no memory; fetch it again") from None
        expected = {name: tuple(p.shape) for name, p in promised.items()}
        stored = {name: tuple(w.shape) for name, w in weights.items()}
        if expected != stored:
            raise ValueError(f"{where}/model.safetensors: its tensors are {stored}, config.json promises {expected}")
        heads = cls(shape)
        heads.load_state_dict(dict(weights))
        return heads.eval().requires_grad_(False)

    def features(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """The ResBlocks of the first ``heads`` heads (all if left out): ``[P, d] → [K, P, d]``."""
        x = hidden.expand(self.config.num_draft_heads if heads is None else heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:heads], x, weight[:heads]))
        return x

    def projections(self, lm_head: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
        """Each head's matrix ``[V, d]`` and bias ``[V]``. One ``unbind`` serves all heads, so that its gradient is one
        tensor; indexing would make a tensor of that size per head."""
        if self.projection is None:
            shared = cast(nn.Linear, lm_head)
            return [(shared.weight, shared.bias)] * self.config.num_draft_heads
        return [(matrix, None) for matrix in self.projection.unbind(0)]

    def head_logits(self, head: int, feature: Tensor, lm_head: nn.Module) -> Tensor:
        """The logits of one head from its feature: ``[P, d] → [P, V]``."""
        return _project(feature, lm_head) if self.projection is None else linear(feature, self.projection[head])

    def logits(self, hidden: Tensor, lm_head: nn.Module, heads: int | None = None) -> Tensor:
        """The logits of the first ``heads`` heads (all if left out): ``[P, d] → [K, P, V]``."""
        features = self.features(hidden, heads)
        if self.projection is None:
            return _project(features, lm_head)
        own = self.projection[: len(features)]
        if len(own) and choose(features.shape[1], own[0].t()) != "blas":  # separate products are faster on this machine
            return torch.stack([linear(*pair) for pair in zip(features, own, strict=True)])
        return features @ own.transpose(1, 2)
