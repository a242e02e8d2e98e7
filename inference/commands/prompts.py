"""Prompts: read from JSON lines or parquet, rendered by the target's chat template, encoded, and checked against its
context."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.common.command import first_line
from draftsmith.common.files import parse_json, read_text
from draftsmith.data.formats import Message, read_prompt, read_tools
from draftsmith.data.rows import Skipped, UnusableRow

if TYPE_CHECKING:
    from draftsmith.models.target import Target

_PLAIN = 'give the text as it is (--raw, or lines of {"prompt": …})'
_HELD_BACK = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # begins the turns that SPEED-Bench does not contain


@dataclass(frozen=True)
class Prompt:
    """A prompt as raw text, or as chat messages for the target's template."""

    content: str | list[Message]
    where: str = field(default="prompt", compare=False)  # the file and line it came from, or the option, for errors
    kind: str | None = None  # of text (code, writing, …), by which reports group their figures, if the row has a kind
    later: tuple[str, ...] = ()  # what the user asks then, each after the answer to the one before
    question: str | int | None = None  # the row's ``question_id``
    tools: tuple[dict[str, Any], ...] = ()  # that the assistant may call

    def encode(self, target: "Target") -> list[int]:
        """The token ids, as :func:`draftsmith.data.chat.encode_prompt` says. A ValueError if there is no template, or
        it refuses the messages; if there is no token, or no room for another one in the target's context."""
        from draftsmith.data.chat import encode_prompt  # it takes torch, seconds to import

        assert target.tokenizer is not None
        if isinstance(self.content, list) and not target.tokenizer.chat_template:
            raise ValueError(f"{self.where}: target '{target.name}' has no chat template; {_PLAIN}")
        try:
            ids = encode_prompt(self.content, target.tokenizer, tools=self.tools)
        except UnusableRow as error:
            raise ValueError(f"{self.where}: target '{target.name}': {error}; {_PLAIN}") from None
        if not 0 < len(ids) < target.context:
            turns = self.content if isinstance(self.content, list) else []
            answered = ", with the answers in it," if any(turn["role"] == "assistant" for turn in turns) else ""
            raise ValueError(
                f"{self.where}: this prompt{answered} has {len(ids)} tokens; give it at least one, and at most "
                f"{target.context - 1}: the target's context of {target.context} holds prompt and answer"
            )
        return ids


def encode_prompts(
    prompts: Sequence[Prompt], target: "Target", say: Callable[[str], None] | None = None
) -> list[list[int]]:
    """The token ids of prompts, see :meth:`Prompt.encode`. ``say``: takes a line about what the target's chat template
    does not render of them."""
    encoded = [prompt.encode(target) for prompt in prompts]
    if say is not None and target.tokenizer is not None:
        from draftsmith.data.chat import left_out  # as above

        noted = Skipped()
        for prompt in prompts:
            with suppress(UnusableRow):  # some roles' texts have a form
                noted.note(prompt.where, 0, (), left_out(prompt.content, target.tokenizer, prompt.tools))
        for line in noted.lines():
            say(f"warning: prompts: {line}")
    return encoded


def with_later_turns(prompts: Sequence[Prompt], answers: Callable[[list[Prompt]], list[str]]) -> list[Prompt]:
    """Each prompt, followed by those of its later turns, in which what was asked before has been answered.
    ``answers``: the texts that answer some prompts."""
    chains = [[prompt] for prompt in prompts]
    while unfinished := [chain for chain in chains if chain[-1].later]:
        asked = [chain[-1] for chain in unfinished]
        for chain, last, text in zip(unfinished, asked, answers(asked), strict=True):
            assert isinstance(last.content, list)
            turn: list[Message] = [{"role": "assistant", "content": text}, {"role": "user", "content": last.later[0]}]
            chain.append(replace(last, content=last.content + turn, later=last.later[1:]))
    return [prompt for chain in chains for prompt in chain]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines or a parquet file, in the formats of rows that
    :func:`draftsmith.data.formats.read_prompt` reads. A ``prompt`` that is a text is raw text. The first of ``turns``
    is the user's message, and the others are ``later``. The last message of a conversation is left out if it is the
    assistant's, the answer that is asked for. A text in ``kind``, or in ``category`` (MT-Bench, Spec-Bench,
    SPEED-Bench), names the kind of text.
    Raises FileNotFoundError, ValueError: no such file, a row that asks nothing (its number is named), or no row."""
    prompts: list[Prompt] = []
    for where, row in _rows(path):
        try:
            content, tools = read_prompt(row), read_tools(row)
        except UnusableRow as error:
            raise ValueError(f"{where}: {error}") from None
        later: tuple[str, ...] = ()
        if isinstance(content, tuple):
            first, *rest = content
            if any(text.startswith(_HELD_BACK) for text in content):
                raise ValueError(
                    f"{where}: SPEED-Bench holds this text back ('{_HELD_BACK}…'); give the file that prepare_data.py "
                    "of NVIDIA's Model-Optimizer (examples/specdec_bench) writes: it fetches such texts"
                )
            content, later = [{"role": "user", "content": first}], tuple(rest)
        elif isinstance(content, list) and content[-1]["role"] == "assistant":
            content = content[:-1]
        if not content:
            raise ValueError(f"{where}: no message but one of the assistant; the user has to ask something")
        kind, question = row.get("kind") or row.get("category"), row.get("question_id")
        kind = kind if isinstance(kind, str) and kind else None
        question = question if isinstance(question, str | int) else None
        prompts.append(Prompt(content, where, kind, later, question, tuple(tools)))
    if not prompts:
        raise ValueError(f'{path}: holds no prompt; write {{"prompt": "…"}} or {{"messages": […]}} on each line')
    return prompts


def read_sets(paths: Sequence[Path], most: int | None = None) -> list[Prompt]:
    """The prompts of several files; where there is more than one, the kind of a row without one is its file's name.
    ``most``: prompts of each file, the first ones, each turn of a conversation being one; all if left out."""
    found: list[Prompt] = []
    for path in paths:
        left = most
        for prompt in read_prompts(path):
            if left is not None:
                if not left:
                    break
                prompt = replace(prompt, later=prompt.later[: left - 1])
                left -= 1 + len(prompt.later)
            if len(paths) > 1 and prompt.kind is None:
                prompt = replace(prompt, kind=path.stem)
            found.append(prompt)
    return found


def check_prompts(path: Path | None) -> None:
    """Read prompts before torch is imported, so that what is wrong with them is said at once. None and pipes, which can
    be read only once, are left to the command."""
    if path is not None and (path.is_file() or path.is_dir() or not os.path.lexists(path)):
        read_prompts(path)


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row, and where it is: the file with the line's number, in parquet the row's."""
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow  # a third of a second
        from pyarrow import parquet

        try:
            rows = parquet.read_table(path).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{path}: not a parquet file that can be read ({first_line(error)})") from None
        yield from ((f"{path}:{number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(read_text(path, "prompts file").split("\n"), 1):  # splitlines() cuts at U+2028, too
        if line.strip():
            yield f"{path}:{number}", parse_json(line, f"{path}:{number}")
