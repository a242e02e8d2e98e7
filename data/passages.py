"""Passages of a text, by which training data and evaluation prompts are compared: eight words in a row, or a whole
sentence or message that has fewer. A word is a run of letters, in lower case; numbers and punctuation do not count.
"""

import hashlib
import re
from functools import cache

import numpy as np

WORDS = 8  # of a passage
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
_SENTENCE_END = re.compile(r"[.!?\n]+")
_POWERS = np.array([pow(0x9E3779B97F4A7C15, i, 1 << 64) for i in range(WORDS)], np.uint64)


def text_hash(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


_word_hash = cache(text_hash)


def words_of(text: str) -> list[str]:
    """The words of a text, in their order."""
    return _WORD.findall(text.replace("’", "'").lower())


def short_passages(text: str) -> list[list[str]]:
    """The words of the text and of each of its sentences, of those with fewer than ``WORDS``."""
    texts = [text, *_SENTENCE_END.split(text)]
    return [words for words in map(words_of, texts) if 0 < len(words) < WORDS]


def passages(text: str) -> np.ndarray:
    """Hashes [P] uint64 of a text's passages: those of eight words in their order, then the shorter ones."""
    hashes = np.array([_word_hash(word) for word in words_of(text)], np.uint64)  # [W]
    windows = max(len(hashes) - WORDS + 1, 0)
    long = np.zeros(windows, np.uint64)
    for offset, power in enumerate(_POWERS):
        long += hashes[offset : offset + windows] * power  # mod 2⁶⁴
    short = [
        (np.array([_word_hash(word) for word in words], np.uint64) * _POWERS[: len(words)]).sum()
        for words in short_passages(text)
    ]
    return np.concatenate([long, np.array(short, np.uint64)])
