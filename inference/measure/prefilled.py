"""A batch of long texts that is read once and continued by several drafters in turn, for measuring."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.prompts import prompts
from draftsmith.inference.drafters.compressed import CompressedDrafter
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.engine.cache import KVCache
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


class _Reader(PlainDrafter):
    """Keeps what the engine gives a drafter to read of prompts: the parts, and features ``[T, F]`` of their tokens,
    with the inputs of these layers; without features if ``captures`` is None."""

    def __init__(self, device: torch.device, captures: Sequence[int] | None) -> None:
        super().__init__(device)
        self.captures, self.keeps = captures or (), captures is not None
        self.parts: list[tuple[Tensor, Chunk]] = []

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        self.parts.append((features if self.keeps else features[:0].clone(), chunk))


class Prefilled:
    """A batch of texts of one length that is read once; steps of any drafter continue from there, in greedy mode.

    captures: layers whose inputs its drafters read besides the last hidden states; None: they read no features.
    lean: as SpeculativeDecoder takes it.
    """

    def __init__(
        self,
        target: Target,
        texts: Sequence[list[int]],
        new_tokens: int,
        captures: Sequence[int] | None = None,
        lean: bool | None = None,
    ) -> None:
        self.target, self.texts, self.rows, self.lean = target, texts, len(texts), lean
        reader = _Reader(target.device, captures)
        self.new_tokens, self.parts, self.captures = new_tokens, reader.parts, [*reader.captures]
        self.capacity = capacity_for(len(texts[0]) + 2 * new_tokens + ROOM, reader)
        step = Step(target, reader, "greedy", self.rows, self.capacity, static=static_by_default(target), lean=lean)
        began = self._now()
        step.begin(range(0, self.rows), texts, [Sampling()] * self.rows)
        self.prefill_seconds = self._now() - began
        self.cache, state = step.cache, step.state
        self.kept = [each.clone() for each in (state.root, state.feature, step.cache.lengths)]
        self.read: dict[int, KVCache] = {}  # of draft models, by their id, a cache that holds the texts
        self.plain = self.step(PlainDrafter(target.device))

    def step(self, drafter: Drafter) -> Step:
        """A step of a drafter on a copy of the cache. Raises ValueError: its drafts are longer than the cache has room
        for."""
        if capacity_for(len(self.texts[0]) + 2 * self.new_tokens, drafter) > self.capacity:
            raise ValueError(f"drafts of {drafter.num_nodes - 1} tokens, {drafter.max_depth} deep, have no room here")
        static = static_by_default(self.target)
        step = Step(self.target, drafter, "greedy", self.rows, self.capacity, static=static, lean=self.lean)
        step.cache.take(self.cache)
        step.active.fill_(True)
        step.verifier.begin(slice(0, self.rows), self.texts, [Sampling()] * self.rows)
        return step

    def run(self, step: Step) -> Continuation:
        """Continue all texts by ``new_tokens`` tokens on average, none by more than twice as many."""
        self._restore(step)
        step.launch()()  # the first one allocates, and captures a graph
        self._restore(step)
        committed: list[list[int]] = [[] for _ in self.texts]
        began = self._now()
        if isinstance(step.drafter, CompressedDrafter | DraftModelDrafter):
            step.drafter.select([len(text) for text in self.texts])
        totals, selected = torch.zeros(self.rows), self._now()
        while totals.mean() < self.new_tokens and totals.max() < 2 * self.new_tokens:
            rows, _ = step.launch()()
            for own, row in zip(committed, rows, strict=True):
                own.append(row[0])
            totals += torch.tensor([row[0] for row in rows])
        return Continuation(selected - began, time.perf_counter() - selected, committed)

    def _now(self) -> float:
        """When all that the device was given is done."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _restore(self, step: Step) -> None:
        drafter = step.drafter
        self._read(drafter)
        root, feature, lengths = self.kept
        step.state.root.copy_(root)
        step.state.feature.copy_(self._features(feature, drafter))
        step.cache.lengths.copy_(lengths)
        drafter.begin(slice(0, self.rows))

    def _read(self, drafter: Drafter) -> None:
        """Let a drafter read the texts; a draft model runs them once, whatever its trees and its cache."""
        known = self.read.get(id(drafter.model)) if isinstance(drafter, DraftModelDrafter) else None
        if known is None or not isinstance(drafter, DraftModelDrafter):
            for features, chunk in self.parts:
                drafter.prefill(self._features(features, drafter), chunk)
            if isinstance(drafter, DraftModelDrafter):
                self.read[id(drafter.model)] = drafter.own
        else:
            drafter.read_cached(known, [chunk for _, chunk in self.parts])

    def _features(self, features: Tensor, drafter: Drafter) -> Tensor:
        """Of ``[…, F]`` what a drafter reads."""
        parts = features.split(self.target.hidden_size, -1)
        own = [parts[1 + self.captures.index(layer)] for layer in drafter.captures]
        return torch.cat([parts[0], *own], -1) if own else parts[0]


def by_depth(committed: Sequence[Sequence[int]], drafts: int) -> list[list[int]]:
    """For each depth from 1 on: how often a token was drafted after accepted ones, and how often it was accepted."""
    accepted = [count - 1 for row in committed for count in row]
    return [[sum(n >= d - 1 for n in accepted), sum(n >= d for n in accepted)] for d in range(1, drafts + 1)]


def windows(target: Target, source: str, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Texts of ``length`` tokens: held-out windows as data/prompts.py cuts them of a source.
    Raises ValueError: there are fewer, or the target has no tokenizer."""
    if target.tokenizer is None:
        raise ValueError(f"target '{target.name}' has no tokenizer")
    return [prompt.tokens for prompt in prompts(source, "test", count, length, target.tokenizer, seed)]


def longest_context(target: Target, new_tokens: int) -> int:
    """The longest texts that :class:`Prefilled` can continue within the target's context."""
    return target.context - 2 * new_tokens - 3 * MOST
