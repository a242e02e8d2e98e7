"""Byte-level BPE tokenizers of our own models, trained on a recipe's text or another model's; text as token ids."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftsmith.common.command import make_console
from draftsmith.common.data_sections import Source
from draftsmith.common.progress import ProgressBar
from draftsmith.data.chat_template import apply_template
from draftsmith.data.formats import Completion, read_sample
from draftsmith.data.rows import Skipped, rows, usable
from draftsmith.models.files.locate import locate

console = make_console()
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def texts(source: Source, tokenizer: PreTrainedTokenizerFast | None, skipped: Skipped | None = None) -> Iterator[str]:
    """The documents of a source; chats are rendered by the template (without a tokenizer, their plain contents). Rows
    that cannot be used are left out and noted in ``skipped``."""

    def read(row: Mapping[str, Any]) -> list[str]:
        content = read_sample(row)
        if isinstance(content, str):
            return [content]
        if isinstance(content, Completion):
            return [content.prompt + content.completion]
        if tokenizer is None:
            return [message["content"] for message in content]
        return [str(apply_template(content, tokenizer, None, tokenize=False))]

    for _, found in usable(itertools.islice(rows(source)[0], source.limit), read, skipped or Skipped()):
        yield from found


def train_tokenizer(corpus: list[Source], vocab_size: int, max_position: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``vocab_size`` entries (fewer if the text has no more), with the chat template."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, END_OF_TURN, *ROLES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=console.is_terminal
    )
    bpe.train_from_iterator((text for source in corpus for text in texts(source, None)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[END_OF_TURN, *ROLES],
        clean_up_tokenization_spaces=False,
        model_max_length=max_position,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(source: Source, tokenizer: PreTrainedTokenizerFast, max_skipped: float) -> list[list[int]]:
    """The token ids of each document.
    Raises ValueError: more than a share of ``max_skipped`` of the rows cannot be used."""
    skipped = Skipped()
    documents, found = list(texts(source, tokenizer, skipped)), list[list[int]]()
    skipped.check(source.source, max_skipped)
    if skipped.count:
        console.print(f"  {source.label}: {skipped}")
    with ProgressBar(f"tokenizing {source.label}", len(documents), console) as bar:
        for begin in range(0, len(documents), 256):
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(documents[begin : begin + 256])
            found += [encoding.ids for encoding in encodings]
            bar(len(found))
    return found


def check_ends(where: str, vocabulary: Collection[str]) -> None:
    """Refuse a tokenizer without our end tokens. Raises ValueError: its vocabulary lacks one."""
    missing = {END_OF_TEXT, END_OF_TURN} - set(vocabulary)
    if missing:
        raise ValueError(
            f"{where}: its tokenizer has no {' and no '.join(sorted(missing))}; begin with a model of train/lm.py"
        )


def other_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """The tokenizer of another model, for a model of ``vocab_size`` entries.
    Raises FileNotFoundError, ValueError: there is none, it lacks our end tokens, or the model has no room for all of
    it."""
    where, folder = f"tokenizer={name}", locate(name, weights=False).path
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{where}: no tokenizer there (tokenizer.json)")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    check_ends(where, tokenizer.get_vocab())
    if len(tokenizer) > vocab_size:
        raise ValueError(f"{where}: it has {len(tokenizer)} entries; set model.vocab_size={len(tokenizer)}")
    return tokenizer
