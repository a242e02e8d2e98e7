"""Calibrate a drafter's tree: which rank paths are right on held-out text, and which of them pay.

    python inference/calibrate.py runs/demo              # writes runs/demo/tree.json
    python inference/calibrate.py runs/demo --nodes 32   # the best tree of 32 nodes, whatever it costs here
    python inference/calibrate.py ngram --target models/tiny-lm     # step costs alone, for drafters without a tree

The best tree of each size and its expected tokens per step follow from the ranks that the drafter gives to the true
tokens (inference/measure/tree_statistics.py), on rows of the text in a fixed random order, as many as --seconds allows.
The time of a step is estimated from the target's step costs on this machine (inference/measure/step_costs.py).

Draft heads (Medusa) draft all of their tree at once. Their tree.json holds the nodes that are likeliest, with their
acceptance probabilities, and each step takes those that pay on its machine. Of other drafters each level of a tree
costs a forward pass: the tree written has the most E[tokens] / estimated step time. Chains compete with the trees. An
ensemble has a tree for each of its models; the number of models that draft is chosen, too.

An EAGLE drafter may instead grow a dynamic tree at each step, of the nodes that it then finds likeliest. Some sizes of
it and the fixed tree continue the same texts; the fastest size is written beside the fixed tree if it is faster than
that, and then decodes. Draft heads may, too; what their dynamic trees accept is simulated on the text.

`ngram`, `draft_model:PATH` and merges (`runs/demo+ngram`) choose their nodes step by step, by their own estimates of
acceptance and by what a step costs by its number of rows. These costs are timed at their first use and kept in the
cache folder; calibrating times them again, and calibrates the drafter folder that is part of a merge.

Shape letters: S sequences, T tokens, K depths (draft heads), n drafters of an ensemble (1 of any other).
"""

# ruff: noqa: E402

import argparse
import math
from pathlib import Path

from draftsmith.common.command import CommandLine, available_cores, before_imports, run_command
from draftsmith.inference.commands.options import check_counts, check_threads
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names, folder_of, has_folder, parts_of
from draftsmith.models.options import DECODERS, target_arguments, target_options


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", help="a drafter folder, for example runs/demo, or another name that decode.py takes")
    parser.add_argument("--nodes", type=int, help="nodes of the tree, root included; those that pay if left out")
    parser.add_argument(
        "--at-load", action="store_true", help="let each machine choose the nodes: what draft heads do without --nodes"
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
        help="time for ranks, and for dynamic trees beside the fixed one, once the target is loaded (default 45); "
        "setting up decoders for these comes on top",
    )
    target_options(parser)
    parser.add_argument("--threads", type=int, help="CPU threads; all cores if left out")
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: (check_names([args.drafter], args.target), check_prompts(args.prompts)))

import torch

from draftsmith.common.files import check_folder
from draftsmith.inference.drafters.load import read_named
from draftsmith.inference.measure.step_costs import step_costs
from draftsmith.inference.measure.tree_calibration import Settings, alone, calibrate, fastest_dynamic, read_held_out
from draftsmith.inference.verify.tree import MAX_NODES
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import renew_fingerprint
from draftsmith.models.precision import say
from draftsmith.models.target import Target, load_target


def check(args: argparse.Namespace) -> None:
    """Raise a ValueError for an option that is out of its range, or contradicts another one."""
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


def check_no_tree(args: argparse.Namespace) -> None:
    """Raises ValueError: an option is given that is of trees, and the drafter has none."""
    for name in ("at_load", "nodes", "prompts"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"'{args.drafter}' has no tree, only the step costs are measured: leave out {option}")


def print_costs(target: Target, lean: bool | None) -> None:
    """Time the target's steps again and print what they cost."""
    costs = step_costs(target, lean, remeasure=True)
    print(f"a plain step: {costs.plain_seconds * 1e3:.2f} ms; times that by nodes: ", end="")
    print(", ".join(f"{rows}: {cost:.2f}" for rows, cost in costs.points))


def main() -> None:
    from draftsmith.inference.measure.calibrations import calibration_of  # which imports every family

    args = parser().parse_intermixed_args()
    check(args)
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
    folder, config, weights = read_named(folder_of(folders[0])[0], args.target, **options)
    drafter, target_name = calibration_of(folder, config, weights), args.target or config["target"]["name_or_path"]
    options |= {} if args.target else {"revision": config["target"].get("revision")}
    if drafter is None:
        check_no_tree(args)
        return print_costs(target_of(folder, config, load_target(target_name, **options)), lean)
    if args.at_load and drafter.step_time is not None:
        raise ValueError(f"--at-load is for draft heads; the nodes of '{folder}' follow from its trees: leave it out")
    check_folder("DRAFTER", folder.resolve())
    with alone(folder):
        data = {} if given else read_held_out(folder)
        target = target_of(folder, config, load_target(target_name, **options))
        renew_fingerprint(folder, target)
        settings = Settings(args.nodes, args.max_new_tokens, args.seconds, lean)
        prompts = encode_prompts(given, target, say)
        chosen, compared = calibrate(folder, drafter, target, prompts, data, settings)
    if len(parts_of(args.drafter)) > 1:
        print_costs(target, lean)
    dynamic = fastest_dynamic(compared)
    if chosen.speedup * (1.0 if dynamic is None else dynamic.speed) < 1:
        print("plain decoding is faster here: too few drafts are accepted for what the tree's steps cost")


if __name__ == "__main__":
    run_command(main)
