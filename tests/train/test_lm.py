"""A language model from scratch, by the shipped recipe with smaller numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.train import lm

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.vocab_size=420", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=8", "model.intermediate_size=48", "model.max_position_embeddings=128",
    "data.train=[{source: stdlib, split: test}, {source: stdlib, split: test, form: chat, weight: 0.2}]",
    "data.max_length=64", "stages.0.steps=12", "stages.0.max_length=32", "stages.0.optim.warmup_steps=2",
    "stages.1.steps=5", "stages.1.max_length=32", "stages.2.steps=3", "stages.2.max_length=96",
    "precision={autocast: none, compile: false, threads: 1}", "evaluate={every: 10, sequences: 4}",
    "checkpoint={every: 10, keep: 1}",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    command = [sys.executable, "train/lm.py", "recipes/tiny-lm.yaml", f"run.output_dir={folder}", "run.name=x", *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr and "arning" not in done.stderr
    return folder / "x"


@pytest.fixture(scope="module")
def tokenizer(trained):
    return AutoTokenizer.from_pretrained(trained)


def test_the_folder_opens(trained, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(trained, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert len(tokenizer) == model.config.vocab_size == model.get_output_embeddings().weight.shape[0] == 420
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (2, 2)
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|endoftext|>", 128)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|end|>")]
    assert model.generation_config.eos_token_id == ends
    loss = float(model.float()(**tokenizer("import os\n" * 5, return_tensors="pt")).logits.isfinite().float().mean())
    assert loss == 1


def test_it_learnt_something(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = {(line["stage"], line["step"]): line["loss"] for line in lines if "loss" in line}
    assert list(losses) == [("stable", 10), ("stable", 12), ("decay", 17), ("long", 20)]
    assert losses["long", 20] < losses["stable", 10]
    provenance = json.loads((trained / "provenance.json").read_text())
    assert provenance["trained_tokens"] == 16 * 32 * 17 + 4 * 96 * 3
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert provenance["validation_loss"] == pytest.approx(validation[-1], abs=0.05), "the weights as stored"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  a",
        "a  ",
        "\t\n\r\n",
        "naïve ñ ﬁ",
        "日本語 → 🙂🇮🇹",
        "\x00\x7f\u2028\ufeff",
        "don't  , 's !",
        "x" * 300,
    ],
)
def test_text_comes_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < 420


def test_special_tokens_are_one_token_each(tokenizer):
    for token in ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"):
        assert len(tokenizer(token)["input_ids"]) == 1
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [1]


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Write f."},
    {"role": "assistant", "content": "def f():\n    pass"},
    {"role": "user", "content": "And g?"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "{{ g }}"},
    {"role": "assistant", "content": "日本 <b>"},
]


def test_the_template_marks_exactly_what_the_assistant_writes(tokenizer):
    chat = tokenizer.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    ids, marks = chat["input_ids"], chat["assistant_masks"]
    assert tokenizer.decode(ids) == (
        "<|system|>\nBe short.<|end|>\n<|user|>\nWrite f.<|end|>\n<|assistant|>\ndef f():\n    pass<|end|>"
        "<|user|>\nAnd g?<|end|>\n<|assistant|>\n<|end|><|user|>\n{{ g }}<|end|>\n<|assistant|>\n日本 <b><|end|>"
    )
    marked = tokenizer.decode([token for token, mark in zip(ids, marks, strict=True) if mark])
    assert marked == "def f():\n    pass<|end|><|end|>日本 <b><|end|>"
    asked = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(CHAT[:3], tokenize=False).startswith(asked)


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.vocab_size=200", "'model.vocab_size': input should be greater than or equal to 261, got 200"),
        ("model.num_kv_heads=3", "'model': num_heads=4 is not a multiple of num_kv_heads=3"),
        ("stages=[]", "'stages': list should have at least 1 item"),
        ("model.layers=3", "unknown key 'model.layers'; nearest valid key: model.num_layers"),
        ("data.train=[{source: 'package:yaml', split: test}]", "has no text in split 'test'"),
        ("stages.2.max_length=9000000", "the data set is empty: "),
    ],
)
def test_bad_recipes_are_one_line(run_main, tmp_path, override, message):
    code, _, err = run_main(lm.main, ROOT / "recipes/tiny-lm.yaml", f"run.output_dir={tmp_path}", *SMALL, override)
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err
