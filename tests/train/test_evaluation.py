"""Evaluations while training: their batches, what they find, and that none is larger than a training step."""

from functools import partial

import pytest
import torch
from allocations import peak_of
from tiny_models import noisy_heads
from training_runs import Runs, write_recipe

from draftsmith.inference.measure.tree_statistics import (
    eagle_ranks,
    head_ranks,
    in_batches,
    next_token_ranks,
    row_batches,
)
from draftsmith.models.eagle import Eagle
from draftsmith.train import eagle, loop, medusa, ssm


def texts(vocab_size, rows=11, length=24):
    """Rows with answers of all lengths, one of them without any."""
    torch.manual_seed(6)
    tokens = torch.randint(vocab_size, (rows, length), dtype=torch.int32)
    supervised = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        supervised[row, row % 5 : 2 * row] = True
    return tokens, supervised


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("positions", [1, 40, 1000])
def test_batches_are_bounded_and_shared(positions, processes):
    """Each row once, with all of its labels; as many batches for each process."""
    tokens, supervised = texts(61)
    shares = [list(row_batches(tokens, supervised, positions, at, processes)) for at in range(processes)]
    assert len({len(share) for share in shares}) == 1
    seen, labels = [], 0
    for rows, part, marks in (batch for share in shares for batch in share):
        assert part.numel() <= max(positions, part.shape[1]), "of one row, where that is longer"
        assert torch.equal(part, tokens[rows, : part.shape[1]])
        if marks.any():
            seen += rows.tolist()
            assert torch.equal(marks, supervised[rows, : part.shape[1]])
        labels += int(marks.sum())
    assert set(range(1, 11)) <= set(seen) <= set(range(11)) and len(seen) == len(set(seen)), "row 0 has no label"
    assert labels == int(supervised.sum())


@torch.no_grad()
def test_ranks_do_not_depend_on_batches_and_processes(make_target):
    """In float64, where rounding moves no token."""
    target = make_target("llama")
    target.model.double()
    tokens, supervised = texts(target.vocab_size)
    heads = noisy_heads(target, 0.3, "shared").double()
    drafter = Eagle.for_target(target, 3, "own").double()
    for ranks_of in (
        partial(head_ranks, target, heads),
        partial(eagle_ranks, target, drafter, depth=4),
        partial(next_token_ranks, target),
    ):
        whole = ranks_of(tokens, supervised)
        assert len(whole.unique()) > 3
        for positions in (1, 40, 1000):
            assert torch.equal(in_batches(ranks_of, tokens, supervised, positions), whole)
            shares = [in_batches(ranks_of, tokens, supervised, positions, at, 3) for at in range(3)]
            assert torch.equal(torch.stack(shares).amax(0), whole)


# ---- memory

LENGTH = 128
STAGE = {"steps": 2, "batch": {"sequences": 4, "accumulate": 2}, "optim": {"lr": 1e-3}}
JOINT = {"lora": {"r": 4}, "head_weight": 0.1}
FAMILIES = {
    "medusa": (medusa, {"num_draft_heads": 3}, [{"name": "heads", **STAGE}]),
    "medusa2": (medusa, {"num_draft_heads": 3}, [{"name": "both", **STAGE, "joint": JOINT}]),
    "eagle": (eagle, {"version": 3, "unroll": 5}, [{"name": "eagle", **STAGE}]),
    "ssm": (ssm, {"layers": [0]}, [{"name": "ssm-0", **STAGE}]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_an_evaluation_takes_no_more_than_a_training_step(wide, tmp_path, run_main, monkeypatch, name):
    """Of forty rows, while training runs two at a time: neither the first one nor the last one."""
    module, drafter, stages = FAMILIES[name]
    data = {which: [{"source": "stdlib", "split": which, "limit": 40}] for which in ("train", "validation")}
    data |= {"max_length": LENGTH, "packing": True}
    sections = {"data": data, "evaluate": {"every": 2, "sequences": 40}}
    train = Runs(module.main, write_recipe(tmp_path, wide, drafter, stages, **sections), run_main)
    peaks = {"_backward": list[int](), "_evaluate": list[int]()}

    def measured(of, function):
        def call(*arguments, **named):
            found = []
            peaks[of].append(peak_of(lambda: found.append(function(*arguments, **named))))
            return found[0]

        return call

    for of in peaks:
        monkeypatch.setattr(loop, of, measured(of, getattr(loop, of)))
    train("measured")
    assert len(peaks["_backward"]) == len(peaks["_evaluate"]) == 2
    assert max(peaks["_evaluate"]) <= max(peaks["_backward"])
