"""A decoder of few operations for families with Llama's or GPT-NeoX's architecture; :mod:`draftsmith.models.lean_from`
builds it.

    x ← x + out(attention(rotate(q), rotate(k), v)),   q, k, v = qkv(norm(x))
    x ← x + down(act(gate) · up),                      gate, up = gate_up(norm(x))

GPT-NeoX (arXiv 2204.06745 §2.1) has LayerNorm, rotates a part of each head, and has no gate: down(act(up)). Its two
branches may be parallel: both then read the x before the layer.

On a GPU everything between two products is one kernel, except for attention; or the products of few rows do it
themselves, in forms that allow it: :func:`run_fused_layer`. On a CPU steps run all layers in one call
(``NativeLayers``). Where no kernels run, and for prompts on a CPU, layers are PyTorch
operations: :func:`run_layer`.

Shape letters: B rows, N nodes, M = B · N, H query heads, G key/value heads, D head width, S slots, d hidden width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.add_norm import add_norm
from draftsmith.kernels.few_rows import candidates, few_rows_product
from draftsmith.kernels.gated import ACTS, act_name, gated
from draftsmith.kernels.linear import choose, folding_form, partial_buffer, partial_product, product
from draftsmith.kernels.rotate_write import rotate_write
from draftsmith.kernels.step_attention import attend_tree
from draftsmith.kernels.tree_attention import SegmentBias, Segments, TreeKeys, tree_attention

if TYPE_CHECKING:  # it needs this module
    from draftsmith.models.lean_native import NativeLayers

# By window, the additive mask of a pass; None where every slot is visible; or the parts of a pass of prompts.
Biases = Mapping[int, Tensor | Sequence[SegmentBias] | None]
# Called with a layer's queries ``[B, H, N, D]``, its scale, window and soft cap before its attention.
Observer = Callable[[Tensor, float, int, float | None], None]
NO_KERNELS = "there are no kernels"  # why layers are not fused, on a CPU without a compiler


class RMSNorm:
    """RMSNorm: x / √(mean(x²) + eps) · weight.

    Args:
        weight: ``[d]``, or ``[heads, D]`` if each head has its own; float32 if the model multiplies with it in float32.

    kernel_weight: the weight as kernels read it, in float32 on a CPU.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.width = weight, eps, weight.shape[-1]
        self.kernel_weight = weight.float().contiguous() if weight.is_cpu else weight
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


class LayerNorm:
    """LayerNorm: (x − mean(x)) / √(var(x) + eps) · weight + bias, weight and bias ``[d]`` (arXiv 1607.06450).

    kernel_weight, kernel_bias: both as kernels read them, in float32 on a CPU.
    """

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps
        self.kernel_weight, self.kernel_bias = (
            each.float().contiguous() if each.is_cpu else each for each in (weight, bias)
        )

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm
WeightAndEps = tuple[Tensor, float]  # of an RMSNorm


@dataclass(frozen=True)
class Layer:
    """The matrices of a layer, ``[inputs, outputs]`` each, and the settings of its attention.

    gate_up: ``[d, 2F]``, the gate first; without a gate ``[d, F]``.
    parallel: the MLP reads the x before attention's branch is added.
    interleaved: the outputs of ``qkv`` are q, k and v of the first head, then those of the second, and so on; else q of
        all heads, then k, then v.
    rotated: the number of dimensions of each head, from the first one on, that are rotated; 0: all.
    """

    heads: int
    kv_heads: int
    scale: float
    window: int
    softcap: float | None
    rope: str  # which of the rotary tables
    before_attention: Callable[[Tensor], Tensor]  # input of q, k and v from the residual: a norm, in a causal LM
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: RMSNorm | None
    out: Tensor
    out_bias: Tensor | None
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: Tensor
    gate_up_bias: Tensor | None
    act: Callable[[Tensor], Tensor]
    down: Tensor
    down_bias: Tensor | None
    after_mlp: Norm | None
    factor: float  # on each residual branch (Granite)
    parallel: bool = False
    interleaved: bool = False
    rotated: int = 0

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.gate_up.shape[1] != self.down.shape[0]


class Buffers:
    """The buffers of layers of one shape for a forward pass of B rows of N nodes, and views of them. Made once if all
    steps have the same shape."""

    def __init__(self, layer: Layer, rows: int, count: int, grouped: bool) -> None:
        heads, kv_heads, many = layer.heads, layer.kv_heads, rows * count
        width = layer.qkv.shape[1] // (heads + 2 * kv_heads)
        self.rows = torch.arange(rows, device=layer.qkv.device)[:, None]
        self.qkv = layer.qkv.new_empty(many, layer.qkv.shape[1])
        if layer.interleaved:  # as many key/value heads as query heads
            each = self.qkv.view(rows, count, heads, 3, width).transpose(2, 3)
            q, self.kv = each[:, :, 0], each[:, :, 1:]
            self.qk = each[:, :, :2].permute(2, 0, 1, 3, 4)  # [2, B, N, H, D]
        else:
            each = self.qkv.view(rows, count, heads + 2 * kv_heads, width)
            q, self.kv = each[:, :, :heads], each[:, :, heads:].view(rows, count, 2, kv_heads, width)
            self.qk = each[:, :, : heads + kv_heads]
        self.rotated = self.qk[..., : layer.rotated or width]
        self.q = q.transpose(1, 2)  # [B, H, N, D]
        self.grouped = grouped and count == 1
        if self.grouped:  # the heads of a group as queries of one head
            self.q = q[:, 0].unflatten(1, (kv_heads, -1))
        self.gate_up = layer.gate_up.new_empty(many, layer.gate_up.shape[1])
        self.gate, self.up = self.gate_up.chunk(2, -1) if layer.gated else (self.gate_up, None)


class FusedBuffers:
    """The buffers of fused layers of one shape for a forward pass of B rows of N nodes, and the forms of their
    products: measured ones if steps have this shape."""

    def __init__(self, layer: Layer, rows: int, count: int, step: bool, forms: Sequence[str] | None = None) -> None:
        many, new = rows * count, layer.qkv.new_empty
        matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
        # Each row count is measured for itself: not the many of prompts.
        self.forms = forms or [choose(many, matrix, partial=True) if step else "blas" for matrix in matrices]
        # Partial sums [S, M, outputs] of each product.
        self.qkv, self.out, self.gate_up, self.down = (
            partial_buffer(form, many, matrix) for form, matrix in zip(self.forms, matrices, strict=True)
        )
        self.q = new(rows, count, layer.heads, layer.out.shape[0] // layer.heads)
        self.mlp = new(many, layer.down.shape[0])


def folding_forms(layer: Layer, rows: int) -> list[str]:
    """For each of a layer's products a form of one part, for few rows: all that can be is then done by the products."""
    names: list[str] = []
    for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
        inputs, outputs = matrix.shape
        forms = candidates(rows, inputs, outputs, matrix.dtype, 1) if matrix.stride(0) == 1 else []
        names += [next((form.name for form in forms if form.parts == 1), "blas")]
    return names


def can_fuse(layer: Layer) -> bool:
    """Whether :func:`run_fused_layer` can run a layer: kernels know its norms, its MLP and its attention, and its
    branches are not parallel."""
    like_llama = layer.gated and not (layer.parallel or layer.interleaved or layer.rotated)
    known = act_name(layer.act) in ACTS and isinstance(layer.before_mlp, RMSNorm)
    return known and like_llama and can_run_native(layer)


def can_run_native(layer: Layer) -> bool:
    """Whether ``NativeLayers`` can run a layer, on a CPU: the same, but for the exact GELU too, and with all that
    GPT-NeoX's layers have."""
    norms = (layer.after_attention, layer.before_mlp, layer.after_mlp)
    known = layer.qkv.dtype in (torch.float32, torch.float16, torch.bfloat16) and act_name(layer.act) is not None
    narrow = layer.out.shape[0] // layer.heads <= 256
    of_branches = not any(isinstance(norm, LayerNorm) for norm in (layer.after_attention, layer.after_mlp))
    return known and narrow and of_branches and all(norm is None or norm.weight.dim() == 1 for norm in norms)


@dataclass(eq=False)
class LeanDecoder:
    """The embedding, the layers and the final norm, on one device.

    embed_tokens: the model's own module: token ids → ``[..., d]``, a new tensor.
    embed_factor: factor on the embeddings.
    rotary: the model's own module: (kind of table, positions ``[1, T]``) → cos and sin ``[1, T, D]``; where only a part
        of each head is rotated, D is the part's width, here and in what comes of it.
    context: number of positions that the model was made for.
    not_fused: the reason why layers are not fused where kernels run; empty if they are.
    native: the layers as steps run them on a CPU.
    rows_differ: the reason why the bits of a row of a step may depend on other rows; empty if they do not.
    """

    embed_tokens: Callable[[Tensor], Tensor]
    embed_factor: float
    rotary: Callable[[str, Tensor], tuple[Tensor, Tensor]]
    layers: list[Layer]
    norm: Norm
    context: int
    device: torch.device
    not_fused: str = NO_KERNELS
    native: "NativeLayers | None" = None
    rows_differ: str = NO_KERNELS

    def tables(self, positions: int, first: int = 0) -> dict[str, Tensor]:
        """Rotary tables of ``positions`` positions from ``first`` on, up to the context, ``[positions, 2 · D]``: cos
        and then sin, with the first half of sin negated, since it multiplies the second half of a head."""
        tables: dict[str, Tensor] = {}
        place = torch.arange(first, min(first + positions, self.context), device=self.device)[None]
        for kind in {layer.rope for layer in self.layers}:
            cos, sin = self.rotary(kind, place)
            half = sin.shape[-1] // 2
            tables[kind] = torch.cat((cos, -sin[..., :half], sin[..., half:]), -1)[0]
        return tables

    def buffers(self, rows: int, count: int, biased: bool, step: bool = False) -> Sequence[Buffers | FusedBuffers]:
        """The buffers of each layer; layers of one shape share theirs. None are needed where :attr:`native` runs.
        ``biased``: for attention by ``biases``; else by ``tree_keys``, with fused layers if they can be.
        ``step``: many forward passes will have this shape."""
        if self._runs_native(biased):
            return []
        fused = not (biased or self.not_fused)
        by_shape: dict[tuple[int, ...], Buffers | FusedBuffers] = {}
        by_layer: list[Buffers | FusedBuffers] = []
        with torch.inference_mode(False), torch.no_grad():  # usable inside and outside of inference mode
            for layer in self.layers:
                shape = (layer.heads, layer.kv_heads, *layer.qkv.shape, *layer.gate_up.shape)
                if shape not in by_shape:
                    by_shape[shape] = (
                        FusedBuffers(layer, rows, count, step) if fused else Buffers(layer, rows, count, biased)
                    )
                by_layer.append(by_shape[shape])
        return by_layer

    def _runs_native(self, biased: bool) -> bool:
        return self.native is not None and not biased

    def embed(self, tokens: Tensor) -> Tensor:
        """The scaled embeddings of tokens: ``[B, N]`` → ``[B, N, d]``."""
        x = self.embed_tokens(tokens)
        return x if self.embed_factor == 1.0 else x * self.embed_factor

    def rotations(self, positions: Tensor, tables: Mapping[str, Tensor]) -> dict[str, Sequence[Tensor]]:
        """Cos and sin ``[B, N, 1, D]`` at the positions, by kind of table."""
        shape = (*positions.shape, 2, 1, -1)
        return {kind: F.embedding(positions, table).view(shape).unbind(2) for kind, table in tables.items()}

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        views: Sequence[tuple[Tensor, Tensor, Tensor]],
        tables: Mapping[str, Tensor],
        *,
        biases: Biases | None = None,
        tree_keys: TreeKeys | Segments | None = None,
        rows: Tensor | None = None,
        captures: Sequence[int] = (),
        buffers: Sequence[Buffers | FusedBuffers] | None = None,
        observer: Observer | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One forward pass.

        Args:
            tokens, positions: ``[B, N]`` int64.
            slots: ``[B or 1, N]`` int64, where keys and values are written.
            rows: ``[1, N]`` int64, the row of the cache of each token of a pass of prompts, in which B is 1; in other
                passes each row has its own.
            views: of each layer's cache: keys and values together ``[B, slots, 2, G, D]``, where the new ones are
                written; the keys, and the values, of the slots attended to ``[B, G, S, D]``.
            tables: from :meth:`tables`.
            biases, tree_keys: as the engine's ``Runner.forward`` takes them; exactly one of them.
            captures: numbers of the layers whose inputs are returned.
            buffers: from :meth:`buffers` for this B and N; new ones if left out.
            observer: called in each layer, once its keys and values are written; needs ``biases``.

        Returns:
            Hidden states ``[B, N, d]`` after the final norm, and the input of each captured layer.
        """
        batch, count = tokens.shape
        x = self.embed(tokens).flatten(0, 1)  # [M, d], updated in place
        if self._runs_native(tree_keys is None):
            assert self.native is not None and isinstance(tree_keys, TreeKeys)
            hidden, inputs = self.native.run(x, positions, slots, views, tables, tree_keys, captures=captures)
            return hidden.view(batch, count, -1), [each.view(batch, count, -1) for each in inputs]
        buffers = buffers or self.buffers(batch, count, tree_keys is None)
        normed, written = x, (slots, slots)
        rotations: Mapping[str, Sequence[Tensor]] = {}
        is_normed = False  # whether fused layers have written the norm of x after them
        if isinstance(buffers[0], FusedBuffers):
            normed = torch.empty_like(x)
        else:
            rotations, written = self.rotations(positions, tables), (rows, slots)
            if rows is None:
                written = (buffers[0].rows, slots)
        captured: dict[int, Tensor] = {}
        for number, (layer, own_buffers, view) in enumerate(zip(self.layers, buffers, views, strict=True)):
            if number in captures:
                captured[number] = x.view(batch, count, -1).clone()
            if isinstance(own_buffers, FusedBuffers):
                assert tree_keys is not None
                last = number + 1 == len(self.layers)
                after = weight_and_eps(self.norm if last else self.layers[number + 1].before_attention)
                is_normed = run_fused_layer(
                    layer,
                    own_buffers,
                    x,
                    normed if is_normed else None,
                    normed,
                    tables[layer.rope],
                    positions,
                    slots if rows is None else _slots_of_all(slots, rows, view[0]),
                    view,
                    tree_keys,
                    after,
                    last,
                )
            else:
                run_layer(layer, own_buffers, x, written, view, rotations[layer.rope], biases, tree_keys, observer)
        hidden = normed if isinstance(buffers[0], FusedBuffers) else self.norm(x)
        return hidden.view(batch, count, -1), [captured[number] for number in captures]


def _slots_of_all(slots: Tensor, rows: Tensor, both: Tensor) -> Tensor:
    """The slots of tokens of several rows, counted from the first row's first slot, as if all were in that row, for
    a kernel, which checks none."""
    return slots + rows * (both.stride(0) // both.stride(1))


def run_layer(
    layer: Layer,
    buffers: Buffers,
    x: Tensor,
    written: tuple[Tensor, Tensor],
    view: tuple[Tensor, Tensor, Tensor],
    rotation: Sequence[Tensor],
    biases: Biases | None,
    tree_keys: TreeKeys | Segments | None,
    observer: Observer | None = None,
) -> None:
    """Run a layer on ``x [M, d]`` in place. ``written``: rows and slots of the new keys; ``rotation``: cos and sin."""
    both, keys, values = view
    qk, rotated, q = buffers.qk, buffers.rotated, buffers.q
    product("blas", layer.before_attention(x), layer.qkv, layer.qkv_bias, buffers.qkv)
    cos, sin = rotation  # [B, N, 1, D]
    if layer.qk_norm is not None:
        qk.copy_(layer.qk_norm(qk))
    other = rotated.roll(rotated.shape[-1] // 2, -1)
    rotated.mul_(cos).addcmul_(other, sin)
    both.index_put_(written, buffers.kv)
    if observer is not None:
        observer(q, layer.scale, layer.window, layer.softcap)
    if tree_keys is not None:
        out = attend_tree(q, keys, values, tree_keys, layer.scale, layer.window, layer.softcap)
    else:
        assert biases is not None
        out = tree_attention(q, keys, values, biases[layer.window], layer.scale, layer.softcap)
    out = (out if buffers.grouped else out.transpose(1, 2)).reshape(len(x), -1)
    normed = layer.before_mlp(x) if layer.parallel else None
    _add(x, out, layer.out, layer.out_bias, layer.after_attention, layer.factor)
    normed = layer.before_mlp(x) if normed is None else normed
    product("blas", normed, layer.gate_up, layer.gate_up_bias, buffers.gate_up)
    y = layer.act(buffers.gate)
    if buffers.up is not None:
        y.mul_(buffers.up)
    _add(x, y, layer.down, layer.down_bias, layer.after_mlp, layer.factor)


def run_fused_layer(
    layer: Layer,
    buffers: FusedBuffers,
    x: Tensor,
    inputs: Tensor | None,
    normed: Tensor,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    view: tuple[Tensor, Tensor, Tensor],
    tree_keys: TreeKeys | Segments,
    after: WeightAndEps,
    ends_normed: bool = True,
) -> bool:
    """Run a layer by kernels on ``x [M, d]`` in place.

    A product whose form allows it (:func:`~draftsmith.kernels.linear.folding_form`) norms its input itself, gates its
    outputs, or adds them to x; a kernel of its own does what the others leave.

    Args:
        inputs: what its ``before_attention`` makes of x; may be ``normed``. If it is a norm, None: computed here.
        normed: ``[M, d]``, written to.
        table: rotary table of ``layer.rope``, ``[positions, 2 · D]``.
        positions, slots, view, tree_keys: as :meth:`LeanDecoder.forward` takes them.
        after: weight and eps of the norm of x after the layer.
        ends_normed: the result of that norm is wanted in ``normed``.

    Returns:
        Whether ``normed`` holds it.
    """
    both, keys, values = view
    norm, (qkv_form, out_form, gate_up_form, down_form) = layer.qk_norm, buffers.forms

    def normed_product(form: str, norm: WeightAndEps, is_normed: bool, matrix: Tensor, out: Tensor) -> None:
        """The product of the norm of x, in parts. ``is_normed``: whether ``normed`` holds this norm."""
        folding = folding_form(form)
        if not is_normed and folding is not None:
            few_rows_product(x, matrix, folding, out, norm=norm)
            return
        if not is_normed:
            add_norm(x, None, *norm, normed)
        partial_product(form, normed, matrix, out)

    def add_product(
        form: str, y: Tensor, matrix: Tensor, parts: Tensor, bias: Tensor | None, own: Norm | None, then: WeightAndEps
    ) -> bool:
        """``x += factor · own(y matrix + bias)`` in place; returns whether ``normed`` holds the norm ``then`` of x."""
        folding = folding_form(form)
        if folding is not None and own is None:
            few_rows_product(y, matrix, folding, x[None], bias=bias, add=True, factor=layer.factor)
            return False
        weight, eps = (None, None) if own is None else (own.kernel_weight, own.eps)
        branch = partial_product(form, y, matrix, parts)
        add_norm(x, branch, *then, normed, bias=bias, after=weight, after_eps=eps, factor=layer.factor)
        return True

    qkv = buffers.qkv
    if inputs is None:
        normed_product(qkv_form, weight_and_eps(layer.before_attention), False, layer.qkv, qkv)
    else:
        partial_product(qkv_form, inputs, layer.qkv, qkv)
    norm_weight, norm_eps = (None, 0.0) if norm is None else (norm.kernel_weight, norm.eps)
    rotate_write(qkv, table, positions, slots, both, buffers.q, bias=layer.qkv_bias, norm=norm_weight, eps=norm_eps)
    q = buffers.q.transpose(1, 2)  # [B, H, N, D]
    out = attend_tree(q, keys, values, tree_keys, layer.scale, layer.window, layer.softcap)
    out = out.transpose(1, 2).reshape(len(x), -1)
    before_mlp = weight_and_eps(layer.before_mlp)
    is_normed = add_product(out_form, out, layer.out, buffers.out, layer.out_bias, layer.after_attention, before_mlp)
    act, folding = act_name(layer.act) or "", folding_form(gate_up_form)
    gate_up, bias = buffers.gate_up, layer.gate_up_bias
    if folding is None:
        normed_product(gate_up_form, before_mlp, is_normed, layer.gate_up, gate_up)
        gated(gate_up, buffers.mlp, act, bias=bias)
    else:
        own, fold = (normed, None) if is_normed else (x, before_mlp)
        few_rows_product(own, layer.gate_up, folding, buffers.mlp[None], norm=fold, bias=bias, act=act)
    is_normed = add_product(down_form, buffers.mlp, layer.down, buffers.down, layer.down_bias, layer.after_mlp, after)
    if ends_normed and not is_normed:
        add_norm(x, None, *after, normed)
    return ends_normed or is_normed


def weight_and_eps(norm: Callable[[Tensor], Tensor]) -> WeightAndEps:
    """A norm's weight as kernels read it, and its eps."""
    assert isinstance(norm, RMSNorm)
    return norm.kernel_weight, norm.eps


def _add(x: Tensor, y: Tensor, matrix: Tensor, bias: Tensor | None, norm: Norm | None, factor: float) -> None:
    """``x += factor · norm(y matrix + bias)`` in place."""
    if bias is None and norm is None:
        x.addmm_(y, matrix, alpha=factor)
    else:
        y = product("blas", y, matrix, bias)
        x.add_(y if norm is None else norm(y), alpha=factor)
