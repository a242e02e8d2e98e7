import numpy as np
import pytest
import torch

from draftsmith.data.packing import Rows, Sample, Tokenized, pack


def test_pack_joins_with_a_separator_and_drops_the_tail():
    rows = pack([[1, 2, 3], [4], [5, 6]], "a", length=4, separator=0)
    assert rows.tolist() == [[1, 2, 3, 0], [4, 0, 5, 6]]
    assert rows.dtype == torch.int32
    with pytest.raises(ValueError, match="data source 'a': 4 tokens do not fill one row of 5"):
        pack([[1, 2, 3]], "a", length=5, separator=0)
    assert pack([[1, 2, 3, 4]], "a", length=5, separator=0).tolist() == [[1, 2, 3, 4, 0]]


# ---- samples in rows


def samples_of(*lengths):
    """Sample i is i × 100 + 1, i × 100 + 2, …; all but its first token is supervised."""
    return Tokenized.of(
        Sample([i * 100 + n for n in range(1, length + 1)], [False] + [True] * (length - 1))
        for i, length in enumerate(lengths)
    )


def test_tokenized():
    samples = samples_of(3, 1, 2)
    assert len(samples) == 3 and samples.starts.tolist() == [0, 3, 4, 6]
    assert samples.tokens.tolist() == [1, 2, 3, 101, 201, 202]
    assert samples.supervised.tolist() == [False, True, True, False, False, True]
    assert samples.without_label() == 1
    only_first = Tokenized.of([Sample([7, 8], [True, False]), Sample([], [])])
    assert only_first.without_label() == 2, "nothing predicts a first token"
    assert samples.sha256() == samples_of(3, 1, 2).sha256() != samples_of(3, 2, 1).sha256()


def test_one_sample_to_a_row():
    batch = Rows(samples_of(3, 1, 2), 50, share=False).batch([2, 0])
    assert batch["tokens"].tolist() == [[201, 202, 0], [1, 2, 3]]
    assert batch["segment"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["supervised"].tolist() == [[False, True, False], [False, True, True]]
    assert "positions" not in batch
    assert Rows(samples_of(3, 1), 50, share=False).batch([1], 5)["tokens"].tolist() == [[101, 0, 0, 0, 0]]


def test_several_samples_to_a_row():
    rows = Rows(samples_of(3, 2, 5, 2), 8, share=True)
    batch = rows.batch(range(len(rows)))
    assert batch["tokens"].tolist() == [[201, 202, 203, 204, 205, 1, 2, 3], [101, 102, 301, 302, 0, 0, 0, 0]]
    assert batch["segment"].tolist() == [[1] * 5 + [2] * 3, [1, 1, 2, 2, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 0, 1, 2, 3]]


def test_rows_hold_every_sample_once_and_little_padding():
    rng = np.random.default_rng(0)
    samples = samples_of(*rng.integers(1, 60, 300).tolist())
    rows = Rows(samples, 64, share=True)
    assert sorted(i for row in rows.rows for i in row) == list(range(300))
    batch = rows.batch(range(len(rows)))
    assert sorted(batch["tokens"][batch["segment"] > 0].tolist()) == sorted(samples.tokens.tolist())
    assert float((batch["segment"] == 0).float().mean()) < 0.05


def test_rows_refuse():
    with pytest.raises(ValueError, match="the data set is empty"):
        Rows(samples_of(), 8, share=True)
    with pytest.raises(ValueError, match="a sample of 9 tokens does not fit into rows of 8"):
        Rows(samples_of(9), 8, share=True)
