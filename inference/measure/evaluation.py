"""Decode prompts with drafters and baselines in turn, and report how fast and how exact each drafter is."""

import itertools
import resource
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch

from draftsmith.common.command import counted
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.inference.engine.engine import CACHE_GRANULE, Generation, SpeculativeDecoder
from draftsmith.inference.engine.logprobs import LogprobsMode
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.step import capacity_for
from draftsmith.inference.measure import report as reporting
from draftsmith.inference.measure.lossless import check_distribution, check_texts
from draftsmith.inference.measure.paired import paired_fields
from draftsmith.inference.measure.timing import (
    Method,
    PhaseTimes,
    Timed,
    accepted_interval,
    engine_options,
    format_duration,
    generate_options,
    run_rounds,
    speedup,
    speedup_fields,
    transformers_method,
    with_own_seeds,
)
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.kernels.linear import MOST_ON_CPU
from draftsmith.models.artifact import device_name, now, versions
from draftsmith.models.sizes import kv_bytes
from draftsmith.models.target import Target

Baseline = Literal["none", "engine", "transformers", "all"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
PROMPT_LOOKUP_TOKENS = 10  # as in transformers' documentation
CHECK_ROWS, CHECK_ROWS_ON_GPU = 8, 32  # texts that are decoded at a time where nothing is timed, memory permitting
LOGITS = 8  # copies of a step's logits in float32 that are reckoned with, at most: sampling's
INSTRUMENTED = 4  # prompts of the run that times the phases of a step


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
    logprobs: int | None = None,
    logprobs_mode: LogprobsMode = "raw_logprobs",
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
            at ``batch_size`` 1 its prompt lookup too, and its assisted generation beside a draft model.
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
    decoded = mode, sampling or Sampling(), max_new_tokens, batch_size, lean, max_draft_nodes, logprobs, logprobs_mode
    run = _Evaluation(target, drafters, prompts, *decoded)
    run.time_methods(baseline, rounds, seconds, kinds)
    run.time_phases()
    run.complete(check_lossless and mode != "mss", one_by_one)
    reports = [run.report(number, kinds, command) for number in range(len(drafters))]
    if check_lossless:
        if keep:
            keep(reports)
        for number, report in enumerate(reports):
            report["lossless"] = run.check(number)
    return reports, [run.results(name) for name in run.names]


@dataclass
class _Evaluation:
    """The parts of :func:`evaluate`, in their order."""

    target: Target
    drafters: Mapping[str, Drafter | None]
    prompts: list[list[int]]
    mode: Mode
    sampling: Sampling
    max_new_tokens: int
    batch_size: int
    lean: bool | None
    max_draft_nodes: int | None
    logprobs: int | None
    logprobs_mode: LogprobsMode

    def __post_init__(self) -> None:
        self.names = list(self.drafters)

    def decode(
        self, decoder: SpeculativeDecoder, group: list[list[int]], rows: int | None = None, **more: Any
    ) -> list[Generation]:
        """Decode some prompts, ``rows`` at a time, or as many as are timed."""
        own: dict[str, Any] = engine_options(self.mode, self.sampling, group)
        own["max_draft_nodes"] = self.max_draft_nodes
        own |= {"logprobs": self.logprobs, "logprobs_mode": self.logprobs_mode}
        rows = self.batch_size if rows is None else rows
        return decoder.generate(group, self.max_new_tokens, batch_size=rows, **own, **more)

    def results(self, name: str) -> list[Generation]:
        """Of a drafter, one for each prompt."""
        return [self.timed[name].outputs[number] for number in range(len(self.prompts))]

    def draft_model(self) -> Target | None:
        """The first drafter's that transformers' assisted generation can take, one text at a time."""
        models = (drafter.assistant for drafter in self.drafters.values() if drafter and self.batch_size == 1)
        return next((model for model in models if model), None)

    def time_methods(self, baseline: Baseline, rounds: int, seconds: float | None, kinds: Sequence[str | None]) -> None:
        """Time the drafters and the baselines on the same groups of prompts."""
        target, prompts, batch_size = self.target, self.prompts, self.batch_size
        wanted = {"none": [], "all": [*reporting.SPEEDUPS]}.get(baseline, [baseline])
        self.decoders = [SpeculativeDecoder(target, drafter, lean=self.lean) for drafter in self.drafters.values()]
        self.plain = SpeculativeDecoder(target, lean=self.lean)
        methods: dict[str, Method] = {
            n: partial(self.decode, d) for n, d in zip(self.names, self.decoders, strict=True)
        }
        if "engine" in wanted:
            methods["engine"] = partial(self.decode, self.plain)
        theirs = generate_options(self.mode, self.sampling) if {*wanted} - {"engine"} else {}
        if "transformers" in wanted:
            methods["transformers"] = transformers_method(target, self.max_new_tokens, batch_size, **theirs)
        if "prompt_lookup" in wanted and batch_size == 1:
            theirs["prompt_lookup_num_tokens"] = PROMPT_LOOKUP_TOKENS
            methods["prompt_lookup"] = transformers_method(target, self.max_new_tokens, **theirs)
            del theirs["prompt_lookup_num_tokens"]
        draft_model = self.draft_model()
        if "assisted" in wanted and draft_model:
            theirs["assistant_model"] = draft_model.model
            methods["assisted"] = transformers_method(target, self.max_new_tokens, **theirs)
        self.compared = compared = [name for name in wanted if name in methods]
        on_gpu = target.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(target.device)
        # A capture is made for the batch size and cache length of the timed runs.
        warm_up = sorted(prompts, key=len)[-batch_size:] if on_gpu else [prompts[0][:8]]

        def settled(timed: dict[str, Timed]) -> bool:
            pairs = itertools.product(self.names, compared)
            return bool(compared) and all(speedup(timed[name], timed[base]).narrow for name, base in pairs)

        named = [kind or reporting.OTHER for kind in kinds]
        self.by_kind: dict[str, list[int]] = {}  # kind → prompt numbers
        for number, kind in enumerate(named):
            self.by_kind.setdefault(kind, []).append(number)
        if len(self.by_kind) < 2:
            self.by_kind, named = {}, []
        self.timed = timed = run_rounds(methods, prompts, rounds, warm_up, batch_size, seconds, settled, named)
        self.baselines = {name: timed[name].summary() for name in compared}
        if draft_model and "assisted" in compared:
            self.baselines["assisted"]["draft_model"] = draft_model.name
        if "engine" in compared and "transformers" in compared:
            plain_over_theirs = speedup(timed["engine"], timed["transformers"])
            self.baselines["engine"] |= speedup_fields("speedup_vs_transformers", plain_over_theirs)
        if on_gpu:
            self.peak = torch.cuda.max_memory_allocated(target.device)
        else:
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.timed_prompts = sorted(timed[self.names[0]].outputs)

    def time_phases(self) -> None:
        """Time the phases of steps, in a separate run, since reading clocks between them costs time."""
        self.executions, self.phases = [decoder.execution for decoder in self.decoders], list[PhaseTimes]()
        for decoder in self.decoders:
            self.phases.append(PhaseTimes(self.target.device))
            self.decode(decoder, self.prompts[: max(INSTRUMENTED, self.batch_size)], observe=self.phases[-1])
        self.bitwise = {name: each.bitwise for name, each in zip(self.names, self.decoders, strict=True)}

    def complete(self, by_text: bool, one_by_one: bool) -> None:
        """Decode the prompts that were not timed and, for a comparison ``by_text``, the reference of all prompts."""
        numbers, timed = range(len(self.prompts)), self.timed
        untimed = sorted({*numbers} - {*self.timed_prompts})
        self.reference = {**timed["engine"].outputs} if "engine" in timed else {}
        without_reference = [n for n in numbers if n not in self.reference] if by_text else []
        if untimed or without_reference:
            seconds_left = sum(timed[name].seconds_per_prompt for name in self.names) * len(untimed)
            seconds_left += _plain_seconds(timed, self.names) * len(without_reference)
            what = (
                f"{counted(len(untimed), 'prompt')} not timed, and {len(without_reference)} without the drafter to "
                f"compare (up to {self.max_new_tokens:,} tokens each)"
            )
            console.print(f"decoding {what}: at most about {format_duration(seconds_left)} here", markup=False)
        # Steps that choose how many nodes they run choose otherwise beside other texts: such texts are checked, but τ
        # is that of the timed batch size.
        self.with_steps: dict[str, list[int]] = {}  # numbers of the prompts whose steps count
        for name, decoder in zip(self.names, self.decoders, strict=True):
            self.with_steps[name] = [*numbers]
            if untimed:
                timed[name].outputs.update(self._decode_untimed(name, decoder, untimed, one_by_one))
                self.bitwise[name] &= decoder.bitwise
                if decoder.prunes_nodes and decoder.rows > self.batch_size:
                    self.with_steps[name] = self.timed_prompts
        if without_reference:
            self.reference.update(self._decode_untimed("the target alone", self.plain, without_reference, one_by_one))

    def _decode_untimed(
        self, name: str, decoder: SpeculativeDecoder, numbers: list[int], one_by_one: bool
    ) -> dict[int, Generation]:
        prompts, most_tokens = self.prompts, self.max_new_tokens
        given = sorted(numbers, key=lambda number: -len(prompts[number]))  # those of a batch are of similar lengths
        most = self.batch_size
        if not one_by_one:
            most = rows_untimed(decoder, prompts, most_tokens, self.batch_size)
        rows = max(self.batch_size, min(most, len(given)))
        with ProgressBar(f"decoding by {name}, {rows} at a time", len(given), console, transient=True) as advance:
            done = [0.0]  # prompts, parts of them included

            def count(share: float) -> None:
                done[0] += share
                advance(round(done[0], 6))

            found = self.decode(
                decoder,
                [prompts[number] for number in given],
                rows,
                on_tokens=lambda _, new: count(len(new) / most_tokens),
                on_end=lambda _, result: count(1 - len(result.tokens) / most_tokens),
            )
        return dict(zip(given, found, strict=True))

    def report(self, number: int, kinds: Sequence[str | None], command: str) -> dict[str, Any]:
        """The report of a drafter, by its number; ``lossless`` is not yet in it."""
        target, mode, name = self.target, self.mode, self.names[number]
        timed, counted_prompts, results = self.timed[name], self.with_steps[name], self.results(name)
        drafter = self.decoders[number].drafter
        bases = {base: self.timed[base] for base in self.compared}
        nodes = drafter.limit if isinstance(drafter, MergedDrafter) and mode != "mss" else drafter.num_nodes
        accepted = [length for n in self.timed_prompts for length in results[n].accepted]
        overhead: float | None = None
        if accepted and "engine" in self.compared:
            overhead = round(sum(accepted) / len(accepted) / speedup(timed, self.timed["engine"]).ratio, 4)
        # Those that came later only if they are set, so that reports can be compared with older ones.
        later = ("presence_penalty", "frequency_penalty", "logit_bias")
        in_use = {name: value for name, value in asdict(self.sampling).items() if value or name not in later}
        return {
            "drafter": name,
            "target": target.name,
            "target_fingerprint": target.fingerprint,
            "device": device_name(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "mode": "sample" if mode == "mss" else mode,
            **({"verify": "mss" if mode == "mss" else "coupled"} if mode in ("sample", "mss") else {}),
            **({"lossy": True} if mode == "typical" else {}),
            **({} if mode == "greedy" else {"sampling": in_use}),
            "prompts": len(self.prompts),
            "counted_prompts": len(counted_prompts),
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "tree_nodes": nodes,
            "execution": self.executions[number],
            **_figures([results[n] for n in counted_prompts], drafter, timed, bases),
            **timed.summary(),
            "seconds": {phase: round(each, 4) for phase, each in self.phases[number].seconds.items()},
            "round_seconds": timed.by_round(timed.seconds),
            "baselines": self.baselines,
            "overhead": overhead,
            "kinds": {
                kind: _figures_of_kind(numbers, counted_prompts, results, drafter, timed, bases)
                for kind, numbers in self.by_kind.items()
            },
            **paired_fields(self.prompts, kinds, results, timed, bases, counted_prompts),
            "peak_memory_bytes": self.peak,
            "lossless": None,
            "versions": versions(),
            "date": now(),
            "command": command,
        }

    def check(self, number: int) -> dict[str, Any]:
        """The report's field ``lossless`` of a drafter, by its number."""
        name, prompts, sampling = self.names[number], self.prompts, self.sampling
        console.print(f"checking {name} against plain decoding …", markup=False)
        with ProgressBar("checking", len(prompts), console, transient=True) as advance:
            if self.mode == "mss":
                lossless = check_distribution(self.decoders[number], prompts, sampling, on_prompt=advance)
            else:
                plain_texts = [self.reference[n].tokens for n in range(len(prompts))]
                ours = [result.tokens for result in self.results(name)]
                seeded = with_own_seeds(sampling, prompts) if self.mode == "sample" else None
                bitwise = self.bitwise[name]
                lossless = check_texts(self.target, prompts, ours, plain_texts, advance, bitwise, seeded)
        return lossless.to_dict() | {"passed": lossless.passed}


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
