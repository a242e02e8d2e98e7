"""Figures of each prompt and of each timed group in a report, by which two reports are paired. Light to import."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.inference.engine.engine import Generation
    from draftsmith.inference.measure.timing import Timed

MIN_PAIRS = 5  # timed groups, or prompts, without which a figure has no 95 % interval
Columns = dict[Any, list[float]]  # by prompt or group: amounts of A, then those of B


def paired_fields(
    prompts: Sequence[Sequence[int]],
    kinds: Sequence[str | None],
    results: Sequence["Generation"],
    timed: "Timed",
    bases: Mapping[str, "Timed"],
    counted: Collection[int],
) -> dict[str, Any]:
    """The report's fields ``per_prompt`` and ``per_group``: lists with a value for each prompt, or each timed group.

    A prompt is named by 12 digits of the SHA-256 of its token ids. Its τ is ``committed_tokens`` by ``steps``. Its
    ``group`` is None if it was not timed. Steps of prompts that are not ``counted`` are none.
    """
    accepted = [result.accepted if number in counted else [] for number, result in enumerate(results)]
    group_of = {prompt: number for number, group in enumerate(timed.groups) for prompt in group}

    def amounts(method: "Timed") -> dict[str, Any]:
        return {"new_tokens": method.tokens, "seconds": [round(seconds, 6) for seconds in method.typical_seconds]}

    return {
        "per_prompt": {
            "prompt": [hashlib.sha256(str([*prompt]).encode()).hexdigest()[:12] for prompt in prompts],
            "kind": [*kinds] or [None] * len(prompts),
            "new_tokens": [len(result.tokens) for result in results],
            "committed_tokens": [sum(lengths) for lengths in accepted],
            "steps": [len(lengths) for lengths in accepted],
            "group": [group_of.get(number) for number in range(len(prompts))],
        },
        "per_group": {**amounts(timed), "baselines": {base: amounts(other) for base, other in bases.items()}},
    }


def keys_of(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The name of each prompt, with its number among equal ones."""
    seen = Counter[str]()
    keys: list[tuple[str, int]] = []
    for name in report["per_prompt"]["prompt"]:
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def pair_prompts(reports: Sequence[Mapping[str, Any]]) -> Columns:
    """Committed tokens and steps of each prompt with steps in all reports, by its key."""
    amounts: list[Columns] = []
    for report in reports:
        of = report["per_prompt"]
        rows = zip(keys_of(report), of["committed_tokens"], of["steps"], strict=True)
        amounts.append({key: [tokens, steps] for key, tokens, steps in rows if steps})
    return _joined(amounts)


def pair_groups(reports: Sequence[Mapping[str, Any]], base: str | None = None) -> Columns:
    """New tokens and seconds of each group of the same prompts that all reports timed, by the keys of its prompts; with
    a baseline that one's tokens and seconds after them."""
    amounts: list[Columns] = []
    for report in reports:
        groups: dict[int, list[tuple[str, int]]] = {}
        for key, number in zip(keys_of(report), report["per_prompt"]["group"], strict=True):
            if number is not None:
                groups.setdefault(number, []).append(key)
        methods = [report["per_group"]] + ([report["per_group"]["baselines"][base]] if base else [])
        columns = [method[field] for method in methods for field in ("new_tokens", "seconds")]
        amounts.append({tuple(sorted(keys)): [column[n] for column in columns] for n, keys in groups.items()})
    return _joined(amounts)


def _joined(amounts: Sequence[Columns]) -> Columns:
    common = [key for key in amounts[0] if all(key in each for each in amounts)]
    return {key: [amount for each in amounts for amount in each[key]] for key in common}
