"""The target's own continuations of prompts: what a drafter trains on and is calibrated against.

Shape letters: S sequences, T tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.models.target import Target


def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    batch_size: int,
    on_batch: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Greedy continuations by the engine, padded to one length.

    Args:
        on_batch: called with the number of prompts done so far.

    Returns:
        ``tokens [S, T]`` int32 (prompt, answer, padding 0), ``supervised [S, T]`` bool, True at the answer's tokens.
    """
    decoder = SpeculativeDecoder(target)
    length = max(map(len, prompts)) + new_tokens
    tokens = torch.zeros(len(prompts), length, dtype=torch.int32)
    supervised = torch.zeros(len(prompts), length, dtype=torch.bool)
    # Prompts of like length run together, so that little of a batch is padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        for number, result in zip(numbers, decoder.generate([prompts[i] for i in numbers], new_tokens), strict=True):
            prompt = prompts[number]
            row = torch.tensor([*prompt, *result.tokens], dtype=torch.int32)
            tokens[number, : len(row)] = row
            supervised[number, len(prompt) : len(row)] = True
        if on_batch:
            on_batch(start + len(numbers))
    return {"tokens": tokens, "supervised": supervised}
