import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from faults import error_of
from filelock import FileLock
from safetensors.torch import save_file
from tiny_models import noisy_heads

from draftsmith.common import progress
from draftsmith.common.command import available_cores
from draftsmith.common.files import write_json
from draftsmith.inference import calibrate, load
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import calibrations, tree_calibration, tree_search
from draftsmith.inference.measure import step_costs as costs
from draftsmith.inference.measure.step_costs import step_costs
from draftsmith.inference.measure.tree_calibration import batches
from draftsmith.inference.measure.tree_search import Candidate, fastest, trees_by_size
from draftsmith.inference.measure.tree_statistics import (
    MAX_RANK,
    best_tree,
    dynamic_depths,
    fit_confidence,
    head_choices,
    head_ranks,
    path_counts,
    simulate,
    simulate_depths,
)
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import IndependentTree
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.tree import Topology, chain, read_candidates
from draftsmith.models import export
from draftsmith.models.artifact import write_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target

HEADS = 3


# ---- ranks


@pytest.mark.parametrize("projection, listed", [("own", False), ("shared", False), ("shared", True)])
def test_head_ranks(make_target, projection, listed):
    """With a draft vocabulary, labels outside have the rank of a miss, and count as labels."""
    target = make_target("llama")
    ids = torch.arange(0, target.vocab_size, 2) if listed else None
    heads = noisy_heads(target, 0.05, projection, layers=2, ids=ids)
    tokens = torch.randint(target.vocab_size, (5, 17), dtype=torch.int32)
    spans = [(3, 17), (1, 9), (5, 6), (4, 8), (0, 17)]  # the answer of each row, behind it padding
    supervised = torch.zeros(5, 17, dtype=torch.bool)
    for row, (begin, end) in enumerate(spans):
        supervised[row, begin:end] = True
        tokens[row, end:] = 0
    ranks = head_ranks(target, heads, tokens, supervised)
    expected = torch.full((5, 17, HEADS), -1)
    with torch.no_grad():
        for row, (begin, end) in enumerate(spans):
            hidden = target.hidden(tokens[row : row + 1, :end].long())[0]
            for t in range(max(0, begin - 1), end - 1):
                features = heads.features(hidden[t : t + 1])[:, 0]
                for k, (weight, _) in enumerate(heads.projections(target.lm_head)):
                    if t + k + 2 < end:
                        label, logits = int(tokens[row, t + k + 2]), weight @ features[k]
                        place = label if ids is None else label // 2
                        rank = int((logits > logits[place]).sum()) if ids is None or label % 2 == 0 else MAX_RANK
                        expected[row, t, k] = min(MAX_RANK, rank)
    assert torch.equal(ranks, expected)
    assert 0 < (ranks == MAX_RANK).float().mean() < 1 and (ranks == 0).any()


def test_texts_shorter_than_the_heads_look(make_target):
    target = make_target("llama")
    tokens = torch.ones(2, 3, dtype=torch.int32)
    ranks = head_ranks(target, noisy_heads(target, 0.3, "shared"), tokens, torch.tensor([[False, True, True]] * 2))
    assert (ranks[..., 1:] == -1).all() and (ranks[:, 0, 0] >= 0).all()
    with pytest.raises(ValueError, match=f"no calibration position: no answer has {HEADS + 1} tokens, one more than"):
        best_tree(ranks, 4)


# ---- the best tree


def accepted(paths, row):
    """How many drafts of a tree, given as a set of paths, are right at a position with these ranks."""
    return sum(tuple(row[: len(path)]) == path for path in paths)


@pytest.mark.parametrize("seed", range(4))
def test_best_tree_is_the_best(seed):
    """Among all trees of N nodes over two heads and three ranks."""
    torch.manual_seed(seed)
    weights = torch.tensor([0.4, 0.25, 0.15, 0.2])
    ranks = weights.multinomial(60, replacement=True).view(3, 10, 2)
    ranks[ranks == 3] = MAX_RANK
    ranks[:, 1::2, 1] = torch.where(ranks[:, 1::2, 0] == 1, 2, ranks[:, 1::2, 1])  # heads do not err independently
    ranks[0, 9, 1] = ranks[1, 8:] = -1  # no label
    rows = [row for row in ranks.flatten(0, 1).tolist() if min(row) >= 0]
    counts, positions = path_counts(ranks)
    assert positions == len(rows) == 27
    every = [(a,) for a in range(3)] + list(itertools.product(range(3), repeat=2))
    assert counts == {path: n for path in every if (n := sum(accepted([path], row) for row in rows))}

    for nodes in (2, 3, 4, 5, 6):
        best = 0
        for paths in itertools.combinations(every, nodes - 1):
            if all(path[:-1] in ((), *paths) for path in paths):
                best = max(best, sum(accepted(paths, row) for row in rows))
        found = best_tree(ranks, nodes)
        assert found.num_nodes == nodes
        assert sum(accepted(found.paths, row) for row in rows) == best


def test_a_tree_has_no_path_that_was_never_right():
    ranks = torch.tensor([[[0, 1], [0, MAX_RANK]]])
    assert best_tree(ranks, 64) == Topology(((0,), (0, 1)))
    never = torch.full((1, 4, 2), MAX_RANK)
    assert best_tree(never, 64) == Topology(())
    assert trees_by_size(never[:, :, None], (2, 4)) == [(Topology(((0,),)),)], "a drafter has a path"


# ---- simulated τ


@pytest.fixture(scope="module")
def trained(make_target):
    """A target, heads that know some of what it writes, and prompts; some answers end by a stop id."""
    target = make_target("llama")
    torch.manual_seed(0)
    prompts = torch.randint(target.vocab_size, (8, 5)).tolist()
    data = answer(target, prompts, 40, 8)
    heads = MedusaHeads.for_target(target, HEADS, 1, "own")
    optimizer = torch.optim.AdamW(heads.parameters(), lr=5e-3)
    with torch.no_grad():
        hidden = target.hidden(data["tokens"].long())
    for _ in range(40):
        logits = heads.logits(hidden[:4].flatten(0, 1), target.lm_head)
        loss = torch.zeros(())
        for k in range(1, HEADS + 1):
            own = logits[k - 1].view(4, -1, target.vocab_size)[:, : -k - 1].flatten(0, 1)
            loss = loss + torch.nn.functional.cross_entropy(own, data["tokens"][:4, k + 1 :].long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads.requires_grad_(False)
    target.model.generation_config.eos_token_id = int(data["tokens"][5, 20])
    return target, heads, prompts


@pytest.mark.parametrize("nodes", [2, 9, 40, "chain"])
def test_simulated_is_what_the_engine_does(trained, nodes):
    """Exactly, since the text simulated on is the one the engine writes: the same steps, the same tokens."""
    target, heads, prompts = trained
    data = answer(target, prompts, 40, 3)
    ranks = head_ranks(target, heads, data["tokens"], data["supervised"])
    topology = chain(HEADS) if nodes == "chain" else best_tree(ranks, nodes)
    results = SpeculativeDecoder(target, MedusaDrafter(heads, topology, target)).generate(prompts, 40)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    lengths = [length for result in results for length in result.accepted]
    assert len(set(lengths)) > 1, "nothing accepted tests nothing"
    assert simulate(topology, ranks) == sum(lengths) / len(lengths)


@pytest.mark.parametrize("confident", [False, True])
def test_a_dynamic_tree_simulated_is_what_the_engine_does(trained, confident):
    target, heads, prompts = trained
    data = answer(target, prompts, 40, 3)
    ranks, log_q = head_choices(target, heads, data["tokens"], data["supervised"])
    assert torch.equal(ranks, head_ranks(target, heads, data["tokens"], data["supervised"]))
    begins, shape = ranks[..., 0] >= 0, DynamicShape(6, HEADS, 9)
    confidence = fit_confidence(ranks[begins], log_q[begins]) if confident else None
    drafter = MedusaDrafter(heads, shape, target, confidence=confidence)
    results = SpeculativeDecoder(target, drafter).generate(prompts, 40)
    lengths = [length for result in results for length in result.accepted]
    assert len(set(lengths)) > 1, "nothing accepted tests nothing"
    accepted = dynamic_depths(IndependentTree(shape, torch.device("cpu"), confidence), ranks, log_q)
    assert simulate_depths(accepted, begins) == sum(lengths) / len(lengths)


def test_drafts_leave_out_the_scale_of_the_targets_logits(make_target):
    """As in training: otherwise sampled drafts and dynamic trees go by flatter distributions than were trained."""
    target = make_target("granite")
    heads, hidden = MedusaHeads.for_target(target, 2, 1, "shared"), torch.randn(1, target.hidden_size)
    tokens, supervised = torch.randint(1, 60, (1, 8)), torch.ones(1, 8, dtype=torch.bool)
    log_q = head_choices(target, heads, tokens, supervised)[1][0, 3, 0]
    own = heads.logits(target.hidden(tokens)[:, 3], heads.draft_head(target.lm_head))[0, 0]
    assert target.changes_logits
    torch.testing.assert_close(log_q, own.log_softmax(-1).topk(len(log_q)).values)
    drafter = MedusaDrafter(heads, chain(2), target)
    assert torch.equal(drafter._logits(hidden)[0], heads.logits(hidden, drafter.draft_head, 2).transpose(0, 1))


def test_confidence_is_what_happened():
    """Of tokens whose acceptance is 0.8 √q at the first depth, and at the second does not depend on q."""
    log_q = torch.rand(4000, 2, 2).clamp(min=0.01).div(2).sort(descending=True).values.log()
    right = torch.stack((0.8 * (0.5 * log_q[:, 0]).exp(), torch.tensor([0.4, 0.2]).expand(4000, 2)), 1)
    draws = torch.rand(4000, 2)
    first, both = right[..., 0], right.sum(-1)
    ranks = torch.where(draws < first, 0, torch.where(draws < both, 1, MAX_RANK))
    ranks[0] = torch.tensor([0, -1])  # without a label at the second depth
    found = fit_confidence(ranks, log_q)
    assert found.power[0] == pytest.approx(0.5, abs=0.21) and found.power[1] == pytest.approx(0.0, abs=0.21)
    reached = ranks[:, 0].lt(2) & ranks[:, 1].ge(0)
    for depth, rows in ((0, slice(None)), (1, reached)):
        for rank in range(2):
            expected = found.factor[depth][rank] * (found.power[depth] * log_q[rows, depth, rank]).exp()
            assert float(expected.sum()) == pytest.approx(float((ranks[rows, depth] == rank).sum()), rel=0.01)


def test_answers_are_the_targets_own(trained, greedy_texts, monkeypatch):
    target, _, prompts = trained
    prompts = [prompts[0][:2], prompts[1], prompts[2][:3], prompts[3]]  # ragged
    ends = frozenset({greedy_texts(target, prompts, 12)[1][6]})
    monkeypatch.setattr(type(target), "stop_ids", ends)  # one answer ends early
    seen = []
    data = answer(target, prompts, 12, 3, seen.append)
    assert seen == sorted(seen) and seen[-1] == 4
    assert max(after - before for before, after in itertools.pairwise([0, *seen])) < 1, "no row counts only at its end"
    for row, (prompt, truth) in enumerate(zip(prompts, greedy_texts(target, prompts, 12), strict=True)):
        stop = next((i + 1 for i, token in enumerate(truth) if token in target.stop_ids), 12)
        text = [*prompt, *truth[:stop]]
        assert data["tokens"][row].tolist() == text + [0] * (17 - len(text))
        marks = [len(prompt) <= t < len(text) for t in range(17)]
        assert data["supervised"][row].tolist() == marks


# ---- the time given, and the choice


def test_of_equal_trees_the_smaller():
    trees = [Candidate((chain(depth),), tau, 1.0, ()) for depth, tau in enumerate((0.9, 1.19, 1.2, 1.2), 1)]
    assert fastest(trees) == fastest(trees[::-1]) == trees[2]


@pytest.mark.parametrize(
    ("each", "until", "sizes"),
    [
        (1.0, 20.0, [1, 2, 4, 8, 5]),
        (1.0, 0.5, [1]),  # something is always done
        (0.0, 20.0, [1, 2, 4, 8, 16, 16, 16, 16, 16, 5]),
        (4.0, 17.0, [1, 2, 1]),
    ],
)
def test_batches_fit_into_the_remaining_time(each, until, sizes):
    seen: list[int] = []
    for part in batches(100, 1, until, lambda: each * sum(seen)):
        assert part.start == sum(seen)
        seen.append(part.stop - part.start)
    assert seen == sizes
    assert [part.stop for part in batches(20, 8, 9.0, lambda: 0.0)] == [8, 20]


# ---- the command


@pytest.fixture
def heads_folder(tiny_lm, tmp_path):
    """A drafter folder without a tree, and prompts to calibrate on."""
    target = load_target(str(tiny_lm))
    heads = noisy_heads(target, 0.05, "shared", seed=2, layers=2)
    folder = tmp_path / "heads"
    write_drafter(folder, "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n{"messages": [{"role": "user", "content": "Write it."}]}\n')
    return folder, prompts


@pytest.fixture
def calibrated(run_main, heads_folder):
    """``calibrated(line)`` → tree.json, stdout and stderr of calibrate.py, which has to succeed."""

    def run(line):
        code, out, err = run_main(calibrate.main, heads_folder[0], "--device", "cpu", *line.split())
        assert code == 0, err
        return json.loads((heads_folder[0] / "tree.json").read_text()), out, err

    return run


def test_calibrate_on_prompts(run_main, heads_folder, calibrated):
    """Chats are rendered; the tree has as many nodes as asked for."""
    folder, prompts = heads_folder
    result = run_main(calibrate.main, folder)
    assert result == (2, "", f"error: {folder}: holds no held-out rows; pass --prompts FILE.jsonl to calibrate on\n")
    tree, out, _ = calibrated(f"--prompts {prompts} --max-new-tokens 100 --nodes 5")
    assert len(tree["paths"]) == 4 and "5 nodes" in out
    known = tree["calibration"]
    assert known["positions"] > 10
    assert known["expected_mean_accepted_length"] >= known["chain_mean_accepted_length"] >= 1
    assert [size["nodes"] for size in known["sizes"]] == [5]


def test_a_tree_for_every_machine(run_main, report_of, calibrated, heads_folder, monkeypatch):
    """The drafter, alone or in a merge, proposes what pays where it is loaded."""
    folder, prompts = heads_folder
    result = run_main(calibrate.main, folder, "--prompts", prompts, "--at-load", "--nodes", 4)
    assert result == (2, "", "error: --at-load leaves the number of nodes to each machine; leave out --nodes\n")
    tree, out, _ = calibrated(f"--prompts {prompts} --max-new-tokens 100 --at-load")
    assert "nodes, of which each step takes those that pay; here about " in out
    without = {name: each for name, each in tree.items() if name not in ("dynamic", "confidence")}
    write_json(heads_folder[0] / "tree.json", without)  # whatever is faster here
    assert list(tree["calibration"]["mean_accepted_length_by_nodes"])[:3] == ["2", "3", "4"]
    rates = [one["rate"] for one in tree["calibration"]["candidates"]]
    assert len(tree["paths"]) == len(rates) > 4 and tree["at_load"] is True

    def drafted(measured, mode="greedy", rows=1):
        """Nodes of the first steps' trees, before the text has taught anything."""
        monkeypatch.setattr(load, "step_costs", lambda target, lean: costs.StepCosts(measured))
        target, drafter = load_drafter(str(folder), device="cpu", dtype="float32")
        decoder = SpeculativeDecoder(target, drafter)
        result, *_ = decoder.generate([[5, 6, 7]] * rows, 2, mode=mode)
        return result.drafted

    assert drafted({1: 1.0, 64: 1.0}) == drafted({1: 1.0, 64: 1.0}, "sample") == len(rates)
    best = max(rates)
    assert drafted({1: 1.0, 2: 0.98 + best, 64: 60.0}) == 1
    assert drafted({1: 1.0, 2: 1.02 + best, 64: 60.0}) == 0, "plain decoding"
    assert drafted({1: 1.0, 2: 1.02 + best, 64: 60.0}, "mss") == len(rates), "a seed's text depends on its trees"
    for mode in ("greedy", *(f"{how} --temperature 0.7" for how in ("typical", "sample", "sample --verify mss"))):
        report, _ = report_of(f"{folder} --prompt 'import os' --mode {mode} --max-new-tokens 4 --device cpu")
        assert report["tree_nodes"] == len(rates) + 1
    del without["at_load"]
    write_json(folder / "tree.json", without)
    assert drafted({1: 1.0, 2: 1.02 + best, 64: 60.0}) == 0, "of any tree"


@pytest.mark.parametrize(("speed", "taken"), [(1.1, True), (1.01, False)])
def test_heads_may_have_a_dynamic_tree(calibrated, heads_folder, monkeypatch, speed, taken):
    """Where it is faster by the estimate; each step then takes the nodes that pay. Not with a number of nodes."""
    folder, prompts = heads_folder
    simulated, found = tree_search.simulate_dynamic, []

    def given(*arguments):
        found.extend(simulated(*arguments))
        return [replace(each, speed=speed - 0.01 * number) for number, each in enumerate(found)]

    monkeypatch.setattr(calibrations, "simulate_dynamic", given)
    tree, out, _ = calibrated(f"--prompts {prompts} --max-new-tokens 100")
    assert [each.shape.nodes for each in found] == [8, 16, 32, 64] and all(each.speed > 0 for each in found)
    assert found[0].tau >= 1
    known = tree["calibration"]["dynamic"]
    ranks = torch.zeros(
        1, 3, 15, dtype=torch.int64
    )  # of DFlash with blocks of 16: all depths are too many for 64 nodes
    drafts = (ranks, torch.linspace(0, -9, 10).expand(1, 3, 15, 10).log_softmax(-1))
    fixed = Candidate((chain(15),), 2.0, 1.5, (15,))
    compared = simulated([drafts], fixed, step_costs(load_target("models/tiny-lm")), lambda *_: 0.1)
    assert [(each.shape.nodes, each.shape.depth == 15) for each in compared] == [(8, 1), (16, 1), (32, 1), (64, 0)]
    assert [each["nodes"] for each in known] == [8, 16, 32, 64] and known[0]["speedup_over_fixed"] == speed
    assert ("dynamic" in tree) == ("confidence" in tree) == ("uses a dynamic tree, 1.10 times" in out) == taken
    for name in (str(folder), f"{folder}+ngram"):
        _, drafter = load_drafter(name, device="cpu", dtype="float32")
        heads = drafter.drafters[0] if isinstance(drafter, MergedDrafter) else drafter
        assert heads is not None and heads.num_nodes == (32 if taken else len(tree["paths"]) + 1)
    tree, *_ = calibrated(f"--prompts {prompts} --nodes 5")
    assert "dynamic" not in tree and len(found) == 4


def test_an_interrupt_keeps_the_fixed_tree_of_heads(run_main, heads_folder, monkeypatch):
    """While dynamic ones are simulated."""
    folder, prompts = heads_folder

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrations, "simulate_dynamic", interrupted)
    words = (folder, "--device", "cpu", "--prompts", prompts, "--max-new-tokens", 100)
    code, out, err = run_main(calibrate.main, *words)
    assert code != 0 and "not compared with it: it was interrupted" in out and "Traceback" not in err
    tree = json.loads((folder / "tree.json").read_text())
    assert tree["paths"] and "dynamic" not in tree


def test_what_has_no_tree(run_main, heads_folder, tiny_lm, monkeypatch, tmp_path):
    """Of names without a folder what steps cost is timed, of a merge also its folder's tree, whose candidates are those
    that a merge chooses from."""
    folder, prompts = heads_folder
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(costs, "ROUNDS", costs.MIN_ROUNDS)
    monkeypatch.setattr(costs, "MIN_ROUNDS", 1)  # kept on a busy machine, too
    code, out, err = run_main(calibrate.main, "ngram", "--target", tiny_lm, "--device", "cpu")
    assert code == 0 and re.fullmatch(
        r"a plain step: [\d.]+ ms; times that by nodes: 1: 1.00(, \d+: [\d.]+)+\n", out
    ), err
    set_to: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", set_to.append)
        for options in (["--threads", 1], []):
            run_main(calibrate.main, "ngram", "--target", tiny_lm, *options)
    assert set_to == [1, available_cores()]
    for option in (["--at-load"], ["--nodes", 4], ["--prompts", prompts]):
        code, out, err = run_main(calibrate.main, "ngram", "--target", tiny_lm, *option)
        assert code == 2 and not out and f"leave out {option[0]}" in err, err
    assert run_main(calibrate.main, "ngram")[2] == "error: 'ngram' has no target of its own: pass --target\n"
    two = run_main(calibrate.main, f"{folder}+runs/other")[2]
    assert two == f"error: '{folder}+runs/other' has 2 drafter folders; calibrate each by itself\n"
    code, out, err = run_main(
        calibrate.main, f"{folder}+ngram", "--prompts", prompts, "--nodes", 5, "--seconds", 3, "--device", "cpu"
    )
    assert code == 0 and "a plain step:" in out, err
    calibration = json.loads((folder / "tree.json").read_text())["calibration"]
    topology, rates = read_candidates(folder / "tree.json")
    assert len(rates) == len(calibration["candidates"]) >= 4 and max(rates) < 1
    for path, rate in zip(topology.paths, rates, strict=True):
        above = dict(zip(topology.paths, rates, strict=True)).get(path[:-1], 1.0)
        assert 0 < rate <= above
    loaded, drafter = load_drafter(f"{folder}+ngram")
    assert drafter is not None and drafter.sources == (str(folder), "ngram")
    assert step_costs(loaded).points == step_costs(loaded).points, "kept"


def test_what_is_fastest_here(calibrated, heads_folder, monkeypatch):
    """By ranks and step costs, from trees and chains alike; where nodes are dear, a chain or a small tree. Draft heads
    write the same nodes to choose from in either case."""
    written = []
    for dear, name in ((0.0, "free"), (0.3, "dear")):
        table = costs.StepCosts({1: 0.5, 64: 0.5 * (1 + 63 * dear)})
        monkeypatch.setattr(tree_calibration, "step_costs", lambda *_, table=table: table)
        monkeypatch.setattr(calibrations, "draft_time", lambda *_: 0.25)  # of the heads, whatever the tree
        tree, out, _ = calibrated(f"--prompts {heads_folder[1]} --max-new-tokens 100 --seconds 0.01")
        known = tree["calibration"]
        best = max(known["sizes"], key=lambda size: size["speedup"])
        nodes, tau = best["nodes"], known["expected_mean_accepted_length"]
        assert tau == best["tau"] and f"here about {nodes}, expected τ {tau:.2f}" in out
        assert best["seconds_per_step"] == pytest.approx(0.5 * (table.relative(nodes) + 0.25))
        of_chain = known["chain_mean_accepted_length"] / (table.relative(HEADS + 1) + 0.25)
        assert best["speedup"] >= of_chain
        assert tau / (table.relative(nodes) + 0.25) == pytest.approx(best["speedup"], abs=2e-4)
        assert nodes > 8 if name == "free" else nodes <= 4
        written.append(tree["paths"])
    assert written[0] == written[1]


def ranks_of_chains(count=400):
    """``[1, T, 1, K]``: each next token is right with probability 0.6, rank 1 with 0.05."""
    draws = torch.rand(1, count, 1, 4)
    return torch.where(draws < 0.6, 0, torch.where(draws < 0.65, 1, MAX_RANK))


@pytest.mark.parametrize("by_level", [True, False])
def test_chains_are_candidates(by_level):
    """Every chain is one, or another candidate has no lower τ at no more nodes and levels; none surpasses another."""
    ranks, table = ranks_of_chains(), costs.StepCosts({1: 1.0, 64: 8.0})
    step_time = table.tree_time([0.1]) if by_level else None
    found = tree_search.candidates_of(ranks, (2, 3, 6, 16), table, step_time, chains=True)
    for depth in range(1, 5):
        trees = (chain(depth),)
        tau = simulate(chain(depth), ranks[:, :, 0])
        cost = step_time(trees) if step_time else table.relative(depth + 1)
        levels = (depth,) if by_level else ()
        of_chain = tree_search.Candidate(trees, tau, cost, levels)
        assert any(each.tau >= tau and each.contained_in(of_chain) for each in found)
        assert fastest(found).speedup >= tau / cost
    for one, other in itertools.permutations(found, 2):
        assert not (one.contained_in(other) and one.tau >= other.tau)


def test_errors_before_the_target_is_loaded(run_main, heads_folder, tmp_path):
    folder, _ = heads_folder
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    few = "a tree has at least 2 nodes, the root and one draft"
    for options, message in (
        (f"--prompts {empty}", f"{empty}: holds no prompt"),
        ("--max-new-tokens 0", "--max-new-tokens 0: must be at least 1"),
        ("--device cudda", "device 'cudda'"),
        ("--threads 0", "--threads 0: must be at least 1"),
        ("--nodes 4097", "--nodes 4097: must be at most 4096"),
        *((f"--nodes {nodes}", f"--nodes {nodes}: {few}") for nodes in (1, 0, -3)),
        ("", f"{folder}: holds no held-out rows"),
    ):
        error = error_of(run_main(calibrate.main, folder, "--target", "nobody/nothing", *options.split()))
        assert error.startswith(message)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(3, 9), None, (0, 9), (5, 6)], [(0, 3), (3, 5)]),  # rows without an answer, or without a prompt, give none
        ([(0, 9), None, (0, 1)], [(0, 5), (2, 1)]),  # documents
        ([(row + 1, 9) for row in range(8)], [(0, 1), (4, 5)]),
    ],
)
def test_prompts_that_are_timed(spans, expected):
    tokens = torch.arange(10 * len(spans)).view(-1, 10)
    supervised = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, span in enumerate(spans):
        supervised[row, slice(*span) if span else slice(0)] = True
    prompts = tree_calibration.timing_prompts(tokens, supervised, 2)
    assert prompts == [tokens[row, :length].tolist() for row, length in expected]


def test_calibrate_on_held_out_rows(run_main, calibrated, heads_folder, monkeypatch):
    """One of chats without an answer; documents; nothing at all. Rows as long as the context leave room to time."""
    folder, _ = heads_folder
    stored = folder / "held_out" / "model.safetensors"
    stored.parent.mkdir()
    monkeypatch.setattr(tree_search, "SIZES", (2,))
    tokens = torch.randint(5, 250, (3, 256), dtype=torch.int32)
    for begins in ([256, 250, 200], [0, 0, 256]):
        supervised = torch.arange(256) >= torch.tensor(begins)[:, None]
        save_file({"tokens": tokens, "supervised": supervised}, stored)
        calibrated("")
        (folder / "tree.json").unlink()
    save_file({"tokens": tokens, "supervised": torch.zeros(3, 256, dtype=torch.bool)}, stored)
    result = run_main(calibrate.main, folder, "--target", "nobody/nothing")
    message = f"error: {folder}: no held-out row has an answer; pass --prompts FILE.jsonl to calibrate on\n"
    assert result == (2, "", message)
    save_file({"tokens": tokens}, stored)
    _, _, err = run_main(calibrate.main, folder, "--target", "nobody/nothing")
    assert err.startswith(f"error: {stored}: not the held-out rows of a run; pass --prompts")


def test_it_ends_in_time_and_says_so(run_main, calibrated, heads_folder, monkeypatch):
    """Of a text that would take a minute as many rows are ranked as the time is for."""
    folder, _ = heads_folder
    stored = folder / "held_out" / "model.safetensors"
    stored.parent.mkdir()
    tokens = torch.randint(5, 250, (1200, 20), dtype=torch.int32)
    save_file({"tokens": tokens, "supervised": (torch.arange(20) >= 6).expand(1200, 20).contiguous()}, stored)
    count = head_choices

    def slow(target, heads, tokens, supervised):
        time.sleep(0.05 * len(tokens))
        return count(target, heads, tokens, supervised)

    monkeypatch.setattr(calibrations, "head_choices", slow)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.5)
    tree, out, err = calibrated("--seconds 3")
    known = tree["calibration"]
    assert 13 <= known["positions"] <= 13 * 60
    assert 0 < known["seconds"]["ranking"] < 20
    assert "calibrating: at most 3 s from here on" in err and "calibrating (s) 2/3" in err and "s left" in err
    assert f"calibrated on {known['positions']} positions" in out
    result = run_main(calibrate.main, folder, "--seconds", 0)
    assert result == (2, "", "error: --seconds 0: must be above 0\n")


def test_heads_too_weak_for_a_tree(calibrated, heads_folder, monkeypatch):
    monkeypatch.setattr(tree_calibration, "step_costs", lambda *_: costs.StepCosts({1: 1.0, 2: 9.0}))
    _, out, _ = calibrated(f"--prompts {heads_folder[1]} --max-new-tokens 30")
    assert "plain decoding is faster here" in out


def test_a_run_that_another_command_writes_is_refused(run_main, heads_folder):
    folder, prompts = heads_folder
    with FileLock(folder / ".lock"):
        result = run_main(calibrate.main, folder, "--prompts", prompts, "--target", "nobody/nothing")
        message = f"error: {folder}: another command is working in this run; wait until it has ended\n"
        assert result == (2, "", message)
    code, _, err = run_main(calibrate.main, folder, "--prompts", prompts, "--target", "nobody/nothing")
    assert (code, "nobody/nothing" in err) == (2, True), "the lock is free again, and was not kept"
    with FileLock(folder / ".lock", timeout=0):
        pass


@pytest.mark.parametrize(
    "script",
    [
        "inference/decode.py",
        "inference/calibrate.py",
        "benchmarks/typical.py",
        "benchmarks/step_times.py",
        "benchmarks/kernel_times.py",
    ],
)
def test_help_imports_nothing_heavy(script):
    """It would take seconds. What is imported is counted, not timed."""
    root = Path(__file__).parents[2]
    ask = f"""
import runpy, sys
sys.argv = ["{script}", "--help"]
for name in ("torch", "transformers", "datasets", "sklearn", "matplotlib", "numpy"):
    sys.modules[name] = None  # importing it fails
runpy.run_path("{script}", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", ask], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: ")


def test_next_to_nothing_replaces_no_tree(run_main, heads_folder, monkeypatch):
    """A tree that was calibrated on more positions is kept; and two commands do not calibrate one drafter at once."""
    folder, prompts = heads_folder
    words = [folder, "--prompts", prompts, "--max-new-tokens", 6, "--seconds", 1]
    code, _, err = run_main(calibrate.main, *words)
    assert code == 0, err
    tree = json.loads((folder / "tree.json").read_text())
    tree["calibration"]["positions"] = 10_781
    (folder / "tree.json").write_text(json.dumps(tree))
    code, _, err = run_main(calibrate.main, *words)
    assert code == 2 and "positions say too little; tree.json, calibrated on 10,781, is kept" in err, err
    assert json.loads((folder / "tree.json").read_text()) == tree
    tree["calibration"]["weights_sha256"] = "0" * 64  # of weights that trained on since
    (folder / "tree.json").write_text(json.dumps(tree))
    said = run_main(export.main, folder, "--to", "hf", "--push-to-hub", "u/n")[2]
    assert "its tree is of other weights than are there; first: " in said
    assert run_main(calibrate.main, *words)[0] == 0
    (folder / "tree.json").write_text("[[0], [0, 0], [1]]")  # as published trees are: not calibrated
    assert run_main(calibrate.main, *words)[0] == 0

    with tree_calibration.alone(folder):
        assert "another command is working in this run" in run_main(calibrate.main, *words)[2]
