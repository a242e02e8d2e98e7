"""Plans of self-speculation over a compressed cache (MagicDec, arXiv 2408.11049 §3): predicted and measured.

Of B rows with S cached tokens each, K entries and γ drafted tokens of a step,

    speed-up = E · T(B, S, 1) / (γ · T(B, K, 1) + T(B, S, γ + 1) + T_select),   E = 1 + α₁ + α₁ α₂ + … + α₁ … α_γ

Step costs T are measured on this machine. Acceptance α by depth is measured, by selector and K, on what the target
itself writes after texts of each length.

Shape letters: B rows, S cached tokens, K entries, γ drafted tokens of a step.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.common.command import counted
from draftsmith.common.files import json_object
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.compressed import APPENDED, CompressedDrafter, Selector
from draftsmith.inference.drafters.names import TRIED
from draftsmith.inference.engine.runner import engine_attention
from draftsmith.inference.engine.step import on_device
from draftsmith.inference.measure.context_costs import ContextCosts, context_costs
from draftsmith.inference.measure.prefilled import MOST, Prefilled, by_depth, longest_context, windows
from draftsmith.models.target import Target

# A plain step that takes so many times what the step costs say, or as small a part of it, was disturbed by other work;
# it is measured so often, at most.
DISTURBED, TRIES = 3.0, 3


@dataclass(frozen=True)
class Setting:
    """A selector, its K, and γ."""

    selector: str
    entries: int
    drafts: int

    @property
    def name(self) -> str:
        """As decode.py takes it."""
        return f"{self.selector}:{self.entries}@{','.join('1' * self.drafts)}"


@dataclass(frozen=True)
class Prediction:
    """What a setting is expected to give; times are in plain steps of the target."""

    speedup: float  # over plain decoding
    tokens: float  # E
    verify: float
    draft: float  # of all drafting in a step
    select: float  # of selections within a step
    least_alpha: float  # acceptance of every drafted token from which on it would pay; above 1: none would


def expected_tokens(alphas: Sequence[float]) -> float:
    """E of a chain whose tokens are accepted with these probabilities, each given that those before it are."""
    total, reached = 1.0, 1.0
    for alpha in alphas:
        reached *= alpha
        total += reached
    return total


def least_alpha(cost: float, drafts: int) -> float:
    """α*, the acceptance of every drafted token from which on a step that costs so many plain steps pays; ``cost``
    where none would."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_tokens([middle] * drafts) >= cost else (middle, high)
    return high if drafts + 1 >= cost else cost


def acceptance_by_depth(drafted_accepted: Tensor) -> list[float]:
    """α₁, α₂, … of counts ``[depths, 2]``. A depth that was reached a few times says little: the mean of all depths
    counts as eight tokens there."""
    drafted, accepted = drafted_accepted.unbind(1)
    return ((accepted + 8 * accepted.sum() / drafted.sum()) / (drafted + 8)).tolist()


def predict(
    seconds: Callable[[int, float, int], float],
    batch: int,
    cached: float,
    setting: Setting,
    alpha: Sequence[float],
    select: float = 0.0,
    per_step: float = 0.0,
    per_draft: float = 0.0,
    per_plain: float = 0.0,
    appended: int = APPENDED,
) -> Prediction:
    """The speed of a setting by step costs ``seconds`` t(B, S, N) and acceptance α₁, α₂, …, at least γ.

    Args:
        select: seconds in which one row's entries are selected.
        per_step, per_draft, per_plain: seconds that a step, each of its drafting passes, and a plain step take beyond
            that; may be negative, but verification counts as a plain step at least, so that no speed-up is above E.
        appended: tokens until the next selection; of a text that ends before it, its new ones.
    """
    plain, drafts = seconds(batch, cached, 1) + per_plain, setting.drafts
    tokens = expected_tokens(alpha[:drafts])
    held = min(cached, setting.entries + appended / 2)  # on average
    draft = max(0.0, sum(seconds(batch, held + depth, 1) + per_draft for depth in range(drafts)) / plain)
    verify = max(1.0, (seconds(batch, cached, drafts + 1) + per_step) / plain)
    select *= batch / plain * (1 if setting.selector == "topk" else tokens / appended)
    cost = draft + verify + select
    return Prediction(tokens / cost, tokens, verify, draft, select, least_alpha(cost, drafts))


def drafter_of(target: Target, setting: Setting) -> CompressedDrafter:
    """The drafter of a setting; each step drafts all of its tokens."""
    return CompressedDrafter(target, Selector(setting.selector, setting.entries), (1,) * setting.drafts)


@dataclass
class Measured:
    """What was measured of a selector with K entries after texts of one length, as :func:`predict` takes it."""

    alpha: list[float]
    select: float
    per_step: float
    per_draft: float
    per_plain: float


def predict_answers(
    seconds: Callable[[int, float, int], float],
    batch: int,
    context: int,
    setting: Setting,
    own: Measured,
    new_tokens: int,
) -> Prediction:
    """:func:`predict` of answers of ``new_tokens`` to ``context`` tokens, without the first selection, which is made
    before the first step: topk selects in each step, others after every 256 new tokens."""
    middle, appended = context + new_tokens / 2, min(APPENDED, new_tokens)
    select = own.select if setting.selector == "topk" or new_tokens > APPENDED else 0.0
    beyond = own.per_step, own.per_draft, own.per_plain
    return predict(seconds, batch, middle, setting, own.alpha, select, *beyond, appended)


def measure(
    target: Target,
    costs: ContextCosts,
    texts: Sequence[list[int]],
    settings: Sequence[tuple[str, int]],
    new_tokens: int,
    lean: bool | None = None,
) -> tuple[dict[tuple[str, int], Measured], float]:
    """What each (selector, K) gives after texts of one length, one at a time; seconds of a prefill of one of them."""
    counts = {setting: torch.zeros(MOST, 2) for setting in settings}
    selects: dict[tuple[str, int], float] = dict.fromkeys(settings, math.inf)
    steps = {(*setting, drafts): math.inf for setting in settings for drafts in (1, MOST)}
    prefill = plain = math.inf
    for text in texts:
        batch = Prefilled(target, [text], new_tokens, lean=lean)
        prefill = min(prefill, batch.prefill_seconds)
        for key in steps:
            run = batch.run(batch.step(drafter_of(target, Setting(*key))))
            if key[2] == MOST:
                counts[key[:2]] += torch.tensor(by_depth(run.committed, MOST))
            selects[key[:2]] = min(selects[key[:2]], run.select)
            steps[key] = min(steps[key], run.seconds / run.steps)
        run = batch.run(batch.plain)
        plain = min(plain, run.seconds / run.steps)
    found: dict[tuple[str, int], Measured] = {}
    context = len(texts[0])
    calculated = costs.seconds(1, context + new_tokens / 2, 1)  # of a plain step
    for key, drafted_accepted in counts.items():
        alpha = acceptance_by_depth(drafted_accepted)
        beyond: dict[int, float] = {}  # by number of drafted tokens
        for drafts in (1, MOST):
            bare = Measured(alpha, selects[key], 0.0, 0.0, 0.0)
            known = predict_answers(costs.seconds, 1, context, Setting(*key, drafts), bare, new_tokens)
            beyond[drafts] = steps[(*key, drafts)] - (known.draft + known.verify + known.select) * calculated
        per_draft = (beyond[MOST] - beyond[1]) / (MOST - 1)
        found[key] = Measured(alpha, selects[key], beyond[1] - per_draft, per_draft, plain - calculated)
    return found, prefill


def measure_undisturbed(
    once: Callable[[], tuple[dict[tuple[str, int], Measured], float]], context: int, calculated: float
) -> tuple[dict[tuple[str, int], Measured], float]:
    """What :func:`measure` returns, which ``once`` calls: again where the plain step that it timed and that of the step
    costs, of ``calculated`` seconds, disagree.
    Raises ValueError: they still do after ``TRIES`` measurements."""
    plain = 0.0
    for _ in range(TRIES):
        found, prefill = once()
        plain = calculated + next(iter(found.values())).per_plain
        if calculated / DISTURBED < plain < calculated * DISTURBED:
            return found, prefill
    raise ValueError(
        f"{context} cached tokens: a plain step took {plain * 1e3:.1f} ms, by the step costs of this machine it takes "
        f"{calculated * 1e3:.1f} ms, in {TRIES} measurements; nothing was planned: run again while the machine does "
        "nothing else, or with fewer --threads"
    )


def plan(
    costs: ContextCosts,
    measured: dict[int, dict[tuple[str, int], Measured]],
    prefills: dict[int, float],
    batches: Sequence[int],
    new_tokens: int,
) -> list[dict[str, Any]]:
    """For each B and S: the best setting, the time of its parts, and its speed with and without prefill; of what was
    measured by S and (selector, K), and seconds of prefills by S."""
    cells: list[dict[str, Any]] = []
    for batch, (cached, of_length) in itertools.product(batches, measured.items()):
        options: list[tuple[Prediction, Setting]] = []
        for (key, own), drafts in itertools.product(of_length.items(), range(1, MOST + 1)):
            setting = Setting(*key, drafts)
            options.append((predict_answers(costs.seconds, batch, cached, setting, own, new_tokens), setting))
        best, setting = max(options, key=lambda option: option[0].speedup)
        of_best = of_length[setting.selector, setting.entries]
        step = costs.seconds(batch, cached + new_tokens / 2, 1) + of_best.per_plain
        plain = new_tokens * step
        start, selecting = prefills[cached] * batch, of_best.select * batch
        cells.append(
            {
                "batch": batch,
                "context": cached,
                "drafter": setting.name if best.speedup > 1 else "none",
                **{name: round(value, 4) for name, value in asdict(best).items()},
                "best": setting.name,
                "speedup_with_prefill": round((start + plain) / (start + selecting + plain / best.speedup), 4),
                "alpha": [round(each, 4) for each in of_best.alpha[: setting.drafts]],
                "seconds": round(step, 6),
                "seconds_of_cached_tokens": round(step - costs.seconds(batch, 0, 1), 6),
            }
        )
    return cells


def possible_selectors(target: Target) -> list[str]:
    """Those of the selectors tried by default that a target allows; a line on stderr says of others why not."""
    found = []
    for name in TRIED:
        try:
            drafter_of(target, Setting(name, 64, 1))
            found.append(name)
        except ValueError as error:
            console.print(f"left out: {error}", markup=False, highlight=False, soft_wrap=True)
    return found


def planned_drafter(
    plan: str, target: Target, prompts: Sequence[list[int]], batch: int, new_tokens: int, lean: bool | None = None
) -> str:
    """The drafter of a plan's cell for the nearest batch size and context length, by their ratios; said on stderr.
    ``plan``: a file, or ``auto``: planned now, for these prompts, with 64, 128 and 256 entries.
    Raises ValueError: the file is no plan, or one for another target; or the prompts are too short to plan for."""
    batch, cached = min(batch, len(prompts)), sum(map(len, prompts)) / len(prompts)
    if plan == "auto":
        new_tokens = min(new_tokens, 64)
        context = min(round(cached), longest_context(target, new_tokens))
        entries = [each for each in (64, 128, 256) if each < context]
        if not entries:
            short = context < round(cached)  # because of the target
            what = f"the target's {target.context} positions leave" if short else f"prompts of {cached:.0f} tokens have"
            advice = "give a DRAFTER" if short else "give a DRAFTER, or longer prompts"
            raise ValueError(f"--plan auto: {what} no room for the least cache that is tried, 64 entries; {advice}")
        settings = [*itertools.product(possible_selectors(target), entries)]
        cells = make_plan(target, [context], [batch], settings, prompts, 4, new_tokens, lean)["cells"]
    else:
        facts = json_object(Path(plan), "plan")
        cells = facts.get("cells")
        needed = {"batch", "context", "drafter", "speedup"}
        if not isinstance(cells, list) or not cells or any(needed - {*cell} for cell in cells) or "target" not in facts:
            raise ValueError(f"{plan}: is no plan of inference/planner.py")
        if not target.is_known_as(facts["target"]["fingerprint"]):
            raise ValueError(f"{plan}: is for target '{facts['target']['name_or_path']}', not '{target.name}'")

    def distance(cell: dict[str, Any]) -> float:
        ratios = (cell["batch"] / batch, cell["context"] / max(cached, 1.0))
        return sum(abs(math.log(ratio)) for ratio in ratios)

    cell = min(cells, key=distance)
    expected = "" if cell["drafter"] == "none" else f", {cell['speedup']:.2f} × plain decoding expected"
    planned, used = (
        f"{counted(rows, 'row')} of {counted(tokens, 'token')}"
        for rows, tokens in ((cell["batch"], cell["context"]), (batch, round(cached)))
    )
    said = f"plan for {planned}: {cell['drafter']}{expected}" + (f"; used here for {used}" if used != planned else "")
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return str(cell["drafter"])


def make_plan(
    target: Target,
    contexts: Sequence[int],
    batches: Sequence[int],
    settings: Sequence[tuple[str, int]],
    prompts: Sequence[list[int]],
    texts: int,
    new_tokens: int,
    lean: bool | None,
) -> dict[str, Any]:
    """Measure and plan: what PLAN.json holds.

    Args:
        settings: (selector, K); of a context, those with fewer entries.
        prompts: texts for acceptance, at least one with as many tokens as the longest context; if there are none,
            held-out modules.
        texts: at most so many of each length.
    """
    found: dict[int, dict[tuple[str, int], Measured]] = {}
    prefills: dict[int, float] = {}
    with (
        ProgressBar("planning", len(contexts) + 1, console, transient=True) as advance,
        torch.inference_mode(),
        on_device(target.device),
        engine_attention([target]),
    ):
        costs = context_costs(target, contexts, batches, lean)
        advance(1)
        for done, context in enumerate(contexts, 2):
            chosen = [prompt[:context] for prompt in prompts if len(prompt) >= context][:texts]
            chosen = chosen if prompts else windows(target, "books", texts, context)
            fewer = [each for each in settings if each[1] < context]
            calculated = costs.seconds(1, context + new_tokens / 2, 1)  # of a plain step
            once = partial(measure, target, costs, chosen, fewer, new_tokens, lean)
            found[context], prefills[context] = measure_undisturbed(once, context, calculated)
            advance(done)
    return {
        "target": target.describe(),
        "cells": plan(costs, found, prefills, batches, new_tokens),
        "inflection": {str(nodes): costs.inflection(nodes) for nodes in (2, 4)},
        "measured": [
            {"context": context, "selector": selector, "entries": entries, **vars(own)}
            for context, of_length in found.items()
            for (selector, entries), own in of_length.items()
        ],
        "costs": [
            {"batch": b, "context": s, "nodes": n, "seconds": seconds} for (b, s, n), seconds in costs.measured.items()
        ],
    }
