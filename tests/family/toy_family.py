"""A whole family of drafters in one file, which no shared file knows: CONTRIBUTING.md walks through it.

The drafter is a table of the tokens that follow each token; it is trained as a factorised bigram model E · O.

    python tests/family/toy_family.py RECIPE [section.field=value ...] [--tiny] [--dry-run] [--resume | --restart]

Shape letters: B rows or batch, S sequences, T tokens, K depths, R followers kept per token, V vocabulary, d width.
"""

from functools import partial

from draftsmith.common.command import before_imports, recipe_parser, run_command
from draftsmith.common.field_types import Positive
from draftsmith.common.recipe import Section, read_recipe
from draftsmith.common.sections import DrafterRecipe
from draftsmith.inference.drafters.family import Loader
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.measure.calibrations import Calibration
from draftsmith.inference.measure.tree_statistics import best_tree, draft_labels, label_ranks, simulate
from draftsmith.inference.verify.tree import StaticTree, chain, read_candidates, read_tree
from draftsmith.train.dry_run import Plan, target_shape
from draftsmith.train.losses import shifted_labels

# ---- the recipe: its section ``drafter``; without torch


class Bigrams(Section):
    width: Positive = 16


class ToyRecipe(DrafterRecipe):
    drafter: Bigrams


PARSER = recipe_parser(__doc__, "recipes/tiny-medusa.yaml", "stages.0.steps=20", "two steps on a small random target")
read = lambda args: read_recipe(args.recipe, ToyRecipe, args.overrides)  # noqa: E731
RECIPE = before_imports(PARSER, read) if __name__ == "__main__" else None

import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.train.loop import fit
from draftsmith.train.script import Script, run_script

DEPTH, FOLLOWERS = 4, 3

# ---- training: the module with its loss, its evaluation, its stages


class Bigram(nn.Module):
    """P(next token | token) = softmax(E[token] · Oᵀ)."""

    def __init__(self, vocab_size, width):
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False)

    def count(self, batch):
        return (batch["labels"] != -100).sum().view(1)

    def labels(self, batch):
        return shifted_labels(batch["tokens"], batch["supervised"], 1, batch.get("segment"))  # [B, T]

    def forward(self, batch, counts, step):
        logits = self.out(self.embed(batch["tokens"].long()))  # [B, T, V]
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return total / counts[0].clamp(min=1), {}


def evaluate(module, held_out):
    ranks = follower_ranks(module.state_dict(), **held_out)
    return {"simulated_tau": simulate(best_tree(ranks, 8), ranks)}


def train(run):
    recipe, target = run.recipe, run.load_target()
    module = Bigram(target.vocab_size, recipe.drafter.width)
    run.start_weights(module, target)
    rows = run.read_rows(target)
    for stage in recipe.stages:
        fit(run, stage, module, rows, partial(evaluate, held_out=run.held_out), "simulated_tau")
    tree = best_tree(follower_ranks(module.state_dict(), **run.held_out), 8)
    run.export(recipe.drafter.model_dump(), module.state_dict(), target, evaluate(module, run.held_out), tree)


def plans(recipe):
    shape = target_shape(recipe.target)
    return [Plan.of(recipe, s, shape, 2 * shape.vocab_size * recipe.drafter.width) for s in recipe.stages]


# ---- decoding: the drafter, its loader, its calibration


class ToyDrafter(Drafter):
    """Node of path (…, r): the r-th follower of its parent's token. ``table``: ``[V, R]`` int64."""

    static = True

    def __init__(self, table, topology, device, acceptances=None):
        self.table, self.topology = table.to(device), topology
        self.num_nodes, self.max_depth = topology.num_nodes, topology.max_depth
        self.branching = max(topology.parents.count(node) for node in range(topology.num_nodes))
        self.acceptance = None if acceptances is None else torch.tensor([[1.0, *acceptances]], device=device)

    def allocate(self, cache, max_depth, static):
        self.tree = StaticTree(self.topology.parents, self.table.device)

    def propose(self, state):
        tokens = [state.root]  # [B] each
        for parent, path in zip(self.topology.parents[1:], self.topology.paths, strict=True):
            tokens.append(self.table[tokens[parent], path[-1]])
        acceptance = None if self.acceptance is None else self.acceptance.expand(len(state.root), -1)
        return self.tree.fill(torch.stack(tokens, 1), acceptance=acceptance)


def followers(weights):
    """``[V, R]`` int64, the most likely first."""
    return (weights["embed.weight"] @ weights["out.weight"].T).topk(FOLLOWERS, -1).indices.cpu()


def follower_ranks(weights, tokens, supervised):
    """``[S, T, K]``: the rank of the true token among the followers of the one before it."""
    before = [tokens.roll(-1 - depth, 1).long() for depth in range(DEPTH)]  # a draft's parent; the root is at t + 1
    best = torch.stack([followers(weights)[ids] for ids in before], 2)  # [S, T, K, R]
    return label_ranks(best, draft_labels(tokens, supervised, DEPTH))


HAS_TREE = True


def open_drafter(folder, config, weights, tree, merged):
    if tree is None:
        topology, acceptances = chain(DEPTH), None
    else:
        topology, acceptances = read_candidates(tree) if merged else (read_tree(tree), None)
    table = followers(weights)
    return Loader(lambda target, options: ToyDrafter(table, topology, target.device, acceptances))


def calibration(folder, config, weights):
    return Calibration(DEPTH, lambda target, tokens, supervised: follower_ranks(weights, tokens, supervised))


SCRIPT = Script("toy", ToyRecipe, train, plans)


def main():
    run_script(SCRIPT, PARSER, RECIPE)


if __name__ == "__main__":
    run_command(main, resumable=True)
