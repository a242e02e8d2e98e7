"""What a drafter's folder says of its training: tokens, time, device. Light to import."""

import contextlib
from pathlib import Path
from typing import Any

import yaml

from draftsmith.common.files import object_or_empty, parse_json, read_text


def training_of(folder: Path) -> dict[str, Any]:
    """What the report's field ``training`` says of a drafter; figures that its folder does not hold are None.

    answer_tokens: distinct ones that training predicts, the labels of its data.
    labels_seen: the same, those of a row again each time it came.
    seconds: of the steps, without evaluations; of a folder whose ``provenance.json`` has none, from ``metrics.jsonl``.
    steps, device: of the training.
    init_from: the drafter that it began with, whose own training is not in these figures.
    """
    facts = object_or_empty(folder / "provenance.json")
    labels = facts.get("data_labels") or []
    known = labels and all(isinstance(each, int) for each in labels)
    seconds = facts.get("training_seconds")
    return {
        "answer_tokens": sum(labels) if known else None,
        "labels_seen": facts.get("labels_seen"),
        "seconds": _seconds(folder) if seconds is None else seconds,
        "steps": facts.get("steps"),
        "device": facts.get("device"),
        "init_from": facts.get("init_from"),
    }


def _seconds(folder: Path) -> float | None:
    """Seconds of training from the speeds in ``metrics.jsonl``; None where the tokens of a step are not known: its rows
    are not packed, or there are several stages."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, yaml.YAMLError, ZeroDivisionError):
        recipe = yaml.safe_load(read_text(folder / "recipe.yaml"))
        (stage,), data = recipe["stages"], recipe["data"]
        if not data["packing"]:
            return None
        of_step, before, seconds = stage["batch"]["sequences"] * data["max_length"], 0, 0.0
        for line in read_text(folder / "metrics.jsonl").splitlines():
            found = parse_json(line, "metrics.jsonl")
            if "tokens_per_second" in found:
                seconds += (found["step"] - before) * of_step / found["tokens_per_second"]
                before = found["step"]
        return round(seconds, 1) if before else None
    return None
