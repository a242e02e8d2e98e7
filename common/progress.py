"""Progress bar of every command; without a terminal a line now and then."""

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY = 10.0  # seconds between two lines where there is no terminal for a bar
REDRAW_EVERY = 0.1  # seconds; drawing can cost more than a step
KNOWN = 0.1  # share of the work that is done before a line estimates the remaining time


class ProgressBar:
    """Context manager around work of ``total`` steps; call it with the number of steps done.

    Args:
        console: where it is shown.
        start: steps that were done before, left out of the estimated time.
        disable: show nothing (all processes but one).
        transient: remove the bar from the terminal when the work is done.
    """

    def __init__(
        self,
        what: str,
        total: int,
        console: "Console",
        *,
        start: int = 0,
        disable: bool = False,
        transient: bool = False,
    ) -> None:
        self.what, self.total, self.start, self.disable, self.console = what, total, start, disable, console
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            console=console,
            transient=transient,
            disable=disable or not console.is_terminal,
        )
        self.task = self.bar.add_task(what, total=total, completed=start, note="")
        self.began = self.shown = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        if not self.console.is_terminal and not self.disable and self.total:
            self.console.print(f"{self.what} …", markup=False)
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, done: float, note: str = "") -> None:
        """Show that ``done`` of ``total`` steps are done (also parts of a step), with ``note`` beside the bar."""
        now = time.monotonic()
        if not self.bar.disable:
            if now - self.shown > REDRAW_EVERY or done >= self.total:
                self.bar.update(self.task, completed=done, note=note)
                self.shown = now
        elif not self.disable and (now - self.shown > LINE_EVERY or (note and done >= self.total)):
            done_here = done - self.start
            left = (now - self.began) / done_here * (self.total - done) if done_here else 0.0
            known = done_here >= KNOWN * (self.total - self.start)
            parts = [f"  {self.what} {int(done)}/{self.total}", note, f"{left:.0f} s left" if known else ""]
            self.console.print("  ".join(part for part in parts if part), markup=False)
            self.shown = now
