"""The engine writes what the target alone writes: every family, tree size and accepted length; and where texts end."""

import pytest

from draftsmith.inference.engine import SpeculativeDecoder

NONE = frozenset()
PROMPTS = [
    [7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33],
    [9],
    [58, 1, 30, 12],
    [21, 6, 17, 40, 8, 8, 14, 25, 39, 60, 4, 10, 31, 52, 16, 47, 23],
]
WANTED = 36
DEPTH = {1: 0, 33: 5, 65: 6}
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "gpt2", "opt", "cohere", "granite", "phi")


@pytest.fixture(scope="module")
def lesson(make_target, teach):
    """``lesson(family)`` → a target and what it writes after each prompt, made once."""
    known = {}

    def get(family):
        if family not in known:
            target = make_target(family)
            truth = teach(target, PROMPTS, WANTED + max(DEPTH.values()) + 2)
            for row in truth:
                assert len(set(row)) > 4, f"{family} repeats itself: take another seed"
            known[family] = target, truth
        return known[family]

    return get


def decode(target, drafter, prompts, wanted, **options):
    results = SpeculativeDecoder(target, drafter).generate(prompts, wanted, stop_ids=NONE, **options)
    for result in results:
        assert len(result.tokens) == 1 + sum(result.accepted)
    return results


@pytest.mark.parametrize("nodes", DEPTH)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_own(lesson, scripted, family, rows, nodes):
    target, truth = lesson(family)
    prompts, truth = PROMPTS[:rows], truth[:rows]
    drafter = scripted(target, prompts, truth, [WANTED] * rows, nodes, DEPTH[nodes])
    results = decode(target, drafter, prompts, WANTED)
    assert [r.tokens for r in results] == [t[:WANTED] for t in truth]
    assert [r.accepted for r in results] == drafter.accepted
    assert {r.finish_reason for r in results} == {"length"}
    drafter.assert_every_length_occurred()
