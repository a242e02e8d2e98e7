"""GGUF files for tests, written by the `gguf` package."""

import json

import gguf


def add_tokenizer(writer, tokenizer, pre="default"):
    """A byte-level BPE tokenizer with its chat template, as llama.cpp's converter writes it."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    control = set(tokenizer.all_special_tokens)
    types = [gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for token, _ in vocabulary]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def add_shape(writer, config):
    """The fields of a Llama-like model's shape."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def interleaved(weight, heads):
    """A query or key matrix or bias in GGUF's order of Llama's rows: the two halves of each head's rotary pairs side by
    side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    if writer.tensors[0]:
        writer.write_tensors_to_file()
    writer.close()
