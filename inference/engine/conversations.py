"""Conversations on the engine: each answer may bring the next request of the same conversation."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.verify.verify import Mode

C = TypeVar("C")  # a conversation


class _Requests(Generic[C]):
    """The requests that can be made now. The engine asks again whenever a row is free, so this iterator may go on after
    it had nothing to give."""

    def __init__(self, conversations: Iterator[C], next_request: Callable[[C], Request | None]) -> None:
        self.conversations, self.next_request = conversations, next_request
        self.continued: deque[C] = deque()  # before new conversations, so that few are under way at a time
        self.under_way: dict[int, C] = {}  # by the engine's number of the request
        self.made = 0

    def __iter__(self) -> "_Requests[C]":
        return self

    def __next__(self) -> Request:
        while True:
            conversation = self.continued.popleft() if self.continued else next(self.conversations)
            request = self.next_request(conversation)
            if request is not None:
                self.under_way[self.made] = conversation
                self.made += 1
                return request


def serve_conversations(
    decoder: SpeculativeDecoder,
    conversations: Iterator[C],
    next_request: Callable[[C], Request | None],
    on_answer: Callable[[C, Generation], bool],
    batch_size: int,
    *,
    mode: Mode = "greedy",
    max_length: int,
) -> None:
    """Decode conversations, ``batch_size`` at a time, by :meth:`SpeculativeDecoder.serve`. A next request continues in
    the row of the last one: where its prompt begins with the same tokens, only the rest is run.

    Args:
        conversations: taken one by one as rows get free.
        next_request: the next request of a conversation; None ends it without a call of ``on_answer``.
        on_answer: called with a conversation and its answer; returns whether the conversation goes on.

    Raises:
        ValueError: a request's prompt is empty, or longer with its answer than ``max_length``.
    """
    requests = _Requests(conversations, next_request)

    def end(number: int, result: Generation) -> None:
        conversation = requests.under_way.pop(number)
        goes_on = on_answer(conversation, result)
        # The engine keeps all results; there may be millions.
        result.tokens, result.accepted, result.drafted_by = [], [], []
        if goes_on:
            requests.continued.append(conversation)

    decoder.serve(requests, batch_size, mode=mode, max_length=max_length, on_end=end)
