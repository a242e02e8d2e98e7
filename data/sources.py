"""Text that every Python installation has: the standard library and installed packages, split by module path.

A file's split depends only on the hash of its module path, so it is the same on every machine and Python version.
Training files that share many lines with a held-out file (vendored or renamed copies) are dropped.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
import sysconfig
from collections import Counter, defaultdict
from dataclasses import dataclass
from email.message import Message
from functools import cache
from pathlib import Path
from typing import Literal, cast

Split = Literal["train", "validation", "test"]

# Of "encodings", the files are tables of bytes.
_SKIPPED = set("site-packages dist-packages test tests idle_test __pycache__ _vendor vendor encodings".split())
# Long texts: held-out documents of these sources, one after the other, until a book has so many characters, above 8k
# tokens. Of packages that every installation has.
_BOOKS = {"books": ("stdlib", "package:sympy", "package:torch"), "manuals": ("readmes",)}
_BOOK = 50_000
_SHARED_LINES = 0.3  # a training file that shares this part of its lines with one held-out file counts as its copy


@dataclass(frozen=True)
class Document:
    """One module: ``path`` is relative to its source and prefixed by it (``stdlib/json/decoder.py``)."""

    path: str
    text: str


def split_of(path: str) -> Split:
    """4 % of the module paths are for validation, 4 % for tests, the rest for training."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100
    return "validation" if bucket < 4 else "test" if bucket < 8 else "train"


def root_of(source: str) -> Path:
    """The folder of a source's modules."""
    if source == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    name = source.removeprefix("package:")
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise ValueError(f"source '{source}': after 'package:' comes the name it is imported by")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError) as error:  # a broken path hook, or a module without a spec
        raise FileNotFoundError(f"source '{source}': package '{name}' cannot be found ({error})") from None
    if spec is None:
        raise FileNotFoundError(f"source '{source}': package '{name}' is not installed; pip install it or leave it out")
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    if not places:
        raise FileNotFoundError(f"source '{source}': '{name}' is a single module, not a package; leave it out")
    return places[0]  # a namespace package may have several; the first one gives the same text each time


def licence(source: str) -> str:
    """The licence that a source's metadata states, with its version."""
    if source == "stdlib":
        return "PSF-2.0"
    name = source.removeprefix("package:")
    for distribution in importlib.metadata.packages_distributions().get(name, []):
        meta = cast(Message, importlib.metadata.metadata(distribution))
        classifiers = [c.rsplit(" :: ", 1)[-1] for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
        text = meta.get("License-Expression") or (classifiers[0] if classifiers else meta.get("License"))
        return f"{distribution} {meta['Version']}: {(text or 'see its metadata').splitlines()[0]}"
    return "unknown"


@cache
def _all_documents(source: str) -> tuple[Document, ...]:
    """All modules of a source, sorted by path."""
    root = root_of(source)
    documents: list[Document] = []
    try:
        paths = sorted(root.rglob("*.py"))
    except OSError as error:
        raise ValueError(f"source '{source}': {error.filename} cannot be read ({error.strerror})") from None
    for path in paths:
        relative = path.relative_to(root)
        if _SKIPPED.intersection(relative.parts[:-1]):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            relative.as_posix().encode()
        except (UnicodeError, OSError):
            continue  # a few library files are in other encodings on purpose
        if len(text) >= 200:  # not an empty __init__
            prefix = source.removeprefix("package:")
            documents.append(Document(f"{prefix}/{relative.as_posix()}", text))
    return tuple(documents)


def _readmes() -> list[Document]:
    """The descriptions of the installed packages: English prose, on which nothing is trained."""
    texts: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        meta = cast(Message, distribution.metadata)
        text = str(meta.get_payload() or meta.get("Description") or "")
        if len(text) >= 2000 and meta.get("Name"):
            texts[f"readmes/{meta['Name'].lower()}"] = text
    return [Document(path, text) for path, text in sorted(texts.items())]


def _books(name: str) -> list[Document]:
    """The long texts of :data:`_BOOKS`; what is left at the end belongs to the last one."""
    texts = [""]
    for document in (document for source in _BOOKS[name] for document in documents(source, "test")):
        if len(texts[-1]) >= _BOOK:
            texts.append("")
        texts[-1] += document.text.strip("\n") + "\n\n"
    return [Document(f"{name}/{number}", text) for number, text in enumerate(texts)]


def _distinctive_lines(text: str) -> list[int]:
    """Hashes of the lines that are long enough to distinguish files."""
    return [hash(line) for line in {raw.strip() for raw in text.splitlines()} if len(line) >= 20]


@cache
def _held_out_lines() -> dict[int, list[int]]:
    """Line hash → indices of the held-out stdlib files with this line."""
    index: dict[int, list[int]] = defaultdict(list)
    held_out = [d for d in _all_documents("stdlib") if split_of(d.path) != "train"]
    for number, document in enumerate(held_out):
        for line in _distinctive_lines(document.text):
            index[line].append(number)
    return dict(index)


def _is_copy(document: Document) -> bool:
    """Whether a module shares many lines with a held-out one."""
    lines = _distinctive_lines(document.text)
    index = _held_out_lines()
    shared: Counter[int] = Counter(n for line in lines for n in index.get(line, ()))
    return bool(shared) and max(shared.values()) > max(5, _SHARED_LINES * len(lines))


@cache
def documents(source: str, split: Split = "train") -> tuple[Document, ...]:
    """The modules of a source (``stdlib`` or ``package:NAME``) in a split, sorted by path. Others have only a test
    split: ``readmes``, the installed packages' descriptions; ``manuals``, these joined to long texts; ``books``, so
    joined, the held-out modules of the standard library and of large packages.
    Raises FileNotFoundError: the package is not installed. ValueError: the split is empty."""
    if source == "readmes" or source in _BOOKS:
        chosen = [] if split != "test" else _readmes() if source == "readmes" else _books(source)
    else:
        chosen = [d for d in _all_documents(source) if split_of(d.path) == split]
    if split == "train":
        chosen = [d for d in chosen if not _is_copy(d)]
    if not chosen:
        raise ValueError(f"source '{source}' has no text in split '{split}'; use another split or a larger source")
    return tuple(chosen)


_OPENINGS = ("Write a Python {kind} `{name}`. {doc}", "{doc} Call it `{name}`.", "Show me the {kind} `{name}`. {doc}")


def dialogues(source: str, split: Split = "train") -> list[list[dict[str, str]]]:
    """Chats made from the code: the first sentence of a docstring is the question, the function or class the answer."""
    chats: list[list[dict[str, str]]] = []
    for document in documents(source, split):
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue
        lines = document.text.split("\n")  # as ast counts them: a form feed begins no line
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                continue
            doc = ast.get_docstring(node)
            # By whole lines: ast.get_source_segment splits the module again for every node.
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if not doc or not 80 <= len(code) <= 1500:
                continue
            task = re.split(r"(?<=[.!?])\s|\n\n", doc, maxsplit=1)[0].replace("\n", " ").strip()
            opening = _OPENINGS[len(code) % len(_OPENINGS)]
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            question = opening.format(kind=kind, name=node.name, doc=task).strip()
            indent = " " * node.col_offset
            answer = "\n".join(line.removeprefix(indent) for line in code.splitlines())
            chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return chats


def fingerprint(source: str, split: Split) -> str:
    """SHA-256 over the paths and texts of a split: what a model was trained on."""
    digest = hashlib.sha256()
    for document in documents(source, split):
        digest.update(f"{split}\0{document.path}\0".encode())
        digest.update(document.text.encode())
    return digest.hexdigest()
