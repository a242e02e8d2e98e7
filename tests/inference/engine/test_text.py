"""Streamed text is the tokenizer's own, whatever the tokens, and costs the same wherever it stands."""

import random
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.inference.engine.text import StopStrings, TextStream, decode_text, visible
from draftsmith.models.tokenizer import load_tokenizer

PIECES = ["▁", "▁▁", "▁hello", "a", "b", "é", "日", "▁world", "x", "\ufffd", "\x1b[", "\t", "\n", "\r"]


def byte_fallback(decoder):
    """A sentencepiece-like tokenizer: 256 byte tokens, words that begin with a space, two special tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    tokenizer.add_tokens(["▁▁▁▁added", "naïve"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module", params=["bytes", "llama", "metaspace"])
def tokenizer(request, tiny_lm):
    if request.param == "bytes":
        return AutoTokenizer.from_pretrained(tiny_lm)
    if request.param == "metaspace":
        return byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return byte_fallback(decoders.Sequence(steps))


def random_tokens(rng, tokenizer):
    """From a few tokens or from all; some ids are unknown to the tokenizer."""
    pool = [rng.randrange(len(tokenizer) + 3) for _ in range(rng.choice([2, 10, 300]))]
    return [rng.choice(pool) for _ in range(rng.randrange(1, 200))]


def test_streamed_text_is_the_text(tokenizer):
    """Most of these are no valid UTF-8; characters lie over several tokens, and the last may lack some of its bytes."""
    rng = random.Random(0)
    invalid = 0
    for _ in range(700):
        tokens, stream, pieces, start = random_tokens(rng, tokenizer), TextStream(tokenizer), [], 0
        while start < len(tokens):
            count = rng.randrange(1, 5)
            pieces.append(stream.add(tokens[start : start + count]))
            start += count
        text = decode_text(tokenizer, tokens)
        assert "".join(pieces) + stream.end() == text
        invalid += "\ufffd" in text
    assert invalid > 300


def test_stop_strings_end_where_they_are_complete(tokenizer):
    """Wherever the text is cut: characters of several tokens, runs of byte tokens, and invalid bytes."""
    rng, finder = random.Random(2), StopStrings(tokenizer)
    pieces, found = [[n] for n in range(3, len(tokenizer))], []
    pieces += 10 * [tokenizer.encode(character, add_special_tokens=False) for character in "가나다라한üñ🙂ab"]
    for _ in range(1000):
        chosen = (rng.choice(pieces[-100:] if rng.random() < 0.9 else pieces) for _ in range(30))
        tokens = [token for piece in chosen for token in piece]
        text = tokenizer.decode(tokens)
        start = rng.randrange(len(text))
        stop = text[start : start + rng.choice([1, 2, 5])]
        if "\ufffd" in stop:
            continue
        right = next(end for end in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:end]))
        end = before = 0
        while not end:
            count = rng.randrange(1, 5)
            end = finder.end(tokens[: before + count], before, ["nowhere in this text", stop])
            before += count
        found.append(right)
        assert end == right, (text, stop)
    assert len(found) > 500 and max(found) > 50


def check_against_decoding_each_step(tokenizer, rounds):
    """Stop strings of all kinds in random tokens are found where decoding at every token finds them."""
    rng, finder, decode, found = random.Random(6), StopStrings(tokenizer), tokenizer.decode, 0
    ends = [" ", "\n", ">", "x", "é", "🙂", "\ufffd", "Ġ", "▁", "</s>", "<|im_end|>", " the", "hello", "日a"]
    for _ in range(rounds):
        tokens = random_tokens(rng, tokenizer)
        text, strings = decode(tokens), rng.sample(ends, 2)
        if text and rng.random() < 0.7:
            start = rng.randrange(len(text))
            strings = [text[start : start + rng.choice([1, 2, 5, 20])], rng.choice(ends)]
        longest, right = max(len(string.encode()) for string in strings), 0
        for end in range(1, len(tokens) + 1):
            start = max(0, end - longest - 8)
            while start and re.fullmatch("<0x..>", str(tokenizer.convert_ids_to_tokens(tokens[start]))):
                start -= 1
            tails = decode(tokens[start:end]), decode(tokens[start:end], skip_special_tokens=True)
            if any(string in tail for string in strings for tail in tails):
                right = end
                break
        end = before = 0
        while not end and before < len(tokens):
            after = min(before + rng.randrange(1, 5), len(tokens))
            end = finder.end(tokens[:after], before, strings)
            before = after
        assert end == right, (text, strings)
        found += bool(right)
    assert found > rounds / 3


def test_stop_strings_are_found_as_by_decoding_each_step(tokenizer):
    check_against_decoding_each_step(tokenizer, 400)


@pytest.mark.needs_models
def test_stop_strings_of_a_large_vocabulary():
    check_against_decoding_each_step(load_tokenizer("models/smollm2"), 200)


def test_text_is_decoded_where_a_stop_string_may_end(tiny_lm, monkeypatch):
    """Each token once, and a window where a token has the last character of the string."""
    tokenizer, source = AutoTokenizer.from_pretrained(tiny_lm), Path(__file__).read_text().encode("ascii", "ignore")
    tokens = tokenizer(source.decode())["input_ids"]
    decode, decoded = tokenizer.decode, []
    monkeypatch.setattr(type(tokenizer), "decode", lambda self, ids, **how: decoded.append(ids) or decode(ids, **how))
    assert StopStrings(tokenizer).end(tokens, 0, [f"<|{len(tokens)}|>"]) == 0
    once = [ids for ids in decoded if len(ids) == 2 and ids[0] == ids[1]]
    closing = [token for token in tokens if ">" in decode([token])]
    assert len(once) == len({*tokens}) and len(decoded) - len(once) == 2 * len(closing) < len(tokens) / 25


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.BPEDecoder("</w>"), decoders.Strip(" ", 0, 1), decoders.Metaspace()]
)
def test_stop_strings_of_other_decoders(decoder):
    """Where the text of a token depends on the next one, all is decoded."""
    vocabulary = {name: number for number, name in enumerate(["a", "b</w>", "##c", " ", "▁", "d ", "é", "▁x"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoder
    check_against_decoding_each_step(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 200)


def test_splits_of_a_text_with_a_stop_inside(tokenizer):
    """Characters of several bytes, an emoji of three with joiners, a line separator, right to left; as an answer comes,
    some tokens at a time, up to a stop string, which may be U+FFFD: a character that lacks some of its bytes."""
    rng, stopped, finder = random.Random(4), 0, StopStrings(tokenizer)
    characters = [*"A 世a👩‍👩‍👧é\u2028 ב"]
    for number in range(2000):
        text = "".join(characters[number % 2 * rng.randrange(9) :] + rng.choices(characters, k=rng.randrange(6)))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        stop = rng.choice(["👩", "\u200d👧", "é\u2028", "\ufffd", "nowhere"])
        stream, shown, end, before = TextStream(tokenizer), "", 0, 0
        while not end and before < len(tokens):
            new = tokens[before : before + rng.randrange(1, 7)]
            end = finder.end(tokens[: before + len(new)], before, [stop])
            shown += stream.add(tokens[before : end or before + len(new)])
            before += len(new)
        stopped += bool(end)
        whole = tokens[: end or len(tokens)]
        assert shown + stream.end() == decode_text(tokenizer, whole), (text, stop)
        assert not end or (stop in tokenizer.decode(whole) and stop not in tokenizer.decode(whole[:-1]))
    assert 500 < stopped < 1700


def test_a_stream_ends_before_a_stop_string(tokenizer):
    """Whatever of it is settled when; no piece of it is shown before it is known to be none, and nothing longer is held
    back. A stop id leaves no text."""
    rng, found = random.Random(5), 0
    for _ in range(500):
        tokens, shown = random_tokens(rng, tokenizer), ""
        text = decode_text(tokenizer, tokens)
        start = rng.randrange(len(text) + 1)
        strings = [
            "never there",
            text[start : start + rng.choice([1, 2, 5])] or "x",
            text[start + 1 : start + 3] or "y",
        ]
        whole = next((end for end in range(len(text) + 1) if text[:end].endswith(tuple(strings))), len(text) + 1)
        cut = min((text.find(s) for s in strings if text[:whole].endswith(s)), default=len(text))
        stream = TextStream(tokenizer, strings)
        for token in tokens:
            shown += stream.add([token])
            assert text[:cut].startswith(shown)
        assert shown + stream.end() == text[:cut] and stream.stopped == (cut < len(text))
        found += stream.stopped
    assert found > 300
    stream = TextStream(tokenizer, ["ab"], stop_ids={tokens[0]})
    a, x = (tokenizer.convert_tokens_to_ids(letter) for letter in "ax")
    assert [stream.add([token]) for token in (x, a, a, tokens[0])] == ["x", "", "a", ""] and stream.end() == "a"
    for wrong in ("ab", ["a", ""]):
        with pytest.raises(ValueError, match="must be a list of texts, none of them empty"):
            TextStream(tokenizer, wrong)


def test_text_comes_as_it_is_settled(tiny_lm):
    """Nothing but an incomplete character is held back."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    text = "def f(x):\n\treturn 'naïve 日本🙂' # \x1b[0m"
    stream, tokens, shown = TextStream(tokenizer), tokenizer(text)["input_ids"], ""
    for number, token in enumerate(tokens, 1):
        shown += stream.add([token])
        assert shown == decode_text(tokenizer, tokens[:number]).removesuffix("\ufffd")
    assert shown == text and stream.end() == ""


def test_a_token_costs_the_same_wherever_it_stands(tokenizer, monkeypatch):
    """By the number of tokens that are handed to the tokenizer; a run of byte-fallback tokens is handed over once."""
    rng = random.Random(1)
    tokens = [rng.randrange(len(tokenizer)) for _ in range(8000)]
    decode, handed = tokenizer.decode, []
    monkeypatch.setattr(
        type(tokenizer), "decode", lambda self, ids, **how: handed.append(len(ids)) or decode(ids, **how)
    )
    stream = TextStream(tokenizer)
    for token in tokens:
        stream.add([token])
    monkeypatch.undo()
    assert sum(handed) < 60 * len(tokens)


def test_control_characters_are_visible():
    assert visible("a\tb\nc é") == "a\tb\nc é"
    assert visible("\x1b[31m\x07\x00\r\x7f\x9b") == "␛[31m␇␀␍␡\\x9b"
    everything = visible("".join(map(chr, range(0x300))))
    assert not [c for c in everything if c not in "\n\t" and (ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0)]
