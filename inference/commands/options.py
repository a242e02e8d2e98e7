"""Checks of a command line. Light to import."""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Those after the repetition penalty change greedy texts, too: by themselves they mean temperature 0.
LOGIT_CHANGES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
# Of --mode sample and typical.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", *LOGIT_CHANGES, "seed", "epsilon", "delta")
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


def choose_mode(args: argparse.Namespace) -> None:
    """Choose the mode if it was left out, and ``mss`` if --verify asks for it. Greedy decoding with penalties or biases
    is mode ``sample`` with temperature 0.
    Raises ValueError: options of how tokens are chosen contradict each other."""
    given = [name for name in SAMPLING if getattr(args, name) is not None]
    if args.mode is None:
        sampled = args.verify or args.samples or {*given} - {*LOGIT_CHANGES[1:]}
        args.mode = "sample" if sampled else "greedy"
    if args.mode == "greedy" and given and not {*given} - {*LOGIT_CHANGES}:
        args.mode, args.temperature = "sample", 0.0
    for name in ("epsilon", "delta"):
        if args.mode != "typical" and getattr(args, name) is not None:
            raise ValueError(f"--{name} is {'the' if name == 'epsilon' else 'a'} threshold of --mode typical")
    if args.mode == "greedy" and given:
        raise ValueError(f"--{given[0].replace('_', '-')} needs --mode sample (or typical)")
    if args.verify and args.mode != "sample":
        raise ValueError(f"--verify {args.verify} needs --mode sample")
    if args.samples and (args.mode != "sample" or args.temperature == 0):
        raise ValueError(f"--samples {args.samples}: all would be the same text; give --mode sample and a temperature")
    if args.verify == "mss":
        args.mode = "mss"


def read_biases(given: Sequence[str]) -> dict[int | str, float]:
    """The biases of --logit-bias, by token id or by the text of a token. Raises ValueError: it cannot be read."""
    found: dict[int | str, float] = {}
    for each in given:
        token, _, bias = each.rpartition("=")
        try:
            key, value = json.loads(token), float(bias)
        except ValueError:
            key = value = None
        if value is None or isinstance(key, bool) or not isinstance(key, int | str):
            raise ValueError(f"--logit-bias {each}: must be ID=NUMBER, or '\"TEXT\"=NUMBER' with the text of one token")
        found[key] = value
    return found


def biases_by_id(biases: Mapping[int | str, float], tokenizer: Any, vocab_size: int) -> dict[int, float]:
    """The same with token ids alone. Raises ValueError: a text is not one token, or a token is not the target's."""
    found: dict[int, float] = {}
    for key, value in biases.items():
        if isinstance(key, str) and tokenizer is None:
            raise ValueError(f"--logit-bias {json.dumps(key)}: the target has no tokenizer; give a token id")
        ids = [key] if isinstance(key, int) else tokenizer(key, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"--logit-bias {json.dumps(key)}: the text is {len(ids)} tokens {ids}; give their ids")
        if not 0 <= ids[0] < vocab_size:
            raise ValueError(f"--logit-bias {ids[0]}: the target's vocabulary has {vocab_size:,} tokens, from 0")
        found[ids[0]] = value
    return found


def read_standard_input(args: argparse.Namespace) -> None:
    """Put what standard input has, without a last line end, in place of the ``-`` of --prompt or --system.
    Raises ValueError: it is closed, empty or not UTF-8 text; or an argument is not."""
    for name in ("prompt", "system"):
        text = getattr(args, name)
        try:
            if text == "-":
                if sys.stdin is None:
                    raise ValueError(f"--{name} - reads standard input, which is closed; give the text")
                text = re.sub("\r?\n\\Z", "", sys.stdin.buffer.read().decode())
                if not text:
                    raise ValueError(f"--{name} -: standard input is empty")
                setattr(args, name, text)
            elif text:
                text.encode()
        except UnicodeError:
            raise ValueError(f"--{name}: not UTF-8 text") from None
