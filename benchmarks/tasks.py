"""Tasks whose answers a program can judge: HumanEval's tests, arithmetic, reasoning, questions with known answers."""

import random
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.data import evaluation
from draftsmith.data.formats import Message

SECONDS = 10  # of a program, at most
NOT_ISOLATED = 77  # exit code of a process that may not cut itself off
_LONGEST_ANSWER = 30  # characters of a reference answer that a text may hold word by word
_NAMES = "Ann Ben Cleo Dan Eve Finn Gus Hana".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

# What a process does before a program that nobody has read: no network (a network namespace without interfaces), no
# file that can be written (all mounts read-only in a mount namespace of its own), little time and memory, and no
# process that outlives it: it is the first one of a process namespace, dies with its parent, and the others with it.
_GUARD = f"""
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
NEWNS, NEWUSER, NEWPID, NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
PRIVATE, RECURSIVE, MOUNT_SETATTR, PDEATHSIG = 0x44000, 0x8000, 442, 1
read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
if (
    libc.unshare(NEWUSER | NEWNET | NEWNS | NEWPID)
    or libc.mount(None, b"/", None, PRIVATE, None)
    or libc.syscall(MOUNT_SETATTR, -1, b"/", RECURSIVE, ctypes.byref(read_only), 32)
):
    sys.exit({NOT_ISOLATED})
if child := os.fork():
    os._exit(min(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), 255))
libc.prctl(PDEATHSIG, signal.SIGKILL)
"""
_LIMITS = f"""
import resource, sys
for limit, most in (("CPU", {SECONDS}), ("AS", 1 << 30), ("FSIZE", 0), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
exec(compile(sys.stdin.read(), "answer", "exec"), {{"__name__": "__main__"}})
"""


@dataclass(frozen=True)
class Task:
    """kind: the set.
    messages: what the target answers.
    reference: an answer that is right, for its likelihood.
    judge: whether a text is right.
    """

    kind: str
    messages: tuple[Message, ...]
    reference: str
    judge: Callable[[str], bool]


def runs(program: str, *, isolated: bool = True) -> bool:
    """Whether a program ends without an error, in a process without network, with read-only files, and with limits of
    time and memory. Leaving early does not count.

    Raises:
        PermissionError: this machine lets no process cut itself off like that.
    """
    word = secrets.token_hex(16)  # only the program's last line writes it
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-B", "-c", (_GUARD if isolated else "") + _LIMITS],
                input=f"{program}\nprint({word!r})\n",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return False
    if done.returncode == NOT_ISOLATED:
        raise PermissionError(
            "answers cannot be run: this machine gives a process no namespaces of its own, so it could reach the "
            "network and your files; name --sets without code, or trust the answers with --no-sandbox"
        )
    return done.returncode == 0 and done.stdout.endswith(f"{word}\n")


def code_of(text: str, prompt: str, entry_point: str) -> str:
    """The program of an answer to a HumanEval problem: its first block of code that defines the function, or the
    problem continued by its first block, or by the whole text where it has none."""
    blocks = re.findall(r"```(?:python|py)?\n(.*?)(?:```|\Z)", text, re.DOTALL) or [text]
    begin = f"def {entry_point}("
    for block in blocks:
        if begin in block:
            return prompt[: prompt.index(begin)] + block  # with what the problem imports and defines before
    return prompt + blocks[0]


def _code(isolated: bool) -> list[Task]:
    def task(each: evaluation.EvaluationPrompt) -> Task:
        known = each.known

        def judge(text: str) -> bool:
            program = code_of(text, known["prompt"], known["entry_point"])
            return runs(f"{program}\n{known['test']}\ncheck({known['entry_point']})", isolated=isolated)

        whole = f"```python\n{known['prompt'].strip()}\n{known['canonical_solution'].rstrip()}\n```"
        return Task("code", each.messages, whole, judge)

    return list(map(task, evaluation.load("human-eval")))


def last_number(text: str) -> str | None:
    """The last whole number of a text, without thousands separators."""
    found = re.findall(r"(?<![\d.])-?\d+(?:,\d{3})*(?![\d]|\.\d)", text)
    return found[-1].replace(",", "") if found else None


def first_of(text: str, words: Sequence[str]) -> str | None:
    """Which of the words a text has first."""
    found = re.search(rf"\b(?:{'|'.join(words)})\b", text)
    return found[0] if found else None


def _arithmetic(draws: random.Random, count: int) -> list[Task]:
    tasks = []
    for number in range(count):
        a, b, c = draws.randint(2, 30), draws.randint(2, 30), draws.randint(2, 9)
        name, other = draws.sample(_NAMES, 2)
        question, right = [
            (f"What is {a} + {b}?", a + b),
            (f"What is {a + b} - {b}?", a),
            (f"What is {a} × {c}?", a * c),
            (f"{name} has {c} apples and buys {b} more. How many apples does {name} have now?", b + c),
            (f"{name} has {a + b} stamps and gives {b} of them to {other}. How many stamps does {name} have left?", a),
        ][number % 5]
        messages: tuple[Message, ...] = ({"role": "user", "content": question},)
        tasks.append(
            Task("arithmetic", messages, f"{right}", lambda text, right=right: last_number(text) == str(right))
        )
    return tasks


def _reasoning(draws: random.Random, count: int) -> list[Task]:
    tasks = []
    for number in range(count):
        first, second, third = names = draws.sample(_NAMES, 3)
        day, later = draws.randrange(7), draws.randint(2, 5)
        question, right, words = [
            (f"{first} is taller than {second}. {second} is taller than {third}. Who is the tallest?", first, names),
            (f"{second} is older than {third}. {first} is older than {second}. Who is the youngest?", third, names),
            (f"Today is {_DAYS[day]}. Which day is it in {later} days?", _DAYS[(day + later) % 7], _DAYS),
            (f"{third} came after {second} and before {first}. Who came first?", second, names),
        ][number % 4]
        messages: tuple[Message, ...] = ({"role": "user", "content": f"{question} Answer with one word."},)
        tasks.append(
            Task(
                "reasoning",
                messages,
                right,
                lambda text, right=right, words=tuple(words): first_of(text, words) == right,
            )
        )
    return tasks


def _questions() -> list[Task]:
    def plain(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.lower()))

    tasks = []
    for each in evaluation.load("questions"):
        answers = [plain(answer) for answer in each.known["answers"] if len(answer) <= _LONGEST_ANSWER]
        if answers:
            judge = lambda text, answers=answers: any(f" {a} " in f" {plain(text)} " for a in answers)  # noqa: E731
            tasks.append(Task("questions", each.messages, each.known["answers"][0], judge))
    return tasks


SETS = ("code", "arithmetic", "reasoning", "questions")


def tasks_of(names: Sequence[str], count: int, seed: int, *, isolated: bool = True) -> list[Task]:
    """``count`` tasks of each set, or all if there are fewer, drawn with this seed.

    Raises:
        FileNotFoundError: a set's package is not installed.
        PermissionError: as :func:`runs`.
    """
    draws = random.Random(seed)
    found: list[Task] = []
    for name in names:
        if name == "code" and isolated:
            runs("", isolated=True)  # before anything slow
        made = {
            "code": lambda: _code(isolated),
            "questions": _questions,
            "arithmetic": lambda: _arithmetic(draws, count),
            "reasoning": lambda: _reasoning(draws, count),
        }[name]()
        found += made if len(made) <= count else draws.sample(made, count)
    return found
