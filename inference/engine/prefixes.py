"""What the rows of the cache hold, on the host: to find a row whose text begins as a prompt does.

Shape letters: B rows, S slots.
"""

from collections.abc import Sequence

import numpy as np

from draftsmith.inference.engine import prompts as prompting

REUSED_LEAST = 16  # tokens; shorter prefixes are run again


class Prefixes:
    """The tokens of each row's text.

    held: ``[B]``, of how many of them, from the first, the cache holds the keys and values.
    coming: ``[B]``, of how many it will hold them, while a prompt is prefilled; otherwise as ``held``.
    read: ``[B]``, how many of them were a prompt, once it has been prefilled as a whole; 0 before.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.tokens = np.zeros((rows, capacity), np.int32)
        self.held, self.coming, self.read = (np.zeros(rows, np.int64) for _ in range(3))

    def clear(self) -> None:
        self.held[:] = self.coming[:] = self.read[:] = 0

    def begin(self, row: int, prompt: Sequence[int], held: int = 0) -> None:
        """A prompt comes into a row, which holds ``held`` of its tokens already."""
        self.tokens[row, : len(prompt)] = prompt
        self.held[row], self.coming[row], self.read[row] = held, len(prompt), 0

    def move(self, source: int, to: int) -> None:
        """A text moves to another row."""
        for of_rows in (self.tokens, self.held, self.coming, self.read):
            of_rows[to] = of_rows[source]

    def end(self, row: int, answer: Sequence[int]) -> int:
        """A text ends; ``answer``: of its tokens after the prompt those that the cache holds. Returns how many tokens
        it holds of the text."""
        before = int(self.read[row])
        self.tokens[row, before : before + len(answer)] = answer
        self.held[row] = self.coming[row] = before + len(answer)
        return before + len(answer)

    def shared(self, prompt: Sequence[int], alone: bool) -> tuple[np.ndarray, np.ndarray]:
        """With how many tokens each row's text, so far as it is held or coming, begins as the prompt does ``[B]``, and
        how many of these need not be run again ``[B]``: all of a prompt that is the same, else not the last one.
        ``alone``: prompts run alone, for their bits. These depend on the chunks, and an answer's are those of steps,
        so that only whole chunks of a prompt are taken."""
        wanted = np.asarray(prompt, np.int32)
        differs = self.tokens[:, : len(wanted)] != wanted
        common = np.minimum(np.where(differs.any(1), differs.argmax(1), len(wanted)), self.coming)
        prompts = np.where(self.read > 0, self.read, self.coming)
        shared = np.minimum(common, len(wanted) - 1)
        if alone:
            shared = np.minimum(shared, prompts)
            shared -= shared % prompting.PREFILL_CHUNK
        return common, np.where((common == len(wanted)) & (prompts == len(wanted)), len(wanted), shared)
