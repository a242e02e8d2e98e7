"""Nodes that the budget (inference/engine/budget.py) chooses by a calculated table of costs, and the expected speed: of
targets of 7 and 8 billion parameters on an H200, with 1 to 128 texts of 1k to 64k tokens, and a drafter of one layer;
and of the latter as its own drafter, over 512 cached tokens (inference/planner.py), beside what MagicDec publishes.

    python benchmarks/roofline.py --out roofline.json

Nothing is measured. A step takes the least that its products, its attention and its launches can take
(benchmarks/floors.py); a drafter's pass likewise. A child's probability of being accepted depends on its rank alone
(--ranks); the drafter runs the eight likeliest nodes of each level. Over 512 tokens a drafted token is accepted with a
probability of 0.84 after 4k tokens and 0.79 after 100k, as MagicDec reports it (arXiv 2408.11049). Of eight GPUs, as
in its figures, each has an eighth of everything; what they exchange takes no time.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import list_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_file
from draftsmith.inference.commands.options import check_counts


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    accepted = "probability that the drafter's k-th token is accepted (%(default)s)"
    list_option(parser, "--ranks", [0.7, 0.1, 0.05, 0.03], "P", accepted, float)
    parser.add_argument("--depth", type=int, default=7, help="levels of a tree, at most (%(default)s)")
    parser.add_argument("--nodes", type=int, default=64, help="nodes of a tree, at most (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures there, a plot beside it")
    return parser


def check(args: argparse.Namespace) -> None:
    check_counts(depth=args.depth, nodes=args.nodes)
    check_file("--out", args.out, beside=".png")
    if min(args.ranks) <= 0 or sum(args.ranks) > 1:
        raise ValueError(f"--ranks {' '.join(map(str, args.ranks))}: must be above 0, and 1 at most together")


if __name__ == "__main__":
    before_imports(parser(), check)

import math
import re
from dataclasses import replace

import torch

from draftsmith.benchmarks.floors import STEP_LAUNCHES, Device, Work
from draftsmith.benchmarks.tables import GREY, picture, print_table, table_of, write_report
from draftsmith.common.files import json_object
from draftsmith.inference.engine.budget import RETRY, Budget
from draftsmith.inference.measure.planning import Setting, predict
from draftsmith.inference.measure.prefilled import MOST

H200, MEMORY = Device(4.8e12, 989e12), 141e9  # as specified, in bfloat16; bytes
EIGHT = {"A100": Device(8 * 2.04e12, 8 * 312e12), "H100": Device(8 * 3.35e12, 8 * 989e12)}  # as specified
# Llama-3.1-8B as its own drafter after 32,000 tokens, as the page of arXiv 2408.11049 has it: GPUs, texts, γ, speed-up.
PUBLISHED = (("A100", 32, 3, 1.22), ("A100", 64, 3, 1.38), ("A100", 128, 4, 1.47), ("H100", 32, 3, 1.23),
             ("H100", 64, 3, 1.43))  # fmt: skip
MEASURED = Path(__file__).with_name("claims.json")
BEAM = 8  # nodes of a level that the drafter runs, at most
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
ENTRIES = 512  # of a compressed cache
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Shape:
    """A target in bfloat16, and its drafter of one layer, of an LM head as large as the target's or smaller."""

    name: str
    parameters: float
    layers: int
    width: int
    kv_width: int
    draft_rows: int
    device: Device = H200

    @property
    def key_bytes(self) -> float:
        """K/V of a token."""
        return 2 * 2 * self.layers * self.kv_width

    def fits(self, rows: int, cached: int) -> bool:
        return 2 * self.parameters + rows * cached * self.key_bytes < 0.95 * MEMORY

    def seconds(self, rows: int, cached: float, nodes: int) -> float:
        """t(B, S, N)."""
        return self._floor(rows, cached, nodes, self.layers, self.parameters)

    def pass_seconds(self, rows: int, cached: float, nodes: int) -> float:
        """A level of the drafter: a layer with three times the target's width as input, and its LM head."""
        return self._floor(rows, cached, nodes, 1, 14 * self.width**2 + self.draft_rows * self.width)

    def _floor(self, rows: int, cached: float, nodes: int, layers: int, parameters: float) -> float:
        keys, (per_layer, around) = rows * cached, STEP_LAUNCHES
        products = Work(2 * parameters, 2 * parameters * rows * nodes, per_layer * layers + around)
        # Scores, and weighted values.
        attention = Work(keys * self.key_bytes * layers / self.layers, 4 * keys * nodes * self.width * layers)
        return self.device.floor([products, attention])

    def inflection(self, nodes: int) -> float:
        """S*: the cached tokens whose K/V take as long to be read as the products of ``nodes`` verified tokens."""
        products = nodes * 2 * self.parameters / self.device.matmul_rate
        return products * self.device.bandwidth / self.key_bytes


SHAPES = (
    Shape("7B, 32 K/V heads", 6.74e9, 32, 4096, 4096, 32000),
    Shape("8B, 8 K/V heads", 8.03e9, 32, 4096, 1024, 32000),
)


def choice(shape: Shape, rows: int, cached: int, levels: Sequence[torch.Tensor], most: int) -> dict[str, Any]:
    """Nodes and levels that the budget chooses, and the expected speed over plain decoding.

    Args:
        levels: acceptance probabilities of the candidates of each depth, from the root's.
        most: nodes of a tree, at most.
    """
    now = [0.0]
    depth = len(levels) - 1
    budget = Budget(shape.seconds, rows, [True], depth, most, lambda: now[0])
    nodes, passes, tokens, seconds = 1, 0, 1.0, 0.0
    for _ in range(RETRY - 1):  # the first steps ask in any case
        budget.start([cached] * rows, [True] * rows)
        nodes, passes, tokens, drafting = 1, 0, 1.0, 0.0
        if budget.asks(0):
            began, candidates, depths = now[0], levels[0], torch.zeros(1)
            for level in range(1, depth + 1):
                now[0] += shape.pass_seconds(rows, cached, 1 if level == 1 else BEAM)
                candidates = torch.cat([candidates, levels[level]])
                depths = torch.cat([depths, torch.full((len(levels[level]),), float(level))])
                passes = level
                if level == depth or not budget.another_level(0, candidates[None], depths[None]):
                    break
            budget.proposed(0, candidates[None])
            nodes, drafting = budget.keep(candidates[None]), now[0] - began
            tokens = float(candidates.sort(descending=True).values[:nodes].sum())
        seconds = drafting + shape.seconds(rows, cached, nodes)
    speed = tokens / seconds * shape.seconds(rows, cached, 1)
    chosen = {"nodes": nodes, "levels": passes, "tau": round(tokens, 3), "speedup": round(speed, 3)}
    return {"batch": rows, "cached": cached} | chosen


def of_itself(shape: Shape, rows: int, cached: int) -> dict[str, Any]:
    """The number of tokens that the target drafts itself over :data:`ENTRIES` entries, 0 where plain decoding is the
    fastest, and its expected speed."""
    alpha = min(0.84, 0.84 - 0.05 * math.log(cached / 4096) / math.log(100_000 / 4096))
    settings = [Setting("snapkv", ENTRIES, drafts) for drafts in range(1, MOST + 1)]
    predictions = [predict(shape.seconds, rows, cached, each, [alpha] * MOST) for each in settings]
    best = max(range(MOST), key=lambda number: predictions[number].speedup)
    speed = predictions[best].speedup
    pays = speed > 1 and cached > ENTRIES
    tokens = predictions[best].tokens if pays else 1.0
    chosen = {"nodes": best + 2 if pays else 1, "levels": best + 1 if pays else 0, "tau": round(tokens, 3)}
    return {"batch": rows, "cached": cached} | chosen | {"speedup": round(max(speed, 1.0), 3)}


def levels_of(ranks: Sequence[float], depth: int, most: int) -> list[torch.Tensor]:
    """The likeliest candidates of each depth, if each child's probability depends on its rank alone."""
    levels, children = [torch.ones(1)], torch.tensor(ranks)
    for _ in range(depth):
        levels.append((levels[-1][:BEAM, None] * children).flatten().sort(descending=True).values[:most])
    return levels


def plot(facts: dict[str, Any], path: Path) -> None:
    """Expected speed-up as a colour and chosen nodes as a number, by batch and length."""
    with picture(path, 19, 4.6, len(facts["shapes"])) as axes:
        for axis, (name, cells) in zip(axes, facts["shapes"].items(), strict=True):
            grid = torch.full((len(LENGTHS), len(BATCHES)), torch.nan)
            for each in cells:
                at = LENGTHS.index(each["cached"]), BATCHES.index(each["batch"])
                grid[at] = each["speedup"]
                dark = each["speedup"] < 2.2
                axis.text(at[1], at[0], each["nodes"], ha="center", va="center", color="white" if dark else "black")
            shown = axis.imshow(grid.numpy(), origin="lower", aspect="auto", vmin=1, vmax=3.5, cmap="viridis")
            axis.set_title(f"{name}, H200 by the roofline")
            axis.set_xticks(range(len(BATCHES)), [str(rows) for rows in BATCHES])
            axis.set_yticks(range(len(LENGTHS)), [f"{cached // 1024}k" for cached in LENGTHS])
            axis.set_xlabel("texts in the batch")
            axis.set_ylabel("cached tokens of each")
            axis.grid(False)
            axis.figure.colorbar(shown, ax=axis, label="expected speed over plain decoding (number: nodes)")


def plot_itself(facts: dict[str, Any], path: Path) -> None:
    """Self-speculation: expected speed-up by batch for each length, with published ones; measured ones of the bundled
    target, from :data:`MEASURED`."""
    with picture(path, 12, 4.6, 2, sharey=True) as (expected, measured):
        for cached in LENGTHS:
            cells = [each for each in facts["itself"] if each["cached"] == cached]
            expected.plot([each["batch"] for each in cells], [each["speedup"] for each in cells], marker="o",
                          label=f"{cached // 1024}k tokens")  # fmt: skip
        for gpu, mark in (("A100", "x"), ("H100", "+")):
            own = [each for each in facts["eight"] if each["gpus"] == gpu]
            for name, style in (("speedup", ":"), ("published", "")):
                points = [each["batch"] for each in own], [each[name] for each in own]
                what = "predicted" if style else "published"
                expected.plot(*points, mark + style, color="black", label=f"8 {gpu}, 32k: {what}")
        star = facts["inflection"]
        expected.set_title(f"Predicted: Llama-3.1-8B on an H200 (S* = {star:,.0f} tokens)")
        found: dict[str, list[tuple[int, float, float, float]]] = {}
        for each in json_object(MEASURED)["magicdec-batch"][0]["figures"]:
            if cell := re.fullmatch(r"speed-up, (\d+) tokens, (\d+) rows", each["what"]):
                low, high = (abs(bound - each["value"]) for bound in each["interval"])
                found.setdefault(f"{int(cell[1]):,} tokens", []).append((int(cell[2]), each["value"], low, high))
        for name, own in found.items():
            rows, speedups, lows, highs = zip(*own, strict=True)
            measured.errorbar(rows, speedups, (lows, highs), marker="o", capsize=3, label=name)
        measured.set_title("Measured: bundled target (4 M), two cores, K = 256")
        for axis in (expected, measured):
            axis.axhline(1, color=GREY, linewidth=1)
            axis.set(xscale="log", xlabel="texts in the batch", ylabel="speed over plain decoding")
            axis.set_xticks(BATCHES, [str(rows) for rows in BATCHES])
            axis.minorticks_off()
            axis.legend(frameon=False, fontsize=8, ncols=2 if axis is expected else 1)


def main() -> None:
    args = parser().parse_args()
    check(args)
    levels = levels_of(args.ranks, args.depth, args.nodes)
    found = {
        shape.name: [
            choice(shape, rows, cached, levels, args.nodes)
            for cached in LENGTHS
            for rows in BATCHES
            if shape.fits(rows, cached)
        ]
        for shape in SHAPES
    }
    (shape,) = SHAPES[1:]
    found[f"{shape.name}, itself over {ENTRIES} entries"] = [
        of_itself(shape, rows, cached) for cached in LENGTHS for rows in BATCHES if shape.fits(rows, cached)
    ]
    for name, cells in found.items():
        table = table_of("cached tokens", *(f"B {rows}" for rows in BATCHES))
        for cached in LENGTHS:
            by_rows = {each["batch"]: each for each in cells if each["cached"] == cached}
            table.add_row(
                f"{cached:,}",
                *(f"{by_rows[b]['nodes']} ({by_rows[b]['speedup']:.2f} ×)" if b in by_rows else "–" for b in BATCHES),
            )
        print_table(table, f"{name}: nodes, and expected speed over plain decoding; –: does not fit into the memory")
    itself, eight = list(found.values())[-1], list[dict[str, Any]]()
    table = table_of("eight GPUs", "texts", "γ predicted", "speed-up predicted", "γ published", "speed-up published")
    for gpu, rows, drafts, speedup in PUBLISHED:
        own = of_itself(replace(shape, device=EIGHT[gpu]), rows, 32_000)
        eight.append(own | {"gpus": gpu, "published": speedup})
        table.add_row(gpu, str(rows), str(own["levels"]), f"{own['speedup']:.2f}", str(drafts), f"{speedup:.2f}")
    print_table(table, "Llama-3.1-8B as its own drafter after 32,000 tokens")
    if args.out:
        facts = {"ranks": args.ranks, "depth": args.depth, "nodes": args.nodes, "shapes": found}
        write_report(args.out, facts, plot)
        own = args.out.with_name(f"{args.out.stem}-itself.json")
        write_report(own, {"itself": itself, "eight": eight, "inflection": shape.inflection(4)}, plot_itself)


if __name__ == "__main__":
    run_command(main)
