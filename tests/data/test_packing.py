import numpy as np
import pytest
import torch

from draftsmith.data.packing import pack, schedule


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


def test_schedule_sees_each_row_once_per_epoch():
    order = schedule([7, 3], [1.0, 2.0], 500, 0)
    for source, size in enumerate((7, 3)):
        rows = order[order[:, 0] == source, 1]
        epochs = [tuple(rows[i : i + size]) for i in range(0, len(rows) - size + 1, size)]
        assert len(epochs) > 10
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(epochs)) > 1, "each epoch has a permutation of its own"


def test_schedule_draws_by_weight():
    order = schedule([5, 5], [1.0, 3.0], 4000, 0)
    assert (order[:, 0] == 1).mean() == pytest.approx(0.75, abs=0.03)


def test_a_source_that_is_never_drawn():
    assert schedule([4, 9], [1.0, 1e-12], 20, 0)[:, 0].max() == 0
