"""Samples of other people's formats to token ids and the mask of what is supervised.

Formats, told by a row's fields:

    messages        [{"role": "user", "content": …}, …]         OpenAI
    conversations   [{"from": "human", "value": …}, …]          ShareGPT
    prompt, completion                                          plain text, or two lists of messages
    text                                                        a document, supervised throughout

What the assistant wrote is marked by the chat template's ``{% generation %}`` block, else found by comparing renderings
of the chat that end before and behind each of its turns. Where neither works it is an error, never a guess.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import TemplateError
from transformers import BatchEncoding, PreTrainedTokenizerBase

from draftsmith.data.packing import Sample

Message = dict[str, str]
_SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ADVICE = "give the recipe a data.template with {% generation %}…{% endgeneration %} around what the assistant writes"


@dataclass(frozen=True)
class Completion:
    """A prompt and what follows it, as plain text."""

    prompt: str
    completion: str


def _messages(turns: object, role_key: str, text_key: str) -> list[Message]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError("its turns are no list")
    chat: list[Message] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or role_key not in turn or text_key not in turn:
            raise ValueError(f"turn {number} has no '{role_key}' or no '{text_key}'")
        role, text = str(turn[role_key]), turn[text_key]
        if role_key == "from":
            if role not in _SHAREGPT:
                raise ValueError(f"turn {number} is from '{role}'; known are {', '.join(_SHAREGPT)}")
            role = _SHAREGPT[role]
        if isinstance(text, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in text):
            text = "".join(str(part["text"]) for part in text)  # OpenAI's content parts
        if not isinstance(text, str):
            raise ValueError(f"turn {number}: its '{text_key}' is no text")
        chat.append({"role": role, "content": text})
    return chat


def read_row(row: Mapping[str, Any]) -> str | list[Message] | Completion:
    """A row of a data set as a document, a chat or a completion. Turns of the assistant before anyone has asked are
    dropped (cut ShareGPT chats begin with them).

    Raises:
        ValueError: it has none of the known formats, or is malformed.
    """
    if row.get("messages") is not None:
        chat = _messages(row["messages"], "role", "content")
    elif row.get("conversations") is not None:
        turns = row["conversations"]
        openai = isinstance(turns, Sequence) and turns and isinstance(turns[0], Mapping) and "role" in turns[0]
        chat = _messages(turns, *(("role", "content") if openai else ("from", "value")))
    elif row.get("prompt") is not None and row.get("completion") is not None:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(prompt, completion)
        chat = _messages(prompt, "role", "content") + _messages(completion, "role", "content")
    elif isinstance(row.get("text"), str):
        return str(row["text"])
    else:
        fields = ", ".join(map(str, row)) or "nothing"
        raise ValueError(f"it has {fields}; needed is one of messages, conversations, prompt and completion, or text")
    first = next((i for i, m in enumerate(chat) if m["role"] in ("user", "tool")), len(chat))
    return [m for i, m in enumerate(chat) if i >= first or m["role"] != "assistant"]


def encode(
    content: str | list[Message] | Completion, tokenizer: PreTrainedTokenizerBase, template: str | None,
    max_length: int, finish_reasons: Sequence[str] = (),
) -> Sample:  # fmt: skip
    """Token ids with the mask, cut at ``max_length`` (never dropped).

    Args:
        finish_reasons: why each of the assistant's turns ended, where that is known: one that was cut ("length") has
            not said the end token that a template puts behind it.

    Raises:
        ValueError: the template does not let the assistant's part be told from the rest, or refuses the chat.
    """
    if isinstance(content, str):
        ids = _ids(tokenizer, content)
        sample = Sample(ids, [True] * len(ids))
    elif isinstance(content, Completion):
        before, behind = _ids(tokenizer, content.prompt), _ids(tokenizer, content.completion)
        if tokenizer.eos_token_id is not None:
            behind.append(cast(int, tokenizer.eos_token_id))
        sample = Sample(before + behind, [False] * len(before) + [True] * len(behind))
    else:
        sample = _encode_chat(content, tokenizer, template)
        _unmark_ends(sample, finish_reasons, tokenizer)
    return Sample(sample.ids[:max_length], sample.supervised[:max_length])


def _unmark_ends(sample: Sample, finish_reasons: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks = [False, *sample.supervised, False]
    ends = [at for at in range(len(sample.ids)) if marks[at + 1] and not marks[at + 2]]  # of the assistant's turns
    known = (
        finish_reasons[-len(ends) :] if 0 < len(ends) <= len(finish_reasons) else ()
    )  # of the last turns, if not all
    for end, reason in zip(ends, known, strict=False):
        while reason == "length" and end >= 0 and sample.supervised[end] and sample.ids[end] in special:
            sample.supervised[end] = False
            end -= 1


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))


def _encode_chat(chat: list[Message], tokenizer: PreTrainedTokenizerBase, template: str | None) -> Sample:
    used = template or tokenizer.chat_template
    if not isinstance(used, str):
        raise ValueError(f"the tokenizer has no chat template; {_ADVICE}")
    if not tokenizer.is_fast:
        raise ValueError("the tokenizer is a slow one, which does not say where in the text a token stands; "
                         "convert it to a fast one (tokenizer.json)")  # fmt: skip
    if _GENERATION.search(used):
        try:
            found = cast(
                BatchEncoding,
                tokenizer.apply_chat_template(
                    chat, chat_template=used, return_dict=True, return_assistant_tokens_mask=True
                ),
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this chat: {error}") from None
        return Sample(list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]])

    def render(messages: list[Message], prompt: bool = False) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, chat_template=used, tokenize=False, add_generation_prompt=prompt
                )
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses this chat: {error}") from None

    full = render(chat)
    spans: list[tuple[int, int]] = []
    last = max((i for i, m in enumerate(chat) if m["role"] == "assistant"), default=-1)
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before, upto = render(chat[:i], prompt=True), render(chat[: i + 1])
        if upto.startswith(before) and full.startswith(upto):
            spans.append((len(before), len(upto)))
        elif i == last:  # earlier turns may be rendered otherwise once they are history (Qwen3 drops their thinking)
            raise ValueError(
                "the chat template renders the prompt of the last turn otherwise than the turn itself, so that the "
                f"assistant's part cannot be found; {_ADVICE}"
            )
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    supervised = [False] * len(ids)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for begin, end in spans:
        # A token that straddles the border (a space drawn to the first word) is the assistant's.
        inside = [n for n, (a, b) in enumerate(places) if a < b and b > begin and a < end]
        ends = [n for n in inside if ids[n] in special]
        if ends and not str(tokenizer.decode(ids[ends[-1] + 1 : inside[-1] + 1])).strip():
            inside = [n for n in inside if n <= ends[-1]]  # the line break behind the end token is never generated
        for n in inside:
            supervised[n] = True
    return Sample(ids, supervised)
