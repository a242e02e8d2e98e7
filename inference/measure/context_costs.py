"""What steps of long texts cost, by batch size and length: for the plans of self-speculation.

Shape letters: B rows, S cached tokens, N nodes.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch

from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.measure.step_costs import CONTEXT, StepCosts, chain_step, step_costs, step_seconds
from draftsmith.models.target import Target


class ContextCosts:
    """Seconds of steps of some batch sizes, at any length: what they take beyond their products, linear between the
    lengths and numbers of nodes at which it was measured. Keys and values that the processor's caches hold cost less,
    so that it is measured for each batch size.

    ``known``: the products' costs; ``measured``: seconds by (B, S, N), of each batch size at the same lengths and
    numbers of nodes.
    """

    def __init__(self, known: StepCosts, measured: Mapping[tuple[int, int, int], float]) -> None:
        self.known, self.measured = known, measured
        self.lengths, self.nodes = (sorted({key[place] for key in measured}) for place in (1, 2))

    def _products(self, rows: int) -> float:
        return self.known.plain_seconds * self.known.relative(rows)

    def seconds(self, batch: int, cached: float, nodes: int) -> float:
        """t(B, S, N)."""
        high = next((place for place, each in enumerate(self.lengths) if place and cached <= each), -1)
        low, high = self.lengths[high - 1], self.lengths[high]
        few, many = self.nodes

        def beyond(length: int) -> float:
            first, last = (self.measured[batch, length, n] - self._products(batch * n) for n in (few, many))
            return first + (last - first) * (nodes - few) / (many - few)

        before, after = beyond(low), beyond(high)
        return self._products(batch * nodes) + before + (after - before) * (cached - low) / (high - low)

    def inflection(self, nodes: int) -> float | None:
        """S*, the length above which a speed-up grows with the batch (MagicDec, arXiv 2408.11049 §3): the products of
        ``nodes`` verified tokens of a row cost as much as reading its cached ones, both of the largest batch. None
        where cached tokens cost nothing: no length is above it."""
        batch = max(key[0] for key in self.measured)
        per_row = (self._products(batch * nodes) - self._products(batch)) / (batch * (nodes - 1))
        first, last = (self.seconds(batch, length, 1) for length in (self.lengths[0], self.lengths[-1]))
        per_key = (last - first) / (batch * (self.lengths[-1] - self.lengths[0]))
        return nodes * per_row / per_key if per_key > 0 else None


@torch.inference_mode()
def context_costs(
    target: Target, contexts: Sequence[int], batches: Sequence[int], lean: bool | None = None
) -> ContextCosts:
    """Measure steps of each of these batch sizes and of one row, of one and five nodes, with few cached tokens and with
    a quarter, a half, three quarters and all of ``max(contexts)``; the shortest of six steps counts."""
    known, longest = step_costs(target, lean), max(contexts)
    lengths = sorted({min(CONTEXT, longest // 8), *(longest * quarters // 4 for quarters in (1, 2, 3, 4))})
    measured: dict[tuple[int, int, int], float] = {}
    with engine_attention([target]):
        for rows, cached, nodes in itertools.product(sorted({1, *batches}), lengths, (1, 5)):
            step = chain_step(target, lean, rows, cached, nodes)
            measured[rows, cached, nodes] = min(step_seconds(step, cached) for _ in range(7))
    return ContextCosts(known, measured)
