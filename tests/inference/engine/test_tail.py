"""Where no request waits and rows end, plain steps run on fewer rows; texts that move go on as if they had not."""

from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from draws import fixed_seed

from draftsmith.inference.engine import queue
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.step import Step
from draftsmith.inference.verify.sampling import Sampling

NONE = frozenset()
LIMITS = [3, 5, 2, 4, 9, 2, 30, 6, 2, 3, 17, 2, 8]  # the longest ones have to move
PROMPTS = [[5 + 3 * n, 7, *range(n)] for n in range(len(LIMITS))]
SAMPLINGS = [Sampling(0.8, seed=n, top_k=(0, 20)[n % 2], repetition_penalty=(1.0, 1.3)[n % 3 > 1]) for n in range(13)]


def requests(limits=LIMITS):
    return [
        Request(prompt, limit, sampling, stop_ids=NONE)
        for prompt, limit, sampling in zip(PROMPTS, limits, SAMPLINGS, strict=True)
    ]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def target(request, make_target):
    with fixed_seed("texts without near-ties"):
        return make_target(request.param)


@pytest.fixture
def run_on(monkeypatch):
    """The numbers of rows that steps ran on, in turn."""
    rows, launch = [], Step.launch
    monkeypatch.setattr(Step, "launch", lambda self, observe=None: rows.append(self.running) or launch(self, observe))
    monkeypatch.setattr(queue, "FEWEST_ON_GPU", 1)
    return rows


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "sample", "mss", "typical"])
def test_texts_are_those_of_each_alone(target, run_on, mode, static):
    decoder = SpeculativeDecoder(target, static=static)
    together = decoder.serve(requests(), 13, mode=mode)
    # After the prefill, step n runs those with more than n tokens, on the next power of two.
    active = [sum(limit > step for limit in LIMITS) for step in range(1, max(LIMITS))]
    right = [min(13, 1 << (count - 1).bit_length()) for count in active]
    if static:  # one step later, and one step more
        right = [13, *right]
    assert run_on == right and decoder.rows == 13
    if not static:
        assert decoder.counts.idle_row_steps == sum(right) - sum(active)
    again = decoder.serve(requests(), 13, mode=mode)
    alone = [SpeculativeDecoder(target, static=static).serve([request], 1, mode=mode)[0] for request in requests()]
    assert together == alone == again


@pytest.mark.parametrize("static", [False, True])
def test_what_penalties_count_moves_with_a_text(target, run_on, static):
    each = [
        replace(one, sampling=replace(one.sampling, frequency_penalty=0.8, logit_bias={7: (3.0, -50.0)[number % 2]}))
        for number, one in enumerate(requests())
    ]
    together = SpeculativeDecoder(target, static=static).serve(each, 13, mode="sample")
    assert min(run_on) == 1
    plain = SpeculativeDecoder(target, static=static)
    assert together == [plain.serve([one], 1, mode="sample")[0] for one in each]
    assert together != SpeculativeDecoder(target, static=static).serve(requests(), 13, mode="sample")


def test_a_moved_text_has_the_same_keys_and_values(target):
    """Bit for bit, where the bits of a row do not depend on the others."""
    decoder, alone = SpeculativeDecoder(target), SpeculativeDecoder(target)
    decoder.serve(requests(), 13)
    alone.serve(requests()[6:7], 1)
    cached = len(PROMPTS[6]) + LIMITS[6] - 1
    parts = zip(decoder._step.cache.of_row(0, 0, cached), alone._step.cache.of_row(0, 0, cached), strict=True)
    for one, other in parts:
        assert one.abs().sum() > 0
        assert torch.equal(one, other) if decoder.bitwise else torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("static", [False, True])
def test_later_requests_take_the_other_rows_again(target, run_on, static):
    """A queue that was empty goes on: three requests arrive when a text ends, while one that moved goes on."""
    every, arrived = requests(), deque([0, 2, 1, 10, 6])

    class Arrivals:
        def __iter__(self):
            return self

        def __next__(self):
            if not arrived:
                raise StopIteration
            return every[order.append(arrived.popleft()) or order[-1]]

    def end(number, result):
        arrived.extend([3, 4, 5] if order[number] == 1 else [])

    order = []
    decoder = SpeculativeDecoder(target, static=static)
    results = decoder.serve(Arrivals(), 5, mode="sample", max_length=60, on_end=end)
    changes = [after for before, after in pairwise([0, *run_on]) if after != before]
    assert changes[:3] == [5, 4, 5] and changes[-1] == 1 and len(order) == 8
    for number, result in zip(order, results, strict=True):
        assert result == decoder.serve([every[number]], 1, mode="sample")[0]
