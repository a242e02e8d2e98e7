"""Tables in documents, between their markers. Light to import."""

from collections.abc import Sequence


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (heads, ["---"] * len(heads), *([text.replace("|", "\\|") for text in row] for row in rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def between(text: str, where: str, begins: str, ends: str) -> tuple[str, str, str]:
    """A document before, between and after two markers.

    Raises:
        ValueError: it has none.
    """
    before, begin, rest = text.partition(f"{begins}\n")
    inside, end, after = rest.partition(f"\n{ends}")
    if not begin or not end:
        raise ValueError(f"{where}: has no lines {begins} and {ends}; write them where the table is to stand")
    return before + begin, inside, end + after
