"""Every form of a product gives its result; the choice is measured once and kept in a file, which may be damaged. A
GPU's choice is tested with made-up times, on the definition of few rows' products."""

import copy
import json
import types

import pytest
import torch
from bounds import assert_within, product_bound
from torch.nn import functional as F

from draftsmith.common.files import cache_folder
from draftsmith.kernels import few_rows
from draftsmith.kernels import linear as linears
from draftsmith.kernels.few_rows import FewRowsForm, candidates, parse_form
from draftsmith.kernels.linear import (
    FORMS,
    add_product,
    apply_linear,
    choose,
    linear,
    partial_buffer,
    partial_product,
    product,
)
from draftsmith.kernels.measured import machine


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    """No measurements yet, in memory or on disk."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(linears, "_chosen", {})
    monkeypatch.setattr(linears, "_stored", None)
    monkeypatch.setattr(linears, "_spent", 0.0)
    monkeypatch.setattr(linears, "_gpu_chosen", {})
    monkeypatch.setattr(linears, "_gpu_stored", {})
    monkeypatch.setattr(linears, "_gpu_spent", 0.0)


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
    right, with_bias = (product_bound(x, matrix, torch.float32, shift) for shift in (None, bias))
    with torch.no_grad():
        assert choose(rows, matrix) == form
        assert_within(product(form, x, matrix), *right)
        out = torch.empty(rows, 19)
        assert product(form, x, matrix, bias, out) is out
        assert_within(out, *with_bias)
        assert product(form, x, matrix, None, out) is out
        assert_within(out, *right)
        parts = partial_product(form, x, matrix, partial_buffer(form, rows, matrix))
        assert parts.shape == (1, rows, 19)
        assert_within(parts[0], *right)
        total = torch.ones(rows, 19)
        assert add_product(form, total, x, matrix, 0.5) is total
        assert_within(total, *product_bound(x, matrix, torch.float32, torch.full((19,), 2.0), 0.5))
        found = linear(x.view(rows, 1, 37), matrix.t(), bias)
        assert found.shape == (rows, 1, 19)
        assert_within(found[:, 0], *with_bias)


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
        for _ in range(400):
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
            for _ in range(2):
                assert_within(apply_linear(module, x), *product_bound(x, module.weight.t(), torch.float32, module.bias))
            assert len(packs) == number
        copy.deepcopy(module)  # a packed tensor cannot be copied
        module.requires_grad_(True)
        apply_linear(module, x)
    assert len(packs) == 3, "a weight that trains is not packed"


@pytest.mark.skipif(not linears.CAN_PACK, reason="this PyTorch is built without oneDNN")
def test_packed_is_measured_among_the_forms(monkeypatch):
    def slow(x, matrix):
        for _ in range(400):
            torch.mm(x, matrix)

    monkeypatch.setattr(linears, "FORMS", {"blas": slow})
    assert set(linears._measure(torch.randn(64, 256), True).values()) == {"packed"}
    assert set(linears._measure(torch.randn(64, 256), False).values()) == {"blas"}


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


def test_the_fastest_form_of_few_rows_is_chosen_and_kept(monkeypatch):
    matrix = torch.randn(90, 1100).t()
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


def test_a_form_that_gains_nothing_is_not_chosen(monkeypatch):
    matrix = torch.randn(90, 1100).t()
    on_gpu(monkeypatch, {names_of(1, matrix)[0]: 0.99})
    assert gpu_choice(1, matrix) == "blas"


@pytest.mark.parametrize("wrong", ["zeros", "one output", "nan", "fails", "an error of its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_form_is_never_chosen(monkeypatch, wrong, dtype):
    matrix = torch.randn(90, 1100).t().to(dtype)
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


def test_where_no_form_of_few_rows_is_measured(monkeypatch):
    matrix = torch.randn(90, 1100).t()
    names = names_of(4, matrix)
    times = on_gpu(monkeypatch, dict.fromkeys(names, 0.5))
    assert gpu_choice(65, matrix) == gpu_choice(4, matrix.contiguous()) == "blas"
    assert gpu_choice(4, torch.zeros(92, 1100).t()) == "blas", "nothing to compare"
    assert gpu_choice(4, torch.full((91, 1100), torch.nan).t()) == "blas"
    with monkeypatch.context() as context:
        context.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert gpu_choice(4, matrix) == "blas"
    with monkeypatch.context() as context:
        context.setattr(linears, "_GPU_LEAST", 90 * 1100 + 1)
        assert gpu_choice(4, matrix) == "blas"
    with monkeypatch.context() as context:
        context.setattr(linears, "why_not_triton", lambda tensor: "no GPU")
        assert gpu_choice(4, matrix) == "blas"
    with monkeypatch.context() as context:
        context.setattr(linears, "_measuring_is_forbidden", lambda matrix: True)
        assert gpu_choice(4, matrix) == "blas", "a graph is being captured"
    assert not times
    assert gpu_choice(4, matrix) == names[0] and times, "and measured afterwards"
    with monkeypatch.context() as context:
        context.setattr(linears, "_measuring_is_forbidden", lambda matrix: True)
        forget(monkeypatch)
        assert gpu_choice(4, matrix) == names[0], "what is known is used in a graph too"


def test_too_little_memory_to_measure(monkeypatch):
    matrix = torch.randn(90, 1100).t()
    on_gpu(monkeypatch, {})

    def timer(form, x, matrix, partial):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(linears, "time_on_gpu", timer)
    assert gpu_choice(4, matrix) == "blas" and not (cache_folder() / linears.FILE).exists()


def test_the_budget_of_measuring_on_a_gpu(monkeypatch):
    matrix = torch.randn(90, 1100).t()
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
def test_a_stored_form_that_is_no_candidate_is_ignored(monkeypatch, stored):
    matrix = torch.randn(90, 1100).t()
    on_gpu(monkeypatch, {names_of(4, matrix)[0]: 0.5})
    file = cache_folder() / linears.FILE
    file.parent.mkdir(parents=True)
    key = "4 x (1100, 90) by columns, float32"
    file.write_text(json.dumps({machine(): {key: stored}}))
    assert gpu_choice(4, matrix) == names_of(4, matrix)[0]
    assert json.loads(file.read_text())[machine()][key] == names_of(4, matrix)[0]


def test_measuring_draws_from_nobody_elses_random_numbers(monkeypatch):
    matrix = torch.randn(90, 1100).t()
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
    for wrong in (
        "blas", "", name + " ", name.upper(), name.replace("64", "064"), name.replace("64", "65"),
        name.replace("/2", "/0"), name.replace("4 w", "0 w"), name.replace("3 s", "0 s"), name.replace("rows", "lines"),
        name.replace("2", "٢"), name + "\n",
    ):  # fmt: skip
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
