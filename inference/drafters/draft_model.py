"""A draft model: any causal LM with the target's tokenizer drafts a tree level by level (SpecInfer, arXiv 2305.09781
§3; a chain: arXiv 2211.17192).

The model has its own K/V cache, with the target's lengths. Node i of the tree is in slot L + i there, too, and a commit
moves the K/V of accepted nodes as in the target's cache. Only nodes that have children are run. Accepted tokens that
the model has not run (leaves; nodes that other drafters of a merge propose) are run with the next root, in one forward
pass.

Shape letters: B rows, N nodes, n nodes of a level that are run, k best tokens or draws of each, V vocabulary, S draft
vocabulary, d hidden width, A depth of the deepest node + 1, T tokens of a text.
"""

import itertools
import operator
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.inference.drafters.compressed import CompressedCache, Selector
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.trees.by_level import ALL_CACHED, DraftHead, DrawKind, Hidden, LevelPass, Levels, chain_passes
from draftsmith.inference.verify.sampling import Rows
from draftsmith.inference.verify.tree import TokenTree, Topology
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.attention_plan import Plans
from draftsmith.models.precision import say
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import check_draft_vocab, head_rows


def check_vocabulary(model: Target, target: Target) -> None:
    """Raise a ValueError unless a draft model's tokenizer has the target's vocabulary, or one of them has no
    tokenizer. A special token, which no text is made of, may have another name or be in one of them alone, as a padding
    token that was added for fine-tuning. Fillers of a padded vocabulary do not count, which a GGUF file names by their
    ids ([PAD151665])."""
    if model.tokenizer is None or target.tokenizer is None or model.tokenizer is target.tokenizer:
        return
    tokenizers = (model.tokenizer, target.tokenizer)
    ids, target_ids = ({t: id for t, id in each.get_vocab().items() if t != f"[PAD{id}]"} for each in tokenizers)
    if ids == target_ids:
        return
    special = [{id for id, t in each.added_tokens_decoder.items() if t.special} for each in tokenizers]
    names, target_names = ({id: token for token, id in each.items()} for each in (ids, target_ids))
    differ = [id for id in names.keys() | target_names.keys() if names.get(id) != target_names.get(id)]
    if all(
        id in own for id in differ for own, known in zip(special, (names, target_names), strict=True) if id in known
    ):
        return
    token = min((token for token in ids.keys() | target_ids.keys() if ids.get(token) != target_ids.get(token)), key=str)
    entries = [f"is id {v[token]}" if token in v else "is missing" for v in (ids, target_ids)]
    raise ValueError(
        f"draft model '{model.name}' has another vocabulary than target '{target.name}': token {token!r} {entries[0]} "
        f"in one and {entries[1]} in the other; take a draft model with the target's tokenizer"
    )


def say_positions(model: Target, target: Target) -> None:
    """Say it where a draft model is made for fewer positions than the target."""
    if model.context < target.context:
        say(
            f"draft model '{model.name}' is made for {model.context:,} positions, fewer than the target: of what it "
            "drafts beyond them little is accepted"
        )


class DraftModelDrafter(Drafter):
    """A causal LM that drafts for a target, by :class:`~draftsmith.inference.trees.by_level.Levels`.

    Beyond the model's own context all positions are its last one; drafts there are rarely accepted.

    Args:
        model: the draft model, on the target's device.
        tree: an expansion, k_i children of every node at depth i − 1; or a tree of ranks.
        draft_vocab: ``[S]`` int64, ascending: the ids that are drafted; logits are computed for these alone.
        selector: attend to K of the text's tokens (:mod:`draftsmith.inference.drafters.compressed`): for long texts.
        draws: as :class:`~draftsmith.inference.trees.by_level.Levels` takes them.

    Raises:
        ValueError: the vocabularies differ, the models are on different devices, the draft vocabulary is not made of
            ascending ids of both models, its rows cannot be taken from the LM head, or the tree is
            empty, not positive, or too large.
    """

    def __init__(
        self,
        model: Target,
        target: Target,
        tree: Sequence[int] | Topology,
        *,
        draft_vocab: Tensor | None = None,
        draws: DrawKind = "without_replacement",
        selector: Selector | None = None,
    ) -> None:
        check_vocabulary(model, target)
        if model.device != target.device:
            raise ValueError(
                f"draft model '{model.name}' is on {model.device} and the target on {target.device}; load both on one"
            )
        self.model, self.lm, self.ids = model, model, None
        # Ids beyond the smaller of two padded vocabularies are never drafted.
        self.vocabulary = min(model.vocab_size, target.vocab_size)
        if draft_vocab is not None:
            check_draft_vocab(draft_vocab, draft_vocab.numel(), self.vocabulary, f"draft model '{model.name}'")
            self.vocabulary, self.ids = draft_vocab.numel(), draft_vocab.long().to(model.device)
            self.lm = copy(model)  # Target.logits then applies the model's own scale and cap to these rows
            self.lm.lm_head = head_rows(model.lm_head, self.ids)
        self.entries = None if selector is None else CompressedCache(model, selector)
        whole = selector is None and draft_vocab is None and model.vocab_size == target.vocab_size
        self.assistant = model if whole else None
        self.reuses = selector is None
        self.static, self.models = selector is None or selector.name != "topk", (model,)
        self.target_vocabulary = target.vocab_size
        embedding = model.embeddings.weight
        assert isinstance(embedding, Tensor)
        self.last_id = embedding.shape[0] - 1
        self._take(tree, draws)

    def with_tree(
        self, tree: Sequence[int] | Topology, *, draws: DrawKind = "without_replacement"
    ) -> "DraftModelDrafter":
        """A drafter of the same model and LM head, with another tree."""
        other = copy(self)
        other.entries = copy(self.entries)  # with buffers of its own
        other._take(tree, draws)
        return other

    def _take(self, tree: Sequence[int] | Topology, draws: DrawKind) -> None:
        self.levels = Levels(tree, self.vocabulary, self.target_vocabulary, draws)
        self.layout, self.branching, self.random = self.levels.layout, self.levels.branching, self.levels.random
        self.num_nodes, self.max_depth = self.levels.num_nodes, self.levels.max_depth
        module = None if self.model.changes_logits else self.lm.lm_head
        self.head = DraftHead(self._logits, module, self.vocabulary, self.ids)

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        rows, device, self.verified_depth = cache.rows, cache.lengths.device, max_depth
        self.skipped, self.chains = False, chain_passes(max_depth, static, rows, device)
        self.max_missing = len(self.chains) - 1
        self.rows, self.eager = rows, not static or not self.static
        # An eager step pads all rows to the tokens of the one that misses most.
        self.own = self.cache = KVCache(self.model, rows, cache.capacity + self.max_missing * self.eager)
        if self.entries is None:
            self.cache.lengths = cache.lengths  # shared: both hold the same text
        else:
            room = self.max_missing + max_depth + 2 + self.num_nodes
            self.entries.allocate(self.own, room, max_depth + 1)
            self.cache, self.last_slot = self.entries.cache, self.entries.most + self.max_missing
        self.reader, self.runner = Runner(self.model, self.own, static), Runner(self.model, self.cache, static)
        self.levels.allocate(rows, device, static)
        # For each i, whether a node has been run if levels 0 … i were, [N + 1]; False in the last place, for node −1.
        ran = torch.zeros(self.max_depth, self.num_nodes + 1, dtype=torch.bool)
        for number, level in enumerate(self.levels.passes):
            ran[number:, level.first : level.first + level.count] = True
        self.ran = ran.to(device).unbind()
        sizes = (after - first for first, after in itertools.pairwise(self.layout.firsts))
        self.has_early_leaves = any(map(operator.lt, self.layout.runs[:-1], sizes))
        # Number of tokens of each text in the model's cache, and the tokens after these, up to the root. The number of
        # missing tokens follows from it, and is 0 in warm-up steps, which reset the lengths: these then write no slot
        # before the length.
        self.cached = torch.full((rows,), ALL_CACHED, dtype=torch.int64, device=device)
        self.at_end: dict[int, Tensor] = {}  # of rows whose texts have ended: ``cached`` at that time
        self.missing_tokens = torch.zeros(rows, self.max_missing + 1, dtype=torch.int64, device=device)
        self.row_numbers = torch.arange(rows, device=device)
        self.numbers = torch.arange(max(self.num_nodes, self.max_depth, self.max_missing) + 2, device=device)

    def buffers(self) -> Sequence[Tensor]:
        own = [self.cached, self.missing_tokens]
        if self.entries is not None:
            own += [self.entries.text, self.cache.lengths]
        return own

    def begin(self, rows: Rows) -> None:
        if self.entries is not None:
            self.entries.begin(rows)

    def end(self, row: int) -> None:
        self.at_end[row] = self.cached[row].clone()
        if self.entries is not None:
            self.entries.end(row)

    def reusable(self, source: int, common: int, read: int) -> int:
        return common if common <= read else min(common, max(read, int(self.at_end[source])))

    def reuse(self, source: int, row: int, tokens: Sequence[int]) -> None:
        if source != row:
            self.own.copy_row(source, row, len(tokens))
        self.cached[row] = ALL_CACHED

    def prepare(self, state: State) -> None:
        """For static steps: select where a text begins, or where it may be due, after waiting for the device."""
        if self.entries is not None and not self.eager and self.entries.may_be_full():
            self._select(self.entries, (torch.minimum(self.cached, state.length) * state.active).tolist())
            self.entries.held = (state.length * state.active).tolist()  # of which it has run all but the missing ones

    def select(self, lengths: Sequence[int]) -> None:
        """Make now the selections that the next step would make, as :meth:`CompressedDrafter.select`."""
        if self.entries is not None:
            self._select(self.entries, list(lengths))

    def _select(self, entries: CompressedCache, lengths: list[int]) -> None:
        """Select from all that was cached, ``lengths`` tokens, which the model's own cache is given first."""
        for row in entries.pending:
            entries.stored[row] = lengths[row]  # the prompt
        entries.store(lengths)
        entries.select_where_due(lengths)

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        chunk = self._noted(chunk)
        self.reader.forward_prompts(chunk)

    def read_cached(self, other: KVCache, chunks: Sequence[Chunk]) -> None:
        """:meth:`prefill` of chunks whose keys and values another drafter's cache of the same model and shape holds."""
        if other is not self.own:
            self.own.take(other)
        for chunk in chunks:
            self._noted(chunk)

    def _noted(self, chunk: Chunk) -> Chunk:
        """A chunk as the model reads it, which counts as cached from now on."""
        chunk = replace(chunk, tokens=self._readable(chunk.tokens))
        if self.entries is not None:
            self.entries.read_prompts(chunk)
        self.cached[chunk.rows] = ALL_CACHED
        return chunk

    def propose(self, state: State) -> TokenTree:
        self.skipped = False  # an interrupted step may have left it
        if self.entries is not None:
            self._attend_to(self.entries, state)
        hidden = self._run_root(state)  # [B, 1, d]

        def run(depth: int, level: LevelPass, tokens: Tensor, above: Hidden) -> Hidden:
            hidden = self._run(level, tokens, self._held(state.length), state.plans)
            return hidden, hidden

        return self.levels.propose(state, (hidden, hidden), run, self.head)

    def skip(self, state: State) -> None:
        """Record the root as missing; where the buffer is full, run what it holds."""
        if self.entries is not None:
            self._attend_to(self.entries, state)
        missing = (state.length - self.cached).clamp(min=0)
        if not self.eager or int(missing.max()) + self.verified_depth + 1 > self.max_missing:
            self._run_root(state)
            self.levels.deepest_run = 0
            return
        torch.minimum(self.cached, state.length, out=self.cached)
        self.missing_tokens.scatter_(1, missing[:, None], state.root[:, None])
        self.skipped = True

    def _attend_to(self, entries: CompressedCache, state: State) -> None:
        """Select, in eager steps where it is due, and take the selected entries as the text before the tree."""
        if self.eager:
            cached = (torch.minimum(self.cached, state.length) * state.active).tolist()
            if entries.due(cached):
                self._select(entries, cached)
        entries.take_lengths(state)
        entries.read_root(state)

    def _held(self, lengths: Tensor) -> Tensor:
        """The slot that follows a text of such ``lengths [B]``."""
        return lengths if self.entries is None else (lengths - self.entries.left_out).clamp(max=self.last_slot)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        if self.entries is not None:
            self.entries.read_accepted(state, verdict, tree)
        path, length, own_path = verdict.path, verdict.length, verdict.own_path
        if self.skipped:  # the accepted tokens follow the root
            self.skipped = False
            node = path[:, 1:].clamp(max=tree.tokens.shape[1] - 1)
            at = (state.length - self.cached)[:, None] + self.numbers[1 : path.shape[1]]
            self.missing_tokens.scatter_(1, at, tree.tokens.gather(1, node))
            return
        deepest_run = self.levels.deepest_run
        ran = self.ran[deepest_run]
        if own_path is None:
            own_path = path
            # Only the last accepted node may be one that was not run.
            kept = length - 1 + ran[verdict.node] if self.has_early_leaves else length.clamp(max=deepest_run)
        else:  # keep the nodes that it proposed and ran; the rest of the path becomes missing tokens
            assert path.shape[1] - 1 <= self.verified_depth, "the merge's trees are deeper than the max_depth it gave"
            depths = self.numbers[: path.shape[1]]
            kept = (ran[own_path] & (depths <= length[:, None])).long().cumprod(1).sum(1) - 1
            own_path = torch.where(depths <= kept[:, None], own_path, depths)
        own_path = own_path[:, : deepest_run + 1]
        if self.branching > 1 and (not self.eager or bool((own_path != self.numbers[: own_path.shape[1]]).any())):
            self.cache.commit(own_path, kept)
        torch.add(state.length, kept + 1, out=self.cached)
        if not self.eager or bool((length > kept).any()):
            at = (kept[:, None] + self.numbers[1 : self.verified_depth + 1]).clamp(max=path.shape[1] - 1)
            node = path.gather(1, at).clamp(max=tree.tokens.shape[1] - 1)
            self.missing_tokens[:, : self.verified_depth] = tree.tokens.gather(1, node)

    def _run_root(self, state: State) -> Tensor:
        """Run the missing tokens and the root; returns the root's hidden states ``[B, 1, d]``. Rows with fewer missing
        tokens are padded on the right; the tree's nodes later overwrite the padding."""
        missing = (state.length - self.cached).clamp(min=0)  # [B]
        longest = int(missing.max()) if self.eager else self.max_missing
        if not longest:
            return self._run(self.chains[0], state.root[:, None], self._held(state.length), state.plans)
        tokens = self.missing_tokens[:, : longest + 1].scatter(1, missing[:, None], state.root[:, None])
        hidden = self._run(self.chains[longest], tokens, self._held(state.length - missing), state.plans)
        return hidden[self.row_numbers, missing][:, None]

    def _run(self, level: LevelPass, tokens: Tensor, lengths: Tensor, plans: Plans | None) -> Tensor:
        left_out = None if self.entries is None else self.entries.left_out
        return level.run(self.runner, self._readable(tokens), lengths, plans, left_out)

    def _readable(self, tokens: Tensor) -> Tensor:
        """Token ids within the model's embedding; ids beyond it become the last one."""
        return tokens.clamp(max=self.last_id) if self.last_id + 1 < self.target_vocabulary else tokens

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.lm.logits(hidden)[..., : self.vocabulary], self.ids
