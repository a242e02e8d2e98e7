"""Medusa-2: heads and target train together. The loss against its definition, the real command, its artifact."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from training_runs import assert_same_files, make_batch, metrics, write_recipe
from transformers import AutoTokenizer

from draftsmith.data import packing
from draftsmith.inference import calibrate, decode
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.tree_statistics import row_batches
from draftsmith.models import export
from draftsmith.models.adapter import add_lora, merge_adapter, switched_off, untie, write_adapter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train import joint as joint_training
from draftsmith.train import loop, losses, medusa
from draftsmith.train.joint import Joint, divergence, drift, drift_sums, guarded
from draftsmith.train.medusa import Medusa1, Medusa2, MedusaStage
from draftsmith.train.optim import make_optimizer
from draftsmith.train.samples import Sampler

ROOT = Path(__file__).parents[2]
HEADS = 3
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


STEPS = 40


def joint(**fields):
    return Joint.model_validate(fields)


def stage_of(**fields):
    content = {"optim": {"lr": 1e-3}, "batch": {"sequences": 4}, "steps": STEPS, "joint": fields}
    return MedusaStage.model_validate(content)


def make_module(target, moved=True, modules=ALL, **fields):
    """Adapters that have learned something (``moved``), heads too."""
    torch.manual_seed(3)
    heads = MedusaHeads.for_target(target, HEADS, 1, "shared")
    add_lora(target, 4, 8, 0.0, modules)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if moved and "lora_B" in name:
                parameter.normal_(std=0.1)
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Medusa2(target, heads, stage_of(**fields))


def definition(target, batch, kind):
    """L_LM token by token: mean over the supervised ones."""
    with torch.no_grad():
        trained = target.logits(target.hidden(batch["tokens"].long())).double().log_softmax(-1)
        with switched_off(target.model):
            before = target.logits(target.hidden(batch["tokens"].long())).double().log_softmax(-1)
    losses = []
    for row, t in itertools.product(range(4), range(13)):
        if batch["supervised"][row, t + 1]:
            if kind == "kl":
                losses.append(float((before[row, t].exp() * (before[row, t] - trained[row, t])).sum()))
            else:
                losses.append(-float(trained[row, t, batch["tokens"][row, t + 1]]))
    return sum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("modules", [ALL, [*ALL, "lm_head"]], ids=["layers", "lm_head too"])
def test_loss_is_its_definition(make_target, monkeypatch, kind, modules):
    target = make_target("llama")
    module, batch = make_module(target, modules=modules, loss=kind, ramp="constant"), make_batch(61)
    monkeypatch.setattr(losses, "LOGITS", {"cpu": 5 * 61, "cuda": 5 * 61})  # chunks of five positions
    counts = module.count(batch)
    loss, metrics = module(batch, counts, STEPS - 1)
    wanted, labels = definition(target, batch, kind)
    assert float(metrics["lm_loss"]) == pytest.approx(wanted, rel=1e-4) and wanted > 1e-3
    heads = sum(0.8**k * float(metrics[f"head{k}_loss"]) for k in range(1, HEADS + 1))
    assert float(metrics["heads_loss"]) == pytest.approx(heads, rel=1e-4)
    # The published 0.01 goes with a KL summed over all positions and divided by their number.
    weight = 0.2 if kind == "ce" else 0.01 * 56 / labels
    assert float(loss.detach()) == pytest.approx(wanted + weight * heads, rel=1e-4)
    assert counts[-2:].tolist() == [labels, 56]
    with torch.no_grad(), switched_off(target.model):
        kept = target.hidden(batch["tokens"].long())
    again = module(batch | {"hidden": kept}, counts, STEPS - 1)[0]
    assert float(again.detach()) == pytest.approx(float(loss.detach()), rel=1e-4), "the teacher's, by cache_hidden"
    if kind == "kl":
        other = module(batch | {"hidden": kept.roll(1, 1)}, counts, STEPS - 1)[0]
        assert float(other.detach()) > 1.1 * float(loss.detach())


def test_padding_changes_nothing(make_target):
    """A batch is padded to its own longest row: the loss of a step does not depend on how long that is."""
    module = make_module(make_target("llama"), modules=ALL, loss="kl", ramp="constant")
    batch = make_batch(61)
    batch["segment"] = (batch["tokens"] > 0).int()
    longer = {name: F.pad(part, (0, 5)) for name, part in batch.items()}
    count = module.count(batch)
    assert torch.equal(module.count(longer), count) and int(count[-1]) < 56
    losses = [float(module(each, count, STEPS - 1)[0].detach()) for each in (batch, longer)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_adapters_train_in_float32(make_target):
    """Beside a target in bfloat16 too: an update of 1e-4 of a weight is none in bfloat16."""
    target = make_target("llama")
    target.model.to(torch.bfloat16)
    add_lora(target, 4, 8, 0.0, ALL)
    kinds = {("lora_" in name, p.dtype) for name, p in target.model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    hidden = target.hidden(torch.arange(1, 9)[None])
    assert hidden.dtype == torch.bfloat16 and bool(hidden.isfinite().all())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_only_what_trains_drops_out(make_target, checkpointing):
    """A target's own dropout stays off, of the teacher above all; the adapters' is on."""
    target = make_target("llama", attention_dropout=0.5)
    torch.manual_seed(3)
    heads = MedusaHeads.for_target(target, HEADS, 1, "shared")
    tokens = make_batch(61)["tokens"].long()
    still = target.hidden(tokens)
    Medusa1(target, heads).train()
    assert torch.equal(target.hidden(tokens), still)
    add_lora(target, 4, 8, 0.5, ALL)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    if checkpointing:
        loop.checkpoint_activations(target.model)
    module = Medusa2(target, heads, stage_of())
    module.train()
    with switched_off(target.model):
        assert torch.equal(target.hidden(tokens), still)
    assert not torch.equal(target.hidden(tokens), target.hidden(tokens))
    module.eval()
    assert torch.equal(target.hidden(tokens), target.hidden(tokens))


def test_gradient_of_the_divergence(make_target):
    """Against autograd through the definition, without chunks."""
    target = make_target("llama")
    make_module(target)
    torch.manual_seed(0)
    hidden, teacher = torch.randn(2, 9, 32)
    hidden.requires_grad_()
    (ours,) = torch.autograd.grad(divergence(target, hidden, teacher), hidden)
    wanted = target.logits(teacher).log_softmax(-1)
    plain = (wanted.exp() * (wanted - target.logits(hidden).log_softmax(-1))).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(plain, hidden)[0], rtol=1e-3, atol=1e-4)


def test_adapters_off_are_the_target_as_it_was(make_target):
    target, before = make_target("llama"), make_target("llama")
    module, tokens = make_module(target), make_batch(61)["tokens"].long()
    with switched_off(target.model):
        assert torch.equal(target.hidden(tokens), before.hidden(tokens))
    assert (target.hidden(tokens) - before.hidden(tokens)).abs().max() > 0.01
    assert all(p.requires_grad for n, p in module.named_parameters() if "lora_" in n)
    fresh = make_target("llama")
    make_module(fresh, moved=False)
    torch.testing.assert_close(fresh.hidden(tokens), before.hidden(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("ramp", "expected"), [("constant", [1, 1, 1]), ("linear", [0.05, 0.5, 1]), ("sine", [0.0785, 0.7071, 1])]
)
def test_the_heads_weight_grows(ramp, expected):
    section = joint(loss="ce", head_weight=0.6, ramp=ramp, ramp_steps=20)
    found = [section.weight(step, STEPS) / 0.6 for step in (0, 9, 25)]
    assert found == pytest.approx(expected, abs=1e-3)
    assert joint(loss="ce").weight(39, STEPS) == pytest.approx(0.2)
    assert joint().weight(39, STEPS) == pytest.approx(0.01)


def test_heads_learn_faster(make_target):
    module = make_module(make_target("llama"), heads_lr=4.0)
    optimizer = make_optimizer(module, stage_of().optim)
    names = {id(p): name for name, p in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert group["lr_factor"] == (4.0 if names[id(parameter)].startswith("heads.") else 1.0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 + 2 * 14


def test_drift(make_target):
    target = make_target("llama")
    make_module(target)
    batch = make_batch(61)
    batches = row_batches(batch["tokens"], batch["supervised"], 3 * batch["tokens"].shape[1])
    found = drift(sum(drift_sums(target, tokens, marks) for _, tokens, marks in batches))
    kl, count = definition(target, batch, "kl")
    trained, _ = definition(target, batch, "ce")
    assert found["kl"] == pytest.approx(kl, rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(trained), rel=1e-4)
    assert found["perplexity_ratio"] == pytest.approx(found["perplexity"] / found["original_perplexity"], rel=1e-4)
    before = make_target("llama")
    logits = before.logits(before.hidden(batch["tokens"].long()))[:, :-1]
    labels = torch.where(batch["supervised"][:, 1:], batch["tokens"][:, 1:].long(), -100)
    own = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert math.log(found["original_perplexity"]) == pytest.approx(float(own), rel=1e-4) and count == 27


# ---- adapters that are stored


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", [ALL, [*ALL, "lm_head"]], ids=["layers", "lm_head too"])
@torch.no_grad()
def test_a_stored_adapter_merged_is_the_trained_target(make_target, tmp_path, tied, modules):
    """Also where the LM head is the embedding matrix: an adapter on both at once would not merge."""
    target, base = (make_target("llama", tie_word_embeddings=tied) for _ in range(2))
    tokens = torch.arange(1, 50)[None]
    make_module(target, modules=modules)
    trained = target.logits(target.hidden(tokens))
    embeddings = base.model.get_input_embeddings().weight.clone()
    write_adapter(tmp_path, target)
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert all("lora_" in name for name in stored) and len(stored) == 2 * (14 + ("lm_head" in modules))
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == target.name and told["inference_mode"]
    merged = merge_adapter(base, tmp_path / "adapter")
    torch.testing.assert_close(merged.logits(merged.hidden(tokens)), trained, rtol=1e-4, atol=1e-4)
    assert torch.equal(merged.model.get_input_embeddings().weight, embeddings)
    assert merged.fingerprint == target.fingerprint and merged.adapter == "adapter"
    assert not any("lora" in name for name, _ in merged.model.named_parameters())


def test_untie(make_target):
    target = make_target("llama", tie_word_embeddings=True)
    assert target.lm_head.weight is target.model.get_input_embeddings().weight
    untie(target)
    target.lm_head.weight.data.zero_()
    assert float(target.model.get_input_embeddings().weight.abs().sum()) > 0


# ---- the command


MAIN = medusa.main
FINAL = ("model.safetensors", "adapter/adapter_model.safetensors", "checkpoints/step-20/model.safetensors")
TEN_STEPS = {"steps": 10, "batch": {"sequences": 8, "accumulate": 2}}
JOINT = {"lora": {"r": 4, "dropout": 0.1}, "head_weight": 0.1}


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    stages = [
        {"name": "medusa-1", **TEN_STEPS, "optim": {"lr": 1e-2}},
        {"name": "medusa-2", **TEN_STEPS, "optim": {"lr": 1e-4}, "joint": JOINT},
    ]
    sections = {"checkpoint": {"every": 5, "keep": 1}, "evaluate": {"every": 5}, "export": {"merged": True}}
    drafter = {"num_draft_heads": HEADS, "projection": "shared"}
    return write_recipe(tmp_path_factory.mktemp("runs"), tiny_lm, drafter, stages, **sections)


@pytest.fixture(scope="module")
def whole(train, run_main):
    folder = train("whole")
    assert run_main(calibrate.main, folder, "--nodes", 4, "--device", "cpu")[0] == 0
    return folder


def after_step(step):
    return Medusa1, "count", 2 * step  # two micro-batches a step


def test_both_stages_run(whole, tiny_lm):
    assert list(metrics(whole, "simulated_tau")) == [0, 5, 10, 15, 20]
    kl = metrics(whole, "kl")
    assert list(kl) == [10, 15, 20] and list(metrics(whole, "lm_loss")) == [20]
    assert abs(kl[10]) < 1e-6 < kl[15], "adapters that have not trained change nothing"
    facts = json.loads((whole / "provenance.json").read_text())
    assert facts["steps"] == 20 and 0 < facts["kl"] < 0.05 and facts["perplexity_ratio"] == pytest.approx(1, abs=0.05)
    told = json.loads((whole / "config.json").read_text())["target"]
    assert told["name_or_path"] == str(tiny_lm) and told["adapter"] == "adapter"
    assert told["fingerprint"] not in (load_target(str(tiny_lm)).fingerprint, told["merged_fingerprint"])
    best = load_file(whole / "checkpoints/best/medusa-2/model.safetensors")
    stored = load_file(whole / "adapter/adapter_model.safetensors")
    assert len(stored) == 2 * 14 and sum("lora" in name for name in best) == 28
    card = (whole / "README.md").read_text()
    assert "| KL divergence of the trained target " in card and "The adapter in `adapter/` is part of it" in card


def test_the_heads_are_exported_for_the_merged_target(whole, tiny_lm, tmp_path, run_main):
    """A server has no adapter: the heads go with the merged target alone, whose LM head they share."""
    words = [whole, "--to", "vllm", "--out", tmp_path / "out"]
    for more, message in (([], "give the merged one by --target"), (["--target", tiny_lm], "trained for target")):
        code, _, err = run_main(export.main, *words, *more)
        assert code == 2 and err.count("\n") == 1 and message in err and not (tmp_path / "out").exists()
    assert run_main(export.main, *words, "--target", whole / "target")[0] == 0
    head = load_target(str(whole / "target")).lm_head.weight
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["lm_heads.0.weight"].float(), head.float())


def test_the_target_is_merged_afterwards(whole, tiny_lm, tmp_path, run_main):
    """As ``export.merged`` writes it in training; the heads are then exported for it."""
    folder, out = shutil.copytree(whole, tmp_path / "heads"), tmp_path / "target"
    shutil.rmtree(folder / "target")
    config = json.loads((folder / "config.json").read_text())
    merged = config["target"].pop("merged_fingerprint")
    (folder / "config.json").write_text(json.dumps(config))
    words = [export.main, folder, "--to", "vllm", "--out", tmp_path / "served", "--target", out]
    for _ in "ab":  # its own folder may be replaced
        code, _, err = run_main(export.main, folder, "--to", "merged", "--out", out, "--target", tiny_lm)
        assert code == 0, err
    assert json.loads((folder / "config.json").read_text())["target"]["merged_fingerprint"] == merged
    assert load_file(out / "model.safetensors").keys() == load_file(whole / "target" / "model.safetensors").keys()
    assert run_main(*words)[0] == 0
    code, _, err = run_main(export.main, folder, "--to", "merged", "--out", tmp_path / "again", "--target", out)
    assert code == 2 and err.endswith("has this adapter merged in already\n")
    code, _, err = run_main(export.main, "models/smollm2-medusa", "--to", "merged", "--out", tmp_path / "none")
    assert code == 2 and "there is nothing to merge" in err


def test_the_teacher_of_kept_hidden_states(whole, train, monkeypatch):
    monkeypatch.setattr(medusa, "switched_off", None)  # it is not run again
    folder = train("kept", "cache_hidden=memory", "export.merged=false")
    assert metrics(folder, "kl") == pytest.approx(metrics(whole, "kl"), rel=0.02, abs=1e-6)


def test_epochs_are_steps_once_the_rows_are_read(whole, train):
    """Five passes over 16 rows, 8 a step: the same run, also when it goes on after a kill in the second stage."""
    epochs = [f"stages.{stage}.{field}" for stage in (0, 1) for field in ("steps=null", "epochs=5")]
    train.killed(after_step(18), "epochs", *epochs)
    folder = train("epochs", *epochs, "--resume")
    assert (
        "medusa-2: 5 epochs of 16 rows are 10 steps" in train.out and "resuming medusa-2 at step 5 of 10" in train.out
    )
    assert_same_files(folder, whole, *FINAL)
    stages = yaml.safe_load((folder / "recipe.yaml").read_text())["stages"]
    assert [(stage["steps"], stage["epochs"]) for stage in stages] == [(10, None)] * 2
    assert json.loads((folder / "provenance.json").read_text())["steps"] == 20


@pytest.mark.whole_runs
def test_a_run_killed_before_its_stage_was_saved(train):
    """The second stage begins again, with the heads that the first ended with, whatever was evaluated since."""
    rarely = ["evaluate.every=3", "evaluate.decode=6", "checkpoint.every=10", "export.merged=false"]
    whole = train("rarely", *rarely)
    train.killed(after_step(15), "rarely-killed", *rarely)
    assert_same_files(train("rarely-killed", *rarely, "--resume"), whole, *FINAL[:2])
    decoded = metrics(whole, "tau")
    assert list(decoded) == [6, 16], "in the sixth step of each stage"
    assert metrics(whole.parent / "rarely-killed", "tau") == decoded
    said = train.refused("rarely-killed", *rarely, "--resume", "stages.0.steps=12")
    assert "the steps of a stage before it have changed" in said


def test_the_engine_loads_either_form(whole, run_main, tmp_path, tiny_lm):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n')
    outputs = []
    options = ["--prompts", prompts, "--max-new-tokens", 20, "--threads", 1, "--check-lossless"]
    for name, target in (("adapter", []), ("merged", ["--target", whole / "target"]), ("base", ["--target", tiny_lm])):
        code, _, err = run_main(decode.main, whole, *options, "--report", tmp_path / name, *target)
        assert code == 0, err  # base: the adapter is merged into it
        outputs.append(json.loads((tmp_path / name / "report.json").read_text())["accepted_length_histogram"])
    assert outputs[0] == outputs[1] == outputs[2]
    adapted, drafter = load_drafter(str(whole))
    merged = load_target(str(whole / "target"))
    ids = torch.arange(5, 60)[None]
    torch.testing.assert_close(adapted.hidden(ids), merged.hidden(ids), rtol=1e-4, atol=1e-4)
    assert (adapted.hidden(ids) - load_target(str(tiny_lm)).hidden(ids)).abs().max() > 1e-4
    assert SpeculativeDecoder(adapted, drafter).generate([[5, 6]], 5)[0].tokens


DIRECT = "stages=" + json.dumps([{"name": "medusa-2", **TEN_STEPS, "optim": {"lr": 1e-4}, "joint": JOINT}])


def test_together_from_the_start(train):
    folder = train("direct", DIRECT, "export.merged=false")
    assert list(metrics(folder, "kl")) == [0, 5, 10] and not (folder / "target").exists()


def test_too_much_drift(train):
    overrides = ["stages.1.joint.max_kl=1e-9", "stages.1.optim.lr=1e-3"]
    said = train.refused("drift", *overrides, "stages.1.joint.on_drift=stop", code=1)
    assert "the target has moved by" in said and "beyond joint.max_kl=1e-09; lower the stage's optim.lr" in said
    train("drift", *overrides, "stages.1.joint.on_drift=warn", "--restart")
    assert "weights that moved less are preferred to these" in train.out


@pytest.mark.parametrize(
    ("tau", "kl", "judged"),
    [(2.5, 0.0, 2.5), (2.5, 0.05, 2.5), (2.5, 0.051, -0.051), (9.0, 0.3, -0.3), (2.5, math.nan, -math.inf)],
)
def test_the_selection_metric_of_a_joint_stage(capsys, tau, kl, judged):
    assert guarded(joint(max_kl=0.05), tau, kl) == judged
    assert ("beyond joint.max_kl=0.05" in capsys.readouterr().out) == (judged < 0)
    strict = joint(max_kl=0.05, on_drift="stop")
    if judged < 0:
        with pytest.raises(FloatingPointError, match=r"beyond joint\.max_kl=0\.05; lower the stage's optim\.lr"):
            guarded(strict, tau, kl)
    else:
        assert guarded(strict, tau, kl) == judged


def test_weights_that_moved_the_target_too_far_are_not_selected(train, monkeypatch):
    """A higher τ does not make up for a target that moved further than max_kl. The stage begins with the heads that
    were the first one's best, not with its last."""
    began, init = {}, Medusa2.__init__

    def noted(self, target, heads, *rest):
        began.update({f"heads.{key}": weight.clone() for key, weight in heads.state_dict().items()})
        init(self, target, heads, *rest)

    monkeypatch.setattr(Medusa2, "__init__", noted)
    # What a stage begins with is measured, too, and is never its best.
    taus, kls = iter([9.5, 9.0, 9.0, 9.0, 8.0, 3.0, 2.0, 2.5, 3.25]), iter([0.0, 0.9, 0.01, 0.02, 0.06, 0.01])
    monkeypatch.setattr(medusa, "simulate", lambda *_: next(taus))
    moved = dict.fromkeys(("perplexity", "original_perplexity", "perplexity_ratio"), 1.0)
    monkeypatch.setattr(medusa, "drift", lambda *_: {"kl": next(kls), **moved})
    every = ["evaluate.every=1", "checkpoint.every=1", "checkpoint.keep=9"]
    folder = train("guarded", "stages.0.steps=2", "stages.1.steps=4", *every, "export.merged=false")
    assert metrics(folder, "guarded_tau") == {2: 9.0, 3: -0.9, 4: 3.0, 5: 2.0, 6: -0.06}
    assert metrics(folder, "best") == {0: False, 1: True, 2: False, 3: True, 4: True, 5: False, 6: False}
    best = load_file(folder / "checkpoints/best/medusa-2/model.safetensors")
    steps = [load_file(folder / f"checkpoints/step-{n}/model.safetensors") for n in (3, 4, 5, 6)]
    assert [all(torch.equal(best[key], one[key]) for key in best) for one in steps] == [False, True, False, False]
    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(weight, best[f"heads.{key}"]) for key, weight in exported.items())
    assert json.loads((folder / "provenance.json").read_text())["simulated_tau"] == 3.25, "the last, of those weights"
    first, last = (load_file(folder / f"checkpoints/step-{n}/model.safetensors") for n in (1, 2))
    assert all(torch.equal(began[key], first[key]) and not torch.equal(first[key], last[key]) for key in began)


def test_the_second_stage_goes_on_in_the_data(train, monkeypatch):
    """One schedule over both stages: the second begins where the first ended, and trains on no row again too soon.
    λ0 grows from the stage's own beginning, and the adapters' first weights do not depend on what was before it."""
    rows, ramp, seeds = [], [], []
    batch, add_lora = packing.Rows.batch, joint_training.add_lora

    def taken(self, numbers, length=None):
        if isinstance(numbers, list):  # training samples; held-out rows are a range
            rows.extend(numbers)
        return batch(self, numbers, length)

    monkeypatch.setattr(packing.Rows, "batch", taken)
    monkeypatch.setattr(Joint, "weight", lambda self, step, steps: ramp.append(step) or 0.1)
    patched = lambda *given: seeds.append(torch.initial_seed()) or add_lora(*given)  # noqa: E731
    monkeypatch.setattr(joint_training, "add_lora", patched)
    train("order", "stages.0.steps=3", "stages.1.steps=4", "evaluate.every=9", "export.merged=false")
    order = Sampler([range(16)], [1.0], 3, ["stdlib"]).order(7 * 8)
    assert order.shape == (7 * 8, 2) and rows == order[:, 1].tolist()
    assert ramp == [0, 0, 1, 1, 2, 2, 3, 3], "two micro-batches a step"
    assert seeds == [3 + 1], "the recipe's, and one"
    assert rows[24:48] != rows[:24] and len(set(rows[16:32])) == 16, "an epoch of 16 rows goes over the border"


def test_a_quantized_target_trains_to_the_labels(train, run_main):
    """QLoRA: the adapters train beside weights that stay quantised, and are merged into those that are not."""
    folder = train("quantized", "target.quantize=8bit", "stages.1.joint.loss=ce", "stages.1.joint.max_kl=100")
    assert metrics(folder, "kl")[20] > 0 and metrics(folder, "lm_loss")[20] < 10
    trained = load_file(folder / "adapter/adapter_model.safetensors")
    assert all(bool(weight.any()) for name, weight in trained.items() if "lora_B" in name)
    assert run_main(calibrate.main, folder, "--nodes", 4, "--device", "cpu")[0] == 0
    code, _, err = run_main(decode.main, folder, "--prompt", "import os", "--max-new-tokens", 4, "--check-lossless")
    assert code == 0, err


def test_a_target_that_is_stored_quantized(train, tiny_lm, tmp_path):
    """What the recipe says of quantisation is not all: joint training looks at the loaded target, before it begins."""
    load_target(str(tiny_lm), quantize="8bit").model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_lm / name, tmp_path)
    options = (f"target.name={tmp_path}", "stages.0.steps=1", "stages.1.steps=1")
    for asked in ("joint.loss=kl", "export.merged=true"):
        loss = "kl" if "kl" in asked else "ce"
        said = train.refused(
            asked, *options, f"stages.1.joint.loss={loss}", f"export.merged={loss == 'ce'}", "--restart"
        )
        assert f"target.name={tmp_path}: {asked} " in said and "this one is stored quantised" in said
        assert "step " not in train.out
    train("labels", *options, "stages.1.joint.loss=ce", "stages.1.joint.max_kl=100", "export.merged=false")


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_adapters_on_quantized_layers(make_target, tmp_path, tiny_lm, bits):
    """They get a gradient, and the quantised weights none; the rest of the loss is as beside other weights."""
    made = make_target("llama", hidden_size=64, intermediate_size=128, vocab_size=4096).model
    made.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_lm).save_pretrained(tmp_path)
    module = make_module(load_target(str(tmp_path), quantize=bits), loss="ce")
    kinds = {type(m).__name__ for m in module.model.modules() if getattr(m, "lora_A", None)}
    assert kinds == {"Linear4bit" if bits == "4bit" else "Linear8bitLt"}  # peft's
    batch = make_batch(4096)
    loss, metrics = module(batch, module.count(batch), 0)
    wanted, _ = definition(module.target, batch, "ce")
    assert float(metrics["lm_loss"]) == pytest.approx(wanted, rel=1e-3)
    loss.backward()
    for name, parameter in module.named_parameters():
        gets = "lora_" in name or name.startswith("heads.")
        assert parameter.requires_grad == gets, name
        assert not gets or bool(parameter.grad.any()), name


def test_another_adapter_is_another_target(whole, train, run_main, tmp_path):
    """Decoding with it, or beginning with its heads beside the plain target, is refused."""
    changed = shutil.copytree(whole, tmp_path / "changed", ignore=shutil.ignore_patterns("checkpoints", "target"))
    path = changed / "adapter/adapter_model.safetensors"
    weights = load_file(path)
    next(iter(weights.values())).flatten()[0] += 1e-3
    save_file(weights, path, {"format": "pt"})
    code, _, err = run_main(decode.main, changed, "--prompt", "x")
    assert code == 2 and "same shape, other weights, config or tokenizer (fingerprint " in err and err.count("\n") == 2
    said = train.refused("plain", f"init_from={whole}", "stages.0.steps=1")
    assert "same shape, other weights, config or tokenizer (fingerprint " in said
