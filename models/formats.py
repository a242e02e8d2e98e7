"""The formats of serving programs: what is written for each of a drafter's families, and the contract of what is read.

Servers skip tensors and fields that they do not know and then draft with other weights, without a word. So each format
has a contract here: its tensors with shape and dtype and no others, fields of config.json with their values, and fields
that must not be there; as read in vLLM 0.32 and 0.33, SGLang 0.5.23, speculators 0.9 and optimum-intel 2.2
(docs/export.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.common.files import json_object
from draftsmith.models.eagle import SIZES, Eagle, EagleConfig
from draftsmith.models.files.weights import safetensors_header
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.readers import EVERY, READ_BY, READERS
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import head_rows

SPECULATORS = "0.9.0"  # version of the package that tests/speculators_package.py was run with
_DTYPES = {"F32": "float", "BF16": "float", "F16": "float", "I64": "int64", "BOOL": "bool"}

WEIGHTS, PUBLISHED_MEDUSA = "model.safetensors", "medusa_lm_head.safetensors"
NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3.1, beside those of EAGLE-3

Shapes = dict[str, tuple[tuple[int, ...], str]]  # of tensors by name, with the kind of their dtype


@dataclass(frozen=True)
class Contract:
    """What a server reads.

    tensors: all that there are. fields: of config.json, ``a.b`` for field b of object a. forbidden: fields that must
    not be there. file: of the tensors.
    """

    tensors: Shapes
    fields: Mapping[str, Any]
    forbidden: frozenset[str]
    file: str = WEIGHTS

    def check(self, folder: Path) -> None:
        """Compare a written folder with it.
        Raises ValueError: a tensor or field is missing, has another shape, dtype or value, or must not be there."""
        header = safetensors_header(folder / self.file)[1]
        stored = {n: (tuple(e["shape"]), _DTYPES.get(e["dtype"], e["dtype"])) for n, e in header.items()}
        for name in sorted({*self.tensors, *stored}):
            found, wanted = stored.get(name, "absent"), self.tensors.get(name, "absent")
            if found != wanted:
                raise ValueError(f"{self.file}: '{name}' is {found}; the format has it {wanted}")
        config = json_object(folder / "config.json")
        for name, wanted in {**self.fields, **dict.fromkeys(self.forbidden, "absent")}.items():
            found = _field(config, name)
            if found != wanted or type(found) is not type(wanted):  # 1 is no true
                raise ValueError(f"config.json: field '{name}' is {found!r}; the format has it {wanted!r}")


def _field(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config.get(part, "absent") if isinstance(config, dict) else "absent"
    return config


@dataclass(frozen=True)
class Source:
    """What is exported.

    drafter: in float32. weights: as stored. target_config: of ``transformers``. target: None where its weights are not
    needed. folder: the drafter's. fingerprint: of its target.
    """

    drafter: Eagle | MedusaHeads
    weights: Mapping[str, Tensor]
    target_name: str
    target_config: Any
    target: Target | None
    folder: Path
    fingerprint: str

    @property
    def eagle(self) -> Eagle:
        return cast(Eagle, self.drafter)

    @property
    def heads(self) -> MedusaHeads:
        return cast(MedusaHeads, self.drafter)

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in self.weights.values() if weight.is_floating_point())

    def loaded(self) -> Target:
        assert self.target is not None
        return self.target

    def rows(self, weight: Tensor) -> Tensor:
        """A matrix of the target's, in the drafter's dtype where that loses nothing, else in float32."""
        small = weight.to(self.dtype)
        return small if torch.equal(small.float(), weight.float()) else weight.float()


# ---- what is written


def _tensors(source: Source, layer: str) -> dict[str, Tensor]:
    """The drafter's tensors, those of its layer under ``layer``; for EAGLE-3 always with an LM head."""
    eagle = source.eagle
    tensors = {n.replace("midlayer.", layer): w for n, w in source.weights.items() if n != "draft_vocab"}
    if eagle.config.version == 3 and eagle.lm_head is None:
        tensors["lm_head.weight"] = source.rows(head_rows(source.loaded().lm_head, _vocabulary(eagle)).weight)
    return tensors


def _vocabulary(eagle: Eagle) -> Tensor:
    """The target's ids that the drafter chooses from, ``[S]`` int64, ascending."""
    return eagle.tokens(torch.arange(eagle.config.outputs)).long()


def _maps(eagle: Eagle) -> dict[str, Tensor]:
    """``d2t [S]`` int64: target id = i + d2t[i]. ``t2d [V]`` bool: whether a target's id can be drafted."""
    ids = _vocabulary(eagle)
    drafted = torch.zeros(eagle.config.vocab_size, dtype=torch.bool)
    drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def _llama(source: Source) -> dict[str, Any]:
    """The layer as a Llama's config, with its rotary positions in the older and the newer way."""
    c, text = source.eagle.config, source.target_config.get_text_config()
    scaling = {name: value for name, value in c.rope_parameters.items() if name != "rope_theta"}
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(c, name) for name in SIZES},
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "rope_parameters": c.rope_parameters,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": getattr(text, "eos_token_id", None),
    }


# ---- what the formats have in common


def _shapes(c: EagleConfig, layer: str) -> Shapes:
    """Tensors of every format, by the drafter's sizes."""
    d, inner = c.hidden_size, c.intermediate_size
    captured = len(c.captured_layers) * d
    heads, groups = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    wide = 2 * d if c.version == 3 else d
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}self_attn.q_proj": (heads, wide),
        f"{layer}self_attn.k_proj": (groups, wide),
        f"{layer}self_attn.v_proj": (groups, wide),
        f"{layer}self_attn.o_proj": (d, heads),
        f"{layer}mlp.gate_proj": (inner, d),
        f"{layer}mlp.up_proj": (inner, d),
        f"{layer}mlp.down_proj": (d, inner),
        f"{layer}post_attention_layernorm": (d,),
        "fc": (d, captured if c.version == 3 else 2 * d),
    }
    if c.version == 3:
        shapes |= {
            f"{layer}input_layernorm": (d,),
            f"{layer}hidden_norm": (d,),
            "norm": (d,),
            "lm_head": (c.outputs, d),
        }
        shapes |= {f"fc_norm.{i}": (d,) for i in range(len(c.captured_layers))} if c.fc_norm else {}
        shapes |= {"input_norm": (captured,)} if c.norm_before_fc else {}
    return {f"{name}.weight": (shape, "float") for name, shape in shapes.items()}


def _map_shapes(c: EagleConfig) -> Shapes:
    return {"d2t": ((c.outputs,), "int64"), "t2d": ((c.vocab_size,), "bool")}


def _fields(c: EagleConfig) -> dict[str, Any]:
    """Fields of a Llama's config in every format."""
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(c, name) for name in SIZES},
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_parameters": c.rope_parameters,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


class NoPlace(ValueError):
    """A format has no place for such a drafter."""


def check_form(drafter: Eagle | MedusaHeads, to: str) -> None:
    """Refuse a drafter that a format has no place for.

    vLLM makes EAGLE-1's ``fc`` without a bias, and its loader skips one without a word.
    Raises NoPlace: it has none."""
    c = drafter.config
    if isinstance(c, MedusaConfig):
        if to not in ("medusa", "vllm"):
            raise NoPlace(f"Medusa heads: {to} runs none; use --to medusa, or --to vllm (up to 0.32)")
        if c.projection == "own" and c.draft_vocab_size is not None:
            raise NoPlace(
                f"its heads have rows of their own for a draft vocabulary, for which {to} has no place; train them "
                "with drafter.projection=shared, or with all tokens"
            )
        return
    if to == "medusa":
        raise NoPlace("an EAGLE drafter: the format medusa holds Medusa heads alone; use --to vllm or --to sglang")
    captured = list(c.captured_layers)
    for name in ("attention_bias", "own_embeddings", "target_hidden_size"):  # of drafters that were imported
        if getattr(c, name):
            droppers = [reader.name for key, reader in READERS.items() if key not in READ_BY.get(name, EVERY)]
            but = f", but not in {', '.join(droppers)}, which leave it out without a word" if droppers else ""
            raise NoPlace(f"it has {name}, which is not exported: serve the published folder it was imported from{but}")
    if c.version == 1:
        if to in ("speculators", "openvino"):
            raise NoPlace(f"an EAGLE-1 drafter: {to} holds EAGLE-3 alone; use --to vllm or --to sglang")
        bias = cast(Eagle, drafter).fc.bias
        if to == "vllm" and bias is not None and bias.any():
            raise NoPlace(
                "its fc has a bias, which vLLM skips without a word, and then drafts with another model: use --to "
                "sglang, or train it with drafter.bias=false"
            )
        return
    if captured != sorted(captured):
        raise NoPlace(f"it captures layers {captured} of the target; servers take them in ascending order")
    if to in ("speculators", "openvino") and len(captured) != 3:
        raise NoPlace(f"it captures layers {captured} of the target; {to} holds three; use --to vllm")
    dropped = [name for name in (*NORMS, "norm_before_residual") if getattr(c, name) and to not in READ_BY[name]]
    if dropped:
        raise NoPlace(
            f"it has {dropped[0]}, which {READERS[to].name} leaves out without a word, and then drafts with another "
            "model: use --to vllm, or train one without it"
        )
    if to != "speculators" and 0 in captured:  # it is no layer's output, by which SGLang names it
        raise NoPlace(f"it captures layer 0, which {to} has no name for; use --to speculators, which vLLM serves")


# ---- the formats


Written = tuple[dict[str, Tensor], dict[str, Any], Contract]  # tensors, config.json


def _check_embeddings(eagle: Eagle, target: Target, to: str) -> None:
    """Raise a ValueError where a drafter reads other embeddings in a server than in training: some families scale them,
    and servers give the stored ones. EAGLE-3 takes their norm, which undoes a scale but for its epsilon."""
    c, embed = eagle.config, target.model.get_input_embeddings()
    some = torch.arange(min(64, c.vocab_size), device=target.device)
    read, given = embed(some).float(), cast(Tensor, embed.weight)[some].float()
    if c.version == 3:
        read, given = (F.rms_norm(each, (c.hidden_size,), eps=c.rms_norm_eps) for each in (read, given))
    allowed = 2**-8 if c.version == 3 else 0.0  # bfloat16's rounding
    if ((read - given).norm(dim=-1) > allowed * read.norm(dim=-1)).any():
        raise ValueError(
            f"target '{target.name}' scales its embeddings; {to} gives the stored ones to EAGLE-{c.version}, which "
            "then drafts worse; use --to speculators, which holds the embeddings of EAGLE-3"
        )


def _eagle3(source: Source, to: str) -> Written:
    """EAGLE-3 for SGLang, vLLM and OpenVINO's converter, without embeddings: all share the target's."""
    c = source.eagle.config
    if source.target is not None:
        _check_embeddings(source.eagle, source.target, to)
    norms = {name: True for name in NORMS if getattr(c, name)}
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": c.outputs,
        "norm_before_residual": c.norm_before_residual,
        "num_aux_hidden_states": len(c.captured_layers),
    }
    config = {**_llama(source), **own, **norms, "target_hidden_size": c.hidden_size}
    layers = source.target_config.get_text_config().num_hidden_layers
    ids = {"eagle_aux_hidden_state_layer_ids", "eagle_config"}
    if c.captured_layers != (2, layers // 2, layers - 3):
        # vLLM counts the layer that a state enters, SGLang the one whose output it is.
        before = [layer - 1 for layer in c.captured_layers]
        config["eagle_aux_hidden_state_layer_ids"] = list(c.captured_layers)
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": before}
        ids = set()
    tensors, shapes = _tensors(source, "midlayer."), _shapes(c, "midlayer.")
    # With all of V vLLM has no place for them, and SGLang keeps the LM head as it is; OpenVINO's converter writes what
    # is in memory as a missing d2t.
    if c.outputs < c.vocab_size or to == "openvino":
        tensors, shapes = tensors | _maps(source.eagle), shapes | _map_shapes(c)
    return tensors, config, Contract(shapes, {**_fields(c), **own, **norms}, frozenset(ids))


def _eagle1(source: Source, to: str) -> Written:
    """EAGLE-1, for servers that share the target's embeddings and LM head: drafts may be any token. SGLang makes ``fc``
    with a bias."""
    c, target = source.eagle.config, source.loaded()
    _check_embeddings(source.eagle, target, to)
    tensors, shapes = _tensors(source, "layers.0."), _shapes(c, "layers.0.")
    bias = tensors.pop("fc.bias", torch.zeros(c.hidden_size, dtype=source.dtype))
    if to == "sglang":
        tensors["fc.bias"], shapes["fc.bias"] = bias, ((c.hidden_size,), "float")
    own = {"architectures": ["LlamaForCausalLMEagle" if to == "sglang" else "LlamaForCausalLM"]}
    forbidden = frozenset({"draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"})
    return tensors, {**_llama(source), **own}, Contract(shapes, {**_fields(c), **own}, forbidden)


def _speculators(source: Source, served_target: str, speculative_tokens: int) -> Written:
    """EAGLE-3 for the package speculators and for ``vllm serve``, with the embeddings that the drafter reads."""
    c, target = source.eagle.config, source.loaded()
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    own = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": c.outputs,
        "target_hidden_size": c.hidden_size,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(c.captured_layers),
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
    }
    verifier = {"name_or_path": served_target, "architectures": source.target_config.architectures or []}
    config = {
        **own,
        "tie_word_embeddings": False,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **_llama(source)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }
    tensors, shapes = _tensors(source, "layers.0."), _shapes(c, "layers.0.")
    every = torch.arange(c.vocab_size, device=target.device)
    tensors["embed_tokens.weight"] = source.rows(target.model.get_input_embeddings()(every))
    shapes["embed_tokens.weight"] = (c.vocab_size, c.hidden_size), "float"
    if c.outputs < c.vocab_size:  # with all of V the package has no place for them
        tensors, shapes = tensors | _maps(source.eagle), shapes | _map_shapes(c)
    fields = {
        **own,
        **{f"transformer_layer_config.{name}": value for name, value in _fields(c).items()},
        "speculators_config.algorithm": "eagle3",
        "speculators_config.default_proposal_method": "greedy",
        "speculators_config.proposal_methods": [proposal],
        "speculators_config.verifier": verifier,
    }
    return tensors, config, Contract(shapes, fields, frozenset({"model_type", "eagle_config"}))


def medusa_tensors(heads: MedusaHeads, lm_head: nn.Module) -> dict[str, Tensor]:
    """Heads by the published names, ``{head}.{layer}.linear.{weight, bias}`` and ``{head}.{layers}.weight``: every head
    with a matrix ``[V, d]`` of its own, a copy of the target's LM head where heads share it.
    Raises ValueError: an LM head with a bias."""
    c = heads.config
    if c.projection == "shared" and getattr(lm_head, "bias", None) is not None:
        raise ValueError("the target's LM head has a bias, for which the format has no place")
    tensors = {}
    for k in range(c.num_draft_heads):
        for layer in range(c.num_layers):  # ours: x @ weight + bias; nn.Linear: x @ weight.T + bias
            tensors[f"{k}.{layer}.linear.weight"] = heads.weight[layer, k].detach().t().contiguous()
            tensors[f"{k}.{layer}.linear.bias"] = heads.bias[layer, k, 0].detach().clone()
        matrix = cast(nn.Linear, lm_head).weight if heads.projection is None else heads.projection[k]
        tensors[f"{k}.{c.num_layers}.weight"] = matrix.detach().clone()
    return tensors


def _medusa_shapes(c: MedusaConfig) -> Shapes:
    d, shapes = c.hidden_size, Shapes()
    for k in range(c.num_draft_heads):
        for layer in range(c.num_layers):
            shapes[f"{k}.{layer}.linear.weight"] = (d, d), "float"
            shapes[f"{k}.{layer}.linear.bias"] = (d,), "float"
        shapes[f"{k}.{c.num_layers}.weight"] = (c.vocab_size, d), "float"
    return shapes


def _medusa(source: Source, served_target: str) -> Written:
    """Medusa heads in the published layout."""
    heads, c = source.heads, source.heads.config
    tensors = {name: source.rows(t) for name, t in medusa_tensors(heads, source.loaded().lm_head).items()}
    fields = {"medusa_num_heads": c.num_draft_heads, "medusa_num_layers": c.num_layers, "version": "2"}
    config = {**fields, "base_model_name_or_path": served_target}
    return tensors, config, Contract(_medusa_shapes(c), fields, frozenset({"model_type"}), PUBLISHED_MEDUSA)


def _vllm_medusa(source: Source) -> Written:
    """Medusa heads as vLLM up to 0.32 reads them, the target's LM head once where heads share it, with the rows of all
    tokens: that server has a place for a draft vocabulary (``token_map``), but then refuses it as not initialised."""
    heads, c, lm_head = source.heads, source.heads.config, source.loaded().lm_head
    shared = heads.projection is None
    if shared and getattr(lm_head, "bias", None) is not None:
        raise ValueError("the target's LM head has a bias, for which vLLM has no place")
    last = f".{c.num_layers}.weight"

    def name_of(published: str) -> str:
        if published.endswith(last):
            return f"lm_heads.{published.removesuffix(last)}.weight"
        return "blocks." + published.replace(".", ".layers.", 1).replace(".linear", "")

    def once(name: str) -> bool:
        return not shared or not name.endswith(last) or name == f"0{last}"

    tensors = {name_of(n): source.rows(t) for n, t in medusa_tensors(heads, lm_head).items() if once(n)}
    shapes = {name_of(name): shape for name, shape in _medusa_shapes(c).items() if once(name)}
    fields = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "num_heads": c.num_draft_heads,
        "num_hidden_layers": c.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "truncated_vocab_size": c.vocab_size,
    }
    config = {**fields, "torch_dtype": str(source.dtype).removeprefix("torch.")}
    return tensors, config, Contract(shapes, fields, frozenset({"medusa_num_heads"}))


def written(source: Source, to: str, served_target: str, speculative_tokens: int) -> Written:
    """Tensors, config.json and contract of a format. Raises ValueError: it has no place for this drafter."""
    if isinstance(source.drafter, MedusaHeads):
        return _medusa(source, served_target) if to == "medusa" else _vllm_medusa(source)
    if to == "speculators":
        return _speculators(source, served_target, speculative_tokens)
    return _eagle1(source, to) if source.eagle.config.version == 1 else _eagle3(source, to)
