"""Write the JSON Schema of each script's recipe, which editors read for completion and warnings.

    python train/schema.py            # recipes/schema/medusa.json, recipes/schema/lm.json, …

A recipe names its schema in its second line: ``# yaml-language-server: $schema=schema/medusa.json``.
"""

import argparse
from pathlib import Path
from typing import Any

from draftsmith.models.artifact import write_json
from draftsmith.train.command import run_command
from draftsmith.train.distill import DistillRecipe
from draftsmith.train.lm import LmRecipe
from draftsmith.train.medusa import MedusaRecipe

FOLDER = Path(__file__).resolve().parent.parent / "recipes" / "schema"
RECIPES = {"distill": DistillRecipe, "lm": LmRecipe, "medusa": MedusaRecipe}


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each script's recipe, by the script's name."""
    return {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", **recipe.model_json_schema()}
        for name, recipe in RECIPES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        write_json(args.out / f"{name}.json", schema)
        print(f"wrote {args.out / f'{name}.json'}")


if __name__ == "__main__":
    run_command(main)
