"""The model card of an exported folder, with the commands that serve it."""

import json
from pathlib import Path

from draftsmith.common.files import json_object, object_or_empty
from draftsmith.models.artifact import TEMPLATE
from draftsmith.models.card import TRAINING, is_hub_id, measured, named, served_name, table_of
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving.source import ExportSource

TOKENS = 3  # of a draft in speculators' config and in the card's commands, where calibration found no best chain
NO_SERVER = "No server has run this folder."  # the card's last line, until `make serve-check` has


def fastest_chain(source: ExportSource) -> int:
    """Tokens of the fastest chain that a drafter's calibration timed or estimated; if its tree does not say,
    :data:`TOKENS`, of P-EAGLE all that it drafts in a pass."""
    sizes = object_or_empty(source.folder / "tree.json").get("calibration", {}).get("sizes") or []
    chains = [size for size in sizes if size.get("depth") == size["nodes"] - 1]
    if not chains:
        return getattr(source.drafter.config, "parallel", 0) or TOKENS
    return max(chains, key=lambda size: size["speedup"])["depth"]


def _commands(source: ExportSource, to: str, target: str, tokens: int) -> tuple[str, str, str]:
    """What serves an exported folder, the name of the speculative method, and the commands, with DRAFTER for the
    folder."""
    parallel: dict[str, bool] = {}
    if isinstance(source.drafter, MedusaHeads | DFlash):
        method = "medusa" if isinstance(source.drafter, MedusaHeads) else "dflash"
        tokens, version = source.drafter.config.num_draft_heads, 0
    else:
        version = source.drafter.config.version
        method = "eagle3" if version == 3 else "eagle"
        parallel = {"parallel_drafting": True} if source.drafter.config.parallel else {}
    options = json.dumps({"method": method, "model": "DRAFTER", "num_speculative_tokens": tokens} | parallel)
    at = f" --revision {source.revision}" if source.revision and target == source.target_name else ""
    vllm = f"vllm serve {target}{at} --speculative-config '{options}'"
    if isinstance(source.drafter, MedusaHeads):
        if to == "vllm":
            return "vLLM up to 0.32", method, vllm
        files = f"# {tokens} heads in the layout of FasterDecoding/Medusa, as safetensors; to decode with them here:\n"
        files += f'python -m draftsmith.inference.decode DRAFTER --target {target} --prompt "What is a prime number?"'
        return "programs that read the published layout from safetensors", method, files
    if to == "speculators":
        return "vLLM and the package speculators", method, "vllm serve DRAFTER"
    if isinstance(source.drafter, DFlash):
        slots = source.drafter.config.block_size
        vllm += f"\npython -m sglang.launch_server --model-path {target}{at} --speculative-algorithm DFLASH \\\n"
        vllm += f"    --speculative-draft-model-path DRAFTER --speculative-num-draft-tokens {slots}"
        if source.drafter.draft_vocab is not None and source.has_draft_vocab(to):
            return "vLLM and SGLang", method, vllm
        # llama.cpp's converter knows no draft vocabulary.
        stored = "target" if is_hub_id(target) else target  # the converter reads folders
        vllm += f"\nhf download {target}{at} --local-dir target" if stored != target else ""
        vllm += f"\npython convert_hf_to_gguf.py DRAFTER --target-model-dir {stored} --outfile drafter.gguf"
        vllm += f"\npython convert_hf_to_gguf.py {stored} --outfile target.gguf"
        vllm += (
            f"\nllama-server -m target.gguf -md drafter.gguf --spec-type draft-dflash --spec-draft-n-max {slots - 1}"
        )
        return "vLLM, SGLang and llama.cpp", method, vllm
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
python -m sglang.launch_server --model-path {target}{at} --speculative-algorithm EAGLE{"3" if version == 3 else ""} \\
    --speculative-draft-model-path DRAFTER --speculative-num-steps {steps} --speculative-eagle-topk {top_k} \\
    --speculative-num-draft-tokens {nodes}"""

    commands = sglang(tokens, 1, tokens + 1)
    shape = object_or_empty(source.folder / "tree.json").get("dynamic")
    if isinstance(shape, dict) and shape.keys() == {"top_k", "depth", "nodes"}:
        dynamic = sglang(shape["depth"], shape["top_k"], shape["nodes"])
        commands += f"\n# or the dynamic tree that was calibrated:{dynamic}"
    if parallel or source.drafter.config.num_layers > 1:
        return "vLLM", method, vllm
    if version == 1:
        return ("SGLang", method, commands.lstrip()) if to == "sglang" else ("vLLM", method, vllm)
    if source.drafter.config.norm_before_residual:
        return "vLLM", method, f"{vllm}\n# not SGLang, which leaves out norm_before_residual and so drafts otherwise"
    return "vLLM and SGLang", method, vllm + commands


def model_card(source: ExportSource, name: str, to: str, served_target: str | None, tokens: int) -> str:
    """The model card, with the commands that serve the drafter."""
    trained = source.folder / "provenance.json"
    family = source.target_config.model_type
    whose = named(source.target_name, source.fingerprint, family, served_target, source.revision)
    facts = json_object(trained) if trained.exists() else {}
    licence = facts.get("licence")
    server, method, commands = _commands(source, to, whose.argument, tokens)
    template = ""
    if (source.folder / TEMPLATE).exists():
        template = f"""

It was trained with the chat template of `{TEMPLATE}`, which is not the target's own: serve it with
`--chat-template {TEMPLATE}`."""
    where = "By draftsmith, before the export, with trees where a row says so"
    if isinstance(source.drafter, Eagle):
        one_pass = source.drafter.config.parallel > 0
        what = "a P-EAGLE drafter" if one_pass else f"an EAGLE-{source.drafter.config.version} drafter"
        limit = f" and {source.drafter.config.max_position_embeddings:,} positions"
        chains = one_pass or source.drafter.config.num_layers > 1  # in vLLM alone
        verified = "; servers verify chains." if chains else "; vLLM verifies chains, SGLang chains or trees."
        where += ". In OpenVINO keep to chains." if to == "openvino" else verified
    elif isinstance(source.drafter, DFlash):
        what = "a DFlash drafter"
        limit = f" and {source.drafter.config.max_position_embeddings:,} positions"
        where += "; servers verify chains."
    else:
        what, limit = f"{source.drafter.config.num_draft_heads} Medusa heads", ""
        where += "; vLLM verifies one draft of each head."
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

`{field}` in `config.json` is a path of the machine that exported this: elsewhere put there what the
server loads {whose.argument} by."""
    return f"""{whose.front_matter(licence, method, bool(origin))}
# {name}: {what} for {whose.name}, for {server}

{made}, for `{whose.name}` alone{limit}.{whose.about}
With this folder's path or Hub id in place of DRAFTER:

```bash
{commands}
```{template}

Logits computed from these files were compared with the drafter's own; `provenance.json` has the largest difference.

{whose.licensed(licence, bool(origin))}
{trained_by}
## Measured

{where}

{measured(source.folder)}

{NO_SERVER}
"""
