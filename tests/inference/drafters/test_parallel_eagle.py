"""P-EAGLE: the engine's one pass equals the training forward, after commits of every length; which trees fit; its
family's folder, calibration and simulated τ."""

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace

import lossless_suite as suite
import pytest
import torch
from blocks import untrained_block
from draws import occurs
from eagles import TREES, fitted, untrained
from kept_texts import KeepsTexts
from lossless_suite import NONE, STARTS

from draftsmith.inference import calibrate
from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle_layer import EagleLayer
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.parallel_eagle import ParallelEagleDrafter, drafter_of
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.budget import Budget
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.measure.tree_statistics import eagle_ranks, simulate
from draftsmith.inference.trees.by_level import LevelPass
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import RankTree
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import Topology, chain
from draftsmith.models.artifact import write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target


class Checked(KeepsTexts, ParallelEagleDrafter):
    """Compares the logits of each depth with those of the training forward over the whole text."""

    def __init__(self, eagle, target, tree):
        self.fresh = copy.deepcopy(eagle)
        super().__init__(eagle, target, tree)

    def _logits(self, hidden):
        logits, ids = super()._logits(hidden)
        self.ran = logits
        return logits, ids

    def propose(self, state):
        tree = super().propose(state)
        for row, text in self.texts.items():
            tokens, count = torch.tensor([text], device=self.device), len(text) - 1
            with self.target.attention("sdpa"):
                features = self.target.features(tokens[:, :-1], self.fresh.config.captured_layers)
            features = torch.nn.functional.pad(features, (0, 0, 0, 1))
            chosen = torch.full((1, 1), count - 1, device=self.device)
            outs = self.fresh.unroll(features, self.target.embeddings, tokens, self.max_depth, chosen=chosen)
            right = self.fresh.draft_head(self.target.lm_head)(torch.cat([out[0] for out in outs]))  # [D, S]
            torch.testing.assert_close(self.ran[row], right, atol=1e-4, rtol=1e-4)
            self.seen["checked"] += 1
        return tree

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, features)
        self.seen.update(int(verdict.length[row]) for row in self.texts)


@pytest.mark.parametrize(
    ("kind", "tree", "static"),
    [
        *itertools.product(["parallel"], TREES, [False, True]),
        *itertools.product(["parallel layers"], ["sparse"], [False, True]),
    ],
)
def test_the_engines_logits_are_the_training_forwards(make_target, kind, tree, static):
    """In rows of different lengths that are refilled."""
    target = suite.phrases(make_target)
    drafter = Checked(fitted(target, make_target, kind), target, TREES[tree])
    prompts = [start * (1 + number % 3) for number, start in enumerate(STARTS)]
    requests = [Request(prompt, 30 - 3 * number, stop_ids=NONE) for number, prompt in enumerate(prompts)]
    results = SpeculativeDecoder(target, drafter, static=static).serve(requests, 3)
    assert [result.tokens for result in results] == suite.plain_texts(target, requests)
    assert drafter.seen["checked"] > 20
    occurs(all(drafter.seen[length] for length in range(4)), str(drafter.seen))


@pytest.mark.parametrize(
    "tree", [Topology(((0,), (0, 0), (1,), (1, 2))), DynamicShape(4, 3, 12)], ids=["fixed", "dynamic"]
)
@pytest.mark.parametrize("family", ["medusa", "dflash", "p-eagle"])
def test_nodes_have_the_highest_scores(make_target, family, tree):
    """Coupled sampling, all drafters of one pass: each depth's tokens are the best by their scores, that is with the
    noise by which the target chooses, not by probability alone."""
    target, seen = make_target("llama"), Counter[str]()
    if family == "medusa":
        heads = MedusaHeads.for_target(target, 3, 1, "own").requires_grad_(False)
        torch.nn.init.normal_(heads.weight, std=0.3)
        drafter = MedusaDrafter(heads, tree, target)
    elif family == "dflash":
        drafter = DFlashDrafter(untrained_block(target), tree, target)
    else:
        drafter = ParallelEagleDrafter(untrained(target, "parallel"), target, tree)
    logits, ran, propose = drafter._logits, [], drafter.propose
    drafter._logits = lambda hidden: ran.append(logits(hidden)) or ran[-1]
    drafter.head = replace(drafter.head, logits=drafter._logits)

    def checked(state):
        found = propose(state)
        (scores, ids), depths = ran[-1], torch.arange(drafter.max_depth)
        log_p, best = state.noise.draft(scores, depths, 4, ids)
        plain = scores.topk(4).indices if ids is None else ids[scores.topk(4).indices]
        for row in range(len(state.root)):
            paths = [()]  # tokens
            for node in range(1, found.tokens.shape[1]):
                paths.append((*paths[int(found.parent[row, node])], int(found.tokens[row, node])))
            if isinstance(tree, Topology):
                wanted = [tuple(int(best[row, depth, rank]) for depth, rank in enumerate(path)) for path in tree.paths]
                assert paths[1:] == wanted
            else:
                values = {(): 0.0}
                for depth in range(3):
                    level = [path for path in values if len(path) == depth]
                    more = zip(best[row, depth].tolist(), log_p[row, depth].tolist(), strict=True)
                    values |= {(*path, token): values[path] + value for token, value in more for path in level}
                assert {*paths} == {*sorted(values, key=values.__getitem__)[-12:]}
            seen["rows"] += 1
            seen["others than by probability"] += not torch.equal(best[row], plain[row])
        return found

    drafter.propose = checked
    requests = [Request(start, 12, Sampling(seed=number, temperature=0.9), NONE) for number, start in enumerate(STARTS)]
    SpeculativeDecoder(target, drafter).serve(requests, 3, mode="sample")
    occurs(seen["others than by probability"] > seen["rows"] / 2 > 10, str(seen))


@pytest.mark.parametrize("family", ["parallel", "levels", "draft model"])
def test_steps_without_drafts_near_the_caches_end(make_target, monkeypatch, family):
    """A long text with few tokens left beside a short one: the pass after them pads the long one as far as the other
    misses pairs."""
    target, length, drafting = make_target("llama", max_position_embeddings=256), 4, [0]
    if family == "draft model":
        drafter = DraftModelDrafter(target, target, (1,) * length)
    else:
        eagle = Eagle.for_target(target, 3, "shared", parallel=length * (family == "parallel"))
        drafter = drafter_of(eagle, target, (1,) * length)
        if family == "parallel":
            drafter.tree = RankTree(chain(length), target.device, [0.5] * length)
            drafter.has_acceptance = True
    drafter.costs = StepCosts({1: 1.0, 8: 1.2})
    passes = []

    def asks(budget, number):
        drafting[0] += 1
        if drafting[0] % 27 != 26:
            return False
        budget.sources[number].asked += 1
        budget.level, budget.ended, budget.levels, budget.mark = 0, False, [budget.roots], budget.clock()
        return True

    def check(level, tokens, lengths, capacity):  # kernels do not look where they write
        passes.append(tokens.shape[1])
        assert int(lengths.max()) + level.first + tokens.shape[1] <= capacity

    def of_layer(layer, level, tokens, hidden, lengths, *rest, run=EagleLayer.run):
        check(level, tokens, lengths, layer.capacity)
        return run(layer, level, tokens, hidden, lengths, *rest)

    def of_model(level, runner, tokens, lengths, *rest, run=LevelPass.run):
        check(level, tokens, lengths, runner.cache.capacity)
        return run(level, runner, tokens, lengths, *rest)

    monkeypatch.setattr(Budget, "asks", asks)
    monkeypatch.setattr(EagleLayer, "run", of_layer)
    monkeypatch.setattr(LevelPass, "run", of_model)
    texts = ((range(5, 10), 100), (range(20, 25), 24), ([7] * 101, 4))
    requests = [Request([*prompt], count, stop_ids=NONE) for prompt, count in texts]
    results = SpeculativeDecoder(target, drafter, static=False).serve(requests, 2)
    assert [result.tokens for result in results] == suite.plain_texts(target, requests)
    assert drafting[0] > 50 and max(passes) > 20


def test_drafts_do_not_see_each_others_tokens(make_target):
    """In the training forward: no true token beyond the next one, and no feature beyond the position, changes them."""
    target = suite.phrases(make_target)
    eagle, tokens = untrained(target, "parallel"), torch.randint(1, 60, (2, 8))
    features = torch.randn(2, 8, 32 * (1 + len(eagle.config.captured_layers)))
    chosen = torch.full((2, 1), 3)

    def drafts(features, tokens):
        return torch.cat([*eagle.unroll(features, target.embeddings, tokens, 3, chosen=chosen)], 1)

    before, later = drafts(features, tokens), tokens.clone()
    later[:, 5:] = 0
    assert torch.equal(before, drafts(features, later))
    assert torch.equal(before, drafts(torch.cat((features[:, :4], 0 * features[:, 4:]), 1), later))
    later[:, 4] = (later[:, 4] + 1) % 60
    assert not torch.isclose(before, drafts(features, later)).all(-1).any(), "the next token is seen at every depth"


def test_another_tree_has_not_the_first_ones_acceptance(make_target):
    """Its own is not known: a merge reckons with a half per depth."""
    target = suite.phrases(make_target)
    tree = Topology(((0,), (0, 0), (1,)))
    drafter = ParallelEagleDrafter(untrained(target, "parallel"), target, tree, [0.5, 0.3, 0.2])
    other = drafter.with_tree((1, 1))
    assert drafter.has_acceptance and not other.has_acceptance, "alone, all its nodes are verified"
    assert other.num_nodes == 3 and other.tree.acceptance.tolist() == [[1.0, 0.5, 0.25]]
    assert drafter.tree.acceptance[0].tolist() == pytest.approx([1.0, 0.5, 0.3, 0.2])
    (result,) = SpeculativeDecoder(target, other).generate([STARTS[0]], 20, stop_ids=NONE)
    assert result.tokens == suite.plain_texts(target, [Request(STARTS[0], 20, stop_ids=NONE)])[0]


def test_which_trees_fit(make_target):
    target = suite.phrases(make_target)
    eagle = untrained(target, "parallel")
    assert isinstance(drafter_of(eagle, target, (1, 1)), ParallelEagleDrafter)
    assert not isinstance(drafter_of(untrained(target), target, (1, 1)), ParallelEagleDrafter)
    for tree, message in (
        (chain(4), "the tree is 4 deep, but there are 3 drafts in a pass"),
        (DynamicShape(2, 4, 4), "the tree is 4 deep"),
        (Topology(()), "the tree holds the root alone"),
        (Topology(((61,),)), "the tree asks for rank 61 of a vocabulary of 61"),
        (DynamicShape(62, 2, 4), "top_k is 62, but the drafter chooses from 61 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelEagleDrafter(eagle, target, tree)
    for fields in (
        {"version": 1, "projection": "shared", "parallel": 2},
        {"version": 3, "projection": "own", "parallel": -1},
    ):
        with pytest.raises(ValueError, match="field 'parallel'"):
            Eagle.for_target(target, **fields)


def test_simulated_is_what_the_engine_does(make_target):
    target = suite.phrases(make_target)
    eagle, tree = fitted(target, make_target, "parallel"), Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)))
    data = answer(target, STARTS[:5], 30, 3)
    ranks = eagle_ranks(target, eagle, data["tokens"], data["supervised"], 3)
    results = SpeculativeDecoder(target, ParallelEagleDrafter(eagle, target, tree)).generate(STARTS[:5], 30)
    lengths = [length for result in results for length in result.accepted]
    assert len(set(lengths)) > 2 and simulate(tree, ranks) == sum(lengths) / len(lengths)


def test_a_folder_is_calibrated_and_decodes(run_main, tiny_lm, tmp_path):
    """As draft heads are: candidates from which each step takes those that pay, and dynamic trees beside them."""
    target = load_target(str(tiny_lm), device="cpu", dtype="float32")
    eagle = Eagle.for_target(target, 3, "shared", parallel=3)
    folder, prompts = tmp_path / "eagle", tmp_path / "prompts.jsonl"
    write_drafter(folder, "eagle", eagle.config.to_dict(), eagle.state_dict(), target, {})
    prompts.write_text('{"prompt": "import os"}\n{"prompt": "def f("}\n')
    options = ("--prompts", prompts, "--max-new-tokens", 40, "--seconds", 1, "--device", "cpu")
    code, _, err = run_main(calibrate.main, folder, *options)
    assert code == 0, err
    tree = json.loads((folder / "tree.json").read_text())
    assert tree["calibration"]["positions"] > 10 and tree["calibration"]["dynamic"]
    (folder / "tree.json").write_text(json.dumps({"dynamic": {"top_k": 3, "depth": 3, "nodes": 9}}))
    for name in (str(folder), f"{folder}+ngram", f"{folder}@2,1", f"{folder}@2,1+ngram"):
        loaded, drafter = load_drafter(name, device="cpu", dtype="float32")
        (result,) = SpeculativeDecoder(loaded, drafter).generate([[5, 6, 7]], 12, stop_ids=NONE)
        (plain,) = SpeculativeDecoder(loaded).generate([[5, 6, 7]], 12, stop_ids=NONE)
        assert result.tokens == plain.tokens
