"""The tolerance of kernels whose sums are in float32 and whose outputs are rounded once."""

import torch


def near(out, plain, exact):
    """Within twice the error of plain PyTorch in the same precision. A 16-bit result is rounded once: off by half a
    unit in the last place, and by what the sums in float32 leave."""
    assert out.dtype == plain.dtype and out.shape == exact.shape
    precision, out, plain = torch.finfo(out.dtype), out.cpu().double(), plain.cpu().double()
    error, largest = (out - exact).abs(), float(exact.abs().max())
    allowed = 2 * float((plain - exact).abs().max())
    if precision.bits == 32:
        allowed = max(allowed, 4 * precision.eps * largest)
    else:
        unit = precision.eps * torch.exp2(exact.abs().log2().floor()).clamp(precision.tiny)
        assert (error <= 0.505 * unit + 1e-6 * largest).all()
    assert float(error.max()) <= allowed < 0.02 * largest
