"""Draft-OPD: the loss against its definition, steps as the engine makes them, a second training by the real command."""

import json

import pytest
import torch
from safetensors.torch import load_file
from training_modules import dflash_module, dflash_recipe, eagle_module, eagle_recipe
from training_modules import make_rows as usual_rows
from training_runs import metrics, write_recipe

from draftsmith.data.packing import Rows
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.engine.answers import padded
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.models.eagle import Eagle
from draftsmith.models.target import load_target
from draftsmith.train import dflash, eagle
from draftsmith.train.checkpoint import read_tensors
from draftsmith.train.samples import prompts_of

K = 3
OPTIONS = {"eagle": {"projection": "shared"}, "own": {}, "one_pass": {"one_pass": True}}


def make_modules(target, kind, share, ids=None):
    """A training module with Draft-OPD's loss, and the usual one of the same drafter."""
    if kind == "dflash":
        usual = dflash_module(target, ids)
        return dflash.DFlashReplay(target, usual.dflash, dflash_recipe(replay=share)), usual
    usual = eagle_module(target, ids, **OPTIONS[kind])
    return eagle.EagleReplay(target, usual.eagle, eagle_recipe(replay=share, **OPTIONS[kind])), usual


def make_rows(module, share=True):
    """Four samples, of prompt and answer, in two rows if they share them; of the last two the answers begin with one
    and two of the drafter's own drafts."""
    rows = usual_rows(60, share=False)
    starts, tokens = rows.samples.starts, rows.samples.tokens
    for number, right in ((2, 1), (3, 2)):
        drafts = module.labels(rows.batch([number]))[:, 0]
        first = int((drafts[0] >= 0).nonzero()[0])
        tokens[starts[number] + first + 2 :][:right] = drafts[:right, first].int()
    return Rows(rows.samples, 16, share=share)


def log_q_of(module, text, drafts):
    """Log q of each draft behind a text, by passes that read the drafts as a text's tokens: ``[K, S]``."""
    target, tokens, last = module.target, torch.tensor([text + drafts]), len(text) - 2
    (made,) = module.drafter
    features = target.features(tokens, module.captures)
    if isinstance(made, Eagle):
        outs = torch.stack([out[0, last] for out in made.unroll(features, target.embeddings, tokens, K)])
    else:
        outs = made.draft(features, target.embeddings, tokens, torch.tensor([[last + 1]]))[0, 0]
    own = made.draft_head(target.lm_head)(outs)
    own = target.after_head(own) if isinstance(made, Eagle) and made.lm_head is None else own
    return own.double().log_softmax(-1)


def defined(module, rows):
    """Step by step of every sample: Σ KL(p ‖ q) over accepted drafts, Σ 0.8^{k−1} KL(q ‖ p) over rejected ones, the
    number of the former, the weight of the latter, the number of steps."""
    target, (made,) = module.target, module.drafter
    ids = None if made.draft_vocab is None else made.draft_vocab.tolist()
    sums, sizes = [0.0, 0.0], [0, 0.0, 0]
    for number in range(len(rows)):
        tokens, supervised = (rows.batch([number])[name][0].tolist() for name in ("tokens", "supervised"))
        root, end = supervised.index(True), len(tokens) - supervised[::-1].index(True)
        root = max(root, 1)
        while root < end - 1:
            text, drafts = tokens[: root + 1], list[int]()
            for k in range(K):  # q_k does not depend on the drafts from k on
                best = int(log_q_of(module, text, [*drafts, *[0] * (K - k)])[k].argmax())
                drafts.append(best if ids is None else ids[best])
            log_q, accepted = log_q_of(module, text, drafts), True
            right = 0
            for k in range(min(K, end - root - 1)):
                accepted = accepted and drafts[k] == tokens[root + 1 + k]
                right += accepted
                sizes[not accepted] += 1 if accepted else 0.8**k
                p = target.model(torch.tensor([text + drafts[:k]])).logits[0, -1].double().softmax(-1).detach()
                if ids is not None and int(p.argmax()) not in ids:
                    continue
                log_p = (p if ids is None else p[ids] / p[ids].sum()).log()
                if accepted:
                    sums[0] = sums[0] + (log_p.exp() * (log_p - log_q[k])).sum()
                else:
                    sums[1] = sums[1] + 0.8**k * (log_q[k].exp() * (log_q[k] - log_p)).sum()
            root += right + 1
            sizes[2] += 1
    return sums, sizes


@pytest.mark.parametrize("kind, size", [("eagle", None), ("own", 40), ("one_pass", None), ("dflash", 40)])
def test_loss_is_its_definition(make_target, kind, size):
    """Values and gradients, of packed rows, and the same by micro-batches; with a draft vocabulary in which some of the
    target's choices are missing; beside the usual loss."""
    target = make_target("cohere", num_hidden_layers=3)
    ids = None if size is None else torch.arange(0, 60, 3)[:size]
    module, usual = make_modules(target, kind, 0.25, ids)
    module.check(16)
    (accepted, rejected), sizes = defined(module, make_rows(module, share=False))
    batch = make_rows(module).batch([0, 1])
    counts = module.count(batch)
    assert sizes[0] >= 3 and counts[-3:].tolist() == pytest.approx(sizes)
    loss, found = module(batch, counts, 0)
    with_usual, _ = usual(batch, usual.count(batch), 0)
    assert float(found["replay_accepted_loss"]) == pytest.approx(float(accepted.detach()) / sizes[0], rel=1e-4)
    assert float(found["replay_rejected_loss"]) == pytest.approx(float(rejected.detach()) / sizes[1], rel=1e-4)
    assert float(found["replay_tau"]) == pytest.approx(1 + sizes[0] / sizes[2])
    wanted = 0.75 * with_usual + 0.25 * (accepted / sizes[0] + rejected / sizes[1]) / 2
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)
    one_by_one = sum(module({k: v[i : i + 1] for k, v in batch.items()}, counts, 0)[0] for i in (0, 1))
    trained = [*module.drafter[0].parameters()]
    exact = torch.autograd.grad(wanted, trained)
    for each in (loss, one_by_one):
        for one, other in zip(torch.autograd.grad(each, trained), exact, strict=True):
            assert (one - other).norm() < 1e-5 * other.norm()


def test_no_step_and_no_usual_loss(make_target):
    """A micro-batch without a label gives gradients of zero; at 1 the usual loss is left out."""
    module, _ = make_modules(make_target("llama", num_hidden_layers=3), "own", 1.0)
    batch = make_rows(module).batch([0, 1])
    loss, found = module(batch, module.count(batch), 0)
    assert set(found) == {"replay_accepted_loss", "replay_rejected_loss", "replay_tau"} and float(loss.detach()) > 0
    batch["supervised"] = torch.zeros_like(batch["supervised"])
    loss, _ = module(batch, torch.ones(K + 3), 0)
    loss.backward()
    assert float(loss.detach()) == 0 and all(not p.grad.any() for p in module.eagle.parameters())


def test_drafts_beside_a_text(make_target):
    """A target whose attention does not reach back to a row's beginning is refused; soft-capped attention is not."""
    module, _ = make_modules(make_target("mistral", num_hidden_layers=3), "own", 1.0)
    module.check(8)
    with pytest.raises(ValueError, match=r"beside a text of 16 tokens as inside of it; lower data\.max_length"):
        module.check(16)
    with pytest.raises(ValueError, match="rows of 4 tokens hold no step of 3 drafts"):
        module.check(4)
    make_modules(make_target("gemma2", num_hidden_layers=2), "own", 1.0)[0].check(8)


# ---- the command

MAIN = eagle.main


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    stage = {"name": "eagle", "batch": {"sequences": 8, "accumulate": 2}, "steps": 30, "optim": {"lr": 1e-2}}
    sections = {"checkpoint": {"every": 30, "keep": 1}, "evaluate": {"every": 30}}
    folder = tmp_path_factory.mktemp("runs")
    return write_recipe(folder, tiny_lm, {"version": 3, "unroll": K}, [stage], **sections)


@pytest.fixture(scope="module")
def first(train):
    return train("first")


def test_a_second_training(first, train):
    """The loss of rejected drafts falls; the target's features may be kept."""
    folder = train("second", f"init_from={first}", "drafter.replay=1", "cache_hidden=memory", "stages.0.optim.lr=2e-2")
    losses = metrics(folder, "replay_rejected_loss")
    assert losses[30] < 0.9 * losses[10] and losses[20] < losses[10], losses
    assert metrics(folder, "replay_tau")[30] > 1


def test_steps_are_the_engines(first, tiny_lm):
    """Decoding by a chain of drafts begins its steps where those of its text begin, and accepts as many drafts."""
    target = load_target(str(tiny_lm))
    config = json.loads((first / "config.json").read_text())
    made = Eagle.from_artifact(config, load_file(first / "model.safetensors"), "here")
    prompts = prompts_of(read_tensors(first / "held_out"))
    decoder = SpeculativeDecoder(target, EagleDrafter(made, target, (1,) * K), static=True)
    found = decoder.generate(prompts, 40, stop_ids=frozenset())
    module = eagle.EagleReplay(target, made, eagle_recipe(replay=1.0))
    drafts = module.labels(padded(prompts, [result.tokens for result in found]))
    for prompt, result, row in zip(prompts, found, drafts[0], strict=True):
        roots = torch.tensor([0, *result.accepted]).cumsum(0)[:-1] + len(prompt)
        assert (row >= 0).nonzero()[:, 0].tolist() == (roots - 1).tolist(), result.accepted
    assert {1, 2} <= {count for result in found for count in result.accepted}


def test_what_cannot_be_replayed(train):
    said = train.refused("z", "drafter={version: 1, replay: 0.5}")
    assert "replay is for version 3, and for at least two steps (unroll)" in said
    assert "'drafter.replay': " in train.refused("z", "drafter.replay=1.5")
    server = ["target.features={url: http://localhost:1}", "data.train=[{source: stdlib}]"]
    said = train.refused("z", "drafter.replay=1", *server, "data.validation=[{source: stdlib}]")
    assert "drafter.replay needs the target's layers here" in said
