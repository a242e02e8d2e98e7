"""Token trees as Python lists, for eager steps on a CPU, where looping over a tree's few nodes is faster than tensor
operations.

Shape letters: B rows, N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.inference.verify.tree import StaticTree, TokenTree

if TYPE_CHECKING:
    from draftsmith.inference.engine.budget import Budget

MAX_SHAPES = 256  # tree shapes kept


@dataclass
class HostTree:
    """The tree of one row; node 0 is the root, parents come before their children.

    tokens, parents: of each node; the root's parent is −1.
    sources: a bit for each source that proposed the node; 0 at the root.
    acceptance: estimated acceptance probability of the node, no more than its parent's.
    """

    tokens: list[int]
    parents: list[int]
    sources: list[int]
    acceptance: list[float]

    def subtree(self, nodes: Sequence[int]) -> "HostTree":
        """The tree of these nodes, in this order, parents before their children."""
        number = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        parents = [number[self.parents[node]] for node in nodes]
        acceptance = [self.acceptance[node] for node in nodes]
        tokens, sources = ([part[node] for node in nodes] for part in (self.tokens, self.sources))
        return HostTree(tokens, parents, sources, acceptance)


def likeliest_nodes(acceptances: Sequence[Sequence[float]], count: int) -> list[list[int]]:
    """The ``count`` likeliest nodes of each row's tree, in ascending order."""
    # Sorting is stable, and a parent is at least as likely as its child: it comes first.
    orders = (sorted(range(len(row)), key=lambda node, row=row: -row[node]) for row in acceptances)
    return [sorted(order[:count]) for order in orders]


def kept_nodes(acceptances: Sequence[Sequence[float]], budget: "Budget | None", limit: int) -> list[list[int]]:
    """The nodes that a step's budget keeps of each row's tree, at most ``limit``; without one, as many as that."""
    if budget is not None:
        longest = max(map(len, acceptances))
        limit = budget.keep(torch.tensor([[*row, *[0.0] * (longest - len(row))] for row in acceptances]), limit)
    return likeliest_nodes(acceptances, limit)


class HostTreeBuilder:
    """Builds token trees from rows' host trees; keeps what depends only on the shape of a row's tree."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shapes: dict[tuple[int, ...], _Shape] = {}

    def build(self, trees: Sequence[HostTree]) -> TokenTree:
        """``[B, N]``; smaller rows are padded with children of the root that are not valid."""
        if len(trees) > 1:
            return self._padded(trees, max(len(tree.tokens) for tree in trees))
        (tree,) = trees
        tokens, sources = torch.tensor([[tree.tokens], [tree.sources]], device=self.device)
        acceptance = torch.tensor([tree.acceptance], device=self.device)
        return self._shape(tree.parents).tree.fill(tokens, sources, acceptance)

    def _shape(self, parents: Sequence[int]) -> "_Shape":
        key = tuple(parents)
        if key not in self.shapes:
            if len(self.shapes) >= MAX_SHAPES:
                self.shapes.clear()
            tree = StaticTree(parents, self.device)
            self.shapes[key] = _Shape(tree, tree.depth[0].tolist(), tree.ancestors[0].tolist())
        return self.shapes[key]

    def _padded(self, trees: Sequence[HostTree], nodes: int) -> TokenTree:
        words = -(-nodes // 64)
        tokens, parents, depths, bits, acceptance, sources, valid = [], [], [], [], [], [], []
        for tree in trees:
            shape, padding = self._shape(tree.parents), nodes - len(tree.tokens)
            tokens.append(tree.tokens + [0] * padding)
            parents.append(tree.parents + [0] * padding)
            depths.append(shape.depth + [1] * padding)
            acceptance.append(tree.acceptance + [0.0] * padding)
            sources.append(tree.sources + [0] * padding)
            valid.append([True] * len(tree.tokens) + [False] * padding)
            zeros = [0] * (words - len(shape.ancestors[0]))
            bits.append([row + zeros for row in shape.ancestors] + [[1] + [0] * (words - 1)] * padding)

        def tensor(values: Sequence[Sequence[float]] | Sequence[Sequence[Sequence[int]]], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return TokenTree(
            tensor(tokens, torch.int64),
            tensor(parents, torch.int32),
            tensor(depths, torch.int32),
            tensor(bits, torch.int64),
            tensor(valid, torch.bool),
            source=tensor(sources, torch.int64),
            acceptance=tensor(acceptance, torch.float32),
        )


@dataclass(frozen=True)
class _Shape:
    """The shape of one row's tree: filled directly for one row, padded and stacked for several.

    depth: of each node.
    ancestors: of each node, the words of its bitset.
    """

    tree: StaticTree
    depth: list[int]
    ancestors: list[list[int]]
