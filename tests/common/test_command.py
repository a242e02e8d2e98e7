import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.common.command import CommandLine, counted, first_line, interruptible, recipe_parser, run_command
from draftsmith.common.progress import ProgressBar
from draftsmith.train import dry_run, launch, track

ROOT = Path(__file__).parent.parent.parent


def fail_with(error):
    def main():
        raise error

    return main


CANNOT = "error: {}: cannot write or read here ({}); choose another folder".format
FULL = "error: {}; free some space and run again (finished files are intact)".format


@pytest.mark.parametrize(
    "error, code, line",
    [
        (ValueError("optim.lr: too high"), 2, "error: optim.lr: too high"),
        (FileNotFoundError("x.yaml: there is no such recipe"), 2, "error: x.yaml: there is no such recipe"),
        (FloatingPointError("loss nan at step 3"), 1, "error: loss nan at step 3"),
        (KeyboardInterrupt(), 2, "error: interrupted; files already written are whole"),
        (KeyboardInterrupt("stopped at step 3; saved"), 2, "error: stopped at step 3; saved"),
        (OSError(errno.ENOSPC, "No space", "runs/x"), 1, FULL("runs/x: the disk is full")),
        (OSError(errno.EFBIG, "File too large", "a"), 1, FULL("a: nothing more can be written (File too large)")),
        (ConnectionError("nobody answers"), 1, "error: nobody answers"),
        (OSError(errno.ELOOP, "Too many levels", "a"), 2, CANNOT("a", "Too many levels")),
        (OSError(errno.ENOTDIR, "Not a directory", "a"), 2, CANNOT("a", "Not a directory")),
        (OSError(errno.EACCES, "Permission denied", "runs/x"), 2, CANNOT("runs/x", "Permission denied")),
    ],
)
def test_errors_are_one_line_and_an_exit_code(error, code, line, capsys, monkeypatch):
    monkeypatch.setitem(fail_with.__globals__, "__name__", "draftsmith.x")  # as if raised by us
    with pytest.raises(SystemExit) as stopped:
        run_command(fail_with(error))
    assert stopped.value.code == code
    assert capsys.readouterr() == ("", line + "\n")


def test_a_full_disk_of_a_command_with_resume(capsys, monkeypatch):
    with pytest.raises(SystemExit):
        run_command(fail_with(OSError(errno.ENOSPC, "No space", "runs/x")), resumable=True)
    assert "free some space and run again with --resume (finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, line", [(ValueError("\n a\nb"), "a"), (ValueError(" "), "ValueError"), (ValueError("x" * 30), "x" * 20)]
)
def test_the_first_line_of_an_error(error, line):
    assert first_line(error, most=20) == line


def test_success_is_0(capsys):
    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: None)
    assert stopped.value.code == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("main", [lambda: int("x"), lambda: Path("/nowhere/at/all").read_text(), lambda: 1 / 0])
def test_other_errors_keep_their_traceback(main, monkeypatch):
    monkeypatch.setitem(fail_with.__globals__, "__name__", "some.library")
    with pytest.raises((ValueError, FileNotFoundError, ZeroDivisionError)):
        run_command(main)


def test_the_first_interrupt_asks_and_the_second_stops(capfd):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="twice"), interruptible() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before
    assert capfd.readouterr().err.count("interrupted") == 1


def as_another_exception(interrupt):
    try:
        interrupt()
        time.sleep(5)
    except KeyboardInterrupt:
        raise ImportError("cannot import name 'x'") from None


def in_a_finaliser(interrupt):
    class Held:
        def __del__(self):
            interrupt()
            time.sleep(0.01)

    held = Held()
    del held  # Python prints what a finaliser raises, and goes on
    time.sleep(5)


@pytest.mark.parametrize("how", [as_another_exception, in_a_finaliser])
def test_ctrl_c_that_a_library_swallows(how, capfd):
    went_on = []

    def main():
        how(lambda: os.kill(os.getpid(), signal.SIGINT))
        went_on.append(True)

    with pytest.raises(SystemExit) as stopped:
        run_command(main)
    assert stopped.value.code == 2 and not went_on
    assert capfd.readouterr().err == "error: interrupted; files already written are whole\n"


STARTING_A_THREAD = """
import os, signal, threading, time
from concurrent.futures import ThreadPoolExecutor
from draftsmith.common.command import run_command

start = threading.Thread.start

def interrupted(thread):
    start(thread)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

def main():
    with_itself = []
    try:
        ThreadPoolExecutor(1).submit(len, "")
    except KeyboardInterrupt as error:
        with_itself.append((with_itself, error))
        raise

threading.Thread.start = interrupted
run_command(main)
"""


def test_ctrl_c_while_a_thread_pool_starts_a_thread():
    """As transformers does when it loads weights: the pool does not know the thread yet, and would not end it."""
    command = [sys.executable, "-c", STARTING_A_THREAD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: interrupted; files already written are whole\n"


@pytest.mark.parametrize("module", [launch, track, dry_run])
def test_names_are_printed_as_they_are(module, capsys, monkeypatch):
    console = module.console
    said = "done: runs/x[/b], from [abc]*.jsonl :smile: and " + "more " * 60
    console.print(said)
    with monkeypatch.context() as patch:  # no wrapping on a terminal either, and a bar that takes the same names
        patch.setattr(console, "_force_terminal", True)
        console.print(said)
        if console is launch.console:
            with ProgressBar("tokenizing x[/b]", 1, console):
                pass
    plain, on_a_terminal, *bar = capsys.readouterr().out.splitlines()
    assert plain == said and on_a_terminal == said
    assert (console is not launch.console) or "tokenizing x[/b]" in "".join(bar)


COMMANDS = sorted(
    str(file.relative_to(ROOT))
    for room in ("data", "models", "inference", "train", "benchmarks", "tools")
    for file in (ROOT / room).rglob("*.py")
    if re.search(r"CommandLine\(|recipe_parser\(", file.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("file", COMMANDS)
def test_every_option_is_explained(monkeypatch, file):
    found = []

    def parse(self, *_, **__):
        found.append(self)
        raise SystemExit

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(CommandLine, name, parse)
    with pytest.raises(SystemExit):
        importlib.import_module(f"draftsmith.{file.removesuffix('.py').replace('/', '.')}").main()
    silent = [action.option_strings or action.dest for action in found[0]._actions if not action.help]
    assert not silent, f"without a help text: {silent}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-tokens", "5"], "there is no option --max-tokens; here it is --max-new-tokens"),
        (["--drafter", "x"], "there is no option --drafter; here it is DRAFTER, without an option"),
        (["--num_speculative_tokens=3"], "there is no option --num_speculative_tokens; here it is --tree FILE"),
        (["--bathc-size", "2"], "there is no option --bathc-size; nearest: --batch-size"),
        (["--steps", "3"], "there is no option --steps (--help"),
        (["--size", "2"], "there is no option --size; nearest: --batch-size"),
        (["--xyz"], "there is no option --xyz (--help"),
    ],
)
def test_options_of_other_tools(words, said):
    command = [sys.executable, ROOT / "inference/decode.py", "ngram", "--prompt", "a", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["r.yaml", "--steps", "3"],
            "there is no option --steps; a recipe's fields are set as stages.0.steps=N, without",
        ),
        (["r.yaml", "--whatever=3"], "; a recipe's fields are set as section.field=value, without dashes"),
        (["r.yaml", "--restrat"], "there is no option --restrat; nearest: --restart"),
        ([], "the following arguments are required: recipe (--help"),
    ],
)
def test_options_that_are_fields_of_a_recipe(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train/medusa.py", *words])
    with pytest.raises(SystemExit):
        recipe_parser("", "r.yaml", "a.b=1", "tiny").parse_intermixed_args()
    assert said in capsys.readouterr().err


def test_counts_with_their_nouns():
    found = [counted(1, "prompt"), counted(0, "prompt"), counted(2000, "process"), counted(1, "process")]
    assert found == ["1 prompt", "0 prompts", "2,000 processes", "1 process"]
