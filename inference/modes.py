"""Decoding modes: the first token and each step's verdict, greedily, by sampling, or by typical acceptance.

Where Triton runs, sampling works on the logits themselves, and the target's distribution is never written to memory;
a repetition penalty still writes the penalised logits. Elsewhere, and in typical mode, p is a tensor ``[B, N, V]``.

Shape letters: B rows, b rows that begin, N nodes, D depth of the deepest node, V vocabulary.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from draftsmith.inference.sampling import Sampling, Settings, penalised, sampling_distribution
from draftsmith.inference.tree import TokenTree, one_hot_draws
from draftsmith.inference.verify import Verdict, verify_greedy, verify_sample, verify_typical
from draftsmith.kernels import verify as kernels
from draftsmith.kernels.sampling import philox_uniforms
from draftsmith.models.target import Target

Mode = Literal["greedy", "sample", "typical"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Verifier:
    """Verifier of one mode, with the sampling parameters, step count and seen tokens of each row's text."""

    def __init__(self, mode: Mode, rows: int, target: Target, branching: int) -> None:
        self.mode, self.target, self.branching = mode, target, branching
        self.settings = Settings([Sampling()] * rows, target.device)
        self.step = torch.zeros(rows, dtype=torch.int64, device=target.device)
        self.seen: Tensor | None = None  # [B, V] uint8, the tokens of each text, from the first repetition penalty on

    def begin(self, rows: slice, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> None:
        """Start new texts in these rows."""
        if self.mode == "greedy":
            return
        self.step[rows] = 0
        for row, sampling in enumerate(samplings, rows.start):
            self.settings.set_row(row, sampling)
        if self.settings.uses_penalty:
            if self.seen is None:  # texts that began before have no penalty and do not need it
                self.seen = torch.zeros(
                    len(self.step), self.target.vocab_size, dtype=torch.uint8, device=self.target.device
                )
            self.seen[rows] = 0
            for row, prompt in enumerate(prompts, rows.start):
                self.seen[row, torch.tensor(list(prompt), device=self.target.device)] = 1

    def reset(self) -> None:
        """Clear the usage flags of the sampling parameters; no row holds a text."""
        self.settings.clear_usage()

    @property
    def graph_key(self) -> tuple[bool, ...]:
        """Everything in the verifier on which the operations of a step depend."""
        return () if self.mode == "greedy" else self.settings.uses

    def first_tokens(self, logits: Tensor, rows: slice) -> Tensor:
        """Tokens ``[b]`` after the prompts, from ``logits [b, V]``; −1 where these are NaN or +∞, or all −∞."""
        if self.mode == "greedy":
            best, token = logits.max(-1)
            return torch.where(best.isfinite(), token, -1)
        seen = None if self.seen is None else self.seen[rows, None].bool()
        settings = self.settings[rows]
        uniform = philox_uniforms(settings.seed, self.step[rows], 1)[:, 0]
        if self.mode == "typical":
            p = sampling_distribution(logits[:, None], settings, seen)[:, 0]
            token, finite = p.argmax(-1), ~p[:, 0].isnan()
        else:  # the bonus tokens of trees of one node, without draws
            s, root = settings, self.step[rows, None]  # in place of the tokens: not read
            none = root[..., None][..., :0]
            *_, token, finite = kernels.verify_logits(
                penalised(logits[:, None], s, seen), s.temperature, s.top_k, s.top_p, s.min_p, root, none, none, none,
                None, uniform[:, None, None][..., :0], uniform, 0, uses=s.uses[:3],
            )  # fmt: skip
        if self.seen is not None:
            self.seen[rows] = self.seen[rows].scatter(1, token[:, None], 1)
        return torch.where(finite, token, -1)

    def verify(self, tree: TokenTree, mask: Tensor, logits: Tensor, max_depth: int) -> Verdict:
        """The verdict on a tree, from ``logits [B, N, V]``."""
        if self.mode == "greedy":
            return verify_greedy(tree, mask, logits, max_depth)
        seen = None
        if self.seen is not None and self.settings.uses_penalty:  # tokens of the text, and of the path to each node
            seen = self.seen[:, None].repeat(1, mask.shape[1], 1)
            tokens = tree.tokens[:, None].expand(-1, mask.shape[1], -1)
            seen.scatter_reduce_(2, tokens, mask.expand(len(seen), -1, -1).to(torch.uint8), "amax")
            seen = seen.bool()
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
        """Record a step's tokens ``[B, D + 1]``: D drafted, of which ``length [B]`` are accepted, and the bonus."""
        if self.seen is not None and self.settings.uses_penalty:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            committed = torch.where(place < length[:, None], tokens, tokens[:, -1:])
            self.seen.scatter_(1, committed, 1)
