"""The recipe of train/dynaspec.py: shortlists of a drafter's LM head."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from draftsmith.common.data_sections import Source
from draftsmith.common.field_types import TINY_EVALUATE, Name, Positive, Share
from draftsmith.common.recipe import Section
from draftsmith.common.sections import DrafterRecipe, refuse_set
from draftsmith.models.options import ShortlistKind, ShortlistSchedule


class Shortlists(Section):
    tiny: ClassVar[dict[str, Any]] = {
        "base": None,
        "corpus": None,
        "num_clusters": 8,
        "router_width": 16,
        "positions": 256,
        "size": 64,
    }

    base: Name | None = Field(default=None, description="the trained drafter, a folder or Hub id; null: --tiny alone")
    all_tokens: bool = Field(default=False, description="drop its draft vocabulary, where its LM head is the target's")
    shortlist: ShortlistKind = Field(
        default="dynaspec", description="clusters and a router, a list by frequency, or the LM head's low-rank product"
    )
    num_clusters: Positive = Field(default=256, description="M")
    balanced: float | None = Field(
        default=2.0, ge=1, le=1e6, description="no cluster has more than so many times V / M tokens; null: any number"
    )
    iterations: Positive = Field(default=50, description="of k-means, at most")
    router_width: Positive = Field(default=512, description="h, the router's hidden width")
    labels: Literal["top10", "mass"] = Field(default="mass", description="the router's loss: CE (mass) or BCE (top10)")
    positions: Positive = Field(default=60_000, description="of the training rows, whose drafts the router learns from")
    k_max: Positive | None = Field(default=None, description="clusters of the first levels' shortlists; null: selected")
    schedule: ShortlistSchedule | None = Field(
        default=None, description="of the deeper levels' shortlists; null: selected"
    )
    keep: Share = Field(default=0.98, description="of the whole LM head's simulated τ, by which k_max is selected")
    size: Positive = Field(default=8192, description="of a list by frequency: tokens")
    corpus: list[Source] | None = Field(
        default=None, description="fr_spec counts the tokens of these sources; null: of the training rows"
    )
    rank: Positive = Field(default=64, description="of low_rank: r, of the product that approximates the LM head")
    candidates: Positive = Field(default=64, description="of low_rank: tokens of a node that the LM head's rows score")


class DynaspecRecipe(DrafterRecipe):
    tiny: ClassVar[dict[str, Any]] = {"evaluate": TINY_EVALUATE}

    drafter: Shortlists

    @model_validator(mode="after")
    def _possible(self) -> "DynaspecRecipe":
        base = self.drafter.base
        if self.target.features:
            raise ValueError("target.features: shortlists are measured beside the target itself; leave it out")
        if base and Path(base).resolve().is_relative_to(self.run.folder.resolve()):
            raise ValueError(f"drafter.base={base}: it is in the run's own folder, which is written anew; set run.name")
        if self.drafter.corpus and self.drafter.shortlist != "fr_spec":
            raise ValueError("drafter.corpus: for drafter.shortlist=fr_spec alone; leave it out")
        if any(source.answers for source in self.drafter.corpus or []):
            raise ValueError("drafter.corpus: the text of its sources is counted as it is; leave out 'answers'")
        if self.drafter.shortlist != "low_rank":
            refuse_set(self, ("drafter.rank", "drafter.candidates"), "for drafter.shortlist=low_rank alone")
        if self.init_from:
            raise ValueError("init_from: shortlists begin from drafter.base; leave it out")
        if self.cache_hidden != "none":
            raise ValueError("cache_hidden: rollouts are kept in the run's folder anyway; leave it out")
        if self.precision.compile or self.precision.gradient_checkpointing or self.export.merged:
            raise ValueError("precision.compile, precision.gradient_checkpointing and export.merged: leave them out")
        refuse_set(self, ("evaluate.decode", "evaluate.prompts"), "evaluations of shortlists decode nothing")
        if self.data.packing:
            raise ValueError("data.packing: a drafter is recorded on one sample at a time; leave it out")
        if any(source.streaming for source in [*self.data.train, *(self.drafter.corpus or [])]):
            raise ValueError("a streamed source has no end, and tokens are counted to the end; drop 'streaming'")
        return self
