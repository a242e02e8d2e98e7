"""Medusa as a drafter: all heads read one hidden state and fill a tree, a fixed one of ranks (arXiv 2401.10774 §2.1) or
in each step that of the likeliest paths (:mod:`draftsmith.inference.trees.independent`).

Shape letters: B rows, K heads, R ranks kept per head, N nodes, d hidden width, S draft vocabulary (the target's if
there is none).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafters.family import Loader
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.trees.by_level import DraftHead, level_topk
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import Confidence, IndependentTree, RankTree, check_tree, read_independent
from draftsmith.inference.verify.tree import TokenTree, Topology
from draftsmith.kernels.linear import kernel_weight
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target

HAS_TREE = True


class MedusaDrafter(Drafter):
    """Heads on a target's last hidden state, in a calibrated tree or a dynamic one. Deterministic: every draw is
    one-hot.

    Args:
        tree: of ranks, or the shape of a dynamic tree.
        acceptances: acceptance probability of each path of a fixed tree, in its order, which its trees then have.
        confidence: by which the nodes of a dynamic tree are chosen; the heads' probabilities if left out.

    Raises:
        ValueError: the tree is deeper than there are heads, or asks for a rank beyond the vocabulary.
    """

    static = reuses = True
    reads_own_path = False

    def __init__(
        self,
        heads: MedusaHeads,
        tree: Topology | DynamicShape,
        target: Target,
        acceptances: Sequence[float] | None = None,
        confidence: Confidence | None = None,
    ) -> None:
        self.heads, self.target = heads.to(target.device, target.dtype), target
        self.draft_head = heads.draft_head(target.lm_head)
        self.device = target.device
        self.depths = torch.arange(heads.config.num_draft_heads, device=target.device)  # of each head's parents
        check_tree(tree, heads.config.num_draft_heads, heads.config.outputs)
        if isinstance(tree, DynamicShape):
            self.tree, self.has_acceptance = IndependentTree(tree, self.device, confidence), True
        else:
            self.tree, self.has_acceptance = RankTree(tree, self.device, acceptances), acceptances is not None
        self.num_nodes, self.max_depth, self.ranks, self.branching = self.tree.sizes
        spread = target.spread and heads.draft_vocab is None
        self.shared = heads.projection is None and not spread
        self.head = DraftHead(self._logits, None, heads.config.outputs, heads.draft_vocab, self._by_kernel)

    def skip(self, state: State) -> None:
        """Nothing: heads keep no state."""

    def propose(self, state: State) -> TokenTree:
        depths, noise = self.depths[: self.max_depth], state.noise
        if isinstance(self.tree, IndependentTree):
            log_q, tokens = self.head.best(state.feature, self.ranks, depths, noise)
            return self.tree.grow(state.root, log_q if noise is not None else self.tree.log_acceptance(log_q), tokens)
        if not self.max_depth:
            tokens = state.root[:, None, None]
        elif noise is not None:
            logits, ids = self._logits(state.feature)
            *_, tokens = noise.best(logits, depths, self.ranks, ids)
        else:
            tokens = self.head.best(state.feature, self.ranks, depths, None)[1]
        return self.tree.fill(state.root, tokens)

    def _logits(self, feature: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[B, d] → [B, K, S]``, without a scale or cap of the target's own, as in training."""
        return self.heads.logits(feature, self.draft_head, self.max_depth).transpose(0, 1), self.heads.draft_vocab

    def _by_kernel(self, feature: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """If all heads share a plain matrix, a kernel finds their best tokens without storing the logits."""
        weight = kernel_weight(self.draft_head, feature) if self.shared else None
        if weight is None:
            return None
        features = self.heads.features(feature, self.max_depth).transpose(0, 1)  # [B, K, d]
        return level_topk(features, weight, count, self.heads.draft_vocab)


# ---- the family, as inference/drafters/family.py describes it


def open_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tree: Path | None, merged: bool
) -> Loader:
    """Heads and their tree, checked against each other. A dynamic tree has precedence over a fixed one."""
    assert tree is not None
    given, acceptances, confidence = read_independent(tree, merged)
    heads = MedusaHeads.from_artifact(config, weights, str(folder))
    check_tree(given, heads.config.num_draft_heads, heads.config.outputs, f"{tree}: ")

    return Loader(lambda target, options: MedusaDrafter(heads, given, target, acceptances, confidence))
