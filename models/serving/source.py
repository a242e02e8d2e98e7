"""What is exported: a drafter, and of its target what a format needs."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from draftsmith.common.command import first_line
from draftsmith.models.artifact import check_target, in_dtype, read_drafter
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.files.identity import difference, fingerprint, older_fingerprint, same_target
from draftsmith.models.files.locate import locate
from draftsmith.models.files.weights import weight_files
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving.from_published import convert_if_published, load_stored
from draftsmith.models.serving.layouts import Unsupported, unsupported
from draftsmith.models.shortlist import ShortlistHead
from draftsmith.models.target import Target


@dataclass(frozen=True)
class ExportSource:
    """What is exported.

    drafter: in float32. weights: as stored. target_config: of ``transformers``. target: None where its weights are not
    needed. folder: the drafter's. fingerprint: of its target. revision: by which that was found at the Hub.
    """

    drafter: Eagle | MedusaHeads | DFlash
    weights: Mapping[str, Tensor]
    target_name: str
    target_config: Any
    target: Target | None
    folder: Path
    fingerprint: str
    revision: str | None = None

    def has_draft_vocab(self, to: str) -> bool:
        """Whether a server has a place for a draft vocabulary; all let EAGLE-1 and Medusa heads draft any token."""
        if isinstance(self.drafter, DFlash):
            return to != "sglang"
        return isinstance(self.drafter, Eagle) and self.drafter.config.version == 3

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in self.weights.values() if weight.is_floating_point())

    def loaded(self) -> Target:
        assert self.target is not None
        return self.target

    def rows(self, weight: Tensor) -> Tensor:
        """A matrix of the target's, in the drafter's dtype where that loses nothing, else in float32."""
        small = weight.to(self.dtype)
        return small if torch.equal(small.float(), weight.float()) else weight.float()


def _with_list(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of the EAGLE drafter whose shortlists these are, with the one list of all depths (FR-Spec,
    VocabTrim) as its draft vocabulary."""
    head = ShortlistHead.from_artifact(config, weights, str(folder))
    part = folder / config["parts"][0]
    sizes = set(head.config.capacity)
    if head.config.shortlist not in ("fr_spec", "vocab_trim") or len(sizes) > 1:
        raise ValueError(
            f"{folder}: its shortlists ({head.config.shortlist}) differ by depth or node, for which servers have no "
            f"place; its drafter alone can be exported: {part}"
        )
    _, config, weights = read_drafter(str(part))
    kept = head.order[: sizes.pop()].sort().values
    ids = weights.get("draft_vocab", torch.arange(config["vocab_size"]))[kept]
    rows = {"lm_head.weight": weights["lm_head.weight"][kept]} if "lm_head.weight" in weights else {}
    return {**config, "draft_vocab_size": len(ids)}, {**weights, **rows, "draft_vocab": ids}


def _check_tokens(drafter: Eagle | MedusaHeads | DFlash, tokens: int) -> None:
    """Raises ValueError: drafts have another length than ``tokens``."""
    if isinstance(drafter, MedusaHeads):
        raise ValueError(f"--speculative-tokens {tokens}: Medusa heads draft one token each; leave it out")
    if isinstance(drafter, DFlash):
        raise ValueError(f"--speculative-tokens {tokens}: a DFlash drafter drafts its whole block; leave it out")
    if drafter.config.parallel and tokens > drafter.config.parallel:
        raise ValueError(f"--speculative-tokens {tokens}: the drafter drafts {drafter.config.parallel} in a pass")
    if tokens >= (positions := drafter.config.max_position_embeddings):
        raise ValueError(f"--speculative-tokens {tokens}: the drafter has {positions} positions")


def open_source(
    name: str,
    to: str,
    target_name: str | None = None,
    trust_remote_code: bool = False,
    tokens: int | None = None,
    dtype: str | None = None,
) -> ExportSource:
    """Read a drafter, and of its target what the format needs.
    ``target_name``: folder or Hub id; what the drafter's config says if left out. ``tokens``: of a draft, if asked for.
    ``dtype``: of what is written; the drafter's own if left out.
    Raises FileNotFoundError, ValueError: drafter or target is missing or damaged, or they do not belong together.
    Unsupported, a ValueError: the format has no place for such a drafter."""
    folder, config, weights = read_drafter(convert_if_published(name, target_name, trust_remote_code=trust_remote_code))
    if config["drafter_type"] == "dynaspec":
        config, weights = _with_list(folder, config, weights)
    if dtype is not None:
        weights = in_dtype(weights, dtype)
        if lost := [part for part, weight in weights.items() if not weight.isfinite().all()]:
            raise ValueError(f"{folder}: '{lost[0]}' has numbers that {dtype} cannot hold; leave out --dtype {dtype}")
    kind = config["drafter_type"]
    families = {"eagle": Eagle, "medusa": MedusaHeads, "dflash": DFlash}
    if kind not in families:
        instead = "EAGLE and DFlash drafters and Medusa heads are"
        if kind == "ssm":
            part = next(iter(config.get("parts", ["ssm-0"])))
            instead = f"each SSM is already a causal LM, which servers take as a draft model: {folder / part}"
        raise ValueError(f"{folder}: a drafter of type {kind} is not exported to {to}: {instead}")
    drafter: Eagle | MedusaHeads | DFlash = families[kind].from_artifact(config, weights, str(folder))
    if tokens is not None:
        _check_tokens(drafter, tokens)
    if why := unsupported(drafter, to):
        raise Unsupported(f"{folder}: {why}")
    c, described, trained_for = drafter.config, config["target"], str(config["target"]["name_or_path"])
    merged = described.get("merged_fingerprint")  # that of --target, if there is an adapter
    if described.get("adapter") and not (target_name and merged):
        advice = (
            "give the merged one by --target"
            if merged
            else f"write that one: python models/export.py {folder} --to merged --out DIR"
        )
        raise ValueError(
            f"{folder}: it was trained with an adapter of its target, which a server's target lacks; {advice}"
        )
    if empty := [part for part, weight in weights.items() if weight.dim() == 2 and not weight.any()]:
        raise ValueError(f"{folder}: '{empty[0]}' has zeros alone, so that it drafts nothing; train it anew")
    name, revision = target_name or trained_for, None if target_name else described.get("revision")
    known_as = str((target_name and merged) or described.get("fingerprint") or "")
    needed = kind != "eagle" or config["projection"] == "shared" or to == "speculators"
    if not needed:
        there = locate(name, revision, weights=False).path
        try:
            target_config: Any = AutoConfig.from_pretrained(there, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises many types for wrong fields
            raise ValueError(f"{there}/config.json: transformers refuses it ({first_line(error)})") from None
        other = f"{folder}: this drafter was trained for target '{trained_for}', not for '{name}': "
        for field in ("hidden_size", "vocab_size"):
            if (size := getattr(target_config.get_text_config(), field)) != getattr(c, field):
                raise ValueError(f"{other}{field} {getattr(c, field)} ≠ {size}")
        if not _scales_embeddings(target_config):  # else they are checked below
            with suppress(FileNotFoundError):  # its weights need not be on this machine
                weight_files(there)
                found = fingerprint(there)
                if known_as and not same_target(known_as, found) and known_as != older_fingerprint(there):
                    raise ValueError(f"{other}same shape, {difference(known_as, found)}")
            return ExportSource(drafter, weights, name, target_config, None, folder, known_as, revision)
    target = load_stored(name, revision, trust_remote_code, dtype)
    check_target(folder, config, target)
    if described.get("adapter") and not target.is_known_as(merged):
        raise ValueError(f"{folder}: it was trained with an adapter, and --target {name} is the target without it")
    biased = getattr(target.lm_head, "bias", None) is not None
    written = config["projection"] == "shared" if isinstance(drafter, Eagle) and drafter.config.version == 3 else False
    source = ExportSource(drafter, weights, name, target.model.config, target, folder, known_as, revision)
    rows = drafter.draft_vocab is not None and source.has_draft_vocab(to)
    if biased and (written or (isinstance(drafter, DFlash) and (rows or to == "speculators"))):
        raise ValueError(f"{folder}: the LM head of target '{name}' has a bias, for which {to} has no place")
    return source


def _scales_embeddings(config: Any) -> bool:
    """Whether a family's embeddings are more than a matrix's rows (Gemma), so that servers may give others."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False  # a model with its own code
    with torch.device("meta"):
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return type(family(config).get_input_embeddings()) is not nn.Embedding
