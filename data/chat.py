"""Token ids and label masks of documents, conversations and completions; token ids of prompts.

The assistant's tokens are those in the chat template's ``{% generation %}`` block; without one they are found by
comparing renderings of the chat that end before and after each of its turns. If neither works it is an error, never a
guess.

An error of one row is an :class:`draftsmith.data.rows.UnusableRow`, an error of all rows a ``ValueError``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftsmith.common.command import first_line
from draftsmith.data.formats import Completion, Message
from draftsmith.data.packing import Sample
from draftsmith.data.rows import UnusableRow

if TYPE_CHECKING:  # takes seconds to import, and a template is checked without it
    from transformers import BatchEncoding, PreTrainedTokenizerBase

_LARGEST_TEMPLATE = 1_000_000  # characters; the largest ones in use have some ten thousand
_PLAIN: list[Message] = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello!"}]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ADVICE = "give the recipe a data.template with {% generation %}…{% endgeneration %} around the assistant's text"


class _Generation(jinja2.ext.Extension):
    """The syntax of ``{% generation %}``, without its effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def check_template(template: str, where: str = "data.template") -> None:
    """Check a chat template's syntax, before anything slow.
    Raises ValueError: it is no Jinja template; the message names the line."""
    if len(template) > _LARGEST_TEMPLATE:
        raise ValueError(f"{where}: {len(template):,} characters; a chat template has a few thousand")
    try:
        # The finalizer and ``optimized=False`` keep the compiler from computing constants: 9**(9**9) would never end.
        ImmutableSandboxedEnvironment(
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=jinja2.pass_context(lambda context, value: value),
        ).from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{where}: no Jinja template (line {error.lineno}: {error.message})") from None
    except (RecursionError, MemoryError, SyntaxError) as error:  # SyntaxError: Python's, from the generated code
        raise ValueError(f"{where}: no Jinja template ({type(error).__name__}: {first_line(error, 100)})") from None


def template_of(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    """The template that renders chats: the recipe's, else the tokenizer's own.
    Raises ValueError: there is none, or it is no Jinja template."""
    own_template = tokenizer.chat_template
    own_template = own_template.get("default") if isinstance(own_template, dict) else own_template  # some have several
    if template is None and not isinstance(own_template, str):
        raise ValueError(f"the tokenizer has no chat template; {_ADVICE}")
    if template is None:
        check_template(cast(str, own_template), "the tokenizer's own chat template")
    return template or cast(str, own_template)


def with_arguments(template: str, arguments: Mapping[str, bool | int | float | str]) -> str:
    """A template in which arguments have these values, as ``apply_chat_template(…, enable_thinking=False)`` would give
    them: one text, the same wherever chats are rendered.

    ``arguments``: by names that :data:`~draftsmith.common.sections.TemplateArguments` lets through."""
    values = "".join(f"{{% set {name} = {json.dumps(value)} %}}" for name, value in arguments.items())
    return f"{values}{{{{ '' }}}}{template}"  # a line break behind a block would be dropped, behind an expression not


def apply_template(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str | None, **options: Any
) -> Any:
    """Apply a chat template to a chat, by ``tokenizer.apply_chat_template``.
    Raises UnusableRow: the template refuses the chat or fails on it; a template is a program, and may raise
    anything."""
    try:
        return tokenizer.apply_chat_template(cast(Any, messages), chat_template=template, **options)
    except MemoryError:
        raise
    except jinja2.TemplateError as error:
        raise UnusableRow(f"the chat template refuses this chat: {first_line(error, 100)}") from None
    except Exception as error:
        raise UnusableRow(
            f"the chat template fails on this chat: {type(error).__name__} ({first_line(error, 100)})"
        ) from None


def encode_user_turn(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str | None = None
) -> tuple[list[int], str]:
    """The prompt from which a model writes the user's next turn: the token ids of the conversation, rendered up to the
    beginning of that turn's text; and the first word of what the template writes after the text, where the turn ends.
    Raises UnusableRow: as :func:`encode_prompt`; or the template does not keep the user's text as it is."""
    mark = "Zq7Uw3Xk"  # a text that no template has
    turn: Message = {"role": "user", "content": mark}
    text = str(apply_template([*messages, turn], tokenizer, template, tokenize=False, add_generation_prompt=True))
    before, found, after = text.rpartition(mark)
    if not found or not after.strip():
        raise UnusableRow("the chat template has no place where the user's turn begins and ends")
    # Most tokenizers join a space with the word after it.
    return _ids(tokenizer, before.rstrip(" ")), after.split()[0]


def encode_prompt(
    prompt: str | Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str | None = None
) -> list[int]:
    """The token ids of a prompt: a text to be continued, with the special tokens that the tokenizer adds, or a
    conversation to be answered, rendered by the template (the tokenizer's own, if None) up to the assistant's turn.
    Raises UnusableRow: there is no template, or it refuses the conversation or fails on it."""
    if isinstance(prompt, str):
        return list(cast(list[int], tokenizer(prompt, verbose=False)["input_ids"]))
    return _ids(tokenizer, str(apply_template(prompt, tokenizer, template, add_generation_prompt=True, tokenize=False)))


def encode(
    content: str | list[Message] | Completion,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    max_length: int,
    finish_reasons: Sequence[str] = (),
) -> Sample:
    """Token ids with the label mask, cut at ``max_length`` (never dropped).
    ``finish_reasons``: why each of the assistant's turns ended, if known: after one that was cut ("length") the
    template's end token is not a label, since the assistant did not write it.
    Raises UnusableRow: the template refuses this chat, fails on it, or does not show which part is the assistant's.
    ValueError: the template does so with every chat, there is none, or the tokenizer is not a fast one."""
    if isinstance(content, str):
        ids = _ids(tokenizer, content)
        sample = Sample(ids, [True] * len(ids))
    elif isinstance(content, Completion):
        prompt, completion = _ids(tokenizer, content.prompt), _ids(tokenizer, content.completion)
        if tokenizer.eos_token_id is not None:
            completion.append(cast(int, tokenizer.eos_token_id))
        sample = Sample(prompt + completion, [False] * len(prompt) + [True] * len(completion))
    else:
        try:
            sample = _encode_chat(content, tokenizer, template)
        except UnusableRow as unusable:
            try:
                _encode_chat(_PLAIN, tokenizer, template)
            except UnusableRow:
                raise ValueError(str(unusable)) from None
            raise
        _unmark_ends(sample, finish_reasons, tokenizer)
    return Sample(sample.ids[:max_length], sample.supervised[:max_length])


def _unmark_ends(sample: Sample, finish_reasons: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove from the labels the end tokens of the assistant's turns that were cut."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks = [False, *sample.supervised, False]
    ends = [at for at in range(len(sample.ids)) if marks[at + 1] and not marks[at + 2]]  # of the assistant's turns
    # The last reasons belong to these turns; fewer reasons than turns cannot be assigned.
    known = finish_reasons[-len(ends) :] if 0 < len(ends) <= len(finish_reasons) else ()
    for end, reason in zip(ends, known, strict=False):
        while reason == "length" and end >= 0 and sample.supervised[end] and sample.ids[end] in special:
            sample.supervised[end] = False
            end -= 1


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))


def _encode_chat(chat: list[Message], tokenizer: PreTrainedTokenizerBase, template: str | None) -> Sample:
    """Token ids of a whole chat, with the assistant's turns as labels."""
    used = template_of(tokenizer, template)
    if not tokenizer.is_fast:
        raise ValueError(
            "the tokenizer is a slow one, which does not give the places of tokens in the text; "
            "convert it to a fast one (tokenizer.json)"
        )

    if _GENERATION.search(used):
        rendered = cast(
            "BatchEncoding", apply_template(chat, tokenizer, used, return_dict=True, return_assistant_tokens_mask=True)
        )
        return Sample(list(rendered["input_ids"]), [bool(mark) for mark in rendered["assistant_masks"]])

    def render(messages: list[Message], prompt: bool = False) -> str:
        return str(apply_template(messages, tokenizer, used, tokenize=False, add_generation_prompt=prompt))

    full = render(chat)
    spans: list[tuple[int, int]] = []
    last = max((i for i, m in enumerate(chat) if m["role"] == "assistant"), default=-1)
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before, upto = render(chat[:i], prompt=True), render(chat[: i + 1])
        if upto.startswith(before) and full.startswith(upto):
            spans.append((len(before), len(upto)))
        elif i == last:  # templates may render earlier turns differently (Qwen3 drops their thinking)
            raise UnusableRow(
                "the chat template renders the prompt of the last turn differently from the turn itself, so that the "
                f"assistant's part cannot be found; {_ADVICE}"
            )
    encoded = tokenizer(full, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    supervised = [False] * len(ids)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for begin, end in spans:
        # A token across the boundary (a space merged into the first word) is the assistant's.
        inside = [n for n, (a, b) in enumerate(places) if a < b and b > begin and a < end]
        ends = [n for n in inside if ids[n] in special]
        if ends and not str(tokenizer.decode(ids[ends[-1] + 1 : inside[-1] + 1])).strip():
            inside = [n for n in inside if n <= ends[-1]]  # the line break after the end token is never generated
        for n in inside:
            supervised[n] = True
    return Sample(ids, supervised)
