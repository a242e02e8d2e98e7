"""A new family is one file: it trains, resumes, is exported, calibrated and decoded with by the shared commands."""

import itertools
import json
from pathlib import Path

import pytest
import toy_family
import yaml
from safetensors.torch import load_file

from draftsmith.inference import calibrate, decode
from draftsmith.inference.drafters.family import FAMILIES
from draftsmith.inference.measure import tree_search
from draftsmith.inference.measure.calibrations import CALIBRATIONS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    ask = {"prompts": 24, "prompt_tokens": 12, "new_tokens": 32, "batch_size": 12}
    steps = {"steps": 20, "batch": {"sequences": 8}}
    content = {
        "run": {"name": "whole", "output_dir": str(folder), "seed": 3},
        "target": {"name": str(tiny_lm), "model_type": "llama"},
        "drafter": {"width": 24},
        "data": {
            "train": [{"source": "stdlib", "split": "validation", "answers": ask}],
            "validation": [{"source": "stdlib", "split": "test", "answers": ask | {"prompts": 8}}],
        },
        "stages": [{"name": "fast", **steps, "optim": {"lr": 0.1}}, {"name": "slow", **steps, "optim": {"lr": 0.01}}],
        "precision": {"autocast": "none", "threads": 1},
        "checkpoint": {"every": 5, "keep": 1},
        "evaluate": {"every": 10},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(FAMILIES, "toy", "toy_family")
    monkeypatch.setitem(CALIBRATIONS, "toy", toy_family.calibration)


@pytest.fixture(scope="module")
def whole(recipe, run_main):
    code, _, err = run_main(toy_family.main, recipe)
    assert (code, err) == (0, "")
    return recipe.parent / "whole"


def metrics(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def test_it_trains_and_is_exported(whole):
    losses = metrics(whole, "loss")
    assert list(losses) == [10, 20, 30, 40] and losses[40] < losses[20] < losses[10]
    facts = json.loads((whole / "provenance.json").read_text())
    assert facts["steps"] == 40 and facts["simulated_tau"] == max(list(metrics(whole, "simulated_tau").values())[3:])
    config = json.loads((whole / "config.json").read_text())
    assert (config["drafter_type"], config["width"]) == ("toy", 24)
    shapes = {name: tuple(weight.shape) for name, weight in load_file(whole / "model.safetensors").items()}
    assert shapes == {"embed.weight": (300, 24), "out.weight": (300, 24)}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", [7, 33])
def test_a_killed_run_goes_on_bit_for_bit(recipe, whole, run_main, monkeypatch, step):
    count, calls = toy_family.Bigram.count, itertools.count()

    def counted(self, batch):
        if next(calls) == step:
            raise Killed
        return count(self, batch)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(toy_family.Bigram, "count", counted)
        run_main(toy_family.main, recipe, f"run.name=killed-{step}")
    folder = recipe.parent / f"killed-{step}"
    assert not (folder / "model.safetensors").exists()
    assert run_main(toy_family.main, recipe, f"run.name=killed-{step}", "--resume")[0] == 0
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert metrics(folder, "simulated_tau") == metrics(whole, "simulated_tau")


def test_it_is_calibrated_and_decodes(whole, run_main, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_search, "SIZES", (2, 4))
    code, out, err = run_main(calibrate.main, whole, "--seconds", "1", "--device", "cpu")
    assert code == 0 and f"{whole / 'tree.json'}: " in out, err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("import os", "def read(path):")))
    for name in (whole, f"{whole}+ngram"):
        options = ["--max-new-tokens", 24, "--threads", 1, "--baseline", "none", "--report", tmp_path]
        code, _, err = run_main(decode.main, name, "--prompts", prompts, "--check-lossless", *options)
        assert code == 0, err
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["lossless"]["identical"] is True and report["new_tokens"] == 48


@pytest.mark.whole_runs
def test_its_options_are_the_shared_ones(recipe, whole, run_main, tmp_path):
    code, out, err = run_main(toy_family.main, recipe, "--dry-run", "--verbose", f"run.output_dir={tmp_path}")
    assert code == 0 and "identical to plain decoding" in out and "lr: 0.1" in out, err
    code, _, err = run_main(toy_family.main, recipe, "--tiny", f"run.output_dir={tmp_path}")
    assert code == 0 and (tmp_path / "whole-tiny/model.safetensors").exists(), err
    again = [f"run.output_dir={tmp_path}", "run.name=again", f"init_from={whole}"]
    again += [f"stages.{stage}.optim.lr=1e-9" for stage in (0, 1)]
    assert run_main(toy_family.main, recipe, *again)[0] == 0
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "again"))
    assert all((first[name] - second[name]).abs().max() < 1e-6 for name in first)
    for override, message in {
        "drafter.widht=3": "unknown key 'drafter.widht'; nearest valid key: drafter.width",
        "drafter.width=8": "its width is 24, the recipe's 8; set drafter.width",
        "steps=3": "unknown key 'steps'; nearest valid key: stages.0.steps",
    }.items():
        code, _, err = run_main(toy_family.main, recipe, *again, override, "--restart")
        assert code == 2 and message in err and err.count("\n") == 1


def test_no_shared_file_names_it():
    rooms = ("common", "data", "inference", "kernels", "models", "train", "benchmarks", "recipes")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")] + [*(ROOT / "recipes").rglob("*")]
    assert not [path for path in files if path.is_file() and "toy_family" in path.read_text("utf-8")]
