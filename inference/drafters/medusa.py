"""Medusa as a drafter: all heads read one hidden state and fill a fixed tree of ranks (arXiv 2401.10774 §2.1).

Shape letters: B rows, K heads, R ranks kept per head, N nodes, d hidden width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from draftsmith.inference.step import Drafter, State
from draftsmith.inference.tree import StaticTree, TokenTree, Topology
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.head_topk import MOST, head_topk
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target


class MedusaDrafter(Drafter):
    """Heads on a target's last hidden state, in a calibrated tree. Deterministic: every draw is one-hot.

    Args:
        chances: that each path of the topology is accepted, in its order; a merge chooses nodes by them.

    Raises:
        ValueError: the tree is deeper than there are heads, or asks for a rank beyond the vocabulary.
    """

    static = True

    def __init__(
        self, heads: MedusaHeads, topology: Topology, target: Target, chances: Sequence[float] | None = None
    ) -> None:
        config = heads.config
        if topology.max_depth > config.num_draft_heads:
            raise ValueError(
                f"the tree is {topology.max_depth} deep, but there are {config.num_draft_heads} draft heads"
            )
        if topology.max_rank >= config.vocab_size:
            raise ValueError(f"the tree asks for rank {topology.max_rank} of a vocabulary of {config.vocab_size}")
        self.heads = heads.to(target.device, target.dtype)
        self.lm_head = target.lm_head
        self.num_nodes, self.max_depth = topology.num_nodes, topology.max_depth
        self.tree = StaticTree(topology.parents, target.device)
        self.branching = max(topology.parents.count(node) for node in range(topology.num_nodes))
        self.chance = None if chances is None else torch.tensor([[1.0, *chances]], device=target.device)  # [1, N]
        self.ranks = topology.max_rank + 1
        # Node i takes candidate [head depth − 1, last rank of its path]; heads the tree does not use are not run.
        flat = [(len(path) - 1) * self.ranks + path[-1] for path in topology.paths]
        self.choice = torch.tensor(flat, dtype=torch.int64, device=target.device)
        # Where all heads share a plain matrix, a kernel finds their best tokens without writing their logits.
        self.one_matrix: Tensor | None = None
        lm_head = target.lm_head
        plain = type(lm_head) is torch.nn.Linear and lm_head.bias is None and not target.spread
        if plain and heads.projection is None and 0 < self.ranks <= MOST and why_not_triton(self.choice) is None:
            self.one_matrix = cast(Tensor, lm_head.weight)

    def propose(self, state: State) -> TokenTree:
        best = self._best(state.feature).transpose(0, 1).flatten(1)  # [B, K·R]
        tree = self.tree.fill(torch.cat([state.root[:, None], best.index_select(1, self.choice)], 1))
        return tree if self.chance is None else replace(tree, chance=self.chance.expand_as(tree.tokens))

    def _best(self, feature: Tensor) -> Tensor:
        """The R most likely tokens of each head: ``[B, d] → [K, B, R]``."""
        if self.one_matrix is None:
            return self.heads.logits(feature, self.lm_head, self.max_depth).topk(self.ranks, -1).indices
        features = self.heads.features(feature, self.max_depth)
        ids = head_topk(features.flatten(0, 1), self.one_matrix, self.ranks)[1]
        return ids.unflatten(0, features.shape[:2])
