"""Figures of shortlists of one drafter's LM head, for shortlist_heads.py, by kind of prompt: tables and a plot.

Shape letters: see there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.benchmarks.common import with_interval
from draftsmith.benchmarks.tables import GREY, cell, error_bars, picture, print_table, table_of
from draftsmith.inference.drafters.names import short_name
from draftsmith.inference.measure.tree_statistics import ensemble_depths, simulate_depths
from draftsmith.inference.verify.tree import Topology

WHOLE = "whole LM head"
STATISTICS = ("acceptance", "top1", "top10", "tokens", "labels")  # of a node
MARKERS = "osD^vP*Xhd<>"  # of the plot, by kind of text


@dataclass(frozen=True)
class Found:
    """What the methods keep, by prompt.

    nodes: ``[S, K]`` float64, nodes that have a label.
    sums: method → ``[5, S, K]`` float64, :data:`STATISTICS` summed over these nodes.
    ranks: method → ``[S, T, K]`` int64 as :func:`draftsmith.inference.measure.tree_statistics.head_ranks`.
    """

    nodes: Tensor
    sums: dict[str, Tensor]
    ranks: dict[str, Tensor]


def steps_of(tree: Topology, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Committed tokens and steps of each prompt's simulation, ``[S]`` float64; ``ranks``: ``[S, T, K]``. Each text has
    one answer, of which every token from the first draft's on is committed once."""
    begins, accepted = ranks[..., 0] >= 0, ensemble_depths((tree,), ranks[:, :, None])
    tokens = begins.sum(1).double()
    tau = [simulate_depths(accepted[n : n + 1], begins[n : n + 1]) for n in range(len(ranks))]
    return tokens, (tokens / torch.tensor(tau, dtype=torch.float64).clamp(min=1)).round()


def rounded(value: Tensor) -> float | None:
    """To four decimals; None for NaN, the share of nothing."""
    return None if value.isnan() else round(float(value), 4)


def ratio(value: Tensor, base: Tensor) -> dict[str, Any]:
    """Σ value / Σ base, both ``[S]``, with its interval."""
    return with_interval(torch.stack((value, base)))


def depth_mean(sums: Tensor, nodes: Tensor) -> dict[str, Any]:
    """The mean over the depths of Σ sums / Σ nodes, both ``[S, K]``, with its interval; a depth without nodes is left
    out."""
    columns, depths = torch.cat((sums, nodes), 1).t(), nodes.shape[1]

    def mean(total: Tensor) -> Tensor:
        return (total[:depths] / total[depths:]).nanmean(0)

    return with_interval(columns, mean)


def figures(found: Found, tree: Topology, seconds: Tensor, timed: Sequence[int], numbers: Sequence[int]) -> Any:
    """The methods' figures on the prompts with some numbers.

    Args:
        seconds: ``[methods, texts]`` of :func:`time_heads`; ``timed``: numbers of these prompts.
    """
    nodes, rows = found.nodes[numbers], dict[str, Any]()
    some = [place for place, number in enumerate(timed) if number in set(numbers)]
    _, whole_steps = steps_of(tree, found.ranks[WHOLE][numbers])
    for name, times in zip(found.sums, seconds[:, some], strict=True):
        sums = dict(zip(STATISTICS, found.sums[name][:, numbers], strict=True))
        tokens, steps = steps_of(tree, found.ranks[name][numbers])
        by_depth = {field: each.sum(0) / nodes.sum(0) for field, each in sums.items()}
        rows[name] = {
            "tau": ratio(tokens, steps),
            "tau_over_whole": ratio(whole_steps, steps),
            "acceptance_at_depth_0": ratio(sums["acceptance"][:, 0], nodes[:, 0]),
            **{field: depth_mean(each, nodes) for field, each in sums.items()},
            "by_depth": {field: [rounded(value) for value in values] for field, values in by_depth.items()},
            "head_seconds": round(float(times.mean()), 7) if some else None,
            "head_over_whole": ratio(times, seconds[0, some]) if some else None,
        }
    return {"prompts": len(numbers), "positions": int(nodes[:, 0].sum()), "methods": rows}


def _cell(fields: dict[str, Any] | None, form: str = ".2f") -> str:
    """A figure, its interval below it."""
    return cell(fields["value"], fields["interval"], form).replace(" (", "\n(") if fields else "–"


def _percent(values: Sequence[float | None]) -> str:
    return " ".join("–" if value is None else f"{100 * value:.0f}" for value in values)


def print_methods(title: str, found: dict[str, Any]) -> None:
    """The methods by rows."""
    kept = ("one draw,\ndepth 0", "mean over\ndepths", "recall, %, by depth:\n@1, below it @10", "tokens", "labels")
    table = table_of("list", "τ", "τ / whole", *kept, "head, ms", "head /\nwhole")
    for name, row in found["methods"].items():
        recall = [_percent(row["by_depth"][field]) for field in ("top1", "top10")]
        tokens, labels = row["tokens"]["value"], row["labels"]["value"]
        table.add_row(
            WHOLE if name == WHOLE else short_name(name),
            _cell(row["tau"]),
            _cell(row["tau_over_whole"], ".3f") if name != WHOLE else "1",
            _cell(row["acceptance_at_depth_0"], ".3f"),
            _cell(row["acceptance"], ".3f"),
            "\n".join(recall) if name != WHOLE else "",
            cell(tokens, form=",.0f"),
            cell(labels, form=".3f"),
            f"{row['head_seconds'] * 1e3:.2f}" if row["head_seconds"] else "–",
            _cell(row["head_over_whole"]) if name != WHOLE else "1",
        )
    count = found["prompts"]
    print_table(table, f"\n{title}: {count} prompt{'s' * (count != 1)}, {found['positions']:,} positions")


def plot(found: dict[str, Any], path: Path) -> None:
    """Plot τ / τ of the whole LM head over the mean number of tokens, a point for each folder and kind of text."""
    with picture(path, 8, 4.8, legend_beside=True) as (axes,):
        for number, (kind, part) in enumerate((found["kinds"] or {"all": found["all"]}).items()):
            marker = MARKERS[number % len(MARKERS)]
            axes.plot([], [], marker, color="#5a6270", label=kind)
            for place, name in enumerate(found["folders"]):
                row = part["methods"][name]
                size, kept = row["tokens"]["value"], row["tau_over_whole"]
                if size is None or kept["value"] is None:
                    continue
                point = size, kept["value"], kept["interval"]
                error_bars(axes, [point], fmt=marker, color=f"C{place}", capsize=2, alpha=0.85)
        for place, name in enumerate(found["folders"]):
            axes.plot([], [], "-", color=f"C{place}", linewidth=3, label=short_name(name))
        axes.axhline(1, color=GREY, linewidth=1)
        axes.set_xlabel(f"mean tokens in the list, of {found['outputs']:,}")
        axes.set_ylabel("simulated τ / whole LM head's, 95 % interval")
