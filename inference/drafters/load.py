"""Drafters by name: ``none``, a folder or Hub id, ``ngram``, ``draft_model:PATH``, and several joined by ``+``."""

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.common.files import json_object
from draftsmith.inference.drafters import names
from draftsmith.inference.drafters.compressed import CompressedDrafter, Selector
from draftsmith.inference.drafters.draft_model import DraftModelDrafter, say_positions
from draftsmith.inference.drafters.family import Loader, family_of, has_tree
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.tree import calibrated_on, chosen_at_load
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import device_name, read_drafter
from draftsmith.models.files.locate import local_folder, locate
from draftsmith.models.serving.from_published import convert_if_published
from draftsmith.models.target import Target, load_target
from draftsmith.models.training import training_of

MERGED_NODES = 40  # at most, in a merged tree, the root included


def read_named(name: str, target: str | None = None, **options: Any) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """:func:`read_drafter`, after :func:`names.check_name`; of a published drafter, its converted copy.
    ``target``: the one that is given for it. ``options``: of :func:`load_target`."""
    names.check_name(name, target)
    own = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    return read_drafter(convert_if_published(name, target, **own))


def check_trees(drafters: Sequence[str]) -> None:
    """Whether the folders of these drafters have their trees, before weights are read. Raises as :func:`tree_of`."""
    for each in (part for name in drafters for part in names.parts_of(name) if names.has_folder(part)):
        folder = local_folder(names.folder_of(each)[0])
        config = json_object(folder / "config.json") if folder and (folder / "config.json").exists() else {}
        if folder and isinstance(config.get("drafter_type"), str) and has_tree(family_of(folder, config)):
            tree_of(folder, names.folder_of(each)[0])


def tree_of(folder: Path, name: str) -> Path:
    """The tree of a drafter's folder. Raises FileNotFoundError: it has none."""
    if (tree := folder / "tree.json").exists():
        return tree
    raise FileNotFoundError(f"{folder}: has no tree.json yet; run: python inference/calibrate.py {shlex.quote(name)}")


def open_named(
    name: str, target: Target | None, target_name: str | None, tree: str, options: dict[str, Any]
) -> tuple[Target, Drafter | None]:
    """:func:`draftsmith.inference.load.load_drafter`, without step costs: all nodes of its trees are verified."""
    given = [] if name == "none" else names.parts_of(name)
    if target is not None:
        target_name, options = target.name, {**options, "revision": target.revision}
    folders = {each: names.folder_of(each)[0] for each in given if names.has_folder(each)}
    stored = {each: read_named(folder, target_name, **options) for each, folder in folders.items()}
    families = {each: family_of(*stored[each][:2]) for each in stored}
    if tree != "auto" and not any(has_tree(family) for family in families.values()):
        raise ValueError(f"--tree {tree}: '{name}' has no tree of its own that another could replace; leave it out")
    if tree != "auto" and any(names.folder_of(each)[2] for each in folders):
        raise ValueError(f"--tree {tree}: '{name}' gives its children by depth, too; leave one of them out")
    loaders: dict[str, Loader] = {}
    say: Callable[[str], None] | None = options.get("say")
    trees: dict[str, Path] = {}  # of the drafters that have one of their own
    for each in given:
        if each not in stored:
            loaders[each] = _untrained(each)
            continue
        folder, config, weights = stored[each]
        path = None
        if has_tree(families[each]):
            path = tree_of(folder, folders[each]) if tree == "auto" else Path(tree)
            if tree == "auto":
                trees[each] = path
        at_load = path is not None and chosen_at_load(path)
        loaders[each] = families[each].open_drafter(folder, config, weights, path, len(given) > 1 or at_load)

    described = next((config["target"] for _, config, _ in stored.values()), {})
    known = described.get("name_or_path")
    if target is None and not (target_name or known):
        what = "'none' names no target" if not given else f"'{name}' has no target of its own"
        raise ValueError(f"{what}: pass --target")
    named = {} if target_name else {"revision": described.get("revision")}
    loaded = target or load_target(str(target_name or known), **{**named, **options})
    for folder, config, _ in stored.values():
        loaded = target_of(folder, config, loaded, keep_template=target is not None)
    if say and target is None and loaded.end_warning:
        say(loaded.end_warning)
    for each, path in trees.items():
        here, there = device_name(loaded.device), calibrated_on(path)
        # Among CPUs steps choose their nodes; what pays on a CPU and on a GPU differs by levels, too.
        if say and there and there != here and not (loaded.device.type == "cpu" and there.endswith("threads")):
            command = f"python inference/calibrate.py {shlex.quote(folders[each])}"
            say(f"{path}: a tree for {there}; {command} measures one for {here}")
    if not loaders:
        return loaded, None
    drafters = _flat({each: _as_named(each, loader.build(loaded, options)) for each, loader in loaders.items()})
    several = len(drafters) > 1
    return loaded, MergedDrafter(drafters, loaded, MERGED_NODES) if several else next(iter(drafters.values()), None)


def _as_named(name: str, built: Drafter | Mapping[str, Drafter]) -> Drafter | Mapping[str, Drafter]:
    """The drafter of a folder, with the cache and the expansion that its name gives."""
    _, cache, children = names.folder_of(name) if names.has_folder(name) else (name, None, None)
    if cache is None and children is None:
        return built
    from draftsmith.inference.drafters.eagle import EagleDrafter  # a family is imported when it is used

    if not isinstance(built, EagleDrafter):
        raise ValueError(f"'{name}': only an EAGLE drafter takes what follows the folder; leave it out")
    return built.with_tree(children or built.tree, selector=None if cache is None else Selector(*cache))


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
    :func:`draftsmith.inference.load.load_drafter`."""
    fields: dict[str, Any] = {}
    for each in filter(names.has_folder, names.parts_of(name)):
        folder = locate(names.folder_of(each)[0], weights=False).path
        config = json_object(folder / "config.json", "drafter config")
        family = family_of(folder, config) if "drafter_type" in config else None  # published: EAGLE or Medusa
        own = family.report_fields(folder, config) if hasattr(family, "report_fields") else {}
        kind = config.get("drafter_type")
        if kind is not None:
            own = {"training": {"drafter_type": kind, **training_of(folder)}} | own
        fields = own | fields
    return fields


def _untrained(name: str) -> Loader:
    if name.startswith(names.NGRAM):
        lengths = names.ngram_lengths(name)
        return Loader(lambda target, options: NgramDrafter(target, **lengths))
    if not name.startswith(names.DRAFT_MODEL):
        kind, entries, expansion = names.compressed_of(name)
        compressed = Selector(kind, entries)
        return Loader(lambda target, options: CompressedDrafter(target, compressed, expansion))
    path, children, cache = names.draft_model_of(name)
    selector = None if cache is None else Selector(*cache)

    def build(target: Target, options: dict[str, Any]) -> Drafter:
        # On one device and unquantised, however the target is loaded: it is small and runs several times per step.
        shared = {name: options[name] for name in ("dtype", "trust_remote_code") if name in options}
        model = load_target(path, device=str(target.device), **shared)
        say_positions(model, target)
        return DraftModelDrafter(model, target, children, selector=selector)

    return Loader(build)
