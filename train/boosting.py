"""What each round of boosting trains on (SpecInfer, arXiv 2305.09781 §3): the prompts on which the models trained so
far do not reproduce the target's greedy answer.

A model's greedy continuation begins with the m tokens of the answer exactly if each of them is its most likely token
after the true ones before it: one forward pass over each answer, in float32, whatever the size of the batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.common.files import read_json, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.data.packing import Rows, Tokenized
from draftsmith.inference.measure.tree_statistics import AT_ONCE, next_token_ranks
from draftsmith.models.target import Target
from draftsmith.train import checkpoint
from draftsmith.train.launch import console
from draftsmith.train.run import Run, digest_of
from draftsmith.train.sections.ssm import Boost

MARKS = "marks"  # folder of a run: which labels each round trains on


def greedy_ranks(
    model: Target, samples: Tokenized, draft_vocab: Tensor | None, what: str, at_once: int = AT_ONCE
) -> np.ndarray:
    """The rank that a model gives to each token, ``[tokens of all samples]`` int64 as :func:`next_token_ranks`;
    ``at_once``: tokens of a forward pass, if it has several samples."""
    ranks = np.full(len(samples.tokens), -1, np.int64)
    sizes = np.diff(samples.starts)
    rows, order = Rows(samples, int(sizes.max()), share=False), np.argsort(-sizes, kind="stable")  # little padding
    begin = 0
    with ProgressBar(what, len(order), console) as bar, torch.autocast(model.device.type, enabled=False):
        while begin < len(order):
            length = int(sizes[order[begin]])
            numbers = order[begin : begin + max(1, at_once // length)].tolist()
            batch = rows.batch(numbers, length)
            found = next_token_ranks(model, batch["tokens"], batch["supervised"], draft_vocab)
            for row, number in zip(found.numpy(), numbers, strict=True):
                part = slice(*samples.starts[number : number + 2])
                ranks[part] = row[: part.stop - part.start]
            begin += len(numbers)
            bar(begin)
    return ranks


def unmatched(ranks: np.ndarray, samples: Tokenized, unit: str, tokens: int) -> np.ndarray:
    """The labels that a model leaves to the next ones: ``[tokens of all samples]`` bool.

    Args:
        ranks: of :func:`greedy_ranks`.
        unit, tokens: of :class:`Boost`.
    """
    sizes = np.diff(samples.starts)
    sample = np.repeat(np.arange(len(sizes)), sizes)
    label = samples.supervised.copy()
    starts = label.copy()
    starts[1:] &= ~(label[:-1] & (sample[1:] == sample[:-1]))
    answer = np.cumsum(starts) - 1  # of each label
    first = np.flatnonzero(starts)
    place = np.arange(len(label)) - (first[answer.clip(0)] if len(first) else 0)
    missed = (ranks > 0) & label
    if unit == "segment":
        window = (np.cumsum(label & (place % tokens == 0)) - 1).clip(0)  # of each label
        return label & (np.bincount(window, missed)[window] > 0)
    beginning = missed & (place < tokens)
    of_sample = np.bincount(sample[beginning], minlength=len(sizes)) > 0
    return label & of_sample[sample]


def subset(samples: Tokenized, labels: np.ndarray) -> Tokenized:
    """The samples that have one of these labels, with no others. ``labels``: ``[tokens of all samples]`` bool."""
    sizes = np.diff(samples.starts)
    sample = np.repeat(np.arange(len(sizes)), sizes)
    kept = np.bincount(sample[labels & samples.supervised], minlength=len(sizes)) > 0
    inside = kept[sample]
    starts = np.concatenate([[0], np.cumsum(sizes[kept])])
    return Tokenized(samples.tokens[inside], (samples.supervised & labels)[inside], starts)


def rows_of_round(
    run: Run[Any],
    rows: Sequence[Rows],
    number: int,
    rounds: int,
    models: Sequence[Target],
    draft_vocab: Tensor | None,
    boost: Boost,
) -> tuple[list[Rows], list[float], int]:
    """What round ``number`` (from 0) of ``rounds`` trains on.

    Args:
        rows: of each training source, all of them.
        models: the SSMs trained so far.

    Returns:
        Rows, the weight of each, and the number of prompts that are left.
    """
    weights = [source.weight for source in run.recipe.data.train]
    folder, asked = run.folder / MARKS / str(number), {"rows": run.data_sha256}
    asked |= {"stages": rounds} if boost.mark == "fresh" else {}
    there = run.resume and (folder / "model.safetensors").exists()
    made = read_json(folder / "asked.json") if there else asked
    for name, value in asked.items():
        if (was := made.get(name, value)) == value:  # older folders do not say all
            continue
        if name == "rows":
            raise ValueError(f"--resume: round {number} had other training rows; use them, or --restart")
        raise ValueError(
            f"--resume: round {number} was one of {was} stages, not of {value}; set them back, or --restart"
        )
    if boost.ensemble == "seeds":
        return list(rows), weights, sum(len(part.samples) for part in rows)
    given = [_given(part.samples, number, rounds, boost) for part in rows]
    after = [digest_of(model.model.parameters()).hex() for model in models] if run.main else []
    with run.accelerator.main_process_first():
        if run.main and (not there or made.get("after", after) != after):  # else an SSM before it was trained further
            left: dict[str, Tensor] = {}
            for place, (part, labels) in enumerate(zip(rows, given, strict=True)):
                samples, remaining = subset(part.samples, labels), labels.copy()
                for index, model in enumerate(models if len(samples) else ()):
                    what = f"which of {len(samples):,} ssm-{index} matches"
                    model.model.to(run.accelerator.device)
                    ranks = greedy_ranks(model, samples, draft_vocab, what, run.at_once)
                    model.model.cpu()
                    kept = unmatched(ranks, samples, boost.unit, boost.tokens)
                    remaining[labels] &= kept[samples.supervised]
                left[str(place)] = torch.from_numpy(remaining)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "model.safetensors").unlink(missing_ok=True)
            write_json(folder / "asked.json", {**asked, "after": after})
            checkpoint.write_tensors(folder, left)
    marks = checkpoint.read_tensors(folder)
    found, shares, prompts = list[Rows](), list[float](), 0
    for place, (part, labels, weight) in enumerate(zip(rows, given, weights, strict=True)):
        remaining = marks[str(place)].numpy()
        kept, taken = subset(part.samples, remaining), subset(part.samples, labels & ~remaining)
        prompts += len(kept)
        parts = [(kept, 1.0 - boost.marked_share), (taken, boost.marked_share)]
        parts = [(samples, share) for samples, share in parts if len(samples) and share]
        for samples, share in parts:
            found.append(Rows(samples, run.recipe.data.max_length, share=run.recipe.data.packing))
            shares.append(weight * share / sum(each for _, each in parts))  # a source keeps its weight
    return found, shares, prompts


def _given(samples: Tokenized, number: int, rounds: int, boost: Boost) -> np.ndarray:
    """The labels that a round begins with: ``[tokens of all samples]`` bool."""
    if boost.mark == "train":
        return samples.supervised.copy()
    sizes = np.diff(samples.starts)
    return samples.supervised & np.repeat(np.arange(len(sizes)) % rounds == number, sizes)
