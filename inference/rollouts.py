"""Teacher-forced drafts of all positions of a text at once: what a drafter's layer and LM head read at each depth, after
the true tokens before it, which it has drafted itself. Routers train on them, and shortlists are evaluated on them.

Shape letters: B batch, T tokens, P positions where a step begins, S tokens that the drafter chooses from, e width of
embeddings, d of hidden states.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Rollout:
    """One depth of drafts.

    tokens: ``[P]`` int64 of the nodes: the root's at depth 0, then the true tokens after it.
    hidden: ``[P, d]``, the hidden state that a router reads.
    out: ``[P, d]``, what the LM head reads.
    """

    tokens: Tensor
    hidden: Tensor
    out: Tensor


@dataclass(frozen=True)
class Drafts:
    """A drafter as shortlists are made for it.

    run: (tokens ``[B, T]``, supervised ``[B, T]``, as :func:`draftsmith.inference.answers.answer` returns them) → one
        :class:`Rollout` for each depth, of the P positions t whose next token is an answer's, row by row.
    embed: of the tokens that a router reads.
    head: its LM head, ``[…, d] → […, S]``.
    ids: ``[S]`` int64, the target's tokens of its rows; the first S if None.
    embedding_size, feature_size: e and d.
    shared: the LM head is the target's, or rows of it.
    """

    run: Callable[[Tensor, Tensor], Iterator[Rollout]]
    embed: nn.Module
    head: nn.Module
    ids: Tensor | None
    embedding_size: int
    feature_size: int
    shared: bool
