"""ZeRO-2, ZeRO-3 and FSDP: strategies for several devices, chosen by the launch configuration.

    ZeRO-2        DeepSpeed runs the optimizer: gradients and moments of what trains are spread over the processes.
    ZeRO-3, FSDP  The frozen target is spread: each process holds a part of every layer, and a layer is whole only while
                  it runs. Heads and adapters are small beside it; they are whole on every process and train as under
                  plain data parallelism, so a checkpoint is the same under any number of processes and any strategy.

The launcher says which: ``accelerate launch --config_file recipes/accelerate/zero3.yaml …``. Under ZeRO-2 the
optimizer's state goes into a folder of its own beside a checkpoint; another strategy, or another number of processes,
continues from the weights and begins the optimizer anew.
"""

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, PreTrainedModel

from draftsmith.models.pretrained import from_pretrained, quantization_of, without_weights
from draftsmith.models.target import Loader

_LAUNCHED = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
_engines: list[Any] = []  # DeepSpeed's: at their end they would take their hooks off the target


def _requested(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


@cache
def _plugin() -> DeepSpeedPlugin:
    return DeepSpeedPlugin()  # it reads what the launcher left in the environment


def _zero(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    """The configuration's section, without what another trainer would have filled in."""
    return {key: value for key, value in plugin.deepspeed_config["zero_optimization"].items() if value != "auto"}


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from compiling collectives of its own for CPUs, which takes about a minute in each environment;
    gloo's serve as well."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def strategy() -> Literal["none", "zero2", "zero3", "fsdp"]:
    """The strategy in the launch configuration."""
    if _requested("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2" or _requested("FSDP_OFFLOAD_PARAMS"):
            raise ValueError(
                "the launch configuration asks for FSDP 1 or for offloading; set fsdp_version: 2 and "
                "fsdp_offload_params: false (offloading: recipes/accelerate/zero3.yaml)"
            )
        return "fsdp"
    if not _requested("ACCELERATE_USE_DEEPSPEED"):
        return "none"
    stage = _plugin().zero_stage
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {stage}: use 1, 2 or 3")
    return "zero3" if stage == 3 else "zero2"


def refuse_zero3(what: str) -> None:
    """Raise a ValueError under ZeRO-3, which would spread ``what``, too."""
    if strategy() == "zero3":
        raise ValueError(f"ZeRO-3 spreads {what}; FSDP does not: launch with recipes/accelerate/fsdp.yaml")


def spreads() -> bool:
    """Whether the target is spread over the processes."""
    return strategy() in ("zero3", "fsdp")


@contextmanager
def hidden_from_accelerate() -> Iterator[None]:
    """Inside, accelerate takes a launch that spreads the target for plain data parallelism, and divides no loss."""
    kept = {name: os.environ.pop(name) for name in _LAUNCHED if spreads() and name in os.environ}
    try:
        yield
    finally:
        os.environ |= kept


# ---- ZeRO-3 and FSDP: a frozen target in parts


def _of_first(make: Callable[[], Any]) -> Any:
    """What the first process makes, on all of them."""
    made = [make() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(made, 0)
    return made[0]


@contextmanager
def placing(accelerator: Accelerator, dtype: str) -> Iterator[Loader | None]:
    """Inside, a target is loaded in parts if it is to be spread; yields what :func:`load_target` takes as ``loader``
    (None: nothing is spread).

    Args:
        dtype: of the target's weights, ``float32``, ``bfloat16`` or ``float16``.
    """
    launched = strategy()
    if launched == "fsdp" and accelerator.num_processes > 1:
        yield Loader(partial(_fully_shard, device=accelerator.device), _of_first)
    elif launched == "zero3":
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": float("inf"),
            "zero_optimization": _zero(_plugin()),
            "bf16": {"enabled": dtype == "bfloat16"},
            "fp16": {"enabled": dtype == "float16"},
        }
        alive = HfDeepSpeedConfig(config)  # while it lives, transformers loads each weight in parts
        yield Loader(lambda folder, options: _zero_3(from_pretrained(folder, options), config), _of_first)
        del alive
    else:
        yield None


def _fully_shard(folder: Path, options: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """The decoder layers in parts; embeddings, the last norm and the LM head whole on every process.

    Only the first process reads the weights; the others get theirs from it, one tensor at a time."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    if quantization_of(folder):
        raise ValueError(
            f"{folder}: its weights are stored quantised, and FSDP spreads none such; name the model that was "
            "quantised, or let a server run it (target.features)"
        )
    first = torch.distributed.get_rank() == 0
    with hidden_from_accelerate():  # else transformers might leave weights out
        stored = from_pretrained(folder, options).state_dict() if first else {}
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options["trust_remote_code"])
        model = without_weights(folder, config, options)
    model.eval().requires_grad_(False)
    decoder: nn.Module = model.get_decoder()
    layers = [module for module in decoder.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if not layers:
        raise ValueError(f"FSDP: transformers does not say what the layers of a {type(model).__name__} are; use ZeRO-3")
    other = [name for name, weight in model.state_dict().items() if first and stored[name].dtype != weight.dtype]
    if other:
        raise ValueError(
            f"FSDP: a {type(model).__name__} keeps some weights in another dtype than the rest ({other[0]}); set "
            "target.dtype=float32, or use ZeRO-3"
        )
    mesh = _mesh(device, sum(parameter.nbytes for layer in layers for parameter in layer.parameters()))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    parts = {parameter for layer in layers for parameter in layer.parameters()}
    # The decoder as their root lets one layer's gathering overlap the work of the one before.
    fully_shard(decoder, mesh=mesh, ignored_params={p for p in decoder.parameters() if p not in parts})
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    set_model_state_dict(model, stored, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    model.tie_weights()  # embeddings and LM head were made apart
    return model


def _mesh(device: torch.device, weights: int) -> DeviceMesh:
    """The processes that share a layer, which weigh ``weights`` bytes in all: those of one node, so that gathering a
    layer stays inside it, and each node has all layers; all processes where a node's share would take more than half
    of a GPU, or where nodes have one process or different numbers of them."""
    processes, local = torch.distributed.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    sizes = [0] * processes
    torch.distributed.all_gather_object(sizes, local)
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
    if set(sizes) != {local} or local in (1, processes) or weights / local > room / 2:
        return init_device_mesh(device.type, (processes,))
    return init_device_mesh(device.type, (processes // local, local), mesh_dim_names=("node", "process"))


def _zero_3(model: PreTrainedModel, config: dict[str, Any]) -> PreTrainedModel:
    """The decoder in parts; the LM head whole on every process, because heads are made from it and run through it."""
    import deepspeed

    model.eval().requires_grad_(False)
    lm_head = model.get_output_embeddings()
    for name, parameter in list(lm_head.named_parameters(recurse=False)):
        with deepspeed.zero.GatheredParameters([parameter]):
            setattr(lm_head, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    engine, *_ = deepspeed.initialize(model=model.get_decoder(), config=config)
    _engines.append(engine)
    return model


def size(parameter: nn.Parameter) -> int:
    """The number of a parameter's elements, all processes' parts together."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


# ---- the training loop


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer, micro: int, clip: float
) -> tuple[Any, Any]:
    """Module and optimizer as they train under the launcher's strategy."""
    launched = strategy()
    if launched == "zero2":
        plugin: Any = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": micro,
            "train_batch_size": micro * accelerator.num_processes,  # accelerate fills in the first stage's
            "gradient_accumulation_steps": 1,  # the loop says when a step is whole
            "gradient_clipping": clip,
            "zero_allow_untested_optimizer": True,  # torch's own, by the recipe
            "bf16": {"enabled": False},  # precision is the recipe's too
            "fp16": {"enabled": False},
            "zero_optimization": _zero(plugin),
        }
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    frozen = [name for name, tensor in named if not tensor.requires_grad]
    # What does not train is the same on all processes: it is neither broadcast nor are its buffers, before each pass.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, frozen)
    if not spreads():
        return accelerator.prepare(module, optimizer)
    if accelerator.num_processes == 1:
        return module, accelerator.prepare(optimizer)
    return DistributedDataParallel(module), accelerator.prepare(optimizer)


# ---- ZeRO-2: the optimizer's state


def _folder(checkpoints: Path) -> Path:
    return checkpoints / "deepspeed"


def save(engine: Any, checkpoints: Path, step: int, keep: int) -> None:
    """Write ``checkpoints/deepspeed/step-N``, by all processes, before the checkpoint of that step."""
    folder = _folder(checkpoints)
    if engine.global_rank == 0:
        by_step = {int(path.name.removeprefix("step-")): path for path in folder.glob("step-*")}
        before = sorted(number for number in by_step if number < step)
        for number in set(by_step) - set(before[-keep:]):  # also what another run, or a killed one, left
            shutil.rmtree(by_step[number])
    torch.distributed.barrier()
    try:
        engine.save_checkpoint(str(folder), tag=f"step-{step}", save_latest=False, exclude_frozen_parameters=True)
    except RuntimeError as error:
        raise OSError(errno.EIO, f"DeepSpeed could not write its checkpoint ({error})", str(folder)) from None


def forget(checkpoints: Path) -> None:
    """Delete the optimizer's states, those of an earlier run or strategy."""
    shutil.rmtree(_folder(checkpoints), ignore_errors=True)


def load(engine: Any, checkpoints: Path, step: int, processes: int) -> bool:
    """Load the optimizer's state of a step; False if there is none, or it is of another number of processes."""
    folder = _folder(checkpoints) / f"step-{step}"
    if len(list(folder.glob("*optim_states.pt"))) != processes:
        return False
    engine.load_checkpoint(str(folder.parent), tag=folder.name, load_module_strict=False)
    return True
