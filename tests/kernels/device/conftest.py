"""Where the kernels run, and memory that nobody wrote: NaN, or the largest integer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draftsmith.kernels.backend import INTERPRETING


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


@pytest.fixture(autouse=True)
def poison(device):
    """``torch.empty`` and its kin hand out NaN, so that an element a kernel forgets shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False
    assert torch.empty(3, 4, device=device).transpose(0, 1).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
