"""The noise of coupled sampling: Philox's published numbers, and the law of what is made of them."""

import torch
from scipy import stats

from draftsmith.kernels.coupled import gumbel, uniforms
from draftsmith.kernels.distribution import philox_words

ALPHA = 1e-6


def test_published_numbers():
    """Philox's test vectors."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(word) for word in philox_words(zero, zero, zero, 0, zero)] == words
    c0, c1, c2, key = (torch.tensor([n]) for n in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x299F31D0A4093822))
    words = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    assert [int(word) for word in philox_words(c0, c1, c2, 0x03707344, key)] == words


def test_noise_is_uniform_and_uncorrelated():
    """1.2 million uniforms: of each bin as many as expected, in the tail too; neighbours by position, by token, by seed
    and by position + token are uncorrelated."""
    seeds, positions, tokens = torch.arange(2), torch.arange(62) + (1 << 32) - 30, torch.arange(10_000)
    u = uniforms(seeds[:, None, None], positions[:, None], tokens)
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u.double(), 1000, 0, 1)
    assert stats.chisquare(counts.numpy()).pvalue > ALPHA
    for power in (8, 12, 16, 20):  # the smallest u make the largest noise
        expected = u.numel() * 2.0**-power
        assert stats.poisson.cdf(int((u < 2.0**-power).sum()), expected) > ALPHA
        assert stats.poisson.sf(int((u < 2.0**-power).sum()) - 1, expected) > ALPHA
    z = (u.double() - 0.5) * 12**0.5
    pairs = [
        (z[1:], z[:-1]),
        (z[:, 1:], z[:, :-1]),
        (z[..., 1:], z[..., :-1]),
        (z[..., 16:], z[..., :-16]),
        (z[:, 1:, 1:], z[:, :-1, :-1]),
        (z[:, 1:, :-1], z[:, :-1, 1:]),
        (z[1:, 1:], z[:-1, :-1]),
    ]
    for a, b in pairs:
        assert abs(float((a * b).mean())) * a.numel() ** 0.5 < 5.5


def test_gumbel_moments():
    """Mean γ, variance π²/6 of 10⁶ numbers."""
    g = gumbel(torch.tensor([3]), torch.arange(1000)[:, None], torch.arange(1000)).double()
    assert abs(float(g.mean()) - 0.5772156649) < 5 * (1.6449**0.5) / 1000
    assert abs(float(g.var()) - 1.6449340668) < 5 * 3.0 / 1000  # the fourth central moment is 14.6
