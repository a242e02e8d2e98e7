import pytest
import torch

from draftsmith.inference import lossless
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.inference.lossless import check_greedy

PROMPTS = [[5, 7, 11], [3, 1, 4, 1, 5, 9]]
LENGTH = 12
TIE = 4  # position in the first output where two tokens are made to tie


@pytest.fixture
def target(make_target):
    return make_target("llama")


def plain(target, prompts=PROMPTS, length=LENGTH):
    return [result.tokens for result in SpeculativeDecoder(target).generate(prompts, length)]


def test_identical(target):
    reference = plain(target)
    seen = []
    check = check_greedy(target, PROMPTS, reference, reference, seen.append)
    assert check.to_dict() == {
        "mode": "greedy", "checked": 2 * LENGTH, "identical": True, "near_ties": 0, "mismatches": 0, "tolerance": 0.0,
        "p_value": None,
    }  # fmt: skip
    assert seen == [1, 2]


@pytest.mark.parametrize("place", [0, 5, LENGTH - 1])
def test_a_wrong_token_is_a_mismatch(target, place):
    reference = plain(target)
    output = [list(row) for row in reference]
    output[1][place] = (output[1][place] + 1) % target.vocab_size
    check = check_greedy(target, PROMPTS, output, reference)
    assert not check.identical and check.near_ties == 0
    assert check.mismatches >= 1
    assert 0 < check.tolerance < 1e-3


def test_an_output_that_ends_wrongly_is_a_mismatch(target):
    reference = plain(target)
    longer = plain(target, length=LENGTH + 1)
    stop = reference[0][6]
    assert stop not in reference[0][:6] and stop not in reference[1]
    for output in ([reference[0][:7], reference[1]], [longer[0], reference[1]], [[], reference[1]]):
        check = check_greedy(target, PROMPTS, output, reference)
        assert (check.identical, check.near_ties, check.mismatches) == (False, 0, 1)
    target.model.generation_config.eos_token_id = stop
    stopped = [reference[0][:7], reference[1]]
    assert plain(target) == stopped
    assert check_greedy(target, PROMPTS, stopped, stopped).identical
    for output in ([reference[0][:6], reference[1]], [reference[0][:9], reference[1]]):
        check = check_greedy(target, PROMPTS, output, stopped)
        assert (check.identical, check.near_ties, check.mismatches) == (False, 0, 1)


def tied(target, gap):
    """A reference, and an output with another token at ``TIE``, of a logit lower by ``gap``; both continue greedily."""
    reference = plain(target)
    first = reference[0][TIE]
    second = next(t for t in range(target.vocab_size) if t not in [*reference[0], *reference[1], *PROMPTS[0]])
    prefix = PROMPTS[0] + reference[0][:TIE]
    with torch.no_grad():
        logit = float(target.logits(target.hidden(torch.tensor([prefix])))[0, -1, first])
        assert logit > 1
        target.lm_head.weight[second] = target.lm_head.weight[first] * (1 - gap / logit)
    reference = plain(target)
    taken = reference[0][TIE]
    other = second if taken == first else first
    rest = plain(target, [[*prefix, other]], LENGTH - TIE - 1)[0]
    return reference, [[*reference[0][:TIE], other, *rest], reference[1]]


def test_an_exact_tie_is_a_near_tie(target):
    reference, output = tied(target, 0.0)
    for ours, theirs in ((output, reference), (reference, output)):  # whichever is the reference
        check = check_greedy(target, PROMPTS, ours, theirs)
        assert (check.checked, check.identical, check.near_ties, check.mismatches) == (2 * LENGTH, False, 1, 0)


@pytest.mark.parametrize("gap, near_ties, mismatches", [(4e-3, 1, 0), (6e-3, 0, 1)])
def test_near_ties_are_within_the_tolerance(target, monkeypatch, gap, near_ties, mismatches):
    reference, output = tied(target, gap)
    monkeypatch.setattr(lossless, "tolerance", lambda *_: 5e-3)
    check = check_greedy(target, PROMPTS, output, reference)
    assert (check.identical, check.near_ties, check.mismatches) == (False, near_ties, mismatches)


def test_tolerance_is_the_difference_between_two_shapes_of_forward_pass(target):
    with torch.inference_mode():
        tolerance = lossless.tolerance(target, PROMPTS[0], plain(target)[0])
        scale = float(target.logits(target.hidden(torch.tensor(PROMPTS[:1]))).abs().max())
    assert 0 < tolerance < 1e-5 * scale
