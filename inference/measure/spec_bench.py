"""Answers in the format of Spec-Bench's and FastChat's ``model_answer/*.jsonl``, which their scripts read."""

import itertools
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.common.files import write_text
from draftsmith.inference.commands.prompts import Prompt
from draftsmith.inference.drafters.names import short_name
from draftsmith.inference.engine.engine import Generation
from draftsmith.inference.engine.text import answer_text
from draftsmith.models.target import Target


def write_answers(
    file: Path, target: Target, drafter: str, prompts: Sequence[Prompt], results: Sequence[Generation], seed: int = 0
) -> None:
    """Write a line for each question, whose turns follow each other among the prompts. ``results``: of all prompts, and
    then the next samples of all prompts, each of which is a further choice; ``seed``: of the first, the next one's is
    one more.

    ``new_tokens`` count the prefill's token and the stop token; ``accept_lengths`` the committed tokens of each step,
    the target's own included; ``wall_time`` are the seconds of the last round. ``idxs`` are the numbers of the last
    steps, from 0 (Medusa, EAGLE), ``decoding_steps`` how many there were (Spec-Bench). ``logprobs``, if the results
    have them, are those of each turn's ``token_ids``, as :meth:`TokenLogprobs.as_json` has them.
    """
    lines: list[str] = []
    starts = range(0, len(results), len(prompts))
    samples = zip(*(results[start : start + len(prompts)] for start in starts), strict=True)
    pairs = itertools.groupby(zip(prompts, samples, strict=True), lambda pair: pair[0].where)
    for number, (_, turns) in enumerate(pairs, 1):
        asked, of_turns = zip(*turns, strict=True)
        choices = [
            {
                "index": index,
                "turns": [answer_text(target, answer.tokens) for answer in answers],
                "idxs": [max(0, len(answer.accepted) - 1) for answer in answers],
                "decoding_steps": [len(answer.accepted) for answer in answers],
                "new_tokens": [len(answer.tokens) for answer in answers],
                "wall_time": [round(answer.seconds, 6) for answer in answers],
                "accept_lengths": [length for answer in answers for length in answer.accepted],
                **({"seed": seed + index} if len(results) > len(prompts) else {}),
                **_logprobs(answers),
            }
            for index, answers in enumerate(zip(*of_turns, strict=True))
        ]
        row = {
            "question_id": number if asked[0].question is None else asked[0].question,
            "category": asked[0].kind or "other",
            "answer_id": uuid.uuid4().hex,
            "model_id": f"{Path(target.name).name}-{short_name(drafter)}",
            "choices": choices,
            "tstamp": time.time(),
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_text(file, "".join(lines))


def _logprobs(answers: Sequence[Generation]) -> dict[str, Any]:
    """Those of each turn, in a field ``logprobs``; no field if there are none."""
    found = [{"token_ids": each.tokens, **each.logprobs.as_json()} for each in answers if each.logprobs]
    return {"logprobs": found} if found else {}
