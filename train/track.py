"""Experiment trackers beside ``metrics.jsonl``: Weights & Biases and TensorBoard. Neither can stop a run."""

import inspect
import os
import threading
import uuid
from pathlib import Path
from typing import Any

from draftsmith.common.command import first_line, make_console
from draftsmith.common.files import read_text, write_text
from draftsmith.common.sections import Track

WAIT = 30.0  # seconds that a tracker's network may take to answer, and again to take the last lines
console = make_console()


class Trackers:
    """The trackers of a recipe's ``track`` section; on the main process only."""

    def __init__(self, track: Track, folder: Path, config: dict[str, Any]) -> None:
        self.run: Any = None
        self.board: Any = None
        if track.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("track.tensorboard needs another package: pip install tensorboard") from None
            self.board = SummaryWriter(str(folder / "tensorboard"))
        if track.wandb:
            self._start_wandb(track, folder, config)

    def _start_wandb(self, track: Track, folder: Path, config: dict[str, Any]) -> None:
        import wandb  # takes a second

        note = folder / "wandb_id"  # a resumed run goes on in the same chart
        identity = (read_text(note).strip() if note.exists() else "") or uuid.uuid4().hex[:8]
        write_text(note, identity)
        given: dict[str, Any] = {"project": track.project, "name": folder.name, "id": identity, "resume": "allow"}
        given |= {"dir": str(folder), "config": config}
        settings = wandb.Settings(init_timeout=WAIT, silent=True, console="off", x_disable_stats=True)
        offline = track.offline or os.environ.get("WANDB_MODE") == "offline"
        send = f"wandb sync {folder}/wandb/offline-run-*"
        try:
            can_say = "prompt" in inspect.signature(wandb.login).parameters  # without asking
            if not offline and can_say and not wandb.login(prompt=False, verify=False):  # init would ask, and wait
                console.print(f"  no login to wandb; writing offline, send it later: wandb login, {send}")
                offline = True
            self.run = wandb.init(**given, mode="offline" if offline else "online", settings=settings)
        except Exception as error:  # wandb and its transport raise a dozen unrelated types
            console.print(
                f"  wandb does not answer ({first_line(error, 160)}); writing offline, send it later with: {send}"
            )
            wandb.teardown()
            self.run = wandb.init(**given, mode="offline", settings=settings)

    def log(self, line: dict[str, Any]) -> None:
        """Send the numbers of a line of ``metrics.jsonl``."""
        step = int(line["step"])
        numbers = {k: v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
        try:
            if self.run is not None:
                self.run.log(numbers, step=step)
        except Exception as error:
            console.print(f"  wandb takes no more lines ({first_line(error, 160)})")
            self.run = None
        try:
            for name, value in numbers.items() if self.board is not None else ():
                self.board.add_scalar(name, value, step)
        except Exception as error:  # what its thread met when it wrote the lines before
            console.print(f"  TensorBoard takes no more lines ({first_line(error, 160)})")
            self.board = None

    def close(self) -> None:
        """Send the remaining lines; stop waiting for a network that hangs after ``WAIT`` seconds."""
        if self.board is not None:
            try:
                self.board.close()
            except Exception as error:
                console.print(f"  TensorBoard did not take the last lines ({first_line(error, 160)})")
        if self.run is None:
            return
        ending = threading.Thread(target=self.run.finish, daemon=True)
        ending.start()
        ending.join(WAIT)
        if ending.is_alive():
            console.print(f"  wandb did not take the last lines within {WAIT:.0f} s; send them with: wandb sync")
