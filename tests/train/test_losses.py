import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from draftsmith.kernels.soft_loss import Teacher
from draftsmith.train.losses import in_chunks, linear_cross_entropy, linear_soft_loss, shifted_labels

VOCAB, WIDTH = 11, 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("shift", [1, 2, 6, 7, 9])
def test_shifted_labels(shift, length, dtype):
    torch.manual_seed(shift)
    tokens = torch.randint(VOCAB, (3, length), dtype=dtype)
    for supervised in (torch.rand(3, length) < 0.5, torch.ones(3, length).bool(), torch.zeros(3, length).bool()):
        labels, expected = shifted_labels(tokens, supervised, shift), torch.full((3, length), -100)
        for b, t in itertools.product(range(3), range(length - shift)):
            if supervised[b, t + shift]:
                expected[b, t] = tokens[b, t + shift]
        assert labels.dtype == torch.int64 and torch.equal(labels, expected)


def test_no_label_crosses_into_the_next_sample():
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    segment = torch.tensor([[1, 1, 1, 2, 2, 0]])
    supervised = torch.tensor([[True] * 5 + [False]])
    assert shifted_labels(tokens, supervised, 1, segment).tolist() == [[2, 3, -100, 5, -100, -100]]
    assert shifted_labels(tokens, supervised, 2, segment).tolist() == [[3, -100, -100, -100, -100, -100]]


@pytest.mark.parametrize("kind", ["labels", "ce", "tv"])
def test_gradients_below_what_float16_holds(kind):
    """Of a head in float16, the mean over a million labels: as with a head in float32."""
    torch.manual_seed(0)
    features, weight, each = torch.randn(64, 128), 0.3 * torch.randn(2000, 128), 1e-6
    labels, probs = torch.randint(2000, (64,)), torch.randn(64, 2000).softmax(-1)
    teacher, rows = Teacher(probs, probs.argmax(-1), None, None, kind), torch.arange(64)

    def gradient(dtype):
        x, w = features.clone().requires_grad_(), weight.half().to(dtype)
        if kind == "labels":
            loss = linear_cross_entropy(x, w, labels)[0] * each
        else:
            loss = linear_soft_loss(x, w, teacher, rows, torch.full((64,), each))[0]
        return torch.autograd.grad(loss, x)[0]

    right = gradient(torch.float32)
    assert (gradient(torch.float16) - right).norm() < 0.01 * right.norm()


SIZES = [(chunk, frozen, False) for chunk in (1, 3, 4, 23, 24, 25, None) for frozen in (False, True)]


@pytest.mark.parametrize("chunk, frozen, compiled", [*SIZES, pytest.param(4, False, True, marks=pytest.mark.slow)])
def test_linear_cross_entropy_is_cross_entropy(chunk, frozen, compiled):
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 12, WIDTH), nn.Linear(WIDTH, VOCAB)
    head.requires_grad_(not frozen)
    labels = torch.randint(VOCAB, (2, 12))
    labels[0, :8] = -100  # whole chunks of 3 and 4 without a label
    labels[1, 5] = -100
    labels[1, 7] = head(hidden[1, 7]).argmax()  # at least one hit

    def run(loss_of):
        x = hidden.clone().requires_grad_()
        head.zero_grad()
        loss, hits = loss_of(x)
        (3.0 * loss).backward()
        return loss.detach(), hits, x.grad, head.weight.grad, head.bias.grad

    def plain(x):
        logits = head(x).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
        return loss, sum(int(row.argmax()) == int(label) for row, label in zip(logits, labels.flatten(), strict=True))

    def ours(x):
        return linear_cross_entropy(x, head.weight, labels, head.bias, chunk)

    expected = [None if v is None else torch.as_tensor(v).clone() for v in run(plain)]
    assert 0 < expected[1] < 15
    for got, wanted in zip(run(torch.compile(ours) if compiled else ours), expected, strict=True):
        if wanted is None:
            assert got is None
        else:
            torch.testing.assert_close(torch.as_tensor(got), wanted, atol=1e-4, rtol=1e-5)
    with torch.no_grad():
        assert float(ours(hidden)[0]) == pytest.approx(float(expected[0]), rel=1e-5)


@pytest.mark.parametrize("chunk", [2, None])
def test_no_label_at_all_is_a_loss_of_zero(chunk):
    hidden, head = torch.randn(6, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCAB)
    loss, hits = linear_cross_entropy(hidden, head.weight, torch.full((6,), -100), head.bias, chunk)
    loss.backward()
    assert float(loss.detach()) == int(hits) == 0
    assert torch.equal(hidden.grad, torch.zeros(6, WIDTH))
    empty, _ = linear_cross_entropy(hidden[:0], head.weight, torch.full((0,), -100), head.bias, chunk)
    empty.backward()
    assert float(empty.detach()) == 0


def test_a_sum_over_no_positions_has_gradients_of_zero():
    """For the LM head too: with DDP each process has to give one for each weight, also one whose rows have no label."""
    hidden, head = torch.randn(6, WIDTH, requires_grad=True), nn.Linear(WIDTH, VOCAB)

    def chunk(x, y):
        return F.cross_entropy(head(x), y, reduction="sum")

    total = in_chunks(chunk, VOCAB, hidden[:0], torch.zeros(0, dtype=torch.int64))
    total.backward()
    assert float(total.detach()) == 0 and torch.equal(hidden.grad, torch.zeros(6, WIDTH))
    assert torch.equal(head.weight.grad, torch.zeros(VOCAB, WIDTH)) and not head.bias.grad.any()


def test_half_precision_is_summed_in_float32():
    torch.manual_seed(0)
    hidden, labels = torch.randn(4096, WIDTH), torch.randint(VOCAB, (4096,))
    weight = torch.randn(VOCAB, WIDTH).bfloat16()
    loss, _ = linear_cross_entropy(hidden.bfloat16(), weight, labels, chunk=100)
    exact = F.cross_entropy((hidden.bfloat16() @ weight.T).double(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(exact), rel=1e-3)


def test_under_autocast_the_gradients_are_those_of_half_precision():
    torch.manual_seed(0)
    hidden, labels = torch.randn(300, 32, requires_grad=True), torch.randint(VOCAB, (300,))
    weight = torch.randn(VOCAB, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, labels, chunk=64)[0].backward()
        ours = hidden.grad.clone(), weight.grad.clone()
        hidden.grad = weight.grad = None
        F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum").backward()
    for got, wanted in zip(ours, (hidden.grad, weight.grad), strict=True):
        assert got.dtype == torch.float32
        assert float((got - wanted).norm() / wanted.norm()) < 1e-2
