"""EAGLE-2's dynamic tree: in every step, the nodes that the drafter itself finds likeliest (arXiv 2406.16858 §4).

The value of a node is Σ log q along its path, an estimate of the log probability that the target accepts it.

    expansion    level 1 is the root's k likeliest tokens; of each level, the k nodes of highest value, its frontier,
                 are run in one forward pass, and each proposes its k likeliest tokens
    re-ranking   of the candidates of all levels, the N − 1 of highest value are the tree

Candidates are numbered level by level, and of equal values the lower number counts more. So a child, whose value is at
most its parent's, is never chosen without it, also where log q = 0: the tree is connected, and no other connected
subset of the candidates has a larger Σ exp(value). The tree is a function of the text: its nodes are one-hot draws,
and verification is exact at any temperature.

All shapes are fixed, and nothing synchronises with the host, so that a CUDA graph can capture the growth; except where
a step has a budget: then it ends at the level beyond which another does not pay.

Shape letters: B rows, k tokens of each node and nodes of a frontier, n nodes of a pass (1 or k), D depth, N nodes, M
candidates (root included), R nodes run so far, W 64-bit words, d hidden width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.inference.engine.protocol import State
from draftsmith.inference.verify.tree import MAX_NODES, TokenTree, read_content
from draftsmith.kernels.grow import Candidates, Level, grow_level, select_tree


@dataclass(frozen=True)
class DynamicShape:
    """The size of a dynamic tree; a ValueError if it is no whole number above 0, or there are not so many
    candidates."""

    top_k: int  # tokens that a node proposes, and nodes of a level that are run (k)
    depth: int  # of the deepest node (D): the root's pass and D − 1 passes of k nodes
    nodes: int  # of the tree that is verified, the root included (N)

    def __post_init__(self) -> None:
        for name, least in (("top_k", 1), ("depth", 1), ("nodes", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"dynamic tree: {name} is {value!r}; it has to be a whole number of at least {least}")
        if self.nodes > self.candidates:
            raise ValueError(
                f"dynamic tree: nodes is {self.nodes}, but with top_k {self.top_k} and depth {self.depth} there are "
                f"only {self.candidates}, the root included"
            )
        if max(self.nodes, self.runs) > MAX_NODES:
            raise ValueError(
                f"dynamic tree: {self.nodes} nodes, of which at most {MAX_NODES} can be verified in a step, and "
                f"{self.runs} to run, of which at most {MAX_NODES} can be"
            )

    @property
    def candidates(self) -> int:
        """M, the root included."""
        return 1 + self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def runs(self) -> int:
        """Number of nodes that are run, the root excluded: the slots that they need after the root's."""
        return (self.depth - 1) * self.top_k

    @property
    def branching(self) -> int:
        """Children of a node of the tree, at most."""
        return min(self.top_k, self.nodes - 1)

    def check_outputs(self, outputs: int, where: str = "") -> None:
        """Raise a ValueError, which begins with ``where``, if a drafter that chooses from ``outputs`` tokens cannot
        propose k."""
        if self.top_k > outputs:
            what = f"top_k is {self.top_k}, but the drafter chooses from {outputs} tokens"
            raise ValueError(f"{where}dynamic tree: {what}")


def read_dynamic(path: Path) -> DynamicShape | None:
    """The dynamic tree of a tree's file, ``{"dynamic": {"top_k": 10, "depth": 6, "nodes": 60}}``; None if it has
    none."""
    content = read_content(path)
    if not isinstance(content, dict) or "dynamic" not in content:
        return None
    given, names = content["dynamic"], tuple(DynamicShape.__dataclass_fields__)
    if not isinstance(given, dict) or given.keys() != set(names):
        raise ValueError(f'{path}: \'dynamic\' is {given!r}, not {{"top_k": 10, "depth": 6, "nodes": 60}}')
    try:
        return DynamicShape(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Frontier:
    """The k nodes of a level that are run together. Nodes that are run are numbered from 0, level by level; the root,
    whose pair is committed text, has no number."""

    tokens: Tensor  # [B, k] int64 ids of the target
    hidden: Tensor  # [B, k, d] what their parents' passes gave to continue with
    ancestors: Tensor  # [B, k, W] int64 bitsets over the numbers of nodes run, a node itself included
    depth: Tensor  # [B, k] int32 in the tree, all equal; 1 for the root's children
    first: int  # number of the first of them, (depth − 1) · k


@dataclass(frozen=True)
class Proposals:
    """What n nodes propose: each its k likeliest tokens, no token twice."""

    tokens: Tensor  # [B, n, k] int64 ids of the target
    log_q: Tensor  # [B, n, k] float32 log probabilities; −∞ and NaN: not a candidate
    hidden: Tensor  # [B, n, d] what the children of these nodes continue with


class DynamicTree:
    """Growth of dynamic trees of one shape."""

    def __init__(self, shape: DynamicShape, rows: int, device: torch.device) -> None:
        self.shape = shape
        k, nodes = shape.top_k, shape.nodes
        # The depth of every candidate, [M].
        counts = torch.tensor([1, k, *[k * k] * (shape.depth - 1)], device=device)
        levels = torch.arange(shape.depth + 1, dtype=torch.int32, device=device)
        self.depth = levels.repeat_interleave(counts)
        self.levels = levels[:, None, None].repeat(1, rows, k)  # of the nodes of each level
        self.zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.bits = own_bits(nodes, device)  # [N, W] of the tree's nodes
        self.run_bits = own_bits(max(shape.runs, 1), device)  # [R, W] of the nodes that are run
        self.no_bits = torch.zeros(rows, 1, self.run_bits.shape[1], dtype=torch.int64, device=device)
        self.root_values = self.zeros.float()

    def grow(self, state: State, root: Proposals, run: Callable[[Frontier], Proposals]) -> TokenTree:
        """Grow a tree after each row's root, from its proposals (n = 1): N nodes, or fewer if there are not so many
        candidates, without draws, with ``acceptance``; padding comes last. ``run`` is a forward pass of the next
        frontier (n = k), called D − 1 times, or less often if the step has a budget."""
        k, zeros, rows = self.shape.top_k, self.zeros, len(state.root)
        tokens, parents = (zeros.new_empty(rows, self.shape.candidates) for _ in range(2))
        candidates = Candidates(tokens, self.root_values.new_empty(tokens.shape), parents)
        level = Level(state.root[:, None], zeros, self.root_values, self.no_bits, zeros)
        proposals, count, budget = root, 1, state.budget  # candidates so far
        for depth in range(1, self.shape.depth + 1):
            first = (depth - 1) * k
            bits = self.run_bits[first : min(first + k, self.shape.runs)]
            level = grow_level(level, proposals.tokens, proposals.log_q, candidates, count, bits, first)
            count += proposals.tokens[0].numel()
            if depth == self.shape.depth:
                break
            if budget is not None:
                so_far = candidates.values[:, :count].exp()
                if not budget.another_level(state.source, so_far, self.depth[None, :count]):
                    break
            hidden = proposals.hidden.gather(1, level.above[..., None].expand(-1, -1, proposals.hidden.shape[2]))
            proposals = run(Frontier(level.tokens, hidden, level.ancestors, self.levels[depth], first))
        found = Candidates(*(each[:, :count] for each in candidates))
        bits = self.bits[: min(self.shape.nodes, count)]
        tokens, parent, depths, ancestors, valid, value = select_tree(found, self.depth, bits, self.shape.depth)
        return TokenTree(tokens, parent, depths, ancestors, valid, acceptance=value)


def own_bits(count: int, device: torch.device) -> Tensor:
    """``[count, W]`` int64, bit i in row i."""
    numbers = torch.arange(count, device=device)
    bits = torch.zeros(count, -(-count // 64), dtype=torch.int64, device=device)
    bits[numbers, numbers // 64] = torch.ones_like(numbers) << (numbers % 64)
    return bits
