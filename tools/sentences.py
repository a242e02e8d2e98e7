"""Length of the sentences in the documents: words per sentence on average, and the longest ones.

``python tools/sentences.py`` prints one line per document, the worst first, then every sentence above ``LONGEST`` words. It fails
if there is one, or if a document's average is above ``MEAN``. Only prose counts: code blocks, tables, headings, HTML and the
targets of links are left out. A list item ends a sentence, and ``code`` counts as one word.
"""

import re
import sys
from pathlib import Path

MEAN, LONGEST = 20, 40  # words per sentence
ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "RESULTS.md", "benchmarks/AWAITING.md", "docs/*.md")
ABBREVIATIONS = "".join(rf"(?<!\b{each})" for each in (r"e\.g", r"i\.e", r"i\.i\.d", "cf", "vs", "etc", "approx", "al", "Fig", "Eq"))
END = re.compile(rf"{ABBREVIATIONS}\.[*_]*\s+|{ABBREVIATIONS}[.!?][\"')\]*_]*\s+(?=[\"'(\[*_]*[A-ZÀ-Þ\d])")


def paragraphs(text: str) -> list[str]:
    """The prose of a Markdown document: its paragraphs and list items, without markup; `code` becomes one word."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2[ `~]*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[str] = []
    fresh = True  # whether the next line begins a paragraph
    for line in text.splitlines():
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+", line)
        code = fresh and re.match(r"(?: {4}|\t)", line) and not item and not (found and found[-1].startswith("\0"))
        if not line.strip() or code or re.match(r"\s*(\||#+ |-{3,}\s*$)", line):
            fresh = True
            continue
        if fresh or item:
            found.append("")
        found[-1] += line[item.end() if item else 0 :].strip() + " "
        fresh = False
    return [plain(each) for each in found]


def plain(text: str) -> str:
    """A paragraph without code, images, the targets of links and HTML tags."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "Code", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"</?[a-zA-Z][^>]*>", "", text).strip()


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown document."""
    return [each for part in paragraphs(text) for each in END.sub(r"\g<0>\n", part).split("\n") if words(each)]


def words(sentence: str) -> int:
    """How many words: what stands between blanks and has a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def main() -> int:
    documents = [path for pattern in DOCUMENTS for path in sorted(ROOT.glob(pattern))]
    found = {path.relative_to(ROOT): sentences(path.read_text()) for path in documents}
    means = {path: sum(map(words, each)) / len(each) for path, each in found.items() if each}
    failed = False
    for path in sorted(means, key=lambda path: -means[path]):
        longest = max(map(words, found[path]))
        failed |= means[path] > MEAN or longest > LONGEST
        print(f"{means[path]:5.1f} words per sentence, longest {longest:3}  {path}")
    for path, each in found.items():
        for sentence in each:
            if words(sentence) > LONGEST:
                print(f"{path}: {words(sentence)} words: {sentence.strip()}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
