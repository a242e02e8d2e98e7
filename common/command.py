"""What all commands share: errors in one line, exit codes, Ctrl-C.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input (and a run its user interrupted).

Our own code raises ``ValueError``, ``FileNotFoundError`` or ``OSError`` for what the user can correct; its message says
what is wrong, where, and what to do. The same exception raised inside a library is a defect and keeps its traceback.
"""

import argparse
import atexit
import difflib
import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar

# Before torch is imported: large tensors on a CPU go into huge pages where Linux allows it, since a pass over a model's
# weights otherwise waits for address translation.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:  # --help needs none of it
    from rich.console import Console

# A path that cannot be used, whether our code or a library's reads or writes there.
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.EPERM)
_UNUSABLE = (*_FORBIDDEN, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share of it, the largest file it takes
T = TypeVar("T")
_INTERRUPTED = "interrupted; files already written are whole"


def raised_by_us(traceback: TracebackType | None) -> bool:
    """Whether an error's last frame is in this project, so that its message is for the user."""
    name = ""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return name == "__main__" or name.startswith("draftsmith.")


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of another library's error, at most ``most`` characters of it; its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


def nearest(name: str, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The known name that is meant by one that is not: it has that word, as ``num_heads`` has ``heads``, or nearly all
    of its letters in their order; None if no name is near. ``cutoff``: from which ratio of difflib on it is."""
    plain = {each.strip("-").replace("-", "_"): each for each in known}
    word = name[:100].strip("-").replace("-", "_")
    found = [each for each in plain if word == each] or [each for each in plain if word in each.split("_")]
    found = found or difflib.get_close_matches(word, plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def counted(number: int, noun: str) -> str:
    """``1 prompt``, ``2,000 prompts``: a count with its noun, which is given in the singular."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def _describe_os_error(error: OSError, resumable: bool) -> str:
    place = f"{error.filename}: " if error.filename else ""
    if error.errno in _FULL:
        what = "the disk is full" if error.errno == errno.ENOSPC else f"nothing more can be written ({error.strerror})"
        again = "run again with --resume" if resumable else "run again"
        return f"{place}{what}; free some space and {again} (finished files are intact)"
    if error.errno in _UNUSABLE:
        return f"{place}cannot write or read here ({error.strerror}); choose another folder"
    return str(error)


def _stop(message: str, code: int) -> NoReturn:
    _flush()
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    which = f"rank {os.environ.get('RANK')} of {processes}: " if processes > 1 else ""
    print(f"error: {which}{message}" if code else message, file=sys.stderr, flush=True)
    sys.exit(code)


def _flush() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()


def _drop_output() -> None:
    """Discard further output after stdout was closed (``… | head``), so that the interpreter's final flush succeeds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape_unencodable() -> None:
    """Print characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _handles_interrupts() -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # started by nohup or with & from a script


def _refuse_other_checkout() -> None:
    """Exit with one line if the running script is in one checkout of this project and the imported library in another,
    since their code may differ."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None or not getattr(main, "__file__", None):
        return  # python -m, or no script at all
    script, library = Path(str(main.__file__)).resolve(), Path(__file__).resolve().parents[1]
    checkout = script.parent.parent  # a command is a file in a top-level folder
    if checkout != library and (checkout / "common" / "command.py").is_file():
        _stop(
            f"{script}: this script is part of {checkout}, but this Python imports draftsmith from {library}; install "
            f"the script's (pip install --editable {checkout}), or run {library / script.relative_to(checkout)}",
            2,
        )


# What users of other tools type, and what it is here.
_HABITS = {
    "--max-tokens": "--max-new-tokens",
    "--num-speculative-tokens": "--tree FILE (python inference/calibrate.py finds the tree)",
    "--speculative-model": "DRAFTER, without an option",
    "--drafter": "DRAFTER, without an option",
    "--model": "--target",
}
_FIELDS = {  # the same of a recipe's fields
    "--steps": "stages.0.steps=N",
    "--epochs": "stages.0.epochs=N",
    "--lr": "stages.0.optim.lr=X",
    "--batch-size": "stages.0.batch.sequences=N",
    "--seed": "run.seed=N",
    "--output-dir": "run.output_dir=FOLDER",
}


class CommandLine(argparse.ArgumentParser):
    """A command line whose errors are one line. An option that it does not have is answered with the nearest one."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        known = [name for action in self._actions for name in action.option_strings]
        given = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--") and word != "--"]
        unknown = [name for name in given if not any(option.startswith(name) for option in known)]
        if unknown and message.startswith(("unrecognized", "the following arguments", "one of the arguments")):
            message = f"there is no option {unknown[0]}"
            meant = nearest(unknown[0], known)
            habit = _HABITS.get(unknown[0].replace("_", "-"), "")
            if habit and (not habit.startswith("--") or habit.split()[0] in known):
                message += f"; here it is {habit}"
            elif meant:
                message += f"; nearest: {meant}"
            elif any(action.dest == "overrides" for action in self._actions):
                example = _FIELDS.get(unknown[0].replace("_", "-"))
                message += f"; a recipe's fields are set as {example or 'section.field=value'}, without dashes"
        message = message.removesuffix(", section.field=value")  # of which there may be none
        _stop(f"{message} (--help lists all options)", 2)


def before_imports(parser: argparse.ArgumentParser, check: Callable[[argparse.Namespace], T] | None = None) -> T | None:
    """Answer ``--help``, wrong usage and what ``check`` raises before a script's slow imports, and Ctrl-C until their
    end in one line; a terminal is told that they begin. Returns what ``check`` does. ``main`` parses the command line
    again."""
    _escape_unencodable()
    _refuse_other_checkout()
    args = parser.parse_intermixed_args()
    if _handles_interrupts():
        signal.signal(signal.SIGINT, _exit_at_once)
    try:
        found = None if check is None else check(args)
    except (OSError, ValueError) as error:
        _stop(_describe_os_error(error, False) if isinstance(error, OSError) else str(error), 2)
    _say_loading()
    gc.disable()  # until run_command: imports leave next to no garbage, and looking for it is a fifth of their time
    return found


def _say_loading() -> None:
    """On a terminal, of several processes the first: a line before imports that take seconds."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first and sys.stderr is not None and sys.stderr.isatty():
        print("loading …", file=sys.stderr, flush=True)


def _exit_at_once(signum: int, frame: FrameType | None) -> None:
    # No exception: an extension module's import may turn it into another one, or ignore it.
    os.write(2, b"error: interrupted; nothing was written yet\n")
    os._exit(2)


@contextmanager
def no_collection() -> Iterator[None]:
    """Context without Python's garbage collector: it would look through millions of new objects again and again, and
    where it frees a graph or an event while a CUDA graph is captured, the capture fails."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def slow_imports() -> Iterator[None]:
    """Imports inside a command's ``main``, which Ctrl-C ends in one line; a terminal is told that they begin."""
    before = signal.signal(signal.SIGINT, _exit_at_once) if _handles_interrupts() else None
    _say_loading()
    try:
        with no_collection():  # as in before_imports
            yield
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def run_command(main: Callable[[], None], *, resumable: bool = False) -> NoReturn:
    """Run ``main`` and exit with its code. What the user can correct is one line on stderr; other errors keep their
    traceback.
    ``resumable``: the command has ``--resume``, which is the advice after a full disk."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked workers would warn about it
    _escape_unencodable()
    _refuse_other_checkout()
    if main.__module__ == "__main__":
        gc.enable()
        atexit.register(gc.disable)  # else the exit looks through all libraries once more
    interrupted = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def interrupt_again(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook_before(unraisable)
        elif interrupted:
            # Raised in a finaliser or a callback, where Python only prints it: raise it again, a little later.
            again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()

    handler_before, hook_before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    handles = _handles_interrupts()
    if handles:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = interrupt_again
    try:
        try:
            main()
            _flush()
        finally:
            if handles:  # the exit takes a moment, and Ctrl-C must not turn it into a traceback
                sys.unraisablehook = hook_before
                signal.signal(signal.SIGINT, signal.SIG_IGN if main.__module__ == "__main__" else handler_before)
    except KeyboardInterrupt as interruption:
        said = str(interruption) or _INTERRUPTED
    except FloatingPointError as error:  # a NaN or infinite loss
        _stop(str(error), 1)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if isinstance(error, ConnectionError) and error.errno is None and raised_by_us(error.__traceback__):
            _stop(str(error), 1)  # a server that a run needs does not answer
        if error.errno not in (*_FULL, *_UNUSABLE) and not raised_by_us(error.__traceback__):
            if not interrupted:
                raise
            said = _INTERRUPTED
        else:
            _stop(_describe_os_error(error, resumable), 1 if error.errno in _FULL else 2)
    except Exception as error:
        if isinstance(error, ValueError) and raised_by_us(error.__traceback__):
            _stop(str(error), 2)
        if not interrupted:
            if not out_of_memory(error):
                raise
            message = first_line(error, 160)
            _stop(f"out of memory ({message}); use smaller batches, fewer tokens or a smaller model", 1)
        said = _INTERRUPTED  # a library turned Ctrl-C into another exception
    else:
        sys.exit(0)
    # The interrupted frames are no longer held by an exception, but perhaps by each other, and with them a thread pool
    # that was just starting a thread: Python waits for it at the exit, and only the end of the pool ends it.
    gc.collect()
    _stop(said, 2)


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; on a CPU torch raises a plain RuntimeError."""
    by_type = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_type or "allocate memory" in str(error)


def recipe_parser(
    description: str | None,
    recipe: str,
    override: str,
    tiny: str | None = None,
    *,
    resume: str = "go on from the newest checkpoint",
    restart: str = "begin anew, deleting earlier checkpoints of this run",
    dry_run: str = "print what it would cost; train nothing",
    machine: bool = True,
) -> argparse.ArgumentParser:
    """The command line of a command that reads a recipe.
    ``recipe``, ``override``: examples.
    ``tiny``, ``resume``, ``restart``, ``dry_run``: help of these flags. If ``tiny`` is None, they are not added.
    ``machine``: whether --dry-run computes what it would cost on GPUs that --as names."""
    parser = CommandLine(description)
    parser.add_argument("recipe", help=f"a YAML file, for example {recipe}")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help=f"for example {override}")
    if tiny is not None:
        for flag, what in {"--resume": resume, "--restart": restart, "--tiny": tiny, "--dry-run": dry_run}.items():
            parser.add_argument(flag, action="store_true", help=what)
        parser.add_argument(
            "--verbose", action="store_true", help="with --dry-run: the whole recipe, with its defaults"
        )
        if machine:
            parser.add_argument(
                "--as",
                dest="machine",
                metavar="GPUS",
                help="with --dry-run: on these, not here: h100, h100x8, a100x4, …",
            )
    return parser


def make_console() -> "Console":
    """A console on stdout that prints text as it is: no markup, no emoji, no highlighted numbers, no line wrapped."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def available_cores() -> int:
    """CPU cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def cpu_facts() -> dict[str, str]:
    """What Linux says of the first processor: its ``model name``, ``flags``, …; nothing on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


@contextmanager
def interruptible(*, saves: bool = True) -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C and SIGTERM: the first one only makes the yielded function return True, so that a step can end and
    be saved; a second one interrupts at once. Without ``saves`` Ctrl-C alone, and nothing is said."""
    if threading.current_thread() is not threading.main_thread():  # signals can be handled in the main thread only
        yield lambda: False
        return
    requested = False

    def request(signum: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt("interrupted twice; the last checkpoint is kept" if saves else "")
        requested = True
        if saves:  # not print(): the signal may have interrupted one, and printing is not reentrant
            os.write(2, b"\ninterrupted: finishing this step, then saving (again to stop at once)\n")

    signals = [signal.SIGINT] * _handles_interrupts() + [signal.SIGTERM] * saves
    before = {s: signal.signal(s, request) for s in signals}
    try:
        yield lambda: requested
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
