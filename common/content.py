"""Read YAML into plain values, and set the fields that overrides name; without pydantic, so that a script can check its
recipe's file before slow imports. No other file reads YAML.
"""

import argparse
import copy
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from draftsmith.common.command import nearest
from draftsmith.common.files import json_object, read_text

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,39})")
FLOAT = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\Z|[-+]?\.inf\Z|\.nan\Z", re.IGNORECASE
)
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_BYTES = 1_000_000  # of a file
_SCHEMAS = Path(__file__).parents[1] / "recipes" / "schema"
_SECTIONS = Path(__file__).with_name("sections.py")
_VALUES = 10_000  # in one recipe; an alias counts as all values of its anchor


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar: null, true or false, a decimal number, else text.

    These are YAML 1.2's words and numbers. In YAML 1.1, ``no`` is false, ``017`` is 15, ``1:30`` is 90, ``2024-01-01``
    is a date and ``2e-3`` is text.
    """
    if text in _WORDS or text in ("Null", "NULL", "True", "TRUE", "False", "FALSE"):
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    if FLOAT.match(text):
        return float(text.replace(".", "")) if "n" in text.lower() else float(text)
    return text


def _document(text: str) -> Any:
    """The single YAML document in ``text``, as plain values. An alias is a copy of its anchor's value, so that an
    override changes only one of them."""
    events: Iterator[Any] = yaml.parse(text, yaml.SafeLoader)
    anchors: dict[str, tuple[Any, int]] = {}  # the value, and the number of values in it
    count = 0

    def wrong(event: Any, problem: str) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

    def text_of(event: yaml.ScalarEvent) -> str:
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in event.value):
            raise wrong(event, "text cannot hold a null character or half of a surrogate pair")
        return event.value

    def key_of(event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.tag:
            raise wrong(event, "a key is a word; a list, mapping, alias or tag cannot be one")
        if event.value == "<<" and event.style is None:
            raise wrong(event, "merge keys (<<) are not supported; write the keys out, or set them by overrides")
        return text_of(event)

    def value_of(event: Any) -> Any:
        nonlocal count
        before = count
        count += anchors.get(event.anchor, (None, 0))[1] if isinstance(event, yaml.AliasEvent) else 1
        if count > _VALUES:
            raise wrong(event, f"more than {_VALUES:,} values; no recipe is so long")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise wrong(event, f"there is no anchor &{event.anchor} before this alias")
            return copy.deepcopy(anchors[event.anchor][0])
        if event.tag:
            raise wrong(
                event, f"tags ({event.tag.replace('tag:yaml.org,2002:', '!!')}) are not supported; leave it out"
            )
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = scalar(text_of(event)) if event.implicit[0] else text_of(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(entry := next(events), yaml.SequenceEndEvent):
                value.append(value_of(entry))
        else:
            value = {}
            while not isinstance(entry := next(events), yaml.MappingEndEvent):
                if (key := key_of(entry)) in value:
                    raise wrong(entry, f"key {key!r} is given twice")
                value[key] = value_of(next(events))
        if event.anchor:
            anchors[event.anchor] = value, count - before
        return value

    document = None
    next(events)  # the stream begins
    if isinstance(next(events), yaml.DocumentStartEvent):
        document = value_of(next(events))
        next(events)  # the document ends
        if not isinstance(event := next(events), yaml.StreamEndEvent):
            raise wrong(event, "a second document begins here; a recipe is one")
    return document


def _yaml(text: str, where: str, *, lines: bool = False) -> Any:
    """The value of YAML text; ``lines``: whether errors name the line."""
    try:
        return _document(text)
    except yaml.YAMLError as error:
        problem, line = getattr(error, "problem", None) or str(error).splitlines()[0], None
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


def read_content(path: str | Path, overrides: typing.Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The text of a recipe, and its values with the overrides, as ``read_recipe`` takes them, but unchecked."""
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
    content = _yaml(text, str(path), lines=True)
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: a recipe is a mapping of sections (run, data, optim, …), got "
            f"{'nothing' if content is None else type(content).__name__}"
        )
    for override in overrides:
        _override(content, override, str(path))
    return text, content


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
            node[at] = _yaml(value, where)
            return
        node = node[at] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, (dict, list)):
            raise ValueError(f"{where}: '{key}': '{short(part)}' is a value, not a section")


# ---- keys that a recipe's schema does not have

Schema = typing.Mapping[str, typing.Any]  # JSON Schema as pydantic writes it, of a recipe or of a field


def _inner(field: Schema, schema: Schema) -> list[Schema]:
    """The sections inside a field, such as a list of stages, or a section or null."""
    if "$ref" in field:
        section = schema["$defs"][field["$ref"].rpartition("/")[2]]
        return [section] if "properties" in section else []
    parts = [*field.get("anyOf", ()), *field.get("oneOf", ()), *([field["items"]] if "items" in field else [])]
    return [section for part in parts for section in _inner(part, schema)]


def _keys(section: Schema, schema: Schema, prefix: str = "") -> list[str]:
    """All dotted keys below a section; a list's are those of its first entry, as in an override."""
    keys: list[str] = []
    for name, field in section.get("properties", {}).items():
        keys.append(prefix + name)
        entry = "0." if field.get("type") == "array" else ""
        for inner in _inner(field, schema):
            keys += _keys(inner, schema, f"{prefix}{name}.{entry}")
    return keys


def _nearest(schema: Schema, path: typing.Sequence[str | int]) -> str:
    """«; nearest valid key: …» for a key that does not exist: among its siblings first, then everywhere."""
    section: Schema | None = schema
    for part in path[:-1]:
        if isinstance(part, int) or section is None:
            continue
        sections = _inner(section.get("properties", {}).get(part, {}), schema)
        section = sections[0] if sections else None
    siblings = list(section.get("properties", {})) if section else []
    last = str(path[-1])
    keys = _keys(schema, schema)
    everywhere = {key.rsplit(".", 1)[-1]: key for key in reversed(keys)}  # the first key of a name is kept
    meant = nearest(last, siblings)
    if meant and last not in everywhere:  # a key in another place is meant rather than one of a similar name here
        return "; nearest valid key: " + ".".join([*(str(p) for p in path[:-1]), meant])
    if meant := nearest(last, everywhere, 0.85):
        return f"; nearest valid key: {everywhere[meant]}"
    return f"; valid keys here: {', '.join(siblings)}" if siblings else ""


def place(where: str, field: str, overrides: typing.Sequence[str]) -> str:
    """Where a field's value comes from: the file, with those overrides that set the field."""
    for override in overrides:
        key = override.partition("=")[0] + "."
        if key.startswith(f"{field}.") or f"{field}.".startswith(key):
            where += f" with {short(override)}"
    return where


def unknown(where: str, path: typing.Sequence[str | int], schema: Schema) -> str:
    """The message about a key that is in no schema."""
    return f"{where}: unknown key '{short('.'.join(map(str, path)))}'{_nearest(schema, path)}"


def meant_for(text: str, room: str, script: str) -> str:
    """« (this recipe is for …)» where a recipe's first line names another script than the one that reads it."""
    command = re.match(r"# .*\b(\w+)/(\w+)\.py ", text)
    if not command or command[1] != room or command[2] == script:  # other rooms' commands read all recipes
        return ""
    return f" (this recipe is for {command[1]}/{command[2]}.py)"


def _first_unknown(content: typing.Any, section: Schema, schema: Schema) -> tuple[str | int, ...]:
    """The path to the first key that a section does not have; empty if there is none."""
    if isinstance(content, dict) and "properties" in section:
        for name, value in content.items():
            if name not in section["properties"]:
                return () if section.get("additionalProperties", True) else (name,)
            sections = _inner(section["properties"][name], schema)
            entries = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for number, entry in entries if len(sections) == 1 else ():
                if inner := _first_unknown(entry, sections[0], schema):
                    return (name, *([] if number is None else [number]), *inner)
    return ()


def check_recipe(args: argparse.Namespace) -> None:
    """For ``before_imports``: that the recipe can be read, and that its keys exist, as far as the schema beside the
    recipes says; what it holds is checked once the script's sections are known.
    Raises FileNotFoundError, ValueError: one line each."""
    text, content = read_content(args.recipe, args.overrides)
    script = Path(sys.argv[0])
    try:
        schema = json_object(_SCHEMAS / f"{script.stem}.json")
    except OSError:
        return  # a script without a recipe of its own, or installed without the recipes
    if any(name not in content for name in schema.get("required", ())):
        return  # that is said first
    if path := _first_unknown(content, schema, schema):
        new = re.compile(rf"^    {re.escape(str(path[-1]))}: ", re.MULTILINE)
        if any(
            new.search(read_text(code)) for code in (*script.parent.glob(f"{script.stem}*.py"), _SECTIONS)
        ) and not any(key.rpartition(".")[2] == path[-1] for key in _keys(schema, schema)):
            return  # a field that somebody adds, whose schema is not written yet
        where = place(str(args.recipe), ".".join(map(str, path)), args.overrides)
        raise ValueError(unknown(where, path, schema) + meant_for(text, script.resolve().parent.name, script.stem))
