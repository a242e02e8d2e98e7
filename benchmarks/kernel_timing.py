"""Times of kernels: calls in turn over data that is not in the cache, as rows of a table beside the device's limits."""

import argparse
import platform
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftsmith.benchmarks.floors import Device, Work
from draftsmith.common.command import no_collection
from draftsmith.common.files import write_json
from draftsmith.kernels.backend import triton

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COLD_BYTES = 256 << 20  # of data that a graph reads in turn, beyond any L2 cache
LIMIT = 2.0 if torch.cuda.is_available() else 0.1  # seconds of timing for one row, after compiling


@dataclass
class Row:
    """One implementation of one operation. Times in microseconds.

    moved, operations: bytes and multiply-adds · 2 that one call needs at least.
    of_bound: the lower bound of the time over the median.
    difference: largest absolute difference from the plain result; for verify the share of rows that differ.
    """

    kernel: str
    way: str
    shape: dict[str, int]
    median_us: float
    low_us: float
    high_us: float
    moved: float
    operations: float
    of_bound: float
    difference: float


Calls = Sequence[Callable[[], Any]]
Ways = dict[str, Callable[[Tensor], Any]]  # by name: of a copy of the data → what is compared


def largest(difference: Tensor) -> float:
    """The largest absolute value."""
    return float(difference.abs().max())


def seconds(calls: Calls, repeats: int = 30, limit: float = LIMIT) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile of the seconds of one call. On a GPU all calls are captured in one CUDA graph.

    Args:
        calls: run one after the other.
        repeats: of all calls; fewer, at least three, where they would take longer than ``limit`` seconds.
    """
    take, once = (_capture if torch.cuda.is_available() else _run)(calls, repeats, limit)
    times = [take() / len(calls) for _ in range(max(4, min(repeats + 3, int(limit / once))))]
    return quantiles(times[min(3, len(times) - 3) :])  # the first ones warm up


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile."""
    at = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    median, low, high = torch.tensor(times, dtype=torch.float64).quantile(at).tolist()
    return median, low, high


def _run(calls: Calls, repeats: int, limit: float) -> tuple[Callable[[], float], float]:
    """On the CPU: a function that runs all calls and returns their seconds, and how long it takes."""

    def take() -> float:
        began = timeit.default_timer()
        for call in calls:
            call()
        return timeit.default_timer() - began

    return take, take()


def _capture(calls: Calls, repeats: int, limit: float) -> tuple[Callable[[], float], float]:
    """On a GPU: a function that replays a graph of the calls and returns the seconds of all calls, and how long it
    takes."""

    def elapsed(run: Callable[[], None]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def run_all() -> None:
        for call in calls:
            call()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and warm up outside the capture
        run_all()
        once = elapsed(run_all)
    torch.cuda.current_stream().wait_stream(stream)
    rounds = max(1, min(10 // len(calls), int(limit / once / (repeats + 3))))
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):
        for _ in range(rounds):
            run_all()
    return lambda: elapsed(graph.replay) / rounds, once * rounds


def measure_device(dtype: torch.dtype, device: str = "cuda") -> Device:
    """The bandwidth over 1 GiB and the rate of a product of 8192 × 8192 matrices (on a CPU far smaller ones), each way
    in about :data:`LIMIT` seconds at most. The bandwidth is that of the fastest way: in a CUDA graph a plain copy moves
    2.8 TB/s on an H200, where steps of decoding read 3.8 (2026-11-26)."""
    numbers, width = (1 << 28, 8192) if device == "cuda" else (1 << 22, 256)
    source = torch.randn(numbers, device=device)
    target = torch.empty_like(source)
    ways: list[tuple[int, Callable[[], Tensor]]] = [  # bytes of a number
        (8, lambda: target.copy_(source)),
        (8, lambda: torch.neg(source, out=target)),
        (4, lambda: source.sum()),
    ]
    bandwidth = max(moved * numbers / seconds([way])[0] for moved, way in ways)
    a, b = torch.randn(2, width, width, device=device, dtype=dtype)
    return Device(bandwidth, 2 * width**3 / seconds([lambda: a @ b])[0])


class Table:
    """Measure, print and keep rows."""

    def __init__(self, device: Device, name: str, args: argparse.Namespace) -> None:
        self.device, self.name, self.args, self.rows = device, name, args, list[Row]()
        self.dtype = DTYPES[args.dtype]
        self.done = self.planned = 0  # shapes

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.args.device, dtype=self.dtype)

    def cold(self, make: Callable[[], Tensor]) -> list[Tensor]:
        """As many copies of the data as exceed a GPU's L2 cache together; on a CPU one."""
        first = make()
        count = max(1, min(64, -(-COLD_BYTES // first.nbytes))) if first.is_cuda else 1
        return [first, *(make() for _ in range(count - 1))]

    def run(self, benches: Sequence[tuple[Callable[..., None], Sequence[int]]]) -> None:
        """Measure all shapes: functions and their last arguments. What does not fit is left out."""
        self.planned = len(benches)
        for bench, sizes in benches:
            try:
                bench(self.args, self, *sizes)
                self.done += 1
            except torch.cuda.OutOfMemoryError:
                print(f"{bench.__name__}{sizes}: does not fit into this GPU's memory, left out", flush=True)
            self.write()

    def write(self) -> None:
        """After each row, so that a command that is killed keeps what it measured."""
        if self.args.out:
            versions = {"torch": torch.__version__, "python": platform.python_version()}
            versions |= {} if triton is None else {"triton": triton.__version__}
            facts = {"device": self.name, **asdict(self.device), "dtype": self.args.dtype, "versions": versions}
            facts |= {"shapes": {"done": self.done, "planned": self.planned}}
            write_json(self.args.out, facts | {"rows": [asdict(row) for row in self.rows]})

    def add(self, kernel: str, way: str, shape: dict[str, int], calls: Calls, work: Work, difference: float) -> None:
        """Time the calls; ``work``: of one; the other arguments are fields of :class:`Row`."""
        median, low, high = (1e6 * time for time in seconds(calls))
        of_bound = self.device.bound(work)[1] * 1e6 / median
        row = Row(kernel, way, shape, median, low, high, work.moved, work.operations, of_bound, difference)
        self.rows.append(row)
        self.write()
        sizes = " ".join(f"{name}={size}" for name, size in shape.items())
        print(
            f"{kernel:10} {way:16} {sizes:34} {row.median_us:10.1f} {row.low_us:10.1f} {row.high_us:10.1f} "
            f"{row.of_bound:9.1%} {row.difference:11.1e}",
            flush=True,
        )

    def add_ways(
        self,
        kernel: str,
        shape: dict[str, int],
        ways: Ways,
        data: Sequence[Tensor],
        work: Work,
        difference: Callable[[Any], float],
    ) -> None:
        """Time each way over all copies of the data; ``difference``: of what it returns of the first."""
        for name, way in ways.items():
            self.add(kernel, name, shape, [partial(way, each) for each in data], work, difference(way(data[0])))
