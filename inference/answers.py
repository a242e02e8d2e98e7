"""The target's own continuations of prompts: what a drafter trains on and is calibrated against.

Shape letters: S sequences, T tokens.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.inference.engine import Generation, SpeculativeDecoder
from draftsmith.models.target import Target


def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch_size: int,
    on_done: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Greedy continuations by the engine, padded to one length.

    Args:
        batch_size: how many are decoded at once.
        on_done: called with the number of prompts done so far.

    Returns:
        ``tokens [S, T]`` int32 (prompt, answer, padding 0), ``supervised [S, T]`` bool, True at the answer's tokens.
    """
    decoder = SpeculativeDecoder(target)
    length = max(map(len, prompts)) + new_tokens
    tokens = torch.zeros(len(prompts), length, dtype=torch.int32)
    supervised = torch.zeros(len(prompts), length, dtype=torch.bool)
    # Prompts of like length run together, so that little of what is looked at is padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    done = itertools.count(1)

    def end(place: int, result: Generation) -> None:
        number = order[place]
        row = torch.tensor([*prompts[number], *result.tokens], dtype=torch.int32)
        tokens[number, : len(row)] = row
        supervised[number, len(prompts[number]) : len(row)] = True
        if on_done:
            on_done(next(done))

    decoder.generate([prompts[i] for i in order], new_tokens, batch_size=batch_size, on_end=end)
    return {"tokens": tokens, "supervised": supervised}
