"""Self-distillation data: the target itself answers seed prompts (arXiv 2401.10774 §2.3.2), to train a drafter on.

    python train/distill.py recipes/tiny-distill.yaml [section.field=value ...] [--dry-run] [--tiny] [--restart]

The user's messages of each seed are sent one by one; the answers in the seed are dropped, the target's are kept. The
target may also write the user's messages itself (``data.written``, ``self_talk``). The run's folder gets
shard-00000.jsonl, …, which a training recipe names as a source, failures.jsonl and manifest.json. The same command,
after a kill too, goes on where it stopped and sends the failed prompts again.

Exit codes: 0 done, 1 no answers, 2 wrong usage or bad input, or interrupted.
"""

import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

from draftsmith.common.command import available_cores, before_imports, recipe_parser, run_command
from draftsmith.common.content import check_recipe

PARSER = recipe_parser(
    __doc__, "recipes/tiny-distill.yaml", "self_talk=1", "a few answers of a small random target",
    resume="go on where it stopped; it does so anyway", restart="begin anew, deleting this run's answers",
    dry_run="show what would be sent; send and write nothing",
)  # fmt: skip
if __name__ == "__main__":
    before_imports(PARSER, check_recipe)

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which others import, would look for one and warn

from pydantic import Field, model_validator
from transformers import PreTrainedTokenizerBase

from draftsmith.common.files import json_object
from draftsmith.common.progress import ProgressBar
from draftsmith.common.recipe import Section, read_recipe, write_recipe
from draftsmith.common.sections import (
    Name,
    Positive,
    RunSection,
    Sequences,
    Share,
    Source,
    TargetSection,
    Threads,
    Tokens,
)
from draftsmith.data.chat import encode_prompt, encode_user_turn
from draftsmith.data.endpoint import Server, check_server, in_threads
from draftsmith.data.formats import Message
from draftsmith.data.rows import Skipped, UnusableRow
from draftsmith.data.seeds import (
    REJECTIONS,
    TOO_LONG,
    Conversation,
    RequestFailed,
    Seed,
    WrittenTurns,
    ask_for_user_turn,
    read_seeds,
    written_seeds,
)
from draftsmith.data.shards import Shards, open_shards
from draftsmith.data.tokenized import read_template
from draftsmith.inference.drafters.load import load_drafter
from draftsmith.inference.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.sampling import Sampling
from draftsmith.inference.text import answer_text
from draftsmith.inference.turns import serve_conversations
from draftsmith.models.artifact import provenance, write_json
from draftsmith.models.options import choose_device
from draftsmith.models.precision import DTYPES, describe
from draftsmith.models.stored import fingerprint, resolve_folder
from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train import folders
from draftsmith.train.loop import console, dtype_of
from draftsmith.train.tiny import SAMPLES, tiny_target, valid, write_target

TEMPLATE = "chat template"  # a reason of a failure, beside those of data/endpoint.py
OF_THE_PROMPT = (TOO_LONG, TEMPLATE, *REJECTIONS)  # reasons that do not count towards endpoint.give_up
MANIFEST_EVERY = 30.0  # seconds

Backend = Callable[["DistillRecipe", Iterator[Conversation], Callable[[Conversation], None]], None]


class GivenUpError(Exception):
    """``endpoint.give_up`` prompts in a row got no answer."""


class Seeds(Section):
    seeds: list[Source] = Field(default=[], description="sources of the user's messages; the assistant's are dropped")
    written: int = Field(
        default=0, ge=0, le=10_000_000, description="conversations more, of which the target writes the user's first "
        "message, too: it goes on where the template lets the user speak; backend engine",
    )  # fmt: skip
    template: Name | None = Field(
        default=None, description="a chat template (Jinja) or a file that holds one; the tokenizer's own if left out"
    )
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
    max_new_tokens: Tokens = Field(default=2048, description="of an answer; one that is cut there is kept and marked")
    user_temperature: float = Field(
        default=1.0, ge=1e-3, le=1e3, description="of the user's messages that the target writes, whatever the mode"
    )
    user_tokens: Tokens = Field(default=128, description="of such a message; a longer one is not used")


class Engine(Section):
    """Our own engine. None of it changes the answers, except that ``max_length`` may end a conversation early, and that
    of two conversations that the target begins with the same words, the one that has them first is kept."""

    drafter: Name = Field(default="none", description="a drafter's folder or Hub id; or none")
    batch_size: Sequences = Field(default=32, description="conversations decoded at once")
    max_length: Tokens = Field(
        default=4096, description="tokens of a conversation; memory is reserved for as many in each row of the batch"
    )
    threads: Threads | None = Field(default=None, description="CPU threads; all cores if left out")


class Endpoint(Section):
    """Any server with OpenAI's protocol; a key comes from the environment variable OPENAI_API_KEY alone."""

    url: str = Field(pattern=r"^https?://[^\s@?#]+$", description="without /chat/completions: http://localhost:8000/v1")
    model: str = Field(min_length=1, description="the name that the server knows it by")
    concurrency: Threads = Field(default=32, description="conversations at once")
    retries: int = Field(
        default=5, ge=0, le=30, description="after a timeout, 408, 429, 5xx, an incomplete or malformed answer"
    )
    timeout: float = Field(default=600.0, ge=0.001, le=86400, description="seconds without a byte from the server")
    backoff: float = Field(
        default=1.0, ge=0, le=3600, description="seconds before the first retry; doubled before each further one"
    )
    give_up: Positive = Field(default=200, description="end the run after this many prompts in a row without an answer")


class DistillRecipe(Section):
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
        if self.backend == "endpoint" and self.data.written:
            raise ValueError("data.written is for backend engine; a server does not continue the user's turn")
        return self

    def sampling(self, conversation: Conversation) -> Sampling:
        """Sampling parameters of the next message, with a seed of the prompt and the turn, whatever else is decoded."""
        digest = hashlib.sha256(f"{self.run.seed} {conversation.seed.id} {conversation.turn}".encode()).digest()
        d, seed = self.decoding, int.from_bytes(digest[:8], "big") >> 2
        if conversation.speaker == "user":
            return Sampling(d.user_temperature, seed=seed)
        return Sampling(d.temperature if d.mode == "sample" else 0.0, top_p=d.top_p, seed=seed)

    def decides(self) -> dict[str, Any]:
        """All settings that the answers depend on, by field. Those of speed and the server's address may change between
        two commands that fill the same folder."""
        own = self.self_talk or self.data.written
        fields = {
            f"decoding.{name}": value
            for name, value in self.decoding.model_dump(mode="json").items()
            if own or not name.startswith("user_")
        }
        fields |= {"run.seed": self.run.seed, "backend": self.backend, "self_talk": self.self_talk}
        fields |= {"data.seeds": self.data.model_dump(mode="json")["seeds"]}  # not 'written': more of them change none
        if self.backend == "endpoint":
            assert self.endpoint is not None
            return {**fields, "endpoint.model": self.endpoint.model}
        assert self.target is not None
        fields |= {f"target.{name}": value for name, value in self.target.model_dump(mode="json").items()}
        fields["target.fingerprint"] = fingerprint(resolve_folder(self.target.name, self.target.revision))
        fields |= {"data.template": read_template(self.data.template), "engine.max_length": self.engine.max_length}
        return fields


def check_has_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Raises: ValueError: neither the recipe nor the target's tokenizer has a chat template."""
    if not (template or tokenizer.chat_template):
        raise ValueError("the target's tokenizer has no chat template; set data.template, for example to "
                         "recipes/templates/vicuna.jinja")  # fmt: skip


def encode(messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str | None) -> list[int]:
    """Token ids of a conversation by the chat template, the assistant's turn begun.

    Raises:
        RequestFailed: the template refuses it.
        ValueError: there is no template.
    """
    check_has_template(tokenizer, template)
    try:
        return encode_prompt(messages, tokenizer, template)
    except UnusableRow as error:
        raise RequestFailed(TEMPLATE, str(error)) from None


def encode_turn(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: str | None
) -> tuple[list[int], str]:
    """As :func:`draftsmith.data.chat.encode_user_turn`.

    Raises:
        RequestFailed: the template refuses it.
    """
    try:
        return encode_user_turn(messages, tokenizer, template)
    except UnusableRow as error:
        raise RequestFailed(TEMPLATE, str(error)) from None


def by_engine(
    recipe: DistillRecipe, conversations: Iterator[Conversation], end: Callable[[Conversation], None]
) -> None:
    """Answers of our own engine, ``engine.batch_size`` conversations at a time.

    Raises:
        FileNotFoundError, ValueError: target or drafter cannot be used.
    """
    t, e, d = recipe.target, recipe.engine, recipe.decoding
    assert t is not None
    torch.set_num_threads(e.threads or available_cores())
    # Template and drafter are checked before the target's weights are loaded. The template is never the drafter's: a
    # drafter changes no answer.
    tokenizer = load_tokenizer(t.name, t.revision, t.trust_remote_code)
    template = read_template(recipe.data.template)
    check_has_template(tokenizer, template)
    target, drafter = load_drafter(
        e.drafter, target_name=t.name, revision=t.revision, dtype=t.dtype, quantize=t.quantize,
        device=choose_device(None), trust_remote_code=t.trust_remote_code,
    )  # fmt: skip
    if target.adapter:
        raise ValueError(
            f"engine.drafter={e.drafter}: its adapter changes the target's answers; use a drafter without one, or none"
        )
    longest = min(target.context, e.max_length)

    def next_request(conversation: Conversation) -> Request | None:
        assert conversation.pending is not None
        tokens, closing = d.max_new_tokens, None
        try:
            if conversation.speaker == "user":
                prompt, closing = encode_turn(conversation.pending, tokenizer, template)
                tokens = d.user_tokens
            else:
                prompt = encode(conversation.pending, tokenizer, template)
            if len(prompt) >= longest:
                raise RequestFailed(TOO_LONG, f"{len(prompt)} tokens before the answer, {longest} allowed with it")
        except RequestFailed as error:
            conversation.fail(error)
            end(conversation)
            return None
        conversation.closing = closing
        tokens = min(tokens, longest - len(prompt))
        # Not every target stops at the closing, which may be a special token that the text does not show.
        return Request(prompt, tokens, recipe.sampling(conversation), stop_strings=[closing] if closing else [])

    def on_answer(conversation: Conversation, result: Generation) -> bool:
        text, reason = answer_text(target, result.tokens), result.finish_reason
        closing = conversation.closing
        if closing and closing in text:
            text, reason = text.partition(closing)[0], "stop"
        conversation.add(text, reason)
        if conversation.pending is None:
            end(conversation)
        return conversation.pending is not None

    decoder = SpeculativeDecoder(target, drafter)
    # The user's turns are sampled in either mode; greedy answers in the same batch have temperature 0.
    mode = "sample" if recipe.self_talk or recipe.data.written else d.mode
    serve_conversations(
        decoder, conversations, next_request, on_answer, e.batch_size, mode=mode, max_length=longest
    )  # fmt: skip


def by_endpoint(
    recipe: DistillRecipe, conversations: Iterator[Conversation], end: Callable[[Conversation], None]
) -> None:
    """Answers of a server, ``endpoint.concurrency`` conversations at a time; ``end`` is called in this thread."""
    e, d = recipe.endpoint, recipe.decoding
    assert e is not None
    server = Server(e.url, e.model, e.timeout, e.retries, e.backoff)

    def converse(conversation: Conversation) -> None:
        while conversation.pending is not None:
            user, sampling = conversation.speaker == "user", recipe.sampling(conversation)
            options: dict[str, Any] = {"max_tokens": d.user_tokens if user else d.max_new_tokens, "temperature": 0}
            if user or d.mode == "sample":
                seed = sampling.seed % (1 << 31)  # what every server takes
                options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
            messages = ask_for_user_turn(conversation.pending) if user else conversation.pending
            try:
                conversation.add(*server.answer(messages, **options))
            except RequestFailed as error:
                conversation.fail(error)

    with closing(in_threads(converse, conversations, e.concurrency, server.stopped)) as finished:
        for conversation in finished:
            end(conversation)


def dry(recipe: DistillRecipe, seeds: list[Seed]) -> None:
    """Print how much would be sent, and the first prompt."""
    d, turns = recipe.decoding, sum(seed.turns for seed in seeds)
    answers, written = turns + recipe.self_talk * len(seeds), recipe.self_talk * len(seeds) + recipe.data.written
    asked = f" and {written:,} messages of the user of {d.user_tokens:,}" if written else ""
    tokens = answers * d.max_new_tokens + written * d.user_tokens
    console.print(
        f"{len(seeds):,} prompts with {turns:,} turns of the user, {recipe.self_talk} more of self-talk each: at most "
        f"{answers:,} answers of {d.max_new_tokens:,} tokens{asked}, {tokens:,} tokens in all, {d.mode}, by "
        f"{recipe.backend}.{' The first prompt:' if seeds[0].messages else ''}"
    )
    if not seeds[0].messages:
        return console.print("The target writes the user's messages, the first one too.")
    first = Conversation(seeds[0], 0).pending or []
    if recipe.target is None or recipe.backend == "endpoint":
        console.print_json(json.dumps(first))
        return
    t = recipe.target
    try:
        tokenizer = load_tokenizer(t.name, t.revision, t.trust_remote_code)
    except (OSError, ValueError) as error:
        console.print(f"not rendered: {error}")
        return
    try:
        ids = encode(first, tokenizer, read_template(recipe.data.template))
    except RequestFailed as error:
        raise ValueError(f"the chat template refuses the first prompt: {error.detail}") from None
    console.print(tokenizer.decode(ids))


def small(recipe: DistillRecipe) -> DistillRecipe:
    """``--tiny``: eight bundled chats, and two that the target begins where the recipe has such; sixteen tokens a
    message, by a small random target of the same family."""
    content: dict[str, Any] = recipe.model_dump()
    content["run"]["name"] += "-tiny"
    folder = Path(recipe.run.output_dir) / content["run"]["name"]
    target = content["target"] or {"name": "", "model_type": "llama"}
    content |= {"backend": "engine", "endpoint": None, "target": tiny_target(target, folder)}
    content["engine"] |= {"drafter": "none", "batch_size": 4, "max_length": 512}
    content["data"] |= {"seeds": [{"source": str(SAMPLES), "limit": 8}], "written": min(recipe.data.written, 2)}
    content["decoding"] |= {"max_new_tokens": 16, "user_tokens": 16}
    return valid(DistillRecipe, content)


def with_dtype(recipe: DistillRecipe, folder: Path, restart: bool) -> DistillRecipe:
    """The recipe with ``target.dtype: auto`` resolved, for a run that goes on as it was; printed in a line, with a
    second one if it is slow here."""
    t, manifest = recipe.target, folder / "manifest.json"
    if t is None or recipe.backend == "endpoint":
        return recipe
    began = None
    with suppress(ValueError, OSError, LookupError, TypeError):  # open_shards refuses a damaged one
        began = None if restart else json_object(manifest)["decides"]["target.dtype"]
    device = choose_device(None)
    chosen = dtype_of(t, torch.device(device), began if began in DTYPES else None)
    for line in describe(device, chosen):
        console.print(line, style="yellow" if line.startswith("warning") else None)
    return recipe.model_copy(update={"target": t.model_copy(update={"dtype": chosen.value})})


def seeds_of(recipe: DistillRecipe) -> tuple[list[Seed], Skipped]:
    """The seeds, and the rows that were skipped, which are printed."""
    seeds, skipped = read_seeds(recipe.data.seeds, recipe.data.max_skipped) if recipe.data.seeds else ([], Skipped())
    if skipped.count:
        console.print(f"seeds: {skipped}")
    return [*seeds, *written_seeds(recipe.data.written)], skipped


def main() -> None:
    args = PARSER.parse_intermixed_args()
    if args.resume and args.restart:
        raise ValueError("--resume and --restart exclude each other; pass one")
    command = "python train/distill.py " + shlex.join(sys.argv[1:])
    recipe = read_recipe(args.recipe, DistillRecipe, args.overrides)
    recipe = small(recipe) if args.tiny else recipe
    if args.dry_run:
        return dry(recipe, seeds_of(recipe)[0])
    folder = recipe.run.folder
    with folders.held(folder, "distill"):
        seeds, skipped = seeds_of(recipe)
        if args.tiny and recipe.target:
            write_target(recipe.target)
        recipe = with_dtype(recipe, folder, args.restart or args.tiny)
        decides = recipe.decides()
        shards = open_shards(folder, decides, args.restart or args.tiny)
        rows_skipped = {reason: count for count, reason, _ in skipped.table()}
        facts = {"rows_skipped": rows_skipped, "decides": decides, **provenance(command=command, recipe=args.recipe)}
        write_json(folder / "manifest.json", facts)  # first of all: it marks the folder as this run's
        write_recipe(recipe, folder / "recipe.yaml", command)
        distill(recipe, seeds, shards, facts, by_engine if recipe.backend == "engine" else by_endpoint)


def distill(
    recipe: DistillRecipe, seeds: list[Seed], shards: Shards, facts: dict[str, Any], backend: Backend
) -> None:  # fmt: skip
    """Get the answers that are missing, and keep the manifest with its ``facts`` up to date.

    Raises:
        ConnectionError: no server listens at the endpoint.
        SystemExit: no answers (code 1).
        KeyboardInterrupt: the user stopped it; the answers so far are kept.
    """
    # A turn that was rejected would be written again, word for word.
    rejected = {id for id, line in shards.failures.items() if line["reason"] in REJECTIONS}
    todo = [seed for seed in seeds if seed.id not in shards.answers and seed.id not in rejected]
    wanted = {seed.id: seed.turns + recipe.self_talk for seed in seeds}

    def write_manifest() -> dict[str, Any]:
        counts = shards.counts(wanted)
        content = {"counts": counts, "finish_reasons": dict(shards.finish_reasons), **facts}
        write_json(shards.folder / "manifest.json", content)
        return counts

    write_manifest()
    if todo and recipe.endpoint and recipe.backend == "endpoint":
        check_server(recipe.endpoint.url)
    bar = ProgressBar(f"{len(todo):,} of {len(seeds):,} prompts to answer, by {recipe.backend}", len(todo), console)
    ended, answered, failed_in_a_row, saved = 0, 0, 0, time.monotonic()

    def end(conversation: Conversation) -> None:
        nonlocal ended, answered, failed_in_a_row, saved
        seed, why = conversation.seed, conversation.failure
        if why is None:
            shards.add(seed.id, conversation.messages, conversation.finish_reasons, seed.source)
            answered, failed_in_a_row = answered + 1, 0
        else:
            shards.fail(seed.id, seed.source, why.reason, why.detail)
            failed_in_a_row += why.reason not in OF_THE_PROMPT
        ended += 1
        bar(ended)
        if time.monotonic() - saved > MANIFEST_EVERY:
            write_manifest()
            saved = time.monotonic()
        if recipe.endpoint and failed_in_a_row >= recipe.endpoint.give_up:
            raise GivenUpError

    stopped: BaseException | None = None
    try:
        if todo:
            with bar:
                written = WrittenTurns(shards.first_turns)
                backend(recipe, (Conversation(seed, recipe.self_talk, written) for seed in todo), end)
    except (GivenUpError, KeyboardInterrupt) as error:
        stopped = error
    if isinstance(stopped, KeyboardInterrupt):
        shards = Shards(shards.folder)  # it may have come between writing a line and counting it
    shards.tidy()
    counts = write_manifest()
    summary = f"{counts['done']:,} of {len(seeds):,} prompts are answered in {shards.folder}"
    if isinstance(stopped, KeyboardInterrupt):
        raise KeyboardInterrupt(f"stopped: {summary}; the same command goes on")
    if counts["failed"]:
        reasons = ", ".join(f"{reason} {count:,} times" for reason, count in counts["failed"].items())
        again = "the same command sends these again, but for user's turns that were not used"
        summary += f"; failed: {reasons} (see failures.jsonl; {again})"
    if stopped or (failed_in_a_row and not answered) or not counts["done"]:
        detail = list(shards.failures.values())[-1]["detail"]
        print(f"error: no answers: {summary}{f': {detail}' if detail else ''}", file=sys.stderr, flush=True)
        raise SystemExit(1)
    console.print(f"done: {summary}")


if __name__ == "__main__":
    run_command(main, resumable=True)
