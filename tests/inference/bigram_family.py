"""A whole family of drafters that no shared file knows: the tokens that most often follow each token, in a fixed tree.

Shape letters: B rows, S sequences, T tokens, K depths, R followers kept per token, V vocabulary.
"""

import torch

from draftsmith.inference.drafters.load import Calibration, Part
from draftsmith.inference.drafters.protocol import Drafter
from draftsmith.inference.ranks import draft_labels, label_ranks
from draftsmith.inference.tree import StaticTree, chain, read_candidates, read_tree

DEPTH = 4


class BigramDrafter(Drafter):
    """Node of path (…, r): the r-th follower of its parent's token. ``table``: ``[V, R]`` int64."""

    static = True

    def __init__(self, table, topology, device, acceptances=None):
        self.table, self.topology = table.to(device), topology
        self.num_nodes, self.max_depth = topology.num_nodes, topology.max_depth
        self.branching = max(topology.parents.count(node) for node in range(topology.num_nodes))
        self.acceptance = None if acceptances is None else torch.tensor([[1.0, *acceptances]], device=device)

    def allocate(self, cache, max_depth, static):
        self.tree = StaticTree(self.topology.parents, self.table.device, max_depth)

    def propose(self, state):
        tokens = [state.root]  # [B] each
        for parent, path in zip(self.topology.parents[1:], self.topology.paths, strict=True):
            tokens.append(self.table[tokens[parent], path[-1]])
        acceptance = None if self.acceptance is None else self.acceptance.expand(len(state.root), -1)
        return self.tree.fill(torch.stack(tokens, 1), acceptance=acceptance)


def open_drafter(folder, config, weights, tree, merged):
    if tree is None:
        topology, acceptances = chain(DEPTH), None
    else:
        topology, acceptances = read_candidates(tree) if merged else (read_tree(tree), None)
    return Part(lambda target, costs, options: BigramDrafter(weights["table"], topology, target.device, acceptances))


def calibration(folder, config, weights):
    table = weights["table"]

    def ranks(target, tokens, supervised):
        before = [tokens.roll(-1 - depth, 1).long() for depth in range(DEPTH)]  # a draft's parent; the root is at t + 1
        best = torch.stack([table[tokens] for tokens in before], 2)  # [S, T, K, R]
        return label_ranks(best, draft_labels(tokens, supervised, DEPTH))

    return Calibration(DEPTH, ranks, lambda target, topology: BigramDrafter(table, topology, target.device))
