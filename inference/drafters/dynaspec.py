"""An EAGLE drafter whose levels compute only a shortlist of the LM head's rows: DynaSpec (arXiv 2510.13847), FR-Spec or
VocabTrim (:mod:`draftsmith.models.shortlist`).

Its folder holds the shortlists, and the drafter as a part, a folder of its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.inference.drafters import eagle
from draftsmith.inference.drafters.load import Calibration, Part
from draftsmith.inference.measure.rollouts import BEST, Drafts, kept, record
from draftsmith.inference.measure.tree_statistics import MAX_RANK
from draftsmith.models.artifact import read_drafter
from draftsmith.models.shortlist import DEPTHS, ShortlistHead
from draftsmith.models.target import Target

PART = "drafter"  # its folder

Artifact = tuple[Path, dict[str, Any], dict[str, Tensor]]  # folder, config and weights


def check_eagle(folder: Path, config: dict[str, Any]) -> None:
    """Raise a ValueError unless a drafter is of the family that takes shortlists."""
    if (family := config["drafter_type"]) != "eagle":
        raise ValueError(f"{folder}: drafters of type '{family}' take no shortlists; EAGLE drafters do")


def read_parts(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[ShortlistHead, Artifact]:
    """The shortlists, and the drafter."""
    shortlist = ShortlistHead.from_artifact(config, weights, str(folder))
    if config.get("parts") != [PART]:
        raise ValueError(f"{folder}/config.json: field 'parts' is {config.get('parts')!r}; it has to be ['{PART}']")
    base = read_drafter(str(folder / PART))
    check_eagle(*base[:2])
    if base[1]["target"].get("fingerprint") != config["target"].get("fingerprint"):
        raise ValueError(
            f"{base[0]}: this drafter and its shortlists were made for different targets; train them again"
        )
    return shortlist, base


# ---- the family, as inference/drafters/load.py describes it


def open_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tree: Path | None, merged: bool
) -> Part:
    """The drafter with its shortlists."""
    shortlist, base = read_parts(folder, config, weights)
    return eagle.open_drafter(*base, tree, merged, shortlist=shortlist)


def calibration(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Calibration:
    """The drafter's own, decoding with the shortlists; a rank is that within the node's own list. Trees of up to
    :data:`DEPTHS` levels."""
    shortlist, base = read_parts(folder, config, weights)
    own = eagle.calibration(*base, shortlist=shortlist)
    opened: list[Drafts] = []

    def ranks(target: Target, tokens: Tensor, supervised: Tensor) -> Tensor:
        if not opened:
            opened.append(eagle.open_drafts(*base, target))
        found = kept(record(opened[0], tokens, supervised, BEST), opened[0].embed, shortlist).ranks
        # A tree may have no more children of a node than the shortest list has tokens.
        return found.masked_fill(found >= shortlist.config.fewest, MAX_RANK)

    return replace(own, max_depth=min(own.max_depth, DEPTHS), ranks=ranks)
