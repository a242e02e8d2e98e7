"""Trees of drafters whose positions are independent given the text, as Medusa heads: fixed ones of ranks, and dynamic
ones, in every step the N − 1 likeliest prefixes of what they propose (best-first, as DDTree, arXiv 2604.12989).

Depth d has the same distribution q_d whatever tokens come before, so one pass gives the values of all paths: that of
the path of ranks (r_1, …, r_d) is Σ_i log q_i(r_i). A heap would pop the likeliest node, then add its next sibling and
its first child. No heap is needed: a path has at most the value of every path that is no longer and has no higher
rank at any depth. So it can be among the N − 1 likeliest only if these, itself included, are at most N − 1:

    Σ_{j ≤ d} Π_{i ≤ j} (r_i + 1) ≤ N − 1

The list of these *possible paths* is fixed with the tree's shape, and a step chooses N − 1 of them by their values.
They are numbered by depth, then by ranks, and of equal values the lower number counts more: so a node is never chosen
without its parent. All shapes are fixed, and nothing synchronises with the host. The tree is a function of the text:
its nodes are one-hot draws, and verification is exact at any temperature.

Shape letters: B rows, D depth, R ranks, N nodes, M possible paths, the root's included.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.inference.trees.dynamic import DynamicShape, own_bits, read_dynamic
from draftsmith.inference.verify.tree import (
    Ranks,
    StaticTree,
    TokenTree,
    Topology,
    read_candidates,
    read_content,
    read_weighed,
)
from draftsmith.kernels.grow import Candidates, select_tree

MAX_PATHS = 1 << 14  # possible paths: each step computes a value for each of them


@dataclass(frozen=True)
class Confidence:
    """What a drafter's probabilities are worth, as measured: a depth's token of rank r, of probability q, is accepted
    after those before it with a probability of about ``factor[r] · q ** power``.

    power: by depth, at least 0. factor: by depth and rank, above 0.
    """

    power: tuple[float, ...]
    factor: tuple[tuple[float, ...], ...]

    def check(self, shape: DynamicShape) -> None:
        """Raise a ValueError unless there is a number for each depth and rank of a tree, within its bounds."""
        factors = [each for row in self.factor for each in row]
        numbers = all(isinstance(each, int | float) for each in (*self.power, *factors))
        if not numbers or min(self.power, default=0) < 0 or min(factors, default=1) <= 0:
            raise ValueError("confidence: a power is a number of at least 0, and a factor one above 0")
        known = min(len(self.power), len(self.factor)), min(map(len, self.factor), default=0)
        if known[0] < shape.depth or known[1] < shape.top_k:
            raise ValueError(
                f"confidence: is of {known[0]} depths and {known[1]} ranks, but the dynamic tree has {shape.depth} "
                f"and {shape.top_k}; calibrate the drafter again, or leave 'confidence' out"
            )


def read_confidence(path: Path, shape: DynamicShape) -> Confidence | None:
    """``confidence`` of a tree's file, ``{"power": [1.0, …], "factor": [[1.0, …], …]}``, for a tree of this shape; None
    if it has none."""
    content = read_content(path)
    given = content.get("confidence") if isinstance(content, dict) else None
    if given is None:
        return None
    try:
        found = Confidence(tuple(given["power"]), tuple(map(tuple, given["factor"])))
        found.check(shape)
    except (TypeError, KeyError):
        raise ValueError(f'{path}: \'confidence\' is not {{"power": [1.0, …], "factor": [[1.0, …], …]}}') from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def possible_paths(shape: DynamicShape) -> list[Ranks]:
    """The paths that can be in a tree, the root's first, by depth, then by ranks.
    Raises ValueError: they are more than :data:`MAX_PATHS`."""
    found: list[Ranks] = [()]
    level: list[tuple[Ranks, int, int]] = [((), 1, 0)]  # path, Π up to its last depth, Σ of these
    for _ in range(shape.depth):
        level = [
            ((*path, rank), width * (rank + 1), total + width * (rank + 1))
            for path, width, total in level
            for rank in range(min(shape.top_k, (shape.nodes - 1 - total) // width))
        ]
        found += [path for path, _, _ in level]
        if len(found) > MAX_PATHS:
            raise ValueError(
                f"dynamic tree: with top_k {shape.top_k}, depth {shape.depth} and nodes {shape.nodes} there are more "
                f"than {MAX_PATHS} paths to choose from in each step; make one of them smaller"
            )
    return found


def deepest(shape: DynamicShape) -> DynamicShape:
    """The shape, if need be of fewer levels: of drafts of 16 tokens and 64 nodes, say, there are too many paths."""
    while shape.depth > 1:
        with suppress(ValueError):
            possible_paths(shape)
            break
        shape = replace(shape, depth=shape.depth - 1)
    return shape


Given = tuple[Topology | DynamicShape, list[float] | None, Confidence | None]


def read_independent(path: Path, merged: bool) -> Given:
    """Read the tree of a drafter whose positions are independent: a dynamic one's shape, which has precedence, and its
    confidence; or a fixed one, in a merge its candidates, and the acceptance probabilities of its paths."""
    shape = read_dynamic(path)
    if shape is not None:
        return shape, None, read_confidence(path, shape)
    # A merge chooses from more nodes than the calibrated tree has.
    topology, acceptances = read_candidates(path) if merged else read_weighed(path)
    return topology, acceptances, None


def check_tree(
    tree: Topology | DynamicShape, most: int, outputs: int, where: str = "", what: str = "draft heads"
) -> None:
    """Raise a ValueError unless ``most`` independent positions, which choose from ``outputs`` tokens, can fill a tree.
    ``where`` begins the message, in which the positions are ``what``."""
    depth = tree.depth if isinstance(tree, DynamicShape) else tree.max_depth
    if depth > most:
        raise ValueError(f"{where}the tree is {depth} deep, but there are {most} {what}")
    if isinstance(tree, DynamicShape):
        try:
            tree.check_outputs(outputs)
            possible_paths(tree)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
    elif tree.max_rank >= outputs:
        raise ValueError(f"{where}the tree asks for rank {tree.max_rank} of a vocabulary of {outputs}")


class IndependentTree:
    """Dynamic trees of one shape. Without a ``confidence`` a drafter's probabilities are taken as they are."""

    def __init__(self, shape: DynamicShape, device: torch.device, confidence: Confidence | None = None) -> None:
        self.shape, ranks, paths = shape, shape.top_k, possible_paths(shape)
        self.sizes = shape.nodes, shape.depth, ranks, shape.branching  # N, D, R, and children of a node, at most
        number = {path: place for place, path in enumerate(paths)}
        end = shape.depth * ranks  # the place of a 0, behind the log q of all depths and ranks
        places = [[d * ranks + path[d] if d < len(path) else end for path in paths] for d in range(shape.depth)]
        self.places = torch.tensor(places, device=device).flatten()  # [D · M]
        own = [(len(path) - 1) * ranks + path[-1] for path in paths[1:]]
        self.own = torch.tensor(own, device=device)  # [M − 1], of each path's last token
        self.parents = torch.tensor([[number[path[:-1]] for path in paths]], device=device)  # the root's is itself
        self.depths = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=device)
        self.bits = own_bits(shape.nodes, device)
        self.power: Tensor | None = None
        if confidence is not None:
            confidence.check(shape)
            factor = [row[:ranks] for row in confidence.factor[: shape.depth]]
            self.power = torch.tensor(confidence.power[: shape.depth], dtype=torch.float32, device=device)[:, None]
            self.log_factor = torch.tensor(factor, dtype=torch.float32, device=device).log()  # [D, R]

    def log_acceptance(self, log_q: Tensor) -> Tensor:
        """By the confidence, the log of the probability that a token is accepted after those before it: ``[B, D, R]``
        from log q, both best first."""
        if self.power is None:
            return log_q
        log_q = torch.addcmul(self.log_factor, log_q.float(), self.power)
        return log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf).cummin(2).values  # no sibling above an earlier one

    def grow(self, root: Tensor, log_q: Tensor, tokens: Tensor) -> TokenTree:
        """The tree of the likeliest paths: N nodes, without draws, with ``acceptance``; padding comes last.

        Args:
            root: ``[B]`` int64.
            log_q: ``[B, D, R]``, best first, the log of the (estimated) probability that a token is accepted after
                those before it. −∞ and NaN: no candidate.
            tokens: ``[B, D, R]`` int64, no token twice at a depth.
        """
        log_q = log_q.float().clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        padded = F.pad(log_q.flatten(1), (0, 1))
        # The additions of all sums have the same order: rounding leaves no path above one that it cannot surpass.
        values = padded.index_select(1, self.places).unflatten(1, (self.shape.depth, -1)).sum(1)  # [B, M]
        below = tokens.flatten(1).index_select(1, self.own)
        parents = self.parents.expand(len(root), -1).contiguous()
        candidates = Candidates(torch.cat((root[:, None], below), 1), values, parents)
        found = select_tree(candidates, self.depths, self.bits, self.shape.depth)
        return TokenTree(*found[:5], acceptance=found[5])


class RankTree:
    """A fixed tree of ranks of a drafter whose positions are independent. ``acceptances``: acceptance probability of
    each path of the topology, in its order, which its trees then have."""

    def __init__(self, topology: Topology, device: torch.device, acceptances: Sequence[float] | None = None) -> None:
        weights = None if acceptances is None else [1.0, *acceptances]
        self.tree = StaticTree(topology.parents, device, weights)
        ranks = topology.max_rank + 1
        self.sizes = topology.num_nodes, topology.max_depth, ranks, self.tree.draws.child.shape[2]  # as IndependentTree
        # Node i takes candidate [depth − 1, last rank of its path]; depths the tree does not use are not drafted.
        flat = [(len(path) - 1) * ranks + path[-1] for path in topology.paths]
        self.own = torch.tensor(flat, dtype=torch.int64, device=device)
        self.acceptance = None if weights is None else torch.tensor([weights], device=device)  # [1, N]

    def fill(self, root: Tensor, tokens: Tensor) -> TokenTree:
        """The tree of roots ``[B]`` and of the R best tokens of each depth, ``[B, D, R]`` int64."""
        acceptance = None if self.acceptance is None else self.acceptance.expand(len(root), -1)
        below = tokens.flatten(1).index_select(1, self.own)
        return self.tree.fill(torch.cat((root[:, None], below), 1), acceptance=acceptance)
