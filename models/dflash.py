"""DFlash drafters: a few layers draft a whole block of tokens in one pass (arXiv 2602.06036).

    c_t = norm(fc(cat of the inputs of C of the target's layers)), the context feature of token t; all layers share it
    block at position p: x_p, the anchor, and S − 1 mask tokens at p + 1 … p + S − 1; embeddings are the target's
    layer: queries of the block; keys and values of every c_t with t < p, and of the block, by the same matrices
    logits of slot k: the target's LM head on norm(output of slot k), for the token at p + k, k = 1 … S − 1

The anchor is the newest token of the text, which the target has not run, so that there is no feature of it. Inside the
block every slot sees every other one. The layers have Qwen3's form: norms of each head's queries and keys before they
are rotated, an MLP gated by SiLU, no biases. The context features do not pass a layer's input norm.

The slots do not know each other's tokens: given the context, what a slot says is the same whatever the others become.

Names of parameters are those of the published folders. With tied key norms (``tie_k_norm``) the layers share one norm
of the keys: vLLM's CPU backend norms the context keys of all layers with the first layer's weights.

Shape letters: B batch, T tokens, P anchors, S slots of a block, K = S − 1 drafts, C captured layers, F features per
token, d hidden width, H query heads, G key/value heads, R = H / G, D head width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from draftsmith.models.artifact import with_weights
from draftsmith.models.eagle import check_captured, check_sizes, layers_to_capture, llama_config, sizes_for
from draftsmith.models.target import Target
from draftsmith.models.unrolled import Keys, block_mask, dense_mask, rotate, takes_blocks, unrolled_attention
from draftsmith.models.vocabulary import WithDraftVocabulary, check_size, check_whole

MOST_SLOTS = 64  # of a block


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a DFlash drafter.

    block_size: S, the anchor included.
    mask_token_id: the token that stands in the slots behind the anchor.
    captured_layers: layers of the target whose inputs it reads.
    num_target_layers: of the target; published folders name it.
    tie_k_norm: all layers share one norm of the keys.
    """

    block_size: int
    num_layers: int
    mask_token_id: int
    captured_layers: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    rms_norm_eps: float = 1e-6
    tie_k_norm: bool = True
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "captured_layers", tuple(self.captured_layers))
        check_sizes(self)
        check_whole(self, ("block_size", "num_layers", "num_target_layers"))
        if not 2 <= self.block_size <= MOST_SLOTS:
            raise ValueError(f"field 'block_size' is {self.block_size}; it has to be from 2 to {MOST_SLOTS}")
        mask = self.mask_token_id
        if type(mask) is not int or not 0 <= mask < self.vocab_size:
            raise ValueError(f"field 'mask_token_id' is {mask!r}; it has to be an id from 0 to {self.vocab_size - 1}")
        if not self.captured_layers:
            raise ValueError("field 'captured_layers' is empty; the drafter reads one layer at least")
        check_captured(self.captured_layers, self.num_target_layers)
        check_size(self.draft_vocab_size, self.vocab_size)

    @classmethod
    def for_target(
        cls,
        config: Any,
        vocab_size: int,
        context: int,
        *,
        captured_layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        **shape: Any,
    ) -> "DFlashConfig":
        """The config that fits a target; arguments as those of :meth:`EagleConfig.for_target`.
        ``shape``: the other fields that no target determines: block_size, num_layers, mask_token_id, …."""
        count = config.num_hidden_layers
        layers = tuple(captured_layers or layers_to_capture(count))
        sizes = sizes_for(config, vocab_size, context, intermediate_size)
        return cls(captured_layers=layers, num_target_layers=count, **shape, **sizes)

    @property
    def outputs(self) -> int:
        """The number of tokens that it chooses from."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_draft_heads(self) -> int:
        """K: the drafts of a block, which are as independent as those of Medusa heads."""
        return self.block_size - 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"captured_layers": list(self.captured_layers)}


class _Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        d, width, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.q_proj = nn.Linear(d, config.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * width, d, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, T, heads · D] → [B, heads, T, D]``, in the dtype of the norms."""
        return x.to(dtype).unflatten(-1, (-1, self.q_norm.normalized_shape[0])).transpose(1, 2)

    def queries(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotated queries ``[B, H, T, D]`` of ``x [B, T, d]``."""
        return rotate(self.q_norm(self.split(self.q_proj(x), x.dtype)), *rotation)

    def keys(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Keys:
        """Rotated keys, and values, ``[B, G, T, D]`` each, of context features or of a block ``[B, T, d]``."""
        keys = self.k_norm(self.split(self.k_proj(x), x.dtype))
        return rotate(keys, *rotation), self.split(self.v_proj(x), x.dtype)


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.self_attn = nn.RMSNorm(d, eps), _Attention(config)
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(d, eps), LlamaMLP(llama_config(config))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], context: Keys, mask: Any, slots: int) -> Tensor:
        """The layer's output for P blocks ``[B, P · S, d]``, S = ``slots``, of which each sees its own slots and the
        context by the mask."""
        attention, blocks = self.self_attn, x.shape[1] // slots
        normed = self.input_layernorm(x)
        q, own = attention.queries(normed, rotation), attention.keys(normed, rotation)
        # All slots of a block see the same keys: they are further heads of one query for each block, whose keys in the
        # context the mask says, and which has S keys of its own.
        queries = q.unflatten(2, (blocks, slots)).transpose(2, 3).flatten(1, 2)  # [B, H · S, P, D]
        by_slot = [part.unflatten(2, (blocks, slots)).unbind(3) for part in own]  # [B, G, P, D] each
        attended = unrolled_attention(queries, context, [*zip(*by_slot, strict=True)], mask)
        attended = attended.unflatten(1, (-1, slots)).permute(0, 3, 2, 1, 4).flatten(3)  # [B, P, S, H · D]
        out = x + attention.o_proj(attended.flatten(1, 2)).to(x.dtype)
        return out + self.mlp(self.post_attention_layernorm(out)).to(x.dtype)


class DFlash(WithDraftVocabulary):
    """A DFlash drafter, without the target's embeddings and LM head."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.config = config
        self.flex = True  # FlexAttention in training, where it runs
        self.recompute = False  # each layer's activations in the backward pass, instead of keeping them
        d, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.captured_layers) * d, d, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(d, eps), nn.RMSNorm(d, eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        if config.tie_k_norm:
            for layer in self.attentions:
                layer.k_norm = self.attentions[0].k_norm
        with torch.device("cpu"):  # frequencies are computed, also where the weights are on the meta device
            self.rotary = LlamaRotaryEmbedding(llama_config(config))  # no parameters, nothing in the state dict

    @property
    def attentions(self) -> list[_Attention]:
        """The attention of each layer."""
        return [cast(_Layer, layer).self_attn for layer in self.layers]

    @classmethod
    def for_target(cls, target: Target, **shape: Any) -> "DFlash":
        """An untrained drafter for a target. A draft vocabulary is the first ids, until :meth:`draft_from` is called.
        ``shape``: the arguments of :meth:`DFlashConfig.for_target` from ``block_size`` on.
        Raises ValueError: the target has no such layers or mask token."""
        made = DFlashConfig.for_target(target.config, target.vocab_size, target.context, **shape)
        dflash = cls(made).to(target.device)
        nn.init.constant_(dflash.norm.weight, target.hidden_scale())  # as EAGLE's
        return dflash

    @classmethod
    def from_artifact(cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], where: str) -> "DFlash":
        """A drafter from its folder's config and weights; raises as :func:`with_weights`."""
        fields = DFlashConfig.__dataclass_fields__
        return with_weights(lambda: cls(DFlashConfig(**{name: config[name] for name in fields})), weights, where)

    def stored(self) -> dict[str, Tensor]:
        """Its weights as a folder holds them: a tied norm under each layer's name."""
        return {name: weight.clone() for name, weight in self.state_dict().items()}

    def fuse(self, features: Tensor) -> Tensor:
        """Context features ``[…, d]`` of ``features […, F]``: the target's last hidden state, which is not read, then
        the inputs of the captured layers."""
        read = features[..., self.config.hidden_size :]
        return self.hidden_norm(self.fc(read).to(features.dtype))

    def context(self, features: Tensor, positions: Tensor) -> list[Keys]:
        """Keys and values of each layer for the context features of tokens: ``[B, T, F]`` at ``positions [B, T]``."""
        fused = self.fuse(features)
        rotation = self.rotary(fused, positions)
        return [attention.keys(fused, rotation) for attention in self.attentions]

    def context_mask(self, anchors: Tensor, segment: Tensor | None, context: Sequence[Keys]) -> Any:
        """Which context features the blocks of ``anchors [B, P]`` int64, indices of their rows, see: those before the
        anchor, of the same sample. ``segment``: ``[B, T]``, which sample of its row a token belongs to. An anchor is
        not the first token of a sample."""
        keys, before = context[0][0], (anchors - 1).clamp(min=0)
        blocks = self.flex and takes_blocks(keys)
        return (block_mask if blocks else dense_mask)(before, segment, keys.shape[2])

    def blocks(self, context: Sequence[Keys], mask: Any, embed: nn.Module, roots: Tensor, positions: Tensor) -> Tensor:
        """What the LM head reads of blocks, ``[B, P, S, d]``; slot 0, the anchor's own, drafts nothing.

        Args:
            context, mask: from :meth:`context` and :meth:`context_mask`.
            embed: the target's token embeddings.
            roots: ``[B, P]``, the anchors' tokens.
            positions: ``[B, P]``, where they are in their texts.
        """
        slots = self.config.block_size
        ids = roots.new_full((*roots.shape, slots), self.config.mask_token_id, dtype=torch.int64)
        ids[..., 0] = roots
        x = embed(ids.flatten(1)).to(context[0][0].dtype)
        rotation = self.rotary(x, (positions[..., None] + torch.arange(slots, device=roots.device)).flatten(1))
        for layer, keys in zip(self.layers, context, strict=True):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, rotation, keys, mask, slots, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, rotation, keys, mask, slots)
        return self.norm(x).unflatten(1, (-1, slots))

    def draft(
        self,
        features: Tensor,
        embed: nn.Module,
        tokens: Tensor,
        anchors: Tensor,
        positions: Tensor | None = None,
        segment: Tensor | None = None,
    ) -> Tensor:
        """What the LM head reads of the drafts of blocks at many places of texts, in one pass: ``[B, P, K, d]``.

        Args:
            features: ``[B, T, F]`` as :meth:`fuse` takes them, in the drafter's dtype.
            embed: the target's token embeddings.
            tokens: ``[B, T]`` of any integer dtype.
            anchors, segment: as :meth:`context_mask` takes them.
            positions: ``[B, T]``; counted from 0 if left out.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        context = self.context(features, positions)
        mask = self.context_mask(anchors, segment, context)
        of_anchors = tokens.gather(1, anchors), positions.gather(1, anchors)
        return self.blocks(context, mask, embed, *of_anchors)[:, :, 1:]


def block_anchors(supervised: Tensor, segment: Tensor | None, uniforms: Tensor, most: int) -> Tensor:
    """Where blocks begin in training: ``[B, T]`` bool. A token and the one after it are an answer's, and the token is
    not its sample's first one; of these of each sample ``most`` at most, those with the lowest ``uniforms [B, T]``.
    ``supervised``: ``[B, T]`` bool; ``segment`` as :meth:`DFlash.context_mask` takes it."""
    whole = torch.zeros_like(supervised, dtype=torch.int64) if segment is None else segment.long()
    same = F.pad(whole[:, 1:] == whole[:, :-1], (1, 0))  # as the token before
    can = supervised & same & F.pad(supervised[:, 1:] & same[:, 1:], (0, 1))
    order = (whole.double() * 4 + torch.where(can, uniforms, 2.0)).argsort(1)  # by sample, then by uniform
    sample = whole.gather(1, order)
    place = torch.arange(sample.shape[1], device=sample.device) - torch.searchsorted(sample, sample)
    return can & torch.empty_like(place).scatter_(1, order, place).lt(most)
