"""Logits of an exported folder, from its files alone by the names of its format, and how far they are from the
drafter's own. What servers compute from config.json and the tensors is written down here a second time, without the
drafters' modules, so that a wrong name, transpose, order or field shows.

Shape letters: T positions, K tokens of a draft, C captured layers, d hidden width, D head width, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.common.files import json_object
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving.layouts import PUBLISHED_MEDUSA
from draftsmith.models.target import Target

TOLERANCE = 1e-4  # of logits in float32, times the largest one
_LENGTH, _STEPS = 12, 3  # T and K of the comparison


def _rotary(fields: Mapping[str, Any]) -> LlamaRotaryEmbedding:
    """Rotary positions of a written Llama config."""
    older, newer = (
        LlamaRotaryEmbedding(LlamaConfig(**{name: value for name, value in fields.items() if name not in left_out}))
        for left_out in (("rope_parameters",), ("rope_theta", "rope_scaling"))
    )
    same = torch.equal(cast(Tensor, older.inv_freq), cast(Tensor, newer.inv_freq))
    if not same or older.attention_scaling != newer.attention_scaling:
        raise ValueError("config.json: rope_theta and rope_scaling say other rotary positions than rope_parameters")
    return newer


@torch.no_grad()
def read_back(folder: Path, features: Tensor, tokens: Tensor, embed: nn.Module, lm_head: nn.Module | None) -> Tensor:
    """Logits of a written folder.
    ``features``: ``[T, C·d]``, inputs of the captured layers; of EAGLE-1 ``[T, d]``, the last hidden state.
    ``tokens``: ``[T + K]`` int64; position t is paired with token t + 1.
    ``embed``, ``lm_head``: the target's, for a folder that shares them.
    Returns ``[T + K − 1, V]`` float32: of every position, then of the K − 1 further tokens of a draft that continues
    with the given tokens; −inf for tokens that are not drafted.
    Raises ValueError: fields or tensors contradict each other."""
    config = json_object(folder / "config.json")
    fields = config.get("transformer_layer_config", config)
    llama, rotary = LlamaConfig(**fields), _rotary(fields)
    w = {name: t.float() if t.is_floating_point() else t for name, t in load_file(folder / "model.safetensors").items()}
    layer = "midlayer." if "midlayer.mlp.up_proj.weight" in w else "layers.0."
    v3, width, heads = "norm.weight" in w, cast(int, llama.head_dim), llama.num_attention_heads
    keys, values = torch.empty(0, heads, width), torch.empty(0, heads, width)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + llama.rms_norm_eps).rsqrt() * w[f"{name}.weight"]

    def apply(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{layer}{name}.weight"], w.get(f"{layer}{name}.bias"))

    def turn(x: Tensor, start: int) -> Tensor:  # [N, heads, D]
        cos, sin = rotary(x, torch.arange(start, start + len(x))[None])
        left, right = x.split(width // 2, -1)
        return x * cos[0, :, None] + torch.cat((-right, left), -1) * sin[0, :, None]

    def run(e: Tensor, g: Tensor) -> Tensor:  # the layer on N pairs that follow those before: [N, d] each
        nonlocal keys, values
        start, repeats = len(keys), heads // cast(int, llama.num_key_value_heads)
        if v3:
            normed = norm(g, f"{layer}hidden_norm")
            x = torch.cat((norm(e, f"{layer}input_layernorm"), normed), -1)
            residual = normed if config["norm_before_residual"] else g
        else:
            x = residual = F.linear(torch.cat((e, g), -1), w["fc.weight"], w.get("fc.bias"))
        q, k, v = (apply(f"self_attn.{n}_proj", x).unflatten(-1, (-1, width)) for n in "qkv")
        keys = torch.cat((keys, turn(k, start).repeat_interleave(repeats, 1)))
        values = torch.cat((values, v.repeat_interleave(repeats, 1)))
        scores = torch.einsum("nhd,mhd->hnm", turn(q, start), keys) * width**-0.5
        unseen = torch.ones(len(e), len(keys), dtype=torch.bool).triu(start + 1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out = residual + apply("self_attn.o_proj", torch.einsum("hnm,mhd->nhd", weights, values).flatten(1))
        x = norm(out, f"{layer}post_attention_layernorm")
        gate = cast(Tensor, ACT2FN[llama.hidden_act](apply("mlp.gate_proj", x)))
        return out + apply("mlp.down_proj", gate * apply("mlp.up_proj", x))

    e = w["embed_tokens.weight"][tokens] if "embed_tokens.weight" in w else embed(tokens).float()
    g, length = features, len(features)
    if v3:
        g = norm(g, "input_norm") if config.get("norm_before_fc") else g
        if config.get("fc_norm"):
            parts = enumerate(g.split(llama.hidden_size, -1))
            g = torch.cat([norm(part, f"fc_norm.{i}") for i, part in parts], -1)
        g = F.linear(g, w["fc.weight"])
    outs = [run(e[1 : length + 1], g)]
    for following in e[length + 1 :]:
        last = outs[-1][-1:]
        outs.append(run(following[None], norm(last, "norm") if config.get("norm_output") else last))
    out = torch.cat(outs)
    if not v3:
        assert lm_head is not None
        return _linear(lm_head, out)
    found = F.linear(norm(out, "norm"), w["lm_head.weight"])
    drafted = torch.arange(found.shape[-1]) + w.get("d2t", torch.tensor(0))
    if "t2d" in w and not torch.equal(w["t2d"].nonzero()[:, 0], drafted):
        raise ValueError("model.safetensors: t2d marks other tokens than d2t names")
    return torch.full((len(out), llama.vocab_size), float("-inf")).index_copy(1, drafted, found)


def _linear(head: nn.Module, x: Tensor) -> Tensor:
    """A linear layer of any floating-point dtype, in float32."""
    bias = cast("Tensor | None", head.bias)
    return F.linear(x, cast(Tensor, head.weight).float(), None if bias is None else bias.float())


@torch.no_grad()
def own_logits(eagle: Eagle, features: Tensor, tokens: Tensor, embed: nn.Module, lm_head: nn.Module | None) -> Tensor:
    """The drafter's own logits, as :func:`read_back` gives them. ``features [T, F]``: as :meth:`Eagle.fuse` takes."""
    length, steps = len(features), len(tokens) - len(features)
    padded = F.pad(features, (0, 0, 0, steps))  # as many as tokens; nothing before them sees these
    first, *later = (out[0, :length] for out in eagle.unroll(padded[None], embed, tokens[None], steps))
    out = torch.cat([first, *(each[-1:] for each in later)])
    found = _linear(eagle.draft_head(cast(nn.Module, lm_head)), out)
    logits = torch.full((len(out), eagle.config.vocab_size), float("-inf"))
    return logits.index_copy(1, eagle.tokens(torch.arange(eagle.config.outputs)), found)


@torch.no_grad()
def read_back_heads(folder: Path, hidden: Tensor) -> Tensor:
    """Logits ``[K, P, V]`` float32 of a written folder of Medusa heads, for hidden states ``[P, d]``."""
    config, published = json_object(folder / "config.json"), folder / PUBLISHED_MEDUSA
    w = load_file(published if published.exists() else folder / "model.safetensors")
    w = {name: tensor.float() for name, tensor in w.items()}
    logits = []
    for k in range(config["medusa_num_heads"] if published.exists() else config["num_heads"]):
        x, layer = hidden, 0
        while (name := f"{k}.{layer}.linear" if published.exists() else f"blocks.{k}.layers.{layer}") + ".bias" in w:
            x, layer = x + F.silu(F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])), layer + 1
        shared = 0 if config.get("original_lm_head") else k
        found = F.linear(x, w[f"{k}.{layer}.weight" if published.exists() else f"lm_heads.{shared}.weight"])
        logits.append(found)
    return torch.stack(logits)


@torch.no_grad()
def _heads_apart(folder: Path, heads: MedusaHeads, target: Target, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits of a written folder and of the heads."""
    c = heads.config
    hidden = torch.randn(_LENGTH, c.hidden_size, generator=random)
    written, own = read_back_heads(folder, hidden), []
    for features, (matrix, bias) in zip(heads.features(hidden), heads.projections(target.lm_head), strict=True):
        whole = torch.full((_LENGTH, c.vocab_size), float("-inf"))
        found = F.linear(features, matrix.float(), None if bias is None else bias.float())
        own.append(whole.index_copy(1, heads.tokens(torch.arange(c.outputs)), found))
    return written, torch.stack(own)


def difference(folder: Path, drafter: Eagle | MedusaHeads, target: Target | None) -> float:
    """Largest difference of a written folder's logits from the drafter's own, on random features and tokens.
    ``drafter``: in float32.
    ``target``: None for a folder that needs no weights of it: then its embeddings are random, too.
    Raises ValueError: it is larger than rounding explains, or other tokens are drafted."""
    random = torch.Generator().manual_seed(0)
    if isinstance(drafter, MedusaHeads):
        assert target is not None
        written, own = _heads_apart(folder, drafter, target, random)
    else:
        written, own = _eagle_apart(folder, drafter, target, random)
    if not isinstance(drafter, Eagle) or drafter.config.version == 1:  # no place for a draft vocabulary
        written = written.masked_fill(own.isinf(), float("-inf"))
    largest = float(own[own.isfinite()].abs().max())
    apart = float(torch.where(own == written, 0.0, (own - written).abs()).max())
    if not apart <= TOLERANCE * max(1.0, largest):  # NaN and infinity, too
        raise ValueError(
            f"the logits read back differ from the drafter's by {apart:.3g} (largest logit {largest:.3g}); nothing was "
            "written"
        )
    return apart


def _eagle_apart(folder: Path, eagle: Eagle, target: Target | None, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits of a written folder and of the drafter."""
    c = eagle.config
    d = c.hidden_size
    features = torch.randn(_LENGTH, d * (1 + len(c.captured_layers)), generator=random)
    if target is None:
        embed, lm_head = nn.Embedding.from_pretrained(torch.randn(_LENGTH + _STEPS, d, generator=random)), None
        tokens = torch.arange(_LENGTH + _STEPS)
    else:
        embed, lm_head = target.model.get_input_embeddings(), target.lm_head
        tokens = torch.randint(c.vocab_size, (_LENGTH + _STEPS,), generator=random)
    written = read_back(folder, features[:, d:] if c.version == 3 else features, tokens, embed, lm_head)
    return written, own_logits(eagle, features, tokens, embed, lm_head)
