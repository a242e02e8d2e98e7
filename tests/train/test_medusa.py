"""Medusa-1: the loss against its definition, then recipe → training → tree → report by the real commands."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from training_runs import assert_same_files, make_batch, metrics, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.common.files import write_json
from draftsmith.data import streaming
from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.inference import calibrate, decode
from draftsmith.inference.measure import tree_search
from draftsmith.models.files.identity import older_fingerprint
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.training import training_of
from draftsmith.train import draft_vocabulary, medusa
from draftsmith.train.dry_run import decode_a_little

ROOT = Path(__file__).parents[2]
HEADS = 3

# ---- the loss


def make_module(target, projection="shared"):
    torch.manual_seed(3)
    heads = MedusaHeads.for_target(target, HEADS, 2, projection)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return medusa.Medusa1(target, heads)


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_loss_is_its_definition(make_target, projection):
    target = make_target("llama")
    module, batch = make_module(target, projection), make_batch(target.vocab_size)
    loss, metrics = module(batch, module.count(batch), 0)
    heads, wanted = module.heads, 0.0
    for k in range(1, HEADS + 1):
        losses, hits = [], []
        for tokens, supervised in zip(batch["tokens"], batch["supervised"], strict=True):
            for t in range(14 - k - 1):
                if not supervised[t + k + 1]:
                    continue
                x = target.hidden(tokens[None, : t + 1].long())[0, -1]
                for layer in range(2):
                    x = x + F.silu(x @ heads.weight[layer, k - 1] + heads.bias[layer, k - 1, 0])
                logits = target.lm_head(x) if projection == "shared" else heads.projection[k - 1] @ x
                label = int(tokens[t + k + 1])
                losses.append(float((-logits.log_softmax(-1)[label]).detach()))
                hits.append(int(logits.argmax()) == label)
        assert float(metrics[f"head{k}_loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert float(metrics[f"head{k}_top1"]) == pytest.approx(sum(hits) / len(hits))
        wanted += 0.8**k * sum(losses) / len(losses)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("projection", ["own", "shared"])
def test_loss_with_a_draft_vocabulary(make_target, projection):
    """The softmax is over the draft vocabulary, and a label outside is none: not in the loss, not in the mean."""
    target = make_target("llama")
    module, batch = make_module(target, projection), make_batch(target.vocab_size)
    ids = torch.unique(batch["tokens"][batch["supervised"]])[::2].long()  # every second label
    heads = MedusaHeads.for_target(target, HEADS, 2, projection, len(ids))
    heads.draft_from(ids, target)
    with torch.no_grad():
        heads.weight.copy_(module.heads.weight)
        heads.bias.copy_(module.heads.bias)
        if projection == "own":
            heads.projection.copy_(module.heads.projection[:, ids])
    full, module = module, medusa.Medusa1(target, heads)
    counts = module.count(batch)
    loss, metrics = module(batch, counts, 0)
    with torch.no_grad():
        hidden = target.hidden(batch["tokens"].long())
        logits = full.heads.logits(hidden.flatten(0, 1), target.lm_head).unflatten(1, hidden.shape[:2])[..., ids]
    wanted = 0.0
    for k, labels in enumerate(full.labels(batch)):
        kept = torch.isin(labels, ids)
        assert 0 < int(counts[k]) == int(kept.sum()) < int((labels != -100).sum())
        inside = (labels[kept][:, None] == ids).int().argmax(1)
        mean = float(F.cross_entropy(logits[k][kept], inside))
        assert float(metrics[f"head{k + 1}_loss"]) == pytest.approx(mean, rel=1e-4)
        wanted += 0.8 ** (k + 1) * mean
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-4)


def test_packed_rows_have_the_loss_of_their_samples(make_target):
    """Neither attention, positions nor labels cross from one sample into the next."""
    target = make_target("llama")
    module = make_module(target)
    torch.manual_seed(6)
    samples = Tokenized.of(
        Sample(torch.randint(1, target.vocab_size, (n,)).tolist(), [False] * 2 + [True] * (n - 2)) for n in (9, 5, 7, 6)
    )
    packed, apart = Rows(samples, 16, share=True), Rows(samples, 16, share=False)
    assert len(packed) == 2 and len(apart) == 4
    losses = []
    for rows in (packed, apart):
        batch = rows.batch(range(len(rows)))
        loss, _ = module(batch, module.count(batch), 0)
        losses.append((float(loss.detach()), module.count(batch).tolist()))
        with torch.no_grad():
            batch["hidden"] = target.hidden(batch["tokens"].long(), batch.get("positions"))
        assert float(module(batch, module.count(batch), 0)[0].detach()) == pytest.approx(losses[-1][0], rel=1e-4)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4) and losses[0][1] == losses[1][1] == [19, 15, 11]
    crossing = {key: value for key, value in packed.batch([0, 1]).items() if key in ("tokens", "supervised")}
    assert module.count(crossing).tolist() != losses[0][1], "without segments labels would cross"


# ---- the commands

MAIN = medusa.main
FINAL = ("model.safetensors", "checkpoints/step-30/model.safetensors", "checkpoints/best/medusa-1/model.safetensors")


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    stage = {"name": "medusa-1", "batch": {"sequences": 8, "accumulate": 2}, "steps": 30, "optim": {"lr": 1e-2}}
    sections = {"checkpoint": {"every": 10, "keep": 1}, "evaluate": {"every": 10}}
    folder = tmp_path_factory.mktemp("runs")
    return write_recipe(folder, tiny_lm, {"num_draft_heads": HEADS}, [stage], **sections)


@pytest.fixture(scope="module")
def whole(recipe):
    """The folder of a run that nothing interrupted. Drafts are decoded meanwhile, which changes no weight."""
    command = [sys.executable, "train/medusa.py", recipe, "evaluate.decode=20", "evaluate.prompts=3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return recipe.parent / "whole"


def in_step(step):
    return medusa.Medusa1, "count", 2 * (step - 1)  # two micro-batches a step


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_runs(folder, other):
    assert_same_files(folder, other, *FINAL)
    assert metrics(folder, "simulated_tau") == metrics(other, "simulated_tau")


def test_the_run_folder(whole, tiny_lm):
    config = json.loads((whole / "config.json").read_text())
    assert (config["drafter_type"], config["num_draft_heads"]) == ("medusa", HEADS)
    assert config["target"]["name_or_path"] == str(tiny_lm)
    assert set(load_file(whole / "model.safetensors")) == {"weight", "bias", "projection"}
    provenance = json.loads((whole / "provenance.json").read_text())
    assert provenance["target_fingerprint"] == config["target"]["fingerprint"]
    assert {"versions", "device", "git_commit", "data_sha256", "data_labels", "command", "date"} <= set(provenance)
    answers = load_file(whole / "answers/train-0/model.safetensors")
    assert provenance["data_labels"] == [int(answers["supervised"].sum())]
    card, recipe = (whole / "README.md").read_text(), yaml.safe_load((whole / "recipe.yaml").read_text())
    (stage,), (source,) = recipe["stages"], recipe["data"]["train"]
    for name, value in (
        ("data", f"{source['source']} ({source['split']})"),
        ("learning_rate", stage["optim"]["lr"]),
        ("sequences_per_step", stage["batch"]["sequences"]),
    ):
        assert f"| {name} | {value} |\n" in card
    assert "None" not in card and " | [" not in card
    training = training_of(whole)
    assert training["answer_tokens"] == provenance["data_labels"][0] and training["steps"] == 30
    assert training["labels_seen"] == provenance["labels_seen"] > 0
    assert training["seconds"] == provenance["training_seconds"] > 0
    resolved = (whole / "recipe.yaml").read_text()
    assert resolved.startswith("# python train/medusa.py ")
    assert yaml.safe_load(resolved)["stages"][0]["optim"]["clip"] == 1.0, "defaults are written out"
    assert (whole / "README.md").exists()
    losses, tau = metrics(whole, "loss"), metrics(whole, "simulated_tau")
    assert list(losses) == [10, 20, 30] and losses[30] < losses[20] < losses[10]
    assert list(tau) == [0, 10, 20, 30] and max(tau.values()) == provenance["simulated_tau"]
    real = metrics(whole, "tau")
    assert list(real) == [20] and 1 <= real[20] <= HEADS + 1
    assert abs(real[20] - tau[20]) < 0.6, "of other prompts, but of the same kind"


def test_what_is_measured_while_training(train, monkeypatch):
    """On the validation source's rows: the share of labels that are among a head's first one, and first five."""
    ranks = torch.full((2, 6, HEADS), -1)
    ranks[0, :4, 0] = torch.tensor([0, 1, 4, 5])
    ranks[0, :2, 1] = torch.tensor([0, 0])
    ranks[0, :2, 2] = torch.tensor([9, 5])
    ranks[1, :3, 2] = torch.tensor([4, 1, 0])
    asked = []

    def given(target, heads, *rows):
        asked.append(rows)
        found = torch.full((*rows[0].shape, HEADS), -1)
        found[: len(ranks), : ranks.shape[1]] = ranks
        return found

    monkeypatch.setattr(medusa, "head_ranks", given)
    folder = train("measured", "stages.0.steps=1")
    for head, (top_1, top_5) in enumerate([(1 / 4, 3 / 4), (1, 1), (1 / 5, 3 / 5)], 1):
        assert metrics(folder, f"head{head}_held_out_top1") == dict.fromkeys((0, 1), pytest.approx(top_1))
        assert metrics(folder, f"head{head}_held_out_top5") == dict.fromkeys((0, 1), pytest.approx(top_5))

    def said(*parts):
        return sorted(row[marks].tolist() for part in parts for row, marks in zip(*part, strict=True))

    for which in ("train", "validation"):
        made = load_file(folder / f"answers/{which}-0/model.safetensors")
        of = said((made["tokens"], made["supervised"].bool()))
        assert (said(*asked[:2]) == of) == (which == "validation"), "eight rows, four at a time"


def test_sources_count_by_weight_in_the_draft_vocabulary(make_target, tmp_path):
    """Training draws rows of a source by its weight, however many there are."""
    target = make_target("llama")
    often = Rows(Tokenized.of([Sample([1, 5, 5, 6], [False, True, True, True])] * 10), 4, share=False)
    rarely = Rows(Tokenized.of([Sample([1, 7, 7, 8], [False, True, True, True])]), 4, share=False)
    for weights, wanted in (((1.0, 1.0), [5, 7]), ((5.0, 1.0), [5, 6]), ((1.0, 5.0), [7, 8])):
        data = SimpleNamespace(train=[SimpleNamespace(weight=weight) for weight in weights])
        recipe = SimpleNamespace(init_from=None, data=data)
        of_run = SimpleNamespace(recipe=recipe, main=False, tokenizer=None, held_out=make_batch(61))
        ids, _ = draft_vocabulary.choose(of_run, 2, target.vocab_size, [often, rarely], None)
        assert ids.tolist() == wanted


def test_a_draft_vocabulary_from_the_answers_to_the_artifact(recipe, train):
    """The most frequent tokens of the training answers; a resumed run keeps its own, and other rows are refused,
    and a drafter that begins from another takes that one's."""
    options = ["drafter.projection=shared", "stages.0.steps=4", "checkpoint.every=2", "evaluate.every=2"]
    folder = train.killed(in_step(4), "vocabulary", *options, "drafter.draft_vocab_size=40")
    answers = load_file(folder / "answers/train-0/model.safetensors")
    counts = torch.bincount(answers["tokens"][answers["supervised"]], minlength=300)
    ids = torch.tensor(sorted(sorted(range(300), key=lambda token: (-int(counts[token]), token))[:40]))
    other = "data.train.0.answers.prompts=3"
    for field, before, now, more in (
        ("drafter.draft_vocab_size", 40, 50, []),
        ("drafter.draft_vocab_size", 40, "null", []),
        ("data.train.0.answers.prompts", 16, 3, ["drafter.draft_vocab_size=40"]),
    ):
        said = train.refused("vocabulary", *options, "--resume", f"{field}={now}", *more)
        assert said == f"error: {folder}: it began with {field}={before}, not {now}; set it back, or --restart\n"
    train("vocabulary", *options, "--resume", "drafter.draft_vocab_size=40")
    assert "draft vocabulary: 40 of 300 tokens cover " in train.out
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert weights["draft_vocab"].equal(ids) and config["draft_vocab_size"] == 40
    held_out = load_file(folder / "held_out/model.safetensors")
    inside = torch.isin(held_out["tokens"][held_out["supervised"]], ids)
    found = json.loads((folder / "provenance.json").read_text())["draft_vocabulary"]
    assert (found["size"], found["held_out"]) == (40, round(float(inside.float().mean()), 4))
    begun = ["from-vocabulary", *options, f"init_from={folder}", other]
    said = "its draft_vocab_size is 40, the recipe's 50; set drafter.draft_vocab_size"
    assert said in train.refused(*begun, "drafter.draft_vocab_size=50")
    assert load_file(train(*begun, "drafter.draft_vocab_size=40") / "model.safetensors")["draft_vocab"].equal(ids)
    (folder / "tree.json").write_text('{"paths": [[0], [0, 0], [1]]}')
    assert "identical to plain decoding" in decode_a_little(folder)


def test_answers_belong_to_what_was_asked(train):
    """A run that failed before its first checkpoint leaves answers; a changed recipe does not train on them."""
    answers = train.killed(in_step(1), "asked", "stages.0.steps=2") / "answers"
    before = files(answers)
    train("asked", "stages.0.steps=2", "data.train.0.answers.prompts=5")
    assert " 5 samples" in train.out and "answers 5 prompts" in train.out
    assert "answers 8 prompts" not in train.out, "the held-out ones are as they were"
    after = files(answers)
    assert {path.parts[0] for path in before if before[path] != after[path]} == {"train-0"}


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """A file of 40 chats."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    turns = [
        [{"role": "user", "content": f"Count from {n}."}, {"role": "assistant", "content": f"{n} {n + 1} {n + 2} " * 3}]
        for n in range(40)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    return path


def test_streamed_chats_go_on_bit_for_bit(train, chats, monkeypatch):
    monkeypatch.setattr(streaming, "WINDOW", 16)
    sources = [f"data.train=[{{source: {chats}, streaming: true}}]", f"data.validation=[{{source: {chats}, limit: 9}}]"]
    options = [*sources, "data.max_length=100", "data.packing=true", "stages.0.steps=30"]
    whole = train("stream", *options)
    train.killed(in_step(17), "stream-killed", *options)
    assert_same_runs(train("stream-killed", *options, "--resume"), whole)
    note = json.loads((whole / "streams/0.json").read_text())
    assert note["per_epoch"] == 3 and len(note["ends"]) > 6, "many epochs of windows of 16, 16 and 8"
    endless = [sources[0], "stages.0.steps=null", "stages.0.epochs=2"]
    said = f"stages.0.epochs=2: source '{chats}' is streamed, and its number of rows unknown; give steps"
    assert said in train.refused("endless", *endless)


def test_begin_with_other_heads(whole, train):
    options = ["stages.0.steps=1", "stages.0.optim.lr=1e-9"]
    further = train("further", f"init_from={whole}", *options)
    before, after = (load_file(folder / "model.safetensors") for folder in (whole, further))
    for name in before:
        torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=0)
    said = train.refused("z", f"init_from={whole}", *options, "drafter.num_layers=2")
    assert said.startswith(f"error: init_from={whole}: its num_layers is 1, the recipe's 2; set ")
    silent = shutil.copytree(whole, whole.parent / "silent")
    config = json.loads((silent / "config.json").read_text())
    del config["num_layers"]
    (silent / "config.json").write_text(json.dumps(config))
    train("silent-further", f"init_from={silent}", *options)  # what a config leaves out is no obstacle
    said = train.refused("z", f"init_from={silent}", *options, "drafter.num_layers=2")
    assert "its weights have another shape than the recipe's" in said


def test_trackers_begin_with_training_and_end_with_the_run(train, tmp_path):
    """A run that fails before it trains opens none; of one that fails later they have every line."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train.refused("tracked", "track.tensorboard=true", f"target.name={tmp_path / 'nowhere'}")
    board = train.recipe.parent / "tracked/tensorboard"
    assert not board.exists()
    train.killed(in_step(27), "tracked", "track.tensorboard=true")
    assert "_AsyncWriterThread" not in {type(thread).__name__ for thread in threading.enumerate()}, "TensorBoard's"
    events = EventAccumulator(str(board))
    events.Reload()
    assert [event.step for event in events.Scalars("simulated_tau")] == [0, 10, 20]


def test_ids_without_a_token_are_not_drafted(train, tiny_lm, tmp_path):
    """Of a target whose LM head has more rows than its tokenizer has tokens: 300 and 8 more, as likely as others."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm)
    model.resize_token_embeddings(308, mean_resizing=False)
    for matrix in (model.get_input_embeddings().weight, model.lm_head.weight):
        matrix.data[300:] = matrix.data[60:68]
    folder = tmp_path / "padded"
    AutoTokenizer.from_pretrained(tiny_lm).save_pretrained(folder)
    model.save_pretrained(folder)
    options = (f"target.name={folder}", "stages.0.steps=1")
    said = train.refused("all", *options, "drafter.draft_vocab_size=304", "--restart")
    assert "drafter.draft_vocab_size=304: the target has 300 tokens; set fewer, or null" in said
    run = train("padded", *options, "drafter.draft_vocab_size=299")
    assert int(load_file(run / "model.safetensors")["draft_vocab"].max()) < 300


def test_another_target_is_refused(whole, train, tiny_lm, tmp_path):
    """The same but for one number: a run goes on with its own only, and begins with heads of its own only."""
    other = shutil.copytree(tiny_lm, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    model = train("its-own", "stages.0.steps=1") / "model.safetensors"
    before = model.read_bytes()
    said = train.refused("its-own", "stages.0.steps=2", f"target.name={other}", "--resume")
    assert "checkpoints/step-1: it was trained for another target: other weights (fingerprint " in said
    assert model.read_bytes() == before
    said = train.refused("other", f"init_from={whole}", "stages.0.steps=1", f"target.name={other}")
    assert said.startswith(f"error: {whole}: this drafter was trained for target '{tiny_lm}', not for ")
    assert "same shape, other weights (fingerprint " in said
    state = train.recipe.parent / "its-own/checkpoints/step-1/state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps(content | {"target": older_fingerprint(tiny_lm)}))
    train("its-own", "stages.0.steps=2", "--resume")
    assert json.loads((state.parents[1] / "step-2/state.json").read_text())["target"] == content["target"]


def test_what_a_run_says_of_its_steps(train, monkeypatch):
    """The loss beside each evaluation, that the best weights are not the last ones, tokens that no answer has, and
    held-out rows that are trained on."""
    taus = itertools.chain([1.3, 1.1, 1.5], itertools.repeat(1.2))
    monkeypatch.setattr(medusa, "simulate", lambda *_: next(taus))
    ask = "{prompts: 16, prompt_tokens: 12, new_tokens: 24}"
    same = f"data.validation=[{{source: stdlib, split: validation, answers: {ask}}}]"
    train("worse", "stages.0.steps=40", "evaluate.every=10", "drafter.draft_vocab_size=299", same)
    assert re.findall(r"  step (\d+): loss \d+\.\d{3}, simulated_tau (\S+),", train.out) == [
        ("10", "1.100"), ("20", "1.500"), ("30", "1.200"), ("40", "1.200")
    ]  # fmt: skip
    assert "its weights are those of step 20, the best by simulated_tau; the steps up to 40 made it worse" in train.out
    assert re.search(r"have \d+ different tokens; the other \d+ are never trained", train.out)
    assert re.search(r"warning: \d+ of 16 held-out rows are training rows too", train.out)


def test_another_template_or_library_is_named(train, run_main, tiny_lm, tmp_path):
    """By ``--resume`` in one line, and by decoding, unless the drafter has brought its own template."""
    folder = shutil.copytree(tiny_lm, tmp_path / "target")
    options = (f"target.name={folder}", "stages.0.steps=1")
    run = train("as-it-was", *options, "stages.0.optim.name=muon")
    state, template = run / "checkpoints/step-1/state.json", folder / "chat_template.jinja"
    own = train("its-template", *options, f"data.template={shutil.copy(template, tmp_path / 'own.jinja')}")
    for each in (run, own):
        write_json(each / "tree.json", {"paths": [[0]]})
    content = json.loads(state.read_text())
    train("as-it-was", *options, "stages.0.optim.name=muon", "--resume")
    assert "has changed" not in train.out

    def warned(each):
        code, _, err = run_main(decode.main, each, "--prompt", "x", "--max-new-tokens=2", script="inference/decode.py")
        assert code == 0, err
        return "trained with another chat template than target" in err

    assert not warned(run)
    template.write_text(template.read_text() + " ")
    content["depends_on"]["torch"] = "1.0"
    state.write_text(json.dumps(content))
    train("as-it-was", options[0], "stages.0.steps=2", "run.seed=7", "evaluate.sequences=3", "--resume")
    changed = f"has changed: torch (1.0, now {torch.__version__}), training rows, chat template, run.seed (3, now 7), "
    changed += "optim.name (muon, now adamw), evaluate.sequences (64, now 3)"
    assert changed.replace("+cpu", "") in train.out.replace("+cpu", "") and "it begins anew" in train.out
    assert not warned(run), "trained on, with the template that the target has now"
    template.write_text(template.read_text() + " ")
    assert warned(run) and not warned(own)


def test_a_quantized_target(whole, train):
    folder = train("quantized", "target.quantize=8bit", "stages.0.steps=10")
    losses, plain = metrics(folder, "head1_loss"), metrics(whole, "head1_loss")
    assert losses[10] == pytest.approx(plain[10], rel=0.25) and losses != plain
    config, original = (json.loads((run / "config.json").read_text()) for run in (folder, whole))
    assert config["target"]["fingerprint"] == original["target"]["fingerprint"], "of what is stored"


@pytest.mark.parametrize("packing", ["true", "false"])
def test_chats_from_a_file(train, chats, packing):
    """Heads learn from other people's chats; a kept hidden state is the one that would be computed."""
    sources = [f"data.train=[{{source: {chats}}}]", f"data.validation=[{{source: {chats}, limit: 9}}]"]
    options = [*sources, "data.max_length=100", f"data.packing={packing}", "stages.0.steps=10"]
    losses = []
    for cached in ("none", "memory", "disk"):
        folder = train(f"chats-{packing}-{cached}", *options, f"cache_hidden={cached}")
        assert "40 samples" in train.out and "9 samples" in train.out
        losses.append(metrics(folder, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[1] == losses[2]


PROMISED = """drafter target device dtype mode prompts new_tokens steps mean_accepted_length acceptance_per_position
accepted_length_histogram tokens_per_second baselines speedup speedup_vs_transformers overhead seconds peak_memory_bytes
lossless repetition spec_decode versions command target_fingerprint per_prompt per_group by_position
mean_accepted_length_by_draft_length""".split()
PROMISED_WITHIN = {
    "baselines": "engine transformers prompt_lookup",
    "seconds": "prefill draft verify accept commit other",
    "lossless": "mode checked identical near_ties mismatches p_value",
    "repetition": "repeated_4gram_rate mean_accepted_length_before_first_loop",
    "per_prompt": "prompt kind new_tokens committed_tokens steps group",
    "per_group": "new_tokens seconds baselines",
    "by_position": "band_tokens steps mean_accepted_length",
    "spec_decode": "num_drafts num_draft_tokens num_accepted_tokens num_accepted_tokens_per_pos",
}


@pytest.fixture(scope="module")
def report(whole, run_main):
    """The report of what a person would do with a trained drafter."""
    texts = ["import os\n", "def read(path):\n", "class A(B):\n    ", "日本語", "for x in y:\u2028", "# a: b\n"]
    prompts = whole / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_search, "SIZES", (2, 6, 12))
        assert run_main(calibrate.main, whole, "--nodes", "12")[0] == 0
    options = "--max-new-tokens 24 --baseline all --check-lossless --repeat 2 --show 1 --threads 1 --all-nodes".split()
    command = [whole, "--prompts", prompts, *options, "--report", whole]
    code, _, err = run_main(decode.main, *command, script="inference/decode.py")
    assert code == 0 and "identical" in err, err
    return json.loads((whole / "report.json").read_text())


def test_the_report_keeps_its_promise(report, whole):
    assert set(PROMISED) <= set(report)
    for field, names in PROMISED_WITHIN.items():
        assert set(names.split()) <= set(report[field]), field
    assert all(baseline["tokens_per_second"] > 0 for baseline in report["baselines"].values())
    assert (report["drafter"], report["mode"], report["dtype"]) == (str(whole), "greedy", "float32")
    assert report["command"].startswith(f"python inference/decode.py {whole} --prompts")
    assert (whole / "report.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    tree = json.loads((whole / "tree.json").read_text())
    assert report["tree_nodes"] == len(tree["paths"]) + 1
    lossless = report["lossless"]
    assert lossless["identical"] is True and lossless["near_ties"] == lossless["mismatches"] == 0
    assert lossless["checked"] == report["new_tokens"]
    assert report["mean_accepted_length"] > 1.05, "a drafter that drafts nothing shows nothing"


# ---- bad input
