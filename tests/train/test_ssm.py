"""Boosted ensembles of small speculative models: the loss and the marks against their definitions, then recipe →
training → artifact by the real command, also killed and interrupted."""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from draws import occurs
from safetensors.torch import load_file
from training_runs import metrics, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.data.packing import Sample, Tokenized
from draftsmith.inference import decode
from draftsmith.inference.measure.tree_statistics import in_batches, matched_answers, next_token_ranks
from draftsmith.kernels.soft_loss import ETA
from draftsmith.models.ssm import model_of_layers
from draftsmith.models.target import Target
from draftsmith.train import boosting, ssm

ROOT = Path(__file__).parents[2]


def make_ssm(target):
    """The target's first layer as a model, perturbed, so that it agrees with the target now and then."""
    model = model_of_layers(target, [0])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05 * weight.std())
    return Target(model, None, "ssm", "")


def make_samples(target, count=12):
    """The target's greedy answers to random prompts, of 1 to 11 tokens; some samples have two answers."""
    rng, samples = random.Random(3), []
    for number in range(count):
        ids, marks = [], []
        for _ in range(1 + number % 2):
            for part, size in ((False, rng.randint(2, 6)), (True, rng.randint(1, 11))):
                for _ in range(size):
                    text = torch.tensor([ids]) if ids else None
                    greedy = part and text is not None
                    ids.append(int(target.logits(target.hidden(text)[0, -1]).argmax()) if greedy else rng.randrange(61))
                    marks.append(part)
        samples.append(Sample(ids, marks))
    return Tokenized.of(samples)


def greedy(model, prompt, count):
    text = list(prompt)
    for _ in range(count):
        text.append(int(model.logits(model.hidden(torch.tensor([text]))[0, -1]).argmax()))
    return text[len(prompt) :]


def answers_of(samples, number):
    """(prompt, answer, first place) of each answer of a sample."""
    begin, end = samples.starts[number], samples.starts[number + 1]
    ids, marks, found, t = samples.tokens[begin:end].tolist(), samples.supervised[begin:end].tolist(), [], 0
    while t < len(ids):
        if marks[t]:
            stop = next((u for u in range(t, len(ids)) if not marks[u]), len(ids))
            found.append((ids[:t], ids[t:stop], begin + t))
            t = stop
        t += 1
    return found


@pytest.mark.parametrize("m", [1, 3, 8])
def test_prompts_are_marked_by_what_the_model_really_continues(make_target, m):
    target = make_target("llama")
    model, samples = make_ssm(target), make_samples(target, 24)
    ranks = boosting.greedy_ranks(model, samples, None, "marking")
    left = boosting.unmatched(ranks, samples, "prompt", m)
    matched = []
    for number in range(len(samples)):
        same = [greedy(model, prompt, min(m, len(said))) == said[:m] for prompt, said, _ in answers_of(samples, number)]
        part = slice(samples.starts[number], samples.starts[number + 1])
        wanted = samples.supervised[part] & (not all(same))
        assert (left[part] == wanted).all(), number
        matched += same
    kept = boosting.subset(samples, left)
    some_left = np.diff(np.searchsorted(np.flatnonzero(left), samples.starts)) > 0
    assert kept.supervised.sum() == left.sum() and len(kept) == some_left.sum()
    # Independent of how many are marked at once, and the same as for rows of a tensor.
    tokens = torch.zeros(len(samples), 40, dtype=torch.int64)
    supervised = torch.zeros(len(samples), 40, dtype=torch.bool)
    for number in range(len(samples)):
        part = slice(samples.starts[number], samples.starts[number + 1])
        size = part.stop - part.start
        tokens[number, :size] = torch.from_numpy(samples.tokens[part].astype(np.int64))
        supervised[number, :size] = torch.from_numpy(samples.supervised[part].copy())
    for rows in (1, 5, 24):
        of_rows = in_batches(partial(next_token_ranks, model), tokens, supervised, 40 * rows)
        assert matched_answers(of_rows, supervised, m).tolist() == matched
    if m < 8:
        occurs(0 < sum(matched) < len(matched))


def test_segments_are_marked_by_the_model_after_the_true_tokens(make_target):
    target = make_target("llama")
    model, samples = make_ssm(target), make_samples(target, 24)
    ranks = boosting.greedy_ranks(model, samples, None, "marking")
    left, wanted = boosting.unmatched(ranks, samples, "segment", 2), np.zeros(len(samples.tokens), bool)
    for number in range(len(samples)):
        for prompt, said, first in answers_of(samples, number):
            for begin in range(0, len(said), 2):
                segment = said[begin : begin + 2]
                right = greedy(model, prompt + said[:begin], len(segment)) == segment
                wanted[first + begin : first + begin + len(segment)] = not right
    assert (left == wanted).all() and 0 < left.sum() < samples.supervised.sum()


@pytest.mark.parametrize("loss", ["ce", "kl", "lk"])
@pytest.mark.parametrize("family, size", [("llama", None), ("llama", 20), ("phi", None), ("phi", 20)])
def test_loss_is_its_definition(make_target, loss, family, size):
    """``phi``: its LM head has a bias."""
    target, generator = make_target(family), torch.Generator().manual_seed(5)
    model = make_ssm(target)
    ids = None if size is None else torch.randperm(target.vocab_size, generator=generator)[:size].sort().values
    module = ssm.Ssm(model, target, ids, loss, frozen=True)
    tokens = torch.randint(target.vocab_size, (3, 12), generator=generator)
    supervised = torch.zeros(3, 12, dtype=torch.bool)
    supervised[0, 4:9] = supervised[1, 2:12] = supervised[2, 7:8] = True
    batch = {"tokens": tokens, "supervised": supervised}
    counts = module.count(batch)
    value, found = module(batch, counts, 0)
    kept = torch.arange(target.vocab_size) if ids is None else ids
    losses, accepted = [], []
    for row in range(3):
        for t in range(1, 12):
            if not supervised[row, t] or tokens[row, t] not in kept:
                continue
            own, wanted = (each.logits(each.hidden(tokens[row : row + 1, :t])[0, -1]) for each in (model, target))
            q, p = own[kept].log_softmax(-1), wanted[kept].log_softmax(-1)
            right = int((kept == tokens[row, t]).nonzero())
            accepted.append(torch.minimum(wanted.softmax(-1)[kept], q.exp()).sum())
            kl, weight = (p.exp() * (p - q)).sum(), torch.exp(-ETA * accepted[-1].detach())
            values = {"ce": -q[right], "kl": kl, "lk": weight * kl + (1 - weight) * (1 - accepted[-1])}
            losses.append(values[loss])
    assert int(counts) == len(losses)
    wanted = torch.stack(losses).mean()
    assert float(value.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    if loss != "ce":
        assert float(found["acceptance"]) == pytest.approx(float(torch.stack(accepted).mean().detach()), rel=1e-4)
    names, ours = zip(*((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True)
    found, exact = (torch.autograd.grad(each, ours, allow_unused=True) for each in (value, wanted))
    for one, other in zip(found, exact, strict=True):
        assert one is other or (one - other).norm() <= 1e-4 * other.norm()
    trained = {name for name, gradient in zip(names, found, strict=True) if gradient is not None}
    assert trained and not any("embed" in name or "lm_head" in name for name in trained)
    assert all("layers" in name or "norm" in name for name in trained)


def test_a_model_of_the_targets_layers(make_target):
    """All layers give the target itself; some of them, those layers one after the other."""
    target = make_target("llama")
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    whole = Target(model_of_layers(target, [0, 1]), None, "copy", "")
    assert torch.equal(whole.logits(whole.hidden(tokens)), target.logits(target.hidden(tokens)))
    last = model_of_layers(target, [1])
    state = target.model.state_dict()
    assert all(
        torch.equal(weight, state[name.replace("layers.0.", "layers.1.")]) for name, weight in last.state_dict().items()
    )
    with pytest.raises(ValueError, match="the target has layers 0 to 1"):
        model_of_layers(target, [2])


# ---- recipe → training → artifact


MAIN = ssm.main


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    stage = {"steps": 6, "batch": {"sequences": 4}, "optim": {"lr": 0.01}}
    return write_recipe(
        tmp_path_factory.mktemp("ssm"),
        tiny_lm,
        {"layers": [1], "draft_vocab_size": 80},
        [{"name": f"ssm-{number}", **stage} for number in range(3)],
        prompts=24,
        new_tokens=32,
        target={"name": str(tiny_lm), "model_type": "llama"},
        boost={"tokens": 1, "min_prompts": 1, "unit": "segment"},
        checkpoint={"every": 2, "keep": 1},
        evaluate={"every": 3},
    )


@pytest.fixture(scope="module")
def whole(train):
    return train("whole")


def weights_of(folder):
    return {part.name: (part / "model.safetensors").read_bytes() for part in sorted(folder.glob("ssm-*"))}


def test_it_trains_and_is_exported(whole, tiny_lm):
    config = json.loads((whole / "config.json").read_text())
    assert (config["drafter_type"], config["num_ssms"], config["draft_vocab_size"]) == ("ssm", 3, 80)
    assert config["parts"] == ["ssm-0", "ssm-1", "ssm-2"] and len(config["coverage"]) == len(config["overlap"]) == 3
    assert config["coverage"] == sorted(config["coverage"])
    assert load_file(whole / "model.safetensors")["draft_vocab"].shape == (80,)
    for part in config["parts"]:  # each is a model that transformers opens, with the target's tokenizer
        model = AutoModelForCausalLM.from_pretrained(whole / part)
        assert model.config.num_hidden_layers == 1
        tokenizer = AutoTokenizer.from_pretrained(whole / part)
        assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tiny_lm).get_vocab()
        assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, len(tokenizer))
    first, second, _ = weights_of(whole).values()
    assert first != second
    losses = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in losses} == {"ssm-0", "ssm-1", "ssm-2"}
    taus = [line["simulated_tau"] for line in losses if line.get("best")]
    facts = json.loads((whole / "provenance.json").read_text())
    assert facts["simulated_tau"] == pytest.approx(taus[-1], abs=0.02) and facts["boost"]["unit"] == "segment"
    assert facts["prompts"] == [8, 8, 8]


def test_each_round_trains_on_what_is_left(whole):
    """mark: fresh gives each round its own third, less what the SSMs before it get right."""
    marks = [load_file(whole / "marks" / str(number) / "model.safetensors")["0"] for number in range(3)]
    answers = load_file(whole / "answers/train-0/model.safetensors")
    sizes = answers["supervised"].long().mul(torch.arange(1, answers["tokens"].shape[1] + 1)).amax(1).tolist()
    samples = Tokenized.of(
        Sample(tokens[:size].tolist(), supervised[:size].tolist())
        for tokens, supervised, size in zip(answers["tokens"], answers["supervised"], sizes, strict=True)
    )
    own = np.repeat(np.arange(24) % 3, np.diff(samples.starts))
    ids, models = load_file(whole / "model.safetensors")["draft_vocab"], []
    for number, mark in enumerate(marks):
        wanted = samples.supervised & (own == number)
        for model in models:
            ranks = boosting.greedy_ranks(model, samples, ids, "marking")
            wanted &= boosting.unmatched(ranks, samples, "segment", 1)
        assert torch.equal(mark, torch.from_numpy(wanted))
        assert number == 0 or mark.sum() < (samples.supervised & (own == number)).sum()
        model = AutoModelForCausalLM.from_pretrained(whole / f"ssm-{number}", dtype=torch.float32)
        models.append(Target(model, None, "", ""))


def test_seeds_and_weighting_are_other_ensembles(whole, train, monkeypatch):
    found, used = [weights_of(whole)], []

    def fit(*arguments, weights, fit=ssm.fit, **named):
        used.append(weights)
        return fit(*arguments, weights=weights, **named)

    monkeypatch.setattr(ssm, "fit", fit)
    found.append(weights_of(train("seeds", "boost.ensemble=seeds")))
    found.append(weights_of(train("weighted", "boost.marked_share=0.25", "data.train.0.weight=2")))
    assert used == [[1.0]] * 3 + [[2.0]] + [[1.5, 0.5]] * 2, "the source's weight, times the share of what is marked"
    assert len(found[1]) == 3 and len(set(found[1].values())) == 3
    assert found[2]["ssm-0"] == found[0]["ssm-0"]  # nothing is marked before the first round
    assert found[2]["ssm-1"] != found[0]["ssm-1"]


def test_it_ends_when_too_few_prompts_are_left(train):
    folder = train("few", "boost.min_prompts=9")
    assert "the ensemble ends here" in " ".join(train.out.split())
    config = json.loads((folder / "config.json").read_text())
    assert config["parts"] == ["ssm-0"] and config["num_ssms"] == 1
    facts = [json.loads((place / "provenance.json").read_text()) for place in (folder, folder / "ssm-0")]
    assert [each["steps"] for each in facts] == [6, 6], "of the one stage that was run"


def test_another_model_as_the_base(whole, train):
    """All of it trains; it has to have the target's vocabulary."""
    options = ["drafter.layers=null", "drafter.draft_vocab_size=null", "boost.mark=train"]
    folder = train("based", *options, f"drafter.base={whole / 'ssm-0'}")
    begun, now = (load_file(each / "ssm-0/model.safetensors") for each in (whole, folder))
    assert not torch.equal(begun["model.embed_tokens.weight"], now["model.embed_tokens.weight"])
    assert not (folder / "model.safetensors").exists()


def test_micro_batches_without_a_label(train, tmp_path):
    """Of four samples one has its label beyond the row's end; each is a micro-batch of its own."""
    samples = [{"prompt": "def f(a):\n", "completion": "    return a + a * a\n" * 3}] * 3
    for name, more in (("held-out", []), ("train", [{"prompt": "import os\n" * 60, "completion": "x = 1\n"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*samples, *more]))
    data = f"train: [{{source: {tmp_path}/train.jsonl}}], validation: [{{source: {tmp_path}/held-out.jsonl}}]"
    stage = "{name: s, steps: 2, optim: {lr: 0.01}, batch: {sequences: 4, accumulate: 4}}"
    options = [f"data={{{data}, max_length: 64, max_unsupervised: 0.5}}", f"stages=[{stage}]", "drafter.loss=lk"]
    folder = train("unlabelled", *options, "drafter.draft_vocab_size=null", "boost.ensemble=seeds")
    assert metrics(folder, "lk")[2] > 0 and 0 < metrics(folder, "acceptance")[2] < 1


def test_it_decodes_exactly(whole, run_main, tmp_path):
    (whole / "tree.json").write_text(json.dumps({"parts": [[[0], [0, 0]], [[0], [1]], [[0]]]}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("import os", "def read(path):")))
    options = "--max-new-tokens 24 --threads 1 --check-lossless --all-nodes --baseline none --report".split()
    for name in (whole, f"{whole}+ngram"):
        code, _, err = run_main(decode.main, name, "--prompts", prompts, *options, tmp_path)
        assert code == 0, err
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["lossless"]["identical"] is True and report["mean_accepted_length"] > 1


# ---- killed runs


def test_a_run_goes_on_with_the_marks_that_it_has(train):
    train.killed((ssm.Ssm, "count", 8), "killed")
    said = train.refused("killed", "--resume", "boost.tokens=4")
    assert "killed: it began with boost.tokens=1, not 4; set it back, or --restart" in said
    file = train.recipe.parent / "killed/marks/0/asked.json"
    for name, words in (("rows", "round 0 had other training rows"), ("stages", "round 0 was one of 9 stages")):
        asked = json.loads(file.read_text())
        file.write_text(json.dumps(asked | {name: 9}))
        assert words in train.refused("killed", "--resume")
        file.write_text(json.dumps(asked))
