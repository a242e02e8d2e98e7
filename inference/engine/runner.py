"""Forward passes of a causal LM on a preallocated cache: prompts in chunks, and token trees after each row's prefix.

Shape letters: B rows, b rows that begin, T prompt tokens or tree keys, N nodes, Q query nodes, W 64-bit words, d hidden
width, F features per token.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk, Part, to_device
from draftsmith.kernels.attention_plan import Plan, Plans
from draftsmith.kernels.backend import SAME_BITS, why_not_triton
from draftsmith.kernels.step_attention import attend_tree
from draftsmith.kernels.tree_attention import (
    TILE,
    SegmentBias,
    Segments,
    TreeKeys,
    ancestor_mask,
    attention_items,
    causal_bias,
    runs_kernel,
    tree_attention,
    tree_bias,
    tree_bias_one_row,
)
from draftsmith.models.lean import Biases, Buffers, FusedBuffers, LeanDecoder, Observer
from draftsmith.models.lean_from import lean_decoder
from draftsmith.models.target import Target, attention_window, cache_argument

ATTENTION = "draftsmith_tree"
# In the first lines of errors of steps that a CUDA graph cannot hold; any other error may come from the device.
_NOT_CAPTURED = ("synchronizing CUDA operation", "captur")
# The arguments of the pass that runs, which layers of some families (StableLM, Nemotron) do not hand on to attention.
_Masks = tuple[Biases | None, TreeKeys | Segments | None, Observer | None]
_of_pass: ContextVar[_Masks] = ContextVar("_of_pass")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    biases: Biases | None = None,
    tree_keys: TreeKeys | Segments | None = None,
    observer: Observer | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention that ``transformers`` calls in every layer; ``biases`` or ``tree_keys`` come from :class:`Runner`."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("this target's attention has learned sinks, as GPT-OSS's; the engine does not support it yet")
    if attention_mask is not None:
        raise ValueError("this target's attention has a mask of its own, as Doge's; the engine does not support it yet")
    if biases is None and tree_keys is None:
        biases, tree_keys, observer = _of_pass.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = attention_window(module, kwargs)
    if observer is not None:
        observer(query, scale, window, softcap)
    if tree_keys is not None:
        out = attend_tree(query, key, value, tree_keys, scale, window, softcap)
    else:
        assert biases is not None
        out = tree_attention(query, key, value, biases[window], scale, softcap)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)  # else transformers builds padding masks


@contextmanager
def engine_attention(models: Sequence[Target]) -> Iterator[None]:
    """Context in which these models' own modules use the engine's attention."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.attention(ATTENTION))
        yield


def find_lean(target: Target, lean: bool | None) -> LeanDecoder | str:
    """The target's lean decoder, or the reason why the model's own modules run instead. ``lean``: False asks for these,
    True for the lean decoder (a ValueError if there is none), None for lean where there is one."""
    decoder = "as requested" if lean is False else lean_decoder(target)
    if lean and isinstance(decoder, str):
        raise ValueError(f"target '{target.name}' has no lean decoder: {decoder}; use --decoder auto (lean=None)")
    return decoder


def check_same_bits(target: Target, max_depth: int, lean: bool | None) -> None:
    """Check that drafting can leave each bit as it is, where ``DRAFTSMITH_SAME_BITS`` asks for it. ``max_depth``: of
    the drafter's trees. Raises ValueError: it cannot."""
    decoder = find_lean(target, lean)
    reason = decoder if isinstance(decoder, str) else decoder.rows_differ
    if not reason and isinstance(decoder, LeanDecoder) and decoder.native is None and max_depth > TILE:
        reason = f"the drafter's trees are {max_depth} deep, and only {TILE} levels are possible"
    if reason:
        raise ValueError(
            f"{SAME_BITS} is set, but a step's bits may depend on the drafts with target '{target.name}': {reason}; "
            "unset it"
        )


class Runner:
    """A causal LM on a cache: forward passes of prompt chunks and of tree nodes. Logits are the model's own method.

    Args:
        target: the model: the target, or a causal LM that drafts.
        static: forward passes of trees attend to the whole cache, without host synchronisation.
        lean: as :func:`find_lean` takes it.
    """

    def __init__(self, target: Target, cache: KVCache, static: bool = False, lean: bool | None = None) -> None:
        self.target, self.cache, self.static = target, cache, static
        self._cache_argument = cache_argument(target.decoder)
        self.lean_or_reason = find_lean(target, lean)
        self.lean = self.lean_or_reason if isinstance(self.lean_or_reason, LeanDecoder) else None
        self.tables = {} if self.lean is None else self.lean.tables(cache.positions)
        self.buffers: dict[tuple[int, int, bool], Sequence[Buffers | FusedBuffers]] = {}  # of steps, by shape
        self.last_position = target.context - 1
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        self.on_cpu = bool(why_not_triton(like))  # where a prompt, which has many rows, takes PyTorch's own attention
        self.kernel = runs_kernel(like, max(width for _, width in target.kv_shapes))
        self.numbers = torch.arange(cache.capacity, device=target.device)
        config = target.config
        layers = getattr(config, "layer_types", None) or []
        sliding = getattr(config, "sliding_window", None) or 0
        # Every window that some layer may use; 0 is full attention.
        self.windows = {0, sliding} if sliding or "sliding_attention" in layers else {0}
        if self.lean is not None:
            self.windows = {layer.window for layer in self.lean.layers}
        heads = getattr(config, "num_attention_heads", None)
        self.num_heads = heads if isinstance(heads, int) else target.kv_shapes[0][0]  # of the first layer
        self._fixed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # masks, and biases of one row, by (Q, T)

    @property
    def bitwise(self) -> bool:
        """Whether the bits of a row of a step do not depend on the other rows."""
        return self.kernel and self.lean is not None and not self.lean.rows_differ

    def forward_prompts(
        self, chunk: Chunk, captures: Sequence[int] = (), observer: Observer | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run parts of prompts; earlier tokens of each have been run. ``observer`` is called in each layer, in their
        order, once its keys and values are in the cache; the rest is as in :meth:`forward`, for B = 1 and N = T."""
        target, parts = self.target, chunk.parts
        biases, segments = None, None
        if self.kernel and not self.on_cpu and observer is None:
            segments = segments_of(parts, target.device)
        else:
            biases = {window: part_biases(parts, window, target.dtype, target.device) for window in self.windows}
        positions, rows, tokens = (each[None] for each in (chunk.positions, chunk.rows, chunk.tokens))
        options: dict[str, Any] = {"biases": biases, "tree_keys": segments, "rows": rows, "observer": observer}
        reached = positions.clamp(max=self.last_position)
        return self.forward(tokens, reached, positions, max(part.end for part in parts), captures=captures, **options)

    def forward_nodes(
        self,
        tokens: Tensor,
        lengths: Tensor,
        ancestors: Tensor,
        depth: Tensor,
        *,
        first: int = 0,
        key_depth: Tensor | None = None,
        mask: Tensor | None = None,
        fixed: bool = False,
        sees_all: bool = False,
        captures: Sequence[int] = (),
        plans: Plans | None = None,
        left_out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run nodes ``first``, ``first + 1``, … of a tree after each row's prefix; earlier nodes have been run.

        Args:
            tokens: ``[B, Q]`` int64.
            lengths: ``[B]`` int64, tokens of each row's prefix; node i is in slot length + i.
            ancestors: ``[B, Q, W]`` int64 bitsets over the first T = ``first`` + Q nodes.
            depth: ``[B, Q]`` int32.
            key_depth: ``[B, T]`` int32, depth of these T nodes; may be left out if ``first`` is 0.
            mask: ``[B, Q, T]`` bool, ``ancestors`` unpacked, if already computed.
            fixed: ``mask`` is the same, never changing tensor at every call with this Q and T.
            sees_all: every query sees all T nodes (one node; the end of a chain).
            plans: of the step; made for this pass alone if left out.
            left_out: ``[B]`` int64, tokens of each row's prefix that the cache does not hold: node i is at position
                length + left out + depth. None: it holds all of them.

        ``captures`` and the result are those of :meth:`forward`.
        """
        target, cache, count = self.target, self.cache, tokens.shape[1]
        total = first + count
        seen = cache.capacity if self.kernel or self.static else int(lengths.max()) + total
        biases, tree_keys = None, None
        if self.kernel:
            alike = self.bitwise and not self.on_cpu
            work = None if alike else self._work(plans or Plans(lengths), count, total, seen)
            tree_keys = TreeKeys(lengths, ancestors, depth, depth if key_depth is None else key_depth, work, alike)
        elif sees_all and not self.static and cache.rows == 1 and self.windows == {0}:
            biases = {0: None}
        else:
            mask = ancestor_mask(ancestors, total) if mask is None else mask
            biases = {
                window: tree_bias(lengths, mask, depth, seen, window, target.dtype, key_depth)
                if self.static or cache.rows > 1 or window
                else self._bias_of_one_row(mask, seen, fixed)
                for window in self.windows
            }
        ends = lengths if left_out is None else lengths + left_out
        positions = (ends[:, None] + depth).clamp(max=self.last_position)
        slots = lengths[:, None] + self.numbers[first:total]
        return self.forward(
            tokens, positions, slots, seen, biases=biases, tree_keys=tree_keys, step=True, captures=captures
        )

    def _work(self, plans: Plans, queries: int, num_tree_keys: int, seen: int) -> dict[int, Plan]:
        """The kernel's items for each window, planned for the shape of the first layer; none if no row is split."""
        (kv_heads, width), (rows, device) = self.target.kv_shapes[0], (len(plans.lengths), plans.lengths.device)
        items = attention_items(rows, queries, self.num_heads, kv_heads, width, seen, self.target.dtype, device)
        by_window = {window: plans.plan(num_tree_keys, items, window) for window in self.windows}
        return {window: plan for window, plan in by_window.items() if plan is not None}

    def _bias_of_one_row(self, mask: Tensor, seen: int, fixed: bool) -> Tensor:
        dtype, capacity = self.target.dtype, self.cache.capacity
        if not fixed:
            return tree_bias_one_row(mask, seen, dtype)
        shape = (mask.shape[1], mask.shape[2])
        if shape not in self._fixed or self._fixed[shape][0] is not mask:
            self._fixed[shape] = mask, tree_bias_one_row(mask, capacity, dtype)
        return self._fixed[shape][1][..., capacity - seen :]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: int,
        *,
        biases: Biases | None = None,
        tree_keys: TreeKeys | Segments | None = None,
        rows: Tensor | None = None,
        step: bool = False,
        captures: Sequence[int] = (),
        observer: Observer | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run ``tokens [B, N]`` at ``positions``, write their K/V into ``slots``, attend to the first ``seen`` slots.

        Args:
            biases: additive mask ``[B or 1, 1, N, seen]`` for each of ``windows``; None where every slot is visible.
            tree_keys: arguments of the Triton kernel, in place of ``biases``.
            rows: ``[1, N]`` int64, of a pass of prompts the row of each token; each row's own tokens if left out.
            step: shapes repeat from step to step: reuse buffers.
            captures: numbers of layers.
            observer: see :meth:`forward_prompts`; needs ``biases``.

        Returns:
            Hidden states ``[B, N, d]`` after the final norm, and the input of each captured layer.
        """
        self.cache.slots, self.cache.seen, self.cache.of_tokens = slots, seen, rows
        masks: dict[str, Any] = {"biases": biases, "tree_keys": tree_keys}
        if self.lean is not None:
            shape, buffers = (tokens.shape[0], tokens.shape[1], tree_keys is None), None
            if step:
                buffers = self.buffers.get(shape)
                if buffers is None:
                    buffers = self.buffers[shape] = self.lean.buffers(*shape, step=True)
            options: dict[str, Any] = {"captures": captures, "buffers": buffers, "observer": observer, "rows": rows}
            return self.lean.forward(tokens, positions, slots, self.cache.views(), self.tables, **masks, **options)
        options = {self._cache_argument: self.cache, "use_cache": True, **masks}
        if captures:
            options["output_hidden_states"] = True
        if observer is not None:
            options["observer"] = observer
        before_pass = _of_pass.set((biases, tree_keys, observer))
        try:
            out = self.target.decoder(input_ids=tokens, position_ids=positions, **options)
        finally:
            _of_pass.reset(before_pass)  # masks of long prompts are large
        captured = [out.hidden_states[number].to(tokens.device) for number in captures]
        return out.last_hidden_state.to(tokens.device), captured


def segments_of(parts: Sequence[Part], device: torch.device) -> Segments:
    """Parts of prompts, one after the other in a pass, as kernels take them."""
    rows, starts, counts = zip(*parts, strict=True)
    firsts = itertools.accumulate(counts, initial=0)
    # An even number of each: whether addresses are multiples of 16 bytes is part of a kernel's key.
    each = [[*values, 0][: len(parts) + len(parts) % 2] for values in (rows, starts, [*firsts][:-1], counts)]
    by_part = to_device(each, device)[:, : len(parts)]
    return Segments(by_part[0], by_part[1], by_part[2], by_part[3], max(counts))


def part_biases(parts: Sequence[Part], window: int, dtype: torch.dtype, device: torch.device) -> list[SegmentBias]:
    """The masks of parts of prompts, one after the other in a pass; equal ones are one tensor."""
    masks: dict[tuple[int, int], Tensor] = {}
    found: list[SegmentBias] = []
    firsts = itertools.accumulate((part.count for part in parts), initial=0)
    for (row, start, count), first in zip(parts, firsts, strict=False):
        if (start, count) not in masks:
            masks[start, count] = causal_bias(start, count, window, dtype, device)
        found.append(SegmentBias(row, first, first + count, masks[start, count]))
    return found


def joined_features(hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
    """Features ``[B, N, F]`` from the result of :meth:`Runner.forward`."""
    return torch.cat((hidden, *captured), -1) if captured else hidden


def why_no_graph(error: RuntimeError) -> str | None:
    """The reason why a step that failed in warm-up or capture cannot be captured; None for an error of another kind,
    such as a device error, which must not be passed over."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, torch.OutOfMemoryError) or not any(part in lines[0] for part in _NOT_CAPTURED):
        return None
    return lines[0]


@contextmanager
def refuse_synchronisation() -> Iterator[None]:
    """Context in which an operation on a GPU that waits for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that PyTorch does not find all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
