"""Checks of a command line, before anything slow. Light to import."""

import os
from pathlib import Path

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "epsilon")  # --mode sample, typical
LARGEST = (1 << 31) - 1


def check_counts(**counts: int | None) -> None:
    """Counts of a command line, by the name of their option, are positive and no larger than 2³¹ − 1; None is left out.

    Raises:
        ValueError: one is not.
    """
    for name, count in counts.items():
        option = f"--{name.replace('_', '-')}"
        if count is not None and count < 1:
            raise ValueError(f"{option} {count}: must be at least 1")
        if count is not None and count > LARGEST:
            raise ValueError(f"{option} {count}: must be at most {LARGEST}")


def check_threads(threads: int | None) -> None:
    """Raises: ValueError: not positive, or far more CPU threads than a machine runs."""
    check_counts(threads=threads)
    most = max(256, os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise ValueError(f"--threads {threads}: must be at most {most}")


def parts_of(name: str) -> list[str]:
    """The drafters that a name joins by ``+``; a folder's own name may hold one.

    Raises:
        ValueError: nothing between two of them, or ``none`` among several.
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
    """A drafter's name without the folders that lead to it: of its report's folder, and in tables."""
    return "+".join(Path(part).name for part in parts_of(name))
