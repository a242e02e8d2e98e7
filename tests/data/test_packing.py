import time

import numpy as np
import pytest
import torch

from draftsmith.data.packing import Rows, Sample, Tokenized, describe, pack, schedule


def test_pack_joins_with_a_separator_and_drops_the_tail():
    rows = pack([[1, 2, 3], [4], [5, 6]], length=4, separator=0)
    assert rows.tolist() == [[1, 2, 3, 0], [4, 0, 5, 6]]
    assert rows.dtype == torch.int32


def test_pack_needs_one_row():
    with pytest.raises(ValueError, match="4 tokens do not fill one row of 5"):
        pack([[1, 2, 3]], length=5, separator=0)
    assert pack([[1, 2, 3, 4]], length=5, separator=0).tolist() == [[1, 2, 3, 4, 0]]


def test_schedule_is_a_pure_function():
    arguments = ([7, 3], [1.0, 2.0], 50, 11)
    np.random.seed(0)
    first = schedule(*arguments)
    np.random.seed(1)
    assert (schedule(*arguments) == first).all()
    assert (schedule([7, 3], [1.0, 2.0], 50, 12) != first).any()


def test_streamed_rows_come_as_they_are():
    order = schedule([7, None], [1.0, 2.0], 60, 0)
    streamed = order[order[:, 0] == 1]
    assert streamed[:, 1].tolist() == list(range(len(streamed))) and 20 < len(streamed) < 60


def test_samples_for_a_person():
    assert describe(["a", "b.jsonl"], np.array([[1, 4], [0, 7], [1, 2]])) == "b.jsonl rows 4, 2; a row 7"


def test_schedule_sees_each_row_once_per_epoch():
    order = schedule([7, 3], [1.0, 2.0], 500, 0)
    for source, size in enumerate((7, 3)):
        rows = order[order[:, 0] == source, 1]
        epochs = [tuple(rows[i : i + size]) for i in range(0, len(rows) - size + 1, size)]
        assert len(epochs) > 10
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(epochs)) > 1, "each epoch has a permutation of its own"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_schedule_is_a_permutation_after_the_other(size):
    rng = np.random.default_rng(3)
    rng.choice(1, size=2500, p=[1.0])
    expected = np.concatenate([rng.permutation(size) for _ in range(-(-2500 // size))])[:2500]
    assert (schedule([size], [1.0], 2500, 3)[:, 1] == expected).all(), "as the runs before"


def test_schedule_of_a_source_with_one_row_is_fast():
    began = time.process_time()
    assert len(schedule([1, 2], [1.0, 1.0], 1_000_000, 0)) == 1_000_000
    assert time.process_time() - began < 1


def test_schedule_draws_by_weight():
    order = schedule([5, 5], [1.0, 3.0], 4000, 0)
    assert (order[:, 0] == 1).mean() == pytest.approx(0.75, abs=0.03)


def test_a_source_that_is_never_drawn():
    assert schedule([4, 9], [1.0, 1e-12], 20, 0)[:, 0].max() == 0


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
