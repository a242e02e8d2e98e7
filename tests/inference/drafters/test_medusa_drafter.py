"""Medusa as a drafter: node by node from the heads' ranks, and end to end."""

import pytest
import torch

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.protocol import State
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.verify.tree import Topology, chain
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.models.medusa import MedusaHeads

PATHS = ((0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 0, 0), (0, 0, 4), (3, 1, 0), (3, 1, 0, 2))
PROMPTS = [[7, 3, 19, 44, 5], [9], [58, 1, 30, 12, 6, 6, 31, 40]]


IDS = torch.tensor([0, 3, 5, 6, 9, 19, 20, 31, 44, 58, 60])


def random_heads(target, projection, count=5, ids=None):
    heads = MedusaHeads.for_target(target, count, 1, projection, None if ids is None else len(ids))
    if ids is not None:
        heads.draft_from(ids, target)
    torch.manual_seed(3)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "draft vocabulary"])
@pytest.mark.parametrize("projection", ["own", "shared"])
@torch.no_grad()
def test_nodes_are_the_heads_ranks(make_target, projection, ids):
    target = make_target("llama")
    heads, topology = random_heads(target, projection, ids=ids), Topology(PATHS)
    matrices = heads.projections(target.lm_head)
    known = torch.arange(61) if ids is None else ids
    drafter = MedusaDrafter(heads, topology, target)
    assert (drafter.num_nodes, drafter.max_depth) == (11, 4)
    feature = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    root = torch.tensor([5, 0, 60])
    tree = drafter.propose(
        State(root, torch.tensor([4, 1, 9]), feature, torch.ones(3, dtype=torch.bool), None, torch.zeros_like(root))
    )
    mask = ancestor_mask(tree.ancestors, 11)
    nodes = [(), *topology.paths]
    for row in range(3):
        assert int(tree.tokens[row, 0]) == int(root[row])
        for node, path in enumerate(nodes):
            if path:
                own = matrices[len(path) - 1][0] @ heads.features(feature)[len(path) - 1, row]
                assert int(tree.tokens[row, node]) == int(known[own.argsort(descending=True)[path[-1]]])
                assert nodes[int(tree.parent[row, node])] == path[:-1]
            assert int(tree.depth[row, node]) == len(path)
            above = {nodes.index(path[:depth]) for depth in range(len(path) + 1)}
            assert set(mask[row, node].nonzero().flatten().tolist()) == above
    assert bool(tree.valid.all())


@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "draft vocabulary"])
@pytest.mark.parametrize("projection", ["own", "shared"])
@torch.no_grad()
def test_a_dynamic_trees_nodes_are_the_likeliest(make_target, projection, ids):
    """By the heads' probabilities, of all paths of four ranks a head."""
    target, shape = make_target("llama"), DynamicShape(4, 3, 12)
    heads = random_heads(target, projection, 3, ids)
    matrices, known = heads.projections(target.lm_head), torch.arange(61) if ids is None else ids
    drafter = MedusaDrafter(heads, shape, target)
    assert (drafter.num_nodes, drafter.max_depth, drafter.branching) == (12, 3, 4)
    feature, rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)), torch.ones(3, dtype=torch.bool)
    zeros = torch.zeros(3, dtype=torch.int64)
    tree = drafter.propose(State(torch.tensor([5, 0, 60]), zeros, feature, rows, None, zeros))
    assert tree.acceptance is not None and bool(tree.valid.all())
    for row in range(3):
        probability = {(): 1.0}
        for depth, (matrix, _) in enumerate(matrices):
            q = (matrix @ heads.features(feature)[depth, row]).softmax(0)
            best = [(int(known[place]), float(q[place])) for place in q.argsort(descending=True)[:4]]
            paths = [path for path in probability if len(path) == depth]
            probability |= {(*path, token): probability[path] * p for path in paths for token, p in best}
        found = [()]
        for node in range(1, 12):
            found.append((*found[int(tree.parent[row, node])], int(tree.tokens[row, node])))
        assert {*found} == {*sorted(probability, key=probability.__getitem__)[-12:]}
        assert tree.acceptance[row].tolist() == pytest.approx([probability[path] for path in found], rel=1e-4)


@pytest.mark.parametrize("paths", [(), ((0,),), PATHS], ids=["root alone", "one", "ten"])
def test_output_is_the_targets_own(make_target, greedy_texts, paths):
    """Heads that have learned nothing draft badly, but never change what is written."""
    target = make_target("llama")
    drafter = MedusaDrafter(random_heads(target, "shared"), Topology(paths), target)
    results = SpeculativeDecoder(target, drafter).generate(PROMPTS, 20, stop_ids=frozenset())
    assert [r.tokens for r in results] == greedy_texts(target, PROMPTS, 20)
    assert all(len(r.tokens) == 1 + sum(r.accepted) for r in results)


def test_tree_has_to_fit_the_heads(make_target):
    target = make_target("llama")
    heads = random_heads(target, "shared", 2)
    MedusaDrafter(heads, chain(2), target)
    with pytest.raises(ValueError, match="the tree is 3 deep, but there are 2 draft heads"):
        MedusaDrafter(heads, chain(3), target)
    MedusaDrafter(heads, Topology(((60,),)), target)
    with pytest.raises(ValueError, match="the tree asks for rank 61 of a vocabulary of 61"):
        MedusaDrafter(heads, Topology(((61,),)), target)
    with pytest.raises(ValueError, match="the tree asks for rank 11 of a vocabulary of 11"):
        MedusaDrafter(random_heads(target, "shared", 2, IDS), Topology(((11,),)), target)
    with pytest.raises(ValueError, match="the tree is 3 deep, but there are 2 draft heads"):
        MedusaDrafter(heads, DynamicShape(2, 3, 4), target)
    with pytest.raises(ValueError, match="dynamic tree: top_k is 12, but the drafter chooses from 11 tokens"):
        MedusaDrafter(random_heads(target, "shared", 2, IDS), DynamicShape(12, 2, 4), target)
