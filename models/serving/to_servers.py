"""A drafter as a folder that a server loads: written by the names of layouts.py, and checked by reading it back.

Servers skip tensors and fields that they do not know and then draft with other weights, without a word. So what was
written is imported again: every name has to be one that is known there, every field and tensor has to be the drafter's.
Whether the layouts are the servers' own, tests/shared/exported_logits.py computes independently, and `make serve-check`
runs the servers.

Shape letters: N logits, d hidden width, V vocabulary, S draft vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.common.files import json_object, read_text, replacing_folder, write_json, write_text
from draftsmith.models.artifact import TEMPLATE, provenance
from draftsmith.models.card import served_name
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import SIZES, Eagle
from draftsmith.models.files.weights import save_tensors
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving import layouts
from draftsmith.models.serving.model_card import TOKENS, model_card
from draftsmith.models.serving.published import TargetInfo, in_our_form
from draftsmith.models.serving.source import ExportSource
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import head_rows

SPECULATORS = "0.9.0"  # version of the package that tests/speculators_package.py was run with
TOLERANCE = 1e-4  # of logits in float32, times the largest one
_POSITIONS, _STEPS = 12, 3  # of the comparison
Written = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, config.json


def _check_embeddings(eagle: Eagle, target: Target, to: str) -> None:
    """Raise a ValueError where a drafter reads other embeddings in a server than in training: some families scale them,
    and servers give the stored ones. EAGLE-3 takes their norm, which undoes a scale but for its epsilon."""
    c, embed = eagle.config, target.model.get_input_embeddings()
    some = torch.arange(min(64, c.vocab_size), device=target.device)
    read, given = embed(some).float(), cast(Tensor, embed.weight)[some].float()
    if c.version == 3:
        read, given = (F.rms_norm(each, (c.hidden_size,), eps=c.rms_norm_eps) for each in (read, given))
    allowed = 2**-8 if c.version == 3 else 0.0  # bfloat16's rounding
    if ((read - given).norm(dim=-1) > allowed * read.norm(dim=-1)).any():
        raise ValueError(
            f"target '{target.name}' scales its embeddings; {to} gives the stored ones to EAGLE-{c.version}, which "
            "then drafts worse; use --to speculators, which holds the embeddings of EAGLE-3"
        )


# ---- what is written


def _eagle(source: ExportSource, eagle: Eagle, to: str, served_target: str, speculative_tokens: int) -> Written:
    """An EAGLE drafter without embeddings, which servers but speculators share with the target; EAGLE-1 without an LM
    head, too. SGLang makes EAGLE-1's ``fc`` with a bias."""
    c, text = eagle.config, source.target_config.get_text_config()
    if source.target is not None and to != "speculators":
        _check_embeddings(eagle, source.target, to)
    architecture, layer = layouts.EAGLE[0 if c.parallel else c.version, to]
    layer = "layers.0." if c.num_layers > 1 else layer
    tensors = {n.replace("midlayer.", layer): w for n, w in source.weights.items() if n != "draft_vocab"}
    parallel: dict[str, Any] = {}
    if c.parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"][None, None]
        parallel = dict.fromkeys(layouts.MASK_TOKENS[: 1 if to == "speculators" else 2], c.mask_token_id)
    dtype = str(source.dtype).removeprefix("torch.")
    llama = {
        "model_type": "llama",
        "num_hidden_layers": c.num_layers,
        **{name: getattr(c, name) for name in SIZES},
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        **layouts.rope_fields(c.rope_parameters),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": getattr(text, "bos_token_id", None),
        "eos_token_id": getattr(text, "eos_token_id", None),
        **({layouts.LOOKAHEAD: c.parallel} if c.parallel else {}),
    }
    if c.version == 1:
        bias = tensors.pop("fc.bias", torch.zeros(c.hidden_size, dtype=source.dtype))
        tensors |= {"fc.bias": bias} if to == "sglang" else {}
        return tensors, {**llama, "architectures": [architecture]}
    ids = eagle.tokens(torch.arange(c.outputs)).long()
    if eagle.lm_head is None:
        tensors["lm_head.weight"] = source.rows(head_rows(source.loaded().lm_head, ids).weight)
    # With all of V vLLM and speculators have no place for the maps, and SGLang keeps the LM head as it is; OpenVINO's
    # converter writes what is in memory as a missing d2t.
    if c.outputs < c.vocab_size or to == "openvino":
        tensors |= layouts.maps_of(ids, c.vocab_size)
    if to != "speculators":
        own = {
            "architectures": [architecture],
            "draft_vocab_size": c.outputs,
            "norm_before_residual": c.norm_before_residual,
            "num_aux_hidden_states": len(c.captured_layers),
            **{name: True for name in layouts.NORMS if getattr(c, name)},
            "target_hidden_size": c.hidden_size,
            **parallel,
        }
        return tensors, {**llama, **own, **layouts.layer_fields(c.captured_layers, text.num_hidden_layers)}
    embed = source.loaded().model.get_input_embeddings()
    tensors["embed_tokens.weight"] = source.rows(embed(torch.arange(c.vocab_size, device=source.loaded().device)))
    config = {
        "architectures": [architecture],
        **_speculators(source, "peagle" if c.parallel else "eagle3", served_target, speculative_tokens),
        "draft_vocab_size": c.outputs,
        "target_hidden_size": c.hidden_size,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(c.captured_layers),
        "norm_before_residual": c.norm_before_residual,
        **{name: getattr(c, name) for name in layouts.NORMS},
        **parallel,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "transformer_layer_config": {"architectures": ["LlamaForCausalLM"], **llama},
    }
    return tensors, config


def _speculators(source: ExportSource, algorithm: str, served_target: str, tokens: int) -> dict[str, Any]:
    """The fields by which the package speculators, and vLLM for its folders, know a drafter and its target."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
    return {
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": served_target, "architectures": source.target_config.architectures or []},
        },
    }


def _dflash(source: ExportSource, dflash: DFlash, to: str, served_target: str) -> Written:
    """A DFlash drafter as z-lab or the package speculators publish them. Of a draft vocabulary the rows of the target's
    LM head are written, which vLLM reads; not for SGLang, which drafts from all tokens, nor does llama.cpp read them.
    Embeddings are the target's, which vLLM shares and speculators fetches."""
    c, target = dflash.config, source.loaded()
    drafted = c.draft_vocab_size if source.has_draft_vocab(to) else None
    some = torch.arange(min(64, c.vocab_size), device=target.device)
    if not torch.equal(target.embeddings(some), cast(Tensor, target.embeddings.weight)[some]):
        raise ValueError(f"target '{target.name}' scales its embeddings; servers give the stored ones to DFlash")
    tensors = {name: weight for name, weight in source.weights.items() if name != "draft_vocab"}
    if drafted:
        ids = dflash.tokens(torch.arange(c.outputs)).long()
        tensors["lm_head.weight"] = source.rows(head_rows(target.lm_head, ids).weight)
        tensors |= layouts.maps_of(ids, c.vocab_size)
    qwen = {
        "model_type": "qwen3",
        "num_hidden_layers": c.num_layers,
        **{name: getattr(c, name) for name in SIZES},
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        **layouts.rope_fields(c.rope_parameters),
        "attention_bias": False,
        "layer_types": ["full_attention"] * c.num_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(source.dtype).removeprefix("torch."),
    }
    if to == "speculators":
        if c.outputs == c.vocab_size:  # which that package else takes from the target's files
            tensors["lm_head.weight"] = source.rows(cast(Tensor, target.lm_head.weight))
        return tensors, {
            "architectures": ["DFlashDraftModel"],
            **_speculators(source, "dflash", served_target, c.num_draft_heads),
            "draft_vocab_size": c.outputs,
            "target_hidden_size": c.hidden_size,
            "block_size": c.block_size,
            layouts.ENTERED: list(c.captured_layers),
            "mask_token_id": c.mask_token_id,
            layouts.BOTH_WAYS: True,
            layouts.FROM_ANCHOR: False,
            "tie_word_embeddings": False,
            "torch_dtype": qwen["torch_dtype"],
            "transformer_layer_config": qwen,
        }
    config = {
        "architectures": ["DFlashDraftModel"],
        **qwen,
        **({"draft_vocab_size": drafted} if drafted else {}),
        "block_size": c.block_size,
        "num_target_layers": c.num_target_layers,
        "is_causal": False,
        "dflash_config": {
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in c.captured_layers],  # the layer that each state leaves
            "causal": False,
        },
    }
    return tensors, config


def medusa_tensors(heads: MedusaHeads, lm_head: nn.Module, to: str = "medusa") -> dict[str, Tensor]:
    """Heads by the names of a program: every head with a matrix ``[V, d]`` of its own, a copy of the target's LM head
    where heads share it; in vLLM one for all.
    Raises ValueError: an LM head with a bias."""
    c, layout, tensors = heads.config, layouts.MEDUSA[to], dict[str, Tensor]()
    if heads.projection is None and getattr(lm_head, "bias", None) is not None:
        raise ValueError("the target's LM head has a bias, for which the format has no place")
    for k in range(c.num_draft_heads):
        for layer in range(c.num_layers):  # ours: x @ weight + bias; nn.Linear: x @ weight.T + bias
            name = layout.block.format(head=k, layer=layer, kind="{}")
            tensors[name.format("weight")] = heads.weight[layer, k].detach().t().contiguous()
            tensors[name.format("bias")] = heads.bias[layer, k, 0].detach().clone()
        matrix = cast(nn.Linear, lm_head).weight if heads.projection is None else heads.projection[k]
        if k == 0 or heads.projection is not None or to != "vllm":
            tensors[layout.last.format(head=k, layers=c.num_layers)] = matrix.detach().clone()
    return tensors


def _medusa(source: ExportSource, heads: MedusaHeads, to: str, served_target: str) -> Written:
    """Medusa heads, with the rows of all tokens: vLLM up to 0.32 has a place for a draft vocabulary (``token_map``),
    but then refuses it as not initialised."""
    c, layout = heads.config, layouts.MEDUSA[to]
    tensors = medusa_tensors(heads, source.loaded().lm_head, to)
    numbers = {layout.heads: c.num_draft_heads, layout.layers: c.num_layers}
    if to == "medusa":
        config = {**numbers, "version": "2", "base_model_name_or_path": served_target}
    else:
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": c.hidden_size,
            "vocab_size": c.vocab_size,
            **numbers,
            "medusa_fc_bias": True,
            "original_lm_head": heads.projection is None,
            "truncated_vocab_size": c.vocab_size,
            "torch_dtype": str(source.dtype).removeprefix("torch."),
        }
    return {name: source.rows(tensor) for name, tensor in tensors.items()}, config


def written(source: ExportSource, to: str, served_target: str, speculative_tokens: int) -> Written:
    """Tensors and config.json of a format. Raises ValueError: it has no place for this drafter."""
    if isinstance(source.drafter, MedusaHeads):
        return _medusa(source, source.drafter, to, served_target)
    if isinstance(source.drafter, DFlash):
        return _dflash(source, source.drafter, to, served_target)
    return _eagle(source, source.drafter, to, served_target, speculative_tokens)


def export(
    source: ExportSource,
    to: str,
    out: Path,
    served_target: str | None = None,
    speculative_tokens: int = TOKENS,
    facts: Mapping[str, Any] | None = None,
) -> float:
    """Write a folder and read it back; all of it is kept, or nothing. Weights and other files that an earlier export
    left there, and that this one does not write, are removed: they would be read.
    ``to``: a program of :data:`layouts.EAGLE` or :data:`layouts.MEDUSA`.
    ``served_target``: what a server loads the target by; the source's name for it if left out.
    ``facts``: what provenance.json records besides.
    Returns the largest difference of logits, in float32.
    Raises ValueError: what was written is not the drafter. OSError: the disk is full, or it cannot be written."""
    served = served_name(source.target_name, source.fingerprint, served_target)
    tensors, config = written(source, to, served, speculative_tokens)
    file = layouts.PUBLISHED_MEDUSA if to == "medusa" else layouts.WEIGHTS
    with replacing_folder(out) as temporary:
        save_tensors(tensors, temporary / file)
        write_json(temporary / "config.json", config)
        apart = _read_back(temporary, file, source, to)
        made = {"target_fingerprint": source.fingerprint, **(facts or {})}
        write_json(temporary / "provenance.json", provenance(format=to, max_logit_difference=apart, **made))
        if (template := source.folder / TEMPLATE).exists():
            write_text(temporary / TEMPLATE, read_text(template, "chat template"))
        card = model_card(source, out.resolve().name, to, served_target, speculative_tokens)
        write_text(temporary / "README.md", card)
        kept = {path.name for path in temporary.iterdir()}
    for name in {layouts.WEIGHTS, layouts.PUBLISHED_MEDUSA, "serving.json", TEMPLATE} - kept:
        (out / name).unlink(missing_ok=True)
    return apart


# ---- the check of what was written


@torch.no_grad()
def _read_back(folder: Path, file: str, source: ExportSource, to: str) -> float:
    """Import a written folder, and compare its fields and its logits on random features with the drafter's; returns the
    largest difference of a logit.
    Raises ValueError: it cannot be imported, or it is another drafter."""
    drafter, target = source.drafter, source.target
    if target is not None:
        info, lm_head = TargetInfo.of(target), target.lm_head
    else:
        assert isinstance(drafter, Eagle)
        c, layers = drafter.config, source.target_config.get_text_config().num_hidden_layers
        none, lm_head = torch.empty(0, c.hidden_size), nn.Identity()  # it has an LM head of its own
        info = TargetInfo(c.hidden_size, c.vocab_size, layers, c.max_position_embeddings, none, none)
    imported = in_our_form(json_object(folder / "config.json"), load_file(folder / file), info)
    read = imported.drafter(str(folder))
    # The target's LM head may be written as the drafter's own, and a bias of zeros; some formats have no draft
    # vocabulary, rotary positions are written in several ways, and how many there are is the target's to say.
    free = {"projection", "draft_vocab_size", "fc_bias", "max_position_embeddings", "rope_parameters", "tie_k_norm"}
    found = read.config.to_dict()
    for name, value in drafter.config.to_dict().items():
        if name not in free and found[name] != value:
            raise ValueError(f"config.json: {name} is read back as {found[name]!r} instead of {value!r}")
    logits, own = (_logits(each, lm_head) for each in (read, drafter))
    if not source.has_draft_vocab(to):
        logits = logits.masked_fill(own.isinf(), float("-inf"))
    largest = float(own[own.isfinite()].abs().max())
    apart = float(torch.where(own == logits, 0.0, (own - logits).abs()).max())
    if not apart <= TOLERANCE * max(1.0, largest):  # NaN and infinity, too
        raise ValueError(
            f"the logits read back differ from the drafter's by {apart:.3g} (largest logit {largest:.3g}); nothing was "
            "written"
        )
    return apart


def _logits(drafter: Eagle | MedusaHeads | DFlash, lm_head: nn.Module) -> Tensor:
    """A drafter's logits ``[N, V]`` in float32 on random features and, for EAGLE, embeddings, at each position and for
    further tokens of a draft; −inf for tokens that are not drafted."""
    c, random = drafter.config, torch.Generator().manual_seed(0)
    if isinstance(drafter, MedusaHeads):
        outs = list(drafter.features(torch.randn(_POSITIONS, c.hidden_size, generator=random)))
        heads = drafter.projections(lm_head)
    else:
        captured = len(drafter.config.captured_layers)
        features = torch.randn(1, _POSITIONS, c.hidden_size * (1 + captured), generator=random)
        table = torch.randn(_POSITIONS, c.hidden_size, generator=random)
        embed = cast(nn.Module, lambda ids: table[ids % len(table)])  # for any ids
        tokens = torch.arange(_POSITIONS)[None]
        if isinstance(drafter, DFlash):
            outs = list(drafter.draft(features, embed, tokens, torch.arange(1, _POSITIONS)[None])[0])
        else:
            outs = [out[0] for out in drafter.unroll(features, embed, tokens, _STEPS)]
        head = cast(nn.Linear, drafter.draft_head(lm_head))
        heads = [(head.weight, head.bias)] * len(outs)
    found = [F.linear(x, w.float(), None if b is None else b.float()) for x, (w, b) in zip(outs, heads, strict=True)]
    logits = torch.full((sum(map(len, found)), c.vocab_size), float("-inf"))
    return logits.index_copy(1, drafter.tokens(torch.arange(c.outputs)), torch.cat(found))
