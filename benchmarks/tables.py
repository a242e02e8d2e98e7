"""Tables, pictures and files of figures of the measuring commands."""

import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from draftsmith.common.files import write_json
from draftsmith.inference.commands.terminal import console, make_console
from draftsmith.inference.measure.report import plain_texts, write_figure
from draftsmith.models.artifact import device_name, versions
from draftsmith.models.target import Target

GREY = "#8d95a3"  # of a plot's reference lines


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


def error_bars(axes: Any, points: Sequence[tuple[float, float, Sequence[float] | None]], **options: Any) -> None:
    """Plot (x, value, interval); a point without an interval has no bar."""
    bounds = [interval or (value, value) for _, value, interval in points]
    below = [max(0.0, value - low) for (_, value, _), (low, _) in zip(points, bounds, strict=True)]
    above = [max(0.0, high - value) for (_, value, _), (_, high) in zip(points, bounds, strict=True)]
    axes.errorbar([x for x, *_ in points], [value for _, value, _ in points], [below, above], **options)


@contextmanager
def picture(
    path: Path, width: float, height: float, panels: int = 1, legend_beside: bool = False, rows: int = 1, **options: Any
) -> Iterator[list[Any]]:
    """The axes of a picture's panels, side by side, row by row; it is written when they are drawn. ``legend_beside``:
    that of the first row's last panel, at its right."""
    from matplotlib.figure import Figure

    with plain_texts():
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, panels, squeeze=False, **options)
        for each in axes.flat:
            each.grid(alpha=0.3)
            each.spines[["top", "right"]].set_visible(False)
        yield list(axes.flat)
        if legend_beside:
            axes[0][-1].legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        write_figure(figure, path)
