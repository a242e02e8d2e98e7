"""The processes of one launch, which share out work and end at different times.

They meet in a key-value store, that of ``torchrun`` or ``accelerate launch --multi_gpu``: a collective would make those
that end early wait, with a timeout. A process without others has a store of its own.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")
PAUSE = 0.1  # seconds between two looks at what the others do
PATIENCE = timedelta(minutes=30)  # until the first process has begun


def own_device() -> str | None:
    """The GPU of this process, which becomes the current one, if several processes of this machine have one each."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1 or not torch.cuda.is_available():
        return None
    return f"cuda:{os.environ['LOCAL_RANK']}"


class Ranks:
    """This process among those of its launch. Inside, only the first one prints to stdout, and an error of one ends
    the others that wait.

    Args:
        alone: leave out the others.

    Attributes:
        rank: this process's number.
        count: number of processes.

    Raises:
        ConnectionError: in a method, the process that holds the store has ended.
        SystemExit: in a method that waits, another process has failed, and says so itself (code 1).
    """

    def __init__(self, alone: bool = False) -> None:
        self.rank = 0 if alone else int(os.environ.get("RANK", "0"))
        self.count = 1 if alone else int(os.environ.get("WORLD_SIZE", "1"))
        self._store: Store = HashStore()
        self._inside = contextlib.ExitStack()

    @property
    def main(self) -> bool:
        """Whether this is the first process, which prepares the work and writes what is common."""
        return self.rank == 0

    def __enter__(self) -> "Ranks":
        if self.count > 1:
            launchers = self._reach(lambda: next(rendezvous("env://", timeout=PATIENCE))[0])
            self._store = PrefixStore("draftsmith", launchers)
        if not self.main:
            nowhere = self._inside.enter_context(open(os.devnull, "w"))
            self._inside.enter_context(contextlib.redirect_stdout(nowhere))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside.close()
        if isinstance(error, Exception):
            with contextlib.suppress(ConnectionError):
                self.publish("failed", self.rank)

    def _reach(self, do: Callable[[], T]) -> T:
        try:
            return do()
        except (DistNetworkError, DistStoreError):
            raise ConnectionError("the launch's other processes cannot be reached; one of them has ended") from None

    def add(self, name: str, number: int = 1) -> int:
        """Add to a counter of all processes; returns what it is then."""
        return self._reach(lambda: self._store.add(name, number))

    def publish(self, name: str, value: Any) -> None:
        """Show a JSON value to all processes."""
        self._reach(lambda: self._store.set(name, json.dumps(value)))

    def find(self, name: str, otherwise: Any = None) -> Any:
        """A published value, if there is one yet."""
        if not self._reach(lambda: self._store.check([name])):
            return otherwise
        return json.loads(self._reach(lambda: self._store.get(name)))

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something is done, at most so long; returns whether it is."""
        began = time.monotonic()
        while not done():
            if self.find("failed") is not None:
                time.sleep(1)  # its line comes first
                sys.exit(1)
            if seconds is not None and time.monotonic() - began > seconds:
                return False
            time.sleep(PAUSE)
        return True

    def wait_for(self, name: str) -> Any:
        """A published value, once there is one."""
        self.wait(lambda: self._reach(lambda: self._store.check([name])))
        return self.find(name)

    def agree(self, name: str, value: str) -> bool:
        """Whether this value is the same in all processes, which wait here for each other."""
        self.publish(f"{name}/{self.rank}", value)
        return all(self.wait_for(f"{name}/{rank}") == value for rank in range(self.count))

    def is_first(self, text: str) -> bool:
        """Whether no process has asked this about the same text before."""
        if self.count == 1:
            return True
        return self.add(f"first/{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:32]}") == 1


class Share(Iterator[T], Generic[T]):
    """This process's share of a list that is the same in all of them: each takes the next item when it has room for
    one, so that all end at about the same time. At most an equal share is under way at once, so that the first process
    to begin leaves the others theirs; beyond that the iterator stops, and goes on after :meth:`ended`."""

    def __init__(self, items: Sequence[T], ranks: Ranks) -> None:
        self.items, self.ranks = items, ranks
        self.under_way, self.most = 0, -(-len(items) // ranks.count)

    def __next__(self) -> T:
        if self.under_way >= self.most:
            raise StopIteration
        number = self.ranks.add("taken") - 1
        if number >= len(self.items):
            raise StopIteration
        self.under_way += 1
        return self.items[number]

    def ended(self) -> int:
        """Note that one of the items is finished; returns how many of all processes' are."""
        self.under_way -= 1
        return self.ranks.add("ended")
