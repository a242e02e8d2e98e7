"""A published drafter's folder as one of ours: read, written, and kept as a converted copy in the cache.

A copy is a folder of the cache, named by the SHA-256 of the published files and the target's fingerprint: a drafter is
converted once for each target. calibrate.py writes its tree there.
"""

import functools
import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from draftsmith.common.files import file_sha256, json_object, locked, read_text, write_json
from draftsmith.models import stored
from draftsmith.models.artifact import TEMPLATE, provenance, write_drafter
from draftsmith.models.card import is_hub_id, stated_licence
from draftsmith.models.medusa import MedusaConfig
from draftsmith.models.precision import DTYPES
from draftsmith.models.serving.published import Imported, TargetInfo, convert
from draftsmith.models.stored import config_of, published_files, published_tensors, resolve_folder, stored_dtype
from draftsmith.models.target import Target, load_target

_RULES = 1  # of this conversion: a copy made by others is made anew
_CHAIN = 3  # tokens of an EAGLE drafter's chain until it is calibrated


def load_stored(
    name: str, revision: str | None = None, trust_remote_code: bool = False, dtype: str | None = None
) -> Target:
    """A target on the CPU, in the dtype that it is stored in unless another is given.
    Raises FileNotFoundError, ValueError: as load_target."""
    dtype = dtype or stored_dtype(resolve_folder(name, revision))
    dtype = dtype if dtype in DTYPES else "float32"
    return load_target(name, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code)


def read_published(folder: Path, target: Target, pickles: bool = False) -> Imported:
    """Read a published drafter's folder and convert it for a target.
    Raises FileNotFoundError, ValueError: it is missing, damaged, of an unknown form, or of another target."""
    config, tensors = config_of(folder), published_tensors(folder, pickles)
    try:
        imported = convert(config, tensors, TargetInfo.of(target))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    wanted = str(stored.exported(folder).get("target_fingerprint") or "")
    if wanted and not target.is_known_as(wanted):
        said = (
            f"it was exported for a target with {stored.difference(wanted, target.fingerprint)}: check what it accepts"
        )
        imported = replace(imported, notes=(*imported.notes, said))
    imported.drafter(str(folder))
    return imported


def chain_of(imported: Imported) -> int:
    """The tokens of the chain that it drafts until it is calibrated."""
    return imported.config.num_draft_heads if isinstance(imported.config, MedusaConfig) else _CHAIN


def write_imported(
    out: Path, imported: Imported, target: Target, folder: Path, name: str, revision: str | None, command: str
) -> None:
    """Write a drafter's folder of ours, with a chain as its tree.
    ``folder``, ``name``, ``revision``: of the published drafter. ``command``: what provenance.json records.
    Raises OSError: the disk is full, or it cannot be written."""
    facts = provenance(
        imported_from=name if is_hub_id(name) else folder.resolve().name,
        revision=revision,
        licence=stated_licence(name),
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
    return list(folder.glob(TEMPLATE)) if stored.exported(folder) else []


def as_ours(
    name: str, target: str | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> str:
    """The name itself, or that of the converted copy of a published drafter, made now if need be (one line on stderr).
    ``target``: its target; what its folder says if left out. ``revision``, ``trust_remote_code``: of the target.
    Raises FileNotFoundError, ValueError: drafter or target is missing, damaged or of an unknown form, they do not
    belong together, or the drafter is pickled. OSError: the cache cannot be written."""
    folder = resolve_folder(name)
    config = stored.published_config(folder)
    if config is None:
        return name
    target = stored.published_target(folder, config, target, name)
    command = f"python models/import_drafter.py {name} --target {target} --out runs/NAME"
    try:
        files = published_files(folder)
    except FileNotFoundError as error:  # a Medusa repository's pickle is not downloaded
        raise FileNotFoundError(f"{error}; pickled ones are read by: {command} --allow-pickle") from None
    if any(file.suffix != ".safetensors" for file in files):
        raise ValueError(f"{files[0]}: pickled weights, which this reads as tensors only: {command} --allow-pickle")
    made = {
        "sha256": {
            file.name: _sha256(file.resolve()) for file in (folder / "config.json", *files, *_templates(folder))
        },
        "target": stored.fingerprint(resolve_folder(target, revision)),
        "rules": _RULES,
    }
    cache = stored.conversions("drafters")
    copy = cache / hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()
    if not _is_whole(copy, made):
        with locked(cache / f"{copy.name}.lock"):
            if not _is_whole(copy, made):  # another process may have made it meanwhile
                loaded = load_stored(target, revision, trust_remote_code)
                imported = read_published(folder, loaded)
                size = sum(weight.nbytes for weight in imported.weights.values())
                notes = "".join(f"; {note}" for note in imported.notes)
                announcement = (
                    f"{folder}: a published drafter ({imported.drafter_type}), converted once for '{target}' in {copy}"
                    f"{notes}; it drafts a chain of {chain_of(imported)} until calibrated"
                )
                with stored.converting(copy, size, folder, announcement):
                    write_imported(copy, imported, loaded, folder, name, None, command)
                    write_json(copy / stored.STAMP, made)
    return str(copy)


@functools.cache
def _sha256_at(file: Path, size: int, modified: int) -> str:
    return file_sha256(file)


def _sha256(file: Path) -> str:
    """SHA-256 of a file, computed once in a process unless its size or its time of modification changes."""
    facts = file.stat()
    return _sha256_at(file, facts.st_size, facts.st_mtime_ns)


def _is_whole(copy: Path, made: dict[str, object]) -> bool:
    """Whether a copy was made of these files by these rules and is still complete; its stamp is written last."""
    with suppress(OSError, ValueError):
        whole = all((copy / name).exists() for name in ("config.json", "tree.json"))
        return whole and json_object(copy / stored.STAMP) == made and bool(stored.check_safetensors(copy))
    return False
