"""What a step of the target costs, t(B, S, N) of B rows with S cached tokens each and trees of N nodes, measured on the
device as the engine runs steps: on a GPU they are static, and a graph's replays are timed by events, so that launches
do not count as work.

    t(B, S, N) = products(B · N) + (S − 128) · B · (key + key_of_node · N)

The products of a step depend on its number of rows B · N alone; its attention reads the keys and values of each of the
B · S cached tokens once, and has each of the N nodes attend to them.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.engine.runner import engine_attention, find_lean, refuse_synchronisation, why_no_graph
from draftsmith.inference.engine.step import Step, capacity_for, on_device, static_by_default
from draftsmith.inference.verify.tree import StaticTree, TokenTree, Topology, chain
from draftsmith.kernels.measured import gpu_seconds, read_measured, write_measured
from draftsmith.models.target import Target

FILE = "steps.json"  # in the cache folder
SECONDS, REMEASURE_SECONDS = 1.5, 4.0  # time limit at first use, and where a command measures again
SIZES = (1, 8, 4, 16, 32, 64)  # nodes, in the order of timing
LONG_SIZES = (1, 16)  # of steps with a long context
ROUNDS = 100
REPEATS = 2  # consecutive steps of one size; in the first one the processor's caches hold other sizes' data
MIN_ROUNDS = 3  # fewer are not kept
TRIES, AGAIN_SECONDS = 3, 1.0  # how often a process measures again where real steps are much faster, and how long
CONTEXT, LONG_CONTEXT = 128, 1024  # cached tokens


class StepClock:
    """The times by which the engine chooses how many nodes a step verifies."""

    def now(self) -> float:
        """Seconds of this process's fastest clock."""
        return time.perf_counter()

    def timed(self, call: Callable[[], object], device: torch.device) -> Callable[[], float]:
        """Run a call. Returns a function for its seconds: on a GPU by events before and after it; the function waits
        until what it queued is done."""
        if device.type != "cuda":
            began = self.now()
            call()
            seconds = self.now() - began
            return lambda: seconds
        with torch.cuda.device(device):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()

        def elapsed() -> float:
            after.synchronize()
            return before.elapsed_time(after) / 1e3

        return elapsed


class StepCosts(StepClock):
    """Seconds of steps: measured at some numbers of rows, linear between them and beyond the last.

    Args:
        seconds: of a step with 128 cached tokens, by its number of rows (B · N).
        per_key: of each further cached token of each row of the batch.
        per_key_and_node: of each further cached token and node.

    again: measures once more; None: not now. For whoever finds that real steps take far less, because these times were
        taken while something else ran.
    """

    again: "Callable[[], StepCosts] | None" = None

    def __init__(self, seconds: Mapping[int, float], per_key: float = 0.0, per_key_and_node: float = 0.0) -> None:
        rows, times = zip(*sorted(seconds.items()), strict=True)
        # If a larger step was measured to be cheaper, the smaller one's measurement was disturbed: take the larger's.
        points = list(zip(rows, list(itertools.accumulate(reversed(times), min))[::-1], strict=True))
        if len(points) == 1:  # too slow for a second step to be timed
            points.append((points[0][0] + 10, 2 * points[0][1]))
        self.plain_seconds = points[0][1]
        self.points = [(rows, each / self.plain_seconds) for rows, each in points]
        self.per_key, self.per_key_and_node = per_key, per_key_and_node

    def relative(self, rows: int) -> float:
        """Time of a step with ``rows`` rows and 128 cached tokens, in plain steps."""
        pairs = list(itertools.pairwise(self.points))
        (low, cost), (high, next_cost) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return cost + (next_cost - cost) * (rows - low) / (high - low)

    def seconds(self, batch: int, cached: float, nodes: int) -> float:
        """t(B, S, N)."""
        attention = (cached - CONTEXT) * batch * (self.per_key + self.per_key_and_node * nodes)
        return max(0.0, self.plain_seconds * self.relative(batch * nodes) + attention)

    def tree_time(self, passes: Sequence[float]) -> Callable[[Sequence[Topology]], float]:
        """``Calibration.step_time`` of drafters whose every level takes a forward pass. ``passes``: of each drafter,
        the time of one with one row, in plain steps; more rows cost in proportion what they cost the target."""

        def time(trees: Sequence[Topology]) -> float:
            total = self.relative(1 + sum(len(tree.paths) for tree in trees))
            for each, tree in zip(passes, trees, strict=True):
                parents = Counter(len(path) for path in {path[:-1] for path in tree.paths})  # by depth
                total += each * sum(self.relative(count) for count in parents.values())
            return total

        return time


class _Chain(Drafter):
    """A chain of ``nodes`` equal tokens, for timing."""

    static = True

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.tree = StaticTree(chain(nodes - 1).parents, device)
        self.num_nodes, self.max_depth, self.branching = nodes, nodes - 1, 1

    def propose(self, state: State) -> TokenTree:
        return self.tree.fill(state.root[:, None].expand(-1, self.num_nodes))


def chain_step(target: Target, lean: bool | None, rows: int, cached: int, nodes: int) -> Step:
    """A step whose rows all have a text of ``cached`` tokens."""
    drafter = _Chain(nodes, target.device)
    capacity, static = capacity_for(cached, drafter), static_by_default(target)
    step = Step(target, drafter, "greedy", rows, capacity, static=static, lean=lean)
    step.active.fill_(True)
    return step


def step_costs(target: Target, lean: bool | None = None, remeasure: bool = False, tries: int = TRIES) -> StepCosts:
    """Costs of this target's steps on this machine, measured once (about a second) and kept in the cache folder, except
    by fewer than ``MIN_ROUNDS`` rounds (a large target, a busy machine). ``remeasure``: measure, for longer, even if
    they are known; ``tries``: how often they may be measured ``again``."""
    found = find_lean(target, lean)
    decoder = "transformers" if isinstance(found, str) else "lean" if found.native is None else "lean, cpu.cpp"
    key = f"{target.fingerprint}, {target.dtype}, {target.device}, {decoder}"
    known = read_measured(FILE, target.device).get(key)
    if target.fingerprint and isinstance(known, dict) and "rows" in known and not remeasure:
        seconds = {int(rows): float(each) for rows, each in known["rows"].items()}
        costs = StepCosts(seconds, float(known["per_key"]), float(known["per_key_and_node"]))
    else:
        costs = _measure_and_keep(target, lean, key, REMEASURE_SECONDS if remeasure else SECONDS)
    left = tries

    def again() -> StepCosts:
        nonlocal left
        left -= 1
        found = _measure_and_keep(target, lean, key, AGAIN_SECONDS)
        found.again = again if left else None
        return found

    costs.again = again if left else None
    return costs


def _measure_and_keep(target: Target, lean: bool | None, key: str, seconds: float) -> StepCosts:
    costs, rounds = _measure(target, lean, seconds)
    if target.fingerprint and rounds >= MIN_ROUNDS:
        rows = {number: cost * costs.plain_seconds for number, cost in costs.points}
        per_key = {"per_key": costs.per_key, "per_key_and_node": costs.per_key_and_node}
        write_measured(FILE, {key: {"rows": rows, **per_key}}, target.device)
    return costs


@torch.inference_mode()
def _measure(target: Target, lean: bool | None, budget: float) -> tuple[StepCosts, int]:
    """Costs from the shortest steps of each shape (other work only adds to a step's time), and the number of rounds."""
    context = min(CONTEXT, target.context // 2)
    long_context = min(LONG_CONTEXT, target.context // 2)
    shapes = [(context, size) for size in SIZES if context + 2 * size < target.context] or [(context, 1)]
    if long_context >= 4 * context:
        shapes += [(long_context, size) for size in LONG_SIZES]
    steps: dict[tuple[int, int], Step] = {}
    fastest: dict[tuple[int, int], float] = {}
    deadline, timed = 0.0, 0
    with engine_attention([target]):
        for _, shape in itertools.product(range(ROUNDS), shapes):
            if deadline and time.perf_counter() > deadline:
                break
            cached, _ = shape
            if shape not in steps:
                since = time.perf_counter()
                steps[shape] = chain_step(target, lean, 1, *shape)
                step_seconds(steps[shape], cached)  # the first step allocates, tunes and captures
                if deadline and target.device.type == "cuda":  # each compiles and captures for longer than steps take
                    deadline += time.perf_counter() - since
            seconds = min(step_seconds(steps[shape], cached) for _ in range(REPEATS))
            fastest[shape] = min(seconds, fastest.get(shape, seconds))
            timed += 1
            deadline = deadline or time.perf_counter() + budget
    at_rows = {size: seconds for (cached, size), seconds in fastest.items() if cached == context}
    few, many = LONG_SIZES
    one, more = (fastest.get((long_context, size), 0.0) - at_rows.get(size, 0.0) for size in LONG_SIZES)
    tokens, per_key, per_key_and_node = long_context - context, 0.0, 0.0
    if len(fastest) == len(shapes) and long_context >= 4 * context:
        per_key_and_node = max(0.0, (more - one) / (many - few) / tokens)
        per_key = max(0.0, one / tokens - few * per_key_and_node)
    return StepCosts(at_rows, per_key, per_key_and_node), timed // len(shapes)


def step_seconds(step: Step, context: int) -> float:
    """Seconds of a step whose rows have ``context`` cached tokens."""
    step.cache.lengths.fill_(context)
    return StepClock().timed(step.advance, step.target.device)()


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
            fastest = min(fastest, StepClock().timed(propose, device)())
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
