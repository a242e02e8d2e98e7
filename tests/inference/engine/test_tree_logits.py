"""Every node of a tree has the logits that the model gives for its path alone."""

import copy
import random

import pytest
import torch

from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.runner import ATTENTION, Runner, find_lean
from draftsmith.inference.verify.tree import bitsets
from draftsmith.kernels.tree_attention import ancestor_mask, causal_bias, tree_bias
from draftsmith.models.lean import LeanDecoder
from draftsmith.models.target import Target


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "gpt2", "opt", "granite"]
)
@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_tree_logits_equal_each_path_run_alone(make_target, family, rows):
    """The two forward passes round differently, by less than 1000 units in the last place of the logits' norm: float32
    through two layers and their norms."""
    target, nodes = make_target(family), 66
    rng = random.Random(1)
    prefixes = [[rng.randrange(61) for _ in range(length)] for length in (13, 6)[:rows]]
    parent = [-1] + [rng.randrange(max(0, node - 9), node) for node in range(1, nodes)]
    paths = [[0]]
    for node in range(1, nodes):
        paths.append([*paths[parent[node]], node])
    assert max(map(len, paths)) > 9, "deeper than the windows"
    device = target.device
    tokens = torch.randint(61, (rows, nodes), generator=torch.Generator().manual_seed(2)).to(device)
    depth = torch.tensor([len(path) - 1 for path in paths], device=device).expand(rows, -1)
    longest = max(map(len, prefixes))
    padded = torch.tensor([prefix + [0] * (longest - len(prefix)) for prefix in prefixes], device=device)

    cache = KVCache(target, rows, longest + nodes)
    runner = Runner(target, cache)
    cache.lengths = torch.tensor([len(prefix) for prefix in prefixes], device=device)
    seen, at = longest + nodes, torch.arange(longest, device=device)[None]
    mask = ancestor_mask(bitsets(parent)[None].expand(rows, -1, -1).to(device), nodes)
    slots, positions = cache.lengths[:, None] + torch.arange(nodes, device=device), cache.lengths[:, None] + depth
    causal = {w: causal_bias(0, longest, w, torch.float32, target.device) for w in runner.windows}
    biases = {w: tree_bias(cache.lengths, mask, depth, seen, w, torch.float32) for w in runner.windows}
    with target.attention(ATTENTION):
        runner.forward(padded, at.expand(rows, -1), at, longest, biases=causal)
        ours = target.logits(runner.forward(tokens, positions, slots, seen, biases=biases)[0])
    for row, prefix in enumerate(prefixes):
        for node, path in enumerate(paths):
            alone = torch.tensor([prefix + [int(tokens[row, above]) for above in path]], device=device)
            expected = target.model(alone, use_cache=False).logits[0, -1]
            allowed = 1000 * torch.finfo(expected.dtype).eps * float(expected.norm())
            torch.testing.assert_close(ours[row, node], expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "phi3", "granite", "gpt_neox"]
)
@torch.inference_mode()
def test_bits_of_a_trees_nodes_are_those_of_plain_decoding(make_target, family, dtype):
    """Ten random trees of 4 to 64 nodes for each of two texts in a batch; each node's hidden state and logits, and the
    keys and values of its path, are those of decoding its path token by token, alone."""
    tiny = make_target(family)
    target = Target(copy.deepcopy(tiny.model).to(dtype), None, "tiny", "")
    lean = find_lean(target, None)
    if not isinstance(lean, LeanDecoder) or lean.native is None:
        pytest.skip(f"no kernels of a CPU: {getattr(lean, 'not_fused', lean)}")
    assert lean.rows_differ == ""
    rng = random.Random(3)
    prefixes = [[rng.randrange(61) for _ in range(length)] for length in (13, 70)]
    with target.attention(ATTENTION):
        cache = KVCache(target, 2, 150)
        both = Runner(target, cache)
        for row, prefix in enumerate(prefixes):
            both.forward_prompts(Chunk.of([(row, 0, prefix)], target.device))
        cache.lengths.copy_(torch.tensor([13, 70]))
        for size in (4, 5, 8, 9, 16, 17, 31, 32, 33, 64):
            parent = [-1] + [rng.randrange(max(0, node - 9), node) for node in range(1, size)]
            tokens = torch.tensor([[rng.randrange(61) for _ in range(size)] for _ in prefixes])
            paths = [[0]]
            for node in range(1, size):
                paths.append([*paths[parent[node]], node])
            depth = torch.tensor([[len(path) - 1 for path in paths]], dtype=torch.int32).expand(2, -1)
            ancestors = bitsets(parent)[None].expand(2, -1, -1)
            hidden, _ = both.forward_nodes(tokens, cache.lengths, ancestors, depth)
            logits = target.logits(hidden)
            for row, prefix in enumerate(prefixes):
                path = paths[rng.choice([size - 1, rng.randrange(size)])]
                alone = KVCache(target, 1, 150)
                runner = Runner(target, alone)
                runner.forward_prompts(Chunk.of([(0, 0, prefix)], target.device))
                for place, node in enumerate(path):
                    alone.lengths.fill_(len(prefix) + place)
                    one = torch.ones(1, 1, 1, dtype=torch.int64)
                    found, _ = runner.forward_nodes(
                        tokens[row : row + 1, node : node + 1], alone.lengths, one, depth[:1, :1]
                    )
                    assert torch.equal(found[0, 0], hidden[row, node]), (size, node)
                    assert torch.equal(target.logits(found)[0, 0], logits[row, node]), (size, node)
                for (together, *_), (single, *_) in zip(cache.views(), alone.views(), strict=True):
                    slots = [*range(len(prefix)), *(len(prefix) + node for node in path)]
                    assert torch.equal(together[row, slots], single[0, : len(slots)])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_texts_in_bfloat16_are_those_of_plain_decoding(make_target, family, static):
    """Where logits tie often: any drafter, any batch with rows that begin at different steps, to the last token."""
    target = Target(copy.deepcopy(make_target(family).model).to(torch.bfloat16), None, "tiny", "")
    if not SpeculativeDecoder(target).bitwise:
        pytest.skip("no kernels of a CPU")
    rng = random.Random(5)
    prompts = [[rng.randrange(61) for _ in range(rng.randrange(1, 40))] for _ in range(12)]
    plain = [result.tokens for result in SpeculativeDecoder(target).generate(prompts, 20, stop_ids=frozenset())]
    other = Target(copy.deepcopy(target.model), None, "draft", "")
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    for drafter in (None, NgramDrafter(target, min_match=1, depth=4), DraftModelDrafter(other, target, (2, 2, 1))):
        for rows in (1, 5):
            decoder = SpeculativeDecoder(target, drafter, static=static)
            found = decoder.generate(prompts, 20, batch_size=rows, stop_ids=frozenset())
            assert [result.tokens for result in found] == plain, (drafter, rows)
