"""The model that train/lm.py trains: its section in a recipe, its architecture, a stored one to begin with."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.data.bpe import check_ends
from draftsmith.models.files.locate import ModelFolder
from draftsmith.models.target import load_target
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train.sections.lm import Model


def load_weights(model: LlamaForCausalLM, start: ModelFolder) -> None:
    """Copy a stored model's weights."""
    stored = load_target(start, device="cpu").model.state_dict()
    own = model.state_dict()
    different = [name for name in own if name not in stored or own[name].shape != stored[name].shape]
    if different or stored.keys() != own.keys():
        raise ValueError(f"init_from={start.path}: its shape is not the recipe's model ({', '.join(different[:3])} …)")
    model.load_state_dict(stored)


def config_of(m: Model, end: int) -> LlamaConfig:
    """The architecture of a recipe's ``model`` section; ``end`` is the end token's id."""
    return LlamaConfig(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_heads,
        num_key_value_heads=m.num_kv_heads,
        head_dim=m.head_dim,
        intermediate_size=m.intermediate_size,
        max_position_embeddings=m.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def parameters_of(m: Model) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(config_of(m, 0)).parameters())


def check_beginning(start: ModelFolder, m: Model) -> None:
    """Check ``init_from`` by its config and tokenizer, before any text is read; its weights are checked later."""
    where, folder = f"init_from={start.name}", start.path
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{where}: no model with its tokenizer there (config.json, tokenizer.json)")
    stored, own = start.config, config_of(m, 0).to_dict()
    counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for name in ("vocab_size", "hidden_size", *counts, "intermediate_size"):
        if stored.get(name) != own[name]:
            raise ValueError(f"{where}: its shape is not the recipe's model: {name} {stored.get(name)} ≠ {own[name]}")
    check_ends(where, load_tokenizer(start).get_vocab())
