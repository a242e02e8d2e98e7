"""A draft model: any causal LM with the target's tokenizer drafts a tree of expansion ⟨k1, …, km⟩ (SpecInfer, arXiv
2305.09781 §3): every node at depth i − 1 gets k_i children. ⟨1, …, 1⟩ is a chain (arXiv 2211.17192).

The model has a K/V cache of its own, with the target's lengths. Node i of the tree is in slot L + i there, too, so that
a commit moves the same slots, and nothing is run twice: K/V of an accepted node is what the model would make of the
committed text. Accepted tokens that it did not run (the last level is only drafted; another source may have proposed
others) go through it together with the next root, in one forward pass.

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

_NEVER = 1 << 40  # more tokens than any text has
_STANDARD_PASS = 0.25  # a forward pass of a draft model over a plain step of the target, where it may not be measured


def check_vocabulary(model: Target, target: Target) -> None:
    """A draft model's tokens are the target's: their tokenizers have the same vocabulary. Models without a tokenizer
    are taken as they are.

    Raises:
        ValueError: the vocabularies differ.
    """
    if model.tokenizer is None or target.tokenizer is None or model.tokenizer is target.tokenizer:
        return
    own, wanted = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if own == wanted:
        return
    token = min((token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token)), key=str)
    ids = [f"is id {v[token]}" if token in v else "is missing" for v in (own, wanted)]
    raise ValueError(
        f"draft model '{model.name}' has another vocabulary than target '{target.name}': token {token!r} {ids[0]} in "
        f"one and {ids[1]} in the other; take a draft model with the target's tokenizer"
    )


@dataclass(frozen=True)
class _Level:
    """Nodes ``first`` … ``first + count − 1``: those of one depth, and how a forward pass runs them (views for B rows;
    T = first + count)."""

    first: int
    count: int
    children: int  # of each; 0 in the last level
    ancestors: Tensor  # [B, n, W]
    depth: Tensor  # [B, n]
    key_depth: Tensor  # [B, T]
    mask: Tensor  # [B, n, T]


class DraftModelDrafter(Drafter):
    """A causal LM that drafts for a target. Greedy and typical steps: the most likely tokens, deterministic. Sampling:
    draws without replacement from the model's distribution under the request's own sampling parameters, but for a
    repetition penalty.

    Beyond the model's own context its positions stand still, and what it drafts there is rarely accepted.

    Args:
        model: the draft model, on the target's device.
        expansion: k_i children of every node at depth i − 1.
        costs, draft_cost: of a target's step by rows; of a forward pass of the model with one row, over a plain step of
            the target. With both, eager steps end a tree early where another level does not pay: of a whole batch, or
            in sampling mode row by row and by standard costs, so that a seed is one text in any batch and on any day.

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
        # Ids beyond the smaller of two padded vocabularies stand for nothing: they are never drafted.
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
        self.last_id = embedding.shape[0] - 1  # of the ids that the model can read
        parents, firsts = [-1], [0]
        for depth, children in enumerate(expansion):
            firsts.append(len(parents))
            parents += [firsts[depth] + node // children for node in range(counts[depth + 1])]
        self.firsts = [*firsts, len(parents)]
        self.parents = parents

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        rows, device = cache.rows, cache.lengths.device
        self.most_missing = max_depth  # accepted tokens of a step that the model may not have run
        self.rows, self.eager = rows, not static
        self.cache = KVCache(self.model, rows, cache.capacity)
        self.cache.lengths = cache.lengths  # shared: both hold the same text
        self.runner = Runner(self.model, self.cache, static)
        # Of 0, 1, … levels below the root: a step may end early.
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
        # What goes through the model before the first level: a chain of up to so many tokens, the root last.
        chain = bitsets(list(range(-1, self.most_missing))).to(device)[None]  # [1, C, W]
        depth = torch.arange(self.most_missing + 1, dtype=torch.int32, device=device)[None]
        self.chains: list[_Level] = []
        for count in range(1, self.most_missing + 2):
            mask = ancestor_mask(chain[:, :count], count)
            parts = (chain[:, :count], depth[:, :count], depth[:, :count], mask)
            self.chains.append(_Level(0, count, 0, *(p.expand(rows, *p.shape[1:]) for p in parts)))
        # Tokens of each text whose K/V the model's cache holds; those that follow, up to the root. Kept as a count and
        # not as what is missing: where the steps that warm up a graph capture put lengths back, nothing is missing then
        # and no slot before the length is written.
        self.cached = torch.full((rows,), _NEVER, dtype=torch.int64, device=device)
        self.behind = torch.zeros(rows, self.most_missing + 1, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(rows, device=device)
        self.turns = torch.arange(max(self.num_nodes, self.max_depth, self.most_missing) + 2, device=device)
        self.ones = torch.ones(rows, 1, device=device)
        self.ran = 0  # the deepest level that the model ran in this step
        self.saves = self.eager and self.costs is not None and self.draft_cost is not None
        if self.costs is not None and self.draft_cost is not None:
            self.times = self._times(self.costs, self.draft_cost, rows)
            self.standard_times = self._times(STANDARD_COSTS, _STANDARD_PASS, 1)

    def _times(self, costs: StepCosts, draft_cost: float, rows: int) -> list[float]:
        """Of a step whose tree has 0, 1, … levels, over that of a plain step with one row."""
        passes = [0.0]
        for count in self.counts:
            passes.append(passes[-1] + draft_cost * costs.relative(rows * count))
        return [one + costs.relative(rows * end) for one, end in zip(passes, self.firsts[1:], strict=False)]

    def buffers(self) -> Sequence[Tensor]:
        return self.cached, self.behind

    def begin(self, rows: slice) -> None:
        self.cached[rows] = _NEVER  # the prefill runs all of the prompt

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
            settings.uses_penalty = False  # any distribution will do, so long as it is the one that was drawn from
            uniforms = philox_uniforms(
                settings.seed, state.step, self.num_nodes - 1, state.stream
            )  # one for each drawn node
            valid.append(self.ones > 0)
        reached: list[list[float]] = []  # Σ chance by level and row
        goes_on = [True] * self.rows
        for depth, level in enumerate(self.levels[:-1]):
            if self.saves:
                reached.append((acceptances[-1].sum(1) * state.active).tolist())
                if depth and settings is None and not _pays([sum(level) for level in reached], self.times):
                    break
                if depth and settings is not None:
                    by_row = zip(goes_on, zip(*reached, strict=True), strict=True)
                    goes_on = [before and _pays(its, self.standard_times) for before, its in by_row]
                    if not any(goes_on):
                        break
            if depth:
                hidden = self._run(level, tokens[-1], state.length)
            self.ran = depth
            logits = self.model.logits(hidden)[..., : self.vocabulary]
            k, below = level.children, self.levels[depth + 1]
            if settings is None or uniforms is None:
                likely, best = self._top(logits.float().softmax(-1), k)
                acceptance = acceptances[-1][..., None] * likely
            else:
                q = sampling_distribution(logits, settings)
                node_uniforms = uniforms[:, below.first - 1 : below.first + below.count - 1].view(self.rows, -1, k)
                best, there = draw_children(q, node_uniforms)
                there = there & valid[-1][..., None]
                if not all(goes_on):
                    there = there & torch.tensor(goes_on, device=there.device)[:, None, None]
                valid.append(there.flatten(1))
                distributions.append(q)
                # Nothing here may depend on which token was drawn: by it a merge may leave a draw out. A confident
                # draft is accepted nearly always, a flat one about every other time; what was rejected leaves less.
                accepted = 0.5 + 0.5 * q.amax(-1, keepdim=True)
                likely = accepted * (1 - accepted) ** self.turns[:k]
                acceptance = torch.where(there, acceptances[-1][..., None] * likely, 0.0)
            tokens.append(best.flatten(1))
            acceptances.append(acceptance.flatten(1))
        tree = self.trees[len(tokens) - 1].fill(torch.cat(tokens, 1))
        tree = replace(tree, acceptance=torch.cat(acceptances, 1))
        return self._drawn(tree, torch.cat(valid, 1), torch.cat(distributions, 1)) if distributions else tree

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        path, length, own = verdict.path, verdict.length, verdict.own_path
        if own is None:
            own, kept = path, length.clamp(max=self.ran)
        else:  # as far as its own tree went and was run; what is behind follows as missing
            assert path.shape[1] - 1 <= self.most_missing, "the merge's trees are deeper than it said"
            depths = self.turns[: path.shape[1]]
            its = (own >= 0) & (own < self.firsts[self.ran + 1]) & (depths <= length[:, None])
            kept = its.long().cumprod(1).sum(1) - 1
            own = torch.where(depths <= kept[:, None], own, depths)
        own = own[:, : self.ran + 1]
        if self.branching > 1 and (not self.eager or bool((own != self.turns[: own.shape[1]]).any())):
            self.cache.commit(own, kept)
        torch.add(state.length, kept + 1, out=self.cached)
        if not self.eager or bool((length > kept).any()):
            at = (kept[:, None] + self.turns[1 : self.most_missing + 1]).clamp(max=path.shape[1] - 1)
            node = path.gather(1, at).clamp(max=tree.tokens.shape[1] - 1)
            self.behind[:, : self.most_missing] = tree.tokens.gather(1, node)

    def _run_root(self, state: State) -> Tensor:
        """Run what of the text is missing and the root, left-aligned: hidden states ``[B, 1, d]`` behind the root. What
        follows the root in shorter rows is written where the tree's nodes will be."""
        missing = (state.length - self.cached).clamp(min=0)  # [B]
        most = int(missing.max()) if self.eager else self.most_missing
        if not most:
            return self._run(self.chains[0], state.root[:, None], state.length)
        tokens = self.behind[:, : most + 1].scatter(1, missing[:, None], state.root[:, None])
        hidden = self._run(self.chains[most], tokens, state.length - missing)
        return hidden[self.row_numbers, missing][:, None]

    def _run(self, level: _Level, tokens: Tensor, lengths: Tensor) -> Tensor:
        # A level of one node has none but its ancestors before it.
        return self.runner.forward_nodes(
            self._readable(tokens), lengths, level.ancestors, level.depth, first=level.first,
            key_depth=level.key_depth, mask=level.mask, fixed=True,
            sees_all=level.count == 1,
        )[0]  # fmt: skip

    def _readable(self, tokens: Tensor) -> Tensor:
        """Ids that the model's embedding has no row for stand for its last one."""
        return tokens.clamp(max=self.last_id) if self.last_id + 1 < self.target_vocabulary else tokens

    def _top(self, p: Tensor, count: int) -> tuple[Tensor, Tensor]:
        if count == 1:  # a third of the time
            return p.max(-1, keepdim=True)
        return p.topk(count, -1)

    def _drawn(self, tree: TokenTree, valid: Tensor, q: Tensor) -> TokenTree:
        """The tree with its draws: node i's are from row i of ``q [B, R, Vq]``, those that found no token left out."""
        assert tree.draws is not None
        child = tree.draws.child
        child = torch.where(valid.gather(1, child.clamp(min=0).flatten(1)).view_as(child), child, -1)
        if q.shape[2] < self.target_vocabulary:
            q = torch.nn.functional.pad(q, (0, self.target_vocabulary - q.shape[2]))
        kind = torch.full_like(tree.draws.kind, WITHOUT_REPLACEMENT if child.shape[2] > 1 else IID)
        law_of = self.turns[: child.shape[1]].clamp(max=q.shape[1] - 1)[None, :, None].expand_as(child)
        return replace(tree, valid=valid, static=None, draws=Draws(child, kind, law_of, q))


def _pays(reached: Sequence[float], times: Sequence[float]) -> bool:
    """Whether more levels bring more tokens for their time. The next ones are taken to fall off as the last one did.

    Args:
        reached: expected tokens of each level so far, from the root's on.
        times: of a step whose tree has 0, 1, … levels.
    """
    if not reached[-1]:
        return False
    expected, last, levels = sum(reached), reached[-1], len(reached)
    rate, falls = expected / times[levels - 1], min(1.0, last / reached[-2])
    for time in times[levels:]:
        last *= falls
        expected += last
        if expected / time > rate:
            return True
    return False


def draw_children(q: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw k tokens of each distribution without replacement, in order, by inversion.

    Args:
        q: ``[B, n, V]`` float32.
        uniforms: ``[B, n, k]`` float32 in [0, 1), fresh.

    Returns:
        Tokens ``[B, n, k]`` int64; bool ``[B, n, k]``, False where the distribution had no token left (or is NaN).
    """
    weights, flat_uniforms = q.flatten(0, 1), uniforms.flatten(0, 1)
    tokens: list[Tensor] = []
    there: list[Tensor] = []
    for turn in range(uniforms.shape[2]):
        if turn:
            weights = weights.scatter(1, tokens[-1], 0.0)
        tokens.append(draw(weights, flat_uniforms[:, turn])[:, None])
        there.append(weights.gather(1, tokens[-1]) > 0)
    return torch.cat(tokens, 1).view(uniforms.shape), torch.cat(there, 1).view(uniforms.shape)
