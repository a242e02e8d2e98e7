"""Rows of a stream: the same rows as without, each epoch, from any place, after any restart."""

import json
import multiprocessing

import pytest

from draftsmith.common.data_sections import Data, Source
from draftsmith.data import streaming
from draftsmith.data.packing import Rows
from draftsmith.data.streaming import StreamedRows
from draftsmith.data.tokenized import tokenized


@pytest.fixture(autouse=True)
def small_windows(cache, monkeypatch):
    monkeypatch.setattr(streaming, "WINDOW", 4)


def write(path, count):
    path.write_text("".join(json.dumps({"text": f"line {n} " * (n % 3 + 1)}) + "\n" for n in range(count)))
    return Source(source=str(path), streaming=True)


def data(**fields):
    return Data.model_validate(
        {"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib"}], "max_length": 48, **fields}
    )


def texts(rows, numbers, tokenizer):
    batch = rows.batch(numbers)
    return [tokenizer.decode(t[s].tolist()) for t, s in zip(batch["tokens"], batch["supervised"], strict=True)]


@pytest.mark.parametrize("packing", [False, True])
def test_every_sample_once_an_epoch(tmp_path, tokenizer, packing):
    source, settings = write(tmp_path / "a.jsonl", 10), data(packing=packing)
    rows = StreamedRows(source, settings, tokenizer, 3, tmp_path / "note.json", keep=True)
    all_rows = Rows(tokenized(source.model_copy(update={"streaming": False}), settings, tokenizer), 48, share=packing)
    whole = "".join(texts(all_rows, range(len(all_rows)), tokenizer))
    rows.batch([40])  # reads on through several epochs
    assert rows.per_epoch == 3, "windows of 4, 4 and 2 samples"
    per_epoch = rows.ends[2]
    epochs = [texts(rows, range(e * per_epoch, (e + 1) * per_epoch), tokenizer) for e in range(3)]
    for epoch in epochs:
        assert sorted("".join(epoch)) == sorted(whole) and len(epoch) == per_epoch
    if not packing:
        assert per_epoch == 10
        assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]), "shuffled anew"
        assert {t.split()[1] for t in epochs[0][:4]} == {"0", "1", "2", "3"}, "within windows"


def test_a_resumed_run_sees_the_same_and_does_not_begin_anew(tmp_path, tokenizer, monkeypatch):
    source = write(tmp_path / "a.jsonl", 30)
    note = tmp_path / "streams/0.json"
    rows = StreamedRows(source, data(), tokenizer, 3, note, keep=True)
    expected = [texts(rows, [n], tokenizer) for n in range(70)]
    read = []
    original = streaming.rows
    monkeypatch.setattr(streaming, "rows", lambda source, skip: read.append(skip) or original(source, skip))
    again = StreamedRows(source, data(), tokenizer, 3, note, keep=True)
    assert [texts(again, [n], tokenizer) for n in range(45, 70)] == expected[45:]
    assert read == [0, 12, 0], "from the window of row 45 on (row 15 of the second epoch), and once around"
    fresh = StreamedRows(source, data(), tokenizer, 3, tmp_path / "other.json", keep=False)
    assert [texts(fresh, [n], tokenizer) for n in (66, 3, 20)] == [expected[66], expected[3], expected[20]]
    assert not (tmp_path / "other.json").exists()
    other = StreamedRows(source, data(), tokenizer, 4, note, keep=True)
    assert [texts(other, [n], tokenizer) for n in range(30)] != expected[:30], "another seed, another order"


def test_counts_of_other_rows_are_not_taken(tmp_path, tokenizer):
    """Of a file that has changed since, or of other tokens."""
    note, held = tmp_path / "streams/0.json", data(max_length=4)
    for count, settings in ((30, data()), (10, data()), (10, held), (10, held)):
        rows = StreamedRows(write(tmp_path / "a.jsonl", count), settings, tokenizer, 3, note, keep=True)
        rows.batch([60])
        fresh = StreamedRows(rows.source, settings, tokenizer, 3, tmp_path / "none.json", keep=False)
        fresh.batch([60])
        assert rows.ends == fresh.ends and rows.per_epoch == fresh.per_epoch == -(-count // 4)
    tokenizer.add_special_tokens({"additional_special_tokens": ["line"]})
    assert StreamedRows(rows.source, held, tokenizer, 3, note, keep=True).per_epoch is None, "tokens are others"


def test_a_limit(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", 30).model_copy(update={"limit": 6})
    rows = StreamedRows(source, data(), tokenizer, 0, tmp_path / "note.json", keep=True)
    assert {text.split()[1] for text in texts(rows, range(18), tokenizer)} == set("012345")


@pytest.mark.parametrize("packing", [False, True])
def test_odd_rows_of_a_stream(tmp_path, tokenizer, packing):
    """Windows of 4: one odd row in the first, the last one (of 2) has none but odd rows; both epochs go through."""
    good = [json.dumps({"text": f"line {n} "}) for n in range(7)]
    (tmp_path / "a.jsonl").write_text("\n".join([good[0], "{", *good[1:], "[]", "null"]) + "\n")
    source = Source(source=str(tmp_path / "a.jsonl"), streaming=True)
    rows = StreamedRows(source, data(packing=packing, max_skipped=0.5), tokenizer, 0, tmp_path / "n.json", keep=True)
    assert rows.skipped.reasons == {"not valid JSON": (1, "line 2")} and rows.skipped.rows == 4
    count = rows.ends[0]
    found = "".join(texts(rows, range(2 * (7 if not packing else count + 1)), tokenizer))
    assert all(found.count(f"line {n} ") == 2 for n in range(7))
    assert rows.per_epoch == 3 and rows.ends[2] == rows.ends[1], "the last window is empty"
    again = StreamedRows(source, data(packing=packing, max_skipped=0.5), tokenizer, 0, tmp_path / "n.json", keep=True)
    assert "".join(texts(again, range(rows.ends[4]), tokenizer)) == found


def test_what_cannot_be_streamed(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' * 5 + '{"question": "?"}\n' * 3)
    source = Source(source=str(tmp_path / "a.jsonl"), streaming=True)
    with pytest.raises(ValueError, match=r"a\.jsonl': 3 of 4 rows skipped: 3 × it has question.*first: line 6"):
        StreamedRows(source, data(), tokenizer, 0, tmp_path / "note.json", keep=True).batch([5])
    empty = write(tmp_path / "empty.jsonl", 0)
    with pytest.raises(ValueError, match="empty.jsonl"):
        StreamedRows(empty, data(), tokenizer, 0, tmp_path / "n.json", keep=True)
    with pytest.raises(ValueError, match="'streaming' is for"):
        Source(source="stdlib", streaming=True)
    with pytest.raises(ValueError, match="set 'limit' to its number of rows"):
        data(validation=[{"source": "a/b", "streaming": True}])


def test_another_process_reads_on(tmp_path, tokenizer):
    """A worker, forked from a process that has read a part: it finds the same rows, moves nothing in that process, and
    leaves it the windows' ends."""
    path, note = tmp_path / "a.jsonl", tmp_path / "note.json"  # a file of many buffers
    path.write_text("".join(json.dumps({"text": f"line {n} " + "far " * 2000}) + "\n" for n in range(30)))
    source = Source(source=str(path), streaming=True)
    fresh = StreamedRows(source, data(), tokenizer, 3, tmp_path / "other.json", keep=False)
    expected = [texts(fresh, [n], tokenizer) for n in range(40)]
    rows = StreamedRows(source, data(), tokenizer, 3, note, keep=True)
    assert [texts(rows, [n], tokenizer) for n in range(6)] == expected[:6]
    fork = multiprocessing.get_context("fork")
    found = fork.Queue()
    worker = fork.Process(target=lambda: found.put([texts(rows, [n], tokenizer) for n in range(6, 20)]))
    worker.start()
    assert found.get(timeout=60) == expected[6:20]
    worker.join()
    ends = rows.ends[-1]
    assert [texts(rows, [n], tokenizer) for n in range(8, 40)] == expected[8:]
    assert ends == 8, "what the worker read is known here by its note alone"


def test_what_a_worker_read_is_not_read_again(tmp_path, tokenizer, monkeypatch):
    source, note = write(tmp_path / "a.jsonl", 30), tmp_path / "note.json"
    rows = StreamedRows(source, data(), tokenizer, 3, note, keep=True)
    worker = multiprocessing.get_context("fork").Process(target=rows.batch, args=([25],))
    worker.start()
    worker.join()
    read, original = [], streaming.rows
    monkeypatch.setattr(streaming, "rows", lambda source, skip: read.append(skip) or original(source, skip))
    assert texts(rows, [25], tokenizer)
    assert read == [24], "no window before that of row 25"
