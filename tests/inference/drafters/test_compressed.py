"""Self-speculation over a compressed cache: what is selected, against plain definitions; exact through the checks of
every drafter."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from draftsmith.inference.drafters import compressed
from draftsmith.inference.drafters.compressed import CompressedCache, CompressedDrafter, Selector, attention_scores
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.names import SELECTORS, check_name, compressed_of, draft_model_of, has_folder
from draftsmith.inference.engine import prompts as prompts_module
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.load import load_drafter
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.models.target import cache_argument

PROMPT = [(7 * n * n + 3 * n) % 61 for n in range(70)]
NAMES = [name for name in compressed.OBSERVED if name != "streamingllm16"]  # the first one with more sinks


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Selections of short texts: few observed queries, and made anew after few tokens."""
    monkeypatch.setitem(compressed.OBSERVED, "snapkv", 4)
    monkeypatch.setattr(compressed, "APPENDED", 9)


class WatchedCache(CompressedCache):
    """Notes selections, which may not change the model's own cache."""

    def __init__(self, *args):
        super().__init__(*args)
        self.selections = []

    def select(self, row, length):
        before = [each.clone() for each in self.full.of_row(row, 0, self.full.capacity)]
        super().select(row, length)
        self.selections.append((row, length))
        after = self.full.of_row(row, 0, self.full.capacity)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "the model's own cache was changed"


class Watched(CompressedDrafter):
    """Keeps each row's caches as they are when the tree has been drafted."""

    def __init__(self, *args):
        super().__init__(*args)
        self.entries = WatchedCache(self.target, self.selector)
        self.seen = []

    @property
    def selections(self):
        return self.entries.selections

    def propose(self, state):
        tree = super().propose(state)
        for row, (length, count) in enumerate(zip(state.length.tolist(), self.cache.lengths.tolist(), strict=True)):
            if length:
                own, full = (
                    [tuple(part[row].clone() for part in each.layer(number)) for number in range(len(each.layers))]
                    for each in (self.cache, self.entries.full)
                )
                self.seen.append((row, length, count, own, full, self.entries.text[row, : length + 1].tolist()))
        return tree


def decoded(target, selector, prompts, count, tree=(1, 1)):
    drafter = Watched(target, Selector(*selector), tree)
    results = SpeculativeDecoder(target, drafter).generate(prompts, count, stop_ids=frozenset())
    return drafter, results


def attention_weights(target, text, layer):
    """The attention weights ``[Hq, S, S]`` of a layer over a text, by transformers."""
    with target.attention("eager"):
        out = target.model(torch.tensor([text]), output_attentions=True)
    return out.attentions[layer][0]


def reference_scores(weights, kv_heads, window, pool):
    """SnapKV's scores by loops, ``[Hkv, S − w]``."""
    heads, count = weights.shape[0], weights.shape[1]
    before = count - window
    scores = torch.zeros(kv_heads, before)
    for head in range(heads):
        votes = [sum(float(weights[head, query, key]) for query in range(before, count)) for key in range(before)]
        for key in range(before):
            near = [votes[n] for n in range(key - pool // 2, key + pool // 2 + 1) if 0 <= n < before]
            scores[head // (heads // kv_heads), key] += sum(near) / pool
    return scores


@pytest.mark.parametrize("groups", [1, 3, 4, 7])
def test_scores_are_those_of_the_definition(make_target, groups):
    """Attention weights of the last queries as transformers computes them, averaged and summed by loops."""
    heads = {"hidden_size": 16 * groups, "num_attention_heads": 2 * groups, "num_key_value_heads": 2, "head_dim": 8}
    target = make_target("llama", **heads)
    recorded = []
    drafter, _ = decoded(target, ("snapkv", 16), [PROMPT], 2)
    layers = iter(range(2))

    def observe(queries, scale, window, softcap):
        keys, _ = drafter.entries.full.layer(next(layers))
        recorded.append(attention_scores(queries[0], keys[0, :, : len(PROMPT)], scale, softcap))

    start = len(PROMPT) - 6
    with torch.inference_mode(), engine_attention([target]):
        chunk = Chunk.of([(0, start, PROMPT[start:])], target.device)
        drafter.entries.observer.forward_prompts(chunk, observer=observe)
    for layer, scores in enumerate(recorded):
        expected = reference_scores(attention_weights(target, PROMPT, layer), 2, 6, compressed.POOL)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [512, 16, 7])
def test_snapkv_holds_what_the_definition_selects(make_target, monkeypatch, chunk):
    """By key/value head, sorted by position, whatever the chunks of the prefill; then the last w tokens; rows shorter
    than K are held whole; what is verified is appended."""
    monkeypatch.setattr(prompts_module, "PREFILL_CHUNK", chunk)
    target = make_target("llama")
    prompts = [PROMPT, PROMPT[:50], PROMPT[5:15]]
    drafter, _ = decoded(target, ("snapkv", 16), prompts, 5)
    assert {row for row, *_ in drafter.seen} == {0, 1, 2}
    whole, selected = 0, 0
    for row, length, count, own, full, text in drafter.seen:
        if length == len(prompts[row]) > 16:
            for layer in range(2):
                scores = reference_scores(attention_weights(target, text[:length], layer), 2, 4, compressed.POOL)
                best = scores.topk(12).indices.sort().values
                for head in range(2):
                    places = [*best[head].tolist(), *range(length - 4, length)]
                    assert count == 16
                    for mine, all_ in zip(own[layer], full[layer], strict=True):
                        torch.testing.assert_close(mine[head, :16], all_[head, places], atol=1e-5, rtol=1e-5)
            selected += 1
        elif length <= 16:
            assert count == length
            for mine, all_ in ((a, b) for pair in zip(own, full, strict=True) for a, b in zip(*pair, strict=True)):
                assert torch.equal(mine[:, :length], all_[:, :length])
            whole += 1
        elif row < 2:  # appended: the last ones are the text's
            new = length - len(prompts[row])
            assert count == 16 + new
            for mine, all_ in ((a, b) for pair in zip(own, full, strict=True) for a, b in zip(*pair, strict=True)):
                assert torch.equal(mine[:, 16:count], all_[:, len(prompts[row]) : length])
    assert selected == 2 and whole >= 1


@pytest.mark.parametrize(
    "family, selector, sinks",
    [("llama", "streamingllm", 4), ("gpt_neox", "streamingllm", 4), ("llama", "streamingllm16", 16)],
)
def test_sinks_keep_their_distance_within_the_cache(make_target, family, selector, sinks):
    """A sink's key is that of its token at the position that is as far from the window as in the cache, which in the
    first layer depends on token and position alone."""
    target = make_target(family)
    drafter, _ = decoded(target, (selector, 20), [PROMPT], 4)
    assert drafter.selections == [(0, len(PROMPT))]
    for _, length, count, own, full, text in drafter.seen:
        moved = len(PROMPT) - 20
        keys = first_layer_keys(target, text[:sinks], moved)
        torch.testing.assert_close(own[0][0][:, :sinks], keys, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(own[0][0][:, :sinks], full[0][0][:, :sinks], atol=1e-3)
        assert torch.equal(own[0][1][:, :sinks], full[0][1][:, :sinks])  # values
        recent = range(length - count + sinks, length)
        for mine, all_ in zip(own[0], full[0], strict=True):
            assert torch.equal(mine[:, sinks:count], all_[:, recent.start : recent.stop])


def first_layer_keys(target, tokens, start):
    """``[Hkv, T, D]`` keys of tokens at positions from ``start`` on in the first layer, by the model's own modules."""
    cache = DynamicCache()
    place = torch.arange(start, start + len(tokens))[None]
    options = {cache_argument(target.decoder): cache}
    target.decoder(input_ids=torch.tensor([tokens]), position_ids=place, use_cache=True, **options)
    keys = cache.layers[0].keys
    assert keys is not None
    return keys[0]


class RunsAgain:
    """Runs each root once more, at its text's own position. To be mixed into a drafter."""

    checked = 0

    def _run(self, level, tokens, *args):
        hidden = super()._run(level, tokens, *args)
        if level.first == 0 and tokens.shape[1] == 1:
            (count,), (without,) = self.cache.lengths.tolist(), self.entries.left_out.tolist()
            positions, slots = torch.tensor([[count + without]]), torch.tensor([[count]])
            again, _ = self.runner.forward(tokens, positions, slots, count + 1, biases={0: None})
            torch.testing.assert_close(hidden, again, atol=1e-4, rtol=1e-4)
            self.checked += without > 0
        return hidden


class Again(RunsAgain, CompressedDrafter):
    pass


class ModelAgain(RunsAgain, DraftModelDrafter):
    pass


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_at_their_own_positions(make_target, name):
    """Whatever the cache leaves out."""
    target = make_target("llama")
    own = Again(target, Selector(name, 16), (1, 1))
    model = ModelAgain(target, target, (1, 1), selector=Selector(name, 16))
    for drafter in (own, model):
        SpeculativeDecoder(target, drafter).generate([PROMPT], 20, stop_ids=frozenset())
        assert drafter.checked > 5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lean", [True, False])
def test_with_all_entries_it_is_the_target(make_target, name, lean, monkeypatch):
    """K ≥ S: every draft is the target's own token, and its estimated acceptance the target's probability."""
    target = make_target("llama")
    if not lean:
        if name == "streamingllm":
            return
        monkeypatch.setattr(compressed, "find_lean", lambda *args: "left out")
    drafter = CompressedDrafter(target, Selector(name, 200), (1, 1, 1))
    results = SpeculativeDecoder(target, drafter, lean=lean).generate([PROMPT, PROMPT[:9]], 24, stop_ids=frozenset())
    assert [set(result.accepted[:-1]) for result in results] == [{4}, {4}]


def test_acceptance_is_estimated_by_rank(make_target):
    """Whatever the model's probabilities are: those of a random target are low, and its own drafts accepted."""
    target = make_target("llama")
    drafter, trees = CompressedDrafter(target, Selector("snapkv", 200), (2, 1)), []
    propose = drafter.propose
    drafter.propose = lambda state: (trees.append(propose(replace(state, needs_acceptance=True))), trees[-1])[1]
    SpeculativeDecoder(target, drafter).generate([PROMPT], 4, stop_ids=frozenset())
    best, second = compressed.BY_RANK[:2]
    expected = torch.tensor([[1.0, best, second, best * best, second * best]])
    torch.testing.assert_close(trees[0].acceptance, expected)


@pytest.mark.parametrize("name", NAMES)
def test_selected_anew_when_full(make_target, name):
    """A selection is made after the prefill and whenever APPENDED tokens were appended; topk in each step."""
    target = make_target("llama")
    prompts = [PROMPT, PROMPT[3:40]]
    drafter, results = decoded(target, (name, 16), prompts, 40)
    plain = SpeculativeDecoder(target).generate(prompts, 40, stop_ids=frozenset())
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    for row, prompt in enumerate(prompts):
        lengths = [length for number, length in drafter.selections if number == row and length]
        assert lengths[0] == len(prompt)
        if name == "topk":
            assert len(lengths) >= len(results[row].accepted)
        else:
            between = [later - earlier for earlier, later in itertools.pairwise(lengths)]
            assert between and min(between) > 9 - 3 and max(between) <= 9 + 3
    for _, length, count, *_ in drafter.seen:
        assert count <= 16 + 9 and count <= length


@pytest.mark.parametrize("name", NAMES)
def test_sliding_layers_keep_the_last_tokens(make_target, name):
    """Whatever the selector: the window of the last K tokens."""
    target = make_target("gemma2")
    drafter, _ = decoded(target, (name, 24), [PROMPT], 4)
    kinds = target.config.layer_types
    assert {"sliding_attention", "full_attention"} == set(kinds)
    _, length, count, own, full, _ = drafter.seen[0]
    assert count == 24
    for kind, mine, all_ in zip(kinds, own, full, strict=True):
        last = all(torch.equal(a[:, :24], b[:, length - 24 : length]) for a, b in zip(mine, all_, strict=True))
        assert last == (kind == "sliding_attention")


def draft_model(target, selector, tree=(1, 1, 1)):
    return DraftModelDrafter(target, target, tree, selector=selector)


def test_a_draft_models_own_cache_is_given_what_it_wrote(make_target):
    """The target as its own draft model, of which nothing is left out until the second selection: until then every
    draft is the target's own, and the selection is made of what the target's cache holds, too."""
    target = make_target("llama")
    drafter = draft_model(target, Selector("snapkv", 30))
    assert drafter.entries is not None
    watched = drafter.entries = WatchedCache(target, drafter.entries.selector)
    full, seen, select = [], [], watched.select
    allocate = drafter.allocate
    drafter.allocate = lambda cache, *args: (full.append(cache), allocate(cache, *args))

    def selected(row, length):
        for number in range(2):
            for own, right in zip(drafter.own.layer(number), full[-1].layer(number), strict=True):
                seen.append(float((own[0, :, :length] - right[0, :, :length]).abs().max()))
        select(row, length)

    watched.select = selected
    (result,) = SpeculativeDecoder(target, drafter).generate([PROMPT[:20]], 30, stop_ids=frozenset())
    (_, first), (_, second) = watched.selections[:2]
    assert first == 20 and 39 < second <= 39 + 4
    assert max(seen[:8]) < 1e-4
    before = next(n for n in range(len(result.accepted)) if 20 + sum(result.accepted[:n]) >= second)
    assert set(result.accepted[:before]) == {4}


def test_names():
    assert compressed_of("snapkv:256") == ("snapkv", 256, (1,) * 8)
    assert compressed_of("streamingllm:64@2,1") == ("streamingllm", 64, [2, 1])
    assert draft_model_of("draft_model:a/b,snapkv:256@2,1") == ("a/b", [2, 1], ("snapkv", 256))
    assert draft_model_of("draft_model:a,b@2,1") == ("a,b", [2, 1], None)
    assert tuple(compressed.OBSERVED) == SELECTORS
    assert not has_folder("snapkv:256") and not has_folder("topk:9")
    for wrong in ("snapkv", "snapkv:", "snapkv:0", "snapkv:9@", "topk:many"):
        with pytest.raises(ValueError, match=r":256 for a cache of 256 entries"):
            check_name(wrong)
    with pytest.raises(FileNotFoundError, match="did you mean snapkv"):
        check_name("snapvk:256")


def test_what_cannot_be_is_refused(make_target, monkeypatch):
    for name, entries, least in (("snapkv", 4, 5), ("streamingllm", 4, 5), ("streamingllm16", 16, 17), ("topk", 1, 2)):
        with pytest.raises(ValueError, match=f"{name}:{entries}: at least {least} entries"):
            Selector(name, entries)
        Selector(name, least)
    with pytest.raises(ValueError, match="must be one of streamingllm, streamingllm16, snapkv, topk"):
        Selector("quest", 64)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    longer = make_target("llama", rope_parameters=rope)
    with pytest.raises(ValueError, match="depends on the text's length.*use snapkv"):
        CompressedDrafter(longer, Selector("streamingllm", 64), (1,))
    CompressedDrafter(longer, Selector("snapkv", 64), (1,))


def test_loads_by_name(make_target):
    target = make_target("llama")
    _, drafter = load_drafter("snapkv:24@1,1+ngram", target)
    assert isinstance(drafter, MergedDrafter) and list(drafter.sources) == ["snapkv:24@1,1", "ngram"]
    (result,) = SpeculativeDecoder(target, drafter).generate([PROMPT], 24, stop_ids=frozenset())
    (plain,) = SpeculativeDecoder(target).generate([PROMPT], 24, stop_ids=frozenset())
    assert result.tokens == plain.tokens
