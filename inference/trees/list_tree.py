"""Token trees as Python lists, for eager steps on a CPU whose nodes are deterministic: looping over a tree's few nodes
is faster than tensor operations.

Shape letters: B rows, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.inference.verify.tree import StaticTree, TokenTree

if TYPE_CHECKING:
    from draftsmith.inference.engine.budget import Budget

MAX_SHAPES = 256  # tree shapes kept
Shape = tuple[StaticTree, list[int], list[list[int]]]  # of a row's tree; depths, and words of the bitsets, of its nodes


@dataclass
class ListTree:
    """The tree of one row; node 0 is the root, parents come before their children."""

    tokens: list[int]
    parents: list[int]  # −1 at the root
    sources: list[int]  # a bit for each source that proposed the node; 0 at the root
    acceptance: list[float]  # estimated acceptance probability of the node, no more than its parent's

    def subtree(self, nodes: Sequence[int]) -> "ListTree":
        """The tree of these nodes, in this order, parents before their children."""
        number = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        parents = [number[self.parents[node]] for node in nodes]
        acceptance = [self.acceptance[node] for node in nodes]
        tokens, sources = ([part[node] for node in nodes] for part in (self.tokens, self.sources))
        return ListTree(tokens, parents, sources, acceptance)


def kept_nodes(acceptances: Sequence[Sequence[float]], budget: "Budget | None", limit: int) -> list[list[int]]:
    """The likeliest nodes of each row's tree, in ascending order, as many as a step's budget keeps, at most ``limit``;
    without one, as many as that."""
    if budget is not None:
        longest = max(map(len, acceptances))
        limit = budget.keep(torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in acceptances]), limit)
    # Sorting is stable, and a parent is at least as likely as its child: it comes first.
    orders = (sorted(range(len(row)), key=lambda node, row=row: -row[node]) for row in acceptances)
    return [sorted(order[:limit]) for order in orders]


def merge_lists(
    trees: Sequence[TokenTree], sources: Sequence[str], roots: Sequence[int], budget: "Budget | None", limit: int
) -> tuple[list[ListTree], list[list[list[int]]]]:
    """Merge the trees of each row, each of a source, and keep the nodes that :func:`kept_nodes` says. Returns the
    merged trees; by source and row, the number that each merged node has in the source's tree, −1 if it has none or
    beyond the row's nodes."""
    rows = len(roots)
    merged = [ListTree([root], [-1], [0], [1.0]) for root in roots]
    known: list[dict[tuple[int, int], int]] = [{} for _ in range(rows)]  # (parent, token) → merged node
    places: list[list[list[int]]] = []  # by source and row: merged node of each of its nodes
    for number, (tree, name) in enumerate(zip(trees, sources, strict=True)):
        if tree.tokens.shape[1] == 1:
            places.append([[0]] * rows)
            continue
        assert tree.acceptance is not None, f"{name}: its trees have no acceptance probabilities"
        parts = (tree.tokens, tree.parent, tree.valid, tree.acceptance)
        lists = [part.expand(rows, -1).tolist() for part in parts]
        places.append([_add(1 << number, *row) for row in zip(merged, known, *lists, strict=True)])
    kept = kept_nodes([tree.acceptance for tree in merged], budget, limit)
    count = max(map(len, kept))
    own_numbers: list[list[list[int]]] = []
    for by_row in places:
        own_numbers.append([])
        for nodes, place in zip(kept, by_row, strict=True):
            number_of = {at: node for node, at in enumerate(place)}
            own_numbers[-1].append([number_of.get(node, -1) for node in nodes] + [-1] * (count - len(nodes)))
    return [tree.subtree(nodes) for tree, nodes in zip(merged, kept, strict=True)], own_numbers


def _add(
    bit: int,
    merged: ListTree,
    known: dict[tuple[int, int], int],
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[bool],
    acceptance: Sequence[float],
) -> list[int]:
    """Add a source's nodes to a row's merged tree. Acceptance probabilities of several sources are combined as if they
    were independent. Returns the merged node of each of the source's nodes; −1 where it is not valid."""
    place = [0]
    for node in range(1, len(tokens)):
        if not valid[node]:
            place.append(-1)
            continue
        key = (place[parents[node]], tokens[node])
        at = known.get(key)
        if at is None:
            at = known[key] = len(merged.tokens)
            merged.tokens.append(tokens[node])
            merged.parents.append(key[0])
            merged.sources.append(bit)
            merged.acceptance.append(acceptance[node])
        else:
            merged.sources[at] |= bit
            merged.acceptance[at] = 1 - (1 - merged.acceptance[at]) * (1 - acceptance[node])
        place.append(at)
    return place


class ListTreeBuilder:
    """Builds token trees from rows' host trees; keeps what depends only on the shape of a row's tree."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device, self.root_tree = device, StaticTree([-1], device)
        self.no_source = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.certain = torch.ones(rows, 1, device=device)
        self.shapes: dict[tuple[int, ...], Shape] = {}  # by the parents

    def root_alone(self, roots: Tensor) -> TokenTree:
        """The trees of roots ``[B]`` int64."""
        return self.root_tree.fill(roots[:, None], self.no_source, self.certain)

    def build(self, trees: Sequence[ListTree], roots: Tensor) -> TokenTree:
        """``[B, N]`` of roots ``[B]``; smaller rows are padded with children of the root that are not valid."""
        if all(len(tree.tokens) == 1 for tree in trees):
            return self.root_alone(roots)
        if len(trees) > 1:
            return self._padded(trees, max(len(tree.tokens) for tree in trees))
        (tree,) = trees
        tokens, sources = torch.tensor([[tree.tokens], [tree.sources]], device=self.device)
        acceptance = torch.tensor([tree.acceptance], device=self.device)
        return self._shape(tree.parents)[0].fill(tokens, sources, acceptance)

    def _shape(self, parents: Sequence[int]) -> Shape:
        key = tuple(parents)
        if key not in self.shapes:
            if len(self.shapes) >= MAX_SHAPES:
                self.shapes.clear()
            tree = StaticTree(parents, self.device)
            self.shapes[key] = tree, tree.depth[0].tolist(), tree.ancestors[0].tolist()
        return self.shapes[key]

    def _padded(self, trees: Sequence[ListTree], nodes: int) -> TokenTree:
        words, rows = -(-nodes // 64), list[tuple[list[Any], ...]]()
        for tree in trees:
            (_, depth, ancestors), padding = self._shape(tree.parents), nodes - len(tree.tokens)
            zeros = [0] * (words - len(ancestors[0]))
            bits = [row + zeros for row in ancestors] + [[1] + [0] * (words - 1)] * padding
            shape = tree.parents + [0] * padding, depth + [1] * padding, bits
            valid = [True] * len(tree.tokens) + [False] * padding
            estimated = tree.sources + [0] * padding, tree.acceptance + [0.0] * padding
            rows.append((tree.tokens + [0] * padding, *shape, valid, *estimated))
        dtypes = torch.int64, torch.int32, torch.int32, torch.int64, torch.bool, torch.int64, torch.float32
        pairs = zip(zip(*rows, strict=True), dtypes, strict=True)
        ids, above, levels, bitsets, is_valid, source, weights = (
            torch.tensor(each, dtype=dtype, device=self.device) for each, dtype in pairs
        )
        return TokenTree(ids, above, levels, bitsets, is_valid, source=source, acceptance=weights)
