"""Families of trained drafters.

A family is one module, entered in :data:`FAMILIES` under the ``drafter_type`` of its folders' config.json and imported
when the first of them is loaded. It has:

``open_drafter(folder, config, weights, tree, merged) → Loader``
    A drafter before its target is loaded; everything that needs no target is checked here. ``folder``: Path. ``config``
    and ``weights``: what :func:`draftsmith.models.artifact.read_drafter` read. ``tree``: the file of its tree, which
    exists or was named by the user; None for a family without ``HAS_TREE``. ``merged``: nodes are chosen from more than
    the calibrated ones, because several drafters propose one tree together or because the tree's file has ``at_load``;
    so it needs an acceptance probability for each of its nodes.

``HAS_TREE = True``
    If its folders have a tree.json. What inference/calibrate.py measures that with is entered in
    :data:`draftsmith.inference.measure.calibrations.CALIBRATIONS`.

``report_fields(folder, config) → dict``
    Fields that its drafters add to report.json; may be left out.

The functions raise FileNotFoundError or ValueError where something is missing, damaged or does not fit. That a drafter
belongs to the target (fingerprint, width, vocabulary, adapter, chat template) is checked for all.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from draftsmith.common.command import nearest
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.models.target import Target

FAMILIES = {  # drafter_type → module
    "dflash": "draftsmith.inference.drafters.dflash",
    "dynaspec": "draftsmith.inference.drafters.dynaspec",
    "eagle": "draftsmith.inference.drafters.eagle",
    "medusa": "draftsmith.inference.drafters.medusa",
    "ssm": "draftsmith.inference.drafters.ssm",
}


@dataclass(frozen=True)
class Loader:
    """A drafter before its target is loaded. build: (target, options) → the drafter, or any number of them by name,
    which are merged. options: those of :func:`load_target`, for causal LMs of its own."""

    build: Callable[[Target, dict[str, Any]], Drafter | Mapping[str, Drafter]]


def family_of(folder: Path, config: dict[str, Any]) -> ModuleType:
    """The module of a drafter's family; a ValueError if its drafter_type is not in :data:`FAMILIES`."""
    kind = config["drafter_type"]
    if kind not in FAMILIES:
        hint = f"; nearest: {meant}" if (meant := nearest(kind, FAMILIES)) else ""
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{folder}: drafter_type '{kind}' is not known to this version; known: {known}{hint}")
    return importlib.import_module(FAMILIES[kind])


def has_tree(family: ModuleType) -> bool:
    """Whether a family's folders have a tree.json."""
    return getattr(family, "HAS_TREE", False)
