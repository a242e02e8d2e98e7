"""Which rows each sample of a run is, and the batches they make."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.train import samples
from draftsmith.train.samples import Sampler, WithHidden, prompts_of


def order(sizes, weights, count, seed):
    """Of sources of these sizes; None: a streamed one, which has none."""
    rows = [range(size) if size is not None else SimpleNamespace(length=1) for size in sizes]
    return Sampler(rows, weights, seed, [f"source {n}" for n in range(len(sizes))]).order(count)


def test_it_is_a_pure_function():
    arguments = ([7, 3], [1.0, 2.0], 50, 11)
    np.random.seed(0)
    first = order(*arguments)
    np.random.seed(1)
    assert (order(*arguments) == first).all()
    assert (order([7, 3], [1.0, 2.0], 50, 12) != first).any()


def test_more_samples_change_no_earlier_one():
    sizes = [7, None, 1, 30]
    longer = order(sizes, [1.0, 2.0, 0.5, 3.0], 900, 4)
    for count in (1, 37, 250, 899):
        assert (order(sizes, [1.0, 2.0, 0.5, 3.0], count, 4) == longer[:count]).all()


def test_streamed_rows_come_as_they_are():
    found = order([7, None], [1.0, 2.0], 60, 0)
    streamed = found[found[:, 0] == 1]
    assert streamed[:, 1].tolist() == list(range(len(streamed))) and 20 < len(streamed) < 60


def test_each_row_once_per_epoch():
    found = order([7, 3], [1.0, 2.0], 500, 0)
    for source, size in enumerate((7, 3)):
        rows = found[found[:, 0] == source, 1]
        epochs = [tuple(rows[i : i + size]) for i in range(0, len(rows) - size + 1, size)]
        assert len(epochs) > 10
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(epochs)) > 1, "each epoch has a permutation of its own"


def test_sources_of_one_size_are_walked_differently():
    found = order([40, 40], [1.0, 1.0], 400, 0)
    first, second = (found[found[:, 0] == source, 1][:40].tolist() for source in (0, 1))
    assert sorted(first) == sorted(second) and first != second


def test_a_source_with_one_row_is_fast():
    began = time.process_time()
    assert len(order([1, 2], [1.0, 1.0], 1_000_000, 0)) == 1_000_000
    assert time.process_time() - began < 1


def test_sources_are_drawn_by_weight():
    found = order([5, 5, 5], [1.0, 3.0, 1e-12], 4000, 0)
    assert (found[:, 0] == 1).mean() == pytest.approx(0.75, abs=0.03)
    assert found[:, 0].max() == 1, "the third is never drawn"


def rows_of(*lengths, begin=0):
    ids = itertools.count(begin)
    samples = [Sample([next(ids) for _ in range(length)], [True] * length) for length in lengths]
    return Rows(Tokenized.of(samples), 8, share=False)


def test_the_batches_of_a_stage():
    """A stage goes on where the one before it ended; batches are as long as the longest row among them."""
    short, long = rows_of(2, 2, 2), rows_of(5, 4, begin=100)
    sampler = Sampler([short, long], [1.0, 1.0], 3, ["short", "long.jsonl"])
    whole = sampler.order(12)
    stage = sampler.stage(8, before=4)
    assert (stage.order == whole[4:]).all()
    for first in range(8):
        source, row = whole[4 + first]
        batch = stage(range(first, first + 1))
        size = (2, 5 - row)[source]
        assert batch["tokens"].shape == (1, size)
        assert torch.equal(batch["tokens"], (short, long)[source].batch([row])["tokens"][:, :size])
    mixed = stage(range(8))
    assert set(whole[4:, 0]) == {0, 1} and mixed["tokens"].shape == (8, 5)
    some = stage(range(3, 6))["tokens"]
    assert torch.equal(some, mixed["tokens"][3:6, : some.shape[1]])
    names = [f"{('short', 'long.jsonl')[source]} row {row}" for source, row in whole[4:6]]
    assert stage.describe(range(1)) == names[0]
    assert Sampler([short], [1.0], 3, ["a"]).stage(3).describe(range(2)).startswith("a rows ")


def test_labels_of_a_stage_are_those_of_its_batches():
    """Those of a row each time it comes, with kept hidden states, too; not known of rows that are no texts."""
    ids = itertools.count(1)
    marked = [Sample([next(ids) for _ in range(n)], [place % 3 > 0 for place in range(n)]) for n in (5, 3, 8, 2, 7)]
    rows = Rows(Tokenized.of(marked), 9, share=True)
    other = Rows(Tokenized.of(marked[2:]), 9, share=True)
    kept = WithHidden(rows, torch.zeros(len(rows), 9, 2))
    for sources in ([rows, other], [kept]):
        stage = Sampler(sources, [1.0, 2.0][: len(sources)], 3, ["a", "b"][: len(sources)]).stage(20, before=4)
        for first in (20, 7):
            assert stage.labels(first) == int(stage(range(first))["supervised"].sum()) > 2 * first
    assert Sampler([rows, SimpleNamespace(length=1)], [1.0, 1.0], 3, ["a", "b"]).stage(5).labels(5) is None


def test_rows_beside_the_samples_are_taken_in_turn():
    stage = Sampler([rows_of(3, 3)], [1.0], 0, ["a"]).stage(7, beside={"written": torch.arange(3)})
    assert stage(range(7))["written"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert stage(range(4, 6))["written"].tolist() == [1, 2]


def test_hidden_states_stay_with_their_rows():
    rows = rows_of(4, 2, 3)
    hidden = torch.arange(3 * 4 * 2.0).view(3, 4, 2)
    batch = WithHidden(rows, hidden).batch([2, 0], 6)
    assert torch.equal(batch["hidden"][:, :4], hidden[[2, 0]]) and not batch["hidden"][:, 4:].any()
    assert torch.equal(batch["tokens"], rows.batch([2, 0], 6)["tokens"])
    stage = Sampler([WithHidden(rows, hidden), rows_of(4)], [1.0, 1.0], 0, ["a", "b"]).stage(9)
    kept = ["hidden" in stage(range(n, n + 1)) for n in range(9)]
    for n, both in enumerate(itertools.pairwise(kept)):
        assert ("hidden" in stage(range(n, n + 2))) == all(both), "what only some rows have is asked for later"
    assert (True, False) in itertools.pairwise(kept)


def test_held_out_rows_are_of_each_source_in_turn(monkeypatch, capsys):
    """So that the first ones, by which the best weights are chosen, are not of the first source alone."""
    sources = [rows_of(2, 2, 2, 2), rows_of(3, begin=10), rows_of(2, 2, begin=20)]
    monkeypatch.setattr(samples, "rows_of", lambda *_: sources)
    recipe = SimpleNamespace(evaluate=SimpleNamespace(sequences=8), data=SimpleNamespace(validation=sources))
    held_out = samples.held_out_rows(recipe, None)
    assert held_out["tokens"][:, 0].tolist() == [0, 10, 20, 2, 22, 4, 6]
    assert held_out["supervised"].sum(1).tolist() == [2, 3, 2, 2, 2, 2, 2]
    del sources[1:]
    assert torch.equal(samples.held_out_rows(recipe, None)["tokens"], sources[0].batch(range(4))["tokens"])
    monkeypatch.setattr(samples, "HELD_OUT", 2)
    assert len(samples.held_out_rows(recipe, None)["tokens"]) == 4, "as many as evaluations use"
    recipe.evaluate.sequences, sources[0].label = 3, "a.jsonl"
    assert len(samples.held_out_rows(recipe, None)["tokens"]) == 3
    assert "a.jsonl: the first 3 of 4 rows are used" in capsys.readouterr().out


def test_prompts_precede_the_first_label():
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
    supervised = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert prompts_of({"tokens": tokens, "supervised": supervised}) == [[1, 2]], (
        "the others have no prompt, or no label"
    )
