"""Requests that arrive over time, answered by the engine or a running server: their times, and figures of these."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftsmith.benchmarks.common import interval_of, ratio_of
from draftsmith.benchmarks.remote import RemoteServer
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MIN_REQUESTS = 5  # without which there is no interval
RESAMPLES = 1000  # of the bootstrap over blocks of requests

# ---- requests and their times


@dataclass(frozen=True)
class Workload:
    """The requests of a round, in the order in which they arrive.

    prompts: number of each one's prompt.
    limits: new tokens, at most.
    arrivals: seconds, of a Poisson process of one request per second.
    """

    prompts: list[int]
    limits: list[int]
    arrivals: list[float]

    def at(self, rate: float, seconds: float) -> "Workload":
        """The same process at ``rate`` requests per second, cut after ``seconds``; the first one arrives by then."""
        arrivals = [arrival / rate for arrival in self.arrivals]
        arrivals[0] = min(arrivals[0], seconds)
        count = sum(arrival <= seconds for arrival in arrivals)
        return Workload(self.prompts[:count], self.limits[:count], arrivals[:count])


def draw_workload(num_prompts: int, count: int, max_new_tokens: int, seed: int) -> Workload:
    """Requests with all prompts in random order, again and again, and limits drawn from half of ``max_new_tokens`` to
    all of it."""
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.empty(count, dtype=torch.float64).exponential_(1.0, generator=generator)
    limits = torch.randint(-(-max_new_tokens // 2), max_new_tokens + 1, (count,), generator=generator)
    orders = [torch.randperm(num_prompts, generator=generator) for _ in range(-(-count // num_prompts))]
    return Workload(torch.cat(orders)[:count].tolist(), limits.tolist(), gaps.cumsum(0).tolist())


class Waiting(Iterator[Request]):
    """The requests that have arrived; it ends where none waits, and goes on with the next arrival.

    Args:
        arrivals: seconds.
        clock: seconds since the beginning.
        stop: after so many seconds no request is taken.
    """

    def __init__(
        self, requests: Sequence[Request], arrivals: Sequence[float], clock: Callable[[], float], stop: float
    ) -> None:
        self.requests, self.arrivals, self.clock, self.stop = requests, arrivals, clock, stop
        self.taken: list[float] = []  # when each request was taken

    def __next__(self) -> Request:
        number, now = len(self.taken), self.clock()
        if number == len(self.requests) or now < self.arrivals[number] or now >= self.stop:
            raise StopIteration
        self.taken.append(now)
        return self.requests[number]

    def pause(self) -> float | None:
        """Seconds until the next request arrives, at least 0; None if no more are taken."""
        number, now = len(self.taken), self.clock()
        if number == len(self.requests) or now >= self.stop:
            return None
        return max(0.0, self.arrivals[number] - now)


@dataclass(frozen=True)
class Served:
    """One measurement: all times in seconds since its beginning.

    taken, first, last: when a request got its row, its first and its last token; infinite if it was not taken.
    answers: the results of the requests that were taken.
    seconds: until the last token.
    gaps: of each request the longest time between two of its tokens that came in different steps; empty if not known.
    """

    workload: Workload
    taken: list[float]
    first: list[float]
    last: list[float]
    answers: list[Generation]
    seconds: float
    gaps: list[float] = field(default_factory=list)

    @property
    def requests(self) -> list[tuple[float, float, float, float, int]]:
        """When each one arrived, was taken, and had its first and last token; its tokens."""
        return [*zip(self.workload.arrivals, self.taken, self.first, self.last, self.tokens, strict=True)]

    @property
    def waiting(self) -> int:
        """Earlier requests that still wait when the last one arrives."""
        return sum(taken > self.workload.arrivals[-1] for taken in self.taken[:-1])

    @property
    def tokens(self) -> list[int]:
        """Of each request; 0 if it was not taken."""
        counts = [len(answer.tokens) for answer in self.answers]
        return counts + [0] * (len(self.taken) - len(counts))


def measure(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    workload: Workload,
    rows: int,
    max_length: int,
    stop: float,
    on_end: Callable[[int], object] = lambda done: None,
) -> Served:
    """Answer requests as they arrive, by the real clock.

    Args:
        max_length: tokens of the longest prompt with its answer.
        stop: after so many seconds no request is taken; those being decoded are finished.
        on_end: called with the number of requests answered so far.
    """
    count = len(workload.arrivals)
    requests = [
        Request(prompts[number], limit) for number, limit in zip(workload.prompts, workload.limits, strict=True)
    ]
    first, last, gaps = [math.inf] * count, [math.inf] * count, [0.0] * count
    answers: list[Generation] = []
    began, ended = time.perf_counter(), itertools.count(1)

    def clock() -> float:
        return time.perf_counter() - began

    waiting = Waiting(requests, workload.arrivals, clock, stop)
    before = 0  # requests taken by earlier calls of serve, which numbers its own from 0

    def add_tokens(number: int, new: list[int]) -> None:
        now = clock()
        gaps[before + number] = max(gaps[before + number], now - last[before + number])  # −∞ at the first token
        last[before + number] = now
        first[before + number] = min(first[before + number], now)

    def end(number: int, result: Generation) -> None:
        on_end(next(ended))

    while (pause := waiting.pause()) is not None:
        if pause:
            time.sleep(pause)
        before = len(waiting.taken)
        # It returns when no text is being decoded and no request waits.
        answers += decoder.serve(waiting, rows, max_length=max_length, on_tokens=add_tokens, on_end=end)
    taken = waiting.taken + [math.inf] * (count - len(waiting.taken))
    return Served(workload, taken, first, last, answers, max(last[: len(answers)]), gaps)


def measure_server(
    server: RemoteServer,
    prompts: Sequence[Sequence[int]],
    workload: Workload,
    rows: int,
    stop: float,
    on_end: Callable[[int], object] = lambda done: None,
) -> Served:
    """:func:`measure` of a running server, with ``rows`` requests at once at most. Raises ConnectionError: a request is
    not answered."""
    count = len(workload.arrivals)
    taken, first, last = [math.inf] * count, [math.inf] * count, [math.inf] * count
    answers: list[Generation | None] = [None] * count
    began, lock, ended = time.perf_counter(), threading.Lock(), itertools.count(1)

    def ask(number: int) -> None:
        if (now := time.perf_counter() - began) >= stop:
            return
        taken[number] = now
        found = server.answer(prompts[workload.prompts[number]], workload.limits[number])
        first[number], last[number] = found.first - began, found.last - began
        answers[number] = Generation(found.tokens)
        with lock:
            on_end(next(ended))

    with ThreadPoolExecutor(rows) as threads:
        asked = []
        for number, arrival in enumerate(workload.arrivals):
            time.sleep(max(0.0, arrival - (time.perf_counter() - began)))
            asked.append(threads.submit(ask, number))
        for each in asked:
            each.result()
    done = [answer for answer in answers if answer is not None]  # requests are taken in the order of their arrival
    return Served(workload, taken, first, last, done, max(last[: len(done)]))


# ---- figures


def percentile(values: Tensor, share: float) -> Tensor:
    """Nearest-rank percentile over the last dimension: the smallest value that is not below ``share`` of them; NaN of
    no values."""
    count = values.shape[-1]
    if not count:
        return torch.full(values.shape[:-1], math.nan, dtype=values.dtype)
    return values.sort(-1).values[..., max(1, math.ceil(round(share * count, 9))) - 1]


def percentile_ratio(values: Tensor, base: Tensor, share: float) -> tuple[float, tuple[float, float] | None]:
    """Percentile of ``values [n]`` over that of ``base [n]``, of the same requests in the order of their arrival.

    Returns:
        The ratio, NaN where both are infinite; its 95 % interval from resampled blocks of ⌈√n⌉ neighbours (the last
        and the first request are neighbours, too), None below :data:`MIN_REQUESTS`.
    """
    from scipy.stats import norm, t  # takes half a second to import

    pair, count = torch.stack((values, base)).double(), len(values)
    at_share = percentile(pair, share)
    ratio = float(at_share[0] / at_share[1])
    if count < MIN_REQUESTS:
        return ratio, None
    size = math.ceil(math.sqrt(count))
    blocks = -(-count // size)
    begins = torch.randint(count, (RESAMPLES, blocks, 1), generator=torch.Generator().manual_seed(0))
    drawn = pair[:, ((begins + torch.arange(size)) % count).flatten(1)[:, :count]]
    found = percentile(drawn, share)
    ratios = (found[0] / found[1]).nan_to_num(nan=1.0, posinf=math.inf).sort().values  # ∞ / ∞: neither is better
    # Expanded, since the plain percentiles are too narrow for few blocks (Hesterberg, arXiv 1411.5279).
    tail = float(norm.cdf(math.sqrt(blocks / (blocks - 1)) * t.ppf(0.025, blocks - 1)))
    edge = min(round(tail * RESAMPLES), RESAMPLES // 2 - 1)
    return ratio, (float(ratios[edge]), float(ratios[-1 - edge]))


def row_seconds(served: Served, rows: int) -> list[float]:
    """For each request answered with all there at once, how long it kept a row: since the row's last text ended."""
    ends = served.last[: len(served.answers)]
    free = [0.0] * rows + sorted(ends)  # rows are taken in the order in which they become free
    return [end - begin for end, begin in zip(ends, free, strict=False)]


def capacity_columns(method: Sequence[Served], plain: Sequence[Served], rows: int) -> Tensor:
    """``[4, n]``: tokens and row seconds of a method, tokens and row seconds of plain decoding, by request that both
    have answered; one :class:`Served` of each round."""
    columns: list[list[float]] = [[], [], [], []]
    for mine, other in zip(method, plain, strict=True):
        both = min(len(mine.answers), len(other.answers))
        parts = (mine.tokens, row_seconds(mine, rows), other.tokens, row_seconds(other, rows))
        for column, part in zip(columns, parts, strict=True):
            column += part[:both]
    return torch.tensor(columns, dtype=torch.float64)


def rounded(value: float, digits: int = 4) -> float | None:
    """None if it is not finite, which JSON lacks."""
    return round(value, digits) if math.isfinite(value) else None


def capacity_figures(method: Sequence[Served], plain: Sequence[Served], rows: int) -> dict[str, Any]:
    """Figures of the measurements with all requests there at once; speeds of plain decoding are those of the requests
    that both have answered."""
    columns = capacity_columns(method, plain, rows)
    total = columns.sum(-1)
    return {
        "tokens_per_second": rounded(float(rows * total[0] / total[1]), 2),
        "requests_per_second": rounded(float(rows * columns.shape[1] / total[1]), 6),
        "over_plain": rounded(float(ratio_of(total))),
        "over_plain_interval": interval_of(columns, ratio_of) if method is not plain else None,
        **common_figures(method),
    }


def common_figures(rounds: Sequence[Served]) -> dict[str, Any]:
    """What is counted at every load, and all times."""
    lengths = [length for served in rounds for answer in served.answers for length in answer.accepted]
    return {
        "tau": round(sum(lengths) / len(lengths), 4) if lengths else None,
        "requests": sum(len(served.taken) for served in rounds),
        "answered": sum(len(served.answers) for served in rounds),
        "tokens": sum(sum(served.tokens) for served in rounds),
        "seconds": [round(served.seconds, 4) for served in rounds],
        "times": [
            {
                "prompt": served.workload.prompts,
                "limit": served.workload.limits,
                "arrival": [round(arrival, 6) for arrival in served.workload.arrivals],
                **{name: [rounded(value, 6) for value in getattr(served, name)] for name in ("taken", "first", "last")},
                "tokens": served.tokens,
            }
            for served in rounds
        ],
    }


def latencies(rounds: Sequence[Served]) -> Tensor:
    """Seconds from arrival to the last token, of the requests of all rounds; infinite if not answered."""
    requests = (request for served in rounds for request in served.requests)
    return torch.tensor([last - arrival for arrival, _, _, last, _ in requests], dtype=torch.float64)


def load_figures(method: Sequence[Served], plain: Sequence[Served]) -> dict[str, Any]:
    """Figures of the measurements at a load; ``verdict``: whether speculation is faster, slower or even by its p90
    latency, None for plain decoding."""
    requests = [request for served in method for request in served.requests]
    first = [f - arrival for arrival, _, f, _, _ in requests]
    per_token = [(last - f) / (tokens - 1) for _, _, f, last, tokens in requests if tokens > 1]
    occupied = sum(last - taken for _, taken, _, last, _ in requests if taken < math.inf)
    seconds = sum(served.seconds for served in method)
    waiting, count = [served.waiting for served in method], sum(len(served.taken) for served in method)
    times = {"latency": latencies(method), "first_token": torch.tensor(first), "per_token": torch.tensor(per_token)}
    figures: dict[str, Any] = {
        name: {each: rounded(float(percentile(values.double(), share)), 6) for each, share in PERCENTILES.items()}
        for name, values in times.items()
    }
    interval = None
    for each in () if method is plain else ("p50", "p90"):
        ratio, interval = percentile_ratio(times["latency"], latencies(plain), PERCENTILES[each])
        figures[f"latency_{each}_over_plain"] = rounded(ratio)
        figures[f"latency_{each}_over_plain_interval"] = interval and [rounded(bound) for bound in interval]
    return figures | {
        "tokens_per_second": rounded(sum(sum(served.tokens) for served in method) / seconds, 2),
        "worst_gap": rounded(max((gap for served in method for gap in served.gaps), default=math.nan), 6),
        "rows": rounded(occupied / seconds),
        "waiting": waiting,
        "grew": queue_grew(waiting, count),
        "verdict": None if method is plain else verdict_of(interval),  # by p90, the last
        **common_figures(method),
    }


def queue_grew(waiting: Sequence[int], count: int) -> bool:
    """Whether, when the last request arrived, more than two were waiting on average, and more than a tenth.

    Args:
        waiting: how many, by round; ``count``: requests of all rounds.
    """
    return sum(waiting) > max(2 * len(waiting), 0.1 * count)


def verdict_of(interval: tuple[float, float] | None) -> str:
    """``faster``, ``slower`` or ``even`` (the interval holds 1, or there is none), by a ratio of latencies."""
    if interval is None or interval[0] <= 1 <= interval[1]:
        return "even"
    return "faster" if interval[1] < 1 else "slower"
