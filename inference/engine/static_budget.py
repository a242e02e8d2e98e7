"""How many nodes a static step drafts: chosen before it is launched, among graphs of one node count each and, in a
merge, of all drafters or of the first or the last one alone.

Why that is left out which does not pay, and by which speed, is described in
:mod:`draftsmith.inference.engine.budget`. Static steps need no costs that were measured before: they are timed as they
run, by the clock that they are given.

Shape letters: B rows, N nodes.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.inference.engine.budget import FACTORS, FEWEST, MARGIN, PROBES, RATE, RETRY, Times
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.verify.tree import StaticTree, TokenTree

SIZES = (1, 8, 16, 32)  # nodes of the trees among which static steps choose, beside the whole tree
LATEST_OF_SIZE, RETIMED = 8, 256  # times of a size that count; steps for which a size of the drafters in use waits
DECAY = 0.98  # of what came true, per step that drafts
_UNIT = 1 << 20  # of expected tokens, in ``Step.committed``


class StepSize(NamedTuple):
    """What a static step drafts.

    nodes: of its trees, root included; 0 for whole trees, 1 for the root alone.
    alone: the number of the only drafter of a merge that is asked; None: all of them are.
    """

    nodes: int
    alone: int | None = None


WHOLE, ROOT = StepSize(0), StepSize(1)


@dataclass
class _Drafted:
    """What is known of the trees of a drafter, or of all of them together.

    came_true, estimated: Σ (committed tokens − 1) and Σ (expected tokens − 1), decayed.
    """

    choices: list[StepSize]  # ascending by nodes, the root alone first
    expected: list[float]  # tokens of each choice: moving averages
    came_true: float = 1.0
    estimated: float = 1.0
    steps: int = 0

    @property
    def factor(self) -> float:
        """How much likelier than estimated a draft is accepted."""
        return min(self.came_true / max(self.estimated, 1e-9), FACTORS[1])


class StaticBudget:
    """The choice of a static step's node count and, in a merge, whether all drafters are asked, or one alone. The
    choice with the most expected tokens per second is the best:

        tokens_n = 1 + f · (mean over the latest steps of Σ of the n − 1 highest acceptance probabilities)

    f says how much likelier than estimated a draft is accepted in the texts being decoded, over the latest steps that
    asked these drafters: Σ (committed tokens − 1) / Σ (estimated ones).

    A choice that is not timed yet is assumed to take as long as the next smaller one of the same drafters, so that it
    is timed, and its graph captured, only if it may be the best. The others are tried now and then: the best choice of
    each other set of drafters, and the root alone, after :data:`RETRY` steps for each, other sizes after
    :data:`RETIMED`; all of them so rarely that they take no more than :data:`PROBES` of the time. What pays as a probe
    is tried once more at the next step.

    Args:
        counts: of nodes, root included, ascending, from 1 on; the last one stands for whole trees. By drafter that is
            asked alone, None for all, if there are several sets.
    """

    def __init__(self, counts: Sequence[int] | Mapping[int | None, Sequence[int]]) -> None:
        by_set = counts if isinstance(counts, Mapping) else {None: counts}
        self.sets: dict[int | None, _Drafted] = {}
        for alone, own in by_set.items():
            assert own[0] == 1
            choices = [ROOT, *(StepSize(count, alone) for count in own[1:])]
            self.sets[alone] = _Drafted(choices, [1.0] * len(own))
        self.choices = [ROOT, *(each for known in self.sets.values() for each in known.choices[1:])]
        self.seconds = {choice: Times(latest=deque(maxlen=LATEST_OF_SIZE)) for choice in self.choices}  # of a step
        self.last, self.last_timed = (dict.fromkeys(self.choices, 0) for _ in range(2))  # step, of each
        self.best, self.steps = ROOT, 0
        self.again: StepSize | None = None  # it paid as a probe

    def tokens(self, choice: StepSize) -> float:
        """Expected tokens of a step."""
        if choice == ROOT:
            return 1.0
        known = self.sets[choice.alone]
        return 1 + known.factor * (known.expected[known.choices.index(choice)] - 1)

    def choose(self, most: int | None = None) -> StepSize:
        """The next step's, with at most ``most`` nodes."""
        self.steps += 1
        chosen = self._choose(most)
        self.last[chosen] = self.steps
        return chosen

    def _choose(self, most: int | None) -> StepSize:
        if most is not None and most <= 1:
            return ROOT
        speeds, rivals = dict[StepSize, float](), list[StepSize]()
        for known in self.sets.values():
            seconds, own = 0.0, list[StepSize]()
            for choice, expected in zip(known.choices, known.expected, strict=True):
                if most is not None and choice.nodes > most:
                    break
                timed = self.seconds[choice].shortest
                seconds = seconds if timed is None else timed
                if timed is None and (choice == ROOT or known.steps < FEWEST):
                    return choice
                speeds[choice] = (1 + known.factor * (expected - 1)) / seconds
                if timed is not None and choice != ROOT:
                    own.append(choice)
            if own:
                rivals.append(max(own, key=speeds.__getitem__))
        best = max(speeds, key=speeds.__getitem__)
        again, self.again, self.best = self.again, None, best
        length = self.seconds[best].shortest
        if length is None:
            return best
        if again is not None and again in speeds:
            return again
        own = None if best == ROOT else self.sets[best.alone]
        in_use = [] if own is None else [each for each in own.choices[1:] if each in speeds and each != best]
        in_use = [each for each in in_use if self.seconds[each].shortest is not None]
        rivals = [each for each in (ROOT, *rivals) if each != best and each not in in_use]
        for choice in (*rivals, *in_use):
            seconds = self.seconds[choice].shortest
            if seconds is None:
                continue
            waits = RETIMED if choice in in_use else RETRY * len(rivals)
            lost = seconds * (1 - speeds[choice] / speeds[best]) / length  # by a probe, in steps
            if self.steps - self.last[choice] > max(waits, lost * (len(rivals) + len(in_use)) / PROBES):
                return choice
        return best

    def timed(self, choice: StepSize, seconds: float) -> None:
        """Record the time of a step. After a break it replaces those from before: texts have grown since."""
        times = self.seconds[choice]
        if times.shortest is not None and self.steps - self.last_timed[choice] > RETRY:
            times.latest.extend([seconds] * LATEST_OF_SIZE)
        times.add(seconds)
        self.last_timed[choice] = self.steps

    def committed(self, choice: StepSize, tokens: Sequence[int], expected: Sequence[Sequence[float]]) -> None:
        """Record what a step committed in each row; rows of 0 (no text) or −1 (not finite) do not count. ``expected``:
        by row, the expected tokens of each of its drafters' choices; not read where nothing was drafted."""
        rows = [row for row, number in enumerate(tokens) if number > 0]
        if not rows or choice.nodes == 1:
            return
        known = self.sets[choice.alone]
        known.steps += 1
        rate = max(RATE, 1 / known.steps)
        means = [sum(expected[row][at] for row in rows) / len(rows) for at in range(len(known.choices))]
        known.expected = [old + rate * (mean - old) for old, mean in zip(known.expected, means, strict=True)]
        mean = sum(tokens[row] for row in rows) / len(rows)
        known.came_true = DECAY * known.came_true + mean - 1
        known.estimated = DECAY * known.estimated + means[known.choices.index(choice)] - 1
        best, seconds = self.seconds[self.best].shortest, self.seconds[choice].shortest
        probed = choice.alone != self.best.alone or self.best == ROOT
        if probed and best and seconds and mean / seconds > MARGIN * self.tokens(self.best) / best:
            self.again = choice


def node_counts(drafter: Drafter) -> dict[int | None, list[int]]:
    """The node counts among which a drafter's static steps choose, as :class:`StaticBudget` takes them."""
    counts: dict[int | None, list[int]] = {
        None: [*(size for size in SIZES if size < drafter.num_nodes), drafter.num_nodes]
    }
    for alone, most in drafter.own_counts.items():  # no further numbers, for which kernels would be compiled
        own = [size for size in SIZES if size <= most]
        counts[alone] = own if len(own) > 1 else [1, most]
    return counts


class ExpectedTokens:
    """Expected tokens of each size of a step's trees, which the step writes beside what it commits."""

    def __init__(self, counts: Mapping[int | None, Sequence[int]], device: torch.device) -> None:
        self.columns = max(map(len, counts.values()))
        # The last node of each size, by drafter that is asked alone.
        self.last: dict[int | None, Tensor] = {
            alone: torch.tensor([size - 1 for size in (*own, *[own[-1]] * (self.columns - len(own)))], device=device)
            for alone, own in counts.items()
        }
        self._static: dict[StaticTree, Tensor] = {}

    def of(self, tree: TokenTree, alone: int | None) -> Tensor:
        """``[B, columns]`` int64, in units of 2⁻²⁰ tokens."""
        last, static = self.last[alone], tree.static
        if static is not None and static.acceptances is not None:  # the same in every step
            if static not in self._static:
                totals = torch.tensor(static.acceptances).sort(descending=True).values.cumsum(0)
                self._static[static] = (totals[last.cpu().clamp(max=len(totals) - 1)] * _UNIT).long().to(last.device)
            return self._static[static]
        assert tree.acceptance is not None
        totals = tree.acceptance.sort(1, descending=True).values.cumsum(1)
        return (totals.index_select(1, last.clamp(max=totals.shape[1] - 1)) * _UNIT).long()

    def read(self, row: Sequence[int]) -> list[float]:
        """The tokens that a row of ``Step.committed`` has in its last columns."""
        return [units / _UNIT for units in row[-self.columns :]]
