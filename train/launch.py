"""What a training command is launched with: processes, devices, precision."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs

from draftsmith.common.command import available_cores, counted, make_console
from draftsmith.common.sections import Precision, R, TargetSection
from draftsmith.models import precision
from draftsmith.models.files.locate import locate
from draftsmith.models.files.weights import stored_dtype
from draftsmith.train import checkpoint, sharded
from draftsmith.train.machine import Machine

console = make_console()
CPU_SEQUENCES = 4  # that it runs at once on a CPU, at most


def command_line(script: str) -> str:
    """The command that is running, a script in train/, with its launcher."""
    launcher = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "python"  # what its launcher sets
    launcher = "torchrun" if launcher == "python" and "TORCHELASTIC_RUN_ID" in os.environ else launcher
    return f"{launcher} train/{script}.py {shlex.join(sys.argv[1:])}"


def own_cores() -> int:
    """CPU cores for each process that was launched on this machine."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def make_accelerator(wanted: Precision, seconds: float = 1800) -> Accelerator:
    """An ``Accelerator`` that really runs as many processes as were launched, which wait for each other so long."""
    # accelerate's launcher sets OMP_NUM_THREADS=1, which halves the speed of one process on two cores.
    torch.set_num_threads(wanted.threads or own_cores())
    timeout = timedelta(seconds=seconds)
    cpu = not torch.cuda.is_available()
    if cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which others import, would look for one and warn
    if cpu and sharded.strategy() in ("zero2", "zero3"):
        sharded.leave_out_shared_memory()
    if cpu and "LOCAL_RANK" in os.environ:
        PartialState(cpu=True, timeout=timeout)  # without this, accelerate on CPU silently runs independent copies
    # Precision is the recipe's (autocast below); DeepSpeed's own would make bfloat16 of the weights that train.
    # With cpu=True accelerate would leave DeepSpeed out; the processes are on the CPU already.
    with sharded.hidden_from_accelerate():
        accelerator = Accelerator(
            mixed_precision="no",
            cpu=cpu and sharded.strategy() != "zero2",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched but accelerate sees {accelerator.num_processes}; on CPU launch with "
            "--multi_gpu --num_processes N (sic) or torchrun, not --cpu"
        )
    console.quiet = not accelerator.is_main_process  # each line once
    return accelerator


def with_precision(recipe: R, accelerator: Accelerator, resume: bool = False) -> R:
    """The recipe with what ``precision.autocast: auto`` and ``target.dtype: auto`` are on this device, printed
    in a line, with a warning where that is slow here.

    Args:
        resume: ``auto`` is what the run's newest checkpoint was trained with.

    Raises:
        FileNotFoundError, ValueError: on a GPU, the target's config cannot be read.
    """
    newest = checkpoint.checkpoints(recipe.run.folder / "checkpoints")[-1:] if resume else []
    began = checkpoint.read_state(newest[0]) if newest else {}
    device, target = accelerator.device, getattr(recipe, "target", None)  # not every recipe has one
    cast = precision.choose_autocast(recipe.precision.autocast, device, began.get("autocast"))
    dtype, update = precision.Choice("float32", ""), {}
    if target is not None:
        dtype = dtype_of(target, device, began.get("dtype"))
        update["target"] = target.model_copy(update={"dtype": dtype.value})
    for line in precision.describe(device, dtype, cast):
        console.print(line, style="yellow" if line.startswith("warning") else None)
    update["precision"] = recipe.precision.model_copy(update={"autocast": cast.value})
    return recipe.model_copy(update=update)


def dtype_of(
    target: TargetSection, device: torch.device, began: str | None = None, weights: int = 0
) -> precision.Choice:
    """:func:`draftsmith.models.precision.choose_dtype` for a recipe's target, by its config alone."""

    def stored() -> str:
        return stored_dtype(locate(target.name, target.revision, weights=False).path)

    quantized = target.quantize != "none"
    return precision.choose_dtype(target.dtype, device, stored, quantized=quantized, began=began, weights=weights)


def with_micro(recipe: R, plans: Callable[[R], Sequence[Any]], machine: Machine) -> R:
    """The recipe with what ``batch.micro: auto`` is on a machine, printed in a line for each stage: of the numbers that
    divide a process's sequences of a step, the largest whose plan fits into a GPU's memory, be it free or not, so that
    all processes find the same; on a CPU the largest up to :data:`CPU_SEQUENCES`.

    Args:
        plans: of a training script, the :class:`draftsmith.train.dry_run.Plan` of each stage.
    """
    for place, stage in enumerate(recipe.stages):
        if stage.batch.micro != "auto":
            continue
        share, micro = stage.batch.sequences // machine.processes, 1
        for micro in (size for size in range(share, 0, -1) if share % size == 0):
            batch = stage.batch.model_copy(update={"micro": micro})
            stages = [*recipe.stages[:place], stage.model_copy(update={"batch": batch}), *recipe.stages[place + 1 :]]
            recipe = recipe.model_copy(update={"stages": stages})
            if machine.room is None:
                fits = micro <= CPU_SEQUENCES
            else:
                fits = sum(plans(recipe)[place].parts(machine).values()) <= machine.room
            if fits:
                break
        console.print(
            f"{stage.name}: batch.micro: auto is {micro} here; a step is {share // micro} times "
            f"{counted(micro, 'sequence')} on each of {counted(machine.processes, 'process')}"
        )
    return recipe
