"""Print how long the sentences of the documents are, and fail where they are too long.

    python tools/sentences.py       # README.md, CONTRIBUTING.md, RESULTS.md, benchmarks/AWAITING.md and docs/*.md

One line per document, the worst first: mean words per sentence, and the longest sentence. Then every sentence above 40
words. Exit code 1 if there is one, or if a document's mean is above 20. Only prose counts: code blocks, tables,
headings, HTML and the targets of links are left out. A list item ends a sentence, and `code` counts as one word.
"""

import re
from pathlib import Path

from draftsmith.common.command import CommandLine, run_command

MEAN, LONGEST = 20, 40  # words per sentence
ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "RESULTS.md", "benchmarks/AWAITING.md", "docs/*.md")
SHORT = (r"e\.g", r"i\.e", r"i\.i\.d", "cf", "vs", "etc", "approx", "al", "Fig", "Eq")  # a dot after these ends nothing
FULL = "".join(rf"(?<!\b{each})" for each in SHORT) + r"\."
END = re.compile(rf"{FULL}[*_]*\s+|(?:{FULL}|[!?])[\"')\]*_]*\s+(?=[\"'(\[*_]*[A-ZÀ-Þ\d])")


def paragraphs(text: str) -> list[str]:
    """The paragraphs and list items of a Markdown document, as plain text."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2[ `~]*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[str] = []
    begins = True  # whether the next line begins a paragraph
    for line in text.splitlines():
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+", line)
        if not line.strip() or re.match(r"\s*\||#+ |-{3,}\s*$", line) or (begins and not item and line[:4] == "    "):
            begins = True
            continue
        if begins or item:
            found.append("")
        found[-1] += line[item.end() if item else 0 :].strip() + " "
        begins = False
    return [plain(each) for each in found]


def plain(text: str) -> str:
    """A paragraph without code, images, targets of links and HTML tags."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "Code", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"</?[a-zA-Z][^>]*>", "", text).strip()


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown document."""
    return [each for part in paragraphs(text) for each in END.sub(r"\g<0>\n", part).split("\n") if words(each)]


def words(sentence: str) -> int:
    """The number of words: of the parts between blanks that have a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def main() -> None:
    CommandLine(__doc__).parse_args()
    documents = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    found = {path.relative_to(ROOT): sentences(path.read_text("utf-8")) for path in documents}
    means = {path: sum(map(words, each)) / len(each) for path, each in found.items() if each}
    for path in sorted(means, key=lambda path: -means[path]):
        print(f"{means[path]:5.1f} words per sentence, longest {max(map(words, found[path])):3}  {path}")
    long = [(path, each.strip()) for path in found for each in found[path] if words(each) > LONGEST]
    for path, sentence in long:
        print(f"{path}: {words(sentence)} words: {sentence}")
    if long or max(means.values()) > MEAN:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
