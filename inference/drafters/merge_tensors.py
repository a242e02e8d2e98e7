"""Merging of token trees by tensor operations, for steps of fixed shape and steps with random draws.

Shape letters: B rows, M candidates (the root and every source's nodes), N nodes kept, D depth of the deepest node,
K draws of a node, R rows of q, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.verify.tree import Draws, TokenTree, one_hot_draws, packed
from draftsmith.kernels.multi_step import widened
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.models.target import Target

LEVEL_REDUCTION = 1e-5  # of acceptance probabilities, by depth: more than rounding


@dataclass
class Candidates:
    """The root and the other nodes of all trees, one tree after the other."""

    tokens: Tensor  # [B, M] int64
    parent: Tensor  # [B, M] int64; the root is its own parent
    depth: Tensor  # [B, M] int64
    kept: Tensor  # [B, M] bool; initially the valid nodes
    acceptance: Tensor  # [B, M] float32
    path: Tensor  # [B, M, D] tokens on the path to each node plus 1, then 0
    same: Tensor  # [B, M] int64 the first kept candidate with the same path; M if there is none
    proposed: Tensor  # [B, M] bool, False where a source's node is not valid, or was cut before sources were compared


class TensorMerge:
    """Merge of the trees of several drafters.

    Args:
        drafters, sources: the drafters and their names.
        limit: maximum of the merged tree's nodes, root included; raised where randomly drawn nodes need more.
        max_depth: of any tree the engine verifies.
    """

    def __init__(
        self, drafters: Sequence[Drafter], sources: Sequence[str], target: Target, limit: int, rows: int, max_depth: int
    ) -> None:
        self.drafters, self.sources, self.limit = drafters, sources, limit
        self.vocab_size, device = target.vocab_size, target.device
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        self.random_nodes = 1 + sum(drafter.num_nodes - 1 for drafter in drafters if drafter.random)
        most = 1 + sum(drafter.num_nodes - 1 for drafter in drafters)
        self.flags = torch.arange(2, device=device).bool()[:, None].repeat(1, most)  # a row False, a row True
        self.numbers = torch.arange(max(most, max_depth + 1), device=device)
        self.zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)

    def merge(self, trees: Sequence[TokenTree], drawn: Sequence[bool]) -> tuple[TokenTree, list[Tensor]]:
        """Merge the trees of the drafters, and keep the likeliest nodes. ``drawn``: whether each was drawn at random.

        Returns:
            The merged tree; for each drafter ``[B, N]`` int64, the number that each merged node has in its tree, −1 if
            it has none.
        """
        sizes = [tree.tokens.shape[1] - 1 for tree in trees]
        candidates = self._candidates(trees)
        count = self._choose(candidates, sizes, drawn)
        tree, own_numbers = self._assemble(candidates, count, sizes)
        return (replace(tree, draws=self._draws(tree, own_numbers, trees, drawn)) if any(drawn) else tree), own_numbers

    def _candidates(self, trees: Sequence[TokenTree]) -> Candidates:
        depths = self.numbers[1 : self.max_depth + 1]
        parts: list[tuple[Tensor, ...]] = []
        shift = 0
        for tree, name in zip(trees, self.sources, strict=True):
            assert tree.acceptance is not None, f"{name}: its trees have no acceptance probabilities"
            mask = ancestor_mask(tree.ancestors, tree.tokens.shape[1]) if tree.mask is None else tree.mask
            # The product below sums one number and zeros: exact.
            by_depth = torch.where(tree.depth[..., None] == depths, tree.tokens[..., None] + 1, 0).double()
            parent = tree.parent.long().clamp(min=0)
            parent = torch.where(parent > 0, parent + shift, 0)
            part = (tree.tokens, parent, tree.depth.long(), tree.valid, tree.acceptance, mask.double() @ by_depth)
            parts.append(tuple(each[:, 1:] for each in part) if parts else part)  # all trees share the first one's root
            shift += tree.tokens.shape[1] - 1
        rows = len(self.zeros)
        joined = [
            torch.cat([each.expand(rows, *each.shape[1:]) for each in column], 1) for column in zip(*parts, strict=True)
        ]
        return Candidates(*joined, same=joined[0], proposed=joined[3])

    def _choose(self, c: Candidates, sizes: Sequence[int], drawn: Sequence[bool]) -> int:
        """Reduce ``kept`` to the nodes of the merged tree, one of each path; returns the number of its nodes."""
        total = c.tokens.shape[1]
        numbers = self.numbers[:total]
        equal = (c.path[:, :, None] == c.path[:, None]).all(-1)  # [B, M, M]
        c.same = (equal & c.kept[:, None]).int().argmax(-1)
        joint = _joint_acceptance(c, c.kept, c.same)
        if not any(drawn):
            c.kept = c.kept & (c.same == numbers)
            c.acceptance = joint
            c.acceptance[:, 0].fill_(1.0)
            order = c.acceptance.argsort(dim=-1, descending=True, stable=True)
            limit = min(self.limit, total)
            c.kept = c.kept & (order.argsort(-1) < limit)
            return limit
        # All randomly drawn nodes are kept; the others are chosen among themselves, whatever was drawn.
        parts = [self.flags[int(each), :size] for size, each in zip(sizes, drawn, strict=True)]
        is_drawn = torch.cat([self.flags[0, :1], *parts])  # [M]
        others = c.kept & ~is_drawn
        others[:, 0].fill_(False)
        first = (equal & others[:, None]).int().argmax(-1)
        order = _joint_acceptance(c, others, first).argsort(dim=-1, descending=True, stable=True)
        room = min(max(self.limit - self.random_nodes, 0), total)
        chosen = others & (order.argsort(-1) < room).gather(1, first)  # of every source
        c.acceptance = joint.gather(1, c.same)
        c.acceptance[:, 0].fill_(1.0)
        c.kept = (c.kept & is_drawn) | chosen
        c.kept[:, 0].fill_(True)
        c.proposed = c.kept
        equal = equal & c.kept[:, None]
        c.same = torch.where(equal.any(-1), equal.int().argmax(-1), total)
        c.kept = c.kept & (c.same == numbers)
        return min(max(self.limit, self.random_nodes), total)

    def _assemble(self, c: Candidates, count: int, sizes: Sequence[int]) -> tuple[TokenTree, list[Tensor]]:
        """The merged tree of the kept candidates, without draws; and each drafter's own node numbers."""
        total = c.tokens.shape[1]
        order = torch.where(c.kept, self.numbers[:total], total).sort(-1).values[:, :count]  # parents come first
        valid = order < total
        # Merged node of each candidate; ``count`` if it has none.
        place = torch.full((len(order), total + 1), count, device=order.device)
        place = place.scatter_(1, torch.where(valid, order, total), torch.where(valid, self.numbers[:count], count))
        place = place.gather(1, c.same)
        order = order.clamp(max=total - 1)
        tokens, depth, acceptance = (part.gather(1, order) for part in (c.tokens, c.depth, c.acceptance))
        parent = torch.where(valid, place.gather(1, c.parent.gather(1, order)), 0)
        parent[:, 0].fill_(-1)
        path = c.path.gather(1, order[..., None].expand(-1, -1, c.path.shape[2]))
        above = path[:, None]
        mask = ((path[:, :, None] == above) | (above == 0)).all(-1) & valid[:, None]  # [B, N, N]
        own_numbers: list[Tensor] = []
        source = self.zeros.repeat(1, count + 1)
        first = 0
        for number, size in enumerate(sizes):
            part = slice(first + 1, first + 1 + size)
            own_place = torch.where(c.proposed[:, part], place[:, part], count)
            own_place = torch.cat((self.zeros, own_place), 1)
            own = self.numbers[: size + 1].expand(len(place), -1)
            tree_numbers = torch.full_like(source, -1).scatter_(1, own_place, own)
            own_numbers.append(tree_numbers[:, :count])
            source = source + ((tree_numbers > 0).long() << number)
            first += size
        parts = tokens, parent.int(), depth.int(), packed(mask), valid, mask
        return TokenTree(*parts, source=source[:, :count], acceptance=acceptance), own_numbers

    def _draws(
        self, tree: TokenTree, own_numbers: Sequence[Tensor], trees: Sequence[TokenTree], drawn: Sequence[bool]
    ) -> Draws:
        """Each source's draws at every node: random ones first, then the deterministic ones in node order."""
        children, kinds, q_rows, distributions = [], [], [], list[Tensor]()
        rows, count = tree.tokens.shape
        source = tree.source
        assert source is not None
        deterministic = 0  # source bits
        for number, (part, own) in enumerate(zip(trees, own_numbers, strict=True)):
            if not drawn[number]:
                deterministic |= 1 << number
                continue
            d = part.draws
            assert d is not None and d.q is not None
            at = own.clamp(min=0)[..., None].expand(-1, -1, d.child.shape[2])
            # The merged node of each node of this tree.
            place = torch.zeros(rows, part.tokens.shape[1] + 1, dtype=torch.int64, device=own.device)
            place.scatter_(1, torch.where(own >= 0, own, part.tokens.shape[1]), self.numbers[:count].expand(rows, -1))
            child = d.child.expand(rows, -1, -1).gather(1, at)
            moved = place.gather(1, child.clamp(min=0).flatten(1)).view_as(child)
            children.append(torch.where((child >= 0) & (own >= 0)[..., None], moved, -1))
            kinds.append(d.kind.expand(rows, -1, -1).gather(1, at))
            q_rows.append(d.q_row.expand(rows, -1, -1).gather(1, at) + sum(q.shape[1] for q in distributions))
            q = d.q.expand(rows, -1, -1)
            if d.ids is not None or q.shape[2] != self.vocab_size:
                assert d.ids is not None
                q = widened(q, d.ids, self.vocab_size)
            distributions.append(q)
        if deterministic:
            branching = sum(drafter.branching for drafter, each in zip(self.drafters, drawn, strict=True) if not each)
            valid = tree.valid & (source & deterministic != 0)
            one_hot = one_hot_draws(tree.parent, valid, min(branching, count - 1))
            children.append(one_hot.child)
            kinds.append(one_hot.kind)
            q_rows.append(one_hot.q_row)
        return Draws(torch.cat(children, 2), torch.cat(kinds, 2), torch.cat(q_rows, 2), torch.cat(distributions, 1))


def _joint_acceptance(c: Candidates, sources: Tensor, first: Tensor) -> Tensor:
    """Acceptance probability ``[B, M]`` of each path, at its first candidate; 0 at other candidates. Of ``sources``,
    the candidates that count (bool), ``first`` is the first one with the same path: ``[B, M]`` each.

    Those of several sources are combined as if they were independent. Every level is reduced a little, so that rounding
    (a GPU adds in any order) cannot rank a node before its parent.
    """
    log_rejection = torch.log1p(-c.acceptance.clamp(max=0.9999)) * sources
    joint = -torch.expm1(torch.zeros_like(log_rejection).scatter_add_(1, first, log_rejection))
    return joint * (1 - LEVEL_REDUCTION * c.depth)
