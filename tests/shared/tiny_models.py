"""Tiny draft models, draft heads and shortlists, derived from a tiny target, and the trees that they draft."""

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from lossless_suite import SMALL
from torch import Tensor

from draftsmith.inference.verify.tree import Topology
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.models.artifact import write_drafter
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead
from draftsmith.models.target import Target

# Unequal depths, a leaf before a node with a child in the first level, and a rank that is left out.
SPARSE = Topology(((0,), (0, 0), (0, 0, 0), (0, 2), (1,), (2,), (2, 0), (2, 0, 0)))
# Eleven paths, and the rates at which they are accepted.
PATHS = ((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 1), (0, 1, 0), (1,), (1, 0), (1, 1), (2,), (2, 0))
RATES = (0.6, 0.3, 0.2, 0.05, 0.1, 0.04, 0.2, 0.1, 0.03, 0.1, 0.02)


def perturbed(target: Target, noise: float = 0.04, vocabulary: int = 0, seed: int = 1, **config: object) -> Target:
    """A copy of the target with noise on its weights, in their standard deviations (200 times as much for the suite's
    small vocabulary), optionally with another vocabulary size and other fields of its config."""
    noise *= 200 if target.vocab_size == SMALL else 1
    model = copy.deepcopy(target.model)
    if vocabulary:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    for name, value in config.items():
        setattr(model.config, name, value)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_((torch.randn(weight.shape, generator=generator) * noise * weight.cpu().std()).to(weight.device))
    return Target(model, None, "draft", "")


def write_ensemble(folder: Path, target: Target, noises: Sequence[float], ids: Tensor | None) -> Path:
    """A folder of SSMs that are the target with noise on its weights, with a draft vocabulary ``ids``; of its marks, 4
    tokens."""
    count = len(noises)
    parts = [f"ssm-{number}" for number in range(count)]
    for number, (part, noise) in enumerate(zip(parts, noises, strict=True)):
        perturbed(target, noise, seed=number).model.save_pretrained(folder / part)
        target.tokenizer.save_pretrained(folder / part)
    shape = {
        "num_ssms": count,
        "draft_vocab_size": None if ids is None else len(ids),
        "vocab_size": target.vocab_size,
        "mark_tokens": 4,
        "coverage": [0.25, 0.375, 0.5][:count],
        "overlap": [[1.0 if i == j else 0.5 for j in range(count)] for i in range(count)],
    }
    write_drafter(folder, "ssm", shape, {} if ids is None else {"draft_vocab": ids}, target, {}, parts=parts)
    return folder


def some_ids(target: Target) -> Tensor:
    """A draft vocabulary of four fifths of the target's ids."""
    return torch.tensor([token for token in range(target.vocab_size) if token % 5 != 2], device=target.device)


def noisy_heads(
    target: Target,
    noise: float,
    projection: Literal["own", "shared"] = "own",
    *,
    seed: int = 1,
    layers: int = 1,
    ids: Tensor | None = None,
) -> MedusaHeads:
    """Three heads near the LM head, which a random target's own text agrees with now and then; ``ids``: of a draft
    vocabulary."""
    torch.manual_seed(seed)
    heads = MedusaHeads.for_target(target, 3, layers, projection, None if ids is None else len(ids))
    if ids is not None:
        heads.draft_from(ids, target)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter) * noise)
    return heads.requires_grad_(False)


def random_shortlists(config: ShortlistConfig, starts: Sequence[int] = ()) -> ShortlistHead:
    """In a random order, with a random router or random factors; ``starts``: of its clusters."""
    torch.manual_seed(5)
    head = ShortlistHead(config)
    head.order.copy_(torch.randperm(config.outputs))
    if head.router is not None:
        head.starts.copy_(torch.tensor(starts))
        with torch.no_grad():
            for weight in head.router.parameters():
                weight.normal_(std=0.5)
    if head.low_rank:
        head.down.normal_()
        head.up.normal_()
    return head.eval().requires_grad_(False)


def random_starts(clusters: int, outputs: int) -> list[int]:
    """Of clusters of random sizes."""
    cuts = torch.randperm(outputs - 1, generator=torch.Generator().manual_seed(4))[: clusters - 1] + 1
    return [0, *sorted(cuts.tolist()), outputs]


def listed_tokens(
    head: ShortlistHead, ids: Tensor, depth: int, scores: Tensor | None, seen: Counter[object] | None = None
) -> list[int]:
    """The target's tokens of a level's shortlist, in plain Python.

    Args:
        ids: of the LM head's rows, in the target's vocabulary.
        scores: of the level's clusters, ``[M]``; of a low-rank list those of the rows, ``[n, S]``.
        seen: counts a list for which a wanted cluster did not fit whole.
    """
    config, tokens = head.config, ids[head.order].tolist()
    capacity = config.capacity[min(depth, len(config.capacity) - 1)]
    if head.low_rank and scores is not None and capacity < len(tokens):  # of the rows, by node
        return [*{tokens[row] for node in scores for row in node.topk(capacity).indices.tolist()}]
    if scores is None or capacity == len(tokens):
        return tokens[:capacity]
    wanted = config.clusters[min(depth, len(config.clusters) - 1)]
    taken: list[int] = []
    for cluster in sorted(range(len(scores)), key=lambda cluster: -float(scores[cluster]))[:wanted]:
        slab = tokens[head.starts[cluster] : head.starts[cluster + 1]]
        if len(taken) + len(slab) > capacity:
            if seen is not None:
                seen["dropped"] += 1
            return (taken + slab)[:capacity]
        taken += slab
    return taken


def paths_of(tree, row, root=None):
    """The paths of a row's valid nodes; checks parents, depths, ancestors and, if given, the root's token."""
    tokens, parent, depth = tree.tokens[row].tolist(), tree.parent[row].tolist(), tree.depth[row].tolist()
    seen = ancestor_mask(tree.ancestors, len(tokens))[row].tolist()
    paths, above = [()], [{0}]
    assert parent[0] == -1 and depth[0] == 0 and bool(tree.valid[row, 0]) and root in (None, tokens[0])
    for node in range(1, len(tokens)):
        assert 0 <= parent[node] < node
        paths.append((*paths[parent[node]], tokens[node]))
        above.append({*above[parent[node]], node})
        assert {number for number, each in enumerate(seen[node]) if each} == above[node]
        assert depth[node] == len(paths[node])
    valid = tree.valid[row].tolist()
    assert valid == sorted(valid, reverse=True)  # padding is last
    return paths[: sum(valid)]
