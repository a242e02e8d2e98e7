"""Conversations of several turns, whose prompts begin with what the turn before left in the cache, and requests with
equal prompts or a common beginning."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from draftsmith.inference.engine import queue
from draftsmith.inference.engine.conversations import serve_conversations
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.request import Counts
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.target import Target

NONE = frozenset[int]()
SYSTEM = [17, 4, 23, 9, 30, 2, 11, 41, 6, 6, 35, 8]
USERS = [[5, 3, 28], [50, 2, 33, 1, 19, 44], [9], [12, 12, 40, 7], [21, 6]]


def converse(
    target: Target,
    drafter: Drafter | None,
    *,
    least: int = 1,
    rows: int = 3,
    mode: Mode = "greedy",
    static: bool = False,
    turns: int = 3,
    system: Sequence[int] = SYSTEM,
    bitwise: bool = False,
) -> tuple[list[list[Generation]], list[list[list[int]]], Counts]:
    """Each conversation's answers and prompts, and what was run. ``least``: as ``REUSED_LEAST``."""
    vocabulary = target.vocab_size
    texts = [[token % vocabulary for token in [*system, *user]] for user in USERS]
    prompts: list[list[list[int]]] = [[] for _ in USERS]
    answers: list[list[Generation]] = [[] for _ in USERS]

    def next_request(number: int) -> Request:
        prompts[number].append([*texts[number]])
        sampling = Sampling(seed=number + 10 * len(prompts[number]), temperature=0.6)
        return Request(prompts[number][-1], 4 + 3 * number % 7, sampling, NONE)

    def on_answer(number: int, result: Generation) -> bool:
        answers[number].append(replace(result, source=None))
        texts[number] += [*result.tokens, *(token % vocabulary for token in USERS[number - 1])]
        return len(answers[number]) < turns

    decoder = SpeculativeDecoder(target, drafter, static=static)
    decoder.serve = partial(decoder.serve, refill=2)  # steps run while a row is free
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "REUSED_LEAST", least)
        patch.setattr(queue, "LONGEST_WAIT", 1e9)
        if not bitwise:
            patch.setattr(Runner, "bitwise", False)
        numbers = iter(range(len(USERS)))
        serve_conversations(decoder, numbers, next_request, on_answer, rows, mode=mode, max_length=96)
    return answers, prompts, decoder.counts
