"""What commands print: texts to stdout byte for byte, made harmless on a terminal."""

import fcntl
import io
import json
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
from threading import Thread

import pytest
from rich.cells import cell_len

from draftsmith.common import progress
from draftsmith.inference.commands import terminal
from draftsmith.inference.commands.terminal import write_text
from draftsmith.inference.engine.text import visible

CHARACTERS = [chr(code) for code in [*range(0xA0), 0xE9, 0x3C4, 0x2028, 0x200F, 0xFFFD, 0x65E5, 0x1F642]]
WRITER = """
import json, sys
from draftsmith.inference.commands.terminal import console, end_text, write_text
from draftsmith.common.command import run_command

def main():
    for number, text in enumerate(json.load(sys.stdin)):
        write_text(text, drafted=number % 4)
        console.print("τ → ×", markup=False)
    end_text("x")

if __name__ == "__main__":
    run_command(main)
"""


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    return ["".join(rng.choices(CHARACTERS, k=rng.randrange(1, 40))) for _ in range(1000)]


def run_writer(texts, stdout, **environment):
    return subprocess.run(
        [sys.executable, "-c", WRITER],
        input=json.dumps(texts).encode(),
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}, **environment},
    )


@pytest.mark.parametrize(
    "environment",
    [{}, {"LANG": "C", "LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}],
    ids=str,
)
def test_off_a_terminal_texts_are_their_bytes(texts, environment):
    done = run_writer(texts, subprocess.PIPE, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(texts).encode(), "no colours, no wrapping, nothing else"
    assert b"\x1b" not in done.stderr and done.stderr.count(b"\n") == len(texts) + 1, "the last ends the text's line"


def through_a_terminal(texts, columns=0, **environment):
    """What arrives at a terminal, which says how wide it is if ``columns`` is not 0."""
    master, slave = pty.openpty()
    if columns:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    mode = termios.tcgetattr(slave)
    mode[1] &= ~termios.OPOST  # line feeds as they are
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    received = io.BytesIO()

    def drain():
        while True:
            try:
                data = os.read(master, 1 << 16)
            except OSError:
                return
            if not data:
                return
            received.write(data)

    reader = Thread(target=drain)
    reader.start()
    done = run_writer(texts, slave, **environment)
    os.close(slave)
    reader.join()
    os.close(master)
    assert done.returncode == 0, done.stderr
    return received.getvalue().decode()


def test_on_a_terminal_control_characters_are_visible(texts):
    shown = through_a_terminal(texts, TERM="xterm", PYTHONUTF8="1")
    pieces = re.findall("\x1b\\[(32|36)m(.*?)\x1b\\[0m", shown, re.DOTALL)
    assert pieces == [("36" if n % 4 == 2 else "32", visible(text)) for n, text in enumerate(texts) if n % 4]
    plain = re.sub("\x1b\\[(32|36|0)m", "", shown)
    assert plain == visible("".join(texts)) + "\n", "and a line feed at the end"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain)


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_terminals_without_colours(environment):
    assert through_a_terminal(["a", "é\x1b"], PYTHONUTF8="1", **environment) == "aé␛\n"


def test_a_terminal_that_is_no_utf_8():
    """The bytes of UTF-8 would be control characters to it."""
    assert through_a_terminal(["é\x9b"], TERM="xterm", PYTHONIOENCODING="ascii") == "\\xe9\\x9b\n"


def test_lines_are_broken_at_spaces():
    """Words of several pieces, drafted ones among them, stay whole on 24 columns; long ones and indents are kept."""
    draws = random.Random(3)
    words = ["".join(draws.choices("abcdé日", k=draws.randrange(1, 12))) for _ in range(300)]
    text = "".join(word + draws.choice([" ", " ", " ", "\n", "\n    "]) for word in words) + "x" * 60 + " end"
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : (at := at + draws.randrange(1, 5))])
    shown = re.sub("\x1b\\[(32|36|0)m", "", through_a_terminal(pieces, 24, TERM="xterm", PYTHONUTF8="1"))
    assert shown.split() == text.split(), "no word is broken, none is lost"
    lines, inserted = [""], 0
    for place, character in enumerate(shown.rstrip("\n")):
        if character == "\n":
            lines.append("")
        lines[-1] += character.strip("\n")
        rest = text[place - inserted :]
        if character == rest[0]:
            continue
        assert character == "\n" and lines[-2], "nothing else is written"
        word = rest.split()[0]
        assert cell_len(lines[-2]) + cell_len(word) > 24, "only where the word has no room"
        inserted += rest[0] != " " or shown[place + 1] == " "
    assert inserted > 30 and all(cell_len(line) <= 24 for line in lines if "x" * 60 not in line)


def test_the_legend_names_the_sources():
    """In the colours that their text has, escaped for rich."""
    with terminal.console.capture() as captured:
        terminal.console.print(terminal.legend("a/heads", ()))
        terminal.console.print(terminal.legend("a/[b]+ngram", ("a/[b]", "ngram")))
    assert captured.get().splitlines() == [
        "drafted by heads, the rest is the target's own",
        "drafted by [b], drafted by ngram, the rest is the target's own",
    ]
    said = terminal.legend("x+ngram", ("x", "ngram"))
    assert said.startswith("[green]drafted by x") and "[cyan]drafted by ngram" in said


def test_closed_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    write_text("x")


def test_progress_in_lines(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    with progress.ProgressBar("working", 3, terminal.console) as done:
        done(1)
        done(3)
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"working …\n  working 1/3  \d+ s left\n  working 3/3  0 s left\n", err)
