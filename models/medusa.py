"""Medusa heads (arXiv 2401.10774 §2.1): head k reads the target's last hidden state h_t and predicts x_{t+k+1}.

    head_k(h) = projection_k( ResBlock_L(… ResBlock_1(h)) ),   ResBlock(x) = x + SiLU(W x + b)

W and b are initialised to zero and the projection to the target's LM head, so an untrained head equals the LM head.
With a draft vocabulary (:mod:`draftsmith.models.vocabulary`) a head chooses among S tokens: its output i is token
``draft_vocab[i]``, and its projection has the LM head's rows of these tokens.

Shape letters: K draft heads, L layers per head, P positions, d hidden width, V vocabulary, S draft vocabulary (V if
there is none).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from draftsmith.kernels.linear import apply_linear, choose, linear
from draftsmith.kernels.res_block import res_block
from draftsmith.models.artifact import with_weights
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import WithDraftVocabulary, check_projection, check_size, check_whole


@dataclass(frozen=True)
class MedusaConfig:
    """The shape of a set of heads. ``projection``: an S × d matrix per head (own), or the target's LM head (shared).
    ``draft_vocab_size``: S; None: all of V."""

    num_draft_heads: int
    num_layers: int
    projection: Literal["own", "shared"]
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, ("num_draft_heads", "num_layers", "hidden_size", "vocab_size"))
        check_projection(self.projection)
        check_size(self.draft_vocab_size, self.vocab_size)

    @property
    def outputs(self) -> int:
        """S: the number of tokens that a head chooses from."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class MedusaHeads(WithDraftVocabulary):
    """All K heads, with stacked weights, so that one batched product computes all of them.

    Parameters: ``weight [L, K, d, d]`` and ``bias [L, K, 1, d]`` (x @ weight + bias), and for ``own`` projections
    ``projection [K, S, d]``. Buffer: ``draft_vocab [S]`` int64, ascending ids of the target, or None.
    """

    def __init__(self, config: MedusaConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config)
        self.config = config
        k, layers, d = config.num_draft_heads, config.num_layers, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(layers, k, d, d, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(layers, k, 1, d, dtype=dtype))
        self.projection: nn.Parameter | None = None
        if config.projection == "own":
            self.projection = nn.Parameter(torch.empty(k, config.outputs, d, dtype=dtype))

    @classmethod
    def for_target(
        cls,
        target: Target,
        num_draft_heads: int,
        num_layers: int,
        projection: Literal["own", "shared"],
        draft_vocab_size: int | None = None,
    ) -> "MedusaHeads":
        """Untrained heads for a target: each equals its LM head. A draft vocabulary is the first ids, until
        :meth:`draft_from` is called.
        Raises ValueError: the LM head has a bias, which a head's own projection lacks; or the draft vocabulary is
        larger than the target's."""
        if projection == "own" and getattr(target.lm_head, "bias", None) is not None:
            raise ValueError(f"target '{target.name}': its LM head has a bias; use drafter.projection=shared")
        width, vocab_size = target.hidden_size, target.vocab_size
        config = MedusaConfig(num_draft_heads, num_layers, projection, width, vocab_size, draft_vocab_size)
        heads = cls(config).to(target.device)
        heads._start_head(target)
        return heads

    @torch.no_grad()
    def _start_head(self, target: Target) -> None:
        """Give each head's own projection the LM head's rows."""
        if self.projection is not None:
            weight = cast(nn.Linear, target.lm_head).weight
            rows = weight if self.draft_vocab is None else weight[self.draft_vocab]
            self.projection.copy_(rows.float().expand_as(self.projection))

    @classmethod
    def from_artifact(cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], where: str) -> "MedusaHeads":
        """Heads from a drafter folder's config and weights; raises as :func:`with_weights`."""

        def make() -> MedusaHeads:
            fields = {name: config[name] for name in MedusaConfig.__dataclass_fields__ if name != "draft_vocab_size"}
            return cls(MedusaConfig(**fields, draft_vocab_size=config.get("draft_vocab_size")))  # older ones have none

        return with_weights(make, weights, where, "heads of this size fit into no memory", list_all=True)

    def features(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """The ResBlocks of the first ``heads`` heads (all if left out): ``[P, d] → [K, P, d]``."""
        x = hidden.expand(self.config.num_draft_heads if heads is None else heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            x = res_block(x, weight[:heads], bias[:heads])
        return x

    def projections(self, lm_head: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
        """Each head's matrix ``[S, d]`` and bias ``[S]``, from the target's LM head. One ``unbind`` serves all heads,
        so that its gradient is one tensor; indexing would make a tensor of that size per head."""
        if self.projection is None:
            shared = cast(nn.Linear, lm_head)
            weight, bias = shared.weight, shared.bias
            if self.draft_vocab is not None:
                weight, bias = weight[self.draft_vocab], None if bias is None else bias[self.draft_vocab]
            return [(weight, bias)] * self.config.num_draft_heads
        return [(matrix, None) for matrix in self.projection.unbind(0)]

    def draft_head(self, lm_head: nn.Module) -> nn.Module:
        """That of a shared projection, which :meth:`head_logits` and :meth:`logits` take; the LM head of own ones."""
        return super().draft_head(lm_head) if self.projection is None else lm_head

    def head_logits(self, head: int, feature: Tensor, draft_head: nn.Module) -> Tensor:
        """The logits of one head from its feature: ``[P, d] → [P, S]``. ``draft_head``: :meth:`draft_head`'s."""
        return self._shared(feature, draft_head) if self.projection is None else linear(feature, self.projection[head])

    def logits(self, hidden: Tensor, draft_head: nn.Module, heads: int | None = None) -> Tensor:
        """The logits of the first ``heads`` heads (all if left out): ``[P, d] → [K, P, S]``. ``draft_head``:
        :meth:`draft_head`'s."""
        features = self.features(hidden, heads)
        if self.projection is None:
            return self._shared(features, draft_head)
        own = self.projection[: len(features)]
        if len(own) and choose(features.shape[1], own[0].t()) != "blas":  # separate products are faster on this machine
            return torch.stack([linear(*pair) for pair in zip(features, own, strict=True)])
        return features @ own.transpose(1, 2)

    def _shared(self, features: Tensor, draft_head: nn.Module) -> Tensor:
        """The shared projection, in the LM head's dtype (heads train in float32 with a bfloat16 target) and on its
        device (a spread target's may be another one)."""
        logits = apply_linear(draft_head, features.to(next(draft_head.parameters()).dtype)).to(features.device)
        assert logits.shape[-1] == self.config.outputs, "these are the LM head's logits; draft_head takes its rows"
        return logits
