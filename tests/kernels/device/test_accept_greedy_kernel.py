"""Greedy acceptance in one launch against its definition, and what a step commits against the step's formula."""

import random

import pytest
import torch
from cases import depths, random_parents

from draftsmith.inference.verify.tree import StaticTree, TokenTree, bitsets
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.accept_greedy import accept_greedy, accept_greedy_reference, advance, advance_reference

VOCAB, MORE = 7, 4  # drafted tokens, and tokens that no node has
MARK = -99
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def scripted(tokens, parents, wanted, generator):
    """The target's choices of a row: random, but they follow the path to node ``wanted``, and nothing deeper."""
    choice = torch.randint(VOCAB, tokens.shape, generator=generator)
    node = wanted
    while node:
        choice[parents[node]] = tokens[node]
        node = parents[node]
    depth = depths(parents)
    ends = torch.randint(VOCAB, VOCAB + MORE, tokens.shape, generator=generator)
    return torch.where(depth >= depth[wanted], ends, choice)


def check(tree, choice, best, max_depth, dtype, device):
    """The kernel against the definition (against plain Python: tests/inference/verify/test_verify.py), whose verdict is
    returned, and what is committed against the step's formula, on logits that are ``best`` at ``choice``, both
    ``[B, N]``, and −∞ elsewhere."""
    rows, nodes = choice.shape
    logits = torch.full((rows, nodes, VOCAB + MORE), -torch.inf, dtype=dtype)
    logits.scatter_(2, choice[..., None], best.to(dtype)[..., None])
    best, choice = logits.max(-1)
    active = torch.arange(rows) % 3 != 1
    parts = choice, best, tree.tokens, tree.parent, tree.depth, tree.ancestors, tree.valid
    unused = torch.zeros(rows, max_depth + 2, dtype=torch.int64)
    verdict = Verdict(*accept_greedy_reference(*parts, active, unused, max_depth))
    drafted = tree.tokens.gather(1, verdict.path[:, 1:].clamp(max=nodes - 1))  # as Step.run writes them
    count = torch.where(verdict.finite, (verdict.length + 1) * active, -1)
    expected = torch.full((rows, max_depth + 5), MARK)
    expected[:, : max_depth + 2] = torch.cat([count[:, None], drafted, verdict.bonus[:, None]], 1)

    def wide(part):  # rows behind one another, not touching, unless they are one
        if part.stride(0) == 0:
            return part.to(device)[:1].expand(part.shape) if rows > 1 else part.to(device)
        padded = torch.cat([part, part[:, :3]], 1).to(device)
        return padded[:, : part.shape[1]]

    parts = [wide(part) for part in (choice, best, tree.tokens, tree.parent, tree.depth, tree.ancestors)]
    parts += [wide(tree.valid), active.to(device)]
    for function in (accept_greedy, accept_greedy_reference):
        committed = torch.full((rows, max_depth + 9), MARK, device=device)[:, : max_depth + 5]
        path, length, node, bonus, finite = function(*parts, committed, max_depth)
        wanted = (verdict.path, verdict.length, verdict.node, verdict.bonus, verdict.finite, expected)
        for found, one in zip((path, length, node, bonus, finite, committed), wanted, strict=True):
            assert found.dtype == one.dtype and torch.equal(found.cpu(), one), (function, found, one)
    return verdict


@pytest.mark.parametrize(
    ("nodes", "reach", "dtype"),
    [(2, 1, F32), (6, 1, F16), (13, 3, F32), (33, 40, BF16), (64, 9, F32)]
    + [(66, 5, F16), (150, 12, F32), (512, 40, F32)],
)
def test_every_accepted_length(nodes, reach, dtype, device):
    """Trees of all shapes, each row another tree, padded by different numbers of nodes, with equal siblings; one row
    for each depth that the target follows the tree to."""
    generator = torch.Generator().manual_seed(nodes)
    parts = []
    deep = random_parents(nodes, reach, random.Random(nodes))
    depth = depths(deep)
    deepest = int(depth.max())
    for wanted in range(deepest + 1):
        real = nodes if wanted == deepest else max(nodes - wanted, int((depth == wanted).nonzero()[0]) + 1)
        node = int((depth[:real] == wanted).nonzero()[-1])
        parents = deep[:real] + [0 if wanted % 2 else min(above, real - 1) for above in deep[real:]]
        tokens = torch.randint(VOCAB, (nodes,), generator=generator)
        choice = scripted(tokens, parents, node, generator)
        sets = bitsets(parents)
        if wanted % 2:
            sets[real:] = 0
            tokens[real:] = choice[0]  # would be accepted if it were valid
        parts.append((tokens, torch.tensor(parents), depths(parents), sets, torch.arange(nodes) < real, choice))
    tokens, parent, depth, sets, valid, choice = map(torch.stack, zip(*parts, strict=True))
    tree = TokenTree(tokens, parent.int(), depth, sets, valid)
    max_depth = max(deepest, int(depth.max())) + nodes % 2
    best = torch.randn(choice.shape, generator=generator)
    verdict = check(tree, choice, best, max_depth, dtype, device)
    assert verdict.length.tolist() == list(range(deepest + 1)) and verdict.finite.all()


def test_the_deepest_of_equal_siblings(device):
    """The second of two equal children has the longer path; of two nodes of one depth the first is taken; nothing
    below padding is accepted."""
    parents = [-1, 0, 0, 2, 3, 3, 1]
    tokens = torch.tensor([[0, 1, 1, 2, 3, 3, 4]]).repeat(5, 1)
    tokens[1, 3], tokens[2, 4] = 5, 5
    choice = torch.tensor([[1, 2, 2, 3, 5, 6, 0]]).repeat(5, 1)
    choice[3, 1] = 4  # node 6 is as deep as node 3
    choice[3, 3] = 6
    valid = torch.ones(5, 7).bool()
    valid[4, 2] = False
    depth, sets = depths(parents).expand(5, -1), bitsets(parents).expand(5, -1, -1)
    tree = TokenTree(tokens, torch.tensor(parents).int().expand(5, -1), depth, sets, valid)
    verdict = check(tree, choice, torch.ones(5, 7), 3, torch.float32, device)
    assert verdict.node.tolist() == [4, 1, 5, 3, 1] and verdict.length.tolist() == [3, 1, 3, 2, 1]


@pytest.mark.parametrize("rows", [1, 5])
def test_a_tree_of_fixed_shape(rows, device):
    """Its parts are one row that all rows of the batch share."""
    shape = StaticTree([-1, 0, 1, 2, 1, 0, 5, 6], torch.device("cpu"))
    generator = torch.Generator().manual_seed(rows)
    lengths = set()
    for wanted in (0, 1, 2, 3, 7):
        tokens = torch.randint(VOCAB, (rows, 8), generator=generator)
        choice = torch.stack([scripted(row, shape.parent[0].tolist(), wanted, generator) for row in tokens])
        tree = shape.fill(tokens)
        assert rows == 1 or tree.valid.stride(0) == 0
        verdict = check(tree, choice, torch.ones(rows, 8), 5, torch.float32, device)
        lengths |= set(verdict.length.tolist())
    assert lengths == {0, 1, 2, 3}


def test_the_root_alone(device):
    """Plain decoding, and a tree whose drafts are all padding; a root need not be valid."""
    for nodes, max_depth in ((1, 0), (1, 3), (4, 0)):
        sets = bitsets([-1] + [0] * (nodes - 1))
        sets[1:] = 0
        none = torch.zeros(3, nodes)
        tree = TokenTree(none.long() + 1, none.int() - 1, none.int(), sets.expand(3, -1, -1), none.bool())
        choice = torch.arange(3)[:, None].expand(-1, nodes).contiguous()
        best = torch.ones(3, nodes)
        best[2, 0] = torch.nan
        verdict = check(tree, choice, best, max_depth, torch.float32, device)
        assert verdict.length.tolist() == [0, 0, 0] and verdict.finite.tolist() == [True, True, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_that_are_not_finite_matter_on_the_path(dtype, value, device):
    """One bad node per row: on the path at each depth, beside it, and behind its end."""
    shape = StaticTree([-1, 0, 1, 2, 1, 0, 5, 6], torch.device("cpu"))
    tokens = torch.arange(8).remainder(VOCAB).repeat(8, 1)
    choice = torch.tensor([1, 2, 7, 0, 0, 0, 0, 0]).repeat(8, 1)  # accepts nodes 1 and 2
    best = torch.ones(8, 8).masked_fill(torch.eye(8).bool(), value)
    best[:, 3:] *= 2
    verdict = check(shape.fill(tokens), choice, best, 4, dtype, device)
    assert verdict.finite.tolist() == [False] * 3 + [True] * 5
    assert verdict.length.tolist() == ([0, 1] if value == -torch.inf else [2, 2]) + [2] * 6  # −∞: the choice is 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (5, 37), (9, 1030), (3, 2500)])
def test_advance(nodes, width, dtype, device):
    torch.manual_seed(width)
    rows = 5
    features = torch.randn(rows, nodes + 1, width + 3).to(dtype)[:, 1:, :width]
    features[:, :, width - 1 :] = torch.nan  # is copied like any other value
    node, length, bonus = torch.randint(nodes, (rows,)), torch.arange(rows), torch.randint(1000, (rows,))
    active = torch.tensor([True, False, True, True, False])
    wanted = features[torch.arange(rows), node]
    for function in (advance, advance_reference):
        lengths = torch.tensor([4, 0, 2**33, 1, 9], device=device)
        root = torch.full((rows,), MARK, device=device)
        feature = torch.full((rows, width + 2), -1.0, dtype=dtype, device=device)
        state = lengths, root, feature[:, :width]
        function(*state, features.to(device), *(part.to(device) for part in (node, bonus, length, active)))
        assert lengths.tolist() == [5, 0, 2**33 + 3, 5, 9] and torch.equal(root.cpu(), bonus)
        assert torch.equal(feature[:, :width].cpu().nan_to_num(9.0), wanted.nan_to_num(9.0))
        assert (feature[:, width:] == -1).all(), "nothing is written behind a row"
