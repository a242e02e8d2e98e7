"""Time steps with trees of several sizes on a busy machine; most rounds go to the sizes that may be fastest."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TIMED_PROMPTS = 2  # in turn, a round each
MAX_ROUNDS = 40
SETTLED = 0.01  # timing ends when no cost fell by more in the last two rounds with each prompt


@dataclass(frozen=True)
class SearchCosts:
    """Measured costs of steps.

    noise: the largest share by which the cost of a size still timed fell in the last rounds; None if they were too few.
    """

    seconds: list[float]  # per step, by size; infinite where a size was not timed
    rounds: int  # completed
    noise: float | None
    runs: list[int]  # of each size, those of a round that time ended too


def timed_search(
    run: Callable[[int, int], Sequence[float]],
    taus: Sequence[float],
    time_is_up: Callable[[], bool],
    cheaper: Sequence[Sequence[int]] | None = None,
) -> SearchCosts:
    """Time the steps of all sizes in turn, in rounds, until the costs no longer fall or time is up.

    Other work on the machine can only add to a step's time, so the minimum over rounds counts. A size is skipped while
    its upper bound on speed, at its own cost or that of the last cheaper size timed, is below a share of the best
    speed; the share rises from 0.5 to 0.9 with the number of rounds.

    Args:
        run: (size, turn) → the seconds of its steps, the same steps whenever the turn is the same.
        taus: tokens per step by size; the first is plain decoding.
        time_is_up: called before each run, once the first two sizes have been timed.
        cheaper: of each size, those whose steps cannot cost more; left out, all before it.
    """
    cheaper = [range(size) for size in range(len(taus))] if cheaper is None else cheaper
    runs = [0] * len(taus)
    fastest: list[dict[tuple[int, int], float]] = [{} for _ in taus]  # (turn, step) → seconds, by size
    costs = [math.inf] * len(taus)
    history: list[list[float]] = []
    noise: float | None = None
    for number in range(MAX_ROUNDS):
        turn, share = number % TIMED_PROMPTS, min(0.9, 1 - 0.5 / (number // TIMED_PROMPTS + 1))
        racing = [0]
        for size, tau in enumerate(taus):
            best = max(t / cost for t, cost in zip(taus, costs, strict=True))
            below = (costs[other] for other in reversed(cheaper[size]))
            bound = next((cost for cost in (costs[size], *below) if cost < math.inf), 0.0)
            if size > 1 and tau < share * best * bound:
                continue
            if costs[min(1, len(taus) - 1)] < math.inf and time_is_up():
                return SearchCosts(costs, number, noise, runs)
            for step, seconds in enumerate(run(size, turn)):
                fastest[size][turn, step] = min(seconds, fastest[size].get((turn, step), math.inf))
            runs[size] += 1
            costs[size] = statistics.mean(fastest[size].values())
            racing.append(size)
        history.append(list(costs))
        if number >= 3 * TIMED_PROMPTS - 1:
            noise = round(max(history[-1 - 2 * TIMED_PROMPTS][size] / costs[size] - 1 for size in racing), 4)
            if noise <= SETTLED:
                break
    return SearchCosts(costs, len(history), noise, runs)
