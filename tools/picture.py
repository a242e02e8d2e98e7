"""Draw docs/demo.png, the picture of the README: a decoded text as a terminal shows it, above the demo's measurements.

    python tools/picture.py                  # after `make demo`
    python tools/picture.py runs/bench       # after the decoding of `make bench`

The text is what `inference/decode.py` writes to a terminal of its own, with the colours of what was drafted and
accepted. The measurements are those of the folder's report.json files.
"""

import argparse
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from rich.ansi import AnsiDecoder
from rich.console import Console

from draftsmith.common.command import run_command

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, WIDTH, DPI = 100, 16.0, 100  # characters of a line; inches of the picture; pixels per inch
BACKGROUND, PLAIN, DIM, GREEN, CYAN = "#14171c", "#e4e7ec", "#8d95a3", "#52d683", "#5cc8e8"
ANSI = {2: GREEN, 6: CYAN}  # by the number of the terminal's colour
BARS = {"baseline": "#b8bcc6", "medusa": "#7fb895", "ngram": "#5a8fc4", "merged": "#2f7d4f"}


def terminal_output(arguments: list[str]) -> str:
    """What a command writes to a terminal, colours included, stdout and stderr together. Raises RuntimeError: it
    failed."""
    ours, its = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=its, stderr=its)
    os.close(its)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    text = written.decode().replace("\r\n", "\n")
    if process.wait():
        raise RuntimeError(f"{shlex.join(arguments)}: {text.strip()}")
    return text


def styled_lines(text: str) -> list[list[tuple[str, str]]]:
    """Lines of at most ``COLUMNS`` characters, each as pieces of one colour: (text, colour)."""
    console = Console()
    lines = []
    for line in AnsiDecoder().decode(text.rstrip("\n")):
        shown = []
        for place, character in enumerate(line.plain):
            style = line.get_style_at_offset(console, place)
            number = style.color.number if style.color is not None else None
            known = None if number is None else ANSI.get(number)
            shown.append((character, known or (DIM if style.dim else PLAIN)))
        for begin in range(0, max(1, len(shown)), COLUMNS):
            pieces = groupby(shown[begin : begin + COLUMNS], key=lambda pair: pair[1])
            lines.append([("".join(character for character, _ in piece), colour) for colour, piece in pieces])
    return lines


def draw_terminal(axes: Axes, lines: list[list[tuple[str, str]]], points: float) -> None:
    """Lines of text in a dark window; ``points`` is the size of the font."""
    axes.set_xlim(-2, COLUMNS + 2)
    axes.set_ylim(len(lines) + 0.7, -0.7)
    axes.axis("off")
    corners: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.012", "mutation_aspect": 1.8}
    axes.add_patch(FancyBboxPatch((0, 0), 1, 1, transform=axes.transAxes, color=BACKGROUND, clip_on=False, **corners))
    font: dict[str, Any] = {"family": "monospace", "size": points, "va": "baseline", "parse_math": False}
    for row, pieces in enumerate(lines):
        column = 0
        for text, colour in pieces:
            for word in re.finditer(r"\S+", text):
                axes.text(column + word.start(), row + 0.75, word[0], color=colour, **font)
            column += len(text)


def kind(drafter: str) -> str:
    """Which of ``BARS`` a drafter's name belongs to."""
    return "merged" if "+" in drafter else "ngram" if drafter.startswith("ngram") else "medusa"


def label(drafter: str) -> str:
    """A drafter's name for people."""
    return {"merged": "Medusa heads + n-grams", "ngram": "n-grams", "medusa": "Medusa heads"}[kind(drafter)]


def draw_speeds(axes: Axes, reports: list[dict[str, Any]]) -> None:
    """Tokens per second of every method, with its speed-up over transformers.generate and the 95 % interval."""
    baselines = reports[0]["baselines"]
    rows = [("transformers.generate", baselines["transformers"]["tokens_per_second"], "1.0 ×", "baseline")]
    speed = baselines["prompt_lookup"]["tokens_per_second"]
    rows.append(("its prompt lookup", speed, f"{speed / rows[0][1]:.1f} ×", "baseline"))
    engine = {"drafter": "none", **baselines["engine"]}
    for report in (engine, *reports):
        low, high = report["speedup_vs_transformers_interval"]
        said = f"{report['speedup_vs_transformers']:.1f} × ({low:.1f}–{high:.1f})"
        plain = report is engine
        name = "draftsmith, plain" if plain else label(report["drafter"])
        rows.append((name, report["tokens_per_second"], said, "baseline" if plain else kind(report["drafter"])))
    names, speeds, ratios, kinds = zip(*rows, strict=True)
    drawn = axes.barh(range(len(rows)), speeds, color=[BARS[each] for each in kinds], height=0.72)
    axes.bar_label(drawn, [f"{v:.0f}   {ratio}" for v, ratio in zip(speeds, ratios, strict=True)], padding=6, size=14)
    axes.set_yticks(range(len(rows)), names, size=15)
    axes.invert_yaxis()
    axes.set_xlim(0, max(speeds) * 1.42)
    axes.set_xticks([])
    axes.set_title("Tokens per second, × transformers.generate (95 % interval)", size=15, loc="left", pad=12)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


def draw_lengths(axes: Axes, reports: list[dict[str, Any]]) -> None:
    """How many tokens a step commits, for each drafter, as a share of its steps."""
    width = 0.8 / len(reports)
    longest = 1
    for number, report in enumerate(reports):
        histogram = {int(length): count for length, count in report["accepted_length_histogram"].items()}
        total, longest = sum(histogram.values()), max(longest, *histogram)
        axes.bar(
            [length + (number - (len(reports) - 1) / 2) * width for length in histogram],
            [100 * count / total for count in histogram.values()],
            width,
            color=BARS[kind(report["drafter"])],
            label=f"{label(report['drafter'])}: {report['mean_accepted_length']:.2f}",
        )
    axes.set_xticks(range(1, longest + 1))
    axes.tick_params(labelsize=13)
    axes.set_ylabel("% of steps", size=14)
    axes.set_title("Tokens committed per step of the target", size=15, loc="left", pad=12)
    axes.legend(title="mean", frameon=False, fontsize=14, title_fontsize=14)
    axes.spines[["top", "right"]].set_visible(False)


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """The reports below a run folder, the simplest drafter first; the folder's own if there is but one. Raises
    FileNotFoundError: there is none."""
    paths = sorted(folder.glob("*/report.json")) or [folder / "report.json"]
    if not paths[0].exists():
        raise FileNotFoundError(f"{folder}: no report.json; run `make demo` first")
    reports = [json.loads(path.read_text()) for path in paths]
    return sorted(reports, key=lambda report: ["medusa", "ngram", "merged"].index(kind(report["drafter"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default=Path("runs/chats"), help="a run folder with reports")
    parser.add_argument("--drafter", default="models/smollm2-medusa+ngram", help="which decodes the text")
    parser.add_argument("--prompt", default="Write a short letter to invite a friend.")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/demo.png")
    args = parser.parse_args()
    reports = read_reports(args.run)
    command = ["inference/decode.py", args.drafter, "--prompt", args.prompt]
    command += ["--max-new-tokens", str(args.max_new_tokens)]
    text = terminal_output(command)
    typed = f"$ python {shlex.join(command)}"
    written = [line for line in styled_lines(text) if not line or not line[0][0].startswith("precision:")]
    lines = [*([(part, PLAIN)] for part in textwrap.wrap(typed, COLUMNS)), *written]

    plt.switch_backend("Agg")
    plt.rcParams["text.hinting"] = "none"  # else letters are rounded to whole pixels and leave their columns
    line_height, chart = 0.32, 3.9  # inches
    terminal = line_height * (len(lines) + 1.4)
    height = terminal + chart + 1.35
    figure = plt.figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    inches = (1 / WIDTH, 1 / height)

    def place(left: float, top: float, width: float, tall: float) -> Axes:
        """Axes by inches from the upper left corner."""
        return figure.add_axes((left * inches[0], 1 - (top + tall) * inches[1], width * inches[0], tall * inches[1]))

    points = (WIDTH - 0.4) * 72 / (COLUMNS + 4) / 0.602  # DejaVu Sans Mono is 0.602 em wide
    draw_terminal(place(0.2, 0.2, WIDTH - 0.4, terminal), lines, points)
    draw_speeds(place(2.95, terminal + 0.85, 6.0, chart - 0.3), reports)
    draw_lengths(place(10.1, terminal + 0.85, 5.6, chart - 0.3), reports)
    first = reports[0]
    said = f"{first['target']}, {first['prompts']} prompts × {first['max_new_tokens']} tokens, {first['mode']}, "
    said += f"{first['dtype']}, {first['device']}."
    if all(report["lossless"] and report["lossless"]["identical"] for report in reports):
        said += f" {first['lossless']['checked']} tokens checked with each drafter: all are the target's own."
    figure.text(0.5, 0.12 * inches[1], said, size=13, color="#555b66", ha="center")
    figure.savefig(args.out, dpi=DPI)
    print(f"wrote {args.out} ({args.out.stat().st_size / 1000:.0f} kB)")


if __name__ == "__main__":
    run_command(main)
