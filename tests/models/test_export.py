"""Export: names and fields of each format, its logits by an independent computation, and what is refused. (What the
package speculators makes of a folder needs its own environment: tests/speculators_package.py.)"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from exported_logits import difference
from made import config_of, edit, llama3, stand_in, write_eagle, write_heads
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig

from draftsmith.models import card, export, import_drafter
from draftsmith.models.artifact import write_drafter
from draftsmith.models.files.weights import save_tensors
from draftsmith.models.serving import to_servers
from draftsmith.models.serving.readers import READ_BY
from draftsmith.models.serving.source import ExportSource, open_source
from draftsmith.models.shortlist import ShortlistConfig, ShortlistHead
from draftsmith.models.target import load_target

TARGET = "models/tiny-lm"  # 12 layers, so that 2, 6 and 9 are captured
LLAMA3 = llama3(512)
FORMS = {  # name: version, projection, draft vocabulary, options of Eagle.for_target, stored dtype
    "own": (3, "own", 512, {}, "float32"),
    "whole vocabulary": (3, "own", None, {"fc_norm": True, "norm_output": True}, "bfloat16"),
    "all tokens": (3, "own", None, {}, "float32"),
    "shared": (3, "shared", 300, {"captured_layers": (1, 4, 7)}, "bfloat16"),
    "norm before fc": (3, "shared", None, {"norm_before_fc": True}, "float32"),
    "first layer": (3, "own", 64, {"captured_layers": (0, 4, 7)}, "float32"),
    "two layers": (3, "own", 64, {"captured_layers": (2, 5)}, "float32"),
    "another order": (3, "own", 64, {"captured_layers": (7, 4, 1)}, "float32"),
    "EAGLE-1": (1, "shared", None, {}, "float32"),
    "EAGLE-1 without a bias": (1, "shared", 128, {"fc_bias": False}, "bfloat16"),
    "norm before residual": (3, "own", 512, {"norm_before_residual": True}, "float32"),
    "biases": (3, "own", 512, {"attention_bias": True}, "float32"),
    "one pass": (3, "shared", 512, {"fc_norm": True, "norm_output": True, "parallel": 4}, "bfloat16"),
    "one pass, all tokens": (3, "own", None, {"norm_before_fc": True, "parallel": 2}, "float32"),
    "one pass, three layers": (3, "own", 512, {"num_layers": 3, "parallel": 4}, "float32"),
    "layers": (3, "shared", 300, {"num_layers": 2, "norm_output": True}, "bfloat16"),
}
HEADS = {"shared rows": ("shared", 300), "shared": ("shared", None), "own": ("own", None), "own rows": ("own", 300)}


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET)


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    """``drafter(form, **fields of its config)`` → a drafter's folder, with random weights; ``heads, …``: three Medusa
    heads of two layers."""

    def make(form: str, **fields) -> Path:
        if form.startswith("heads, "):
            write_heads(folder := tmp_path_factory.mktemp("heads") / "mine", target, *HEADS[form[7:]])
            return folder
        version, projection, size, options, dtype = FORMS[form]
        folder = tmp_path_factory.mktemp("drafter") / "mine"
        write_eagle(folder, target, version, projection, size, dtype, options, **fields)
        return folder

    return make


@pytest.fixture(scope="module")
def exported(drafter, target, tmp_path_factory):
    """``exported(form, format)`` → the source and a written folder, which must not be changed."""
    made = {}

    def make(form: str, to: str) -> tuple[ExportSource, Path]:
        if (form, to) not in made:
            source, folder = open_source(str(drafter(form)), to), tmp_path_factory.mktemp("out")
            to_servers.export(source, to, folder)
            assert difference(folder, source.drafter, target) < 1e-4
            made[form, to] = source, folder
        return made[form, to]

    return make


LAYER = {f"self_attn.{name}_proj.weight" for name in "qkvo"} | {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
LAYER |= {"post_attention_layernorm.weight"}
EAGLE3 = {f"midlayer.{name}" for name in LAYER | {"input_layernorm.weight", "hidden_norm.weight"}}
EAGLE3 |= {"fc.weight", "norm.weight", "lm_head.weight"}
MAPS, IDS = {"d2t", "t2d"}, "eagle_aux_hidden_state_layer_ids"
SPECULATORS = {name.replace("midlayer", "layers.0") for name in EAGLE3} | {"embed_tokens.weight"}
FURTHER = [{f"layers.{n}.{name}" for name in LAYER | {"input_layernorm.weight"}} for n in (1, 2)]
EAGLE1 = {f"layers.0.{name}" for name in LAYER} | {"fc.weight"}
FC_NORMS, DEFAULT = {f"fc_norm.{i}.weight" for i in range(3)}, {"rope_type": "default", "rope_theta": 100000.0}
BLOCKS = [(head, layer, kind) for head in range(3) for layer in range(2) for kind in ("weight", "bias")]
VLLM_HEADS = {f"blocks.{head}.layers.{layer}.{kind}" for head, layer, kind in BLOCKS}
MEDUSA = {f"{k}.{n}.linear.{kind}" for k, n, kind in BLOCKS} | {f"{k}.2.weight" for k in range(3)}
OWN_FIELDS = {"draft_vocab_size": 512, "norm_before_residual": False, "max_position_embeddings": 4096}
OWN_FIELDS |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "rope_parameters": DEFAULT}
OWN_FIELDS |= {"rope_theta": 100000.0, "rope_scaling": None, "tie_word_embeddings": False, "num_aux_hidden_states": 3}
OWN_FIELDS |= dict.fromkeys((IDS, "eagle_config", "norm_before_fc", "fc_norm", "norm_output"))
SHARED = {"num_heads": 3, "num_hidden_layers": 2, "medusa_fc_bias": True, "truncated_vocab_size": 4096}
PROPOSAL = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
VERIFIER = {"name_or_path": str(Path(TARGET).resolve()), "architectures": ["LlamaForCausalLM"]}
SPECULATORS_CONFIG = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [PROPOSAL]}
FOLDERS = [  # form, format, all tensors, some fields; None: there is no such field. Layers: as each server counts
    ("own", "sglang", EAGLE3 | MAPS, OWN_FIELDS),
    ("own", "vllm", EAGLE3 | MAPS, OWN_FIELDS),
    ("all tokens", "vllm", EAGLE3, {"draft_vocab_size": 4096}),  # vLLM makes no place for maps then
    ("all tokens", "openvino", EAGLE3 | MAPS, {"draft_vocab_size": 4096}),
    ("shared", "vllm", EAGLE3 | MAPS, {IDS: [1, 4, 7], "eagle_config": {"use_aux_hidden_state": True, IDS: [0, 3, 6]}}),
    ("two layers", "vllm", EAGLE3 | MAPS, {IDS: [2, 5], "num_aux_hidden_states": 2}),
    ("norm before fc", "vllm", EAGLE3 | {"input_norm.weight"}, {"norm_before_fc": True}),
    ("whole vocabulary", "sglang", EAGLE3 | FC_NORMS, {"fc_norm": True, "norm_output": True, "draft_vocab_size": 4096}),
    ("own", "speculators", SPECULATORS | MAPS, {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "norm_before_residual": False,
        IDS: [2, 6, 9], "model_type": None, "speculators_config": {**SPECULATORS_CONFIG, "verifier": VERIFIER},
    }),
    ("shared", "speculators", SPECULATORS | MAPS, {IDS: [1, 4, 7]}),
    ("first layer", "speculators", SPECULATORS | MAPS, {IDS: [0, 4, 7]}),
    ("whole vocabulary", "speculators", SPECULATORS | FC_NORMS, {"fc_norm": True, "norm_output": True}),
    ("norm before fc", "speculators", SPECULATORS | {"input_norm.weight"}, {"norm_before_fc": True}),
    ("one pass", "vllm", EAGLE3 | FC_NORMS | MAPS | {"mask_hidden"}, {
        **OWN_FIELDS, "fc_norm": True, "norm_output": True, "mask_token_id": 4095, "pard_token": 4095,
        "num_lookahead_tokens": 4,
    }),
    ("one pass, all tokens", "speculators", SPECULATORS | {"input_norm.weight", "mask_hidden"}, {
        "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "mask_token_id": 4095,
        "pard_token": None, "norm_before_residual": False,
        "speculators_config": {**SPECULATORS_CONFIG, "algorithm": "peagle", "verifier": VERIFIER},
    }),
    ("one pass, three layers", "vllm", (SPECULATORS - {"embed_tokens.weight"}).union(*FURTHER, MAPS, {"mask_hidden"}), {
        "num_hidden_layers": 3, "num_lookahead_tokens": 4,
    }),
    ("layers", "speculators", SPECULATORS | FURTHER[0] | MAPS, {"norm_output": True}),
    ("EAGLE-1", "sglang", EAGLE1 | {"fc.bias"}, {"architectures": ["LlamaForCausalLMEagle"]}),
    ("EAGLE-1 without a bias", "sglang", EAGLE1 | {"fc.bias"}, {"architectures": ["LlamaForCausalLMEagle"]}),
    ("EAGLE-1 without a bias", "vllm", EAGLE1, {"architectures": ["LlamaForCausalLM"]}),
    ("heads, shared rows", "vllm", VLLM_HEADS | {"lm_heads.0.weight"}, SHARED | {"original_lm_head": True}),
    ("heads, shared", "vllm", VLLM_HEADS | {"lm_heads.0.weight"}, SHARED | {"original_lm_head": True}),
    ("heads, own", "vllm", VLLM_HEADS | {f"lm_heads.{k}.weight" for k in range(3)}, {"original_lm_head": False}),
    ("heads, shared rows", "medusa", MEDUSA, {"medusa_num_heads": 3, "medusa_num_layers": 2, "model_type": None}),
    ("heads, own", "medusa", MEDUSA, {"medusa_num_heads": 3, "medusa_num_layers": 2, "model_type": None}),
]  # fmt: skip


@pytest.mark.parametrize("form, to, names, fields", FOLDERS)
def test_names_and_fields(exported, target, form, to, names, fields):
    """Logits are compared by ``exported``."""
    source, folder = exported(form, to)
    config, (file,) = config_of(folder), folder.glob("*.safetensors")
    stored = load_file(file)
    assert file.name == ("medusa_lm_head.safetensors" if to == "medusa" else "model.safetensors")
    assert stored.keys() == names and {name: config.get(name) for name in fields} == fields
    if "d2t" in stored:
        ids = source.drafter.tokens(torch.arange(source.drafter.config.outputs)).long()
        assert (stored["d2t"].dtype, stored["t2d"].dtype, stored["t2d"].shape) == (torch.int64, torch.bool, (4096,))
        assert torch.equal(torch.arange(len(ids)) + stored["d2t"], ids)
        assert torch.equal(stored["t2d"].nonzero()[:, 0], ids)
    if "mask_hidden" in stored:
        assert torch.equal(stored["mask_hidden"], source.weights["mask_hidden"].view(1, 1, -1))
    if "embed_tokens.weight" in stored:
        assert torch.equal(stored["embed_tokens.weight"].float(), target.embeddings.weight.float())
    if form in ("own", "first layer") and to != "speculators":
        assert source.target is None, "the target's weights are not needed"
    floats = {weight.dtype for weight in stored.values() if weight.is_floating_point()}
    assert source.dtype in floats and (source.target is not None or len(floats) == 1)


@pytest.mark.parametrize("form, layers", [("own", "1 5 8"), ("shared", "0 3 6"), ("all tokens", "1 5 8")])
def test_the_folder_of_openvino(exported, tmp_path, form, layers):
    """vLLM's, with a ``d2t`` in any case; the card's commands name the layers by what leaves them."""
    _, folder = exported(form, "openvino")
    for name in ("config.json", "model.safetensors") if form != "all tokens" else ("config.json",):
        assert (folder / name).read_bytes() == (exported(form, "vllm")[1] / name).read_bytes()
    lines = (folder / "README.md").read_text().splitlines()
    network = tmp_path / "drafter-ov/openvino_model.xml"
    network.parent.mkdir()
    network.write_text('<rt_info>\n\t<eagle3_mode value="True" />\n</rt_info>')
    (command,) = (line for line in lines if line.startswith("sed "))
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True)
    assert f'\t<hidden_layers_list value="{layers}" /><eagle3_mode value="True" />\n' in network.read_text()


@pytest.mark.parametrize(
    "form, to",
    [
        *(("own", "sglang"), ("whole vocabulary", "vllm"), ("shared", "speculators"), ("heads, own", "vllm")),
        *(("one pass", "vllm"), ("one pass, all tokens", "speculators")),
    ],
)
def test_each_field_of_ours_is_in_the_table(exported, form, to):
    """And the program that the folder is for reads it, unless it is false. The others are a Llama's, which transformers
    reads."""
    config = config_of(exported(form, to)[1])
    tables = {name for name, by in READ_BY.items() if to in by or config.get(name) is False}
    llama = {*LlamaConfig().to_dict(), "rope_theta", "rope_scaling", "torch_dtype"}
    unread = {"speculators_version", "embed_requires_grad"}  # of the package's own training
    assert config.keys() - llama - unread <= tables, config.keys() - llama - unread - tables


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}])
def test_scaled_rotary_positions_are_written_both_ways(drafter, tmp_path, rope):
    """Each of the two alone gives the drafter's."""
    source = open_source(str(drafter("own", rope_parameters=rope)), "sglang")
    to_servers.export(source, "sglang", tmp_path)
    config = config_of(tmp_path)
    older = {name: value for name, value in config.items() if name != "rope_parameters"}
    newer = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
    assert LlamaConfig(**older).rope_parameters == LlamaConfig(**newer).rope_parameters == rope


# ---- each check can fail


def swap(one: str, other: str):
    def change(stored, config):
        stored[one], stored[other] = stored[other], stored[one]

    return change


def without(name: str):
    return lambda stored, config: stored.pop(name)


def with_tensor(name: str, new):
    return lambda stored, config: stored.update({name: new(stored[name])})


def with_field(**fields):
    return lambda stored, config: config.update(fields)


GATE, UP, DOWN = (f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


@pytest.mark.parametrize(
    "form, to, change, message",
    [
        ("own", "sglang", lambda stored, config: stored.update(extra=stored["d2t"].clone()), "'extra' is a tensor"),
        ("own", "sglang", without("norm.weight"), "'norm.weight' is missing"),
        ("own", "sglang", with_tensor(DOWN, lambda w: w.T), "down_proj.weight' is"),
        ("own", "sglang", with_tensor("d2t", lambda d2t: d2t + 1), "'d2t' holds no offsets"),
        ("own", "sglang", swap(GATE, UP), "logits"),
        ("own", "sglang", with_tensor("lm_head.weight", lambda w: w.flip(0)), "logits"),
        (
            "own",
            "sglang",
            with_field(norm_before_residual=True),
            "norm_before_residual is read back as True instead of F",
        ),
        ("own", "sglang", with_field(norm_output=True), "norm_output is read back as True"),
        ("own", "sglang", with_field(rms_norm_eps=1e-3), "rms_norm_eps is read back as 0.001"),
        ("own", "sglang", with_field(eagle_aux_hidden_state_layer_ids=[2, 5, 9]), "captured_layers is read back"),
        ("own", "sglang", with_field(rope_scaling=LLAMA3), "say other rotary positions than rope_parameters"),
        ("own", "sglang", with_field(sliding_window=4), "'sliding_window' is 4; it is not known"),
        (
            "own",
            "speculators",
            lambda stored, config: config.pop("norm_before_residual"),
            "norm_before_residual is read",
        ),
        (
            "own",
            "speculators",
            with_tensor("embed_tokens.weight", lambda w: w.roll(1, 0)),
            "own_embeddings is read back",
        ),
        ("heads, shared rows", "vllm", with_tensor("blocks.1.layers.0.weight", lambda w: w.T), "logits"),
        ("heads, shared rows", "vllm", with_tensor("lm_heads.0.weight", lambda w: w.roll(1, 0)), "logits"),
        ("heads, shared rows", "vllm", without("blocks.2.layers.1.bias"), "'2.1.linear.bias' is missing"),
        ("heads, shared rows", "medusa", swap("0.0.linear.bias", "1.0.linear.bias"), "logits"),
        ("heads, shared rows", "medusa", with_field(medusa_num_layers=4), "medusa_num_layers is 4"),
    ],
)
def test_reading_back_refuses(exported, tmp_path, monkeypatch, form, to, change, message):
    """What an exporter of a format would write wrong; nothing is left of it."""
    source, _ = exported(form, to)
    right = to_servers.written

    def wrong(*args):
        tensors, config = right(*args)
        change(tensors, config)
        return {name: weight.contiguous() for name, weight in tensors.items()}, config

    monkeypatch.setattr(to_servers, "written", wrong)
    with pytest.raises(ValueError, match=message):
        to_servers.export(source, to, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        swap("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"),
        with_tensor("fc.weight", lambda w: torch.cat(w.chunk(3, 1)[1:] + w.chunk(3, 1)[:1], 1)),
        with_tensor("lm_head.weight", lambda w: w.flip(0)),
        with_field(norm_before_residual=True),
    ],
)
def test_the_independent_computation_can_differ(exported, target, tmp_path, change):
    source, folder = exported("own", "sglang")
    stored, config = load_file(folder / "model.safetensors"), config_of(folder)
    change(stored, config)
    save_tensors(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert difference(tmp_path, source.drafter, target) > 1e-2


# ---- one list of tokens for all depths (FR-Spec, VocabTrim)


@pytest.mark.parametrize("form", ["own", "whole vocabulary"])
def test_a_static_shortlist_is_the_draft_vocabulary(drafter, target, tmp_path, run_main, refused, form):
    """The list's rows of the base's LM head, and their ids as d2t; lists that differ by depth have no place."""
    base, folder = drafter(form), tmp_path / "listed"
    stored = load_file(base / "model.safetensors")
    ids = stored.get("draft_vocab", torch.arange(target.vocab_size))
    for capacity, message in (([200] * 6, ""), ([200] * 5 + [100], f"can be exported: {folder}/drafter")):
        head = ShortlistHead(ShortlistConfig("fr_spec", len(ids), tuple(capacity)))
        head.order.copy_(torch.randperm(len(ids), generator=torch.Generator().manual_seed(3)))
        shutil.copytree(base, folder / "drafter", dirs_exist_ok=True)
        write_drafter(folder, "dynaspec", head.config.to_dict(), head.state_dict(), target, {}, parts=["drafter"])
        words = (export.main, folder, "--to", "vllm", "--out", tmp_path / "out")
        if message:
            assert message in refused(*words)
            continue
        assert run_main(*words)[0] == 0
        written = load_file(tmp_path / "out/model.safetensors")
        kept = head.order[:200].sort().values
        assert torch.equal(torch.arange(200) + written["d2t"], ids[kept])
        assert torch.equal(written["lm_head.weight"], stored["lm_head.weight"][kept])
        assert config_of(tmp_path / "out")["draft_vocab_size"] == 200


# ---- what is written


def test_no_weights_of_an_earlier_export_are_left(drafter, tmp_path, run_main, hub):
    """Neither in the folder nor, from a folder of its own, on the Hub: importers would read them."""
    own = [drafter("heads, own"), drafter("own")]
    for number, (folder, to) in enumerate(zip(own, ("medusa", "vllm"), strict=True)):
        for out in (tmp_path / "same", tmp_path / str(number)):
            words = ["--push-to-hub", "somebody/one"] if out.name == str(number) else []
            assert run_main(export.main, folder, "--to", to, "--out", out, *words)[0] == 0
            (out / "serving.json").write_text("{}")
            (out / "chat_template.jinja").write_text("{{ messages }}")
    files = {"config.json", "model.safetensors", "provenance.json", "README.md"}
    assert run_main(export.main, own[1], "--to", "vllm", "--out", tmp_path / "same")[0] == 0
    uploaded = hub.files("models/somebody/one")
    assert {file.name for file in (tmp_path / "same").iterdir()} == files == set(uploaded)
    assert uploaded["model.safetensors"].read_bytes() == (tmp_path / "1/model.safetensors").read_bytes()


@pytest.mark.parametrize("to", ["speculators", "medusa"])
@pytest.mark.parametrize("served", [None, "org/target", "relative/folder"])
def test_the_target_resolves_wherever_the_folder_is_read(drafter, tmp_path, run_main, monkeypatch, to, served):
    """By a Hub id or a whole path, never by a relative one, which servers look up elsewhere."""
    folder = drafter("own") if to == "speculators" else drafter("heads, own")
    target, out = str(Path(TARGET).resolve()), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative/folder").mkdir(parents=True)
    words = [folder, "--to", to, "--out", out, "--target", target, *(["--served-target", served] if served else [])]
    code, printed, _ = run_main(export.main, *words)
    config, card = config_of(out), (out / "README.md").read_text()
    of_speculators = to == "speculators" and config["speculators_config"]["verifier"]["name_or_path"]
    named = of_speculators or config["base_model_name_or_path"]
    wanted = {None: target, "org/target": "org/target", "relative/folder": str(tmp_path / "relative/folder")}[served]
    assert code == 0 and named == wanted
    local = served != "org/target"
    assert ("a path of this machine; for others: --served-target" in printed) is local
    assert ("is a path of the machine that exported this: elsewhere put there" in card) is local
    assert str(tmp_path) not in card and target not in card


def test_a_fetched_target_is_named_by_its_hub_id(tmp_path, monkeypatch):
    for fingerprint, (hub_id, *_) in card._FETCHED.items():
        assert card.served_name("models/smollm2", fingerprint) == hub_id
    assert card.served_name(TARGET, "0" * 64) == str(Path(TARGET).resolve())
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert card.served_name("model.gguf", "0" * 64) == str(tmp_path / "model.gguf")


@pytest.mark.parametrize("depths, tokens", [((1, 2, 3, 4), 3), ((1, 2, 3, None), 2), ((), 3)])
def test_drafts_are_as_long_as_the_fastest_chain(drafter, tmp_path, run_main, depths, tokens):
    """That of calibration; 4 nodes in 2 levels are no chain, and older trees do not say."""
    folder, out = drafter("own"), tmp_path / "out"
    speeds = (1.5, 1.8, 2.0, 1.9)
    sizes = [
        {"nodes": n + 2, "tau": 2.0, "speedup": speeds[n]} | ({"depth": depth} if depth else {})
        for n, depth in enumerate(depths)
    ]
    if depths and depths[-1] is None:
        sizes[2]["depth"] = 2
    (folder / "tree.json").write_text(json.dumps({"paths": [[0]], "calibration": {"sizes": sizes}}))
    assert run_main(export.main, folder, "--to", "vllm", "--out", out)[0] == 0
    assert f'"num_speculative_tokens": {tokens}' in (out / "README.md").read_text()


def test_sglang_is_not_offered_for_norm_before_residual(drafter, tmp_path, run_main):
    folder = drafter("norm before residual")
    assert run_main(export.main, folder, "--to", "vllm", "--out", tmp_path)[0] == 0
    text = (tmp_path / "README.md").read_text()
    assert "sglang.launch_server" not in text and "not SGLang, which leaves out norm_before_residual" in text


def test_the_card_of_p_eagle_and_of_several_layers(drafter, tmp_path, run_main):
    """Where no chain was timed it drafts all tokens of a pass."""
    assert run_main(export.main, drafter("one pass"), "--to", "vllm", "--out", tmp_path)[0] == 0
    text = (tmp_path / "README.md").read_text()
    options = '{"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 4, "parallel_drafting": true}'
    assert options in text and "a P-EAGLE drafter for" in text and "SGLang" not in text and "sglang" not in text
    assert run_main(export.main, drafter("layers"), "--to", "vllm", "--out", tmp_path / "layers")[0] == 0
    text = (tmp_path / "layers/README.md").read_text()
    assert "an EAGLE-3 drafter for" in text and "SGLang" not in text and "sglang" not in text, "it runs one layer"


@pytest.mark.parametrize(
    "to, wanted",
    [
        ("vllm", ["one draft of each head", '"medusa", "model": "DRAFTER", "num_speculative_tokens": 3', "up to 0.32"]),
        ("medusa", ["draftsmith.inference.decode DRAFTER --target"]),
    ],
)
def test_the_card_of_heads_speaks_of_heads(drafter, tmp_path, run_main, to, wanted):
    folder = drafter("heads, own")
    (folder / "provenance.json").write_text(json.dumps({"imported_from": "org/heads", "licence": None}))
    assert run_main(export.main, folder, "--to", to, "--out", tmp_path)[0] == 0
    text = (tmp_path / "README.md").read_text()
    assert all(words in text for words in wanted) and "OpenVINO" not in text and "SGLang" not in text
    assert "Imported by draftsmith from `org/heads`" in text and "license" not in text


def test_an_imported_drafter_has_not_the_targets_licence():
    whose = card.Named("org/target", "org/target", "org/target", "apache-2.0")
    assert "license: apache-2.0" in whose.front_matter(None, "eagle", imported=False)
    assert "license" not in whose.front_matter(None, "eagle", imported=True)
    assert "license: mit" in whose.front_matter("mit", "eagle", imported=True)
    assert whose.licensed(None, imported=True) == "The published drafter states no licence."


# ---- the command


@pytest.mark.parametrize("to, dtype", [("vllm", "bfloat16"), ("medusa", "float16"), ("speculators", "float32")])
def test_the_dtype_that_is_asked_for(drafter, target, tmp_path, run_main, to, dtype):
    """Of the drafter's tensors and of the target's beside them: the values are the stored ones, rounded to it."""
    folder, out = drafter("heads, shared") if to == "medusa" else drafter("shared"), tmp_path / "served"
    code, _, err = run_main(export.main, folder, "--to", to, "--out", out, "--dtype", dtype)
    assert code == 0, err
    (file,) = out.glob("*.safetensors")
    stored = load_file(file)
    assert {str(w.dtype) for w in stored.values() if w.is_floating_point()} == {f"torch.{dtype}"}
    if to == "medusa":
        assert torch.equal(stored["0.2.weight"], target.lm_head.weight.to(torch.float16))
    else:
        own = load_file(folder / "model.safetensors")["fc.weight"]
        assert (
            torch.equal(stored["fc.weight"], own.to(getattr(torch, dtype))) and config_of(out)["torch_dtype"] == dtype
        )


def test_weights_that_a_dtype_cannot_hold(drafter, tmp_path, refused):
    weights = load_file((folder := drafter("own")) / "model.safetensors")
    weights["fc.weight"][0, 0] = 1e6
    save_tensors(weights, folder / "model.safetensors")
    line = refused(export.main, folder, "--to", "vllm", "--out", tmp_path / "out", "--dtype", "float16")
    assert "'fc.weight' has numbers that float16 cannot hold; leave out --dtype float16" in line


def test_the_card_says_how_it_was_trained(drafter, tmp_path, run_main):
    folder = drafter("own")
    facts = {"data": ["some/chats (train)"], "data_labels": [1272054], "learning_rate": [0.003], "init_from": None}
    (folder / "provenance.json").write_text(json.dumps(facts))
    assert run_main(export.main, folder, "--to", "vllm", "--out", tmp_path / "out")[0] == 0
    table = (tmp_path / "out/README.md").read_text().partition("## Training")[2].partition("## Measured")[0]
    assert "| data | some/chats (train) |\n| data_labels | 1,272,054 |\n| learning_rate | 0.003 |\n" in table


def test_the_command(drafter, tmp_path, run_main):
    folder, out = drafter("own"), tmp_path / "served"
    code, printed, err = run_main(
        export.main, folder, "--to", "vllm", "--out", out, "--served-target", "org/target", "--speculative-tokens", 5
    )
    assert (code, err) == (0, "") and "read back, differ by" in printed
    assert {f.name for f in out.iterdir()} == {"config.json", "model.safetensors", "provenance.json", "README.md"}
    assert json.loads((out / "provenance.json").read_text())["max_logit_difference"] < 1e-4
    card = (out / "README.md").read_text()
    assert "base_model: org/target" in card and "vllm serve org/target" in card and TARGET not in card
    assert "# served: an EAGLE-3 drafter for org/target, for vLLM and SGLang" in card
    assert "license" not in card and "the target's is not known here" in card
    assert "Nothing has been measured yet" in card
    assert '"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 5' in card
    assert "--speculative-num-draft-tokens 6" in card


@pytest.mark.parametrize("to, served", [("vllm", None), ("sglang", "../some/where"), ("vllm", TARGET)])
def test_a_card_names_no_path(drafter, tmp_path, run_main, to, served):
    """A folder on this machine means nothing elsewhere: a placeholder stands for it, with a sentence."""
    folder, out = drafter("own"), tmp_path / "out"
    facts = {"simulated_tau": 2.3456, "dtype": "float32", "autocast": "bfloat16", "device": "A CPU", "licence": "mit"}
    (folder / "provenance.json").write_text(json.dumps({**facts, "date": "2026-11-02T00:00:00+00:00"}))
    calibration = {"expected_mean_accepted_length": 1.8678, "device": "A GPU", "dtype": "bfloat16"}
    (folder / "tree.json").write_text(json.dumps({"paths": [[0], [0, 0]], "calibration": calibration}))
    report = {"mean_accepted_length": 2.5, "speedup": 1.25, "mode": "greedy", "prompts": 7, "device": "C", "dtype": "d"}
    options = ["--served-target", served] if served else []

    def card_with(**more):
        (folder / "report.json").write_text(json.dumps({**report, **more}))
        assert run_main(export.main, folder, "--to", to, "--out", out, *options)[0] == 0
        return (out / "README.md").read_text()

    assert "τ of decoding" not in card_with(date="2026-11-01T00:00:00+00:00", drafter=str(folder)), "of earlier weights"
    other = card_with(date="2026-11-03T00:00:00+00:00", drafter=f"{folder}+ngram")
    assert "| τ of decoding | 2.5 | mine+ngram, greedy, 7 prompts; d, C |" in other and str(folder) not in other
    card = card_with(date="2026-11-03T00:00:00+00:00", drafter=str(folder))
    assert "base_model" not in card and TARGET not in card and "../some" not in card and str(folder) not in card
    assert "vllm serve TARGET --spec" in card and "--model-path TARGET " in card
    assert card.count("TARGET is the folder or Hub id of that target, a model of the family llama with the finger") == 1
    assert "license: mit\n" in card and "Licence: mit." in card
    assert "| simulated τ on held-out rows, by the tree that chose the weights | 2.346 | float32, autocast bfl" in card
    assert "| nodes of the tree beside the root | 2 | bfloat16, A GPU |" in card
    assert "| τ that calibration expects of the tree | 1.868 | bfloat16, A GPU |" in card
    assert "| τ of decoding | 2.5 | greedy, 7 prompts; d, C |" in card


REFUSALS = [
    # drafter, format, options, what is said; all before the target is read
    ("EAGLE-1", "vllm", "", "use --to sglang, or train it with drafter.bias=false"),
    ("EAGLE-1", "speculators", "", "use --to vllm"),
    ("EAGLE-1 without a bias", "openvino", "", "use --to vllm"),
    ("own", "medusa", "", "holds Medusa heads alone"),
    ("two layers", "speculators", "", "layers [2, 5]"),
    ("two layers", "openvino", "", "layers [2, 5]"),
    ("another order", "vllm", "", "ascending order"),
    ("first layer", "sglang", "", "layer 0"),
    ("first layer", "openvino", "", "layer 0"),
    ("norm before fc", "openvino", "", "it has norm_before_fc, which OpenVINO's optimum-intel 2.2 leaves out"),
    ("whole vocabulary", "openvino", "", "it has fc_norm"),
    ("norm before residual", "openvino", "", "it has norm_before_residual"),
    ("norm before residual", "sglang", "", "it has norm_before_residual, which SGLang 0.5.23 leaves out"),
    ("biases", "vllm", "", "serve the published folder it was imported from, but not in SGLang 0.5.23"),
    ("heads, own rows", "vllm", "", "drafter.projection=shared"),
    ("heads, own rows", "medusa", "", "rows of their own"),
    ("heads, own", "openvino", "", "openvino runs none"),
    ("heads, own", "sglang", "", "sglang runs none"),
    ("heads, shared", "speculators", "", "speculators runs none"),
    ("layers", "sglang", "", "it has 2 layers: sglang runs one; use --to vllm"),
    ("layers", "openvino", "", "it has 2 layers: openvino runs one; use --to vllm"),
    ("one pass", "sglang", "", "sglang drafts its tokens one by one; use --to vllm"),
    ("one pass", "speculators", "", "it has fc_norm, which speculators and vLLM leave out of P-EAGLE's folders"),
    ("one pass", "vllm", "--speculative-tokens 5", "--speculative-tokens 5: the drafter drafts 4 in a pass"),
    ("ngram", "vllm", "", "there is nothing to export; servers have"),
    ("ngram:2-10", "vllm", "", "there is nothing to export; servers have"),
    ("snapkv:256", "vllm", "", "there is nothing to export; servers have"),
    ("own", "vllm", "--out=", "--out '.': is the current folder"),
    ("own", "vllm", "--out .", "--out '.': is the current folder"),
    ("own", "vllm", "--served-target=", "--served-target: the name is empty"),
    ("own", "vllm", "--private", "--private is for --push-to-hub"),
    ("own", "vllm", "--speculative-tokens 100000", "--speculative-tokens 100000: the drafter has 4096 positions"),
    ("own", "vllm", "--speculative-tokens 4096", "--speculative-tokens 4096: the drafter has"),
    ("heads, own", "vllm", "--speculative-tokens 2", "--speculative-tokens 2: Medusa heads draft one token each"),
    ("own", "speculators", "--served-target ../elsewhere", "give a Hub id or the whole path"),
    ("own", "hf", "--push-to-hub a/b", "and no --out"),
    ("own", "merged", "--dtype float32", "--dtype float32: --to merged writes the target alone, as it is stored"),
]


@pytest.mark.parametrize("name, to, options, message", REFUSALS)
def test_refusals(drafter, tmp_path, refused, monkeypatch, name, to, options, message):
    folder = name if name.startswith(("ngram", "snapkv")) else drafter(name)
    (tmp_path / "README.md").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("draftsmith.models.serving.source.locate", lambda *_, **__: pytest.fail("it was looked up"))
    assert message in refused(export.main, folder, "--to", to, "--out", tmp_path / "out", *options.split())
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("README.md", "mine")]


def test_two_alternative_norms_are_refused(drafter, refused, tmp_path):
    """As in the package speculators, whose config takes no folder with both."""
    edit(folder := drafter("norm before fc"), lambda config: config.update(fc_norm=True))
    said = "'fc_norm' and 'norm_before_fc': only one of them, as in speculators"
    assert said in refused(export.main, folder, "--to", "speculators", "--out", tmp_path / "out")


@pytest.mark.parametrize("projection", ["own", "shared"])
@pytest.mark.parametrize(("std", "written"), [(0.02, True), (0.002, False)])
def test_scaled_embeddings(make_target, tiny_lm, tmp_path, run_main, refused, projection, std, written):
    """Gemma's: servers give the stored ones. EAGLE-3's norm undoes the scale, but not where they are as small as its
    epsilon; EAGLE-1 reads them as they are."""
    made = make_target("gemma3", vocab_size=300, num_hidden_layers=6, layer_types=None, tie_word_embeddings=False)
    made.embeddings.weight.normal_(std=std)
    made.model.save_pretrained(tmp_path / "target")
    AutoTokenizer.from_pretrained(tiny_lm).save_pretrained(tmp_path / "target")
    target = load_target(str(tmp_path / "target"))
    write_eagle(tmp_path / "x", target, 3, projection, 150)
    arguments = (tmp_path / "x", "--to", "vllm", "--out", tmp_path / "out")
    if written:
        code, _, err = run_main(export.main, *arguments)
        assert code == 0, err
    else:
        said = refused(export.main, *arguments)
        assert "scales its embeddings; vllm gives the stored ones to EAGLE-3, which then drafts worse" in said
        assert not [*(tmp_path / "out").iterdir()]
    code, _, err = run_main(export.main, *arguments[:1], "--to", "speculators", "--out", tmp_path / "whole")
    assert code == 0, err
    held = load_file(tmp_path / "whole/model.safetensors")["embed_tokens.weight"]
    torch.testing.assert_close(held.float(), target.embeddings(torch.arange(300)))


def test_other_families_are_refused(tmp_path, refused):
    """With what can be done instead."""
    folder = tmp_path / "x"
    for kind, instead in (("ssm", "draft model"), ("other", "EAGLE and DFlash drafters")):
        write_drafter(folder, kind, {}, {"w": torch.zeros(1)}, stand_in(name=TARGET, fingerprint=""), {})
        line = refused(export.main, folder, "--to", "vllm", "--out", tmp_path / "out")
        assert f"of type {kind}" in line and instead in line


def test_only_an_earlier_export_is_replaced(drafter, tiny_lm, tmp_path, run_main, refused):
    own, model, out = drafter("own"), tmp_path / "model", tmp_path / "out"
    notes, somebodys = tmp_path / "notes", tmp_path / "somebodys"
    shutil.copytree(tiny_lm, model)
    for folder in (notes, somebodys):
        folder.mkdir()
        (folder / "README.md").write_text("mine")
    (notes / "provenance.json").write_text('{"mine": true}')
    for folder in (own, model, notes, somebodys):
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert "name another folder" in refused(export.main, own, "--to", "vllm", "--out", folder)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    for to, names in (("vllm", "midlayer."), ("speculators", "layers.0.")):
        assert run_main(export.main, own, "--to", to, "--out", out)[0] == 0
        assert f"{names}mlp.up_proj.weight" in load_file(out / "model.safetensors")


def test_a_drafter_of_zeros_is_refused(drafter, tmp_path, refused):
    folder = drafter("own")
    weights = load_file(folder / "model.safetensors")
    zeroed = {name: torch.zeros_like(weight) if weight.dim() == 2 else weight for name, weight in weights.items()}
    save_tensors(zeroed, folder / "model.safetensors")
    assert "has zeros alone" in refused(export.main, folder, "--to", "vllm", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_target_is_refused(drafter, tiny_lm, tmp_path, refused):
    config = json.loads(Path(TARGET, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 5000}))
    words = ("--to", "sglang", "--out", tmp_path / "out", "--target", tmp_path)
    assert "vocab_size 4096 ≠ 5000" in refused(export.main, drafter("own"), *words), "where only its config is read"
    for to in ("sglang", "speculators"):
        words = ("--to", to, "--out", tmp_path / "out", "--target", tiny_lm)
        assert f"trained for target '{TARGET}'" in refused(export.main, drafter("own"), *words)
    shutil.copytree(TARGET, tmp_path / "changed")
    weights = load_file(tmp_path / "changed/model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, tmp_path / "changed/model.safetensors", {"format": "pt"})
    for to in ("sglang", "speculators"):  # with an LM head of its own, and with the target's embeddings
        words = ("--to", to, "--out", tmp_path / "out", "--target", tmp_path / "changed")
        assert "same shape, other weights" in refused(export.main, drafter("own"), *words)


def test_an_exported_folder_says_for_which_weights(drafter, tmp_path, run_main):
    """Imported for others of the same shape, a line says so."""
    assert run_main(export.main, drafter("own"), "--to", "vllm", "--out", tmp_path / "served")[0] == 0
    facts = json.loads((tmp_path / "served/provenance.json").read_text())
    assert facts["target_fingerprint"] == load_target(TARGET).fingerprint
    said = "it was exported for a target with other weights"
    for name, expected in (("same", False), ("other", True)):
        if expected:
            facts["target_fingerprint"] = "0" * len(facts["target_fingerprint"])
            (tmp_path / "served/provenance.json").write_text(json.dumps(facts))
        words = [tmp_path / "served", "--target", TARGET, "--out", tmp_path / name]
        code, printed, err = run_main(import_drafter.main, *words)
        assert code == 0 and (said in printed + err) is expected, err


def test_a_measured_run_is_uploaded(drafter, run_main, refused, hub):
    """--to hf: the folder as it is, once its tree is calibrated, with a card of what is known by then."""
    folder = drafter("own")
    words = [folder, "--to", "hf", "--push-to-hub", "somebody/mine"]
    for more, message in ((["--out", "x"], "and no --out"), ([], "first: python inference/calibrate.py")):
        assert message in refused(export.main, *words, *more)
    for option in (["--target", TARGET], ["--served-target", "some/name"], ["--speculative-tokens", "3"]):
        assert f"{' '.join(option)}: --to hf uploads the run's folder as it is" in refused(export.main, *words, *option)
    (folder / "tree.json").write_text(json.dumps({"paths": [[0], [0, 0]], "calibration": {"device": "A GPU"}}))
    code = {"mean_accepted_length": 3.0, "mean_accepted_length_interval": [2.5, 3.5], "speedup": 1.5}
    report = {"mean_accepted_length": 2.5, "speedup": 1.25, "speedup_interval": [1.1, 1.4], "mode": "greedy"}
    report |= {"prompts": 7, "kinds": {"code": code}, "acceptance_per_position": [0.6, 0.3]}
    report |= {"lossless": {"identical": True, "checked": 448, "mismatches": 0}}
    (folder / "report.json").write_text(json.dumps(report))
    assert run_main(export.main, *words)[0] == 0
    stored = hub.files("models/somebody/mine")
    card = stored["README.md"].read_text()
    assert stored["tree.json"].read_bytes() == (folder / "tree.json").read_bytes() and "report.json" in stored
    assert run_main(export.main, *words)[0] == 0, "again, with the same card"
    assert hub.files("models/somebody/mine")["README.md"].read_text() == card
    assert "Nothing has been measured" not in card and "\n## Training\n" in card
    assert "| speed, as a multiple of plain decoding by the same engine | 1.25 (1.1–1.4) | greedy, 7 prompts" in card
    assert "| code: τ; speed | 3 (2.5–3.5); 1.5 × |" in card and "| identical; 448 tokens |" in card
    assert "| steps that accepted at least 1, 2, … tokens | 0.60, 0.30 |" in card
