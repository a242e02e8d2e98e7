"""Logits of an exported or published folder, computed from its files alone by the names of its format, without the
drafters' modules: an independent computation, in which a wrong name, transpose, order or field shows.

Shape letters: T positions, K tokens of a draft, C captured layers, d hidden width, D head width, V vocabulary.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target

_LENGTH, _STEPS = 12, 3  # T and K of the comparison


@torch.no_grad()
def read_back(folder: Path, features: Tensor, tokens: Tensor, embed: nn.Module, lm_head: nn.Module | None) -> Tensor:
    """Logits of an EAGLE drafter's folder.
    ``features``: ``[T, C·d]``, inputs of the captured layers; of EAGLE-1 ``[T, d]``, the last hidden state.
    ``tokens``: ``[T + K]`` int64; position t is paired with token t + 1.
    ``embed``, ``lm_head``: the target's, for a folder that shares them.
    Returns ``[T + K − 1, V]`` float32: of every position, then of the K − 1 further tokens of a draft that continues
    with the given tokens, of P-EAGLE with its mask pair; −inf for tokens that are not drafted."""
    config = json.loads((folder / "config.json").read_text())
    llama = LlamaConfig(**config.get("transformer_layer_config", config))
    rotary = LlamaRotaryEmbedding(llama)
    w = {name: t.float() if t.is_floating_point() else t for name, t in load_file(folder / "model.safetensors").items()}
    first = "midlayer." if "midlayer.mlp.up_proj.weight" in w else "layers.0."
    further = [name.removesuffix("mlp.up_proj.weight") for name in w if name.endswith("mlp.up_proj.weight")]
    further = sorted(each for each in further if each != first)
    v3, width, heads = "norm.weight" in w, llama.head_dim, llama.num_attention_heads
    kept = {each: (torch.empty(0, heads, width),) * 2 for each in (first, *further)}

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + llama.rms_norm_eps).rsqrt() * w[f"{name}.weight"]

    def apply(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def turn(x: Tensor, start: int) -> Tensor:  # [N, heads, D]
        cos, sin = rotary(x, torch.arange(start, start + len(x))[None])
        left, right = x.split(width // 2, -1)
        return x * cos[0, :, None] + torch.cat((-right, left), -1) * sin[0, :, None]

    def run(e: Tensor, g: Tensor) -> Tensor:  # the layers on N pairs that follow those before: [N, d] each
        if v3:
            normed = norm(g, f"{first}hidden_norm")
            x = torch.cat((norm(e, f"{first}input_layernorm"), normed), -1)
            out = run_layer(first, x, normed if config["norm_before_residual"] else g)
        else:
            x = F.linear(torch.cat((e, g), -1), w["fc.weight"], w.get("fc.bias"))
            out = run_layer(first, x, x)
        for layer in further:
            out = run_layer(layer, norm(out, f"{layer}input_layernorm"), out)
        return out

    def run_layer(layer: str, x: Tensor, residual: Tensor) -> Tensor:
        keys, values = kept[layer]
        start, repeats = len(keys), heads // llama.num_key_value_heads
        q, k, v = (apply(f"{layer}self_attn.{n}_proj", x).unflatten(-1, (-1, width)) for n in "qkv")
        keys = torch.cat((keys, turn(k, start).repeat_interleave(repeats, 1)))
        values = torch.cat((values, v.repeat_interleave(repeats, 1)))
        kept[layer] = keys, values
        scores = torch.einsum("nhd,mhd->hnm", turn(q, start), keys) * width**-0.5
        unseen = torch.ones(len(x), len(keys), dtype=torch.bool).triu(start + 1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        out = residual + apply(f"{layer}self_attn.o_proj", torch.einsum("hnm,mhd->nhd", weights, values).flatten(1))
        x, mlp = norm(out, f"{layer}post_attention_layernorm"), f"{layer}mlp."
        return out + apply(
            f"{mlp}down_proj", ACT2FN[llama.hidden_act](apply(f"{mlp}gate_proj", x)) * apply(f"{mlp}up_proj", x)
        )

    def fuse(g: Tensor) -> Tensor:
        g = norm(g, "input_norm") if config.get("norm_before_fc") else g
        if config.get("fc_norm"):
            parts = enumerate(g.split(llama.hidden_size, -1))
            g = torch.cat([norm(part, f"fc_norm.{i}") for i, part in parts], -1)
        return F.linear(g, w["fc.weight"])

    def embedded(ids: Tensor) -> Tensor:
        return w["embed_tokens.weight"][ids] if "embed_tokens.weight" in w else embed(ids).float()

    e, length = embedded(tokens), len(features)
    outs = [run(e[1 : length + 1], fuse(features) if v3 else features)]
    for following in e[length + 1 :]:
        if "mask_hidden" in w:
            mask = torch.tensor([config["mask_token_id"]])
            outs.append(run(embedded(mask), fuse(w["mask_hidden"].view(1, -1))))
            continue
        last = outs[-1][-1:]
        outs.append(run(following[None], norm(last, "norm") if config.get("norm_output") else last))
    out = torch.cat(outs)
    if not v3:
        return _linear(lm_head, out)
    found = F.linear(norm(out, "norm"), w["lm_head.weight"])
    drafted = torch.arange(found.shape[-1]) + w.get("d2t", torch.tensor(0))
    assert "t2d" not in w or torch.equal(w["t2d"].nonzero()[:, 0], drafted), "t2d marks other tokens than d2t names"
    return torch.full((len(out), llama.vocab_size), float("-inf")).index_copy(1, drafted, found)


@torch.no_grad()
def read_back_heads(folder: Path, hidden: Tensor) -> Tensor:
    """Logits ``[K, P, V]`` float32 of a folder of Medusa heads, for hidden states ``[P, d]``."""
    config, (file,) = json.loads((folder / "config.json").read_text()), folder.glob("*.safetensors")
    w = {name: tensor.float() for name, tensor in load_file(file).items()}
    published, logits = "medusa_num_heads" in config, []
    for k in range(config["medusa_num_heads" if published else "num_heads"]):
        x, layer = hidden, 0
        while (name := f"{k}.{layer}.linear" if published else f"blocks.{k}.layers.{layer}") + ".bias" in w:
            x, layer = x + F.silu(F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])), layer + 1
        shared = 0 if config.get("original_lm_head") else k
        logits.append(F.linear(x, w[f"{k}.{layer}.weight" if published else f"lm_heads.{shared}.weight"]))
    return torch.stack(logits)


@torch.no_grad()
def read_back_block(folder: Path, features: Tensor, anchor: Tensor, embed: nn.Module, lm_head: nn.Module) -> Tensor:
    """Logits ``[S − 1, V]`` of a DFlash drafter's folder: of the block of S slots behind ``features [T, C·d]``, which
    are those of the layers that it names. ``anchor``: its first token, ``[1]``."""
    config = json.loads((folder / "config.json").read_text())
    given = config.get("dflash_config", config)  # of speculators, or of z-lab
    qwen = Qwen3Config(**config.get("transformer_layer_config", config))
    w = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
    rotary, width = Qwen3RotaryEmbedding(qwen), qwen.head_dim
    layers = given.get("target_layer_ids") or [entered - 1 for entered in given["aux_hidden_state_layer_ids"]]
    assert features.shape[1] == len(layers) * qwen.hidden_size and set(qwen.layer_types) == {"full_attention"}
    assert not (given.get("causal") or config.get("is_causal") or config.get("sample_from_anchor"))
    ids = torch.cat((anchor, torch.full((config["block_size"] - 1,), given["mask_token_id"])))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], qwen.rms_norm_eps)

    def split(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"]).unflatten(-1, (-1, width)).transpose(0, 1)  # [heads, N, D]

    def turn(x: Tensor) -> Tensor:  # the last places
        cos, sin = (each[0, -x.shape[1] :] for each in rotary(x, torch.arange(len(features) + len(ids))[None]))
        left, right = x.split(width // 2, -1)
        return x * cos + torch.cat((-right, left), -1) * sin

    context, x = norm(F.linear(features, w["fc.weight"]), "hidden_norm"), embed(ids).float()
    for number in range(qwen.num_hidden_layers):
        layer = f"layers.{number}."
        own, mlp = f"{layer}self_attn.", f"{layer}mlp."
        y = norm(x, f"{layer}input_layernorm")
        read = torch.cat((context, y))
        q, k, v = split(y, f"{own}q_proj"), split(read, f"{own}k_proj"), split(read, f"{own}v_proj")
        q, k = turn(norm(q, f"{own}q_norm")), turn(norm(k, f"{own}k_norm"))
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0]
        x = x + F.linear(seen.transpose(0, 1).flatten(1), w[f"{own}o_proj.weight"])
        y = norm(x, f"{layer}post_attention_layernorm")
        gated = F.silu(F.linear(y, w[f"{mlp}gate_proj.weight"])) * F.linear(y, w[f"{mlp}up_proj.weight"])
        x = x + F.linear(gated, w[f"{mlp}down_proj.weight"])
    out = norm(x, "norm")[1:]
    if "lm_head.weight" not in w:
        return _linear(lm_head, out)
    found = F.linear(out, w["lm_head.weight"])
    drafted = torch.arange(found.shape[-1]) + w.get("d2t", torch.tensor(0)).long()
    return torch.full((len(out), qwen.vocab_size), float("-inf")).index_copy(1, drafted, found)


def _linear(head: nn.Module, x: Tensor) -> Tensor:
    """A linear layer of any floating-point dtype, in float32."""
    return F.linear(x, head.weight.float(), None if head.bias is None else head.bias.float())


@torch.no_grad()
def own_logits(eagle: Eagle, features: Tensor, tokens: Tensor, embed: nn.Module, lm_head: nn.Module | None) -> Tensor:
    """The drafter's own logits, as :func:`read_back` gives them. ``features [T, F]``: as :meth:`Eagle.fuse` takes."""
    length, steps = len(features), len(tokens) - len(features)
    padded = F.pad(features, (0, 0, 0, steps))  # as many as tokens; nothing before them sees these
    first, *later = (out[0, :length] for out in eagle.unroll(padded[None], embed, tokens[None], steps))
    out = torch.cat([first, *(each[-1:] for each in later)])
    logits = torch.full((len(out), eagle.config.vocab_size), float("-inf"))
    return logits.index_copy(
        1, eagle.tokens(torch.arange(eagle.config.outputs)), _linear(eagle.draft_head(lm_head), out)
    )


@torch.no_grad()
def difference(folder: Path, drafter: Eagle | MedusaHeads | DFlash, target: Target) -> float:
    """Largest difference of a folder's logits from the drafter's own (in float32), as a multiple of the largest logit,
    on random features and tokens; infinite if other tokens are drafted."""
    random, c = torch.Generator().manual_seed(0), drafter.config
    if isinstance(drafter, MedusaHeads):
        hidden = torch.randn(_LENGTH, c.hidden_size, generator=random)
        written = read_back_heads(folder, hidden)
        own = torch.full_like(written, float("-inf"))
        for k, (weight, _) in enumerate(drafter.projections(target.lm_head)):
            logits = F.linear(drafter.features(hidden)[k], weight.float())
            own[k].index_copy_(1, drafter.tokens(torch.arange(c.outputs)), logits)
    elif isinstance(drafter, DFlash):
        features = torch.randn(_LENGTH, c.hidden_size * (1 + len(c.captured_layers)), generator=random)
        tokens, anchor = torch.randint(c.vocab_size, (1, _LENGTH), generator=random), torch.tensor([[_LENGTH - 1]])
        embed, head = target.model.get_input_embeddings(), target.lm_head
        written = read_back_block(folder, features[:-1, c.hidden_size :], tokens[0, -1:], embed, head)
        out = _linear(drafter.draft_head(head), drafter.draft(features[None], embed, tokens, anchor)[0, 0])
        places = drafter.tokens(torch.arange(c.outputs))
        own = torch.full_like(written, float("-inf")).index_copy(1, places, out)
    else:
        features = torch.randn(_LENGTH, c.hidden_size * (1 + len(c.captured_layers)), generator=random)
        tokens = torch.randint(c.vocab_size, (_LENGTH + _STEPS,), generator=random)
        given = target.model.get_input_embeddings(), target.lm_head
        written = read_back(folder, features[:, c.hidden_size :] if c.version == 3 else features, tokens, *given)
        own = own_logits(drafter, features, tokens, *given)
    if isinstance(drafter, MedusaHeads) or getattr(c, "version", 0) == 1:  # no place for a draft vocabulary
        written = written.masked_fill(own.isinf(), float("-inf"))
    apart = torch.where(own == written, 0.0, (own - written).abs()).max()
    return float(apart / own[own.isfinite()].abs().max())
