"""Four ways to train Medusa heads, with equally many head-training steps: τ, speed-up, how far the target has moved.

    python benchmarks/medusa_stages.py --prompts runs/bench-medusa/prompts.jsonl --out runs/bench-medusa
    python benchmarks/medusa_stages.py --prompts runs/demo/prompts.jsonl --out runs/bench-medusa --steps 100  # rough

    medusa-1         the target frozen
    joint, direct    heads and target together from the start, cross-entropy (arXiv 2401.10774 §2.2.2 says: it harms)
    joint, 2 stages  the heads alone for half of the steps, then together, cross-entropy
    self-distilled   the same, but KL keeps the target near its original distribution

All train on the same answers of the target, by recipes/tiny-medusa2.yaml (--recipe for another). Finished runs are
kept: the command resumes where it was stopped. τ is given twice: on what the trained target now writes (real, by the
engine), and on what the original target wrote (simulated). A target whose text became more predictable would gain in
the first and lose in the second. Harm shows in KL and in repeated 4-grams. It does not show in the perplexity of the
original's greedy answers, which falls in any training on them.
"""

import json
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import prompts_option
from draftsmith.common.command import CommandLine, available_cores, before_imports, make_console, run_command
from draftsmith.common.files import check_folder, read_json, read_text
from draftsmith.inference.commands.prompts import check_prompts, read_prompts
from draftsmith.train.early import reader

PARSER = CommandLine(__doc__)
PARSER.add_argument("--recipe", default="recipes/tiny-medusa2.yaml", help="which the runs follow (%(default)s)")
prompts_option(PARSER)
PARSER.add_argument("--steps", type=int, default=400, help="head-training steps of each way")
PARSER.add_argument("--max-new-tokens", type=int, default=128, help="tokens of an answer, at most (%(default)s)")
PARSER.add_argument("--repeat", type=int, default=1, help="rounds over all prompts; the median counts")
PARSER.add_argument(
    "--out", type=Path, default=Path("runs/bench-medusa"), metavar="DIR", help="of the runs and figures (%(default)s)"
)
PARSER.add_argument("overrides", nargs="*", metavar="section.field=value", help="for every run")
if __name__ == "__main__":
    before_imports(PARSER, lambda args: (check_prompts(args.prompts), reader("medusa")(args)))

import torch
from safetensors.torch import load_file

from draftsmith.benchmarks.common import decoding, steps_of
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.common.recipe import read_recipe
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure import report as reporting
from draftsmith.inference.measure.lossless import check_texts
from draftsmith.inference.measure.timing import accepted_interval, run_rounds
from draftsmith.inference.measure.tree_statistics import best_tree, head_ranks, in_batches, simulate
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import read_drafter, write_json
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train.medusa import SIMULATED_NODES
from draftsmith.train.sections.medusa import MedusaRecipe

console = make_console()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def ways(steps: int, recipe: MedusaRecipe) -> dict[str, list[str]]:
    """The overrides of each way, by name; the heads train for ``steps`` steps in all of them.

    Args:
        recipe: has the two stages of Medusa-2.
    """
    heads, joint = (stage.model_dump(mode="json") for stage in recipe.stages)
    # No KL limit applies then, so that the weights are chosen by τ alone, however far the target has moved.
    weights = {"loss": "ce", "head_weight": 0.2, "ramp": "constant", "ramp_steps": None, "max_kl": 100.0}
    loose = {**joint, "joint": joint["joint"] | weights}

    def stages(*entries: tuple[dict[str, Any], int]) -> str:
        return "stages=" + json.dumps([{**entry, "steps": count} for entry, count in entries])

    half = steps // 2
    return {
        "medusa-1": [stages((heads, steps)), "precision.gradient_checkpointing=false"],
        "joint, direct": [stages((loose, steps))],
        "joint, 2 stages": [stages((heads, half), (loose, steps - half))],
        "self-distilled": [stages((heads, half), (joint, steps - half))],
    }


def train(recipe: str, out: Path, name: str, steps: int, overrides: list[str]) -> Path:
    """Folder of a finished run; trains it, or resumes training, if need be. Raises ValueError: training failed, or the
    folder holds another run."""
    folder = out / f"{name.replace(', ', '-').replace(' ', '-')}-{steps}"
    given = [recipe, f"run.name={folder.name}", f"run.output_dir={out}", *overrides]
    if (folder / "config.json").exists():
        if shlex.join(given) not in read_text(folder / "recipe.yaml", "recipe").split("\n")[0]:  # the command
            raise ValueError(f"{folder}: a run of another recipe or with other fields; give another --out")
        return folder
    if not (folder / "answers").exists():  # the same for all, and made by the first
        for other in sorted(out.glob("*/answers")):
            shutil.copytree(other, folder / "answers")
            break
    command = [sys.executable, "train/medusa.py", *given, "--resume"]
    console.print(f"{name}: {shlex.join(command[1:])}", style="bold")
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, check=False)
    if done.returncode:
        raise ValueError(f"training '{name}' failed (exit code {done.returncode}); fix it and run this again")
    return folder


def measure(folder: Path, prompts: Path, max_new_tokens: int, rounds: int) -> dict[str, Any]:
    """τ, speed-up over plain decoding of the same target, losslessness, and drift of one finished run."""
    _, config, weights = read_drafter(str(folder))
    heads = MedusaHeads.from_artifact(config, weights, str(folder)).to(DEVICE)
    target = target_of(folder, config, load_target(config["target"]["name_or_path"], device=DEVICE.type))
    kept = load_file(folder / "held_out" / "model.safetensors")
    ranks = in_batches(partial(head_ranks, target, heads), kept["tokens"], kept["supervised"])
    tree = best_tree(ranks, SIMULATED_NODES)
    write_json(folder / "tree.json", {"paths": [list(path) for path in tree.paths]})
    drafted = SpeculativeDecoder(target, MedusaDrafter(heads, tree, target))
    plain = SpeculativeDecoder(target)
    texts = [prompt.encode(target) for prompt in read_prompts(prompts)]
    methods = {"drafted": decoding(drafted, max_new_tokens), "plain": decoding(plain, max_new_tokens)}
    timed = run_rounds(methods, texts, rounds, texts[:1])
    results, plain_results = ([timed[name].outputs[n] for n in range(len(texts))] for name in ("drafted", "plain"))
    checked = check_texts(target, texts, [r.tokens for r in results], [r.tokens for r in plain_results])
    counted = reporting.acceptance(results, tree.max_depth)
    facts = read_json(folder / "provenance.json")
    return {
        "steps": facts["steps"],
        "projection": heads.config.projection,
        "mean_accepted_length": counted["mean_accepted_length"],
        "mean_accepted_length_interval": accepted_interval(results),
        "accepted_by_prompt": steps_of(results),
        "mean_accepted_length_before_first_loop": counted["repetition"]["mean_accepted_length_before_first_loop"],
        "simulated_on_the_originals_text": round(simulate(tree, ranks), 4),
        "speedup": round(timed["drafted"].tokens_per_second / timed["plain"].tokens_per_second, 4),
        "tokens_per_second": round(timed["drafted"].tokens_per_second, 2),
        "repeated_4gram_rate": counted["repetition"]["repeated_4gram_rate"],
        "kl": facts.get("kl", 0.0),
        "perplexity_ratio": facts.get("perplexity_ratio", 1.0),
        "lossless": checked.to_dict(),
    }


def main() -> None:
    args = PARSER.parse_intermixed_args()
    if args.steps < 2:
        raise ValueError(f"--steps {args.steps}: at least 2, one for each stage")
    read_prompts(args.prompts)
    recipe = read_recipe(args.recipe, MedusaRecipe, args.overrides)
    if [stage.joint is None for stage in recipe.stages] != [True, False]:
        raise ValueError(f"{args.recipe}: two stages are needed, the second one joint, as in recipes/tiny-medusa2.yaml")
    check_folder("--out", args.out, {"bench.json": "command"})
    torch.set_num_threads(available_cores())
    rows: dict[str, dict[str, Any]] = {}
    for name, own in ways(args.steps, recipe).items():
        folder = train(args.recipe, args.out, name, args.steps, [*args.overrides, *own])
        rows[name] = measure(folder, args.prompts, args.max_new_tokens, args.repeat)
    facts = facts_of(__file__, DEVICE) | {"ways": rows}
    columns = (
        "τ",
        "τ before\nloops",
        "τ on the\noriginal's text",
        "× plain",
        "KL per\ntoken",
        "repeated\n4-grams",
        "perplexity\nratio",
    )
    table = table_of("way", *columns, "exact")
    for name, row in rows.items():
        before_loops = row["mean_accepted_length_before_first_loop"] or 1
        tau = cell(row["mean_accepted_length"], row["mean_accepted_length_interval"])
        figures = before_loops, row["simulated_on_the_originals_text"], row["speedup"]
        kl, ratio = (cell(row[field], form=".4f") for field in ("kl", "perplexity_ratio"))
        repeated, exact = f"{row['repeated_4gram_rate']:.0%}", "NO" if row["lossless"]["mismatches"] else "yes"
        table.add_row(name, tau, *map(cell, figures), kl, repeated, ratio, exact)
    print_table(table, f"{args.recipe} · {args.steps} steps of the heads · {facts['device']}")
    write_report(args.out / "bench.json", facts)


if __name__ == "__main__":
    run_command(main)
