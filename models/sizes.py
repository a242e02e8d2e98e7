"""Bytes of a model and of its keys and values, by its config and dtype: none of its weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from draftsmith.models.files.locate import ModelFolder, locate
from draftsmith.models.files.weights import check_safetensors, stored_dtype
from draftsmith.models.precision import choose_dtype
from draftsmith.models.pretrained import check_shapes
from draftsmith.models.target import cache_argument, context_of

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "8bit": 1.0, "4bit": 0.5}  # of a parameter

_MOST_LAYERS = 1000  # where no weights are at hand: the model of a damaged config would not end being made


def kv_bytes(shapes: Sequence[tuple[int, int]], itemsize: int) -> list[int]:
    """Bytes of a token's keys and values in each layer. ``shapes``: (key/value heads, head width) of each."""
    return [2 * heads * width * itemsize for heads, width in shapes]


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's weights, and by layer those of a token's keys and values; its ``Target.context``."""

    weights: int
    layers: list[int]
    context: int

    @property
    def token(self) -> int:
        return sum(self.layers)


def sizes_of(
    name: str | ModelFolder, dtype: str = "auto", device: str = "cpu", quantize: str = "none", remote: bool = False
) -> Sizes | None:
    """The sizes of a model as ``load_target`` would load it; None if only loading it can tell, or say what is wrong."""
    try:
        folder = locate(name, weights=False).path
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
            if any(folder.glob("*.safetensors")):
                check_shapes(folder, config, check_safetensors(folder))  # of a damaged config the loader tells
            elif config.get_text_config().num_hidden_layers > _MOST_LAYERS:
                return None
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=remote)
            cache: Any = DynamicCache()  # made without the config, so that sliding layers keep every key
            model(input_ids=torch.ones(1, 2, dtype=torch.int64), use_cache=True, **{cache_argument(model): cache})
        stored = stored_dtype(folder)
    except Exception:  # transformers raises many types
        return None
    if getattr(config, "quantization_config", None):
        return None
    count = sum(parameter.numel() for parameter in model.parameters())
    quantized, here = quantize != "none", int(count * BYTES.get(stored, 4.0))
    chosen = choose_dtype(dtype, device, lambda: stored, quantized=quantized, weights=here).value
    shapes = [(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers]
    head = model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    narrow = sum(linear) if quantized else 0  # the LM head and all else stay wide
    weights = narrow * BYTES.get(quantize, 0.0) + (count - narrow) * BYTES[chosen]
    return Sizes(int(weights), kv_bytes(shapes, int(BYTES[chosen])), context_of(config.get_text_config()))
