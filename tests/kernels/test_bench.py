"""The timing of kernels/bench.py: bounded however slow a call is."""

import time

import pytest
import torch

from draftsmith.kernels import bench


def slow(seconds):
    """A call that takes so long, on the device where there is one."""
    if torch.cuda.is_available():
        cycles = int(seconds * 1.5e9)  # about as long
        return lambda: torch.cuda._sleep(cycles)
    return lambda: time.sleep(seconds)


@pytest.mark.parametrize(("calls", "most"), [(1, 1.0), (4, 2.5)])
def test_slow_calls_are_repeated_less_often(calls, most):
    began = time.perf_counter()
    median, low, high = bench.seconds([slow(0.05)] * calls, limit=0.3)
    assert time.perf_counter() - began < most, "thirty repeats of ten rounds would take many seconds"
    assert 0.02 < low <= median <= high < 0.2, "the time of one call"


def test_quick_calls_are_repeated_as_asked():
    done = []
    x = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
    bench.seconds([lambda: done.append(x.add_(1))], repeats=20, limit=60.0)
    if not torch.cuda.is_available():  # a graph calls its function only while it is captured
        assert len(done) == 1 + 20 + 3


def test_what_the_device_can_do():
    began = time.perf_counter()
    best = bench.measure_device(torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
    assert time.perf_counter() - began < 30
    assert 1e6 < best.copy_bandwidth < 1e14 and 1e6 < best.matmul_rate < 1e16
