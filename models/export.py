"""Write an EAGLE or DFlash drafter or Medusa heads in the format of a serving program, and check what was written.

    python models/export.py runs/mine --to vllm --out served/mine           # EAGLE-3: the same folder as for sglang
    python models/export.py runs/mine --to speculators --out served/mine    # then: vllm serve served/mine
    python models/export.py runs/mine --to openvino --out served/mine       # EAGLE-3, to be converted as its card says
    python models/export.py runs/heads --to medusa --out served/heads       # Medusa heads in their published layout
    python models/export.py runs/mine --to sglang --out served/mine --push-to-hub USER/NAME
    python models/export.py runs/mine --to hf --push-to-hub USER/NAME       # as it is, for draftsmith's own engine
    python models/export.py runs/medusa2 --to merged --out served/target    # the target with the adapter of Medusa-2

With --to hf the run's folder itself is uploaded: the calibrated tree, and the card with what was measured since. With
--to merged the target is written as one model with the drafter's adapter merged in, for servers that take no adapter;
the drafter is then exported with this folder as its --target.

The names of each other format are in models/serving/layouts.py. After the files are written they are imported again,
and fields and logits are compared with the drafter's own on random features: at each position, and for the further
tokens of a draft. If anything differs, nothing is kept. What a server makes of the folder, `make serve-check` finds.

The target is loaded only where its weights are needed: its embeddings for EAGLE in speculators' form, its LM head for
DFlash and for a drafter that has none of its own. Otherwise its config.json is enough.
"""

# ruff: noqa: E402

import argparse
from pathlib import Path

from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_whole
from draftsmith.models.files.drafters import check_drafter_name
from draftsmith.models.precision import DTYPES

FORMATS = ("sglang", "vllm", "speculators", "openvino", "medusa", "hf", "merged")
_NOT_FOR = {  # options that a format has no use for, and why
    "hf": ("target served_target speculative_tokens dtype", "uploads the run's folder as it is"),
    "merged": ("served_target speculative_tokens dtype push_to_hub", "writes the target alone, as it is stored"),
}
# Drafters without a folder.
_UNTRAINED = ("none", "ngram", "draft_model", "streamingllm", "streamingllm16", "snapkv", "topk")


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", help="folder or Hub id of an EAGLE, DFlash or Medusa drafter, for example runs/mine")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to write; none for --to hf")
    parser.add_argument("--target", help="the target, if it is not where the drafter's config says")
    parser.add_argument(
        "--served-target", metavar="NAME", help="what the server loads the target by, if not by the same name"
    )
    parser.add_argument(
        "--speculative-tokens",
        type=int,
        metavar="N",
        help="length of an EAGLE drafter's drafts, in speculators' config and in the card's commands (default: that of "
        "the fastest chain that calibration found, else 3, of P-EAGLE all of a pass)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of all weights that are written (default: the drafter's own; what is the target's in float32 where "
        "that loses digits)",
    )
    parser.add_argument("--push-to-hub", metavar="USER/NAME", help="upload the folder")
    parser.add_argument("--private", action="store_true", help="as a private repository, if it is created")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the target")
    return parser


def check(args: argparse.Namespace) -> None:
    """What can be known to be wrong before torch is imported. Raises FileNotFoundError, ValueError: one line."""
    if args.to == "hf" and (args.out is not None or args.push_to_hub is None):
        raise ValueError("--to hf uploads the run's folder as it is: give --push-to-hub USER/NAME, and no --out")
    options, why = _NOT_FOR.get(args.to, ("", ""))
    for name in options.split():
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"--{name.replace('_', '-')} {value}: --to {args.to} {why}; leave it out")
    if args.to != "hf" and args.out is None:
        raise ValueError(f"--to {args.to}: name the folder to write by --out DIR")
    if args.out is not None:
        check_whole("--out", args.out, "merged_from" if args.to == "merged" else "max_logit_difference")
    if args.speculative_tokens is not None and args.speculative_tokens < 1:
        raise ValueError(f"--speculative-tokens {args.speculative_tokens}: it has to be above 0")
    if args.served_target == "":
        raise ValueError("--served-target: the name is empty; leave it out for the target's own")
    if args.to in ("speculators", "medusa") and (args.served_target or "").startswith("."):
        raise ValueError(
            f"--served-target {args.served_target}: config.json would name another folder wherever it is read from; "
            "give a Hub id or the whole path"
        )
    if args.private and args.push_to_hub is None:
        raise ValueError("--private is for --push-to-hub; leave it out")
    if args.push_to_hub is not None:
        from draftsmith.common.field_types import check_repository  # pydantic

        try:
            check_repository(args.push_to_hub)
        except ValueError as error:
            raise ValueError(f"--push-to-hub '{args.push_to_hub}': {error}") from None
    if args.drafter.partition(":")[0] in _UNTRAINED and not Path(args.drafter).exists():
        raise ValueError(
            f"'{args.drafter}': has no weights of its own, so there is nothing to export; servers have "
            "n-gram drafts and draft models of their own"
        )
    check_drafter_name(args.drafter, args.target)


if __name__ == "__main__":
    before_imports(parser(), check)

import shlex
import sys

from draftsmith.common.files import check_folder, json_object, object_or_empty, read_text, write_json, write_text
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import provenance, push, read_drafter, write_model
from draftsmith.models.card import is_hub_id, of_other_weights, served_name, with_measured
from draftsmith.models.files.identity import fingerprint
from draftsmith.models.files.locate import local_folder
from draftsmith.models.serving.from_published import load_stored
from draftsmith.models.serving.model_card import fastest_chain
from draftsmith.models.serving.source import open_source
from draftsmith.models.serving.to_servers import export


def publish(name: str, repository: str, private: bool) -> None:
    """Upload a run's folder with its calibrated tree, and the card with what was measured since training.
    Raises FileNotFoundError, ValueError: it is no drafter's folder here, or not calibrated; or the Hub refuses.
    OSError: the card cannot be written."""
    if local_folder(name) is None:
        raise ValueError(f"{name}: --to hf uploads a folder of this machine")
    folder, _, _ = read_drafter(name)
    calibration = object_or_empty(folder / "tree.json").get("calibration")
    known = isinstance(calibration, dict)
    if not known or of_other_weights(folder, calibration):
        what = "of other weights than are there" if known else "not calibrated"
        raise ValueError(
            f"{folder}: its tree is {what}; first: python inference/calibrate.py {shlex.quote(str(folder))}"
        )
    card = folder / "README.md"
    write_text(card, with_measured(read_text(card, "model card"), folder))
    print(f"uploading to {repository} …")
    print(push(folder, repository, private))


def merge(name: str, target_name: str | None, out: Path, trust_remote_code: bool) -> None:
    """Write the target with a drafter's adapter merged in, and note its fingerprint in the drafter's config.json.
    Raises FileNotFoundError, ValueError: the drafter is not here, has no adapter or is for another target. OSError: a
    file cannot be written."""
    if local_folder(name) is None:
        raise ValueError(f"{name}: --to merged notes the merged target in the drafter's folder; download it first")
    folder, config, _ = read_drafter(name)
    described = config["target"]
    if not described.get("adapter"):
        raise ValueError(f"{folder}: it was trained without an adapter of its target, so there is nothing to merge")
    base, revision = target_name or described["name_or_path"], None if target_name else described.get("revision")
    target = load_stored(base, revision, trust_remote_code)
    merged = target_of(folder, config, target)
    if merged is target:
        raise ValueError(f"--target {base}: has this adapter merged in already")
    check_folder("--out", out)
    write_model(out, merged.model, merged.tokenizer, provenance(merged_from=base))
    stored = json_object(folder / "config.json", "drafter config")
    stored["target"]["merged_fingerprint"] = fingerprint(out)
    write_json(folder / "config.json", stored)
    print(f"{out}: {base} with the adapter of {folder}; export the drafter by --target {shlex.quote(str(out))}")


def main() -> None:
    args = parser().parse_args()
    check(args)
    if args.to == "hf":
        return publish(args.drafter, args.push_to_hub, args.private)
    if args.to == "merged":
        return merge(args.drafter, args.target, args.out, args.trust_remote_code)
    source = open_source(
        args.drafter, args.to, args.target, args.trust_remote_code, tokens=args.speculative_tokens, dtype=args.dtype
    )
    tokens = args.speculative_tokens or fastest_chain(source)
    check_folder("--out", args.out)
    facts = {
        "drafter": Path(args.drafter).resolve().name,
        "target": source.target_name,
        "served_target": args.served_target,
        "command": f"python models/export.py {shlex.join(sys.argv[1:])}",
    }
    try:
        apart = export(source, args.to, args.out, args.served_target, tokens, facts)
    except ValueError as error:
        raise ValueError(f"{args.drafter} --to {args.to}: {error}") from None
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors")) / 1e6
    print(f"{args.out}: {size:,.1f} MB for {args.to}; its logits, read back, differ by {apart:.1e} at most")
    if args.to in ("speculators", "medusa"):
        served = served_name(source.target_name, source.fingerprint, args.served_target)
        if not is_hub_id(served):
            print(f"its config.json names the target by {served}, a path of this machine; for others: --served-target")
    if source.drafter.draft_vocab is not None and not source.has_draft_vocab(args.to):
        print("a draft vocabulary has no place there: servers draft from all tokens, by the target's own LM head")
    if args.push_to_hub:
        print(f"uploading to {args.push_to_hub} …")
        print(push(args.out, args.push_to_hub, args.private))


if __name__ == "__main__":
    run_command(main)
