"""What each family of drafters with a fixed tree (tree.json) is calibrated with.

A family is entered in :data:`CALIBRATIONS` under the ``drafter_type`` of its folders' config.json, by a function
``calibration(folder, config, weights) → Calibration``; its arguments are what
:func:`draftsmith.models.artifact.read_drafter` read. It raises FileNotFoundError or ValueError where something is
missing, damaged or does not fit. Of families that have none, only the target's steps are timed.

Shape letters: S sequences, T tokens, K depths, n drafters of an ensemble, A answers.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.dynaspec import read_parts
from draftsmith.inference.drafters.eagle import EagleDrafter, check_context, to_target
from draftsmith.inference.drafters.family import family_of
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.parallel_eagle import ParallelEagleDrafter
from draftsmith.inference.drafters.ssm import Ensemble, check_config, load_ensemble
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.measure.rollouts import BEST, Drafts, kept, open_eagle_drafts, record
from draftsmith.inference.measure.step_costs import StepCosts, draft_time
from draftsmith.inference.measure.tree_search import Candidate, ComparedTree, simulate_dynamic
from draftsmith.inference.measure.tree_statistics import (
    MAX_RANK,
    accuracy,
    block_choices,
    candidates,
    chained_ranks,
    eagle_choices,
    eagle_ranks,
    ensemble_facts,
    head_choices,
    matched_answers,
    next_token_ranks,
)
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import Confidence
from draftsmith.inference.verify.tree import Topology, chain
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.shortlist import DEPTHS, ShortlistHead
from draftsmith.models.target import Target

DEPTH = 8  # K: of the deepest tree of EAGLE drafters and SSMs


@dataclass(frozen=True)
class Calibration:
    """How a drafter with a fixed tree, or an ensemble whose n drafters have a tree each, is calibrated.

    max_depth: K, the depth of the deepest tree that the drafter can propose.
    ranks: (target, tokens ``[S, T]``, supervised ``[S, T]``) → ``[S, T, K]`` int64, of an ensemble ``[S, T, n, K]``: at
        each depth, the rank that the drafter gives to the true token after the true tokens before it.
        :func:`draftsmith.inference.measure.tree_statistics.draft_labels` and ``label_ranks`` help. For a drafter that
        proposes a single chain the rank is 0 or ``MAX_RANK``.
    facts: ranks ``[S, T, n, K]`` of all of the text → what tree.json records of them in ``calibration``; left out,
        :func:`draftsmith.inference.measure.tree_statistics.head_facts`.
    step_time: (target, step costs) → a function of the trees: the time of a step and its drafting, in plain steps of
        the target. For drafters whose every level takes a forward pass, so that less deep trees may be faster; left
        out, drafting takes the same time whatever the tree.
    decoding: (target, a fixed tree or the shape of a dynamic one) → the drafter that proposes all of its nodes; for a
        family whose drafters may grow dynamic trees, with passes of their own for each level.
    dynamic: (target, the fastest fixed tree, step costs) → dynamic trees beside it, on the text on which ``ranks`` were
        counted; for a family that drafts all levels of them in one pass.
    choices: of such a family, ``ranks`` and the log-probabilities of each depth's likeliest tokens ``[S, T, K, R]``.
    pass_time: (target, step costs) → the time in which such a family drafts all levels, in plain steps.
    widest: children of a node that the drafter can propose, at most.
    """

    max_depth: int
    ranks: Callable[[Target, Tensor, Tensor], Tensor]
    facts: Callable[[Tensor], dict[str, Any]] | None = None
    step_time: Callable[[Target, StepCosts], Callable[[Sequence[Topology]], float]] | None = None
    decoding: Callable[[Target, Topology | DynamicShape], Drafter] | None = None
    dynamic: Callable[[Target, Candidate, StepCosts], list[ComparedTree]] | None = None
    choices: Callable[[Target, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    pass_time: Callable[[Target, StepCosts], float] | None = None
    widest: int = MAX_RANK


def eagle(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], shortlist: ShortlistHead | None = None
) -> Calibration:
    """Its rank of the true token in each step of drafting, by its whole LM head; trees of up to eight levels."""
    layer = Eagle.from_artifact(config, weights, str(folder))
    if depth := min(DEPTH, layer.config.parallel):
        own = _of_one_pass(
            depth,
            lambda target, tokens, marks: eagle_choices(target, to_target(layer, target), tokens, marks, depth),
            lambda tree, target, confidence: ParallelEagleDrafter(layer, target, tree, confidence=confidence),
        )
        return replace(own, facts=depth_facts)
    drafters: list[EagleDrafter] = []

    def first(target: Target) -> EagleDrafter:
        if not drafters:
            check_context(layer, target, str(folder))
            drafters.append(EagleDrafter(layer, target, (1,), shortlist=shortlist))
        return drafters[0]

    def ranks(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
        return eagle_ranks(target, first(target).eagle, tokens, supervised, DEPTH)

    def facts(ranks: Tensor) -> dict[str, Any]:
        return {"accuracy_by_depth_and_rank": accuracy(ranks[:, :, 0])}

    def times(target: Target, costs: StepCosts) -> Callable[[Sequence[Topology]], float]:
        return costs.tree_time([draft_time(first(target).with_tree((1,)), target, costs)])

    def decoding(target: Target, tree: Topology | DynamicShape) -> Drafter:
        return first(target).with_tree(tree)

    return Calibration(DEPTH, ranks, facts, times, decoding)


def medusa(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Calibration:
    """Each head's rank of the true token, by its whole LM head; trees as deep as there are heads."""
    heads = MedusaHeads.from_artifact(config, weights, str(folder))
    return _of_one_pass(
        heads.config.num_draft_heads,
        lambda target, tokens, marks: head_choices(target, heads.to(target.device), tokens, marks),
        # A drafter casts its heads: copies.
        lambda tree, target, confidence: MedusaDrafter(deepcopy(heads), tree, target, confidence=confidence),
    )


def _of_one_pass(
    depth: int,
    choices: Callable[[Target, Tensor, Tensor], tuple[Tensor, Tensor]],
    drafter: Callable[[Topology | DynamicShape, Target, Confidence | None], Drafter],
) -> Calibration:
    """Of a drafter that drafts all levels in one pass. Dynamic trees are simulated on the ranks of the whole text,
    which are kept with the drafter's probabilities. ``choices``: (target, tokens, supervised) → both."""
    counted: list[tuple[Tensor, Tensor]] = []  # of each batch

    def ranks(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
        counted.append(choices(target, tokens, supervised))
        return counted[-1][0]

    def dynamic(target: Target, fixed: Candidate, costs: StepCosts) -> list[ComparedTree]:
        def drafting(shape: DynamicShape, confidence: Confidence) -> float:
            return draft_time(drafter(shape, target, confidence), target, costs)

        return simulate_dynamic(counted, fixed, costs, drafting)

    def pass_time(target: Target, costs: StepCosts) -> float:
        return draft_time(drafter(chain(depth), target, None), target, costs)

    return Calibration(depth, ranks, dynamic=dynamic, choices=choices, pass_time=pass_time)


def dflash(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Calibration:
    """The rank of the true token at each draft of a block, by the whole LM head; trees as deep as there are drafts."""
    made = DFlash.from_artifact(config, weights, str(folder))

    own = _of_one_pass(
        made.config.num_draft_heads,
        lambda target, tokens, marks: block_choices(target, made.to(target.device), tokens, marks),
        lambda tree, target, confidence: DFlashDrafter(deepcopy(made), tree, target, confidence=confidence),
    )
    return replace(own, facts=depth_facts)


def depth_facts(ranks: Tensor) -> dict[str, Any]:
    """What tree.json records of a drafter of one pass: the candidates of a merge, and the accuracy of each depth."""
    return {"candidates": candidates(ranks[:, :, 0]), "accuracy_by_depth_and_rank": accuracy(ranks[:, :, 0])}


def ssm(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Calibration:
    """Each SSM's rank of the true token, by its whole LM head; trees of up to eight levels."""
    check_config(folder, config, weights)
    opened: list[Ensemble] = []  # loaded with the first text
    matched: list[Tensor] = []  # [n, A] bool of each text

    def ranks(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
        if not opened:
            opened.append(load_ensemble(folder, config, weights, target))
        by_ssm = next_ranks(opened[0], tokens, supervised)
        matched.append(matched_answers(by_ssm, supervised, opened[0].mark_tokens))
        return torch.stack([chained_ranks(each, tokens, supervised, DEPTH) for each in by_ssm], 2)  # [S, T, n, K]

    def facts(ranks: Tensor) -> dict[str, Any]:
        return ensemble_facts(ranks, torch.cat(matched, 1), opened[0].mark_tokens)

    def step_time(target: Target, costs: StepCosts) -> Callable[[Sequence[Topology]], float]:
        return costs.tree_time([pass_time(opened[0], part, target, costs) for part in opened[0].models])

    return Calibration(DEPTH, ranks, facts, step_time)


def pass_time(ensemble: Ensemble, part: str, target: Target, costs: StepCosts) -> float:
    """Time of an SSM's forward pass with one row and the choice of its tokens, in plain steps of the target; measured
    for at most 0.1 s."""
    with engine_attention([ensemble.models[part]]):
        return draft_time(ensemble.drafter(part, target, (1,)), target, costs)


def next_ranks(ensemble: Ensemble, tokens: Tensor, supervised: Tensor) -> Tensor:
    """:func:`next_token_ranks` of each SSM, ``[n, S, T]``."""
    models = ensemble.models.values()
    return torch.stack([next_token_ranks(model, tokens, supervised, ensemble.draft_vocab) for model in models])


def dynaspec(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Calibration:
    """The drafter's own, decoding with the shortlists; a rank is that within the node's own list. Trees of up to
    :data:`DEPTHS` levels."""
    shortlist, base = read_parts(folder, config, weights)
    own = eagle(*base, shortlist=shortlist)
    opened: list[Drafts] = []

    def ranks(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
        if not opened:
            opened.append(open_eagle_drafts(*base, target))
            shortlist.to(target.device)
        recorded = record(opened[0], tokens, supervised, BEST, low_rank=shortlist.low_rank)
        found = kept(recorded, opened[0].embed, shortlist).ranks
        # A tree may have no more children of a node than the shortest list has tokens.
        return found.masked_fill(found >= shortlist.config.fewest, MAX_RANK)

    return replace(own, max_depth=min(own.max_depth, DEPTHS), ranks=ranks, widest=shortlist.config.fewest)


CALIBRATIONS: dict[str, Callable[[Path, dict[str, Any], dict[str, Tensor]], Calibration]] = {
    "dflash": dflash,
    "dynaspec": dynaspec,
    "eagle": eagle,
    "medusa": medusa,
    "ssm": ssm,
}


def calibration_of(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Calibration | None:
    """What a drafter is calibrated with; None if its family has no tree. Raises ValueError: its type is not known."""
    family_of(folder, config)
    calibration = CALIBRATIONS.get(config["drafter_type"])
    return None if calibration is None else calibration(folder, config, weights)
