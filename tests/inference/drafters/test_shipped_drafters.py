"""The drafters that the repository brings: for the target of `make models`, small, exact, and with what they need."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from draftsmith.models.from_gguf import with_safetensors
from draftsmith.models.stored import FETCHED, fingerprint, gguf_file

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(ROOT.glob("models/*/config.json"))
DRAFTERS = [path.parent for path in SHIPPED if "drafter_type" in json.loads(path.read_text())]
each = pytest.mark.parametrize("folder", DRAFTERS, ids=lambda folder: folder.name)


def test_they_are_there():
    names = {"smollm2-medusa", "smollm2-medusa2", "smollm2-eagle3", "smollm2-dynaspec"}
    assert {folder.name for folder in DRAFTERS} == names


@each
def test_its_files(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tree.json", "provenance.json", "README.md", "recipe.yaml"} <= names
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < 16e6
    with safe_open(folder / "model.safetensors", "pt") as stored:
        dtypes = {name: stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    kind = json.loads((folder / "config.json").read_text())["drafter_type"]
    whole_numbers = {"order": "I32", "starts": "I32"} if kind == "dynaspec" else {"draft_vocab": "I64"}
    others = {name: dtype for name, dtype in dtypes.items() if dtype != "BF16"}
    assert others == whole_numbers and "BF16" in dtypes.values()
    assert json.loads((folder / "tree.json").read_text()).get("at_load", False) == (kind == "medusa")
    made = json.loads((folder / "provenance.json").read_text())
    assert made["data_sha256"] and made["simulated_tau"] > 1.5
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".md", ".yaml", ".jsonl"):
            assert "/tmp/" not in path.read_text() and "/root/" not in path.read_text(), path.name


@each
@pytest.mark.needs_models
def test_it_decodes_the_target_exactly(folder, tmp_path, run_decode, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (file := gguf_file(FETCHED))
    wanted = json.loads((folder / "config.json").read_text())["target"]
    assert wanted["name_or_path"] == FETCHED
    if not wanted.get("adapter"):
        assert wanted["fingerprint"] == fingerprint(with_safetensors(file))
    # A tree of its own: which nodes of the shipped one pay, if any, depends on the machine and its load.
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps({"paths": [[0], [1], [0, 0]]}))
    prompt = "--prompt 'Write a Python function that adds two numbers.' --max-new-tokens 24"
    code, out, err = run_decode(f"{folder} --tree {tree} {prompt} --check-lossless --report {tmp_path}")
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["new_tokens"] == 24 and report["mean_accepted_length"] > 1
    assert "Python" in out or "def" in out
