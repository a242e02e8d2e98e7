"""Small whole runs of the real training commands: a recipe, one run after another, runs that are killed."""

import itertools
import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState

FORKED = pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used a GPU cannot be forked")


class Killed(BaseException):
    """Ends a run at once: nobody catches it, nothing is saved."""


def kill(*_, **__):
    raise Killed


def before_call(patch, place, name, which, do):
    """``do`` runs before that call of ``place.name``, counted from 0."""
    call, calls = getattr(place, name), itertools.count()

    def counted(*arguments, **named):
        if next(calls) == which:
            do()
        return call(*arguments, **named)

    patch.setattr(place, name, counted)


def write_recipe(folder, model, drafter, stages, prompts=16, new_tokens=24, **sections):
    """A recipe file in ``folder``, of training on a model's own answers to pieces of the standard library."""
    ask = {"prompts": prompts, "prompt_tokens": 12, "new_tokens": new_tokens, "batch_size": 12}
    content = {
        "run": {"name": "whole", "output_dir": str(folder), "seed": 3},
        "target": {"name": str(model)},
        "drafter": drafter,
        "data": {
            "train": [{"source": "stdlib", "split": "validation", "answers": ask}],
            "validation": [{"source": "stdlib", "split": "test", "answers": ask | {"prompts": 8}}],
        },
        "stages": stages,
        "precision": {"autocast": "none", "threads": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content | sections))
    return path


@dataclass
class Runs:
    """Runs of one training command by one recipe, whose output_dir is the recipe's folder."""

    main: Callable[[], None]
    recipe: Path
    run_main: Callable[..., tuple[int, str, str]]
    out: str = ""  # what the last one printed

    def __call__(self, name, *overrides):
        """A run that ends well: its folder."""
        code, self.out, err = self.run_main(self.main, self.recipe, f"run.name={name}", *overrides)
        assert (code, err) == (0, "")
        return self.recipe.parent / name

    def refused(self, name, *overrides, code=2):
        """The one line of a command that fails."""
        found, self.out, err = self.run_main(self.main, self.recipe, f"run.name={name}", *overrides)
        assert found == code and err.startswith("error: ") and err.count("\n") == 1, err
        return err

    def killed(self, at, name, *overrides):
        """A run that is killed ``at`` (place, name of a function there, which call of it): its folder."""
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            before_call(patch, *at, kill)
            self.run_main(self.main, self.recipe, f"run.name={name}", *overrides)
        return self.recipe.parent / name


def metrics(folder, key):
    """step → value, of the lines of metrics.jsonl that have it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def assert_same_files(folder, other, *names):
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def make_batch(vocab_size):
    """Four rows of prompt, answer and padding; the answers' lengths are 9, 4, 2 and 12."""
    torch.manual_seed(4)
    tokens = torch.randint(vocab_size, (4, 14), dtype=torch.int32)
    supervised = torch.zeros(4, 14, dtype=torch.bool)
    for row, (begin, end) in enumerate([(3, 12), (6, 10), (5, 7), (2, 14)]):
        supervised[row, begin:end] = True
        tokens[row, end:] = 0
    return {"tokens": tokens, "supervised": supervised}


# ---- two processes


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def become(rank: int, port: int) -> None:
    """Make this process one of two."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def both(work: Callable[..., None], *arguments: object) -> list[int | None]:
    """The exit codes of two processes that do ``work(rank, port, *arguments)``; forked, so that they need not import
    torch again."""
    port, fork = free_port(), multiprocessing.get_context("fork")
    ranks = [fork.Process(target=work, args=(rank, port, *arguments), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]
