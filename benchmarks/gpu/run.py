"""Run every check and benchmark of benchmarks/AWAITING.md, within a time budget, and write what was measured.

    python benchmarks/gpu/run.py --bundle 1         # nine minutes of a bare machine at most; also: make gpu BUNDLE=1
    python benchmarks/gpu/run.py                             # all bundles in turn, 25 minutes at most; also: make gpu
    python benchmarks/gpu/run.py --list             # bundles and parts: goal, time limit, commands
    python benchmarks/gpu/run.py --packages pip-list.txt     # which parts can run where `pip list` printed this
    python benchmarks/gpu/run.py --only kernels step         # some parts
    python benchmarks/gpu/run.py --rehearsal        # toy sizes on a CPU; also: make gpu-rehearsal

A part is one or more of the project's own commands, started as processes. A part that takes longer than its limit is
killed with its children, and what it had measured by then is kept; whatever a part does, the next one runs. Written at
once after each part: WORK/PART/result.json, OUT/table.md (a Markdown row per part) and OUT/NAME.tar.gz: all results and
logs, below 16 MB, without models. Unpacked in WORK on another machine, these results are not measured again.

Results: pass, fail, «cut short» (killed at its limit before it failed), «not run» (a package is missing, an earlier
part that it needs has not passed, or no time is left). A result counts as long as the files behind its part (what its
commands import, their recipes, the part itself), the device and the versions are the same; --again measures anew. A
part whose models are gone runs again when another one needs them. Exit code 1: a part failed, or any part of a
rehearsal did not pass.

It needs a Python with torch, transformers and accelerate, not `make install`: the checkout is put on the path. Parts
that need a missing package are not run. In a rehearsal, packages that a part has not declared are hidden from it.
"""

import argparse
import importlib.metadata
import importlib.util
import io
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINKS = ROOT / ".types"  # holds draftsmith/ with a link for each folder
if __name__ == "__main__":
    sys.path.insert(0, str(LINKS))

from draftsmith.benchmarks.gpu.closure import fingerprint, installed_in, needs_of, say_packages, words_of
from draftsmith.benchmarks.gpu.judges import Finding, model_folder
from draftsmith.benchmarks.gpu.parts import BUNDLE_SECONDS, BUNDLES, PACKAGES, PARTS, UNUSED, Part, with_needed
from draftsmith.common.command import CommandLine, available_cores, run_command
from draftsmith.common.files import check_folder, json_object, locked, read_text, replacing, write_json, write_text

MARK = "DRAFTSMITH_GPU_RUN"  # environment variable of every process that a part starts: folder of the results, part
MODELS = ("target", "drafter", "ssms", "eagle", "dynaspec")
TABLE_BYTES, ARCHIVE_BYTES, FILE_BYTES = 8_000, 15_000_000, 1_000_000
PROCESSES = 12  # of parallel tests, at most
REHEARSAL = 600  # seconds after which a part's rehearsal is killed
# Hidden from a part's rehearsal unless it needs them; the others are needed by torch, transformers or accelerate.
HIDDEN = {"pydantic", "scipy", "sklearn", "matplotlib", "peft", "triton", *UNUSED} - {"huggingface_hub"}
# sitecustomize.py of a rehearsal's processes. The second half: in numpy from 2.4 on, int() refuses an array of one
# element, which Triton 3.6's interpreter has for a scalar; later versions squeeze it.
REHEARSED = """import importlib.machinery, importlib.metadata, os
hidden, find = os.environ.get("DRAFTSMITH_HIDDEN", "").split(), importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name.split(".")[0] in hidden else find(name, *more)
)
if os.environ.get("TRITON_INTERPRET") and importlib.metadata.version("triton").startswith("3.6."):
    from triton.runtime import interpreter
    before = interpreter._patch_lang_tensor
    def patch(tensor, scope):
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    interpreter._patch_lang_tensor = patch
"""


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


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    names = [part.name for part in PARTS]
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"some of: {', '.join(names)}")
    what.add_argument("--bundle", metavar="N", help=f"number or name of: {', '.join(BUNDLES)}")
    parser.add_argument("--minutes", type=float, default=25, help="budget (default 25; a bundle takes at most 9)")
    parser.add_argument("--again", action="store_true", help="run parts that have a result too")
    parser.add_argument("--rehearsal", action="store_true", help="toy sizes on a CPU, kernels interpreted")
    parser.add_argument("--list", action="store_true", help="print the bundles and parts, and run nothing")
    parser.add_argument("--packages", type=Path, metavar="FILE", help="of `pip list`: say which parts can run with it")
    folder = "results and models; default runs/gpu, of a rehearsal runs/gpu-rehearsal"
    parser.add_argument("--work", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where table and archive are written; default --work")
    return parser


# ---- running a part


def processes_of(mark: str) -> list[int]:
    """Running processes whose environment has a mark that begins with ``mark``, orphaned ones too (Linux only)."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if any(each.startswith(f"{MARK}={mark}".encode()) for each in path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return [pid for pid in found if pid != os.getpid()]


def kill(process: "subprocess.Popen[bytes] | None", mark: str) -> None:
    """End a command and everything it started."""
    if process is not None and process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for _ in range(20):  # one may start another meanwhile
        pids = processes_of(mark)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.05)


def mark_of(work: Path, part: str = "") -> str:
    return f"{work.resolve()}:{part}:" if part else f"{work.resolve()}:"


def environment(part: Part, work: Path, rehearsal: bool) -> dict[str, str]:
    """Of a part's commands. The import name ``draftsmith`` is this checkout, whatever is installed."""
    paths = [str(LINKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {MARK: mark_of(work, part.name), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    if rehearsal:
        more |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DRAFTSMITH_CACHE": str(work / "cache")}
        more |= {"TRITON_INTERPRET": "1"} if part.interpreted else {}
        more |= {"DRAFTSMITH_HIDDEN": " ".join(HIDDEN.difference(needs_of(part)))}
        paths.insert(0, str(work / "site"))
    more["PYTHONPATH"] = os.pathsep.join(paths)
    return {**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **more}


def filled(written: str, work: Path, rehearsal: bool) -> str:
    """A command or a file's name with the places that it names."""
    places = {"out": work, **{name: model_folder(work, name, rehearsal) for name in MODELS}}
    for name, place in places.items():
        written = written.replace(f"{{{name}}}", shlex.quote(str(place)))
    processes = min(available_cores(), PROCESSES)
    parallel = f"-n {processes}" if processes > 1 and importlib.util.find_spec("xdist") else ""
    return written.replace("{parallel}", parallel)


def commands_of(part: Part, work: Path, rehearsal: bool) -> list[str]:
    """The part's commands as one would type them."""
    return [filled(command, work, rehearsal) for command in (part.rehearsal if rehearsal else part.commands)]


def gone(part: Part, work: Path, rehearsal: bool) -> list[Path]:
    """What the part has made, and is not there."""
    made = [Path(filled(name, work, rehearsal)) for name in part.makes]
    return [path for path in made if not path.is_file()]


def run_part(part: Part, work: Path, rehearsal: bool, limit: float) -> tuple[str, Finding, float]:
    """Run a part for ``limit`` seconds at most.

    Returns:
        The result (pass, fail or cut short), what was found, and the seconds it took.
    """
    began, mark = time.monotonic(), mark_of(work, part.name)
    log = work / part.name / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    for old in log.parent.rglob("*.json"):  # nothing of an earlier attempt is judged
        old.unlink()
    process, problem, ended = None, "", False
    with log.open("wb") as output:
        try:
            for command in commands_of(part, work, rehearsal):
                output.write(f"$ {command}\n".encode())
                output.flush()
                variables, words = words_of(command)
                process = subprocess.Popen(
                    [sys.executable if words[0] == "python" else words[0], *words[1:]], cwd=ROOT, stdout=output,
                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env=environment(part, work, rehearsal) | variables,
                )  # fmt: skip
                code = process.wait(max(0.0, began + limit - time.monotonic()))
                if code:
                    problem = f"exit code {code}: {last_line(log)}"
                    break
        except subprocess.TimeoutExpired:
            ended, problem = True, f"killed after {limit:.0f} s"
        finally:
            kill(process, mark)
    seconds = time.monotonic() - began
    wrong = ""
    try:
        finding = part.judge(work, rehearsal)
    except Exception as error:  # a part's broken output must not stop the others
        wrong = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        finding = Finding(wrong)
    value = "; ".join(filter(None, [finding.value, finding.missing]))
    if ended:  # what was measured until then; a file that is missing by then is no failure of its own
        known = not wrong or bool(re.match(r"\d+ passed, [1-9]\d* failed", wrong))
        value = f"{problem}; {value}" if known else f"{problem}: {last_line(log)}"
        return "fail" if wrong and known else "cut short", Finding(value, finding.met, finding.facts), seconds
    if problem:  # pytest's counts say more than its exit code
        said = finding.value if re.match(r"\d+ passed", finding.value) and wrong else problem
        return "fail", Finding(said if wrong else f"{said}; {value}", None, finding.facts), seconds
    passed = not wrong and not finding.missing and (rehearsal or finding.met is not False)
    return "pass" if passed else "fail", Finding(value, finding.met, finding.facts), seconds


def last_line(log: Path) -> str:
    """The last line of a log that says something, at most 200 characters of it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


# ---- all parts


def versions() -> dict[str, str]:
    """Installed versions of :data:`PACKAGES`; what is missing is left out."""
    found: dict[str, str] = {"python": platform.python_version()}
    listed = "\n".join(f"{each.name} {each.version}" for each in importlib.metadata.distributions() if each.name)
    found |= {name: version for name, version in installed_in(listed).items() if importlib.util.find_spec(name)}
    return found


def describe_device(rehearsal: bool) -> str:
    """The GPU's name and memory, asked in another process: this one must not hold memory of it."""
    if rehearsal:
        return f"CPU ({platform.machine()}), toy sizes"
    asked = "import torch\nif torch.cuda.is_available():\n p = torch.cuda.get_device_properties(0)\n"
    asked += " print(f'{p.name}, {p.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}')"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        raise ValueError(
            f"this torch sees no GPU ({(done.stderr.strip().splitlines() or [sys.executable])[-1]}); on a CPU use "
            "make gpu-rehearsal"
        )
    return done.stdout.strip()


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


def to_run(
    parts: Sequence[Part], wanted: Collection[str], kept: Collection[str], lost: Callable[[Part], object]
) -> list[Part]:
    """The wanted parts without a result, and those that have to make something for one of them.

    Args:
        kept: names of the parts whose results count.
        lost: what of a part's files is gone.
    """
    chosen: list[Part] = []
    for part in reversed(parts):
        needed = any(part.name in other.after for other in chosen)
        if part.name in kept:
            again = needed and bool(lost(part))
        else:
            again = needed or part.name in wanted
        chosen += [part] if again else []
    return chosen[::-1]


def run_all(
    parts: Sequence[Part], work: Path, *, rehearsal: bool, minutes: float, again: bool, device: str,
    wanted: Collection[str] = (), out: Path | None = None, name: str = "gpu", workers: int = 1,
) -> list[Result]:  # fmt: skip
    """Run the parts that have no result yet; write and return the results of all.

    Args:
        wanted: names of the parts that were asked for, all if empty; of others only what these need is run.
        out: folder of the table and of the archive ``name``.tar.gz.
        workers: parts that run at the same time.

    Raises:
        KeyboardInterrupt: asked to stop; the part that was running has no result.
    """
    deadline, installed = time.monotonic() + 60 * minutes, versions()
    sources = {part.name: fingerprint(part, device, installed) for part in parts}
    found = {part.name: None if again else read_result(work, part, sources[part.name]) for part in parts}
    kept = {name: result for name, result in found.items() if result is not None}
    waiting = to_run(parts, wanted or list(found), kept, lambda part: gone(part, work, rehearsal))
    results = {name: result for name, result in kept.items() if name not in [part.name for part in waiting]}
    for result in results.values():
        print(f"{result.part}: {result.result} already, {result.value}", flush=True)
    running: dict[Future[tuple[str, Finding, float]], Part] = {}
    if rehearsal:  # before there are several parts at a time
        (work / "site").mkdir(parents=True, exist_ok=True)
        write_text(work / "site" / "sitecustomize.py", REHEARSED)

    def end(part: Part, result: str, finding: Finding, seconds: float) -> None:
        (work / part.name).mkdir(parents=True, exist_ok=True)
        results[part.name] = Result(
            part.name, part.goal, finding.value, result, round(seconds, 1), sources[part.name], rehearsal,
            commands_of(part, work, rehearsal), finding.facts, device, installed,
        )  # fmt: skip
        if result != "not run":  # which is no reason to lose an earlier result
            write_json(work / part.name / "result.json", asdict(results[part.name]))
        write()
        print(f"{part.name}: {result} after {seconds:.0f} s: {finding.value}", flush=True)

    def write() -> str:
        write_text((out or work) / "table.md", table_of(in_order()))
        return pack(work, (out or work) / f"{name}.tar.gz")

    def in_order() -> list[Result]:
        return [results[part.name] for part in parts if part.name in results]

    def reason(part: Part) -> str:
        """Why a part cannot run now."""
        if missing := [name for name in needs_of(part) if name not in installed]:
            return f"not installed: {', '.join(missing)}"
        for needed in (other for other in PARTS + tuple(parts) if other.name in part.after):
            if (stored(work, needed.name) or {}).get("result") != "pass":
                return f"needs {needed.name}, which has not passed"
            if lost := gone(needed, work, rehearsal):
                return f"needs {lost[0].relative_to(work)} of {needed.name}, which is gone"
        left = deadline - time.monotonic()
        short = left < part.limit / 2
        return f"left out: {max(left, 0):.0f} s of the budget are left, it may take {part.limit} s" if short else ""

    cores = sorted(os.sched_getaffinity(0)) if workers > 1 and hasattr(os, "sched_setaffinity") else []
    with ThreadPoolExecutor(workers, initializer=pin, initargs=(cores,)) as pool:
        try:
            while waiting or running:
                busy = {part.name for part in [*waiting, *running.values()]}
                for part in [part for part in waiting if not busy & set(part.after)][: workers - len(running)]:
                    waiting.remove(part)
                    if why := reason(part):
                        end(part, "not run", Finding(why), 0.0)
                        break  # parts that wait for it
                    limit = min(REHEARSAL if rehearsal else part.limit, deadline - time.monotonic())
                    print(f"{part.name}: {part.goal} (at most {limit:.0f} s)", flush=True)
                    running[pool.submit(run_part, part, work, rehearsal, limit)] = part
                for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                    end(running.pop(future), *future.result())
        except BaseException:
            kill(None, mark_of(work))
            raise
    print(write(), flush=True)
    return in_order()


def pin(cores: list[int]) -> None:
    """Keep this thread, and the processes that it starts, on one of the cores: two threads of each of two processes
    would wait for each other."""
    if cores:
        os.sched_setaffinity(0, {cores.pop()})


def interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # the part that runs is killed, too


def choose_bundle(given: str) -> tuple[str, list[Part]]:
    """The name of a bundle, and its parts with all that they need."""
    names = list(BUNDLES)
    name = names[int(given) - 1] if given.isdecimal() and 0 < int(given) <= len(names) else given
    if name not in BUNDLES:
        raise ValueError(f"--bundle {given}: unknown; use a number from 1 to {len(names)} or {', '.join(names)}")
    return name, with_needed(BUNDLES[name])


def print_list(parts: Sequence[Part], work: Path, rehearsal: bool) -> None:
    for number, (name, names) in enumerate(BUNDLES.items(), 1):
        needed = with_needed(names)
        seconds = sum(part.limit for part in needed)
        print(f"bundle {number}, {name}: {', '.join(part.name for part in needed)} (at most {seconds} s)")
    for part in parts:
        print(f"{part.name}: {part.goal} (at most {part.limit} s)")
        print(*(f"    {command}" for command in commands_of(part, work, rehearsal)), sep="\n")


def main() -> None:
    args = parser().parse_args()
    if not 0 < args.minutes <= 1440:
        raise ValueError(f"--minutes {args.minutes}: must be above 0 and at most 1440")
    work = Path(os.path.abspath(args.work or Path("runs/gpu-rehearsal" if args.rehearsal else "runs/gpu")))
    if args.packages:
        sys.exit(not say_packages(installed_in(read_text(args.packages))))
    # In the order of the bundles' value; what a bundle needs comes before it, once.
    name, parts = "gpu", list(dict.fromkeys(part for names in BUNDLES.values() for part in with_needed(names)))
    wanted = args.only or []
    if args.bundle:
        name, parts = choose_bundle(args.bundle)
        name, wanted, args.minutes = f"gpu-{name}", BUNDLES[name], min(args.minutes, BUNDLE_SECONDS / 60)
    elif args.only:
        parts = [part for part in parts if part.name in args.only]
    if args.list:
        return print_list(parts, work, args.rehearsal)
    out = Path(os.path.abspath(args.out or work))
    check_folder("--work", work)
    check_folder("--out", out)
    device, installed = describe_device(args.rehearsal), versions()
    print(f"{device}; " + ", ".join(f"{name} {version}" for name, version in installed.items()), flush=True)
    for package in (package for package in PACKAGES if package not in installed):
        lost = [part.name for part in parts if package in needs_of(part)]
        print(f"missing: {package} ({PACKAGES[package]}); not run for that: {', '.join(lost) or 'nothing'}", flush=True)
    signal.signal(signal.SIGTERM, interrupt)
    with locked(work / ".lock"):
        kill(None, mark_of(work))  # what a run that was killed here has left behind
        results = run_all(
            parts, work, rehearsal=args.rehearsal, minutes=args.minutes, again=args.again, device=device,
            wanted=wanted, out=out, name=name, workers=min(available_cores(), 2) if args.rehearsal else 1,
        )  # fmt: skip
    print(f"\n{table_of(results)}\nwritten to {out / 'table.md'}")
    if not args.rehearsal:
        print("Paste it into benchmarks/log/DATE.md and its figures into RESULTS.md; what passed leaves AWAITING.md.")
    if any(result.result == "fail" or (args.rehearsal and result.result != "pass") for result in results):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
