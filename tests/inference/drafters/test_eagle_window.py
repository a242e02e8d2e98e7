"""EAGLE drafters that keep the first and the last pairs of a text: which ones, at which positions, and how many; exact
through the checks of every drafter (test_lossless.py)."""

from copy import copy

import lossless_suite as suite
import pytest
import torch
from eagles import TREES, fitted
from lossless_suite import NONE, STARTS

from draftsmith.inference.drafters import compressed
from draftsmith.inference.drafters.compressed import Selector
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.eagle_window import check_selector
from draftsmith.inference.drafters.names import folder_of, has_folder
from draftsmith.inference.engine import prompts as prompts_module
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.trees.by_level import ALL_CACHED
from draftsmith.models.eagle import EagleConfig

SINKS, ENTRIES = 4, 14
PROMPTS = [STARTS[0] * 4, STARTS[2], STARTS[5]]  # longer than the window, shorter than the sinks, and in between


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(compressed, "APPENDED", 9)


@pytest.fixture(scope="module")
def pair(make_target):
    """A target, and a drafter for it over all pairs."""
    target = suite.phrases(make_target)
    return target, EagleDrafter(fitted(target, make_target), target, TREES["sparse"])


def rotated(keys, places, theta=1e4):
    """Keys ``[n, G, D]`` rotated by so many positions, as complex numbers."""
    half = keys.shape[-1] // 2
    angles = places * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(keys[..., :half].double(), keys[..., half:].double()) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), -1).float()


class Keeps(EagleDrafter):
    """Notes each text's pairs when it ends: how many, ``[S, 2, G, D]``, and how many are left out."""

    def allocate(self, *args):
        super().allocate(*args)
        self.kept = {}

    def end(self, row):
        if int(self.cached[row]) < ALL_CACHED:
            without = 0 if self.window is None else self.window.without[row]
            self.kept.setdefault(row, (int(self.cached[row]), self.layer.both[row].clone(), without))
        super().end(row)


class Within(Keeps):
    """Runs every pass once more on a cache whose keys are rotated back, by which its places are its positions: the
    attention of a text that is no longer than the cache."""

    checked = 0

    def _run(self, level, tokens, hidden, lengths, fixed=True):
        given = hidden.clone()
        out = super()._run(level, tokens, hidden, lengths, fixed)
        assert self.window is not None
        other, left_out = copy(self.layer), self.window.left_out.tolist()
        other.storage = self.layer.storage.clone()
        other.both = other.view(0, other.capacity)[0]
        for row, count in enumerate(left_out):
            other.both[row, :, 0] = rotated(self.layer.both[row, :, 0], -count)
        again = other.run(level, tokens, given, self.window.after(lengths), self.plans, fixed)
        torch.testing.assert_close(out, again, atol=1e-4, rtol=1e-4)
        self.checked += max(left_out) > 0
        return out


@pytest.mark.parametrize("chunk", [512, 5])
def test_first_and_last_pairs_at_their_distances(pair, monkeypatch, chunk):
    """Of prompts in chunks and of what is decoded, the pairs are those of the whole cache; sinks are turned."""
    monkeypatch.setattr(prompts_module, "PREFILL_CHUNK", chunk)
    target, whole = pair
    window = Within(whole.eagle, target, TREES["sparse"], selector=Selector("streamingllm", ENTRIES))
    plain = SpeculativeDecoder(target).generate(PROMPTS, 40, batch_size=3, stop_ids=NONE)
    whole = Keeps(whole.eagle, target, TREES["sparse"])
    for drafter in (whole, window):
        results = SpeculativeDecoder(target, drafter).generate(PROMPTS, 40, batch_size=3, stop_ids=NONE)
        assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert window.checked > 10
    for row in range(3):
        (full_count, full, _), (count, own, left_out) = whole.kept[row], window.kept[row]
        count = min(full_count, count)
        assert left_out > 0 and count - left_out <= ENTRIES + 9 + 4, "pairs are left out of each text"
        torch.testing.assert_close(own[SINKS : count - left_out], full[SINKS + left_out : count], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own[:SINKS, 1], full[:SINKS, 1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own[:SINKS, 0], rotated(full[:SINKS, 0], left_out), atol=1e-4, rtol=1e-4)


def test_a_window_of_all_pairs_is_the_whole_cache(pair):
    """K at least as long as the text: the same drafts in every step."""
    target, whole = pair
    trees = []
    for drafter in (whole, whole.with_tree(whole.tree, selector=Selector("streamingllm", 96))):
        seen = []
        propose = drafter.propose
        drafter.propose = lambda state, to=seen, propose=propose: (to.append(propose(state)), to[-1])[1]
        SpeculativeDecoder(target, drafter).generate(PROMPTS, 30, batch_size=2, stop_ids=NONE)
        del drafter.propose
        trees.append([tree.tokens.tolist() for tree in seen])
    assert trees[0] == trees[1] and len(trees[0]) > 10


def test_its_memory_does_not_grow_with_the_text(pair, monkeypatch):
    monkeypatch.setattr("draftsmith.inference.engine.engine.CACHE_GRANULE", 1)
    target, whole = pair
    window = whole.with_tree((1, 1), selector=Selector("streamingllm", 8))
    sizes = []
    for drafter in (whole.with_tree((1, 1)), window):
        for count in (8, 80):
            SpeculativeDecoder(target, drafter).generate([STARTS[0]], count, stop_ids=NONE)
            sizes.append(drafter.layer.keys.shape[2])
    assert sizes[1] > sizes[0] + 60 and sizes[2] == sizes[3] < sizes[1]


def test_what_cannot_be_is_refused(pair, monkeypatch):
    target, whole = pair
    with pytest.raises(ValueError, match="snapkv:64: an EAGLE drafter's layer .* use streamingllm:64"):
        whole.with_tree((1,), selector=Selector("snapkv", 64))
    several = EagleConfig(**{**whole.eagle.config.to_dict(), "num_layers": 2})
    with pytest.raises(ValueError, match="snapkv: an EAGLE drafter of 2 layers keeps all pairs; leave it out"):
        check_selector(Selector("snapkv", 64), several)
    monkeypatch.setitem(whole.eagle.config.rope_parameters, "rope_type", "dynamic")
    with pytest.raises(ValueError, match="sinks cannot be rotated"):
        EagleDrafter(whole.eagle, target, (1,), selector=Selector("streamingllm16", 64))


def test_names(tmp_path):
    assert folder_of("runs/a") == ("runs/a", None, None)
    assert folder_of("runs/a,streamingllm:64") == ("runs/a", ("streamingllm", 64), None)
    assert folder_of("runs/a,streamingllm16:64@1,1") == ("runs/a", ("streamingllm16", 64), [1, 1])
    assert folder_of("runs/a@2,1") == ("runs/a", None, [2, 1])
    (tmp_path / "b@1").mkdir()
    assert folder_of(f"{tmp_path}/b@1") == (f"{tmp_path}/b@1", None, None)
    assert has_folder("runs/a,streamingllm:64@1,1")
