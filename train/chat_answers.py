"""The target's own greedy answers to the conversations of a source, by the engine: the answers that the source has are
dropped. Evaluations measure drafters on them."""

import itertools
from collections.abc import Callable

from torch import Tensor

from draftsmith.common.command import counted
from draftsmith.common.data_sections import Source
from draftsmith.data.chat import encode_prompt
from draftsmith.data.rows import Skipped, UnusableRow, rows, usable
from draftsmith.data.seeds import Conversation, Seed, read_seed
from draftsmith.inference.engine.answers import padded
from draftsmith.inference.engine.conversations import serve_conversations
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.engine.text import answer_text
from draftsmith.models.target import Target
from draftsmith.train.backends import check_has_template
from draftsmith.train.launch import console


def answer_chats(
    target: Target, source: Source, max_skipped: float, on_done: Callable[[int], None] | None = None
) -> dict[str, Tensor]:
    """Greedy answers to the user's messages of a source's first ``answers.prompts`` conversations, each after the
    target's own answers to those before. A conversation ends where a prompt would have more than
    ``answers.prompt_tokens`` tokens, or where the target's chat template refuses it.

    Args:
        max_skipped: the share of the rows that may ask nothing.
        on_done: called with the number of conversations that have ended.

    Returns:
        A row for each answer, of the prompt as the target read it and the tokens that it answered, as
        :func:`draftsmith.inference.engine.answers.answer` returns them.

    Raises:
        FileNotFoundError, ValueError: the source cannot be read, too many of its rows ask nothing, the target has no
            chat template, or no prompt is short enough.
    """
    ask, tokenizer, skipped = source.answers, target.tokenizer, Skipped()
    assert ask is not None and tokenizer is not None
    check_has_template(tokenizer, None)
    asked = usable(itertools.islice(rows(source)[0], min(ask.prompts, source.limit or ask.prompts)), read_seed, skipped)
    seeds = [Seed(str(number), source.source, messages) for number, (_, messages) in enumerate(asked)]
    skipped.check(source.source, max_skipped)
    prompts, answers = dict[str, list[int]](), dict[tuple[int, int], tuple[list[int], list[int]]]()
    ended, too_long, refused = 0, 0, ""

    def end() -> None:
        nonlocal ended
        ended += 1
        if on_done:
            on_done(ended)

    def next_request(conversation: Conversation) -> Request | None:
        nonlocal too_long, refused
        assert conversation.pending is not None
        try:
            prompt = encode_prompt(conversation.pending, tokenizer)
        except UnusableRow as error:
            refused = f" ({error})"
            return end()
        if len(prompt) > ask.prompt_tokens:
            too_long += 1
            return end()
        prompts[conversation.seed.id] = prompt
        return Request(prompt, ask.new_tokens)

    def on_answer(conversation: Conversation, result: Generation) -> bool:
        place = int(conversation.seed.id), len(conversation.messages)
        answers[place] = prompts[conversation.seed.id], list(result.tokens)
        conversation.add(answer_text(target, result.tokens), result.finish_reason)
        if conversation.pending is None:
            end()
        return conversation.pending is not None

    chats = (Conversation(seed, 0) for seed in seeds)
    longest = ask.prompt_tokens + ask.new_tokens
    decoder = SpeculativeDecoder(target)
    serve_conversations(decoder, chats, next_request, on_answer, ask.batch_size, max_length=longest)
    decoder.free()
    if too_long:
        console.print(
            f"  {source.label}: {counted(too_long, 'conversation')} of {len(seeds):,} ended before an answer, since "
            f"its prompt has more than answers.prompt_tokens={ask.prompt_tokens}"
        )
    if not answers:
        raise ValueError(
            f"data source '{source.label}': the target answers none of its {len(seeds):,} conversations{refused}; "
            "raise answers.prompt_tokens, or use others"
        )
    in_order = [answers[place] for place in sorted(answers)]
    return padded([prompt for prompt, _ in in_order], [answer for _, answer in in_order])
