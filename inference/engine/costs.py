"""Cost of a target's step by its number of rows (nodes × batch), measured on this device as the engine runs steps: on a
GPU they are static, and a graph's replays are timed by events, so that launches do not count as work."""

import itertools
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.engine.runner import engine_attention, find_lean
from draftsmith.inference.engine.step import (
    Step,
    capacity_for,
    on_device,
    refuse_synchronisation,
    static_by_default,
    why_no_graph,
)
from draftsmith.inference.verify.tree import StaticTree, TokenTree, chain
from draftsmith.kernels.measured import gpu_seconds, read_measured, write_measured
from draftsmith.models.target import Target

FILE = "steps.json"  # in the cache folder
SECONDS, REMEASURE_SECONDS = 0.9, 4.0  # time limit at first use, and where a command measures again
SIZES = (1, 8, 4, 2, 16, 32, 64)  # in the order of timing
ROUNDS = 100
REPEATS = 4  # consecutive steps of one size; in the first ones the processor's caches hold other sizes' data
MIN_ROUNDS = 5  # fewer are not kept
CONTEXT = 128  # cached tokens


class StepCosts:
    """Seconds of a step by its number of rows: measured at some, linear between them and beyond the last."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        rows, times = zip(*sorted(seconds.items()), strict=True)
        # If a larger step was measured to be cheaper, the smaller one's measurement was disturbed: take the larger's.
        points = list(zip(rows, list(itertools.accumulate(reversed(times), min))[::-1], strict=True))
        if len(points) == 1:  # too slow for a second step to be timed
            points.append((points[0][0] + 10, 2 * points[0][1]))
        self.plain_seconds = points[0][1]
        self.points = [(rows, each / self.plain_seconds) for rows, each in points]

    def relative(self, rows: int) -> float:
        """Time of a step with ``rows`` rows, in plain steps."""
        pairs = list(itertools.pairwise(self.points))
        (low, cost), (high, next_cost) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return cost + (next_cost - cost) * (rows - low) / (high - low)

    def seconds(self, batch: int) -> float:
        """Seconds of a plain step of a batch."""
        return self.plain_seconds * self.relative(batch)

    def table(self, nodes: int, batch: int) -> list[float]:
        """Times of steps with trees of 1 … ``nodes`` nodes, in plain steps of the batch."""
        plain = self.relative(batch)
        return [self.relative(count * batch) / plain for count in range(1, nodes + 1)]


# Used in sampling, where the proposed nodes decide which random numbers are used, so that a seed gives the same text on
# every machine. About the costs of a model of 135 M parameters on a CPU (benchmarks/log/2026-11-22.md); 64 rows are
# extrapolated.
STANDARD_COSTS = StepCosts({1: 1.0, 2: 1.4, 4: 1.45, 8: 1.6, 16: 2.0, 32: 3.0, 64: 5.0})


def best_node_counts(acceptance: Tensor, times: Tensor, whole_batch: bool) -> Tensor:
    """Number of nodes per row that maximises expected tokens / time.

    Args:
        acceptance: ``[B, n]`` acceptance probabilities, in descending order, the root's 1 first.
        times: ``[n]`` time of a step with 1 … n nodes.
        whole_batch: choose one number for all rows, from the sum of their expected tokens; else each row's own number,
            which does not depend on the others.

    Returns:
        ``[B or 1]`` int64, at least 1.
    """
    expected = acceptance.sum(0, keepdim=True) if whole_batch else acceptance
    return (expected.cumsum(-1) / times).argmax(-1) + 1


class _Chain(Drafter):
    """A chain of ``nodes`` equal tokens, for timing."""

    static = True

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.tree = StaticTree(chain(nodes - 1).parents, device)
        self.num_nodes, self.max_depth, self.branching = nodes, nodes - 1, 1

    def propose(self, state: State) -> TokenTree:
        return self.tree.fill(state.root[:, None].expand(-1, self.num_nodes))


def step_costs(target: Target, lean: bool | None = None, remeasure: bool = False) -> StepCosts:
    """Costs of this target's steps on this machine, measured once (about a second) and kept in the cache folder.

    Measurements of fewer than ``MIN_ROUNDS`` rounds (a large target, a busy machine) are not kept.

    Args:
        lean: as :class:`draftsmith.inference.engine.engine.SpeculativeDecoder` takes it.
        remeasure: measure, for longer, even if the costs are known.
    """
    found = find_lean(target, lean)
    decoder = "transformers" if isinstance(found, str) else "lean" if found.native is None else "lean, cpu.cpp"
    key = f"{target.fingerprint}, {target.dtype}, {target.device}, {decoder}"
    known = read_measured(FILE).get(key)
    if target.fingerprint and known and isinstance(known, dict) and not remeasure:
        return StepCosts({int(rows): float(seconds) for rows, seconds in known.items()})
    seconds, rounds = _measure(target, lean, REMEASURE_SECONDS if remeasure else SECONDS)
    if target.fingerprint and rounds >= MIN_ROUNDS:
        write_measured(FILE, {key: seconds})
    return StepCosts(seconds)


@torch.inference_mode()
def _measure(target: Target, lean: bool | None, budget: float) -> tuple[dict[int, float], int]:
    """Minimum seconds of a step by rows (other work only adds to a step's time), and the number of rounds."""
    context = min(CONTEXT, target.context // 2)
    sizes = [size for size in SIZES if context + 2 * size < target.context] or [1]
    steps: dict[int, Step] = {}
    fastest: dict[int, float] = {}
    deadline, timed = 0.0, 0
    with engine_attention([target]):
        for _, size in itertools.product(range(ROUNDS), sizes):
            if deadline and time.perf_counter() > deadline:
                break
            if size not in steps:
                drafter = _Chain(size, target.device)
                capacity, static = capacity_for(context, drafter), static_by_default(target)
                steps[size] = Step(target, drafter, "greedy", 1, capacity, static=static, lean=lean)
                steps[size].active.fill_(True)
                _time(steps[size], context)  # the first step allocates, tunes and captures
            seconds = min(_time(steps[size], context) for _ in range(REPEATS))
            fastest[size] = min(seconds, fastest.get(size, seconds))
            timed += 1
            deadline = deadline or time.perf_counter() + budget
    return fastest, timed // len(sizes)


def _time(step: Step, context: int) -> float:
    step.cache.lengths.fill_(context)
    return timed(step.advance, step.target.device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: on a GPU by events before and after it, and what it queued is then done."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    with torch.cuda.device(device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
    return began.elapsed_time(ended) / 1e3


@torch.inference_mode()
def draft_time(drafter: Drafter, target: Target, costs: StepCosts) -> float:
    """Time of a drafter's ``propose`` with one row, in plain steps of the target: static, and as a graph's replay,
    where steps are. Measured for at most 0.1 s, once it has run."""
    cache, device = KVCache(target, 1, capacity_for(CONTEXT, drafter)), target.device
    drafter.allocate(cache, drafter.max_depth, static_by_default(target))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    width = target.hidden_size * (1 + len(drafter.captures))
    feature = torch.zeros(1, width, dtype=target.dtype, device=device)
    state = State(zero, zero, feature, zero == 0, None, zero)

    def propose() -> None:
        drafter.propose(state)

    with on_device(device):
        propose()
        if static_by_default(target) and drafter.static and _can_be_captured(propose):
            return gpu_seconds([propose], device) / costs.plain_seconds
        fastest, deadline = float("inf"), time.perf_counter() + 0.1
        for _ in range(20):
            fastest = min(fastest, timed(propose, device))
            if time.perf_counter() > deadline:
                break
    return fastest / costs.plain_seconds


def _can_be_captured(call: Callable[[], object]) -> bool:
    try:
        with refuse_synchronisation():
            call()
    except RuntimeError as error:
        if why_no_graph(error) is None:
            raise
        return False
    return True
