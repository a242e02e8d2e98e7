"""Ends of texts inside a draft: each case is a bug that a server with speculative decoding had (tokens behind the stop
leak, ``length`` wins over ``stop``, counts are not cut with the text). Requests that share a batch or a prompt change
nothing."""

import itertools
import random

import pytest
import torch
from draws import fixed_seed, occurs
from lossless_suite import soft
from tiny_models import noisy_heads

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.text import decode_text
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import StaticTree, Topology
from draftsmith.models.target import load_target

NONE = frozenset()
DEPTH, NEW = 6, 40
SPECIAL = 1  # <|end|>


class Foreseeing(Drafter):
    """Drafts the next six tokens of the true texts, of which the first ``right`` are right. A text is known by its
    prompt's first token."""

    num_nodes, max_depth, branching, static = DEPTH + 1, DEPTH, 1, False

    def __init__(self, target, prompts, truth, right=None):
        self.tree, self.vocabulary = StaticTree(range(-1, DEPTH), target.device), target.vocab_size
        self.texts = {prompt[0]: (len(prompt), text) for prompt, text in zip(prompts, truth, strict=True)}
        self.right = {prompt[0]: count for prompt, count in zip(prompts, right or [DEPTH] * len(prompts), strict=True)}
        self.at = {}

    def prefill(self, features, chunk):
        for part, first in zip(chunk.parts, chunk.firsts, strict=False):
            if part.start == 0:
                self.at[part.row] = int(chunk.tokens[first])

    def propose(self, state):
        drafts = []
        for row, length in enumerate(state.length.tolist()):
            begun, text = self.texts.get(self.at.get(row), (0, []))
            future = text[max(length - begun, 0) + 1 :][:DEPTH] + [0] * DEPTH
            right = self.right.get(self.at.get(row), 0)
            drafts.append([(token + (place >= right)) % self.vocabulary for place, token in enumerate(future[:DEPTH])])
        return self.tree.fill(torch.cat([state.root[:, None], torch.tensor(drafts).to(state.root)], 1))


@pytest.fixture(scope="module")
def case(tiny_lm, greedy_texts):
    """A target with a tokenizer, four prompts and their texts; the first text's fourth token is a special one."""
    target = load_target(str(tiny_lm))
    prompts = [list(target.tokenizer(text)["input_ids"]) for text in ("import os", "def f(x):", "class A", "x = 3")]
    assert len({prompt[0] for prompt in prompts}) == 4
    fourth = greedy_texts(target, prompts[:1], 4)[0][3]
    assert fourth not in itertools.chain(*prompts)
    for weight in (target.model.get_input_embeddings().weight, target.lm_head.weight):
        weight[[fourth, SPECIAL]] = weight[[SPECIAL, fourth]].clone()
    truth = greedy_texts(target, prompts, NEW + DEPTH)
    assert truth[0][3] == SPECIAL
    return target, prompts, truth


def decoded(case, rows=1, new=NEW, **options):
    """The results of the first prompts, whose lists are checked to be as long as their texts."""
    target, prompts, truth = case
    heard, drafted = [[] for _ in range(rows)], {}  # as they stood when a text ended
    options |= {"on_tokens": lambda n, tokens: heard[n].extend(tokens)}
    options |= {"on_end": lambda n, result: drafted.update({n: result.drafted})}
    decoder = SpeculativeDecoder(target, Foreseeing(target, prompts, truth))
    results = decoder.generate(prompts[:rows], new, **options)
    for number, (result, tokens) in enumerate(zip(results, heard, strict=True)):
        assert drafted[number] == result.drafted == DEPTH * len(result.accepted)
        assert tokens == result.tokens and len(result.drafted_by) == len(tokens) == 1 + sum(result.accepted)
        assert 0 not in result.accepted
        sources = [[1] * (count - 1) + [0] for count in result.accepted]
        whole = itertools.chain([0], *([1] * DEPTH + [0] for _ in sources))  # every draft is accepted
        assert result.drafted_by == list(itertools.islice(whole, len(tokens)))
    return results


def ending(case, tokens, before):
    """The text of one token, or of the ends of two, that a text holds first at the token after ``before``."""
    decode = case[0].tokenizer.decode
    text = decode(tokens)
    assert text and text not in decode(case[2][0][: before + len(tokens) - 1])
    return text


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("begin", "end", "new"),
    [
        (2, 3, 5),  # the third token, in a run of accepted ones that is longer than what is left
        (2, 3, 3),  # also where the limit is there
        (3, 4, NEW),  # a special token
        (4, 6, NEW),  # over two tokens
        (6, 8, NEW),  # over two, the second of which is the target's own after the draft
        (7, 8, NEW),  # that one alone
        (6, 9, NEW),  # over three, of two steps
        (0, 1, NEW),  # the prompt's own token
    ],
)
def test_a_stop_string_ends_a_text_inside_a_draft(case, rows, begin, end, new):
    truth = case[2]
    stop = ending(case, truth[0][begin:end], begin)
    result, *others = decoded(case, rows, new, stop_ids=NONE, stop_strings=["nowhere", stop])
    assert (result.tokens, result.finish_reason) == (truth[0][:end], "stop")
    for other, text in zip(others, truth[1:], strict=False):
        right = next((n for n in range(1, new + 1) if stop in case[0].tokenizer.decode(text[:n])), 0)
        assert (other.tokens, other.finish_reason) == (text[: right or new], "stop" if right else "length")


def test_a_stop_string_of_the_text_that_is_shown(case):
    """A special token inside it, which the text leaves out, does not hide it."""
    truth, decode = case[2][0], case[0].tokenizer.decode
    shown, stop = decode(truth[2]), decode(truth[2])[-1] + decode(truth[4])
    assert stop not in decode(truth[:5])
    (result,) = decoded(case, stop_ids=NONE, stop_strings=[stop])
    assert (result.tokens, result.finish_reason) == (truth[:5], "stop")
    assert result.text == decode(truth[:2]) + shown[:-1]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("places", [(2,), (1, 2), (5, 2), (7,), (6, 8), (0,)])
def test_end_ids_inside_a_draft(case, rows, places):
    """The first of them counts. With none, a text goes on behind the target's own, as plain decoding does."""
    truth = case[2]
    stops = frozenset(truth[0][place] for place in places)
    for result, text in zip(decoded(case, rows, stop_ids=stops), truth, strict=False):
        right = next((n + 1 for n in range(NEW) if text[n] in stops), 0)
        assert (result.tokens, result.finish_reason) == (text[: right or NEW], "stop" if right else "length")
        assert result.text == decode_text(case[0].tokenizer, result.tokens[: right - 1] if right else result.tokens)
    whole = decoded(case, rows, stop_ids=NONE)
    assert [result.tokens for result in whole] == [text[:NEW] for text in truth[:rows]]
    assert SPECIAL in whole[0].tokens[:-1] and {result.finish_reason for result in whole} == {"length"}
    (own,) = decoded(case)
    assert (own.tokens, own.finish_reason) == (truth[0][:4], "stop")


def test_requests_of_a_ragged_batch_are_those_alone(case, greedy_texts):
    """Eight rows that are refilled, prompts of 1 to 90 tokens, rows that accept everything or nothing; one prompt three
    times."""
    target, chance = case[0], random.Random(3)
    prompts = [[5 + n, *(chance.randrange(5, 300) for _ in range(length))] for n, length in enumerate(range(0, 90, 6))]
    limits = [chance.randrange(1, 30) for _ in prompts]
    truth = greedy_texts(target, prompts, 30 + DEPTH)
    order = [*range(len(prompts)), 4, 4]
    chance.shuffle(order)
    right = [(DEPTH, 0, 3)[n % 3] for n in range(len(prompts))]
    requests = [Request(prompts[n], limits[n], stop_ids=NONE) for n in order]
    decoder = SpeculativeDecoder(target, Foreseeing(target, prompts, truth, right))
    together = decoder.serve(requests, 8)
    alone = [decoder.serve([request], 1)[0] for request in requests]
    assert together == alone
    assert [result.tokens for result in together] == [truth[n][: limits[n]] for n in order]
    lengths = {count for result in together for count in result.accepted}
    assert lengths >= {1, DEPTH + 1}


@pytest.mark.parametrize("mode", ["sample", "mss", "typical"])
def test_extreme_parameters_hold_for_every_token_of_a_draft(make_target, mode):
    """Next to no temperature, or one token to choose from, is greedy decoding; a larger k than the vocabulary is none.
    Coupled texts are those of plain decoding."""
    with fixed_seed("texts without near-ties"):
        target = soft(make_target)
        drafter = MedusaDrafter(noisy_heads(target, 0.02), Topology(((0,), (0, 0), (0, 0, 0), (1,))), target)
    decoder, plain = SpeculativeDecoder(target, drafter), SpeculativeDecoder(target)
    prompts = [[3, 1, 4, 1], [2], [0, 3]]

    def texts(decoder, mode=mode, **parameters):
        each = [Sampling(seed=n, **parameters) for n in range(3)]
        results = decoder.generate(prompts, 30, mode=mode, sampling=each, stop_ids=NONE)
        occurs(decoder is plain or any(count > 1 for result in results for count in result.accepted), "accepted drafts")
        return [result.tokens for result in results]

    for penalty in (1.0, 1.3):
        greedy = texts(plain, "sample", temperature=0.0, repetition_penalty=penalty)
        for parameters in ({"temperature": 1e-9}, {"top_k": 1}, {"temperature": 1e-300, "min_p": 0.2}):
            assert texts(decoder, repetition_penalty=penalty, **parameters) == greedy, parameters
    assert texts(decoder, top_k=5000) == texts(decoder, top_k=0)
    if mode == "sample":
        for parameters in ({"temperature": 1e-3}, {"min_p": 0.2}, {"top_k": 5000, "repetition_penalty": 1.3}):
            assert texts(decoder, **parameters) == texts(plain, **parameters), parameters


def test_equal_prompts_have_equal_texts(case):
    """Greedily; sampled, they are those of their seeds."""
    target, prompts, truth = case
    decoder = SpeculativeDecoder(target, Foreseeing(target, prompts, truth))
    results = decoder.generate([prompts[1]] * 3, NEW, stop_ids=NONE)
    assert results[0] == results[1] == results[2] and results[0].tokens == truth[1][:NEW]
    seeds = [Sampling(seed=seed) for seed in (1, 2, 1)]
    one, two, again = decoder.generate([prompts[1]] * 3, NEW, mode="sample", sampling=seeds, stop_ids=NONE)
    assert one.tokens == again.tokens != two.tokens
    assert decode_text(target.tokenizer, one.tokens) != decode_text(target.tokenizer, two.tokens)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_cancelled_text_ends_and_the_others_do_not_change(case, static, drafts):
    """In the prompt's token, at some step, or where it ends anyway; the next request takes the row."""
    target, prompts, truth = case
    heard, asked = {}, iter([Request(prompt, NEW, stop_ids=NONE) for prompt in prompts])

    def go_on(number, tokens):
        heard.setdefault(number, []).extend(tokens)
        return [False, len(heard[1]) < 9 if number else None, None, len(heard.get(3, ())) < NEW][number]

    heads = MedusaDrafter(noisy_heads(target, 0.02), Topology(((0,), (0, 0), (1,))), target) if drafts else None
    decoder = SpeculativeDecoder(target, heads, static=static)
    results = decoder.serve(asked, 2, max_length=len(max(prompts, key=len)) + NEW, on_tokens=go_on)
    assert [result.finish_reason for result in results] == ["cancelled", "cancelled", "length", "length"]
    counts = [len(result.tokens) for result in results]
    assert counts[0] == 1 and 9 <= counts[1] < 13 and counts[2:] == [NEW, NEW]
    for number, result in enumerate(results):
        assert result.tokens == heard[number] == truth[number][: counts[number]]
        assert len(result.drafted_by) == counts[number]
