"""Uniforms bit for bit; the distribution that the kernel's numbers describe, beside the definition's."""

import pytest
import torch
from bounds import gamma
from cases import sampling_parameters
from draws import occurs

from draftsmith.kernels.distribution import (
    distribution_reference,
    distribution_scalars,
    philox_uniforms,
    philox_uniforms_reference,
)
from draftsmith.kernels.multi_step import acceptances_reference


def described(logits, scalars, best):
    """The formula of the kernel's file."""
    scaled = (logits.float() - scalars[..., :1]) / scalars[..., 1:2]
    weights = torch.where(scaled >= scalars[..., 2:3], scaled.exp(), 0.0)
    one_hot = (torch.arange(logits.shape[-1], device=logits.device) == best[..., None]).float()
    return torch.where(best[..., None] >= 0, one_hot, weights) / scalars[..., 3:]


def check(device, logits, temperature, top_k, top_p, min_p, block=0, uses=(True, True, True)):
    """Returns p of the definition; the same tokens are kept, and p is as near as rounding allows."""
    wanted = distribution_reference(logits, temperature, top_k, top_p, min_p, uses)
    there = [x.to(device) for x in (logits, temperature, top_k, top_p, min_p)]
    scalars, best, _ = distribution_scalars(*there, uses=uses, block=block)
    if not uses[0]:
        best = torch.full_like(best, -1)
    found = described(there[0], scalars, best).cpu()
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    return wanted


@pytest.mark.parametrize(("count", "stream"), [(1, 0), (4, 3), (9, 0), (1100, 1)])
def test_uniforms(device, count, stream):
    """Columns of a larger tensor, as the settings hold them; every bit of seed and step."""
    seed = torch.tensor([[5, 0], [1 << 61, 0], [(1 << 62) - 1, 3], [0, 0]], device=device)[:, 0]
    step = torch.tensor([0, 1 << 40, 7, -1], device=device)
    found = philox_uniforms(seed, step, count, stream)
    assert torch.equal(found, philox_uniforms_reference(seed, step, count, stream))
    assert len({tuple(row) for row in found.tolist()}) == 4
    assert torch.equal(philox_uniforms(seed[2:3], step[2:3], count, stream), found[2:3])


@pytest.mark.parametrize(
    ("rows", "nodes", "vocabulary", "block", "dtype"),
    [
        (48, 1, 33, 64, torch.float32),
        (16, 1, 33, 8, torch.float16),
        (40, 1, 60, 64, torch.float16),
        (4, 2, 1000, 256, torch.float32),
        (3, 1, 5003, 0, torch.float16),
        (6, 2, 7, 0, torch.float64),
    ],
)
def test_distribution(device, rows, nodes, vocabulary, block, dtype):
    """Combinations of all parameters; some tokens are impossible, and float16 logits tie in groups."""
    torch.manual_seed(vocabulary)
    logits = torch.randn(rows, nodes, vocabulary) * 2 + torch.randn(rows, 1, 1) * 10
    logits[torch.rand(logits.shape) < 0.1] = -torch.inf
    logits = (logits * 2).round().div(2).half() if dtype == torch.float16 else logits.to(dtype)
    p = check(device, logits, *sampling_parameters(rows, vocabulary, first=rows), block=block)
    kept = (p > 0).sum(-1)
    assert rows < 40 or (int(kept.min()) == 1 and len(set(kept.flatten().tolist())) > 5)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_what_is_not_in_use_is_not_read(device, used):
    """One parameter in use, NaN in the others' place; node stride and row stride as in a slice of all logits."""
    torch.manual_seed(used)
    uses = (used == 0, used == 1, used == 2)
    logits = torch.randn(6, 5, 40)[::2, 1:3] * 3
    nan = torch.full((3,), torch.nan)
    temperature = torch.tensor([0.5, 0.0, 2.0]) if used == 0 else torch.tensor([0.5, 1.0, 2.0])
    top_k = torch.tensor([0, 3, 1000]) if used == 1 else torch.full((3,), -7)
    top_p = torch.tensor([0.7, 1.0, 0.2]) if used == 1 else nan
    check(device, logits, temperature, top_k, top_p, torch.tensor([0.0, 0.1, 0.3]) if used == 2 else nan, 16, uses)


def test_ties_at_the_floor_are_kept(device):
    """Beside a maximum of 2^20, logits that differ by less than an eighth have one (l − max) / T; so do 0 and −0."""
    near = torch.tensor([[[0.01, 2.0**20, 0.02, 2.0**20 + 1, -0.01, -1.0, 0.0, -0.0, 0.5]]])
    temperature, top_k = torch.tensor([2.0**19]), torch.tensor([4])
    ones, zeros = torch.ones(1), torch.zeros(1)
    p = check(device, near, temperature, top_k, ones, zeros)
    assert (p > 0).tolist() == [[[True, True, True, True, True, False, True, True, True]]] or int((p > 0).sum()) > 4
    few = torch.tensor([[[1.0, 2.0, 2.0, 0.0, 2.0, 1.0]]]).half()
    for k, kept in ((1, 3), (3, 3), (4, 5), (5, 5), (6, 6)):
        assert int((check(device, few, ones, torch.tensor([k]), ones, zeros) > 0).sum()) == kept
    equal = torch.zeros(1, 1, 12)
    assert int((check(device, equal, ones, torch.tensor([2]), ones * 0.1, zeros + 0.9) > 0).sum()) == 12


def test_greedy_rows_take_the_lowest_of_the_best(device):
    """Equal maxima in one lane and in several."""
    logits = torch.zeros(3, 1, 33)
    for row, best in enumerate(([3, 11, 19], [7, 2, 32], [32])):
        logits[row, 0, best] = 1.5
    temperature, top_k = torch.tensor([0.0, 0.0, 1e-9]), torch.zeros(3, dtype=torch.int64)
    p = check(device, logits, temperature, top_k, torch.ones(3), torch.zeros(3), block=8)
    assert p.argmax(-1).flatten().tolist() == [3, 2, 32]


def test_more_tokens_kept_than_a_tile_has_lanes(device):
    """The lanes' maxima bound the k-th largest logit only up to their number."""
    logits = -torch.arange(33.0).view(1, 1, 33).repeat(5, 1, 1)
    top_k, ones = torch.tensor([7, 8, 9, 20, 32]), torch.ones(5)
    p = check(device, logits, ones * 10, top_k, ones, ones * 0, block=8)
    assert (p > 0).sum(-1).flatten().tolist() == top_k.tolist()


def test_extreme_logits_and_temperatures(device):
    """The largest float32 logits at the lowest and highest temperatures; both signs, and subnormal numbers."""
    torch.manual_seed(0)
    scale = torch.tensor([3e38, 1e30, 1.0, 1e-3, 1e-39])[:, None, None]
    logits = ((torch.rand(5, 9) * 2 - 1)[:, None] * scale).repeat(2, 1, 1)
    temperature = torch.tensor([1e-9] * 5 + [1e6] * 5)
    top_k, top_p = torch.full((10,), 5), torch.full((10,), 0.999999)
    check(device, logits, temperature, top_k, torch.where(torch.arange(10) % 2 == 0, top_p, 1.0), torch.zeros(10))


@pytest.mark.parametrize("block", [8, 32])
def test_acceptances_of_one_hot_draws(device, block):
    """Up to ten draws of a node, some of one token, some impossible; parents in any order, a stride between nodes."""
    torch.manual_seed(block)
    rows, nodes, draws, vocabulary = 10, 4, 10, 20
    logits = torch.randn(rows, nodes, vocabulary) * 2
    tokens = torch.randint(vocabulary, (rows, nodes))
    child = torch.randint(-1, nodes, (rows, nodes, draws + 1))
    child[:, 1] = -1
    child = torch.where(torch.arange(draws + 1) < torch.randint(1, 11, (rows, nodes, 1)), child, -1)[..., :draws]
    settings = sampling_parameters(rows, vocabulary, 7)
    logits[3, 2, 5] = torch.nan
    moved = [part.to(device) for part in (logits, *settings)]
    draws = {"tokens": tokens.to(device), "child": child.to(device)}
    scalars, _, found = distribution_scalars(*moved, uses=(True, True, True), **draws, block=block)
    p = distribution_reference(logits, *settings)
    zeros = torch.zeros_like(child)
    wanted, _ = acceptances_reference(p.double(), tokens, child, zeros, zeros, None)
    # What follows a draw that is accepted for certain is never tested.
    tested = torch.cat([torch.ones_like(wanted[..., :1]), wanted[..., :-1] < 1], -1).cumprod(-1) > 0
    # A probability, divided by the mass that the draws before it left: 1 minus a sum.
    mass = torch.cat([torch.ones_like(wanted[..., :1]), 1 - wanted[..., :-1]], -1).cumprod(-1)
    bound = wanted * (gamma(64) + gamma(vocabulary + 64) / mass.clamp(min=1e-300))
    difference = torch.where(tested, (found.cpu().double() - wanted).abs() - bound, 0.0)[:, [0, 1, 3]]
    assert float(difference.max()) <= 0 and float(wanted[:, 0].max()) <= 1
    occurs(float(wanted[:, 0].max()) > 0.1)
    assert (found[3, 2].cpu() == (child[3, 2] >= 0)).all(), "where logits are not finite, every draw is accepted"
    assert scalars[..., 3].isnan().nonzero().tolist() == [[3, 2]]


def test_rows_that_are_not_finite(device):
    """Z is NaN where the definition's p is, and nowhere else: −∞ alone is a probability of 0."""
    logits = torch.randn(6, 2, 20)
    logits[0, 1, 19], logits[1, 0, 0], logits[2, 1] = torch.nan, torch.inf, -torch.inf
    logits[3, 0, 1:], logits[4, 1, 3] = -torch.inf, -torch.inf
    settings = sampling_parameters(6, 20, 40)
    wanted = distribution_reference(logits, *settings)
    moved = (logits.to(device), *(part.to(device) for part in settings))
    scalars, best, _ = distribution_scalars(*moved, uses=(True, True, True), block=16)
    assert torch.equal(scalars[..., 3].isnan().cpu(), wanted[..., 0].isnan())
    assert int(scalars[..., 3].isnan().sum()) == 3
    found = described(moved[0], scalars, best).cpu()
    torch.testing.assert_close(found, wanted, equal_nan=True, atol=1e-6, rtol=1e-5)
