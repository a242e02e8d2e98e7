"""A script's recipe, read before the script's slow imports. ``--help`` does without pydantic, too."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any


def recipe_class(script: str) -> Any:
    """The recipe class of a script in train/, which is named by it: of ``medusa`` it is ``MedusaRecipe``."""
    return getattr(importlib.import_module(f"draftsmith.train.sections.{script}"), f"{script.capitalize()}Recipe")


def reader(script: str) -> Callable[[argparse.Namespace], Any]:
    """For ``before_imports``: read the recipe that a command line names, as that script's."""

    def read(args: argparse.Namespace) -> Any:
        from draftsmith.common.recipe import read_recipe

        return read_recipe(args.recipe, recipe_class(script), args.overrides)

    return read
