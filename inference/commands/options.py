"""Checks of a command line. Light to import."""

import argparse
import os

# Of --mode sample and typical.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "epsilon", "delta")
LARGEST = (1 << 31) - 1
LOGPROBS = 20  # the likeliest tokens of which --logprobs shows the log-probabilities, at most


def check_counts(**counts: int | None) -> None:
    """Raise a ValueError if a count of a command line, by the name of its option, is below 1 or above 2³¹ − 1; None is
    not checked."""
    for name, count in counts.items():
        option = f"--{name.replace('_', '-')}"
        if count is not None and count < 1:
            raise ValueError(f"{option} {count}: must be at least 1")
        if count is not None and count > LARGEST:
            raise ValueError(f"{option} {count}: must be at most {LARGEST}")


def check_logprobs(args: argparse.Namespace) -> None:
    """Raise a ValueError if --logprobs is out of its range, or if nothing would show them."""
    if args.logprobs_mode and args.logprobs is None:
        raise ValueError(f"--logprobs-mode {args.logprobs_mode} needs --logprobs K")
    if args.logprobs is None:
        return
    if not 0 <= args.logprobs <= LOGPROBS:
        raise ValueError(f"--logprobs {args.logprobs}: must be from 0 to {LOGPROBS}")
    streamed = args.live or not (args.prompts or args.report or args.check_lossless)
    if not (streamed or args.answers):
        raise ValueError(
            "--logprobs is shown below texts of --prompt, --interactive and --live, which measure nothing, and written "
            "into --answers; leave it out"
        )


def check_threads(threads: int | None) -> None:
    """Raise a ValueError if a number of CPU threads is below 1, or above both 256 and the machine's cores."""
    check_counts(threads=threads)
    limit = max(256, os.cpu_count() or 1)
    if threads is not None and threads > limit:
        raise ValueError(f"--threads {threads}: must be at most {limit}")
