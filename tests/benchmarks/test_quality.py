"""Right answers beside speed: what judges them, in which process a program runs, and the command."""

import copy
import json
import socket
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
import torch
from tiny_models import perturbed

from draftsmith.benchmarks import judged, quality, tasks
from draftsmith.inference.engine.engine import Generation

HEADER = "from typing import List\n\n\n"
PROMPT = f'{HEADER}def total(numbers: List[int]) -> int:\n    """The sum."""\n'
BODY = "    return sum(numbers)\n"
LEAVES_ONE = """
import ctypes, os, time
if not os.fork():
    os.setsid()
ctypes.CDLL(None).prctl(15, b"left-behind")
time.sleep(60)
"""


@pytest.fixture(scope="module")
def isolated():
    try:
        tasks.runs("")
    except PermissionError as error:
        pytest.skip(str(error))


HOW = ["network", "file", "outside", "removal", "memory", "time", "exit", "error", "process"]


@pytest.mark.whole_runs
@pytest.mark.parametrize("how", HOW)
def test_what_a_program_may_not_do(isolated, tmp_path, monkeypatch, how):
    monkeypatch.setattr(tasks, "SECONDS", 3)
    kept = tmp_path / "kept"
    kept.write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = {
            "network": f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)",
            "file": "open('x', 'w').write('x')",
            "outside": f"open({str(kept)!r}, 'w').write('y')",
            "removal": f"import os\nos.remove({str(kept)!r})",
            "memory": "x = bytearray(2 << 30)",
            "time": "while True: pass",
            "exit": "import sys\nsys.exit(0)",
            "error": "assert 1 == 2",
            "process": LEAVES_ONE,
        }[how]
        assert not tasks.runs(program)
    until = time.monotonic() + 5
    while left := [each for each in psutil.process_iter(["name"]) if each.info["name"] == "left-behind"]:
        assert time.monotonic() < until, left
        time.sleep(0.05)
    assert kept.read_text() == "x" and tasks.runs("import math, typing, collections, re\nassert math.pi > 3")


def test_without_namespaces_it_is_refused(monkeypatch):
    monkeypatch.setattr(tasks, "_GUARD", f"import sys\nsys.exit({tasks.NOT_ISOLATED})")
    with pytest.raises(PermissionError, match="trust the answers with --no-sandbox"):
        tasks.runs("")
    assert tasks.runs("x = 1", isolated=False)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (f"Here it is:\n```python\n{PROMPT}{BODY}```\nIt adds.", True),
        (f"```\n{BODY}```", True),
        (BODY, True),
        (f"```python\ndef total(numbers: List[int]) -> int:\n{BODY}", True),
        (f"```python\nprint(1)\n```\n```py\ndef total(numbers):\n{BODY}```", True),
        ("```python\ndef total(numbers):\n    return len(numbers)\n```", False),
        ("I cannot.", False),
    ],
)
def test_code_of(text, right):
    program = tasks.code_of(text, PROMPT, "total")
    found = {}
    try:
        exec(f"{program}\nvalue = total([2, 3])", found)
    except Exception:
        assert not right
    else:
        assert (found["value"] == 5) == right


def test_numbers_and_words():
    found = {"3 + 4 = 7.": "7", "It is 1,204": "1204", "-5": "-5", "2.5": None, "none": None, "7, then 8 (b)": "8"}
    assert {text: tasks.last_number(text) for text in found} == found
    assert tasks.first_of("Annabel? No: Ben, then Ann.", ["Ann", "Ben"]) == "Ben"
    assert tasks.first_of("nobody", ["Ann"]) is None


@pytest.mark.parametrize("kind", ["arithmetic", "reasoning"])
def test_made_tasks_are_right(kind):
    """References are judged right, other answers wrong; sums are read again here."""
    found = tasks.tasks_of([kind], 40, 5)
    assert len(found) == 40 and [t.messages for t in found] == [t.messages for t in tasks.tasks_of([kind], 40, 5)]
    assert len({task.messages[0]["content"] for task in found}) > 30
    for task in found:
        assert task.judge(f"It is {task.reference}.") and not task.judge("") and not task.judge("Zoe, 100000")
        text = task.messages[0]["content"]
        if kind == "arithmetic":
            a, *_, b = [int(word) for word in "".join(c if c.isdigit() else " " for c in text).split()]
            value = a + b if "+" in text or "buys" in text else a * b if "×" in text else a - b
            assert task.reference == str(value)


@pytest.mark.needs_models
def test_known_answers_are_right(isolated):
    for task in tasks.tasks_of(["code", "questions"], 12, 1):
        assert task.judge(task.reference), task.messages
        assert not task.judge("")


def test_right_answers(run_main, drafter, tmp_path):
    out_file = tmp_path / "quality.json"
    options = "--sets arithmetic reasoning --count 5 --max-new-tokens 12 --threads 1 --temperature 0.9".split()
    code, _, err = run_main(quality.main, drafter, *options, "--out", out_file)
    assert code == 0, err
    found = json.loads(out_file.read_text())
    names = ["plain", "heads", "heads, typical ε = 0.09"]
    by_name = {row["name"]: row for row in found["methods"]}
    assert list(by_name) == names and by_name["heads"]["lossless"] == {"plain": "plain", "equal": 10, "texts": 10}
    assert found["texts"]["heads"] == found["texts"]["plain"] != found["texts"][names[2]]
    assert by_name[names[2]]["lossless"] is None and by_name[names[2]]["mean_accepted_length"] > 1
    asked = tasks.tasks_of(["arithmetic", "reasoning"], 5, 0)
    for name in names:
        right = [task.judge(text) for task, text in zip(asked, found["texts"][name], strict=True)]
        assert by_name[name]["sets"]["all"]["right"] == sum(right)
        assert by_name[name]["sets"]["arithmetic"]["right"] == sum(right[:5])


def test_drafters_of_two_targets(target):
    """Their prompts are one target's tokens, so that the other's figures would be nonsense; an adapter's are not."""
    quality.check_targets(target, {"a": (target, None), "b": (replace(target, fingerprint="with an adapter"), None)})
    changed = replace(target, tokenizer=copy.deepcopy(target.tokenizer))
    changed.tokenizer.add_tokens("<another>")
    for other in (changed, replace(target, name="other", fingerprint="other")):
        with pytest.raises(ValueError, match="'b': its target"):
            quality.check_targets(target, {"a": (target, None), "b": (other, None)})


class Grading(BaseHTTPRequestHandler):
    """Grades an answer by its length; refuses some, and says no grade of others."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = asked["messages"]
        length = len(message["content"].rpartition("[assistant]\n")[2])
        self.server.asked.append((self.path, asked["model"], asked["temperature"], message["content"]))
        self.send_response(400 if length % 5 == 1 else 200)
        self.end_headers()
        said = "It is fair." if length % 5 == 2 else f"Grade: 3 at first. At last\n**Grade: {1 + length % 10}/10**"
        self.wfile.write(json.dumps({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}).encode())

    def log_message(self, *arguments):
        pass


def test_a_judge(run_main, drafter, tmp_path):
    """Both turns, the second after the method's own answer; equal answers are judged once, and none is dropped."""
    turns = [[f"Write function {n}.", "Shorter, please."] for n in range(10)]
    rows = [{"question_id": n, "category": "ab"[n % 2], "turns": each} for n, each in enumerate(turns)]
    (tmp_path / "question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "q.jsonl").write_text('{"prompt": "x"}\n')
    with ThreadingHTTPServer(("127.0.0.1", 0), Grading) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        words = ["--judge", url, "--judge-model", "grader", "--threads", 1, "--max-new-tokens", 12]
        code, _, err = run_main(quality.main, drafter, *words, "--questions", tmp_path / "q.jsonl")
        assert code == 2 and ":1: a judge grades conversations; give turns or messages" in err, err
        words += ["--questions", tmp_path / "question.jsonl", "--out", tmp_path / "out.json"]
        code, out, err = run_main(quality.main, drafter, *words, "--temperature", 0.9)
        server.shutdown()
    assert code == 0 and "grades of 1 to 10 by grader" in out, err
    found = json.loads((tmp_path / "out.json").read_text())
    answers, reasons = found["answers"], set()
    assert answers["heads"] == answers["plain"] != answers["heads, typical ε = 0.09"]
    every = [each["messages"] for one in answers.values() for each in one]
    shown = {"\n\n".join(f"[{role}]\n{text}" for role, text in messages) for messages in every}
    asked = ("/v1/chat/completions", "grader", 0)
    assert {*server.asked} == {(*asked, judged.REQUEST + one) for one in shown} and len(shown) < 60
    assert len(server.asked) == len({*server.asked}), "what is refused is not asked for again"
    for row, one in zip(found["methods"], answers.values(), strict=True):
        assert [len(each["messages"]) for each in one] == [2, 4] * 10
        assert all(one[n + 1]["messages"][:2] == one[n]["messages"] for n in range(0, 20, 2)), "its own first answer"
        graded = {kind: [] for kind in ("all", "a", "b")}
        for number, each in enumerate(one):
            length = len(each["messages"][-1][1])
            assert each["grade"] == {1: "http 400", 2: judged.UNREADABLE}.get(length % 5, 1 + length % 10)
            for kind in ("all", "ab"[number // 2 % 2]) if isinstance(each["grade"], float) else ():
                graded[kind].append(each["grade"])
        for kind, mean in row["grades"].items():
            assert mean["value"] == pytest.approx(sum(graded[kind]) / len(graded[kind]), abs=1e-4)
        assert sum(row["without_grade"].values()) == 20 - len(graded["all"]) and row["answers"] == 20
        reasons |= set(row["without_grade"])
    assert reasons == {"http 400", judged.UNREADABLE} and all(f"({reason})" in out for reason in reasons)
    code, _, err = run_main(quality.main, drafter, *words)
    assert code != 0 and err.startswith(f"error: endpoint {url}: ") and err.count("\n") == 1, "nobody listens any more"


def test_grades():
    found = {"Grade: 7": 7, "grade: **8.5**": 8.5, "Grade: 3\nGrade: 9/10": 9, "Grade: 11": None, "Grade: -3": None}
    assert {text: judged.grade_of(text) for text in found} == found and judged.grade_of("7") is None


def test_divergence_of_a_changed_target(target):
    """By its definition, after each token of the answers alone; of the target itself it is 0."""
    prompts, answers = [[5, 9, 30], [7]], [Generation([4, 60]), Generation([8])]
    changed, sums = perturbed(target, 0.3), []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.tokens]])[:, :-1]
        log_p, log_q = (
            each.model(ids).logits[0, len(prompt) - 1 :].double().log_softmax(-1) for each in (target, changed)
        )
        sums.append((log_p.exp() * (log_p - log_q)).sum())
    found = quality.divergence(target, changed, prompts, answers)
    assert found["value"] == pytest.approx(float(sum(sums)) / 3, rel=1e-3) and found["value"] > 1e-3
    assert quality.divergence(target, target, prompts, answers)["value"] == 0


def test_shares_and_differences():
    assert quality.share([True, False, False, False])["share_interval"] == pytest.approx([0.0456, 0.6994], abs=1e-4)
    ours, plain = [True] * 12 + [False] * 8, [True] * 8 + [False] * 12
    found = quality.difference(ours, plain)
    assert found["more"] == 0.2 and 0 <= found["more_interval"][0] < 0.2 < found["more_interval"][1]
    assert quality.difference(plain, plain) == {"more": 0.0, "more_interval": [0.0, 0.0]}
