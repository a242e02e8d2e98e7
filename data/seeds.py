"""Seeds for self-distillation: the user's side of conversations, and the conversations that a model makes of them.

Which rows ask something, :func:`draftsmith.data.formats.read_prompt` decides.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from draftsmith.common.command import make_console
from draftsmith.common.data_sections import Source
from draftsmith.data.formats import FLAGS, REASONING, RESULTS, Message, TokenIds, read_prompt, unused_fields
from draftsmith.data.rows import Skipped, UnusableRow, rows, usable

console = make_console()
TOO_LONG = "too long"
CUT_THINKING, EMPTY = "cut while thinking", "empty answer"  # of a server; a request that is sent again ends so again
CUT, REPETITIVE = "user's turn cut", "user's turn repetitive"
DUPLICATE, SHORT = "user's turn duplicate", "user's turn short"
REJECTIONS = (CUT, REPETITIVE, DUPLICATE, SHORT)
UNASKED = {*FLAGS, *REASONING, "tool_calls", "function_call"}  # of answers, which the target writes anew
WRITTEN = "target"  # source of the conversations that the model begins itself
# A character of a script that is written without spaces counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")
SELF_TALK_PROMPT = (
    "Below is a conversation between a user and an assistant. Write the user's next message, and nothing else.\n\n"
)


@dataclass(frozen=True)
class Seed:
    """The user's side of one conversation.

    id: hash of the source's name and the content (and, among equal ones, a number). It is the same on every machine,
        and does not depend on the other rows or on rows added to the source later.
    messages: the messages of the user and the system in order, none of the assistant; the last is the user's. None at
        all: the model writes the user's first turn, too.
    """

    id: str
    source: str
    messages: tuple[Message, ...]

    @property
    def turns(self) -> int:
        """Number of answers it asks for."""
        return sum(message["role"] == "user" for message in self.messages) or 1


def written_seeds(count: int) -> list[Seed]:
    """Seeds of conversations whose first turn of the user the model writes, too; more seeds change none before them."""
    return [Seed(f"{WRITTEN}-{number:06}", WRITTEN, ()) for number in range(count)]


def read_seed(row: Any) -> tuple[Message, ...]:
    """The user's and the system's messages of a row, up to the last one of the user and before the first result of a
    call, which the target has not made.
    Raises UnusableRow: as :func:`draftsmith.data.formats.read_prompt`; or the user asks nothing."""
    content = read_prompt(row)
    texts = content if isinstance(content, tuple) else [content] if isinstance(content, str) else []
    chat = content if isinstance(content, list) else [{"role": "user", "content": text} for text in texts]
    before = itertools.takewhile(lambda m: m["role"] not in RESULTS, chat)
    messages = [{name: m[name] for name in ("role", "content")} for m in before if m["role"] != "assistant"]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise UnusableRow("the user asks nothing")
    return tuple(messages)


def read_seeds(sources: Sequence[Source], max_skipped: float = 0.1) -> tuple[list[Seed], Skipped]:
    """The seeds of all sources, mixed so that any beginning has the same share of each, and the rows that were skipped.
    ``max_skipped``: the share of a source's rows that may be skipped.
    Raises FileNotFoundError, ValueError: a source cannot be read, too many of its rows ask nothing, or all of them."""
    parts: list[list[Seed]] = []
    seen: Counter[str] = Counter()
    total = Skipped()
    for source in sources:
        skipped, part = Skipped(), list[Seed]()
        parts.append(part)

        def read(row: Any, skipped: Skipped = skipped) -> tuple[tuple[Message, ...], set[str]]:
            return read_seed(row), unused_fields(row, UNASKED)

        for place, (messages, unused) in usable(itertools.islice(rows(source)[0], source.limit), read, skipped):
            skipped.note(place, 0, (), unused)
            digest = hashlib.sha256(json.dumps([source.source, messages]).encode()).hexdigest()[:20]
            part.append(Seed(f"{digest}-{seen[digest]}" if seen[digest] else digest, source.source, messages))
            seen[digest] += 1
        skipped.check(source.source, max_skipped)
        total.rows += skipped.rows
        for count, reason, place in skipped.table():
            total.add(reason, place if len(sources) == 1 else f"{place} of {source.source}", count)
        for line in replace(skipped, reasons={}).lines():
            console.print(f"seeds of {source.source}: {line}")
    if not any(parts):
        why = f": {total}" if total.count else ""
        raise ValueError(f"data.seeds: no row of {', '.join(s.source for s in sources)} asks anything{why}")
    placed = [((at + 0.5) / len(part), seed) for part in parts for at, seed in enumerate(part)]
    return [seed for _, seed in sorted(placed, key=itemgetter(0))], total


@dataclass(eq=False)
class RequestFailed(Exception):
    """A request without an answer.

    reason: ``timeout``, ``connection``, ``http 429``, ``malformed answer``, ``too long`` …
    detail: the beginning of the server's message.
    retry: whether the same request may succeed later, after ``retry_after`` seconds if the server gave a time.
    fields: sampling parameters of the request that a refusal names.
    """

    reason: str
    detail: str = ""
    retry: bool = False
    retry_after: float | None = None
    fields: frozenset[str] = frozenset()


class WrittenTurns:
    """Filter for user turns that the model writes: kept are complete ones, not too short, not repetitive, and new.
    ``known``: first turns of the conversations that are there already.
    ``is_first``: whether no other process has written a first turn with these words."""

    SHORTEST = 3  # words
    DISTINCT = 0.5  # smallest share of distinct words

    def __init__(self, known: Iterable[str] = (), is_first: Callable[[str], bool] = lambda words: True) -> None:
        self._seen = {self._key(text) for text in known}
        self._is_first = is_first

    @staticmethod
    def _key(text: str) -> str:
        return " ".join(_WORD.findall(text.lower()))

    def rejection(self, text: str, finish_reason: str, first: bool) -> str | None:
        """Reason to reject a turn; None if it is kept. A conversation's first turn has to be new; it is then known."""
        key = self._key(text)
        words = key.split()
        if finish_reason == "length":
            return CUT
        if len(words) < self.SHORTEST:
            return SHORT
        if len(set(words)) < self.DISTINCT * len(words):
            return REPETITIVE
        if first and (key in self._seen or not self._is_first(key)):
            return DUPLICATE
        if first:
            self._seen.add(key)
        return None


Said = tuple[str, str, str, TokenIds | None]  # text, finish reason, reasoning, token ids of a message


@dataclass
class Conversation:
    """A conversation under way.

    written: filter for the user turns that the model writes.
    pending: the messages that wait for the next one; None when the conversation is over.
    speaker: whose message that is, ``assistant`` or ``user``.
    closing: the text that ends the message under way, where the engine writes the user's; None otherwise.
    prompt: token ids of the prompt under way, where the engine answers.
    token_ids: of each answer so far; None where they are not known.
    turn: number of messages that the model wrote so far.
    failure: why it failed, if it did.
    """

    seed: Seed
    self_talk: int
    written: WrittenTurns = field(default_factory=WrittenTurns)
    messages: list[Message] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    token_ids: list[TokenIds | None] = field(default_factory=list)
    speaker: str = "assistant"
    closing: str | None = None
    prompt: list[int] = field(default_factory=list)
    turn: int = 0
    failure: RequestFailed | None = None

    def __post_init__(self) -> None:
        self._requests = self._converse()
        self.pending: list[Message] | None = next(self._requests)

    def _converse(self) -> Generator[list[Message], Said, None]:
        """The whole algorithm: yields the messages before the next one and is sent that one (text, finish reason,
        reasoning, token ids)."""
        for message in self.seed.messages:
            self.messages.append(message)
            if message["role"] == "user":
                yield from self._answered()
        for _ in range(self.self_talk + (not self.seed.messages)):
            self.speaker = "user"
            text, finish_reason, _, _ = yield self.messages
            why = self.written.rejection(text, finish_reason, not self.messages)
            if why and not self.messages:
                raise RequestFailed(why, text[:200])
            if why:
                return  # the answers so far are kept
            self.messages.append({"role": "user", "content": text.strip()})
            yield from self._answered()

    def _answered(self) -> Generator[list[Message], Said, None]:
        self.speaker = "assistant"
        text, finish_reason, reasoning, token_ids = yield self.messages
        thought = {"reasoning_content": reasoning} if reasoning else {}
        self.messages.append({"role": "assistant", "content": text, **thought})
        self.finish_reasons.append(finish_reason)
        self.token_ids.append(token_ids)

    def add(self, text: str, finish_reason: str, reasoning: str = "", token_ids: TokenIds | None = None) -> None:
        """Add the message that ``pending`` waits for, with what the model thought before it and the ids of both, and go
        on to what waits for one next."""
        try:
            self.pending = self._requests.send((text, finish_reason, reasoning, token_ids))
        except StopIteration:
            self.pending = None
        except RequestFailed as error:
            self.fail(error)
        self.turn += 1

    def fail(self, why: RequestFailed) -> None:
        """End the conversation. Where only the next turn is too long or empty, or the user's cannot be written, the
        answers so far are kept."""
        self.pending = None
        kept = why.reason in (TOO_LONG, CUT_THINKING, EMPTY) or (self.speaker == "user" and not why.retry)
        if not kept or not self.finish_reasons:
            self.failure = why
            return
        while self.messages[-1]["role"] != "assistant":
            self.messages.pop()


def ask_for_user_turn(messages: Sequence[Message]) -> list[Message]:
    """A prompt that asks a model for the user's next message, for a server, which applies the template itself."""
    history = [f"{m['role'].capitalize()}: {m['content']}\n" for m in messages if m["role"] != "system"]
    return [{"role": "user", "content": f"{SELF_TALK_PROMPT}{''.join(history)}User:"}]
