"""Small repositories of real layouts: a manifest says which files there are and what they hold; the widths are tiny.

The weights are random and large, so that greedy text does not repeat itself at once; the tokenizers are trained on the
project's own text and have the real special tokens in the real order behind a small vocabulary; the chats are made up.
"""

import io
import json
import random
import zlib
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PIECES = 512  # of the sentencepiece models; the byte-level ones have as many before their special tokens
PADDING = 64  # a vocabulary that is padded beyond its tokenizer becomes a multiple of this
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
# As Llama's sentencepiece model was made
LLAMA_PIECES: dict[str, Any] = {"model_type": "bpe", "byte_fallback": True, "split_digits": True, "minloglevel": 2}
LLAMA_PIECES |= {"allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False, "add_dummy_prefix": True}
LLAMA_PIECES |= {"normalization_rule_name": "identity", "unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: ASSISTANT:"
)
WORDS = "river stone copy the licence below grant work of notice may not source form under any place on with".split()


def manifests() -> dict[str, dict[str, Any]]:
    """Repository (``models/USER/NAME``, ``datasets/USER/NAME``) → its manifest."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((HERE / "manifests").glob("*.json"))]
    return {manifest["repository"]: manifest for manifest in found}


def build(folder: Path) -> None:
    """Every repository that has a manifest, below ``folder``."""
    for repository, manifest in manifests().items():
        root = folder / repository
        (build_model if repository.startswith("models/") else build_data)(root, manifest)
        stored = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        assert stored == set(manifest["files"]), f"{repository}: {stored ^ set(manifest['files'])}"


def _json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- models


def build_model(root: Path, manifest: dict[str, Any]) -> None:
    root.mkdir(parents=True)
    ids = write_tokenizer(root, manifest)
    write_weights(root, manifest, ids)
    for name in manifest["files"]:
        path = root / name
        if not path.exists():  # what no loader needs: to ask for it is a mistake that the tests look for
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"of no use to a loader\n")


def _texts() -> list[str]:
    return [(ROOT / "LICENSE").read_text(encoding="utf-8"), *[SYSTEM] * 20, " ".join(WORDS) * 20]


def write_tokenizer(root: Path, manifest: dict[str, Any]) -> dict[int, int]:
    """The tokenizer's files; returns the real id → the id here, for the ids that the configs name."""
    wanted = manifest["tokenizer"]
    special = {str(token): number for token, number in wanted.get("special_ids", {}).items()}
    kept = "bos_token eos_token unk_token pad_token add_bos_token add_eos_token legacy model_max_length errors"
    kept += " clean_up_tokenization_spaces additional_special_tokens model_input_names add_prefix_space"
    kept += " split_special_tokens"
    fields: dict[str, Any] = {name: value for name, value in wanted.items() if name in kept.split()}
    fields["tokenizer_class"] = wanted["class"]
    if wanted["chat_template"]:
        fields["chat_template"] = (HERE / "templates" / wanted["chat_template"]).read_text(encoding="utf-8")
    if wanted["kind"] == "sentencepiece":
        order = wanted["special"]
        numbers = {number: number for number in range(len(order))}
        stream = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter("\n".join(_texts()).splitlines()),
            model_writer=stream,
            vocab_size=PIECES,
            **LLAMA_PIECES,
        )
        (root / "tokenizer.model").write_bytes(stream.getvalue())
    else:
        base = Tokenizer(models.BPE())
        base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        base.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=PIECES, initial_alphabet=alphabet, show_progress=False)
        base.train_from_iterator(_texts(), trainer)
        assert base.get_vocab_size() == PIECES
        named = {number - wanted["base_size"]: token for token, number in special.items()}
        spare = iter(wanted.get("added") or [f"<|reserved_special_token_{n}|>" for n in range(wanted["special_count"])])
        named |= {
            place: next(token for token in spare if token not in special)
            for place in range(wanted["special_count"])
            if place not in named
        }
        order = [named[place] for place in range(wanted["special_count"])]
        base.add_special_tokens(order[: len(order) - len(wanted.get("added", ()))])
        base.add_tokens(order[len(order) - len(wanted.get("added", ())) :])
        assert [base.token_to_id(token) for token in order] == list(range(PIECES, PIECES + len(order)))
        if wanted["bos_token"]:
            bos = wanted["bos_token"]
            base.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, base.token_to_id(bos))]
            )
        base.save(str(root / "tokenizer.json"))
        if "vocab.json" in manifest["files"]:
            base.model.save(str(root))  # vocab.json, merges.txt
        numbers = {number: PIECES + number - wanted["base_size"] for number in special.values()}
    first = 0 if wanted["kind"] == "sentencepiece" else PIECES
    added = set(wanted.get("added", ()))
    plain = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    fields["added_tokens_decoder"] = {
        str(first + place): {"content": token, **plain, "special": token not in added}
        for place, token in enumerate(order)
    }
    _json(root / "tokenizer_config.json", fields)
    if "special_tokens_map.json" in manifest["files"]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        _json(root / "special_tokens_map.json", {name: wanted[name] for name in names if wanted.get(name)})
    if "added_tokens.json" in manifest["files"]:
        _json(root / "added_tokens.json", {token: place for place, token in enumerate(order)})
    if wanted["kind"] == "sentencepiece" and "tokenizer.json" in manifest["files"]:
        AutoTokenizer.from_pretrained(root).backend_tokenizer.save(str(root / "tokenizer.json"))
    return numbers


def _here(value: Any, ids: dict[int, int]) -> Any:
    return [ids[number] for number in value] if isinstance(value, list) else ids.get(value, value)


def write_weights(root: Path, manifest: dict[str, Any], ids: dict[int, int]) -> None:
    """config.json and generation_config.json with the real fields, and the weights in the real kind of shards."""
    config = dict(manifest["config"])
    wanted = manifest["tokenizer"]
    vocabulary = PIECES + wanted.get("special_count", 0)
    if config["vocab_size"] > wanted.get("base_size", config["vocab_size"]) + wanted.get("special_count", 0):
        vocabulary = vocabulary // PADDING * PADDING + PADDING
    safe = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
    shards = safe or sorted(n for n in manifest["files"] if n.startswith("pytorch_model") and n.endswith(".bin"))
    layers = max(2, -(-(len(shards) - 3) // 9))  # a tensor for each shard: three, and nine in each layer
    config |= TINY | {"vocab_size": vocabulary, "num_hidden_layers": layers}
    if "num_key_value_heads" in config:
        grouped = manifest["config"]["num_key_value_heads"] < manifest["config"]["num_attention_heads"]
        config["num_key_value_heads"] = 2 if grouped else 4
    if "num_experts" in config:
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if "head_dim" in config:
        config["head_dim"] = 16  # not hidden_size / num_attention_heads there, either
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    config |= {name: _here(config[name], ids) for name in names if name in config}
    generation = dict(manifest["generation_config"])
    generation |= {name: _here(generation[name], ids) for name in names if name in generation}
    _json(root / "config.json", config)
    _json(root / "generation_config.json", generation)

    torch.manual_seed(zlib.crc32(manifest["repository"].encode()))  # no two models are the same
    dtype = getattr(torch, config["torch_dtype"])
    made = AutoConfig.for_model(**{name: value for name, value in config.items() if name != "architectures"})
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.3)
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for name in manifest.get("stored_buffers", ()):  # which old checkpoints hold, and no model takes any more
        for layer in range(layers):
            tensors[f"model.layers.{layer}.{name}"] = torch.ones(4)
    of = {name: shards[number * len(shards) // len(tensors)] for number, name in enumerate(tensors)}
    for shard in shards:
        part = {name: tensors[name].contiguous() for name, place in of.items() if place == shard}
        if safe:
            save_file(part, root / shard, metadata={"format": "pt"})
        else:
            torch.save(part, root / shard)
    if len(shards) == 1:
        return
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    _json(root / index, {"metadata": {"total_size": size}, "weight_map": dict(sorted(of.items()))})


# ---- data

CHATS = 640  # of the ShareGPT file: recipes take 500 of them for validation
# row → what is odd about it; both splits have each kind
ODD = {7: "bard", 90: "gpt first", 150: "empty", 200: "system"}
ODD |= {503: "bing", 530: "empty", 560: "gpt first", 600: "user, chatgpt"}


def _sentence(chance: random.Random, low: int, high: int) -> str:
    words = chance.choices(WORDS, k=chance.randint(low, high))
    return " ".join(words).capitalize() + chance.choice([".", "!", "\n- one\n- two", " “é”"])


def chat(number: int) -> list[tuple[str, str]]:
    """The turns of chat ``number``: (role, text), the user's and the assistant's by turns."""
    chance = random.Random(number)
    return [(role, _sentence(chance, 2, 8)) for _ in range(1 + number % 2) for role in ("user", "assistant")]


def sharegpt(number: int) -> dict[str, Any]:
    """Row ``number`` as ShareGPT has it, odd ones included."""
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[role], "value": text} for role, text in chat(number)]
    match ODD.get(number):
        case "bard" | "bing" as other:
            turns[1]["from"] = other
        case "empty":
            turns = []
        case "gpt first":
            turns.insert(0, {"from": "gpt", "value": "NEVER SUPERVISED"})
        case "system":
            turns.insert(0, {"from": "system", "value": "Be brief."})
        case "user, chatgpt":
            turns[0]["from"], turns[1]["from"] = "user", "chatgpt"
    return {"id": f"c{number:06d}_0", "conversations": turns}


def ultrachat(number: int) -> dict[str, Any]:
    """Row ``number`` as UltraChat has it."""
    messages = [{"content": text, "role": role} for role, text in chat(number)]
    return {"prompt": messages[0]["content"], "prompt_id": f"{number:064x}", "messages": messages}


def row(manifest: dict[str, Any], number: int) -> dict[str, Any]:
    """Row ``number`` with the columns of a manifest: ``messages``, and others with a beginning of them."""
    found = ultrachat(number)
    first, answer = (message["content"] for message in found["messages"][:2])
    found |= {"id": number, "source": "miniature", "problem": first, "solution": answer}
    return {name: found[name] for name in manifest["columns"]}


def build_data(root: Path, manifest: dict[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    root.mkdir(parents=True)
    (root / ".gitattributes").write_text("*.parquet filter=lfs diff=lfs merge=lfs -text\n")
    card = "---\nlicense: mit\n"
    if manifest["format"] == "parquet":
        splits = "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in manifest["splits"])
        card += f"configs:\n- config_name: default\n  data_files:\n{splits}"
        for file_number, name in enumerate(n for n in manifest["files"] if n.endswith(".parquet")):
            (root / name).parent.mkdir(exist_ok=True)
            rows = [row(manifest, 1000 * file_number + number) for number in range(40)]
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / name)
    elif manifest["format"] == "lines of JSON":
        (name,) = (name for name in manifest["files"] if name.endswith(".jsonl"))
        lines = (json.dumps(row(manifest, 7000 + number)) for number in range(40))
        (root / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    else:
        wanted, other = sorted((n for n in manifest["files"] if n.endswith(".json")), key=lambda n: "V4.3" not in n)
        _json(root / wanted, [sharegpt(number) for number in range(CHATS)])
        _json(root / other, [sharegpt(CHATS + number) | {"tags": [number]} for number in range(20)])
    (root / "README.md").write_text(f"{card}---\n", encoding="utf-8")
