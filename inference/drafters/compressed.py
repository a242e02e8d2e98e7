"""Self-speculation over a compressed K/V cache (MagicDec, arXiv 2408.11049): the target drafts a tree itself, attending
to K of the S cached tokens, and verifies it over all of them. Nothing is trained. At long context and large batch,
reading K/V is most of a step's time, so that a draft of K entries costs little and is nearly always accepted.

Which K entries is the *selector's*:

- ``streamingllm`` (arXiv 2309.17453): the first tokens (sinks) and the most recent ones. A token's distance to a sink
  is that within the cache: sinks are rotated once more, by the number of tokens left out.
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

from draftsmith.inference.drafters.levels import Levels, Pass, best_by_head
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.protocol import Drafter, State
from draftsmith.inference.engine.runner import Runner, find_lean
from draftsmith.inference.verify.tree import TokenTree, Topology
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.tree_attention import Plans
from draftsmith.models.lean import LeanDecoder
from draftsmith.models.target import Target

SINKS = 4  # first tokens that streamingllm keeps (arXiv 2309.17453 §3.2)
WINDOW, POOL = 32, 5  # w of snapkv, and the neighbours over which its scores are averaged (arXiv 2404.14469 §4)
APPENDED = 128  # verified tokens that are appended to a selection before it is made anew
OBSERVED = {"streamingllm": 0, "snapkv": WINDOW, "topk": 1}  # w, by selector
# Rotary embeddings whose frequencies depend on the text's length: keys cannot be rotated once more.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Selector:
    """Which K/V entries a compressed cache holds.

    name: ``streamingllm``, ``snapkv`` or ``topk``.
    entries: K, more than its sinks or observed queries.

    Raises:
        ValueError: there is no such selector, or K is too small.
    """

    name: str
    entries: int

    def __post_init__(self) -> None:
        if self.name not in OBSERVED:
            raise ValueError(f"selector {self.name!r}: must be one of {', '.join(OBSERVED)}")
        least = 1 + (SINKS if self.name == "streamingllm" else self.observed)
        if self.entries < least:
            raise ValueError(f"{self.name}:{self.entries}: at least {least} entries")

    @property
    def observed(self) -> int:
        """w."""
        return OBSERVED[self.name]


def attention_scores(
    queries: Tensor, keys: Tensor, scale: float, softcap: float | None = None, pool: int = POOL
) -> Tensor:
    """How much the last w queries attend to each token before them, as SnapKV scores it: attention weights summed over
    the queries, averaged over ``pool`` neighbours (zeros beyond the ends), summed over the heads of a group.

    Args:
        queries: ``[Hq, w, D]``, rotated, of the last w of the S tokens.
        keys: ``[Hkv, S, D]``, rotated.
        scale, softcap: of the scores, as ``tree_attention`` takes them.
        pool: odd.

    Returns:
        ``[Hkv, S − w]`` float32.
    """
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


class CompressedDrafter(Drafter):
    """The target as its own drafter, over a compressed cache.

    Args:
        target: also the model that drafts.
        selector: of the cache's entries.
        tree: an expansion, k_i children of every node at depth i − 1; or a tree of ranks.

    Raises:
        ValueError: the tree is empty, not positive, or too large; ``streamingllm`` for a target whose keys cannot be
            rotated once more.
    """

    def __init__(self, target: Target, selector: Selector, tree: Sequence[int] | Topology) -> None:
        self.target, self.selector = target, selector
        self.levels = Levels(tree, target.vocab_size, target.vocab_size)
        self.num_nodes, self.max_depth = self.levels.num_nodes, self.levels.max_depth
        self.branching, self.random = self.levels.branching, self.levels.random
        self.static = selector.name != "topk"
        lean = find_lean(target, None)
        self.lean = lean if isinstance(lean, LeanDecoder) else None
        if selector.name == "streamingllm":
            rope = getattr(target.config, "rope_parameters", None) or {}
            kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
            if self.lean is None or kinds & {*_BY_LENGTH}:
                why = "its rotary embedding depends on the text's length" if self.lean else lean
                raise ValueError(f"streamingllm: target '{target.name}': sinks cannot be rotated ({why}); use snapkv")

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        rows, device = cache.rows, cache.lengths.device
        self.full, self.rows, self.in_graphs = cache, rows, static and self.static
        self.step_tokens = max_depth + 1  # that are verified, at most
        self.most = self.selector.entries + APPENDED  # entries at the beginning of a step, at most
        capacity = self.most + self.step_tokens + self.num_nodes
        self.cache = KVCache(self.target, rows, capacity, cache.positions)
        self.runner, self.observer = Runner(self.target, self.cache, static), Runner(self.target, cache)
        self.levels.allocate(rows, device, static)
        self.pending: set[int] = set()  # rows whose texts begin
        # Of each row: tokens of its text that were selected from or appended, and how many of them are left out. In
        # static steps the first is an upper bound: how many were accepted is known later.
        self.held, self.without = [0] * rows, [0] * rows
        self.left_out = torch.zeros(rows, dtype=torch.int64, device=device)
        self.numbers = torch.arange(max(capacity, cache.capacity), device=device)
        self.text = torch.zeros(rows, cache.capacity, dtype=torch.int64, device=device)
        self.tables = {}
        if self.selector.name == "streamingllm":
            assert self.lean is not None
            self.tables = {kind: table.float() for kind, table in self.lean.tables(cache.positions).items()}

    def buffers(self) -> Sequence[Tensor]:
        return self.text, self.cache.lengths

    def begin(self, rows: slice) -> None:
        self.pending |= {*range(rows.start, rows.stop)}

    def end(self, row: int) -> None:
        self.pending.discard(row)
        self.held[row] = self.without[row] = 0
        self.left_out[row] = 0

    def prefill(self, features: Tensor, tokens: Tensor, start: int, rows: slice) -> None:
        self.text[rows, start : start + tokens.shape[1]] = tokens

    def prepare(self, state: State) -> None:
        """For static steps, which append by themselves: select where a text begins, or where the next step's tokens may
        not fit. That is known after waiting for the device, once in some steps."""
        if not self.in_graphs:
            return
        self.held = [held + self.step_tokens if held else 0 for held in self.held]
        if self.pending or max(map(operator.sub, self.held, self.without)) > self.most:
            self.held = lengths = state.length.tolist()
            self._select_where_full(lengths)

    def propose(self, state: State) -> TokenTree:
        if not self.in_graphs:
            self._append(state.length.tolist())
        torch.sub(state.length, self.left_out, out=self.cache.lengths)
        self.cache.lengths.clamp_(max=self.most)  # in warm-up steps
        self.text.scatter_(1, state.length[:, None], state.root[:, None])
        root = self.levels.passes[0]
        hidden = self._run(root, state.root[:, None], state.plans)

        def run(depth: int, level: Pass, tokens: Tensor, above: Tensor) -> Tensor:
            return self._run(level, tokens, state.plans)

        return self.levels.propose(state, hidden, run, self._logits, self._best)

    def skip(self, state: State) -> None:
        """What is verified until the next tree is appended then; in static steps at once."""
        self.text.scatter_(1, state.length[:, None], state.root[:, None])

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        """Keep the verified tokens, and in static steps their K/V; what is beyond a row's accepted ones is overwritten
        later."""
        node = verdict.path[:, 1:].clamp(max=tree.tokens.shape[1] - 1)
        places = state.length[:, None] + self.numbers[: verdict.path.shape[1]]
        self.text.scatter_(1, places[:, 1:], tree.tokens.gather(1, node))
        if self.in_graphs:
            slots = (places - self.left_out[:, None]).clamp(max=self.most + places.shape[1])
            self.cache.copy(self.full, places, slots)

    def _append(self, lengths: list[int]) -> None:
        """Append what was verified since the last tree; select anew where it does not fit."""
        for row in self._select_where_full(lengths):
            self.held[row] = lengths[row]
        missing = [length - held for length, held in zip(lengths, self.held, strict=True)]
        longest = max(missing)
        if longest > 0:
            starts = torch.tensor([self.held, self.without], device=self.left_out.device)
            places = starts[0, :, None] + self.numbers[:longest]  # beyond a row's own tokens nothing is read
            slots = (places - starts[1, :, None]).clamp(max=self.cache.capacity - 1)
            self.cache.copy(self.full, places.clamp(max=self.full.capacity - 1), slots)
        self.held = lengths

    def _select_where_full(self, lengths: Sequence[int]) -> list[int]:
        """Select where a text begins, or more than ``most`` entries would be held; returns these rows."""
        every = self.selector.name == "topk"
        rows = [
            row for row, length in enumerate(lengths)
            if row in self.pending or length - self.without[row] > (self.selector.entries if every else self.most)
        ]  # fmt: skip
        for row in rows:
            self.select(row, lengths[row])
        self.pending.clear()
        if rows:
            self.left_out.copy_(torch.tensor(self.without, device=self.left_out.device))
        return rows

    def select(self, row: int, length: int) -> None:
        """Fill a row of the compressed cache, from a text's ``length`` cached tokens."""
        entries = min(length, self.selector.entries)
        self.without[row] = length - entries
        for to, source in zip(self.cache.of_row(row, 0, entries), self.full.of_row(row, 0, length), strict=True):
            to.copy_(source[..., length - entries :, :])  # the last ones
        if entries == length:
            return
        if self.selector.name == "streamingllm":
            sinks = zip(self.cache.of_row(row, 0, SINKS), self.full.of_row(row, 0, SINKS), strict=True)
            for to, source in sinks:
                to.copy_(source)
            self._rotate_sinks(row, length - entries)
        else:
            self._select_by_attention(row, length)

    def _rotate_sinks(self, row: int, distance: int) -> None:
        """Rotate the keys of the sinks in layers without a window once more, by ``distance`` positions."""
        assert self.lean is not None
        for number, layer in enumerate(self.lean.layers):
            if layer.window:
                continue
            table, keys = self.tables[layer.rope], self.cache.layer(number)[0]
            width = layer.rotated or keys.shape[3]
            sinks = keys[row, :, :SINKS, :width]
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
            places = torch.cat((best, self._last(window, length).expand(len(keys), -1)), 1)
            places = places[..., None].expand(-1, -1, keys.shape[2])
            own_keys.copy_(keys.gather(1, places))
            own_values.copy_(values.gather(1, places))

        changed = self.full.of_row(row, start, length)
        before = [each.clone() for each in changed]
        self.full.window = slice(row, row + 1)
        self.observer.forward_chunk(self.text[row : row + 1, start:length], start, observer=observe)
        self.full.window = None
        for each, kept in zip(changed, before, strict=True):
            each.copy_(kept)

    def _last(self, count: int, length: int) -> Tensor:
        return torch.arange(length - count, length, device=self.numbers.device)[None]

    def _run(self, level: Pass, tokens: Tensor, plans: Plans | None) -> Tensor:
        return self.runner.forward_nodes(
            tokens, self.cache.lengths, level.ancestors, level.depth, first=level.first, key_depth=level.key_depth,
            mask=level.mask, fixed=True, sees_all=level.sees_all, plans=plans, left_out=self.left_out,
        )[0]  # fmt: skip

    def _logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.target.logits(hidden), None

    def _best(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        head = None if self.target.changes_logits else self.target.lm_head
        return best_by_head(hidden, head, self.target.vocab_size, None, count, self._logits)
