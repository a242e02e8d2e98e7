"""Count the repository's lines, the files that the engine imports, and those whose functions run on the way from a
command to its first result.

    python tools/walks.py

Fails where a figure is above its bar. A bar is what was measured when it was last set, lines rounded up: lower it
when its figure falls.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from draftsmith.common.command import CommandLine, run_command

ROOT = Path(__file__).parents[1]
PRODUCT = ("common", "data", "inference", "models", "train", "kernels")
LONGEST_FILE = 500  # but for these:
LONGER = {"kernels/cpu.cpp", "kernels/tree_attention.py"}
BARS = {
    "lines of Python in the product": 42_960,
    "lines of Python in tests": 50_420,
    "lines of Python in benchmarks": 12_790,
    "files that inference/engine/engine.py needs": 54,
    "lines of these files": 12_770,
    "lines of the longest function outside kernels": 100,
    "product files of more than 500 lines": 1,
    "files from decode.py to the first committed token": 62,
    "files from train/medusa.py to the first optimiser step": 76,
}
# A command, and the function at whose first call its walk ends: file and name.
WALKS = (
    (
        ("inference/decode.py", "draft_model:models/tiny-lm", "--target", "models/tiny-lm", "--prompt", "x"),
        ("inference/engine/queue.py", "take"),
    ),
    (
        ("train/medusa.py", "recipes/tiny-medusa.yaml", "--tiny", "run.output_dir={folder}"),
        ("torch/optim/optimizer.py", "profile_hook_step"),
    ),
)
# Runs the script of its first arguments with a profile function: prints the files of this repository of which a
# function was called. Importing a module is no call.
PROFILER = """
import inspect, json, os, runpy, sys
file, function, *command = sys.argv[1:]
seen = set()
def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class
        seen.add(code.co_filename)
        if code.co_name == function and code.co_filename.endswith(file):
            print("\\n" + json.dumps(sorted(seen)), flush=True)
            os._exit(0)
sys.argv = command
sys.path.insert(0, os.path.dirname(command[0]))
sys.setprofile(profile)
runpy.run_path(command[0], run_name="__main__")
"""


def sources(*folders: str, suffix: str = ".py") -> list[Path]:
    found = (path for folder in folders for path in (ROOT / folder).rglob(f"*{suffix}"))
    return sorted(path for path in found if "__pycache__" not in path.parts)


def lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def imported(tree: ast.AST) -> Iterator[str]:
    """What a file imports, modules and their members, also inside functions; not what is under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        yield from imported(node)


def closure(start: Path) -> set[Path]:
    """A file, and all files of the product that it imports, directly or not."""
    found, waiting = set[Path](), [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = (name.split(".") for name in imported(ast.parse(path.read_text())))
            files = (ROOT.joinpath(*parts[1:]).with_suffix(".py") for parts in names if parts[0] == "draftsmith")
            waiting += [file for file in files if file.is_file()]
    return found


def walked(command: Sequence[str], until: tuple[str, str]) -> set[Path]:
    """The product's files in which a command calls a function until it calls the function ``until``; with an empty
    cache, since what is kept of an earlier run spares some."""
    with tempfile.TemporaryDirectory() as folder:
        filled = [word.format(folder=folder) for word in command]
        ask = [sys.executable, "-c", PROFILER, *until, *filled]
        environment = {**os.environ, "DRAFTSMITH_CACHE": folder}
        done = subprocess.run(ask, cwd=ROOT, env=environment, capture_output=True, text=True)
    *_, last = done.stdout.splitlines() or [""]
    if not last.startswith("["):
        raise ValueError(f"{' '.join(command)} ended before {until[1]}: {done.stderr.strip()[-500:]}")
    files = {(ROOT / name).resolve() for name in json.loads(last)}
    return {path for path in files if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT}


def main() -> None:
    CommandLine(__doc__).parse_args()
    needed = closure(ROOT / "inference/engine/engine.py")
    nodes = [node for path in sources(*PRODUCT[:-1]) for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    files = [*sources(*PRODUCT), *sources("kernels", suffix=".cpp")]
    long = {path.relative_to(ROOT).as_posix() for path in files if lines(path) > LONGEST_FILE} - LONGER
    counted = [lines(*sources(*PRODUCT)), lines(*sources("tests")), lines(*sources("benchmarks"))]
    counted += [len(needed), lines(*needed), max((node.end_lineno or 0) - node.lineno + 1 for node in functions)]
    walks = [len(walked(command, until)) for command, until in WALKS]
    figures = dict(zip(BARS, [*counted, len(long), *walks], strict=True))
    for name, figure in figures.items():
        print(f"{figure:7,d} (bar {BARS[name]:6,d})  {name}")
    print("longer files:", ", ".join(sorted(long)) or "none")
    if over := [name for name, figure in figures.items() if figure > BARS[name]]:
        raise ValueError(
            f"above the bar: {'; '.join(over)}; make it less, or raise the bar in tools/walks.py and say why"
        )


if __name__ == "__main__":
    run_command(main)
