"""Products of few rows in parts against float64, their sums, and what is measured on a device."""

import pytest
import torch
from bounds import assert_within, product_bound, sum_bound
from cases import DTYPES, in_a_graph, spread
from torch import nn

from draftsmith.common.command import no_collection
from draftsmith.kernels import linear as linears
from draftsmith.kernels.few_rows import FewRowsForm, few_rows_product, few_rows_reference, part_length, sum_parts
from draftsmith.kernels.linear import apply_linear, partial_buffer, partial_product, product

FORMS = [  # rows, inputs, outputs, form
    (1, 64, 8, FewRowsForm("vector", 8, 64, 1, 4, 1)),
    (1, 300, 37, FewRowsForm("vector", 16, 64, 1, 4, 3)),
    (1, 300, 37, FewRowsForm("vector", 8, 128, 2, 4, 1)),
    (1, 70, 33, FewRowsForm("vector", 32, 32, 4, 4, 2)),
    (1, 100, 40, FewRowsForm("rows", 32, 32, 2, 4, 2)),
    (5, 37, 70, FewRowsForm("rows", 64, 32, 1, 4, 2)),
    (16, 128, 64, FewRowsForm("rows", 32, 64, 2, 4, 3)),
    (33, 70, 129, FewRowsForm("rows", 64, 32, 4, 4, 2)),
    (64, 90, 40, FewRowsForm("rows", 64, 32, 1, 4, 2)),
]


def inputs(rows, width, outputs, dtype, device):
    torch.manual_seed(width + outputs)
    x, matrix = (spread(torch.randn(count, width).to(dtype), device) for count in (rows, outputs))
    return x, matrix.t()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "outputs", "form"), FORMS, ids=lambda value: getattr(value, "name", value))
def test_each_part_is_its_product(rows, width, outputs, form, dtype, device):
    """Of a part beyond the matrix too, which is zero; nothing between rows is read."""
    x, matrix = inputs(rows, width, outputs, dtype, device)
    parts = few_rows_product(x, matrix, form)
    per_part = part_length(width, form)
    assert per_part % form.inputs == 0 and per_part * form.parts >= width
    assert parts.shape == (form.parts, rows, outputs) and parts.dtype == (dtype if form.parts == 1 else torch.float32)
    for number, part in enumerate(parts):
        own = slice(number * per_part, (number + 1) * per_part)
        exact, bound = product_bound(x[:, own], matrix[own], parts.dtype)
        assert_within(part, exact, bound)
        assert_within(few_rows_reference(x, matrix, form)[number].to(parts.dtype), exact, bound)
    again = torch.full((form.parts, rows + 2, outputs + 3), float("nan"), device=device)  # strides of its own
    out = again[:, 1:-1, 2:-1]
    assert few_rows_product(x, matrix, form, out) is out
    assert torch.equal(out.to(parts.dtype), parts), "the same sums, in float32"
    again[:, 1:-1, 2:-1] = torch.nan
    assert bool(again.isnan().all()), "nothing beside them is written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "width", "outputs", "form"),
    [
        (1, 300, 38, FORMS[1][3]),
        (1, 64, 16, FORMS[0][3]),
        (5, 37, 70, FORMS[5][3]),
        (33, 70, 90, FewRowsForm("rows", 32, 32, 1, 4, 2)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_a_product_of_one_part_does_besides(rows, width, outputs, form, act, dtype, device):
    """A norm before it, the activation or the residual behind it, against float64; all of it and each alone."""
    x, matrix = inputs(rows, width, outputs, dtype, device)
    x = 5 * x
    weight, bias = ((1 + torch.randn(size)).to(device, dtype) for size in (width, outputs))
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    # Two roundings of each term in the dtype of x (x · weight, and the result), and sums in float32.
    unit = torch.finfo(dtype).eps
    for norm, shift, add in ((None, None, not act), ((weight, 1e-3), None, False), ((weight, 1e-3), bias, not act)):
        own = wide if norm is None else normed
        exact, size = own @ matrix.double(), own.abs() @ matrix.double().abs()
        if shift is not None:
            exact, size = exact + shift.double(), size + shift.double().abs()
        if act:
            gate, up = exact.chunk(2, -1)
            tanh = act == "gelu_tanh"
            exact = (torch.nn.functional.gelu(gate, approximate="tanh") if tanh else gate / (1 + (-gate).exp())) * up
            gate, up = size.chunk(2, -1)
            size = 2 * gate * (up + 1)
        before = torch.randn(1, *exact.shape).to(device, dtype)
        out = before.clone()
        options = {"norm": norm, "bias": shift, "act": act, "factor": 0.5 if add else 1.0}
        assert few_rows_product(x, matrix, form, out, add=add, **options) is out
        if add:
            exact = before[0].double() + 0.5 * exact
        terms = unit if norm is not None and form.kernel == "rows" else 0.0
        bound = (terms + (width + 8) * 2.0**-24) * size + unit * exact.abs() + 1e-6
        residual = before if add else None
        reference = few_rows_reference(x, matrix, form, residual=residual, **options)
        for found in (out[0], reference[0]):
            assert ((found.double() - exact).abs() <= bound).all()
        assert float(bound.max()) < float(exact.abs().max()), "zeros would not pass"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "rows", "outputs"), [(1, 1, 40), (2, 3, 1025), (8, 5, 16)])
def test_sums_of_parts(splits, rows, outputs, dtype, device):
    torch.manual_seed(outputs)
    parts = torch.randn(splits, rows, outputs).to(device)
    bias = torch.randn(outputs).to(device, dtype)
    out = torch.empty(rows, outputs, device=device, dtype=dtype)
    assert sum_parts(parts, out, bias) is out
    terms = torch.cat((parts.cpu(), bias.cpu().float().expand(1, rows, -1))).double()
    assert_within(out, terms.sum(0), sum_bound(terms.sum(0), terms.abs().sum(0), splits, dtype))
    sum_parts(parts.to(dtype), out)
    terms = parts.to(dtype).cpu().double()
    assert_within(out, terms.sum(0), sum_bound(terms.sum(0), terms.abs().sum(0), splits, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rows 32x32 /1, 4 warps, 2 stages", "rows 32x64 /2, 4 warps, 2 stages"])
def test_every_way_to_multiply(name, dtype, device):
    """As tests/kernels/test_linear.py has it for the forms of a CPU."""
    x, matrix = inputs(3, 100, 40, dtype, device)
    bias = torch.randn(40).to(device, dtype)
    right = product_bound(x, matrix, dtype)
    assert_within(product(name, x, matrix), *right)
    assert_within(product(name, x.t().contiguous().t(), matrix), *right)  # x by columns
    out = torch.empty(3, 40, device=device, dtype=dtype)
    assert product(name, x, matrix, bias, out) is out
    assert_within(out, *product_bound(x, matrix, dtype, bias))
    assert product(name, x, matrix, None, out) is out
    assert_within(out, *right)
    for form in (name, "blas"):
        parts = partial_buffer(form, 3, matrix)
        assert parts.shape[0] == linears.splits_of(form) and partial_product(form, x, matrix, parts) is parts
        assert torch.equal(partial_product(form, x, matrix), parts)
        assert parts.dtype == (dtype if len(parts) == 1 else torch.float32)
        assert_within(parts.double().sum(0), *right)


@pytest.mark.parametrize("name", ["vector 16x64 /2, 4 warps, 3 stages", "rows 32x32 /4, 4 warps, 3 stages"])
def test_replayed(name, device):
    """Other inputs in the same tensors, in a CUDA graph where there is one; the same ones give the same bits again."""
    x, matrix = inputs(1, 300, 70, torch.float16, device)
    parts = partial_buffer(name, 1, matrix)

    def step():
        return partial_product(name, x, matrix, parts)

    before, run = step().clone(), in_a_graph(step, device)
    assert torch.equal(run(), before)
    x.copy_(torch.randn(1, 300))
    exact, bound = product_bound(x, matrix, torch.float32)
    assert_within(run().double().sum(0), exact, bound)
    assert float((before.cpu().double().sum(0) - exact).abs().max()) > 1


def test_nothing_is_measured_in_a_capture(monkeypatch, device):
    monkeypatch.setattr(linears, "_gpu_chosen", {})
    monkeypatch.setattr(linears, "_gpu_stored", {linears.machine(device): {}})
    monkeypatch.setattr(linears, "_GPU_LEAST", 0)
    monkeypatch.setattr(linears, "_measure_on_gpu", lambda *_: pytest.fail("it would synchronise"))
    if device.type == "cpu":
        monkeypatch.setattr(linears, "_measuring_is_forbidden", lambda matrix: True)
    module = nn.Linear(90, 40, device=device).requires_grad_(False)
    x = torch.randn(3, 90, device=device)
    with torch.no_grad():
        want = module(x)
        if device.type == "cpu":
            assert linears._choose_on_gpu(3, module.weight.t(), False) == "blas"
            return
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph):
            found = apply_linear(module, x)
        graph.replay()
        assert torch.equal(found, want)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = apply_linear(module, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, want)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("partial", [False, True])
def test_the_choice_on_this_device(monkeypatch, tmp_path, rows, partial, device):
    """Measured on a GPU; under the interpreter every form is compared, and times are made up."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    for name in ("_gpu_chosen", "_gpu_stored"):
        monkeypatch.setattr(linears, name, {})
    monkeypatch.setattr(linears, "_gpu_spent", 0.0)
    monkeypatch.setattr(linears, "GPU_BUDGET", float("inf"))
    monkeypatch.setattr(linears, "_GPU_LEAST", 0)
    timed = []

    def timer(form, x, matrix, partial, time=linears.time_on_gpu):
        timed.append(form)
        made_up = 1.0 if form == "blas" else 0.5 / len(timed)
        return time(form, x, matrix, partial) if device.type == "cuda" else made_up

    monkeypatch.setattr(linears, "time_on_gpu", timer)
    dtype = torch.float16
    module = nn.Linear(1100, 140, bias=False, dtype=dtype, device=device).requires_grad_(False)
    matrix, x = module.weight.t(), torch.randn(rows, 1100).to(device, dtype)
    with torch.no_grad():
        form = linears._choose_on_gpu(rows, matrix, partial)
        names = [one.name for one in linears._candidates(1 if rows == 1 else 8, matrix)]
        assert sorted(timed) == sorted(["blas", "blas", *names]) and len(names) > 3, "every form is right"
        assert device.type == "cuda" or form == names[-1]
        assert linears._choose_on_gpu(rows, matrix, partial) == form and len(timed) == len(names) + 2
        monkeypatch.setattr(linears, "choose", lambda *_: form)
        monkeypatch.setattr(linears.cpu, "runs", lambda tensor: False)
        assert_within(apply_linear(module, x[None])[0], *product_bound(x, matrix, dtype))
