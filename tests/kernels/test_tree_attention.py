"""Tree attention against float64, with masks from walks from node to parent."""

import random

import pytest
import torch
from bounds import assert_within, attention_bound
from cases import depths, random_parents, walk

from draftsmith.inference.verify.tree import bitsets
from draftsmith.kernels import attention_tiles
from draftsmith.kernels import tree_attention as tree_attention_module
from draftsmith.kernels.attention_plan import TILE, make_plan_reference
from draftsmith.kernels.attention_tiles import WIDE_TILES, Shape, attention_tile, tile_of
from draftsmith.kernels.tree_attention import (
    ancestor_mask,
    attention_items,
    causal_ancestors,
    causal_bias,
    tree_attention,
    tree_attention_reference,
    tree_bias,
)

NODES = (1, 2, 32, 33, 64, 65, 128, 130)


def brute_mask(parent: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parent), len(parent), dtype=torch.bool)
    for node in range(len(parent)):
        mask[node, walk(parent, node)] = True
    return mask


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("nodes", NODES)
def test_ancestor_mask(nodes, deep):
    trees = [random_parents(nodes, 3 if deep else nodes, random.Random(seed)) for seed in range(3)]
    sets = torch.stack([bitsets(parent) for parent in trees])
    assert sets.shape == (3, nodes, -(-nodes // 64)) and sets.dtype == torch.int64
    expected = torch.stack([brute_mask(parent) for parent in trees])
    assert torch.equal(ancestor_mask(sets, nodes), expected)


def test_ancestor_mask_of_a_chain():
    """Every bit of every word set in the last node, sign bits included."""
    parent = list(range(-1, 129))
    assert torch.equal(ancestor_mask(bitsets(parent)[None], 130)[0], torch.ones(130, 130, dtype=torch.bool).tril())


@pytest.mark.parametrize("window", [0, 1, 3, 7, 1000])
@pytest.mark.parametrize("nodes", [1, 9, 65])
def test_tree_bias(nodes, window):
    """Ragged lengths, an empty prefix, more slots than are in use."""
    lengths = [0, 4, 11, 6]
    trees = [random_parents(nodes, nodes if seed % 2 else 3, random.Random(seed)) for seed in range(4)]
    depth = torch.stack([depths(parent) for parent in trees])
    mask = torch.stack([brute_mask(parent) for parent in trees])
    slots = max(lengths) + nodes + 2
    expected = torch.full((4, 1, nodes, slots), float("-inf"))
    for row, (length, parent) in enumerate(zip(lengths, trees, strict=True)):
        for node in range(nodes):
            own = walk(parent, node)
            position = length + len(own) - 1
            keys = [(slot, slot) for slot in range(length)]  # (slot, position)
            keys += [(length + above, length + len(walk(parent, above)) - 1) for above in own]
            for slot, at in keys:
                if not window or at > position - window:
                    expected[row, 0, node, slot] = 0
    assert torch.equal(tree_bias(torch.tensor(lengths), mask, depth, slots, window, torch.float32), expected)
    assert (expected == 0).any(-1).all()


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize(("start", "queries"), [(0, 1), (0, 6), (5, 3)])
def test_causal_bias(start, queries, window):
    bias = causal_bias(start, queries, window, torch.float32, torch.device("cpu"))
    assert bias.shape == (1, 1, queries, start + queries)
    for query in range(queries):
        for key in range(start + queries):
            seen = key <= start + query and (not window or key > start + query - window)
            assert bias[0, 0, query, key] == (0 if seen else float("-inf"))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("kv_heads", "groups", "nodes", "lengths", "width"),
    [(1, 1, 1, [0], 8), (1, 7, 33, [0, 5], 24), (2, 7, 5, [3, 0, 17], 3), (3, 1, 65, [40], 80), (4, 2, 9, [1, 2], 16)],
)
@pytest.mark.parametrize("attention", [tree_attention, tree_attention_reference])
def test_attention(attention, kv_heads, groups, nodes, lengths, width, masked, softcap):
    """Within the bound of rounding errors; without the cap the result is another one."""
    torch.manual_seed(nodes + width)
    rows, slots = len(lengths), max(lengths) + nodes
    q = 3 * torch.randn(rows, kv_heads * groups, nodes, width)
    k, v = torch.randn(2, rows, kv_heads, slots, width)
    parent = random_parents(nodes, 3, random.Random(0))
    mask, depth = brute_mask(parent).expand(rows, -1, -1), depths(parent).expand(rows, -1)
    bias = tree_bias(torch.tensor(lengths), mask, depth, slots, 0, torch.float32) if masked else None
    scale = width**-0.5
    out = attention(q, k, v, bias, scale, softcap)
    assert out.shape == q.shape and out.dtype == q.dtype
    seen = torch.ones(rows, nodes, slots, dtype=torch.bool) if bias is None else bias[:, 0] == 0
    for row in range(rows):
        exact, bound = attention_bound(q[row], k[row], v[row], seen[row], scale, softcap, q.dtype)
        assert_within(out[row], exact, bound)
        if softcap is not None and slots > 1:
            uncapped = attention_bound(q[row], k[row], v[row], seen[row], scale, None, q.dtype)[0]
            assert float((uncapped - exact).abs().max()) > 100 * float(bound.max())


@pytest.mark.parametrize("nodes", NODES)
def test_causal_ancestors(nodes):
    """A chain's bitsets, and those of shorter chains at their beginning."""
    sets = causal_ancestors(nodes, torch.device("cpu"))
    assert torch.equal(sets, bitsets(list(range(-1, nodes - 1)))[None])
    shorter = max(nodes // 2, 1)
    assert torch.equal(sets[:, :shorter, : -(-shorter // 64)], causal_ancestors(shorter, torch.device("cpu")))


@pytest.mark.parametrize("window", [0, 1, 65, 300])
@pytest.mark.parametrize("extra", [0, 1, 7, 33, 200])
def test_a_plan_covers_every_tile_once(extra, window):
    """Ragged rows, empty ones among them: ranges that follow one another, of nearly equal size, none of a row that is
    split smaller than the least share; partial results of split rows fit into I − B + 1 places."""
    rng = random.Random(extra + window)
    for tree, min_share in ((1, 1), (64, 2), (65, 2)):
        lengths = [rng.choice([0, 1, 64, rng.randrange(700), rng.randrange(30000)]) for _ in range(rng.randrange(1, 9))]
        items, first, count = make_plan_reference(torch.tensor(lengths), tree, len(lengths) + extra, window, min_share)
        tiles = [-(-(length - max(length - window + 1 if window else 0, 0)) // TILE) for length in lengths]
        tiles = [number + -(-tree // TILE) for number in tiles]
        used = 0
        for row, total in enumerate(tiles):
            own = items[int(first[row]) : int(first[row] + count[row])].tolist()
            assert len(own) == int(count[row]) > 0 and all(item[0] == row for item in own)
            assert [item[1] for item in own] == [0, *(item[2] for item in own[:-1])] and own[-1][2] == total
            sizes = [end - start for _, start, end in own]
            assert max(sizes) - min(sizes) <= 1
            assert len(own) == 1 or (min(sizes) >= min_share and int(first[row]) + len(own) <= extra + 1)
            assert max(sizes) <= max(2 * min_share, -(-2 * sum(tiles) // (extra + 1))), "no row has too few"
            used += len(own)
        assert items[used:].eq(torch.tensor([-1, 0, 0])).all() and len(items) == len(lengths) + extra
        assert extra or used == len(lengths)


def test_one_long_row_gets_the_items():
    """One row of 16 384 slots among 31 of 100."""
    count = make_plan_reference(torch.tensor([100] * 31 + [16384]), 16, 32 + 32).count.tolist()
    assert count[:31] == [1] * 31 and count[31] > 20


@pytest.mark.parametrize("processors", [1, 4, 132])
@pytest.mark.parametrize("rows", [1, 8, 200])
@pytest.mark.parametrize("queries", [1, 16, 64, 512])
@pytest.mark.parametrize("slots", [60, 128, 1024, 16384])
def test_items(monkeypatch, processors, rows, queries, slots):
    """At most as many programs as run at a time where a row's items are more than one, and none that no row can use."""
    for module in (tree_attention_module, attention_tiles):
        monkeypatch.setattr(module, "multiprocessors", lambda device: processors)
    items = attention_items(rows, queries, 32, 8, 128, slots, torch.bfloat16, torch.device("cpu"))
    tile = attention_tile(queries * 4, 128, torch.bfloat16, rows * 8, processors)
    programs = 8 * -(-queries * 4 // tile["BLOCK_M"])
    assert items == rows or (items - rows + 1) * programs <= 2 * processors
    lengths = torch.full((rows,), slots - min(queries, slots))
    count = make_plan_reference(lengths, min(queries, slots), items).count
    if slots <= 128:
        assert items == rows
    elif rows == 1:
        assert int(count) == items, "a full cache uses them all"


def test_tiles():
    """128 rows a program where there are enough of them, else 64; never more rows than there are."""
    assert attention_tile(256, 128, torch.bfloat16, 8, 132)["BLOCK_M"] == 64
    assert attention_tile(256, 128, torch.bfloat16, 131, 132)["BLOCK_M"] == 64
    assert attention_tile(256, 128, torch.bfloat16, 132, 132)["BLOCK_M"] == 128
    assert attention_tile(4, 128, torch.bfloat16, 512, 132)["BLOCK_M"] == 16
    for dtype in (torch.float32, torch.float16):
        for width in (16, 80, 256):
            tile = attention_tile(1000, width, dtype, 512, 132)
            assert TILE % tile["BLOCK_N"] == 0 and tile["BLOCK_D"] >= width


def test_wide_tiles_are_measured_once(monkeypatch):
    """Made-up times: the fastest tile of those that give the result, from the file in the next process."""
    cpu = torch.device("cpu")
    names, timed, broken = [*WIDE_TILES], [], False
    monkeypatch.setattr(attention_tiles, "_may_measure", lambda device: True)
    monkeypatch.setattr(attention_tiles, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(attention_tiles, "FILE", "attention-test.json")
    monkeypatch.setattr(tree_attention_module, "INTERPRETING", True)  # as a kernel of Triton

    def chosen():
        return next(iter(attention_tiles._wide.values()))

    def attend(q, *arguments):
        if broken:
            raise RuntimeError("out of resources\nand more")
        return q * 2 if chosen() == names[2] else q  # the fastest is wrong

    def seconds(calls, device):
        timed.append(chosen())
        return {names[0]: 2.0, names[1]: 1.0, names[2]: 0.5}[timed[-1]]

    monkeypatch.setattr(tree_attention_module, "tree_attention_cached", attend)
    monkeypatch.setattr(attention_tiles, "gpu_seconds", seconds)
    shape = 1, 64, 8, 2, 16
    for process in (1, 2):
        monkeypatch.setattr(attention_tiles, "_wide", {})
        for _ in range(2):
            attention_items(*shape, 2048, torch.bfloat16, cpu)
        assert timed == names[:2] and chosen() == names[1], process
    tile = tile_of(Shape(*shape, torch.bfloat16, cpu))
    assert [tile[name] for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")] == [*WIDE_TILES[names[1]]]
    for other in (Shape(1, 16, *shape[2:], torch.bfloat16, cpu), Shape(*shape, torch.float32, cpu)):
        assert tile_of(other)["BLOCK_M"] < 128, "narrow trees and float32 are not measured"
    assert tile_of(Shape(*shape, torch.bfloat16, cpu), capped=True)["BLOCK_N"] == 32
    broken = True
    with pytest.warns(UserWarning, match=r"no tile of attention could be timed for .* \(out of resources\)"):
        attention_items(8, *shape[1:], 2048, torch.bfloat16, cpu)
