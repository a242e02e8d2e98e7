"""How long training Medusa heads will take here: small pieces of the same work, timed before it begins."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from draftsmith.common.sections import Answers, Evaluate, Stage
from draftsmith.inference.calibrate import head_ranks
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target
from draftsmith.train.medusa_loss import Medusa1

SMALL = 20_000_000  # parameters: passes of a larger target take too long to be made for an estimate
DECODED, STEPS = 32, 5  # rows that are decoded at once, at most; steps of them, of which the shortest counts
ROWS, SEQUENCES = 4, 2  # of a pass through the target; of a training step


def training_seconds(
    target: Target, heads: MedusaHeads, asked: Sequence[Answers], cached: int, stage: Stage, evaluate: Evaluate
) -> dict[str, float] | None:
    """Seconds of each part of a run whose sources are all the target's own answers; None for a target that is too large
    to try, or whose context has no room to. Takes about a second itself; heads, target and random numbers stay as they
    are.

    Args:
        asked: the answers that are made; the first ones say of what length, and how many at once.
        cached: rows whose hidden states are made once, 0 if every step makes its own.
    """
    ask, room = asked[0], target.context - STEPS - 1  # the steps that are timed fit into it, too
    if sum(p.numel() for p in target.model.parameters()) > SMALL or ask.prompt_tokens + ask.new_tokens > room:
        return None
    rows, length = min(ask.batch_size, ask.prompts, DECODED), ask.prompt_tokens + ask.new_tokens
    tokens = torch.randint(target.vocab_size, (max(rows, ROWS), length), generator=torch.Generator().manual_seed(0))
    supervised = torch.zeros(tokens.shape, dtype=torch.bool)
    supervised[:, ask.prompt_tokens :] = True
    halfway = ask.prompt_tokens + ask.new_tokens // 2  # a step takes longer the more it looks back on
    step = _step_seconds(target, tokens[:rows, :halfway].tolist()) / rows
    some = tokens[:ROWS].to(target.device)
    with torch.no_grad():
        forward = _seconds(lambda: target.hidden(some)) / ROWS
        ranking = _seconds(lambda: head_ranks(target, heads, tokens[:ROWS], supervised[:ROWS])) / ROWS
        batch = {"tokens": some[:SEQUENCES], "supervised": supervised[:SEQUENCES].to(target.device)}
        hidden = target.hidden(batch["tokens"])
    module, trained = Medusa1(target, heads), list(heads.parameters())
    counts = hidden.new_ones(heads.config.num_draft_heads)
    learning = _seconds(lambda: torch.autograd.grad(module.heads_loss(batch, hidden, counts)[0], trained)) / SEQUENCES
    sequences = stage.steps * stage.batch.sequences
    looks = -(-stage.steps // evaluate.every)
    return {
        "answers": sum(a.prompts * (forward * a.prompt_tokens / length + step * a.new_tokens) for a in asked),
        "hidden states": forward * (cached or sequences),
        "steps": learning * sequences,
        "evaluation": looks * ranking * evaluate.sequences,
    }


def _step_seconds(target: Target, prompts: list[list[int]]) -> float:
    """Of a step that decodes all these prompts: the shortest, because the first ones choose forms and make room."""
    times: list[float] = []

    def note(number: int, new: list[int]) -> None:
        if number == 0:
            times.append(time.perf_counter())

    with torch.autocast(target.device.type, enabled=False):  # answers are made without
        decoder = SpeculativeDecoder(target)
        decoder.generate(prompts, STEPS + 1, batch_size=len(prompts), stop_ids=frozenset(), on_tokens=note)
    return min(after - before for before, after in pairwise(times))


def _seconds(run: Callable[[], object]) -> float:
    """Of the shortest of three runs: the first one warms up, and other work comes and goes."""
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)
