"""The size of each step's tree, chosen on the host before the step is launched.

A drafter with ``tree_sizes`` proposes trees of several node counts, each part of the next larger one. The size with the
most expected tokens per second is the best:

    tokens_n(f) = Σ_d f^d Σ_{i of the tree of n nodes, at depth d} a_i

a_i is the calibrated acceptance probability of node i and its ancestors. f says how much likelier than in calibration a
draft is accepted in the texts being decoded: after each step, f ← f + rate · (committed tokens − tokens_n(f)), whose
fixed point is the f that explains the mean. Text that the drafter cannot predict is soon decoded with small trees.
"""

from collections.abc import Mapping, Sequence

RATE = 0.05  # of f, and of the times, per step
TIMINGS = 3  # of each size, at first; of these the shortest counts
TRIAL = 32  # steps without a draft, after which one drafts, so that f can rise again


class TreeSizes:
    """The choice of a step's tree size.

    Args:
        by_depth: for each size in nodes (root included), ascending: the sums of its nodes' acceptance probabilities at
            depths 0 (1.0), 1, 2, ….
    """

    def __init__(self, by_depth: Mapping[int, Sequence[float]]) -> None:
        self.by_depth = dict(by_depth)
        self.seconds = dict.fromkeys(by_depth, float("inf"))  # of a step of each size: a moving average
        self.timings = dict.fromkeys(by_depth, 0)
        self.factor = 1.0
        # The most that nodes of one depth can be accepted is 1, so f is at most this.
        self.most = min((1 / sums[1] for sums in by_depth.values() if len(sums) > 1 and sums[1] > 0), default=1.0)
        self.without_draft = 0

    def tokens(self, nodes: int) -> float:
        """Expected tokens of a step with a tree of so many nodes."""
        return sum(accepted * self.factor**depth for depth, accepted in enumerate(self.by_depth[nodes]))

    def choose(self) -> int:
        """The size of the next step: one that is hardly timed yet, the largest first, or the one with the most tokens
        per second."""
        for nodes in reversed(self.by_depth):
            if self.timings[nodes] < TIMINGS:
                return nodes
        best = max(self.by_depth, key=lambda nodes: self.tokens(nodes) / self.seconds[nodes])
        self.without_draft = self.without_draft + 1 if best == 1 else 0
        if self.without_draft > TRIAL and len(self.by_depth) > 1:
            self.without_draft = 0
            return next(nodes for nodes in self.by_depth if nodes > 1)
        return best

    def timed(self, nodes: int, seconds: float) -> None:
        """Record the time of a step. It grows with the texts, so that a size may have to be tried again."""
        known = self.seconds[nodes]
        if self.timings[nodes] < TIMINGS:
            self.seconds[nodes] = min(seconds, known)
        else:
            self.seconds[nodes] = known + RATE * (seconds - known)
        self.timings[nodes] += 1

    def committed(self, nodes: int, counts: Sequence[int]) -> None:
        """Record what a step committed in each row; rows of 0 (no text) or −1 (not finite) do not count."""
        counts = [count for count in counts if count > 0]
        if counts and nodes > 1:
            error = sum(counts) / len(counts) - self.tokens(nodes)
            self.factor = min(max(self.factor + RATE * error, 0.0), self.most)
