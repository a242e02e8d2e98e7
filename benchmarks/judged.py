"""Grades of answers by a model behind an endpoint with OpenAI's protocol, for quality.py --judge."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from draftsmith.benchmarks.common import by_kind, with_interval
from draftsmith.data.endpoint import Server, in_threads
from draftsmith.data.seeds import RequestFailed
from draftsmith.inference.commands.prompts import Prompt, with_later_turns

UNREADABLE = "no grade in the reply"
REQUEST = """Below is a conversation. Grade the assistant's last answer: does it do what the user asked, is it correct,
complete and easy to follow? Length is no merit. First name in a few sentences what is good and what is wrong. End your
reply with a line of the form "Grade: N", where N is a whole number from 1 (of no use) to 10 (nothing to improve).

"""
Conversation = tuple[tuple[str, str], ...]  # role and text of each message


def grade_of(reply: str) -> float | None:
    """The last grade in a judge's reply; None if there is none from 1 to 10."""
    found = re.findall(r"grade[:\s*]+(\d+(?:\.\d+)?)", reply, re.IGNORECASE)
    return float(found[-1]) if found and 1 <= float(found[-1]) <= 10 else None


def conversations_of(questions: Sequence[Prompt], answers: Callable[[list[Prompt]], list[str]]) -> list[Conversation]:
    """Each turn of each question with its answer; a later turn comes after the method's own answers."""
    turns = with_later_turns(questions, answers)
    before = [[(m["role"], m["content"]) for m in turn.content if isinstance(m, dict)] for turn in turns]
    return [(*messages, ("assistant", text)) for messages, text in zip(before, answers(turns), strict=True)]


def judge(server: Server, conversations: Sequence[Conversation]) -> dict[Conversation, float | str]:
    """The grade of each conversation's last answer, or why there is none; equal ones are judged once."""
    found = dict[Conversation, float | str]()

    def ask(conversation: Conversation) -> None:
        shown = "\n\n".join(f"[{role}]\n{text}" for role, text in conversation)
        try:
            reply = server.answer([{"role": "user", "content": REQUEST + shown}], temperature=0).text
            found[conversation] = grade_of(reply) or UNREADABLE
        except RequestFailed as error:
            found[conversation] = error.reason

    with closing(in_threads(ask, iter(dict.fromkeys(conversations)), 4, server.stopped)) as finished:
        list(finished)
    return found


def graded(questions: Sequence[Prompt], grades: Mapping[str, Sequence[float | str]]) -> list[dict[str, Any]]:
    """The figures of each method from the grades of all turns: means over those that have one, with intervals by a
    bootstrap over questions."""
    kinds = [question.kind or "other" for question in questions]
    owner = [number for number, question in enumerate(questions) for _ in range(1 + len(question.later))]
    rows = list[dict[str, Any]]()
    for name, values in grades.items():
        sums = torch.zeros(2, len(questions), dtype=torch.float64)
        for number, value in zip(owner, values, strict=True):
            if isinstance(value, float):
                sums[:, number] += torch.tensor((value, 1.0))
        of = {"all": list(range(len(kinds)))} | by_kind(kinds)
        row = {"name": name, "answers": len(values), "without_grade": Counter(v for v in values if isinstance(v, str))}
        rows.append(row | {"grades": {kind: with_interval(sums[:, chosen]) for kind, chosen in of.items()}})
    return rows
