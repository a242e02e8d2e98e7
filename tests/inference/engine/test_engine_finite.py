"""Logits that are NaN or infinite end the call with an error that names the prompt; nothing is committed from them."""

import copy
import re

import pytest
import torch
from tiny_models import noisy_heads

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.target import Target

NONE = frozenset()
PROMPTS = [[7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33], [9], [58, 1, 30, 12]]
WANTED = 14
TREE = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,)))


def heads_of(target):
    """Slightly perturbed heads: some of their drafts are accepted."""
    return MedusaDrafter(noisy_heads(target, 0.05, seed=2), TREE, target)


def decode(decoder, prompts, mode):
    """Tokens reported until the end or the error, and the error's text."""
    reported = [[] for _ in prompts]
    each = [Sampling(temperature=0.7 * (n != 2), min_p=0.01, top_k=40, seed=n) for n in range(len(prompts))]
    requests = [Request(prompt, WANTED, sampling, NONE) for prompt, sampling in zip(prompts, each, strict=True)]
    try:
        decoder.serve(requests, len(prompts), mode=mode, on_tokens=lambda number, new: reported[number].extend(new))
    except FloatingPointError as error:
        return reported, str(error)
    return reported, ""


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", ["greedy", "sample", "mss", "typical"])
def test_nothing_is_committed_after_nan(make_target, mode, rows, static, drafts):
    """One token's embedding is NaN, as in a damaged file: so are all logits after it."""
    target = make_target("llama")
    decoder = SpeculativeDecoder(target, heads_of(target) if drafts else None, static=static)
    prompts = PROMPTS[:rows]
    clean, error = decode(decoder, prompts, mode)
    assert not error and [len(tokens) for tokens in clean] == [WANTED] * rows
    embedding = target.model.get_input_embeddings().weight
    places = [
        (at, row, token)
        for row, tokens in enumerate(clean)
        for at, token in enumerate(tokens[:-1])
        if all(token not in others[: at + 3] for n, others in enumerate(clean) if n != row)
        and token not in tokens[:at]
        and not any(token in prompt for prompt in prompts)
    ]
    at, row, token = max(places)
    kept = embedding[token].clone()
    embedding[token] = torch.nan
    reported, error = decode(decoder, prompts, mode)
    numbered = re.fullmatch(
        r"prompt (\d): the target's logits are not finite in float32; its weights may be damaged", error
    )
    assert numbered, error
    for mine, whole in zip(reported, clean, strict=True):
        assert mine == whole[: len(mine)]
    assert token not in reported[row][:-1], "at most one token with this embedding is reported"
    if not drafts:  # a tree may hold the token earlier, in another row
        assert int(numbered[1]) == row + 1 and reported[row] == clean[row][: at + 1]
    embedding[token] = kept
    assert decode(decoder, prompts, mode) == (clean, ""), "no NaN is left in the cache"


@pytest.mark.parametrize("mode", ["greedy", "sample", "mss", "typical"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_token(make_target, monkeypatch, mode, value):
    """NaN, one +∞, or only −∞ after the prompt; with a single −∞ that token is never emitted."""
    monkeypatch.setattr(Runner, "bitwise", False)  # prompts begin together, as on a GPU
    target = make_target("llama")
    plain = target.lm_head.forward

    def broken(hidden):
        logits = plain(hidden)
        which = slice(None) if value == -torch.inf else slice(4, 5)
        return torch.cat([logits[:-1], logits[-1:].index_fill(-1, torch.arange(61)[which], value)])

    target.lm_head.forward = broken
    reported, error = decode(SpeculativeDecoder(target), PROMPTS[:2], mode)
    assert error.startswith("prompt 2: the target's logits are not finite") and reported == [reported[0][:1], []]
    target.lm_head.forward = lambda hidden: plain(hidden).index_fill(-1, torch.tensor([4]), -torch.inf)
    reported, error = decode(SpeculativeDecoder(target), PROMPTS[:2], mode)
    assert not error and not any(4 in tokens for tokens in reported)


@pytest.mark.parametrize("mode", ["greedy", "sample", "mss"])
def test_float16_that_overflows(make_target, mode):
    target = make_target("llama")
    half = Target(copy.deepcopy(target.model).half(), None, "half", "")
    assert not decode(SpeculativeDecoder(half), PROMPTS, mode)[1]
    for each in (target, half):
        with torch.no_grad():
            each.lm_head.weight.mul_(3e4)
    reported, error = decode(SpeculativeDecoder(target), PROMPTS, mode)
    assert not error and all(len(tokens) == WANTED for tokens in reported), "float32 does not overflow"
    _, error = decode(SpeculativeDecoder(half), PROMPTS, mode)
    assert error == "prompt 1: the target's logits are not finite in float16; use bfloat16 or float32"
