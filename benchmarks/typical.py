"""What typical acceptance gains, and what it costs in quality: a sweep of its threshold ε (arXiv 2401.10774 §2.3.1).

    python benchmarks/typical.py runs/demo --prompts runs/demo/prompts.jsonl
    python benchmarks/typical.py runs/demo --prompts P.jsonl --temperature 0.7 --epsilons 0.01 0.09 0.25 --out DIR
    python benchmarks/typical.py runs/demo --prompts P.jsonl --epsilons 0.09 --deltas 0.1 0.3 0.9    # δ apart from ε

Typical acceptance is lossy; greedy decoding and exact sampling with the same drafter, listed beside each ε, are not.
Quality is measured by the target: nats per token, −log p of each token under the target's distribution at the given
temperature. Exact sampling gives the value of the target's own texts. A method with a higher value has lost quality;
one with a much lower value writes more repetitive texts, as greedy decoding does (see the repeated 4-grams).
Intervals are 95 % bootstrap intervals over prompts; differences of nats are to exact sampling on the same prompts.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import check_once, chosen, list_option, prompts_option
from draftsmith.common.command import CommandLine, available_cores, before_imports, run_command
from draftsmith.inference.commands.options import check_counts
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names
from draftsmith.models.options import DECODERS, target_arguments, target_options

EPSILONS = (0.01, 0.03, 0.06, 0.09, 0.13, 0.17, 0.21, 0.25)


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", metavar="DRAFTER", help="a drafter folder or Hub id")
    prompts_option(parser)
    higher = "thresholds to compare: higher accepts less (%(default)s)"
    list_option(parser, "--epsilons", [*EPSILONS], "ε", higher, float)
    list_option(parser, "--deltas", None, "δ", "second threshold, each with every ε (default: √ε)", float)
    parser.add_argument("--temperature", type=float, default=0.7, help="the paper's: 0.7")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded at a time (%(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="rounds over all prompts; the median counts")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (%(default)s)")
    parser.add_argument(
        "--tree", default="auto", metavar="FILE|auto", help="a tree file; auto: the drafter's own tree.json"
    )
    parser.add_argument(
        "--all-nodes", action="store_true", help="verify whole trees: τ, and typical texts, then do not depend on costs"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write typical.json and typical.png there")
    target_options(parser)
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: (check_names([args.drafter], args.target), check_prompts(args.prompts)))

import torch
from torch import Tensor

from draftsmith.benchmarks.common import difference_of, steps_of, with_interval
from draftsmith.benchmarks.tables import cell, facts_of, picture, print_table, table_of, write_report
from draftsmith.common.files import check_folder
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import report as reporting
from draftsmith.inference.measure.timing import accepted_interval, with_own_seeds
from draftsmith.inference.verify.sampling import MIN_TEMPERATURE, Sampling
from draftsmith.inference.verify.verify import Mode
from draftsmith.models.target import Target


@torch.inference_mode()
def nats_by_prompt(
    target: Target, prompts: Sequence[Sequence[int]], results: Sequence[Generation], temperature: float
) -> Tensor:
    """``[2, P]`` float64: by prompt, Σ −log p of its new tokens under the target's distribution at a temperature, and
    their number."""
    sums: list[list[float]] = []
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([[*prompt, *result.tokens]], device=target.device)
        logits = target.logits(target.hidden(ids[:, :-1])[0, len(prompt) - 1 :]).float() / temperature
        log_p = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
        sums.append([-float(log_p.sum()), len(result.tokens)])
    return torch.tensor(sums, dtype=torch.float64).t()


def nats_per_token(
    target: Target, prompts: Sequence[Sequence[int]], results: Sequence[Generation], temperature: float
) -> float:
    """The mean over all tokens of :func:`nats_by_prompt`."""
    nats, count = nats_by_prompt(target, prompts, results, temperature).sum(1).tolist()
    return nats / count


def sweep(decoder: SpeculativeDecoder, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode all prompts by every method, ``--repeat`` times in turn.

    Returns:
        For each method its ε, tokens/s (median of the rounds), τ, nats per token and rate of repeated 4-grams.
    """
    target, drafter, lean = decoder.target, decoder.drafter, decoder.lean
    temperature, seed, options = args.temperature, args.seed, {"batch_size": args.batch_size}
    greedy, sampled = (SpeculativeDecoder(target, drafter, lean=lean) for _ in range(2))  # a decoder for each mode
    thresholds = itertools.product(args.epsilons, args.deltas or [None])
    typical = [Sampling(temperature, epsilon=epsilon, delta=delta, seed=seed) for epsilon, delta in thresholds]
    methods: list[tuple[str, SpeculativeDecoder, Mode, Sampling]] = [
        ("plain sampling", SpeculativeDecoder(target, lean=lean), "sample", Sampling(temperature, seed=seed)),
        ("greedy", greedy, "greedy", Sampling(temperature, seed=seed)),
        ("sampling", sampled, "sample", Sampling(temperature, seed=seed)),
        *((name_of(one), decoder, "typical", one) for one in typical),
    ]  # type: ignore[list-item]
    seconds: dict[str, list[float]] = {name: [] for name, *_ in methods}
    results: dict[str, list[Generation]] = {}
    longest = sorted(prompts, key=len)[-args.batch_size :]
    for _, engine, mode, _ in methods[:4]:  # first calls allocate; on a GPU they compile and capture
        engine.generate(longest, args.max_new_tokens, mode=mode, sampling=Sampling(temperature), **options)
    with ProgressBar("decoding", args.repeat * len(methods), console, transient=True) as advance:
        for done, (name, engine, mode, sampling) in enumerate(methods * args.repeat, 1):
            seeded = with_own_seeds(sampling, prompts)
            began = time.perf_counter()
            results[name] = engine.generate(prompts, args.max_new_tokens, mode=mode, sampling=seeded, **options)
            seconds[name].append(time.perf_counter() - began)
            advance(done)
    rows: list[dict[str, Any]] = []
    nats = {name: nats_by_prompt(target, prompts, results[name], temperature) for name, *_ in methods}
    for name, engine, mode, sampling in methods:
        counted = reporting.acceptance(results[name], engine.drafter.max_depth)
        rows.append(
            {
                "name": name,
                "mode": mode,
                "lossy": mode == "typical",
                "epsilon": sampling.epsilon if mode == "typical" else None,
                "delta": sampling.delta if mode == "typical" else None,
                "tokens_per_second": round(counted["new_tokens"] / statistics.median(seconds[name]), 2),
                "mean_accepted_length": counted["mean_accepted_length"],
                "mean_accepted_length_interval": accepted_interval(results[name]),
                "accepted_by_prompt": steps_of(results[name]),
                **with_interval(nats[name], name="nats_per_token", interval="nats_per_token_interval"),
                **with_interval(
                    torch.cat((nats[name], nats["sampling"])), difference_of, "nats_difference", "nats_interval"
                ),
                "repeated_4gram_rate": counted["repetition"]["repeated_4gram_rate"],
                "new_tokens": counted["new_tokens"],
            }
        )
    for row in rows:
        row["speedup"] = round(row["tokens_per_second"] / rows[0]["tokens_per_second"], 4)
    return rows


def name_of(typical: Sampling) -> str:
    delta = "" if typical.delta is None else f", δ = {typical.delta:g}"
    return f"typical ε = {typical.epsilon:g}{delta}"


def plot(facts: dict[str, Any], path: Path) -> None:
    """Plot τ, 1 of answers of one token, against nats per token, one point for each method."""
    at = {row["name"]: (row["nats_per_token"], row["mean_accepted_length"] or 1) for row in facts["methods"]}
    typical = {row["name"].removeprefix("typical ε = "): at[row["name"]] for row in facts["methods"] if row["lossy"]}
    with picture(path, 7, 4.5) as (axes,):
        label = "typical acceptance (lossy), by ε"
        axes.plot(*zip(*typical.values(), strict=True), "o-", color="tab:orange", label=label)
        for epsilon, place in typical.items():
            axes.annotate(epsilon, place, (4, 4), textcoords="offset points", fontsize=8)
        for name, marker, colour in (("greedy", "s", "tab:green"), ("sampling", "D", "tab:blue")):
            axes.plot(*at[name], marker, color=colour, label=f"{name} (exact)")
        axes.set_xlabel("nats per token of the text, by the target's own distribution")
        axes.set_ylabel("mean accepted length τ")
        axes.legend()


def main() -> None:
    args = parser().parse_intermixed_args()
    if Sampling(args.temperature).greedy:
        raise ValueError(
            f"--temperature {args.temperature}: must be at least {MIN_TEMPERATURE:g}; below, every mode is greedy"
        )
    check_counts(max_new_tokens=args.max_new_tokens, batch_size=args.batch_size, repeat=args.repeat)
    for epsilon, delta in itertools.product(args.epsilons, args.deltas or [None]):
        Sampling(args.temperature, epsilon=epsilon, delta=delta, seed=args.seed)
    check_once("--epsilons", args.epsilons)
    check_once("--deltas", args.deltas or [])
    if args.drafter == "none":
        raise ValueError("'none' drafts nothing; give a drafter")
    check_folder("--out", args.out, {"typical.json": "command"})
    torch.set_num_threads(available_cores())
    given = read_prompts(args.prompts)
    options = {"all_nodes": args.all_nodes, **target_arguments(args)}
    target, drafter = load_drafter(args.drafter, target_name=args.target, tree=args.tree, **options)
    decoder = SpeculativeDecoder(target, drafter, lean=DECODERS[args.decoder])
    prompts = encode_prompts(given, target)
    rows = sweep(decoder, prompts, args)
    table = table_of("method", "tokens/s", "× plain", "τ", "nats/token", "less\nsampling's", "repeated\n4-grams")
    for row in rows:
        name, speed = row["name"] + (" (lossy)" if row["lossy"] else ""), f"{row['tokens_per_second']:.1f}"
        tau = cell(row["mean_accepted_length"] or 1, row["mean_accepted_length_interval"])
        nats, repeated = f"{row['nats_per_token']:.3f}", f"{row['repeated_4gram_rate']:.0%}"
        less = cell(row["nats_difference"], row["nats_interval"], "+.3f", " to ")
        table.add_row(name, speed, cell(row["speedup"]), tau, nats, less, repeated)
    print_table(table, f"{target.name} · {args.drafter} · temperature {args.temperature:g}")
    if args.out:
        facts = facts_of(__file__, target.device) | {
            "target": target.name,
            **chosen(args, "drafter", "temperature", "all_nodes"),
        }
        facts |= {"methods": rows, "prompts": len(prompts), "execution": decoder.execution}
        write_report(args.out / "typical.json", facts, plot)


if __name__ == "__main__":
    run_command(main)
