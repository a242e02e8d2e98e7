"""Medusa as a drafter: node by node from the heads' ranks, and end to end."""

import pytest
import torch

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.protocol import State
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.inference.tree import Topology, chain
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.models.medusa import MedusaHeads

PATHS = ((0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 0, 0), (0, 0, 4), (3, 1, 0), (3, 1, 0, 2))
PROMPTS = [[7, 3, 19, 44, 5], [9], [58, 1, 30, 12, 6, 6, 31, 40]]


def random_heads(target, projection, count=5):
    heads = MedusaHeads.for_target(target, count, 1, projection)
    torch.manual_seed(3)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return heads.requires_grad_(False)


@pytest.mark.parametrize("projection", ["own", "shared"])
@torch.no_grad()
def test_nodes_are_the_heads_ranks(make_target, projection):
    target = make_target("llama")
    heads, topology = random_heads(target, projection), Topology(PATHS)
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
                own = heads.head_logits(len(path) - 1, heads.features(feature)[len(path) - 1, row], target.lm_head)
                assert int(tree.tokens[row, node]) == int(own.argsort(descending=True)[path[-1]])
                assert nodes[int(tree.parent[row, node])] == path[:-1]
            assert int(tree.depth[row, node]) == len(path)
            above = {nodes.index(path[:depth]) for depth in range(len(path) + 1)}
            assert set(mask[row, node].nonzero().flatten().tolist()) == above
    assert bool(tree.valid.all())


@pytest.mark.parametrize("paths", [(), ((0,),), PATHS], ids=["root alone", "one", "ten"])
def test_output_is_the_targets_own(make_target, teach, paths):
    """Heads that have learned nothing draft badly, but never change what is written."""
    target = make_target("llama")
    drafter = MedusaDrafter(random_heads(target, "shared"), Topology(paths), target)
    results = SpeculativeDecoder(target, drafter).generate(PROMPTS, 20, stop_ids=frozenset())
    assert [r.tokens for r in results] == teach(target, PROMPTS, 20)
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
