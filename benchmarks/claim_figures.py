"""Our figures for the papers' claims (benchmarks/published.py), read from what the measuring commands write; and the
trees that Medusa's and EAGLE's claims compare."""

import heapq
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.benchmarks.common import difference_of, ratio_of, with_interval
from draftsmith.benchmarks.shortlist_figures import WHOLE
from draftsmith.common.files import json_object, write_json

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """A figure of ours. ``above``: the claim says that it is above this; None: reported beside, and not judged."""

    what: str
    value: float | None
    interval: Sequence[float] | None = None
    above: float | None = None


# ---- reading reports


def paired(
    what: str,
    one: Sequence[Sequence[float]],
    other: Sequence[Sequence[float]],
    above: float | None,
    ratio: bool = False,
) -> Figure:
    """The first's mean less (or over) the other's; both are (sum, count) of the same texts, over which the interval is
    bootstrapped."""
    both = [(*a, *b) for a, b in zip(one, other, strict=True) if a[1] and b[1]]
    columns = torch.tensor(both, dtype=torch.float64).t()
    found = with_interval(columns, ratio_of if ratio else difference_of)
    return Figure(what, found["value"], found["interval"], above)


def apart(what: str, one: dict[str, Any], other: dict[str, Any], name: str, above: float) -> Figure:
    """The difference of two figures of different texts; its interval has the extremes of theirs."""
    (low, high), (less, more) = one["interval"] or (math.nan,) * 2, other["interval"] or (math.nan,) * 2
    known = not math.isnan(low + high + less + more)
    bounds = [round(low - more, 4), round(high - less, 4)] if known else None
    return Figure(what, round(one[name] - other[name], 4), bounds, above)


def decoded(folder: Path) -> dict[str, Any]:
    return json_object(folder / "report.json", "report")


def steps_of(report: dict[str, Any]) -> list[tuple[int, int]]:
    """Committed tokens and steps of each prompt."""
    return list(zip(report["per_prompt"]["committed_tokens"], report["per_prompt"]["steps"], strict=True))


def tau_of(what: str, row: dict[str, Any]) -> Figure:
    return Figure(f"τ, {what}", row["mean_accepted_length"], row["mean_accepted_length_interval"])


def compare_tau(first: tuple[str, Path], others: dict[str, Path]) -> list[Figure]:
    """τ of decode.py's reports: the first's, judged to be above each of the others'."""
    reports = {what: decoded(path) for what, path in (first, *others.items())}
    judged = [
        paired(f"τ, {first[0]} less {what}", steps_of(reports[first[0]]), steps_of(reports[what]), above=0)
        for what in others
    ]
    return [*judged, *(tau_of(what, report) for what, report in reports.items())]


# ---- trees of Medusa heads and of EAGLE


def nodes_of(sizes: Sequence[int]) -> int:
    return 1 + sum(itertools.accumulate(sizes, operator.mul))


def expected(sizes: Sequence[int], accuracy: Sequence[Sequence[float]]) -> float:
    """Expected committed tokens of a dense tree, if depths are right independently of each other."""
    rates = (sum(ranks[:size]) for size, ranks in zip(sizes, accuracy, strict=False))
    return 1 + sum(itertools.accumulate(rates, operator.mul))


def sparse(accuracy: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """Medusa's own construction (§2.3.3): add the path with the highest product of accuracies until there are
    ``nodes``, root included."""
    heap = [(-rate, [rank]) for rank, rate in enumerate(accuracy[0])]
    heapq.heapify(heap)
    found: list[list[int]] = []
    while heap and len(found) < nodes - 1:
        rate, path = heapq.heappop(heap)
        found.append(path)
        if len(path) < len(accuracy):
            for rank, each in enumerate(accuracy[len(path)]):
                heapq.heappush(heap, (rate * each, [*path, rank]))
    return found


def accuracies(drafter: str, name: str) -> list[list[float]]:
    tree = json_object(ROOT / drafter / "tree.json", "tree")
    return tree["calibration"][name]


def medusa_trees(out: Path, fields: dict[str, Any]) -> None:
    """The sparse tree; of all dense ones of as many nodes as are asked for, the best and the median by expected τ."""
    accuracy = accuracies(fields["drafter"], "accuracy_by_head_and_rank")
    low, high = fields["dense"]
    shapes = (s for k in range(1, len(accuracy) + 1) for s in itertools.product(range(1, 11), repeat=k))
    dense = sorted((s for s in shapes if low <= nodes_of(s) <= high), key=lambda s: expected(s, accuracy))
    write_json(out / "sparse.json", {"paths": sparse(accuracy, fields["nodes"])})
    write_json(out / "median.json", {"product": dense[len(dense) // 2]})
    write_json(out / "best.json", {"product": dense[-1]})


def read_medusa_trees(out: Path) -> list[Figure]:
    sizes = {name: json_object(out / f"{name}.json", "tree") for name in ("sparse", "median", "best")}
    names = {name: "dense " + " × ".join(map(str, sizes[name]["product"])) for name in ("median", "best")}
    nodes = {name: f"{nodes_of(sizes[name]['product'])} nodes" for name in names}
    label = {
        "median": f"{names['median']} ({nodes['median']}, the median of the dense trees)",
        "best": f"{names['best']} ({nodes['best']}, the best dense tree)",
    }
    first = f"sparse ({len(sizes['sparse']['paths']) + 1} nodes)"
    return compare_tau((first, out / "sparse"), {label[name]: out / name for name in label})


def eagle_trees(out: Path, fields: dict[str, Any]) -> None:
    accuracy = accuracies(fields["drafter"], "accuracy_by_depth_and_rank")[:6]
    write_json(out / "fixed.json", {"paths": sparse(accuracy, fields["nodes"])})
    write_json(out / "dynamic.json", {"dynamic": {"top_k": 8, "depth": 6, "nodes": fields["nodes"]}})


def read_eagle_trees(out: Path) -> list[Figure]:
    return compare_tau(("dynamic tree", out / "dynamic"), {"fixed tree": out / "fixed"})


# ---- other readers


def read_typical(out: Path) -> list[Figure]:
    """The sweep of ε; that of δ beside it."""
    of = {file: json_object(out / file / "typical.json", "report")["methods"] for file in ("epsilon", "delta")}
    rows = [row for row in of["epsilon"] if row["lossy"]]
    low, high = rows[0], rows[-1]
    what = f"τ, ε = {low['epsilon']:g} less ε = {high['epsilon']:g}"
    figures = [paired(what, low["accepted_by_prompt"], high["accepted_by_prompt"], above=0)]
    exact = {row["name"]: row for row in of["epsilon"] if not row["lossy"]}
    middle, sampled = next(row for row in rows if row["epsilon"] == 0.09), exact["sampling"]
    for what, row in {"ε = 0.09": middle, "lossless greedy": exact["greedy"]}.items():
        both = row["accepted_by_prompt"], sampled["accepted_by_prompt"]
        figures.append(paired(f"τ, {what} less lossless sampling", *both, above=None))
    for row in [exact["greedy"], *rows, *(row for row in of["delta"] if row["lossy"])]:
        figures.append(tau_of(row["name"], row))
        what = f"nats per token, {row['name']} less exact sampling"
        figures.append(Figure(what, row["nats_difference"], row["nats_interval"]))
    return figures


def read_stages(out: Path) -> list[Figure]:
    ways = json_object(out / "bench.json", "report")["ways"]
    by_prompt = {name: row["accepted_by_prompt"] for name, row in ways.items()}
    figures = [
        paired("τ, Medusa-2 (self-distilled) less Medusa-1", by_prompt["self-distilled"], by_prompt["medusa-1"], 0),
        paired(
            "τ, joint in two stages less joint at once", by_prompt["joint, 2 stages"], by_prompt["joint, direct"], None
        ),
    ]
    for name, row in ways.items():
        figures.append(tau_of(name, row))
        figures.append(Figure(f"perplexity of the trained target over the original's, {name}", row["perplexity_ratio"]))
        figures.append(Figure(f"KL of the trained target from the original, nats per token, {name}", row["kl"]))
        figures.append(Figure(f"share of 4-grams that repeat, {name}", row["repeated_4gram_rate"]))
    return figures


def read_widths(out: Path) -> list[Figure]:
    """Greedy τ by width; how many of the target's tokens are among an SSM's likeliest."""
    found = json_object(out / "widths.json", "report")
    widths = found["sampling"]["widths"]
    greedy = {width: row["greedy"] for width, row in widths.items()}
    narrow, *_, wide = greedy
    rows = greedy[wide]["accepted_by_prompt"], greedy[narrow]["accepted_by_prompt"]
    figures = [paired(f"greedy τ, width {wide} over width {narrow}", *rows, above=1, ratio=True)]
    figures += [Figure(f"greedy τ, width {w}", row["tau"], row["tau_interval"]) for w, row in greedy.items()]
    hits = next(iter(next(iter(found["folders"].values()))["ssms"].values()))["top_k"]
    return [
        *figures,
        *(Figure(f"target's token in the SSM's top {k}", h["share"], h["interval"]) for k, h in enumerate(hits, 1)),
    ]


def read_sampling(out: Path) -> list[Figure]:
    widths = json_object(out / "widths.json", "report")["sampling"]["widths"]
    figures = list[Figure]()
    for width, row in widths.items():
        for draws, name in (("iid", "i.i.d., the paper's"), ("without_replacement", "without replacement")):
            judged = 1.0 if width == list(widths)[-1] and draws == "iid" else None
            ratio = row[draws]["tau_over_naive"], row[draws]["tau_over_naive_interval"]
            figures.append(Figure(f"τ, multi-step ({name}) over naive, width {width}", *ratio, judged))
    return sorted(figures, key=lambda each: each.above is None)


def read_boosting(out: Path) -> list[Figure]:
    folders = json_object(out / "ensembles.json", "report")["folders"]
    rows = {Path(name).name: folder for name, folder in folders.items()}
    nodes = next(iter(rows["boosted"]["tau"]))
    figures = list[Figure]()
    for name, what, above in (
        ("one", "its first SSM alone", 0),
        ("long", "one SSM trained as long as all three", None),
    ):
        row = rows[name]["tau"][nodes]
        bounds = [-bound for bound in reversed(row["difference_interval"])] if row["difference_interval"] else None
        figures.append(
            Figure(f"τ, boosted ensemble less {what}, {nodes} nodes each", -row["difference"], bounds, above)
        )
    figures += [
        Figure(f"τ, {name}", f["tau"][nodes]["tau"], f["tau"][nodes]["tau_interval"]) for name, f in rows.items()
    ]
    covered = zip(rows["boosted"]["coverage"], rows["boosted"]["coverage_interval"], strict=True)
    return [*figures, *(Figure(f"coverage@{s}, boosted", *pair) for s, pair in enumerate(covered, 1))]


def read_dynaspec(out: Path) -> list[Figure]:
    report = json_object(out / "table.json", "report")
    rows = {name: row["steps"] for name, row in report["all"]["methods"].items()}
    own, whole = rows.pop("DynaSpec"), rows.pop(WHOLE)
    figures = [paired(f"τ, DynaSpec less {name}", own, row, above=0) for name, row in rows.items()]
    for name, row in {"DynaSpec": own, **rows}.items():
        what = f"share of the whole LM head's τ, {name}"
        figures.append(paired(what, row, whole, above=None, ratio=True))
    for name in ("DynaSpec", *rows):
        figures.append(Figure(f"tokens in a list, {name}", report["all"]["methods"][name]["tokens"]))
    return [*figures, *dropped(ROOT / report["folders"]["DynaSpec"])]


def dropped(folder: Path) -> list[Figure]:
    """By depth, the share of the chosen clusters' tokens that the list has no place for, on the run's held-out text."""
    clusters = json_object(folder / "config.json", "drafter")["clusters"]
    chosen = clusters[0], "fixed" if clusters[-1] == clusters[0] else "position_aware"
    lines = json_object(folder / "provenance.json", "record")["selection"]
    shares = next(line["dropped"] for line in lines if (line["k_max"], line["schedule"]) == chosen)
    what = "share of the chosen clusters' tokens that are dropped, depth"
    return [Figure(f"{what} {depth}", round(each, 4)) for depth, each in enumerate(shares)]


def read_sequences(out: Path) -> list[Figure]:
    rows = json_object(out / "sequences.json", "report")["rows"]
    figures = [
        Figure(f"time of the sequences over the tree's, {row['context']} tokens", row["ratio"], row["interval"], 1)
        for row in rows
    ]
    for row in rows:
        for name in ("tree", "apart"):
            what = f"memory beyond weights and text, {name}, {row['context']} tokens"
            figures.append(Figure(what, row[f"{name}_memory"]))
    return figures


def read_selectors(out: Path) -> list[Figure]:
    rows = json_object(out / "acceptance.json", "report")["rows"]
    kinds, sizes = ({row[name]: None for row in rows} for name in ("kind", "entries"))

    def texts(selector: str, entries: int, kind: str | None = None) -> list[list[float]]:
        own = [row for row in rows if row["selector"] == selector and row["entries"] == entries]
        return [text for row in own if kind in (None, row["kind"]) for text in row["accepted_by_text"]]

    figures = [
        paired(f"α, SnapKV less StreamingLLM, {k} entries", texts("snapkv", k), texts("streamingllm", k), above=0)
        for k in sizes
    ]
    few, *_, many = sizes
    for kind in kinds:
        pair = texts("snapkv", many, kind), texts("streamingllm", many, kind)
        figures.append(paired(f"α, SnapKV less StreamingLLM, {many} entries, {kind}", *pair, above=None))
    for selector, k in itertools.product(("streamingllm", "snapkv", "topk"), (few, many)):
        alpha = with_interval(torch.tensor(texts(selector, k), dtype=torch.float64).t())
        figures.append(Figure(f"α, {selector}, {k} entries", alpha["value"], alpha["interval"]))
    return figures


def read_topk(out: Path) -> list[Figure]:
    figures = read_selectors(out)
    top = [each for each in figures if each.what.startswith("α, topk")]
    return [Figure(top[-1].what, top[-1].value, top[-1].interval, 0.9), *top[:-1]]


def read_batches(out: Path) -> list[Figure]:
    """Speed-ups by batch: at the longest context that of the largest batch is claimed to be above that of one row, at
    the shortest below it."""
    rows = json_object(out / "speed.json", "report")["rows"]
    short, long = (pick(row["context"] for row in rows) for pick in (min, max))
    one, many = (pick(row["batch"] for row in rows) for pick in (min, max))
    entries = max(row["entries"] for row in rows)
    at = {(row["context"], row["batch"]): row for row in rows if row["entries"] == entries}
    what = f"speed-up, {many} rows less {one}, {long} tokens"
    figures = [apart(what, at[long, many], at[long, one], "speedup", 0)]
    what = f"speed-up, {one} rows less {many}, {short} tokens"
    figures.append(apart(what, at[short, one], at[short, many], "speedup", 0))
    return figures + [
        Figure(f"speed-up, {s} tokens, {b} rows", row["speedup"], row["interval"]) for (s, b), row in at.items()
    ]
