"""EAGLE: the loss against its definition, then recipe → training → artifact by the real command."""

import gc
import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F
from training_modules import STEPS, eagle_module, eagle_recipe, make_rows
from training_runs import metrics, write_recipe
from transformers import AutoTokenizer

from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.cache import KVCache
from draftsmith.kernels.soft_loss import ETA, LOSSES, Teacher
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.eagle import Eagle, EagleConfig
from draftsmith.models.files.locate import ModelFolder
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.from_published import convert_if_published
from draftsmith.models.serving.source import open_source
from draftsmith.models.target import load_target
from draftsmith.train import eagle, features
from draftsmith.train.dry_run import decode_a_little
from draftsmith.train.losses import linear_soft_loss, teach
from draftsmith.train.run import Run

# ---- the loss


def loss_of(of_target, own, ids, kind):
    """A position's loss in float64 and the probability that its draft is accepted; None: it does not train."""
    p, log_q = of_target.softmax(-1), own.log_softmax(-1)
    if ids is not None:
        if int(of_target.argmax()) not in ids.tolist():
            return None
        p = p[ids]
    inside = p / p.sum()
    cross, acceptance = -(inside * log_q).sum(), torch.minimum(p, log_q.exp()).sum()
    if kind != "lk":
        return {"ce": cross, "tv": 1 - acceptance, "nla": -acceptance.log()}[kind], acceptance
    weight = torch.exp(-ETA * acceptance.detach())
    return weight * (cross + (inside * inside.log()).sum()) + (1 - weight) * (1 - acceptance), acceptance


def defined(module, rows):
    """The loss sample by sample and position by position: sums over the labels of each step, their acceptance, and
    their numbers."""
    target, made, ids = module.target, module.eagle, module.eagle.draft_vocab
    losses, regression, numbers = torch.zeros(module.steps, 2, dtype=torch.float64), 0.0, [0] * module.steps
    for number in range(len(rows)):
        batch = rows.batch([number])
        tokens, supervised = batch["tokens"].long(), batch["supervised"][0]
        with torch.no_grad():
            features = target.features(tokens, made.config.captured_layers)
            logits = target.model(tokens).logits[0].double()
        steps = list(made.unroll(features, target.embeddings, tokens, module.steps))
        head = made.draft_head(target.lm_head)
        for i, t in itertools.product(range(module.steps), range(tokens.shape[1])):
            if t + i + 2 >= tokens.shape[1] or not supervised[t + i + 2]:
                continue
            numbers[i] += 1
            out = steps[i][0, t]
            if module.eagle.config.version == 1:
                regression += float(F.smooth_l1_loss(out.detach(), features[0, t + 1, :32]))
            own = head(out)
            own = (own if made.lm_head is not None else target.after_head(own)).double()
            if (found := loss_of(logits[t + i + 1], own, ids, module.loss)) is not None:
                losses = losses + torch.stack(found) * (torch.arange(module.steps) == i)[:, None]
    return *losses.unbind(1), regression, numbers


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("family, loss", [*itertools.product(("llama", "cohere"), ("ce", "lk")), ("llama", "nla")])
def test_loss_is_its_definition(make_target, projection, size, family, loss):
    """Values and gradients, with packed rows and a draft vocabulary in which some of the target's choices are missing;
    of the LM head one gradient is kept, whatever the number of steps."""
    target, kind = make_target(family, num_hidden_layers=3), loss
    ids = None if size is None else torch.arange(0, 60, 3)[:size]
    module = eagle_module(target, ids, projection=projection, loss=kind)
    losses, acceptance, _, numbers = defined(module, make_rows(61, share=False))
    batch = make_rows(61).batch([0, 1])
    counts = module.count(batch)
    assert counts.tolist() == numbers and len(set(numbers)) == STEPS
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        loss, metrics = module(batch, counts, 0)
    assert kept.count((module.eagle.config.outputs, 32)) == (projection == "own")
    means = {"loss": losses / torch.tensor(numbers), "acceptance": acceptance / torch.tensor(numbers)}
    for (name, each), i in itertools.product(means.items(), range(STEPS)):
        assert float(metrics[f"step{i + 1}_{name}"]) == pytest.approx(float(each[i].detach()), rel=1e-4)
    assert 0.01 < float(metrics["step1_acceptance"]) < 1
    wanted = (0.8 ** torch.arange(STEPS) * means["loss"]).sum()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    trained = [*module.eagle.parameters()]
    pairs = zip(torch.autograd.grad(3 * loss, trained), torch.autograd.grad(wanted, trained), strict=True)
    for found, exact in pairs:
        assert (found - 3 * exact).norm() < 1e-5 * (3 * exact).norm()
    if size:
        hidden = target.hidden(batch["tokens"].long()).flatten(0, 1)
        best = teach(target, hidden, module.eagle.draft_vocab, module.loss).best
        assert 0 < int((best >= 0).sum()) < len(best)


@pytest.mark.parametrize("kind", ["ce", "lk"])
def test_recomputed_steps_have_the_same_gradients(make_target, kind):
    """``precision.gradient_checkpointing`` keeps what grows with the steps' attention and MLP no longer."""
    module, batch = eagle_module(make_target("llama", num_hidden_layers=3), loss=kind), make_rows(61).batch([0, 1])
    counts, found = module.count(batch), {}
    for module.eagle.recompute in (False, True):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            loss, _ = module(batch, counts, 0)
        found[module.eagle.recompute] = torch.autograd.grad(loss, [*module.eagle.parameters()]), sum(kept)
    assert all(torch.equal(one, other) for one, other in zip(found[False][0], found[True][0], strict=True))
    assert found[True][1] < 0.7 * found[False][1]


def test_a_micro_batch_without_a_label(make_target):
    """A process whose rows have none gives gradients of zero."""
    module, batch = eagle_module(make_target("llama", num_hidden_layers=3)), make_rows(61).batch([0, 1])
    batch["supervised"] = torch.zeros_like(batch["supervised"])
    loss, metrics = module(batch, torch.tensor([5, 5, 5]), 0)
    loss.backward()
    assert float(loss.detach()) == 0 and not any(float(value) for value in metrics.values())
    assert all(p.grad is not None and not p.grad.any() for p in module.eagle.parameters())


@pytest.mark.parametrize("one_pass", [False, True])
def test_rows_shorter_than_a_chain(make_target, one_pass):
    """They train the steps that they have."""
    module = eagle_module(make_target("llama", num_hidden_layers=3), unroll=8, one_pass=one_pass)
    batch = {"tokens": torch.randint(1, 60, (2, 6)), "supervised": torch.ones(2, 6, dtype=torch.bool)}
    counts = module.count(batch)
    assert counts.tolist() == [2 * max(0, 4 - k) for k in range(8)]
    loss, found = module(batch, counts, 0)
    loss.backward()
    assert loss.isfinite() and found["step4_loss"] > 0 == found["step5_loss"]


def test_depths_are_dropped_and_not_run(make_target):
    """Conditional drop-on-depth: the loss and its gradients are those of all depths at the places that are kept, and no
    others are run, nor those behind a chain's last label."""
    target = make_target("llama", num_hidden_layers=3)
    module, batch = eagle_module(target, one_pass=True, keep_depths=0.6), make_rows(61).batch([0, 1])
    eagle, labels, ran = module.eagle, module.labels(batch), []
    runs = labels.flip(0).cumsum(0).flip(0) > 0
    widths = runs.sum(2).amax(1).tolist()
    assert widths[0] > widths[1] > widths[2] > 0
    eagle.midlayer.mlp.register_forward_hook(lambda _, given, out: ran.append(given[0].shape[:2]))
    counts = module.count(batch)
    loss, metrics = module(batch, counts, 0)
    assert ran == [(2, width) for width in widths]
    tokens = batch["tokens"].long()
    features = target.features(tokens, eagle.config.captured_layers, batch["positions"]).detach()
    taught = target.after_head(target.lm_head(features[..., : target.hidden_size])).double()
    beside = (batch["positions"], batch["segment"])
    wanted, head = 0.0, eagle.draft_head(target.lm_head)
    for i, out in enumerate(eagle.unroll(features, target.embeddings, tokens, STEPS, *beside)):
        each = [loss_of(taught[b, t + i + 1], head(out[b, t]).double(), None, "ce")[0] for b, t in labels[i].nonzero()]
        assert len(each) == counts[i]
        assert float(metrics[f"step{i + 1}_loss"]) == pytest.approx(float(sum(each).detach()) / len(each), rel=1e-4)
        wanted = wanted + sum(each) / len(each)
    trained = [*eagle.parameters()]
    pairs = zip(torch.autograd.grad(loss, trained), torch.autograd.grad(wanted, trained), strict=True)
    for found, exact in pairs:
        assert (found - exact).norm() < 1e-5 * exact.norm()


def test_what_is_dropped(make_target):
    """Each depth keeps its share of the labels, of chains that keep the depths before, within a sample: anew
    at each visit, by its number alone."""
    target, steps = make_target("llama"), 6
    all_of, module = (eagle_module(target, unroll=steps, one_pass=True, keep_depths=keep) for keep in (1.0, 0.7))
    torch.manual_seed(1)
    samples = [Sample(torch.randint(1, 61, (n,)).tolist(), [False] + [True] * (n - 1)) for n in [250] * 32]
    batch = Rows(Tokenized.of(samples), 1000, share=True).batch([*range(8)]) | {"visit": torch.arange(8)}
    whole, kept = all_of.labels(batch), module.labels(batch)
    assert not (kept & ~whole).any() and torch.equal(kept[0], whole[0])
    assert not (kept[1:] & whole[:-1] & ~kept[:-1]).any(), "drawn from the chains that are kept"
    shares = [float(one.sum() / other.sum()) for one, other in zip(kept, whole, strict=True)]
    assert shares == pytest.approx([1.0, 0.7, 0.49, 0.343, 0.2401, 0.2], abs=0.02)
    some = {name: part[3:4] for name, part in batch.items()}
    assert torch.equal(module.labels(some), kept[:, 3:4])
    assert not torch.equal(module.labels(batch | {"visit": torch.arange(8, 16)}), kept)


def test_loss_of_eagle_1(make_target):
    target = make_target("llama")
    module = eagle_module(target, version=1, noise=0.0).train()
    losses, _, regression, numbers = defined(module, make_rows(61, share=False))
    batch = make_rows(61).batch([0, 1])
    loss, metrics = module(batch, module.count(batch), 0)
    assert float(metrics["regression_loss"]) == pytest.approx(regression / numbers[0], rel=1e-4)
    assert float(loss.detach()) == pytest.approx((regression + 0.1 * float(losses[0].detach())) / numbers[0], rel=1e-4)


def test_noise_is_a_function_of_the_step(make_target):
    module = eagle_module(make_target("llama"), version=1, noise=0.3)
    batch = make_rows(61).batch([0, 1])
    counts = module.count(batch)

    def loss(step):
        return float(module(batch, counts, step)[0].detach())

    module.eval()
    assert loss(1) == loss(2), "none outside of training"
    module.train()
    assert loss(1) == loss(1) != loss(2)


def test_noise_of_a_row_is_the_same_beside_any_others(make_target):
    """Its width is by the row's own length; padding has none."""
    module, rows = eagle_module(make_target("llama"), version=1, noise=0.3), make_rows(61, share=False)
    noise = module.noisy(torch.zeros(2, 9, 64), rows.batch([0, 1], 9), 1)
    for row, length in enumerate((9, 5)):
        own, half = noise[row, :length], 0.3 * 512 / length / 2
        assert half * 0.95 < own.max() <= half and -half <= own.min() < -half * 0.95 and abs(own.mean()) < half / 5
        assert not noise[row, length:].any()
        assert torch.equal(module.noisy(torch.zeros(1, length, 64), rows.batch([row], length), 1)[0], own)


@pytest.mark.parametrize("after", [None, lambda logits: torch.tanh(logits / 2) * 2, lambda logits: logits * 0.7])
@pytest.mark.parametrize("kind", LOSSES)
def test_linear_soft_loss_and_its_gradients(kind, after):
    """Against plain autograd, in chunks and at once; a cap and a scale behind the LM head."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True), torch.randn(11)
    probs, rows, scale = torch.randn(4, 11).softmax(-1), torch.tensor([3, 0, 1, 1, 2, 3, 0, 0, 2]), torch.rand(9)
    made = x @ weight.T + bias
    logits = made if after is None else after(made)
    probs[2] = logits[4].detach().softmax(-1) * 0.999 + 0.001 / 11
    covered = torch.tensor([0.9, 1.0, 0.7, 0.8])
    entropy = -(probs * probs.log()).sum(-1) if kind == "lk" else None
    losses = -(probs[rows] * logits.log_softmax(-1)).sum(-1)
    accepted = torch.minimum(probs[rows] * covered[rows, None], logits.softmax(-1)).sum(-1)
    if entropy is not None:
        share = torch.exp(-ETA * accepted.detach())
        losses = share * (losses - entropy[rows]) + (1 - share) * (1 - accepted)
    losses = {"tv": 1 - accepted, "nla": -accepted.log()}.get(kind, losses)
    wanted = (losses * scale).sum()
    teacher = Teacher(probs, probs.argmax(-1), covered, entropy, kind)
    for chunk in (None, 2):
        total, found = linear_soft_loss(x, weight, teacher, rows, scale, bias, after, chunk)
        torch.testing.assert_close(total, wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(found[0], losses.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[2], accepted.detach(), rtol=1e-5, atol=0)
        assert int(found[1].sum()) == int((logits.argmax(-1) == probs[rows].argmax(-1)).sum()) > 0
        pairs = zip(
            torch.autograd.grad(2 * total, [x, weight]),
            torch.autograd.grad(wanted, [x, weight], retain_graph=True),
            strict=True,
        )
        for one, other in pairs:
            torch.testing.assert_close(one, 2 * other, rtol=0, atol=1e-6 * float(other.abs().max()))


# ---- the command

MAIN = eagle.main
VERSIONS = {1: ["drafter={version: 1}"], 3: []}
FURTHER = ["stages.0.steps=2", "evaluate={every: 2}"]


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    stage = {"name": "eagle", "batch": {"sequences": 8, "accumulate": 2}, "steps": 20, "optim": {"lr": 1e-2}}
    sections = {"checkpoint": {"every": 5, "keep": 1}, "evaluate": {"every": 10, "decode": 20, "prompts": 3}}
    folder = tmp_path_factory.mktemp("runs")
    return write_recipe(folder, tiny_lm, {"version": 3, "unroll": STEPS}, [stage], **sections)


@pytest.fixture(scope="module")
def whole(train):
    """The folders of runs that nothing interrupted, by version."""
    return {version: train(f"whole-{version}", *options) for version, options in VERSIONS.items()}


def in_step(step):
    return eagle.EagleTraining, "count", 2 * (step - 1)  # two micro-batches a step


@pytest.mark.parametrize("version", VERSIONS)
def test_the_run_folder(whole, version):
    folder = whole[version]
    config, facts = (json.loads((folder / name).read_text()) for name in ("config.json", "provenance.json"))
    assert (config["drafter_type"], config["version"]) == ("eagle", version)
    assert config["captured_layers"] == ([1] if version == 3 else []) and config["max_position_embeddings"] == 256
    Eagle.from_artifact(config, load_file(folder / "model.safetensors"), "here")
    losses, tau = metrics(folder, "loss"), metrics(folder, "simulated_tau")
    assert losses[20] < losses[10] and list(tau) == [0, 10, 20] and max(tau.values()) == facts["simulated_tau"] > 1.02
    assert {f"step{k}_held_out_top1" for k in range(1, 8)} <= set((folder / "metrics.jsonl").read_text().split('"'))
    real = metrics(folder, "tau")
    assert list(real) == [20] and abs(real[20] - tau[20]) < 0.6
    (folder / "tree.json").write_text('{"paths": [[0], [0, 0], [1]]}')
    assert "identical to plain decoding" in decode_a_little(folder)


def test_what_decoding_would_need_is_said(train):
    """Documents are answers from their first token on."""
    documents = "data.validation=[{source: stdlib, split: test, limit: 4}]"
    folder = train("documents", *FURTHER, documents, "evaluate.decode=2", "data.max_length=64")
    assert "evaluate.decode: no held-out row has a prompt before its answer" in " ".join(train.out.split())
    assert metrics(folder, "simulated_tau") and not metrics(folder, "tau")


def test_a_loss_on_acceptance(train):
    """``drafter.loss=lk``, with recomputed activations: acceptance is logged, and grows."""
    options = ["drafter={version: 3, unroll: 3, loss: lk, draft_vocab_size: 60}", "evaluate.decode=null"]
    folder = train("lk", *options, "precision.gradient_checkpointing=true", "evaluate.every=20")
    accepted = metrics(folder, "step1_acceptance")
    assert 0 < accepted[10] < accepted[20] < 1 and metrics(folder, "loss")[20] < metrics(folder, "loss")[10]


def test_kept_features_train_as_fresh_ones(whole, train, monkeypatch):
    """In memory and on disk, resumed; a file that was damaged meanwhile is found."""
    kept = metrics(train("memory", "cache_hidden=memory"), "loss")
    assert kept == pytest.approx(metrics(whole[3], "loss"), rel=1e-4)
    folder = train.killed(in_step(14), "disk", "cache_hidden=disk") / "features/0"
    assert json.loads((folder / "asked.json").read_text())["captures"] == [1]
    file = max(folder.glob("*.bin"), key=lambda path: int(path.stem))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + bytes(len(content) // 2))
    wanted = f"error: {folder}: the target makes other hidden states than are kept there (relative difference 1); "
    assert train.refused("disk", "cache_hidden=disk", "--resume") == f"{wanted}delete that folder, then --resume\n"
    shutil.rmtree(folder)
    monkeypatch.setattr(features, "_compare", None)  # nothing is left to compare with
    assert metrics(train("disk", "cache_hidden=disk", "--resume"), "loss") == kept


def test_decoding_beside_training_leaves_no_cache(train, monkeypatch, make_target):
    """On the device, where training needs the memory: without Python's collector, which comes late."""
    alive = lambda: sum(type(each) is KVCache for each in gc.get_objects())  # noqa: E731
    decode_tau, left = Run.decode_tau, []

    def counted(*arguments):
        found = decode_tau(*arguments)
        if found:
            left.append(alive())
        return found

    monkeypatch.setattr(Run, "decode_tau", counted)
    thresholds = gc.get_threshold()
    gc.collect()
    before = alive()
    gc.set_threshold(0)
    try:
        train("decoded", "stages.0.steps=2", "evaluate={every: 1, decode: 1, prompts: 2}")
        answer(make_target("llama"), [[5, 7, 11]], 4, 1)
        left.append(alive())
    finally:
        gc.set_threshold(*thresholds)
    assert left == [before] * 3


def test_begin_with_another_drafter(train):
    """Its weights, vocabulary and layers; another kind of drafter is refused."""
    first = train("first", *FURTHER, "drafter.draft_vocab_size=40", "drafter.captured_layers=[0]")
    other = [*FURTHER, f"init_from={first}", "stages.0.optim.lr=1e-9", "data.train.0.answers.prompts=3"]
    second = train("second", *other, "drafter.draft_vocab_size=40")
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert torch.equal(one["draft_vocab"], two["draft_vocab"]) and one["draft_vocab"].tolist() != [*range(40)]
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0)
    assert json.loads((second / "config.json").read_text())["captured_layers"] == [0]
    for change, message in (
        ("version: 3, draft_vocab_size: 50", "its draft_vocab_size is 40, the recipe's 50"),
        ("version: 1", "its version is 3, the recipe's 1"),
        ("version: 3, draft_vocab_size: 40, captured_layers: [1]", "its captured_layers is [0], the "),
        ("version: 3, draft_vocab_size: 40, norm_output: true", "its norm_output is False, the recipe's True"),
    ):
        said = train.refused("z", *other, f"drafter={{{change}}}")
        assert said.startswith(f"error: init_from={first}: {message}")


def test_one_pass_begins_with_an_eagle_3_drafter(train):
    """P-EAGLE takes its weights and adds the mask pair's feature, which trains; the other way round is refused."""
    first = train("three", *FURTHER)
    further = train("one-pass", *FURTHER, f"init_from={first}", "drafter.one_pass=true", "stages.0.optim.lr=1e-9")
    one, two = (load_file(folder / "model.safetensors") for folder in (first, further))
    assert two.keys() - one.keys() == {"mask_hidden"} and bool(two["mask_hidden"].any())
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0)
    config = json.loads((further / "config.json").read_text())
    assert config["parallel"] == STEPS and config["mask_token_id"] == config["vocab_size"] - 1
    module = eagle_module(load_target(config["target"]["name_or_path"]), one_pass=True)
    batch = {"tokens": torch.randint(5, 60, (2, 12)), "supervised": torch.ones(2, 12, dtype=torch.bool)}
    loss, _ = module(batch, module.count(batch), 0)
    loss.backward()
    assert module.eagle.mask_hidden.grad.abs().min() > 0
    said = train.refused("z", *FURTHER, f"init_from={further}")
    assert said == f"error: init_from={further}: it drafts in one pass; set drafter.one_pass=true\n"
    assert "noise is for version 1" in train.refused("z", *FURTHER, "drafter.noise=0.1")
    assert "keep_depths is for one_pass" in train.refused("z", *FURTHER, "drafter.keep_depths=0.7")
    short = [f"data.{which}.0.answers.new_tokens=4" for which in ("train", "validation")]
    train("short", *FURTHER, "drafter.one_pass=true", "drafter.unroll=2", *short)  # evaluations draft no deeper


def test_further_layers_begin_as_if_they_were_not_there(train):
    """Behind the layer of an EAGLE-3 drafter, in one pass, too: its drafts are the same. Then they train."""
    first = train("one-layer", *FURTHER, "drafter.intermediate_size=40")
    own = [*FURTHER, f"init_from={first}", "drafter.num_layers=3"]
    further = train("three-layers", *own, "drafter.one_pass=true", "stages.0.optim.lr=1e-9")
    one, two = (Eagle.from_artifact(*read_drafter(str(folder))[1:], "") for folder in (first, further))
    assert (two.config.num_layers, two.config.parallel) == (3, STEPS)
    torch.manual_seed(0)
    read = 32 * (1 + len(one.config.captured_layers))
    given = torch.randn(1, 8, read), torch.nn.Embedding(300, 32), torch.randint(5, 60, (1, 8)), 1
    torch.testing.assert_close(*(next(eagle.unroll(*given)) for eagle in (one, two)), atol=1e-5, rtol=0)
    trained = load_file(train("trained", *own) / "model.safetensors")
    assert all(trained[f"layers.{n}.{name}_proj.weight"].any() for n in (1, 2) for name in ("self_attn.o", "mlp.down"))
    refused = train.refused("z", *FURTHER, f"init_from={further}", "drafter.one_pass=true", "drafter.num_layers=2")
    assert refused.endswith("its num_layers is 3, the recipe's 2; set drafter.num_layers\n")
    assert "num_layers is for version 3" in train.refused("z", *FURTHER, "drafter={version: 1, num_layers: 2}")


def test_visits_go_on_after_a_stop(train, monkeypatch):
    """By their numbers depths are dropped. A drafter that trains on keeps its mask token, as an imported one has to."""
    options = ["drafter.one_pass=true", "drafter.keep_depths=0.5", "evaluate.decode=null", "evaluate.every=20"]
    options += ["stages.0.steps=4", "checkpoint.every=2"]
    stopped, labels, visits = train.killed(in_step(4), "stopped", *options), eagle.EagleTraining.labels, []
    monkeypatch.setattr(
        eagle.EagleTraining, "labels", lambda m, batch: visits.append(batch["visit"]) or labels(m, batch)
    )
    whole = train(stopped.name, *options, "--resume")
    assert torch.cat(visits).tolist() == [*range(16, 32)]
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"mask_token_id": 7}))
    made = EagleConfig(**{name: config[name] for name in EagleConfig.__dataclass_fields__})
    assert eagle.shape_of_init(eagle_recipe(one_pass=True), made, ModelFolder("x", whole)).mask_token_id == 7


def test_its_mlp_has_a_width_of_its_own(train, tiny_lm):
    """Of the target 48. Left out, that of `init_from`; another one is refused."""
    first = train("narrow", *FURTHER, "drafter.intermediate_size=20")
    other = [*FURTHER, f"init_from={first}", "stages.0.optim.lr=1e-9", "data.train.0.answers.prompts=3"]
    second = train("narrow-2", *other)
    for folder in (first, second):
        config, weights = (json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))
        shapes = {name.split(".")[-2]: [*weight.shape] for name, weight in weights.items() if ".mlp." in name}
        assert shapes == {"gate_proj": [20, 32], "up_proj": [20, 32], "down_proj": [32, 20]}
        assert config["intermediate_size"] == 20
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0)
    said = train.refused("z", *other, "drafter.intermediate_size=48")
    message = "its intermediate_size is 20, the recipe's 48; set drafter.intermediate_size"
    assert said == f"error: init_from={first}: {message}\n"
    target = {"name": str(tiny_lm), "dtype": "float32"}
    content = yaml.safe_load(train.recipe.read_text()) | {"init_from": str(first), "target": target}
    (plan,) = eagle.plans(eagle.EagleRecipe.model_validate(content))
    assert plan.trained == sum(weight.numel() for weight in one.values())


def test_begin_with_an_imported_drafter(recipe, train, tiny_lm):
    """What no recipe says is the drafter's: sizes, rotary positions, biases, embeddings, the residual; also resumed."""
    folder, target = recipe.parent / "imported", load_target(str(tiny_lm))
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "target_hidden_size": 32, "intermediate_size": 40, "head_dim": 6}
    kind = {"own_embeddings": True, "norm_before_residual": True, "attention_bias": True}
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    config = Eagle.for_target(target, 3, "own", captured_layers=(0, 1)).config
    made = Eagle(replace(config, **sizes, **kind, rope_parameters=rope))
    write_drafter(folder, "eagle", made.config.to_dict(), made.state_dict(), target, {})
    further = train("further", *FURTHER, f"init_from={folder}", "stages.0.optim.lr=1e-9")
    config = json.loads((further / "config.json").read_text())
    assert Eagle.from_artifact(config, made.state_dict(), "here").config == made.config
    for name, weight in load_file(further / "model.safetensors").items():
        torch.testing.assert_close(weight, made.state_dict()[name], atol=1e-6, rtol=0)
    train.killed(in_step(8), "killed-further", f"init_from={folder}")
    moved = load_file(train("killed-further", f"init_from={folder}", "--resume") / "model.safetensors")
    assert all(not torch.equal(weight, made.state_dict()[name]) for name, weight in moved.items())


def test_begin_with_a_published_drafter(train, tiny_lm, tmp_path):
    """`init_from` takes an exported folder as it takes the run that was exported; one of another shape is refused."""
    own = ["drafter.draft_vocab_size=40", "drafter.captured_layers=[1]"]
    first, served = train("to-publish", *FURTHER, *own), tmp_path / "served"
    to_servers.export(open_source(str(first), "vllm"), "vllm", served)
    convert_if_published(str(served), str(tiny_lm))  # says so on stderr, once
    further = train("from-published", *FURTHER, *own, f"init_from={served}", "stages.0.optim.lr=1e-9")
    one, two = (load_file(folder / "model.safetensors") for folder in (first, further))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0)
    assert json.loads((further / "provenance.json").read_text())["init_from"] == str(served)
    said = train.refused("from-published-2", *FURTHER, f"init_from={served}")
    assert f"error: init_from={served}: its draft_vocab_size is 40, the recipe's None; set drafter." in said


def test_plans_count_what_trains(recipe, tiny_lm, make_target):
    content = yaml.safe_load(recipe.read_text())
    narrow = {"version": 3, "intermediate_size": 20}
    for drafter in ({"version": 3, "draft_vocab_size": 40}, {"version": 1}, narrow, narrow | {"version": 1}):
        read = eagle.EagleRecipe.model_validate(
            content | {"drafter": drafter, "target": {"name": str(tiny_lm), "dtype": "float32"}}
        )
        (plan,) = eagle.plans(read)
        d = read.drafter
        shape = (d.version, d.projection, d.draft_vocab_size, (), drafter.get("intermediate_size"))
        made = Eagle.for_target(make_target("llama", vocab_size=300), *shape)
        assert made.config.intermediate_size == drafter.get("intermediate_size", 48)
        assert plan.trained == sum(p.numel() for p in made.parameters())
        assert (plan.unrolled, plan.projected) == ((7, 0) if d.version == 3 else (1, 300 * 32))


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "opt", "phi", "stablelm", "cohere"])
def test_families_with_other_names(make_target, tiny_lm, train, run_main, tmp_path, family, version):
    """Whatever they call embeddings and layers, a run ends with a drafter. Tests of decoding have them too."""
    make_target(family, vocab_size=300).model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_lm).save_pretrained(tmp_path)
    one = ("stages.0.steps=1", f"target.name={tmp_path}", *VERSIONS[version])
    folder = train(f"{family}-{version}", *one)
    assert load_file(folder / "model.safetensors") and (folder / "provenance.json").exists()
