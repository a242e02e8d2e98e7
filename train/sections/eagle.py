"""The recipe of train/eagle.py: an EAGLE drafter."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from draftsmith.common.field_types import DraftVocabSize, Layers, Replay
from draftsmith.common.recipe import Section
from draftsmith.common.sections import DrafterRecipe

DEPTH = 7  # of the tree whose τ chooses the best checkpoint
FEWEST = 0.2  # of the chains of P-EAGLE, that train any depth (arXiv 2602.01469)


class EagleSection(Section):
    tiny: ClassVar[dict[str, Any]] = {"captured_layers": None}

    version: Literal[1, 3]
    projection: Literal["own", "shared"] = Field(
        default="own", description="an LM head of its own (EAGLE-3), or the target's (EAGLE-1)"
    )
    draft_vocab_size: DraftVocabSize = None
    captured_layers: list[int] | None = Field(
        default=None,
        min_length=1,
        description="EAGLE-3 reads the inputs of these layers of the target; null: those "
        "of init_from, else 2, n/2 and n − 3 of n layers",
    )
    intermediate_size: int | None = Field(
        default=None, ge=1, le=1 << 20, description="of the MLP; null: the target's, or that of init_from"
    )
    num_layers: Layers | None = Field(
        default=None,
        description="version 3: layers of the drafter, of which those behind the first one begin as if they were not "
        "there; published P-EAGLE drafters usually have four; null: 1, or those of init_from, which may have fewer",
    )
    norm_before_fc: bool = Field(default=False, description="a norm of the joined features before they are mixed")
    fc_norm: bool = Field(default=False, description="or one norm for each captured layer")
    norm_output: bool = Field(default=False, description="a draft continues with the normed hidden state (EAGLE-3.1)")
    bias: bool = Field(default=True, description="EAGLE-1: fc has a bias, as published; vLLM reads none")
    loss: Literal["ce", "lk", "tv", "nla"] = Field(
        default="ce",
        description="ce: cross-entropy against the target's distribution; of EAGLE-3 also, by the probability α that a "
        "draft is accepted (arXiv 2602.23881), tv: 1 − α; nla: −log α; lk: λ · KL + (1 − λ) · (1 − α), λ falling as α "
        "grows",
    )
    unroll: Layers = Field(default=7, description="steps of training-time test; EAGLE-1 has one")
    one_pass: bool = Field(
        default=False,
        description="P-EAGLE (arXiv 2602.01469): the unroll tokens of a draft are drafted in one pass, each without "
        "those before it; init_from may be an EAGLE-3 drafter",
    )
    keep_depths: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="one_pass: depth e trains on keep_depths^e of the positions, drawn anew at each visit, a fifth at "
        "least; 0.7 as published: 3.4 passes in place of 8",
    )
    replay: Replay = 0.0
    noise: float = Field(
        default=0.2, ge=0, le=10, description="EAGLE-1: width of the uniform noise on features, at rows of 512 tokens"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_version(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("version") == 1:
            return {"projection": "shared", "unroll": 1} | content
        return content

    @model_validator(mode="after")
    def _possible(self) -> "EagleSection":
        if self.version == 1 and (self.projection != "shared" or self.unroll != 1 or self.captured_layers):
            raise ValueError(
                "version 1 reads the last hidden state, has the target's LM head and trains one step: leave out "
                "projection, unroll and captured_layers"
            )
        if self.version == 1 and (self.norm_before_fc or self.fc_norm or self.norm_output):
            raise ValueError("norm_before_fc, fc_norm and norm_output are for version 3; leave them out")
        if self.version == 1 and self.loss != "ce":
            raise ValueError(f"loss={self.loss} is for version 3; EAGLE-1 has a regression and ce")
        if self.one_pass and (self.version == 1 or self.unroll < 2):
            raise ValueError("one_pass is for version 3, and for at least two steps (unroll)")
        if self.keep_depths < 1 and not self.one_pass:
            raise ValueError("keep_depths is for one_pass: each step of training-time test needs the one before")
        if self.version == 1 and (self.num_layers or 1) > 1:
            raise ValueError("num_layers is for version 3: EAGLE-1 has one layer")
        if self.replay and (self.version == 1 or self.unroll < 2):
            raise ValueError("replay is for version 3, and for at least two steps (unroll)")
        if self.version == 3 and self.noise != type(self).model_fields["noise"].default:
            raise ValueError("noise is for version 1: leave it out")
        if self.version == 3 and not self.bias:
            raise ValueError("bias is for version 1; EAGLE-3 has none")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are alternatives; set one of them")
        layers = self.captured_layers or []
        if len(set(layers)) < len(layers) or any(layer < 0 for layer in layers):
            raise ValueError(f"captured_layers: {layers} have to be different layers, counted from 0")
        return self

    @property
    def shares(self) -> list[float]:
        """The share of the positions on which each step trains."""
        return [max(self.keep_depths**step, FEWEST) for step in range(self.unroll)]

    @property
    def drafts(self) -> int:
        """K: of a step."""
        return self.unroll

    @property
    def options(self) -> dict[str, Any]:
        """Of :class:`~draftsmith.models.eagle.EagleConfig`."""
        norms = {name: getattr(self, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        own = {"num_layers": self.num_layers or 1, "parallel": self.unroll if self.one_pass else 0}
        return {**norms, "fc_bias": self.bias, **own}


class EagleRecipe(DrafterRecipe):
    drafter: EagleSection

    @model_validator(mode="after")
    def _possible(self) -> "EagleRecipe":
        if self.precision.compile:
            raise ValueError("precision.compile: the positions that draft are others in every step; leave it off")
        if self.export.merged:
            raise ValueError("export.merged: no EAGLE drafter changes the target; leave it out")
        depth = min(DEPTH, self.drafter.unroll) if self.drafter.one_pass else DEPTH
        self.check_answers(depth, "the depth of simulated drafts")
        return self
