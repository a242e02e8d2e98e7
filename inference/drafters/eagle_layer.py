"""An EAGLE drafter's decoder layers on a K/V cache of their own, run by kernels where there are any.

Shape letters are those of :mod:`draftsmith.inference.drafters.eagle`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.inference.engine.prompts import Part
from draftsmith.inference.engine.runner import part_biases, segments_of
from draftsmith.inference.trees.by_level import Hidden, LevelPass
from draftsmith.kernels.attention_plan import Plans
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.linear import apply_linear
from draftsmith.kernels.pair_input import pair_input
from draftsmith.kernels.tree_attention import (
    TreeKeys,
    ancestor_mask,
    attention_items,
    runs_kernel,
    tree_bias,
    tree_bias_one_row,
)
from draftsmith.models.eagle import Eagle, llama_config
from draftsmith.models.lean import (
    Buffers,
    FusedBuffers,
    Layer,
    RMSNorm,
    can_fuse,
    run_fused_layer,
    run_layer,
    weight_and_eps,
)
from draftsmith.models.lean_from import packed_linears
from draftsmith.models.lean_native import NativeLayers
from draftsmith.models.target import Target


class _PairInput:
    """Input of EAGLE-3's q, k and v: from the hidden states of a pass, cat(norm(embeddings), norm(hidden)).

    embeddings: ``[n, d]`` of the pass, set before it.
    normed: hidden states come here normed, because the layer's residual is the normed one.
    """

    def __init__(self, embedding_norm: RMSNorm, hidden_norm: RMSNorm, normed: bool) -> None:
        self.embedding_norm, self.hidden_norm, self.normed = embedding_norm, hidden_norm, normed
        self.embeddings = torch.empty(0)

    def __call__(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.normed else self.hidden_norm(hidden)
        return torch.cat((self.embedding_norm(self.embeddings), normed), -1)


class EagleLayer:
    """The layers, mostly one, with packed matrices of which the modules keep views, and their cache.

    layer: the first one. one_layer: there is no other, so that K and V depend on nothing but their pair.
    pair_input, norm: EAGLE-3's input of its q, k and v, and the final norm; None of other drafters.
    table: rotary table as :meth:`draftsmith.models.lean.LeanDecoder.tables` has it: ``[positions, 2 · D]``.
    storage: the cache, ``[L, 2, B, G, S, D]``; keys, values: the first layer's.
    both: K and V of the first layer, for writing: ``[B, S, 2, G, D]``.
    """

    def __init__(self, eagle: Eagle, target: Target) -> None:
        config = eagle.config
        self.eagle, self.target, self.embed = eagle, target, eagle.embeddings(target.embeddings)

        def norm(part: torch.nn.RMSNorm) -> RMSNorm:
            return RMSNorm(part.weight.detach(), config.rms_norm_eps)

        self.pair_input, self.norm = None, None
        if eagle.norm is not None:
            first = eagle.midlayer
            self.norm, pair = norm(eagle.norm), (norm(first.input_layernorm), norm(first.hidden_norm))
            self.pair_input = _PairInput(*pair, config.norm_before_residual)
        self.layers = list[Layer]()
        for module in eagle.all_layers:
            qkv, qkv_bias = packed_linears(module.self_attn, ["q_proj", "k_proj", "v_proj"], target)
            gate_up, _ = packed_linears(module.mlp, ["gate_proj", "up_proj"], target)
            out, _ = packed_linears(module.self_attn, ["o_proj"], target)
            down, _ = packed_linears(module.mlp, ["down_proj"], target)
            before = norm(module.input_layernorm) if self.layers else self.pair_input or (lambda x: x)
            scores = config.num_attention_heads, config.num_key_value_heads, config.head_dim**-0.5, 0, None, ""
            attention = before, qkv, qkv_bias, None, out, None, None
            mlp = norm(module.post_attention_layernorm), gate_up, None, module.mlp.act_fn, down, None, None
            self.layers.append(Layer(*scores, *attention, *mlp, 1.0))
        self.layer, self.one_layer = self.layers[0], len(self.layers) == 1

    def allocate(self, rows: int, capacity: int, static: bool, positions: int | None = None) -> None:
        """Allocate the cache; ``static`` as :meth:`~draftsmith.inference.engine.protocol.Drafter.allocate`.
        ``positions``: that its pairs may have, where they are more than its slots."""
        config, device, dtype = self.eagle.config, self.target.device, self.target.dtype
        self.rows, self.capacity, self.eager = rows, capacity, not static
        size = (len(self.layers), 2, rows, config.num_key_value_heads, capacity, config.head_dim)
        self.storage = storage = torch.zeros(size, dtype=dtype, device=device)
        (self.keys, self.values), self.both = storage[0], self.view(0, capacity)[0]
        self.kernel = runs_kernel(storage, config.head_dim)
        on_cpu = self.kernel and why_not_triton(storage) and can_fuse(self.layer)
        self.native = NativeLayers(self.layers, self.norm) if on_cpu else None
        rotary: Callable[..., tuple[Tensor, Tensor]] = LlamaRotaryEmbedding(llama_config(config)).to(device)
        places = torch.arange(min(positions or capacity, self.target.context), device=device)[None]
        cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), places)
        half = sin.shape[-1] // 2
        self.table = torch.cat((cos, -sin[..., :half], sin[..., half:]), -1)[0]
        self.numbers = torch.arange(capacity, device=device)
        self.pass_buffers: dict[int, Sequence[Buffers] | Sequence[FusedBuffers]] = {}  # of each layer, by nodes
        self.one_row: dict[LevelPass, Tensor] = {}  # masks of eager passes with one row

    def view(self, number: int, seen: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's cache, as :meth:`draftsmith.models.lean.LeanDecoder.forward` takes it, of ``seen`` slots."""
        keys, values = both = self.storage[number]
        return both.permute(1, 3, 0, 2, 4), keys[:, :, :seen], values[:, :, :seen]

    def read(self, tokens: Tensor, hidden: Tensor, rows: Tensor, slots: Tensor, parts: Sequence[Part]) -> None:
        """Run pairs of prompts, ``[n]`` and ``[n, d]``, in these rows and slots ``[n]``: one part after the other, of
        which earlier pairs have been run."""
        x, seen = self._residual(tokens[None], hidden[None]), max(part.end for part in parts)
        biases, segments = None, None
        if self.kernel and not why_not_triton(self.storage):
            segments = segments_of(parts, x.device)
        else:
            biases = {0: part_biases(parts, 0, x.dtype, x.device)}
        cos, sin = F.embedding(slots, self.table).view(1, len(slots), 2, 1, -1).unbind(2)
        for number, layer in enumerate(self.layers):
            buffers = Buffers(layer, 1, len(slots), segments is None)
            run_layer(
                layer, buffers, x, (rows[None], slots[None]), self.view(number, seen), (cos, sin), biases, segments
            )

    def keys_values(self, tokens: Tensor, hidden: Tensor, rotations: Tensor) -> Tensor:
        """K and V of pairs, ``[b, n, 2, G, D]``: nothing else of a one-layer drafter depends on them. ``rotations``:
        ``[1 or b, n, 2 · D]``, rows of the rotary table."""
        layer, (each, count) = self.layer, tokens.shape
        x = layer.before_attention(self._residual(tokens, hidden))
        width = layer.qkv.shape[1] // (layer.heads + 2 * layer.kv_heads)
        kv = x @ layer.qkv[:, layer.heads * width :]
        if layer.qkv_bias is not None:
            kv += layer.qkv_bias[layer.heads * width :]
        kv = kv.view(each, count, 2, layer.kv_heads, width)
        keys = kv[:, :, 0]  # [b, n, G, D]
        cos, sin = rotations.view(-1, count, 2, 1, width).unbind(2)
        kv[:, :, 0] = keys * cos + keys.roll(width // 2, -1) * sin
        return kv

    def _residual(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The layer's residual ``[B · n, d]`` of pairs: tokens ``[B, n]``, hidden states ``[B, n, d]``."""
        embeddings = self.embed(tokens).to(hidden.dtype)
        if self.pair_input is None:
            return apply_linear(self.eagle.fc, torch.cat((embeddings, hidden), -1)).flatten(0, 1)
        self.pair_input.embeddings = embeddings.flatten(0, 1)
        return self.pair_input.hidden_norm(hidden.flatten(0, 1)) if self.pair_input.normed else hidden.flatten(0, 1)

    def run(
        self,
        level: LevelPass,
        tokens: Tensor,
        hidden: Tensor,
        lengths: Tensor,
        plans: Plans | None,
        fixed: bool,
        left_out: Tensor | None = None,
    ) -> Hidden:
        """Run nodes ``tokens [B, n]`` of a tree that follows each row's first ``lengths [B]`` pairs, from the hidden
        states of the level above ``[B, m, d]``, which may be overwritten. ``fixed``: the pass is the same object at
        every step. ``left_out``: ``[B]`` int64, pairs before these that the cache does not hold."""
        rows, count = tokens.shape
        total = level.first + count
        seen = self.capacity if self.kernel or not self.eager else int(lengths.max()) + total
        biases, tree_keys = None, None
        if self.kernel:
            heads, kv_heads, keys = self.layer.heads, self.layer.kv_heads, self.keys
            items = attention_items(rows, count, heads, kv_heads, keys.shape[3], seen, keys.dtype, keys.device)
            work = None if plans is None else plans.plan(total, items)
            plan = {} if work is None else {0: work}
            tree_keys = TreeKeys(lengths, level.ancestors, level.depth, level.key_depth, plan)
        else:
            biases = {0: self._bias(level, lengths, seen, fixed)}
        views = [self.view(number, seen) for number in range(len(self.layers))]
        buffers = self._buffers(rows, count) if self.native is None else None
        if buffers is not None and isinstance(buffers[0], Buffers):
            reached = lengths if left_out is None else lengths + left_out
            positions = (reached[:, None] + level.depth).clamp(max=len(self.table) - 1)
            slots = lengths[:, None] + self.numbers[level.first : total]
            x = self._residual(tokens, level.of_parents(hidden))
            cos, sin = F.embedding(positions, self.table).view(rows, count, 2, 1, -1).unbind(2)
            for layer, own, view in zip(self.layers, cast(Sequence[Buffers], buffers), views, strict=True):
                run_layer(layer, own, x, (own.rows, slots), view, (cos, sin), biases, tree_keys)
            normed = x if self.norm is None else self.norm(x)
        else:
            assert tree_keys is not None
            x, inputs, positions, slots = self._fused_input(level, tokens, hidden, lengths)
            if left_out is not None:
                positions = (positions + left_out[:, None]).clamp(max=len(self.table) - 1)
            where = positions, slots
            if self.native is not None:
                normed, _ = self.native.run(x, *where, views, {"": self.table}, tree_keys, inputs=inputs)
            else:
                normed, norms = torch.empty_like(x), [layer.before_attention for layer in self.layers[1:]]
                norms.append(self.norm or self.layers[-1].before_mlp)
                parts = zip(self.layers, cast(Sequence[FusedBuffers], buffers), views, norms, strict=True)
                for layer, own, view, norm in parts:
                    given = x, inputs, normed, self.table, *where, view, tree_keys, weight_and_eps(norm)
                    ends_normed = layer is self.layers[-1] and self.norm is not None
                    inputs = normed if run_fused_layer(layer, own, *given, ends_normed) else None
            normed = x if self.norm is None else normed
        normed = normed.view(rows, count, -1)
        return normed if self.eagle.config.norm_output else x.view(rows, count, -1), normed

    def _fused_input(
        self, level: LevelPass, tokens: Tensor, hidden: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The layer's residual ``[B · n, d]``, the input of its q, k and v, positions and slots ``[B, n]``."""
        embed, norms = self.embed, None
        if self.pair_input is not None:
            embedding_norm, hidden_norm = self.pair_input.embedding_norm, self.pair_input.hidden_norm
            norms = embedding_norm.weight, hidden_norm.weight, embedding_norm.eps
        if type(embed) is torch.nn.Embedding and embed.weight.dtype == hidden.dtype and not embed._forward_hooks:
            table = embed.weight
        else:  # a scaled one (Gemma), or with hooks: its vectors are the table
            table = embed(tokens).to(hidden.dtype).flatten(0, 1)
            tokens = torch.arange(len(table), device=table.device).view(tokens.shape)
        pairs, x, positions, slots = pair_input(
            tokens, table, hidden, level.above, norms, lengths, level.depth, level.first, len(self.table) - 1
        )
        if norms is None:
            x = pairs = apply_linear(self.eagle.fc, pairs)
        elif self.eagle.config.norm_before_residual:
            x = pairs[:, x.shape[1] :].contiguous()  # the layer writes to it
        return x, pairs, positions, slots

    def _buffers(self, rows: int, count: int) -> Sequence[Buffers] | Sequence[FusedBuffers]:
        """Each layer's buffers for passes of so many nodes; those behind the first one share theirs."""
        if count not in self.pass_buffers:
            fused, some = self.kernel and can_fuse(self.layer), self.layers[:2]
            with torch.inference_mode(False), torch.no_grad():  # usable inside and outside of inference mode
                if fused:
                    made: Any = [FusedBuffers(layer, rows, count, True) for layer in some]
                else:
                    made = [Buffers(layer, rows, count, not self.kernel) for layer in some]
            self.pass_buffers[count] = made + made[1:] * (len(self.layers) - 2)
        return self.pass_buffers[count]

    def _bias(self, level: LevelPass, lengths: Tensor, seen: int, fixed: bool) -> Tensor | None:
        if self.eager and self.rows == 1 and level.sees_all:
            return None
        mask = ancestor_mask(level.ancestors, level.first + level.count) if level.mask is None else level.mask
        if not self.eager or self.rows > 1:
            return tree_bias(lengths, mask, level.depth, seen, 0, self.keys.dtype, level.key_depth)
        if not fixed:
            return tree_bias_one_row(mask, seen, self.keys.dtype)
        if level not in self.one_row:
            self.one_row[level] = tree_bias_one_row(mask, self.capacity, self.keys.dtype)
        return self.one_row[level][..., self.capacity - seen :]
