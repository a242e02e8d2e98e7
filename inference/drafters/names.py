"""Drafters by name: a folder, a Hub id, ``ngram``, ``draft_model:PATH``, ``snapkv:K``, several joined by ``+``.
Light to import."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from draftsmith.common.command import nearest
from draftsmith.models.files.drafters import check_drafter_name
from draftsmith.models.files.locate import known_folder

NGRAM, DRAFT_MODEL = "ngram", "draft_model:"
TRIED = ("streamingllm", "snapkv")  # selectors that are planned with, if none are named
SELECTORS = ("streamingllm", "streamingllm16", "snapkv", "topk")  # of a compressed cache, :K entries
CHAIN = (1,) * 8  # the expansion of a draft model or a compressed cache, if none is given
_CHILDREN = r"[1-9]\d*(?:,[1-9]\d*)*"


def parts_of(name: str) -> list[str]:
    """The drafters that a name joins by ``+``; the name of an existing folder is one, even if it has a ``+``. A
    ValueError for an empty part, the same part twice, or ``none`` among several."""
    parts = [name] if Path(name).exists() else name.split("+")
    if not all(parts):
        raise ValueError(f"'{name}': a drafter is missing beside '+'; for example runs/demo+ngram")
    if len(parts) > 1 and "none" in parts:
        raise ValueError(f"'{name}': 'none' proposes nothing; leave it out")
    if len(set(parts)) < len(parts):
        raise ValueError(f"'{name}': the same drafter twice; leave one out")
    return parts


def has_folder(part: str) -> bool:
    """Whether one of :func:`parts_of` is a drafter folder or Hub id."""
    return part not in ("none", NGRAM) and not part.startswith((f"{NGRAM}:", DRAFT_MODEL)) and not is_compressed(part)


def is_compressed(part: str) -> bool:
    """Whether one of :func:`parts_of` is the target over a compressed cache."""
    return part.partition(":")[0] in SELECTORS and not Path(part).exists()


def ngram_lengths(name: str) -> dict[str, int]:
    """The lengths of matches that ``ngram`` or ``ngram:SHORTEST-LONGEST`` names, as arguments of ``NgramDrafter``; a
    ValueError if it is neither."""
    given = re.fullmatch(r"ngram(?::(\d+)-(\d+))?", name)
    if given is None:
        raise ValueError(f"'{name}': for matches of 2 to 10 tokens write ngram:2-10")
    return {} if given[1] is None else {"min_match": int(given[1]), "max_match": int(given[2])}


def draft_model_of(name: str) -> tuple[str, Sequence[int], tuple[str, int] | None]:
    """Path, expansion, and selector and entries of its cache, of ``draft_model:PATH``, ``draft_model:PATH@2,2,1`` or
    ``draft_model:PATH,snapkv:256@2,2,1``; a ValueError if it is none of these."""
    path, _, expansion = name.removeprefix(DRAFT_MODEL).partition("@")
    cache = re.fullmatch(rf"(.+),({'|'.join(SELECTORS)}):([1-9]\d*)", path)
    if not path or (expansion and not re.fullmatch(_CHILDREN, expansion)):
        raise ValueError(f"'{name}': write draft_model:PATH, or draft_model:PATH@2,2,1 for its children by depth")
    children = [int(k) for k in expansion.split(",")] if expansion else CHAIN
    return (cache[1], children, (cache[2], int(cache[3]))) if cache else (path, children, None)


def compressed_of(name: str) -> tuple[str, int, Sequence[int]]:
    """Selector, entries and expansion of ``snapkv:256`` or ``snapkv:256@2,1``; a ValueError if it is neither."""
    given = re.fullmatch(rf"(\w+):([1-9]\d*)(?:@({_CHILDREN}))?", name)
    if given is None:
        raise ValueError(
            f"'{name}': write {name.partition(':')[0]}:256 for a cache of 256 entries, or …:256@2,1 to give its "
            "children by depth, too"
        )
    return given[1], int(given[2]), [int(k) for k in given[3].split(",")] if given[3] else CHAIN


def folder_of(name: str) -> tuple[str, tuple[str, int] | None, Sequence[int] | None]:
    """Folder or Hub id, and where they are given selector and entries of the drafter's cache, and its expansion, of
    ``FOLDER``, ``FOLDER,streamingllm:256`` or ``FOLDER,streamingllm:256@1,1,1``; the name of an existing folder is
    one."""
    given = re.fullmatch(rf"(.+?)(?:,({'|'.join(SELECTORS)}):([1-9]\d*))?(?:@({_CHILDREN}))?", name)
    if given is None or Path(name).exists():
        return name, None, None
    cache = (given[2], int(given[3])) if given[2] else None
    return given[1], cache, [int(k) for k in given[4].split(",")] if given[4] else None


def check_name(part: str, target: str | None = None) -> None:
    """Raise a FileNotFoundError or ValueError, with a hint where it is misspelt, if one of :func:`parts_of` names no
    drafter, as far as can be said before torch is imported. ``target``: the one that is given for it."""
    if part.startswith(DRAFT_MODEL):
        known_folder(draft_model_of(part)[0])
    elif part.startswith(NGRAM) and not has_folder(part):
        ngram_lengths(part)
    elif is_compressed(part):
        compressed_of(part)
    elif has_folder(part):
        try:
            check_drafter_name(folder_of(part)[0], target)
        except FileNotFoundError as error:
            kind = part.partition(":")[0]
            meant = nearest(kind, ("none", NGRAM, DRAFT_MODEL.rstrip(":"), *SELECTORS))
            if not meant or "/" in kind or os.path.lexists(part):
                raise
            meant = f"{DRAFT_MODEL}PATH" if DRAFT_MODEL.startswith(meant) else meant
            raise FileNotFoundError(f"{error}; did you mean {meant}?") from None


def check_names(names: Sequence[str], target: str | None = None) -> None:
    """:func:`check_name` of all parts of drafters; also raise such an error if the target is missing or not named."""
    parts = [part for name in names for part in parts_of(name)]
    for part in parts:
        check_name(part, target)
    if target is not None:
        known_folder(target)
    elif not any(map(has_folder, parts)):
        what = "'none' names no target" if parts == ["none"] else f"'{names[0]}' has no target of its own"
        raise ValueError(f"{what}: pass --target")


def short_name(name: str) -> str:
    """A drafter's name without the path to it, for its report's folder and in tables."""
    paths = map(Path, parts_of(name))
    return "+".join(path.resolve().name if path.name in ("", "..") else path.name for path in paths)
