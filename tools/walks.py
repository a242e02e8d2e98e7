"""Count the repository's lines, and follow what the engine imports. Fails where a figure is above its bar.

    python tools/walks.py
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("common", "models", "data", "inference", "train", "kernels", "tools")
LONG_FILES = {"kernels/cpu.cpp", "kernels/tree_attention.py"}  # may be longer than LONGEST_FILE
LONGEST_FILE = 500
# What was measured when the bars were last set: lower them when a figure falls.
BARS = {
    "lines of Python in the product": 0,
    "lines of Python in tests": 0,
    "lines of Python in benchmarks": 0,
    "files behind inference/engine/engine.py": 0,
    "lines behind inference/engine/engine.py": 0,
    "lines of the longest function outside kernels": 0,
    "product files above 500 lines": 0,
}


def sources(*folders: str) -> list[Path]:
    """Python files of these folders, and C++ ones."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of modules and members that a file imports, also inside functions; not those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        else:
            yield from imported(node)


def closure(start: Path, root: Path = ROOT) -> set[Path]:
    """A file, and all files of the product that it imports, directly or not."""
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = (name.split(".") for name in imported(ast.parse(path.read_text())))
            files = (root.joinpath(*parts[1:]).with_suffix(".py") for parts in names if parts[0] == "draftsmith")
            waiting += [file for file in files if file.is_file()]
    return found


def measure() -> tuple[dict[str, int], list[str]]:
    """The figures by the names of :data:`BARS`, and the long files."""
    python = [path for path in sources(*PRODUCT) if path.suffix == ".py"]
    behind = closure(ROOT / "inference/engine/engine.py")
    plain = [path for path in python if path.parts[len(ROOT.parts)] != "kernels"]
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for path in plain
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [path.relative_to(ROOT).as_posix() for path in sources(*PRODUCT) if lines(path) > LONGEST_FILE]
    long = [name for name in long if name not in LONG_FILES]
    tests, benchmarks = (sum(map(lines, sources(folder))) for folder in ("tests", "benchmarks"))
    counted = sum(map(lines, python)), tests, benchmarks, len(behind), sum(map(lines, behind)), max(functions), len(long)
    return dict(zip(BARS, counted, strict=True)), long


def main() -> None:
    figures, long = measure()
    for name, figure in figures.items():
        print(f"{figure:7,d} of at most {BARS[name]:7,d}  {name}" + (f": {', '.join(long)}" if "above" in name else ""))
    if over := [name for name, figure in figures.items() if figure > BARS[name]]:
        sys.exit(f"error: {'; '.join(over)}: above the bar in tools/walks.py; make it less, or say why it has to be more")


if __name__ == "__main__":
    main()
