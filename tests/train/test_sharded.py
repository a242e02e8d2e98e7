"""Strategies for many devices, with two processes on the CPU: the loss curve of one process, artifacts like any other,
checkpoints that each of them can go on from."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from training_runs import metrics, write_recipe

from draftsmith.common.recipe import read_recipe
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.models.artifact import write_json
from draftsmith.models.target import load_target
from draftsmith.train import medusa, sharded
from draftsmith.train.folders import held
from draftsmith.train.script import _check_strategy

ROOT = Path(__file__).parents[2]
SPREAD = ["fsdp", "zero3"]
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # two processes cannot share the one GPU there may be
KEYS = ("loss", "lm_loss", "kl", "simulated_tau", "perplexity")


STAGE = {"batch": {"sequences": 8, "accumulate": 2}, "steps": 10}
HEADS = {"name": "medusa-1", **STAGE, "optim": {"lr": 1e-2, "schedule": "constant"}}
HEADS_ALONE = f"stages=[{json.dumps(HEADS)}]"


MAIN = medusa.main


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    """Two stages of ten steps, with micro-batches of their own."""
    joint = {"lora": {"r": 4, "dropout": 0.0}, "head_weight": 0.1, "ramp": "constant"}
    batch = {"sequences": 8, "accumulate": 4}
    adapters = {
        "name": "medusa-2",
        **STAGE,
        "batch": batch,
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "joint": joint,
    }
    return write_recipe(
        tmp_path_factory.mktemp("runs"),
        tiny_lm,
        {"num_draft_heads": 3, "projection": "shared"},
        [HEADS, adapters],
        precision={"autocast": "none", "threads": 1, "gradient_checkpointing": True},
        checkpoint={"every": 5, "keep": 1},
        evaluate={"every": 5},
    )


@pytest.fixture(scope="module")
def whole(train):
    """What one process makes of it."""
    return train("whole")


def launched(strategy):
    """The first words of a command with two processes."""
    command = [Path(sys.executable).parent / "accelerate", "launch", "--quiet", "--num_processes", "2"]
    config = ["--config_file", ROOT / f"recipes/accelerate/{strategy}.yaml"]
    return command + (["--multi_gpu"] if strategy == "ddp" else config)


def launch(strategy, recipe, name, *overrides, prepared=None):
    """The command with two processes. ``prepared``: a run whose answers are used, for a spread target makes none."""
    if prepared and not (recipe.parent / name).exists():
        with held(recipe.parent / name, "medusa"):
            pass
        shutil.copytree(prepared / "answers", recipe.parent / name / "answers")
    return subprocess.Popen(
        [*launched(strategy), "train/medusa.py", recipe, f"run.name={name}", *overrides],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return out


@pytest.mark.parametrize(
    "strategy", ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero2", "zero3"))]
)
@pytest.mark.whole_runs
def test_two_processes_train_as_one(recipe, whole, strategy):
    """Every figure of the whole run within a thousandth."""
    finish(launch(strategy, recipe, strategy, prepared=whole))
    folder = recipe.parent / strategy
    for key in KEYS:
        assert metrics(folder, key) == pytest.approx(metrics(whole, key), rel=1e-3, abs=1e-5), key
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "checkpoints/step-20/model.safetensors"):
        ours, theirs = load_file(folder / name), load_file(whole / name)
        assert ours.keys() == theirs.keys()
        for key, weight in ours.items():
            assert weight.dtype == torch.float32 and weight.shape == theirs[key].shape
            assert (weight - theirs[key]).abs().max() < 1e-3, key  # after 20 steps of up to 0.01
    for run in (folder, whole):
        write_json(run / "tree.json", {"paths": [[0], [0, 0]]})
    (target, drafter), (like, _) = load_drafter(str(folder)), load_drafter(str(whole))
    ids = torch.arange(5, 60)[None]
    torch.testing.assert_close(target.hidden(ids), like.hidden(ids), rtol=1e-2, atol=1e-2)
    assert SpeculativeDecoder(target, drafter).generate([[5, 6]], 5)[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", "zero2-zero2 zero3-zero3 fsdp-fsdp zero3-fsdp fsdp-one ddp-zero3 zero2-fsdp fsdp-zero2".split()
)
def test_another_strategy_goes_on(recipe, whole, train, name):
    """A run is killed in its second stage and goes on under another strategy, or in one process."""
    (first, then), folder = name.split("-"), recipe.parent / name
    process = launch(first, recipe, name, prepared=whole)
    while not (folder / "checkpoints/step-15").exists():
        time.sleep(0.02)
        assert process.poll() is None, process.communicate()[1][-3000:]
    launcher = psutil.Process(process.pid)
    for one in [launcher, *launcher.children(recursive=True)]:  # the workers are in sessions of their own
        one.kill()
    process.communicate()
    assert not (folder / "model.safetensors").exists(), "it was not killed in time"
    stale = folder / "checkpoints/deepspeed/step-99"
    (stale if first == "zero2" else folder).mkdir(parents=True, exist_ok=True)
    if then != "one":
        out = finish(launch(then, recipe, name, "--resume"))
    else:
        train(name, "--resume")
        out = train.out
    assert not stale.exists(), "what another run left would be deleted last, and the new states first"
    assert len(list(folder.glob("checkpoints/deepspeed/step-20/*optim_states.pt"))) == (2 if then == "zero2" else 0)
    anew = first != then and "zero2" in (first, then)
    assert ("has no optimizer state for this launch; it begins anew" in out) == anew
    for key in KEYS[2:]:  # a line of losses is a mean over the steps since the run went on
        near = 0.1 if anew else 1e-3
        assert metrics(folder, key) == pytest.approx(metrics(whole, key), rel=near, abs=near), key
    assert json.loads((folder / "provenance.json").read_text())["steps"] == 20


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_hidden_states_on_disk(recipe, whole, strategy):
    """Made by two processes, each a share, or together where the target is spread."""
    name = f"{strategy}-disk"
    overrides = ["cache_hidden=disk", HEADS_ALONE, "precision.gradient_checkpointing=false"]
    out = finish(launch(strategy, recipe, name, *overrides, prepared=whole))
    folder = recipe.parent / name
    assert "on disk in" in out and (folder / "features/0/0.bin").exists()
    for key in ("loss", "head1_loss"):
        wanted = {step: value for step, value in metrics(whole, key).items() if step <= 10}
        assert metrics(folder, key) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SPREAD)
def test_a_process_holds_its_part(strategy, tiny_lm, tmp_path):
    """Half of the layers' weights, and nothing that asks for a whole target goes unsaid."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from draftsmith.models.target import load_target\n"
        "from draftsmith.train import launch, sharded\n"
        "from draftsmith.common.sections import Precision\n"
        "accelerator = launch.make_accelerator(Precision(threads=1))\n"
        "with sharded.placing(accelerator, 'float32') as loader:\n"
        "    target = load_target(sys.argv[1], loader=loader)\n"
        "here = lambda p: p.ds_tensor.numel() if hasattr(p, 'ds_tensor') else getattr(p, '_local_tensor', p).numel()\n"
        "layers = [p for n, p in target.model.named_parameters() if 'layers' in n]\n"
        "print(f'held {sum(map(here, layers))} of {sum(map(sharded.size, layers))}\\n', end='', flush=True)\n"
    )
    command = [*launched(strategy), script, tiny_lm]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    held = [list(map(int, line.split()[1::2])) for line in done.stdout.splitlines() if line.startswith("held")]
    parameters = sum(p.numel() for n, p in load_target(str(tiny_lm)).model.named_parameters() if "layers" in n)
    assert len(held) == 2 and all(whole == parameters for _, whole in held)
    assert all(abs(part - parameters / 2) <= 0.01 * parameters for part, _ in held)


PLAIN = [HEADS_ALONE, "precision.gradient_checkpointing=false"]


@pytest.mark.parametrize(
    ("version", "overrides", "message"),
    [
        ("1", [], "asks for FSDP 1 or for offloading; set fsdp"),
        ("2", [*PLAIN, "precision.compile=true"], "not quantised or compiled"),
        ("2", [*PLAIN, "target.quantize=8bit", "--dry-run"], "not quantised or compiled"),
    ],
)
def test_what_is_not_supported_is_one_line(train, monkeypatch, version, overrides, message):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    assert message in train.refused("refused", *overrides)


def test_what_zero_2_cannot_train(recipe, monkeypatch):
    """It hands the optimizer parts of matrices."""
    monkeypatch.setattr(sharded, "strategy", lambda: "zero2")
    _check_strategy(read_recipe(recipe, medusa.MedusaRecipe, PLAIN))
    with pytest.raises(ValueError, match="optim.name=muon: ZeRO-2 cuts matrices into parts; use adamw"):
        _check_strategy(read_recipe(recipe, medusa.MedusaRecipe, [*PLAIN, "stages.0.optim.name=muon"]))


@pytest.mark.slow
def test_a_spread_target_answers_nothing(recipe):
    process = launch("fsdp", recipe, "asks")
    _, err = process.communicate()
    assert process.returncode == 1 and "error: data source 'stdlib': a target that is spread" in err
    assert 'Traceback (most recent call last):\n  File "train' not in err


def test_strategies_are_what_the_launcher_says(monkeypatch):
    assert sharded.strategy() == "none" and not sharded.spreads()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert sharded.strategy() == "fsdp" and sharded.spreads()
    with sharded.hidden_from_accelerate():
        assert "ACCELERATE_USE_FSDP" not in os.environ
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
