"""Measurements on this machine, kept for later processes: files of the cache folder, machine → key → value."""

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from draftsmith.common.command import cpu_facts, no_collection
from draftsmith.common.files import cache_folder, object_or_empty, write_json
from draftsmith.kernels.backend import triton


def machine(device: torch.device | None = None) -> str:
    """What measurements depend on. On a CPU, and if left out: its model, the instructions PyTorch uses, its version,
    threads. On a GPU: its name and multiprocessors, and the versions of PyTorch and Triton."""
    if device is not None and device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        version = None if triton is None else triton.__version__
        return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, torch {torch.__version__}, triton {version}"
    facts = cpu_facts()
    cpu = [facts.get(name, "?") for name in ("model name", "cpu family", "model")] if facts else [platform.machine()]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{'/'.join(cpu)} {capability}, torch {torch.__version__}, {torch.get_num_threads()} threads"


@cache  # cuBLAS keeps a workspace of some megabytes for each stream that it ran on
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def gpu_seconds(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Seconds of one call on a GPU. All calls are run, for compiling, and then captured in one CUDA graph; the shortest
    of a few replays counts, since other work can only add to it."""
    with torch.cuda.device(device):
        current, stream, graph = torch.cuda.current_stream(), _stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            stream.synchronize()
            with no_collection():
                graph.capture_begin(capture_error_mode="thread_local")  # without torch.cuda.graph's own collection
                try:
                    for call in calls:
                        call()
                finally:
                    graph.capture_end()
            times: list[float] = []
            for _ in range(6):
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began.record()
                graph.replay()
                ended.record()
                ended.synchronize()
                times.append(began.elapsed_time(ended) / 1e3)
        current.wait_stream(stream)
    return min(times) / len(calls)


def read_measured(name: str, device: torch.device | None = None) -> dict[str, Any]:
    """This machine's entries of the file ``name``, or those of a GPU; none if it is missing or damaged."""
    with suppress(RuntimeError):  # a user without a home folder
        known = object_or_empty(cache_folder() / name).get(machine(device))
        return known if isinstance(known, dict) else {}
    return {}


def write_measured(name: str, measured: dict[str, Any], device: torch.device | None = None) -> None:
    """Add entries to the file ``name``. If it cannot be written, later processes measure again."""
    with suppress(OSError, RuntimeError):
        file = cache_folder() / name
        file.parent.mkdir(parents=True, exist_ok=True)
        content = object_or_empty(file)
        known = content.get(machine(device))
        content[machine(device)] = {**(known if isinstance(known, dict) else {}), **measured}
        write_json(file, content)
