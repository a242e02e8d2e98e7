"""kernels/cpu.cpp against the definitions of its functions, each row of a result with the same bits whatever the other
rows are, and where keys lie."""

import os
import random
import subprocess
import sys

import pytest
import torch
from cases import depths, random_parents, walk
from torch.nn import functional as F

from draftsmith.inference.verify.tree import bitsets
from draftsmith.kernels import cpu
from draftsmith.kernels.add_norm import add_norm, add_norm_reference
from draftsmith.kernels.gated import CPU_ACTS, gated, gated_reference
from draftsmith.kernels.rotate_write import rotate_write, rotate_write_reference
from draftsmith.kernels.tree_attention import tree_attention_cached, tree_attention_cached_reference

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="there is no compiler")
DTYPES = [torch.float32, torch.bfloat16]
# In units in the last place of the largest number: sums in another order, in bfloat16 a rounding to the other side
ULPS = {torch.float32: 16, torch.bfloat16: 1}


def close(found, expected):
    """Within a few units in the last place of the largest number."""
    error = (found.double() - expected.double()).abs().max()
    bound = ULPS[found.dtype] * torch.finfo(found.dtype).eps * expected.double().abs().max()
    assert error <= bound and not found.isnan().any(), (error, bound)


def rows_alone(run, *parts):
    """Run each row alone: results as of all rows together."""
    return torch.cat([run(*(part[row : row + 1] for part in parts)) for row in range(len(parts[0]))])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 37, 576])
@pytest.mark.parametrize("ways", ["norm", "add", "bias", "after"])
def test_add_norm(dtype, width, ways):
    x, y, weight = torch.randn(7, width).to(dtype), torch.randn(1, 7, width).to(dtype), torch.randn(width)
    bias = torch.randn(width).to(dtype) if ways in ("bias", "after") else None
    options = {"bias": bias, "factor": 0.5, "after": torch.randn(width) if ways == "after" else None}
    if ways == "norm":
        y, options = None, {}
    sums, norms = (x.clone(), x.clone()), (torch.empty_like(x), torch.empty_like(x))
    add_norm(sums[0], y, weight, 1e-6, norms[0], **options)
    add_norm_reference(sums[1], y, weight, 1e-6, norms[1], **options)
    close(sums[0], sums[1])
    close(norms[0], norms[1])

    def alone(x, y=None):
        own, out = x.clone(), torch.empty_like(x)
        add_norm(own, None if y is None else y[None], weight, 1e-6, out, **options)
        return torch.cat((own, out), 1)

    found = rows_alone(alone, x) if y is None else rows_alone(alone, x, y[0])
    assert torch.equal(found, torch.cat((sums[0], norms[0]), 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [5, 48, 1536])
def test_gated(dtype, act, width):
    gate_up, bias = 3 * torch.randn(1, 5, 2 * width).to(dtype), torch.randn(2 * width).to(dtype)
    found, expected = torch.empty(5, width, dtype=dtype), torch.empty(5, width, dtype=dtype)
    for own in (None, bias):
        gated(gate_up, found, act, bias=own)
        gated_reference(gate_up, expected, act, bias=own)
        close(found, expected)

    def alone(row):
        out = torch.empty(1, width, dtype=dtype)
        gated(row[None], out, act, bias=bias)
        return out

    assert torch.equal(rows_alone(alone, gate_up[0]), found)
    gate_up[..., 0] = torch.tensor([-torch.inf, torch.inf, torch.nan, -1e4, 1e4]).to(dtype)
    gated(gate_up, found, "silu")
    gated_reference(gate_up, expected, "silu")
    assert torch.equal(found[:, 0].isfinite(), expected[:, 0].isfinite()) and found[2, 0].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_gelu(dtype):
    """With a gate of ones: at most twice the error of PyTorch's in the same precision."""
    gates = torch.cat([torch.linspace(-6, 6, 9601), torch.tensor([-90.0, -torch.inf, torch.nan, torch.inf])]).to(dtype)
    found, both = torch.empty_like(gates), torch.cat([gates, torch.ones_like(gates)])
    sizes = 1, len(gates), len(both), len(gates)
    cpu.function("gated", dtype)(both.data_ptr(), found.data_ptr(), None, CPU_ACTS.index("gelu"), *sizes)
    exact, plain = F.gelu(gates.double()), F.gelu(gates)
    ours, theirs = ((one - exact)[:-3].abs().max() for one in (found, plain))
    assert 0 < ours <= 2 * theirs < 0.02
    assert torch.equal(found[-3:].isnan(), exact[-3:].isnan()) and found[-1] == torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("width", [6, 64])
def test_rotate_write(dtype, normed, width):
    rows, count, heads, kv_heads = 2, 3, 4, 2
    qkv = torch.randn(1, rows * count, (heads + 2 * kv_heads) * width).to(dtype)
    table, positions = torch.randn(30, 2 * width).to(dtype), torch.tensor([[4, 9, 2], [7, 0, 29]])
    bias = torch.randn(qkv.shape[2]).to(dtype)
    options = {"bias": bias, "norm": torch.randn(heads + kv_heads, width) if normed else None, "eps": 1e-6}
    for slots in (torch.tensor([[3, 1, 6]]), torch.tensor([[3, 1, 6], [0, 5, 4]])):
        results = []
        for function in (rotate_write, rotate_write_reference):
            cache = torch.full((2, rows, kv_heads, 8, width), 9.0, dtype=dtype).permute(1, 3, 0, 2, 4)
            q = torch.empty(rows, count, heads, width, dtype=dtype)
            function(qkv, table, positions, slots, cache, q, **options)
            results.append((cache, q))
        for one, other in zip(*results, strict=True):
            close(one, other)
            assert torch.equal(one == 9.0, other == 9.0), "other slots"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 8), (4, 1, 40), (2, 1, 100)])
@pytest.mark.parametrize(("window", "softcap"), [(0, None), (0, 3.0), (9, None)])
def test_attention(dtype, heads, kv_heads, width, window, softcap):
    """Against the definition; and as plain decoding has it, where a node's path lies behind the prefix."""
    rows, nodes, lengths = 2, 70, torch.tensor([131, 5])
    parents = random_parents(nodes, 6, random.Random(1))
    ancestors, depth = bitsets(parents).expand(rows, -1, -1), depths(parents).expand(rows, -1)
    q = torch.randn(rows, nodes, heads, width).to(dtype).transpose(1, 2)
    k, v = (2 * torch.randn(2, rows, kv_heads, 210, width)).to(dtype)
    settings = (nodes, width**-0.5, depth, depth, window, softcap)
    found = tree_attention_cached(q, k, v, lengths, ancestors, *settings)
    exact = tree_attention_cached_reference(q.double(), k.double(), v.double(), lengths, ancestors, *settings).to(dtype)
    error, bound = (found.double() - exact.double()).abs().max(), torch.finfo(dtype).eps * exact.double().abs().max()
    assert error <= bound * (64 if dtype == torch.float32 else 1)
    for row, node in ((0, 0), (0, 69), (1, 37), (1, 69)):
        length, path = int(lengths[row]), walk(parents, node)[::-1]
        slots = torch.cat((torch.arange(length), length + torch.tensor(path)))
        its = slice(row, row + 1)
        own = q[its, :, node : node + 1], k[its, :, slots], v[its, :, slots]
        prefix, bit, none = torch.tensor([length + len(path) - 1]), torch.ones(1, 1, 1).long(), depth.new_zeros(1, 1)
        alone = tree_attention_cached(*own, prefix, bit, 1, width**-0.5, none, none, window, softcap)
        assert torch.equal(alone[0, :, 0], found[row, :, node]), "bits depend on the slots or on other nodes"


def test_attention_passes_nan_on_and_padding_sees_nothing():
    q, k, v = torch.randn(1, 2, 2, 16), torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16)
    ancestors, none = torch.tensor([[[1], [2]]]), torch.tensor([0])
    k[0, 0, 1, 3] = torch.nan
    out = tree_attention_cached(q, k, v, none, ancestors, 2, 1.0)
    assert not out[:, :, 0].isnan().any() and out[:, :, 1].isnan().all()
    out = tree_attention_cached(q, k, v, none, torch.tensor([[[1], [0]]]), 2, 1.0)
    assert torch.equal(out[:, :, 1], torch.zeros(1, 2, 16))


def test_bits_do_not_depend_on_the_number_of_threads():
    x, weight, before = torch.randn(9, 640), torch.randn(1001, 640), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpu.product(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_compiler_of_several_words(monkeypatch):
    """Such as ``ccache g++``."""
    asked = []
    monkeypatch.setenv("CXX", "ccache g++")
    monkeypatch.setattr(cpu, "_build", lambda command, folder: asked.append(command[:2]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cpu.library.__wrapped__()
    assert asked == [["ccache", "g++"]]


def test_a_cache_folder_that_cannot_be_written(tmp_path):
    """The library is then made for this process alone."""
    (tmp_path / "file").write_text("")
    code = "import torch; from draftsmith.kernels import cpu; assert cpu.runs(torch.ones(2, 3))\n"
    code += "assert torch.equal(cpu.product(torch.ones(1, 3), torch.ones(2, 3)), torch.full((1, 2), 3.0))"
    environment = {**os.environ, "DRAFTSMITH_CACHE": str(tmp_path / "file/below")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("why", ["no compiler", "it fails", "switched off"])
def test_without_a_library(why, tmp_path):
    """A machine whose compiler is missing or fails decodes by PyTorch's operations."""
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\nexit 1\n")
    fails.chmod(0o755)
    options = {"no compiler": {"PATH": str(tmp_path / "nothing")}, "it fails": {"CXX": str(fails)}}
    own = options.get(why, {"DRAFTSMITH_CPU_KERNELS": "0"})
    code = (
        "import torch; from draftsmith.kernels import cpu; x = torch.ones(2, 3); assert not cpu.runs(x)\n"
        "from draftsmith.kernels.linear import linear\n"
        "with torch.no_grad(): assert linear(x, torch.ones(4, 3)).eq(3).all()"
    )
    environment = {**os.environ, "CXX": "", "DRAFTSMITH_CACHE": str(tmp_path), **own}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not list(tmp_path.glob("*.so"))
