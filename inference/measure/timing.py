"""Methods of decoding, timed in turn: our engine with and without drafters, and ``transformers.generate``."""

import itertools
import math
import random
import resource
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from transformers import GenerationConfig

from draftsmith.common.command import counted
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.inference.engine.engine import CACHE_GRANULE, Generation, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.step import PHASES, capacity_for
from draftsmith.inference.measure import report as reporting
from draftsmith.inference.measure.lossless import check_distribution, check_texts
from draftsmith.inference.measure.paired import MIN_PAIRS, paired_fields
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.kernels.linear import MOST_ON_CPU
from draftsmith.models.artifact import device_name, now, versions
from draftsmith.models.sizes import kv_bytes
from draftsmith.models.target import Target

Baseline = Literal["none", "engine", "transformers", "all"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
PROMPT_LOOKUP_TOKENS = 10  # as in transformers' documentation
GROUPS = 32  # minimum number of groups of prompts, if there are as many batches
MIN_GROUPS = 16  # timed in any case, over all rounds, before timing may end early
NARROW = 0.03  # half-width of an interval, relative to its ratio, at which timing ends
RESAMPLES = 4000  # of the bootstrap
CHECK_ROWS, CHECK_ROWS_ON_GPU = 8, 32  # texts that are decoded at a time where nothing is timed, memory permitting
LOGITS = 8  # copies of a step's logits in float32 that are reckoned with, at most: sampling's
INSTRUMENTED = 4  # prompts of the run that times the phases of a step


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
    if measured is None:
        return {name: None, f"{name}_interval": None}
    return {
        name: round(measured.ratio, 4),
        f"{name}_interval": [round(bound, 4) for bound in measured.interval] if measured.interval else None,
    }


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
        pad = min(target.stop_ids, default=0)
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=target.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=target.device)
        stops = sorted(target.stop_ids) or None
        model: Any = target.model  # its type stubs make generate a tensor
        config = model.generation_config
        target.model.generation_config = GenerationConfig()  # one that is passed to generate inherits from the model's
        try:
            ends: dict[str, Any] = {"max_new_tokens": limit, "eos_token_id": stops, "pad_token_id": pad}
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, **{"do_sample": False, **options}, **ends)
        finally:
            target.model.generation_config = config
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


def rows_untimed(decoder: SpeculativeDecoder, prompts: Sequence[list[int]], max_new_tokens: int, least: int) -> int:
    """Texts to decode at a time where nothing is timed: at least ``least``, the batch size of what was timed.

    On a CPU at most as many as leave the bits of a row independent of the other rows, and everywhere as many as fit
    into half of the memory that is left.
    """
    target, drafter = decoder.target, decoder.drafter
    most = CHECK_ROWS_ON_GPU if target.device.type == "cuda" else min(CHECK_ROWS, MOST_ON_CPU // drafter.num_nodes)
    slots = capacity_for(min(max(map(len, prompts)) + max_new_tokens, target.context), drafter) + CACHE_GRANULE
    row = Counter({target.device: drafter.num_nodes * target.vocab_size * 4 * LOGITS})  # bytes on each device
    for model in (target, *drafter.models):
        for place, size in zip(model.kv_devices, kv_bytes(model.kv_shapes, model.dtype.itemsize), strict=True):
            row[place] += slots * size
    return max(least, min(most, *(free_bytes(place) // (2 * size) for place, size in row.items())))


def format_duration(seconds: float) -> str:
    """An estimated duration: whole seconds, or minutes with one decimal from 100 s on."""
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def with_own_seeds(sampling: Sampling, prompts: Sequence[Sequence[int]]) -> list[Sampling]:
    """The sampling parameters of each prompt, with a seed made of the given one and the prompt itself, whatever the
    other prompts are."""
    seeds = [(sampling.seed + zlib.crc32(str(list(prompt)).encode())) % (1 << 62) for prompt in prompts]
    return [replace(sampling, seed=seed) for seed in seeds]


def engine_options(mode: Mode, sampling: Sampling, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Mode and sampling parameters as arguments of ``SpeculativeDecoder.generate``."""
    return {} if mode == "greedy" else {"mode": mode, "sampling": with_own_seeds(sampling, prompts)}


def generate_options(mode: Mode, s: Sampling) -> dict[str, Any]:
    """The same as arguments of ``transformers.generate``."""
    if mode not in ("sample", "mss"):
        return {}
    if s.greedy:
        return {"repetition_penalty": s.repetition_penalty}
    options = {"do_sample": True, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
    return {**options, "min_p": s.min_p or None, "repetition_penalty": s.repetition_penalty}


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter | None],
    prompts: list[list[int]],
    *,
    mode: Mode = "greedy",
    sampling: Sampling | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 1,
    baseline: Baseline = "engine",
    check_lossless: bool = False,
    rounds: int = 1,
    seconds: float | None = None,
    kinds: Sequence[str | None] = (),
    lean: bool | None = None,
    max_draft_nodes: int | None = None,
    one_by_one: bool = False,
    command: str = "",
    keep: Callable[[list[dict[str, Any]]], object] | None = None,
) -> tuple[list[dict[str, Any]], list[list[Generation]]]:
    """Decode all prompts with each drafter and the baselines, in turn, and report how fast and how exact each is.

    Args:
        drafters: by the name in the reports, as :func:`~draftsmith.inference.drafters.load.load_drafter` returns them;
            None decodes without one.
        prompts: token ids.
        sampling: of modes ``sample`` and ``typical``; each prompt has a seed of its own, made of this one's.
        baseline: what speeds are compared with: plain decoding by this engine, by transformers, or ``all``:
            transformers' prompt lookup too, where ``batch_size`` is 1.
        check_lossless: compare the texts with plain decoding; in mode ``mss`` their distribution. Prompts that were not
            timed are decoded in batches of :func:`rows_untimed`.
        rounds: over all prompts, at most; timing ends when every speed-up is known to within 3 %.
        seconds: time limit of timing; all prompts are decoded and checked.
        kinds: the kind of text of each prompt, if it has one. Where there are several kinds, the reports have the field
            ``kinds``, the figures of each; prompts without a kind are those of kind ``other``.
        one_by_one: decode prompts that were not timed ``batch_size`` at a time as well: times in the results are then
            those of this batch size.
        command: for the reports.
        keep: called with the reports, ``lossless`` not yet in them, before texts are compared, which can take longer
            than all the rest.

    All others are those of :class:`~draftsmith.inference.engine.engine.SpeculativeDecoder` and its ``generate``.

    Returns:
        For each drafter its report, with the fields of report.json, and its results.

    Raises:
        ValueError: the mode or the baseline is none of those.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline {baseline!r}: must be one of {', '.join(BASELINES)}")
    sampling, names = sampling or Sampling(), list(drafters)
    decoders = [SpeculativeDecoder(target, drafter, lean=lean) for drafter in drafters.values()]
    wanted = {"none": [], "all": ["engine", "transformers", "prompt_lookup"]}.get(baseline, [baseline])
    methods: dict[str, Method] = {}

    def decode(
        decoder: SpeculativeDecoder, group: list[list[int]], rows: int = batch_size, **more: Any
    ) -> list[Generation]:
        own: dict[str, Any] = engine_options(mode, sampling, group) | {"max_draft_nodes": max_draft_nodes}
        return decoder.generate(group, max_new_tokens, batch_size=rows, **own, **more)

    plain = SpeculativeDecoder(target, lean=lean)
    for name, decoder in zip(names, decoders, strict=True):
        methods[name] = partial(decode, decoder)
    if "engine" in wanted:
        methods["engine"] = partial(decode, plain)
    theirs = generate_options(mode, sampling)
    if "transformers" in wanted:
        methods["transformers"] = transformers_method(target, max_new_tokens, batch_size, **theirs)
    if "prompt_lookup" in wanted and batch_size == 1:
        theirs["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS
        methods["prompt_lookup"] = transformers_method(target, max_new_tokens, **theirs)
    compared = [name for name in wanted if name in methods]
    by_distribution = mode == "mss"
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    # A capture is made for the batch size and cache length of the timed runs.
    warm_up = [prompts[0][:8]]
    if target.device.type == "cuda":
        warm_up = sorted(prompts, key=len)[-batch_size:]

    def settled(timed: dict[str, Timed]) -> bool:
        pairs = itertools.product(names, compared)
        return bool(compared) and all(speedup(timed[name], timed[base]).narrow for name, base in pairs)

    named = [kind or reporting.OTHER for kind in kinds]
    by_kind: dict[str, list[int]] = {}  # kind → prompt numbers
    for number, kind in enumerate(named):
        by_kind.setdefault(kind, []).append(number)
    if len(by_kind) < 2:
        by_kind, named = {}, []
    timed = run_rounds(methods, prompts, rounds, warm_up, batch_size, seconds, settled, named)
    baselines = {name: timed[name].summary() for name in compared}
    if "engine" in compared and "transformers" in compared:
        plain_over_theirs = speedup(timed["engine"], timed["transformers"])
        baselines["engine"] |= speedup_fields("speedup_vs_transformers", plain_over_theirs)
    if target.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(target.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    executions, phases = [decoder.execution for decoder in decoders], list[PhaseTimes]()
    for decoder in decoders:
        # In a separate run, since reading clocks between phases costs time.
        phases.append(PhaseTimes(target.device))
        decode(decoder, prompts[: max(INSTRUMENTED, batch_size)], observe=phases[-1])
    bitwise = {name: decoder.bitwise for name, decoder in zip(names, decoders, strict=True)}

    # The check is over all prompts, those that were not timed included.
    timed_prompts = sorted(timed[names[0]].outputs)
    untimed = sorted({*range(len(prompts))} - {*timed_prompts})
    reference = {**timed["engine"].outputs} if "engine" in timed else {}
    by_text = check_lossless and not by_distribution
    without_reference = [n for n in range(len(prompts)) if n not in reference] if by_text else []
    if untimed or without_reference:
        seconds_left = sum(timed[name].seconds_per_prompt for name in names) * len(untimed)
        seconds_left += _plain_seconds(timed, names) * len(without_reference)
        what = (
            f"{counted(len(untimed), 'prompt')} not timed, and {len(without_reference)} without the drafter to compare "
            f"(up to {max_new_tokens:,} tokens each)"
        )
        console.print(f"decoding {what}: at most about {format_duration(seconds_left)} here", markup=False)

    def decode_untimed(name: str, decoder: SpeculativeDecoder, numbers: list[int]) -> dict[int, Generation]:
        given = sorted(numbers, key=lambda number: -len(prompts[number]))  # those of a batch are of similar lengths
        most = batch_size if one_by_one else rows_untimed(decoder, prompts, max_new_tokens, batch_size)
        rows = max(batch_size, min(most, len(given)))
        with ProgressBar(f"decoding by {name}, {rows} at a time", len(given), console, transient=True) as advance:
            done = [0.0]  # prompts, parts of them included

            def count(share: float) -> None:
                done[0] += share
                advance(round(done[0], 6))

            found = decode(
                decoder,
                [prompts[number] for number in given],
                rows,
                on_tokens=lambda _, new: count(len(new) / max_new_tokens),
                on_end=lambda _, result: count(1 - len(result.tokens) / max_new_tokens),
            )
        return dict(zip(given, found, strict=True))

    # Steps that choose how many nodes they run choose otherwise beside other texts: such texts are checked, but τ is
    # that of the timed batch size.
    with_steps: dict[str, list[int]] = {}  # numbers of the prompts whose steps count
    for name, decoder in zip(names, decoders, strict=True):
        with_steps[name] = [*range(len(prompts))]
        if untimed:
            timed[name].outputs.update(decode_untimed(name, decoder, untimed))
            bitwise[name] &= decoder.bitwise
            if decoder.prunes_nodes and decoder.rows != min(batch_size, len(untimed)):
                with_steps[name] = timed_prompts
    if without_reference:
        reference.update(decode_untimed("the target alone", plain, without_reference))

    reports: list[dict[str, Any]] = []
    outputs: list[list[Generation]] = []
    for name, decoder, execution, times in zip(names, decoders, executions, phases, strict=True):
        results: list[Generation] = [timed[name].outputs[n] for n in range(len(prompts))]
        outputs.append(results)
        bases = {base: timed[base] for base in compared}
        nodes = decoder.drafter.num_nodes
        figures = _figures([results[n] for n in with_steps[name]], decoder.drafter, timed[name], bases)
        accepted = [length for n in timed_prompts for length in results[n].accepted]
        overhead: float | None = None
        if accepted and "engine" in compared:
            overhead = round(sum(accepted) / len(accepted) / speedup(timed[name], timed["engine"]).ratio, 4)
        reports.append(
            {
                "drafter": name,
                "target": target.name,
                "target_fingerprint": target.fingerprint,
                "device": device_name(target.device),
                "dtype": str(target.dtype).removeprefix("torch."),
                "mode": "sample" if mode == "mss" else mode,
                **({"verify": "mss" if by_distribution else "coupled"} if mode in ("sample", "mss") else {}),
                **({"lossy": True} if mode == "typical" else {}),
                **({} if mode == "greedy" else {"sampling": asdict(sampling)}),
                "prompts": len(prompts),
                "counted_prompts": len(with_steps[name]),
                "max_new_tokens": max_new_tokens,
                "batch_size": batch_size,
                "tree_nodes": nodes,
                "execution": execution,
                **figures,
                **timed[name].summary(),
                "seconds": {k: round(v, 4) for k, v in times.seconds.items()},
                "round_seconds": timed[name].by_round(timed[name].seconds),
                "baselines": baselines,
                "overhead": overhead,
                "kinds": {
                    kind: _figures_of_kind(numbers, with_steps[name], results, decoder.drafter, timed[name], bases)
                    for kind, numbers in by_kind.items()
                },
                **paired_fields(prompts, kinds, results, timed[name], bases, with_steps[name]),
                "peak_memory_bytes": peak,
                "lossless": None,
                "versions": versions(),
                "date": now(),
                "command": command,
            }
        )
    if check_lossless:
        if keep:
            keep(reports)
        for name, decoder, results, report in zip(names, decoders, outputs, reports, strict=True):
            console.print(f"checking {name} against plain decoding …", markup=False)
            with ProgressBar("checking", len(prompts), console, transient=True) as advance:
                if by_distribution:
                    lossless = check_distribution(decoder, prompts, sampling, on_prompt=advance)
                else:
                    plain_texts = [reference[n].tokens for n in range(len(prompts))]
                    ours = [result.tokens for result in results]
                    seeded = with_own_seeds(sampling, prompts) if mode == "sample" else None
                    lossless = check_texts(target, prompts, ours, plain_texts, advance, bitwise[name], seeded)
            report["lossless"] = lossless.to_dict() | {"passed": lossless.passed}
    return reports, outputs


def _plain_seconds(timed: Mapping[str, Timed], names: Sequence[str]) -> float:
    """Seconds of a prompt by plain decoding: as timed, or at most, since no step of it takes longer than one with a
    drafter."""
    if "engine" in timed:
        return timed["engine"].seconds_per_prompt

    def at_most(method: Timed) -> float:
        steps = sum(len(result.accepted) for result in method.outputs.values())
        tokens = sum(len(result.tokens) for result in method.outputs.values())
        return method.seconds_per_prompt * tokens / max(1, steps)

    return min(at_most(timed[name]) for name in names)


def _figures(results: Sequence[Generation], drafter: Drafter, timed: Timed, bases: dict[str, Timed]) -> dict[str, Any]:
    """The report's fields about acceptance and speed, of all prompts or of one kind's."""
    figures: dict[str, Any] = reporting.acceptance(results, drafter.max_depth, drafter.sources)
    figures["mean_accepted_length_interval"] = accepted_interval(results)
    figures |= {"timed_prompts": sum(map(len, timed.groups)), "pairs": len(timed.tokens)}
    for base, name in reporting.SPEEDUPS.items():
        figures |= speedup_fields(name, speedup(timed, bases[base]) if base in bases and timed.tokens else None)
    return figures


def _figures_of_kind(
    numbers: Sequence[int],
    counted: Collection[int],
    results: Sequence[Generation],
    drafter: Drafter,
    timed: Timed,
    bases: dict[str, Timed],
) -> dict[str, Any]:
    """The fields of a kind of text within the report: those of the prompts with these numbers, if they are counted."""

    def speed(method: Timed) -> float | None:
        return round(method.tokens_per_second, 2) if method.tokens else None

    part, here = timed.part(numbers), [results[number] for number in numbers if number in counted]
    parts = {base: other.part(numbers) for base, other in bases.items()}
    return {
        "prompts": len(numbers),
        "counted_prompts": len(here),
        "tokens_per_second": speed(part),
        "baselines": {base: {"tokens_per_second": speed(other)} for base, other in parts.items()},
        **_figures(here, drafter, part, parts),
    }
