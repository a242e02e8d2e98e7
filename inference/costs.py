"""What a step of a target costs by its number of rows (nodes × batch), measured on this device."""

import itertools
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from draftsmith.inference.cache import KVCache
from draftsmith.inference.step import Drafter, State, Step, capacity_for, engine_attention, find_lean
from draftsmith.inference.tree import StaticTree, TokenTree, chain
from draftsmith.kernels.measured import read_measured, write_measured
from draftsmith.models.target import Target

FILE = "steps.json"  # in the cache folder
SECONDS, AGAIN_SECONDS = 0.9, 4.0  # no step is begun later; where they are asked for again, by someone who waits
SIZES = (1, 8, 4, 2, 16, 32, 64)  # in the order in which they are timed
ROUNDS = 100
TURN = 4  # steps in a row: the first ones find other sizes' data in the processor's caches
ENOUGH = 5  # rounds whose least times are kept
CONTEXT = 128  # cached tokens


class StepCosts:
    """Seconds of a step by its number of rows: measured at some, linear between them and beyond the last."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        rows, times = zip(*sorted(seconds.items()), strict=True)
        # A larger step is hardly cheaper: where one was measured to be, the smaller one was disturbed.
        points = list(zip(rows, list(itertools.accumulate(reversed(times), min))[::-1], strict=True))
        if len(points) == 1:  # too slow for a second step to be timed
            points.append((points[0][0] + 10, 2 * points[0][1]))
        self.plain = points[0][1]
        self.points = [(rows, each / self.plain) for rows, each in points]

    def of(self, rows: int) -> float:
        """Time of a step of so many rows over that of a plain step."""
        pairs = list(itertools.pairwise(self.points))
        (low, cost), (high, next_cost) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return cost + (next_cost - cost) * (rows - low) / (high - low)

    def seconds(self, batch: int) -> float:
        """Of a plain step with so many rows."""
        return self.plain * self.of(batch)

    def table(self, nodes: int, batch: int) -> list[float]:
        """Of trees of 1 … ``nodes`` nodes in a batch of so many rows, over that of a plain step of the batch."""
        plain = self.of(batch)
        return [self.of(count * batch) / plain for count in range(1, nodes + 1)]


# Where what is proposed decides which random numbers are used (sampling), a seed has to be the same text on every day.
# About what BENCHMARKS.md has for the shape of a model of 135 M parameters on a CPU; 64 rows are extrapolated.
STANDARD = StepCosts({1: 1.0, 2: 1.4, 4: 1.45, 8: 1.6, 16: 2.0, 32: 3.0, 64: 5.0})


def paying(chance: Tensor, table: Tensor, together: bool) -> Tensor:
    """How many of each row's nodes pay: as many as maximise expected tokens / time.

    Args:
        chance: ``[B, n]`` of acceptance, falling; the root's 1 first.
        table: ``[n]`` time of a step of 1 … n nodes.
        together: choose one number for the whole batch, by the tokens of all rows; else each row's own, which does not
            depend on the others.

    Returns:
        ``[B or 1]`` int64, at least 1.
    """
    expected = chance.sum(0, keepdim=True) if together else chance
    return (expected.cumsum(-1) / table).argmax(-1) + 1


class _Fixed(Drafter):
    """A chain of one token, for timing."""

    static = True

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.tree = StaticTree(chain(nodes - 1).parents, device)
        self.num_nodes, self.max_depth, self.branching = nodes, nodes - 1, 1

    def propose(self, state: State) -> TokenTree:
        return self.tree.fill(state.root[:, None].expand(-1, self.num_nodes))


def step_costs(target: Target, lean: bool | None = None, again: bool = False) -> StepCosts:
    """What a step of this target costs on this machine, timed once (about a second) and kept in the cache folder.

    Where other work or the target's size leaves too little time, they are not kept: the next process times again.

    Args:
        lean: as :class:`draftsmith.inference.engine.SpeculativeDecoder` takes it.
        again: time them even if they are known, for longer.
    """
    ran = "transformers" if isinstance(find_lean(target, lean), str) else "lean"
    key = f"{target.fingerprint}, {target.dtype}, {target.device}, {ran}"
    known = read_measured(FILE).get(key)
    if target.fingerprint and known and isinstance(known, dict) and not again:
        return StepCosts({int(rows): float(seconds) for rows, seconds in known.items()})
    seconds, rounds = _measure(target, lean, AGAIN_SECONDS if again else SECONDS)
    if target.fingerprint and rounds >= ENOUGH:
        write_measured(FILE, {key: seconds})
    return StepCosts(seconds)


@torch.inference_mode()
def _measure(target: Target, lean: bool | None, budget: float) -> tuple[dict[int, float], int]:
    """Seconds of a step by rows, and how often each size was timed at least. What else runs on a machine only ever adds
    to a step's time, so the least counts."""
    context = min(CONTEXT, target.context // 2)
    sizes = [size for size in SIZES if context + 2 * size < target.context] or [1]
    steps: dict[int, Step] = {}
    least: dict[int, float] = {}
    until, timed = 0.0, 0
    with engine_attention([target]):
        for _, size in itertools.product(range(ROUNDS), sizes):
            if until and time.perf_counter() > until:
                break
            if size not in steps:
                drafter = _Fixed(size, target.device)
                steps[size] = Step(target, drafter, "greedy", 1, capacity_for(context, drafter), lean=lean)
                steps[size].running.fill_(True)
                _time(steps[size], context)  # the first one allocates and tunes
            taken = min(_time(steps[size], context) for _ in range(TURN))
            least[size] = min(taken, least.get(size, taken))
            timed += 1
            until = until or time.perf_counter() + budget
    return least, timed // len(sizes)


def _time(step: Step, context: int) -> float:
    step.cache.lengths.fill_(context)
    began = time.perf_counter()
    step.launch()()
    return time.perf_counter() - began


@torch.inference_mode()
def draft_time(drafter: Drafter, target: Target, costs: StepCosts) -> float:
    """Time of a drafter's ``propose`` with one row, eagerly, over a plain step of the target; it is timed here, for a
    tenth of a second at most."""
    cache = KVCache(target, 1, capacity_for(CONTEXT, drafter))
    drafter.allocate(cache, drafter.max_depth, False)
    zero = torch.zeros(1, dtype=torch.int64, device=target.device)
    width = target.hidden_size * (1 + len(drafter.captures))
    feature = torch.zeros(1, width, dtype=target.dtype, device=target.device)
    state = State(zero, zero, feature, zero == 0, None, zero)
    drafter.propose(state)
    least, until = float("inf"), time.perf_counter() + 0.1
    for _ in range(20):
        began = time.perf_counter()
        drafter.propose(state)
        least = min(least, time.perf_counter() - began)
        if time.perf_counter() > until:
            break
    return least / costs.plain
