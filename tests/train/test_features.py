"""Hidden states that are kept: the ones the target makes, in memory or on disk, and no room for them said before."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from faults import limited

from draftsmith.common.files import read_json, write_json
from draftsmith.common.sections import Precision
from draftsmith.data.packing import Rows, Sample, Tokenized
from draftsmith.models.target import Target
from draftsmith.train import features, launch
from draftsmith.train.features import hidden_states


def all_rows(kept):
    return torch.stack([kept[row, :] for row in range(5)])


@pytest.fixture(scope="module")
def rows():
    torch.manual_seed(0)
    sizes = [9, 5, 7, 3, 9, 8, 2, 6, 4, 5]
    samples = [Sample(torch.randint(61, (size,)).tolist(), [True] * size) for size in sizes]
    return Rows(Tokenized.of(samples), 12, share=True)


@pytest.fixture(scope="module")
def accelerator():
    return launch.make_accelerator(Precision(threads=1))


@torch.no_grad()
def test_they_are_the_targets(make_target, rows, accelerator, tmp_path):
    target = make_target("llama")
    batch = rows.batch(range(len(rows)))
    wanted = target.hidden(batch["tokens"].long(), batch["positions"])
    for stored in (None, tmp_path / "a" / "0"):
        kept = hidden_states(target, rows, torch.float32, accelerator, stored, batch_size=2)
        torch.testing.assert_close(all_rows(kept), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
        half = hidden_states(target, rows, torch.bfloat16, accelerator, stored, batch_size=2)
        torch.testing.assert_close(all_rows(half).float(), wanted, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_a_killed_run_makes_only_the_rest(make_target, rows, accelerator, tmp_path, monkeypatch):
    target, stored, calls = make_target("llama"), tmp_path / "0", []
    hidden = Target.hidden

    def counted(self, tokens, positions=None):
        calls.append(len(tokens))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return hidden(self, tokens, positions)

    monkeypatch.setattr(Target, "hidden", counted)
    with pytest.raises(KeyboardInterrupt):
        hidden_states(target, rows, torch.float32, accelerator, stored, batch_size=1)
    kept = hidden_states(target, rows, torch.float32, accelerator, stored, batch_size=1)
    assert len(calls) == 2 + len(rows), "two were kept, one of them was compared, the third was asked for twice"
    again = hidden_states(target, rows, torch.float32, accelerator, stored, batch_size=1)
    assert len(calls) == 3 + len(rows) and torch.equal(all_rows(again), all_rows(kept))
    monkeypatch.undo()
    assert torch.equal(all_rows(kept), hidden_states(target, rows, torch.float32, accelerator, None, batch_size=1))
    described = stored / "asked.json"
    write_json(described, read_json(described) | {"target": "older"})
    target.fingerprint, target.older_fingerprint = "newer", "older"
    made = len(calls)
    monkeypatch.setattr(Target, "hidden", counted)
    for _ in range(2):
        again = hidden_states(target, rows, torch.float32, accelerator, stored, batch_size=1)
        assert torch.equal(all_rows(kept), all_rows(again))
    assert len(calls) == made + 2 and read_json(described)["target"] == "newer", "known by the older fingerprint"
    monkeypatch.undo()
    other = make_target("qwen3")
    other.fingerprint = "another"
    moved = hidden_states(other, rows, torch.float32, accelerator, stored, batch_size=1)
    assert not torch.equal(all_rows(moved), all_rows(kept)), "another target's are made anew"


@torch.no_grad()
def test_what_overflows_is_not_kept(make_target, rows, accelerator, tmp_path, monkeypatch):
    """Not even where it does so only in the dtype in which it is kept."""
    target, hidden = make_target("llama"), Target.hidden

    def large(self, tokens, positions=None):
        return hidden(self, tokens, positions).index_fill(0, torch.tensor([1]), 1e5)

    monkeypatch.setattr(Target, "hidden", large)
    hidden_states(target, rows, torch.float32, accelerator, tmp_path / "0", 5)
    with pytest.raises(ValueError, match=r"hidden states of row 1 are not finite in torch\.float16; set target\.dtype"):
        hidden_states(target, rows, torch.float16, accelerator, tmp_path / "1", 5)
    assert (tmp_path / "0/0.bin").exists() and [path.name for path in (tmp_path / "1").iterdir()] == ["asked.json"]


@torch.no_grad()
def test_captured_layers_are_kept_too(make_target, rows, accelerator, tmp_path):
    """In the order in which they are asked for; another order, or none, is another file."""
    target, stored = make_target("llama"), tmp_path / "0"
    batch = rows.batch(range(len(rows)))
    for captures in ((1, 0), (0, 1), ()):
        wanted = target.features(batch["tokens"].long(), captures, batch["positions"])
        for _ in range(2):
            kept = hidden_states(target, rows, torch.float32, accelerator, stored, 2, captures)
            torch.testing.assert_close(all_rows(kept), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("damage", ["zeros", "one token", "nan", "the next token's"])
def test_what_was_damaged_is_found(make_target, rows, accelerator, tmp_path, damage):
    target, stored = make_target("llama"), tmp_path / "0"
    hidden_states(target, rows, torch.float32, accelerator, stored, 2, (1,))
    kept = torch.from_file(str(stored / "4.bin"), shared=True, size=12 * 64).view(1, 12, 64)
    if damage == "zeros":
        kept[0] = 0
    elif damage == "one token":
        kept[0, 3, 32:] *= 1.3
    elif damage == "nan":
        kept[0, 7, 40] = torch.nan
    else:
        kept[0, :-1] = kept[0, 1:].clone()
    with pytest.raises(ValueError, match="/0: the target makes other hidden states than .*; delete that folder"):
        hidden_states(target, rows, torch.float32, accelerator, stored, 2, (1,))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_no_room(make_target, rows, accelerator, tmp_path, monkeypatch, where):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(features, "free_bytes", lambda device: 1000)
    stored = tmp_path / "new" / "0" if where == "disk" else None
    wanted = r"cache_hidden: 5 rows × 12 tokens × 32 take 0.00 GB .*; set cache_hidden=none"
    with pytest.raises(ValueError, match=wanted):
        hidden_states(make_target("llama"), rows, torch.float32, accelerator, stored)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_the_estimate_is_said_before(make_target, rows, accelerator, tmp_path, capsys):
    hidden_states(make_target("llama"), rows, torch.float32, accelerator, tmp_path / "0")
    out = capsys.readouterr().out
    assert "cache_hidden: 5 rows × 12 tokens × 32 take 0.00 GB on disk in" in out and "are free" in out
    assert (tmp_path / "0/0.bin").stat().st_size == 5 * 12 * 32 * 4


@torch.no_grad()
def test_room_that_another_takes_meanwhile(make_target, rows, accelerator, tmp_path):
    """The error names the file, of which nothing is left; what was written before stays."""
    stored = tmp_path / "0"
    hidden_states(make_target("llama"), rows, torch.float32, accelerator, stored, 2)
    (stored / "2.bin").unlink()
    with limited(1000), pytest.raises(OSError) as caught:
        hidden_states(make_target("llama"), rows, torch.float32, accelerator, stored, 2)
    assert caught.value.filename == str(stored / "2.bin")
    assert sorted(path.name for path in stored.iterdir()) == ["0.bin", "4.bin", "asked.json"]


@torch.no_grad()
def test_files_of_many_batches(make_target, rows, accelerator, tmp_path, monkeypatch):
    """As many rows in each, but for the last one."""
    monkeypatch.setattr(features, "FILES", 2)
    target, stored = make_target("llama"), tmp_path / "0"
    for _ in range(2):
        kept = hidden_states(target, rows, torch.float32, accelerator, stored, batch_size=1)
        assert torch.equal(all_rows(kept), hidden_states(target, rows, torch.float32, accelerator, batch_size=1))
    assert sorted(path.name for path in stored.iterdir()) == ["0.bin", "3.bin", "asked.json"]


def test_a_forward_pass_has_so_many_tokens():
    assert [features.rows_at_once(length) for length in (96, 512, 1000, 2048, 4096, 100_000)] == [64, 64, 32, 16, 8, 1]
