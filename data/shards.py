"""Finished conversations in append-only files: a kill at any moment loses at most the line being written.

shard-00000.jsonl, …   {"id", "messages", "finish_reason": [one per answer], "source", "token_ids": [one per answer, if
                       all are known: the ids of its prompt and its own, with the log-probabilities of these where
                       the recipe asks for them]}, LINES of them in each
failures.jsonl         {"id", "source", "reason", "detail"}: prompts without an answer
failures-1.jsonl, …    the same of the further processes of a launch, until the next command or the end
manifest.json          all settings that the answers depend on, and the counts
"""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.common.files import append, json_object, parse_json, write_text
from draftsmith.data.formats import Message, TokenIds
from draftsmith.data.seeds import WRITTEN

LINES = 1000  # of a shard
_OWN = re.compile(r"shard-\d{5}\.jsonl|failures-\d+\.jsonl|(failures\.jsonl|manifest\.json|recipe\.yaml)(\.tmp)?")


def remove_own(folder: Path) -> None:
    """Delete the files that a distillation wrote into its folder, nothing else."""
    for path in list(folder.iterdir()):
        if _OWN.fullmatch(path.name):
            path.unlink()


def open_shards(
    folder: Path, decides: Mapping[str, Any], restart: bool, older: Mapping[str, Any] | None = None, processes: int = 1
) -> "Shards":
    """Open a run's folder with the conversations that are in it already.
    ``decides``: all settings that the answers depend on, by the recipe's fields.
    ``restart``: delete the conversations.
    ``older``: what earlier versions wrote for some of the settings.
    ``processes``: that write into the folder; this is the first of them.
    Raises ValueError: the folder holds another kind of run, or answers to another recipe."""
    manifest = folder / "manifest.json"
    if not manifest.exists():
        if (folder / "recipe.yaml").exists() or any(folder.glob("shard-*.jsonl")):
            raise ValueError(f"{folder}: holds another run, or a distillation without its manifest; set run.name")
        return Shards(folder, 0, processes)
    try:
        before = json_object(manifest)["decides"]
        if not isinstance(before, dict):
            raise TypeError
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{manifest}: damaged, or not a distillation's; set run.name") from None
    # Earlier versions wrote all fields of the target.
    names = [name for name in {**before, **decides} if name in decides or not name.startswith("target.")]
    changed = [name for name in names if before.get(name) != decides.get(name)]
    changed = [name for name in changed if name not in (older or {}) or before.get(name) != (older or {})[name]]
    if restart:
        remove_own(folder)
    elif changed:
        values = (json.dumps(d.get(changed[0]), ensure_ascii=False)[:100] for d in (before, decides))
        raise ValueError(
            f"{folder}: its answers belong to another recipe ({changed[0]}: {' → '.join(values)}); set run.name, or "
            "pass --restart to begin anew and delete them"
        )
    return Shards(folder, 0, processes)


class Shards:
    """The conversations of a folder, by the id of their seed.

    Opening it removes an incomplete last line, which a kill left; its prompt counts as not answered. Nobody may write
    at that time. Afterwards several processes may, each into shards and failures of its own; each knows the others'
    conversations as they were when it opened the folder.

    Args:
        rank: this process's number among them.
        processes: how many there are.

    Attributes:
        answers: id → number of answers of each finished conversation.
        finish_reasons: finish reason → number of answers.
        failures: id → the line of failures.jsonl of each prompt that failed and has no conversation.
        first_turns: the user's first turns that the model wrote itself (conversations of the source ``target``).

    Raises:
        ValueError: a complete line is damaged.
    """

    def __init__(self, folder: Path, rank: int = 0, processes: int = 1) -> None:
        self.folder = folder
        self._failures = folder / (f"failures-{rank}.jsonl" if rank else "failures.jsonl")
        self.answers: dict[str, int] = {}
        self.finish_reasons: Counter[str] = Counter()
        self.failures: dict[str, dict[str, str]] = {}
        self.first_turns: list[str] = []
        found: dict[int, int] = {}  # number of a shard → its lines
        for path in sorted(folder.glob("shard-" + "[0-9]" * 5 + ".jsonl")):
            lines = _whole_lines(path)
            found[int(path.stem[-5:])] = len(lines)
            for line in lines:
                self._count(line["id"], line["finish_reason"])
                if line.get("source") == WRITTEN:
                    self.first_turns.append(line["messages"][0]["content"])
        for path in (folder / "failures.jsonl", *self._others_failures()):
            for line in _whole_lines(path):
                if line["id"] not in self.answers:
                    self.failures[line["id"]] = line
        self._room = self._places(found, rank, processes)

    def _others_failures(self) -> list[Path]:
        return sorted(self.folder.glob("failures-*.jsonl"))

    def _places(self, found: Mapping[int, int], rank: int, processes: int) -> Iterator[Path]:
        """The shard of each further line. Of the shards that are not full, and of the new ones, each process has every
        ``processes``-th."""
        begun = [number for number, lines in found.items() if lines < LINES][rank::processes]
        for number in itertools.chain(begun, itertools.count(max(found, default=-1) + 1 + rank, processes)):
            path = self.folder / f"shard-{number:05}.jsonl"
            yield from itertools.repeat(path, LINES - found.get(number, 0))

    def _count(self, seed: str, finish_reasons: Sequence[str]) -> None:
        self.answers[seed] = len(finish_reasons)
        self.finish_reasons.update(finish_reasons)

    def add(
        self,
        seed: str,
        messages: Sequence[Message],
        finish_reasons: Sequence[str],
        source: str,
        token_ids: Sequence[TokenIds | None] = (),
    ) -> None:
        """Append a finished conversation; it is on the disk when this returns."""
        line = {"id": seed, "messages": messages, "finish_reason": finish_reasons, "source": source}
        line |= {"token_ids": token_ids} if token_ids and all(token_ids) else {}
        _append(next(self._room), line)
        self._count(seed, finish_reasons)
        self.failures.pop(seed, None)

    def fail(self, seed: str, source: str, reason: str, detail: str) -> None:
        """Append a failed prompt to this process's failures, where the last line of an id counts."""
        self.failures[seed] = {"id": seed, "source": source, "reason": reason, "detail": detail}
        _append(self._failures, self.failures[seed])

    def counts(self, wanted: Mapping[str, int]) -> dict[str, Any]:
        """Counts of done, failed and unanswered prompts, given ``wanted``: id → number of answers asked for."""
        done = [seed for seed in wanted if seed in self.answers]
        failed = Counter(line["reason"] for seed, line in self.failures.items() if seed in wanted)
        return {
            "prompts": len(wanted),
            "done": len(done),
            "failed": dict(failed.most_common()),
            "not_asked": len(wanted) - len(done) - sum(failed.values()),
            "ended_early": sum(self.answers[seed] < wanted[seed] for seed in done),  # of those done
        }

    def tidy(self) -> None:
        """Rewrite failures.jsonl atomically, with one line for each prompt that still has no answer, of all processes.
        None of them may write at that time."""
        path = self.folder / "failures.jsonl"
        if self.failures:
            lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in self.failures.values())
            write_text(path, "".join(lines))
        else:
            path.unlink(missing_ok=True)
        for others in self._others_failures():
            others.unlink()


def _append(path: Path, line: dict[str, Any]) -> None:
    append(path, json.dumps(line, ensure_ascii=False), sync=True)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(content[:end].split(b"\n")[:-1], 1):
        try:
            line = parse_json(text, "")
            if not isinstance(line["id"], str) or not ("reason" in line or isinstance(line["finish_reason"], list)):
                raise TypeError
            begun = line.get("source") == WRITTEN and "reason" not in line  # its first turn is read
            if begun and not isinstance(line["messages"][0]["content"], str):
                raise TypeError
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{path}:{number}: damaged; delete the line (its prompt is answered again), or pass --restart"
            ) from None
        lines.append(line)
    return lines
