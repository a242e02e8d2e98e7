"""What the folder of a drafter says, of ours and of one that was published for another program. Imports no torch."""

from pathlib import Path
from typing import Any

from draftsmith.common.files import json_object
from draftsmith.models.files.locate import MASK, MEDUSA, ModelFolder, gguf_file, known_folder, local_folder
from draftsmith.models.files.weights import PICKLE, SINGLE, safetensors_header, weight_files


def drafter_config(drafter: ModelFolder) -> dict[str, Any]:
    """The config of a drafter of ours.
    Raises FileNotFoundError: there is none. ValueError: it is damaged, or the folder holds something else."""
    folder = drafter.path
    if not (folder / "config.json").exists():
        hint = "training has not finished; go on with --resume" if (folder / "checkpoints").exists() else "no drafter"
        raise FileNotFoundError(f"{folder}: no config.json here: {hint}")
    if "drafter_type" not in drafter.config:
        command = f"python models/import_drafter.py {drafter.name} --target TARGET --out runs/NAME"
        if is_published(drafter):
            raise ValueError(f"{folder}: a published drafter in another format; import it: {command}")
        raise ValueError(
            f"{folder}: this is a model, not a drafter; to decode with it alone: none --target {drafter.name}"
        )
    return drafter.config


def is_published(drafter: ModelFolder) -> bool:
    """Whether a folder holds a drafter in a format that models/import_drafter.py reads or knows of.
    Raises ValueError: its config or safetensors file is damaged."""
    folder = drafter.path
    if not (folder / "config.json").exists() or "drafter_type" in drafter.config:
        return False
    fields = {"speculators_model_type", "eagle_config", "draft_vocab_size", "medusa_num_heads", "dflash_config"}
    if fields & drafter.config.keys() or drafter.config.get("model_type") == "medusa":
        return True
    file = folder / SINGLE  # EAGLE-1 has the config of a Llama model, of one layer
    if not file.exists():
        return drafter.config.get("num_hidden_layers") == 1 and (folder / PICKLE).exists()
    return "fc.weight" in safetensors_header(file)[1]


def exported(folder: Path) -> dict[str, Any]:
    """The content of provenance.json in a folder that models/export.py wrote; empty in others."""
    file = folder / "provenance.json"
    made = json_object(file) if file.exists() else {}
    return made if "max_logit_difference" in made else {}


def published_target(drafter: ModelFolder, given: str | None) -> str:
    """The target of a published drafter: the ``given`` one, else the one that its folder names, which only those of
    models/export.py, speculators and Medusa do. Where the one that was exported for is not here, what servers load it
    by comes first.
    Raises ValueError: none is given or named."""
    verifier = drafter.config.get("speculators_config")
    for part in ("verifier", "name_or_path"):
        verifier = verifier.get(part) if isinstance(verifier, dict) else None
    made = exported(drafter.path)
    own, served = made.get("target"), made.get("served_target")
    here = own if isinstance(own, str) and (local_folder(own) or gguf_file(own)) else None
    for stated in (given, here, served, verifier, drafter.config.get("base_model_name_or_path"), own):
        if stated and isinstance(stated, str):
            return stated
    raise ValueError(f"{drafter.name}: a published drafter, which does not say for which target it is: pass --target")


def check_drafter_name(name: str, target: str | None = None) -> None:
    """What can be said of a drafter's folder, ours or a published one, before torch is imported.
    ``target``: the one that is given for it.
    Raises FileNotFoundError, ValueError: as :func:`known_folder`, :func:`drafter_config`, :func:`published_target`."""
    folder = known_folder(name)
    if folder is None:
        return
    drafter = ModelFolder(name, folder)
    if is_published(drafter):
        known_folder(published_target(drafter, target))
    else:
        drafter_config(drafter)


def published_files(folder: Path) -> list[Path]:
    """The files of a published drafter's weights. Raises FileNotFoundError: there are none, or some are missing.
    ValueError: one beside them is not read."""
    if (folder / MASK).exists():
        raise ValueError(f"{folder / MASK}: a mask token's own embedding, which is not read: drafts would be others")
    single = (folder / f"{MEDUSA}{suffix}" for suffix in (".safetensors", ".pt"))
    return [file for file in single if file.exists()][:1] or weight_files(folder)
