"""Drafters by name: ``none``, a drafter folder, or a Hub id."""

from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.step import Drafter
from draftsmith.inference.tree import Topology, read_tree
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import read_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target, load_target


def load_drafter(
    name: str, target: Target | None = None, *, target_name: str | None = None, tree: str = "auto", **options: Any
) -> tuple[Target, Drafter | None]:
    """A drafter by name and the target it belongs to, loaded here unless given. The tree is read before the target.

    A drafter that was trained with a chat template of its recipe's brings it, and the target uses that one. Of several
    drafters of one command the first one's counts: a target that is given keeps the template it has.

    Args:
        target_name: of the target, if it is not where the drafter's config says.
        tree: a file, or ``auto``: the drafter's own.
        options: of :func:`load_target`.

    Raises:
        FileNotFoundError, ValueError: one of them is missing, damaged, or not for the other.
    """
    if name == "none":
        if target is None and not target_name:
            raise ValueError("'none' is no drafter and knows no target: pass --target")
        return target or load_target(str(target_name), **options), None
    folder, config, weights = read_drafter(name)
    _check_type(folder, config, "is not known to this version; known: medusa")
    path = folder / "tree.json" if tree == "auto" else Path(tree)
    if tree == "auto" and not path.exists():
        raise FileNotFoundError(f"{folder}: has no tree.json yet; run: python inference/calibrate.py {name}")
    topology = read_tree(path)
    _check_tree(path, topology, config)
    loaded = target or load_target(target_name or config["target"]["name_or_path"], **options)
    target = target_of(folder, config, loaded, keep_template=target is not None)
    return target, MedusaDrafter(MedusaHeads.from_artifact(config, weights, str(folder)), topology, target)


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
