"""The engine: prefill → draft → verify → commit, for any ``transformers`` decoder and any drafter.

    step:  tree    = drafter.propose(state)                # root + drafted nodes
           hidden  = target(tree behind the cached prefix) # one forward pass of N tokens
           verdict = verify(tree, logits(hidden))          # the longest path the target agrees with, + a bonus token
           cache.commit(verdict.path)                      # keep that path's K/V, drop the rest

Plain decoding is the same loop with a tree of one node.

Shape letters: B rows, T prompt tokens, N nodes, d hidden width.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from draftsmith.inference.cache import KVCache
from draftsmith.inference.sampling import Sampling, Settings, law, uniforms
from draftsmith.inference.tree import StaticTree, TokenTree, Topology
from draftsmith.inference.verify import Verdict, verify_greedy, verify_sample, verify_typical
from draftsmith.kernels.tree_attention import (
    ancestor_mask,
    causal_bias,
    tree_attention,
    tree_bias,
    tree_bias_one_row,
)
from draftsmith.kernels.verify import draw
from draftsmith.models.target import Target

Mode = Literal["greedy", "sample", "typical"]
ATTENTION = "draftsmith_tree"
PREFILL_CHUNK = 512
PHASES = ("prefill", "draft", "verify", "accept", "commit", "other")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, tree_biases: dict[int, Tensor | None] | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What ``transformers`` calls in every layer; ``tree_biases`` holds the mask for each window size."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("this target's attention has learned sinks (GPT-OSS), which the engine does not support yet")
    assert tree_biases is not None, "the engine's attention needs the engine's mask"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = tree_attention(query, key, value, tree_biases[sliding_window or 0], scale, softcap)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)  # else padding masks would be made up


@dataclass
class State:
    """Device buffers per row that a drafter reads.

    root: ``[B]`` int64, the committed token whose K/V is not cached yet.
    length: ``[B]`` int64, cached tokens.
    feature: ``[B, d]``, the target's last hidden state that predicted the root.
    """

    root: Tensor
    length: Tensor
    feature: Tensor


class Drafter(Protocol):
    """What the engine asks of a drafter. ``num_nodes`` and ``max_depth`` bound every tree it proposes."""

    num_nodes: int
    max_depth: int

    def prefill(self, hidden: Tensor, tokens: Tensor, start: int) -> None:
        """A chunk of the prompts: hidden states ``[B, T, d]`` of tokens ``[B, T]`` at positions ``start``…"""
        ...

    def propose(self, state: State) -> TokenTree: ...

    def absorb(self, verdict: Verdict, tree: TokenTree, hidden: Tensor) -> None:
        """After each step: what was accepted, and the target's hidden states ``[B, N, d]``."""
        ...


class PlainDrafter:
    """Proposes nothing: the root alone. Plain decoding by the same engine, the baseline of every speed-up."""

    num_nodes, max_depth = 1, 0

    def __init__(self, device: torch.device) -> None:
        self.tree = StaticTree(Topology(()), device)

    def prefill(self, hidden: Tensor, tokens: Tensor, start: int) -> None:
        pass

    def propose(self, state: State) -> TokenTree:
        return self.tree.fill(state.root[:, None])

    def absorb(self, verdict: Verdict, tree: TokenTree, hidden: Tensor) -> None:
        pass


@dataclass
class Generation:
    """One row's output.

    tokens: new tokens, up to and including the first stop id; nothing after it.
    accepted: committed tokens of each step, bonus included and after trimming; the prefill's token is not in it.
    finish_reason: ``stop`` (a stop id), ``length`` (the limit) or ``context`` (the target's last position).
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str = ""


class Runner:
    """A causal LM on a cache: one forward pass of tree nodes or of a prompt's chunk. ``logits`` is the target's own."""

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.target, self.cache = target, cache
        config = target.config
        layers = getattr(config, "layer_types", None) or []
        sliding = getattr(config, "sliding_window", None) or 0
        # Every window some layer may ask for; 0 is full attention.
        self.windows = {0, sliding} if sliding or "sliding_attention" in layers else {0}

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, seen: int, biases: dict[int, Tensor | None]
    ) -> Tensor:
        """Run ``tokens [B, N]`` at ``positions`` into ``slots``, looking at the first ``seen`` slots.

        Args:
            biases: the additive mask ``[B or 1, 1, N, seen]`` for each of ``windows``; None where all is seen.

        Returns:
            Hidden states ``[B, N, d]`` after the final norm.
        """
        self.cache.slots, self.cache.seen = slots, seen
        return self.target.decoder(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, tree_biases=biases
        ).last_hidden_state


class SpeculativeDecoder:
    """Decodes prompts with a target and a drafter: exactly as the target alone would, greedily or by sampling (token by
    token, or in law), or with Medusa's typical acceptance, which is lossy.

    Example:
        >>> decoder = SpeculativeDecoder(target, drafter)
        >>> decoder.generate([[5, 7, 11]], max_new_tokens=32)[0].tokens
    """

    def __init__(self, target: Target, drafter: Drafter | None = None) -> None:
        self.target = target
        self.drafter: Drafter = PlainDrafter(target.device) if drafter is None else drafter
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._cache: KVCache | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        mode: Mode = "greedy",
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop_ids: frozenset[int] | None = None,
        instrument: bool = False,
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[Generation]:
        """Decode a batch of prompts, ragged in length and in what is accepted.

        Args:
            prompts: token ids per row, each at least one.
            max_new_tokens: limit per row.
            mode: ``greedy``, ``sample`` or ``typical`` (lossy).
            sampling: of all rows, or of each; for the modes that are not greedy. A row's output depends on its own seed
                and on no other row.
            stop_ids: ids that end a row; the target's own if left out.
            instrument: add each phase's time to ``seconds`` (synchronises between phases on a GPU).
            on_tokens: called with (row, its newly committed tokens) after each step.

        Raises:
            ValueError: a prompt is empty or longer than the target's context, or it is not one sampling for each row.
        """
        if not prompts:
            return []
        settings = None
        if mode != "greedy":
            sampling = sampling or Sampling()
            each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
            if len(each) != len(prompts):
                raise ValueError(f"{len(each)} samplings for {len(prompts)} prompts; give one, or one for each")
            settings = Settings(each, self.target.device)
        stops = self.target.stop_ids if stop_ids is None else stop_ids
        limits = [self._limit(row, prompt, max_new_tokens) for row, prompt in enumerate(prompts)]
        with torch.inference_mode(), self.target.attention(ATTENTION):
            chooser = Chooser(mode, settings, prompts, self.target)
            return self._generate(prompts, limits, max_new_tokens, stops, instrument, on_tokens, chooser)

    def _limit(self, row: int, prompt: Sequence[int], max_new_tokens: int) -> int:
        room = self.target.context - len(prompt)
        if not prompt:
            raise ValueError(f"prompt {row + 1} is empty; give it at least one token")
        if room < 1:
            raise ValueError(
                f"prompt {row + 1} has {len(prompt)} tokens; the target's context holds {self.target.context} with the "
                "answer: shorten it"
            )
        return min(max_new_tokens, room)

    def _generate(
        self, prompts: Sequence[Sequence[int]], limits: list[int], wanted: int, stops: frozenset[int], instrument: bool,
        on_tokens: Callable[[int, list[int]], None] | None, chooser: "Chooser",
    ) -> list[Generation]:  # fmt: skip
        clock = _Clock(self.seconds, self.target.device) if instrument else None
        drafter, rows, nodes = self.drafter, len(prompts), self.drafter.num_nodes
        longest = max(len(p) + limit for p, limit in zip(prompts, limits, strict=True))
        runner = Runner(self.target, self._make_cache(rows, longest + nodes + drafter.max_depth + 2))
        cache, dtype = runner.cache, self.target.dtype
        results = [Generation() for _ in prompts]
        last_position = self.target.context - 1
        node_numbers = torch.arange(nodes, device=self.target.device)

        state = self._prefill(runner, prompts, chooser)
        cached = [len(p) for p in prompts]  # cache.lengths, known to the host
        active = [
            self._take(result, [token], limit, wanted, stops, step=False)
            for result, token, limit in zip(results, state.root.tolist(), limits, strict=True)
        ]
        if on_tokens:
            for row, result in enumerate(results):
                on_tokens(row, list(result.tokens))
        running = torch.tensor(active, device=self.target.device)
        if clock:
            clock.lap("prefill")
        while any(active):
            tree = drafter.propose(state)
            if clock:
                clock.lap("draft")
            count = tree.tokens.shape[1]
            seen = max(cached) + count
            mask = ancestor_mask(tree.ancestors, count) if tree.mask is None else tree.mask
            biases: dict[int, Tensor | None] = {}
            for window in runner.windows:
                if rows > 1 or window:
                    biases[window] = tree_bias(cache.lengths, mask, tree.depth, seen, window, dtype)
                else:  # a lone root sees every slot
                    biases[window] = None if count == 1 else tree_bias_one_row(mask, seen, dtype)
            hidden = runner.forward(
                tree.tokens,
                (cache.lengths[:, None] + tree.depth).clamp(max=last_position),
                cache.lengths[:, None] + node_numbers[:count],
                seen,
                biases,
            )
            logits = self.target.logits(hidden)
            if clock:
                clock.lap("verify")
            verdict = chooser.verify(tree, mask, logits, drafter.max_depth)
            step = verdict.length + 1 if rows == 1 else torch.where(running, verdict.length + 1, 0)
            tokens = torch.cat(
                [tree.tokens.gather(1, verdict.path[:, 1:].clamp(max=count - 1)), verdict.bonus[:, None]], 1
            )
            chooser.saw(tokens, verdict.length)
            # The step's one read by the host: what was accepted, where it stood, and the bonus token.
            told = torch.cat([step[:, None], verdict.path, tokens], 1).tolist()
            if clock:
                clock.lap("accept")
            depth = drafter.max_depth
            paths = [row[1 : depth + 2] for row in told]
            lengths = [row[0] for row in told]
            if any(path[d] != d for path, length in zip(paths, lengths, strict=True) for d in range(length)):
                cache.commit(verdict.path)
            drafter.absorb(verdict, tree, hidden)
            cache.lengths += step
            state.root = verdict.bonus
            state.feature = hidden.gather(1, verdict.node[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
            cached = [before + new for before, new in zip(cached, lengths, strict=True)]
            if clock:
                clock.lap("commit")
            before_step = list(active)
            for row, (result, length) in enumerate(zip(results, lengths, strict=True)):
                if not active[row]:
                    continue
                drafted = told[row][depth + 2 :]
                new = drafted[: length - 1] + drafted[-1:]
                before = len(result.tokens)
                active[row] = self._take(result, new, limits[row], wanted, stops, step=True)
                if on_tokens:
                    on_tokens(row, result.tokens[before:])
            if rows > 1 and active != before_step:  # a row has ended
                running = torch.tensor(active, device=self.target.device)
            if clock:
                clock.lap("other")
        return results

    def _make_cache(self, rows: int, capacity: int) -> KVCache:
        """The cache of the call before, if it is large enough."""
        if self._cache is None or self._cache.rows != rows or self._cache.capacity < capacity:
            self._cache = KVCache(self.target, rows, capacity)
        return self._cache

    def _prefill(self, runner: Runner, prompts: Sequence[Sequence[int]], chooser: "Chooser") -> State:
        """Run the prompts, right-padded, in chunks; K/V of padding, behind a row's length, is overwritten later."""
        device, cache = self.target.device, runner.cache
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest = max(map(len, prompts))
        padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        feature = torch.empty(len(prompts), self.target.hidden_size, dtype=self.target.dtype, device=device)
        for start in range(0, longest, PREFILL_CHUNK):
            tokens = padded[:, start : start + PREFILL_CHUNK]
            positions = torch.arange(start, start + tokens.shape[1], device=device)[None]
            count, seen = tokens.shape[1], start + tokens.shape[1]
            biases: dict[int, Tensor | None] = {
                w: causal_bias(start, count, w, self.target.dtype, device) for w in runner.windows
            }
            hidden = runner.forward(tokens, positions.expand(len(prompts), -1), positions, seen, biases)
            self.drafter.prefill(hidden, tokens, start)
            last = (lengths - 1 - start).clamp(0, tokens.shape[1] - 1)
            here = (lengths - 1 >= start) & (lengths - 1 < start + tokens.shape[1])
            ends = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2])).squeeze(1)
            feature = torch.where(here[:, None], ends, feature)
        cache.lengths.copy_(lengths)
        return State(chooser.first(self.target.logits(feature)), cache.lengths, feature)

    @staticmethod
    def _take(
        result: Generation, new: list[int], limit: int, wanted: int, stops: frozenset[int], *, step: bool
    ) -> bool:
        """Append a step's tokens, trimmed at a stop id or the limit; returns whether the row goes on."""
        new = new[: limit - len(result.tokens)]
        for place, token in enumerate(new):
            if token in stops:
                new = new[: place + 1]
                result.finish_reason = "stop"
                break
        result.tokens += new
        if step:
            result.accepted.append(len(new))
        if not result.finish_reason and len(result.tokens) >= limit:
            result.finish_reason = "length" if limit == wanted else "context"
        return not result.finish_reason


class Chooser:
    """What a mode decides: the first token, each step's verdict; with what that needs to remember of the texts."""

    def __init__(self, mode: Mode, settings: Settings | None, prompts: Sequence[Sequence[int]], target: Target) -> None:
        self.mode, self.settings = mode, settings
        self.step = torch.zeros(len(prompts), dtype=torch.int64, device=target.device)
        self.seen: Tensor | None = None  # [B, V] uint8, the tokens of each text, where a repetition penalty counts them
        if settings is not None and settings.uses_penalty:
            self.seen = torch.zeros(len(prompts), target.vocab_size, dtype=torch.uint8, device=target.device)
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(list(prompt), device=target.device)] = 1

    def first(self, logits: Tensor) -> Tensor:
        """The prefill's token from ``logits [B, V]``: ``[B]``."""
        if self.settings is None or self.mode == "typical":
            return logits.argmax(-1)
        seen = None if self.seen is None else self.seen[:, None].bool()
        p = law(logits[:, None], self.settings, seen)[:, 0]
        token = draw(p, uniforms(self.settings.seed, self.step, 1)[:, 0])
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], 1)
        return token

    def verify(self, tree: TokenTree, mask: Tensor, logits: Tensor, max_depth: int) -> Verdict:
        """The step's verdict from ``logits [B, N, V]``."""
        if self.settings is None:
            return verify_greedy(tree, mask, logits, max_depth)
        seen = None
        if self.seen is not None:  # the text before, and the path to each node
            seen = self.seen[:, None].repeat(1, mask.shape[1], 1)
            tokens = tree.tokens[:, None].expand(-1, mask.shape[1], -1)
            seen.scatter_reduce_(2, tokens, mask.expand(len(seen), -1, -1).to(torch.uint8), "amax")
            seen = seen.bool()
        p = law(logits, self.settings, seen)
        if self.mode == "typical":
            return verify_typical(tree, mask, p, max_depth)
        rows, nodes = tree.tokens.shape
        most = nodes - 1 if tree.draws is None else tree.draws.child.shape[2]
        self.step += 1
        coins = uniforms(self.settings.seed, self.step, nodes * most + 1)
        return verify_sample(tree, p, coins[:, :-1].view(rows, nodes, most), coins[:, -1], max_depth)

    def saw(self, tokens: Tensor, length: Tensor) -> None:
        """A step's tokens ``[B, D + 1]``: the accepted ones of the first D, then the bonus token."""
        if self.seen is not None:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            used = torch.where(place < length[:, None], tokens, tokens[:, -1:])
            self.seen.scatter_(1, used, 1)


class _Clock:
    """Adds the time since the last lap to a phase."""

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self.seconds, self.device, self.since = seconds, device, time.perf_counter()

    def lap(self, phase: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] += now - self.since
        self.since = now
