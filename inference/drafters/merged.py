"""Several drafters as one: their trees merged into one token tree within a node budget (SpecInfer, arXiv 2305.09781
§4.1).

The merged tree holds the union of their node sequences: equal paths become one node, which keeps the draws of each
source. In sampling mode every draw is tested with the distribution it was drawn from.

The nodes to keep are chosen at each step from the drafters' acceptance probabilities (``TokenTree.acceptance``) and the
step costs: the N likeliest nodes, where N maximises expected tokens / time. Nodes drawn at random are all kept, and
which of the others are kept does not depend on the drawn tokens (ALGORITHMS §2, C2).

In steps of fixed shape on a GPU, drafters that run models of their own propose at the same time, on CUDA streams.

Steps of fixed shape, and steps with random draws, merge by tensor operations (``merge_tensors.py``); other eager steps
merge on the host (``merge_host.py``).

Shape letters: B rows, N nodes, D depth of the deepest node.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.inference.drafters.host_tree import HostTreeBuilder, best_nodes
from draftsmith.inference.drafters.merge_host import merge_on_host
from draftsmith.inference.drafters.merge_tensors import TensorMerge
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.costs import STANDARD_COSTS, StepCosts
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.verify.tree import StaticTree, TokenTree
from draftsmith.inference.verify.verify import Verdict
from draftsmith.models.target import Target

MERGE_SECONDS = 3e-4  # time of merging and of the drafters' bookkeeping on a CPU
# Minimum ratio of speeds for running a drafter: accepting nodes of several sources costs more than is measured.
MARGIN = 1.1
PRIOR_TOKENS = 8.0  # weight of a drafter's estimate, in tokens, beside its accepted tokens in the text
ONE_STREAM = "DRAFTSMITH_ONE_STREAM"  # environment variable, for benchmarks: if it is set, there are no side streams


class MergedDrafter(Drafter):
    """A merge of drafters. A drafter's tree must not hold two valid nodes of one path, and must have ``acceptance``.

    Args:
        drafters: by name; random draws are tested in this order, before all others.
        budget: maximum of the merged tree's nodes, root included; in sampling mode raised if needed to fit all randomly
            drawn nodes.
        costs: of the target's steps; left out, as many nodes are kept as fit.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], target: Target, budget: int, costs: StepCosts | None = None
    ) -> None:
        self.drafters, self.target, self.costs = list(drafters.values()), target, costs
        self.sources = tuple(drafters)
        self.static = all(drafter.static for drafter in self.drafters)
        self.max_depth = max(drafter.max_depth for drafter in self.drafters)
        self.branching = sum(drafter.branching for drafter in self.drafters)
        self.all_nodes = 1 + sum(drafter.num_nodes - 1 for drafter in self.drafters)
        self.random_nodes = 1 + sum(drafter.num_nodes - 1 for drafter in self.drafters if drafter.random)
        self.budget = min(budget, self.all_nodes)
        # The bound, also of each drafter's own tree, for which its cache has to have slots.
        self.num_nodes = max(self.budget, self.random_nodes, *(drafter.num_nodes for drafter in self.drafters))
        self.random = self.random_nodes > 1
        self.models = tuple(model for drafter in self.drafters for model in drafter.models)
        self.captures = tuple(sorted({layer for drafter in self.drafters for layer in drafter.captures}))
        # Columns of the features that each drafter reads; None for all.
        self.columns: list[Tensor | None] = []
        for drafter in self.drafters:
            width, places = target.hidden_size, [0, *(1 + self.captures.index(layer) for layer in drafter.captures)]
            columns = [torch.arange(place * width, (place + 1) * width, device=target.device) for place in places]
            self.columns.append(None if tuple(drafter.captures) == self.captures else torch.cat(columns))
        self.states: tuple[State, list[State]] | None = None  # the engine's, and the view of each drafter

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.fixed, self.states, self.rows = static, None, cache.rows
        for drafter in self.drafters:
            drafter.allocate(cache, max_depth, static)
        device = self.target.device
        # Times of trees of 1, 2, … nodes; in sampling mode each row chooses by itself, by costs that are the same on
        # every machine.
        times = self.costs.table(self.all_nodes, cache.rows) if self.costs else [1.0] * self.all_nodes
        standard_times = STANDARD_COSTS.table(self.all_nodes, 1) if self.costs else times
        self.times, self.standard_times = times[: self.budget], standard_times[: self.budget]
        self.merge_time = MERGE_SECONDS / self.costs.seconds(cache.rows) if self.costs else 0.0
        self.tensor_merge = TensorMerge(
            self.drafters, self.sources, self.target, self.budget, cache.rows, max_depth, static, times,
            standard_times,
        )  # fmt: skip
        self.builder = HostTreeBuilder(device)
        self.root_tree = StaticTree([-1], device)
        # By drafter and row: accepted nodes that it proposed, and the number its estimate predicted.
        self.accepted, self.predicted = ([[PRIOR_TOKENS] * cache.rows for _ in self.drafters] for _ in range(2))
        self.estimated: dict[int, list[float]] = {}  # drafters run by their estimate in this step → prediction by row
        self.single = -1  # the only drafter that proposed nodes in this step; −1 if there are several
        self.own_numbers: list[Tensor] = []  # [B, N] by drafter: each merged node's number in its tree, or −1
        # By drafter: the stream it proposes on; the others propose on the current one.
        self.streams: dict[int, torch.cuda.Stream] = {}
        if static and device.type == "cuda" and not os.environ.get(ONE_STREAM):
            with_models = [number for number, drafter in enumerate(self.drafters) if drafter.models]
            self.streams = {number: torch.cuda.Stream(device) for number in with_models[1:]}
        self.depths = torch.arange(max_depth + 1, device=device)
        self.zeros = torch.zeros(cache.rows, 1, dtype=torch.int64, device=device)
        self.ones = torch.ones(cache.rows, 1, device=device)

    def buffers(self) -> Sequence[Tensor]:
        return [buffer for drafter in self.drafters for buffer in drafter.buffers()]

    def begin(self, rows: slice) -> None:
        for drafter, accepted, predicted in zip(self.drafters, self.accepted, self.predicted, strict=True):
            drafter.begin(rows)
            accepted[rows] = predicted[rows] = [PRIOR_TOKENS] * (rows.stop - rows.start)

    def prefill(self, features: Tensor, tokens: Tensor, start: int, rows: slice) -> None:
        for drafter, columns in zip(self.drafters, self.columns, strict=True):
            drafter.prefill(_select(features, columns), tokens, start, rows)

    def end(self, row: int) -> None:
        for drafter in self.drafters:
            drafter.end(row)

    def propose(self, state: State) -> TokenTree:
        whole_batch, self.single = state.settings is None, -1
        trees = self._draft(state, whole_batch)
        drawn = [tree.draws is not None and tree.draws.q is not None for tree in trees]
        assert all(is_drawn <= drafter.random for is_drawn, drafter in zip(drawn, self.drafters, strict=True))
        if self.fixed or any(drawn):
            tree, self.own_numbers = self.tensor_merge.merge(trees, drawn, whole_batch)
            return tree
        proposing = [number for number, tree in enumerate(trees) if tree.tokens.shape[1] > 1]
        if not proposing:
            self.own_numbers = [self.zeros] * len(self.drafters)  # the root is node 0 of each tree
            return self.root_tree.fill(state.root[:, None], self.zeros, self.ones)
        counted = state.active.tolist() if whole_batch else None
        times = self.times if whole_batch else self.standard_times
        if len(proposing) == 1 and self._keeps_all(trees[proposing[0]], times, counted):
            return self._unmerged(trees[proposing[0]], proposing[0])
        return self._merge_on_host(trees, state, times, counted)

    def _draft(self, state: State, whole_batch: bool) -> list[TokenTree]:
        """Each drafter's tree. In eager steps, drafters with an estimate come last, and run only if their expected
        tokens, corrected by the texts so far, raise the expected speed."""
        states = self._states(state)
        self.estimated = {}
        if self.fixed or not whole_batch or not self.costs:
            return self._propose_all(states)
        trees = [self.root_tree.fill(state.root[:, None], self.zeros, self.ones)] * len(self.drafters)
        with_estimate = [number for number, drafter in enumerate(self.drafters) if drafter.estimate is not None]
        tokens, nodes = 1.0, 0  # expected, per row
        for number, (drafter, view) in enumerate(zip(self.drafters, states, strict=True)):
            if number not in with_estimate:
                tree = trees[number] = drafter.propose(view)
                assert tree.acceptance is not None
                if tree.tokens.shape[1] > 1:
                    tokens += (float(tree.acceptance.sum()) - len(tree.acceptance)) / len(tree.acceptance)
                    nodes += tree.tokens.shape[1] - 1
        time = self.times[min(nodes, self.budget - 1)]
        for number in with_estimate:
            estimate = self.drafters[number].estimate
            assert estimate is not None
            new_nodes = nodes + estimate.nodes - 1
            step_time = self.times[min(new_nodes, self.budget - 1)]
            new_time = step_time + estimate.time + (self.merge_time if nodes else 0.0)
            ratios = [a / b for a, b in zip(self.accepted[number], self.predicted[number], strict=True)]
            gain = (estimate.tokens - 1) * sum(ratios) / len(ratios)
            if (tokens + gain) / new_time > MARGIN * tokens / time:
                trees[number] = self.drafters[number].propose(states[number])
                tokens, nodes, time = tokens + gain, new_nodes, new_time
                self.estimated[number] = [estimate.tokens - 1] * self.rows
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

    def _keeps_all(self, tree: TokenTree, times: Sequence[float], counted: Sequence[bool] | None) -> bool:
        """Whether all nodes of a tree would be kept."""
        assert tree.acceptance is not None
        rows = tree.acceptance.expand(self.rows, -1).tolist()
        kept = best_nodes(rows, times, counted)
        return all(len(nodes) >= sum(p > 0 for p in row) for nodes, row in zip(kept, rows, strict=True))

    def _unmerged(self, tree: TokenTree, number: int) -> TokenTree:
        """The tree of the only drafter that proposes nodes, unchanged."""
        self.single = number
        source = (tree.depth > 0) & tree.valid if tree.source is None else tree.source
        return replace(tree, source=source.expand_as(tree.tokens).long() << number)

    def _merge_on_host(
        self, trees: Sequence[TokenTree], state: State, times: Sequence[float], counted: Sequence[bool] | None
    ) -> TokenTree:
        merged, own_numbers, acceptances = merge_on_host(trees, self.sources, state.root.tolist(), times, counted)
        self.own_numbers = [torch.tensor(by_row, device=self.zeros.device) for by_row in own_numbers]
        for number in self.estimated:  # the prediction is for the nodes that were kept
            self.estimated[number] = [
                sum(row[node] for node in nodes if node > 0)
                for row, nodes in zip(acceptances[number], own_numbers[number], strict=True)
            ]
        if all(len(tree.tokens) == 1 for tree in merged):
            return self.root_tree.fill(state.root[:, None], self.zeros, self.ones)
        return self.builder.build(merged)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        self._record(state, verdict)
        for number, (drafter, view) in enumerate(zip(self.drafters, self._states(state), strict=True)):
            if drafter.absorbs:
                own_path = verdict.own_path if number == self.single else self._own_path(number, verdict)
                view_verdict = replace(verdict, own_path=own_path)
                drafter.absorb(view, view_verdict, tree, _select(features, self.columns[number]))

    def _own_path(self, number: int, verdict: Verdict) -> Tensor:
        """``Verdict.own_path`` of one of the drafters."""
        depth = self.depths[: verdict.path.shape[1]]
        path = verdict.path if verdict.own_path is None else verdict.own_path
        if self.single >= 0:
            return torch.where(depth == 0, path, -1)
        path = path.masked_fill(depth > verdict.length[:, None], -1)
        return torch.where(path >= 0, self.own_numbers[number].gather(1, path.clamp(min=0)), -1)

    def _record(self, state: State, verdict: Verdict) -> None:
        """Count the accepted nodes of the drafters that ran by their estimate."""
        if not self.estimated:
            return
        paths, lengths, active = verdict.path.tolist(), verdict.length.tolist(), state.active.tolist()
        for number, predicted in self.estimated.items():
            numbers = None if number == self.single else self.own_numbers[number].tolist()
            for row, (path, length) in enumerate(zip(paths, lengths, strict=True)):
                if active[row]:
                    accepted = (
                        length if numbers is None else sum(numbers[row][node] >= 0 for node in path[1 : length + 1])
                    )
                    self.accepted[number][row] += accepted
                    self.predicted[number][row] += predicted[row]

    def _states(self, state: State) -> list[State]:
        """The engine's state as each drafter sees it: its features and its own random stream."""
        if self.states is None or self.states[0] is not state:  # the engine changes its buffers in place
            views = [
                replace(state, stream=16 * state.stream + number, weighs=True) for number in range(len(self.drafters))
            ]
            self.states = state, views
        for view, columns in zip(self.states[1], self.columns, strict=True):
            view.feature = _select(state.feature, columns)
        return self.states[1]


def _select(features: Tensor, columns: Tensor | None) -> Tensor:
    return features if columns is None else features[..., columns]
