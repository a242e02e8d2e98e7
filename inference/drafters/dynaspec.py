"""An EAGLE drafter whose levels compute only a shortlist of the LM head's rows: DynaSpec (arXiv 2510.13847), FR-Spec,
VocabTrim or low rank (:mod:`draftsmith.models.shortlist`).

Its folder holds the shortlists, and the drafter as a part, a folder of its own.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.inference.drafters import eagle
from draftsmith.inference.drafters.family import Loader
from draftsmith.models.artifact import read_drafter
from draftsmith.models.shortlist import ShortlistHead

HAS_TREE = True
PART = "drafter"  # its folder

Artifact = tuple[Path, dict[str, Any], dict[str, Tensor]]  # folder, config and weights


def check_eagle(folder: Path, config: dict[str, Any]) -> None:
    """Raise a ValueError unless a drafter is of the family that takes shortlists."""
    if (family := config["drafter_type"]) != "eagle":
        raise ValueError(f"{folder}: drafters of type '{family}' take no shortlists; EAGLE drafters do")
    if config.get("parallel"):
        raise ValueError(f"{folder}: an EAGLE drafter of one pass (drafter.one_pass) takes no shortlists; use another")


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


# ---- the family, as inference/drafters/family.py describes it


def open_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tree: Path | None, merged: bool
) -> Loader:
    """The drafter with its shortlists."""
    shortlist, base = read_parts(folder, config, weights)
    return eagle.open_drafter(*base, tree, merged, shortlist=shortlist)
