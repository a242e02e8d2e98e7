"""What fits into memory is known before any weights are read: by decode.py and planner.py."""

import re

import pytest
import torch
from faults import error_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.common.files import write_json
from draftsmith.inference import planner
from draftsmith.inference.commands import memory
from draftsmith.inference.commands.prompts import read_prompts
from draftsmith.inference.drafters import load
from draftsmith.inference.drafters.compressed import APPENDED
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.prefill import PREFILL_TOKENS
from draftsmith.inference.load import load_drafter
from draftsmith.models.sizes import Sizes, kv_bytes, sizes_of
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
    code, _, err = run_decode(f"none {common} --baseline none --max-new-tokens 1000000 --batch-size 4")
    assert code == 0 and f"at most 2 texts of {whole:,} tokens" in err, err

    monkeypatch.setattr(load, "load_target", lambda *args, **options: pytest.fail("it was loaded"))
    for name, (held, row) in drafters.items():
        free(held + row - 1)
        said = error_of(run_decode(f"{name} {common}"))
        assert re.search(rf"not one text of {tokens:,} tokens fits into the .* GB that are free on cpu", said)


def test_a_drafters_weights_are_those_that_are_loaded(tmp_path):
    """No merged target, answers or held-out rows beside them; those of parts, too."""
    target = Sizes(0, [4], 64)
    for name, size in (("", 100), ("drafter", 50), ("target", 3000), ("answers/train-0", 700), ("held_out", 600)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * size)
    write_json(tmp_path / "drafter/config.json", {"drafter_type": "eagle", "num_layers": 1})
    for config, weights in (
        ({"drafter_type": "medusa"}, 100),
        ({"drafter_type": "dynaspec", "parts": ["drafter"]}, 150),
    ):
        write_json(tmp_path / "config.json", config)
        assert memory._of_parts(str(tmp_path), target, 8, {})[0] == weights


def test_planning(run_main, tiny_lm, free):
    target = load_target(str(tiny_lm))
    free(4 * sum(parameter.numel() for parameter in target.model.parameters()))
    options = ("--target", tiny_lm, "--contexts", 64, "--entries", 40, "--device", "cpu")
    code, _, err = run_main(planner.main, *options, script="inference/planner.py")
    assert code == 2 and "not one text of" in err


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside hold at a time."""

    def __init__(self):
        super().__init__()
        self.live, self.most = {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                storage = each.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.live.values()))
        return made


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["none", "ngram", "snapkv:40", "draft_model:{}@2,1"])
def test_a_row_takes_no_more_than_is_computed(tiny_lm, name, static):
    """Its caches, buffers and a step of it, sampled."""
    name = name.format(tiny_lm)
    target, drafter = load_drafter(name, target_name=str(tiny_lm))
    decoder = SpeculativeDecoder(target, drafter, static=static)
    _, row = memory.rows_that_fit(decoder, name, 250)

    def most(rows):
        with Peak() as peak:
            requests = [Request([5], 3, stop_ids=frozenset())] * rows
            decoder.serve(requests, rows, mode="sample", max_length=250)
        decoder._step = None
        return peak.most

    most(4)
    each = (most(20) - most(4)) / 16
    assert row / 6 < each < row


def test_rows_that_fit(tiny_lm, free, monkeypatch):
    target, _ = load_drafter("none", target_name=str(tiny_lm))
    decoder, given = SpeculativeDecoder(target), []
    for count in (0, 1 << 29, 1 << 30, 1 << 31, 1 << 40):
        free(count)
        given.append(memory.rows_that_fit(decoder, "none", 200))
    assert given[0][0] == given[1][0] == 1 and given[-1][0] == 32
    row = given[0][1]
    monkeypatch.setitem(memory.MOST_ROWS, "cpu", 1 << 40)
    free(1 << 30)
    (few, _), _ = memory.rows_that_fit(decoder, "none", 200), free((1 << 30) + 1600 * row)
    assert few > 1 and memory.rows_that_fit(decoder, "none", 200) == (few + 1500, row)
    tokens = few * row + PREFILL_TOKENS * sum(kv_bytes(target.kv_shapes, 4))
    assert tokens < (1 << 30) * 15 / 16 - (1 << 29)
