"""Prompts cut from modules of one split, as a JSONL file that inference/decode.py reads.

    python data/prompts.py stdlib --split test --count 48 --prompt-tokens 96 --tokenizer models/tiny-lm --out P.jsonl
    python data/prompts.py readmes --count 48 --prompt-tokens 96 --tokenizer models/tiny-lm --out P.jsonl    # English

Each prompt begins at the start of a line and has exactly --prompt-tokens tokens. The prompts are spread over all
modules of the split. Which modules these are depends on their names alone, so no training recipe has seen them.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from draftsmith.common.command import run_command
from draftsmith.common.files import write_text
from draftsmith.data import sources
from draftsmith.models.tokenizer import load_tokenizer

if TYPE_CHECKING:  # transformers takes seconds to import, and --help needs none of it
    from transformers import PreTrainedTokenizerBase

_CHARACTERS = 8  # tokenized per token of a window; code has three to five
_SPARSE = 2  # a gap of fewer characters per token counts as too small for another window


@dataclass(frozen=True)
class Prompt:
    text: str
    source: str  # the module's path, as in sources.Document
    tokens: list[int]  # exactly tokenizer(text)["input_ids"]


@dataclass
class _Module:
    """A module and the windows cut from it, which do not overlap."""

    path: str
    text: str
    lines: list[int]  # where the lines not yet tried begin, in random order
    windows: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of those already cut, sorted

    def next_line(self, width: int) -> int | None:
        """The next line start before a free gap of ``width`` characters or more."""
        while self.lines:
            start = self.lines.pop()
            if self.is_free(start, start + width):
                return start
        return None

    def is_free(self, start: int, end: int) -> bool:
        after = bisect.bisect(self.windows, (start, len(self.text)))
        clear_before = after == 0 or self.windows[after - 1][1] <= start
        return clear_before and end <= (self.windows[after][0] if after < len(self.windows) else len(self.text))


def _line_starts(text: str) -> list[int]:
    starts, position = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            starts.append(position)
        position += len(line)
    return starts


def prompts(
    source: str, split: sources.Split, count: int, prompt_tokens: int, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[Prompt]:
    """Cut ``count`` distinct windows of ``prompt_tokens`` tokens, the same for the same arguments and text.

    Every module gives one window before any gives a second one. A window whose text does not encode to the same tokens
    again (it ends inside a character, or its last token would merge with the next) is skipped. Special tokens that the
    tokenizer adds are counted.

    Raises:
        ValueError: the split has fewer than ``count`` windows.
    """
    rng = random.Random(seed)
    modules = [_Module(d.path, d.text, _line_starts(d.text)) for d in sources.documents(source, split)]
    rng.shuffle(modules)
    for module in modules:
        rng.shuffle(module.lines)
    length = prompt_tokens - len(tokenizer("")["input_ids"])
    if length < 1:
        raise ValueError(f"prompt_tokens={prompt_tokens} leaves no room beside the tokenizer's special tokens")

    result: list[Prompt] = []
    seen: set[str] = set()
    active = modules
    while active and len(result) < count:
        tried = [(m, start) for m in active if (start := m.next_line(_SPARSE * length)) is not None]
        if not tried:
            break
        active = [module for module, _ in tried]
        chunks = [module.text[start : start + _CHARACTERS * length] for module, start in tried]
        cut = tokenizer(chunks, add_special_tokens=False, verbose=False)["input_ids"]
        texts = [str(tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False)) for ids in cut]
        encoded = tokenizer(texts, verbose=False)["input_ids"]
        for (module, start), chunk, text, ids in zip(tried, chunks, texts, encoded, strict=True):
            window = (start, start + len(text))
            whole = len(ids) == prompt_tokens and chunk.startswith(text)
            if whole and text not in seen and module.is_free(*window) and len(result) < count:
                bisect.insort(module.windows, window)
                seen.add(text)
                result.append(Prompt(text, module.path, list(ids)))
    if len(result) < count:
        raise ValueError(
            f"source '{source}' split '{split}' gives only {len(result)} prompts of {prompt_tokens} tokens, from "
            f"{len(modules)} modules; {count} are needed. Cut fewer or shorter ones"
        )
    return result


def write(path: Path, cut: list[Prompt]) -> None:
    """Write one ``{"prompt", "source"}`` per line, atomically."""
    make_parent(path)
    lines = (json.dumps({"prompt": p.text, "source": p.source}, ensure_ascii=False) for p in cut)
    write_text(path, "".join(line + "\n" for line in lines))


def make_parent(path: Path) -> None:
    """Make the folder of a file that will be written.

    Raises:
        ValueError: it cannot be made, or ``path`` is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{path}: this is a folder; name the file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def positive(text: str) -> int:
    """A command-line argument that is a whole number, at least 1."""
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text)):
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a number from 1 on (or it has too many digits)")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="'stdlib', 'package:NAME', or 'readmes': installed packages' descriptions")
    parser.add_argument("--split", choices=get_args(sources.Split), default="test", help="default: test")
    parser.add_argument("--count", type=positive, default=48, help="how many prompts (default 48)")
    parser.add_argument("--prompt-tokens", type=positive, default=96, help="tokens in each (default 96)")
    parser.add_argument("--tokenizer", required=True, help="the target: a folder or a Hub id")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    args = parser.parse_args()
    if args.source not in ("stdlib", "readmes") and not args.source.startswith("package:"):
        parser.error(f"source '{args.source}' is none of 'stdlib', 'readmes' and 'package:NAME'")
    make_parent(args.out)
    cut = prompts(
        args.source, args.split, args.count, args.prompt_tokens, load_tokenizer(args.tokenizer), args.seed
    )  # fmt: skip
    write(args.out, cut)
    print(f"{args.out}: {len(cut)} prompts of {args.prompt_tokens} tokens from {len({p.source for p in cut})} modules")


if __name__ == "__main__":
    run_command(main)
