"""A plan of inference/planner.py as a table and as a plot."""

from pathlib import Path
from typing import Any

from rich.table import Table

from draftsmith.inference.commands.terminal import make_console
from draftsmith.inference.measure.report import write_figure


def print_plan(facts: dict[str, Any]) -> None:
    """One line for each batch size and context length, to stdout."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = ("rows", "tokens", "drafter", "α", "E", "verify", "draft", "select", "speed-up", "with prefill", "α*")
    for column in columns:
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=True)
    for cell in facts["cells"]:
        alpha = sum(cell["alpha"]) / len(cell["alpha"])
        names = ("tokens", "verify", "draft", "select", "speedup", "speedup_with_prefill")
        least = "none" if cell["least_alpha"] > 1 else f"{cell['least_alpha']:.2f}"
        key = str(cell["batch"]), str(cell["context"]), cell["drafter"]
        table.add_row(*key, f"{alpha:.2f}", *(f"{cell[name]:.2f}" for name in names), least)
    out = make_console(stderr=False)
    out.print(table)
    stars = [f"{each:,.0f} tokens where {nodes} are verified" for nodes, each in facts["inflection"].items() if each]
    out.print(
        "Times are in plain steps. α*: acceptance from which on the best setting pays. none: plain decoding is the\n"
        "fastest; the other columns are those of the best setting. In texts longer than S* the speed-up grows with\n"
        f"the batch: {', '.join(stars) or 'here no length is, cached tokens cost nothing'}",
        markup=False,
        highlight=False,
    )


def print_drafter_plan(facts: dict[str, Any]) -> None:
    """Two lines for each batch size and context length, to stdout: the best drafter, and the best one of the others."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rows", "tokens", "speed-up", "α", "E", "verify", "draft", "select", "α*"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("drafter", overflow="fold")
    for cell in facts["cells"]:
        for own in (cell, cell["second"]):
            key = (str(cell["batch"]), str(cell["context"])) if own is cell else ("", "second")
            figures = ["–"] * 6
            if own["alpha"]:
                alpha = sum(own["alpha"]) / len(own["alpha"])
                named = (own[name] for name in ("tokens", "verify", "draft", "select"))
                least = "none" if own["least_alpha"] > 1 else f"{own['least_alpha']:.2f}"
                figures = [*(f"{value:.2f}" for value in (alpha, *named)), least]
            table.add_row(*key, f"{own['speedup']:.2f}", *figures, own["drafter"])
    out = make_console(stderr=False)
    out.print(table)
    out.print(
        "Times are in plain steps, without prefills. α*: acceptance from which on it pays. drafter: as decode.py\n"
        "takes it; none: plain decoding. second: the best of the other drafters and caches.",
        markup=False,
        highlight=False,
    )


def draw(facts: dict[str, Any], path: Path) -> None:
    """Speed-up by batch size and context length; a plain step's time in three parts; α by K."""
    from matplotlib.figure import Figure

    cells = facts["cells"]
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    speeds, times, alphas = figure.subplots(1, 3)
    lengths = sorted({cell["context"] for cell in cells})
    batches = sorted({cell["batch"] for cell in cells})
    for length in lengths:
        own = sorted((cell["batch"], cell["speedup"]) for cell in cells if cell["context"] == length)
        speeds.plot(*zip(*own, strict=True), marker="o", label=f"{length} tokens")
    speeds.axhline(1, color="grey", linewidth=1)
    star = facts["inflection"]["4"]
    title = f"Predicted speed-up of the best setting\n(S* at 4 verified tokens: {f'{star:,.0f}' if star else 'none'})"
    speeds.set(title=title, xlabel="rows", ylabel="× plain")
    speeds.set(xscale="log", xticks=batches, xticklabels=batches)
    speeds.minorticks_off()
    speeds.legend(frameon=False)
    many = [cell for cell in cells if cell["batch"] == batches[-1]]
    places = range(len(many))

    def products(cell: dict[str, Any]) -> float:
        return (cell["seconds"] - cell["seconds_of_cached_tokens"]) * 1e3

    one = {cell["context"]: cell for cell in cells if cell["batch"] == batches[0]}
    base = [min(products(one[cell["context"]]), products(cell)) for cell in many]
    keys = [cell["seconds_of_cached_tokens"] * 1e3 for cell in many]
    rest = [products(cell) - first for cell, first in zip(many, base, strict=True)]
    times.bar(places, base, label=f"as for a batch of {batches[0]}, without cached tokens")
    times.bar(places, rest, bottom=base, label=f"products of {batches[-1]} rows beyond that")
    bottoms = [first + more for first, more in zip(base, rest, strict=True)]
    times.bar(places, keys, bottom=bottoms, label="cached keys and values")
    times.set(title=f"A plain step of {batches[-1]} rows", xlabel="cached tokens", ylabel="ms")
    times.set(xticks=places, xticklabels=[cell["context"] for cell in many])
    times.margins(y=0.25)  # room for the legend
    times.legend(frameon=False, fontsize=8, loc="upper left")
    by_curve: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for each in facts["measured"]:
        by_curve.setdefault((each["selector"], each["context"]), []).append((each["entries"], each["alpha"][0]))
    for (selector, length), own in sorted(by_curve.items()):
        style = "-" if selector == "snapkv" else "--"
        alphas.plot(*zip(*sorted(own), strict=True), style, marker="o", label=f"{selector}, {length} tokens")
    entries = sorted({each["entries"] for each in facts["measured"]})
    alphas.set(title="Acceptance of the first drafted token", xlabel="entries K", ylabel="α")
    alphas.set(xscale="log", xticks=entries, xticklabels=entries)
    alphas.minorticks_off()
    alphas.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (speeds, times, alphas):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    write_figure(figure, path)
