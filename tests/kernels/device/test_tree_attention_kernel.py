"""The tree attention kernel against walks from node to parent, in float64."""

import random

import pytest
import torch

from draftsmith.inference.tree import bitsets
from draftsmith.kernels.tree_attention import tree_attention_cached, tree_attention_cached_reference

# bfloat16 arithmetic is wrong in the interpreter
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def random_parents(nodes, rng):
    """Parents first; long paths in one half of the trees, so that the bits of one node lie in several words."""
    reach = rng.choice([3, nodes])
    return [-1] + [rng.randrange(max(0, node - reach), node) for node in range(1, nodes)]


def walk(parent, node):
    path = [node]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    return path


def exact_attention(q, k, v, seen, scale, softcap):
    """float64, one row of the batch: q [Hq, Q, D], k and v [Hkv, S, D], seen [Q, S]."""
    k, v = (x.double().repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q.double() @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return weights.nan_to_num(0.0) @ v  # who sees nothing gets 0


def check(device, dtype, lengths, tree, queries, kv_heads, group, width, splits, window=0, softcap=None, bare=False):
    """One comparison. Within twice the error of the formula written out in PyTorch in the same precision."""
    rng = random.Random(repr((lengths, tree, queries, kv_heads, group, width, splits, window, softcap)))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    rows, capacity = len(lengths), max(lengths) + tree + 5
    parents = [random_parents(tree, rng) for _ in lengths]
    asking = [sorted(rng.sample(range(tree), queries)) for _ in lengths]  # which nodes ask
    q = 3 * torch.randn(rows, queries, kv_heads * group, width, generator=generator).to(dtype).transpose(1, 2)
    # One layer of a cache of two, as the engine has it; the other layer and the free slots are poison.
    cache = torch.full((2, 2, rows, kv_heads, capacity, width), float("nan"), dtype=dtype)
    seen, sets = [], []
    for row, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        cache[1, :, row, :, : length + tree] = torch.randn(2, kv_heads, length + tree, width, generator=generator).to(
            dtype
        )
        all_sets = bitsets(parent)
        visible = torch.zeros(queries, length + tree, dtype=torch.bool)
        for place, node in enumerate(asking[row]):
            if bare and place == queries - 1:  # padding: no bits
                all_sets[node] = 0
            own = [] if bare and place == queries - 1 else walk(parent, node)
            position = length + len(walk(parent, node)) - 1
            for slot in range(length):
                visible[place, slot] = not window or slot > position - window
            for above in own:
                visible[place, length + above] = not window or length + len(walk(parent, above)) - 1 > position - window
        seen.append(visible)
        sets.append(all_sets[asking[row]])
    key_depth = torch.tensor([[len(walk(parent, node)) - 1 for node in range(tree)] for parent in parents]).int()
    depth = key_depth.gather(1, torch.tensor(asking))
    cache, q = cache.to(device), q.to(device)
    k, v = cache[1]
    scale = width**-0.5
    arguments = (
        q, k, v, torch.tensor(lengths, device=device), torch.stack(sets).to(device), tree, scale,
        depth.to(device), key_depth.to(device), window, softcap,
    )  # fmt: skip
    out = tree_attention_cached(*arguments, splits=splits)
    plain = tree_attention_cached_reference(*arguments)
    assert out.shape == q.shape and out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    for row, length in enumerate(lengths):
        end = length + tree
        exact = exact_attention(q[row].cpu(), k[row, :, :end].cpu(), v[row, :, :end].cpu(), seen[row], scale, softcap)
        error = float((out[row].cpu().double() - exact).abs().max())
        allowed = 2 * float((plain[row].cpu().double() - exact).abs().max())
        allowed = max(allowed, 4 * torch.finfo(dtype).eps * float(exact.abs().max()))
        assert error <= allowed < 0.02 * float(exact.abs().max()), (row, error, allowed)


SIZES = [  # tree, key/value heads, group, width, splits
    (1, 2, 7, 64, 2), (31, 1, 7, 16, 1), (32, 2, 1, 32, 3), (33, 1, 3, 24, 2), (63, 1, 1, 16, 12),
    (64, 1, 1, 80, 1), (65, 1, 7, 32, 1), (128, 1, 1, 64, 2), (130, 1, 1, 16, 3), (256, 1, 1, 16, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "size"), [(dtype, size) for dtype in DTYPES for size in SIZES if dtype == torch.float32 or size[0] % 2]
)
def test_sizes(device, dtype, size):
    """Ragged lengths, an empty prefix among them, lengths at and next to a tile's edge."""
    check(device, dtype, [0, 5, 64, 129] if size[0] < 60 else [0, 129], size[0], *size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "kv_heads"), [(128, 2), (256, 1)])
def test_wide_heads(device, dtype, width, kv_heads):
    check(device, dtype, [70, 3], 9, 9, kv_heads, 2, width, 2)


@pytest.mark.parametrize(
    ("window", "softcap", "splits"),
    [(1, None, 1), (1, None, 3), (3, 2.0, 3), (3, None, 1), (40, None, 3), (40, 2.0, 1), (1000, None, 2)],
)
def test_windows(device, window, softcap, splits):
    check(device, torch.float32, [0, 30, 131], 33, 33, 1, 2, 16, splits, window, softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(device, softcap, dtype):
    """Scores far beyond the cap, and far below."""
    check(device, dtype, [11, 90], 17, 17, 1, 2, 32, 2, 0, softcap)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("tree", "queries"), [(2, 1), (33, 4), (65, 64), (130, 10)])
def test_fewer_queries_than_tree_keys(device, tree, queries, window):
    check(device, torch.float32, [0, 70], tree, queries, 1, 2, 16, 3, window)


@pytest.mark.parametrize("splits", [1, 4])
def test_padding_that_sees_nothing(device, splits):
    check(device, torch.float32, [0, 20], 8, 8, 1, 2, 16, splits, bare=True)


@pytest.mark.parametrize("splits", [0, 1])
def test_shared_tree_and_default_splits(device, splits):
    """One tree for all rows, expanded and not copied; a large cache, of which little is in use."""
    torch.manual_seed(0)
    parent = random_parents(20, random.Random(1))
    lengths = torch.tensor([3, 40], device=device)
    k, v = torch.full((2, 2, 1, 2048, 16), float("nan"), device=device)
    for cache in (k, v):
        for row, length in enumerate(lengths.tolist()):
            cache[row, :, : length + 20] = torch.randn(1, length + 20, 16)
    q = torch.randn(2, 2, 20, 16).to(device)
    sets = bitsets(parent).to(device)[None].expand(2, -1, -1)
    depth = torch.tensor([len(walk(parent, node)) - 1 for node in range(20)], device=device)[None].expand(2, -1)
    arguments = (q, k, v, lengths, sets, 20, 0.25, depth, depth, 9)
    out, wanted = tree_attention_cached(*arguments, splits=splits), tree_attention_cached_reference(*arguments)
    assert float((out - wanted).abs().max()) < 2e-6 < 0.01 * float(wanted.abs().max())
