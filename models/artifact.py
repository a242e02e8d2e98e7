"""A drafter folder: write, read, check. The folder is the artifact: the same files go to the Hub.

``config.json`` holds ``draftsmith_version``, ``drafter_type``, the drafter's shape and its target;
``model.safetensors`` its weights; ``tree.json`` the calibrated tree; ``provenance.json`` where it all came from.
"""

import datetime
import errno
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models.target import Target, check_safetensors, resolve_folder


def version() -> str:
    return importlib.metadata.version("draftsmith")


def versions() -> dict[str, str]:
    """The versions that a figure depends on."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    return {"draftsmith": version(), "python": platform.python_version(), **found}


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


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        ValueError: it is not valid JSON.
        FileNotFoundError: there is no such file.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); write or fetch it again") from None


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file, from wherever the tensors are.

    Raises:
        OSError: the disk is full, or it cannot be written; half a file is not left.
    """
    try:
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps the system's error in text of its own
        path.unlink(missing_ok=True)
        raise OSError(errno.ENOSPC if "No space" in str(error) else errno.EIO, str(error), str(path)) from None


def write_model(folder: Path, model: Any, tokenizer: Any, facts: Mapping[str, Any]) -> None:
    """A ``transformers`` model folder with its provenance; each file is written elsewhere and renamed."""
    temporary = folder / ".model.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    for file in temporary.iterdir():
        os.replace(file, folder / file.name)
    temporary.rmdir()
    write_json(folder / "provenance.json", facts)


def write_drafter(
    folder: Path, drafter_type: str, shape: Mapping[str, Any], weights: Mapping[str, Tensor], target: Target,
    facts: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write a drafter's ``model.safetensors``, ``config.json`` and ``provenance.json``, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "model.safetensors.tmp"
    save_tensors(weights, temporary)
    os.replace(temporary, folder / "model.safetensors")
    config = {"draftsmith_version": version(), "drafter_type": drafter_type, **shape, "target": target.describe()}
    write_json(folder / "config.json", config)
    write_json(folder / "provenance.json", facts)
    card = folder / "README.md.tmp"
    card.write_text(_card(folder.name, drafter_type, shape, target, facts), encoding="utf-8")
    os.replace(card, folder / "README.md")


def _card(name: str, drafter_type: str, shape: Mapping[str, Any], target: Target, facts: Mapping[str, Any]) -> str:
    """The model card: what it is, what for, how to run it, how it was made."""
    rows = "\n".join(f"| {key} | {value} |" for key, value in {**shape, **facts}.items() if not isinstance(value, dict))
    return f"""---
library_name: draftsmith
base_model: {target.name}
tags: [speculative-decoding, {drafter_type}]
---
# {name}

A {drafter_type} drafter for `{target.name}`, trained with draftsmith. It proposes tokens that the target verifies: the
output is the target's own greedy output, in fewer steps. It works with this target alone (fingerprint
`{target.fingerprint[:16]}…`).

```bash
python inference/decode.py {name} --prompt "…"
python inference/decode.py {name} --prompts FILE.jsonl --baseline all --check-lossless --report DIR
```

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
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "drafter_type" not in config:
        raise ValueError(f"{folder}: this is a model, not a drafter; to decode with it alone: none --target {name}")
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"{folder}: no model.safetensors here; fetch or train the drafter again")
    check_safetensors(folder)
    return folder, config, load_file(folder / "model.safetensors")


_PUBLISHED = [
    "config.json", "model.safetensors", "tree.json", "README.md", "recipe.yaml", "provenance.json", "metrics.jsonl",
    "report.json", "report.png", "adapter/*", "target/*",
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
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
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
    trained_for = config.get("target", {}).get("name_or_path")
    wrong = f"{folder}: this drafter was trained for target '{trained_for}', not for '{target.name}'"
    for field, own in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(field) != own:
            raise ValueError(
                f"{wrong}: {field} {config.get(field)} ≠ {own}; train one for it, or pass --target {trained_for}"
            )
    stored, merged = (config.get("target", {}).get(name) for name in ("fingerprint", "merged_fingerprint"))
    if target.fingerprint not in (stored, merged):
        raise ValueError(
            f"{wrong}: same shape, other weights (fingerprint {str(stored)[:12]}… ≠ {target.fingerprint[:12]}…); "
            f"train one for it, or pass --target {trained_for}"
        )
