"""The folder of a run: one command at a time works in it, and only in one of its own kind, or an empty one.

``.run`` says which command's run it is; ``.lock`` is held by the command that works in it.
"""

import contextlib
import glob
import importlib.util
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import Timeout
from pydantic import TypeAdapter

from draftsmith.common.command import first_line
from draftsmith.common.files import check_folder, json_object, locked, read_text, write_json
from draftsmith.common.recipe import Section, short
from draftsmith.common.sections import DrafterRecipe, Recipe, Stage
from draftsmith.data.tokenized import read_template
from draftsmith.models.artifact import part_folders
from draftsmith.train import checkpoint, sharded

_MARK, _LOCK = ".run", ".lock"
_OWN = {_LOCK, _MARK, _MARK + ".tmp"}  # a folder that holds only these is empty
_COPIED = {"answers", "features"}  # may be copied from another run before; in each sub-folder is what was asked for
# What --restart deletes.
_FILES = (
    *("metrics.jsonl", "training.html", "model.safetensors", "config.json", "tree.json", "wandb_id"),
    *("clusters.json", "clusters.png", "mask_token.json"),
)
# And a drafter's parts.
_FOLDERS = ("features", "streams", "held_out", "draft_vocab", "marks", "tensorboard", "wandb", "clusters", "rollouts")


@contextmanager
def held(folder: Path, kind: str, main: bool = True) -> Iterator[None]:
    """Inside, no other command works in this run's folder; it is made and marked if need be.

    Args:
        main: this is the process that changes the folder; the others look at nothing.

    Raises:
        ValueError: it holds something else than a run of this kind, nothing can be written there, or another command
            works in it.
        OSError: it cannot be read.
    """
    if not main:
        yield
        return
    _check(folder, kind)
    check_folder("the run's folder", folder)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / _LOCK, wait=False))
        except Timeout:
            raise ValueError(
                f"{folder}: another command is working in this run; wait for it, or set run.name"
            ) from None
        _check(folder, kind)  # what came in between
        if not (folder / _MARK).exists():
            write_json(folder / _MARK, {"kind": kind})
        yield


def _check(folder: Path, kind: str) -> None:
    try:
        copied = {name for name in _COPIED if all((each / "asked.json").is_file() for each in folder.glob(f"{name}/*"))}
        there = sorted(set(os.listdir(folder)) - _OWN - copied)
    except FileNotFoundError:
        return
    found = str(json_object(folder / _MARK, "run's mark").get("kind")) if (folder / _MARK).exists() else None
    if found == kind or (not there and found is None):
        return
    if found is None:
        files = ", ".join(there[:3]) + (", …" if len(there) > 3 else "")
        what = f"is no run but holds other things ({files})"
    else:
        what = f"is a run of train/{found}.py"
    raise ValueError(
        f"{folder}: {what}; train/{kind}.py writes only into an empty folder or a run of its own: set run.name"
    )


def check_data(recipe: Recipe) -> None:
    """Check that the data files and the chat template that a recipe names exist. No data is read."""
    corpus = getattr(getattr(recipe, "drafter", None), "corpus", None) or []  # not every recipe has one
    for source in (*recipe.data.train, *recipe.data.validation, *corpus):
        if source.is_file and not Path(source.source).is_file() and not glob.glob(source.source):
            raise FileNotFoundError(f"data source '{source.source}': there is no such file")
    read_template(recipe.data.template)


def check(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Check that what a recipe names exists: data files, chat template, packages, a login for its upload. No data is
    read."""
    check_data(recipe)
    quantized = getattr(getattr(recipe, "target", None), "quantize", "none") != "none"  # not every recipe has a target
    wanted = {
        "tensorboard": recipe.track.tensorboard and "track.tensorboard",
        "wandb": recipe.track.wandb and "track.wandb",
        "bitsandbytes": (any(stage.optim.eight_bit for stage in stages) and "optim.eight_bit")
        or (quantized and "target.quantize"),
    }
    for package, field in wanted.items():
        if field and importlib.util.find_spec(package) is None:
            raise ValueError(f"{field} needs another package: pip install {package}")
    repository = recipe.export.push_to_hub if isinstance(recipe, DrafterRecipe) else None
    if not repository:
        return
    from huggingface_hub import constants, get_token  # a run that pushes nothing does without

    if constants.HF_HUB_OFFLINE or get_token() is None:
        what = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "nobody is logged in to the Hub here"
        do = "unset it" if constants.HF_HUB_OFFLINE else "run hf auth login"
        raise ValueError(f"export.push_to_hub={repository}: {what}; {do}, or leave the upload out")


def check_room(folder: Path, parameters: int, recipe: Recipe, stage: Stage) -> None:
    """Refuse a run whose checkpoints cannot fit on the disk, before anything slow.

    Args:
        parameters: how many train, in float32.
    """
    moments = 2 if stage.optim.eight_bit else 8  # bytes of a parameter, at most
    saved = recipe.checkpoint.keep + 1  # the oldest goes last
    if stage.steps is not None:  # epochs are not counted yet
        saved = min(saved, -(-stage.steps // recipe.checkpoint.every))
    wanted = parameters * ((4 + moments) * saved + 4 * (saved + 1))  # with the best weights of each time, and the last
    there = sum(file.stat().st_size for file in folder.glob("checkpoints/step-*/*"))  # they are replaced
    free = shutil.disk_usage(folder).free
    if wanted > free + there:
        raise ValueError(
            f"{folder}: {saved} checkpoints of {parameters / 1e6:,.0f} M weights, with optimizer and best ones, take "
            f"{wanted / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free; free some, lower checkpoint.keep, or set "
            "run.output_dir"
        )


def begin(folder: Path, resume: bool, restart: bool, main: bool = True) -> bool:
    """Whether there is a checkpoint to go on from, in a folder that :func:`held` holds.

    Args:
        restart: delete the run in it.
        main: as for :func:`held`.
    """
    if resume and restart:
        raise ValueError("--resume and --restart exclude each other; pass one")
    there = checkpoint.checkpoints(folder / "checkpoints")
    if not main:
        return resume and bool(there)
    finished = any((folder / name).exists() for name in ("config.json", "model.safetensors"))
    if (there or finished) and not (resume or restart):
        what = f"an unfinished run at {there[-1].name}" if there and not finished else "a finished run"
        raise ValueError(f"{folder}: holds {what}; pass --resume to go on, --restart to begin anew, or set run.name")
    if resume and finished and not there:
        raise ValueError(f"{folder}: holds a finished run without checkpoints; pass --restart to begin anew")
    if restart:
        _forget(folder)
    elif not there:  # what a run that ended before its first checkpoint has left: lines of steps that count no longer
        for name in ("metrics.jsonl", "training.html", "wandb_id"):
            (folder / name).unlink(missing_ok=True)
        for name in ("streams", "tensorboard", "wandb"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return bool(there) and not restart


def check_unchanged(recipe: Recipe) -> None:
    """Refuse to go on with another drafter or model, or on other data, than the run in the folder began with."""
    file = recipe.run.folder / "recipe.yaml"
    try:
        began = yaml.safe_load(read_text(file, "recipe")) if file.exists() else None
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: damaged ({first_line(error)}); --restart begins anew") from None
    for name in ("data", "drafter", "model", "lookahead", "boost"):
        if not isinstance(began, dict) or name not in began or not hasattr(recipe, name):
            continue
        for field, *values in _changed(began[name], getattr(recipe, name), name):
            lines = (yaml.safe_dump(value, default_flow_style=True, width=math.inf) for value in values)
            was, is_now = (short(line.split("\n")[0], 200) for line in lines)
            raise ValueError(
                f"{recipe.run.folder}: it began with {field}={was}, not {is_now}; set it back, or --restart"
            )


def _changed(before: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Names (``a.b`` for field b of section a, ``a.0`` for the first of a list) with the values before and now, of what
    has changed. A field that a section did not have, in an older version, had its default; all else is compared as a
    whole."""
    if isinstance(now, Section) and isinstance(before, dict):
        for field, info in sorted(type(now).model_fields.items()):
            if (field not in before and info.is_required()) or field in getattr(now, "may_change", ()):
                continue
            was = before[field] if field in before else _dumped(info.get_default(call_default_factory=True))
            yield from _changed(was, getattr(now, field), f"{name}.{field}")
    elif isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        for place, each in enumerate(zip(before, now, strict=True)):
            yield from _changed(*each, f"{name}.{place}")
    elif _dumped(now) != before:
        yield name, before, _dumped(now)


def _dumped(value: Any) -> Any:
    """As a recipe.yaml has it."""
    return TypeAdapter(Any).dump_python(value, mode="json")


def _forget(folder: Path) -> None:
    """Delete what a run writes into its folder, nothing else, and nothing outside of it."""
    written = (*_FOLDERS, *part_folders(folder))
    for name in ("checkpoints", "answers", *written):
        if (folder / name).is_symlink():
            raise ValueError(
                f"{folder / name}: a link; --restart deletes nothing outside of the run's folder. Remove the link, or "
                "set run.name"
            )
        if (folder / name).is_dir() and not os.access(
            folder / name, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
        ):
            raise ValueError(f"{folder / name}: cannot be emptied (no right to write there); nothing was deleted")
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    checkpoint.clear(folder / "checkpoints")
    for name in written:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    if not sharded.spreads():  # a spread target could not give the answers again
        for answers in folder.glob("answers/*"):
            if not answers.is_symlink():
                (answers / "model.safetensors").unlink(missing_ok=True)
