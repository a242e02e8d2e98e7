"""What the cache holds of a prompt already is not run again: the turns of a conversation, a common beginning, samples
of one prompt. The texts, and the steps they take, are those without reuse."""

import random

import pytest
import torch
from blocks import fitted_block
from conversing import NONE, SYSTEM, USERS, converse
from eagles import fitted
from lossless_suite import phrases, plain_texts
from tiny_models import noisy_heads, perturbed

from draftsmith.inference.drafters.compressed import CompressedDrafter, Selector
from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine import prompts as prompting
from draftsmith.inference.engine import queue
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import PlainDrafter
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology

NEVER = 1 << 30
TREE = Topology(((0,), (0, 0), (0, 1), (1,)))


def make(name, target, make_target):
    """A drafter of each kind of state, and how many tokens before the last one it reads again in a next turn."""
    if name == "plain":
        return PlainDrafter(target.device), 0
    if name == "medusa":
        return MedusaDrafter(noisy_heads(target, 2), TREE, target), 0
    if name == "dflash":
        return DFlashDrafter(fitted_block(target, make_target), TREE, target), 0
    if name == "ngram":
        return NgramDrafter(target, depth=4), 0
    if name == "eagle":
        return EagleDrafter(fitted(target, make_target), target, (2, 1)), None
    if name == "model":
        return DraftModelDrafter(perturbed(target), target, [2, 1]), None
    if name == "snapkv":
        return CompressedDrafter(target, Selector("streamingllm", 12), [1, 1]), 0
    parts = {"ngram": NgramDrafter(target, depth=3), "model": DraftModelDrafter(perturbed(target), target, [1, 1])}
    return MergedDrafter(parts | {"eagle": make("eagle", target, make_target)[0]}, target, 9), None


NAMES = ["plain", "medusa", "dflash", "ngram", "eagle", "model", "snapkv", "merged"]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_turns_of_conversations(make_target, name, static):
    """In fewer rows than conversations; greedy and in coupled sampling."""
    target = phrases(make_target)
    drafter, again = make(name, target, make_target)
    for mode in ("greedy", "sample"):
        expected, prompts, before = converse(target, drafter, least=NEVER, mode=mode, static=static)
        found, same_prompts, counts = converse(target, drafter, mode=mode, static=static)
        assert found == expected and same_prompts == prompts, (name, mode)
        total = sum(len(prompt) for own in prompts for prompt in own)
        assert before.prefilled_tokens == total and before.reused_tokens == 0
        assert counts.prefilled_tokens + counts.reused_tokens == total
        # The first prompt, of each next turn the last answer's last token and the user's, and the other users'.
        least = (
            len(SYSTEM)
            + sum(map(len, USERS))
            + sum(
                1 + len(prompt) - len(first) - len(answer.tokens)
                for own, answers in zip(prompts, expected, strict=True)
                for first, prompt, answer in zip(own, own[1:], answers, strict=False)
            )
        )
        if again == 0:
            assert counts.prefilled_tokens == least, "each keeps its row, and the system prompt is read once"
        assert least <= counts.prefilled_tokens < total / 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bitwise", [False, True])
def test_samples_of_one_prompt_cost_one_prefill(make_target, monkeypatch, name, bitwise):
    """More samples than rows, and another prompt among them."""
    target = phrases(make_target)
    drafter, _ = make(name, target, make_target)
    monkeypatch.setattr(queue, "REUSED_LEAST", 1)
    if not bitwise:
        monkeypatch.setattr(Runner, "bitwise", False)
    prompts = [SYSTEM, SYSTEM, USERS[1], SYSTEM, SYSTEM, SYSTEM]
    requests = [Request(prompt, 9, Sampling(seed=seed), NONE) for seed, prompt in enumerate(prompts)]
    decoder = SpeculativeDecoder(target, drafter)
    alone = [decoder.serve([request], 1, mode="sample")[0] for request in requests]
    for rows in (1, 3, 6):
        assert decoder.serve(requests, rows, mode="sample") == alone
        once = len(SYSTEM) + len(USERS[1])
        assert decoder.counts.prefilled_tokens == once + (rows == 1) * len(SYSTEM), "the other is between"
    assert len({tuple(result.tokens) for result in alone}) > 3


@pytest.mark.parametrize("static", [False, True])
def test_where_prompts_run_alone_whole_chunks_are_reused(make_target, monkeypatch, static):
    """Keys and values are then those of each text alone, bit for bit; an answer's, which steps made, are not reused."""
    monkeypatch.setattr(prompting, "PREFILL_CHUNK", 5)
    monkeypatch.setattr(Runner, "bitwise", property(lambda runner: True))
    target = phrases(make_target)
    answers, _, counts = converse(target, None, static=static, bitwise=True)
    expected, _, _ = converse(target, None, least=NEVER, static=static, bitwise=True)
    assert answers == expected and counts.reused_tokens > 0 and counts.reused_tokens % 5 == 0
    requests = [Request([*SYSTEM, *user, *SYSTEM, *user], 1, stop_ids=NONE) for user in USERS]
    monkeypatch.setattr(queue, "REUSED_LEAST", 1)
    together = SpeculativeDecoder(target, static=static)
    together.serve(requests, 5)
    assert together.counts.reused_tokens == 4 * 10, "of 12 tokens, two chunks"
    for row, request in enumerate(requests):
        alone = SpeculativeDecoder(target, static=static)
        alone.serve([request], 1)
        for ours, own in zip(together._step.cache.of_row(row, 0, 24), alone._step.cache.of_row(0, 0, 24), strict=True):
            end = len(request.prompt)
            assert torch.equal(ours[..., :end, :], own[..., :end, :])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["plain", "merged"])
def test_prompts_in_any_order(make_target, monkeypatch, name, static):
    """Few beginnings in many requests, texts that end at once or late, prompts of many chunks: rows change their texts
    while others wait to copy from them."""
    target = phrases(make_target)
    drafter, _ = make(name, target, make_target)
    rng = random.Random(5)
    begins = [[rng.randrange(61) for _ in range(20)] for _ in range(3)]
    prompts = [rng.choice(begins)[: rng.randrange(1, 21)] + begins[0][: rng.randrange(6)] for _ in range(40)]
    requests = [Request(prompt, rng.choice([0, 1, 2, 5, 12]), stop_ids=NONE) for prompt in prompts]
    expected = plain_texts(target, requests)
    monkeypatch.setattr(queue, "REUSED_LEAST", 1)
    monkeypatch.setattr(Runner, "bitwise", False)
    decoder = SpeculativeDecoder(target, drafter, static=static)
    for chunk, rows in ((2, 4), (3, 7), (512, 3)):
        monkeypatch.setattr(prompting, "PREFILL_CHUNK", chunk)
        found = decoder.serve(requests, rows)
        assert [result.tokens for result in found] == expected, (chunk, rows)
        assert decoder.counts.reused_tokens > 100


def test_a_free_row_that_nothing_waits_for_costs_a_step_nothing(make_target):
    target = phrases(make_target)
    lengths = []
    decoder = SpeculativeDecoder(target)
    decoder.drafter.keeps_rows = True  # else steps run on the other row alone
    requests = [Request(SYSTEM, limit, stop_ids=NONE) for limit in (3, 12)]
    decoder.serve(requests, 2, on_step=lambda *_: lengths.append(decoder._step.cache.lengths.tolist()))
    assert lengths[-1][0] == 0 and lengths[-1][1] > len(SYSTEM)
