"""Greedy verification against a walk in plain Python, on random trees."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.tree import StaticTree, TokenTree, Topology, bitsets
from draftsmith.inference.verify import verify_greedy
from draftsmith.kernels.tree_attention import ancestor_mask

VOCAB = 3


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
    """All nodes that greedy decoding would pass through, found from the root down; duplicates go side by side."""
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
        parts.append(
            (
                tokens,
                torch.tensor(parents),
                torch.tensor(depth),
                sets,
                valid,
                torch.randn(nodes, VOCAB, generator=generator),
            )
        )
    tokens, parent, depth, sets, valid, logits = map(torch.stack, zip(*parts, strict=True))
    max_depth = int(depth.max()) + spare
    tree = TokenTree(tokens, parent.int(), depth.int(), sets, valid)
    verdict = verify_greedy(tree, ancestor_mask(sets, nodes), logits, max_depth)
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


def test_every_length_is_accepted_and_rejected():
    """A chain of four whose first mistake is at each depth in turn."""
    parent = torch.arange(-1, 4, dtype=torch.int32).expand(5, -1)
    truth = torch.tensor([4, 2, 0, 1, 3])
    tokens = truth.repeat(5, 1)
    for row in range(1, 5):
        tokens[row - 1, row] = 5
    logits = torch.nn.functional.one_hot(torch.tensor([2, 0, 1, 3, 1]), 6).float().expand(5, -1, -1)
    depth, sets = torch.arange(5, dtype=torch.int32).expand(5, -1), bitsets([-1, 0, 1, 2, 3])[None].expand(5, -1, -1)
    tree = TokenTree(tokens, parent, depth, sets, torch.ones(5, 5, dtype=torch.bool))
    verdict = verify_greedy(tree, ancestor_mask(sets, 5), logits, 4)
    assert verdict.length.tolist() == verdict.node.tolist() == [0, 1, 2, 3, 4]
    assert verdict.bonus.tolist() == [2, 0, 1, 3, 1]
    assert verdict.path.tolist() == [[0, 1, 2, 3, 4]] * 5


def test_a_static_trees_paths_are_those_of_its_mask():
    torch.manual_seed(0)
    shape = StaticTree(Topology(((0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0), (1, 0, 0))), torch.device("cpu"))
    tree = shape.fill(torch.randint(VOCAB, (400, 8)))
    logits = torch.randn(400, 8, VOCAB)
    known, found = (verify_greedy(t, tree.mask, logits, 3) for t in (tree, replace(tree, paths=None)))
    for name in ("path", "length", "node", "bonus"):
        assert torch.equal(getattr(known, name), getattr(found, name)), name
    assert set(known.length.tolist()) == {0, 1, 2, 3}
