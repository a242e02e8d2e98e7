"""Where the kernels run, and memory that nobody wrote: NaN, or the largest integer."""

import pytest
import torch

from draftsmith.kernels import cpu


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
