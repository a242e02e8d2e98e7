"""A drafter whose levels compute only a shortlist of the LM head's rows: DynaSpec (arXiv 2510.13847), FR-Spec,
VocabTrim, or an in-context vocabulary (:mod:`draftsmith.models.shortlist`).

Its folder holds the shortlists, and the drafter as a part, a folder of its own: ``drafter_type: dynaspec`` on an
``eagle``. The families that take shortlists have them as an argument of ``open_drafter`` and ``calibration``.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from draftsmith.common.files import json_object
from draftsmith.inference.drafters.load import Calibration, Part, family_of
from draftsmith.inference.drafters.ranks import MAX_RANK
from draftsmith.inference.drafters.rollouts import BEST, Drafts, kept, record
from draftsmith.models.artifact import read_drafter
from draftsmith.models.shortlist import DEPTHS, ShortlistHead
from draftsmith.models.target import Target

PART = "drafter"  # its folder


def read_parts(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[ShortlistHead, ModuleType, tuple[Path, dict[str, Any], dict[str, Tensor]]]:
    """The shortlists; the module of the drafter's family; the drafter's folder, config and weights."""
    shortlist = ShortlistHead.from_artifact(config, weights, str(folder))
    if config.get("parts") != [PART]:
        raise ValueError(f"{folder}/config.json: field 'parts' is {config.get('parts')!r}; it has to be ['{PART}']")
    base = read_drafter(str(folder / PART))
    family = family_of(*base[:2])
    if not hasattr(family, "open_drafts"):
        raise ValueError(f"{base[0]}: drafters of type '{base[1]['drafter_type']}' take no shortlists")
    if base[1]["target"].get("fingerprint") != config["target"].get("fingerprint"):
        raise ValueError(
            f"{base[0]}: this drafter and its shortlists were made for different targets; train them again"
        )
    return shortlist, family, base


# ---- the family, as inference/drafters/load.py describes it


def open_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tree: Path | None, merged: bool
) -> Part:
    """The drafter with its shortlists."""
    shortlist, family, base = read_parts(folder, config, weights)
    return family.open_drafter(*base, tree, merged, shortlist=shortlist)


def calibration(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Calibration:
    """The drafter's own, decoding with the shortlists; a rank is that within the node's own list. Trees of up to
    :data:`DEPTHS` levels."""
    shortlist, family, base = read_parts(folder, config, weights)
    own: Calibration = family.calibration(*base, shortlist=shortlist)
    opened: list[Drafts] = []

    def ranks(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
        whole = own.ranks(target, tokens, supervised)  # an ensemble also keeps what it matched
        if not opened:
            opened.append(family.open_drafts(*base, target))
        recorded = record(opened[0], tokens, supervised, BEST)
        found = kept(recorded, opened[0].embed, shortlist).ranks
        # A tree may have no more children of a node than the shortest list has tokens.
        found = found.masked_fill(found >= shortlist.config.fewest, MAX_RANK)
        return found.view(*found.shape[:2], *whole.shape[2:-1], -1)  # an ensemble's n, here 1

    return replace(own, max_depth=min(own.max_depth, DEPTHS), ranks=ranks)


def report_fields(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The drafter's own, if its family has any."""
    part = folder / PART
    inner = json_object(part / "config.json", "drafter config")
    family = family_of(part, inner)
    return family.report_fields(part, inner) if hasattr(family, "report_fields") else {}
