"""Every form of a product gives its result, on a CPU each row with the same bits whatever the other rows are. A GPU's
choice is tested with made-up times, on the definition of few rows' products."""

import json
import types

import pytest
import torch
from bounds import assert_within, product_bound
from torch.nn import functional as F

from draftsmith.common.files import cache_folder
from draftsmith.kernels import cpu, few_rows
from draftsmith.kernels import linear as linears
from draftsmith.kernels.few_rows import FewRowsForm, candidates, parse_form
from draftsmith.kernels.linear import apply_linear, choose, linear, partial_buffer, partial_product, product
from draftsmith.kernels.measured import machine


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    """No measurements yet, in memory or on disk."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(linears, "_gpu_chosen", {})
    monkeypatch.setattr(linears, "_gpu_stored", {})
    monkeypatch.setattr(linears, "_gpu_spent", 0.0)


@pytest.mark.parametrize("rows", [1, 3, 8, 32])
def test_the_plain_form_is_the_product(rows):
    torch.manual_seed(0)
    x, matrix, bias = torch.randn(rows, 37), torch.randn(19, 37).t(), torch.randn(19)
    right, with_bias = (product_bound(x, matrix, torch.float32, shift) for shift in (None, bias))
    with torch.no_grad():
        assert choose(rows, matrix) == "blas"
        assert_within(product("blas", x, matrix), *right)
        out = torch.empty(rows, 19)
        assert product("blas", x, matrix, bias, out) is out
        assert_within(out, *with_bias)
        parts = partial_product("blas", x, matrix, partial_buffer("blas", rows, matrix))
        assert parts.shape == (1, rows, 19)
        assert_within(parts[0], *right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(37, 19), (64, 64), (33, 5), (1, 1), (5, 130)])
def test_a_row_of_a_step_has_the_same_bits_whatever_the_other_rows_are(dtype, size):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((23, size[0]), size[::-1], size[1:]))
    exact = product_bound(x, weight.t(), dtype, bias)
    with torch.no_grad():
        whole = linear(x, weight, bias)
        assert_within(whole, *exact)
        assert_within(linear(x[:, None], weight, bias)[:, 0], *exact)
        if not cpu.runs(x):
            pytest.skip(f"no product of our own in {dtype}")
        for rows in (1, 2, 3, 4, 5, 7, 8, 22):
            for first in (0, 1, 23 - rows):
                assert torch.equal(linear(x[first : first + rows], weight, bias), whole[first : first + rows])
        wide = torch.zeros(23, size[0] + 3, dtype=dtype)
        wide[:, : size[0]] = x
        assert torch.equal(linear(wide[:, : size[0]], weight, bias), whole), "strides do not matter"


def test_what_takes_the_product_of_pytorch(monkeypatch):
    monkeypatch.setattr(cpu, "product", lambda *_: pytest.fail("this is no product of ours"))
    x, weight = torch.randn(2, 37), torch.randn(19, 37)
    linear(x, weight)  # gradients
    with torch.no_grad():
        with linears.prefill_products():
            assert torch.equal(linear(x, weight), F.linear(x, weight))
        with pytest.raises(pytest.fail.Exception, match="no product of ours"):
            linear(x, weight)
        many = torch.randn(linears.MOST_ON_CPU + 1, 37)
        assert torch.equal(linear(many, weight), F.linear(many, weight))
        assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
        monkeypatch.setattr(cpu, "library", lambda: None)
        assert torch.equal(linear(x, weight), F.linear(x, weight)), "a machine without a compiler"


def test_where_nothing_is_chosen():
    matrix = torch.randn(37, 19)
    assert choose(2, matrix) == "blas"  # gradients
    with torch.no_grad():
        assert choose(0, matrix) == "blas"
        assert choose(2, matrix.to("meta")) == "blas"
        module = torch.nn.Linear(37, 19)
        module.register_forward_hook(lambda module, args, out: out + 1)
        x = torch.randn(2, 37)
        assert torch.equal(apply_linear(module, x), F.linear(x, module.weight, module.bias) + 1)


@pytest.fixture
def matrix():
    return torch.randn(90, 1100).t()


def on_gpu(monkeypatch, seconds):
    """``times``: of the forms that were timed, in order. A form that ``seconds`` lacks takes longer than "blas"."""
    times = []

    def timer(form, x, matrix, partial):
        times.append(form)
        return seconds.get(form, 1.0 if form == "blas" else 2.0)

    monkeypatch.setattr(linears, "time_on_gpu", timer)
    monkeypatch.setattr(linears, "why_not_triton", lambda tensor: None)
    monkeypatch.setattr(few_rows, "why_not_triton", lambda tensor: "tested with the definition")
    monkeypatch.setattr(linears, "_GPU_LEAST", 0)
    return times


def forget(monkeypatch):
    """As a new process."""
    monkeypatch.setattr(linears, "_gpu_chosen", {})
    monkeypatch.setattr(linears, "_gpu_stored", {})


def names_of(rows, matrix):
    return [form.name for form in linears._candidates(rows, matrix)]


def gpu_choice(rows, matrix, partial=False):
    with torch.no_grad():
        return linears._choose_on_gpu(rows, matrix, partial)


def test_the_fastest_form_of_few_rows_is_chosen_and_kept(monkeypatch, matrix):
    names = names_of(4, matrix)
    times = on_gpu(monkeypatch, {names[0]: 0.9, names[1]: 0.5, names[2]: 0.7})
    assert gpu_choice(3, matrix) == names[1] and sorted(times) == sorted(["blas", "blas", *names])
    assert gpu_choice(4, matrix) == names[1] and len(times) == len(names) + 2, "3 rows are as 4"
    forget(monkeypatch)
    assert gpu_choice(3, matrix) == names[1] and len(times) == len(names) + 2, "stored"
    content = json.loads((cache_folder() / linears.FILE).read_text())
    assert content == {machine(): {"4 x (1100, 90) by columns, float32": names[1]}}
    for other in ((3, matrix, True), (5, matrix), (3, matrix[:, 1:]), (3, matrix.half())):
        before = len(times)
        gpu_choice(*other)
        assert len(times) > before, "another product"
    assert len(json.loads((cache_folder() / linears.FILE).read_text())[machine()]) == 5


def test_a_form_that_gains_nothing_is_not_chosen(monkeypatch, matrix):
    on_gpu(monkeypatch, {names_of(1, matrix)[0]: 0.99})
    assert gpu_choice(1, matrix) == "blas"


@pytest.mark.parametrize("wrong", ["zeros", "one output", "nan", "fails", "an error of its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_form_is_never_chosen(monkeypatch, matrix, wrong, dtype):
    matrix = matrix.to(dtype)
    names = names_of(4, matrix)
    on_gpu(monkeypatch, {names[0]: 0.1, names[1]: 0.5})

    def product(x, matrix, form, out, right=few_rows.few_rows_product):
        right(x, matrix, form, out)
        if form.name == names[0]:
            if wrong == "fails":
                raise RuntimeError
            if wrong == "an error of its own":
                raise type("OutOfResources", (Exception,), {})
            if wrong == "one output":
                out[:, 2, 17] += 3 * out[:, 2, 17].abs().max() / 90 + 1
            else:
                out.fill_(0.0 if wrong == "zeros" else torch.nan)
        return out

    monkeypatch.setattr(linears, "few_rows_product", product)
    assert gpu_choice(4, matrix) == names[1]


def test_where_no_form_of_few_rows_is_measured(monkeypatch, matrix):
    names = names_of(4, matrix)
    times = on_gpu(monkeypatch, dict.fromkeys(names, 0.5))
    assert gpu_choice(65, matrix) == gpu_choice(4, matrix.contiguous()) == "blas"
    assert gpu_choice(4, torch.zeros(92, 1100).t()) == "blas", "nothing to compare"
    assert gpu_choice(4, torch.full((91, 1100), torch.nan).t()) == "blas"
    for module, name, value in (
        (torch, "is_autocast_enabled", lambda device: device == "cuda"),
        (linears, "_GPU_LEAST", 90 * 1100 + 1),
        (linears, "why_not_triton", lambda tensor: "no GPU"),
        (linears, "_measuring_is_forbidden", lambda matrix: True),  # a graph is being captured
    ):
        with monkeypatch.context() as context:
            context.setattr(module, name, value)
            assert gpu_choice(4, matrix) == "blas", name
    assert not times
    assert gpu_choice(4, matrix) == names[0] and times, "and measured afterwards"
    with monkeypatch.context() as context:
        context.setattr(linears, "_measuring_is_forbidden", lambda matrix: True)
        forget(monkeypatch)
        assert gpu_choice(4, matrix) == names[0], "what is known is used in a graph too"


def test_too_little_memory_to_measure(monkeypatch, matrix):
    on_gpu(monkeypatch, {})

    def timer(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(linears, "time_on_gpu", timer)
    assert gpu_choice(4, matrix) == "blas" and not (cache_folder() / linears.FILE).exists()


def test_the_budget_of_measuring_on_a_gpu(monkeypatch, matrix):
    names = names_of(4, matrix)
    times = on_gpu(monkeypatch, dict.fromkeys(names, 0.5))
    assert gpu_choice(4, matrix) == names[0] and 0 < linears._gpu_spent < 10
    monkeypatch.setattr(linears, "_gpu_spent", linears.GPU_BUDGET)
    measured = len(times)
    assert gpu_choice(8, matrix) == "blas" and len(times) == measured
    assert len(json.loads((cache_folder() / linears.FILE).read_text())[machine()]) == 1, "a later process measures it"


@pytest.mark.parametrize(
    "stored",
    ["onednn", "rows 64x128", "vector 8x1024 /1, 4 warps, 1 stages", "rows 32x32 /3, 4 warps, 3 stages", "", 7],
)
def test_a_stored_form_that_is_no_candidate_is_ignored(monkeypatch, matrix, stored):
    on_gpu(monkeypatch, {names_of(4, matrix)[0]: 0.5})
    file = cache_folder() / linears.FILE
    file.parent.mkdir(parents=True)
    key = "4 x (1100, 90) by columns, float32"
    file.write_text(json.dumps({machine(): {key: stored}}))
    assert gpu_choice(4, matrix) == names_of(4, matrix)[0]
    assert json.loads(file.read_text())[machine()][key] == names_of(4, matrix)[0]


def test_measuring_draws_from_nobody_elses_random_numbers(monkeypatch, matrix):
    on_gpu(monkeypatch, {})
    before = torch.get_rng_state()
    gpu_choice(4, matrix)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 4096), (14336, 4096), (4096, 28672), (4096, 128256), (37, 9)])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64])
def test_candidates(rows, inputs, outputs, dtype):
    """A dozen at most, that can be told apart by their names and fit; enough programs for the multiprocessors of a
    large GPU."""
    forms = candidates(rows, inputs, outputs, dtype, 132)
    names = [form.name for form in forms]
    assert 3 <= len(forms) <= 12 and len(set(names)) == len(names)
    assert [parse_form(name) for name in names] == forms
    assert all(form.kernel == "rows" or rows == 1 for form in forms)
    for form in forms:
        assert form.parts == 1 or (form.parts - 1) * few_rows.part_length(inputs, form) < inputs, "no part is empty"
        assert form.parts == 1 or 32 * form.parts * rows <= inputs * dtype.itemsize, "the parts are small"
    if inputs * outputs > 1 << 20:
        assert min(form.parts * -(-outputs // form.outputs) for form in forms) > 0.9 * 132


@pytest.mark.parametrize(
    ("rows", "dtype"), [(0, torch.float32), (65, torch.float32), (4, torch.float64), (4, torch.int8)]
)
def test_no_candidates(rows, dtype):
    assert candidates(rows, 4096, 4096, dtype, 132) == []


def test_names_of_forms_are_strict():
    name = "rows 64x128 /2, 4 warps, 3 stages"
    assert parse_form(name) == FewRowsForm("rows", 64, 128, 2, 4, 3)
    changes = [("64", "064"), ("64", "65"), ("/2", "/0"), ("4 w", "0 w"), ("3 s", "0 s"), ("rows", "lines"), ("2", "٢")]
    for wrong in ("blas", "", name + " ", name.upper(), name + "\n", *(name.replace(*change) for change in changes)):
        assert parse_form(wrong) is None, wrong
        if wrong != "blas":
            with pytest.raises(ValueError, match="a product's form"):
                linears.splits_of(wrong)


def test_what_a_gpu_is_called(monkeypatch):
    facts = types.SimpleNamespace(name="NVIDIA H100", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    found = machine(torch.device("cuda", 0))
    assert found.startswith(f"NVIDIA H100, 132 multiprocessors, torch {torch.__version__}, triton ")
    assert machine(torch.device("cpu")) == machine() != found
