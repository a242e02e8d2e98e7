"""tests/published_medusa.py: the checkpoint for the published code. (What that code makes of it needs its checkout.)"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from draftsmith.models.medusa import MedusaConfig, MedusaHeads

SCRIPT = Path(__file__).parents[1] / "published_medusa.py"
SPEC = importlib.util.spec_from_file_location("published_medusa", SCRIPT)
assert SPEC and SPEC.loader
published = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(published)


def random_heads(projection, **fields):
    torch.manual_seed(0)
    sizes = {"num_draft_heads": 3, "num_layers": 2, "hidden_size": 32, "vocab_size": 61}
    heads = MedusaHeads(MedusaConfig(**{**sizes, "projection": projection, **fields}))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("projection", ["shared", "own"])
def test_stored_heads_compute_the_same(make_target, tmp_path, projection):
    """By the published formula: x + SiLU(linear(x)) for each layer, then a matrix without bias."""
    target, heads = make_target("llama"), random_heads(projection)
    published.write_heads(tmp_path / "heads", heads, target, tmp_path / "target")
    stored = torch.load(tmp_path / "heads/medusa_lm_head.pt")
    assert len(stored) == 3 * (2 * 2 + 1)
    hidden = torch.randn(5, 32)
    for head, wanted in enumerate(heads.logits(hidden, target.lm_head)):
        x = hidden
        for layer in range(2):
            x = x + F.silu(F.linear(x, *(stored[f"{head}.{layer}.linear.{name}"] for name in ("weight", "bias"))))
        torch.testing.assert_close(F.linear(x, stored[f"{head}.2.weight"]), wanted, rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "heads/config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2) and "model_type" not in config


def test_forms_without_a_place_are_refused(make_target, tmp_path):
    target = make_target("llama")
    for fields, message in (({"num_draft_heads": 6}, "6 draft heads"), ({"draft_vocab_size": 9}, "whole vocabulary")):
        with pytest.raises(ValueError, match=message):
            published.write_heads(tmp_path / "heads", random_heads("shared", **fields), target, tmp_path)
    with pytest.raises(ValueError, match="Llama targets"):
        published.write_target(tmp_path / "target", make_target("gpt2"))
    with pytest.raises(ValueError, match=r"head_dim 16 × 4 heads is not its width 32"):
        published.write_target(tmp_path / "target", make_target("llama", head_dim=16))
