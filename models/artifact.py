"""A drafter folder: write, read, check. The folder is the artifact: the same files go to the Hub.

``config.json`` holds ``draftsmith_version``, ``drafter_type``, the drafter's shape, its target and its ``parts``;
``model.safetensors`` its weights; ``tree.json`` the calibrated tree; ``provenance.json`` how it was made. A part is a
sub-folder with a config and weights of its own, for example a small causal LM, or a drafter, which may have parts too;
a drafter of parts alone has no ``model.safetensors`` at the top.
"""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.utils import logging

from draftsmith import __version__
from draftsmith.common.command import cpu_facts, first_line
from draftsmith.common.files import json_object, replacing_folder, write_json, write_text
from draftsmith.models.card import MEASURED, measured, named, table_of
from draftsmith.models.files.drafters import drafter_config
from draftsmith.models.files.identity import difference, fingerprint, older_fingerprint
from draftsmith.models.files.locate import ModelFolder, locate
from draftsmith.models.files.weights import check_safetensors, read_tensors, save_tensors
from draftsmith.models.precision import say
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import check_draft_vocab

M = TypeVar("M", bound=nn.Module)


def versions() -> dict[str, str]:
    """Versions that a measurement depends on."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    return {"draftsmith": __version__, "python": platform.python_version(), **found}


def device_name(device: str | torch.device) -> str:
    """Name of a device: a GPU's, or a CPU's with its cores and threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    name = cpu_facts().get("model name") or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def commit_of(root: Path) -> str | None:
    """The commit of the git repository whose top folder is ``root``, with ``-dirty`` if files differ from it; None if
    ``root`` is no such folder (a wheel's, also inside another project's repository), or git is missing."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]  # a kill leaves no lock
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        return git("describe", "--always", "--dirty")
    except (OSError, subprocess.CalledProcessError):
        return None


def now() -> str:
    """UTC, ISO 8601 in seconds: two of them compare as text."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def provenance(**facts: Any) -> dict[str, Any]:
    """Versions, device, commit and date, with the facts a script adds."""
    return {
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        **facts,
        "versions": versions(),
        "git_commit": commit_of(Path(__file__).resolve().parents[1]),
        "date": now(),
    }


def write_model(folder: Path, model: Any, tokenizer: Any, facts: Mapping[str, Any]) -> None:
    """Write a ``transformers`` model folder with its provenance, each file whole or not at all.
    Raises OSError: the disk is full, or it cannot be written."""
    with replacing_folder(folder) as temporary:
        write_json(temporary / "provenance.json", facts)
        logging.disable_progress_bar()  # it would only flash
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


TEMPLATE = "chat_template.jinja"  # in a drafter's folder


def in_dtype(weights: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The weights with every floating-point tensor in a dtype (``float32``, ``bfloat16``); ids stay as they are."""
    return {name: w.to(getattr(torch, dtype)) if w.is_floating_point() else w for name, w in weights.items()}


def write_drafter(
    folder: Path,
    drafter_type: str,
    shape: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: Target,
    facts: Mapping[str, Any],
    template: str | None = None,
    parts: Sequence[str] = (),
) -> None:
    """Write a drafter's weights, ``config.json``, ``provenance.json`` and model card, each whole or not at all.
    ``weights``: tensors of the top folder; may be empty if there are parts.
    ``template``: the chat template it was trained with, where that is not the target's own.
    ``parts``: names of sub-folders, already written, without which the drafter cannot be loaded.
    Raises FileNotFoundError, ValueError: a part is missing or damaged. OSError: the disk is full, or it cannot be
    written."""
    assert weights or parts
    _check_parts(folder, parts)
    folder.mkdir(parents=True, exist_ok=True)
    if weights:
        save_tensors(weights, folder / "model.safetensors")
    config = {"draftsmith_version": __version__, "drafter_type": drafter_type, **shape, "target": target.describe()}
    write_json(folder / "config.json", config | ({"parts": list(parts)} if parts else {}))
    if not weights:
        (folder / "model.safetensors").unlink(missing_ok=True)  # of an earlier export
    write_json(folder / "provenance.json", facts)
    (folder / TEMPLATE).unlink(missing_ok=True)
    if template:
        write_text(folder / TEMPLATE, template)
    write_text(folder / "README.md", _card(folder, drafter_type, shape, target, facts))


def _card(folder: Path, drafter_type: str, shape: Mapping[str, Any], target: Target, facts: Mapping[str, Any]) -> str:
    """The model card: the drafter, its target, how to run it, what was measured and how it was trained."""
    fields = {key: value for key, value in {**shape, **facts}.items() if not isinstance(value, dict)}
    elsewhere = {"command", "licence", *MEASURED}
    table = table_of({key: value for key, value in fields.items() if key not in elsewhere})
    base = str(facts.get("target_fingerprint") or target.fingerprint)  # as it was, without an adapter
    described, licence = target.describe(), facts.get("licence")
    whose = named(target.name, base, str(described.get("model_type")), revision=described.get("revision"))
    name = folder.resolve().name
    made = f"imported from `{facts['imported_from']}`" if "imported_from" in facts else "trained"
    prompt = "def read_config(path):"
    if getattr(target.tokenizer, "chat_template", None):
        prompt = "Write a Python function that adds two numbers."
    adapted = ""
    if target.adapter:
        adapted = f"""
The adapter in `{target.adapter}/` is part of it: it was trained with the drafter and is merged into the target that is
loaded, so that the output is that of the target so changed.
"""
    return f"""{whose.front_matter(licence, drafter_type, "imported_from" in facts)}
# {name}: a drafter of type {drafter_type} for {whose.name}

A drafter for speculative decoding with `{whose.name}`, {made} with draftsmith. It proposes tokens that the target
verifies: the output is the target's own greedy output, in fewer steps. It works with this target alone (fingerprint
`{target.fingerprint[:16]}…`).{whose.about}
{adapted}
draftsmith is installed from a checkout of its repository, by `pip install .` there (or `make install`, into `.venv`).
Then, in this folder:

```bash
python -m draftsmith.inference.decode . --prompt "{prompt}"
python -m draftsmith.inference.decode . --prompts FILE.jsonl --baseline all --check-lossless --report .
```

Elsewhere, write this folder's path in place of the `.`, or `USER/NAME` if it is on the Hub. If the target is
not found, give it by `--target {whose.argument}`.

{whose.licensed(licence, "imported_from" in facts)}

## Measured

{measured(folder, facts)}

## {"Import" if "imported_from" in facts else "Training"}

{table}
"""


def read_drafter(name: str | ModelFolder) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """A drafter's folder, config and weights. The weights of its parts are checked, but not loaded; those of the top
    folder are empty if it has none.
    Raises FileNotFoundError: there is no such drafter, or a file or part of it is missing. ValueError: a file is
    damaged, or the folder holds something else."""
    drafter = locate(name)
    folder, config = drafter.path, drafter_config(drafter)
    _check_config(folder / "config.json", config)
    _check_parts(folder, config.get("parts", ()))
    if not (folder / "model.safetensors").exists():
        if config.get("parts"):
            return folder, config, {}
        raise FileNotFoundError(f"{folder}: no model.safetensors here; fetch or train the drafter again")
    weights = read_tensors(folder, [folder / "model.safetensors"])
    damaged = [name for name, weight in weights.items() if not weight.isfinite().all()]
    if damaged:
        raise ValueError(f"{folder}/model.safetensors: '{damaged[0]}' holds NaN or infinity; fetch or train it again")
    return folder, config, weights


def with_weights(
    make: Callable[[], M],
    weights: Mapping[str, Tensor],
    where: str,
    size_error: str = "no drafter can be made of it ({})",
    list_all: bool = False,
) -> M:
    """The module that ``make`` makes of a folder's config, with the folder's weights, frozen and in eval mode.
    ``size_error``: the message about sizes that torch refuses; ``{}`` is torch's reason.
    ``list_all``: where tensors are missing, unknown or of another shape, name all tensors, not the first wrong one.
    Raises ValueError: fields and tensors do not go together, or the draft vocabulary is none of the target's."""
    try:
        with torch.device("meta"):  # no memory is allocated before the shapes are checked against the file
            promised = make()
    except KeyError as missing:
        raise ValueError(f"{where}/config.json: field {missing} is missing") from None
    except ValueError as wrong:
        raise ValueError(f"{where}/config.json: {wrong}") from None
    except (RuntimeError, TypeError, AttributeError) as wrong:
        raise ValueError(f"{where}/config.json: {size_error.format(wrong)}; fetch it again") from None
    expected = {name: tuple(p.shape) for name, p in promised.state_dict().items()}
    stored = {name: tuple(w.shape) for name, w in weights.items()}
    wrong = sorted(name for name in expected | stored if expected.get(name) != stored.get(name))
    if wrong and list_all:
        raise ValueError(f"{where}/model.safetensors: its tensors are {stored}, config.json promises {expected}")
    if wrong:
        raise ValueError(
            f"{where}/model.safetensors: {len(wrong)} tensors are not those that config.json promises; '{wrong[0]}' is "
            f"{stored.get(wrong[0], 'missing')} instead of {expected.get(wrong[0], 'absent')}"
        )
    shape: Any = promised.config
    if (size := shape.draft_vocab_size) is not None:
        check_draft_vocab(weights["draft_vocab"], size, shape.vocab_size, f"{where}/model.safetensors")
    drafter = make()
    drafter.load_state_dict(dict(weights))
    return drafter.eval().requires_grad_(False)


def _check_config(file: Path, config: Mapping[str, Any]) -> None:
    """Check the fields that every drafter's config has: its type, its target and its parts."""
    if not isinstance(config["drafter_type"], str):
        raise ValueError(f"{file}: field 'drafter_type' is {config['drafter_type']!r}; it has to be text")
    target = config.get("target")
    if not isinstance(target, dict):
        raise ValueError(f"{file}: field 'target' is {target!r}; it has to be an object with name_or_path")
    name = target.get("name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file}: field 'target.name_or_path' is {name!r}; it has to be a folder or a Hub id")
    for field in ("fingerprint", "revision", "adapter", "merged_fingerprint"):
        if not isinstance(target.get(field), str | None):
            raise ValueError(f"{file}: field 'target.{field}' is {target[field]!r}; it has to be text")
    adapter = target.get("adapter")
    if adapter and not _FOLDER_NAME.fullmatch(adapter):
        raise ValueError(f"{file}: field 'target.adapter' is {adapter!r}; it has to be a folder in this one")
    parts = config.get("parts", [])
    if not isinstance(parts, list) or not all(isinstance(part, str) and _FOLDER_NAME.fullmatch(part) for part in parts):
        raise ValueError(f"{file}: field 'parts' is {parts!r}; it has to be a list of folders in this one")


_FOLDER_NAME = re.compile(r"\w[\w.-]*", re.ASCII)  # of a part: it stays inside the folder, and no pattern matches more


def _check_parts(folder: Path, parts: Sequence[str]) -> None:
    """Check that each part has a config and whole weights: those of a model, of an adapter, or of a drafter, whose own
    parts are checked likewise and may hold all of its weights."""
    for part in parts:
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"{folder}: part '{part}' is missing; fetch or train the drafter again")
        adapter = (folder / part / "adapter_config.json").exists()
        file = folder / part / ("adapter_config.json" if adapter else "config.json")
        config = json_object(file, "config of a part")
        inner: Sequence[str] = ()
        if "drafter_type" in config:
            _check_config(file, config)
            inner = config.get("parts", ())
            _check_parts(folder / part, inner)
        if not check_safetensors(folder / part) and not inner:
            raise FileNotFoundError(f"{folder / part}: no weights here; fetch or train the drafter again")


def part_folders(folder: Path) -> list[str]:
    """Sub-folders that belong to an artifact according to its ``config.json``, sorted.

    These are its parts, its target's adapter, and the target with that adapter merged in, found by its fingerprint.
    Other folders, such as checkpoints or a user's own, are not listed; without a valid ``config.json`` none is.
    """
    try:
        config = json_object(folder / "config.json")
        _check_config(folder / "config.json", {"drafter_type": "", **config})
    except (OSError, ValueError):
        return []
    names = {*config.get("parts", []), config["target"].get("adapter")}
    merged = config["target"].get("merged_fingerprint")
    for other in folder.glob("*/config.json") if merged else ():
        with contextlib.suppress(OSError, ValueError):  # damaged, so not the merged target
            if merged in (fingerprint(other.parent), older_fingerprint(other.parent)):
                names.add(other.parent.name)
    return sorted(name for name in names if name and (folder / name).is_dir())


_FILES = (
    "config.json model.safetensors tree.json README.md recipe.yaml provenance.json metrics.jsonl report.json "
    f"report.png medusa_lm_head.safetensors serving.json {TEMPLATE}"
).split()


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload a run folder's artifact to the Hub: its files and its :func:`part_folders`, no checkpoints and no training
    data; files of an earlier upload that the folder has no longer are deleted there. Returns the address.
    Raises ValueError: no login, or the Hub refuses; the folder stays as it is."""
    from huggingface_hub import HfApi  # only where something is uploaded

    files = [name for name in _FILES if (folder / name).exists()]
    absent = [name for name in _FILES if name not in files]  # of an earlier upload: others' weights would be read
    published = [*files, *(f"{part}/*" for part in part_folders(folder))]
    unfinished = ["*.tmp", "*.tmp/*"]
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=published,
            ignore_patterns=[*unfinished],
            delete_patterns=absent,
            commit_message="Uploaded by draftsmith",
        )
    except Exception as error:  # the Hub's client raises a dozen unrelated types
        reason = re.sub(r"Bearer [^'\"]*", "Bearer …", first_line(error))  # no token in a line that is passed on
        command = ["hf", "upload", repository, str(folder), ".", *(["--private"] if private else [])]
        command += [f"--include={name}" for name in published] + [f"--exclude={name}" for name in unfinished]
        command += [f"--delete={name}" for name in absent]
        raise ValueError(
            f"uploading {folder} to {repository} failed ({reason}); the folder is whole. Log in with hf auth login, "
            f"then: {shlex.join(command)}"
        ) from None
    return f"{api.endpoint}/{repository}"


def check_target(folder: Path, config: Mapping[str, Any], target: Target, to_decode: bool = False) -> None:
    """Refuse a drafter that was trained for another target: hardly any of its drafts would be accepted.
    ``to_decode``: one of the same family and shape, which may be a quantised form of its own, is taken with a line:
    the text is the given target's in any case.
    Raises ValueError: the fingerprint differs, or the width or vocabulary, where the config states them."""
    trained_for = config["target"]["name_or_path"]
    wrong = f"{folder}: this drafter was trained for target '{trained_for}', not for '{target.name}'"
    # Only a drafter of another width than its target's has the field target_hidden_size.
    width = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    for field, value in ((width, target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(field, value) != value:
            raise ValueError(
                f"{wrong}: {field} {config[field]} ≠ {value}; train one for it, or pass --target {trained_for}"
            )
    stored, merged = (config["target"].get(name) or "" for name in ("fingerprint", "merged_fingerprint"))
    if not stored and target.fingerprint:
        raise ValueError(
            f"{wrong}: its config.json has no target.fingerprint, which says for which weights it was trained; "
            "fetch or train it again"
        )
    if not target.is_known_as(stored, *([merged] if merged else [])):
        alike = config["target"].get("model_type") == target.describe().get("model_type")
        if to_decode and alike and not config["target"].get("adapter"):
            say(
                f"warning: {folder}: trained for target '{trained_for}'; '{target.name}' has the same shape, "
                f"{difference(stored, target.fingerprint)}: the text is its own, and fewer drafts may be accepted"
            )
            return
        raise ValueError(
            f"{wrong}: same shape, {difference(stored, target.fingerprint)}; "
            f"train one for it, or pass --target {trained_for}"
        )


def renew_fingerprint(folder: Path, target: Target) -> None:
    """Write a drafter's config.json anew, with a line, where it and its parts name this target, whose they are, by the
    fingerprint of an earlier version. Raises OSError: it cannot be written."""
    for file in (folder / "config.json", *sorted(folder.glob("*/config.json"))):
        config = json_object(file, "drafter config")
        known: dict[str, Any] = config.get("target", {}) if "drafter_type" in config else {}
        for name, value in known.items():
            if value and value == target.older_fingerprint != target.fingerprint:
                write_json(file, config | {"target": known | {name: target.fingerprint}})
                say(f"{file}: its target's fingerprint was of an earlier version, which saw less of it; it is renewed")
