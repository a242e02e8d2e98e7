"""What the measuring commands share beside their options: drafters of one type, timing in turn, intervals, tables,
pictures and the file of figures."""

import importlib.util
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Table
from torch import Tensor

from draftsmith.common.files import write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console, make_console
from draftsmith.inference.drafters.load import read_named
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.evaluation.report import write_figure
from draftsmith.inference.evaluation.timing import bootstrap_interval
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import device_name, versions
from draftsmith.models.precision import say
from draftsmith.models.target import Target, load_target

T = TypeVar("T")
Stored = dict[str, tuple[Path, dict[str, Any], dict[str, Tensor]]]  # name → folder, config and weights
GREY = "#8d95a3"  # of a plot's reference lines

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


def answers_of(
    target: Target, prompts: Sequence[list[int]], max_new_tokens: int, batch_size: int
) -> tuple[Tensor, Tensor]:
    """The target's greedy answers: tokens ``[S, T]``, and which of them it wrote."""
    with ProgressBar("answers of the target", len(prompts), console, transient=True) as advance:
        answers = answer(target, prompts, max_new_tokens, batch_size, on_done=advance)
    return answers["tokens"], answers["supervised"]


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


def interval_of(columns: Tensor, statistic: Callable[[Tensor], Tensor] = share_of) -> list[float] | None:
    """95 % interval of a statistic of the sums of ``columns [C, S]`` over S samples, by a bootstrap over them; None if
    they are too few, or it is not finite."""
    found = bootstrap_interval(columns.double(), statistic)
    return None if found is None or not torch.tensor(found).isfinite().all() else [round(bound, 4) for bound in found]


# ---- what is printed, written and plotted


def cell(value: float | None, interval: Sequence[float | None] | None = None, form: str = ".2f", to: str = "–") -> str:
    """A figure as a table's cell, with its interval; a bound that is None is infinite."""
    if value is None:
        return "–"
    bounds = to.join("∞" if bound is None else f"{bound:{form}}" for bound in interval or ())
    return f"{value:{form}}" + (f" ({bounds})" if bounds else "")


def table_of(*columns: str, left: int = 1) -> Table:
    """A table without lines; its first ``left`` columns are aligned to the left."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= left else "left", no_wrap=True)
    return table


def print_table(table: Table, title: str = "") -> None:
    """To stdout."""
    out = make_console(stderr=False)
    if title:
        out.print(title, style="bold", markup=False)
    out.print(table)


def facts_of(file: str, measured: Target | torch.device) -> dict[str, Any]:
    """What the figures of a command (its ``__file__``) depend on: the device, of a target its dtype too."""
    facts: dict[str, Any] = {"command": f"python benchmarks/{Path(file).name} " + shlex.join(sys.argv[1:])}
    if isinstance(measured, Target):
        facts |= {"target": measured.describe(), "dtype": str(measured.dtype).removeprefix("torch.")}
        measured = measured.device
    return facts | {"device": device_name(measured), "versions": versions()}


def write_report(file: Path, facts: dict[str, Any], plot: Callable[[dict[str, Any], Path], None] | None = None) -> None:
    """Write figures, and their picture beside them, and say so."""
    write_json(file, facts)
    said = f"wrote {file}"
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        said += "; no plot: matplotlib is not installed"
    elif plot is not None:
        plot(facts, file.with_suffix(".png"))
        said += f" and {file.with_suffix('.png')}"
    console.print(said, markup=False, soft_wrap=True)


@contextmanager
def picture(path: Path, width: float, height: float, panels: int = 1, **options: Any) -> Iterator[list[Any]]:
    """The axes of a picture's panels, side by side; it is written when they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False, **options)
    for each in axes[0]:
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    yield list(axes[0])
    write_figure(figure, path)


def legend_beside(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
