"""What fits into memory is known before any weights are read: by decode.py and planner.py."""

import re

import pytest
from faults import error_of

from draftsmith.inference import planner
from draftsmith.inference.commands import memory
from draftsmith.inference.commands.prompts import read_prompts
from draftsmith.inference.drafters import load
from draftsmith.inference.drafters.compressed import APPENDED
from draftsmith.models.sizes import kv_bytes, sizes_of
from draftsmith.models.target import load_target


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "phi3", "gpt_neox", "gpt2", "opt"])
def test_sizes_are_the_loaded_models(make_target, family, tmp_path):
    target = make_target(family)
    target.model.config.save_pretrained(tmp_path)  # there are no weights
    count = sum(parameter.numel() for parameter in target.model.parameters())
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        sizes = sizes_of(str(tmp_path), dtype)
        assert sizes is not None and sizes.weights == size * count
        assert sizes.layers == kv_bytes(target.kv_shapes, size) and sizes.context == target.context


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_quantized_layers_are_narrow_and_the_rest_is_not(tiny_lm):
    """bitsandbytes leaves embeddings, a tenth and more of the weights, and the LM head as they are."""
    pytest.importorskip("bitsandbytes")
    loaded = load_target(str(tiny_lm), dtype="bfloat16", quantize="8bit").model
    sizes = sizes_of(str(tiny_lm), "bfloat16", quantize="8bit")
    assert sizes is not None
    assert sizes.weights == pytest.approx(loaded.get_memory_footprint(return_buffers=False), rel=0.01)
    whole = sizes_of(str(tiny_lm), "bfloat16")
    assert whole is not None and 1.2 < whole.weights / sizes.weights < 1.9


@pytest.fixture
def free(monkeypatch):
    """free(bytes): so many are left."""
    return lambda count: monkeypatch.setattr(memory, "free_bytes", lambda device: int(count))


def test_decoding(run_decode, tiny_lm, four_prompts, free, monkeypatch):
    target = load_target(str(tiny_lm))
    weights = 4 * sum(parameter.numel() for parameter in target.model.parameters())
    tokens = memory.longest_text(str(tiny_lm), read_prompts(four_prompts), 6) + memory._ROOM
    token = sum(kv_bytes(target.kv_shapes, 4))
    common = f"--target {tiny_lm} --prompts {four_prompts} --max-new-tokens 6 --device cpu --baseline none"
    own = tokens + 40 + APPENDED + memory._ROOM
    drafters = {
        "none": (weights, tokens * token),
        "ngram": (weights, tokens * token),
        "snapkv:40": (weights, own * token),
        f"draft_model:{tiny_lm}@1": (2 * weights, 2 * tokens * token),
        f"draft_model:{tiny_lm},snapkv:40@1": (2 * weights, (tokens + own) * token),
    }
    for name, (held, row) in drafters.items():
        free(held + 3.5 * row)
        code, _, err = run_decode(f"{name} {common} --batch-size 4")
        assert code == 0 and f"memory for at most 3 texts of {tokens:,} tokens at a time" in err, err
    code, _, err = run_decode(f"none {common}")
    assert code == 0 and "memory" not in err
    whole = target.context + memory._ROOM  # an answer ends at the target's context
    free(weights + 2.5 * whole * token)
    code, _, err = run_decode(f"none --live {common} --max-new-tokens 1000000 --batch-size 4")
    assert code == 0 and f"at most 2 texts of {whole:,} tokens" in err, err

    monkeypatch.setattr(load, "load_target", lambda *args, **options: pytest.fail("it was loaded"))
    for name, (held, row) in drafters.items():
        free(held + row - 1)
        said = error_of(run_decode(f"{name} {common}"))
        assert re.search(rf"not one text of {tokens:,} tokens fits into the .* GB that are free on cpu", said)


def test_planning(run_main, tiny_lm, free):
    target = load_target(str(tiny_lm))
    free(4 * sum(parameter.numel() for parameter in target.model.parameters()))
    options = ("--target", tiny_lm, "--contexts", 64, "--entries", 40, "--device", "cpu")
    code, _, err = run_main(planner.main, *options, script="inference/planner.py")
    assert code == 2 and "not one text of" in err
