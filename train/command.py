"""What every command shares: one line for an error, the exit code, Ctrl-C. A leaf that any command may import.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input (and a run its user interrupted).

Our own code raises ``ValueError``, ``FileNotFoundError`` or ``OSError`` for people; its message says what, where and
what to do. The same exception raised inside a library is a defect of ours and keeps its traceback.
"""

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

# A place that cannot be used; reported by whoever reads or writes, ours or a library.
_UNUSABLE = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)


def _raised_by_us(traceback: TracebackType | None) -> bool:
    name = ""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return name == "__main__" or name.startswith("draftsmith.")


def _describe_os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{place}the disk is full; free some space and run again with --resume (finished files are intact)"
    if error.errno in _UNUSABLE:
        return f"{place}cannot write or read here ({error.strerror}); choose another folder"
    return str(error)


def _stop(message: str, code: int) -> NoReturn:
    _flush()
    print(f"error: {message}" if code else message, file=sys.stderr, flush=True)
    sys.exit(code)


def _flush() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()


def _drop_output() -> None:
    """Nobody reads stdout any more (``… | head``); the interpreter's own flush at its end must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_anything() -> None:
    """Characters that the terminal's encoding lacks are printed as escapes instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _heeds_interrupts() -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # started by nohup or with & from a script


def before_imports(parser: argparse.ArgumentParser) -> None:
    """Call this in a script before it imports anything slow: ``--help`` and wrong usage answer at once, and Ctrl-C
    during the imports is one line. ``main`` parses the command line again."""
    _print_anything()
    parser.parse_intermixed_args()

    def leave(signum: int, frame: FrameType | None) -> None:
        # No exception: raised inside an extension module's import it may come out as something else, or not at all.
        os.write(2, b"error: interrupted; nothing was written yet\n")
        os._exit(2)

    if _heeds_interrupts():
        signal.signal(signal.SIGINT, leave)


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and turn what people can mend into one line on stderr and an exit code; nothing is swallowed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked workers would warn about it
    _print_anything()
    interrupted = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    heeds = _heeds_interrupts()
    if heeds:
        signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            main()
            _flush()
        finally:
            if heeds:  # what is left to do takes a moment, and Ctrl-C must not make a traceback of it
                signal.signal(signal.SIGINT, signal.SIG_IGN if main.__module__ == "__main__" else before)
    except KeyboardInterrupt as interruption:
        _stop(str(interruption) or "interrupted; files already written are whole", 2)
    except FloatingPointError as error:  # a NaN or infinite loss
        _stop(str(error), 1)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, *_UNUSABLE) and not _raised_by_us(error.__traceback__):
            raise
        _stop(_describe_os_error(error), 1 if error.errno == errno.ENOSPC else 2)
    except ValueError as error:
        if not _raised_by_us(error.__traceback__):
            raise
        _stop(str(error), 2)
    except (MemoryError, RuntimeError) as error:
        if interrupted:  # a library made another exception of Ctrl-C
            _stop("interrupted; files already written are whole", 2)
        if not _out_of_memory(error):
            raise
        said = (str(error).strip().splitlines() or ["MemoryError"])[0][:160]
        _stop(f"out of memory ({said}); use smaller batches, fewer tokens or a smaller model", 1)
    sys.exit(0)


def _out_of_memory(error: Exception) -> bool:
    """On the CPU torch raises a RuntimeError of no class of its own."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or "can't allocate memory" in str(error)


def available_cores() -> int:
    """CPU cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only makes the yielded function return True, so that a step can end and be
    saved; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():  # signals can be handled in the main thread only
        yield lambda: False
        return
    asked = False

    def ask(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt("interrupted twice; the last checkpoint stands")
        asked = True
        print("\ninterrupted: finishing this step, then saving (again to stop at once)", file=sys.stderr, flush=True)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
