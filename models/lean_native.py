"""The lean decoder's layers on a CPU, one after the other in one call: kernels/cpu.cpp."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.kernels import cpu
from draftsmith.kernels.gated import CPU_ACTS, act_name
from draftsmith.kernels.tree_attention import TreeKeys
from draftsmith.models.lean import Layer, LayerNorm, Norm


class NativeLayers:
    """Layers that run one after the other in one call, on a CPU: kernels/cpu.cpp.
    ``layers``: of :func:`can_run_native`, their matrices transposed views of contiguous ones.
    ``norm``: after the last of them; None: there is none."""

    def __init__(self, layers: Sequence[Layer], norm: Norm | None) -> None:
        self.layers, self.norm = layers, norm or layers[-1].before_mlp
        self.parts = (cpu.LayerArguments * len(layers))(*map(_native_layer, layers))
        self.dtype = layers[0].qkv.dtype
        self.function = cpu.function("decoder_layers", self.dtype)

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        views: Sequence[tuple[Tensor, Tensor, Tensor]],
        tables: Mapping[str, Tensor],
        tree_keys: TreeKeys,
        *,
        inputs: Tensor | None = None,
        captures: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers on ``x [M, d]`` in place.
        ``positions``, ``slots``, ``views``, ``tables``, ``tree_keys``, ``captures``: as :meth:`LeanDecoder.forward`
        takes them.
        ``inputs``: ``[M, K]``, what q, k and v of the first layer are products of; left out: the norm of x.
        Returns the norm ``[M, d]`` of x after the layers, and the input ``[M, d]`` of each captured layer."""
        lengths, ancestors, depth, key_depth = (each.contiguous() for each in tree_keys[:4])
        captured = {number: torch.empty_like(x) for number in captures}
        for number, (part, layer, (both, _, _)) in enumerate(zip(self.parts, self.layers, views, strict=True)):
            table = tables[layer.rope]
            part.table, part.table_row = table.data_ptr(), table.stride(0)
            part.cache = both.data_ptr()
            part.cache_batch, part.cache_slot, part.cache_kind, part.cache_head = both.stride()[:4]
            part.captured = cpu.address(captured.get(number))
        normed, width = torch.empty_like(x), 0 if inputs is None else inputs.shape[1]
        counts = (*positions.shape, key_depth.shape[1], x.shape[1], width, len(self.parts))
        steps = (*positions.stride(), 0 if len(slots) == 1 else slots.stride(0), slots.stride(1))
        of_tree = (*ancestors.stride()[:2], depth.stride(0), key_depth.stride(0))
        sizes = cpu.PassArguments(*counts, *steps, *of_tree, self.norm.eps)
        ends = (x.data_ptr(), cpu.address(inputs), normed.data_ptr())
        norm = (self.norm.kernel_weight.data_ptr(), _norm_bias(self.norm))
        places = (each.data_ptr() for each in (positions, slots, lengths, ancestors, depth, key_depth))
        self.function(self.parts, sizes, *ends, *norm, *places)
        return normed, [captured[number] for number in captures]


def _native_layer(layer: Layer) -> cpu.LayerArguments:
    """A layer as kernels/cpu.cpp reads it; cache and table are set in each pass."""

    def norm(one: object) -> tuple[int | None, float]:
        return (one.kernel_weight.data_ptr(), one.eps) if isinstance(one, Norm) else (None, 0.0)

    matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
    biases = (layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias)
    assert all(matrix.t().is_contiguous() for matrix in matrices)
    pairs = zip(matrices, biases, strict=True)
    norms = (layer.before_attention, layer.qk_norm, layer.after_attention, layer.before_mlp, layer.after_mlp)
    weights, eps = zip(*map(norm, norms), strict=True)
    width = layer.out.shape[0] // layer.heads
    addresses = [cpu.address(one) for pair in pairs for one in pair]
    norm_biases = (_norm_bias(layer.before_attention), _norm_bias(layer.before_mlp))
    sizes = (layer.scale, layer.softcap or 0.0, layer.factor, layer.heads, layer.kv_heads, width, layer.down.shape[0])
    kinds = (layer.window, CPU_ACTS.index(act_name(layer.act) or ""), layer.gated, layer.parallel, layer.interleaved)
    return cpu.LayerArguments(*addresses, *weights, *norm_biases, *eps, *sizes, *kinds, layer.rotated or width)


def _norm_bias(norm: object) -> int | None:
    """The address of a LayerNorm's bias; None for another norm."""
    return norm.kernel_bias.data_ptr() if isinstance(norm, LayerNorm) else None
