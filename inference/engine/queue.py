"""The requests that wait, and the texts in the rows of a batch."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from draftsmith.inference.engine import prompts as prompting
from draftsmith.inference.engine.logprobs import TokenLogprobs
from draftsmith.inference.engine.prefill import PREFILL_TOKENS
from draftsmith.inference.engine.prefixes import REUSED_LEAST
from draftsmith.inference.engine.prompts import Prompt
from draftsmith.inference.engine.request import Generation, Request, checked_length
from draftsmith.inference.engine.step import Observe, Step
from draftsmith.inference.engine.text import StopStrings

LONGEST_WAIT = 0.1  # seconds that a row is free while texts wait for others to begin with
# Rows that a step on a GPU has at least. By calculation fewer take as long, since reading the weights decides; and each
# number of rows is another graph to capture.
FEWEST_ON_GPU = 32


@dataclass(eq=False)  # compared by identity, since rows are counted at the end of each text
class Text:
    """A request that is being decoded."""

    number: int
    request: Request
    limit: int
    stops: Collection[int]  # ids that end it
    row: int = -1  # of the batch
    result: Generation = field(default_factory=Generation)
    began: float = field(default_factory=time.perf_counter)


@dataclass
class Queue:
    """The waiting requests, and the texts in the rows of a batch."""

    step: Step
    waiting: Iterator[Request]
    max_length: int
    on_tokens: Callable[[int, list[int]], bool | None] | None
    on_step: Callable[[int, Generation], None] | None
    on_end: Callable[[int, Generation], None] | None
    refill: int = 1
    results: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts: list[Text | None] = [None] * self.step.rows  # that are being decoded, by row
        self.prompts: list[tuple[Prompt, Text]] = []  # that are being prefilled
        self.begun: list[tuple[Prompt, int]] = []  # of these the complete ones, with their texts' first tokens
        self.free_since = 0.0  # when the first of the free rows became free
        self.exhausted = False  # no request waited when one was last asked for
        self.stop_strings = StopStrings(self.step.target.tokenizer)
        self.step.reset()

    @property
    def decoding(self) -> bool:
        """Whether a text is being decoded."""
        return any(self.texts)

    @property
    def busy(self) -> bool:
        """Whether a text is being decoded, or its prompt prefilled."""
        return self.decoding or bool(self.prompts)

    def fill(self, observe: Observe | None) -> None:
        """Take requests into free rows, and prefill their prompts, until a step is due: after as many tokens as
        ``refill`` chunks have; while no text is decoded, when one is."""
        self._copy_prefixes()  # before rows that have become free are taken
        self._take_requests()
        counts, left = self.step.counts, PREFILL_TOKENS
        if self.decoding:
            left = self.refill * prompting.PREFILL_CHUNK
        while self.prompts and (self.begun or left > 0 or not self.decoding):
            before = counts.prefilled_tokens
            self._copy_prefixes()
            waiting = [prompt for prompt, _ in self.prompts if prompt.source is None and prompt.left]
            if waiting and (left > 0 or not self.decoding):
                self.begun += self.step.prefill.run(waiting, left if self.decoding else PREFILL_TOKENS)
                self._copy_prefixes()  # before a row is taken by another text
                if observe:
                    observe("prefill", None, None)
            left -= counts.prefilled_tokens - before
            self._begin_texts()
            self._take_requests()
        self._shrink()

    def _shrink(self) -> None:
        """Once no request waits, run steps on as few rows as hold the texts, a power of two. Texts in the other rows
        move."""
        step, count = self.step, len(self.texts) - self.texts.count(None)
        fewest = FEWEST_ON_GPU if step.device.type == "cuda" else 1
        rows = max(fewest, 1 << (count - 1).bit_length()) if count else step.running
        if self.prompts or not self.exhausted or step.drafter.keeps_rows or rows >= step.running:
            return
        step.prefill.forget([row for row, text in enumerate(self.texts) if text is None])
        free = (row for row in range(rows) if self.texts[row] is None)
        for text in self.texts[rows : step.running]:
            if text is not None:
                held = len(text.request.prompt) + len(text.result.tokens)
                source, text.row = text.row, next(free)
                step.first_rows.move(source, text.row, held + 2 * (step.drafter.max_depth + 1))
                self.texts[text.row], self.texts[source] = text, None
        step.first_rows.use(rows)

    def _begin_texts(self) -> None:
        """Decode the texts whose prompts are complete."""
        first = {prompt.row: token for prompt, token in self.begun}
        texts = [(prompt.row, text) for prompt, text in self.prompts if prompt.row in first]
        self.prompts = [each for each in self.prompts if each[0].row not in first]
        self.begun = []
        for row, text in texts:
            if first[row] < 0:
                raise self._not_finite(text)
            self.texts[row], self.step.bounds[row], text.row = text, text.request.max_draft_nodes, row
            text.result.prompt_logprobs, logprobs = self.step.logprobs.of_prompt(row)
            self._add(text, [first[row]], [0], logprobs)

    def _take_requests(self) -> None:
        """Take requests into free rows, until none is free or no request waits: if ``refill`` rows are free, one has
        been free for ``LONGEST_WAIT``, or nothing else runs."""
        number_free = self.texts.count(None) - len(self.prompts)
        if not number_free:
            return
        if self.busy and number_free < self.refill and time.perf_counter() - self.free_since < LONGEST_WAIT:
            return
        taken = {prompt.row for prompt, _ in self.prompts}
        free = np.array([row for row, text in enumerate(self.texts) if text is None and row not in taken], np.int64)
        while len(free):
            text = self._next_text()
            if text is None:
                self.step.prefill.forget(free.tolist())
                break
            self.step.first_rows.use(self.step.rows)
            prompt = self._place(text.request, free)
            free = free[free != prompt.row]
            self.prompts.append((prompt, text))

    def _place(self, request: Request, free: np.ndarray) -> Prompt:
        """A request's prompt in a free row: the one that holds most of its first tokens. If another row holds more of
        them, or will, they are copied to the row that holds least."""
        prefill, prefixes = self.step.prefill, self.step.prefill.prefixes
        row = int(free[prefixes.held[free].argmin()])
        prompt = Prompt(row, request.prompt, request.sampling)
        likely = request.logprobs, request.prompt_logprobs, request.logprobs_mode  # before anything of it is run
        reuses = self.step.drafter.reuses and request.prompt_logprobs is None
        if reuses and len(request.prompt) >= REUSED_LEAST:
            common, shared = prefixes.shared(request.prompt, prefill.alone)
            best, of_free = int(shared.argmax()), int(free[shared[free].argmax()])
            if shared[of_free] >= max(REUSED_LEAST, shared[best] - REUSED_LEAST):
                prompt.row = of_free
                self.step.logprobs.begin(of_free, *likely)
                token = prefill.reuse(prompt, of_free, int(shared[of_free]), int(common[of_free]))
                self.begun += [] if token is None else [(prompt, token)]
                return prompt
            if shared[best] >= REUSED_LEAST:
                prompt.source, prompt.shared, prompt.common = best, int(shared[best]), int(common[best])
        self.step.logprobs.begin(row, *likely)
        prefixes.begin(row, request.prompt)
        return prompt

    def _copy_prefixes(self) -> None:
        """Copy the first tokens of prompts from the rows that hold them by now."""
        prefixes = self.step.prefill.prefixes
        for prompt, _ in self.prompts:
            source = prompt.source
            if source is None or prefixes.held[source] < prompt.shared:
                continue
            if prompt.shared == len(prompt.tokens) and not prefixes.read[source]:
                continue
            prompt.source, common = None, min(prompt.common, int(prefixes.held[source]))
            token = self.step.prefill.reuse(prompt, source, prompt.shared, common)
            self.begun += [] if token is None else [(prompt, token)]

    def _next_text(self) -> Text | None:
        """The next request, after checks; None if none waits."""
        request = next(self.waiting, None)
        self.exhausted = request is None
        if request is None:
            return None
        number = len(self.results)
        length = checked_length(request, number, self.step.target)
        if length > self.max_length:
            raise ValueError(
                f"prompt {number + 1} needs {length} tokens with its answer, max_length is {self.max_length}; raise it"
            )
        sampling = request.sampling
        if self.step.mode == "greedy" and (sampling.counts_tokens or sampling.logit_bias):
            raise ValueError(
                f"prompt {number + 1}: mode greedy has no logit_bias, presence and frequency penalty; take mode sample "
                "with temperature 0, which is greedy, too"
            )
        if request.max_draft_nodes is not None and not self.step.can_be_bounded:
            raise ValueError(
                f"prompt {number + 1}: max_draft_nodes bounds trees of several sizes: those of greedy decoding and "
                "coupled sampling, unless all nodes are asked for; leave it out"
            )
        stops = self.step.target.stop_ids if request.stop_ids is None else request.stop_ids
        text = Text(number, request, length - len(request.prompt), stops)
        text.result.source = self.step.target, stops, request.stop_strings
        self.results.append(text.result)
        return text

    def take(self, committed: list[list[int]], logprobs: Tensor | None, texts: list[Text | None], nodes: int) -> None:
        """Add the tokens that a step of trees with so many ``nodes`` committed, as ``Step.launch`` returns them, to the
        texts that the rows had when it was launched; they may have ended since."""
        depth, sources = self.step.drafter.max_depth, self.step.num_sources
        for row, (values, text) in enumerate(zip(committed, texts, strict=True)):
            if text is None or text.result.finish_reason:
                self.step.counts.idle_row_steps += 1
            else:
                count = values[0]
                if count < 0:
                    raise self._not_finite(text)
                drafted_by = values[depth + 2 :][: count - 1] if sources else [1] * (count - 1)
                new, own = [*values[1:count], values[depth + 1]], None if logprobs is None else logprobs[row]
                drafted = values[2 * depth + 2 :][: 1 + sources] if sources else [nodes - 1]
                self._add(text, new, [*drafted_by, 0], own, drafted)

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

    def _add(
        self, text: Text, new: list[int], drafted_by: list[int], logprobs: Tensor | None, drafted: Sequence[int] = ()
    ) -> None:
        """Append tokens, their ``drafted_by`` and, if they are asked for, their log-probabilities (packed, see
        :mod:`~draftsmith.inference.engine.logprobs`), trimmed where the text ends. ``drafted``: in the step that
        committed them, the number of drafted nodes, and of those of each source; of the prefill's token empty."""
        result, request, stops = text.result, text.request, text.stops
        new = new[: text.limit - len(result.tokens)]
        for place, token in enumerate(new):
            if token in stops:
                new = new[: place + 1]
                result.finish_reason = "stop"
                break
        before = len(result.tokens)
        result.tokens += new
        if request.stop_strings:
            end = self.stop_strings.end(result.tokens, before, request.stop_strings)
            if end:
                del result.tokens[end:]
                new = result.tokens[before:]
                result.finish_reason = "stop"
        result.drafted_by += drafted_by[: len(new)]
        if request.logprobs is not None and logprobs is not None:
            result.logprobs = result.logprobs or TokenLogprobs(request.logprobs_mode)
            result.logprobs.add(logprobs[: len(new)], request.logprobs)
        if drafted:
            result.accepted.append(len(new))
            self._count(result, drafted_by[: len(new)], *drafted)
        if not result.finish_reason and len(result.tokens) >= text.limit:
            result.finish_reason = "length" if text.limit == request.max_new_tokens else "context"
        if self.on_tokens and self.on_tokens(text.number, list(new)) is False and not result.finish_reason:
            result.finish_reason = "cancelled"
        if self.on_step:
            self.on_step(text.number, result)
        if result.finish_reason:
            result.seconds = time.perf_counter() - text.began
            if self.texts.count(None) == len(self.prompts):
                self.free_since = time.perf_counter()
            self.texts[text.row] = None
            self.step.end(text.row, result.tokens)
            if self.on_end:
                self.on_end(text.number, result)
