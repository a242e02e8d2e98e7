"""The recipe of train/dflash.py: a DFlash drafter."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from draftsmith.common.field_types import DraftVocabSize, Layers, Positive, Replay
from draftsmith.common.recipe import Section
from draftsmith.common.sections import DrafterRecipe


class DFlashSection(Section):
    tiny: ClassVar[dict[str, Any]] = {"block_size": 4, "captured_layers": None, "mask_token_id": None}

    block_size: int = Field(
        default=8,
        ge=2,
        le=64,
        description="tokens of a block; the first one is given, so that the drafts are one fewer",
    )
    num_layers: Layers = Field(default=2, description="of the drafter")
    captured_layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="it reads the inputs of these layers of the target; null: those of init_from, else 2, n/2 and "
        "n − 3 of n layers",
    )
    mask_token_id: int | None = Field(
        default=None,
        ge=0,
        description="the token that stands for a draft; no training row may have it. null: that of init_from, else an "
        "id behind those of the tokenizer, else the highest one that no row has",
    )
    draft_vocab_size: DraftVocabSize = None
    intermediate_size: int | None = Field(
        default=None, ge=1, le=1 << 20, description="of the MLPs; null: the target's, or that of init_from"
    )
    tie_k_norm: bool = Field(
        default=True, description="one norm of the keys for all layers; vLLM on a CPU drafts wrongly with several"
    )
    anchors: Positive = Field(default=512, description="blocks of a conversation in a step, drawn anew at each visit")
    loss: Literal["ce", "lk", "tv", "nla"] = Field(
        default="ce",
        description="ce: cross-entropy to the answer's tokens; lk, tv, nla (with weights=gamma): as those of EAGLE-3, "
        "against the target's distribution (arXiv 2602.23881)",
    )
    weights: Literal["dpace", "gamma"] = Field(
        default="dpace",
        description="of the drafts in the loss. dpace: by the probability that the drafts before are accepted (arXiv "
        "2605.18810); gamma: e^(−(k − 1) / gamma) for draft k",
    )
    gamma: float = Field(default=4.0, ge=0.1, le=1000, description="of weights=gamma: 7 for blocks of 16, 4 for 8")

    replay: Replay = 0.0

    @model_validator(mode="after")
    def _possible(self) -> "DFlashSection":
        layers = self.captured_layers or []
        if len(set(layers)) < len(layers) or any(layer < 0 for layer in layers):
            raise ValueError(f"captured_layers: {layers} have to be different layers, counted from 0")
        if self.replay and self.drafts < 2:
            raise ValueError("replay is for blocks of at least two drafts: set block_size=3 or more")
        if self.loss != "ce" and self.weights == "dpace":
            raise ValueError(f"loss={self.loss}: D-PACE weighs cross-entropies; set weights=gamma, too")
        return self

    @property
    def drafts(self) -> int:
        """K: of a block."""
        return self.block_size - 1

    @property
    def shape(self) -> dict[str, Any]:
        """Arguments of :meth:`draftsmith.models.dflash.DFlashConfig.for_target`, but for the two that a run chooses:
        the mask token and the size of the draft vocabulary."""
        names = ("block_size", "num_layers", "captured_layers", "intermediate_size", "tie_k_norm")
        return {name: getattr(self, name) for name in names}


class DflashRecipe(DrafterRecipe):
    drafter: DFlashSection

    @model_validator(mode="after")
    def _possible(self) -> "DflashRecipe":
        if self.precision.compile:
            raise ValueError("precision.compile: the blocks are others in every step; leave it off")
        if self.export.merged:
            raise ValueError("export.merged: no DFlash drafter changes the target; leave it out")
        searched = self.drafter.mask_token_id is None and self.init_from is None
        if searched and any(source.streaming for source in self.data.train):
            raise ValueError(
                "drafter.mask_token_id: a streamed source is not searched for an unused token; give the id of one"
            )
        self.check_answers(self.drafter.block_size - 1, "drafter.block_size - 1")  # a block is inside an answer
        return self
