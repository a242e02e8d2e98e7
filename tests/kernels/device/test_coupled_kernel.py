"""The best tokens by log p + noise, by kernels/cpu.cpp and where the device tests run: beside the definition, and their
law."""

import pytest
import torch
from cases import sampling_parameters
from scipy import stats

from draftsmith.kernels import cpu
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.coupled import coupled_topk, coupled_topk_reference
from draftsmith.kernels.distribution import distribution_reference

ALPHA = 1e-6


@pytest.fixture(autouse=True, params=["native", "device"])
def no_kernels_of_a_cpu(request, monkeypatch, device):
    """The library of a CPU, or what else the device tests run."""
    if request.param == "device":
        monkeypatch.setattr(cpu, "runs", lambda tensor: False)
    elif device.type != "cpu" or cpu.library() is None:
        pytest.skip("kernels/cpu.cpp is for a CPU with a compiler")


def check(logits, samplings, seed, positions, count, tokens=None, uses=(True, True, True)):
    """The definition's scores and tokens, in float64's order where they do not tie."""
    finite, scores, found = coupled_topk(logits, *samplings, seed, positions, count, tokens, uses)
    there = [x.cpu() for x in (logits, *samplings, seed, positions)]
    wanted, their_scores, their = coupled_topk_reference(*there, count, None if tokens is None else tokens.cpu())
    finite, scores, found = finite.cpu(), scores.cpu(), found.cpu()
    assert torch.equal(finite.isfinite(), wanted.isfinite())
    kept = their_scores > -1e30
    assert torch.equal(scores > -1e30, kept)
    torch.testing.assert_close(scores[kept], their_scores[kept], atol=1e-5, rtol=1e-5)
    apart = torch.ones_like(kept)
    close = (their_scores[..., 1:] - their_scores[..., :-1]).abs() < 1e-4
    apart[..., 1:] &= ~close
    apart[..., :-1] &= ~close
    # The last one may tie with a token that is not listed.
    assert torch.equal(found[kept & apart][:-1], their[kept & apart][:-1])
    if tokens is None:
        assert all(len(set(node)) == count for row in found.tolist() for node in row)
    return found


@pytest.mark.parametrize(
    ("rows", "nodes", "vocabulary", "count", "dtype"),
    [
        (24, 1, 33, 3, torch.float32),
        (9, 2, 64, 1, torch.bfloat16),
        (16, 1, 60, 4, torch.float16),
        (4, 3, 1000, 8, torch.float32),
        (3, 1, 5003, 16, torch.bfloat16),
        (6, 2, 5, 2, torch.float32),
    ],
)
def test_definition(device, rows, nodes, vocabulary, count, dtype):
    """All filters and temperatures, 0 too; some tokens are impossible, and 16-bit logits tie in groups."""
    torch.manual_seed(vocabulary + count)
    logits = torch.randn(rows, nodes, vocabulary) * 3 + torch.randn(rows, 1, 1) * 10
    logits[torch.rand(logits.shape) < 0.1] = -torch.inf
    logits[..., 0] = 0.0
    seed = torch.randint(1 << 62, (rows,))
    positions = torch.randint(1 << 34, (rows, nodes))
    for first in (0, 100):
        samplings = sampling_parameters(rows, vocabulary, first)
        check(*_to(device, logits.to(dtype), samplings, seed, positions), count)


def _to(device, logits, samplings, seed, positions):
    return logits.to(device), [x.to(device) for x in samplings], seed.to(device), positions.to(device)


@pytest.mark.parametrize("by_row", [False, True])
def test_reduced_vocabulary(device, by_row):
    """The noise is that of the target's tokens; padding is not taken."""
    torch.manual_seed(2)
    rows, nodes, vocabulary = 5, 3, 90
    logits = torch.randn(rows, nodes, vocabulary) * 2
    ids = torch.stack([torch.randperm(3000)[:vocabulary].sort().values for _ in range(rows)])
    ids, logits[..., -7:] = (ids, -torch.inf) if by_row else (ids[0], logits[..., -7:])
    if by_row:
        ids[:, -7:] = -1
    wide = torch.full((rows, nodes, 3000), -torch.inf)
    wide.scatter_(2, (ids if by_row else ids.expand(rows, -1))[:, None].expand_as(logits).clamp(min=0), logits)
    if by_row:
        for row in range(rows):
            first = (ids[row] == 0).nonzero().flatten()
            wide[row, :, 0] = logits[row, :, first].amax(-1) if len(first) else -torch.inf
    samplings = [torch.full((rows,), 0.8), torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows)]
    seed, positions = torch.arange(rows), torch.arange(rows * nodes).view(rows, nodes)
    found = check(*_to(device, logits, samplings, seed, positions), 5, ids.to(device))
    whole = check(*_to(device, wide, samplings, seed, positions), 5)
    assert torch.equal(found, whole)


def test_not_finite(device):
    """A node with NaN or +∞, or −∞ only, is marked; others are what they are without it."""
    logits = torch.randn(1, 5, 70)
    for node, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        logits[0, node, 60 if value > 0 or value != value else slice(None)] = value
    samplings = [torch.tensor([0.7]), torch.tensor([10]), torch.tensor([0.9]), torch.tensor([0.01])]
    seed, positions = torch.tensor([4]), torch.arange(5)[None]
    there = _to(device, logits, samplings, seed, positions)
    finite, _, found = coupled_topk(there[0], *there[1], *there[2:], 2)
    assert finite.isfinite().tolist() == [[True, False, False, False, True]]
    assert ((found >= 0) & (found < 70)).all()
    alone = coupled_topk(there[0][:, 4:], *there[1], there[2], there[3][:, 4:], 2)
    assert torch.equal(alone[2], found[:, 4:])


def test_rows_do_not_matter(device):
    """A node's tokens and scores, bit for bit, do not depend on the other rows and nodes, nor on how many are asked
    for."""
    torch.manual_seed(1)
    rows, nodes, vocabulary = 6, 4, 700
    logits = torch.randn(rows, nodes, vocabulary) * 4
    samplings, seed = sampling_parameters(rows, vocabulary), torch.randint(1 << 62, (rows,))
    positions = torch.arange(nodes).repeat(rows, 1)
    logits, samplings, seed, positions = _to(device, logits, samplings, seed, positions)
    _, scores, found = coupled_topk(logits, *samplings, seed, positions, 6)
    for row, node in ((0, 1), (3, 3), (5, 0)):
        part = slice(row, row + 1), slice(node, node + 1)
        its = [x[part[0]] for x in (*samplings, seed)]
        _, own_scores, own = coupled_topk(logits[part], *its, positions[part], 1)
        assert torch.equal(own, found[part][..., :1]) and torch.equal(own_scores, scores[part][..., :1])


def chosen_law(device, seeds, positions, tokens=None, temperature=0.9, top_k=0, top_p=1.0):
    """p of the χ² test of 200,000 choices from one distribution over nine tokens."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, 1.5, -1.0, -3.0, -5.0, 1.0])
    count = len(seeds)
    samplings = [torch.full((count,), v) for v in (temperature, top_k, top_p, 0.0)]
    there = _to(device, logits.expand(count, 1, -1), samplings, seeds, positions[:, None])
    found = coupled_topk(there[0], *there[1], *there[2:], 1)[2].cpu()
    p = distribution_reference(logits[None, None], *(s[:1] for s in samplings))[0, 0].double()
    observed = torch.bincount(found.flatten(), minlength=9)
    assert observed[p == 0].sum() == 0
    kept = p > 0
    return stats.chisquare(observed[kept].numpy(), (p[kept] / p[kept].sum() * count).numpy()).pvalue


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.8), (6, 0.9)])
def test_law(device, top_k, top_p):
    """Over seeds at one position, over positions of one seed, and over both, the first token has the distribution p."""
    interpreted = device.type == "cpu" and not why_not_triton(torch.empty(0)) and not cpu.runs(torch.empty(0))
    many = torch.arange(60 if interpreted else 60_000)
    some = torch.full_like(many, 12345)
    for seeds, positions in ((many, many), *(() if interpreted else ((many, some), (some, many)))):
        assert chosen_law(device, seeds, positions, top_k=top_k, top_p=top_p) > ALPHA


def test_law_of_a_row_that_repeats_its_noise():
    """The test above rejects noise that does not depend on the position: a text would take the same draw again."""
    many = torch.zeros(200, dtype=torch.int64)
    assert chosen_law(torch.device("cpu"), many, many) < ALPHA
