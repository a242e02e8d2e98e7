"""What model cards say: a target by a name that means something elsewhere, its licence, and what was measured.

Nothing here is made up: a Hub id is one that somebody named or that is known for the target's fingerprint, a licence
one that the recipe or the target's own card states, and a measurement one that a file of the drafter's folder holds.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.common.files import file_sha256, object_or_empty
from draftsmith.models.files.locate import FETCHES, gguf_file, local_folder

PLACEHOLDER = "TARGET"
# What models/fetch.py fetches: name, licence and command, by the fingerprint of the GGUF file: that of its weights with
# zeros for the rest; in earlier versions its SHA-256.
_FETCHED = {
    fingerprint: (name, licence, command)
    for name, licence, command, weights, sha256 in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0", "make models",
         "821a02e986fa78e6d403d57f833c4d29549b70aa",
         "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "apache-2.0", "make coder",
         "b50e0d6036a50d389d8493b9b0e6a6c1edf60389",
         "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "apache-2.0", "make coder SIZE=1.5b",
         "751e9c5c7ac17dae520c7720793c05350fbd2da2",
         "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
    )
    for fingerprint in (f"{weights:0<72}", sha256)
}  # fmt: skip
MEASURED = {  # fields of provenance.json
    "simulated_tau": "simulated τ on held-out rows, by the tree that chose the weights",
    "whole_simulated_tau": "the same with the whole vocabulary",
    "kl": "KL divergence of the trained target from the original one, nats per token",
    "original_perplexity": "perplexity of the original target on held-out rows",
    "perplexity": "perplexity of the trained target",
}

# Of provenance.json, in the card of an exported drafter.
TRAINING = ("data", "data_labels", "labels_seen", "steps", "sequences_per_step", "optimizer", "learning_rate", "date")


@dataclass(frozen=True)
class Named:
    """A target as a card shows it.

    name: its Hub id, or what a server calls it, or :data:`PLACEHOLDER`.
    argument: what stands for it in commands; the name, or the placeholder.
    hub_id, licence: None where they are not known.
    about: a space and a sentence on what the placeholder stands for; empty if there is none.
    """

    name: str
    argument: str
    hub_id: str | None
    licence: str | None
    about: str = ""

    def front_matter(self, licence: str | None, tags: str, imported: bool) -> str:
        """The card's metadata, which the Hub reads.
        ``licence``: of the drafter; the target's if None, none if that is unknown too, or others published it."""
        fields = {"license": licence or (None if imported else self.licence), "base_model": self.hub_id}
        lines = [f"{name}: {value}" for name, value in fields.items() if value]
        return "\n".join(["---", "library_name: draftsmith", *lines, f"tags: [speculative-decoding, {tags}]", "---"])

    def licensed(self, licence: str | None, imported: bool) -> str:
        """The paragraph on the licence."""
        if licence:
            return f"Licence: {licence}."
        if imported:
            return "The published drafter states no licence."
        if self.licence:
            return f"Licence: {self.licence}, which is the target's."
        return "No licence was stated in the recipe, and the target's is not known here."


def named(
    name: str, fingerprint: str, model_type: str, served: str | None = None, revision: str | None = None
) -> Named:
    """How a card names a target.
    ``name``, ``revision``: by which it was loaded: a folder, a GGUF file or a Hub id.
    ``fingerprint``: as stored, without an adapter.
    ``served``: what a server loads it by, if that was said."""
    hub_id = next((each for each in (served, name) if each and is_hub_id(each)), None)
    licence = stated_licence(name, revision)
    shown = served if served and not _is_path(served) else hub_id
    if fingerprint in _FETCHED:
        known, licence, command = _FETCHED[fingerprint]
        about = f" {PLACEHOLDER} is the file with its 4-bit weights, dequantised when it is loaded, that draftsmith's "
        about += f"`{command}` fetches (`models/fetch.py`); the weights on the Hub are others."
        return Named(shown or known, shown or PLACEHOLDER, hub_id or known, licence, "" if shown else about)
    if shown:
        return Named(shown, shown, hub_id, licence)
    about = f" {PLACEHOLDER} is the folder or Hub id of that target, a model of the family {model_type}"
    about += f" with the fingerprint `{fingerprint[:16]}…`." if fingerprint else "."
    return Named(PLACEHOLDER, PLACEHOLDER, None, licence, about)


def served_name(name: str, fingerprint: str, served: str | None = None) -> str:
    """What files that leave this machine call a target: a Hub id where one is known, else a folder by its whole path; a
    server looks a relative one up in its own working directory, and then at the Hub.
    Arguments as those of :func:`named`."""
    if served is None and fingerprint in _FETCHED:
        return _FETCHED[fingerprint][0]
    found = local_folder(served or name) or gguf_file(served or name)
    return str(found.resolve()) if found else served or name


def is_hub_id(name: str) -> bool:
    """Whether a name can only be a Hub id: USER/NAME, and nothing on this machine."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name)) and not _is_path(name)


def _is_path(name: str) -> bool:
    path = name.endswith(".gguf") or name.startswith((".", "/", "~")) or name.count("/") > 1
    return path or name.rstrip("/") in FETCHES or local_folder(name) is not None


def stated_licence(name: str, revision: str | None = None) -> str | None:
    """The licence in the metadata of a target's card, in its folder or in the Hub's cache; nothing is downloaded."""
    folder = local_folder(name)
    card = folder / "README.md" if folder else None
    if folder is None and is_hub_id(name):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "README.md", revision=revision)
        card = Path(cached) if isinstance(cached, str) else None
    try:
        text = card.read_text(encoding="utf-8") if card else ""
        begin, _, rest = text.partition("---\n")
        fields = yaml.safe_load(rest.partition("\n---")[0]) if not begin.strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    licence = fields.get("license") if isinstance(fields, dict) else None
    return licence if isinstance(licence, str) and re.fullmatch(r"[\w.+-]+", licence) else None


def table_of(facts: Mapping[str, Any]) -> str:
    """A table of the facts that are known."""
    rows = [f"| {name} | {text} |" for name, value in facts.items() if (text := as_text(value))]
    return "\n".join(["| field | value |", "|---|---|", *rows])


def as_text(value: Any) -> str:
    """A fact as a card has it: a list by semicolons, a number with its thousands, a path of this machine by its name;
    empty if it is unknown."""
    if isinstance(value, (list, tuple)):
        return "; ".join(as_text(each) or "unknown" for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    text = "" if value is None else str(value)
    return text.rpartition("/")[2] if text.startswith(("/", "~")) else text


def weights_sha256(folder: Path) -> str:
    """A hash of a drafter's weights, those of its parts included."""
    parts = object_or_empty(folder / "config.json").get("parts", [])
    files = [file for place in ("", *parts) for file in sorted((folder / place).glob("*.safetensors"))]
    return hashlib.sha256("".join(map(file_sha256, files)).encode()).hexdigest()


def of_other_weights(folder: Path, calibration: Mapping[str, Any]) -> bool:
    """Whether a folder's tree was calibrated with other weights than those that are there. Older trees do not say."""
    return "weights_sha256" in calibration and calibration["weights_sha256"] != weights_sha256(folder)


def measured(folder: Path, facts: Mapping[str, Any] | None = None) -> str:
    """A table of what was measured, from the files of a drafter's folder; a sentence if there is nothing.
    ``facts``: content of provenance.json, if it is not the folder's."""
    facts = object_or_empty(folder / "provenance.json") if facts is None else facts
    rows = [(what, facts[name], _where(facts)) for name, what in MEASURED.items() if _is_number(facts.get(name))]
    tree = object_or_empty(folder / "tree.json")
    counts = [len(paths) for paths in (tree.get("parts") or [tree.get("paths") or []])]
    found = tree.get("calibration")
    calibration = found if isinstance(found, dict) and not of_other_weights(folder, found) else {}
    if any(counts):
        chosen = ", of which some are chosen at load" if tree.get("at_load") else ""
        rows.append(("nodes of the tree beside the root" + chosen, " + ".join(map(str, counts)), _where(calibration)))
    for name, what in (
        ("expected_mean_accepted_length", "τ that calibration expects of the tree"),
        ("chain_mean_accepted_length", "τ that it expects of a chain"),
    ):
        if _is_number(calibration.get(name)):
            rows.append((what, calibration[name], _where(calibration)))
    by_nodes = calibration.get("mean_accepted_length_by_nodes")
    if isinstance(by_nodes, dict):
        shown = ", ".join(f"{nodes}: {tau:.2f}" for nodes, tau in by_nodes.items() if _is_number(tau))
        rows.append(("τ that calibration expects, by nodes", shown, _where(calibration)))
    report = object_or_empty(folder / "report.json")
    if str(report.get("date", "")) >= str(facts.get("date", "")):  # else it is of earlier weights
        rows += _decoded(report, folder)
    if not rows:
        return "Nothing has been measured yet."
    shown = [f"| {what} | {f'{v:.4g}' if _is_number(v) else v} | {where} |" for what, v, where in rows]
    return "\n".join(["| what | value | by |", "|---|---|---|", *shown])


def _decoded(report: Mapping[str, Any], folder: Path) -> list[tuple[str, Any, str]]:
    """Rows of a report of decoding: τ and speed, whole and by kind of text, and whether the text is the target's. What
    another drafter than the folder's did, such as both merged with n-grams, is named."""
    by, rows = f"{report.get('mode')}, {report.get('prompts')} prompts; {_where(report)}", list[tuple[str, Any, str]]()
    name = str(report.get("drafter") or "")
    found, shown = local_folder(name), "+".join(Path(part).name for part in name.split("+"))
    if shown and (found is None or found.resolve() != folder.resolve()):
        by = f"{shown}, {by}"
    for name, what in (
        ("mean_accepted_length", "τ of decoding"),
        ("tokens_per_second", "tokens per second"),
        ("speedup", "speed, as a multiple of plain decoding by the same engine"),
    ):
        if _is_number(report.get(name)):
            rows.append((what, _with_interval(report, name), by))
    kinds = report.get("kinds")
    for kind, figures in kinds.items() if isinstance(kinds, dict) else ():
        if isinstance(figures, dict) and _is_number(figures.get("mean_accepted_length")):
            speed = f"; {_with_interval(figures, 'speedup')} ×" if _is_number(figures.get("speedup")) else ""
            rows.append((f"{kind}: τ; speed", f"{_with_interval(figures, 'mean_accepted_length')}{speed}", by))
    places = report.get("acceptance_per_position")
    if isinstance(places, list) and places and all(map(_is_number, places)):
        rows.append(("steps that accepted at least 1, 2, … tokens", ", ".join(f"{share:.2f}" for share in places), by))
    lossless = report.get("lossless")
    if report.get("mode") == "typical":
        rows.append(("exactness", "lossy: typical acceptance changes the text", by))
    elif isinstance(lossless, dict):
        found = f"{lossless.get('mismatches')} mismatches, {lossless.get('near_ties', 0)} near-ties"
        found = "identical" if lossless.get("identical") else found
        rows.append(("text, compared with plain decoding", f"{found}; {lossless.get('checked')} tokens", by))
    return rows


def _with_interval(figures: Mapping[str, Any], name: str) -> str:
    """A figure, and its interval where there is one."""
    ends: Any = figures.get(f"{name}_interval")
    known = isinstance(ends, list) and len(ends) == 2 and all(map(_is_number, ends))
    return f"{figures[name]:.4g}" + (f" ({ends[0]:.3g}–{ends[1]:.3g})" if known else "")


def with_measured(card: str, folder: Path) -> str:
    """A run folder's card, whose table of what was measured is made anew from the folder's files.
    Raises ValueError: the card has no such part."""
    found = re.search(r"(?<=^## Measured\n\n).*?(?=\n\n## |\Z)", card, re.DOTALL | re.MULTILINE)
    if not found:
        raise ValueError(f"{folder}/README.md: it has no part '## Measured'; it is not the card that training wrote")
    return card[: found.start()] + measured(folder) + card[found.end() :]


def _where(facts: Mapping[str, Any]) -> str:
    """Dtype and device of a measurement, as far as they are recorded."""
    autocast = f"autocast {facts['autocast']}" if facts.get("autocast") not in (None, "none") else None
    found = [f"{facts['dtype']}" if facts.get("dtype") else None, autocast, facts.get("device")]
    return ", ".join(str(each) for each in found if each) or "–"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
