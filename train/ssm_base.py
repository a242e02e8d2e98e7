"""The model of which each SSM begins as a copy, and what its training costs."""

from transformers import PreTrainedModel

from draftsmith.common.sections import TargetSection
from draftsmith.inference.drafters.draft_model import check_vocabulary
from draftsmith.models.ssm import model_of_layers, size_of_layers
from draftsmith.models.target import Target, load_target
from draftsmith.train import sharded
from draftsmith.train.dry_run import Plan, target_shape
from draftsmith.train.sections.ssm import SsmRecipe, Ssms


def make_base(d: Ssms, target: Target) -> PreTrainedModel:
    """The model of which each SSM begins as a copy, in float32."""
    if sharded.strategy() == "zero3":
        raise ValueError(
            "under ZeRO-3 an SSM would be spread, too, which trains on whole weights; launch with "
            "recipes/accelerate/fsdp.yaml"
        )
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
    outputs = shape.hidden_size * (d.draft_vocab_size or shape.vocab_size)
    passes = 0 if d.loss == "ce" else 1  # through the target
    if d.layers:
        trained, copied = size_of_layers(shape.config, d.layers)
        costs = {"projected": outputs, "passes": passes, "copied": copied}
        return [Plan.of(recipe, s, shape, trained, **costs) for s in recipe.stages]
    try:
        base = target_shape(TargetSection(name=str(d.base)))
    except ValueError as error:
        raise ValueError(f"drafter.base: {str(error).removeprefix('target ')}") from None
    return [Plan.of(recipe, s, shape, base.parameters, passes=passes) for s in recipe.stages]
