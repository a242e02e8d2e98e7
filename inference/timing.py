"""Methods of decoding, timed side by side: our engine with and without drafters, and ``transformers.generate``."""

import argparse
import resource
import shlex
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from draftsmith.inference import report as reporting
from draftsmith.inference.engine import Generation, SpeculativeDecoder
from draftsmith.inference.lossless import check_greedy, check_sample
from draftsmith.inference.options import SAMPLING
from draftsmith.inference.sampling import Sampling
from draftsmith.inference.step import Drafter
from draftsmith.inference.terminal import console, progress
from draftsmith.models.artifact import device_name, versions
from draftsmith.models.options import DECODERS
from draftsmith.models.target import Target

PROMPT_LOOKUP_TOKENS = 10  # what transformers' documentation uses


@dataclass
class Timed:
    """The outputs of one method over all prompts, and its seconds and CPU seconds in each round."""

    outputs: list[list[int]]
    seconds: list[float]
    cpu_seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / statistics.median(self.seconds)

    def summary(self) -> dict[str, Any]:
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "seconds": [round(s, 3) for s in self.seconds],
            "cpu_seconds": [round(s, 3) for s in self.cpu_seconds],
        }


Method = Callable[[list[list[int]]], list[list[int]]]


def transformers_method(target: Target, max_new_tokens: int, batch_size: int = 1, **options: Any) -> Method:
    """``transformers.generate`` on the same weights, greedy, with its own attention; trimmed as ours is.

    Args:
        options: of ``generate``. What the target's own generation config asks for (penalties, a temperature) is not
            used, as our engine does not; only its stop ids are.
    """

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
        own = target.model.generation_config
        target.model.generation_config = GenerationConfig()  # one that is passed to generate inherits from the model's
        try:
            with torch.inference_mode():
                out = target.model.generate(
                    ids, attention_mask=mask, max_new_tokens=limit, eos_token_id=stops, pad_token_id=pad,
                    **{"do_sample": False, **options},
                )  # fmt: skip
        finally:
            target.model.generation_config = own
        outputs: list[list[int]] = []
        for prompt, row in zip(prompts, out[:, longest:].tolist(), strict=True):
            row = row[: target.context - len(prompt)]
            end = next((i + 1 for i, token in enumerate(row) if token in target.stop_ids), len(row))
            outputs.append(row[:end])
        return outputs

    return run


def run_rounds(
    methods: dict[str, Method], prompts: list[list[int]], rounds: int, warm_up: list[list[int]]
) -> dict[str, Timed]:
    """Run every method over all prompts ``rounds`` times; they take turns, so that noise falls on all alike."""
    for method in methods.values():
        method(warm_up)  # first calls allocate and tune
    timed = {name: Timed([], [], []) for name in methods}
    console.print(f"decoding {len(prompts)} prompts by {', '.join(methods)}; rounds: {rounds}", markup=False)
    done = 0
    with progress("decoding", rounds * len(methods)) as advance:
        for _ in range(rounds):
            for name, method in methods.items():
                began, cpu = time.perf_counter(), time.process_time()
                outputs = method(prompts)
                timed[name].seconds.append(time.perf_counter() - began)
                timed[name].cpu_seconds.append(time.process_time() - cpu)
                timed[name].outputs = outputs
                done += 1
                advance(done)
    return timed


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The command line's sampling.

    Raises:
        ValueError: a value is out of its range.
    """
    return Sampling(**{name: value for name in SAMPLING if (value := getattr(args, name)) is not None})


def each_with_its_seed(sampling: Sampling, prompts: Sequence[Sequence[int]]) -> list[Sampling]:
    """The sampling of each prompt, whose seed comes of the given one and the prompt: other prompts do not matter."""
    seeds = [(sampling.seed + zlib.crc32(str(list(prompt)).encode())) % (1 << 62) for prompt in prompts]
    return [replace(sampling, seed=seed) for seed in seeds]


def choice(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The arguments of ``SpeculativeDecoder.generate`` that choose tokens as the command line says."""
    if args.mode == "greedy":
        return {}
    return {"mode": args.mode, "sampling": each_with_its_seed(sampling_of(args), prompts)}


def generate_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``transformers.generate`` that choose tokens as the command line says."""
    if args.mode != "sample":
        return {}
    s = sampling_of(args)
    if s.greedy:
        return {"repetition_penalty": s.repetition_penalty}
    options = {"do_sample": True, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
    return {**options, "min_p": s.min_p or None, "repetition_penalty": s.repetition_penalty}


def evaluate(
    names: Sequence[str], target: Target, drafters: Sequence[Drafter | None], prompts: list[list[int]],
    args: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[list[Generation]]]:  # fmt: skip
    """Decode all prompts with each drafter and the baselines; returns the reports and the outputs per drafter."""
    options: dict[str, Any] = {"compiled": args.compile, "lean": DECODERS[args.decoder]}
    decoders = [SpeculativeDecoder(target, drafter, **options) for drafter in drafters]
    wanted = {"none": [], "engine": ["engine"], "transformers": ["transformers"]}.get(args.baseline)
    if wanted is None:
        wanted = ["engine", "transformers", "prompt_lookup"]
    methods: dict[str, Method] = {}
    kept: dict[str, list[Generation]] = {}

    def engine_method(name: str, decoder: SpeculativeDecoder) -> Method:
        def run(prompts: list[list[int]]) -> list[list[int]]:
            kept[name] = decoder.generate(
                prompts, args.max_new_tokens, batch_size=args.batch_size, **choice(args, prompts)
            )
            return [result.tokens for result in kept[name]]

        return run

    for name, decoder in zip(names, decoders, strict=True):
        methods[name] = engine_method(name, decoder)
    if "engine" in wanted or args.check_lossless:
        methods["engine"] = engine_method("engine", SpeculativeDecoder(target, **options))
    if "transformers" in wanted:
        methods["transformers"] = transformers_method(
            target, args.max_new_tokens, args.batch_size, **generate_options(args)
        )
    if "prompt_lookup" in wanted and args.batch_size == 1:
        methods["prompt_lookup"] = transformers_method(
            target, args.max_new_tokens, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS, **generate_options(args)
        )
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    # What is captured or compiled is made for as many rows, and a cache as long, as will be used.
    warm_up = [prompts[0][:8]]
    if target.device.type == "cuda" or args.compile:
        warm_up = sorted(prompts, key=len)[-args.batch_size :]
    timed = run_rounds(methods, prompts, args.repeat, warm_up)
    baselines = {name: timed[name].summary() for name in wanted if name in timed}
    plain = baselines.get("engine", {}).get("tokens_per_second")
    theirs = baselines.get("transformers", {}).get("tokens_per_second")
    if target.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(target.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    reports: list[dict[str, Any]] = []
    outputs: list[list[Generation]] = []
    for name, decoder in zip(names, decoders, strict=True):
        results = kept[name]
        outputs.append(results)
        # Phases are read in a run of their own: reading clocks between them costs time.
        how, some = decoder.how, prompts[: max(16, args.batch_size)]
        decoder.generate(
            some, args.max_new_tokens, batch_size=args.batch_size, instrument=True, **choice(args, some)
        )  # fmt: skip
        lossless = None
        if args.check_lossless:
            console.print(f"checking {name} against plain decoding …", markup=False)
            with progress("checking", len(prompts)) as advance:
                if args.mode == "sample":
                    lossless = check_sample(decoder, prompts, sampling_of(args), on_prompt=advance)
                else:
                    plain_outputs = timed["engine"].outputs
                    lossless = check_greedy(target, prompts, timed[name].outputs, plain_outputs, advance)
        speed = timed[name].tokens_per_second
        counted = reporting.acceptance(results, decoder.drafter.max_depth, decoder.drafter.num_nodes)
        speedup = speed / plain if plain else None
        tau = counted["mean_accepted_length"]
        reports.append(
            {
                "drafter": name,
                "target": target.name,
                "device": device_name(target.device),
                "dtype": str(target.dtype).removeprefix("torch."),
                "mode": args.mode,
                **({"lossy": True} if args.mode == "typical" else {}),
                **({} if args.mode == "greedy" else {"sampling": asdict(sampling_of(args))}),
                "prompts": len(prompts),
                "max_new_tokens": args.max_new_tokens,
                "batch_size": args.batch_size,
                "tree_nodes": decoder.drafter.num_nodes,
                "execution": how,
                **counted,
                **timed[name].summary(),
                "seconds": {k: round(v, 4) for k, v in decoder.seconds.items()},
                "round_seconds": [round(s, 3) for s in timed[name].seconds],
                "baselines": baselines,
                "speedup": round(speedup, 4) if speedup else None,
                "speedup_vs_transformers": round(speed / theirs, 4) if theirs else None,
                "overhead": round(tau / speedup, 4) if speedup and tau else None,
                "peak_memory_bytes": peak,
                "lossless": lossless.to_dict() | {"passed": lossless.passed} if lossless else None,
                "versions": versions(),
                "command": "python inference/decode.py " + shlex.join(sys.argv[1:]),
            }
        )
    return reports, outputs
