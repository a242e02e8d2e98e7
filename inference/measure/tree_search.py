"""The trees with which a drafter is fastest on this device: candidates of all sizes from a text's ranks.

The best tree of each size and its expected tokens per step follow from the ranks that the drafter gives to the true
tokens (:mod:`draftsmith.inference.measure.tree_statistics`); the time of its step, from what steps cost on this
machine. A dynamic tree's nodes depend on the text, so texts are continued with it and with the fixed one; where one
pass drafts all levels, what it would accept follows from the ranks and probabilities instead.

Shape letters: S sequences, T tokens, K depths (draft heads), n drafters of an ensemble (1 of any other).
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.measure.tree_statistics import (
    best_nodes,
    dynamic_depths,
    fit_confidence,
    simulate_ensemble,
    simulated_steps,
    trees_of,
)
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import Confidence, IndependentTree, deepest
from draftsmith.inference.verify.tree import Topology, chain
from draftsmith.models.target import Target

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
DEPTHS = (1, 2, 4, 6, 8)  # limits of trees whose every level costs a forward pass
SHAPES = (DynamicShape(1, 8, 9), DynamicShape(2, 6, 16), DynamicShape(4, 6, 32), DynamicShape(10, 6, 60))
COMPARED_TOKENS = 48  # of each prompt, decoded with each tree
INDEPENDENT_SIZES = (8, 16, 32, 64)  # nodes of the dynamic trees of drafters whose positions are independent

Trees = tuple[Topology, ...]  # of each drafter; their roots are one


def nodes_of(trees: Trees) -> int:
    """Number of nodes of merged trees, if no two of them draft the same tokens."""
    return 1 + sum(len(tree.paths) for tree in trees)


def trees_by_size(
    ranks: Tensor, sizes: Sequence[int], step_time: Callable[[Trees], float] | None = None
) -> list[Trees]:
    """The best trees of each size, until the text holds no more paths.

    Args:
        ranks: ``[S, T, n, K]`` of the text.
        sizes: numbers of nodes, rising.
        step_time: time of a step with trees. With it, those of a size have the number of drafters (the first ones; the
            trees of the others are empty) and the depth limit that give the most expected tokens / time among those
            that take no less time than the trees of the smaller size. Without it, the limits are n and K.
    """
    count, deepest = ranks.shape[2:]
    limits = [(count, deepest)]
    if step_time is not None:
        depths = [*(depth for depth in DEPTHS if depth < deepest), deepest]
        limits = list(itertools.product(range(1, count + 1), depths))
    orders = [best_nodes(ranks[:, :, :used, :depth], max(sizes)) for used, depth in limits]
    found: list[Trees] = []
    cost_before = 0.0
    for size in sizes:
        options: list[tuple[float, float, Trees]] = []  # speed, cost, trees
        for nodes in orders:
            trees = trees_of(nodes[: size - 1], count)
            if nodes_of(trees) == 1:  # never right on this text; yet a drafter has a path
                trees = (Topology(((0,),)), *trees[1:])
            tau, cost = (1.0, 1.0) if step_time is None else (simulate_ensemble(trees, ranks), step_time(trees))
            options.append((tau / cost, cost, trees))
        most = max(nodes_of(trees) for _, _, trees in options)
        if found and most == nodes_of(found[-1]):
            break
        options = [option for option in options if nodes_of(option[2]) == most]
        options = [option for option in options if option[1] >= cost_before] or options
        _, cost_before, trees = max(options, key=lambda option: option[0])
        found.append(trees)
    return found


@dataclass(frozen=True)
class Candidate:
    """Trees that may be the fastest: expected τ, and the estimated time of their step in plain steps.

    levels: of each drafter's tree, where each of them takes a forward pass.
    """

    trees: Trees
    tau: float
    cost: float
    levels: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return nodes_of(self.trees)

    @property
    def depth(self) -> int:
        return max(tree.max_depth for tree in self.trees)

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.tau / self.cost

    def contained_in(self, other: "Candidate") -> bool:
        """Whether its steps cannot cost more than the other's."""
        levels = zip(self.levels, other.levels, strict=True)
        return self.nodes <= other.nodes and all(one <= more for one, more in levels)


def candidates_of(
    ranks: Tensor,
    sizes: Sequence[int],
    costs: StepCosts,
    step_time: Callable[[Trees], float] | None,
    chains: bool,
    drafting: float = 0.0,
) -> list[Candidate]:
    """The best trees of each size, and the ``chains`` of each depth, without those that another one surpasses in τ at
    no higher cost; the fewest nodes first. ``step_time``: as :func:`trees_by_size`; without it, a step costs what the
    target's step with that many nodes does, and the ``drafting`` of all levels in one pass."""
    count, deepest = ranks.shape[2:]
    pool = trees_by_size(ranks, sizes, step_time)
    if chains:
        every = itertools.product(range(1, count + 1), range(1, deepest + 1))
        pool += [(*[chain(depth)] * used, *[Topology(())] * (count - used)) for used, depth in every]
    found: list[Candidate] = []
    for trees in pool:
        cost = costs.relative(nodes_of(trees)) + drafting if step_time is None else step_time(trees)
        levels = () if step_time is None else tuple(tree.max_depth for tree in trees)
        found.append(Candidate(trees, simulate_ensemble(trees, ranks), cost, levels))
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda one: (-one.tau, one.nodes, one.cost)):
        if not any(other.contained_in(each) for other in kept):
            kept.append(each)
    return sorted(kept, key=lambda one: (one.nodes, one.cost))


def fastest(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the highest estimated speed; of equal ones, the one with the fewest nodes."""
    return max(candidates, key=lambda each: (each.speedup, -each.nodes))


@dataclass
class Watch:
    """Time of a part of the calibration, of which setting up is counted by itself."""

    seconds: float  # that it may take
    set_up_seconds: float = math.inf  # that setting up may take, in addition
    show: Callable[[str], None] = lambda note: None  # called with a note for the progress bar
    set_up: float = field(default=0.0, init=False)
    began: float = field(default_factory=time.monotonic, init=False)

    @property
    def elapsed(self) -> float:
        """Without setting up."""
        return time.monotonic() - self.began - self.set_up

    def is_up(self) -> bool:
        self.show("")
        return self.elapsed > self.seconds

    @contextmanager
    def setting_up(self, what: str) -> Iterator[None]:
        self.show(f"setting up {what}")
        since = time.monotonic()
        try:
            yield
        finally:
            self.set_up += time.monotonic() - since


@dataclass(frozen=True)
class ComparedTree:
    """A dynamic tree beside the fixed one, on the same texts: its τ, and its tokens/s over the fixed tree's.
    ``confidence``: by which its nodes were chosen, if not by the drafter's probabilities as they are."""

    shape: DynamicShape
    tau: float
    speed: float
    confidence: Confidence | None = None


def simulate_dynamic(
    counted: Sequence[tuple[Tensor, Tensor]],
    fixed: Candidate,
    costs: StepCosts,
    drafting: Callable[[DynamicShape, Confidence], float],
) -> list[ComparedTree]:
    """Dynamic trees of several sizes beside the fixed one, of a drafter whose positions are independent: their τ by
    simulation of the text on which its ranks were counted, the time of a step estimated. ``counted``: ranks
    ``[S, T, K]`` and log q ``[S, T, K, R]`` of each batch of the text; ``drafting``: the time in which a tree is
    drafted, in plain steps."""
    at = [ranks[..., 0] >= 0 for ranks, _ in counted]
    ranks, log_q = (torch.cat([each[i][begins] for each, begins in zip(counted, at, strict=True)]) for i in (0, 1))
    confidence = fit_confidence(ranks, log_q)
    found = list[ComparedTree]()
    for nodes in INDEPENDENT_SIZES:
        depth, top = log_q.shape[1:]
        if nodes > 1 + top + (depth - 1) * top**2:
            break
        shape = deepest(DynamicShape(top, depth, nodes))
        tree = IndependentTree(shape, torch.device("cpu"), confidence)
        committed = [
            tokens
            for (each, own), begins in zip(counted, at, strict=True)
            for row in simulated_steps(dynamic_depths(tree, each, own), begins)
            for _, tokens in row
        ]
        tau = sum(committed) / len(committed)
        speed = tau / (costs.relative(nodes) + drafting(shape, confidence))
        found.append(ComparedTree(shape, tau, speed / fixed.speedup, confidence))
    return found


def compare_dynamic(
    target: Target, drafters: Sequence[Drafter], prompts: Sequence[list[int]], watch: Watch, lean: bool | None = None
) -> list[ComparedTree]:
    """Continue the same prompts with the fixed tree and the dynamic ones, each by all of them in turn.

    ``drafters``: with the fixed tree, then with each of :data:`SHAPES`. Those for which the time for setting up is too
    short are left out; all are, where the time of ``watch`` is too short for two prompts.
    """
    longest, decoders, least = max(prompts, key=len), list[SpeculativeDecoder](), min(2, len(prompts))
    for drafter in drafters:
        if decoders and watch.set_up > watch.set_up_seconds:
            break
        with watch.setting_up(f"tree {len(decoders) + 1} of {len(drafters)} to compare"):
            decoders.append(decoder := SpeculativeDecoder(target, drafter, lean=lean))
            # It allocates for the longest prompt and its answer, and chooses the forms of products.
            decoder.serve([Request(longest, 4, stop_ids=frozenset())], 1, max_length=len(longest) + COMPARED_TOKENS)
            if len(decoders) == 1:
                since = time.perf_counter()
                _ends(decoders[0], longest, COMPARED_TOKENS)
                taken = time.perf_counter() - since
        if least * len(drafters) * taken > watch.seconds:
            return []
    seconds, steps, tokens, compared = [0.0] * len(decoders), [0] * len(decoders), 0, 0
    for number, prompt in enumerate(prompts):
        if number and watch.is_up():
            break
        for tree, decoder in enumerate(decoders):
            ends = _ends(decoder, prompt, COMPARED_TOKENS)
            seconds[tree] += ends[-1] - ends[0]  # without the prefill, which gives the first token
            steps[tree] += len(ends) - 1
        tokens += COMPARED_TOKENS - 1
        compared += 1
    if compared < least:
        return []
    pairs = zip(SHAPES, steps[1:], seconds[1:], strict=False)
    return [ComparedTree(shape, tokens / count, seconds[0] / spent) for shape, count, spent in pairs]


def _ends(decoder: SpeculativeDecoder, prompt: list[int], count: int) -> list[float]:
    """When the prefill and each step of an answer of ``count`` tokens ended. On a CPU by this thread's time, which
    other processes disturb less; it excludes waiting for a GPU or a disk."""
    target, ends = decoder.target, list[float]()
    clock = time.perf_counter if target.spread or target.device.type != "cpu" else time.thread_time
    decoder.generate([prompt], count, stop_ids=frozenset(), on_tokens=lambda *_: ends.append(clock()))
    return ends
