"""Count the repository's lines, and follow what the engine imports.

    python tools/walks.py

Fails where a figure is above its bar. A bar is what was measured when it was last set, lines rounded up: lower it
when its figure falls.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from draftsmith.common.command import CommandLine, run_command

ROOT = Path(__file__).parents[1]
PRODUCT = ("common", "data", "inference", "models", "train", "kernels")
LONGEST_FILE = 500  # but for these:
LONGER = {"kernels/cpu.cpp", "kernels/tree_attention.py"}
BARS = {
    "lines of Python in the product": 36_300,
    "lines of Python in tests": 43_000,
    "lines of Python in benchmarks": 11_400,
    "files that inference/engine/engine.py needs": 47,
    "lines of these files": 11_600,
    "lines of the longest function outside kernels": 100,
    "product files of more than 500 lines": 1,
}


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


def main() -> None:
    CommandLine(__doc__).parse_args()
    needed = closure(ROOT / "inference/engine/engine.py")
    nodes = [node for path in sources(*PRODUCT[:-1]) for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    files = [*sources(*PRODUCT), *sources("kernels", suffix=".cpp")]
    long = {path.relative_to(ROOT).as_posix() for path in files if lines(path) > LONGEST_FILE} - LONGER
    counted = [lines(*sources(*PRODUCT)), lines(*sources("tests")), lines(*sources("benchmarks"))]
    counted += [len(needed), lines(*needed), max((node.end_lineno or 0) - node.lineno + 1 for node in functions)]
    figures = dict(zip(BARS, [*counted, len(long)], strict=True))
    for name, figure in figures.items():
        print(f"{figure:7,d} (bar {BARS[name]:6,d})  {name}")
    print("longer files:", ", ".join(sorted(long)) or "none")
    if over := [name for name, figure in figures.items() if figure > BARS[name]]:
        raise ValueError(
            f"above the bar: {'; '.join(over)}; make it less, or raise the bar in tools/walks.py and say why"
        )


if __name__ == "__main__":
    run_command(main)
