"""A batch of long texts that is read once and continued by several drafters in turn, for measuring."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.data.prompts import prompts
from draftsmith.inference.drafters.compressed import CompressedDrafter
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.protocol import Drafter, PlainDrafter
from draftsmith.inference.engine.step import Step, capacity_for, static_by_default
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.models.target import Target

MOST = 8  # drafted tokens of a step, at most
ROOM = 96  # slots beyond a text for the drafts of a step, those of other drafters too


@dataclass(frozen=True)
class Continuation:
    """A continuation of a batch. select: seconds of the first selection of all rows. seconds: of the steps, with later
    selections. committed: by row, the tokens that each step committed."""

    select: float
    seconds: float
    committed: list[list[int]]

    @property
    def steps(self) -> int:
        return len(self.committed[0])


class Prefilled:
    """A batch of texts of one length that is read once; steps of any drafter continue from there, in greedy mode."""

    def __init__(self, target: Target, texts: Sequence[list[int]], new_tokens: int) -> None:
        self.target, self.texts, self.rows = target, texts, len(texts)
        drafter = PlainDrafter(target.device)
        self.new_tokens = new_tokens
        self.capacity = capacity_for(len(texts[0]) + 2 * new_tokens + ROOM, drafter)
        self.plain = Step(target, drafter, "greedy", self.rows, self.capacity, static=static_by_default(target))
        began = time.perf_counter()
        self.plain.begin(range(0, self.rows), texts, [Sampling()] * self.rows)
        self.prefill_seconds = time.perf_counter() - began
        state = self.plain.state
        self.kept = [each.clone() for each in (state.root, state.feature, self.plain.cache.lengths)]

    def step(self, drafter: Drafter) -> Step:
        """A step of a drafter that reads no features, on a copy of the cache. Raises ValueError: its drafts are longer
        than the cache has room for."""
        if capacity_for(len(self.texts[0]) + 2 * self.new_tokens, drafter) > self.capacity:
            raise ValueError(f"drafts of {drafter.num_nodes - 1} tokens, {drafter.max_depth} deep, have no room here")
        static = static_by_default(self.target)
        step = Step(self.target, drafter, "greedy", self.rows, self.capacity, static=static)
        step.cache.take(self.plain.cache)
        step.active.fill_(True)
        step.verifier.begin(slice(0, self.rows), self.texts, [Sampling()] * self.rows)
        return step

    def run(self, step: Step) -> Continuation:
        """Continue all texts by ``new_tokens`` tokens on average, none by more than twice as many."""
        self._restore(step)
        step.launch()()  # the first one allocates, and captures a graph
        self._restore(step)
        committed: list[list[int]] = [[] for _ in self.texts]
        began = time.perf_counter()
        if isinstance(step.drafter, CompressedDrafter):
            step.drafter.entries.select_where_due([len(text) for text in self.texts])
        totals, selected = torch.zeros(self.rows), time.perf_counter()
        while totals.mean() < self.new_tokens and totals.max() < 2 * self.new_tokens:
            rows = step.launch()()
            for own, row in zip(committed, rows, strict=True):
                own.append(row[0])
            totals += torch.tensor([row[0] for row in rows])
        return Continuation(selected - began, time.perf_counter() - selected, committed)

    def _restore(self, step: Step) -> None:
        for to, kept in zip((step.state.root, step.state.feature, step.cache.lengths), self.kept, strict=True):
            to.copy_(kept)
        chunk = Chunk.of([(row, 0, text) for row, text in enumerate(self.texts)], self.target.device)
        step.drafter.prefill(step.state.feature, chunk)
        step.drafter.begin(slice(0, self.rows))


def by_depth(committed: Sequence[Sequence[int]], drafts: int) -> list[list[int]]:
    """For each depth from 1 on: how often a token was drafted after accepted ones, and how often it was accepted."""
    accepted = [count - 1 for row in committed for count in row]
    return [[sum(n >= d - 1 for n in accepted), sum(n >= d for n in accepted)] for d in range(1, drafts + 1)]


def windows(target: Target, source: str, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Texts of ``length`` tokens: held-out windows as data/prompts.py cuts them of a source.

    Raises:
        ValueError: there are fewer, or the target has no tokenizer.
    """
    if target.tokenizer is None:
        raise ValueError(f"target '{target.name}' has no tokenizer")
    return [prompt.tokens for prompt in prompts(source, "test", count, length, target.tokenizer, seed)]


def longest_context(target: Target, new_tokens: int) -> int:
    """The longest texts that :class:`Prefilled` can continue within the target's context."""
    return target.context - 2 * new_tokens - 3 * MOST
