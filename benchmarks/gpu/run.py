"""Run every check and benchmark of benchmarks/AWAITING.md, within a time budget, and write what was measured.

    python benchmarks/gpu/run.py --bundle steps   # nine minutes of a bare machine at most; also: make gpu BUNDLE=steps
    python benchmarks/gpu/run.py                             # all bundles in turn, 25 minutes at most; also: make gpu
    python benchmarks/gpu/run.py --list             # bundles and parts: goal, time limit, commands
    python benchmarks/gpu/run.py --packages pip-list.txt     # which parts can run where `pip list` printed this
    python benchmarks/gpu/run.py --only kernels step         # some parts
    python benchmarks/gpu/run.py --at-once 6 --minutes 8     # what fails at all, before minutes are spent on times
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
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from types import FrameType

if __name__ == "__main__":  # .types/ holds draftsmith/ with a link for each folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".types"))

from draftsmith.benchmarks.gpu.closure import ROOT, fingerprint, installed_in, needs_of, say_packages
from draftsmith.benchmarks.gpu.judges import Finding
from draftsmith.benchmarks.gpu.parts import BUNDLES, PACKAGES, PARTS, Part, seconds_of, with_needed
from draftsmith.benchmarks.gpu.processes import REHEARSED, commands_of, gone, kill, mark_of, places, run_part
from draftsmith.benchmarks.gpu.results import Result, pack, read_result, stored, table_of, versions
from draftsmith.common.command import CommandLine, available_cores, run_command
from draftsmith.common.files import check_folder, locked, read_text, write_json, write_text

REHEARSAL = 600  # seconds after which a part's rehearsal is killed
SLOWER = 2  # times its limit that a part may take beside others
UNTIMED = 3  # parts without times that run at once


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    names = [part.name for part in PARTS]
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"some of: {', '.join(names)}")
    what.add_argument("--bundle", nargs="+", metavar="NAME", help=f"names or numbers of: {', '.join(BUNDLES)}")
    parser.add_argument("--minutes", type=float, default=25, help="budget (default 25; a bundle takes at most 9)")
    parser.add_argument("--again", action="store_true", help="run parts that have a result too")
    at_once = (
        "run up to N parts at a time, timed ones too: a trial of faults, whose times mean nothing and do not count"
    )
    parser.add_argument("--at-once", type=int, default=0, metavar="N", help=at_once)
    parser.add_argument("--rehearsal", action="store_true", help="toy sizes on a CPU, kernels interpreted")
    parser.add_argument("--list", action="store_true", help="print the bundles and parts, and run nothing")
    parser.add_argument("--packages", type=Path, metavar="FILE", help="of `pip list`: say which parts can run with it")
    folder = "results and models; default runs/gpu, of a rehearsal runs/gpu-rehearsal"
    parser.add_argument("--work", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--out", type=Path, metavar="DIR", help="where table and archive are written; default --work")
    return parser


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


def why_not(part: Part, parts: Sequence[Part], installed: Collection[str], work: Path, rehearsal: bool) -> str:
    """Why a part cannot run now: packages, files, or what parts before it have to make."""
    if missing := [name for name in needs_of(part) if name not in installed]:
        return f"not installed: {', '.join(missing)}"
    if lost := [name for name in part.files if not rehearsal and not (ROOT / name).exists()]:
        return f"missing here: {', '.join(lost)} (make models, benchmarks/AWAITING.md)"
    for needed in (other for other in PARTS + tuple(parts) if other.name in part.after):
        if (stored(work, needed.name) or {}).get("result") != "pass":
            return f"needs {needed.name}, which has not passed"
        if gone_files := gone(needed, work, rehearsal):
            return f"needs {gone_files[0].relative_to(work)} of {needed.name}, which is gone"
    return ""


def too_late(part: Part, deadline: float, trial: bool) -> str:
    """Whether less than half of the part's limit is left of the budget."""
    left = deadline - time.monotonic()
    short = left < part.limit / 2 and not trial
    return f"left out: {max(left, 0):.0f} s of the budget are left, it may take {part.limit} s" if short else ""


def run_all(
    parts: Sequence[Part],
    work: Path,
    *,
    rehearsal: bool,
    minutes: float,
    again: bool,
    device: str,
    wanted: Collection[str] = (),
    out: Path | None = None,
    name: str = "gpu",
    workers: int = 1,
    trial: bool = False,
) -> list[Result]:
    """Run the parts that have no result yet; write and return the results of all.

    Args:
        wanted: names of the parts that were asked for, all if empty; of others only what these need is run.
        out: folder of the table and of the archive ``name``.tar.gz.
        workers: parts that run at the same time, at most; outside a rehearsal a timed part runs alone.
        trial: timed parts run beside others, no goal is judged, and no result counts later.

    Raises:
        KeyboardInterrupt: asked to stop; the part that was running has no result.
    """
    deadline, installed = time.monotonic() + 60 * minutes, versions()
    sources = {part.name: fingerprint(part, device, installed) + " trial" * trial for part in parts}
    found = {part.name: None if again else read_result(work, part, sources[part.name]) for part in parts}
    kept = {name: result for name, result in found.items() if result is not None}
    waiting = to_run(parts, wanted or list(found), kept, lambda part: gone(part, work, rehearsal))
    if trial:  # what others wait for comes first
        waiting = sorted(waiting, key=lambda part: -sum(part.name in other.after for other in waiting))
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
            part.name,
            part.goal,
            finding.value,
            result,
            round(seconds, 1),
            sources[part.name],
            rehearsal,
            commands_of(part, work, rehearsal),
            finding.facts,
            device,
            installed,
        )
        if not rehearsal:
            for path in filter(Path.is_file, places(part.brings, part, work, rehearsal)):
                shutil.copy2(path, (out or work) / f"{part.name}-{path.name}")
        if result != "not run":  # which is no reason to lose an earlier result
            write_json(work / part.name / "result.json", asdict(results[part.name]))
        write()
        print(f"{part.name}: {result} after {seconds:.0f} s: {finding.value}", flush=True)

    def write() -> str:
        write_text((out or work) / "table.md", table_of(in_order()))
        return pack(work, (out or work) / f"{name}.tar.gz")

    def in_order() -> list[Result]:
        return [results[part.name] for part in parts if part.name in results]

    cores = sorted(os.sched_getaffinity(0)) if rehearsal and workers > 1 and hasattr(os, "sched_setaffinity") else []
    with ThreadPoolExecutor(workers, initializer=pin, initargs=(cores,)) as pool:
        try:
            while waiting or running:
                busy = {part.name for part in [*waiting, *running.values()]}
                for part in [part for part in waiting if not busy & set(part.after)][: workers - len(running)]:
                    beside = [part, *running.values()]
                    if len(beside) > 1 and not (rehearsal or trial) and any(each.timed for each in beside):
                        break
                    waiting.remove(part)
                    if why := why_not(part, parts, installed, work, rehearsal) or too_late(part, deadline, trial):
                        end(part, "not run", Finding(why), 0.0)
                        break  # parts that wait for it
                    limit = REHEARSAL if rehearsal else part.limit * (SLOWER if trial else 1)
                    limit = min(limit, deadline - time.monotonic())
                    print(f"{part.name}: {part.goal} (at most {limit:.0f} s)", flush=True)
                    running[pool.submit(run_part, part, work, rehearsal, limit, judged=not trial)] = part
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


def choose_bundles(given: Sequence[str]) -> list[str]:
    """The names of bundles, given by name or number."""
    names = list(BUNDLES)
    chosen = [names[int(n) - 1] if n.isdecimal() and 0 < int(n) <= len(names) else n for n in given]
    if unknown := [name for name in chosen if name not in BUNDLES]:
        raise ValueError(f"--bundle {unknown[0]}: unknown; use a number from 1 to {len(names)} or {', '.join(names)}")
    return chosen


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
    if args.at_once < 0 or (args.at_once and args.rehearsal):
        raise ValueError("--at-once: a number of parts from 1 on, and not in a rehearsal")
    name = "gpu-rehearsal" if args.rehearsal else "gpu-trial" if args.at_once else "gpu"
    work = Path(os.path.abspath(args.work or Path("runs") / name))
    if args.packages:
        sys.exit(not say_packages(installed_in(read_text(args.packages))))
    # In the order of the bundles' value; what a bundle needs comes before it, once.
    bundles = choose_bundles(args.bundle or list(BUNDLES))
    name, parts = "gpu", list(dict.fromkeys(part for each in bundles for part in with_needed(BUNDLES[each])))
    wanted = [part for each in bundles for part in BUNDLES[each]] if args.bundle else args.only or []
    if len(bundles) == 1:
        name, args.minutes = f"gpu-{bundles[0]}", min(args.minutes, seconds_of(parts) / 60)
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
            parts,
            work,
            rehearsal=args.rehearsal,
            minutes=args.minutes,
            again=args.again,
            device=device,
            wanted=wanted,
            out=out,
            name=name,
            workers=min(available_cores(), 2) if args.rehearsal else args.at_once or UNTIMED,
            trial=bool(args.at_once),
        )
    print(f"\n{table_of(results)}\nwritten to {out / 'table.md'}")
    if not (args.rehearsal or args.at_once):
        print("Paste it into benchmarks/log/DATE.md and its figures into RESULTS.md; what passed leaves AWAITING.md.")
    if any(result.result == "fail" or (args.rehearsal and result.result != "pass") for result in results):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
