"""A drafter folder: write, read, check. The folder is the artifact: the same files go to the Hub.

``config.json`` holds ``draftsmith_version``, ``drafter_type``, the drafter's shape and its target;
``model.safetensors`` its weights; ``tree.json`` the calibrated tree; ``provenance.json`` where it all came from.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftsmith import __version__
from draftsmith.common.command import first_line
from draftsmith.common.files import json_object, replacing_folder, write_json, write_text
from draftsmith.common.files import read_json as read_json
from draftsmith.models.stored import check_safetensors, local_folder, resolve_folder, save_tensors
from draftsmith.models.target import Target


def versions() -> dict[str, str]:
    """The versions that a figure depends on."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    return {"draftsmith": __version__, "python": platform.python_version(), **found}


def device_name(device: str | torch.device) -> str:
    """The device in words."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def provenance(**facts: Any) -> dict[str, Any]:
    """Versions, device, commit and date, with the facts a script adds."""
    root = Path(__file__).resolve().parent.parent
    git = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        **facts,
        "versions": versions(),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "git_commit": git.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_model(folder: Path, model: Any, tokenizer: Any, facts: Mapping[str, Any]) -> None:
    """A ``transformers`` model folder with its provenance; its files are written elsewhere and then renamed.

    Raises:
        OSError: the disk is full, or it cannot be written.
    """
    with replacing_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    write_json(folder / "provenance.json", facts)


TEMPLATE = "chat_template.jinja"  # in a drafter's folder


def write_drafter(
    folder: Path, drafter_type: str, shape: Mapping[str, Any], weights: Mapping[str, Tensor], target: Target,
    facts: Mapping[str, Any], template: str | None = None,
) -> None:  # fmt: skip
    """Write a drafter's weights, ``config.json``, ``provenance.json`` and model card, each whole or not at all.

    Args:
        template: the chat template it was trained with, where that is not the target's own.

    Raises:
        OSError: the disk is full, or it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(weights, folder / "model.safetensors")
    config = {"draftsmith_version": __version__, "drafter_type": drafter_type, **shape, "target": target.describe()}
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", facts)
    (folder / TEMPLATE).unlink(missing_ok=True)
    if template:
        write_text(folder / TEMPLATE, template)
    write_text(folder / "README.md", _card(folder.resolve().name, drafter_type, shape, target, facts))


def _card(name: str, drafter_type: str, shape: Mapping[str, Any], target: Target, facts: Mapping[str, Any]) -> str:
    """The model card: what it is, what for, how to run it, how it was made."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in {**shape, **facts}.items() if not isinstance(value, dict))
    base = "" if local_folder(target.name) else f"base_model: {target.name}\n"  # the Hub takes no other name
    return f"""---
library_name: draftsmith
{base}tags: [speculative-decoding, {drafter_type}]
---
# {name}

A {drafter_type} drafter for `{target.name}`, trained with draftsmith. It proposes tokens that the target verifies: the
output is the target's own greedy output, in fewer steps. It works with this target alone (fingerprint
`{target.fingerprint[:16]}…`).

draftsmith is installed from a checkout of its repository, by `pip install .` there (or `make install`, into `.venv`).
Then, in this folder:

```bash
python -m draftsmith.inference.decode . --prompt "def read_config(path):"
python -m draftsmith.inference.decode . --prompts FILE.jsonl --baseline all --check-lossless --report .
```

Elsewhere, write this folder's path in place of the `.`, or `USER/NAME` if it is on the Hub. Give the target by
`--target` if it is not found as `{target.name}`.

| field | value |
|---|---|
{rows}
"""


def read_drafter(name: str) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """A drafter's folder, config and weights.

    Raises:
        FileNotFoundError: there is no such drafter.
        ValueError: a file is damaged, or the folder holds something else.
    """
    folder = resolve_folder(name)
    if not (folder / "config.json").exists():
        hint = "training has not finished; go on with --resume" if (folder / "checkpoints").exists() else "no drafter"
        raise FileNotFoundError(f"{folder}: no config.json here: {hint}")
    config = json_object(folder / "config.json", "drafter config")
    if "drafter_type" not in config:
        raise ValueError(f"{folder}: this is a model, not a drafter; to decode with it alone: none --target {name}")
    _check_config(folder / "config.json", config)
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"{folder}: no model.safetensors here; fetch or train the drafter again")
    check_safetensors(folder)
    weights = load_file(folder / "model.safetensors")
    damaged = [name for name, weight in weights.items() if not weight.isfinite().all()]
    if damaged:
        raise ValueError(f"{folder}/model.safetensors: '{damaged[0]}' holds NaN or infinity; fetch or train it again")
    return folder, config, weights


_TARGET_FIELDS = ("fingerprint", "revision", "adapter", "merged_fingerprint")


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    """What every drafter's config says of its type and its target.

    Raises:
        ValueError: a field is missing or of another type.
    """
    if not isinstance(config["drafter_type"], str):
        raise ValueError(f"{file}: field 'drafter_type' is {config['drafter_type']!r}; it has to be text")
    target = config.get("target")
    if not isinstance(target, dict):
        raise ValueError(f"{file}: field 'target' is {target!r}; it has to be an object with name_or_path")
    name = target.get("name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file}: field 'target.name_or_path' is {name!r}; it has to be a folder or a Hub id")
    for field in _TARGET_FIELDS:
        if not isinstance(target.get(field), str | None):
            raise ValueError(f"{file}: field 'target.{field}' is {target[field]!r}; it has to be text")
    adapter = target.get("adapter")
    if adapter and (Path(adapter).name != adapter or adapter in (".", "..")):
        raise ValueError(f"{file}: field 'target.adapter' is {adapter!r}; it has to be a folder in this one")


_PUBLISHED = [
    "config.json", "model.safetensors", "tree.json", "README.md", "recipe.yaml", "provenance.json", "metrics.jsonl",
    TEMPLATE, "report.json", "report.png", "adapter/*", "target/*",
]  # fmt: skip


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload a run folder's artifact to the Hub, no checkpoints and no training data; returns the address.

    Raises:
        ValueError: nobody is logged in, or the Hub refuses; the folder stays as it is.
    """
    from huggingface_hub import HfApi  # only where something is uploaded

    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=_PUBLISHED, commit_message="Uploaded by draftsmith"
        )
    except Exception as error:  # the Hub's client raises a dozen unrelated types
        reason = first_line(error)
        raise ValueError(
            f"uploading {folder} to {repository} failed ({reason}); the folder is whole. Log in with hf auth login, "
            f"then: hf upload {repository} {folder} . --include {' '.join(_PUBLISHED)}"
        ) from None
    return f"{api.endpoint}/{repository}"


def check_target(folder: Path, config: Mapping[str, Any], target: Target) -> None:
    """Refuse a drafter that was trained for another target: its drafts would be noise.

    Raises:
        ValueError: width, vocabulary or fingerprint differ.
    """
    trained_for = config["target"]["name_or_path"]
    wrong = f"{folder}: this drafter was trained for target '{trained_for}', not for '{target.name}'"
    for field, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(field) != own:
            raise ValueError(
                f"{wrong}: {field} {config.get(field)} ≠ {own}; train one for it, or pass --target {trained_for}"
            )
    stored, merged = (config["target"].get(name) or "" for name in ("fingerprint", "merged_fingerprint"))
    if not stored and target.fingerprint:
        raise ValueError(
            f"{wrong}: its config.json has no target.fingerprint, so nobody knows for which weights it was trained; "
            "fetch or train it again"
        )
    if target.fingerprint not in (stored, *([merged] if merged else [])):
        raise ValueError(
            f"{wrong}: same shape, other weights (fingerprint {stored[:12]}… ≠ {target.fingerprint[:12]}…); "
            f"train one for it, or pass --target {trained_for}"
        )
