"""Checks that every drafter has to pass, in one call:

    from lossless_suite import check_drafter

    def test_lossless(make_target):
        check_drafter(make_target, lambda target: MyDrafter(target, depth=4))

The function makes a fresh drafter for a target (a random Llama of two layers, see :func:`phrases` and :func:`soft`); a
drafter with a model of its own can derive one from the target (a copy with perturbed weights). Each check is also a
function of its own: :func:`check_greedy`, :func:`check_coupled`, :func:`check_sampling`, :func:`check_seeds`,
:func:`check_apart`, :func:`check_logprobs`, :func:`check_warm_up`, :func:`check_static`. The first three return counts,
so that a test can check more: for example that every accepted length occurred. Sampling is coupled in
:func:`check_coupled`, whose texts are plain decoding's, and multi-step in :func:`check_sampling`, whose texts have the
target's distribution, and in :func:`check_seeds`.

``own``: whether a row's drafts depend only on that row's text. If not (trees limited by the costs of the whole batch),
a request may take other steps in a batch than alone, and only its tokens are fixed; in multi-step sampling only their
distribution.
"""

import functools
import hashlib
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from draws import near_tie, occurs
from scipy import stats
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process

from draftsmith.inference.engine import engine
from draftsmith.inference.engine import prompts as prompting
from draftsmith.inference.engine import queue as queueing
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.engine.prefill import Prefill
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.runner import Runner, engine_attention
from draftsmith.inference.engine.static_budget import WHOLE
from draftsmith.inference.engine.step import Step
from draftsmith.inference.measure.lossless import check_texts
from draftsmith.inference.measure.step_costs import StepClock
from draftsmith.inference.verify.sampling import Sampling, Seen, Settings, sampling_distribution
from draftsmith.inference.verify.tree import TokenTree
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.target import Target

MakeDrafter = Callable[[Target], Drafter]
ALPHA = 1e-6
NONE: frozenset[int] = frozenset()
CONTEXT = 96
STARTS = [[7, 3, 19, 44, 5, 3, 28], [9], [58, 1, 30, 12], [44, 2, 6], [12, 9, 1], [33, 5, 20, 8, 51], [21, 6, 17]]
OWN = [24, 30, 20, 9, 28, 16, 24]  # tokens of its own text that are part of each prompt, to draft from
LIMITS = [24, 3, 0, 32, 1, 26, 15]
SMALL, SMALL_PROMPT, NEW = 5, [3, 1, 4, 1, 3, 1, 0, 4, 1], 4
COUNTS = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
SAMPLINGS = {
    "plain": Sampling(),
    "cut": Sampling(temperature=0.8, top_k=4, repetition_penalty=1.3, logit_bias={2: 0.5, 4: -0.4}, **COUNTS),
}
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 7},
    {"top_p": 0.8, "logit_bias": {7: 3.0, 44: -100}},
    {"min_p": 0.05, **COUNTS},
    {"repetition_penalty": 0.6},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "logit_bias": {28: 2.0}, **COUNTS},
]


def phrases(make_target: Callable[..., Target]) -> Target:
    """A target whose greedy text repeats phrases with different continuations; vocabulary 61, context 96."""
    target = make_target("llama", max_position_embeddings=CONTEXT)
    with torch.no_grad():
        for name, weight in target.model.named_parameters():
            if "o_proj" in name:
                weight.mul_(0.02)  # weaker dependence on the context
    return target


def soft(make_target: Callable[..., Target]) -> Target:
    """A target with a vocabulary of 5 and distributions of high entropy."""
    target = make_target("llama", vocab_size=SMALL, num_attention_heads=2, num_key_value_heads=1)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.25)
    return target


def plain_texts(target: Target, requests: Sequence[Request], mode: Mode = "greedy") -> list[list[int]]:
    """Tokens of plain decoding, one request at a time; those of equal weights are decoded once."""
    digest = hashlib.sha256(repr(target.config).encode())
    for weight in target.model.state_dict().values():
        digest.update(weight.cpu().contiguous().numpy().tobytes())
    decoded = _decoded(digest.digest())
    plain = SpeculativeDecoder(target)
    texts = []
    for request in requests:
        key = mode, tuple(request.prompt), request.max_new_tokens, request.stop_ids, request.sampling
        if key not in decoded:
            (result,) = plain.serve([request], 1, mode=mode)
            decoded[key] = result.tokens
        texts.append(decoded[key][:])
    return texts


@functools.cache
def _decoded(weights: bytes) -> dict[tuple[object, ...], list[int]]:
    return {}


def check_drafter(make_target: Callable[..., Target], make: MakeDrafter, *, own: bool = True) -> None:
    """All of the checks."""
    check_exact(make_target, make, own=own)
    check_sampling(make_target, make, "plain", static=True)
    check_sampling(make_target, make, "cut", static=False)


def check_exact(make_target: Callable[..., Target], make: MakeDrafter, *, own: bool = True) -> Counter[int]:
    """All of the checks but :func:`check_sampling`; returns what :func:`check_greedy` does."""
    check_static(make_target, make)
    check_warm_up(make_target, make)
    check_coupled(make_target, make, own=own)
    check_apart(make_target, make, own=own)
    check_logprobs(make_target, make)
    if own:
        check_seeds(make_target, make)
    return check_greedy(make_target, make, own=own)


def check_greedy(make_target: Callable[..., Target], make: MakeDrafter, *, own: bool = True) -> Counter[int]:
    """Greedy decoding equals plain decoding: each request alone, all in one static row, and in a batch of 3 rows that
    are refilled, eager and static; with limits, stop ids inside a path, and the end of the context. Also after a call
    that a callback's error ended, with a row that stays empty.

    Returns:
        Number of steps by committed tokens, of the requests alone.
    """
    target = phrases(make_target)
    requests, truth = _greedy_requests(target)
    alone = [SpeculativeDecoder(target, make(target)).serve([request], 1)[0] for request in requests]
    stopped_inside = 0
    for number, (request, result) in enumerate(zip(list(requests), alone, strict=True)):
        stop = _inside_a_path(result)
        if stop:
            requests.append(Request(request.prompt, request.max_new_tokens, stop_ids=frozenset([result.tokens[stop]])))
            truth.append(truth[number][: stop + 1])
            stopped_inside += 1
    alone += [SpeculativeDecoder(target, make(target)).serve([request], 1)[0] for request in requests[len(alone) :]]
    lengths = Counter(length for result in alone for length in result.accepted)
    deepest = make(target).max_depth
    assert lengths[deepest + 1], f"no step accepted a path of the full depth {deepest}: {lengths}"
    assert lengths[1], f"every step accepted something: {lengths}"
    assert stopped_inside, "no text could be stopped inside a path"
    _compare("alone", alone, [Generation(tokens) for tokens in truth], steps=False)
    reasons = Counter(result.finish_reason for result in alone)
    assert reasons["context"] and reasons["length"] and reasons["stop"] == stopped_inside, reasons
    for kind, rows in (("eager", 3), ("static", 1), ("static", 3), ("static, of several sizes", 3)):
        drafter = make(target)
        drafter.clock = StepClock() if kind == "static, of several sizes" else None
        decoder = SpeculativeDecoder(target, drafter, static=kind != "eager")
        orders = [list(range(len(requests)))[::-1]]
        if (kind, rows) == ("static", 3):  # again, on the same buffers
            orders.append(orders[0][::-1])
        for order in orders:
            results = decoder.serve([requests[number] for number in order], rows)
            where = f"{rows} rows, {kind}, order {order}"
            same_steps = own and kind != "static, of several sizes"
            _compare(where, results, [alone[number] for number in order], steps=same_steps)
            _check_counts(where, results, len(drafter.sources))
        if rows > 1:
            _cut_short(decoder, requests[::-1], rows, after=16)
            results = decoder.serve(requests[: rows - 1], rows, max_length=CONTEXT)
            where = f"{rows} rows, {kind}, after a call that was cut short"
            _compare(where, results, alone[: rows - 1], steps=same_steps)
    return lengths


def _check_counts(where: str, results: Sequence[Generation], sources: int) -> None:
    """A text's counts by source are one for each, and those of its tokens."""
    for result in results:
        found = f"{where}: {result}"
        counted = sources if sources and result.accepted else 0
        assert len(result.proposed) == len(result.accepted_from) == counted, found
        tokens = [sum(bits >> source & 1 for bits in result.drafted_by) for source in range(counted)]
        assert result.accepted_from == tokens, found
        assert max(result.proposed, default=0) <= result.drafted <= sum(result.proposed) or not counted, found


def _cut_short(decoder: SpeculativeDecoder, requests: Sequence[Request], rows: int, after: int) -> None:
    """A call that an error ends in the callback after so many steps of texts."""
    steps = itertools.count()

    def fail(number: int, result: Generation) -> None:
        if next(steps) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.serve(requests, rows, max_length=CONTEXT, on_step=fail)


def _greedy_requests(target: Target) -> tuple[list[Request], list[list[int]]]:
    """Requests without stop ids, the last of which reaches the end of the context, and their plain decoding."""
    texts = plain_texts(target, [Request(start, CONTEXT, stop_ids=NONE) for start in STARTS])
    whole = [start + text for start, text in zip(STARTS, texts, strict=True)]
    padded = torch.tensor([text[:CONTEXT] for text in whole], device=target.device)
    best = target.logits(target.hidden(padded)).topk(2).values
    if float((best[..., 0] - best[..., 1]).amin()) <= 1e-4:
        near_tie("target")
    prompts = [text[: len(start) + own] for text, start, own in zip(whole, STARTS, OWN, strict=True)]
    limits = LIMITS[:]
    prompts.append(whole[1][: CONTEXT - 12])
    limits.append(1000)
    requests = [Request(prompt, limit, stop_ids=NONE) for prompt, limit in zip(prompts, limits, strict=True)]
    return requests, plain_texts(target, requests)


def _inside_a_path(result: Generation) -> int:
    """Position of a token that is new in the text and not the last one of its step; 0 if there is none."""
    ends = set(itertools.accumulate(result.accepted, initial=0))  # the prefill's token is at position 0
    for place, token in enumerate(result.tokens):
        if place not in ends and token not in result.tokens[:place]:
            return place
    return 0


def _compare(where: str, results: Sequence[Generation], expected: Sequence[Generation], *, steps: bool) -> None:
    for number, (result, reference) in enumerate(zip(results, expected, strict=True)):
        both = f"{result.tokens} instead of {reference.tokens}"
        assert result.tokens == reference.tokens, f"{where}: text {number}: {both}"
        if steps:
            both = f"{result.accepted} instead of {reference.accepted}"
            assert result.accepted == reference.accepted, f"{where}: text {number}: the steps committed {both}"
            assert result.finish_reason == reference.finish_reason


def check_coupled(make_target: Callable[..., Target], make: MakeDrafter, *, own: bool = True) -> Counter[int]:
    """Coupled sampling equals plain decoding by the same seeds, token by token: in one row and in a batch of 4 rows of
    different settings that are refilled, eager and static, in two orders; at temperatures from 0 (greedy) to 1.5, with
    filters and repetition penalties. Where rounding may depend on the other rows, up to near-ties.

    Returns:
        Number of steps by committed tokens, in one row.
    """
    target = phrases(make_target)
    requests = _coupled_requests(target)
    prompts = [list(request.prompt) for request in requests]
    samplings = [request.sampling for request in requests]
    truth = plain_texts(target, requests, "sample")
    assert len({tuple(text[:4]) for text in truth}) > len(truth) / 2, "the seeds hardly matter"
    lengths: Counter[int] = Counter()
    alone: dict[int, Generation] = {}
    for static, rows in itertools.product((False, True), (1, 4)):
        drafter = make(target)
        several_sizes = static and rows == 1
        drafter.clock = StepClock() if several_sizes else None
        decoder = SpeculativeDecoder(target, drafter, static=static)
        order = range(len(requests))[:: 1 if static else -1]
        results = decoder.serve([requests[number] for number in order], rows, mode="sample")
        where = f"{rows} rows, {'static' if static else 'eager'}"
        found = [result.tokens for _, result in sorted(zip(order, results, strict=True), key=lambda pair: pair[0])]
        for number, (text, expected) in enumerate(zip(found, truth, strict=True)):
            differs = f"{where}: text {number} of {samplings[number]}: {text} instead of {expected}"
            assert text == expected or not decoder.bitwise, differs
        check = check_texts(target, prompts, found, truth, bitwise=decoder.bitwise, samplings=samplings)
        assert check.passed, f"{where}: {check}"
        if not alone:
            alone = dict(zip(order, results, strict=True))
            lengths.update(length for result in results for length in result.accepted)
            assert sum(lengths.values()) > lengths[1] > 0, f"nothing, or everything, was accepted: {lengths}"
        elif own and check.identical and not several_sizes:
            _compare(where, results, [alone[number] for number in order], steps=True)
    return lengths


def _coupled_requests(target: Target) -> list[Request]:
    """Each filter at each temperature, and two greedy texts. Neighbours share a seed, and differ in length.

    A prompt holds the text that its last token begins there by the same noise: it is likely to come again. Not where
    repetitions are penalised: all new tokens would be known.
    """
    each: list[dict[str, Any]] = [
        {"temperature": (0.3, 0.7, 1.0, 1.5)[(number + turn) % 4], **kept}
        for turn in range(4)
        for number, kept in enumerate(FILTERS)
    ]
    each[5:5] = [{"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {19: 4.0}, **COUNTS}]
    each[10:10] = [{"temperature": 0.0}]
    requests = []
    for number, given in enumerate(each):
        start, limit = STARTS[number % len(STARTS)], 3 + 5 * number % 8
        prompt, sampling = (start * 16)[: limit + 2 + number % 5], Sampling(**given, seed=number // 2 * 10**9)
        requests.append(Request(prompt, limit, sampling, NONE))
    for number, (request, text) in enumerate(zip(requests, plain_texts(target, requests, "sample"), strict=True)):
        if request.sampling.repetition_penalty != 1:
            continue
        last, first = request.prompt[-1], len(request.prompt) - 2 - len(text)
        requests[number] = replace(request, prompt=[*request.prompt[:first], last, *text, last])
    return requests


def check_apart(make_target: Callable[..., Target], make: MakeDrafter, *, own: bool = True) -> None:
    """Texts that begin together in rows 0 and 2, while row 1 is decoding, are those of plain decoding, and take the
    steps that they take alone: by ``refill``, greedy and in coupled sampling, eager and static, by the lean decoder and
    by the model's own modules; prompts of one to several prefill chunks, one up to the end of the context.
    """
    target = phrases(make_target)
    beside = 40  # tokens of row 1
    greedy, _ = _greedy_requests(target)
    first = [
        replace(greedy[0], max_new_tokens=2),
        replace(greedy[3], max_new_tokens=beside),
        replace(greedy[5], max_new_tokens=3),
    ]
    sampled = _coupled_requests(target)
    coupled = [sampled[number] for number in (2, 3, 7, 4, 5, 9, 21, 10)]  # number 5 and 10 are greedy, 21 penalises
    coupled[1] = replace(coupled[1], max_new_tokens=beside)
    by_mode: dict[Mode, list[Request]] = {"greedy": [*first, *greedy[5:7], greedy[0], greedy[7]], "sample": coupled}
    for mode, requests in by_mode.items():
        alone = SpeculativeDecoder(target, make(target), static=False).serve(requests, 1, mode=mode)
        expected = [
            replace(one, tokens=text) for one, text in zip(alone, plain_texts(target, requests, mode), strict=True)
        ]
        for static, lean in itertools.product((False, True), (None, False)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Runner, "bitwise", False)  # texts begin together, as on a GPU
                patch.setattr(prompting, "PREFILL_CHUNK", 11)
                patch.setattr(queueing, "REUSED_LEAST", 1 << 30)
                begun = record_begins(patch)
                decoder = SpeculativeDecoder(target, make(target), static=static, lean=lean)
                results = decoder.serve(requests, 3, mode=mode, refill=2)
            where = f"{mode}, {'static' if static else 'eager'}, lean {lean}, rows {begun}"
            assert begun[:2] == [[0, 1, 2], [0, 2]], f"{where}: not those that are meant"
            _compare(where, results, expected, steps=own)


def record_begins(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Numbers of the rows whose prompts begin in one pass, added pass by pass."""
    begun, run = [], Prefill.run

    def recorded(self, prompts, *arguments, **named):
        waiting = [prompt for prompt in prompts if not prompt.done]
        found = run(self, prompts, *arguments, **named)
        rows = sorted(prompt.row for prompt in waiting if prompt.done)
        begun.extend([rows] if rows else [])
        return found

    patch.setattr(Prefill, "run", recorded)
    return begun


def check_logprobs(make_target: Callable[..., Target], make: MakeDrafter) -> None:
    """Log-probabilities of new tokens and of prompts, greedily, in coupled and in multi-step sampling, alone and in a
    static batch of 8 rows, beside texts that ask for none: those of transformers' forward pass of the whole text and
    its logits processors, in float32. Where a row's bits do not depend on the others, also plain decoding's own.
    """
    target = phrases(make_target)
    requests = []
    for number, request in enumerate(_coupled_requests(target)[3:11]):
        asked = (None, 0, 3, 20)[number % 4], (None, 2)[number // 2 % 2]
        mode = "processed_logprobs" if number in (2, 3, 5) else "raw_logprobs"
        like, prompt = zip(("logprobs", "prompt_logprobs"), asked, strict=True), list(request.prompt)
        requests.append(replace(request, prompt=prompt, max_new_tokens=8, logprobs_mode=mode, **dict(like)))
    modes: tuple[Mode, ...] = ("greedy", "sample", "mss")
    for mode, rows in itertools.product(modes, (1, 8)):
        decoder = SpeculativeDecoder(target, make(target), static=rows > 1)
        few = requests if rows > 1 else requests[2:4]
        few = [replace(each, sampling=Sampling()) for each in few] if mode == "greedy" else few
        results = decoder.serve(few, rows, mode=mode)
        plain = SpeculativeDecoder(target).serve(few, 1, mode=mode) if decoder.bitwise and mode != "mss" else results
        for request, result, own in zip(few, results, plain, strict=True):
            where = f"{mode}, {rows} rows, {request}"
            assert (result.logprobs, result.prompt_logprobs) == (own.logprobs, own.prompt_logprobs), where
            assert compare_logprobs(target, request, result, mode) < 1e-4, where


def compare_logprobs(target: Target, request: Request, result: Generation, mode: Mode) -> float:
    """The largest difference of a result's log-probabilities from those of the target's own forward pass, divided by
    the largest of its logits, after temperature (1 if they are smaller). Of the likeliest tokens the values are
    compared, and what these ids have there: tokens that nearly tie may swap."""
    s, prompt, text = request.sampling, list(request.prompt), [*request.prompt, *result.tokens]
    logits = target.model(torch.tensor([text], device=target.device), use_cache=False).logits[0].float().cpu()
    raw, scale = logits.log_softmax(-1), max(1.0, float(logits.abs().max()))
    differences = [0.0]
    for found, count, first in (
        (result.prompt_logprobs, request.prompt_logprobs, 1),
        (result.logprobs, request.logprobs, len(prompt)),
    ):
        assert (found is None) == (count is None)
        if found is None or count is None:
            continue
        values = found.token_logprobs
        if first == 1:
            assert (values[0], found.top_ids[0], found.top_logprobs[0]) == (None, [], [])
        tokens = text[1 : len(prompt)] if first == 1 else result.tokens
        assert len(values) == len(found.top_ids) == len(found.top_logprobs) == len(tokens) + (first == 1)
        for place, token in enumerate(tokens, first):
            expected = raw[place - 1]
            if found.mode == "processed_logprobs" and mode != "greedy":
                expected = _processed(logits[place - 1], text[:place], len(prompt), s)
                scale = max(scale, float(logits.abs().max()) / (s.temperature or 1))
            at = place if first == 1 else place - first
            ids, top = found.top_ids[at], torch.tensor(found.top_logprobs[at])
            possible = min(count, int((expected > -torch.inf).sum()))
            assert len(ids) == len(set(ids)) == len(top) == possible, (ids, expected)
            pairs = [torch.tensor([values[at]]) - expected[token], top - expected[ids]]
            pairs.append(top - expected.topk(possible).values)
            differences += torch.cat(pairs).abs().tolist()
    return max(differences) / scale


def _processed(logits: Tensor, text: list[int], prompt: int, s: Sampling) -> Tensor:
    """Log-probabilities ``[V]`` by transformers' logits processors, ``text`` being all tokens before, the first ones a
    prompt's."""
    logits = logits.clone()
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    changes: list[Any] = [logits_process.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)]
    logits = changes.pop()(torch.tensor([text]), logits[None])[0]
    for token, count in Counter(text[prompt:]).items():
        logits[token] -= s.presence_penalty + s.frequency_penalty * count
    changes += [logits_process.TemperatureLogitsWarper(s.temperature)] if s.temperature else []
    changes += [logits_process.TopKLogitsWarper(s.top_k)] if s.top_k else []
    changes += [logits_process.TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    changes += [logits_process.MinPLogitsWarper(s.min_p)] if s.min_p else []
    return logits_process.LogitsProcessorList(changes)(torch.tensor([text]), logits[None])[0].log_softmax(-1)


def check_seeds(make_target: Callable[..., Target], make: MakeDrafter) -> None:
    """In multi-step sampling, a request's seed determines its text and its steps: alone with a fresh drafter, and in
    batches of 1 and 3 rows that are refilled, eager and static, each at once and two together."""
    target = soft(make_target)
    each = [
        Sampling(seed=9, temperature=0.8),
        Sampling(seed=4, top_k=3),
        Sampling(seed=9),
        Sampling(temperature=0),
        Sampling(seed=3, top_p=0.8),
        Sampling(seed=7, temperature=1.3),
        Sampling(seed=1 << 40),
        Sampling(seed=2),
    ]
    requests = [
        Request((SMALL_PROMPT * 3)[number : 2 * number + 2], 5 + 5 * number % 17, sampling, NONE)
        for number, sampling in enumerate(each)
    ]
    alone = [SpeculativeDecoder(target, make(target)).serve([one], 1, mode="mss")[0] for one in requests]
    assert max(length for result in alone for length in result.accepted) > 1, "no draft was accepted"
    for static, rows in itertools.product((False, True), (1, 3)):
        decoder = SpeculativeDecoder(target, make(target), static=static)
        for refill, order in enumerate(([6, 3, 7, 0, 5, 1, 4, 2], list(range(len(each))))[: 1 + (rows == 3)], 1):
            results = decoder.serve([requests[number] for number in order], rows, mode="mss", refill=refill)
            where = f"{rows} rows, {'static' if static else 'eager'}, refill {refill}, order {order}"
            _compare(where, results, [alone[number] for number in order], steps=True)


@torch.no_grad()
def check_sampling(
    make_target: Callable[..., Target],
    make: MakeDrafter,
    name: str = "plain",
    *,
    static: bool = False,
    count: int = 12_000,
    rows: int = 2000,
) -> Counter[int]:
    """4 new tokens of multi-step sampling, the last 3 of them from steps, have the target's own distribution: jointly,
    and each adjacent pair.

    Returns:
        Number of texts by steps.
    """
    target = soft(make_target)
    outputs, steps = _sampled(target, make(target), SAMPLINGS[name], count, rows, static)
    occurs(sum(steps.values()) - steps[1] > count / 2, f"most texts have less than two steps: {steps}")
    occurs(steps[1] + steps[2] > count / 20, f"hardly any draft was accepted: {steps}")
    probabilities = joint_distribution(target, SAMPLINGS[name])
    assert probabilities.max() < 0.5, "the distribution is too concentrated to test"
    p = p_value(outputs, probabilities)
    assert p > ALPHA, f"{name}: the texts do not have the target's distribution: p = {p:.1e}"
    return steps


def _sampled(
    target: Target, drafter: Drafter, sampling: Sampling, count: int, rows: int, static: bool
) -> tuple[torch.Tensor, Counter[int]]:
    decoder = SpeculativeDecoder(target, drafter, static=static)
    results: list[Generation] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CACHE_GRANULE", 32)  # short texts in thousands of rows
        for first in range(0, count, rows):
            each = [Sampling(**{**vars(sampling), "seed": seed}) for seed in range(first, first + rows)]
            results += decoder.generate([SMALL_PROMPT] * rows, NEW, mode="mss", sampling=each, stop_ids=NONE)
    return torch.tensor([r.tokens for r in results]), Counter(len(r.accepted) for r in results)


def joint_distribution(
    target: Target, sampling: Sampling, prompt: Sequence[int] = SMALL_PROMPT, new_tokens: int = NEW
) -> np.ndarray:
    """Probability of each continuation of a prompt, ``[5, 5, …]`` float64 with an axis for each new token, by plain
    forward passes over all of them. The target's vocabulary has 5 tokens."""
    continuations = list(itertools.product(range(SMALL), repeat=new_tokens))
    texts = torch.tensor([[*prompt, *continuation] for continuation in continuations])
    logits = target.logits(target.hidden(texts[:, :-1].to(target.device))).cpu()
    probabilities = torch.ones(len(texts), dtype=torch.float64)
    settings = Settings([sampling] * len(texts), torch.device("cpu"), SMALL)
    for here in range(len(prompt), texts.shape[1]):
        seen, counts = torch.zeros(2, len(texts), 1, SMALL, dtype=torch.int64)
        seen[:, 0].scatter_(1, texts[:, :here], 1)
        counts[:, 0].scatter_add_(1, texts[:, len(prompt) : here], torch.ones_like(texts[:, len(prompt) : here]))
        p = sampling_distribution(logits[:, here - 1 : here], settings, Seen(seen > 0, counts))[:, 0].double()
        probabilities *= p.gather(1, texts[:, here, None])[:, 0]
    return (probabilities / probabilities.sum()).numpy().reshape([SMALL] * new_tokens)


def p_value(outputs: torch.Tensor, probabilities: np.ndarray) -> float:
    """The smallest p-value of the χ² tests of whole texts and of each adjacent pair of tokens; outcomes expected less
    than five times are counted together.

    Args:
        outputs: ``[count, new tokens]`` int64.
        probabilities: from :func:`joint_distribution`.
    """
    counts = np.zeros_like(probabilities)
    np.add.at(counts, tuple(outputs.numpy().T), 1)
    assert counts[probabilities == 0].sum() == 0, "a text of probability 0"
    tests = [(counts, probabilities)]
    for place in range(counts.ndim - 1):
        others = tuple(axis for axis in range(counts.ndim) if axis not in (place, place + 1))
        tests.append((counts.sum(others), probabilities.sum(others)))
    smallest = 1.0
    for observed, p in tests:
        expected, observed = p.flatten() * len(outputs), observed.flatten()
        rare = expected < 5
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
        kept = expected > 0
        scaled = expected[kept] * observed.sum() / expected.sum()
        smallest = min(smallest, stats.chisquare(observed[kept], scaled).pvalue)
    return smallest


def check_warm_up(make_target: Callable[..., Target], make: MakeDrafter) -> None:
    """Warm-up steps of a CUDA graph's capture, on any device: steps undone by restoring ``buffers()`` and the engine's
    own buffers do not change later steps or texts."""
    wide, small = phrases(make_target), soft(make_target)
    for mode, target in (("greedy", wide), ("mss", small), ("mss", wide), ("sample", wide)):
        expected = _steps(target, make(target), mode, warm_up=[])
        for warm_up in ([1, 4, 6], [0, 2, 3, 5, 8]):
            steps = _steps(target, make(target), mode, warm_up=warm_up)
            assert steps == expected, f"{mode}: steps undone before step {warm_up}: {steps} instead of {expected}"


def _steps(target: Target, drafter: Drafter, mode: Mode, warm_up: Sequence[int]) -> list[list[list[int]]]:
    """Committed tokens of ten static steps, by step and active row, the row's number first; a text ends and another
    begins."""
    vocabulary, committed = target.vocab_size, []
    prompts = [[token % vocabulary for token in prompt * 2] for prompt in (STARTS[0], STARTS[5], STARTS[2])]
    third = Sampling(seed=7, repetition_penalty=1.2, frequency_penalty=0.9)
    samplings = [Sampling(seed=5), Sampling(seed=6, temperature=0.7), third]
    capacity = max(map(len, prompts)) + 14 * (drafter.max_depth + 1) + drafter.num_nodes
    step = Step(target, drafter, mode, 3, capacity, static=True)
    with torch.inference_mode(), engine_attention([target, *drafter.models]):
        step.reset()
        step.begin(range(0, 2), prompts[:2], samplings[:2])
        active = [0, 1]
        for number in range(10):
            if number == 3:
                step.begin(range(2, 3), prompts[2:], samplings[2:])
                active = [0, 1, 2]
            if number == 6:  # an ended row runs on for a step
                step.end(0)
                active = [1, 2]
            if number == 7:
                step.begin(range(0, 1), prompts[1:2], samplings[1:2])
                active = [0, 1, 2]
            if number in warm_up:
                buffers = step.buffers()
                kept = [buffer.clone() for buffer in buffers]
                step.warm_up()
                for buffer, before in zip(buffers, kept, strict=True):
                    buffer.copy_(before)
            step.run()
            rows = step.committed.tolist()
            committed.append([[n, *rows[n][1 : rows[n][0]], rows[n][drafter.max_depth + 1]] for n in active])
    return committed


class _HostReads(TorchFunctionMode):
    """Refuses what reads a tensor on the host, or makes one there, before PyTorch's dispatcher sees it."""

    READS = "tolist numpy item cpu __array__ __bool__ __int__ __float__ __index__ from_numpy".split()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        assert name not in self.READS and "cpu" not in args[1:], f"{name} in a static step"
        if func in _device_constructors():  # a CPU's tensor if no device is given; data is copied to the device
            copies = func in (torch.tensor, torch.asarray, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
            assert kwargs.get("device") is not None and not copies, f"{name} of the host's data in a static step"
        return func(*args, **kwargs)


class CaptureSimulation(TorchDispatchMode):
    """Static steps as a CUDA graph would hold them, on any device.

    An operation fails that a graph cannot hold: host reads, shapes that depend on data, constants of the host. Each
    step is recorded (:meth:`step`); afterwards :meth:`check` says whether all did the same on the same memory. What a
    step reads and has not written itself, by bytes, is from before it.

    operations: of each step: names, shapes and numbers. reads: of each step, where memory from before was first read,
    by storage. changed: storages from before a step that it wrote to.
    """

    REFUSED = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique",
               "argwhere", "bincount", "repeat_interleave.Tensor", "repeat_interleave.self_Tensor", "lift_fresh",
               "lift_fresh_copy", "pin_memory")  # fmt: skip
    OVERWRITES = ("copy_", "fill_", "zero_")

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[list[object]] = []
        self.reads: list[dict[int, str]] = []
        self.changed: set[int] = set()
        self.held: list[torch.Tensor] = []  # nothing is freed, so that no storage takes the place of another
        self.fresh: set[int] = set()  # storages that the step has made
        self.written: dict[int, torch.Tensor] = {}  # bytes of other storages that it has overwritten

    def step(self, run: Callable[[], None]) -> None:
        """Record a step."""
        self.fresh, self.written = set(), {}
        self.operations.append([])
        self.reads.append({})
        with _HostReads(), self:
            run()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name, schema = kwargs or {}, func.overloadpacket.__name__, func._schema
        refused = name in self.REFUSED or str(func).removeprefix("aten.") in self.REFUSED
        refused |= torch.Tag.data_dependent_output in func.tags
        assert not refused and (name != "where" or len(args) > 1), f"{name} in a static step, {_caller()}"
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        inputs = [(each, tensor) for each in schema.arguments for tensor in _tensors(given.get(each.name))]
        if name.startswith("index"):
            masks = [tensor for _, tensor in inputs if tensor.dtype in (torch.bool, torch.uint8)]
            assert not any(mask is tensor for mask in masks for tensor in _tensors(given.get("indices"))), (
                f"{name} by a mask in a static step, {_caller()}"
            )
        self.operations[-1].append((func, str(_plain(args)), str(_plain(kwargs))))
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        self.held += outputs
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        known = {_storage(tensor) for _, tensor in inputs}
        if not (is_view and known.issuperset(map(_storage, outputs))):  # a view reads nothing, unless it copies
            self._note(name, inputs)
        self.fresh |= {_storage(tensor) for tensor in outputs} - known
        return result

    def _note(self, name, inputs):
        """Note what an operation that is no view has read and written."""
        writes = [(each, tensor) for each, tensor in inputs if each.alias_info is not None and each.alias_info.is_write]
        overwritten = [tensor for each, tensor in writes if each.is_out or name in self.OVERWRITES]
        for _, tensor in inputs:
            place = _storage(tensor)
            if place in self.fresh or not tensor.numel() or any(tensor is each for each in overwritten):
                continue
            if place not in self.written or not _bytes(self.written[place], tensor).all():
                self.reads[-1].setdefault(place, f"{name}, {_caller()}")
        for _, tensor in writes:
            if _storage(tensor) not in self.fresh:
                self.changed.add(_storage(tensor))
        for tensor in overwritten:
            size = tensor.untyped_storage().nbytes()
            whole = self.written.setdefault(_storage(tensor), torch.zeros(size, dtype=torch.bool))
            _bytes(whole, tensor).fill_(True)

    def check(self, named: Sequence[torch.Tensor]) -> None:
        """All steps did the same on the same memory, and what crosses from one to the next is named."""
        assert all(each == self.operations[0] for each in self.operations[1:]), "steps are not the same operations"
        for before, after in itertools.pairwise(self.reads):
            moved = [(before | after)[place] for place in before.keys() ^ after.keys()]
            assert not moved, f"a step reads what another one has elsewhere: {moved}"
        crossing = {place: where for place, where in self.reads[0].items() if place in self.changed}
        for tensor in named:
            crossing.pop(_storage(tensor), None)
        assert not crossing, (
            f"steps change what later ones read, and buffers() does not name it: {[*crossing.values()]}"
        )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _plain(value: object) -> object:
    """An operation's arguments without addresses and values."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _bytes(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor among those of its storage."""
    size, strides = tensor.element_size(), tensor.stride()
    return whole.as_strided(
        (*tensor.shape, size), (*(size * each for each in strides), 1), size * tensor.storage_offset()
    )


def _caller() -> str:
    """The line that called an operation, outside of PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def caches(step: Step) -> list[torch.Tensor]:
    """The K/V of the target and of drafters."""
    drafters = [step.drafter, *getattr(step.drafter, "drafters", [])]
    own = [each.cache for each in (step, *drafters) if isinstance(getattr(each, "cache", None), KVCache)]
    return [
        *itertools.chain(*(cache._storages for cache in own)),
        *(each.layer.keys for each in drafters if hasattr(each, "layer")),
        *(each.layers.storage for each in drafters if hasattr(each, "layers")),
    ]


def check_static(make_target: Callable[..., Target], make: MakeDrafter) -> None:
    """Trees stay within the drafter's bounds; static steps have one shape, and a CUDA graph can hold them."""
    target = phrases(make_target)
    modes: tuple[Mode, ...] = ("greedy", "sample", "mss")
    for mode, static in itertools.product(modes, (False, True)):
        drafter = make(target)
        drafter.clock = StepClock()
        shapes, propose = defaultdict(set), drafter.propose

        def proposed(state, drafter=drafter, propose=propose, shapes=shapes, static=static):
            tree = propose(state)
            rows, nodes = tree.tokens.shape
            assert nodes <= drafter.num_nodes and tree.depth.shape == tree.parent.shape == (rows, nodes)
            shapes[state.alone].add((nodes, None if tree.draws is None else tuple(tree.draws.child.shape)))
            if not static:
                _check_tree(tree, state.root, drafter)
            return tree

        drafter.propose = proposed
        step = Step(target, drafter, mode, 2, 128, static=static)
        with torch.inference_mode(), engine_attention([target, *drafter.models]):
            step.reset()
            step.begin(range(0, 2), STARTS[:2], [Sampling(seed=1), Sampling(seed=2, top_k=9)])
            if static and drafter.static:
                for choice in (WHOLE, *(step.static_budget.choices if step.static_budget else ())):
                    step.choice = choice
                    simulate_capture(step)
            else:
                for _ in range(5):
                    step.run()
        assert not (static and drafter.static) or {len(each) for each in shapes.values()} == {1}, shapes


def simulate_capture(step: Step) -> None:
    """One step as it is, in which buffers may be made, and two as a graph would hold them."""
    step.run()
    simulation = CaptureSimulation()
    for _ in range(2):
        simulation.step(step.run)
    simulation.check([*step.buffers(), *caches(step)])


def _check_tree(tree: TokenTree, root: torch.Tensor, drafter: Drafter) -> None:
    """The invariants of ``TokenTree``, node by node."""
    assert torch.equal(tree.tokens[:, 0], root)
    for row, (parents, depths, valid) in enumerate(
        zip(tree.parent.tolist(), tree.depth.tolist(), tree.valid.tolist(), strict=True)
    ):
        assert parents[0] == -1 and depths[0] == 0 and valid[0]
        children: dict[int, list[int]] = {}
        for node in range(1, len(parents)):
            if valid[node]:
                assert 0 <= parents[node] < node and depths[node] == depths[parents[node]] + 1 <= drafter.max_depth
                assert valid[parents[node]]
                bits = tree.ancestors[row, node].tolist()
                above = [other for other in range(node) if bits[other // 64] >> other % 64 & 1]
                assert above and above[-1] == parents[node] and len(above) == depths[node]
                children.setdefault(parents[node], []).append(int(tree.tokens[row, node]))
        for tokens in children.values():
            assert len(tokens) == len(set(tokens)) <= drafter.branching, "two nodes are the same path"
