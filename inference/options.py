"""Checks of a command line, before anything slow. Light to import."""

import os

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
