"""Weights of GGUF files, dequantised by our processes, are bit for bit those of transformers' conversion."""

import json
import os
import signal
import sys
import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_files import add_shape, add_tokenizer, finish, interleaved
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.models.files import copies, from_gguf, gguf_blocks, weights
from draftsmith.models.files.locate import FETCHED, gguf_file, locate

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 128}
KINDS = [kind for kind in Kind if gguf_blocks._known(kind)]


@pytest.fixture(scope="module")
def tokenizer(tiny_lm):
    return AutoTokenizer.from_pretrained(tiny_lm)


def blocks(kind, shape, random):
    """Random bytes as the blocks of a matrix, those of finite values."""
    if kind in (Kind.F32, Kind.F16):
        return random.normal(size=shape).astype(np.float32 if kind == Kind.F32 else np.float16)
    length, size = gguf.GGML_QUANT_SIZES[kind]
    needed, found = int(np.prod(shape)) // length, np.zeros((0, size), np.uint8)
    while len(found) < needed:
        drawn = random.integers(0, 256, (2 * needed, size), np.uint8)
        with np.errstate(all="ignore"):
            finite = np.isfinite(dequantize(drawn, kind)).all(-1)
        found = np.concatenate([found, drawn[finite]])
    return found[:needed].reshape(shape[0], -1)


def write(path, architecture, tokenizer, kinds, *, tied=False, more=None, **fields):
    """A GGUF file of a random model; its matrices are of these kinds in turn, other tensors float32."""
    fields = {**SHAPE, "vocab_size": len(tokenizer), "tie_word_embeddings": tied, **fields}
    config = AutoConfig.for_model(architecture, **fields)
    config.rope_parameters["rope_theta"] = 5000.0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    add_shape(writer, config)
    if head := fields.get("head_dim"):
        writer.add_key_length(head)
        writer.add_value_length(head)
    add_tokenizer(writer, tokenizer)
    random, count = np.random.default_rng(0), 0
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        own, kind = f"{names.get_name(stem)}.{suffix}", Kind.F32
        if tensor.dim() > 1:
            kind, count = kinds[count % len(kinds)], count + 1
        writer.add_tensor(own, blocks(kind, tuple(tensor.shape), random), raw_dtype=kind)
    if more:
        writer.add_tensor(more, np.ones(4, np.float32))
    finish(writer)
    return path


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """``converted(file, by_transformers)`` → the folder of its copy, and whether transformers converted it."""
    calls = []
    convert = from_gguf._by_transformers
    monkeypatch.setattr(from_gguf, "_by_transformers", lambda *rest: (calls.append(rest), convert(*rest)))

    def run(file, by_transformers=False):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setenv("DRAFTSMITH_CACHE", str(tmp_path / f"cache-{by_transformers}"))
            if by_transformers:
                patch.setattr(from_gguf, "_MAPPED", ())
            return locate(str(file)).path, bool(calls)

    return run


def same(ours, theirs):
    """Every file of the two copies but the stamp; tensors bit for bit."""
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    for path in ours.iterdir():
        if path.name not in (weights.SINGLE, copies.STAMP):
            assert path.read_bytes() == (theirs / path.name).read_bytes(), path.name
    one, other = load_file(ours / weights.SINGLE), load_file(theirs / weights.SINGLE)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        bits = torch.int16 if tensor.dtype.itemsize == 2 else torch.int32
        assert torch.equal(tensor.view(bits), other[name].view(bits)), name
    return one


ARCHITECTURES = [
    ("llama", {}, [Kind.Q8_0, Kind.Q4_0]),
    ("llama", {"tied": True, "num_attention_heads": 8}, [Kind.F16]),
    ("qwen2", {}, [Kind.F32]),
    ("qwen2", {"tied": True}, [Kind.Q5_1]),
    ("qwen3", {"head_dim": 128}, [Kind.Q5_0, Kind.IQ4_NL]),
    ("qwen3", {"head_dim": 128, "tied": True}, [Kind.Q4_K, Kind.BF16]),
]


@pytest.mark.parametrize(("architecture", "fields", "kinds"), ARCHITECTURES, ids=lambda each: str(each)[:20])
def test_architectures(converted, tokenizer, tmp_path, architecture, fields, kinds):
    file = write(tmp_path / "tiny.gguf", architecture, tokenizer, kinds, **fields)
    ours, by_transformers = converted(file)
    assert not by_transformers
    theirs, by_transformers = converted(file, by_transformers=True)
    assert by_transformers
    same(ours, theirs)
    assert {each[0] for each in ARCHITECTURES} == set(from_gguf._MAPPED)


def test_every_kind_of_blocks(converted, tokenizer, tmp_path):
    """All that the package dequantises, in one file."""
    layers = -(-len(KINDS) // 7)
    file = write(tmp_path / "all.gguf", "qwen2", tokenizer, KINDS, num_hidden_layers=layers)
    ours, by_transformers = converted(file)
    assert not by_transformers and len(KINDS) >= 20
    assert {tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors} == set(KINDS)
    same(ours, converted(file, by_transformers=True)[0])


@pytest.mark.needs_models
def test_smollm2_whole(converted):
    """A published file (Q4_1, Llama's architecture)."""
    file = gguf_file(FETCHED)
    assert file
    ours, by_transformers = converted(file)
    assert not by_transformers
    assert len(same(ours, converted(file, by_transformers=True)[0])) > 250


def test_rounding_is_that_of_torch():
    """All bit patterns of bfloat16, and those just before, on and after the ties between them."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    bits = upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = bits.view(np.float32)
    for dtype in ("bfloat16", "float16", "float32"):
        expected = torch.from_numpy(values).to(getattr(torch, dtype))
        with np.errstate(all="ignore"):
            got = torch.from_numpy(gguf_blocks._rounded(values, dtype).view(f"i{expected.itemsize}"))
        numbers = ~expected.isnan()
        assert torch.equal(got[numbers], expected.view(got.dtype)[numbers])
        assert got.view(expected.dtype)[~numbers].isnan().all()


def test_others_go_through_transformers(converted, tokenizer, tmp_path):
    """A tensor that the model does not have, and an architecture whose tensors are not the model's."""
    strange = write(tmp_path / "strange.gguf", "qwen2", tokenizer, [Kind.Q8_0], more="blk.0.strange.weight")
    plain = write(tmp_path / "plain.gguf", "qwen2", tokenizer, [Kind.Q8_0])
    (ours, one), (theirs, other) = converted(plain), converted(strange)
    assert (one, other) == (False, True)
    same(ours, theirs)
    with_frequencies = write(tmp_path / "rope.gguf", "llama", tokenizer, [Kind.Q8_0], more="rope_freqs.weight")
    assert converted(with_frequencies)[1] is False
    assert converted(write(tmp_path / "gemma.gguf", "gemma2", tokenizer, [Kind.Q8_0], head_dim=64, tied=True))[1]


@pytest.fixture
def processes(monkeypatch):
    """Two processes, and pieces of some rows of them each."""
    started, popen = [], gguf_blocks.subprocess.Popen
    monkeypatch.setattr(from_gguf, "available_cores", lambda: 2)
    monkeypatch.setattr(gguf_blocks, "_WORTH", 1)
    monkeypatch.setattr(gguf_blocks, "_PIECE", 7000)
    monkeypatch.setattr(
        gguf_blocks.subprocess, "Popen", lambda *a, **k: (started.append(popen(*a, **k)), started[-1])[1]
    )
    return started


def test_processes(converted, tokenizer, tmp_path, processes, monkeypatch):
    """The same file as one process makes; without one of them an error, and no copy."""
    file = write(tmp_path / "tiny.gguf", "llama", tokenizer, [Kind.Q6_K, Kind.Q4_0])
    ours, _ = converted(file)
    assert [process.returncode for process in processes] == [0, 0]
    same(ours, converted(file, by_transformers=True)[0])
    os.remove(ours / copies.STAMP)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(ValueError, match=f"{file}: a process that converts it was killed, perhaps for want of memory"):
        converted(file)
    assert not ours.exists()


def test_errors_of_processes(tokenizer, tmp_path, processes):
    """A full disk keeps its number, and names the file."""
    file = write(tmp_path / "tiny.gguf", "llama", tokenizer, [Kind.Q6_K])
    reader = gguf.GGUFReader(file)
    header, pieces = gguf_blocks.plan(reader, {t.name: t.name for t in reader.tensors}, {}, "bfloat16")
    with pytest.raises(OSError) as error:
        gguf_blocks.write(
            file, tmp_path / "copy", header, [p._replace(source=10**9) for p in pieces], "bfloat16", 2, print
        )
    assert error.value.errno == 5 and all(process.returncode is not None for process in processes)


def test_a_kill_in_the_middle(converted, tokenizer, tmp_path, monkeypatch):
    """What is left of a command that was killed is never used, and made anew."""
    file = write(tmp_path / "tiny.gguf", "llama", tokenizer, [Kind.Q8_0])
    convert, number = gguf_blocks._convert, iter(range(100))

    def killed(*arguments):
        if next(number) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        convert(*arguments)

    if not (child := os.fork()):
        monkeypatch.setattr(gguf_blocks, "_convert", killed)
        converted(file)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (unfinished,) = (tmp_path / "cache-False/gguf").glob("*/.new.tmp/model.safetensors")
    assert not list((tmp_path / "cache-False/gguf").glob("*/*.json"))
    ours, _ = converted(file)
    assert not unfinished.exists() and json.loads((ours / copies.STAMP).read_text())["file"] == "tiny.gguf"
    same(ours, converted(file, by_transformers=True)[0])


def test_memory(tmp_path):
    """A piece at a time: far less than one matrix."""
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    matrix = np.random.default_rng(0).normal(size=(4096, 2048)).astype(np.float32)
    writer.add_tensor("output.weight", quantize(matrix, Kind.Q8_0), raw_dtype=Kind.Q8_0)
    finish(writer)
    reader = gguf.GGUFReader(tmp_path / "wide.gguf")
    header, pieces = gguf_blocks.plan(reader, {"output.weight": "lm_head.weight"}, {"output.weight": 32}, "bfloat16")
    tracemalloc.start()
    gguf_blocks.write(tmp_path / "wide.gguf", tmp_path / "copy", header, pieces, "bfloat16", 1, lambda done: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    os.rename(tmp_path / "copy", tmp_path / "copy.safetensors")
    written = load_file(tmp_path / "copy.safetensors")["lm_head.weight"]
    expected = torch.from_numpy(dequantize(quantize(matrix, Kind.Q8_0), Kind.Q8_0)).bfloat16()
    assert torch.equal(torch.from_numpy(interleaved(written.float().numpy(), 32)).bfloat16(), expected)
    assert peak < 8 << 20 < matrix.nbytes / 2, f"{peak:,} bytes"
