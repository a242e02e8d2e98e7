"""Conversations on the engine: each answer may bring the next request of the same conversation."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from draftsmith.inference.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.step import Mode

T = TypeVar("T")


class _Ready(Generic[T]):
    """The requests that can be made now. The engine comes back whenever a row is free, so this may give again after it
    had nothing to give."""

    def __init__(self, talks: Iterator[T], request: Callable[[T], Request | None]) -> None:
        self.talks, self.request = talks, request
        self.next_turns: deque[T] = deque()  # before new talks, so that few are under way at a time
        self.under_way: dict[int, T] = {}  # by the engine's number of the request
        self.asked = 0

    def __iter__(self) -> "_Ready[T]":
        return self

    def __next__(self) -> Request:
        while True:
            talk = self.next_turns.popleft() if self.next_turns else next(self.talks)
            request = self.request(talk)
            if request is not None:
                self.under_way[self.asked] = talk
                self.asked += 1
                return request


def serve_turns(
    decoder: SpeculativeDecoder,
    talks: Iterator[T],
    request: Callable[[T], Request | None],
    hear: Callable[[T, Generation], bool],
    batch_size: int,
    *,
    mode: Mode = "greedy",
    longest: int,
) -> None:
    """Decode conversations, ``batch_size`` at a time; as :meth:`SpeculativeDecoder.serve`, which says the rest.

    Args:
        talks: taken one by one as rows get free.
        request: what a talk asks next; None if it is over, which is not told to ``hear``.
        hear: gets a talk's answer; says whether it goes on.

    Raises:
        ValueError: a request's prompt is empty, or longer than ``longest`` allows.
    """
    ready = _Ready(talks, request)

    def end(number: int, result: Generation) -> None:
        talk = ready.under_way.pop(number)
        goes_on = hear(talk, result)
        result.tokens, result.accepted = [], []  # the engine keeps all results; there may be millions
        if goes_on:
            ready.next_turns.append(talk)

    decoder.serve(ready, batch_size, mode=mode, longest=longest, on_end=end)
