"""Drafters that train beside a target in parts (FSDP), with several processes on the CPU: the run of one process, and
weights that only the first process reads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import Runs, metrics, write_recipe

from draftsmith.models.target import load_target
from draftsmith.train import eagle, ssm
from draftsmith.train.folders import held

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
FSDP = [Path(sys.executable).parent / "accelerate", "launch", "--quiet", "--num_processes", "2"]
FSDP += ["--config_file", ROOT / "recipes/accelerate/fsdp.yaml"]
STAGE = {"batch": {"sequences": 8, "accumulate": 2}, "optim": {"lr": 1e-3, "schedule": "constant"}, "steps": 4}
SECTIONS: dict[str, Any] = {"checkpoint": {"every": 2, "keep": 1}, "evaluate": {"every": 2}}
KINDS = {
    "eagle": (eagle, {"version": 3, "unroll": 3, "draft_vocab_size": 80}, [{"name": "eagle-3", **STAGE}]),
    "ssm": (ssm, {"layers": [1], "loss": "kl"}, [{"name": "ssm-0", **STAGE}]),
}


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.whole_runs
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_beside_a_target_in_parts(kind, tiny_lm, tmp_path, run_main):
    """Two processes train to step 2, and go on from there to step 4, as one process does: losses, evaluations, weights
    and what is exported."""
    module, drafter, stages = KINDS[kind]
    recipe = write_recipe(tmp_path, tiny_lm, drafter, stages, **SECTIONS)
    whole = Runs(module.main, recipe, run_main)("whole")
    folder = tmp_path / "parts"
    with held(folder, kind):
        pass
    shutil.copytree(whole / "answers", folder / "answers")  # a target in parts makes none
    command = [*FSDP, f"train/{kind}.py", recipe, "run.name=parts"]
    run([*command, "stages.0.steps=2"])
    run([*command, "--resume"])
    assert metrics(folder, "simulated_tau") == pytest.approx(metrics(whole, "simulated_tau"), rel=1e-5)
    halves = metrics(folder, "loss")  # means over the steps since the run went on
    assert (halves[2] + halves[4]) / 2 == pytest.approx(metrics(whole, "loss")[4], abs=2e-5)
    names = [path.relative_to(whole) for path in whole.rglob("model.safetensors") if "answers" not in path.parts]
    assert len(names) >= 4
    for name in names:
        ours, theirs = load_file(folder / name), load_file(whole / name)
        assert ours.keys() == theirs.keys()
        for key, weight in ours.items():
            assert (weight.double() - theirs[key].double()).abs().max() <= 1e-5, f"{name}: {key}"
    assert json.loads((folder / "provenance.json").read_text())["steps"] == 4


def test_zero_3_trains_no_eagle_and_no_ssm(tiny_lm, tmp_path, run_main, monkeypatch):
    monkeypatch.setattr("draftsmith.train.sharded.strategy", lambda: "zero3")
    monkeypatch.setattr("draftsmith.train.run.load_target", lambda *_, loader, **named: load_target(*_, **named))
    for kind, (module, drafter, stages) in KINDS.items():
        recipe = write_recipe(tmp_path, tiny_lm, drafter, stages, **SECTIONS)
        refused = Runs(module.main, recipe, run_main).refused(kind)
        assert "ZeRO-3" in refused and "launch with recipes/accelerate/fsdp.yaml" in refused


SCRIPT = """
import os, sys
import torch
from draftsmith.common.sections import Precision
from draftsmith.models.target import load_target
from draftsmith.train import launch, sharded

accelerator = launch.make_accelerator(Precision(threads=1))
os.environ["LOCAL_WORLD_SIZE"] = sys.argv[3]
with sharded.placing(accelerator, "float32") as loader:
    target = load_target(sys.argv[1 + min(1, accelerator.process_index)], loader=loader)
with torch.no_grad():
    features = target.features(torch.arange(5, 25).view(2, 10), [1])
embedded = target.embeddings(torch.arange(5, 25))
layers = [p for p in target.layers.parameters()]
held, mesh = sum(p.to_local().numel() for p in layers), layers[0].device_mesh
found = [held / sum(p.numel() for p in layers), list(mesh.shape), sorted(target.stop_ids), target.fingerprint]
torch.save([*found, features, embedded], f"{sys.argv[4]}/{accelerator.process_index}.pt")
"""


@pytest.mark.whole_runs
@pytest.mark.parametrize(
    ("processes", "in_a_node", "mesh", "part"),
    [(2, 2, [2], 1 / 2), pytest.param(4, 2, [2, 2], 1 / 2, marks=pytest.mark.slow)],
)
def test_only_the_first_process_reads_the_weights(processes, in_a_node, mesh, part, tiny_lm, tmp_path):
    """The others are given a folder whose weights are zeros. With two nodes, each has all layers."""
    zeros = shutil.copytree(tiny_lm, tmp_path / "zeros")
    weights = load_file(zeros / "model.safetensors")
    save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, zeros / "model.safetensors")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*FSDP, "--num_processes", str(processes), script, tiny_lm, zeros, str(in_a_node), tmp_path]
    run(command)
    target = load_target(str(tiny_lm))
    with torch.no_grad():
        features = target.features(torch.arange(5, 25).view(2, 10), [1])
    for rank in range(processes):
        held, shape, stops, fingerprint, found, embedded = torch.load(tmp_path / f"{rank}.pt")
        assert shape == mesh and held == pytest.approx(part, rel=0.02)
        assert (stops, fingerprint) == (sorted(target.stop_ids), target.fingerprint)
        torch.testing.assert_close(found, features, rtol=0, atol=1e-5)
        torch.testing.assert_close(embedded, target.embeddings(torch.arange(5, 25)), rtol=0, atol=0)
