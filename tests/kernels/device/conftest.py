"""Where the kernels run, and memory that nobody wrote: NaN, or the largest integer."""

import copy

import pytest
import torch

from draftsmith.kernels import cpu
from draftsmith.kernels.few_rows import candidates
from draftsmith.models import lean
from draftsmith.models.target import Target


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def no_kernels_of_a_cpu(monkeypatch):
    """Triton's kernels are compared with PyTorch's operations, in the interpreter too."""
    monkeypatch.setattr(cpu, "runs", lambda tensor: False)


@pytest.fixture(autouse=True)
def poison(device):
    """``torch.empty`` and its kin hand out NaN, so that an element a kernel forgets shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.matmul.allow_tf32 = False
    assert torch.empty(3, 4, device=device).transpose(0, 1).new_empty(5).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def as_users_run_it(poison):
    """Deterministic algorithms are other ones, which a graph may not be able to hold, and poisoning fills tensors."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on(device):
    """``on(target, dtype)`` → its copy where the kernels run."""

    def copied(target, dtype=torch.float32):
        return Target(copy.deepcopy(target.model).to(device, dtype), None, target.name, "")

    return copied


@pytest.fixture
def folded(monkeypatch):
    """Products in forms that do what stands around them, as measuring chooses them where they are faster."""

    def folding(rows, matrix, partial=False):
        forms = candidates(rows, *matrix.shape, matrix.dtype, 1) if partial else []
        return next((form.name for form in forms if form.parts == 1), "blas")

    monkeypatch.setattr(lean, "choose", folding)
