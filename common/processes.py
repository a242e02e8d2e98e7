"""Work on many items by several processes."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from draftsmith.common.command import raised_by_us

T = TypeVar("T")
R = TypeVar("R")
_work: Callable[[Any], Any]  # of a process that was made for it


def in_order(work: Callable[[T], R], items: Iterable[T], processes: int) -> Iterator[R]:
    """What ``work`` returns for each item, in their order. With several processes, which are forked, at most two items
    for each are taken ahead.
    Raises ValueError, OSError: as ``work`` does; or a process has died."""
    if processes < 2:
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (work,))
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_done, item))
            if len(waiting) > 2 * processes:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process hears of it, too, and ends them
    _work = work


def or_error(work: Callable[[Any], Any], item: Any) -> Any:
    """What ``work`` makes of an item, or its error that a person can correct, for the main process to raise, where it
    is one line."""
    try:
        return work(item)
    except (ValueError, OSError) as error:
        if not (isinstance(error, OSError) or raised_by_us(error.__traceback__)):
            raise
        return error


def _done(item: Any) -> Any:
    return or_error(_work, item)


def _result(waited: Future[Any]) -> Any:
    try:
        found = waited.result()
    except BrokenProcessPool:
        raise ValueError("a process has ended abruptly, for want of memory perhaps; set data.workers=0") from None
    if isinstance(found, Exception):
        raise found
    return found
