"""Stored adapters: what a drafter says of the target it belongs to covers them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.models.adapter import FOLDER, add_lora, merge_adapter, target_of, write_adapter
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target


@pytest.fixture
def drafter(tiny_lm, tmp_path):
    """A drafter folder with an adapter, and the fingerprint of its target without."""
    target = load_target(str(tiny_lm))
    plain = target.fingerprint
    add_lora(target, 2, 4.0, 0.0, ["q_proj"])
    torch.manual_seed(0)
    for name, parameter in target.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    write_adapter(tmp_path, target)
    heads = MedusaHeads.for_target(target, 1, 1, "shared")
    write_drafter(tmp_path, "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
    return tmp_path, plain


def other_weights(folder, target):
    path = folder / FOLDER / "adapter_model.safetensors"
    weights = load_file(path)
    weights[sorted(weights)[0]].view(-1)[-1] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})


def other_strength(folder, target):
    path = folder / FOLDER / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 5.0}))


def other_target(folder, target):
    target.fingerprint = "cd" * 32


def test_the_adapter_is_merged(drafter, tiny_lm):
    folder, plain = drafter
    names = {file.name for file in (folder / FOLDER).iterdir()}
    assert not list(folder.rglob("*.tmp")) and names >= {"adapter_config.json", "adapter_model.safetensors"}
    _, config, _ = read_drafter(str(folder))
    assert config["target"]["adapter"] == FOLDER and config["target"]["fingerprint"] != plain
    merged = target_of(folder, config, load_target(str(tiny_lm)))
    assert merged.fingerprint == config["target"]["fingerprint"]
    tokens = torch.tensor([[5, 6, 7]])
    assert not torch.equal(merged.hidden(tokens), load_target(str(tiny_lm)).hidden(tokens))


@pytest.mark.parametrize("change", [other_weights, other_strength, other_target])
def test_the_fingerprint_covers_the_adapter_and_the_target_below_it(drafter, tiny_lm, change):
    folder, _ = drafter
    target = load_target(str(tiny_lm))
    change(folder, target)
    _, config, _ = read_drafter(str(folder))
    with pytest.raises(ValueError, match="same shape, other weights"):
        target_of(folder, config, target)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("adapter_model.safetensors", None, "no adapter_model.safetensors here"),
        ("adapter_model.safetensors", b"half", "not a safetensors file, or truncated"),
        ("adapter_config.json", None, "adapter_config.json: there is no such adapter config"),
        ("adapter_config.json", b"{", "adapter_config.json: not valid JSON"),
        ("adapter_config.json", b"[]", "adapter_config.json: a JSON object is needed"),
        ("adapter_config.json", b'{"peft_type": "NONESUCH"}', "does not fit target"),
        ("adapter_config.json", b"{}", "does not fit target"),
    ],
)
def test_damaged(drafter, tiny_lm, name, content, said):
    folder, _ = drafter
    (folder / FOLDER / name).unlink()
    if content is not None:
        (folder / FOLDER / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        merge_adapter(load_target(str(tiny_lm)), folder / FOLDER)
    assert said in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_on_an_older_fingerprint(drafter, tiny_lm):
    """As earlier versions wrote it: over the target's older fingerprint."""
    folder, _ = drafter
    target = load_target(str(tiny_lm))
    target.fingerprint = target.older_fingerprint
    older = merge_adapter(target, folder / FOLDER).fingerprint
    _, config, _ = read_drafter(str(folder))
    config["target"] |= {"fingerprint": older}
    merged = target_of(folder, config, load_target(str(tiny_lm)))
    assert merged.adapter == FOLDER and older != merged.fingerprint
