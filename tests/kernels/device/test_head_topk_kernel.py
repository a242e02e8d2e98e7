"""The fused projection and top-R against float64, and its rule for ties."""

import pytest
import torch
from bounds import assert_within, product_bound
from cases import DTYPES, spread
from draws import occurs
from references import head_argmax_reference, head_topk_reference
from torch.nn import functional as F

from draftsmith.kernels import head_topk as kernels
from draftsmith.kernels.head_topk import _merge_topk_kernel, best_tokens, head_argmax, head_topk, merge_topk


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "count"),
    [(1, 64, 300, 10), (5, 40, 129, 4), (17, 8, 128, 1), (20, 72, 65, 16), (3, 16, 7, 7), (2, 130, 1000, 16)],
)
def test_topk(rows, width, vocabulary, count, dtype, device):
    """Each value is its id's logit, no token is left out that is clearly better, and the order is the values'."""
    torch.manual_seed(width)
    features = spread(torch.randn(rows, width).to(dtype), device)
    weight = torch.randn(vocabulary, width).to(device, dtype)
    values, ids = head_topk(features, weight, count)
    assert values.shape == ids.shape == (rows, count) and values.dtype == torch.float32 and ids.dtype == torch.int64
    exact, bound = (part.to(device) for part in product_bound(features, weight.T, torch.float32))
    largest = bound.amax(1, keepdim=True)
    assert_within(values, exact.gather(1, ids), largest)
    assert all(len(set(row)) == count for row in ids.tolist())
    assert_within(values, exact.topk(count, -1).values, largest)
    assert (values[:, :-1] >= values[:, 1:]).all()


@pytest.mark.parametrize(("vocabulary", "count", "at_once"), [(200, 16, 32), (65, 3, 1024), (5, 5, 16), (500, 7, 16)])
def test_ties_go_to_the_lowest_id(vocabulary, count, at_once, device, monkeypatch):
    """Small whole numbers: logits are exact, and most of them tie, within blocks and across; the merge takes one to
    three rounds."""
    monkeypatch.setattr(kernels, "MERGED_AT_ONCE", at_once)
    torch.manual_seed(vocabulary)
    features = torch.randint(-1, 2, (3, 16), device=device).float()
    weight = torch.randint(-1, 2, (vocabulary, 16), device=device).float()
    values, ids = head_topk(features, weight, count)
    wanted_values, wanted = head_topk_reference(features, weight, count)
    assert torch.equal(ids, wanted) and torch.equal(values, wanted_values)
    features.zero_()
    assert head_topk(features, weight, count)[1].tolist() == [list(range(count))] * 3


def best_in_order(values, ids, count, vocabulary):
    """The definition of the merge: value falling, id rising; what is no candidate comes last."""
    good = (ids < vocabulary) & ~values.isnan()
    values, ids = torch.where(good, values, -torch.inf), torch.where(good, ids.long(), 2**31)
    ids, order = ids.sort(-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order)[:, :count].clamp(max=vocabulary - 1)


@pytest.mark.parametrize(
    ("candidates", "count", "at_once"),
    [(1, 1, 1024), (15, 15, 1024), (600, 10, 1024), (1025, 3, 1024), (2500, 2, 1024), (150, 16, 32)],
)
def test_merge(candidates, count, at_once, device, monkeypatch):
    """Values of every kind and their ids in no order, in one round and in several; and by one program per row."""
    monkeypatch.setattr(kernels, "MERGED_AT_ONCE", at_once)
    torch.manual_seed(candidates)
    rows, vocabulary = 5, 2 * candidates + 16
    ids = torch.stack([torch.randperm(vocabulary)[:candidates] for _ in range(rows)]).int()
    values = torch.randn(rows, candidates)
    values[1].clamp_(0.0).mul_(-1.0)  # most are −0, which is 0
    values[1, ::3] = 0.0
    values[2] = (values[2] * 2).round()
    values[2, ::5], values[2, 1::5], values[2, 2::7] = torch.inf, -torch.inf, torch.nan
    values[3, 1:], ids[3, 1:] = torch.nan, 7
    values[4] *= 1e-40  # subnormal
    ids[4, 1::2] = vocabulary + 3
    wanted = best_in_order(values, ids, count, vocabulary)
    values, ids = values.to(device), ids.to(device)
    alone = values.new_empty(rows, count), torch.empty(rows, count, dtype=torch.int64, device=device)
    with torch.cuda.device_of(values):
        given = ((values, ids, *alone), (None, None, 0, None), vocabulary, count, candidates)
        _merge_topk_kernel[(rows,)](*given, BLOCK=max(64, at_once // 2), BLOCK_P=1)
    for found_values, found in (merge_topk(values, ids, count, vocabulary), alone):
        assert torch.equal(found_values.cpu(), wanted[0]) and torch.equal(found.cpu(), wanted[1])


def test_negative_logits_and_a_last_block_of_one(device):
    """Masked columns must not win with their 0."""
    features, weight = torch.ones(1, 16, device=device), -torch.arange(1.0, 130, device=device)[:, None].expand(-1, 16)
    values, ids = head_topk(features, weight.contiguous(), 3)
    assert ids.tolist() == [[0, 1, 2]] and values.tolist() == [[-16, -32, -48]]


@pytest.mark.parametrize("count", [0, 17, 6])
def test_too_many(count, device):
    with pytest.raises(ValueError, match="use 1 to 5"):
        head_topk(torch.zeros(1, 16, device=device), torch.zeros(5, 16, device=device), count)


def test_logits_that_are_not_finite_give_tokens_all_the_same(device):
    """A static step looks up what comes out before the host can say that the target's hidden states are NaN."""
    features = torch.randn(4, 16, device=device)
    features[1], features[2, 3] = torch.nan, torch.inf
    weight = torch.randn(70, 16, device=device)
    values, ids = head_topk(features, weight, 5)
    assert int(ids.min()) >= 0 and int(ids.max()) < 70 and (values[1] == -torch.inf).all()
    assert torch.equal(ids[[0, 3]], head_topk_reference(features, weight, 5)[1][[0, 3]])
    weight[[2, 3, 5, 7, 11, 13, 69]] = torch.tensor([[torch.nan], [-torch.nan]] * 3 + [[torch.nan]], device=device)
    ids, wanted = head_topk(features, weight, 5)[1], torch.arange(70, device=device).expand(4, -1)
    wanted = best_in_order(F.linear(features, weight), wanted, 5, 70)[1]
    assert torch.equal(ids[[0, 3]], wanted[[0, 3]]), "tokens whose logit is NaN are left out"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "count", "at_once"), [(1, 64, 300, 4, 8), (5, 40, 129, 1, 1024), (3, 16, 7, 7, 16)]
)
def test_log_probabilities_and_tokens(rows, width, vocabulary, count, at_once, dtype, device, monkeypatch):
    """Against float64, with logits far from 0; ids are looked up in a table, after one round of the merge or two."""
    monkeypatch.setattr(kernels, "MERGED_AT_ONCE", at_once)
    torch.manual_seed(vocabulary)
    features = (4 * torch.randn(rows, width)).to(device, dtype)
    weight = torch.randn(vocabulary, width).to(device, dtype)
    tokens = torch.randperm(3 * vocabulary, device=device)[:vocabulary]
    log_q, ids = head_topk(features, weight, count, log_q=True, tokens=tokens)
    exact = features.double() @ weight.double().T
    assert float(exact.abs().max()) > 10
    # A float32 sum of d terms, and log Σ exp: 2 γ_d |x| |w| and a few units in the last place.
    bound = 2 * width * 2.0**-24 * float((features.double().abs() @ weight.double().abs().T).max()) + 1e-5
    best = exact.log_softmax(-1).topk(count, -1)
    assert bound < 1e-2 and float((log_q.double() - best.values).abs().max()) <= bound
    assert torch.equal(ids, tokens[head_topk(features, weight, count)[1]])
    wanted = head_topk_reference(features, weight, count, log_q=True, tokens=tokens)
    assert float((log_q - wanted[0]).abs().max()) <= bound
    if dtype == torch.float32:
        plain = best_tokens(features @ weight.T, count, True, tokens)
        assert float((log_q - plain[0]).abs().max()) <= bound and torch.equal(ids, plain[1])


def test_log_probabilities_where_logits_are_not_finite(device):
    """A row of NaN, and one where most tokens have no probability."""
    features, weight = torch.ones(2, 16, device=device), torch.full((300, 16), -torch.inf, device=device)
    weight[[5, 299]] = torch.tensor([[0.5], [0.25]], device=device)
    features[1] = torch.nan
    log_q, ids = head_topk(features, weight, 3, log_q=True)
    wanted = torch.tensor([8.0, 4.0]).log_softmax(0)
    assert ids[0, :2].tolist() == [5, 299] and torch.allclose(log_q[0, :2].cpu(), wanted, atol=1e-6)
    assert log_q[0, 2] == -torch.inf and (log_q[1] == -torch.inf).all() and int(ids.max()) < 300


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_is_that_of_written_logits(dtype, device):
    """Sums that are exact in float32 and tie more often once they are rounded to 16 bits: the lowest id."""
    torch.manual_seed(5)
    features = torch.randint(-2, 3, (9, 40), device=device).to(dtype)
    weight = torch.randint(-2, 3, (300, 40), device=device).to(dtype)
    features[:, 0], weight[:, 0] = 256, 64  # rounding to 16 bits takes the low bits
    weight[150:] = weight[:150]  # each token ties with another one
    values, ids = head_argmax(features, weight)
    logits = F.linear(features.float(), weight.float()).to(dtype).float()
    assert torch.equal(values, logits.amax(-1)) and torch.equal(ids, logits.argmax(-1))
    wanted = head_argmax_reference(features, weight)
    assert torch.equal(values, wanted[0]) and torch.equal(ids, wanted[1])
    tied = (logits == logits.amax(-1, keepdim=True)).sum(-1)
    assert (tied > 1).all()
    occurs(dtype == torch.float32 or (ids != head_topk(features, weight, 1)[1][:, 0]).any())


def test_argmax_says_where_logits_are_not_finite(device):
    features, weight = torch.ones(3, 1, 16, device=device), torch.randn(200, 16, device=device)
    features[1, 0, 3] = torch.nan
    weight[150, 2] = torch.nan
    values, ids = head_argmax(features, weight)
    assert values.shape == ids.shape == (3, 1) and not values.isfinite().any() and int(ids.max()) < 200
    values, _ = head_argmax(features, torch.where(weight.isnan(), 0.0, weight))
    assert values.isfinite().tolist() == [[True], [False], [True]]
