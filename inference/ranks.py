"""Trees of ranks, and what held-out text says of them: which tree of N nodes is best, and its mean accepted length τ.

A drafter with a fixed tree fills it by ranks: path (r_1, r_2, …) stands for its r_1-th best token at depth 1, then its
r_2-th best at depth 2, …. All that is needed of a text is the rank that the drafter gives, at each depth, to the true
token after the true ones before it: ``ranks [S, T, K]``.

A path's probability is the share of positions where all its ranks are the true ones: joint counts, no independence
assumed (Medusa, arXiv 2401.10774 §2.3.3, assumes it). A child never outnumbers its parent, so the N most frequent
paths *are* the best tree of N nodes.

Shape letters: S sequences, T tokens, K depths (draft heads), P positions.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.tree import Topology
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target

MAX_RANK = 10  # ranks per depth that a tree may use
CANDIDATES = 24  # paths that a merge may choose from
LOGITS = 512  # positions whose logits are in memory at once


def draft_labels(tokens: Tensor, supervised: Tensor, depth: int) -> Tensor:
    """The token that a draft of each depth has to be in order to be right.

    A step begins at position t if token t + 1, its root, is an answer's; its draft of depth k then has to be x_{t+k+1}.

    Args:
        tokens, supervised: ``[S, T]`` as :func:`draftsmith.inference.answers.answer` returns them.
        depth: K.

    Returns:
        ``[S, T, K]`` int64; −1 where no step begins or where the same answer has no such token.
    """
    length = tokens.shape[1]
    labels = torch.full((*tokens.shape, depth), -1, dtype=torch.int64)
    reached = supervised[:, 1:].clone()  # every token up to the label is the same answer's
    for k in range(min(depth, length - 2)):
        reached = reached[:, : length - k - 2] & supervised[:, k + 2 :]
        labels[:, : length - k - 2, k] = torch.where(reached, tokens[:, k + 2 :].long(), -1)
    return labels


def label_ranks(best: Tensor, labels: Tensor) -> Tensor:
    """The place of each label among a drafter's best tokens.

    Args:
        best: ``[…, R]`` int64 token ids, the most likely first, R ≤ :data:`MAX_RANK`.
        labels: ``[…]`` int64, −1 where there is none.

    Returns:
        ``[…]`` int64: the rank, :data:`MAX_RANK` if the label is not among them, −1 where there is no label.
    """
    match = best == labels[..., None]
    ranks = torch.where(match.any(-1), match.int().argmax(-1), MAX_RANK)
    return torch.where(labels >= 0, ranks, -1)


@torch.inference_mode()
def head_ranks(
    target: Target,
    heads: MedusaHeads,
    tokens: Tensor,
    supervised: Tensor,
    batch_size: int = 16,
    on_done: Callable[[int], None] | None = None,
) -> Tensor:
    """The rank that each Medusa head gave to the true token.

    Args:
        tokens, supervised: ``[S, T]`` as :func:`draftsmith.inference.answers.answer` returns them.
        on_done: called with the number of sequences done so far.

    Returns:
        ``[S, T, K]`` int64: at position t, head k's rank of x_{t+k+1}; ``MAX_RANK`` if it is not among the best (nor
        among the draft vocabulary), −1 where there is no such label or where position t + 1 is no answer's token (no
        step begins there).
    """
    sequences, num_heads = len(tokens), heads.config.num_draft_heads
    ranks = torch.full((*tokens.shape, num_heads), -1, dtype=torch.int64)
    top, draft_head = min(MAX_RANK, heads.config.outputs), heads.draft_head(target.lm_head)
    for start in range(0, sequences, batch_size):
        part = slice(start, start + batch_size)
        begins = torch.zeros_like(supervised[part])
        begins[:, :-1] = supervised[part, 1:]
        hidden = target.hidden(tokens[part].long().to(target.device))[begins.to(target.device)]  # [P, d]
        features = heads.features(hidden.to(heads.weight.dtype))
        labels = draft_labels(tokens[part], supervised[part], num_heads)
        for k in range(num_heads):
            logits = (heads.head_logits(k, chunk, draft_head) for chunk in features[k].split(LOGITS))
            best = torch.cat([heads.tokens(chunk.topk(top, -1).indices).cpu() for chunk in logits])  # [P, top]
            ranks[part, :, k][begins] = label_ranks(best, labels[..., k][begins])
        if on_done:
            on_done(min(start + batch_size, sequences))
    return ranks


def path_counts(ranks: Tensor) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each rank path was right as a whole, and the number of positions that have a label at every depth."""
    full = ranks[(ranks >= 0).all(-1)]
    counts: Counter[tuple[int, ...]] = Counter()
    for row in full.tolist():
        for depth, rank in enumerate(row):
            if rank >= MAX_RANK:
                break
            counts[tuple(row[: depth + 1])] += 1
    return counts, len(full)


def best_tree(ranks: Tensor, nodes: int) -> Topology:
    """The tree of at most ``nodes`` nodes (root included) with the highest expected accepted length.

    Raises:
        ValueError: there is no position to count on.
    """
    counts, positions = path_counts(ranks)
    if not positions:
        raise ValueError("no calibration position: every answer is shorter than the drafts are deep")
    # Ties go to the shorter path, so that no child comes without its parent.
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return Topology(tuple(order[: nodes - 1]))


def candidates(ranks: Tensor) -> list[dict[str, Any]]:
    """The most frequent paths and their frequencies: a merge with other drafters chooses its nodes from them."""
    counts, positions = path_counts(ranks)
    paths = best_tree(ranks, CANDIDATES + 1).paths
    return [{"path": list(path), "rate": round(counts[path] / positions, 4)} for path in paths]


def accuracy(ranks: Tensor) -> list[list[float]]:
    """By depth and rank, the share of labels that had this rank: ``[K][MAX_RANK]``."""
    return [
        [round(float((ranks[..., k] == r).sum() / (ranks[..., k] >= 0).sum()), 4) for r in range(MAX_RANK)]
        for k in range(ranks.shape[-1])
    ]


def simulate(topology: Topology, ranks: Tensor) -> float:
    """Mean accepted length τ (bonus token included) of a tree, by walking the sequences step by step: exact for greedy
    decoding, since the sequences are the target's own.

    Args:
        ranks: ``[S, T, K]`` as :func:`head_ranks` returns them.
    """
    known = set(topology.paths)
    tokens = steps = 0
    for row in ranks.tolist():
        begins = [t for t, at in enumerate(row) if at[0] >= 0]
        if not begins:
            continue
        t, end = begins[0], begins[-1]
        while t <= end:
            if row[t][0] < 0:  # between two answers, or an answer's last token
                t += 1
                continue
            accepted = 0
            while accepted < len(row[t]) and tuple(row[t][: accepted + 1]) in known:
                accepted += 1
            tokens += min(accepted, end - t) + 1  # a bonus token behind the text's end is not committed
            steps, t = steps + 1, t + accepted + 1
    return tokens / steps if steps else 0.0
