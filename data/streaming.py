"""Rows from a source too large to be kept: read, encoded and packed a window at a time, while training goes on.

A window is ``WINDOW`` consecutive samples; its rows are shuffled among themselves. Row number → row is a pure function
of source and seed, so that a resumed run sees what the uninterrupted one would have seen; how many rows each window
gave is noted in the run's folder, so that it need not be read from the beginning again.
"""

import bisect
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.common.files import json_object, write_text
from draftsmith.common.sections import Data, Source
from draftsmith.data.packing import Rows
from draftsmith.data.rows import Skipped, rows
from draftsmith.data.tokenized import check, encoded, read_template

WINDOW = 1000  # samples that are in memory at a time, and shuffled among themselves


class StreamedRows:
    """What :class:`draftsmith.data.packing.Rows` is, without an end: behind its last sample a source begins again.

    Attributes:
        skipped: rows of the first window that cannot be used.

    Raises:
        FileNotFoundError, ValueError: the source cannot be read, is empty, or too many rows of a window cannot be used
            or have no label.
    """

    def __init__(
        self, source: Source, data: Data, tokenizer: PreTrainedTokenizerBase, seed: int, note: Path, *, keep: bool
    ) -> None:  # fmt: skip
        self.source, self.data, self.tokenizer, self.seed, self.note = source, data, tokenizer, seed, note
        self.keep = keep  # the note: one process writes it, all read it
        self.length = data.max_length
        self.template = read_template(data.template)
        asked: dict[str, Any] = {
            "source": source.model_dump(exclude={"weight"}), "max_length": data.max_length, "packing": data.packing,
            "seed": seed,
        }  # fmt: skip
        self.asked = asked
        self.ends: list[int] = []  # rows up to and with each window, over all epochs
        self.per_epoch: int | None = None  # windows; known once the source has ended
        if note.exists() and (kept := json_object(note)).get("asked") == asked:
            self.ends, self.per_epoch = kept["ends"], kept["per_epoch"]
        self._window: tuple[int, Rows | None, np.ndarray] | None = None
        self._reading: tuple[int, Any] | None = None  # the window that the open iterator comes to next
        self.skipped = self._load(0)

    def batch(self, numbers: Sequence[int], length: int | None = None) -> dict[str, torch.Tensor]:
        """As :meth:`Rows.batch`; ``numbers`` count from the beginning of the run."""
        parts = []
        for number in numbers:
            while not self.ends or number >= self.ends[-1]:
                self._load(len(self.ends))
            window = bisect.bisect_right(self.ends, number)
            if self._window is None or self._window[0] != window:
                self._load(window)
            assert self._window is not None
            _, held, order = self._window
            assert held is not None  # a window without a row holds no number
            first = self.ends[window - 1] if window else 0
            parts.append(held.batch([int(order[number - first])], length or self.length))
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _read(self, window: int) -> list[tuple[str, Any]]:
        """The rows of a window of the first epoch; fewer, or none, at the source's end."""
        if self._reading is None or self._reading[0] != window:
            self._reading = window, rows(self.source, skip=window * WINDOW)[0]
        limit = WINDOW
        if self.source.limit is not None:
            limit = max(0, min(WINDOW, self.source.limit - window * WINDOW))
        found = list(itertools.islice(self._reading[1], limit))
        self._reading = window + 1, self._reading[1]
        return found

    def _load(self, window: int) -> Skipped:
        """Make a window the one in memory."""
        found: list[tuple[str, Any]] = []
        if self.per_epoch is None:
            found = self._read(window)
            if not found:
                if window == 0:
                    raise ValueError(f"data source '{self.source.source}' (split {self.source.split}) is empty")
                self.per_epoch = window
        if self.per_epoch is not None:
            found = self._read(window % self.per_epoch)
        place = window if self.per_epoch is None else window % self.per_epoch
        samples = encoded(found, self.source, self.data, self.tokenizer, self.template)
        check(samples, self.source, self.data, of=WINDOW if place else 0)  # the last window may be a short one
        made = Rows(samples, self.length, share=self.data.packing) if len(samples) else None
        order = np.random.default_rng([self.seed, window]).permutation(len(made) if made else 0)
        self._window = window, made, order
        if window == len(self.ends):
            self.ends.append((self.ends[-1] if self.ends else 0) + len(order))
            if self.keep:
                kept = {"asked": self.asked, "ends": self.ends, "per_epoch": self.per_epoch}
                self.note.parent.mkdir(parents=True, exist_ok=True)
                write_text(self.note, json.dumps(kept))
        return samples.skipped
