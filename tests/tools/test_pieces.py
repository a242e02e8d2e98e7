"""A file in pieces and back; whatever is wrong with them is one line, and nothing is written."""

import hashlib
import json

import pytest

from draftsmith.common.files import check_file, replacing
from draftsmith.tools import pieces

CONTENT = bytes(range(256)) * 10  # 2560 bytes: pieces of 1000, 1000 and 560


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def folder(file, tmp_path, run_main):
    code, out, err = run_main(pieces.main, "cut", file, "--out", tmp_path / "pieces", "--mb", 0.001)
    assert (code, out, err) == (0, f"{tmp_path / 'pieces'}: 3 pieces of {file}\n", "")
    return tmp_path / "pieces"


def test_there_and_back(folder, tmp_path, run_main, monkeypatch):
    """Also where a piece is read in blocks; what was joined before is replaced."""
    assert sorted((path.name, path.stat().st_size) for path in folder.iterdir())[:3] == [
        ("weights.gguf.000", 1000),
        ("weights.gguf.001", 1000),
        ("weights.gguf.002", 560),
    ]
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    facts = json.loads((folder / "weights.gguf.pieces.json").read_text())
    assert facts == {"name": "weights.gguf", "pieces": 3, "bytes": 2560, "sha256": sha256}
    monkeypatch.setattr(pieces, "BLOCK", 300)
    out = tmp_path / "new" / "weights.gguf"
    for options in ([], ["--sha256", sha256]):
        assert run_main(pieces.main, "join", folder, "--out", out, *options) == (0, f"{out}: joined\n", "")
        assert out.read_bytes() == CONTENT and [*out.parent.iterdir()] == [out]


def test_an_empty_file(tmp_path, run_main):
    (tmp_path / "empty").touch()
    for words in (("cut", tmp_path / "empty", "--out", tmp_path / "pieces"), ("join", tmp_path / "pieces", "--out")):
        assert run_main(pieces.main, *words, *([tmp_path / "again"] if words[0] == "join" else []))[0] == 0
    assert (tmp_path / "again").read_bytes() == b""


def changed(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def no_field(folder):
    (folder / "weights.gguf.pieces.json").write_text('{"name": "weights.gguf"}')


ANOTHER = "what was joined is another file (SHA-256 "


@pytest.mark.parametrize(
    "damage, options, message",
    [
        (lambda f: (f / "weights.gguf.001").unlink(), [], "1 of 3 pieces are missing: weights.gguf.001"),
        (lambda f: changed(f / "weights.gguf.002", 559), [], ANOTHER),
        (lambda f: (f / "weights.gguf.000").write_bytes(CONTENT[:999]), [], ANOTHER),
        (lambda f: (f / "weights.gguf.000").rename(f / "weights.gguf.001"), [], "1 of 3 pieces are missing"),
        (lambda f: None, ["--sha256", "ab" * 32], ANOTHER),
        (lambda f: (f / "weights.gguf.pieces.json").unlink(), [], "0 files *.pieces.json; one is needed"),
        (lambda f: (f / "other.pieces.json").write_text("{}"), [], "2 files *.pieces.json; one is needed"),
        (no_field, [], "weights.gguf.pieces.json: not what cut wrote"),
        (lambda f: (f / "weights.gguf.pieces.json").write_text("[3]"), [], "pieces.json: not what cut wrote"),
        (lambda f: (f / "weights.gguf.pieces.json").write_text('{"na'), [], "pieces.json: not what cut wrote"),
    ],
)
@pytest.mark.parametrize("before", [None, b"older"])
def test_what_is_wrong_is_one_line(folder, tmp_path, run_main, damage, options, message, before):
    """And a file that was there stays as it was."""
    damage(folder)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "weights.gguf"
    if before:
        check_file("--out", out, out.suffix)
        with replacing(out) as unfinished:
            unfinished.write_bytes(before)
    code, printed, err = run_main(pieces.main, "join", folder, "--out", out, *options)
    assert (code, printed) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err, err
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == ([before] if before else [])


@pytest.mark.parametrize("words, message", [(["--mb", 0], "--mb: must be above 0"), (["--mb", -3], "must be above 0")])
def test_pieces_of_nothing(file, tmp_path, run_main, words, message):
    code, _, err = run_main(pieces.main, "cut", file, "--out", tmp_path / "pieces", *words)
    assert code == 2 and err == f"error: {err[7:]}" and message in err and not (tmp_path / "pieces").exists()
    code, _, err = run_main(pieces.main, "cut", tmp_path / "none", "--out", tmp_path / "pieces")
    assert code == 2 and err.count("\n") == 1 and "none" in err
