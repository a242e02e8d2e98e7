"""Dynamic trees of independent positions against a best-first heap; which paths are possible; confidence."""

import heapq
import itertools
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from tiny_models import paths_of

from draftsmith.inference.trees import independent
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import Confidence, IndependentTree, deepest, possible_paths, read_confidence

CPU = torch.device("cpu")
SIZES = [(1, 1, 2), (1, 4, 4), (3, 1, 3), (2, 3, 10), (10, 4, 16), (10, 4, 33), (4, 7, 40), (16, 3, 65)]


def heap(log_q, nodes):
    """The definition: pop the likeliest node, push its next sibling and its first child; of equal values the one that
    is less deep, then the one of lower ranks. ``log_q [D][R]`` → (path, value) in the order of popping."""
    waiting, popped = [(0.0, 0, ())], []
    while waiting and len(popped) < nodes:
        value, depth, path = heapq.heappop(waiting)
        popped.append((path, -value))
        if path and path[-1] + 1 < len(log_q[0]):
            above = sum(log_q[d][rank] for d, rank in enumerate(path[:-1]))
            heapq.heappush(waiting, (-above - log_q[depth - 1][path[-1] + 1], depth, (*path[:-1], path[-1] + 1)))
        if depth < len(log_q):
            heapq.heappush(waiting, (value - log_q[depth][0], depth + 1, (*path, 0)))
    return [(path, value) for path, value in popped if value > -math.inf]


def grow(shape, log_q, confidence=None):
    """``log_q [B, D, R]``; the tokens are the ranks."""
    tree = IndependentTree(shape, CPU, confidence)
    ranks = torch.arange(shape.top_k).expand(log_q.shape)
    return tree.grow(torch.full((len(log_q),), 99), tree.log_acceptance(log_q), ranks)


def table(kind, shape, seed):
    """Best first. quarters: sums are exact, with many ties; certain: all are equal; few: the last ranks are none."""
    chooser = random.Random(f"{kind} {seed} {shape}")
    numbers = {"quarters": lambda: -chooser.randrange(5) / 4, "certain": lambda: 0.0}
    number = numbers.get(kind, lambda: -chooser.expovariate(1.0))
    rows = [sorted((number() for _ in range(shape.top_k)), reverse=True) for _ in range(shape.depth)]
    if kind == "few":
        rows = [[value if rank < 2 else (-math.inf, math.nan)[rank % 2] for rank, value in enumerate(r)] for r in rows]
    return rows


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["any", "quarters", "certain", "few"])
def test_a_tree_is_that_of_a_heap(size, kind):
    """Node by node, whatever the other rows hold."""
    shape = DynamicShape(*size)
    rows = [table(kind, shape, seed) for seed in range(3)]
    tree = grow(shape, torch.tensor(rows))
    assert tree.tokens.shape == (3, shape.nodes) and tree.acceptance is not None
    assert tree.tokens[:, 0].tolist() == [99] * 3
    for row, log_q in enumerate(rows):
        finite = [[-math.inf if math.isnan(value) else value for value in each] for each in log_q]
        expected = sorted(heap(finite, shape.nodes), key=lambda each: (len(each[0]), each[0]))
        assert paths_of(tree, row) == [path for path, _ in expected]
        acceptance = tree.acceptance[row].tolist()
        assert acceptance[: len(expected)] == pytest.approx([math.exp(value) for _, value in expected])
        assert not any(acceptance[len(expected) :])
        alone = grow(shape, torch.tensor([log_q]))
        for name in ("tokens", "parent", "valid", "acceptance"):
            assert torch.equal(getattr(alone, name)[0], getattr(tree, name)[row])


@pytest.mark.parametrize("size", [(3, 3, 9), (2, 5, 16), (4, 3, 30)], ids=str)
def test_no_tree_has_more_expected_tokens(size):
    """Of all top_k + top_k² + … paths the tree has those of the highest probability."""
    shape = DynamicShape(*size)
    q = torch.rand(4, shape.depth, shape.top_k, generator=torch.Generator().manual_seed(0)).sort(-1, descending=True)[0]
    tree = grow(shape, q.log())
    for row, levels in enumerate(q.tolist()):
        products = [
            math.prod(levels[depth][rank] for depth, rank in enumerate(path))
            for length in range(1, shape.depth + 1)
            for path in itertools.product(range(shape.top_k), repeat=length)
        ]
        found = sorted(tree.acceptance[row, 1:].tolist(), reverse=True)
        assert found == pytest.approx(sorted(products, reverse=True)[: shape.nodes - 1])


@pytest.mark.parametrize("size", [(3, 3, 7), (10, 4, 12), (2, 5, 9)], ids=str)
def test_every_possible_path_is_needed(size):
    """Each is in the tree of some values: its own ranks and lower ones are certain, all others are not."""
    shape = DynamicShape(*size)
    paths = possible_paths(shape)
    assert paths == sorted({*paths}, key=lambda path: (len(path), path))
    for path in paths:
        values = torch.full((1, shape.depth, shape.top_k), -1.0)
        for depth, rank in enumerate(path):
            values[0, depth, : rank + 1] = 0.0
        assert path in paths_of(grow(shape, values), 0)


def test_too_many_paths(monkeypatch):
    monkeypatch.setattr(independent, "MAX_PATHS", 50)
    assert len(possible_paths(DynamicShape(3, 3, 8))) <= 50
    with pytest.raises(ValueError, match="with top_k 10, depth 4 and nodes 32 there are more than 50 paths to choose"):
        possible_paths(DynamicShape(10, 4, 32))
    assert deepest(DynamicShape(3, 3, 8)) == DynamicShape(3, 3, 8)
    found = deepest(DynamicShape(10, 4, 16))
    assert found == DynamicShape(10, found.depth, 16) and 1 < found.depth < 4
    with pytest.raises(ValueError, match="more than 50 paths"):
        possible_paths(replace(found, depth=found.depth + 1))


def test_confidence():
    """factor · q ** power, at most 1, no sibling above an earlier one; −∞ stays none."""
    confidence = Confidence((1.0, 0.5, 1.0), ((1.0, 3.0, 1.0, 9.0), (0.9, 0.9, 0.9, 9.0), (9.0, 1.0, 1.0, 1.0)))
    q = torch.tensor([[[0.6, 0.3, 0.1, 0.0], [0.64, 0.16, 0.01, 0.0], [0.5, 0.2, 0.0, 0.0]]])
    shape = DynamicShape(4, 3, 12)
    found = IndependentTree(shape, CPU, confidence).log_acceptance(q.log()).exp()
    expected = [[0.6, 0.6, 0.1, 0.0], [0.72, 0.36, 0.09, 0.0], [4.5, 0.2, 0.0, 0.0]]
    assert found[0].tolist() == [pytest.approx(row) for row in expected]
    tree = grow(shape, q.log(), confidence)
    clamped = [[min(value, 1.0) for value in row] for row in expected]
    popped = heap([[math.log(value) if value else -math.inf for value in row] for row in clamped], 12)
    # The same path set: values of float32 and float64 might order ties differently, of which there are none here.
    assert {*paths_of(tree, 0)} == {path for path, _ in popped}
    plain = grow(shape, q.log())
    assert {*paths_of(plain, 0)} != {*paths_of(tree, 0)}


def test_read_confidence(tmp_path):
    path, shape = tmp_path / "tree.json", DynamicShape(2, 2, 4)
    good = {"power": [1, 0.5], "factor": [[1.0, 0.9], [0.8, 0.7]]}
    path.write_text(json.dumps({"paths": [[0]]}))
    assert read_confidence(path, shape) is None
    path.write_text(json.dumps({"confidence": good}))
    assert read_confidence(path, shape) == Confidence((1, 0.5), ((1.0, 0.9), (0.8, 0.7)))
    for wrong, message in (
        ({"power": [1.0, 0.5]}, "'confidence' is not"),
        ([1.0], "'confidence' is not"),
        ({**good, "power": [1.0, -0.5]}, "a power is a number of at least 0"),
        ({**good, "power": [1.0, "x"]}, "a power is a number of at least 0"),
        ({**good, "factor": [[1.0, 0.0], [1.0, 1.0]]}, "a factor one above 0"),
        ({**good, "factor": [[1.0, 1.0]]}, "is of 1 depths and 2 ranks, but the dynamic tree has 2 and 2"),
        ({**good, "factor": [[1.0], [1.0, 1.0]]}, "is of 2 depths and 1 ranks"),
    ):
        path.write_text(json.dumps({"confidence": wrong}))
        with pytest.raises(ValueError, match="confidence") as error:
            read_confidence(path, shape)
        assert str(error.value).startswith(f"{path}: ") and message in str(error.value)
