"""The recipe of train/medusa.py: Medusa heads, and a joint stage in which the target trains too."""

import math
from typing import Literal

from pydantic import Field, model_validator

from draftsmith.common.field_types import DraftVocabSize, Factor, Layers, Name, Positive
from draftsmith.common.recipe import Section
from draftsmith.common.sections import DrafterRecipe, Optim, Stage


class Heads(Section):
    num_draft_heads: Layers = 5
    num_layers: Layers = 1
    projection: Literal["own", "shared"] = "own"
    draft_vocab_size: DraftVocabSize = None


class Lora(Section):
    """The adapters that train with the drafter. r, alpha and dropout are the published ones; the published recipe has
    one on ``lm_head`` too, which is not possible where the heads share it."""

    r: int = Field(default=32, gt=0, le=4096)
    alpha: Factor = 16
    dropout: float = Field(default=0.05, ge=0, lt=1)
    modules: list[Name] = Field(
        default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="names of linear layers; lm_head may be one, and is untied from the embeddings first",
    )


class Joint(Section):
    """A stage in which the target trains too: loss = L_LM + λ0 · L_heads."""

    lora: Lora = Lora()
    loss: Literal["kl", "ce"] = Field(
        default="kl",
        description="kl: KL(the target as it was ‖ as it is), for its own texts; ce: cross-entropy, for others",
    )
    head_weight: Factor | None = Field(
        default=None,
        description="λ0: 0.2 with ce, 0.01 with kl if left out; with kl it is divided by the supervised share of the "
        "positions, because the published 0.01 goes with a sum over all of them",
    )
    ramp: Literal["constant", "linear", "sine"] | None = Field(
        default=None, description="how λ0 is reached; if left out, constant with ce and along a sine with kl"
    )
    ramp_steps: Positive | None = Field(default=None, description="in so many steps; all of the stage's if left out")
    heads_lr: Factor = Field(default=4.0, description="the heads' learning rate, as a multiple of the adapters'")
    max_kl: float = Field(
        default=0.05, gt=0, le=1e6, description="nats per token the target may move, on held-out answers"
    )
    on_drift: Literal["warn", "stop"] = Field(default="warn", description="what happens beyond max_kl")

    def check(self, recipe: DrafterRecipe, optim: Optim, shared: bool) -> None:
        """Refuse what cannot go with joint training. ``shared``: the heads have the target's LM head."""
        if self.ramp_steps and self.form == "constant":
            raise ValueError("joint.ramp_steps: a constant weight has no ramp; leave it out, or set joint.ramp")
        if optim.name != "adamw":
            raise ValueError(
                "optim.name: Muon has one learning rate for heads and adapters; use adamw where both train"
            )
        if self.loss == "kl" and recipe.target.quantize != "none":
            raise ValueError(
                f"target.quantize={recipe.target.quantize}: joint.loss=kl compares with the target as it was, which "
                "has to be unquantised (arXiv 2401.10774 §2.3.2); use none, or joint.loss=ce"
            )
        if "lm_head" in self.lora.modules and shared:
            raise ValueError(
                "joint.lora.modules: lm_head is shared by all heads; drop it, or set drafter.projection=own"
            )
        if recipe.precision.compile:
            raise ValueError("precision.compile: joint training changes its loss at every step; leave it off")

    def weight(self, step: int, steps: int) -> float:
        """λ0 at step ``step`` (from 0) of a stage of ``steps``."""
        final = self.head_weight or (0.2 if self.loss == "ce" else 0.01)
        share = min(1.0, (step + 1) / (self.ramp_steps or steps))
        return final * {"constant": 1.0, "linear": share, "sine": math.sin(math.pi / 2 * share)}[self.form]

    @property
    def form(self) -> str:
        """Of the ramp: the recipe's, else the loss's own."""
        return self.ramp or ("constant" if self.loss == "ce" else "sine")


class MedusaStage(Stage):
    joint: Joint | None = Field(default=None, description="Medusa-2: the target trains too; the last stage only")


class MedusaRecipe(DrafterRecipe):
    drafter: Heads
    stages: list[MedusaStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> "MedusaRecipe":
        joint, heads = self.stages[-1].joint, self.drafter.num_draft_heads
        if joint and self.target.features:
            raise ValueError("target.features: the target of a joint stage trains, and a server's does not; drop one")
        if joint:
            joint.check(self, self.stages[-1].optim, self.drafter.projection == "shared")
        if joint and self.stages[-1].seconds and joint.form != "constant" and not joint.ramp_steps:
            raise ValueError(
                "joint.ramp: the heads' weight grows over all of the stage's steps, of which stages.seconds may leave "
                "few; set joint.ramp_steps, or joint.ramp=constant"
            )
        if any(stage.joint for stage in self.stages[:-1]):
            raise ValueError(
                "stages: a joint stage has to be the last one: the heads cannot train on a target that moved"
            )
        if self.precision.gradient_checkpointing and not joint:
            raise ValueError("precision.gradient_checkpointing: a frozen target keeps no activations; leave it off")
        if self.export.merged and not joint:
            raise ValueError("export.merged: there is nothing to merge without a joint stage")
        self.check_answers(heads, "drafter.num_draft_heads")
        return self
