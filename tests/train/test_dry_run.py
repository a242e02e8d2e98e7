"""--dry-run: prints sizes and costs, then trains and decodes the recipe's tiny form. And the schemas."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import LlamaConfig, Qwen3MoeConfig

from draftsmith.common.files import read_json
from draftsmith.common.recipe import read_recipe
from draftsmith.common.sections import Stage, TargetSection
from draftsmith.tools import schema
from draftsmith.train import dry_run, dynaspec, eagle, launch, lm, medusa, ssm
from draftsmith.train.loop import micro_batch
from draftsmith.train.machine import Machine
from draftsmith.train.memory import Kept, widths
from draftsmith.train.tiny import tiny

ROOT = Path(__file__).parents[2]


def test_medusa(run_main, tmp_path):
    options = [f"run.output_dir={tmp_path}/new/runs", "drafter.projection=own", "stages.0.optim.lr=0.004"]
    recipe = ROOT / "recipes/tiny-medusa.yaml"
    code, out, err = run_main(medusa.main, recipe, "--dry-run", "--verbose", *options)
    assert code == 0, err
    assert "lr: 0.004" in out, "the resolved recipe"
    target = json.loads((ROOT / "models/tiny-lm/config.json").read_text())
    width, vocab_size = target["hidden_size"], target["vocab_size"]
    trained = 4 * (2 * (width * width + width) + width * vocab_size)
    assert f"{trained / 1e6:,.1f} M" in out
    assert "identical to plain decoding" in out and "next: " not in out and not list(tmp_path.iterdir())


def test_what_is_not_its_own_is_left_alone(run_main, tmp_path):
    mine = tmp_path / "demo-dry-run/mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    options = ("--dry-run", f"run.output_dir={tmp_path}")
    code, out, err = run_main(medusa.main, ROOT / "recipes/tiny-medusa.yaml", *options)
    assert code == 2 and "holds other things" in err and mine.read_text() == "mine"
    assert "gradient_checkpointing" not in out, "the whole recipe only with --verbose"


@pytest.mark.parametrize(
    "main, name, override, message",
    [
        (medusa.main, "tiny-medusa", "data.train=[{source: NOPE.jsonl}]", "'NOPE.jsonl': there is no such file"),
        (medusa.main, "tiny-medusa", "data.validation=[{source: {}/odd.jsonl}]", "an unknown role (known: "),
        (medusa.main, "vicuna7b", "data.train=[{source: {}/odd.jsonl}]", "an unknown role (known: "),
        (lm.main, "tiny-lm", "data.train=[{source: package:nothing_here}]", "package 'nothing_here' is not installed"),
        (medusa.main, "tiny-medusa", "drafter.draft_vocab_size=99999", "draft_vocab_size"),
        (eagle.main, "tiny-eagle3", "drafter.captured_layers=[2,99,3]", "the target has layers 0 to 11"),
        (medusa.main, "tiny-medusa", "init_from=models/smollm2-eagle3", "its drafter_type is 'eagle', not 'medusa'"),
        (medusa.main, "tiny-medusa", "target.name=models/smollm2-medusa", "this is a drafter, not a target"),
        (dynaspec.main, "tiny-dynaspec", "drafter.base=models/smollm2-medusa", "of type 'medusa' take no shortlists"),
        (dynaspec.main, "tiny-dynaspec", "drafter.base=./none", "'./none': there is no such folder"),
    ],
)
def test_what_training_would_refuse(run_main, tmp_path, main, name, override, message):
    rows = 3 * [{"messages": [{"role": "robot", "content": "x"}]}]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--dry-run", f"run.output_dir={tmp_path}/runs", override.replace("{}", str(tmp_path)))
    code, _, err = run_main(main, ROOT / f"recipes/{name}.yaml", *options)
    assert code == 2 and message in err and err.count("\n") == 1, err
    assert not (tmp_path / "runs").exists()


def test_a_source_is_looked_at(run_main, tmp_path):
    """How often few rows are trained on, what is skipped of them, and what longer ones would cost elsewhere."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}]
    rows = [{"messages": chat}] * 39 + [{"messages": []}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changed = (f"data.train=[{{source: {tmp_path}/chats.jsonl}}]", "stages.0.steps=39", "stages.0.batch.sequences=8")
    options = ("--dry-run", f"run.output_dir={tmp_path}/runs", *changed, "target.model_type=qwen3")
    code, out, err = run_main(medusa.main, ROOT / "recipes/tiny-medusa.yaml", *options)
    assert code == 0 and err == "target.model_type=qwen3: 'models/tiny-lm' is llama, and taken as that\n"
    assert "chats.jsonl: 40 rows are 39 samples" in out and "1 of 40 rows skipped: 1 × an empty conversation" in out
    assert "312 rows in all are 8.0 epochs of 39" in out, "8 sequences of 39 steps"
    code, other, _ = run_main(ssm.main, ROOT / "recipes/tiny-ssm.yaml", *options)
    assert code == 0 and "epochs of 39" not in other, "a round of boosting has a part of the rows"
    assert re.search(r"are reached \(assumptions\): H200 0\.00 h, .*, L4 0\.00 h", " ".join(out.split()))
    (tmp_path / "chats.jsonl").write_text("")
    code, _, err = run_main(medusa.main, ROOT / "recipes/tiny-medusa.yaml", *options, "target.name=nobody/nothing")
    assert code == 2 and "chats.jsonl' is empty" in err


@pytest.mark.parametrize(
    "main, name, target",
    [
        (medusa.main, "vicuna7b", "lmsys/vicuna-7b-v1.5"),
        (ssm.main, "llama7b-68m-ssm", "huggyllama/llama-7b"),
        (eagle.main, "llama3-8b-eagle3", "meta-llama/Meta-Llama-3-8B-Instruct"),
    ],
)
def test_a_target_that_is_not_here(run_main, tmp_path, main, name, target):
    """Offline and never downloaded: the sizes of its family's default, which both of these have; the tiny form runs."""
    code, out, err = run_main(main, ROOT / f"recipes/{name}.yaml", "--dry-run", f"run.output_dir={tmp_path}")
    assert code == 0, err
    assert f"'{target}': no such folder here" in out and "transformers' default llama (32 layers, hidden size" in out
    epochs = out.count("2 epochs") == 2 and "an epoch has is known once the rows are read" in out
    assert epochs == (name == "vicuna7b")
    assert main is ssm.main or "6,738.4 M" in out
    assert "the tiny form of this recipe trained" in out and "identical to plain" in out
    assert not list(tmp_path.iterdir())


def test_a_target_that_is_not_here_on_another_device(capsys):
    """Where ``target.dtype: auto`` reads the target's config, too; the recipe is printed all the same."""
    device = SimpleNamespace(device=torch.device("mps"), num_processes=1, is_main_process=True)
    recipe = read_recipe(ROOT / "recipes/vicuna7b.yaml", medusa.MedusaRecipe, ["target.dtype=auto"])
    dry_run.show(recipe, medusa.plans, device, verbose=True)
    out = capsys.readouterr().out
    assert "name: lmsys/vicuna-7b-v1.5" in out and "no sizes: " in out


def test_ssms(run_main, tmp_path):
    """The layers and the final norm of each SSM train, not the embeddings and the LM head, which are the target's."""
    code, out, err = run_main(ssm.main, ROOT / "recipes/tiny-ssm.yaml", "--dry-run", f"run.output_dir={tmp_path}")
    assert code == 0, err
    target = json.loads((ROOT / "models/tiny-lm/config.json").read_text())
    width, wide = target["hidden_size"], target["intermediate_size"]
    heads = target["head_dim"] * (target["num_attention_heads"] + target["num_key_value_heads"])
    layer = 2 * width * heads + 3 * width * wide + 2 * width
    plans = ssm.plans(read_recipe(ROOT / "recipes/tiny-ssm.yaml", ssm.SsmRecipe, ["target.dtype=float32"]))
    assert [plan.trained for plan in plans] == 3 * [2 * layer + width]
    assert out.count(f"{plans[0].trained / 1e6:,.1f} M") == 3 and "identical to plain decoding" in out


def test_ssms_of_another_model(tmp_path):
    """Some layers of the target, or a whole base; a base whose config cannot be read is named."""
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 50}
    for name, layers in (("models/target", 6), ("models/base", 2)):
        LlamaConfig(**small, num_hidden_layers=layers, num_key_value_heads=2).save_pretrained(tmp_path / name)
    layer = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16
    named = [f"target.name={tmp_path}/models/target", "target.dtype=float32"]
    made = ["drafter.layers=[0,5]", "drafter.draft_vocab_size=10"]
    for overrides, trained, projected in (
        ([*named, *made, "drafter.base=null"], 2 * layer + 16, 10 * 16),
        ([*named, f"drafter.base={tmp_path}/models/base"], 2 * layer + 16 + 2 * 50 * 16, 0),
    ):
        plans = ssm.plans(read_recipe(ROOT / "recipes/llama7b-68m-ssm.yaml", ssm.SsmRecipe, overrides))
        assert [(plan.trained, plan.projected) for plan in plans] == 3 * [(trained, projected)]
    with pytest.raises(ValueError, match="'JackFram/llama-68m': its config cannot be read"):
        ssm.plans(read_recipe(ROOT / "recipes/llama7b-68m-ssm.yaml", ssm.SsmRecipe, named))


def test_the_tiny_form_suits_any_number_of_processes():
    recipe = read_recipe(ROOT / "recipes/tiny-medusa.yaml", medusa.MedusaRecipe)
    for processes, sequences in {1: 4, 2: 4, 3: 6, 8: 8, 1024: 1024}.items():
        (stage,) = tiny(recipe, processes=processes).stages
        assert stage.batch.sequences == sequences
        assert micro_batch(stage, processes) == sequences // processes
    assert tiny(recipe).stages[0].batch.sequences == 4


def test_lm(run_main, tmp_path):
    code, out, err = run_main(lm.main, ROOT / "recipes/tiny-lm.yaml", "--dry-run", f"run.output_dir={tmp_path}")
    assert code == 0, err
    for stage in yaml.safe_load((ROOT / "recipes/tiny-lm.yaml").read_text())["stages"]:
        assert stage["name"] in out
    assert re.search(r"decoded [1-8] tokens in \d+ steps", out), "a model of two steps may end early"


def stage_of(sequences=2, accumulate=2, **optim) -> Stage:
    return Stage(
        name="x", steps=10, batch={"sequences": sequences, "accumulate": accumulate}, optim={"lr": 1e-3, **optim}
    )


def test_the_plan_is_arithmetic():
    """Weights, gradients and moments, buckets where there are several processes, what is spread, and what a micro-batch
    takes."""
    plan = dry_run.Plan(
        stage_of(), 4096, 100_000_000, 7_000_000_000, frozen_bytes=2.0, kept=lambda m: Kept(m.tokens, 5, 7)
    )
    assert plan.operations == 2 * 4096 * 6 * 1e8, "without the target's shape"
    one, eight = Machine("", 1), Machine("", 2)
    wanted = {
        "target": 14e9,
        "trained": 1.6e9,
        "buckets": 0,
        "LM heads' gradients": 7,
        "teacher": 5,
        "activations": 4096,
    }
    assert plan.parts(one) == plan.parts(Machine.here()) == wanted
    whole = dataclasses.replace(plan, stage=stage_of(2, 1))
    assert whole.parts(one)["activations"] == 0, "gradients, which one micro-batch has later, are more"
    assert whole.parts(eight) == wanted | {"buckets": 4e8, "activations": 0}
    assert whole.parts(dataclasses.replace(eight, strategy="zero2"))["trained"] == 4e8 + 1.6e9 / 2
    small = dataclasses.replace(plan, stage=stage_of(eight_bit=True), frozen_bytes=0.5)
    assert small.parts(one)["target"] == 3.5e9 and small.parts(one)["trained"] == 1e9


def test_a_mixture_of_experts_multiplies_with_a_part(tmp_path):
    """All of it is held; a token's experts are 2 of 8, and embeddings are looked up."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50, "head_dim": 16}
    experts = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=2, intermediate_size=64).save_pretrained(tmp_path)
    shape = dry_run.target_shape(TargetSection(name=str(tmp_path)))
    of_experts = 2 * 8 * 3 * 32 * 24
    assert shape.parameters - shape.active == of_experts * 6 // 8 + 50 * 32
    assert widths(shape.config) == (32, 32, 32, 48)


def test_time_is_products_and_what_else_reads_and_writes():
    one, machine = Machine.named("h100"), Machine.named("H100x8")
    assert (one.processes, machine.processes, machine.name) == (1, 8, "8 × H100")
    assert Machine.named("rtx4090x2").gpu == Machine.named("rtx4090").gpu
    assert one.seconds(989e12 * 0.6, 3.35e12 * 0.8) == pytest.approx(2)
    assert Machine("cpu", 1, cuda=False).seconds(5e9, 1e9, rate=1e9) == 5
    plan = dry_run.Plan(stage_of(16, 2), 2048, 10**8, kept=lambda m: Kept(1e6 * m.tokens), logits=1000, scores=7)
    alone, shared = plan.seconds(one), plan.seconds(machine)
    assert alone / 8 < shared < alone / 7, "of an eighth of the rows; each has the optimizer's step"
    longer = dataclasses.replace(plan, length=4096)
    assert longer.seconds(one) > 2 * alone, "attention of longer rows"


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--dry-run", "--as", "h999"],
            "--as h999: known are h200, h100, a100, l40s, rtx4090, l4, and several as h200x8",
        ),
        (["--dry-run", "--as", "h100x3"], "batch.sequences=16 is not a multiple of processes"),
        (["--as", "h100"], "--as h100: it is for --dry-run"),
    ],
)
def test_gpus_that_cannot_be_computed_for(refused, tmp_path, options, message):
    recipe = ROOT / "recipes/llama3-8b-eagle3.yaml"
    assert message in refused(eagle.main, recipe, *options, f"run.output_dir={tmp_path}")


def test_as_other_gpus(run_main, tmp_path):
    """The sizes are those of the family's default, since the target is not here; the tiny form trains here."""
    options = ["--dry-run", "--as", "h100x4", f"run.output_dir={tmp_path}"]
    code, out, err = run_main(eagle.main, ROOT / "recipes/llama3-8b-eagle3.yaml", *options, "cache_hidden=disk")
    said = " ".join(out.split())
    assert code == 0, err
    assert (
        "on 4 × H100, if products reach 60% of the data sheet's peak" in said and "4 processes share the work" in said
    )
    assert "hidden states take 32.8 kB a token" in said and "buckets" in said
    assert "the tiny form of this recipe trained" in said


def test_the_plan_of_a_draft_vocabulary():
    """Heads multiply with its rows alone, held beside the LM head; own projections have no more rows either."""
    for overrides, trained in ((["drafter.projection=shared"], 0), (["drafter.projection=own"], 4 * 1000 * 160)):
        overrides = ["drafter.num_draft_heads=4", "drafter.num_layers=1", "drafter.draft_vocab_size=1000", *overrides]
        overrides.append("target.dtype=float32")
        recipe = read_recipe(ROOT / "recipes/tiny-medusa.yaml", medusa.MedusaRecipe, overrides)
        (plan,) = medusa.plans(recipe)
        shared = 0 if trained else 1000 * 160
        assert (plan.projected, plan.copied) == (4 * shared, shared)
        assert plan.trained == 4 * (160 * 160 + 160) + trained
        parts = plan.parts(Machine.here())
        without = dataclasses.replace(plan, copied=0).parts(Machine.here())
        assert without == parts | {"target": parts["target"] - 4 * shared}


def test_the_plan_of_kept_hidden_states():
    """The frozen target does not run in a step, nor does Medusa-2's teacher, which cross-entropy has not."""
    for script, name, passes in (
        (medusa, "tiny-medusa2", {"none": [1, 3], "memory": [0, 2]}),
        (eagle, "tiny-eagle3", {"none": [1], "disk": [0]}),
    ):
        for kept, wanted in passes.items():
            options = [f"cache_hidden={kept}", "target.dtype=float32"]
            recipe = read_recipe(ROOT / f"recipes/{name}.yaml", script.SCRIPT.recipe, options)
            assert [plan.passes for plan in script.plans(recipe)] == wanted
    options = ["cache_hidden=memory", "target.dtype=float32", "stages.1.joint.loss=ce"]
    recipe = read_recipe(ROOT / "recipes/tiny-medusa2.yaml", medusa.MedusaRecipe, options)
    assert [plan.passes for plan in medusa.plans(recipe)] == [0, 2]


@pytest.mark.parametrize(
    "room, wanted", [(1e9, 32), (320, 16), (250, 8), (90, 4), (5, 1), (None, launch.CPU_SEQUENCES)]
)
def test_micro_auto(monkeypatch, capsys, room, wanted):
    """The largest divisor of a process's share whose plan fits; on a CPU a few. Other stages stay as they are."""
    stages = "stages=[{name: a, steps: 2, batch: {sequences: 64, micro: auto}, optim: {lr: 1}}, "
    stages += "{name: b, steps: 2, batch: {sequences: 64, accumulate: 2}, optim: {lr: 1}}]"
    recipe = read_recipe(ROOT / "recipes/tiny-ssm.yaml", ssm.SsmRecipe, [stages])
    monkeypatch.setattr(Machine, "room", room)

    def plans(recipe):
        return [
            SimpleNamespace(parts=lambda machine, stage=stage: {"all": 20 * (stage.batch.micro or 1)})
            for stage in recipe.stages
        ]

    first, second = launch.with_micro(recipe, plans, Machine("two", 2)).stages
    assert first.batch.micro == micro_batch(first, 2) == wanted and second == recipe.stages[1]
    sequences = f"{wanted} sequence{'s' * (wanted > 1)}"
    said = f"a: batch.micro: auto is {wanted} here; a step is {32 // wanted} times {sequences} on each of 2 processes\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("name", sorted(schema.schemas()))
def test_schemas_are_in_step(name):
    assert read_json(ROOT / f"recipes/schema/{name}.json") == json.loads(json.dumps(schema.schemas()[name])), (
        "run python tools/schema.py"
    )


def test_recipes_name_their_schema():
    for path in (ROOT / "recipes").glob("*.yaml"):
        first, second = path.read_text().splitlines()[:2]
        script = first.split("train/")[1].split(".py")[0]
        assert second == f"# yaml-language-server: $schema=schema/{script}.json"
        assert (ROOT / f"recipes/schema/{script}.json").exists()
        given = yaml.safe_load(path.read_text())
        known = read_json(ROOT / f"recipes/schema/{script}.json")
        assert set(given) <= set(known["properties"]) and set(known["required"]) <= set(given)
