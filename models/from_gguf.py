"""A safetensors copy of a GGUF file, made once: weights dequantised, with config, tokenizer and chat template.

The copy is a folder of the cache, named by the file's SHA-256, which is also the target's fingerprint: it depends
neither on the machine nor on the version of ``transformers`` that converted the file. Imports no torch.
"""

import functools
import importlib.metadata
import importlib.util
import os
import sys
import time
from contextlib import ExitStack, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.common.command import first_line
from draftsmith.common.files import file_sha256, json_object, locked, replacing_folder, write_json
from draftsmith.models import stored
from draftsmith.models.precision import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RULES = 1  # of this conversion: a copy made by others is made anew
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Pre-tokenizers (tokenizer.ggml.pre) that take each digit alone, which transformers does not know: it would let the
# white space before a digit end in a token of its own, and "\n\n1" would be other tokens than the model writes.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")


def with_safetensors(file: Path) -> Path:
    """The folder with the safetensors copy of a GGUF file, made now if need be (two lines on stderr).

    Matrices in float32 or float16 keep their dtype, quantised ones become bfloat16.
    Raises ValueError: it is no GGUF file, truncated or one part of several; ``transformers`` cannot convert its
    architecture; the package ``gguf`` is missing; or the copy does not fit on the disk. OSError: the file cannot be
    read, or the cache cannot be written."""
    facts = file.stat()
    sha256 = _sha256(file.resolve(), facts.st_size, facts.st_mtime_ns)
    cache = stored.conversions("gguf")
    copy = cache / sha256
    if not _is_whole(copy, sha256):
        with locked(cache / f"{sha256}.lock"):
            if not _is_whole(copy, sha256):  # another process may have made it meanwhile
                _convert(file, copy, sha256)
    return copy


@functools.cache
def _sha256(file: Path, size: int, modified: int) -> str:
    """SHA-256 of a file, computed once in a process unless its size or its time of modification changes."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file}: not a GGUF file; fetch it again, or name a model's folder")
    return file_sha256(file)


def _is_whole(copy: Path, sha256: str) -> bool:
    """Whether a copy was made of this file by these rules and is still complete."""
    with suppress(OSError, ValueError):
        made = json_object(copy / stored.STAMP)
        if made.get(stored.GGUF) == sha256 and made.get("rules") == _RULES:
            needed = ("config.json", "tokenizer.json")
            return bool(stored.check_safetensors(copy)) and all((copy / name).exists() for name in needed)
    return False


def _convert(file: Path, copy: Path, sha256: str) -> None:
    """Make the copy; its stamp is written last, and without it the copy is not used."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{file}: to convert a GGUF file, the package gguf is needed: pip install gguf")
    began = time.monotonic()
    dtype, weights, fields = _inspect(file)
    size = weights * _BYTES[dtype]
    announcement = (
        f"{file}: a GGUF file ({file.stat().st_size / 1e9:,.2f} GB), converted once to safetensors ({dtype}, "
        f"{size / 1e9:,.2f} GB) in {copy}; some seconds for each 10 MB of it"
    )
    with stored.converting(copy, size, file, announcement):
        _write(file, copy, dtype, fields)
        versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
        write_json(copy / stored.STAMP, {stored.GGUF: sha256, "file": file.name, "rules": _RULES, **versions})
    say(f"{file}: converted in {time.monotonic() - began:.0f} s")


def _inspect(file: Path) -> tuple[str, int, dict[str, str]]:
    """The dtype that a GGUF file's copy gets, its number of weights, and its fields ``general.architecture`` and
    ``tokenizer.ggml.pre`` where it has them."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        names = ("general.architecture", "tokenizer.ggml.pre")
        fields = {name: str(field.contents()) for name in names if (field := reader.get_field(name))}
        split = reader.get_field("split.count")
        parts = int(split.contents()) if split else 1
        tensors = [(str(t.name), t.tensor_type.name, len(t.shape), int(t.n_elements)) for t in reader.tensors]
    except Exception as error:  # the reader raises many types for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{file}: a damaged GGUF file, or truncated ({first_line(error)}); fetch it again") from None
    if parts > 1:
        raise ValueError(f"{file}: one part of {parts}; merge them into one file first (llama-gguf-split --merge)")
    if not tensors or "general.architecture" not in fields:
        raise ValueError(f"{file}: no model's weights in this GGUF file")
    if any(name.startswith("rope_freqs") for name, *_ in tensors):
        say(
            f"warning: {file}: transformers does not convert its rope_freqs; the copy is the model without them, "
            "which can matter in long texts"
        )
    kinds = {kind for _, kind, dimensions, _ in tensors if dimensions > 1}
    dtype = "bfloat16" if kinds - {"F32", "F16"} else "float16" if kinds == {"F16"} else "float32"
    return dtype, sum(count for *_, count in tensors), fields


def _write(file: Path, copy: Path, dtype: str, fields: dict[str, str]) -> None:
    """Write model and tokenizer as ``transformers`` converts them."""
    import torch
    import transformers

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which save_pretrained imports, would warn
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": getattr(torch, dtype), "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the quantised blocks where they have a kernel
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with ExitStack() as quietly:
        if not sys.stderr.isatty():  # progress bars
            quietly.enter_context(redirect_stderr(StringIO()))
        level = transformers.logging.get_verbosity()
        quietly.callback(transformers.logging.set_verbosity, level)
        transformers.logging.set_verbosity_error()
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
            model, found = loaded
        except Exception as error:  # transformers raises many types for what it does not know
            if (isinstance(error, OSError) and error.errno is not None) or isinstance(error, MemoryError):
                raise
            raise ValueError(
                f"{file}: transformers {transformers.__version__} cannot convert this GGUF file of architecture "
                f"'{fields['general.architecture']}' ({first_line(error)})"
            ) from None
        missing = sorted(found["missing_keys"])
        if missing:
            raise ValueError(f"{file}: {len(missing)} weights are missing ({', '.join(missing[:3])}); fetch it again")
        if fields.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
            _split_digits(tokenizer)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        with replacing_folder(copy) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)


def _split_digits(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Make each digit of a byte-level BPE tokenizer's text a piece of its own."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
