"""Read recipes: YAML into strict typed objects, without torch, so that a script checks its recipe before slow imports.

Unknown keys, wrong types and impossible combinations raise a one-line ``ValueError`` with file, line, field and the
nearest valid key.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.common.command import nearest
from draftsmith.common.files import read_text, write_text

_BYTES = 1_000_000  # of a file
_VALUES = 10_000  # in one recipe; an alias counts as all values of its anchor
_FLOAT = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z|[-+]?\.inf\Z|\.nan\Z", re.IGNORECASE
)


class Section(BaseModel):
    """A mapping of a recipe. ``tiny``: the values that ``--tiny`` puts into its fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    tiny: ClassVar[dict[str, Any]] = {}


S = TypeVar("S", bound=Section)
FieldPath = tuple[str | int, ...]  # names of sections, numbers of list entries


# ---- YAML


class _Loader(yaml.SafeLoader):
    """The words of YAML 1.2 and its decimal numbers; no tags, no merge keys. In YAML 1.1, ``no`` is false, ``017`` is
    15, ``1:30`` is 90, ``2024-01-01`` is a date and ``2e-3`` is text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse what recipes do without, at its line."""
        event = self.peek_event()
        is_key = isinstance(parent, yaml.MappingNode) and not isinstance(index, yaml.Node)
        tag = getattr(event, "tag", None)
        scalar = event if isinstance(event, yaml.ScalarEvent) else None
        problem = ""
        if is_key and (not scalar or tag):
            problem = "a key is a word; a list, mapping, alias or tag cannot be one"
        elif tag:
            problem = f"tags ({tag.replace('tag:yaml.org,2002:', '!!')}) are not supported; leave it out"
        elif scalar and is_key and scalar.value == "<<" and scalar.style is None:
            problem = "merge keys (<<) are not supported; write the keys out, or set them by overrides"
        elif scalar and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in scalar.value):
            problem = "text cannot hold a null character or half of a surrogate pair"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, cast(Any, index))


for _name, _pattern, _first in (
    ("null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    ("int", re.compile(r"[-+]?(0|[1-9][0-9]{0,39})\Z"), list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)


def _plain(text: str) -> tuple[Any, dict[FieldPath, int]]:
    """The YAML document in ``text`` as plain values, and the line of each. An alias is a copy of its anchor's value, so
    that an override changes only one of them."""
    loader, lines = _Loader(text), dict[FieldPath, int]()

    def value_of(node: yaml.Node, path: FieldPath, begins: yaml.Mark) -> Any:
        lines[path] = begins.line + 1
        if len(lines) > _VALUES:
            raise yaml.MarkedYAMLError(problem=f"more than {_VALUES:,} values; no recipe is so long")
        if isinstance(node, yaml.SequenceNode):
            return [value_of(each, (*path, place), each.start_mark) for place, each in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        value: dict[str, Any] = {}
        for key, each in node.value:
            if key.value in value:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            value[key.value] = value_of(each, (*path, key.value), key.start_mark)
        return value

    root = loader.get_single_node()
    return (None, {}) if root is None else (value_of(root, (), root.start_mark), lines)


def _yaml(text: str, where: str, *, lines: bool = False) -> tuple[Any, dict[FieldPath, int]]:
    """As :func:`_plain`; ``lines``: whether errors name the line."""
    try:
        return _plain(text)
    except yaml.YAMLError as error:
        problem, line = getattr(error, "problem", None) or str(error).splitlines()[0], None
        if problem.startswith("but "):
            problem = f"{getattr(error, 'context', '')} {problem}"
        if mark := getattr(error, "problem_mark", None):
            line = mark.line + 1
        elif isinstance(error, yaml.reader.ReaderError):  # a character that YAML does not allow
            line = text.count("\n", 0, int(error.position)) + 1
    except RecursionError:
        problem, line = "nested too deeply", None
    except (ValueError, OverflowError):  # PyYAML hands the number of an escape such as "\UFFFFFFFF" to chr()
        problem, line = "an escape in quotes stands for no character", None
    place = f":{line}" if lines and line else ""
    raise ValueError(f"{where}{place}: not valid YAML: {short(problem)}")


def short(text: str, length: int = 100) -> str:
    """At most ``length`` characters of a text, on one line."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:length])
    return shown if len(text) <= length else f"{shown}…"


def read_content(path: str | Path, overrides: Sequence[str] = ()) -> tuple[str, dict[str, Any], dict[FieldPath, int]]:
    """The text of a recipe, its values with the overrides, as ``read_recipe`` takes them, but not validated, and the
    lines of the values."""
    path = Path(path)
    if os.path.lexists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: not a file (a device, or a link that leads nowhere); a recipe is needed")
    if not os.path.lexists(path):
        recipes = sorted(p.stem for p in path.parent.glob("*.yaml")) if os.path.isdir(path.parent) else []
        meant = nearest(path.stem, recipes)
        hint = f"; did you mean {path.parent / (meant + '.yaml')}?" if meant else ""
        raise FileNotFoundError(f"{path}: there is no such recipe{hint}")
    if os.path.isfile(path) and (size := os.path.getsize(path)) > _BYTES:
        raise ValueError(f"{path}: {size:,} bytes; no recipe is so long")
    text = read_text(path, "recipe")
    content, lines = _yaml(text, str(path), lines=True)
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: a recipe is a mapping of sections (run, data, optim, …), got "
            f"{'nothing' if content is None else type(content).__name__}"
        )
    for override in overrides:
        _override(content, override, str(path))
    return text, content, lines


def _override(content: dict[str, Any], override: str, path: str) -> None:
    """Set the field that ``section.field=value`` names."""
    key, equals, value = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > 32:
        raise ValueError(
            f"'{short(override)}' is no override; write section.field=value, for example stages.0.optim.lr=1e-3"
        )
    where, key = f"{path} with {short(override)}", short(key)
    node: Any = content
    for part, last in zip(parts, [False] * (len(parts) - 1) + [True], strict=True):
        at: Any = part
        if isinstance(node, list):
            if not re.fullmatch("[0-9]{1,5}", part) or int(part) >= len(node):
                raise ValueError(f"{where}: '{key}': the list has {len(node)} entries, counted from 0")
            at = int(part)
        if last:
            node[at], _ = _yaml(value, where)
            return
        if not isinstance(node, list) and node.get(part) is None:  # a section that is left out, or null
            node[part] = {}
        node = node[at]
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{where}: '{key}': '{short(part)}' is a value, not a section")


# ---- validation


def read_recipe(path: str | Path, recipe: type[S], overrides: Sequence[str] = ()) -> S:
    """Read ``path`` as a ``recipe``; ``overrides`` are ``section.field=value`` (the value is YAML; ``a.0.b`` reaches
    into lists).
    Raises FileNotFoundError: there is no such file. ValueError: one line with file, line, field and the nearest valid
    key."""
    text, content, lines = read_content(path, overrides)
    try:
        return recipe.model_validate(content)
    except ValidationError as error:
        message = _explain(error, recipe, str(path), overrides, lines)
        raise ValueError(message + _meant_for(text, recipe)) from None


def _explain(
    error: ValidationError, model: type[BaseModel], where: str, overrides: Sequence[str], lines: Mapping[FieldPath, int]
) -> str:
    """One of pydantic's errors as one line: the first unknown key, which also explains one that is missing, else the
    first of all."""
    errors = error.errors()
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    path = tuple(p for p in first["loc"] if not (isinstance(p, str) and p.startswith("function-")))
    field = ".".join(map(str, path)) or "recipe"
    where = _place(where, path, field, overrides, lines)
    tail = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    got = first["input"]
    shown = f", got {short(repr(got))}" if isinstance(got, (str, int, float, bool, type(None))) else ""
    if first["type"] == "extra_forbidden":
        return f"{where}: unknown key '{short(field)}'{_nearest(model, path)}{tail}"
    if first["type"] == "missing":
        return f"{where}: '{field}' is missing; add it{tail}"
    if first["type"] in ("model_type", "dict_type"):
        kind = shown or f", got a {type(got).__name__}"
        return f"{where}: '{field}': this is a section; write its fields below it{kind}{tail}"
    message = first["msg"].removeprefix("Value error, ")
    message = short(message[0].lower() + message[1:], 400)
    return f"{where}: '{field}': {message}{shown}{tail}" if path else f"{where}: {message}{tail}"


def _place(where: str, path: FieldPath, field: str, overrides: Sequence[str], lines: Mapping[FieldPath, int]) -> str:
    """Where a field's value comes from: the file with those overrides that set the field, else its line, or that of the
    section which lacks it."""
    keys = {override: override.partition("=")[0] + "." for override in overrides}
    setting = [o for o, key in keys.items() if key.startswith(f"{field}.") or f"{field}.".startswith(key)]
    if setting:
        return where + "".join(f" with {short(override)}" for override in setting)
    line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
    return f"{where}:{line}" if line else where


def _sections(annotation: Any, entry: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections inside a field's type, such as a list of stages, or a section or null; ``0.`` with those of a
    list."""
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield entry, annotation
    for part in get_args(annotation):
        yield from _sections(part, "0." if get_origin(annotation) is list else entry)


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys below a section; a list's are those of its first entry, as in an override."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for entry, inner in _sections(field.annotation):
            yield from _keys(inner, f"{prefix}{name}.{entry}")


def _nearest(model: type[BaseModel], path: FieldPath) -> str:
    """«; nearest valid key: …» for a key that does not exist: among its siblings first, then everywhere."""
    section, last = model, str(path[-1])
    for part in path[:-1]:
        if isinstance(part, str):
            section = next(inner for _, inner in _sections(section.model_fields[part].annotation))
    everywhere = {key.rsplit(".", 1)[-1]: key for key in reversed([*_keys(model)])}  # the first key of a name is kept
    meant = nearest(last, section.model_fields)
    if meant and last not in everywhere:  # a key in another place is meant rather than one of a similar name here
        return "; nearest valid key: " + ".".join([*(str(p) for p in path[:-1]), meant])
    if meant := nearest(last, everywhere, 0.85):
        return f"; nearest valid key: {everywhere[meant]}"
    return f"; valid keys here: {', '.join(section.model_fields)}" if section.model_fields else ""


def _meant_for(text: str, recipe: type[BaseModel]) -> str:
    """« (this recipe is for …)» where a recipe's first line names another script than that of train/sections/ which
    reads it; other commands read all recipes."""
    command = re.match(r"# .*\btrain/(\w+)\.py ", text)
    module, _, script = recipe.__module__.rpartition(".")
    if not command or not module.endswith("train.sections") or command[1] == script:
        return ""
    return f" (this recipe is for train/{command[1]}.py)"


# ---- writing


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which :class:`_Loader` would read as a number and YAML 1.1 would not."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def write_recipe(recipe: Section, path: Path, command: str) -> None:
    """Write the resolved recipe, whole or not at all, after a comment with the command that ran it."""
    text = yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    write_text(path, f"# {short(command, len(command))}\n{text}")
