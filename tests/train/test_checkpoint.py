import errno
import json
import re

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from draftsmith.train import checkpoint

STATE = {"stage": "a", "best": -1.5}


def fresh():
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[0].bias.requires_grad_(False)
    return module, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])


@pytest.fixture
def trained():
    """A module and an AdamW with moments."""
    torch.manual_seed(0)
    module, optimizer = fresh()
    module(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_everything_comes_back(trained, tmp_path):
    path = checkpoint.save(tmp_path, 7, *trained, STATE, keep=2)
    module, optimizer = fresh()
    checkpoint.restore(path, module, optimizer)
    assert checkpoint.read_state(path) == {"step": 7, **STATE}
    for restored, p in zip(module.parameters(), trained[0].parameters(), strict=True):
        if p.requires_grad:
            assert torch.equal(restored, p)
            for field, value in trained[1].state[p].items():
                assert torch.equal(optimizer.state[restored][field], value), field


def test_the_newest_are_kept(trained, tmp_path):
    for step in (8, 9, 10, 11):
        checkpoint.save(tmp_path, step, *trained, STATE, keep=2)
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".step-12.tmp").mkdir()  # a killed process left it
    checkpoint.save(tmp_path, 11, *trained, STATE, keep=2)
    assert not (tmp_path / ".step-12.tmp").exists()
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step-10", "step-11"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing"])
def test_a_damaged_checkpoint_is_one_clear_line(trained, tmp_path, file, damage):
    path = checkpoint.save(tmp_path, 7, *trained, STATE, keep=2)
    content = (path / file).read_bytes()
    (path / file).unlink()
    if damage != "missing":
        (path / file).write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    with pytest.raises(ValueError) as caught:
        checkpoint.read_state(path)
        checkpoint.restore(path, *fresh())
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: damaged checkpoint (") and line.endswith("or pass --restart")


@pytest.mark.parametrize(
    "state, field",
    [
        ({"step": 8}, "step"),
        ({"step": -7}, "step"),
        ({"step": "7"}, "step"),
        ({"stage": None}, "stage"),
        ({"best": "high"}, "best"),
        ({"stage_step": [1]}, "stage_step"),
    ],
)
def test_an_odd_state_is_one_clear_line(trained, tmp_path, state, field):
    path = checkpoint.save(tmp_path, 7, *trained, STATE, keep=2)
    (path / "state.json").write_text(json.dumps({"step": 7, **STATE, **state}))
    with pytest.raises(ValueError, match=rf"damaged checkpoint \(state\.json: '{field}' is .*; delete that folder"):
        checkpoint.read_state(path)


def test_files_of_two_checkpoints(trained, tmp_path):
    path = checkpoint.save(tmp_path, 7, *trained, STATE, keep=2)
    (path / "optimizer.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="damaged checkpoint .its files are not of one checkpoint"):
        checkpoint.restore(path, *fresh())


def test_another_model_is_refused(trained, tmp_path):
    path = checkpoint.save(tmp_path, 7, *trained, STATE, keep=2)
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="of a model of another shape; delete that folder"):
        checkpoint.restore(path, module, torch.optim.AdamW(module.parameters()))


@pytest.mark.parametrize("text, code", [("No space left on device (os error 28)", errno.ENOSPC), ("?", errno.EIO)])
def test_a_failing_write_leaves_what_stood_before(trained, tmp_path, monkeypatch, text, code):
    checkpoint.save(tmp_path, 7, *trained, STATE, keep=1)

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError(text)

    monkeypatch.setattr("safetensors.torch.save_file", full)
    for step in (7, 8):  # the same step again must not lose it either
        with pytest.raises(OSError) as caught:
            checkpoint.save(tmp_path, step, *trained, STATE, keep=1)
        assert caught.value.errno == code
    with pytest.raises(OSError) as caught:
        checkpoint.write_tensors(tmp_path, {"a": torch.zeros(1)})
    assert caught.value.errno == code
    assert [p.name for p in tmp_path.iterdir()] == ["step-7"]
    checkpoint.restore(tmp_path / "step-7", *fresh())
    assert checkpoint.read_state(tmp_path / "step-7")["step"] == 7


def test_tensors_are_written_and_read(tmp_path):
    checkpoint.write_tensors(tmp_path / "best", {"a": torch.arange(3)})
    assert torch.equal(checkpoint.read_tensors(tmp_path / "best")["a"], torch.arange(3))
    (tmp_path / "best/model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 'best'}: cannot read model.safetensors")):
        checkpoint.read_tensors(tmp_path / "best")
