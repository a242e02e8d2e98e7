"""The shortlists of a drafter while it decodes: which rows of the LM head a level of its tree computes.

One list serves all nodes of a level: a cluster's score is the highest of theirs, and a low-rank list has the candidates
of each. The LM head's rows are copied once in the order of :class:`~draftsmith.models.shortlist.ShortlistHead`, so that
a list is a few slabs of consecutive rows. On a GPU the router runs on a CUDA stream of its own, beside the drafter's
layer; a CUDA graph captures this order.

Shape letters: B rows, n nodes, e width of embeddings, d hidden width, M clusters, C
capacity, S tokens that the drafter chooses from.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from draftsmith.inference.trees.by_level import level_topk
from draftsmith.inference.trees.merged import ONE_STREAM
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.linear import apply_linear, kernel_weight
from draftsmith.kernels.shortlist_linear import shortlist_logits, shortlist_topk
from draftsmith.models.shortlist import ShortlistHead, head_rows_of
from draftsmith.models.target import Target


class Shortlists:
    """Shortlists of a drafter's LM head.

    Args:
        shortlist: is moved to the head's device and dtype.
        head: the drafter's LM head, ``[…, d] → […, S]``.
        ids: ``[S]`` int64, the target's tokens of the head's rows; the first S if None.
        after_head: :func:`after_head_of` the model of the head.

    Raises:
        ValueError: the head has other rows, or is no plain matrix.
    """

    def __init__(
        self,
        shortlist: ShortlistHead,
        head: nn.Module,
        ids: Tensor | None,
        after_head: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        weight = head_rows_of(head)
        if len(weight) != shortlist.config.outputs:
            raise ValueError(f"the shortlists order {shortlist.config.outputs} rows, and the LM head has {len(weight)}")
        if shortlist.low_rank and shortlist.config.feature_size != weight.shape[1]:
            raise ValueError(
                f"the shortlists' factors read {shortlist.config.feature_size} numbers, and the LM head reads "
                f"{weight.shape[1]}; train the shortlists again"
            )
        self.config, self.after_head = shortlist.config, after_head
        self.shortlist = shortlist.to(weight.device, weight.dtype)
        order = shortlist.order
        self.ids = order if ids is None else ids[order]
        in_order = torch.equal(order, torch.arange(len(order), device=order.device))
        self.weight = weight if in_order else weight[order]
        bias = getattr(head, "bias", None)
        self.bias = None if bias is None else bias.detach()[order]
        # By number of rows n: a linear layer on the first n rows of ``weight`` (a view), and their tokens.
        self.prefixes: dict[int, tuple[nn.Linear, Tensor]] = {}
        self.rows: Tensor | None = None  # [B, C] of the level being drafted; None: its first ``tokens(depth)`` rows
        self.depth = 0
        self.inputs: tuple[Tensor, ...] = ()  # that the router may still read on its stream

    def allocate(self, static: bool) -> None:
        """For steps; ``static`` as :meth:`~draftsmith.inference.engine.protocol.Drafter.allocate`."""
        device = self.weight.device
        self.static, self.stream = static, None
        if self.shortlist.router is not None and static and device.type == "cuda" and not os.environ.get(ONE_STREAM):
            self.stream = torch.cuda.Stream(device)

    def choose(self, embeddings: Tensor, hidden: Tensor, depth: int) -> None:
        """Choose the shortlist of a level's nodes by the embeddings ``[B, n, e]`` of their tokens and the hidden states
        ``[B, n, d]`` that the drafter continues from; :meth:`logits` has it next."""
        self.depth, self.rows = depth, None
        count = self.config.tokens(depth)
        if self.shortlist.router is None or count == len(self.ids):
            return
        if self.stream is None:
            self.rows = self._route(embeddings, hidden)
            return
        hidden = hidden.clone()  # the drafter's layer may add to its own in place
        self.inputs = embeddings, hidden  # if they were freed, the drafter's layer could write into their memory
        current = torch.cuda.current_stream(hidden.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.rows = self._route(embeddings, hidden)

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the LM head reads, ``[B, n, d]`` → logits ``[B, n, C]``, −inf in padding, and the target's tokens of
        these places: ``[C]``, or ``[B, C]`` with −1 in padding; int64."""
        rows = self.listed(hidden)
        if rows is None:
            head, ids = self._prefix(self.config.tokens(self.depth))
            logits = apply_linear(head, hidden)
            return logits if self.after_head is None else self.after_head(logits), ids
        padding = rows < 0
        logits = shortlist_logits(hidden, self.weight, rows, self.static)
        if self.bias is not None:
            logits = logits + self.bias[rows.clamp(min=0)][:, None]
        if self.after_head is not None:  # a cap would make padding finite
            logits = self.after_head(logits).masked_fill(padding[:, None], -torch.inf)
        return logits, self.ids[rows.clamp(min=0)].masked_fill(padding, -1)

    def topk(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Log probabilities and tokens ``[B, n, k]`` of each node's ``count`` best of the list, best first, by a kernel
        that writes no logits; None where none runs, or where the logits are more than a product."""
        if self.after_head is not None or self.bias is not None or why_not_triton(hidden):
            return None
        rows = self.listed(hidden)
        if rows is not None:
            return shortlist_topk(hidden, self.weight, rows, self.ids, count, log_q=True)
        head, ids = self._prefix(self.config.tokens(self.depth))
        weight = kernel_weight(head, hidden)
        return None if weight is None else level_topk(hidden, weight, count, ids)

    def listed(self, hidden: Tensor) -> Tensor | None:
        """The rows of the level's list, ``[B, C]``, −1 in padding; None: the first rows."""
        if self.shortlist.low_rank and self.config.tokens(self.depth) < len(self.ids):
            return self.shortlist.of_level(hidden, self.depth)
        if self.rows is not None and self.stream is not None:
            torch.cuda.current_stream(hidden.device).wait_stream(self.stream)
            self.inputs = ()
        return self.rows

    def _route(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        assert self.shortlist.router is not None
        dtype = self.weight.dtype
        scores = self.shortlist.router(embeddings.to(dtype), hidden.to(dtype), self.depth)  # [B, n, M]
        return self.shortlist.rows(scores.float().amax(1), self.depth).rows

    def _prefix(self, count: int) -> tuple[nn.Linear, Tensor]:
        """The LM head of the first ``count`` rows, and their tokens: the same objects each time."""
        if count not in self.prefixes:
            head = nn.Linear(self.weight.shape[1], count, self.bias is not None, device="meta").requires_grad_(False)
            head.weight = nn.Parameter(self.weight[:count], requires_grad=False)
            if self.bias is not None:
                head.bias = nn.Parameter(self.bias[:count], requires_grad=False)
            self.prefixes[count] = head, self.ids[:count]
        return self.prefixes[count]


def check_router(shortlist: ShortlistHead, embedding_size: int, feature_size: int) -> None:
    """Raise a ValueError if there is a router, and it reads vectors of other widths than a drafter's."""
    reads, own = shortlist.config, (embedding_size, feature_size)
    if shortlist.router is not None and (reads.embedding_size, reads.feature_size) != own:
        raise ValueError(
            f"the shortlists' router reads embeddings of {reads.embedding_size} and hidden states of "
            f"{reads.feature_size}, and the drafter has {own[0]} and {own[1]}; train the shortlists again"
        )


def after_head_of(target: Target) -> Callable[[Tensor], Tensor] | None:
    """The scale or cap of a model's logits, if there is one."""
    return target.after_head if target.changes_logits else None
