"""Calibrate a drafter: count its ranks on a text, choose a tree, write tree.json.

Shape letters: S sequences, T tokens, K depths (draft heads), n drafters of an ensemble (1 of any other).
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.common.files import cached_about, locked, object_or_empty, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.runner import find_lean
from draftsmith.inference.measure import tree_search
from draftsmith.inference.measure.step_costs import StepCosts, step_costs
from draftsmith.inference.measure.tree_search import (
    COMPARED_TOKENS,
    Candidate,
    ComparedTree,
    Watch,
    candidates_of,
    compare_dynamic,
    fastest,
    nodes_of,
    trees_by_size,
)
from draftsmith.inference.measure.tree_statistics import head_facts, in_batches, simulate_ensemble
from draftsmith.inference.verify.tree import chain
from draftsmith.models.artifact import device_name
from draftsmith.models.card import of_other_weights, weights_sha256
from draftsmith.models.files.weights import read_tensors
from draftsmith.models.target import Target

if TYPE_CHECKING:
    from draftsmith.inference.measure.calibrations import Calibration

FEW_POSITIONS = 500  # with fewer, no tree is replaced that was calibrated on more
MAX_POSITIONS = 8192  # at which ranks are counted
DYNAMIC = 0.3  # share of the time in which dynamic trees are compared; setting them up may take as long again
FASTER = 1.02  # a dynamic tree is taken if it is so many times as fast as the fixed one
AT_LOAD_NODES = 32  # of a dynamic tree from whose nodes each step takes those that pay, at least
COMPARED_PROMPTS = 32  # at most
MAX_ROWS = 16  # per batch
COMPARED_CONTEXT = 256  # tokens of a prompt, at most


@dataclass(frozen=True)
class Settings:
    """How a drafter is calibrated; the fields are options of inference/calibrate.py. lean: of its ``--decoder``."""

    nodes: int | None
    max_new_tokens: int
    seconds: float
    lean: bool | None


class _Progress:
    """The time since calibrating began, on a progress bar."""

    def __init__(self, seconds: float, advance: Callable[..., None]) -> None:
        self.seconds, self.advance = seconds, advance
        self.began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def show(self, *_: object) -> None:
        self.advance(min(int(self.elapsed), math.ceil(self.seconds)))

    def watch(self, seconds: float) -> Watch:
        """Of a part, whose setting up may take as long."""

        def show(note: str) -> None:
            self.advance(int(min(self.elapsed - watch.set_up, self.seconds)), note)

        watch = Watch(seconds, seconds, show)
        return watch


@dataclass(frozen=True)
class _Text:
    """What a drafter was calibrated on: ``tokens, supervised [S, T]``, and its ``ranks [S, T, n, K]`` there."""

    tokens: Tensor
    supervised: Tensor
    ranks: Tensor


def batches(count: int, rows: int, until: float, clock: Callable[[], float] = time.monotonic) -> Iterator[slice]:
    """Slices of ``range(count)`` until the time ``until``.

    The first has ``rows`` rows; each later one up to :data:`MAX_ROWS`, as many as fit into the remaining time at the
    speed with which the caller processed the slice before.
    """
    begin = 0
    while rows > 0 and begin < count:
        since, end = clock(), min(begin + rows, count)
        yield slice(begin, end)
        now = clock()
        fit = (until - now) / max(now - since, 1e-9) * (end - begin)
        begin, rows = end, int(min(max(2 * rows, 1), MAX_ROWS, max(0.0, fit)))


def timing_prompts(tokens: Tensor, supervised: Tensor, count: int) -> list[list[int]]:
    """Up to ``count`` prompts from rows spread over the text ``[S, T]``.

    Each is the part of a row before its first answer. If every row with an answer is supervised from its first token,
    as documents are, it is the first half of the row. Rows without an answer give none.
    """
    labelled = [row for row in range(len(tokens)) if supervised[row].any()]
    rows = [row for row in labelled if not supervised[row, 0]] or labelled
    prompts: list[list[int]] = []
    for row in rows[:: max(1, -(-len(rows) // count))]:
        answers = supervised[row].nonzero().flatten()
        begin, end = int(answers[0]), int(answers[-1]) + 1
        prompts.append(tokens[row][: begin or -(-end // 2)].tolist())
    return prompts


def joined(parts: Sequence[dict[str, Tensor]], name: str, padding: int = 0) -> Tensor:
    """Concatenate a tensor ``[S, T, …]`` of all parts, padded to the longest T."""
    return pad_sequence([row for part in parts for row in part[name]], batch_first=True, padding_value=padding)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other command calibrates this drafter. Refuses, by a ValueError, one that another command calibrates,
    or whose run it is writing: the drafter would not fit the tree."""
    own = cached_about("calibrating", folder)
    try:
        if (folder / ".lock").exists():
            with locked(folder / ".lock", wait=False):
                pass
        own.parent.mkdir(parents=True, exist_ok=True)
        with locked(own, wait=False):
            yield
    except Timeout:
        raise ValueError(f"{folder}: another command is working in this run; wait until it has ended") from None


def check_enough(folder: Path, positions: int) -> None:
    """Raises ValueError: the tree that is there was calibrated on more positions than these few, with these weights."""
    there = object_or_empty(folder / "tree.json").get("calibration") or {}
    before = 0 if of_other_weights(folder, there) else there.get("positions", 0)
    if positions < min(FEW_POSITIONS, before):
        raise ValueError(
            f"{folder}: {positions:,} positions say too little; tree.json, calibrated on {before:,}, is kept. Give "
            "more prompts, longer answers (--max-new-tokens) or more --seconds, or delete it"
        )


def read_held_out(folder: Path) -> dict[str, Tensor]:
    """A run's held-out rows: ``tokens``, ``supervised`` ``[S, T]``, at least one with an answer.
    Raises FileNotFoundError, ValueError: there are none, or the file is damaged."""
    stored, instead = folder / "held_out" / "model.safetensors", "pass --prompts FILE.jsonl to calibrate on"
    if not stored.exists():
        raise FileNotFoundError(f"{folder}: holds no held-out rows; {instead}")
    data = read_tensors(stored.parent, [stored])
    if not {"tokens", "supervised"} <= data.keys():
        raise ValueError(f"{stored}: not the held-out rows of a run; {instead}")
    if not data["supervised"].any():
        raise ValueError(f"{folder}: no held-out row has an answer; {instead}")
    return data


def positions_of(ranks: Tensor) -> int:
    """Number of positions of ``[S, T, n, K]`` at which a step begins."""
    return int((ranks[:, :, 0, 0] >= 0).sum())


def print_candidates(candidates: Sequence[Candidate], costs: StepCosts, compared: Sequence[ComparedTree]) -> None:
    """Tables of the trees that were compared, to stdout."""
    print("  nodes  depth  expected τ  estimated ms/step  expected speed-up")
    for c in candidates:
        milliseconds = c.cost * costs.plain_seconds * 1e3
        print(f"  {c.nodes:5d}  {c.depth:5d}  {c.tau:10.2f}  {milliseconds:17.2f}  {c.speedup:17.2f}")
    if compared:
        print("  dynamic trees beside the fastest of these")
        print("  top_k  depth  nodes     τ  speed-up over it")
    for c in compared:
        print(f"  {c.shape.top_k:5d}  {c.shape.depth:5d}  {c.shape.nodes:5d}  {c.tau:4.2f}  {c.speed:16.2f}")


def calibrate(
    folder: Path,
    drafter: "Calibration",
    target: Target,
    texts: Sequence[list[int]],
    data: dict[str, Tensor],
    settings: Settings,
) -> tuple[Candidate, list[ComparedTree]]:
    """Measure a drafter's acceptance, and write its tree: for draft heads the nodes from which each step takes those
    that pay, for other drafters the tree with the most expected tokens per estimated time of a step.

    Args:
        folder: of the drafter.
        texts: prompts, by whose answers it is calibrated; if there are none, by ``data``, of :func:`read_held_out`.

    Returns:
        The fastest fixed tree by the estimate, and the dynamic ones beside it.

    Raises:
        ValueError: the text has too few positions.
    """
    rows = list(range(len(texts))) or data["supervised"].any(1).nonzero().flatten().tolist()
    random.Random(0).shuffle(rows)
    if data:  # the longest answer first: where the first one takes all the time, there are positions to count on
        rows.insert(0, rows.pop(max(range(len(rows)), key=lambda at: int(data["supervised"][rows[at]].sum()))))
    decoding = None if settings.nodes else drafter.decoding
    interrupted: KeyboardInterrupt | None = None
    limit = f"calibrating: at most {settings.seconds:.0f} s from here on"
    console.print(limit + (", and the time to set up decoders for dynamic trees" if decoding else ""), markup=False)
    with ProgressBar("calibrating (s)", math.ceil(settings.seconds), console, transient=True) as advance:
        progress = _Progress(settings.seconds, advance)
        text = _count_ranks(drafter, target, texts, data, rows, settings, progress, 1 - DYNAMIC if decoding else 1.0)
        check_enough(folder, positions_of(text.ranks))
        seconds = {"ranking": progress.elapsed}
        costs = step_costs(target, settings.lean)
        sizes = (settings.nodes,) if settings.nodes else tree_search.SIZES
        step_time = drafter.step_time and drafter.step_time(target, costs)
        beyond = drafter.pass_time(target, costs) if drafter.pass_time else 0.0
        candidates = candidates_of(text.ranks, sizes, costs, step_time, len(sizes) > 1, beyond)
        chosen, compared = fastest(candidates), list[ComparedTree]()
        try:
            if decoding:
                watch = progress.watch(max(settings.seconds - progress.elapsed, DYNAMIC * settings.seconds))
                shapes = [shape for shape in tree_search.SHAPES if shape.top_k <= drafter.widest]
                trees = [decoding(target, tree) for tree in (chosen.trees[0], *shapes)]
                # The context has room for the tokens that are compared.
                length = max(1, min(COMPARED_CONTEXT, target.context - COMPARED_TOKENS))
                prompts = timing_prompts(text.tokens, text.supervised, COMPARED_PROMPTS)
                starts = [prompt[-length:] for prompt in prompts]
                compared = compare_dynamic(target, trees, starts, watch, settings.lean)
                seconds |= {"set_up": watch.set_up, "timing": watch.elapsed}
            elif drafter.dynamic and not settings.nodes:
                compared = drafter.dynamic(target, chosen, costs)
        except KeyboardInterrupt as stop:  # the fixed tree is written first: it must not be lost
            interrupted = stop
    text_of = "the target's answers to the prompts" if texts else "held-out rows"
    print(f"calibrated on {positions_of(text.ranks):,} positions of {text_of} ({seconds['ranking']:.0f} s)")
    print_candidates(candidates, costs, compared)
    if (decoding or interrupted) and not compared:
        why = "it was interrupted" if interrupted else "the time was too short; give more --seconds"
        print(f"dynamic trees were not compared with it: {why}")
    calibration = {
        "seconds": {name: round(spent, 2) for name, spent in seconds.items()},
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "decoder": "transformers" if isinstance(find_lean(target, settings.lean), str) else "lean",
        "sizes": [
            {"nodes": c.nodes, "depth": c.depth, "tau": round(c.tau, 4), "speedup": round(c.speedup, 4)}
            | {"seconds_per_step": c.cost * costs.plain_seconds}
            for c in candidates
        ],
    }
    at_load = settings.nodes is None and drafter.step_time is None
    _write_tree(folder, drafter, text, chosen, compared, calibration, at_load)
    if interrupted:
        raise interrupted
    return chosen, compared


def _count_ranks(
    drafter: "Calibration",
    target: Target,
    texts: Sequence[list[int]],
    data: dict[str, Tensor],
    rows: Sequence[int],
    settings: Settings,
    progress: _Progress,
    share: float,
) -> _Text:
    """Have the target answer the prompts ``texts``, or take the rows of ``data``, as many as a share of the time
    allows; and count the drafter's ranks there. ``rows``: the numbers of the texts, in the order in which they are
    taken."""
    parts: list[dict[str, Tensor]] = []
    for part in batches(len(rows), 8 if texts else 1, progress.began + share * settings.seconds):
        taken = rows[part]
        if texts:
            asked = [texts[row] for row in taken]
            batch = answer(target, asked, settings.max_new_tokens, 32, progress.show, settings.lean)
        else:
            batch = {name: data[name][taken] for name in ("tokens", "supervised")}
        ranks = in_batches(partial(drafter.ranks, target), batch["tokens"], batch["supervised"])
        parts.append({**batch, "ranks": ranks[:, :, None] if ranks.dim() == 3 else ranks})
        progress.show()
        if sum(positions_of(done["ranks"]) for done in parts) >= MAX_POSITIONS:
            break
    return _Text(joined(parts, "tokens"), joined(parts, "supervised"), joined(parts, "ranks", -1))


def fastest_dynamic(compared: Sequence[ComparedTree]) -> ComparedTree | None:
    """The fastest dynamic tree, if it is faster than the fixed one."""
    best = max(compared, key=lambda each: each.speed, default=None)
    return best if best is not None and best.speed > FASTER else None


def _write_tree(
    folder: Path,
    drafter: "Calibration",
    text: _Text,
    chosen: Candidate,
    compared: Sequence[ComparedTree],
    calibration: dict[str, Any],
    at_load: bool,
) -> None:
    """Write tree.json, and say what it holds. ``at_load``: the nodes to choose from, instead of the chosen tree."""
    ranks = text.ranks
    chain_tau = simulate_ensemble([chain(drafter.max_depth)] * ranks.shape[2], ranks)
    facts = (drafter.facts or head_facts)(ranks)
    calibration = {
        "weights_sha256": weights_sha256(folder),
        "positions": positions_of(ranks),
        "expected_mean_accepted_length": round(chosen.tau, 4),
        "chain_mean_accepted_length": round(chain_tau, 4),
        **facts,
        **calibration,
    }
    if compared:
        calibration["dynamic"] = [
            {**asdict(c.shape), "tau": round(c.tau, 4), "speedup_over_fixed": round(c.speed, 4)} for c in compared
        ]
    stored: dict[str, Any] = {}
    faster = fastest_dynamic(compared)
    if faster is not None:
        shape = faster.shape
        if at_load:
            shape = replace(shape, nodes=min(max(shape.nodes, AT_LOAD_NODES), shape.candidates))
        stored["dynamic"] = asdict(shape)
        if faster.confidence is not None:
            stored["confidence"] = asdict(faster.confidence)
    if at_load and (known := facts.get("candidates")):  # none, if no draft was right
        by_size = trees_by_size(ranks, [size for size in tree_search.SIZES if size <= len(known) + 1])
        taus = {nodes_of(trees): round(simulate_ensemble(trees, ranks), 4) for trees in by_size}
        calibration["mean_accepted_length_by_nodes"] = taus
        paths = [one["path"] for one in known]
        write_json(folder / "tree.json", {"paths": paths, "at_load": True, **stored, "calibration": calibration})
        print(
            f"{folder / 'tree.json'}: {len(known) + 1} nodes, of which each step takes those that pay; here about "
            f"{chosen.nodes}, expected τ {chosen.tau:.2f} (a chain: {chain_tau:.2f})"
        )
    else:
        paths = [[list(path) for path in tree.paths] for tree in chosen.trees]
        fixed = {"paths": paths[0]} if len(paths) == 1 else {"parts": paths}
        write_json(folder / "tree.json", {**fixed, **stored, "calibration": calibration})
        by_part = f" ({' + '.join(str(len(each)) for each in paths)} beside the root)" if len(paths) > 1 else ""
        print(
            f"{folder / 'tree.json'}: {chosen.nodes} nodes{by_part}, depth {chosen.depth}, "
            f"expected τ {chosen.tau:.2f} (a chain{'' if len(paths) == 1 else ' of each'}: {chain_tau:.2f})"
        )
    if faster is not None:
        print(f"decoding uses a dynamic tree, {faster.speed:.2f} times as fast: {stored['dynamic']}")
