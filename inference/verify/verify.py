"""Verification: the path of a token tree that the target accepts, and the bonus token after it.

    greedy    a child is accepted iff it is the target's argmax (kernels/accept_greedy.py)
    sample    coupled sampling (algorithms.md §2.6): iff it is the argmax of log p + noise, which depends on the
              seed, the position in the text and the token alone. So a seed gives the same text by any drafter
    mss       SpecInfer's multi-step speculative sampling (algorithms.md §2): committed tokens have the distribution of
              plain sampling; which ones they are depends on the tree
    typical   Medusa's criterion (arXiv 2401.10774 §2.3.1): lossy, and reported as such

Where Triton runs, multi-step sampling works on the logits themselves, and the target's distribution is never written to
memory; penalties and biases still write the changed logits. Elsewhere, and in typical mode, p is a tensor
``[B, N, V]``.

Shape letters: B batch, b rows that begin, N nodes, K draws of a node, D depth of the deepest node, A = D + 1,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from draftsmith.inference.verify.sampling import (
    Noise,
    Rows,
    Sampling,
    Seen,
    Settings,
    penalised,
    row_numbers,
    sampling_distribution,
)
from draftsmith.inference.verify.tree import Draws, TokenTree, one_hot_draws
from draftsmith.kernels.accept_greedy import accepted_path
from draftsmith.kernels.distribution import philox_uniforms
from draftsmith.kernels.multi_step import verify_logits
from draftsmith.models.target import Target

Mode = Literal["greedy", "sample", "mss", "typical"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a tree, on the device.

    finite: ``[B]`` bool, False if the target's logits at a node of the path are NaN or +∞, or all −∞; nothing may be
        committed then.
    own_path: ``[B, A]`` int64, for a drafter whose tree was merged with others: the numbers of ``path`` in its own
        tree, −1 where it did not propose the node; None if the tree is its own.
    """

    path: Tensor  # [B, A] int64 node numbers by depth, the root (0) first; entry d beyond the accepted length is d
    length: Tensor  # [B] int64, number of accepted drafted tokens, the root excluded
    node: Tensor  # [B] int64, the last accepted node
    bonus: Tensor  # [B] int64, the target's token after it: the next root
    finite: Tensor
    own_path: Tensor | None = None


def verify_sample(
    tree: TokenTree,
    logits: Tensor,
    settings: Settings,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    max_depth: int,
    draws: Draws | None = None,
) -> Verdict:
    """Test each node's draws in order against the target's distribution p; draw the bonus token from the residual.

        r ← p;  for each draw (x, q):  accept x iff u < r[x] / q[x],  else  r ← norm((r − q)+);  bonus ~ r

    Committed tokens have the distribution of plain sampling if each draw comes from its q (algorithms.md §2).

    Args:
        logits: ``[B, N, V]`` of any float dtype, for the token after each node; penalised already if a penalty or
            bias is in use. The kernels compute p from them where they need it.
        settings: the sampling parameters but penalties and biases.
        uniforms, bonus_uniform: ``[B, N, K]`` and ``[B]`` float32 in [0, 1), fresh.
        max_depth: of any tree (A − 1).
        draws: the tree's own if left out; one-hot draws, at most K of a node, if it has none.
    """
    draws = draws or tree.draws or one_hot_draws(tree.parent, tree.valid, uniforms.shape[2])
    parts = draws.child, draws.kind, draws.q_row, draws.q
    random, uses = (uniforms, bonus_uniform), settings.uses[:3]
    return Verdict(*verify_logits(logits, *settings.filters, tree.tokens, *parts, *random, max_depth, draws.ids, uses))


def verify_typical(
    tree: TokenTree, mask: Tensor, p: Tensor, max_depth: int, epsilon: Tensor | float, delta: Tensor | float
) -> Verdict:
    """Accept a node iff ``p(x) > min(ε, δ·exp(−H(p)))`` at its parent, H in nats, and its parent is accepted.

    The longest accepted path wins, ties by Σ log p; the bonus token is the argmax (arXiv 2401.10774 §2.3.1). **Lossy.**

    Args:
        mask: ``[B, N, N]`` bool, row i True at the ancestors of i and at i.
        p: ``[B, N, V]`` float32, the target's distribution after each node; all NaN where its logits are not finite.
        epsilon, delta: ``[B, 1]``, or one number for all rows.
    """
    choice = p.argmax(-1)
    bound = torch.minimum(
        delta * (-torch.special.entr(p).sum(-1)).exp(), torch.as_tensor(epsilon, dtype=p.dtype, device=p.device)
    )
    parent = tree.parent.clamp(min=0).long()
    p_node = p.flatten(1).gather(1, parent * p.shape[2] + tree.tokens)  # [B, N], p(x) of each node
    agrees = (p_node > bound.gather(1, parent)) & tree.valid
    agrees[:, 0].fill_(True)
    p_node = torch.where(torch.arange(p_node.shape[1], device=p_node.device) == 0, 1.0, p_node)
    accepted = agrees & ~(mask & ~agrees[:, None, :]).any(-1)
    score = (mask * p_node.clamp(min=1e-30).log()[:, None, :]).sum(-1)  # Σ log p along each path, at least −70 per node
    depth = tree.depth.long()
    node = torch.where(accepted, depth.double() * 1e4 + score.double(), -torch.inf).argmax(-1)
    length, bonus = (part.gather(1, node[:, None])[:, 0] for part in (depth, choice))
    path, finite = accepted_path(mask, depth, node, p[..., 0], max_depth)
    return Verdict(path, length, node, bonus, finite)


class Verifier:
    """Verifier of one mode, with the sampling parameters, step count and seen tokens of each row's text."""

    def __init__(self, mode: Mode, rows: int, target: Target, branching: int) -> None:
        self.mode, self.target, self.branching = mode, target, branching
        self.settings = Settings([Sampling()] * rows, target.device, target.vocab_size)
        self.step = torch.zeros(rows, dtype=torch.int64, device=target.device)
        self.seen: Tensor | None = None  # [B, V] bool, the tokens of each text, from the first repetition penalty on
        # [B, V] int32, how often each token was generated, from the first presence or frequency penalty on
        self.counts: Tensor | None = None

    def begin(self, rows: Rows, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> None:
        """Start new texts in these rows."""
        if self.mode == "greedy":
            return
        self.step[rows] = 0
        self.settings.set_rows(rows, samplings)
        shape, device = (len(self.step), self.target.vocab_size), self.target.device
        # Texts that began before the first penalty have none, and do not need these.
        if self.settings.uses_penalty:
            if self.seen is None:
                self.seen = torch.zeros(shape, dtype=torch.bool, device=device)
            self.seen[rows] = False
            for row, prompt in zip(row_numbers(rows), prompts, strict=True):
                self.seen[row, torch.tensor(list(prompt), device=device)] = True
        if self.settings.uses_counts:
            if self.counts is None:
                self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self.counts[rows] = 0

    @property
    def graph_key(self) -> tuple[bool, ...]:
        """Everything in the verifier on which the operations of a step depend."""
        return () if self.mode == "greedy" else self.settings.uses

    def buffers(self) -> list[Tensor]:
        """Tensors that a step changes and the next one reads."""
        return [self.step, *(each for each in (self.seen, self.counts) if each is not None)]

    def first_tokens(self, logits: Tensor, rows: Rows, lengths: Tensor) -> Tensor:
        """Tokens ``[b]`` after the prompts of ``lengths [b]`` int64, from ``logits [b, V]``; −1 where these are NaN or
        +∞, or all −∞."""
        if self.mode == "greedy":
            best, token = logits.max(-1)
            return torch.where(best.isfinite(), token, -1)
        seen, settings = self._seen_in(rows), self.settings[rows]
        if self.mode == "sample":
            finite, _, found = Noise(settings, lengths).best(penalised(logits[:, None], settings, seen), -1)
            token, finite = found[:, 0, 0], finite[:, 0].isfinite()
        elif self.mode == "typical":
            p = sampling_distribution(logits[:, None], settings, seen)[:, 0]
            token, finite = p.argmax(-1), ~p[:, 0].isnan()
        else:  # the bonus tokens of trees of one node, without draws
            root = self.step[rows, None]  # in place of the tokens: not read
            uniform, none = philox_uniforms(settings.seed, self.step[rows], 1)[:, 0], root[..., None][..., :0]
            logits, uniforms = penalised(logits[:, None], settings, seen), uniform[:, None, None][..., :0]
            draws = none, none, none, None, uniforms, uniform
            *_, token, finite = verify_logits(logits, *settings.filters, root, *draws, 0, uses=settings.uses[:3])
        if self.settings.uses_penalty and self.seen is not None:
            self.seen[rows] = self.seen[rows].scatter(1, token[:, None], True)
        if self.settings.uses_counts and self.counts is not None:
            one = torch.ones_like(token[:, None], dtype=torch.int32)
            self.counts[rows] = self.counts[rows].scatter_add(1, token[:, None], one)
        return torch.where(finite, token, -1)

    @property
    def penalises(self) -> bool:
        """Whether a penalty is in use, which changes logits by the tokens before them."""
        return self.mode != "greedy" and (self.settings.uses_penalty or self.settings.uses_counts)

    def _seen_in(self, rows: Rows) -> Seen | None:
        """The tokens of the texts in some rows; None without a penalty."""
        if not self.penalises:
            return None
        used = self.seen if self.settings.uses_penalty else None, self.counts if self.settings.uses_counts else None
        return Seen(*(None if each is None else each[rows][:, None] for each in used))

    def _seen_at(self, tree: TokenTree, mask: Tensor | None) -> Seen | None:
        """The tokens of the text and of the path to each node; None without a penalty."""
        seen = self._seen_in(slice(None))
        if seen is None or tree.tokens.shape[1] == 1:
            return seen
        assert mask is not None
        return replace(seen, tokens=tree.tokens[:, 1:], path=mask[..., 1:])  # the root is part of the text

    def processed(self, logits: Tensor, rows: Rows, tokens: Tensor) -> Tensor:
        """Log-probabilities ``[b, P, V]`` float32 of the distributions that plain sampling draws from, after the nodes
        of some rows' paths; a greedy row's temperature counts as 1. ``logits``: ``[b, P, V]``, after the root and the
        nodes of ``tokens [b, P − 1]``, which follow it."""
        settings, seen, places = self.settings[rows], self._seen_in(rows), logits.shape[1]
        if settings.uses_greedy:
            settings.temperature = torch.where(settings.temperature > 0, settings.temperature, 1.0)
            settings.uses_greedy = False
        if seen is not None and places > 1:
            before = torch.ones(places, places - 1, dtype=torch.bool, device=logits.device).tril(-1)
            seen = replace(seen, tokens=tokens, path=before.expand(len(logits), -1, -1))
        return sampling_distribution(logits, settings, seen).log()

    def coupled(self, tree: TokenTree, mask: Tensor | None, logits: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """After each node a number that is finite iff the target's logits are, and its token by coupled sampling:
        ``[B, N]`` each, from its logits ``[B, N, V]``; ``mask [B, N, N]`` is read if :attr:`penalises`."""
        logits = penalised(logits, self.settings, self._seen_at(tree, mask))
        finite, _, token = Noise(self.settings, lengths).best(logits, tree.depth)
        return finite, token[..., 0]

    def verify(self, tree: TokenTree, mask: Tensor, logits: Tensor, max_depth: int) -> Verdict:
        """The verdict on a tree by multi-step sampling or typical acceptance, from ``logits [B, N, V]``; that of the
        other modes is :func:`~draftsmith.kernels.accept_greedy.accept_greedy`'s."""
        seen = self._seen_at(tree, mask)
        if self.mode == "typical":
            p = sampling_distribution(logits, self.settings, seen)
            epsilon, delta = self.settings.epsilon[:, None], self.settings.delta[:, None]
            return verify_typical(tree, mask, p, max_depth, epsilon, delta)
        rows, nodes = tree.tokens.shape
        draws = tree.draws or one_hot_draws(tree.parent, tree.valid, min(self.branching, nodes - 1))
        self.step += 1
        # The uniforms of a node do not depend on the tree's size, which other rows of the batch may change by padding.
        uniforms = philox_uniforms(self.settings.seed, self.step, 1 + nodes * self.branching)
        by_node = uniforms[:, 1:].view(rows, nodes, self.branching)[..., : draws.child.shape[2]]
        logits = penalised(logits, self.settings, seen)
        return verify_sample(tree, logits, self.settings, by_node, uniforms[:, 0], max_depth, draws)

    def mark_seen(self, tokens: Tensor, length: Tensor) -> None:
        """Record a step's tokens ``[B, D + 1]``: D drafted, of which ``length [B]`` are accepted, and the bonus, if
        a penalty is in use."""
        if not self.penalises:
            return
        place = torch.arange(tokens.shape[1], device=tokens.device)
        accepted = place < length[:, None]
        committed = torch.where(accepted, tokens, tokens[:, -1:])
        if self.settings.uses_penalty and self.seen is not None:
            self.seen.scatter_(1, committed, True)
        if self.settings.uses_counts and self.counts is not None:
            once = accepted | (place == tokens.shape[1] - 1)  # the bonus counts once
            self.counts.scatter_add_(1, committed, once.int())
