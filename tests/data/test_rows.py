"""Files as they really are: malformed rows cost only themselves, and what is wrong with a file is one line."""

import itertools
import json
import os

import pytest

from draftsmith.common.data_sections import Source
from draftsmith.data.rows import MOST_REASONS, Skipped, UnusableRow, rows, usable

DEEP = "[" * 100_000
FINE = '{"text": "fine"}'


def read(path, skip=0, **fields):
    """(place, row or reason) of each row."""
    found = rows(Source(source=str(path), **fields), skip)[0]
    return [(place, f"odd: {row}" if isinstance(row, UnusableRow) else row) for place, row in found]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"text": "tr', "not valid JSON"),
        (b'{"text": NaN, }', "not valid JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"text": ' + DEEP.encode() + b"}", "JSON nested too deeply"),
        (b'{"x": ' * 100_000, "JSON nested too deeply"),
        (b'{"text": "\\ud800"}', "a \\u escape that is half of a surrogate pair is no text"),
        ('{"text": "é"}'.encode("latin-1"), "not UTF-8 text"),
    ],
)
def test_malformed_lines_cost_only_themselves(tmp_path, line, reason, streaming):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + FINE.encode() + b"\r\n\n  \n" + line + b"\n" + FINE.encode())
    fine = {"text": "fine"}
    assert read(path, streaming=streaming) == [("line 1", fine), ("line 4", f"odd: {reason}"), ("line 5", fine)]
    assert read(path, skip=1, streaming=streaming)[0][0] == "line 4"


def test_columns_that_change_their_type(tmp_path):
    lines = [{"id": 1, "text": "a"}, {"id": "x", "text": None}, {"id": [1, {"y": 2}]}, [1], "text", 7, None]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "b.json").write_text("\ufeff \n" + json.dumps(lines, indent=1), encoding="utf-8")
    for name in ("a.jsonl", "a.json", "b.json"):
        assert [row for _, row in read(tmp_path / name)] == lines
    skipped = Skipped()
    texts = usable(rows(Source(source=str(tmp_path / "b.json")))[0], lambda row: str(row["id"]), skipped)
    assert list(texts) == [("row 1", "1"), ("row 2", "x"), ("row 3", "[1, {'y': 2}]")]
    assert skipped == Skipped(7, {"no mapping of fields": (4, "row 4")})


@pytest.mark.parametrize("text", ["[]", " [ ] \n", "", "\n\n"])
def test_empty_files(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path / "a.json") == []


def test_a_surrogate_in_an_array(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "\\ud83d\\ude00"}, {"text": "\\ud800"}, {"text": "x"}]')
    reason = "odd: a \\u escape that is half of a surrogate pair is no text"
    assert read(tmp_path / "a.json") == [("row 1", {"text": "😀"}), ("row 2", reason), ("row 3", {"text": "x"})]


@pytest.mark.parametrize(
    "text, message",
    [
        (f"[{FINE}, {FINE[:-3]}", r"a\.json: row 2: not valid JSON \(.* column 29 \(char 28\)\)"),
        (f"[{FINE}, {FINE}", r"a\.json: not valid JSON after row 2: ',' or '\]' is needed"),
        (f"[{FINE} {FINE}]", r"a\.json: not valid JSON after row 1: ',' or '\]' is needed"),
        (f"[{FINE},]", r"a\.json: row 2: not valid JSON"),
        (f"[{FINE}] x", r"a\.json: not valid JSON: there is text after the array"),
        ("[", r"a\.json: row 1: not valid JSON"),
        (DEEP, r"a\.json: row 1: JSON nested too deeply"),
        (f"[{FINE}, {DEEP}", r"a\.json: row 2: JSON nested too deeply"),
        ("[" + "9" * 5000 + "]", r"a\.json: row 1: not valid JSON"),
        ('["é"]'.encode("latin-1"), r"a\.json: not UTF-8 text \(byte 2\)"),
        ('[{"text": "x"}]'.encode("utf-16"), r"a\.json is UTF-16 text; save it as UTF-8"),
    ],
)
def test_broken_arrays(tmp_path, text, message):
    (tmp_path / "a.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / "a.json")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def make_loop(path):
    os.symlink(path, path)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt", "parquet"])
@pytest.mark.parametrize(
    "make, message",
    [
        (make_loop, "cannot be read"),
        (lambda path: path.mkdir(), "cannot be read"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read"),
        (lambda path: None, "there is no such file"),
    ],
    ids=["loop", "folder", "dangling", "missing"],
)
def test_invalid_files(tmp_path, suffix, make, message):
    make(tmp_path / f"a.{suffix}")
    for name in (f"a.{suffix}", f"*.{suffix}"):
        with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)


def test_a_damaged_parquet_file(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(ValueError, match=r"a\.parquet': cannot be read"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["x" * 300 + ".jsonl", "x" * 100_000 + ".json", "\0.jsonl"])
def test_missing_sources(name):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read(name)


def test_texts(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfimport os\n")
    assert read(tmp_path / "a.txt") == [("file a.txt", {"text": "import os\n"})]
    (tmp_path / "b.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"b\.txt: not UTF-8 text \(byte 0\)"):
        read(tmp_path / "*.txt")


def test_places_in_several_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f"{FINE}\n{{\n")
    assert [place for place, _ in read(tmp_path / "*.jsonl")] == [
        f"line {line} of {name}.jsonl" for name, line in itertools.product("ab", (1, 2))
    ]


def test_what_is_known_of_files_changes_with_them(tmp_path):
    path = tmp_path / "a.jsonl"

    def known(**fields):
        return rows(Source(source=str(path), **fields))[1]

    path.write_text(FINE)
    before = known(), known(streaming=True)
    assert before == (known(), known(streaming=True))
    path.write_text(FINE.replace("fine", "Fine"))
    assert known() != before[0] and known(streaming=True) == before[1], "of a stream only the size is known"
    path.write_text(FINE + " ")
    assert known(streaming=True) != before[1]


def test_reasons_do_not_grow_without_end():
    skipped = Skipped(1000)
    for number in range(100):
        skipped.add(f"reason {number}", f"row {number}")
    assert len(skipped.reasons) == MOST_REASONS + 1 and skipped.count == 100
    assert skipped.reasons["other reasons"] == (100 - MOST_REASONS, f"row {MOST_REASONS}")
    assert skipped.table()[0] == (100 - MOST_REASONS, "other reasons", f"row {MOST_REASONS}")


@pytest.mark.parametrize(
    "count, rows, most, of, refused",
    [
        (10, 100, 0.1, 0, False),
        (11, 100, 0.1, 0, True),
        (1, 2, 0.1, 0, False),
        (2, 3, 0.1, 0, True),
        (1, 100, 0.0, 0, True),
        (0, 0, 0.0, 0, False),
        (5, 5, 1.0, 0, False),
        (100, 100, 0.1, 1000, False),
        (101, 101, 0.1, 1000, True),
    ],
)
def test_the_limit_of_skipped_rows(count, rows, most, of, refused):
    skipped = Skipped(rows)
    if count:
        skipped.add("an empty conversation", "row 3", count)
    if refused:
        with pytest.raises(ValueError, match=f"source .x.: {count} of {rows} rows skipped: {count} × an empty"):
            skipped.check("x", most, of)
    else:
        skipped.check("x", most, of)
