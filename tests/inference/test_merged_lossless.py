"""Merges of all kinds of drafters, through the checks of every drafter."""

import copy

import lossless_suite
import pytest
import torch
from lossless_suite import check_greedy, check_sampling, check_seeds, check_static, check_warm_up

from draftsmith.inference.costs import StepCosts
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.tree import Topology
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target

COSTS = StepCosts({1: 1.0, 8: 1.4, 32: 3.0})
TREE = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)))
ACCEPTANCES = (0.6, 0.4, 0.25, 0.1, 0.2, 0.1)  # of the paths, in order


def heads(target: Target, costs: StepCosts | None) -> MedusaDrafter:
    torch.manual_seed(1)
    found = MedusaHeads.for_target(target, 3, 1, "own")
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.device) * 0.02)
    return MedusaDrafter(found, TREE, target, ACCEPTANCES, costs, None if costs is None else 0.05)


def draft_model(target: Target, seed: int, expansion: list[int]) -> DraftModelDrafter:
    model = copy.deepcopy(target.model)
    noise = 4.0 if target.vocab_size == lossless_suite.SMALL else 0.04
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_((torch.randn(weight.shape, generator=generator) * noise * weight.cpu().std()).to(weight.device))
    return DraftModelDrafter(Target(model, None, "draft", ""), target, expansion)


def merge(kind: str, costs: StepCosts | None = None, nodes: int = 40):
    def make(target: Target) -> MergedDrafter:
        ngram = NgramDrafter(target, depth=3, min_match=1, costs=costs)
        members = {
            "heads and n-grams": lambda: {"heads": heads(target, costs), "ngram": ngram},
            "a draft model and n-grams": lambda: {"draft": draft_model(target, 1, [2, 1, 1]), "ngram": ngram},
            "two draft models": lambda: {
                "draft": draft_model(target, 1, [1, 1, 1]), "another": draft_model(target, 2, [2, 1]),
            },
        }  # fmt: skip
        return MergedDrafter(members[kind](), target, nodes, costs)

    return make


KINDS = ("heads and n-grams", "a draft model and n-grams", "two draft models")


@pytest.mark.parametrize("kind", KINDS)
def test_lossless(make_target, kind):
    check_static(make_target, merge(kind))
    check_warm_up(make_target, merge(kind))
    check_greedy(make_target, merge(kind))
    check_seeds(make_target, merge(kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [False, True])
def test_lossless_sampling(make_target, kind, static):
    """Several steps jointly; eagerly, nodes are chosen by cost."""
    check_sampling(make_target, merge(kind, None if static else COSTS), static=static, count=6000, rows=6000)


def test_lossless_by_cost(make_target):
    """Trees limited by cost, and heads that run only where they pay."""

    def deeper(target):  # than the heads, which draft three tokens
        ngram = NgramDrafter(target, depth=5, min_match=1, costs=COSTS)
        return MergedDrafter({"heads": heads(target, COSTS), "ngram": ngram}, target, 12, COSTS)

    check_greedy(make_target, deeper, own=False)
    # 4 nodes are fewer than the draft model's own tree has, which its cache must hold.
    check_greedy(make_target, merge("a draft model and n-grams", COSTS, 4), own=False)
