"""The fused residual block of all heads against float64, and where the heads use it."""

import pytest
import torch
from bounds import assert_within, gamma, product_bound, rounded
from cases import DTYPES, spread
from torch.nn import functional as F

from draftsmith.kernels import res_block as kernels
from draftsmith.kernels.res_block import res_block, res_block_reference, res_block_tile
from draftsmith.models.medusa import MedusaConfig, MedusaHeads


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


@pytest.fixture
def launches(monkeypatch):
    """The grids that the kernel was launched with."""
    grids = []

    class Counted:
        def __getitem__(self, grid, kernel=kernels._res_block_kernel):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "_res_block_kernel", Counted())
    return grids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize(("heads", "rows", "width"), [(1, 1, 16), (3, 1, 200), (5, 17, 72), (2, 64, 33), (4, 3, 130)])
def test_res_block(heads, rows, width, expanded, dtype, device, launches):
    torch.manual_seed(width)
    x = spread(torch.randn(1 if expanded else heads, rows, width).to(dtype), device).expand(heads, -1, -1)
    stacked = torch.full((2, heads + 1, width, width), float("nan"), dtype=dtype)
    stacked[1, :heads] = (torch.randn(heads, width, width) * width**-0.5).to(dtype)
    weight, bias = stacked.to(device)[1, :heads], torch.randn(heads, 1, width).to(device, dtype)
    found = res_block(x, weight, bias)
    assert len(launches) == 1 and launches[0][1] == heads
    assert found.shape == (heads, rows, width) and found.dtype == dtype and found.is_contiguous()
    z, error = product_bound(x, weight, torch.float32, bias)
    exact = x.cpu().double() + F.silu(z)
    error = 1.1 * error + gamma(16) * (x.cpu().double().abs() + z.abs())  # |SiLU'| ≤ 1.1
    assert_within(found, exact, error + rounded(exact.abs() + error, dtype))


def test_large_sums(device, launches):
    """SiLU of what exp would overflow for."""
    x, weight = torch.ones(1, 2, 16, device=device), torch.zeros(1, 16, 16, device=device)
    bias = torch.tensor([-1e4, -100, -88, 0, 88, 1e4], device=device).repeat(3)[None, None, :16]
    found = res_block(x, weight, bias)
    torch.testing.assert_close(found, 1 + F.silu(bias).expand(1, 2, 16), rtol=1e-6, atol=1e-6)
    assert launches


def test_blocks_are_narrower_where_multiprocessors_would_idle():
    widths = [res_block_tile(3, 1, d, torch.bfloat16, 132)["BLOCK_N"] for d in (64, 576, 2048, 4096, 8192)]
    assert widths == [16, 16, 16, 32, 64]


def test_where_it_is_plain(device, launches):
    """With gradients, under autocast, and with more rows than drafting has; and no head or row at all."""
    x, weight, bias = torch.randn(2, 65, 16), torch.randn(2, 16, 16), torch.randn(2, 1, 16)
    x, weight, bias = (part.to(device) for part in (x, weight, bias))
    assert torch.equal(res_block(x, weight, bias), res_block_reference(x, weight, bias))
    with torch.autocast(device.type, torch.bfloat16):
        found = res_block(x[:, :4], weight, bias)
        assert torch.equal(found, res_block_reference(x[:, :4], weight, bias))
    with torch.enable_grad():
        made = weight.clone().requires_grad_()
        res_block(x[:, :4], made, bias).sum().backward()
        assert made.grad is not None and made.grad.abs().sum() > 0
    assert res_block(x[:0], weight[:0], bias[:0]).shape == (0, 65, 16)
    assert res_block(x[:, :0], weight, bias).shape == (2, 0, 16)
    assert not launches
    res_block(x[:, :64], weight, bias)
    assert len(launches) == 1


def test_heads_use_it_in_inference(device, launches):
    """Some and all heads of several layers; the first layer reads one hidden state for all heads."""
    torch.manual_seed(0)
    heads = MedusaHeads(MedusaConfig(4, 2, "shared", 48, 61)).to(device)
    for part in heads.parameters():
        part.normal_(std=0.2)
    hidden = torch.randn(3, 50, device=device)[:, :48]
    for count in (None, 0, 1, 3):
        launches.clear()
        found = heads.features(hidden, count)
        assert len(launches) == (0 if count == 0 else 2)
        with torch.enable_grad():
            wanted = heads.features(hidden, count)
        assert len(launches) == (0 if count == 0 else 2) and wanted.requires_grad
        assert found.shape == wanted.shape == (4 if count is None else count, 3, 48)
        largest = float(wanted.abs().max()) if len(wanted) else 1
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * largest)
