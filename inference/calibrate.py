"""Calibrate a drafter's tree: which rank paths come true on held-out text, and how many nodes pay on this device.

    python inference/calibrate.py runs/demo              # writes runs/demo/tree.json
    python inference/calibrate.py runs/demo --nodes 32   # a tree of 32 nodes, whatever it costs here

A path's probability is the share of positions where head 1's r_1-th token, head 2's r_2-th token, … are all the true
ones: joint counts, no independence assumed (Medusa, arXiv 2401.10774 §2.3.3, assumes it). A child never outnumbers its
parent, so the N most frequent paths *are* the best tree of N nodes. Its size maximises E[tokens] / measured step time.

Shape letters: S sequences, T tokens, K draft heads.
"""

# ruff: noqa: E402

import argparse
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.models.options import DECODERS, target_arguments, target_options
from draftsmith.train.command import before_imports, run_command


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="a drafter folder, for example runs/demo")
    parser.add_argument(
        "--nodes", type=int, help="nodes of the tree, root included; measured on this device if left out"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        help='lines of {"prompt": …}, {"messages": …} or {"turns": …} to calibrate on; the run\'s own held-out answers '
        "if left out",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="answer length with --prompts")
    target_options(parser)
    return parser


if __name__ == "__main__":
    before_imports(parser())

import torch
from filelock import Timeout
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.inference.answers import answer
from draftsmith.inference.drafters.load import load_heads, read_heads
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine import SpeculativeDecoder
from draftsmith.inference.options import check_counts
from draftsmith.inference.prompts import encode_prompts, read_prompts
from draftsmith.inference.step import find_lean
from draftsmith.inference.terminal import progress
from draftsmith.inference.tree import MOST_NODES, Topology, chain
from draftsmith.models.artifact import device_name
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target, check_safetensors
from draftsmith.train.files import check_folder, locked, write_json

MAX_RANK = 10  # ranks per head that a tree may use
SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
TIMED_PROMPTS, TIMED_TOKENS = 5, 64  # decoded with each size


@torch.inference_mode()
def head_ranks(
    target: Target,
    heads: MedusaHeads,
    tokens: Tensor,
    supervised: Tensor,
    batch_size: int = 16,
    on_done: Callable[[int], None] | None = None,
) -> Tensor:
    """The rank that each head gave to the true token.

    Args:
        tokens, supervised: ``[S, T]`` as :func:`draftsmith.inference.answers.answer` returns them.
        on_done: called with the number of sequences done so far.

    Returns:
        ``[S, T, K]`` int64: at position t, head k's rank of x_{t+k+1}; ``MAX_RANK`` if it is not among the best, −1
        where there is no such label or where position t + 1 is no answer's token (no step begins there).
    """
    sequences, length = tokens.shape
    num_heads = heads.config.num_draft_heads
    ranks = torch.full((sequences, length, num_heads), -1, dtype=torch.int64)
    for start in range(0, sequences, batch_size):
        ids = tokens[start : start + batch_size].long()
        marks = supervised[start : start + batch_size]
        begins = torch.zeros_like(marks)
        begins[:, :-1] = marks[:, 1:]
        reached = begins.clone()  # every token up to the label is the same answer's
        hidden = target.hidden(ids.to(target.device))[begins.to(target.device)]
        top = min(MAX_RANK, heads.config.vocab_size)
        features = heads.features(hidden.to(heads.weight.dtype))
        for k in range(num_heads):
            best = heads.head_logits(k, features[k], target.lm_head).topk(top, -1).indices.cpu()  # [P, top]
            label = torch.full(ids.shape, -1)
            reached[:, : max(0, length - k - 2)] &= marks[:, k + 2 :]
            reached[:, max(0, length - k - 2) :] = False
            label[:, : max(0, length - k - 2)] = ids[:, k + 2 :]
            label = torch.where(reached, label, -1)
            label = label[begins]
            match = best == label[:, None]
            rank = torch.where(match.any(-1), match.int().argmax(-1), MAX_RANK)
            ranks[start : start + batch_size, :, k][begins] = torch.where(label >= 0, rank, -1)
        if on_done:
            on_done(min(start + batch_size, sequences))
    return ranks


def path_counts(ranks: Tensor) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each rank path was wholly true, and the number of positions where all heads have a label."""
    full = ranks[(ranks >= 0).all(-1)]
    counts: Counter[tuple[int, ...]] = Counter()
    for row in full.tolist():
        for depth, rank in enumerate(row):
            if rank >= MAX_RANK:
                break
            counts[tuple(row[: depth + 1])] += 1
    return counts, len(full)


def best_tree(ranks: Tensor, nodes: int) -> Topology:
    """The tree of at most ``nodes`` nodes (root included) with the highest expected accepted length.

    Raises:
        ValueError: there is no position to count on.
    """
    counts, positions = path_counts(ranks)
    if not positions:
        raise ValueError("no calibration position: the answers are shorter than the number of draft heads")
    # Ties go to the shorter path, so that no child comes without its parent.
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return Topology(tuple(order[: nodes - 1]))


def simulate(topology: Topology, ranks: Tensor) -> float:
    """Mean accepted length τ (bonus token included) of a tree, by walking the sequences step by step: exact for greedy
    decoding, since the sequences are the target's own.

    Args:
        ranks: ``[S, T, K]`` from :func:`head_ranks`.
    """
    known = set(topology.paths)
    tokens = steps = 0
    for row in ranks.tolist():
        begins = [t for t, at in enumerate(row) if at[0] >= 0]
        if not begins:
            continue
        t, end = begins[0], begins[-1]
        while t <= end:
            if row[t][0] < 0:  # between two answers, or an answer's last token
                t += 1
                continue
            accepted = 0
            while accepted < len(row[t]) and tuple(row[t][: accepted + 1]) in known:
                accepted += 1
            tokens += min(accepted, end - t) + 1  # a bonus token behind the text's end is not committed
            steps, t = steps + 1, t + accepted + 1
    return tokens / steps if steps else 0.0


@dataclass(frozen=True)
class Choice:
    """One size of tree: expected τ, measured seconds per step, and tokens/s over plain decoding."""

    topology: Topology
    tau: float
    seconds: float
    speedup: float


def step_seconds(decoders: Sequence[SpeculativeDecoder], prompts: Sequence[list[int]]) -> list[float]:
    """Measured seconds per step of each decoder, the median over all steps. The decoders take turns on each prompt, so
    that whatever else the machine does meets all of them."""
    times: list[list[float]] = [[] for _ in decoders]
    for decoder in decoders:
        decoder.generate([prompts[0]], 4, stop_ids=frozenset())
    done = 0
    with progress("timing trees", len(prompts) * len(decoders)) as advance:
        for prompt in prompts:
            for decoder, taken in zip(decoders, times, strict=True):
                ends: list[float] = []
                note = lambda *_, e=ends: e.append(time.perf_counter())  # noqa: E731
                decoder.generate([prompt], TIMED_TOKENS, stop_ids=frozenset(), on_tokens=note)
                taken += [end - begin for begin, end in itertools.pairwise(ends)]
                done += 1
                advance(done)
    return [statistics.median(taken) for taken in times]


def choose(
    target: Target, heads: MedusaHeads, ranks: Tensor, prompts: Sequence[list[int]], lean: bool | None = None
) -> list[Choice]:
    """Every size of :data:`SIZES` with its expected τ and its measured cost on this device, by the decoder asked for
    (``lean`` as :class:`SpeculativeDecoder` takes it)."""
    from sklearn.isotonic import isotonic_regression  # takes a second

    trees: list[Topology] = []
    for size in SIZES:
        topology = best_tree(ranks, size)
        if trees and topology.num_nodes == trees[-1].num_nodes:
            break  # the text holds no more paths
        trees.append(topology)
    drafted = [SpeculativeDecoder(target, MedusaDrafter(heads, topology, target), lean=lean) for topology in trees]
    plain, *measured = step_seconds([SpeculativeDecoder(target, lean=lean), *drafted], prompts)
    # A larger tree is never cheaper: where one was measured to be, the machine was busy; neighbours share the blame.
    seconds = isotonic_regression(measured)
    choices: list[Choice] = []
    for topology, taken in zip(trees, seconds, strict=True):
        tau = simulate(topology, ranks)
        choices.append(Choice(topology, tau, float(taken), tau * plain / float(taken)))
    return choices


def timing_prompts(tokens: Tensor, supervised: Tensor) -> list[list[int]]:
    """Up to :data:`TIMED_PROMPTS` prompts from rows spread over the text.

    Each is what precedes a row's first answer. Only where every row is supervised from its first token, as documents
    are, it is the first half of a row; rows without an answer give none.

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


def check_idle(folder: Path) -> None:
    """Refuse a run that a command is working in: what it writes would not fit the tree.

    Raises:
        ValueError: one is.
    """
    if (folder / ".lock").exists():
        try:
            with locked(folder / ".lock", wait=False):
                pass
        except Timeout:
            raise ValueError(f"{folder}: another command is working in this run; wait until it has ended") from None


def main() -> None:
    args = parser().parse_intermixed_args()
    if args.nodes is not None and args.nodes < 2:
        raise ValueError(f"--nodes {args.nodes}: a tree has at least 2 nodes, the root and one draft")
    check_counts(nodes=args.nodes, max_new_tokens=args.max_new_tokens)
    if args.nodes is not None and args.nodes > MOST_NODES:
        raise ValueError(f"--nodes {args.nodes}: must be at most {MOST_NODES}")
    given = read_prompts(args.prompts) if args.prompts else []
    options = target_arguments(args)
    folder, config, weights = read_heads(args.drafter)
    check_folder("DRAFTER", folder)
    check_idle(folder)
    stored = folder / "held_out" / "model.safetensors"
    data: dict[str, Tensor] = {}
    if not args.prompts:
        if not stored.exists():
            raise FileNotFoundError(f"{folder}: holds no held-out rows; pass --prompts FILE.jsonl to calibrate on")
        if not {"tokens", "supervised"} <= check_safetensors(stored.parent).keys():
            raise ValueError(f"{stored}: not the held-out rows of a run; pass --prompts FILE.jsonl to calibrate on")
        data = load_file(stored)
        if not data["supervised"].any():
            raise ValueError(f"{folder}: no held-out row has an answer; pass --prompts FILE.jsonl to calibrate on")
    target, heads = load_heads(folder, config, weights, args.target, options)
    lean = DECODERS[args.decoder]
    ran = "transformers" if isinstance(find_lean(target, lean), str) else "lean"
    if args.prompts:
        texts = encode_prompts(given, target)
        with progress("answering prompts", len(texts)) as advance:
            data = answer(target, texts, args.max_new_tokens, 32, advance, lean)
    with progress("ranking", len(data["tokens"])) as advance:
        ranks = head_ranks(target, heads, data["tokens"], data["supervised"], on_done=advance)
    begins = ranks[..., 0] >= 0
    print(f"calibrating on {int(begins.sum()):,} positions of the target's own held-out text")
    accuracy = [
        [float((ranks[..., k] == r).sum() / (ranks[..., k] >= 0).sum()) for r in range(MAX_RANK)]
        for k in range(heads.config.num_draft_heads)
    ]
    room = max(1, target.context - TIMED_TOKENS)  # else there would be no step to time
    prompts = [prompt[-room:] for prompt in timing_prompts(data["tokens"], data["supervised"])]
    choices = choose(target, heads, ranks, prompts, lean)
    print("  nodes  depth  expected τ  ms/step  expected speed-up")
    for c in choices:
        print(
            f"  {c.topology.num_nodes:5d}  {c.topology.max_depth:5d}  {c.tau:10.2f}  {c.seconds * 1e3:7.2f}"
            f"  {c.speedup:17.2f}"
        )
    if args.nodes:
        topology = best_tree(ranks, args.nodes)
    else:
        topology = max(choices, key=lambda c: c.speedup).topology
    tau = simulate(topology, ranks)
    chain_tau = simulate(chain(heads.config.num_draft_heads), ranks)
    calibration = {
        "positions": int(begins.sum()),
        "expected_mean_accepted_length": round(tau, 4),
        "chain_mean_accepted_length": round(chain_tau, 4),
        "accuracy_by_head_and_rank": [[round(a, 4) for a in row] for row in accuracy],
        "sizes": [
            {"nodes": c.topology.num_nodes, "tau": round(c.tau, 4), "seconds_per_step": c.seconds,
             "speedup": round(c.speedup, 4)}
            for c in choices
        ],
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "decoder": ran,
    }  # fmt: skip
    write_json(folder / "tree.json", {"paths": [list(path) for path in topology.paths], "calibration": calibration})
    print(
        f"{folder / 'tree.json'}: {topology.num_nodes} nodes, depth {topology.max_depth}, "
        f"expected τ {tau:.2f} (a chain: {chain_tau:.2f})"
    )


if __name__ == "__main__":
    run_command(main)
