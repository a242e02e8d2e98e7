"""Losses: label shift, cross-entropy, normalisation per valid token.

Shape letters: B batch, T tokens, d hidden width, V vocabulary, P positions in a chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

HEAD_DECAY = 0.8  # weight of Medusa head k in the loss: 0.8^k (arXiv 2401.10774 §2.2.1)
LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}  # logits that exist at one time; on a CPU, what malloc keeps and re-uses


def shifted_labels(tokens: Tensor, supervised: Tensor, shift: int, segment: Tensor | None = None) -> Tensor:
    """Labels of a head that reads position t and predicts x_{t+shift}; −100 where there is none.

    Args:
        tokens: ``[B, T]`` token ids.
        supervised: ``[B, T]`` bool, True where the token itself may be a label (an answer's token, no padding).
        shift: 1 for the LM head, k + 1 for Medusa head k (arXiv 2401.10774 §2.1).
        segment: ``[B, T]``, which sample of its row a token belongs to; no label crosses from one into the next.

    Returns:
        ``[B, T]`` int64 labels, aligned with the position that predicts them.
    """
    labels = torch.full(tokens.shape, -100, dtype=torch.int64, device=tokens.device)
    if shift < tokens.shape[1]:
        wanted = supervised[:, shift:]
        if segment is not None:
            wanted = wanted & (segment[:, shift:] == segment[:, :-shift])
        labels[:, :-shift] = torch.where(wanted, tokens[:, shift:].long(), -100)
    return labels


def chunked_cross_entropy(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, vocab_size: int, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy and correct top-1 predictions, with the logits of ``chunk`` positions alive at a time
    (by default as many as keep :data:`LOGITS` values).

    Chunks run under activation checkpointing: their logits are made again in the backward pass. Without gradients the
    same code simply runs.

    Args:
        logits_of: the LM head (a module, so that sharded or adapted ones work), ``[P, d] → [P, V]``.
        hidden: ``[..., d]``.
        labels: ``[...]``, −100 where there is no label.

    Returns:
        (sum of the losses in fp32, number of labels that were the argmax), both scalars.
    """
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)

    def one(part: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(part).float()
        loss = F.cross_entropy(logits, label, ignore_index=-100, reduction="sum")
        return loss, (logits.argmax(-1) == label).sum()

    chunk = chunk or max(1, LOGITS.get(hidden.device.type, LOGITS["cuda"]) // vocab_size)
    if flat.shape[0] <= chunk:
        return one(flat, wanted)
    losses, hits = [], []
    for part, label in zip(flat.split(chunk), wanted.split(chunk), strict=True):
        loss, hit = torch.utils.checkpoint.checkpoint(one, part, label, use_reentrant=False)
        losses.append(loss)
        hits.append(hit)
    return torch.stack(losses).sum(), torch.stack(hits).sum()
