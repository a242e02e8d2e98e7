"""Token trees made on the host, for eager steps on a CPU: a tensor operation takes longer there than a loop over the
few nodes of a tree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.inference.tree import StaticTree, TokenTree

MOST_SHAPES = 256  # of trees that are kept


@dataclass
class HostTree:
    """One row's tree; node 0 is the root, parents come before their children.

    sources: of each node, a bit for each source that proposed it; 0 at the root.
    chance: how likely each node is to be accepted; no more than its parent's.
    """

    tokens: list[int]
    parents: list[int]
    sources: list[int]
    chance: list[float]

    def kept(self, nodes: Sequence[int]) -> "HostTree":
        """Some of its nodes alone, in the given order, parents before their children."""
        number = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        parents = [number[self.parents[node]] for node in nodes]
        chance = [self.chance[node] for node in nodes]
        tokens, sources = ([part[node] for node in nodes] for part in (self.tokens, self.sources))
        return HostTree(tokens, parents, sources, chance)


def paying(trees: Sequence[HostTree], times: Sequence[float], together: Sequence[bool] | None) -> list[list[int]]:
    """Of each row's tree the numbers of the nodes to keep, in order: its likeliest ones, as many as make the most
    expected tokens per time.

    Args:
        times: of a step with 1, 2, … nodes; no more are kept.
        together: the same number of nodes for every row, by the tokens of the rows that are True here (have a text);
            None: each row's own number, which does not depend on the others.
    """
    # A parent is at least as likely as its child, and stands before it among equals.
    ranked = [
        sorted(range(len(tree.tokens)), key=lambda node, of=tree.chance: -of[node])[: len(times)] for tree in trees
    ]
    chances = [[tree.chance[node] for node in order] for tree, order in zip(trees, ranked, strict=True)]
    if together is None:
        counts = [_best_count([each], times) for each in chances]
    else:
        some = [each for each, counts_in in zip(chances, together, strict=True) if counts_in]
        counts = [_best_count(some, times)] * len(trees)
    return [sorted(order[:count]) for order, count in zip(ranked, counts, strict=True)]


def _best_count(chances: Sequence[Sequence[float]], times: Sequence[float]) -> int:
    expected, best, count = 0.0, 0.0, 1
    for number, time in enumerate(times[: max(map(len, chances), default=0)]):
        expected += sum(each[number] for each in chances if number < len(each))
        if expected / time > best:
            best, count = expected / time, number + 1
    return count


class HostTrees:
    """Makes token trees of rows' trees; what depends on the shape of a single row's tree alone is kept.

    Args:
        max_depth: of any tree.
    """

    def __init__(self, device: torch.device, max_depth: int) -> None:
        self.device, self.max_depth = device, max_depth
        self.shapes: dict[tuple[int, ...], _Shape] = {}

    def make(self, trees: Sequence[HostTree]) -> TokenTree:
        """``[B, N]``; rows with fewer nodes than others are padded with children of the root that are not valid."""
        if len(trees) > 1:
            return self._padded(trees, max(len(tree.tokens) for tree in trees))
        (tree,) = trees
        tokens, sources = torch.tensor([[tree.tokens], [tree.sources]], device=self.device)
        chance = torch.tensor([tree.chance], device=self.device)
        return self._shape(tree.parents).tree.fill(tokens, sources, chance)

    def _shape(self, parents: Sequence[int]) -> "_Shape":
        key = tuple(parents)
        if key not in self.shapes:
            if len(self.shapes) >= MOST_SHAPES:
                self.shapes.clear()
            tree = StaticTree(parents, self.device, self.max_depth)
            self.shapes[key] = _Shape(tree, tree.depth[0].tolist(), tree.ancestors[0].tolist())
        return self.shapes[key]

    def _padded(self, trees: Sequence[HostTree], most: int) -> TokenTree:
        words = -(-most // 64)
        tokens, parents, depths, bits, chance, sources, valid = [], [], [], [], [], [], []
        for tree in trees:
            shape, padding = self._shape(tree.parents), most - len(tree.tokens)
            tokens.append(tree.tokens + [0] * padding)
            parents.append(tree.parents + [0] * padding)
            depths.append(shape.depth + [1] * padding)
            chance.append(tree.chance + [0.0] * padding)
            sources.append(tree.sources + [0] * padding)
            valid.append([True] * len(tree.tokens) + [False] * padding)
            more = [0] * (words - len(shape.ancestors[0]))
            bits.append([each + more for each in shape.ancestors] + [[1] + [0] * (words - 1)] * padding)

        def made(values: Sequence[Sequence[float]] | Sequence[Sequence[Sequence[int]]], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return TokenTree(
            made(tokens, torch.int64), made(parents, torch.int32), made(depths, torch.int32), made(bits, torch.int64),
            made(valid, torch.bool), source=made(sources, torch.int64), chance=made(chance, torch.float32),
        )  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    """A tree's shape: for one row a tree to be filled, for several what is padded and put together.

    depth: of each node.
    ancestors: of each node its bitset's words.
    """

    tree: StaticTree
    depth: list[int]
    ancestors: list[list[int]]
