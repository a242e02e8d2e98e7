"""The recipe of train/lm.py: a small causal LM from scratch."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from draftsmith.common.data_sections import Source
from draftsmith.common.field_types import TINY_EVALUATE, TINY_LENGTH, Factor, Layers, Name, Share, Tokens
from draftsmith.common.recipe import Section
from draftsmith.common.sections import Stage, TrainingRecipe, refuse_set

UNREAD = (
    *("data.packing", "data.template", "data.template_arguments", "data.max_unsupervised", "data.reasoning"),
    *("evaluate.decode", "evaluate.prompts", "export.merged"),
)
Width = Annotated[int, Field(gt=0, le=1 << 18)]
SMALLEST = 256 + 5  # tokens: the bytes, and the special ones of data/bpe.py


class Model(Section):
    tiny: ClassVar[dict[str, Any]] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "vocab_size": 512,
    }

    vocab_size: int = Field(default=4096, ge=SMALLEST, le=1 << 20, description="at least the bytes and special tokens")
    hidden_size: Width
    num_layers: int = Field(gt=0, le=1024)
    num_heads: int = Field(gt=0, le=1024)
    num_kv_heads: int = Field(gt=0, le=1024)
    head_dim: int = Field(default=32, gt=0, le=4096, multiple_of=2, description="rotary embeddings turn pairs")
    intermediate_size: Width
    max_position_embeddings: Tokens = 4096
    rope_theta: float = Field(default=100000.0, ge=1, le=1e12)

    @model_validator(mode="after")
    def _grouped(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        return self


class Lookahead(Section):
    """Extra heads that predict tokens further ahead from the same hidden state while the LM trains, and are then thrown
    away (multi-token prediction, arXiv 2404.19737): they leave a hidden state that drafter heads can read more from."""

    num_heads: Layers
    weight: Factor = Field(default=0.3, description="of head k's loss: weight × 0.8^k")
    share: Share = Field(
        default=0.25, gt=0, description="share of each micro-batch's rows that they train on, at least one row"
    )


class Unlikelihood(Section):
    """Beside the text, continuations that the model itself writes when the stage begins: tokens that complete an n-gram
    for the second time become less likely (sequence-level unlikelihood, arXiv 1908.04319 §5.2). Small models decoded
    greedily fall into loops; this gets them out."""

    source: Source = Field(description="what to continue, with 'answers'; one continuation accompanies each row")
    ngram: Tokens = 6
    weight: Factor = 1.0

    @model_validator(mode="after")
    def _answers(self) -> "Unlikelihood":
        if self.source.answers is None:
            raise ValueError("source needs 'answers'")
        if not self.source.installed:
            raise ValueError(f"source '{self.source.source}': only text of stdlib and package:NAME is continued")
        return self


class LmStage(Stage):
    tiny: ClassVar[dict[str, Any]] = {"max_length": TINY_LENGTH}

    max_length: Tokens
    unlikelihood: Unlikelihood | None = None


class LmRecipe(TrainingRecipe):
    # Another tokenizer has more entries.
    tiny: ClassVar[dict[str, Any]] = {"init_from": None, "tokenizer": None, "evaluate": TINY_EVALUATE}

    model: Model
    init_from: Name | None = Field(default=None, description="a folder whose weights and tokenizer to begin with")
    tokenizer: Name | None = Field(
        default=None, description="a folder whose tokenizer to use; left out, init_from's, or one trained on the text"
    )
    lookahead: Lookahead | None = None
    stages: list[LmStage] = Field(min_length=1)

    @model_validator(mode="after")
    def _possible(self) -> "LmRecipe":
        if self.init_from and self.tokenizer:
            raise ValueError("init_from brings its tokenizer; leave out one of 'init_from' and 'tokenizer'")
        if self.export.push_to_hub:
            raise ValueError("export.push_to_hub uploads drafters; upload a model with: hf upload USER/NAME FOLDER")
        if self.export.licence:
            raise ValueError("export.licence is for the model card of a drafter, which a model has not; leave it out")
        if self.export.dtype != "float32":
            raise ValueError("export.dtype is for drafters; a model's dtype is that of its training: leave it out")
        refuse_set(self, UNREAD, "it is for drafters, and this script trains a model on all tokens of its text")
        if any(source.answers is not None for source in [*self.data.train, *self.data.validation]):
            raise ValueError("answers: they are for drafters, and this script trains on the text itself; leave it out")
        longest = max(self.data.max_length, *(stage.max_length for stage in self.stages))
        if longest > (positions := self.model.max_position_embeddings):
            raise ValueError(f"rows of {longest} tokens, but model.max_position_embeddings is {positions}; raise it")
        for stage in self.stages:
            if (asked := stage.unlikelihood and stage.unlikelihood.source.answers) and asked.prompt_tokens >= positions:
                where = f"stage '{stage.name}': unlikelihood.source.answers.prompt_tokens={asked.prompt_tokens}"
                raise ValueError(f"{where} leaves no room within model.max_position_embeddings={positions}; lower it")
        for source in self.data.train:
            if source.streaming and source.limit is None:
                raise ValueError(
                    f"source {source.source!r} is streamed; this script reads all its text first: set 'limit'"
                )
        return self
