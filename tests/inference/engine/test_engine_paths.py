"""State between steps: the K/V of accepted paths that branch, and the tokens that penalties count."""

import random
from dataclasses import replace

import pytest
import torch
from draws import near_tie

from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.tree import StaticTree, Topology

NONE = frozenset()
PROMPTS = [[7, 3, 19, 44, 5, 3, 28, 11, 50, 2, 33], [9], [58, 1, 30, 12]]


class BranchDrafter(Drafter):
    """Drafts the true text on one chosen path of a fixed tree, wrong tokens elsewhere.

    Args:
        truth: continuation of each prompt, ``max_depth + 1`` tokens longer than the limit.
        leaves: the paths it chooses from, in turn.
    """

    static = True

    def __init__(self, target, prompts, truth, topology, leaves, seed=0):
        self.prompts, self.truth, self.leaves = prompts, truth, leaves
        self.topology, self.tree = topology, StaticTree(topology.parents, target.device)
        self.num_nodes, self.max_depth, self.branching = topology.num_nodes, topology.max_depth, topology.num_nodes
        self.random, self.accepted = random.Random(seed), []

    def propose(self, state):
        rows = []
        for row, prompt in enumerate(self.prompts):
            done = max(0, int(state.length[row]) - len(prompt))
            future = self.truth[row][done + 1 : done + 1 + self.max_depth]
            future = future + [0] * (self.max_depth - len(future))
            leaf = self.random.choice(self.leaves)
            rows.append([int(state.root[row])])
            for path in self.topology.paths:
                right = leaf[: len(path)] == path
                token = future[len(path) - 1]
                rows[-1].append(token if right else (token + 1 + self.random.randrange(60)) % 61)
        return self.tree.fill(torch.tensor(rows, device=self.tree.parent.device))

    def absorb(self, state, verdict, tree, features):
        self.accepted += verdict.path[verdict.length == self.max_depth].tolist()


SIBLINGS = Topology(((0,), (1,), (2,)))
LATE = Topology(((0,), (0, 0), (0, 0, 0), (0, 0, 1)))  # nodes 0 1 2 3, and 4 beside 3
EARLY = Topology(((0,), (0, 0), (1,), (1, 0)))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("topology", "leaf", "path"),
    [(SIBLINGS, (1,), [0, 2]), (SIBLINGS, (2,), [0, 3]), (LATE, (0, 0, 1), [0, 1, 2, 4]), (EARLY, (1, 0), [0, 3, 4])],
    ids=["sibling", "last sibling", "branches at its end", "branches at once"],
)
def test_a_path_that_leaves_the_first_nodes(make_target, greedy_texts, topology, leaf, path, rows, static):
    """Its K/V must move, even if only the last node's do; otherwise the text changes."""
    target = make_target("llama")
    prompts, wanted = PROMPTS[:rows], 30
    truth = greedy_texts(target, prompts, wanted + 5)
    drafter = BranchDrafter(target, prompts, truth, topology, [leaf])
    results = SpeculativeDecoder(target, drafter, static=static).generate(prompts, wanted, stop_ids=NONE)
    assert [r.tokens for r in results] == [row[:wanted] for row in truth]
    assert path in drafter.accepted
    assert all(set(r.accepted[:-1]) == {topology.max_depth + 1} for r in results)


@torch.no_grad()
def penalised_greedy(target, prompt, sampling, count):
    """Plain decoding by the model alone, a forward pass of the whole text for each token."""
    text = list(prompt)
    for _ in range(count):
        logits = target.model(torch.tensor([text], device=target.device), use_cache=False).logits[0, -1]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[text] = True
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        for token in text[len(prompt) :]:
            logits[token] -= sampling.frequency_penalty
        logits[[*{*text[len(prompt) :]}]] -= sampling.presence_penalty
        best = logits.topk(2)
        if best.values[0] - best.values[1] <= 1e-4:
            near_tie("penalty")
        text.append(int(best.indices[0]))
    return text[len(prompt) :]


PENALISED: dict[str, list[int]] = {}  # texts of the test below, which has each of them twelve times


@pytest.mark.parametrize("drafts", ["all right", "some right", "none"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({"repetition_penalty": 1.3}, "sample"),
        ({"repetition_penalty": 2.5}, "sample"),
        ({"presence_penalty": 1.2, "frequency_penalty": 0.3}, "sample"),
        ({"repetition_penalty": 1.3, "frequency_penalty": 0.6, "logit_bias": {44: -100, 3: 2.5}}, "mss"),
    ],
)
def test_penalties_with_a_drafter(make_target, changes, mode, rows, static, drafts):
    """Every token counts: of the prefill, the path, and the bonus token; for the repetition penalty the prompt's."""
    target = make_target("llama")
    prompts, wanted = PROMPTS[:rows], 60
    sampling = Sampling(temperature=0, **changes)
    for prompt in prompts:
        key = repr((prompt, sampling))
        if key not in PENALISED:
            PENALISED[key] = penalised_greedy(target, prompt, sampling, wanted + 4)
    truth = [PENALISED[repr((prompt, sampling))] for prompt in prompts]
    drafter = None
    if drafts != "none":
        leaves = [(1, 0), (0, 0)] if drafts == "all right" else [(0,), (1,), (1, 0), (0, 0)]
        drafter = BranchDrafter(target, prompts, truth, EARLY, leaves)
    sampling = [replace(sampling, seed=row) for row in range(rows)]
    decoder = SpeculativeDecoder(target, drafter, static=static)
    results = decoder.generate(prompts, wanted, mode=mode, sampling=sampling, stop_ids=NONE)
    assert [r.tokens for r in results] == [row[:wanted] for row in truth]
    assert {len(set(r.accepted)) > 1 or drafts != "some right" for r in results} == {True}
    if drafts == "all right":
        assert all(set(r.accepted[:-1]) == {3} for r in results)
