"""Options that the measuring commands share, and their checks. Light to import: a command answers before torch is."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.common.command import available_cores
from draftsmith.common.files import check_file
from draftsmith.inference.commands.options import check_counts, check_threads
from draftsmith.models.options import dtype_option

_LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False}
SHAPES: dict[str, dict[str, Any] | None] = {
    "llama2-7b": {**_LLAMA, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000},
    "llama3-8b": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "tiny-lm": None,  # what the bundled model's own config says
}


def prompts_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl", help="as for decode.py")


def list_option(
    parser: argparse.ArgumentParser,
    name: str,
    default: list[Any] | None,
    metavar: str | None = None,
    help: str = "(%(default)s)",
    kind: Callable[[str], Any] = int,
) -> None:
    """Add an option of one or more values."""
    parser.add_argument(name, type=kind, nargs="+", default=default, metavar=metavar, help=help)


def machine_options(parser: argparse.ArgumentParser, dtype: str = "", *, device: bool = True, out: bool = True) -> None:
    """Add ``--threads`` and ``--out``, ``--device``, and ``--dtype`` where ``dtype`` begins its help."""
    if dtype:
        dtype_option(parser, dtype)
    if device:
        parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: cuda where there is one)")
    parser.add_argument("--threads", type=int, default=available_cores(), help="CPU threads; all cores if left out")
    if out:
        what = "write the figures there; a plot, if there is one, beside it"
        parser.add_argument("--out", type=Path, metavar="FILE.json", help=what)


def check_options(args: argparse.Namespace, *counts: str) -> None:
    """Check the options of :func:`machine_options`, ``--seconds`` if there is one, and counts, by their names.

    Raises:
        FileNotFoundError, ValueError: a value is out of its range, or --out cannot be written.
    """
    for name in counts:
        value = getattr(args, name)
        for count in value if isinstance(value, list) else [value]:
            check_counts(**{name: count})
    check_threads(args.threads)
    if getattr(args, "seconds", None) is not None:
        check_positive("--seconds", args.seconds)
    check_file("--out", getattr(args, "out", None))


def chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Some options of a command, as they stand in its report."""
    return {name: getattr(args, name) for name in names}


def check_positive(option: str, value: float, what: str = "") -> None:
    """
    Raises:
        ValueError: the value is not a finite number above 0.
    """
    if not 0 < value < math.inf:
        raise ValueError(f"{option} {value:g}: must be above 0{what}")


def check_once(option: str, values: Sequence[Any]) -> None:
    """
    Raises:
        ValueError: a value is given twice.
    """
    again = [value for place, value in enumerate(values) if value in values[:place]]
    if again:
        given = " ".join([option, *map(str, values)]).strip()
        raise ValueError(f"{given}: {again[0]} is given twice; leave one out")
