"""The tokenizer of a model: tokenizer.json, tokenizer.model (sentencepiece) or tiktoken files."""

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.common.command import first_line
from draftsmith.models.files.locate import ModelFolder, locate

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

# Files that may hold the vocabulary.
_VOCABULARIES = (
    "tokenizer.json tokenizer.model* *.tiktoken tiktoken.model vocab.json vocab.txt *.spm spiece.model "
    "sentencepiece.bpe.model tekken.json"
).split()
MARK = "Zq7Uw3Xk"  # a text that no chat template has
_PROBE = "In 2024, 1000 x  10.5\n\n\tNaïve 日本 it's <s> A_b(1)"  # digits, spaces, scripts: what splits differ in


def _differs(tokenizer: Any, file: Path) -> bool:
    """Whether a tokenizer gives other ids than its tokenizer.json: from version 5 on, transformers makes the tokenizer
    of some classes (GPT2Tokenizer, LlamaTokenizer, …) by the class's own rules."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file():
        return False
    text = file.read_text(encoding="utf-8")
    for name in ("normalizer", "pre_tokenizer"):  # before the vocabulary, which takes a second to read
        place = re.search(rf'"{name}"\s*:\s*', text)
        stored = place and json.JSONDecoder().raw_decode(text, place.end())[0]
        part = getattr(backend, name)
        if stored != (part and json.loads(part.__getstate__())) and (stored or name != "normalizer"):
            break  # without a normalizer in the file, as from GGUF, the class's own is the right one
    else:
        return False
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(file)).encode(_PROBE, add_special_tokens=False).ids
    return tokenizer(_PROBE, add_special_tokens=False)["input_ids"] != ids


def load_tokenizer(
    name: str | ModelFolder, revision: str | None = None, trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, a GGUF file or a Hub id, or of what :func:`locate` found; no weights are downloaded.
    Raises FileNotFoundError: there is no such folder or repository, or no tokenizer in it. ValueError: the tokenizer is
    damaged, or needs its own code."""
    folder = locate(name, revision, weights=False).path
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES) and not trust_remote_code:
        raise FileNotFoundError(f"{folder}: no tokenizer here (tokenizer.json, tokenizer.model, vocab.json, …)")

    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if _differs(tokenizer, folder / "tokenizer.json"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # takes the file as it is
        ids = tokenizer("word", add_special_tokens=False)["input_ids"]
    except BaseException as error:  # transformers raises many types for damaged files, tokenizers may panic
        stops = not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        if stops or (isinstance(error, OSError) and error.errno is not None):
            raise
        reason = first_line(error, 160)
        why = f"cannot be loaded ({type(error).__name__}: {reason}); fetch it again"
        if "custom code" in reason or "trust_remote_code" in str(error):
            why = "needs code that comes with it; read it, then allow it: trust_remote_code"
        raise ValueError(f"{folder}: the tokenizer {why}") from None
    if not ids:  # transformers makes an empty tokenizer of an empty file
        raise ValueError(f"{folder}: the tokenizer cannot be used, it yields no token for a word; fetch it again")
    return tokenizer


def template_sha256(template: Any) -> str:
    """The SHA-256 of a chat template, or of a tokenizer's several; empty if there is none."""
    return hashlib.sha256(str(template).encode()).hexdigest() if template else ""


def tokens_after_answer(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The added tokens (``<|im_end|>``, ``</s>``) that the tokenizer's chat template puts after an answer; none if it
    has no template, or that refuses a question with its answer."""
    chat = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": MARK}]
    try:
        _, found, after = str(tokenizer.apply_chat_template(chat, tokenize=False)).rpartition(MARK)
    except Exception:  # a template is a program, and may raise anything
        return []
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return [number for number in ids if number in added]
