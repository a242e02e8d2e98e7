"""The drafters that the repository brings: for the targets of `make models` and `make coder`, small, exact, and with
what they need."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from draftsmith.models.files.from_gguf import convert_gguf
from draftsmith.models.files.identity import fingerprint, older_fingerprint
from draftsmith.models.files.locate import FETCHED, gguf_file

ROOT = Path(__file__).parents[3]
CODER = "models/qwen2.5-coder-0.5b"
FINGERPRINTS = {  # of the GGUF files: of an earlier version, and of this one
    FETCHED: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    CODER: "b50e0d6036a50d389d8493b9b0e6a6c1edf60389" + "0" * 32,
}
SMOLLM2_DRAFTERS = {"smollm2-medusa", "smollm2-eagle3"}
CODER_DRAFTERS = {"qwen2.5-coder-0.5b-medusa"}
SHIPPED = sorted(ROOT.glob("models/*/config.json"))
DRAFTERS = [path.parent for path in SHIPPED if "drafter_type" in json.loads(path.read_text())]
NEEDS = {FETCHED: [pytest.mark.needs_models], CODER: [pytest.mark.needs_coder, pytest.mark.whole_runs]}
each = pytest.mark.parametrize("folder", DRAFTERS, ids=lambda folder: folder.name)


def target_of(folder):
    return CODER if folder.name.startswith(Path(CODER).name) else FETCHED


def test_those_for_smollm2_are_there():
    assert {folder.name for folder in DRAFTERS if target_of(folder) == FETCHED} == SMOLLM2_DRAFTERS


def test_those_for_coder_are_there():
    assert {folder.name for folder in DRAFTERS if target_of(folder) == CODER} == CODER_DRAFTERS


@each
def test_its_files(folder):
    """Without the target."""
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tree.json", "provenance.json", "README.md", "recipe.yaml"} <= names
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < 16e6
    with safe_open(folder / "model.safetensors", "pt") as stored:
        dtypes = {name: stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    others = {name: dtype for name, dtype in dtypes.items() if dtype != "BF16"}
    assert others == {"draft_vocab": "I64"} and "BF16" in dtypes.values()
    kind = json.loads((folder / "config.json").read_text())["drafter_type"]
    at_load = json.loads((folder / "tree.json").read_text()).get("at_load", False)
    assert at_load == (kind == "medusa") or (target_of(folder) == CODER and not at_load)
    made = json.loads((folder / "provenance.json").read_text())
    assert made["data_sha256"] and made["simulated_tau"] > 1.5
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".md", ".yaml", ".jsonl"):
            assert "/tmp/" not in path.read_text() and "/root/" not in path.read_text(), path.name


@each
def test_its_target(folder):
    """By the folder that is fetched and the fingerprint of the file there. Without that file."""
    wanted = json.loads((folder / "config.json").read_text())["target"]
    assert wanted["name_or_path"] == target_of(folder)
    assert not wanted.get("adapter") and wanted["fingerprint"] == FINGERPRINTS[target_of(folder)]


@pytest.mark.parametrize(
    "folder", [pytest.param(folder, marks=NEEDS[target_of(folder)], id=folder.name) for folder in DRAFTERS]
)
def test_it_decodes_the_target_exactly(folder, tmp_path, run_decode, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = gguf_file(target_of(folder))
    assert file
    stored = convert_gguf(file)
    assert FINGERPRINTS[target_of(folder)] in (fingerprint(stored), older_fingerprint(stored))
    # A tree of its own: which nodes of the shipped one pay, if any, depends on the machine and its load.
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps({"paths": [[0], [1], [0, 0]]}))
    prompt = "--prompt 'Write a Python function that adds two numbers.' --max-new-tokens 24"
    code, out, err = run_decode(f"{folder} --tree {tree} {prompt} --check-lossless --report {tmp_path}")
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["new_tokens"] == 24 and report["mean_accepted_length"] > 1
    assert "Python" in out or "def" in out
