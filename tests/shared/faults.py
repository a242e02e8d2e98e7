"""Damaged drafter folders, a disk that is full, and the one line that commands answer with."""

import contextlib
import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file

from draftsmith.common.files import write_json

Damage = Callable[[Path], object]


def error_of(result: tuple[int, str, str]) -> str:
    """The error of a command's exit code 2, stdout and stderr; before it stands what was chosen for the target."""
    code, out, err = result
    *before, line = err.splitlines()
    assert (code, out) == (2, "") and line.startswith("error: ") and err.endswith("\n"), err
    assert all(each.startswith("precision: ") for each in before), err
    return line.removeprefix("error: ")


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """Inside, no file grows beyond ``size`` bytes, as on a full disk. Python writes no bytecode then: it would keep the
    first bytes of it, and later processes stumble over these."""
    before, kept = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = kept


def config(part: str = ".", **fields: object) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / part / "config.json"
        write_json(file, json.loads(file.read_text()) | fields)

    return damage


def tensors(part: str = ".", **changed: object) -> Damage:
    """Replace tensors (``__`` for a dot); None takes one out."""

    def damage(folder: Path) -> None:
        file = folder / part / "model.safetensors"
        weights = load_file(file) | {name.replace("__", "."): weight for name, weight in changed.items()}
        save_file({name: weight for name, weight in weights.items() if weight is not None}, file)

    return damage


def tree(content: object) -> Damage:
    return lambda folder: write_json(folder / "tree.json", content)


def truncate(name: str, size: int) -> Damage:
    """Keep ``size`` bytes of a file; a negative number is taken off its end."""

    def damage(folder: Path) -> None:
        file = folder / name
        file.write_bytes(file.read_bytes()[:size])

    return damage


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()
