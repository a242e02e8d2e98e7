"""The target's own continuations of prompts, which drafters train on and are calibrated with.

Shape letters: S sequences, T tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.models.target import Target


def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch_size: int,
    on_done: Callable[[float], None] | None = None,
    lean: bool | None = None,
) -> dict[str, Tensor]:
    """Greedy continuations by the engine, ``batch_size`` at once, padded to the length of the longest.

    Args:
        on_done: called after each step of each prompt with the number of prompts done so far; an unfinished one counts
            by its share of ``new_tokens``, so that the number grows as evenly as the work.
        lean: as :class:`SpeculativeDecoder` takes it.

    Returns:
        ``tokens [S, T]`` int32 (prompt, answer, padding 0), ``supervised [S, T]`` bool, True at the answer's tokens.
    """
    decoder = SpeculativeDecoder(target, lean=lean)
    # Prompts of similar length run together, to keep padding small.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    tokens_done = 0  # an answer that has ended counts as new_tokens

    def add(count: int) -> None:
        nonlocal tokens_done
        tokens_done += count
        if on_done:
            on_done(tokens_done / new_tokens)

    results = decoder.generate(
        [prompts[i] for i in order],
        new_tokens,
        batch_size=batch_size,
        on_end=lambda _, result: add(new_tokens - len(result.tokens)),
        on_tokens=lambda _, new: add(len(new)),
    )
    decoder.free()
    answers = dict(zip(order, results, strict=True))
    return padded(prompts, [answers[number].tokens for number in range(len(prompts))])


def padded(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Prompts and their answers as rows, as :func:`answer` returns them."""
    rows = [[*prompt, *continuation] for prompt, continuation in zip(prompts, answers, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int32)
    supervised = torch.zeros(tokens.shape, dtype=torch.bool)
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        tokens[number, : len(row)] = torch.tensor(row, dtype=torch.int32)
        supervised[number, len(prompt) : len(row)] = True
    return {"tokens": tokens, "supervised": supervised}
