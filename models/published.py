"""Drafters as they are published on the Hugging Face Hub, converted into ours: the inverse of :mod:`models.export`.

    EAGLE-1      layers.0.*, fc                                   EAGLE, SGLang, vLLM
    EAGLE-3      midlayer.* or layers.0.*, fc, norm, d2t, t2d     EAGLE, SGLang, vLLM, ModelOpt, speculators
    Medusa       {head}.{layer}.linear.*, {head}.{L}.weight       Medusa, TGI; blocks.{head}.layers.{layer}.*, vLLM

A tensor or a field of the config that is not known here may change what a drafter computes, and is refused by its name.

Shape letters: d hidden width, W the target's, V vocabulary, S draft vocabulary, K draft heads, L layers of a head.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.common.command import first_line
from draftsmith.models.eagle import Eagle, EagleConfig, layers_to_capture
from draftsmith.models.medusa import MedusaConfig

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ARCHITECTURES = set(
    "LlamaForCausalLM Qwen2ForCausalLM LlamaForCausalLMEagle EagleLlamaForCausalLM LlamaForCausalLMEagle3 "
    "Eagle3LlamaForCausalLM Eagle3Speculator Eagle3DraftModel".split()
)
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields that change no logit.
_HARMLESS = set(
    "architectures model_type auto_map torch_dtype dtype transformers_version _name_or_path bos_token_id eos_token_id "
    "pad_token_id initializer_range use_cache pretraining_tp attention_dropout num_hidden_layers max_window_layers "
    "has_no_defaults_at_init embed_requires_grad speculators_config speculators_version speculators_model_type "
    "tie_word_embeddings next_layer_regular parallel_draft_heads_num_layers "
    "target_model_type reuse_target_lm_head".split()
)
# Fields that are read below, or whose tensors are.
_READ = set(
    "hidden_size vocab_size num_attention_heads num_key_value_heads head_dim intermediate_size rms_norm_eps rope_theta "
    "max_position_embeddings rope_scaling rope_parameters draft_vocab_size eagle_aux_hidden_state_layer_ids bias "
    "target_hidden_size attention_bias qkv_bias eagle_fc_bias eagle_config transformer_layer_config norm_output "
    "norm_before_residual norm_before_fc fc_norm num_aux_hidden_states truncated_vocab_size".split()
)
# Fields that have one value here, where they are stated.
_ONE_VALUE = {
    "hidden_act": "silu",
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "parallel_draft_step": 1,
}
_MEDUSA_FIELDS = set(
    "medusa_num_heads medusa_num_layers num_heads base_model_name_or_path original_lm_head medusa_fc_bias max_paths "
    "topk version max_seq_len".split()
)


@dataclass(frozen=True)
class Facts:
    """What a conversion needs of the target: its sizes, its embeddings ``[V, W]`` as the first layer reads them and its
    LM head's matrix ``[V, W]``, or ``[0, W]`` where that has a bias, too."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    context: int
    embeddings: Tensor
    lm_head: Tensor


@dataclass(frozen=True)
class Imported:
    """A drafter in our form.

    drafter_type: of its folder. weights: as published, except names and layout. notes: sentences on what differs.
    """

    drafter_type: str
    config: EagleConfig | MedusaConfig
    weights: dict[str, Tensor]
    notes: tuple[str, ...]


def convert(config: Config, tensors: Tensors, facts: Facts) -> Imported:
    """Convert a published drafter.
    ``config``: the content of its config.json.
    ``tensors``: all of its tensors.
    Raises ValueError: the format is not known, a tensor or field is missing, unknown or of another shape or value, or
    it belongs to a target of another width, depth or vocabulary."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"'{name}' holds NaN or infinity; fetch it again")
    try:
        return _convert(config, tensors, facts)
    except ValueError:
        raise
    except Exception as error:  # a value of a wrong kind meets the checks of several libraries
        raise ValueError(f"config.json: a field's value makes no drafter ({first_line(error)})") from None


def _convert(config: Config, tensors: Tensors, facts: Facts) -> Imported:
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return _medusa(config, tensors, facts)
    kind = config.get("speculators_model_type", "eagle3")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: field 'architectures' is {names!r}; it has to be a list of names")
    if kind != "eagle3" or not _ARCHITECTURES.issuperset(names):
        unknown = f"speculators_model_type '{kind}'" if kind != "eagle3" else f"architectures {names}"
        raise ValueError(f"{unknown}: no format that is imported; those are EAGLE-1, EAGLE-3 and Medusa")
    return _eagle(config, tensors, facts)


def _check_fields(config: Config, known: Container[str], where: str = "") -> None:
    """Refuse unknown fields. One that is null, false, 0 or empty switches nothing on."""
    for name, value in config.items():
        if name in _ONE_VALUE and value is not None and value != _ONE_VALUE[name]:
            raise ValueError(f"config.json: {where}{name} is {value!r}; only {_ONE_VALUE[name]!r} is known here")
        # Qwen2's configs state a window that is not used.
        unused = name == "sliding_window" and config.get("use_sliding_window") is False
        if value and not unused and not any(name in each for each in (known, _HARMLESS, _ONE_VALUE)):
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


def _eagle(config: Config, tensors: Tensors, facts: Facts) -> Imported:
    layer, nested = config.get("transformer_layer_config", config), config.get("eagle_config") or {}
    speculators = layer is not config
    for part, where in ((config, ""), (layer, "transformer_layer_config."), (nested, "eagle_config.")):
        if not isinstance(part, dict):
            raise ValueError(f"config.json: field '{where[:-1]}' is {part!r}; it has to be an object")
        if part is not config or not where:
            _check_fields(part, {_LAYER_IDS} if part is nested else _READ, where)
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
    _check_target("target_hidden_size" if reads != width else "hidden_size", reads, facts.hidden_size)
    _check_target("vocab_size", vocab_size, facts.vocab_size)
    if "embed_tokens.weight" in own and _same(own["embed_tokens.weight"], facts.embeddings):
        del own["embed_tokens.weight"]
        notes.append("its embeddings are the target's and are not stored again")
    if version == 1 and "lm_head.weight" in own and _same(own["lm_head.weight"], facts.lm_head):
        del own["lm_head.weight"]
    size = _number(config, "draft_vocab_size", _number(config, "truncated_vocab_size", vocab_size))
    if version == 3 and (ids := _draft_vocab(own, size, vocab_size)) is not None:
        own["draft_vocab"] = ids
    heads = _number(layer, "num_attention_heads")
    positions = _number(layer, "max_position_embeddings", facts.context)
    if positions != facts.context:
        notes.append(f"its config says {positions:,} positions; it is given the target's {facts.context:,}")
    before = config.get("norm_before_residual")
    biased = bool(layer.get("attention_bias")) or any(f"midlayer.self_attn.{name}_proj.bias" in own for name in "qkv")
    shape = EagleConfig(
        version,
        "own" if "lm_head.weight" in own and version == 3 else "shared",
        width,
        vocab_size,
        heads,
        _number(layer, "num_key_value_heads", heads),
        _number(layer, "head_dim", width // heads),
        _number(layer, "intermediate_size"),
        facts.context,
        _rope(layer),
        float(layer.get("rms_norm_eps") or 1e-6),
        _captured(config, nested, facts) if version == 3 else (),
        bool(config.get("norm_before_fc")),
        bool(config.get("fc_norm")),
        bool(config.get("norm_output")),
        size if "draft_vocab" in own else None,
        fc_bias=version == 3 or "fc.bias" in own or bool(config.get("bias")),
        # The package speculators, and vLLM for its folders, take a missing field for true.
        norm_before_residual=speculators if before is None else bool(before),
        attention_bias=biased,
        own_embeddings="embed_tokens.weight" in own,
        target_hidden_size=reads if reads != width else None,
    )
    with torch.device("meta"):
        wanted = {name: tuple(weight.shape) for name, weight in Eagle(shape).state_dict().items()}
    _check_shapes(own, wanted, named)
    return Imported("eagle", shape, own, tuple(notes))


def _draft_vocab(own: dict[str, Tensor], size: int, vocab_size: int) -> Tensor | None:
    """The draft vocabulary ``[S]`` int64, ascending, of the maps ``d2t [S]`` (id − place) and ``t2d [V]`` (whether an
    id is drafted), which are taken out of the tensors; None for all of V. Rows of the LM head are put in its order."""
    d2t, t2d = own.pop("d2t", None), own.pop("t2d", None)
    if size == vocab_size and (d2t is None or not d2t.any()):  # the published code then reads neither
        return None
    if d2t is None:
        raise ValueError(f"'d2t' is missing: which {size} of the target's {vocab_size} tokens are drafted?")
    if d2t.shape != (size,) or d2t.is_floating_point():
        raise ValueError(f"'d2t' is {list(d2t.shape)} of {d2t.dtype}; draft_vocab_size {size} needs [{size}] of int64")
    ids = d2t.long() + torch.arange(size)
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    if int(ids.min()) >= 0 and int(ids.max()) < vocab_size:
        drafted[ids] = True
    if int(drafted.sum()) < size or (t2d is not None and not torch.equal(t2d.bool(), drafted)):
        marked = "" if t2d is None else " that 't2d' marks"
        raise ValueError(f"'d2t' holds no offsets (token id − place) to distinct ids of the target{marked}")
    ids, order = ids.sort()
    if "lm_head.weight" in own and len(own["lm_head.weight"]) == size:
        own["lm_head.weight"] = own["lm_head.weight"][order]
    return ids


def _captured(config: Config, nested: Config, facts: Facts) -> tuple[int, ...]:
    """The target's layers whose inputs are read: by the layer that a state enters, or by the one that it leaves."""
    entered, left = config.get(_LAYER_IDS), nested.get(_LAYER_IDS)
    ids = entered or left or list(layers_to_capture(facts.num_layers))
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        raise ValueError(f"config.json: field '{_LAYER_IDS}' is {ids!r}; it has to be a list of layers")
    layers = tuple(layer + 1 if left and not entered else layer for layer in ids)
    if (config.get("num_aux_hidden_states") or len(layers)) != len(layers):
        raise ValueError(f"config.json: num_aux_hidden_states is {config['num_aux_hidden_states']}, layers {ids}")
    if max(layers) >= facts.num_layers or min(layers) < 0:
        raise ValueError(f"it reads the inputs of layers {list(layers)}; the target has 0 to {facts.num_layers - 1}")
    return layers


def _rope(layer: Config) -> dict[str, Any]:
    """Rotary parameters, which are written in an older and a newer way."""
    found = list[dict[str, Any]]()
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(layer.get(name), dict | None):
            raise ValueError(f"config.json: field '{name}' is {layer[name]!r}; it has to be an object")
    newer, scaling = layer.get("rope_parameters"), dict(layer.get("rope_scaling") or {})
    if newer:
        found.append(dict(newer))
    if not newer or "rope_theta" in layer:
        found.append({"rope_theta": layer.get("rope_theta") or 10000.0} | scaling)
    for each in found:
        kind = each.pop("type", None)  # the older name
        each["rope_type"] = each.get("rope_type") or kind or "default"
        each["rope_theta"] = float(each.get("rope_theta") or 10000.0)
        if each["rope_type"] == "yarn":
            each.setdefault("original_max_position_embeddings", layer.get("max_position_embeddings"))
    if found[1:] and found[0] != found[1]:
        raise ValueError("config.json: rope_theta and rope_scaling say other rotary positions than rope_parameters")
    if found[0]["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"config.json: rotary positions of type '{found[0]['rope_type']}' are not imported")
    return found[0]


# ---- Medusa


def _medusa(config: Config, tensors: Tensors, facts: Facts) -> Imported:
    _check_fields(config, _MEDUSA_FIELDS | _READ)  # some have the whole config of their target
    for name in ("hidden_size", "vocab_size"):
        _check_target(name, _number(config, name, getattr(facts, name)), getattr(facts, name))
    found, named, own = dict[str, Tensor](), dict[str, str](), dict[str, Tensor]()
    heads = layers = 0
    for old, tensor in tensors.items():
        name = re.sub(r"^medusa_heads?\.", "", old)
        block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name)
        last = re.fullmatch(r"(\d+)\.\d+\.weight|lm_heads\.(\d+)\.weight", name)
        if name == "token_map":
            own["draft_vocab"] = tensor.long()
            continue
        if name == "lm_head.weight" and _same(tensor, facts.lm_head):
            continue
        if block:
            head, layer, kind = (group for group in block.groups() if group is not None)
            name = f"{head}.{layer}.linear.{kind}"
            heads, layers = max(heads, int(head) + 1), max(layers, int(layer) + 1)
        elif last:
            name = f"{last[1] or last[2]}.projection"
        found[name], named[name] = tensor, old
    said, depth = config.get("medusa_num_heads", config.get("num_heads")), config.get("medusa_num_layers", layers)
    notes = () if said in (None, heads) else (f"its config says {said} heads, its weights hold {heads}",)
    if not heads or depth != layers:
        raise ValueError(f"config.json: medusa_num_layers is {depth}; its weights are {heads} heads of {layers} layers")
    biased, projected = (any(name.endswith(end) for name in found) for end in (".bias", ".projection"))
    size = len(own["draft_vocab"]) if own else None
    shape = MedusaConfig(heads, layers, "own" if projected else "shared", facts.hidden_size, facts.vocab_size, size)
    width, order = facts.hidden_size, torch.arange(shape.outputs)
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
    rows = facts.lm_head[own["draft_vocab"]] if size is not None and len(facts.lm_head) else facts.lm_head
    projections = [found[f"{head}.projection"][order] for head in range(heads) if projected]
    if projected and all(_same(matrix, rows) for matrix in projections):
        shape = replace(shape, projection="shared")
    elif projected:
        own["projection"] = torch.stack(projections)
    return Imported("medusa", shape, own, notes)
