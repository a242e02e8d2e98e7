"""Merged drafters: the union of their trees, the nodes that are kept, and the distribution of committed tokens."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from draftsmith.inference.engine.budget import Budget
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.measure.step_costs import StepCosts
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling, Settings
from draftsmith.inference.verify.tree import Draws, TokenTree, bitsets
from draftsmith.inference.verify.verify import Verdict, verify_sample
from draftsmith.kernels.attention_plan import Plans
from draftsmith.kernels.distribution import philox_uniforms
from draftsmith.kernels.multi_step import IID, ONE_HOT, WITHOUT_REPLACEMENT

CPU = torch.device("cpu")
P = [0.42, 0.28, 0.16, 0.10, 0.04]
Q = [0.60, 0.05, 0.20, 0.05, 0.10]
Q2 = [0.10, 0.45, 0.05, 0.30, 0.10]


@pytest.fixture(scope="module")
def target(make_target):
    return make_target("llama")


@pytest.fixture(scope="module")
def small(make_target):
    return make_target("llama", vocab_size=5)


def moved(tree, device):
    """A tree or its draws on a device."""
    parts = {name: part for name, part in vars(tree).items() if part is not None and name != "static"}
    on = {name: moved(part, device) if isinstance(part, Draws) else part.to(device) for name, part in parts.items()}
    return replace(tree, **on)


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
            tokens = [root, *(path[-1] for path in paths[1:]), *[0] * padding]
            bits = torch.cat([bitsets(parent), torch.zeros(padding, 1, dtype=torch.int64)])
            parent, depth = torch.tensor([parent + [0] * padding, [*map(len, paths), *[1] * padding]]).int()
            valid, acceptance = torch.arange(size) < len(paths), [1.0, *row.values(), *[0.0] * padding]
            made.append((torch.tensor(tokens), parent, depth, bits, valid, torch.tensor(acceptance)))
        parts = (torch.stack(part).expand(len(state.root), *part[0].shape) for part in zip(*made, strict=True))
        *parts, acceptance = parts
        return moved(TokenTree(*parts, acceptance=acceptance), state.root.device)

    def absorb(self, state, verdict, tree, features):
        self.absorbed.append(None if verdict.own_path is None else verdict.own_path.tolist())


def budget_of(drafter, costs):
    """A budget of a merge's steps, in the first of one row."""
    budget = Budget(costs.seconds, 1, drafter.self_correcting_sources, drafter.max_depth, drafter.num_nodes, costs.now)
    budget.start([0], [True])
    return budget


def state_of(drafter, rows, sampled=False):
    device = drafter.target.device
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    seeds = Settings([Sampling(seed=n) for n in range(rows)], device) if sampled else None
    return State(zeros, zeros, torch.zeros(rows, 32, device=device), zeros == 0, seeds, zeros)


def proposed(drafter, rows, sampled=False, budget=None):
    """The drafter's tree, on the CPU."""
    state = state_of(drafter, rows, sampled)
    state.budget = budget
    return moved(drafter.propose(state), CPU)


def absorb(drafter, rows, verdict, tree):
    device = drafter.target.device
    features = torch.zeros(rows, tree.tokens.shape[1], 32, device=device)
    drafter.absorb(state_of(drafter, rows), moved(verdict, device), moved(tree, device), features)


def merged(target, drafters, rows, *, nodes=1000, static=False):
    names = {f"source {number}": drafter for number, drafter in enumerate(drafters)}
    drafter = MergedDrafter(names, target, nodes)
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


class Made(Drafter):
    """Proposes trees made of random numbers, one for each row: up to four levels over three tokens, some of the nodes
    not valid, others of the same path as those. If ``random``, with random draws, of which several lead to one child.

    paths: by row, of each node, {number: path} of the valid ones.
    expected: by row, {path of a node: its draws, each (path of the child, kind, q)}.
    """

    static, branching, max_depth = True, 4, 4

    def __init__(self, source, rows: int, drawn: bool):
        self.random, self.num_nodes = drawn, source.randint(1, 10)
        self.paths, self.expected, made = [], [], []
        narrow = source.random() < 0.5  # q over a part of the vocabulary
        width = 3 if narrow else 5
        q = torch.tensor([[[source.randint(1, 1000) for _ in range(width)] for _ in "ab"] for _ in range(rows)])
        q, ids = q / q.sum(-1, keepdim=True), torch.tensor(source.sample(range(5), width))
        wide = torch.zeros(rows, 2, 5).scatter_(2, ids.expand(q.shape), q) if narrow else q
        self.q, self.ids = q, ids[None, None] if narrow else None
        for row in range(rows):
            parents, paths, valid, acceptance = [-1], [()], [True], [1.0]
            for node in range(1, self.num_nodes):
                above = source.choice([n for n in range(node) if len(paths[n]) < 4])
                path = (*paths[above], source.randrange(3))
                known = [other for other, is_valid in zip(paths, valid, strict=True) if is_valid]
                parents.append(above)
                valid.append(valid[above] and path not in known and source.random() < 0.9)
                acceptance.append(valid[-1] * acceptance[above] * source.choice([1.0, 0.9, 0.5, 0.25]))
                paths.append(path)
            child, kind, q_row = (torch.full((self.num_nodes, 4), -1), *torch.zeros(2, self.num_nodes, 4).long())
            expected = {}
            for node in range(self.num_nodes):
                below = [n for n in range(1, self.num_nodes) if parents[n] == node and valid[n]]
                draws = source.sample(below * 2, min(4, 2 * len(below)))  # up to two of each
                for turn, each in enumerate(draws):
                    child[node, turn], q_row[node, turn] = each, source.randrange(2)
                    kind[node, turn] = source.choice([IID, WITHOUT_REPLACEMENT])
                if valid[node]:
                    expected[paths[node]] = [
                        (paths[each], int(kind[node, turn]), wide[row, q_row[node, turn]].tolist())
                        for turn, each in enumerate(draws)
                    ]
            self.paths.append({n: path for n, path in enumerate(paths) if valid[n]})
            self.expected.append(expected)
            parent, depth = torch.tensor([parents, [*map(len, paths)]]).int()
            tokens, bits = torch.tensor([path[-1] if path else 0 for path in paths]), bitsets(parents)
            draws = (child, kind.to(torch.int8), q_row)
            made.append((tokens, parent, depth, bits, torch.tensor(valid), torch.tensor(acceptance), *draws))
        *self.parts, child, kind, q_row = (torch.stack(part) for part in zip(*made, strict=True))
        self.draws = Draws(child, kind, q_row, self.q, self.ids)

    def propose(self, state):
        *parts, acceptance = self.parts
        draws = self.draws if self.random and state.settings is not None else None
        return moved(TokenTree(*parts, draws=draws, acceptance=acceptance), state.root.device)


def draws_of(tree, row, paths):
    """The draws of each valid node by its path, as ``Made.expected``; one-hot ones without q."""
    path_of = {node: path for path, (node, _) in paths.items()}
    parts = (tree.draws.child, tree.draws.kind, tree.draws.q_row)
    found = {}
    for node, path in path_of.items():
        entries = zip(*(part[row, node].tolist() for part in parts), strict=True)
        found[path] = [
            (path_of[child], kind, None if kind == ONE_HOT else tree.draws.q[row, q_row].tolist())
            for child, kind, q_row in entries
            if child >= 0
        ]
    return found


@pytest.mark.parametrize("static", [False, True], ids=["eager", "static"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@given(source=st.randoms(use_true_random=True), budget=st.sampled_from([1000, 2, 3, 5, 8, 12]))
@settings(max_examples=100, deadline=None)
def test_the_merge_is_the_union(small, sampled, static, source, budget):
    """The node sequences are those of the sources, no others, one node for each, parents first; every node has the bits
    of its sources, every random draw is kept with its order, kind and distribution. With fewer nodes than that, whole
    paths are kept, and all random draws."""
    rows, drawn = source.randint(1, 3), [sampled and source.random() < 0.6 for _ in range(source.randint(1, 4))]
    sources = [Made(source, rows, each) for each in drawn]
    drafter = merged(small, sources, rows, nodes=budget, static=static)
    tree = proposed(drafter, rows, sampled)
    for row in range(rows):
        union = {}
        for number, each in enumerate(sources):
            for path in each.paths[row].values():
                union[path] = union.get(path, 0) | (1 << number if path else 0)
        found = paths_of(tree, row)
        bits = {path: bits for path, (_, bits) in found.items()}
        assert not tree.source[row][~tree.valid[row]].any()
        random_bits = sum(1 << number for number, each in enumerate(drawn) if each)
        assert all(each & random_bits == union[path] & random_bits for path, each in bits.items())
        assert all(path in bits for path, each in union.items() if each & random_bits)
        if budget == 1000:
            assert bits == union
        else:
            assert len(found) <= max(budget, drafter.random_nodes)
            # A deterministic source's node is kept or cut by its path.
            assert all(each in (union[path], union[path] & random_bits) for path, each in bits.items())
        if tree.draws is not None and any(drawn):
            certain = [path for path, each in bits.items() if each & ~random_bits]
            assert draws_of(tree, row, found) == {
                path: [
                    draw
                    for each, is_drawn in zip(sources, drawn, strict=True)
                    if is_drawn
                    for draw in each.expected[row].get(path, [])
                ]
                + [(child, ONE_HOT, None) for child in certain if child[:-1] == path]
                for path in bits
            }


@given(trees(), trees(), st.sampled_from([1.1, 2.0]), st.sampled_from([1.2, 6.0]), st.integers(2, 12))
@example({(0,): 0.5, (1,): 0.25}, {(1,): 0.5, (1, 0): 0.5}, 2.0, 6.0, 3)  # four nodes would be faster than two
@settings(max_examples=60, deadline=None)
def test_the_number_of_nodes_maximises_speed(target, one, other, few, many, most):
    """The number of nodes maximises expected tokens / time, compared with all prefixes of the sorted list."""
    costs = StepCosts({1: 1.0, 3: few, 12: many})
    drafter = merged(target, [Given(one, nodes=10, depth=4), Given(other, nodes=10, depth=4)], 1, nodes=most)
    budget = budget_of(drafter, costs)
    joint = {
        path: 1 - (1 - min(one.get(path, 0), 0.9999)) * (1 - min(other.get(path, 0), 0.9999))
        for path in {**one, **other}
    }
    likeliest = sorted(joint.values(), reverse=True)
    tree = proposed(drafter, 1, budget=budget)

    def speed_of(probabilities):
        return (1 + sum(probabilities)) / (budget.drafting + costs.relative(len(probabilities) + 1))

    speeds = [speed_of(likeliest[:n]) for n in range(min(most, len(joint) + 1))]
    assert budget.kept or tree.tokens.shape[1] == 1 or not other or not one
    if not budget.kept:
        return  # one of them alone: the step chooses
    kept = [path for path in paths_of(tree, 0) if path]
    assert len(kept) < most or not kept
    assert speed_of([joint[path] for path in kept]) == pytest.approx(max(speeds), rel=1e-3)
    assert tree.tokens.shape[1] == len(kept) + 1, "no padding"


def test_drafters_get_their_own_node_numbers(target):
    """Each drafter gets the accepted path in its own node numbers, with −1 for nodes it did not propose."""
    one = Given({(1,): 0.9, (1, 2): 0.8, (5,): 0.3}, {(7,): 0.5, (7, 7): 0.4, (7, 7, 7): 0.3})
    other = Given({(5,): 0.9, (1,): 0.6, (1, 2): 0.5, (1, 2, 3): 0.5, (1, 4): 0.1}, {(8,): 0.5})
    drafter = merged(target, [one, other], 2)
    tree = proposed(drafter, 2)
    numbers = {path: node for path, (node, _) in paths_of(tree, 0).items()}
    path = torch.tensor([[0, numbers[1,], numbers[1, 2], numbers[1, 2, 3]], [0, 1, 2, 3]])
    zeros = torch.zeros(2, dtype=torch.int64)
    verdict = Verdict(path, torch.tensor([3, 0]), path[:, -1], zeros, zeros.bool())
    absorb(drafter, 2, verdict, tree)
    assert one.absorbed == [[[0, 1, 2, -1], [0, -1, -1, -1]]]
    assert other.absorbed == [[[0, 2, 3, 4], [0, -1, -1, -1]]]


class Reading(Drafter):
    """A drafter that proposes nothing, and keeps the features that it was given."""

    def __init__(self, target, captures):
        self.target, self.captures, self.static = target, captures, False
        self.num_nodes, self.max_depth, self.branching = 1, 0, 1
        self.seen: list[torch.Tensor] = []

    def prefill(self, features, chunk):
        self.seen.append(features)

    def propose(self, state):
        raise AssertionError("not asked for")


def test_each_drafter_reads_its_own_captured_layers(target):
    """In its own order; the merge captures all of them, sorted."""
    drafters = {f"{captures}": Reading(target, captures) for captures in ((), (1, 0), (1,), (0, 1))}
    merged = MergedDrafter(drafters, target, 4)
    assert merged.captures == (0, 1)
    width = target.hidden_size
    hidden, first, second = (torch.full((2, width), value, device=target.device) for value in (7.0, 8.0, 9.0))
    merged.prefill(torch.cat((hidden, first, second), -1), Chunk.of([(0, 0, [0, 0])], target.device))
    for drafter, wanted in zip(drafters.values(), ([7], [7, 9, 8], [7, 9], [7, 8, 9]), strict=True):
        assert drafter.seen[0][0, ::width].tolist() == wanted


def test_drafters_on_streams_have_plans_of_their_own(target):
    """A plan that one stream is still writing is not read on another."""
    drafter = merged(target, [Given({(1,): 0.5}), Given({(2,): 0.5}), Given({(3,): 0.5})], 1)
    drafter.streams = {2: None}
    state = state_of(drafter, 1)
    for _ in range(2):  # steps
        state.plans = Plans(state.length)
        plans = [view.plans for view in drafter._states(state)]
        assert [each is state.plans for each in plans] == [True, True, False]
        assert plans[2].lengths is state.plans.lengths and plans[2].made is not state.plans.made


class Drawing(Drafter):
    """Draws a chain of two tokens from a fixed distribution."""

    static, random, num_nodes, max_depth, branching = True, True, 3, 2, 1

    def __init__(self, q):
        self.q = torch.tensor(q)

    def allocate(self, cache, max_depth, static):
        self.q = self.q.to(cache.lengths.device)

    def propose(self, state):
        rows = len(state.root)
        uniforms = philox_uniforms(state.settings.seed, state.step, 2, state.stream)
        drawn = torch.searchsorted(self.q.cumsum(0), uniforms, right=True).clamp(max=4)
        device = state.root.device
        parent = torch.tensor([-1, 0, 1], dtype=torch.int32, device=device).expand(rows, -1)
        ones = torch.ones(rows, 3, dtype=torch.bool, device=device)
        child = torch.tensor([[1], [2], [-1]], device=device).expand(rows, -1, -1)
        kind = torch.full_like(child, IID, dtype=torch.int8)
        draws = Draws(child, kind, torch.zeros_like(child), self.q.expand(rows, 1, -1))
        ancestors = bitsets([-1, 0, 1]).to(device).expand(rows, -1, -1)
        acceptance = torch.tensor([1.0, 0.5, 0.2], device=device).expand(rows, -1)
        tokens = torch.cat([state.root[:, None], drawn], 1)
        return TokenTree(tokens, parent, parent + 1, ancestors, ones, draws=draws, acceptance=acceptance)


def first_two(tree, rows, generator):
    """The first two committed tokens if the target's distribution is P at every node."""
    nodes, most = tree.tokens.shape[1], tree.draws.child.shape[2]
    uniforms = torch.rand(rows, nodes, most, generator=generator)
    logits, standard = torch.tensor(P).log().expand(rows, nodes, -1), Settings([Sampling()] * rows, torch.device("cpu"))
    verdict = verify_sample(tree, logits, standard, uniforms, torch.rand(rows, generator=generator), 2)
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
    return replace(tree, draws=replace(tree.draws, child=child))


@pytest.mark.parametrize("certain", [False, pytest.param(True, marks=pytest.mark.whole_runs)])
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
    drafter = merged(small, drafters, rows)
    tree = proposed(drafter, rows, sampled=True)
    agree = (tree.valid.sum(1) < tree.valid.shape[1]).float().mean()
    assert agree > 0.1, "they often propose the same token"
    assert chi_square(first_two(tree, rows, generator)) > 1e-6
    assert chi_square(first_two(merged_to_a_set(tree), rows, generator)) < 1e-6
    rows = 60_000  # of a difference this large
    drafter = merged(small, drafters, rows)
    drafter._states = lambda state: [state] * len(drafters)
    assert chi_square(first_two(proposed(drafter, rows, sampled=True), rows, generator)) < 1e-6


def test_kept_nodes_do_not_depend_on_drawn_tokens(small):
    """The nodes of a deterministic source are the same whatever the others drew (C2)."""
    rows = 500
    sure = Given({(1,): 0.5, (0,): 0.4, (2,): 0.3, (3,): 0.2})
    for nodes, wanted in ((6, 3), (5, 2), (1000, 4)):
        drafter = merged(small, [Drawing(Q), sure], rows, nodes=nodes)
        tree = proposed(drafter, rows, sampled=True)
        kept = {
            tuple(sorted(int(tree.tokens[row, n]) for n in range(tree.tokens.shape[1]) if tree.source[row, n] & 2))
            for row in range(rows)
        }
        assert len(kept) == 1 and len(next(iter(kept))) == wanted
