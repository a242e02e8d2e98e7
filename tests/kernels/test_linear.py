"""Every form of a product gives its result; the choice is measured once and kept in a file, which may be damaged."""

import copy
import json

import pytest
import torch
from torch.nn import functional as F

from draftsmith.common.files import cache_folder
from draftsmith.kernels import linear as linears
from draftsmith.kernels.linear import FORMS, add_product, apply_linear, choose, linear, product
from draftsmith.kernels.measured import machine


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    """No measurements yet, in memory or on disk."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(linears, "_chosen", {})
    monkeypatch.setattr(linears, "_stored", None)
    monkeypatch.setattr(linears, "_spent", 0.0)


def prefer(monkeypatch, form):
    monkeypatch.setattr(linears, "_measure", lambda matrix, packed: dict.fromkeys(linears._COUNTS, form))


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 8, 32])
def test_every_form_is_the_product(monkeypatch, form, rows, by_columns):
    prefer(monkeypatch, form)
    torch.manual_seed(0)
    x, matrix, bias = torch.randn(rows, 37), torch.randn(37, 19), torch.randn(19)
    if by_columns:
        matrix = matrix.t().contiguous().t()
    want = x.double() @ matrix.double()
    plain = (x @ matrix - want).norm()
    with torch.no_grad():
        assert choose(rows, matrix) == form
        assert (product(form, x, matrix) - want).norm() <= 2 * plain + 1e-6
        out = torch.empty(rows, 19)
        assert product(form, x, matrix, bias, out) is out
        assert (out - bias - want).norm() <= 3 * plain + 1e-5
        assert product(form, x, matrix, None, out) is out
        assert (out - want).norm() <= 2 * plain + 1e-6
        total = torch.ones(rows, 19)
        assert add_product(form, total, x, matrix, 0.5) is total
        assert (total - 1 - 0.5 * want).norm() <= 2 * plain + 1e-5
        found = linear(x.view(rows, 1, 37), matrix.t(), bias)
        assert found.shape == (rows, 1, 19) and (found[:, 0] - bias - want).norm() <= 3 * plain + 1e-5


def test_the_choice_is_kept_for_the_next_process(monkeypatch):
    matrix = torch.randn(19, 37).t()
    prefer(monkeypatch, "transposed")
    with torch.no_grad():
        assert choose(3, matrix) == "transposed"
    content = json.loads((cache_folder() / linears.FILE).read_text())
    assert content == {
        machine(): {f"{n} x (37, 19) by columns, float32": "transposed" for n in (1, 2, 4, 8, 16, 32, 64)}
    }
    prefer(monkeypatch, "blas")
    monkeypatch.setattr(linears, "_chosen", {})
    monkeypatch.setattr(linears, "_stored", None)
    with torch.no_grad():
        assert choose(3, matrix) == choose(4, matrix) == choose(1000, matrix) == "transposed"
        assert choose(3, torch.randn(20, 37).t()) == "blas"
        assert choose(3, matrix.contiguous()) == "blas", "another order in memory is another product"
    (cache_folder() / linears.FILE).write_text("[1, 2")
    monkeypatch.setattr(linears, "_chosen", {})
    monkeypatch.setattr(linears, "_stored", None)
    with torch.no_grad():
        assert choose(3, matrix) == "blas"
    assert (
        json.loads((cache_folder() / linears.FILE).read_text())[machine()]["4 x (37, 19) by columns, float32"] == "blas"
    )


def test_measuring_is_short_and_has_a_budget(monkeypatch):
    matrix = torch.randn(4096, 512).t()
    with torch.no_grad():
        assert choose(4, matrix) in FORMS
    assert 0 < linears._spent < 1
    monkeypatch.setattr(linears, "_spent", linears.BUDGET)
    monkeypatch.setattr(linears, "_measure", lambda matrix, packed: pytest.fail("the budget is spent"))
    with torch.no_grad():
        assert choose(8, matrix) in FORMS  # measured with the 4 rows
        assert choose(8, matrix[:, 1:]) == "blas"


def test_the_shortest_time_wins(monkeypatch):
    def slow(x, matrix):
        for _ in range(20):
            torch.mm(x, matrix)

    monkeypatch.setattr(linears, "FORMS", {"blas": slow, "slow": slow, "fast": torch.mm})
    assert set(linears._measure(torch.randn(64, 64), False).values()) == {"fast"}
    monkeypatch.setattr(linears, "FORMS", {"blas": torch.mm, "slow": slow})
    assert set(linears._measure(torch.randn(64, 64), False).values()) == {"blas"}


def test_where_nothing_is_chosen(monkeypatch):
    monkeypatch.setattr(linears, "_look_up", lambda rows, matrix, packed: pytest.fail("nothing to choose here"))
    matrix = torch.randn(37, 19)
    assert choose(2, matrix) == "blas"  # gradients
    with torch.no_grad():
        assert choose(0, matrix) == "blas"
        assert choose(2, matrix.to("meta")) == "blas"
        module = torch.nn.Linear(37, 19)
        module.register_forward_hook(lambda module, args, out: out + 1)
        x = torch.randn(2, 37)
        assert torch.equal(apply_linear(module, x), F.linear(x, module.weight, module.bias) + 1)


def test_no_place_to_keep_it(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    with torch.no_grad():
        assert choose(2, torch.randn(37, 19)) in FORMS


@pytest.mark.skipif(not linears.CAN_PACK, reason="this PyTorch is built without oneDNN")
def test_a_frozen_weight_is_packed_and_noticed_when_written_to(monkeypatch):
    form = {True: "packed", False: "blas"}
    monkeypatch.setattr(linears, "_measure", lambda matrix, packed: dict.fromkeys(linears._COUNTS, form[packed]))
    torch.manual_seed(0)
    module = torch.nn.Linear(37, 19)
    x = torch.randn(2, 3, 37)
    packs = []
    monkeypatch.setattr(linears, "_pack", lambda matrix, pack=linears._pack: packs.append(1) or pack(matrix))
    module.requires_grad_(False)
    with torch.no_grad():
        for number, write in enumerate((lambda: None, lambda: module.weight.mul_(2), lambda: module.weight.add_(1)), 1):
            write()
            want = F.linear(x.double(), module.weight.double(), module.bias.double())
            plain = (F.linear(x, module.weight, module.bias) - want).norm()
            for _ in range(2):
                assert (apply_linear(module, x) - want).norm() <= 3 * plain + 1e-6
            assert len(packs) == number
        copy.deepcopy(module)  # a packed tensor cannot be copied
        module.requires_grad_(True)
        apply_linear(module, x)
    assert len(packs) == 3, "a weight that trains is not packed"


@pytest.mark.skipif(not linears.CAN_PACK, reason="this PyTorch is built without oneDNN")
def test_packed_is_measured_among_the_forms(monkeypatch):
    def slow(x, matrix):
        for _ in range(20):
            torch.mm(x, matrix)

    monkeypatch.setattr(linears, "FORMS", {"blas": slow})
    assert set(linears._measure(torch.randn(64, 256), True).values()) == {"packed"}
    assert set(linears._measure(torch.randn(64, 256), False).values()) == {"blas"}
