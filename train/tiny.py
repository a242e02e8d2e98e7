"""``--tiny``: any recipe through its real command in seconds, offline: a small random target of the same family,
bundled samples, two steps. It proves that the recipe runs, nothing else."""

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.common.data_sections import Source
from draftsmith.common.field_types import TINY_LENGTH
from draftsmith.common.recipe import S, Section
from draftsmith.common.sections import R, TargetSection
from draftsmith.models.artifact import provenance, write_model
from draftsmith.models.files.locate import ModelFolder, local_folder
from draftsmith.models.precision import say
from draftsmith.models.tokenizer import load_tokenizer

_BUNDLED = "models/tiny-lm"  # its tokenizer serves every tiny target
SAMPLES = Path(__file__).resolve().parent.parent / "data" / "samples.jsonl"
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def tiny(recipe: R, suffix: str = "tiny", processes: int = 1) -> R:
    """The same recipe with small data, lengths, steps and target. Its run is ``NAME-suffix``; nothing is tracked or
    uploaded. What becomes small is in each section's ``tiny``.

    Args:
        processes: that train it; a step has a multiple of as many sequences.
    """
    small = _shrunk(recipe)
    small["run"]["name"] += f"-{suffix}"
    for stage in small["stages"]:
        sequences = -(-stage["batch"]["sequences"] // processes) * processes
        stage["batch"] = {**stage["batch"], "sequences": sequences}
    if "target" in small:
        small["target"] = tiny_target(small["target"], Path(small["run"]["output_dir"]) / small["run"]["name"])
    return valid(type(recipe), small)


def _shrunk(value: Any) -> Any:
    """The content of a section, a list of sections or a value, every section with the values of its ``tiny``."""
    if isinstance(value, (list, tuple)):
        return [_shrunk(entry) for entry in value]
    if not isinstance(value, Section):
        return value
    content = {name: _shrunk(getattr(value, name)) for name in type(value).model_fields}
    for section in reversed(type(value).__mro__):  # a section has its base class's values, too
        content |= vars(section).get("tiny", {})
    if isinstance(value, Source) and not (value.answers and value.installed):
        content |= Source(source=str(SAMPLES), weight=value.weight).model_dump(exclude={"answers"})
        if value.answers:  # a rendered chat may fill a tiny row
            content["answers"]["prompt_tokens"] = TINY_LENGTH - content["answers"]["new_tokens"]
    return content


def valid(recipe: type[S], content: dict[str, Any]) -> S:
    """A small recipe from its content."""
    try:
        return recipe.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "recipe"
        raise ValueError(f"the tiny form of this recipe: '{field}': {first['msg']}") from None


def tiny_target(target: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A recipe's target section, with the small model of the same family that :func:`write_target` puts into a run's
    folder."""
    small = {"name": str(folder / "tiny-target"), "model_type": _model_type(target), "dtype": "auto"}
    return {**target, **small, "quantize": "none", "revision": None, "trust_remote_code": False}


def _model_type(target: dict[str, Any]) -> str:
    folder = local_folder(target["name"])  # nothing is downloaded for this
    there = folder and (folder / "config.json").exists()
    config = ModelFolder(target["name"], folder).target_config() if folder and there else {}
    family = config.get("model_type", target["model_type"])
    if not isinstance(family, str):
        raise ValueError(
            f"--tiny has to know the family of target '{target['name']}'; set target.model_type (llama, qwen3, …)"
        )
    if target["model_type"] not in (None, family):
        say(f"target.model_type={target['model_type']}: '{target['name']}' is {family}, and taken as that")
    return family


def write_target(target: TargetSection) -> None:
    """The random model of two layers that a tiny recipe's target names, with the bundled tokenizer."""
    folder, model_type = Path(target.name), str(target.model_type)
    tokenizer = load_tokenizer(_BUNDLED)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    try:
        config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **ids, **_SHAPE)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--tiny: no small target of the family '{model_type}' can be made ({error})") from None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, model, tokenizer, provenance(command="--tiny"))
