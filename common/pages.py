"""HTML pages without external files: the page of a report and that of a training run."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def _environment(folder: Path) -> Environment:
    loader = FileSystemLoader([folder, Path(__file__).parent])
    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, loader=loader)
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    made.filters["share"] = lambda part: "<1 %" if 0 < part < 0.005 else f"{100 * part:.0f} %"
    return made


def render(template: Path, **values: Any) -> str:
    """A page of a Jinja template, which may import ``parts.html``. Text is escaped, and ``tojson`` gives JSON in which
    no text ends a script element; ``share`` gives per cent."""
    return _environment(template.parent).get_template(template.name).render(values)
