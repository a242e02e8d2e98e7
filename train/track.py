"""Experiment trackers beside ``metrics.jsonl``: Weights & Biases and TensorBoard. Neither can stop a run."""

import os
import re
import threading
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console

from draftsmith.train.recipe import Track

WAIT = 30.0  # seconds that a tracker's network may take to answer, and again to take the last lines
console = Console(highlight=False, soft_wrap=True)


class Trackers:
    """Those of a recipe's ``track`` section; on the main process only.

    Raises:
        ValueError: a package is missing.
    """

    def __init__(self, track: Track, folder: Path, config: dict[str, Any]) -> None:
        self.run: Any = None
        self.board: Any = None
        if track.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("track.tensorboard needs a package more: pip install tensorboard") from None
            self.board = SummaryWriter(str(folder / "tensorboard"))
        if track.wandb:
            self._start_wandb(track, folder, config)

    def _start_wandb(self, track: Track, folder: Path, config: dict[str, Any]) -> None:
        import wandb  # takes a second

        note = folder / "wandb_id"  # a resumed run goes on in the same chart
        identity = note.read_text().strip() if note.exists() else uuid.uuid4().hex[:8]
        note.write_text(identity)
        given: dict[str, Any] = {
            "project": track.project, "name": folder.name, "id": identity, "resume": "allow", "dir": str(folder),
            "config": config,
        }  # fmt: skip
        settings = wandb.Settings(init_timeout=WAIT, silent=True, console="off", x_disable_stats=True)
        offline = track.offline or os.environ.get("WANDB_MODE") == "offline"
        try:
            self.run = wandb.init(**given, mode="offline" if offline else "online", settings=settings)
        except Exception as error:  # wandb and its transport raise a dozen unrelated types
            reason = re.sub(r"\s+", " ", str(error)).strip()[:160]
            console.print(
                f"  wandb does not answer ({reason}); writing offline, send it later with: wandb sync {folder}"
            )
            wandb.teardown()
            self.run = wandb.init(**given, mode="offline", settings=settings)

    def log(self, line: dict[str, Any]) -> None:
        """One line of ``metrics.jsonl``."""
        step = int(line["step"])
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
        if self.run is not None:
            self.run.log(numbers, step=step)
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Hand over the rest; a network that hangs is left after ``WAIT`` seconds."""
        if self.board is not None:
            self.board.close()
        if self.run is None:
            return
        ending = threading.Thread(target=self.run.finish, daemon=True)
        ending.start()
        ending.join(WAIT)
        if ending.is_alive():
            console.print(f"  wandb did not take the last lines within {WAIT:.0f} s; send them with: wandb sync")
