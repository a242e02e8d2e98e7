"""Formats of a data set's rows, by their fields. If a row has several, the first in this order counts; null is absent.

    messages            [{"role": "user", "content": …}, …]     a conversation (OpenAI)
    conversations       [{"from": "human", "value": …}, …]      a conversation (ShareGPT)
    turns               ["…", "…"]                              what the user asks, in order (Spec-Bench, MT-Bench)
    prompt, completion  two texts, or two lists of messages     to train on; a prompt alone can only be asked
    text                a document                              to train on

:func:`read_sample` reads rows to train on, :func:`read_prompt` rows that ask something. Light to import.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.data.rows import UnusableRow

Message = dict[str, str]
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as plain text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Turns:
    """The user's messages of a conversation, at least one; each is asked after the answer to the one before."""

    texts: tuple[str, ...]


def read_sample(row: Any) -> str | list[Message] | Completion:
    """A row to train on: a document, a conversation or a completion. Messages of the assistant before anyone has asked
    are dropped (cut ShareGPT conversations begin with them).
    Raises UnusableRow: none of the known formats, malformed, or a conversation without a message of the user."""
    fields = _fields(row)
    chat = _conversation(fields)
    if chat is None and "prompt" in fields and "completion" in fields:
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(_text(prompt, "prompt"), _text(completion, "completion"))
        chat = _messages(prompt, "prompt") + _messages(completion, "completion")
    if chat is None and "text" in fields:
        return _filled(fields["text"], "text")
    if chat is None:
        raise _unknown(fields, "one of messages, conversations, prompt and completion, or text")
    first = next((i for i, m in enumerate(chat) if m["role"] in ("user", "tool")), None)
    if first is None:
        raise UnusableRow("a conversation without a turn of the user")
    return [m for i, m in enumerate(chat) if i >= first or m["role"] != "assistant"]


def read_prompt(row: Any) -> str | list[Message] | Turns:
    """A row that asks something: a text, a conversation (with the assistant's messages, if it has any), or the user's
    turns. A ``completion`` beside a prompt is ignored.
    Raises UnusableRow: none of the known formats, malformed, or empty."""
    fields = _fields(row)
    chat = _conversation(fields)
    if chat is not None:
        return chat
    if "turns" in fields:
        turns = fields["turns"]
        if not isinstance(turns, list | tuple) or not turns:
            raise UnusableRow(f"turns is {_kind(turns)}; a list of texts is needed")
        return Turns(tuple(_filled(turn, "one of the turns") for turn in turns))
    if "prompt" not in fields:
        raise _unknown(fields, "one of messages, conversations, turns or prompt")
    if isinstance(fields["prompt"], list | tuple):
        return _messages(fields["prompt"], "prompt")
    return _filled(fields["prompt"], "prompt", "a text or a list of messages")


def _fields(row: Any) -> dict[str, Any]:
    """The fields of a row that hold something."""
    if not isinstance(row, Mapping):
        raise UnusableRow(f"{_kind(row)} instead of an object with fields")
    return {str(name): value for name, value in row.items() if value is not None}


def _unknown(fields: Mapping[str, Any], needed: str) -> UnusableRow:
    return UnusableRow(f"it has {', '.join(fields)[:80] or 'nothing'}; needed is {needed}")


def _conversation(fields: Mapping[str, Any]) -> list[Message] | None:
    if "messages" in fields:
        return _messages(fields["messages"], "messages")
    if "conversations" in fields:
        return _messages(fields["conversations"], "conversations")
    return None


def _messages(messages: object, where: str) -> list[Message]:
    """A conversation, checked; OpenAI's text parts are joined to one text, ShareGPT's speakers become roles."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UnusableRow(f"{where} is {_kind(messages)}; a list of messages is needed")
    if not messages:
        raise UnusableRow("an empty conversation")
    sharegpt = where == "conversations" and not (isinstance(messages[0], Mapping) and "role" in messages[0])
    role_key, text_key = ("from", "value") if sharegpt else ("role", "content")
    chat: list[Message] = []
    for turn in messages:
        if not isinstance(turn, Mapping) or role_key not in turn or text_key not in turn:
            raise UnusableRow(f"a turn has no '{role_key}' or no '{text_key}'")
        role, text = turn[role_key], turn[text_key]
        known = _SHAREGPT if sharegpt else _ROLES
        if not isinstance(role, str) or role not in known:
            what = "is from an unknown speaker" if sharegpt else "has an unknown role"
            raise UnusableRow(f"a turn {what} (known: {', '.join(known)})")
        if isinstance(text, list) and text and all(isinstance(p, Mapping) and p.get("type") == "text" for p in text):
            text = "".join(_text(part.get("text"), f"a turn's '{text_key}'") for part in text)
        chat.append({"role": _SHAREGPT.get(role, role), "content": _text(text, f"a turn's '{text_key}'")})
    return chat


def _text(value: object, where: str, needed: str = "a text") -> str:
    if not isinstance(value, str):
        raise UnusableRow(f"{where} is {_kind(value)}; {needed} is needed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnusableRow(f"{where} holds half of a surrogate pair, which is no text") from None
    return value


def _filled(value: object, where: str, needed: str = "a text") -> str:
    text = _text(value, where, needed)
    if not text:
        raise UnusableRow(f"{where} is an empty text; {needed} is needed")
    return text


def _kind(value: object) -> str:
    """A JSON value's kind, for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return "a number"
    name = "text" if isinstance(value, str) else "list" if isinstance(value, Sequence) else "object"
    return f"an empty {name}" if not value else f"an {name}" if name == "object" else f"a {name}"
