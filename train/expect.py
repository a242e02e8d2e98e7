"""How long training a drafter will take here: small pieces of the same work, timed before it begins."""

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from draftsmith.common.sections import DrafterRecipe
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.models.target import Target
from draftsmith.train.loop import Batch

SMALL = 20_000_000  # parameters: passes of a larger target take too long to be made for an estimate
DECODED, STEPS = 32, 5  # rows that are decoded at once, at most; steps of them, of which the shortest counts
ROWS, SEQUENCES = 4, 2  # of a pass through the target; of a training step


def training_seconds(
    target: Target, module: nn.Module, evaluate: Callable[[nn.Module, Batch], object], recipe: DrafterRecipe
) -> dict[str, float] | None:
    """Seconds of each part of a recipe of one stage whose rows are all the target's own answers; None for other rows,
    for a target that is too large to try, or whose context is too short for it. Takes about a second itself; weights
    and random numbers stay as they are.

    Args:
        module: what trains, on ``target``.
        evaluate: of the module and held-out rows ``tokens`` and ``supervised`` ``[S, T]``.
    """
    sources = [*recipe.data.train, *recipe.data.validation]
    requests = [source.answers for source in sources if source.answers is not None]
    if len(requests) < len(sources):
        return None
    ask, room = requests[0], target.context - STEPS - 1  # the steps that are timed fit into it, too
    if sum(p.numel() for p in target.model.parameters()) > SMALL or ask.prompt_tokens + ask.new_tokens > room:
        return None
    rows, length = min(ask.batch_size, ask.prompts, DECODED), ask.prompt_tokens + ask.new_tokens
    # Before the rows are read, a draft vocabulary is the first ids, and nearly all labels are inside of one.
    vocabulary = min(getattr(recipe.drafter, "draft_vocab_size", None) or target.vocab_size, target.vocab_size)
    tokens = torch.randint(vocabulary, (max(rows, ROWS), length), generator=torch.Generator().manual_seed(0))
    supervised = torch.zeros(tokens.shape, dtype=torch.bool)
    supervised[:, ask.prompt_tokens :] = True
    halfway = ask.prompt_tokens + ask.new_tokens // 2  # a step takes longer the more it looks back on
    step = _step_seconds(target, tokens[:rows, :halfway].tolist()) / rows
    some = tokens[:ROWS].to(target.device)
    with torch.no_grad():
        forward = _seconds(lambda: target.hidden(some)) / ROWS
        held_out = {"tokens": tokens[:ROWS], "supervised": supervised[:ROWS]}
        evaluation = _seconds(lambda: evaluate(module, held_out)) / ROWS
        batch = {"tokens": some[:SEQUENCES], "supervised": supervised[:SEQUENCES].to(target.device)}
        if recipe.cache_hidden != "none":
            batch["hidden"] = target.features(batch["tokens"], getattr(module, "captures", ()))
        counts = module.count(batch).float()  # type: ignore[operator]
    trained = [p for p in module.parameters() if p.requires_grad]
    step_back = lambda: torch.autograd.grad(module(batch, counts, 0)[0], trained, allow_unused=True)  # noqa: E731
    learning = _seconds(step_back) / SEQUENCES
    stage = recipe.stages[0]
    parts = {"answers": sum(a.prompts * (forward * a.prompt_tokens / length + step * a.new_tokens) for a in requests)}
    if recipe.cache_hidden != "none":
        parts["hidden states"] = forward * sum(source.answers.prompts for source in recipe.data.train if source.answers)
    parts["steps"] = learning * stage.samples
    parts["evaluation"] = -(-stage.steps // recipe.evaluate.every) * evaluation * recipe.evaluate.sequences
    return parts


def _step_seconds(target: Target, prompts: list[list[int]]) -> float:
    """Seconds of a step that decodes all these prompts: the shortest, as the first ones choose forms and allocate."""
    times: list[float] = []

    def note(number: int, new: list[int]) -> None:
        if number == 0:
            times.append(time.perf_counter())

    with torch.autocast(target.device.type, enabled=False):  # answers are made without
        decoder = SpeculativeDecoder(target)
        decoder.generate(prompts, STEPS + 1, batch_size=len(prompts), stop_ids=frozenset(), on_tokens=note)
    return min(after - before for before, after in pairwise(times))


def _seconds(run: Callable[[], object]) -> float:
    """Seconds of the shortest of three runs: the first one warms up, and other work comes and goes. Random numbers
    that they draw (dropout) are drawn again afterwards."""
    times: list[float] = []
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        for _ in range(3):
            began = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return min(times)
