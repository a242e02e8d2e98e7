"""Methods of decoding, timed in turn: our engine with and without drafters, and ``transformers.generate``."""

import itertools
import math
import random
import statistics
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from draftsmith.common.command import counted
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.engine import Generation
from draftsmith.inference.engine.step import PHASES
from draftsmith.inference.measure.paired import MIN_PAIRS
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.target import Target

GROUPS = 32  # minimum number of groups of prompts, if there are as many batches
MIN_GROUPS = 16  # timed in any case, over all rounds, before timing may end early
NARROW = 0.03  # half-width of an interval, relative to its ratio, at which timing ends
RESAMPLES = 4000  # of the bootstrap


@dataclass
class Timed:
    """Outputs and times of one method. All methods are timed on the same groups of prompts, in the same order."""

    outputs: dict[int, Any] = field(default_factory=dict)  # by prompt number, of the last round with this prompt
    tokens: list[int] = field(default_factory=list)  # new ones of each group, in the last round with it
    seconds: list[list[float]] = field(default_factory=list)  # of each group, one per round
    cpu_seconds: list[list[float]] = field(default_factory=list)
    groups: list[Sequence[int]] = field(default_factory=list)  # prompt numbers of each

    def run(self, method: "Method", prompts: Sequence[list[int]], group: Sequence[int], place: int) -> None:
        """Time the method on a group of prompts, the ``place``-th one; places come in order within a round."""
        began, cpu = time.perf_counter(), time.process_time()
        outputs = method([prompts[number] for number in group])
        elapsed, cpu_elapsed = time.perf_counter() - began, time.process_time() - cpu
        if place == len(self.tokens):
            self.tokens.append(0)
            self.seconds.append([])
            self.cpu_seconds.append([])
            self.groups.append(group)
        self.outputs.update(zip(group, outputs, strict=True))
        self.tokens[place] = sum(len(tokens_of(output)) for output in outputs)
        self.seconds[place].append(elapsed)
        self.cpu_seconds[place].append(cpu_elapsed)

    def part(self, numbers: Collection[int]) -> "Timed":
        """The outputs and times of some of the prompts: of those groups that hold no others."""
        places = [place for place, group in enumerate(self.groups) if set(group) <= set(numbers)]
        tokens, groups = [self.tokens[place] for place in places], [self.groups[place] for place in places]
        seconds, cpu_seconds = ([times[place] for place in places] for times in (self.seconds, self.cpu_seconds))
        outputs = {number: self.outputs[number] for group in groups for number in group}
        return Timed(outputs, tokens, seconds, cpu_seconds, groups)

    @property
    def typical_seconds(self) -> list[float]:
        """Seconds of each group, the median over the rounds."""
        return [statistics.median(rounds) for rounds in self.seconds]

    @property
    def seconds_per_prompt(self) -> float:
        return sum(self.typical_seconds) / sum(map(len, self.groups))

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.typical_seconds)

    def by_round(self, seconds: Sequence[Sequence[float]]) -> list[float]:
        """Seconds of each round over its groups; the last round may have been cut short."""
        rounds = max(map(len, seconds))
        return [round(sum(group[r] for group in seconds if r < len(group)), 3) for r in range(rounds)]

    def summary(self) -> dict[str, Any]:
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "seconds": self.by_round(self.seconds),
            "cpu_seconds": self.by_round(self.cpu_seconds),
        }


def tokens_of(output: Any) -> list[int]:
    """The new tokens of a method's output for one prompt."""
    return output.tokens if isinstance(output, Generation) else output


@dataclass(frozen=True)
class Speedup:
    """Ratio of two methods' tokens/s over all groups together, and its 95 % interval (None below :data:`MIN_PAIRS`
    groups)."""

    ratio: float
    interval: tuple[float, float] | None

    @property
    def narrow(self) -> bool:
        return self.interval is not None and self.interval[1] - self.interval[0] <= 2 * NARROW * self.ratio


def speedup(method: Timed, base: Timed) -> Speedup:
    """Speed-up of a method over another one that was timed on the same groups.

    The interval is a bootstrap over groups. A resampled group brings the times of both methods, which share its prompts
    and the load of the machine at that time. More rounds make a group's times more precise and add no groups: the
    interval says how much the ratio varies with the prompts. Its percentiles are those of the expanded interval
    (Hesterberg, arXiv 1411.5279), since the plain ones are too narrow for few groups.
    """
    columns = torch.tensor(
        [method.tokens, method.typical_seconds, base.tokens, base.typical_seconds], dtype=torch.float64
    )
    return Speedup(float(_ratio(columns.sum(-1))), bootstrap_interval(columns, _ratio))


def bootstrap_interval(
    columns: torch.Tensor, statistic: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[float, float] | None:
    """95 % interval of a statistic ``[C, …] → […]`` of the sums of ``columns [C, G]`` over G groups, see
    :func:`speedup`; None below :data:`MIN_PAIRS` groups."""
    from scipy.stats import norm, t  # takes half a second to import

    groups = columns.shape[1]
    if groups < MIN_PAIRS:
        return None
    drawn = torch.randint(groups, (RESAMPLES, groups), generator=torch.Generator().manual_seed(0))
    tail = norm.cdf(math.sqrt(groups / (groups - 1)) * t.ppf(0.025, groups - 1))
    bounds = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = torch.quantile(statistic(columns[:, drawn].sum(-1)), bounds).tolist()
    return low, high


def accepted_interval(results: Sequence[Generation]) -> list[float] | None:
    """95 % interval of τ over all steps of some answers, by a bootstrap over the answers, as :func:`speedup`'s."""
    sums = [(sum(result.accepted), len(result.accepted)) for result in results if result.accepted]
    columns = torch.tensor(sums, dtype=torch.float64).view(-1, 2).t()
    interval = bootstrap_interval(columns, lambda total: total[0] / total[1])
    return [round(bound, 4) for bound in interval] if interval else None


def speedup_fields(name: str, measured: Speedup | None) -> dict[str, Any]:
    """A speed-up as the two fields of a report, ``name`` and ``name_interval``."""
    ratio, interval = (None, None) if measured is None else (round(measured.ratio, 4), measured.interval)
    return {name: ratio, f"{name}_interval": [round(bound, 4) for bound in interval] if interval else None}


def _ratio(sums: torch.Tensor) -> torch.Tensor:
    """``[4, …]`` tokens and seconds of a method, tokens and seconds of the base → ratio of their tokens/s."""
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


Method = Callable[[list[list[int]]], Sequence[Any]]  # prompts → the tokens, or the Generation, of each


def transformers_method(target: Target, max_new_tokens: int, batch_size: int = 1, **options: Any) -> Method:
    """``transformers.generate`` on the same weights, greedy if ``options`` of ``generate`` say nothing else, with its
    own attention; trimmed as ours is. Of the target's generation config only the stop ids are used, as by our engine,
    not its penalties and temperature."""

    def run(prompts: list[list[int]]) -> list[list[int]]:
        starts = range(0, len(prompts), batch_size)
        return [row for start in starts for row in run_batch(prompts[start : start + batch_size])]

    def run_batch(prompts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        limit = min(max_new_tokens, target.context - min(map(len, prompts)))
        if longest + limit > target.context and len(prompts) > 1:  # some models have no embeddings of further positions
            return [row for prompt in prompts for row in run_batch([prompt])]
        pad = min(target.stop_ids, default=0)
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=target.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
        stops = sorted(target.stop_ids) or None
        model: Any = target.model  # its type stubs make generate a tensor
        config, verbosity = model.generation_config, logging.get_verbosity()
        logging.set_verbosity_error()  # assisted generation warns of how it calls itself
        target.model.generation_config = GenerationConfig()  # one that is passed to generate inherits from the model's
        try:
            ends: dict[str, Any] = {"max_new_tokens": limit, "eos_token_id": stops, "pad_token_id": pad}
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, **{"do_sample": False, **options}, **ends)
        finally:
            target.model.generation_config = config
            logging.set_verbosity(verbosity)
        outputs: list[list[int]] = []
        for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
            row = row[: target.context - len(prompt)]
            end = next((i + 1 for i, token in enumerate(row) if token in target.stop_ids), len(row))
            outputs.append(row[:end])
        return outputs

    return run


def group_prompts(kinds: Sequence[str], batch_size: int) -> list[list[int]]:
    """Numbers of the prompts of each timed group, in the order of timing.

    A group holds ``batch_size`` prompts of one kind, or a multiple of it where that leaves :data:`GROUPS` groups of the
    kind. The groups of a kind are in random order (fixed seed), and the kinds are mixed in proportion to their numbers
    of groups, so that the groups timed before an early end are typical.
    """
    placed: list[tuple[float, list[int]]] = []  # (share of its kind's groups before it, group)
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, each in enumerate(kinds) if each == kind]
        size = batch_size * max(1, len(numbers) // (GROUPS * batch_size))
        groups = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        random.Random(0).shuffle(groups)
        placed += [((place + 0.5) / len(groups), group) for place, group in enumerate(groups)]
    return [group for _, group in sorted(placed, key=lambda pair: pair[0])]


def run_rounds(
    methods: dict[str, Method],
    prompts: Sequence[list[int]],
    rounds: int,
    warm_up: list[list[int]],
    batch_size: int = 1,
    seconds: float | None = None,
    settled: Callable[[dict[str, Timed]], bool] | None = None,
    kinds: Sequence[str] | None = None,
) -> dict[str, Timed]:
    """Time every method on groups of prompts, ``rounds`` times over all of them.

    The methods take turns on each group, in rotating order, so that other load on the machine affects all of them
    alike. The groups are those of :func:`group_prompts`.

    Args:
        kinds: the kind of text of each prompt; a group then holds prompts of one kind.
        warm_up: prompts that each method decodes first, untimed.
        seconds: time limit, checked between groups after the first :data:`MIN_GROUPS`.
        settled: called after each group from :data:`MIN_GROUPS` on; True ends timing.
    """
    for method in methods.values():
        method(warm_up)  # first calls allocate and tune
    timed = {name: Timed() for name in methods}
    groups = group_prompts(kinds or [""] * len(prompts), batch_size)
    order = list(methods)
    total, since = rounds * len(groups), time.perf_counter()
    console.print(f"decoding {counted(len(prompts), 'prompt')} by {', '.join(methods)}; rounds: {rounds}", markup=False)
    with ProgressBar("decoding", total, console, transient=True) as advance:
        for done, (_, place) in enumerate(itertools.product(range(rounds), range(len(groups))), 1):
            for name in order:
                timed[name].run(methods[name], prompts, groups[place], place)
            order = [*order[1:], order[0]]
            advance(done)
            elapsed = time.perf_counter() - since
            if done == 1:
                expected = elapsed * total
                if seconds is not None:
                    expected = min(max(seconds, elapsed * MIN_GROUPS), expected)
                console.print(f"  about {format_duration(expected)} here, judged from the first prompt", markup=False)
            if done >= MIN_GROUPS and ((seconds and elapsed >= seconds) or (settled and settled(timed))):
                break
    return timed


class PhaseTimes:
    """An observer of steps: adds the time since the last phase to ``seconds[phase]``; on a GPU it waits for the device
    first."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.since = device, time.perf_counter()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def __call__(self, phase: str, tree: object, verdict: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] += now - self.since
        self.since = now


def format_duration(seconds: float) -> str:
    """An estimated duration: whole seconds, or minutes with one decimal from 100 s on."""
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def with_own_seeds(
    sampling: Sampling, prompts: Sequence[Sequence[int]], samples: Sequence[int] = (0,)
) -> list[Sampling]:
    """The sampling parameters of each prompt, with a seed made of the given one and the prompt itself, whatever the
    other prompts are. ``samples``: what is added to the seed, for the first samples of all prompts, the second, …"""
    seeds = [
        sampling.seed + sample + zlib.crc32(str(list(prompt)).encode()) for sample in samples for prompt in prompts
    ]
    return [replace(sampling, seed=seed % (1 << 62)) for seed in seeds]


def engine_options(
    mode: Mode, sampling: Sampling, prompts: Sequence[Sequence[int]], samples: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Mode and sampling parameters as arguments of ``SpeculativeDecoder.generate``."""
    return {} if mode == "greedy" else {"mode": mode, "sampling": with_own_seeds(sampling, prompts, samples)}


def generate_options(mode: Mode, s: Sampling) -> dict[str, Any]:
    """The same as arguments of ``transformers.generate``. Raises ValueError: it does not have one of them."""
    if mode not in ("sample", "mss"):
        return {}
    if s.counts_tokens:
        raise ValueError(
            "transformers.generate has no presence and no frequency penalty; compare with --baseline engine or none"
        )
    biases = {(token,): bias for token, bias in s.logit_bias.items()}
    changes = {"repetition_penalty": s.repetition_penalty, **({"sequence_bias": biases} if biases else {})}
    if s.greedy:
        return changes
    options = {"do_sample": True, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
    return {**options, "min_p": s.min_p or None, **changes}
