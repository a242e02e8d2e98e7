"""P-EAGLE as a drafter (arXiv 2602.01469): EAGLE-3 that drafts all depths of a tree in one pass.

Behind the root's pair the layer runs a mask pair for each further depth, all in one causal pass. What they hold does
not depend on drafted tokens, so the depths are independent and a tree needs no further pass
(:mod:`draftsmith.inference.trees.independent`). The next step's pairs overwrite the K/V of the mask pairs.

Shape letters are those of :mod:`draftsmith.inference.drafters.eagle`; D depth, R ranks.
"""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.inference.drafters.compressed import Selector
from draftsmith.inference.drafters.eagle import EagleDrafter, check_context
from draftsmith.inference.drafters.family import Loader
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.trees.by_level import DrawKind, chain_passes
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import Confidence, IndependentTree, RankTree, check_tree, read_independent
from draftsmith.inference.verify.tree import TokenTree, Topology, product
from draftsmith.models.eagle import Eagle
from draftsmith.models.target import Target


class ParallelEagleDrafter(EagleDrafter):
    """A P-EAGLE drafter for a target. Deterministic: every draw is one-hot.

    Args:
        tree: an expansion, k_i children of every node at depth i − 1; a tree of ranks; or the shape of a dynamic tree.
        acceptances: acceptance probability of each path of a fixed tree, in its order, which its trees then have.
        confidence: by which the nodes of a dynamic tree are chosen; the drafter's probabilities if left out.

    Raises:
        ValueError: as :class:`EagleDrafter`; the tree is deeper than the drafter drafts in one pass.
    """

    def __init__(
        self,
        eagle: Eagle,
        target: Target,
        tree: Sequence[int] | Topology | DynamicShape,
        acceptances: Sequence[float] | None = None,
        confidence: Confidence | None = None,
    ) -> None:
        self.acceptances, self.confidence = acceptances, confidence
        super().__init__(eagle, target, tree)

    def _take(self, tree: Sequence[int] | Topology | DynamicShape, draws: DrawKind, selector: Selector | None) -> None:
        if selector is not None:
            raise ValueError("a drafter of one pass keeps all pairs of a text; leave the selector out")
        self.selector, self.reuses = None, True
        self._take_head()
        self.shape, self.random = None, False
        given = tree if isinstance(tree, Topology | DynamicShape) else product(tree)
        _check(given, self.eagle)
        if isinstance(given, DynamicShape):
            self.tree, self.has_acceptance = IndependentTree(given, self.device, self.confidence), True
        else:
            # Where none is known, a merge reckons with a half per depth.
            acceptances = self.acceptances or [0.5 ** len(path) for path in given.paths]
            self.tree, self.has_acceptance = RankTree(given, self.device, acceptances), self.acceptances is not None
        self.num_nodes, self.max_depth, self.ranks, self.branching = self.tree.sizes

    def with_tree(self, tree: Sequence[int] | Topology | DynamicShape, **options: Any) -> EagleDrafter:
        """As :meth:`EagleDrafter.with_tree`. What was measured of this tree's paths is not the other's."""
        other = copy(self)
        other.acceptances = other.confidence = None
        return super(ParallelEagleDrafter, other).with_tree(tree, **options)

    def _allocate_tree(self, rows: int, static: bool) -> None:
        """Nothing: its trees have no buffers."""

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.further = self.max_depth - 1  # depths that mask pairs draft
        super().allocate(cache, max_depth, static)
        self.chains = chain_passes(max_depth, static, cache.rows, self.device, self.further)
        self.depths = torch.arange(self.max_depth, device=self.device)  # of each depth's parents
        with torch.no_grad():
            self.mask_feature = self.eagle.mask_pair(self.embed)[1]

    def propose(self, state: State) -> TokenTree:
        before = (state.length - 1).clamp(min=0)
        self.plans = state.plans
        hidden = self._run_masked(state, before)  # [B, D, d]
        log_q, tokens = self.head.best(hidden, self.ranks, self.depths, state.noise)
        if isinstance(self.tree, RankTree):
            return self.tree.fill(state.root, tokens)
        return self.tree.grow(state.root, log_q if state.noise is not None else self.tree.log_acceptance(log_q), tokens)

    def _run_masked(self, state: State, before: Tensor) -> Tensor:
        """Run the missing pairs, the root's and the mask pairs in one pass: what the LM head reads at each depth, ``[B,
        D, d]``. In rows with fewer missing pairs, further mask pairs stand at the end, and are not read."""
        tokens, fused, missing = self._root_pairs(state, before)
        tokens, fused = F.pad(tokens, (0, self.further)), F.pad(fused, (0, 0, 0, self.further))
        masked = self.numbers[: tokens.shape[1]] > missing[:, None]
        tokens = tokens.masked_fill(masked, self.eagle.config.mask_token_id or 0)
        fused = torch.where(masked[..., None], self.mask_feature, fused)
        _, normed = self._run(self.chains[tokens.shape[1] - 1], tokens, fused, before - missing)
        return normed[self.row_numbers[:, None], missing[:, None] + self.depths]


def _check(tree: Topology | DynamicShape, eagle: Eagle, where: str = "") -> None:
    check_tree(tree, eagle.config.parallel, eagle.config.outputs, where, "drafts in a pass")
    if not isinstance(tree, DynamicShape) and not tree.paths:
        raise ValueError(f"{where}the tree holds the root alone; an EAGLE drafter needs at least one path")


def drafter_of(eagle: Eagle, target: Target, tree: Sequence[int] | Topology | DynamicShape) -> EagleDrafter:
    """A drafter with these weights, of one pass or of a pass for each level."""
    return (ParallelEagleDrafter if eagle.config.parallel else EagleDrafter)(eagle, target, tree)


def open_parallel(folder: Path, eagle: Eagle, tree: Path, merged: bool) -> Loader:
    """``open_drafter`` of the family's drafters of one pass."""
    given, acceptances, confidence = read_independent(tree, merged)
    _check(given, eagle, f"{tree}: ")

    def build(target: Target, options: dict[str, Any]) -> Drafter:
        check_context(eagle, target, str(folder))
        return ParallelEagleDrafter(eagle, target, given, acceptances, confidence)

    return Loader(build)
