"""One step of a batch, on buffers that are allocated once: draft → target's forward pass → verify → commit.

    step:  tree    = drafter.propose(state)                # root + drafted nodes
           hidden  = target(tree behind the cached prefix) # one forward pass of N tokens
           verdict = verify(tree, logits(hidden))          # the longest path the target agrees with, + a bonus token
           cache.commit(verdict.path)                      # keep that path's K/V, drop the rest

A *static* step has the same shapes every time and asks the device for nothing: it looks at the whole cache, of which
each row's own length, on the device, says what counts. On a GPU such a step is held in a CUDA graph; the host launches
the next one before it reads what the last one committed. Elsewhere a step looks at the slots in use only.

Shape letters: B rows, T prompt tokens, N nodes, D depth of the deepest node, d hidden width, V vocabulary.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

from draftsmith.inference.cache import KVCache
from draftsmith.inference.sampling import Sampling, Settings, law, uniforms
from draftsmith.inference.tree import StaticTree, TokenTree, one_hot_draws
from draftsmith.inference.verify import Verdict, verify_greedy, verify_sample, verify_typical
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.tree_attention import (
    TreeKeys,
    ancestor_mask,
    causal_bias,
    tree_attention,
    tree_attention_cached,
    tree_bias,
    tree_bias_one_row,
)
from draftsmith.kernels.verify import draw
from draftsmith.models.lean import Buffers, LeanDecoder
from draftsmith.models.lean_from import lean_decoder
from draftsmith.models.target import Target

Mode = Literal["greedy", "sample", "typical"]
MODES: tuple[Mode, ...] = get_args(Mode)
ATTENTION = "draftsmith_tree"
PREFILL_CHUNK = 512
PHASES = ("prefill", "draft", "verify", "accept", "commit", "other")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, biases: Mapping[int, Tensor | None] | None = None,
    behind: TreeKeys | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What ``transformers`` calls in every layer; the engine hands over ``biases`` or ``behind`` (see ``Runner``)."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("this target's attention has learned sinks (GPT-OSS), which the engine does not support yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if behind is not None:
        lengths, ancestors, depth, key_depth = behind
        out = tree_attention_cached(
            query, key, value, lengths, ancestors, key_depth.shape[1], scale, depth, key_depth, window, softcap
        )  # fmt: skip
    else:
        assert biases is not None, "the engine's attention needs the engine's mask"
        out = tree_attention(query, key, value, biases[window], scale, softcap)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)  # else padding masks would be made up


@dataclass
class State:
    """Device buffers per row that a drafter reads.

    root: ``[B]`` int64, the committed token whose K/V is not cached yet.
    length: ``[B]`` int64, cached tokens.
    feature: ``[B, F]``, the target's last hidden state that predicted the root, then what entered each layer that the
        drafter captures.
    active: ``[B]`` bool, False in rows without a text; what is proposed there is not looked at.
    settings: sampling parameters by row, for a drafter that draws at random; None where drafts are deterministic.
    step: ``[B]`` int64, the steps of each row's text so far; with the seed it makes fresh random numbers.
    stream: number of the drafter among those that draw at random in one step, from 1 on.
    """

    root: Tensor
    length: Tensor
    feature: Tensor
    active: Tensor
    settings: Settings | None
    step: Tensor
    stream: int = 1


@dataclass(frozen=True)
class Price:
    """What it takes and brings to ask a drafter whose trees always have the same shape.

    time: of drafting, over a plain step of the target.
    nodes: of its tree, the root included.
    tokens: that a step with its tree alone is expected to commit.
    """

    time: float
    nodes: int
    tokens: float


class Drafter(Protocol):
    """What the engine asks of a drafter; one that keeps nothing of the texts has ``propose`` alone. A drafter with
    caches or buffers belongs to one decoder at a time.

    num_nodes, max_depth, branching: bound every tree it proposes: nodes (the root included), depth of the deepest one,
        draws of a node.
    static: ``propose`` and ``absorb`` make the same shapes every time and ask the device for nothing if ``allocate``
        asked for it, so that a CUDA graph can hold them.
    captures: layers of the target whose input it reads too; F = d · (1 + how many).
    models: other causal LMs that it runs; the engine puts its attention on them.
    random: in sampling mode its nodes are drawn at random, and its trees say so by ``draws`` with distributions.
    price: where it is known before drafting; a merge asks such a drafter only where it pays.
    sources: names of what proposes, which the report counts by; with one at least, its trees say ``source``.
    """

    num_nodes: int
    max_depth: int
    branching: int
    static: bool
    captures: Sequence[int] = ()
    models: Sequence[Target] = ()
    sources: Sequence[str] = ()
    random: bool = False
    price: Price | None = None

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        """Make caches and buffers for the rows and the capacity of the target's cache, whose ``lengths`` they may
        share. Called before the first text, and again when the engine's own buffers change.

        Args:
            max_depth: of the deepest node that a verdict may accept; in a merge another drafter's may be deeper. Filled
                ``StaticTree`` s are made for this depth.
            static: as the class says.
        """

    def buffers(self) -> Sequence[Tensor]:
        """What ``propose`` and ``absorb`` change and the next step reads, but for K/V behind a row's length: the steps
        that warm up a graph capture are undone by putting these back."""
        return ()

    def begin(self, rows: slice) -> None:
        """New texts begin in these rows; their prompts follow by ``prefill``."""

    def prefill(self, features: Tensor, tokens: Tensor, start: int, rows: slice) -> None:
        """A chunk of the prompts that begin in ``rows``: features ``[b, T, F]`` of tokens ``[b, T]`` at positions
        ``start``…. Shorter prompts are padded; a row's length, known at the first ``propose``, says how far."""

    def propose(self, state: State) -> TokenTree: ...

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        """After each step, while ``state`` is still that of ``propose``: what was accepted, and the target's features
        ``[B, N, F]`` of the tree's nodes. Where ``verdict.own`` is given the tree holds others' nodes, too."""

    def end(self, row: int) -> None:
        """The text in this row has ended; it runs on with an empty prefix until another begins there."""


class PlainDrafter(Drafter):
    """Proposes nothing: the root alone. Plain decoding by the same engine, the baseline of every speed-up."""

    num_nodes, max_depth, branching, static = 1, 0, 0, True

    def __init__(self, device: torch.device) -> None:
        self.tree = StaticTree([-1], device)

    def propose(self, state: State) -> TokenTree:
        return self.tree.fill(state.root[:, None])


def find_lean(target: Target, lean: bool | None) -> LeanDecoder | str:
    """The target's lean decoder, or why the model's own modules run: they were asked for (False), or it has no lean
    decoder (None).

    Raises:
        ValueError: the lean decoder is asked for (True), and there is none.
    """
    found = "as asked" if lean is False else lean_decoder(target)
    if lean and isinstance(found, str):
        raise ValueError(f"target '{target.name}' has no lean decoder: {found}; use --decoder auto (lean=None)")
    return found


class Runner:
    """A causal LM on a cache: forward passes of tree nodes and of prompts' chunks. ``logits`` is the model's own.

    Args:
        target: the model; a drafter's own models are run in the same way.
        static: forward passes of trees look at the whole cache and ask the device for nothing.
        compiled: those of the same shape at every step by ``torch.compile``.
        lean: run the lean decoder (True), the model's own modules (False), or lean where that can be (None).

    Raises:
        ValueError: the lean decoder is asked for and cannot be.
    """

    def __init__(
        self, target: Target, cache: KVCache, static: bool = False, compiled: bool = False, lean: bool | None = None
    ) -> None:
        self.target, self.cache, self.static = target, cache, static
        self.found = find_lean(target, lean)
        self.lean = self.found if isinstance(self.found, LeanDecoder) else None
        self.modules: Callable[..., Any] = target.decoder if self.lean is None else self.lean.forward
        self.compiled = torch.compile(self.modules, dynamic=False) if compiled else self.modules
        self.tables = {} if self.lean is None else self.lean.tables(cache.capacity)
        self.buffers: dict[tuple[int, int, bool], list[Buffers]] = {}  # of steps, by their shape
        self.last_position = target.context - 1
        # The attention kernel, where Triton is; for wider heads its tiles do not fit.
        self.kernel = why_not_triton(cache.lengths) is None and max(width for _, width in target.kv_shapes) <= 256
        self.numbers = torch.arange(cache.capacity, device=target.device)
        config = target.config
        layers = getattr(config, "layer_types", None) or []
        sliding = getattr(config, "sliding_window", None) or 0
        # Every window some layer may ask for; 0 is full attention.
        self.windows = {0, sliding} if sliding or "sliding_attention" in layers else {0}
        self._fixed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # masks, and biases of one row, by (Q, T)

    def chunk(self, tokens: Tensor, start: int, captures: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """A chunk ``[b, T]`` of prompts at positions ``start``…, of the rows in the cache's window.

        Returns:
            As :meth:`forward`.
        """
        rows, count = tokens.shape
        positions = self.numbers[None, start : start + count]
        biases: dict[int, Tensor | None] = {
            w: causal_bias(start, count, w, self.target.dtype, self.target.device) for w in self.windows
        }
        at = positions.clamp(max=self.last_position).expand(rows, -1)
        return self.forward(tokens, at, positions, start + count, biases=biases, captures=captures)

    def nodes(
        self, tokens: Tensor, lengths: Tensor, ancestors: Tensor, depth: Tensor, *, first: int = 0,
        key_depth: Tensor | None = None, mask: Tensor | None = None, fixed: bool = False, sees_all: bool = False,
        captures: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Nodes ``first``, ``first + 1``, … of a tree behind each row's prefix, whose earlier nodes have been run.

        Args:
            tokens: ``[B, Q]`` int64.
            lengths: ``[B]`` int64, tokens of each row's prefix; the tree's node i is in slot length + i.
            ancestors: ``[B, Q, W]`` int64 bitsets over the tree's T = ``first`` + Q first nodes.
            depth: ``[B, Q]`` int32.
            key_depth: ``[B, T]`` int32 of these T nodes; left out where ``first`` is 0.
            mask: ``[B, Q, T]`` bool, ``ancestors`` unpacked, if at hand.
            fixed: ``mask`` is the same tensor at every call with this Q and T, and never changes.
            sees_all: every query sees all T nodes (one node; the end of a chain).
            captures: as :meth:`forward`.
        """
        cache, count = self.cache, tokens.shape[1]
        total = first + count
        whole = self.kernel or self.static
        seen = cache.capacity if whole else int(lengths.max()) + total
        biases: Mapping[int, Tensor | None] | None = None
        behind: TreeKeys | None = None
        if self.kernel:
            behind = TreeKeys(lengths, ancestors, depth, depth if key_depth is None else key_depth)
        elif sees_all and not self.static and cache.rows == 1 and self.windows == {0}:
            biases = {0: None}
        else:
            mask = ancestor_mask(ancestors, total) if mask is None else mask
            biases = {w: self._bias(lengths, mask, depth, key_depth, seen, w, fixed) for w in self.windows}
        positions = (lengths[:, None] + depth).clamp(max=self.last_position)
        slots = lengths[:, None] + self.numbers[first:total]
        return self.forward(tokens, positions, slots, seen, biases=biases, behind=behind, step=True, captures=captures)

    def _bias(
        self, lengths: Tensor, mask: Tensor, depth: Tensor, key_depth: Tensor | None, seen: int, window: int,
        fixed: bool,
    ) -> Tensor:  # fmt: skip
        dtype, capacity = self.target.dtype, self.cache.capacity
        if self.static or self.cache.rows > 1 or window:
            return tree_bias(lengths, mask, depth, seen, window, dtype, key_depth)
        if not fixed:
            return tree_bias_one_row(mask, seen, dtype)
        shape = (mask.shape[1], mask.shape[2])
        if shape not in self._fixed or self._fixed[shape][0] is not mask:
            self._fixed[shape] = mask, tree_bias_one_row(mask, capacity, dtype)
        return self._fixed[shape][1][..., capacity - seen :]

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, seen: int, *,
        biases: Mapping[int, Tensor | None] | None = None, behind: TreeKeys | None = None, step: bool = False,
        captures: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run ``tokens [B, N]`` at ``positions`` into ``slots``, looking at the first ``seen`` slots.

        Args:
            biases: the additive mask ``[B or 1, 1, N, seen]`` for each of ``windows``; None where all is seen.
            behind: or, for the Triton kernel, what it takes.
            step: the shapes stay the same from step to step: buffers are kept, and it is done by ``torch.compile`` if
                the runner was made for it.
            captures: numbers of layers.

        Returns:
            Hidden states ``[B, N, d]`` after the final norm, and those that enter each captured layer.
        """
        self.cache.slots, self.cache.seen = slots, seen
        decoder = self.compiled if step else self.modules
        if self.lean is not None:
            shape, buffers = (tokens.shape[0], tokens.shape[1], behind is None), None
            if step and decoder is self.modules:
                buffers = self.buffers.get(shape)
                if buffers is None:
                    buffers = self.buffers[shape] = self.lean.buffers(*shape)
            return decoder(
                tokens, positions, slots, self.cache.views(), self.tables, biases=biases, behind=behind,
                captures=captures, buffers=buffers,
            )  # fmt: skip
        options: dict[str, Any] = {"output_hidden_states": True} if captures else {}
        out = decoder(
            input_ids=tokens, position_ids=positions, past_key_values=self.cache, use_cache=True, biases=biases,
            behind=behind, **options,
        )  # fmt: skip
        captured = [out.hidden_states[number].to(tokens.device) for number in captures]
        return out.last_hidden_state.to(tokens.device), captured


def joined_features(hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
    """``[B, N, F]`` of what :meth:`Runner.forward` returns."""
    return torch.cat((hidden, *captured), -1) if captured else hidden


class Chooser:
    """What a mode decides: a row's first token and each step's verdict, with what that remembers of each row's text."""

    def __init__(self, mode: Mode, rows: int, target: Target, branching: int) -> None:
        self.mode, self.target, self.branching = mode, target, branching
        self.settings = Settings([Sampling()] * rows, target.device)
        self.step = torch.zeros(rows, dtype=torch.int64, device=target.device)
        self.seen: Tensor | None = None  # [B, V] uint8, the tokens of each text, once a repetition penalty counts them

    def begin(self, rows: slice, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> None:
        """New texts begin in these rows."""
        if self.mode == "greedy":
            return
        self.step[rows] = 0
        for row, sampling in enumerate(samplings, rows.start):
            self.settings.put(row, sampling)
        if self.settings.uses_penalty:
            if self.seen is None:  # no penalty before: what ran then needs no memory of it
                self.seen = torch.zeros(
                    len(self.step), self.target.vocab_size, dtype=torch.uint8, device=self.target.device
                )
            self.seen[rows] = 0
            for row, prompt in enumerate(prompts, rows.start):
                self.seen[row, torch.tensor(list(prompt), device=self.target.device)] = 1

    def reset(self) -> None:
        """No text is left, so nothing of what their samplings asked for has to be done any more."""
        self.settings.forget()

    @property
    def kind(self) -> tuple[bool, ...]:
        """What a CUDA graph of a step depends on."""
        return () if self.mode == "greedy" else self.settings.uses

    def first(self, logits: Tensor, rows: slice) -> Tensor:
        """The prefill's tokens ``[b]`` from ``logits [b, V]``; −1 where these are NaN or +∞, or all −∞."""
        if self.mode == "greedy":
            best, token = logits.max(-1)
            return torch.where(best.isfinite(), token, -1)
        seen = None if self.seen is None else self.seen[rows, None].bool()
        settings = self.settings[rows]
        p = law(logits[:, None], settings, seen)[:, 0]
        typical = self.mode == "typical"
        token = p.argmax(-1) if typical else draw(p, uniforms(settings.seed, self.step[rows], 1)[:, 0])
        if self.seen is not None:
            self.seen[rows] = self.seen[rows].scatter(1, token[:, None], 1)
        return torch.where(p[:, 0].isnan(), -1, token)

    def verify(self, tree: TokenTree, mask: Tensor, logits: Tensor, max_depth: int) -> Verdict:
        """The step's verdict from ``logits [B, N, V]``."""
        if self.mode == "greedy":
            return verify_greedy(tree, mask, logits, max_depth)
        seen = None
        if self.seen is not None and self.settings.uses_penalty:  # the text before, and the path to each node
            seen = self.seen[:, None].repeat(1, mask.shape[1], 1)
            tokens = tree.tokens[:, None].expand(-1, mask.shape[1], -1)
            seen.scatter_reduce_(2, tokens, mask.expand(len(seen), -1, -1).to(torch.uint8), "amax")
            seen = seen.bool()
        p = law(logits, self.settings, seen)
        if self.mode == "typical":
            s = self.settings
            return verify_typical(tree, mask, p, max_depth, s.epsilon[:, None], s.delta[:, None])
        rows, nodes = tree.tokens.shape
        draws = tree.draws or one_hot_draws(tree.parent, tree.valid, min(self.branching, nodes - 1))
        self.step += 1
        # A node's numbers, and the last one, stay the same however large the tree is: it may be padded for batch mates.
        coins = uniforms(self.settings.seed, self.step, 1 + nodes * self.branching)
        by_node = coins[:, 1:].view(rows, nodes, self.branching)[..., : draws.child.shape[2]]
        return verify_sample(tree, p, by_node, coins[:, 0], max_depth, draws)

    def saw(self, tokens: Tensor, length: Tensor) -> None:
        """A step's tokens ``[B, D + 1]``: the accepted ones of the first D, then the bonus token."""
        if self.seen is not None and self.settings.uses_penalty:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            used = torch.where(place < length[:, None], tokens, tokens[:, -1:])
            self.seen.scatter_(1, used, 1)


class Clock:
    """Adds the time since the last lap to a phase; on a GPU it waits for the device first."""

    def __init__(self, seconds: dict[str, float], device: torch.device) -> None:
        self.seconds, self.device, self.since = seconds, device, time.perf_counter()

    def lap(self, phase: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] += now - self.since
        self.since = now


def capacity_for(longest: int, drafter: Drafter) -> int:
    """Slots of a cache for texts of so many tokens, answers included: a row that has ended runs on for a step while the
    host learns of it."""
    return longest + drafter.num_nodes + 2 * (drafter.max_depth + 1)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one: graphs, streams and kernels are of that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def engine_attention(models: Sequence[Target]) -> Iterator[None]:
    """Inside, these models' own modules attend as the engine says."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.attention(ATTENTION))
        yield


Told = Callable[[], list[list[int]]]


# The step that a drafter's caches and buffers were last allocated for.
_STEP_OF: MutableMapping[Drafter, "weakref.ref[Step]"] = WeakIdKeyDictionary()


class Step:
    """A batch of B rows: their state on the device, what begins in them, and the step that takes all of them on.

    Args:
        capacity: slots of the cache, see :func:`capacity_for`.
        static: the same shapes at every step, and on a GPU a CUDA graph.
        compiled: the target's forward pass of a step by ``torch.compile``.
        lean: see :class:`Runner`.

    Raises:
        ValueError: the mode is none of ``MODES``, or the lean decoder is asked for and cannot be.
    """

    def __init__(
        self, target: Target, drafter: Drafter, mode: Mode, rows: int, capacity: int, *, static: bool = False,
        compiled: bool = False, lean: bool | None = None,
    ) -> None:  # fmt: skip
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: must be one of {', '.join(MODES)}")
        device = target.device
        self.target, self.drafter, self.mode = target, drafter, mode
        self.rows, self.capacity, self.static, self.compiled = rows, capacity, static, compiled
        self.cache = KVCache(target, rows, capacity)
        self.runner = Runner(target, self.cache, static, compiled, lean)
        self.captures = tuple(drafter.captures)
        width = target.hidden_size * (1 + len(self.captures))
        feature = torch.zeros(rows, width, dtype=target.dtype, device=device)
        self.running = torch.zeros(rows, dtype=torch.bool, device=device)
        self.chooser = Chooser(mode, rows, target, drafter.branching)
        root = torch.zeros(rows, dtype=torch.int64, device=device)
        settings = self.chooser.settings if mode == "sample" else None
        self.state = State(root, self.cache.lengths, feature, self.running, settings, self.chooser.step)
        # By row: how many tokens the step commits (−1: the target's logits are not finite), the drafted ones on the
        # accepted path, the bonus token; of a drafter with named sources also who proposed each drafted one (a bit for
        # each source), how many nodes the tree has but for the root, and how many each source proposed.
        self.num_sources = len(drafter.sources)
        columns = drafter.max_depth + 2 + (drafter.max_depth + 1 + self.num_sources if self.num_sources else 0)
        self.told = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.source_bits = torch.arange(self.num_sources, device=device)
        drafter.allocate(self.cache, drafter.max_depth, static)
        _STEP_OF[drafter] = weakref.ref(self)
        self.row_numbers = torch.arange(rows, device=device)
        self.depths = torch.arange(drafter.max_depth + 1, device=device)
        graph = static and device.type == "cuda" and drafter.static
        self.eagerly = "" if graph else "eager"  # how steps run, if not in a CUDA graph
        self._graphs: dict[tuple[bool, ...], torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            self._host = [torch.empty(self.told.shape, dtype=torch.int64, pin_memory=True) for _ in range(2)]

    @property
    def has_drafter(self) -> bool:
        """Whether the drafter's caches and buffers are still this step's: another decoder may have taken it over."""
        return _STEP_OF[self.drafter]() is self

    @property
    def how(self) -> str:
        """How steps run: in a CUDA graph or eagerly, compiled or not, and by which decoder; why not by the lean one."""
        graph = f"{self.eagerly or 'cuda graph'}{', compiled' if self.compiled else ''}"
        found = self.runner.found
        return f"{graph}, " + (f"transformers decoder ({found})" if isinstance(found, str) else "lean decoder")

    def begin(
        self, rows: slice, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], clock: Clock | None = None
    ) -> list[int]:
        """Prefill new texts into neighbouring rows, in chunks, right-padded; K/V of padding, behind a row's length, is
        overwritten later.

        Returns:
            Each row's first token; −1 where the target's logits are not finite.
        """
        device, cache = self.target.device, self.cache
        self.chooser.begin(rows, prompts, samplings)
        self.drafter.begin(rows)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest = max(map(len, prompts))
        padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        feature = self.state.feature[rows]
        cache.window = None if len(prompts) == self.rows else rows
        for start in range(0, longest, PREFILL_CHUNK):
            tokens = padded[:, start : start + PREFILL_CHUNK]
            count, seen = tokens.shape[1], min(start + PREFILL_CHUNK, longest)
            features = joined_features(*self.runner.chunk(tokens, start, self.captures))
            self.drafter.prefill(features, tokens, start, rows)
            last = (lengths - 1 - start).clamp(0, count - 1)
            here = (lengths - 1 >= start) & (lengths - 1 < seen)
            ends = features.gather(1, last[:, None, None].expand(-1, 1, features.shape[2])).squeeze(1)
            feature.copy_(torch.where(here[:, None], ends, feature))
        cache.window = None
        cache.lengths[rows] = lengths
        self.state.root[rows] = self.chooser.first(self.target.logits(feature[:, : self.target.hidden_size]), rows)
        self.running[rows] = True
        first = self.state.root[rows].tolist()
        if clock:
            clock.lap("prefill")
        return first

    def reset(self) -> None:
        """Nothing is wanted in any row."""
        self.running.zero_()
        self.cache.lengths.zero_()
        self.chooser.reset()

    def end(self, row: int) -> None:
        """Nothing more is wanted in this row until another text begins there; it runs on with an empty prefix."""
        self.running[row] = False
        self.cache.lengths[row] = 0
        self.drafter.end(row)

    def run(self, clock: Clock | None = None) -> None:
        """Take all rows on by one step; what it committed stands in ``told``."""
        cache, state = self.cache, self.state
        tree = self.drafter.propose(state)
        if clock:
            clock.lap("draft")
        count = tree.tokens.shape[1]
        assert tree.static is None or tree.static.paths.shape[1] == len(self.depths), "made for another max_depth"
        mask = ancestor_mask(tree.ancestors, count) if tree.mask is None else tree.mask
        hidden, captured = self.runner.nodes(
            tree.tokens, cache.lengths, tree.ancestors, tree.depth, mask=mask, fixed=tree.static is not None,
            sees_all=count == 1, captures=self.captures,
        )  # fmt: skip
        logits = self.target.logits(hidden)
        if clock:
            clock.lap("verify")
        verdict = self.chooser.verify(tree, mask, logits, self.drafter.max_depth)
        drafted = tree.tokens.gather(1, verdict.path[:, 1:].clamp(max=count - 1))
        committed = (verdict.length + 1) * self.running
        said = torch.where(verdict.finite, committed, -1)
        parts = [said[:, None], drafted, verdict.bonus[:, None]]
        self.chooser.saw(torch.cat(parts[1:], 1), verdict.length)
        if self.num_sources:
            assert tree.source is not None
            by_node = tree.source[..., None] >> self.source_bits & 1  # [B, N, sources]
            drafted_by = tree.source.gather(1, verdict.path[:, 1:].clamp(max=count - 1))
            parts += [drafted_by, (tree.source != 0).sum(1, keepdim=True), by_node.sum(1)]
        torch.cat(parts, 1, out=self.told)
        if clock:
            clock.lap("accept")
        # Often the nodes stand where they should; a lone root always does.
        if self.drafter.max_depth and (self.static or bool((verdict.path != self.depths).any())):
            cache.commit(verdict.path, verdict.length)
        features = joined_features(hidden, captured)
        self.drafter.absorb(state, verdict, tree, features)
        cache.lengths += committed
        state.root.copy_(verdict.bonus)
        state.feature.copy_(features[self.row_numbers, verdict.node])
        if clock:
            clock.lap("commit")

    def launch(self, clock: Clock | None = None) -> Told:
        """Run a step; the function returned gives the rows of ``told``, waiting for the device if need be.

        Only the last two steps can be read.
        """
        if clock or self.eagerly:
            self.run(clock)
        else:
            self._replay()
        if self.target.device.type != "cuda":
            told = self.told.tolist()
            return lambda: told
        self._host.reverse()
        host, done = self._host[0], torch.cuda.Event()
        host.copy_(self.told, non_blocking=True)
        done.record(torch.cuda.current_stream(self.target.device))

        def read() -> list[list[int]]:
            done.synchronize()
            return host.tolist()

        return read

    def buffers(self) -> list[Tensor]:
        """What a step changes and the next one reads, but for K/V behind a row's length; the rows' lengths first."""
        seen = [] if self.chooser.seen is None else [self.chooser.seen]
        own = [self.cache.lengths, self.state.root, self.state.feature, self.chooser.step, self.told]
        return [*own, *seen, *self.drafter.buffers()]

    def _replay(self) -> None:
        graph = self._graphs.get(self.chooser.kind)
        if graph is None:
            graph = self._capture()
        if graph is None:
            self.run()
        else:
            graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Hold a step in a CUDA graph. The steps that warm it up run on the present state, which is put back after."""
        buffers = self.buffers()
        kept = [buffer.clone() for buffer in buffers]
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(here)
        try:
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.run()
                    self.cache.lengths.copy_(kept[0])  # nothing may run beyond the cache
                # A target that asks the device for numbers (some mixtures of experts) is found out here: a capture that
                # fails half-way leaves its marks on the process.
                torch.cuda.set_sync_debug_mode("error")
                try:
                    self.run()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                self.cache.lengths.copy_(kept[0])
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    self.run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.eagerly = f"eager: {str(error).strip().splitlines()[0]}"
            return None
        finally:
            here.wait_stream(stream)
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
        self._graphs[self.chooser.kind] = graph
        return graph
