"""Steps on the first rows of a batch alone, by views in the place of a step's buffers.

For drafters without state by row: where no request waits, rows that are empty would only take time.
"""

from collections.abc import Sequence
from typing import Any

from draftsmith.inference.verify.sampling import Noise


class FirstRows:
    """The rows that a :class:`~draftsmith.inference.engine.step.Step` runs on. Its buffers with a row for each text are
    named here."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self._by_row: tuple[tuple[object, Sequence[str]], ...] = (
            (step, ("active", "zeros", "ones", "committed", "counts_and_tokens", "tokens", "by_source", "expected")),
            (step.state, ("root", "length", "feature", "active", "step")),
            (step.cache, ("lengths",)),
            (step.verifier, ("step", "seen", "counts", "settings")),
        )
        self._whole: list[tuple[object, str, Any]] = []  # the buffers of all rows, while fewer run

    def use(self, rows: int) -> None:
        """Run steps on the first ``rows`` rows from now on. New texts begin only while all rows run."""
        step = self.step
        if rows == step.running:
            return
        assert not step.drafter.keeps_rows
        for owner, name, whole in self._whole:
            setattr(owner, name, whole)
        owned = [(owner, name, getattr(owner, name)) for owner, names in self._by_row for name in names]
        self._whole = [each for each in owned if each[2] is not None] if rows < step.rows else []
        for owner, name, whole in self._whole:
            setattr(owner, name, whole[:rows])
        step.cache.run_on(rows)
        settings = step.verifier.settings
        step.state.settings = settings if step.mode == "mss" else None
        step.state.noise = Noise(settings, step.cache.lengths) if step.mode == "sample" else None

    def move(self, source: int, to: int, slots: int) -> None:
        """Move the text in a row to a free row; ``slots``: of its tokens, and of those that a step adds."""
        step, state, verifier = self.step, self.step.state, self.step.verifier
        step.cache.copy_row(source, to, min(slots, step.capacity))
        step.prefill.prefixes.move(source, to)
        verifier.settings.move(source, to)
        buffers = step.cache.lengths, state.root, state.feature, step.prefill.last, step.active
        for buffer in (*buffers, *verifier.buffers()):
            buffer[to] = buffer[source]
        step.bounds[to] = step.bounds[source]
        step.logprobs.move(source, to)
        step.end(source)
        step.prefill.forget([source])
