"""The engine: decodes requests with any ``transformers`` decoder and any drafter, many at a time.

The requests stand in a queue; a batch has as many rows as are decoded at once, and a row whose text has ended is given
the next request at once (continuous batching). What a step does is in :mod:`draftsmith.inference.step`. Plain decoding
is the same loop with a tree of one node.
"""

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from draftsmith.inference.sampling import Sampling
from draftsmith.inference.step import (
    MODES,
    PHASES,
    Clock,
    Drafter,
    Mode,
    PlainDrafter,
    Step,
    Told,
    capacity_for,
    engine_attention,
    find_lean,
    on_device,
)
from draftsmith.models.target import Target

ROUND = 256  # slots that the cache of static steps grows by


@dataclass(frozen=True)
class Request:
    """One text to be decoded. What it asks for is checked when it is its turn.

    prompt: token ids, at least one; a list is made of a tensor or an array of one dimension.
    max_new_tokens: the limit.
    sampling: parameters of the modes that are not greedy; temperature 1 if left out.
    stop_ids: ids that end the text; the target's own if None.
    stop_strings: texts that end it; the token that completes one is the last. Needs the target's tokenizer.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] | None = None
    stop_strings: Sequence[str] = ()

    def __post_init__(self) -> None:
        prompt: Any = self.prompt
        if getattr(prompt, "ndim", None) == 1:
            object.__setattr__(self, "prompt", prompt.tolist())
        if _is_whole(self.max_new_tokens):
            object.__setattr__(self, "max_new_tokens", int(self.max_new_tokens))  # sums of numpy's may overflow


@dataclass
class Generation:
    """Result of one request.

    tokens: new tokens, up to and including the first stop id; nothing after it.
    accepted: committed tokens of each step, bonus token included, after trimming; the prefill's token is not counted.
    finish_reason: ``stop`` (a stop id or string), ``length`` (the limit) or ``context`` (the target's last position).
    drafted: nodes that were proposed, of a drafter with named ``sources``.
    proposed, accepted_from: for each of them, how many nodes it proposed, and how many of the committed tokens were
        among them; what several proposed counts for each.
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str = ""
    drafted: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted_from: list[int] = field(default_factory=list)


class SpeculativeDecoder:
    """Decodes prompts with a target and a drafter: greedily (token by token what the target alone writes), by sampling
    (with the target's own distribution), or with Medusa's typical acceptance, which is lossy.

    Args:
        static: run steps of one shape, launched before the last one's result is known; on a GPU in a CUDA graph.
            Left out: on a GPU that holds the whole target.
        compiled: the target's forward pass of a step by ``torch.compile``, which is static then; slow to begin, faster
            afterwards.
        lean: run the target by the lean decoder of ``models/lean.py`` (True), by its own modules (False), or lean where
            that can be (left out).

    Raises:
        ValueError: the lean decoder is asked for (True), and the target has none.

    Example:
        >>> decoder = SpeculativeDecoder(target, drafter)
        >>> decoder.generate([[5, 7, 11]], max_new_tokens=32)[0].tokens
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, static: bool | None = None, compiled: bool = False,
        lean: bool | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self.drafter: Drafter = PlainDrafter(target.device) if drafter is None else drafter
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        here = target.device.type == "cuda" and not target.spread
        self.static = compiled or (here if static is None else static)
        self.compiled, self.lean = compiled, lean
        if lean:
            find_lean(target, lean)
        self._step: Step | None = None

    @property
    def how(self) -> str:
        """How the last call's steps ran, as :attr:`Step.how` says."""
        return self._step.how if self._step else "not yet"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        mode: Mode = "greedy",
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop_ids: frozenset[int] | None = None,
        stop_strings: Sequence[str] = (),
        batch_size: int | None = None,
        instrument: bool = False,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        on_end: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts with the same limits and stops. See :meth:`serve`.

        Args:
            max_new_tokens: limit per prompt.
            sampling: parameters of all prompts, or of each.
            batch_size: how many are decoded at once; all if left out.

        Raises:
            ValueError, FloatingPointError: as :meth:`serve`; also if there are not as many samplings as prompts.
        """
        sampling = Sampling() if sampling is None else sampling
        if isinstance(sampling, Sampling):
            each = [sampling] * len(prompts)
        elif isinstance(sampling, Sequence):
            each = list(sampling)
        else:
            raise ValueError(f"sampling is of type {type(sampling).__name__}; give a Sampling, or one for each prompt")
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} samplings for {len(prompts)} prompts; give one, or one for each")
        requests = [
            Request(prompt, max_new_tokens, its, stop_ids, stop_strings)
            for prompt, its in zip(prompts, each, strict=True)
        ]
        rows = max(1, len(requests)) if batch_size is None else batch_size
        return self.serve(requests, rows, mode=mode, instrument=instrument, on_tokens=on_tokens, on_end=on_end)

    def serve(
        self,
        requests: Iterable[Request],
        batch_size: int,
        *,
        mode: Mode = "greedy",
        longest: int | None = None,
        instrument: bool = False,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        on_end: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """Decode a queue of requests, ``batch_size`` at a time. A request's result does not depend on the others.

        Args:
            requests: taken one by one as rows get free; their order is that of their numbers, from 0. An iterator that
                had nothing to give is asked again after each step, until no text is under way.
            mode: ``greedy``, ``sample`` or ``typical`` (lossy).
            longest: tokens that any prompt has together with its answer. Left out, all requests are read at once to
                know it.
            instrument: add each phase's time to ``seconds`` (the device is waited for between phases).
            on_tokens: called with (request's number, its newly committed tokens) after each step.
            on_end: called with (request's number, its result) when it has ended.

        Raises:
            ValueError: unknown mode; a request's field of a wrong type or out of range; a prompt longer than the
                target's context or than ``longest`` allows.
            FloatingPointError: the target's logits became NaN or infinite.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: must be one of {', '.join(MODES)}")
        if not _is_whole(batch_size):
            raise ValueError(f"batch_size {batch_size!r}: must be a whole number")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: must be at least 1")
        batch_size = int(batch_size)
        if longest is None:
            requests = list(requests)
            batch_size = min(batch_size, len(requests))
            longest = max((self._length(n, request) for n, request in enumerate(requests)), default=0)
        if not batch_size:
            return []
        capacity = capacity_for(longest, self.drafter)
        clock = Clock(self.seconds, self.target.device) if instrument else None
        results: list[Generation] = []
        models = [self.target, *self.drafter.models]
        with torch.inference_mode(), engine_attention(models), on_device(self.target.device):
            step = self._make_step(mode, batch_size, capacity)
            queue = _Queue(self, step, iter(requests), longest, results, on_tokens, on_end)
            launched: deque[tuple[Told, list[_Text | None]]] = deque()
            try:
                queue.fill(clock)
                while queue.busy:
                    launched.append((step.launch(clock), list(queue.texts)))
                    if len(launched) > step.static:  # a static step is read while the next one runs
                        told, texts = launched.popleft()
                        queue.take(told(), texts)
                        queue.fill(clock)
                    if clock:
                        clock.lap("other")
            except FloatingPointError:
                self._step = None  # its cache may hold NaN, which a mask does not hide
                raise
        return results

    def _length(self, number: int, request: Request) -> int:
        """Tokens of a request's prompt and answer.

        Raises:
            ValueError: the request asks for what cannot be done; the message names its number, from 1.
        """
        where, context, vocabulary = f"prompt {number + 1}", self.target.context, self.target.vocab_size
        if not isinstance(request, Request):
            raise ValueError(f"{where} is of type {type(request).__name__}; give a Request")
        if not _is_list(request.prompt):
            raise ValueError(f"{where} is of type {type(request.prompt).__name__}; give a list of token ids")
        prompt = len(request.prompt)
        if not prompt:
            raise ValueError(f"{where} is empty; give it at least one token")
        wrong = _wrong_id(request.prompt, vocabulary)
        if wrong:
            raise ValueError(f"{where}: token {wrong}")
        if prompt >= context:
            raise ValueError(
                f"{where} has {prompt} tokens; the target's context holds {context} with the answer: shorten it"
            )
        if not _is_whole(request.max_new_tokens):
            raise ValueError(f"{where}: max_new_tokens {request.max_new_tokens!r}: must be a whole number")
        if request.max_new_tokens < 0:
            raise ValueError(f"{where}: max_new_tokens {request.max_new_tokens}: must be at least 0")
        if not isinstance(request.sampling, Sampling):
            raise ValueError(f"{where}: sampling is of type {type(request.sampling).__name__}; give a Sampling")
        stops, strings = request.stop_ids, request.stop_strings
        if stops is not None:
            if not (isinstance(stops, Set) or _is_list(stops)):
                raise ValueError(f"{where}: stop_ids {stops!r}: must be a set of token ids, or None")
            wrong = _wrong_id(stops, vocabulary)
            if wrong:
                raise ValueError(f"{where}: stop id {wrong}")
        if not (_is_list(strings) and all(isinstance(string, str) for string in strings)):
            raise ValueError(f"{where}: stop_strings {strings!r}: must be a list of texts")
        if "" in strings:
            raise ValueError(f"{where}: an empty stop string would end every text; leave it out")
        if strings and self.target.tokenizer is None:
            raise ValueError(f"{where}: stop strings need a target with a tokenizer")
        return min(prompt + request.max_new_tokens, context)

    def _make_step(self, mode: Mode, rows: int, capacity: int) -> Step:
        """The step of the call before, if its cache is large enough; else a larger one in its place."""
        step = self._step
        exchanged = step is not None and step.runner.found != find_lean(self.target, self.lean)  # modules or weights
        if step is not None and (exchanged or not step.has_drafter):
            step = self._step = None
        if step is None or (step.mode, step.rows, step.static) != (mode, rows, self.static) or step.capacity < capacity:
            if step is not None:
                self._step = step = None
                gc.collect()  # a cache and its layers know each other: only so is its memory free for the next one
            if self.static:
                capacity = -(-capacity // ROUND) * ROUND  # what is captured or compiled should serve the next call, too
            self._step = step = Step(
                self.target, self.drafter, mode, rows, capacity, static=self.static, compiled=self.compiled,
                lean=self.lean,
            )  # fmt: skip
        return step


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's, too


def _is_list(value: object) -> bool:
    """A sequence of things, and not one text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _wrong_id(ids: Collection[int], vocabulary: int) -> str:
    """What is wrong with the first of them that is no token id; empty if nothing is."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary):
        return ""
    for one in ids:
        if not _is_whole(one):
            return f"{one!r} is no whole number"
        if not 0 <= one < vocabulary:
            return f"{one} is not in the target's vocabulary (0 to {vocabulary - 1})"
    return ""  # of a class of its own, like numpy's


@dataclass
class _Text:
    """A request under way."""

    number: int
    request: Request
    limit: int
    result: Generation = field(default_factory=Generation)


class _Queue:
    """The requests that wait, and the texts in the rows of a batch."""

    def __init__(
        self, decoder: SpeculativeDecoder, step: Step, waiting: Iterable[Request], longest: int,
        results: list[Generation], on_tokens: Callable[[int, list[int]], None] | None,
        on_end: Callable[[int, Generation], None] | None,
    ) -> None:  # fmt: skip
        self.decoder, self.step, self.waiting, self.longest = decoder, step, iter(waiting), longest
        self.results, self.on_tokens, self.on_end = results, on_tokens, on_end
        self.texts: list[_Text | None] = [None] * step.rows
        step.reset()

    @property
    def busy(self) -> bool:
        return any(self.texts)

    def fill(self, clock: Clock | None) -> None:
        """Begin requests in the rows that are free, until none is or nothing waits."""
        while new := self._next():
            begin = new[0][0]
            texts = [text for _, text in new]
            requests = [text.request for text in texts]
            rows = slice(begin, begin + len(new))
            first = self.step.begin(rows, [r.prompt for r in requests], [r.sampling for r in requests], clock)
            for row, text, token in zip(range(rows.start, rows.stop), texts, first, strict=True):
                if token < 0:
                    raise self._not_finite(text)
                self.texts[row] = text
                self._add(row, text, [token], step=False)

    def _next(self) -> list[tuple[int, _Text]]:
        """Requests for the first free rows that stand side by side."""
        new: list[tuple[int, _Text]] = []
        for row, text in enumerate(self.texts):
            if text is not None:
                if new:
                    break
                continue
            request = next(self.waiting, None)
            if request is None:
                break
            number = len(self.results)
            length = self.decoder._length(number, request)
            if length > self.longest:
                raise ValueError(f"prompt {number + 1} needs {length} tokens with its answer, beyond {self.longest}")
            text = _Text(number, request, length - len(request.prompt))
            self.results.append(text.result)
            new.append((row, text))
        return new

    def take(self, told: list[list[int]], texts: list[_Text | None]) -> None:
        """Add what a step committed to the texts that were in its rows; some may have ended in the step before."""
        for row, (said, text) in enumerate(zip(told, texts, strict=True)):
            if text is not None and not text.result.finish_reason:
                if said[0] < 0:
                    raise self._not_finite(text)
                deepest = self.decoder.drafter.max_depth
                kept = self._add(row, text, [*said[1 : said[0]], said[deepest + 1]], step=True)
                if self.step.num_sources:
                    self._count(text.result, said[deepest + 2 :][: min(kept, said[0] - 1)], said[2 * deepest + 2 :])

    def _count(self, result: Generation, drafted: list[int], proposed: list[int]) -> None:
        """Add the sources of a step's accepted tokens (a bit each), how many nodes it had, and how many each source
        proposed."""
        result.drafted += proposed[0]
        if not result.proposed:
            result.proposed, result.accepted_from = [0] * (len(proposed) - 1), [0] * (len(proposed) - 1)
        for source, nodes in enumerate(proposed[1:]):
            result.proposed[source] += nodes
            result.accepted_from[source] += sum(bits >> source & 1 for bits in drafted)

    def _not_finite(self, text: _Text) -> FloatingPointError:
        dtype = str(self.decoder.target.dtype).removeprefix("torch.")
        do = "use bfloat16 or float32" if dtype == "float16" else "its weights may be damaged"
        return FloatingPointError(f"prompt {text.number + 1}: the target's logits are not finite in {dtype}; {do}")

    def _add(self, row: int, text: _Text, new: list[int], *, step: bool) -> int:
        """Append tokens, trimmed where the text ends; how many are left of them."""
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
            end = self._stop_string(result.tokens, before, request.stop_strings)
            if end:
                del result.tokens[end:]
                new = result.tokens[before:]
                result.finish_reason = "stop"
        if step:
            result.accepted.append(len(new))
        if not result.finish_reason and len(result.tokens) >= text.limit:
            result.finish_reason = "length" if text.limit == request.max_new_tokens else "context"
        if self.on_tokens:
            self.on_tokens(text.number, list(new))
        if result.finish_reason:
            self.texts[row] = None
            self.step.end(row)
            if self.on_end:
                self.on_end(text.number, result)
        return len(new)

    def _stop_string(self, tokens: list[int], before: int, strings: Sequence[str]) -> int:
        """How many tokens it takes until the text contains one of the strings, more than ``before``; or 0."""
        tokenizer = self.decoder.target.tokenizer
        assert tokenizer is not None
        longest = max(len(string.encode()) for string in strings)  # a token is at least a byte
        for end in range(before + 1, len(tokens) + 1):
            tail = str(tokenizer.decode(tokens[max(0, end - longest - 8) : end]))
            if any(string in tail for string in strings):
                return end
        return 0
