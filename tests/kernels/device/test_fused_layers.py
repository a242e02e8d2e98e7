"""Fused layers: each is compared with the model's own when the lean decoder is made, also where an error is put into a
kernel; and on prompts and trees, with PyTorch's operations."""

import re

import pytest
import torch

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.runner import Runner
from draftsmith.inference.verify.tree import StaticTree
from draftsmith.models import lean
from draftsmith.models.lean import FusedBuffers, LeanDecoder
from draftsmith.models.lean_from import lean_decoder

# A bias; norms of q and k; norms after each branch, windows and soft caps; packed weights; a factor on each branch.
FAMILIES = ("qwen2", "qwen3", "gemma2", "phi3", "granite")


# Either way of families whose layers differ most, and one of the others
WAYS = [(family, folds) for family in FAMILIES for folds in (False, True) if folds or family in ("qwen3", "gemma2")]


@pytest.mark.parametrize(("family", "folds"), WAYS)
def test_prompts_and_trees(make_target, device, on, monkeypatch, request, family, folds):
    """Ragged prompts in two chunks, then a tree after each row's prefix; also in forms of products that do what stands
    around them."""
    if folds:
        request.getfixturevalue("folded")
    target = on(make_target(family))
    length, chunk = (11, 7) if family == "gemma2" else (5, 3)  # its window is of 8 tokens
    tokens = torch.randint(0, target.vocab_size, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    tree = StaticTree([-1, 0, 1, 1, 0], device)
    lengths = torch.tensor([length, chunk - 2], device=device)
    nodes = tokens[:, :5].flip(1)
    found = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr("draftsmith.kernels.backend.triton", None)
            cache = KVCache(target, 2, 64)
            runner = Runner(target, cache, static=True, lean=True)
            with torch.inference_mode():
                texts = [*enumerate(tokens.tolist())]
                before = Chunk.of([(row, 0, text[:chunk]) for row, text in texts], device)
                after = Chunk.of([(row, chunk, text[chunk:]) for row, text in texts], device)
                first, _ = runner.forward_prompts(before)
                second, between = runner.forward_prompts(after, (1,))
                places = tree.ancestors.expand(2, -1, -1), tree.depth.expand(2, -1)
                mask = tree.mask.expand(2, -1, -1)
                hidden, captured = runner.forward_nodes(nodes, lengths, *places, captures=(1,), mask=mask)
                (buffers,) = runner.buffers.values()
                assert all(isinstance(each, FusedBuffers) for each in buffers) is fused
            found.append([first, second, *between, hidden, *captured])
    for ours, plain in zip(*found, strict=True):
        assert float((ours - plain).abs().max()) <= 1e-4 * float(plain.abs().max())


@pytest.mark.parametrize(
    ("broken", "written"),
    [("rotate_write", 4), ("rotate_write", 5), ("gated", 1), ("add_norm", 0), ("add_norm", 4), ("attend_tree", None)],
)
def test_a_wrong_kernel_is_found(make_target, on, monkeypatch, broken, written):
    """By the comparison of layers, and it is said where. ``written``: the argument that the error is in."""
    target = on(make_target("llama"))
    right = getattr(lean, broken)

    def wrong(*arguments, **named):
        result = right(*arguments, **named)
        (result if written is None else arguments[written])[..., 0, :3] *= 1.05
        return result

    with monkeypatch.context() as patch:
        patch.setattr(lean, broken, wrong)
        found = lean_decoder(target)
        assert isinstance(found, LeanDecoder)
        said = r"(its|the norm after its) layer 0 by kernels differs from its own modules' by"
        assert re.match(said, found.not_fused)
        if broken == "gated":  # PyTorch's operations run then
            decoder = SpeculativeDecoder(target, static=True)
            decoder.generate([[1, 2]], 2)
            assert decoder.execution.endswith(f"lean decoder (layers not fused: {found.not_fused})")


@pytest.mark.parametrize(
    ("family", "fields"), [("llama", {"hidden_act": "gelu"}), ("llama", {"head_dim": 320}), ("gpt_neox", {})]
)
def test_what_the_kernels_do_not_know(make_target, on, family, fields):
    """An activation, heads wider than their tiles, and GPT-NeoX's layers: PyTorch's operations run them."""
    target = on(make_target(family, **fields))
    found = lean_decoder(target)
    assert isinstance(found, LeanDecoder) and found.not_fused.startswith("the kernels do not know its norms")
    texts = [
        SpeculativeDecoder(target, static=True, lean=lean).generate([[1, 2, 3]], 4, stop_ids=frozenset())[0].tokens
        for lean in (True, False)
    ]
    assert texts[0] == texts[1]
