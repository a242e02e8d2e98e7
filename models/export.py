"""Write an EAGLE drafter or Medusa heads in the format of a serving program, and check what was written.

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

Each other format has a contract (models/formats.py). After the files are written, logits are computed from them alone
(models/exported.py) and compared with the drafter's own on random features: at each position, and for the further
tokens of a draft. If anything differs, nothing is kept. What a server makes of the folder, `make serve-check` finds.

The target is loaded only where its weights are needed: its embeddings for speculators, its LM head for a drafter that
has none of its own. Otherwise its config.json is enough.
"""

# ruff: noqa: E402

import argparse
from pathlib import Path

from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.common.files import check_own
from draftsmith.models.files.drafters import check_drafter_name
from draftsmith.models.precision import DTYPES

FORMATS = ("sglang", "vllm", "speculators", "openvino", "medusa", "hf", "merged")
TOKENS = 3  # of a draft in speculators' config and in the card's commands, where calibration found no best chain
_UNTRAINED = ("none", "ngram", "draft_model", "streamingllm", "snapkv", "topk")  # drafters without a folder
NO_SERVER = "No server has run this folder."  # the card's last line, until `make serve-check` has


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("drafter", help="the folder or Hub id of an EAGLE or Medusa drafter, for example runs/mine")
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
        f"the fastest chain that calibration found, else {TOKENS})",
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


def check_output(out: Path) -> None:
    """Check the folder to write, which is a new one, an empty one, or one that this command wrote before.
    Raises ValueError: it holds something else."""
    check_own("--out", out, {"provenance.json": "max_logit_difference"})
    if out.is_dir() and any(out.iterdir()) and not (out / "provenance.json").exists():
        there = sorted(path.name for path in out.iterdir())
        more = ", …" if len(there) > 3 else ""
        raise ValueError(f"--out {out}: it holds other things ({', '.join(there[:3])}{more}); name another folder")


def check(args: argparse.Namespace) -> None:
    """What can be known to be wrong before torch is imported. Raises FileNotFoundError, ValueError: one line."""
    if args.to == "hf":
        if args.out is not None or args.push_to_hub is None:
            raise ValueError("--to hf uploads the run's folder as it is: give --push-to-hub USER/NAME, and no --out")
        for name in ("target", "served_target", "speculative_tokens", "dtype"):
            if (value := getattr(args, name)) is not None:
                option = f"--{name.replace('_', '-')} {value}"
                raise ValueError(f"{option}: --to hf uploads the run's folder as it is; leave it out")
    if args.to == "merged":
        for name in ("served_target", "speculative_tokens", "dtype", "push_to_hub"):
            if (value := getattr(args, name)) is not None:
                option = f"--{name.replace('_', '-')} {value}"
                raise ValueError(f"{option}: --to merged writes the target alone, as it is stored; leave it out")
    if args.to != "hf" and args.out is None:
        raise ValueError(f"--to {args.to}: name the folder to write by --out DIR")
    if args.out is not None:
        check_output(args.out)
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
        from draftsmith.common.sections import check_repository  # pydantic

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

import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from draftsmith.common.command import first_line
from draftsmith.common.files import check_folder, json_object, read_text, replacing_folder, write_json, write_text
from draftsmith.models.adapter import target_of
from draftsmith.models.artifact import TEMPLATE, check_target, in_dtype, provenance, push, read_drafter, write_model
from draftsmith.models.card import TRAINING, is_hub_id, measured, named, served_name, table_of, with_measured
from draftsmith.models.eagle import Eagle
from draftsmith.models.exported import difference
from draftsmith.models.files.identity import difference as fingerprints_differ
from draftsmith.models.files.identity import fingerprint as stored_fingerprint
from draftsmith.models.files.identity import older_fingerprint, same_target
from draftsmith.models.files.locate import local_folder, locate
from draftsmith.models.files.weights import save_tensors, stored_dtype, weight_files
from draftsmith.models.formats import PUBLISHED_MEDUSA, WEIGHTS, NoPlace, Source, check_form, written
from draftsmith.models.from_published import convert_if_published, load_stored
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.shortlist import ShortlistHead
from draftsmith.models.target import load_target


def _with_list(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of the EAGLE drafter whose shortlists these are, with the one list of all depths (FR-Spec,
    VocabTrim) as its draft vocabulary."""
    head = ShortlistHead.from_artifact(config, weights, str(folder))
    part = folder / config["parts"][0]
    sizes = set(head.config.capacity)
    if head.config.shortlist not in ("fr_spec", "vocab_trim") or len(sizes) > 1:
        raise ValueError(
            f"{folder}: its shortlists ({head.config.shortlist}) differ by depth or node, for which servers have no "
            f"place; its drafter alone can be exported: {part}"
        )
    _, config, weights = read_drafter(str(part))
    kept = head.order[: sizes.pop()].sort().values
    ids = weights.get("draft_vocab", torch.arange(config["vocab_size"]))[kept]
    rows = {"lm_head.weight": weights["lm_head.weight"][kept]} if "lm_head.weight" in weights else {}
    return {**config, "draft_vocab_size": len(ids)}, {**weights, **rows, "draft_vocab": ids}


def check_tokens(drafter: Eagle | MedusaHeads, tokens: int) -> None:
    """Raises ValueError: drafts have another length than ``tokens``."""
    if isinstance(drafter, MedusaHeads):
        raise ValueError(f"--speculative-tokens {tokens}: Medusa heads draft one token each; leave it out")
    if tokens >= (positions := drafter.config.max_position_embeddings):
        raise ValueError(f"--speculative-tokens {tokens}: the drafter has {positions} positions")


def fastest_chain(folder: Path) -> int:
    """Tokens of the fastest chain that the calibration of a drafter's folder timed or estimated; :data:`TOKENS` if its
    tree does not say."""
    tree = json_object(folder / "tree.json") if (folder / "tree.json").exists() else {}
    sizes = tree.get("calibration", {}).get("sizes") or []
    chains = [size for size in sizes if size.get("depth") == size["nodes"] - 1]
    return max(chains, key=lambda size: size["speedup"])["depth"] if chains else TOKENS


def open_source(
    name: str,
    to: str,
    target_name: str | None = None,
    trust_remote_code: bool = False,
    tokens: int | None = None,
    dtype: str | None = None,
) -> Source:
    """Read a drafter, and of its target what the format needs.
    ``target_name``: folder or Hub id; what the drafter's config says if left out. ``tokens``: of a draft, if asked for.
    ``dtype``: of what is written; the drafter's own if left out.
    Raises FileNotFoundError, ValueError: drafter or target is missing or damaged, or they do not belong together.
    NoPlace, a ValueError: the format has no place for such a drafter."""
    folder, config, weights = read_drafter(convert_if_published(name, target_name, trust_remote_code=trust_remote_code))
    if config["drafter_type"] == "dynaspec":
        config, weights = _with_list(folder, config, weights)
    if dtype is not None:
        weights = in_dtype(weights, dtype)
        if lost := [part for part, weight in weights.items() if not weight.isfinite().all()]:
            raise ValueError(f"{folder}: '{lost[0]}' has numbers that {dtype} cannot hold; leave out --dtype {dtype}")
    kind = config["drafter_type"]
    if kind not in ("eagle", "medusa"):
        instead = "EAGLE drafters and Medusa heads are"
        if kind == "ssm":
            part = next(iter(config.get("parts", ["ssm-0"])))
            instead = f"each SSM is already a causal LM, which servers take as a draft model: {folder / part}"
        raise ValueError(f"{folder}: a drafter of type {kind} is not exported to {to}: {instead}")
    drafter = (Eagle if kind == "eagle" else MedusaHeads).from_artifact(config, weights, str(folder))
    if tokens is not None:
        check_tokens(drafter, tokens)
    c, trained_for = drafter.config, str(config["target"]["name_or_path"])
    merged = config["target"].get("merged_fingerprint")  # that of --target, if there is an adapter
    fingerprint = str((target_name and merged) or config["target"].get("fingerprint") or "")
    try:
        check_form(drafter, to)
    except NoPlace as error:
        raise NoPlace(f"{folder}: {error}") from None
    if config["target"].get("adapter") and not (target_name and merged):
        advice = (
            "give the merged one by --target"
            if merged
            else f"write that one: python models/export.py {folder} --to merged --out DIR"
        )
        raise ValueError(
            f"{folder}: it was trained with an adapter of its target, which a server's target lacks; {advice}"
        )
    name = target_name or trained_for
    empty = [part for part, weight in weights.items() if weight.dim() == 2 and not weight.any()]
    if empty:
        raise ValueError(f"{folder}: '{empty[0]}' has zeros alone, so that it drafts nothing; train it anew")
    revision = None if target_name else config["target"].get("revision")
    needed = c.projection == "shared" or to == "speculators" or kind == "medusa"
    located = locate(name, revision, weights=needed)
    stored = located.path
    if not needed:
        try:
            target_config: Any = AutoConfig.from_pretrained(stored, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises many types for wrong fields
            raise ValueError(f"{stored}/config.json: transformers refuses it ({first_line(error)})") from None
        if isinstance(drafter, Eagle) and _scales_embeddings(target_config):
            located, needed = locate(located), True  # for the check of what the drafter reads
        for field in ("hidden_size", "vocab_size"):
            if (size := getattr(target_config.get_text_config(), field)) != getattr(c, field):
                raise ValueError(
                    f"{folder}: this drafter was trained for target '{trained_for}', not for '{name}': {field} "
                    f"{getattr(c, field)} ≠ {size}"
                )
        if not needed:
            _check_weights(folder, stored, fingerprint, trained_for, name)
            return Source(drafter, weights, name, target_config, None, folder, fingerprint)
    if dtype is None:
        dtype = found if (found := stored_dtype(stored)) in DTYPES else "float32"
    target = load_target(located, dtype=dtype, trust_remote_code=trust_remote_code)
    check_target(folder, config, target)
    if config["target"].get("adapter") and not target.is_known_as(merged):
        raise ValueError(f"{folder}: it was trained with an adapter, and --target {name} is the target without it")
    biased = getattr(target.lm_head, "bias", None) is not None
    if isinstance(drafter, Eagle) and drafter.config.version == 3 and c.projection == "shared" and biased:
        raise ValueError(f"{folder}: the LM head of target '{name}' has a bias, for which {to} has no place")
    return Source(drafter, weights, name, target.model.config, target, folder, fingerprint)


def _scales_embeddings(config: Any) -> bool:
    """Whether a family's embeddings are more than a matrix's rows (Gemma), so that servers may give others."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False  # a model with its own code
    with torch.device("meta"):
        family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return type(family(config).get_input_embeddings()) is not nn.Embedding


def _check_weights(folder: Path, target: Path, fingerprint: str, trained_for: str, name: str) -> None:
    """Refuse, by a ValueError, a target of other weights than the drafter's, where its weights are on this machine."""
    with suppress(FileNotFoundError):
        weight_files(target)
        found = stored_fingerprint(target)
        if fingerprint and not same_target(fingerprint, found) and fingerprint != older_fingerprint(target):
            raise ValueError(
                f"{folder}: this drafter was trained for target '{trained_for}', not for '{name}': same shape, "
                f"{fingerprints_differ(fingerprint, found)}"
            )


def export(
    source: Source,
    to: str,
    out: Path,
    served_target: str | None = None,
    speculative_tokens: int = TOKENS,
    facts: Mapping[str, Any] | None = None,
) -> float:
    """Write a folder, check its contract and read it back; all of it is kept, or nothing. Weights and other files that
    an earlier export left there, and that this one does not write, are removed: they would be read.
    ``to``: one of :data:`FORMATS`.
    ``served_target``: what a server loads the target by; the source's name for it if left out.
    ``facts``: what provenance.json records besides.
    Returns the largest difference of logits, in float32.
    Raises ValueError: what was written is not what the format needs, or its logits differ. OSError: the disk is full,
    or it cannot be written."""
    served = served_name(source.target_name, source.fingerprint, served_target)
    tensors, config, contract = written(source, to, served, speculative_tokens)
    with replacing_folder(out) as temporary:
        save_tensors(tensors, temporary / contract.file)
        write_json(temporary / "config.json", config)
        contract.check(temporary)
        apart = difference(temporary, source.drafter, source.target)
        made = {"target_fingerprint": source.fingerprint, **(facts or {})}
        write_json(temporary / "provenance.json", provenance(format=to, max_logit_difference=apart, **made))
        if (template := source.folder / TEMPLATE).exists():
            write_text(temporary / TEMPLATE, read_text(template, "chat template"))
        card = _card(source, out.resolve().name, to, served_target, speculative_tokens)
        write_text(temporary / "README.md", card)
        stale = {WEIGHTS, PUBLISHED_MEDUSA, "serving.json", TEMPLATE} - {path.name for path in temporary.iterdir()}
    for name in stale:
        (out / name).unlink(missing_ok=True)
    return apart


def _commands(source: Source, to: str, target: str, tokens: int) -> tuple[str, str, str]:
    """What serves an exported folder, the name of the speculative method, and the commands, with DRAFTER for the
    folder."""
    if isinstance(source.drafter, MedusaHeads):
        count = source.drafter.config.num_draft_heads
        options = json.dumps({"method": "medusa", "model": "DRAFTER", "num_speculative_tokens": count})
        if to == "vllm":
            return "vLLM up to 0.32", "medusa", f"vllm serve {target} --speculative-config '{options}'"
        files = f"# {count} heads in the layout of FasterDecoding/Medusa, as safetensors; to decode with them here:\n"
        files += f'python -m draftsmith.inference.decode DRAFTER --target {target} --prompt "What is a prime number?"'
        return "programs that read the published layout from safetensors", "medusa", files
    version = source.drafter.config.version
    method = "eagle3" if version == 3 else "eagle"
    options = json.dumps({"method": method, "model": "DRAFTER", "num_speculative_tokens": tokens})
    vllm = f"vllm serve {target} --speculative-config '{options}'"
    if to == "speculators":
        return "vLLM and the package speculators", method, "vllm serve DRAFTER"
    if to == "openvino":
        # It takes what leaves a layer, and by default 2, n/2 and n − 3; its converter has no place for a list.
        convert = "optimum-cli export openvino --task text-generation-with-past --model"
        layers = " ".join(str(layer - 1) for layer in source.drafter.config.captured_layers)
        commands = f"""
{convert} {target} target-ov
{convert} DRAFTER --trust-remote-code drafter-ov
sed -i.bak 's|<eagle3_mode |<hidden_layers_list value="{layers}" />&|' drafter-ov/openvino_model.xml
python -c 'import openvino_genai as genai
pipeline = genai.LLMPipeline("target-ov", "CPU", draft_model=genai.draft_model("drafter-ov", "CPU"))
print(pipeline.generate("What is a prime number?", max_new_tokens=100, num_assistant_tokens={tokens}))'"""
        return "OpenVINO GenAI", method, commands.lstrip()

    def sglang(steps: int, top_k: int, nodes: int) -> str:
        return f"""
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE{"3" if version == 3 else ""} \\
    --speculative-draft-model-path DRAFTER --speculative-num-steps {steps} --speculative-eagle-topk {top_k} \\
    --speculative-num-draft-tokens {nodes}"""

    commands = sglang(tokens, 1, tokens + 1)
    tree = source.folder / "tree.json"
    shape = json_object(tree).get("dynamic") if tree.exists() else None
    if isinstance(shape, dict) and shape.keys() == {"top_k", "depth", "nodes"}:
        dynamic = sglang(shape["depth"], shape["top_k"], shape["nodes"])
        commands += f"\n# or the dynamic tree that was calibrated:{dynamic}"
    if version == 1:
        return ("SGLang", method, commands.lstrip()) if to == "sglang" else ("vLLM", method, vllm)
    if source.drafter.config.norm_before_residual:
        return "vLLM", method, f"{vllm}\n# not SGLang, which leaves out norm_before_residual and so drafts otherwise"
    return "vLLM and SGLang", method, vllm + commands


def _card(source: Source, name: str, to: str, served_target: str | None, tokens: int) -> str:
    """The model card, with the commands that serve the drafter."""
    trained = source.folder / "provenance.json"
    whose = named(source.target_name, source.fingerprint, source.target_config.model_type, served_target)
    facts = json_object(trained) if trained.exists() else {}
    licence = facts.get("licence")
    server, method, commands = _commands(source, to, whose.argument, tokens)
    template = ""
    if (source.folder / TEMPLATE).exists():
        template = f"""

It was trained with the chat template of `{TEMPLATE}`, which is not the target's own: serve it with
`--chat-template {TEMPLATE}`."""
    what, limit = f"{source.heads.config.num_draft_heads if method == 'medusa' else ''} Medusa heads", ""
    before = "By draftsmith, before the export, with trees where a row says so"
    where = f"{before}; vLLM verifies chains, SGLang chains or trees."
    if isinstance(source.drafter, Eagle):
        what = f"an EAGLE-{source.drafter.config.version} drafter"
        limit = f" and {source.drafter.config.max_position_embeddings:,} positions"
    if to == "openvino":
        where = f"{before}. In OpenVINO keep to chains."
    elif method == "medusa":
        where = f"{before}; vLLM verifies one draft of each head."
    made, origin = "Trained and exported by draftsmith", facts.get("imported_from")
    if origin:
        made = f"Imported by draftsmith from `{origin}`, which was published elsewhere, and exported again"
    trained_by = ""
    if known := {name: facts[name] for name in TRAINING if facts.get("data") and name in facts}:
        trained_by = f"""
## Training

{table_of(known)}
"""
    served = served_name(source.target_name, source.fingerprint, served_target)
    if to in ("speculators", "medusa") and Path(served).is_absolute():
        field = "speculators_config.verifier.name_or_path" if to == "speculators" else "base_model_name_or_path"
        template += f"""

`{field}` in `config.json` is a folder of the machine that exported this: elsewhere put there what the
server loads {whose.argument} by."""
    return f"""{whose.front_matter(licence, method)}
# {name}: {what.strip()} for {whose.name}, for {server}

{made}, for `{whose.name}` alone{limit}.{whose.about}
With this folder's path or Hub id in place of DRAFTER:

```bash
{commands}
```{template}

Logits computed from these files were compared with the drafter's own; `provenance.json` has the largest difference.

{whose.licensed(licence)}
{trained_by}
## Measured

{where}

{measured(source.folder)}

{NO_SERVER}
"""


def publish(name: str, repository: str, private: bool) -> None:
    """Upload a run's folder with its calibrated tree, and the card with what was measured since training.
    Raises FileNotFoundError, ValueError: it is no drafter's folder here, or not calibrated; or the Hub refuses.
    OSError: the card cannot be written."""
    if local_folder(name) is None:
        raise ValueError(f"{name}: --to hf uploads a folder of this machine")
    folder, _, _ = read_drafter(name)
    tree = folder / "tree.json"
    if not tree.exists() or "calibration" not in json_object(tree):
        raise ValueError(
            f"{folder}: its tree is not calibrated; first: python inference/calibrate.py {shlex.quote(str(folder))}"
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
    stored["target"]["merged_fingerprint"] = stored_fingerprint(out)
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
    tokens = args.speculative_tokens or fastest_chain(source.folder)
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
            print(
                f"its config.json names the target by {served}, a folder of this machine; for others: --served-target"
            )
    drafter = source.drafter
    everything = drafter.config.version == 1 if isinstance(drafter, Eagle) else True
    if everything and drafter.draft_vocab is not None:
        print("a draft vocabulary has no place there: servers draft from all tokens, by the target's own LM head")
    if args.push_to_hub:
        print(f"uploading to {args.push_to_hub} …")
        print(push(args.out, args.push_to_hub, args.private))


if __name__ == "__main__":
    run_command(main)
