"""Recipes: YAML read into strict typed objects. The only reader of YAML, and a leaf that any command may import.

A script adds its own sections by subclassing :class:`Recipe`. Unknown keys, wrong types and impossible combinations
are one ``ValueError`` line with file, field and the nearest valid key.
"""

import copy
import difflib
import os
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from draftsmith.train.files import read_text, write_text

# Bounds keep a slip of the keyboard from asking for more memory or threads than any machine has.
Positive = Annotated[int, Field(gt=0, le=1_000_000_000)]
Tokens = Annotated[int, Field(gt=0, le=1 << 20)]  # of a sequence
Sequences = Annotated[int, Field(gt=0, le=1 << 16)]  # at once
Layers = Annotated[int, Field(gt=0, le=64)]
Threads = Annotated[int, Field(gt=0, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
Name = Annotated[str, Field(min_length=1)]
SAMPLES = 100_000_000  # sequences of a stage: their order is kept in memory


def _repository(text: str) -> str:
    """The Hub's rules for USER/NAME."""
    parts = text.split("/")
    part = r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
    if len(parts) != 2 or not all(re.fullmatch(part, p) for p in parts) or re.search(r"--|\.\.|\.git$", text):
        raise ValueError(
            "a Hub id is USER/NAME; both are letters, digits, '-', '_' and '.', at most 96, with neither '--' nor '..'"
        )
    return text


HubId = Annotated[str, AfterValidator(_repository)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Run(Section):
    name: Name = Field(description="the run's folder is output_dir/name")
    output_dir: Name = "runs"
    seed: Seed = 0

    @field_validator("name")
    @classmethod
    def _inside(cls, name: str) -> str:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError("the run's folder has to be inside of output_dir: a name without '.', '..' and outer '/'")
        if not name.isprintable() or name != name.strip() or len(name.encode()) > 200:
            raise ValueError("a name has at most 200 bytes, no control characters and no spaces around it")
        return name

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.name


class Target(Section):
    name: Name = Field(description="a folder or a Hub id")
    revision: Name | None = None
    model_type: Name | None = Field(
        default=None, description="the target's family (llama, qwen3, …), so that --tiny and --dry-run need no download"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of its weights; auto: on a GPU the dtype it is stored in, on a CPU float32"
    )
    quantize: Literal["none", "8bit", "4bit"] = Field(
        default="none", description="load the frozen target's weights in 8 or 4 bits (needs bitsandbytes)"
    )
    trust_remote_code: bool = False


class Answers(Section):
    """The target continues prompts cut from a source; what it wrote is what the drafter trains on."""

    prompts: int = Field(gt=0, le=10_000_000)
    prompt_tokens: Tokens = 64
    new_tokens: Tokens = 128
    batch_size: Sequences = 64


LOCAL_FILES = (".json", ".jsonl", ".parquet", ".txt")


class Source(Section):
    """Where samples come from."""

    source: str = Field(
        description="stdlib or package:NAME (text from this machine), a .json, .jsonl, .parquet or .txt file (one "
        "document) or several (runs/x/shard-*.jsonl), or the Hub id of a data set; rows hold messages, conversations, "
        "prompt and completion, or text"
    )
    subset: Name | None = Field(default=None, description="a Hub data set's configuration")
    files: Name | None = Field(
        default=None, description="which of a Hub data set's files: a name or a pattern; all if left out"
    )
    split: Name = Field(default="train", description="stdlib and packages: train, validation or test, by module path")
    limit: Positive | None = Field(default=None, description="only the first so many rows")
    weight: Factor = Field(default=1.0, description="relative share of the samples")
    form: Literal["text", "chat"] = Field(
        default="text", description="stdlib and packages: whole files, or docstring → function dialogues"
    )
    streaming: bool = Field(
        default=False, description="files and Hub data sets: read while training, for what is too large to keep"
    )
    answers: Answers | None = None

    @property
    def installed(self) -> bool:
        """Whether it is text that every machine has, with splits by module path."""
        return self.source == "stdlib" or self.source.startswith("package:")

    @property
    def is_file(self) -> bool:
        return self.source.endswith(LOCAL_FILES)

    @model_validator(mode="after")
    def _known(self) -> "Source":
        if self.files is not None and (self.installed or self.is_file):
            raise ValueError(f"source {self.source!r}: 'files' is for a Hub data set, whose files it names")
        if self.streaming and (self.installed or self.source.endswith(".txt")):
            raise ValueError(f"source {self.source!r}: 'streaming' is for .json, .jsonl, .parquet and Hub data sets")
        if self.installed:
            if self.source != "stdlib" and not re.fullmatch(r"package:[A-Za-z0-9_]+", self.source):
                raise ValueError(f"source {self.source!r}: after 'package:' comes the name it is imported by")
            if self.split not in ("train", "validation", "test"):
                raise ValueError(
                    f"source {self.source!r} has the splits train, validation and test, not {self.split!r}"
                )
            return self
        if not self.is_file:
            try:
                _repository(self.source)
            except ValueError:
                raise ValueError(
                    f"source {self.source!r} is neither 'stdlib', 'package:NAME', a file ({', '.join(LOCAL_FILES)}) "
                    "nor a data set's Hub id (USER/NAME)"
                ) from None
        for name in ("answers", "form"):
            if getattr(self, name) not in (None, "text"):
                raise ValueError(f"source {self.source!r}: '{name}' is for stdlib and package:NAME")
        return self


class Data(Section):
    train: list[Source] = Field(min_length=1)
    validation: list[Source] = Field(min_length=1)
    max_length: Tokens = Field(default=512, description="tokens in a row; longer samples are cut")
    packing: bool = Field(default=False, description="several samples to a row; they do not see each other")
    template: Name | None = Field(
        default=None, description="a chat template (Jinja) or a file that holds one; the tokenizer's own if left out"
    )
    max_skipped: Share = Field(
        default=0.1, description="share of rows that cannot be used (unknown speaker, empty chat, …) that is an error"
    )
    max_unsupervised: Share = Field(
        default=0.1, description="share of samples without a label (cut before the assistant speaks) that is an error"
    )

    @model_validator(mode="after")
    def _ends(self) -> "Data":
        for source in self.validation:
            if source.streaming and source.limit is None:
                raise ValueError(
                    f"validation source {source.source!r} is streamed; say with 'limit' how many rows of it"
                )
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optim(Section):
    name: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: from scratch only; matrices by Muon, embeddings and norms by AdamW"
    )
    eight_bit: bool = Field(default=False, description="AdamW with a quarter of its memory (needs bitsandbytes)")
    lr: float = Field(ge=1e-12, le=100)
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    weight_decay: float = Field(default=0.0, ge=0, le=100)
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0, le=SAMPLES)
    final_lr: Share = Field(default=0.0, description="share of lr that a linear or cosine schedule ends at")
    clip: float = Field(default=1.0, ge=1e-6, le=1e9, description="largest norm of a step's gradient")

    @model_validator(mode="after")
    def _possible(self) -> "Optim":
        if self.eight_bit and self.name != "adamw":
            raise ValueError(f"eight_bit is for adamw, not for {self.name}")
        return self


class Batch(Section):
    sequences: Sequences = Field(description="sequences per optimizer step, over all processes")
    accumulate: Positive = Field(default=1, description="micro-batches the sequences are split into")

    @model_validator(mode="after")
    def _even(self) -> "Batch":
        if self.sequences % self.accumulate:
            raise ValueError(f"sequences={self.sequences} is not a multiple of accumulate={self.accumulate}")
        return self


class Precision(Section):
    autocast: Literal["auto", "none", "bfloat16"] = Field(
        default="auto", description="of the products in training; auto: bfloat16 where the device has it in hardware"
    )
    compile: bool = Field(default=False, description="torch.compile the training step (needs a C++ compiler)")
    threads: Threads | None = Field(default=None, description="CPU threads; all cores if left out")
    gradient_checkpointing: bool = Field(
        default=False, description="make activations again in the backward pass: less memory, a third more time"
    )


class Checkpoint(Section):
    every: Positive = 200
    keep: Positive = 2


class Evaluate(Section):
    every: Positive = 200
    sequences: Positive = 64
    decode: Positive | None = Field(
        default=None, description="decode held-out prompts with the engine every so many steps: the real τ"
    )
    prompts: Positive = Field(default=8, description="how many of them")

    @model_validator(mode="after")
    def _together(self) -> "Evaluate":
        if self.decode and self.decode % self.every:
            raise ValueError(f"decode={self.decode} is not a multiple of every={self.every}")
        return self


class Track(Section):
    """Where metrics go besides metrics.jsonl."""

    wandb: bool = False
    project: Name = Field(default="draftsmith", description="the Weights & Biases project")
    offline: bool = Field(default=False, description="keep what wandb gets in the run folder, to be sent later")
    tensorboard: bool = Field(default=False, description="into the run folder's tensorboard/")


class Export(Section):
    """What happens to the finished run."""

    push_to_hub: HubId | None = Field(
        default=None, description="upload the run folder, without checkpoints, as USER/NAME"
    )
    private: bool = True
    merged: bool = Field(
        default=False,
        description="after joint training: write the target with its adapter merged in, too (target/); all of it has "
        "to fit into CPU memory",
    )


class Stage(Section):
    """One call of the training loop. A script with several stages lists them; one with a single stage inherits them."""

    optim: Optim
    batch: Batch
    steps: Positive

    @model_validator(mode="after")
    def _schedulable(self) -> "Stage":
        if self.steps * self.batch.sequences > SAMPLES:
            raise ValueError(
                f"steps={self.steps} × batch.sequences={self.batch.sequences} are more than the {SAMPLES:,} sequences "
                "that a stage may have; lower steps"
            )
        return self


class Recipe(Section):
    """The sections that every recipe shares."""

    run: Run
    data: Data
    precision: Precision = Precision()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    track: Track = Track()
    export: Export = Export()


R = TypeVar("R", bound=Recipe)
S = TypeVar("S", bound=Section)


_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,39})")
_FLOAT = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z|[-+]?\.inf\Z|\.nan\Z", re.IGNORECASE
)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_BYTES = 1_000_000  # of a file
_VALUES = 10_000  # in one recipe; aliases count as what they stand for


def _scalar(text: str) -> Any:
    """What an unquoted YAML scalar is: null, true or false, a decimal number, else text.

    These are YAML 1.2's words and numbers. By YAML 1.1, ``no`` is false, ``017`` is 15, ``1:30`` is 90, ``2024-01-01``
    is a date and ``2e-3`` is text.
    """
    if text in _WORDS or text in ("Null", "NULL", "True", "TRUE", "False", "FALSE"):
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text.replace(".", "")) if "n" in text.lower() else float(text)
    return text


def _document(text: str) -> Any:
    """The one YAML document in ``text``, as plain values. An alias is a copy of what its anchor names, so that an
    override changes one of them.

    Raises:
        yaml.YAMLError: it is no YAML, or has what recipes do without: tags, merge keys, keys that are no text, a key
            given twice, a second document, too many values.
    """
    events: Iterator[Any] = yaml.parse(text, yaml.SafeLoader)
    anchors: dict[str, tuple[Any, int]] = {}  # the value, and how many values it is
    count = 0

    def wrong(event: Any, problem: str) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def text_of(event: yaml.ScalarEvent) -> str:
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in event.value):
            raise wrong(event, "text cannot hold a null character or half of a surrogate pair")
        return event.value

    def key_of(event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.tag:
            raise wrong(event, "a key is a word; a list, mapping, alias or tag cannot be one")
        if event.value == "<<" and event.style is None:
            raise wrong(event, "merge keys (<<) are not supported; write the keys out, or set them by overrides")
        return text_of(event)

    def value_of(event: Any) -> Any:
        nonlocal count
        before = count
        count += anchors.get(event.anchor, (None, 0))[1] if isinstance(event, yaml.AliasEvent) else 1
        if count > _VALUES:
            raise wrong(event, f"more than {_VALUES:,} values; no recipe is so long")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise wrong(event, f"there is no anchor &{event.anchor} before this alias")
            return copy.deepcopy(anchors[event.anchor][0])
        if event.tag:
            raise wrong(
                event, f"tags ({event.tag.replace('tag:yaml.org,2002:', '!!')}) are not supported; leave it out"
            )
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(text_of(event)) if event.implicit[0] else text_of(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(entry := next(events), yaml.SequenceEndEvent):
                value.append(value_of(entry))
        else:
            value = {}
            while not isinstance(entry := next(events), yaml.MappingEndEvent):
                if (key := key_of(entry)) in value:
                    raise wrong(entry, f"key {key!r} is given twice")
                value[key] = value_of(next(events))
        if event.anchor:
            anchors[event.anchor] = value, count - before
        return value

    found = None
    next(events)  # the stream begins
    if isinstance(next(events), yaml.DocumentStartEvent):
        found = value_of(next(events))
        next(events)  # the document ends
        if not isinstance(event := next(events), yaml.StreamEndEvent):
            raise wrong(event, "a second document begins here; a recipe is one")
    return found


def _yaml(text: str, where: str, *, lines: bool = False) -> Any:
    """The value of YAML text; ``lines``: an error says in which one."""
    try:
        return _document(text)
    except yaml.YAMLError as error:
        problem, line = getattr(error, "problem", None) or str(error).splitlines()[0], None
        if mark := getattr(error, "problem_mark", None):
            line = mark.line + 1
        elif isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow
            line = text.count("\n", 0, int(error.position)) + 1
    except RecursionError:
        problem, line = "nested too deeply", None
    except (ValueError, OverflowError):  # PyYAML hands the number of an escape such as "\UFFFFFFFF" to chr()
        problem, line = "an escape in quotes stands for no character", None
    place = f":{line}" if lines and line else ""
    raise ValueError(f"{where}{place}: not valid YAML: {_short(problem)}")


def _short(text: str, most: int = 100) -> str:
    """At most so many characters of a text, on one line."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:most])
    return shown if len(text) <= most else f"{shown}…"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation such as ``list[Stage]`` or ``Answers | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for a in typing.get_args(annotation) for section in _sections(a)]


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys below a section; those of a list's entries as an override of its first one."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        entry = "0." if typing.get_origin(field.annotation) is list else ""
        for section in _sections(field.annotation):
            keys += _keys(section, f"{prefix}{name}.{entry}")
    return keys


def _nearest(model: type[BaseModel], path: tuple[str | int, ...]) -> str:
    """«; nearest valid key: …» for a key that does not exist: among its siblings first, then everywhere."""
    section: type[BaseModel] | None = model
    for part in path[:-1]:
        if isinstance(part, int) or section is None:
            continue
        field = section.model_fields.get(part)
        found = _sections(field.annotation) if field else []
        section = found[0] if found else None
    siblings = list(section.model_fields) if section else []
    last = str(path[-1])[:100]
    near = difflib.get_close_matches(last, siblings, n=1)
    if near:
        return "; nearest valid key: " + ".".join([*(str(p) for p in path[:-1]), near[0]])
    everywhere = {key.rsplit(".", 1)[-1]: key for key in reversed(_keys(model))}  # the first of a name wins
    near = difflib.get_close_matches(last, everywhere, n=1)
    if near:
        return f"; nearest valid key: {everywhere[near[0]]}"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def _explain(error: ValidationError, model: type[BaseModel], where: str, overrides: typing.Sequence[str]) -> str:
    first = error.errors()[0]
    path = tuple(p for p in first["loc"] if not (isinstance(p, str) and p.startswith("function-")))
    field = ".".join(map(str, path)) or "recipe"
    for override in overrides:  # name those that reach this field, and no innocent one
        key = override.partition("=")[0] + "."
        if key.startswith(f"{field}.") or f"{field}.".startswith(key):
            where += f" with {_short(override)}"
    more = len(error.errors()) - 1
    tail = f" (and {more} more)" if more else ""
    got = first["input"]
    shown = f", got {_short(repr(got))}" if isinstance(got, (str, int, float, bool, type(None))) else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key '{_short(field)}'{_nearest(model, path)}{tail}"
    if first["type"] == "missing":
        return f"{where}: '{field}' is missing; add it{tail}"
    if first["type"] in ("model_type", "dict_type"):
        kind = shown or f", got a {type(got).__name__}"
        return f"{where}: '{field}': this is a section; write its fields below it{kind}{tail}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: '{field}': {_short(message[0].lower() + message[1:], 400)}{shown}{tail}"


def read_recipe(path: str | Path, recipe: type[S], overrides: typing.Sequence[str] = ()) -> S:
    """Read ``path`` as a ``recipe``; ``overrides`` are ``section.field=value`` (the value is YAML; ``a.0.b`` reaches
    into lists).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: one line with file, field and the nearest valid key.
    """
    path = Path(path)
    if os.path.lexists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: not a file (a device, or a link that leads nowhere); a recipe is needed")
    if not os.path.lexists(path):
        there = sorted(p.stem for p in path.parent.glob("*.yaml")) if os.path.isdir(path.parent) else []
        near = difflib.get_close_matches(path.stem[:100], there, n=1)
        hint = f"; did you mean {path.parent / (near[0] + '.yaml')}?" if near else ""
        raise FileNotFoundError(f"{path}: there is no such recipe{hint}")
    if os.path.isfile(path) and (size := os.path.getsize(path)) > _BYTES:
        raise ValueError(f"{path}: {size:,} bytes; no recipe is so long")
    content = _yaml(read_text(path, "recipe"), str(path), lines=True)
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: a recipe is a mapping of sections (run, data, optim, …), got "
            f"{'nothing' if content is None else type(content).__name__}"
        )
    for override in overrides:
        _override(content, override, str(path))
    try:
        return recipe.model_validate(content)
    except ValidationError as error:
        raise ValueError(_explain(error, recipe, str(path), overrides)) from None


def _override(content: dict[str, Any], override: str, path: str) -> None:
    """Set what ``section.field=value`` names."""
    key, equals, value = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > 32:
        raise ValueError(f"'{_short(override)}' is no override; write section.field=value, for example optim.lr=1e-3")
    where, key = f"{path} with {_short(override)}", _short(key)
    node: Any = content
    for part, last in zip(parts, [False] * (len(parts) - 1) + [True], strict=True):
        at: Any = part
        if isinstance(node, list):
            if not re.fullmatch("[0-9]{1,5}", part) or int(part) >= len(node):
                raise ValueError(f"{where}: '{key}': the list has {len(node)} entries, counted from 0")
            at = int(part)
        if last:
            node[at] = _yaml(value, where)
            return
        node = node[at] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{where}: '{key}': '{_short(part)}' is a value, not a section")


class _Dumper(yaml.SafeDumper):
    """Quotes text that :func:`_scalar` would read as a number, and YAML 1.1 would not."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def write_recipe(recipe: Section, path: Path, command: str) -> None:
    """Save the resolved recipe, atomically, headed by the command that ran it."""
    text = yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    write_text(path, f"# {_short(command, len(command))}\n{text}")


__all__ = [
    "Answers", "Batch", "Checkpoint", "Data", "Evaluate", "Export", "Factor", "HubId", "Layers", "Name", "Optim",
    "Positive", "Precision", "Recipe", "Run", "Section", "Seed", "Sequences", "Share", "Source", "Stage", "Target",
    "Threads", "Tokens", "Track", "read_recipe", "write_recipe",
]  # fmt: skip
