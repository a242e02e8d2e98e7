"""Every node of a tree has the logits that the model gives for its path alone."""

import random

import pytest
import torch

from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.runner import ATTENTION, Runner
from draftsmith.inference.verify.tree import bitsets
from draftsmith.kernels.tree_attention import ancestor_mask, causal_bias, tree_bias


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
