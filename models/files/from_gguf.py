"""A safetensors copy of a GGUF file, made once: weights dequantised, with config, tokenizer and chat template.

The copy is a folder of the cache, named by the file's SHA-256. The target's fingerprint is that of the copy's weights
alone, which depend neither on the machine nor on the version of ``transformers`` that converted the file. Imports no
torch.
"""

import functools
import importlib.metadata
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.common.command import available_cores, first_line, no_collection
from draftsmith.common.files import replacing_folder
from draftsmith.models.files.copies import GGUF, Conversion, cached_copy, known_sha256
from draftsmith.models.files.weights import SINGLE
from draftsmith.models.precision import say

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from draftsmith.models.files import gguf_blocks

_RULES = 2  # of this conversion: a copy made by others is made anew
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Pre-tokenizers (tokenizer.ggml.pre) that take each digit alone, which transformers does not know: it would let the
# white space before a digit end in a token of its own, and "\n\n1" would be other tokens than the model writes.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
# Architectures whose tensors are the model's, by other names, but for the order of rows that _permuted tells. Tests
# compare each with what transformers makes of it, which also converts all others.
_MAPPED = ("llama", "qwen2", "qwen3")
_ROPES = ("linear", "yarn")  # scaled rotary positions that need no tensor
_RATE = 60e6  # weights a second that one core converts; transformers, on all of them, a quarter
_ONE_READER = threading.Lock()


def convert_gguf(file: Path) -> Path:
    """The folder with the safetensors copy of a GGUF file, made now if need be (two lines on stderr).

    Matrices in float32 or float16 keep their dtype, quantised ones become bfloat16.
    Raises ValueError: it is no GGUF file, truncated or one part of several; ``transformers`` cannot convert its
    architecture; the package ``gguf`` is missing; or the copy does not fit on the disk. OSError: the file cannot be
    read, or the cache cannot be written."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file}: not a GGUF file; fetch it again, or name a model's folder")
    sha256 = known_sha256(file)
    key, plan = {GGUF: sha256, "rules": _RULES}, functools.partial(_plan, file)
    return cached_copy("gguf", sha256, file, key, plan, "config.json", "tokenizer.json")


def _plan(file: Path, copy: Path) -> Conversion:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{file}: to convert a GGUF file, the package gguf is needed: pip install gguf")
    began = time.monotonic()
    with no_collection():
        reader = _read(file)
    dtype, weights, fields = _inspect(file, reader)
    size = weights * _BYTES[dtype]
    mapped = fields["general.architecture"] in _MAPPED
    seconds = 8 + weights / _RATE / available_cores() if mapped else 15 + 4 * weights / _RATE
    announcement = (
        f"{file}: a GGUF file ({file.stat().st_size / 1e9:,.2f} GB), converted once to safetensors ({dtype}, "
        f"{size / 1e9:,.2f} GB) in {copy}; about {seconds:.0f} s"
    )

    def write(copy: Path) -> None:
        _write(file, copy, dtype, fields, reader)
        say(f"{file}: converted in {time.monotonic() - began:.0f} s")

    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
    return Conversion(size, announcement, write, {"file": file.name, **versions})


def _read(file: Path) -> "GGUFReader":
    """The file's fields and the places of its tensors. Raises ValueError: it is damaged."""
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Its ``data`` is a plain array, since numpy takes three times as long for slices of a memmap, and here are
        two for each token."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    try:
        return Reader(file)
    except Exception as error:  # the reader raises many types for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file}: a damaged GGUF file, or truncated ({first_line(error)}); fetch it again")


def _inspect(file: Path, reader: "GGUFReader") -> tuple[str, int, dict[str, str]]:
    """The dtype that a GGUF file's copy gets, its number of weights, and its fields ``general.architecture``,
    ``tokenizer.ggml.pre`` and ``rope.scaling.…`` where it has them."""
    try:
        names = ("general.architecture", "tokenizer.ggml.pre")
        fields = {name: str(field.contents()) for name in names if (field := reader.get_field(name))}
        scaling = f"{fields.get('general.architecture')}.rope.scaling."
        for name in ("type", "factor", "original_context_length"):
            if field := reader.get_field(scaling + name):
                fields[f"rope.scaling.{name}"] = str(field.contents())
        split = reader.get_field("split.count")
        parts = int(split.contents()) if split else 1
        tensors = [(str(t.name), t.tensor_type.name, len(t.shape), int(t.n_elements)) for t in reader.tensors]
    except Exception as error:  # of a field's content
        raise _damaged(file, error) from None
    if parts > 1:
        raise ValueError(f"{file}: one part of {parts}; merge them into one file first (llama-gguf-split --merge)")
    if not tensors or "general.architecture" not in fields:
        raise ValueError(f"{file}: no model's weights in this GGUF file")
    if any(name.startswith("rope_freqs") for name, *_ in tensors):
        say(
            f"warning: {file}: transformers does not convert its rope_freqs; the copy is the model without them, "
            "which can matter in long texts"
        )
    kind = _scaled(fields).get("rope_type")
    if kind and not (kind in _ROPES and fields["general.architecture"] in _MAPPED):
        say(
            f"warning: {file}: transformers does not convert how its rotary positions are scaled ({kind}); the copy is "
            "the model without that"
        )
    kinds = {kind for _, kind, dimensions, _ in tensors if dimensions > 1}
    dtype = "bfloat16" if kinds - {"F32", "F16"} else "float16" if kinds == {"F16"} else "float32"
    return dtype, sum(count for *_, count in tensors), fields


def _scaled(fields: dict[str, str]) -> dict[str, Any]:
    """How rotary positions are scaled, as a config's ``rope_parameters`` have it; empty if they are not."""
    if (kind := fields.get("rope.scaling.type", "none")) == "none":
        return {}
    found: dict[str, Any] = {"rope_type": kind, "factor": float(fields.get("rope.scaling.factor", 1))}
    if length := fields.get("rope.scaling.original_context_length"):
        found["original_max_position_embeddings"] = int(length)
    return found


@contextmanager
def _one_reader(file: Path, reader: "GGUFReader") -> Iterator[None]:
    """Inside, ``transformers`` is given the reader that there is, where it would read the file anew each time."""
    import gguf

    own = gguf.GGUFReader

    def reading(path: Any, *arguments: Any) -> "GGUFReader":
        return reader if Path(path) == file else own(path, *arguments)

    with _ONE_READER, no_collection():
        gguf.GGUFReader = reading  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            gguf.GGUFReader = own  # type: ignore[misc]


def _write(file: Path, copy: Path, dtype: str, fields: dict[str, str], reader: "GGUFReader") -> None:
    """Write model and tokenizer as ``transformers`` converts them."""
    import transformers

    with ExitStack() as quietly:
        if not sys.stderr.isatty():  # progress bars
            quietly.enter_context(redirect_stderr(StringIO()))
        level = transformers.logging.get_verbosity()
        quietly.callback(transformers.logging.set_verbosity, level)
        transformers.logging.set_verbosity_error()
        architecture = fields["general.architecture"]
        with replacing_folder(copy) as temporary:
            with _one_reader(file, reader), _refusing(file, architecture):
                tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
                planned = _plan_weights(file, dtype, fields, reader, temporary)
            if planned is None:
                with _one_reader(file, reader):
                    _by_transformers(file, dtype, architecture, temporary)
            if fields.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
                _split_digits(tokenizer)
            tokenizer.save_pretrained(temporary)
            quietly.close()
            if planned is not None:
                _write_weights(file, temporary / SINGLE, planned, dtype)


@contextmanager
def _refusing(file: Path, architecture: str) -> Iterator[None]:
    """Raises ValueError: transformers cannot convert the file, for which it raises many types."""
    try:
        yield
    except Exception as error:
        if (isinstance(error, OSError) and error.errno is not None) or isinstance(error, MemoryError):
            raise
        raise ValueError(
            f"{file}: transformers {importlib.metadata.version('transformers')} cannot convert this GGUF file of "
            f"architecture '{architecture}' ({first_line(error)})"
        ) from None


def _plan_weights(
    file: Path, dtype: str, fields: dict[str, str], reader: "GGUFReader", folder: Path
) -> "tuple[bytes, list[gguf_blocks.Piece]] | None":
    """What :func:`_write_weights` writes, and the model's configs in a folder; None where transformers has to convert:
    another architecture or rotary scaling, tensors that are missing or that this model does not have, or another order
    of bytes."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftsmith.models.files import gguf_blocks

    architecture, scaled = fields["general.architecture"], _scaled(fields)
    if architecture not in _MAPPED or reader.byte_order != "I" or scaled.get("rope_type", "yarn") not in _ROPES:
        return None
    config: PretrainedConfig = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if config.model_type != architecture:
        return None
    if scaled:  # which transformers leaves out
        config.rope_parameters = {**config.rope_parameters, **scaled}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight")
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    known, names = gguf.get_tensor_name_map(number, config.num_hidden_layers), dict[str, str]()
    for name in shapes:
        stem, _, suffix = name.rpartition(".")
        names[f"{known.get_name(stem)}.{suffix}"] = name
    held = {t.name: [int(n) for n in reversed(t.shape)] for t in reader.tensors if not t.name.startswith("rope_freqs")}
    if held != {own: shapes[name] for own, name in names.items()} or len(names) != len(shapes):
        return None
    heads = _permuted(architecture, config, names)
    planned = gguf_blocks.plan(reader, names, heads, dtype)
    if planned is not None:  # as save_pretrained does
        config.architectures, config.dtype = [type(model).__name__], dtype
        config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    return planned


def _permuted(architecture: str, config: Any, names: Any) -> dict[str, int]:
    """Llama's queries and keys, and their numbers of heads: llama.cpp puts the two halves of each rotary pair side by
    side, which transformers keeps half a head apart."""
    if architecture != "llama":
        return {}
    numbers = {".attn_q.": config.num_attention_heads, ".attn_k.": config.num_key_value_heads}
    return {name: number for name in names for part, number in numbers.items() if part in name}


def _write_weights(file: Path, copy: Path, planned: "tuple[bytes, list[gguf_blocks.Piece]]", dtype: str) -> None:
    """Write the safetensors file, with a progress bar on a terminal."""
    from rich.console import Console

    from draftsmith.common.progress import ProgressBar
    from draftsmith.models.files import gguf_blocks

    header, pieces = planned
    total = sum(piece.rows * piece.columns for piece in pieces) // 1_000_000
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with ProgressBar("million weights", total, console, disable=not console.is_terminal, transient=True) as bar:
        gguf_blocks.write(file, copy, header, pieces, dtype, available_cores(), lambda done: bar(done // 1_000_000))


def _by_transformers(file: Path, dtype: str, architecture: str, folder: Path) -> None:
    """Write the model as ``transformers`` converts it, all of it in memory."""
    import torch
    import transformers

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which save_pretrained imports, would warn
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": getattr(torch, dtype), "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the quantised blocks where they have a kernel
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _refusing(file, architecture):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(f"{file}: {len(missing)} weights are missing ({', '.join(missing[:3])}); fetch it again")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)


def _split_digits(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Make each digit of a byte-level BPE tokenizer's text a piece of its own."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[attr-defined]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
