"""The draft vocabulary of a run: chosen when it begins, the same after a resume."""

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.packing import Rows
from draftsmith.models.vocabulary import check_draft_vocab, coverage, coverage_by_size, most_frequent
from draftsmith.train import checkpoint
from draftsmith.train.loop import console
from draftsmith.train.run import Run
from draftsmith.train.samples import Batches

FOLDER = "draft_vocab"  # of the run: the draft vocabulary that it began with


def begin(run: Run[Any], size: int | None, vocab_size: int) -> tuple[int | None, Tensor | None]:
    """Check the size of a run's draft vocabulary (on a tiny target at most half its tokens); read a resumed run's.

    Args:
        size: the recipe's; None: no draft vocabulary.

    Returns:
        S or None; ``[S]`` int64, None if the run begins or has none.

    Raises:
        ValueError: it is larger than the target's vocabulary; the resumed run's has another size than the recipe's, or
            is damaged.
    """
    folder = run.folder / FOLDER
    if size and run.small:
        size = min(size, vocab_size // 2)
    if size and size > vocab_size:
        raise ValueError(f"drafter.draft_vocab_size={size}: the target has {vocab_size} tokens; set fewer, or null")
    ids = checkpoint.read_tensors(folder).get("ids", torch.empty(0)) if run.resume and folder.exists() else None
    if run.resume and (began := None if ids is None else len(ids)) != size:
        raise ValueError(
            f"{run.folder}: it began with drafter.draft_vocab_size={began or 'null'}, not {size or 'null'}; set it "
            "back, or --restart"
        )
    if ids is not None:
        check_draft_vocab(ids, len(ids), vocab_size, f"{folder}/model.safetensors")
    if size is None and run.main:  # of a run that ended before its first checkpoint
        shutil.rmtree(folder, ignore_errors=True)
    return size, ids


def choose(
    run: Run[Any], size: int, vocab_size: int, rows: Sequence[Batches], given: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """The draft vocabulary: ``given``, else the most frequent tokens of the training rows' answers, ``size`` of them,
    each source counted by its weight. Prints what it covers, and stores it in the run's folder.

    Returns:
        ``[S]`` int64 on the CPU; for provenance.json, the size and the coverage of training and held-out labels, also
        by other sizes.
    """
    recipe = run.recipe
    train = torch.zeros(vocab_size, dtype=torch.float64)
    for part, source in zip(rows, recipe.data.train, strict=True):
        assert isinstance(part, Rows)
        labels = torch.from_numpy(part.samples.tokens[part.samples.supervised])
        # As often as training draws from this source, whatever its length.
        train += torch.bincount(labels, minlength=vocab_size) * (source.weight / len(part))
    held_out = torch.bincount(run.held_out["tokens"][run.held_out["supervised"]], minlength=vocab_size)
    ids = most_frequent(train, size) if given is None else given.cpu()
    if run.main:
        checkpoint.write_tensors(run.folder / FOLDER, {"ids": ids})
    shares = [round(coverage(counts, ids), 4) for counts in (train, held_out)]
    others = {size: [round(share, 4) for share in pair] for size, pair in coverage_by_size(train, held_out).items()}
    others.pop(len(ids), None)
    console.print(
        f"draft vocabulary: {len(ids):,} of {vocab_size:,} tokens cover {shares[0]:.2%} of the training labels "
        f"and {shares[1]:.2%} of the held-out ones"
    )
    if others:
        listed = ", ".join(f"{size:,}: {a:.2%} and {b:.2%}" for size, (a, b) in others.items())
        console.print(f"  other sizes (drafter.draft_vocab_size) {listed}")
    return ids, {"draft_vocabulary": {"size": len(ids), "train": shares[0], "held_out": shares[1], "others": others}}
