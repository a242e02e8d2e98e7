"""The engine: decodes requests with any ``transformers`` decoder and any drafter, in batches.

Requests wait in a queue; a row whose text has ended takes the next request at once (continuous batching). A step is
described in :mod:`draftsmith.inference.engine.step`. Plain decoding is the same loop with a tree of one node.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from draftsmith.common.command import counted
from draftsmith.inference.engine.protocol import Drafter, PlainDrafter
from draftsmith.inference.engine.runner import check_same_bits, engine_attention, find_lean
from draftsmith.inference.engine.step import Observe, ReadCommitted, Step, capacity_for, on_device, static_by_default
from draftsmith.inference.engine.text import TextStream, answer_tokens, stop_string_end
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import MODES, Mode
from draftsmith.kernels.backend import same_bits
from draftsmith.kernels.linear import MOST_ON_CPU
from draftsmith.models.lean import LeanDecoder
from draftsmith.models.target import Target

PREFILL_TOKENS = 16_384  # of prompts that begin together, padding included
CACHE_GRANULE = 256  # slots; the cache of static steps is a multiple of it


@dataclass(frozen=True)
class Request:
    """One text to decode. Its fields are checked when its decoding begins.

    prompt: token ids, at least one; a one-dimensional tensor or array is converted to a list, and of what a tokenizer
        or its ``apply_chat_template`` returns for one text, the ``input_ids`` are taken.
    max_new_tokens: limit of new tokens.
    sampling: sampling parameters, for modes other than greedy; temperature 1 if left out.
    stop_ids: token ids that end the text; the target's own if None.
    stop_strings: strings that end the text; the token that completes one is the last. Needs the target's tokenizer.
    max_draft_nodes: nodes that are drafted in each of its steps, at most, by it or any text decoded beside it; 0: plain
        decoding. Only in greedy decoding and coupled sampling, whose texts do not depend on it.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] | None = None
    stop_strings: Sequence[str] = ()
    max_draft_nodes: int | None = None

    def __post_init__(self) -> None:
        given: Any = self.prompt
        prompt: Any = given["input_ids"] if isinstance(given, Mapping) and "input_ids" in given else given
        if prompt is not given and len(prompt) == 1 and not _is_whole(prompt[0]):  # a batch of one
            prompt = prompt[0]
        if getattr(prompt, "ndim", None) == 1:
            prompt = prompt.tolist()
        object.__setattr__(self, "prompt", prompt)
        if _is_whole(self.max_new_tokens):
            object.__setattr__(self, "max_new_tokens", int(self.max_new_tokens))  # sums of NumPy integers may overflow


@dataclass
class Generation:
    """Result of one request.

    tokens: new tokens, up to and including the first stop id.
    accepted: committed tokens of each step, bonus token included, after trimming; without the prefill's token.
    drafted_by: for each token, the bits of the drafter's ``sources`` that proposed it (1 if it names none); 0 if the
        token is the target's own.
    finish_reason: ``stop`` (a stop id or string), ``length`` (the limit) or ``context`` (the target's last position).
    drafted: number of proposed nodes, roots excluded, padding too unless the drafter names its ``sources``.
    proposed, accepted_from: for each source, how many nodes it proposed, and how many of these were committed; a node
        proposed by several sources counts for each.
    seconds: from the beginning of the prompt's pass to the end of the text, other rows' work included.
    source: the target and the stop strings, for ``text``.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted_by: list[int] = field(default_factory=list)
    finish_reason: str = ""
    drafted: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted_from: list[int] = field(default_factory=list)
    seconds: float = field(default=0.0, compare=False)
    source: "tuple[Target, Sequence[str]] | None" = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The text of the tokens: without the stop token that ends it, and up to a stop string, which is no part of it.
        Raises ValueError: the target has no tokenizer."""
        if self.source is None or self.source[0].tokenizer is None:
            raise ValueError("the target has no tokenizer, which a text needs; take result.tokens")
        target, strings = self.source
        stream = TextStream(target.tokenizer, strings)
        return stream.add(answer_tokens(target, self.tokens)) + stream.end()


class SpeculativeDecoder:
    """Decoder of a target and a drafter: greedy (the same tokens as plain decoding), sampling (the target's own
    distribution), or Medusa's typical acceptance, which is lossy.

    Args:
        static: run steps of fixed shape, launched before the previous result is known; on a GPU in a CUDA graph.
            Left out: only on a GPU that holds the whole target.
        lean: run the lean decoder of ``models/lean.py`` (True), the model's own modules (False), or lean where there is
            one (left out).

    Raises:
        ValueError: the lean decoder is asked for (True), and the target has none.

    Example:
        >>> decoder = SpeculativeDecoder(target, drafter)
        >>> decoder.generate([[5, 7, 11]], max_new_tokens=32)[0].tokens
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, static: bool | None = None, lean: bool | None = None
    ) -> None:
        self.target = target
        self.drafter: Drafter = PlainDrafter(target.device) if drafter is None else drafter
        self.static = static_by_default(target) if static is None else static
        self.lean = lean
        if lean:
            find_lean(target, lean)
        if same_bits():
            check_same_bits(target, self.drafter.max_depth, lean)
        self._step: Step | None = None

    @property
    def execution(self) -> str:
        """How the last call's steps ran, see :attr:`Step.execution`."""
        return self._step.execution if self._step else "not yet"

    @property
    def prunes_nodes(self) -> bool:
        """Whether the last call's steps chose how many nodes to verify, by what steps with so many rows take."""
        return self._step is not None and self._step.prunes_nodes

    @property
    def rows(self) -> int:
        """Texts of the last call's steps; 0 before the first call."""
        return self._step.rows if self._step else 0

    @property
    def bitwise(self) -> bool:
        """Whether the bits of a row of a step do not depend on the other rows, so that greedy texts are those of plain
        decoding, without near-ties: the lean decoder by kernels/cpu.cpp, unless the last call's steps had more rows
        than the LM head's product of our own takes."""
        lean = find_lean(self.target, self.lean)
        rows = self._step.cache.rows * self.drafter.num_nodes if self._step else 1
        few = rows <= MOST_ON_CPU or self.target.device.type != "cpu"
        return isinstance(lean, LeanDecoder) and not lean.rows_differ and few

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        mode: Mode = "greedy",
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop_ids: frozenset[int] | None = None,
        stop_strings: Sequence[str] = (),
        max_draft_nodes: int | None = None,
        batch_size: int | None = None,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        on_step: Callable[[int, Generation], None] | None = None,
        observe: Observe | None = None,
        on_end: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts with the same limits and stops, see :class:`Request` and :meth:`serve`.

        Args:
            sampling: sampling parameters of all prompts, or one for each.
            batch_size: number of prompts decoded at once; all if left out.

        Raises:
            ValueError, FloatingPointError: as :meth:`serve`; also if the numbers of samplings and prompts differ.
        """
        sampling = Sampling() if sampling is None else sampling
        if isinstance(sampling, Sampling):
            samplings = [sampling] * len(prompts)
        elif isinstance(sampling, Sequence):
            samplings = list(sampling)
        else:
            raise ValueError(f"sampling is of type {type(sampling).__name__}; give a Sampling, or one for each prompt")
        if len(samplings) != len(prompts):
            given = f"{counted(len(samplings), 'sampling')} for {counted(len(prompts), 'prompt')}"
            raise ValueError(f"{given}; give one, or one for each")
        requests = [
            Request(prompt, max_new_tokens, parameters, stop_ids, stop_strings, max_draft_nodes)
            for prompt, parameters in zip(prompts, samplings, strict=True)
        ]
        rows = max(1, len(requests)) if batch_size is None else batch_size
        return self.serve(
            requests, rows, mode=mode, on_tokens=on_tokens, on_step=on_step, observe=observe, on_end=on_end
        )

    def serve(
        self,
        requests: Iterable[Request],
        batch_size: int,
        *,
        mode: Mode = "greedy",
        max_length: int | None = None,
        refill: int = 1,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        on_step: Callable[[int, Generation], None] | None = None,
        observe: Observe | None = None,
        on_end: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """Decode a queue of requests, ``batch_size`` at a time; a request's result does not depend on the others.

        Args:
            requests: taken one by one as rows become free, and numbered from 0 in that order. An exhausted iterator is
                tried again after each step, until no text is being decoded.
            mode: ``greedy``; ``sample``: coupled sampling, by which a seed is one text; ``mss``: multi-step speculative
                sampling; ``typical`` (lossy).
            max_length: upper bound of any prompt's tokens together with its answer's. Left out, all requests are read
                at once to compute it.
            refill: number of free rows for which new requests wait while others are decoded, to begin together: many
                prompts in one forward pass take far less time on a GPU than one after the other.
            on_tokens: called with (number of the request, its newly committed tokens) after each step.
            on_step: called with (number of the request, its result so far) after each step.
            observe: called after each phase of a step, see :data:`~draftsmith.inference.engine.step.Observe`.
            on_end: called with (number of the request, its result) when it has ended.

        Raises:
            ValueError: unknown mode; an argument or a request's field of a wrong type or out of range; a prompt longer
                than the target's context or than ``max_length``.
            FloatingPointError: the target's logits became NaN or infinite.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: must be one of {', '.join(MODES)}")
        if not _is_whole(batch_size):
            raise ValueError(f"batch_size {batch_size!r}: must be a whole number")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: must be at least 1")
        if max_length is not None and not (_is_whole(max_length) and max_length >= 0):
            raise ValueError(f"max_length {max_length!r}: must be a whole number of at least 0")
        batch_size = int(batch_size)
        if max_length is None:
            requests = list(requests)
            batch_size = min(batch_size, len(requests))
            max_length = max((self._length(n, request) for n, request in enumerate(requests)), default=0)
        if not batch_size:
            return []
        capacity = capacity_for(max_length, self.drafter)
        models = [self.target, *self.drafter.models]
        with torch.inference_mode(), engine_attention(models), on_device(self.target.device):
            step = self._make_step(mode, batch_size, capacity)
            queue = _Queue(self, step, iter(requests), max_length, on_tokens, on_step, on_end, refill)
            launched: deque[tuple[ReadCommitted, list[_Text | None], int]] = deque()
            try:
                queue.fill(observe)
                while queue.busy:
                    launched.append((step.launch(observe), list(queue.texts), step.nodes))
                    if len(launched) > step.static:  # a static step is read while the next one runs
                        read, texts, nodes = launched.popleft()
                        queue.take(read(), texts, nodes)
                        queue.fill(observe)
                    if observe:
                        observe("other", None, None)
            except FloatingPointError:
                self._step = None  # its cache may hold NaN, which no mask removes
                raise
        return queue.results

    def _length(self, number: int, request: Request) -> int:
        """Tokens of a request's prompt and answer; a ValueError with its number, from 1, if it is not valid."""
        where, context, vocabulary = f"prompt {number + 1}", self.target.context, self.target.vocab_size
        if not isinstance(request, Request):
            raise ValueError(f"{where} is of type {type(request).__name__}; give a Request")
        if not _is_list(request.prompt):
            raise ValueError(f"{where} is of type {type(request.prompt).__name__}; give a list of token ids")
        prompt = len(request.prompt)
        if not prompt:
            raise ValueError(f"{where} is empty; give it at least one token")
        if wrong := _wrong_id(request.prompt, vocabulary):
            raise ValueError(f"{where}: token {wrong}")
        if prompt >= context:
            raise ValueError(
                f"{where} has {prompt} tokens; the target's context holds {context} with the answer; shorten it"
            )
        if not _is_whole(request.max_new_tokens):
            raise ValueError(f"{where}: max_new_tokens {request.max_new_tokens!r}: must be a whole number")
        if request.max_new_tokens < 0:
            raise ValueError(f"{where}: max_new_tokens {request.max_new_tokens}: must be at least 0")
        if not isinstance(request.sampling, Sampling):
            raise ValueError(f"{where}: sampling is of type {type(request.sampling).__name__}; give a Sampling")
        stops, strings = request.stop_ids, request.stop_strings
        if stops is not None and not (isinstance(stops, Set) or _is_list(stops)):
            raise ValueError(f"{where}: stop_ids {stops!r}: must be a set of token ids, or None")
        if wrong := _wrong_id(stops or (), vocabulary):
            raise ValueError(f"{where}: stop id {wrong}")
        if not (_is_list(strings) and all(isinstance(string, str) for string in strings)):
            raise ValueError(f"{where}: stop_strings {strings!r}: must be a list of texts")
        if "" in strings:
            raise ValueError(f"{where}: an empty stop string would end every text; leave it out")
        bound = request.max_draft_nodes
        if bound is not None and not (_is_whole(bound) and bound >= 0):
            raise ValueError(f"{where}: max_draft_nodes {bound!r}: must be a whole number of at least 0")
        if strings and self.target.tokenizer is None:
            raise ValueError(f"{where}: stop strings need a target with a tokenizer")
        return min(prompt + request.max_new_tokens, context)

    def _make_step(self, mode: Mode, rows: int, capacity: int) -> Step:
        """The previous call's step if it can be reused, else a new one."""
        step = self._step
        if step is not None:  # its modules, weights or drafter may have been replaced
            lean_changed = step.runner.lean_or_reason != find_lean(self.target, self.lean)
            if lean_changed or not step.owns_drafter:
                step = self._step = None
        if step is None or (step.mode, step.rows, step.static) != (mode, rows, self.static) or step.capacity < capacity:
            if step is not None:
                self._step = step = None
                gc.collect()  # a cache and its layers refer to each other; this frees its memory
            if self.static:
                # Rounded up, so that the next call can reuse captured graphs.
                capacity = -(-capacity // CACHE_GRANULE) * CACHE_GRANULE
            options: dict[str, Any] = {"static": self.static, "lean": self.lean}
            self._step = step = Step(self.target, self.drafter, mode, rows, capacity, **options)
        return step


def _is_whole(value: object) -> bool:
    """Whether it is an integer, NumPy's included, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    """Whether it is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _wrong_id(ids: Collection[int], vocabulary: int) -> str:
    """Error message for the first value that is not a token id; empty if all are."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary):
        return ""
    for value in ids:
        if not _is_whole(value):
            return f"{value!r} is not a whole number"
        if not 0 <= value < vocabulary:
            return f"{value} is not in the target's vocabulary (0 to {vocabulary - 1})"
    return ""  # integers of another class, such as NumPy's


@dataclass
class _Text:
    """A request that is being decoded."""

    number: int
    request: Request
    limit: int
    result: Generation = field(default_factory=Generation)
    began: float = field(default_factory=time.perf_counter)


@dataclass
class _Queue:
    """The waiting requests, and the texts in the rows of a batch."""

    decoder: SpeculativeDecoder
    step: Step
    waiting: Iterator[Request]
    max_length: int
    on_tokens: Callable[[int, list[int]], None] | None
    on_step: Callable[[int, Generation], None] | None
    on_end: Callable[[int, Generation], None] | None
    refill: int = 1
    results: list[Generation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts: list[_Text | None] = [None] * self.step.rows
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

    def _next_texts(self) -> list[tuple[int, _Text]]:
        """Rows and texts of new requests, for free rows, until they make :data:`PREFILL_TOKENS`, padded. One at a time
        where a text is a function of its request alone, and the bits of a row do not depend on the other rows: those of
        a prompt then do not either."""
        alone = self.step.runner.bitwise and self.step.mode in ("greedy", "sample")
        new: list[tuple[int, _Text]] = []
        longest = 0
        for row in (row for row, text in enumerate(self.texts) if text is None):
            if new and (alone or longest * len(new) >= PREFILL_TOKENS):
                break
            request = next(self.waiting, None)
            if request is None:
                break
            number = len(self.results)
            length = self.decoder._length(number, request)
            if length > self.max_length:
                raise ValueError(
                    f"prompt {number + 1} needs {length} tokens with its answer, max_length is {self.max_length}; "
                    "raise it"
                )
            if request.max_draft_nodes is not None and not self.step.can_be_bounded:
                raise ValueError(
                    f"prompt {number + 1}: max_draft_nodes bounds trees of several sizes: those of greedy decoding and "
                    "coupled sampling, unless all nodes are asked for; leave it out"
                )
            text = _Text(number, request, length - len(request.prompt))
            text.result.source = self.decoder.target, request.stop_strings
            self.results.append(text.result)
            new.append((row, text))
            longest = max(longest, len(request.prompt))
        return new

    def take(self, committed: list[list[int]], texts: list[_Text | None], nodes: int) -> None:
        """Add the tokens that a step of trees with so many ``nodes`` committed, rows of ``Step.committed``, to the
        texts that the rows had when it was launched; they may have ended since."""
        depth, sources = self.decoder.drafter.max_depth, self.step.num_sources
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

    def _not_finite(self, text: _Text) -> FloatingPointError:
        dtype = str(self.decoder.target.dtype).removeprefix("torch.")
        advice = "use bfloat16 or float32" if dtype == "float16" else "its weights may be damaged"
        return FloatingPointError(f"prompt {text.number + 1}: the target's logits are not finite in {dtype}; {advice}")

    def _add(self, row: int, text: _Text, new: list[int], drafted_by: list[int], *, step: bool) -> int:
        """Append tokens and their ``drafted_by``, trimmed where the text ends; returns how many were appended."""
        result, request = text.result, text.request
        stops = self.decoder.target.stop_ids if request.stop_ids is None else request.stop_ids
        new = new[: text.limit - len(result.tokens)]
        for place, token in enumerate(new):
            if token in stops:
                new = new[: place + 1]
                result.finish_reason = "stop"
                break
        before = len(result.tokens)
        result.tokens += new
        if request.stop_strings:
            end = stop_string_end(self.decoder.target.tokenizer, result.tokens, before, request.stop_strings)
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
