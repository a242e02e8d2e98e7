"""Targets, drafters and configs that several of these tests make."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from draftsmith.models.artifact import in_dtype, write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target


def llama3(positions: int) -> dict:
    """Llama 3's rotary parameters, for a model that saw so many positions before they were scaled."""
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": "llama3", "rope_theta": 500000.0, **factors, "original_max_position_embeddings": positions}


def stand_in(**other) -> SimpleNamespace:
    """A target as far as a drafter's folder is concerned."""
    facts = {"name": "some/target", "hidden_size": 8, "vocab_size": 11, "fingerprint": "ab" * 32, **other}
    described = {"name_or_path": facts["name"], "fingerprint": facts["fingerprint"]}
    facts["is_known_as"] = lambda *fingerprints: facts["fingerprint"] in fingerprints
    return SimpleNamespace(**facts, tokenizer=None, adapter=None, describe=lambda: described)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the folder's config.json."""
    change(config := config_of(folder))
    (folder / "config.json").write_text(json.dumps(config))


def some_ids(target: Target, size: int) -> torch.Tensor:
    return torch.randperm(target.vocab_size)[:size].sort().values


def write_eagle(
    folder: Path, target: Target, version=3, projection="own", size=512, dtype="float32", options=(), **fields
):
    """A drafter of random weights. options: of ``Eagle.for_target``; fields: of its config."""
    torch.manual_seed(0)
    eagle = Eagle.for_target(target, version, projection, size, **dict(options))
    eagle = Eagle(replace(eagle.config, **fields))
    if size:
        eagle.draft_from(some_ids(target, size), target)
    for name, weight in eagle.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 and "norm" in name else 0.0, 0.1)
    write_drafter(folder, "eagle", eagle.config.to_dict(), in_dtype(eagle.state_dict(), dtype), target, {})


def write_heads(folder: Path, target: Target, projection: str, size: int | None = None) -> None:
    """Three Medusa heads of two layers, of random weights."""
    torch.manual_seed(0)
    heads = MedusaHeads.for_target(target, 3, 2, projection, size)
    if size:
        heads.draft_from(some_ids(target, size), target)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
