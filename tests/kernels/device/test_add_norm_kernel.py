"""The kernel that adds a branch to the residual and norms the sum, against the formula in float64."""

import pytest
import torch
from bounds import assert_within, roundings_of_sum, sum_bound
from cases import DTYPES

from draftsmith.kernels.add_norm import add_norm, add_norm_reference


def exact_norm(x, weight, eps):
    x = x.cpu().double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.cpu().double()


def check(device, dtype, rows, width, parts, *, bias, after, wide_weights=False, factor=1.0, eps=1e-3, after_eps=None):
    generator = torch.Generator().manual_seed(rows * 100003 + width * 31 + parts)

    def random(*shape, wide=False):
        values = torch.randn(*shape, generator=generator)
        return (values if wide else values.to(dtype)).to(device)

    branch_dtype = dtype if parts == 1 else torch.float32
    y = random(parts, rows, width + 3, wide=True).to(branch_dtype)[..., :width] if parts else None
    x = random(rows, width + 5)[:, :width]  # rows of larger buffers
    weight = random(width, wide=wide_weights)
    scale = 1 + random(width, wide=wide_weights) if after else None
    shift = random(width) if bias else None
    options = {"bias": shift, "after": scale, "after_eps": after_eps, "factor": factor}
    before, results = x.clone(), []
    for function in (add_norm, add_norm_reference):
        own = torch.empty(rows, width + 5, dtype=dtype, device=device)[:, :width]
        own.copy_(before)
        out = torch.empty(rows, width + 2, dtype=dtype, device=device)[:, :width]
        function(own, y, weight, eps, out, **options)
        results.append((own, out))
    for new_x, out in results:  # both are tested
        assert new_x.dtype == out.dtype == dtype
        if y is None:
            assert torch.equal(new_x, before)
        else:
            added = y.cpu().double()
            if shift is not None:
                added = torch.cat((added, shift.cpu().double().expand(1, rows, -1)))
            branch, terms, roundings = added.sum(0), added.abs().sum(0), len(added) + 3
            if scale is not None:
                of_rms = terms.norm(dim=-1, keepdim=True) / branch.norm(dim=-1, keepdim=True)
                rms = (branch.pow(2).mean(-1, keepdim=True) + (eps if after_eps is None else after_eps)).sqrt()
                terms = (terms + branch.abs() * of_rms) / rms * scale.cpu().double().abs()
                branch, roundings = branch / rms * scale.cpu().double(), roundings + roundings_of_sum(width) + 4
            exact, x_terms = before.cpu().double() + factor * branch, before.cpu().double().abs() + abs(factor) * terms
            assert_within(new_x, exact, sum_bound(exact, x_terms, roundings, dtype))
        exact = exact_norm(new_x, weight, eps)  # out is the norm of the x that was stored
        assert_within(out, exact, sum_bound(exact, exact.abs(), roundings_of_sum(width) + 4, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 24), (3, 576), (2, 1000), (1, 4096)])
def test_sizes(device, dtype, rows, width, parts):
    check(device, dtype, rows, width, parts, bias=False, after=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide_weights", [False, True])
@pytest.mark.parametrize(
    ("bias", "after", "factor", "after_eps"),
    [(True, False, 1.0, None), (False, True, 1.0, None), (True, True, 0.22, 0.5), (False, False, -1.5, None)],
)
def test_branches(device, dtype, bias, after, factor, after_eps, wide_weights):
    """Bias, then its norm with an eps of its own, then the factor; weights in the model's dtype and in float32."""
    for parts in (1, 2):
        options = {"wide_weights": wide_weights, "factor": factor, "after_eps": after_eps}
        check(device, dtype, 3, 80, parts, bias=bias, after=after, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_rows(device, dtype):
    """The widest row, and sums of squares beyond the range of float16."""
    check(device, dtype, 2, 16384, 2, bias=True, after=True)
    x = torch.full((1, 3000), 300.0, dtype=dtype, device=device)
    out = torch.empty_like(x)
    add_norm(x, None, torch.ones(3000, dtype=dtype, device=device), 1e-6, out)
    assert float((out - 1).abs().max()) < 1e-3


def test_a_row_of_zeros(device):
    x, out = torch.zeros(2, 40, device=device), torch.empty(2, 40, device=device)
    weight = torch.ones(40, device=device)
    add_norm(x, torch.zeros(1, 2, 40, device=device), weight, 1e-6, out, after=weight)
    assert not x.any() and not out.any()


def test_a_branch_is_needed(device):
    x = torch.ones(1, 8, device=device)
    with pytest.raises(AssertionError, match="branch"):
        add_norm(x, None, x[0], 1e-6, torch.empty_like(x), bias=x[0])
