"""Prompts as they are prefilled: parts of several, one after the other in one forward pass, without padding.

Shape letters: P parts, T tokens of all of them, B rows of the cache.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.inference.verify.sampling import Sampling

PREFILL_CHUNK = 512  # tokens of one prompt in one pass, at most


@dataclass
class Prompt:
    """A prompt that is prefilled into a row of the cache.

    done: its first tokens that the cache holds.
    source, shared, common: another row, how many of the first tokens are copied from it once it holds them, and how
        many it will have in common. None: no other row.
    """

    row: int
    tokens: Sequence[int]
    sampling: Sampling
    done: int = 0
    source: int | None = None
    shared: int = 0
    common: int = 0

    @property
    def left(self) -> int:
        """Tokens that are still to be run."""
        return len(self.tokens) - self.done


class Part(NamedTuple):
    """Consecutive tokens of a prompt: its row of the cache, the first one's position, and their number."""

    row: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Chunk:
    """What one pass of prompts runs: parts in different rows, one after the other.

    parts: on the host.
    tokens, rows, positions: ``[T]`` int64 on the device: of each token its id, its row, and its position in the text,
        which is its slot in the cache.
    """

    parts: Sequence[Part]
    tokens: Tensor
    rows: Tensor
    positions: Tensor

    @classmethod
    def of(cls, prompts: Iterable[tuple[int, int, Sequence[int]]], device: torch.device) -> "Chunk":
        """The chunk of (row, first position, tokens) of several prompts."""
        parts: list[Part] = []
        by_token: list[list[int]] = [[], [], []]
        for row, start, tokens in prompts:
            parts.append(Part(row, start, len(tokens)))
            by_token[0] += tokens
            by_token[1] += [row] * len(tokens)
            by_token[2] += range(start, start + len(tokens))
        return cls(parts, *to_device(by_token, device).unbind())

    @property
    def firsts(self) -> list[int]:
        """The place of each part's first token among the T, and T at last."""
        return [*itertools.accumulate((part.count for part in self.parts), initial=0)]


def to_device(values: Sequence[object], device: torch.device) -> Tensor:
    """Whole numbers as a tensor on a device, without waiting for what a GPU is doing."""
    if device.type != "cuda":
        return torch.tensor(values, device=device)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)


def next_chunk(prompts: Sequence[Prompt], most: int, alone: bool, device: torch.device) -> Chunk:
    """The next tokens of these prompts, in their order, ``most`` at most. ``alone``: those of the first prompt only,
    and as many as if nothing else were prefilled."""
    parts: list[tuple[int, int, Sequence[int]]] = []
    for prompt in prompts[:1] if alone else prompts:
        count = min(PREFILL_CHUNK, prompt.left) if alone else min(PREFILL_CHUNK, prompt.left, most)
        if not count:
            break
        parts.append((prompt.row, prompt.done, prompt.tokens[prompt.done : prompt.done + count]))
        most -= count
    return Chunk.of(parts, device)
