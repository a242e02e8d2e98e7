"""Files whole or not at all. The disk that is full is a limit on the size of a file, which the system enforces."""

import errno
import fcntl
import json

import pytest
import torch
from faults import limited
from filelock import Timeout

from draftsmith.common import files
from draftsmith.common.files import append, parse_json, read_json, read_text, write_json, write_text
from draftsmith.train import checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read(tmp_path):
    write_text(tmp_path / "a", "é\nb")
    assert read_text(tmp_path / "a") == "é\nb"
    write_text(tmp_path / "a", "x\ud800")
    assert read_text(tmp_path / "a") == "x?"
    write_json(tmp_path / "b", {"é": [1]})
    assert read_json(tmp_path / "b") == {"é": [1]} and "é" in read_text(tmp_path / "b")
    append(tmp_path / "c", "1")
    append(tmp_path / "c", "é")
    assert read_text(tmp_path / "c") == "1\né\n"
    assert names(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_a_block_that_fails_changes_nothing(tmp_path, error):
    write_text(tmp_path / "a", "before")
    with pytest.raises(error), files.replacing(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise error
    with pytest.raises(error), files.replacing_folder(tmp_path) as temporary:
        (temporary / "a").write_text("half")
        raise error
    assert names(tmp_path) == ["a"] and read_text(tmp_path / "a") == "before"


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    (tmp_path / "tensors").mkdir()
    append(tmp_path / "lines", "x" * 900)
    writes = {
        "text": lambda path: write_text(path, "x" * 5000),
        "json": lambda path: write_json(path, ["x" * 5000]),
        "lines": lambda path: append(path, "x" * 5000),
        "tensors/model.safetensors": lambda path: checkpoint.write_tensors(path.parent, {"a": torch.zeros(5000)}),
    }
    for name, write in writes.items():
        with limited(1000), pytest.raises(OSError) as caught:
            write(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
        assert caught.value.errno in (errno.EFBIG, errno.EIO)  # the latter of what safetensors says in words only
    with limited(1000), pytest.raises(OSError) as caught, files.replacing_folder(tmp_path) as temporary:
        (temporary / "part").write_bytes(b"x" * 5000)
    assert caught.value.errno == errno.EFBIG and str(tmp_path) in str(caught.value.filename)
    assert names(tmp_path) == ["lines", "tensors"] and names(tmp_path / "tensors") == []
    assert read_text(tmp_path / "lines") == "x" * 900 + "\n", "the half of the second line is taken back"


def test_errors_inside_of_a_block(tmp_path):
    """tokenizers raises a plain Exception when the disk is full; another file's error keeps its name."""
    for block in (files.replacing(tmp_path / "a"), files.replacing_folder(tmp_path / "a")):
        with pytest.raises(OSError) as caught, block:
            raise Exception("No space left on device (os error 28)")
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "a")
    for block in (files.replacing(tmp_path / "a"), files.replacing_folder(tmp_path / "a")):
        with pytest.raises(OSError, match="elsewhere"), block:
            (tmp_path / "elsewhere").read_text()


def test_several_files_at_once(tmp_path):
    folder = tmp_path / "new"
    with files.replacing_folder(folder) as temporary:
        (temporary / "a").write_text("1")
    write_text(folder / "kept", "mine")
    with files.replacing_folder(folder) as temporary:
        (temporary / "a").write_text("2")
        (temporary / "b").write_text("2")
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "2", "b": "2", "kept": "mine"}


def test_a_folder_where_a_file_is_written(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        write_text(tmp_path / "a", "x")
    assert caught.value.filename == str(tmp_path / "a") and names(tmp_path) == ["a"]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "there is no such recipe"),
        ("folder", "this is a folder; a recipe is needed"),
        (b"\xff\xfe", r"not UTF-8 text \(byte 0\); a recipe is needed"),
        (b'{"a": 1', "not valid JSON"),
        (b"", "not valid JSON"),
        (DEEP.encode(), "JSON nested too deeply"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair is no text"),
        (b"[1]", "a JSON object is needed, got list"),
        (b"null", "a JSON object is needed, got NoneType"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "x"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        files.json_object(path, "recipe")
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_a_loop_of_links(tmp_path):
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(OSError) as caught:
        read_text(tmp_path / "a")
    assert caught.value.errno == errno.ELOOP


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "a") == {"a": "😀"}
    assert parse_json(b'{"a": "\\ud83d\\ude00"}', "x") == {"a": "😀"}


def test_a_full_disk_while_training(tmp_path, run_main, tiny_lm, monkeypatch):
    """The real command: the line names the file, no temporary one is left, and the run goes on once there is room."""
    from draftsmith.train import medusa

    recipe = tmp_path / "recipe.yaml"
    text = tmp_path / "text.txt"
    text.write_text("import os\ndef read(path):\n    return path\n" * 40)
    content = {
        "run": {"name": "x", "output_dir": str(tmp_path)},
        "target": {"name": str(tiny_lm)},
        "data": {"train": [{"source": str(text)}], "validation": [{"source": str(text)}], "max_length": 64},
        "drafter": {"num_draft_heads": 2},
        "stages": [{"optim": {"lr": 1e-3}, "batch": {"sequences": 1}, "steps": 2}],
        "checkpoint": {"every": 1},
        "precision": {"autocast": "none", "threads": 1},
    }
    recipe.write_text(json.dumps(content))
    sizes = (200, 3000, 60_000)  # too little for the recipe, for held-out rows or the cache, for a checkpoint
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    for size in sizes:
        with limited(size):
            code, _, err = run_main(medusa.main, recipe, "--resume")
        assert code == 1 and err.count("\n") == 1, err
        assert str(tmp_path) in err and "nothing more can be written" in err
        assert not [path for path in tmp_path.rglob("*") if "tmp" in path.suffix or path.name.endswith(".new")]
    assert run_main(medusa.main, recipe, "--resume")[0] == 0


def test_locks(tmp_path, monkeypatch):
    with files.locked(tmp_path / "a"), pytest.raises(Timeout), files.locked(tmp_path / "a", wait=False):
        pass
    with files.locked(tmp_path / "a", wait=False):  # free again
        pass

    def fail(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ValueError) as error, files.locked(tmp_path / "b"):
        pass
    assert str(error.value) == (
        f"{tmp_path}: its file system cannot lock files, so that two commands could write here at once; choose a "
        "folder on another one"
    )


def test_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    assert files.cache_folder() == tmp_path
    monkeypatch.setenv("DRAFTSMITH_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.cache_folder() == tmp_path / ".cache/draftsmith"
