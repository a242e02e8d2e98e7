"""Serving under load: requests arrive at random times; latency and tokens/s with speculation and without.

    python benchmarks/serving.py ngram --target models/tiny-lm --prompts data/chats.jsonl --batches 1 8
    python benchmarks/serving.py runs/demo ngram --prompts P.jsonl --batches 1 8 32 --out runs/serving.json
    python benchmarks/serving.py runs/demo --prompts P.jsonl --loads 0.5 0.8 0.9 1.1 --rounds 4 --seconds 60
    python benchmarks/serving.py none --target models/tiny-lm --prompts P.jsonl     # plain decoding alone
    python benchmarks/serving.py none --target T --prompts P.jsonl --batches 8 --url http://localhost:8000/v1

DRAFTER is a name as decode.py takes it; plain decoding is measured in any case. For each number of rows in --batches:

capacity  all requests are there at once: tokens/s with every row occupied, over plain decoding's, and τ, the mean
          accepted length.
loads     requests arrive by a Poisson process, at a share of the rate that plain decoding answers at its capacity. At
          load 1 plain decoding is just busy all the time, whatever the machine. The clock is the real one: where
          nothing has arrived and nothing is being decoded, the command sleeps.

Of each load: latency (from a request's arrival to its last token), time to the first token, time per token after it,
tokens/s, the mean number of occupied rows, and how many requests wait when the last one arrives. «The queue grew»:
these are more than two, and more than a tenth of the measurement's requests. Percentiles are nearest-rank, so that p99
of fewer than 100 requests is the slowest one.

All methods get the same requests, which arrive at the same times; they take turns at each load. A request is one of the
prompts, in random order, and a limit of new tokens, drawn from half of --max-new-tokens to all of it. Intervals of 95 %
are bootstrap intervals over requests, each paired with the same request in plain decoding; those of latencies draw
blocks of neighbouring requests, which wait for each other. Speculation «pays» at a load where the interval of its p90
latency over plain decoding's lies below 1.

Decoding is greedy. Every answer is compared with plain decoding of its prompt in a run of its own. Forward passes of
other numbers of rows round differently, so that tokens of nearly equal logits may swap: what differs is checked as
decode.py --check-lossless does it, and exit code 1 says that an answer differs by more than rounding.

--url adds a running server with OpenAI's protocol (vLLM, SGLang, …) that has the same target: the same requests at the
same times, as many at once as the engine has rows, so that it is measured as we are. Requests state every sampling
parameter, so that none is the server's default. Its τ is not known here; its texts are compared where it returns token
ids, as vLLM does.

The engine reads a chunk of new prompts while the other rows wait, and a step with a drafter computes all rows, occupied
or not: both are in the figures.
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import (
    check_once,
    check_options,
    check_positive,
    chosen,
    list_option,
    machine_options,
    prompts_option,
)
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names, short_name
from draftsmith.models.options import DECODERS, target_arguments, target_options

PLAIN, SERVER = "none", "server"


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="as for decode.py; several are compared")
    prompts_option(parser)
    list_option(parser, "--batches", [1, 8, 32], "ROWS", "requests decoded at once, at most (default 1 8 32)")
    rates = "arrival rates, as shares of plain decoding's capacity (default 0.25 0.5 0.75 1)"
    list_option(parser, "--loads", [0.25, 0.5, 0.75, 1.0], "L", rates, float)
    parser.add_argument(
        "--requests", type=int, metavar="N", help="of a measurement, at most (default: 4 for each row, 32 at least)"
    )
    arrive = "a measurement's requests arrive within so long (default 30); what then waits has as long again"
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help=arrive)
    rounds = "measurements of each method at each load, with other requests and arrivals each time (default 2)"
    parser.add_argument("--rounds", type=int, default=2, metavar="R", help=rounds)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer, at most (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, limits and arrivals (default 0)")
    parser.add_argument("--url", help="also measure the server there, for example http://localhost:8000/v1")
    parser.add_argument("--model", default="", help="the name that the server knows it by (default: its only one)")
    target_options(parser)
    machine_options(parser, device=False)
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: (check_names(args.drafters, args.target), check_prompts(args.prompts)))

from collections.abc import Callable, Mapping, Sequence

import torch

from draftsmith.benchmarks.remote import RemoteServer
from draftsmith.benchmarks.serving_load import (
    Served,
    Workload,
    capacity_figures,
    draw_workload,
    load_figures,
    measure,
    measure_server,
    rounded,
)
from draftsmith.benchmarks.tables import GREY, cell, facts_of, picture, print_table, table_of, write_report
from draftsmith.common.files import write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.data.endpoint import not_sent_line
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.engine import Generation, Request, SpeculativeDecoder
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import lossless
from draftsmith.inference.measure.evaluation import CHECK_ROWS
from draftsmith.inference.measure.timing import format_duration
from draftsmith.models.target import Target


def sentence(name: str, rows: int, verdicts: Mapping[float, str], capacity: Mapping[str, Any]) -> str:
    """Where speculation pays.

    Args:
        verdicts: of :func:`verdict_of`, by load in rising order.
        capacity: of :func:`capacity_figures`.
    """

    def at(verdict: str) -> list[str]:
        return [f"{load:g}" for load, each in verdicts.items() if each == verdict]

    faster, loads = at("faster"), [f"{load:g}" for load in verdicts]
    if not faster:
        pays = "pays at no load measured"
    elif faster == loads:
        pays = f"pays at every load measured, up to {loads[-1]}"
    elif faster == loads[: len(faster)]:
        pays = f"pays up to a load of {faster[-1]}"
    else:
        pays = f"pays at a load of {', '.join(faster)}"
    details = ["p90 latency"]
    details += [f"no clear difference at {', '.join(at('even'))}"] if at("even") else []
    details += [f"slower at {', '.join(at('slower'))}"] if at("slower") else []
    return (
        f"batch {rows}: speculation with {short_name(name)} {pays} ({'; '.join(details)}), and its capacity is "
        f"{cell(capacity['over_plain'], capacity['over_plain_interval'])} × plain decoding's"
    )


# ---- tables and plot


def _times(figures: Mapping[str, float | None], names: Sequence[str], scale: float = 1.0, form: str = ".2f") -> str:
    return " / ".join(cell(value and value * scale, form=form) for value in map(figures.get, names))


def _name(drafter: str) -> str:
    return "plain" if drafter == PLAIN else short_name(drafter)


def print_tables(found: Mapping[str, Any]) -> None:
    """Capacity and loads of each batch size, and its sentences."""
    for batch in found["batches"]:
        table = table_of("method", "tokens/s", "× plain", "τ", "requests")
        for name, row in batch["capacity"].items():
            ratio = "1" if name == PLAIN else cell(row["over_plain"], row["over_plain_interval"])
            speed = f"{row['tokens_per_second']:.1f}"
            table.add_row(_name(name), speed, ratio, cell(row["tau"]), str(row["answered"]))
        print_table(table, f"\nbatch {batch['rows']}: all requests at once")
        table = table_of(
            "load",
            "requests/s",
            "method",
            "latency, s\np50 / p90 / p99",
            "p90\n× plain",
            "first token, s\np50 / p99",
            "per token, ms\np50 / p99",
            "worst gap\nms",
            "tokens/s",
            "rows",
            "waiting\nat the end",
            left=3,
        )
        for part in batch["loads"]:
            for name, row in part["methods"].items():
                ratio = "1"
                if name != PLAIN:
                    ratio = cell(row["latency_p90_over_plain"], row["latency_p90_over_plain_interval"])
                waiting = f"{sum(row['waiting'])} of {row['requests']}"
                left = row["requests"] - row["answered"]
                table.add_row(
                    *((f"{part['load']:g}", f"{part['requests_per_second']:.2f}") if name == PLAIN else ("", "")),
                    _name(name),
                    _times(row["latency"], ("p50", "p90", "p99")),
                    ratio,
                    _times(row["first_token"], ("p50", "p99")),
                    _times(row["per_token"], ("p50", "p99"), 1e3, ".1f"),
                    _times(row, ("worst_gap",), 1e3, ".1f"),
                    f"{row['tokens_per_second']:.1f}",
                    f"{row['rows']:.2f}",
                    waiting + (": the queue grew" if row["grew"] else "") + (f", {left} not answered" if left else ""),
                )
        print_table(table, f"\nbatch {batch['rows']}: Poisson arrivals")
    print()
    print(*(line for batch in found["batches"] for line in batch["sentences"]), sep="\n")
    for name, row in found["texts"].items():
        verdict = "identical to plain decoding"
        if row["different"]:
            found_of = f"{row['near_ties']} near-ties, {row['mismatches']} mismatches"
            verdict = f"{row['different']} differ from plain decoding: {found_of}"
        print(f"{_name(name)}: {row['answers']} answers, {verdict}")


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Plot p50 and p99 latency over the arrival rate, a panel for each batch size."""
    batches = found["batches"]
    colours = {name: f"C{place}" for place, name in enumerate(batches[0]["capacity"], -1)} | {PLAIN: "#5a6270"}
    with picture(path, 2 + 4 * len(batches), 4.2, len(batches), legend_beside=True, sharey=True) as panels:
        from matplotlib import ticker

        for axes, batch in zip(panels, batches, strict=True):
            rates = [part["requests_per_second"] for part in batch["loads"]]
            for name, colour in colours.items():
                rows = [part["methods"][name] for part in batch["loads"]]
                for each, line in (("p50", "-"), ("p99", "--")):
                    heights = [math.nan if row["latency"][each] is None else row["latency"][each] for row in rows]
                    axes.plot(rates, heights, line, color=colour, linewidth=1.6)
                    for rate, height, row in zip(rates, heights, rows, strict=True):
                        fill = "white" if row["grew"] else colour
                        axes.plot([rate], [height], "o", color=colour, markerfacecolor=fill, markersize=5)
            axes.axvline(batch["capacity"][PLAIN]["requests_per_second"], color=GREY, linewidth=1, linestyle=":")
            if any(row["latency"]["p50"] for part in batch["loads"] for row in part["methods"].values()):
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("")
            axes.set_xlim(left=0)
            axes.set(title=f"batch {batch['rows']}", xlabel="requests per second")
        panels[0].set_ylabel("latency, s")
        last = panels[-1]
        for name, colour in colours.items():
            last.plot([], [], "-o", color=colour, label=_name(name))
        last.plot([], [], "-", color="#30343c", label="p50")
        last.plot([], [], "--", color="#30343c", label="p99")
        last.plot([], [], "o", color="#30343c", markerfacecolor="white", label="the queue grew")
        last.plot([], [], ":", color=GREY, label="plain decoding's\ncapacity")


# ---- the command


def check(args: argparse.Namespace) -> None:
    check_options(args, "max_new_tokens", "rounds", "requests", "batches")
    for load in args.loads:
        check_positive("--loads", load, ", a share of plain decoding's capacity")
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: must be at least 2; the first token needs no draft")
    if not 0 <= args.seed < 1 << 62:
        raise ValueError(f"--seed {args.seed}: must be from 0 to 2⁶² − 1")
    check_once("--batches", args.batches)
    check_once("--loads", [f"{load:g}" for load in args.loads])
    check_once("", [short_name(name) for name in args.drafters])


def load_decoders(args: argparse.Namespace) -> tuple[Target, dict[str, SpeculativeDecoder]]:
    """The target and a decoder for each method, plain decoding first. Raises FileNotFoundError, ValueError: as
    :func:`load_drafter`; drafters belong to different targets."""
    lean, options = DECODERS[args.decoder], target_arguments(args)
    names = [name for name in args.drafters if name != PLAIN]
    target: Target | None = None
    drafters: dict[str, Any] = {PLAIN: None}
    for name in names or [PLAIN]:
        before = target
        target, drafters[name] = load_drafter(name, target, target_name=args.target, lean=lean, **options)
        if before is not None and target.fingerprint != before.fingerprint:
            raise ValueError(f"'{name}': its adapter changes the target of the drafters before it; name it first")
    assert target is not None
    return target, {name: SpeculativeDecoder(target, drafter, lean=lean) for name, drafter in drafters.items()}


Method = SpeculativeDecoder | RemoteServer
Rounds = dict[str, list[Served]]  # method → its measurements, one of each round


def measure_batch(
    decoders: Mapping[str, Method],
    target: Target,
    prompts: Sequence[Sequence[int]],
    rows: int,
    args: argparse.Namespace,
    on_done: Callable[[float, str], None],
) -> tuple[Rounds, dict[float, Rounds]]:
    """All measurements with a number of rows: with all requests there at once, and by load.

    Args:
        on_done: called with the number of measurements done so far (parts of one, too), and what is being measured.
    """
    max_length = min(max(map(len, prompts)) + args.max_new_tokens, target.context)
    count = args.requests or max(32, 4 * rows)
    workloads = [
        draw_workload(len(prompts), count, args.max_new_tokens, args.seed + number) for number in range(args.rounds)
    ]
    longest = sorted(prompts, key=len)[-rows:]
    for decoder in decoders.values():  # first calls allocate, tune and capture, with these rows and this capacity
        if isinstance(decoder, RemoteServer):
            decoder.answer(longest[0], min(8, args.max_new_tokens))
            continue
        for some in (longest, longest[:1]):
            decoder.serve([Request(p, min(8, args.max_new_tokens)) for p in some], rows, max_length=max_length)
    order, done = list(decoders), 0

    def take_turns(load: float | None, rate: float) -> Rounds:
        nonlocal order, done
        found: Rounds = {name: [] for name in decoders}
        for workload in workloads:
            if load is None:
                part, stop = Workload(workload.prompts, workload.limits, [0.0] * count), args.seconds
            else:
                part, stop = workload.at(rate, args.seconds), 2 * args.seconds
            for name in order:
                note = f"batch {rows}, {'capacity' if load is None else f'load {load:g}'}, {_name(name)}"
                size = len(part.arrivals)
                decoder = decoders[name]

                def ended(count: int, before: int = done, note: str = note, size: int = size) -> None:
                    on_done(before + count / size, note)

                if isinstance(decoder, RemoteServer):
                    served = measure_server(decoder, prompts, part, rows, stop, ended)
                else:
                    served = measure(decoder, prompts, part, rows, max_length, stop, ended)
                found[name].append(served)
                done += 1
            order = [*order[1:], order[0]]
        return found

    capacity = take_turns(None, math.inf)
    rate = capacity_figures(capacity[PLAIN], capacity[PLAIN], rows)["requests_per_second"]
    return capacity, {load: take_turns(load, load * rate) for load in sorted(args.loads)}


def batch_figures(rows: int, capacity: Rounds, loads: Mapping[float, Rounds]) -> dict[str, Any]:
    figures = {name: capacity_figures(served, capacity[PLAIN], rows) for name, served in capacity.items()}
    rate = figures[PLAIN]["requests_per_second"]
    parts = [
        {
            "load": load,
            "requests_per_second": rounded(load * rate, 6),
            "methods": {name: load_figures(served, methods[PLAIN]) for name, served in methods.items()},
        }
        for load, methods in loads.items()
    ]
    sentences = [
        sentence(name, rows, {part["load"]: part["methods"][name]["verdict"] for part in parts}, figures[name])
        for name in capacity
        if name not in (PLAIN, SERVER)
    ]
    if SERVER in capacity:
        found = figures[SERVER]
        ratio = cell(found["over_plain"], found["over_plain_interval"])
        sentences.append(f"batch {rows}: the server's capacity is {ratio} × that of plain decoding here")
    return {"rows": rows, "capacity": figures, "loads": parts, "sentences": sentences}


def check_texts(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], max_new_tokens: int, measured: Mapping[str, list[Served]]
) -> dict[str, dict[str, int]]:
    """Compare all answers with plain decoding of their prompts.

    Args:
        decoder: plain.

    Returns:
        For each method, how many answers there are and how many differ; tokens that differ by rounding and by more.
    """
    used = sorted({number for all_ in measured.values() for served in all_ for number in served.workload.prompts})
    with ProgressBar("plain decoding, to compare", len(used), console, transient=True) as advance:
        done = itertools.count(1)

        def end(number: int, result: Generation) -> None:
            advance(next(done))

        texts = decoder.generate([prompts[n] for n in used], max_new_tokens, batch_size=CHECK_ROWS, on_end=end)
    expected = {number: text.tokens for number, text in zip(used, texts, strict=True)}
    rows: dict[str, dict[str, int]] = {}
    for name, all_ in measured.items():
        if name == SERVER and not any(any(answer.tokens) for served in all_ for answer in served.answers):
            continue  # it returned no token ids
        answers = different = 0
        wrong: dict[tuple[int, int, tuple[int, ...]], None] = {}  # each text is checked once
        for served in all_:
            for number, limit, answer in zip(
                served.workload.prompts, served.workload.limits, served.answers, strict=False
            ):
                answers += 1
                if answer.tokens != expected[number][:limit]:
                    different += 1
                    wrong[number, limit, tuple(answer.tokens)] = None
        found = lossless.check_texts(
            decoder.target,
            [prompts[number] for number, _, _ in wrong],
            [tokens for _, _, tokens in wrong],
            [expected[number][:limit] for number, limit, _ in wrong],
        )
        rows[name] = {"answers": answers, "different": different}
        rows[name] |= {"near_ties": found.near_ties, "mismatches": found.mismatches}
    return rows


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    given = read_prompts(args.prompts)
    torch.set_num_threads(args.threads)
    target, engines = load_decoders(args)
    decoders: dict[str, Method] = {**engines}
    if args.url:
        decoders[SERVER] = RemoteServer(args.url, args.model)
    prompts = encode_prompts(given, target)
    each = len(decoders) * args.rounds * (1 + len(args.loads))
    total = each * len(args.batches)
    most = (each - len(decoders) * args.rounds / 2) * len(args.batches) * 2 * args.seconds
    console.print(f"{total} measurements, at most about {format_duration(most)} in all", markup=False)
    batches: list[dict[str, Any]] = []
    measured: dict[str, list[Served]] = {name: [] for name in decoders}
    found = facts_of(__file__, target) | {
        "drafters": list(decoders),
        "prompts": len(prompts),
        **chosen(args, "max_new_tokens", "seed", "rounds", "seconds", "threads"),
        "execution": {},
        "planned": len(args.batches),
        "batches": batches,
        "texts": {},
    }
    with ProgressBar("serving", total, console, transient=True) as advance:
        for number, rows in enumerate(args.batches):

            def on_done(done: float, note: str, before: int = number * each) -> None:
                advance(before + done, note)

            capacity, loads = measure_batch(decoders, target, prompts, rows, args, on_done)
            batches.append(batch_figures(rows, capacity, loads))
            found["execution"] = {name: decoder.execution for name, decoder in decoders.items()}
            if args.out:  # so that a command that is killed keeps what it measured
                write_json(args.out, found)
            for rounds in (capacity, *loads.values()):
                for name, served in rounds.items():
                    measured[name] += served
    server = decoders.get(SERVER)
    if isinstance(server, RemoteServer) and (refused := server.server.not_sent):
        found["not_sent"] = sorted(refused)
        console.print(not_sent_line(args.url, refused), style="yellow", markup=False)
    found["texts"] = check_texts(engines[PLAIN], prompts, args.max_new_tokens, measured)
    print_tables(found)
    if args.out:
        write_report(args.out, found, plot)
    if any(row["mismatches"] for row in found["texts"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
