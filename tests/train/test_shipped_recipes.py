"""Every shipped recipe trains with --tiny, writes an artifact, and that one decodes.

In this process, which imports but once. By its first line, ``accelerate launch …``, each does the same in the slow
test; of the fast ones tests/hub launches vicuna7b's and llama3-70b-zero3's.
"""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from draftsmith.inference import calibrate, decode
from draftsmith.inference.measure import report, tree_search

pytestmark = pytest.mark.whole_runs

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BIN = Path(sys.executable).parent


TRAINING = [path for path in RECIPES if path.read_text().startswith("# accelerate launch ")]
every_recipe = pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Where the commands run, and caches that hold nothing yet; few steps are timed, and no picture of a report is
    drawn. tests/hub does both as users do, for each family."""
    monkeypatch.setattr(tree_search, "SIZES", (2, 4))
    monkeypatch.setattr(report, "plot", lambda *_: None)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def first_line(path):
    """The words behind ``accelerate launch``, which takes them; the script."""
    words = shlex.split(path.read_text().splitlines()[0][2:])
    assert words[:2] == ["accelerate", "launch"]
    launched = launch_command_parser().parse_args(words[2:])
    assert launched.training_script_args == [f"recipes/{path.name}"] and Path(launched.training_script).exists()
    assert launched.config_file is None or Path(launched.config_file).exists()
    return words[2:], launched.training_script


def options(tmp_path):
    return ["--tiny", f"run.output_dir={tmp_path}", "precision.threads=1"]


def check(path, tmp_path, run_main):
    """What was trained is calibrated, and decodes."""
    folder = tmp_path / f"{yaml.safe_load(path.read_text())['run']['name']}-tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in lines)
    ask = ["--prompt", "import os", "--max-new-tokens", "8", "--threads", "1", "--report", tmp_path / "report"]
    if "drafter_type" not in json.loads((folder / "config.json").read_text()):
        drafter = ["none", "--target", folder]
    else:
        drafter = [folder, "--check-lossless"]
        code, _, err = run_main(calibrate.main, folder, "--nodes", "4", "--max-new-tokens", "8")
        assert code == 0, err
    code, _, err = run_main(decode.main, *drafter, *ask)
    assert code == 0, err
    assert json.loads((tmp_path / "report" / "report.json").read_text())["new_tokens"] == 8


@every_recipe
def test_tiny(path, tmp_path, run_main):
    _, script = first_line(path)
    module = importlib.import_module(f"draftsmith.train.{Path(script).stem}")
    code, _, err = run_main(module.main, f"recipes/{path.name}", *options(tmp_path))
    assert code == 0, err
    check(path, tmp_path, run_main)


@pytest.mark.slow
@every_recipe
def test_tiny_by_its_first_line(path, tmp_path, run_main):
    words, _ = first_line(path)
    if "--num_processes" in words:
        words[words.index("--num_processes") + 1] = "2"  # for eight GPUs there are two processes on a CPU
    done = subprocess.run([BIN / "accelerate", "launch", *words, *options(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    check(path, tmp_path, run_main)
