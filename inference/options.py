"""Checks of a command line and of drafter names. Light to import."""

import os
from pathlib import Path

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "epsilon")  # --mode sample, typical
LARGEST = (1 << 31) - 1


def check_counts(**counts: int | None) -> None:
    """Check counts of a command line, by the name of their option; None is not checked.

    Raises:
        ValueError: one is below 1 or above 2³¹ − 1.
    """
    for name, count in counts.items():
        option = f"--{name.replace('_', '-')}"
        if count is not None and count < 1:
            raise ValueError(f"{option} {count}: must be at least 1")
        if count is not None and count > LARGEST:
            raise ValueError(f"{option} {count}: must be at most {LARGEST}")


def check_threads(threads: int | None) -> None:
    """Check a number of CPU threads.

    Raises:
        ValueError: it is below 1, or above both 256 and the machine's cores.
    """
    check_counts(threads=threads)
    limit = max(256, os.cpu_count() or 1)
    if threads is not None and threads > limit:
        raise ValueError(f"--threads {threads}: must be at most {limit}")


def parts_of(name: str) -> list[str]:
    """The drafters that a name joins by ``+``; the name of an existing folder is one, even if it has a ``+``.

    Raises:
        ValueError: an empty part, the same part twice, or ``none`` among several.
    """
    parts = [name] if Path(name).exists() else name.split("+")
    if not all(parts):
        raise ValueError(f"'{name}': a drafter is missing beside '+'; for example runs/demo+ngram")
    if len(parts) > 1 and "none" in parts:
        raise ValueError(f"'{name}': 'none' proposes nothing; leave it out")
    if len(set(parts)) < len(parts):
        raise ValueError(f"'{name}': the same drafter twice; leave one out")
    return parts


def short_name(name: str) -> str:
    """A drafter's name without the path to it, for its report's folder and in tables."""
    return "+".join(Path(part).name for part in parts_of(name))
