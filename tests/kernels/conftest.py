"""The tests in ``device/`` launch Triton kernels: on a GPU, or under TRITON_INTERPRET=1, which has to be set before
anything imports triton. Without either they are collected only in the subprocess that test_interpreted.py starts, but
for those that hold of PyTorch's path as well."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # cases.py

from draftsmith.kernels.backend import INTERPRETING

PLAIN_TOO = {"test_shortlist_kernel.py"}
collect_ignore = [f"device/{file.name}" for file in (Path(__file__).parent / "device").glob("test_*.py")]
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = []
collect_ignore = [name for name in collect_ignore if name.removeprefix("device/") not in PLAIN_TOO]


@contextmanager
def interpreted_quickly() -> Iterator[None]:
    """Triton's interpreter without what it does again and again to the same end, which took most of these tests' time.

    It replaces the functions of its language for each launch and each call of a device function: here once. It computes
    each int32 sum, difference and product a second time in 64 bits, for an assertion that only its debug mode makes:
    here not. It writes down NumPy's dtype of each of its own anew for each value: here once.
    """
    from triton.runtime import interpreter

    language, patch_language = (interpreter.tl, interpreter.tl.core), interpreter._patch_lang
    scopes: list[Any] = [SimpleNamespace(restore=lambda: None)]
    patched, find_dtype, dtypes = set(), interpreter._get_np_dtype, {}

    def patch_once(fn: Any) -> Any:
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            if any(value is module for value in fn.__globals__.values() for module in language):
                scopes.append(patch_language(fn))
        return scopes[0]

    def find_once(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find_dtype(dtype)
        return dtypes[dtype.name]

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", find_once)
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield
    for scope in reversed(scopes):
        scope.restore()


if INTERPRETING:

    @pytest.fixture(scope="session", autouse=True)
    def quick_interpreter() -> Iterator[None]:
        with interpreted_quickly():
            yield
