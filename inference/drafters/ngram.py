"""Drafting from the text's own past (prompt lookup): what followed the last tokens where they occurred before.

    match:      an earlier place of the text whose last tokens are those that end in the root; the longest matches win,
                of equally long ones the most recent
    continue:   the tokens behind the match; where they run into the text's end they go on periodically
    tree:       a continuation for each match; those that begin alike share nodes

A text with no match costs next to nothing. There are no weights, and the drafts are deterministic.

Shape letters: B rows, S slots, G tokens of the longest match, C continuations, D depth, N nodes, E classes of matches,
W 64-bit words.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.inference.cache import KVCache
from draftsmith.inference.costs import STANDARD, StepCosts
from draftsmith.inference.host_tree import HostTree, HostTrees, paying
from draftsmith.inference.step import Drafter, State
from draftsmith.inference.tree import StaticTree, TokenTree
from draftsmith.inference.verify import Verdict
from draftsmith.models.target import Target

# How often a continuation's next token is right if those before it are. It depends on the length of the match at that
# place alone, the tokens of the continuation included: the fourth token behind a match of 2 is right as often as the
# first behind a match of 5 (0.84 and 0.85 greedily). A second continuation's first own token, another one for a place
# for which there is a longer or more recent match, is right less often; what follows it is like any other.
# Measured on 128 tokens of models/tiny-lm behind each of 80 prompts, 40 of Python source and 40 of English
# documentation, greedily and at temperature 0.7, over all matches of 1 to 10 tokens:
#     match                1      2      3…4    5…9    10…
#     greedy, code         0.31   0.59   0.74   0.85   0.95     others' first token: 0.10 0.15 0.15 0.16 0.34
#     greedy, prose        0.30   0.56   0.75   0.83   0.96                          0.12 0.11 0.21 0.18 0.41
#     sampled, code        0.15   0.30   0.44   0.48   –                             0.07 0.06 0.12 –    –
#     sampled, prose       0.14   0.32   0.40   0.59   0.73                          0.07 0.08 0.13 0.14 –
# The table is their mean; of long matches, which sampling hardly makes, the greedy one.
BEGINS = (1, 2, 3, 5, 10)  # the shortest match of each class
PRIOR = (0.22, 0.45, 0.60, 0.70, 0.95, 0.09, 0.10, 0.15, 0.16, 0.35)  # of each class, then of others' first tokens
STRENGTH = 8.0  # tokens of the text that count as much as the prior; 4 to 12 do as well on the texts above


@dataclass
class _Candidates:
    """One row's candidates.

    children: of each node, in order.
    classes: which entry of ``PRIOR`` each node belongs to.
    """

    tree: HostTree
    children: list[list[int]] = field(default_factory=lambda: [[]])
    classes: list[int] = field(default_factory=lambda: [-1])


class NgramDrafter(Drafter):
    """Continuations of earlier occurrences of the text's last tokens. Deterministic: every draw is one-hot.

    ``tree.chance`` begins with what was measured on other texts, and follows what came true in the row's own one. It
    and the candidates depend on the row's own text alone.

    Static steps are tensor operations on the target's device, about 85. In eager mode, where the host waits for each
    step anyway, the text is kept on the host, and NumPy and loops over some twenty nodes do the same: in a row of 512
    slots 15 µs without a match and 35 to 50 µs with one, not 230 µs. Trees are as large as the matches make them
    there; where nothing matches the root is proposed alone.

    Args:
        longest, shortest: tokens of a match; longer ones count as the longest.
        depth: tokens of a continuation.
        branches: continuations of a row at most.
        costs: in eager mode, propose as many nodes, the likeliest ones first, as make the most expected tokens per
            time: the same number in each row, so that it depends on the other rows; in sampling mode each row's own
            number, by standard costs, so that a seed is one text in any batch and on any day. Left out: all candidates.

    Raises:
        ValueError: a number is less than 1, or ``shortest`` more than ``longest``.
    """

    static = True
    sources = ("ngram",)

    def __init__(
        self, target: Target, *, longest: int = 10, shortest: int = 2, depth: int = 10, branches: int = 2,
        costs: StepCosts | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest {shortest}, longest {longest}: a match has 1 ≤ shortest ≤ longest tokens")
        if depth < 1 or branches < 1:
            raise ValueError(f"depth {depth}, branches {branches}: each has to be at least 1")
        self.device, self.longest, self.shortest, self.costs = target.device, longest, shortest, costs
        self.num_nodes, self.max_depth, self.branching = 1 + branches * depth, depth, branches
        # The class of a token behind a match of so many tokens, those of its continuation before it included.
        lengths = range(longest + depth)
        self.classes = [max(0, sum(begin <= length for begin in BEGINS) - 1) for length in lengths]
        self.found: list[_Candidates] = []  # of the step under way, by row
        self.lengths: list[int] = []

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.on_host = not static
        device = torch.device("cpu") if self.on_host else self.device
        # Token p of a text is in column p + longest: a match ends before the text's first token, where −1 is.
        columns = self.longest + cache.capacity
        self.history = torch.zeros(cache.rows, columns, dtype=torch.int64, device=device)
        self.history[:, : self.longest] = -1
        # By class: tokens that were right, and all; at first those of the prior.
        prior = torch.tensor([[share * STRENGTH for share in PRIOR], [STRENGTH] * len(PRIOR)])
        self.prior = prior.to(device)
        self.counts = self.prior.repeat(cache.rows, 1, 1)  # [B, 2, 2E] float32
        if self.on_host:
            self.text, self.seen = self.history.numpy(), self.counts.numpy()  # the same memory
            self.windows = np.lib.stride_tricks.sliding_window_view(self.text, self.longest, axis=1)  # [B, S + 1, G]
            if self.costs is not None:
                self.times = self.costs.table(self.num_nodes, cache.rows)
                self.standard_times = STANDARD.table(self.num_nodes, 1)
            self.trees = HostTrees(self.device, max_depth)
            self.root = StaticTree([-1], self.device, max_depth)
            self.nothing = torch.zeros(cache.rows, 1, dtype=torch.int64, device=self.device)
            self.certain = torch.ones(cache.rows, 1, device=self.device)
            return
        self.numbers = torch.arange(columns, device=device)
        self.places = self.numbers[: self.max_depth]  # of a continuation's tokens, from 0
        self.turns = self.numbers[: self.branching, None]
        self.class_of = torch.tensor(self.classes, device=device)
        words = -(-self.num_nodes // 64)
        self.words = self.numbers[:words]
        self.root_bits = (self.words == 0).long()[None, None]

    def buffers(self) -> tuple[Tensor, ...]:
        return self.history, self.counts

    def begin(self, rows: slice) -> None:
        self.counts[rows] = self.prior  # of the text before, nothing is read: a row's length says what counts

    def prefill(self, features: Tensor, tokens: Tensor, start: int, rows: slice) -> None:
        begin = self.longest + start
        self.history[rows, begin : begin + tokens.shape[1]] = tokens

    def propose(self, state: State) -> TokenTree:
        return self._propose_on_host(state) if self.on_host else self._propose_on_device(state)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        if self.on_host:
            self._absorb_on_host(verdict, tree)
        else:
            self._absorb_on_device(state, verdict, tree)

    def _propose_on_host(self, state: State) -> TokenTree:
        roots, self.lengths = state.root.tolist(), state.length.tolist()
        self.found = [self._candidates(row, root, self.lengths[row]) for row, root in enumerate(roots)]
        trees = [candidates.tree for candidates in self.found]
        if self.costs is not None and any(len(tree.tokens) > 1 for tree in trees):
            if state.settings is None:
                kept = paying(trees, self.times, [length > 0 for length in self.lengths])
            else:
                kept = paying(trees, self.standard_times, None)
            trees = [tree.kept(nodes) for tree, nodes in zip(trees, kept, strict=True)]
        if all(len(tree.tokens) == 1 for tree in trees):
            return self.root.fill(state.root[:, None], self.nothing, self.certain)
        return self.trees.make(trees)

    def _candidates(self, row: int, root: int, length: int) -> _Candidates:
        """The nodes of all continuations, with the chance of each."""
        text, start = self.text[row], self.longest
        text[start + length] = root
        tree = HostTree([root], [-1], [0], [1.0])
        nodes = _Candidates(tree)
        ends = (text[start : start + length] == root).nonzero()[0]
        if not len(ends):
            return nodes
        windows = self.windows[row]  # window p + 1 ends with token p
        differs = windows[ends + 1, ::-1] != windows[length + 1, ::-1]  # [n, G], the last token first, which is equal
        match = differs.argmax(1)
        match[match == 0] = self.longest  # nothing differs
        best = match.argsort(kind="stable")[: -self.branching - 1 : -1]  # of equals the last one first
        best = best[match[best] >= self.shortest]
        if not len(best):
            return nodes
        shares = (self.seen[row, 0] / self.seen[row, 1]).tolist()
        for turn, (matched, end) in enumerate(zip(match[best].tolist(), ends[best].tolist(), strict=True)):
            first, period = start + end + 1, length - end
            tokens = text[first : first + min(period, self.max_depth)].tolist()
            if period < self.max_depth:
                tokens = (tokens * (self.max_depth // period + 1))[: self.max_depth]
            node, forked = 0, turn == 0
            for place, token in enumerate(tokens):
                known = None
                if not forked:
                    known = next((child for child in nodes.children[node] if tree.tokens[child] == token), None)
                if known is None:
                    kind = self.classes[matched + place]
                    if not forked:
                        kind, forked = kind + len(BEGINS), True
                    known = len(tree.tokens)
                    tree.tokens.append(token)
                    tree.parents.append(node)
                    tree.sources.append(1)
                    tree.chance.append(tree.chance[node] * shares[kind])
                    nodes.children[node].append(known)
                    nodes.children.append([])
                    nodes.classes.append(kind)
                node = known
        return nodes

    def _absorb_on_host(self, verdict: Verdict, tree: TokenTree) -> None:
        accepted, bonus = verdict.length.tolist(), verdict.bonus.tolist()
        tokens, path = (tree.tokens.tolist(), verdict.path.tolist()) if any(accepted) else ([], [])
        for row, (length, nodes) in enumerate(zip(self.lengths, self.found, strict=True)):
            drafted = [tokens[row][node] for node in path[row][1 : accepted[row] + 1]] if accepted[row] else []
            begin = self.longest + length + 1
            self.text[row, begin : begin + len(drafted)] = drafted
            right, tried = self.seen[row]
            node = 0
            for token in (*drafted, bonus[row]):
                children = nodes.children[node]
                node = -1
                for child in children:
                    tried[nodes.classes[child]] += 1
                    if nodes.tree.tokens[child] == token:
                        right[nodes.classes[child]] += 1
                        node = child
                if node < 0:
                    break

    def _propose_on_device(self, state: State) -> TokenTree:
        history, longest, slots = self.history, self.longest, self.history.shape[1] - self.longest
        length = state.length[:, None]
        history.scatter_(1, length + longest, state.root[:, None])
        # Of the G tokens that end at each place, the last one that differs, counted from 1, says how long the match is.
        last_tokens = history.gather(1, length + self.numbers[1 : longest + 1])
        differs = history.unfold(1, longest, 1)[:, 1:] != last_tokens[:, None]  # [B, S, G]
        match = longest - (differs * self.numbers[1 : longest + 1]).amax(-1)
        earlier = self.numbers[:slots] < length
        best = torch.where(earlier, match * slots + self.numbers[:slots], 0).topk(self.branching).values  # [B, C]
        match, end = best // slots, best % slots
        matched = (match >= self.shortest)[..., None]  # [B, C, 1]
        period = (length - end).clamp(min=1)  # of rows without a text it would be 0
        source = (end + (longest + 1))[..., None] + self.places % period[..., None]
        drafts = history.gather(1, source.flatten(1)).view_as(source)  # [B, C, D]
        # Equal paths are one node, that of the first continuation which has it.
        equal = (drafts[:, :, None] == drafts[:, None]) & matched[:, None]  # [B, C, C, D]
        owner = equal.cumprod(-1).argmax(2)  # [B, C, D], the first of equals
        new = (owner == self.turns) & matched
        # Valid nodes are numbered without gaps, as on the host: a request's random numbers go by a node's number.
        count = new.flatten(1).cumsum(1)
        owned = (owner * self.max_depth + self.places).flatten(1)  # [B, C·D]
        node = count.gather(1, owned).view_as(drafts)
        fork = new & ~pad(new[..., :-1], (1, 0)) & (self.turns > 0)
        kind = self.class_of[match[..., None] + self.places] + fork * len(BEGINS)
        share = (self.counts[:, 0] / self.counts[:, 1]).gather(1, kind.flatten(1)).gather(1, owned)
        chance = share.view_as(drafts).cumprod(-1)
        bits = torch.where((node[..., None] >> 6 == self.words) & matched[..., None], 1 << (node[..., None] & 63), 0)
        self.drafts, self.new, self.kind = drafts, new, kind
        order = new.flatten(1).sort(dim=1, descending=True, stable=True).indices  # padding last
        parts = torch.stack((drafts, pad(node[..., :-1], (1, 0)), self.places.expand_as(drafts) + 1), 1).flatten(2)
        parts = parts.gather(2, order[:, None].expand(-1, 3, -1))  # [B, 3, N − 1]
        ancestors = bits.cumsum(2).flatten(1, 2).gather(1, order[..., None].expand(-1, -1, len(self.words)))
        proposed = self.numbers[1 : self.num_nodes] <= count[:, -1:]
        chance = torch.where(proposed, chance.flatten(1).gather(1, order), 0.0)
        return TokenTree(
            torch.cat((state.root[:, None], parts[:, 0]), 1),
            pad(parts[:, 1], (1, 0), value=-1).int(),
            pad(parts[:, 2], (1, 0)).int(),
            pad(ancestors, (0, 0, 1, 0)) | self.root_bits,
            pad(proposed, (1, 0), value=True),
            source=pad(proposed.long(), (1, 0)),
            chance=pad(chance, (1, 0), value=1.0),
        )

    def _absorb_on_device(self, state: State, verdict: Verdict, tree: TokenTree) -> None:
        accepted, bonus = verdict.length[:, None], verdict.bonus[:, None]
        drafted = tree.tokens.gather(1, verdict.path[:, 1:].clamp(max=tree.tokens.shape[1] - 1))
        said = torch.where(self.numbers[: drafted.shape[1]] < accepted, drafted, bonus)
        said = torch.cat((said, bonus), 1)  # [B, A]; what is behind the first bonus token has no meaning
        places = state.length[:, None] + self.numbers[self.longest + 1 : self.longest + 1 + said.shape[1]]
        self.history.scatter_(1, places, said)
        right = (self.drafts == said[:, None, : self.max_depth]).cumprod(-1)  # [B, C, D]
        tried = self.new & pad(right[..., :-1], (1, 0), value=1).bool() & (self.places <= accepted[..., None])
        found = torch.stack((tried & right.bool(), tried), 1).flatten(2).float()  # [B, 2, C·D]
        self.counts.scatter_add_(2, self.kind.flatten(1)[:, None].expand(-1, 2, -1), found)
