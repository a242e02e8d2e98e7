import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # training_runs.py
pytest.register_assert_rewrite("training_runs")


@pytest.fixture(scope="module")
def train(request, recipe, run_main):
    """Runs of the module's command ``MAIN`` by its fixture ``recipe``."""
    from training_runs import Runs

    return Runs(request.module.MAIN, recipe, run_main)


@pytest.fixture(scope="session")
def wide(tiny_lm, tmp_path_factory):
    """A target whose hidden states are wide enough to outweigh what is kept of each token besides."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftsmith.models.tokenizer import load_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("models") / "wide", load_tokenizer(str(tiny_lm))
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=256, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
