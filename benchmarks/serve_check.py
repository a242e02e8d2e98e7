"""Exported drafters in a real server: the same tokens, as many drafts, as many accepted at each position as here.

    python benchmarks/serve_check.py models/smollm2-eagle3 --prompts P.jsonl --environment .venv-serve-vllm --out served
    python benchmarks/serve_check.py models/smollm2-eagle3 --server openvino --prompts P.jsonl --environment DIR
    python benchmarks/serve_check.py ngram:2-4 --target models/smollm2 --prompts P.jsonl --environment .venv-serve-vllm

`make serve-check` makes the environments (vLLM, llama.cpp, OpenVINO GenAI) and runs this for the drafters that the
repository brings. Each drafter is exported (models/export.py), loaded by the server on this machine's CPU and decodes
the prompts greedily in float32, one at a time, with and without drafts; our engine decodes them with the same chain.
Equal means: every text is that of plain decoding, by the server and here, but for near-ties that are counted; and over
the prompts whose texts are identical, the server made as many drafts as our engine, and accepted as many at each
position. Of n-grams the texts alone are compared: servers take other matches.

What was found is written to serving.json in the exported folder, and its model card's last line says it. A drafter that
the format has no place for is a row that says why. Exit codes: 0 equal, 1 not equal, or nothing was compared, 2 wrong
usage or bad input.

--damage writes the folder wrongly after it was checked, to see that this check finds it: a matrix transposed, the
captured layers shifted by one, the bias of fc left out, or the draft vocabulary shifted by one. --must-differ is for
a drafter that the server is known to run otherwise.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from draftsmith.benchmarks.options import prompts_option
from draftsmith.benchmarks.servers import SERVERS
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.options import check_counts
from draftsmith.inference.commands.prompts import check_prompts, encode_prompts, read_prompts
from draftsmith.inference.drafters.names import NGRAM, check_names, ngram_lengths

DAMAGES = ("transposed", "shifted-layers", "no-bias", "shifted-vocabulary")


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="folders, draft_model:PATH, ngram or ngram:2-4")
    prompts_option(parser)
    parser.add_argument("--target", help="as for decode.py")
    parser.add_argument("--server", choices=tuple(SERVERS), default="vllm", help="the server (%(default)s)")
    environment = "the server's virtual environment; of llama.cpp its package's source, compiled in build/"
    parser.add_argument("--environment", type=Path, required=True, metavar="DIR", help=environment)
    formats = ("vllm", "sglang", "speculators", "openvino")
    parser.add_argument("--to", choices=formats, help="the format (openvino for that server, else vllm)")
    parser.add_argument("--out", type=Path, default=Path("served"), metavar="DIR", help="of the folders (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=3, metavar="N", help="of a draft; Medusa: its heads (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--must-differ", action="store_true", help="a control: 0 if texts are equal, drafts are not")
    parser.add_argument("--damage", choices=DAMAGES, help="write the folder wrongly, to see that it is found")
    return parser


def check(args: argparse.Namespace) -> None:
    check_names(args.drafters, args.target)
    check_prompts(args.prompts)
    check_counts(tokens=args.tokens, max_new_tokens=args.max_new_tokens)
    own = args.server == "openvino"
    if args.to and (args.to == "openvino") != own:
        raise ValueError(f"--to {args.to}: {args.server} reads {'openvino alone' if own else 'the other formats'}")
    program = program_of(args.server, args.environment)
    if not os.access(program, os.X_OK):
        make = f"make serve-check SERVERS={args.server}"
        raise FileNotFoundError(f"--environment {args.environment}: {program} is missing; `{make}` makes it")


def program_of(server: str, environment: Path) -> Path:
    """The server's interpreter, or what was compiled of it."""
    return environment / ("build/bin/llama-server" if server == "llamacpp" else "bin/python")


if __name__ == "__main__":
    before_imports(parser(), check)

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file

from draftsmith.benchmarks.tables import cell, print_table, table_of
from draftsmith.common.files import json_object, read_text, write_json, write_text
from draftsmith.inference.drafters.dflash import DFlashDrafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.drafters.ngram import NgramDrafter
from draftsmith.inference.engine.cache import free_bytes
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.lossless import check_texts
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import provenance
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.files.locate import locate
from draftsmith.models.files.weights import save_tensors
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving.layouts import Unsupported
from draftsmith.models.serving.model_card import NO_SERVER
from draftsmith.models.serving.source import open_source
from draftsmith.models.serving.to_servers import export
from draftsmith.models.target import Target

MODEL = "draft_model:"
OTHERS = "texts alone: its matches are others"  # of n-grams: vLLM takes the earliest, ours are the most recent
ROOM = "4"  # GiB of K/V that the server may take
KILLED = -9  # exit code


COLUMNS = ("drafter", "texts", "near-ties", "mismatches", "drafts", "accepted by position", "τ", "equal")


def say(line: str) -> None:
    """What is done now, or was found: a check takes minutes for each drafter."""
    print(line, file=sys.stderr, flush=True)


def damage(folder: Path, how: str, layers: int) -> None:
    """Write an exported folder wrongly, in a way that no server's loader finds. ``layers``: of the target. Raises
    ValueError: such a folder has no such place."""
    config, weights = json_object(folder / "config.json"), load_file(folder / "model.safetensors")
    if how == "transposed":
        name = next(name for name, w in sorted(weights.items()) if w.dim() == 2 and "head" not in name)
        weights[name] = weights[name].t().reshape(weights[name].shape).contiguous()
    elif how == "shifted-vocabulary" and "d2t" in weights:
        weights["d2t"] = weights["d2t"] + 1
    elif how == "no-bias" and (biases := [name for name in weights if name.endswith(".bias")]):
        for name in biases:
            weights[name].zero_()
    elif how == "shifted-layers" and "norm.weight" in weights:
        # The first two are DFlash's, of z-lab's form and of speculators'.
        names = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
        place, name = next(
            ((each, name) for each in (config.get("dflash_config", {}), config) for name in names if name in each),
            (config, names[2]),
        )
        given = place.get(name) or [2, layers // 2, layers - 3]
        place[name] = [layer - 1 for layer in given]
        card, later = folder / "README.md", " ".join(map(str, given))  # OpenVINO takes the list in the card's command
        listed = r'(?<=<hidden_layers_list value=")[\d ]+'
        write_text(card, re.sub(listed, later, read_text(card, "model card")))
    else:
        raise ValueError(f"--damage {how}: {folder} has no such place")
    save_tensors(weights, folder / "model.safetensors")
    write_json(folder / "config.json", config)


def in_server(job: dict[str, Any]) -> dict[str, Any]:
    """What benchmarks/servers.py returns in the server's environment, with the drafts of each text counted. Raises
    ValueError: the server failed; with its last words."""
    room = {"VLLM_CPU_KVCACHE_SPACE": ROOM, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    # llama.cpp's converter needs torch and transformers, which are here.
    own = job["server"] == "llamacpp"
    python = Path(sys.executable) if own else program_of(job["server"], Path(job["environment"])).absolute()
    with tempfile.TemporaryDirectory() as temporary:
        given, written = Path(temporary) / "job.json", Path(temporary) / "found.json"
        write_json(given, job)
        command = [str(python), str(Path(__file__).resolve().with_name("servers.py")), str(given), str(written)]
        done = subprocess.run(
            command, env=environment | room | quiet, capture_output=True, text=True, check=False, cwd=temporary
        )
        if done.returncode or not written.exists():
            said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
            last = (said or [f"exit code {done.returncode}"])[-1].strip().removeprefix("RuntimeError: ")
            if done.returncode == KILLED:
                last = "it was killed, most likely for memory"
            raise ValueError(f"the server failed: {last}")
        served = json_object(written)
    for text in served["texts"]:
        whole = cut(
            Generation(text["tokens"], text.get("steps", [])), job["max_new_tokens"], frozenset(job["stop_ids"])
        )
        text["tokens"] = whole.tokens
        if text.get("steps"):
            text |= {"drafts": len(whole.accepted), "accepted": accepted_by_position(whole, job["tokens"])}
        text["accepted"] = [*text.get("accepted", []), *[0] * job["tokens"]][: job["tokens"]]
    return served


def cut(text: Generation, limit: int, stop_ids: frozenset[int], server: str = "vllm", drafted: int = 0) -> Generation:
    """A text that was decoded beyond its end, up to its end, and its steps up to the one that writes it, as a server
    counts them. ``drafted``: tokens of a draft.

    Of a step that writes a stop id vLLM counts all that it accepted, OpenVINO what it wrote, and llama.cpp, too, unless
    the stop id is the draft's last token. llama.cpp drafts no more tokens than the limit leaves room for, and none in a
    step that writes the last one."""
    ends = [place for place, token in enumerate(text.tokens) if token in stop_ids]
    tokens = text.tokens[: min([limit, *(place + 1 for place in ends)])]
    steps, count = list[int](), 1  # the prompt's pass writes the first token
    for committed in text.accepted:
        room, left = limit - count, len(tokens) - count
        count += committed
        if left <= 0 or (server == "llamacpp" and room == 1):
            break
        if server == "llamacpp":
            committed = min(committed, room)
        whole = server == "vllm" or (server == "llamacpp" and left >= min(drafted, room - 1))
        if tokens[-1] in stop_ids and not whole:
            committed = min(committed, left)
        steps.append(committed)
    return replace(text, tokens=tokens, accepted=steps)


def accepted_by_position(text: Generation, tokens: int) -> list[int]:
    """Of our steps, how many accepted at least 1, 2, … of the draft's tokens."""
    return [sum(count > place for count in text.accepted) for place in range(1, tokens + 1)]


def compare(
    target: Target,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Generation],
    ours: Sequence[Generation],
    served: dict[str, Any],
    tokens: int,
    counted: bool = True,
) -> dict[str, Any]:
    """What is equal between our engine and the server. ``counted``: their drafts have to be the same, too."""
    texts = served["texts"]
    truth = [each.tokens for each in plain]
    checked = check_texts(target, prompts, [each["tokens"] for each in texts], truth)
    here = check_texts(target, prompts, [each.tokens for each in ours], truth)
    same = [n for n, (one, other) in enumerate(zip(ours, texts, strict=True)) if one.tokens == other["tokens"]]
    counts: dict[str, Any] = {
        "drafts": [sum(texts[n]["drafts"] for n in same), sum(len(ours[n].accepted) for n in same)],
        "accepted_by_position": [
            [sum(texts[n]["accepted"][place] for n in same) for place in range(tokens)],
            [sum(accepted_by_position(ours[n], tokens)[place] for n in same) for place in range(tokens)],
        ],
    }
    new = sum(len(texts[n]["tokens"]) for n in same)
    tau = round((new - len(same)) / max(1, counts["drafts"][0]), 4)  # of n-grams unknown: some steps draft nothing
    return {
        "prompts": len(texts),
        "tokens": checked.checked,
        "identical_texts": len(same),
        "near_ties": checked.near_ties,
        "mismatches": checked.mismatches + here.mismatches,
        **counts,
        "mean_accepted_length": tau if counted else None,
        "equal": not checked.mismatches + here.mismatches
        and len(same) > len(texts) // 2
        and (not counted or all(one == other for one, other in counts.values())),
    }


@dataclass(frozen=True)
class Case:
    """A drafter in both engines. method: as vLLM calls it. model: what the server loads. tokens: of a draft. folder:
    the exported one. match: shortest and longest of n-grams. parallel: P-EAGLE."""

    target: Target
    drafter: Drafter | None
    method: str
    model: Path | None
    tokens: int
    folder: Path | None = None
    match: tuple[int, int] | None = None
    parallel: bool = False


def case_of(name: str, args: argparse.Namespace) -> Case:
    """Load a drafter with the chain that the server verifies, and export it, if it needs that. A damaged folder has a
    name of its own. Raises ValueError: it cannot be exported."""
    if name.startswith(MODEL):
        path, chain = locate(name.removeprefix(MODEL)).path, f"{name}@{','.join('1' * args.tokens)}"
        target, drafter = load_drafter(chain, target_name=args.target, dtype="float32", all_nodes=True)
        return Case(target, drafter, "draft_model", path, args.tokens)
    if name.partition(":")[0] == NGRAM:
        target, _ = load_drafter("none", target_name=args.target, dtype="float32")
        ngrams = NgramDrafter(target, **ngram_lengths(name), depth=args.tokens, branches=1)
        return Case(target, ngrams, NGRAM, None, args.tokens, match=(ngrams.min_match, ngrams.max_match))
    source = open_source(name, args.to, args.target)
    c = source.drafter.config
    if args.server == "llamacpp" and isinstance(c, EagleConfig) and c.norm_output and not c.fc_norm:
        raise Unsupported(
            "it has norm_output without fc_norm, which llama.cpp's converter leaves out without a word, and then "
            "drafts with another model"
        )
    parts = [Path(name).name, args.to, *([args.server] if args.server not in ("vllm", args.to) else [])]
    folder = args.out / "-".join([*parts, *(["damaged"] if args.damage else [])])
    made = source.drafter
    if isinstance(made, MedusaHeads | DFlash):
        method, tokens = "medusa" if isinstance(made, MedusaHeads) else "dflash", made.config.num_draft_heads
    else:
        method = "eagle3" if made.config.version == 3 else "eagle"
        tokens = min(args.tokens, made.config.parallel or args.tokens)
    export(source, args.to, folder, speculative_tokens=tokens)
    if args.damage:
        damage(folder, args.damage, source.target_config.get_text_config().num_hidden_layers)
    chain = Topology(tuple((0,) * depth for depth in range(1, tokens + 1)))
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "chain.json"
        write_json(tree, {"paths": chain.paths})
        target, drafter = load_drafter(name, target_name=args.target, dtype="float32", tree=str(tree), all_nodes=True)
    if isinstance(made, MedusaHeads | DFlash) and made.draft_vocab is not None and not source.has_draft_vocab(args.to):
        kind: Any = DFlashDrafter if isinstance(made, DFlash) else MedusaDrafter
        drafter = kind(of_all_tokens(made), chain, target)
    return Case(target, drafter, method, folder, tokens, folder, parallel=getattr(c, "parallel", 0) > 0)


def of_all_tokens(made: MedusaHeads | DFlash) -> MedusaHeads | DFlash:
    """A drafter that shares the target's LM head, without its draft vocabulary: as other programs hold it."""
    config: Any = replace(made.config, draft_vocab_size=None)
    whole = DFlash(config) if isinstance(made, DFlash) else MedusaHeads(config, made.weight.dtype)
    whole.load_state_dict({name: w for name, w in made.state_dict().items() if name != "draft_vocab"})
    return whole.eval().requires_grad_(False)


def check_one(name: str, args: argparse.Namespace, plain_of: dict[str, Any]) -> dict[str, Any]:
    """Serve a drafter and compare. ``plain_of``: what plain decoding gave, by the target's fingerprint; added to.
    Raises ValueError: it cannot be exported, or the server failed."""
    case = case_of(name, args)
    target, tokens = case.target, case.tokens
    prompts = encode_prompts(read_prompts(args.prompts), target)
    context = min(target.context, max(map(len, prompts)) + args.max_new_tokens + 2 * tokens + 8)
    scratch = (args.out / "converted" / args.server).absolute()
    scratch.mkdir(parents=True, exist_ok=True)
    job = {
        "server": args.server,
        "environment": str(args.environment.absolute()),
        "scratch": str(scratch),
        "target": str(locate(target.name).path.resolve()),
        "target_name": f"target-{target.fingerprint[:16]}",
        "method": None,
        "drafter": None if case.model is None else str(case.model.resolve()),
        "match": case.match,
        "tokens": 0,
        "prompts": prompts,
        "max_new_tokens": args.max_new_tokens,
        "stop_ids": sorted(target.stop_ids),
        "context": context,
    }
    count, what = len(prompts), "the target alone"
    if target.fingerprint not in plain_of:
        weights = 4 * sum(weight.numel() for weight in target.model.parameters())
        needed, free = (2 * weights + int(ROOM) * 2**30) / 1e9, free_bytes(torch.device("cpu")) / 1e9
        if needed > free:
            say(
                f"{args.server} takes about {needed:.0f} GB for this target, of which {free:.0f} are free: it may be "
                "killed"
            )
        say(f"{args.server}: {what}, {count} prompts …")
        theirs = in_server(job)
        say(f"draftsmith: {what} …")
        plain = SpeculativeDecoder(target).generate(prompts, args.max_new_tokens, batch_size=1)
        checked = check_texts(target, prompts, [t["tokens"] for t in theirs["texts"]], [p.tokens for p in plain])
        plain_of[target.fingerprint] = plain, checked.near_ties, checked.mismatches
    plain, near_ties, mismatches = plain_of[target.fingerprint]
    say(f"{args.server}: {name}, {count} prompts …")
    served = in_server({**job, "method": case.method, "tokens": tokens, "parallel": case.parallel})
    say(f"draftsmith: {name} …")
    longer = SpeculativeDecoder(target, case.drafter).generate(
        prompts, args.max_new_tokens + tokens, batch_size=1, stop_ids=frozenset()
    )
    ours = [cut(text, args.max_new_tokens, target.stop_ids, args.server, tokens) for text in longer]
    found = compare(target, prompts, plain, ours, served, tokens, case.method != NGRAM)
    found |= {
        "server": served["server"],
        "method": case.method,
        "format": args.to,
        "draft_tokens": tokens,
        "damage": args.damage,
        "plain_near_ties": near_ties,
        "plain_mismatches": mismatches,
        "equal": found["equal"] and not mismatches,
        "dtype": "float32",
    }
    if case.folder is not None:
        write_json(case.folder / "serving.json", provenance(**found))
        card = read_text(case.folder / "README.md", "model card")
        write_text(case.folder / "README.md", card.replace(NO_SERVER, sentence(found)))
    return found


def sentence(found: dict[str, Any]) -> str:
    """What the model card says of a server."""
    places = ", ".join(f"{count / max(1, found['drafts'][0]):.2f}" for count in found["accepted_by_position"][0])
    verdict = "as in draftsmith's engine" if found["equal"] else "**not as in draftsmith's engine**"
    if found["damage"]:
        verdict += f"; **damaged on purpose** ({found['damage']})"
    return (
        f"In {found['server']} on a CPU, greedy in float32, {found['prompts']} prompts: drafts of "
        f"{found['draft_tokens']} tokens, accepted by position {places}, mean accepted length "
        f"{found['mean_accepted_length']:.2f}, {verdict}; {found['near_ties']} near-ties and {found['mismatches']} "
        f"mismatches with plain decoding in {found['tokens']} tokens (`serving.json`)."
    )


def main() -> None:
    args = parser().parse_args()
    check(args)
    args.to = args.to or ("openvino" if args.server == "openvino" else "vllm")
    table = table_of(*COLUMNS)
    plain_of: dict[str, Any] = {}
    verdicts, server, left_out = list[bool](), args.server, list[str]()
    for name in args.drafters:
        try:
            found = check_one(name, args, plain_of)
        except ValueError as error:
            refused = isinstance(error, Unsupported)
            left_out.append(f"{name}: {'not exported: ' if refused else ''}{error}")
            say(left_out[-1])
            verdicts += [] if refused else [False]
            continue
        same_texts = found["identical_texts"] == found["prompts"] and not found["mismatches"]
        verdicts.append(same_texts and not found["equal"] if args.must_differ else found["equal"])
        server = found["server"]
        pairs = [" / ".join(map(str, found[key])) for key in ("drafts", "accepted_by_position")]
        texts, differ = f"{found['identical_texts']} of {found['prompts']}", (found["near_ties"], found["mismatches"])
        verdict, tau = "yes" if found["equal"] else "NO", found["mean_accepted_length"]
        if tau is None:
            pairs = [OTHERS, ""]
        row = [name, texts, *map(str, differ), *pairs, cell(tau), verdict]
        say(", ".join(f"{column} {text}" for column, text in zip(COLUMNS, row, strict=True)))
        table.add_row(*row)
    print_table(table, f"{server} / our engine, {datetime.date.today()}")
    print(*left_out, sep="\n", end="\n" if left_out else "")
    if not verdicts or not all(verdicts):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
