"""Samples of a conversation from the token ids that its model read and sampled, where the row has them.

Encoding a text again may give other ids than those that were sampled, and a chat template may drop what the model
thought before an earlier answer. These ids have both, as decoding had them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftsmith.data.chat import Encoded, encode_prompt, shortened
from draftsmith.data.formats import ASKED, FLAGS, REASONING, Message, TokenIds
from draftsmith.data.packing import Sample
from draftsmith.data.rows import UnusableRow

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedTokenizerBase

OTHER_TOKENIZER = "answers are encoded from their text, since their token ids are not this tokenizer's"
OTHER_PROMPT = "answers, of those looked at, follow another prompt in their token ids than the chat template renders"


def encode_sampled(
    messages: Sequence[Message],
    token_ids: Sequence[TokenIds],
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    max_length: int,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    check: bool = False,
) -> Encoded | None:
    """A sample for each answer: its prompt, then its own ids as labels, cut at ``max_length``. Where a prompt goes on
    from the end of the answer before it, both are one sample.
    ``check``: compare the prompts with those that the template renders.
    Returns None: the ids are not this tokenizer's.
    Raises UnusableRow: there are not as many of them as answers."""
    answers = [(place, m) for place, m in enumerate(messages) if m["role"] == "assistant"]
    if len(answers) != len(token_ids):
        raise UnusableRow("token_ids are not one for each of the assistant's messages")
    samples: list[Sample] = []
    notes: list[str] = []
    for (place, message), found in zip(answers, token_ids, strict=True):
        prompt, ids = found["prompt"], found["answer"]
        if not _is_text_of(message["content"], ids, tokenizer):
            return None
        begun = samples.pop() if samples and prompt[: len(samples[-1].ids)] == samples[-1].ids else Sample([], [])
        marks = begun.supervised + [False] * (len(prompt) - len(begun.ids))
        trained = ASKED not in message and all(message.get(name, True) for name in FLAGS)
        trained &= any(message.get(name) for name in (*REASONING, "tool_calls")) or bool(message["content"].strip())
        samples.append(Sample(prompt + ids, marks + [trained] * len(ids)))
        if check and _rendered(messages[:place], tokenizer, template, tools) != prompt:
            notes.append(OTHER_PROMPT)
    rendered = frozenset({*REASONING, "tool_calls", "tools"})
    return Encoded(shortened(samples, max_length), len(answers), tuple(notes), rendered)


def _is_text_of(text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether an answer's text is what the tokenizer makes of its ids, but for the spaces around it and characters that
    were cut in the middle."""
    said = str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return text.replace("\ufffd", "").strip() in said.replace("\ufffd", "")


def _rendered(messages: Sequence[Message], tokenizer: Any, template: str | None, tools: Any) -> list[int]:
    try:
        return encode_prompt(messages, tokenizer, template, tools)
    except UnusableRow:
        return []
