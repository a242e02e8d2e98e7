"""Sequence-level unlikelihood (arXiv 1908.04319 §5.2) for train/lm.py: what the model writes, and its repetitions.

Shape letters: S rows, T tokens, V vocabulary.
"""

import copy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from draftsmith.common.command import counted
from draftsmith.common.files import object_or_empty, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.data import sources
from draftsmith.data.prompts import Prompt, prompts
from draftsmith.inference.engine.answers import answer
from draftsmith.models.target import Target
from draftsmith.train import checkpoint
from draftsmith.train.launch import console
from draftsmith.train.run import Run
from draftsmith.train.samples import Batch
from draftsmith.train.sections.lm import Unlikelihood


def repeated(tokens: Tensor, supervised: Tensor, n: int) -> Tensor:
    """Positions that complete an n-gram for the second time.

    Args:
        tokens, supervised: ``[S, T]`` as :func:`draftsmith.inference.engine.answers.answer` returns them.

    Returns:
        ``[S, T]`` bool, True at the last token of each n-gram that the same continuation already held.
    """
    again = torch.zeros_like(supervised)
    for i, (row, marks) in enumerate(zip(tokens.tolist(), supervised.tolist(), strict=True)):
        seen: set[tuple[int, ...]] = set()
        places = [t for t, mark in enumerate(marks) if mark]
        for t in places[n - 1 :]:
            gram = tuple(row[t - n + 1 : t + 1])
            again[i, t] = gram in seen
            seen.add(gram)
    return again


def asked_prompts(ask: Unlikelihood, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Prompt]:
    """The beginnings of texts that are continued. Raises ValueError: the source has too few."""
    source, wanted = ask.source, ask.source.answers
    assert wanted is not None
    split = cast(sources.Split, source.split)
    return prompts(source.source, split, wanted.prompts, wanted.prompt_tokens, tokenizer, seed)


def write_continuations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, ask: Unlikelihood, seed: int
) -> Batch:
    """Greedy continuations by the model as it is: ``written [S, T]`` and ``again [S, T]`` of :func:`repeated`."""
    source, wanted, found = ask.source, ask.source.answers, asked_prompts(ask, tokenizer, seed)
    assert wanted is not None
    target = Target(copy.deepcopy(model).eval(), tokenizer, "the model in training", "")
    with ProgressBar(
        f"the model continues {counted(len(found), 'prompt')} from {source.source}", len(found), console
    ) as bar:
        rows = answer(target, [p.tokens for p in found], wanted.new_tokens, wanted.batch_size, bar)
    again = repeated(rows["tokens"], rows["supervised"], ask.ngram)
    console.print(f"  {float(again.sum() / rows['supervised'].sum()):.0%} of it repeats {ask.ngram}-grams")
    return {"written": rows["tokens"], "again": again}


def continuations(
    run: Run[Any], name: str, ask: Unlikelihood | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> Batch:
    """Continuations for a stage's unlikelihood loss, written once by one process; empty without ``unlikelihood``.
    Raises ValueError: the resumed run has those of another request."""
    if ask is None:
        return {}
    folder, asked = run.folder / "answers" / name, ask.model_dump(mode="json", exclude={"weight"})
    there = run.resume and (folder / "model.safetensors").exists()
    if there and object_or_empty(folder / "asked.json") not in ({}, asked):  # empty: of an older version
        raise ValueError(f"--resume: stage {name} continues texts by another 'unlikelihood'; set it back, or --restart")
    with run.accelerator.main_process_first():
        if run.main and not there:
            seed = run.recipe.run.seed + [stage.name for stage in run.recipe.stages].index(name)
            (folder / "asked.json").unlink(missing_ok=True)
            checkpoint.write_tensors(folder, write_continuations(model, tokenizer, ask, seed))
            write_json(folder / "asked.json", asked)
    return checkpoint.read_tensors(folder)
