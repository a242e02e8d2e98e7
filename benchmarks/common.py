"""What the measuring commands share: drafters and their target, timing in turn, intervals. Options: options.py; what is
printed and written: tables.py."""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.load import read_named
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.timing import Method, bootstrap_interval, with_own_seeds
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.adapter import target_of
from draftsmith.models.options import choose_device
from draftsmith.models.precision import say
from draftsmith.models.target import Target, load_target

T = TypeVar("T")
Stored = dict[str, tuple[Path, dict[str, Any], dict[str, Tensor]]]  # name → folder, config and weights

# ---- drafters and their target


def read_drafters(names: Sequence[str], drafter_type: str) -> Stored:
    """
    Raises:
        FileNotFoundError, ValueError: a folder is missing, damaged, or of another type.
    """
    stored = {name: read_named(name) for name in names}
    for folder, config, _ in stored.values():
        if (found := config["drafter_type"]) != drafter_type:
            raise ValueError(f"{folder}: drafter_type '{found}'; give folders that train/{drafter_type}.py wrote")
    return stored


def load_target_of(stored: Stored, name: str | None, **options: Any) -> Target:
    """The one target of several drafters: ``name``, a folder or a Hub id, or what the first one's config says.

    Raises:
        FileNotFoundError, ValueError: it is missing, or a drafter has another target.
    """
    known = next(iter(stored.values()))[1]["target"]["name_or_path"]
    target = load_target(name or known, say=say, **options)
    for folder, config, _ in stored.values():
        target = target_of(folder, config, target)
    return target


def load_for(name: str, target: Target | None, args: argparse.Namespace, **options: Any) -> tuple[Target, Drafter]:
    """A drafter and, unless given, its target, as --target, --device and --dtype ask; ``options``: of
    :func:`load_drafter`.

    Raises:
        FileNotFoundError, ValueError: as there; it drafts nothing.
    """
    options |= {"device": choose_device(args.device), "dtype": args.dtype}
    target, drafter = load_drafter(name, target, target_name=args.target, **options)
    if drafter is None:
        raise ValueError(f"'{name}' drafts nothing; give a drafter")
    return target, drafter


def answers_of(
    target: Target, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """The target's greedy answers: tokens ``[S, T]``, and which of them it wrote."""
    with ProgressBar("answers of the target", len(prompts), console, transient=True) as advance:
        answers = answer(target, prompts, max_new_tokens, batch_size, on_done=advance)
    return answers["tokens"], answers["supervised"]


def decoding(
    decoder: SpeculativeDecoder,
    max_new_tokens: int,
    batch_size: int = 1,
    mode: Mode = "greedy",
    sampling: Sampling | None = None,
) -> Method:
    """A method to time; sampled, each prompt has a seed of its own."""

    def run(prompts: list[list[int]]) -> list[Generation]:
        seeded = None if sampling is None else with_own_seeds(sampling, prompts)
        return decoder.generate(prompts, max_new_tokens, mode=mode, sampling=seeded, batch_size=batch_size)

    return run


def steps_of(results: Sequence[Generation]) -> list[list[int]]:
    """Committed tokens and number of steps of each answer."""
    return [[sum(result.accepted), len(result.accepted)] for result in results]


def by_kind(kinds: Sequence[str]) -> dict[str, list[int]]:
    """Numbers of the texts of each kind, in the order of their first ones."""
    return {kind: [number for number, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)}


# ---- timing and intervals


def alone(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own, whose peak memory is its own.

    Raises:
        ValueError: the process died.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise ValueError("the measuring process died, most likely for lack of memory; ask for less") from None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done what ``run`` asks of it."""
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def take_turns(methods: Sequence[Callable[[], T]], rounds: int) -> list[list[T]]:
    """What each method returns in each round. They take turns, in rotating order, so that other load on the machine
    affects all of them alike."""
    found: list[list[T]] = [[] for _ in methods]
    for turn in range(rounds * len(methods)):
        place = (turn + turn // len(methods)) % len(methods)
        found[place].append(methods[place]())
    return found


def share_of(total: Tensor) -> Tensor:
    return total[0] / total[1]


def ratio_of(total: Tensor) -> Tensor:
    """Of two methods' shares."""
    return (total[0] / total[1]) / (total[2] / total[3])


def difference_of(total: Tensor) -> Tensor:
    """Of two methods' shares, the first less the second."""
    return total[0] / total[1] - total[2] / total[3]


def interval_of(columns: Tensor, statistic: Callable[[Tensor], Tensor] = share_of) -> list[float] | None:
    """95 % interval of a statistic of the sums of ``columns [C, S]`` over S samples, by a bootstrap over them; None if
    they are too few, or it is not finite."""
    found = bootstrap_interval(columns.double(), statistic)
    return None if found is None or not torch.tensor(found).isfinite().all() else [round(bound, 4) for bound in found]


def with_interval(
    columns: Tensor, statistic: Callable[[Tensor], Tensor] = share_of, name: str = "value", interval: str = "interval"
) -> dict[str, Any]:
    """A statistic of the sums of ``columns [C, S]``, and its interval, as fields of a report; None if not finite."""
    value = statistic(columns.double().sum(-1))
    if not value.isfinite():
        return {name: None, interval: None}
    return {name: round(float(value), 4), interval: interval_of(columns, statistic)}
