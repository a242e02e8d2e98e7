"""What a drafter's folder says of its training: tokens, time, device. Light to import."""

from pathlib import Path
from typing import Any

from draftsmith.common.files import object_or_empty


def training_of(folder: Path) -> dict[str, Any]:
    """What the report's field ``training`` says of a drafter; figures that its folder does not hold are None.

    answer_tokens: distinct ones that training predicts, the labels of its data.
    labels_seen: the same, those of a row again each time it came.
    seconds: of the steps, without evaluations.
    steps, device: of the training.
    init_from: the drafter that it began with, whose own training is not in these figures.
    """
    facts = object_or_empty(folder / "provenance.json")
    labels = facts.get("data_labels") or []
    known = labels and all(isinstance(each, int) for each in labels)
    return {
        "answer_tokens": sum(labels) if known else None,
        "labels_seen": facts.get("labels_seen"),
        "seconds": facts.get("training_seconds"),
        "steps": facts.get("steps"),
        "device": facts.get("device"),
        "init_from": facts.get("init_from"),
    }
