"""Draft models: lossless; the cache equals that of the committed text; drafts are the model's most likely tokens."""

import copy
import itertools
import json
from collections import Counter

import lossless_suite
import pytest
import torch
from lossless_suite import (
    CONTEXT,
    LIMITS,
    NONE,
    STARTS,
    check_greedy,
    check_sampling,
    check_seeds,
    check_static,
    check_warm_up,
)
from scipy import stats
from tokenizers import Tokenizer
from transformers import DynamicCache, PreTrainedTokenizerFast

from draftsmith.inference.costs import StepCosts
from draftsmith.inference.drafters import draft_model
from draftsmith.inference.drafters.draft_model import DraftModelDrafter, check_vocabulary, draw_children
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.engine import Request, SpeculativeDecoder
from draftsmith.inference.sampling import Sampling
from draftsmith.models.target import Target, load_target

EXPANSIONS = {"chain": [1, 1, 1, 1], "tree": [2, 2, 1]}
TEXTS = 6000  # in as many rows, which is three times as fast as the suite's default
STEEP = StepCosts({1: 1.0, 2: 1.2, 4: 1.5, 8: 2.0, 16: 3.0})


def perturbed(target: Target, noise: float = 0.04, vocabulary: int = 0, **config: object) -> Target:
    """A copy of the target with perturbed weights (more for the small vocabulary), optionally with another vocabulary
    size and other fields of its config."""
    noise *= 200 if target.vocab_size == lossless_suite.SMALL else 1
    model = copy.deepcopy(target.model)
    if vocabulary:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    for name, value in config.items():
        setattr(model.config, name, value)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_((torch.randn(weight.shape, generator=generator) * noise * weight.cpu().std()).to(weight.device))
    return Target(model, None, "draft", "")


class Checked(DraftModelDrafter):
    """Compares the cache and the greedy drafts with forward passes of the model over the whole text."""

    def begin(self, rows: slice) -> None:
        super().begin(rows)
        self.texts = {**getattr(self, "texts", {}), **{row: [] for row in range(rows.start, rows.stop)}}
        self.seen = getattr(self, "seen", Counter())

    def prefill(self, features, tokens, start, rows):
        super().prefill(features, tokens, start, rows)
        for row, prompt in zip(range(rows.start, rows.stop), tokens.tolist(), strict=True):
            self.texts[row] += prompt

    def end(self, row: int) -> None:
        super().end(row)
        self.texts.pop(row, None)

    def check_cache(self, row: int, count: int) -> None:
        """Slots 0 … count − 1 equal the cache of a forward pass over the text."""
        cache = DynamicCache()
        ids = torch.tensor([self.texts[row][:count]], device=self.model.device)
        at = torch.arange(count, device=ids.device).clamp(max=self.model.context - 1)[None]
        with self.model.attention("eager" if self.model.config.model_type == "gemma2" else "sdpa"):
            self.model.decoder(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True)
        for own, fresh in zip(self.cache.layers, cache.layers, strict=True):
            for mine, right in ((own.keys, fresh.keys), (own.values, fresh.values)):
                torch.testing.assert_close(mine[row, :, :count], right[0], atol=1e-4, rtol=1e-3)

    def propose(self, state):
        for row, text in self.texts.items():
            del text[int(state.length[row]) :]  # padding of the prompt
        self.rooted = state.root.tolist()
        tree = super().propose(state)
        for row, text in self.texts.items():
            assert len(text) == int(state.length[row])
            text.append(int(state.root[row]))
            self.check_cache(row, len(text))
            if state.settings is None and tree.tokens.shape[1] == self.num_nodes:
                self.check_drafts(tree, row)
        return tree

    def check_drafts(self, tree, row: int) -> None:
        """Each inner node's children are the model's most likely tokens after its path, with their probabilities."""
        paths = {0: (self.texts[row], 1.0)}
        for node in range(1, self.num_nodes):
            above = int(tree.parent[row, node])
            paths[node] = [*paths[above][0], int(tree.tokens[row, node])], float(tree.acceptance[row, node])
        with self.model.attention("sdpa"):
            for node in range(self.num_nodes):
                children = [n for n in range(self.num_nodes) if int(tree.parent[row, n]) == node]
                if children:
                    ids = torch.tensor([paths[node][0]], device=self.model.device)
                    at = torch.arange(ids.shape[1], device=ids.device).clamp(max=self.model.context - 1)[None]
                    logits = self.model.logits(self.model.hidden(ids, at))[0, -1, : self.vocabulary]
                    p, best = logits.softmax(-1).topk(len(children))
                    assert best.tolist() == tree.tokens[row, children].tolist()
                    torch.testing.assert_close(tree.acceptance[row, children], paths[node][1] * p, atol=1e-4, rtol=1e-3)

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, features)
        for row, text in self.texts.items():
            path = verdict.path[row, 1 : 1 + int(verdict.length[row])]
            text += tree.tokens[row, path].tolist()
            self.seen[len(path)] += 1
            self.seen[f"kept {int(self.cached[row] - state.length[row]) - 1}"] += 1
            self.check_cache(row, int(self.cached[row]))


@pytest.mark.parametrize("name", EXPANSIONS)
def test_lossless(make_target, name):
    """The whole suite; greedy decoding is in the next test, and sampling is checked eagerly or with static steps."""

    def make(target):
        return DraftModelDrafter(perturbed(target), target, EXPANSIONS[name])

    for check in (check_static, check_warm_up, check_seeds):
        check(make_target, make)
    static = name == "tree"
    check_sampling(make_target, make, "plain" if static else "cut", static=static, count=6000, rows=6000)


@pytest.mark.parametrize("name", EXPANSIONS)
def test_every_length_is_accepted(make_target, name):
    lengths = check_greedy(make_target, lambda t: DraftModelDrafter(perturbed(t, 0.1), t, EXPANSIONS[name]))
    assert set(lengths) == set(range(1, len(EXPANSIONS[name]) + 2)), lengths


def serve(target, drafter, *, static, rows=3, mode="greedy", **sampling):
    """Decode texts of several lengths in a few rows; a stop id ends one of them inside a path."""
    prompts = [start * 3 for start in STARTS]
    each = [Sampling(seed=number, **sampling) for number in range(len(prompts))]
    requests = [Request(p, n or 22, s, NONE) for p, n, s in zip(prompts, LIMITS, each, strict=True)]
    plain = SpeculativeDecoder(target).serve(requests, 1)
    if mode == "greedy":
        requests.append(Request(prompts[0], 40, stop_ids=frozenset([plain[0].tokens[9], plain[0].tokens[16]])))
        plain += SpeculativeDecoder(target).serve(requests[-1:], 1)
    results = SpeculativeDecoder(target, drafter, static=static).serve(requests, rows, mode=mode)
    if mode == "greedy":
        assert [r.tokens for r in results] == [r.tokens for r in plain]
    return results


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("name", EXPANSIONS)
def test_the_cache_is_that_of_the_text_and_drafts_are_the_models_best(make_target, name, static):
    target = lossless_suite.phrases(make_target)
    drafter = Checked(perturbed(target, 0.1), target, EXPANSIONS[name])
    serve(target, drafter, static=static)
    deepest = len(EXPANSIONS[name])
    assert all(drafter.seen[length] for length in range(deepest + 1)), drafter.seen
    assert drafter.seen[f"kept {deepest - 1}"] and not drafter.seen[f"kept {deepest}"], "the last level is not run"
    drafter.seen.clear()
    serve(target, drafter, static=static, rows=1)
    serve(target, drafter, static=static, mode="sample", temperature=0.9, repetition_penalty=1.2)
    assert drafter.seen[0] and drafter.seen[deepest], drafter.seen


@pytest.mark.parametrize("family", ["mistral", "gpt2", "gemma3"])
def test_other_families(make_target, family):
    """A window, learned positions and no lean decoder, layers of two kinds."""
    target = make_target(family)
    drafter = Checked(perturbed(target, 0.02 if family == "mistral" else 0.1), target, [2, 1])
    serve(target, drafter, static=False)
    assert drafter.seen[2] and drafter.seen[0], drafter.seen


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_accepted_nodes_of_other_drafters(make_target, static, mode):
    """In a merge with a deeper, nearly perfect drafter, several accepted tokens have not been run by the model."""
    target = lossless_suite.phrases(make_target)
    first = Checked(perturbed(target, 0.15), target, [2, 1])
    second = Checked(perturbed(target, 1e-4), target, [1, 1, 1, 1, 1])
    for drafter in (first, second):
        drafter.check_drafts = lambda tree, row: None  # the first one's trees are checked above
    merged = MergedDrafter({"first": first, "second": second}, target, 10)
    serve(target, merged, static=static, mode=mode)
    assert all(first.seen[f"kept {count}"] for count in (0, 1)) and second.seen["kept 4"], (first.seen, second.seen)
    assert first.seen[5] > 4, "five accepted, of which the first drafter ran one level at most"


@pytest.mark.parametrize("vocabulary", [68, 50])
def test_padded_vocabularies(make_target, vocabulary):
    """The draft model has more or fewer ids than the target."""
    make = lambda target: DraftModelDrafter(perturbed(target, 0.04, vocabulary), target, [1, 1])  # noqa: E731
    check_greedy(make_target, make)
    drafter = make(lossless_suite.phrases(make_target))
    drafts = Counter()
    propose = drafter.propose

    def proposed(state):
        tree = propose(state)
        drafts.update(tree.tokens[:, 1:].flatten().tolist())
        return tree

    drafter.propose = proposed
    drafter.model.model.lm_head.weight.data[min(61, vocabulary) :] *= 50.0  # very likely if they were not excluded
    serve(lossless_suite.phrases(make_target), drafter, static=False)
    assert max(drafts) < min(61, vocabulary)


@pytest.mark.parametrize("vocabulary", [7, 4])
def test_sampling_with_padded_vocabularies(make_target, vocabulary):
    make = lambda target: DraftModelDrafter(perturbed(target, 0.04, vocabulary), target, [2, 1])  # noqa: E731
    check_sampling(make_target, make, count=TEXTS, rows=TEXTS)


def test_fewer_tokens_than_draws(make_target, monkeypatch):
    """Only two tokens can be drawn from a distribution of two; the third draw is left out, and its node is padding."""
    monkeypatch.setitem(lossless_suite.SAMPLINGS, "narrow", Sampling(temperature=1.3, top_k=2))
    padding = []

    class Watched(DraftModelDrafter):
        def propose(self, state):
            tree = super().propose(state)
            padding.append(int((~tree.valid).sum()))
            assert tree.draws is not None and (tree.draws.child[tree.draws.child >= 0] > 0).all()
            return tree

    make = lambda target: Watched(perturbed(target, 0.05), target, [3, 1])  # noqa: E731
    check_sampling(make_target, make, "narrow", count=TEXTS, rows=TEXTS)
    assert min(padding) > 0


def test_every_draw_has_its_own_uniform(make_target, monkeypatch):
    """From the drafter's stream, by the step of each text; a node's children have different ones."""
    target = lossless_suite.soft(make_target)
    drafter = DraftModelDrafter(perturbed(target), target, [2, 2, 1])
    used, drawn = [], []
    philox_uniforms, draw_from = draft_model.philox_uniforms, draft_model.draw_children

    def recorded_uniforms(seed, step, count, stream):
        assert stream == 1
        drawn.append([])
        used.append(philox_uniforms(seed, step, count, stream)[0])
        return used[-1][None]

    def recorded_draws(q, uniforms, **options):
        drawn[-1] += uniforms.flatten().tolist()
        return draw_from(q, uniforms, **options)

    monkeypatch.setattr(draft_model, "philox_uniforms", recorded_uniforms)
    monkeypatch.setattr(draft_model, "draw_children", recorded_draws)
    SpeculativeDecoder(target, drafter, static=False).generate([[3, 1]], 24, mode="sample", stop_ids=NONE)
    assert len(used) > 5 and drawn == [each.tolist() for each in used], "each is used once"
    assert len({number for step in drawn for number in step}) == 10 * len(used), "each step has new ones"


def test_draws_without_replacement():
    """Drawn pairs have the distribution q(x) · q(y) / (1 − q(x))."""
    q = torch.tensor([0.5, 0.2, 0.0, 0.3])
    count = 40_000
    uniforms = torch.rand(count, 1, 2, generator=torch.Generator().manual_seed(0))
    tokens, drawn = draw_children(q.expand(count, 1, 4), uniforms)
    assert drawn.all()
    pairs = [pair for pair in itertools.permutations(range(4), 2) if 2 not in pair]
    seen = Counter(map(tuple, tokens[:, 0].tolist()))
    assert set(seen) == set(pairs)
    expected = [count * float(q[x] * q[y] / (1 - q[x])) for x, y in pairs]
    scale = count / sum(expected)
    assert stats.chisquare([seen[pair] for pair in pairs], [each * scale for each in expected]).pvalue > 1e-6
    tokens, drawn = draw_children(q.expand(1, 1, 4), torch.full((1, 1, 4), 0.999))
    assert drawn.tolist() == [[[True, True, True, False]]] and sorted(tokens[0, 0, :3].tolist()) == [0, 1, 3]
    assert not draw_children(torch.full((1, 1, 4), torch.nan), torch.zeros(1, 1, 2))[1].any()


@pytest.mark.parametrize("name", EXPANSIONS)
def test_trees_end_early_where_another_level_costs_more_than_it_gains(make_target, name):
    sizes = Counter()

    class Watched(Checked):
        def propose(self, state):
            tree = super().propose(state)
            sizes[int(tree.valid.sum(-1).max())] += 1
            return tree

    def make(target):
        return Watched(perturbed(target, 0.1), target, EXPANSIONS[name], costs=STEEP, draft_cost=0.05)

    target = lossless_suite.phrases(make_target)
    for rows in (1, 3):
        serve(target, make(target), static=False, rows=rows)
    levels = set(make(target).layout.firsts[2:])
    assert len(sizes) > 1 and set(sizes) <= levels, sizes
    sizes.clear()
    serve(target, make(target), static=True)
    assert set(sizes) == {make(target).num_nodes}, "static steps have one shape"


def test_trees_that_end_early_are_lossless(make_target):
    def make(target):
        return DraftModelDrafter(perturbed(target, 0.04), target, [2, 1, 1], costs=STEEP, draft_cost=0.4)

    check_sampling(make_target, make, count=TEXTS, rows=TEXTS)
    target = lossless_suite.soft(make_target)
    sizes = Counter()

    class Watched(DraftModelDrafter):
        def propose(self, state):
            tree = super().propose(state)
            sizes.update(tree.valid.sum(-1)[state.active].tolist())
            return tree

    requests = [Request([3, 1, 4, 1][: 1 + n % 4], 20, Sampling(seed=n, temperature=0.7), NONE) for n in range(12)]
    results = [
        SpeculativeDecoder(
            target, Watched(perturbed(target, 0.04), target, [2, 1, 1], costs=costs, draft_cost=0.4), static=False
        ).serve(requests, rows, mode="sample")
        for rows, costs in ((1, STEEP), (3, STEEP), (5, StepCosts({1: 1.0, 9: 1.0})))
    ]
    assert results[0] == results[1] == results[2], "a seed gives one text in any batch and with any measured costs"
    assert len(sizes) > 1, sizes


def test_beyond_the_models_own_context(make_target):
    """The position stays the last one there, and output remains lossless."""
    make = lambda target: DraftModelDrafter(perturbed(target, 0.02, max_position_embeddings=40), target, [1, 1])  # noqa: E731
    assert make(lossless_suite.phrases(make_target)).model.context == 40 < CONTEXT
    check_greedy(make_target, make)


def test_the_target_drafts_for_itself(make_target):
    """All drafts are accepted, up to the end of each text."""
    target = lossless_suite.phrases(make_target)
    for static in (False, True):
        results = serve(target, DraftModelDrafter(target, target, [1, 1, 1]), static=static)
        lengths = [length for result in results for length in result.accepted[:-1]]
        assert set(lengths) == {4}


def test_typical_steps_are_drafted_greedily(make_target):
    target = lossless_suite.soft(make_target)
    drafter = DraftModelDrafter(perturbed(target, 0.001), target, [2, 1])
    each = [SpeculativeDecoder(target, drafter).generate([[3, 1, 4]], 24, mode="typical", stop_ids=NONE) for _ in "ab"]
    assert each[0] == each[1] and max(each[0][0].accepted) == 3


def other_tokenizer(target, change):
    """The target's tokenizer with some of its entries changed by ``change(vocabulary)``."""
    content = json.loads(target.tokenizer.backend_tokenizer.to_str())
    change(content["model"]["vocab"])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))


def test_different_vocabularies_are_rejected(tiny_lm):
    target, model = load_target(str(tiny_lm)), load_target(str(tiny_lm))
    check_vocabulary(model, target)
    DraftModelDrafter(model, target, [1])

    def swap(vocabulary):
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    model.tokenizer, model.name = other_tokenizer(target, swap), "other"
    wanted = target.tokenizer.get_vocab()
    with pytest.raises(ValueError) as raised:
        DraftModelDrafter(model, target, [1])
    assert str(raised.value) == (
        f"draft model 'other' has another vocabulary than target '{tiny_lm}': token 'a' is id {wanted['b']} in one and "
        f"is id {wanted['a']} in the other; take a draft model with the target's tokenizer"
    )
    longer = other_tokenizer(target, lambda vocabulary: vocabulary)
    longer.add_tokens(["<|one more|>"])
    model.tokenizer = longer
    with pytest.raises(ValueError, match=r"token '<\|one more\|>' is id 300 in one and is missing in the other"):
        check_vocabulary(model, target)


@pytest.mark.parametrize(
    ("expansion", "message"),
    [
        ([], "at least one depth"), ([2, 0], r"expansion \[2, 0\]: at least one depth, each with at least one child"),
        ([62], "more children than the vocabulary of 61 has tokens"), ([20, 20, 20], "a tree of 8421 nodes"),
    ],
)  # fmt: skip
def test_invalid_expansions(make_target, expansion, message):
    target = make_target("llama")
    with pytest.raises(ValueError, match=message):
        DraftModelDrafter(target, target, expansion)


def test_capture_warm_up_leaves_the_cache_alone(make_target):
    """Undone steps write no slot before a row's length, also when tokens are missing."""
    check_warm_up(make_target, lambda t: Checked(perturbed(t, 0.004), t, [2, 1]))


def test_a_seed_gives_one_text(make_target):
    check_seeds(make_target, lambda t: DraftModelDrafter(perturbed(t), t, [3, 2]))
