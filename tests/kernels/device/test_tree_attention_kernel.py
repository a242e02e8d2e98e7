"""The tree attention kernel against walks from node to parent, in float64."""

import random

import pytest
import torch
from bounds import assert_within, attention_bound, gamma
from cases import DTYPES, depths, random_parents, walk

from draftsmith.inference.verify.tree import bitsets
from draftsmith.kernels import tree_attention as kernel_module
from draftsmith.kernels.attention_plan import make_plan, make_plan_reference
from draftsmith.kernels.step_attention import attend_tree
from draftsmith.kernels.tree_attention import (
    TreeKeys,
    attention_items,
    tree_attention_cached,
    tree_attention_cached_reference,
)


def check(device, dtype, lengths, tree, queries, kv_heads, group, width, extra, window=0, softcap=None, bare=False):
    """One comparison with float64, within the bound of rounding errors.

    extra: number of items beyond one for each row; 0: no plan.
    """
    rng = random.Random(repr((lengths, tree, queries, kv_heads, group, width, extra, window, softcap)))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 32))
    rows, capacity = len(lengths), max(lengths) + tree + 5
    parents = [random_parents(tree, rng.choice([3, tree]), rng) for _ in lengths]
    asking = [sorted(rng.sample(range(tree), queries)) for _ in lengths]  # which nodes ask
    q = 3 * torch.randn(rows, queries, kv_heads * group, width, generator=generator).to(dtype).transpose(1, 2)
    # One layer of a cache of two, as the engine has it; the other layer and the free slots are poison.
    cache = torch.full((2, 2, rows, kv_heads, capacity, width), float("nan"), dtype=dtype)
    seen, sets = [], []
    for row, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        used = torch.randn(2, kv_heads, length + tree, width, generator=generator)
        cache[1, :, row, :, : length + tree] = used.to(dtype)
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
    key_depth = torch.stack([depths(parent) for parent in parents])
    depth = key_depth.gather(1, torch.tensor(asking))
    cache, q = cache.to(device), q.to(device)
    k, v = cache[1]
    scale = width**-0.5
    there = [part.to(device) for part in (torch.tensor(lengths), torch.stack(sets), depth, key_depth)]
    arguments = (q, k, v, *there[:2], tree, scale, *there[2:], window, softcap)
    longer = rng.choice((0, 1, 70))  # a plan also serves passes of shorter prefixes and fewer tree keys
    plan = make_plan(arguments[3] + longer, tree + longer, rows + extra, window, 1)
    assert longer or extra < 5 or max(lengths) < 64 or 0 < window < 64 or max(plan.count.tolist()) > 1, "a row is split"
    out = tree_attention_cached(*arguments, plan=plan)
    assert out.shape == q.shape and out.dtype == dtype and out.transpose(1, 2).is_contiguous()
    for row, length in enumerate(lengths):
        used = slice(length + tree)
        exact = attention_bound(q[row], k[row, :, used], v[row, :, used], seen[row], scale, softcap, dtype)
        assert_within(out[row], *exact)


SIZES = [  # tree, key/value heads, group, width, items beyond one for each row
    (1, 2, 7, 64, 5),
    (31, 1, 7, 16, 0),
    (32, 2, 1, 32, 11),
    (33, 1, 3, 24, 5),
    (63, 1, 1, 16, 12),
    (64, 1, 1, 80, 0),
    (65, 1, 3, 32, 5),
    (128, 1, 1, 64, 3),
    (130, 1, 1, 16, 7),
    (256, 1, 1, 16, 0),
]


@pytest.mark.parametrize(
    ("dtype", "size"),  # in 16 bits one without a plan and one with items of several words
    [(dtype, size) for dtype in DTYPES for size in SIZES if dtype == torch.float32 or size[0] in (31, 65)],
)
def test_sizes(device, dtype, size):
    """Ragged lengths, an empty prefix among them, lengths at and next to a tile's edge; of large trees one row."""
    check(device, dtype, [0, 5, 64, 129] if size[0] < 60 else [0, 129] if size[0] < 100 else [65], size[0], *size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "kv_heads"), [(128, 2), (256, 1)])
def test_wide_heads(device, dtype, width, kv_heads):
    check(device, dtype, [300, 3], 9, 9, kv_heads, 2, width, 5)


@pytest.mark.parametrize(
    ("window", "softcap", "extra"),
    [(1, None, 0), (1, None, 5), (3, 2.0, 5), (3, None, 0), (40, None, 5), (40, 2.0, 0), (70, 2.0, 8), (1000, None, 8)],
)
def test_windows(device, window, softcap, extra):
    check(device, torch.float32, [0, 30, 131], 33, 33, 1, 2, 16, extra, window, softcap)


@pytest.mark.parametrize(
    ("window", "extra", "dtype"), [(0, 40, dtype) for dtype in DTYPES] + [(500, 25, torch.float32)]
)
def test_a_long_row_among_short_ones(device, dtype, window, extra):
    """More items of a row than a block of the merge has, and items that are not in use."""
    check(device, dtype, [3, 900, 0, 64], 9, 9, 1, 3, 16, extra, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(device, softcap, dtype):
    """Scores far beyond the cap, and far below."""
    check(device, dtype, [11, 90], 17, 17, 1, 2, 32, 5, 0, softcap)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("tree", "queries"), [(2, 1), (33, 4), (65, 64), (130, 10)])
def test_fewer_queries_than_tree_keys(device, tree, queries, window):
    check(device, torch.float32, [0, 70], tree, queries, 1, 2, 16, 6, window)


@pytest.mark.parametrize("extra", [0, 5])
def test_padding_that_sees_nothing(device, extra):
    check(device, torch.float32, [0, 20, 100], 8, 8, 1, 2, 16, extra, bare=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_program_merges(device, monkeypatch, dtype):
    """As the second kernel does, twice: it leaves zeros for the next launch."""
    monkeypatch.setattr(kernel_module, "LAST_MERGES", True)
    monkeypatch.setattr(kernel_module, "_merge_items_kernel", None)
    for lengths in ((400, 70), (130, 500)):
        check(device, dtype, lengths, 5, 3, 2, 4, 24, 12)
        (arrived,) = kernel_module._arrived.values()
        assert not arrived.any()


@pytest.mark.parametrize("given", [False, True])
def test_shared_tree_and_default_items(device, given):
    """One tree for all rows, expanded and not copied; a large cache, of which little is in use. The plan of the pass,
    if its window is among those given."""
    torch.manual_seed(0)
    parent = random_parents(20, 3, random.Random(1))
    lengths = torch.tensor([3, 400], device=device)
    k, v = torch.full((2, 2, 1, 2048, 16), float("nan"), device=device)
    for cache in (k, v):
        for row, length in enumerate(lengths.tolist()):
            cache[row, :, : length + 20] = torch.randn(1, length + 20, 16)
    q = torch.randn(2, 1, 20, 16).to(device)
    sets = bitsets(parent).to(device)[None].expand(2, -1, -1)
    depth = depths(parent).to(device)[None].expand(2, -1)
    default = attention_items(2, 20, 1, 1, 16, 2048, torch.float32, device)
    assert default > 2 + 2 and max(make_plan(lengths, 20, default).count.tolist()) > 1, "a row is split"
    for window in (0, 100):
        plan = {100: make_plan(lengths, 20, 9, 100)} if given else None  # without a window it would leave keys out
        out = attend_tree(q, k, v, TreeKeys(lengths, sets, depth, depth, plan), 0.25, window)
        wanted = tree_attention_cached_reference(q, k, v, lengths, sets, 20, 0.25, depth, depth, window)
        # Both are within a bound of this size of the exact value: scores of 16 products, sums of 420 values.
        assert float((out - wanted).abs().max()) < 2 * (gamma(20 + 420)) * float(v.nan_to_num().abs().max())


@pytest.mark.parametrize("window", [0, 1, 100, 5000])
@pytest.mark.parametrize(("rows", "extra"), [(1, 0), (1, 12), (3, 7), (20, 5)])
def test_plan(device, rows, extra, window):
    """The plan of the definition, element by element."""
    rng = random.Random(repr((rows, extra, window)))
    lengths = torch.tensor([rng.choice([0, 64, 100, 3000, 1 << 20]) for _ in range(rows)], device=device)
    for tree, min_share in ((1, 1), (130, 2)):
        out = make_plan(lengths, tree, rows + extra, window, min_share)
        wanted = make_plan_reference(lengths, tree, rows + extra, window, min_share)
        assert all(torch.equal(one, other) for one, other in zip(out, wanted, strict=True))
