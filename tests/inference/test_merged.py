"""Merged drafters: the union of their trees, the nodes that are kept, and the distribution of committed tokens."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftsmith.inference.cache import KVCache
from draftsmith.inference.costs import StepCosts, best_node_counts
from draftsmith.inference.drafters.merged import MergedDrafter
from draftsmith.inference.drafters.protocol import Drafter, DraftEstimate, State
from draftsmith.inference.sampling import Sampling, Settings, philox_uniforms
from draftsmith.inference.tree import Draws, TokenTree, bitsets
from draftsmith.inference.verify import Verdict, verify_sample
from draftsmith.kernels.verify import IID

CPU = torch.device("cpu")
P = [0.42, 0.28, 0.16, 0.10, 0.04]
Q = [0.60, 0.05, 0.20, 0.05, 0.10]
Q2 = [0.10, 0.45, 0.05, 0.30, 0.10]


@pytest.fixture(scope="module")
def target(make_target):
    return make_target("llama")


class Given(Drafter):
    """Proposes given trees, one for each row or one for all: {path of tokens: acceptance probability}."""

    static = True

    def __init__(self, *rows, nodes=0, depth=0, branching=3):
        self.rows = rows
        self.num_nodes = nodes or max(map(len, rows)) + 1
        self.max_depth = depth or max(len(path) for row in rows for path in row)
        self.branching, self.absorbed = branching, []

    def propose(self, state):
        size = self.num_nodes
        made = []
        for row, root in zip(self.rows, state.root.tolist(), strict=False):
            paths = [(), *row]
            parent = [-1] + [paths.index(path[:-1]) for path in paths[1:]]
            padding = size - len(paths)
            made.append((
                torch.tensor([root, *(path[-1] for path in paths[1:]), *[0] * padding]),
                torch.tensor(parent + [0] * padding, dtype=torch.int32),
                torch.tensor([*map(len, paths), *[1] * padding], dtype=torch.int32),
                torch.cat([bitsets(parent), torch.zeros(padding, 1, dtype=torch.int64)]),
                torch.tensor([True] * len(paths) + [False] * padding),
                torch.tensor([1.0, *row.values(), *[0.0] * padding]),
            ))  # fmt: skip
        parts = (torch.stack(part).expand(len(state.root), *part[0].shape) for part in zip(*made, strict=True))
        *parts, acceptance = parts
        return TokenTree(*parts, acceptance=acceptance)

    def absorb(self, state, verdict, tree, features):
        self.absorbed.append(None if verdict.own_path is None else verdict.own_path.tolist())


def state_of(rows, sampled=False):
    zeros = torch.zeros(rows, dtype=torch.int64)
    seeds = Settings([Sampling(seed=n) for n in range(rows)], CPU) if sampled else None
    return State(zeros, zeros, torch.zeros(rows, 32), torch.ones(rows, dtype=torch.bool), seeds, zeros)


def merged(target, drafters, rows, *, nodes=1000, costs=None, static=False):
    names = {f"source {number}": drafter for number, drafter in enumerate(drafters)}
    drafter = MergedDrafter(names, target, nodes, costs)
    drafter.allocate(KVCache(target, rows, 8), drafter.max_depth, static)
    return drafter


def paths_of(tree, row):
    """Path of each valid node → (its number, its source bits); checked against ancestors and depth."""
    found = {}
    for node in range(tree.tokens.shape[1]):
        if not tree.valid[row, node]:
            continue
        path, above = [], node
        while above > 0:
            path.insert(0, int(tree.tokens[row, above]))
            assert int(tree.parent[row, above]) < above
            above = int(tree.parent[row, above])
        bits = [int(tree.ancestors[row, node, w // 64]) >> w % 64 & 1 for w in range(tree.tokens.shape[1])]
        on_path, above = set(), node
        while above >= 0:
            on_path.add(above)
            above = int(tree.parent[row, above])
        assert {n for n, bit in enumerate(bits) if bit} == on_path
        assert tree.mask is None or tree.mask[row, node].nonzero().flatten().tolist() == sorted(on_path)
        assert int(tree.depth[row, node]) == len(path)
        assert tuple(path) not in found, "one node per path"
        found[tuple(path)] = node, int(tree.source[row, node])
    return found


@st.composite
def trees(draw):
    """A tree over three tokens, {path: acceptance probability}, parents first."""
    found = {(): 1.0}
    for _ in range(draw(st.integers(0, 9))):
        above = draw(st.sampled_from(sorted(found)))
        path = (*above, draw(st.integers(0, 2)))
        if len(path) <= 4:
            found.setdefault(path, found[above] * draw(st.sampled_from([1.0, 0.9, 0.5, 0.25])))
    del found[()]
    return found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_union_of_the_trees(target, data):
    """Its node sequences are exactly those of the trees; each node has the bits of its sources."""
    rows, count = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    given_trees = [[data.draw(trees()) for _ in range(rows)] for _ in range(count)]
    drafter = merged(target, [Given(*each, nodes=10, depth=4) for each in given_trees], rows,
                     static=data.draw(st.booleans()))  # fmt: skip
    tree = drafter.propose(state_of(rows))
    for row in range(rows):
        expected = {(): 0}
        for number, each in enumerate(given_trees):
            for path in each[row]:
                expected[path] = expected.get(path, 0) | 1 << number
        assert {path: bits for path, (_, bits) in paths_of(tree, row).items()} == expected
        assert not tree.source[row][~tree.valid[row]].any()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_number_of_nodes_maximises_speed(target, data):
    """The number of nodes maximises expected tokens / time, compared with all prefixes of the sorted list."""
    one, other = data.draw(trees()), data.draw(trees())
    costs = StepCosts({1: 1.0, 3: data.draw(st.sampled_from([1.1, 2.0])), 12: data.draw(st.sampled_from([1.2, 6.0]))})
    most = data.draw(st.integers(2, 12))
    drafter = merged(
        target, [Given(one, nodes=10, depth=4), Given(other, nodes=10, depth=4)], 1, nodes=most, costs=costs
    )
    joint = {
        path: 1 - (1 - min(one.get(path, 0), 0.9999)) * (1 - min(other.get(path, 0), 0.9999))
        for path in {**one, **other}
    }
    likeliest = sorted(joint.values(), reverse=True)
    speeds = [(1 + sum(likeliest[:n])) / costs.relative(n + 1) for n in range(min(most, len(joint) + 1))]
    tree = drafter.propose(state_of(1))
    kept = [path for path in paths_of(tree, 0) if path]
    assert len(kept) < most or not kept
    speed = (1 + sum(joint[path] for path in kept)) / costs.relative(len(kept) + 1)
    assert speed == pytest.approx(max(speeds), rel=1e-3)
    assert tree.tokens.shape[1] == len(kept) + 1, "no padding"


def test_drafters_get_their_own_node_numbers(target):
    """Each drafter gets the accepted path in its own node numbers, with −1 for nodes it did not propose."""
    one = Given({(1,): 0.9, (1, 2): 0.8, (5,): 0.3}, {(7,): 0.5, (7, 7): 0.4, (7, 7, 7): 0.3})
    other = Given({(5,): 0.9, (1,): 0.6, (1, 2): 0.5, (1, 2, 3): 0.5, (1, 4): 0.1}, {(8,): 0.5})
    drafter = merged(target, [one, other], 2)
    tree = drafter.propose(state_of(2))
    numbers = {path: node for path, (node, _) in paths_of(tree, 0).items()}
    path = torch.tensor([[0, numbers[1,], numbers[1, 2], numbers[1, 2, 3]], [0, 1, 2, 3]])
    zeros = torch.zeros(2, dtype=torch.int64)
    verdict = Verdict(path, torch.tensor([3, 0]), path[:, -1], zeros, zeros.bool())
    drafter.absorb(state_of(2), verdict, tree, torch.zeros(2, tree.tokens.shape[1], 32))
    assert one.absorbed == [[[0, 1, 2, -1], [0, -1, -1, -1]]]
    assert other.absorbed == [[[0, 2, 3, 4], [0, -1, -1, -1]]]


class Drawing(Drafter):
    """Draws a chain of two tokens from a fixed distribution."""

    static, random, num_nodes, max_depth, branching = True, True, 3, 2, 1

    def __init__(self, q):
        self.q = torch.tensor(q)

    def propose(self, state):
        rows = len(state.root)
        uniforms = philox_uniforms(state.settings.seed, state.step, 2, state.stream)
        drawn = torch.searchsorted(self.q.cumsum(0), uniforms, right=True).clamp(max=4)
        parent = torch.tensor([-1, 0, 1], dtype=torch.int32).expand(rows, -1)
        ones = torch.ones(rows, 3, dtype=torch.bool)
        child = torch.tensor([[1], [2], [-1]]).expand(rows, -1, -1)
        draws = Draws(
            child, torch.full_like(child, IID, dtype=torch.int8), torch.zeros_like(child), self.q.expand(rows, 1, -1)
        )
        return TokenTree(
            torch.cat([state.root[:, None], drawn], 1), parent, parent + 1, bitsets([-1, 0, 1]).expand(rows, -1, -1),
            ones, draws=draws, acceptance=torch.tensor([1.0, 0.5, 0.2]).expand(rows, -1),
        )  # fmt: skip


def first_two(tree, rows, generator):
    """The first two committed tokens if the target's distribution is P at every node."""
    nodes, most = tree.tokens.shape[1], tree.draws.child.shape[2]
    uniforms = torch.rand(rows, nodes, most, generator=generator)
    p = torch.tensor(P).expand(rows, nodes, -1)
    verdict = verify_sample(tree, p, uniforms, torch.rand(rows, generator=generator), 2)
    drafted = tree.tokens.gather(1, verdict.path[:, 1:].clamp(max=nodes - 1))
    fresh = torch.multinomial(torch.tensor(P).expand(rows, -1), 1, replacement=True, generator=generator)
    tokens = torch.cat([drafted, fresh], 1)
    tokens.scatter_(1, verdict.length[:, None], verdict.bonus[:, None])
    return torch.where(verdict.length[:, None] == 0, torch.cat([verdict.bonus[:, None], fresh], 1), tokens[:, :2])


def chi_square(pairs):
    counts = torch.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).double().numpy()
    expected = np.array([a * b for a, b in itertools.product(P, P)]) * counts.sum()
    return stats.chisquare(counts, expected).pvalue


def merged_to_a_set(tree):
    """Wrong variant: of two draws that lead to one child, the second one is dropped."""
    child = tree.draws.child.clone()
    for turn in range(1, child.shape[2]):
        again = (child[..., :turn] == child[..., turn : turn + 1]).any(-1)
        child[..., turn] = torch.where(again, -1, child[..., turn])
    return TokenTree(tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.valid,
                     draws=Draws(child, tree.draws.kind, tree.draws.q_row, tree.draws.q))  # fmt: skip


@pytest.fixture
def small(make_target):
    return make_target("llama", vocab_size=5)


@pytest.mark.parametrize("certain", [False, True])
def test_the_distribution_of_merged_draws(small, certain):
    """Two drafters draw from different distributions at the same nodes, often the same token; a third one is
    deterministic. Two committed tokens have the joint distribution of plain sampling; not so with draws merged to a
    set, nor if both drafters use the same uniforms."""
    rows = 300_000
    generator = torch.Generator().manual_seed(3)
    drafters = [Drawing(Q), Drawing(Q2)]
    if certain:
        always = {(1,): 0.5, (1, 0): 0.3, (0,): 0.2}
        drafters.append(Given(always))
    state = state_of(rows, sampled=True)
    drafter = merged(small, drafters, rows, costs=StepCosts({1: 1.0, 2: 1.1}))
    tree = drafter.propose(state)
    agree = (tree.valid.sum(1) < tree.valid.shape[1]).float().mean()
    assert agree > 0.1, "they often propose the same token"
    assert chi_square(first_two(tree, rows, generator)) > 1e-6
    assert chi_square(first_two(merged_to_a_set(tree), rows, generator)) < 1e-6
    drafter._states = lambda state: [state] * len(drafters)
    assert chi_square(first_two(drafter.propose(state), rows, generator)) < 1e-6


def test_kept_nodes_do_not_depend_on_drawn_tokens(small):
    """The nodes of a deterministic source are the same whatever the others drew (C2)."""
    rows = 500
    sure = Given({(1,): 0.5, (0,): 0.4, (2,): 0.3, (3,): 0.2})
    for nodes, costs, wanted in ((6, None, 3), (5, None, 2), (1000, StepCosts({1: 1.0, 2: 1.1}), 4)):
        drafter = merged(small, [Drawing(Q), sure], rows, nodes=nodes, costs=costs)
        tree = drafter.propose(state_of(rows, sampled=True))
        kept = {tuple(sorted(int(tree.tokens[row, n]) for n in range(tree.tokens.shape[1]) if tree.source[row, n] & 2))
                for row in range(rows)}  # fmt: skip
        assert len(kept) == 1 and len(next(iter(kept))) == wanted


def test_node_counts_by_row_and_for_the_whole_batch():
    acceptance = torch.tensor([[1.0, 0.9, 0.8], [1.0, 0.1, 0.0]])
    times = torch.tensor([1.0, 1.3, 1.75])
    assert best_node_counts(acceptance, times, whole_batch=False).tolist() == [3, 1]
    assert best_node_counts(acceptance, times, whole_batch=True).tolist() == [2]


@pytest.mark.parametrize("right", [True, False])
def test_drafters_with_an_estimate_run_where_that_raises_speed(target, right):
    """It runs while its nodes are accepted as estimated, stops after some steps without accepted nodes, and runs again
    in a new text."""
    estimated = Given({(1,): 0.8, (1, 2): 0.7})
    estimated.estimate = DraftEstimate(0.3, 3, 2.5)
    other = Given({(5,): 0.4}, nodes=2)
    drafter = merged(target, [estimated, other], 1, costs=StepCosts({1: 1e-2, 2: 1.1e-2, 8: 1.8e-2}))
    state, ran = state_of(1), []
    zeros = torch.zeros(1, dtype=torch.int64)
    for _ in range(20):
        tree = drafter.propose(state)
        found = {path: node for path, (node, _) in paths_of(tree, 0).items()}
        ran.append((1,) in found)
        assert (5,) in found, "the other one always runs"
        path = [0, found[1,], found[1, 2]] if right and ran[-1] else [0, 1, 2]
        length = torch.tensor([2 if right and ran[-1] else 0])
        verdict = Verdict(torch.tensor([path]), length, length, zeros, zeros.bool())
        drafter.absorb(state, verdict, tree, torch.zeros(1, tree.tokens.shape[1], 32))
    assert ran[0] and (all(ran) if right else not any(ran[8:]))
    drafter.begin(slice(0, 1))
    assert (1,) in paths_of(drafter.propose(state), 0)
