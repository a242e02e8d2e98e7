"""Read recipes: YAML into strict typed objects.

Unknown keys, wrong types and impossible combinations raise a one-line ``ValueError`` with file, field and the nearest
valid key.
"""

import sys
import typing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.common.content import FLOAT, meant_for, place, read_content, short, unknown
from draftsmith.common.files import write_text


class Section(BaseModel):
    """A mapping of a recipe. ``tiny``: the values that ``--tiny`` puts into its fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    tiny: ClassVar[dict[str, Any]] = {}


S = TypeVar("S", bound=Section)


def _explain(error: ValidationError, model: type[BaseModel], where: str, overrides: typing.Sequence[str]) -> str:
    """The first of pydantic's errors as one line."""
    first = error.errors()[0]
    path = tuple(p for p in first["loc"] if not (isinstance(p, str) and p.startswith("function-")))
    field = ".".join(map(str, path)) or "recipe"
    where = place(where, field, overrides)
    more = len(error.errors()) - 1
    tail = f" (and {more} more)" if more else ""
    got = first["input"]
    shown = f", got {short(repr(got))}" if isinstance(got, (str, int, float, bool, type(None))) else ""
    if first["type"] == "extra_forbidden":
        return f"{unknown(where, path, model.model_json_schema())}{tail}"
    if first["type"] == "missing":
        return f"{where}: '{field}' is missing; add it{tail}"
    if first["type"] in ("model_type", "dict_type"):
        kind = shown or f", got a {type(got).__name__}"
        return f"{where}: '{field}': this is a section; write its fields below it{kind}{tail}"
    message = first["msg"].removeprefix("Value error, ")
    message = short(message[0].lower() + message[1:], 400)
    return f"{where}: '{field}': {message}{shown}{tail}" if path else f"{where}: {message}{tail}"


def read_recipe(path: str | Path, recipe: type[S], overrides: typing.Sequence[str] = ()) -> S:
    """Read ``path`` as a ``recipe``; ``overrides`` are ``section.field=value`` (the value is YAML; ``a.0.b`` reaches
    into lists).
    Raises FileNotFoundError: there is no such file. ValueError: one line with file, field and the nearest valid key."""
    text, content = read_content(path, overrides)
    try:
        return recipe.model_validate(content)
    except ValidationError as error:
        message = _explain(error, recipe, str(path), overrides)
        *_, room, script = _script_of(recipe)
        message += meant_for(text, room, script)
        raise ValueError(message) from None


def _script_of(recipe: type[S]) -> tuple[str, ...]:
    """Folders and name of the file that defines a recipe class."""
    if recipe.__module__ == "__main__":
        return Path(sys.argv[0]).resolve().with_suffix("").parts
    return ("", *recipe.__module__.split("."))


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which :func:`scalar` would read as a number and YAML 1.1 would not."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def write_recipe(recipe: Section, path: Path, command: str) -> None:
    """Write the resolved recipe, whole or not at all, after a comment with the command that ran it."""
    text = yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    write_text(path, f"# {short(command, len(command))}\n{text}")
