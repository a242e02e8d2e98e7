"""Fixtures for the conftest.py of inference and benchmarks: the tiny target, loaded, and a drafter of it."""

import pytest
import torch

from draftsmith.models.artifact import write_drafter, write_json
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target


@pytest.fixture(scope="module")
def target(tiny_lm):
    return load_target(str(tiny_lm))


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    """A drafter folder: nearly untrained heads on the LM head, in a tree of six nodes."""
    folder = tmp_path_factory.mktemp("drafters") / "heads"
    torch.manual_seed(0)
    heads = MedusaHeads.for_target(target, 3, 1, "shared")
    with torch.no_grad():
        heads.weight.normal_(std=0.1)
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
    write_json(folder / "tree.json", {"paths": [[0], [0, 0], [0, 0, 0], [0, 1], [1]]})
    return folder
