"""A draft model: any causal LM with the target's tokenizer drafts a tree of expansion ⟨k1, …, km⟩ (SpecInfer, arXiv
2305.09781 §3): every node at depth i − 1 gets k_i children. ⟨1, …, 1⟩ is a chain (arXiv 2211.17192).

The model has its own K/V cache, with the target's lengths. Node i of the tree is in slot L + i there, too, and a commit
moves the K/V of accepted nodes as in the target's cache. Accepted tokens that the model has not run (the last level is
only drafted; other drafters of a merge propose other nodes) are run with the next root, in one forward pass.

Shape letters: B rows, N nodes, n nodes of a level, k children of each, V vocabulary, d hidden width, A depth of the
deepest node + 1.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.inference.cache import KVCache
from draftsmith.inference.costs import STANDARD_COSTS, StepCosts
from draftsmith.inference.drafters.protocol import Drafter, State
from draftsmith.inference.runner import Runner
from draftsmith.inference.sampling import philox_uniforms, sampling_distribution
from draftsmith.inference.tree import MAX_NODES, Draws, StaticTree, TokenTree, bitsets
from draftsmith.inference.verify import Verdict
from draftsmith.kernels.tree_attention import ancestor_mask
from draftsmith.kernels.verify import IID, WITHOUT_REPLACEMENT, draw
from draftsmith.models.target import Target

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


@dataclass(frozen=True)
class _Level:
    """Nodes ``first`` … ``first + count − 1``, those of one depth: a forward pass's arguments, as views for B rows
    (T = first + count)."""

    first: int
    count: int
    children: int  # of each node; 0 in the last level
    ancestors: Tensor  # [B, n, W]
    depth: Tensor  # [B, n]
    key_depth: Tensor  # [B, T]
    mask: Tensor  # [B, n, T]


class DraftModelDrafter(Drafter):
    """A causal LM that drafts for a target.

    In greedy and typical mode it proposes the most likely tokens. In sampling mode it draws without replacement from
    its distribution under the request's own sampling parameters, except a repetition penalty.

    Beyond the model's own context all positions are its last one; drafts there are rarely accepted.

    Args:
        model: the draft model, on the target's device.
        expansion: k_i children of every node at depth i − 1.
        costs: of the target's steps.
        draft_cost: time of a forward pass of the model with one row, in plain steps of the target. With both, eager
            steps stop a tree at the depth where another level does not pay: for the whole batch, or in sampling mode
            for each row and by standard costs, so that a seed gives the same text in any batch and on any machine.

    Raises:
        ValueError: the vocabularies differ, the models are on different devices, or the expansion is empty, not
            positive, or too large.
    """

    def __init__(
        self, model: Target, target: Target, expansion: Sequence[int], *, costs: StepCosts | None = None,
        draft_cost: float | None = None,
    ) -> None:  # fmt: skip
        check_vocabulary(model, target)
        if model.device != target.device:
            raise ValueError(
                f"draft model '{model.name}' is on {model.device} and the target on {target.device}; load both on one"
            )
        given = f"expansion {list(expansion)}"
        if not expansion or min(expansion) < 1:
            raise ValueError(f"{given}: at least one depth, each with at least one child")
        # Ids beyond the smaller of two padded vocabularies are never drafted.
        self.vocabulary = min(model.vocab_size, target.vocab_size)
        if max(expansion) > self.vocabulary:
            raise ValueError(f"{given}: more children than the vocabulary of {self.vocabulary} has tokens")
        counts = [1]
        for children in expansion:
            counts.append(counts[-1] * children)
        self.num_nodes, self.max_depth, self.branching = sum(counts), len(expansion), max(expansion)
        if self.num_nodes > MAX_NODES:
            raise ValueError(
                f"{given}: a tree of {self.num_nodes} nodes; at most {MAX_NODES} can be verified in a step"
            )
        self.static = self.random = True
        self.models = (model,)
        self.model, self.expansion, self.counts = model, tuple(expansion), counts
        self.costs, self.draft_cost = costs, draft_cost
        self.target_vocabulary = target.vocab_size
        embedding = model.model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self.last_id = embedding.shape[0] - 1
        parents, firsts = [-1], [0]
        for depth, children in enumerate(expansion):
            firsts.append(len(parents))
            parents += [firsts[depth] + node // children for node in range(counts[depth + 1])]
        self.firsts = [*firsts, len(parents)]
        self.parents = parents

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        rows, device = cache.rows, cache.lengths.device
        self.max_missing = max_depth  # accepted tokens of a step that the model has not run, at most
        self.rows, self.eager = rows, not static
        self.cache = KVCache(self.model, rows, cache.capacity)
        self.cache.lengths = cache.lengths  # shared: both hold the same text
        self.runner = Runner(self.model, self.cache, static)
        # Trees with 0, 1, … levels below the root.
        self.trees = [StaticTree(self.parents[:end], device, max_depth) for end in self.firsts[1:]]
        whole = self.trees[-1]
        self.levels: list[_Level] = []
        for first, count, children in zip(self.firsts, self.counts, (*self.expansion, 0), strict=False):
            end = first + count
            parts = (
                whole.ancestors[:, first:end], whole.depth[:, first:end], whole.depth[:, :end],
                whole.mask[:, first:end, :end],
            )  # fmt: skip
            self.levels.append(_Level(first, count, children, *(p.expand(rows, *p.shape[1:]) for p in parts)))
        # Chains of 1, 2, … tokens that are run before the first level: missing tokens, then the root.
        chain = bitsets(list(range(-1, self.max_missing))).to(device)[None]  # [1, C, W]
        depth = torch.arange(self.max_missing + 1, dtype=torch.int32, device=device)[None]
        self.chains: list[_Level] = []
        for count in range(1, self.max_missing + 2):
            mask = ancestor_mask(chain[:, :count], count)
            parts = (chain[:, :count], depth[:, :count], depth[:, :count], mask)
            self.chains.append(_Level(0, count, 0, *(p.expand(rows, *p.shape[1:]) for p in parts)))
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

    def _times(self, costs: StepCosts, draft_cost: float, rows: int) -> list[float]:
        """Times of steps with trees of 0, 1, … levels, in plain steps with one row."""
        passes = [0.0]
        for count in self.counts:
            passes.append(passes[-1] + draft_cost * costs.relative(rows * count))
        return [one + costs.relative(rows * end) for one, end in zip(passes, self.firsts[1:], strict=False)]

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
        settings, uniforms = None, None
        if state.settings is not None:
            settings = copy(state.settings)
            settings.uses_penalty = False  # exact with any q, as long as tokens are drawn from it
            uniforms = philox_uniforms(
                settings.seed, state.step, self.num_nodes - 1, state.stream
            )  # one per drawn node
            valid.append(self.ones > 0)
        expected: list[list[float]] = []  # tokens, by level and row
        continues = [True] * self.rows  # whether each row gets another level
        for depth, level in enumerate(self.levels[:-1]):
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
                hidden = self._run(level, tokens[-1], state.length)
            self.deepest_run = depth
            logits = self.model.logits(hidden)[..., : self.vocabulary]
            k, below = level.children, self.levels[depth + 1]
            if settings is None or uniforms is None:
                p, best = self._top(logits.float().softmax(-1), k)
                acceptance = acceptances[-1][..., None] * p
            else:
                q = sampling_distribution(logits, settings)
                node_uniforms = uniforms[:, below.first - 1 : below.first + below.count - 1].view(self.rows, -1, k)
                best, drawn = draw_children(q, node_uniforms)
                drawn = drawn & valid[-1][..., None]
                if not all(continues):
                    drawn = drawn & torch.tensor(continues, device=drawn.device)[:, None, None]
                valid.append(drawn.flatten(1))
                distributions.append(q)
                # Must not depend on the drawn tokens, as a merge may leave out draws by it. A draw from a confident
                # distribution is nearly always accepted, one from a flat distribution about half the time; later draws
                # count only if the earlier ones are rejected.
                accepted = 0.5 + 0.5 * q.amax(-1, keepdim=True)
                first_accepted = accepted * (1 - accepted) ** self.numbers[:k]
                acceptance = torch.where(drawn, acceptances[-1][..., None] * first_accepted, 0.0)
            tokens.append(best.flatten(1))
            acceptances.append(acceptance.flatten(1))
        tree = self.trees[len(tokens) - 1].fill(torch.cat(tokens, 1))
        tree = replace(tree, acceptance=torch.cat(acceptances, 1))
        return self._drawn(tree, torch.cat(valid, 1), torch.cat(distributions, 1)) if distributions else tree

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        path, length, own_path = verdict.path, verdict.length, verdict.own_path
        if own_path is None:
            own_path, kept = path, length.clamp(max=self.deepest_run)
        else:  # keep the nodes that it proposed and ran; the rest of the path becomes missing tokens
            assert path.shape[1] - 1 <= self.max_missing, "the merge's trees are deeper than the max_depth it gave"
            depths = self.numbers[: path.shape[1]]
            run = (own_path >= 0) & (own_path < self.firsts[self.deepest_run + 1]) & (depths <= length[:, None])
            kept = run.long().cumprod(1).sum(1) - 1
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

    def _run(self, level: _Level, tokens: Tensor, lengths: Tensor) -> Tensor:
        # In a level of one node, all earlier nodes are its ancestors.
        return self.runner.forward_nodes(
            self._readable(tokens), lengths, level.ancestors, level.depth, first=level.first,
            key_depth=level.key_depth, mask=level.mask, fixed=True,
            sees_all=level.count == 1,
        )[0]  # fmt: skip

    def _readable(self, tokens: Tensor) -> Tensor:
        """Token ids within the model's embedding; ids beyond it become the last one."""
        return tokens.clamp(max=self.last_id) if self.last_id + 1 < self.target_vocabulary else tokens

    def _top(self, p: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if count == 1:  # max is faster than topk
            return p.max(-1, keepdim=True)
        return p.topk(count, -1)

    def _drawn(self, tree: TokenTree, valid: Tensor, q: Tensor) -> TokenTree:
        """The tree with its draws, those of node i from row i of ``q [B, R, Vq]``; invalid nodes are not draws."""
        assert tree.draws is not None
        child = tree.draws.child
        child = torch.where(valid.gather(1, child.clamp(min=0).flatten(1)).view_as(child), child, -1)
        if q.shape[2] < self.target_vocabulary:
            q = torch.nn.functional.pad(q, (0, self.target_vocabulary - q.shape[2]))
        kind = torch.full_like(tree.draws.kind, WITHOUT_REPLACEMENT if child.shape[2] > 1 else IID)
        q_row = self.numbers[: child.shape[1]].clamp(max=q.shape[1] - 1)[None, :, None].expand_as(child)
        return replace(tree, valid=valid, static=None, draws=Draws(child, kind, q_row, q))


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


def draw_children(q: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw k tokens of each distribution without replacement, in order, by inversion.

    Args:
        q: ``[B, n, V]`` float32.
        uniforms: ``[B, n, k]`` float32 in [0, 1), fresh.

    Returns:
        Tokens ``[B, n, k]`` int64; bool ``[B, n, k]``, False where no token was left to draw (or q is NaN).
    """
    weights, flat_uniforms = q.flatten(0, 1), uniforms.flatten(0, 1)
    tokens: list[Tensor] = []
    drawn: list[Tensor] = []
    for turn in range(uniforms.shape[2]):
        if turn:
            weights = weights.scatter(1, tokens[-1], 0.0)
        tokens.append(draw(weights, flat_uniforms[:, turn])[:, None])
        drawn.append(weights.gather(1, tokens[-1]) > 0)
    return torch.cat(tokens, 1).view(uniforms.shape), torch.cat(drawn, 1).view(uniforms.shape)
