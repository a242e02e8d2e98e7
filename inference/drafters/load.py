"""Drafters by name: ``none``, a folder or Hub id, ``ngram``, ``draft_model:PATH``, and several joined by ``+``.

A family of trained drafters is one module, entered in :data:`FAMILIES` under the ``drafter_type`` of its folders'
config.json and imported when the first of them is loaded. It has up to three plain functions:

``open_drafter(folder, config, weights, tree, merged) → Part``
    A drafter before its target is loaded; everything that needs no target is checked here. ``folder``: Path. ``config``
    and ``weights``: what :func:`draftsmith.models.artifact.read_drafter` read. ``tree``: the file of its tree, which
    exists or was named by the user; None for a family without ``calibration``. ``merged``: nodes are chosen from more
    than the calibrated ones, because several drafters propose one tree together or because the tree's file has
    ``at_load``; so it needs an acceptance probability for each of its nodes.

``calibration(folder, config, weights) → Calibration``
    What inference/calibrate.py measures a tree with. Only a family whose drafters have a fixed tree (tree.json) has
    this function; of others it times the target's steps alone.

``report_fields(folder, config) → dict``
    Fields that its drafters add to report.json; may be left out.

All of them raise FileNotFoundError or ValueError where something is missing, damaged or does not fit. That a drafter
belongs to the target (fingerprint, width, vocabulary, adapter, chat template) is checked for all.
"""

import importlib
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from draftsmith.common.command import nearest
from draftsmith.common.files import json_object
from draftsmith.inference.drafters import names
from draftsmith.inference.drafters.compressed import CompressedDrafter, Selector
from draftsmith.inference.drafters.draft_model import DraftModelDrafter, say_positions
from draftsmith.inference.drafters.dynamic import DynamicShape
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.costs import StepCosts, step_costs
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.verify.tree import Topology, calibrated_on, chosen_at_load
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import device_name, read_drafter
from draftsmith.models.files.locate import locate
from draftsmith.models.serving.from_published import convert_if_published
from draftsmith.models.target import Target, load_target
from draftsmith.models.training import training_of

FAMILIES = {  # drafter_type → module
    "dynaspec": "draftsmith.inference.drafters.dynaspec",
    "eagle": "draftsmith.inference.drafters.eagle",
    "medusa": "draftsmith.inference.drafters.medusa",
    "ssm": "draftsmith.inference.drafters.ssm",
}
MERGED_NODES = 40  # at most, in a merged tree, the root included


@dataclass(frozen=True)
class Part:
    """A drafter before its target is loaded. build: (target, options) → the drafter, or any number of them by name,
    which are merged. options: those of :func:`load_target`, for causal LMs of its own."""

    build: Callable[[Target, dict[str, Any]], Drafter | Mapping[str, Drafter]]


@dataclass(frozen=True)
class Calibration:
    """How a drafter with a fixed tree, or an ensemble whose n drafters have a tree each, is calibrated.

    max_depth: K, the depth of the deepest tree that the drafter can propose.
    ranks: (target, tokens ``[S, T]``, supervised ``[S, T]``) → ``[S, T, K]`` int64, of an ensemble ``[S, T, n, K]``: at
        each depth, the rank that the drafter gives to the true token after the true tokens before it.
        :func:`draftsmith.inference.drafters.ranks.draft_labels` and ``label_ranks`` help. For a drafter that proposes a
        single chain the rank is 0 or ``MAX_RANK``.
    build: (target, a topology for each drafter) → the drafter with these trees.
    facts: ranks ``[S, T, n, K]`` of all of the text → what tree.json records of them in ``calibration``; left out,
        :func:`draftsmith.inference.drafters.ranks.head_facts`.
    step_time: (target, step costs) → a function of the trees: the time of a step and its drafting, in plain steps of
        the target. For drafters whose every level takes a forward pass, so that less deep trees may be faster; left
        out, drafting takes the same time whatever the tree.
    decoding: (target, a fixed tree or the shape of a dynamic one, step costs or None) → the drafter as it decodes; for
        a family whose drafters may grow dynamic trees.
    """

    max_depth: int
    ranks: Callable[[Target, Tensor, Tensor], Tensor]
    build: Callable[..., Drafter]
    facts: Callable[[Tensor], dict[str, Any]] | None = None
    step_time: Callable[[Target, StepCosts], Callable[[Sequence[Topology]], float]] | None = None
    decoding: Callable[[Target, Topology | DynamicShape, StepCosts | None], Drafter] | None = None


def family_of(folder: Path, config: dict[str, Any]) -> ModuleType:
    """The module of a drafter's family; a ValueError if its drafter_type is not in :data:`FAMILIES`."""
    kind = config["drafter_type"]
    if kind not in FAMILIES:
        hint = f"; nearest: {meant}" if (meant := nearest(kind, FAMILIES)) else ""
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{folder}: drafter_type '{kind}' is not known to this version; known: {known}{hint}")
    return importlib.import_module(FAMILIES[kind])


def read_named(name: str, target: str | None = None, **options: Any) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """:func:`read_drafter`, after :func:`names.check_name`; of a published drafter, its converted copy.
    ``target``: the one that is given for it. ``options``: of :func:`load_target`."""
    names.check_name(name, target)
    own = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    return read_drafter(convert_if_published(name, target, **own))


def load_drafter(
    name: str,
    target: Target | None = None,
    *,
    target_name: str | None = None,
    tree: str = "auto",
    all_nodes: bool = False,
    lean: bool | None = None,
    **options: Any,
) -> tuple[Target, Drafter | None]:
    """Load a drafter by name and, unless given, its target. All files but the target's are read and checked first.

    A drafter folder may hold the chat template of the recipe it was trained with; a target loaded here then uses it. A
    given target keeps the template it has.

    Args:
        name: ``none``; a folder or Hub id, also of a published drafter; ``ngram`` or ``ngram:SHORTEST-LONGEST``,
            matches of so many tokens; ``draft_model:PATH`` or ``draft_model:PATH@2,2,1``, a causal LM and its expansion
            (a chain of 8 if left out); ``snapkv:K``, ``streamingllm:K`` or ``topk:K``, the target over a compressed
            cache, also with an expansion; or several of these joined by ``+``, merged into one tree.
        target_name: folder or Hub id of the target; if left out, what the drafter's config says.
        tree: a file, or ``auto``: the drafter's own.
        all_nodes: every step has all nodes of the tree, also where fewer are faster.
        lean: as ``SpeculativeDecoder`` takes it; step costs are measured accordingly.
        options: of :func:`load_target`.

    Returns:
        Target and drafter; the drafter is None for ``none``.

    Raises:
        FileNotFoundError, ValueError: drafter or target is missing or damaged, they do not belong together, or a tree
            is given and no drafter takes one.
    """
    given = [] if name == "none" else names.parts_of(name)
    if target is not None:
        target_name, options = target.name, {**options, "revision": target.revision}
    stored = {each: read_named(each, target_name, **options) for each in given if names.has_folder(each)}
    families = {each: family_of(*stored[each][:2]) for each in stored}
    if tree != "auto" and not any(hasattr(family, "calibration") for family in families.values()):
        raise ValueError(f"--tree {tree}: '{name}' has no tree of its own that another could replace; leave it out")
    parts: dict[str, Part] = {}
    say: Callable[[str], None] | None = options.get("say")
    trees: dict[str, Path] = {}  # of the drafters that have one of their own
    for each in given:
        if each not in stored:
            parts[each] = _untrained(each)
            continue
        folder, config, weights = stored[each]
        path = None
        if hasattr(families[each], "calibration"):
            path = folder / "tree.json" if tree == "auto" else Path(tree)
            if tree == "auto" and not path.exists():
                raise FileNotFoundError(
                    f"{folder}: has no tree.json yet; run: python inference/calibrate.py {shlex.quote(each)}"
                )
            if tree == "auto":
                trees[each] = path
        at_load = path is not None and chosen_at_load(path)
        parts[each] = families[each].open_drafter(folder, config, weights, path, len(given) > 1 or at_load)

    known = next((config["target"]["name_or_path"] for _, config, _ in stored.values()), None)
    if target is None and not (target_name or known):
        what = "'none' names no target" if not given else f"'{name}' has no target of its own"
        raise ValueError(f"{what}: pass --target")
    loaded = target or load_target(str(target_name or known), **options)
    for folder, config, _ in stored.values():
        loaded = target_of(folder, config, loaded, keep_template=target is not None)
    if say and target is None and loaded.end_warning:
        say(loaded.end_warning)
    for each, path in trees.items():
        here, there = device_name(loaded.device), calibrated_on(path)
        # Among CPUs steps choose their nodes; what pays on a CPU and on a GPU differs by levels, too.
        if say and there and there != here and not (loaded.device.type == "cpu" and there.endswith("threads")):
            command = f"python inference/calibrate.py {shlex.quote(each)}"
            say(f"{path}: a tree for {there}; {command} measures one for {here}")
    if not parts:
        return loaded, None
    drafters = _flat({each: part.build(loaded, options) for each, part in parts.items()})
    merged = MergedDrafter(drafters, loaded, MERGED_NODES) if len(drafters) > 1 else next(iter(drafters.values()), None)
    if merged is not None:
        merged.chooses = not all_nodes
        # Static steps (on a GPU) need no costs: trees of several sizes are timed as they run.
        if (loaded.device.type == "cpu" or loaded.spread) and not all_nodes:
            merged.costs = step_costs(loaded, lean)
    return loaded, merged


def _flat(built: Mapping[str, Drafter | Mapping[str, Drafter]]) -> dict[str, Drafter]:
    """The drafters of all parts by name: members of an ensemble by their own (``ssm-0``) where no other drafter has it,
    else after the ensemble's (``runs/x:ssm-0``)."""
    inside = {name: each if isinstance(each, Mapping) else {name: each} for name, each in built.items()}
    counts = Counter(member for members in inside.values() for member in members)
    return {
        f"{name}:{member}" if counts[member] > 1 and isinstance(built[name], Mapping) else member: drafter
        for name, members in inside.items()
        for member, drafter in members.items()
    }


def report_fields(name: str) -> dict[str, Any]:
    """Fields that a drafter's folders add to its report: ``training`` (:func:`training_of`), and those of their
    families; where several add one, the first folder's. ``name`` and what is raised are as in
    :func:`load_drafter`."""
    fields: dict[str, Any] = {}
    for each in filter(names.has_folder, names.parts_of(name)):
        folder = locate(each, weights=False).path
        config = json_object(folder / "config.json", "drafter config")
        family = family_of(folder, config) if "drafter_type" in config else None  # published: EAGLE or Medusa
        own = family.report_fields(folder, config) if hasattr(family, "report_fields") else {}
        kind = config.get("drafter_type")
        if kind is not None:
            own = {"training": {"drafter_type": kind, **training_of(folder)}} | own
        fields = own | fields
    return fields


def _untrained(name: str) -> Part:
    if name.startswith(names.NGRAM):
        lengths = names.ngram_lengths(name)
        return Part(lambda target, options: NgramDrafter(target, **lengths))
    if not name.startswith(names.DRAFT_MODEL):
        kind, entries, expansion = names.compressed_of(name)
        compressed = Selector(kind, entries)
        return Part(lambda target, options: CompressedDrafter(target, compressed, expansion))
    path, children, cache = names.draft_model_of(name)
    selector = None if cache is None else Selector(*cache)

    def build(target: Target, options: dict[str, Any]) -> Drafter:
        # On one device and unquantised, however the target is loaded: it is small and runs several times per step.
        shared = {name: options[name] for name in ("dtype", "trust_remote_code") if name in options}
        model = load_target(path, device=str(target.device), **shared)
        say_positions(model, target)
        return DraftModelDrafter(model, target, children, selector=selector)

    return Part(build)
