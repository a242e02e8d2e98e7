"""Check that training data shares no passage with an evaluation prompt.

    python tools/overlap.py runs/answers/shard-*.jsonl --clean runs/clean.jsonl --save runs/data-passages.safetensors
    python tools/overlap.py runs/data-passages.safetensors
    python tools/overlap.py data/smollm2-*.parquet

A passage is 8 words in a row, or a whole sentence or message that has fewer; a word is a run of letters, in lower case,
so that numbers and punctuation make no difference. A prompt of fewer words counts as one passage. Eight is the smallest
number at which ordinary text shares next to nothing by chance: see docs/data.md.

The first command reads rows, their user's messages and their answers, writes those that share nothing, and hashes of
all passages of these, 64 bits each (of the answers every sixteenth hash). The second one checks such hashes, so that
anybody can without the data. The third one checks what the drafters in models/ were trained on.

Exit codes: 0 nothing is shared, or --clean left it out; 1 a passage is shared; 2 wrong usage or bad input.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.common.command import CommandLine, first_line, run_command
from draftsmith.common.data_sections import LOCAL_FILES, Source
from draftsmith.common.files import check_file, replacing, write_text
from draftsmith.data import evaluation
from draftsmith.data.evaluation import EvaluationPrompt
from draftsmith.data.formats import Completion, Message, read_prompt, read_sample
from draftsmith.data.passages import WORDS, passages, short_passages, text_hash, words_of
from draftsmith.data.rows import Skipped, UnusableRow, rows, usable

ANSWERS_EVERY = 16  # the hashes of answers' passages that are kept are multiples of it
_TENSORS = ("user_messages", "user_passages", "answer_passages")
_FORMAT = {"format": "draftsmith passages", "version": 1, "words": WORDS, "answers_every": ANSWERS_EVERY}
_SHOWN = 20  # passages printed


def _passage(text: str, index: int) -> str:
    """The words of a passage, by its index in :func:`passages`."""
    words = words_of(text)
    windows = max(len(words) - WORDS + 1, 0)
    return " ".join(words[index : index + WORDS] if index < windows else short_passages(text)[index - windows])


@dataclass(frozen=True)
class Passages:
    """The passages of training data, as sorted distinct hashes, uint64.

    user_messages: [M] of the whole messages of the user and the system, exactly as they are.
    user_passages: [U] of the passages in them.
    answer_passages: [A] of the passages in answers and documents, only multiples of ``ANSWERS_EVERY``.
    """

    user_messages: np.ndarray
    user_passages: np.ndarray
    answer_passages: np.ndarray

    @classmethod
    def of(cls, conversations: Iterable[Sequence[Message]]) -> Passages:
        """The passages of conversations."""
        messages: set[int] = set()
        asked, answered = [np.array([], np.uint64)], [np.array([], np.uint64)]
        for message in itertools.chain.from_iterable(conversations):
            found = passages(message["content"])
            if message["role"] == "assistant":
                answered.append(found[found % np.uint64(ANSWERS_EVERY) == 0])
            else:
                messages.add(text_hash(message["content"].strip()))
                asked.append(found)
        return cls(
            np.array(sorted(messages), np.uint64), np.unique(np.concatenate(asked)), np.unique(np.concatenate(answered))
        )

    def save(self, path: Path) -> None:
        """Write a safetensors file, the same bytes for the same passages."""
        from safetensors.numpy import save

        content = save({name: getattr(self, name) for name in _TENSORS}, {"passages": json.dumps(_FORMAT)})
        with replacing(path) as temporary:
            temporary.write_bytes(content)

    @classmethod
    def load(cls, path: Path) -> Passages:
        """Read a file that :meth:`save` wrote.

        Raises:
            FileNotFoundError, ValueError: there is no such file, or it is another one.
        """
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file of passages")
        try:
            with safe_open(path, framework="numpy") as stored:
                found = json.loads((stored.metadata() or {})["passages"])
                tensors = {name: stored.get_tensor(name) for name in _TENSORS}
        except (SafetensorError, LookupError, ValueError) as error:
            raise ValueError(
                f"{path}: no file of passages ({first_line(error)}); tools/overlap.py --save writes one"
            ) from None
        if found != _FORMAT or any(t.dtype != np.uint64 or t.ndim != 1 for t in tensors.values()):
            raise ValueError(f"{path}: passages of another version ({found}); this one reads {_FORMAT}")
        return cls(**tensors)


class Overlap:
    """The passages of evaluation prompts.

    Attributes:
        prompts: all prompts, by their source.
    """

    def __init__(self, prompts: Iterable[EvaluationPrompt]) -> None:
        self.prompts = {prompt.source: prompt for prompt in prompts}
        self._source_of: dict[int, str] = {}  # passage → the first prompt with it
        for source, prompt in self.prompts.items():
            windows = max(len(words_of(prompt.text)) - WORDS + 1, 1)  # or the whole prompt; not its shorter sentences
            for passage in passages(prompt.text)[:windows].tolist():
                self._source_of.setdefault(passage, source)

    @classmethod
    def load(cls, names: Iterable[str] = evaluation.NAMES) -> Overlap:
        """All prompts of sets of data/evaluation.py.

        Raises:
            FileNotFoundError, ValueError: as :func:`draftsmith.data.evaluation.load`.
        """
        return cls(itertools.chain.from_iterable(map(evaluation.load, names)))

    def shared(self, text: str) -> str | None:
        """A passage that a text shares with a prompt, as ``"…" of human-eval/HumanEval/7``; None if it shares none."""
        for index, passage in enumerate(passages(text).tolist()):
            if passage in self._source_of:
                return f'"{_passage(text, index)}" of {self._source_of[passage]}'
        return None

    def shared_in(self, messages: Iterable[Mapping[str, str]]) -> str | None:
        """A passage that one of the messages shares, as :meth:`shared`, after the message's role."""
        for message in messages:
            if (found := self.shared(message["content"])) is not None:
                return f"{message['role']}: {found}"
        return None

    def shared_with(self, training: Passages) -> list[str]:
        """The sources of the prompts that share a passage, or a whole message of the user, with training data."""
        keys = np.array(list(self._source_of), np.uint64)
        hits = np.isin(keys, training.user_passages) | np.isin(keys, training.answer_passages)
        found = {self._source_of[passage] for passage in keys[hits].tolist()}
        whole = set(training.user_messages.tolist())
        for source, prompt in self.prompts.items():
            if whole & {text_hash(text.strip()) for text in (prompt.text, prompt.messages[0]["content"])}:
                found.add(source)
        return [source for source in self.prompts if source in found]


def _conversation(row: Any) -> tuple[Any, list[Message]]:
    """A row and its texts as messages: those of the user, and answers; a document counts as an answer.

    Raises:
        UnusableRow: it holds none.
    """
    try:
        content: Any = read_sample(row)
    except UnusableRow:
        content = read_prompt(row)
        texts = content if isinstance(content, tuple) else [content]
        return row, content if isinstance(content, list) else [{"role": "user", "content": text} for text in texts]
    if isinstance(content, Completion):
        return row, [{"role": "user", "content": content.prompt}, {"role": "assistant", "content": content.completion}]
    return row, [{"role": "assistant", "content": content}] if isinstance(content, str) else content


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSON lines, or as a compressed parquet file, a third of their size."""
    if path.suffix != ".parquet":
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    import datasets  # takes a second

    datasets.disable_progress_bars()
    with replacing(path) as temporary:
        datasets.Dataset.from_list(list(rows)).to_parquet(str(temporary))


def _check_rows(overlap: Overlap, files: Sequence[str], clean: Path | None, save: Path | None) -> bool:
    """Check the rows of files and write what is asked for; returns whether nothing shared is left."""
    kept: list[list[Message]] = []
    left: list[dict[str, Any]] = []
    count = shared = 0
    for file in files:
        skipped = Skipped()
        for place, (row, messages) in usable(rows(Source(source=file))[0], _conversation, skipped):
            count += 1
            found = overlap.shared_in(messages)
            if found is None:
                kept.append(messages)
                left.append(row)
                continue
            shared += 1
            if shared <= _SHOWN:
                print(f"{file}: {row.get('id', place)}: {found}")
        if skipped.count:
            print(f"{file}: {skipped}")
    if not count:
        raise ValueError(f"{', '.join(files)}: there is no row that could be checked")
    more = f" (the first {_SHOWN} are above)" if shared > _SHOWN else ""
    print(f"{shared:,} of {count:,} rows share a passage with one of {len(overlap.prompts):,} evaluation prompts{more}")
    if clean:
        _write_rows(clean, left)
        print(f"{clean}: the other {len(kept):,} rows")
    if save and (clean or not shared):
        Passages.of(kept).save(save)
        print(f"{save}: the passages of {len(kept):,} rows, {save.stat().st_size / 1e6:.2f} MB")
    return clean is not None or not shared


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"rows ({', '.join(LOCAL_FILES)}), or .safetensors")
    parser.add_argument(
        "--against", nargs="+", choices=evaluation.NAMES, default=evaluation.NAMES, help="default: all of them"
    )
    parser.add_argument(
        "--clean", type=Path, metavar="OUT.jsonl", help="write the rows that share nothing (or .parquet)"
    )
    parser.add_argument("--save", type=Path, metavar="OUT.safetensors", help="write the hashes of their passages")
    args = parser.parse_args()
    stored = [Path(file) for file in args.files if file.endswith(".safetensors")]
    files = [file for file in args.files if not file.endswith(".safetensors")]
    for file in files:
        if not file.endswith(LOCAL_FILES):
            raise ValueError(f"{file}: no file of rows; give one that ends in {', '.join(LOCAL_FILES)} or .safetensors")
    check_file("--clean", args.clean, ".jsonl", ".parquet")
    check_file("--save", args.save, ".safetensors")
    if args.clean and args.clean.resolve() in {Path(file).resolve() for file in files}:
        raise ValueError(f"--clean {args.clean}: is one of the files that are read; name another one")
    if not files and (args.clean or args.save):
        raise ValueError("--clean and --save need files of rows, which .safetensors do not hold")
    overlap = Overlap.load(args.against)
    good = True
    for path in stored:
        found = overlap.shared_with(Passages.load(path))
        print(
            f"{path}: {len(found):,} of {len(overlap.prompts):,} evaluation prompts share a passage with it"
            f"{': ' if found else ''}{', '.join(found[:_SHOWN])}"
        )
        good &= not found
    if files:
        good &= _check_rows(overlap, files, args.clean, args.save)
    if not good:
        print(
            "error: training data shares a passage with an evaluation prompt; --clean leaves such rows out",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
