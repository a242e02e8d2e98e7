"""Results of `make gpu`: a file for each part, a table of all, and the archive that takes them to another machine."""

import importlib.metadata
import importlib.util
import io
import platform
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.gpu.closure import installed_in
from draftsmith.benchmarks.gpu.parts import Part
from draftsmith.common.files import json_object, replacing

TABLE_BYTES, ARCHIVE_BYTES, FILE_BYTES = 8_000, 15_000_000, 1_000_000


@dataclass(frozen=True)
class Result:
    """result.json of a part. ``sources``: the files behind it, the device and the versions it was measured with."""

    part: str
    goal: str
    value: str
    result: str
    seconds: float
    sources: str
    rehearsal: bool
    commands: list[str]
    facts: dict[str, Any] | None
    device: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Installed versions of :data:`PACKAGES`; what is missing is left out."""
    found: dict[str, str] = {"python": platform.python_version()}
    listed = "\n".join(f"{each.name} {each.version}" for each in importlib.metadata.distributions() if each.name)
    found |= {name: version for name, version in installed_in(listed).items() if importlib.util.find_spec(name)}
    return found


def stored(work: Path, name: str) -> dict[str, Any] | None:
    """result.json of a part; None if there is none."""
    try:
        return json_object(work / name / "result.json")
    except (OSError, ValueError):
        return None


def read_result(work: Path, part: Part, sources: str) -> Result | None:
    """The part's result with the same sources; None if there is none, or it was not run to its end."""
    found = stored(work, part.name)
    if found is None or found.get("sources") != sources or found.get("result") not in ("pass", "fail"):
        return None
    return Result(**found)


def table_of(results: Sequence[Result], most: int = TABLE_BYTES) -> str:
    """The Markdown table, and above it where it was measured: ``most`` bytes, for which long cells are cut."""
    cell = lambda text, length: text.replace("|", "\\|").replace("\n", " ")[:length]  # noqa: E731
    where = ""
    if results:
        names = ("python", "torch", "triton", "transformers")
        shown = ", ".join(f"{name} {results[-1].versions[name]}" for name in names if name in results[-1].versions)
        command = "make gpu-rehearsal" if results[-1].rehearsal else "make gpu"
        where = f"{time.strftime('%Y-%m-%d')}, {results[-1].device}; {shown}; `{command}`:\n\n"
    for length in (1000, 500, 300, 200, 120, 60, 20):
        lines = ["| part | goal | measured | result | seconds |", "|---|---|---|---|---|"]
        lines += [
            f"| {r.part} | {cell(r.goal, length)} | {cell(r.value, length)} | {r.result} | {r.seconds:.0f} |"
            for r in results
        ]
        table = where + "\n".join(lines) + "\n"
        if len(table.encode()) <= most:
            break
    return table


def pack(work: Path, archive: Path) -> str:
    """Write results, logs and the small files of models into an archive below 16 MB; returns what to say of it."""
    files = [path for path in work.rglob("*") if path.suffix in (".json", ".jsonl", ".md", ".txt") and path.is_file()]
    kept: dict[Path, bytes] = {}
    left_out: list[str] = []
    for path in sorted(files, key=lambda path: (path.name != "result.json", path.stat().st_size)):
        name, content = path.relative_to(work), path.read_bytes()
        if name.parts[0] == "cache" or {"checkpoints", "answers"} & set(name.parts) or name.name == "tokenizer.json":
            continue
        if path.name == "log.txt":
            content = content[-FILE_BYTES:]
        if len(content) > FILE_BYTES or sum(map(len, kept.values())) + len(content) > ARCHIVE_BYTES:
            left_out.append(str(name))
        else:
            kept[name] = content
    with replacing(archive) as temporary, tarfile.open(temporary, "w:gz") as packed:
        for name, content in kept.items():
            entry = tarfile.TarInfo(str(name))
            entry.size, entry.mtime = len(content), int(time.time())
            packed.addfile(entry, io.BytesIO(content))
    size = f"{len(kept)} files, {archive.stat().st_size / 1e6:.1f} MB"
    return f"{archive}: {size}" + (f"; left out: {', '.join(left_out)}" if left_out else "")
