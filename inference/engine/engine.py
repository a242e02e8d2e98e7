"""The engine: decodes requests with any ``transformers`` decoder and any drafter, in batches.

Requests wait in a queue; a row whose text has ended takes the next request at once (continuous batching). A step is
described in :mod:`draftsmith.inference.engine.step`. Plain decoding is the same loop with a tree of one node.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from draftsmith.common.command import counted
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.logprobs import LogprobsMode
from draftsmith.inference.engine.protocol import Drafter, PlainDrafter
from draftsmith.inference.engine.queue import Queue, Text
from draftsmith.inference.engine.request import Counts, Generation, Request, checked_length, is_whole
from draftsmith.inference.engine.runner import check_same_bits, engine_attention, find_lean
from draftsmith.inference.engine.step import Observe, ReadCommitted, Step, capacity_for, on_device, static_by_default
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import MODES, Mode
from draftsmith.kernels.backend import same_bits
from draftsmith.kernels.linear import MOST_ON_CPU
from draftsmith.models.lean import LeanDecoder
from draftsmith.models.target import Target

CACHE_GRANULE = 256  # slots; the cache is a multiple of it


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
    def counts(self) -> Counts:
        """What the last call ran so far."""
        return self._step.counts if self._step else Counts()

    @property
    def bitwise(self) -> bool:
        """Whether the bits of a row of a step do not depend on the other rows, so that greedy texts are those of plain
        decoding, without near-ties: the lean decoder by kernels/cpu.cpp, unless the last call's steps had more rows
        than the LM head's product of our own takes."""
        lean = find_lean(self.target, self.lean)
        rows = self._step.rows * self.drafter.num_nodes if self._step else 1
        few = rows <= MOST_ON_CPU or self.target.device.type != "cpu"
        return isinstance(lean, LeanDecoder) and not lean.rows_differ and few

    def capacity(self, max_length: int) -> int:
        """Slots of a row of the cache for texts of up to ``max_length`` tokens, rounded up, so that a later call can
        reuse captured graphs, and what steps have learned of their costs."""
        return -(-capacity_for(max_length, self.drafter) // CACHE_GRANULE) * CACHE_GRANULE

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
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        batch_size: int | None = None,
        on_tokens: Callable[[int, list[int]], bool | None] | None = None,
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
        likely = logprobs, prompt_logprobs, logprobs_mode
        requests = [
            Request(prompt, max_new_tokens, parameters, stop_ids, stop_strings, max_draft_nodes, *likely)
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
        refill: int | None = None,
        on_tokens: Callable[[int, list[int]], bool | None] | None = None,
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
            refill: number of free rows for which new requests wait while others are decoded, 0.1 s at most, to begin
                together: many prompts in one forward pass take far less time than one after the other. Left out, a
                sixteenth of the rows. Between two steps, no more prompt tokens are run than this many times 512, but
                for the rest of a prompt that runs alone, on a CPU.
            on_tokens: called with (number of the request, its newly committed tokens) after each step. If it returns
                False, the text ends with these tokens, and its row is free.
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
        if not is_whole(batch_size):
            raise ValueError(f"batch_size {batch_size!r}: must be a whole number")
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: must be at least 1")
        if max_length is not None and not (is_whole(max_length) and max_length >= 0):
            raise ValueError(f"max_length {max_length!r}: must be a whole number of at least 0")
        batch_size = most = int(batch_size)
        if max_length is None:
            requests = list(requests)
            batch_size = min(batch_size, len(requests))
            max_length = max((checked_length(request, n, self.target) for n, request in enumerate(requests)), default=0)
        if not batch_size:
            return []
        capacity = self.capacity(max_length)
        models = [self.target, *self.drafter.models]
        with torch.inference_mode(), engine_attention(models), on_device(self.target.device):
            step = self._make_step(mode, batch_size, capacity, most)
            refill = max(1, batch_size // 16) if refill is None else refill
            queue = Queue(step, iter(requests), max_length, on_tokens, on_step, on_end, refill)
            launched: deque[tuple[ReadCommitted, list[Text | None], int]] = deque()
            try:
                queue.fill(observe)
                while queue.busy:
                    launched.append((step.launch(observe), queue.texts[: step.running], step.nodes))
                    step.counts.steps += 1
                    if len(launched) > step.static:  # a static step is read while the next one runs
                        read, texts, nodes = launched.popleft()
                        queue.take(*read(), texts, nodes)
                    queue.fill(observe)
                    if observe:
                        observe("other", None, None)
            except FloatingPointError:
                self._step = None  # its cache may hold NaN, which no mask removes
                raise
        return queue.results

    def free(self) -> None:
        """Free the memory that a call has left for the next one: caches, the drafter's too, and captured graphs."""
        if self._step is not None:
            drafter, owned = self.drafter, self._step.owns_drafter
            self._step = None
            gc.collect()  # a cache and its layers refer to each other
            if owned:
                with torch.inference_mode():
                    drafter.allocate(KVCache(self.target, 1, capacity_for(1, drafter)), drafter.max_depth, False)
                gc.collect()

    def _make_step(self, mode: Mode, rows: int, capacity: int, most: int) -> Step:
        """The previous call's step if it can be reused, also one with more rows, up to ``most``; else a new one."""
        step = self._step
        if step is not None:  # its modules, weights or drafter may have been replaced
            lean_changed = step.runner.lean_or_reason != find_lean(self.target, self.lean)
            if lean_changed or not step.owns_drafter:
                step = None
        if self.drafter.keeps_rows and not self.static:
            most = rows  # such steps run all their rows, and there are no captured graphs to keep
        fits = step is not None and rows <= step.rows <= most and step.capacity >= capacity
        if step is None or not fits or (step.mode, step.static) != (mode, self.static):
            step = None
            self.free()
            options: dict[str, Any] = {"static": self.static, "lean": self.lean}
            self._step = step = Step(self.target, self.drafter, mode, rows, capacity, **options)
        return step
