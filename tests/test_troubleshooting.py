"""docs/troubleshooting.md quotes messages of this code base, the terms of the glossary are used elsewhere, and the
navigation of the site has all documents."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@cache
def texts() -> list[str]:
    """The strings in the sources, with … for what is filled in."""
    found = []
    for folder in ("common", "models", "data", "inference", "train"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_the_table_has_rows():
    lines = (ROOT / "docs/troubleshooting.md").read_text().splitlines()
    assert len(ROWS) == sum(line.startswith("| `") for line in lines) >= 25, "every row is read"
    assert len({message for message, *_ in ROWS}) == len(ROWS)


@pytest.mark.parametrize("message, cause, remedy", ROWS, ids=lambda value: value[:50])
def test_the_message_is_one_of_ours(message, cause, remedy):
    assert any(message in text for text in texts()), "no string of the sources holds these words"
    assert len(message.replace("…", "")) >= 15 and cause and remedy


def test_the_terms_are_used():
    text = (ROOT / "docs/glossary.md").read_text()
    terms = re.findall(r"^\| (?!term|---)(.+?) \| .+ \|$", text, re.MULTILINE)
    assert len(terms) >= 40 and terms == sorted(terms, key=str.lower)
    elsewhere = "".join(p.read_text() for p in ROOT.glob("docs/*.md") if p.name != "glossary.md").lower()
    elsewhere += (ROOT / "README.md").read_text().lower()
    for term in terms:
        for word in re.sub(r" \(.*\)", "", term).split(", "):
            assert word.lower().rstrip("s") in " ".join(elsewhere.split()), word


def test_the_navigation_has_every_document():
    config = (ROOT / "zensical.toml").read_text()
    named = re.findall(r'{ "[^"]+" = "([^"#]+)(?:#([^"]+))?" }', config)
    for page, anchor in named:
        document = ROOT / page.replace(".html", ".md")
        assert document.is_file(), page
        if anchor:  # which the site's builder does not check
            headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
    assert {page for page, _ in named} >= {f"docs/{each.name}" for each in ROOT.glob("docs/*.md")}
