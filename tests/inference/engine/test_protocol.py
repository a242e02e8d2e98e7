"""A drafter written against the protocol passes the checks of lossless_suite.py; typical mistakes do not."""

from dataclasses import replace

import pytest
import torch
from lossless_suite import check_coupled, check_drafter, check_greedy, check_sampling, check_seeds, check_warm_up

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.verify.sampling import Noise
from draftsmith.inference.verify.tree import Draws, StaticTree, TokenTree
from draftsmith.inference.verify.verify import Verifier
from draftsmith.kernels.distribution import philox_uniforms
from draftsmith.kernels.multi_step import WITHOUT_REPLACEMENT, draw

PARENTS = [-1, 0, 0, 1, 1, 3]  # the largest tree; each row uses its first nodes
EXPANDED = [0, 1, 3]  # nodes with children


class BigramDrafter(Drafter):
    """Counts the bigrams of each row's text and drafts by these counts from six sevenths of the vocabulary, in trees of
    2 to 6 nodes; the size depends on the tokens committed before."""

    num_nodes, max_depth, branching, static, has_acceptance = len(PARENTS), 3, 2, True, False

    def __init__(self, target):
        self.vocabulary, self.device = target.vocab_size, target.device
        self.ids = torch.tensor([token for token in range(self.vocabulary) if token % 7 != 3], device=self.device)
        self.tree = StaticTree(PARENTS, self.device)
        self.q_row = torch.tensor([[[0], [1], [0], [2], [0], [0]]], device=self.device).expand(-1, -1, self.branching)

    def allocate(self, cache, max_depth, static):
        rows, self.fixed = cache.rows, static
        self.prompt = torch.zeros(rows, cache.capacity, dtype=torch.int64, device=self.device)
        self.counts = torch.zeros(rows, self.vocabulary**2, device=self.device)  # of bigrams
        self.unread, self.size = torch.zeros(2, rows, dtype=torch.int64, device=self.device)

    def buffers(self):
        return self.prompt, self.counts, self.unread, self.size

    def begin(self, rows):
        self.counts[rows], self.unread[rows], self.size[rows] = 0, 1, 3

    def prefill(self, features, chunk):
        self.prompt[chunk.rows, chunk.positions] = chunk.tokens

    def count(self, before, after, weight):
        self.counts.scatter_add_(1, before * self.vocabulary + after, weight.float())

    def propose(self, state):
        rows, length = len(state.root), state.length[:, None]
        self.prompt.scatter_(1, length, state.root[:, None])
        inside = torch.arange(self.prompt.shape[1] - 1, device=self.device) < length
        self.count(self.prompt[:, :-1], self.prompt[:, 1:], inside * self.unread[:, None])
        self.unread.zero_()
        size = 2 + self.size % (self.num_nodes - 1)
        nodes = self.num_nodes if self.fixed else int(size.max())
        tokens, q = state.root[:, None].repeat(1, self.num_nodes), []
        uniforms = None if state.settings is None else self.uniforms(state).view(rows, 3, 2)
        table = self.counts.view(rows, self.vocabulary, self.vocabulary)[:, :, self.ids]
        for number, node in enumerate(EXPANDED):
            left = table.gather(1, tokens[:, node, None, None].expand(-1, 1, len(self.ids)))[:, 0] + 0.1
            q.append(left / left.sum(-1, keepdim=True))
            for draw_number, child in enumerate(n for n in range(self.num_nodes) if PARENTS[n] == node):
                place = left.argmax(-1) if uniforms is None else draw(left, uniforms[:, number, draw_number])
                tokens[:, child] = self.ids[place]
                left = left.scatter(1, place[:, None], 0.0)
        valid = torch.arange(nodes, device=self.device) < size[:, None]
        child, q_row = (part[:, :nodes].expand(rows, -1, -1) for part in (self.tree.draws.child, self.q_row))
        child = torch.where(child < size[:, None, None], child, -1)
        kind = torch.full_like(child, WITHOUT_REPLACEMENT, dtype=torch.int8)
        draws = None if uniforms is None else Draws(child, kind, q_row, torch.stack(q, 1), self.ids[None, None])
        shape = (part[:, :nodes].expand(rows, -1) for part in (self.tree.parent, self.tree.depth))
        ancestors = self.tree.ancestors[:, :nodes].expand(rows, -1, -1)
        return TokenTree(tokens[:, :nodes], *shape, ancestors, valid, draws=draws)

    def uniforms(self, state):
        return philox_uniforms(state.settings.seed, state.step, 6, stream=state.stream)

    def absorb(self, state, verdict, tree, features):
        path = tree.tokens.gather(1, verdict.path.clamp(max=tree.tokens.shape[1] - 1))
        depth = torch.arange(path.shape[1], device=self.device)
        after = torch.where(depth < verdict.length[:, None], path.roll(-1, 1), verdict.bonus[:, None])
        self.count(path, after, depth <= verdict.length[:, None])
        self.size += verdict.length + verdict.bonus


@pytest.mark.whole_runs
def test_lossless(make_target):
    check_drafter(make_target, BigramDrafter)


class Unreset(BigramDrafter):
    """Keeps the counts of the previous text when another begins in the row."""

    def begin(self, rows):
        self.unread[rows] = 1


class Undeclared(BigramDrafter):
    """Does not list the counts among its buffers, so that warm-up steps change them."""

    def buffers(self):
        return self.unread, self.size


class StaleDistribution(BigramDrafter):
    """From a text's second step on, reports the q of the previous step."""

    def allocate(self, cache, max_depth, static):
        super().allocate(cache, max_depth, static)
        self.q = torch.full((cache.rows, 3, len(self.ids)), 1 / len(self.ids), device=self.device)

    def propose(self, state):
        tree = super().propose(state)
        if tree.draws is None:
            return tree
        stale = torch.where((state.step == 1)[:, None, None], self.q, tree.draws.q)
        self.q.copy_(tree.draws.q)
        return replace(tree, draws=replace(tree.draws, q=stale))


class RepeatedVerifierUniforms(BigramDrafter):
    """Draws in every step with the verifier's uniforms of the text's first step."""

    def uniforms(self, state):
        return philox_uniforms(state.settings.seed, state.step * 0 + 1, 6)


class RepeatedOwnUniforms(BigramDrafter):
    """Draws in every step with the same uniforms, from its own stream."""

    def uniforms(self, state):
        return philox_uniforms(state.settings.seed, state.step * 0, 6, stream=state.stream)


def test_state_of_an_earlier_text(make_target):
    with pytest.raises(AssertionError, match="the steps committed|instead of"):
        check_greedy(make_target, Unreset)
    with pytest.raises(AssertionError, match="instead of"):
        check_seeds(make_target, Unreset)
    with pytest.raises(AssertionError, match="the steps committed"):
        check_coupled(make_target, Unreset)


def test_state_that_is_not_restored(make_target):
    with pytest.raises(AssertionError, match="steps undone before step"):
        check_warm_up(make_target, Undeclared)


@pytest.mark.parametrize("wrong", ["node number", "row", "depth of the tree", "root", "penalty without the path"])
def test_noise_that_is_not_the_texts_own(make_target, monkeypatch, wrong):
    """Wrong variants of coupled sampling, which plain decoding of one row does not show."""
    best = Noise.best

    def wrong_best(self, logits, depth, *args):
        if wrong == "node number" and isinstance(depth, torch.Tensor):
            depth = torch.arange(logits.shape[1], device=logits.device)
        elif wrong == "depth of the tree" and isinstance(depth, torch.Tensor):
            depth = depth + depth.amax()
        elif wrong == "root":
            depth = 0 * depth
        elif wrong == "row":
            rows = torch.arange(len(logits), device=logits.device)
            self = Noise(self.settings, self.lengths + rows)
        return best(self, logits, depth, *args)

    if wrong == "penalty without the path":
        monkeypatch.setattr(Verifier, "_seen_at", lambda verifier, *_: verifier._seen_in(slice(None)))
    monkeypatch.setattr(Noise, "best", wrong_best)
    with pytest.raises(AssertionError, match=r"text \d+ of Sampling.* instead of|mismatches"):
        check_coupled(make_target, lambda target: DraftModelDrafter(target, target, [2, 1, 1]))


@pytest.mark.parametrize("wrong", [StaleDistribution, RepeatedVerifierUniforms, RepeatedOwnUniforms])
def test_reused_uniforms_and_wrong_distributions(make_target, wrong):
    with pytest.raises(AssertionError, match="the texts do not have the target's distribution: p = "):
        check_sampling(make_target, wrong, count=4000)
