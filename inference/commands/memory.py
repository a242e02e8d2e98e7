"""Memory of a batch of texts, planned by configs and dtypes before any weights are read."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from draftsmith.common.files import json_object
from draftsmith.inference.commands.prompts import Prompt
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters import names
from draftsmith.inference.drafters.compressed import APPENDED
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.models.files.locate import local_folder
from draftsmith.models.sizes import Sizes, sizes_of
from draftsmith.models.tokenizer import load_tokenizer

_ROOM = 64  # slots of a row beyond its text: a token tree's


def longest_text(target: str, prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Tokens of the longest of some prompts, without a chat template's, and of its answer."""
    texts = (p.content if isinstance(p.content, str) else "".join(m["content"] for m in p.content) for p in prompts)
    tokenizer = load_tokenizer(target)
    return len(tokenizer(max(texts, key=len), verbose=False)["input_ids"]) + new_tokens


def target_name(drafters: Sequence[str]) -> str | None:
    """The target that a drafter's folder names, if one does."""
    folders = (local_folder(part) for name in drafters for part in names.parts_of(name) if names.has_folder(part))
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


def _of_parts(name: str, target: Sizes, tokens: int, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of a drafter's weights, and of its keys and values for a text of ``tokens`` tokens."""
    weights = row = 0
    for part in names.parts_of(name):
        held = APPENDED + _ROOM
        models: list[Sizes | None] = []
        folder = local_folder(part) if names.has_folder(part) else None
        if names.is_compressed(part):
            row += (names.compressed_of(part)[1] + held) * target.token
        elif part.startswith(names.DRAFT_MODEL):
            path, _, cache = names.draft_model_of(part)
            models = [sizes_of(path, **options)]
            row += (cache[1] + held) * models[0].token if cache and models[0] else 0
        elif folder is not None and (folder / "config.json").exists():
            config = json_object(folder / "config.json", "drafter config")
            models = [sizes_of(str(folder / each), **options) for each in config.get("parts", [])]
            files = [file for file in folder.rglob("*.safetensors") if "checkpoints" not in file.parts]
            weights += 0 if models else sum(file.stat().st_size for file in files)
            row += tokens * target.layers[-1] if config.get("drafter_type") in ("eagle", "dynaspec") else 0
        weights += sum(each.weights for each in models if each)
        row += tokens * sum(each.token for each in models if each)
    return weights, row
