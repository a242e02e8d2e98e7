"""Sections of a recipe that say which data a run reads."""

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from draftsmith.common.field_types import (
    TINY_LENGTH,
    Factor,
    Name,
    Positive,
    Sequences,
    Share,
    TemplateArguments,
    Tokens,
    check_repository,
)
from draftsmith.common.files import SLICE
from draftsmith.common.recipe import Section


class Answers(Section):
    """The target's own greedy answers in place of a source's text: continuations of prompts that are cut from stdlib or
    a package, or answers to the conversations of a file or data set, to be held out."""

    tiny: ClassVar[dict[str, Any]] = {"prompts": 8, "prompt_tokens": 16, "new_tokens": 16, "batch_size": 8}

    prompts: int = Field(gt=0, le=10_000_000, description="how many; of a file or data set the first conversations")
    prompt_tokens: Tokens = Field(default=64, description="of a prompt: exactly, or of a conversation's at most")
    new_tokens: Tokens = Field(default=128, description="of an answer, at most")
    batch_size: Sequences = Field(default=64, description="answered at once")


LOCAL_FILES = (".json", ".jsonl", ".parquet", ".txt")


class Source(Section):
    """A source of samples."""

    source: str = Field(
        description="stdlib or package:NAME (text from this machine), a .json, .jsonl, .parquet or .txt file (one "
        "document) or several (runs/x/shard-*.jsonl), or the Hub id of a data set; rows hold messages, conversations, "
        "prompt and completion, or text"
    )
    subset: Name | None = Field(default=None, description="a Hub data set's configuration")
    files: Name | None = Field(
        default=None, description="which of a Hub data set's files: a name or a pattern; all if left out"
    )
    split: Name = Field(
        default="train",
        description="of a Hub data set; of files a part of the rows, as in datasets: train[:90%], train[-500:]; stdlib "
        "and packages: train, validation or test, by module path",
    )
    limit: Positive | None = Field(default=None, description="only the first so many rows")
    weight: Factor = Field(default=1.0, description="relative share of the samples")
    form: Literal["text", "chat"] = Field(
        default="text", description="stdlib and packages: whole files, or docstring → function dialogues"
    )
    streaming: bool = Field(
        default=False, description="files and Hub data sets: read while training, for what is too large to keep"
    )
    answers: Answers | None = Field(
        default=None, description="the target's own greedy answers, made when data is read and kept in the run's folder"
    )

    @property
    def installed(self) -> bool:
        """Whether it is the standard library or an installed package, with splits by module path."""
        return self.source == "stdlib" or self.source.startswith("package:")

    @property
    def is_file(self) -> bool:
        """Whether it is a file, or a pattern of files."""
        return self.source.endswith(LOCAL_FILES)

    @property
    def label(self) -> str:
        """What messages call it: with its split, unless it is a whole file."""
        return self.source if self.is_file and self.split == "train" else f"{self.source} ({self.split})"

    @model_validator(mode="after")
    def _known(self) -> "Source":
        if self.files is not None and (self.installed or self.is_file):
            raise ValueError(f"source {self.source!r}: 'files' is for a Hub data set, whose files it names")
        if self.subset is not None and (self.installed or self.is_file):
            raise ValueError(f"source {self.source!r}: 'subset' is for a Hub data set; leave it out")
        if self.streaming and (self.installed or self.source.endswith(".txt")):
            raise ValueError(f"source {self.source!r}: 'streaming' is for .json, .jsonl, .parquet and Hub data sets")
        if self.installed:
            if self.source != "stdlib" and not re.fullmatch(r"package:[A-Za-z0-9_]+", self.source):
                raise ValueError(f"source {self.source!r}: after 'package:' comes the name it is imported by")
            if self.split not in ("train", "validation", "test"):
                raise ValueError(
                    f"source {self.source!r} has the splits train, validation and test, not {self.split!r}"
                )
            if self.answers and (self.form == "chat" or self.limit):
                raise ValueError(
                    f"source {self.source!r}: the target continues windows of code, of which answers.prompts says how "
                    "many; drop 'form' and 'limit', or 'answers'"
                )
            return self
        if not self.is_file:
            try:
                check_repository(self.source)
            except ValueError:
                raise ValueError(
                    f"source {self.source!r} is neither 'stdlib', 'package:NAME', a file ({', '.join(LOCAL_FILES)}) "
                    "nor a data set's Hub id (USER/NAME)"
                ) from None
        elif not SLICE.fullmatch(self.split):
            raise ValueError(
                f"source {self.source!r}: split {self.split!r}: a file's rows are train, or a part of them: "
                "train[:90%], train[90%:], train[-500:]"
            )
        if self.streaming and "[" in self.split:
            raise ValueError(
                f"source {self.source!r}: a stream has no part {self.split!r}; drop 'streaming' or the part"
            )
        if self.form != "text":
            raise ValueError(f"source {self.source!r}: 'form' is for stdlib and package:NAME")
        return self


class Data(Section):
    tiny: ClassVar[dict[str, Any]] = {"max_length": TINY_LENGTH, "workers": 0}
    # When a run resumes: they change no sample.
    may_change: ClassVar[frozenset[str]] = frozenset({"workers", "max_skipped", "max_unsupervised"})

    train: list[Source] = Field(min_length=1)
    validation: list[Source] = Field(min_length=1)
    max_length: Tokens = Field(default=512, description="tokens in a row; longer samples are cut")
    packing: bool = Field(default=False, description="several samples to a row; they do not see each other")
    template: Name | None = Field(
        default=None, description="a chat template (Jinja) or a file that holds one; the tokenizer's own if left out"
    )
    template_arguments: TemplateArguments = Field(default={})
    reasoning: Literal["keep", "drop"] = Field(
        default="keep",
        description="what the assistant thought before an answer (reasoning_content, reasoning, thinking): given to "
        "the chat template, or left out",
    )
    workers: int | None = Field(
        default=None,
        ge=0,
        le=256,
        description="processes beside each training process that make its batches a step ahead, and of the first one "
        "those that tokenize the sources; 0: none; left out: two with a GPU, none without, and one per core for "
        "tokenizing",
    )
    max_skipped: Share = Field(
        default=0.1, description="share of rows that cannot be used (unknown speaker, empty chat, …) that is an error"
    )
    max_unsupervised: Share = Field(
        default=0.1, description="share of samples without a label (cut before the assistant's turn) that is an error"
    )

    @model_validator(mode="after")
    def _ends(self) -> "Data":
        for source in self.validation:
            if source.streaming and source.limit is None:
                raise ValueError(f"validation source {source.source!r} is streamed; set 'limit' to its number of rows")
        for source in self.train:
            if source.answers and not source.installed:
                raise ValueError(
                    f"training source {source.source!r}: 'answers' is for stdlib and package:NAME, and for held-out "
                    "conversations; to train on the target's own, let train/distill.py write them"
                )
        for source in [*self.train, *self.validation]:
            answers = source.answers
            if answers is not None and answers.prompt_tokens + answers.new_tokens > self.max_length:
                raise ValueError(
                    f"max_length={self.max_length} is less than the {answers.prompt_tokens} + {answers.new_tokens} "
                    "tokens of a prompt and its answer"
                )
        return self
