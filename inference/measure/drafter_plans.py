"""Plans of which drafter pays, of several kinds: draft models of any size and EAGLE drafters, over their whole cache or
a compressed one, and the target itself over a compressed one (MagicDec, arXiv 2408.11049 §3).

For B rows with S cached tokens each, by drafter, selector, number of entries K and drafted tokens γ,

    speed-up = E · T_plain / (T_step + T_select),   E = 1 + α₁ + α₁ α₂ + … + α₁ … α_γ

T_plain and T_step are times of whole steps on this machine, at B and S: plain ones, and those that draft γ tokens. What
a step takes does not depend on the texts, so that their caches hold zeros. Of T_step, T_verify is the time of the
target with γ + 1 nodes, T_draft the rest. α by depth is counted after texts of S tokens, others than those to be
decoded.

Shape letters: B rows, S cached tokens, K entries, γ drafted tokens of a step.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.compressed import APPENDED, CompressedDrafter, Selector
from draftsmith.inference.drafters.draft_model import DraftModelDrafter
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.load import open_named
from draftsmith.inference.drafters.names import DRAFT_MODEL, draft_model_of, folder_of
from draftsmith.inference.engine.prompts import PREFILL_CHUNK, Chunk
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.engine.step import Step, capacity_for, on_device, static_by_default
from draftsmith.inference.measure.planning import acceptance_by_depth, expected_tokens, least_alpha
from draftsmith.inference.measure.prefilled import MOST, Prefilled, by_depth, windows
from draftsmith.inference.measure.step_costs import StepClock, chain_step
from draftsmith.models.target import Target

TIMED = (1, 2, 4, 8)  # drafted tokens of steps that are timed; between them times are linear
ROUNDS = 3
REPEATS, MOST_REPEATS, SECONDS = 2, 20, 0.05  # steps of a round, at least, and until a limit of time
ALL = tuple(range(1, MOST + 1))
PLAIN = {"speedup": 1.0, "tokens": 1.0, "verify": 1.0, "draft": 0.0, "select": 0.0, "least_alpha": None}


@dataclass(frozen=True)
class Candidate:
    """A drafter to choose.

    name: as decode.py takes it, without its chain. make: γ → the drafter. drafts: the γ to choose from; of a drafter
    with its own tree, the depth of that.
    """

    name: str
    make: Callable[[int], Drafter]
    drafts: Sequence[int] = ALL
    selector: Selector | None = None
    own_tree: bool = False

    def option(self, drafts: int) -> str:
        """As decode.py takes it."""
        return self.name if self.own_tree else f"{self.name}@{','.join('1' * drafts)}"


@dataclass(frozen=True)
class Accepted:
    """Of a candidate after texts of one length: α by depth, and seconds in which one row's entries are selected."""

    alpha: list[float]
    select: float


def candidates(
    target: Target, drafters: Sequence[str], selectors: Sequence[str], entries: Sequence[int], options: dict[str, Any]
) -> list[Candidate]:
    """The target over each compressed cache, and each drafter over its whole cache and the compressed ones.
    ``options``: with which the target was loaded.

    Raises:
        FileNotFoundError, ValueError: a drafter is missing, or none that can be planned.
    """
    caches = [Selector(*each) for each in itertools.product(selectors, entries)]
    found = [Candidate(_named("", each)[1:], partial(_of_target, target, each), selector=each) for each in caches]
    for name in drafters:
        _, drafter = open_named(name, target, None, "auto", options)
        if isinstance(drafter, DraftModelDrafter) and drafter.num_nodes == drafter.max_depth + 1:
            found += _of_draft_model(name, drafter, target, caches)
        elif isinstance(drafter, EagleDrafter) and max(folder_of(name)[2] or (1,)) == 1:
            found += _of_eagle(name, drafter, caches)
        else:
            raise ValueError(
                f"--drafters {name}: plans are of chains of draft_model:PATH and of folders of EAGLE drafters, beside "
                "the target itself; compare others by decode.py --prompts"
            )
    return found


def _named(name: str, cache: Selector | None) -> str:
    return name if cache is None else f"{name},{cache.name}:{cache.entries}"


def _of_target(target: Target, cache: Selector, drafts: int) -> Drafter:
    return CompressedDrafter(target, cache, (1,) * drafts)


def _of_draft_model(
    name: str, drafter: DraftModelDrafter, target: Target, caches: Sequence[Selector]
) -> list[Candidate]:
    path, children, given = draft_model_of(name)
    found: list[Candidate] = []
    for cache in [Selector(*given)] if given else [None, *caches]:
        try:
            over = DraftModelDrafter(drafter.model, target, (1,), selector=cache)
        except ValueError as error:  # its sinks cannot be rotated
            console.print(f"left out: {error}", markup=False, highlight=False, soft_wrap=True)
            continue

        def make(drafts: int, over: DraftModelDrafter = over) -> Drafter:
            return over.with_tree((1,) * drafts)

        drafts = [len(children)] if "@" in name else ALL
        found.append(Candidate(_named(DRAFT_MODEL + path, cache), make, drafts, cache))
    return found


def _of_eagle(name: str, drafter: EagleDrafter, caches: Sequence[Selector]) -> list[Candidate]:
    """Chains, and unless the name gives one its own tree; of a drafter of one pass, or of several layers, over its
    whole cache alone."""
    folder, given, children = folder_of(name)
    found: list[Candidate] = []
    in_one_pass = drafter.eagle.config.parallel
    lengths = [len(children)] if children else ALL[: in_one_pass or MOST]
    others = [] if in_one_pass or drafter.eagle.config.num_layers > 1 else [each for each in caches if each.sinks]
    for cache in [Selector(*given)] if given else [None, *others]:

        def chain(drafts: int, cache: Selector | None = cache) -> Drafter:
            return drafter.with_tree((1,) * drafts, selector=cache)

        def tree(drafts: int, cache: Selector | None = cache) -> Drafter:
            return drafter if cache == drafter.selector else drafter.with_tree(drafter.tree, selector=cache)

        found.append(Candidate(_named(folder, cache), chain, lengths, cache))
        if not children:
            found.append(Candidate(_named(folder, cache), tree, [drafter.max_depth], cache, own_tree=True))
    return found


def accepted(
    target: Target, chosen: Sequence[Candidate], texts: Sequence[list[int]], new_tokens: int, lean: bool | None
) -> list[Accepted]:
    """What is accepted of each candidate's drafts after these texts, one at a time."""
    counts = [torch.zeros(max(each.drafts), 2) for each in chosen]
    selects, captures = [math.inf] * len(chosen), captures_of(chosen)
    for text in texts:
        batch = Prefilled(target, [text], new_tokens, captures, lean)
        for place, each in enumerate(chosen):
            run = batch.run(batch.step(each.make(max(each.drafts))))
            counts[place] += torch.tensor(by_depth(run.committed, len(counts[place])))
            selects[place] = min(selects[place], run.select)
    return [Accepted(acceptance_by_depth(of), select) for of, select in zip(counts, selects, strict=True)]


def captures_of(chosen: Sequence[Candidate]) -> list[int] | None:
    """The target's layers whose inputs they read; None if they read no features at all."""
    drafters = [each.make(1) for each in chosen if not each.own_tree]
    layers = {layer for drafter in drafters for layer in drafter.captures}
    return sorted(layers) if any(isinstance(drafter, EagleDrafter) for drafter in drafters) else None


def drafted_step_seconds(target: Target, drafter: Drafter, rows: int, cached: int, lean: bool | None) -> float:
    """Seconds of a step of ``rows`` texts of ``cached`` tokens that drafts all of a drafter's nodes."""
    capacity, static = capacity_for(cached, drafter), static_by_default(target)
    step = Step(target, drafter, "greedy", rows, capacity, static=static, lean=lean)
    step.active.fill_(True)
    if not isinstance(drafter, DraftModelDrafter):  # which would run the texts, and whose cache holds zeros anyway
        width = step.state.feature.shape[1]
        for row, start in itertools.product(range(rows), range(0, cached, PREFILL_CHUNK)):
            count = min(PREFILL_CHUNK, cached - start)
            features = torch.zeros(count, width, dtype=target.dtype, device=target.device)
            drafter.prefill(features, Chunk.of([(row, start, [0] * count)], target.device))
    drafter.begin(slice(0, rows))
    return shortest(step, cached)


def shortest(step: Step, cached: int) -> float:
    """Seconds of the shortest of several steps whose rows have ``cached`` tokens; the first one, which selects entries,
    allocates, and captures a graph, does not count."""
    seconds: list[float] = []
    while len(seconds) < 1 + REPEATS or (len(seconds) < MOST_REPEATS and sum(seconds[1:]) < SECONDS):
        step.cache.lengths.fill_(cached)
        seconds.append(StepClock().timed(lambda: step.launch()(), step.device)())
    return min(seconds[1:])


Drafted = Callable[[int], tuple[float, float]]


@dataclass
class StepTimes:
    """Seconds of steps of B rows with S cached tokens each. All steps are timed in turn in several rounds, and the
    shortest of each counts. So other work, which comes and goes, meets all of them: of a step that is timed more often
    the shortest would be that of a better minute.

    plain: of a plain step; if a larger one was faster, that one's.
    drafted: for each candidate (T_step, T_verify) by γ. A step holds its verification, which takes no longer.
    """

    target: Target
    rows: int
    cached: int
    lean: bool | None

    def measure(self, chosen: Sequence[Candidate]) -> "StepTimes":
        points = [sorted({*TIMED} & {*each.drafts} | {max(each.drafts)}) for each in chosen]
        drafters = [[each.make(n) for n in numbers] for each, numbers in zip(chosen, points, strict=True)]
        nodes = {1, *(drafter.num_nodes for each in drafters for drafter in each)}
        timed: list[Callable[[], float]] = [partial(self._verification, size) for size in nodes]
        shape = self.rows, self.cached, self.lean
        timed += [partial(drafted_step_seconds, self.target, own, *shape) for each in drafters for own in each]
        shortest_of = np.min([[one() for one in timed] for _ in range(ROUNDS)], axis=0).tolist()
        by_nodes, steps = dict(zip(nodes, shortest_of, strict=False)), iter(shortest_of[len(nodes) :])
        self.plain, self.drafted = min(by_nodes.values()), list[Drafted]()
        for own, numbers in zip(drafters, points, strict=True):
            step = np.minimum.accumulate([next(steps) for _ in own][::-1])[::-1]
            verify = np.minimum([by_nodes[drafter.num_nodes] for drafter in own], step)
            self.drafted.append(partial(_between, numbers, step, verify))
        return self

    def _verification(self, nodes: int) -> float:
        return shortest(chain_step(self.target, self.lean, self.rows, self.cached, nodes), self.cached)


def _between(points: Sequence[int], step: Any, verify: Any, drafts: int) -> tuple[float, float]:
    return float(np.interp(drafts, points, step)), float(np.interp(drafts, points, verify))


def predicted(
    each: Candidate, own: Accepted, seconds: Drafted, rows: int, plain: float, new_tokens: int
) -> list[dict[str, Any]]:
    """What each γ of a candidate is expected to give; times are in plain steps, and verification takes one at least, so
    that no speed-up is above E. The first selection counts with the prefill; others are made after every 256 new
    tokens, by topk in each step."""
    found: list[dict[str, Any]] = []
    for drafts in each.drafts:
        step, verify = seconds(drafts)
        tokens, selecting = expected_tokens(own.alpha[:drafts]), 0.0
        if each.selector is not None and (each.selector.name == "topk" or new_tokens > APPENDED):
            share = 1.0 if each.selector.name == "topk" else tokens / APPENDED
            selecting = own.select * rows * share
        parts = {
            "verify": max(1.0, verify / plain),
            "draft": max(0.0, step - verify) / plain,
            "select": selecting / plain,
        }
        cost = sum(parts.values())
        figures = {"speedup": tokens / cost, "tokens": tokens, **parts, "least_alpha": least_alpha(cost, drafts)}
        rounded = {name: round(value, 4) for name, value in figures.items()}
        alpha = [round(alpha, 4) for alpha in own.alpha[:drafts]]
        found.append({"drafter": each.option(drafts), **rounded, "alpha": alpha, "seconds": round(step, 6)})
    return found


def plan_drafters(
    target: Target,
    chosen: Sequence[Candidate],
    contexts: Sequence[int],
    batches: Sequence[int],
    texts: Mapping[int, Sequence[list[int]]] | int,
    new_tokens: int,
    lean: bool | None,
) -> dict[str, Any]:
    """Measure and plan: what PLAN.json holds. ``texts``: for acceptance, by context; or how many held-out modules of
    each length."""
    cells: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    models = {id(model): model for each in chosen for model in each.make(max(each.drafts)).models}
    with (
        ProgressBar("planning", len(contexts) * (1 + len(batches)), console, transient=True) as advance,
        torch.inference_mode(),
        on_device(target.device),
        engine_attention([target, *models.values()]),
    ):
        done = itertools.count(1)
        for context in contexts:
            own = [each for each in chosen if each.selector is None or each.selector.entries < context]
            if not own:
                raise ValueError(f"--contexts {context}: all caches hold as many entries or more; give fewer --entries")
            read = windows(target, "books", texts, context) if isinstance(texts, int) else texts[context]
            found = accepted(target, own, read, new_tokens, lean)
            measured += [
                {"context": context, "drafter": each.option(max(each.drafts)), **vars(of)}
                for each, of in zip(own, found, strict=True)
            ]
            advance(next(done))
            for rows in batches:
                times = StepTimes(target, rows, context, lean).measure(own)
                options = [
                    predicted(each, of, seconds, rows, times.plain, new_tokens)
                    for each, of, seconds in zip(own, found, times.drafted, strict=True)
                ]
                best = [max(each, key=lambda option: option["speedup"]) for each in options]
                best.append({"drafter": "none", **PLAIN, "alpha": [], "seconds": round(times.plain, 6)})
                best.sort(key=lambda option: -option["speedup"])
                cell = {"batch": rows, "context": context, **best[0], "second": best[1]}
                cells.append(cell | {"options": [*itertools.chain(*options)]})
                advance(next(done))
    cells.sort(key=lambda cell: (batches.index(cell["batch"]), contexts.index(cell["context"])))
    return {"target": target.describe(), "cells": cells, "measured": measured}
