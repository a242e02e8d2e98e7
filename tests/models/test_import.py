"""Import of published drafters: each format as a miniature of random weights against an independent computation, what
is refused, and export and import as each other's inverse."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from exported_logits import own_logits, read_back
from made import llama3, write_eagle, write_heads
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from draftsmith.inference import decode
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.parallel_eagle import drafter_of
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.verify.tree import Topology
from draftsmith.models import export, import_drafter
from draftsmith.models.artifact import read_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.from_published import read_published
from draftsmith.models.serving.published import TargetInfo, convert
from draftsmith.models.serving.source import open_source
from draftsmith.models.target import load_target

TARGET = "models/tiny-lm"
V, S, D, INNER, LAYERS, POSITIONS = 61, 20, 32, 48, 8, 256  # of the target of make_target
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = llama3(64)
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"truncate": False, "original_max_position_embeddings": 16}
SIZES = {"hidden_size": D, "intermediate_size": INNER, "num_attention_heads": 4, "vocab_size": V}
LLAMA = SIZES | {"num_key_value_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": POSITIONS}
LLAMA |= {"model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
LLAMA |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True}
LLAMA |= {"torch_dtype": "float16", "transformers_version": "4.53.1"}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
MODELOPT = dict.fromkeys(
    ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"), True
)
MODELOPT |= {"use_mtp_layernorm": False, "parallel_draft_step": 1, "eagle_aux_hidden_state_layer_ids": [0, 3, 5]}


def scaling(rope: dict) -> dict:
    """Rotary parameters in the older way."""
    kind = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if kind == {"rope_type": "default"} else kind}


# name: config, prefix of the layer, options of ``tensors_of``, expected fields of our config
FORMATS = {
    "EAGLE-1": (
        {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": True, "pretraining_tp": 1, **scaling(LLAMA3)},
        "layers.0.", {"version": 1, "fc_bias": True, "outputs": None, "embed": "target"}, {"rope_parameters": LLAMA3},
    ),
    "EAGLE-1 of Qwen2": (
        {**LLAMA, **QWEN2, "architectures": ["Qwen2ForCausalLM"], "bias": False},
        "layers.0.", {"version": 1, "outputs": None, "qkv_bias": True, "embed": "own"},
        {"attention_bias": True, "own_embeddings": True},
    ),
    "EAGLE-1 of SGLang": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle"]},
        "model.layers.0.", {"version": 1, "fc_bias": True, "outputs": None}, {},
    ),
    "EAGLE-3": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": S, "max_position_embeddings": 2048,
         "num_hidden_layers": 40},
        "midlayer.", {}, {"captured_layers": (2, 4, 5), "draft_vocab_size": S, "max_position_embeddings": POSITIONS},
    ),
    "EAGLE-3 of all tokens": (
        {**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": V, "rope_theta": 1000000,
         "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
         "num_aux_hidden_states": 3},
        "layers.0.", {"outputs": V},
        {"captured_layers": (1, 3, 6), "draft_vocab_size": None, "rope_parameters": {**PLAIN, "rope_theta": 1000000.0}},
    ),
    "EAGLE-3 without an LM head": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None},
        "midlayer.", {"outputs": None}, {"projection": "shared"},
    ),
    "EAGLE-3 of another width": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": S, "hidden_size": 24, "head_dim": 6,
         "target_hidden_size": D},
        "midlayer.", {"width": 24, "heads": 6, "embed": "own"}, {"own_embeddings": True, "target_hidden_size": D},
    ),
    "ModelOpt": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": S, "eagle_config": MODELOPT,
         **scaling(YARN)},
        "layers.0.", {"maps": ("d2t",)}, {"captured_layers": (1, 4, 6), "rope_parameters": YARN},
    ),
    "speculators": (
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
         "draft_vocab_size": S, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
         "speculators_config": {"algorithm": "eagle3"}, "has_no_defaults_at_init": False,
         "transformer_layer_config": {**LLAMA, "head_dim": 16, "attention_bias": False, "mlp_bias": False,
                                      "rope_parameters": LLAMA3}},
        "layers.0.", {"heads": 16, "embed": "own"},
        {"captured_layers": (2, 4, 7), "norm_before_residual": True, "own_embeddings": True, "head_dim": 16,
         "rope_parameters": LLAMA3},
    ),
    "P-EAGLE": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": S, "ptd_token_id": 7,
         "norm_before_residual": False},
        "layers.0.", {"mask": True},
        {"parallel": 8, "mask_token_id": 7, "draft_vocab_size": S, "norm_before_residual": False},
    ),
    "P-EAGLE of speculators": (
        {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "draft_vocab_size": S,
         "eagle_aux_hidden_state_layer_ids": [2, 4, 7], "mask_token_id": 9, "norm_before_fc": False,
         "speculators_config": {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": 5}]},
         "transformer_layer_config": {**LLAMA, "rope_parameters": LLAMA3}},
        "layers.0.", {"embed": "own", "mask": True},
        {"parallel": 5, "mask_token_id": 9, "captured_layers": (2, 4, 7), "own_embeddings": True,
         "norm_before_residual": False, "rope_parameters": LLAMA3},
    ),
    "P-EAGLE of four layers": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": S, "pard_token": 7,
         "num_hidden_layers": 4, "norm_before_residual": False},
        "layers.0.", {"mask": True, "layers": 4}, {"parallel": 8, "mask_token_id": 7, "num_layers": 4},
    ),
    "EAGLE-3 of two layers": (
        {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": S},
        "midlayer.", {"layers": 2}, {"num_layers": 2},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target(make_target):
    return make_target("llama", num_hidden_layers=LAYERS)


def tensors_of(
    target,
    prefix,
    version=3,
    width=D,
    heads=8,
    outputs=S,
    maps=("d2t", "t2d"),
    fc_bias=False,
    qkv_bias=False,
    embed="",
    mask=False,
    layers=1,
):
    """A published drafter's tensors, random. ``heads``: width of a head. ``outputs``: rows of the LM head. ``mask``: of
    P-EAGLE."""
    torch.manual_seed(7)
    wide = 2 * width if version == 3 else width
    rows = {"q": 4 * heads, "k": 2 * heads, "v": 2 * heads}
    shapes = {f"self_attn.{name}_proj": (count, wide) for name, count in rows.items()}
    shapes |= {"self_attn.o_proj": (width, 4 * heads), "mlp.gate_proj": (INNER, width), "mlp.up_proj": (INNER, width)}
    shapes |= {"mlp.down_proj": (width, INNER), "post_attention_layernorm": (width,)}
    shapes |= {"input_layernorm": (width,), "hidden_norm": (width,)} if version == 3 else {}
    tensors = {f"{prefix}{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    shapes |= {f"self_attn.{name}_proj": (count, width) for name, count in rows.items()}
    for number in range(1, layers):
        own = [name for name in shapes if name != "hidden_norm"]
        tensors |= {f"layers.{number}.{name}.weight": torch.randn(shapes[name]) * 0.3 for name in own}
    if qkv_bias:
        tensors |= {f"{prefix}self_attn.{n}_proj.bias": torch.randn(rows[n]) for n in rows}
    tensors["fc.weight"] = torch.randn(width, 3 * D if version == 3 else 2 * D) * 0.3
    tensors |= {"fc.bias": torch.randn(width)} if fc_bias else {}
    tensors |= {"mask_hidden": torch.randn(1, 1, 3 * D)} if mask else {}
    tensors |= {"norm.weight": torch.randn(width)} if version == 3 else {}
    if embed:
        own = torch.randn(V, width)
        tensors["embed_tokens.weight"] = target.embeddings.weight.clone() if embed == "target" else own
    if outputs:
        tensors["lm_head.weight"] = torch.randn(outputs, width)
        ids = torch.randperm(V)[:outputs].sort().values
        drafted = torch.zeros(V, dtype=torch.bool)
        drafted[ids] = outputs < V  # the published code leaves the maps empty where all tokens are drafted
        tensors |= {"d2t": ids - torch.arange(outputs)} if "d2t" in maps else {}
        tensors |= {"t2d": drafted} if "t2d" in maps else {}
    return tensors


def published(name, target):
    """Config and tensors of a format."""
    config, prefix, options, _ = FORMATS[name]
    return json.loads(json.dumps(config)), tensors_of(target, prefix, **options)


def independent(folder, name, target, features, tokens):
    """Logits by exported_logits.py, from the published tensors and a config that leaves nothing to be assumed."""
    config, tensors = published(name, target)
    expected = FORMATS[name][3]
    layer = config.get("transformer_layer_config", config)
    rope = expected.get("rope_parameters", PLAIN)
    layer |= {"rope_parameters": rope, **scaling(rope)}
    config |= {"norm_before_residual": name == "speculators", "eagle_fc_bias": "fc.bias" in tensors}
    config |= {"mask_token_id": expected.get("mask_token_id")}
    if "norm.weight" in tensors:
        tensors.setdefault("lm_head.weight", target.lm_head.weight.clone())
    if len(tensors.get("lm_head.weight", ())) == V:
        tensors = {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")}
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return read_back(folder, features, tokens, target.embeddings, target.lm_head)


def imported(name, target):
    config, tensors = published(name, target)
    found = convert(config, tensors, TargetInfo.of(target))
    return found, Eagle.from_artifact(found.config.to_dict(), found.weights, "here")


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_logits_are_the_published_drafters(target, tmp_path, name):
    """Of random features and for the further tokens of a draft; and decoding with it changes no text."""
    found, eagle = imported(name, target)
    for field, value in FORMATS[name][3].items():
        assert getattr(found.config, field) == value, field
    torch.manual_seed(1)
    features, tokens = torch.randn(12, D * (1 + len(eagle.config.captured_layers))), torch.randint(V, (15,))
    read = features[:, D:] if eagle.config.version == 3 else features
    wanted = independent(tmp_path, name, target, read, tokens)
    logits = own_logits(eagle, features, tokens, target.embeddings, target.lm_head)
    assert torch.equal(logits.isfinite(), wanted.isfinite()) and float(wanted[wanted.isfinite()].std()) > 0.5
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    prompts = [[5, 7, 11, 3], [9, 2]]
    plain = SpeculativeDecoder(target).generate(prompts, 24)
    drafted = SpeculativeDecoder(target, drafter_of(eagle, target, (2, 1, 1))).generate(prompts, 24)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]


def test_what_is_said_of_an_import(target):
    assert imported("EAGLE-3", target)[0].notes == ("its config says 2,048 positions; it is given the target's 256",)
    found, _ = imported("EAGLE-1", target)
    assert found.notes == ("its embeddings are the target's and are not stored again",)
    assert "embed_tokens.weight" not in found.weights and not found.config.own_embeddings
    note = "its config does not say how many tokens it drafts in a pass: 8, as speculators trains"
    assert note in imported("P-EAGLE", target)[0].notes and not imported("P-EAGLE of speculators", target)[0].notes[1:]
    assert [imported(name, target)[0].config.fc_bias for name in ("EAGLE-1", "EAGLE-1 of Qwen2")] == [True, False]


def test_a_draft_vocabulary_in_another_order(target):
    """Ours ascends: the LM head's rows are put in its order."""
    config, tensors = published("EAGLE-3", target)
    ids = torch.arange(S) + tensors["d2t"]
    order = torch.randperm(S)
    head = tensors["lm_head.weight"]
    tensors |= {"lm_head.weight": head[order], "d2t": ids[order] - torch.arange(S)}
    found = convert(config, tensors, TargetInfo.of(target))
    assert torch.equal(found.weights["draft_vocab"], ids) and torch.equal(found.weights["lm_head.weight"], head)


# ---- Medusa

MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "org/base"}
MEDUSA_NAMES = {  # weight and bias of a block, projection of a head
    "Medusa": ("{h}.{n}.linear.{kind}", "{h}.2.weight"),
    "prefixed": ("medusa_heads.{h}.{n}.linear.{kind}", "medusa_heads.{h}.2.weight"),
    "vLLM": ("blocks.{h}.layers.{n}.{kind}", "lm_heads.{h}.weight"),
}


def medusa_tensors(names="Medusa", own=True):
    torch.manual_seed(8)
    block, last = MEDUSA_NAMES[names]
    sizes = {"weight": (D, D), "bias": (D,)}
    places = [(h, n, kind) for h in range(3) for n in range(2) for kind in sizes]
    tensors = {block.format(h=h, n=n, kind=kind): torch.randn(sizes[kind]) * 0.3 for h, n, kind in places}
    return tensors | ({last.format(h=h): torch.randn(V, D) for h in range(3)} if own else {})


@pytest.mark.parametrize("names, own", [*((names, True) for names in MEDUSA_NAMES), ("Medusa", False)])
@torch.no_grad()
def test_medusa(target, names, own):
    tensors = medusa_tensors(names, own)
    found = convert(MEDUSA, tensors, TargetInfo.of(target))
    assert found.drafter_type == "medusa" and found.config.projection == ("own" if own else "shared")
    heads = MedusaHeads.from_artifact(found.config.to_dict(), found.weights, "here")
    hidden = torch.randn(5, D)
    block, last = MEDUSA_NAMES[names]
    for h, logits in enumerate(heads.logits(hidden, heads.draft_head(target.lm_head))):
        x = hidden
        for n in range(2):
            weight, bias = (tensors[block.format(h=h, n=n, kind=kind)] for kind in ("weight", "bias"))
            x = x + F.silu(x @ weight.T + bias)
        matrix = tensors[last.format(h=h)] if own else target.lm_head.weight
        torch.testing.assert_close(logits, x @ matrix.T, rtol=1e-4, atol=1e-4)
    drafter = MedusaDrafter(heads, Topology(((0,), (0, 0), (0, 0, 0), (1,))), target)
    plain, drafted = (SpeculativeDecoder(target, each).generate([[5, 7, 11]], 24) for each in (None, drafter))
    assert plain[0].tokens == drafted[0].tokens


def test_medusa_of_fewer_tokens(target):
    """vLLM's ``token_map``: output i is token ``token_map[i]``."""
    tensors, ids = medusa_tensors("vLLM"), torch.tensor([9, 4, 60, 7])
    tensors = {n: t[:4] if n.startswith("lm_heads") else t for n, t in tensors.items()} | {"token_map": ids}
    config = {"model_type": "medusa", "num_heads": 3, "truncated_vocab_size": 4, "medusa_fc_bias": True}
    found = convert(config, tensors, TargetInfo.of(target))
    assert found.weights["draft_vocab"].tolist() == [4, 7, 9, 60]
    assert torch.equal(found.weights["projection"][1], tensors["lm_heads.1.weight"][[1, 3, 0, 2]])


def test_more_heads_than_its_config_says(target):
    """The published code makes a fixed number, whatever its configs say."""
    found = convert({**MEDUSA, "medusa_num_heads": 2}, medusa_tensors(), TargetInfo.of(target))
    assert found.config.num_draft_heads == 3 and found.notes == ("its config says 2 heads, its weights hold 3",)


# ---- configs of published drafters and of the programs that train them


def miniature(config):
    """A config with the sizes of this file's drafters; all else as it is."""
    small = {**config, **{name: size for name, size in SIZES.items() if name in config}}
    small |= {"num_key_value_heads": 2, "head_dim": 8} if "num_attention_heads" in config else {}
    for name in ("draft_vocab_size", "truncated_vocab_size"):
        if "vocab_size" in config and name in config:
            small[name] = V if config[name] == config["vocab_size"] else S
    if "transformer_layer_config" in config:
        small |= {"transformer_layer_config": miniature(config["transformer_layer_config"]), "draft_vocab_size": S}
    if "eagle_config" in config:
        small["eagle_config"] = {**config["eagle_config"], "eagle_aux_hidden_state_layer_ids": [0, 3, 5]}
    return small


CONFIGS = json.loads((Path(__file__).parent / "published_configs.json").read_text())


@pytest.mark.parametrize("source", CONFIGS)
def test_configs_as_they_are_published(target, source):
    """With the tensors that such a drafter has; what is expected is beside each in the file."""
    given, expected = CONFIGS[source]["config"], CONFIGS[source]["expected"]
    config = miniature(given)
    whole = config.get("draft_vocab_size", V) == V
    if "refused" in expected:
        with pytest.raises(ValueError, match=expected["refused"]):
            convert(config, tensors_of(target, "midlayer.", outputs=V if whole else S), TargetInfo.of(target))
        return
    if "medusa_num_heads" in given:
        tensors = {n: t for n, t in medusa_tensors().items() if ".1.linear" not in n}
        tensors = {n.replace(".2.weight", ".1.weight"): t for n, t in tensors.items()}
    else:
        version = expected["version"]
        outputs = (V if whole else S) if version == 3 else None
        tensors = tensors_of(target, "layers.0.", version=version, outputs=outputs)
    if given.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": torch.ones(D) for number in range(3)}
    if given.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.ones(3 * D)
    found = convert(config, tensors, TargetInfo.of(target)).config.to_dict()
    assert {name: found[name] for name in expected} == expected


# ---- what is refused


def field(**fields):
    return lambda config, tensors: config.update(fields)


def nested(**fields):
    return lambda config, tensors: config["eagle_config"].update(fields)


def tensor(name, new):
    def change(config, tensors):
        tensors[name] = new(tensors[name]).contiguous() if name in tensors else new(None)

    return change


def without(name):
    return lambda config, tensors: tensors.pop(name)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("EAGLE-3", tensor("midlayer.mlp.down_proj.weight", lambda w: w.T), r"'midlayer.mlp.down_proj.weight' is \[48"),
        ("P-EAGLE of four layers", field(num_hidden_layers=5), "'layers.4.input_layernorm.weight' is missing"),
        ("EAGLE-3", without("midlayer.mlp.up_proj.weight"), "'midlayer.mlp.up_proj.weight' is missing"),
        ("ModelOpt", without("layers.0.mlp.up_proj.weight"), "'layers.0.mlp.up_proj.weight' is missing"),
        ("EAGLE-3", without("norm.weight"), "'norm.weight' is missing"),
        ("EAGLE-3", without("fc.weight"), "'fc.weight' is missing"),
        ("EAGLE-3", without("d2t"), "'d2t' is missing"),
        ("EAGLE-3", tensor("mask_hidden", lambda _: torch.zeros(1, 3 * D)), "field 'mask_token_id' is None; it has to"),
        (
            "P-EAGLE",
            tensor("mask_hidden", lambda w: w[..., 1:]),
            r"'mask_hidden' is \[95\]; config.json promises \[96\]",
        ),
        (
            "P-EAGLE",
            tensor("layers.1.mlp.up_proj.weight", lambda _: torch.zeros(1)),
            "'layers.1.input_layernorm.weight' is missing",
        ),
        ("P-EAGLE", field(num_lookahead_tokens="5"), "field 'num_lookahead_tokens' is '5'; it has to be a whole num"),
        ("P-EAGLE of speculators", without("mask_hidden"), "'mask_hidden' is missing"),
        (
            "ModelOpt",
            tensor("layers.1.mlp.up_proj.weight", lambda _: torch.zeros(1)),
            "'layers.1.input_layernorm.weight' is missing",
        ),
        ("EAGLE-1", tensor("layers.0.self_attn.o_proj.bias", lambda _: torch.zeros(D)), "o_proj.bias' is a tensor"),
        ("EAGLE-1 of Qwen2", without("layers.0.self_attn.k_proj.bias"), "k_proj.bias' is missing"),
        ("EAGLE-1", without("fc.bias"), "'fc.bias' is missing"),
        ("EAGLE-3", tensor("d2t", lambda d2t: d2t + torch.arange(S)), "'d2t' holds no offsets"),
        ("ModelOpt", tensor("d2t", lambda d2t: d2t + torch.arange(S)), "'d2t' holds no offsets"),
        ("EAGLE-3", tensor("d2t", lambda d2t: torch.zeros_like(d2t)), "that 't2d' marks"),
        ("EAGLE-3", tensor("d2t", lambda d2t: d2t[1:]), "'d2t' is"),
        ("EAGLE-3", tensor("norm.weight", lambda w: w / 0), "'norm.weight' holds NaN"),
        ("EAGLE-3", tensor("fc.weight", lambda w: w.to(torch.int8)), "stored as torch.int8"),
        ("EAGLE-3", tensor("fc.weight", lambda w: w.to(torch.float8_e4m3fn)), "stored as torch.float8_e4m3fn"),
        ("EAGLE-3", tensor("lm_head.weight", lambda w: w[:-1]), r"'lm_head.weight' is \[19, 32\]"),
        ("EAGLE-3", field(vocab_size=64), "vocab_size 64 ≠ 61 of the target"),
        ("EAGLE-3", field(hidden_size=64), "hidden_size 64 ≠ 32 of the target"),
        ("EAGLE-3 of another width", field(target_hidden_size=40), "target_hidden_size 40 ≠ 32 of the target"),
        ("EAGLE-3 of another width", without("embed_tokens.weight"), "of another width"),
        ("EAGLE-3 of all tokens", field(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), r"layers \[2, 4, 8\]; the target"),
        ("EAGLE-3 of all tokens", field(eagle_aux_hidden_state_layer_ids=[2, 4]), "num_aux_hidden_states is 3"),
        ("ModelOpt", nested(eagle_aux_hidden_state_layer_ids=[1, 2]), r"'fc.weight' is \[32, 96\]"),
        ("EAGLE-3", field(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("EAGLE-3", field(sliding_window=512), "field 'sliding_window' is 512"),
        ("EAGLE-3", field(quantization_config={"quant_method": "fp8"}), "field 'quantization_config'"),
        ("EAGLE-3", field(hidden_size="32"), "field 'hidden_size' is '32'"),
        ("EAGLE-3", field(num_attention_heads=0), "field 'num_attention_heads' is 0; it has to be a whole number ab"),
        ("EAGLE-3", field(head_dim=5), "config.json: a field's value makes no drafter"),
        ("EAGLE-3", field(rms_norm_eps=[1]), "config.json: a field's value makes no drafter"),
        ("EAGLE-3", field(rope_scaling=True), "field 'rope_scaling' is True; it has to be an object"),
        ("EAGLE-3", field(architectures=[[]]), "field 'architectures' is"),
        ("EAGLE-3", field(rope_scaling={"type": "dynamic", "factor": 2.0}), "of type 'dynamic'"),
        ("EAGLE-3", field(rope_theta=5.0, rope_parameters=PLAIN), "say other rotary positions"),
        ("EAGLE-3", field(architectures=["DFlashDraftModel"]), "architectures"),
        ("ModelOpt", nested(use_mtp_layernorm=True), "field 'eagle_config.use_mtp_layernorm' is True"),
        ("ModelOpt", nested(parallel_draft_step=4), "parallel_draft_step is 4"),
        ("speculators", field(speculators_model_type="dspark"), "speculators_model_type 'dspark'"),
        ("speculators", field(norm_before_fc=True, fc_norm=True), "only one of them, as in speculators"),
        ("speculators", field(norm_output=True, fc_norm=True), "'fc_norm.0.weight' is missing"),
        ("Medusa", without("1.0.linear.weight"), "'1.0.linear.weight' is missing"),
        ("Medusa", tensor("1.0.linear.weight", lambda w: w[1:]), r"'1.0.linear.weight' is \[31, 32\]"),
        (
            "Medusa",
            tensor("2.2.weight", lambda w: w[1:]),
            r"'2.2.weight' is \[60, 32\]; config.json promises \[61, 32\]",
        ),
        ("Medusa", without("2.2.weight"), "'2.projection' is missing"),
        ("Medusa", tensor("extra.weight", lambda _: torch.zeros(1)), "'extra.weight' is a tensor that is not known"),
        (
            "Medusa",
            tensor("lm_head.weight", lambda _: torch.zeros(V, D)),
            "'lm_head.weight' is a tensor that is not known",
        ),
        ("Medusa", field(medusa_num_layers=1), "medusa_num_layers is 1"),
        ("Medusa", field(hidden_size=64), "hidden_size 64 ≠ 32 of the target"),
        ("Medusa", field(medusa_choices=7), "field 'medusa_choices' is 7"),
    ],
)
def test_broken_drafters_are_refused(target, name, change, message):
    config, tensors = (dict(MEDUSA), medusa_tensors()) if name == "Medusa" else published(name, target)
    change(config, tensors)
    with pytest.raises(ValueError, match=message):
        convert(config, tensors, TargetInfo.of(target))


# ---- the command


@pytest.fixture(scope="module")
def tiny():
    return load_target(TARGET)


@pytest.mark.parametrize(
    "to, options",
    [
        ("vllm", {}),
        ("speculators", {"norm_before_residual": True}),
        ("sglang", {"size": None, "norm_output": True}),
        ("sglang", {"captured_layers": (1, 4, 7)}),
        ("vllm", {"norm_before_fc": True}),
        *itertools.product(("vllm", "speculators"), ({"options": {"parallel": 4}, "norm_before_residual": True},)),
        *itertools.product(("sglang", "vllm", "speculators"), ({"intermediate_size": 72},)),
        ("sglang", {"version": 1, "projection": "shared", "size": None}),
        ("vllm", {"version": 1, "projection": "shared", "size": None, "fc_bias": False}),
        *itertools.product(("medusa", "vllm"), ("own", "shared")),
    ],
)
def test_export_and_import_are_inverse(tiny, tmp_path, run_main, to, options):
    """Config and weights, bit for bit, also of an MLP that is not as wide as the target's; what was exported is
    recognised where a drafter of ours is needed. Medusa heads that use the target's LM head are written with copies of
    it, and recognised by them."""
    if isinstance(options, str):
        write_heads(tmp_path / "mine", tiny, options)
    else:
        write_eagle(tmp_path / "mine", tiny, dtype="bfloat16", **options)
    assert run_main(export.main, tmp_path / "mine", "--to", to, "--out", tmp_path / "served")[0] == 0
    arguments = (tmp_path / "served", "--target", TARGET, "--out", tmp_path / "again")
    code, printed, err = run_main(import_drafter.main, *arguments)
    assert (code, err) == (0, "") and "next: python inference/calibrate.py" in printed
    (_, config, weights), (_, before, wanted) = (read_drafter(str(tmp_path / name)) for name in ("again", "mine"))
    assert config == before and weights.keys() == wanted.keys()
    for name, weight in weights.items():
        assert weight.dtype == wanted[name].dtype and torch.equal(weight, wanted[name]), name


def write_published(folder: Path, config, tensors, pickle=None):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickle:
        torch.save(tensors, folder / pickle)
    else:
        save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def pickled(tiny, tmp_path):
    """Medusa heads for models/tiny-lm in a pickle, of which head 0 repeats the target's LM head."""
    d = tiny.hidden_size
    tensors = {f"{h}.0.linear.weight": torch.zeros(d, d) for h in (0, 1)}
    tensors |= {f"{h}.0.linear.bias": torch.zeros(d) for h in (0, 1)}
    tensors |= {f"{h}.1.weight": tiny.lm_head.weight.detach().float().clone() for h in (0, 1)}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": TARGET}
    write_published(tmp_path / "heads", config, tensors, "medusa_lm_head.pt")
    return tmp_path / "heads"


def test_pickles_are_read_when_they_may_be(pickled, tmp_path, run_main, refused):
    arguments = (pickled, "--target", TARGET, "--out", tmp_path / "out")
    assert "medusa_lm_head.pt: pickled weights; with --allow-pickle" in refused(import_drafter.main, *arguments)
    assert not (tmp_path / "out").exists()
    code, printed, err = run_main(import_drafter.main, *arguments, "--allow-pickle")
    assert (code, err) == (0, "") and "medusa, " in printed
    target, drafter = load_drafter(str(tmp_path / "out"), all_nodes=True)
    assert drafter is not None and drafter.max_depth == 2
    (plain,), (drafted,) = (SpeculativeDecoder(target, each).generate([[5, 7, 11]], 12) for each in (None, drafter))
    assert plain.tokens == drafted.tokens
    card = (tmp_path / "out/README.md").read_text()
    assert "imported from `heads` with draftsmith" in card and "license" not in card and str(tmp_path) not in card
    # Again into the same folder, and not into somebody else's.
    assert run_main(import_drafter.main, *arguments, "--allow-pickle")[0] == 0
    words = (import_drafter.main, pickled, "--target", TARGET, "--out", pickled, "--allow-pickle")
    assert "it holds other things" in refused(*words)
    words = (import_drafter.main, tmp_path / "out", "--target", TARGET, "--out", tmp_path / "other")
    assert "already a drafter of draftsmith" in refused(*words)


class Harmful:
    def __reduce__(self):
        return print, ("run",)


def test_a_pickle_that_holds_more_than_tensors_is_not_run(pickled, tmp_path, run_main):
    torch.save({"0.0.linear.weight": Harmful()}, pickled / "medusa_lm_head.pt")
    arguments = (pickled, "--target", TARGET, "--out", tmp_path / "out", "--allow-pickle")
    code, printed, err = run_main(import_drafter.main, *arguments)
    assert code == 2 and err.count("\n") == 1 and "could run any code" in err and printed == ""


def test_from_the_hub(pickled, tmp_path, run_main, hub):
    """Pickles are fetched with the flag alone; the card names the repository and its licence."""
    shutil.copytree(pickled, hub.folder / "models/somebody/heads")
    (hub.folder / "models/somebody/heads/README.md").write_text("---\nlicense: mit\n---\n")
    arguments = ("somebody/heads", "--target", TARGET, "--out", tmp_path / "out")
    code, _, err = run_main(import_drafter.main, *arguments)
    assert code == 2 and "'somebody/heads': it has no safetensors files; pickled ones are read with --allow" in err
    advice = f"import_drafter.py somebody/heads --target {TARGET} --out runs/NAME --allow-pickle"
    code, _, err = run_main(decode.main, "somebody/heads", "--target", TARGET, "--prompt", "x", "--raw")
    assert code == 2 and advice in err, err
    assert not any(name.endswith(".pt") for name in hub.requested("models/somebody/heads"))
    code, _, err = run_main(import_drafter.main, *arguments, "--allow-pickle")
    assert code == 0, err
    card = (tmp_path / "out/README.md").read_text()
    assert "license: mit" in card and "imported from `somebody/heads`" in card


def test_the_template_comes_from_the_hub_too(tiny, tmp_path, run_main, hub):
    write_eagle(tmp_path / "mine", tiny, 3)
    (tmp_path / "mine/chat_template.jinja").write_text("{{ messages[0].content }}!")
    served = hub.folder / "models/somebody/served"
    to_servers.export(open_source(str(tmp_path / "mine"), "vllm"), "vllm", served, facts={"target": TARGET})
    code, _, err = run_main(import_drafter.main, "somebody/served", "--target", TARGET, "--out", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages[0].content }}!"


@pytest.mark.parametrize(
    "name, pickle", [("EAGLE-1", None), ("EAGLE-1", "pytorch_model.bin"), ("EAGLE-3", None), ("speculators", None)]
)
def test_other_commands_name_the_import(target, tmp_path, name, pickle):
    write_published(tmp_path / "served", *published(name, target), pickle)
    with pytest.raises(ValueError, match=r"a published drafter in another format; import it: python models/import_dra"):
        read_drafter(str(tmp_path / "served"))


def test_shards(target, tmp_path):
    """All files of an index are read, and a missing one is named."""
    config, tensors = published("EAGLE-3", target)
    write_published(tmp_path / "whole", config, tensors)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    one, other = (read_published(tmp_path / name, target).weights for name in ("whole", "shards"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002.safetensors: missing"):
        read_published(folder, target)
    assert load_file(folder / "model-00001-of-00002.safetensors")
