"""How long training Medusa heads will take here: a few passes of the same work, timed before it begins."""

import time
from collections.abc import Callable, Sequence

import torch

from draftsmith.inference.calibrate import head_ranks
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target
from draftsmith.train.medusa_loss import Medusa1
from draftsmith.train.recipe import Answers, Evaluate, Stage

SMALL = 20_000_000  # parameters: passes of a larger target take too long to be made for an estimate
ROWS, PROMPT = 16, 48  # rows of a timed pass through the target; tokens of the prompts that are continued for it


def training_seconds(
    target: Target, heads: MedusaHeads, asked: Sequence[Answers], cached: int, stage: Stage, evaluate: Evaluate
) -> dict[str, float] | None:
    """Seconds of each part of a run whose sources are all the target's own answers; None for a target that is too large
    to try. The heads stay as they are.

    Args:
        asked: the answers that are made; the first ones say how many rows are tried at once, and of what length.
        cached: rows whose hidden states are made once, 0 if every step makes its own.
    """
    if sum(p.numel() for p in target.model.parameters()) > SMALL:
        return None
    ask = asked[0]
    rows, length = min(ask.batch_size, ask.prompts), ask.prompt_tokens + ask.new_tokens
    tokens = torch.randint(target.vocab_size, (max(rows, ROWS), length), generator=torch.Generator().manual_seed(0))
    decoder, prompts = SpeculativeDecoder(target), tokens[:rows, : min(PROMPT, ask.prompt_tokens)].tolist()

    def decode(count: int) -> None:
        decoder.generate(prompts, count, batch_size=rows, stop_ids=frozenset())

    decode(2)
    short, longer = _seconds(lambda: decode(2)), _seconds(lambda: decode(6))
    step = max(0.0, longer - short) / 4 / rows
    tokens = tokens[:ROWS].to(target.device)
    supervised = torch.zeros_like(tokens, dtype=torch.bool)
    supervised[:, ask.prompt_tokens :] = True
    with torch.no_grad():
        hidden = target.hidden(tokens)
        forward = _seconds(lambda: target.hidden(tokens)) / ROWS
        ranking = _seconds(lambda: head_ranks(target, heads, tokens.cpu(), supervised.cpu())) / ROWS
    module = Medusa1(target, heads)
    sequences = min(stage.batch.sequences, ROWS)
    batch = {"tokens": tokens[:sequences], "supervised": supervised[:sequences], "hidden": hidden[:sequences]}

    def train() -> None:
        module(batch, module.count(batch))[0].backward()
        module.zero_grad()

    train()
    learning = _seconds(train) * stage.batch.sequences / sequences
    answers = sum(a.prompts * (forward * a.prompt_tokens / length + step * a.new_tokens) for a in asked)
    looks = -(-stage.steps // evaluate.every)
    return {
        "answers": answers,
        "hidden states": forward * (cached or stage.steps * stage.batch.sequences),
        "steps": stage.steps * learning,
        "evaluation": looks * ranking * evaluate.sequences,
    }


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
