"""EAGLE drafters are lossless; the engine's logits equal the training forward's, after commits of every length."""

import copy
from collections import Counter
from dataclasses import replace

import lossless_suite as suite
import pytest
import torch
from conversing import converse
from draws import occurs
from eagles import KINDS, TREES, fitted, untrained
from kept_texts import KeepsTexts
from lossless_suite import NONE, STARTS

from draftsmith.inference.drafters import eagle_layer
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.engine import budget, engine
from draftsmith.inference.engine import prompts as prompts_module
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.eagle import Eagle
from draftsmith.models.target import Target

TEXTS = 6000
STEEP = StepCosts({1: 1.0, 2: 1.2, 4: 1.5, 8: 2.0, 16: 3.0})


class Checked(KeepsTexts, EagleDrafter):
    """Compares the logits after every node that is run with those of the training forward over the whole text."""

    def __init__(self, eagle: Eagle, target: Target, *args, **options) -> None:
        self.fresh = copy.deepcopy(eagle)
        super().__init__(eagle, target, *args, **options)

    def prefill(self, features, chunk):
        super().prefill(features, chunk)
        self.seen.update("later chunk" if part.start else "first chunk" for part in chunk.parts)

    def _run_root(self, state, before):
        hidden = super()._run_root(state, before)
        self.paths, self.key_tokens = [[[token]] for token in state.root.tolist()], {}
        self.root = state.root
        return hidden

    def _run(self, level, tokens, hidden, lengths, **options):
        out = super()._run(level, tokens, hidden, lengths, **options)
        if not any(level is chain for chain in self.chains):
            self.key_tokens |= {level.first + place: tokens[:, place].tolist() for place in range(level.count)}
            numbers = range(level.first + level.count)
            self.paths = []
            for row, bits in enumerate(level.ancestors.tolist()):
                above = [[n for n in numbers if node[n // 64] >> n % 64 & 1 and n in self.key_tokens] for node in bits]
                root = int(self.root[row])
                self.paths.append([[root, *(self.key_tokens[n][row] for n in path)] for path in above])
        return out

    def _logits(self, hidden):
        logits, ids = super()._logits(hidden)
        self.ran.append((self.paths, logits, len(self.paths[0][0]) - 1))
        return logits, ids

    def propose(self, state):
        self.ran = []
        tree = super().propose(state)
        for row, text in self.texts.items():
            self.check(row, torch.tensor([text[:-1]], device=self.device))
        return tree

    def check(self, row: int, text: torch.Tensor) -> None:
        eagle, count = self.fresh, text.shape[1]
        with self.target.attention("eager" if self.target.config.model_type == "gemma2" else "sdpa"):
            at = torch.arange(count, device=text.device).clamp(max=self.target.context - 1)[None]
            features = self.target.features(text, eagle.config.captured_layers, at)
        for paths, logits, depth in self.ran:
            drafted = torch.tensor(paths[row], device=text.device)
            assert drafted.shape[1] == depth + 1
            nodes = len(drafted)
            tokens = torch.cat([text.expand(nodes, -1), drafted], 1)
            padded = torch.nn.functional.pad(features, (0, 0, 0, depth + 1)).expand(nodes, -1, -1)
            chosen = torch.full((nodes, 1), count - 1, device=text.device)
            *_, out = eagle.unroll(padded, self.target.embeddings, tokens, depth + 1, chosen=chosen)
            right = eagle.draft_head(self.target.lm_head)(out[:, 0])
            right = right if eagle.lm_head is not None else self.target.after_head(right)
            size = float(right.std().clamp(min=1))  # random targets of some families have logits of 50
            torch.testing.assert_close(logits[row], right, atol=1e-4 * size, rtol=1e-4)
            self.seen[f"depth {depth}"] += nodes

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, features)
        self.seen.update(int(verdict.length[row]) for row in self.texts)


def serve(target, drafter, *, static=False, rows=3, mode: Mode = "greedy", count=30, **sampling):
    """Decode texts of several lengths in a few rows; greedy ones equal plain decoding."""
    prompts = [start * (1 + number % 3) for number, start in enumerate(STARTS)]
    requests = [
        Request(prompt, max(1, count - 3 * number), Sampling(seed=number, **sampling), NONE)
        for number, prompt in enumerate(prompts)
    ]
    results = SpeculativeDecoder(target, drafter, static=static).serve(requests, rows, mode=mode)
    if mode == "greedy":
        assert [r.tokens for r in results] == suite.plain_texts(target, requests)
    return results


@pytest.mark.parametrize(
    "kind, tree, static",
    [("eagle3", tree, static) for tree in TREES for static in (False, True)]  # each way of growing a tree
    + [(kind, *how) for kind in KINDS if kind != "eagle3" for how in (("sparse", False), ("dynamic", True))],
)
def test_the_engines_logits_are_the_training_forwards(make_target, kind, tree, static):
    """At every depth, after commits of every length, in rows of different lengths that are refilled."""
    target = suite.phrases(make_target)
    drafter = Checked(fitted(target, make_target, kind), target, TREES[tree])
    serve(target, drafter, static=static)
    assert all(drafter.seen[f"depth {depth}"] for depth in range(3)), drafter.seen
    occurs(all(drafter.seen[length] for length in range(4)), str(drafter.seen))
    for mode in ("sample", "mss"):
        serve(target, drafter, static=static, mode=mode, rows=1, count=6, temperature=0.9)


@pytest.mark.parametrize("path", ["plain", "kernels"])
@pytest.mark.parametrize("kind", ["imported", "layers"])
def test_other_ways_to_run_the_layers(make_target, monkeypatch, kind, path):
    """Without tree attention as a kernel, and by the kernels that a GPU has, here by their definitions."""
    if path == "plain":
        monkeypatch.setattr(eagle_layer, "runs_kernel", lambda *_: False)
    else:
        monkeypatch.setattr(eagle_layer, "why_not_triton", lambda *_: None)
    target = suite.phrases(make_target)
    drafter = Checked(fitted(target, make_target, kind), target, TREES["sparse"])
    serve(target, drafter, count=9)
    assert drafter.layer.native is None and drafter.seen["depth 2"], drafter.seen


@pytest.mark.parametrize(("kind", "chunk"), [("eagle3", 1), ("eagle3", 3), ("eagle3", 512), ("layers", 3)])
def test_prompts_in_chunks(make_target, monkeypatch, kind, chunk):
    """A chunk's last feature is paired with the next chunk's first token."""
    monkeypatch.setattr(prompts_module, "PREFILL_CHUNK", chunk)
    target = suite.phrases(make_target)
    drafter = Checked(fitted(target, make_target, kind), target, TREES["sparse"])
    serve(target, drafter, count=6)
    assert (drafter.seen["later chunk"] > 0) == (chunk < 512)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "layers"])
def test_prompts_that_begin_with_a_text_before(make_target, kind, static):
    """Neither the feature before the first token that is read nor the pairs of the others are asked for again."""
    target = suite.phrases(make_target)
    drafter = Checked(fitted(target, make_target, kind), target, TREES["sparse"])
    *_, counts = converse(target, drafter, static=static)
    assert counts.reused_tokens > counts.prefilled_tokens and drafter.seen["depth 2"]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "granite", "gpt2", "cohere", "phi3"])
def test_other_families(make_target, family):
    """Soft caps and factors of logits, scaled embeddings, windows, targets without rotary positions."""
    target = make_target(family)
    for kind, draft_vocab in (("eagle1", True), ("eagle3", False)):
        drafter = Checked(untrained(target, kind, draft_vocab), target, (2, 2))
        serve(target, drafter, count=12)
        assert drafter.seen["depth 1"]


def test_scaled_rotary_positions(make_target):
    """The drafter's are the target's (YaRN also scales cos and sin)."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
    target = make_target("llama", rope_parameters=yarn, max_position_embeddings=64)
    drafter = Checked(untrained(target), target, (2, 1))
    assert drafter.eagle.config.rope_parameters == target.config.rope_parameters
    serve(target, drafter, count=12)
    assert float(drafter.layer.table[:, :8].abs().max()) > 1


class ShiftedFeatures(Checked):
    """Wrong: committed pairs get the next position's feature."""

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, torch.roll(features, -1, 1))


class ShiftedPrompt(Checked):
    """Wrong: a prompt's pairs get the next position's feature."""

    def prefill(self, features, chunk):
        super().prefill(torch.roll(features, -1, 0), chunk)


class ShiftedKeys(Checked):
    """Wrong: a prompt's keys are rotated to the next position."""

    def prefill(self, features, chunk):
        table, self.layer.table = self.layer.table, self.layer.table.roll(-1, 0)
        super().prefill(features, chunk)
        self.layer.table = table


class ShiftedDrafts(Checked):
    """Wrong: drafted nodes are one position too far."""

    def _run(self, level, *args, **options):
        wrong = replace(level, depth=level.depth + 1) if level.first else level
        return super()._run(wrong, *args, **options)


class SwappedNorms(Checked):
    """Wrong: the norms of embeddings and features are swapped."""

    def __init__(self, *args):
        super().__init__(*args)
        pair = self.layer.pair_input
        pair.embedding_norm, pair.hidden_norm = pair.hidden_norm, pair.embedding_norm


class NormedStates(Checked):
    """Wrong: drafts continue with the normed hidden state, and the LM head reads it normed twice."""

    def _run(self, *args, **options):
        assert self.layer.norm is not None
        hidden, normed = super()._run(*args, **options)
        return self.layer.norm(hidden), self.layer.norm(normed)


@pytest.mark.parametrize(
    "wrong", [ShiftedFeatures, ShiftedPrompt, ShiftedKeys, ShiftedDrafts, SwappedNorms, NormedStates]
)
def test_what_is_shifted_by_one_is_found(make_target, wrong):
    """The comparison with the training forward fails."""
    target = suite.phrases(make_target)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        serve(target, wrong(fitted(target, make_target), target, TREES["sparse"]))


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_accepted_nodes_of_other_drafters(make_target, static):
    """In a merge with a deeper drafter all committed pairs are made of the target's features."""
    target = suite.phrases(make_target)
    drafter = Checked(fitted(target, make_target), target, (2,))
    deeper = EagleDrafter(fitted(target, make_target, "eagle1"), target, (1,) * 5)
    serve(target, MergedDrafter({"one": drafter, "deeper": deeper}, target, 12), static=static)
    assert any(drafter.seen[length] for length in (3, 4, 5)), drafter.seen


@pytest.mark.parametrize("tree", TREES)
def test_costs_end_trees(make_target, monkeypatch, tree):
    """Eager steps stop where another level does not pay; static ones of one size, and multi-step sampling, never."""
    monkeypatch.setattr(budget, "FEWEST", 10**9)  # it is asked in every step
    sizes = Counter()

    class Watched(Checked):
        def propose(self, state):
            tree = super().propose(state)
            sizes.update(tree.valid.sum(-1)[state.active].tolist())
            return tree

    def make(target, kind=EagleDrafter):
        drafter = kind(fitted(target, make_target), target, TREES[tree])
        drafter.costs = STEEP
        return drafter

    target = suite.phrases(make_target)
    serve(target, make(target, Watched))
    assert len(sizes) > 1, sizes
    for static, mode in ((True, "greedy"), (False, "mss")):
        sizes.clear()
        drafter = make(target, Watched)
        serve(target, drafter, static=static, mode=mode, count=22)
        assert set(sizes) == {drafter.num_nodes}, (mode, sizes)
    suite.check_coupled(make_target, make, own=False)


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
def test_a_dynamic_tree_that_runs_more_nodes_than_it_has(make_target, static):
    """40 nodes are run for a tree of 6: the drafter's cache has slots for them, up to the last step of a text."""
    target = suite.phrases(make_target)
    shape = DynamicShape(8, 6, 6)
    assert shape.runs == 40 > shape.nodes + 2 * (shape.depth + 1)
    requests = [Request(STARTS[0], 40, stop_ids=NONE)]
    plain = SpeculativeDecoder(target).serve(requests, 1)
    drafter = EagleDrafter(fitted(target, make_target), target, shape)
    decoder = SpeculativeDecoder(target, drafter, static=static)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CACHE_GRANULE", 1)  # no slots beyond those that are asked for
        found = decoder.serve(requests, 1)
    assert found[0].tokens == plain[0].tokens and max(found[0].accepted) > 1


def test_fewer_positions_than_the_target(make_target):
    """An error when it is loaded: what, the two numbers, what to do."""
    target = make_target("llama")
    eagle = untrained(target)
    short = Eagle(replace(eagle.config, max_position_embeddings=128))
    with pytest.raises(ValueError, match=r"has 128 positions .* has 256; .* trained for all"):
        EagleDrafter(short, target, (1,))


@pytest.mark.parametrize("tree, message", [((), "at least one depth"), ((70,), "more children than the vocabulary")])
def test_trees_that_cannot_be_drafted(make_target, tree, message):
    target = make_target("llama")
    with pytest.raises(ValueError, match=message):
        EagleDrafter(untrained(target), target, tree)
    with pytest.raises(ValueError, match="top_k is 70"):
        EagleDrafter(untrained(target), target, DynamicShape(70, 1, 9))
