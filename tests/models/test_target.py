"""Targets: logits of every family, stored folders, fingerprints, and what is no target."""

import json
import os
import shutil
import sys
import time

import pytest
import torch
from made import config_of, edit
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from draftsmith.models import target as target_module
from draftsmith.models.files import copies, identity, weights
from draftsmith.models.files.identity import fingerprint
from draftsmith.models.files.locate import locate
from draftsmith.models.target import Target, load_target

LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
TOKENS = [[4, 17, 2, 51, 33], [9, 9, 60, 0, 1]]


@pytest.mark.parametrize("family", "llama gemma2 gemma3 cohere granite hyperclovax phi opt gpt2".split())
@torch.no_grad()
def test_logits_are_the_models_own(make_target, family):
    target = make_target(family)
    tokens = torch.tensor(TOKENS)
    theirs = target.model(tokens, use_cache=False).logits
    hidden = target.hidden(tokens)
    assert hidden.shape == (2, 5, target.hidden_size) and target.vocab_size == theirs.shape[-1]
    torch.testing.assert_close(target.logits(hidden), theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    # These do something behind the LM head, and the test would see it.
    if family in ("gemma2", "cohere", "granite", "hyperclovax"):
        assert (target.lm_head(hidden) - theirs).abs().max() > 0.5


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "cohere", "granite", "phi", "gpt_neox", "gpt2"]
)
@torch.no_grad()
def test_packed_samples_do_not_see_each_other(make_target, family):
    """Positions that begin anew part the samples of a row: their hidden states are those of each alone."""
    target = make_target(family)
    target.check_packing()
    torch.manual_seed(5)
    first, second = torch.randint(target.vocab_size, (1, 11)), torch.randint(target.vocab_size, (1, 14))
    row = torch.cat([first, second, torch.zeros(1, 3, dtype=torch.int64)], 1)
    positions = torch.cat([torch.arange(11), torch.arange(14), torch.arange(3)])[None]
    hidden = target.hidden(row.repeat(2, 1), positions.repeat(2, 1))
    for one in hidden:
        torch.testing.assert_close(one[:11], target.hidden(first)[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one[11:25], target.hidden(second)[0], rtol=1e-4, atol=1e-4)
    assert (hidden[0, 11:25] - target.hidden(row)[0, 11:25]).abs().max() > 1e-2, "without positions they would"


def test_a_family_that_cannot_be_packed_says_so(make_target):
    with pytest.raises(ValueError, match=r"'tiny-opt' \(opt\): packed samples attend to each other .*packing=false"):
        make_target("opt").check_packing()


def test_flash_attention_mixes_the_samples_of_several_rows(make_target, monkeypatch):
    """transformers reads positions as samples where a batch has one row; with two, flash attention would run causally
    across them. As its kernels, the attention here gets no mask, and finds samples as transformers does for them."""
    from torch.nn.functional import scaled_dot_product_attention as attend
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    def samples_of_one_row(module, q, k, v, mask, *, scaling=None, position_ids=None, **rest):
        assert mask is None
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if _is_packed_sequence(position_ids, len(q)):
            sample = (position_ids == 0).cumsum(-1)
            seen = seen & (sample[:, :, None] == sample[:, None])[:, None]
        return attend(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True).transpose(1, 2), None

    AttentionInterface.register("samples_of_one_row", samples_of_one_row)
    AttentionMaskInterface.register("samples_of_one_row", flash_attention_mask)
    target = make_target("llama")
    with target.attention("samples_of_one_row"):
        tokens, positions = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 1, 0, 1]])
        torch.testing.assert_close(target.hidden(tokens, positions)[:, 2:], target.hidden(tokens[:, 2:]))
        with pytest.raises(ValueError, match="packed samples attend to each other"):
            target.check_packing()


@pytest.fixture
def eager_blocks(monkeypatch):
    """FlexAttention as transformers calls it, uncompiled."""
    from torch.nn.attention import flex_attention
    from transformers.integrations.flex_attention import WrappedFlexAttention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda self: flex_attention.flex_attention)

    def uncompiled(**options):
        return flex_attention.create_block_mask(**options | {"_compile": False})

    monkeypatch.setattr("transformers.masking_utils.create_block_mask", uncompiled)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3"])
@torch.no_grad()
def test_packed_rows_by_blocks(make_target, eager_blocks, family):
    """``target.attention: flex_attention``: hidden states as with a dense mask; the engine's attention comes back."""
    target = make_target(family)
    torch.manual_seed(5)
    tokens, positions = torch.randint(target.vocab_size, (2, 25)), torch.tensor([[*range(11), *range(14)]] * 2)
    wanted = target.hidden(tokens, positions)
    assert target.prepare_packing("flex_attention") == "" and target.config._attn_implementation == "flex_attention"
    torch.testing.assert_close(target.hidden(tokens, positions), wanted, rtol=1e-4, atol=1e-4)


def test_attention_of_packed_rows_is_chosen(make_target, eager_blocks, monkeypatch):
    """On a CPU a dense mask; on a GPU blocks, or a line that says why not."""
    target = make_target("llama")
    assert target.prepare_packing() == "" and target.config._attn_implementation == "sdpa"
    monkeypatch.setattr("draftsmith.models.target._blocks_suit", lambda device: True)
    assert target.prepare_packing("sdpa") == "" and target.config._attn_implementation == "sdpa"
    assert target.prepare_packing() == "" and target.config._attn_implementation == "flex_attention"
    target = make_target("llama")

    def broken(**options):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("transformers.masking_utils.create_block_mask", broken)
    said = target.prepare_packing()
    assert said.startswith("flex_attention does not run for this target here (") and "no kernel image" in said
    assert target.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="flex_attention does not run .* set target.attention=sdpa"):
        target.prepare_packing("flex_attention")


def test_a_model_without_an_lm_head_is_refused(make_target, monkeypatch):
    target = make_target("llama")
    monkeypatch.setattr(target.model, "get_output_embeddings", lambda: None)
    with pytest.raises(ValueError, match=r"'x' \(llama\): it has no LM head; this family is not supported yet"):
        Target(target.model, None, "x", "")


def test_logits_that_are_not_the_lm_heads_are_refused(make_target):
    """A family that scales its logits in a way that our code does not know."""
    target = make_target("granite")
    target.model.config.logits_scaling = 1.0  # the model reads it, and so do we
    forward = target.model.forward

    def halved(**kwargs):
        output = forward(**kwargs)
        output.logits = output.logits / 2
        return output

    target.model.forward = halved
    with pytest.raises(ValueError, match=r"'tiny-granite' \(granite\): its logits are not .* not supported yet"):
        target._check()


@pytest.mark.parametrize(("eos", "expected"), [(None, set()), (7, {7}), ([7, 9], {7, 9})])
def test_stop_ids(make_target, eos, expected):
    target = make_target("llama")
    target.model.generation_config.eos_token_id = eos
    assert target.stop_ids == expected
    target.model.generation_config.eos_token_id = None
    target.model.config.eos_token_id = eos
    assert target.stop_ids == expected


@pytest.mark.parametrize(
    ("after", "eos", "end"),
    [
        ("<|end|>\n", 0, {1}),
        (" <|end|>", None, {1}),
        ("<|end|>", [0, 1], set()),
        ("<|assistant|><|end|>", [1], set()),  # Cohere's: two, of which one is known
        ("", 0, set()),  # GLM's: the next speaker's mark is the end
        ("\n###", 0, set()),
        ("{{ raise_exception('no') }}", 0, set()),
        (None, 0, set()),
    ],
)
def test_the_templates_end_of_an_answer_is_a_stop_id(tiny_lm, after, eos, end):
    target = load_target(str(tiny_lm))
    target.model.generation_config.eos_token_id = target.model.config.eos_token_id = eos
    target.tokenizer.chat_template = after and "{% for m in messages %}{{ m['content'] }}" + after + "{% endfor %}"
    if after == "":
        target.tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    own = {eos} if isinstance(eos, int) else {*(eos or ())}
    assert target.template_end == end and target.stop_ids == own | end
    assert bool(target.end_warning) == bool(end) and ("with <|end|>, which" in target.end_warning) == bool(end)


@pytest.fixture
def folder(make_target, tmp_path):
    """A stored model with a tokenizer."""
    path = tmp_path / "model"
    make_target("llama").model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return path


def test_load_target(folder, make_target):
    target = load_target(str(folder))
    made = make_target("llama")
    assert target.fingerprint == fingerprint(folder) and len(target.fingerprint) == 72
    known = {"name_or_path": str(folder), "revision": None, "model_type": "llama"}
    assert target.describe() == known | {"fingerprint": target.fingerprint}
    tokens = torch.tensor(TOKENS)
    assert torch.equal(target.hidden(tokens), made.hidden(tokens))
    assert not any(p.requires_grad for p in target.model.parameters()) and not target.model.training
    half = load_target(str(folder), dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and half.fingerprint == target.fingerprint, "stored, not loaded"


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@torch.no_grad()
def test_quantized(make_target, folder, bits, tmp_path):
    """Close to the weights they were made from, and not the same; the fingerprint is that of what is stored."""
    make_target("llama", hidden_size=64, intermediate_size=128).model.save_pretrained(folder)
    tokens = torch.tensor(TOKENS)
    plain, small = load_target(str(folder)), load_target(str(folder), quantize=bits)
    expected, got = plain.logits(plain.hidden(tokens)), small.logits(small.hidden(tokens)).float()
    error = float((got - expected).norm() / expected.norm())
    assert 1e-4 < error < (0.5 if bits == "4bit" else 0.1)
    assert small.fingerprint == plain.fingerprint and small.quantized and not plain.quantized
    method = BitsAndBytesConfig(load_in_4bit=bits == "4bit", load_in_8bit=bits == "8bit", bnb_4bit_quant_type="nf4")
    not_run = AutoModelForCausalLM.from_pretrained(folder, quantization_config=method)  # a forward pass repacks them
    not_run.save_pretrained(tmp_path / "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "small")
    again = load_target(str(tmp_path / "small"))
    assert again.quantized and torch.equal(again.logits(again.hidden(tokens)).float(), got)
    with pytest.raises(
        ValueError, match=r"stored quantised \(bitsandbytes\), and they are not quantised twice; leave out"
    ):
        load_target(str(tmp_path / "small"), quantize="8bit")


@torch.no_grad()
def test_stored_in_fp8(make_target, folder):
    """On a CPU transformers dequantises it; the target is then no quantised one."""
    make_target("llama", hidden_size=64, intermediate_size=128).model.save_pretrained(folder)
    tokens, plain = torch.tensor(TOKENS), load_target(str(folder))
    stored = dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = weight
        if "_proj" in name:
            blocks = weight.view(weight.shape[0] // 32, 32, -1, 32)
            scale = blocks.abs().amax((1, 3)) / 448
            stored[name] = (blocks / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    edit(folder, lambda config: config.update(quantization_config=method))
    target = load_target(str(folder))
    expected, got = plain.hidden(tokens), target.hidden(tokens)
    assert not target.quantized and 1e-4 < float((got - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_layers_that_wait_on_disk(folder, dtype):
    plain, far = load_target(str(folder), dtype=dtype), load_target(str(folder), dtype=dtype, device_map="disk")
    layers = far.decoder.layers
    assert far.spread and not plain.spread and far.device == plain.device
    assert {p.device.type for p in layers.parameters()} == {"meta"}, "they are not in memory"
    assert {p.device.type for p in far.lm_head.parameters()} == {"cpu"}
    tokens = torch.tensor(TOKENS)
    assert torch.equal(far.hidden(tokens), plain.hidden(tokens))
    assert torch.equal(far.logits(far.hidden(tokens)), far.model.lm_head(plain.hidden(tokens)))
    assert far.kv_shapes == plain.kv_shapes and far.fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "cpu"}, "the device is the CPU itself"),
        ({"device_map": "disk", "quantize": "8bit"}, "quantised layers cannot be offloaded"),
        ({"quantize": "4bit"}, "target.quantize=4bit needs bitsandbytes: pip install bitsandbytes"),
    ],
)
def test_options_are_refused_before_anything_is_fetched(options, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        load_target("nobody/nowhere", **options)


def test_bars_of_loading_are_for_terminals(folder, monkeypatch, capsys):
    """However large the target: a file of a command's output gets none."""
    monkeypatch.setattr(target_module, "_SMALL", 0)
    for terminal in (True, False):
        logging.enable_progress_bar()
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        load_target(str(folder))
        assert ("Loading weights" in capsys.readouterr().err) == terminal


def test_what_loading_may_raise(folder, monkeypatch):
    """Anything becomes one line, but memory that does not suffice."""
    said = RuntimeError("it was cut")

    def raise_it(*_, **__):
        raise said

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raise_it)
    with pytest.raises(ValueError, match=r"transformers cannot load it \(RuntimeError: it was cut\)$"):
        load_target(str(folder))
    for said in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("you can't allocate memory: 9 bytes")):
        with pytest.raises(RuntimeError) as error:
            load_target(str(folder))
        assert error.value is said


def test_tokens_behind_the_last_embedding(folder):
    """Added ones that no text holds, like Vicuna's padding token, are none of the model's business."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    beyond = load_target(str(folder)).vocab_size
    tokenizer.add_tokens([f"<spare{n}>" for n in range(beyond - len(tokenizer) + 2)], special_tokens=True)
    tokenizer.save_pretrained(folder)
    assert max(load_target(str(folder)).tokenizer.get_vocab().values()) == beyond + 1
    last = tokenizer.convert_ids_to_tokens(beyond + 1)
    for name, value in (("chat_template", "{{ messages }}" + last), ("eos_token", last)):
        setattr(tokenizer, name, value)
        tokenizer.save_pretrained(folder)
        with pytest.raises(ValueError, match=rf"ids up to {beyond + 1}, its model's end at {beyond - 1};"):
            load_target(str(folder))
        tokenizer.chat_template = None


def test_fingerprint_stays(folder):
    """Through what does not change the model: versions, the order of fields, file names, shards and their order."""
    before = fingerprint(folder)
    edit(folder, lambda c: c.update(transformers_version="9.9", _name_or_path="elsewhere"))
    (folder / "config.json").write_text(json.dumps(dict(reversed(config_of(folder).items())), indent=8))
    assert fingerprint(folder) == before

    weights = load_file(folder / "model.safetensors")
    save_file({f"own.{name}": weight for name, weight in weights.items()}, folder / "consolidated.safetensors")
    assert fingerprint(folder) == before
    (folder / "consolidated.safetensors").unlink()
    (folder / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for shard, metadata in ((1, None), (2, {"a": "b"})):
        own = {name: weights[name] for name in names[shard % 2 :: 2]}
        file = folder / f"model-0000{shard}-of-00002.safetensors"
        save_file(own, file, metadata=metadata)
        index |= dict.fromkeys(own, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert fingerprint(folder) == before
    (folder / "generation_config.json").write_text("{}")
    assert fingerprint(folder) == before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.norm.weight", lambda weight: weight + 1e-3 * torch.eye(32)[0]),  # one value
        ("model.norm.weight", lambda weight: weight.half()),
        ("lm_head.weight", lambda weight: weight.view(torch.int32)),  # the same bytes
        ("lm_head.weight", lambda weight: weight.reshape(32, 61)),
        ("lm_head.weight", None),
    ],
)
def test_fingerprint_changes_with_the_weights(folder, name, change):
    before = fingerprint(folder)
    weights = load_file(folder / "model.safetensors")
    weight = weights.pop(name)
    save_file(weights | ({name: change(weight)} if change else {}), folder / "model.safetensors")
    assert fingerprint(folder) != before


@pytest.mark.parametrize("place", [0.0, 0.3, 0.9999], ids=["first", "middle", "last"])
def test_fingerprint_covers_every_byte(folder, monkeypatch, tmp_path, place):
    """One byte of a tensor, in place, with size and time of modification as before; whether hashes are kept or not."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "LARGE", 0)
    monkeypatch.setattr(copies, "_SETTLED", 0)
    before, file = fingerprint(folder), folder / "model.safetensors"
    data, header = weights.safetensors_header(file)
    monkeypatch.setattr(identity, "safetensors_header", None)
    assert fingerprint(folder) == before, "of the hashes that are kept"
    monkeypatch.undo()
    begin, end = header["model.layers.1.mlp.down_proj.weight"]["data_offsets"]
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    with file.open("r+b") as stream:
        stream.seek(data + begin + int(place * (end - begin)))
        byte = stream.read(1)
        stream.seek(-1, 1)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=times)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "LARGE", 0)
    said = identity.difference(before, fingerprint(folder))
    assert said.startswith("other weights (fingerprint ")


def test_hashes_of_a_file_just_written_are_not_kept(folder, monkeypatch, tmp_path):
    """It may be written again within the same tick of the clock."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "LARGE", 0)
    fingerprint(folder)
    assert not list(tmp_path.glob("cache/hashes/*"))
    monkeypatch.setattr(copies, "_SETTLED", 0)
    fingerprint(folder)
    assert len(list(tmp_path.glob("cache/hashes/*"))) == 1
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))  # nothing can be kept there
    assert fingerprint(folder) == fingerprint(folder)


def test_a_whole_files_hash_is_kept_until_it_changes(monkeypatch, tmp_path):
    """A GGUF file's, which every start asks for."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(copies, "LARGE", 0)
    monkeypatch.setattr(copies, "_SETTLED", 0)
    file, read = tmp_path / "model.gguf", []
    monkeypatch.setattr(copies, "file_sha256", lambda each: read.append(each) or each.read_text())
    for content, times in (("one", 1), ("one", 1), ("other", 2)):
        if len(read) < times:
            file.write_text(content)
        assert copies.known_sha256(file) == content and read == [file.resolve()] * times


def test_what_differs_is_named(folder):
    whole = fingerprint(folder)
    edit(folder, lambda c: c.update(rms_norm_eps=1e-3))
    other = fingerprint(folder)
    assert identity.difference(whole, other) == "the same weights with another config.json"
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert identity.difference(other, fingerprint(folder)) == "the same weights with another tokenizer"
    assert identity.difference(whole, fingerprint(folder)) == "the same weights with another config.json and tokenizer"
    assert identity.difference("a" * 64, whole).startswith(
        "other weights, config or tokenizer (fingerprint aaaaaaaaaaaa… ≠ "
    )


def test_fingerprint_changes_with_config_and_tokenizer(folder):
    prints = {fingerprint(folder)}
    edit(folder, lambda c: c.update(rms_norm_eps=1e-3))
    prints.add(fingerprint(folder))
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"w5":5', '"x5":5').replace('"w5": 5', '"x5": 5'))
    prints.add(fingerprint(folder))
    assert len(prints) == 3


@pytest.mark.parametrize("name", ["runs/none/at/all", "/nowhere/model", "./nowhere", "nowhere", "nobody/nothing"])
def test_no_such_target(name):
    """At once and without a network: a Hub id that is not in the local store, too."""
    start = time.perf_counter()
    with pytest.raises(FileNotFoundError) as error:
        load_target(name)
    assert str(error.value).startswith(f"'{name}': ") and "\n" not in str(error.value)
    assert time.perf_counter() - start < 20


def test_folder_inside_the_project_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (locate("recipes").path / "tiny-lm.yaml").is_file()


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, **LONG}, 64),
    ],
)
def test_context_of_rotary_frequencies_that_change(make_target, rope, context):
    """As far as they stay the same whatever else is in the batch."""
    assert make_target("llama", rope_parameters={"rope_theta": 1e4, **rope}).context == context
