"""The check of texts, greedy or by coupled sampling: what is a near-tie and what a mismatch, in float32 and in 16
bits."""

import copy

import pytest
import torch

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.measure import lossless
from draftsmith.inference.measure.lossless import check_texts
from draftsmith.inference.measure.report import exactness
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.kernels import cpu
from draftsmith.kernels.coupled import gumbel
from draftsmith.kernels.linear import MOST_ON_CPU
from draftsmith.models.target import Target

PROMPTS = [[5, 7, 11], [3, 1, 4, 1, 5, 9]]
LENGTH = 12
TIE = 4  # position in the first output where two tokens are made to tie
SEEDED = [Sampling(temperature=0.8, seed=3), Sampling(temperature=1.4, top_k=20, seed=4)]
CHANGES = {"presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": {3: 2.0}}
FILTERS = ({"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.7, "repetition_penalty": 1.5}, CHANGES)
FILTERED = [Sampling(**{"temperature": 1.3, "seed": 5} | kept) for kept in FILTERS]


@pytest.fixture
def target(make_target):
    return make_target("llama")


def plain(target, prompts=PROMPTS, length=LENGTH):
    return [result.tokens for result in SpeculativeDecoder(target).generate(prompts, length)]


def test_an_output_that_ends_wrongly_is_a_mismatch(target):
    reference = plain(target)
    longer = plain(target, length=LENGTH + 1)
    stop = reference[0][6]
    assert stop not in reference[0][:6] and stop not in reference[1]
    for output in ([reference[0][:7], reference[1]], [longer[0], reference[1]], [[], reference[1]]):
        check = check_texts(target, PROMPTS, output, reference)
        assert (check.identical, check.near_ties, check.mismatches) == (False, 0, 1)
    target.model.generation_config.eos_token_id = stop
    stopped = [reference[0][:7], reference[1]]
    assert plain(target) == stopped
    assert check_texts(target, PROMPTS, stopped, stopped).identical
    for output in ([reference[0][:6], reference[1]], [reference[0][:9], reference[1]]):
        check = check_texts(target, PROMPTS, output, stopped)
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
        check = check_texts(target, PROMPTS, ours, theirs)
        assert (check.checked, check.identical, check.near_ties, check.mismatches) == (2 * LENGTH, False, 1, 0)


@pytest.mark.parametrize("gap, near_ties, mismatches", [(4e-3, 1, 0), (6e-3, 0, 1)])
def test_near_ties_are_within_the_tolerance(target, monkeypatch, gap, near_ties, mismatches):
    reference, output = tied(target, gap)
    monkeypatch.setattr(lossless, "tolerance", lambda *_: 5e-3)
    check = check_texts(target, PROMPTS, output, reference)
    assert (check.identical, check.near_ties, check.mismatches) == (False, near_ties, mismatches)


def test_tolerance_is_the_difference_between_two_shapes_of_forward_pass(target):
    with torch.inference_mode():
        tolerance = lossless.tolerance(target, PROMPTS[0], plain(target)[0])
        scale = float(target.logits(target.hidden(torch.tensor(PROMPTS[:1]))).abs().max())
    assert 0 < tolerance < 1e-5 * scale


def in_dtype(make_target, family, dtype):
    """A tiny target in another dtype."""
    target = make_target(family)
    return Target(target.model.to(dtype), None, target.name, "")


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@torch.no_grad()
def test_the_tolerance_in_16_bits_is_the_engines_own(make_target, family):
    """On most machines passes through transformers differ by less between two shapes, Gemma-2's not at all, than the
    engine's from them; four times that is the most that counts."""
    target = in_dtype(make_target, family, torch.bfloat16)
    prompt, text = PROMPTS[0], plain(target, length=24)[0]
    theirs = lossless._plain_logits(target, prompt, text)
    wide = target.logits(target.hidden(torch.tensor([[*prompt, *text[:-1]]]))[0, len(prompt) - 1 :])
    engine = [lossless._engine_logits(target, prompt, text, nodes) for nodes in (1, 16)]
    assert engine[0].argmax(-1).tolist() == text, "it is the engine's own text"
    shapes = lossless._difference(theirs, wide)
    own = max(lossless._difference(engine[0], other) for other in (engine[1], theirs))
    last_place = 2.0 ** (int(theirs.abs().max()).bit_length() - 1 - 7)  # bfloat16 has 7 bits behind the leading one
    found = lossless.tolerance(target, prompt, text)
    assert found == min(max(own, shapes), 4 * shapes) + last_place
    forward = Runner.forward_nodes

    def defect(self, tokens, *args, **options):
        hidden, captured = forward(self, tokens, *args, **options)
        return (hidden if tokens.shape[1] == 1 else hidden.flip(-1)), captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "forward_nodes", defect)
        wrong = lossless._engine_logits(target, prompt, text, 16)
        assert lossless._difference(engine[0], wrong) > 1 > lossless.tolerance(target, prompt, text)


def test_16_bits(make_target, monkeypatch):
    """Texts of a target that rounds differently by shape differ from plain decoding, by near-ties alone; a wrong token
    in them is a mismatch. With our own products and attention nothing differs (test_tree_logits.py)."""
    monkeypatch.setattr(cpu, "runs", lambda tensor: False)
    target = in_dtype(make_target, "granite", torch.bfloat16)
    prompts = [[n, 7 + n, 3 * n % 61] for n in range(20)]
    drafter = DraftModelDrafter(target, target, [2, 1, 1, 1])
    outputs = [result.tokens for result in SpeculativeDecoder(target, drafter).generate(prompts, 30)]
    reference = [plain(target, [prompt], 30)[0] for prompt in prompts]  # one row at a time
    check = check_texts(target, prompts, outputs, reference)
    assert not check.identical and check.near_ties > 0 and check.mismatches == 0, check
    kinds = {weight.dtype for weight in target.model.parameters()}
    assert kinds == {torch.bfloat16} and not any(module._forward_hooks for module in target.model.modules())
    with torch.no_grad():
        logits = target.logits(target.hidden(torch.tensor([[*prompts[0], *outputs[0][:8]]])))[0, -1].float()
    assert int(logits.argmax()) == outputs[0][8]
    outputs[0][8] = int((logits - (logits.max() - 0.7)).abs().argmin())  # a logit lower by 0.7, about
    assert check_texts(target, prompts[:1], outputs[:1], reference[:1]).mismatches > 0


@pytest.mark.parametrize("gap, near_ties, mismatches", [(0.3, 1, 0), (1.0, 0, 1)])
def test_float32_decides_beyond_the_tolerance(make_target, monkeypatch, gap, near_ties, mismatches):
    """A gap that is beyond the tolerance, but that rounding to bfloat16 may reverse; and one that it may not."""
    target = in_dtype(make_target, "llama", torch.bfloat16)
    reference, output = tied(target, gap)
    check = check_texts(target, PROMPTS, output, reference)
    assert (check.identical, check.near_ties, check.mismatches) == (False, near_ties, mismatches)
    assert 0 < check.tolerance < gap - 0.05
    monkeypatch.setattr(lossless, "_float32_logits", lambda *_: None)  # quantized: by the tolerance alone
    assert check_texts(target, PROMPTS, output, reference).mismatches == 1


def test_token_by_token_only_where_one_pass_is_not_enough(target, monkeypatch):
    (text, *_), slow, greedy = plain(target), lossless._plain_logits, Sampling(0.0)
    monkeypatch.setattr(lossless, "_plain_logits", None)
    assert lossless._judge(target, PROMPTS[0], text, text, 1e-4, greedy) == (0, 0)
    monkeypatch.setattr(lossless, "_plain_logits", slow)
    monkeypatch.setattr(lossless, "_text_logits", lambda *given: slow(*given).flip(-1))
    assert lossless._judge(target, PROMPTS[0], text, text, 1e-4, greedy) == (0, 0)


def test_passes_token_by_token_end_once_the_check_has_failed(target, monkeypatch):
    """Each text that is wrong would have one."""
    slow, calls = lossless._plain_logits, []
    monkeypatch.setattr(lossless, "tolerance", lambda *_: 1e-3)
    monkeypatch.setattr(lossless, "_plain_logits", lambda *given: calls.append(1) or slow(*given))
    prompts = [[n, 7, 2 * n] for n in range(lossless.CONFIRMED + 3)]
    reference = plain(target, prompts)
    wrong = [[*text[:5], (text[5] + 1) % target.vocab_size, *text[6:]] for text in reference]
    check = check_texts(target, prompts, wrong, reference)
    assert len(calls) == lossless.CONFIRMED and check.mismatches >= len(prompts) and not check.passed


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "granite"])
@torch.no_grad()
def test_the_same_weights_in_float32(make_target, family):
    target = in_dtype(make_target, family, torch.bfloat16)
    weights = {name: weight.data_ptr() for name, weight in target.model.named_parameters()}
    found = lossless._float32_logits(target, PROMPTS[1], [5, 2, 44])
    assert found is not None and found.dtype == torch.float32
    assert weights == {name: weight.data_ptr() for name, weight in target.model.named_parameters()}
    copied = Target(copy.deepcopy(target.model).float(), None, "", "")
    expected = copied.logits(copied.hidden(torch.tensor([[*PROMPTS[1], 5, 2]]))[0, -3:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_where_bits_are_equal_no_near_tie_is_excused(target):
    """Any difference is a mismatch, however close the logits; an output that ends early is one, too."""
    reference = plain(target)
    swapped = [[*reference[0][:-1], (reference[0][-1] + 1) % 61], reference[1]]
    for output, wrong in ((swapped, 1), ([reference[0][:-1], reference[1]], 1), (reference, 0)):
        done: list[int] = []
        check = check_texts(target, PROMPTS, output, reference, done.append, bitwise=True)
        assert (check.mismatches, check.identical, check.near_ties) == (wrong, not wrong, 0) and done == [1, 2]
    assert SpeculativeDecoder(target).bitwise == (cpu.library() is not None)
    assert not SpeculativeDecoder(target, lean=False).bitwise
    decoder = SpeculativeDecoder(target, NgramDrafter(target, depth=MOST_ON_CPU // 2, branches=1))
    for rows in (1, 2):  # of 257 nodes
        decoder.generate(PROMPTS, 2, batch_size=rows)
        assert decoder.bitwise == (rows == 1 and cpu.library() is not None)


# ---- coupled sampling


def sampled(target, samplings=SEEDED, prompts=PROMPTS, length=LENGTH):
    results = SpeculativeDecoder(target).generate(prompts, length, mode="sample", sampling=samplings)
    return [result.tokens for result in results]


def texts(target, samplings):
    return plain(target) if samplings is None else sampled(target, samplings)


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("samplings", [None, SEEDED], ids=["greedy", "sample"])
def test_identical(target, samplings, bitwise):
    reference, seen = texts(target, samplings), []
    assert samplings is None or reference != plain(target)
    check = check_texts(target, PROMPTS, reference, reference, seen.append, bitwise=bitwise, samplings=samplings)
    fields = {"mode": "sample" if samplings else "greedy", "checked": 2 * LENGTH, "identical": True, "near_ties": 0}
    fields |= {"mismatches": 0, "tolerance": 0.0, "bitwise": bitwise, "experts": False, "p_value": None}
    assert check.passed and check.to_dict() == fields and seen == [1, 2]


@pytest.mark.parametrize("sampling", [*SEEDED, *FILTERED, Sampling(temperature=0, seed=5)], ids=str)
def test_the_scores_of_the_check_are_plain_decodings(target, sampling):
    """Token by token: ``transformers``' logits, and the definitions of the filters and of the noise."""
    for prompt, output in zip(PROMPTS, sampled(target, sampling, length=24), strict=True):
        assert lossless._judge(target, prompt, output, output, 1e-4, sampling) == (0, 0)
        other = Sampling(**{**vars(sampling), "seed": sampling.seed + 1})
        near_ties, mismatches = lossless._judge(target, prompt, output, output, 1e-4, other)
        assert (mismatches == 0) == sampling.greedy and near_ties == 0


@pytest.mark.parametrize("place", [0, 5, LENGTH - 1])
@pytest.mark.parametrize("sampling", [None, SEEDED[1], *FILTERED], ids=str)
def test_a_wrong_token_is_a_mismatch(target, sampling, place):
    """Of greedy texts, and of sampled ones: also the likeliest token, where the noise takes another, and the end of one
    text in another's place."""
    samplings = None if sampling is None else [SEEDED[0], sampling]
    reference = texts(target, samplings)
    prefix = torch.tensor([PROMPTS[1] + reference[1][:place]])
    with torch.no_grad():
        likeliest = target.logits(target.hidden(prefix))[0, -1].topk(2).indices.tolist()
    for token in {(reference[1][place] + 1) % target.vocab_size, *likeliest} - {reference[1][place]}:
        output = [list(row) for row in reference]
        output[1][place] = token
        for bitwise in (False, True):
            check = check_texts(target, PROMPTS, output, reference, bitwise=bitwise, samplings=samplings)
            assert not check.passed and not check.identical and check.near_ties == 0 and check.mismatches >= 1
            assert bitwise or 0 < check.tolerance < 1e-3
    if samplings:
        assert not check_texts(target, PROMPTS, reference, reference[::-1], samplings=samplings[::-1]).passed


def tied_by_noise(target, sampling, gap):
    """A reference, and an output with another token at ``TIE``, whose score is lower by ``gap`` / temperature; both
    continue by the same noise. The second token's row of the LM head makes up for the noise of the first."""
    reference = sampled(target, sampling)
    first = reference[0][TIE]
    second = next(t for t in range(target.vocab_size) if t not in [*reference[0], *reference[1], *PROMPTS[0]])
    prefix = PROMPTS[0] + reference[0][:TIE]
    seed, position = torch.tensor(sampling.seed), torch.tensor(len(prefix) - 1)
    noise = sampling.temperature * gumbel(seed, position, torch.tensor([first, second]))
    with torch.no_grad():
        hidden = target.hidden(torch.tensor([prefix]))[0, -1]
        logit = float(target.lm_head(hidden)[first] + noise[0] - noise[1] - gap)
        row = target.lm_head.weight[second]
        row += hidden * (logit - row @ hidden) / (hidden @ hidden)
    assert sampled(target, sampling)[0][: TIE + 1] == reference[0][: TIE + 1], "the row was to matter there alone"
    (rest,) = sampled(target, sampling, [[*prefix, second]], LENGTH - TIE - 1)
    reference = sampled(target, sampling)
    return reference, [[*reference[0][:TIE], second, *rest], reference[1]]


@pytest.mark.parametrize(("gap", "near_ties", "mismatches"), [(1e-5, 1, 0), (4e-3, 1, 0), (6e-3, 0, 1)])
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_ties_by_noise_are_near_ties(target, monkeypatch, temperature, gap, near_ties, mismatches):
    """The score, not the logit, decides; the tolerance is in logits, whatever the temperature."""
    sampling = Sampling(temperature=temperature, seed=8)
    reference, output = tied_by_noise(target, sampling, gap)
    monkeypatch.setattr(lossless, "tolerance", lambda *_: 5e-3)
    for ours, theirs in ((output, reference), (reference, output))[: 1 + (gap < 1e-4)]:
        check = check_texts(target, PROMPTS, ours, theirs, samplings=[sampling] * 2)
        assert (check.identical, check.near_ties, check.mismatches) == (False, near_ties, mismatches)
    check = check_texts(target, PROMPTS, output, reference, bitwise=True, samplings=[sampling] * 2)
    assert not check.passed and check.near_ties == 0, "where bits are equal"
    assert not check_texts(target, PROMPTS, output, reference).passed, "greedy decoding has no such tie"


def test_a_tie_at_the_edge_of_a_filter_is_a_near_tie(target, monkeypatch):
    """Two equal logits, of which top-k may keep either: what is not the tie's is a mismatch still."""
    monkeypatch.setattr(lossless, "tolerance", lambda *_: 5e-3)
    prompt, sampling = PROMPTS[0], Sampling(temperature=3.0, top_k=4, seed=2)
    with torch.no_grad():
        hidden = target.hidden(torch.tensor([prompt]))[0, -1]
        ranked = target.lm_head(hidden).argsort(descending=True)
        fourth, fifth = ranked[3].item(), ranked[4].item()
        row = target.lm_head.weight[fifth]
        row += hidden * (target.lm_head(hidden)[fourth] - 2e-3 - row @ hidden) / (hidden @ hidden)
    for seed in range(200):  # in which the fifth one has the highest score, were it kept
        sampling = Sampling(temperature=3.0, top_k=4, seed=seed)
        noise = gumbel(torch.tensor(seed), torch.tensor(len(prompt) - 1), torch.arange(target.vocab_size))
        with torch.no_grad():
            scores = target.lm_head(hidden) / 3.0 + noise
        if int(scores[ranked[:5]].argmax()) == 4:
            break
    else:
        raise AssertionError("no seed")
    reference = sampled(target, sampling, [prompt], 1)
    assert reference[0][0] in ranked[:4].tolist()
    for token, passed in ((fifth, True), (ranked[5].item(), False)):
        check = check_texts(target, [prompt], [[token]], reference, samplings=[sampling])
        assert (check.passed, check.near_ties) == (passed, passed), token
    monkeypatch.setattr(lossless, "tolerance", lambda *_: 5e-4)
    assert not check_texts(target, [prompt], [[fifth]], reference, samplings=[sampling]).passed


def test_near_ties_of_a_mixture_of_experts_are_named(make_target):
    """Rounding may lead a token to other experts, which the line says; a dense target's line does not."""
    for family, said in (("qwen2_moe", True), ("llama", False)):
        target = make_target(family)
        reference = plain(target)
        check = check_texts(target, PROMPTS, reference, reference)
        assert check.experts is said
        found = {**check.to_dict(), "passed": True, "identical": False, "near_ties": 2}
        assert ("mixture of experts" in exactness({"lossless": found})[1]) is said
