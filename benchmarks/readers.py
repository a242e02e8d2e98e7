"""Which program reads which field of an exported config.json (models/serving/readers.py): a table, and its check.

    python benchmarks/readers.py --write docs/export.md      # the table between its markers
    python benchmarks/readers.py                             # compare with the sources that make serve-check installed

A field that a program is said to read has to be named in its source, one that it is said to leave out must not be.
Programs that are not installed are left out. Exit codes: 0 as the sources say, 1 not, or none is installed.
"""

import argparse
import re
import sys
from pathlib import Path

from draftsmith.benchmarks.documents import between, markdown_table
from draftsmith.common.command import CommandLine, run_command
from draftsmith.common.files import read_text, write_text
from draftsmith.models.serving.readers import READ_BY, READERS, Reader

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- fields -->", "<!-- /fields -->"


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE.md", help=f"put the table after {BEGIN}, up to {END}")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="of the environments (%(default)s)")
    return parser


def block() -> str:
    """The table of the document."""
    rows = [[f"`{name}`", *("read" if key in by else "–" for key in READERS)] for name, by in READ_BY.items()]
    return markdown_table(["field", *(reader.name for reader in READERS.values())], rows)


def source_of(reader: Reader, root: Path) -> str:
    """The text of a program's files; empty if it is not installed.
    Raises FileNotFoundError: it is, and has no such file or class."""
    found = ""
    for folder in root.glob(reader.place):
        for pattern in reader.files:
            files, _, classes = pattern.partition("#")
            text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob(files)))
            if classes:
                parts = re.split(r"^(?=class |def |@)", text, flags=re.MULTILINE)
                text = "".join(part for part in parts if part.startswith(f"class {classes}"))
            if not text:
                raise FileNotFoundError(f"{folder}: {reader.name} has no {pattern}; it reads config.json elsewhere now")
            found += text
    return found


def faults(key: str, source: str) -> list[str]:
    """What a program's source says otherwise than the table."""
    said = []
    for field, by in READ_BY.items():
        named = re.search(rf"(?<!\w){field}(?!\w)", source) is not None
        if named != (key in by):
            verb = "is named nowhere" if key in by else "is named, and said to be left out,"
            said.append(f"{field} {verb} in the source of {READERS[key].name}")
    return said


def main() -> None:
    args = parser().parse_args()
    if args.write:
        before, _, after = between(read_text(args.write, "document"), str(args.write), BEGIN, END)
        write_text(args.write, before + block() + after)
        return
    sources = {key: source_of(reader, args.root) for key, reader in READERS.items()}
    wrong = [fault for key, source in sources.items() if source for fault in faults(key, source)]
    names = [READERS[key].name for key, source in sources.items() if source]
    print(*wrong, f"compared {len(READ_BY)} fields with the sources of: {', '.join(names) or 'none'}", sep="\n")
    if wrong or not names:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
