"""Write an EAGLE drafter in the format of a serving program, and check what was written.

    python models/export.py runs/mine --to vllm --out served/mine           # EAGLE-3: the same folder as for sglang
    python models/export.py runs/mine --to speculators --out served/mine    # then: vllm serve served/mine
    python models/export.py runs/mine --to sglang --out served/mine --push-to-hub USER/NAME

Servers skip tensors and fields that they do not know and then draft with random weights, without a word. So each format
has a contract here: its tensors with shape and dtype and no others, fields of config.json with their values, and fields
that must not be there. After the files are written, logits are computed from them alone (models/exported.py) and
compared with the drafter's own on random features: at each position, and for the further tokens of a draft. If anything
differs, nothing is kept.

The target is loaded only where its weights are needed: its embeddings for speculators, its LM head for a drafter that
has none of its own. Otherwise its config.json is enough.
"""

# ruff: noqa: E402

import argparse
from pathlib import Path

from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_own
from draftsmith.models.stored import check_drafter_name

FORMATS = ("sglang", "vllm", "speculators")


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", help="the folder or Hub id of an EAGLE drafter, for example runs/mine")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder to write")
    parser.add_argument("--target", help="the target, if it is not where the drafter's config says")
    parser.add_argument(
        "--served-target", metavar="NAME", help="what the server loads the target by, if not by the same name"
    )
    parser.add_argument(
        "--speculative-tokens", type=int, default=3, metavar="N",
        help="length of a draft, in speculators' config and in the model card's commands (default 3)",
    )  # fmt: skip
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="upload the folder")
    parser.add_argument("--private", action="store_true", help="as a private repository, if it is created")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    return parser


def check_output(out: Path) -> None:
    """Check the folder to write, which is a new one, an empty one, or one that this command wrote before.

    Raises:
        ValueError: it holds something else.
    """
    check_own("--out", out, {"provenance.json": "max_logit_difference"})
    if out.is_dir() and any(out.iterdir()) and not (out / "provenance.json").exists():
        there = sorted(path.name for path in out.iterdir())
        more = ", …" if len(there) > 3 else ""
        raise ValueError(f"--out {out}: it holds other things ({', '.join(there[:3])}{more}); name another folder")


def check(args: argparse.Namespace) -> None:
    """What can be known to be wrong before torch is imported.

    Raises:
        FileNotFoundError, ValueError: one line.
    """
    check_output(args.out)
    if args.speculative_tokens < 1:
        raise ValueError(f"--speculative-tokens {args.speculative_tokens}: it has to be above 0")
    if args.served_target == "":
        raise ValueError("--served-target: the name is empty; leave it out for the target's own")
    if args.private and args.push_to_hub is None:
        raise ValueError("--private is for --push-to-hub; leave it out")
    if args.push_to_hub is not None:
        from draftsmith.common.sections import check_repository  # pydantic

        try:
            check_repository(args.push_to_hub)
        except ValueError as error:
            raise ValueError(f"--push-to-hub '{args.push_to_hub}': {error}") from None
    check_drafter_name(args.drafter)


if __name__ == "__main__":
    before_imports(parser(), check)

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig

from draftsmith.common.command import first_line
from draftsmith.common.files import check_folder, json_object, replacing_folder, write_json, write_text
from draftsmith.models.artifact import check_target, provenance, push, read_drafter
from draftsmith.models.card import measured, named
from draftsmith.models.eagle import Eagle, EagleConfig
from draftsmith.models.exported import difference
from draftsmith.models.precision import DTYPES
from draftsmith.models.stored import resolve_folder, safetensors_header, save_tensors, stored_dtype
from draftsmith.models.target import Target, load_target
from draftsmith.models.vocabulary import head_rows

SPECULATORS = "0.9.0"  # version of the package that tests/speculators_package.py was run with
_DTYPES = {"F32": "float", "BF16": "float", "F16": "float", "I64": "int64", "BOOL": "bool"}

Shapes = dict[str, tuple[tuple[int, ...], str]]  # of tensors by name, with the kind of their dtype


@dataclass(frozen=True)
class Contract:
    """What a server reads.

    tensors: all that there are. fields: of config.json, ``a.b`` for field b of object a. forbidden: fields that must
    not be there.
    """

    tensors: Shapes
    fields: Mapping[str, Any]
    forbidden: frozenset[str]

    def check(self, folder: Path) -> None:
        """Compare a written folder with it.

        Raises:
            ValueError: a tensor or field is missing, has another shape, dtype or value, or must not be there.
        """
        header = safetensors_header(folder / "model.safetensors")[1]
        stored = {n: (tuple(e["shape"]), _DTYPES.get(e["dtype"], e["dtype"])) for n, e in header.items()}
        for name in sorted({*self.tensors, *stored}):
            found, wanted = stored.get(name, "absent"), self.tensors.get(name, "absent")
            if found != wanted:
                raise ValueError(f"model.safetensors: '{name}' is {found}; the format has it {wanted}")
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

    eagle: in float32. weights: as stored. target_config: of ``transformers``. target: None where its weights are not
    needed. folder: the drafter's. fingerprint: of its target.
    """

    eagle: Eagle
    weights: Mapping[str, Tensor]
    target_name: str
    target_config: Any
    target: Target | None
    folder: Path
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["fc.weight"].dtype

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
        "model_type": "llama", "num_hidden_layers": 1, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "intermediate_size": c.intermediate_size, "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps, "max_position_embeddings": c.max_position_embeddings,
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "rope_parameters": c.rope_parameters, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "torch_dtype": str(source.dtype).removeprefix("torch."),
        "bos_token_id": getattr(text, "bos_token_id", None), "eos_token_id": getattr(text, "eos_token_id", None),
    }  # fmt: skip


# ---- what the formats have in common


def _shapes(c: EagleConfig, layer: str) -> Shapes:
    """Tensors of every format, by the drafter's sizes."""
    d, inner, captured = c.hidden_size, c.intermediate_size, 3 * c.hidden_size
    heads, groups = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    wide = 2 * d if c.version == 3 else d
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}self_attn.q_proj": (heads, wide), f"{layer}self_attn.k_proj": (groups, wide),
        f"{layer}self_attn.v_proj": (groups, wide), f"{layer}self_attn.o_proj": (d, heads),
        f"{layer}mlp.gate_proj": (inner, d), f"{layer}mlp.up_proj": (inner, d), f"{layer}mlp.down_proj": (d, inner),
        f"{layer}post_attention_layernorm": (d,), "fc": (d, captured if c.version == 3 else 2 * d),
    }  # fmt: skip
    if c.version == 3:
        shapes |= {
            f"{layer}input_layernorm": (d,),
            f"{layer}hidden_norm": (d,),
            "norm": (d,),
            "lm_head": (c.outputs, d),
        }
        shapes |= {f"fc_norm.{i}": (d,) for i in range(3)} if c.fc_norm else {}
        shapes |= {"input_norm": (captured,)} if c.norm_before_fc else {}
    return {f"{name}.weight": (shape, "float") for name, shape in shapes.items()}


def _map_shapes(c: EagleConfig) -> Shapes:
    return {"d2t": ((c.outputs,), "int64"), "t2d": ((c.vocab_size,), "bool")}


def _fields(c: EagleConfig) -> dict[str, Any]:
    """Fields of a Llama's config in every format."""
    return {
        "model_type": "llama", "num_hidden_layers": 1, "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "head_dim": c.head_dim, "max_position_embeddings": c.max_position_embeddings, "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_parameters["rope_theta"], "rope_parameters": c.rope_parameters,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    }  # fmt: skip


def check_form(c: EagleConfig, to: str) -> None:
    """Refuse a drafter that a format has no place for.

    Raises:
        ValueError: it has none.
    """
    captured = list(c.captured_layers)
    for name in ("attention_bias", "own_embeddings", "target_hidden_size"):  # of drafters that were imported
        if getattr(c, name):
            raise ValueError(f"it has {name}, which is not exported: serve the published folder it was imported from")
    if c.version == 1 and to != "vllm":
        raise ValueError(f"an EAGLE-1 drafter: {to} holds EAGLE-3 alone; use --to vllm")
    if c.version == 3 and (len(captured) != 3 or captured != sorted(captured)):
        raise ValueError(
            f"it captures layers {captured} of the target; sglang, vllm and speculators hold three, in ascending order"
        )
    if to == "speculators":
        return
    if c.norm_before_fc:
        raise ValueError(f"it has norm_before_fc, for which {to} has no place; use --to speculators, which vLLM serves")
    if 0 in captured:  # it is no layer's output, by which SGLang names it
        raise ValueError(f"it captures layer 0, which {to} has no name for; use --to speculators, which vLLM serves")


# ---- the formats


Written = tuple[dict[str, Tensor], dict[str, Any], Contract]  # tensors, config.json


def _eagle3(source: Source) -> Written:
    """EAGLE-3 for SGLang and vLLM, without embeddings: both share the target's."""
    c = source.eagle.config
    norms = {name: True for name in ("fc_norm", "norm_output") if getattr(c, name)}
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": c.outputs}
    own["norm_before_residual"] = c.norm_before_residual
    config = {**_llama(source), **own, **norms, "target_hidden_size": c.hidden_size}
    layers = source.target_config.get_text_config().num_hidden_layers
    ids = {"eagle_aux_hidden_state_layer_ids", "eagle_config"}
    if c.captured_layers != (2, layers // 2, layers - 3):
        # vLLM counts the layer that a state enters, SGLang the one whose output it is.
        before = [layer - 1 for layer in c.captured_layers]
        config["eagle_aux_hidden_state_layer_ids"] = list(c.captured_layers)
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": before}
        ids = set()
    contract = Contract(
        _shapes(c, "midlayer.") | _map_shapes(c), {**_fields(c), **own, **norms}, frozenset({"norm_before_fc", *ids})
    )
    return _tensors(source, "midlayer.") | _maps(source.eagle), config, contract


def _eagle1(source: Source) -> Written:
    """EAGLE-1 for vLLM, which shares the target's embeddings and LM head: drafts may be any token."""
    c, target = source.eagle.config, source.loaded()
    embed = target.model.get_input_embeddings()
    some = torch.arange(min(64, c.vocab_size), device=target.device)
    if not torch.equal(embed(some), cast(Tensor, embed.weight)[some]):
        raise ValueError(f"target '{target.name}' scales its embeddings; vLLM gives the stored ones to EAGLE-1")
    tensors = _tensors(source, "layers.0.")
    biased = bool(tensors["fc.bias"].any())
    if not biased:
        del tensors["fc.bias"]
    own = {"architectures": ["LlamaForCausalLM"], "eagle_fc_bias": biased}
    shapes = _shapes(c, "layers.0.") | ({"fc.bias": ((c.hidden_size,), "float")} if biased else {})
    forbidden = frozenset({"draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids"})
    return tensors, {**_llama(source), **own}, Contract(shapes, {**_fields(c), **own}, forbidden)


def _speculators(source: Source, served_target: str, speculative_tokens: int) -> Written:
    """EAGLE-3 for the package speculators and for ``vllm serve``, with the embeddings that the drafter reads."""
    c, target = source.eagle.config, source.loaded()
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": speculative_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    own = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": SPECULATORS,
        "draft_vocab_size": c.outputs, "target_hidden_size": c.hidden_size, "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(c.captured_layers), "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc, "fc_norm": c.fc_norm, "norm_output": c.norm_output,
    }  # fmt: skip
    verifier = {"name_or_path": served_target, "architectures": source.target_config.architectures or []}
    config = {
        **own, "tie_word_embeddings": False, "torch_dtype": str(source.dtype).removeprefix("torch."),
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **_llama(source)},
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }  # fmt: skip
    tensors, shapes = _tensors(source, "layers.0."), _shapes(c, "layers.0.")
    every = torch.arange(c.vocab_size, device=target.device)
    tensors["embed_tokens.weight"] = source.rows(target.model.get_input_embeddings()(every))
    shapes["embed_tokens.weight"] = (c.vocab_size, c.hidden_size), "float"
    if c.outputs < c.vocab_size:  # with all of V the package has no place for them
        tensors, shapes = tensors | _maps(source.eagle), shapes | _map_shapes(c)
    fields = {
        **own, **{f"transformer_layer_config.{name}": value for name, value in _fields(c).items()},
        "speculators_config.algorithm": "eagle3", "speculators_config.default_proposal_method": "greedy",
        "speculators_config.proposal_methods": [proposal], "speculators_config.verifier": verifier,
    }  # fmt: skip
    return tensors, config, Contract(shapes, fields, frozenset({"model_type", "eagle_config"}))


# ---- the command


def open_source(name: str, to: str, target_name: str | None = None, trust_remote_code: bool = False) -> Source:
    """Read a drafter, and of its target what the format needs.

    Args:
        target_name: folder or Hub id; what the drafter's config says if left out.

    Raises:
        FileNotFoundError, ValueError: drafter or target is missing or damaged, they do not belong together, or the
            format has no place for such a drafter.
    """
    folder, config, weights = read_drafter(name)
    kind = config["drafter_type"]
    if kind != "eagle":
        instead = "sglang, vllm and speculators hold EAGLE drafters"
        if kind == "medusa":
            instead = "SGLang, and vLLM from 0.33 on, run no Medusa heads; python inference/decode.py does"
        elif kind == "ssm":
            part = next(iter(config.get("parts", ["ssm-0"])))
            instead = f"each SSM is already a causal LM, which servers take as a draft model: {folder / part}"
        raise ValueError(f"{folder}: a drafter of type {kind} is not exported to {to}: {instead}")
    eagle = Eagle.from_artifact(config, weights, str(folder))
    c, trained_for = eagle.config, str(config["target"]["name_or_path"])
    fingerprint = str(config["target"].get("fingerprint") or "")
    try:
        check_form(c, to)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if config["target"].get("adapter"):
        raise ValueError(f"{folder}: it was trained with an adapter of its target, which a server's target lacks")
    name = target_name or trained_for
    empty = [part for part, weight in weights.items() if weight.dim() == 2 and not weight.any()]
    if empty:
        raise ValueError(f"{folder}: '{empty[0]}' has zeros alone, so that it drafts nothing; train it anew")
    revision = None if target_name else config["target"].get("revision")
    needed = c.projection == "shared" or to == "speculators"
    stored = resolve_folder(name, revision, weights=needed)
    if not needed:
        try:
            target_config: Any = AutoConfig.from_pretrained(stored, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises many types for wrong fields
            raise ValueError(f"{stored}/config.json: transformers refuses it ({first_line(error)})") from None
        width = target_config.get_text_config().hidden_size
        if width != c.hidden_size:
            raise ValueError(
                f"{folder}: this drafter was trained for target '{trained_for}', not for '{name}': hidden_size "
                f"{c.hidden_size} ≠ {width}"
            )
        return Source(eagle, weights, name, target_config, None, folder, fingerprint)
    dtype = stored_dtype(stored)
    target = load_target(
        name, revision=revision, dtype=dtype if dtype in DTYPES else "float32", trust_remote_code=trust_remote_code
    )
    check_target(folder, config, target)
    if c.version == 3 and c.projection == "shared" and getattr(target.lm_head, "bias", None) is not None:
        raise ValueError(f"{folder}: the LM head of target '{name}' has a bias, for which {to} has no place")
    return Source(eagle, weights, name, target.model.config, target, folder, fingerprint)


def export(
    source: Source, to: str, out: Path, served_target: str | None = None, speculative_tokens: int = 3,
    facts: Mapping[str, Any] | None = None,
) -> float:  # fmt: skip
    """Write a folder, check its contract and read it back; all of it is kept, or nothing.

    Args:
        to: one of :data:`FORMATS`.
        served_target: what a server loads the target by; the source's name for it if left out.
        facts: what provenance.json records besides.

    Returns:
        The largest difference of logits, in float32.

    Raises:
        ValueError: what was written is not what the format needs, or its logits differ.
        OSError: the disk is full, or it cannot be written.
    """
    if to == "speculators":
        tensors, config, contract = _speculators(source, served_target or source.target_name, speculative_tokens)
    else:
        tensors, config, contract = (_eagle1 if source.eagle.config.version == 1 else _eagle3)(source)
    with replacing_folder(out) as temporary:
        save_tensors(tensors, temporary / "model.safetensors")
        write_json(temporary / "config.json", config)
        contract.check(temporary)
        apart = difference(temporary, source.eagle, source.target)
        write_json(temporary / "provenance.json", provenance(format=to, max_logit_difference=apart, **(facts or {})))
        card = _card(source, out.resolve().name, to, served_target, speculative_tokens)
        write_text(temporary / "README.md", card)
    return apart


def _card(source: Source, name: str, to: str, served_target: str | None, tokens: int) -> str:
    """The model card, with the commands that serve the drafter."""
    c, trained = source.eagle.config, source.folder / "provenance.json"
    whose = named(source.target_name, source.fingerprint, source.target_config.model_type, served_target)
    licence = json_object(trained).get("licence") if trained.exists() else None
    method, server = ("eagle3", "vLLM and SGLang") if c.version == 3 else ("eagle", "vLLM")
    server = "vLLM and the package speculators" if to == "speculators" else server
    options = json.dumps({"method": method, "model": "DRAFTER", "num_speculative_tokens": tokens})
    commands = f"vllm serve {whose.argument} --speculative-config '{options}'"
    if to == "speculators":
        commands = "vllm serve DRAFTER"
    elif c.version == 3:
        commands += f"""
python -m sglang.launch_server --model-path {whose.argument} --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path DRAFTER --speculative-num-steps {tokens} --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens {tokens + 1}"""
    return f"""{whose.front_matter(licence, method)}
# {name}: an EAGLE-{c.version} drafter for {whose.name}, for {server}

Trained and exported by draftsmith, for `{whose.name}` alone and {c.max_position_embeddings:,} positions.{whose.about}
With this folder's path or Hub id in place of DRAFTER:

```bash
{commands}
```

Logits computed from these files were compared with the drafter's own; `provenance.json` has the largest difference.

{whose.licensed(licence)}

## Measured

By draftsmith, before the export; its engine verifies trees, servers verify chains. No server has run this folder.

{measured(source.folder)}
"""


def main() -> None:
    args = parser().parse_args()
    check(args)
    source = open_source(args.drafter, args.to, args.target, args.trust_remote_code)
    positions = source.eagle.config.max_position_embeddings
    if args.speculative_tokens >= positions:
        raise ValueError(f"--speculative-tokens {args.speculative_tokens}: the drafter has {positions} positions")
    check_folder("--out", args.out)
    facts = {
        "drafter": Path(args.drafter).resolve().name, "target": source.target_name,
        "command": f"python models/export.py {shlex.join(sys.argv[1:])}",
    }  # fmt: skip
    try:
        apart = export(source, args.to, args.out, args.served_target, args.speculative_tokens, facts)
    except ValueError as error:
        raise ValueError(f"{args.drafter} --to {args.to}: {error}") from None
    size = (args.out / "model.safetensors").stat().st_size / 1e6
    print(f"{args.out}: {size:,.1f} MB for {args.to}; its logits, read back, differ by {apart:.1e} at most")
    if source.eagle.config.version == 1 and source.eagle.draft_vocab is not None:
        print("a draft vocabulary has no place there: vLLM drafts from all tokens, by the target's own LM head")
    if args.push_to_hub:
        print(f"uploading to {args.push_to_hub} …")
        print(push(args.out, args.push_to_hub, args.private))


if __name__ == "__main__":
    run_command(main)
