"""Accepted length by training tokens: drafters of one target, on the target's own answers to sets of prompts.

    python benchmarks/tau_by_tokens.py runs/eagle3-small runs/eagle3 --prompts P.jsonl --out runs/tokens/tau.json
    python benchmarks/tau_by_tokens.py runs/a=0.33M runs/b=1.3M --prompts P.jsonl --answers runs/tokens/answers.json

The target answers the prompts once, greedily. Each drafter then reads these texts in one pass, which gives the rank of
every true token at every depth after the true ones before it; what a chain or a tree accepts in greedy decoding follows
from that, step by step (inference/measure/tree_statistics.py), so that nothing is decoded with the drafters. Chains of
--chains drafts and the drafter's own tree (tree.json; of one with a dynamic tree the fixed one beside it) are
simulated; heads draft no longer chains than there are heads. With --nodes also the best fixed tree of so many nodes.
Drafters that draft all depths in one pass (heads, DFlash, P-EAGLE) have dynamic ones, too, by their probabilities and
by a confidence. What is counted on one half of the prompts chooses the trees of the other half.

Training tokens are the labels that training saw, where the drafter's folder says so, else the distinct answer tokens of
its data; or what is given: FOLDER=0.33M. Intervals of 95 % are over prompts. Written are the figures, a picture and a
table in Markdown. Beside τ: how often the k-th draft of the longest chain is right where all before it were, in the
chain's steps and over all positions of the texts.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, chosen, list_option, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_file
from draftsmith.inference.commands.options import check_counts
from draftsmith.inference.commands.prompts import Prompt, check_prompts, encode_prompts, read_sets, with_later_turns
from draftsmith.inference.drafters.names import check_names

ALL, TREE, FIXED, DYNAMIC = "all", "tree", "fixed tree", "dynamic tree"
UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument(
        "drafters", nargs="+", metavar="FOLDER[=TOKENS]", help="drafter folders of one target; 0.33M, 4k or a number"
    )
    parser.add_argument(
        "--prompts", type=Path, action="append", required=True, metavar="FILE.jsonl",
        help="as for decode.py, also several times; results are given for each kind of text",
    )  # fmt: skip
    parser.add_argument(
        "--first", type=int, metavar="N", help="only the first N prompts of each file, turns counted (default: all)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="tokens of every answer (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="prompts answered at a time (%(default)s)")
    list_option(parser, "--chains", [3, 5, 7], "K", "drafts of a chain (%(default)s)")
    parser.add_argument("--tree", type=Path, metavar="FILE", help="simulate this tree in place of the drafters' own")
    list_option(parser, "--nodes", None, "N", "also fixed trees of N nodes, and dynamic ones of drafters of one pass")
    parser.add_argument(
        "--answers", type=Path, metavar="FILE.json", help="the target's answers: read from there, written if missing"
    )
    parser.add_argument("--target", help="as for decode.py")
    machine_options(parser, "of the target's weights")
    return parser


def given(text: str) -> tuple[str, float | None]:
    """``FOLDER=0.33M`` → folder, training tokens; None where they are not given."""
    folder, _, number = text.rpartition("=")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", number.lower())
    if not folder or found is None or Path(text).exists():
        return text, None
    tokens = float(found[1]) * UNITS[found[2]]
    if tokens <= 0:
        raise ValueError(f"'{text}': training tokens must be above 0")
    return folder, tokens


def check(args: argparse.Namespace) -> None:
    check_options(args, "max_new_tokens", "batch_size", "chains", *(["nodes"] if args.nodes else []))
    check_counts(first=args.first)
    if args.max_new_tokens < 3:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: at least 3, so that a draft can be right or wrong")
    check_once("--chains", args.chains)
    check_once("--nodes", args.nodes or [])
    if min(args.nodes or [2]) < 2:
        raise ValueError(f"--nodes {min(args.nodes)}: a tree has at least 2 nodes, the root and one draft")
    folders = [folder for folder, _ in map(given, args.drafters)]
    check_once("", folders)
    check_names(folders, args.target)
    if args.answers and not args.answers.exists():
        check_file("--answers", args.answers)
    check_file("--out", args.out, beside=".md")
    for path in args.prompts:
        check_prompts(path)


if __name__ == "__main__":
    before_imports(parser(), check)

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.benchmarks.common import by_kind, difference_of, load_target_of, with_interval
from draftsmith.benchmarks.documents import markdown_table
from draftsmith.benchmarks.tables import cell, error_bars, facts_of, picture, print_table, table_of, write_report
from draftsmith.common.files import json_object, write_text
from draftsmith.common.progress import ProgressBar
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.load import read_named
from draftsmith.inference.drafters.names import short_name
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.text import answer_text
from draftsmith.inference.measure.calibrations import Calibration, calibration_of
from draftsmith.inference.measure.report import OTHER
from draftsmith.inference.measure.tree_statistics import (
    best_tree,
    dynamic_depths,
    ensemble_depths,
    fit_confidence,
    simulated_steps,
)
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import IndependentTree
from draftsmith.inference.verify.tree import Topology, chain, read_trees
from draftsmith.models.options import choose_device
from draftsmith.models.target import Target
from draftsmith.models.training import training_of

ROWS = 16  # texts that a drafter reads at once


# ---- the target's texts


@dataclass(frozen=True)
class Texts:
    """Prompts, and the target's greedy answers to them."""

    kinds: list[str]
    prompts: list[list[int]]
    answers: list[list[int]]

    def batches(self) -> list[tuple[list[int], Tensor, Tensor]]:
        """Numbers of texts of similar length, their tokens ``[S, T]`` int32 and which of these are an answer's."""
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        found: list[tuple[list[int], Tensor, Tensor]] = []
        for numbers in (order[start : start + ROWS] for start in range(0, len(order), ROWS)):
            rows = [torch.tensor(self.prompts[n] + self.answers[n], dtype=torch.int32) for n in numbers]
            places = torch.arange(max(map(len, rows)))
            begin = torch.tensor([len(self.prompts[n]) for n in numbers])[:, None]
            end = torch.tensor([len(row) for row in rows])[:, None]
            found.append((numbers, pad_sequence(rows, batch_first=True), (places >= begin) & (places < end)))
        return found


def texts_of(target: Target, asked: Sequence[Prompt], args: argparse.Namespace) -> Texts:
    """The target's greedy answers, those to earlier turns of a conversation, too; read from ``--answers`` if they are
    there, and else written there.

    Raises:
        ValueError: the file holds the answers of another target, or to other prompts.
    """
    digest = hashlib.sha256()
    for prompt in asked:
        digest.update(json.dumps([prompt.content, prompt.kind, prompt.later]).encode())
    request = {
        "target_fingerprint": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": args.max_new_tokens,
        "asked": digest.hexdigest(),
    }
    if args.answers and args.answers.exists():
        stored = json_object(args.answers, "answers")
        if wrong := [name for name, value in request.items() if stored.get(name) != value]:
            raise ValueError(f"--answers {args.answers}: of another run ('{wrong[0]}' differs); name another file")
        return Texts(*(stored[name] for name in ("kinds", "prompts", "answers")))
    decoder, known = SpeculativeDecoder(target), dict[tuple[int, ...], list[int]]()

    def answered(prompts: Sequence[list[int]]) -> list[list[int]]:
        """Longest last, so that rows of a batch are of similar length; what was answered before is not again."""
        new = sorted((list(each) for each in {*map(tuple, prompts)} - known.keys()), key=lambda each: (len(each), each))
        with ProgressBar("answers of the target", len(new), console, transient=True) as advance:
            done = 0

            def count(*_: object) -> None:
                nonlocal done
                done += 1
                advance(done)

            results = decoder.generate(new, args.max_new_tokens, batch_size=args.batch_size, on_end=count)
        known.update((tuple(prompt), result.tokens) for prompt, result in zip(new, results, strict=True))
        return [known[tuple(prompt)] for prompt in prompts]

    def texts(some: list[Prompt]) -> list[str]:
        return [answer_text(target, tokens) for tokens in answered(encode_prompts(some, target))]

    whole = with_later_turns(asked, texts)
    prompts = encode_prompts(whole, target)
    found = Texts([prompt.kind or OTHER for prompt in whole], prompts, answered(prompts))
    if args.answers:
        write_text(args.answers, json.dumps(request | vars(found)) + "\n")
        console.print(f"wrote {args.answers}", markup=False, soft_wrap=True)
    return found


# ---- what is simulated


def ranks_of(
    target: Target, calibration: Calibration, texts: Texts, with_choices: bool
) -> tuple[Tensor, Tensor | None]:
    """``[S, T, n, K]``, as :class:`Calibration` says; −1 at padding. If asked for, log-probabilities ``[S, T, K, R]``
    of each depth's likeliest tokens, −∞ at padding; None if they depend on drafted ones."""
    ranks_by, log_q_by = dict[int, Tensor](), dict[int, Tensor]()
    with ProgressBar("ranks", len(texts.prompts), console, transient=True) as advance:
        for numbers, tokens, supervised in texts.batches():
            if with_choices and calibration.choices:
                ranks, log_q = calibration.choices(target, tokens, supervised)
                log_q_by.update(zip(numbers, log_q, strict=True))
            else:
                ranks = calibration.ranks(target, tokens, supervised)
            ranks_by.update(zip(numbers, ranks[:, :, None] if ranks.dim() == 3 else ranks, strict=True))
            advance(len(ranks_by))

    def padded(parts: dict[int, Tensor], value: float) -> Tensor:
        return pad_sequence([parts[number] for number in range(len(parts))], batch_first=True, padding_value=value)

    return padded(ranks_by, -1), padded(log_q_by, -torch.inf) if log_q_by else None


def tree_of(folder: Path, file: Path | None, count: int, deepest: int) -> tuple[Topology, ...] | None:
    """The trees of a folder's n drafters; None if it has none.

    Raises:
        FileNotFoundError, ValueError: it cannot be read, or is deeper than the drafter drafts.
    """
    path = file or folder / "tree.json"
    if file is None and not path.exists():
        return None
    trees = read_trees(path, count)
    if (depth := max(tree.max_depth for tree in trees)) > deepest:
        raise ValueError(f"{path}: a tree of {depth} levels; '{folder}' drafts {deepest}")
    return trees


def by_halves(ranks: Tensor, log_q: Tensor | None, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Accepted drafts ``[S, T]`` by form, of fixed and dynamic trees of each size: in the texts of even numbers by what
    was counted on the others, and the other way round. ``ranks [S, T, K]``."""
    found: dict[str, Tensor] = {}
    for half in (0, 1):
        own = torch.arange(len(ranks)) % 2 == half
        known, begins = ranks[~own], ranks[~own][..., 0] >= 0
        confidence = None if log_q is None else fit_confidence(known[begins], log_q[~own][begins])
        for nodes in sizes:
            accepted = {f"{FIXED}, {nodes} nodes": ensemble_depths((best_tree(known, nodes),), ranks[own][:, :, None])}
            if log_q is not None:
                shape = DynamicShape(log_q.shape[-1], ranks.shape[-1], nodes)
                for by, how in ((None, ""), (confidence, " by confidence")):
                    tree = IndependentTree(shape, torch.device("cpu"), by)
                    accepted[f"{DYNAMIC}{how}, {nodes} nodes"] = dynamic_depths(tree, ranks[own], log_q[own])
            for form, depths in accepted.items():
                found.setdefault(form, torch.zeros(ranks.shape[:2], dtype=torch.int64))[own] = depths
    return found


def differences(taus: dict[str, Any]) -> dict[str, Any]:
    """Of each dynamic tree, its τ less that of the fixed tree of as many nodes, and the interval, paired by prompt."""
    found: dict[str, Any] = {}
    for form, by_set in taus.items():
        if form.startswith(DYNAMIC):
            fixed = taus[f"{FIXED}, {form.partition(', ')[2]}"][ALL]["by_prompt"]
            pairs = [one + other for one, other in zip(by_set[ALL]["by_prompt"], fixed, strict=True) if one[1]]
            columns = torch.tensor(pairs, dtype=torch.float64).view(-1, 4).t()
            found[form] = with_interval(columns, difference_of, "difference")
    return found


def conditional(accepted: Tensor, labelled: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """``[K, 2, S]``: of each text, how often the k-th draft was right at these places, and how often all before it were
    and the text has a token there. ``accepted [S, T]``; ``labelled [S, T, K]``: there is such a token."""
    depth = labelled.shape[-1]
    found = torch.zeros(depth, 2, len(accepted), dtype=torch.float64)
    for text, chosen_places in enumerate(places):
        at = torch.tensor(chosen_places, dtype=torch.int64)
        reached = accepted[text, at]
        for k in range(depth):
            offered = labelled[text, at, k] & (reached >= k)
            found[k, :, text] = torch.stack(((offered & (reached > k)).sum(), offered.sum()))
    return found


def measure(
    ranks: Tensor, kinds: Sequence[str], forms: dict[str, tuple[Topology, ...]], others: dict[str, Tensor]
) -> dict[str, Any]:
    """By form and kind of text: τ, its interval, and (committed tokens, steps) of each prompt; of the longest chain,
    acceptance by position. ``others``: accepted drafts ``[S, T]`` of further forms."""
    begins, of_set = ranks[:, :, 0, 0] >= 0, {ALL: list(range(len(kinds)))} | by_kind(kinds)
    taus: dict[str, Any] = {}
    positions: dict[str, Any] = {}
    accepted_by = {form: ensemble_depths(trees, ranks) for form, trees in forms.items()} | others
    for form, accepted in accepted_by.items():
        steps = simulated_steps(accepted, begins)
        sums = [[sum(tokens for _, tokens in row), len(row)] for row in steps]
        taus[form] = {}
        for name, numbers in of_set.items():
            chosen_sums = [sums[n] for n in numbers if sums[n][1]]
            columns = torch.tensor(chosen_sums, dtype=torch.float64).view(-1, 2).t()
            tau = with_interval(columns, name="tau") if chosen_sums else {"tau": None, "interval": None}
            taus[form][name] = tau | {"by_prompt": [sums[n] for n in numbers]}
        if form == TREE or form in others:
            continue
        labelled = ranks[:, :, 0, : forms[form][0].max_depth] >= 0  # forms are in the order of depth: the longest stays
        inside = {
            "in_steps": [[place for place, _ in row] for row in steps],
            "at_all_positions": [row.nonzero().flatten().tolist() for row in begins],
        }
        positions = {"form": form}
        for how, places in inside.items():
            counts = conditional(accepted, labelled, places)
            positions[how] = {
                name: [with_interval(k[:, numbers]) | {"count": int(k[1, numbers].sum())} for k in counts]
                for name, numbers in of_set.items()
            }
    return {"tau": taus, "less_fixed": differences(taus), "acceptance_by_position": positions}


# ---- tables and the picture


def tokens_text(tokens: float) -> str:
    unit, size = next((pair for pair in (("M", 1e6), ("k", 1e3)) if tokens >= pair[1]), ("", 1.0))
    return f"{tokens / size:.3g}{' ' * bool(unit)}{unit}"


def rows_of(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of τ."""
    sets = found["sets"]
    rows: list[list[str]] = []
    for row in found["drafters"]:
        for form, by_set in row["tau"].items():
            shown = f"{form}, {row['tree_nodes']} nodes" if form == TREE else form
            cells = [cell(by_set[name]["tau"], by_set[name]["interval"]) for name in (*sets, ALL)]
            if less := row["less_fixed"].get(form):
                cells[-1] += f"; less fixed {cell(less['difference'], less['interval'], '+.3f', ' to ')}"
            rows.append([row["family"], tokens_text(row["tokens"]), shown, *cells])
    return ["family", "training tokens", "form", *sets, ALL], rows


def position_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of acceptance by position, over all sets."""
    rows: list[list[str]] = []
    for row in found["drafters"]:
        positions = row["acceptance_by_position"]
        for how in ("in_steps", "at_all_positions"):
            cells = [cell(each["value"], each["interval"], ".3f") for each in positions[how][ALL]]
            rows.append([row["family"], tokens_text(row["tokens"]), how.replace("_", " "), *cells])
    depth = max(len(row) for row in rows) - 3
    rows = [row + ["–"] * (depth + 3 - len(row)) for row in rows]
    return ["family", "training tokens", "counted", *(f"draft {k}" for k in range(1, depth + 1))], rows


def markdown(found: dict[str, Any]) -> str:
    said = f"{Path(found['target']['name_or_path']).name}, {found['dtype']}, {found['device']}: {found['prompts']} "
    said += f"prompts, greedy answers of at most {found['max_new_tokens']} tokens; 95 % intervals over prompts."
    return (
        f"τ, simulated. {said}\n\n{markdown_table(*rows_of(found))}\n\nAcceptance of a chain's k-th draft where all "
        f"before it were accepted, over all sets: in the chain's steps, and at all positions of the texts.\n\n"
        f"{markdown_table(*position_rows(found))}\n"
    )


LINE: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.5}  # of the picture


def plot(found: dict[str, Any], path: Path) -> None:
    """A row of panels for each family: τ over training tokens, of all prompts and of each set; acceptance by
    position."""
    families = list(dict.fromkeys(row["family"] for row in found["drafters"]))
    sets = [ALL, *(found["sets"] if len(found["sets"]) > 1 else [])]
    panels = len(sets) + 1
    with picture(path, 3.2 * panels + 1, 3.2 * len(families), panels, rows=len(families)) as axes:
        for number, family in enumerate(families):
            rows = [row for row in found["drafters"] if row["family"] == family]  # by tokens
            own, last = axes[number * panels :][: len(sets)], axes[number * panels + len(sets)]
            ticks = sorted({row["tokens"] for row in rows})
            highest = 1.2
            for axis, name in zip(own, sets, strict=True):
                for form in dict.fromkeys(form for row in rows for form in row["tau"]):
                    points = [(row["tokens"], row["tau"][form][name]) for row in rows if form in row["tau"]]
                    points = [(tokens, each["tau"], each["interval"]) for tokens, each in points if each["tau"]]
                    highest = max([highest, *(max(tau, *(bounds or [tau])) for _, tau, bounds in points)])
                    error_bars(axis, points, label=form, **LINE)
                axis.set_xscale("log")
                axis.set_xticks(ticks, [tokens_text(each) for each in ticks])
                axis.minorticks_off()
                axis.set_xlim(ticks[0] / 1.6, ticks[-1] * 1.6)
                axis.set_title(f"{family}: {'all prompts' if name == ALL else name}", fontsize=10)
                axis.set_xlabel("training tokens")
            for axis in own:
                axis.set_ylim(1, highest * 1.03)
            own[0].set_ylabel("τ, 95 % interval over prompts")
            own[-1].legend(frameon=False, fontsize=8)  # of one axis for all, this panel often has the lowest lines
            for row in rows:
                values = list(enumerate(row["acceptance_by_position"]["in_steps"][ALL], 1))
                points = [(k, each["value"], each["interval"]) for k, each in values if each["value"] is not None]
                error_bars(last, points, label=tokens_text(row["tokens"]), **LINE)
            last.set_xticks(range(1, 1 + max(len(row["acceptance_by_position"]["in_steps"][ALL]) for row in rows)))
            last.set_ylim(0, 1.02)
            last.set_title(f"{family}: acceptance of draft k\nwhere all before it were", fontsize=10)
            last.set_xlabel("k")
            last.legend(frameon=False, fontsize=8, title="training tokens", title_fontsize=8)


# ---- the command


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    torch.set_num_threads(args.threads)
    asked = read_sets(args.prompts, args.first)
    tokens_given = dict(map(given, args.drafters))
    stored = {name: read_named(name, args.target) for name in tokens_given}
    opened: dict[str, Calibration] = {}
    trained: dict[str, tuple[float, str, dict[str, Any]]] = {}
    for name, (folder, config, weights) in stored.items():
        if args.nodes and config["drafter_type"] == "ssm":
            raise ValueError(f"--nodes: '{name}' is an ensemble, whose models have a tree each; leave it out")
        calibration = calibration_of(folder, config, weights)
        if calibration is None:
            raise ValueError(f"{folder}: drafter_type '{config['drafter_type']}' has no ranks of its own to simulate")
        opened[name] = calibration
        training = training_of(folder)
        options = {"given": tokens_given[name], **{key: training[key] for key in ("labels_seen", "answer_tokens")}}
        found_by = next((key for key, value in options.items() if value), None)
        if found_by is None:
            raise ValueError(f"{folder}: does not say how many tokens it was trained with; write {name}=0.33M")
        trained[name] = options[found_by], found_by, training
    target = load_target_of(stored, args.target, device=choose_device(args.device), dtype=args.dtype)
    texts = texts_of(target, asked, args)
    if args.nodes and len(texts.prompts) < 2:
        raise ValueError("--nodes: trees are chosen on the other half of the prompts; give at least two prompts")
    rows: list[dict[str, Any]] = []
    for name, calibration in opened.items():
        folder, config, _ = stored[name]
        ranks, log_q = ranks_of(target, calibration, texts, bool(args.nodes))
        count, deepest = ranks.shape[2:]
        if not bool((ranks >= 0).any()):
            raise ValueError("no answer has three tokens; raise --max-new-tokens, or give other prompts")
        lengths = sorted({min(length, deepest) for length in args.chains})
        forms = {f"chain {length}": (chain(length),) * count for length in lengths}
        tree = tree_of(folder, args.tree, count, deepest)
        if tree is not None:
            forms[TREE] = tree
        others: dict[str, Tensor] = {}
        if args.nodes:
            others = by_halves(ranks[:, :, 0], log_q, args.nodes)
        tokens, source, training = trained[name]
        version = f"-{config['version']}" if "version" in config else ""
        rows.append(
            {
                "drafter": short_name(name),
                "family": f"{config['drafter_type']}{version}",
                "tokens": tokens,
                "tokens_are": source,
                "training": training,
                "tree_nodes": 1 + sum(len(each.paths) for each in tree) if tree else None,
                **measure(ranks, texts.kinds, forms, others),
            }
        )
    rows.sort(key=lambda row: (row["family"], row["tokens"]))
    found = facts_of(__file__, target) | {
        **chosen(args, "max_new_tokens", "chains", "first"),
        "prompts": len(texts.prompts),
        "answer_tokens": sum(map(len, texts.answers)),
        "sets": list(dict.fromkeys(texts.kinds)),
        "drafters": rows,
    }
    for heads, cells in (rows_of(found), position_rows(found)):
        table = table_of(*heads, left=3)
        for row in cells:
            table.add_row(*row)
        print_table(table)
    if args.out:
        write_report(args.out, found, plot)
        write_text(args.out.with_suffix(".md"), markdown(found))
        console.print(f"wrote {args.out.with_suffix('.md')}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
