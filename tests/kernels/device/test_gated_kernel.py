"""The kernel of an MLP's gated activation, against the formula in float64."""

import math

import pytest
import torch
from bounds import assert_within, sum_bound
from cases import DTYPES

from draftsmith.kernels.gated import ACTS, gated, gated_reference


def exact_act(gate, act):
    if act == "silu":
        return gate / (1 + torch.exp(-gate))
    return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


@pytest.mark.fixed_seed("a single output has to be far from zero, beside its bound")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("rows", "width", "with_bias"), [(1, 1, True), (3, 100, False), (2, 512, True), (5, 1300, True)]
)
def test_sizes(device, dtype, act, parts, rows, width, with_bias):
    generator = torch.Generator().manual_seed(rows * 100003 + width * 31 + parts)
    buffer = 2 * torch.randn(parts, rows, 2 * width + 3, generator=generator)
    gate_up = buffer.to(dtype if parts == 1 else torch.float32).to(device)[..., : 2 * width]
    bias = torch.randn(2 * width, generator=generator).to(dtype).to(device) if with_bias else None
    out, plain = (torch.empty(rows, width + 7, dtype=dtype, device=device)[:, :width] for _ in range(2))
    gated(gate_up, out, act, bias=bias)
    gated_reference(gate_up, plain, act, bias=bias)
    added = gate_up.cpu().double()
    if bias is not None:
        added = torch.cat((added, bias.cpu().double().expand(1, rows, -1)))
    (gate, up), (gate_terms, up_terms) = added.sum(0).split(width, -1), added.abs().sum(0).split(width, -1)
    exact = exact_act(gate, act) * up
    terms = 1.13 * gate_terms * up.abs() + exact_act(gate, act).abs() * up_terms  # neither activation is steeper
    for found in (out, plain):
        assert found.dtype == dtype
        assert_within(found, exact, sum_bound(exact, terms, len(added) + 16, dtype))


@pytest.mark.parametrize("act", ACTS)
def test_far_from_zero(device, act):
    """Neither end overflows: the activation is the identity there, or zero."""
    gate = torch.tensor([-3e38, -1e20, -1e13, -100.0, 0.0, 100.0, 1e13, 1e20, 3e38], device=device)
    out = torch.empty(1, len(gate), device=device)
    gated(torch.cat((gate, torch.ones_like(gate)))[None, None], out, act)
    torch.testing.assert_close(out[0], gate.clamp(min=0), rtol=1e-6, atol=0.0)


def test_relative_precision(device):
    """The tanh GELU of negative gates, where 1 + tanh would cancel, and of tiny ones."""
    gate = torch.tensor([-4.0, -3.0, -2.0, -1e-3, -1e-20, 1e-20, 1e-3], device=device)
    out = torch.empty(1, len(gate), device=device)
    gated(torch.cat((gate, torch.ones_like(gate)))[None, None], out, "gelu_tanh")
    exact = exact_act(gate.cpu().double(), "gelu_tanh")
    assert float(((out[0].cpu() - exact) / exact).abs().max()) < 5e-6


def test_other_activations(device):
    with pytest.raises(ValueError, match="'relu', which is none of silu, gelu_tanh"):
        gated(torch.ones(1, 1, 4, device=device), torch.empty(1, 2, device=device), "relu")
