"""Chat templates: checking and applying them, and finding out what one renders and prints.

An error of one row is an :class:`draftsmith.data.rows.UnusableRow`, an error of all rows a ``ValueError``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftsmith.common.command import first_line
from draftsmith.data.formats import REASONING, Message
from draftsmith.data.rows import UnusableRow
from draftsmith.models.tokenizer import MARK

if TYPE_CHECKING:  # takes seconds to import, and a template is checked without it
    from transformers import PreTrainedTokenizerBase

_LARGEST_TEMPLATE = 1_000_000  # characters; the largest ones in use have some ten thousand
PLAIN: list[Message] = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello!"}]
ADVICE = "give the recipe a data.template with {% generation %}…{% endgeneration %} around the assistant's text"


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


def own_template(tokenizer: PreTrainedTokenizerBase, tools: Any = ()) -> Any:
    """A tokenizer's own template; of several, that which ``transformers`` takes with these tools."""
    own = tokenizer.chat_template
    if isinstance(own, dict):
        return own["tool_use"] if tools and "tool_use" in own else own.get("default")
    return own


def template_of(tokenizer: PreTrainedTokenizerBase, template: str | None, tools: Any = ()) -> str:
    """The template that renders chats: the recipe's, else the tokenizer's own (of several, that for these tools).
    Raises ValueError: there is none, or it is no Jinja template."""
    own = own_template(tokenizer, tools)
    if template is None and not isinstance(own, str):
        raise ValueError(f"the tokenizer has no chat template; {ADVICE}")
    if template is None:
        check_template(cast(str, own), "the tokenizer's own chat template")
    return template or cast(str, own)


def with_arguments(template: str, arguments: Mapping[str, bool | int | float | str]) -> str:
    """A template in which arguments have these values, as ``apply_chat_template(…, enable_thinking=False)`` would give
    them: one text, the same wherever chats are rendered.

    ``arguments``: by names that :data:`~draftsmith.common.field_types.TemplateArguments` lets through."""
    values = "".join(f"{{% set {name} = {json.dumps(value)} %}}" for name, value in arguments.items())
    return f"{values}{{{{ '' }}}}{template}"  # a line break behind a block would be dropped, behind an expression not


def apply_template(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str | None, **options: Any
) -> Any:
    """Apply a chat template to a chat, by ``tokenizer.apply_chat_template``.
    Raises UnusableRow: the template refuses the chat or fails on it; a template is a program, and may raise
    anything."""
    with _refusals():
        return tokenizer.apply_chat_template(cast(Any, messages), chat_template=template, **options)


def render(
    messages: Sequence[Message],
    template: str,
    special: Mapping[str, Any],
    *,
    tools: Any = None,
    prompt: bool = False,
    marks: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """A chat rendered as ``tokenizer.apply_chat_template`` does, and the places of the template's generation blocks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    with _refusals():
        texts, places = cast(
            Any,
            render_jinja_template(
                [list(messages)],
                tools=tools or None,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **special,
            ),
        )
    return texts[0], places[0] if marks else []


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except jinja2.TemplateError as error:
        raise UnusableRow(f"the chat template refuses this chat: {first_line(error, 100)}") from None
    except Exception as error:
        raise UnusableRow(
            f"the chat template fails on this chat: {type(error).__name__} ({first_line(error, 100)})"
        ) from None


@lru_cache(64)
def rendered_fields(template: str, special: frozenset[tuple[str, str]]) -> frozenset[str]:
    """The fields that a chat template renders, of ``tools``, ``tool_calls`` and those of the reasoning: found by
    rendering chats that have a mark in them. Of other fields, all names that stand in the template.
    ``special``: the tokenizer's special tokens by their names."""
    function = {"name": MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
    found = set(re.findall(r"\w+", template)) - {"tools", "tool_calls", *REASONING}
    if _shows(template, special, tools=[{"type": "function", "function": function}], content="x"):
        found.add("tools")
    if any(_shows_call(template, special, arguments) for arguments in ({}, "{}")):
        found.add("tool_calls")
    if _shows(template, special, content="x", **dict.fromkeys(REASONING, MARK)):
        found.update(REASONING)
    return frozenset(found)


@lru_cache(64)
def arguments_as_text(template: str, special: frozenset[tuple[str, str]]) -> bool:
    """Whether a chat template takes a call's arguments as text alone, as OpenAI writes them and DeepSeek joins them to
    others; most take an object."""
    return not _shows_call(template, special, {}) and _shows_call(template, special, "{}")


def _shows_call(template: str, special: frozenset[tuple[str, str]], arguments: Any) -> bool:
    function = {"name": MARK, "arguments": arguments}
    return _shows(template, special, tool_calls=[{"id": "call00000", "type": "function", "function": function}])


def _shows(template: str, special: frozenset[tuple[str, str]], *, tools: Any = None, **fields: Any) -> bool:
    """Whether an answer with a mark in these fields, or in the tools, shows it."""
    answer = {"role": "assistant", "content": "", **fields}
    try:
        return MARK in render([PLAIN[0], answer], template, dict(special), tools=tools)[0]
    except UnusableRow:
        return False


@lru_cache(64)
def prints_date(template: str, special: frozenset[tuple[str, str]]) -> bool:
    """Whether a chat template prints the day's date: found by rendering a chat at two dates."""
    if "strftime_now" not in template:
        return False
    dates = (f"{{% macro strftime_now(form) %}}{date}{{% endmacro %}}" for date in ("01 Jan 2001", "02 Feb 2002"))
    try:
        first, second = (render(PLAIN, date + template, dict(special))[0] for date in dates)
    except UnusableRow:
        return False
    return first != second


def rendered_today(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str | None:
    """A chat as a template that prints the day's date renders it; None for another template."""
    used = template or own_template(tokenizer)
    special = tokenizer.special_tokens_map
    if not isinstance(used, str) or not prints_date(used, frozenset(special.items())):
        return None
    return render(PLAIN, used, special)[0]


@lru_cache(64)
def date_note(template: str, special: frozenset[tuple[str, str]]) -> str:
    """Advice for a template that prints the day's date: the argument that takes its place, if there is one."""
    names = dict.fromkeys(re.findall(r"\b[a-z_]*date[a-z_]*\b", template))
    pins = (name for name in names if not prints_date(with_arguments(template, {name: "x"}), special))
    name = next(pins, None)
    how = f"data.template_arguments={{{name}: …}}" if name else "a data.template without it"
    return f"answers stand under the date of today, which the chat template prints; pin it by {how}"
