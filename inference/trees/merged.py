"""Several drafters as one: their trees merged into one token tree of at most so many nodes (SpecInfer, arXiv 2305.09781
§4.1).

The merged tree holds the union of their node sequences: equal paths become one node, which keeps the draws of each
source. In sampling mode every draw is tested with the distribution it was drawn from.

Of the merged nodes the likeliest by the drafters' acceptance probabilities (``TokenTree.acceptance``) are kept, as many
as the step's budget says. Nodes drawn at random are all kept, and which of the others are kept does not depend on the
drawn tokens (algorithms.md §2, C2).

In steps of fixed shape on a GPU, drafters that run models of their own propose at the same time, on CUDA streams. One
drafter may be asked alone (``State.alone``): its tree is proposed as it is, and the others keep up with the text.

Steps of fixed shape, and steps with random draws, merge by tensor operations (``merge_tensors.py``); other eager steps
merge as Python lists (``list_tree.py``).

Shape letters: B rows, N nodes, D depth of the deepest node.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.trees.list_tree import ListTreeBuilder, merge_lists
from draftsmith.inference.trees.merge_tensors import TensorMerge
from draftsmith.inference.verify.sampling import Rows
from draftsmith.inference.verify.tree import TokenTree
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.attention_plan import Plans
from draftsmith.models.target import Target

ONE_STREAM = "DRAFTSMITH_ONE_STREAM"  # environment variable, for benchmarks: if it is set, there are no side streams


class MergedDrafter(Drafter):
    """A merge of drafters, by name; random draws are tested in this order, before all others. A drafter's tree must not
    hold two valid nodes of one path, and must have ``acceptance``. ``limit``: as :class:`TensorMerge` takes it."""

    def __init__(self, drafters: Mapping[str, Drafter], target: Target, limit: int) -> None:
        self.drafters, self.target = list(drafters.values()), target
        self.sources = tuple(drafters)
        self.self_correcting_sources = [drafter.self_correcting for drafter in drafters.values()]
        self.static = all(drafter.static for drafter in self.drafters)
        self.reuses = all(drafter.reuses for drafter in self.drafters)
        self.max_depth = max(drafter.max_depth for drafter in self.drafters)
        self.branching = sum(drafter.branching for drafter in self.drafters)
        self.all_nodes = 1 + sum(drafter.num_nodes - 1 for drafter in self.drafters)
        self.random_nodes = 1 + sum(drafter.num_nodes - 1 for drafter in self.drafters if drafter.random)
        self.limit = min(limit, self.all_nodes)
        # The bound, also of each drafter's own tree, for which its cache has to have slots.
        self.num_nodes = max(self.limit, self.random_nodes, *(drafter.num_nodes for drafter in self.drafters))
        self.random = self.random_nodes > 1
        self.models = tuple(model for drafter in self.drafters for model in drafter.models)
        self.captures = tuple(sorted({layer for drafter in self.drafters for layer in drafter.captures}))
        # Columns of the features that each drafter reads; None for all.
        self.columns: list[Tensor | None] = []
        for drafter in self.drafters:
            width, places = target.hidden_size, [0, *(1 + self.captures.index(layer) for layer in drafter.captures)]
            columns = [torch.arange(place * width, (place + 1) * width, device=target.device) for place in places]
            self.columns.append(None if tuple(drafter.captures) == self.captures else torch.cat(columns))
        self.reads_own_path = any(drafter.absorbs and drafter.reads_own_path for drafter in self.drafters)
        # Of an ensemble with further drafters, not each: graphs cost memory, and time before they pay.
        numbers = {0, len(self.drafters) - 1}
        self.own_counts = {number: min(self.drafters[number].num_nodes, self.limit) for number in sorted(numbers)}
        self.states: tuple[State, list[State]] | None = None  # the engine's, and the view of each drafter

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.fixed, self.states, self.rows = static, None, cache.rows
        for drafter in self.drafters:
            drafter.allocate(cache, max_depth, static)
        device = self.target.device
        self.tensor_merge = TensorMerge(self.drafters, self.sources, self.target, self.limit, cache.rows, max_depth)
        self.builder = ListTreeBuilder(device, cache.rows)
        self.single = -1  # the only drafter that proposed nodes in this step; −1 if there are several
        self.own_numbers: list[Tensor] = []  # [B, N] by drafter: each merged node's number in its tree, or −1
        # By drafter: the stream it proposes on; the others propose on the current one.
        self.streams: dict[int, torch.cuda.Stream] = {}
        if static and device.type == "cuda" and not os.environ.get(ONE_STREAM):
            with_models = [number for number, drafter in enumerate(self.drafters) if drafter.models]
            self.streams = {number: torch.cuda.Stream(device) for number in with_models[1:]}
        self.depths = torch.arange(max_depth + 1, device=device)
        self.zeros = torch.zeros(cache.rows, 1, dtype=torch.int64, device=device)

    def buffers(self) -> Sequence[Tensor]:
        return [buffer for drafter in self.drafters for buffer in drafter.buffers()]

    def begin(self, rows: Rows) -> None:
        for drafter in self.drafters:
            drafter.begin(rows)

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        for drafter, columns in zip(self.drafters, self.columns, strict=True):
            drafter.prefill(_select(features, columns), chunk)

    def reusable(self, source: int, common: int, read: int) -> int:
        return min(drafter.reusable(source, common, read) for drafter in self.drafters)

    def reuse(self, source: int, row: int, tokens: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.reuse(source, row, tokens)

    def end(self, row: int) -> None:
        for drafter in self.drafters:
            drafter.end(row)

    def prepare(self, state: State) -> None:
        for drafter in self.drafters:
            drafter.prepare(state)

    def propose(self, state: State) -> TokenTree:
        self.single = -1
        if state.alone is not None:
            return self._alone(state, state.alone)
        trees = self._draft(state)
        drawn = [tree.draws is not None and tree.draws.q is not None for tree in trees]
        assert all(is_drawn <= drafter.random for is_drawn, drafter in zip(drawn, self.drafters, strict=True))
        if self.fixed or any(drawn):
            tree, self.own_numbers = self.tensor_merge.merge(trees, drawn)
            return tree
        proposing = [number for number, tree in enumerate(trees) if tree.tokens.shape[1] > 1]
        if not proposing:
            self.own_numbers = [self.zeros] * len(self.drafters)  # the root is node 0 of each tree
            return self.builder.root_alone(state.root)
        if len(proposing) == 1 and trees[proposing[0]].tokens.shape[1] <= self.limit:
            return self._unmerged(trees[proposing[0]], proposing[0])
        budget = None if state.merged else state.budget
        merged, numbers = merge_lists(trees, self.sources, state.root.tolist(), budget, self.limit)
        self.own_numbers = [torch.tensor(by_row, device=self.zeros.device) for by_row in numbers]
        return self.builder.build(merged, state.root)

    def skip(self, state: State) -> None:
        self.single, self.own_numbers = -1, [self.zeros] * len(self.drafters)
        for drafter, view in zip(self.drafters, self._states(state), strict=True):
            drafter.skip(view)

    def _draft(self, state: State) -> list[TokenTree]:
        """Each drafter's tree, with corrected acceptance probabilities; with a budget, of those that it asks."""
        states, budget = self._states(state), state.budget
        if budget is None:
            return self._propose_all(states)
        trees = [self.builder.root_alone(state.root)] * len(self.drafters)
        for number in budget.order():
            drafter, view = self.drafters[number], states[number]
            if not budget.asks(number):
                drafter.skip(view)
                continue
            tree = drafter.propose(view)
            assert tree.acceptance is not None, f"{self.sources[number]}: its trees have no acceptance probabilities"
            acceptance = budget.corrected(number, tree.acceptance, tree.depth)
            trees[number] = replace(tree, acceptance=acceptance)
            budget.proposed(number, acceptance)
        return trees

    def _propose_all(self, states: Sequence[State]) -> list[TokenTree]:
        """Each drafter's tree; those with a stream of their own propose at the same time as the others.

        Side streams start after everything on the current stream, which then waits for all of them: this order, which a
        CUDA graph captures too, also protects freed memory. A side stream reuses its memory only after the next such
        start, and nothing that it reads is freed before the current stream has waited for it.
        """
        if not self.streams:
            return [drafter.propose(view) for drafter, view in zip(self.drafters, states, strict=True)]
        trees: dict[int, TokenTree] = {}
        current = torch.cuda.current_stream(self.target.device)
        for number, stream in self.streams.items():
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                trees[number] = self.drafters[number].propose(states[number])
        for number, (drafter, view) in enumerate(zip(self.drafters, states, strict=True)):
            if number not in self.streams:
                trees[number] = drafter.propose(view)
        for stream in self.streams.values():
            current.wait_stream(stream)
        return [trees[number] for number in range(len(self.drafters))]

    def _alone(self, state: State, number: int) -> TokenTree:
        """The tree of one drafter, without sources."""
        self.single, views = number, self._states(state)
        for other, drafter in enumerate(self.drafters):
            if other != number:
                drafter.skip(views[other])
        return replace(self.drafters[number].propose(views[number]), source=None)

    def _unmerged(self, tree: TokenTree, number: int) -> TokenTree:
        """The tree of the only drafter that proposes nodes, unchanged."""
        self.single = number
        source = (tree.depth > 0) & tree.valid if tree.source is None else tree.source
        return replace(tree, source=source.expand_as(tree.tokens).long() << number)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        for number, (drafter, view) in enumerate(zip(self.drafters, self._states(state), strict=True)):
            if drafter.absorbs:
                view_verdict = verdict
                if drafter.reads_own_path and number != self.single:
                    view_verdict = replace(verdict, own_path=self._own_path(number, verdict))
                drafter.absorb(view, view_verdict, tree, _select(features, self.columns[number]))

    def _own_path(self, number: int, verdict: Verdict) -> Tensor:
        """``Verdict.own_path`` of one of the drafters."""
        depth = self.depths[: verdict.path.shape[1]]
        path = verdict.path if verdict.own_path is None else verdict.own_path
        if self.single >= 0:
            return torch.where(depth == 0, path, -1)
        path = path.masked_fill(depth > verdict.length[:, None], -1)
        return torch.where(path >= 0, self.own_numbers[number].gather(1, path.clamp(min=0)), -1)

    def _states(self, state: State) -> list[State]:
        """The engine's state as each drafter sees it: its features and its own random stream."""
        if self.states is None or self.states[0] is not state:  # the engine changes its buffers in place
            views = [
                replace(state, stream=16 * state.stream + number, needs_acceptance=True, source=number, merged=True)
                for number in range(len(self.drafters))
            ]
            self.states = state, views
        for number, (view, columns) in enumerate(zip(self.states[1], self.columns, strict=True)):
            view.feature, view.plans = _select(state.feature, columns), state.plans
            if number in self.streams and state.plans is not None:  # no stream reads what another one is still writing
                view.plans = Plans(state.plans.lengths)
        return self.states[1]


def _select(features: Tensor, columns: Tensor | None) -> Tensor:
    return features if columns is None else features[..., columns]
