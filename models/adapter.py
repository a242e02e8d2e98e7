"""LoRA adapters on a target (peft): added for joint training, disabled for the teacher, stored, merged."""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from draftsmith.common.command import first_line
from draftsmith.common.files import json_object, read_text, replacing_folder
from draftsmith.models.artifact import TEMPLATE, check_target, in_dtype
from draftsmith.models.files.weights import check_safetensors, save_tensors
from draftsmith.models.precision import say
from draftsmith.models.pretrained import quietly
from draftsmith.models.target import Target
from draftsmith.models.tokenizer import template_sha256

FOLDER = "adapter"  # in a drafter folder
_quietly = partial(quietly, "bitsandbytes", FutureWarning)  # importing and running peft warns of what concerns no user


def untie(target: Target) -> None:
    """Give a tied LM head its own matrix: merging an adapter on a tied one would change the embeddings too."""
    embeddings = target.model.get_input_embeddings()
    if target.lm_head.weight is embeddings.weight:
        weight = cast(nn.Parameter, target.lm_head.weight)
        target.lm_head.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
        for config in (target.model.config, target.config):
            config.tie_word_embeddings = False


def add_lora(target: Target, r: int, alpha: float, dropout: float, modules: Sequence[str]) -> None:
    """Add LoRA adapters (arXiv 2106.09685) to the target's linear layers of these names; B is zero, so the output is
    unchanged at first. Only the adapters train. A tied ``lm_head`` is untied first.
    Raises ValueError: the target has no linear layer of one of the names."""
    with _quietly():
        from peft import LoraConfig, inject_adapter_in_model  # seconds to import, and only joint training needs it
        from peft.tuners.tuners_utils import cast_adapter_dtype

    names = {name.rpartition(".")[2] for name, module in target.model.named_modules() if isinstance(module, nn.Linear)}
    unknown = [name for name in modules if name not in names]
    if unknown:
        known = ", ".join(sorted(names))
        raise ValueError(f"lora.modules: target '{target.name}' has no linear layer '{unknown[0]}'; it has: {known}")
    if "lm_head" in modules:
        untie(target)
    lora = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(modules))  # type: ignore[arg-type]
    # Not by transformers' add_adapter: its release 5.24 wants a peft that was not yet published.
    with _quietly():
        inject_adapter_in_model(lora, target.model)
    # They train in float32 whatever the target's dtype: bfloat16 would round AdamW's small updates away.
    cast_adapter_dtype(target.model, "default")
    target.lm_head = cast(nn.Module, target.model.get_output_embeddings())  # wrapped, if it has an adapter


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model runs without its adapters: the teacher, without a second copy of the weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also toggles requires_grad, under a running backward's feet
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def write_adapter(folder: Path, target: Target, dtype: str = "float32") -> None:
    """Write ``folder/adapter`` in peft's format and in a dtype, each file whole or not at all, and include it in the
    target's fingerprint.
    Raises OSError: the disk is full, or it cannot be written."""
    from peft import get_peft_model_state_dict

    # With an adapter on the LM head, peft would store the embeddings too, which have not changed.
    trained = get_peft_model_state_dict(target.model, save_embedding_layers=False)
    config = copy.copy(target.model.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = target.name, True
    with replacing_folder(folder / FOLDER) as temporary:
        weights = {f"base_model.model.{name}": weight for name, weight in trained.items()}
        save_tensors(in_dtype(weights, dtype), temporary / "adapter_model.safetensors")
        config.save_pretrained(temporary)
    target.fingerprint, target.adapter = _together(target.fingerprint, folder / FOLDER), FOLDER
    target.older_fingerprint = ""


def _together(fingerprint: str, folder: Path) -> str:
    """Fingerprint of a target, as stored, together with an adapter."""
    digest = hashlib.sha256(fingerprint.encode())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def merge_adapter(target: Target, folder: Path) -> Target:
    """The target with a stored adapter merged into its weights. Its fingerprint covers both.
    Raises FileNotFoundError, ValueError: there is no adapter, it is damaged, or it does not fit."""
    with _quietly():
        from peft import PeftModel

    if not (folder / "adapter_model.safetensors").exists():
        raise FileNotFoundError(f"{folder}: no adapter_model.safetensors here; fetch or train the drafter again")
    check_safetensors(folder)
    modules = json_object(folder / "adapter_config.json", "adapter config").get("target_modules") or []
    together, older = (_together(each, folder) for each in (target.fingerprint, target.older_fingerprint))
    if "lm_head" in modules:
        untie(target)
    try:
        with torch.no_grad(), _quietly():
            merged = PeftModel.from_pretrained(target.model, str(folder)).merge_and_unload()  # type: ignore[operator]
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder}: this adapter does not fit target '{target.name}' ({first_line(error)})") from None
    return Target(merged, target.tokenizer, target.name, together, target.revision, FOLDER, older_fingerprint=older)


def target_of(folder: Path, config: Mapping[str, Any], target: Target, *, keep_template: bool = False) -> Target:
    """The given target, as a drafter needs it: with the drafter's adapter merged, if it has one. It gets the chat
    template that the drafter was trained with, if the drafter brings one.
    ``keep_template``: keep the target's own chat template, if it has one.
    Raises FileNotFoundError, ValueError: the drafter is not for this target, or its adapter is missing or damaged."""
    wanted = config["target"]
    trained = (wanted.get("fingerprint"), wanted.get("merged_fingerprint"))
    if wanted.get("adapter") and not target.is_known_as(*trained):
        target = merge_adapter(target, folder / str(wanted["adapter"]))
    check_target(folder, config, target, to_decode=True)
    tokenizer = target.tokenizer
    keeps = keep_template and tokenizer is not None and tokenizer.chat_template
    if tokenizer is not None and not keeps and (folder / TEMPLATE).exists():
        tokenizer.chat_template = read_text(folder / TEMPLATE, "chat template")
    elif tokenizer is not None and not (folder / TEMPLATE).exists():
        facts = json_object(folder / "provenance.json") if (folder / "provenance.json").exists() else {}
        trained_with = facts.get("template_sha256")  # older ones have none
        if trained_with not in (None, template_sha256(tokenizer.chat_template)):
            say(
                f"warning: {folder}: trained with another chat template than target '{target.name}' has here, so that "
                "fewer drafts of chats may be accepted; the text is the target's all the same"
            )
    return target
