"""Decode with a drafter, and prove that it is exact and faster.

    python inference/decode.py runs/demo --prompt 'def read_config(path):'
    python inference/decode.py runs/demo --prompts runs/demo/prompts.jsonl --baseline all --check-lossless --report DIR
    python inference/decode.py none --target models/tiny-lm --interactive
    python inference/decode.py runs/demo --prompt 'import ' --mode sample --temperature 0.8 --top-p 0.95 --seed 1
    python inference/decode.py runs/a runs/b --prompts P.jsonl --baseline engine        # two drafters, one table

DRAFTER is a run folder, a Hub id, or `none` (plain decoding). Exit codes: 0 done, 1 failed (also: output that is not
the target's own under --check-lossless), 2 wrong usage or bad input.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from draftsmith.inference import report as reporting
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine import Generation, SpeculativeDecoder
from draftsmith.inference.lossless import check_greedy, check_sample
from draftsmith.inference.sampling import Sampling
from draftsmith.inference.step import Drafter
from draftsmith.inference.tree import read_tree
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import device_name, read_drafter, versions, write_json
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target, load_target, target_arguments, target_options
from draftsmith.train.command import available_cores, run_command

PROMPT_LOOKUP_TOKENS = 10  # what transformers' documentation uses
console = Console(highlight=False, emoji=False)  # ":x:" in a text is text


@dataclass(frozen=True)
class Prompt:
    """A prompt as text, or as chat messages for the target's template."""

    text: str
    messages: list[dict[str, str]] | None = None

    def encode(self, target: Target) -> list[int]:
        tokenizer = target.tokenizer
        assert tokenizer is not None
        if self.messages is None:
            return list(tokenizer(self.text, verbose=False)["input_ids"])
        if not tokenizer.chat_template:
            raise ValueError(f"target '{target.name}' has no chat template; give plain prompts")
        rendered = tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(str(rendered), add_special_tokens=False, verbose=False)["input_ids"])


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSONL: ``{"prompt": text}``, ``{"messages": […]}`` without the assistant's last words if it had them
    (they are what is asked for), or Spec-Bench's ``{"turns": [text, …]}``, of which the first turn is taken.

    Raises:
        FileNotFoundError, ValueError: no such file, a line that is none of these (its number is named), or no line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() also cuts at U+2028 inside a string
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such prompts file") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a text file; prompts are JSON lines in UTF-8") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if "prompt" in entry:
                prompts.append(Prompt(str(entry["prompt"])))
            elif "messages" in entry:
                chat = [{"role": str(m["role"]), "content": str(m["content"])} for m in entry["messages"]]
                asked = chat[:-1] if chat[-1]["role"] == "assistant" else chat
                if not asked:
                    raise ValueError("nobody asks")
                prompts.append(Prompt("", asked))
            else:
                prompts.append(Prompt("", [{"role": "user", "content": str(entry["turns"][0])}]))
        except (ValueError, KeyError, IndexError, TypeError):
            raise ValueError(f'{path}:{number}: not a prompt; write {{"prompt": "…"}} on each line') from None
    if not prompts:
        raise ValueError(f'{path}: holds no prompt; write {{"prompt": "…"}} on each line')
    return prompts


def load_drafter(
    name: str, target: Target | None = None, *, target_name: str | None = None, tree: str = "auto", **options: Any
) -> tuple[Target, Drafter | None]:
    """A drafter by name and the target it belongs to, loaded here unless given.

    Args:
        target_name: of the target, if it is not where the drafter's config says.
        tree: a file, or ``auto``: the drafter's own.
        options: of :func:`load_target`.

    Raises:
        FileNotFoundError, ValueError: one of them is missing, damaged, or not for the other.
    """
    if name == "none":
        if target is None and not target_name:
            raise ValueError("'none' is no drafter and knows no target: pass --target")
        return target or load_target(str(target_name), **options), None
    folder, config, weights = read_drafter(name)
    if config["drafter_type"] != "medusa":
        raise ValueError(
            f"{folder}: drafter_type '{config['drafter_type']}' is not known to this version; known: medusa"
        )
    target = target or load_target(target_name or config["target"]["name_or_path"], **options)
    target = target_of(folder, config, target)
    path = folder / "tree.json" if tree == "auto" else Path(tree)
    if tree == "auto" and not path.exists():
        raise FileNotFoundError(f"{folder}: has no tree.json yet; run: python inference/calibrate.py {name}")
    return target, MedusaDrafter(MedusaHeads.from_artifact(config, weights, str(folder)), read_tree(path), target)


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
    """``transformers.generate`` on the same weights, greedy, with its own attention; trimmed as ours is."""

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
        with torch.inference_mode():
            out = target.model.generate(
                ids, attention_mask=mask, max_new_tokens=limit, eos_token_id=stops, pad_token_id=pad,
                **{"do_sample": False, **options},
            )  # fmt: skip
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
    work = [(r, name) for r in range(rounds) for name in methods]
    for _, name in track(work, "decoding", console=console, transient=True, disable=not console.is_terminal):
        if not console.is_terminal:
            console.print(f"  decoding: {name}")
        began, cpu = time.perf_counter(), time.process_time()
        outputs = methods[name](prompts)
        timed[name].seconds.append(time.perf_counter() - began)
        timed[name].cpu_seconds.append(time.process_time() - cpu)
        timed[name].outputs = outputs
    return timed


SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "epsilon")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The command line's sampling.

    Raises:
        ValueError: a value is out of its range.
    """
    return Sampling(**{name: value for name in SAMPLING if (value := getattr(args, name)) is not None})


def choice(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How the engine chooses tokens for these prompts, each with a seed of its own: of --seed and the prompt."""
    if args.mode == "greedy":
        return {}
    sampling = sampling_of(args)
    seeds = [(sampling.seed + zlib.crc32(str(list(prompt)).encode())) % (1 << 62) for prompt in prompts]
    return {"mode": args.mode, "sampling": [replace(sampling, seed=seed) for seed in seeds]}


def theirs_of(args: argparse.Namespace) -> dict[str, Any]:
    """The same for ``transformers.generate``."""
    s = sampling_of(args)
    if args.mode != "sample" or s.temperature == 0:
        return {}
    options = {"do_sample": True, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
    return {**options, "min_p": s.min_p or None, "repetition_penalty": s.repetition_penalty}


def evaluate(
    names: Sequence[str], target: Target, drafters: Sequence[Drafter | None], prompts: list[list[int]],
    args: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[list[Generation]]]:  # fmt: skip
    """Decode all prompts with each drafter and the baselines; returns the reports and the outputs per drafter."""
    decoders = [SpeculativeDecoder(target, drafter, compiled=args.compile) for drafter in drafters]
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
        methods["engine"] = engine_method("engine", SpeculativeDecoder(target, compiled=args.compile))
    if "transformers" in wanted:
        methods["transformers"] = transformers_method(target, args.max_new_tokens, args.batch_size, **theirs_of(args))
    if "prompt_lookup" in wanted and args.batch_size == 1:
        methods["prompt_lookup"] = transformers_method(
            target, args.max_new_tokens, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS, **theirs_of(args)
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
            console.print(f"checking {name} against plain decoding …")
            if args.mode == "sample":
                lossless = check_sample(decoder, prompts, sampling_of(args))
            else:
                lossless = check_greedy(target, prompts, timed[name].outputs, timed["engine"].outputs)
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


def stream(decoder: SpeculativeDecoder, prompt: list[int], args: argparse.Namespace) -> None:
    """Decode one prompt and print it as it comes: green is drafted and accepted, plain is the target's own."""
    tokenizer = decoder.target.tokenizer
    shown: list[int] = []
    text = ""

    def show(row: int, new: list[int]) -> None:
        nonlocal text
        for place, token in enumerate(new, 1):
            shown.append(token)
            now = tokenizer.decode(shown)  # type: ignore[union-attr]
            if not now.endswith("�"):
                console.print(
                    now[len(text) :], end="", style="green" if place < len(new) else "", markup=False, soft_wrap=True
                )
                text = now

    began = time.perf_counter()
    (result,) = decoder.generate([prompt], args.max_new_tokens, on_tokens=show, **choice(args, [prompt]))
    seconds = time.perf_counter() - began
    rest = tokenizer.decode(shown)[len(text) :]  # type: ignore[union-attr]
    console.print(rest, end="", markup=False, soft_wrap=True)  # bytes that never became a character
    tau = sum(result.accepted) / len(result.accepted) if result.accepted else 1.0
    console.print(
        f"\n[dim]{len(result.tokens)} tokens in {seconds:.2f} s ({len(result.tokens) / seconds:.0f}/s), "
        f"{len(result.accepted)} steps, τ {tau:.2f}, ended by {result.finish_reason}[/dim]"
    )


def interact(decoder: SpeculativeDecoder, args: argparse.Namespace) -> None:
    """Prompts from the terminal until an empty line or end of file."""
    console.print("[dim]Type a prompt; an empty line ends. Green: drafted and accepted; plain: the target's own.[/dim]")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line:
            return
        stream(decoder, Prompt(line).encode(decoder.target), args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="a run folder, a Hub id, or 'none'")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", help="one prompt; the text is printed as it is decoded")
    what.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help='lines of {"prompt": …}, {"messages": …} or {"turns": …}'
    )
    what.add_argument("--interactive", action="store_true", help="prompts from the terminal")
    parser.add_argument(
        "--mode", choices=["greedy", "sample", "typical"], default="greedy",
        help="greedy: the target's greedy text, token by token; sample: the law of sampling from the target; "
        "typical: Medusa's criterion, lossy",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, help="default 1; for --mode sample and typical, as the next ones")
    parser.add_argument("--top-k", type=int, help="only the K most likely tokens (default: all)")
    parser.add_argument("--top-p", type=float, help="only the most likely tokens that make up this share (default 1)")
    parser.add_argument("--min-p", type=float, help="only tokens this likely beside the likeliest (default 0)")
    parser.add_argument("--repetition-penalty", type=float, help="above 1: what the text holds becomes less likely")
    parser.add_argument("--epsilon", type=float, help="threshold of --mode typical: higher accepts less (default 0.09)")
    parser.add_argument("--seed", type=int, help="the same seed, the same text (default 0)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument(
        "--tree", default="auto", metavar="FILE|auto", help="a tree file; auto: the drafter's own tree.json"
    )
    parser.add_argument("--baseline", choices=["none", "engine", "transformers", "all"], default="engine")
    parser.add_argument("--check-lossless", action="store_true", help="compare every token with plain decoding")
    parser.add_argument("--repeat", type=int, default=1, help="rounds over all prompts; the median counts")
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print N of the texts, drafted tokens coloured"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="write report.json and report.png there")
    target_options(parser)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the target: slow to begin, then faster (also plain decoding)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads; all cores if left out")
    args = parser.parse_args()
    for option in ("max_new_tokens", "batch_size", "repeat"):
        if getattr(args, option) < 1:
            raise ValueError(f"--{option.replace('_', '-')} {getattr(args, option)}: must be at least 1")
    if args.compile and args.device == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise ValueError("--compile on a CPU needs a C++ compiler (g++ or clang++), and there is none on the path")
    if args.compile and args.device_map != "none":
        raise ValueError("--compile needs the whole target on one device; leave out --device-map")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads {args.threads}: must be at least 1")
    if len({Path(name).name for name in args.drafters}) < len(args.drafters):
        raise ValueError("two of the drafters have the same name, and so would their reports")
    given_sampling = [name for name in SAMPLING if getattr(args, name) is not None]
    if args.mode == "greedy" and given_sampling:
        raise ValueError(f"--{given_sampling[0].replace('_', '-')} needs --mode sample (or typical)")
    if args.mode != "typical" and args.epsilon is not None:
        raise ValueError("--epsilon is the threshold of --mode typical")
    if args.mode == "typical" and args.check_lossless:
        raise ValueError("--mode typical is lossy by design, so there is nothing for --check-lossless to check")
    sampling_of(args)  # its ranges, before anything is loaded
    torch.set_num_threads(args.threads or available_cores())
    if args.report:
        args.report.mkdir(parents=True, exist_ok=True)
        if not os.access(args.report, os.W_OK):
            raise ValueError(f"--report {args.report}: cannot write here; choose another folder")
    given = read_prompts(args.prompts) if args.prompts else []
    if args.prompt is not None and (args.report or args.check_lossless):  # to be measured, not only read
        given, args.show = [Prompt(str(args.prompt))], max(args.show, 1)
    elif args.interactive and (args.report or args.check_lossless):
        raise ValueError("--interactive measures nothing; leave out --report and --check-lossless, or use --prompts")

    target: Target | None = None
    drafters: list[Drafter | None] = []
    for name in args.drafters:
        target, drafter = load_drafter(name, target, target_name=args.target, tree=args.tree, **target_arguments(args))
        drafters.append(drafter)
    assert target is not None
    if not given:
        if len(drafters) > 1:
            raise ValueError("--prompt and --interactive take one DRAFTER; compare several with --prompts")
        decoder = SpeculativeDecoder(target, drafters[0], compiled=args.compile)
        if args.interactive:
            interact(decoder, args)
        else:
            stream(decoder, Prompt(str(args.prompt)).encode(target), args)
        return

    prompts = [prompt.encode(target) for prompt in given]
    for number, prompt in enumerate(prompts, 1):
        if not 0 < len(prompt) < target.context:
            raise ValueError(
                f"{args.prompts or '--prompt'}: prompt {number} has {len(prompt)} tokens; give it at least one, and at "
                f"most {target.context - 1}: the target's context of {target.context} holds prompt and answer"
            )
    reports, outputs = evaluate(args.drafters, target, drafters, prompts, args)
    for number in range(min(args.show, len(prompts))):
        console.rule(f"prompt {number + 1}: [green]green[/green] was drafted and accepted, plain is the target's own")
        console.print(target.tokenizer.decode(prompts[number][-48:]), style="dim", markup=False, end="")  # type: ignore[union-attr]
        console.print(reporting.coloured(target.tokenizer, outputs[0][number]))
    console.print()
    reporting.print_table(reports, console)
    for report in reports:
        if args.report:
            folder = args.report if len(reports) == 1 else args.report / Path(report["drafter"]).name
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "report.json", report)
            reporting.plot(report, folder / "report.png")
            console.print(f"wrote {folder / 'report.json'} and {folder / 'report.png'}")
    if any(report["lossless"] and not report["lossless"]["passed"] for report in reports):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
