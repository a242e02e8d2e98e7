"""Medusa as a drafter: all heads read one hidden state and fill a fixed tree of ranks (arXiv 2401.10774 §2.1).

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
from draftsmith.inference.verify.tree import StaticTree, TokenTree, Topology, read_candidates, read_weighed
from draftsmith.kernels.head_topk import MAX_COUNT, head_topk
from draftsmith.kernels.linear import kernel_weight
from draftsmith.models.dflash import DFlashConfig
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.target import Target

HAS_TREE = True


class MedusaDrafter(Drafter):
    """Heads on a target's last hidden state, in a calibrated tree. Deterministic: every draw is one-hot.

    Args:
        acceptances: acceptance probability of each path of the topology, in its order, which its trees then have.

    Raises:
        ValueError: the tree is deeper than there are heads, or asks for a rank beyond the vocabulary.
    """

    static = reuses = True
    reads_own_path = False

    def __init__(
        self, heads: MedusaHeads, topology: Topology, target: Target, acceptances: Sequence[float] | None = None
    ) -> None:
        self.heads, self.target = heads.to(target.device, target.dtype), target
        self.draft_head = heads.draft_head(target.lm_head)
        self.device = target.device
        self.depths = torch.arange(heads.config.num_draft_heads, device=target.device)  # of each head's parents
        check_topology(topology, heads.config)
        self.num_nodes, self.max_depth = topology.num_nodes, topology.max_depth
        self.branching = max(topology.parents.count(node) for node in range(topology.num_nodes))
        weights = None if acceptances is None else [1.0, *acceptances]
        self.tree = StaticTree(topology.parents, self.device, weights)
        self.ranks = topology.max_rank + 1
        # Node i takes candidate [head depth − 1, last rank of its path]; heads the tree does not use are not run.
        flat = [(len(path) - 1) * self.ranks + path[-1] for path in topology.paths]
        self.choice = torch.tensor(flat, dtype=torch.int64, device=self.device)
        self.has_acceptance = weights is not None
        self.acceptance = None if weights is None else torch.tensor([weights], device=self.device)  # [1, N]
        spread = target.spread and heads.draft_vocab is None
        self.shared = heads.projection is None and 0 < self.ranks <= MAX_COUNT and not spread

    def skip(self, state: State) -> None:
        """Nothing: heads keep no state."""

    def propose(self, state: State) -> TokenTree:
        acceptance = None if self.acceptance is None else self.acceptance.expand(len(state.root), -1)
        if not len(self.choice):
            return self.tree.fill(state.root[:, None], acceptance=acceptance)
        if state.noise is not None:
            logits = self.heads.logits(state.feature, self.draft_head, self.max_depth).transpose(0, 1)  # [B, K, S]
            logits = self.target.after_head(logits) if self.target.changes_logits else logits
            depths, ids = self.depths[: self.max_depth], self.heads.draft_vocab
            *_, best = state.noise.best(logits, depths, self.ranks, ids)
            drafts = best.flatten(1).index_select(1, self.choice)
        else:
            best = self._best(state.feature).transpose(0, 1).flatten(1)  # [B, K·R]
            drafts = self.heads.tokens(best.index_select(1, self.choice))  # [B, N − 1]
        tokens = torch.cat([state.root[:, None], drafts], 1)
        return self.tree.fill(tokens, acceptance=acceptance)

    def _best(self, feature: Tensor) -> Tensor:
        """The places of the R most likely tokens of each head: ``[B, d] → [K, B, R]``, 0 … S − 1."""
        # If all heads share a plain matrix, a kernel finds their best tokens without storing the logits.
        weight = kernel_weight(self.draft_head, feature) if self.shared else None
        if weight is None:
            return self.heads.logits(feature, self.draft_head, self.max_depth).topk(self.ranks, -1).indices
        features = self.heads.features(feature, self.max_depth)
        ids = head_topk(features.flatten(0, 1), weight, self.ranks)[1]
        return ids.unflatten(0, features.shape[:2])


def check_topology(topology: Topology, config: MedusaConfig | DFlashConfig, where: str = "") -> None:
    """Raise a ValueError unless drafts at so many depths can fill a tree. ``where`` begins the message."""
    if topology.max_depth > config.num_draft_heads:
        raise ValueError(
            f"{where}the tree is {topology.max_depth} deep, but there are {config.num_draft_heads} draft heads"
        )
    if topology.max_rank >= config.outputs:
        raise ValueError(f"{where}the tree asks for rank {topology.max_rank} of a vocabulary of {config.outputs}")


# ---- the family, as inference/drafters/family.py describes it


def open_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tree: Path | None, merged: bool
) -> Loader:
    """Heads and their tree, checked against each other."""
    assert tree is not None
    # A merge chooses from more nodes than the calibrated tree has.
    topology, acceptances = read_candidates(tree) if merged else read_weighed(tree)
    heads = MedusaHeads.from_artifact(config, weights, str(folder))
    check_topology(topology, heads.config, f"{tree}: ")

    return Loader(lambda target, options: MedusaDrafter(heads, topology, target, acceptances))
