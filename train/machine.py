"""The devices that ``--dry-run`` computes for: those of this launch, or GPUs by name."""

import re
from dataclasses import dataclass, replace

import torch
from accelerate import PartialState

from draftsmith.train import sharded

PRODUCTS, BANDWIDTH = 0.6, 0.8  # shares of a data sheet's figures that training is taken to reach
FILLED = 0.9  # share of a GPU's memory that batch.micro: auto takes


@dataclass(frozen=True)
class Gpu:
    """NVIDIA's data sheet: TFLOP/s in bfloat16 without sparsity, GB of memory, TB/s."""

    products: float
    memory: float
    bandwidth: float


GPUS = {
    "H200": Gpu(989, 141, 4.8),
    "H100": Gpu(989, 80, 3.35),
    "A100": Gpu(312, 80, 2.04),
    "L40S": Gpu(362, 48, 0.864),
    "RTX 4090": Gpu(165, 24, 1.01),
    "L4": Gpu(121, 24, 0.3),
}


@dataclass(frozen=True)
class Machine:
    """Equal devices, one for each process.

    strategy: the launch configuration's, as :func:`sharded.strategy` says it.
    gpu: what is known of the device; None of a CPU or another GPU.
    """

    name: str
    processes: int
    strategy: str = "none"
    gpu: Gpu | None = None
    cuda: bool = True

    @classmethod
    def here(cls) -> "Machine":
        """The devices of this launch."""
        cuda = torch.cuda.is_available()
        name = torch.cuda.get_device_name() if cuda else "cpu"
        gpu = next((gpu for known, gpu in GPUS.items() if re.search(rf"\b{known}\b", name)), None)
        if gpu:  # some are sold with less memory than the data sheet's, or lent in parts
            gpu = replace(gpu, memory=torch.cuda.get_device_properties("cuda").total_memory / 1e9)
        return cls(name, PartialState().num_processes, sharded.strategy(), gpu, cuda)

    @classmethod
    def named(cls, text: str) -> "Machine":
        """GPUs by name: ``h100``, ``h100x8``, ``rtx4090x2``; spread over them by the launch configuration, if that says
        so. Raises ValueError: it is none of those that are known."""
        by_name = {name.lower().replace(" ", ""): name for name in GPUS}
        found = re.fullmatch(r"(.+?)(?:x([1-9][0-9]{0,4}))?", text.lower())
        asked, count = (text.lower(), None) if text.lower() in by_name else found.groups() if found else ("", None)
        if asked not in by_name:
            raise ValueError(f"--as {text}: known are {', '.join(by_name)}, and several as {next(iter(by_name))}x8")
        name = by_name[asked]
        return cls(f"{count} × {name}" if count else name, int(count or 1), sharded.strategy(), GPUS[name])

    @property
    def room(self) -> float | None:
        """Bytes that a plan may take of a GPU's memory; None on a CPU."""
        if not self.cuda:
            return None
        known = self.gpu.memory * 1e9 if self.gpu else torch.cuda.get_device_properties("cuda").total_memory
        return FILLED * known

    @property
    def spread(self) -> bool:
        """Whether the frozen target is spread over the devices."""
        return self.strategy in ("zero3", "fsdp")

    def seconds(self, operations: float, traffic: float, rate: float | None = None) -> float:
        """Of a device's share of a step: products at ``rate`` (a share of the data sheet's if left out), and the bytes
        that other operations read and write, where the memory's bandwidth is known."""
        moved = traffic / (self.gpu.bandwidth * 1e12 * BANDWIDTH) if self.gpu else 0.0
        rate = rate or (self.gpu.products * 1e12 * PRODUCTS if self.gpu else None)
        assert rate is not None, "of a device that no data sheet is known of, the rate is measured"
        return operations / rate + moved
