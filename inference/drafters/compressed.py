"""Self-speculation over a compressed K/V cache (MagicDec, arXiv 2408.11049): the target drafts a tree itself, attending
to K of the S cached tokens, and verifies it over all of them. Nothing is trained. At long context and large batch,
reading K/V is most of a step's time, so that a draft of K entries costs little and is nearly always accepted.

Which K entries is the *selector's*:

- ``streamingllm`` (arXiv 2309.17453): the first tokens (sinks) and the most recent ones. A token's distance to a sink
  is that within the cache: sinks are rotated once more, by the number of tokens left out. There are 4 sinks, as in
  that paper; ``streamingllm16`` keeps 16, as MagicDec's own engine does.
- ``snapkv`` (arXiv 2404.14469): by key/value head, the tokens that the last w queries attend to most, and these w
  tokens. Keys keep their rotation.
- ``topk``: the tokens that the last query attends to most, selected anew in each step: what the other two approximate.

A selection is made after the prefill. While the text grows it is kept, and verified K/V is appended, until ``APPENDED``
tokens were: then it is made anew. Layers with a sliding window keep the last K tokens, whatever the selector.

The last w queries are computed anew, from the tokens, for a selection: prefills and steps keep none, whatever their
chunks, and the cache is afterwards as it was.

Shape letters: B rows, S cached tokens, K entries, w observed queries, Hq query heads, Hkv key/value heads, D width.
"""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk, Part, to_device
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.engine.runner import Runner, find_lean
from draftsmith.inference.trees.by_level import DraftHead, Hidden, LevelPass, Levels
from draftsmith.inference.verify.sampling import Rows, row_numbers
from draftsmith.inference.verify.tree import TokenTree, Topology
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.attention_plan import Plans
from draftsmith.models.lean import LeanDecoder
from draftsmith.models.target import Target

# First tokens that are kept, by selector: 4 in StreamingLLM's paper (arXiv 2309.17453 §3.2), 16 in MagicDec's engine.
SINKS = {"streamingllm": 4, "streamingllm16": 16}
WINDOW, POOL = 32, 5  # w of snapkv, and the neighbours over which its scores are averaged (arXiv 2404.14469 §4)
APPENDED = 256  # verified tokens that are appended to a selection before it is made anew
# Estimated acceptance of the best token, the second, …: the model that drafts is the one that verifies, so that its
# best token is nearly always the target's, however unlikely it is. High, since what a text shows only lowers it.
BY_RANK = (0.9, 0.04, 0.02, 0.01)
OBSERVED = {"streamingllm": 0, "streamingllm16": 0, "snapkv": WINDOW, "topk": 1}  # w, by selector
# Rotary embeddings whose frequencies depend on the text's length: keys cannot be rotated once more.
BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Selector:
    """Which K/V entries a compressed cache holds: ``streamingllm``, ``streamingllm16``, ``snapkv`` or ``topk``, and K,
    more than its sinks or observed queries; else a ValueError."""

    name: str
    entries: int

    def __post_init__(self) -> None:
        if self.name not in OBSERVED:
            raise ValueError(f"selector {self.name!r}: must be one of {', '.join(OBSERVED)}")
        least = 1 + max(self.sinks, self.observed)
        if self.entries < least:
            raise ValueError(f"{self.name}:{self.entries}: at least {least} entries")

    @property
    def observed(self) -> int:
        """w."""
        return OBSERVED[self.name]

    @property
    def sinks(self) -> int:
        """Number of first tokens that are always kept."""
        return SINKS.get(self.name, 0)


def attention_scores(
    queries: Tensor, keys: Tensor, scale: float, softcap: float | None = None, pool: int = POOL
) -> Tensor:
    """How much the last w queries attend to each token before them, as SnapKV scores it: attention weights summed over
    the queries, averaged over ``pool`` (odd) neighbours (zeros beyond the ends), summed over the heads of a group:
    queries ``[Hq, w, D]`` of the last w of the S tokens, keys ``[Hkv, S, D]``, rotated → ``[Hkv, S − w]`` float32.
    Scale and softcap are as ``tree_attention`` takes them."""
    groups, count, before = keys.shape[0], queries.shape[1], keys.shape[1] - queries.shape[1]
    by_group = queries.float().reshape(groups, -1, queries.shape[2])  # [Hkv, Hq / Hkv · w, D]
    scores = by_group @ keys.float().transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(groups, -1, count, keys.shape[1])
    hidden = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
    scores[..., before:].masked_fill_(hidden, float("-inf"))
    weights = scores.softmax(-1)[..., :before].sum(2)  # [Hkv, Hq / Hkv, S − w]
    return F.avg_pool1d(weights, pool, 1, pool // 2).sum(1)


class CompressedCache:
    """A cache of K entries of each row of a model's own cache, and of what is appended to them.

    cache: the entries, after ``allocate``. full: the model's own cache, from which they are selected.
    left_out: ``[B]`` int64, tokens before a row's last entry that have none.
    most: entries at the beginning of a step, at most.
    Raises ValueError: sinks for a model whose keys cannot be rotated once more."""

    cache: KVCache

    def __init__(self, model: Target, selector: Selector) -> None:
        self.model, self.selector = model, selector
        lean = find_lean(model, None)
        self.lean = lean if isinstance(lean, LeanDecoder) else None
        if selector.sinks:
            rope = getattr(model.config, "rope_parameters", None) or {}
            kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
            if self.lean is None or kinds & {*BY_LENGTH}:
                why = "its rotary embedding depends on the text's length" if self.lean else lean
                raise ValueError(f"{selector.name}: model '{model.name}': sinks cannot be rotated ({why}); use snapkv")

    def allocate(self, full: KVCache, room: int, step_tokens: int) -> None:
        """Allocate it beside the model's own cache. ``room``: slots beyond ``most`` that a step needs;
        ``step_tokens``: tokens by which a text grows in a step, at most."""
        rows, device = full.rows, full.lengths.device
        self.full, self.step_tokens, self.most = full, step_tokens, self.selector.entries + APPENDED
        self.cache = KVCache(self.model, rows, self.most + room, full.positions)
        self.observer = Runner(self.model, full)
        self.pending: set[int] = set()  # rows whose texts begin
        # Of each row: tokens of its text that were selected from or appended, an upper bound in static steps; how many
        # of them are left out; and how many the model's own cache holds.
        self.held, self.without, self.stored = [0] * rows, [0] * rows, [0] * rows
        self.left_out = torch.zeros(rows, dtype=torch.int64, device=device)
        self.numbers = torch.arange(max(self.cache.capacity, full.capacity), device=device)
        self.text = torch.zeros(rows, full.capacity, dtype=torch.int64, device=device)
        self.tables = {}
        if self.selector.sinks:
            assert self.lean is not None
            self.tables = {kind: table.float() for kind, table in self.lean.tables(full.positions).items()}

    def begin(self, rows: Rows) -> None:
        """New texts begin in these rows: their entries are selected before the next tree."""
        self.pending |= {*row_numbers(rows)}

    def end(self, row: int) -> None:
        self.pending.discard(row)
        self.held[row] = self.without[row] = self.stored[row] = 0
        self.left_out[row] = 0

    def read_prompts(self, chunk: Chunk) -> None:
        """Keep the tokens of parts of prompts, which the model's own cache holds, too."""
        self.text[chunk.rows, chunk.positions] = chunk.tokens
        for part in chunk.parts:
            self.stored[part.row] = part.end

    def take_lengths(self, state: State) -> None:
        """Take the selected entries as the text before the tree; none in rows without a text."""
        torch.mul(state.length - self.left_out, state.active, out=self.cache.lengths)

    def read_root(self, state: State) -> None:
        """Keep the root."""
        if self.selector.observed:
            self.text.scatter_(1, state.length[:, None], state.root[:, None])

    def read_accepted(self, state: State, verdict: Verdict, tree: TokenTree) -> None:
        """Keep the verified tokens; those beyond a row's accepted ones are overwritten later."""
        if self.selector.observed:
            node = verdict.path[:, 1:].clamp(max=tree.tokens.shape[1] - 1)
            places = state.length[:, None] + self.numbers[1 : verdict.path.shape[1]]
            self.text.scatter_(1, places, tree.tokens.gather(1, node))

    def may_be_full(self) -> bool:
        """Whether, after another step, a selection may be due: by upper bounds of the rows' lengths."""
        self.held = [held + self.step_tokens if held else 0 for held in self.held]
        return bool(self.pending) or max(map(operator.sub, self.held, self.without)) > self.most

    def due(self, lengths: Sequence[int]) -> list[int]:
        """The rows whose texts begin, or of which more than ``most`` entries would be held; with ``topk`` more than K.
        ``lengths``: tokens of each that the model's own cache holds, or is given before a selection."""
        most = self.selector.entries if self.selector.name == "topk" else self.most
        return [n for n, length in enumerate(lengths) if n in self.pending or length - self.without[n] > most]

    def select_where_due(self, lengths: Sequence[int]) -> None:
        """Select for the rows of :meth:`due`."""
        rows = self.due(lengths)
        for row in rows:
            self.select(row, lengths[row])
        self.pending.clear()
        if rows:
            self.left_out.copy_(torch.tensor(self.without, device=self.left_out.device))

    def append(self, lengths: list[int]) -> None:
        """Append what the model's own cache holds more than this one."""
        missing = [length - held for length, held in zip(lengths, self.held, strict=True)]
        longest = max(missing)
        if longest > 0:
            starts = torch.tensor([self.held, self.without], device=self.left_out.device)
            places = starts[0, :, None] + self.numbers[:longest]  # beyond a row's own tokens nothing is read
            slots = (places - starts[1, :, None]).clamp(max=self.cache.capacity - 1)
            self.cache.copy(self.full, places.clamp(max=self.full.capacity - 1), slots)
        self.held = lengths

    def store(self, lengths: list[int]) -> None:
        """The other way: give the model's own cache what was written here alone. A row without a text has length 0, and
        keeps what its prompt has given to that cache."""
        lengths = [*map(max, lengths, self.stored)]
        longest = max(length - stored for length, stored in zip(lengths, self.stored, strict=True))
        if longest > 0:
            starts = torch.tensor([self.stored, self.without], device=self.left_out.device)
            slots = (starts[0, :, None] + self.numbers[:longest]).clamp(max=self.full.capacity - 1)
            places = (slots - starts[1, :, None]).clamp(0, self.cache.capacity - 1)
            # A row that is behind, beyond its own tokens: what follows is written over.
            self.full.copy(self.cache, places, slots)
        self.stored = lengths

    def select(self, row: int, length: int) -> None:
        """Fill a row of the compressed cache, from a text's ``length`` cached tokens."""
        entries = min(length, self.selector.entries)
        self.held[row], self.without[row] = length, length - entries
        for to, source in zip(self.cache.of_row(row, 0, entries), self.full.of_row(row, 0, length), strict=True):
            to.copy_(source[..., length - entries :, :])  # the last ones
        if entries == length:
            return
        if self.selector.sinks:
            self._keep_sinks(row, length - entries)
        else:
            self._select_by_attention(row, length)

    def _keep_sinks(self, row: int, distance: int) -> None:
        """Replace the first entries by the sinks in layers without a window, rotated by ``distance`` positions."""
        assert self.lean is not None
        count = self.selector.sinks
        for number, layer in enumerate(self.lean.layers):
            if layer.window:
                continue
            for to, source in zip(self.cache.layer(number), self.full.layer(number), strict=True):
                to[row, :, :count] = source[row, :, :count]
            table, keys = self.tables[layer.rope], self.cache.layer(number)[0]
            width = layer.rotated or keys.shape[3]
            sinks = keys[row, :, :count, :width]
            cos, sin = table[distance].view(2, width) / table[0, 0]  # the factor on both is in the keys already
            sinks.copy_(sinks.float() * cos + sinks.float().roll(width // 2, -1) * sin)

    def _select_by_attention(self, row: int, length: int) -> None:
        """Fill a row by what its last w queries attend to."""
        window, entries = self.selector.observed, self.selector.entries
        start, layers = length - window, itertools.count()

        def observe(queries: Tensor, scale: float, sliding: int, softcap: float | None) -> None:
            number = next(layers)
            if sliding:
                return
            keys, values = (each[row, :, :length] for each in self.full.layer(number))
            own_keys, own_values = (each[row, :, :entries] for each in self.cache.layer(number))
            pool = 1 if window == 1 else POOL
            # A single query's heads may come grouped: [1, Hkv, Hq / Hkv, D].
            by_head = queries[0].reshape(-1, window, keys.shape[2])
            scores = attention_scores(by_head, keys, scale, softcap, pool)
            best = scores.topk(entries - window).indices.sort().values  # [Hkv, K − w]
            places = torch.cat((best, self.numbers[start:length].expand(len(keys), -1)), 1)
            places = places[..., None].expand(-1, -1, keys.shape[2])
            own_keys.copy_(keys.gather(1, places))
            own_values.copy_(values.gather(1, places))

        changed = self.full.of_row(row, start, length)
        before = [each.clone() for each in changed]
        places = self.numbers[start:length]
        last = Chunk([Part(row, start, window)], self.text[row, places], torch.full_like(places, row), places)
        self.observer.forward_prompts(last, observer=observe)
        for each, kept in zip(changed, before, strict=True):
            each.copy_(kept)


class CompressedDrafter(Drafter):
    """The target as its own drafter, over a compressed cache. What is raised is said by
    :class:`~draftsmith.inference.trees.by_level.Levels`, which takes the tree, and :class:`CompressedCache`."""

    def __init__(self, target: Target, selector: Selector, tree: Sequence[int] | Topology) -> None:
        self.target, self.selector, self.entries = target, selector, CompressedCache(target, selector)
        self.levels = Levels(tree, target.vocab_size, target.vocab_size, by_rank=BY_RANK)
        self.num_nodes, self.max_depth = self.levels.num_nodes, self.levels.max_depth
        self.branching, self.random = self.levels.branching, self.levels.random
        module = None if target.changes_logits else target.lm_head
        self.head = DraftHead(lambda hidden: (target.logits(hidden), None), module, target.vocab_size, None)
        self.static, self.reuses = selector.name != "topk", True

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.in_graphs = static and self.static
        self.entries.allocate(cache, max_depth + 1 + self.num_nodes, max_depth + 1)
        self.cache, self.runner = self.entries.cache, Runner(self.target, self.entries.cache, static)
        self.levels.allocate(cache.rows, cache.lengths.device, static)

    def buffers(self) -> Sequence[Tensor]:
        return self.entries.text, self.cache.lengths

    def begin(self, rows: Rows) -> None:
        self.entries.begin(rows)

    def select(self, lengths: Sequence[int]) -> None:
        """Make now the selections that the next step would make of texts of so many cached tokens, for timing."""
        self.entries.select_where_due(lengths)

    def end(self, row: int) -> None:
        self.entries.end(row)

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        self.entries.read_prompts(chunk)

    def reuse(self, source: int, row: int, tokens: Sequence[int]) -> None:
        self.entries.text[row, : len(tokens)] = to_device(tokens, self.entries.text.device)

    def prepare(self, state: State) -> None:
        """For static steps, which append by themselves: select where a text begins, or where it may be due. That is
        known after waiting for the device, once in some steps."""
        if self.in_graphs and self.entries.may_be_full():
            self.entries.held = (state.length * state.active).tolist()
            self.entries.select_where_due(self.entries.held)

    def propose(self, state: State) -> TokenTree:
        if not self.in_graphs:
            lengths = (state.length * state.active).tolist()
            self.entries.select_where_due(lengths)
            self.entries.append(lengths)
        self.entries.take_lengths(state)
        self.cache.lengths.clamp_(max=self.entries.most)  # in warm-up steps
        self.entries.read_root(state)
        root = self.levels.passes[0]
        hidden = self._run(root, state.root[:, None], state.plans)

        def run(depth: int, level: LevelPass, tokens: Tensor, above: Hidden) -> Hidden:
            hidden = self._run(level, tokens, state.plans)
            return hidden, hidden

        return self.levels.propose(state, (hidden, hidden), run, self.head)

    def skip(self, state: State) -> None:
        """What is verified until the next tree is appended then; in static steps at once."""
        self.entries.read_root(state)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        """Keep the verified tokens, and in static steps their K/V."""
        self.entries.read_accepted(state, verdict, tree)
        if self.in_graphs:
            places = state.length[:, None] + self.entries.numbers[: verdict.path.shape[1]]
            slots = (places - self.entries.left_out[:, None]).clamp(max=self.cache.capacity - 1)
            self.cache.copy(self.entries.full, places, slots)

    def _run(self, level: LevelPass, tokens: Tensor, plans: Plans | None) -> Tensor:
        return level.run(self.runner, tokens, self.cache.lengths, plans, self.entries.left_out)
