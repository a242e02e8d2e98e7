"""A language model from scratch, by the shipped recipe with smaller numbers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import Runs, metrics
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.common.data_sections import Source
from draftsmith.common.recipe import read_recipe
from draftsmith.data import bpe
from draftsmith.data.rows import Skipped
from draftsmith.models.files.locate import locate
from draftsmith.train import lm, unlikelihood

ROOT = Path(__file__).parents[2]
MODEL = "vocab_size=420 hidden_size=32 num_layers=2 num_heads=4 num_kv_heads=2 head_dim=8 intermediate_size=48".split()
SMALL = [
    *(f"model.{field}" for field in MODEL),
    "model.max_position_embeddings=128",
    "data.train=[{source: stdlib, split: test}, {source: stdlib, split: test, form: chat, weight: 0.2}]",
    "lookahead={num_heads: 2, share: 0.25}",
    "data.max_length=64",
    "stages=["
    + ", ".join(
        f"{{name: {name}, max_length: {length}, steps: {steps}, batch: {{sequences: {sequences}}}, "
        f"optim: {{name: muon, lr: {lr}, weight_decay: 0.1, schedule: {schedule}, warmup_steps: 2}}}}"
        for name, length, steps, sequences, lr, schedule in [
            ("stable", 32, 12, 16, 3e-3, "constant"),
            ("decay", 32, 5, 16, 3e-3, "linear"),
            ("long", 96, 3, 4, 3e-4, "constant"),
        ]
    )
    + "]",
    "precision={autocast: none, compile: false, threads: 1}",
    "evaluate={every: 10, sequences: 4}",
    "checkpoint={every: 10, keep: 1}",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_main):
    folder = tmp_path_factory.mktemp("lm")
    code, _, err = run_main(lm.main, ROOT / "recipes/tiny-lm.yaml", f"run.output_dir={folder}", "run.name=x", *SMALL)
    assert code == 0, err
    assert "error" not in err and "arning" not in err
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


def test_its_page_says_why_it_shows_no_text(trained):
    page = (trained / "training.html").read_text()
    assert "this run trains a model" in page and f"--target {trained}" in page and "drafted by" not in page


def test_it_learnt_something(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = {(line["stage"], line["step"]): line["loss"] for line in lines if "loss" in line}
    assert list(losses) == [("stable", 10), ("stable", 12), ("decay", 17), ("long", 20)]
    assert losses["long", 20] < losses["stable", 10]
    provenance = json.loads((trained / "provenance.json").read_text())
    assert provenance["trained_tokens"] == 16 * 32 * 17 + 4 * 96 * 3
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert provenance["validation_loss"] == pytest.approx(validation[-1], abs=0.05), "the weights as stored"


TEXTS = ["", " ", "  a", "a  ", "\t\n\r\n", "naïve ñ ﬁ", "日本語 → 🙂🇮🇹", "\x00\x7f\u2028\ufeff", "don't  , 's !"]


@pytest.mark.parametrize("text", [*TEXTS, "x" * 300])
def test_encoded_text_decodes_to_itself(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < 420


def test_special_tokens_are_one_token_each(tokenizer):
    for token in ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"):
        assert len(tokenizer(token)["input_ids"]) == 1
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [1]


def small_model():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))


def test_the_loss_written_out():
    """Next token over all rows, heads over the first half, unlikelihood over what was written again."""
    module = lm.LanguageModel(small_model(), lm.Lookahead(num_heads=2, weight=0.5, share=0.5))
    assert module.heads is not None
    torch.nn.init.normal_(module.heads.weight, std=0.3)
    module.unlikelihood = 0.7
    tokens = torch.randint(50, (4, 9))
    written = torch.randint(50, (3, 6))
    again = torch.zeros(3, 6, dtype=torch.bool)
    again[0, 3] = again[2, 5] = again[2, 4] = True
    batch = {"tokens": tokens.int(), "written": written.int(), "again": again}
    counts = module.count(batch)
    assert counts.tolist() == [4 * 8, 2 * 7, 2 * 6, 3]
    loss, metrics = module(batch, counts, 0)

    def log_probability(logits, token):
        return torch.log_softmax(logits, -1)[token]

    hidden = module.model.model(tokens).last_hidden_state
    heads = module.heads.logits(hidden.flatten(0, 1), module.model.lm_head).unflatten(1, (4, 9))
    expected = [0.0, 0.0, 0.0]
    for row in range(4):
        for t in range(8):
            expected[0] -= log_probability(module.model.lm_head(hidden[row, t]), tokens[row, t + 1]) / counts[0]
            for k in (1, 2):
                if row < 2 and t + k + 1 < 9:
                    expected[k] -= log_probability(heads[k - 1, row, t], tokens[row, t + k + 1]) / counts[k]
    logits = module.model(written).logits
    unlikely = sum(
        -torch.log(1 - torch.softmax(logits[i, t - 1], -1)[written[i, t]]) for i, t in again.nonzero().tolist()
    )
    total = expected[0] + 0.5 * (0.8 * expected[1] + 0.64 * expected[2]) + 0.7 * unlikely / 3
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    assert float(metrics["next_token_loss"]) == pytest.approx(float(expected[0]), rel=1e-4)
    assert float(metrics["repetition_loss"]) == pytest.approx(float(unlikely / 3), rel=1e-4)
    loss.backward()
    assert module.heads.bias.grad is not None and module.model.model.embed_tokens.weight.grad is not None


def test_repeated_ngrams():
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2, 9, 1, 2, 3], [5, 5, 5, 5, 5, 5, 0, 0, 0, 0, 0, 0]])
    supervised = torch.zeros(2, 12, dtype=torch.bool)
    supervised[0, 3:], supervised[1, 1:6] = True, True
    again = unlikelihood.repeated(tokens, supervised, 3)
    # Row 0 writes 1 2 3 1 2 9 1 2 3 behind its prompt: 1 2 3 comes twice. Row 1 writes 5 5 5 5 5.
    assert again.nonzero().tolist() == [[0, 11], [1, 4], [1, 5]]
    assert not unlikelihood.repeated(tokens, supervised, 6).any()


def test_unlikelihood_gets_a_model_out_of_its_loop():
    """A model that has learnt to repeat one token; a few steps on its own continuation make it less sure."""
    module = lm.LanguageModel(small_model())
    loop = torch.full((2, 12), 7)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    written = {"written": loop.int(), "again": torch.tensor([[False] * 6 + [True] * 6] * 2)}
    probabilities = []
    for extra in ({}, written):
        for _ in range(30):
            tokens = loop if not extra else torch.randint(50, (2, 12))
            batch = {"tokens": tokens.int(), **extra}
            loss, _ = module(batch, module.count(batch), 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        probabilities.append(float(torch.softmax(module.model(loop).logits[0, 8], -1)[7]))
    assert probabilities[0] > 0.95 > 0.2 > probabilities[1]


def test_begin_with_another_model(run_main, trained, tmp_path):
    """``init_from`` brings weights and tokenizer; a stage writes on with its own continuations."""
    answers = {"prompts": 8, "prompt_tokens": 16, "new_tokens": 24, "batch_size": 8}
    written = {"ngram": 2, "source": {"source": "stdlib", "split": "test", "answers": answers}}
    stage = {"name": "a", "max_length": 32, "steps": 2, "optim": {"lr": 1e-9}, "batch": {"sequences": 4}}
    stages = "stages=" + json.dumps([{**stage, "unlikelihood": written}])
    begin = Runs(lm.main, ROOT / "recipes/tiny-lm.yaml", run_main)
    options = [f"run.output_dir={tmp_path}", *SMALL, f"init_from={trained}", stages]
    begin("x", *options)
    assert "the model continues 8 prompts" in begin.out
    before = load_file(trained / "model.safetensors")
    after = load_file(tmp_path / "x" / "model.safetensors")
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    assert (trained / "tokenizer.json").read_bytes() == (tmp_path / "x" / "tokenizer.json").read_bytes()
    assert metrics(tmp_path / "x", "repetition_loss")
    said = begin.refused("x", *options, "--resume", "stages.0.steps=4", "stages.0.unlikelihood.ngram=3")
    assert "--resume: stage a continues texts by another 'unlikelihood'; set it back, or --restart" in said
    said = begin.refused("x", *options, "--resume", "stages.0.steps=4", "model.rope_theta=5000")
    assert "x: it began with model.rope_theta=100000.0, not 5000.0; set it back, or --restart" in said
    written["source"]["answers"]["prompts"] = 999_999
    later = "stages=" + json.dumps([stage, {**stage, "name": "b", "unlikelihood": written}])
    said = begin.refused("w", *options, later)
    assert "'stdlib' split 'test' gives only" in said and not (tmp_path / "w/metrics.jsonl").exists(), (
        "before any stage"
    )
    said = begin.refused("z", *options, "stages.0.unlikelihood.source.answers.prompt_tokens=4096")
    assert "answers.prompt_tokens=4096 leaves no room within model.max_position_embeddings=" in said
    said = begin.refused("y", *options, "model.hidden_size=40")
    assert said.startswith(f"error: init_from={trained}: its shape is not the recipe's model")
    said = begin.refused("z", *options, "stages.0.unlikelihood.source.answers=null")
    assert "source needs 'answers'" in said
    said = begin.refused(
        "z", *options, "stages.0.unlikelihood.source={source: a.jsonl, answers: {prompts: 8, new_tokens: 24}}"
    )
    assert "source 'a.jsonl': only text of stdlib and package:NAME is continued" in said
    said = begin.refused("z", *options, "stages.0.max_length=5000")
    assert "rows of 5000 tokens, but model.max_position_embeddings is " in said


def test_a_tokenizer_without_our_end_token(trained, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("checkpoints"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((folder / name).read_text().replace("<|end|>", "</s>"))
    recipe = read_recipe(ROOT / "recipes/tiny-lm.yaml", lm.LmRecipe, [*SMALL, f"init_from={folder}"])
    with pytest.raises(ValueError, match=r"its tokenizer has no <\|end\|>; begin with a model of train/lm\.py"):
        lm.check_beginning(locate(recipe.init_from), recipe.model)


def test_another_models_tokenizer(run_main, trained, tmp_path):
    """``tokenizer`` takes another model's as it is, for a model of another shape."""
    recipe = ROOT / "recipes/tiny-draft.yaml"
    small = [*SMALL, "lookahead=null", "model.num_layers=1", f"tokenizer={trained}", f"run.output_dir={tmp_path}"]
    stage = "stages=[{name: a, max_length: 32, steps: 1, optim: {lr: 1e-3}, batch: {sequences: 4}}]"
    code, out, err = run_main(lm.main, recipe, *small, stage)
    assert code == 0, err
    assert "training the tokenizer" not in out
    assert (trained / "tokenizer.json").read_bytes() == (tmp_path / "tiny-draft" / "tokenizer.json").read_bytes()
    code, _, err = run_main(lm.main, recipe, *small, stage, "run.name=a", "model.vocab_size=300")
    assert code == 2 and err == f"error: tokenizer={trained}: it has 420 entries; set model.vocab_size=420\n"
    code, _, err = run_main(lm.main, recipe, *small, stage, "run.name=b", f"init_from={trained}")
    assert code == 2 and "leave out one of 'init_from' and 'tokenizer'" in err
    code, _, err = run_main(lm.main, recipe, *small, stage, "run.name=c", f"tokenizer={tmp_path}")
    assert code == 2 and err == f"error: tokenizer={tmp_path}: no tokenizer there (tokenizer.json)\n"


def test_chats_that_the_template_refuses_are_skipped(tmp_path, tiny_lm):
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    tokenizer.chat_template = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}" + bpe.TEMPLATE
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": CHAT[1:n]}) + "\n" for n in (3, 5)))
    skipped = Skipped()
    found = list(bpe.texts(Source(source=str(tmp_path / "a.jsonl")), tokenizer, skipped))
    assert found == ["<|user|>\nWrite f.<|end|>\n<|assistant|>\ndef f():\n    pass<|end|>"]
    assert skipped.reasons == {"the chat template refuses this chat: one turn": (1, "line 2")}


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
