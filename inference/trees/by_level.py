"""Drafting a tree of ranks level by level: the loop that drafters share which run a model once for each level.

The nodes of a level are chosen from what the model says after the nodes above: the node of path (…, r) is its parent's
r-th best token, in coupled sampling under the noise of the text; in multi-step sampling a node with c children draws c
tokens from the model's distribution, and its children, in rank order, are these draws. Only nodes that have children
are run; they come first in their level. How a node is run (the cache, what the model reads) is the drafter's own.

Shape letters: B rows, N nodes, n nodes of a level that are run, m those of the level above, k best tokens or draws of
each, V vocabulary of the target, S tokens that a level drafts from, d hidden width, R rows of q, K draws of a node, T
keys, W 64-bit words.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.inference.engine.protocol import State
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.verify.sampling import Noise, sampling_distribution
from draftsmith.inference.verify.tree import MAX_NODES, Draws, Ranks, StaticTree, TokenTree, Topology, bitsets, product
from draftsmith.kernels.attention_plan import Plans
from draftsmith.kernels.distribution import philox_uniforms
from draftsmith.kernels.head_topk import MAX_COUNT, best_tokens, head_topk, tokens_at
from draftsmith.kernels.linear import kernel_weight
from draftsmith.kernels.multi_step import IID, ONE_HOT, WITHOUT_REPLACEMENT, draw
from draftsmith.kernels.tree_attention import ancestor_mask

Hidden = tuple[Tensor, Tensor]  # [B, n, d] what drafts continue with, and what the LM head reads
DrawKind = Literal["without_replacement", "iid", "naive", "none"]
# Of drafters with a cache of their own: more tokens than any text has; and how many of a text's last tokens may be
# missing from the cache after steps without a draft, at least.
ALL_CACHED, MISSING = 1 << 40, 32


class Layout:
    """The nodes of a tree of ranks, level by level; in each level the nodes that have children come first.

    paths: of each node. parents: of each node, −1 at the root.
    firsts: the first node of each level, then N. runs: number of nodes in each level that have children.
    best: for each level below the root, (k, places): its nodes among the k best tokens of each node run above, as
        places in ``[n · k]``. drawn: the same among k draws of each.
    children: the children of each node, in rank order.
    """

    def __init__(self, topology: Topology) -> None:
        inner = {path[:-1] for path in topology.paths}
        by_level: list[list[Ranks]] = [[] for _ in range(topology.max_depth + 1)]
        for path in ((), *topology.paths):
            by_level[len(path)].append(path)
        for level in by_level:
            level.sort(key=lambda path: (path not in inner, path))
        self.paths = [*itertools.chain(*by_level)]
        number = {path: node for node, path in enumerate(self.paths)}
        self.firsts = [*itertools.accumulate(map(len, by_level), initial=0)]
        self.runs = [sum(path in inner for path in level) for level in by_level]
        self.parents = [-1, *(number[path[:-1]] for path in self.paths[1:])]
        self.children: list[list[int]] = [[] for _ in self.paths]
        for path in topology.paths:  # sorted
            self.children[number[path[:-1]]].append(number[path])
        self.best: list[tuple[int, list[int]]] = []
        self.drawn: list[tuple[int, list[int]]] = []
        for first, level in zip(self.firsts, by_level[1:], strict=False):
            above = [number[path[:-1]] for path in level]
            ranks = [path[-1] for path in level]
            turns = [self.children[node].index(number[path]) for node, path in zip(above, level, strict=True)]
            for found, orders in ((self.best, ranks), (self.drawn, turns)):
                k = max(orders) + 1
                found.append((k, [(node - first) * k + order for node, order in zip(above, orders, strict=True)]))


@dataclass(frozen=True, eq=False)
class LevelPass:
    """A forward pass of nodes ``first`` … ``first + count − 1``: its arguments, views for B rows (T = first + count).

    above: ``[n]`` int64, the place of each node's parent among the nodes run in the level above; None if node i's
        parent is the i-th of them.
    """

    first: int
    count: int
    sees_all: bool  # it runs a single node, and all earlier nodes are its ancestors
    ancestors: Tensor  # [B, n, W]
    depth: Tensor  # [B, n]
    key_depth: Tensor  # [B, T]
    mask: Tensor | None = None  # [B, n, T]
    above: Tensor | None = None

    def of(self, values: Tensor) -> Tensor:
        """Values of a level's nodes ``[B, nodes]`` → those of the nodes that are run, ``[B, n]``."""
        return values if values.shape[1] == self.count else values[:, : self.count]

    def of_parents(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[B, m, d]`` of the nodes run in the level above → each node's parent's ``[B, n, d]``."""
        return hidden if self.above is None else hidden.index_select(1, self.above)

    def run(
        self, runner: Runner, tokens: Tensor, lengths: Tensor, plans: Plans | None, left_out: Tensor | None
    ) -> Tensor:
        """Hidden states ``[B, n, d]`` by a causal LM; the arguments are those of :meth:`Runner.forward_nodes`."""
        return runner.forward_nodes(
            tokens,
            lengths,
            self.ancestors,
            self.depth,
            first=self.first,
            key_depth=self.key_depth,
            mask=self.mask,
            fixed=True,
            sees_all=self.sees_all,
            plans=plans,
            left_out=left_out,
        )[0]


def chain_passes(max_depth: int, static: bool, rows: int, device: torch.device, further: int = 0) -> list[LevelPass]:
    """Forward passes of a root, in the place of the last node, after 0, 1, … tokens that are missing from a drafter's
    cache: accepted ones of a step, at most ``max_depth``; in eager steps also those of steps without a draft.
    ``further``: tokens after the root."""
    longest = 1 + (max_depth if static else max(MISSING, 2 * max_depth)) + further
    ancestors = bitsets(list(range(-1, longest - 1))).to(device)[None]  # [1, C, W]
    depth = torch.arange(longest, dtype=torch.int32, device=device)[None]
    passes: list[LevelPass] = []
    for count in range(1, longest + 1):
        mask = ancestor_mask(ancestors[:, :count], count)
        parts = (ancestors[:, :count], depth[:, :count], depth[:, :count], mask)
        passes.append(LevelPass(0, count, count == 1, *(part.expand(rows, *part.shape[1:]) for part in parts)))
    return passes


@dataclass(frozen=True)
class _Taken:
    """The nodes of a level among k candidates for each node that was run in the level above."""

    k: int
    places: Tensor | None  # in [n · k]; None for all of them, in order

    def of(self, values: Tensor) -> Tensor:
        """``[B, n, k]`` values of the candidates → those of the level's nodes, ``[B, nodes]``."""
        values = values.flatten(1)
        return values if self.places is None else values.index_select(1, self.places)


@dataclass(frozen=True)
class DraftHead:
    """The LM head by which a drafter chooses tokens.

    logits: what the LM head reads ``[B, n, d]`` → logits ``[B, n, S]`` for the token after each node, and the target's
        tokens of these places, int64: ``[S]``; ``[B, S]``, where S may differ by level, −1 standing for padding, whose
        logits are −inf; the first S tokens if None.
    module: the LM head whose first ``outputs`` outputs they are; None if they are made otherwise.
    ids: ``[outputs]`` int64, the tokens of these; the first ones if None.
    topk: of a head that is no module: (what it reads, k) → :meth:`best` by a kernel; None where none runs.
    """

    logits: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    module: nn.Module | None
    outputs: int
    ids: Tensor | None
    topk: Callable[[Tensor, int], tuple[Tensor, Tensor] | None] | None = None

    def best(self, out: Tensor, count: int, depth: int | Tensor, noise: Noise | None) -> tuple[Tensor, Tensor]:
        """The log of the (under ``noise``, estimated) acceptance probabilities of the ``count`` best tokens after nodes
        of a depth, best first, and these tokens of the target: ``[B, n, k]`` each. Where a kernel knows the LM head, no
        logits are written. None is NaN, which budgets would sort before the root, and keep in their means."""
        if noise is None and count <= MAX_COUNT and (found := self._by_kernel(out, count)) is not None:
            return found
        scores, tokens = self.logits(out)
        draft = best_tokens(scores, count, True, tokens) if noise is None else noise.draft(scores, depth, count, tokens)
        return draft[0].nan_to_num(nan=-torch.inf), draft[1]

    def _by_kernel(self, out: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        if self.topk is not None:
            return self.topk(out, count)
        weight = None if self.module is None else kernel_weight(self.module, out)
        return None if weight is None else level_topk(out, weight[: self.outputs], count, self.ids)


def level_topk(out: Tensor, weight: Tensor, count: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """:func:`head_topk` of a level ``[B, n, d]``, by log probability: ``[B, n, k]`` each."""
    log_q, best = head_topk(out.flatten(0, 1), weight, count, True, ids)
    shape = (*out.shape[:2], count)
    return log_q.view(shape), best.view(shape)


class Levels:
    """A tree of ranks, drafted level by level.

    Args:
        tree: an expansion, k_i children of every node at depth i − 1 (⟨1, …, 1⟩ is a chain); or a tree of ranks.
        vocabulary, target_vocabulary: S, the number of tokens that are drafted, at the depth that has the fewest; V.
        draws: in multi-step sampling, ``without_replacement``; ``iid``: independent draws, of which equal ones share a
            node; ``naive``: without replacement, but verified as deterministic drafts (accepted iff the target's own
            sample is among them), which is exact and accepts less: for comparison. ``none``: nothing is drawn; its
            nodes are those of greedy mode, deterministic drafts, at all levels.
        by_rank: estimated acceptance probability of a node's best token, the second best, …, where its parent is
            accepted (the last one of all further ranks); the model's own probabilities if left out.

    deepest_run: number of the deepest level run for the last tree; the root's is 0.

    Raises:
        ValueError: the tree is empty, not positive, too large, or has more children than there are tokens to draft.
    """

    def __init__(
        self,
        tree: Sequence[int] | Topology,
        vocabulary: int,
        target_vocabulary: int,
        draws: DrawKind = "without_replacement",
        by_rank: Sequence[float] | None = None,
    ) -> None:
        topology = _topology(tree, vocabulary)
        self.layout = Layout(topology)
        self.num_nodes, self.max_depth = topology.num_nodes, topology.max_depth
        self.branching = max(map(len, self.layout.children))
        self.target_vocabulary, self.draws = target_vocabulary, draws
        self.likely, self.by_rank = by_rank, None
        # Naive draws are verified, and merged, as deterministic ones.
        self.random = draws in ("without_replacement", "iid")

    def allocate(self, rows: int, device: torch.device, static: bool) -> None:
        """Allocate the constant tensors of steps of B rows; ``static`` as ``Drafter.allocate``."""
        layout = self.layout
        self.rows, self.static = rows, static
        self.numbers = torch.arange(self.branching, device=device)
        if self.likely is not None:
            most = max(k for k, _ in layout.best)
            self.by_rank = torch.tensor([*self.likely, *[self.likely[-1]] * most][:most], device=device)
        self.ones = torch.ones(rows, 1, device=device)
        self.deepest_run = 0
        # Trees with 0, 1, … levels below the root.
        self.trees = [StaticTree(layout.parents[:end], device) for end in layout.firsts[1:]]
        whole = self.trees[-1]
        self.passes: list[LevelPass] = []
        for level, (first, count) in enumerate(zip(layout.firsts, layout.runs[:-1], strict=False)):
            own, upto = slice(first, first + count), slice(first + count)
            parts = whole.ancestors[:, own], whole.depth[:, own], whole.depth[:, upto], whole.mask[:, own, upto]
            above: Tensor | None = None
            if level:
                places = [parent - layout.firsts[level - 1] for parent in layout.parents[own]]
                same = places == [*range(layout.runs[level - 1])]
                above = None if same else torch.tensor(places, device=device)
            sees_all, views = count == 1 and first == level, (part.expand(rows, *part.shape[1:]) for part in parts)
            self.passes.append(LevelPass(first, count, sees_all, *views, above=above))

        def choices(levels: list[tuple[int, list[int]]]) -> list[_Taken]:
            return [
                _Taken(k, None if places == [*range(count * k)] else torch.tensor(places, device=device))
                for count, (k, places) in zip(layout.runs, levels, strict=False)
            ]

        self.best, self.drawn = choices(layout.best), choices(layout.drawn)
        # The child of each draw in each of the trees, [1, N, K]; the row of q that a node's draws come from, [1, N, 1].
        children = [[*each, *[-1] * (self.branching - len(each))] for each in layout.children]
        child = torch.tensor(children, device=device)[None]
        most = [0, *itertools.accumulate((drawn.k for drawn in self.drawn), max)]
        self.children = [
            torch.where(child[:, :end, :k] < end, child[:, :end, :k], -1)
            for end, k in zip(layout.firsts[1:], most, strict=True)
        ]
        q_rows = [0] * self.num_nodes
        ran = (node for level in self.passes for node in range(level.first, level.first + level.count))
        for row, node in enumerate(ran):
            q_rows[node] = row
        self.q_rows = torch.tensor(q_rows, device=device)[None, :, None]

    def propose(
        self, state: State, hidden: Hidden, run: Callable[[int, LevelPass, Tensor, Hidden], Hidden], head: DraftHead
    ) -> TokenTree:
        """Draft a tree, from the hidden states of the root. ``run``: (depth, the level, its tokens ``[B, n]``, the
        hidden states of the level above) → those of the level's nodes that are run."""
        tokens = [state.root[:, None]]
        acceptances = [self.ones]
        valid: list[Tensor] = []
        distributions: list[Tensor] = []
        vocabularies: list[Tensor | None] = []  # of the distributions
        first_equal: list[Tensor] = []
        settings, uniforms = None, None
        if state.settings is not None and self.draws != "none":
            settings = state.settings.without_changes()  # exact with any q, as long as tokens are drawn from it
            count = sum(level.count * drawn.k for level, drawn in zip(self.passes, self.drawn, strict=True))
            uniforms = philox_uniforms(settings.seed, state.step, count, state.stream)
            valid.append(self.ones > 0)
        budget = state.budget
        with_acceptance = state.needs_acceptance or not self.static or settings is not None
        used = 0  # uniforms
        for depth, level in enumerate(self.passes):
            if depth and budget is not None:
                so_far = torch.cat(acceptances, 1)
                if not budget.another_level(state.source, so_far, self.trees[depth].depth):
                    break
            if depth:
                hidden = run(depth, level, level.of(tokens[-1]), hidden)
            self.deepest_run = depth
            above = level.of(acceptances[-1])[..., None] if with_acceptance else self.ones
            if settings is None or uniforms is None:
                choice = self.best[depth]
                log_q, best = head.best(hidden[1], choice.k, depth, state.noise)
                acceptance = self.ones
                if with_acceptance:
                    acceptance = above * (log_q.exp() if self.by_rank is None else self.by_rank[: choice.k])
            else:
                choice = self.drawn[depth]
                k = choice.k
                scores, ids = head.logits(hidden[1])
                q = sampling_distribution(scores, settings)
                node_uniforms = uniforms[:, used : used + level.count * k].view(self.rows, level.count, k)
                used += level.count * k
                places, drawn = draw_children(q, node_uniforms, replacement=self.draws == "iid")
                drawn = drawn & level.of(valid[-1])[..., None]
                if self.draws == "iid" and self.branching > 1:
                    first = (places[..., None] == places[..., None, :]).int().argmax(-1)
                    first_equal.append(F.pad(first, (0, self.branching - k)))
                    drawn = drawn & (first == self.numbers[:k])  # others share the node of the first equal draw
                valid.append(choice.of(drawn))
                distributions.append(q)
                vocabularies.append(ids)
                # Must not depend on the drawn tokens, as a merge may leave out draws by it. A draw from a confident
                # distribution is nearly always accepted, one from a flat distribution about half the time; later draws
                # count only if the earlier ones are rejected.
                accepted = 0.5 + 0.5 * q.amax(-1, keepdim=True)
                acceptance = torch.where(drawn, above * accepted * (1 - accepted) ** self.numbers[:k], 0.0)
                best = tokens_at(places, ids)
            tokens.append(choice.of(best))
            if with_acceptance:
                acceptances.append(choice.of(acceptance))
        levels, estimated = len(tokens) - 1, torch.cat(acceptances, 1) if with_acceptance else None
        tree = self.trees[levels].fill(torch.cat(tokens, 1), acceptance=estimated)
        if not distributions:
            return tree
        draws_valid = torch.cat(valid, 1)
        q, ids = _joined(distributions, vocabularies)
        draws = self._draws(self.children[levels], draws_valid, q, ids, first_equal)
        return replace(tree, valid=draws_valid, static=None, draws=draws)

    def _draws(self, child: Tensor, valid: Tensor, q: Tensor, ids: Tensor | None, first_equal: list[Tensor]) -> Draws:
        """The draws of a tree; invalid nodes are not draws. child ``[1, N, K]``, q ``[B, R, S or V]`` and ids are as in
        ``Draws``; ``first_equal``: for i.i.d. draws, ``[B, n, K]`` int64 by level, the node's first draw of the same
        token."""
        child = child.expand(self.rows, -1, -1)
        q_row = self.q_rows[:, : child.shape[1]].clamp(max=q.shape[1] - 1).expand_as(child)
        if first_equal:
            first = torch.cat(first_equal, 1)[..., : child.shape[2]].gather(1, q_row)
            child = torch.where(child >= 0, child.gather(2, first), -1)
        child = torch.where(valid.gather(1, child.clamp(min=0).flatten(1)).view_as(child), child, -1)
        if self.draws == "naive":
            return Draws(child, torch.full_like(child, ONE_HOT, dtype=torch.int8), torch.zeros_like(child))
        without_replacement = self.draws == "without_replacement" and child.shape[2] > 1
        kind = torch.full_like(child, WITHOUT_REPLACEMENT if without_replacement else IID, dtype=torch.int8)
        if ids is not None:
            return Draws(child, kind, q_row, q, ids)
        if q.shape[2] < self.target_vocabulary:
            q = F.pad(q, (0, self.target_vocabulary - q.shape[2]))
        return Draws(child, kind, q_row, q)


def _joined(distributions: Sequence[Tensor], vocabularies: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """The distributions of all levels ``[B, n, S]`` as one, and their tokens as ``Draws`` has them."""
    first = vocabularies[0]
    if first is None or (first.ndim == 1 and all(ids is first for ids in vocabularies)):
        return torch.cat([*distributions], 1), None if first is None else first[None, None]
    longest = max(q.shape[2] for q in distributions)
    q = torch.cat([F.pad(q, (0, longest - q.shape[2])) for q in distributions], 1)
    ids: list[Tensor] = []
    for of_level, each in zip(distributions, vocabularies, strict=True):
        assert each is not None
        padded = F.pad(each, (0, longest - each.shape[-1]), value=-1)
        ids.append((padded if each.ndim == 1 else padded[:, None]).expand(*of_level.shape[:2], -1))
    return q, torch.cat(ids, 1)


def _topology(tree: Sequence[int] | Topology, vocabulary: int) -> Topology:
    """The tree of an expansion, or the one given; checked, see :class:`Levels`."""
    if isinstance(tree, Topology):
        given, nodes, children = "tree", tree.num_nodes, tree.max_rank + 1
        if not tree.paths:
            raise ValueError("tree: holds the root alone; a drafter needs at least one path")
    else:
        given = f"expansion {list(tree)}"
        if not tree or min(tree) < 1:
            raise ValueError(f"{given}: at least one depth, each with at least one child")
        nodes, children = 1 + sum(itertools.accumulate(tree, operator.mul)), max(tree)
    if children > vocabulary:
        raise ValueError(f"{given}: more children than the vocabulary of {vocabulary} has tokens")
    if nodes > MAX_NODES:
        raise ValueError(f"{given}: a tree of {nodes} nodes; at most {MAX_NODES} can be verified in a step")
    return tree if isinstance(tree, Topology) else product(tree)


def draw_children(q: Tensor, uniforms: Tensor, replacement: bool = False) -> tuple[Tensor, Tensor]:
    """Draw k tokens of each distribution ``[B, n, V]`` float32 in order, by inversion of fresh uniforms ``[B, n, k]``;
    none twice, unless by ``replacement``: tokens ``[B, n, k]`` int64; bool ``[B, n, k]``, False where no token was left
    to draw (or q is NaN)."""
    weights, flat_uniforms = q.flatten(0, 1), uniforms.flatten(0, 1)
    tokens: list[Tensor] = []
    drawn: list[Tensor] = []
    for turn in range(uniforms.shape[2]):
        if turn and not replacement:
            weights = weights.scatter(1, tokens[-1], 0.0)
        tokens.append(draw(weights, flat_uniforms[:, turn])[:, None])
        drawn.append(weights.gather(1, tokens[-1]) > 0)
    return torch.cat(tokens, 1).view(uniforms.shape), torch.cat(drawn, 1).view(uniforms.shape)
