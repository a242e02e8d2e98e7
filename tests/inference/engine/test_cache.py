"""The preallocated cache: commits against a copy made slot by slot, and writes at each row's own place."""

import random
from types import SimpleNamespace

import pytest
import torch

from draftsmith.inference.engine import cache as module
from draftsmith.inference.engine.cache import KVCache

CPU = torch.device("cpu")
SHAPES = [(2, 4), (1, 6), (2, 4)]  # two layers of one shape around one of another


def filled(rows: int, capacity: int, lengths: list[int]) -> KVCache:
    target = SimpleNamespace(kv_shapes=SHAPES, kv_devices=[CPU] * 3, device=CPU, dtype=torch.float32)
    cache = KVCache(target, rows, capacity)
    torch.manual_seed(0)
    for layer, (heads, width) in zip(cache.layers, SHAPES, strict=True):
        assert layer.keys.shape == layer.values.shape == (rows, heads, capacity, width)
        layer.keys.normal_()
        layer.values.normal_()
    cache.lengths.copy_(torch.tensor(lengths))
    return cache


@pytest.mark.parametrize("lengths", [[0], [7], [3, 0, 9], [5, 5]])
def test_commit(lengths):
    """Paths whose sources and destinations overlap: an in-place gather would read slots already overwritten."""
    nodes, depth = 12, 5
    for seed in range(20):
        rng = random.Random(seed)
        paths, taken = [], []
        for _ in lengths:
            taken.append(rng.randint(0, depth))
            path = [0, *sorted(rng.sample(range(1, nodes), taken[-1]))]
            paths.append(path + list(range(len(path), depth + 1)))
        if seed == 0:
            paths[0], taken[0] = [0, 2, 3, 4, 5, 6], depth
        cache = filled(len(lengths), max(lengths) + nodes, lengths)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        cache.commit(torch.tensor(paths), torch.tensor(taken))
        for layer, old in zip(cache.layers, before, strict=True):
            for new, kept in zip((layer.keys, layer.values), old, strict=True):
                expected = kept.clone()
                for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
                    for at, node in enumerate(path):
                        expected[row, :, length + at] = kept[row, :, length + node]
                assert torch.equal(new, expected)


@pytest.mark.parametrize("slots", [[[2, 3, 4]], [[2, 3, 4], [0, 1, 2]]])
def test_update_writes_at_the_rows_own_slots(slots):
    cache = filled(2, 8, [0, 0])
    cache.slots, cache.seen = torch.tensor(slots), 6
    for number, (heads, width) in enumerate(SHAPES):
        before = cache.layers[number].keys.clone()
        keys, values = torch.randn(2, 2, heads, 3, width)
        all_keys, all_values = cache.update(keys, values, number)
        expected = before
        for row in range(2):
            expected[row][:, slots[row % len(slots)]] = keys[row]
        assert torch.equal(cache.layers[number].keys, expected)
        assert torch.equal(all_keys, expected[:, :, :6]) and all_values.shape == all_keys.shape
        for row in range(2):
            assert torch.equal(all_values[row][:, slots[row % len(slots)]], values[row])


def test_the_memory_of_a_container(tmp_path, monkeypatch):
    """What its limit leaves; what files take is given back when it is needed. Without a limit it is the machine's."""
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    whole = module.free_bytes(CPU)
    assert whole > 1e8
    contents = {"max": "3000\n", "current": "2500\n", "stat": "anon 1500\nactive_file 600\ninactive_file 400\n"}
    for name, text in contents.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert module.free_bytes(CPU) == 1500
    (tmp_path / "memory.max").write_text("max\n")
    assert module.free_bytes(CPU) > 1e8
