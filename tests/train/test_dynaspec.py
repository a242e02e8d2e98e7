"""Shortlists: the losses and what lists keep against their definitions, then recipe → training → artifact by the real
command, interrupted too."""

import itertools
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from training_runs import Killed, Runs, assert_same_files, metrics, write_recipe

from draftsmith.inference import decode
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.rollouts import Recorded, eagle_drafts, kept, open_eagle_drafts, record
from draftsmith.inference.measure.tree_statistics import MAX_RANK, best_tree, simulate
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import read_drafter, write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.from_published import convert_if_published
from draftsmith.models.serving.source import open_source
from draftsmith.models.shortlist import DEPTHS, ShortlistConfig, ShortlistHead, budget, low_rank_factors
from draftsmith.models.target import load_target
from draftsmith.train import clusters, dynaspec, eagle, shortlists

KINDS = ("dynaspec", "fr_spec", "vocab_trim")
V = 61  # of make_target


# ---- shortlists and recorded drafts that are made up


def lists_of(kind, outputs=V, width=32, **fields):
    """Shortlists in a random order, of unequal clusters; a random router."""
    generator = torch.Generator().manual_seed(4)
    if kind == "dynaspec":
        config = ShortlistConfig(kind, outputs, (30, 30, 20, 9), (5, 4, 3, 2), 9, 16, width, width)
    else:
        config = ShortlistConfig(kind, outputs, (30, 30, 20, 12))
    head = ShortlistHead(replace(config, **fields))
    head.order.copy_(torch.randperm(outputs, generator=generator))
    if head.router is not None:
        cuts = torch.randperm(outputs - 1, generator=generator)[: head.config.num_clusters - 1] + 1
        head.starts.copy_(torch.cat((torch.tensor([0]), cuts.sort().values, torch.tensor([outputs]))))
        with torch.no_grad():
            for weight in head.router.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return head.eval()


def cluster_of(head, token):
    row = head.order.tolist().index(token)
    return sum(start <= row for start in head.starts.tolist()[1:])


def made_up(positions=64, outputs=V, width=32, best=24, seed=0):
    """Recorded drafts of texts of eight positions: a node's likeliest tokens are those equal to its own modulo four."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(outputs, (positions, DEPTHS), generator=generator)
    top = torch.stack([torch.randperm(outputs, generator=generator) for _ in range(positions * DEPTHS)])
    top = top.view(positions, DEPTHS, outputs)
    same = (top % 4 == (tokens % 4)[..., None]).byte().argsort(dim=-1, descending=True, stable=True)
    top = top.gather(-1, same)[..., :best]
    log_q = torch.randn(positions, DEPTHS, outputs, generator=generator).log_softmax(-1).sort(-1, descending=True)[0]
    label = torch.where(torch.rand(positions, DEPTHS, generator=generator) < 0.7, top[..., 0], top[..., 5])
    hidden = torch.randn(positions, DEPTHS, width, generator=generator)
    begins = torch.ones(positions // 8, 8, dtype=torch.bool)
    return Recorded(begins, tokens, hidden, top, log_q[..., :best], label, outputs)


# ---- losses


@pytest.mark.parametrize("labels", ["top10", "mass"])
def test_losses_are_their_definitions(labels):
    """Node by node; some have no label, others one that the drafter's vocabulary does not have."""
    head, recorded, embed = lists_of("dynaspec"), made_up(128), torch.nn.Embedding(V, 32).requires_grad_(False)
    some = torch.randperm(128 * DEPTHS, generator=torch.Generator().manual_seed(1))
    recorded.label.view(-1)[some[:200]] = -1
    recorded.label.view(-1)[some[200:300]] = V
    blocks = shortlists.Blocks(recorded)
    batch = blocks.batch([1, 0])
    assert len(blocks) == 2 and torch.equal(batch["hidden"][0], recorded.hidden[64:])
    module = dynaspec.RouterTraining(head, embed, labels)
    counts = module.count(batch)
    assert counts.tolist() == [128 * DEPTHS - 200]
    found, _ = module(batch, counts, 0)
    total = 0.0
    with torch.no_grad():
        for place, depth in itertools.product(range(128), range(DEPTHS)):
            label = int(recorded.label[place, depth])
            if label < 0:
                continue
            e, h = embed(recorded.tokens[place, depth]), recorded.hidden[place, depth]
            s = head.router(e, h, depth).double()
            best = recorded.best[place, depth, :10].tolist()
            if labels == "mass":
                q = recorded.log_q[place, depth, :10].double().exp()
                for token, share in zip(best, (q / q.sum()).tolist(), strict=True):
                    total -= share * float(s.log_softmax(-1)[cluster_of(head, token)])
                continue
            wanted = {cluster_of(head, token) for token in [*best, *([label] if label < V else [])]}
            for number in range(9):
                if number in wanted:
                    total -= 9 / len(wanted) * float(F.logsigmoid(s[number])) / 9
                else:
                    total -= float(F.logsigmoid(-s[number])) / 9
    assert float(found.detach()) == pytest.approx(total / int(counts), rel=1e-4)
    found.backward()
    assert {name for name, _ in module.named_parameters()} == {
        f"head.router.{name}" for name in ("inputs.weight", "depth.weight", "clusters.weight", "clusters.bias")
    }
    assert all(weight.grad.abs().sum() > 0 for weight in module.parameters())


def test_a_batch_without_labels():
    batch = shortlists.Blocks(made_up()).batch([0])
    batch["label"] = torch.full_like(batch["label"], -1)
    for labels in ("top10", "mass"):
        module = dynaspec.RouterTraining(lists_of("dynaspec"), torch.nn.Embedding(V, 32), labels)
        loss, _ = module(batch, module.count(batch).clamp(min=1), 0)
        loss.backward()
        assert float(loss.detach()) == 0


@pytest.mark.parametrize("labels", ["top10", "mass"])
def test_a_router_learns_which_clusters_follow_a_token(labels):
    """Clusters of equal size, one of four wanted: recall is a quarter by chance."""
    torch.manual_seed(2)
    config = ShortlistConfig("dynaspec", 60, (15,) * DEPTHS, (1,) * DEPTHS, 4, 32, 32, 32)
    head, embed = ShortlistHead(config), torch.nn.Embedding(60, 32)
    head.order.copy_(torch.arange(60).view(15, 4).T.flatten())
    head.starts.copy_(torch.arange(0, 61, 15))
    blocks, held_out = shortlists.Blocks(made_up(512, 60)), made_up(128, 60, seed=9)
    module = dynaspec.RouterTraining(head, embed, labels)
    before = kept(held_out, embed, head)
    optimizer = torch.optim.AdamW(head.router.parameters(), 1e-2)
    for step in range(60):
        batch = blocks.batch([step % 8])
        loss, _ = module(batch, module.count(batch), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = kept(held_out, embed, head)
    assert max(before.top1) < 0.5 and min(after.top1) > 0.97 and min(after.top10) > 0.97
    assert after.dropped == [0] * DEPTHS and after.tokens == [15] * DEPTHS


# ---- what is recorded, and what lists keep


@torch.no_grad()
def drafted(made, target, text, t, depths):
    """Drafting the true tokens behind position t of a text, one pair after the other through the whole layer: the
    hidden state that each step reads, and its logits."""
    config, head = made.config, made.draft_head(target.lm_head)
    fused = made.fuse(target.features(text[None], config.captured_layers))[0]
    pairs, found = [(int(text[i + 1]), fused[i]) for i in range(t + 1)], []
    for k in range(depths):
        e = target.embeddings(torch.tensor([token for token, _ in pairs]))
        x, residual = made.attention_input(e[None], torch.stack([hidden for _, hidden in pairs])[None])
        q, (keys, values) = made.midlayer.heads(x, *made.rotary(x, torch.arange(len(pairs))[None]))
        shared = config.num_attention_heads // config.num_key_value_heads
        keys, values = (part.repeat_interleave(shared, 1) for part in (keys, values))
        scores = q @ keys.mT / config.head_dim**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        out, hidden = made.outputs(made.midlayer.finish(scores.softmax(-1) @ values, residual))
        found.append((pairs[-1][1], head(out[0, -1])))
        if t + 2 + k < len(text):
            pairs.append((int(text[t + 2 + k]), hidden[0, -1]))
    return found


@pytest.fixture(scope="module")
def texts(make_target):
    """A target, an EAGLE-3 drafter with a draft vocabulary, texts with answers, and what it says of every node."""
    target = make_target("llama", num_hidden_layers=3)
    ids = torch.tensor([token for token in range(V) if token % 5 != 2])
    made = Eagle.for_target(target, 3, "own", len(ids))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    made.draft_from(ids, target)
    made.eval().requires_grad_(False)
    tokens = torch.randint(1, V, (3, 17), generator=generator, dtype=torch.int32)
    supervised = torch.zeros(3, 17, dtype=torch.bool)
    for row, first, end in ((0, 4, 13), (1, 9, 17), (2, 2, 5), (2, 9, 12)):
        supervised[row, first:end] = True
    nodes = {}  # (row, t) → of each depth: the node's token, hidden state, logits, the label (None: there is none)
    for row, t in (supervised[:, 1:]).nonzero().tolist():
        steps = drafted(made, target, tokens[row].long(), t, DEPTHS)
        for k, (hidden, logits) in enumerate(steps):
            node = int(tokens[row, t + 1 + k]) if t + 1 + k < 17 else 0
            here = t + k + 2 < 17 and bool(supervised[row, t + 1 : t + k + 3].all())
            nodes.setdefault((row, t), []).append((node, hidden, logits, int(tokens[row, t + k + 2]) if here else None))
    return target, made, ids.tolist(), tokens, supervised, nodes


def test_what_is_recorded(texts):
    """Against drafting token by token, in batches of texts."""
    target, made, ids, tokens, supervised, nodes = texts
    done = []
    found = record(eagle_drafts(made, target), tokens, supervised, 24, batch_size=2, on_done=done.append)
    assert done == [2, 3] and found.outputs == len(ids)
    assert found.begins.nonzero().tolist() == [list(at) for at in nodes]
    labels = []
    for place, steps in enumerate(nodes.values()):
        for k, (node, hidden, logits, label) in enumerate(steps):
            if label is not None:
                assert int(found.tokens[place, k]) == node
                torch.testing.assert_close(found.hidden[place, k], hidden, atol=1e-4, rtol=1e-4)
                values, best = logits.log_softmax(-1).topk(24)
                assert found.best[place, k].tolist() == best.tolist()
                torch.testing.assert_close(found.log_q[place, k], values, atol=1e-4, rtol=1e-4)
            known = -1 if label is None else ids.index(label) if label in ids else len(ids)
            assert int(found.label[place, k]) == known
            labels.append(known)
    assert {-1, len(ids)} < set(labels)


def allowed(head, hidden, embedding, depth):
    """Places in a list, in plain Python; how many of the wanted clusters' tokens do not fit."""
    config, order = head.config, head.order.tolist()
    capacity = config.capacity[min(depth, len(config.capacity) - 1)]
    if config.shortlist != "dynaspec":
        return set(order[:capacity]), 0
    scores, starts = head.router(embedding, hidden, depth).tolist(), head.starts.tolist()
    wanted = config.clusters[min(depth, len(config.clusters) - 1)]
    best = sorted(range(len(scores)), key=lambda number: -scores[number])[:wanted]
    slabs = [order[starts[number] : starts[number + 1]] for number in best]
    taken = [row for slab in slabs for row in slab][:capacity]
    return set(taken), sum(map(len, slabs)) - len(taken)


@pytest.mark.parametrize("best", [24, "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_lists_keep(texts, kind, best):
    """Ranks, recall, sizes and dropped shares, node by node from all logits."""
    target, made, ids, tokens, supervised, nodes = texts
    head, drafts = lists_of(kind, len(ids)), eagle_drafts(made, target)
    recorded = record(drafts, tokens, supervised, len(ids) if best == "all" else best)
    found, whole = kept(recorded, drafts.embed, head, chunk=5), kept(recorded, drafts.embed, None)
    sums = torch.zeros(DEPTHS, 5, dtype=torch.float64)
    ranks, whole_ranks = (torch.full((3, 17, DEPTHS), -1) for _ in range(2))
    with torch.no_grad():
        for (row, t), steps in nodes.items():
            for k, (node, hidden, logits, label) in enumerate(steps):
                if label is None:
                    continue
                places, dropped = allowed(head, hidden, target.embeddings.weight[node], k)
                order = logits.argsort(descending=True).tolist()
                ten = sum(place in places for place in order[:10]) / 10
                sums[k] += torch.tensor([1, order[0] in places, ten, len(places), dropped])
                for held, into in ((places, ranks), (set(order), whole_ranks)):
                    listed = [ids[place] for place in order[: recorded.best.shape[-1]] if place in held]
                    into[row, t, k] = min(listed.index(label) if label in listed else MAX_RANK, MAX_RANK)
    assert torch.equal(found.ranks, ranks) and torch.equal(whole.ranks, whole_ranks)
    assert {-1, MAX_RANK} < set(ranks.flatten().tolist()) and not torch.equal(ranks, whole_ranks)
    count, first, ten, size, dropped = sums.T
    for values, expected in (
        (found.top1, first / count),
        (found.top10, ten / count),
        (found.tokens, size / count),
        (found.dropped, dropped / (size + dropped)),
        (whole.tokens, torch.full((DEPTHS,), len(ids))),
        (whole.top1, torch.ones(DEPTHS)),
        (whole.top10, torch.ones(DEPTHS)),
        (whole.dropped, torch.zeros(DEPTHS)),
    ):
        assert values == pytest.approx(expected.tolist(), abs=1e-4)
    assert min(found.top10) > 0 and max(found.top10) < 1 and (max(found.dropped) > 0) == (kind == "dynaspec")


def test_what_a_low_rank_list_keeps(texts):
    """Each node's own candidates, by what its LM head reads."""
    target, made, ids, tokens, supervised, _ = texts
    drafts = eagle_drafts(made, target)
    head = ShortlistHead(ShortlistConfig("low_rank", len(ids), (9, 4), rank=5, feature_size=32))
    head.down, head.up = low_rank_factors(drafts.weight, 5, torch.eye(32))
    recorded = record(drafts, tokens, supervised, 24, low_rank=True)
    found, seen = kept(recorded, drafts.embed, head, chunk=5), []
    with torch.no_grad():
        for k, rollout in enumerate(drafts.run(tokens, supervised)):
            torch.testing.assert_close(recorded.hidden[:, k], rollout.out)
            scores = rollout.out @ (head.up @ head.down).T
            inside = (scores.topk(9 if k == 0 else 4).indices == recorded.best[:, k, :1]).any(-1)
            seen.append(float(inside[recorded.label[:, k] >= 0].double().mean()))
    assert found.top1 == pytest.approx(seen, abs=1e-4) and found.tokens == [9, 4, 4, 4, 4, 4] and 0 < min(seen) < 1


def test_a_drafter_of_fewer_tokens_than_are_recorded(make_target):
    target = make_target("llama")
    made = Eagle.for_target(target, 3, "own", 12)
    made.draft_from(torch.arange(0, 24, 2), target)
    tokens = torch.arange(1, 21)[None]
    recorded = record(eagle_drafts(made, target), tokens, torch.arange(20)[None] >= 6, 24)
    assert recorded.best.shape[-1] == recorded.log_q.shape[-1] == 12
    assert recorded.best.sort(-1).values.eq(torch.arange(12)).all()


# ---- k_max and the schedule


def test_budgets():
    config = lists_of("dynaspec").config  # 61 tokens in 9 clusters
    assert config.with_budget(6, "fixed") == replace(config, clusters=(6,) * 6, capacity=(41,) * 6)
    aware = config.with_budget(6, "position_aware")
    assert aware == replace(config, clusters=(6, 6, 1, 1, 1, 1), capacity=(41, 41, 7, 7, 7, 7))
    assert config.with_budget(9, "fixed").capacity == (V,) * 6


def selecting(**drafter):
    values = {"k_max": None, "schedule": None, "keep": 0.98, **drafter}
    return SimpleNamespace(recipe=SimpleNamespace(drafter=SimpleNamespace(**values)))


@pytest.fixture
def measured(monkeypatch, capsys):
    """measured(times, **drafter) → the line that ``select`` chose, all lines, and what it printed. The times are
    given; what lists keep is measured."""

    def measure(seconds, **drafter):
        head, recorded = lists_of("dynaspec", num_clusters=32), made_up(480)
        embed = torch.nn.Embedding(V, 32, _weight=torch.randn(V, 32, generator=torch.Generator().manual_seed(8)))
        monkeypatch.setattr(dynaspec, "head_seconds", lambda head, *_: [seconds(head.config)] * DEPTHS)
        tree = best_tree(kept(recorded, embed, None).ranks, 8)
        lines = dynaspec.select(selecting(**drafter), head, SimpleNamespace(embed=embed), None, recorded, tree)
        (chosen,) = [line for line in lines if head.config == head.config.with_budget(line["k_max"], line["schedule"])]
        assert chosen["simulated_tau"] == simulate(tree, kept(recorded, embed, head).ranks)
        assert chosen["seconds"] == pytest.approx(DEPTHS * seconds(head.config))
        return chosen, lines, capsys.readouterr().out

    return measure


@pytest.mark.fixed_seed("budgets that keep different shares of τ")
def test_the_fastest_that_keeps_enough(measured):
    """Among faster ones that keep less, and slower ones that keep more."""
    _, lines, _ = measured(lambda config: config.clusters[0])
    assert [(line["schedule"], line["k_max"]) for line in lines] == [
        (schedule, k) for schedule in ("fixed", "position_aware") for k in (2, 4, 6, 8, 12, 16)
    ]
    by_tau = sorted(lines, key=lambda line: line["simulated_tau"])
    taus = [line["simulated_tau"] for line in by_tau]
    assert taus[0] < taus[3] < taus[4] < taus[6] < taus[7] and taus[-2] < taus[-1]
    ranks = kept(made_up(480), torch.nn.Embedding(V, 32), None).ranks
    whole = simulate(best_tree(ranks, 8), ranks)

    def seconds(config):
        """The one that keeps the least is the fastest, then one in the middle, then the others, the best one last."""
        place = next(
            place for place, line in enumerate(by_tau) if config == config.with_budget(line["k_max"], line["schedule"])
        )
        return {0: 1e-3, 6: 2e-3}.get(place, 3e-3 + place * 1e-4)

    for keep, place in ((0.0, 0), (taus[4] / whole - 1e-9, 6), (1.0, 11)):
        chosen, _, out = measured(seconds, keep=keep)
        assert (chosen["k_max"], chosen["schedule"]) == (by_tau[place]["k_max"], by_tau[place]["schedule"])
        (marked,) = [line for line in out.splitlines() if "←" in line]
        assert f"{chosen['k_max']} ←" in marked and chosen["schedule"] in marked and f"{taus[place]:.3f}" in marked
        assert ("none keeps drafter.keep=1 of it; the one that keeps the most is taken" in out) == (keep == 1)
        assert f"{whole:.3f} with the whole LM head" in out
    assert taus[-1] < whole


def test_what_the_recipe_sets_is_not_selected(measured):
    _, lines, _ = measured(lambda _: 1.0, k_max=5)
    assert [(line["k_max"], line["schedule"]) for line in lines] == [(5, "fixed"), (5, "position_aware")]
    chosen, lines, _ = measured(lambda _: 1.0, k_max=99, schedule="position_aware")
    assert (len(lines), chosen["k_max"], chosen["schedule"]) == (1, 32, "position_aware")
    _, lines, _ = measured(lambda _: 1.0, schedule="fixed")
    assert {line["schedule"] for line in lines} == {"fixed"} and len(lines) == 6


def test_timing_leaves_the_router_as_it_is(make_target, monkeypatch):
    """It is measured in the target's dtype, and goes on in its own. Equal lists are timed once."""
    target = make_target("llama")
    target.model.to(torch.bfloat16)
    drafts = eagle_drafts(Eagle.for_target(target, 1, "shared"), target)
    head = lists_of("dynaspec")
    before, calls, timed = {n: w.clone() for n, w in head.state_dict().items()}, [], shortlists.median_seconds
    monkeypatch.setattr(shortlists, "median_seconds", lambda *given: calls.append(given) or timed(*given))
    seconds = shortlists.head_seconds(head, drafts, target)
    assert len(seconds) == DEPTHS and min(seconds) > 0 and seconds[3] == seconds[4] == seconds[5] and len(calls) == 4
    for name, weight in head.state_dict().items():
        assert weight.dtype == before[name].dtype and torch.equal(weight, before[name]), name


# ---- the command

MAIN = dynaspec.main
TREE = Topology(((0,), (0, 0), (1,), (1, 0), (2,)))


@pytest.fixture(scope="module")
def target(tiny_lm):
    return load_target(str(tiny_lm), device="cpu")


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory, run_main):
    """The recipe's file. Its base is an EAGLE-1 drafter, trained by the real command."""
    folder = tmp_path_factory.mktemp("runs")
    stage = {"batch": {"sequences": 4}, "steps": 20, "optim": {"lr": 1e-2}}
    sections = {"checkpoint": {"every": 5, "keep": 1}, "evaluate": {"every": 10}}
    base = Runs(eagle.main, write_recipe(folder, tiny_lm, {"version": 1}, [stage], **sections), run_main)("base")
    lists = {"num_clusters": 20, "router_width": 32, "positions": 10_000, "size": 60}
    return write_recipe(folder, tiny_lm, {"base": str(base), **lists}, [{"name": "router", **stage}], **sections)


@pytest.fixture(scope="module")
def whole(train):
    """The folders of runs that nothing interrupted, by kind."""
    return {kind: train(f"whole-{kind}", f"drafter.shortlist={kind}") for kind in KINDS}


def read(folder):
    config, facts = (json.loads((folder / name).read_text()) for name in ("config.json", "provenance.json"))
    return config, facts, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_folder(whole, target, kind):
    """The config, the base as its part, and text that is identical to plain decoding's."""
    folder = whole[kind]
    config, facts, weights = read(folder)
    assert (config["drafter_type"], config["shortlist"], config["parts"]) == ("dynaspec", kind, ["drafter"])
    assert (config["outputs"], config["vocab_size"], config["hidden_size"]) == (300, 300, 32)
    assert weights["order"].sort().values.tolist() == [*range(300)] and weights["order"].dtype == torch.int32
    # A rank in a list is at most that in the whole, so that a tree may accept a little more.
    assert 1 < facts["simulated_tau"] <= facts["whole_simulated_tau"] * 1.02
    assert facts["steps"] == (20 if kind == "dynaspec" else 0), "a list by frequency trains nothing"
    if kind == "dynaspec":
        assert (config["num_clusters"], config["router_width"]) == (20, 32) and len(weights["starts"]) == 21
        assert (config["embedding_size"], config["feature_size"]) == (32, 32)
        mean, wanted = 300 / 20, config["clusters"]
        assert config["capacity"] == [round(count * mean) for count in wanted] and max(wanted) <= 10
        (chosen,) = [line for line in facts["selection"] if list(budget(line["k_max"], line["schedule"])) == wanted]
        assert chosen["simulated_tau"] == pytest.approx(facts["simulated_tau"])
        assert json.loads((folder / "clusters.json").read_text())["num_clusters"] == 20
        assert (folder / "clusters.png").stat().st_size > 1000
    else:
        assert config["capacity"] == [60] * 6
        assert set(weights) == {"order", "starts"} and "selection" not in facts and "clusters" not in config
    page = (folder / "training.html").read_text()
    assert "drafted by dynaspec" in page and "held-out text 1" in page and "rank 1" in page
    if kind in ("fr_spec", "vocab_trim"):  # one list everywhere
        listed = set(map(target.tokenizer.decode, weights["order"][:60, None].tolist()))
        steps = json.loads(re.search(r'id="steps">(.*?)</script>', page)[1])
        nodes = [(text, note[:4] == "rank") for one in steps for step in one for _, text, _, _, note in step[1:]]
        assert {text for text, ranked in nodes if ranked} <= listed, "its own ranks, not the whole LM head's"
        assert {text for text, ranked in nodes if not ranked} - listed
    part, base = (load_file(each / "model.safetensors") for each in (folder / "drafter", folder.parent / "base"))
    assert {n: w.tolist() for n, w in part.items()} == {n: w.tolist() for n, w in base.items()}
    (folder / "tree.json").write_text(json.dumps({"paths": TREE.paths}))
    _, drafter = load_drafter(str(folder), target, all_nodes=True)
    (folder / "tree.json").unlink()
    assert drafter.shortlists.config.shortlist == kind
    prompts = [target.tokenizer(prompt)["input_ids"] for prompt in ("import os", "def read(path):", "The", "x = [")]
    results = SpeculativeDecoder(target, drafter).generate(prompts, 40)
    assert [r.tokens for r in results] == [r.tokens for r in SpeculativeDecoder(target).generate(prompts, 40)]
    assert sum(max(r.accepted) for r in results) > len(prompts), "nothing was drafted"


def test_a_low_rank_list(train, target):
    """With the drafter as its part; with full rank nothing is lost, and a lower one has less error in what the LM head
    reads of held-out text than the truncated SVD."""
    wanted = "drafter.shortlist=low_rank", "drafter.candidates=30"
    folder = train("low-rank", *wanted, "drafter.rank=99")
    config, facts, weights = read(folder)
    assert "drafter.rank=99: 32 is used, that of the LM head" in train.out and facts["steps"] == 0
    assert (config["rank"], config["feature_size"], config["capacity"]) == (32, 32, [30] * 6)
    torch.testing.assert_close(weights["up"] @ weights["down"], target.lm_head.weight.float(), atol=1e-4, rtol=1e-4)
    assert min(facts["top1"]) > 0.99 and facts["simulated_tau"] == pytest.approx(facts["whole_simulated_tau"], rel=0.02)
    lower, held = train("lower-rank", *wanted, "drafter.rank=2"), load_file(folder / "held_out/model.safetensors")
    _, facts, weights = read(lower)
    assert min(facts["top1"]) < 0.9
    drafts = open_eagle_drafts(*read_drafter(str(folder / "drafter")), target)
    reads = record(drafts, held["tokens"], held["supervised"], 4, low_rank=True).hidden
    factors = (weights["down"], weights["up"]), low_rank_factors(drafts.weight, 2, torch.eye(32))
    of_reads, of_svd = (drafts.logits(reads) - reads @ (up @ down).t() for down, up in factors)
    assert of_reads.square().mean() < 0.9 * of_svd.square().mean()
    (folder / "tree.json").write_text(json.dumps({"paths": TREE.paths}))
    _, drafter = load_drafter(str(folder), target, all_nodes=True)
    prompts = [target.tokenizer(prompt)["input_ids"] for prompt in ("import os", "def read(path):")]
    results = SpeculativeDecoder(target, drafter).generate(prompts, 40)
    assert [r.tokens for r in results] == [r.tokens for r in SpeculativeDecoder(target).generate(prompts, 40)]


def test_weights_in_bfloat16(train, run_main, tmp_path):
    """As a drafter that is passed on has them: the lists stay whole numbers, and text is that of plain decoding."""
    folder = train("bfloat16", "export.dtype=bfloat16")
    config, _, weights = read(folder)
    whole_numbers = {name: weight.dtype for name, weight in weights.items() if weight.dtype != torch.bfloat16}
    assert whole_numbers == {"order": torch.int32, "starts": torch.int32} and len(weights) > 2
    part = load_file(folder / "drafter/model.safetensors")
    assert {weight.dtype for weight in part.values()} == {torch.bfloat16} and config["parts"] == ["drafter"]
    (tmp_path / "tree.json").write_text(json.dumps({"paths": TREE.paths}))
    line = [folder, "--tree", tmp_path / "tree.json", "--prompt", "def read(path):", "--raw", "--max-new-tokens", 40]
    options = ["--device", "cpu", "--threads", 1, "--all-nodes", "--check-lossless", "--report", tmp_path]
    code, _, err = run_main(decode.main, *line, *options, script="inference/decode.py")
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["new_tokens"] == 40 and report["lossless"]["passed"] and report["mean_accepted_length"] > 1


def test_training_raises_recall(train):
    """Of the same lists before and after; the loss falls, too."""
    fixed = ["drafter.k_max=5", "drafter.schedule=fixed"]
    begun = train("untrained", *fixed, "stages.0.optim.lr=1e-12", "stages.0.steps=1", "evaluate={every: 1}")
    runs = [begun, *(train(labels, *fixed, f"drafter.labels={labels}") for labels in ("mass", "top10"))]
    losses = metrics(runs[1], "loss")
    assert losses[20] < losses[10]
    before, mass, top10 = (read(run)[1]["selection"] for run in runs)
    for after in (mass, top10):
        assert sum(after[0]["top1"]) > sum(before[0]["top1"]) + 1 and after[0]["tokens"] != before[0]["tokens"]
    assert mass[0]["top1"] != top10[0]["top1"]


def test_frequencies(whole, train, target, tmp_path):
    """fr_spec counts all tokens of the corpus, by default of the training rows; vocab_trim those of the answers. Stop
    tokens come first."""
    stored = load_file(whole["fr_spec"] / "answers/train-0/model.safetensors")
    counts = {"fr_spec": [0] * 300, "vocab_trim": [0] * 300}
    for tokens, marks in zip(stored["tokens"].tolist(), stored["supervised"].tolist(), strict=True):
        end = len(marks) - marks[::-1].index(True)
        for token, answer in zip(tokens[:end], marks[:end], strict=True):
            counts["fr_spec"][token] += 1
            counts["vocab_trim"][token] += answer

    stops = target.stop_ids

    def ordered(counts):
        return sorted(range(300), key=lambda token: (token not in stops, -counts[token], token))

    for kind, each in counts.items():
        assert load_file(whole[kind] / "model.safetensors")["order"].tolist() == ordered(each), kind
    assert counts["fr_spec"] != counts["vocab_trim"]
    (tmp_path / "corpus.txt").write_text("zebra quiz jazz " * 40)
    corpus = f"drafter.corpus=[{{source: '{tmp_path}/corpus.txt'}}]"
    counted = train("of-corpus", "drafter.shortlist=fr_spec", corpus)
    assert "for drafter.shortlist=fr_spec alone" in train.refused("refused", "drafter.shortlist=vocab_trim", corpus)
    words = ["drafter.shortlist=fr_spec", corpus.replace("corpus.txt", "corpse.txt"), "drafter.base=nowhere/at/all"]
    said = train.refused("refused", *words)  # before the drafter is looked for
    assert said.endswith("corpse.txt': there is no such file\n")
    words = target.tokenizer("zebra quiz jazz " * 40)["input_ids"]
    first = load_file(counted / "model.safetensors")["order"].tolist()[len(stops) :]
    assert first[: len(set(words))] == sorted(set(words), key=lambda token: (-words.count(token), token))
    (tmp_path / "more.txt").write_text("over the lazy dog " * 400)  # ten times as long, and hardly drawn
    weighed = corpus[:-1] + f", {{source: '{tmp_path}/more.txt', weight: 0.01}}]"
    counted = train("weighed", "drafter.shortlist=fr_spec", weighed)
    assert load_file(counted / "model.safetensors")["order"].tolist()[len(stops)] == first[0]
    answers = "drafter.corpus=[{source: stdlib, answers: {prompts: 2, prompt_tokens: 8, new_tokens: 8}}]"
    assert "leave out 'answers'" in train.refused("refused", "drafter.shortlist=fr_spec", answers)


# ---- runs that end early


class Work:
    """Counts k-means iterations, recorded batches and training steps. Called, it makes a run that is killed before the
    one that ``kill`` names, and gives what was done until then."""

    def __init__(self, patch):
        self.done, self.kill = Counter(), {}
        for place, name, what in (
            (clusters, "_iterate", "iterations"),
            (shortlists, "record", "rollouts"),
            (dynaspec.RouterTraining, "count", "steps"),
        ):
            patch.setattr(place, name, self.counted(getattr(place, name), what))

    def counted(self, call, what):
        def counting(*args, **named):
            if self.done[what] == self.kill.get(what):
                raise Killed
            self.done[what] += 1
            return call(*args, **named)

        return counting

    def __call__(self, train, kill, name, *overrides):
        self.done, self.kill = Counter(), kill
        with pytest.raises(Killed):
            train(name, *overrides)
        self.kill = {}
        return Counter(self.done)


@pytest.fixture
def work(monkeypatch):
    return Work(monkeypatch)


SAME = (
    "model.safetensors",
    "drafter/model.safetensors",
    "clusters/model.safetensors",
    "rollouts/model.safetensors",
    "checkpoints/step-20/model.safetensors",
    "checkpoints/step-20/optimizer.safetensors",
)


@pytest.fixture(scope="module")
def iterations(whole):
    """Of k-means. One more may be run and dropped, by the whole run and by each that goes on."""
    return len(load_file(whole["dynaspec"] / "clusters/model.safetensors")["objective"])


@pytest.mark.parametrize(
    "what, moment, resume",
    [("iterations", 2, []), ("rollouts", 3, ["--resume"]), ("steps", 2, []), ("steps", 13, ["--resume"])],
)
def test_a_killed_run_goes_on_bit_for_bit(whole, iterations, train, work, what, moment, resume):
    """Nothing that was finished is done again."""
    name = f"{what}-{moment}"
    reached = work(train, {what: moment}, name)
    assert reached[what] == moment and iterations > 3
    if moment == 13:
        assert "held-out text 1" in (train.recipe.parent / name / "training.html").read_text(), "since step 10"
    work.done.clear()
    folder = train(name, *resume)
    assert_same_files(folder, whole["dynaspec"], *SAME)
    taus = (metrics(each, "simulated_tau") for each in (folder, whole["dynaspec"]))
    assert next(taus) == next(taus)
    rest = iterations - 2 if what == "iterations" else 0
    assert rest <= work.done["iterations"] <= rest + 1
    assert work.done["rollouts"] == (0 if what == "steps" else 4)
    assert work.done["steps"] == (10 if moment == 13 else 20)


def test_a_base_that_was_trained_further(recipe, train, work):
    """Checkpoints of a router are of the base's own clusters."""
    base = shutil.copytree(recipe.parent / "base", recipe.parent / "further-base")
    work(train, {"steps": 13}, "further", f"drafter.base={base}")
    weights = load_file(base / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in weights.items()}, base / "model.safetensors")
    for _ in range(2):
        said = train.refused("further", "--resume", f"drafter.base={base}")
        assert f"--resume: drafter.base={base} has other weights now; restore them, or --restart" in said
    save_file(weights, base / "model.safetensors")
    train("further", "--resume", f"drafter.base={base}")


@pytest.mark.whole_runs
def test_parts_of_another_recipe_are_made_anew(recipe, train, work):
    """Clusters and rollouts of another number, seed or drafter; what does not depend on the change is kept."""
    base = shutil.copytree(recipe.parent / "base", recipe.parent / "changed-base")

    def made(*changes):
        done = work(train, {"steps": 0}, "changed", f"drafter.base={base}", *changes)
        return done["iterations"] > 1, done["rollouts"]

    assert made() == (True, 4)
    assert made() == (False, 0)
    assert made("drafter.router_width=16", "drafter.labels=top10", "stages.0.steps=30") == (False, 0)
    assert made("drafter.positions=100") == (False, 2)
    assert made("drafter.positions=100", "drafter.num_clusters=12") == (True, 0)
    assert made("drafter.positions=100", "drafter.num_clusters=12", "drafter.balanced=null") == (True, 0)
    assert made("run.seed=4") == (True, 4)
    assert made("run.seed=4", "data.train.0.answers.prompts=12") == (False, 3)
    assert made() == (True, 4)
    weights = load_file(base / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in weights.items()}, base / "model.safetensors")
    assert made() == (True, 4)
    changed, fresh = (train(name, f"drafter.base={base}") for name in ("changed", "fresh"))
    assert_same_files(changed, fresh, *SAME)


def test_a_published_base(recipe, train, tiny_lm, tmp_path):
    """`drafter.base` takes an exported folder as it takes the run that was exported."""
    base, served = recipe.parent / "base", tmp_path / "served"
    to_servers.export(open_source(str(base), "sglang"), "sglang", served)
    convert_if_published(str(served), str(tiny_lm))  # says so on stderr, once
    folder = train("published-base", f"drafter.base={served}", "stages.0.steps=2", "evaluate={every: 2}")
    part, own = (load_file(each / "model.safetensors") for each in (folder / "drafter", base))
    assert part.keys() == own.keys() and all(torch.equal(part[name], own[name]) for name in own)


@pytest.mark.parametrize("part", ["clusters", "rollouts"])
def test_a_damaged_part_is_found_and_restart_makes_it_anew(recipe, whole, train, work, part):
    name, file = f"damaged-{part}", recipe.parent / f"damaged-{part}" / part / "model.safetensors"
    work(train, {"steps": 0}, name)
    file.write_bytes(file.read_bytes()[:1000])
    said = train.refused(name)
    assert said.startswith(f"error: {file.parent}: cannot read model.safetensors (")
    assert said.endswith("train again with --restart\n")
    assert_same_files(train(name, "--restart"), whole["dynaspec"], *SAME)


# ---- the base, and recipes that cannot be


@pytest.fixture(scope="module")
def bases(recipe, target, make_target):
    """Folders by name: drafters that shortlists cannot be made for, and one with a draft vocabulary."""
    other = make_target("llama")
    drawn = Eagle.for_target(target, 3, "shared", 50, (1,))
    drawn.draft_from(torch.arange(3, 153, 3), target)
    made = {
        "other": (other, "eagle", Eagle.for_target(other, 1, "shared")),
        "own": (target, "eagle", Eagle.for_target(target, 3, "own", None, (1,))),
        "drawn": (target, "eagle", drawn),
        "heads": (target, "medusa", MedusaHeads.for_target(target, 2, 1, "own")),
    }
    for name, (of, kind, drafter) in made.items():
        write_drafter(recipe.parent / f"base-{name}", kind, drafter.config.to_dict(), drafter.state_dict(), of, {})
    return {name: recipe.parent / f"base-{name}" for name in made}


def test_all_tokens(recipe, bases, train):
    """The draft vocabulary is dropped; without it, lists are of the draft vocabulary's places, and are cut to it."""
    short = ["drafter.shortlist=fr_spec", f"drafter.base={bases['drawn']}", "drafter.size=100"]
    train("drawn", *short)
    train("all", *short, "drafter.all_tokens=true")
    (one, _, weights), (other, _, every) = (read(recipe.parent / name) for name in ("drawn", "all"))
    assert (one["outputs"], one["capacity"]) == (50, [50] * 6)
    assert (other["outputs"], other["capacity"]) == (300, [100] * 6)
    ids = torch.arange(3, 153, 3)
    kept_ids = ids[weights["order"].long()].tolist()
    assert kept_ids == [token for token in every["order"].tolist() if token in set(kept_ids)] and len(kept_ids) == 50
    part = read_drafter(str(recipe.parent / "all/drafter"))
    assert part[1]["draft_vocab_size"] is None and "draft_vocab" not in part[2]
    assert read_drafter(str(recipe.parent / "drawn/drafter"))[2]["draft_vocab"].tolist() == ids.tolist()


def test_sizes_are_cut_to_the_vocabulary(train):
    config = read(train("big", "drafter.shortlist=fr_spec", "drafter.size=5000"))[0]
    assert "drafter.size=5000: 300 is used, all tokens of the drafter's LM head\n" in train.out
    assert config["capacity"] == [300] * 6
    config = read(train("aware", "drafter.shortlist=fr_spec", "drafter.schedule=position_aware"))[0]
    assert config["capacity"] == [60, 60, 10, 7, 6, 5]


def test_plans_count_what_trains(recipe, tiny_lm):
    content = yaml.safe_load(recipe.read_text())
    content["target"] = {"name": str(tiny_lm), "dtype": "float32"}
    for kind in KINDS:
        content["drafter"]["shortlist"] = kind
        (plan,) = dynaspec.plans(dynaspec.DynaspecRecipe.model_validate(content))
        head = lists_of(kind, 300, **({"num_clusters": 20, "router_width": 32} if kind == "dynaspec" else {}))
        trained = sum(p.numel() for p in head.parameters())
        assert plan.trained == trained and (trained > 0) == (kind == "dynaspec")
        assert plan.frozen > 10_000 and plan.positions == content["stages"][0]["batch"]["sequences"] * 64 * 6
