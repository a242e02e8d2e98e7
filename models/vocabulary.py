"""Draft vocabularies: the S token ids that a drafter chooses its drafts from, of the target's V.

A drafter's projection then has S rows instead of V, and its output i is token ``ids[i]``. The ids are the most frequent
ones of the target's own answers (VocabTrim, arXiv 2506.22694; FR-Spec, arXiv 2502.14856, counts a general corpus). The
target verifies over all V tokens, so the output stays exact: a token outside is never drafted, only written.

Shape letters: V vocabulary of the target, S draft vocabulary, d hidden width.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

SIZES = (2048, 4096, 8192, 16384, 32768)  # whose coverage is reported beside the chosen one's


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The ids of the ``size`` highest counts, equal counts by the lower id.
    ``counts``: ``[V]``, of any dtype.
    ``size``: S, at most V.
    Returns ``[S]`` int64, ascending."""
    assert 0 < size <= len(counts)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """The share of counted tokens that are among ``ids``. ``counts [V]``, ``ids [S]``; 0 if nothing was counted."""
    return float(counts[ids].sum()) / (float(counts.sum()) or 1.0)


def coverage_by_size(train: Tensor, held_out: Tensor, sizes: Sequence[int] = SIZES) -> dict[int, tuple[float, float]]:
    """What other draft vocabularies would cover of the training and the held-out labels, by size; sizes that are not
    below V are left out. ``train``, ``held_out``: counts ``[V]``; the ids are chosen by the former."""
    chosen = {size: most_frequent(train, size) for size in sizes if size < len(train)}
    return {size: (coverage(train, ids), coverage(held_out, ids)) for size, ids in chosen.items()}


def to_draft_ids(tokens: Tensor, ids: Tensor, outside: int) -> Tensor:
    """The draft id of each token: its place in the draft vocabulary.
    ``tokens``: ``[…]`` int64 ids of the target; negative ones are outside.
    ``ids``: ``[S]`` int64, ascending, on the same device.
    Returns ``[…]`` int64; ``outside`` where the token is not among ``ids``."""
    place = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return torch.where(ids[place] == tokens, place, outside)


def check_whole(config: object, names: Sequence[str]) -> None:
    """Raises ValueError: one of these fields of a drafter's config is no whole number above 0."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"field '{name}' is {value!r}; it has to be a whole number above 0")


def check_projection(projection: object) -> None:
    """Raises ValueError: the field ``projection`` of a drafter's config is neither ``own`` nor ``shared``."""
    if projection not in ("own", "shared"):
        raise ValueError(f"field 'projection' is {projection!r}; it has to be 'own' or 'shared'")


def check_size(size: object, vocab_size: int) -> None:
    """Raises: ValueError: the field ``draft_vocab_size`` of a config is no size of a draft vocabulary, nor None."""
    if size is not None and (type(size) is not int or not 0 < size <= vocab_size):
        raise ValueError(
            f"field 'draft_vocab_size' is {size!r}; it has to be a whole number from 1 to the target's {vocab_size}, "
            "or null for all"
        )


def check_draft_vocab(ids: Tensor, size: int, vocab_size: int, where: str) -> None:
    """Refuse a map that is not ``size`` ascending ids of the target.
    Raises ValueError: another size or dtype, ids that repeat, do not ascend, or are not the target's."""
    if ids.shape != (size,) or ids.dtype not in (torch.int32, torch.int64):
        dtype = str(ids.dtype).removeprefix("torch.")
        wrong = f"is {list(ids.shape)} of {dtype}; draft_vocab_size={size} needs [{size}] of int64 or int32"
    elif (ids[1:] <= ids[:-1]).any():
        wrong = "does not ascend, or holds an id twice; fetch or train the drafter again"
    elif int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        wrong = f"holds ids from {int(ids[0])} to {int(ids[-1])}; the target's are 0 to {vocab_size - 1}"
    else:
        return
    raise ValueError(f"{where}: 'draft_vocab' {wrong}")


@torch.no_grad()
def head_rows(lm_head: nn.Module, ids: Tensor) -> nn.Linear:
    """A frozen copy of an LM head's rows, on the device of ``ids [S]``: ``[…, d] → […, S]``.
    Raises ValueError: the LM head is quantised, so that its rows cannot be taken."""
    from accelerate.utils import align_module_device  # only where rows are taken

    with align_module_device(lm_head):  # an offloaded one comes back for this
        weight, bias = cast(nn.Linear, lm_head).weight, cast(nn.Linear, lm_head).bias
        if not weight.is_floating_point():
            raise ValueError(
                "the LM head is quantised, and its rows cannot be taken for a draft vocabulary; load the model without "
                "quantisation"
            )
        places = ids.to(weight.device)
        rows = nn.Linear(weight.shape[1], len(ids), bias is not None, device="meta").requires_grad_(False)
        rows.weight = nn.Parameter(weight[places].to(ids.device), requires_grad=False)
        if bias is not None:
            rows.bias = nn.Parameter(bias[places].to(ids.device), requires_grad=False)
    return rows


class WithDraftVocabulary(nn.Module):
    """A drafter that chooses among the tokens of a draft vocabulary. Buffer: ``draft_vocab [S]`` int64, ascending ids
    of the target; None: all of them."""

    draft_vocab: Tensor | None

    def __init__(self, config: Any) -> None:
        super().__init__()
        draft_vocab = None if config.draft_vocab_size is None else torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_vocab", draft_vocab)

    def draft_from(self, ids: Tensor, target: Any) -> None:
        """Set the draft vocabulary, ``[S]`` int64 ascending, of an untrained drafter."""
        assert self.draft_vocab is not None
        self.draft_vocab.copy_(ids)
        self._start_head(target)

    def _start_head(self, target: Any) -> None:
        """Give the drafter's own LM head, if it has one, the rows of the target's."""

    def draft_head(self, lm_head: nn.Module) -> nn.Module:
        """The linear layer that gives logits over the draft vocabulary: the target's LM head, or a frozen copy of its
        rows. Make it once.
        Raises ValueError: the LM head is quantised, so that its rows cannot be taken."""
        return lm_head if self.draft_vocab is None else head_rows(lm_head, self.draft_vocab)

    def tokens(self, places: Tensor) -> Tensor:
        """The target's token ids of places in the draft vocabulary, of any shape."""
        return places if self.draft_vocab is None else self.draft_vocab[places]
