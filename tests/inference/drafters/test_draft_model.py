"""Draft models: lossless; the cache equals that of the committed text; drafts are the model's most likely tokens."""

import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace

import lossless_suite as suite
import pytest
import torch
from conversing import converse
from draws import occurs
from kept_texts import KeepsTexts
from lossless_suite import NONE, STARTS
from scipy import stats
from tiny_models import SPARSE, perturbed, some_ids
from tokenizers import Tokenizer
from transformers import DynamicCache, PreTrainedTokenizerFast

from draftsmith.inference.drafters.draft_model import DraftModelDrafter, check_vocabulary
from draftsmith.inference.engine import budget
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.trees import by_level as levels
from draftsmith.inference.trees.by_level import draw_children
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Noise, Sampling
from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels.multi_step import IID, ONE_HOT, WITHOUT_REPLACEMENT
from draftsmith.models.target import Target, cache_argument, load_target

TREES = {"chain": [1, 1, 1, 1], "sparse": SPARSE}
DEPTHS = {"chain": 4, "sparse": 3}
TEXTS = 6000  # in as many rows, which is three times as fast as the suite's default
STEEP = StepCosts({1: 1.0, 2: 1.2, 4: 1.5, 8: 2.0, 16: 3.0})


class Checked(KeepsTexts, DraftModelDrafter):
    """Compares the cache and the greedy drafts with forward passes of the model over the whole text."""

    def check_cache(self, row: int, count: int) -> None:
        """Slots 0 … count − 1 equal the cache of a forward pass over the text."""
        cache = DynamicCache()
        ids = torch.tensor([self.texts[row][:count]], device=self.model.device)
        at = torch.arange(count, device=ids.device).clamp(max=self.model.context - 1)[None]
        with self.model.attention("eager" if self.model.config.model_type == "gemma2" else "sdpa"):
            argument = cache_argument(self.model.decoder)
            self.model.decoder(input_ids=ids, position_ids=at, use_cache=True, **{argument: cache})
        for own, fresh in zip(self.cache.layers, cache.layers, strict=True):
            for mine, right in ((own.keys, fresh.keys), (own.values, fresh.values)):
                torch.testing.assert_close(mine[row, :, :count], right[0], atol=1e-4, rtol=1e-3)

    def propose(self, state):
        tree = super().propose(replace(state, needs_acceptance=True))
        for row, text in self.texts.items():
            self.check_cache(row, len(text))
            if state.settings is None and tree.tokens.shape[1] == self.num_nodes:
                self.check_drafts(tree, row, state.noise)
        return tree

    def check_drafts(self, tree, row: int, noise=None) -> None:
        """Each node has the token of its path's last rank among the model's after its parent, by its probability or, in
        coupled sampling, by its score; and its estimated acceptance."""
        ids = torch.arange(self.vocabulary, device=self.model.device) if self.ids is None else self.ids
        layout, numbers = self.layout, {path: node for node, path in enumerate(self.layout.paths)}
        with self.model.attention("eager" if self.model.config.model_type == "gemma2" else "sdpa"):
            for node, path in enumerate(layout.paths):
                above = [numbers[path[:depth]] for depth in range(1, len(path) + 1)]
                children = [n for n, other in enumerate(layout.paths) if other and other[:-1] == path]
                if children:
                    text = torch.tensor([[*self.texts[row], *tree.tokens[row, above].tolist()]], device=ids.device)
                    at = torch.arange(text.shape[1], device=ids.device).clamp(max=self.model.context - 1)[None]
                    logits = self.model.logits(self.model.hidden(text, at))[0, -1, ids]
                    if noise is None:
                        p, best = logits.softmax(-1).sort(descending=True)
                        best = ids[best]
                    else:
                        only = slice(row, row + 1)
                        own = Noise(noise.settings[only], noise.lengths[only]).draft(
                            logits[None, None], len(path), 8, ids
                        )
                        p, best = own[0][0, 0].exp(), own[1][0, 0]
                    ranks = [layout.paths[child][-1] for child in children]
                    assert tree.tokens[row, children].tolist() == best[ranks].tolist()
                    acceptance = tree.acceptance[row, node] * p[ranks]
                    torch.testing.assert_close(tree.acceptance[row, children], acceptance, atol=1e-4, rtol=1e-3)

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, features)
        for row, length in ((row, int(verdict.length[row])) for row in self.texts):
            self.seen[length] += 1
            kept = int(self.cached[row] - state.length[row]) - 1
            self.seen.update([f"kept {kept}", f"kept {kept} of {length}"])
            self.check_cache(row, int(self.cached[row]))


def test_drafts_are_of_the_draft_vocabulary(make_target):
    target = suite.soft(make_target)
    tree = proposed(target, DraftModelDrafter(perturbed(target), target, SPARSE, draft_vocab=some_ids(target)))
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= {0, 1, 3, 4} and tree.draws.q.shape[2] == 4
    sums = tree.draws.q.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def proposed(target: Target, drafter: DraftModelDrafter, rows: int = 64):
    """The trees of a step of multi-step sampling, of many rows."""
    trees, propose = [], drafter.propose
    drafter.propose = lambda state: trees.append(propose(state)) or trees[-1]
    each = [Sampling(seed=row) for row in range(rows)]
    SpeculativeDecoder(target, drafter, static=False).generate([[3, 1, 4]] * rows, 2, mode="mss", sampling=each)
    return trees[0]


DRAWS = {"without_replacement": WITHOUT_REPLACEMENT, "iid": IID, "naive": ONE_HOT}


def test_nodes_by_kind_of_draw(make_target):
    """Several i.i.d. draws may be one node; naive draws are verified as deterministic drafts. A draw leads to the child
    of its turn, in rank order, or to that of an equal earlier draw."""
    target = suite.soft(make_target)
    for draws, kind in DRAWS.items():
        drafter = DraftModelDrafter(perturbed(target), target, SPARSE, draws=draws)
        tree = proposed(target, drafter)
        assert set(tree.draws.kind.flatten().tolist()) == {kind} and (tree.draws.q is None) == (draws == "naive")
        shared, paths = 0, drafter.layout.paths
        for row, valid in enumerate(tree.valid.tolist()):
            for node, path in enumerate(paths):
                children = [paths.index(below) for below in sorted(paths) if below and below[:-1] == path]
                tokens = tree.tokens[row, children].tolist()
                first = [children[tokens.index(token)] for token in tokens]
                expected = (first if valid[node] else [-1] * len(first)) + [-1] * (3 - len(first))
                assert tree.draws.child[row, node].tolist() == expected
                own = [valid[node] and c == f for c, f in zip(children, first, strict=True)]
                assert [valid[child] for child in children] == own
                shared += first != children
        assert (shared > 0) == (draws == "iid")


def serve(target, drafter, *, static, rows=3, mode="greedy", **sampling):
    """Decode texts of several lengths in a few rows; a stop id ends one of them inside a path."""
    prompts = [start * 3 for start in STARTS]
    each = [Sampling(seed=number, **sampling) for number in range(len(prompts))]
    requests = [Request(p, n or 22, s, NONE) for p, n, s in zip(prompts, suite.LIMITS, each, strict=True)]
    if mode == "greedy":
        (first,) = suite.plain_texts(target, requests[:1])
        requests.append(Request(prompts[0], 40, stop_ids=frozenset([first[9], first[16]])))
    results = SpeculativeDecoder(target, drafter, static=static).serve(requests, rows, mode=mode)
    if mode == "greedy":
        assert [r.tokens for r in results] == suite.plain_texts(target, requests)
    return results


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("name", TREES)
def test_the_cache_is_that_of_the_text_and_drafts_are_the_models_best(make_target, name, static):
    target = suite.phrases(make_target)
    drafter = Checked(perturbed(target, 0.1), target, TREES[name])
    serve(target, drafter, static=static)
    deepest = DEPTHS[name]
    occurs(all(drafter.seen[length] for length in range(deepest + 1)), str(drafter.seen))
    if name == "sparse":
        occurs(all(drafter.seen[f"kept {kept} of {kept + 1}"] for kept in (0, 1, 2)), "leaves of all levels")
        occurs(drafter.seen["kept 1 of 1"])
        assert drafter.layout.runs == [1, 2, 2, 0]
    occurs(drafter.seen[f"kept {deepest - 1}"])
    assert not drafter.seen[f"kept {deepest}"], "the last level is not run"
    drafter.seen.clear()
    serve(target, drafter, static=static, rows=1)
    for mode in ("sample", "mss"):
        serve(target, drafter, static=static, mode=mode, temperature=0.9, repetition_penalty=1.2)
    assert drafter.seen[0] and drafter.seen[deepest], drafter.seen


@pytest.mark.parametrize("static", [False, True])
def test_prompts_that_begin_with_a_text_before(make_target, static):
    target = suite.phrases(make_target)
    drafter = Checked(perturbed(target), target, SPARSE)
    *_, counts = converse(target, drafter, static=static)
    assert counts.reused_tokens > counts.prefilled_tokens


@pytest.mark.parametrize("family", ["mistral", "gpt2", "gemma3", "gemma2"])
def test_other_families(make_target, family):
    """A window, learned positions and no lean decoder, layers of two kinds, capped logits of a draft vocabulary."""
    target = make_target(family)
    ids = some_ids(target) if family == "gemma2" else None
    drafter = Checked(perturbed(target, 0.02 if family == "mistral" else 0.1), target, [2, 1], draft_vocab=ids)
    serve(target, drafter, static=False)
    occurs(drafter.seen[2] and drafter.seen[0], f"{drafter.seen}")


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("mode", ["greedy", "sample", "mss"])
def test_accepted_nodes_of_other_drafters(make_target, static, mode):
    """In a merge with a deeper, nearly perfect drafter, several accepted tokens have not been run by the model."""
    target = suite.phrases(make_target)
    first = Checked(perturbed(target, 0.4 if mode == "sample" else 0.15), target, Topology(((0,), (1,), (1, 0))))
    second = Checked(perturbed(target, 1e-4), target, [1, 1, 1, 1, 1])
    for drafter in (first, second):
        drafter.check_drafts = lambda *_: None  # the first one's trees are checked above
    merged = MergedDrafter({"first": first, "second": second}, target, 10)
    serve(target, merged, static=static, mode=mode)
    kept = first.seen["kept 0"] and first.seen["kept 1"] and second.seen["kept 4"]
    occurs(kept, f"{first.seen} {second.seen}")
    occurs(first.seen[5] > 4, "five accepted, of which the first drafter ran one level at most")


@pytest.mark.parametrize("vocabulary", [68, 50])
def test_padded_vocabularies(make_target, vocabulary):
    """The draft model has more or fewer ids than the target."""
    make = lambda target: DraftModelDrafter(perturbed(target, 0.04, vocabulary), target, [1, 1])  # noqa: E731
    suite.check_greedy(make_target, make)
    drafter = make(suite.phrases(make_target))
    drafts = Counter()
    propose = drafter.propose

    def proposed(state):
        tree = propose(state)
        drafts.update(tree.tokens[:, 1:].flatten().tolist())
        return tree

    drafter.propose = proposed
    drafter.model.model.lm_head.weight.data[min(61, vocabulary) :] *= 50.0  # very likely if they were not excluded
    serve(suite.phrases(make_target), drafter, static=False)
    assert max(drafts) < min(61, vocabulary)


def test_fewer_tokens_than_draws(make_target, monkeypatch):
    """Only two tokens can be drawn from a distribution of two; the third draw is left out, and its node is padding."""
    monkeypatch.setitem(suite.SAMPLINGS, "narrow", Sampling(temperature=1.3, top_k=2))
    padding = []

    class Watched(DraftModelDrafter):
        def propose(self, state):
            tree = super().propose(state)
            padding.append(int((~tree.valid).sum()))
            assert tree.draws is not None and (tree.draws.child[tree.draws.child >= 0] > 0).all()
            return tree

    make = lambda target: Watched(perturbed(target, 0.05), target, [3, 1])  # noqa: E731
    suite.check_sampling(make_target, make, "narrow", count=TEXTS, rows=TEXTS)
    assert min(padding) > 0


def test_every_draw_has_its_own_uniform(make_target, monkeypatch):
    """From the drafter's stream, by the step of each text; a node's children have different ones."""
    target = suite.soft(make_target)
    drafter = DraftModelDrafter(perturbed(target), target, [2, 2, 1])
    used, drawn = [], []
    philox_uniforms, draw_from = levels.philox_uniforms, levels.draw_children

    def recorded_uniforms(seed, step, count, stream):
        assert stream == 1
        drawn.append([])
        used.append(philox_uniforms(seed, step, count, stream)[0])
        return used[-1][None]

    def recorded_draws(q, uniforms, **options):
        drawn[-1] += uniforms.flatten().tolist()
        return draw_from(q, uniforms, **options)

    monkeypatch.setattr(levels, "philox_uniforms", recorded_uniforms)
    monkeypatch.setattr(levels, "draw_children", recorded_draws)
    SpeculativeDecoder(target, drafter, static=False).generate([[3, 1]], 24, mode="mss", stop_ids=NONE)
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


@pytest.mark.parametrize("name", TREES)
def test_trees_end_early_where_another_level_costs_more_than_it_gains(make_target, monkeypatch, name):
    monkeypatch.setattr(budget, "FEWEST", 10**9)  # it is asked in every step
    sizes = Counter()

    class Watched(Checked):
        def propose(self, state):
            tree = super().propose(state)
            sizes[int(tree.valid.sum(-1).max())] += 1
            return tree

    def make(target):
        drafter = Watched(perturbed(target, 0.1), target, TREES[name])
        drafter.costs = STEEP
        return drafter

    target = suite.phrases(make_target)
    for rows in (1, 3):
        serve(target, make(target), static=False, rows=rows)
    levels = set(make(target).layout.firsts[2:])
    assert len(sizes) > 1 and set(sizes) <= levels, sizes
    sizes.clear()
    drafter = make(target)
    serve(target, drafter, static=True)
    assert set(sizes) == {make(target).num_nodes}, "static steps have one shape"


def test_multi_step_sampling_has_whole_trees(make_target):
    """Whatever another level costs: a seed gives one text in any batch."""
    target = suite.soft(make_target)
    requests = [Request([3, 1, 4, 1][: 1 + n % 4], 20, Sampling(seed=n, temperature=0.7), NONE) for n in range(12)]
    results = []
    for rows in (1, 3):
        drafter = DraftModelDrafter(perturbed(target), target, SPARSE)
        drafter.costs = StepCosts({1: 1.0, 8: 1.1}) if rows == 1 else None
        results.append(SpeculativeDecoder(target, drafter, static=False).serve(requests, rows, mode="mss"))
    texts = [[(one.tokens, one.accepted, one.finish_reason) for one in each] for each in results]
    assert texts[0] == texts[1]


def test_beyond_the_models_own_context(make_target):
    """The position stays the last one there, and output remains lossless."""
    make = lambda target: DraftModelDrafter(perturbed(target, 0.02, max_position_embeddings=40), target, [1, 1])  # noqa: E731
    assert make(suite.phrases(make_target)).model.context == 40 < suite.CONTEXT
    suite.check_greedy(make_target, make)
    suite.check_coupled(make_target, make)


def test_fewer_positions_than_the_target_are_said(tiny_lm, tmp_path, capsys):
    short = shutil.copytree(tiny_lm, tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    for model, said in ((tiny_lm, 0), (short, 1)):
        load_drafter(f"draft_model:{model}@1", target_name=str(tiny_lm))
        assert capsys.readouterr().err.count(f"draft model '{model}' is made for 64 positions, fewer than") == said


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_the_target_drafts_for_itself(make_target, mode):
    """All drafts are accepted, up to the end of each text; in coupled sampling, by the noise that is the target's."""
    target = suite.phrases(make_target)
    for static in (False, True):
        drafter = DraftModelDrafter(target, target, [1, 1, 1])
        results = serve(target, drafter, static=static, mode=mode, temperature=1.2, top_k=20)
        lengths = [length for result in results for length in result.accepted[:-1]]
        assert set(lengths) == {4}


def test_typical_steps_are_drafted_greedily(make_target):
    target = suite.soft(make_target)
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


def test_special_tokens_may_differ(tiny_lm):
    """Added in fine-tuning, or renamed: no text is made of them. Not one that is a word in the other, or elsewhere."""
    target, model = load_target(str(tiny_lm)), load_target(str(tiny_lm))
    grown = other_tokenizer(target, lambda vocabulary: vocabulary)
    grown.add_special_tokens({"pad_token": "<pad>"})
    renamed = json.loads(target.tokenizer.backend_tokenizer.to_str())
    (last,) = [token for token in renamed["added_tokens"] if token["content"] == "<|end|>"]
    for where in (renamed["model"]["vocab"],) if "<|end|>" in renamed["model"]["vocab"] else ():
        where["<|other|>"] = where.pop("<|end|>")
    last["content"] = "<|other|>"
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(renamed)))
    for tokenizer in (grown, other):
        model.tokenizer = tokenizer
        check_vocabulary(model, target)
        check_vocabulary(target, model)
    odd = other_tokenizer(target, lambda vocabulary: vocabulary.update({"<|word|>": 301, "<pad>": 300}))
    model.tokenizer = grown
    target.tokenizer = odd
    with pytest.raises(ValueError, match="has another vocabulary than target"):
        check_vocabulary(model, target)


def test_fillers_of_a_padded_vocabulary(tiny_lm):
    """A target from a GGUF file and a draft model from the Hub, or the other way round."""
    target, model = load_target(str(tiny_lm)), load_target(str(tiny_lm))
    padded = other_tokenizer(target, lambda vocabulary: vocabulary)
    first = len(padded)
    padded.add_tokens([f"[PAD{first + n}]" for n in range(3)])
    assert len(padded) == first + 3
    model.tokenizer = padded
    check_vocabulary(model, target)
    check_vocabulary(target, model)
    padded.add_tokens(["[PAD7]"])  # no filler of its place
    with pytest.raises(ValueError, match=rf"token '\[PAD7\]' is id {first + 3} in one and is missing in the other"):
        check_vocabulary(model, target)


def test_a_smaller_model_of_the_family(make_target):
    """Qwen2 in two sizes with one tokenizer: another width, depth and number of heads, a tied LM head, and a vocabulary
    that is padded further. The texts are those of plain decoding."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1}
    small = make_target("qwen2", **sizes, tie_word_embeddings=True, vocab_size=68)
    target = make_target("qwen2")
    for static in (False, True):
        drafter = Checked(small, target, [6, 2])
        serve(target, drafter, static=static)
        occurs(drafter.seen[0] and drafter.seen[1], f"{drafter.seen}")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "at least one depth"),
        ([2, 0], r"expansion \[2, 0\]: at least one depth, each with at least one child"),
        ([62], "more children than the vocabulary of 61 has tokens"),
        ([20, 20, 20], "a tree of 8421 nodes"),
        (Topology(()), "tree: holds the root alone"),
        (Topology(((61,),)), "tree: more children than the vocabulary of 61 has tokens"),
    ],
)
def test_invalid_trees(make_target, tree, message):
    target = make_target("llama")
    with pytest.raises(ValueError, match=message):
        DraftModelDrafter(target, target, tree)


def test_invalid_draft_vocabularies(make_target):
    target = make_target("llama")
    for ids, message in (
        ([3, 2], r"draft model 'tiny-llama': 'draft_vocab' does not ascend"),
        ([3, 61], "holds ids from 3 to 61"),
        ([2, 3], r"expansion \[3\]: more children than the vocabulary of 2 has tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            DraftModelDrafter(target, target, [3], draft_vocab=torch.tensor(ids))


def test_capture_warm_up_leaves_the_cache_alone(make_target):
    """Undone steps write no slot before a row's length, also when tokens are missing."""
    suite.check_warm_up(make_target, lambda t: Checked(perturbed(t, 0.004), t, SPARSE))
