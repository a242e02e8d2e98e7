"""Log-probabilities of texts and prompts. Those of every drafter are in ../drafters/test_lossless.py."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lossless_suite import NONE, compare_logprobs, phrases
from tiny_models import SPARSE, noisy_heads

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine import logprobs as computing
from draftsmith.inference.engine import prompts as prompting
from draftsmith.inference.engine import step as stepping
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.logprobs import StepLogprobs, TokenLogprobs
from draftsmith.inference.load import load_drafter
from draftsmith.inference.verify.sampling import Sampling

ROOT = Path(__file__).parents[3]
PROMPT = [7, 3, 19, 44, 5, 3, 28, 7, 3, 19, 44, 5, 3]
ASKED = {"logprobs": 3, "prompt_logprobs": 2}


@pytest.fixture
def pair(make_target):
    target = phrases(make_target)
    return target, SpeculativeDecoder(target, MedusaDrafter(noisy_heads(target, 0.02), SPARSE, target))


def test_who_asks_for_none_pays_nothing(pair, monkeypatch):
    """Steps write none, and their graphs are the same, before and after a text that asks."""
    _, decoder = pair
    keys, written = [], []
    write, launch = StepLogprobs.write, stepping.Step.launch
    monkeypatch.setattr(StepLogprobs, "write", lambda self, *more: written.append(1) or write(self, *more))
    monkeypatch.setattr(
        stepping.Step, "launch", lambda self, *more: keys.append(self.logprobs.graph_key) or launch(self, *more)
    )
    (without,) = decoder.generate([PROMPT], 12)
    assert without.logprobs is without.prompt_logprobs is None and not written and set(keys) == {()}
    asks, plain = (Request(PROMPT, 4, stop_ids=NONE, logprobs=count) for count in (0, None))
    keys.clear()
    first, other = decoder.serve([asks, replace(plain, max_new_tokens=30)], 2)
    assert first.logprobs and other.logprobs is None and len(written) == len(first.accepted)
    assert keys == [(0, False, False)] * len(written) + [()] * (len(other.accepted) - len(written))


def test_a_text_has_them_alone_or_among_others(pair):
    """Whatever the others ask for, in rows that are used again, eager and static; and the text is the same."""
    target, decoder = pair
    requests = [
        Request([*PROMPT, number], 5 + number, Sampling(0.8, seed=number), NONE, **asked)
        for number, asked in enumerate(
            [ASKED, {}, {"logprobs": 20, "logprobs_mode": "processed_logprobs"}, {"prompt_logprobs": 0}, ASKED, {}]
        )
    ]
    assert decoder.bitwise
    alone = [SpeculativeDecoder(target).serve([request], 1, mode="sample")[0] for request in requests]
    for rows, static in itertools.product((1, 2, 4), (False, True)):
        decoder.static = static
        found = decoder.serve(requests, rows, mode="sample")
        for one, other in zip(found, alone, strict=True):
            assert one.tokens == other.tokens
            assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_prompt_that_is_not_run_again_has_them(pair, rows):
    """Equal prompts, of which one is run, in rows that are used again, and texts that move to the first rows."""
    target, drafting = pair
    asked = [{"logprobs": 3}, {"logprobs": 5, "logprobs_mode": "processed_logprobs"}, {}, ASKED]
    requests = [
        Request(PROMPT * 2, 3 + 4 * (number % 3), Sampling(0.8, seed=number), NONE, **asked[number % 4])
        for number in range(9)
    ]
    alone = [SpeculativeDecoder(target).serve([request], 1, mode="sample")[0] for request in requests]
    for decoder in (drafting, SpeculativeDecoder(target)):
        found = decoder.serve(requests, rows, mode="sample")
        assert decoder.counts.reused_tokens >= 4 * len(PROMPT)
        for one, other in zip(found, alone, strict=True):
            assert (one.tokens, one.logprobs, one.prompt_logprobs) == (
                other.tokens,
                other.logprobs,
                other.prompt_logprobs,
            )


@pytest.mark.parametrize("limit", [0, 1, 17])
def test_they_end_with_the_text(pair, limit):
    """At the limit, at a stop id and inside an accepted path."""
    _, decoder = pair
    (whole,) = decoder.generate([PROMPT], 30, stop_ids=NONE, **ASKED)
    for stops in (NONE, frozenset([whole.tokens[11]])):
        (result,) = decoder.generate([PROMPT], limit, stop_ids=stops, **ASKED)
        count = len(result.tokens)
        assert count <= limit and result.tokens == whole.tokens[:count]
        for name in ("token_logprobs", "top_ids", "top_logprobs"):
            assert getattr(result.logprobs, name) == getattr(whole.logprobs, name)[:count]
    assert any(length > 1 for length in whole.accepted)


def test_in_typical_acceptance_and_in_small_parts(pair, monkeypatch):
    """Prompts in chunks of 5, logits of few rows in memory at a time."""
    target, decoder = pair
    monkeypatch.setattr(prompting, "PREFILL_CHUNK", 5)
    sampling = Sampling(1.3, top_p=0.9, repetition_penalty=1.2, epsilon=0.4, frequency_penalty=0.6, logit_bias={9: 2})
    options = {**ASKED, "logprobs_mode": "processed_logprobs"}
    requests = [Request(PROMPT[:length], 12, sampling, NONE, **options) for length in (13, 4, 11)]
    found = [decoder.serve(requests, rows, mode="typical") for rows in (1, 3)]
    monkeypatch.setattr(computing, "_AT_ONCE", 3 * 61)  # of a vocabulary of 61
    decoder._step = None
    found.append(decoder.serve(requests, 3, mode="typical"))
    for request, result, again, parts in zip(requests, *found, strict=True):
        for one in (result, again, parts):
            assert compare_logprobs(target, request, one, "typical") < 1e-4
    assert any(length > 1 for results in found for result in results for length in result.accepted)


def test_what_is_excluded_is_left_out_and_null_in_json():
    """Numbers are the shortest ones of the same float32."""
    logits = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    packed = computing.pack(logits.log_softmax(-1), torch.tensor([3]), 3)
    found = TokenLogprobs("processed_logprobs", [None], [[]], [[]])
    found.add(packed, 3)
    assert (found.token_logprobs, found.top_ids[1]) == ([None, -math.inf], [2, 0])
    written = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert written["mode"] == "processed_logprobs" and written["token_logprobs"] == [None, None]
    assert written["top_logprobs"] == [[], [-0.31326166, -1.3132616]]
    assert torch.tensor(written["top_logprobs"][1]).tolist() == found.top_logprobs[1]
    found.add(packed, 1)
    assert found.top_ids[2] == [2]


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"logprobs": 21}, "logprobs 21: must be a whole number from 0 to 20"),
        ({"logprobs": True}, "logprobs True: must be"),
        ({"prompt_logprobs": -1}, "prompt_logprobs -1: must be"),
        ({"logprobs_mode": "raw"}, "logprobs_mode 'raw': must be raw_logprobs or processed_logprobs"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(pair, asked, said):
    with pytest.raises(ValueError, match=f"prompt 1: {said}"):
        pair[1].generate([PROMPT], 3, **asked)


SELF = "draft_model:models/tiny-lm@2,1,1"


@pytest.mark.parametrize(
    "target_name, drafter_name, texts, new_tokens, least",
    [
        ("models/tiny-lm", SELF, 2, 24, 140),
        pytest.param("models/tiny-lm", SELF, 24, 150, 10_000, marks=pytest.mark.slow),
        pytest.param(
            "models/smollm2", "models/smollm2-medusa+ngram", 4, 24, 280,
            marks=[pytest.mark.slow, pytest.mark.needs_models],
        ),
    ],
)  # fmt: skip
def test_real_texts_have_those_of_the_targets_own_pass(target_name, drafter_name, texts, new_tokens, least):
    """New tokens of three modes in batches of 8, and their prompts, against transformers' forward pass in float32: the
    bound is 64 of float32's roundings of the largest logit."""
    target, drafter = load_drafter(drafter_name, target_name=target_name, dtype="float32", all_nodes=True)
    rows = map(json.loads, (ROOT / "data/coder-seeds.jsonl").read_text().splitlines()[:texts])
    prompts = [target.tokenizer(row["messages"][0]["content"])["input_ids"] for row in rows]
    tokens, above, accepted = 0, list[float](), 0
    for mode in ("greedy", "sample", "mss"):
        requests = [
            Request(prompt, new_tokens, Sampling(0.7, seed=number), NONE, logprobs=5, prompt_logprobs=1)
            for number, prompt in enumerate(prompts)
        ]
        results = SpeculativeDecoder(target, drafter).serve(requests, 8, mode=mode)
        for request, result in zip(requests, results, strict=True):
            difference = compare_logprobs(target, request, result, mode)
            tokens += len(result.tokens)
            above += [difference] if difference > 64 * torch.finfo(torch.float32).eps else []
            accepted += sum(length - 1 for length in result.accepted)
    print(f"{tokens} tokens, {accepted} of them drafted; differences above the bound: {len(above)}")
    assert not above and tokens >= least and accepted > tokens / 4
