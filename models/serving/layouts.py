"""Layouts of drafters outside draftsmith: names of tensors and fields of config.json, one table for both directions.

    EAGLE-1      layers.0.*, fc                                   EAGLE, SGLang, vLLM
    EAGLE-3      midlayer.* or layers.0.*, fc, norm, d2t, t2d     EAGLE, SGLang, vLLM, ModelOpt, speculators
    P-EAGLE      as EAGLE-3, mask_hidden                          vLLM, speculators
    Medusa       {head}.{layer}.linear.*, {head}.{L}.weight       Medusa, TGI; blocks.{head}.layers.{layer}.*, vLLM
    DFlash       layers.{layer}.*, fc, hidden_norm, norm, d2t      z-lab, vLLM, SGLang, speculators

to_servers.py writes by it, published.py reads by it. Names that are not here are the same in ours. As read in vLLM 0.32
and 0.33, SGLang 0.5.23, speculators 0.9 and optimum-intel 2.2 (docs/export.md).

Shape letters: V vocabulary, S draft vocabulary, L layers of a head.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import SIZES, Eagle, layers_to_capture
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving.readers import EVERY, READ_BY, READERS

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]
WEIGHTS, PUBLISHED_MEDUSA = "model.safetensors", "medusa_lm_head.safetensors"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


# Of EAGLE drafters, by version (0: P-EAGLE) and program: the architecture, and the prefix of their layer's tensors.
EAGLE = {
    (0, "vllm"): ("LlamaForCausalLMEagle3", "midlayer."),
    (0, "speculators"): ("PEagleSpeculator", "layers.0."),
    (1, "sglang"): ("LlamaForCausalLMEagle", "layers.0."),
    (1, "vllm"): ("LlamaForCausalLM", "layers.0."),
    **{(3, to): ("LlamaForCausalLMEagle3", "midlayer.") for to in ("sglang", "vllm", "openvino")},
    (3, "speculators"): ("Eagle3Speculator", "layers.0."),
}
ARCHITECTURES = {architecture for architecture, _ in EAGLE.values()} | set(
    "Qwen2ForCausalLM EagleLlamaForCausalLM Eagle3LlamaForCausalLM Eagle3DraftModel PEagleDraftModel".split()
)
NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3.1, beside those of EAGLE-3
# P-EAGLE's token in place of unknown ones: vLLM reads the last two, for speculators' folders the first one. And the
# tokens of a draft for which it was trained; vLLM puts those of its own command there.
MASK_TOKENS, LOOKAHEAD = ("mask_token_id", "pard_token", "ptd_token_id"), "num_lookahead_tokens"


class MedusaLayout(NamedTuple):
    """How a program reads Medusa heads. block, last: names of a layer's tensors and of a head's matrix. heads, layers:
    fields with their numbers."""

    block: str
    last: str
    heads: str
    layers: str


_PUBLISHED = MedusaLayout(
    "{head}.{layer}.linear.{kind}", "{head}.{layers}.weight", "medusa_num_heads", "medusa_num_layers"
)
_VLLM = MedusaLayout("blocks.{head}.layers.{layer}.{kind}", "lm_heads.{head}.weight", "num_heads", "num_hidden_layers")
MEDUSA = {"medusa": _PUBLISHED, "vllm": _VLLM}

# Fields of config.json that are known when a drafter is read. Of these it is read what they say, or their tensors: …
READ = {*SIZES, *NORMS, *MASK_TOKENS, LAYER_IDS, LOOKAHEAD} | set(
    "rms_norm_eps rope_theta rope_scaling rope_parameters draft_vocab_size bias target_hidden_size attention_bias "
    "qkv_bias eagle_fc_bias eagle_config transformer_layer_config norm_before_residual num_aux_hidden_states "
    "truncated_vocab_size".split()
)
MEDUSA_READ = {layout.heads for layout in MEDUSA.values()} | set(
    "medusa_num_layers base_model_name_or_path original_lm_head medusa_fc_bias max_paths topk version "
    "max_seq_len".split()
)
# Of DFlash drafters: target_layer_ids name the layer that a state leaves, our captured_layers the one it enters.
DFLASH_READ = READ | set("block_size dflash_config num_target_layers layer_types is_causal use_sliding_window".split())
DFLASH_NESTED = {"mask_token_id", "target_layer_ids", "causal", "block_size"}
# speculators' own fields name the layer entered; of layers without a window its blocks are never causal, whatever
# sliding_window_non_causal says, but vLLM 0.32 takes false for causal blocks of every layer.
ENTERED, BOTH_WAYS, FROM_ANCHOR = "aux_hidden_state_layer_ids", "sliding_window_non_causal", "sample_from_anchor"
# … these change no logit, …
HARMLESS = set(
    "architectures model_type auto_map torch_dtype dtype transformers_version _name_or_path bos_token_id eos_token_id "
    "pad_token_id initializer_range use_cache pretraining_tp attention_dropout num_hidden_layers max_window_layers "
    "has_no_defaults_at_init embed_requires_grad speculators_config speculators_version speculators_model_type "
    "tie_word_embeddings next_layer_regular parallel_draft_heads_num_layers target_model_type "
    "reuse_target_lm_head max_anchors num_depths down_sample_ratio down_sample_ratio_min".split()
)
ONE_VALUE = {  # … and these have one value here, where they are stated.
    "hidden_act": "silu",
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "parallel_draft_step": 1,
}


# ---- what has no place


class Unsupported(ValueError):
    """A format has no place for such a drafter."""


def unsupported(drafter: Eagle | MedusaHeads | DFlash, to: str) -> str | None:
    """Why a format has no place for a drafter; None: it has one.

    vLLM makes EAGLE-1's ``fc`` without a bias, and its loader skips one without a word. ``norm_before_fc`` together
    with ``fc_norm``, which speculators refuses, is no drafter of ours (:class:`EagleConfig`)."""
    captured = list(getattr(drafter.config, "captured_layers", ()))  # heads have none
    if captured != sorted(captured) and to != "medusa":
        return f"it captures layers {captured} of the target; servers take them in ascending order"
    if isinstance(drafter, DFlash):
        if to not in ("vllm", "sglang", "speculators"):
            return f"a DFlash drafter: it is written for vLLM, SGLang and speculators, not for {to}; use --to vllm"
        if to != "speculators" and 0 in drafter.config.captured_layers:  # it is no layer's output, as z-lab names them
            return f"it captures layer 0, which {to} has no name for; use --to speculators, which vLLM serves"
        return None
    if isinstance(drafter, MedusaHeads):
        if to not in MEDUSA:
            return f"Medusa heads: {to} runs none; use --to medusa, or --to vllm (up to 0.32)"
        if drafter.projection is not None and drafter.draft_vocab is not None:
            rows = f"its heads have rows of their own for a draft vocabulary, for which {to} has no place"
            return f"{rows}; train them with drafter.projection=shared, or with all tokens"
        return None
    c = drafter.config
    if to == "medusa":
        return "an EAGLE drafter: the format medusa holds Medusa heads alone; use --to vllm or --to sglang"
    for name in ("attention_bias", "own_embeddings", "target_hidden_size"):  # of drafters that were imported
        if getattr(c, name):
            droppers = [reader.name for key, reader in READERS.items() if key not in READ_BY.get(name, EVERY)]
            but = f", but not in {', '.join(droppers)}, which leave it out without a word" if droppers else ""
            return f"it has {name}, which is not exported: serve the published folder it was imported from{but}"
    if c.parallel and (0, to) not in EAGLE:
        return f"a P-EAGLE drafter (drafter.one_pass): {to} drafts its tokens one by one; use --to vllm"
    if c.parallel and c.fc_norm and to == "speculators":
        return "it has fc_norm, which speculators and vLLM leave out of P-EAGLE's folders without a word; use --to vllm"
    if c.num_layers > 1 and to not in ("vllm", "speculators"):
        return f"it has {c.num_layers} layers: {to} runs one; use --to vllm"
    if (c.version, to) not in EAGLE:
        return f"an EAGLE-1 drafter: {to} holds EAGLE-3 alone; use --to vllm or --to sglang"
    silently = "without a word, and then drafts with another model: use --to"
    if to == "vllm" and drafter.fc.bias is not None and drafter.fc.bias.any():
        return f"its fc has a bias, which vLLM skips {silently} sglang, or train it with drafter.bias=false"
    if to in ("speculators", "openvino") and len(captured) != 3:
        return f"it captures layers {captured} of the target; {to} holds three; use --to vllm"
    for name in (*NORMS, "norm_before_residual"):
        if getattr(c, name) and to not in READ_BY[name]:
            return f"it has {name}, which {READERS[to].name} leaves out {silently} vllm, or train one without it"
    if to != "speculators" and 0 in captured:  # it is no layer's output, by which SGLang names it
        return f"it captures layer 0, which {to} has no name for; use --to speculators, which vLLM serves"
    return None


# ---- parts of a drafter, in both directions


def maps_of(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t [S]`` int64: target id = i + d2t[i]. ``t2d [V]`` bool: whether a target's id can be drafted."""
    drafted = torch.zeros(vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def ids_of(d2t: Tensor | None, t2d: Tensor | None, size: int, vocab_size: int) -> Tensor | None:
    """The drafted ids ``[S]`` int64, in the order of the LM head's rows, of :func:`maps_of`, of which t2d may be
    missing; None for all of V.
    Raises ValueError: they are no such maps."""
    if size == vocab_size and (d2t is None or not d2t.any()):  # the published code then reads neither
        return None
    if d2t is None:
        raise ValueError(f"'d2t' is missing: which {size} of the target's {vocab_size} tokens are drafted?")
    if d2t.shape != (size,) or d2t.is_floating_point():
        raise ValueError(f"'d2t' is {list(d2t.shape)} of {d2t.dtype}; draft_vocab_size {size} needs [{size}] of int64")
    ids = d2t.long() + torch.arange(size)
    inside = int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    drafted = maps_of(ids, vocab_size)["t2d"] if inside else torch.zeros(vocab_size, dtype=torch.bool)
    if int(drafted.sum()) < size or (t2d is not None and not torch.equal(t2d.bool(), drafted)):
        marked = "" if t2d is None else " that 't2d' marks"
        raise ValueError(f"'d2t' holds no offsets (token id − place) to distinct ids of the target{marked}")
    return ids


def layer_fields(captured: tuple[int, ...], num_layers: int) -> dict[str, Any]:
    """Which layers of the target are read, for SGLang and vLLM: nothing for those that both assume."""
    if captured == (2, num_layers // 2, num_layers - 3):
        return {}
    # vLLM counts the layer that a state enters, SGLang the one whose output it is.
    before = [layer - 1 for layer in captured]
    return {LAYER_IDS: list(captured), "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: before}}


def captured_of(config: Config, num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs are read: by :func:`layer_fields`, of which one may be missing.
    Raises ValueError: it says no such layers."""
    entered, left = config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)
    ids = entered or left or list(layers_to_capture(num_layers))
    if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
        raise ValueError(f"config.json: field '{LAYER_IDS}' is {ids!r}; it has to be a list of layers")
    layers = tuple(layer + 1 if left and not entered else layer for layer in ids)
    if (config.get("num_aux_hidden_states") or len(layers)) != len(layers):
        raise ValueError(f"config.json: num_aux_hidden_states is {config['num_aux_hidden_states']}, layers {ids}")
    if max(layers) >= num_layers or min(layers) < 0:
        raise ValueError(f"it reads the inputs of layers {list(layers)}; the target has 0 to {num_layers - 1}")
    return layers


def rope_fields(rope: Config) -> dict[str, Any]:
    """Rotary parameters in the older and the newer way."""
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    older = None if scaling == {"rope_type": "default"} else scaling
    return {"rope_theta": rope["rope_theta"], "rope_scaling": older, "rope_parameters": rope}


def rope_of(layer: Config) -> dict[str, Any]:
    """Rotary parameters of :func:`rope_fields`, of which one way is enough.
    Raises ValueError: they are no objects, or the two ways differ."""
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
    return found[0]


def block_of(name: str) -> tuple[int, int, str] | None:
    """Head, layer (−1: the head's matrix) and kind of a tensor of Medusa heads, by any layout; None: it is no such."""
    for block, last in _PATTERNS:
        if found := block.fullmatch(name):
            return int(found["head"]), int(found["layer"]), found["kind"]
        if found := last.fullmatch(name):
            return int(found["head"]), -1, "weight"
    return None


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{kind\}", "(?P<kind>weight|bias)")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", escaped))


_PATTERNS = [(_pattern(layout.block), _pattern(layout.last)) for layout in MEDUSA.values()]
