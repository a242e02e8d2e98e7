"""The recipe of train/ssm.py: an ensemble of small speculative models, and what each round of boosting trains on."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from draftsmith.common.field_types import DraftVocabSize, Layers, Name, Positive, Share
from draftsmith.common.recipe import Section
from draftsmith.common.sections import DrafterRecipe

DEPTH = 8  # of each SSM's tree; the τ of the trees, merged, chooses the best weights


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
    loss: Literal["ce", "kl", "lk"] = Field(
        default="ce",
        description="ce: the answers' tokens; kl: the target's distribution at each of them, which runs "
        "the target in every step; lk: λ · kl + (1 − λ) · total variation, of which λ falls as drafts are accepted "
        "more often (arXiv 2602.23881)",
    )
    expansion: list[Layers] = Field(
        default=[2, 1, 1, 1], min_length=1, description="children by depth, of the tree of evaluate.decode"
    )


class Boost(Section):
    """How the rounds differ."""

    may_change: ClassVar[frozenset[str]] = frozenset({"min_prompts"})

    ensemble: Literal["boosted", "seeds"] = Field(
        default="boosted", description="seeds: no boosting; the SSMs differ by the order of their samples alone"
    )
    mark: Literal["fresh", "train"] = Field(
        default="fresh",
        description="which prompts a round begins with. fresh: its own n-th part of them, which no SSM has trained on; "
        "train: all of them, as in the paper: an SSM that memorises its prompts leaves nothing to the next",
    )
    unit: Literal["prompt", "segment"] = Field(
        default="prompt",
        description="what an SSM that reproduces it takes away from the next ones. prompt: a whole sample, by the "
        "first 'tokens' of each of its answers; segment: so many tokens of an answer in a row, which stay as context "
        "(with tokens: 1, every token that it predicts)",
    )
    tokens: Positive = Field(default=8, description="m, the depth of speculation")
    marked_share: Share = Field(
        default=0.0,
        lt=1,
        description="share of later rounds' samples drawn from the prompts taken away: weighting instead of dropping",
    )
    min_prompts: Positive = Field(default=64, description="a round with fewer prompts left is not run: the end")


class SsmRecipe(DrafterRecipe):
    drafter: Ssms
    boost: Boost = Boost()

    @model_validator(mode="after")
    def _possible(self) -> "SsmRecipe":
        if (self.drafter.base is None) == (self.drafter.layers is None):
            raise ValueError("drafter: name either 'base', a small causal LM, or 'layers' of the target")
        if self.target.features:
            raise ValueError("target.features: SSMs train on the target's answers; let the server write them instead")
        if self.init_from:
            raise ValueError("init_from: SSMs begin from drafter.base or drafter.layers; leave it out")
        if any(source.streaming for source in self.data.train):
            raise ValueError("data.train: boosting marks every prompt, and a streamed source has no end; use a file")
        if self.cache_hidden != "none":
            raise ValueError("cache_hidden: an SSM does not read the target's hidden states; set it to none")
        if self.export.merged:
            raise ValueError("export.merged: no SSM changes the target; leave it out")
        for source in self.data.validation:
            if source.answers is not None and source.answers.new_tokens <= DEPTH:
                raise ValueError(f"answers.new_tokens must exceed the depth of simulated drafts, {DEPTH}")
        return self
