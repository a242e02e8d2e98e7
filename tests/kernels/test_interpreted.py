"""Runs the tests of ``device/`` under Triton's interpreter, in a process of their own: there, and only there, the
kernels take CPU tensors. The interpreter is slow, so the longer files run in parts; the process imports but once."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent / "device"
PARTS = {
    "test_tree_attention_kernel.py": 4, "test_prefill_kernel.py": 2,
    "test_verify_kernel.py": 4, "test_sampling_kernel.py": 2, "test_engine_on_kernels.py": 3,
    "test_head_topk_kernel.py": 2, "test_shortlist_kernel.py": 2, "test_commit_kernel.py": 1,
    "test_accept_greedy_kernel.py": 1, "test_res_block_kernel.py": 1,
    "test_add_norm_kernel.py": 1, "test_rotate_write_kernel.py": 1, "test_gated_kernel.py": 1,
    "test_few_rows_kernel.py": 1, "test_pair_input_kernel.py": 1, "test_fused_layers.py": 2, "test_launches.py": 2,
}  # fmt: skip
RUNNER = """
import json, sys, pytest
for line in sys.stdin:
    print("exit code", int(pytest.main(json.loads(line))), flush=True)
"""


def test_no_file_is_left_out():
    assert {path.name for path in HERE.glob("test_*.py")} == set(PARTS)


@pytest.fixture(scope="module")
def pytest_main() -> Iterator[Callable[..., str]]:
    """``pytest_main(*words)`` → the output of pytest under the interpreter; its last line is ``exit code N``."""
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER], env={**os.environ, "TRITON_INTERPRET": "1"}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip

        def run(*words: object) -> str:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([str(word) for word in words]), file=process.stdin, flush=True)
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("exit code"):
                    break
            return "".join(lines)

        yield run


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' tests run on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels' tests run in this process")
@pytest.mark.parametrize(
    ("name", "part"), [(name, f"{part}/{parts}") for name, parts in PARTS.items() for part in range(parts)]
)
def test_interpreted(pytest_main, request, name, part):
    only = request.config.option.markexpr  # of make test: not slow
    out = pytest_main("-q", "-x", "-p", "no:cacheprovider", "-m", only, "--part", part, HERE / name)
    assert out.endswith("exit code 0\n"), out[-6000:]
    assert re.search(r"^\d+ passed", out, re.MULTILINE) and "skipped" not in out
