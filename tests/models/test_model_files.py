"""Real layouts of model folders and repositories: shards, pickled weights, downloads; and what is wrong with them."""

import json
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import sentencepiece
import torch
from miniatures import LLAMA_PIECES
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.common.files import cache_folder
from draftsmith.models.files import copies
from draftsmith.models.files.copies import with_safetensors
from draftsmith.models.files.identity import fingerprint
from draftsmith.models.files.locate import locate
from draftsmith.models.pretrained import from_pretrained
from draftsmith.models.target import load_target
from draftsmith.models.tokenizer import load_tokenizer

PIECES = 400
INDEX = "pytorch_model.bin.index.json"
SAFE_SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
# What Vicuna's repository says besides its weights.
_SPECIAL = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TOKENS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VICUNA = {
    "generation_config.json": {**IDS, "max_length": 4096, "temperature": 0.9, "top_p": 0.6},
    "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"},
    "tokenizer_config.json": {
        **{"add_bos_token": True, "add_eos_token": False, "legacy": False, "model_max_length": 4096, "pad_token": None},
        **{"padding_side": "right", "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer"},
        **{f"{n}_token": {"__type": "AddedToken", "content": token, **_SPECIAL} for n, token in TOKENS.items()},
        "clean_up_tokenization_spaces": False,
    },
}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A sentencepiece model as Llama's: BPE with bytes, made from the licence's text."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    text = Path(__file__).parents[2] / "LICENSE"
    prefix = str(folder / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=prefix, vocab_size=PIECES, **LLAMA_PIECES)
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def whole(pieces, tmp_path_factory):
    """A target in one safetensors file, with Vicuna's other files."""
    folder = tmp_path_factory.mktemp("models") / "whole"
    torch.manual_seed(0)
    sizes = {"vocab_size": PIECES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name, content in VICUNA.items():
        (folder / name).write_text(json.dumps(content))
    shutil.copy(pieces, folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path, monkeypatch):
    """A copy of ``whole`` that a test may change; conversions go to a cache of its own."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(whole, tmp_path / "target")


def in_two(folder, shards, index, save):
    """``folder`` with its weights in two shards."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, listed = sorted(weights), {}
    for number, shard in enumerate(shards):
        save({name: weights[name] for name in names[number::2]}, folder / shard)
        listed |= dict.fromkeys(names[number::2], shard)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def in_shards(folder):
    def save(weights, path):
        save_file(weights, path, metadata={"format": "pt"})

    in_two(folder, SAFE_SHARDS, "model.safetensors.index.json", save)


def pickled(folder):
    in_two(folder, SHARDS, INDEX, torch.save)


def in_one_pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def old_format(folder):
    pickled(folder)
    for shard in SHARDS:
        torch.save(torch.load(folder / shard), folder / shard, _use_new_zipfile_serialization=False)


def sharing_memory(folder):
    """One tensor under several names: all norms, which are ones."""
    pickled(folder)
    for shard in SHARDS:
        weights = torch.load(folder / shard)
        norms = [name for name in weights if "norm" in name]
        torch.save({**weights, **dict.fromkeys(norms, weights[norms[0]])}, folder / shard)


LAYOUTS = {
    "one": lambda folder: None,
    "shards": in_shards,
    "bin": in_one_pickle,
    "bin shards": pickled,
    "bin of old format": old_format,
    "bin with shared memory": sharing_memory,
}


def test_weights_that_are_not_loaded_are_said(folder, capsys):
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    load_target(str(folder))
    said = "the weights are those of model.safetensors; beside them model-00001-of-00002.safetensors, pytorch_model.bin"
    assert f"{said} is not loaded" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(whole, folder, layout):
    """The same target, and the same fingerprint, however it is stored."""
    LAYOUTS[layout](folder)
    target, expected = load_target(str(folder)), load_target(str(whole))
    for name, weight in expected.model.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], weight), name
    assert target.fingerprint == expected.fingerprint == fingerprint(folder)
    assert target.stop_ids == {2}
    assert target.tokenizer("USER: Hello")["input_ids"] == expected.tokenizer("USER: Hello")["input_ids"]


def test_a_conversion_is_made_once(folder, capsys):
    pickled(folder)
    copy = with_safetensors(folder)
    said = capsys.readouterr().err
    assert f"{folder}: pickled weights (2 files, " in said and f"once to safetensors in {copy}" in said
    assert said.count("\n") == 3 and f"2/2 {SHARDS[1]}" in said
    before = {file.name: file.stat().st_mtime_ns for file in copy.iterdir()}
    made = {*SAFE_SHARDS, "model.safetensors.index.json", "converted_from.json"}
    assert set(before) == {"config.json", *VICUNA, "tokenizer.model"} | made
    assert with_safetensors(folder) == copy and capsys.readouterr().err == ""
    assert before == {file.name: file.stat().st_mtime_ns for file in copy.iterdir()}


def test_a_changed_file_is_converted_anew(folder, capsys):
    pickled(folder)
    before = load_target(str(folder))
    weights = torch.load(folder / SHARDS[0])
    weights[sorted(weights)[0]] += 1
    torch.save(weights, folder / SHARDS[0])
    capsys.readouterr()
    after = load_target(str(folder))
    assert "converted" in capsys.readouterr().err
    assert after.fingerprint != before.fingerprint
    config(rms_norm_eps=1e-3)(folder)
    (folder / "special_tokens_map.json").unlink()
    assert load_target(str(folder)).fingerprint != after.fingerprint, "the config is the present one"
    assert capsys.readouterr().err == "", "and the weights are not converted for that"
    assert not (with_safetensors(folder) / "special_tokens_map.json").exists()


def test_a_conversion_that_was_killed_is_begun_again(folder, monkeypatch):
    pickled(folder)

    def killed(path, content):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.models.files.copies.write_json", killed)
        with pytest.raises(SystemExit):
            with_safetensors(folder)
    assert [path.suffix for path in (cache_folder() / "models").iterdir()] == [".lock"], "no half copy is left"
    unfinished = next((cache_folder() / "models").iterdir()).with_suffix("")
    unfinished.mkdir()  # what a kill that nothing can catch leaves
    (unfinished / SAFE_SHARDS[0]).write_bytes(b"half")
    assert load_target(str(folder)).fingerprint == fingerprint(folder)


@pytest.mark.parametrize("name", ["converted_from.json", "model.safetensors.index.json", SAFE_SHARDS[1]])
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"{")])
def test_a_copy_that_lost_a_part_is_made_anew(folder, name, damage, capsys):
    pickled(folder)
    before = fingerprint(folder)
    copy = with_safetensors(folder)
    damage(copy / name)
    capsys.readouterr()
    assert with_safetensors(folder) == copy and "converted" in capsys.readouterr().err
    assert fingerprint(folder) == before


class Command:
    def __reduce__(self):
        return os.system, ("touch loaded_unsafely",)


def edit(name, change):
    """A damage: a JSON file of the folder with other fields; None removes one."""

    def damage(folder):
        content = {**json.loads((folder / name).read_text()), **change}
        (folder / name).write_text(json.dumps({field: value for field, value in content.items() if value is not None}))

    return damage


def config(**fields):
    return edit("config.json", fields)


def weights(change):
    """A damage: other tensors."""

    def damage(folder):
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def and_then(first, second):
    def damage(folder):
        first(folder)
        second(folder)

    return damage


def second_shard(write):
    """A damage of a pickle."""
    return and_then(pickled, lambda folder: write(folder / SHARDS[1]))


def gone(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(shorter):
    return lambda folder: (folder / "model.safetensors").write_bytes(
        shorter((folder / "model.safetensors").read_bytes())
    )


def to_itself(name):
    return lambda folder: ((folder / name).unlink(), (folder / name).symlink_to(name))


def without_mlp(found):
    for name in [name for name in found if "mlp" in name]:
        del found[name]


UNREADABLE = "model.safetensors: not a safetensors file, or truncated"
REFUSED = {
    # weights that do not fit
    "missing": (weights(without_mlp), "missing weights (6): model.layers.0.mlp.down_proj.weight, "),
    "unexpected": (weights(lambda w: w.update(other=torch.ones(2))), "unexpected weights (1): other; fetch"),
    "wrong shape": (weights(lambda w: w.update({"lm_head.weight": torch.ones(5, 32)})),
                    "of another shape than config.json promises (1): lm_head.weight [5, 32] instead of [400, 32]"),
    "one layer less": (config(num_hidden_layers=1), "unexpected weights (9): model.layers.1."),
    "one layer more": (config(num_hidden_layers=3), "missing weights (9): model.layers.2."),
    "not finite": (weights(lambda w: w.update({"lm_head.weight": w["lm_head.weight"] * torch.nan})),
                   "'lm_head.weight' holds NaN or infinity in torch.float32"),
    # no weights
    "no weights": (gone("model.safetensors"), "no weights here (model.safetensors, pytorch_model.bin or their shards)"),
    "no shard": (and_then(in_shards, gone("model-00002-of-00002.safetensors")),
                 "model-00002-of-00002.safetensors: missing, but model.safetensors.index.json lists it"),
    "no index": (and_then(in_shards, gone("model.safetensors.index.json")), "but no *.index.json that lists it"),
    "adapter beside a model": (text("adapter_config.json", b"{}"), "both a whole model (model.safetensors) and an"),
    "adapter": (and_then(gone("model.safetensors"), text("adapter_config.json", b"{}")), "this is an adapter without"),
    # a damaged file
    "empty": (text("model.safetensors", b""), UNREADABLE),
    "cut": (cut(lambda content: content[:-1]), "model.safetensors: truncated ("),
    "cut in its header": (cut(lambda content: content[:100]), UNREADABLE),
    "a web page": (text("model.safetensors", b"<!DOCTYPE html><html>" * 100), UNREADABLE),
    "list for a header": (text("model.safetensors", b"\2" + bytes(7) + b"[]"), UNREADABLE),
    "no offsets": (text("model.safetensors", b"\10" + bytes(7) + b'{"a":{}}'), UNREADABLE),
    "weights to themselves": (to_itself("model.safetensors"), "model.safetensors is here, but no *.index.json"),
    # pickles
    "no .bin shard": (and_then(pickled, gone(SHARDS[1])), f"{SHARDS[1]}: missing, but {INDEX} lists it"),
    "no .bin index": (and_then(pickled, gone(INDEX)), f"{SHARDS[0]} is here, but no *.index.json that lists it"),
    "odd .bin index": (and_then(pickled, text(INDEX, b"{}")), f"{INDEX}: no weight_map of tensors and files"),
    "list for .bin index": (and_then(pickled, text(INDEX, b"[]")), f"{INDEX}: a JSON object is needed"),
    ".bin index to elsewhere": (and_then(pickled, text(INDEX, b'{"weight_map": {"a": "../target/x"}}')), "x: missing"),
    "command in a pickle": (second_shard(lambda path: torch.save({"a": Command()}, path)),
                            f"{SHARDS[1]}: this pickle holds more than tensors (posix.system) and could run any code"),
    "module in a pickle": (second_shard(lambda path: torch.save(torch.nn.Linear(2, 2), path)),
                           "holds more than tensors (torch.nn.modules.linear.Linear)"),
    "checkpoint": (second_shard(lambda path: torch.save({"model": {"a": torch.ones(1)}, "epoch": 3}, path)),
                   f"{SHARDS[1]}: 'model' is no plain tensor"),
    "list in a pickle": (second_shard(lambda path: torch.save([1], path)), "holds a list, not tensors by name"),
    "sparse": (second_shard(lambda path: torch.save({"a": torch.eye(3).to_sparse()}, path)), "'a' is no plain tensor"),
    "empty pickle": (second_shard(lambda path: path.write_bytes(b"")), f"{SHARDS[1]}: not a file of weights, or trunc"),
    "cut pickle": (second_shard(lambda path: path.write_bytes(path.read_bytes()[:-500])), f"{SHARDS[1]}: not a file"),
    "pointer for a pickle": (second_shard(lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n")),
                             f"{SHARDS[1]}: not a file of weights, or damaged"),
    # config
    "no config": (gone("config.json"), "no config.json here, so this is no model folder"),
    "broken config": (text("config.json", b'{"model_type": "llama",'), "config.json: not valid JSON"),
    "list for config": (text("config.json", b"[]"), "config.json: a JSON object is needed"),
    "a drafter": (text("config.json", b'{"drafter_type": "medusa"}'), "this is a drafter, not a target"),
    "config to itself": (to_itself("config.json"), "no config.json here, so this is no model folder"),
    "config of bytes": (text("config.json", b'{"model_type": "\xff"}'), "config.json: not UTF-8 text (byte 16)"),
    "deep config": (text("config.json", b'{"a":' * 100_000), "config.json: JSON nested too deeply"),
    "no model_type": (config(model_type=None), "config.json: no model_type here"),
    "model_type of another type": (config(model_type=3), "config.json: no model_type here"),
    "unknown model_type": (config(model_type="nonesuch"), "knows no model_type 'nonesuch'"),
    "code of its own": (config(model_type="nonesuch", auto_map={"AutoConfig": "x.Y"}), "needs code that comes with it"),
    "no causal model": (config(model_type="t5"), "config.json: 't5' is no causal language model"),
    "width not divisible": (config(num_attention_heads=3), "is not a multiple of the number of attention heads (3)"),
    "no heads": (config(num_attention_heads=0), "config.json: transformers refuses it (ZeroDivisionError"),
    "negative heads": (config(num_attention_heads=-4, num_key_value_heads=None), "config.json: "),
    "no K/V heads": (config(num_key_value_heads=0), "config.json: no model can be made of it"),
    "other K/V heads": (config(num_key_value_heads=3), "k_proj.weight [32, 32] instead of [24, 32]"),
    "text for a width": (config(hidden_size="x"), "Field 'hidden_size' expected int, got str"),
    "huge vocabulary": (config(vocab_size=10**12), "embed_tokens.weight [400, 32] instead of [1000000000000, 32]"),
    "beyond any vocabulary": (config(vocab_size=10**20), "config.json: no model can be made of it"),
    "no vocabulary": (config(vocab_size=0), "embed_tokens.weight [400, 32] instead of [0, 32]"),
    "huge width": (config(head_dim=10**9), "q_proj.weight [32, 32] instead of [4000000000, 32]"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1,000,000,000, but the weights are "),
    "unknown activation": (config(hidden_act="nonesuch"), "no model can be made of it (KeyError: 'nonesuch'"),
    "packed without its library": (config(quantization_config={"quant_method": "gptq", "bits": 4}),
                                   "transformers cannot load gptq-quantised weights (ImportError: "),
    "an unknown packing": (config(quantization_config={"quant_method": "nonesuch"}), "quant_method of quantiza"),
    "packed by nobody": (config(quantization_config={"bits": 4}), "the quant_method of quantization_config is 'None'"),
    "plain and said to be packed": (config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
                                    "says bitsandbytes, but the files hold plain weights; remove that field"),
    "damaged generation config": (text("generation_config.json", b"{"), "generation_config.json: not valid JSON"),
    "odd ids that end a text": (edit("generation_config.json", {"eos_token_id": "x"}), "eos_token_id is 'x'; it has "),
    # tokenizer
    "no tokenizer": (gone("tokenizer.model"), "no tokenizer here (tokenizer.json, tokenizer.model, "),
    "damaged tokenizer": (text("tokenizer.model", b"garbage"), "the tokenizer cannot be loaded ("),
    "empty tokenizer": (text("tokenizer.model", b""), "the tokenizer cannot be used, it yields no token for a word"),
    "damaged tokenizer.json": (text("tokenizer.json", b"["), "the tokenizer cannot be loaded ("),
    "list for tokenizer_config": (text("tokenizer_config.json", b"[]"), "the tokenizer cannot be loaded ("),
    "tokenizer of another model": (
        and_then(config(vocab_size=300), weights(lambda w: [w.update({name: w[name][:300].clone()}) for name in (
            "lm_head.weight", "model.embed_tokens.weight")])),
        "its tokenizer has ids up to 399, its model's end at 299; they do not belong together"),
}  # fmt: skip


@pytest.mark.parametrize("cause", REFUSED)
def test_refused(folder, cause, monkeypatch):
    monkeypatch.chdir(folder)
    damage, said = REFUSED[cause]
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_target(str(folder), trust_remote_code="pickle" in cause)
    message = str(error.value)
    assert said in message and "\n" not in message and len(message) < 700, message
    assert str(folder) in message or "/cache/models/target-" in message
    assert not (folder / "loaded_unsafely").exists()


LOADER = SimpleNamespace(load=from_pretrained, first=lambda make: make())


@pytest.mark.parametrize("options", [{"device_map": "disk"}, {"quantize": "8bit"}, {"loader": LOADER}])
def test_missing_weights_are_refused_however_they_are_loaded(folder, options):
    weights(without_mlp)(folder)
    with pytest.raises(ValueError, match=r"missing weights \(6\): model.layers.0.mlp.down_proj.weight, .* and 3 more;"):
        load_target(str(folder), **options)


def test_what_transformers_ignores_is_accepted(folder):
    """Old checkpoints hold the rotary frequencies; a tied LM head is not stored."""
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    weights(lambda w: (w.update(old), w.pop("lm_head.weight")))(folder)
    with pytest.raises(ValueError, match="missing weights"):
        load_target(str(folder))
    config(tie_word_embeddings=True)(folder)
    assert load_target(str(folder)).vocab_size == PIECES


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cudda"}, "device 'cudda': unknown; use cpu, cuda or cuda:N"),
        ({"device": ""}, "device '': unknown"),
        ({"device": "meta"}, "device 'meta': not available on this machine"),
        ({"device": "xpu"}, "device 'xpu': not available on this machine"),
        ({"device": "cuda:77"}, "device 'cuda:77': "),
        ({"dtype": "float33"}, "dtype 'float33': unknown; use auto, float32, bfloat16, float16"),
        ({"quantize": "2bit"}, "quantize '2bit': unknown"),
        ({"device_map": "gpu"}, "device_map 'gpu': unknown"),
    ],
)
def test_unknown_arguments(whole, options, said):
    with pytest.raises(ValueError) as error:
        load_target(str(whole), **options)
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_names_that_are_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in {
        "file": "this is a file",
        "loop": "a symbolic link that leads to no folder",
        "": "there is no such folder",
        "a\0b": "there is no such folder",
        "x" * 5000: "there is no such folder",
        "a/b/c": "there is no such folder",
        "https://example.org/a": "there is no such folder",
    }.items():
        with pytest.raises(FileNotFoundError, match=said):
            locate(name)


# ---- tokenizers


def test_a_sentencepiece_tokenizer_is_its_own(pieces, whole):
    """Without a tokenizer.json: ids and text are those of the sentencepiece library."""
    tokenizer = load_tokenizer(str(whole))
    own = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    assert len(tokenizer) == PIECES == own.get_piece_size()
    said = ["Hello world", "a\n\nb", "two  spaces", "USER: hi ASSISTANT: no", "é ß 漢字 🙂", "x=1\t2", "12345", ""]
    for text in said:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == own.encode(text)
        assert tokenizer.decode(ids) == own.decode(ids) == text
    assert tokenizer("hi</s>")["input_ids"] == [1, *own.encode("hi"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_a_tiktoken_tokenizer(tmp_path):
    """A file of byte strings and their ranks, as of Llama 3's original form."""
    import base64

    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello"]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "tokenizer.model").write_text("".join(lines))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = load_tokenizer(str(tmp_path))
    ids = tokenizer("hello, 漢!", add_special_tokens=False)["input_ids"]
    assert ids[0] == 259 and tokenizer.decode(ids) == "hello, 漢!"


# ---- the Hub


OTHERS = "flax_model.msgpack tf_model.h5 model.gguf onnx/model.onnx original/consolidated.00.pth original/params.json"
OTHERS = [*OTHERS.split(), "consolidated.safetensors", "training_args.bin", "optimizer.pt"]


def publish(hub, whole, name, change=lambda folder: None):
    """A repository with ``whole``'s files and those of other frameworks."""
    folder = shutil.copytree(whole, hub.folder / "models" / name)
    change(folder)
    for other in OTHERS:
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_text("never to be fetched")
    return folder


def safetensors_and_their_twins(folder):
    kept = (folder / "model.safetensors").read_bytes()
    pickled(folder)
    (folder / "model.safetensors").write_bytes(kept)


def test_a_download_takes_what_is_needed(hub, whole, capsys):
    publish(hub, whole, "lab/both", safetensors_and_their_twins)
    target = load_target("lab/both")
    assert target.fingerprint == fingerprint(whole)
    assert capsys.readouterr().err == f"fetching 'lab/both' from {hub.endpoint}\n"
    fetched = hub.requested("models/lab/both")
    assert "model.safetensors" in fetched and not fetched & {*OTHERS, *SHARDS}


def test_pickled_weights_are_fetched_where_there_are_no_others(hub, whole, capsys, monkeypatch):
    publish(hub, whole, "lab/old", pickled)
    tokenizer = load_tokenizer("lab/old")
    assert not hub.requested("models/lab/old") & {*OTHERS, *SHARDS}
    target = load_target("lab/old")
    assert target.fingerprint == fingerprint(whole) and len(target.tokenizer) == len(tokenizer)
    assert {*SHARDS, "tokenizer.model"} <= hub.requested("models/lab/old")
    assert not hub.requested("models/lab/old") & set(OTHERS)
    assert ": its pickled weights, there are no others\n" in capsys.readouterr().err
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load_target("lab/old").fingerprint == target.fingerprint and capsys.readouterr().err == ""


def test_what_was_located_is_not_looked_up_again(hub, whole, monkeypatch):
    publish(hub, whole, "lab/once")
    small = locate("lab/once", weights=False)
    assert not (small.complete or (small.path / "model.safetensors").exists())
    model = locate(small)
    assert model.complete and model.path == small.path and locate(model, weights=False) is model
    monkeypatch.setattr("draftsmith.models.files.locate._download", None)
    assert load_target(model).fingerprint == fingerprint(whole) and load_tokenizer(small)
    with pytest.raises(TypeError):
        load_target(small)  # its weights would have to be downloaded


def test_repositories_that_give_nothing(hub, whole, monkeypatch):
    hub.gated["models/lab/gated"] = {"hf_other"}
    publish(hub, whole, "lab/gated")
    publish(hub, whole, "lab/open")
    gated = f"it is gated: accept its licence at {hub.endpoint}/lab/gated, then log in with hf auth login"
    for name, revision, said in [
        ("lab/gated", None, gated),
        ("lab/none", None, f"{hub.endpoint} has no such repository, or it is private"),
        ("lab/open", "v9", f"it has no revision 'v9' at {hub.endpoint}"),
    ]:
        with pytest.raises(FileNotFoundError) as error:
            load_target(name, revision=revision)
        assert str(error.value).startswith(f"'{name}': no such folder here; {said}") and "\n" not in str(error.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/proc/downloads")
    with pytest.raises(ValueError, match=r"^/proc/downloads.*: the download cache cannot be used .*; set HF_HOME"):
        load_target("lab/open")


def test_no_network(hub, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        said = "it is not in the cache, or incomplete there, and .* does not answer"
        with pytest.raises(FileNotFoundError, match=said) as error:
            load_target("lab/open")
    assert "\n" not in str(error.value)


# ---- no room


def test_a_cache_that_cannot_be_made(folder, monkeypatch):
    pickled(folder)
    for place in ("/proc/x", "/etc/passwd"):
        monkeypatch.setenv("DRAFTSMITH_CACHE", place)
        with pytest.raises(ValueError, match=f"^{place}/models: the cache cannot be made here .* set DRAFTSMITH_CACHE"):
            load_target(str(folder))


def test_a_conversion_that_does_not_fit(folder, monkeypatch):
    pickled(folder)
    monkeypatch.setattr(copies, "_MARGIN", 1 << 60)
    with pytest.raises(ValueError, match=r"a safetensors copy of .* needs 0.0 GB, .* free; free some space, or set"):
        load_target(str(folder))
    assert not list((cache_folder() / "models").glob("target-*/*"))
