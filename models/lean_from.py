"""Making a :class:`~draftsmith.models.lean.LeanDecoder` from a loaded ``transformers`` model, which stays usable.

The matrices of q, k and v are packed into one, and those of gate and up; the model's parameters become views of these,
so no weight is held twice and the model itself works as before. The structure of layers (norms, biases, multipliers) is
read from the model's modules. The arguments of its attention (scale, window, soft cap) are recorded in a run of the
model, and each lean layer must reproduce the queries, keys, values and output of the model's own layer from the same
input, at the first positions and at the last ones of the context; so must each fused layer its output, where kernels
run.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from inspect import signature
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from draftsmith.kernels import cpu
from draftsmith.kernels.backend import same_bits, why_not_triton
from draftsmith.kernels.tree_attention import TreeKeys, causal_bias, runs_kernel, tree_attention
from draftsmith.models.lean import (
    Buffers,
    FusedBuffers,
    Layer,
    LayerNorm,
    LeanDecoder,
    Norm,
    RMSNorm,
    can_fuse,
    can_run_native,
    folding_forms,
    run_fused_layer,
    run_layer,
    weight_and_eps,
)
from draftsmith.models.lean_native import NativeLayers
from draftsmith.models.target import NO_CONTEXT, Target, attention_window

_RECORD = "draftsmith_record"
_TRIAL = 24  # tokens of the comparison with the model itself, at most
# Of each attention: scale, window and soft cap; queries, keys and values as it has them, [1, heads, T, D].
_Record = list[tuple[tuple[float, int, float | None], Tensor, Tensor, Tensor]]


class NotLean(Exception):
    """The reason why a target is run by its own modules."""


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    record: list[Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention that records its arguments; ``transformers`` calls it in every layer of the trial run."""
    if record is None:
        raise NotLean("its layers do not pass arguments on to attention")
    if kwargs.get("s_aux") is not None:
        raise NotLean("its attention has learned sinks")
    if attention_mask is not None:
        raise NotLean("its attention has a mask of its own")
    scale, window = query.shape[-1] ** -0.5 if scaling is None else scaling, attention_window(module, kwargs)
    record.append(((scale, window, softcap), query.clone(), key.clone(), value.clone()))
    bias = causal_bias(0, query.shape[2], window, query.dtype, query.device)
    return tree_attention(query, key, value, bias, scale, softcap).transpose(1, 2), None


AttentionInterface.register(_RECORD, _record)
AttentionMaskInterface.register(_RECORD, lambda *args, **kwargs: None)


def lean_decoder(target: Target) -> LeanDecoder | str:
    """The target's lean decoder, or the reason why there is none. Built at the first call, and again after modules or
    weights were replaced."""
    known = target.__dict__.get("_lean")
    if known is None or known[0] != _stamp(target.decoder):
        with torch.inference_mode(False), torch.no_grad():
            try:
                decoder: LeanDecoder | str = _make(target)
            except NotLean as reason:
                decoder = str(reason)
            except Exception as error:  # a model of another architecture may raise anything; its own modules run it
                decoder = f"it cannot be tried ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})"
        known = target.__dict__["_lean"] = (_stamp(target.decoder), decoder)
    return known[1]


_NONE = nn.Parameter(torch.empty(0), requires_grad=False)  # in place of the weights of a module that has none


def _stamp(decoder: nn.Module) -> list[Any]:
    """A value that changes when modules or their weights' memory are replaced, weights are written to, or hooks are
    added or removed."""
    return [
        (
            type(module),
            module.__dict__.get("forward"),
            _hooks(module),
            weight.data_ptr(),
            weight.requires_grad,
            _version(weight),
        )
        for module in decoder.modules()
        for weight in module._parameters.values() or [_NONE]
        if weight is not None
    ]


def _hooks(module: nn.Module) -> list[Any]:
    """A module's hooks, without those that transformers installs, which only record requested outputs."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]


def _version(weight: Tensor) -> int:
    """How often a weight was written to (norms keep copies)."""
    try:
        return weight._version
    except RuntimeError:  # created in inference mode, where writes are not counted
        return 0


def _make(target: Target) -> LeanDecoder:
    """Build the lean decoder of a target and compare it with the model."""
    decoder: Any = target.decoder
    if target.spread or any("_hf_hook" in module.__dict__ for module in decoder.modules()):
        raise NotLean("its layers are on several devices, or offloaded")
    if any(type(parameter) is not nn.Parameter or not parameter.numel() for parameter in decoder.parameters()):
        raise NotLean("its weights are quantised, or sharded among processes")
    if any(map(_hooks, decoder.modules())):
        raise NotLean("its modules have hooks")
    if any(parameter.requires_grad for parameter in decoder.parameters()):
        raise NotLean("its weights are being trained")
    embed_tokens, norm = _part(decoder, "embed_tokens", "embed_in"), _part(decoder, "norm", "final_layer_norm")
    rotary_emb, kinds = _part(decoder, "rotary_emb"), [""] * len(_part(decoder, "layers"))  # one rotary table for all
    if "layer_type" in signature(rotary_emb.forward).parameters:
        kinds = target.config.layer_types

    def rotary(kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        cos, sin = rotary_emb(like, positions, *([kind] if kind else []))
        half = cos.shape[-1] // 2
        if not torch.equal(cos[..., :half], cos[..., half:]):
            raise NotLean("its rotary embedding rotates pairs of neighbouring dimensions")
        if any(width < 2 * half for _, width in target.kv_shapes):
            raise NotLean("its rotary embedding is wider than a head")
        return cos, sin

    last_norm = _norm(norm, target)
    record, inputs, output = _trial(target, norm, 0)
    tokens = _trial_tokens(target)
    last = target.context - tokens.shape[1]  # what depends on the position may begin far behind the first ones
    late = _trial(target, norm, last)[:2] if last > 0 and target.context < NO_CONTEXT else None
    if not len(record) == len(decoder.layers) == len(inputs) - 1:
        raise NotLean("its layers do not each call attention once")
    place = torch.arange(1, device=target.device)[None]
    rotated = {kind: rotary(kind, place)[0].shape[-1] for kind in set(kinds)}
    facts = zip(decoder.layers, record, kinds, target.kv_shapes, strict=True)
    layers: list[Layer] = []
    for module, (settings, *_), rope, shape in facts:
        layers.append(_layer(module, settings, rope, rotated[rope], shape, target))
        _return_freed_memory()
    factor = float(getattr(decoder, "embedding_multiplier", 1.0))
    lean = LeanDecoder(embed_tokens, factor, rotary, layers, last_norm, target.context, target.device)
    _compare(lean.embed(tokens), inputs[0], "its embedding")
    _compare(last_norm(inputs[-1]), output, "its last norm")
    _compare_layers(lean, record, inputs, target, 0)
    if late:
        _compare_layers(lean, *late, target, last)
    if cpu.runs(inputs[0]) and why_not_triton(inputs[0]):
        _make_native(lean, inputs, target)
    elif runs_kernel(inputs[0], 0):
        lean.not_fused = _why_not_fused(lean, inputs, target)
        lean.rows_differ = "products take forms that depend on the number of rows"
        if same_bits():
            lean.rows_differ = lean.not_fused or _why_rows_differ(lean, inputs, target)
    return lean


def _compare_layers(lean: LeanDecoder, record: _Record, inputs: list[Tensor], target: Target, first: int) -> None:
    """Compare each lean layer with the model's own. ``record``, ``inputs``: from :func:`_trial` at the positions from
    ``first`` on."""
    count = inputs[0].shape[1]
    place = torch.arange(count, device=target.device)[None]
    rotations, written = lean.rotations(place, lean.tables(count, first)), (place.new_zeros(1, 1), place)
    where = f" at position {first}" if first else ""
    facts = zip(lean.layers, lean.buffers(1, count, biased=True), record, pairwise(inputs), strict=True)
    for number, (layer, buffers, (_, *own), (before, after)) in enumerate(facts):
        biases = {layer.window: causal_bias(0, count, layer.window, target.dtype, target.device)}
        x, wanted, view = before[0].clone(), after[0], _view(target, number, count)
        # Compared for themselves: in 16 bits a few large entries of x would hide other attention.
        queries: list[Tensor] = []
        assert isinstance(buffers, Buffers)
        run_layer(
            *(layer, buffers, x, written, view, rotations[layer.rope], biases, None),
            lambda q, *_: queries.append(q.clone()),  # noqa: B023
        )
        for name, got, want in zip(("query", "key", "value"), (queries[0], *view[1:]), own, strict=True):
            _compare(got.reshape(want.shape), want, f"the {name} tensor of its layer {number}{where}")
        _compare(x, wanted, f"its layer {number}{where}")
        _compare(layer.before_mlp(x), layer.before_mlp(wanted), f"the norm after its layer {number}{where}")


def _view(target: Target, layer: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """An empty cache of one row of ``count`` slots, as :meth:`LeanDecoder.forward` views it, for a layer."""
    kv_heads, width = target.kv_shapes[layer]
    pair = torch.zeros(2, 1, kv_heads, count, width, dtype=target.dtype, device=target.device)
    return pair.permute(1, 3, 0, 2, 4), pair[0], pair[1]


def _chain(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Places ``[1, T]``, ancestor bits ``[1, T, 1]`` and depths ``[1, T]`` of a chain: each token sees those before."""
    places = torch.arange(count, device=device)[None]
    return places, (2 << places[..., None]) - 1, places.int()


def _why_not_fused(lean: LeanDecoder, inputs: list[Tensor], target: Target) -> str:
    """Compare each fused layer with the model's own: the reason why layers are not fused, empty if they can be.
    ``inputs``: of each layer and of the last norm, ``[1, T, d]``."""
    if not all(isinstance(layer.before_attention, RMSNorm) and can_fuse(layer) for layer in lean.layers):
        return "the kernels do not know its norms, MLP, attention or branches"
    count = inputs[0].shape[1]
    try:
        for number, layer in enumerate(lean.layers):
            # Of the first layer also the forms in which products do what stands around them, of many rows and of one.
            trials = [(count, None), (count, folding_forms(layer, count)), (1, folding_forms(layer, 1))]
            for many, forms in trials if number == 0 else trials[:1]:
                buffers = FusedBuffers(layer, 1, many, False, forms)
                x, normed = _FusedLayer(lean, number, inputs[number], target).run(buffers, 0, many)
                wanted = inputs[number + 1][0, :many]
                _compare(x, wanted, f"its layer {number} by kernels")
                _compare(normed, layer.before_mlp(wanted), f"the norm after its layer {number} by kernels")
    except NotLean as reason:
        return str(reason)
    return ""


class _FusedLayer:
    """A layer by kernels, on an empty cache. ``inputs``: ``[1, T, d]``."""

    def __init__(self, lean: LeanDecoder, number: int, inputs: Tensor, target: Target) -> None:
        count = inputs.shape[1]
        self.layer, self.inputs, self.view = lean.layers[number], inputs, _view(target, number, count)
        self.table, self.chain = lean.tables(count)[self.layer.rope], _chain(count, target.device)

    def run(self, buffers: FusedBuffers, first: int, many: int, alike: bool = False) -> tuple[Tensor, Tensor]:
        """Its result for ``many`` tokens from ``first`` on, after those before, ``[many, d]``, and the norm of that.
        ``alike``: as in a step with ``DRAFTSMITH_SAME_BITS``."""
        own, (places, chain, depth) = slice(first, first + many), self.chain
        x, place, level = self.inputs[0, own].clone(), places[:, own], depth[:, :many]
        keys = TreeKeys(places.new_tensor([first]), chain[:, :many], level, level, None, alike)
        normed, after = torch.empty_like(x), weight_and_eps(self.layer.before_mlp)
        run_fused_layer(self.layer, buffers, x, None, normed, self.table, place, place, self.view, keys, after)
        return x, normed


def _why_rows_differ(lean: LeanDecoder, inputs: list[Tensor], target: Target) -> str:
    """Run a fused layer of each shape, and the LM head, on several rows and on rows alone: the reason why the bits of a
    row are not the same, empty if they are. ``inputs``: of each layer and of the last norm, ``[1, T, d]``."""
    count, shapes = inputs[0].shape[1], set[Any]()
    for number, layer in enumerate(lean.layers):
        shape = layer.qkv.shape, layer.gate_up.shape, layer.window
        if shape in shapes:
            continue
        shapes.add(shape)
        one, all_rows = (FusedBuffers(layer, 1, many, True) for many in (1, count))
        if "blas" in one.forms:
            return f"the kernels cannot multiply with the weights of its layer {number}"
        fused = _FusedLayer(lean, number, inputs[number], target)
        x, normed = fused.run(all_rows, 0, count, True)
        for row in range(0, count, 5):
            own, own_normed = fused.run(one, row, 1, True)
            if not (torch.equal(x[row], own[0]) and torch.equal(normed[row], own_normed[0])):
                return f"the bits of a row of its layer {number} depend on the other rows"
    return _why_logits_differ(inputs[-1][0], target)


def _why_logits_differ(hidden: Tensor, target: Target) -> str:
    """The reason why the bits of a row of the LM head are not the same for ``hidden [T, d]`` and for each row alone;
    empty if they are."""
    if torch.equal(target.logits(hidden), torch.cat([target.logits(row[None]) for row in hidden])):
        return ""
    return "the bits of a row of its LM head depend on the other rows"


def _make_native(lean: LeanDecoder, inputs: list[Tensor], target: Target) -> None:
    """Give the decoder its native layers, if each does what the model's own does. Also run one layer of each shape and
    the LM head on several rows and on each row alone: the bits of a row have to be the same.

    ``inputs``: of each layer and of the last norm, ``[1, T, d]``."""
    lean.not_fused = lean.rows_differ = "kernels/cpu.cpp does not know its norms, MLP or attention"
    if not all(isinstance(layer.before_attention, Norm) and can_run_native(layer) for layer in lean.layers):
        return
    count, shapes, reason = inputs[0].shape[1], set[Any](), ""
    tables, (places, chain, depth) = lean.tables(count), _chain(count, target.device)
    for number, layer in enumerate(lean.layers):
        views, native = [_view(target, number, count)], NativeLayers([layer], layer.before_mlp)

        def run(first: int, many: int) -> tuple[Tensor, Tensor]:
            own, x = slice(first, first + many), inputs[number][0, first : first + many].clone()  # noqa: B023
            keys = TreeKeys(places.new_tensor([first]), chain[:, :many], depth[:, :many], depth[:, :many])
            return x, native.run(x, places[:, own], places[:, own], views, tables, keys)[0]  # noqa: B023

        x, normed = run(0, count)
        try:
            _compare(x, inputs[number + 1][0], f"its layer {number} by kernels/cpu.cpp")
            _compare(normed, layer.before_mlp(inputs[number + 1][0]), f"the norm after its layer {number}")
        except NotLean as error:
            lean.not_fused = lean.rows_differ = str(error)
            return
        shape = layer.qkv.shape, layer.gate_up.shape, layer.window
        if shape not in shapes and not torch.equal(x, torch.cat([run(row, 1)[0] for row in range(count)])):
            reason = f"the bits of a row of its layer {number} depend on the other rows"
        shapes.add(shape)
    reason = reason or _why_logits_differ(inputs[-1][0], target)
    lean.native, lean.not_fused, lean.rows_differ = NativeLayers(lean.layers, lean.norm), "", reason


def _trial_tokens(target: Target) -> Tensor:
    """The input of the trial run: ``[1, T]`` ids."""
    return torch.arange(1, min(_TRIAL, target.context) + 1, device=target.device)[None] % target.vocab_size


def _trial(target: Target, norm: nn.Module, first: int) -> tuple[_Record, list[Tensor], Tensor]:
    """Run the model on a few tokens at the positions from ``first`` on: the record of each attention, the inputs of
    each layer and of the last norm, and the last norm's output."""
    decoder: Any = target.decoder
    record: _Record = []
    inputs: list[Tensor] = []

    def record_input(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"]).clone())

    handles = [m.register_forward_pre_hook(record_input, with_kwargs=True) for m in (*decoder.layers, norm)]
    try:
        with target.attention(_RECORD):
            tokens = _trial_tokens(target)
            place = torch.arange(first, first + tokens.shape[1], device=target.device)[None]
            out = decoder(input_ids=tokens, position_ids=place, use_cache=False, record=record)
    except ValueError as error:  # its attention cannot be replaced
        raise NotLean(str(error)) from None
    finally:
        for handle in handles:
            handle.remove()
    return record, inputs, out.last_hidden_state


def _compare(got: Tensor, want: Tensor, what: str) -> None:
    """Raise NotLean if two results differ by more than rounding."""
    difference, size = (got.float() - want.float()).norm(), want.float().norm()
    if not difference <= (1e-4 if want.dtype in (torch.float32, torch.float64) else 0.05) * size:
        raise NotLean(f"{what} differs from its own modules' by {difference / size:.1e}")


def _part(parent: Any, *names: str) -> Any:
    """The attribute of the first of these names that there is."""
    found = next((part for name in names if (part := getattr(parent, name, None)) is not None), None)
    if found is None:
        raise NotLean(f"a {type(parent).__name__} has no {names[0]}")
    return found


def _layer(
    module: Any,
    settings: tuple[float, int, float | None],
    rope: str,
    rotated: int,
    kv_shape: tuple[int, int],
    target: Target,
) -> Layer:
    """Read the modules of one layer and pack its weights. ``rotated``: dimensions of a head that are rotated."""
    attention, mlp = _part(module, "self_attn", "attention"), _part(module, "mlp")
    act = _part(mlp, "act_fn", "activation_fn", "act")
    others = {name: child for name, child in module.named_children() if child is not attention and child is not mlp}
    norms = {name: _norm(other, target) for name, other in others.items() if not isinstance(other, nn.Dropout)}
    before, after = norms.pop("input_layernorm", None), norms.pop("post_attention_layernorm", None)
    before_mlp, after_mlp = norms.pop("pre_feedforward_layernorm", None), norms.pop("post_feedforward_layernorm", None)
    if before_mlp is None:  # Llama's name for the norm before its MLP
        before_mlp, after = after, None
    if norms or before is None or before_mlp is None:
        raise NotLean(f"a {type(module).__name__} has other norms than Llama's or Gemma's")
    # Phi-3 and GPT-NeoX store q, k and v packed, GPT-NeoX head by head; it has no gate.
    qkv, qkv_bias = _linears(attention, target, ["qkv_proj"], ["query_key_value"], ["q_proj", "k_proj", "v_proj"])
    gate_up, gate_up_bias = _linears(mlp, target, ["gate_up_proj"], ["dense_h_to_4h"], ["gate_proj", "up_proj"])
    out, out_bias = _linears(attention, target, ["dense"], ["o_proj"])
    down, down_bias = _linears(mlp, target, ["dense_4h_to_h"], ["down_proj"])
    kv_heads, width = kv_shape
    heads, interleaved = out.shape[0] // width, hasattr(attention, "query_key_value")
    outputs = down.shape[0] * (1 if hasattr(mlp, "dense_h_to_4h") else 2)
    known = gate_up.shape[1] == outputs and (heads == kv_heads or not interleaved)
    if qkv.shape[1] != (heads + 2 * kv_heads) * width or not known:
        raise NotLean("its projections have other shapes than Llama's or GPT-NeoX's")
    qk_norm, rotated = _qk_norm(attention, heads, kv_heads, width, target), 0 if rotated == width else rotated
    of_attention = (before, qkv, qkv_bias, qk_norm, out, out_bias, after)
    of_mlp = (before_mlp, gate_up, gate_up_bias, act, down, down_bias, after_mlp)
    factor = float(getattr(module, "residual_multiplier", 1.0))
    parallel = bool(getattr(module, "use_parallel_residual", False))
    return Layer(heads, kv_heads, *settings, rope, *of_attention, *of_mlp, factor, parallel, interleaved, rotated)


def _norm(module: Any, target: Target) -> Norm:
    """A norm module as :class:`LayerNorm` if it has a bias, else as :class:`RMSNorm`: x / rms(x) · weight, or
    · (1 + weight); whichever gives the same result."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        raise NotLean(f"a {type(module).__name__} is no RMSNorm")
    weight, bias = weight.detach(), getattr(module, "bias", None)
    x = torch.linspace(-1, 2, weight.numel(), dtype=target.dtype, device=weight.device)[None]
    want = module(x).float()
    known = [RMSNorm(weight, eps), RMSNorm(1 + weight.float(), eps)]
    for norm in known if bias is None else [LayerNorm(weight, bias.detach(), eps)]:
        if torch.allclose(norm(x).float(), want, rtol=0.02, atol=1e-4 * float(want.abs().max())):
            return norm
    raise NotLean(f"a {type(module).__name__} is no {'RMSNorm' if bias is None else 'LayerNorm'}")


def _qk_norm(attention: Any, heads: int, kv_heads: int, width: int, target: Target) -> RMSNorm | None:
    """The norms of q and k as one, with a weight per head."""
    names = [name for name in ("q_norm", "k_norm") if getattr(attention, name, None) is not None]
    if not names:
        return None
    both = [norm for name in names if isinstance(norm := _norm(getattr(attention, name), target), RMSNorm)]
    if len(both) != 2 or both[0].eps != both[1].eps or any(norm.weight.shape != (width,) for norm in both):
        raise NotLean("its norms of queries and keys are not over each head")
    return RMSNorm(torch.cat([both[0].weight.expand(heads, -1), both[1].weight.expand(kv_heads, -1)]), both[0].eps)


def _linears(parent: Any, target: Target, *names: list[str]) -> tuple[Tensor, Tensor | None]:
    """:func:`packed_linears` of the first of these lists whose modules there are; of the last one, if none."""
    return packed_linears(parent, next((some for some in names if hasattr(parent, some[0])), names[-1]), target)


def packed_linears(parent: Any, names: list[str], target: Target) -> tuple[Tensor, Tensor | None]:
    """The matrix ``[inputs, outputs]`` and the bias of linear modules side by side; the modules keep views of them."""
    modules = [getattr(parent, name, None) for name in names]
    for name, module in zip(names, modules, strict=True):
        plain = type(module) is nn.Linear and type(module.weight) is nn.Parameter and module.weight.dim() == 2
        if not plain or cast(nn.Linear, module).weight.dtype != target.dtype:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise NotLean(f"its {name} is not a plain nn.Linear in {target.dtype} ({kind})")
    linears = cast(list[nn.Linear], modules)
    biases = [module.bias for module in linears if module.bias is not None]
    if biases and len(biases) != len(linears):
        raise NotLean(f"some of {', '.join(names)} have a bias")
    weights = [module.weight for module in linears]
    return _join(weights).t(), _join(biases) if biases else None


def _return_freed_memory() -> None:
    """Back to the system: the C library keeps what joined matrices were copied from, half of the weights (glibc)."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """Parameters one below the other; they become views of the result."""
    parts = [parameter.detach() for parameter in parameters]
    if len(parts) == 1:
        return parts[0].contiguous()
    whole = torch.cat(parts)
    for parameter, part in zip(parameters, whole.split([len(p) for p in parts]), strict=True):
        parameter.data = part
    return whole
