"""EAGLE as a drafter: one decoder layer on the target's features, or a few, drafts a tree, level by level
(:mod:`draftsmith.models.eagle`).

Each layer has its own K/V cache. The pair at position t, of the feature of token t and the embedding of token t + 1, is
in slot t. So the root (position L) belongs to the pair L − 1, whose feature predicted it. A drafted node's pair has its
parent's output in place of a feature; node i is in slot L − 1 + i.

No K/V of drafted nodes is kept: the target's features of accepted tokens are known after verification, so ``absorb``
stores these, and their pairs are run with the next root in one forward pass.

Shape letters: B rows, b rows that begin, T prompt tokens, N nodes, n nodes of a pass, m nodes of the level above, M
missing pairs, k best tokens, F features per token, d hidden width, H query heads, G key/value heads, D head width, S
slots of the cache, and S tokens of logits.
"""

import itertools
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from draftsmith.inference.drafters.compressed import Selector
from draftsmith.inference.drafters.eagle_layer import EagleLayer
from draftsmith.inference.drafters.eagle_window import PairWindow, check_selector
from draftsmith.inference.drafters.family import Loader
from draftsmith.inference.drafters.shortlists import Shortlists, after_head_of, check_router
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk, Part, to_device
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.trees.by_level import ALL_CACHED, DraftHead, DrawKind, Hidden, LevelPass, Levels, chain_passes
from draftsmith.inference.trees.dynamic import DynamicShape, DynamicTree, Frontier, Proposals, read_dynamic
from draftsmith.inference.verify.sampling import Noise, Rows, row_numbers
from draftsmith.inference.verify.tree import TokenTree, Topology, read_tree
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.attention_plan import Plans
from draftsmith.kernels.linear import apply_linear
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead
from draftsmith.models.target import Target

HAS_TREE = True
M = TypeVar("M", bound=nn.Module)


class EagleDrafter(Drafter):
    """An EAGLE drafter for a target.

    A fixed tree's nodes are chosen as :class:`~draftsmith.inference.trees.by_level.Levels` says. A dynamic tree's are
    the likeliest ones in every mode, in coupled sampling under the noise of the text.

    Args:
        eagle: is cast to the target's dtype and moved to its device.
        tree: an expansion, k_i children of every node at depth i − 1; a tree of ranks; or the shape of a dynamic tree.
        draws: of a fixed tree, as ``Levels`` takes it.
        shortlist: each level computes only some rows of the LM head (FR-Spec, DynaSpec, low rank).
        selector: the layer attends to K of the text's pairs, the first and the last ones, and keeps no others: for long
            texts (:mod:`draftsmith.inference.drafters.eagle_window`).

    Raises:
        ValueError: it has fewer positions than the target, its logits need rows of an LM head that has none to take,
            the tree is empty, too large, or asks for more tokens than it drafts, or the selector is not for it.
    """

    static = True
    reads_own_path = False
    further = 0  # pairs behind the root's in the pass that drafts

    def __init__(
        self,
        eagle: Eagle,
        target: Target,
        tree: Sequence[int] | Topology | DynamicShape,
        *,
        draws: DrawKind = "without_replacement",
        shortlist: ShortlistHead | None = None,
        selector: Selector | None = None,
    ) -> None:
        config = eagle.config
        check_context(eagle, target)
        self.eagle, self.target, self.device = to_target(eagle, target), target, target.device
        self.captures = config.captured_layers
        self.layer = EagleLayer(eagle, target)
        self.embed, self.ids = self.layer.embed, eagle.draft_vocab
        self.draft_head = eagle.draft_head(target.lm_head)
        self.shared: Target | None = None
        if config.projection == "shared":
            self.shared = copy(target)  # Target.logits then applies the target's own scale and cap to these rows
            self.shared.lm_head = self.draft_head
        self.shortlists: Shortlists | None = None
        if shortlist is not None:
            check_router(shortlist, config.hidden_size, config.hidden_size)
            after_head = after_head_of(target) if config.projection == "shared" else None
            self.shortlists = Shortlists(shortlist, self.draft_head, self.ids, after_head)
        self._take(tree, draws, selector)

    def with_tree(
        self,
        tree: Sequence[int] | Topology | DynamicShape,
        *,
        draws: DrawKind = "without_replacement",
        selector: Selector | None = None,
    ) -> "EagleDrafter":
        """A drafter with the same weights, and another tree and cache."""
        other = copy(self)
        other.shortlists, other.layer = copy(self.shortlists), copy(self.layer)  # with buffers of their own
        other._take(tree, draws, selector)
        return other

    def _take(self, tree: Sequence[int] | Topology | DynamicShape, draws: DrawKind, selector: Selector | None) -> None:
        if selector is not None:
            check_selector(selector, self.eagle.config)
        self.tree, self.selector, self.reuses = tree, selector, selector is None
        outputs = fewest_outputs(self.eagle, None if self.shortlists is None else self.shortlists.config)
        self._take_head()
        self.shape: DynamicShape | None = None
        if isinstance(tree, DynamicShape):
            tree.check_outputs(outputs)
            self.shape, self.random = tree, False
            self.num_nodes, self.max_depth, self.branching = tree.nodes, tree.depth, tree.branching
            return
        self.levels = Levels(tree, outputs, self.target.vocab_size, draws)
        self.num_nodes, self.max_depth = self.levels.num_nodes, self.levels.max_depth
        self.branching, self.random = self.levels.branching, self.levels.random

    def _take_head(self) -> None:
        changed = self.shared is not None and self.shared.changes_logits
        module = None if self.shortlists is not None or changed else self.draft_head
        topk = None if self.shortlists is None else self.shortlists.topk
        self.head = DraftHead(self._logits, module, self.eagle.config.outputs, self.ids, topk)

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        config, device, dtype = self.eagle.config, self.device, self.target.dtype
        rows, self.eager = cache.rows, not static
        # A dynamic tree runs more nodes than it has.
        runs = 0 if self.shape is None else self.shape.runs
        self.plans: Plans | None = None  # of the step
        self.verified_depth = max_depth
        self.skipped, self.chains = False, chain_passes(max_depth, static, rows, device)
        self.max_missing = len(self.chains) - 1
        self.window: PairWindow | None = None
        if self.selector is None:
            # An eager step pads all rows to the pairs of the one that misses most.
            padded = 0 if static else self.max_missing + self.further
            self.layer.allocate(rows, cache.capacity + max(runs, padded), static)
        else:
            step_slots = 1 + max(self.num_nodes, 1 + runs, self.max_missing)
            slots = PairWindow.slots(self.selector, self.max_missing, step_slots)
            self.layer.allocate(rows, slots, static, cache.capacity + runs)
            self.window = PairWindow(self.selector, self.layer, max_depth + 1, step_slots)
        self._allocate_tree(rows, static)
        if self.shortlists is not None:
            self.shortlists.allocate(static)
        # Number of each text's pairs in the cache, and the tokens and features of the pairs after these, up to the
        # root's. The number of missing pairs follows from it, and is 0 in warm-up steps, which reset the lengths: these
        # then write no slot before the root's pair.
        self.cached = torch.full((rows,), ALL_CACHED, dtype=torch.int64, device=device)
        self.missing_tokens = torch.zeros(rows, self.max_missing + 1, dtype=torch.int64, device=device)
        width = config.feature_size * (1 + len(self.captures))
        self.missing_features = torch.zeros(rows, self.max_missing + 1, width, dtype=dtype, device=device)
        # The fused feature of the last token that was read of each row's prompt.
        fused = config.feature_size if config.version == 1 else config.hidden_size
        self.reused: set[int] = set()  # rows whose prompts go on after tokens that were not read again
        self.at_end: dict[int, Tensor] = {}  # of rows whose texts have ended: ``cached`` at that time
        self.waiting = torch.zeros(rows, fused, dtype=dtype, device=device)
        self.row_numbers = torch.arange(rows, device=device)
        self.numbers = self.layer.numbers

    def _allocate_tree(self, rows: int, static: bool) -> None:
        device = self.device
        if self.shape is None:
            self.levels.allocate(rows, device, static)
            return
        self.dynamic = DynamicTree(self.shape, rows, device)
        self.key_depths = torch.zeros(1, max(self.shape.runs, 1), dtype=torch.int32, device=device).expand(rows, -1)

    def buffers(self) -> Sequence[Tensor]:
        return self.cached, self.missing_tokens, self.missing_features

    def begin(self, rows: Rows) -> None:
        self.reused -= {*row_numbers(rows)}
        self.cached[rows] = ALL_CACHED  # all pairs of the prompt but the last, which is the root's
        if self.window is not None:
            for row in row_numbers(rows):
                self.window.begin(row)

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        """Write the K/V of the pairs that end in the parts: each token with the feature before it, except for the first
        one of a text."""
        hidden = self.eagle.fuse(features)  # [T, d]
        places = [(part, *place) for part, place in zip(chunk.parts, itertools.pairwise(chunk.firsts), strict=True)]
        of_parts = [(part.row, first, after - 1) for part, first, after in places]
        rows, firsts, lasts = to_device(of_parts, self.device).unbind(1)
        before = hidden.roll(1, 0)
        before[firsts] = self.waiting[rows]
        self.waiting[rows], self.cached[rows] = hidden[lasts], ALL_CACHED
        pairs, of_pairs = list[int](), list[Part]()
        for part, first, after in places:
            without = not part.start or part.row in self.reused  # that pair is none, or is written already
            pairs += range(first + without, after)
            of_pairs.append(Part(part.row, part.start - 1 + without, part.count - without))
            self.reused.discard(part.row)
        if pairs:
            paired = to_device(pairs, self.device)
            slots = chunk.positions[paired] - 1
            if not self.layer.one_layer:
                own = chunk.tokens[paired], before[paired], chunk.rows[paired], slots
                self.layer.read(*own, [part for part in of_pairs if part.count])
                return
            pair = chunk.tokens[None, paired], before[None, paired], self.layer.table[slots][None]
            found = self.layer.keys_values(*pair)[0]
            if self.window is None:
                self.layer.both[chunk.rows[paired], slots] = found
                return
            for part, own in zip(of_pairs, found.split([part.count for part in of_pairs]), strict=True):
                self.window.read(part.row, part.start, own)

    def end(self, row: int) -> None:
        self.at_end[row] = self.cached[row].clone()
        if self.window is not None:
            self.window.end(row)

    def prepare(self, state: State) -> None:
        if self.window is not None:
            self.window.prepare(state, self.cached)

    def reusable(self, source: int, common: int, read: int) -> int:
        """All but one: the pair of the next token, which the text has, too, is written already, and the feature before
        that token is not needed."""
        pairs = read - 1 if common <= read else max(read - 1, int(self.at_end[source]))
        return max(0, min(common - 1, pairs))

    def reuse(self, source: int, row: int, tokens: Sequence[int]) -> None:
        self.reused.add(row)
        self.cached[row] = ALL_CACHED
        if source != row:
            pairs = self.layer.storage[..., : len(tokens), :]  # [L, 2, B, G, n, D]
            pairs[:, :, row] = pairs[:, :, source]

    def skip(self, state: State) -> None:
        """Record the root's pair as missing; where the buffer is full, write the K/V of what it holds, and the root's,
        without running the layer, if it is the only one."""
        before = (state.length - 1).clamp(min=0)
        missing = (before - self.cached).clamp(min=0)
        if self.eager and int(missing.max()) + 1 + self.verified_depth <= self.max_missing:
            torch.minimum(self.cached, before, out=self.cached)
            self.missing_tokens[self.row_numbers, missing] = state.root
            self.missing_features[self.row_numbers, missing] = state.feature
            self.skipped = True
            return
        tokens, fused, missing = self._root_pairs(state, before)
        if not self.layer.one_layer:
            self.plans = state.plans
            self._run(self.chains[tokens.shape[1] - 1], tokens, fused, before - missing)
            return
        places = (before - missing)[:, None] + self.numbers[: tokens.shape[1]]  # [B, n]
        rotations = self.layer.table[places.clamp(max=len(self.layer.table) - 1)]
        slots = places
        if self.window is not None:
            slots = self.window.after(before - missing)[:, None] + self.numbers[: tokens.shape[1]]
        self.layer.both[self.row_numbers[:, None], slots] = self.layer.keys_values(tokens, fused, rotations)

    def propose(self, state: State) -> TokenTree:
        self.skipped = False  # an interrupted step may have left it
        before = (state.length - 1).clamp(min=0)  # [B] pairs before the root's; a row without a text has none
        self.plans = state.plans  # prefixes of pairs are no longer than the text's
        hidden = self._run_root(state, before)
        if self.shape is not None:
            noise = state.noise
            root = self._proposals(hidden, noise, 0)
            after = before + 1
            return self.dynamic.grow(state, root, lambda nodes: self._run_frontier(nodes, after, noise))

        def run(depth: int, level: LevelPass, tokens: Tensor, above: Hidden) -> Hidden:
            if self.shortlists is not None:
                self._choose(tokens, level.of_parents(above[0]), depth)
            return self._run(level, tokens, above[0], before)

        return self.levels.propose(state, hidden, run, self.head)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        """Store the accepted path's tokens and features, whichever drafter of a merge proposed its nodes."""
        assert verdict.path.shape[1] - 1 <= self.verified_depth, "a tree is deeper than the max_depth that was given"
        longest = int(verdict.length.max()) if self.eager else verdict.path.shape[1] - 1
        if not self.skipped:
            self.cached.copy_(state.length)  # the root's pair is the last one made of features
        if longest:
            path, rows = verdict.path[:, : longest + 1].clamp(max=tree.tokens.shape[1] - 1), self.row_numbers[:, None]
            # After the missing pairs and the root's, where these are kept.
            after = (state.length - self.cached)[:, None] + self.numbers[:longest]
            self.missing_tokens[rows, after] = tree.tokens.gather(1, path[:, 1:])
            self.missing_features[rows, after] = features[rows, path[:, :-1]]
        self.skipped = False

    def _run_root(self, state: State, before: Tensor) -> Hidden:
        """Run the missing pairs and the root's; returns the root's hidden states, ``[B, 1, d]`` each. Rows with fewer
        missing pairs are padded on the right; the tree's nodes later overwrite the padding."""
        tokens, fused, missing = self._root_pairs(state, before)
        at = self.row_numbers, missing
        longest = tokens.shape[1] - 1
        self._choose(state.root[:, None], fused[at][:, None] if longest else fused, 0)
        hidden, normed = self._run(self.chains[longest], tokens, fused, before - missing)
        if not longest:
            return hidden, normed
        root_hidden = hidden[at][:, None]
        return root_hidden, root_hidden if normed is hidden else normed[at][:, None]

    def _root_pairs(self, state: State, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The missing pairs and the root's: tokens ``[B, n]``, fused features ``[B, n, d]``, and the number of missing
        pairs ``[B]``."""
        missing = (before - self.cached).clamp(min=0)
        longest = int(missing.max()) if self.eager else self.max_missing
        tokens = state.root[:, None]
        features = state.feature[:, None]
        if longest:
            at = missing[:, None]
            tokens = self.missing_tokens[:, : longest + 1].scatter(1, at, tokens)
            features = self.missing_features[:, : longest + 1].clone()
            features[self.row_numbers, missing] = state.feature
        return tokens, self.eagle.fuse(features), missing

    def _choose(self, tokens: Tensor, hidden: Tensor, depth: int) -> None:
        """Choose the shortlist of a level's pairs, before they are run: ``[B, n]``, ``[B, n, d]``."""
        if self.shortlists is not None:
            self.shortlists.choose(self.embed(tokens), hidden, depth)

    def _run_frontier(self, nodes: Frontier, after: Tensor, noise: Noise | None) -> Proposals:
        """A forward pass of a dynamic tree's nodes, which are numbered after the root's pair. ``after``: ``[B]``, the
        pairs up to it."""
        count, total = nodes.tokens.shape[1], nodes.first + nodes.tokens.shape[1]
        depth = nodes.first // count + 1
        below = self.dynamic.levels[depth - 1]  # the first level
        level = LevelPass(nodes.first, count, count == 1, nodes.ancestors, below, self.key_depths[:, :total])
        self._choose(nodes.tokens, nodes.hidden, depth)
        hidden = self._run(level, nodes.tokens, nodes.hidden, after, fixed=False)
        return self._proposals(hidden, noise, depth)

    def _proposals(self, hidden: Hidden, noise: Noise | None, depth: int) -> Proposals:
        assert self.shape is not None
        log_q, tokens = self.head.best(hidden[1], self.shape.top_k, depth, noise)
        return Proposals(tokens, log_q, hidden[0])

    def _run(self, level: LevelPass, tokens: Tensor, hidden: Tensor, lengths: Tensor, fixed: bool = True) -> Hidden:
        if self.window is None:
            return self.layer.run(level, tokens, hidden, lengths, self.plans, fixed)
        after, left_out = self.window.after(lengths), self.window.left_out
        return self.layer.run(level, tokens, hidden, after, self.plans, fixed, left_out)

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.shortlists is not None:
            return self.shortlists.logits(hidden)
        return apply_linear(self.draft_head, hidden) if self.shared is None else self.shared.logits(hidden), self.ids


def fewest_outputs(eagle: Eagle, shortlists: ShortlistConfig | None) -> int:
    """Tokens that a level chooses from, at least."""
    return eagle.config.outputs if shortlists is None else shortlists.fewest


def to_target(drafter: M, target: Target) -> M:
    """The drafter, moved to the target's device and cast to its dtype, except the rotary frequencies."""
    for name, part in drafter.to(target.device).named_children():
        if name != "rotary":
            part.to(target.dtype)
    return drafter


def check_context(drafter: Eagle | DFlash, target: Target, where: str = "the drafter") -> None:
    """Raise a ValueError unless a drafter has a position for each of the target's. ``where`` names it."""
    positions = drafter.config.max_position_embeddings
    if positions < target.context:
        raise ValueError(
            f"{where}: has {positions} positions (max_position_embeddings) and target '{target.name}' has "
            f"{target.context}; drafts beyond the drafter's would be wrong: use one that was trained for all of the "
            "target's positions"
        )


# ---- the family, as inference/drafters/family.py describes it


def open_drafter(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    tree: Path | None,
    merged: bool,
    shortlist: ShortlistHead | None = None,
) -> Loader:
    """The layer and its tree, checked against each other. A dynamic tree has precedence over a fixed one."""
    assert tree is not None
    eagle = Eagle.from_artifact(config, weights, str(folder))
    if eagle.config.parallel:
        from draftsmith.inference.drafters.parallel_eagle import open_parallel  # which is built on this module

        if shortlist is not None:
            raise ValueError(f"{folder}: a drafter of one pass takes no shortlists; use one of a pass for each level")
        return open_parallel(folder, eagle, tree, merged)
    given = read_dynamic(tree) or read_tree(tree)
    outputs = fewest_outputs(eagle, None if shortlist is None else shortlist.config)
    if isinstance(given, DynamicShape):
        given.check_outputs(outputs, f"{tree}: ")
    elif not given.paths:
        raise ValueError(f"{tree}: the tree holds the root alone; an EAGLE drafter needs at least one path")
    elif given.max_rank >= outputs:
        raise ValueError(f"{tree}: the tree asks for rank {given.max_rank} of a vocabulary of {outputs}")

    def build(target: Target, options: dict[str, Any]) -> Drafter:
        check_context(eagle, target, str(folder))
        return EagleDrafter(eagle, target, given, shortlist=shortlist)

    return Loader(build)
