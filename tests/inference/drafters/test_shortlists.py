"""Drafters with shortlists of every kind: lossless; each level has the list that its definition says; the router reads
what it is trained on."""

from collections import Counter

import lossless_suite as suite
import pytest
import torch
from draws import occurs
from eagles import KINDS, fitted, untrained
from kept_texts import KeepsTexts
from lossless_suite import NONE, STARTS
from tiny_models import listed_tokens, random_shortlists, random_starts

from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.drafters.shortlists import Shortlists
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure.rollouts import eagle_drafts, record
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead, budget, low_rank_factors
from draftsmith.models.target import Target

TREES = {"fixed": (3, 2, 1), "dynamic": DynamicShape(3, 3, 9)}
PROMPTS = STARTS[:3]  # of 7, 1 and 4 tokens, none of them 0
NEW = 12
CLUSTERS = 9
# Kind, schedule, and the capacity of the root's list as a share of the drafter's tokens.
LISTS = {
    "fr_spec fixed": ("fr_spec", "fixed", 0.5),
    "fr_spec position-aware": ("fr_spec", "position_aware", 0.5),
    "vocab_trim": ("vocab_trim", "position_aware", 0.7),
    "dynaspec fixed": ("dynaspec", "fixed", 0.6),
    "dynaspec position-aware": ("dynaspec", "position_aware", 0.6),
    "dynaspec, clusters dropped": ("dynaspec", "fixed", 0.3),
    "dynaspec, nearly all tokens": ("dynaspec", "fixed", 0.9),
    "dynaspec, all tokens": ("dynaspec", "fixed", 1.0),
    "fr_spec, all tokens": ("fr_spec", "fixed", 1.0),
    "low_rank": ("low_rank", "position_aware", 0.2),
}


def shortlist(eagle: Eagle, target: Target, name: str) -> ShortlistHead:
    """A list of at least 3 tokens in a random order, of a random router."""
    kind, schedule, share = LISTS[name]
    outputs = eagle.config.outputs
    capacity = [max(3, tokens) for tokens in budget(int(outputs * share), schedule)]
    if kind != "dynaspec":
        sizes = (
            {"rank": 4, "feature_size": eagle.draft_head(target.lm_head).weight.shape[1]} if kind == "low_rank" else {}
        )
        return random_shortlists(ShortlistConfig(kind, outputs, tuple(capacity), **sizes))
    wanted = max(5, int(CLUSTERS * share))
    sizes = {"embedding_size": target.hidden_size, "feature_size": eagle.config.hidden_size}
    sizes |= {"clusters": budget(wanted, schedule), "num_clusters": CLUSTERS, "router_width": 8}
    config = ShortlistConfig(kind, outputs, tuple(capacity), **sizes)
    return random_shortlists(config, random_starts(CLUSTERS, outputs))


class Watched(KeepsTexts, EagleDrafter):
    """Compares each level's list with its definition, and its logits with the whole LM head's."""

    def __init__(self, eagle: Eagle, target: Target, *args, **options) -> None:
        super().__init__(eagle, target, *args, **options)
        # What the router reads, by step: row's text length, then (tokens, hidden) of each level; accepted length.
        self.steps: list[tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]], list[int]]] = []

    def propose(self, state):
        self.asked, self.lists = [], []
        tree = super().propose(state)
        for row in self.texts:
            nodes = zip(tree.tokens[row].tolist(), tree.depth[row].tolist(), tree.valid[row].tolist(), strict=True)
            for token, depth, valid in nodes:
                if depth and valid:
                    listed = self.lists[depth - 1][row]
                    if len(listed) < self.branching and token == 0:  # in place of the tokens that a list lacks
                        self.seen["none"] += token not in listed
                        continue
                    assert token in listed, f"{token} is not in the list of depth {depth - 1}"
                    self.seen["node"] += 1
        return tree

    def absorb(self, state, verdict, tree, features):
        super().absorb(state, verdict, tree, features)
        self.steps.append((state.length.tolist(), self.asked, verdict.length.tolist()))

    def _choose(self, tokens, hidden, depth):
        assert depth == len(self.asked)
        self.asked.append((tokens.clone(), hidden.clone()))
        super()._choose(tokens, hidden, depth)

    def _logits(self, hidden):
        assert len(self.asked) == len(self.lists) + 1, "the list of a level is chosen before its logits"
        logits, ids = super()._logits(hidden)
        mine, self.shortlists = self.shortlists, None
        whole, drafted = super()._logits(hidden)
        self.shortlists = mine
        rows, count = hidden.shape[0], logits.shape[2]
        listed = ids.expand(rows, count)
        padding = listed < 0
        assert torch.equal(logits == -torch.inf, padding[:, None].expand_as(logits))
        place = torch.full((self.target.vocab_size,), -1)
        drafted = torch.arange(whole.shape[2]) if drafted is None else drafted
        place[drafted] = torch.arange(len(drafted))
        at = place[listed.clamp(min=0)]
        assert bool((at >= 0)[~padding].all()), "a token that the drafter does not have"
        right = whole.gather(2, at.clamp(min=0)[:, None].expand_as(logits)).masked_fill(padding[:, None], -torch.inf)
        torch.testing.assert_close(logits, right.float(), atol=2e-4, rtol=1e-4)
        depth = len(self.lists)
        self.lists.append([set(row) - {-1} for row in listed.tolist()])
        for row in self.texts:
            assert self.lists[-1][row] == self.expected(row, depth, hidden), f"row {row}, depth {depth}"
            assert len(self.lists[-1][row]) == int((~padding[row]).sum()), "a token twice"
            self.seen[depth, len(self.lists[-1][row])] += 1
        return logits, ids

    def expected(self, row: int, depth: int, read: torch.Tensor) -> set[int]:
        """The list of a level, in plain Python."""
        head, ids, scores = self.shortlists.shortlist, self.eagle.draft_vocab, None
        if head.router is not None:
            nodes, hidden = self.asked[depth]
            scores = head.router(self.embed(nodes[row]), hidden[row], depth).amax(0)
        if head.low_rank:
            scores = read[row] @ head.down.t() @ head.up.t()
        ids = torch.arange(self.eagle.config.outputs) if ids is None else ids
        return {*listed_tokens(head, ids, depth, scores, self.seen)}


@pytest.fixture(scope="module")
def target(make_target):
    return suite.phrases(make_target)


@pytest.fixture(scope="module")
def plain(target):
    """The target's own greedy texts."""
    return [result.tokens for result in SpeculativeDecoder(target).generate(PROMPTS, NEW, stop_ids=NONE)]


def decoded(target, drafter, rows, static):
    """Greedy texts of one row after the other, or of three rows at once."""
    decoder = SpeculativeDecoder(target, drafter, static=static)
    if rows == 3:
        return decoder.generate(PROMPTS, NEW, stop_ids=NONE)
    return [decoder.generate([prompt], NEW, stop_ids=NONE)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", LISTS)
def test_lossless_by_the_level_lists(make_target, target, plain, name, tree):
    """Alone and in a batch, eager and static; every level's list and logits are checked while it decodes."""
    eagle = fitted(target, make_target, "eagle3", draft_vocab=name != "dynaspec fixed")
    drafter = Watched(eagle, target, TREES[tree], shortlist=shortlist(eagle, target, name))
    steps = []
    for rows, static in ((1, False), (3, False), (1, True), (3, True)):
        results = decoded(target, drafter, rows, static)
        assert [result.tokens for result in results] == plain, (rows, static)
        steps.append([result.accepted for result in results])
    assert steps[1:] == steps[:-1], "the steps depend on the other rows"
    occurs(max(map(max, steps[0])) > 1, "nothing was accepted")
    assert drafter.seen["node"] and (drafter.seen["dropped"] or "dropped" not in name), drafter.seen


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi"])
def test_on_the_targets_own_head(make_target, family):
    """With the target's scale, soft cap or bias; padding stays −∞."""
    target = make_target(family)
    for name in ("dynaspec, clusters dropped", "fr_spec position-aware"):
        eagle = untrained(target, "shared")
        drafter = Watched(eagle, target, TREES["fixed"], shortlist=shortlist(eagle, target, name))
        (result,) = SpeculativeDecoder(target, drafter).generate([STARTS[0]], 8, stop_ids=NONE)
        assert result.tokens == SpeculativeDecoder(target).generate([STARTS[0]], 8, stop_ids=NONE)[0].tokens
        assert drafter.seen["node"]


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_recorded_probabilities_have_the_targets_scale(make_target, family):
    target = make_target(family)
    made, tokens = eagle_drafts(untrained(target, "shared"), target), torch.tensor([[*range(5, 25)]])
    marks = torch.arange(20)[None] >= 6
    recorded = record(made, tokens, marks, 10)
    for k, rollout in enumerate(made.run(tokens, marks)):
        out = made.head(rollout.out)
        wanted = target.after_head(out).float().log_softmax(-1).topk(10).values
        torch.testing.assert_close(recorded.log_q[:, k], wanted, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(wanted, out.float().log_softmax(-1).topk(10).values, atol=1e-2)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_router_reads_what_it_is_trained_on(make_target, target, plain, kind, tree):
    """Its scores along accepted paths are those of teacher-forced drafts over the whole text."""
    eagle = fitted(target, make_target, kind, draft_vocab=kind == "eagle3")
    head = shortlist(eagle, target, "dynaspec, nearly all tokens")
    drafter = Watched(eagle, target, TREES[tree], shortlist=head)
    results = decoded(target, drafter, 3, False)
    assert [result.tokens for result in results] == plain
    compared = Counter()
    made = eagle_drafts(eagle, target, 3)
    assert (made.embedding_size, made.feature_size) == (head.config.embedding_size, head.config.feature_size)
    for row, (prompt, text) in enumerate(zip(PROMPTS, plain, strict=True)):
        tokens = torch.tensor([prompt + text])
        supervised = torch.ones_like(tokens, dtype=torch.bool)
        with torch.no_grad():
            rollouts = list(made.run(tokens, supervised))  # position t drafts from the root t + 1
            for lengths, asked, accepted in drafter.steps:
                length = lengths[row]
                for depth in range(max(1, accepted[row])):  # an accepted node with an accepted child was run
                    if not length or length + depth >= tokens.shape[1]:  # an ended row; the text's last step
                        continue
                    rollout = rollouts[depth]
                    nodes, hidden = (part[row] for part in asked[depth])
                    same = nodes == tokens[0, length + depth]
                    assert int(rollout.tokens[length - 1]) == int(tokens[0, length + depth]) and bool(same.any())
                    right = head.router(made.embed(rollout.tokens[length - 1]), rollout.hidden[length - 1], depth)
                    mine = head.router(made.embed(nodes[same]), hidden[same], depth)
                    assert float((mine - right).abs().amax(-1).amin()) < 1e-4, f"text {row} at {length}, depth {depth}"
                    compared[depth] += 1
    assert all(compared[depth] for depth in range(3)), compared
    spread = torch.stack([rollout.hidden for rollout in rollouts[:2]])
    scores = head.router(made.embed(rollouts[0].tokens), spread[0], 0)
    other = head.router(made.embed(rollouts[1].tokens), spread[1], 1)
    assert float((scores[1:] - scores[:-1]).abs().amax(-1).amin()) > 1e-2, "positions could not be told apart"
    assert float((scores - other).abs().amax(-1).amin()) > 1e-2, "depths could not be told apart"


def test_full_rank_drafts_what_the_whole_head_drafts(make_target, target, plain):
    """With as many candidates as a node has children; with a lower rank another tree. Rescored logits are the whole
    head's, which `Watched` compares."""
    eagle = fitted(target, make_target, "eagle3", draft_vocab=True)
    weight, trees = eagle.draft_head(target.lm_head).weight, []
    for rank in (0, weight.shape[1], 1):
        lists = None
        if rank:
            config = ShortlistConfig("low_rank", len(weight), (3,), rank=rank, feature_size=weight.shape[1])
            lists = ShortlistHead(config)
            lists.down, lists.up = low_rank_factors(weight.detach(), rank, torch.eye(weight.shape[1]))
        drafter = (Watched if rank else EagleDrafter)(eagle, target, TREES["fixed"], shortlist=lists)
        drafted, propose = [], drafter.propose

        def noting(state, propose=propose, drafted=drafted):
            tree = propose(state)
            drafted.append(tree.tokens.tolist())
            return tree

        drafter.propose = noting
        assert [result.tokens for result in decoded(target, drafter, 3, False)] == plain
        trees.append(drafted)
    assert trees[0] == trees[1] != trees[2]


@pytest.mark.parametrize("tree", TREES)
def test_lists_of_fewer_tokens_than_children(make_target, target, plain, tree):
    """Clusters of one and two tokens: alone and merged, greedily and by sampling."""
    eagle = untrained(target)
    config = ShortlistConfig(
        "dynaspec", 61, (3,), clusters=(1,), num_clusters=40, router_width=4, embedding_size=32, feature_size=32
    )

    def make():
        head = random_shortlists(config, [*range(20), *range(21, 61, 2), 61])
        return Watched(eagle, target, TREES[tree], shortlist=head)

    drafter = make()
    assert [result.tokens for result in decoded(target, drafter, 3, False)] == plain
    assert drafter.seen[0, 1] and drafter.seen[0, 2], drafter.seen
    merged = MergedDrafter({"eagle": make(), "ngram": NgramDrafter(target, depth=2, min_match=1)}, target, 12)
    assert [result.tokens for result in decoded(target, merged, 3, False)] == plain
    decoder = SpeculativeDecoder(target, make())
    for mode in ("sample", "mss"):
        assert all(len(r.tokens) == NEW for r in decoder.generate(PROMPTS, NEW, mode=mode, stop_ids=NONE))


def test_drafters_with_other_trees_do_not_share_state(make_target, target, plain):
    """Two drafters of ``with_tree`` that decode in turn, with other numbers of rows."""
    eagle = fitted(target, make_target)
    one = EagleDrafter(eagle, target, (2, 1), shortlist=shortlist(eagle, target, "dynaspec fixed"))
    other = one.with_tree((1, 1, 1))
    first, second = SpeculativeDecoder(target, one), SpeculativeDecoder(target, other, static=True)
    for _ in range(2):
        assert [result.tokens for result in first.generate(PROMPTS, NEW, stop_ids=NONE)] == plain
        assert second.generate(PROMPTS[:1], NEW, stop_ids=NONE)[0].tokens == plain[0]


@pytest.mark.parametrize(
    ("tree", "message"),
    [((4,), "more children than the vocabulary of 3 has tokens"), (DynamicShape(4, 1, 3), "chooses from 3 tokens")],
)
def test_trees_of_more_children_than_the_shortest_list(make_target, target, tree, message):
    config = ShortlistConfig("fr_spec", 61, (9, 3))
    with pytest.raises(ValueError, match=message):
        EagleDrafter(untrained(target), target, tree, shortlist=random_shortlists(config))


def test_heads_that_do_not_fit():
    lists = random_shortlists(ShortlistConfig("fr_spec", 9, (4,)))
    with pytest.raises(ValueError, match="the shortlists order 9 rows, and the LM head has 8"):
        Shortlists(lists, torch.nn.Linear(4, 8), None)
    with pytest.raises(ValueError, match="quantised or no plain matrix"):
        Shortlists(lists, torch.nn.Identity(), None)
    lists = random_shortlists(ShortlistConfig("low_rank", 9, (4,), rank=2, feature_size=5))
    with pytest.raises(ValueError, match="factors read 5 numbers, and the LM head reads 4; train the shortlists again"):
        Shortlists(lists, torch.nn.Linear(4, 9), None)


# ---- what every drafter has to pass
