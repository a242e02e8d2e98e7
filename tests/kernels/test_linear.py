"""Every form of a product computes it; the choice is measured once, kept in a file, and may not be had of damage."""

import json

import pytest
import torch
from torch.nn import functional as F

from draftsmith.kernels import linear as linears
from draftsmith.kernels.linear import FORMS, MOST, add_linear, apply_linear, choose, linear


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    """A process that has measured nothing yet."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(linears, "_chosen", {})
    monkeypatch.setattr(linears, "_stored", None)
    monkeypatch.setattr(linears, "_spent", 0.0)


def prefer(monkeypatch, form):
    monkeypatch.setattr(linears, "_measure", lambda weight: dict.fromkeys(linears._COUNTS, form))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 8, 32])
def test_every_form_is_the_product(monkeypatch, form, rows):
    prefer(monkeypatch, form)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 37), torch.randn(19, 37), torch.randn(19)
    want = F.linear(x.double(), weight.double())
    plain = (F.linear(x, weight) - want).norm()
    with torch.no_grad():
        assert choose(x, weight) == form
        assert (linear(x, weight) - want).norm() <= 2 * plain + 1e-6
        assert (linear(x, weight, bias) - bias - want).norm() <= 3 * plain + 1e-5
        found = linear(x.view(rows, 1, 37), weight, bias)
        assert found.shape == (rows, 1, 19) and found.is_contiguous()
        total = torch.ones(rows, 19)
        assert add_linear(total, x, weight, 0.5) is total
        assert (total - 1 - 0.5 * want).norm() <= 2 * plain + 1e-5


def test_the_choice_is_kept_for_the_next_process(monkeypatch):
    weight, x = torch.randn(19, 37), torch.randn(3, 37)
    prefer(monkeypatch, "transposed")
    with torch.no_grad():
        assert choose(x, weight) == "transposed"
    content = json.loads(linears._file().read_text())
    assert content == {linears._machine(): {f"{n} x (19, 37) float32": "transposed" for n in (1, 2, 4, 8, 16, 32)}}
    prefer(monkeypatch, "linear")
    monkeypatch.setattr(linears, "_chosen", {})
    monkeypatch.setattr(linears, "_stored", None)
    with torch.no_grad():
        assert choose(x, weight) == choose(x[:1].expand(4, -1), weight) == "transposed"
        assert choose(x, torch.randn(20, 37)) == "linear"
    linears._file().write_text("[1, 2")
    monkeypatch.setattr(linears, "_chosen", {})
    monkeypatch.setattr(linears, "_stored", None)
    with torch.no_grad():
        assert choose(x, weight) == "linear"
    assert json.loads(linears._file().read_text())[linears._machine()]["4 x (19, 37) float32"] == "linear"


def test_measuring_is_short_and_has_a_budget(monkeypatch):
    weight = torch.randn(4096, 512)
    with torch.no_grad():
        assert choose(torch.randn(4, 512), weight) in FORMS
    assert 0 < linears._spent < 1
    monkeypatch.setattr(linears, "_spent", linears.BUDGET)
    monkeypatch.setattr(linears, "_measure", lambda weight: pytest.fail("the budget is spent"))
    with torch.no_grad():
        assert choose(torch.randn(8, 512), weight) in FORMS  # measured with the 4 rows
        assert choose(torch.randn(8, 512), weight[1:]) == "linear"


def test_the_shortest_time_wins(monkeypatch):
    def slow(x, weight, bias):
        for _ in range(20):
            F.linear(x, weight, bias)

    monkeypatch.setattr(linears, "FORMS", {"linear": slow, "slow": slow, "fast": F.linear})
    assert set(linears._measure(torch.randn(64, 64)).values()) == {"fast"}
    monkeypatch.setattr(linears, "FORMS", {"linear": F.linear, "slow": slow})
    assert set(linears._measure(torch.randn(64, 64)).values()) == {"linear"}


def test_where_nothing_is_chosen(monkeypatch):
    monkeypatch.setattr(linears, "_look_up", lambda rows, weight: pytest.fail("nothing to choose here"))
    weight = torch.randn(19, 37, requires_grad=True)
    assert choose(torch.randn(2, 37), weight) == "linear"  # gradients
    with torch.no_grad():
        assert choose(torch.randn(MOST + 1, 37), weight) == "linear"
        assert choose(torch.randn(0, 37), weight) == "linear"
        assert choose(torch.empty(2, 37, device="meta"), weight.to("meta")) == "linear"
        module = torch.nn.Linear(37, 19)
        module.register_forward_hook(lambda module, args, out: out + 1)
        x = torch.randn(2, 37)
        assert torch.equal(apply_linear(module, x), F.linear(x, module.weight, module.bias) + 1)


def test_no_place_to_keep_it(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    with torch.no_grad():
        assert choose(torch.randn(2, 37), torch.randn(19, 37)) in FORMS
