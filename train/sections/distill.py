"""The recipe of train/distill.py: what is asked, how it is decoded, and who answers."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftsmith.common.data_sections import Source
from draftsmith.common.field_types import Name, Positive, Sequences, Share, TemplateArguments, Threads, Tokens
from draftsmith.common.recipe import Section
from draftsmith.common.sections import RunSection, TargetSection


class Seeds(Section):
    seeds: list[Source] = Field(default=[], description="sources of the user's messages; the assistant's are dropped")
    written: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        description="conversations more, of which the target writes the user's first "
        "message, too: it goes on where the template lets the user speak; backend engine",
    )
    template: Name | None = Field(
        default=None, description="a chat template (Jinja) or a file that holds one; the tokenizer's own if left out"
    )
    template_arguments: TemplateArguments = Field(default={})
    max_skipped: Share = Field(
        default=0.1, description="a larger share of rows that ask nothing or cannot be used is an error"
    )

    @model_validator(mode="after")
    def _chats(self) -> "Seeds":
        if not self.seeds and not self.written:
            raise ValueError(
                "name 'seeds', or set 'written' to a number of conversations that the target begins itself"
            )
        for source in self.seeds:
            if source.installed and source.form != "chat":
                raise ValueError(f"seed source {source.source!r} needs conversations: set form: chat")
            if source.answers is not None or source.weight != 1.0:
                raise ValueError(f"seed source {source.source!r}: 'answers' and 'weight' are for training data")
        return self


class Decoding(Section):
    mode: Literal["greedy", "sample"] = "sample"
    temperature: float = Field(default=0.3, ge=1e-3, le=1e3, description="for mode sample")
    top_p: float = Field(default=1.0, gt=0, le=1, description="for mode sample")
    top_k: int = Field(default=0, ge=0, le=1 << 20, description="for mode sample; 0: all tokens")
    max_new_tokens: Tokens = Field(default=2048, description="of an answer; one that is cut there is kept and marked")
    user_temperature: float = Field(
        default=1.0, ge=1e-3, le=1e3, description="of the user's messages that the target writes, whatever the mode"
    )
    user_tokens: Tokens = Field(default=128, description="of such a message; a longer one is not used")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="keep the log-probabilities of an answer's tokens, and of so many of the likeliest tokens in the "
        "place of each; backend engine",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        default="raw_logprobs", description="of the target's logits, or after temperature, top_k and top_p"
    )


class Engine(Section):
    """Our own engine. None of it changes the answers, except that ``max_length`` may end a conversation early, and that
    of two conversations that the target begins with the same words, the one that has them first is kept."""

    drafter: Name = Field(default="none", description="a drafter's folder or Hub id; or none")
    batch_size: Sequences | Literal["auto"] = Field(
        default=32,
        description="conversations decoded at once; auto: as many as fit into the memory that is free beside the "
        "weights, at most 512 on a GPU and 32 on a CPU",
    )
    max_length: Tokens = Field(
        default=4096, description="tokens of a conversation; memory is reserved for as many in each row of the batch"
    )
    threads: Threads | None = Field(default=None, description="CPU threads; all cores if left out")


class Endpoint(Section):
    """Any server with OpenAI's protocol; a key comes from the environment variable OPENAI_API_KEY alone."""

    url: str | list[str] = Field(
        description="without /chat/completions: http://localhost:8000/v1; or a list of servers of the same model, "
        "which share the conversations"
    )
    model: str = Field(min_length=1, description="the name that the server knows it by")
    concurrency: Threads = Field(default=256, description="conversations at once, at each server")
    retries: int = Field(
        default=5, ge=0, le=30, description="after a timeout, 408, 429, 5xx, an incomplete or malformed answer"
    )
    timeout: float = Field(default=600.0, ge=0.001, le=86400, description="seconds without a byte from the server")
    backoff: float = Field(
        default=1.0, ge=0, le=3600, description="seconds before the first retry; doubled before each further one"
    )
    give_up: Positive = Field(default=200, description="end the run after this many prompts in a row without an answer")

    @property
    def urls(self) -> list[str]:
        """The servers, at least one."""
        return [self.url] if isinstance(self.url, str) else self.url

    @field_validator("url", mode="before")
    @classmethod
    def _urls(cls, given: Any) -> Any:
        each = given if isinstance(given, list) else [given]
        if not each:
            raise ValueError("the list is empty; name at least one server")
        if not all(isinstance(one, str) and re.fullmatch(r"https?://[^\s@?#]+", one) for one in each):
            raise ValueError("a server's address is http://HOST:PORT/v1 or https://…, without a key, ? and #")
        return given


class DistillRecipe(Section):
    """What is asked of whom, and how."""

    run: RunSection
    target: TargetSection | None = Field(default=None, description="for backend engine")
    data: Seeds
    backend: Literal["engine", "endpoint"] = "engine"
    engine: Engine = Engine()
    endpoint: Endpoint | None = None
    decoding: Decoding = Decoding()
    self_talk: int = Field(
        default=0, ge=0, le=1000, description="turns after the seed's, of which the model writes both sides"
    )

    @model_validator(mode="after")
    def _whole(self) -> "DistillRecipe":
        if self.target and self.target.features:
            raise ValueError("target.features is for training; backend endpoint lets a server answer")
        needed = "target" if self.backend == "engine" else "endpoint"
        if getattr(self, needed) is None:
            raise ValueError(f"backend {self.backend} needs the section '{needed}'; add it")
        if self.backend == "endpoint" and self.data.template is not None:
            raise ValueError("data.template is for backend engine; a server uses its own")
        if self.backend == "engine" and self.decoding.max_new_tokens >= self.engine.max_length:
            raise ValueError(
                f"decoding.max_new_tokens={self.decoding.max_new_tokens} leaves no room for a prompt within "
                f"engine.max_length={self.engine.max_length}"
            )
        if self.backend == "endpoint" and self.decoding.logprobs is not None:
            raise ValueError("decoding.logprobs is for backend engine; leave it out")
        if self.backend == "endpoint" and self.data.written:
            raise ValueError("data.written is for backend engine; a server does not continue the user's turn")
        return self
