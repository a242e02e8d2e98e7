"""The distribution of coupled sampling's texts: joints of four tokens beside their exact probabilities, and wrong noise
that the same χ² tests reject.

The target is a table of logits by the token before. What chooses tokens is the engine's own ``Verifier``, once for the
first token and then step by step, on trees of the root alone (plain decoding) or of the root and all of its children.
Every text continues a prefix 1 3 1 3 …, so that one joint is expected of all.

Shape letters: B rows, N nodes, V tokens, C contexts, W windows of four tokens.
"""

import functools
import itertools
from types import SimpleNamespace

import lossless_suite
import numpy as np
import pytest
import torch
from scipy import stats

from draftsmith.inference.verify import sampling as verify_sampling
from draftsmith.inference.verify.sampling import Noise, Sampling, Settings
from draftsmith.inference.verify.tree import StaticTree
from draftsmith.inference.verify.verify import Verifier
from draftsmith.kernels.coupled import coupled_topk, coupled_topk_reference, gumbel
from draftsmith.kernels.distribution import distribution_reference

ALPHA, COUNT, VOCAB = 1e-6, 100_000, 4
CPU = torch.device("cpu")
TABLE = (torch.arange(VOCAB**2) * 1.7).sin().view(VOCAB, VOCAB) * 1.3  # logits [token, next token]
PREFIX = [1, 3]  # its last tokens, and the only ones
SAMPLINGS = {
    "plain": Sampling(),
    "cut": Sampling(temperature=1.2, top_k=3, top_p=0.9, min_p=0.15),
    "penalty": Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.6),
}


# ---- What is expected


@functools.cache
def processed(last, sampling, seen):
    """The target's distribution ``[V]`` float64 after a token, written down once more: penalty of the tokens ``seen``,
    temperature, top-k, top-p, min-p."""
    x, factor = TABLE[last].double().numpy().copy(), sampling.repetition_penalty
    if factor != 1:
        x[list(seen)] *= np.where(x[list(seen)] > 0, 1 / factor, factor)
    p = np.exp(x / sampling.temperature)
    if sampling.top_k:
        p[p < np.sort(p)[-sampling.top_k]] = 0
    p /= p.sum()
    p[np.array([p[p > each].sum() >= sampling.top_p for each in p])] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


@functools.cache
def joint(sampling, count=4, last=PREFIX[-1]):
    """Probability of each continuation by ``count`` tokens, ``[Vᶜ]`` float64, the last token fastest."""
    joints = []
    for tokens in itertools.product(range(VOCAB), repeat=count):
        text = [last, *tokens]
        seen = [frozenset([*PREFIX, *tokens[:place]]) for place in range(count)]
        steps = zip(text, tokens, seen, strict=False)
        joints.append(np.prod([processed(token, sampling, those)[after] for token, after, those in steps]))
    return np.array(joints)


def p_value(windows, joints, contexts=None):
    """The smallest p of the χ² tests of windows ``[n, 4]`` beside ``joints [C, W]`` by their contexts ``[n]``; 0 if a
    window of probability 0 occurs."""
    contexts = torch.zeros(len(windows)) if contexts is None else contexts
    p_values, tested = [], 0
    for context, joint_of_context in enumerate(joints):
        own, probabilities = windows[contexts == context], joint_of_context.reshape([VOCAB] * 4)
        if (probabilities[tuple(own.numpy().T)] == 0).any():
            return 0.0
        tested += int((probabilities * len(own) >= 10).sum())
        p_values.append(lossless_suite.p_value(own, probabilities))
    assert tested > 20, "almost one text only: nothing is tested"
    return float(min(p_values))


# ---- Texts


def settings_of(sampling, seeds):
    settings = Settings([sampling], CPU)[torch.zeros(len(seeds), dtype=torch.int64)]  # each row has its own
    settings.seed.copy_(seeds)
    return settings


def continuations(sampling, seeds, lengths, count=4, children=False, ids=None):
    """``count`` tokens ``[B, count]`` after prefixes of ``lengths [B]``, by the verifier's own steps.

    Args:
        children: steps on trees of the root and all its children, which commit two tokens; else on the root alone.
        ids: of the four tokens in a larger vocabulary, whose other tokens are impossible.
    """
    ids = torch.arange(VOCAB) if ids is None else torch.tensor(ids)
    wide = torch.full((VOCAB, int(ids.max()) + 1), -torch.inf)
    wide[:, ids] = TABLE
    number = torch.zeros(wide.shape[1], dtype=torch.int64)
    number[ids] = torch.arange(VOCAB)

    rows = len(seeds)
    verifier = Verifier("sample", 1, SimpleNamespace(device=CPU, vocab_size=wide.shape[1]), VOCAB)
    verifier.settings = settings_of(sampling, seeds)
    if verifier.penalises:
        verifier.seen = torch.zeros(rows, wide.shape[1], dtype=torch.bool)
        verifier.seen[:, ids[PREFIX]] = 1
    tree = StaticTree([-1] + [0] * VOCAB * children, CPU)
    first = verifier.first_tokens(wide[torch.full((rows,), PREFIX[-1])], slice(0, rows), lengths)
    text, lengths = [number[first]], lengths.clone()
    while len(text) < count:
        tokens = text[-1][:, None]
        if children:
            tokens = torch.cat((tokens, torch.arange(VOCAB).expand(rows, -1)), 1)  # [B, N]
        finite, choice = verifier.coupled(tree.fill(ids[tokens]), tree.mask, wide[tokens], lengths)
        assert finite.isfinite().all()
        choice = number[choice]
        committed = choice[:, :1]
        if children:
            committed = torch.cat((committed, choice.gather(1, committed + 1)), 1)  # node x + 1 is token x
        verifier.mark_seen(ids[committed], torch.full((rows,), committed.shape[1] - 1))
        text += committed.unbind(1)
        lengths += committed.shape[1]
    return torch.stack(text[:count], 1)


def new_seeds(count=COUNT):
    """Consecutive seeds."""
    torch.manual_seed(1)
    return torch.randint(1 << 40, ()) + torch.arange(count)


def over_seeds(sampling, position=30, **more):
    """p of texts of many seeds at one position."""
    texts = continuations(sampling, new_seeds(), torch.full((COUNT,), position), **more)
    return p_value(texts, joint(sampling)[None])


def over_positions(sampling):
    """p of the disjoint windows of one text of one seed, given the token before each.

    Of each position the choices after all tokens are computed at once; the text is the path through them.
    """
    settings = settings_of(sampling, new_seeds(1).expand(COUNT))
    choices: list[int] = []
    for part in range(4):
        lengths = torch.arange(COUNT) + part * COUNT
        choices += Noise(settings, lengths).best(TABLE.expand(COUNT, -1, -1), 0)[2].flatten().tolist()
    text = PREFIX[-1:]
    for position in range(4 * COUNT):
        text.append(choices[position * VOCAB + text[-1]])
    joints = np.stack([joint(sampling, 4, last) for last in range(VOCAB)])
    return p_value(torch.tensor(text[1:]).view(-1, 4), joints, torch.tensor(text[:-1:4]))


def rows_of_a_batch():
    """Seeds of 62 bits and positions; those of rows 2i and 2i + 1 are the same but for one bit of the seed."""
    torch.manual_seed(2)
    seeds = torch.randint(1 << 62, (COUNT, 1)).repeat(1, 2)
    seeds[:, 1] ^= 1 << torch.arange(COUNT) % 62
    return seeds.flatten(), torch.randint(2, 1 << 20, (COUNT, 1)).repeat(1, 2).flatten()


def over_rows(sampling):
    """p of the texts of every other row of a batch, of many seeds and positions."""
    seeds, lengths = rows_of_a_batch()
    return p_value(continuations(sampling, seeds[1::2], lengths[1::2]), joint(sampling)[None])


def pair_p_value(sampling, seeds, lengths):
    """p of the joint of two tokens each of rows 2i and 2i + 1, which should be independent."""
    pairs = continuations(sampling, seeds, lengths, 2).view(-1, 4)
    return p_value(pairs, np.outer(joint(sampling, 2), joint(sampling, 2)).reshape(1, -1))


def over_pairs_of_rows(sampling):
    """p of pairs of rows whose seeds differ in one bit."""
    return pair_p_value(sampling, *rows_of_a_batch())


def over_pairs_of_seeds(sampling):
    """p of pairs of rows of seeds s and s + 1."""
    return pair_p_value(sampling, new_seeds(2 * COUNT), torch.full((2 * COUNT,), 30))


def over_requests(sampling):
    """p of texts of one seed that continue one prefix, each from another position."""
    texts = continuations(sampling, new_seeds(1).expand(COUNT), 2 + 4 * torch.arange(COUNT))
    return p_value(texts, joint(sampling)[None])


def over_pairs_of_requests(sampling):
    """p of pairs of requests of one seed and prefix; the second begins where the first one's two tokens end."""
    lengths = torch.tensor([20, 22]).repeat(COUNT)
    return pair_p_value(sampling, new_seeds().repeat_interleave(2), lengths)


LAWS = (over_seeds, over_positions, over_rows, over_requests)
PAIRS = (over_pairs_of_rows, over_pairs_of_seeds, over_pairs_of_requests)


@pytest.mark.parametrize(
    ("law", "name"),
    [
        *((law, "cut") for law in (*LAWS, *PAIRS)),
        (over_seeds, "plain"),
        (over_seeds, "penalty"),
        (over_positions, "plain"),
        (over_rows, "penalty"),
    ],
)
def test_four_tokens_have_the_targets_distribution(law, name):
    assert law(SAMPLINGS[name]) > ALPHA


@pytest.mark.parametrize("law", [over_seeds, over_requests, over_pairs_of_rows])
def test_law_of_the_definition(monkeypatch, law):
    """The same of ``coupled_topk_reference``, which runs without a compiler."""
    monkeypatch.setattr(verify_sampling, "coupled_topk", coupled_topk_reference)
    assert law(SAMPLINGS["penalty"]) > ALPHA


@pytest.mark.parametrize("ids", [[0, 16, 32, 48], [5, 6, 69, 70], [1, 17, 65, 144]], ids=str)
def test_law_of_other_ids(ids):
    """The four words of one counter of Philox, and tokens of several counters."""
    sampling = SAMPLINGS["cut"]
    seeds = new_seeds()
    texts = continuations(sampling, seeds, torch.full((COUNT,), 9), ids=ids)
    assert p_value(texts, joint(sampling)[None]) > ALPHA
    other = continuations(sampling, seeds[:99], torch.full((99,), 9))
    assert not torch.equal(texts[:99], other), "the noise does not depend on the id"


def test_law_across_the_words_of_a_position():
    """Noise of positions on both sides of 2³²."""
    assert over_seeds(SAMPLINGS["plain"], (1 << 32) - 1) > ALPHA


@pytest.mark.parametrize("name", SAMPLINGS)
def test_trees_give_the_same_texts(name):
    """Steps of two tokens, the second one after a node of the tree: the text of plain decoding, token by token."""
    rows = [each[:20_000] for each in rows_of_a_batch()]
    plain, trees = (continuations(SAMPLINGS[name], *rows, children=children) for children in (False, True))
    assert torch.equal(plain, trees)


# ---- Wrong variants: each stands in for coupled_topk


def without_position(logits, t, k, p, m, seed, positions, *more):
    return coupled_topk(logits, t, k, p, m, seed, positions * 0, *more)


def of_two_positions(logits, t, k, p, m, seed, positions, *more):
    return coupled_topk(logits, t, k, p, m, seed, positions // 2, *more)


def of_the_row_above(logits, t, k, p, m, seed, positions, *more):
    """One noise for two rows with different seeds."""
    return coupled_topk(logits, t, k, p, m, seed.view(-1, 2)[:, :1].repeat(1, 2).flatten(), positions, *more)


def low_word_of_seed(logits, t, k, p, m, seed, positions, *more):
    return coupled_topk(logits, t, k, p, m, seed & 0xFFFFFFFF, positions, *more)


def seed_plus_position(logits, t, k, p, m, seed, positions, *more):
    """Seed and position are added up: the text of seed s + 1 is that of s, a token later."""
    return coupled_topk(logits, t, k, p, m, seed * 0, seed[:, None] + positions, *more)


def of_the_first_rows_position(logits, t, k, p, m, seed, positions, *more):
    """One position for all rows, as a count of the batch's steps would be: requests of one seed share their noise."""
    return coupled_topk(logits, t, k, p, m, seed, positions[:1].repeat(len(positions), 1), *more)


def noise_at(logits, seed, positions):
    return gumbel(seed[:, None, None], positions[..., None], torch.arange(logits.shape[-1]))


def before_filters(logits, t, k, p, m, seed, positions, *_):
    """Top-k, top-p and min-p of log p + noise."""
    scores = logits / t[:, None, None] + noise_at(logits, seed, positions)
    kept = distribution_reference(scores, torch.ones_like(t), k, p, m)
    return logits.amax(-1), kept, kept.argmax(-1, keepdim=True)


def before_temperature(logits, t, k, p, m, seed, positions, *_):
    kept = distribution_reference(logits + noise_at(logits, seed, positions), t, k, p, m)
    return logits.amax(-1), kept, kept.argmax(-1, keepdim=True)


def of_the_node(logits, t, k, p, m, seed, positions, *more):
    """The number of the node in its tree."""
    return coupled_topk(logits, t, k, p, m, seed, positions * 0 + torch.arange(positions.shape[1]), *more)


def of_the_slot(logits, t, k, p, m, seed, positions, *more):
    """The node's slot in the K/V cache: the root's position + the number of the node."""
    return coupled_topk(logits, t, k, p, m, seed, positions[:, :1] + torch.arange(positions.shape[1]), *more)


def over_trees(sampling):
    """As :func:`over_seeds`, in steps on trees."""
    return over_seeds(sampling, children=True)


PLAIN = Sampling()


@pytest.mark.parametrize(
    ("wrong", "law", "sampling"),
    [
        (without_position, over_seeds, PLAIN),
        (without_position, over_positions, PLAIN),
        (without_position, over_requests, PLAIN),
        (without_position, over_pairs_of_requests, PLAIN),
        (of_two_positions, over_seeds, PLAIN),
        (of_two_positions, over_positions, PLAIN),
        (of_the_row_above, over_pairs_of_rows, PLAIN),
        (low_word_of_seed, over_pairs_of_rows, PLAIN),
        (of_the_first_rows_position, over_requests, PLAIN),
        (of_the_first_rows_position, over_pairs_of_requests, PLAIN),
        (seed_plus_position, over_pairs_of_seeds, PLAIN),
        (before_filters, over_seeds, Sampling(top_k=3)),
        (before_filters, over_seeds, Sampling(top_p=0.9)),
        (before_filters, over_seeds, Sampling(min_p=0.1)),
        (before_temperature, over_seeds, Sampling(temperature=0.9)),
        (of_the_node, over_trees, PLAIN),
        (of_the_slot, over_trees, PLAIN),
    ],
)
def test_wrong_noise_is_rejected(monkeypatch, wrong, law, sampling):
    monkeypatch.setattr(verify_sampling, "coupled_topk", wrong)
    assert law(sampling) < ALPHA


@pytest.mark.parametrize("wrong", [of_the_row_above, low_word_of_seed])
def test_only_pairs_of_rows_show_shared_noise(monkeypatch, wrong):
    """Noise shared by two rows leaves the distribution of each row's text as it is."""
    monkeypatch.setattr(verify_sampling, "coupled_topk", wrong)
    assert over_rows(PLAIN) > ALPHA


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_reduced_vocabularys_own_ids_break_the_coupling(temperature):
    """A drafter knows three tokens of the target's four, and has the target's logits of them: it proposes what the
    target chooses wherever it can. With noise by its own ids 0, 1, 2 it proposes another token in many cases, although
    its proposals have the same distribution: no test of the law can see this."""
    sampling, known = Sampling(temperature), torch.tensor([1, 2, 3])
    noise = Noise(settings_of(sampling, new_seeds()), torch.full((COUNT,), 30))
    logits = TABLE[PREFIX[-1]].expand(COUNT, 1, -1)
    choice = noise.best(logits, 0)[2].flatten()
    p = processed(PREFIX[-1], sampling, frozenset())[1:]
    shares, p_values = [], []
    for proposed in (
        noise.draft(logits[..., 1:], 0, 1, known)[1].flatten(),
        known[noise.draft(logits[..., 1:], 0, 1)[1].flatten()],
    ):
        shares.append(float((proposed == choice)[choice >= 1].double().mean()))
        counts = torch.bincount(proposed, minlength=VOCAB)[1:].numpy()
        p_values.append(stats.chisquare(counts, p / p.sum() * COUNT).pvalue)
    assert min(p_values) > ALPHA, p_values
    assert shares[0] > 0.9999, f"{shares[0]}: equal logits and noise, and another token (but for near-ties)"
    assert shares[1] < 0.75, f"{shares[1]}: the drafter's own ids make no difference"
