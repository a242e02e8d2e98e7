"""Nodes chosen from step to step, of eager and of static steps: which, and the texts are the same. With --device cuda:
a graph of each size."""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from eagles import TREES, fitted
from lossless_suite import STARTS, check_coupled, check_greedy, phrases
from tiny_models import PATHS, RATES, noisy_heads, perturbed

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter, open_drafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.budget import FEWEST, RETRY, REVIEW, REVIEWS, STEPS, UNKNOWN, Budget, TypicalBudget
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.static_budget import LATEST_OF_SIZE, RETIMED, ROOT, WHOLE, StaticBudget, StepSize
from draftsmith.inference.engine.step import why_no_graph
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.step_costs import StepClock, StepCosts
from draftsmith.inference.trees import by_level
from draftsmith.inference.trees.independent import RankTree
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import StaticTree, Topology

PROMPTS = [[7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33], [9], [58, 1, 30, 12], [21, 6, 17, 40, 8]]


def drafter_of(target, acceptances=RATES):
    """Heads near the LM head, which the random target's own text agrees with now and then."""
    drafter = MedusaDrafter(noisy_heads(target, 0.1, "shared", seed=2), Topology(PATHS), target, acceptances)
    drafter.clock = StepClock()
    return drafter


# ---- eager steps


class Text:
    """A drafter of chains in a text where a draft at depth k is accepted with probability ``true``, given that the one
    above is, and estimated with ``estimated``; by a clock of its own.

    chosen: nodes of each step, root included; asked: whether the drafter was asked; tokens: that steps committed.
    """

    def __init__(self, costs, *, rows=1, depth=6, pass_seconds=0.05, cached=128, seed=0):
        self.now, self.rng = 0.0, random.Random(seed)
        self.costs, self.rows, self.depth, self.pass_seconds, self.cached = costs, rows, depth, pass_seconds, cached
        self.budget = Budget(costs.seconds, rows, [False], depth, depth + 1, lambda: self.now)
        self.budget.begin(slice(0, rows))
        self.chosen, self.asked, self.tokens = [], [], []

    def step(self, true, estimated, slow=1.0):
        self.budget.start([self.cached] * self.rows, [True] * self.rows)
        asked, nodes, began = self.budget.asks(0), 1, self.now
        acceptance = torch.tensor([[estimated**depth for depth in range(self.depth + 1)]]).expand(self.rows, -1)
        if asked:
            for level in range(1, self.depth + 1):
                self.now += self.pass_seconds
                depths = torch.arange(level + 1)[None]
                if level == self.depth or not self.budget.another_level(0, acceptance[:, : level + 1], depths):
                    break
            corrected = self.budget.corrected(0, acceptance[:, : level + 1], depths)
            self.budget.proposed(0, corrected)
            nodes = self.budget.keep(corrected)
            corrected = corrected[:, :nodes].tolist()
        seconds = slow * self.costs.seconds(self.rows, self.cached, nodes)
        self.now += seconds
        lengths = [next((d for d in range(nodes - 1) if self.rng.random() > true), nodes - 1) for _ in range(self.rows)]
        if nodes > 1:
            path = [*range(nodes), *[0] * (self.depth + 1 - nodes)]
            self.budget.learn([path] * self.rows, lengths, [[*range(-1, nodes - 1)]] * self.rows, corrected, None)
        self.budget.ran(nodes, seconds)
        self.chosen.append(nodes)
        self.asked.append(asked)
        self.tokens.append(self.rows + sum(lengths))
        return self.now - began

    def run(self, steps, *args):
        """The mean seconds per token of so many steps."""
        return sum(self.step(*args) for _ in range(steps)) / sum(self.tokens[-steps:])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("cached", [128, 20_000])
def test_the_nodes_of_highest_speed_are_kept(rows, cached):
    """By brute force; rows without a text do not count, and the step costs what all rows cost."""
    rng = random.Random(rows)
    counts = set()
    for case in range(60):
        slope = rng.choice((0.01, 0.1, 0.5))
        costs = StepCosts({1: 1.0, 4: 1 + 3 * slope, 60: 1 + 30 * slope}, per_key=1e-6, per_key_and_node=1e-6)
        active = [True] * rows if case % 2 else [row != 1 for row in range(rows)]
        acceptance = [[1.0, *(rng.random() ** 3 for _ in range(11))] for _ in range(rows)]
        chooses = Budget(costs.seconds, rows, [False], 4, 12, costs.now)
        chooses.start([cached] * rows, active)
        found = chooses.keep(torch.tensor(acceptance))
        own = [sorted(row, reverse=True) for row, is_active in zip(acceptance, active, strict=True) if is_active]
        sums = [sum(sum(row[:count]) for row in own) for count in range(1, 13)]
        speeds = [total / costs.seconds(rows, cached, count) for count, total in enumerate(sums, 1)]
        assert speeds[found - 1] == pytest.approx(max(speeds), rel=1e-6)
        counts.add(found)
    assert len(counts) > 4


@pytest.mark.parametrize("pass_seconds", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_as_many_levels_as_pay(pass_seconds, share):
    """Against the best fixed depth of chains, plain decoding among them."""
    costs = StepCosts({1: 1.0, 8: 1.2})
    text = Text(costs, pass_seconds=pass_seconds)
    text.run(100, share, share)
    speed = 1 / text.run(900, share, share)
    best = max(
        sum(share**level for level in range(depth + 1)) / (pass_seconds * depth + costs.seconds(1, 128, depth + 1))
        for depth in range(7)
    )
    assert speed > 0.93 * best and speed > 0.97


def test_trees_shrink_as_rows_fill():
    """Up to 16 rows of a step cost what one costs; then each costs more. Down to plain decoding, and with a longer
    context earlier."""
    costs = StepCosts({1: 1.0, 16: 1.0, 1024: 64.0}, per_key_and_node=2e-6)
    for cached in (128, 60_000):
        counts = []
        for rows in (1, 2, 4, 8, 16, 64):
            text = Text(costs, rows=rows, pass_seconds=0.01, cached=cached)
            text.run(100, 0.8, 0.8)
            counts.append(sum(text.chosen[-64:]) / 64)
        assert counts == sorted(counts, reverse=True) and counts[-1] < 1.1, counts
        assert counts[0] == 7 if cached == 128 else 1.1 < counts[0] < 7, counts


def test_estimates_are_corrected_by_the_text():
    """A drafter that is wrong where it was estimated right is asked once in a while, and again when it is right."""
    text = Text(StepCosts({1: 1.0, 8: 1.5}), pass_seconds=0.1)
    text.run(60, 0.8, 0.8)
    assert all(text.asked) and sum(text.chosen[-20:]) > 60
    text.run(100, 0.0, 0.8)
    start = len(text.asked)
    assert text.run(20 * RETRY, 0.0, 0.8) < 1.02, "hardly slower than plain decoding"
    assert 15 < sum(text.asked[start:]) < 60
    start = len(text.asked)
    text.run(20 * RETRY, 0.0, 0.8)
    assert 15 < sum(text.asked[start:]) < 25, "rarer as all texts show it"
    text.run(12 * RETRY, 0.8, 0.8)
    start = len(text.asked)
    text.run(100, 0.8, 0.8)
    assert all(text.asked[start:])
    low = Text(StepCosts({1: 1.0, 8: 1.5}), pass_seconds=0.1)
    low.run(200, 0.8, 0.4)
    assert 1.2 < low.budget.ratios(0, 0)[1] <= 2.0 and all(low.asked[-50:])
    assert low.budget.ratios(0, 0)[2] <= 1.0, "no child becomes likelier than its parent"


def test_a_text_teaches_itself_first():
    """A new text begins with what all texts showed, and then has its own factors; rows do not share theirs."""
    learns = Budget(StepCosts({1: 1.0, 8: 1.5}).seconds, 2, [False], 3, 4, float)
    learns.begin(slice(0, 2))
    for _ in range(60):
        learns.start([9, 9], [True, True])
        path, parents = [[0, 1, 2, 3]] * 2, [[-1, 0, 1, 2]] * 2
        probabilities = learns.corrected(0, torch.tensor([[1.0, 0.5, 0.25, 0.125]] * 2), torch.arange(4)[None])
        learns.learn(path, [3, 0], parents, probabilities.tolist(), None)
    first, second = learns.ratios(0, 0)[1], learns.ratios(0, 1)[1]
    assert first > 1.5 and second < 0.3
    learns.begin(slice(0, 1))
    assert second < learns.ratios(0, 0)[1] < first
    assert learns.factors[0, 0, 1] == pytest.approx(learns.ratios(0, 0)[1])
    assert learns.factors[0, 0, 3] == pytest.approx(
        learns.ratios(0, 0)[1] * learns.ratios(0, 0)[2] * learns.ratios(0, 0)[3]
    )


def test_what_came_true_is_of_the_drafter_that_proposed_it():
    """Of two drafters with a child each; what a step showed counts less with each further one."""
    learns = Budget(StepCosts({1: 1.0, 8: 1.5}).seconds, 1, [False, False], 2, 4, float)
    learns.begin(slice(0, 1))
    for _ in range(2):
        learns.start([9], [True])
        learns.learn([[0, 2, 0]], [1], [[-1, 0, 0]], [[1.0, 0.5, 0.5]], [[0, 1, 2]])
    assert learns.came_true[:, 0, 1].tolist() == pytest.approx([0.0, 0.97 + 1])  # DECAY


def test_a_bad_moment_heals():
    """Steps, or a drafter's passes, that were slow for a while: nothing of it stays."""
    text = Text(StepCosts({1: 1.0, 8: 1.2}), pass_seconds=0.05)
    text.run(2 * REVIEW, 0.8, 0.8)
    before = sum(text.chosen[-20:])
    for _ in range(2 * REVIEW):
        text.step(0.8, 0.8, 6.0 if text.chosen[-1] > 1 else 1.0)
    text.run(3 * REVIEWS * REVIEW, 0.8, 0.8)
    assert sum(text.chosen[-20:]) >= 0.85 * before  # 6 or 7 nodes
    text.pass_seconds = 3.0
    text.run(3 * REVIEW, 0.8, 0.8)
    assert sum(text.chosen[-REVIEW:]) < 1.3 * REVIEW, "too slow to pay"
    text.pass_seconds = 0.05
    text.run(60 * RETRY, 0.8, 0.8)
    assert sum(text.chosen[-20:]) >= 0.85 * before  # 6 or 7 nodes
    assert set(text.chosen[-20:]) <= {6, 7}


def test_after_a_trial_that_paid_as_many_levels_as_pay():
    """A drafter that failed in one text is asked for one level after a while, and where that would have paid for all
    that pay, from the next step on."""
    text = Text(StepCosts({1: 1.0, 8: 1.5}), pass_seconds=0.1)
    text.run(3 * REVIEW, 0.0, 0.9)
    assert sum(text.asked[-20:]) < 3
    start = len(text.chosen)
    text.run(2 * RETRY, 1.0, 0.9)
    first = next(step for step in range(start, len(text.chosen)) if text.asked[step])
    assert text.chosen[first] == 2 and text.chosen[-1] > 4
    assert all(text.asked[first:])


def test_the_first_steps_correct_the_costs_soon():
    text = Text(StepCosts({1: 1.0, 8: 1.2}))
    text.budget.costs = StepCosts({1: 0.5, 8: 0.6}).seconds
    text.run(STEPS, 0.0, 0.0)
    assert text.budget.table[0] == pytest.approx(0.5)
    text.run(1, 0.0, 0.0)
    assert text.budget.table[0] == pytest.approx(1.0)


def test_steps_that_run_correct_the_costs():
    """Costs that were timed at a bad moment; the shortest of the latest steps count."""
    text = Text(StepCosts({1: 1.0, 8: 1.2}), pass_seconds=0.01)
    text.budget.costs = StepCosts({1: 1.0, 8: 9.0}).seconds
    text.run(1, 0.9, 0.9)
    assert text.chosen == [1], "each node seems to cost more than it gives"
    text.budget.costs = StepCosts({1: 1.0, 8: 3.0}).seconds
    text.run(3 * REVIEW + STEPS, 0.9, 0.9)
    assert text.budget.table[6] < 1.5 and sum(text.chosen[-20:]) >= 5 * 20


def test_costs_of_a_bad_moment_are_measured_again(make_target):
    """Real steps are far faster than the costs say: they are measured again, at most as often as they may be; what
    corrected the old ones is forgotten. Costs that fit stay."""
    target = make_target("llama")
    slow, right = StepCosts({1: 50.0, 8: 500.0}), StepCosts({1: 1e-4, 8: 1.1e-4})
    asked = []
    slow.again = lambda: (asked.append(1), right)[1]
    for costs, times in ((slow, 1), (right, 0), (StepCosts({1: 50.0, 8: 500.0}), 0)):
        asked.clear()
        drafter = NgramDrafter(target)
        drafter.costs = costs
        decoder = SpeculativeDecoder(target, drafter)
        decoder.generate([[5, 6, 7]], 3 * REVIEW, stop_ids=frozenset())
        assert len(asked) == times
        assert drafter.costs is (right if times else costs)
    budget = Budget(slow.seconds, 1, [False], 4, 8, slow.now)
    for _ in range(REVIEW + 1):
        budget.start([100], [True])
        budget.ran(1, 1e-3)
    assert budget.costs_stale and budget.table[0] < 1e-2
    budget.measured_again(right.seconds)
    budget.start([100], [True])
    assert not budget.costs_stale and budget.table[0] == pytest.approx(1e-4)


def test_of_a_merge_the_cheap_drafter_comes_first():
    """The other one is asked where it adds enough; one that costs next to nothing always is."""
    now = [0.0]
    both = Budget(StepCosts({1: 1.0, 8: 1.1}).seconds, 1, [True, True], 4, 9, lambda: now[0])
    both.begin(slice(0, 1))
    seconds, asked = (0.6, 0.001), [0, 0]
    chain = torch.tensor([[1.0, 0.5, 0.25]])
    for step in range(60):
        both.start([9], [True])
        order = both.order()
        assert step < FEWEST or order == [1, 0]
        for number in order:
            if both.asks(number):
                asked[number] += 1
                now[0] += seconds[number]
                both.proposed(number, chain)
        assert both.keep(chain) == 3
    assert asked[1] == 60 and FEWEST <= asked[0] <= FEWEST + 2


def heads_of(target):
    drafter = drafter_of(target)
    drafter.costs = StepCosts({1: 1.0, 8: 1.1})
    return drafter


def draft_model_of(target):
    return DraftModelDrafter(target, target, [2, 1, 1])


def answer_at_random(monkeypatch):
    """The budget's answers are drawn: whether a drafter is asked, the number of levels, and of nodes.

    Returns:
        What it answered, filled in as it does.
    """
    rng, answers = random.Random(1), set()
    asks, level, keep = Budget.asks, Budget.another_level, Budget.keep

    def asked(self, number):
        if rng.random() < 0.4:
            answers.add("not asked")
            return False
        self.sources[number].asked = 0
        return asks(self, number)

    def another(self, *args):
        level(self, *args)
        self.ended = rng.random() < 0.4
        answers.add(self.ended)
        return not self.ended

    def kept(self, acceptance, most=None):
        keep(self, acceptance, most)
        answers.add("kept")
        return rng.randint(1, min(acceptance.shape[1], self.limit if most is None else most))

    monkeypatch.setattr(Budget, "asks", asked)
    monkeypatch.setattr(Budget, "another_level", another)
    monkeypatch.setattr(Budget, "keep", kept)
    return answers


@pytest.mark.parametrize("kind", ["heads", "draft model", "heads, draft model and n-grams"])
def test_texts_do_not_depend_on_the_budget(make_target, monkeypatch, kind):
    """Whatever it answers, here at random: any drafter left out, any number of levels, any number of nodes."""
    answers = answer_at_random(monkeypatch)

    def make(target):
        makers = {"heads": heads_of, "draft model": draft_model_of}
        if kind in makers:
            drafter = makers[kind](target)
        else:
            members = {name: make(target) for name, make in makers.items()}
            drafter = MergedDrafter(members | {"ngram": NgramDrafter(target, depth=4, min_match=1)}, target, 16)
        drafter.costs = StepCosts({1: 1.0, 8: 1.1})
        return drafter

    check_coupled(make_target, make, own=False)
    if kind != "heads":  # whose deepest path is rarely kept
        check_greedy(make_target, make, own=False)
    assert answers >= ({"not asked", "kept"} if kind == "heads" else {"not asked", "kept", True, False})


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", [*TREES, "layers", "draft model", "merged"])
def test_a_skipped_step_changes_no_later_draft(make_target, monkeypatch, kind, rows):
    """A drafter that was left out for some steps, in which others' nodes were accepted, too, drafts afterwards what it
    drafts if it ran in all of them."""
    target = phrases(make_target)
    trees = {}
    for lazy in (True, False):

        def make(one, lazy=lazy):
            if one == "draft model":
                drafter = draft_model_of(target)
            else:
                layers = "layers" if one == "layers" else "eagle3"
                drafter = EagleDrafter(fitted(target, make_target, layers), target, TREES.get(one, TREES["sparse"]))
            if not lazy:
                propose = drafter.propose
                drafter.skip = lambda state: propose(replace(state, budget=None))
            return drafter

        its = trees[lazy] = []

        def recorded(drafter, its=its):
            propose = drafter.propose

            def proposed(state):
                tree = propose(state)
                its.append((state.length.tolist(), tree.tokens.tolist(), tree.depth.tolist()))
                return tree

            drafter.propose = proposed
            return drafter

        if kind == "merged":
            members = {"ngram": NgramDrafter(target, depth=4, min_match=1)}
            members |= {one: recorded(make(one)) for one in ("chain", "draft model")}
            drafter = MergedDrafter(members, target, 16)
        else:
            drafter = recorded(make(kind))
        drafter.costs = StepCosts({1: 1.0, 8: 1.1})
        requests = [Request(start, 50, stop_ids=frozenset()) for start in STARTS]
        with monkeypatch.context() as patch:
            answer_at_random(patch)
            patch.setattr(Budget, "order", lambda self: list(range(len(self.sources))))  # not by the passes' times
            if rows == 1:  # what is missing of the drafter's cache is written sooner
                patch.setattr(by_level, "MISSING", 0)
            SpeculativeDecoder(target, drafter, static=False).serve(requests, rows)
    assert len(trees[True]) > 20 and trees[True] == trees[False]


@pytest.mark.parametrize("kind", ["all nodes", "by costs", "static"])
def test_a_request_bounds_its_trees(make_target, kind):
    """And those beside it, until its text ends; the texts stay."""
    target = make_target("llama")
    drafter = heads_of(target)
    drafter.costs = StepCosts({1: 1.0, 64: 1.0}) if kind != "all nodes" else None
    decoder = SpeculativeDecoder(target, drafter, static=kind == "static")
    plain = SpeculativeDecoder(target)
    for bounds, rows in (([None, 0, 3, None], 1), ([None, 0], 2), ([3, 9], 2)):
        requests = [
            Request(prompt, 12, stop_ids=frozenset(), max_draft_nodes=bound)
            for prompt, bound in zip(PROMPTS, bounds, strict=False)
        ]
        nodes = []
        results = decoder.serve(
            requests, rows, on_step=lambda number, _, nodes=nodes: nodes.append(decoder._step.nodes)
        )
        assert [result.tokens for result in results] == [result.tokens for result in plain.serve(requests, 1)]
        if rows == 1:
            for result, bound in zip(results, bounds, strict=True):
                assert result.drafted <= (11 if bound is None else bound) * len(result.accepted)
            assert results[0].drafted and not results[1].drafted and (results[2].drafted or kind == "static")
        else:
            assert max(nodes[:6]) <= 1 + min(bound for bound in bounds if bound is not None)
    assert decoder._step.bounds == [None] * 2


def test_bounds_that_cannot_be_kept(make_target):
    """A seed's text depends on its trees in multi-step sampling."""
    target = make_target("llama")
    decoder = SpeculativeDecoder(target, heads_of(target))
    with pytest.raises(ValueError, match="prompt 1: max_draft_nodes -1: must be a whole number of at least 0"):
        decoder.generate([[5]], 3, max_draft_nodes=-1)
    for mode in ("mss", "typical"):
        with pytest.raises(ValueError, match="prompt 1: max_draft_nodes bounds trees of several sizes: .*; leave it"):
            decoder.generate([[5]], 3, mode=mode, max_draft_nodes=4)
    static = SpeculativeDecoder(target, drafter := heads_of(target), static=True)
    drafter.clock = None
    with pytest.raises(ValueError, match="unless all nodes are asked for"):
        static.generate([[5]], 3, max_draft_nodes=4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_drafts_that_are_not_finite_change_no_text(make_target, rows, static):
    """A draft model may overflow where the target does not; it drafts again once it no longer does."""
    target, rng, spoilt = make_target("llama"), random.Random(1), []
    drafter = draft_model_of(target).with_tree((4, 3, 1) if static else (2, 1, 1))
    drafter.costs, logits = StepCosts({1: 1.0, 8: 1.1}), drafter.head.logits
    drafter.clock, bound = (StepClock(), 7) if static else (None, None)  # a static step then has 8 of 29 nodes

    def sometimes(out):
        scores, ids = logits(out)
        spoilt.append(rng.random() < 0.4)
        return scores * (torch.nan if spoilt[-1] else 1), ids

    drafter.head = replace(drafter.head, logits=sometimes, module=None)
    decoder = SpeculativeDecoder(target, drafter, static=static)
    results = decoder.generate(PROMPTS, 40, batch_size=rows, max_draft_nodes=bound)
    plain = SpeculativeDecoder(target).generate(PROMPTS, 40)
    assert [result.tokens for result in results] == [result.tokens for result in plain]
    assert spoilt[0] and max(max(result.accepted) for result in results) > 1, "its budget recovers"


# ---- typical acceptance, whose texts choose their nodes


@pytest.mark.parametrize("cached", [128, 20_000])
def test_typical_nodes_are_those_of_each_row(cached):
    """By brute force: as many of a row's likeliest nodes as are fastest for it alone; its other nodes are padding."""
    rng, shape, counts = random.Random(cached), StaticTree(Topology(PATHS).parents, torch.device("cpu")), Counter()
    for case in range(30):
        costs = StepCosts({1: 1.0, 12: rng.choice((1.1, 2, 4))}, per_key=1e-6, per_key_and_node=1e-6)
        acceptance = [[1.0] for _ in range(3)]
        for row, above in itertools.product(acceptance, shape.parent[0, 1:].tolist()):
            row.append(row[above] * rng.random())
        source = torch.ones(3, 12, dtype=torch.int64)
        tree = shape.fill(torch.randint(61, (3, 12)), source, torch.tensor(acceptance))
        texts = torch.full((3,), cached), torch.tensor([True, True, case % 2 == 0])
        pruned, numbers = TypicalBudget(costs.seconds, 12).prune(tree, *texts)
        for row, active in enumerate(texts[1].tolist()):
            drafting = UNKNOWN * costs.seconds(1, cached // 64 * 64, 1)
            ranked = sorted(acceptance[row], reverse=True)
            speeds = [
                sum(ranked[:n]) / (costs.seconds(1, cached // 64 * 64, n) + drafting * (n > 1)) for n in range(1, 13)
            ]
            best = speeds.index(max(speeds)) + 1 if active else 1
            own = numbers[row][pruned.valid[row]].tolist()
            assert {*own} == {*sorted(range(12), key=lambda node, row=row: -acceptance[row][node])[:best]}
            assert pruned.tokens[row][pruned.valid[row]].tolist() == tree.tokens[row, own].tolist()
            assert torch.equal(pruned.source[row] > 0, pruned.valid[row])
            counts[best] += active
    assert len(counts) > 4


@pytest.mark.parametrize("kind", ["heads", "merged", "heads, merged"])
def test_typical_texts_follow_from_the_text_alone(make_target, monkeypatch, kind):
    """Beside other texts, in any order, and however long steps take: a row has the text that it has alone. Whole trees
    have another one; where nothing pays, it is greedy decoding's, and heads are not asked."""
    monkeypatch.setattr(StepClock, "now", lambda self: random.random())
    target, asked = make_target("llama"), []
    requests = [Request(prompt, 24, Sampling(0.8, epsilon=0.03), frozenset()) for prompt in PROMPTS]

    def texts(costs, rows=1, order=range(4)):
        drafter = DraftModelDrafter(target, perturbed(target), [2, 1, 1]) if kind == "merged" else drafter_of(target)
        if kind != "heads":
            drafter = MergedDrafter({"draft": drafter, "ngram": NgramDrafter(target, min_match=1)}, target, 16)
        propose, drafter.costs = drafter.propose, costs
        asked.clear()
        drafter.propose = lambda state: asked.append(state) or propose(state)
        found = SpeculativeDecoder(target, drafter, static=False).serve(
            [requests[n] for n in order], rows, mode="typical"
        )
        return {n: result.tokens for n, result in zip(order, found, strict=True)}

    some = StepCosts({1: 1.0, 4: 1.3, 12: 4.0})
    alone, whole = texts(some), texts(None)
    assert alone == texts(some, 2) == texts(some, 3, [3, 1, 0, 2]) and alone != whole
    assert texts(StepCosts({1: 1.0, 64: 1.0 + 1e-9})) == whole, "all nodes pay"
    greedy = SpeculativeDecoder(target).serve(requests, 1)
    assert [*texts(StepCosts({1: 1.0, 2: 9.0})).values()] == [result.tokens for result in greedy]
    assert kind != "heads" or len(asked) == 1


def test_nodes_of_one_drafter_of_a_merge_are_no_rule_for_later_steps():
    """Draft heads alone have the same acceptance in each step, and are not asked where they do not pay. In a merge
    n-grams may pay in the next one."""
    shape = StaticTree([-1, 0], torch.device("cpu"), [1.0, 0.2])
    for source, asked in ((None, False), (torch.tensor([[0, 1]]), True)):
        budget = TypicalBudget(StepCosts({1: 1.0, 2: 1.5}).seconds, 2)
        tree = shape.fill(torch.tensor([[5, 6]]), source, torch.tensor([[1.0, 0.2]]))
        budget.prune(tree, *(texts := (torch.tensor([64]), torch.tensor([True]))))
        assert budget.drafts(*texts) is asked


# ---- static steps


@pytest.mark.parametrize("mode", ["greedy", "sample"])
def test_texts_do_not_depend_on_the_sizes(make_target, greedy_texts, monkeypatch, mode):
    target = make_target("llama")
    requests = [
        Request(prompt, 14, Sampling(temperature=0.5, seed=seed), frozenset()) for seed, prompt in enumerate(PROMPTS)
    ]
    if mode == "greedy":
        truth = greedy_texts(target, PROMPTS, 14)
    else:
        truth = [SpeculativeDecoder(target).serve([request], 1, mode=mode)[0].tokens for request in requests]
    order = itertools.cycle(map(StepSize, (1, 8, 12, 8, 12, 1)))
    chosen, shapes = [], []

    def choose(sizes, most):
        assert most is None
        chosen.append(next(order))
        return chosen[-1]

    monkeypatch.setattr(StaticBudget, "choose", choose)
    drafter = drafter_of(target)
    absorb = drafter.absorb

    def absorbed(state, verdict, tree, features):
        shapes.append(tree.tokens.shape[1])
        absorb(state, verdict, tree, features)

    drafter.absorb = absorbed
    decoder = SpeculativeDecoder(target, drafter, static=True)
    counted = []
    for batch in (1, 3):
        drafted = {}

        def on_step(number, result, drafted=drafted):
            drafted.setdefault(number, []).append(result.drafted)

        results = decoder.serve(requests, batch, mode=mode, on_step=on_step)
        counted += [[b - a for a, b in itertools.pairwise(each)] for each in drafted.values()]
        assert [result.tokens for result in results] == truth
        assert any(count > 1 for result in results for count in result.accepted)
    step = decoder._step
    assert {choice.nodes for choice in chosen} == {1, 8, 12}
    if target.device.type == "cuda":
        assert {choice.nodes for _, choice in step._graphs} == {1, 8, 12} and "cuda graph" in decoder.execution
    else:
        assert shapes == [choice.nodes for choice in chosen]
    assert (
        all(0 < (times.shortest or 0) < 60 for times in step.static_budget.seconds.values())
        and len(step.static_budget.seconds) == 3
    )
    assert step.static_budget.sets[None].factor != 1.0, "what steps committed is recorded"
    assert {nodes for one in counted for nodes in one} == {0, 7, 11}, "proposed nodes are counted"


def test_trees_of_each_size(make_target):
    """The likeliest paths, and the sums of their acceptance probabilities."""
    decoder = SpeculativeDecoder(target := make_target("llama"), drafter_of(target), static=True)
    decoder.generate([[5]], 40, stop_ids=frozenset())
    known = decoder._step.static_budget.sets[None]
    assert known.choices == [StepSize(1), StepSize(8), StepSize(12)]
    # 1, the seven likeliest paths: .6 .3 .2 .2 .1 .1 .1, all.
    assert known.expected == pytest.approx([1.0, 2.6, 2.74], abs=1e-3)


@pytest.mark.parametrize("mode", ["mss", "typical"])
def test_other_modes_have_one_size(make_target, mode):
    """A seed's text must not depend on what steps cost."""
    decoder = SpeculativeDecoder(target := make_target("llama"), drafter_of(target), static=True)
    decoder.generate([[5, 6]], 4, mode=mode, sampling=Sampling(seed=1))
    assert decoder._step.static_budget is None and decoder._step.budget is None and decoder._step.choice == WHOLE


def test_all_nodes_can_be_asked_for(target, drafter):
    for all_nodes in (True, False):
        _, loaded = load_drafter(str(drafter), target=target, all_nodes=all_nodes)
        assert (loaded.costs is None) == (loaded.clock is None) == all_nodes
        decoder = SpeculativeDecoder(target, loaded, static=True)
        (result,) = decoder.generate([[5, 6]], 8, stop_ids=frozenset())
        assert not all_nodes or (decoder._step.static_budget is None and result.drafted == 5 * len(result.accepted))


def test_observed_steps_have_all_nodes(make_target):
    """They are not timed, and must not be left at the first size."""
    decoder = SpeculativeDecoder(target := make_target("llama"), drafter_of(target), static=True)
    (result,) = decoder.generate([[5, 6]], 12, stop_ids=frozenset(), observe=lambda *_: None)
    assert result.drafted == 11 * len(result.accepted) and all(
        each.shortest is None for each in decoder._step.static_budget.seconds.values()
    )


class Static:
    """Static steps of synthetic times: so many drafts are accepted on average, by the drafters that are asked, and 1.3
    times as many are estimated; the host reads a step after it has chosen the next one."""

    def __init__(self, seconds, seed=0):
        self.seconds, self.rng = seconds, random.Random(seed)
        counts = {}
        for choice in seconds:
            if choice != ROOT:
                counts.setdefault(choice.alone, [1]).append(choice.nodes)
        self.sizes, self.counts, self.unread = StaticBudget(counts), counts, None
        self.chosen, self.time, self.tokens = [], 0.0, 0

    def run(self, accepted, steps):
        """Returns the choices of these steps."""
        for _ in range(steps):
            choice = self.sizes.choose()
            self.chosen.append(choice)
            if self.unread:
                self.sizes.timed(*self.unread[0])
                self.sizes.committed(*self.unread[1])
            tokens, expected = 1, []
            if choice != ROOT:
                mean = accepted[choice.alone]
                while self.rng.random() < mean / (1 + mean):
                    tokens += 1
                expected = [1.0, *(1 + 1.3 * mean * (1 - 1 / count) for count in self.counts[choice.alone][1:])]
            seconds = self.seconds[choice] * self.rng.uniform(1, 1.02)
            self.unread = (choice, seconds), (choice, [tokens, 0, -1], [expected] * 3)
            self.time, self.tokens = self.time + seconds, self.tokens + tokens
        return self.chosen[-steps:]


@pytest.mark.parametrize(("share", "best"), [(0.0, 1), (0.5, 8), (1.6, 64)])
def test_the_size_with_the_most_tokens_per_second(share, best):
    """Drafts are accepted ``share`` times as often as estimated; at 0 hardly any step drafts."""
    expected = {1: 1.0, 8: 1.7, 64: 2.4}
    sizes, rng = StaticBudget(list(expected)), random.Random(0)
    chosen = []
    for _ in range(4000):
        choice = sizes.choose()
        sizes.timed(choice, {1: 1.0, 8: 1.1, 64: 1.6}[choice.nodes] * rng.uniform(1, 1.02))
        mean = share * (expected[choice.nodes] - 1)
        draws = [1 + int(mean) + (rng.random() < mean % 1) for _ in range(2)]
        sizes.committed(choice, [*draws, 0, -1], [list(expected.values())] * 4)
        chosen.append(choice.nodes)
    assert chosen[: 2 * FEWEST] == [1] * FEWEST + [8] * FEWEST, "each set of drafters is timed"
    late = chosen[1000:]
    assert late.count(best) > 0.8 * len(late)
    assert sizes.sets[None].factor == pytest.approx(share, abs=0.3)
    if best == 1:
        assert late.count(8) == pytest.approx(len(late) / (RETRY + 1), abs=3)
        assert late.count(64) == 0, "what takes at least as long as 8 nodes cannot pay either"
    else:
        assert 0 < late.count(1) < len(late) / RETRY


# Times of an H200 in steps of the root alone: heads (0), n-grams (1), and both.
OF_SIZE = {
    ROOT: 1.0,
    **{StepSize(nodes): seconds for nodes, seconds in ((8, 1.62), (16, 1.66), (32, 1.7), (40, 1.72))},
    **{StepSize(nodes, 0): seconds for nodes, seconds in ((8, 1.25), (16, 1.27), (32, 1.3))},
    **{StepSize(nodes, 1): seconds for nodes, seconds in ((8, 1.2), (16, 1.22))},
}


@pytest.mark.parametrize("seed", range(3))
def test_a_merge_leaves_out_the_drafter_that_costs_more_than_it_brings(seed):
    """And asks it again where it pays: alone where the other one then brings nothing, and both where both do."""
    merge = Static(OF_SIZE, seed)
    phases = (
        ({None: 1.25, 0: 1.2, 1: 0.1}, 0),  # n-grams bring nothing
        ({None: 5.0, 0: 1.2, 1: 5.0}, 1),  # a text is repeated
        ({None: 1.25, 0: 1.2, 1: 0.1}, 0),
        ({None: 4.0, 0: 1.2, 1: 1.5}, None),  # they complement one another
        ({None: 0.1, 0: 0.05, 1: 0.05}, "root"),  # nothing pays
        ({None: 1.25, 0: 1.2, 1: 0.1}, 0),
    )
    for accepted, best in phases:
        merge.run(accepted, 3000)
        late = merge.run(accepted, 800)
        used = ["root" if choice == ROOT else choice.alone for choice in late]
        assert used.count(best) > 0.9 * len(late), (best, Counter(late))


@pytest.mark.parametrize(
    ("accepted", "best"),
    [
        ({None: 1.25, 0: 1.2, 1: 0.1}, StepSize(32, 0)),
        ({None: 0.0, 0: 0.0, 1: 0.0}, ROOT),
        ({None: 0.3, 0: 0.1, 1: 0.1}, ROOT),
        ({None: 3.0, 0: 1.2, 1: 0.1}, StepSize(40)),
    ],
)
def test_trials_take_two_percent_of_the_time(accepted, best):
    """Beside the best choice in all steps, the first ones included; also where a drafter takes as long as ten steps."""
    for slow in (1.0, 6.0):
        slowed = [each for each in OF_SIZE if each.alone is None and each != ROOT and best != StepSize(40)]
        seconds = {each: time * (slow if each in slowed else 1.0) for each, time in OF_SIZE.items()}
        merge, alone = Static(seconds), Static(seconds)
        merge.run(accepted, 12000)
        alone.sizes.choose = lambda most=None: best
        alone.run(accepted, 12000)
        ratio = merge.tokens / merge.time / (alone.tokens / alone.time)
        assert 0.98 <= ratio <= 1.02, (slow, ratio, Counter(merge.chosen))


def test_ngrams_alone_are_hardly_slower_than_plain_decoding():
    steps = Static({ROOT: 1.0, StepSize(8): 1.2, StepSize(16): 1.22, StepSize(21): 1.24})
    steps.run({None: 0.05}, 12000)
    # A step takes 1 to 1.02: 1.01 on average.
    assert steps.tokens / steps.time * 1.01 > 0.98
    assert 100 < len(steps.chosen) - steps.chosen.count(ROOT) < 12000 / RETRY * 1.2


def test_no_choice_exceeds_the_bound():
    merge = Static(OF_SIZE)
    merge.run({None: 3.0, 0: 1.2, 1: 0.1}, 200)
    assert [merge.sizes.choose(most) for most in (1, 7)] == [ROOT] * 2
    assert all(merge.sizes.choose(16).nodes <= 16 for _ in range(300))


def test_a_size_that_was_slow_for_a_while_is_tried_again():
    """Its times were of long texts, or of a moment in which something else ran."""
    expected, chosen, sizes = {1: 1.0, 8: 1.7, 16: 2.4}, list[int](), StaticBudget([1, 8, 16])
    for step in range(1000):
        chosen.append((choice := sizes.choose()).nodes)
        sizes.timed(choice, {1: 1.0, 8: 1.1, 16: 1.2}[choice.nodes] * (3 if step < 40 and choice.nodes == 16 else 1))
        sizes.committed(choice, [1 + int(step % 10 < 10 * (expected[choice.nodes] - 1))], [list(expected.values())])
    first = 50 + chosen[50:].index(16)
    assert RETIMED < first < 2 * RETIMED and chosen[-500:].count(16) > 480


def test_times_follow_the_texts():
    """Steps take longer as texts grow, or as something else runs: the latest times count."""
    sizes = StaticBudget([1, 8])
    for nodes, seconds in ((1, 1.0), (1, 1.0), (1, 1.0), (8, 1.2), (8, 1.1), (8, 1.3)):
        assert sizes.choose() == StepSize(nodes)
        sizes.timed(StepSize(nodes), seconds)
        sizes.committed(StepSize(nodes), [2], [[1.0, 1.6]])
    assert sizes.choose() == StepSize(8)
    for _ in range(LATEST_OF_SIZE):
        sizes.timed(StepSize(8), 3.0)
    assert sizes.seconds[StepSize(8)].shortest == 3.0 and sizes.choose() == ROOT
    sizes.steps += RETRY + 1
    sizes.timed(StepSize(8), 5.0)  # times from before a break count no more
    assert sizes.seconds[StepSize(8)].shortest == 5.0


def test_the_factor_stays_in_its_range():
    sizes = StaticBudget([1, 4])
    known = sizes.sets[None]
    for _ in range(500):
        sizes.committed(StepSize(4), [4, 4], [[1.0, 1.5]] * 2)
    assert known.factor == 2.0
    for _ in range(500):
        sizes.committed(StepSize(4), [1], [[1.0, 1.5]])
    assert known.factor == pytest.approx(0, abs=1e-2)
    sizes.committed(ROOT, [9], [[1.0, 1.0]])
    sizes.committed(StepSize(4), [0, -1], [[1.0, 1.5]] * 2)
    assert known.factor == pytest.approx(0, abs=1e-2), "no text, or not finite"


def merge_of(target, kind, make_target, limit=40):
    """A drafter, and n-grams that match everywhere."""
    makers = {"heads": heads_of, "draft model": draft_model_of}
    first = makers[kind](target) if kind in makers else EagleDrafter(fitted(target, make_target), target, TREES[kind])
    return MergedDrafter({kind: first, "ngram": NgramDrafter(target, depth=4, min_match=1)}, target, limit)


@pytest.mark.parametrize("kind", ["heads", "draft model"])
def test_texts_do_not_depend_on_the_drafters_that_are_asked(make_target, monkeypatch, kind):
    chosen, rng = set(), random.Random(3)

    def choose(sizes, most):
        choice = rng.choice(sizes.choices)
        chosen.add(choice.alone if choice != ROOT else "root")
        return choice

    monkeypatch.setattr(StaticBudget, "choose", choose)

    def make(target):
        drafter = merge_of(target, kind, make_target)
        drafter.clock = StepClock()
        return drafter

    check_greedy(make_target, make, own=False)
    check_coupled(make_target, make, own=False)
    assert chosen == {None, 0, 1, "root"}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["heads", "draft model", *TREES])
def test_a_drafter_left_out_of_static_steps_keeps_up(make_target, monkeypatch, kind, rows):
    """It drafts afterwards what it drafts if it ran in all of them, other drafters' accepted nodes included."""
    target = phrases(make_target)
    trees = {}
    for lazy in (True, False):
        drafter, its, asked = merge_of(target, kind, make_target, 64), [], []
        for number, each in enumerate(drafter.drafters):

            def proposed(state, number=number, propose=each.propose, its=its, asked=asked):
                tree = propose(state)
                rows = zip(state.active.tolist(), tree.tokens.tolist(), tree.valid.tolist(), strict=True)
                tokens = [[t for t, valid in zip(*row, strict=True) if valid] for active, *row in rows if active]
                if asked[-1].alone in (None, number) and asked[-1] != ROOT:
                    its.append((number, state.length.tolist(), tokens))
                return tree

            each.propose = proposed
            if not lazy:
                each.skip = proposed
        drafter.clock = StepClock()
        rng = random.Random(5)

        def choose(sizes, most, asked=asked, rng=rng):
            asked.append(rng.choice((WHOLE, StepSize(0, 0), StepSize(0, 1), StepSize(0, 1), ROOT, ROOT)))
            return asked[-1]

        with monkeypatch.context() as patch:
            patch.setattr(StaticBudget, "choose", choose)
            patch.setattr(StaticBudget, "timed", lambda *_: None)
            patch.setattr(StaticBudget, "committed", lambda *_: None)
            requests = [Request(start, 50, stop_ids=frozenset()) for start in STARTS]
            SpeculativeDecoder(target, drafter, static=True).serve(requests, rows)
        trees[lazy] = its
    assert len(trees[True]) > 40 and trees[True] == trees[False]
    assert any(len(row) > 1 for number, _, tokens in trees[True] for row in tokens if number == 1)


def test_rates_of_a_calibrated_tree(make_target, tmp_path):
    target = make_target("llama")
    heads = drafter_of(target).heads
    candidates = [{"path": list(path), "rate": rate} for path, rate in zip(PATHS, RATES, strict=True)]
    for kept, known in ((candidates, True), (candidates[1:], False), (None, False)):
        tree = {"paths": [list(path) for path in PATHS], "calibration": {"candidates": kept}}
        (tmp_path / "tree.json").write_text(json.dumps(tree))
        part = open_drafter(tmp_path, heads.config.to_dict(), heads.state_dict(), tmp_path / "tree.json", False)
        drafter = part.build(target, {})
        assert (
            isinstance(drafter, MedusaDrafter)
            and drafter.has_acceptance == known
            and isinstance(drafter.tree, RankTree)
        )
        found = None if drafter.tree.acceptance is None else drafter.tree.acceptance[0].tolist()
        assert found == (pytest.approx([1.0, *RATES]) if known else None)


def test_errors_around_a_capture():
    """What a graph cannot hold is a reason to run steps eagerly; a device's error is not."""
    reasons = (
        "called a synchronizing CUDA operation",
        "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be …",
        "CUDA error: operation failed due to a previous error during capture",
    )
    for reason in reasons:
        assert why_no_graph(RuntimeError(reason)) == reason.splitlines()[0]
    for error in (
        RuntimeError("CUDA error: an illegal memory access was encountered\nduring graph capture"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError(""),
        torch.OutOfMemoryError("CUDA out of memory while capturing"),
    ):
        assert why_no_graph(error) is None
