"""Every kernel, with the block sizes that its launcher picks on a GPU of 132 multiprocessors, compiles for Hopper, fits
its shared memory. No GPU is needed: a launch compiles for sm_90 in place of running. What `make kernel-report`
compiles, which CI runs too, is not repeated here."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch

from draftsmith.benchmarks.intercept import Launch, intercepted
from draftsmith.benchmarks.kernel_resources import (
    MAIN,
    OTHERS,
    SHARED_MEMORY,
    WIDE,
    acceptance,
    attention,
    narrow_products,
    products,
)
from draftsmith.kernels.backend import INTERPRETING, triton

COMPILED_ELSEWHERE = "kernels are compiled only where Triton does not interpret"
pytestmark = [pytest.mark.measurement, pytest.mark.skipif(triton is None or INTERPRETING, reason=COMPILED_ELSEWHERE)]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def verify(dtype: torch.dtype, most: int, with_q: bool, reduced: int = 0, uses=(True, True, True)) -> None:
    from draftsmith.kernels.multi_step import verify_logits

    logits, child = torch.zeros(1, 4, 4096, dtype=dtype), torch.zeros(1, 4, most, dtype=torch.int64)
    q, ids = torch.zeros(1, 4, 4096) if with_q else None, None
    if reduced:
        q, ids = torch.zeros(1, 4, reduced), torch.arange(reduced).expand(1, 4, -1)
    uniforms, numbers = torch.zeros(1, 4, most), torch.zeros(1, 4, dtype=torch.int64)
    of_row, top_k = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    tree = numbers, child, child.to(torch.int8), child, q
    verify_logits(logits, of_row, top_k, of_row, of_row, *tree, uniforms, of_row, 3, ids, uses)


def coupled(dtype: torch.dtype, reduced: bool) -> None:
    from draftsmith.kernels.coupled import coupled_topk

    of_row, numbers, positions = torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    logits, ids = torch.zeros(2, 4, 4096, dtype=dtype), torch.arange(4096) if reduced else None
    coupled_topk(logits, of_row, numbers, of_row, of_row, numbers, positions, 8, ids)


def head_topk(dtype: torch.dtype, rows: int) -> None:
    from draftsmith.kernels.head_topk import head_topk

    head_topk(torch.zeros(rows, 256, dtype=dtype), torch.zeros(16384, 256, dtype=dtype), 10)  # merged in two rounds


def res_block(dtype: torch.dtype, heads: int, rows: int, width: int) -> None:
    from draftsmith.kernels.res_block import res_block

    weight, bias = torch.zeros(heads, width, width, dtype=dtype), torch.zeros(heads, 1, width, dtype=dtype)
    with torch.no_grad():
        res_block(torch.zeros(rows, width, dtype=dtype).expand(heads, -1, -1), weight, bias)


def shortlist(dtype: torch.dtype, nodes: int) -> None:
    from draftsmith.kernels.shortlist_linear import shortlist_logits, shortlist_topk

    features, weight = torch.zeros(2, nodes, 256, dtype=dtype), torch.zeros(4096, 256, dtype=dtype)
    rows = torch.arange(1000).expand(2, -1)
    shortlist_logits(features, weight, rows)
    shortlist_topk(features, weight, rows, torch.arange(4096), 10, log_q=True)


def add_norm(dtype: torch.dtype, width: int, parts: int, bare: bool = False) -> None:
    """``bare``: Llama's residual, without a bias and without a norm of the branch."""
    from draftsmith.kernels.add_norm import add_norm

    x, y = torch.zeros(4, width, dtype=dtype), torch.zeros(parts, 4, width, dtype=dtype if parts == 1 else torch.float)
    weight, wide = torch.zeros(width, dtype=dtype), torch.zeros(width)
    add_norm(x, None, weight, 1e-6, x)
    if bare:
        add_norm(x, y, weight, 1e-6, x)
    else:
        add_norm(x, y, wide, 1e-6, x, bias=weight, after=wide, factor=0.5)


def rotate_write(dtype: torch.dtype, width: int, group: int, parts: int, bare: bool = False) -> None:
    """Two key/value heads of ``group`` query heads each. ``bare``: without a bias and without norms of q and k."""
    from draftsmith.kernels.rotate_write import rotate_write

    heads, numbers = 2 * group, torch.zeros(2, 5, dtype=torch.int64)
    qkv = torch.zeros(parts, 10, (heads + 4) * width, dtype=dtype if parts == 1 else torch.float)
    cache = torch.zeros(2, 2, 2, 64, width, dtype=dtype).permute(1, 3, 0, 2, 4)
    table, q_out = torch.zeros(64, 2 * width, dtype=dtype), torch.zeros(2, 5, heads, width, dtype=dtype)
    bias, norm = (None, None) if bare else (qkv[0, 0].to(dtype), torch.zeros(heads + 2, width))
    rotate_write(qkv, table, numbers, numbers, cache, q_out, bias=bias, norm=norm)


def gated(dtype: torch.dtype, width: int, parts: int, act: str, bare: bool = False) -> None:
    from draftsmith.kernels.gated import gated

    gate_up = torch.zeros(parts, 4, 2 * width, dtype=dtype if parts == 1 else torch.float)
    gated(gate_up, torch.zeros(4, width, dtype=dtype), act, bias=None if bare else gate_up[0, 0].to(dtype))


CASES: dict[str, Callable[[], None]] = {}  # beside MAIN and OTHERS, which are all in bfloat16 but one
FP32, FP16, BF16 = DTYPES.values()
for name, dtype in (("fp32", FP32), ("fp16", FP16)):
    CASES[f"attention {name} D=64"] = partial(attention, 64, 2, 4, 64, 8, dtype, slots=128)
    CASES[f"head_topk {name} M=5"] = partial(head_topk, dtype, 5)
    CASES[f"acceptance {name} N=64"] = partial(acceptance, 64, dtype)
    CASES[f"res_block {name} d=64 P=20"] = partial(res_block, dtype, 1, 20, 64)
    CASES[f"shortlist {name} n=5"] = partial(shortlist, dtype, 5)
    CASES[f"coupled {name}"] = partial(coupled, dtype, name == "fp16")
    CASES[f"verify {name} K=4, with q"] = partial(verify, dtype, 4, True)
    CASES[f"add_norm {name} d=4096 S=1"] = partial(add_norm, dtype, 4096, 1, True)
    CASES[f"gated {name} gelu_tanh"] = partial(gated, dtype, 1408, 1, "gelu_tanh")
    CASES[f"rotate_write {name} D=128 S=1, group 4"] = partial(rotate_write, dtype, 128, 4, 1, True)
for name, dtype in (("fp32", FP32), ("bf16", BF16)):
    for group in (1, 7):
        CASES[f"attention {name} D=128 Q=16, group {group}"] = partial(attention, 16, 2, 4, 128, 2 * group, dtype)
    CASES[f"add_norm {name} d=4096 S=4"] = partial(add_norm, dtype, 4096, 4)
    CASES[f"gated {name} silu S=4"] = partial(gated, dtype, 1408, 4, "silu")
    CASES[f"rotate_write {name} D=80 S=4, group 1"] = partial(rotate_write, dtype, 80, 1, 4)
CASES["attention fp32 D=256"] = partial(attention, 64, 2, 4, 256, 8, FP32, slots=128)
CASES["attention bf16 D=64 Q=32"] = partial(attention, 32, 2, 4, 64, 8, BF16)
for rows in (1, 64):
    CASES[f"products fp32 M={rows}"] = partial(products, rows, FP32, rows > 1)
    CASES[f"res_block fp32 d=1024 P={rows}"] = partial(res_block, FP32, 4, rows, 1024)
CASES["products fp16 M=16"] = partial(products, 16, FP16, True)
CASES["verify fp32 K=10"] = partial(verify, FP32, 10, False)
CASES["gated bf16 gelu_tanh"] = partial(gated, BF16, 1408, 1, "gelu_tanh")
CASES["head_topk bf16 M=5"] = partial(head_topk, BF16, 5)
CASES["res_block bf16 d=64 P=20"] = partial(res_block, BF16, 1, 20, 64)
CASES["rotate_write bf16 D=64, group 7"] = partial(rotate_write, BF16, 64, 7, 1)
CASES["add_norm bf16 d=16384 S=4"] = partial(add_norm, BF16, 16384, 4)
CASES["acceptance bf16 N=512"] = partial(acceptance, 512)
CASES["shortlist bf16 n=160"] = partial(shortlist, BF16, 160)
for most in (0, 63):
    CASES[f"verify bf16 K={most}, no parameters"] = partial(verify, BF16, most, False, 0, (False,) * 3)
CASES["verify bf16 K=4, a reduced vocabulary"] = partial(verify, BF16, 4, True, 1000)


KERNELS = set(
    "tree_attention merge_items plan commit acceptances distribution walk draw philox block_topk merge_topk coupled "
    "shortlist tokens accept_greedy advance res_block add_norm pair_input rotate_write gated "
    "vector few_rows sum_parts grow select before path soft_loss".split()
)


def test_every_kernel_compiles_and_fits():
    """Launches of one key are compiled once; those of MAIN and OTHERS in `make kernel-report`, with more checks."""
    known: set[str] = set()
    names: set[str] = set()
    for case, call in {**MAIN, **OTHERS, **CASES}.items():
        launches: list[Launch] = []
        with intercepted(launches.append):
            call()
        names |= {launch.name for launch in launches}
        for launch in launches if case in CASES else ():
            if launch.key not in known:
                done = launch.compiled()
                assert done.asm["cubin"] and done.metadata.shared <= SHARED_MEMORY, (case, launch.name)
                assert launch.name not in WIDE or not narrow_products(done.asm["ttir"]), (case, launch.name)
        known |= {launch.key for launch in launches}
    assert names == {f"_{name}_kernel" for name in KERNELS}


def test_programmatic_dependent_launch(monkeypatch):
    """A switch: products then let the next kernel start, fetch weights, and wait for the kernel before."""
    from draftsmith.kernels import few_rows

    x, matrix = torch.zeros(1, 256, dtype=BF16), torch.zeros(64, 256, dtype=BF16).t()
    forms = few_rows.FewRowsForm("vector", 8, 256, 1, 4, 1), few_rows.FewRowsForm("rows", 32, 64, 1, 4, 3)
    found = []
    for switched in (False, True):
        if switched:
            monkeypatch.setenv(few_rows.PDL, "1")
        launches: list[Launch] = []
        with intercepted(launches.append):
            for form in forms:
                few_rows.few_rows_product(x, matrix, form)
        found += [(switched, launch.compiled()) for launch in launches]
    assert len(found) == 4
    for switched, done in found:
        order = re.findall(r"griddepcontrol\.\w+|prefetch|ld\.global", done.asm["ptx"]) + ["ld.global"]
        assert done.metadata.launch_pdl is switched
        before = order[: order.index("ld.global")] if "ld.global" in order else order
        wanted = ["griddepcontrol.launch_dependents", "prefetch", "griddepcontrol.wait"] if switched else []
        assert sorted({*before}) == sorted(wanted) and before[-1:] == wanted[-1:]
