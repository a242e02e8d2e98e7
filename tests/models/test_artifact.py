"""A drafter folder: written and read again, damaged, or made for another target."""

import json
from types import SimpleNamespace

import pytest
import torch

from draftsmith.models.artifact import check_target, read_drafter, write_drafter
from draftsmith.models.medusa import MedusaHeads


def stand_in(**other):
    """A target as far as a drafter's folder is concerned."""
    facts = {"name": "some/target", "hidden_size": 8, "vocab_size": 11, "fingerprint": "ab" * 32, **other}
    described = {"name_or_path": facts["name"], "fingerprint": facts["fingerprint"]}
    return SimpleNamespace(**facts, describe=lambda: described)


@pytest.fixture
def drafter(tmp_path):
    """A written folder and the heads in it."""
    torch.manual_seed(0)
    target = SimpleNamespace(**vars(stand_in()), lm_head=torch.nn.Linear(8, 11, bias=False), device="cpu")
    heads = MedusaHeads.for_target(target, 3, 2, "own")
    for weight in heads.parameters():
        torch.nn.init.normal_(weight)
    folder = tmp_path / "runs/x"
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), stand_in(), {"command": "train"})
    return folder, heads


def test_round_trip(drafter):
    folder, heads = drafter
    files = {file.name for file in folder.iterdir()}
    assert files >= {"config.json", "model.safetensors", "provenance.json"}
    assert not any(name.endswith(".tmp") for name in files)
    path, config, weights = read_drafter(str(folder))
    assert path == folder and config["drafter_type"] == "medusa"
    assert config["target"] == {"name_or_path": "some/target", "fingerprint": "ab" * 32}
    again = MedusaHeads.from_artifact(config, weights, str(folder))
    assert again.config == heads.config and not again.training
    for name, weight in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight)
    check_target(folder, config, stand_in())
    check_target(folder, config, stand_in(name="/copied/elsewhere"))
    assert json.loads((folder / "provenance.json").read_text()) == {"command": "train"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"hidden_size": 16}, "hidden_size 8 ≠ 16"),
        ({"vocab_size": 12}, "vocab_size 11 ≠ 12"),
        ({"fingerprint": "cd" * 32}, "same shape, other weights (fingerprint abababababab… ≠ cdcdcdcdcdcd…)"),
    ],
)
def test_drafter_for_another_target(drafter, other, said):
    folder, _ = drafter
    _, config, _ = read_drafter(str(folder))
    with pytest.raises(ValueError) as error:
        check_target(folder, config, stand_in(name="another", **other))
    message = str(error.value)
    assert message.startswith(f"{folder}: this drafter was trained for target 'some/target', not for 'another'")
    assert said in message and message.endswith("or pass --target some/target")


@pytest.mark.parametrize("kept", [0, 7, 60, -1])
def test_truncated_weights(drafter, kept):
    folder, _ = drafter
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors: .*truncated"):
        read_drafter(str(folder))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"drafter_type": ', "config.json: not valid JSON"),
        ("[]", "a JSON object is needed, got list"),
        ("3", "a JSON object is needed, got int"),
        ("{}", "not a drafter"),
    ],
)
def test_broken_config(drafter, text, said):
    folder, _ = drafter
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError) as error:
        read_drafter(str(folder))
    assert str(folder) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_missing_files(drafter, tmp_path):
    folder, _ = drafter
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors here"):
        read_drafter(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json here: no drafter"):
        read_drafter(str(folder))
    (folder / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="training has not finished; go on with --resume"):
        read_drafter(str(folder))
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        read_drafter(str(tmp_path / "nowhere"))
