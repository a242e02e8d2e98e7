"""The page of a training run, ``training.html`` in its folder: what metrics.jsonl holds, drawn over the steps; state
and remaining time; held-out text, with the ranks that the drafter gave to its tokens; recipe and environment.

It is written at each evaluation and when the run ends. Each page is drawn from metrics.jsonl alone, so that a resumed
run's page has the steps before, too.
"""

import contextlib
import datetime
import math
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch import Tensor

from draftsmith.common.command import first_line, make_console
from draftsmith.common.files import parse_json, write_text
from draftsmith.common.pages import render
from draftsmith.common.sections import Stage
from draftsmith.inference.engine.text import decode_text
from draftsmith.inference.measure.page import PROMPT, shown_texts
from draftsmith.inference.measure.trace import Trace, token_texts
from draftsmith.inference.measure.tree_statistics import MAX_RANK
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import provenance

if TYPE_CHECKING:
    from draftsmith.train.run import Run

NAME = "training.html"
TEMPLATE = Path(__file__).with_name("page.html")
TEXTS, TOKENS = 3, 160  # held-out texts that are shown; tokens of each, at most
POINTS = 240  # of a line in a chart, at most: then each is a mean of neighbours
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 500, 210, 52, 8, 10, 26  # of a chart, and its margins
TAU = {"simulated_tau", "tau", "tau_alone"}  # drawn together
TITLES = {"τ": "tokens per step (τ)", "lr": "learning rate", "data_wait": "share of the time waiting for data"}
NO_METRIC = ("step", "stage", "best")
LAST = ("lr", "tokens_per_second", "data_wait")

Points = list[tuple[int, float]]
console = make_console()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, none if there is no such file; one that was cut off is left out."""
    lines: list[dict[str, Any]] = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            lines.append(parse_json(line, str(file)))
    return lines


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers from ``low`` to ``high``."""
    unit = 10.0 ** math.floor(math.log10(high - low))
    for step in (2 * unit, unit, unit / 2, unit / 5):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first >= 2:
            break
    return [number * step for number in range(first, last + 1)]


def thinned(points: Points) -> Points:
    """At most :data:`POINTS` points: means of equally many neighbours; the last one is kept as it is."""
    size = -(-len(points) // POINTS)
    if size == 1:
        return points
    groups = [points[at : at + size] for at in range(0, len(points) - 1, size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups] + points[-1:]


def grouped(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[Points]]]:
    """Chart → metric → its points, in a list for each stage. A chart has the metrics whose names differ in the number
    of a head, step or depth alone, such as ``head*_loss``; those of τ come first, learning rate and speed last."""
    found: dict[str, dict[str, dict[str, Points]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in lines:
        for name, value in line.items():
            if name in NO_METRIC or not math.isfinite(value):
                continue
            chart = "τ" if name in TAU else re.sub(r"^([a-z]+)\d+_", r"\1*_", name)
            found[chart][name][line["stage"]].append((line["step"], value))
    first = ["τ", "loss", "validation_loss"]
    rank = {name: place - len(first) for place, name in enumerate(first)} | dict.fromkeys(LAST, 1)
    ordered = sorted(found, key=lambda name: (rank.get(name, 0), LAST.index(name) if name in LAST else 0))
    return {chart: {name: list(by.values()) for name, by in found[chart].items()} for chart in ordered}


def title_of(chart: str) -> str:
    """Words for the name of a chart: ``head*_held_out_top1`` → held-out top-1 accuracy of each head."""
    if chart in TITLES:
        return TITLES[chart]
    of, star, name = chart.rpartition("*_")
    words = re.sub(r"top(\d+)", r"top-\1 accuracy", name.replace("held_out", "held-out").replace("_", " "))
    return f"{words} of each {'draft step' if of == 'step' else of}" if star else words


def chart_of(name: str, metrics: dict[str, list[Points]], steps: int) -> dict[str, Any]:
    """What the template draws of a chart over steps 0 to ``steps``."""
    lines = {metric: [thinned(part) for part in parts] for metric, parts in metrics.items()}
    values = [value for parts in lines.values() for part in parts for _, value in part]
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)

    def x(step: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / steps, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low), 1)

    return {
        "name": name,
        "title": title_of(name),
        "y": [(y(tick), f"{tick:,.10g}" if abs(tick) < 1e6 else f"{tick:.3g}") for tick in ticks(low, high)],
        "x": [(x(int(tick)), f"{tick:,.0f}") for tick in ticks(0, steps) if tick == int(tick)],
        "lines": [
            {
                "name": metric,
                "paths": [" ".join(f"{x(step)},{y(value)}" for step, value in part) for part in parts],
                "dots": [(x(step), y(value)) for part in parts for step, value in part if len(part) <= 30],
            }
            for metric, parts in lines.items()
        ],
        "points": {
            metric: [
                (step, value if isinstance(value, int) else float(f"{value:.5g}")) for step, value in chain(*parts)
            ]
            for metric, parts in lines.items()
        },
    }


def text_of_ranks(tokens: Tensor, supervised: Tensor, ranks: Tensor, tree: Topology, tokenizer: Any) -> dict[str, Any]:
    """A held-out answer as its greedy decoding with this tree would go, from what an evaluation knows of it.

    Args:
        tokens, supervised: ``[T]``, with an answer.
        ranks: ``[T, K]``, as :func:`draftsmith.inference.measure.tree_statistics.head_ranks` returns them.

    Returns:
        its ``trace`` (its tokens), ``prompt``, and ``steps``: of each step its nodes, which are the true tokens, with
        what the drafter thought of them.
    """
    first = max(1, int(supervised.int().argmax()))
    last = first + 1
    while last < min(len(tokens), first + TOKENS) and supervised[last]:
        last += 1
    answer, of_answer = tokens[first:last].tolist(), ranks[first - 1 : last - 1].tolist()
    texts = token_texts(tokenizer, answer)
    alone = {t: token_texts(tokenizer, [t])[0] for t in set(answer)}
    held, steps = {(), *map(tuple, tree.paths)}, list[list[tuple[Any, ...]]]()
    shown, at = [(texts[0], 0, -1, 0)], 0  # at: the root of a step
    while at + 1 < len(answer):
        path = [rank for rank in of_answer[at][: len(answer) - at - 1] if rank >= 0]
        accepted = max(depth for depth in range(len(path) + 1) if tuple(path[:depth]) in held)
        nodes: list[tuple[Any, ...]] = [(-1, alone[answer[at]], 0, True)]
        for depth, rank in enumerate(path):
            note = f"rank {rank + 1}" if rank < MAX_RANK else f"not among the best {MAX_RANK}"
            nodes.append((depth, alone[answer[at + 1 + depth]], 1, depth < accepted, note))
        for place in range(min(accepted + 1, len(answer) - at - 1)):
            shown.append((texts[at + 1 + place], int(place < accepted), len(steps), place))
        steps.append(nodes)
        at += accepted + 1
    prompt = tokens[:first].tolist()
    before = decode_text(tokenizer, prompt)[-PROMPT:] if tokenizer is not None else str(prompt)
    return {"trace": Trace(shown), "prompt": before, "steps": steps}


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class TrainingPage:
    """Writes ``training.html`` into the folder of a run; on its main process only."""

    def __init__(self, run: "Run[Any]") -> None:
        self.run, self.texts = run, list[dict[str, Any]]()
        self.environment = provenance()
        self.stage: Stage | None = None  # the one in training, if any is
        self.best_on, self.at, self.ends, self.since = "", 0, 0, 0.0

    def begin(self, stage: Stage, start: int, best_on: str) -> None:
        """A stage begins at its step ``start``; its selection metric is ``best_on``."""
        self.stage, self.best_on = stage, best_on.removeprefix("-")
        self.at, self.since, self.ends = self.run.step, time.monotonic(), self.run.step - start + stage.num_steps

    def keep_texts(self, held_out: dict[str, Tensor], ranks: Tensor, tree: Topology, tokenizer: Any) -> None:
        """Show the first held-out rows with the ranks ``[S, T, K]`` of their tokens from the next page on."""
        tokens, supervised = held_out["tokens"].cpu(), held_out["supervised"].cpu()
        rows = [row for row in range(len(ranks)) if supervised[row, 1:].any()][:TEXTS]
        try:
            self.texts = [text_of_ranks(tokens[n], supervised[n], ranks[n].cpu(), tree, tokenizer) for n in rows]
        except Exception as problem:  # must stop no training, as in write
            console.print(f"  {NAME} keeps its texts ({first_line(problem)})")

    def write(self, state: str = "training", error: BaseException | None = None) -> None:
        """Write the page; where that fails, which must stop no training, the one before stays, and a line says why.

        Args:
            state: ``training``, ``finished``, ``stopped`` or ``failed``.
            error: that ended the run.
        """
        try:
            write_text(self.run.folder / NAME, self.html(state, error))
        except Exception as problem:  # of whatever kind, such as lines that another version wrote
            console.print(f"  {NAME} is not written ({first_line(problem)})")

    def html(self, state: str, error: BaseException | None = None) -> str:
        """The page's content; arguments as those of :meth:`write`."""
        run, lines, stage = self.run, read_lines(self.run.folder / "metrics.jsonl"), self.stage
        steps = [each.steps for each in run.recipe.stages]
        left, done = None, run.step - self.at
        if stage and state == "training" and done:
            left = duration((time.monotonic() - self.since) / done * (self.ends - run.step))
        last = max([1, *(line["step"] for line in lines)])
        charts = [chart_of(name, metrics, last) for name, metrics in grouped(lines).items()]
        evaluated = [line for line in lines if "best" in line]
        of_stage = [line for line in evaluated if stage and line["stage"] == stage.name and self.best_on in line]
        ends = {line["stage"]: line["step"] for line in lines}
        return render(
            TEMPLATE,
            run=run,
            state=state,
            error=first_line(error) if error else "",
            written=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
            stage=stage,
            number=run.place(stage) + 1 if stage else 0,
            step=run.step,
            all_steps=None if None in steps else sum(each or 0 for each in steps),
            left=left,
            charts=charts,
            size={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
            steps=last,
            points={chart["name"]: chart["points"] for chart in charts},
            starts=[
                (name, LEFT + (WIDTH - LEFT - RIGHT) * at / last)
                for name, at in zip(ends, [0, *ends.values()], strict=False)
            ],
            loss=next((line for line in reversed(lines) if "loss" in line), None),
            best=next((line for line in reversed(of_stage) if line["best"]), None),
            best_on=self.best_on,
            evaluated=evaluated[-12:],
            columns=[name for name in dict.fromkeys(chain(*evaluated[-12:])) if name not in NO_METRIC],
            texts=shown_texts(
                [text["trace"] for text in self.texts],
                [text["prompt"] for text in self.texts],
                [f"held-out text {place + 1}" for place in range(len(self.texts))],
            ),
            text_steps=[text["steps"] for text in self.texts],
            environment=self.environment,
            recipe=yaml.safe_dump(run.recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
        )
