"""Break the code by one line at a time, and find out whether the tests named for that line fail.

    python tools/mutations.py                    # those of tools/mutations.txt without a result, one after the other
    python tools/mutations.py --only budget      # those whose file, tests or lines hold this text

A mutation that survives needs a better test. The code is that of the last commit, in a git worktree of its own, which
is removed at the end; the results for a commit are kept, so that an interrupted run goes on.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from draftsmith.common.command import CommandLine, run_command
from draftsmith.common.files import json_object, write_json

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".txt")
SECONDS = 300  # of a mutation's tests; what takes longer hangs, and counts as failed
VERDICTS = {0: "survived", 1: "killed", None: "killed"}  # by the exit code of pytest


@dataclass(frozen=True)
class Mutation:
    """A line of the product, the line in its place, and the tests that fail then."""

    folder: str
    tests: tuple[str, ...]
    old: str
    new: str

    def file(self, root: Path) -> Path:
        """The file of the folder that holds the old text. Raises ValueError: it is not there exactly once."""
        texts = {path: path.read_text("utf-8") for path in sorted((root / self.folder).rglob("*.py"))}
        found = [path for path, text in texts.items() for _ in range(text.count(self.old))]
        if len(found) != 1:
            raise ValueError(f"{LIST.name}: {self.folder}/ holds this text {len(found)} times, not once: {self.old}")
        return found[0]

    def test_paths(self, root: Path) -> list[str]:
        """The tests as pytest takes them. Raises ValueError: a file is not there exactly once."""
        paths = []
        for test in self.tests:
            name, colons, function = test.partition("::")
            found = [path for path in (root / "tests").rglob("test_*.py") if str(path).endswith(f"/{name}")]
            if len(found) != 1:
                raise ValueError(f"{LIST.name}: {name}: there are {len(found)} such files of tests, not one")
            paths.append(f"{found[0].relative_to(root)}{colons}{function}")
        return paths


def read() -> list[Mutation]:
    """The mutations of the list, in its order."""
    blocks = LIST.read_text("utf-8").strip().split("\n\n")
    lines = [[line for line in block.split("\n") if not line.startswith("#")] for block in blocks]
    heads = [(head.split(": "), old, new) for head, old, new in filter(None, lines)]
    return [Mutation(folder, (*tests.split(),), old[2:], new[2:]) for (folder, tests), old, new in heads]


def run_tests(root: Path, tests: list[str]) -> int | None:
    """The exit code of pytest in a checkout; None if it took too long."""
    environment = os.environ | {"PYTHONPATH": str(root / ".types"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        return None


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="the mutations that hold this text")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutations.json", help="kept in (%(default)s)")
    args = parser.parse_args()
    mutations = [each for each in read() if args.only in f"{each.file(ROOT)} {each}"]
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    results = json_object(args.results) if args.results.exists() else {}
    if results.get("commit") != commit.stdout.strip():  # a verdict is on the code that was broken
        results = {"commit": commit.stdout.strip()}
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "draftsmith"  # the name of the package
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", str(copy)], check=True)
        try:
            for each in mutations:
                key, file = f"{each.old} → {each.new}", each.file(copy)
                if key not in results:
                    text = file.read_text("utf-8")
                    file.write_text(text.replace(each.old, each.new), "utf-8")
                    code = run_tests(copy, each.test_paths(copy))
                    file.write_text(text, "utf-8")
                    results[key] = VERDICTS.get(code, f"pytest ended with {code}")
                    write_json(args.results, results)
                print(f"{results[key]:9} {file.relative_to(copy)}: {each.old}", flush=True)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(copy)], check=True)


if __name__ == "__main__":
    run_command(main)
