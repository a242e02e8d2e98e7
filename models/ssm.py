"""Small speculative models (SSMs, SpecInfer, arXiv 2305.09781 §3): causal LMs with the target's tokenizer.

A folder of an ensemble has one part for each of them, ``ssm-0``, ``ssm-1``, …, each a complete ``transformers`` model.
An SSM may be made of layers of the target: it then has the target's embeddings and LM head, too.
"""

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.models.target import Target

_LAYER = re.compile(r"(.*?\.)(\d+)(\..*)")  # the first number in a parameter's name is that of its layer


def part_name(number: int) -> str:
    """The sub-folder of an ensemble's SSM."""
    return f"ssm-{number}"


def config_of_layers(config: Any, layers: Sequence[int]) -> Any:
    """A model's config with only some of its layers. Raises ValueError: it has no such layer."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    count = text.num_hidden_layers
    if not all(0 <= layer < count for layer in layers):
        raise ValueError(f"drafter.layers={list(layers)}: the target has layers 0 to {count - 1}")
    for name, value in text.to_dict().items():  # layer_types, no_rope_layers, …: an entry for each layer
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    return small


@torch.no_grad()
def model_of_layers(target: Target, layers: Sequence[int]) -> PreTrainedModel:
    """A model of some of the target's layers, in their order, with its embeddings, final norm and LM head: a copy in
    float32, on the target's device.
    Raises ValueError: the target has no such layer, or its weights cannot be copied, because they are quantised or
    offloaded. Under FSDP all processes call it together."""
    model: Any = type(target.model)(config_of_layers(target.model.config, layers))
    model = model.to(target.device, torch.float32)
    given = target.model.state_dict()
    for name, weight in model.state_dict().items():
        found = _LAYER.fullmatch(name)
        source = given.get(name if found is None else f"{found[1]}{layers[int(found[2])]}{found[3]}")
        if source is None or source.shape != weight.shape or source.is_meta or not source.is_floating_point():
            raise ValueError(
                f"target '{target.name}': its layers cannot be copied ('{name}' is missing, quantised or elsewhere); "
                "load it whole and unquantised, or name a small model as drafter.base"
            )
        weight.copy_(source.full_tensor() if isinstance(source, DTensor) else source)  # FSDP's: gathered by all
    if target.model.generation_config is not None:
        model.generation_config = copy.deepcopy(target.model.generation_config)
    return model


def size_of_layers(config: Any, layers: Sequence[int]) -> tuple[int, int]:
    """Parameters of a model of these layers: of the layers and the final norm; of the embeddings and the LM head, once
    if they are tied.
    Raises ValueError: there is no such layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of_layers(config, layers))
    ends = {model.get_output_embeddings().weight, model.get_input_embeddings().weight}
    return sum(p.numel() for p in model.parameters() if p not in ends), sum(p.numel() for p in ends)
