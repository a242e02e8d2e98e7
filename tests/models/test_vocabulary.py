"""Draft vocabularies: which ids, what they cover, where a token is in them."""

import pytest
import torch

from draftsmith.models.vocabulary import check_draft_vocab, coverage, coverage_by_size, most_frequent, to_draft_ids


def test_most_frequent():
    """The highest counts, ties by the lower id, in ascending order."""
    assert most_frequent(torch.tensor([2, 5, 0, 5, 2, 7, 2]), 4).tolist() == [0, 1, 3, 5]
    counts = torch.randint(6, (200,), generator=torch.Generator().manual_seed(0))
    for size in (1, 50, 199, 200):
        chosen = sorted(range(200), key=lambda token: (-int(counts[token]), token))[:size]
        ids = most_frequent(counts, size)
        assert ids.tolist() == sorted(chosen) and ids.dtype == torch.int64


def test_coverage_is_a_share_of_the_labels():
    train, held_out = torch.tensor([6, 1, 0, 3]), torch.tensor([1, 2, 4, 1])
    ids = torch.tensor([0, 3])
    assert (coverage(train, ids), coverage(held_out, ids)) == (0.9, 0.25)
    assert coverage(torch.zeros(4, dtype=torch.int64), ids) == 0
    # Other sizes are chosen by the training labels, the held-out ones are only looked up.
    assert coverage_by_size(train, held_out, (1, 3, 4, 9)) == {1: (0.6, 0.125), 3: (1.0, 0.5)}


def test_places():
    ids = torch.tensor([0, 3, 4, 9])
    tokens = torch.tensor([[4, 5, 0], [-100, 9, 10], [3, -1, 8]])
    assert to_draft_ids(tokens, ids, outside=-100).tolist() == [[2, -100, 0], [-100, 3, -100], [1, -100, -100]]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2], "is [2] of int64; draft_vocab_size=3 needs [3] of int64 or int32"),
        ([1.0, 2.0, 4.0], "is [3] of float32; draft_vocab_size=3 needs"),
        ([1, 4, 2], "does not ascend, or holds an id twice"),
        ([1, 1, 2], "does not ascend, or holds an id twice"),
        ([-1, 1, 2], "holds ids from -1 to 2; the target's are 0 to 5"),
        ([1, 2, 6], "holds ids from 1 to 6; the target's are 0 to 5"),
    ],
)
def test_check_refuses(ids, said):
    check_draft_vocab(torch.tensor([0, 2, 5], dtype=torch.int32), 3, 6, "x")
    with pytest.raises(ValueError) as error:
        check_draft_vocab(torch.tensor(ids), 3, 6, "runs/x/model.safetensors")
    assert str(error.value).startswith(f"runs/x/model.safetensors: 'draft_vocab' {said}")
