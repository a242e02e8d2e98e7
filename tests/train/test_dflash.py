"""DFlash: the loss against its definition, then recipe → training → artifact by the real command."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F
from training_modules import SLOTS, dflash_module, make_rows
from training_runs import metrics, write_recipe

from draftsmith.kernels.soft_loss import ETA
from draftsmith.models.artifact import write_drafter
from draftsmith.models.dflash import DFlash
from draftsmith.models.target import load_target
from draftsmith.train import dflash
from draftsmith.train.draft_vocabulary import mask_token
from draftsmith.train.dry_run import decode_a_little

# ---- the loss


def lk_of(of_target, log_q, ids, loss):
    """A position's LK or TV in float64; None: its likeliest token is not drafted."""
    p = of_target.double().softmax(-1)
    if ids is not None and int(p.argmax()) not in ids.tolist():
        return None
    p = p if ids is None else p[ids]
    inside, accepted = p / p.sum(), torch.minimum(p, log_q.exp()).sum()
    weight = torch.exp(-ETA * accepted.detach()) if loss == "lk" else 0
    return weight * (inside * (inside.log() - log_q)).sum() + (1 - weight) * (1 - accepted)


def defined(module, rows):
    """Block by block of every sample: labels of each draft, Σ w · loss over Σ w, and Σ loss of each draft."""
    target, made, ids = module.target, module.dflash, module.dflash.draft_vocab
    known = range(61) if ids is None else ids.tolist()
    numbers, weighted, whole, losses = [0] * (SLOTS - 1), 0.0, 0.0, [0.0] * (SLOTS - 1)
    for number in range(len(rows)):
        batch = rows.batch([number])
        tokens, supervised = batch["tokens"].long(), batch["supervised"][0].tolist()
        with torch.no_grad():
            features, given = target.features(tokens, made.config.captured_layers), target.model(tokens).logits[0]
        for anchor in range(1, tokens.shape[1] - 1):
            if not (supervised[anchor] and supervised[anchor + 1]):
                continue
            out = made.draft(features, target.embeddings, tokens, torch.tensor([[anchor]]))[0, 0]
            log_q = made.draft_head(target.lm_head)(out).double().log_softmax(-1)
            found = []  # of each draft up to the answer's end, its cross-entropy; None: outside
            for k in range(1, SLOTS):
                if anchor + k >= len(supervised) or not supervised[anchor + k]:
                    break
                label = int(tokens[0, anchor + k])
                if module.loss != "ce":
                    found.append(lk_of(given[anchor + k - 1], log_q[k - 1], ids, module.loss))
                else:
                    found.append(-log_q[k - 1, [*known].index(label)] if label in known else None)
                numbers[k - 1] += 1
            smoothed = [0.5 if one is None else 0.5 + 0.5 * math.exp(-float(one.detach())) for one in found]
            reached = [*itertools.accumulate(smoothed, lambda a, b: a * b)]
            for k, one in enumerate(found):
                weight = sum(reached[k:]) if module.gamma is None else math.exp(-k / module.gamma)
                whole += 1 if module.gamma is None else weight
                if one is not None:
                    weighted, losses[k] = weighted + weight * one, losses[k] + float(one.detach())
    return numbers, weighted / whole, losses


@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("weights, loss", [("dpace", "ce"), ("gamma", "ce"), ("gamma", "lk"), ("gamma", "tv")])
def test_loss_is_its_definition(make_target, weights, loss, size):
    """Values and gradients, with packed rows and labels that are not in the draft vocabulary."""
    target = make_target("llama", num_hidden_layers=3)
    ids = None if size is None else torch.arange(0, 60, 3)
    module = dflash_module(target, ids, weights=weights, gamma=2.0, loss=loss)
    numbers, wanted, losses = defined(module, make_rows(60, share=False))
    batch = make_rows(60).batch([0, 1])
    counts = module.count(batch)
    assert counts.tolist() == numbers and len(set(numbers)) == SLOTS - 1
    loss, found = module(batch, counts, 0)
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    for k in range(SLOTS - 1):
        assert float(found[f"position{k + 1}_loss"]) == pytest.approx(losses[k] / numbers[k], rel=1e-4)
    trained = [*module.dflash.parameters()]
    pairs = zip(torch.autograd.grad(3 * loss, trained), torch.autograd.grad(wanted, trained), strict=True)
    for one, exact in pairs:
        assert (one - 3 * exact).norm() < 1e-4 * (3 * exact).norm()
    if size:
        assert (module.labels(batch) == dflash.OUTSIDE).any()


def test_labels_are_the_tokens_behind_the_anchor(make_target):
    """Draft k of a block at a has label x_{a+k}: a shift by one is another loss."""
    module, batch = dflash_module(make_target("llama")), make_rows(60).batch([0, 1])
    labels = module.labels(batch)
    places = (labels[0] != -100).nonzero().tolist()
    assert len(places) > 5
    tokens = F.pad(batch["tokens"], (0, SLOTS), value=-100)
    for (row, anchor), k in itertools.product(places, range(1, SLOTS)):
        label = int(labels[k - 1, row, anchor])
        assert label in (-100, int(tokens[row, anchor + k])) and (k > 1 or label >= 0)
    loss, _ = module({**batch, "labels": labels}, module.count(batch), 0)
    moved = torch.where(labels == -100, -100, labels.roll(1, 0).clamp(min=1))
    other, _ = module({**batch, "labels": moved}, module.count(batch), 0)
    assert abs(float(loss.detach()) - float(other.detach())) > 0.01


def test_blocks_are_drawn_anew_at_each_visit(make_target):
    """By the seed and the number of the visit alone: not by the other rows of a batch, nor by random numbers drawn."""
    module, batch = dflash_module(make_target("llama"), anchors=1), make_rows(60, share=False).batch([0, 1, 2, 3])
    drawn = [module.labels(batch | {"visit": torch.tensor([n, n + 1, n + 2, n + 3])}) for n in range(0, 40, 4)]
    assert all(((labels[0] != -100).sum(1) == 1).all() for labels in drawn)
    assert all(len({int((labels[0, row] != -100).int().argmax()) for labels in drawn}) > 1 for row in (0, 2))
    torch.manual_seed(1)
    some = {name: part[2:3] for name, part in batch.items()} | {"visit": torch.tensor([2])}
    assert torch.equal(module.labels(some), drawn[0][:, 2:3])


def test_a_micro_batch_without_a_label(make_target):
    """A process whose rows have none gives gradients of zero."""
    module, batch = dflash_module(make_target("llama")), make_rows(60).batch([0, 1])
    batch["supervised"] = torch.zeros_like(batch["supervised"])
    loss, found = module(batch, torch.tensor([5, 5, 5]), 0)
    loss.backward()
    assert float(loss.detach()) == 0 and not any(float(value) for value in found.values())
    assert all(p.grad is not None and not p.grad.any() for p in module.dflash.parameters())


def test_recomputed_layers_have_the_same_gradients(make_target):
    module, batch = dflash_module(make_target("llama")), make_rows(60).batch([0, 1])
    counts, found = module.count(batch), {}
    for module.dflash.recompute in (False, True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            loss, _ = module(batch, counts, 0)
        found[module.dflash.recompute] = torch.autograd.grad(loss, [*module.dflash.parameters()]), sum(kept)
    assert all(torch.equal(one, other) for one, other in zip(found[False][0], found[True][0], strict=True))
    assert found[True][1] < 0.5 * found[False][1]


# ---- the command

MAIN = dflash.main


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    stage = {"name": "dflash", "batch": {"sequences": 8, "accumulate": 2}, "steps": 20, "optim": {"lr": 1e-2}}
    sections = {"checkpoint": {"every": 20, "keep": 1}, "evaluate": {"every": 10, "decode": 20, "prompts": 3}}
    drafter = {"block_size": SLOTS, "num_layers": 1, "draft_vocab_size": 120}
    return write_recipe(tmp_path_factory.mktemp("runs"), tiny_lm, drafter, [stage], **sections)


@pytest.fixture(scope="module")
def whole(train):
    return train("whole")


def test_the_run_folder(whole):
    config, facts = (json.loads((whole / name).read_text()) for name in ("config.json", "provenance.json"))
    assert (config["drafter_type"], config["block_size"], config["captured_layers"]) == ("dflash", SLOTS, [1])
    weights = load_file(whole / "model.safetensors")
    DFlash.from_artifact(config, weights, "here")
    held_out = load_file(whole / "held_out/model.safetensors")["tokens"]
    assert config["mask_token_id"] not in held_out, "a token that no row has"
    losses, tau = metrics(whole, "loss"), metrics(whole, "simulated_tau")
    assert losses[20] < losses[10] and list(tau) == [0, 10, 20] and max(tau.values()) == facts["simulated_tau"] > 1.02
    assert len(metrics(whole, f"position{SLOTS - 1}_held_out_top1")) == 3
    real = metrics(whole, "tau")
    assert list(real) == [20] and abs(real[20] - tau[20]) < 0.6
    (whole / "tree.json").write_text('{"paths": [[0], [0, 0], [1]]}')
    assert "identical to plain decoding" in decode_a_little(whole)


def test_kept_features_train_as_fresh_ones(whole, train):
    kept = metrics(train("memory", "cache_hidden=memory", "evaluate.decode=null"), "loss")
    assert kept == pytest.approx(metrics(whole, "loss"), rel=1e-4)


def test_a_mask_token_that_some_row_has_is_refused(whole, train):
    tokens = load_file(whole / "held_out/model.safetensors")["tokens"]
    message = f"drafter.mask_token_id={tokens[0, 3]}: some rows have this token; give one that no row has, or null"
    assert train.refused("z", f"drafter.mask_token_id={tokens[0, 3]}") == f"error: {message}\n"
    padded = F.pad(tokens, (0, 3))  # which is no token of a row
    other = SimpleNamespace(held_out={"tokens": padded}, folder=whole, resume=False, main=False)
    assert mask_token(other, 0, SimpleNamespace(vocab_size=300), []) == 0


def test_begin_with_another_drafter(whole, train):
    """Its weights, vocabulary, mask token and layers; another shape is refused."""
    other = [f"init_from={whole}", "stages.0.optim.lr=1e-9", "stages.0.steps=2", "evaluate={every: 2}"]
    second = train("second", *other, "data.train.0.answers.prompts=3")
    one, two = (load_file(folder / "model.safetensors") for folder in (whole, second))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (whole, second)]
    assert configs[0]["mask_token_id"] == configs[1]["mask_token_id"]
    assert not (second / "mask_token.json").exists(), "none was chosen"
    said = train.refused("z", *other, "drafter.block_size=5")
    assert said.startswith(f"error: init_from={whole}: its block_size is 4, the recipe's 5; set drafter.block_size")


def test_begin_with_a_drafter_of_other_positions(whole, train, tiny_lm):
    """What no recipe says is the drafter's."""
    config, weights = json.loads((whole / "config.json").read_text()), load_file(whole / "model.safetensors")
    theirs = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "rms_norm_eps": 3e-4}
    folder, made = whole.parent / "imported", DFlash.from_artifact(config | theirs, weights, "here")
    write_drafter(folder, "dflash", made.config.to_dict(), weights, load_target(str(tiny_lm)), {})
    further = train("further", f"init_from={folder}", "stages.0.steps=2", "evaluate={every: 2}")
    assert (
        DFlash.from_artifact(json.loads((further / "config.json").read_text()), weights, "here").config == made.config
    )


def test_a_run_that_goes_on_has_the_mask_token_that_it_began_with(whole, train):
    folder = train.killed((dflash.DFlashTraining, "count", 2 * 12), "stopped", "checkpoint.every=10")
    chosen = json.loads((whole / "config.json").read_text())["mask_token_id"]
    assert json.loads((folder / "mask_token.json").read_text()) == {"mask_token_id": chosen}
    some = int(load_file(folder / "held_out/model.safetensors")["tokens"][0, 3])
    (folder / "mask_token.json").write_text(json.dumps({"mask_token_id": some}))
    assert f"mask_token_id={some}: some rows have this token" in train.refused("stopped", "--resume")


def test_a_streamed_source_needs_a_mask_token(recipe):
    """Which init_from gives, too."""
    content = yaml.safe_load(recipe.read_text())
    content["data"]["train"] = [{"source": "hub/chats", "streaming": True}]
    content["drafter"]["draft_vocab_size"] = None
    with pytest.raises(ValueError, match="a streamed source is not searched for an unused token"):
        dflash.DflashRecipe.model_validate(content)
    assert dflash.DflashRecipe.model_validate(content | {"init_from": "runs/x"}).drafter.mask_token_id is None


def test_plans_count_what_trains(recipe, whole, tiny_lm):
    content = yaml.safe_load(recipe.read_text()) | {"target": {"name": str(tiny_lm), "dtype": "float32"}}
    (plan,) = dflash.plans(dflash.DflashRecipe.model_validate(content))
    weights = load_file(whole / "model.safetensors")
    assert plan.trained == sum(weight.numel() for name, weight in weights.items() if name != "draft_vocab")


def test_dpace_weights():
    """The published implementation's, of blocks that end early; a token that cannot be drafted has confidence 0."""
    losses = torch.tensor([[0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([[4, 4, 4], [4, -1, 4], [4, -100, -100]])
    wanted = torch.tensor([[3.0, 2.0, 1.0], [0.75 + 0.375 + 0.375, 0.75, 0.375], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(dflash.dpace_weights(losses, labels), wanted)


def test_losses_of_blocks_in_chunks(monkeypatch):
    """A block is never cut, and one chunk or several give the same."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 6, requires_grad=True), torch.randn(11, 6)
    labels = torch.tensor([[1, 2, 3], [4, -1, 5], [6, -100, -100], [7, 8, -100], [9, 10, 0]])
    found = []
    for logits in (1, 1 << 20):
        monkeypatch.setattr("draftsmith.train.losses.LOGITS", {"cpu": logits, "cuda": logits})
        total, by_draft = dflash.linear_block_loss(x, weight, labels, dflash.dpace_weights)
        found.append((total.detach(), by_draft, torch.autograd.grad(total, x)[0]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    cross = F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten().clamp(min=0), reduction="none").view(5, 3)
    torch.testing.assert_close(found[0][1][0], torch.where(labels >= 0, cross, 0.0).detach())
