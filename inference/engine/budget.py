"""How many nodes an eager step drafts, up to those of the drafter's tree: chosen here for every drafter, alone and
merged, in greedy decoding and in coupled sampling. Drafters propose candidates with estimated acceptance probabilities;
what they leave out themselves, they leave out by these numbers. Whole trees are verified in multi-step sampling, with
``--all-nodes``, and of a Medusa tree whose size was measured here, decoding one text; typical acceptance has a rule of
its own, :class:`TypicalBudget`.

    speed(n) = (tokens that a step with the n likeliest candidates is expected to commit) / (drafting + t(B, S, n))

:class:`Budget` answers whether to ask a drafter at all, whether another level pays, and how many nodes to keep. Static
steps choose in :mod:`draftsmith.inference.engine.static_budget`.

All estimates are renewed over time: times are the shortest of the latest ones, and a drafter that did not pay is tried
again after :data:`RETRY` steps, or so rarely that probes take :data:`PROBES` of the time. Estimated acceptance
is corrected by what came true in the row's own text, by drafter and depth: for the nodes that the text reached,
Σ accepted / Σ estimated. A text does not depend on any of it: in both modes it is that of plain decoding.

Shape letters: B rows, S cached tokens, M candidates (root included), N nodes kept, D depth of the deepest node.
"""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.inference.verify.sampling import Rows, row_numbers
from draftsmith.inference.verify.tree import TokenTree, likeliest
from draftsmith.inference.verify.verify import Verdict

LATEST = 32  # times of a shape, of which the shortest counts
FEWEST, STEPS = 3, 8  # times before they count, and those of steps before they correct the costs
REVIEW, REVIEWS = 32, 4  # steps between corrections of the step costs; of these, how long an unused size's times count
RETRY, PROBES = 32, 0.01  # steps after which a drafter that was not asked is tried, and share of time for this, at most
UNKNOWN = 0.05  # assumed time of a drafter's pass before one was timed, in plain steps
CHEAP = 0.015  # a drafter that takes less, in plain steps, is always asked
MARGIN = 1.03  # least gain in speed for which a drafter is asked
RATE = 0.1  # of moving averages, per step
PRIOR = 4.0  # weight of what all texts showed, in tokens, beside what came true in the row's own
DECAY, SLOW_DECAY = 0.97, 0.999  # of what came true in a text, and in all, per step
FACTORS = (0.05, 2.0)  # bounds of a correction
STALE = 0.6  # steps that take this share of their measured cost, or less, say that it was measured in a bad moment


@dataclass
class Times:
    """The shortest of the latest times of something."""

    fewest: int = FEWEST
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    unused: int = 0  # reviews since the last one

    def add(self, seconds: float) -> None:
        self.latest.append(seconds)
        self.unused = 0

    def review(self) -> None:
        """Forget times that are old: a size that was slow for a while is then tried again."""
        self.unused += 1
        if self.unused > REVIEWS:
            self.latest.clear()

    @property
    def shortest(self) -> float | None:
        return min(self.latest) if len(self.latest) >= self.fewest else None


@dataclass
class _Source:
    """What is known of a drafter; gain, nodes and levels are moving averages over the steps in which it was asked.

    probe_won: it was asked as a probe, and what came true would have paid: it is asked in the next step, too, as a
        probe as long as its corrected estimates say that it does not pay.
    """

    passes: list[Times]  # by level
    gain: float = 0.0  # expected further tokens of a row
    nodes: float = 1.0  # that this takes
    levels: float = 1.0  # and passes
    asked: int = 0  # steps in which it was asked
    waited: int = 0  # and in which it was not since
    probing: bool = False  # it is asked because it waited: for one level, whose estimates are not corrected
    probe_won: bool = False


class Budget:
    """The choices of eager steps.

    Args:
        costs: t(B, S, N), seconds of the target's steps.
        self_correcting: of each source, whether it corrects its estimates itself.
        max_depth, limit: D and nodes of any tree.
        clock: seconds, by which drafting and steps are timed.

    costs_stale: plain steps take far less than measured, and so may the others: measure the costs again.
    """

    def __init__(
        self,
        costs: Callable[[int, float, int], float],
        rows: int,
        self_correcting: Sequence[bool],
        max_depth: int,
        limit: int,
        clock: Callable[[], float],
    ) -> None:
        self.clock = clock
        self.costs, self.rows, self.limit, self.self_correcting = costs, rows, limit, self_correcting
        self.costs_stale = False
        self.sources = [_Source([Times() for _ in range(max_depth + 1)]) for _ in self_correcting]
        # By source, row and depth: the corrections in use, given that the parent is accepted, and without.
        self.conditional = np.ones((len(self_correcting), rows, max_depth + 1))
        self.factors = torch.ones(len(self_correcting), rows, max_depth + 1)
        self.highest = np.full(max_depth + 1, 1.0)  # of ratios, by depth
        self.highest[1:2] = FACTORS[1]
        # By source, row and depth: what came true, and what was estimated; of all texts so far in the last row.
        self.came_true, self.estimated = np.zeros((2, len(self_correcting), rows + 1, max_depth + 1))
        self.step_times: dict[int, Times] = {}  # in units of t(B, S, N), by N
        self.corrections: dict[int, float] = {}  # the shortest of them
        self.steps, self.reviews, self.table, self.shape = 0, 0, list[float](), (-1, -1)
        self.level = 0

    def measured_again(self, costs: Callable[[int, float, int], float]) -> None:
        """Take these costs from now on; what corrected the others is forgotten."""
        self.costs, self.costs_stale, self.shape = costs, False, (-1, -1)
        self.step_times.clear()
        self.corrections.clear()

    def begin(self, rows: Rows) -> None:
        for row in row_numbers(rows):
            self.came_true[:, row] = self.estimated[:, row] = 0
            self._correct(row)

    def start(self, lengths: Sequence[int], active: Sequence[bool], most: int | None = None) -> None:
        """A step begins, of rows with so many cached tokens (0 where there is no text). ``active``: whether each has a
        text; ``most``: nodes of the step's trees, at most."""
        self.most = self.limit if most is None else min(most, self.limit)
        self.active, self.weights = active, None if all(active) else torch.tensor(active)[:, None].float()
        self.tokens = self.roots = float(sum(active))  # expected of all rows
        self.nodes, self.drafting, self.kept = 1, 0.0, False
        if self.steps == STEPS or self.steps % REVIEW == 0:
            self._review()
        for counts in (self.came_true, self.estimated):
            counts[:, :-1] *= DECAY
            counts[:, -1] *= SLOW_DECAY
        self.cached = cached = sum(lengths) / self.rows
        shape = (self.reviews, int(cached) // 64)
        self.steps += 1
        if shape != self.shape:
            self.shape = shape
            nodes = range(1, self.limit + 1)
            seconds = np.array([max(self.costs(self.rows, cached, count), 1e-9) for count in nodes])
            if self.corrections:
                seconds *= np.interp(nodes, list(self.corrections), list(self.corrections.values()))
            self.table = np.maximum.accumulate(seconds).tolist()

    def order(self) -> list[int]:
        """The drafters of a merge, the cheapest first."""
        return sorted(range(len(self.sources)), key=self._cost)

    def asks(self, number: int) -> bool:
        """Whether a drafter is asked in this step, after those asked before."""
        source = self.sources[number]
        step, cost = self._step_seconds(self.nodes + source.nodes), self._cost(number)
        new = (self.tokens + source.gain * self.roots) / (self.drafting + cost + step)
        pays = new > MARGIN * self.tokens / (self.drafting + self._step_seconds(self.nodes))
        pays = pays or source.asked < FEWEST or cost < CHEAP * self.table[0]
        waits = max(RETRY, self._passes(number, 1) / self.table[0] / PROBES)
        source.probing = source.waited >= waits or (source.probe_won and not pays)
        asked, source.probe_won = self.most > 1 and (pays or source.probing), False
        if not asked:
            source.waited += 1
            return False
        source.asked, source.waited = source.asked + 1, 0
        self.level, self.ended, self.levels = 0, False, [self.roots]
        self.mark = self.clock()
        return True

    def another_level(self, number: int, acceptance: Tensor, depth: Tensor) -> bool:
        """Whether a drafter that is asked drafts another level, after candidates of these acceptance probabilities
        ``[B, M]`` and depths ``[1 or B, M]``, the root included."""
        self._record_pass(number)
        if self.sources[number].probing:
            self.ended = True
            return False
        totals = self._totals(self.corrected(number, acceptance, depth))
        drafting = self.drafting + self._passes(number, self.level)
        speed, count = self._best(totals, drafting)
        self.levels.append(max(totals[count - 1], self.levels[-1]))
        before, last = self.levels[-2:]
        gain = last - before
        ratio = min(1.0, gain / max(before - (self.levels[-3] if self.level > 1 else 0.0), 1e-9))
        reached, pays = self.tokens - self.roots + last, False
        for further in range(1, len(self.sources[number].passes) - self.level):
            gain *= ratio
            reached += gain
            passes = self._passes(number, self.level + further)
            if reached / (self.drafting + passes + self._step_seconds(self.nodes + count - 1 + further)) > speed:
                pays = True
                break
        self.ended = not pays
        self.mark = self.clock()
        return pays

    def proposed(self, number: int, acceptance: Tensor) -> None:
        """A drafter that was asked has proposed candidates of these corrected acceptance probabilities ``[B, M]``."""
        if not self.ended:
            self._record_pass(number)
        cost, source = self._passes(number, self.level), self.sources[number]
        totals = self._totals(acceptance)
        _, count = self._best(totals, self.drafting + cost)
        gain = totals[count - 1] - self.roots
        rate = max(RATE, 1 / source.asked)
        if source.probing:  # what was known of it before no longer counts
            gain, rate = gain * float(self.factors[number, :, 1].mean()), 1.0
        source.gain += rate * (gain / max(self.roots, 1.0) - source.gain)
        source.nodes += rate * (count - 1 - source.nodes)
        source.levels += rate * (self.level - source.levels)
        self.drafting, self.tokens, self.nodes = self.drafting + cost, self.tokens + gain, self.nodes + count - 1

    def corrected(self, number: int, acceptance: Tensor, depth: Tensor) -> Tensor:
        """Acceptance probabilities of a drafter's candidates ``[B, M]`` by what came true in each row's text."""
        if self.self_correcting[number] or self.sources[number].probing:
            return acceptance
        factors = self.factors[number].to(acceptance.device)
        return (acceptance * factors.gather(1, depth.long().expand(self.rows, -1))).clamp(max=1.0)

    def keep(self, acceptance: Tensor, most: int | None = None) -> int:
        """Number of nodes with the highest speed, the same in all rows and at most ``most``, of ``[B, M]`` corrected
        probabilities."""
        self.kept = True
        count = self._best(self._totals(acceptance)[:most], self.drafting, alone=True)[1]
        return max(count, min(2, self.most)) if any(source.probing for source in self.sources) else count

    def learn(
        self,
        paths: Sequence[Sequence[int]],
        lengths: Sequence[int],
        parents: Sequence[Sequence[int]],
        acceptance: Sequence[Sequence[float]],
        sources: Sequence[Sequence[int]] | None,
    ) -> None:
        """Record what was accepted of the verified trees, whose acceptance probabilities are corrected ones.

        Args:
            paths, lengths: nodes of each row's accepted path, and how many of them below the root are accepted.
            parents, acceptance, sources: of each row's nodes; padding has an acceptance of 0. Without sources there is
                one drafter.
        """
        hits = [0] * len(self.sources)
        for row, (path, length) in enumerate(zip(paths, lengths, strict=True)):
            if not self.active[row]:
                continue
            probabilities = acceptance[row]
            for depth in range(1, length + 2):
                node, reached = path[depth - 1], depth <= length
                children = [
                    child for child, parent in enumerate(parents[row]) if parent == node and probabilities[child] > 0
                ]
                if not children:
                    break
                for number, source in enumerate(self.sources):
                    own = [child for child in children if sources is None or sources[row][child] >> number & 1]
                    if self.self_correcting[number] or not own:
                        continue
                    estimate = min(1.0, sum(probabilities[child] for child in own) / max(probabilities[node], 1e-9))
                    if not source.probing:
                        estimate /= self.conditional[number, row, depth]
                    hit = reached and path[depth] in own
                    self.came_true[number, [row, -1], depth] += hit
                    self.estimated[number, [row, -1], depth] += estimate
                    hits[number] += hit and depth == 1
            self._correct(row)
        for number, count in enumerate(hits):
            speed = (1 + count / max(self.roots, 1.0)) / (self._passes(number, 1) + self._step_seconds(2))
            if self.sources[number].probing and speed > 1 / self._step_seconds(1):
                self.sources[number].probe_won = True

    def observe(self, phase: str, tree: TokenTree | None, verdict: Verdict | None) -> None:
        """Record, at the end of an eager step's phases, what was accepted, and how long the target's part took."""
        if phase == "draft":
            self.began = self.clock()
        if phase != "commit" or tree is None or verdict is None:
            return
        nodes = tree.tokens.shape[1]
        if nodes > 1 and tree.acceptance is not None:
            parts = tree.parent, tree.acceptance, tree.source if len(self.sources) > 1 else None
            parents, acceptance, sources = (None if p is None else p.expand(self.rows, -1).tolist() for p in parts)
            assert parents is not None and acceptance is not None
            self.learn(verdict.path.tolist(), verdict.length.tolist(), parents, acceptance, sources)
        if tree.tokens.device.type == "cpu":  # elsewhere the host does not wait for a step's end
            self.ran(nodes, self.clock() - self.began)

    def ran(self, nodes: int, seconds: float) -> None:
        """Record the time of a step of the target, drafting excluded."""
        times = self.step_times.setdefault(nodes, Times(STEPS))
        times.add(seconds / max(self.costs(self.rows, self.cached, nodes), 1e-9))

    def ratios(self, number: int, row: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """The corrections of the probability that a child is accepted, given that its parent is, by the child's depth
        ``[D + 1]``: at most 1 below the first level, so that no child becomes likelier than its parent."""
        true, estimated = self.came_true[number], self.estimated[number]
        prior = (PRIOR + true[-1]) / (PRIOR + estimated[-1])  # of all texts so far
        ratios = (PRIOR * prior + true[row]) / (PRIOR + estimated[row])
        return np.clip(ratios, FACTORS[0], self.highest)

    def _correct(self, row: int) -> None:
        for number, corrects in enumerate(self.self_correcting):
            if not corrects:
                self.conditional[number, row] = self.ratios(number, row)
                self.factors[number, row] = torch.from_numpy(self.conditional[number, row].cumprod())

    def _review(self) -> None:
        """Correct the step costs by the steps that ran: between node counts linearly, beyond them as the nearest one.
        Forget times of what has not run for a while."""
        for times in (*self.step_times.values(), *(each for source in self.sources for each in source.passes)):
            times.review()
        found = {nodes: times.shortest for nodes, times in self.step_times.items()}
        self.corrections = {nodes: factor for nodes, factor in sorted(found.items()) if factor is not None}
        self.reviews += 1
        self.costs_stale = min(self.corrections.values(), default=1.0) < STALE

    def _record_pass(self, number: int) -> None:
        self.sources[number].passes[min(self.level, len(self.sources[number].passes) - 1)].add(self.clock() - self.mark)
        self.level += 1

    def _cost(self, number: int) -> float:
        """Seconds of a drafter's usual passes."""
        return self._passes(number, round(self.sources[number].levels))

    def _passes(self, number: int, count: int) -> float:
        """Seconds of a drafter's first passes."""
        total, known = 0.0, UNKNOWN * self.table[0]
        for times in self.sources[number].passes[:count]:
            known = known if times.shortest is None else times.shortest
            total += known
        return total

    def _step_seconds(self, nodes: float) -> float:
        """Between whole numbers linear."""
        low = min(max(int(nodes), 1), self.limit)
        seconds, more = self.table[low - 1], self.table[min(low, self.limit - 1)]
        return seconds + (more - seconds) * max(0.0, nodes - low)

    def _totals(self, acceptance: Tensor) -> list[float]:
        """Expected tokens of all rows with the 1, 2, … likeliest candidates of each, at most ``most``."""
        if len(acceptance) == 1 and self.rows == 1:
            ranked = sorted(acceptance[0].tolist(), reverse=True)[: self.most]
            return [*itertools.accumulate(ranked)]
        weighted = acceptance.expand(self.rows, -1)
        if self.weights is not None:
            weighted = weighted * self.weights.to(acceptance.device)
        return weighted.sort(1, descending=True).values[:, : self.most].sum(0).cumsum(0).tolist()

    def _best(self, totals: Sequence[float], drafting: float, alone: bool = False) -> tuple[float, int]:
        """The highest speed and its number of nodes, beside those of the drafters asked before (unless ``alone``)."""
        tokens, nodes = (0.0, 0) if alone else (self.tokens - self.roots, self.nodes - 1)
        best, count = 0.0, 1
        for number, total in enumerate(totals, 1):
            speed = (tokens + total) / (drafting + self._step_seconds(nodes + number))
            if speed > best:
                best, count = speed, number
        return best, count


class TypicalBudget:
    """The choices of eager steps of typical acceptance. Its text depends on the nodes that are verified (algorithms.md
    §6.1), so that they have to be a function of that text: each row's are those of the highest speed for this row
    alone, and nothing is learned while steps run.

    Costs and acceptance probabilities are those of greedy decoding. With δ < 1 typical acceptance accepts of every tree
    what greedy decoding does, or a longer path: by these numbers no step is slower per token than a plain one.
    ``costs``: t(B, S, N), seconds of the target's steps; ``limit``: nodes of any tree.
    """

    def __init__(self, costs: Callable[[int, float, int], float], limit: int) -> None:
        self.costs, self.limit = costs, limit
        self.seconds: dict[int, Tensor] = {}  # [limit] float64, by cached tokens / 64
        self.fixed: Tensor | None = None  # [1, N] acceptance probabilities, once a tree has some that never change

    def _seconds_at(self, cached: int) -> Tensor:
        """Of a step of one row, by its number of nodes; with drafting, where there is a draft."""
        if cached not in self.seconds:
            times = np.array([self.costs(1, 64 * cached, count) for count in range(1, self.limit + 1)])
            times[1:] += UNKNOWN * times[0]
            self.seconds[cached] = torch.from_numpy(np.maximum.accumulate(times.clip(min=1e-9)))
        return self.seconds[cached]

    def _counts(self, acceptance: Tensor, lengths: Tensor, active: Tensor) -> Tensor:
        """``[B]`` the number of nodes with the highest speed, root included; 1 in rows without a text."""
        totals = acceptance.double().sort(1, descending=True).values.cumsum(1).cpu()
        seconds = torch.stack([self._seconds_at(length // 64) for length in lengths.tolist()])
        counts = (totals / seconds[:, : totals.shape[1]]).argmax(1) + 1
        return torch.where(active, counts.to(active.device), 1)

    def drafts(self, lengths: Tensor, active: Tensor) -> bool:
        """Whether a draft is needed for the choice, or pays in a row. ``lengths``, ``active``: ``[B]``, cached tokens
        of each row, and whether it has a text."""
        if self.fixed is None:
            return True
        return int(self._counts(self.fixed.expand(len(lengths), -1), lengths, active).max()) > 1

    def prune(self, tree: TokenTree, lengths: Tensor, active: Tensor) -> tuple[TokenTree, Tensor]:
        """The tree of each row's own nodes, and their numbers ``[B, M]`` in the given one, M those of the largest row;
        the others' further nodes are padding."""
        assert tree.acceptance is not None
        acceptance = tree.acceptance.expand(len(tree.tokens), -1)
        # Not where it is the only proposing drafter of a merge: the next step may have another one's nodes.
        if tree.source is None and tree.static is not None and tree.static.acceptances is not None:
            self.fixed = acceptance[:1]
        counts = self._counts(acceptance, lengths, active)
        rank = acceptance.argsort(dim=1, descending=True, stable=True).argsort(1)
        kept, numbers = likeliest(tree, acceptance, int(counts.max()))
        own = rank.gather(1, numbers) < counts[:, None]
        source = None if kept.source is None else kept.source * own
        return replace(kept, valid=kept.valid & own, source=source), numbers
