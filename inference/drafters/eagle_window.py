"""The pairs of a text that an EAGLE drafter's layer keeps if not all: the first ones (sinks) and the most recent ones,
as StreamingLLM keeps tokens (arXiv 2309.17453). The target verifies over its whole cache, so that texts stay the same.

Other than a model's own cache (:mod:`draftsmith.inference.drafters.compressed`), this one drops what it leaves out: its
size does not depend on the text's length. Selectors that choose by the attention of queries are not for it: a prompt's
pairs are written without running the layer, which then has no queries.

Pair p of a row is in slot p until pairs are left out, then in slot p − left_out. Its sinks are in the first slots,
rotated by ``left_out`` positions: their distance is that within the cache.

Shape letters: B rows, s sinks, S slots, n pairs, G key/value heads, D head width.
"""

import torch
from torch import Tensor

from draftsmith.inference.drafters import compressed
from draftsmith.inference.drafters.compressed import BY_LENGTH, Selector
from draftsmith.inference.drafters.eagle_layer import EagleLayer
from draftsmith.inference.engine.protocol import State
from draftsmith.models.eagle import EagleConfig


def check_selector(selector: Selector, config: EagleConfig) -> None:
    """Raise a ValueError unless an EAGLE drafter's cache can be this one."""
    if config.num_layers > 1:
        raise ValueError(
            f"{selector.name}: an EAGLE drafter of {config.num_layers} layers keeps all pairs; leave it out"
        )
    if not selector.sinks:
        raise ValueError(
            f"{selector.name}:{selector.entries}: an EAGLE drafter's layer reads prompts without queries to select by; "
            f"use streamingllm:{selector.entries}"
        )
    if (kind := config.rope_parameters.get("rope_type")) in BY_LENGTH:
        raise ValueError(
            f"{selector.name}: the EAGLE drafter's sinks cannot be rotated (its rotary embedding, '{kind}', depends on "
            "the text's length); leave it out"
        )


class PairWindow:
    """The pairs that a layer's cache keeps, K of each prompt, and those that are appended to them.

    left_out: ``[B]`` int64, pairs of each row that were dropped.
    most: pairs of a row at the beginning of a step, at most, but for those that are missing from the cache.

    Args:
        layer: with a cache of ``slots`` slots, allocated.
        step_pairs: pairs by which a text grows in a step, at most.
        step_slots: slots that a pass needs after those of the text.
    """

    def __init__(self, selector: Selector, layer: EagleLayer, step_pairs: int, step_slots: int) -> None:
        self.layer, self.step_pairs, self.last_slot = layer, step_pairs, layer.capacity - step_slots
        self.sinks, self.entries, self.most = selector.sinks, selector.entries, selector.entries + compressed.APPENDED
        self.first = torch.zeros_like(layer.both[:, : self.sinks])  # [B, s, 2, G, D], sinks at their own positions
        self.left_out = torch.zeros(layer.rows, dtype=torch.int64, device=self.first.device)
        self.without = [0] * layer.rows  # ``left_out``, on the host
        self.held = [0] * layer.rows  # pairs in the cache, an upper bound; 0 in rows without a text

    @staticmethod
    def slots(selector: Selector, max_missing: int, step_slots: int) -> int:
        """S, for a drafter of which up to ``max_missing`` pairs are missing from the cache."""
        return selector.entries + compressed.APPENDED + selector.sinks + max_missing + step_slots

    def after(self, lengths: Tensor) -> Tensor:
        """The slot that follows each row's first ``lengths [B]`` pairs."""
        return (lengths - self.left_out).clamp(min=0, max=self.last_slot)

    def read(self, row: int, start: int, pairs: Tensor) -> None:
        """Keep of a prompt's pairs from the ``start``-th on, ``[n, 2, G, D]``, those among its first and last ones."""
        if not start:
            self.without[row] = 0
        end, sinks, own = start + len(pairs), self.sinks, self.layer.both[row]
        if start < sinks:
            own[start : min(end, sinks)] = pairs[: sinks - start]
        without = max(0, end - self.entries)
        self._leave_out(row, start, without)
        begin = max(start, sinks + without if without else 0)
        own[begin - without : end - without] = pairs[begin - start :]

    def begin(self, row: int) -> None:
        self.held[row] = self.entries

    def end(self, row: int) -> None:
        self.held[row] = self.without[row] = 0
        self.left_out[row] = 0

    def prepare(self, state: State, cached: Tensor) -> None:
        """Before a step: leave out pairs of rows that hold more than ``most``, which is known after waiting for the
        device, once in some steps. ``cached [B]``: pairs that are not missing, at least where any are."""
        if max(self.held) > self.most:
            pairs = ((state.length - 1) * state.active).tolist()
            for row, (count, stored) in enumerate(zip(pairs, cached.tolist(), strict=True)):
                if not self.held[row]:
                    continue
                if count - self.without[row] > self.most:  # missing pairs get their slots behind the sinks
                    self._leave_out(row, count, min(count - self.entries, stored - self.sinks))
                self.held[row] = max(1, count - self.without[row])
        self.held = [held + self.step_pairs if held else 0 for held in self.held]

    def _leave_out(self, row: int, end: int, without: int) -> None:
        """Leave out ``without`` pairs of a row, of which it holds those before the ``end``-th."""
        before, own, sinks = self.without[row], self.layer.both[row], self.sinks
        without = max(before, without)
        if without and not before:
            self.first[row] = own[:sinks]
        if without > before:
            first = sinks + without  # the first pair that stays
            if end > first:
                own[sinks : end - without] = own[first - before : end - before].clone()
            width, table = own.shape[3], self.layer.table
            cos, sin = table[without].float().view(2, width) / table[0, 0].float()  # their factor is in the keys
            keys = self.first[row, :, 0].float()  # [s, G, D]
            own[:sinks, 0] = (keys * cos + keys.roll(width // 2, -1) * sin).to(own.dtype)
            own[:sinks, 1] = self.first[row, :, 1]
        self.without[row] = without
        self.left_out[row] = without
