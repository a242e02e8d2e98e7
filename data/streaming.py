"""Rows of a source too large to be stored: read, encoded and packed one window at a time, during training.

A window is the samples of ``WINDOW`` consecutive rows of the source. The rows that it trains on, packed or not, are
shuffled among themselves. Row number → row is a pure function of source and seed: a resumed run sees the same rows as
an uninterrupted one. The number of rows of each window is kept in the run's folder, so that a resumed run need not read
the source from the beginning.
"""

import bisect
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.common.data_sections import Data, Source
from draftsmith.common.files import json_object, write_text
from draftsmith.data.packing import Rows
from draftsmith.data.rows import Skipped, rows
from draftsmith.data.tokenized import check, encoded, template_for, tokenizer_facts

WINDOW = 1000  # of the source's rows, whose samples are in memory at a time and shuffled among themselves


class StreamedRows:
    """Like :class:`draftsmith.data.packing.Rows`, but endless: after its last sample a source begins again.

    Attributes:
        skipped: rows of the first window that cannot be used.

    Raises:
        FileNotFoundError, ValueError: the source cannot be read, is empty, or too many rows of a window cannot be used
            or have no label.
    """

    def __init__(
        self, source: Source, data: Data, tokenizer: PreTrainedTokenizerBase, seed: int, note: Path, *, keep: bool
    ) -> None:
        self.source, self.data, self.tokenizer, self.seed, self.note = source, data, tokenizer, seed, note
        self.keep = keep  # whether this process writes the note; all read it
        self.length = data.max_length
        self.template = template_for(data, tokenizer)
        first, known = rows(source, skip=0)
        facts = tokenizer_facts(tokenizer, self.template)
        today = facts.pop("today")
        self.request: dict[str, Any] = {
            "source": source.model_dump(exclude={"weight"}),
            "max_length": data.max_length,
            "packing": data.packing,
            "seed": seed,
            "reasoning": data.reasoning,
            "today": today,
            "of": hashlib.sha256(json.dumps([known, facts], sort_keys=True).encode()).hexdigest(),  # files: their sizes
        }
        self.ends: list[int] = []  # number of rows up to the end of each window, over all epochs
        self.per_epoch: int | None = None  # number of windows; known once the source has ended
        asked = self._read_note().get("asked")
        if today and asked != self.request and isinstance(asked, dict) and {**asked, "today": today} == self.request:
            raise ValueError(
                f"data source '{source.source}': its chats were streamed with another date, which the chat template "
                "prints; it cannot go on: begin a new run, with the date pinned by data.template_arguments"
            )
        # The open iterator, its next window, and the process that opened it: a forked one would move the other's file.
        self._reading: tuple[Any, int, int] = first, 0, os.getpid()
        self.skipped = self._load(0)

    def batch(self, numbers: Sequence[int], length: int | None = None) -> dict[str, torch.Tensor]:
        """Like :meth:`Rows.batch`; ``numbers`` count from the beginning of the run."""
        parts = []
        for number in numbers:
            if not self.ends or number >= self.ends[-1]:
                self._read_note()
            while not self.ends or number >= self.ends[-1]:
                self._load(len(self.ends))
            window = bisect.bisect_right(self.ends, number)
            if self._window[0] != window:
                self._load(window)
            _, packed, order = self._window
            assert packed is not None  # a window without rows has no row numbers
            first = self.ends[window - 1] if window else 0
            parts.append(packed.batch([int(order[number - first])], length or self.length))
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _read_note(self) -> dict[str, Any]:
        """What the note holds. The windows' ends, which an earlier run or a worker of this one found, are taken."""
        kept = json_object(self.note) if self.note.exists() else {}
        if kept.get("asked") == self.request and len(kept["ends"]) >= len(self.ends):
            self.ends, self.per_epoch = kept["ends"], kept["per_epoch"]
        return kept

    def _read(self, window: int) -> list[tuple[str, Any]]:
        """Read a window of the first epoch; it is shorter, or empty, at the source's end."""
        if self._reading[1:] != (window, os.getpid()):
            self._reading = rows(self.source, skip=window * WINDOW)[0], window, os.getpid()
        limit = WINDOW
        if self.source.limit is not None:
            limit = max(0, min(WINDOW, self.source.limit - window * WINDOW))
        opened, _, process = self._reading
        window_rows = list(itertools.islice(opened, limit))
        self._reading = opened, window + 1, process
        return window_rows

    def _load(self, window: int) -> Skipped:
        """Load a window into memory."""
        window_rows: list[tuple[str, Any]] = []
        if self.per_epoch is None:
            window_rows = self._read(window)
            if not window_rows:
                if window == 0:
                    raise ValueError(f"data source '{self.source.label}' is empty")
                self.per_epoch = window
        if self.per_epoch is not None:
            window_rows = self._read(window % self.per_epoch)
        place = window if self.per_epoch is None else window % self.per_epoch
        samples = encoded(window_rows, self.source, self.data, self.tokenizer, self.template)
        check(samples, self.source, self.data, of=WINDOW if place else 0)  # the last window may be a short one
        packed = Rows(samples, self.length, share=self.data.packing) if len(samples) else None
        order = np.random.default_rng([self.seed, window]).permutation(len(packed) if packed else 0)
        self._window = window, packed, order
        if window == len(self.ends):
            self.ends.append((self.ends[-1] if self.ends else 0) + len(order))
            if self.keep:
                kept = {"asked": self.request, "ends": self.ends, "per_epoch": self.per_epoch}
                self.note.parent.mkdir(parents=True, exist_ok=True)
                write_text(self.note, json.dumps(kept))
        return samples.skipped
