"""Reports: the figures of a run as JSON (the field names are stable), a table, coloured text and a plot."""

import itertools
import statistics
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftsmith.common.command import counted
from draftsmith.common.files import replacing, write_json
from draftsmith.inference.commands.terminal import Answer, legend, separate_text, shows_colours
from draftsmith.inference.drafters.names import short_name
from draftsmith.inference.engine.engine import Generation
from draftsmith.inference.engine.text import decode_text, visible
from draftsmith.inference.measure.paired import MIN_PAIRS
from draftsmith.models.target import Target

# baseline → the report's field of the speed-up over it; its interval is in NAME_interval
SPEEDUPS = {
    "engine": "speedup",
    "transformers": "speedup_vs_transformers",
    "prompt_lookup": "speedup_vs_prompt_lookup",
    "assisted": "speedup_vs_assisted",
}
LABELS = {
    "engine": "plain, our engine",
    "transformers": "transformers.generate",
    "prompt_lookup": "its prompt lookup",
    "assisted": "its assisted generation",
}
COLUMNS = {
    "engine": "× plain",
    "transformers": "× trans-\nformers",
    "prompt_lookup": "× prompt\nlookup",
    "assisted": "× as-\nsisted",
}
WITHOUT_DRAFTS = ("engine", "transformers")  # baselines that commit one token a step
TABLE_WIDTH = 80  # columns of a terminal that holds the whole table
OTHER = "other"  # the kind of prompts without one, where others have one
REPEAT = 8  # length of the repeated n-gram at which ``repetition`` ends its count
BAND = 64  # tokens of an answer, for which ``by_position`` gives τ
CUT_LENGTHS = 7  # draft lengths at which drafts could end, for which τ is given
SHOWN_DEPTHS = 6  # of the acceptance of each kind of text, in the table
PLACES = {"ylim": (0, 100), "xlabel": "drafted position", "ylabel": "% of steps that accept it"}  # an axis of plots
LONGEST_PERIOD, PERIODS, LOOP_TOKENS = 64, 3, 32  # of a loop: at most; at least; at least


def first_repeat(tokens: Sequence[int]) -> int:
    """The number of tokens before the end of the first repeated 8-gram; all of them if there is none."""
    seen: set[tuple[int, ...]] = set()
    for end in range(REPEAT, len(tokens) + 1):
        gram = tuple(tokens[end - REPEAT : end])
        if gram in seen:
            return end - 1
        seen.add(gram)
    return len(tokens)


def loop_begins(tokens: Sequence[int]) -> int:
    """The number of tokens before the first loop, all of them if there is none.

    A loop is a stretch of at least 32 tokens that repeats a period of at most 64 tokens, at least three times in a row.
    Its first period is new text: the loop begins with the second one.
    """
    begins = len(tokens)
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // PERIODS) + 1):
        needed = max(PERIODS * period, LOOP_TOKENS) - period  # tokens in a row that equal those one period before
        equal = 0
        for place in range(period, len(tokens)):
            equal = equal + 1 if tokens[place] == tokens[place - period] else 0
            if equal == needed:
                begins = min(begins, place + 1 - needed)
                break
    return begins


def _accepted_before(results: Sequence[Generation], ends: Sequence[int]) -> tuple[int, int]:
    """Committed tokens, and number, of the steps that end within the first ``ends`` tokens of each answer."""
    tokens = steps = 0
    for result, end in zip(results, ends, strict=True):
        reached = 1  # the prefill's token
        for length in result.accepted:
            reached += length
            if reached > end:
                break
            tokens, steps = tokens + length, steps + 1
    return tokens, steps


def by_position(results: Sequence[Generation]) -> dict[str, Any]:
    """The number of steps, and τ, in each band of 64 tokens of the answers; a step counts where its first token lies.
    τ is None in a band without a step."""
    tokens, steps = Counter[int](), Counter[int]()
    for result in results:
        reached = 1  # the prefill's token
        for length in result.accepted:
            tokens[reached // BAND] += length
            steps[reached // BAND] += 1
            reached += length
    bands = range(max(steps, default=-1) + 1)
    return {
        "band_tokens": BAND,
        "steps": [steps[band] for band in bands],
        "mean_accepted_length": [round(tokens[band] / steps[band], 4) if steps[band] else None for band in bands],
    }


def repeated_rate(tokens: Sequence[int], n: int = 4) -> tuple[int, int]:
    """The number of n-grams that occurred before in the same text, and of all n-grams."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(grams) - len(set(grams)), len(grams)


def acceptance(results: Sequence[Generation], max_depth: int, sources: Sequence[str] = ()) -> dict[str, Any]:
    """The report's fields about acceptance. τ counts the bonus token, not the prefill's; that of plain decoding is 1.

    ``loops`` has the number of tokens before the first loop of an answer (:func:`loop_begins`), and τ over the steps
    that end before it. ``repetition`` has τ up to the first repeated 8-gram, which need not begin a loop.
    ``mean_accepted_length_by_draft_length`` has τ if drafts ended after k = 1, 2, … 7 tokens: of each step the first k
    accepted tokens count, and the target's own. ``sources``: of a drafter that counts its nodes by source.
    """
    lengths = [length for result in results for length in result.accepted]
    steps = len(lengths)
    per_position = [sum(length > place for length in lengths) for place in range(1, max_depth + 1)]
    unrepeated, unrepeated_steps = _accepted_before(results, [first_repeat(result.tokens) for result in results])
    ends = [loop_begins(result.tokens) for result in results]
    before_loop, steps_before_loop = _accepted_before(results, ends)
    repeats = Counter[str]()
    for result in results:
        again, grams = repeated_rate(result.tokens)
        repeats.update(again=again, grams=grams)
    counted = [result for result in results if result.proposed]
    by_source = {
        name: {
            "proposed_nodes": sum(result.proposed[number] for result in counted),
            "accepted_tokens": sum(result.accepted_from[number] for result in counted),
        }
        for number, name in enumerate(sources)
    }
    return {
        "new_tokens": sum(len(result.tokens) for result in results),
        "steps": steps,
        "mean_accepted_length": round(sum(lengths) / steps, 4) if steps else None,
        "acceptance_per_position": [round(count / steps, 4) for count in per_position] if steps else [],
        "mean_accepted_length_by_draft_length": [
            round(1 + sum(per_position[:k]) / steps, 4) for k in range(1, min(max_depth, CUT_LENGTHS) + 1) if steps
        ],
        "by_position": by_position(results),
        "accepted_length_histogram": {str(k): v for k, v in sorted(Counter(lengths).items())},
        "repetition": {
            "repeated_4gram_rate": round(repeats["again"] / max(1, repeats["grams"]), 4),
            "mean_accepted_length_before_first_loop": (
                round(unrepeated / unrepeated_steps, 4) if unrepeated_steps else None
            ),
            "tokens_before_first_loop": unrepeated,
        },
        "loops": {
            "looping_answers": sum(end < len(result.tokens) for end, result in zip(ends, results, strict=True)),
            "mean_tokens_before": round(statistics.mean(ends or [0]), 2),
            "median_tokens_before": statistics.median(ends or [0]),
            "steps_before": steps_before_loop,
            "mean_accepted_length_before": round(before_loop / steps_before_loop, 4) if steps_before_loop else None,
        },
        "spec_decode": {
            "num_drafts": steps,
            "num_draft_tokens": sum(result.drafted for result in results),
            "num_accepted_tokens": sum(length - 1 for length in lengths),
            "num_accepted_tokens_per_pos": per_position,
        },
        **({"sources": by_source} if sources else {}),
    }


def ratio_cell(fields: dict[str, Any], name: str) -> str:
    """A ratio or a mean of a report, its interval below it."""
    if not fields.get(name):
        return "–"
    interval = fields.get(f"{name}_interval")
    return f"{fields[name]:.2f}" + (f"\n{interval[0]:.2f}–{interval[1]:.2f}" if interval else "")


def _fitting_name(drafter: str) -> str:
    """A drafter's name as it was given, in lines of at most 21 characters: the parts of a merge below each other."""
    lines = [drafter] if len(drafter) <= 21 else drafter.replace("+", "\n+").split("\n")
    return "\n".join(line if len(line) <= 21 else "…" + line[-20:] for line in lines)


def _coverage_line(coverage: Sequence[float], overlap: Sequence[Sequence[float]], mark_tokens: int) -> str:
    """How many of the held-out answers an ensemble's first s models reproduce, and how many two of them do."""
    covered = ", ".join(f"@{count} {share:.2f}" for count, share in enumerate(coverage, 1))
    pairs = [
        f"ssm-{first}/ssm-{second} {overlap[first][second]:.2f}"
        for first, second in itertools.combinations(range(len(coverage)), 2)
    ]
    return f"first {mark_tokens} tokens: coverage{covered}" + (f", overlap {', '.join(pairs)}" if pairs else "")


def print_kinds(reports: Sequence[dict[str, Any]], console: Console) -> None:
    """The figures of each kind of text, a row for each drafter; nothing where there are no kinds."""
    if not reports[0].get("kinds"):
        return
    compared = [base for base in WITHOUT_DRAFTS if base in reports[0]["baselines"]]
    table = Table(box=SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False)
    table.add_column("method, % accepted\nat depth 1, 2, …", no_wrap=True)
    for column in ("τ", "τ before\nloops", *(COLUMNS[base] for base in compared)):
        table.add_column(column, justify="right", no_wrap=True)
    for kind, of_first in reports[0]["kinds"].items():
        table.add_row(f"[bold]{escape(kind)}[/bold], {counted(of_first['prompts'], 'prompt')}")
        for report in reports:
            figures = report["kinds"][kind]
            before = figures["loops"]["mean_accepted_length_before"]
            rates = " ".join(f"{100 * rate:.0f}" for rate in figures["acceptance_per_position"][:SHOWN_DEPTHS])
            table.add_row(
                f"  {escape(_fitting_name(report['drafter']))}" + (f"\n  [dim]{rates}[/dim]" if rates else ""),
                ratio_cell(figures, "mean_accepted_length"),
                f"{before:.2f}" if before else "–",
                *(ratio_cell(figures, SPEEDUPS[base]) for base in compared),
                end_section=report is reports[-1],
            )
    console.print(table)
    loops = [
        f"{kind} {figures['loops']['mean_tokens_before']:.0f} ({figures['loops']['median_tokens_before']:.0f}), "
        f"{figures['loops']['looping_answers']} of {figures.get('counted_prompts', figures['prompts'])} answers loop"
        for kind, figures in reports[0]["kinds"].items()
    ]
    console.print(f"Tokens before the first loop, mean (median): {'; '.join(loops)}", markup=False, soft_wrap=True)


def exactness(report: dict[str, Any]) -> tuple[bool | None, str, str]:
    """Whether the output is the target's own (None: lossy, or not checked), in words, and how much was checked."""
    lossless = report["lossless"]
    if report.get("lossy"):
        return None, "typical acceptance: lossy, this is not the target's own distribution", ""
    if lossless is None:
        return None, "output not compared with plain decoding (--check-lossless does)", ""
    passed, checked = bool(lossless["passed"]), f"{lossless['checked']} tokens checked"
    if lossless["mode"] == "mss":
        verb = "have" if passed else "do not have"
        verdict = f"sampled tokens {verb} the target's distribution: χ² p = {lossless['p_value']:.2g}"
        return passed, verdict, f" ({checked}, {lossless['mismatches']} of probability 0)"
    if lossless["identical"]:
        plain = "plain greedy decoding" if lossless["mode"] == "greedy" else "plain sampling by the same seeds"
        return True, f"output identical to {plain}", f" ({checked})"
    verdict = f"{lossless['mismatches']} mismatches with plain decoding, {lossless['near_ties']} near-ties"
    if lossless.get("experts") and lossless["near_ties"]:
        verdict += " (of a mixture of experts, whose router may choose others where bits differ)"
    return not lossless["mismatches"], verdict, f" ({checked})"


def intervals_line(report: dict[str, Any]) -> str:
    """What was timed for a report's speed-ups, and whether it was enough for intervals; empty without baselines."""
    if not report["baselines"]:
        return ""
    timed = f"{counted(report['timed_prompts'], 'prompt')} in {counted(report['pairs'], 'group')}"
    with_them, few = " with 95 % intervals", f": too few for intervals, which need {MIN_PAIRS} groups"
    has = report["pairs"] >= MIN_PAIRS
    return f"Ratios of tokens/s{with_them * has}: {timed}, each decoded by all methods in turn{few * (not has)}"


def print_table(reports: Sequence[dict[str, Any]], console: Console) -> None:
    """Methods by rows: tokens/s, speed-ups with their 95 % intervals, τ, losslessness. A terminal below
    :data:`TABLE_WIDTH` gets the columns that fit into 60."""
    first = reports[0]
    title = f"{first['target']} · {counted(first['prompts'], 'prompt')} · {first['device']} · {first['dtype']}"
    console.print(title, style="italic", markup=False)
    table = Table(box=SIMPLE_HEAD, show_edge=False, collapse_padding=True, pad_edge=False)
    baselines = first["baselines"]
    # Assisted generation is timed beside few drafters.
    over = {base: field for base, field in SPEEDUPS.items() if base in baselines or base != "assisted"}
    columns = ("method", "tokens/s", *(COLUMNS[base] for base in over), "τ", "τ before\nloops")
    shown = range(len(columns)) if console.width >= TABLE_WIDTH else (0, 1, 2, 3, len(columns) - 2)

    def add_row(*cells: str) -> None:
        table.add_row(*(cells[place] for place in shown))

    for place in shown:
        table.add_column(columns[place], justify="right" if place else "left", no_wrap=True)
    for key, label in LABELS.items():
        if key in baselines:
            speed = baselines[key]["tokens_per_second"]
            ratios = [ratio_cell(baselines[key], name) for name in over.values()]
            for place, base in enumerate(over):
                if base in baselines and ratios[place] == "–":
                    ratios[place] = f"{speed / baselines[base]['tokens_per_second']:.2f}"
            add_row(label, f"{speed:.1f}", *ratios, "1.00" if key in WITHOUT_DRAFTS else "–", "–")
    for report in reports:
        name = _fitting_name(report["drafter"])
        before = report["loops"]["mean_accepted_length_before"]
        ratios = [ratio_cell(report, field) for field in over.values()]
        add_row(
            f"[bold]{escape(name)}[/bold]",
            f"[bold]{report['tokens_per_second']:.1f}[/bold]",
            *ratios,
            f"{tau:.2f}" if (tau := report["mean_accepted_length"]) else "–",
            f"{before:.2f}" if before else "–",
        )
    console.print(table)
    if line := intervals_line(first):
        console.print(line, markup=False, soft_wrap=True)
    print_kinds(reports, console)
    for report in reports:
        if (own := report.get("counted_prompts", 0)) and own < report["prompts"]:
            console.print(
                f"{report['drafter']}: τ of {counted(own, 'prompt')}, the timed ones, not of "
                f"{counted(report['prompts'] - own, 'other')}, decoded in larger batches, with other trees",
                markup=False,
                soft_wrap=True,
            )
        passed, verdict, checked = exactness(report)
        colour = {True: "green", False: "red", None: "yellow"}[passed]
        console.print(f"{escape(report['drafter'])}: [{colour}]{verdict}[/{colour}]{checked}", soft_wrap=True)
        if len(report.get("sources", {})) > 1:
            shares = [
                f"{name} proposed {counts['proposed_nodes']} nodes, {counts['accepted_tokens']} accepted"
                for name, counts in report["sources"].items()
            ]
            console.print(f"  {'; '.join(shares)}", markup=False, soft_wrap=True)
        if "ssm" in report:
            console.print(f"  {_coverage_line(**report['ssm'])}", markup=False, soft_wrap=True)


def print_texts(
    target: Target,
    prompts: Sequence[list[int]],
    results: Sequence[Generation],
    console: Console,
    drafter: str,
    sources: Sequence[str] = (),
) -> None:
    """Write answers to stdout, without their stop tokens' text, a line feed between two; headings and the ends of the
    prompts to ``console``. ``drafter, sources``: of :func:`draftsmith.inference.commands.terminal.legend`."""
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), 1):
        if number > 1:
            separate_text()
        console.print(f"prompt {number}" + (f": {legend(drafter, sources)}" if shows_colours() else ""))
        console.print(visible(decode_text(target.tokenizer, prompt[-48:])), style="dim", markup=False)
        answer = Answer(target)
        answer.show(result)
        answer.end()


def _folders(reports: Sequence[dict[str, Any]], number: int, folder: Path) -> list[Path]:
    """Where a report is written: of several drafters in a folder of its own, named by the drafter, and the first one's
    in ``folder``, too."""
    own = [folder / short_name(reports[number]["drafter"])] if len(reports) > 1 else []
    return [*own, folder] if number == 0 else own


def write_figures(reports: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write report.json of each drafter. The page and the picture of an earlier one go: they show other figures."""
    for number, report in enumerate(reports):
        for place in _folders(reports, number, folder):
            place.mkdir(parents=True, exist_ok=True)
            for name in ("report.html", "report.png"):
                (place / name).unlink(missing_ok=True)
            write_json(place / "report.json", report)


def write_pages(reports: Sequence[dict[str, Any]], pages: Sequence[str], folder: Path, console: Console) -> None:
    """Write report.png and report.html of each drafter, beside its figures."""
    for number, page in enumerate(pages):
        for place in _folders(reports, number, folder):
            plot(reports[number], place / "report.png")
            with replacing(place / "report.html") as temporary:
                temporary.write_text(page, encoding="utf-8")
            console.print(f"wrote {place / 'report.html'}, report.json and report.png", markup=False, soft_wrap=True)


@contextmanager
def plain_texts() -> Iterator[None]:
    """Inside, matplotlib draws texts as they stand, not as formulas ($x$), and characters that its font has not as
    boxes, without a warning."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph |Matplotlib currently does not support", UserWarning)
        yield


@plain_texts()
def plot(report: dict[str, Any], path: Path) -> None:
    """Plot tokens/s beside the baselines, the accepted lengths, and the acceptance by position; where there are several
    kinds of text, also τ, speed-ups and acceptance of each kind."""
    from matplotlib.figure import Figure  # takes a second

    kinds = report.get("kinds", {})
    rows = 2 if kinds else 1
    fig = Figure(figsize=(13, 4.2 * rows), layout="constrained")
    axes = fig.subplots(rows, 3, squeeze=False)
    speed, lengths, places = axes[0]
    baselines = report["baselines"]
    names = {"engine": "plain,\nour engine", "transformers": "trans-\nformers", "prompt_lookup": "prompt-\nlookup"}
    names["assisted"] = "as-\nsisted"
    bars = {names[key]: baselines[key]["tokens_per_second"] for key in names if key in baselines}
    bars[short_name(report["drafter"]).replace("+", "\n+ ")] = report["tokens_per_second"]
    drawn = speed.bar(list(bars), list(bars.values()), color=["#b8bcc6"] * (len(bars) - 1) + ["#2f7d4f"])
    plain = baselines.get("engine", {}).get("tokens_per_second")
    labels = [f"{v:.0f}" + (f"\n{v / plain:.2f}×" if plain else "") for v in bars.values()]
    if interval := report.get("speedup_interval"):
        labels[-1] += f"\n({interval[0]:.2f}–{interval[1]:.2f})"
    speed.bar_label(drawn, labels, padding=2)
    title = "Speed (× over plain decoding, 95 % interval)" if interval else "Speed (× over plain decoding)"
    speed.set(ylim=(0, max(bars.values()) * 1.3), ylabel="tokens per second", title=title)
    speed.tick_params(axis="x", labelsize=9)
    histogram = {int(k): v for k, v in report["accepted_length_histogram"].items()}
    total = sum(histogram.values()) or 1
    lengths.bar(list(histogram), [100 * v / total for v in histogram.values()], color="#2f7d4f")
    tau = report["mean_accepted_length"]
    lengths.set(title=f"Accepted length, mean τ = {f'{tau:.2f}' if tau else '–'}", xticks=sorted(histogram))
    lengths.set(xlabel="tokens committed in a step (bonus included)", ylabel="% of steps")
    rates = [100 * rate for rate in report["acceptance_per_position"]]
    places.bar(range(1, len(rates) + 1), rates, color="#2f7d4f")
    places.set(title="Acceptance per position", xticks=range(1, len(rates) + 1), **PLACES)
    if kinds:
        _plot_kinds(kinds, *axes[1])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    fig.suptitle(
        f"{report['drafter']} on {report['target']}: {counted(report['prompts'], 'prompt')}, {report['dtype']}, "
        f"{report['device']}",
        fontsize=10,
    )
    write_figure(fig, path)


def _plot_kinds(kinds: dict[str, dict[str, Any]], lengths: Any, speeds: Any, places: Any) -> None:
    """τ, speed-ups and acceptance of each kind of text, with 95 % intervals, on three axes."""
    names = list(kinds)

    def bars(axis: Any, field: str, shift: float, width: float, colour: str, label: str) -> None:
        known = [(place, kinds[name]) for place, name in enumerate(names) if kinds[name].get(field)]
        where = [place + shift for place, _ in known]
        heights = [figures[field] for _, figures in known]
        drawn = axis.bar(where, heights, width, color=colour, label=label)
        axis.bar_label(drawn, [f"{height:.2f}" for height in heights], label_type="center", color="white")
        for place, height, (_, figures) in zip(where, heights, known, strict=True):
            if interval := figures.get(f"{field}_interval"):
                low, high = interval
                reach = [[max(0, height - low)], [max(0, high - height)]]
                axis.errorbar(place, height, reach, color="#30343c", capsize=3)

    bars(lengths, "mean_accepted_length", 0, 0.6, "#2f7d4f", "τ")
    lengths.set(ylabel="tokens per step", title="τ by kind of text, 95 % interval")
    bars(speeds, "speedup", -0.2, 0.4, "#2f7d4f", "over plain decoding")
    bars(speeds, "speedup_vs_transformers", 0.2, 0.4, "#5a8fc4", "over transformers.generate")
    speeds.axhline(1, color="#8d95a3", linewidth=1)
    speeds.set_title("Speed-up by kind of text, 95 % interval")
    speeds.set_ylim(top=1.25 * speeds.get_ylim()[1])  # room for the legend
    speeds.legend(frameon=False, fontsize=9)
    for axis in (lengths, speeds):
        axis.set_xticks(range(len(names)), names)
    for name, figures in kinds.items():
        rates = [100 * rate for rate in figures["acceptance_per_position"]]
        places.plot(range(1, len(rates) + 1), rates, marker="o", label=name)
        places.set_xticks(range(1, len(rates) + 1))
    places.set(title="Acceptance per position by kind of text", **PLACES)
    places.legend(frameon=False, fontsize=9)


def write_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib ``Figure`` as PNG, atomically."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
