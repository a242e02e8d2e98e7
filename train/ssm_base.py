"""The model of which each SSM begins as a copy: its section in a recipe, and what its training costs."""

from typing import Any, ClassVar, Literal

from pydantic import Field
from transformers import PreTrainedModel

from draftsmith.common.recipe import Section
from draftsmith.common.sections import DrafterRecipe, DraftVocabSize, Layers, Name, TargetSection
from draftsmith.inference.drafters.draft_model import check_vocabulary
from draftsmith.models.ssm import model_of_layers, size_of_layers
from draftsmith.models.target import Target, load_target
from draftsmith.train import sharded
from draftsmith.train.dry_run import Plan, target_shape


class Ssms(Section):
    tiny: ClassVar[dict[str, Any]] = {"base": None, "layers": [0]}

    base: Name | None = Field(
        default=None,
        description="a causal LM with the target's tokenizer; each SSM begins as a copy, and all of it trains",
    )
    layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="or an SSM is made of these layers of the target, with its embeddings "
        "and LM head, which stay as they are",
    )
    draft_vocab_size: DraftVocabSize = None
    loss: Literal["ce", "kl"] = Field(
        default="ce",
        description="ce: the answers' tokens; kl: the target's distribution at each of them, which runs "
        "the target in every step",
    )
    expansion: list[Layers] = Field(
        default=[2, 1, 1, 1], min_length=1, description="children by depth, of the tree of evaluate.decode"
    )


def make_base(d: Ssms, target: Target) -> PreTrainedModel:
    """The model of which each SSM begins as a copy, in float32.

    Raises:
        FileNotFoundError, ValueError: there is none, it has another vocabulary, or the target has no such layers.
    """
    if sharded.spreads():
        raise ValueError("SSMs are small and train on whole weights: launch without ZeRO-3 and FSDP")
    if d.layers:
        return model_of_layers(target, d.layers)
    base = load_target(str(d.base), dtype="float32", device=str(target.device))
    check_vocabulary(base, target)
    if base.vocab_size != target.vocab_size:
        raise ValueError(f"drafter.base={d.base}: its LM head has {base.vocab_size} rows, not {target.vocab_size}")
    return base.model


def plans(recipe: DrafterRecipe) -> list[Plan]:
    """What each round costs."""
    d, shape = recipe.drafter, target_shape(recipe.target)
    assert isinstance(d, Ssms)
    outputs = shape.hidden_size * (d.draft_vocab_size or shape.vocab_size)
    passes = 1 if d.loss == "kl" else 0  # through the target
    if d.layers:
        trained, copied = size_of_layers(shape.config, d.layers)
        costs = {"projected": outputs, "passes": passes, "copied": copied}
        return [Plan.of(recipe, s, shape, trained, **costs) for s in recipe.stages]
    try:
        base = target_shape(TargetSection(name=str(d.base)))
    except ValueError as error:
        raise ValueError(f"drafter.base: {str(error).removeprefix('target ')}") from None
    return [Plan.of(recipe, s, shape, base.parameters, passes=passes) for s in recipe.stages]
