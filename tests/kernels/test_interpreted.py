"""Runs the tests of ``device/`` under Triton's interpreter, in a process of their own: there, and only there, the
kernels take CPU tensors. One process runs all files, so that it imports but once."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent / "device"
LAUNCHES = "test_launches.py"  # counts
LONG = ["test_same_bits.py", "test_engine_on_kernels.py", "test_fused_layers.py", "test_prefill_kernel.py"]
FILES = [*sorted({path.name for path in HERE.glob("test_*.py")} - {LAUNCHES, *LONG}), "../test_strides.py"]
RUNNER = """
import json, sys, pytest
for line in sys.stdin:
    print("exit code", int(pytest.main(json.loads(line))), flush=True)
"""


def test_they_are_there():
    assert len(FILES) > 10


@pytest.fixture(scope="module")
def pytest_main() -> Iterator[Callable[..., str]]:
    """``pytest_main(*words)`` → the output of pytest under the interpreter; its last line is ``exit code N``."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RUNNER], env=environment, **pipes) as process:

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


def why_not() -> str:
    """Why Triton's interpreter does not run here; empty if it does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    old = importlib.metadata.version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0"
    return "the interpreter of Triton 3.6 needs numpy < 2.4" if old else ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels' tests run on the GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the kernels' tests run in this process")
@pytest.mark.parametrize(
    "name", [*FILES, *(pytest.param(name, marks=pytest.mark.measurement) for name in [LAUNCHES, *LONG])]
)
def test_interpreted(pytest_main, request, name):
    only = "not slow" if "not slow" in request.config.option.markexpr else ""
    out = pytest_main("-q", "-x", "-p", "no:cacheprovider", "-m", only, HERE / name)
    assert out.endswith("exit code 0\n"), out[-6000:]
    assert re.search(r"^\d+ passed", out, re.MULTILINE) and "skipped" not in out
