"""Formats of a data set's rows, by their fields. If a row has several, the first in this order counts; null is absent.

    messages            [{"role": "user", "content": …}, …]     a conversation (OpenAI)
    conversations       [{"from": "human", "value": …}, …]      a conversation (ShareGPT)
    turns               ["…", "…"]                              what the user asks, in order (Spec-Bench, MT-Bench)
    prompt, completion  two texts, or two lists of messages     to train on; without completion it can only be asked
    text                a document                              to train on

A conversation may come with ``system``, a text that becomes its first message, ``tools``, and ``token_ids``: one object
for each of the assistant's messages, with the ids of its ``prompt`` as the model read it, and of the ``answer`` as it
was sampled. A message may have
further fields (``tool_calls``, ``reasoning_content``, ``weight``, …). They are kept, except null and empty ones:
parquet gives each message the fields of all others, and a row is the same from JSON and from parquet.

:func:`read_sample` reads rows to train on, :func:`read_prompt` rows that ask something. Light to import.
"""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from draftsmith.data.rows import UnusableRow

Message = dict[str, Any]  # "role" and "content" are texts
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
RESULTS = ("tool", "function")  # roles of the results of calls
FLAGS = ("weight", "loss", "train", "loss_mask")  # 0 or false: the message is not trained on
ASKED = "asked"  # marks the messages of a prompt whose completion alone is trained on
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of what the assistant wrote before its answer
# Fields that are read wherever they have an effect, and those that train/distill.py notes for people.
_KNOWN = {"messages", "conversations", "turns", "prompt", "completion", "text", "id", "source", "finish_reason"}
_KNOWN |= {"token_ids", "role", "content", "from", "value"}


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as plain text."""

    prompt: str
    completion: str


class _BothIds(TypedDict):
    prompt: list[int]
    answer: list[int]


class TokenIds(_BothIds, total=False):
    """The ids of an answer's prompt, from the text's beginning on, and of the answer with what the model thought before
    it and the token that ended it. ``logprobs``: of the answer's ids, if they were asked for; training reads none."""

    logprobs: dict[str, Any]


def is_ids(value: object) -> bool:
    """Whether it is a list of token ids, at least one."""
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def read_token_ids(row: Mapping[str, Any]) -> list[TokenIds]:
    """The token ids of the assistant's messages, one for each; none if left out.
    Raises UnusableRow: they are something else."""
    found = row.get("token_ids")
    if found is None:
        return []
    fields = ("prompt", "answer")
    if not isinstance(found, list) or not all(
        isinstance(one, Mapping) and all(is_ids(one.get(name)) for name in fields) for one in found
    ):
        raise UnusableRow("token_ids is no list of objects with the ids of a prompt and an answer")
    return [TokenIds(prompt=one["prompt"], answer=one["answer"]) for one in found]


def read_sample(row: Any) -> str | list[Message] | Completion:
    """A row to train on: a document, a conversation or a completion. Messages of the assistant before anyone has asked
    are dropped (cut ShareGPT conversations begin with them).
    Raises UnusableRow: none of the known formats, malformed, or a conversation without a message of the user."""
    fields = _fields(row)
    chat = _conversation(fields)
    if chat is None and "prompt" in fields and "completion" in fields:
        prompt, completion = fields["prompt"], fields["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(_text(prompt, "prompt"), _filled(completion, "completion"))
        asked: list[Message] = [{**message, ASKED: True} for message in _messages(prompt, "prompt")]
        chat = _with_system([*asked, *_messages(completion, "completion")], fields)
    if chat is None and "text" in fields:
        return _filled(fields["text"], "text")
    if chat is None:
        raise _unknown(fields, "one of messages, conversations, prompt and completion, or text")
    first = next((i for i, m in enumerate(chat) if m["role"] in ("user", *RESULTS)), None)
    if first is None:
        raise UnusableRow("a conversation without a turn of the user")
    return [m for i, m in enumerate(chat) if i >= first or m["role"] != "assistant"]


def read_prompt(row: Any) -> str | list[Message] | tuple[str, ...]:
    """A row that asks something: a text, a conversation (with the assistant's messages, if it has any), or the user's
    turns (a tuple), each asked after the answer before it. The ``completion`` of a prompt is ignored.
    Raises UnusableRow: none of the known formats, malformed, or empty."""
    fields = _fields(row)
    chat = _conversation(fields)
    if chat is not None:
        return chat
    if "turns" in fields:
        turns = fields["turns"]
        if not isinstance(turns, list | tuple) or not turns:
            raise UnusableRow(f"turns is {_kind(turns)}; a list of texts is needed")
        return tuple(_filled(turn, "one of the turns") for turn in turns)
    if "prompt" not in fields:
        raise _unknown(fields, "one of messages, conversations, turns or prompt")
    if isinstance(fields["prompt"], list | tuple):
        return _with_system(_messages(fields["prompt"], "prompt"), fields)
    return _filled(fields["prompt"], "prompt", "a text or a list of messages")


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that a conversation's assistant may call, as objects or as the text of their JSON; none if left out.
    Raises UnusableRow: they are neither."""
    return _objects(row.get("tools"), "tools")


def unused_fields(row: Any, used: Collection[str]) -> set[str]:
    """The names of a row's and its messages' fields that hold something and are neither part of a format nor among
    ``used``."""
    found = {str(name) for name, value in row.items() if not _empty(value)}
    turns = [row[name] for name in ("messages", "conversations", "prompt", "completion") if _is_chat(row.get(name))]
    found |= {str(name) for turn in itertools.chain(*turns) for name, value in turn.items() if not _empty(value)}
    return found - _KNOWN - set(used) - ({"system"} if turns else set())


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(turn, Mapping) for turn in value)


def _fields(row: Any) -> dict[str, Any]:
    """The fields of a row that hold something."""
    if not isinstance(row, Mapping):
        raise UnusableRow(f"{_kind(row)} instead of an object with fields")
    return {str(name): value for name, value in row.items() if value is not None}


def _unknown(fields: Mapping[str, Any], needed: str) -> UnusableRow:
    return UnusableRow(f"it has {', '.join(fields)[:80] or 'nothing'}; needed is {needed}")


def _conversation(fields: Mapping[str, Any]) -> list[Message] | None:
    for name in ("messages", "conversations"):
        if name in fields:
            return _with_system(_messages(fields[name], name), fields)
    return None


def _with_system(chat: list[Message], fields: Mapping[str, Any]) -> list[Message]:
    """A conversation with the text of the field ``system`` as its first message."""
    system = fields.get("system", "")
    if system in ("", chat[0]["content"] if chat[0]["role"] == "system" else ""):
        return chat
    if chat[0]["role"] == "system":
        raise UnusableRow("the field 'system' and the first message are two different system messages")
    return [{"role": "system", "content": _text(system, "system")}, *chat]


def _messages(messages: object, where: str) -> list[Message]:
    """A conversation, checked; OpenAI's text parts are joined to one text, ShareGPT's speakers become roles."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise UnusableRow(f"{where} is {_kind(messages)}; a list of messages is needed")
    if not messages:
        raise UnusableRow("an empty conversation")
    return [_message(turn, where == "conversations") for turn in messages]


def _message(turn: Any, sharegpt: bool) -> Message:
    sharegpt = sharegpt and isinstance(turn, Mapping) and turn.get("role") is None  # some data sets mix both
    role_key, text_key = ("from", "value") if sharegpt else ("role", "content")
    if not isinstance(turn, Mapping) or role_key not in turn:
        raise UnusableRow(f"a turn has no '{role_key}' or no '{text_key}'")
    role, text = turn[role_key], turn.get(text_key)
    known = _SHAREGPT if sharegpt else _ROLES
    if not isinstance(role, str) or role not in known:
        what = "is from an unknown speaker" if sharegpt else "has an unknown role"
        raise UnusableRow(f"a turn {what} (known: {', '.join(known)})")
    more = {str(name): _without_nulls(value) for name, value in turn.items() if not _empty(value)}
    for name in (role_key, text_key, ASKED):
        more.pop(name, None)
    if "function_call" in more:  # OpenAI's older form
        more.setdefault("tool_calls", [{"type": "function", "function": more.pop("function_call")}])
    if "tool_calls" in more:
        more["tool_calls"] = [_call(call) for call in _objects(more["tool_calls"], "a turn's 'tool_calls'")]
    for name in FLAGS:
        if more.get(name, 1) not in (0, 1):
            raise UnusableRow(f"a turn's '{name}' is neither 0 nor 1")
    if text is None and ("tool_calls" in more or any(name in more for name in REASONING)):
        text = ""
    elif text_key not in turn:
        raise UnusableRow(f"a turn has no '{role_key}' or no '{text_key}'")
    if isinstance(text, list) and text and all(isinstance(p, Mapping) and p.get("type") == "text" for p in text):
        text = "".join(_text(part.get("text"), f"a turn's '{text_key}'") for part in text)
    return {"role": _SHAREGPT.get(role, role), "content": _text(text, f"a turn's '{text_key}'"), **more}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, as templates need them; OpenAI's are the text of one."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableRow("a call has no function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _objects(value: object, where: str) -> list[dict[str, Any]]:
    """A list of objects, given as such or as the text of its JSON; without nulls."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UnusableRow(f"{where} is a text that is no JSON; a list of objects is needed") from None
    if _empty(value):
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise UnusableRow(f"{where} is {_kind(value)}; a list of objects is needed")
    return _without_nulls(value)


def _empty(value: object) -> bool:
    return value is None or value in ("", "[]", [], {})


def _without_nulls(value: Any) -> Any:
    """A value without the nulls in it, which Arrow adds to objects that lack another's fields."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list | tuple) else value


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
