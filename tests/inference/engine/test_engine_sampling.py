"""The engine in sampling and typical mode: the distribution of its output, by enumeration over a small vocabulary."""

import numpy as np
import pytest
import torch
from lossless_suite import joint_distribution, p_value, soft
from tiny_models import noisy_heads

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure.lossless import check_distribution
from draftsmith.inference.verify import verify as modes
from draftsmith.inference.verify.sampling import Rows, Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.inference.verify.verify import Verdict, Verifier

PROMPT, ALPHA = [3, 1, 4, 1], 1e-6
SAMPLINGS = {
    "plain": Sampling(),
    "cut": Sampling(temperature=0.7, top_k=4, top_p=0.9),
    "penalty": Sampling(temperature=1.2, repetition_penalty=1.8),
    "min_p": Sampling(min_p=0.2, repetition_penalty=1.3, top_k=5000),
    "counts": Sampling(presence_penalty=0.8, frequency_penalty=0.9, logit_bias={1: 1.5, 3: -1}),
}


@pytest.fixture(scope="module")
def decoder(make_target):
    """Heads of a perturbed LM head in a tree of three levels: drafts are often accepted, and often rejected."""
    target = soft(make_target)
    topology = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)))
    return SpeculativeDecoder(target, MedusaDrafter(noisy_heads(target, 0.02), topology, target))


def anew(decoder):
    """The same decoder with new steps: on a GPU, a captured step still runs a function that was replaced since."""
    return SpeculativeDecoder(decoder.target, decoder.drafter)


def sample(decoder, sampling, count, tokens=3, mode="mss"):
    outputs = []
    rows = min(count, 300 if mode == "sample" else 6000)  # prompts of coupled sampling run one after the other
    for first in range(0, count, rows):
        each = [Sampling(**{**vars(sampling), "seed": first + n}) for n in range(rows)]
        results = decoder.generate([PROMPT] * rows, tokens, mode=mode, sampling=each, stop_ids=frozenset())
        outputs += [result.tokens for result in results]
    return torch.tensor(outputs)


@pytest.mark.parametrize("mode", ["sample", "mss", "typical"])
def test_either_decoder_draws_the_same(decoder, mode):
    """The same random numbers on the lean decoder, whose distribution the tests below check, and on the model's own
    modules: only a token within rounding of a boundary may differ."""
    other = SpeculativeDecoder(decoder.target, decoder.drafter, lean=False)
    for sampling in SAMPLINGS.values():
        ours, theirs = (sample(one, sampling, 200, tokens=6, mode=mode) for one in (decoder, other))
        assert (ours != theirs).any(1).sum() <= 1 and len(ours.unique(dim=0)) > (0 if mode == "typical" else 100)
    assert decoder.execution.endswith("lean decoder")
    assert other.execution.endswith("transformers decoder (as requested)")


@pytest.mark.parametrize("mode", ["sample", "mss"])
@pytest.mark.parametrize("name", SAMPLINGS)
@torch.no_grad()
def test_three_tokens_have_the_targets_distribution(decoder, name, mode):
    sampling = SAMPLINGS[name]
    probabilities = joint_distribution(decoder.target, sampling, PROMPT, 3)
    assert probabilities.max() < 0.5, "the distribution is too concentrated to test"
    count = 12_000 if mode == "mss" else 1200  # coupled sampling has another test: plain decoding's text
    assert p_value(sample(decoder, sampling, count, mode=mode), probabilities) > ALPHA


@torch.no_grad()
def test_reused_uniforms_are_found(decoder, monkeypatch):
    """The marginals stay right; the joint distribution of several tokens does not."""
    philox_uniforms = modes.philox_uniforms
    monkeypatch.setattr(modes, "philox_uniforms", lambda seed, step, count: philox_uniforms(seed, step * 0, count))
    expected = joint_distribution(decoder.target, Sampling(), PROMPT, 3)
    assert p_value(sample(anew(decoder), Sampling(), 12_000), expected) < ALPHA


def test_check_distribution(decoder, monkeypatch):
    good = check_distribution(decoder, [PROMPT, [2, 2]], Sampling(temperature=0.9), batch_size=256)
    assert good.passed and good.checked == 2 * 256 * 2 and good.mismatches == 0 and good.p_value > ALPHA
    verify, calls = modes.verify_sample, []

    def accepting_too_much(tree, logits, settings, uniforms, *more) -> Verdict:
        calls.append(uniforms.shape)
        return verify(tree, logits, settings, uniforms * 0.1, *more)

    monkeypatch.setattr(modes, "verify_sample", accepting_too_much)
    bad = check_distribution(anew(decoder), [PROMPT, [2, 2]], Sampling(temperature=0.9), batch_size=256)
    assert calls, "or it would be the right one's result"
    assert not bad.passed and bad.p_value < ALPHA


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.3},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"repetition_penalty": 50.0},
        {"frequency_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"logit_bias": {2: 2.0}},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_check_distribution_uses_the_given_parameters(decoder, monkeypatch, parameters):
    """An engine that ignores a parameter fails with that parameter, and only with it."""
    prompts, done = [[2], [0]], []
    assert check_distribution(decoder, prompts, Sampling(**parameters), 256, done.append).passed and done == [1, 2]
    begin = Verifier.begin

    def ignoring(self: Verifier, rows: Rows, prompts: list[list[int]], samplings: list[Sampling]) -> None:
        begin(self, rows, prompts, [Sampling(seed=sampling.seed) for sampling in samplings])

    monkeypatch.setattr(Verifier, "begin", ignoring)
    wrong = anew(decoder)
    assert not check_distribution(wrong, prompts, Sampling(**parameters), 256).passed
    assert check_distribution(wrong, prompts, Sampling(), 256).passed


def test_typical_mode_is_lossy(decoder):
    """It accepts more than sampling, and its output is not exact."""
    typical = sample(decoder, Sampling(), 2000, mode="typical")
    assert len({tuple(row) for row in typical.tolist()}) == 1, "deterministic"
    lengths = {}
    for mode in ("sample", "mss"):
        each = [Sampling(seed=n) for n in range(50)]
        exact = decoder.generate([PROMPT] * 50, 40, mode=mode, stop_ids=frozenset(), sampling=each)
        lengths[mode] = [n for result in exact for n in result.accepted]
        assert {*lengths[mode]} >= {1, 2, 3}, "paths of every depth are accepted"
    lossy = decoder.generate([PROMPT], 40, mode="typical", stop_ids=frozenset())[0].accepted
    assert sum(lossy) / len(lossy) > np.mean(lengths["sample"])
