"""The tests in ``device/`` launch Triton kernels: on a GPU, or under TRITON_INTERPRET=1, which has to be set before
anything imports triton. Without either they are collected only in the subprocess that test_interpreted.py starts, but
for those that hold of PyTorch's path as well."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
def language_patched_once() -> Iterator[None]:
    """Triton's interpreter replaces the functions of its language for each launch, and once more, without effect, for
    each call of a device function in it, which took a third of these tests' time."""
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> Any:
        modules = (interpreter.tl, interpreter.tl.core)
        seen = {module.__name__ for module in modules if any(module is value for value in fn.__globals__.values())}
        if seen <= patched:  # restored at the end of the launch
            return None
        scope, outermost = patch_language(fn), not patched
        patched.update(seen)
        if outermost:
            restore = scope.restore

            def restored() -> None:
                patched.clear()
                restore()

            scope.restore = restored
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield


if INTERPRETING:

    @pytest.fixture(scope="session", autouse=True)
    def quick_interpreter() -> Iterator[None]:
        with language_patched_once():
            yield
