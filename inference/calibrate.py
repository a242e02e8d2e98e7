"""Calibrate a drafter's tree: which rank paths are right on held-out text, and which size is fastest on this device.

    python inference/calibrate.py runs/demo              # writes runs/demo/tree.json
    python inference/calibrate.py runs/demo --nodes 32   # a tree of 32 nodes, whatever it costs here
    python inference/calibrate.py runs/demo --at-load    # for other machines: each chooses the size when it loads it
    python inference/calibrate.py ngram --target models/tiny-lm     # step costs alone, for drafters without a tree

The best tree of each size and its expected tokens per step follow from the ranks that the drafter gives to the true
tokens (inference/drafters/ranks.py); the size written maximises E[tokens] / measured step time. An ensemble has a tree
for each of its models, and each level of a tree costs a forward pass of the model: of every size, the number of models
and the depth with most E[tokens] / estimated time are taken. Both are measured as well as the time given (--seconds)
allows: on rows of the text in a fixed random order, and by steps of trees of all sizes in turn, where sizes that fall
behind are timed no further.

Chains compete with the trees. The candidates are set up (decoders, first steps, CUDA graphs), the ones with most
E[tokens] / estimated time first, as many as can be set up in about the time given and then be timed twice with each in
the rest of it; setting up does not count as timing. If there was no time for two rounds, or for more than one of the
candidates, the estimate chooses: E[tokens] / step time by the target's step costs (inference/engine/costs.py). The
last lines, and `chosen_by` in tree.json, say which it was.

An EAGLE drafter may instead grow a dynamic tree at each step, of the nodes that it then finds likeliest. Some sizes of
it and the fixed tree continue the same texts; the fastest size is written beside the fixed tree if it is faster than
that, and then decodes.

`ngram`, `draft_model:PATH` and merges (`runs/demo+ngram`) choose their nodes step by step, by their own estimates of
acceptance and by what a step costs by its number of rows. These costs are timed at their first use and kept in the
cache folder; calibrating times them again, and calibrates the drafter folder that is part of a merge.

Shape letters: S sequences, T tokens, K depths (draft heads), n drafters of an ensemble (1 of any other).
"""

# ruff: noqa: E402

import argparse
import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.common.command import CommandLine, available_cores, before_imports, run_command
from draftsmith.inference.commands.early import check_prompts
from draftsmith.inference.commands.options import check_counts, check_threads
from draftsmith.inference.drafters.names import check_names, has_folder, parts_of
from draftsmith.models.options import DECODERS, target_arguments, target_options


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", help="a drafter folder, for example runs/demo, or another name that decode.py takes")
    parser.add_argument(
        "--nodes", type=int, help="nodes of the tree, root included; measured on this device if left out"
    )
    parser.add_argument(
        "--at-load",
        action="store_true",
        help="time no step: the nodes are chosen whenever the drafter is loaded, by what steps cost on that machine "
        "(a GPU runs them all)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help='lines of {"prompt": …}, {"messages": …} or {"turns": …} to calibrate on; the run\'s own held-out answers '
        "if left out",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="answer length with --prompts")
    parser.add_argument(
        "--seconds",
        type=float,
        default=45,
        help="time for ranks and timed steps once the target is loaded (default 45); setting up decoders comes on top, "
        "about as long at most",
    )
    target_options(parser)
    parser.add_argument("--threads", type=int, help="CPU threads; all cores if left out")
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: (check_names([args.drafter], args.target), check_prompts(args.prompts)))

import torch
from filelock import Timeout
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.common.files import cached_about, check_folder, json_object, locked, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.prompts import Prompt, encode_prompts, read_prompts
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.dynamic import DynamicShape
from draftsmith.inference.drafters.load import Calibration, family_of, read_named
from draftsmith.inference.drafters.ranks import best_nodes, head_facts, simulate_ensemble, trees_of
from draftsmith.inference.engine.answers import answer
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.inference.engine.costs import StepCosts, step_costs
from draftsmith.inference.engine.engine import Request, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.engine.runner import find_lean
from draftsmith.inference.evaluation.race import TIMED_PROMPTS, Costs, race
from draftsmith.inference.verify.tree import MAX_NODES, Topology, chain
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import device_name, renew_fingerprint
from draftsmith.models.files.weights import read_tensors
from draftsmith.models.precision import say
from draftsmith.models.target import Target, load_target

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
DEPTHS = (1, 2, 4, 6, 8)  # limits of trees whose every level costs a forward pass
SHAPES = (DynamicShape(1, 8, 9), DynamicShape(2, 6, 16), DynamicShape(4, 6, 32), DynamicShape(10, 6, 60))
FEW_POSITIONS = 500  # with fewer, no tree is replaced that was calibrated on more
RANKING, MAX_POSITIONS = 0.4, 8192  # limits of counting ranks: share of the time, positions
DYNAMIC = 0.3  # share of the time, and of that for setting up, in which dynamic trees are compared
WORTH = 0.6  # share of the best estimated speed below which a candidate is not set up
MIN_ROUNDS = TIMED_PROMPTS  # of each candidate: fewer do not choose
GRACE = 1.5  # times the time for timing, which the first rounds may take
COMPARED_PROMPTS, COMPARED_TOKENS = 32, 48  # at most; tokens of each
MAX_ROWS = 16  # per batch
TIMED_TOKENS = 8  # each size decodes τ · TIMED_TOKENS tokens of one prompt per round, so all take as many steps
TIMED_CONTEXT = 256  # tokens of a prompt, at most
TIED = 0.02  # sizes whose speeds differ by less are tied; the smaller one is taken


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


Trees = tuple[Topology, ...]  # of each drafter; their roots are one


def nodes_of(trees: Trees) -> int:
    """Number of nodes of merged trees, if no two of them draft the same tokens."""
    return 1 + sum(len(tree.paths) for tree in trees)


@dataclass(frozen=True)
class Choice:
    """Trees of one size: expected τ, measured seconds per step, and tokens/s over plain decoding."""

    trees: Trees
    tau: float
    seconds: float
    speedup: float

    @property
    def nodes(self) -> int:
        return nodes_of(self.trees)

    @property
    def depth(self) -> int:
        return max(tree.max_depth for tree in self.trees)


def pick(choices: Sequence[Choice]) -> Choice:
    """The smallest tree whose speed is within :data:`TIED` of the highest."""
    best = max(choice.speedup for choice in choices)
    return next(choice for choice in choices if choice.speedup >= (1 - TIED) * best)


def trees_by_size(
    ranks: Tensor, sizes: Sequence[int], step_time: Callable[[Trees], float] | None = None
) -> list[Trees]:
    """The best trees of each size, until the text holds no more paths.

    Args:
        ranks: ``[S, T, n, K]`` of the text.
        sizes: numbers of nodes, rising.
        step_time: time of a step with trees. With it, those of a size have the number of drafters (the first ones; the
            trees of the others are empty) and the depth limit that give the most expected tokens / time among those
            that take no less time than the trees of the smaller size. Without it, the limits are n and K.
    """
    count, deepest = ranks.shape[2:]
    limits = [(count, deepest)]
    if step_time is not None:
        depths = [*(depth for depth in DEPTHS if depth < deepest), deepest]
        limits = list(itertools.product(range(1, count + 1), depths))
    orders = [best_nodes(ranks[:, :, :used, :depth], max(sizes)) for used, depth in limits]
    found: list[Trees] = []
    cost_before = 0.0
    for size in sizes:
        options: list[tuple[float, float, Trees]] = []  # speed, cost, trees
        for nodes in orders:
            trees = trees_of(nodes[: size - 1], count)
            if nodes_of(trees) == 1:  # never right on this text; yet a drafter has a path
                trees = (Topology(((0,),)), *trees[1:])
            tau, cost = (1.0, 1.0) if step_time is None else (simulate_ensemble(trees, ranks), step_time(trees))
            options.append((tau / cost, cost, trees))
        most = max(nodes_of(trees) for _, _, trees in options)
        if found and most == nodes_of(found[-1]):
            break
        options = [option for option in options if nodes_of(option[2]) == most]
        options = [option for option in options if option[1] >= cost_before] or options
        _, cost_before, trees = max(options, key=lambda option: option[0])
        found.append(trees)
    return found


@dataclass(frozen=True)
class Candidate:
    """Trees that may be the fastest: expected τ, and the estimated time of their step in plain steps.

    levels: of each drafter's tree, where each of them takes a forward pass.
    """

    trees: Trees
    tau: float
    cost: float
    levels: tuple[int, ...]

    @property
    def speed(self) -> float:
        return self.tau / self.cost

    def contained_in(self, other: "Candidate") -> bool:
        """Whether its steps cannot cost more than the other's."""
        levels = zip(self.levels, other.levels, strict=True)
        return nodes_of(self.trees) <= nodes_of(other.trees) and all(one <= more for one, more in levels)


def candidates_of(
    ranks: Tensor, sizes: Sequence[int], costs: StepCosts, step_time: Callable[[Trees], float] | None, chains: bool
) -> list[Candidate]:
    """The best trees of each size, and the ``chains`` of each depth, without those that another one surpasses in τ at
    no higher cost; the fewest nodes first. ``step_time``: as :func:`trees_by_size`; without it, a step costs what the
    target's step with that many nodes does."""
    count, deepest = ranks.shape[2:]
    pool = trees_by_size(ranks, sizes, step_time)
    if chains:
        every = itertools.product(range(1, count + 1), range(1, deepest + 1))
        pool += [(*[chain(depth)] * used, *[Topology(())] * (count - used)) for used, depth in every]
    found: list[Candidate] = []
    for trees in pool:
        cost = costs.relative(nodes_of(trees)) if step_time is None else step_time(trees)
        levels = () if step_time is None else tuple(tree.max_depth for tree in trees)
        found.append(Candidate(trees, simulate_ensemble(trees, ranks), cost, levels))
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda one: (-one.tau, nodes_of(one.trees), one.cost)):
        if not any(other.contained_in(each) for other in kept):
            kept.append(each)
    return sorted(kept, key=lambda one: (nodes_of(one.trees), one.cost))


def in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are worth setting up: the one with the highest estimated speed, the best of the chains, then
    by estimated speed."""
    ranked = sorted(candidates, key=lambda each: (-each.speed, nodes_of(each.trees)))
    worth = [each for each in ranked if each.speed >= WORTH * ranked[0].speed]
    chains = [each for each in worth[1:] if all(tree == chain(tree.max_depth) for tree in each.trees)]
    return [worth[0], *chains[:1], *(each for each in worth[1:] if each not in chains[:1])]


class Watch:
    """Time of a part of the calibration, of which setting up is counted by itself.

    Args:
        seconds: that it may take.
        set_up_seconds: that setting up may take, in addition.
        show: called with a note for the progress bar.
    """

    def __init__(
        self,
        seconds: float,
        set_up_seconds: float = math.inf,
        show: Callable[[str], None] = lambda note: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.set_up_seconds, self.show, self.clock = seconds, set_up_seconds, show, clock
        self.began, self.set_up = clock(), 0.0

    @property
    def elapsed(self) -> float:
        """Without setting up."""
        return self.clock() - self.began - self.set_up

    def is_up(self, share: float = 1.0) -> bool:
        self.show("")
        return self.elapsed > share * self.seconds

    @contextmanager
    def setting_up(self, what: str) -> Iterator[None]:
        self.show(f"setting up {what}")
        since = self.clock()
        try:
            yield
        finally:
            self.set_up += self.clock() - since


@dataclass(frozen=True)
class Chosen:
    """The trees chosen, the candidates they were chosen from, and what chose them: ``timed`` steps or the ``estimate``.

    candidates: their number; ``choices`` has those that were timed or, if none was timed enough, all by the estimate.
    """

    choice: Choice
    choices: list[Choice]
    by: Literal["timed", "estimate"]
    candidates: int
    costs: Costs


def choose(
    target: Target,
    calibration: Calibration,
    ranks: Tensor,
    prompts: Sequence[list[int]],
    sizes: Sequence[int],
    watch: Watch,
    lean: bool | None = None,
) -> Chosen:
    """Time the best trees of each size, and chains if there are several sizes, on continuations of the prompts.

    Decoders are set up until the time for that has passed, or as many as can be timed twice with each prompt in the
    time of ``watch``. Where that is too short the estimate chooses, see :class:`Chosen`. ``ranks``, ``sizes``: as
    :func:`trees_by_size`.
    """
    with watch.setting_up("step costs"):
        known = step_costs(target, lean)
        step_time = calibration.step_time and calibration.step_time(target, known)
        candidates = candidates_of(ranks, sizes, known, step_time, chains=len(sizes) > 1)
    watch.set_up_seconds += watch.set_up  # step costs are measured once on a machine
    prompts = sorted(prompts, key=len, reverse=True)  # the first one's cache serves all
    decoders: list[SpeculativeDecoder] = []
    taus = [1.0]

    def tokens(size: int) -> int:
        return math.ceil(taus[size] * TIMED_TOKENS) + 1

    def set_up(trees: Trees | None) -> None:
        """Allocate, take the first steps and, on a GPU, capture them."""
        drafter = calibration.build(target, *trees) if trees else None
        decoders.append(_decoder(target, drafter, lean, prompts[0], tokens(len(decoders))))

    with watch.setting_up("plain decoding"):
        set_up(None)
        since = time.perf_counter()
        ends = _ends(decoders[0], prompts[0], tokens(0))
        taken = time.perf_counter() - since
    steps = min(taken, ends[-1] - ends[0])
    prefill, ready = taken - steps, list[Candidate]()
    two_rounds = MIN_ROUNDS * taken
    memory, largest = free_bytes(target.device), 0
    worth = in_order(candidates)
    for each in worth:
        two_rounds += MIN_ROUNDS * (prefill + steps * each.cost)
        if watch.set_up > watch.set_up_seconds or watch.elapsed + two_rounds > watch.seconds:
            break
        if target.device.type == "cuda" and memory < 2 * largest:
            break
        with watch.setting_up(f"decoder {len(ready) + 1} of at most {len(worth)}"):
            taus.append(each.tau)
            set_up(each.trees)
        ready.append(each)
        left = free_bytes(target.device)
        memory, largest = left, max(largest, memory - left)
    costs = Costs([math.inf], 0, None, [0])
    if ready:
        costs, ready = _raced(decoders, ready, prompts, tokens, watch)
    decoders.clear()
    gc.collect()  # a cache and its layers refer to each other
    timed = [(each, cost, runs) for each, cost, runs in zip(ready, costs.seconds[1:], costs.runs[1:], strict=True)]
    enough = [runs >= MIN_ROUNDS for _, _, runs in timed]
    if costs.rounds < MIN_ROUNDS or not any(enough):
        estimated = [Choice(each.trees, each.tau, each.cost * known.plain_seconds, each.speed) for each in candidates]
        best = max(estimated, key=lambda each: (each.speedup, -each.nodes))
        return Chosen(best, estimated, "estimate", len(candidates), costs)
    # Trees that contain others are never cheaper: if they were measured to be, the others' measurement was disturbed.
    plain = costs.seconds[0]
    choices, able = list[Choice](), list[Choice]()
    for (each, cost, runs), often in zip(timed, enough, strict=True):
        if runs:
            seconds = min(cost, *(more for other, more, _ in timed if each.contained_in(other)))
            choices.append(Choice(each.trees, each.tau, seconds, each.tau * plain / seconds))
            able += choices[-1:] if often else []
    by = "timed" if len(ready) > 1 or len(worth) == 1 else "estimate"
    return Chosen(pick(able), choices, by, len(candidates), costs)


def _raced(
    decoders: list[SpeculativeDecoder],
    ready: list[Candidate],
    prompts: Sequence[list[int]],
    tokens: Callable[[int], int],
    watch: Watch,
) -> tuple[Costs, list[Candidate]]:
    """Time plain decoding, the first of the decoders, and those of the candidates that are ``ready``; returns their
    costs, and the candidates in the order of these: the fewest nodes first."""
    order = sorted(range(len(ready)), key=lambda at: (nodes_of(ready[at].trees), ready[at].cost))
    sorted_ready, places = [ready[at] for at in order], [0, *(at + 1 for at in order)]
    cheaper = [
        [0, *(other for other, less in enumerate(sorted_ready[:place], 1) if less.contained_in(each))]
        for place, each in enumerate(sorted_ready)
    ]
    rounds = 0

    def run(size: int, turn: int) -> list[float]:
        nonlocal rounds
        rounds += size == 0
        prompt, place = prompts[turn % len(prompts)], places[size]
        return [end - begin for begin, end in itertools.pairwise(_ends(decoders[place], prompt, tokens(place)))]

    def time_is_up() -> bool:
        return watch.is_up(GRACE if rounds <= MIN_ROUNDS else 1.0)

    return race(run, [1.0, *(each.tau for each in sorted_ready)], time_is_up, [[], *cheaper]), sorted_ready


@dataclass(frozen=True)
class Compared:
    """A dynamic tree beside the fixed one, continuing the same texts: its τ, and its tokens/s over the fixed tree's."""

    shape: DynamicShape
    tau: float
    speed: float


def compare(
    target: Target, drafters: Sequence[Drafter], prompts: Sequence[list[int]], watch: Watch, lean: bool | None = None
) -> list[Compared]:
    """Continue the same prompts with the fixed tree and the dynamic ones, each by all of them in turn.

    ``drafters``: with the fixed tree, then with each of :data:`SHAPES`. Those for which the time for setting up is too
    short are left out; all are, where the time of ``watch`` is too short for two prompts.
    """
    longest, decoders, least = max(prompts, key=len), list[SpeculativeDecoder](), min(2, len(prompts))
    for drafter in drafters:
        if decoders and watch.set_up > watch.set_up_seconds:
            break
        with watch.setting_up(f"tree {len(decoders) + 1} of {len(drafters)} to compare"):
            decoders.append(_decoder(target, drafter, lean, longest, COMPARED_TOKENS))
            if len(decoders) == 1:
                since = time.perf_counter()
                _ends(decoders[0], longest, COMPARED_TOKENS)
                taken = time.perf_counter() - since
        if least * len(drafters) * taken > watch.seconds:
            return []
    seconds, steps, tokens, compared = [0.0] * len(decoders), [0] * len(decoders), 0, 0
    for number, prompt in enumerate(prompts):
        if number and watch.is_up():
            break
        for tree, decoder in enumerate(decoders):
            ends = _ends(decoder, prompt, COMPARED_TOKENS)
            seconds[tree] += ends[-1] - ends[0]  # without the prefill, which gives the first token
            steps[tree] += len(ends) - 1
        tokens += COMPARED_TOKENS - 1
        compared += 1
    if compared < least:
        return []
    pairs = zip(SHAPES, steps[1:], seconds[1:], strict=False)
    return [Compared(shape, tokens / count, seconds[0] / spent) for shape, count, spent in pairs]


def _decoder(
    target: Target, drafter: Drafter | None, lean: bool | None, prompt: list[int], count: int
) -> SpeculativeDecoder:
    """A decoder that has allocated for a prompt and ``count`` tokens, and has chosen the forms of products."""
    decoder = SpeculativeDecoder(target, drafter, lean=lean)
    decoder.serve([Request(prompt, 4, stop_ids=frozenset())], 1, max_length=len(prompt) + count)
    return decoder


def _ends(decoder: SpeculativeDecoder, prompt: list[int], count: int) -> list[float]:
    """When the prefill and each step of an answer of ``count`` tokens ended. On a CPU by this thread's time, which
    other processes disturb less; it excludes waiting for a GPU or a disk."""
    target, ends = decoder.target, list[float]()
    clock = time.perf_counter if target.spread or target.device.type != "cpu" else time.thread_time
    decoder.generate([prompt], count, stop_ids=frozenset(), on_tokens=lambda *_: ends.append(clock()))
    return ends


def timing_prompts(tokens: Tensor, supervised: Tensor, count: int = TIMED_PROMPTS) -> list[list[int]]:
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
    """Raises ValueError: the tree that is there was calibrated on more positions than these few."""
    tree = json_object(folder / "tree.json") if (folder / "tree.json").exists() else {}
    before = (tree.get("calibration") or {}).get("positions", 0)
    if positions < min(FEW_POSITIONS, before):
        raise ValueError(
            f"{folder}: {positions:,} positions say too little; tree.json, calibrated on {before:,}, is kept. Give "
            "more prompts, longer answers (--max-new-tokens) or more --seconds, or delete it"
        )


def read_held_out(folder: Path) -> dict[str, Tensor]:
    """A run's held-out rows: ``tokens``, ``supervised`` ``[S, T]``, at least one with an answer.

    Raises:
        FileNotFoundError, ValueError: there are none, or the file is damaged.
    """
    stored, instead = folder / "held_out" / "model.safetensors", "pass --prompts FILE.jsonl to calibrate on"
    if not stored.exists():
        raise FileNotFoundError(f"{folder}: holds no held-out rows; {instead}")
    data = read_tensors(stored.parent, [stored])
    if not {"tokens", "supervised"} <= data.keys():
        raise ValueError(f"{stored}: not the held-out rows of a run; {instead}")
    if not data["supervised"].any():
        raise ValueError(f"{folder}: no held-out row has an answer; {instead}")
    return data


def check_no_tree(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: an option is given that is of trees, and the drafter has none.
    """
    for name in ("at_load", "nodes", "prompts"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"'{args.drafter}' has no tree, only the step costs are measured: leave out {option}")


def print_costs(target: Target, lean: bool | None) -> None:
    """Time the target's steps again and print what they cost."""
    costs = step_costs(target, lean, remeasure=True)
    print(f"a plain step: {costs.plain_seconds * 1e3:.2f} ms; times that by nodes: ", end="")
    print(", ".join(f"{rows}: {cost:.2f}" for rows, cost in costs.points))


def positions_of(ranks: Tensor) -> int:
    """Number of positions of ``[S, T, n, K]`` at which a step begins."""
    return int((ranks[:, :, 0, 0] >= 0).sum())


def write_candidates(folder: Path, ranks: Tensor) -> None:
    """Write a tree.json whose nodes are chosen at load, by the text's ranks ``[S, T, 1, K]``."""
    facts = head_facts(ranks)
    known = facts["candidates"]
    by_size = trees_by_size(ranks, [size for size in SIZES if size <= len(known) + 1])
    taus = {nodes_of(trees): round(simulate_ensemble(trees, ranks), 4) for trees in by_size}
    calibration = {"positions": positions_of(ranks), **facts, "mean_accepted_length_by_nodes": taus}
    paths = [one["path"] for one in known]
    write_json(folder / "tree.json", {"paths": paths, "at_load": True, "calibration": calibration})
    said = ", ".join(f"{nodes}: {tau:.2f}" for nodes, tau in taus.items())
    print(f"{folder / 'tree.json'}: {len(known) + 1} nodes to choose from at load; expected τ by nodes: {said}")


def print_measured(found: Chosen, compared: Sequence[Compared]) -> None:
    timed = found.costs.rounds >= MIN_ROUNDS
    print(f"  nodes  depth  expected τ  {'' if timed else 'estimated '}ms/step  expected speed-up")
    width = 7 if timed else 17
    for c in found.choices:
        print(f"  {c.nodes:5d}  {c.depth:5d}  {c.tau:10.2f}  {c.seconds * 1e3:{width}.2f}  {c.speedup:17.2f}")
    if found.by == "timed":
        print(f"  chosen by timed steps, of {len(found.choices)} of {found.candidates} candidates")
    else:
        few = f"{MIN_ROUNDS} rounds" if not timed else "two candidates"
        print(
            f"  chosen by the estimate, expected τ / step time by this machine's step costs, of {found.candidates} "
            f"candidates: the time was too short to time {few}; give more --seconds"
        )
    if compared:
        print("  dynamic trees beside the tree chosen")
        print("  top_k  depth  nodes     τ  speed-up over it")
    for c in compared:
        print(f"  {c.shape.top_k:5d}  {c.shape.depth:5d}  {c.shape.nodes:5d}  {c.tau:4.2f}  {c.speed:16.2f}")


def main() -> None:
    args = parser().parse_intermixed_args()
    if args.nodes is not None and args.nodes < 2:
        raise ValueError(f"--nodes {args.nodes}: a tree has at least 2 nodes, the root and one draft")
    if args.at_load and args.nodes:
        raise ValueError("--at-load leaves the number of nodes to each machine; leave out --nodes")
    check_counts(nodes=args.nodes, max_new_tokens=args.max_new_tokens)
    check_threads(args.threads)
    if args.nodes is not None and args.nodes > MAX_NODES:
        raise ValueError(f"--nodes {args.nodes}: must be at most {MAX_NODES}")
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds {args.seconds:g}: must be above 0")
    given = read_prompts(args.prompts) if args.prompts else []
    options = target_arguments(args)
    lean = DECODERS[args.decoder]
    torch.set_num_threads(args.threads or available_cores())  # as decode.py
    folders = [part for part in parts_of(args.drafter) if has_folder(part)]
    if len(folders) > 1:
        raise ValueError(f"'{args.drafter}' has {len(folders)} drafter folders; calibrate each by itself")
    if not folders:
        if not args.target:
            raise ValueError(f"'{args.drafter}' has no target of its own: pass --target")
        check_no_tree(args)
        return print_costs(load_target(args.target, **options), lean)
    folder, config, weights = read_named(folders[0], args.target, **options)
    family, target_name = family_of(folder, config), args.target or config["target"]["name_or_path"]
    if not hasattr(family, "calibration"):
        check_no_tree(args)
        return print_costs(target_of(folder, config, load_target(target_name, **options)), lean)
    drafter: Calibration = family.calibration(folder, config, weights)
    if args.at_load and drafter.step_time is not None:
        raise ValueError(f"--at-load is for draft heads; the nodes of '{folder}' follow from its trees: leave it out")
    check_folder("DRAFTER", folder)
    with alone(folder):
        calibrate(args, folder, drafter, given, target_name, config)


def calibrate(
    args: argparse.Namespace, folder: Path, drafter: Calibration, given: list[Prompt], target_name: str, config: Any
) -> None:
    """Measure the drafter's acceptance and steps, and write its tree."""
    options, lean = target_arguments(args), DECODERS[args.decoder]
    data = {} if given else read_held_out(folder)
    target = target_of(folder, config, load_target(target_name, **options))
    renew_fingerprint(folder, target)
    texts = encode_prompts(given, target, say)
    rows = list(range(len(texts))) or data["supervised"].any(1).nonzero().flatten().tolist()
    random.Random(0).shuffle(rows)
    if data:  # the longest answer first: where the first one takes all the time, there are positions to count on
        rows.insert(0, rows.pop(max(range(len(rows)), key=lambda at: int(data["supervised"][rows[at]].sum()))))
    limit = f"calibrating: at most {args.seconds:.0f} s from here on"
    console.print(limit + ("" if args.at_load else ", and about as long again to set up decoders"), markup=False)
    began = time.monotonic()
    parts: list[dict[str, Tensor]] = []
    share = 1.0 if args.at_load else RANKING
    with ProgressBar("calibrating (s)", math.ceil(args.seconds), console, transient=True) as advance:
        set_up = 0.0  # of the parts that have ended

        def show_time(*_: object) -> None:
            advance(min(int(time.monotonic() - began - set_up), math.ceil(args.seconds)))

        for part in batches(len(rows), 8 if texts else 1, began + share * args.seconds):
            batch_rows = rows[part]
            if texts:
                batch = answer(target, [texts[row] for row in batch_rows], args.max_new_tokens, 32, show_time, lean)
            else:
                batch = {name: data[name][batch_rows] for name in ("tokens", "supervised")}
            ranks = drafter.ranks(target, batch["tokens"], batch["supervised"])
            parts.append({**batch, "ranks": ranks[:, :, None] if ranks.dim() == 3 else ranks})
            show_time()
            if sum(positions_of(done["ranks"]) for done in parts) >= MAX_POSITIONS:
                break
        ranks = joined(parts, "ranks", -1)
        check_enough(folder, positions_of(ranks))
        if args.at_load:
            return write_candidates(folder, ranks)
        ranking = time.monotonic() - began
        text = joined(parts, "tokens"), joined(parts, "supervised")
        length = max(1, min(TIMED_CONTEXT, target.context - 2 * TIMED_TOKENS))  # the context has room for timed steps
        prompts = [prompt[-length:] for prompt in timing_prompts(*text)]
        sizes = (args.nodes,) if args.nodes else SIZES
        dynamic = None if args.nodes else drafter.decoding
        left = max(args.seconds - ranking, (1 - RANKING) * args.seconds)  # the first rows may have taken all the time
        for_dynamic = 0.0 if dynamic is None else DYNAMIC

        def watch_for(seconds: float, share: float) -> Watch:
            def show(note: str) -> None:
                now = min(time.monotonic() - began - set_up - watch.set_up, args.seconds)
                advance(int(now), note)

            watch = Watch(seconds, share * args.seconds, show)
            return watch

        watch = watch_for(left - for_dynamic * args.seconds, 1 - for_dynamic)
        found = choose(target, drafter, ranks, prompts, sizes, watch, lean)
        chosen, compared = found.choice, list[Compared]()
        set_up, timing = watch.set_up, watch.elapsed
        if dynamic is not None:
            length = max(1, min(TIMED_CONTEXT, target.context - COMPARED_TOKENS))
            prompts = [prompt[-length:] for prompt in timing_prompts(*text, COMPARED_PROMPTS)]
            limits = step_costs(target, lean) if target.device.type == "cpu" and not target.spread else None
            decoding = [dynamic(target, tree, limits) for tree in (chosen.trees[0], *SHAPES)]
            watch = watch_for(max(left - timing, for_dynamic * args.seconds), for_dynamic)
            compared = compare(target, decoding, prompts, watch, lean)
            set_up, timing = set_up + watch.set_up, timing + watch.elapsed
    positions, text_of = positions_of(ranks), "the target's answers to the prompts" if args.prompts else "held-out rows"
    seconds = {"ranking": round(ranking, 2), "set_up": round(set_up, 2), "timing": round(timing, 2)}
    print(
        f"calibrated on {positions:,} positions of {text_of} ({ranking:.0f} s) "
        f"and {found.costs.rounds} rounds of timed steps ({timing:.0f} s, after {set_up:.0f} s of setting up)"
        + ("" if found.costs.noise is None else f"; the last ones lowered costs by {found.costs.noise:.1%} at most")
    )
    print_measured(found, compared)
    if dynamic is not None and not compared:
        print("dynamic trees were not compared with it: the time was too short; give more --seconds")
    chain_tau = simulate_ensemble([chain(drafter.max_depth)] * ranks.shape[2], ranks)
    calibration = {
        "positions": positions,
        "expected_mean_accepted_length": round(chosen.tau, 4),
        "chain_mean_accepted_length": round(chain_tau, 4),
        **(drafter.facts or head_facts)(ranks),
        "sizes": [
            {"nodes": c.nodes, "depth": c.depth, "tau": round(c.tau, 4), "seconds_per_step": c.seconds}
            | {"speedup": round(c.speedup, 4)}
            for c in found.choices
        ],
        "chosen_by": found.by,
        "seconds": seconds,
        "rounds": found.costs.rounds,
        "noise": found.costs.noise,
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "decoder": "transformers" if isinstance(find_lean(target, lean), str) else "lean",
    }
    if compared:
        calibration["dynamic"] = [
            {**asdict(c.shape), "tau": round(c.tau, 4), "speedup_over_fixed": round(c.speed, 4)} for c in compared
        ]
    paths = [[list(path) for path in tree.paths] for tree in chosen.trees]
    stored: dict[str, Any] = {"paths": paths[0]} if len(paths) == 1 else {"parts": paths}
    faster = [each for each in compared if each.speed > 1 + TIED]
    if faster:
        best = max(faster, key=lambda each: each.speed)
        stored["dynamic"] = asdict(best.shape)
    write_json(folder / "tree.json", {**stored, "calibration": calibration})
    by_part = f" ({' + '.join(str(len(each)) for each in paths)} beside the root)" if len(paths) > 1 else ""
    print(
        f"{folder / 'tree.json'}: {chosen.nodes} nodes{by_part}, depth {chosen.depth}, "
        f"expected τ {chosen.tau:.2f} (a chain{'' if len(paths) == 1 else ' of each'}: {chain_tau:.2f})"
    )
    if faster:
        print(f"decoding uses a dynamic tree, {best.speed:.2f} times as fast: {stored['dynamic']}")
    if len(parts_of(args.drafter)) > 1:
        print_costs(target, lean)
    if chosen.speedup * max((each.speed for each in faster), default=1.0) < 1:
        print("plain decoding is faster here: too few drafts are accepted for what the tree's steps cost")


if __name__ == "__main__":
    run_command(main)
