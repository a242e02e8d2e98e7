"""Write the JSON Schema of each script's recipe, which editors read for completion and warnings.

    python tools/schema.py            # recipes/schema/medusa.json, recipes/schema/lm.json, …

A recipe names its schema in its second line: ``# yaml-language-server: $schema=schema/medusa.json``.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from draftsmith.common.command import CommandLine, run_command
from draftsmith.common.files import check_folder, write_json

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "schema"


def recipe_classes() -> dict[str, str]:
    """The scripts in train/ that read a recipe, and the class of each: the one that ends in ``Recipe``."""
    found = {}
    for path in sorted((Path(__file__).resolve().parent.parent / "train").glob("*.py")):
        if recipe := re.search(r"^class (\w+Recipe)\(", path.read_text("utf-8"), re.MULTILINE):
            found[path.stem] = recipe[1]
    return found


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each script's recipe, by the script's name."""
    found: dict[str, dict[str, Any]] = {}
    for name, recipe in recipe_classes().items():
        module = importlib.import_module(f"draftsmith.train.{name}")  # seconds, which --help does without
        schema = getattr(module, recipe).model_json_schema()
        found[name] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return found


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="the folder to write (%(default)s)")
    args = parser.parse_args()
    found = schemas()
    check_folder("--out", args.out, {f"{name}.json": "$schema" for name in found})
    for name, schema in found.items():
        write_json(args.out / f"{name}.json", schema)
        print(f"wrote {args.out / f'{name}.json'}")


if __name__ == "__main__":
    run_command(main)
