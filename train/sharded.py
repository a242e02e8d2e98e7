"""DeepSpeed ZeRO: what it changes about the training loop. Gradients and moments are spread over the processes; the
weights stay whole on each (ZeRO-2), so that evaluation and export are those of any other run.

The launcher says so: ``accelerate launch --config_file recipes/accelerate/zero2.yaml …``. DeepSpeed's optimizer state
goes into a folder of its own beside a checkpoint; it can be read again under the same number of processes only.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType


def wanted() -> bool:
    """Whether the launcher asked for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false") == "true"


def active(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def configure(accelerator: Accelerator, micro: int, clip: float) -> None:
    """Tell DeepSpeed what the recipe says; before anything is prepared.

    Raises:
        ValueError: a stage of ZeRO that is not supported.
    """
    plugin: Any = accelerator.state.deepspeed_plugin
    if plugin.zero_stage not in (1, 2):
        raise ValueError(f"ZeRO stage {plugin.zero_stage}: this version trains with stages 1 and 2")
    plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,  # the loop says when a step is whole
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,  # torch's own, by the recipe
    }


def _folder(checkpoints: Path) -> Path:
    return checkpoints / "deepspeed"


def save(engine: Any, checkpoints: Path, step: int, keep: int) -> None:
    """``checkpoints/deepspeed/step-N``, by all processes, before the checkpoint of that step."""
    folder = _folder(checkpoints)
    engine.save_checkpoint(str(folder), tag=f"step-{step}", save_latest=False, exclude_frozen_parameters=True)
    if engine.global_rank == 0:
        there = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
        for old in there[: -keep - 1]:
            shutil.rmtree(old)


def load(engine: Any, checkpoints: Path, step: int, processes: int) -> None:
    """The optimizer state of a step.

    Raises:
        ValueError: there is none, or it was written by another number of processes.
    """
    folder = _folder(checkpoints) / f"step-{step}"
    parts = len(list(folder.glob("*optim_states.pt")))
    if parts != processes:
        found = f"has optimizer states of {parts} processes, not of {processes}" if parts else "is missing"
        raise ValueError(
            f"{folder} {found}; resume with the launch configuration the run was begun with, or begin another run with "
            "init_from=this one's folder"
        )
    engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=False)
