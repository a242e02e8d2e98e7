"""The least time that work takes on a device, and goals made of it.

    floor = Σ max(bytes / copy bandwidth, operations / matrix rate) + launches · BOUNDARY

The sum is over pieces of work that run one after the other. A goal asks for a share of the device's bandwidth, or of
its matrix rate, whichever limits a piece. It is judged only where the floor is above :data:`JUDGED` seconds: below,
starting and ending kernels takes as long as their work.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

BOUNDARY = 1.3e-6  # seconds from one kernel of a CUDA graph to the next: an estimate until it is measured on a GPU
JUDGED = 30e-6
# Kernels of a greedy step, by tests/kernels/device/test_launches.py: in a layer, and around the layers.
STEP_LAUNCHES = (10, 10)


@dataclass(frozen=True)
class Work:
    """What a piece of work needs at least.

    moved: bytes that are read or written. operations: multiply-adds · 2. launches: of kernels.
    """

    moved: float
    operations: float = 0.0
    launches: int = 0


@dataclass(frozen=True)
class Device:
    """Measured limits of a device: bytes/s (read and written) and multiply-adds/s · 2."""

    bandwidth: float
    matmul_rate: float

    def bound(self, work: Work) -> tuple[str, float]:
        """What limits a piece, "bytes" or "operations", and the seconds that it takes there, without launches."""
        by_bytes, by_operations = work.moved / self.bandwidth, work.operations / self.matmul_rate
        return ("bytes", by_bytes) if by_bytes >= by_operations else ("operations", by_operations)

    def floor(self, works: Iterable[Work]) -> float:
        """The least seconds of pieces that run one after the other."""
        return sum(self.bound(work)[1] + work.launches * BOUNDARY for work in works)


@dataclass(frozen=True)
class Goal:
    """Seconds that work may take, and the least that it can take on this device."""

    seconds: float
    floor: float

    @property
    def judged(self) -> bool:
        return self.floor > JUDGED


def goal(device: Device, works: Iterable[Work], shares: Mapping[str, float]) -> Goal:
    """The goal of pieces that run one after the other.

    Args:
        shares: of the bandwidth ("bytes") and of the matrix rate ("operations") that have to be reached.

    Raises:
        ValueError: the goal is below the floor.
    """
    works = list(works)
    bounds = [device.bound(work) for work in works]
    launches = sum(work.launches for work in works) * BOUNDARY
    found = Goal(sum(seconds / shares[what] for what, seconds in bounds) + launches, device.floor(works))
    if found.seconds < found.floor:
        raise ValueError(f"a goal of {found.seconds:.3g} s is below the floor of {found.floor:.3g} s: {dict(shares)}")
    return found


def works_of(rows: Iterable[Mapping[str, Any]]) -> list[Work]:
    """Of the fields of a JSON file."""
    return [Work(row["moved"], row["operations"], row["launches"]) for row in rows]
