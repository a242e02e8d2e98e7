"""Shortlists of one drafter's LM head by task: accepted length, sizes of the lists, time of the output layer.

    python benchmarks/shortlist_tasks.py --report runs/lists                                  # SmolLM2, seven tasks
    python benchmarks/shortlist_tasks.py --model qwen2.5-coder-0.5b --report runs/coder-lists
    python benchmarks/shortlist_tasks.py runs/dynaspec runs/fr_spec --prompts P.jsonl --report runs/lists

The tasks are those of Spec-Bench, as far as data/prompts.py has them (conversations of two turns, translation, summary,
questions, mathematics; questions about given tables in place of retrieval), and HumanEval. The lists are folders that
train/dynaspec.py wrote, all for one drafter; without folders, those of --model in runs/. What is missing is said, with
the command that makes it. DynaSpec's router is measured with its folder's k_max at every depth (fixed) and
position-aware.

τ         committed tokens of a step (bonus token included), decoded greedily, one text at a time, with a dynamic tree
          of --nodes nodes, all of which are verified. One list serves all nodes of a level. Beside it, its ratio to the
          whole LM head's on the same prompts.
tokens    in a list: the mean over the levels of all steps. A low-rank list has the candidates of all nodes of a level.
head      time of a step's lists and logits, levels of as many nodes as the tree runs; medians, the methods in turn.

Each part (a list on a task; the times) is a file of DIR/parts, and is not measured again: an interrupted command goes
on. DIR/table.json has all figures, with committed tokens and steps of each prompt. Intervals are 95 % bootstrap
intervals over prompts.
"""

import argparse
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, chosen, list_option, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_folder
from draftsmith.inference.commands.prompts import Prompt, check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import check_names
from draftsmith.models.options import choose_device

TASKS = ("chat", "translation", "summary", "questions", "math", "sql", "human-eval")
SCHEDULES = ("fixed", "position_aware", "selected")
# By model: what has to be trained before its recipe, tokens of its fixed lists, and more words for FR-Spec.
CORPUS = "'drafter.corpus=[{source: data/smollm2-train.parquet}, {source: data/smollm2-train-2.parquet}]'"
CODER = {"runs/qwen2.5-coder-0.5b-eagle3": "train/eagle.py recipes/qwen2.5-coder-0.5b-eagle3.yaml"}
MODELS: dict[str, tuple[dict[str, str], int, str]] = {
    "smollm2": ({}, 2048, f" {CORPUS}"),
    "qwen2.5-coder-0.5b": (CODER, 6144, ""),
}


def folders_of(model: str) -> dict[str, str]:
    """The folders of a model's lists, after what they need, and the commands that make them."""
    before, size, corpus = MODELS[model]
    kinds = {"dynaspec": "", "frspec": f" drafter.shortlist=fr_spec drafter.size={size}{corpus}"}
    kinds |= {
        "vocabtrim": f" drafter.shortlist=vocab_trim drafter.size={size}",
        "lowrank": " drafter.shortlist=low_rank",
    }
    recipe = f"train/dynaspec.py recipes/{model}-dynaspec.yaml run.name={model}"
    return before | {f"runs/{model}-{name}": f"{recipe}-{name}{more}" for name, more in kinds.items()}


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="drafters of type dynaspec on the same drafter")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="whose lists, without FOLDER (%(default)s)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="as for decode.py, in place of the seven tasks"
    )
    parser.add_argument("--count", type=int, default=16, help="prompts of each of the seven tasks (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts, and of what is timed (%(default)s)")
    parser.add_argument("--target", metavar="FOLDER", help="if it is not where the first folder's config says")
    list_option(parser, "--schedules", ["fixed", "position_aware"], "S", f"of DynaSpec: {', '.join(SCHEDULES)}", str)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer (%(default)s)")
    parser.add_argument("--nodes", type=int, default=16, metavar="N", help="of the tree, root included (%(default)s)")
    machine_options(parser, "of target and drafter", out=False)
    parser.add_argument("--report", type=Path, required=True, metavar="DIR", help="of the parts and of table.json")
    parser.add_argument("--write", type=Path, nargs="+", default=[], metavar="FILE.md", help="put the table there")
    return parser


def check(args: argparse.Namespace) -> None:
    """
    Raises:
        FileNotFoundError: lists are missing; the command that makes them is said.
        ValueError: an option is out of its range.
    """
    check_options(args, "count", "max_new_tokens")
    if args.nodes < 2:
        raise ValueError(f"--nodes {args.nodes}: must be at least 2, the root and a draft")
    for given in args.schedules:
        if given not in SCHEDULES:
            raise ValueError(f"--schedules {given}: known: {', '.join(SCHEDULES)}")
    check_once("--schedules", args.schedules)
    check_once("", args.folders)
    if not args.folders:
        for folder, command in folders_of(args.model).items():
            if not Path(folder, "config.json").exists():
                raise FileNotFoundError(f"{folder}: is not there yet; make it by: python {command}")
        args.folders = [folder for folder in folders_of(args.model) if folder not in MODELS[args.model][0]]
    for folder in args.folders:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder}: there is no such folder; give those that train/dynaspec.py wrote")
    check_names(args.folders, args.target)
    check_prompts(args.prompts)
    check_folder("--report", args.report)


if __name__ == "__main__":
    before_imports(parser(), check)

import copy
import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from draftsmith.benchmarks.common import answers_of, by_kind, ratio_of, read_drafters, steps_of, with_interval
from draftsmith.benchmarks.documents import between, markdown_table
from draftsmith.benchmarks.shortlist_figures import WHOLE
from draftsmith.benchmarks.shortlist_heads import Heads, draw_nodes, load_shortlists, time_heads
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.common.files import file_sha256, json_object, read_text, write_json, write_text
from draftsmith.common.progress import ProgressBar
from draftsmith.data.prompts import evaluation_prompts
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.drafters.dynaspec import read_parts
from draftsmith.inference.drafters.eagle import EagleDrafter
from draftsmith.inference.drafters.names import short_name
from draftsmith.inference.drafters.shortlists import Shortlists
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure.report import OTHER
from draftsmith.inference.measure.rollouts import Drafts
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.models.eagle import Eagle
from draftsmith.models.shortlist import ShortlistHead
from draftsmith.models.target import Target

LABELS = {"fr_spec": "FR-Spec", "vocab_trim": "VocabTrim", "dynaspec": "DynaSpec", "low_rank": "low rank"}
TOP_K, DEPTH = 8, 6  # of the dynamic tree
TIMED = 2  # prompts of each task by which the output layer is timed


def prompts_of(args: argparse.Namespace, target: Target) -> list[Prompt]:
    """What is asked, each with its task: --prompts, or --count of each of the seven tasks, of at most 400 tokens."""
    if args.prompts:
        return read_prompts(args.prompts)
    chosen = (evaluation_prompts(name, args.count, args.seed, target.tokenizer, 400) for name in TASKS)
    return [Prompt([*each.messages], each.source, each.kind) for task in chosen for each in task]


def methods_of(heads: Heads, schedules: Sequence[str]) -> tuple[dict[str, ShortlistHead | None], dict[str, str]]:
    """The lists by what the table calls them, the whole LM head first, and the folder of each."""
    kinds = Counter(head.config.shortlist for head in heads.values() if head is not None)
    methods: dict[str, ShortlistHead | None] = {WHOLE: None}
    folders: dict[str, str] = {}
    for folder, head in heads.items():
        if head is None:
            continue
        kind = head.config.shortlist
        label = LABELS[kind] + (f" ({short_name(folder)})" if kinds[kind] > 1 else "")
        for schedule in schedules if kind == "dynaspec" else ("selected",):
            own, name = copy.deepcopy(head), label
            if schedule in ("fixed", "position_aware"):
                own.config = head.config.with_budget(head.config.clusters[0], schedule)
                name += f", {schedule.replace('_', '-')}"
            methods[name], folders[name] = own, folder
    return methods, folders


def measured(file: Path, asked: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part: read from its file if it was asked for the same, else measured and written."""
    asked = json.loads(json.dumps(asked))
    if file.exists() and (kept := json_object(file, "part")).get("asked") == asked:
        return kept
    found = {"asked": asked, **measure()}
    file.parent.mkdir(exist_ok=True)
    write_json(file, found)
    return found


def decode(
    target: Target, eagle: Eagle, head: ShortlistHead | None, prompts: Sequence[list[int]], tokens: int, nodes: int
) -> dict[str, Any]:
    """Committed tokens and steps of each prompt, and the mean number of tokens of a level's list; None on a GPU, whose
    graphs do not tell it."""
    head = copy.deepcopy(head)  # decoding takes it in the target's dtype
    drafter = EagleDrafter(eagle, target, DynamicShape(TOP_K, DEPTH, nodes), shortlist=head)
    decoder, sizes = SpeculativeDecoder(target, drafter), list[int]()
    if (lists := drafter.shortlists) is not None and not decoder.static:
        count_tokens(lists, sizes)
    results = decoder.generate(prompts, tokens, batch_size=1)
    whole = eagle.config.outputs if head is None else None
    return {"steps": steps_of(results), "tokens": round(statistics.fmean(sizes), 1) if sizes else whole}


def count_tokens(lists: Shortlists, sizes: list[int]) -> None:
    """Have a drafter's shortlists note how many tokens each list has."""
    listed = lists.listed

    def noting(hidden: Tensor) -> Tensor | None:
        rows = listed(hidden)
        sizes.append(lists.config.tokens(lists.depth) if rows is None else int((rows >= 0).sum()))
        return rows

    lists.listed = noting


def times(
    target: Target, drafts: Drafts, methods: Heads, prompts: Sequence[list[int]], tokens: int, seed: int
) -> dict[str, Any]:
    """Seconds of a step's lists and logits, by method the values of all texts that are long enough."""
    widths, generator = [1, *[TOP_K] * (DEPTH - 1)], torch.Generator().manual_seed(seed)
    texts, supervised = answers_of(target, prompts, tokens, 8)
    rows = [slice(number, number + 1) for number in range(len(prompts))]
    drawn = [draw_nodes(target, drafts, texts[row], supervised[row], widths, generator) for row in rows]
    found = time_heads(target, drafts, methods, [levels for levels in drawn if levels is not None])
    return {"seconds": dict(zip(methods, found.tolist(), strict=True))}


# ---- figures and tables


def figures(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The methods' figures on some prompts, from their parts."""
    found: dict[str, Any] = {}
    whole = torch.tensor(parts[WHOLE]["steps"], dtype=torch.float64).t()
    for name, part in parts.items():
        own = torch.tensor(part["steps"], dtype=torch.float64).t()  # [2, S]
        over = with_interval(torch.cat((own, whole)), ratio_of) if name != WHOLE else None
        found[name] = {"tau": with_interval(own), "tau_over_whole": over, **{f: part[f] for f in ("tokens", "steps")}}
    return {"prompts": whole.shape[1], "methods": found}


def together(tasks: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """One method's parts of all tasks as one."""
    parts = [part[name] for part in tasks.values()]
    steps = [each for part in parts for each in part["steps"]]
    counts = [sum(count for _, count in part["steps"]) for part in parts]
    known = all(part["tokens"] is not None for part in parts)
    total = sum(part["tokens"] * count for part, count in zip(parts, counts, strict=True)) if known else None
    return {"steps": steps, "tokens": None if total is None else round(total / sum(counts), 1)}


def head_figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The mean time of each method's lists and logits, and its ratio to the whole LM head's."""
    found: dict[str, Any] = {}
    for name, values in seconds.items():
        both = torch.tensor([values, seconds[WHOLE]], dtype=torch.float64)
        mean = statistics.fmean(values) if values else None
        found[name] = {"seconds": mean, "over_whole": with_interval(both) if name != WHOLE and values else None}
    return found


def table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Its heads, and a row for each method."""

    def of(fields: Mapping[str, Any] | None, form: str = ".2f") -> str:
        return cell(fields["value"], fields["interval"], form) if fields else "–"

    tasks, rows = report["tasks"], list[list[str]]()
    several = [*tasks] if len(tasks) > 1 else []
    for name, row in report["all"]["methods"].items():
        cells = [of(tasks[task]["methods"][name]["tau"]) for task in several]
        head, whole = report["head"][name], name == WHOLE
        cells += [of(row["tau"]), "1" if whole else of(row["tau_over_whole"], ".3f")]
        cells += [cell(head["seconds"] and head["seconds"] * 1e3), "1" if whole else of(head["over_whole"])]
        rows.append([name, cell(row["tokens"], form=",.0f"), *cells])
    heads = ["shortlist", "tokens", *(f"τ, {task}" for task in several), "τ", "τ / whole", "head, ms", "head / whole"]
    return heads, rows


def block(report: Mapping[str, Any]) -> str:
    """The table as it stands in a document."""
    sizes = {part["prompts"] for part in report["tasks"].values()}
    each = f"{sizes.pop()} prompts of each task" if len(sizes) == 1 else f"{report['all']['prompts']} prompts"
    said = f"{Path(report['target']['name_or_path']).name}, {report['dtype']}, {report['device']}; dynamic tree of "
    said += f"{report['nodes']} nodes; {each}, {report['max_new_tokens']} tokens each. In brackets 95 % intervals over "
    said += "prompts. Made by `python benchmarks/shortlist_tasks.py`."
    return f"{markdown_table(*table(report))}\n\n{said}"


# ---- the command


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    torch.set_num_threads(args.threads)
    options: dict[str, Any] = {"dtype": args.dtype, "device": choose_device(args.device)}
    target, drafts, heads = load_shortlists(args.folders, args.target, **options)
    place = f"shortlist-table {Path(target.name).name} -->"  # a target has a table of its own
    markers = f"<!-- {place}", f"<!-- /{place}"
    for path in args.write:
        between(read_text(path, "document"), str(path), *markers)
    methods, folders = methods_of(heads, args.schedules)
    base, config, weights = read_parts(*read_drafters(args.folders[:1], "dynaspec")[args.folders[0]])[1]
    eagle = Eagle.from_artifact(config, weights, str(base))
    given = prompts_of(args, target)
    prompts, tasks = encode_prompts(given, target), by_kind([prompt.kind or OTHER for prompt in given])
    common = chosen(args, "max_new_tokens", "nodes") | {"target": target.fingerprint, "dtype": str(target.dtype)}
    common |= {"drafter": file_sha256(base / "model.safetensors")}

    def asked(numbers: Sequence[int], *names: str) -> dict[str, Any]:
        texts = hashlib.sha256(json.dumps([prompts[number] for number in numbers]).encode()).hexdigest()
        lists = {}
        for name in names:
            head, folder = methods[name], folders.get(name)
            if head is not None and folder is not None:
                lists[name] = {**head.config.to_dict(), "sha256": file_sha256(Path(folder) / "model.safetensors")}
        return common | {"prompts": texts, "lists": lists}

    parts: dict[str, dict[str, Any]] = {task: {} for task in tasks}
    with ProgressBar("lists on tasks", len(tasks) * len(methods), console, transient=True) as advance:
        for number, (name, head) in enumerate(methods.items()):
            for place, (task, numbers) in enumerate(tasks.items()):
                texts = [prompts[number] for number in numbers]
                sizes = args.max_new_tokens, args.nodes
                file = args.report / "parts" / f"{re.sub('[^a-z0-9]+', '-', f'{task} {name}'.lower()).strip('-')}.json"
                run = partial(decode, target, eagle, head, texts, *sizes)
                parts[task][name] = measured(file, asked(numbers, name), run)
                advance(number * len(tasks) + place + 1)
    some = [number for numbers in tasks.values() for number in numbers[:TIMED]]
    timed = measured(
        args.report / "parts" / "times.json",
        asked(some, *methods) | {"threads": args.threads},
        lambda: times(target, drafts, methods, [prompts[n] for n in some], args.max_new_tokens, args.seed),
    )["seconds"]
    report = facts_of(__file__, target) | {
        **chosen(args, "max_new_tokens", "nodes", "threads"),
        "folders": folders,
        "capacity": {name: head.config.capacity for name, head in methods.items() if head is not None},
        "outputs": len(drafts.weight),
        "head": head_figures(timed),
        "tasks": {task: figures(found) for task, found in parts.items()},
        "all": figures({name: together(parts, name) for name in methods}),
    }
    columns, rows = table(report)
    shown = table_of(*columns)
    for row in rows:
        shown.add_row(*row)
    print_table(shown)
    write_report(args.report / "table.json", report)
    for path in args.write:
        before, _, after = between(read_text(path, "document"), str(path), *markers)
        write_text(path, before + block(report) + after)
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
