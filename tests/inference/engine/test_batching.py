"""Continuous batching: a queue of requests of different lengths, limits, temperatures and ends, a few rows at a time;
steps that look at what is in the cache, and static ones, which are read one step late."""

import itertools

import pytest
import torch
import torch._dynamo.utils
from lossless_suite import CaptureSimulation, check_apart, record_begins, simulate_capture

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine import prompts as engine_prompts
from draftsmith.inference.engine import queue as engine_queue
from draftsmith.inference.engine.conversations import serve_conversations
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.prefill import Prefill
from draftsmith.inference.engine.protocol import Drafter, PlainDrafter
from draftsmith.inference.engine.runner import ATTENTION, Runner
from draftsmith.inference.engine.step import Step
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target

NONE = frozenset()
PROMPTS = [
    [7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33],
    [9],
    [58, 1, 30, 12],
    [21, 6, 17, 40, 8, 8, 14, 25, 39, 60, 4, 10, 31, 52, 16, 47, 23],
    [44, 2, 6],
    [12, 12, 9, 1],
    [33, 5, 20, 8, 51],
]
LIMITS = [25, 3, 0, 12, 30, 1, 17]
LONGEST = max(LIMITS) + 8
REQUESTS = [Request(prompt, limit, stop_ids=NONE) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_queue(written, scripted, monkeypatch, family, rows, static):
    """Rows end at different steps; what takes their place writes what it would write alone."""
    monkeypatch.setattr(Runner, "bitwise", False)  # neighbouring rows begin together, as on a GPU
    target, truth = written(family)
    drafter = scripted(target, PROMPTS, truth, LIMITS, 33, 5)
    reported, ended = [[] for _ in PROMPTS], []
    decoder = SpeculativeDecoder(target, drafter, static=static)
    results = decoder.serve(
        REQUESTS,
        rows,
        on_tokens=lambda number, new: reported[number].extend(new),
        on_end=lambda number, result: ended.append((number, result.finish_reason)),
    )
    assert [r.tokens for r in results] == [row[:limit] for row, limit in zip(truth, LIMITS, strict=True)] == reported
    assert [r.accepted for r in results] == drafter.accepted
    assert sorted(ended) == [(number, "length") for number in range(7)]
    assert decoder.execution.startswith("eager, ")


@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe"])
def test_a_window_that_is_only_in_the_mask(written, family):
    """Of 8 tokens: transformers' own attention does not get it as an argument in these families."""
    target, truth = written(family)
    for static in (False, True):
        results = SpeculativeDecoder(target, static=static).serve(REQUESTS, 3)
        assert [r.tokens for r in results] == [row[:limit] for row, limit in zip(truth, LIMITS, strict=True)]


def test_plain_texts_begin_in_rows_apart(make_target):
    check_apart(make_target, lambda target: PlainDrafter(target.device))


def test_rows_are_refilled_at_once(written):
    """Plain decoding of 7 texts in 3 rows: as many steps as the fullest schedule has."""
    target, _ = written("llama")
    decoder = SpeculativeDecoder(target)
    steps = 0

    class Counting(Drafter):
        num_nodes, max_depth, branching, static = 1, 0, 0, False

        def propose(self, state):
            nonlocal steps
            steps += 1
            return decoder.drafter.propose(state)

    SpeculativeDecoder(target, Counting(), static=False).serve(REQUESTS, 3)  # a static step is read one step late
    free = [0, 0, 0]  # when each row is
    for limit in LIMITS:
        free[free.index(min(free))] += max(0, limit - 1)  # the prefill gives the first token
    assert steps == max(free)


@pytest.mark.parametrize("static", [False, True])
def test_new_texts_wait_until_some_rows_are_free(written, monkeypatch, static):
    """``refill`` of them, while others are decoded; results are those of ``refill=1``, and none is left out at the end
    of the queue."""
    target, truth = written("llama")
    decoder = SpeculativeDecoder(target, static=static)
    at_once = decoder.serve(REQUESTS * 3, 5)
    assert [r.tokens for r in at_once] == [row[:limit] for row, limit in zip(truth, LIMITS, strict=True)] * 3
    monkeypatch.setattr(Runner, "bitwise", False)  # rows begin together, as on a GPU
    monkeypatch.setattr(engine_queue, "LONGEST_WAIT", 1e9)
    monkeypatch.setattr(engine_queue, "REUSED_LEAST", 1 << 30)
    begun, free, take = record_begins(monkeypatch), [], engine_queue.Queue._take_requests

    def recorded(queue):
        before, rows, busy = len(queue.results), queue.texts.count(None), queue.decoding
        take(queue)
        if busy and len(queue.results) > before:
            free.append(rows)

    monkeypatch.setattr(engine_queue.Queue, "_take_requests", recorded)
    for refill in (1, 2, 3, 5, 9):
        begun.clear()
        free.clear()
        ended = []
        results = decoder.serve(
            REQUESTS * 3, 5, refill=refill, on_end=lambda number, _, ended=ended: ended.append(number)
        )
        assert results == at_once and sorted(ended) == [*range(21)], f"refill {refill}"
        assert begun[0] == [*range(5)] and sum(map(len, begun)) == 21
        assert bool(free) == (refill < 5) and min(free, default=refill) == refill, f"refill {refill}: free rows {free}"
        apart = [rows for rows in begun if rows[-1] - rows[0] >= len(rows)]
        assert apart or refill not in (2, 3)


@pytest.mark.parametrize("static", [False, True])
def test_a_pass_of_prompts_has_so_many_tokens(written, monkeypatch, static):
    """Without padding, of several prompts or a part of one; with steps between the passes once a text is decoded."""
    target, truth = written("llama")
    requests = [Request(prompt, 30, stop_ids=NONE) for prompt in PROMPTS]
    total = sum(map(len, PROMPTS))
    monkeypatch.setattr(Runner, "bitwise", False)  # rows begin together, as on a GPU
    decoder = SpeculativeDecoder(target, static=static)
    events, run, launch = [], Prefill.run, Step.launch

    def recorded(prefill, *arguments):
        before = prefill.step.counts.prefilled_tokens
        found = run(prefill, *arguments)
        events.append(prefill.step.counts.prefilled_tokens - before)
        return found

    monkeypatch.setattr(Prefill, "run", recorded)
    monkeypatch.setattr(Step, "launch", lambda *arguments: events.append("step") or launch(*arguments))
    for bound, chunk, passes in ((100, 512, [total]), (25, 512, [25, "step", total - 25]), (22, 3, None), (1, 1, None)):
        monkeypatch.setattr(engine_queue, "PREFILL_TOKENS", bound)
        monkeypatch.setattr(engine_prompts, "PREFILL_CHUNK", chunk)
        events.clear()
        results = decoder.serve(requests, 7)
        assert [r.tokens for r in results] == [row[:30] for row in truth], bound
        counts = decoder.counts
        assert counts.prefilled_tokens == total and counts.steps == events.count("step")
        assert counts.prefill_passes == len(events) - counts.steps
        first = events.index("step")
        assert passes is None or events[: len(passes)] == passes
        assert all(1 <= tokens <= bound for tokens in events[:first])
        later = "".join("." if event == "step" else "p" for event in events[first:])
        assert passes or ("p" in later and "pp" not in later), later
        assert all(event in ("step", *range(1, chunk + 1)) for event in events[first:])


@pytest.mark.parametrize("batch_size, refill", [(1, 1), (31, 1), (32, 2), (48, 3)])
def test_conversations_begin_together(written, monkeypatch, batch_size, refill):
    """Each is answered twice, as alone."""
    target, truth = written("llama")
    decoder, fill, given = SpeculativeDecoder(target), engine_queue.Queue.fill, set()

    def recorded(queue, observe):
        given.add(queue.refill)
        fill(queue, observe)

    monkeypatch.setattr(engine_queue.Queue, "fill", recorded)
    monkeypatch.setattr(Runner, "bitwise", False)  # rows begin together, as on a GPU
    texts = [[*prompt] for prompt in PROMPTS * 3]

    def on_answer(number, result):
        texts[number] += result.tokens
        return len(texts[number]) < len((PROMPTS * 3)[number]) + 8

    def next_request(number):
        return Request(texts[number][:], 4 + 3 * (number % 2), stop_ids=NONE)

    serve_conversations(decoder, iter(range(21)), next_request, on_answer, batch_size, max_length=40)
    assert given == {refill}
    for number, text in enumerate(texts):
        prompt, count = (PROMPTS * 3)[number], 2 * (4 + 3 * (number % 2))
        assert text == prompt + (truth * 3)[number][:count], number


def test_requests_are_taken_as_rows_get_free(written):
    target, truth = written("llama")
    taken, ended = [], []

    def coming():
        for number, prompt in enumerate(PROMPTS):
            taken.append((number, len(ended)))
            yield Request(prompt, 6, stop_ids=NONE)

    decoder = SpeculativeDecoder(target)
    results = decoder.serve(coming(), 2, max_length=30, on_end=lambda number, result: ended.append(number))
    assert [r.tokens for r in results] == [row[:6] for row in truth]
    assert all(number - before <= 1 for number, before in taken), "no more than two under way"
    with pytest.raises(ValueError, match="prompt 4 needs 23 tokens with its answer, max_length is 20; raise it"):
        decoder.serve(coming(), 2, max_length=20)
    assert decoder.serve([], 4) == []


@pytest.mark.parametrize("mode", ["sample", "mss"])
@pytest.mark.parametrize("static", [False, True])
def test_seeds_and_temperatures_in_one_batch(make_target, static, mode):
    """Each request has its own; of what a row held before nothing remains."""
    target = make_target("llama")
    torch.manual_seed(1)
    heads = MedusaHeads.for_target(target, 3, 1, "own")
    drafter = MedusaDrafter(heads, Topology(((0,), (0, 0), (0, 1), (1,))), target)
    given = [
        {"seed": 3},
        {"temperature": 0},
        {"seed": 3, "top_p": 0.8},
        {"seed": 6, "min_p": 0.5},
        {"seed": 5, "repetition_penalty": 1.5, "temperature": 2.0},
        {"seed": 7, "top_k": 4},
        {"seed": 8, "frequency_penalty": 2.0, "logit_bias": {3: -100, 44: 5}},
    ]
    each = zip(PROMPTS, LIMITS, given, strict=True)
    requests = [Request(prompt, limit + 4, Sampling(**own), NONE) for prompt, limit, own in each]
    alone = [SpeculativeDecoder(target, drafter).serve([request], 1, mode=mode)[0] for request in requests]
    decoder = SpeculativeDecoder(target, drafter, static=static)
    for rows, order in itertools.product((1, 3), (range(7), [6, 3, 0, 5, 1, 4, 2])):
        together = decoder.serve([requests[n] for n in order], rows, mode=mode)
        assert [r.tokens for r in together] == [alone[n].tokens for n in order]
    greedy = SpeculativeDecoder(target).generate([PROMPTS[1]], LIMITS[1] + 4, stop_ids=NONE)
    assert alone[1].tokens == greedy[0].tokens
    assert len({tuple(result.tokens) for result in alone}) == 7
    assert max(max(result.accepted) for result in alone) > 1, "paths are walked"
    assert decoder._step is not None and decoder._step.verifier.graph_key == (True,) * 6
    decoder.serve([Request(PROMPTS[0], 3, Sampling(), NONE)] * 3, 3, mode=mode)
    assert decoder._step.verifier.graph_key == (False,) * 6, "what no request asks for is not done"


@pytest.mark.parametrize("rows", [1, 2])
def test_typical_with_a_penalty(make_target, rows):
    """Every token is the likeliest under the penalised distribution, the first one too, and it counts as seen."""
    target = make_target("llama")
    sampling = Sampling(repetition_penalty=3.0, frequency_penalty=1.5, logit_bias={9: -100})
    results = SpeculativeDecoder(target).generate(PROMPTS[:rows], 25, mode="typical", sampling=sampling, stop_ids=NONE)
    for prompt, result in zip(PROMPTS, results, strict=False):
        text = list(prompt)
        for token in result.tokens:
            logits = target.model(torch.tensor([text], device=target.device)).logits[0, -1].cpu()
            seen = torch.zeros(61, dtype=torch.bool).scatter(0, torch.tensor(text), True)
            logits[9] -= 100
            logits = torch.where(seen, torch.where(logits > 0, logits / 3, logits * 3), logits)
            logits -= 1.5 * torch.bincount(torch.tensor(text[len(prompt) :], dtype=torch.int64), minlength=61)
            assert token == int(logits.argmax())
            text.append(token)


@pytest.mark.parametrize("mode", ["greedy", "sample", "mss", "typical"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_a_static_step_asks_the_device_for_nothing(make_target, family, mode):
    target = make_target(family)
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    drafter = MedusaDrafter(heads, Topology(((0,), (0, 0), (0, 1), (1,))), target)
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=4)
    for static in (True, False):
        step = Step(target, drafter, mode, 2, 64, static=static)
        with torch.inference_mode(), target.attention(ATTENTION):
            step.begin(range(0, 2), PROMPTS[:2], [sampling, Sampling(temperature=0)])
            if static:
                simulate_capture(step)
            else:
                step.run()
                with pytest.raises(AssertionError, match="in a static step"):
                    CaptureSimulation().step(step.run)


@pytest.mark.parametrize("rows", [1, 3])
def test_stop_strings(tiny_lm, rows):
    target = load_target(str(tiny_lm))
    prompts = [list(target.tokenizer(text)["input_ids"]) for text in ("import os", "def f(x):", "class A")]
    full = SpeculativeDecoder(target).generate(prompts, 40, stop_ids=NONE)
    texts = [target.tokenizer.decode(result.tokens) for result in full]
    for length, at in itertools.product((1, 2, 5), (3, 17)):
        stop = texts[0][at : at + length]
        options = {"stop_ids": NONE, "stop_strings": ["nowhere", stop], "batch_size": rows}
        results = SpeculativeDecoder(target).generate(prompts, 40, **options)
        for result, text, whole in zip(results, texts, full, strict=True):
            own = target.tokenizer.decode(result.tokens)
            assert whole.tokens[: len(result.tokens)] == result.tokens and text.startswith(own)
            if stop not in text:
                assert result == whole
                continue
            assert stop in own and stop not in target.tokenizer.decode(result.tokens[:-1])
            assert result.finish_reason == "stop" and sum(result.accepted) == len(result.tokens) - 1
    with pytest.raises(ValueError, match="stop strings need a target with a tokenizer"):
        target.tokenizer = None
        SpeculativeDecoder(target).generate(prompts, 4, stop_strings=["x"])
