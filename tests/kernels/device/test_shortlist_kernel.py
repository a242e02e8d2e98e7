"""Logits and best tokens of shortlists against float64, and their rule for ties; by PyTorch's operations, too."""

import pytest
import torch
from bounds import assert_within, product_bound
from cases import DTYPES, in_a_graph, spread
from references import shortlist_logits_reference, shortlist_topk_reference
from tiny_models import random_shortlists, random_starts

from draftsmith.inference.drafters.shortlists import Shortlists
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.head_topk import tokens_at
from draftsmith.kernels.shortlist_linear import pack_shortlist, shortlist_logits, shortlist_topk
from draftsmith.models.shortlist import ShortlistConfig

PLAIN = why_not_triton(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")) is not None


def random_rows(texts, capacity, sizes, clusters, device):
    """Shortlists of texts with random scores."""
    starts = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], device=device)
    return pack_shortlist(torch.rand(texts, len(sizes)).to(device), starts, clusters, capacity)


SHAPES = [  # texts, nodes, width, sizes of the clusters, clusters wanted, capacity, tokens
    (1, 1, 64, [100, 30, 70, 1, 99], 3, 200, 10),
    (2, 5, 40, [65, 63, 128, 2], 2, 129, 4),
    (3, 17, 8, [20] * 13, 6, 128, 1),
    (1, 2, 72, [1] * 70, 64, 65, 16),
    (2, 3, 16, [7, 3], 1, 7, 3),
    (1, 33, 130, [500, 20], 1, 90, 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("texts", "nodes", "width", "sizes", "clusters", "capacity", "tokens"), SHAPES)
def test_shortlists(texts, nodes, width, sizes, clusters, capacity, tokens, dtype, device):
    """Each value is its token's logit, no token of the shortlist is left out that is clearly better, and no row outside
    it is read: these are NaN, as is what lies between rows."""
    torch.manual_seed(width)
    rows, count, _ = random_rows(texts, capacity, sizes, clusters, device)
    assert int(count.max()) >= tokens
    features = torch.randn(texts, nodes, width).to(device, dtype)
    weight = torch.full((sum(sizes), width), float("nan")).to(device, dtype)
    chosen = rows[rows >= 0].unique()
    weight[chosen] = torch.randn(len(chosen), width).to(device, dtype)
    ids = torch.randperm(sum(sizes)).to(device)
    weight = spread(weight.cpu(), device)
    logits = shortlist_logits(spread(features.cpu(), device), weight, rows)
    assert logits.shape == (texts, nodes, capacity) and logits.dtype == torch.float32
    padding = (rows < 0)[:, None].expand_as(logits)
    assert torch.equal(logits == float("-inf"), padding) and not logits.isnan().any()
    gathered = weight[rows.clamp(min=0)].transpose(1, 2)  # [B, d, C]
    written = dtype if PLAIN else torch.float32  # what logits are rounded to
    exact, bound = (part.to(device) for part in product_bound(features, gathered, written))
    assert_within(logits[~padding], exact[~padding], bound[~padding])
    values, found = shortlist_topk(spread(features.cpu(), device), weight, rows, ids, tokens)
    assert values.shape == found.shape == (texts, nodes, tokens)
    assert values.dtype == torch.float32 and found.dtype == torch.int64
    best = exact.masked_fill(padding, float("-inf")).topk(tokens, -1)
    largest = bound.masked_fill(padding, 0.0).amax(-1, keepdim=True)
    assert_within(values, best.values, largest)
    assert (values[..., :-1] >= values[..., 1:]).all()
    row_of = torch.empty_like(ids).index_copy_(0, ids, torch.arange(len(ids), device=device))
    for text in range(texts):
        real = min(tokens, int(count[text]))
        own = row_of[found[text, :, :real]]  # [n, R]
        assert all(len(set(row)) == real for row in own.tolist())
        assert bool(torch.isin(own, rows[text, : int(count[text])]).all())
        logit = (features[text, :, None].double() * weight[own].double()).sum(-1)
        assert_within(values[text, :, :real], logit, largest[text])


@pytest.mark.parametrize(("capacity", "tokens"), [(200, 16), (65, 3), (5, 5), (600, 4)])
def test_ties_go_to_the_first(capacity, tokens, device):
    """Small whole numbers: logits are exact, and most of them tie, within blocks and across; rows that occur twice, in
    an order that is not the head's."""
    torch.manual_seed(capacity)
    features = torch.randint(-1, 2, (2, 3, 16), device=device).float()
    weight = torch.randint(-1, 2, (capacity, 16), device=device).float()
    rows = torch.randint(0, capacity, (2, capacity), device=device)
    rows[1, max(tokens, capacity // 2) :] = -1
    ids = torch.randperm(capacity).to(device)
    assert torch.equal(shortlist_logits(features, weight, rows), shortlist_logits_reference(features, weight, rows))
    features[:, 2] = 0
    values, found = shortlist_topk(features, weight, rows, ids, tokens)
    wanted_values, wanted = shortlist_topk_reference(features, weight, rows, ids, tokens)
    assert torch.equal(values, wanted_values)
    log_q, _ = shortlist_topk(features, weight, rows, ids, tokens, log_q=True)
    torch.testing.assert_close(log_q, shortlist_topk_reference(features, weight, rows, ids, tokens, log_q=True)[0])
    assert PLAIN or torch.equal(found, wanted), "PyTorch's topk breaks ties in no documented order"


CONFIGS = {
    "fr_spec": ShortlistConfig("fr_spec", 90, (70,)),
    "dynaspec": ShortlistConfig("dynaspec", 90, (50,), (3,), 9, 8, 6, 16),
    "low_rank": ShortlistConfig("low_rank", 90, (20,), rank=3, feature_size=16),
    "low_rank, few": ShortlistConfig("low_rank", 90, (6,), rank=3, feature_size=16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_takes_the_kernel(name, device):
    """A level's best tokens, their order and ties are those of its logits, most of which tie, and no logits are written
    for them; noise, a bias, and where no kernel runs leave it to them."""
    head, starts = torch.nn.Linear(16, 90, bias=False, device=device).requires_grad_(False), random_starts(9, 90)
    head.weight.copy_(torch.randint(-1, 2, (90, 16)))
    lists = Shortlists(random_shortlists(CONFIGS[name], starts), head, torch.randperm(90).to(device))
    lists.allocate(static=False)
    read = torch.randint(-1, 2, (2, 3, 16), device=device).float()
    lists.choose(torch.randn(2, 3, 6, device=device), torch.randn(2, 3, 16, device=device), 0)
    logits, tokens = lists.logits(read)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :5]
    lists.logits = None
    found = lists.topk(read, 5)
    assert (found is None) == PLAIN
    if found is not None:
        torch.testing.assert_close(found[0], logits.log_softmax(-1).gather(2, order), atol=1e-5, rtol=1e-5)
        assert torch.equal(found[1], tokens_at(order, tokens))
    lists.bias = torch.zeros(90, device=device)
    assert lists.topk(read, 5) is None


def test_negative_logits_of_a_shortlist_with_padding(device):
    """Masked columns must not win with their 0, nor row 0 of the head, which padding may look up."""
    features = torch.ones(1, 1, 16, device=device)
    weight = -torch.arange(200.0, device=device)[:, None].expand(-1, 16).contiguous()
    rows = torch.cat((torch.arange(60, 190), torch.full((20,), -1))).to(device)[None]
    values, ids = shortlist_topk(features, weight, rows, torch.arange(200, device=device), 3)
    assert ids.tolist() == [[[60, 61, 62]]] and values.tolist() == [[[-960, -976, -992]]]


def test_a_shortlist_of_fewer_tokens(device):
    """Filled up with its first row's token; a text that has enough beside it, and one with padding alone."""
    rows = torch.full((3, 70), -1, device=device)
    rows[0, :2] = torch.tensor([4, 5])
    rows[1] = torch.arange(70) % 8
    weight, ids = torch.eye(8, device=device), torch.arange(50, 58, device=device)
    features = torch.arange(1.0, 9, device=device).expand(3, 2, 8)
    values, tokens = shortlist_topk(features, weight, rows, ids, 4)
    assert values[0].tolist() == [[6, 5, float("-inf"), float("-inf")]] * 2
    assert tokens[0].tolist() == [[55, 54, 54, 54]] * 2
    assert values[1].tolist() == [[8] * 4] * 2 and tokens[1].tolist() == [[57] * 4] * 2
    assert bool((values[2] == float("-inf")).all()) and 50 <= int(tokens[2].min()) <= int(tokens[2].max()) < 58


@pytest.mark.parametrize("tokens", [0, 17, 6])
def test_too_many(tokens, device):
    rows = torch.arange(5, device=device)[None]
    with pytest.raises(ValueError, match="use 1 to 5"):
        shortlist_topk(torch.zeros(1, 1, 16, device=device), torch.zeros(5, 16, device=device), rows, rows[0], tokens)


def test_logits_that_are_not_finite_give_tokens_all_the_same(device):
    """A static step looks up what comes out before the host can say that the drafter's hidden states are NaN."""
    features = torch.randn(2, 2, 16, device=device)
    features[0, 1], features[1, 0, 3] = torch.nan, torch.inf
    weight, ids = torch.randn(70, 16, device=device), torch.randperm(70).to(device)
    rows = random_rows(2, 40, [10] * 7, 3, device).rows
    found = shortlist_topk(features, weight, rows, ids, 5)[1]
    assert int(found.min()) >= 0 and int(found.max()) < 70
    wanted = shortlist_topk_reference(features, weight, rows, ids, 5)[1]
    assert torch.equal(found[0, 0], wanted[0, 0]) and torch.equal(found[1, 1], wanted[1, 1])


def test_replayed(device):
    """Other scores and features in the same tensors, in a CUDA graph where there is one; the same ones give the same
    bits again."""
    torch.manual_seed(0)
    sizes = [30, 5, 90, 41, 1, 60]
    starts, ids = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()]).to(device), torch.randperm(227).to(device)
    weight = torch.randn(227, 32, device=device)
    scores, features = torch.rand(2, 6, device=device), torch.randn(2, 3, 32, device=device)

    def step():
        rows, count, dropped = pack_shortlist(scores, starts, 3, 130)
        logits, best = shortlist_logits(features, weight, rows), shortlist_topk(features, weight, rows, ids, 6)
        return (rows, count, dropped, logits, *best)

    results, run = step(), in_a_graph(step, device)
    before = [part.clone() for part in results]
    assert all(torch.equal(part, again) for part, again in zip(before, run(), strict=True))
    scores.copy_(torch.rand(2, 6))
    features.copy_(torch.randn(2, 3, 32))
    after = [part.clone() for part in run()]
    assert not torch.equal(after[0], before[0])
    on_cpu = pack_shortlist(scores.cpu(), starts.cpu(), 3, 130)
    assert all(torch.equal(part.cpu(), expected) for part, expected in zip(after, on_cpu, strict=False))
    exact, bound = product_bound(features, weight[after[0].clamp(min=0)].transpose(1, 2), torch.float32)
    listed = (after[0] >= 0)[:, None].expand_as(after[3]).cpu()
    assert_within(after[3].cpu()[listed], exact[listed], bound[listed])
    assert torch.equal(after[5], shortlist_topk_reference(features, weight, after[0], ids, 6)[1])
