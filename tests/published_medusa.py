"""The same Medusa heads by our engine and by the published code: equal tokens, equal accepted lengths, and the speed of
each.

    python tests/published_medusa.py DRAFTER --prompts P.jsonl --checkout FOLDER --python VENV/bin/python

DRAFTER is one of our Medusa drafters on a Llama target. FOLDER is a checkout of github.com/FasterDecoding/Medusa
(compared at e2a5d20), VENV an environment that it runs in (Python 3.11: torch, numpy<2, transformers==4.36.2). Target,
tokenizer and heads are written as that code reads them: a Llama checkpoint, and a folder with config.json and
medusa_lm_head.pt. Both decode the prompts greedily in float32 on the CPU with all nodes of the same tree. Nothing of
the published code is changed or copied; a head of several layers is given a block for each, since that code makes one
block and applies it several times.

A head that uses the target's LM head gets a copy of it as its last layer. A draft vocabulary does not exist there: both
then choose from the whole vocabulary, and our τ with the draft vocabulary is reported beside.

Exit codes: 0 equal, 1 not equal, 2 wrong usage or bad input. Equal means: no token but near-ties (at most 0.1 % of
them) differs, and the τ are within 0.5 % of each other. The last step of an answer is not counted, since the limit may
cut it. Tokens per second count the prompt's pass, too; each decodes the first prompt twice and is not timed the first
time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MAX_HEADS = 5  # their loader makes five heads, whatever the config says
NEAR_TIES, TAU = 1e-3, 5e-3  # share of tokens that may be near-ties; relative difference of τ


# ---- the checkpoint


def write_heads(folder: Path, heads: Any, target: Any, base: Path) -> None:
    """Heads as ``medusa_lm_head.pt`` and config.json, keys ``{head}.{layer}.linear.{weight, bias}`` and
    ``{head}.{layers}.weight``.

    Raises:
        ValueError: a layout that the published code has no place for.
    """
    from draftsmith.models.serving.to_servers import medusa_tensors  # their environment has none of it

    shape = heads.config
    if shape.num_draft_heads > MAX_HEADS:
        raise ValueError(f"{shape.num_draft_heads} draft heads: the published code loads {MAX_HEADS} at most")
    if shape.draft_vocab_size is not None:
        raise ValueError("the published heads have the target's whole vocabulary")
    stored = {name: tensor.float() for name, tensor in medusa_tensors(heads, target.lm_head).items()}
    folder.mkdir(parents=True)
    torch.save(stored, folder / "medusa_lm_head.pt")
    config = {
        "base_model_name_or_path": str(base),
        "medusa_num_heads": shape.num_draft_heads,
        "medusa_num_layers": shape.num_layers,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_target(folder: Path, target: Any) -> None:
    """The target and its tokenizer in float32, as transformers 4.36 reads them.

    Raises:
        ValueError: not a Llama model, or one that the published attention cannot run.
    """
    from safetensors.torch import save_file

    config = target.config.to_dict()
    rope = config.pop("rope_parameters", None) or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"target '{target.name}': the published code is compared on Llama targets with plain RoPE alone"
        )
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if (config.get("head_dim") or width // heads) * heads != width:
        raise ValueError(
            f"target '{target.name}': head_dim {config['head_dim']} × {heads} heads is not its width {width}, "
            "which the published code requires"
        )
    folder.mkdir(parents=True)
    for name in ("transformers_version", "dtype", "quantization_config"):
        config.pop(name, None)
    config |= {"rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": None, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {name: weight.detach().float().contiguous() for name, weight in target.model.state_dict().items()}
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    target.tokenizer.save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    merges = tokenizer["model"].get("merges")  # older tokenizers read "a b" alone, not ["a", "b"]
    if merges:
        tokenizer["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    end = {"eos_token": target.tokenizer.eos_token, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)


# ---- the published code, in its own environment


class Ids:
    """Stands for their tokenizer: the generator yields decoded texts alone, and with it the ids."""

    eos_token_id = -1  # ended by this script, at any of the target's stop ids

    @staticmethod
    def decode(ids: torch.Tensor, **_: Any) -> list[int]:
        return ids.tolist()


def run_published(checkout: Path, folder: Path) -> None:
    """Decode the requests of stdin (one JSON object) by the published code; a line of JSON per prompt on stdout."""
    answers, sys.stdout = sys.stdout, sys.stderr
    request = json.load(sys.stdin)
    sys.path.insert(0, str(checkout))
    torch.set_num_threads(request["threads"])
    # These modules exist in their environment alone.
    from medusa.model import utils  # pyright: ignore[reportMissingImports]
    from medusa.model.medusa_model import MedusaModel, ResBlock  # pyright: ignore[reportMissingImports]

    utils.TOPK = max(utils.TOPK, 1 + max(rank for path in request["paths"] for rank in path))
    model = MedusaModel.from_pretrained(str(folder), torch_dtype=torch.float32).eval()
    stored = torch.load(folder / "medusa_lm_head.pt")
    layers = request["layers"]
    if layers > 1:  # theirs has one block, applied several times
        for head in model.medusa_head:
            for layer in range(layers):
                head[layer] = ResBlock(model.hidden_size)
        model.medusa_head.load_state_dict(stored, strict=False)
    loaded = model.medusa_head.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in stored.items()), "heads did not load"
    model.tokenizer = Ids()
    for prompt in [request["prompts"][0], *request["prompts"]]:  # the first time for warmth
        began = time.perf_counter()
        tokens: list[int] = []
        steps: list[int] = []
        pieces = model.medusa_generate(
            torch.tensor([prompt]), temperature=0.0, max_steps=request["limit"], medusa_choices=request["paths"]
        )
        for piece in pieces:
            steps.append(len(piece["text"]) - len(tokens))
            new, tokens = piece["text"][len(tokens) :], piece["text"]
            if len(tokens) >= request["limit"] or not set(request["stops"]).isdisjoint(new):
                break
        end = next((place + 1 for place, token in enumerate(tokens) if token in request["stops"]), len(tokens))
        answer = {"tokens": tokens[: min(end, request["limit"])], "steps": steps}
        print(json.dumps(answer | {"seconds": time.perf_counter() - began}), file=answers, flush=True)


# ---- the comparison


def mean_length(steps: Sequence[Sequence[int]]) -> float:
    """τ over all steps but each answer's last."""
    counted = [length for each in steps for length in each[:-1]]
    return sum(counted) / max(1, len(counted))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Decode with both, and count what differs; returns what is printed.

    Raises:
        ValueError: the drafter has a form that the published code cannot hold, or the published code failed.
    """
    from draftsmith.inference.commands.prompts import encode_prompts, read_prompts
    from draftsmith.inference.drafters.load import read_named
    from draftsmith.inference.drafters.medusa import MedusaDrafter
    from draftsmith.inference.engine.engine import Generation, SpeculativeDecoder
    from draftsmith.inference.load import load_drafter
    from draftsmith.inference.measure.lossless import check_texts
    from draftsmith.inference.verify.tree import read_tree
    from draftsmith.models.medusa import MedusaHeads

    torch.set_num_threads(args.threads)
    stored, config, weights = read_named(args.drafter)
    if config["drafter_type"] != "medusa":
        raise ValueError(f"{args.drafter}: its drafter_type is {config['drafter_type']}; this compares Medusa heads")
    target, _ = load_drafter(args.drafter, target_name=args.target, tree=args.tree, device="cpu", dtype="float32")
    tree = read_tree(stored / "tree.json" if args.tree == "auto" else Path(args.tree))
    heads = MedusaHeads.from_artifact(config, weights, str(stored))
    drafters = {"ours": heads}
    if heads.config.draft_vocab_size is not None:
        if heads.projection is not None:
            raise ValueError(
                f"{args.drafter}: its heads have their own projections of a draft vocabulary; the published code has "
                "place for the whole vocabulary alone"
            )
        from draftsmith.benchmarks.serve_check import of_all_tokens

        drafters = {"ours": of_all_tokens(heads), "ours with the draft vocabulary": heads}
    prompts = encode_prompts(read_prompts(args.prompts), target)[: args.count]
    results: dict[str, list[Generation]] = {}
    seconds: dict[str, float] = {}
    for name, each in drafters.items():
        decoder = SpeculativeDecoder(target, MedusaDrafter(each, tree, target))
        decoder.generate(prompts[:1], args.max_new_tokens, batch_size=1)
        began = time.perf_counter()
        results[name] = decoder.generate(prompts, args.max_new_tokens, batch_size=1)
        seconds[name] = time.perf_counter() - began
        print(f"{name}: decoded {len(prompts)} prompts", file=sys.stderr)
    ours = results["ours"]

    with tempfile.TemporaryDirectory() as temporary:
        base, folder = Path(temporary) / "target", Path(temporary) / "heads"
        write_target(base, target)
        write_heads(folder, drafters["ours"], target, base)
        request = {
            "prompts": prompts,
            "paths": [list(path) for path in tree.paths],
            "limit": args.max_new_tokens,
            "stops": sorted(target.stop_ids),
            "layers": heads.config.num_layers,
            "threads": args.threads,
        }
        # By a relative path: transformers takes a family's name anywhere in a path without model_type for its family.
        command = [str(Path(args.python).absolute()), str(Path(__file__).resolve()), "--worker"]
        done = subprocess.run(
            [*command, str(args.checkout.resolve()), folder.name],
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=temporary,
        )
    if done.returncode:
        raise ValueError(f"the published code failed (exit code {done.returncode}); see its messages above")
    theirs = [json.loads(line) for line in done.stdout.splitlines()][1:]
    tokens = [each["tokens"] for each in theirs]
    checked = check_texts(target, prompts, tokens, [each.tokens for each in ours])
    same = [place for place, each in enumerate(ours) if each.tokens == tokens[place]]
    # A step here is the root and what was accepted below it; of ours, that and the next root instead of its own.
    steps = [each["steps"][: len(mine.accepted)] for mine, each in zip(ours, theirs, strict=True)]
    tau = {name: mean_length([each.accepted for each in some]) for name, some in results.items()}
    tau["published"], seconds["published"] = mean_length(steps), sum(each["seconds"] for each in theirs)
    count = {name: sum(len(each.tokens) for each in some) for name, some in results.items()}
    count["published"] = sum(map(len, tokens))
    difference = abs(tau["published"] / tau["ours"] - 1)
    return {
        "prompts": len(prompts),
        "tokens": checked.checked,
        "identical_answers": len(same),
        "near_ties": checked.near_ties,
        "mismatches": checked.mismatches,
        "answers_with_equal_steps": sum(ours[place].accepted[:-1] == steps[place][:-1] for place in same),
        "mean_accepted_length": {name: round(value, 4) for name, value in tau.items()},
        "tokens_per_second": {name: round(count[name] / seconds[name], 1) for name in seconds},
        "tree_nodes": tree.num_nodes,
        "equal": not checked.mismatches and checked.near_ties <= NEAR_TIES * checked.checked and difference <= TAU,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", metavar="DRAFTER", help="a Medusa drafter's folder or Hub id")
    parser.add_argument("--target", help="its target, if it lies elsewhere than the drafter says")
    parser.add_argument("--tree", default="auto", metavar="FILE|auto")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--count", type=int, help="only the first prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of the published code")
    parser.add_argument("--python", required=True, help="the interpreter of an environment that it runs in")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both")
    found = compare(parser.parse_args())
    print(json.dumps(found, indent=1))
    if not found["equal"]:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:  # their environment has no draftsmith
        run_published(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        from draftsmith.common.command import run_command

        run_command(main)
