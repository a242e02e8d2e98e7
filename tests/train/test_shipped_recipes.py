"""Every shipped recipe runs by the command in its first line, with --tiny: it trains, writes an artifact, decodes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
BIN = Path(sys.executable).parent


def test_how_many_there_are():
    assert [path.stem for path in RECIPES] == [
        "llama3-70b-distill", "llama3-70b-zero3", "llama3-8b", "qwen3-8b", "tiny-distill", "tiny-lm", "tiny-medusa",
        "tiny-medusa2", "vicuna33b-distill", "vicuna33b-self-distill", "vicuna7b", "zephyr7b-distill",
        "zephyr7b-self-distill",
    ]  # fmt: skip


def run(command, **options):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


TRAINING = [path for path in RECIPES if not path.stem.endswith("-distill") or path.stem.endswith("self-distill")]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_tiny(path, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    words = shlex.split(path.read_text().splitlines()[0][2:])
    *launch, script, recipe = words
    assert recipe == f"recipes/{path.name}" and launch[:2] == ["accelerate", "launch"]
    if "--num_processes" in words:
        words[words.index("--num_processes") + 1] = "2"  # for eight GPUs there are two processes on a CPU
    done = run([BIN / words[0], *words[1:], "--tiny", f"run.output_dir={tmp_path}", "precision.threads=1"])
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / f"{yaml.safe_load(path.read_text())['run']['name']}-tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in lines)
    options = ["--prompt", "import os", "--max-new-tokens", "8", "--threads", "1", "--report", str(tmp_path / "report")]
    if script == "train/lm.py":
        drafter = ["none", "--target", str(folder)]
    else:
        drafter = [str(folder), "--check-lossless"]
        calibrated = run([sys.executable, "inference/calibrate.py", str(folder), "--nodes", "4"])
        assert calibrated.returncode == 0, calibrated.stderr
    decoded = run([sys.executable, "inference/decode.py", *drafter, *options])
    assert decoded.returncode == 0, decoded.stderr
    assert json.loads((tmp_path / "report" / "report.json").read_text())["new_tokens"] == 8
