"""Drafters as they are published on the Hugging Face Hub, converted into ours: the inverse of to_servers.py.

A tensor or a field of the config that layouts.py does not know may change what a drafter computes, and is refused by
its name.

Shape letters: d hidden width, W the target's, V vocabulary, S draft vocabulary, K draft heads, L layers of a head.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.common.command import first_line
from draftsmith.models.dflash import DFlash, DFlashConfig
from draftsmith.models.eagle import Eagle, EagleConfig
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.serving import layouts
from draftsmith.models.serving.layouts import Config, Tensors
from draftsmith.models.target import Target

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DEPTHS = 8  # of P-EAGLE drafters that do not say theirs
_ROPES = ("default", "linear", "llama3", "yarn")  # types of rotary positions that are the same in all programs


@dataclass(frozen=True)
class TargetInfo:
    """What a conversion needs of the target: its sizes, its embeddings ``[V, W]`` as the first layer reads them and its
    LM head's matrix ``[V, W]``, or ``[0, W]`` where that has a bias, too."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    context: int
    embeddings: Tensor
    lm_head: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, target: Target) -> "TargetInfo":
        rows = target.embeddings(torch.arange(target.vocab_size, device=target.device))
        head, layers = cast(Tensor, target.lm_head.weight), target.config.num_hidden_layers
        head = head if getattr(target.lm_head, "bias", None) is None else head[:0]
        return cls(target.hidden_size, target.vocab_size, layers, target.context, rows, head)


@dataclass(frozen=True)
class Imported:
    """A drafter in our form.

    drafter_type: of its folder. weights: as published, except names and layout. notes: sentences on what differs.
    """

    drafter_type: str
    config: EagleConfig | MedusaConfig | DFlashConfig
    weights: dict[str, Tensor]
    notes: tuple[str, ...]

    def drafter(self, where: str) -> Eagle | MedusaHeads | DFlash:
        """Its module, in float32. Raises ValueError: config and weights do not go together."""
        families = {EagleConfig: Eagle, MedusaConfig: MedusaHeads, DFlashConfig: DFlash}
        return families[type(self.config)].from_artifact(self.config.to_dict(), self.weights, where)


def convert(config: Config, tensors: Tensors, target: TargetInfo) -> Imported:
    """Convert a published drafter.
    ``config``: the content of its config.json.
    ``tensors``: all of its tensors.
    Raises ValueError: the format is not known, a tensor or field is missing, unknown or of another shape or value, or
    it belongs to a target of another width, depth or vocabulary."""
    for name, tensor in tensors.items():
        # Of 8 bits, which have no such operation, is refused below.
        if tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.isfinite().all():
            raise ValueError(f"'{name}' holds NaN or infinity; fetch it again")
    try:
        imported = in_our_form(config, tensors, target)
    except ValueError:
        raise
    except Exception as error:  # a value of a wrong kind meets the checks of several libraries
        raise ValueError(f"config.json: a field's value makes no drafter ({first_line(error)})") from None
    shape = imported.config
    if not isinstance(shape, MedusaConfig) and (kind := shape.rope_parameters["rope_type"]) not in _ROPES:
        raise ValueError(f"config.json: rotary positions of type '{kind}' are not imported")
    return imported


def in_our_form(config: Config, tensors: Tensors, target: TargetInfo) -> Imported:
    """:func:`convert` without the checks of what only others write."""
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return _medusa(config, tensors, target)
    if config.get("speculators_model_type") == "dflash":
        return _dflash(_of_speculators(config, target), tensors, target)
    if "dflash_config" in config and "speculators_model_type" not in config:
        return _dflash(config, tensors, target)
    kind, kinds = config.get("speculators_model_type", "eagle3"), ("eagle3", "peagle")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: field 'architectures' is {names!r}; it has to be a list of names")
    if kind not in kinds or not layouts.ARCHITECTURES.issuperset(names):
        unknown = f"speculators_model_type '{kind}'" if kind not in kinds else f"architectures {names}"
        raise ValueError(
            f"{unknown}: no format that is imported; those are EAGLE-1, EAGLE-3, P-EAGLE, Medusa and DFlash"
        )
    return _eagle(config, tensors, target)


def _check_fields(config: Config, known: Container[str], where: str = "") -> None:
    """Refuse unknown fields. One that is null, false, 0 or empty switches nothing on."""
    for name, value in config.items():
        if name in layouts.ONE_VALUE and value is not None and value != layouts.ONE_VALUE[name]:
            raise ValueError(f"config.json: {where}{name} is {value!r}; only {layouts.ONE_VALUE[name]!r} is known here")
        # Qwen2's configs state a window that is not used.
        unused = name == "sliding_window" and config.get("use_sliding_window") is False
        if value and not unused and not any(name in each for each in (known, layouts.HARMLESS, layouts.ONE_VALUE)):
            raise ValueError(f"config.json: field '{where}{name}' is {value!r}; it is not known here what that changes")


def _number(config: Config, name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"config.json: field '{name}' is {value!r}; it has to be a whole number above 0")
    return value


def _check_target(name: str, value: int, wanted: int) -> None:
    if value != wanted:
        raise ValueError(f"{name} {value} ≠ {wanted} of the target: it was trained for another one")


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices are the same but for the rounding of the narrower dtype."""
    return one.shape == other.shape and any(torch.equal(one.to(d), other.to(d)) for d in {one.dtype, other.dtype})


def _check_shapes(found: Tensors, wanted: Mapping[str, tuple[int, ...]], named: Mapping[str, str]) -> None:
    """Compare tensors with what the config promises. ``named``: what each was called when it was published."""
    layer = "midlayer." if any(old.startswith("midlayer.") for old in named.values()) else "layers.0."
    for name in sorted({*found, *wanted}):
        old = named.get(name, name.replace("midlayer.", layer))
        if name not in wanted:
            raise ValueError(f"'{old}' is a tensor that is not known here; it may change the drafter's logits")
        if name not in found:
            raise ValueError(f"'{old}' is missing")
        if (shape := tuple(found[name].shape)) != wanted[name]:
            raise ValueError(f"'{old}' is {list(shape)}; config.json promises {list(wanted[name])}")
        if name != "draft_vocab" and found[name].dtype not in _FLOATS:
            raise ValueError(f"'{old}' is stored as {found[name].dtype}; only float32, bfloat16 and float16 are read")


# ---- EAGLE


def _eagle(config: Config, tensors: Tensors, target: TargetInfo) -> Imported:
    layer, nested = config.get("transformer_layer_config", config), config.get("eagle_config") or {}
    speculators = layer is not config
    for part, where in ((config, ""), (layer, "transformer_layer_config."), (nested, "eagle_config.")):
        if not isinstance(part, dict):
            raise ValueError(f"config.json: field '{where[:-1]}' is {part!r}; it has to be an object")
        if part is not config or not where:
            _check_fields(part, {layouts.LAYER_IDS} if part is nested else layouts.READ, where)
    own, named, notes = dict[str, Tensor](), dict[str, str](), list[str]()
    for old, tensor in tensors.items():
        name = old.removeprefix("model.")
        if name.endswith("rotary_emb.inv_freq"):  # computed from the config
            continue
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
        if name in own:
            raise ValueError(f"'{old}' and '{named[name]}' are the same tensor by two names")
        own[name], named[name] = tensor, old
    if "fc.weight" not in own:
        raise ValueError("'fc.weight' is missing: this is no EAGLE drafter")
    version = 3 if {"midlayer.hidden_norm.weight", "norm.weight"} & own.keys() else 1
    width, vocab_size = _number(layer, "hidden_size"), _number(layer, "vocab_size")
    reads = _number(config, "target_hidden_size", width)
    _check_target("target_hidden_size" if reads != width else "hidden_size", reads, target.hidden_size)
    _check_target("vocab_size", vocab_size, target.vocab_size)
    if "embed_tokens.weight" in own and _same(own["embed_tokens.weight"], target.embeddings):
        del own["embed_tokens.weight"]
        notes.append("its embeddings are the target's and are not stored again")
    if version == 1 and "lm_head.weight" in own and _same(own["lm_head.weight"], target.lm_head):
        del own["lm_head.weight"]
    size = _number(config, "draft_vocab_size", _number(config, "truncated_vocab_size", vocab_size))
    ids = layouts.ids_of(own.pop("d2t", None), own.pop("t2d", None), size, vocab_size) if version == 3 else None
    if ids is not None:
        own["draft_vocab"], order = ids.sort()  # ours ascends
        if len(own.get("lm_head.weight", ())) == size:
            own["lm_head.weight"] = own["lm_head.weight"][order]
    heads = _number(layer, "num_attention_heads")
    positions = _number(layer, "max_position_embeddings", target.context)
    if positions != target.context:
        notes.append(f"its config says {positions:,} positions; it is given the target's {target.context:,}")
    said = {config.get("speculators_model_type"), *(config.get("architectures") or [])}
    before, one_pass = config.get("norm_before_residual"), bool(said & {"peagle", "PEagleDraftModel"})
    parallel: dict[str, Any] = {}
    if one_pass or "mask_hidden" in own:
        parallel = {"parallel": _lookahead(config, layer, notes)}
        parallel["mask_token_id"] = next((config[n] for n in layouts.MASK_TOKENS if config.get(n) is not None), None)
        own |= {"mask_hidden": own["mask_hidden"].flatten()} if "mask_hidden" in own else {}
    biased = bool(layer.get("attention_bias")) or any(f"midlayer.self_attn.{name}_proj.bias" in own for name in "qkv")
    layers = 1 + max(int(found[1]) for name in ["layers.0.", *own] if (found := re.match(r"layers\.(\d+)\.", name)))
    if speculators or parallel:  # others may state their target's number
        layers = max(layers, _number(layer, "num_hidden_layers", 1))
    shape = EagleConfig(
        version,
        "own" if "lm_head.weight" in own and version == 3 else "shared",
        width,
        vocab_size,
        heads,
        _number(layer, "num_key_value_heads", heads),
        _number(layer, "head_dim", width // heads),
        _number(layer, "intermediate_size"),
        target.context,
        layouts.rope_of(layer),
        float(layer.get("rms_norm_eps") or 1e-6),
        layouts.captured_of(config, target.num_layers) if version == 3 else (),
        **{name: bool(config.get(name)) for name in layouts.NORMS},
        draft_vocab_size=None if ids is None else size,
        fc_bias=version == 3 or "fc.bias" in own or bool(config.get("bias")),
        # The package speculators, and vLLM for its folders, take a missing field for true, but of P-EAGLE for false.
        norm_before_residual=speculators and not one_pass if before is None else bool(before),
        attention_bias=biased,
        own_embeddings="embed_tokens.weight" in own,
        target_hidden_size=reads if reads != width else None,
        **parallel,
        num_layers=layers,
    )
    with torch.device("meta"):
        wanted = {name: tuple(weight.shape) for name, weight in Eagle(shape).state_dict().items()}
    _check_shapes(own, wanted, named)
    return Imported("eagle", shape, own, tuple(notes))


def _lookahead(config: Config, layer: Config, notes: list[str]) -> int:
    """The tokens that a P-EAGLE drafter was trained to draft in one pass, if it says so."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    stated = layer.get(layouts.LOOKAHEAD) or methods[0].get("speculative_tokens")
    if stated is None:
        notes.append(f"its config does not say how many tokens it drafts in a pass: {_DEPTHS}, as speculators trains")
    return _number({layouts.LOOKAHEAD: stated}, layouts.LOOKAHEAD, _DEPTHS)


# ---- Medusa


def _medusa(config: Config, tensors: Tensors, target: TargetInfo) -> Imported:
    _check_fields(config, layouts.MEDUSA_READ | layouts.READ)  # some have the whole config of their target
    for name in ("hidden_size", "vocab_size"):
        _check_target(name, _number(config, name, getattr(target, name)), getattr(target, name))
    found, named, own = dict[str, Tensor](), dict[str, str](), dict[str, Tensor]()
    heads = layers = 0
    for old, tensor in tensors.items():
        name = re.sub(r"^medusa_heads?\.", "", old)
        if name == "token_map":
            own["draft_vocab"] = tensor.long()
            continue
        if name == "lm_head.weight" and _same(tensor, target.lm_head):
            continue
        if block := layouts.block_of(name):
            head, layer, kind = block
            name = f"{head}.{layer}.linear.{kind}" if layer >= 0 else f"{head}.projection"
            heads, layers = max(heads, head + 1) if layer >= 0 else heads, max(layers, layer + 1)
        found[name], named[name] = tensor, old
    said, depth = config.get("medusa_num_heads", config.get("num_heads")), config.get("medusa_num_layers", layers)
    notes = () if said in (None, heads) else (f"its config says {said} heads, its weights hold {heads}",)
    if not heads or depth != layers:
        raise ValueError(f"config.json: medusa_num_layers is {depth}; its weights are {heads} heads of {layers} layers")
    biased, projected = (any(name.endswith(end) for name in found) for end in (".bias", ".projection"))
    size = len(own["draft_vocab"]) if own else None
    shape = MedusaConfig(heads, layers, "own" if projected else "shared", target.hidden_size, target.vocab_size, size)
    width, order = target.hidden_size, torch.arange(shape.outputs)
    if size is not None:
        own["draft_vocab"], order = own["draft_vocab"].sort()
    blocks = [f"{head}.{layer}.linear" for layer in range(layers) for head in range(heads)]
    wanted: dict[str, tuple[int, ...]] = {f"{block}.weight": (width, width) for block in blocks}
    wanted |= {f"{block}.bias": (width,) for block in blocks if biased}
    wanted |= {f"{head}.projection": (shape.outputs, width) for head in range(heads) if projected}
    if projected and config.get("original_lm_head"):  # one for all heads
        found |= {f"{head}.projection": found["0.projection"] for head in range(heads) if "0.projection" in found}
    _check_shapes(found, wanted, named)
    weight = torch.stack([found[f"{block}.weight"].t() for block in blocks])  # ours: x @ weight
    bias = torch.stack([found.get(f"{block}.bias", weight.new_zeros(width)) for block in blocks])
    own |= {"weight": weight.unflatten(0, (layers, heads)), "bias": bias.view(layers, heads, 1, width)}
    rows = target.lm_head[own["draft_vocab"]] if size is not None and len(target.lm_head) else target.lm_head
    projections = [found[f"{head}.projection"][order] for head in range(heads) if projected]
    if projected and all(_same(matrix, rows) for matrix in projections):
        shape = replace(shape, projection="shared")
    elif projected:
        own["projection"] = torch.stack(projections)
    return Imported("medusa", shape, own, notes)


# ---- DFlash


def _of_speculators(config: Config, target: TargetInfo) -> Config:
    """The config of a DFlash drafter of the package speculators as z-lab's have it.
    Raises ValueError: a field is missing, of another kind, or not known here."""
    own, layer = dict(config), config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"config.json: field 'transformer_layer_config' is {layer!r}; it has to be an object")
    if own.pop(layouts.FROM_ANCHOR, False):
        raise ValueError(f"config.json: {layouts.FROM_ANCHOR} is true: to draft from the anchor is not known here")
    _check_target("target_hidden_size", _number(own, "target_hidden_size", target.hidden_size), target.hidden_size)
    entered = own.pop(layouts.ENTERED, None)
    if not isinstance(entered, list) or any(type(number) is not int for number in entered):
        raise ValueError(f"config.json: field '{layouts.ENTERED}' is {entered!r}; it has to be a list of layers")
    nested = {"mask_token_id": own.pop("mask_token_id", None), "target_layer_ids": [number - 1 for number in entered]}
    own = {name: value for name, value in own.items() if name not in (layouts.BOTH_WAYS, "transformer_layer_config")}
    return {**layer, **own, "dflash_config": nested}


def _dflash(config: Config, tensors: Tensors, target: TargetInfo) -> Imported:
    nested = config["dflash_config"]
    if not isinstance(nested, dict):
        raise ValueError(f"config.json: field 'dflash_config' is {nested!r}; it has to be an object")
    for part, known, where in ((config, layouts.DFLASH_READ, ""), (nested, layouts.DFLASH_NESTED, "dflash_config.")):
        _check_fields(part, known, where)
    # Older folders have the block's size beside dflash_config, newer ones in it, and some the mask token beside it.
    either = {**config, **{name: value for name, value in nested.items() if value is not None}}
    causal = [part.get(name) for part, name in ((config, "is_causal"), (nested, "causal"))]
    if any(causal) or set(config.get("layer_types") or ()) - {"full_attention"} or config.get("use_sliding_window"):
        raise ValueError("config.json: its blocks are causal, or have a window; only full attention is known here")
    own = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    for name in ("hidden_size", "vocab_size"):
        _check_target(name, _number(config, name), getattr(target, name))
    _check_target("num_target_layers", _number(config, "num_target_layers", target.num_layers), target.num_layers)
    ids = nested.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(layer) is not int for layer in ids):
        raise ValueError(f"config.json: field 'target_layer_ids' is {ids!r}; it has to be a list of layers")
    own = {n: weight for n, weight in own.items() if not n.startswith("verifier_")}  # the target's, of training
    size = _number(config, "draft_vocab_size", target.vocab_size)
    drafted = layouts.ids_of(own.pop("d2t", None), own.pop("t2d", None), size, target.vocab_size)
    rows = target.lm_head if drafted is None or not len(target.lm_head) else target.lm_head[drafted]
    if drafted is not None:
        own["draft_vocab"] = drafted.sort().values  # ours ascends
    for name, given in (("embed_tokens.weight", target.embeddings), ("lm_head.weight", rows)):
        if name in own and _same(own[name], given):
            del own[name]
    if "lm_head.weight" in own:
        raise ValueError("'lm_head.weight' is no part of the target's LM head; only such are read")
    layers, heads = _number(config, "num_hidden_layers"), _number(config, "num_attention_heads")
    norms = [own.get(f"layers.{layer}.self_attn.k_norm.weight") for layer in range(layers)]
    tied = all(one is not None and norms[0] is not None and torch.equal(one, norms[0]) for one in norms)
    shape = DFlashConfig(
        _number(either, "block_size"),
        layers,
        cast(int, either.get("mask_token_id")),  # the config checks it
        tuple(layer + 1 for layer in ids),
        target.num_layers,
        target.hidden_size,
        target.vocab_size,
        heads,
        _number(config, "num_key_value_heads", heads),
        _number(config, "head_dim", target.hidden_size // heads),
        _number(config, "intermediate_size"),
        target.context,
        layouts.rope_of(config),
        float(config.get("rms_norm_eps") or 1e-6),
        tied,
        None if drafted is None else size,
    )
    with torch.device("meta"):
        wanted = {name: tuple(weight.shape) for name, weight in DFlash(shape).state_dict().items()}
    _check_shapes(own, wanted, {name: name for name in own})
    return Imported("dflash", shape, own, ())
