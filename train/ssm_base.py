"""The model of which each SSM begins as a copy, and what its training costs."""

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from draftsmith.common.sections import TargetSection
from draftsmith.inference.drafters.draft_model import check_vocabulary
from draftsmith.models.sizes import BYTES
from draftsmith.models.ssm import config_of_layers, model_of_layers, size_of_layers
from draftsmith.models.target import Target, load_target
from draftsmith.train import sharded
from draftsmith.train.dry_run import Plan, target_shape
from draftsmith.train.memory import SINGLE, Kept, Micro, language_model, target_pass, widths
from draftsmith.train.sections.ssm import SsmRecipe, Ssms


def make_base(d: Ssms, target: Target) -> PreTrainedModel:
    """The model of which each SSM begins as a copy, in float32."""
    sharded.refuse_zero3("an SSM, too, which trains on whole weights")
    if d.layers:
        return model_of_layers(target, d.layers)
    with sharded.hidden_from_accelerate():  # under FSDP it is loaded whole
        base = load_target(str(d.base), dtype="float32", device=str(target.device))
    check_vocabulary(base, target)
    if base.vocab_size != target.vocab_size:
        raise ValueError(f"drafter.base={d.base}: its LM head has {base.vocab_size} rows, not {target.vocab_size}")
    return base.model


def plans(recipe: SsmRecipe) -> list[Plan]:
    """What each round costs."""
    d, shape = recipe.drafter, target_shape(recipe.target)
    size = d.draft_vocab_size or shape.vocab_size
    costs: dict[str, Any] = {"passes": 0 if d.loss == "ce" else 1, "logits": size}  # passes through the target
    if d.layers:
        config = config_of_layers(shape.config, d.layers)
        trained, ends = size_of_layers(shape.config, d.layers)
        costs["copied"] = round(ends * SINGLE / BYTES[recipe.target.dtype])  # in float32
        costs["projected"] = shape.hidden_size * size
    else:
        try:
            base = target_shape(TargetSection(name=str(d.base)))
        except ValueError as error:
            raise ValueError(f"drafter.base: {str(error).removeprefix('target ')}") from None
        config, trained = base.config, base.parameters

    def kept(micro: Micro) -> Kept:
        recomputed = recipe.precision.gradient_checkpointing
        found = language_model(config, micro, 1, not d.layers, size, recomputed)
        if d.loss == "ce":
            return found
        # Of both distributions, logits and logarithms are there at a time.
        both = found.activations + 3 * SINGLE * micro.logits(size)
        return replace(found, activations=max(both, target_pass(shape.config, micro)))

    costs |= {"kept": kept, "attended": 1.5 * config.num_hidden_layers * widths(config)[1]}
    costs["every_row"] = recipe.boost.ensemble == "seeds" or recipe.boost.mark == "train"
    return [Plan.of(recipe, s, shape, trained, **costs) for s in recipe.stages]
