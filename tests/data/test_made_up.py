import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.data.formats import read_sample
from draftsmith.tools.made_up import LONGEST, TASKS, chats, written

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def some():
    return chats(40, seed=3)


def test_same_seed_same_chats(some):
    assert chats(40, seed=3) == some
    assert chats(10, seed=3) == some[:10]
    assert chats(10, seed=4) != some[:10]


def test_answers_are_the_users_lines(some):
    forms = {task: form for form, tasks in TASKS.items() for task in tasks}
    seen = set()
    for chat in some:
        assert [message["role"] for message in chat] == ["user", "assistant"] * 2
        assert read_sample({"messages": chat}) == chat
        for question, answer in zip(chat[::2], chat[1::2], strict=True):
            task, _, text = question["content"].partition("\n\n")
            lines = text.split("\n")
            assert all(len(line.encode()) <= LONGEST for line in lines)
            assert answer["content"] == written(forms[task], lines)
            seen.add(forms[task])
    assert seen == set(TASKS)


def test_many_alphabets(some):
    text = "".join(message["content"] for chat in some for message in chat)
    for alphabet in ("\u0400-\u04ff", "\u4e00-\u9fff", "\u0600-\u06ff"):
        low, high = alphabet.split("-")
        assert any(low <= character <= high for character in text), alphabet


def test_forms():
    lines = ["Žofie", '吕"超']
    assert written("copy", lines) == 'Žofie\n吕"超'
    assert written("number", lines) == '1. Žofie\n2. 吕"超'
    assert written("bullets", lines) == '- Žofie\n- 吕"超'
    assert json.loads(written("json", lines)) == lines and "吕" in written("json", lines)


def test_command(tmp_path, some):
    out = tmp_path / "new/made-up.jsonl"
    script = [sys.executable, str(ROOT / "tools/made_up.py")]
    done = subprocess.run([*script, "--count", "40", "--seed", "3", "--out", str(out)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert [json.loads(line)["messages"] for line in out.read_text(encoding="utf-8").splitlines()] == some
    hidden = "import sys, runpy; sys.modules['faker'] = None; sys.argv[1:] = ['--out', sys.argv[1]];"
    hidden += f"runpy.run_path({str(ROOT / 'tools/made_up.py')!r}, run_name='__main__')"
    failed = subprocess.run([sys.executable, "-c", hidden, str(tmp_path / "x.jsonl")], capture_output=True, text=True)
    assert failed.returncode == 2 and "pip install faker" in failed.stderr and "Traceback" not in failed.stderr
