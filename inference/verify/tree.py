"""Token trees: their tensors and draws, trees of fixed shape, and tree files.

Shape letters: B rows, N nodes (root included), W 64-bit words, D depth of the deepest node, A = D + 1, K draws of a
node, R rows of q, V vocabulary, Vq that of q.
"""

import ast
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.common.files import parse_json, read_text
from draftsmith.kernels.tree_attention import ancestor_mask

Ranks = tuple[int, ...]
MAX_PARTS = 256  # of a tree of fixed shape, kept
MAX_NODES = 4096  # of a tree file: every node is a row of the target's logits
_MAX_TEXT = 1 << 20  # characters of nested tuples; Python's parser needs a hundred times as much memory


@dataclass(frozen=True)
class Draws:
    """The draws at each node, in the order in which they are tested, with their distributions (algorithms.md §2).

    Several draws of a node may lead to one child: merged trees keep each source's draw. Neither the order nor the
    number of a node's draws may depend on the value of a draw that is tested later (C2).

    kind: ``[B, N, K]`` int8, as in :mod:`draftsmith.kernels.multi_step`: ``ONE_HOT`` (deterministic), ``IID``, or
        ``WITHOUT_REPLACEMENT`` of the node's earlier draws from the same row of q.
    ids: ``[B or 1, R or 1, Vq]`` int64 the target's token that each entry of ``q`` stands for, each at most once, −1
        for padding of probability 0; None if they are the target's vocabulary (Vq = V).
    """

    child: Tensor  # [B, N, K] int64, the child node of each draw; −1 after a node's last draw
    kind: Tensor
    q_row: Tensor  # [B, N, K] int64, row of q; unused for one-hot draws
    q: Tensor | None = None  # [B, R, Vq] float32, the distributions drawn from; None if all draws are one-hot
    ids: Tensor | None = None


@dataclass(frozen=True)
class TokenTree:
    """Drafted tokens after each row's root. Parents come before their children; the root is node 0.

    draws: for sampling; None for a deterministic tree, whose nodes are one-hot draws of their parents, in node order.
    source: ``[B, N]`` int64, a bit for each of the drafter's ``sources`` that proposed the node; 0 at the root and at
        padding.
    acceptance: ``[B, N]`` float32, estimated probability that the node and all its ancestors are accepted: 1 at the
        root, no more than the parent's elsewhere. Used only to choose the nodes that are verified.
    """

    tokens: Tensor  # [B, N] int64; the root is the last committed token, whose K/V is not cached yet
    parent: Tensor  # [B, N] int32, −1 at the root
    depth: Tensor  # [B, N] int32
    ancestors: Tensor  # [B, N, W] int64 bitsets, a node itself included
    valid: Tensor  # [B, N] bool, False at padding, which is never accepted
    mask: Tensor | None = None  # [B, N, N] bool, ancestors unpacked, if the drafter has computed it
    draws: Draws | None = None
    static: "StaticTree | None" = None  # the tree of fixed shape that was filled, if any
    source: Tensor | None = None
    acceptance: Tensor | None = None


def one_hot_draws(parent: Tensor, valid: Tensor, max_children: int) -> Draws:
    """Every node as a one-hot draw of its parent, in node order; padding is no draw. Parents and ``valid`` are a
    :class:`TokenTree`'s; K = ``max_children`` of any node."""
    nodes = parent.shape[1]
    numbers = torch.arange(nodes, device=parent.device)
    columns = max_children + 1  # the last one is cut off
    above = torch.where(valid, parent.long(), -1)
    siblings = (above[:, :, None] == above[:, None, :]) & (above >= 0)[:, :, None]
    turn = (siblings & (numbers[None, :, None] > numbers[None, None, :])).sum(-1)  # number of earlier siblings
    child = torch.full((*parent.shape, columns), -1, dtype=torch.int64, device=parent.device).flatten(1)
    place = torch.where(above >= 0, above * columns + turn.clamp(max=max_children), nodes * columns - 1)
    child.scatter_(1, place, torch.where(above >= 0, numbers, -1))
    child = child.unflatten(1, (nodes, columns))[..., :max_children]
    return Draws(child, torch.zeros_like(child, dtype=torch.int8), torch.zeros_like(child))


def bitsets(parent: Sequence[int]) -> Tensor:
    """Ancestor bitsets ``[N, W]`` int64 of a tree given by its parents, each node itself included."""
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
    """A tree of ranks: node ``paths[i]`` takes at depth j the ``paths[i][j]``-th best token.

    The root (the empty path) is implied. Nodes are in depth-first order, best rank first, so that the chain of top-1
    tokens is nodes 0, 1, 2, …, and accepting it moves nothing in the cache.
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


def chain(depth: int) -> Topology:
    """A tree of one path: the top-1 token of each depth."""
    return Topology(tuple((0,) * d for d in range(1, depth + 1)))


def product(sizes: Sequence[int]) -> Topology:
    """The dense tree whose nodes of depth d have the ``sizes[d]`` likeliest tokens as children: Σ_k Π_{i ≤ k} s_i nodes
    and the root (Medusa, arXiv 2401.10774 §2.1.2)."""
    levels = [itertools.product(*map(range, sizes[:depth])) for depth in range(1, len(sizes) + 1)]
    return Topology(tuple(itertools.chain.from_iterable(levels)))


class StaticTree:
    """A tree of fixed shape on a device; only the tokens change from step to step.

    Args:
        parents: of each node, −1 at the root (node 0); parents come before their children.
        acceptances: probabilities of all nodes, the root included, if these never change, either.
    """

    def __init__(
        self, parents: Sequence[int], device: torch.device, acceptances: Sequence[float] | None = None
    ) -> None:
        self.acceptances = acceptances
        parent = list(parents)
        depth = [0]
        for above in parent[1:]:
            depth.append(depth[above] + 1)
        self.parent = torch.tensor(parent, dtype=torch.int32, device=device)[None]
        self.depth = torch.tensor([depth], dtype=torch.int32, device=device)
        self.ancestors = bitsets(parent).to(device)[None]
        self.valid = torch.ones(1, len(parent), dtype=torch.bool, device=device)
        self.mask = ancestor_mask(self.ancestors, len(parent))
        max_children = max((parent.count(node) for node in range(len(parent))), default=0)
        self.draws = one_hot_draws(self.parent, self.valid, max_children)
        self.parts: dict[tuple[int, ...], StaticTree] = {}
        self.of_count: dict[int, tuple[StaticTree, Tensor]] = {}

    def likeliest(self, count: int) -> "tuple[StaticTree, Tensor]":
        """The tree of the ``count`` likeliest nodes, if their acceptance probabilities never change, and their numbers
        ``[count]`` int64; made at the first call."""
        if count not in self.of_count:
            assert self.acceptances is not None
            # As stored, float32; of equal ones the lower number, that of a parent, first.
            stored = torch.tensor(self.acceptances).tolist()
            nodes = sorted(sorted(range(len(stored)), key=lambda node: -stored[node])[:count])
            self.of_count[count] = self.part(nodes), torch.tensor(nodes, device=self.parent.device)
        return self.of_count[count]

    def part(self, nodes: Sequence[int]) -> "StaticTree":
        """The tree of some of its nodes, ascending, parents included; the latest ones are kept."""
        key = tuple(nodes)
        if key not in self.parts:
            if len(self.parts) >= MAX_PARTS:
                self.parts.clear()
            number = {node: place for place, node in enumerate(nodes)}
            above = self.parent[0].tolist()
            parents = [number.get(above[node], -1) for node in nodes]
            self.parts[key] = StaticTree(parents, self.parent.device)
        return self.parts[key]

    def fill(self, tokens: Tensor, source: Tensor | None = None, acceptance: Tensor | None = None) -> TokenTree:
        """The tree with these tokens, sources and acceptance probabilities, each ``[B, N]``; the rest are views."""
        rows = tokens.shape[0]
        parts: Sequence[Tensor] = (self.parent, self.depth, self.ancestors, self.valid, self.mask)
        draws = self.draws
        if rows > 1:
            draws = Draws(*(part.expand(rows, -1, -1) for part in (draws.child, draws.kind, draws.q_row)))
            parts = [part.expand(rows, *part.shape[1:]) for part in parts]
        parent, depth, ancestors, valid, mask = parts
        return TokenTree(tokens, parent, depth, ancestors, valid, mask, draws, self, source, acceptance)


def likeliest(tree: TokenTree, acceptance: Tensor, count: int, fixed: bool = False) -> tuple[TokenTree, Tensor]:
    """The tree of each row's ``count`` likeliest nodes.

    Args:
        tree: deterministic.
        acceptance: ``[B, N]``, no more than the parent's; of equal ones the lower number counts more, so that a node is
            never without its parent.
        fixed: the host reads nothing, as in steps that a CUDA graph holds.

    Returns:
        The tree, with these probabilities; ``[B, count]`` int64, the number in ``tree`` of each of its nodes.
    """
    if fixed and tree.static is not None and tree.static.acceptances is not None:
        part, nodes = tree.static.likeliest(count)
        source = None if tree.source is None else tree.source.index_select(1, nodes)
        chosen = part.fill(tree.tokens.index_select(1, nodes), source, acceptance.index_select(1, nodes))
        return chosen, nodes.expand(len(tree.tokens), -1)
    order = acceptance.argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values
    order = order.expand(len(tree.tokens), -1)
    tokens, acceptance = tree.tokens.gather(1, order), acceptance.expand(len(order), -1).gather(1, order)
    source = None if tree.source is None else tree.source.gather(1, order)
    if not fixed and tree.static is not None and (len(order) == 1 or bool((order == order[:1]).all())):
        return tree.static.part(order[0].tolist()).fill(tokens, source, acceptance), order
    depth, valid = tree.depth.gather(1, order), tree.valid.gather(1, order)
    above = tree.parent.gather(1, order).long().clamp(min=0)
    parent = torch.where(valid, torch.searchsorted(order, above), 0).int()
    parent[:, 0].fill_(-1)
    mask = ancestor_mask(tree.ancestors, tree.tokens.shape[1]) if tree.mask is None else tree.mask
    rows, columns = order[:, :, None].expand(-1, -1, mask.shape[2]), order[:, None].expand(-1, count, -1)
    mask = mask.gather(1, rows).gather(2, columns)
    return TokenTree(tokens, parent, depth, packed(mask), valid, mask, source=source, acceptance=acceptance), order


def packed(mask: Tensor) -> Tensor:
    """Bitsets ``[B, N, W]`` int64 of ``[B, N, M]`` bool."""
    bits = torch.ones(1, dtype=torch.int64, device=mask.device) << torch.arange(64, device=mask.device)
    return torch.stack([(word * bits[: word.shape[-1]]).sum(-1) for word in mask.split(64, -1)], -1)


def read_tree(path: Path) -> Topology:
    """Read a tree of at most ``MAX_NODES`` nodes: ``tree.json``, a list of rank paths (Medusa's ``medusa_choices``),
    nested tuples as text (vLLM's former ``speculative_token_tree``), or ``{"product": [s_1, s_2, …]}``."""
    return _tree_in(path, read_content(path))


def read_trees(path: Path, count: int) -> tuple[Topology, ...]:
    """Read the trees of ``count`` drafters: ``{"parts": [[[0], [0, 0]], …]}``, a list of rank paths for each of them,
    or a file of :func:`read_tree`, whose tree all of them have."""
    content = read_content(path)
    if not isinstance(content, dict) or "parts" not in content:
        return (_tree_in(path, content),) * count
    parts = content["parts"]
    if not isinstance(parts, list) or len(parts) != count:
        given = f"has {len(parts)} trees" if isinstance(parts, list) else "is not a list of trees"
        raise ValueError(f"{path}: 'parts' {given}, and the drafter has {count} SSMs; calibrate it again")
    return tuple(_tree_in(path, part) for part in parts)


def read_content(path: Path) -> Any:
    """What a tree's file holds: a JSON value or a Python literal. The functions that read one raise FileNotFoundError
    if it is missing, and ValueError if it holds neither or something else than they read."""
    try:
        text = read_text(path, "tree")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such tree; make one with inference/calibrate.py") from None
    try:
        return parse_json(text, str(path))
    except ValueError:
        try:
            return ast.literal_eval(text.strip()) if len(text) <= _MAX_TEXT else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(f'{path}: neither JSON ({{"paths": [[0], [0, 0]]}}) nor a list of tuples') from None


def _tree_in(path: Path, content: Any) -> Topology:
    if isinstance(content, dict) and "product" in content:
        return _product(path, content["product"])
    paths = content.get("paths") if isinstance(content, dict) else content
    if isinstance(paths, list | tuple) and len(paths) >= MAX_NODES:
        raise ValueError(f"{path}: a tree of {len(paths) + 1} nodes; at most {MAX_NODES} can be verified in a step")
    if not isinstance(paths, list | tuple) or not all(
        isinstance(one, list | tuple) and all(type(rank) is int for rank in one) for one in paths
    ):
        raise ValueError(f"{path}: a tree is a list of rank paths such as [[0], [0, 0], [1]]")
    return _topology(path, paths)


def _product(path: Path, sizes: Any) -> Topology:
    if not isinstance(sizes, list | tuple) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"{path}: 'product' is a list of numbers of children by depth, such as [4, 2, 2]")
    if (count := 1 + sum(itertools.accumulate(sizes, operator.mul))) > MAX_NODES:
        raise ValueError(f"{path}: a tree of {count} nodes; at most {MAX_NODES} can be verified in a step")
    return product(sizes)


def _topology(path: Path, paths: Sequence[Sequence[int]]) -> Topology:
    try:
        return Topology(tuple(tuple(one) for one in paths if one))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def chosen_at_load(path: Path) -> bool:
    """Whether a tree's nodes are chosen from its candidates when the drafter is loaded, by what steps cost there: the
    file has ``at_load``, as those of draft heads do."""
    content = read_content(path)
    return isinstance(content, dict) and content.get("at_load") is True


def calibrated_on(path: Path) -> str:
    """The device by whose step costs a tree was chosen; empty where the file does not say, or each step chooses."""
    content = read_content(path)
    calibration = content.get("calibration") if isinstance(content, dict) and not content.get("at_load") else None
    return str(calibration.get("device", "")) if isinstance(calibration, dict) else ""


def read_candidates(path: Path) -> tuple[Topology, list[float]]:
    """Read the paths that a merge may choose from, and their acceptance probabilities from calibration:
    ``calibration.candidates`` of ``tree.json``; without them the tree's own paths, with probability ½ per depth."""
    topology, rates = read_tree(path), _calibrated_rates(path)
    if not rates:
        return topology, [0.5 ** len(entry) for entry in topology.paths]
    topology = _topology(path, list(rates))
    return topology, [rates[entry] for entry in topology.paths]


def read_weighed(path: Path) -> tuple[Topology, list[float] | None]:
    """Read a tree, and the acceptance probabilities of its paths from calibration, if it has one for each of them."""
    topology, rates = read_tree(path), _calibrated_rates(path)
    known = all(entry in rates for entry in topology.paths)
    return topology, [rates[entry] for entry in topology.paths] if known else None


def _calibrated_rates(path: Path) -> dict[Ranks, float]:
    """The acceptance probability of each path of ``calibration.candidates`` in ``tree.json``; none without it."""
    content = read_content(path)
    calibration = content.get("calibration") if isinstance(content, dict) else None
    entries = calibration.get("candidates") if isinstance(calibration, dict) else None
    rates: dict[Ranks, float] = {}
    for entry in entries if isinstance(entries, list) else []:
        ranks, rate = (entry.get("path"), entry.get("rate")) if isinstance(entry, dict) else (None, None)
        if not (isinstance(ranks, list) and all(type(r) is int for r in ranks) and isinstance(rate, int | float)):
            raise ValueError(f'{path}: a candidate is {entry!r}, not {{"path": [0, 1], "rate": 0.4}}')
        rates[tuple(ranks)] = float(rate)
    return rates
