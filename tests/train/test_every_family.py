"""What every family's training does alike: only its drafter trains, micro-batches add up, a killed run goes on bit for
bit, and what a recipe cannot mean is one line before anything slow."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_runs import FORKED, Runs, become, before_call, both, make_batch, metrics, write_recipe

from draftsmith.common.recipe import read_recipe
from draftsmith.models.adapter import add_lora
from draftsmith.models.artifact import write_drafter
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.ssm import model_of_layers
from draftsmith.models.target import Target, load_target
from draftsmith.train import boosting, dflash, dynaspec, eagle, lm, medusa, ssm

ROOT = Path(__file__).parents[2]
STAGE = {"batch": {"sequences": 8, "accumulate": 2}, "optim": {"lr": 1e-2}, "steps": 6}
JOINT = {"lora": {"r": 4, "dropout": 0.1}, "head_weight": 0.1}
TWO = [{"name": "medusa-1", **STAGE}, {"name": "medusa-2", **STAGE, "optim": {"lr": 1e-4}, "joint": JOINT}]
ENSEMBLE = {"boost": {"tokens": 1, "min_prompts": 1, "unit": "segment"}}
MAINS = {"medusa": medusa, "medusa2": medusa, "eagle": eagle, "eagle1": eagle, "ssm": ssm, "dynaspec": dynaspec}
MAINS |= {"dflash": dflash}
# The drafter's section, the stages, further sections.
RECIPES = {
    "medusa": ({"num_draft_heads": 3}, [{"name": "heads", **STAGE}], {}),
    "medusa2": ({"num_draft_heads": 3, "projection": "shared"}, TWO, {"export": {"merged": True}}),
    "eagle": ({"version": 3, "unroll": 2}, [{"name": "eagle", **STAGE}], {}),
    "eagle1": ({"version": 1}, [{"name": "eagle", **STAGE}], {}),
    "dflash": ({"block_size": 4, "num_layers": 1, "anchors": 5}, [{"name": "blocks", **STAGE}], {}),
    "ssm": ({"layers": [1], "draft_vocab_size": 80}, [{"name": f"ssm-{n}", **STAGE} for n in range(2)], ENSEMBLE),
    "dynaspec": ({"num_clusters": 20, "router_width": 32}, [{"name": "router", **STAGE}], {}),
}
SHAPE = "hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 48"


@pytest.fixture(scope="module")
def trains(tiny_lm, tmp_path_factory, run_main):
    """Runs of each family, by a recipe of a few steps in a folder of its own."""
    found, sections = {}, {"checkpoint": {"every": 2, "keep": 1}, "evaluate": {"every": 3}}
    for name, (drafter, stages, more) in RECIPES.items():
        recipe = write_recipe(tmp_path_factory.mktemp(name), tiny_lm, drafter, stages, **sections, **more)
        found[name] = Runs(MAINS[name].main, recipe, run_main)
    content = yaml.safe_load((ROOT / "recipes/tiny-lm.yaml").read_text()) | sections
    content["model"] = yaml.safe_load(f"{{vocab_size: 420, {SHAPE}, max_position_embeddings: 128}}")
    content["data"] |= {"train": [{"source": "stdlib", "split": "test"}], "max_length": 64}
    content["stages"] = [
        {**STAGE, "name": name, "max_length": length, "steps": 4} for name, length in (("a", 32), ("b", 64))
    ]
    content |= {"lookahead": {"num_heads": 2, "share": 0.25}, "precision": {"autocast": "none", "threads": 1}}
    folder = tmp_path_factory.mktemp("lm")
    content["run"] = {"name": "whole", "output_dir": str(folder), "seed": 3}
    content["evaluate"] |= {"sequences": 4}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    found["lm"] = Runs(lm.main, folder / "recipe.yaml", run_main)
    return found


@pytest.fixture(scope="module")
def wholes():
    """The folders of runs that nothing interrupted, by family."""
    return {}


# ---- modules


def modules_of(name, target):
    """A family's module, moved from where it starts; what the names of its parameters that train begin with."""
    torch.manual_seed(3)
    if name == "medusa2":
        add_lora(target, 4, 8, 0.0, ["q_proj", "down_proj"])
    if name in ("medusa", "medusa2"):
        heads = MedusaHeads.for_target(target, 3, 2, "own" if name == "medusa" else "shared")
        stage = medusa.MedusaStage.model_validate(TWO[1])
        module = medusa.Medusa1(target, heads) if name == "medusa" else medusa.Medusa2(target, heads, stage)
        begins = ("heads.",)
    elif name == "ssm":
        module = ssm.Ssm(Target(model_of_layers(target, [0]), None, "", ""), target, None, "ce", frozen=True)
        begins = ("model.model.layers.", "model.model.norm.")
    elif name == "dflash":
        made = DFlash.for_target(target, block_size=4, num_layers=2, mask_token_id=60)
        recipe = read_recipe("recipes/tiny-dflash.yaml", dflash.DflashRecipe, [])
        module, begins = dflash.DFlashTraining(target, made, recipe), ("dflash.",)
    else:
        made = Eagle.for_target(target, 3, "own", fc_norm=True)
        recipe = read_recipe("recipes/tiny-eagle3.yaml", eagle.EagleRecipe, ["drafter.unroll=3"])
        module = eagle.EagleTraining(target, made, recipe)
        begins = ("eagle.",)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module, begins


@pytest.mark.parametrize("name", ["medusa", "medusa2", "eagle", "dflash", "ssm"])
def test_only_the_drafter_trains_and_micro_batches_add_up(make_target, name):
    """The mean is over the step's labels, and each micro-batch has another number of them; one may have none."""
    target = make_target("llama", num_hidden_layers=3)
    module, begins = modules_of(name, target)
    batch = make_batch(target.vocab_size)

    def gradients(cuts):
        module.zero_grad()
        parts = [{k: v[a:b] for k, v in batch.items()} for a, b in zip([0, *cuts], [*cuts, 4], strict=True)]
        counts = torch.stack([module.count(part) for part in parts]).sum(0).float()
        for part in parts:
            module(part, counts, 0)[0].backward()
        return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    whole = gradients([])
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert whole.keys() == trained and all(n.startswith(begins) or "lora_" in n for n in trained)
    assert all(grad.abs().sum() > 0 for grad in whole.values())
    for cuts in ([2], [1, 3]):
        for n, grad in gradients(cuts).items():
            torch.testing.assert_close(grad, whole[n], atol=1e-4 * float(whole[n].abs().max()), rtol=0)
    batch["supervised"][:] = False
    loss, _ = module(batch, module.count(batch).float(), 0)
    loss.backward()
    assert float(loss.detach()) == 0


# ---- runs


# Family, moment → what is called when the run is killed, which call of it, and of the run that goes on, if that is
# killed, too. A step has two micro-batches.
KILLS = {
    ("medusa", "a step"): [(medusa.Medusa1, "count", 9)],
    ("medusa2", "the first stage"): [(medusa.Medusa1, "count", 9)],
    ("medusa2", "between the stages"): [(medusa.Medusa1, "count", 12)],
    ("medusa2", "the second stage"): [(medusa.Medusa1, "count", 21)],
    ("eagle", "a step"): [(eagle.EagleTraining, "count", 9)],
    ("eagle1", "a step"): [(eagle.EagleTraining, "count", 9)],
    ("dflash", "a step"): [(dflash.DFlashTraining, "count", 9)],
    ("ssm", "a round, and prompts are marked"): [(ssm.Ssm, "count", 8), (boosting, "greedy_ranks", 0)],
    ("lm", "the second stage"): [(lm.LanguageModel, "count", 18)],  # evaluations count too
}


@pytest.mark.parametrize("name, moment", KILLS)
def test_a_killed_run_goes_on_bit_for_bit(trains, wholes, name, moment):
    """All tensors that a run writes, and what was measured."""
    train = trains[name]
    if name not in wholes:
        wholes[name] = train("whole")
    folder = train.recipe.parent / moment.replace(" ", "-")
    for number, kill in enumerate(KILLS[name, moment]):
        train.killed(kill, folder.name, *["--resume"][:number])
    train(folder.name, "--resume")
    for path in wholes[name].rglob("*.safetensors"):
        assert path.read_bytes() == (folder / path.relative_to(wholes[name])).read_bytes(), path
    key = "validation_loss" if name == "lm" else "simulated_tau"
    assert metrics(folder, key) == metrics(wholes[name], key) != {}


# ---- two processes


# Where both of them are killed: the step after the second checkpoint, of an ensemble in its second stage.
ON_TWO = {
    "eagle": (eagle.EagleTraining, "count", 9),
    "dflash": (dflash.DFlashTraining, "count", 9),
    "ssm": (ssm.Ssm, "count", 21),
    "dynaspec": (dynaspec.RouterTraining, "count", 9),
}


def one_of_two(rank, port, train, name, overrides, kill):
    """A process of a run; ``kill``: the call before which it ends abruptly."""
    become(rank, port)
    with pytest.MonkeyPatch.context() as patch:
        if kill:
            before_call(patch, *kill, lambda: os._exit(9))
        code, out, err = train.run_main(train.main, train.recipe, f"run.name={name}", *overrides)
    print(out, err)
    sys.exit(code)


@pytest.mark.whole_runs
@FORKED
@pytest.mark.parametrize("name", ON_TWO)
def test_two_processes_train_as_one(trains, wholes, words, name):
    """Killed on two, a run goes on on two, or on one, to the weights of a run that was on one all the time."""
    train, overrides = trains[name], [f"drafter.base={words['BASE']}"] if name == "dynaspec" else []
    whole = wholes[name] = wholes.get(name) or train("whole", *overrides)
    assert both(one_of_two, train, "two", overrides, ON_TWO[name]) == [9, 9]
    folder = train.recipe.parent
    shutil.copytree(folder / "two", folder / "one")
    assert both(one_of_two, train, "two", [*overrides, "--resume"], None) == [0, 0]
    train("one", *overrides, "--resume")
    for path in whole.rglob("*.safetensors"):
        for other in ("two", "one"):
            found, wanted = load_file(folder / other / path.relative_to(whole)), load_file(path)
            assert found.keys() == wanted.keys()
            for key, tensor in wanted.items():
                torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=0, msg=f"{other}: {path} {key}")


# ---- refusals


@pytest.fixture(scope="module")
def words(tiny_lm, tmp_path_factory, make_target):
    """What stands in capitals in a refusal: folders and files."""
    place = tmp_path_factory.mktemp("words")
    (place / "short.jsonl").write_text('{"prompt": "Shall I? ", "completion": "y"}\n' * 4)
    (place / "story.jsonl").write_text(json.dumps({"prompt": "Go. ", "completion": "y" * 270}) + "\n")
    target, other = load_target(str(tiny_lm)), make_target("llama")
    made = {
        "BASE": (target, "eagle", Eagle.for_target(target, 1, "shared")),
        "OWN": (target, "eagle", Eagle.for_target(target, 3, "own", None, (1,))),
        "HEADS": (target, "medusa", MedusaHeads.for_target(target, 2, 1, "own")),
        "OTHER": (other, "eagle", Eagle.for_target(other, 1, "shared")),
    }
    for word, (of, kind, drafter) in made.items():
        write_drafter(place / word.lower(), kind, drafter.config.to_dict(), drafter.state_dict(), of, {})
    folders = {word: place / word.lower() for word in made}
    files = {word: place / f"{word.lower()}.jsonl" for word in ("SHORT", "STORY")}
    return {**files, "PLACE": place, "TARGET": tiny_lm, **folders}


LONG = "data.train.0.answers.prompt_tokens=300"
LISTS = "drafter.base=BASE"
REFUSALS = [
    ("medusa", "data.max_length=20", "max_length=20 is less than the 12 + 24 tokens of a prompt and its answer"),
    ("medusa", "data.train.0.answers.new_tokens=3", "answers.new_tokens must exceed drafter.num_draft_heads = 3"),
    ("medusa", LONG, "has 300 tokens; the target's context holds 256 with the answer"),
    ("medusa", "data.max_length=300 & data.train=[{source: STORY}]", "has 256 positions; set data.max_length=256, or"),
    ("medusa", "target.quantize=4bit", "have to be a multiple of 64 wide, these are 32, 48; use target.quantize=8bit"),
    ("medusa", "data.validation=[{source: SHORT}]", "evaluations measure drafts of 3 tokens, and no answer"),
    ("medusa", "evaluate.decode=4", "decode=4 is not a multiple of every=3"),
    ("medusa", "drafter.draft_vocab_size=301", "drafter.draft_vocab_size=301: the target has 300 tokens; set fewer"),
    ("medusa2", "stages.1.joint.lora.modules=[q_proj, c_attn]", "has no linear layer 'c_attn'; it has: "),
    ("medusa2", "stages.1.joint.lora.modules=[lm_head]", "lm_head is shared by all heads; drop it, or set"),
    ("medusa2", "stages.1.seconds=9", "joint.ramp: the heads' weight grows over all of the stage's steps"),
    ("medusa2", "target.quantize=8bit", "joint.loss=kl compares with the target as it was, which has to be "),
    ("medusa2", "stages.1.joint=null", "export.merged: there is nothing to merge without a joint stage"),
    ("medusa2", "stages.1.optim.name=muon", "optim.name: Muon has one learning rate for heads and adapters; use "),
    ("medusa2", "precision.compile=true", "precision.compile: joint training changes its loss at every step"),
    ("eagle1", "drafter.projection=own", "version 1 reads the last hidden state, has the target's LM head"),
    ("eagle1", "drafter.norm_output=true", "norm_before_fc, fc_norm and norm_output are for version 3"),
    ("eagle", "drafter={version: 3, fc_norm: true, norm_before_fc: true}", "are alternatives; set one of them"),
    ("eagle", "drafter.captured_layers=[1, 1]", "captured_layers: [1, 1] have to be different layers"),
    ("eagle", "drafter.captured_layers=[0, 2]", "drafter.captured_layers=[0, 2]: the target has layers 0 to 1"),
    ("eagle", "data.train.0.answers.new_tokens=7", "must exceed the depth of simulated drafts = 7"),
    ("eagle", "drafter={version: 1, loss: lk}", "loss=lk is for version 3; EAGLE-1 has a regression and ce"),
    ("eagle", "precision.compile=true", "precision.compile: the positions that draft"),
    ("dflash", "drafter.captured_layers=[1, 1]", "captured_layers: [1, 1] have to be different layers"),
    ("dflash", "drafter.block_size=32", "answers.new_tokens must exceed drafter.block_size - 1 = 31"),
    ("dflash", "drafter.mask_token_id=300", "drafter.mask_token_id=300: the target's ids are 0 to 299"),
    ("dflash", "drafter.loss=lk", "loss=lk: D-PACE weighs cross-entropies; set weights=gamma, too"),
    ("dflash", "precision.compile=true", "precision.compile: the blocks are others in every step"),
    ("dflash", "export.merged=true", "export.merged: no DFlash drafter changes the target"),
    ("dflash", "init_from=HEADS", "its drafter_type is 'medusa', not 'dflash'"),
    ("dflash", "data.train.0={source: x.jsonl, streaming: true}", "a streamed source is not searched for an unused"),
    ("ssm", "drafter.layers=[7]", "drafter.layers=[7]: the target has layers 0 to 1"),
    ("ssm", "drafter.layers=null", "name either 'base', a small causal LM, or 'layers' of the target"),
    ("ssm", "init_from=x", "SSMs begin from drafter.base or drafter.layers"),
    ("ssm", "cache_hidden=disk", "an SSM does not read the target's hidden states"),
    ("ssm", "data.validation.0.answers.new_tokens=8", "must exceed the depth of simulated drafts, 8"),
    ("dynaspec", "drafter.base=null", "drafter.base: name the trained drafter, a folder or Hub id"),
    ("dynaspec", "drafter.base=PLACE/wrong/drafter & run.output_dir=PLACE", "it is in the run's own folder"),
    ("dynaspec", "drafter.base=OTHER", "this drafter was trained for target 'tiny-llama', not for "),
    ("dynaspec", "drafter.base=HEADS", "drafters of type 'medusa' take no shortlists; EAGLE drafters do"),
    ("dynaspec", "drafter.base=OWN & drafter.all_tokens=true", "has an LM head of its own; leave it out"),
    ("dynaspec", f"{LISTS} & drafter.num_clusters=301", "drafter.num_clusters=301: the drafter's LM head has 300 "),
    ("dynaspec", "drafter.rank=8", "drafter.rank: for drafter.shortlist=low_rank alone; leave it out"),
    ("dynaspec", f"{LISTS} & drafter.positions=30", "drafter.positions=30: the training rows give "),
    ("dynaspec", f"{LISTS} & data.packing=true", "data.packing: "),
    ("dynaspec", f"{LISTS} & evaluate.decode=3", "evaluate.decode: evaluations of shortlists decode nothing"),
    ("dynaspec", f"{LISTS} & data.validation.0.answers.new_tokens=6", "evaluations measure drafts of 6 tokens, and "),
    ("dynaspec", f"{LISTS} & init_from=BASE", "init_from: shortlists begin from drafter.base; leave it out"),
    ("dynaspec", f"{LISTS} & cache_hidden=memory", "cache_hidden: rollouts are kept in the run's folder anyway"),
    ("dynaspec", f"{LISTS} & precision.compile=true", "precision.compile, precision.gradient_checkpointing and export"),
    ("dynaspec", f"{LISTS} & data.train.0={{source: x.jsonl, streaming: true}}", "a streamed source has no end"),
    (
        "dynaspec",
        f"{LISTS} & drafter.shortlist=fr_spec & drafter.corpus=[{{source: x.jsonl, streaming: true}}]",
        "a streamed source has no end",
    ),
    ("lm", "model.num_kv_heads=3", "'model': num_heads=4 is not a multiple of num_kv_heads=3"),
    (
        "lm",
        "stages.1.max_length=1000000 & model.max_position_embeddings=1000000",
        " do not fill one row of 1,000,000; leave it out",
    ),
    ("lm", "data.packing=true", "data.packing: it is for drafters, and this script trains a model"),
    ("lm", "data.template=x.jinja", "data.template: it is for drafters"),
    ("lm", "data.template_arguments={a: 1}", "data.template_arguments: it is for drafters"),
    ("lm", "data.max_unsupervised=0.5", "data.max_unsupervised: it is for drafters"),
    ("lm", "evaluate.decode=6", "evaluate.decode: it is for drafters"),
    ("lm", "export.merged=true", "export.merged: it is for drafters"),
]


@pytest.mark.parametrize("name, overrides, message", REFUSALS, ids=[f"{n} {given}" for n, given, _ in REFUSALS])
def test_wrong_recipes_are_one_line(trains, words, name, overrides, message):
    for word, path in words.items():
        overrides = overrides.replace(word, str(path))
    assert message in trains[name].refused("wrong", *overrides.split(" & "), "--restart")
    assert "step " not in trains[name].out or "lora.modules" in overrides, "said before it trains"
