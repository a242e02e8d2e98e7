"""Uploads, to a miniature Hub on this machine."""

import shutil

import pytest
import torch
from made import stand_in

from draftsmith.models.artifact import push, read_drafter, write_drafter


@pytest.fixture
def folder(tmp_path):
    files = "config.json model.safetensors README.md tree.json recipe.yaml metrics.jsonl wandb_id .writable wandb/x"
    files += " checkpoints/step-1/model.safetensors answers/train-0/model.safetensors answers/train-0/lock"
    files += " held_out/model.safetensors streams/0.json"
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"content of {name}")
    return tmp_path


def test_the_artifact_and_nothing_else(hub, folder):
    push(folder, "somebody/drafter", private=True)
    assert hub.created[0]["name"] == "drafter" and hub.created[0]["organization"] == "somebody"
    assert hub.created[0].get("private") is True or hub.created[0].get("visibility") == "private"
    stored = hub.files("models/somebody/drafter")
    assert set(stored) == {"config.json", "model.safetensors", "README.md", "tree.json", "recipe.yaml", "metrics.jsonl"}
    assert stored["tree.json"].read_text() == "content of tree.json"


def test_parts_are_uploaded(hub, folder, tiny_lm, capsys):
    """Those that the config lists, whole, and fetched again in one go; other folders and half-written files are not."""
    for name in ("ssm-0", "ssm-1", "not-a-part"):
        shutil.copytree(tiny_lm, folder / name)
    for name in ("ssm-0/.new.tmp/model.safetensors", "ssm-0/config.json.tmp", "features/0.bin", "tensorboard/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("half")
    (folder / "model.safetensors").unlink()
    write_drafter(folder, "ssm", {}, {}, stand_in(), {}, parts=["ssm-0", "ssm-1"])
    push(folder, "somebody/ensemble", private=False)
    stored = hub.files("models/somebody/ensemble")
    of_parts = {f"{part}/{file.name}" for part in ("ssm-0", "ssm-1") for file in tiny_lm.iterdir()}
    own = {"config.json", "README.md", "tree.json", "recipe.yaml", "metrics.jsonl", "provenance.json"}
    assert set(stored) == of_parts | own
    assert stored["ssm-1/model.safetensors"].read_bytes() == (tiny_lm / "model.safetensors").read_bytes()
    fetched, config, weights = read_drafter("somebody/ensemble")
    assert (config["parts"], weights) == (["ssm-0", "ssm-1"], {}) and (fetched / "ssm-1/model.safetensors").exists()
    assert capsys.readouterr().err.count("fetching") == 1


def test_parts_of_a_part_are_uploaded(hub, folder, tiny_lm):
    """A drafter's folder as a part, with its own parts; fetched again, it can be opened."""
    shutil.copytree(tiny_lm, folder / "drafter/ssm-0")
    write_drafter(folder / "drafter", "ssm", {}, {}, stand_in(), {}, parts=["ssm-0"])
    (folder / "drafter/ssm-0/config.json.tmp").write_text("half")
    write_drafter(folder, "dynaspec", {}, {"order": torch.arange(3)}, stand_in(), {}, parts=["drafter"])
    push(folder, "somebody/shortlists", private=False)
    stored = hub.files("models/somebody/shortlists")
    inside = {f"ssm-0/{file.name}" for file in tiny_lm.iterdir()} | {"config.json", "README.md", "provenance.json"}
    assert {name.removeprefix("drafter/") for name in stored if name.startswith("drafter/")} == inside
    fetched, config, _ = read_drafter("somebody/shortlists")
    assert config["parts"] == ["drafter"] and read_drafter(str(fetched / "drafter"))[1]["parts"] == ["ssm-0"]


def test_a_refusal_is_one_line(hub, folder):
    hub.refuse = True
    with pytest.raises(ValueError) as error:
        push(folder, "somebody/drafter", private=True)
    said = str(error.value)
    assert "\n" not in said and "somebody/drafter failed (" in said and "hf auth login" in said
    assert "hf_secret" not in said
    assert (folder / "model.safetensors").exists()
