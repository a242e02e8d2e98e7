"""A check of prompts before torch is imported."""

import os
from pathlib import Path


def check_prompts(path: Path | None) -> None:
    """Read prompts before torch is imported, so that what is wrong with them is said at once. None and pipes, which can
    be read only once, are left to the command."""
    if path is not None and (path.is_file() or path.is_dir() or not os.path.lexists(path)):
        from draftsmith.inference.commands.prompts import read_prompts  # --help needs none of it

        read_prompts(path)
