"""Measurements on this machine, kept for later processes: files of the cache folder, machine → key → value."""

import json
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from draftsmith.common.files import cache_folder, write_json


def machine() -> str:
    """What CPU measurements depend on: the CPU's model, the instructions PyTorch uses, its version, threads."""
    cpu = [platform.machine()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        parts = dict(line.split(":", 1) for line in lines if ":" in line)
        parts = {name.strip(): value.strip() for name, value in parts.items()}
        cpu = [parts.get(name, "?") for name in ("model name", "cpu family", "model")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{'/'.join(cpu)} {capability}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def read_measured(name: str) -> dict[str, Any]:
    """This machine's entries of the file ``name``; none if it is missing or damaged."""
    known = _everything(name).get(machine())
    return known if isinstance(known, dict) else {}


def write_measured(name: str, measured: dict[str, Any]) -> None:
    """Add entries to the file ``name``. If it cannot be written, later processes measure again."""
    with suppress(OSError, RuntimeError):
        file = cache_folder() / name
        file.parent.mkdir(parents=True, exist_ok=True)
        content = _everything(name)
        known = content.get(machine())
        content[machine()] = {**(known if isinstance(known, dict) else {}), **measured}
        write_json(file, content)


def _everything(name: str) -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a user without a home folder
        content = json.loads((cache_folder() / name).read_bytes())
        if isinstance(content, dict):
            return content
    return {}
