"""Quality beside speed: what a drafter that changes the text does to right answers.

    python benchmarks/quality.py runs/smollm2-medusa2 models/smollm2-medusa --out runs/quality/quality.json
    python benchmarks/quality.py models/smollm2-medusa --temperature 0.7 --epsilon 0.09 0.25 --sets arithmetic code
    python benchmarks/quality.py runs/smollm2-medusa2 --judge URL --judge-model NAME --questions question.jsonl

Tasks that a program judges: `code` (HumanEval, pass@1; each answer runs in a process without network, with read-only
files), `arithmetic` and `reasoning` (made with --seed; the last number, the first of the words that could be meant),
and `questions` (FreshQA's, where a known answer of at most 30 characters stands in the text). Beside the share of right
answers: speed, τ, repeated text. Where an adapter has changed the target, also the likelihood of reference answers, and
KL of the changed distribution from the original one in the original's own answers (both at temperature 1).

Decoding is greedy, or sampling with --temperature, to which Medusa's typical acceptance (lossy) is then added for each
--epsilon. Right answers are compared with those of the target as it was, task by task; speed, and the texts of lossless
methods, with plain decoding by the target that a drafter decodes for.

With --judge, a model behind a server with OpenAI's protocol grades the answers to --questions (MT-Bench's
question.jsonl, all turns) from 1 to 10 instead, and nothing is timed. Equal answers are judged once; answers without
a grade are counted. The server's key is read from OPENAI_API_KEY.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import check_once, check_options, machine_options
from draftsmith.benchmarks.tasks import SETS, Task, tasks_of
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.drafters.names import check_names, short_name
from draftsmith.models.options import DECODERS, target_arguments, target_options

PLAIN = "plain"


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="drafter folders or Hub ids, as for decode.py")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[], help="of tasks (all)")
    parser.add_argument("--count", type=int, default=50, help="tasks of each set, at most (%(default)s)")
    parser.add_argument("--temperature", type=float, help="sample, with seeds; greedy decoding if left out")
    parser.add_argument(
        "--epsilon", type=float, nargs="+", default=[0.09], metavar="ε", help="of typical acceptance (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=192, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks and of the samples (%(default)s)")
    parser.add_argument("--no-sandbox", action="store_true", help="run the answers to code with all that you may do")
    parser.add_argument("--judge", metavar="URL", help="a server that grades, for example http://localhost:8000/v1")
    parser.add_argument("--judge-model", metavar="NAME", help="the model that grades, as the server names it")
    parser.add_argument("--questions", type=Path, metavar="FILE.jsonl", help="what --judge grades the answers to")
    machine_options(parser, device=False)
    target_options(parser)
    return parser


def check(args: argparse.Namespace) -> None:
    check_options(args, "count", "max_new_tokens", "batch_size")
    check_once("--sets", args.sets)
    check_once("", [short_name(name) for name in args.drafters])
    if PLAIN in map(short_name, args.drafters):
        raise ValueError(f"a drafter's name is '{PLAIN}', as that of plain decoding; give its folder another one")
    check_names(args.drafters, args.target)
    given = [args.judge, args.judge_model, args.questions]
    if any(given) and not all(given):
        raise ValueError("--judge, --judge-model and --questions go together")
    if args.judge and not args.judge.startswith(("http://", "https://")):
        raise ValueError(
            f"--judge {args.judge}: is no address; give the server's, for example http://localhost:8000/v1"
        )
    if args.judge and args.sets:
        raise ValueError("--judge grades the answers to --questions; leave out --sets")


if __name__ == "__main__":
    before_imports(parser(), check)

import torch
from scipy.stats import binomtest
from torch import nn

from draftsmith.benchmarks import judged
from draftsmith.benchmarks.common import by_kind, decoding, interval_of, with_interval
from draftsmith.benchmarks.tables import cell, facts_of, print_table, table_of, write_report
from draftsmith.benchmarks.typical import nats_per_token
from draftsmith.common.progress import ProgressBar
from draftsmith.data.endpoint import Server, check_server
from draftsmith.inference.commands.prompts import Prompt, encode_prompts, read_prompts
from draftsmith.inference.commands.terminal import console
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.engine.text import answer_text
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure import report as reporting
from draftsmith.inference.measure.timing import Method, Timed, run_rounds, speedup, speedup_fields
from draftsmith.inference.verify.sampling import MIN_TEMPERATURE, Sampling
from draftsmith.models.target import Target


def share(right: Sequence[bool]) -> dict[str, Any]:
    """The share of right answers with Wilson's 95 % interval."""
    found = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    return {"right": sum(right), "tasks": len(right), "share": round(sum(right) / len(right), 4)} | {
        "share_interval": [round(found.low, 4), round(found.high, 4)]
    }


def difference(right: Sequence[bool], plain: Sequence[bool]) -> dict[str, Any]:
    """Right answers more than plain decoding's, as a share of the tasks; its interval is a bootstrap over tasks."""
    ours, theirs = (torch.tensor(each, dtype=torch.float64) for each in (right, plain))
    columns = torch.stack((ours - theirs, torch.ones_like(ours)))
    return {"more": round(float((ours - theirs).mean()), 4), "more_interval": interval_of(columns)}


def measured(
    name: str,
    plain: str,
    lossless: bool,
    timed: dict[str, Timed],
    tasks: Sequence[Task],
    right: dict[str, list[bool]],
    decoder: SpeculativeDecoder,
) -> dict[str, Any]:
    """The figures of a method. ``plain``: the name of plain decoding by its target, whose texts it has if it is
    lossless."""
    results: list[Generation] = [timed[name].outputs[number] for number in range(len(tasks))]
    counted = reporting.acceptance(results, decoder.drafter.max_depth)
    found: dict[str, Any] = {
        "name": name,
        "lossless": None,
        "tokens_per_second": round(timed[name].tokens_per_second, 2),
        **speedup_fields("speedup", speedup(timed[name], timed[plain])),
        "mean_accepted_length": counted["mean_accepted_length"],
        "repeated_4gram_rate": counted["repetition"]["repeated_4gram_rate"],
        "looping_answers": counted["loops"]["looping_answers"],
        "sets": {},
    }
    if lossless:
        equal = sum(result.tokens == timed[plain].outputs[n].tokens for n, result in enumerate(results))
        found["lossless"] = {"plain": plain, "equal": equal, "texts": len(tasks)}
    for kind, numbers in by_kind([task.kind for task in tasks]).items():
        ours, theirs = ([right[each][number] for number in numbers] for each in (name, PLAIN))
        found["sets"][kind] = share(ours) | difference(ours, theirs)
    found["sets"]["all"] = share(right[name]) | difference(right[name], right[PLAIN])
    return found


def likelihoods(target: Target, tasks: Sequence[Task], prompts: Sequence[list[int]]) -> dict[str, float]:
    """Nats per token of the reference answers of each set, by a target."""
    assert target.tokenizer is not None
    found: dict[str, float] = {}
    for kind in dict.fromkeys(task.kind for task in tasks):
        pairs = [(prompt, task.reference) for prompt, task in zip(prompts, tasks, strict=True) if task.kind == kind]
        given = [Generation(target.tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in pairs]
        found[kind] = round(nats_per_token(target, [prompt for prompt, _ in pairs], given, 1.0), 4)
    return found


@torch.inference_mode()
def divergence(
    base: Target, changed: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Generation]
) -> dict[str, Any]:
    """KL(``base`` ‖ ``changed``) in nats per token of answers, with its interval over prompts."""
    sums: list[list[float]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.tokens]], device=base.device)[:, :-1]
        original, other = (
            each.logits(each.hidden(ids)[0, len(prompt) - 1 :]).float().log_softmax(-1) for each in (base, changed)
        )
        kl = nn.functional.kl_div(other, original, reduction="sum", log_target=True)
        sums.append([float(kl), len(answer.tokens)])
    return with_interval(torch.tensor(sums, dtype=torch.float64).t())


def by_judge(args: argparse.Namespace, questions: list[Prompt], methods: dict[str, Method], target: Target) -> None:
    """Grade each method's answers to --questions, print and write the figures."""
    if raw := [each.where for each in questions if isinstance(each.content, str)]:
        raise ValueError(f"{raw[0]}: a judge grades conversations; give turns or messages")
    server = Server(args.judge, args.judge_model, timeout=120.0, retries=4, backoff=1.0)

    def answers(run: Method, asked: list[Prompt]) -> list[str]:
        return [answer_text(target, result.tokens) for result in run(encode_prompts(asked, target))]

    asked = {n: judged.conversations_of(questions, partial(answers, run)) for n, run in methods.items()}
    found = judged.judge(server, [each for one in asked.values() for each in one])
    rows = judged.graded(questions, {name: [found[each] for each in one] for name, one in asked.items()})
    table = table_of("method", *rows[0]["grades"], "without a grade")
    for row in rows:
        missing = [f"{count} of {row['answers']} ({reason})" for reason, count in row["without_grade"].items()]
        means = [cell(mean["value"], mean["interval"]) for mean in row["grades"].values()]
        table.add_row(row["name"], *means, ", ".join(missing) or "0")
    print_table(table, f"{target.name} · grades of 1 to 10 by {args.judge_model} · {len(questions)} questions")
    if args.out:
        facts = facts_of(__file__, target) | {"judge": args.judge_model, "request": judged.REQUEST, "methods": rows}
        texts = {name: [{"messages": each, "grade": found[each]} for each in one] for name, one in asked.items()}
        write_report(args.out, facts | {"answers": texts})


def check_targets(base: Target, loaded: Mapping[str, tuple[Target, Any]]) -> None:
    """Raise a ValueError unless the drafters' targets are ``base`` or, by their adapters, made of it."""
    for name, (target, _) in loaded.items():
        vocabularies = [each.tokenizer and each.tokenizer.get_vocab() for each in (base, target)]
        other = target.fingerprint != base.fingerprint and target.name != base.name
        if other or vocabularies[0] != vocabularies[1]:
            raise ValueError(
                f"'{name}': its target '{target.name}' is not '{base.name}', nor an adapter on it; quality is compared "
                "of drafters with one target"
            )


def main() -> None:
    args = parser().parse_intermixed_args()
    check(args)
    sampling = None if args.temperature is None else Sampling(args.temperature, seed=args.seed)
    if sampling is not None and sampling.greedy:
        raise ValueError(f"--temperature {args.temperature}: must be at least {MIN_TEMPERATURE:g}; leave it out")
    lossy = [] if sampling is None else [replace(sampling, epsilon=epsilon) for epsilon in args.epsilon]
    torch.set_num_threads(args.threads)
    questions = read_prompts(args.questions) if args.judge else []
    if args.judge:
        check_server(args.judge, said_by="--judge")
    sets = [] if args.judge else args.sets or list(SETS)
    tasks = tasks_of(sets, args.count, args.seed, isolated=not args.no_sandbox)
    options = target_arguments(args)
    loaded = {name: load_drafter(name, target_name=args.target, **options) for name in args.drafters}
    name = args.target or next(iter(loaded.values()))[0].name
    silent: dict[str, Any] = options | {"say": None}  # its precision was said
    base, _ = load_drafter("none", target_name=name, **silent)
    if base.tokenizer is None:
        raise ValueError(f"'{base.name}' has no tokenizer: its answers cannot be read")
    check_targets(base, loaded)

    lean = DECODERS[args.decoder]
    decoders: dict[str, SpeculativeDecoder] = {}
    methods: dict[str, Method] = {}
    plain_of, lossless, targets = dict[str, str](), set[str](), {PLAIN: base}

    def add(name: str, plain: str, target: Target, drafter: Any, given: Sampling | None, lossy: bool = False) -> None:
        decoders[name], plain_of[name] = SpeculativeDecoder(target, drafter, lean=lean), plain
        mode = "typical" if lossy else "greedy" if given is None else "sample"
        methods[name] = decoding(decoders[name], args.max_new_tokens, args.batch_size, mode, given)

    add(PLAIN, PLAIN, base, None, sampling)
    for drafter_name, (target, drafter) in loaded.items():
        name, plain = short_name(drafter_name), PLAIN
        if target.fingerprint != base.fingerprint:
            plain = f"plain, {name}'s target"
            targets[plain] = target
            add(plain, plain, target, None, sampling)
        add(name, plain, target, drafter, sampling)
        lossless.add(name)
        for given in lossy:
            add(f"{name}, typical ε = {given.epsilon:g}", plain, target, drafter, given, True)

    if args.judge:
        return by_judge(args, questions, methods, base)
    chat = bool(base.tokenizer.chat_template)
    contents = [list(task.messages) if chat else f"{task.messages[-1]['content']}\n" for task in tasks]
    prompts = encode_prompts([Prompt(content, "a task") for content in contents], base)
    kinds = [task.kind for task in tasks]
    timed = run_rounds(methods, prompts, 1, [prompts[0]], args.batch_size, kinds=kinds)
    texts = {name: [answer_text(base, timed[name].outputs[n].tokens) for n in range(len(tasks))] for name in methods}
    right: dict[str, list[bool]] = {}
    judged: dict[tuple[int, str], bool] = {}  # equal texts are judged once
    with ProgressBar("judging", len(methods) * len(tasks), console, transient=True) as advance:
        for place, (name, answers) in enumerate(texts.items()):
            for number, (task, text) in enumerate(zip(tasks, answers, strict=True)):
                if (number, text) not in judged:
                    judged[number, text] = task.judge(text)
                advance(place * len(tasks) + number + 1)
            right[name] = [judged[number, text] for number, text in enumerate(answers)]

    figures = [
        measured(name, plain_of[name], name in lossless, timed, tasks, right, decoders[name]) for name in methods
    ]
    known = {name: likelihoods(target, tasks, prompts) for name, target in targets.items()}
    own = [timed[PLAIN].outputs[number] for number in range(len(tasks))]
    moved = {name: divergence(base, target, prompts, own) for name, target in targets.items()}
    columns = [*dict.fromkeys(kinds), "all"]
    table = table_of(
        "method", *(f"{kind},\nright" for kind in columns), "× plain", "τ", "loops", "texts equal to plain's"
    )
    for row in figures:
        same = row["lossless"]
        table.add_row(
            row["name"],
            *(cell(row["sets"][kind]["share"], row["sets"][kind]["share_interval"], ".0%") for kind in columns),
            cell(row["speedup"], row["speedup_interval"]),
            cell(row["mean_accepted_length"] or 1),
            f"{row['looping_answers']} of {len(tasks)}",
            f"{same['equal']} of {same['texts']}" if same else "–",
        )
    how = "greedy" if sampling is None else f"temperature {args.temperature:g}"
    print_table(table, f"{base.name} · {len(tasks)} tasks · {how} · right answers with Wilson's 95 % interval")
    if len(known) > 1:
        table = table_of("nats per token of the reference answers", *sets, "KL on plain's\nanswers")
        for name, nats in known.items():
            kl = cell(moved[name]["value"], moved[name]["interval"], ".4f")
            table.add_row(name, *(f"{nats[kind]:.3f}" for kind in sets), kl)
        print_table(table)
    if args.out:
        facts = facts_of(__file__, base) | {
            "temperature": args.temperature,
            "methods": figures,
            "nats_per_token": known,
            "kl": moved,
        }
        write_report(args.out, facts | {"texts": texts})
    if any(row["lossless"] and row["lossless"]["equal"] < row["lossless"]["texts"] for row in figures):
        raise SystemExit("a lossless method's texts are not those of plain decoding: see the table")


if __name__ == "__main__":
    run_command(main)
