"""Medusa as a drafter: all heads read one hidden state and fill a fixed tree of ranks (arXiv 2401.10774 §2.1).

With shortlists (:mod:`draftsmith.models.shortlist`) each head has its own: head k's is that of depth k. A router reads
the root's token and the head's feature, which is what the LM head reads too.

Shape letters: B rows, K heads, R ranks kept per head, N nodes, d hidden width, V vocabulary, S draft vocabulary (V if
there is none), P positions where a step begins.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.inference.drafters.load import Calibration, Part
from draftsmith.inference.drafters.ranks import head_ranks
from draftsmith.inference.drafters.rollouts import Drafts, Rollout
from draftsmith.inference.drafters.shortlists import Shortlists, after_head_of, check_router
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.verify.sampling import Rows
from draftsmith.inference.verify.tree import StaticTree, TokenTree, Topology, read_candidates, read_weighed
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.head_topk import MAX_COUNT, head_topk, tokens_at
from draftsmith.kernels.linear import kernel_weight
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.shortlist import DEPTHS, ShortlistConfig, ShortlistHead
from draftsmith.models.target import Target


class MedusaDrafter(Drafter):
    """Heads on a target's last hidden state, in a calibrated tree. Deterministic: every draw is one-hot.

    Args:
        acceptances: acceptance probability of each path of the topology, in its order, which its trees then have.
        shortlist: each head computes only some rows of the LM head that they share (FR-Spec, DynaSpec).

    Raises:
        ValueError: the tree is deeper than there are heads, or asks for a rank beyond the vocabulary or a shortlist; or
            shortlists do not fit the LM head, or the heads have projections of their own.
    """

    static, reads_own_path = True, False

    def __init__(
        self,
        heads: MedusaHeads,
        topology: Topology,
        target: Target,
        acceptances: Sequence[float] | None = None,
        shortlist: ShortlistHead | None = None,
    ) -> None:
        self.outputs = _fewest_outputs(heads.config, None if shortlist is None else shortlist.config)
        self.heads, self.target = heads.to(target.device, target.dtype), target
        self.draft_head, self.embed = heads.draft_head(target.lm_head), target.embeddings
        self.shortlists: Shortlists | None = None
        if shortlist is not None:
            check_router(shortlist, next(self.embed.parameters()).shape[1], target.hidden_size)
            after_head = after_head_of(target)
            self.shortlists = Shortlists(shortlist, self.draft_head, heads.draft_vocab, target.vocab_size, after_head)
        self.acceptances, self.device = acceptances, target.device
        self.depths = torch.arange(heads.config.num_draft_heads, device=target.device)  # of each head's parents
        self._take(topology)

    def with_tree(self, topology: Topology) -> "MedusaDrafter":
        """A drafter with the same weights and another tree, all of whose nodes it proposes."""
        other = copy(self)
        other.acceptances, other.shortlists = None, copy(self.shortlists)  # with buffers of its own
        other._take(topology)
        return other

    def _take(self, topology: Topology) -> None:
        heads = self.heads
        _check_topology(topology, heads.config, self.outputs)
        self.num_nodes, self.max_depth = topology.num_nodes, topology.max_depth
        self.branching = max(topology.parents.count(node) for node in range(topology.num_nodes))
        acceptances = None if self.acceptances is None else [1.0, *self.acceptances]
        self.tree = StaticTree(topology.parents, self.device, acceptances)
        self.ranks = topology.max_rank + 1
        # Node i takes candidate [head depth − 1, last rank of its path]; heads the tree does not use are not run.
        flat = [(len(path) - 1) * self.ranks + path[-1] for path in topology.paths]
        self.choice = torch.tensor(flat, dtype=torch.int64, device=self.device)
        self.weighs = self.acceptances is not None
        self.acceptance: Tensor | None = None  # [1, N]
        if self.acceptances is not None:
            self.acceptance = torch.tensor([[1.0, *self.acceptances]], device=self.device)
        spread = self.target.spread and heads.draft_vocab is None
        self.shared = heads.projection is None and 0 < self.ranks <= MAX_COUNT and not spread

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        if self.shortlists is not None:
            self.shortlists.allocate(cache.rows, static)

    def buffers(self) -> Sequence[Tensor]:
        return () if self.shortlists is None else self.shortlists.buffers()

    def begin(self, rows: Rows) -> None:
        if self.shortlists is not None:
            self.shortlists.begin(rows)

    def prefill(self, features: Tensor, tokens: Tensor, start: int, rows: Rows) -> None:
        if self.shortlists is not None:
            self.shortlists.read(tokens, rows)

    @property
    def absorbs(self) -> bool:
        return self.shortlists is not None

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        # The next root is read when it is drafted from.
        if self.shortlists is not None:
            self.shortlists.read_accepted(tree, verdict)

    def skip(self, state: State) -> None:
        if self.shortlists is not None:
            self.shortlists.read(state.root[:, None])

    def propose(self, state: State) -> TokenTree:
        acceptance = None if self.acceptance is None else self.acceptance.expand(len(state.root), -1)
        if not len(self.choice):
            return self.tree.fill(state.root[:, None], acceptance=acceptance)
        if self.shortlists is None and state.noise is not None:
            logits = self.heads.logits(state.feature, self.draft_head, self.max_depth).transpose(0, 1)  # [B, K, S]
            logits = self.target.after_head(logits) if self.target.changes_logits else logits
            depths, ids = self.depths[: self.max_depth], self.heads.draft_vocab
            *_, best = state.noise.best(logits, depths, self.ranks, ids)
            drafts = best.flatten(1).index_select(1, self.choice)
        elif self.shortlists is None:
            best = self._best(state.feature).transpose(0, 1).flatten(1)  # [B, K·R]
            drafts = self.heads.tokens(best.index_select(1, self.choice))  # [B, N − 1]
        else:
            drafts = self._shortlisted(self.shortlists, state).index_select(1, self.choice)
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

    def _shortlisted(self, shortlists: Shortlists, state: State) -> Tensor:
        """The R most likely tokens of each head's shortlist, ``[B, K·R]``."""
        root = state.root[:, None]
        shortlists.read(root)
        embeddings = self.embed(root)
        tokens: list[Tensor] = []
        for depth, feature in enumerate(self.heads.features(state.feature, self.max_depth)[:, :, None]):  # [B, 1, d]
            shortlists.choose(embeddings, feature, depth)
            logits, ids = shortlists.logits(feature)
            if state.noise is None:
                best = tokens_at(logits.topk(self.ranks, -1).indices, ids)
            else:
                *_, best = state.noise.best(logits, depth, self.ranks, ids)
            tokens.append(best[:, 0])
        return torch.cat(tokens, 1)


def _check_topology(topology: Topology, config: MedusaConfig, outputs: int, where: str = "") -> None:
    if topology.max_depth > config.num_draft_heads:
        raise ValueError(
            f"{where}the tree is {topology.max_depth} deep, but there are {config.num_draft_heads} draft heads"
        )
    if topology.max_rank >= outputs:
        raise ValueError(f"{where}the tree asks for rank {topology.max_rank} of a vocabulary of {outputs}")


def _check_shared(config: MedusaConfig, where: str = "") -> None:
    if config.projection != "shared":
        raise ValueError(
            f"{where}Medusa heads with an own projection have no common LM head, whose rows shortlists choose; train "
            "heads with drafter.projection=shared"
        )


def _fewest_outputs(config: MedusaConfig, shortlists: ShortlistConfig | None, where: str = "") -> int:
    """Tokens that a head chooses from, at least."""
    if shortlists is None:
        return config.outputs
    _check_shared(config, where)
    return shortlists.fewest


def drafts(heads: MedusaHeads, target: Target, depth: int = DEPTHS) -> Drafts:
    """Heads with a shared projection, as shortlists are made for them; the first ``depth`` of them."""
    heads = heads.to(target.device, target.dtype)
    head, embed = heads.draft_head(target.lm_head), target.embeddings
    head_dtype, vectors = next(head.parameters()).dtype, next(embed.parameters())  # [V, e]
    depth = min(depth, heads.config.num_draft_heads)

    def run(tokens: Tensor, supervised: Tensor) -> Iterator[Rollout]:
        rows, begins = tokens.to(target.device).long(), F.pad(supervised[:, 1:], (0, 1)).to(target.device)
        roots = F.pad(rows[:, 1:], (0, 1))[begins]  # [P]
        hidden = target.hidden(rows)[begins].to(heads.weight.dtype)  # [P, d]
        for feature in heads.features(hidden, depth):
            yield Rollout(roots, feature, feature.to(head_dtype))

    sizes = vectors.shape[1], target.hidden_size
    return Drafts(run, embed, head, heads.draft_vocab, *sizes, after_head_of(target), depth)


# ---- the family, as inference/drafters/load.py describes it


def open_drafter(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    tree: Path | None,
    merged: bool,
    shortlist: ShortlistHead | None = None,
) -> Part:
    """Heads and their tree, checked against each other."""
    assert tree is not None
    # A merge chooses from more nodes than the calibrated tree has.
    topology, acceptances = read_candidates(tree) if merged else read_weighed(tree)
    heads = MedusaHeads.from_artifact(config, weights, str(folder))
    outputs = _fewest_outputs(heads.config, None if shortlist is None else shortlist.config, f"{folder}: ")
    _check_topology(topology, heads.config, outputs, f"{tree}: ")

    def build(target: Target, options: dict[str, Any]) -> Drafter:
        drafter = MedusaDrafter(heads, topology, target, acceptances, shortlist=shortlist)
        drafter.raced = not merged
        return drafter

    return Part(build)


def open_drafts(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], target: Target) -> Drafts:
    heads = MedusaHeads.from_artifact(config, weights, str(folder))
    _check_shared(heads.config, f"{folder}: ")
    return drafts(heads, target)


def calibration(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shortlist: ShortlistHead | None = None
) -> Calibration:
    """Each head's rank of the true token, by its whole LM head; trees as deep as there are heads."""
    heads = MedusaHeads.from_artifact(config, weights, str(folder))
    drafters: list[MedusaDrafter] = []

    def ranks(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
        return head_ranks(target, heads.to(target.device), tokens, supervised)

    def build(target: Target, topology: Topology) -> Drafter:
        if not drafters:  # all trees share its copy of the LM head's rows
            drafters.append(MedusaDrafter(heads, Topology(((0,),)), target, shortlist=shortlist))
        return drafters[0].with_tree(topology)

    return Calibration(heads.config.num_draft_heads, ranks, build)
