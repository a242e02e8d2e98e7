"""The requests that wait, and the texts in the rows of a batch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from draftsmith.inference.engine.request import Generation, Request, checked_length
from draftsmith.inference.engine.step import Observe, Step
from draftsmith.inference.engine.text import stop_string_end

PREFILL_TOKENS = 16_384  # of prompts that begin together, padding included


@dataclass
class Text:
    """A request that is being decoded."""

    number: int
    request: Request
    limit: int
    result: Generation = field(default_factory=Generation)
    began: float = field(default_factory=time.perf_counter)


@dataclass
class Queue:
    """The waiting requests, and the texts in the rows of a batch."""

    step: Step
    waiting: Iterator[Request]
    max_length: int
    on_tokens: Callable[[int, list[int]], None] | None
    on_step: Callable[[int, Generation], None] | None
    on_end: Callable[[int, Generation], None] | None
    refill: int = 1
    results: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts: list[Text | None] = [None] * self.step.rows
        self.step.reset()

    @property
    def busy(self) -> bool:
        return any(self.texts)

    def fill(self, observe: Observe | None) -> None:
        """Begin requests in free rows, until no row is free or no request waits; not before ``refill`` rows are."""
        if self.busy and self.texts.count(None) < self.refill:
            return
        while new := self._next_texts():
            rows, requests = [row for row, _ in new], [text.request for _, text in new]
            first = self.step.begin(rows, [r.prompt for r in requests], [r.sampling for r in requests])
            if observe:
                observe("prefill", None, None)
            for (row, text), token in zip(new, first, strict=True):
                if token < 0:
                    raise self._not_finite(text)
                self.texts[row], self.step.bounds[row] = text, text.request.max_draft_nodes
                self._add(row, text, [token], [0], step=False)

    def _next_texts(self) -> list[tuple[int, Text]]:
        """Rows and texts of new requests, for free rows, until they make :data:`PREFILL_TOKENS`, padded. One at a time
        where a text is a function of its request alone, and the bits of a row do not depend on the other rows: those of
        a prompt then do not either."""
        alone = self.step.runner.bitwise and self.step.mode in ("greedy", "sample")
        new: list[tuple[int, Text]] = []
        longest = 0
        for row in (row for row, text in enumerate(self.texts) if text is None):
            if new and (alone or longest * len(new) >= PREFILL_TOKENS):
                break
            request = next(self.waiting, None)
            if request is None:
                break
            number = len(self.results)
            length = checked_length(request, number, self.step.target)
            if length > self.max_length:
                raise ValueError(
                    f"prompt {number + 1} needs {length} tokens with its answer, max_length is {self.max_length}; "
                    "raise it"
                )
            sampling = request.sampling
            if self.step.mode == "greedy" and (sampling.counts_tokens or sampling.logit_bias):
                raise ValueError(
                    f"prompt {number + 1}: mode greedy has no logit_bias, presence and frequency penalty; take mode "
                    "sample with temperature 0, which is greedy, too"
                )
            if request.max_draft_nodes is not None and not self.step.can_be_bounded:
                raise ValueError(
                    f"prompt {number + 1}: max_draft_nodes bounds trees of several sizes: those of greedy decoding and "
                    "coupled sampling, unless all nodes are asked for; leave it out"
                )
            text = Text(number, request, length - len(request.prompt))
            text.result.source = self.step.target, request.stop_strings
            self.results.append(text.result)
            new.append((row, text))
            longest = max(longest, len(request.prompt))
        return new

    def take(self, committed: list[list[int]], texts: list[Text | None], nodes: int) -> None:
        """Add the tokens that a step of trees with so many ``nodes`` committed, rows of ``Step.committed``, to the
        texts that the rows had when it was launched; they may have ended since."""
        depth, sources = self.step.drafter.max_depth, self.step.num_sources
        for row, (values, text) in enumerate(zip(committed, texts, strict=True)):
            if text is not None and not text.result.finish_reason:
                count = values[0]
                if count < 0:
                    raise self._not_finite(text)
                drafted_by = values[depth + 2 :][: count - 1] if sources else [1] * (count - 1)
                kept = self._add(row, text, [*values[1:count], values[depth + 1]], [*drafted_by, 0], step=True)
                if sources:
                    self._count(text.result, drafted_by[:kept], *values[2 * depth + 2 :][: 1 + sources])
                else:
                    text.result.drafted += nodes - 1

    def _count(self, result: Generation, accepted: list[int], drafted: int, *proposed: int) -> None:
        """Add a step's counts by source: ``accepted`` has the source bits of the accepted tokens, ``drafted`` is the
        number of drafted nodes, ``proposed`` the number of those that each source proposed."""
        result.drafted += drafted
        if not result.proposed:
            result.proposed, result.accepted_from = [0] * len(proposed), [0] * len(proposed)
        for source, nodes in enumerate(proposed):
            result.proposed[source] += nodes
            result.accepted_from[source] += sum(bits >> source & 1 for bits in accepted)

    def _not_finite(self, text: Text) -> FloatingPointError:
        dtype = str(self.step.target.dtype).removeprefix("torch.")
        advice = "use bfloat16 or float32" if dtype == "float16" else "its weights may be damaged"
        return FloatingPointError(f"prompt {text.number + 1}: the target's logits are not finite in {dtype}; {advice}")

    def _add(self, row: int, text: Text, new: list[int], drafted_by: list[int], *, step: bool) -> int:
        """Append tokens and their ``drafted_by``, trimmed where the text ends; returns how many were appended."""
        result, request = text.result, text.request
        stops = self.step.target.stop_ids if request.stop_ids is None else request.stop_ids
        new = new[: text.limit - len(result.tokens)]
        for place, token in enumerate(new):
            if token in stops:
                new = new[: place + 1]
                result.finish_reason = "stop"
                break
        before = len(result.tokens)
        result.tokens += new
        if request.stop_strings:
            end = stop_string_end(self.step.target.tokenizer, result.tokens, before, request.stop_strings)
            if end:
                del result.tokens[end:]
                new = result.tokens[before:]
                result.finish_reason = "stop"
        result.drafted_by += drafted_by[: len(new)]
        if step:
            result.accepted.append(len(new))
        if not result.finish_reason and len(result.tokens) >= text.limit:
            result.finish_reason = "length" if text.limit == request.max_new_tokens else "context"
        if self.on_tokens:
            self.on_tokens(text.number, list(new))
        if self.on_step:
            self.on_step(text.number, result)
        if result.finish_reason:
            result.seconds = time.perf_counter() - text.began
            self.texts[row] = None
            self.step.end(row)
            if self.on_end:
                self.on_end(text.number, result)
        return len(new)
