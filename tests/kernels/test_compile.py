"""Every kernel, with the block sizes its launcher picks, compiles for Hopper and fits its shared memory; no GPU needed.

The compiling happens in a process without TRITON_INTERPRET, which runs this file: the public functions are called on
CPU tensors, and a launch compiles for sm_90 in place of running.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on sm_90
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def attention(dtype: torch.dtype, width: int, queries: int, splits: int, group: int = 4, **options) -> None:
    """Two key/value heads of ``group`` query heads each; 1 is Llama-2's, whose tiles have a row for each query."""
    from draftsmith.kernels.tree_attention import tree_attention_cached

    q, cache = torch.zeros(1, 2 * group, queries, width, dtype=dtype), torch.zeros(2, 1, 2, 2048, width, dtype=dtype)
    ancestors, depth = torch.zeros(1, queries, 1, dtype=torch.int64), torch.zeros(1, queries, dtype=torch.int32)
    lengths = torch.zeros(1, dtype=torch.int64)
    tree_attention_cached(q, *cache, lengths, ancestors, queries, 0.1, depth, depth, splits=splits, **options)


def commit(dtype: torch.dtype, width: int) -> None:
    from draftsmith.kernels.commit import commit

    numbers = torch.zeros(2, dtype=torch.int64)
    commit(torch.zeros(2, 2, 2, 8, 64, width, dtype=dtype), numbers, torch.zeros(2, 6, dtype=torch.int64), numbers)


def verify(most: int, with_q: bool, reduced: int = 0) -> None:
    from draftsmith.kernels.verify import verify_sample

    p, child = torch.zeros(1, 4, 4096), torch.zeros(1, 4, most, dtype=torch.int64)
    q, ids = p if with_q else None, None
    if reduced:
        q, ids = torch.zeros(1, 4, reduced), torch.arange(reduced).expand(1, 4, -1)
    uniforms, numbers = torch.zeros(1, 4, most), torch.zeros(1, 4, dtype=torch.int64)
    verify_sample(p, numbers, child, child.to(torch.int8), child, q, uniforms, uniforms[:, 0, 0], 3, ids=ids)


def head_topk(dtype: torch.dtype, rows: int) -> None:
    from draftsmith.kernels.head_topk import head_topk

    head_topk(torch.zeros(rows, 256, dtype=dtype), torch.zeros(4096, 256, dtype=dtype), 10)


def shortlist(dtype: torch.dtype, nodes: int) -> None:
    from draftsmith.kernels.shortlist_linear import shortlist_logits, shortlist_topk

    features, weight = torch.zeros(2, nodes, 256, dtype=dtype), torch.zeros(4096, 256, dtype=dtype)
    rows = torch.arange(1000).expand(2, -1)
    shortlist_logits(features, weight, rows)
    shortlist_topk(features, weight, rows, torch.arange(4096), 10)


CASES: dict[str, Callable[[], None]] = {}
for name, dtype in DTYPES.items():
    for width, queries, splits in ((64, 64, 1), (128, 64, 4), (256, 64, 1), (128, 1, 4)):
        CASES[f"attention {name} D={width} Q={queries} splits={splits}"] = partial(
            attention, dtype, width, queries, splits
        )
    for queries, splits in ((64, 4), (16, 1)):
        CASES[f"attention {name} D=128 Q={queries} splits={splits}, group 1"] = partial(
            attention, dtype, 128, queries, splits, 1
        )
    CASES[f"head_topk {name} M=5"] = partial(head_topk, dtype, 5)
    CASES[f"shortlist {name} n=5"] = partial(shortlist, dtype, 5)
    CASES[f"commit {name}"] = partial(commit, dtype, 128)
CASES["attention bf16, window, soft cap"] = partial(attention, torch.bfloat16, 128, 64, 4, window=512, softcap=30.0)
CASES["head_topk bf16 M=160"] = partial(head_topk, torch.bfloat16, 160)
CASES["shortlist bf16 n=160"] = partial(shortlist, torch.bfloat16, 160)
for most, with_q in ((4, True), (10, False), (63, False)):
    CASES[f"verify K={most}, with q: {with_q}"] = partial(verify, most, with_q)
CASES["verify K=4, a reduced vocabulary"] = partial(verify, 4, True, 1000)


def compile_all() -> None:
    """Print one line of JSON a launch: the case, the kernel, its shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, int]] = []

    def compile_launch(kernel, grid):
        def launch(*arguments, num_warps=4, num_stages=3, **named):
            values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
            signature, constants, attributes = {}, {}, {}
            for index, parameter in enumerate(kernel.params):
                value = values[parameter.name]
                if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
                    signature[parameter.name], constants[parameter.name] = "constexpr", value
                    continue
                if isinstance(value, torch.Tensor):
                    names = {torch.int64: "i64", torch.int32: "i32", torch.int8: "i8"}
                    names |= {dtype: name for name, dtype in DTYPES.items()}
                    signature[parameter.name] = f"*{names[value.dtype]}"
                else:
                    signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
                    attributes[(index,)] = [["tt.divisibility", 16]]
            source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert done.asm["cubin"]
            launched.append((kernel.fn.__name__, done.metadata.shared))

        return launch

    JITFunction.__getitem__ = compile_launch
    for name in ("tree_attention", "commit", "verify", "head_topk", "shortlist_linear"):
        importlib.import_module(f"draftsmith.kernels.{name}").why_not_triton = lambda tensor: None
    for case, launch in CASES.items():
        launched.clear()
        launch()
        print(*(json.dumps([case, *one]) for one in launched), sep="\n", flush=True)


@pytest.fixture(scope="module")
def compiled() -> list[tuple[str, str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_compiles_and_fits(compiled):
    cases, kernels = {case for case, _, _ in compiled}, {kernel for _, kernel, _ in compiled}
    assert cases == set(CASES)
    assert sum("group 1" in case and kernel == "_tree_attention_kernel" for case, kernel, _ in compiled) == 6
    assert kernels == {
        "_tree_attention_kernel", "_merge_splits_kernel", "_commit_kernel", "_acceptances_kernel",
        "_one_hot_acceptances_kernel", "_walk_and_draw_kernel", "_block_topk_kernel", "_merge_topk_kernel",
        "_shortlist_logits_kernel", "_shortlist_topk_kernel", "_tokens_kernel",
    }  # fmt: skip
    assert max(shared for _, _, shared in compiled) > 48 * 1024  # it is being read
    assert not [launch for launch in compiled if launch[2] > SHARED_MEMORY]


if __name__ == "__main__":
    compile_all()
