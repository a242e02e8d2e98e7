"""Drafters by name: ``none``, a folder or Hub id, ``ngram``, ``draft_model:PATH``, and several joined by ``+``."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.inference.costs import StepCosts, draft_time, step_costs
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.options import parts_of
from draftsmith.inference.step import Drafter
from draftsmith.inference.tree import Topology, read_candidates, read_tree
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import read_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target, load_target

NODES = 40  # of a merged tree at most, the root included
CHAIN = (1,) * 8  # the expansion of a draft model, if none is given
NGRAM, DRAFT_MODEL = "ngram", "draft_model:"


@dataclass(frozen=True)
class _Part:
    """A drafter before its target is loaded.

    target: what the drafter's config says.
    build: makes it, given the target, the step costs by which it chooses its nodes (None: it proposes all) and the load
        options.
    own_target: the target as the drafter wants it (its adapter, its chat template).
    """

    build: Callable[[Target, StepCosts | None, dict[str, Any]], Drafter]
    target: str | None = None
    own_target: Callable[[Target, bool], Target] | None = None


def has_folder(part: str) -> bool:
    """Whether one of :func:`parts_of` is a drafter folder or Hub id."""
    return part not in ("none", NGRAM) and not part.startswith((f"{NGRAM}:", DRAFT_MODEL))


def load_drafter(
    name: str, target: Target | None = None, *, target_name: str | None = None, tree: str = "auto",
    lean: bool | None = None, **options: Any,
) -> tuple[Target, Drafter | None]:  # fmt: skip
    """A drafter by name and the target it belongs to, loaded here unless given. The tree is read before the target.

    A drafter that was trained with a chat template of its recipe's brings it, and the target uses that one. Of several
    drafters of one command the first one's counts: a target that is given keeps the template it has.

    Args:
        name: ``none``; a folder or Hub id; ``ngram`` or ``ngram:SHORTEST-LONGEST``, matches of so many tokens;
            ``draft_model:PATH`` or ``draft_model:PATH@2,2,1``, a causal LM and its expansion (a chain of 8 if left
            out); or several of these joined by ``+``, merged into one tree.
        target_name: of the target, if it is not where the drafter's config says.
        tree: a file, or ``auto``: the drafter's own.
        lean: as :class:`draftsmith.inference.engine.SpeculativeDecoder` takes it: how the target's steps, whose cost
            decides how many nodes are proposed, are run.
        options: of :func:`load_target`.

    Raises:
        FileNotFoundError, ValueError: one of them is missing, damaged, or not for the other.
    """
    if name == "none":
        if target is None and not target_name:
            raise ValueError("'none' is no drafter and knows no target: pass --target")
        return target or load_target(str(target_name), **options), None
    names = parts_of(name)
    parts = [_part(each, tree, merged=len(names) > 1) for each in names]
    if target is None:
        known = next((part.target for part in parts if part.target), None)
        loaded = load_target(target_name or known or _needed(None, name), **options)
    else:
        loaded = target
    for part in parts:
        if part.own_target is not None:
            loaded = part.own_target(loaded, target is not None)
    # Where steps have fixed shapes (on a GPU) further rows are nearly free and nothing is decided step by step.
    dynamic = loaded.device.type == "cpu" or loaded.spread
    costs = step_costs(loaded, lean) if dynamic and (len(parts) > 1 or parts[0].target is None) else None
    if len(parts) == 1:
        return loaded, parts[0].build(loaded, costs, options)
    drafters = {each: part.build(loaded, costs, options) for each, part in zip(names, parts, strict=True)}
    return loaded, MergedDrafter(drafters, loaded, NODES, costs)


def _needed(target_name: str | None, drafter: str) -> str:
    if not target_name:
        raise ValueError(f"'{drafter}' has no target of its own: pass --target")
    return target_name


def _part(name: str, tree: str, merged: bool) -> _Part:
    if not has_folder(name):
        return _draft_model(name) if name.startswith(DRAFT_MODEL) else _ngram(name)
    folder, config, weights = read_drafter(name)
    _check_type(folder, config, "is not known to this version; known: medusa")
    path = folder / "tree.json" if tree == "auto" else Path(tree)
    if tree == "auto" and not path.exists():
        raise FileNotFoundError(f"{folder}: has no tree.json yet; run: python inference/calibrate.py {name}")
    # A merge chooses from more nodes than the calibrated tree has.
    topology, chances = read_candidates(path) if merged else (read_tree(path), None)
    _check_tree(path, topology, config)

    def build(target: Target, costs: StepCosts | None, options: dict[str, Any]) -> Drafter:
        heads = MedusaHeads.from_artifact(config, weights, str(folder))
        drafter = MedusaDrafter(heads, topology, target, chances)
        if costs is None or chances is None:
            return drafter
        return MedusaDrafter(heads, topology, target, chances, costs, draft_time(drafter, target, costs))

    def own_target(loaded: Target, keep_template: bool) -> Target:
        return target_of(folder, config, loaded, keep_template=keep_template)

    return _Part(build, config["target"]["name_or_path"], own_target)


def _ngram(name: str) -> _Part:
    given = re.fullmatch(r"ngram(?::(\d+)-(\d+))?", name)
    if given is None:
        raise ValueError(f"'{name}': for matches of 2 to 10 tokens write ngram:2-10")
    lengths = {} if given[1] is None else {"shortest": int(given[1]), "longest": int(given[2])}
    return _Part(lambda target, costs, options: NgramDrafter(target, costs=costs, **lengths))


def _draft_model(name: str) -> _Part:
    path, _, expansion = name.removeprefix(DRAFT_MODEL).partition("@")
    if not path or (expansion and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", expansion)):
        raise ValueError(f"'{name}': write draft_model:PATH, or draft_model:PATH@2,2,1 for its children by depth")
    children = [int(k) for k in expansion.split(",")] if expansion else CHAIN

    def build(target: Target, costs: StepCosts | None, options: dict[str, Any]) -> Drafter:
        # Whole and unquantised, however the target is loaded: it is small, and runs several times a step.
        some = {name: options[name] for name in ("dtype", "trust_remote_code") if name in options}
        model = load_target(path, device=str(target.device), **some)
        draft_cost = None if costs is None or target.spread else step_costs(model).plain / costs.plain
        return DraftModelDrafter(model, target, children, costs=costs, draft_cost=draft_cost)

    return _Part(build)


def read_heads(name: str) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """A Medusa drafter's folder, config and weights, calibrated or not.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_drafter`; also if it is of another type.
    """
    folder, config, weights = read_drafter(name)
    _check_type(folder, config, "has no heads to calibrate")
    return folder, config, weights


def load_heads(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], target_name: str | None, options: dict[str, Any]
) -> tuple[Target, MedusaHeads]:
    """The target of what :func:`read_heads` read, and the heads on its device, checked against each other."""
    target = load_target(target_name or config["target"]["name_or_path"], **options)
    target = target_of(folder, config, target)
    return target, MedusaHeads.from_artifact(config, weights, str(folder)).to(target.device)


def _check_type(folder: Path, config: dict[str, Any], wrong: str) -> None:
    if config["drafter_type"] != "medusa":
        raise ValueError(f"{folder}: drafter_type '{config['drafter_type']}' {wrong}")


def _check_tree(path: Path, topology: Topology, config: dict[str, Any]) -> None:
    """What :class:`MedusaDrafter` refuses, said before the target is loaded, with the file's name."""
    heads = config.get("num_draft_heads")
    if isinstance(heads, int) and topology.max_depth > heads:
        raise ValueError(f"{path}: the tree is {topology.max_depth} deep, but there are {heads} draft heads")
