"""Memory of a batch of texts, planned by configs and dtypes before any weights are read."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftsmith.common.files import json_object
from draftsmith.inference.commands.prompts import Prompt
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters import names
from draftsmith.inference.drafters.compressed import APPENDED
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.inference.engine.engine import CACHE_GRANULE, SpeculativeDecoder
from draftsmith.inference.engine.prefill import PREFILL_TOKENS
from draftsmith.models.files.locate import local_folder
from draftsmith.models.sizes import Sizes, kv_bytes, sizes_of
from draftsmith.models.tokenizer import load_tokenizer

_ROOM = CACHE_GRANULE  # slots of a row beyond its text: a token tree's, and what rounding adds
# Rows of a batch, at most, if their number is not given. A product of B rows does B floating-point operations for each
# byte of 16-bit weights that it reads. By its data sheet, an H200 can do 206 in that time (989e12 / 4.8e12), an H100
# 295. With more rows arithmetic takes the time, which grows with them. A CPU gets there with few rows.
MOST_ROWS = {"cuda": 512, "cpu": 32}


def longest_text(target: str, prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Tokens of the longest of some prompts, without a chat template's, and of its answer."""
    texts = (p.content if isinstance(p.content, str) else "".join(m["content"] for m in p.content) for p in prompts)
    tokenizer = load_tokenizer(target)
    return len(tokenizer(max(texts, key=len), verbose=False)["input_ids"]) + new_tokens


def target_name(drafters: Sequence[str]) -> str | None:
    """The target that a drafter's folder names, if one does."""
    parts = (part for name in drafters for part in names.parts_of(name) if names.has_folder(part))
    folders = (local_folder(names.folder_of(part)[0]) for part in parts)
    configs = (json_object(each / "config.json") for each in folders if each and (each / "config.json").exists())
    targets = (config.get("target") for config in configs)
    return next((str(each["name_or_path"]) for each in targets if isinstance(each, dict)), None)


def check_memory(
    target: str,
    drafters: Sequence[str],
    length: Callable[[], int],
    batch: int,
    options: dict[str, Any],
    whole: bool = False,
) -> None:
    """Print how many texts of a length fit into memory with the weights, if several are to be decoded at a time.

    Args:
        drafters: names as decode.py takes them; the largest counts.
        length: returns the tokens of the longest text, with its answer; those beyond the target's context do not count.
        options: of ``load_target``; a target on several devices is not planned.
        whole: the whole batch has to fit.

    Raises:
        ValueError: not even one text fits, or, of a ``whole`` batch, not all.
    """
    if options["device_map"] != "none":
        return
    own = {"dtype": options["dtype"], "device": options["device"], "remote": options["trust_remote_code"]}
    sizes = sizes_of(target, quantize=options["quantize"], **own)
    if sizes is None:
        return
    tokens = min(length(), sizes.context) + _ROOM
    drafted = [_of_parts(name, sizes, tokens, own) for name in drafters] or [(0, 0)]
    weights = sizes.weights + sum(each for each, _ in drafted)
    row = tokens * sizes.token + max(each for _, each in drafted)
    free = free_bytes(torch.device(options["device"]))
    needs = f"{weights / 1e9:.2f} GB of weights and {row / 1e9:.3f} GB of keys and values for each"
    if weights + row > free:
        raise ValueError(
            f"not one text of {tokens:,} tokens fits into the {free / 1e9:.1f} GB that are free on "
            f"{options['device']}: {needs}; take shorter texts, --quantize or --device-map"
        )
    if batch > 1:
        most = int((free - weights) // row)
        said = f"memory for at most {most:,} texts of {tokens:,} tokens at a time: {needs}, {free / 1e9:.1f} GB free"
        if whole and batch > most:
            raise ValueError(f"--batch-sizes {batch}: {said}; take smaller batches or shorter texts")
        console.print(said, markup=False, highlight=False, soft_wrap=True)


def rows_that_fit(decoder: SpeculativeDecoder, drafter: str, max_length: int) -> tuple[int, int]:
    """How many texts of up to ``max_length`` tokens to decode at a time with the memory that the loaded weights have
    left, at least 1 and at most :data:`MOST_ROWS`, and the bytes that each of them takes. They are computed:

    - by row: keys and values of the target and of the drafter, by name ``drafter``, and twice, in a CUDA graph and
      outside of it, what a step computes of a row's nodes;
    - once: the keys and values and what a layer computes of prompts that begin together;
    - a sixteenth of the memory and half a GB for libraries, and for what allocators round up.
    """
    target, nodes = decoder.target, decoder.drafter.num_nodes
    size, width = target.dtype.itemsize, target.hidden_size
    inner = getattr(target.config, "intermediate_size", None) or 4 * width
    layer = (8 * width + 3 * inner) * size  # of a token: residual, norm, queries, attention and its output; the MLP's
    features = (1 + len(decoder.drafter.captures)) * width * size
    logits = 2 * target.vocab_size * (size + 4)  # the target's and a drafter's, and both in float32
    sizes = Sizes(0, kv_bytes(target.kv_shapes, size), target.context)
    options = {"dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type, "remote": True}
    slots = decoder.capacity(max_length)
    row = slots * sizes.token + _of_parts(drafter, sizes, slots, options)[1] + 2 * nodes * (layer + features + logits)
    free = free_bytes(target.device) * 15 // 16 - (1 << 29) - PREFILL_TOKENS * (sizes.token + layer + features)
    return max(1, min(free // row, MOST_ROWS[target.device.type])), row


def _of_parts(name: str, target: Sizes, tokens: int, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a drafter's weights, and of its keys and values for a text of ``tokens`` tokens."""
    weights = row = 0
    for part in names.parts_of(name):
        held = APPENDED + _ROOM
        models: list[Sizes | None] = []
        path, cache, _ = names.folder_of(part)
        folder = local_folder(path) if names.has_folder(part) else None
        if names.is_compressed(part):
            row += (names.compressed_of(part)[1] + held) * target.token
        elif part.startswith(names.DRAFT_MODEL):
            path, _, cache = names.draft_model_of(part)
            models = [sizes_of(path, **options)]
            row += (cache[1] + held) * models[0].token if cache and models[0] else 0
        elif folder is not None and (folder / "config.json").exists():
            config = json_object(folder / "config.json", "drafter config")
            parts: list[str] = config.get("parts", [])
            models = [sizes_of(str(folder / each), **options) for each in parts]
            places = ["", *(each for each, size in zip(parts, models, strict=True) if size is None)]
            files = itertools.chain(*((folder / place).glob("*.safetensors") for place in places))
            weights += sum(file.stat().st_size for file in files)
            pairs = tokens if cache is None else min(tokens, cache[1] + held)
            if config.get("drafter_type") == "dynaspec":
                config = json_object(folder / "drafter" / "config.json", "drafter config")
            keeps = config.get("drafter_type") in ("eagle", "dflash")
            row += pairs * (config.get("num_layers", 1) if keeps else 0) * target.layers[-1]
        weights += sum(each.weights for each in models if each)
        row += tokens * sum(each.token for each in models if each)
    return weights, row
