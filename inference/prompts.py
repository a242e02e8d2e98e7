"""Prompts: read from JSON lines, rendered by the target's chat template, encoded, and checked against its context."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.common.files import parse_json, read_text
from draftsmith.data.rows import UnusableRow

if TYPE_CHECKING:
    from draftsmith.models.target import Target

_HINT = 'write {"prompt": "…"}, {"messages": […]} or {"turns": […]} on each line'
_PLAIN = 'give the text as it is (--raw, or lines of {"prompt": …})'


@dataclass(frozen=True)
class Prompt:
    """A prompt as raw text, or as chat messages for the target's template.

    where: the file and line it came from, or the option, for errors.
    """

    text: str = ""
    messages: list[dict[str, str]] | None = None
    where: str = field(default="prompt", compare=False)

    def encode(self, target: "Target") -> list[int]:
        """The token ids: of raw text with the special tokens that the tokenizer adds, of messages as the template has
        it, the assistant's turn begun.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        from draftsmith.data.chat import apply_template  # it takes torch, seconds to import

        tokenizer = target.tokenizer
        assert tokenizer is not None
        if self.messages is None:
            return list(tokenizer(self.text, verbose=False)["input_ids"])
        if not tokenizer.chat_template:
            raise ValueError(f"{self.where}: target '{target.name}' has no chat template; {_PLAIN}")
        try:
            rendered = apply_template(self.messages, tokenizer, None, add_generation_prompt=True, tokenize=False)
        except UnusableRow as odd:
            raise ValueError(f"{self.where}: target '{target.name}': {odd}; {_PLAIN}") from None
        return list(tokenizer(str(rendered), add_special_tokens=False, verbose=False)["input_ids"])


def encode_prompts(prompts: Sequence[Prompt], target: "Target") -> list[list[int]]:
    """The token ids of prompts that leave room for an answer.

    Raises:
        ValueError: a prompt has no token, or more than the target's context less one; as :meth:`Prompt.encode`.
    """
    encoded = [prompt.encode(target) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not 0 < len(ids) < target.context:
            raise ValueError(
                f"{prompt.where}: this prompt has {len(ids)} tokens; give it at least one, and at most "
                f"{target.context - 1}: the target's context of {target.context} holds prompt and answer"
            )
    return encoded


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines: ``{"prompt": text}``, which is raw text; ``{"messages": […]}``, whose last message is
    left out if it is the assistant's (it is what is asked for); or Spec-Bench's ``{"turns": [text, …]}``, of which the
    first is the user's message. A key whose value is null counts as absent; other keys are ignored.

    Raises:
        FileNotFoundError, ValueError: no such file, a line that is none of these (its number is named), or no line.
    """
    prompts: list[Prompt] = []
    text = read_text(path, "prompts file")
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also cuts at U+2028 inside a string
        if line.strip():
            where = f"{path}:{number}"
            prompts.append(_prompt(parse_json(line, where), where))
    if not prompts:
        raise ValueError(f"{path}: holds no prompt; {_HINT}")
    return prompts


def _prompt(entry: Any, where: str) -> Prompt:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: not a prompt but {_kind(entry)}; {_HINT}")
    key = next((key for key in ("prompt", "messages", "turns") if entry.get(key) is not None), None)
    if key is None:
        raise ValueError(f"{where}: not a prompt: no prompt, messages or turns; {_HINT}")
    value = entry[key]
    if key == "prompt":
        if not isinstance(value, str) or not value:
            raise ValueError(f"{where}: prompt is {_kind(value)}; a text is needed")
        return Prompt(value, where=where)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {key} is {_kind(value)}; a list is needed, with at least one of them")
    if key == "turns":
        for turn in value:
            if not isinstance(turn, str) or not turn:
                raise ValueError(f"{where}: one of the turns is {_kind(turn)}; a text is needed")
        return Prompt(messages=[{"role": "user", "content": value[0]}], where=where)
    from draftsmith.data.chat import read_messages

    try:
        chat = read_messages(value, "role", "content")
    except UnusableRow as odd:
        raise ValueError(f"{where}: {odd}") from None
    asked = chat[:-1] if chat[-1]["role"] == "assistant" else chat
    if not asked:
        raise ValueError(f"{where}: nobody asks: the assistant's is the only message")
    return Prompt(messages=asked, where=where)


def _kind(value: Any) -> str:
    """A JSON value's kind, for messages."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return "a number"
    name = {str: "text", list: "list"}.get(type(value), "object")
    return f"an empty {name}" if not value else f"an {name}" if name == "object" else f"a {name}"
