"""The processes of a part of `make gpu`: its commands, their environment, and their end, whatever they started."""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from draftsmith.benchmarks.gpu.closure import ROOT, needs_of, words_of
from draftsmith.benchmarks.gpu.judges import Finding, model_folder
from draftsmith.benchmarks.gpu.parts import UNUSED, Part
from draftsmith.common.command import available_cores

LINKS = ROOT / ".types"  # holds draftsmith/ with a link for each folder
MARK = "DRAFTSMITH_GPU_RUN"  # environment variable of every process that a part starts: folder of the results, part
MODELS = ("target", "drafter", "ssms", "eagle", "dynaspec")
PROCESSES = 8  # of parallel tests, at most, of each of the parts that run at once
GRACE = 8  # seconds between a part's interrupt and its end
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


def filled(written: str, part: Part, work: Path, rehearsal: bool) -> str:
    """A part's command or file with the places that it names."""
    places = {"out": work, "here": work / part.name}
    places |= {name: model_folder(work, name, rehearsal) for name in MODELS}
    for name, place in places.items():
        written = written.replace(f"{{{name}}}", shlex.quote(str(place)))
    processes = min(available_cores(), PROCESSES)
    parallel = f"-n {processes}" if processes > 1 and importlib.util.find_spec("xdist") else ""
    return written.replace("{parallel}", parallel)


def commands_of(part: Part, work: Path, rehearsal: bool) -> list[str]:
    """The part's commands as one would type them."""
    return [filled(command, part, work, rehearsal) for command in (part.rehearsal if rehearsal else part.commands)]


def places(names: tuple[str, ...], part: Part, work: Path, rehearsal: bool) -> list[Path]:
    """The files that ``makes`` or ``brings`` of a part name."""
    return [Path(filled(name, part, work, rehearsal)) for name in names]


def gone(part: Part, work: Path, rehearsal: bool) -> list[Path]:
    """What the part has made, and is not there."""
    return [path for path in places(part.makes, part, work, rehearsal) if not path.is_file()]


def run_part(part: Part, work: Path, rehearsal: bool, limit: float, judged: bool = True) -> tuple[str, Finding, float]:
    """Run a part for ``limit`` seconds at most. Unless ``judged``, one that misses its goal passes.

    Returns:
        The result (pass, fail or cut short), what was found, and the seconds it took.
    """
    began, mark = time.monotonic(), mark_of(work, part.name)
    log = work / part.name / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    for old in log.parent.rglob("*.json"):  # nothing of an earlier attempt is judged
        old.unlink()
    process, problem, said_last, ended = None, "", "", False
    with log.open("wb") as output:
        try:
            for command in commands_of(part, work, rehearsal):
                output.write(f"$ {command}\n".encode())
                output.flush()
                variables, words = words_of(command)
                process = subprocess.Popen(
                    [sys.executable if words[0] == "python" else words[0], *words[1:]],
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment(part, work, rehearsal) | variables,
                )
                code = process.wait(max(0.0, began + limit - time.monotonic()))
                if code:
                    problem = f"exit code {code}: {last_line(log)}"
                    break
        except subprocess.TimeoutExpired:
            ended, problem, said_last = True, f"killed after {limit:.0f} s", last_line(log)
            if process is not None:  # pytest then still says what failed and why
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait(GRACE)
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
        value = f"{problem}; {value}" if known else f"{problem}: {said_last}"
        return "fail" if wrong and known else "cut short", Finding(value, finding.met, finding.facts), seconds
    if problem:  # pytest's counts say more than its exit code
        said = finding.value if re.match(r"\d+ passed", finding.value) and wrong else problem
        return "fail", Finding(said if wrong else f"{said}; {value}", None, finding.facts), seconds
    passed = not wrong and not finding.missing and (rehearsal or not judged or finding.met is not False)
    return "pass" if passed else "fail", Finding(value, finding.met, finding.facts), seconds


def last_line(log: Path) -> str:
    """The last line of a log that says something, at most 200 characters of it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
