"""A ``transformers`` model from its folder: its files are checked first, then loaded whole or refused in one line."""

import importlib.util
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import __version__ as transformers_version
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME

from draftsmith.common.command import out_of_memory
from draftsmith.common.files import json_object
from draftsmith.models.files.locate import ModelFolder
from draftsmith.models.files.weights import config_of, tensor_entries


def reason_of(error: BaseException) -> str:
    """The first line of a library's error; where that only names a field, the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {line[:200]}"


@contextmanager
def quietly(library: str = "transformers", category: type[Warning] = Warning) -> Iterator[None]:
    """Inside, a library logs errors alone, and Python's warnings of a category are not shown."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category)
            yield
    finally:
        logger.setLevel(level)


def read_config(model: ModelFolder, trust_remote_code: bool) -> PretrainedConfig:
    """A target's config. Raises FileNotFoundError, ValueError: there is none, or no causal LM can be made of it."""
    stored, folder = model.target_config(), model.path
    file = folder / "config.json"
    if not isinstance(stored.get("model_type"), str):
        raise ValueError(f"{file}: no model_type here, so its family is unknown; fetch it again")
    if "auto_map" in stored and not trust_remote_code and stored["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"{folder}: it needs code that comes with it; read it, then allow it: trust_remote_code")
    if "auto_map" not in stored and stored["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"{file}: transformers {transformers_version} knows no model_type '{stored['model_type']}'")
    try:
        with quietly():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many types for wrong fields
        raise ValueError(f"{file}: transformers refuses it ({reason_of(error)})") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "auto_map" not in stored:
        raise ValueError(f"{file}: '{stored['model_type']}' is no causal language model")
    generation = folder / "generation_config.json"  # transformers ignores a damaged one, and with it the stop ids
    if generation.exists():
        ids = json_object(generation, "generation config").get("eos_token_id")
        if ids is not None and not all(type(number) is int for number in (ids if isinstance(ids, list) else [ids])):
            raise ValueError(f"{generation}: eos_token_id is {ids!r}; it has to be an id or a list of ids")
    return config


def check_shapes(folder: Path, config: PretrainedConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check the config against the stored tensors by name and shape, before any memory is allocated."""
    file = folder / "config.json"
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    if layers > len(shapes):
        raise ValueError(f"{file}: num_hidden_layers is {layers:,}, but the weights are {len(shapes):,} tensors in all")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "quantization_config", None):
        return  # a model with its own code, or one stored quantised
    try:
        with torch.device("meta"), quietly():
            # Its class by name: under DeepSpeed's ZeRO-3 the Auto class would shard it.
            promised = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config)
    except Exception as error:  # for example a head width of 0, or sizes beyond any memory
        raise ValueError(f"{file}: no model can be made of it ({reason_of(error)})") from None
    parameters = dict(promised.named_parameters())
    wrong = [
        f"{name} {list(shapes[name])} instead of {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in shapes and list(shapes[name]) != list(parameter.shape)
    ]
    if wrong:
        raise ValueError(f"{folder}: {describe_wrong('weights of another shape than config.json promises', wrong)}")
    stored = sum(math.prod(shape) for shape in shapes.values())
    expected = sum(parameter.numel() for parameter in parameters.values())
    if expected > 4 * stored:  # exact names and shapes are checked when it is loaded
        raise ValueError(f"{file}: promises {expected:,} parameters, but the files hold {stored:,}")


def quantization_of(folder: Path) -> str | None:
    """How a model's config says that its weights are quantised, None if it does not."""
    stored = config_of(folder).get("quantization_config")
    if not isinstance(stored, dict):
        return None
    by_name = stored.get("load_in_4bit") or stored.get("load_in_8bit")
    return str(stored.get("quant_method") or ("bitsandbytes" if by_name else None))


def check_quantization(folder: Path, quantize: str) -> None:
    """Check what the config says of stored quantised weights against the files and ``target.quantize``."""
    method, file = quantization_of(folder), folder / "config.json"
    if method not in (None, "bitsandbytes", *AUTO_QUANTIZATION_CONFIG_MAPPING):  # transformers would only warn
        raise ValueError(
            f"{file}: the quant_method of quantization_config is '{method}', which transformers {transformers_version} "
            "does not know"
        )
    if method and quantize != "none":
        raise ValueError(
            f"{file}: its weights are stored quantised ({method}), and they are not quantised twice; leave out "
            f"target.quantize={quantize}, or name the model that was quantised"
        )
    if method == "bitsandbytes":
        if importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(f"{file}: its weights are stored by bitsandbytes: pip install bitsandbytes")
        if not {"U8", "I8"} & {entry["dtype"] for entry in tensor_entries(folder).values()}:
            raise ValueError(
                f"{file}: quantization_config says bitsandbytes, but the files hold plain weights; remove that field, "
                "and use target.quantize to quantise them"
            )


def describe_wrong(what: str, names: Sequence[str]) -> str:
    """The message about some wrong weights, of which it names three."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} ({len(names)}): {', '.join(names[:3])}{more}; fetch it again, or correct its config.json"


def from_pretrained(folder: Path, options: dict[str, Any]) -> PreTrainedModel:
    """Load the model; every weight has to come from its files, none missing and none left over."""
    try:
        with quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, ImportError, ArithmeticError) as error:
        if out_of_memory(error):
            raise
        method = quantization_of(folder)
        how = f"{method}-quantised weights" if method else "it"
        raise ValueError(f"{folder}: transformers cannot load {how} ({reason_of(error)})") from None
    model, problems = loaded
    for kind, what in (
        ("missing_keys", "missing weights"),
        ("unexpected_keys", "unexpected weights"),
        ("mismatched_keys", "weights of another shape than config.json promises"),
    ):
        names = sorted(name if isinstance(name, str) else str(name[0]) for name in problems.get(kind) or ())
        if names:
            raise ValueError(f"{folder}: {describe_wrong(what, names)}")
    return model


def without_weights(folder: Path, config: PretrainedConfig, options: Mapping[str, Any]) -> PreTrainedModel:
    """A model by its config, its parameters on the meta device, with the generation config in its folder. Its buffers
    are on the CPU; those that are stored hold nothing yet. ``options``: of :func:`from_pretrained`."""
    from accelerate import init_empty_weights  # only where a target is loaded in parts

    with init_empty_weights(include_buffers=False), quietly():
        model = AutoModelForCausalLM.from_config(config, **options)
        if (folder / GENERATION_CONFIG_NAME).exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Check that every token has an embedding, except added tokens that never occur in a text: the padding token, and
    those that are neither the BOS, EOS or unknown token nor part of the chat template."""
    template = str(tokenizer.chat_template or "")
    needed = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    unused = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if number not in needed and (number == tokenizer.pad_token_id or token.content not in template)
    }
    largest = max((number for number in tokenizer.get_vocab().values() if number not in unused), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer has ids up to {largest:,}, its model's end at {vocab_size - 1:,}; they do "
            "not belong together"
        )


def layers_elsewhere(config: PretrainedConfig, where: str, device: str, trust_remote_code: bool) -> dict[str, str]:
    """Accelerate's device map: every decoder layer is kept ``where``, all other modules are on the device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    prefix, layers = max(lists, key=lambda item: len(item[1]))
    places = {f"{prefix}.{number}": where for number in range(len(layers))}
    for name, module in model.named_modules():
        above = name.rpartition(".")[0]
        beside = not above or prefix.startswith(above + ".")  # a sibling of the layers, or of a module that holds them
        if name and beside and module is not layers and not prefix.startswith(name + "."):
            places[name] = device
    return places
