"""Compare ensembles of small speculative models (SSMs) for one target: which proposes the better tree of N nodes?

    python benchmarks/ensembles.py runs/boosted runs/single runs/seeds runs/larger --prompts P.jsonl --out F.json
    python benchmarks/ensembles.py runs/boosted runs/single --prompts P.jsonl --nodes 8 16 24 --expansion 4 2 2 1 1
    python benchmarks/ensembles.py runs/boosted --prompts P.jsonl --sampling 1.0 --pattern 1 1 w 1 1 1 1 1

The target first answers the prompts greedily. On these answers, held-out text by kind:

SSMs      parameters; the share of positions where an SSM's chain of most likely tokens is right up to depth 1, 2, …;
          how many of the target's tokens are among the SSM's 1, 2, …, 5 most likely ones;
          coverage@s: the share of answers whose first M tokens one of the first s SSMs would have written; overlap: of
          the answers that either of two SSMs covers, the share that both do.
τ         committed tokens of a step (bonus token included), decoded by the engine. Each SSM drafts the expansion, the
          trees are merged (equal paths become one node), and the N likeliest nodes by the SSMs' own probabilities are
          verified, the root included, whatever a step costs. Differences are to the first folder, on the same prompts.
sampling  with --sampling T, the first folder's first SSM alone, by the width w of --pattern: τ of multi-step
          speculative sampling (drawn without replacement, or i.i.d.), of naive sampling and of greedy decoding.
chains    c: time of an SSM's pass over a plain step, measured here; the speed-up that a chain of γ tokens should have,
          from the acceptance by depth and measured steps; the c at which it would be 1.

Intervals are 95 % bootstrap intervals over prompts. Greedy outputs are compared with the target's own; exit code 1 if
one differs by more than rounding (inference/measure/lossless.py).

Shape letters: S answers, T tokens, n SSMs, K depths.
"""

import argparse
import itertools
import operator
import re
from collections.abc import Sequence
from typing import Any

from draftsmith.benchmarks.options import (
    check_once,
    check_options,
    chosen,
    list_option,
    machine_options,
    prompts_option,
)
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names, short_name
from draftsmith.models.options import choose_device

DRAWS = ("without_replacement", "iid", "naive")
TOP = 5  # most likely tokens of an SSM, among which the target's is counted
PUBLISHED = (
    "Published for other models (SpecInfer, arXiv 2305.09781): multi-step over naive sampling 1.26–1.28 × at width 5; "
    "greedy τ 2.2–2.95 at width 1, 3.1–3.9 at width 5."
)


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="drafters of type ssm for the same target")
    prompts_option(parser)
    parser.add_argument("--target", metavar="FOLDER", help="if it is not where the first folder's config says")
    list_option(parser, "--nodes", [8, 16, 24], "N", "of the merged tree, root included")
    children = "children of each node that an SSM drafts, by depth (default 4 2 2 1 1)"
    list_option(parser, "--expansion", [4, 2, 2, 1, 1], "K", children)
    parser.add_argument(
        "--match", type=int, metavar="M", help="tokens for coverage (default: what the first folder was marked by)"
    )
    parser.add_argument("--depth", type=int, default=8, metavar="K", help="of chains (default 8)")
    parser.add_argument("--sampling", type=float, metavar="T", help="also compare ways of sampling at temperature T")
    list_option(parser, "--widths", [1, 2, 3, 4, 5], "W", "for --sampling")
    expansion = "expansion for --sampling, with a w for the width (default w 1 1 1)"
    list_option(parser, "--pattern", ["w", "1", "1", "1"], "K", expansion, str)
    parser.add_argument("--seed", type=int, default=0, help="for --sampling")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts decoded at once (default 8)")
    end = "end decoding with drafters after so long, twice that with --sampling (16 groups of prompts are decoded "
    parser.add_argument("--seconds", type=float, metavar="S", help=end + "in any case)")
    machine_options(parser, "of target and SSMs")
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: (check_names(args.folders, args.target), check_prompts(args.prompts)))

import torch
from torch import Tensor, nn

from draftsmith.benchmarks.common import (
    answers_of,
    decoding,
    difference_of,
    interval_of,
    load_target_of,
    ratio_of,
    read_drafters,
    steps_of,
    with_interval,
)
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.inference.drafters.ssm import Ensemble, check_config, load_ensemble
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.measure.calibrations import next_ranks, pass_time
from draftsmith.inference.measure.lossless import check_texts
from draftsmith.inference.measure.report import OTHER
from draftsmith.inference.measure.step_costs import StepCosts, step_costs
from draftsmith.inference.measure.timing import Method, accepted_interval, run_rounds
from draftsmith.inference.measure.tree_statistics import chained_ranks, coverage, matched_answers, overlap
from draftsmith.inference.trees.merged import MergedDrafter
from draftsmith.inference.verify.sampling import Sampling
from draftsmith.models.target import Target

Outputs = dict[int, Generation]  # prompt number → result

# ---- shares and their intervals


def share(counts: Tensor, of: Tensor) -> dict[str, Any]:
    """Σ counts / Σ of, both ``[S]`` by prompt, with its interval; None where nothing was counted."""
    return with_interval(torch.stack((counts, of)), name="share")


def chain_shares(ranks: Tensor) -> list[dict[str, Any]]:
    """By depth k, the share of positions where all first k ranks are 0; ``ranks``: ``[S, T, K]`` as
    :func:`chained_ranks` returns them. A position counts if it has a label at depth k."""
    right = (ranks == 0).cumprod(-1).sum(1)  # [S, K]
    return [share(right[:, k], (ranks[..., k] >= 0).sum(1)) for k in range(ranks.shape[-1])]


def accepted_columns(outputs: Sequence[Outputs]) -> Tensor:
    """``[2 · len(outputs), P]``: committed tokens and number of steps, by prompt with a step."""
    rows = [steps_of([result for _, result in sorted(each.items())]) for each in outputs]
    columns = torch.tensor(rows, dtype=torch.float64).permute(0, 2, 1).flatten(0, 1)
    return columns[:, (columns[1::2] > 0).all(0)]


def tau_fields(outputs: Outputs) -> dict[str, Any]:
    """τ over all steps of the answers, and its interval; None without a step."""
    steps = [length for result in outputs.values() for length in result.accepted]
    tau = round(sum(steps) / len(steps), 4) if steps else None
    return {"tau": tau, "tau_interval": accepted_interval(list(outputs.values()))}


# ---- the parts of the comparison


@torch.inference_mode()
def measure_text(ensemble: Ensemble, tokens: Tensor, supervised: Tensor, match: int, depth: int) -> dict[str, Any]:
    """Parameters, acceptance by depth, coverage and overlap of an ensemble's SSMs.

    Args:
        tokens, supervised: ``[S, T]``, one answer in each row.
        match: first tokens of an answer that have to be right.
        depth: K.
    """
    following = next_ranks(ensemble, tokens, supervised)  # [n, S, T]
    ssms: dict[str, Any] = {}
    for (name, model), ranks in zip(ensemble.models.items(), following, strict=True):
        shares = chain_shares(chained_ranks(ranks, tokens, supervised, depth))
        written = ranks >= 0
        hits = [share((written & (ranks < k)).sum(1), written.sum(1)) for k in range(1, TOP + 1)]
        ssms[name] = parameters(model) | {"acceptance_by_depth": shares, "top_k": hits}
    matched = matched_answers(following, supervised, match)  # [n, S]
    ones = torch.ones(matched.shape[1])
    either = lambda total: torch.where(total[1] > 0, total[0] / total[1], 1.0)  # noqa: E731
    return {
        "ssms": ssms,
        "coverage": coverage(matched),
        "coverage_interval": [interval_of(torch.stack((matched[: s + 1].any(0), ones))) for s in range(len(matched))],
        "overlap": overlap(matched),
        "overlap_interval": [
            [interval_of(torch.stack((one & other, one | other)), either) for other in matched] for one in matched
        ],
    }


def parameters(model: Target) -> dict[str, int]:
    """Parameters of an SSM, in all and without input embedding and LM head; tied weights count once."""
    tables = [model.model.get_input_embeddings(), model.lm_head]
    outside = {id(weight) for table in tables if isinstance(table, nn.Module) for weight in table.parameters()}
    sizes = [(id(weight), weight.numel()) for weight in model.model.parameters()]
    return {
        "parameters": sum(size for _, size in sizes),
        "parameters_without_embeddings": sum(size for key, size in sizes if key not in outside),
    }


def compare_budgets(
    target: Target,
    ensembles: dict[str, Ensemble],
    args: argparse.Namespace,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    kinds: Sequence[str],
) -> tuple[dict[str, dict[str, Any]], int]:
    """τ of each ensemble at each number of nodes, by the engine.

    Args:
        expected: the target's own greedy tokens after each prompt.

    Returns:
        By folder the figures of each number of nodes; the number of tokens that differ from the target's by more than
        rounding.
    """
    methods: dict[str, Method] = {}
    for nodes in args.nodes:
        for name, ensemble in ensembles.items():
            drafters = {part: ensemble.drafter(part, target, args.expansion) for part in ensemble.models}
            decoder = SpeculativeDecoder(target, MergedDrafter(drafters, target, nodes))
            methods[f"{name} @ {nodes}"] = decoding(decoder, args.max_new_tokens, args.batch_size)
    timed = run_rounds(methods, prompts, 1, [prompts[0][:8]], args.batch_size, args.seconds, kinds=kinds)
    rows: dict[str, dict[str, Any]] = {name: {} for name in ensembles}
    mismatches = 0
    for nodes in args.nodes:
        first: Outputs = timed[f"{args.folders[0]} @ {nodes}"].outputs
        for name in ensembles:
            outputs: Outputs = timed[f"{name} @ {nodes}"].outputs
            row = rows[name][str(nodes)] = tau_fields(outputs) | differing(target, prompts, outputs, expected)
            mismatches += row["mismatches"]
            steps = sum(len(result.accepted) for result in outputs.values())
            drafted = sum(result.drafted for result in outputs.values())
            row["mean_nodes"] = round(1 + drafted / steps, 3) if steps else None
            accepted = [result.accepted_from for result in outputs.values() if result.accepted_from]
            row["accepted_from"] = [sum(each) for each in zip(*accepted, strict=True)]
            row["kinds"] = {
                kind: tau_fields({number: result for number, result in outputs.items() if kinds[number] == kind})
                for kind in dict.fromkeys(kinds)
            }
            if first is not outputs:
                row |= difference_fields(outputs, first)
    return rows, mismatches


def differing(
    target: Target, prompts: Sequence[list[int]], outputs: Outputs, expected: Sequence[list[int]]
) -> dict[str, int]:
    """How many outputs differ from the target's own, and how many of their tokens by more than rounding."""
    numbers = [number for number, result in outputs.items() if result.tokens != expected[number]]
    check = check_texts(
        target, [prompts[n] for n in numbers], [outputs[n].tokens for n in numbers], [expected[n] for n in numbers]
    )
    return {"texts": len(outputs), "different": len(numbers), "mismatches": check.mismatches}


def difference_fields(outputs: Outputs, base: Outputs) -> dict[str, Any]:
    """τ less another one's on the same prompts, with its interval."""
    return with_interval(accepted_columns([outputs, base]), difference_of, "difference", "difference_interval")


def compare_sampling(
    target: Target,
    ensemble: Ensemble,
    args: argparse.Namespace,
    prompts: Sequence[list[int]],
    expected: Sequence[list[int]],
    kinds: Sequence[str],
) -> tuple[dict[str, Any], int]:
    """Multi-step and naive sampling, and greedy decoding, with the first SSM of the first folder's ensemble by the
    width of its tree.

    Returns:
        The figures; the number of greedy tokens that differ from the target's by more than rounding.
    """
    ssm, sampling = next(iter(ensemble.models)), Sampling(temperature=args.sampling, seed=args.seed)
    methods: dict[str, Method] = {}
    sizes = args.max_new_tokens, args.batch_size
    for width in args.widths:
        expansion = [width if children == "w" else int(children) for children in args.pattern]
        greedy = SpeculativeDecoder(target, ensemble.drafter(ssm, target, expansion))
        methods[f"greedy {width}"] = decoding(greedy, *sizes)
        for draws in DRAWS:
            sampled = SpeculativeDecoder(target, ensemble.drafter(ssm, target, expansion, draws=draws))
            methods[f"{draws} {width}"] = decoding(sampled, *sizes, "mss", sampling)
    timed = run_rounds(methods, prompts, 1, [prompts[0][:8]], args.batch_size, args.seconds, kinds=kinds)
    widths: dict[str, Any] = {}
    mismatches = 0
    for width in args.widths:
        outputs: dict[str, Outputs] = {name: timed[f"{name} {width}"].outputs for name in ("greedy", *DRAWS)}
        row: dict[str, Any] = {name: tau_fields(each) for name, each in outputs.items()}
        for name, each in outputs.items():
            row[name]["accepted_by_prompt"] = steps_of([result for _, result in sorted(each.items())])
        row["greedy"] |= differing(target, prompts, outputs["greedy"], expected)
        mismatches += row["greedy"]["mismatches"]
        for draws in DRAWS:
            columns = accepted_columns([outputs[draws]])
            row[draws]["accepted"] = share(columns[0] - columns[1], columns[1])
        for draws in DRAWS[:-1]:
            row[draws] |= ratio_fields(accepted_columns([outputs[draws], outputs["naive"]]))
        widths[str(width)] = row
    setting = {"ssm": f"{args.folders[0]}/{ssm}", "temperature": args.sampling, **chosen(args, "pattern", "seed")}
    return setting | {"widths": widths, "published": PUBLISHED}, mismatches


def ratio_fields(columns: Tensor) -> dict[str, Any]:
    """Ratios of τ and of accepted drafted tokens per step, with intervals; ``columns``: ``[4, P]`` as
    :func:`accepted_columns` returns them for the two."""

    def of_accepted(total: Tensor) -> Tensor:
        return (total[0] / total[1] - 1) / (total[2] / total[3] - 1)

    of_tau = with_interval(columns, ratio_of, "tau_over_naive", "tau_over_naive_interval")
    return of_tau | with_interval(columns, of_accepted, "accepted_over_naive", "accepted_over_naive_interval")


def chain_forecast(shares: Sequence[dict[str, Any]], cost: float, costs: StepCosts) -> list[dict[str, Any]]:
    """What chains of γ = 1, 2, … tokens should give: expected tokens of a step E = 1 + Σ_{k ≤ γ} a_k, where a_k is the
    share of positions where the first k are right; expected speed-up E / (γ c + t), where t is the measured time of a
    step with γ + 1 nodes in plain steps; the c at which it is 1, and the same for t = 1. No c is below 0."""
    rows: list[dict[str, Any]] = []
    expected = 1.0
    for gamma, each in enumerate(shares, 1):
        if each["share"] is None:
            break
        expected += each["share"]
        step = costs.relative(gamma + 1)
        figures = {
            "tokens": expected,
            "step": step,
            "speedup": expected / (gamma * cost + step),
            "break_even": max(0.0, expected - step) / gamma,
            "break_even_if_a_step_costs_1": (expected - 1) / gamma,
        }
        rows.append({"gamma": gamma} | {name: round(value, 4) for name, value in figures.items()})
    return rows


# ---- tables


def print_tables(found: dict[str, Any]) -> None:
    folders, nodes = found["folders"], found["nodes"]
    depths = [k for k in (1, 2, 4, 8) if k <= found["depth"]]
    table = table_of(
        "SSM", "parameters", "no embeddings", *(f"right to depth {k}" for k in depths), "in top 1, 2, …, 5"
    )
    for name, folder in folders.items():
        for ssm, row in folder["ssms"].items():
            shares = [row["acceptance_by_depth"][k - 1] for k in depths]
            hits = " ".join(cell(each["share"]) for each in row["top_k"])
            sizes = (f"{row[field]:,}" for field in ("parameters", "parameters_without_embeddings"))
            table.add_row(f"{short_name(name)}/{ssm}", *sizes, *(cell(s["share"], s["interval"]) for s in shares), hits)
    print_table(table)

    most = max(len(folder["coverage"]) for folder in folders.values())
    table = table_of("folder", *(f"coverage@{s}" for s in range(1, most + 1)), "overlap")
    for name, folder in folders.items():
        covered = [cell(*pair) for pair in zip(folder["coverage"], folder["coverage_interval"], strict=True)]
        pairs = [
            f"{i + 1}&{j + 1} {cell(folder['overlap'][i][j], folder['overlap_interval'][i][j])}"
            for i, j in itertools.combinations(range(len(folder["overlap"])), 2)
        ]
        table.add_row(short_name(name), *covered, *["–"] * (most - len(covered)), ", ".join(pairs) or "–")
    print_table(table, f"\nFirst {found['match']} tokens of {found['prompts']} answers")

    kinds = list(found["kinds"]) if len(found["kinds"]) > 1 else []
    table = table_of("folder", "nodes", "τ", *(f"τ {kind}" for kind in kinds), "τ less the first's", "identical")
    for count in nodes:
        for name, folder in folders.items():
            row = folder["tau"][str(count)]
            cells = [cell(each["tau"], each["tau_interval"]) for each in (row, *map(row["kinds"].get, kinds))]
            difference = cell(row.get("difference"), row.get("difference_interval"), "+.2f", " to ")
            identical = f"{row['texts'] - row['different']}/{row['texts']}"
            table.add_row(short_name(name), f"{row['mean_nodes'] or count:g}", *cells, difference, identical)
    print_table(table, f"\nExpansion {found['expansion']} of each SSM, merged; nodes: mean of a step")
    if found["sampling"]:
        print_sampling(found["sampling"])

    table = table_of("SSM", "c", "γ", "tokens", "speed-up", "1 at c =", "if a step of γ + 1 nodes costs 1: c =")
    for name, folder in folders.items():
        for ssm, row in folder["ssms"].items():
            for each in row["chains"]:
                if each["gamma"] in depths:
                    fields = ("tokens", "speedup", "break_even", "break_even_if_a_step_costs_1")
                    cells = [f"{each[field]:.2f}" for field in fields]
                    table.add_row(f"{short_name(name)}/{ssm}", f"{row['cost']:.3f}", str(each["gamma"]), *cells)
    print_table(table, "\nChains of γ tokens by one SSM, expected")


def print_sampling(sampling: dict[str, Any]) -> None:
    columns = [f"{name.replace('_', ' ')} τ" for name in ("greedy", *DRAWS)]
    ratios = [f"{name.replace('_', ' ')} / naive" for name in DRAWS[:-1]]
    table = table_of("width", *columns, *ratios, *(f"{ratio}, accepted" for ratio in ratios))
    for width, row in sampling["widths"].items():
        cells = [cell(row[name]["tau"], row[name]["tau_interval"]) for name in ("greedy", *DRAWS)]
        for field in ("tau_over_naive", "accepted_over_naive"):
            cells += [cell(row[name][field], row[name][f"{field}_interval"]) for name in DRAWS[:-1]]
        table.add_row(width, *cells)
    expansion = " ".join(sampling["pattern"])
    print_table(table, f"\n{sampling['ssm']} alone, expansion {expansion}, temperature {sampling['temperature']:g}")
    print(sampling["published"])


# ---- the command


def check(args: argparse.Namespace) -> None:
    check_options(args, "depth", "match", "batch_size", "nodes", "expansion", "widths")
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: must be at least 2; the first token needs no draft")
    drafted = 1 + sum(itertools.accumulate(args.expansion, operator.mul))
    if max(args.nodes) > drafted:
        raise ValueError(
            f"--nodes {max(args.nodes)}: one SSM drafts a tree of {drafted} nodes by --expansion "
            f"{' '.join(map(str, args.expansion))}; give a wider or deeper expansion"
        )
    written = " ".join(args.pattern)
    if args.pattern.count("w") != 1 or not re.fullmatch(r"(w|[1-9]\d*)( (w|[1-9]\d*))*", written, re.ASCII):
        raise ValueError(f"--pattern {written}: write numbers from 1 on and one w; for example w 1 1 1")
    if args.sampling is not None and Sampling(temperature=args.sampling, seed=args.seed).greedy:
        raise ValueError(f"--sampling {args.sampling:g}: must be above 0; greedy decoding is compared in any case")
    for option, values in (("", args.folders), ("--nodes", args.nodes), ("--widths", args.widths)):
        check_once(option, values)


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    given = read_prompts(args.prompts)
    torch.set_num_threads(args.threads)
    options: dict[str, Any] = {"dtype": args.dtype, "device": choose_device(args.device)}
    stored = read_drafters(args.folders, "ssm")
    for drafter in stored.values():
        check_config(*drafter)
    target = load_target_of(stored, args.target, **options)
    ensembles = {name: load_ensemble(*drafter, target) for name, drafter in stored.items()}
    prompts = encode_prompts(given, target)
    kinds = [prompt.kind or OTHER for prompt in given]
    first = ensembles[args.folders[0]]
    match = args.match or first.mark_tokens
    tokens, supervised = answers_of(target, prompts, args.max_new_tokens, args.batch_size)
    expected = [row[mask].tolist() for row, mask in zip(tokens, supervised, strict=True)]

    folders = {
        name: measure_text(ensemble, tokens, supervised, match, args.depth) for name, ensemble in ensembles.items()
    }
    by_nodes, mismatches = compare_budgets(target, ensembles, args, prompts, expected, kinds)
    sampling = None
    if args.sampling is not None:
        sampling, more = compare_sampling(target, first, args, prompts, expected, kinds)
        mismatches += more
    costs = step_costs(target)
    for name, ensemble in ensembles.items():
        folders[name]["tau"] = by_nodes[name]
        for ssm, row in folders[name]["ssms"].items():
            row["cost"] = round(pass_time(ensemble, ssm, target, costs), 4)
            row["chains"] = chain_forecast(row["acceptance_by_depth"], row["cost"], costs)
    found = facts_of(__file__, target) | {
        **chosen(args, "max_new_tokens", "depth", "nodes", "expansion", "threads"),
        "prompts": len(prompts),
        "kinds": {kind: kinds.count(kind) for kind in kinds},
        "match": match,
        "folders": folders,
        "sampling": sampling,
    }
    print_tables(found)
    if args.out:
        write_report(args.out, found)
    if mismatches:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
