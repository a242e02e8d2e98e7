"""Write the JSON Schema of each script's recipe, which editors read for completion and warnings.

    python tools/schema.py            # recipes/schema/medusa.json, recipes/schema/lm.json, …

A recipe names its schema in its second line: ``# yaml-language-server: $schema=schema/medusa.json``.
"""

from pathlib import Path
from typing import Any

from draftsmith.common.command import CommandLine, run_command
from draftsmith.common.files import check_folder, write_json
from draftsmith.train.early import recipe_class

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "schema"


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each script's recipe, by the script's name."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((FOLDER.parents[1] / "train" / "sections").glob("*.py")):
        schema = recipe_class(path.stem).model_json_schema()
        found[path.stem] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
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
