import sys
import types

import pytest

from draftsmith.data import sources
from draftsmith.data.prompts import prompts


@pytest.mark.parametrize(
    "path, split",
    [
        # Never change these: a module that moves between splits makes every earlier evaluation worthless.
        ("stdlib/json/decoder.py", "train"),
        ("stdlib/argparse.py", "train"),
        ("stdlib/heapq.py", "validation"),
        ("stdlib/pdb.py", "validation"),
        ("stdlib/statistics.py", "test"),
        ("stdlib/multiprocessing/pool.py", "test"),
        ("transformers/modeling_utils.py", "train"),
    ],
)
def test_splits_never_move(path, split):
    assert sources.split_of(path) == split


def test_split_sizes():
    splits = [sources.split_of(f"stdlib/module{i}.py") for i in range(5000)]
    assert splits.count("validation") == pytest.approx(200, abs=45)
    assert splits.count("test") == pytest.approx(200, abs=45)


def test_documents_are_of_their_split():
    seen = {}
    for split in ("train", "validation", "test"):
        documents = sources.documents("stdlib", split)
        assert all(sources.split_of(d.path) == split and d.path.startswith("stdlib/") for d in documents)
        assert [d.path for d in documents] == sorted(d.path for d in documents)
        seen[split] = {d.path for d in documents}
    assert len(seen["validation"]) > 10 and len(seen["test"]) > 10
    assert not any("/test/" in path or "site-packages" in path for paths in seen.values() for path in paths)


def forget():
    sources._all_documents.cache_clear()
    sources.documents.cache_clear()


@pytest.fixture
def folder_as_source(tmp_path, monkeypatch):
    """A package source made of a folder; a fresh cache for it."""
    root = sources.root_of
    monkeypatch.setattr(sources, "root_of", lambda source: tmp_path if source == "package:toy" else root(source))
    forget()
    yield tmp_path
    forget()


def test_copies_of_held_out_files_are_dropped(folder_as_source):
    held_out = sources.documents("stdlib", "test")[3]
    other = "\n".join(f"variable_number_{i} = compute_something({i})" for i in range(100))
    lines = held_out.text.splitlines()
    files = {
        "renamed.py": held_out.text,
        "part.py": "\n".join(lines[: len(lines) // 2]) + "\n" + other[:200],
        "shifted.py": "\n".join("    " + line for line in lines),
        "other.py": other,
    }
    for name, text in files.items():
        assert sources.split_of(f"toy/{name}") == "train", "the test needs names of the training split"
        (folder_as_source / name).write_text(text)
    assert [d.path for d in sources.documents("package:toy")] == ["toy/other.py"]


def test_an_empty_split_says_so(folder_as_source):
    with pytest.raises(ValueError, match="source 'package:toy' has no text in split 'test'"):
        sources.documents("package:toy", "test")


def test_dialogues_are_question_and_answer(folder_as_source):
    (folder_as_source / "other.py").write_text(
        "class Thing:\n    def add(self, a, b):\n        '''Add two numbers. Slowly.'''\n"
        "        total = a\n        total = total + b\n        return total\n" + "# filler\n" * 20
    )
    (chat,) = sources.dialogues("package:toy")
    assert [m["role"] for m in chat] == ["user", "assistant"]
    assert "Add two numbers." in chat[0]["content"] and "Slowly" not in chat[0]["content"]
    assert chat[1]["content"].startswith("def add(self, a, b):\n    '''Add")


def test_licences():
    assert sources.licence("stdlib") == "PSF-2.0"
    assert sources.licence("package:yaml").startswith("PyYAML ") and "MIT" in sources.licence("package:yaml")
    assert sources.licence("package:no_such_package") == "unknown"


def test_the_fingerprint_follows_the_text(folder_as_source):
    (folder_as_source / "other.py").write_text("x = 1\n" * 50)
    before = sources.fingerprint("package:toy", "train")
    (folder_as_source / "other.py").write_text("x = 2\n" * 50)
    forget()
    assert sources.fingerprint("package:toy", "train") != before


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_text_and_prompts_are_of_no_training_module(split, tokenizer):
    """Whoever mixes up the splits finds out here, not by a number that is too good."""
    training = {document.path: document.text for document in sources.documents("stdlib", "train")}
    held_out = {document.path: document.text for document in sources.documents("stdlib", split)}
    assert not training.keys() & held_out.keys() and len(training) > 5 * len(held_out)
    assert not set(training.values()) & set(held_out.values())
    for prompt in prompts("stdlib", split, 40, 32, tokenizer, 0):
        assert sources.split_of(prompt.source) == split and prompt.text in held_out[prompt.source]
    whole = "\n".join(held_out.values())
    assert all(chat[1]["content"].partition("\n")[0] in whole for chat in sources.dialogues("stdlib", split))


@pytest.mark.parametrize(
    "source, message",
    [
        ("package:../x", "after 'package:' comes the name it is imported by"),
        ("package:", "after 'package:' comes the name it is imported by"),
        ("package:os.path", "after 'package:' comes the name it is imported by"),
        ("package:no_spec", "package 'no_spec' cannot be found"),
        ("package:no_such_package", "package 'no_such_package' is not installed; pip install it"),
        ("package:heapq", "'heapq' is a single module, not a package"),
    ],
)
def test_invalid_packages(source, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "no_spec", types.ModuleType("no_spec"))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        sources.documents(source)
    assert "\n" not in str(error.value)


def test_a_namespace_package(tmp_path, monkeypatch):
    (tmp_path / "toy_space").mkdir()
    (tmp_path / "toy_space" / "other.py").write_text("x = 1\n" * 50)
    monkeypatch.syspath_prepend(tmp_path)
    assert [d.path for d in sources.documents("package:toy_space")] == ["toy_space/other.py"]


def test_files_that_cannot_be_read_are_left_out(folder_as_source):
    (folder_as_source / "other.py").write_text("x = 1\n" * 50)
    (folder_as_source / "loop.py").symlink_to(folder_as_source / "loop.py")
    (folder_as_source / "folder.py").mkdir()
    (folder_as_source / "latin.py").write_bytes("é = 1\n".encode("latin-1") * 50)
    with open(bytes(folder_as_source) + b"/\xff.py", "w") as file:
        file.write("x = 1\n" * 50)
    assert [d.path for d in sources.documents("package:toy")] == ["toy/other.py"]
