"""An ensemble of small speculative models (SSMs, SpecInfer, arXiv 2305.09781 §3): each drafts a tree of its own, and
the trees are merged.

An SSM drafts its tree level by level, a forward pass for each level, so that a less deep tree may be faster than the
one that accepts most: calibration weighs both.

Shape letters: S sequences, T tokens, K depths, n SSMs, A answers, D draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.inference.drafters.draft_model import DraftModelDrafter, check_vocabulary, say_positions
from draftsmith.inference.drafters.family import Loader
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.verify.tree import Topology, read_trees
from draftsmith.models.target import Target, load_target
from draftsmith.models.vocabulary import check_draft_vocab

HAS_TREE = True


def check_config(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless an ensemble's own fields are right, and its weights those that the config promises."""
    file = folder / "config.json"

    def check(field: str, what: str, fits: bool) -> None:
        if not fits:
            raise ValueError(f"{file}: field '{field}' is {config.get(field)!r}; it has to be {what}")

    def is_count(value: Any) -> bool:
        return type(value) is int and value >= 1

    count, size, parts = config.get("num_ssms"), config.get("draft_vocab_size"), config.get("parts", [])
    check("num_ssms", "a number of SSMs", is_count(count))
    check("parts", f"{count} folders, one for each SSM", len(parts) == count)
    check("vocab_size", "the size of the target's vocabulary", is_count(config.get("vocab_size")))
    check("draft_vocab_size", "a number of tokens, or null", size is None or is_count(size))
    check("mark_tokens", "a number of tokens", is_count(config.get("mark_tokens")))
    assert count is not None
    check("coverage", f"{count} shares", _are_shares(config.get("coverage"), count))
    overlaps = config.get("overlap")
    square = isinstance(overlaps, list) and len(overlaps) == count and all(_are_shares(row, count) for row in overlaps)
    check("overlap", f"{count} × {count} shares", square)
    expected = [] if size is None else ["draft_vocab"]
    if sorted(weights) != expected:
        raise ValueError(
            f"{folder}/model.safetensors: holds {sorted(weights)}; draft_vocab_size={size} needs {expected}"
        )
    if size is not None:
        check_draft_vocab(weights["draft_vocab"], size, config["vocab_size"], f"{folder}/model.safetensors")


def _are_shares(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(v) in (int, float) for v in value)


@dataclass(frozen=True)
class Ensemble:
    """A loaded ensemble."""

    models: dict[str, Target]  # its SSMs by the names of their folders
    draft_vocab: Tensor | None  # [D] int64 ids that they draft; None for the whole vocabulary
    mark_tokens: int  # first tokens of an answer by which training marked it
    _first: dict[str, DraftModelDrafter] = field(default_factory=dict)  # by SSM: the LM head's rows are copied once

    def drafter(self, part: str, target: Target, tree: Sequence[int] | Topology, **options: Any) -> DraftModelDrafter:
        """The drafter of one SSM; ``options`` are those of :meth:`DraftModelDrafter.with_tree`."""
        if part not in self._first:
            self._first[part] = DraftModelDrafter(self.models[part], target, (1,), draft_vocab=self.draft_vocab)
        return self._first[part].with_tree(tree, **options)


def load_ensemble(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: Target,
    parts: Sequence[str] | None = None,
    trust_remote_code: bool = False,
) -> Ensemble:
    """The SSMs of a checked folder (:func:`check_config`), or those in ``parts``, on the target's device and in its
    dtype."""
    models: dict[str, Target] = {}
    ids = weights["draft_vocab"].long().to(target.device) if "draft_vocab" in weights else None
    device, dtype = str(target.device), str(target.dtype).removeprefix("torch.")
    for part in config["parts"] if parts is None else parts:
        model = load_target(str(folder / part), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        models[part] = model
        check_vocabulary(model, target)
        say_positions(model, target)
        if ids is not None and int(ids[-1]) >= model.vocab_size:
            raise ValueError(
                f"{folder}/model.safetensors: 'draft_vocab' holds ids up to {int(ids[-1])}; '{part}' has a vocabulary "
                f"of {model.vocab_size}"
            )
    return Ensemble(models, ids, config["mark_tokens"])


# ---- the family, as inference/drafters/family.py describes it


def open_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tree: Path | None, merged: bool
) -> Loader:
    """The SSMs and their trees, checked against each other. An SSM whose tree is empty is not loaded."""
    assert tree is not None
    check_config(folder, config, weights)
    trees = read_trees(tree, config["num_ssms"])
    outputs = config.get("draft_vocab_size") or config["vocab_size"]
    deepest = max(topology.max_rank for topology in trees)
    if deepest >= outputs:
        raise ValueError(f"{tree}: the tree asks for rank {deepest} of a vocabulary of {outputs}")
    topologies = {part: topology for part, topology in zip(config["parts"], trees, strict=True) if topology.paths}

    def build(target: Target, options: dict[str, Any]) -> Mapping[str, Drafter]:
        remote = options.get("trust_remote_code", False)
        ensemble = load_ensemble(folder, config, weights, target, list(topologies), remote)
        return {part: ensemble.drafter(part, target, topology) for part, topology in topologies.items()}

    return Loader(build)


def report_fields(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The field ``ssm``: how many of the held-out answers the first s SSMs reproduce, and how many two of them do, as
    training measured it."""
    return {"ssm": {name: config.get(name) for name in ("coverage", "overlap", "mark_tokens")}}
