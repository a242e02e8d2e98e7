"""Shortlists against a loop over clusters, and their logits on a CPU, by parts, against float64. Best tokens:
device/test_shortlist_kernel.py."""

import pytest
import torch
from bounds import assert_within, product_bound
from references import shortlist_logits_reference, shortlist_topk_reference
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.kernels import cpu, shortlist_linear
from draftsmith.kernels.shortlist_linear import pack_shortlist, shortlist_logits, shortlist_topk

DTYPES = [torch.float32, torch.bfloat16]


def taken_one_by_one(scores, sizes, clusters, capacity):
    """The rows of a text's shortlist, and how many rows of the wanted clusters are left out."""
    order = sorted(range(len(sizes)), key=lambda cluster: (-scores[cluster], cluster))[:clusters]
    taken: list[int] = []
    for cluster in order:
        rows = range(sum(sizes[:cluster]), sum(sizes[: cluster + 1]))
        taken += rows[: capacity - len(taken)]
    return sorted(taken), sum(sizes[cluster] for cluster in order) - len(taken)


def starts_of(sizes):
    return torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])


@pytest.mark.parametrize("seed", range(60))
def test_packing(seed):
    """Few different scores, clusters without rows, and capacities of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    number = int(torch.randint(1, 12, (), generator=generator))
    sizes = torch.randint(0, 9, (number,), generator=generator).tolist()
    clusters = int(torch.randint(1, number + 1, (), generator=generator))
    capacity = int(torch.randint(1, sum(sizes) + 5, (), generator=generator))
    scores = torch.randint(-2, 3, (4, number), generator=generator).float()
    rows, count, dropped = pack_shortlist(scores, starts_of(sizes), clusters, capacity)
    assert rows.shape == (4, capacity) and count.shape == dropped.shape == (4,)
    assert rows.dtype == count.dtype == dropped.dtype == torch.int64
    for text in range(4):
        expected, left_out = taken_one_by_one(scores[text].tolist(), sizes, clusters, capacity)
        assert rows[text].tolist() == expected + [-1] * (capacity - len(expected))
        assert (int(count[text]), int(dropped[text])) == (len(expected), left_out)


@pytest.mark.parametrize(
    ("scores", "sizes", "clusters", "capacity", "expected"),
    [
        # The first cluster that does not fit gives its first rows.
        ([1.0, 3.0, 2.0, 0.0], [1, 2, 4, 1], 4, 5, ([1, 2, 3, 4, 5], 5, 3)),
        ([1.0, 3.0, 2.0, 0.0], [1, 2, 4, 1], 4, 7, ([0, 1, 2, 3, 4, 5, 6], 7, 1)),
        ([1.0, 3.0, 2.0, 0.0], [1, 2, 4, 1], 2, 7, ([1, 2, 3, 4, 5, 6, -1], 6, 0)),
        # Also one larger than the capacity, if it is the best, and after the best.
        ([0.0, 1.0, 0.5], [2, 9, 1], 3, 4, ([2, 3, 4, 5], 4, 8)),
        ([0.0, 0.5, 1.0], [2, 9, 1], 3, 4, ([2, 3, 4, 11], 4, 8)),
        # Equal scores go to the lower cluster.
        ([0.5] * 40, [1] * 40, 3, 4, ([0, 1, 2, -1], 3, 0)),
        ([0.5, 0.5, 0.7, 0.5], [1, 3, 1, 1], 3, 3, ([0, 1, 4], 3, 2)),
    ],
)
def test_packing_by_hand(scores, sizes, clusters, capacity, expected):
    rows, count, dropped = pack_shortlist(torch.tensor([scores]), starts_of(sizes), clusters, capacity)
    assert (rows[0].tolist(), int(count), int(dropped)) == expected


def test_scores_that_are_not_finite_give_rows_of_the_head():
    scores = torch.tensor([[float("nan")] * 3, [float("-inf")] * 3, [1.0, float("nan"), float("inf")]])
    rows, count, _ = pack_shortlist(scores, starts_of([2, 1, 2]), 2, 3)
    assert rows.tolist() == [[0, 1, 2], [0, 1, 2], [2, 3, 4]] and count.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("clusters", "capacity", "message"),
    [
        (0, 3, "0 clusters of 5; use 1 to 5"),
        (6, 3, "6 clusters of 5; use 1"),
        (1, 0, "a capacity of 0 tokens; use at le"),
    ],
)
def test_shortlists_that_cannot_be(clusters, capacity, message):
    with pytest.raises(ValueError, match=f"pack_shortlist: {message}"):
        pack_shortlist(torch.zeros(1, 5), torch.arange(6), clusters, capacity)


class Watch(TorchDispatchMode):
    """Rejects what a CUDA graph cannot capture: host reads, shapes that depend on data, new constants."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "equal"), name
        return func(*args, **(kwargs or {}))


def test_static():
    features, weight = torch.randn(2, 3, 16), torch.randn(50, 16)
    scores, starts, ids = torch.rand(2, 8), starts_of([4, 9, 2, 7, 8, 3, 6, 11]), torch.arange(50)
    with Watch():
        rows = pack_shortlist(scores, starts, 3, 20).rows
        logits = shortlist_logits(features, weight, rows, static=True)
        tokens = shortlist_topk(features, weight, rows, ids, 4, static=True)[1]
    assert torch.allclose(logits, shortlist_logits(features, weight, rows), atol=1e-5)
    assert torch.equal(tokens, shortlist_topk(features, weight, rows, ids, 4)[1])
    with Watch(), pytest.raises(AssertionError):
        shortlist_logits(features, weight, rows)


@pytest.fixture(params=["blas", "cpu.cpp"])
def form(request, monkeypatch):
    """With PyTorch's product and with our own."""
    if request.param == "blas":
        monkeypatch.setattr(cpu, "runs", lambda tensor: False)
    return request.param


def head(vocabulary, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, width, generator=generator).to(dtype)


def check_logits(features, weight, rows, **options):
    """Within the bound of a product in the same dtype, and −inf exactly in padding."""
    out = shortlist_logits(features, weight, rows, **options)
    assert out.dtype == torch.float32 and out.shape == (*features.shape[:2], rows.shape[1])
    padding = (rows < 0)[:, None].expand_as(out)
    assert torch.equal(out == float("-inf"), padding) and not out.isnan().any()
    at = rows.clamp(min=0)[:, None].expand_as(out)
    exact, bound = (part.gather(2, at)[~padding] for part in product_bound(features, weight.t(), weight.dtype))
    assert_within(out[~padding], exact, bound)
    assert torch.equal(shortlist_logits_reference(features, weight, rows) == float("-inf"), padding)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [1, 2, 7, 16])
@pytest.mark.parametrize("chunk", [1, 5, 40, 1000])
def test_logits(monkeypatch, form, nodes, dtype, chunk):
    """Slabs within a chunk, over the edges of chunks, and as large as a chunk; a text with one row beside others."""
    width = 24
    monkeypatch.setattr(shortlist_linear, "CHUNK_BYTES", chunk * width * dtype.itemsize)
    weight, features = head(200, width, dtype), head(3 * nodes, width + 8, dtype, 1).view(3, nodes, -1)[..., :width]
    starts = torch.tensor([0, 1, 30, 31, 90, 97, 150, 200])
    scores = torch.tensor([[0.0, 5, 1, 4, 3, 2, 6], [7, 1, 2, 3, 6, 5, 4], [9, 8, 0, 0, 0, 0, 0]])
    rows = pack_shortlist(scores, starts, 4, 151).rows
    rows[2, 1:] = -1
    with torch.no_grad():
        check_logits(features, weight, rows)
        check_logits(features, weight, rows, static=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_order_and_repetitions(monkeypatch, form, dtype):
    monkeypatch.setattr(shortlist_linear, "CHUNK_BYTES", 3 * 16 * dtype.itemsize)
    rows = torch.tensor([[7, 8, 8, 9, 3, 2, 1, 0, 1, 2, 19, 0, -1], [5] * 13])
    with torch.no_grad():
        out = check_logits(head(4, 16, dtype).view(2, 2, 16), head(20, 16, dtype, 1), rows)
    assert torch.equal(out[0, :, 1], out[0, :, 2])


def test_products_keep_their_shape(monkeypatch):
    """A product of another shape is one that a library may have to prepare first."""
    shapes = []

    def linear(x, weight):
        shapes.append(tuple(weight.shape))
        return x @ weight.t()

    monkeypatch.setattr(shortlist_linear, "linear", linear)
    monkeypatch.setattr(shortlist_linear, "CHUNK_BYTES", 40 * 16 * 2)
    weight, features = head(400, 16, torch.bfloat16), head(2, 16, torch.bfloat16, 1)[None]
    sizes = [7, 60, 33, 130, 90, 80]
    for seed in range(8):
        scores = torch.rand(1, 6, generator=torch.Generator().manual_seed(seed))
        rows = pack_shortlist(scores, starts_of(sizes), 4, 230).rows
        check_logits(features, weight, rows)
    assert len(shapes) > 16 and set(shapes) == {(39, 16)}, "six chunks of the capacity"


def test_ties_of_the_definition():
    """The first in the shortlist, whatever the tokens' numbers."""
    rows = torch.tensor([[5, 1, 3, 3, -1]])
    tokens = shortlist_topk_reference(torch.zeros(1, 1, 4), torch.ones(6, 4), rows, torch.arange(6).flip(0), 4)[1]
    assert tokens.tolist() == [[[0, 4, 2, 2]]]
