"""A draft model: any causal LM with the target's tokenizer drafts a tree level by level (SpecInfer, arXiv 2305.09781
§3). The tree is an expansion ⟨k1, …, km⟩, in which every node at depth i − 1 gets k_i children (⟨1, …, 1⟩ is a chain,
arXiv 2211.17192), or any tree of ranks.

The model has its own K/V cache, with the target's lengths. Node i of the tree is in slot L + i there, too, and a commit
moves the K/V of accepted nodes as in the target's cache. Only nodes that have children are run; they come first in
their level. Accepted tokens that the model has not run (leaves; nodes that other drafters of a merge propose) are run
with the next root, in one forward pass.

Shape letters: B rows, N nodes, n nodes of a level that are run, k best tokens or draws of each, V vocabulary, S draft
vocabulary, d hidden width, R rows of q, K draws of a node, A depth of the deepest node + 1.
"""

import itertools
import operator
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.inference.cache import KVCache
from draftsmith.inference.costs import STANDARD_COSTS, StepCosts
from draftsmith.inference.drafters.protocol import Drafter, State
from draftsmith.inference.runner import Runner
from draftsmith.inference.sampling import philox_uniforms, sampling_distribution
from draftsmith.inference.tree import MAX_NODES, Draws, Ranks, StaticTree, TokenTree, Topology, bitsets
from draftsmith.inference.verify import Verdict
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.kernels.verify import IID, ONE_HOT, WITHOUT_REPLACEMENT, draw
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import check_draft_vocab, head_rows

_ALL_CACHED = 1 << 40  # more tokens than any text has
_STANDARD_PASS = 0.25  # standard cost of a forward pass of a draft model, in plain steps of the target


def check_vocabulary(model: Target, target: Target) -> None:
    """Check that a draft model's tokenizer has the target's vocabulary; skipped if one of them has no tokenizer.

    Raises:
        ValueError: the vocabularies differ.
    """
    if model.tokenizer is None or target.tokenizer is None or model.tokenizer is target.tokenizer:
        return
    ids, target_ids = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if ids == target_ids:
        return
    token = min((token for token in ids.keys() | target_ids.keys() if ids.get(token) != target_ids.get(token)), key=str)
    entries = [f"is id {v[token]}" if token in v else "is missing" for v in (ids, target_ids)]
    raise ValueError(
        f"draft model '{model.name}' has another vocabulary than target '{target.name}': token {token!r} {entries[0]} "
        f"in one and {entries[1]} in the other; take a draft model with the target's tokenizer"
    )


class _Layout:
    """The nodes of a tree of ranks, level by level; in each level the nodes that have children come first.

    paths: of each node. parents: of each node, −1 at the root.
    firsts: the first node of each level, then N. runs: number of nodes in each level that have children.
    best: for each level below the root, (k, places): its nodes among the k best tokens of each node run above, as
        places in ``[n · k]``. drawn: the same among k draws of each.
    children: the children of each node, in rank order.
    """

    def __init__(self, topology: Topology) -> None:
        inner = {path[:-1] for path in topology.paths}
        by_level: list[list[Ranks]] = [[] for _ in range(topology.max_depth + 1)]
        for path in ((), *topology.paths):
            by_level[len(path)].append(path)
        for level in by_level:
            level.sort(key=lambda path: (path not in inner, path))
        self.paths = [*itertools.chain(*by_level)]
        number = {path: node for node, path in enumerate(self.paths)}
        self.firsts = [*itertools.accumulate(map(len, by_level), initial=0)]
        self.runs = [sum(path in inner for path in level) for level in by_level]
        self.parents = [-1, *(number[path[:-1]] for path in self.paths[1:])]
        self.children: list[list[int]] = [[] for _ in self.paths]
        for path in topology.paths:  # sorted
            self.children[number[path[:-1]]].append(number[path])
        self.best: list[tuple[int, list[int]]] = []
        self.drawn: list[tuple[int, list[int]]] = []
        for first, level in zip(self.firsts, by_level[1:], strict=False):
            above = [number[path[:-1]] for path in level]
            ranks = [path[-1] for path in level]
            turns = [self.children[node].index(number[path]) for node, path in zip(above, level, strict=True)]
            for found, orders in ((self.best, ranks), (self.drawn, turns)):
                k = max(orders) + 1
                found.append((k, [(node - first) * k + order for node, order in zip(above, orders, strict=True)]))


@dataclass(frozen=True)
class _Pass:
    """A forward pass of nodes ``first`` … ``first + count − 1``: its arguments, views for B rows (T = first + count).

    sees_all: it runs a single node, and all earlier nodes are its ancestors.
    """

    first: int
    count: int
    sees_all: bool
    ancestors: Tensor  # [B, n, W]
    depth: Tensor  # [B, n]
    key_depth: Tensor  # [B, T]
    mask: Tensor  # [B, n, T]

    def of(self, values: Tensor) -> Tensor:
        """Values of a level's nodes ``[B, nodes]`` → those of the nodes that are run, ``[B, n]``."""
        return values if values.shape[1] == self.count else values[:, : self.count]


@dataclass(frozen=True)
class _Choice:
    """The nodes of a level among k candidates for each node that was run in the level above.

    places: in ``[n · k]``; None for all of them, in order.
    """

    k: int
    places: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        """``[B, n, k]`` values of the candidates → those of the level's nodes, ``[B, nodes]``."""
        values = values.flatten(1)
        return values if self.places is None else values.index_select(1, self.places)


class DraftModelDrafter(Drafter):
    """A causal LM that drafts for a target.

    In greedy and typical mode the node of path (…, r) is its parent's r-th best token. In sampling mode a node with c
    children draws c tokens from the model's distribution under the request's own sampling parameters, except a
    repetition penalty; its children, in rank order, are these draws.

    Beyond the model's own context all positions are its last one; drafts there are rarely accepted.

    Args:
        model: the draft model, on the target's device.
        tree: an expansion, k_i children of every node at depth i − 1; or a tree of ranks.
        draft_vocab: ``[S]`` int64, ascending: the ids that are drafted; logits are computed for these alone.
        draws: in sampling mode, ``without_replacement``; ``iid``: independent draws, of which equal ones share a node;
            ``naive``: without replacement, but verified as deterministic drafts (accepted iff the target's own sample
            is among them), which is exact and accepts less: for comparison.
        costs: of the target's steps.
        draft_cost: time of a forward pass of the model with one row, in plain steps of the target. With both, eager
            steps stop a tree at the depth where another level does not pay: for the whole batch, or in sampling mode
            for each row and by standard costs, so that a seed gives the same text in any batch and on any machine.

    Raises:
        ValueError: the vocabularies differ, the models are on different devices, the draft vocabulary is not made of
            ascending ids of both models, its rows cannot be taken from the LM head, or the tree is empty, not positive,
            or too large.
    """

    def __init__(
        self, model: Target, target: Target, tree: Sequence[int] | Topology, *, draft_vocab: Tensor | None = None,
        draws: Literal["without_replacement", "iid", "naive"] = "without_replacement", costs: StepCosts | None = None,
        draft_cost: float | None = None,
    ) -> None:  # fmt: skip
        check_vocabulary(model, target)
        if model.device != target.device:
            raise ValueError(
                f"draft model '{model.name}' is on {model.device} and the target on {target.device}; load both on one"
            )
        self.model, self.head, self.ids = model, model, None
        # Ids beyond the smaller of two padded vocabularies are never drafted.
        self.vocabulary = min(model.vocab_size, target.vocab_size)
        if draft_vocab is not None:
            check_draft_vocab(draft_vocab, draft_vocab.numel(), self.vocabulary, f"draft model '{model.name}'")
            self.vocabulary, self.ids = draft_vocab.numel(), draft_vocab.long().to(model.device)
            self.head = copy(model)  # Target.logits then applies the model's own scale and cap to these rows
            self.head.lm_head = head_rows(model.lm_head, self.ids)
        topology = _topology(tree, self.vocabulary)
        self.layout = _Layout(topology)
        self.num_nodes, self.max_depth = topology.num_nodes, topology.max_depth
        self.branching = max(map(len, self.layout.children))
        self.static, self.draws = True, draws
        self.random = draws != "naive"  # its naive draws are verified, and merged, as deterministic ones
        self.models = (model,)
        self.costs, self.draft_cost = costs, draft_cost
        self.target_vocabulary = target.vocab_size
        embedding = model.model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self.last_id = embedding.shape[0] - 1

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        rows, device = cache.rows, cache.lengths.device
        self.max_missing = max_depth  # accepted tokens of a step that the model has not run, at most
        self.rows, self.eager = rows, not static
        self.cache = KVCache(self.model, rows, cache.capacity)
        self.cache.lengths = cache.lengths  # shared: both hold the same text
        self.runner = Runner(self.model, self.cache, static)
        self._allocate_levels(device, max_depth)
        # Chains of 1, 2, … tokens that are run before the first level: missing tokens, then the root.
        chain = bitsets(list(range(-1, self.max_missing))).to(device)[None]  # [1, C, W]
        depth = torch.arange(self.max_missing + 1, dtype=torch.int32, device=device)[None]
        self.chains: list[_Pass] = []
        for count in range(1, self.max_missing + 2):
            mask = ancestor_mask(chain[:, :count], count)
            parts = (chain[:, :count], depth[:, :count], depth[:, :count], mask)
            self.chains.append(_Pass(0, count, count == 1, *(p.expand(rows, *p.shape[1:]) for p in parts)))
        # Number of tokens of each text in the model's cache, and the tokens after these, up to the root. The number of
        # missing tokens follows from it, and is 0 in warm-up steps, which reset the lengths: these then write no slot
        # before the length.
        self.cached = torch.full((rows,), _ALL_CACHED, dtype=torch.int64, device=device)
        self.missing_tokens = torch.zeros(rows, self.max_missing + 1, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(rows, device=device)
        self.numbers = torch.arange(max(self.num_nodes, self.max_depth, self.max_missing) + 2, device=device)
        self.ones = torch.ones(rows, 1, device=device)
        self.deepest_run = 0  # level of the current step
        self.stops_early = self.eager and self.costs is not None and self.draft_cost is not None
        if self.costs is not None and self.draft_cost is not None:
            self.times = self._times(self.costs, self.draft_cost, rows)
            self.standard_times = self._times(STANDARD_COSTS, _STANDARD_PASS, 1)

    def _allocate_levels(self, device: torch.device, max_depth: int) -> None:
        """The constant tensors of the tree's levels."""
        layout, nodes, depth = self.layout, self.num_nodes, self.max_depth
        # Trees with 0, 1, … levels below the root.
        self.trees = [StaticTree(layout.parents[:end], device, max_depth) for end in layout.firsts[1:]]
        whole = self.trees[-1]
        self.passes: list[_Pass] = []
        for level, (first, count) in enumerate(zip(layout.firsts, layout.runs[:-1], strict=False)):
            end = first + count
            parts = (
                whole.ancestors[:, first:end], whole.depth[:, first:end], whole.depth[:, :end],
                whole.mask[:, first:end, :end],
            )  # fmt: skip
            views = (part.expand(self.rows, *part.shape[1:]) for part in parts)
            self.passes.append(_Pass(first, count, count == 1 and first == level, *views))

        def choices(levels: list[tuple[int, list[int]]]) -> list[_Choice]:
            whole_levels = zip(layout.runs, levels, strict=False)
            return [
                _Choice(k, None if places == [*range(count * k)] else torch.tensor(places, device=device))
                for count, (k, places) in whole_levels
            ]

        self.best, self.drawn = choices(layout.best), choices(layout.drawn)
        # The child of each draw in each of the trees, [1, N, K]; the row of q that a node's draws come from, [1, N, 1].
        children = [[*each, *[-1] * (self.branching - len(each))] for each in layout.children]
        child = torch.tensor(children, device=device)[None]
        most = [0, *itertools.accumulate((drawn.k for drawn in self.drawn), max)]
        self.children = [
            torch.where(child[:, :end, :k] < end, child[:, :end, :k], -1)
            for end, k in zip(layout.firsts[1:], most, strict=True)
        ]
        q_rows, row = [0] * nodes, 0
        # For each i, whether a node has been run if levels 0 … i were, [N + 1]; False in the last place, for node −1.
        ran = torch.zeros(depth, nodes + 1, dtype=torch.bool)
        for level in self.passes:
            for node in range(level.first, level.first + level.count):
                q_rows[node], row = row, row + 1
        for number, level in enumerate(self.passes):
            ran[number:, level.first : level.first + level.count] = True
        self.q_rows, self.ran = torch.tensor(q_rows, device=device)[None, :, None], ran.to(device).unbind()
        self.has_early_leaves = any(
            count < after - first
            for first, after, count in zip(layout.firsts, layout.firsts[1:], layout.runs[:-1], strict=False)
        )

    def _times(self, costs: StepCosts, draft_cost: float, rows: int) -> list[float]:
        """Times of steps with trees of 0, 1, … levels, in plain steps with one row."""
        passes = [0.0]
        for count in self.layout.runs[:-1]:
            passes.append(passes[-1] + draft_cost * costs.relative(rows * count))
        return [one + costs.relative(rows * end) for one, end in zip(passes, self.layout.firsts[1:], strict=True)]

    def buffers(self) -> Sequence[Tensor]:
        return self.cached, self.missing_tokens

    def begin(self, rows: slice) -> None:
        self.cached[rows] = _ALL_CACHED  # the prefill runs the whole prompt

    def prefill(self, features: Tensor, tokens: Tensor, start: int, rows: slice) -> None:
        self.cache.window = None if rows.stop - rows.start == self.rows else rows
        self.runner.forward_chunk(self._readable(tokens), start)
        self.cache.window = None

    def propose(self, state: State) -> TokenTree:
        hidden = self._run_root(state)  # [B, 1, d]
        tokens = [state.root[:, None]]
        acceptances = [self.ones]
        valid: list[Tensor] = []
        distributions: list[Tensor] = []
        first_equal: list[Tensor] = []
        settings, uniforms = None, None
        if state.settings is not None:
            settings = copy(state.settings)
            settings.uses_penalty = False  # exact with any q, as long as tokens are drawn from it
            count = sum(level.count * drawn.k for level, drawn in zip(self.passes, self.drawn, strict=True))
            uniforms = philox_uniforms(settings.seed, state.step, count, state.stream)
            valid.append(self.ones > 0)
        used = 0  # uniforms
        expected: list[list[float]] = []  # tokens, by level and row
        continues = [True] * self.rows  # whether each row gets another level
        for depth, level in enumerate(self.passes):
            if self.stops_early:
                expected.append((acceptances[-1].sum(1) * state.active).tolist())
                if depth and settings is None and not _pays([sum(rows) for rows in expected], self.times):
                    break
                if depth and settings is not None:
                    by_row = zip(continues, zip(*expected, strict=True), strict=True)
                    continues = [before and _pays(levels, self.standard_times) for before, levels in by_row]
                    if not any(continues):
                        break
            if depth:
                hidden = self._run(level, level.of(tokens[-1]), state.length)
            self.deepest_run = depth
            logits = self.head.logits(hidden)[..., : self.vocabulary]
            above = level.of(acceptances[-1])[..., None]
            if settings is None or uniforms is None:
                choice = self.best[depth]
                p, best = self._top(logits.float().softmax(-1), choice.k)
                acceptance = above * p
            else:
                choice = self.drawn[depth]
                k = choice.k
                q = sampling_distribution(logits, settings)
                node_uniforms = uniforms[:, used : used + level.count * k].view(self.rows, level.count, k)
                used += level.count * k
                best, drawn = draw_children(q, node_uniforms, replacement=self.draws == "iid")
                drawn = drawn & level.of(valid[-1])[..., None]
                if not all(continues):
                    drawn = drawn & torch.tensor(continues, device=drawn.device)[:, None, None]
                if self.draws == "iid" and self.branching > 1:
                    first = (best[..., None] == best[..., None, :]).int().argmax(-1)
                    first_equal.append(F.pad(first, (0, self.branching - k)))
                    drawn = drawn & (first == self.numbers[:k])  # others share the node of the first equal draw
                valid.append(choice.of(drawn))
                distributions.append(q)
                # Must not depend on the drawn tokens, as a merge may leave out draws by it. A draw from a confident
                # distribution is nearly always accepted, one from a flat distribution about half the time; later draws
                # count only if the earlier ones are rejected.
                accepted = 0.5 + 0.5 * q.amax(-1, keepdim=True)
                acceptance = torch.where(drawn, above * accepted * (1 - accepted) ** self.numbers[:k], 0.0)
            best = choice.of(best)
            tokens.append(best if self.ids is None else self.ids[best])
            acceptances.append(choice.of(acceptance))
        levels = len(tokens) - 1
        tree = replace(self.trees[levels].fill(torch.cat(tokens, 1)), acceptance=torch.cat(acceptances, 1))
        if not distributions:
            return tree
        draws_valid = torch.cat(valid, 1)
        draws = self._draws(self.children[levels], draws_valid, torch.cat(distributions, 1), first_equal)
        return replace(tree, valid=draws_valid, static=None, draws=draws)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        path, length, own_path = verdict.path, verdict.length, verdict.own_path
        ran = self.ran[self.deepest_run]
        if own_path is None:
            own_path = path
            # Only the last accepted node may be one that was not run.
            kept = length - 1 + ran[verdict.node] if self.has_early_leaves else length.clamp(max=self.deepest_run)
        else:  # keep the nodes that it proposed and ran; the rest of the path becomes missing tokens
            assert path.shape[1] - 1 <= self.max_missing, "the merge's trees are deeper than the max_depth it gave"
            depths = self.numbers[: path.shape[1]]
            kept = (ran[own_path] & (depths <= length[:, None])).long().cumprod(1).sum(1) - 1
            own_path = torch.where(depths <= kept[:, None], own_path, depths)
        own_path = own_path[:, : self.deepest_run + 1]
        if self.branching > 1 and (not self.eager or bool((own_path != self.numbers[: own_path.shape[1]]).any())):
            self.cache.commit(own_path, kept)
        torch.add(state.length, kept + 1, out=self.cached)
        if not self.eager or bool((length > kept).any()):
            at = (kept[:, None] + self.numbers[1 : self.max_missing + 1]).clamp(max=path.shape[1] - 1)
            node = path.gather(1, at).clamp(max=tree.tokens.shape[1] - 1)
            self.missing_tokens[:, : self.max_missing] = tree.tokens.gather(1, node)

    def _run_root(self, state: State) -> Tensor:
        """Run the missing tokens and the root; returns the root's hidden states ``[B, 1, d]``.

        Rows with fewer missing tokens are padded on the right; the tree's nodes later overwrite the padding.
        """
        missing = (state.length - self.cached).clamp(min=0)  # [B]
        longest = int(missing.max()) if self.eager else self.max_missing
        if not longest:
            return self._run(self.chains[0], state.root[:, None], state.length)
        tokens = self.missing_tokens[:, : longest + 1].scatter(1, missing[:, None], state.root[:, None])
        hidden = self._run(self.chains[longest], tokens, state.length - missing)
        return hidden[self.row_numbers, missing][:, None]

    def _run(self, level: _Pass, tokens: Tensor, lengths: Tensor) -> Tensor:
        return self.runner.forward_nodes(
            self._readable(tokens), lengths, level.ancestors, level.depth, first=level.first,
            key_depth=level.key_depth, mask=level.mask, fixed=True,
            sees_all=level.sees_all,
        )[0]  # fmt: skip

    def _readable(self, tokens: Tensor) -> Tensor:
        """Token ids within the model's embedding; ids beyond it become the last one."""
        return tokens.clamp(max=self.last_id) if self.last_id + 1 < self.target_vocabulary else tokens

    def _top(self, p: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if count == 1:  # max is faster than topk
            return p.max(-1, keepdim=True)
        return p.topk(count, -1)

    def _draws(self, child: Tensor, valid: Tensor, q: Tensor, first_equal: list[Tensor]) -> Draws:
        """The draws of a tree; invalid nodes are not draws.

        Args:
            child: ``[1, N, K]`` int64, the child of each draw, −1 after a node's last one.
            valid: ``[B, N]`` bool.
            q: ``[B, R, S or V]``, of each node that was run.
            first_equal: for i.i.d. draws, ``[B, n, K]`` int64 by level: the node's first draw of the same token.
        """
        child = child.expand(self.rows, -1, -1)
        q_row = self.q_rows[:, : child.shape[1]].clamp(max=q.shape[1] - 1).expand_as(child)
        if first_equal:
            first = torch.cat(first_equal, 1)[..., : child.shape[2]].gather(1, q_row)
            child = torch.where(child >= 0, child.gather(2, first), -1)
        child = torch.where(valid.gather(1, child.clamp(min=0).flatten(1)).view_as(child), child, -1)
        if self.draws == "naive":
            return Draws(child, torch.full_like(child, ONE_HOT, dtype=torch.int8), torch.zeros_like(child))
        without_replacement = self.draws == "without_replacement" and child.shape[2] > 1
        kind = torch.full_like(child, WITHOUT_REPLACEMENT if without_replacement else IID, dtype=torch.int8)
        if self.ids is not None:
            return Draws(child, kind, q_row, q, self.ids[None, None])
        if q.shape[2] < self.target_vocabulary:
            q = F.pad(q, (0, self.target_vocabulary - q.shape[2]))
        return Draws(child, kind, q_row, q)


def _topology(tree: Sequence[int] | Topology, vocabulary: int) -> Topology:
    """The tree of an expansion, or the one given; checked.

    Raises:
        ValueError: it is empty, not positive, too large, or has more children than the vocabulary has tokens.
    """
    if isinstance(tree, Topology):
        given, nodes, children = "tree", tree.num_nodes, tree.max_rank + 1
        if not tree.paths:
            raise ValueError("tree: holds the root alone; a draft model needs at least one path")
    else:
        given = f"expansion {list(tree)}"
        if not tree or min(tree) < 1:
            raise ValueError(f"{given}: at least one depth, each with at least one child")
        nodes, children = 1 + sum(itertools.accumulate(tree, operator.mul)), max(tree)
    if children > vocabulary:
        raise ValueError(f"{given}: more children than the vocabulary of {vocabulary} has tokens")
    if nodes > MAX_NODES:
        raise ValueError(f"{given}: a tree of {nodes} nodes; at most {MAX_NODES} can be verified in a step")
    if isinstance(tree, Topology):
        return tree
    levels = ([*itertools.product(*map(range, tree[:depth]))] for depth in range(1, len(tree) + 1))
    return Topology(tuple(itertools.chain(*levels)))


def _pays(expected: Sequence[float], times: Sequence[float]) -> bool:
    """Whether some larger number of levels increases expected tokens / time, if the expected tokens of further levels
    decrease by the last level's ratio.

    Args:
        expected: expected tokens of each level so far, from the root's on.
        times: of a step whose tree has 0, 1, … levels.
    """
    if not expected[-1]:
        return False
    total, last, levels = sum(expected), expected[-1], len(expected)
    rate, ratio = total / times[levels - 1], min(1.0, last / expected[-2])
    for time in times[levels:]:
        last *= ratio
        total += last
        if total / time > rate:
            return True
    return False


def draw_children(q: Tensor, uniforms: Tensor, replacement: bool = False) -> tuple[Tensor, Tensor]:
    """Draw k tokens of each distribution in order, by inversion.

    Args:
        q: ``[B, n, V]`` float32.
        uniforms: ``[B, n, k]`` float32 in [0, 1), fresh.
        replacement: draw them independently; otherwise none is drawn twice.

    Returns:
        Tokens ``[B, n, k]`` int64; bool ``[B, n, k]``, False where no token was left to draw (or q is NaN).
    """
    weights, flat_uniforms = q.flatten(0, 1), uniforms.flatten(0, 1)
    tokens: list[Tensor] = []
    drawn: list[Tensor] = []
    for turn in range(uniforms.shape[2]):
        if turn and not replacement:
            weights = weights.scatter(1, tokens[-1], 0.0)
        tokens.append(draw(weights, flat_uniforms[:, turn])[:, None])
        drawn.append(weights.gather(1, tokens[-1]) > 0)
    return torch.cat(tokens, 1).view(uniforms.shape), torch.cat(drawn, 1).view(uniforms.shape)
