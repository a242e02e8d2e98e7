"""The kernels that a step launches: Triton's, and PyTorch's operations that are no views and no allocations."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from launches import Launches

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.engine.static_budget import ROOT, WHOLE, StepSize
from draftsmith.inference.measure.step_costs import StepClock
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads

pytestmark = pytest.mark.usefixtures("as_users_run_it")  # new tensors that are filled would count
TREE = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (2,)))


def medusa(target):
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    return MedusaDrafter(heads, TREE, target)


def step_launches(target, drafter, mode="greedy", choice=WHOLE):
    decoder = SpeculativeDecoder(target, drafter, static=True)
    decoder.generate([[1, 2, 3], [4, 5]], 2, mode=mode)
    step = decoder._step
    assert "lean decoder" in decoder.execution
    with torch.inference_mode(), engine_attention([target]):
        step.active.fill_(True)
        step.cache.lengths.fill_(5)
        step.choice = choice
        step.run()  # what it makes once
        launches = Launches()
        with launches.counting():
            step.run()
    return launches.seen


@pytest.fixture
def of_layers(make_target, on):
    """A target of so many layers, where the kernels run."""
    return lambda count: on(make_target("llama", num_hidden_layers=count))


@pytest.mark.parametrize(
    ("drafter", "mode", "folds", "most"),
    [
        (None, "greedy", True, 27),
        (None, "greedy", False, 27),
        (medusa, "greedy", False, 27),
        (medusa, "mss", False, 27),
        (medusa, "sample", False, 23),
    ],
)
def test_launches_of_a_step(of_layers, request, drafter, mode, folds, most):
    """At most 10 kernels a layer, 7 in folded forms, and 27 around the layers; 23 in coupled sampling."""
    if folds:
        request.getfixturevalue("folded")
    few, many = (step_launches(target, drafter and drafter(target), mode) for target in map(of_layers, (1, 2)))
    per_layer = {name: many[name] - few[name] for name in many}
    around = {name: few[name] - per_layer.get(name, 0) for name in few}
    print(f"launches of a {'folded ' * folds}layer: {sum(per_layer.values()):g}, around: {sum(around.values()):g}")
    print({name: count for name, count in per_layer.items() if count})
    print({name: count for name, count in around.items() if count})
    assert per_layer["_tree_attention_kernel"] == 1  # it is being counted
    assert not folds or per_layer["_few_rows_kernel"] == 4
    assert sum(per_layer.values()) <= (7 if folds else 10)
    assert sum(around.values()) <= most


def merge(target):
    drafters = {"heads": medusa_of_rates(target), "ngram": NgramDrafter(target)}
    return choosing(MergedDrafter(drafters, target, 8))


def medusa_of_rates(target):
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    return choosing(MedusaDrafter(heads, TREE, target, [0.6, 0.4, 0.2, 0.1, 0.3, 0.1, 0.1]))


def choosing(drafter):
    drafter.clock = StepClock()
    return drafter


@pytest.mark.parametrize("mode", ["greedy", "sample"])
@pytest.mark.parametrize(
    ("drafter", "choice", "than", "most"),
    [
        (lambda target: choosing(NgramDrafter(target)), ROOT, (lambda target: None, WHOLE), 2),
        (merge, ROOT, (lambda target: None, WHOLE), 2),
        (merge, StepSize(8, 0), (medusa_of_rates, StepSize(8)), 5),
        (merge, StepSize(5, 0), (medusa_of_rates, StepSize(5)), 5),
        (medusa_of_rates, StepSize(5), (medusa, WHOLE), 4),
    ],
)
def test_what_is_left_out_launches_next_to_nothing(of_layers, drafter, choice, than, most, mode):
    """Of a drafter that a step does not ask, and of nodes whose probabilities never change: the token of the root is
    kept, the accepted ones are, and counts are written."""
    target = of_layers(1)
    launches = step_launches(target, drafter(target), mode, choice)
    without = step_launches(target, than[0](target), mode, than[1])
    more = Counter(launches)
    more.subtract(without)
    print(f"launches more: {sum(more.values())}", {name: count for name, count in more.items() if count})
    assert sum(more.values()) <= most


def eagle(target, tree, version=3, ids=None):
    torch.manual_seed(0)
    module = Eagle.for_target(target, version, "own" if version == 3 else "shared", None if ids is None else len(ids))
    if ids is not None:
        module.draft_from(ids, target)
    return EagleDrafter(module, target, tree)


def eagle_1(target, tree):
    return eagle(target, tree, 1)


def eagle_of_some_tokens(target, tree):
    return eagle(target, tree, 3, torch.arange(0, 61, 2))


def ssm(target, tree):
    return DraftModelDrafter(target, target, tree)


@pytest.mark.parametrize(
    ("drafter", "most", "tree"),
    [
        (eagle, 12, (1, 1)),
        (eagle, 13, DynamicShape(2, 2, 6)),
        (eagle_of_some_tokens, 12, (2, 2)),
        (eagle_1, 12, (2, 2)),
        (ssm, 15, (2, 2)),
    ],
)
def test_launches_of_a_level(of_layers, folded, drafter, most, tree):
    """Of one more level of a tree, with the layer that is run, in forms that do what stands around them."""
    target = of_layers(1)
    deeper = replace(tree, depth=tree.depth + 1) if isinstance(tree, DynamicShape) else (*tree, 1)
    few, many = (step_launches(target, drafter(target, of)) for of in (tree, deeper))
    print(f"launches of a step: {sum(few.values())}, {dict(few)}")
    level = {name: many[name] - few[name] for name in many if many[name] - few[name]}
    print(f"launches of a level: {sum(level.values())}")
    print(level)
    assert level["_tree_attention_kernel"] == 1  # it is being counted
    assert sum(level.values()) <= most
