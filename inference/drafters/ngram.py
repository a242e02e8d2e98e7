"""N-gram drafter (prompt lookup): drafts what followed earlier occurrences of the text's last tokens.

    match:          an earlier place in the text whose last tokens equal those that end in the root; the longest matches
                    are used, of equally long ones the most recent
    continuation:   the tokens after the match; where they reach the end of the text, they repeat periodically
    tree:           one continuation for each match; continuations with a common beginning share its nodes

There are no weights, and drafts are deterministic.

Shape letters: B rows, S slots, G tokens of the longest match, C continuations, D depth, N nodes, E classes of matches,
W 64-bit words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk, to_device
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.trees.list_tree import ListTree, ListTreeBuilder, kept_nodes
from draftsmith.inference.verify.sampling import Rows
from draftsmith.inference.verify.tree import TokenTree
from draftsmith.inference.verify.verify import Verdict
from draftsmith.models.target import Target

# Acceptance probability of a drafted token, given that those before it in the continuation are accepted. It depends on
# the length of the match at that token, earlier tokens of the continuation included: the fourth token after a match of
# 2 is accepted as often as the first after a match of 5 (0.84 and 0.85 greedily). The first token by which a further
# continuation differs from the earlier ones is accepted less often; the tokens after it are like any other.
# Measured on 128 tokens of models/tiny-lm after each of 80 prompts, 40 of Python source and 40 of English
# documentation, greedily and at temperature 0.7, over all matches of 1 to 10 tokens:
#     match                1      2      3…4    5…9    10…
#     greedy, code         0.31   0.59   0.74   0.85   0.95     first differing token: 0.10 0.15 0.15 0.16 0.34
#     greedy, prose        0.30   0.56   0.75   0.83   0.96                            0.12 0.11 0.21 0.18 0.41
#     sampled, code        0.15   0.30   0.44   0.48   –                               0.07 0.06 0.12 –    –
#     sampled, prose       0.14   0.32   0.40   0.59   0.73                            0.07 0.08 0.13 0.14 –
# PRIOR is their mean; for long matches, which are rare in sampling, the greedy value.
CLASS_STARTS = (1, 2, 3, 5, 10)  # shortest match of each class
PRIOR = (0.22, 0.45, 0.60, 0.70, 0.95, 0.09, 0.10, 0.15, 0.16, 0.35)  # by class; then of first differing tokens
PRIOR_COUNT = 8.0  # weight of the prior, in tokens of the text; 4 to 12 do as well on the texts above


@dataclass
class _Candidates:
    """All continuations of one row as a tree.

    children: of each node, in order.
    classes: index into ``PRIOR`` of each node.
    """

    tree: ListTree
    children: list[list[int]] = field(default_factory=lambda: [[]])
    classes: list[int] = field(default_factory=lambda: [-1])


class NgramDrafter(Drafter):
    """Continuations of earlier occurrences of the text's last tokens. They and their acceptance probabilities, which
    start from ``PRIOR`` and are updated by what is accepted, depend only on the row's own text.

    Static steps are tensor operations on the target's device. Eager steps keep the text on the host and use NumPy and
    loops over the few candidates; their trees are as large as the matches allow, and the root alone if there are none.

    Args:
        max_match, min_match: tokens of a match; longer ones count as ``max_match``, which the target's context bounds.
        depth: tokens of a continuation.
        branches: maximum number of continuations.

    Raises:
        ValueError: a number is less than 1, or ``min_match`` greater than ``max_match`` or than the target's context.
    """

    static = self_correcting = reuses = True
    reads_own_path = False
    sources = ("ngram",)

    def __init__(
        self, target: Target, *, max_match: int = 10, min_match: int = 2, depth: int = 10, branches: int = 2
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match {min_match}, max_match {max_match}: must be 1 ≤ min_match ≤ max_match")
        if min_match > target.context:
            raise ValueError(
                f"n-grams of at least {min_match} tokens: the context of target '{target.name}' holds {target.context}"
            )
        max_match = min(max_match, target.context)
        if depth < 1 or branches < 1:
            raise ValueError(f"depth {depth}, branches {branches}: each must be at least 1")
        self.device, self.max_match, self.min_match = target.device, max_match, min_match
        self.num_nodes, self.max_depth, self.branching = 1 + branches * depth, depth, branches
        # By tokens of the match, earlier tokens of the continuation included.
        lengths = range(max_match + depth)
        self.classes = [max(0, sum(start <= length for start in CLASS_STARTS) - 1) for length in lengths]
        self.candidates: list[_Candidates] = []  # of the current step, by row
        self.lengths: list[int] = []

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.on_host = not static
        device = torch.device("cpu") if self.on_host else self.device
        # Token p of a text is in column p + max_match; the −1 before the first token end any match.
        columns = self.max_match + cache.capacity
        self.history = torch.zeros(cache.rows, columns, dtype=torch.int64, device=device)
        self.history[:, : self.max_match] = -1
        # By class: accepted tokens, and all that were verified; initially the prior's.
        prior = torch.tensor([[share * PRIOR_COUNT for share in PRIOR], [PRIOR_COUNT] * len(PRIOR)])
        self.prior = prior.to(device)
        self.counts = self.prior.repeat(cache.rows, 1, 1)  # [B, 2, 2E] float32
        if self.on_host:
            self.text, self.host_counts = self.history.numpy(), self.counts.numpy()  # the same memory
            self.windows = np.lib.stride_tricks.sliding_window_view(self.text, self.max_match, axis=1)  # [B, S + 1, G]
            self.builder = ListTreeBuilder(self.device, cache.rows)
            return
        self.tokens = self.history[:, self.max_match :]  # [B, S]
        self.drafts: Tensor | None = None  # of the current step; None if it was left out
        self.numbers = torch.arange(columns, device=device)
        self.places = self.numbers[: self.max_depth]  # of a continuation's tokens
        self.continuations = self.numbers[: self.branching, None]
        self.class_of = torch.tensor(self.classes, device=device)
        words = -(-self.num_nodes // 64)
        self.words = self.numbers[:words]
        self.root_bits = (self.words == 0).long()[None, None]

    def buffers(self) -> tuple[Tensor, ...]:
        return self.history, self.counts

    def begin(self, rows: Rows) -> None:
        self.counts[rows] = self.prior  # the history needs no reset: only tokens within a row's length are read

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        place = chunk.rows, chunk.positions + self.max_match
        self.history[tuple(each.to(self.history.device) for each in place)] = chunk.tokens.to(self.history.device)

    def reuse(self, source: int, row: int, tokens: Sequence[int]) -> None:
        place = slice(self.max_match, self.max_match + len(tokens))
        self.history[row, place] = to_device(tokens, self.history.device)

    def propose(self, state: State) -> TokenTree:
        return self._propose_on_host(state) if self.on_host else self._propose_on_device(state)

    def skip(self, state: State) -> None:
        if not self.on_host:
            self.drafts = None  # ``absorb`` keeps the root, too
            return
        roots, self.lengths = state.root.tolist(), (state.length * state.active).tolist()
        self.candidates = [_Candidates(ListTree([root], [-1], [0], [1.0])) for root in roots]
        for row, (root, length) in enumerate(zip(roots, self.lengths, strict=True)):
            if length:
                self.text[row, self.max_match + length] = root

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        if self.on_host:
            self._absorb_on_host(verdict, tree)
        else:
            self._absorb_on_device(state, verdict, tree)

    def _read_path(self, state: State, verdict: Verdict, tree: TokenTree) -> None:
        """Keep the root and the accepted tokens; what follows them is overwritten later."""
        tokens, places = tree.tokens, state.length[:, None]
        if tokens.shape[1] > 1:
            tokens = tokens.gather(1, verdict.path.clamp(max=tokens.shape[1] - 1))
            places = places + self.numbers[: tokens.shape[1]]
        self.tokens.scatter_(1, places, tokens)

    def _propose_on_host(self, state: State) -> TokenTree:
        roots, self.lengths = state.root.tolist(), (state.length * state.active).tolist()
        self.candidates = [self._find(row, root, self.lengths[row]) for row, root in enumerate(roots)]
        trees = [candidates.tree for candidates in self.candidates]
        if state.budget is not None and not state.merged:  # also without a match: what the search costs is timed
            acceptances = [tree.acceptance for tree in trees]
            state.budget.proposed(0, torch.tensor([row + [0.0] * (self.num_nodes - len(row)) for row in acceptances]))
            kept = kept_nodes(acceptances, state.budget, self.num_nodes)
            trees = [tree.subtree(nodes) for tree, nodes in zip(trees, kept, strict=True)]
        return self.builder.build(trees, state.root)

    def _find(self, row: int, root: int, length: int) -> _Candidates:
        """The nodes of all continuations of a row whose text has ``length`` tokens before the root; 0: no text."""
        text, start = self.text[row], self.max_match
        tree = ListTree([root], [-1], [0], [1.0])
        candidates = _Candidates(tree)
        if not length:  # a row without a text
            return candidates
        text[start + length] = root
        ends = (text[start : start + length] == root).nonzero()[0]
        if not len(ends):
            return candidates
        windows = self.windows[row]  # window p + 1 ends with token p
        differs = windows[ends + 1, ::-1] != windows[length + 1, ::-1]  # [n, G], the last token (equal) first
        match = differs.argmax(1)
        match[match == 0] = self.max_match  # no token differs
        best = match.argsort(kind="stable")[: -self.branching - 1 : -1]  # the most recent one first among equals
        best = best[match[best] >= self.min_match]
        if not len(best):
            return candidates
        rates = (self.host_counts[row, 0] / self.host_counts[row, 1]).tolist()
        for continuation, (matched, end) in enumerate(zip(match[best].tolist(), ends[best].tolist(), strict=True)):
            first, period = start + end + 1, length - end
            tokens = text[first : first + min(period, self.max_depth)].tolist()
            if period < self.max_depth:
                tokens = (tokens * (self.max_depth // period + 1))[: self.max_depth]
            node, forked = 0, continuation == 0  # a further continuation shares nodes until it forks
            for place, token in enumerate(tokens):
                child = None
                if not forked:
                    child = next((n for n in candidates.children[node] if tree.tokens[n] == token), None)
                if child is None:
                    kind = self.classes[matched + place]
                    if not forked:
                        kind, forked = kind + len(CLASS_STARTS), True
                    child = len(tree.tokens)
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    tree.sources.append(1)
                    tree.acceptance.append(tree.acceptance[node] * rates[kind])
                    candidates.children[node].append(child)
                    candidates.children.append([])
                    candidates.classes.append(kind)
                node = child
        return candidates

    def _absorb_on_host(self, verdict: Verdict, tree: TokenTree) -> None:
        accepted, bonus = verdict.length.tolist(), verdict.bonus.tolist()
        tokens, path = (tree.tokens.tolist(), verdict.path.tolist()) if any(accepted) else ([], [])
        for row, (length, candidates) in enumerate(zip(self.lengths, self.candidates, strict=True)):
            if not length:
                continue
            drafted = [tokens[row][node] for node in path[row][1 : accepted[row] + 1]] if accepted[row] else []
            begin = self.max_match + length + 1
            self.text[row, begin : begin + len(drafted)] = drafted
            correct, verified = self.host_counts[row]
            node = 0
            for token in (*drafted, bonus[row]):
                children = candidates.children[node]
                node = -1
                for child in children:
                    verified[candidates.classes[child]] += 1
                    if candidates.tree.tokens[child] == token:
                        correct[candidates.classes[child]] += 1
                        node = child
                if node < 0:
                    break

    def _propose_on_device(self, state: State) -> TokenTree:
        history, max_match, slots = self.history, self.max_match, self.history.shape[1] - self.max_match
        length = state.length[:, None]
        history.scatter_(1, length + max_match, state.root[:, None])
        # The last differing one of the G tokens that end at each place, counted from 1, gives the length of the match.
        last_tokens = history.gather(1, length + self.numbers[1 : max_match + 1])
        differs = history.unfold(1, max_match, 1)[:, 1:] != last_tokens[:, None]  # [B, S, G]
        match = max_match - (differs * self.numbers[1 : max_match + 1]).amax(-1)
        earlier = self.numbers[:slots] < length
        best = torch.where(earlier, match * slots + self.numbers[:slots], 0).topk(self.branching).values  # [B, C]
        match, end = best // slots, best % slots
        matched = (match >= self.min_match)[..., None]  # [B, C, 1]
        period = (length - end).clamp(min=1)  # 0 in rows without a text
        source = (end + (max_match + 1))[..., None] + self.places % period[..., None]
        drafts = history.gather(1, source.flatten(1)).view_as(source)  # [B, C, D]
        # Equal paths are one node, owned by the first continuation that has it.
        equal = (drafts[:, :, None] == drafts[:, None]) & matched[:, None]  # [B, C, C, D]
        owner = equal.cumprod(-1).argmax(2)  # [B, C, D], the first of equals
        new = (owner == self.continuations) & matched
        # Valid nodes are numbered without gaps, as on the host: the uniforms of a node depend on its number.
        count = new.flatten(1).cumsum(1)
        owned = (owner * self.max_depth + self.places).flatten(1)  # [B, C·D]
        node = count.gather(1, owned).view_as(drafts)
        fork = new & ~pad(new[..., :-1], (1, 0)) & (self.continuations > 0)
        kind = self.class_of[match[..., None] + self.places] + fork * len(CLASS_STARTS)
        rate = (self.counts[:, 0] / self.counts[:, 1]).gather(1, kind.flatten(1)).gather(1, owned)
        acceptance = rate.view_as(drafts).cumprod(-1)
        bits = torch.where((node[..., None] >> 6 == self.words) & matched[..., None], 1 << (node[..., None] & 63), 0)
        self.drafts, self.new, self.kind = drafts, new, kind
        order = new.flatten(1).sort(dim=1, descending=True, stable=True).indices  # padding last
        parts = torch.stack((drafts, pad(node[..., :-1], (1, 0)), self.places.expand_as(drafts) + 1), 1).flatten(2)
        parts = parts.gather(2, order[:, None].expand(-1, 3, -1))  # [B, 3, N − 1]
        ancestors = bits.cumsum(2).flatten(1, 2).gather(1, order[..., None].expand(-1, -1, len(self.words)))
        proposed = self.numbers[1 : self.num_nodes] <= count[:, -1:]
        acceptance = torch.where(proposed, acceptance.flatten(1).gather(1, order), 0.0)
        return TokenTree(
            torch.cat((state.root[:, None], parts[:, 0]), 1),
            pad(parts[:, 1], (1, 0), value=-1).int(),
            pad(parts[:, 2], (1, 0)).int(),
            pad(ancestors, (0, 0, 1, 0)) | self.root_bits,
            pad(proposed, (1, 0), value=True),
            source=pad(proposed.long(), (1, 0)),
            acceptance=pad(acceptance, (1, 0), value=1.0),
        )

    def _absorb_on_device(self, state: State, verdict: Verdict, tree: TokenTree) -> None:
        if self.drafts is None:
            self._read_path(state, verdict, tree)
            return
        accepted, bonus = verdict.length[:, None], verdict.bonus[:, None]
        drafted = tree.tokens.gather(1, verdict.path[:, 1:].clamp(max=tree.tokens.shape[1] - 1))
        committed = torch.where(self.numbers[: drafted.shape[1]] < accepted, drafted, bonus)
        committed = torch.cat((committed, bonus), 1)  # [B, A]; entries after the first bonus token are not used
        places = state.length[:, None] + self.numbers[self.max_match + 1 : self.max_match + 1 + committed.shape[1]]
        self.history.scatter_(1, places, committed)
        correct = (self.drafts == committed[:, None, : self.max_depth]).cumprod(-1)  # [B, C, D]
        verified = self.new & pad(correct[..., :-1], (1, 0), value=1).bool() & (self.places <= accepted[..., None])
        counts = torch.stack((verified & correct.bool(), verified), 1).flatten(2).float()  # [B, 2, C·D]
        self.counts.scatter_add_(2, self.kind.flatten(1)[:, None].expand(-1, 2, -1), counts)
