"""The kernel of losses against a teacher, and PyTorch's path, against plain autograd in float64."""

import pytest
import torch
from bounds import roundings_of_sum, sum_bound
from cases import DTYPES

from draftsmith.kernels.soft_loss import ETA, LOSSES, Teacher, soft_loss, soft_loss_reference


def defined(logits, teacher, rows, bias):
    """Losses and acceptance probabilities of each position in float64, by the formulas; differentiable."""
    z = logits if bias is None else logits + bias.double()
    log_q, p = z.log_softmax(-1), teacher.probs.double()[rows]
    cross = -(p * log_q).sum(-1)
    whole = p if teacher.coverage is None else p * teacher.coverage.double()[rows, None]
    acceptance = torch.minimum(whole, log_q.exp()).sum(-1)
    others = {"ce": cross, "tv": 1 - acceptance, "nla": -acceptance.log()}
    if teacher.loss != "lk":
        return others[teacher.loss], acceptance
    weight = (-ETA * acceptance.detach()).exp()
    return weight * (cross + torch.xlogy(p, p).sum(-1)) + (1 - weight) * (1 - acceptance), acceptance


def make_teacher(kind, count, width, generator):
    probs = (3 * torch.randn(count, width, generator=generator)).softmax(-1)
    best = probs.argmax(-1)
    best[1] = -1
    loss, _, part = kind.partition(", ")
    coverage = 0.2 + 0.8 * torch.rand(count, generator=generator) if part else None
    entropy = -torch.xlogy(probs.double(), probs.double()).sum(-1).float() if loss == "lk" else None
    return Teacher(probs, best, coverage, entropy, loss)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [f"{loss}{part}" for loss in LOSSES for part in ("", ", draft vocabulary")])
@pytest.mark.parametrize(("width", "with_bias"), [(1, False), (37, True), (600, False), (4100, True)])
def test_values_and_gradients(device, kind, width, with_bias, dtype):
    generator = torch.Generator().manual_seed(width + len(kind))
    count, positions = 3, 5
    teacher = make_teacher(kind, count, width, generator)
    rows = torch.tensor([2, 0, 0, 1, 2])
    logits = (2 * torch.randn(positions, width, generator=generator)).to(dtype)
    logits[1] = (1.3 * teacher.probs[0].log().clamp(min=-15)).to(dtype)  # right; equal, rounding would decide if q < p
    bias = torch.randn(width, generator=generator).to(dtype) if with_bias else None
    scale = 0.1 + torch.rand(positions, generator=generator)
    exact = logits.double().requires_grad_()
    losses, acceptance = defined(exact, teacher, rows, bias)
    (slopes,) = torch.autograd.grad((losses * scale.double()).sum(), exact)
    z = logits.double() if bias is None else logits.double() + bias.double()
    best = teacher.best[rows]
    hits = (z.gather(1, best.clamp(min=0)[:, None])[:, 0] == z.amax(-1)) & (best >= 0)
    if width > 1:
        assert 0 < int(hits.sum() if not with_bias else 1) < positions
    for run in (soft_loss, soft_loss_reference):
        found = torch.empty(3, positions + 2, device=device)[:, :positions]
        slope = torch.empty(positions, width + 3, dtype=dtype, device=device)[:, :width]
        slope.copy_(logits)
        there = Teacher(*(part.to(device) if isinstance(part, torch.Tensor) else part for part in teacher))
        run(slope, there, rows.to(device), scale.to(device), found, None if bias is None else bias.to(device))
        # An exponential's relative error is its argument's absolute one; sums of terms below 1 that add up to 1.
        error = 8 * (roundings_of_sum(width) + 40) * 2.0**-24 * float(z.abs().max() + 1)
        assert ((found[0].cpu() - losses.detach()).abs() <= error * (1 + losses.detach().abs())).all()
        assert torch.equal(found[1].cpu() > 0, hits)
        assert ((found[2].cpu() - acceptance.detach()).abs() <= error).all()
        bound = sum_bound(slopes, error / 2.0**-24 * slopes.abs() + error / 2.0**-24 * 1e-3, 1, dtype)
        assert ((slope.cpu() - slopes).abs() <= bound).all()
        assert width == 1 or float(bound.max()) < 0.05 * float(slopes.abs().max()), "zeros would not pass"


def test_extremes(device):
    """Logits far apart, of either sign, and a teacher that is certain."""
    logits = torch.tensor([[-3e4, 3e4, 0.0], [1e4, -1e4, 1e4 - 1]], device=device)
    probs = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], device=device)
    teacher = Teacher(probs, probs.argmax(-1), None, torch.zeros(2, device=device), "lk")
    found = torch.empty(3, 2, device=device)
    soft_loss(logits, teacher, torch.tensor([0, 1], device=device), torch.ones(2, device=device), found)
    q = 1 / (1 + torch.exp(torch.tensor(-1.0)))
    weight = torch.exp(-ETA * q)
    assert found[0, 0] == 0 and found[1].tolist() == [1, 1] and found[2, 0] == 1 and not logits[0].any()
    torch.testing.assert_close(found[2, 1].cpu(), q)
    torch.testing.assert_close(found[0, 1].cpu(), -weight * q.log() + (1 - weight) * (1 - q))
    assert logits.isfinite().all()
    logits = torch.tensor([[-3e4, 3e4, 0.0]], device=device)  # no draft is accepted
    teacher = Teacher(probs[1:], probs.argmax(-1)[1:], loss="nla")
    soft_loss(logits, teacher, torch.tensor([0], device=device), torch.ones(1, device=device), found[:, :1])
    assert 60 < float(found[0, 0]) < 70 and logits.isfinite().all()
    logits = torch.tensor([[-7.0, 0.0, -20.0]], device=device)  # α = 9e-4: ∂(−log α) is (q_1 − 1, q_2, q_3)
    q = logits.softmax(-1)
    soft_loss(logits, teacher, torch.tensor([0], device=device), torch.ones(1, device=device), found[:, :1])
    torch.testing.assert_close(logits, q - torch.tensor([[1.0, 0.0, 0.0]], device=device))
