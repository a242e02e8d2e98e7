"""Cut token streams into rows of one length, and pack samples into rows.

Shape letters: S rows, T tokens in a row.
"""

import bisect
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draftsmith.data.rows import Skipped


def pack(documents: Sequence[Sequence[int]], where: str, length: int, separator: int) -> torch.Tensor:
    """Join documents with ``separator`` and cut the stream into rows; an incomplete last row is dropped.
    Returns ``[S, length]`` int32 (large enough for vocabularies, half the memory of int64).
    Raises ValueError, which names ``where`` they are from: the documents do not fill one row."""
    stream: list[int] = []
    for document in documents:
        stream.extend(document)
        stream.append(separator)
    rows = len(stream) // length
    if rows == 0:
        raise ValueError(
            f"data source '{where}': {len(stream):,} tokens do not fill one row of {length:,}; leave it out, or lower "
            "max_length"
        )
    return torch.tensor(stream[: rows * length], dtype=torch.int32).view(rows, length)


@dataclass(frozen=True)
class Sample:
    """Token ids and, for each, whether it is a label (the assistant's, or a document's)."""

    ids: list[int]
    supervised: list[bool]


@dataclass(frozen=True)
class Tokenized:
    """Samples in flat arrays: sample i is ``[starts[i], starts[i + 1])`` of ``tokens`` int32 and ``supervised`` bool.

    skipped: rows of the source that gave no sample.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    starts: np.ndarray
    skipped: Skipped = field(default_factory=Skipped)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sha256(self) -> str:
        """The hash of all samples and their label masks."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.supervised, self.starts):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def without_label(self) -> int:
        """The number of samples without a label after their first token."""
        labels = self.supervised.copy()
        labels[self.starts[:-1][np.diff(self.starts) > 0]] = False  # a first token is never predicted
        before = np.concatenate([[0], np.cumsum(labels)])
        return int((np.diff(before[self.starts]) == 0).sum())

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Tokenized":
        """Samples put into flat arrays."""
        tokens, supervised, lengths = array("i"), bytearray(), [0]
        for sample in samples:
            tokens.extend(sample.ids)
            supervised.extend(sample.supervised)
            lengths.append(len(sample.ids))
        marks = np.frombuffer(bytes(supervised), np.bool_)
        return cls(np.asarray(tokens, np.int32), marks, np.cumsum(lengths, dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence["Tokenized"]) -> "Tokenized":
        """Parts of a source, in their order, as one."""
        if len(parts) < 2:
            return parts[0] if parts else cls.of(())
        skipped = Skipped()
        for part in parts:
            skipped.merge(part.skipped)
        tokens = np.concatenate([part.tokens for part in parts])
        supervised = np.concatenate([part.supervised for part in parts])
        sizes = np.concatenate([np.diff(part.starts) for part in parts])
        return cls(tokens, supervised, np.concatenate([[0], np.cumsum(sizes)]), skipped)


class Rows:
    """Samples as rows. With ``share``, a row has ``length`` tokens and several samples (best fit, longest first);
    otherwise one sample, and the length of the longest.
    Raises ValueError: there is no sample, or one is longer than a row."""

    def __init__(self, samples: Tokenized, length: int, *, share: bool) -> None:
        sizes = np.diff(samples.starts)
        if len(sizes) == 0:
            raise ValueError("the data set is empty; add sources")
        if sizes.max() > length:
            raise ValueError(f"a sample of {sizes.max()} tokens does not fit into rows of {length}")
        self.samples, self.share = samples, share
        self.length = length if share else int(sizes.max())
        self.rows: list[list[int]] = [] if share else [[i] for i in range(len(sizes))]
        room: list[tuple[int, int]] = []  # (free tokens, row), sorted
        for i in np.argsort(-sizes, kind="stable").tolist() if share else []:
            place = bisect.bisect_left(room, (int(sizes[i]), -1))
            free, row = room.pop(place) if place < len(room) else (length, len(self.rows))
            if row == len(self.rows):
                self.rows.append([])
            self.rows[row].append(i)
            bisect.insort(room, (free - int(sizes[i]), row))

    def __len__(self) -> int:
        return len(self.rows)

    def longest(self, numbers: Sequence[int]) -> int:
        """The length that these rows need in a batch: ``length`` with ``share``, whose rows are nearly full."""
        if self.share:
            return self.length
        starts = self.samples.starts
        return max(int(starts[sample + 1] - starts[sample]) for number in numbers for sample in self.rows[number])

    def batch(self, numbers: Sequence[int], length: int | None = None) -> dict[str, torch.Tensor]:
        """The rows with these numbers, padded to ``length`` (T; that of the longest of all rows if left out).

        Returns:
            ``tokens [S, T]`` int32 (padding 0), ``supervised [S, T]`` bool, ``segment [S, T]`` int32 (1, 2, … by sample
            in its row, 0 at padding). With ``share`` also ``positions [S, T]`` int64, which begin at 0 in every
            segment. Given these and no mask, ``transformers`` models keep the segments of a row apart.
        """
        length = self.length if length is None else length
        shape = (len(numbers), length)
        tokens, segment = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        supervised, positions = np.zeros(shape, bool), np.zeros(shape, np.int64)
        for i, number in enumerate(numbers):
            end = 0
            for place, sample in enumerate(self.rows[number], 1):
                part = slice(*self.samples.starts[sample : sample + 2])
                begin, end = end, end + part.stop - part.start
                tokens[i, begin:end] = self.samples.tokens[part]
                supervised[i, begin:end] = self.samples.supervised[part]
                segment[i, begin:end], positions[i, begin:end] = place, np.arange(end - begin)
            positions[i, end:] = np.arange(length - end)
        arrays = {"tokens": tokens, "supervised": supervised, "segment": segment}
        if self.share:
            arrays["positions"] = positions
        return {name: torch.from_numpy(values) for name, values in arrays.items()}
