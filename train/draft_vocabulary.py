"""The draft vocabulary of a run: chosen when it begins, the same after a resume."""

import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.common.files import json_object, write_json
from draftsmith.data.packing import Rows
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import check_draft_vocab, coverage, coverage_by_size, most_frequent
from draftsmith.train import checkpoint
from draftsmith.train.launch import console
from draftsmith.train.run import Run
from draftsmith.train.samples import Batches

FOLDER = "draft_vocab"  # of the run: the draft vocabulary that it began with
MASK = "mask_token.json"  # of the run: the mask token that was chosen


def begun(run: Run[Any]) -> Tensor | None:
    """``[S]`` int64, the draft vocabulary that a resumed run began with; None if the run begins or has none."""
    folder = run.folder / FOLDER
    return checkpoint.read_tensors(folder).get("ids", torch.empty(0)) if run.resume and folder.exists() else None


def size_of(run: Run[Any], size: int | None, vocab_size: int) -> int | None:
    """The size of a run's draft vocabulary: the recipe's, less on a tiny target; None: it has none."""
    if size and run.small:
        size = min(size, vocab_size // 2)
    if size and size > (tokens := int(used(run, vocab_size).sum())):
        raise ValueError(f"drafter.draft_vocab_size={size}: the target has {tokens} tokens; set fewer, or null")
    ids = begun(run)
    if run.resume and (began := None if ids is None else len(ids)) != size:
        raise ValueError(
            f"{run.folder}: it began with drafter.draft_vocab_size={began or 'null'}, not {size or 'null'}; set it "
            "back, or --restart"
        )
    if ids is not None:
        check_draft_vocab(ids, len(ids), vocab_size, f"{run.folder / FOLDER}/model.safetensors")
    if size is None and run.main:  # of a run that ended before its first checkpoint
        shutil.rmtree(run.folder / FOLDER, ignore_errors=True)
    return size


def used(run: Run[Any], vocab_size: int) -> Tensor:
    """``[V]`` bool, the ids that are tokens: an LM head may have more rows than the tokenizer has tokens."""
    if run.tokenizer is None:
        return torch.ones(vocab_size, dtype=torch.bool)
    ids = torch.tensor(sorted(run.tokenizer.get_vocab().values()))
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids[ids < vocab_size], True)


def apply(
    run: Run[Any], drafter: MedusaHeads | Eagle | DFlash, target: Target, rows: Sequence[Batches]
) -> dict[str, Any]:
    """Give an untrained drafter its draft vocabulary, if it has one; one of ``init_from`` keeps its own. Returns facts
    for provenance.json."""
    own = drafter.draft_vocab
    if own is None:
        return {}
    keeps = run.recipe.init_from and not run.resume  # start_weights read it
    ids, facts = choose(run, len(own), target.vocab_size, rows, own if keeps else begun(run))
    if not keeps:
        drafter.draft_from(ids, target)
    return facts


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
    ids = most_frequent(train.where(used(run, vocab_size), -1), size) if given is None else given.cpu()
    if run.main:
        checkpoint.write_tensors(run.folder / FOLDER, {"ids": ids})
    shares = [round(coverage(counts, ids), 4) for counts in (train, held_out)]
    others = {size: [round(share, 4) for share in pair] for size, pair in coverage_by_size(train, held_out).items()}
    others.pop(len(ids), None)
    console.print(
        f"draft vocabulary: {len(ids):,} of {vocab_size:,} tokens cover {shares[0]:.2%} of the training labels "
        f"and {shares[1]:.2%} of the held-out ones"
    )
    if given is None and (seen := int((train > 0).sum())) < size and not run.small:
        console.print(
            f"  warning: the training answers have {seen:,} different tokens; the other {size - seen:,} are never "
            "trained: lower drafter.draft_vocab_size, or train on more",
            style="yellow",
        )
    if others:
        listed = ", ".join(f"{size:,}: {a:.2%} and {b:.2%}" for size, (a, b) in others.items())
        console.print(f"  other sizes (drafter.draft_vocab_size) {listed}")
    return ids, {"draft_vocabulary": {"size": len(ids), "train": shares[0], "held_out": shares[1], "others": others}}


def mask_token(run: Run[Any], given: int | None, target: Target, rows: Sequence[Batches]) -> int:
    """The mask token of a block drafter: the ``given`` one, else that of the run that goes on, else one that is no
    token, else the highest one that no row has.
    Raises ValueError: a row has the given one; or there is none left."""
    seen = torch.zeros(target.vocab_size, dtype=torch.bool)
    held_out = (np.trim_zeros(row, "b") for row in run.held_out["tokens"].numpy())  # without padding
    for tokens in [*held_out, *(part.samples.tokens for part in rows if isinstance(part, Rows))]:
        seen[torch.as_tensor(tokens).flatten().long()] = True
    chosen = run.folder / MASK
    if given is None and run.resume and chosen.exists():
        given = int(json_object(chosen, "mask token")["mask_token_id"])
    if given is None:
        unused = ~used(run, target.vocab_size) & ~seen
        left, special = ~seen, {*target.stop_ids, *getattr(run.tokenizer, "all_special_ids", ())}
        left[torch.tensor([token for token in special if token < len(left)], dtype=torch.int64)] = False
        if not left.any():
            raise ValueError("drafter.mask_token_id: the rows have every token; give the id of a rare one")
        token = int(unused.int().argmax()) if unused.any() else int(left.nonzero()[-1])
        if run.main:
            write_json(chosen, {"mask_token_id": token})
        return token
    if given >= target.vocab_size:
        raise ValueError(f"drafter.mask_token_id={given}: the target's ids are 0 to {target.vocab_size - 1}")
    if seen[given]:
        raise ValueError(f"drafter.mask_token_id={given}: some rows have this token; give one that no row has, or null")
    return given
