"""A decoder in few operations for families that are built like Llama; :mod:`draftsmith.models.lean_from` makes it.

    x ← x + out(attention(rotate(q), rotate(k), v)),   q, k, v = qkv(norm(x))
    x ← x + down(act(gate) · up),                      gate, up = gate_up(norm(x))

Shape letters: B rows, N nodes, M = B · N, H query heads, G key/value heads, D head width, S slots, d hidden width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.linear import add_product, choose, product
from draftsmith.kernels.tree_attention import TreeKeys, tree_attention, tree_attention_cached


class RMSNorm:
    """RMSNorm: x / √(mean(x²) + eps) · weight.

    Args:
        weight: ``[d]``, or ``[heads, D]`` where heads have weights of their own; float32 where that is the precision of
            the model's own product with it.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.width = weight, eps, weight.shape[-1]
        self.split = weight.is_cpu and weight.dtype == torch.float32
        # √(mean(x²) + eps) = √(|x|² + width · eps) / √width
        self.least = torch.tensor(math.sqrt(self.width * eps), device=weight.device)
        self.scaled = weight * math.sqrt(self.width)

    def __call__(self, x: Tensor) -> Tensor:
        if self.split and x.dtype == torch.float32:  # F.rms_norm is six operations there and takes twice as long
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x.mul(self.scaled).div_(torch.hypot(length, self.least))
        if self.weight.dim() == 1 and self.weight.dtype == x.dtype:
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        return (F.rms_norm(x.to(self.weight.dtype), (self.width,), None, self.eps) * self.weight).to(x.dtype)


@dataclass(frozen=True)
class Layer:
    """One layer's matrices, ``[inputs, outputs]`` each, and its attention's settings."""

    heads: int
    kv_heads: int
    scale: float
    window: int
    softcap: float | None
    rope: str  # which of the rotary tables
    before_attention: RMSNorm
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: RMSNorm | None
    out: Tensor
    out_bias: Tensor | None
    after_attention: RMSNorm | None
    before_mlp: RMSNorm
    gate_up: Tensor
    gate_up_bias: Tensor | None
    act: Callable[[Tensor], Tensor]
    down: Tensor
    down_bias: Tensor | None
    after_mlp: RMSNorm | None
    factor: float  # on what is added to x (Granite)


class Buffers:
    """What layers of one shape write in a forward pass of B rows of N nodes, the views of it that they read, and the
    forms of their products. Made once where steps keep their shape."""

    def __init__(self, layer: Layer, rows: int, count: int, grouped: bool) -> None:
        heads, kv_heads, many = layer.heads, layer.kv_heads, rows * count
        width = layer.qkv.shape[1] // (heads + 2 * kv_heads)
        self.rows = torch.arange(rows, device=layer.qkv.device)[:, None]
        self.forms = [choose(many, matrix) for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self.qkv = layer.qkv.new_empty(many, layer.qkv.shape[1])
        each = self.qkv.view(rows, count, heads + 2 * kv_heads, width)
        self.qk = each[:, :, : heads + kv_heads]
        self.kv = each[:, :, heads:].view(rows, count, 2, kv_heads, width)
        self.q = each[:, :, :heads].transpose(1, 2)  # [B, H, N, D]
        self.grouped = grouped and count == 1
        if self.grouped:  # a group's heads as so many queries of one head
            self.q = each[:, 0, :heads].view(rows, kv_heads, -1, width)
        self.gate_up = layer.gate_up.new_empty(many, layer.gate_up.shape[1])
        self.gate, self.up = self.gate_up.chunk(2, -1)


@dataclass(eq=False)
class LeanDecoder:
    """The embedding, the layers and the last norm, on one device.

    embed_tokens: the model's own module: token ids → ``[..., d]``, a new tensor.
    embed_factor: what is multiplied with that.
    rotary: (kind of table, positions ``[1, T]``) → cos and sin ``[1, T, D]``, by the model's own module.
    context: positions that the model was made for.
    """

    embed_tokens: Callable[[Tensor], Tensor]
    embed_factor: float
    rotary: Callable[[str, Tensor], tuple[Tensor, Tensor]]
    layers: list[Layer]
    norm: RMSNorm
    context: int
    device: torch.device

    def tables(self, positions: int) -> dict[str, Tensor]:
        """Rotary tables for so many positions: ``[positions, 2 · D]``, cos and then sin, whose first half is negative
        since it meets the second half of a head."""
        made: dict[str, Tensor] = {}
        place = torch.arange(min(positions, self.context), device=self.device)[None]
        for kind in {layer.rope for layer in self.layers}:
            cos, sin = self.rotary(kind, place)
            half = sin.shape[-1] // 2
            made[kind] = torch.cat((cos, -sin[..., :half], sin[..., half:]), -1)[0]
        return made

    def buffers(self, rows: int, count: int, grouped: bool = False) -> list[Buffers]:
        """For each layer; those of one shape share them.

        Args:
            grouped: for attention by ``biases``, with one node a row.
        """
        made: dict[tuple[int, ...], Buffers] = {}
        found: list[Buffers] = []
        with torch.inference_mode(False), torch.no_grad():  # usable in and out of it
            for layer in self.layers:
                shape = (layer.heads, layer.kv_heads, *layer.qkv.shape, *layer.gate_up.shape)
                if shape not in made:
                    made[shape] = Buffers(layer, rows, count, grouped)
                found.append(made[shape])
        return found

    def embed(self, tokens: Tensor) -> Tensor:
        """``[B, N]`` → ``[B, N, d]``."""
        x = self.embed_tokens(tokens)
        return x if self.embed_factor == 1.0 else x * self.embed_factor

    def turns(self, positions: Tensor, tables: Mapping[str, Tensor]) -> dict[str, Sequence[Tensor]]:
        """Cos and sin ``[B, N, 1, D]`` by table."""
        shape = (*positions.shape, 2, 1, -1)
        return {kind: F.embedding(positions, table).view(shape).unbind(2) for kind, table in tables.items()}

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, views: Sequence[tuple[Tensor, Tensor, Tensor]],
        tables: Mapping[str, Tensor], *, biases: Mapping[int, Tensor | None] | None = None,
        tree_keys: TreeKeys | None = None, captures: Sequence[int] = (),
        buffers: Sequence[Buffers] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """One forward pass.

        Args:
            tokens, positions: ``[B, N]`` int64.
            slots: ``[B or 1, N]`` int64, where keys and values are written.
            views: of each layer's keys and values: both together ``[B, slots, 2, G, D]``, where the new ones are
                written; the keys, and the values, of the slots that are looked at ``[B, G, S, D]``.
            tables: from :meth:`tables`.
            biases, tree_keys: as the engine's ``Runner.forward`` takes them; one of them.
            captures: numbers of layers.
            buffers: from :meth:`buffers` for this B and N; made anew if left out.

        Returns:
            Hidden states ``[B, N, d]`` after the final norm, and those that enter each captured layer.
        """
        rows, count = tokens.shape
        buffers = buffers or self.buffers(rows, count, tree_keys is None)
        x = self.embed(tokens).flatten(0, 1)  # [M, d], written over from here on
        turns = self.turns(positions, tables)
        spots = (buffers[0].rows, slots)
        captured: dict[int, Tensor] = {}
        for number, (layer, its, view) in enumerate(zip(self.layers, buffers, views, strict=True)):
            if number in captures:
                captured[number] = x.view(rows, count, -1).clone()
            run_layer(layer, its, x, spots, view, turns[layer.rope], biases, tree_keys)
        return self.norm(x).view(rows, count, -1), [captured[number] for number in captures]


def run_layer(
    layer: Layer, buffers: Buffers, x: Tensor, spots: tuple[Tensor, Tensor], view: tuple[Tensor, Tensor, Tensor],
    turns: Sequence[Tensor], biases: Mapping[int, Tensor | None] | None, tree_keys: TreeKeys | None,
) -> None:  # fmt: skip
    """One layer, on ``x [M, d]`` in place. ``spots``: rows and slots that are written; ``turns``: cos and sin."""
    both, keys, values = view
    qk, q = buffers.qk, buffers.q
    qkv_form, out_form, gate_up_form, down_form = buffers.forms
    product(qkv_form, layer.before_attention(x), layer.qkv, layer.qkv_bias, buffers.qkv)
    cos, sin = turns  # [B, N, 1, D]
    if layer.qk_norm is not None:
        qk.copy_(layer.qk_norm(qk))
    other = qk.roll(qk.shape[-1] // 2, -1)
    qk.mul_(cos).addcmul_(other, sin)
    both.index_put_(spots, buffers.kv)
    if tree_keys is not None:
        lengths, ancestors, depth, key_depth = tree_keys
        out = tree_attention_cached(
            q, keys, values, lengths, ancestors, key_depth.shape[1], layer.scale, depth, key_depth, layer.window,
            layer.softcap,
        )  # fmt: skip
    else:
        assert biases is not None
        out = tree_attention(q, keys, values, biases[layer.window], layer.scale, layer.softcap)
    out = (out if buffers.grouped else out.transpose(1, 2)).reshape(len(x), -1)
    _add(x, out_form, out, layer.out, layer.out_bias, layer.after_attention, layer.factor)
    product(gate_up_form, layer.before_mlp(x), layer.gate_up, layer.gate_up_bias, buffers.gate_up)
    y = layer.act(buffers.gate).mul_(buffers.up)
    _add(x, down_form, y, layer.down, layer.down_bias, layer.after_mlp, layer.factor)


def _add(
    x: Tensor, form: str, y: Tensor, matrix: Tensor, bias: Tensor | None, norm: RMSNorm | None, factor: float
) -> None:
    """``x += factor · norm(y matrix + bias)`` in place."""
    if bias is None and norm is None:
        add_product(form, x, y, matrix, factor)
    else:
        y = product(form, y, matrix, bias)
        x.add_(y if norm is None else norm(y), alpha=factor)
