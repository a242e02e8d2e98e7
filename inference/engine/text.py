"""Tokens to text, piece by piece: a streamed answer is the text that the tokenizer makes of all its tokens."""

import json
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.models.target import Target

_KEPT = 8  # tokens that stay in the window when older ones leave it
_WINDOW = 24  # tokens in the window beyond which they do
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a byte-fallback token


def decode_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of a whole answer: without special tokens, spaces as they were written."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def answer_tokens(tokens: Sequence[int], stop_ids: Collection[int]) -> Sequence[int]:
    """The tokens of an answer without the stop token that ends it, if one does."""
    return tokens[:-1] if tokens and tokens[-1] in stop_ids else tokens


def answer_text(target: "Target", tokens: Sequence[int]) -> str:
    """The text of a whole answer without the stop token that ends it, be that one special or not."""
    return decode_text(target.tokenizer, answer_tokens(tokens, target.stop_ids))


class StopStrings:
    """Finder of stop strings in the tokens of growing answers, both with special tokens as text and without them.

    Text is decoded only where the last token may complete a stop string: where the token's own text, which is decoded
    once, has the last character of one. It is also decoded after each token whose text depends on its neighbours: a
    part of a character, a byte-fallback token, and any token of a tokenizer whose decoder is none of ``_JOINING``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._joins = _joins_texts(tokenizer)
        self._texts: dict[int, str] = {}  # of tokens; U+FFFD where it depends on the neighbours

    def end(self, tokens: Sequence[int], before: int, strings: Sequence[str]) -> int:
        """Number of tokens up to the end of the first stop string completed after ``before`` tokens, which completed
        none; 0 if none is."""
        last = {string[-1] for string in strings}
        # A window of tokens may begin in the middle of a character, with U+FFFD.
        always = any("\ufffd" in string for string in strings)
        for end in range(before + 1, len(tokens) + 1):
            text = self._texts.get(tokens[end - 1])
            text = self._text(tokens[end - 1]) if text is None else text
            if (always or "\ufffd" in text or not last.isdisjoint(text)) and self._complete(tokens, end, strings):
                return end
        return 0

    def _text(self, token: int) -> str:
        if not self._joins or _is_byte(self._tokenizer, token):
            text = "\ufffd"
        else:  # twice, since a window's first token may lose its leading space
            text = self._decode([token, token])
        self._texts[token] = text
        return text

    def _complete(self, tokens: Sequence[int], end: int, strings: Sequence[str]) -> bool:
        """Whether the text of the first ``end`` tokens has a stop string near its end."""
        longest = max(len(string.encode()) for string in strings)  # a token is at least a byte
        start = max(0, end - longest - 8)
        while start and _is_byte(self._tokenizer, tokens[start]):
            start -= 1  # the bytes of a run become characters together
        tails = self._decode(tokens[start:end]), decode_text(self._tokenizer, tokens[start:end])
        return any(string in tail for string in strings for tail in tails)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))


# The steps of decoders by which a text is its tokens' texts, one after the other, but for its first spaces and for
# characters of several tokens.
_JOINING = (
    ["ByteLevel"],
    ["Metaspace"],
    ["ByteFallback", "Metaspace"],
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
)


def _joins_texts(tokenizer: Any) -> bool:
    """Whether a tokenizer's decoder is one of ``_JOINING``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if getattr(backend, "decoder", None) is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replaces = all(len(step["pattern"].get("String", "")) == 1 for step in steps if step["type"] == "Replace")
    keeps_end = all(step["stop"] == 0 for step in steps if step["type"] == "Strip")
    return replaces and keeps_end and [step["type"] for step in steps] in _JOINING


def _is_byte(tokenizer: Any, token: int) -> bool:
    """Whether it is a byte-fallback token."""
    return bool(_BYTE.fullmatch(str(tokenizer.convert_ids_to_tokens(token))))


class TextStream:
    """The text of a growing answer: what :meth:`add` and :meth:`end` return, joined, is :func:`decode_text` of all its
    tokens, up to a stop string.

    Args:
        stop_strings: the text ends before the first of them that is complete, and ``stopped`` is then True.
        stop_ids: tokens that leave no text, as special ones do.

    Only a window of the last tokens is decoded again, so that a token costs the same wherever it stands. Held back is
    what later tokens may change:

    - the last character if it is U+FFFD: it may be the beginning of a character of several bytes;
    - a run of byte-fallback tokens: its bytes become characters together, or none of them does;
    - the beginning of a stop string.

    Text that has left the window does not change the rest: a window that begins in the middle of a character decodes
    as the whole does after at most three bytes, and a leading space is dropped only from the window's first token,
    whose text was returned before.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = (), stop_ids: Collection[int] = ()) -> None:
        if isinstance(stop_strings, str) or "" in stop_strings:
            raise ValueError(f"stop_strings {stop_strings!r}: must be a list of texts, none of them empty")
        self.stopped = False
        self._tokenizer = tokenizer
        self._strings = stop_strings
        self._held = ""  # settled text that may begin a stop string
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text
        self._in_bytes = False  # the last token belongs to a run of byte-fallback tokens
        self._kinds = dict.fromkeys(stop_ids, "none")

    def _kind(self, token: int) -> str:
        """``byte``, ``text``, or ``none``: special, a stop id, or an id that the tokenizer does not know."""
        if token not in self._kinds:
            name = self._tokenizer.convert_ids_to_tokens(token)
            whole = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if name is None or (whole and not decode_text(self._tokenizer, [token])):
                self._kinds[token] = "none"
            else:
                self._kinds[token] = "byte" if _is_byte(self._tokenizer, token) else "text"
        return self._kinds[token]

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these further tokens settle; empty if none."""
        for token in tokens:
            kind = self._kind(token)
            if kind != "none":  # special tokens leave no trace, also not between the bytes of a run
                self._window.append(token)
                self._in_bytes = kind == "byte"
        if self._in_bytes or not self._window:
            return ""
        text = decode_text(self._tokenizer, self._window)
        new = text[self._returned : len(text) - text.endswith("\ufffd")]
        self._returned += len(new)
        if len(self._window) > _WINDOW:
            held = len(text) - self._returned
            self._window = self._window[-_KEPT:]
            self._returned = len(decode_text(self._tokenizer, self._window)) - held
        return self._cut(new)

    def end(self) -> str:
        """The rest, which was held back: the answer has no more tokens."""
        text = decode_text(self._tokenizer, self._window)
        new = text[self._returned :]
        self._returned = len(text)
        return self._cut(new, last=True)

    def _cut(self, new: str, last: bool = False) -> str:
        """Further text up to a stop string, without an end that may begin one, unless it is the ``last``."""
        text = self._held + new
        found = [(at + len(string), at) for string in self._strings if (at := text.find(string)) >= 0]
        begun = [n for string in self._strings for n in range(1, len(string)) if text.endswith(string[:n])]
        end = min(found)[1] if found else len(text) - (0 if last else max(begun, default=0))
        text, self._held = text[: 0 if self.stopped else end], text[end:]
        self.stopped = self.stopped or bool(found)
        return text


def visible(text: str) -> str:
    """Control characters but line feed and tab as symbols, so that a text cannot drive the terminal: ESC as ``␛``, the
    C1 characters as ``\\x9b``."""
    return text.translate(_VISIBLE)


_VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: "\u2421"} | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
