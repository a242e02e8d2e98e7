"""Token trees: what a drafter proposes and the verifier walks.

Shape letters: B batch, N nodes (root included), W 64-bit words, D depth of the deepest node.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.common.files import parse_json, read_text
from draftsmith.kernels.tree_attention import ancestor_mask

Ranks = tuple[int, ...]
MOST_NODES = 4096  # of a tree that is read: every node is a row of the target's logits
_MOST_TEXT = 1 << 20  # characters of nested tuples; Python's parser needs a hundred times as much memory


@dataclass(frozen=True)
class Draws:
    """Which tokens were drawn at each node, in the order they are to be tested, and from which law (ALGORITHMS §2).

    Several draws of a node may lead to one child: merged trees keep each source's draw. The order, and which draws of a
    node are there, must not depend on the value of a draw that is tested later (C2).

    child: ``[B, N, K]`` int64 the node a draw leads to; −1 behind a node's last draw.
    kind: ``[B, N, K]`` int8, as :mod:`draftsmith.kernels.verify` names them: ``ONE_HOT`` (the drafter had no choice),
        ``IID``, or ``WITHOUT_REPLACEMENT`` of what the node drew before from the same law.
    law: ``[B, N, K]`` int64 row of ``q``; unused for one-hot draws.
    q: ``[B, R, Vq]`` float32 the processed laws drawn from; None if all are one-hot.
    ids: ``[B or 1, R or 1, Vq]`` int64 the target's token that each entry of ``q`` stands for, each at most once; None
        if they are the target's vocabulary (Vq = V).
    """

    child: Tensor
    kind: Tensor
    law: Tensor
    q: Tensor | None = None
    ids: Tensor | None = None


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens behind each row's root. Parents come before their children; the root is node 0.

    tokens: ``[B, N]`` int64; the root is the last token the target has committed to, whose K/V is not cached yet.
    parent: ``[B, N]`` int32, −1 at the root.
    depth: ``[B, N]`` int32.
    ancestors: ``[B, N, W]`` int64 bitsets, a node itself included.
    valid: ``[B, N]`` bool, False at padding, which is never accepted whatever its token id.
    mask: ``[B, N, N]`` bool, ``ancestors`` unpacked, where the drafter has it at hand.
    draws: how the tokens were chosen, for sampling; None if nothing was left to chance: every node is then a one-hot
        draw of its parent's, in the order of the nodes.
    static: the tree of fixed shape that was filled, if it was one.
    source: ``[B, N]`` int64, a bit for each of the drafter's ``sources`` that proposed the node; 0 at the root and at
        padding.
    chance: ``[B, N]`` float32 how likely the drafter takes each node to be accepted, all those above it included: 1 at
        the root, no more than its parent's elsewhere. By it a merged tree is cut to what pays; it decides nothing else.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    ancestors: Tensor
    valid: Tensor
    mask: Tensor | None = None
    draws: Draws | None = None
    static: "StaticTree | None" = None
    source: Tensor | None = None
    chance: Tensor | None = None


def one_hot_draws(parent: Tensor, valid: Tensor, most: int) -> Draws:
    """Every node as a one-hot draw of its parent's, in the order of the nodes.

    Args:
        parent: ``[B, N]`` int32, −1 at the root.
        valid: ``[B, N]`` bool; padding is no draw.
        most: children that a node has at most (K).
    """
    nodes = parent.shape[1]
    numbers = torch.arange(nodes, device=parent.device)
    above = torch.where(valid, parent.long(), -1)
    siblings = (above[:, :, None] == above[:, None, :]) & (above >= 0)[:, :, None]
    turn = (siblings & (numbers[None, :, None] > numbers[None, None, :])).sum(-1)  # how many came before
    child = torch.full((*parent.shape, most + 1), -1, dtype=torch.int64, device=parent.device).flatten(1)
    place = torch.where(above >= 0, above * (most + 1) + turn.clamp(max=most), nodes * (most + 1) - 1)
    child.scatter_(1, place, torch.where(above >= 0, numbers, -1))
    child = child.unflatten(1, (nodes, most + 1))[..., :most]
    return Draws(child, torch.zeros_like(child, dtype=torch.int8), torch.zeros_like(child))


def bitsets(parent: Sequence[int]) -> Tensor:
    """Ancestor bitsets of a tree given by parents: ``[N, W]`` int64, a node itself included."""
    words = -(-len(parent) // 64)
    rows: list[list[int]] = []
    for node, above in enumerate(parent):
        row = list(rows[above]) if above >= 0 else [0] * words
        row[node // 64] |= 1 << (node % 64)
        rows.append(row)
    signed = [[word - (1 << 64) if word >> 63 else word for word in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int64)


@dataclass(frozen=True)
class Topology:
    """A tree of ranks whose shape is fixed: node ``paths[i]`` takes at depth j the ``paths[i][j]``-th best token.

    The root (an empty path) is implied. Nodes are kept in depth-first order, best rank first, so that the chain of
    top-1 tokens is nodes 0, 1, 2, …, and accepting it moves nothing in the cache.
    """

    paths: tuple[Ranks, ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        if len(known) != len(self.paths) + 1:
            raise ValueError("tree: a path is given twice, or is empty (the root is implied)")
        for path in self.paths:
            if min(path) < 0:
                raise ValueError(f"tree: path {list(path)} holds a negative rank")
            if path[:-1] not in known:
                raise ValueError(f"tree: path {list(path)} has no parent; add {list(path[:-1])}")
        object.__setattr__(self, "paths", tuple(sorted(self.paths)))

    @property
    def num_nodes(self) -> int:
        return len(self.paths) + 1

    @property
    def max_depth(self) -> int:
        return max((len(path) for path in self.paths), default=0)

    @property
    def max_rank(self) -> int:
        return max((max(path) for path in self.paths), default=-1)

    @property
    def parents(self) -> list[int]:
        index: dict[Ranks, int] = {(): 0} | {path: i for i, path in enumerate(self.paths, 1)}
        return [-1] + [index[path[:-1]] for path in self.paths]

    @property
    def depths(self) -> list[int]:
        return [0] + [len(path) for path in self.paths]


def chain(depth: int) -> Topology:
    """The tree of one path: the top-1 token of each depth."""
    return Topology(tuple((0,) * d for d in range(1, depth + 1)))


class StaticTree:
    """A tree of fixed shape on a device; only the tokens change from step to step.

    parents: of each node, −1 at the root (node 0), parents before their children.
    max_depth: of the drafter, for which A = max_depth + 1, if its trees may be deeper than this one.

    paths: ``[N, A]`` int64 the node numbers on the way to each node by depth, the root first; entry d behind a node's
        depth is d.
    above: ``[1, N]`` int64 parents, 0 at the root.
    levels: ``[1, N]`` int64 depths.
    others: ``[1, N, N]`` bool, row i True at i and its ancestors but the root.
    """

    def __init__(self, parents: Sequence[int], device: torch.device, max_depth: int = 0) -> None:
        parent = list(parents)
        paths: list[list[int]] = [[0]]
        for node in range(1, len(parent)):
            paths.append([*paths[parent[node]], node])
        self.parent = torch.tensor(parent, dtype=torch.int32, device=device)[None]
        self.depth = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32, device=device)[None]
        self.ancestors = bitsets(parent).to(device)[None]
        self.valid = torch.ones(1, len(parent), dtype=torch.bool, device=device)
        self.mask = ancestor_mask(self.ancestors, len(parent))
        most = max((parent.count(node) for node in range(len(parent))), default=0)
        self.draws = one_hot_draws(self.parent, self.valid, most)
        deepest = max(max_depth + 1, *map(len, paths))
        self.paths = torch.tensor([path + list(range(len(path), deepest)) for path in paths], device=device)
        self.above, self.levels = self.parent.clamp(min=0).long(), self.depth.long()
        self.others = self.mask.clone()
        self.others[..., 0] = False

    def fill(self, tokens: Tensor, source: Tensor | None = None, chance: Tensor | None = None) -> TokenTree:
        """The tree with these tokens ``[B, N]`` (views, nothing is copied)."""
        rows = tokens.shape[0]
        parts = (self.parent, self.depth, self.ancestors, self.valid, self.mask)
        draws = self.draws
        if rows > 1:
            draws = Draws(*(part.expand(rows, -1, -1) for part in (draws.child, draws.kind, draws.law)))
            parts = tuple(part.expand(rows, *part.shape[1:]) for part in parts)
        return TokenTree(tokens, *parts, draws, self, source, chance)


def read_tree(path: Path) -> Topology:
    """A tree from ``tree.json``, a list of rank paths (Medusa's ``medusa_choices``), or nested tuples as text (vLLM's
    former ``speculative_token_tree``).

    Raises:
        FileNotFoundError, ValueError: it is missing, no tree, or one of more than ``MOST_NODES`` nodes.
    """
    try:
        text = read_text(path, "tree")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such tree; make one with inference/calibrate.py") from None
    try:
        content = parse_json(text, str(path))
    except ValueError:
        try:
            content = ast.literal_eval(text.strip()) if len(text) <= _MOST_TEXT else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(f'{path}: neither JSON ({{"paths": [[0], [0, 0]]}}) nor a list of tuples') from None
    paths = content.get("paths") if isinstance(content, dict) else content
    if isinstance(paths, list | tuple) and len(paths) >= MOST_NODES:
        raise ValueError(f"{path}: a tree of {len(paths) + 1} nodes; at most {MOST_NODES} can be verified in a step")
    if not isinstance(paths, list | tuple) or not all(
        isinstance(one, list | tuple) and all(type(rank) is int for rank in one) for one in paths
    ):
        raise ValueError(f"{path}: a tree is a list of rank paths such as [[0], [0, 0], [1]]")
    return _topology(path, paths)


def _topology(path: Path, paths: Sequence[Sequence[int]]) -> Topology:
    try:
        return Topology(tuple(tuple(one) for one in paths if one))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_candidates(path: Path) -> tuple[Topology, list[float]]:
    """The paths that a merge may choose from, and how often each came true in calibration: those that
    ``tree.json`` lists as ``calibration.candidates``; else the tree's own, taken to be right every other time at each
    depth.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_tree`.
    """
    topology = read_tree(path)
    try:
        content = parse_json(read_text(path, "tree"), str(path))
    except ValueError:
        content = None  # nested tuples
    calibration = content.get("calibration") if isinstance(content, dict) else None
    listed = calibration.get("candidates") if isinstance(calibration, dict) else None
    if not isinstance(listed, list):
        return topology, [0.5 ** len(one) for one in topology.paths]
    rates: dict[Ranks, float] = {}
    for one in listed:
        ranks, rate = (one.get("path"), one.get("rate")) if isinstance(one, dict) else (None, None)
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks) or not isinstance(rate, float):
            raise ValueError(f'{path}: a candidate is {one!r}, not {{"path": [0, 1], "rate": 0.4}}')
        rates[tuple(ranks)] = rate
    topology = _topology(path, list(rates))
    return topology, [rates[one] for one in topology.paths]
