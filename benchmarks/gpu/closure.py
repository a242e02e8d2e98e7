"""What stands behind a part of `make gpu`: files and packages, found in the sources without importing anything.

The modules of draftsmith are followed wherever they are imported, inside functions too: a superset of the files that
the command runs. Packages are of two kinds: those that one of these files imports when it is imported itself, or a test
inside its functions, without which the command cannot start, and those that are imported inside a function or behind
``except ImportError``, which it may never need. A part names those of them that it needs, and those of the fixtures
that its tests ask for: a conftest.py's functions are not followed.
"""

import ast
import hashlib
import inspect
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from draftsmith.benchmarks.gpu.parts import PACKAGES, PARTS, Part

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"yaml": "pyyaml", "sklearn": "scikit-learn"}  # of import names, where they differ
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Closure:
    """files: of this checkout, the given ones too. packages, optional: import names of the two kinds above."""

    files: set[Path] = field(default_factory=set)
    packages: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Full names that a file imports, and whether each is optional."""
    source = path.read_text(encoding="utf-8")
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, optional: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend((f"{node.module}.{alias.name}", optional) for alias in node.names)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        optional |= isinstance(node, FUNCTIONS) and (not is_test(path) or path.name == "conftest.py")
        if isinstance(node, ast.Try):
            optional |= any("ImportError" in ast.unparse(each.type) for each in node.handlers if each.type)
        for field_name in ("body", "handlers", "orelse", "finalbody"):
            for child in getattr(node, field_name, ()):
                visit(child, optional)

    visit(ast.parse(source), False)
    # By name: a drafter's family, and libraries that may be missing.
    named = re.findall(r'"(draftsmith(?:\.\w+){2,})"|import_module\("([\w.]+)"\)', source)
    return found + [(family or library, True) for family, library in named]


@cache
def file_of(name: str, root: Path, test: bool) -> Path | None:
    """The file of a module below ``root``: of draftsmith by its full name, of tests' helpers by their own; None for a
    package's."""
    first, *parts = name.split(".")
    if first == "draftsmith":
        while parts and not (root.joinpath(*parts).with_suffix(".py")).is_file():
            parts.pop()  # the last name is a function's or a class's
        return root.joinpath(*parts).with_suffix(".py") if parts else None
    if not test or first in sys.stdlib_module_names:
        return None
    return next((root / "tests").rglob(f"{first}.py"), None)


def is_test(path: Path) -> bool:
    return ROOT / "tests" in path.parents


def closure_of(files: Iterable[Path]) -> Closure:
    """The closure of the imports of several files; with tests, of the conftest.py above them too."""
    closure, waiting = Closure(), [path.resolve() for path in files]
    folders = {folder for path in waiting for folder in path.parents if is_test(folder / "x")}
    waiting += [folder / "conftest.py" for folder in folders if (folder / "conftest.py").is_file()]
    while waiting:
        path = waiting.pop()
        if path in closure.files:
            continue
        closure.files.add(path)
        for name, optional in imports_of(path):
            if optional and path.name == "conftest.py":  # of a fixture
                continue
            found, first = file_of(name, ROOT, is_test(path)), name.split(".")[0]
            if found is not None:
                waiting.append(found)
            elif first not in (*sys.stdlib_module_names, "draftsmith"):
                (closure.optional if optional else closure.packages).add(first)
    closure.optional -= closure.packages
    return closure


# ---- what stands behind a part of make gpu


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """A command's environment variables and its words."""
    words = shlex.split(command)
    first = next(number for number, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    return dict(word.split("=", 1) for word in words[:first]), words[first:]


@cache
def behind(part: Part) -> Closure:
    """Everything of this checkout that the part's commands import, their recipes and models, and the packages."""
    scripts: list[Path] = []
    data: list[Path] = []
    for command in (*part.commands, *part.rehearsal):
        words = words_of(command)[1]
        ignored = {after for word, after in itertools.pairwise(words) if word == "--ignore"}
        for word in words:
            path = ROOT / word.partition("::")[0]
            if word.startswith("tests/") and word not in ignored:
                found = path.rglob("test_*.py") if path.is_dir() else [path]
                scripts += [file for file in found if str(file.relative_to(ROOT)) not in ignored]
            elif word.endswith(".py") and path.is_file():
                scripts.append(path)
        for name in re.findall(r"(?:recipes|models|data)/[\w./-]+", command):
            path = ROOT / name
            data += [path] if path.is_file() else path.rglob("*")
    closure = closure_of(scripts)
    packages = closure.packages | set(part.uses) | ({"pytest"} if "-m pytest" in part.commands[0] else set())
    files = closure.files | {path for path in data if path.is_file()}
    return Closure(files, packages, closure.optional - packages)


def needs_of(part: Part) -> list[str]:
    """The packages, by import name, that the part cannot do without."""
    return sorted(behind(part).packages)


def fingerprint(part: Part, device: str, installed: Mapping[str, str]) -> str:
    """Of what a part's result depends on: the files behind it, its commands and its judge, the device and versions."""
    try:
        judge = inspect.getsource(part.judge)
    except OSError:  # not from a file
        judge = ""
    versions = {name: version for name, version in installed.items() if name in ("python", *needs_of(part))}
    digest = hashlib.sha256(json.dumps([device, versions, part.commands, part.rehearsal, judge]).encode())
    for path in sorted(behind(part).files):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + hash_of(path))
    return digest.hexdigest()[:16]


@cache
def hash_of(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def installed_in(listed: str) -> dict[str, str]:
    """Versions by import name of :data:`PACKAGES` in the output of ``pip list`` or ``pip freeze``."""
    lines = re.findall(r"(?m)^([A-Za-z0-9][\w.-]*)(?:==|[ \t]+|$)(\S*)", listed)
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version or "?" for name, version in lines}
    names = {name: DISTRIBUTIONS.get(name, name) for name in PACKAGES}
    return {name: versions[distribution] for name, distribution in names.items() if distribution in versions}


def say_packages(installed: Mapping[str, str]) -> bool:
    """Print which parts can run with these packages; True if all can."""
    missing = {part.name: [name for name in needs_of(part) if name not in installed] for part in PARTS}
    for name, without in missing.items():
        print(f"{name}: " + (f"cannot run, missing: {', '.join(without)}" if without else "can run"))
    able = sum(not without for without in missing.values())
    print(f"{able} of {len(PARTS)} parts can run")
    return able == len(PARTS)
