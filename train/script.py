"""The command of a training script: a script in train/ hands its :class:`Script` to :func:`run_script`."""

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from draftsmith.common.recipe import read_recipe
from draftsmith.common.sections import DrafterRecipe, R
from draftsmith.train import dry_run, folders, sharded
from draftsmith.train.launch import command_line, console, make_accelerator, with_micro, with_precision
from draftsmith.train.loop import micro_batch
from draftsmith.train.machine import Machine
from draftsmith.train.page import TrainingPage
from draftsmith.train.run import Run, check_init_from
from draftsmith.train.tiny import tiny, write_target


@dataclass(frozen=True)
class Script(Generic[R]):
    """A training script.

    name: of its file in train/; its drafters' ``drafter_type``.
    train: trains a run, from the target to the export.
    plans: what each stage costs, for --dry-run.
    """

    name: str
    recipe: type[R]
    train: Callable[[Run[R]], None]
    plans: Callable[[R], list[dry_run.Plan]]


def run_script(script: Script[R], parser: argparse.ArgumentParser, recipe: R | None = None) -> None:
    """The command of a training script. ``recipe``: what ``before_imports`` has read."""
    args = parser.parse_intermixed_args()
    command = command_line(script.name)
    recipe = recipe or read_recipe(args.recipe, script.recipe, args.overrides)
    accelerator = make_accelerator(recipe.precision, recipe.launch.timeout)
    if args.tiny:
        recipe = tiny(recipe, processes=accelerator.num_processes)
    main_process, small = accelerator.is_main_process, args.tiny or args.dry_run
    if args.machine and not args.dry_run:
        raise ValueError(f"--as {args.machine}: it is for --dry-run, which computes what these GPUs would take")
    for stage in recipe.stages:
        micro_batch(stage, accelerator.num_processes)
    _check_strategy(recipe)
    if args.dry_run:
        folders.check_data(recipe)
        if isinstance(recipe, DrafterRecipe) and recipe.init_from:
            check_init_from(recipe, script.name)
        if main_process:
            dry_run.show(recipe, script.plans, accelerator, args.verbose, args.machine)
            console.print("now the same recipe at toy size, with a random target of the family …")
        recipe = tiny(recipe, "dry-run", accelerator.num_processes)
    folders.check(recipe, recipe.stages)
    folder = recipe.run.folder
    above = [one for one in folder.parents if not one.exists()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(folders.held(folder, script.name, main_process))
        if args.dry_run and main_process:
            stack.callback(dry_run.delete, folder, above)
        with accelerator.main_process_first():
            resume = folders.begin(folder, args.resume and not small, args.restart or small, main_process)
            if resume:
                folders.check_unchanged(recipe)
            elif args.resume and main_process and not small:
                console.print(f"{folder}: there is no checkpoint to go on from; the run begins")
            if small and main_process and isinstance(recipe, DrafterRecipe):
                write_target(recipe.target)
        recipe = with_micro(with_precision(recipe, accelerator, resume), script.plans, Machine.here())
        run = Run(recipe, script.name, accelerator, resume, command, small, args.dry_run)
        if main_process and not args.dry_run:
            run.page = TrainingPage(run)
        try:
            script.train(run)
        except (Exception, KeyboardInterrupt) as error:
            if run.page and run.page.stage:
                run.page.write("stopped" if isinstance(error, KeyboardInterrupt) else "failed", error)
            raise
        finally:
            if run.trackers:
                run.trackers.close()
        if run.page:
            run.page.write("finished")
        if args.dry_run and main_process:
            console.print(
                f"the tiny form of this recipe trained, {dry_run.decode_a_little(folder)}; its run is deleted"
            )
    if main_process and isinstance(recipe, DrafterRecipe) and recipe.export.push_to_hub:
        run.publish()  # the folder is no longer held: calibrate.py works in it


def _check_strategy(recipe: R) -> None:  # type: ignore[misc]
    """Refuse a recipe that the launcher's strategy, ZeRO-2, ZeRO-3 or FSDP, cannot train."""
    if sharded.strategy() == "zero2" and any(stage.optim.name == "muon" for stage in recipe.stages):
        raise ValueError("optim.name=muon: ZeRO-2 cuts matrices into parts; use adamw, or launch without ZeRO-2")
    if not sharded.spreads():
        return
    if not isinstance(recipe, DrafterRecipe):
        raise ValueError(
            "this command trains every weight, and ZeRO-3 and FSDP spread frozen ones; launch it with --multi_gpu, or "
            "with recipes/accelerate/zero2.yaml and optim.name=adamw"
        )
    if recipe.target.features:
        raise ValueError(
            "target.features: a server has the target's layers, so that there is nothing to spread; launch with "
            "--multi_gpu"
        )
    if recipe.target.quantize != "none" or recipe.precision.compile:
        raise ValueError(
            "a target that is spread over processes is not quantised or compiled: target.quantize=none, "
            "precision.compile=false"
        )
