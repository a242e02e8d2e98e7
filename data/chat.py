"""Token ids and label masks of documents, conversations and completions; token ids of prompts.

The assistant's tokens are those in the chat template's ``{% generation %}`` block; without one they are found by
comparing renderings of the chat that end before and after each of its turns. If neither works it is an error, never a
guess.

An error of one row is an :class:`draftsmith.data.rows.UnusableRow`, an error of all rows a ``ValueError``.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from draftsmith.data.chat_template import (
    ADVICE,
    PLAIN,
    apply_template,
    arguments_as_text,
    date_note,
    own_template,
    prints_date,
    render,
    rendered_fields,
    template_of,
)
from draftsmith.data.formats import ASKED, FLAGS, REASONING, Completion, Message
from draftsmith.data.packing import Sample
from draftsmith.data.rows import UnusableRow
from draftsmith.models.tokenizer import MARK

if TYPE_CHECKING:  # takes seconds to import, and a template is checked without it
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int, int]  # a message's number, and the begin and end of a part of it in a rendered text
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_LABEL = "answers have no label, since "
_OWN = "answers are samples of their own, since the chat template renders them differently once others follow"


def encode_user_turn(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str | None = None
) -> tuple[list[int], str]:
    """The prompt from which a model writes the user's next turn, and the word that ends that turn.

    The prompt is the token ids of the conversation, rendered up to the beginning of the turn's text. The word is the
    first one that the template writes after the text.
    Raises UnusableRow: as :func:`encode_prompt`; or the template does not keep the user's text as it is."""
    turn: Message = {"role": "user", "content": MARK}
    text = str(apply_template([*messages, turn], tokenizer, template, tokenize=False, add_generation_prompt=True))
    before, found, after = text.rpartition(MARK)
    if not found or not after.strip():
        raise UnusableRow("the chat template has no place where the user's turn begins and ends")
    # Most tokenizers join a space with the word after it.
    return _ids(tokenizer, before.rstrip(" ")), after.split()[0]


def encode_prompt(
    prompt: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The token ids of a prompt: a text to be continued, or a conversation to be answered.

    A text follows the special tokens that the tokenizer adds before one. A conversation is rendered by the template
    (the tokenizer's own, if None) up to the assistant's turn. ``tools``: those that the assistant may call, for the
    template.
    Raises UnusableRow: there is no template, or it refuses the conversation or fails on it."""
    if isinstance(prompt, str):
        return _begun(tokenizer, _ids(tokenizer, prompt))
    return _ids(tokenizer, _rendered_prompt(_as_rendered(prompt), tokenizer, template, tools))


def _rendered_prompt(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str | None, tools: Any
) -> str:
    options = {"tools": list(tools)} if tools else {}
    used = template or own_template(tokenizer, tools)
    if isinstance(used, str) and any("tool_calls" in message for message in messages):
        messages = _with_calls(messages, arguments_as_text(used, frozenset(tokenizer.special_tokens_map.items())))
    return str(apply_template(messages, tokenizer, template, add_generation_prompt=True, tokenize=False, **options))


def left_out(
    prompt: str | Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
) -> set[str]:
    """What a prompt has and the tokenizer's own chat template does not render: fields, and messages of a role.
    Raises UnusableRow: as :func:`encode_prompt`."""
    if isinstance(prompt, str):
        return {"tools"} if tools else set()
    fields = {name for message in prompt for name in message if name in ("tool_calls", *REASONING)}
    fields |= {"tools"} if tools else set()
    special = frozenset(tokenizer.special_tokens_map.items())
    marked = _marked(prompt)
    roles = _unseen(marked, _rendered_prompt(marked, tokenizer, None, tools))
    return fields - rendered_fields(template_of(tokenizer, None, tools), special) | roles


def _as_rendered(messages: Sequence[Message], reasoning: bool = True) -> list[Message]:
    """Messages with what the assistant thought, if it is to be rendered, under each of its names: templates read one of
    them."""
    thoughts = [next((m[name] for name in REASONING if name in m), None) for m in messages]
    bare = [{name: value for name, value in m.items() if name not in (*REASONING, ASKED)} for m in messages]
    if not reasoning or not any(thoughts):
        return bare
    pairs = zip(bare, thoughts, strict=True)
    return [m if t is None else {**m, **dict.fromkeys(REASONING, t)} for m, t in pairs]


def _with_calls(messages: Sequence[Message], as_text: bool) -> list[Message]:
    """Messages whose calls' arguments are objects, as they are read, or texts."""

    def call(of: dict[str, Any]) -> dict[str, Any]:
        arguments = of["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**of, "function": {**of["function"], "arguments": text}}

    if not as_text:
        return [*messages]
    return [{**m, "tool_calls": [*map(call, m["tool_calls"])]} if "tool_calls" in m else m for m in messages]


def _marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a text that is found in no template, and nowhere twice."""
    return [{**m, "content": f"{MARK}{i}."} for i, m in enumerate(messages)]


def _unseen(marked: Sequence[Message], text: str) -> set[str]:
    """Roles other than the assistant's with a message that the rendered text lacks, as notes for the user."""
    return {f"{m['role']} message" for m in marked if m["role"] != "assistant" and m["content"] not in text}


@dataclass(frozen=True)
class Encoded:
    """A row as samples: one, or several if the template renders an answer differently once others follow it.

    answers: number of the assistant's messages.
    notes: notes for the user on some of them, one for each: that they have no label, and why, …
    rendered: the fields of its messages that the template renders.
    left_out: the roles whose messages it does not render (``system message``); only searched if the row is checked.
    """

    samples: list[Sample]
    answers: int = 0
    notes: tuple[str, ...] = ()
    rendered: frozenset[str] = frozenset()
    left_out: Collection[str] = ()


def encode(
    content: str | list[Message] | Completion,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    max_length: int,
    finish_reasons: Sequence[str] | str = (),
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    reasoning: bool = True,
    check: bool = False,
) -> Encoded:
    """Token ids with the label mask, cut at ``max_length`` (never dropped).
    ``finish_reasons``: why each of the assistant's turns ended, if known, or why the last one did. After one that was
    cut ("length") the template's end token is not a label, since the assistant did not write it.
    ``tools``: those that the assistant may call, for the template.
    ``reasoning``: whether what the assistant wrote before its answer is given to the template.
    ``check``: compare the ids before each answer with those of its prompt when decoding.
    Raises UnusableRow: the template refuses this chat, fails on it, or does not show which part is the assistant's; or
    no answer has a label. ValueError: the template does so with every chat, there is none, it has a message of another
    role among the labels, or the tokenizer is not a fast one."""
    if isinstance(finish_reasons, str):
        finish_reasons = [finish_reasons]
        if isinstance(content, list):
            finish_reasons = [""] * (sum(m["role"] == "assistant" for m in content) - 1) + finish_reasons
    if isinstance(content, str):
        ids = encode_prompt(content, tokenizer)
        encoded = Encoded([Sample(ids, [True] * len(ids))])
    elif isinstance(content, Completion):
        encoded = Encoded([_encode_completion(content, tokenizer, "length" in finish_reasons[-1:])])
    else:
        chat = Chat(content, tokenizer, template_of(tokenizer, template, tools), tools, reasoning)
        try:
            encoded = chat.encode(finish_reasons, check)
        except UnusableRow as unusable:
            try:
                Chat(PLAIN, tokenizer, chat.template).encode()
            except UnusableRow:
                raise ValueError(str(unusable)) from None
            raise
    return replace(encoded, samples=shortened(encoded.samples, max_length))


def shortened(samples: Sequence[Sample], max_length: int) -> list[Sample]:
    """A row's samples, cut; those that have a label then, or one without."""
    shorter = [Sample(sample.ids[:max_length], sample.supervised[:max_length]) for sample in samples]
    return [sample for sample in shorter if any(sample.supervised)] or shorter[:1]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))


@lru_cache(16)
def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer adds before a text. One that it adds after a text would end a prompt."""
    ids = list(cast(list[int], tokenizer("a", verbose=False)["input_ids"]))
    plain = _ids(tokenizer, "a")
    places = [at for at in range(len(ids)) if ids[at : at + len(plain)] == plain]
    return ids[: places[0]] if places else []


def _begun(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """A text's ids after the special tokens that texts begin with, unless the text has them: a chat rendered before."""
    first = _beginning(tokenizer)
    return ids if ids[: len(first)] == first else first + ids


@lru_cache(16)
def _special(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)


def _encode_completion(content: Completion, tokenizer: PreTrainedTokenizerBase, cut: bool) -> Sample:
    """The prompt's ids when decoding, then those of the text that follows: a tokenizer may write a text's beginning
    otherwise than the same text inside another one."""
    plain, both = _ids(tokenizer, content.prompt), _ids(tokenizer, content.prompt + content.completion)
    if both[: len(plain)] == plain:
        completion = both[len(plain) :]
    else:  # a token would reach over the boundary; behind a line break sentencepiece adds no space of its own
        line, behind = _ids(tokenizer, "\n"), _ids(tokenizer, "\n" + content.completion)
        same = behind[: len(line)] == line
        completion = behind[len(line) :] if same else _ids(tokenizer, content.completion)
    end = cast("int | None", tokenizer.eos_token_id)
    if end is not None and not cut and completion[-1:] != [end]:
        completion.append(end)
    prompt = _begun(tokenizer, plain)
    return Sample(prompt + completion, [False] * len(prompt) + [True] * len(completion))


class Chat:
    """A conversation as a template renders it.

    The labels are the template's generation blocks, or what it renders for an answer after that answer's prompt.
    Raises ValueError: the tokenizer is a slow one.
    """

    def __init__(
        self,
        messages: list[Message],
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning: bool = True,
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                "the tokenizer is a slow one, which does not give the places of tokens in the text; "
                "convert it to a fast one (tokenizer.json)"
            )
        self.tokenizer, self.template, self.tools = tokenizer, template, list(tools)
        self.special = tokenizer.special_tokens_map
        self.key = frozenset(self.special.items())
        self.marks = bool(_GENERATION.search(template))
        self.asked = {i for i, message in enumerate(messages) if ASKED in message}
        self.messages = _with_calls(_as_rendered(messages, reasoning), arguments_as_text(template, self.key))

    def render(self, end: int, prompt: bool = False, marks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The first messages, and the places of the generation blocks."""
        return render(self.messages[:end], self.template, self.special, tools=self.tools, prompt=prompt, marks=marks)

    def rendered(self) -> frozenset[str]:
        """The fields that the template renders."""
        return rendered_fields(self.template, self.key)

    def encode(self, finish_reasons: Sequence[str] = (), check: bool = False) -> Encoded:
        """The samples, as :func:`encode` describes them; not cut."""
        unseen = self._check_roles() if check else set()
        answers = [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]
        # The last reasons belong to these turns; fewer reasons than turns cannot be assigned.
        known = finish_reasons[-len(answers) :] if len(answers) <= len(finish_reasons) else ()
        cut = {i for i, reason in zip(answers, known, strict=False) if reason == "length"}
        parts, notes = self.spans()
        if answers and not any(spans for _, spans in parts):
            raise UnusableRow(notes[0].replace(_NO_LABEL, "no answer has a label, since "))
        parts = [part for part in parts if part[1]] or parts  # the whole chat's has none where its answers have others
        samples = [self._sample(text, spans, cut, notes if check else None) for text, spans in parts]
        if prints_date(self.template, self.key):
            notes += [date_note(self.template, self.key)] * len(answers)
        return Encoded(samples, len(answers), tuple(notes), self.rendered(), unseen)

    def spans(self) -> tuple[list[tuple[str, list[Span]]], list[str]]:
        """The rendered texts, the whole chat's first, with the assistant's parts in them; and what is to be noted of
        answers, once for each.
        Raises UnusableRow: the template has no place for a call, or does not show where an answer is."""
        chat = self.messages
        if any("tool_calls" in m for m in chat) and "tool_calls" not in self.rendered():
            raise UnusableRow("the chat template does not render 'tool_calls'")
        answers = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
        full, marks = self.render(len(chat), marks=self.marks)
        in_order = self.marks and len(marks) == len(answers)
        labels: list[Span] = []
        parts, notes = [(full, labels)], list[str]()
        for number, i in enumerate(answers):
            if why := "they are part of a prompt" if i in self.asked else self._not_trained_on(chat[i]):
                notes.append(_NO_LABEL + why)
                continue
            before = self.render(i, prompt=True)[0]
            if in_order and full.startswith(before):
                labels.append((i, max(marks[number][0], len(before)), marks[number][1]))
                continue
            upto, own = (full, marks) if i == len(chat) - 1 else self.render(i + 1, marks=self.marks)
            own = own if self.marks else [(0, len(upto))]
            found = [(i, max(begin, len(before)), end) for begin, end in own if end > len(before)]
            if not upto.startswith(before):
                found = []
            if found and full.startswith(upto):
                labels += found
            elif found:  # Qwen3 drops the thinking of earlier turns, Mistral moves the system message to the last one
                parts.append((upto, found))
                notes.append(_OWN)
            elif in_order:
                labels.append((i, *marks[number]))
                notes.append("answers follow another text than their prompt when decoding")
            elif i == answers[-1] and not self.marks:
                raise UnusableRow(
                    "the chat template renders the prompt of the last turn differently from the turn itself, so that "
                    f"the assistant's part cannot be found; {ADVICE}"
                )
            else:
                what = (
                    "marks no part of them behind their prompt"
                    if self.marks
                    else "renders their prompt differently from the turn"
                )
                notes.append(f"{_NO_LABEL}the chat template {what}")
        return parts, notes

    def _not_trained_on(self, message: Message) -> str | None:
        """Why an answer gets no label, for any rendering by the template."""
        for name in FLAGS:
            if not message.get(name, True):
                return f"'{name}' is {int(message[name])}"
        if message["content"].strip() or "tool_calls" in message:
            return None
        thought = REASONING[0] in message and REASONING[0] in self.rendered()
        return None if thought else "nothing is written in them"  # the label would be the end token alone

    def _sample(self, text: str, spans: Sequence[Span], cut: Collection[int], notes: list[str] | None) -> Sample:
        """Token ids and labels of a text. ``cut``: the messages whose end was not written.
        ``notes``: given what is wrong with the ids of an answer."""
        tokenizer, special = self.tokenizer, _special(self.tokenizer)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, places = list(encoded["input_ids"]), cast(Any, encoded["offset_mapping"])
        supervised = [False] * len(ids)
        for i, begin, end in spans:
            # A token across the boundary (a space merged into the first word) is the assistant's.
            first = bisect_right(places, begin, key=itemgetter(1))
            stop = bisect_left(places, end, first, key=itemgetter(0))
            last = next((n for n in range(stop - 1, first - 1, -1) if ids[n] in special), None)
            if last is not None and (last == stop - 1 or not str(tokenizer.decode(ids[last + 1 : stop])).strip()):
                stop = last + 1  # the line break after the end token is never generated
            while i in cut and stop > first and ids[stop - 1] in special:
                stop -= 1
            supervised[first:stop] = [True] * (stop - first)
            if notes is not None and first < stop:
                prompt = _ids(tokenizer, self.render(i, prompt=True)[0])
                if ids[:first] != prompt:
                    notes.append("answers, of those looked at, follow other tokens than their prompt when decoding")
                said = str(tokenizer.decode(ids[first:stop], clean_up_tokenization_spaces=False))
                if self.messages[i]["content"].strip() not in said:
                    notes.append("answers, of those looked at, have labels that are not their text")
        return Sample(ids, supervised)

    def _check_roles(self) -> set[str]:
        """The roles whose messages the template does not render.
        Raises ValueError: it renders the text of another role where the assistant's is."""
        marked = _marked(self.messages)
        chat = Chat(marked, self.tokenizer, self.template, self.tools)
        try:
            full, marks = chat.render(len(marked), marks=self.marks)
            parts = [(full, [(0, *mark) for mark in marks])] if self.marks else chat.spans()[0]
        except UnusableRow:  # some roles' texts have a form
            return set()
        said = "".join(text[begin:end] for text, spans in parts for _, begin, end in spans)
        for message in marked:
            if message["role"] != "assistant" and message["content"] in said:
                mark = _GENERATION.search(self.template)
                line = f" (its line {self.template.count(chr(10), 0, mark.start()) + 1})" if mark else ""
                raise ValueError(
                    f"the chat template renders a message of the role '{message['role']}' as the assistant's words"
                    f"{line}, which would be trained on; {ADVICE}"
                )
        return _unseen(marked, full)
