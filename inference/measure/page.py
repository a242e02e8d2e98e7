"""The report as one HTML page without external files: figures by kind of text, the token tree with the acceptance of
its nodes, and texts whose tokens show what their step's tree held."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftsmith.common.command import counted
from draftsmith.common.pages import render
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.names import short_name
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.text import decode_text
from draftsmith.inference.measure.paired import MIN_PAIRS
from draftsmith.inference.measure.report import LABELS, WITHOUT_DRAFTS, exactness, intervals_line
from draftsmith.inference.measure.trace import Ranks, Trace, acceptance_by_ranks, trace, traced

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN_NODES = 40  # of the picture of the tree
PROMPT = 240  # characters of a prompt that are shown, the last ones
TAU = "mean_accepted_length"  # of a report
COLUMN, ROW, RADIUS = 104, 24, 10  # pixels of that picture, between nodes; of a node that every step accepts


def tree_picture(held: dict[Ranks, tuple[int, int]]) -> dict[str, Any]:
    """Places of the nodes that are accepted most often, with the lines to their parents: depth to the right, the best
    child of a node beside it. ``held``: as :func:`acceptance_by_ranks` returns it."""
    steps = held[()][0]
    # A node is accepted in no more steps than its parent, so that parents are among the shown ones.
    shown = sorted(held, key=lambda path: (-held[path][1], len(path), path))[: SHOWN_NODES + 1]
    rows: dict[Ranks, int] = {(): 0}
    last, begun = 0, set[Ranks]()  # nodes with a child whose row is known
    for path in sorted(shown)[1:]:  # depth first, best rank first
        last += path[:-1] in begun
        rows[path] = last if path[:-1] in begun else rows[path[:-1]]
        begun.add(path[:-1])
    nodes: list[dict[str, Any]] = []
    for path in sorted(shown):
        count, accepted = held[path]
        nodes.append(
            {
                "x": 14 + COLUMN * len(path),
                "y": 14 + ROW * rows[path],
                "from": (14 + COLUMN * (len(path) - 1), 14 + ROW * rows[path[:-1]]) if path else None,
                "radius": round(2 + RADIUS * math.sqrt(accepted / steps), 1),
                "share": accepted / steps,
                "ranks": "root" if not path else "rank " + ", ".join(str(rank + 1) for rank in path),
                "held": count,
                "accepted": accepted,
            }
        )
    deepest = max(map(len, shown))
    return {
        "nodes": nodes,
        "width": COLUMN * deepest + 90,
        "height": ROW * (last + 1) + 10,
        "left_out": len(held) - len(shown),
    }


def shown_texts(traces: Sequence[Trace], prompts: Sequence[str], kinds: Sequence[str | None]) -> list[dict[str, Any]]:
    """The traced texts as the page shows them: of each token its text, the number of its source (from 1; 0: the
    target's own), its step, and its place in the step (from 1)."""
    return [
        {
            "prompt": prompt,
            "kind": kind,
            "tokens": [
                (text, (bits & -bits).bit_length(), step, place + 1) for text, bits, step, place in each.tokens if text
            ],
        }
        for each, prompt, kind in zip(traces, prompts, kinds, strict=True)
    ]


def _render(
    reports: Sequence[dict[str, Any]],
    number: int,
    traces: Sequence[Trace],
    texts: list[dict[str, Any]],
    sources: list[str],
) -> str:
    """The page of one drafter, the one with this number among the reports."""
    report = reports[number]
    held = acceptance_by_ranks(traces)
    return render(
        TEMPLATE,
        report=report,
        reports=reports,
        number=number,
        name=short_name(report["drafter"]),
        exactness=exactness,
        counted=counted,
        enough=MIN_PAIRS,
        intervals_line=intervals_line(report),
        labels=LABELS,
        without_drafts=WITHOUT_DRAFTS,
        sources=sources,
        texts=texts,
        longest=max([1.0, *((k.get(f"{TAU}_interval") or [k[TAU] or 0.0])[-1] for k in report["kinds"].values())]),
        tree=tree_picture(held) if len(held) > 1 else None,
        steps=[each.steps for each in traces],
    )


def render_pages(
    reports: Sequence[dict[str, Any]],
    decoders: Sequence[SpeculativeDecoder],
    prompts: Sequence[list[int]],
    kinds: Sequence[str | None],
    options_of: Callable[[list[int]], dict[str, Any]],
) -> list[str]:
    """The page of each drafter, for which some prompts are decoded once more (:func:`traced`), one at a time.

    Args:
        reports, decoders: of the drafters, in the same order.
        prompts, kinds: of the reports.
        options_of: arguments of ``generate`` for a prompt.
    """
    numbers = traced(kinds, len(decoders))
    total = len(numbers) * len(decoders)
    pages: list[str] = []
    with ProgressBar("texts of the page", total, console, transient=True) as advance:
        for place, decoder in enumerate(decoders):
            traces: list[Trace] = []
            for number in numbers:
                traces.append(trace(decoder, prompts[number], **options_of(prompts[number])))
                advance(len(pages) * len(numbers) + len(traces))
            tokenizer = decoder.target.tokenizer
            shown = [decode_text(tokenizer, prompts[n])[-PROMPT:] if tokenizer else str(prompts[n]) for n in numbers]
            sources = [Path(name).name for name in decoder.drafter.sources] or [short_name(reports[place]["drafter"])]
            texts = shown_texts(traces, shown, [kinds[n] for n in numbers])
            pages.append(_render(reports, place, traces, texts, sources))
    return pages
