"""Calibrate a drafter's tree: which rank paths are right on held-out text, and which size is fastest on this device.

    python inference/calibrate.py runs/demo              # writes runs/demo/tree.json
    python inference/calibrate.py runs/demo --nodes 32   # a tree of 32 nodes, whatever it costs here
    python inference/calibrate.py runs/demo --at-load    # for other machines: each chooses the size when it loads it
    python inference/calibrate.py ngram --target models/tiny-lm     # step costs alone, for drafters without a tree

The best tree of each size and its expected tokens per step follow from the ranks that the drafter gives to the true
tokens (inference/ranks.py); the size written maximises E[tokens] / measured step time. Both are measured as well as the
time given (--seconds) allows: on rows of the text in a fixed random order, and by steps of trees of all sizes in turn,
where sizes that fall behind are timed no further.

`ngram`, `draft_model:PATH` and merges (`runs/demo+ngram`) choose their nodes step by step, by their own estimates of
acceptance and by what a step costs by its number of rows. These costs are timed at their first use and kept in the
cache folder; calibrating times them again, and calibrates the drafter folder that is part of a merge.

Shape letters: S sequences, T tokens, K depths (draft heads).
"""

# ruff: noqa: E402

import argparse
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.common.command import before_imports, run_command
from draftsmith.models.options import DECODERS, target_arguments, target_options


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="a drafter folder, for example runs/demo, or another name that decode.py takes")
    parser.add_argument(
        "--nodes", type=int, help="nodes of the tree, root included; measured on this device if left out"
    )
    parser.add_argument(
        "--at-load", action="store_true",
        help="time no step: the nodes are chosen whenever the drafter is loaded, by what steps cost on that machine "
        "(a GPU runs them all)",
    )  # fmt: skip
    parser.add_argument(
        "--prompts",
        type=Path,
        help='lines of {"prompt": …}, {"messages": …} or {"turns": …} to calibrate on; the run\'s own held-out answers '
        "if left out",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="answer length with --prompts")
    parser.add_argument(
        "--seconds", type=float, default=45, help="time that it may take once the target is loaded (default 45)"
    )
    target_options(parser)
    return parser


if __name__ == "__main__":
    before_imports(parser())

from filelock import Timeout
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.common.files import check_folder, locked, write_json
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.answers import answer
from draftsmith.inference.costs import step_costs
from draftsmith.inference.drafters.load import Calibration, family_of, has_folder, read_named
from draftsmith.inference.engine import Request, SpeculativeDecoder
from draftsmith.inference.options import check_counts, parts_of
from draftsmith.inference.prompts import encode_prompts, read_prompts
from draftsmith.inference.race import TIMED_PROMPTS, Costs, race
from draftsmith.inference.ranks import accuracy, best_tree, candidates, simulate
from draftsmith.inference.runner import find_lean
from draftsmith.inference.terminal import console
from draftsmith.inference.tree import MAX_NODES, Topology, chain
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import device_name
from draftsmith.models.target import Target, check_safetensors, load_target

SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
RANKING, MAX_POSITIONS = 0.4, 8192  # limits of counting ranks: share of the time, positions
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


@dataclass(frozen=True)
class Choice:
    """One size of tree: expected τ, measured seconds per step, and tokens/s over plain decoding."""

    topology: Topology
    tau: float
    seconds: float
    speedup: float


def pick(choices: Sequence[Choice]) -> Choice:
    """The smallest tree whose speed is within :data:`TIED` of the highest."""
    best = max(choice.speedup for choice in choices)
    return next(choice for choice in choices if choice.speedup >= (1 - TIED) * best)


def choose(
    target: Target, calibration: Calibration, ranks: Tensor, prompts: Sequence[list[int]], sizes: Sequence[int],
    time_is_up: Callable[[], bool], lean: bool | None = None,
) -> tuple[list[Choice], Costs]:  # fmt: skip
    """Time the best tree of each size; returns those that were timed, with expected τ and cost on this device.

    Args:
        ranks: ``[S, T, K]`` of the text.
        prompts: token ids; the timed steps continue them.
        sizes: numbers of nodes, rising.
        time_is_up: as :func:`race` takes it.
        lean: as :class:`SpeculativeDecoder` takes it.
    """
    trees: list[Topology] = []
    for size in sizes:
        topology = best_tree(ranks, size)
        if trees and topology.num_nodes == trees[-1].num_nodes:
            break  # the text holds no more paths
        trees.append(topology)
    taus = [1.0, *(simulate(topology, ranks) for topology in trees)]
    prompts = sorted(prompts, key=len, reverse=True)  # the first one's cache serves all
    decoders: dict[int, SpeculativeDecoder] = {}
    # On a CPU this thread's time, which other processes disturb less; it excludes waiting for a GPU or a disk.
    clock = time.perf_counter if target.spread or target.device.type != "cpu" else time.thread_time

    def run(size: int, turn: int) -> list[float]:
        prompt, ends = prompts[turn % len(prompts)], list[float]()
        count = math.ceil(taus[size] * TIMED_TOKENS) + 1
        if size not in decoders:
            drafter = calibration.build(target, trees[size - 1]) if size else None
            decoders[size] = SpeculativeDecoder(target, drafter, lean=lean)
            first = Request(prompt, 4, stop_ids=frozenset())  # allocates, and chooses the forms of products
            decoders[size].serve([first], 1, max_length=len(prompt) + count)
        note = lambda *_: ends.append(clock())  # noqa: E731
        decoders[size].generate([prompt], count, stop_ids=frozenset(), on_tokens=note)
        return [end - begin for begin, end in itertools.pairwise(ends)]

    costs = race(run, taus, time_is_up)
    plain, *measured = costs.seconds
    # A larger tree is never cheaper: if it was measured to be, the smaller one's measurement was disturbed.
    seconds = list(itertools.accumulate(reversed(measured), min))[::-1]
    timed = [each for each in zip(trees, taus[1:], seconds, measured, strict=True) if each[3] < math.inf]
    return [Choice(tree, tau, cost, tau * plain / cost) for tree, tau, cost, _ in timed], costs


def timing_prompts(tokens: Tensor, supervised: Tensor) -> list[list[int]]:
    """Up to :data:`TIMED_PROMPTS` prompts from rows spread over the text.

    Each is the part of a row before its first answer. If every row with an answer is supervised from its first token,
    as documents are, it is the first half of the row. Rows without an answer give none.

    Args:
        tokens, supervised: ``[S, T]`` as :func:`draftsmith.inference.answers.answer` returns them.
    """
    labelled = [row for row in range(len(tokens)) if supervised[row].any()]
    rows = [row for row in labelled if not supervised[row, 0]] or labelled
    prompts: list[list[int]] = []
    for row in rows[:: max(1, -(-len(rows) // TIMED_PROMPTS))]:
        answers = supervised[row].nonzero().flatten()
        begin, end = int(answers[0]), int(answers[-1]) + 1
        prompts.append(tokens[row][: begin or -(-end // 2)].tolist())
    return prompts


def joined(parts: Sequence[dict[str, Tensor]], name: str, padding: int = 0) -> Tensor:
    """Concatenate a tensor ``[S, T, …]`` of all parts, padded to the longest T."""
    return pad_sequence([row for part in parts for row in part[name]], batch_first=True, padding_value=padding)


def check_idle(folder: Path) -> None:
    """Refuse a run that another command is writing: its drafter would not fit the tree.

    Raises:
        ValueError: one is.
    """
    if (folder / ".lock").exists():
        try:
            with locked(folder / ".lock", wait=False):
                pass
        except Timeout:
            raise ValueError(f"{folder}: another command is working in this run; wait until it has ended") from None


def read_held_out(folder: Path) -> dict[str, Tensor]:
    """A run's held-out rows: ``tokens``, ``supervised`` ``[S, T]``, at least one with an answer.

    Raises:
        FileNotFoundError, ValueError: there are none, or the file is damaged.
    """
    stored, instead = folder / "held_out" / "model.safetensors", "pass --prompts FILE.jsonl to calibrate on"
    if not stored.exists():
        raise FileNotFoundError(f"{folder}: holds no held-out rows; {instead}")
    if not {"tokens", "supervised"} <= check_safetensors(stored.parent).keys():
        raise ValueError(f"{stored}: not the held-out rows of a run; {instead}")
    data = load_file(stored)
    if not data["supervised"].any():
        raise ValueError(f"{folder}: no held-out row has an answer; {instead}")
    return data


def print_costs(target: Target, lean: bool | None) -> None:
    """Time the target's steps again and print what they cost."""
    costs = step_costs(target, lean, remeasure=True)
    print(f"a plain step: {costs.plain_seconds * 1e3:.2f} ms; times that by nodes: ", end="")
    print(", ".join(f"{rows}: {cost:.2f}" for rows, cost in costs.points))


def write_candidates(folder: Path, ranks: Tensor) -> None:
    """Write a tree.json whose nodes are chosen at load.

    Args:
        ranks: ``[S, T, K]`` of the text.

    Raises:
        ValueError: there is no position to count on.
    """
    known = candidates(ranks)
    taus: dict[int, float] = {}
    for size in SIZES:
        topology = best_tree(ranks, size)
        if size <= len(known) + 1:
            taus[topology.num_nodes] = round(simulate(topology, ranks), 4)
    calibration = {
        "positions": int((ranks[..., 0] >= 0).sum()),
        "candidates": known,
        "accuracy_by_head_and_rank": accuracy(ranks),
        "mean_accepted_length_by_nodes": taus,
    }
    paths = [one["path"] for one in known]
    write_json(folder / "tree.json", {"paths": paths, "at_load": True, "calibration": calibration})
    said = ", ".join(f"{nodes}: {tau:.2f}" for nodes, tau in taus.items())
    print(f"{folder / 'tree.json'}: {len(known) + 1} nodes to choose from at load; expected τ by nodes: {said}")


def print_choices(choices: Sequence[Choice]) -> None:
    print("  nodes  depth  expected τ  ms/step  expected speed-up")
    for c in choices:
        print(
            f"  {c.topology.num_nodes:5d}  {c.topology.max_depth:5d}  {c.tau:10.2f}  {c.seconds * 1e3:7.2f}"
            f"  {c.speedup:17.2f}"
        )


def main() -> None:
    args = parser().parse_intermixed_args()
    if args.nodes is not None and args.nodes < 2:
        raise ValueError(f"--nodes {args.nodes}: a tree has at least 2 nodes, the root and one draft")
    if args.at_load and args.nodes:
        raise ValueError("--at-load leaves the number of nodes to each machine; leave out --nodes")
    check_counts(nodes=args.nodes, max_new_tokens=args.max_new_tokens)
    if args.nodes is not None and args.nodes > MAX_NODES:
        raise ValueError(f"--nodes {args.nodes}: must be at most {MAX_NODES}")
    if not 0 < args.seconds < math.inf:
        raise ValueError(f"--seconds {args.seconds:g}: must be above 0")
    given = read_prompts(args.prompts) if args.prompts else []
    options = target_arguments(args)
    lean = DECODERS[args.decoder]
    folders = [part for part in parts_of(args.drafter) if has_folder(part)]
    if len(folders) > 1:
        raise ValueError(f"'{args.drafter}' has {len(folders)} drafter folders; calibrate each by itself")
    if not folders:
        if not args.target:
            raise ValueError(f"'{args.drafter}' has no target of its own: pass --target")
        return print_costs(load_target(args.target, **options), lean)
    folder, config, weights = read_named(folders[0])
    family, target_name = family_of(folder, config), args.target or config["target"]["name_or_path"]
    if not hasattr(family, "calibration"):  # it has no tree
        return print_costs(target_of(folder, config, load_target(target_name, **options)), lean)
    drafter: Calibration = family.calibration(folder, config, weights)
    check_folder("DRAFTER", folder)
    check_idle(folder)
    data = {} if given else read_held_out(folder)
    target = target_of(folder, config, load_target(target_name, **options))
    texts = encode_prompts(given, target)
    rows = list(range(len(texts))) or data["supervised"].any(1).nonzero().flatten().tolist()
    random.Random(0).shuffle(rows)
    console.print(f"calibrating: at most {args.seconds:.0f} s", markup=False)
    began = time.monotonic()
    parts: list[dict[str, Tensor]] = []
    share = 1.0 if args.at_load else RANKING
    with ProgressBar("calibrating (s)", math.ceil(args.seconds), console, transient=True) as advance:

        def show_time(*_: object) -> None:
            advance(min(int(time.monotonic() - began), math.ceil(args.seconds)))

        def time_is_up() -> bool:
            show_time()
            return time.monotonic() - began > args.seconds

        for part in batches(len(rows), 8 if texts else 1, began + share * args.seconds):
            batch_rows = rows[part]
            if texts:
                batch = answer(target, [texts[row] for row in batch_rows], args.max_new_tokens, 32, show_time, lean)
            else:
                batch = {name: data[name][batch_rows] for name in ("tokens", "supervised")}
            parts.append({**batch, "ranks": drafter.ranks(target, batch["tokens"], batch["supervised"])})
            show_time()
            if sum(int((done["ranks"][..., 0] >= 0).sum()) for done in parts) >= MAX_POSITIONS:
                break
        ranks = joined(parts, "ranks", -1)
        if args.at_load:
            return write_candidates(folder, ranks)
        counted = time.monotonic()
        prompts = timing_prompts(joined(parts, "tokens"), joined(parts, "supervised"))
        length = max(1, min(TIMED_CONTEXT, target.context - 2 * TIMED_TOKENS))  # the context has room for timed steps
        prompts = [prompt[-length:] for prompt in prompts]
        sizes = (args.nodes,) if args.nodes else SIZES
        choices, costs = choose(target, drafter, ranks, prompts, sizes, time_is_up, lean)
    positions = int((ranks[..., 0] >= 0).sum())
    seconds = {"ranking": round(counted - began, 2), "timing": round(time.monotonic() - counted, 2)}
    print(
        f"calibrated on {positions:,} positions of the target's own held-out text ({seconds['ranking']:.0f} s) "
        f"and {costs.rounds} rounds of timed steps ({seconds['timing']:.0f} s)"
        + ("" if costs.noise is None else f"; the last ones lowered costs by {costs.noise:.1%} at most")
    )
    print_choices(choices)
    chosen = pick(choices)
    chain_tau = simulate(chain(drafter.max_depth), ranks)
    calibration = {
        "positions": positions,
        "expected_mean_accepted_length": round(chosen.tau, 4),
        "chain_mean_accepted_length": round(chain_tau, 4),
        "candidates": candidates(ranks),
        "accuracy_by_head_and_rank": accuracy(ranks),
        "sizes": [
            {"nodes": c.topology.num_nodes, "tau": round(c.tau, 4), "seconds_per_step": c.seconds,
             "speedup": round(c.speedup, 4)}
            for c in choices
        ],
        "seconds": seconds,
        "rounds": costs.rounds,
        "noise": costs.noise,
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "decoder": "transformers" if isinstance(find_lean(target, lean), str) else "lean",
    }  # fmt: skip
    paths = [list(path) for path in chosen.topology.paths]
    write_json(folder / "tree.json", {"paths": paths, "calibration": calibration})
    print(
        f"{folder / 'tree.json'}: {chosen.topology.num_nodes} nodes, depth {chosen.topology.max_depth}, "
        f"expected τ {chosen.tau:.2f} (a chain: {chain_tau:.2f})"
    )
    if len(parts_of(args.drafter)) > 1:
        print_costs(target, lean)
    if chosen.speedup < 1:
        print("plain decoding is faster here: too few drafts are accepted for what the tree's steps cost")


if __name__ == "__main__":
    run_command(main)
