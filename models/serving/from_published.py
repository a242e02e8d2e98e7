"""A published drafter's folder as one of ours: read, written, and kept as a converted copy in the cache.

A copy is a folder of the cache, named by the SHA-256 of the published files and the target's fingerprint: a drafter is
converted once for each target. calibrate.py writes its tree there.
"""

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from draftsmith.common.files import read_text, write_json
from draftsmith.models.artifact import TEMPLATE, provenance, write_drafter
from draftsmith.models.card import is_hub_id, stated_licence
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.files.copies import Conversion, cached_copy, known_sha256
from draftsmith.models.files.drafters import exported, is_published, published_files, published_target
from draftsmith.models.files.identity import difference, fingerprint
from draftsmith.models.files.locate import ModelFolder, locate
from draftsmith.models.files.weights import config_of, read_tensors, stored_dtype
from draftsmith.models.precision import DTYPES
from draftsmith.models.serving.published import Imported, TargetInfo, convert
from draftsmith.models.target import Target, load_target

_RULES = 1  # of this conversion: a copy made by others is made anew
_CHAIN = 3  # tokens of an EAGLE drafter's chain until it is calibrated


def load_stored(
    name: str | ModelFolder, revision: str | None = None, trust_remote_code: bool = False, dtype: str | None = None
) -> Target:
    """A target on the CPU, in the dtype that it is stored in unless another is given.
    Raises FileNotFoundError, ValueError: as load_target."""
    model = locate(name, revision)
    dtype = dtype or stored_dtype(model.path)
    return load_target(model, dtype=dtype if dtype in DTYPES else "float32", trust_remote_code=trust_remote_code)


def read_published(folder: Path, target: Target, pickles: bool = False) -> Imported:
    """Read a published drafter's folder and convert it for a target.
    Raises FileNotFoundError, ValueError: it is missing, damaged, of an unknown form, or of another target."""
    config, tensors = config_of(folder), read_tensors(folder, published_files(folder), pickles=pickles)
    try:
        imported = convert(config, tensors, TargetInfo.of(target))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    wanted = str(exported(folder).get("target_fingerprint") or "")
    if wanted and not target.is_known_as(wanted):
        said = f"it was exported for a target with {difference(wanted, target.fingerprint)}: check what it accepts"
        imported = replace(imported, notes=(*imported.notes, said))
    imported.drafter(str(folder))
    return imported


def chain_of(imported: Imported) -> int:
    """The tokens of the chain that it drafts until it is calibrated."""
    c = imported.config
    return c.parallel or _CHAIN if isinstance(c, EagleConfig) else c.num_draft_heads


def write_imported(
    out: Path, imported: Imported, target: Target, folder: Path, name: str, revision: str | None, command: str
) -> None:
    """Write a drafter's folder of ours, with a chain as its tree.
    ``folder``, ``name``, ``revision``: of the published drafter. ``command``: what provenance.json records.
    Raises OSError: the disk is full, or it cannot be written."""
    facts = provenance(
        imported_from=name if is_hub_id(name) else folder.resolve().name,
        revision=revision,
        licence=stated_licence(name, revision),
        notes="; ".join(imported.notes),
        command=command,
    )
    template = "".join(read_text(file, "chat template") for file in _templates(folder)) or None
    write_drafter(out, imported.drafter_type, imported.config.to_dict(), imported.weights, target, facts, template)
    paths = [[0] * length for length in range(1, chain_of(imported) + 1)]
    write_json(out / "tree.json", {"paths": paths})


def _templates(folder: Path) -> list[Path]:
    """The chat template that a drafter was trained with, one file or none: models/export.py writes it, others may have
    copied a tokenizer's files."""
    return list(folder.glob(TEMPLATE)) if exported(folder) else []


def convert_if_published(
    name: str, target: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> ModelFolder:
    """A drafter's folder; of a published drafter the converted copy, made now if need be (one line on stderr).
    ``target``: its target; what its folder says if left out. ``revision``, ``trust_remote_code``: of the target.
    Raises FileNotFoundError, ValueError: drafter or target is missing, damaged or of an unknown form, they do not
    belong together, or the drafter is pickled. OSError: the cache cannot be written."""
    drafter = locate(name)
    if not is_published(drafter):
        return drafter
    folder, stated = drafter.path, published_target(drafter, target)
    command = f"python models/import_drafter.py {drafter.name} --target {stated} --out runs/NAME"
    try:
        files = published_files(folder)
    except FileNotFoundError as error:  # a Medusa repository's pickle is not downloaded
        raise FileNotFoundError(f"{error}; pickled ones are read by: {command} --allow-pickle") from None
    if any(file.suffix != ".safetensors" for file in files):
        raise ValueError(f"{files[0]}: pickled weights, which this reads as tensors only: {command} --allow-pickle")
    model = locate(stated, revision)
    key = {
        "sha256": {file.name: known_sha256(file) for file in (folder / "config.json", *files, *_templates(folder))},
        "target": fingerprint(model.path),
        "rules": _RULES,
    }
    copy = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    plan = partial(_plan, drafter, model, trust_remote_code, command)
    return ModelFolder(drafter.name, cached_copy("drafters", copy, folder, key, plan, "config.json", "tree.json"))


def _plan(drafter: ModelFolder, target: ModelFolder, trust_remote_code: bool, command: str, copy: Path) -> Conversion:
    folder, loaded = drafter.path, load_stored(target, trust_remote_code=trust_remote_code)
    imported = read_published(folder, loaded)
    announcement = (
        f"{folder}: a published drafter ({imported.drafter_type}), converted once for '{target.name}' in {copy}"
        f"{''.join(f'; {note}' for note in imported.notes)}; it drafts a chain of {chain_of(imported)} until calibrated"
    )

    def write(copy: Path) -> None:
        write_imported(copy, imported, loaded, folder, drafter.name, None, command)

    return Conversion(sum(weight.nbytes for weight in imported.weights.values()), announcement, write)
