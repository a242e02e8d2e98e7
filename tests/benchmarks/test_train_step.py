"""The cost of a training step: its arithmetic, and the command."""

import json
import shlex

import pytest

from draftsmith.benchmarks import kernel_times, medusa_stages, medusa_step, train_step, unroll
from draftsmith.models.adapter import add_lora
from draftsmith.models.medusa import MedusaHeads
from draftsmith.train.medusa import Medusa1, Medusa2, MedusaStage

pytestmark = pytest.mark.measurement


def test_operations(make_target):
    """By hand, for two layers of width 32: attention 32·32 + 2·32·16 + 32·32, MLP 3·32·48, vocabulary 61."""
    inside, head = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 61 * 32
    target = make_target("llama")
    module = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "own"))
    blocks = 3 * 32 * 32
    assert train_step.operations(target, module, 10) == 10 * (2 * inside + 6 * blocks + 6 * 3 * head)
    shared = Medusa1(target, MedusaHeads.for_target(target, 3, 1, "shared"))
    assert train_step.operations(target, shared, 10) == 10 * (2 * inside + 6 * blocks + 4 * 3 * head)
    add_lora(target, 4, 8, 0.0, ["q_proj", "o_proj"])
    stage = MedusaStage.model_validate({"optim": {"lr": 1e-3}, "batch": {"sequences": 4}, "steps": 4, "joint": {}})
    both = Medusa2(target, shared.heads, stage)
    lora = 2 * 2 * 4 * (32 + 32)
    expected = 10 * (6 * inside + 6 * head + 6 * (blocks + lora) + 4 * 3 * head)
    assert train_step.operations(target, both, 10) == expected


def test_the_command(run_main, tmp_path):
    out = tmp_path / "step.json"
    toy = "--shape tiny-lm --sequences 1 --tokens 24 --heads 2 --repeat 1 --projection shared --device cpu".split()
    code, text, err = run_main(train_step.main, *toy, "--out", out)
    assert code == 0 and err.startswith("precision: float32 weights (") and "medusa-2" in text
    found = json.loads(out.read_text())
    assert found["shape"]["dtype"] == "float32"
    assert [r["stage"] for r in found["results"]] == ["medusa-1", "medusa-2"]
    for r in found["results"]:
        assert r["tokens_per_second"] == pytest.approx(24 / r["seconds"], rel=0.01, abs=0.06)  # rounded
        share = r["operations"] / r["seconds"] / r["matmul_rate"]
        assert r["of_matmul_rate"] == pytest.approx(share, rel=0.02, abs=1e-4)
    first, second = found["results"]
    assert second["trained_parameters"] > first["trained_parameters"] and second["operations"] > first["operations"]


def test_results_that_could_not_be_written(run_main, tmp_path, write_prompts):
    """The error comes before anything is measured."""
    file = tmp_path / "file"
    file.touch()
    needed = {medusa_stages: ["--prompts", write_prompts(["import os"])]}
    for script in (medusa_step, train_step, medusa_stages, kernel_times, unroll):
        code, _, err = run_main(script.main, *needed.get(script, []), "--out", file / "sub" / "x.json")
        assert code == 2 and err.startswith(f"error: --out {file}") and "cannot write here" in err


def test_a_run_of_other_fields_is_not_taken_for_the_one_asked_for(tmp_path):
    """benchmarks/medusa_stages.py measures finished runs that are there, by their recipe and fields."""
    recipe, folder = "recipes/tiny-medusa2.yaml", tmp_path / "joint-direct-4"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    own = shlex.join([recipe, f"run.name={folder.name}", f"run.output_dir={tmp_path}", "run.seed=1"])
    (folder / "recipe.yaml").write_text(f"# accelerate launch train/medusa.py {own} --resume\nrun: {{}}\n")
    assert medusa_stages.train(recipe, tmp_path, "joint, direct", 4, ["run.seed=1"]) == folder
    for other, fields in ((recipe, ["run.seed=2"]), ("recipes/other.yaml", ["run.seed=1"])):
        with pytest.raises(ValueError, match="a run of another recipe or with other fields; give another --out"):
            medusa_stages.train(other, tmp_path, "joint, direct", 4, fields)
