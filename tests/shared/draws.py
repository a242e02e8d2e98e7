"""Other draws for the same tests: ``make test DRAFTSMITH_TEST_SEED=n`` shifts every seed that a file under tests/ sets.
0, the default, leaves them as they stand. What runs in another process, or inside a command, keeps its own seeds."""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

SEED = int(os.environ.get("DRAFTSMITH_TEST_SEED", "0"))
_HERE = f"{Path(__file__).parent.parent}{os.sep}"


class fixed_seed:
    """``with fixed_seed(reason):`` seeds set inside are not shifted. The marker of this name is for a whole test."""

    entered = 0

    def __init__(self, reason: str) -> None:
        assert reason, "a fixed seed needs a reason"

    def __enter__(self) -> None:
        fixed_seed.entered += 1

    def __exit__(self, *_: object) -> None:
        fixed_seed.entered -= 1


def occurs(seen: object, what: str = "") -> None:
    """What a test's draws have to bring about, or it would test nothing: asserted of the seeds as they stand, which
    were chosen for it; other draws may have missed it."""
    assert seen or SEED, what


def near_tie(what: str) -> NoReturn:
    """The draws have a near-tie, which rounding may decide: the test needs others."""
    if SEED:
        pytest.skip(f"a near-tie at DRAFTSMITH_TEST_SEED={SEED}")
    raise AssertionError(f"a near-tie, which rounding may decide: choose another {what}")


def shift_seeds() -> None:
    """Replace the functions that seed a generator by ones that add to the seed, if a file under tests/ calls them. Once
    in a process, which may run pytest several times."""
    import numpy as np
    import torch

    if hasattr(random.seed, "shifted"):
        return

    def shifted(seed: Any) -> Any:
        if fixed_seed.entered or not isinstance(seed, int | float | str):
            return seed
        if not sys._getframe(2).f_code.co_filename.startswith(_HERE):
            return seed
        return seed + 1_000_003 * SEED if isinstance(seed, int) else f"{seed} {SEED}"

    def adds(seeding: Callable[..., Any]) -> Callable[..., Any]:
        return lambda seed=None: seeding(shifted(seed))

    class Random(random.Random):
        def __init__(self, x: Any = None) -> None:
            super().__init__(shifted(x))

    class Generator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(shifted(seed))

    random.seed, random.Random = adds(random.seed), Random
    random.seed.shifted = True
    np.random.seed, np.random.default_rng = adds(np.random.seed), adds(np.random.default_rng)
    torch.manual_seed, torch.Generator = adds(torch.manual_seed), Generator
    torch.manual_seed(0)  # for tests that draw without a seed
