"""Every drafter through the checks of tests/shared/lossless_suite.py: what is decoded is the target's own text, and in
multi-step sampling has its distribution. The files beside this one test what each drafter proposes."""

import gc
from functools import partial as of

import lossless_suite as suite
import pytest
import torch
from blocks import fitted_block
from eagles import TREES, fitted, untrained
from tiny_models import SPARSE, noisy_heads, perturbed, random_shortlists, random_starts, some_ids

from draftsmith.inference.drafters import compressed as compression
from draftsmith.inference.drafters.compressed import CompressedDrafter, Selector
from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.parallel_eagle import ParallelEagleDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.step import Step
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.shortlist import ShortlistConfig, budget

TREE = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)))
ACCEPTANCES = (0.6, 0.4, 0.25, 0.1, 0.2, 0.1)  # of the paths, in order
COSTS = StepCosts({1: 1.0, 8: 1.4, 32: 3.0})


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Compressed caches of short texts: few observed queries, and selections that are made anew after few tokens."""
    monkeypatch.setitem(compression.OBSERVED, "snapkv", 4)
    monkeypatch.setattr(compression, "APPENDED", 9)


# ---- makers: (make_target, target, …) → drafter


def ngram(_, target, depth=3, **options):
    return NgramDrafter(target, depth=depth, min_match=1, **options)


def heads(_, target, ids=False):
    places = torch.arange(0, target.vocab_size, 2)
    if ids:
        return MedusaDrafter(noisy_heads(target, 0.1, "shared", seed=2, ids=places), TREE, target)
    return MedusaDrafter(noisy_heads(target, 0.02), TREE, target, ACCEPTANCES)


def likely_heads(_, target, ids=False):
    """In dynamic trees."""
    places = torch.arange(0, target.vocab_size, 2)
    made = noisy_heads(target, 0.1, "shared", seed=2, ids=places) if ids else noisy_heads(target, 0.02)
    return MedusaDrafter(made, DynamicShape(2, 3, 10), target)


def block(make_target, target, ids=False, dynamic=False):
    tree = (DynamicShape(2, 3, 10), target) if dynamic else (TREE, target, ACCEPTANCES)
    return DFlashDrafter(fitted_block(target, make_target, ids), *tree)


def model(_, target, tree=(2, 1, 1), noise=0.04, vocabulary=0, ids=False, **options):
    ssm = perturbed(target, noise, vocabulary)
    return DraftModelDrafter(ssm, target, tree, draft_vocab=some_ids(target) if ids else None, **options)


def eagle(make_target, target, tree="sparse", kind="eagle3", ids=False, entries=0):
    selector = Selector("streamingllm", entries) if entries else None
    return EagleDrafter(fitted(target, make_target, kind, ids), target, TREES[tree], selector=selector)


def one_pass(make_target, target, tree="sparse", ids=False):
    return ParallelEagleDrafter(fitted(target, make_target, "parallel", ids), target, TREES[tree])


def small_eagle(_, target, tree, kind="eagle3", ids=False, draws="without_replacement", lists=None):
    """With random weights; ``lists``: of the suite's small vocabulary, of three clusters."""
    made = untrained(target, kind, ids)
    if lists is None:
        return EagleDrafter(made, target, tree, draws=draws)
    outputs = made.config.outputs
    if "clusters" in lists:
        lists = {"num_clusters": 3, "router_width": 4, "embedding_size": 32, "feature_size": 32} | lists
    shortlist = random_shortlists(ShortlistConfig(outputs=outputs, **lists), [0, 1, 3 if outputs > 3 else 2, outputs])
    return EagleDrafter(made, target, tree, draws=draws, shortlist=shortlist)


def listed_eagle(make_target, target, tree="sparse", kind="dynaspec", schedule="fixed", ids=False):
    """With shortlists of half of the vocabulary."""
    made = fitted(target, make_target, "eagle3", ids)
    outputs = made.config.outputs
    few = target.vocab_size == suite.SMALL
    starts = [0, 1, 2, outputs] if few else random_starts(9, outputs)
    fields = {"capacity": tuple(max(3, tokens) for tokens in budget(outputs // 2, schedule))}
    if kind == "dynaspec":
        fields |= {"clusters": budget(2 if few else 5, schedule), "num_clusters": len(starts) - 1, "router_width": 8}
        fields |= {"embedding_size": target.hidden_size, "feature_size": made.config.hidden_size}
    shortlist = random_shortlists(ShortlistConfig(kind, outputs, **fields), starts)
    return EagleDrafter(made, target, TREES[tree], shortlist=shortlist)


def compressed(_, target, name="snapkv", entries=9, tree=(1, 1, 1), own=True):
    if own:
        return CompressedDrafter(target, Selector(name, entries), tree)
    return DraftModelDrafter(target, target, tree, selector=Selector(name, entries))


def merged(*members, nodes=40, costs=None):
    def make(make_target, target):
        made = {
            f"{member.func.__name__}-{number}": member(make_target, target) for number, member in enumerate(members)
        }
        drafter = MergedDrafter(made, target, nodes)
        drafter.costs, drafter.chooses = costs, costs is not None
        return drafter

    return make


# ---- the same texts as plain decoding: greedily, and in coupled sampling

GREEDY, COUPLED, APART, SEEDS, WARM_UP, STATIC = "greedy", "coupled", "apart", "seeds", "warm_up", "static"
ALL = (STATIC, WARM_UP, COUPLED, APART, SEEDS, GREEDY)
HEADS, MODEL, DEEPER, NGRAM = of(heads), of(model), of(eagle, tree="chain", kind="eagle1"), of(ngram, depth=4)
EXACT = {
    "n-grams": (NGRAM, ALL),
    "heads of a draft vocabulary": (of(heads, ids=True), (COUPLED, APART)),
    "heads in dynamic trees": (of(likely_heads), (STATIC, WARM_UP, COUPLED, APART)),
    "a draft model's chain": (of(model, tree=(1, 1, 1, 1), noise=0.1), (APART, GREEDY)),
    "a draft model's tree": (of(model, tree=SPARSE, noise=0.1), ALL),
    "a draft model of a draft vocabulary": (of(model, tree=SPARSE, ids=True), (GREEDY, COUPLED)),
    "EAGLE-1": (DEEPER, (STATIC, COUPLED, GREEDY)),
    "EAGLE-3": (of(eagle, ids=True), ALL),
    "EAGLE-3's dynamic tree": (of(eagle, tree="dynamic"), ALL),
    "EAGLE-3 over a window": (of(eagle, entries=12), (STATIC, COUPLED, GREEDY)),
    "EAGLE-3's dynamic tree over a window": (of(eagle, tree="dynamic", entries=12), (WARM_UP, GREEDY)),
    "P-EAGLE": (of(one_pass, ids=True), ALL),
    "P-EAGLE's dynamic tree": (of(one_pass, tree="dynamic"), (STATIC, COUPLED, GREEDY)),
    "P-EAGLE and n-grams": (merged(of(one_pass, tree="dynamic"), of(ngram)), (COUPLED, GREEDY)),
    "DFlash": (of(block, ids=True), ALL),
    "DFlash's dynamic tree": (of(block, dynamic=True), (STATIC, COUPLED, GREEDY)),
    "FR-Spec": (of(listed_eagle, kind="fr_spec", schedule="position_aware"), (COUPLED,)),
    "DynaSpec": (of(listed_eagle, ids=True), ALL),
    "DynaSpec, dynamic": (of(listed_eagle, tree="dynamic"), (COUPLED,)),
    "snapkv": (of(compressed), ALL),
    "streamingllm": (of(compressed, name="streamingllm"), (STATIC, WARM_UP, GREEDY)),
    "topk": (of(compressed, name="topk"), (WARM_UP, SEEDS, GREEDY)),  # it selects in each step, by the host
    "snapkv of a draft model": (of(compressed, own=False), (STATIC, COUPLED, APART, GREEDY)),
    "streamingllm of a draft model": (of(compressed, name="streamingllm", own=False), (GREEDY,)),
    "topk of a draft model": (of(compressed, name="topk", own=False), (COUPLED, APART)),
    "heads and n-grams": (merged(HEADS, of(ngram)), (STATIC, COUPLED, SEEDS)),
    "heads in dynamic trees and n-grams": (merged(of(likely_heads), of(ngram)), (STATIC, COUPLED, GREEDY)),
    "a draft model and n-grams": (merged(MODEL, of(ngram)), ALL),
    "DFlash and n-grams": (merged(of(block), of(ngram)), (GREEDY, COUPLED)),
    "DFlash and EAGLE-1": (merged(of(block), DEEPER), (COUPLED,)),
    "P-EAGLE and EAGLE-1": (merged(of(one_pass, tree="dynamic"), DEEPER), (GREEDY, COUPLED)),
    "two EAGLEs": (merged(of(eagle), DEEPER, nodes=24), (WARM_UP, GREEDY)),
}  # fmt: skip
# Whose trees are cut for a whole batch, or depend on its costs.
BY_BATCH = {
    "EAGLEs and n-grams": (merged(of(eagle), DEEPER, NGRAM, nodes=24), (GREEDY, APART, COUPLED)),
    "a dynamic EAGLE and n-grams": (merged(of(eagle, tree="dynamic"), DEEPER, NGRAM, nodes=24), (GREEDY, COUPLED)),
    "a compressed cache and n-grams": (merged(of(compressed, tree=(1, 1)), of(ngram), nodes=24), (GREEDY,)),
    "a compressed draft model and n-grams": (merged(of(compressed, own=False), of(ngram), nodes=24), (GREEDY,)),
    "heads and n-grams by cost": (merged(HEADS, of(ngram, depth=5), nodes=12, costs=COSTS), (GREEDY, COUPLED)),
    # Fewer nodes than the draft model's own tree has, which its cache must hold.
    "a draft model and n-grams by cost": (merged(MODEL, of(ngram), nodes=4, costs=COSTS), (GREEDY, COUPLED)),
}
CASES = [(name, check) for name, (_, checks) in (EXACT | BY_BATCH).items() for check in checks]
DEPTHS = {"n-grams": 4, "a draft model's chain": 4, "a draft model's tree": 3, "EAGLE-1": 3, "EAGLE-3": 3, "DFlash": 3}


@pytest.mark.parametrize("name, check", CASES)
def test_texts_are_those_of_plain_decoding(make_target, name, check):
    """Greedily and in coupled sampling; paths of every length are accepted."""
    maker, _ = (EXACT | BY_BATCH)[name]
    options = {"own": name in EXACT} if check in (GREEDY, COUPLED, APART) else {}
    found = getattr(suite, f"check_{check}")(make_target, of(maker, make_target), **options)
    assert check != GREEDY or name not in DEPTHS or set(found) == set(range(1, DEPTHS[name] + 2)), found


KINDS = (
    "n-grams",
    "heads of a draft vocabulary",
    "a draft model's tree",
    "EAGLE-1",
    "EAGLE-3's dynamic tree",
    "DynaSpec",
)


@pytest.mark.parametrize("name", [*KINDS, "snapkv", "heads and n-grams", "heads and n-grams by cost"])
def test_logprobs_are_those_of_the_target_alone(make_target, name):
    """Of each kind of drafter, and of merges."""
    maker, _ = (EXACT | BY_BATCH)[name]
    suite.check_logprobs(make_target, of(maker, make_target))


# ---- the target's distribution

LISTS = {
    "static": {"shortlist": "fr_spec", "capacity": (4, 2, 1)},
    "routed": {"shortlist": "dynaspec", "capacity": (3,), "clusters": (2,)},
    "by depth": {"shortlist": "dynaspec", "capacity": (3, 2), "clusters": (2, 1)},
    "low rank": {"shortlist": "low_rank", "capacity": (2,), "rank": 3, "feature_size": 32},
}
# The drafter, the sampling parameters, whether steps are static.
SAMPLED = {
    "n-grams, static": (of(ngram), "plain", True),
    "n-grams": (of(ngram), "cut", False),
    "heads of a draft vocabulary": (of(heads, ids=True), "cut", False),
    "heads in dynamic trees": (of(likely_heads, ids=True), "cut", True),
    "a draft model's chain": (of(model, tree=(1, 1, 1, 1)), "cut", False),
    "a draft model of a draft vocabulary": (of(model, tree=SPARSE, ids=True), "cut", False),
    "a draft model of more tokens": (of(model, tree=(2, 1), vocabulary=7), "plain", False),
    "a draft model of fewer tokens": (of(model, tree=(2, 1), vocabulary=4), "plain", False),
    "i.i.d., distinct and naive draws": (
        merged(of(model, tree=SPARSE, ids=True, draws="iid"), of(model, tree=(2, 1), noise=0.06),
               of(model, tree=(2,), noise=0.03, draws="naive")), "plain", False
    ),
    "EAGLE-3": (of(small_eagle, tree=SPARSE, ids=True), "cut", False),
    "EAGLE-3, i.i.d.": (of(small_eagle, tree=SPARSE, kind="normed", ids=True, draws="iid"), "plain", True),
    "EAGLE-3, naive": (of(small_eagle, tree=(3, 1), draws="naive"), "cut", False),
    "EAGLE-3, one-hot": (of(small_eagle, tree=SPARSE, kind="shared", ids=True, draws="none"), "cut", False),
    "EAGLE-1": (of(small_eagle, tree=(1, 1, 1), kind="eagle1"), "cut", False),
    "EAGLE-3's dynamic tree": (of(small_eagle, tree=DynamicShape(3, 3, 9), ids=True), "plain", True),
    "P-EAGLE": (of(one_pass), "cut", False),
    "DFlash": (of(block), "cut", False),
    "DFlash's dynamic tree": (of(block, ids=True, dynamic=True), "plain", True),
    "EAGLE-3 and n-grams": (merged(of(small_eagle, tree=(2,)), of(ngram, depth=1), nodes=8), "plain", False),
    "FR-Spec": (of(small_eagle, tree=(1, 1, 1), ids=True, lists=LISTS["static"]), "cut", False),
    "DynaSpec": (of(small_eagle, tree=(2, 1), lists=LISTS["routed"]), "plain", True),
    "DynaSpec, i.i.d.": (of(small_eagle, tree=(2, 2), draws="iid", lists=LISTS["by depth"]), "plain", False),
    "low rank": (of(small_eagle, tree=(2, 1), lists=LISTS["low rank"]), "plain", True),
    "DynaSpec and n-grams": (
        merged(of(small_eagle, tree=(2, 1), lists=LISTS["routed"]), of(ngram, depth=2), nodes=12), "plain", False
    ),
    "a compressed cache": (of(compressed, entries=6, tree=(2,)), "plain", False),
    "heads and n-grams": (merged(HEADS, of(ngram)), "plain", True),
    "a draft model and n-grams": (merged(of(model, noise=0.02), of(ngram)), "plain", False),
}  # fmt: skip


# Of a kind of draws, with a drafter of another kind; make test-more.
FURTHER = {
    "heads of a draft vocabulary", "a draft model of more tokens", "a draft model of fewer tokens", "EAGLE-1",
    "P-EAGLE", "DFlash", "EAGLE-3 and n-grams", "FR-Spec", "DynaSpec, i.i.d.", "DynaSpec and n-grams", "low rank",
    "a compressed cache",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.whole_runs] * (n in FURTHER)) for n in SAMPLED])
def test_texts_have_the_targets_distribution(make_target, name):
    """In multi-step sampling, of several steps jointly."""
    maker, sampling, static = SAMPLED[name]
    suite.check_sampling(make_target, of(maker, make_target), sampling, static=static, count=4000, rows=4000)


# ---- memory


def bytes_of_tensors():
    """Of all that are alive, each storage once."""
    gc.collect()
    alive = (each.untyped_storage() for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    return sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())


WITH_CACHES = {
    "a draft model": of(model), "EAGLE-3": of(eagle), "DFlash": of(block), "a compressed cache": of(compressed),
    "a draft model and n-grams": merged(of(model), of(ngram)),
}  # fmt: skip


@pytest.mark.parametrize("maker", WITH_CACHES.values(), ids=WITH_CACHES)
def test_caches_are_freed_before_larger_ones(make_target, maker, monkeypatch):
    """The drafter's too, by a call with more texts and by free()."""
    before, make = [], Step.__init__
    monkeypatch.setattr(
        Step, "__init__", lambda *a, **options: before.append(bytes_of_tensors()) or make(*a, **options)
    )
    target = make_target("llama")
    decoder = SpeculativeDecoder(target, maker(make_target, target))
    before.clear()  # drafters that are fitted first
    for rows in (20, 40):
        decoder.generate([[5, 7, 11]] * rows, 3)
    full = bytes_of_tensors()
    decoder.free()
    assert len(before) == 2 and full - before[0] > 20 * 256 * target.hidden_size * 4
    assert max(before[1], bytes_of_tensors()) - before[0] < 0.1 * (full - before[0])
