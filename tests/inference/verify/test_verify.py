"""Greedy verification against a walk in plain Python, on random trees."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.verify.sampling import Noise, Sampling, Settings, sampling_distribution
from draftsmith.inference.verify.tree import StaticTree, TokenTree, Topology, bitsets
from draftsmith.inference.verify.verify import Verdict, verify_sample, verify_typical
from draftsmith.kernels.accept_greedy import accept_greedy
from draftsmith.kernels.tree_attention import ancestor_mask

VOCAB = 3

SEVEN = Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (1, 0, 0)))


def verify_greedy(tree, logits, max_depth, mask=None, noise=None):
    """The verdict by argmax of the logits or, in coupled sampling, of the scores."""
    best, choice = logits.max(-1)
    if noise is not None:
        best, _, found = noise.best(logits, tree.depth)
        choice = found[..., 0]
    parts = tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.valid
    active = torch.ones(len(choice), dtype=torch.bool)
    committed = torch.zeros(len(choice), max_depth + 2, dtype=torch.int64)
    return Verdict(*accept_greedy(choice, best, *parts, active, committed, max_depth, mask))


@st.composite
def trees(draw):
    """Rows of one tree each: (parent, valid, bare, token, choice) per node; only the last nodes are padding."""
    nodes = draw(st.sampled_from([1, 2, 5, 12, 33, 66]))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 6))
        parents = [-1] + [draw(st.integers(max(0, node - width), node - 1)) for node in range(1, nodes)]
        real = draw(st.integers(1, nodes))
        seed = draw(st.integers(0, 2**32 - 1))
        rows.append((parents, real, draw(st.booleans()), seed))
    return nodes, rows, draw(st.integers(0, 3))


def walk(parents, tokens, choice, real):
    """All nodes that greedy decoding passes through, from the root down; equal siblings all count."""
    accepted = {0}
    for node in range(1, real):
        if parents[node] in accepted and tokens[node] == choice[parents[node]]:
            accepted.add(node)
    return accepted


@settings(max_examples=150, deadline=None, derandomize=True)
@given(trees())
def test_verify_greedy(case):
    nodes, rows, spare = case
    parts = []
    for parents, real, bare, seed in rows:
        parents = parents[:real] + [0 if bare else min(above, real - 1) for above in parents[real:]]
        depth = [0]
        for above in parents[1:]:
            depth.append(depth[above] + 1)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCAB, (nodes,), generator=generator)
        tokens[real:] = 0
        sets = bitsets(parents)
        if bare:
            sets[real:] = 0
        valid = torch.arange(nodes) < real
        logits = torch.randn(nodes, VOCAB, generator=generator)
        parts.append((tokens, torch.tensor(parents), torch.tensor(depth), sets, valid, logits))
    tokens, parent, depth, sets, valid, logits = map(torch.stack, zip(*parts, strict=True))
    max_depth = int(depth.max()) + spare
    tree = TokenTree(tokens, parent.int(), depth.int(), sets, valid)
    verdict = verify_greedy(tree, logits, max_depth, ancestor_mask(sets, nodes) if spare else None)
    assert verdict.path.shape == (len(rows), max_depth + 1)
    for row, (_, real, _, _) in enumerate(rows):
        choice, above = logits[row].argmax(-1).tolist(), parent[row].tolist()
        accepted = walk(above, tokens[row].tolist(), choice, real)
        length, node = int(verdict.length[row]), int(verdict.node[row])
        assert length == max(int(depth[row, n]) for n in accepted)
        assert node in accepted and int(depth[row, node]) == length
        path = [node]
        while above[path[0]] >= 0:
            path.insert(0, above[path[0]])
        assert verdict.path[row].tolist() == path + list(range(length + 1, max_depth + 1))
        assert int(verdict.bonus[row]) == choice[node]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("mode", ["greedy", "sample", "mss", "temperature 0", "min_p", "typical"])
def test_logits_that_are_not_finite_matter_on_the_path(mode, value):
    """One node with bad logits in each tree; some are on the accepted path, at every depth."""
    torch.manual_seed(0)
    rows, nodes, vocabulary = 1000, 8, 3
    shape = StaticTree(SEVEN.parents, torch.device("cpu"))
    tokens = torch.randint(vocabulary, (rows, nodes))
    tokens[:, [5, 4]] = (tokens[:, [1, 2]] + 1) % vocabulary  # siblings differ
    tree = shape.fill(tokens)
    sampling = {"temperature 0": Sampling(temperature=0), "min_p": Sampling(min_p=0.1)}.get(mode, Sampling())
    settings = Settings([sampling, Sampling()] * (rows // 2), torch.device("cpu"))
    uniforms = torch.rand(rows, nodes, 2), torch.rand(rows)

    def verify(logits):
        if mode == "greedy":
            return verify_greedy(tree, logits, 3, tree.mask)
        if mode == "sample":
            return verify_greedy(tree, logits, 3, tree.mask, Noise(settings, torch.arange(rows)))
        if mode == "typical":
            return verify_typical(tree, tree.mask, sampling_distribution(logits, settings), 3, 0.2, 0.45)
        return verify_sample(tree, logits, settings, *uniforms, 3)

    clean = torch.randn(rows, nodes, vocabulary)
    before = verify(clean)
    assert before.finite.all()
    bad = torch.randint(nodes, (rows,))
    logits = clean.clone()
    logits[torch.arange(rows), bad, torch.randint(vocabulary, (rows,))] = value
    verdict = verify(logits)
    depths = set()
    for row in range(rows):
        one = int(bad[row])
        path = verdict.path[row, : int(verdict.length[row]) + 1].tolist()
        assert bool(verdict.finite[row]) == (one not in path)
        if one in path:
            depths.add(path.index(one))
        if mode != "typical":  # may take another path
            assert (one in path) == (one in before.path[row, : int(before.length[row]) + 1])
            if one not in path:
                assert torch.equal(verdict.path[row], before.path[row]) and verdict.bonus[row] == before.bonus[row]
        assert 0 <= int(verdict.bonus[row]) < vocabulary, "a valid token id for the next static step"
    assert depths >= ({0, 3} if mode == "typical" else {0, 1, 2, 3})


@pytest.mark.parametrize("mode", ["greedy", "sample", "mss", "typical"])
def test_padding_is_never_accepted(mode):
    """A chain of tokens that the target is certain of, whose last nodes are padding."""
    shape = StaticTree(Topology(((0,), (0, 0), (0, 0, 0))).parents, torch.device("cpu"))
    tree = shape.fill(torch.tensor([[1, 0, 0, 0]] * 4))
    valid = torch.arange(4) < torch.tensor([1, 2, 3, 4])[:, None]
    tree = replace(tree, static=None, valid=valid, draws=None, parent=torch.where(valid, tree.parent, 0))
    logits = torch.zeros(4, 4, VOCAB).index_fill(2, torch.tensor([0]), 50.0)
    settings = Settings([Sampling()] * 4, torch.device("cpu"))
    p = sampling_distribution(logits, settings)
    uniforms = torch.rand(4, 4, 2), torch.rand(4)  # K = 2 is enough: no node has more than one draw
    verdict = {
        "greedy": lambda: verify_greedy(tree, logits, 3, shape.mask),
        "sample": lambda: verify_greedy(tree, logits, 3, shape.mask, Noise(settings, torch.arange(4))),
        "mss": lambda: verify_sample(tree, logits, settings, *uniforms, 3),
        "typical": lambda: verify_typical(tree, shape.mask.expand(4, -1, -1), p, 3, 0.09, 0.3),
    }[mode]()
    assert verdict.length.tolist() == [0, 1, 2, 3]
