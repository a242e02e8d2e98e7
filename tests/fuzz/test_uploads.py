"""Uploads that fail, by models/export.py and by training: one line, an exit code other than 0, the folder whole, the
token nowhere; to a miniature Hub on this machine."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import yaml
from server import TOKEN, Hub

from draftsmith.inference import calibrate
from draftsmith.inference.measure import tree_search
from draftsmith.models import export
from draftsmith.models.artifact import write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.target import load_target
from draftsmith.train import medusa
from draftsmith.train import run as running
from draftsmith.train.run import Run

LONGEST = 20  # seconds that an answer may take beyond the work itself
MINE, OTHERS = "somebody/drafter", "else/drafter"


@pytest.fixture
def hub(tmp_path_factory, monkeypatch):
    with Hub(tmp_path_factory.mktemp("hub")) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(server.folder / "no-token"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server
        assert server.unknown == []


@pytest.fixture(scope="module")
def drafter(tiny_lm, tmp_path_factory):
    target = load_target(str(tiny_lm))
    torch.manual_seed(0)
    eagle = Eagle.for_target(target, 1, "shared")
    folder = tmp_path_factory.mktemp("uploads") / "eagle"
    write_drafter(folder, "eagle", eagle.config.to_dict(), eagle.state_dict(), target, {})
    return folder


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    source = {"source": str(folder / "text.txt")}
    (folder / "text.txt").write_text("import os\ndef read(path):\n    return path\n" * 40)
    stage = {"batch": {"sequences": 1}, "steps": 1, "optim": {"lr": 1e-3}}
    content = {
        "run": {"name": "x"},
        "target": {"name": str(tiny_lm)},
        "drafter": {"num_draft_heads": 1},
        "stages": [stage],
        "data": {"train": [source], "validation": [source], "max_length": 64},
        "precision": {"autocast": "none", "threads": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml"


def failing(step: str, status: int) -> Callable[[Any], object]:
    return lambda w: w.hub.failing.update({step: status})


def token(text: str) -> Callable[[Any], object]:
    return lambda w: w.patch.setenv("HF_TOKEN", text)


def token_file(text: str) -> Callable[[Any], object]:
    def write(w: Any) -> None:
        (w.hub.folder / "token").write_text(text)
        w.patch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(w.hub.folder / "token"))
        w.patch.delenv("HF_TOKEN")

    return write


def of_others(w: Any) -> None:
    (w.hub.folder / f"models/{OTHERS}").mkdir(parents=True)
    (w.hub.folder / f"models/{OTHERS}/config.json").write_text("theirs")


# Name → what goes wrong, the repository, and what the line has to say.
FAILURES: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "no token": (lambda w: w.patch.delenv("HF_TOKEN"), MINE, "hf auth login"),
    "an empty token": (token(""), MINE, "hf auth login"),
    "another token": (token("hf_other"), MINE, "401"),
    "a token with a space": (token("hf_sec ret"), MINE, "hf auth login"),
    "a token with an accent": (token("hf_secrét"), MINE, "hf auth login"),
    "a token of two lines": (token("hf_sec\nrex"), MINE, "hf auth login"),
    "a token with a control character": (token("hf_sec\x01ret"), MINE, "hf auth login"),
    "a token with a null": (token_file("hf_sec\0ret"), MINE, "hf auth login"),
    "no rights": (lambda w: setattr(w.hub, "refuse", True), MINE, "403"),
    "nobody else's name": (lambda w: None, OTHERS, 'under the namespace "else"'),
    "somebody else's repository": (of_others, OTHERS, 'under the namespace "else"'),
    "no network": (lambda w: w.patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9"), MINE, ""),
    "offline": (lambda w: w.patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True), MINE, "ffline"),
    **{
        f"{step}: {status or 'hangs up'}": (failing(step, status), MINE, str(status or ""))
        for step in ("create", "preupload", "commit")
        for status in (500, 503, 0)
    },
}


def check(done: tuple[int, str, str], began: float, folder: Path, *places: Path) -> str:
    """One line that names the folder; no part of a token in it, or in any file."""
    code, out, err = done
    assert code in (1, 2), (out, err)
    lines = [line for line in err.splitlines() if not line.startswith("precision: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 1000, err
    assert str(folder) in lines[0] and "the folder is whole" in lines[0], err
    secret = os.environ.get("HF_TOKEN") or TOKEN
    texts = [
        out,
        err,
        *(path.read_bytes().decode("latin-1") for place in places for path in place.rglob("*.*")),
    ]  # not the file of a token
    assert not any(part in text for part in secret.split() for text in texts if len(part) > 3)
    assert not any(repr(secret)[1:-1] in text or "hf_sec" in text for text in texts)
    assert time.monotonic() - began < LONGEST
    return lines[0]


@pytest.mark.parametrize("case", FAILURES)
def test_exporting(hub, drafter, run_main, tmp_path, tiny_lm, monkeypatch, case):
    prepare, repository, said = FAILURES[case]
    prepare(SimpleNamespace(hub=hub, patch=monkeypatch))
    out, began = tmp_path / "served", time.monotonic()
    words = [drafter, "--to", "sglang", "--target", tiny_lm, "--out", out, "--push-to-hub", repository]
    line = check(run_main(export.main, *words), began, out, tmp_path, hub.folder)
    assert said in line and repository in line, line
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors", "provenance.json", "README.md"}
    there = hub.files(f"models/{repository}")
    assert {name: path.read_text() for name, path in there.items()} == (
        {"config.json": "theirs"} if case == "somebody else's repository" else {}
    ), "nothing, or nothing new, is there"


@pytest.mark.whole_runs
def test_training(hub, recipe, run_main, tmp_path, monkeypatch):
    """The run is done, and stays."""
    prepare, repository, said = FAILURES["commit: 500"]
    prepare(SimpleNamespace(hub=hub, patch=monkeypatch))
    folder, began = tmp_path / "x", time.monotonic() + 60  # it is calibrated first
    words = [recipe, f"run.output_dir={tmp_path}", f"export.push_to_hub={repository}"]
    line = check(run_main(medusa.main, *words), began, folder, tmp_path, hub.folder)
    assert said in line and repository in line, line
    assert json.loads((folder / "config.json").read_text())["drafter_type"] == "medusa"
    assert "calibration" in json.loads((folder / "tree.json").read_text())
    assert hub.files(f"models/{repository}").keys() <= {"config.json"}


def test_training_uploads_a_calibrated_tree(hub, recipe, run_main, tmp_path, monkeypatch):
    """With the card of what calibration found; where it fails, nothing is uploaded, and the line's commands do it.
    Calibration runs in this process, of two sizes; as users have it: above."""

    def calibrated(command: list[str], **options: Any) -> SimpleNamespace:
        assert command[1:3] == ["-m", "draftsmith.inference.calibrate"]
        code, out, err = run_main(calibrate.main, *command[3:])
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(tree_search, "SIZES", (2, 3))
    monkeypatch.setattr(running, "subprocess", SimpleNamespace(run=calibrated))
    folder, export_run = tmp_path / "a b", Run.export
    rows, words = folder / "held_out", [recipe, f"run.output_dir={tmp_path}", "run.name=a b"]
    words += [f"export.push_to_hub={MINE}"]

    def export_and_lose_rows(*arguments: Any, **named: Any) -> None:
        export_run(*arguments, **named)
        rows.rename(tmp_path / "kept")

    monkeypatch.setattr(Run, "export", export_and_lose_rows)
    code, _, err = run_main(medusa.main, *words)
    assert code == 2 and err.splitlines()[-1].startswith(f"error: not uploaded to {MINE}: calibrating failed ({folder}")
    assert "holds no held-out rows" in err and not hub.created and not (folder / "tree.json").exists()
    (tmp_path / "kept").rename(rows)
    for command in err.strip().rpartition("; run: ")[2].split(" && "):
        python, script, *rest = shlex.split(command)
        assert python == "python"
        main = {"inference/calibrate.py": calibrate.main, "models/export.py": export.main}[script]
        assert run_main(main, *rest)[0] == 0
    assert "calibration" in json.loads(hub.files(f"models/{MINE}")["tree.json"].read_text())
    monkeypatch.setattr(Run, "export", export_run)
    (folder / "tree.json").unlink()
    code, out, _ = run_main(medusa.main, *words, "--restart")
    assert code == 0 and "calibrated on" in out
    stored = hub.files(f"models/{MINE}")
    assert "τ that calibration expects" in stored["README.md"].read_text()
    assert stored["tree.json"].read_bytes() == (folder / "tree.json").read_bytes()


@pytest.mark.parametrize(
    "case, said",
    [
        ("no token", "nobody is logged in to the Hub here; run hf auth login, or leave the upload out"),
        ("an empty token", "nobody is logged in"),
        ("offline", "HF_HUB_OFFLINE is set; unset it, or leave the upload out"),
    ],
)
def test_training_that_could_not_upload_does_not_begin(hub, recipe, run_main, tmp_path, monkeypatch, case, said):
    FAILURES[case][0](SimpleNamespace(hub=hub, patch=monkeypatch))
    words = [recipe, f"run.output_dir={tmp_path}", f"export.push_to_hub={MINE}"]
    code, out, err = run_main(medusa.main, *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and f"export.push_to_hub={MINE}: {said}" in err
    assert not list(tmp_path.iterdir())


def test_the_command_that_the_line_advises_is_one(hub, drafter, run_main, tmp_path, tiny_lm, monkeypatch):
    """It uploads the same, as a private repository where that was asked for."""
    monkeypatch.setattr(hub, "refuse", True)
    out = tmp_path / "a b"
    words = [drafter, "--to", "sglang", "--target", tiny_lm, "--out", out, "--push-to-hub", MINE, "--private"]
    line = check(run_main(export.main, *words), time.monotonic(), out)
    monkeypatch.setattr(hub, "refuse", False)
    words = shlex.split(line.partition("then: ")[2])
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    (out / "config.json.tmp").write_text("half")
    done = subprocess.run(
        [Path(sys.executable).parent / words[0], *words[1:]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(hub.files(f"models/{MINE}")) == {"config.json", "model.safetensors", "provenance.json", "README.md"}
    (made,) = hub.created
    assert made.get("private") is True or made.get("visibility") == "private"


@pytest.mark.parametrize(
    "repository", ["a/b/c", "../x", "a b/c", "somebody/a..b", "somebody/x.git", "somebody/" + "x" * 97, ""]
)
def test_names_that_no_repository_has(hub, drafter, run_main, tmp_path, tiny_lm, repository):
    """Of a recipe: tests/common/test_recipe.py."""
    out = tmp_path / "served"
    words = [drafter, "--to", "sglang", "--target", tiny_lm, "--out", out, "--push-to-hub", repository]
    code, _, err = run_main(export.main, *words)
    lines = [line for line in err.splitlines() if not line.startswith("precision: ")]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and repository in lines[0], err
    assert not hub.created and not out.exists()
