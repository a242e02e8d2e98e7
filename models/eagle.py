"""EAGLE drafters: a decoder layer, or a few, that continues the target's features (arXiv 2401.15077, 2503.01840 §3).

The pair at position t is the next token's embedding and a feature: e_t = embed(x_{t+1}), g_t. The layer sees the pairs
up to t and gives a hidden state o_t, from which x_{t+2} is predicted. A draft then continues with (embed(x_{t+2}), o_t)
at position t + 1: beyond the committed text there are no features of the target, so the drafter's own state stands for
them.

    EAGLE-1   g_t = h_t, the target's last hidden state;  z = fc(cat(e, g));  o = layer(z), without an input norm;
              logits = the target's LM head on o
    EAGLE-3   g_t = fc(cat of the inputs of three layers);  q, k, v from cat(norm(e), norm(g)), residual g;
              logits = LM head on norm(o); the drafter's own LM head (own), or the target's (shared)
              further layers, if any, are between the first one and the norm

P-EAGLE (arXiv 2602.01469) is EAGLE-3 that drafts K tokens in one pass. Draft e ≥ 1 is not made of the draft before it,
but of (embed(mask token), fc(mask_hidden)) at position t + e, the same pair for all depths; it sees the pairs up to t
and the mask pairs before it. So the positions of a draft are independent of each other's tokens.

Published EAGLE-3 drafters may take norm(g) for the residual (norm_before_residual), have their own embeddings, and
be of another width than the target.

A layer has Llama's form (grouped-query attention with rotary positions, an MLP gated by SiLU, RMSNorm), for every
family of targets, since that is what servers load. Its sizes and rotary positions are the target's.

Shape letters: B batch, T tokens, P positions, F features per token, C captured layers, K unrolled steps. d is the
hidden width, W the target's (d, unless the config says otherwise). H query heads, G key/value heads, D head width. V is
the vocabulary, S the draft vocabulary (V if there is none).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from draftsmith.models.artifact import with_weights
from draftsmith.models.target import Target
from draftsmith.models.unrolled import Keys, block_mask, dense_mask, rotate, takes_blocks, unrolled_attention
from draftsmith.models.vocabulary import WithDraftVocabulary, check_projection, check_size, check_whole, head_rows

SIZES = (
    "hidden_size vocab_size num_attention_heads num_key_value_heads head_dim intermediate_size max_position_embeddings"
).split()


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE drafter.

    version: 1 or 3.
    projection: ``own``: its own matrix ``[S, d]`` (EAGLE-3); ``shared``: the target's LM head.
    captured_layers: layers of the target whose inputs it reads (EAGLE-3).
    norm_before_fc: a norm of the joined features before ``fc``; fc_norm: one norm for each captured layer;
    norm_output: the hidden state that a draft continues with is the normed one (EAGLE-3.1).
    fc_bias: whether ``fc`` has a bias (EAGLE-1).
    norm_before_residual: the layer's residual is the normed hidden state (EAGLE-3).
    attention_bias: q, k and v have a bias, as in Qwen2.
    own_embeddings: its own matrix ``[V, d]``, instead of the target's embeddings.
    target_hidden_size: W, width of the features, where it is not the drafter's (EAGLE-3).
    parallel: K, the tokens that it drafts in one pass (P-EAGLE); 0: a pass for each.
    mask_token_id: P-EAGLE's token in place of those that are not known yet.
    num_layers: of EAGLE-1 one.
    """

    version: int
    projection: Literal["own", "shared"]
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    rms_norm_eps: float = 1e-6
    captured_layers: tuple[int, ...] = ()
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab_size: int | None = None
    fc_bias: bool = True
    norm_before_residual: bool = False
    attention_bias: bool = False
    own_embeddings: bool = False
    target_hidden_size: int | None = None
    parallel: int = 0
    mask_token_id: int | None = None
    num_layers: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "captured_layers", tuple(self.captured_layers))
        if self.version not in (1, 3):
            raise ValueError(f"field 'version' is {self.version!r}; it has to be 1 or 3")
        check_projection(self.projection)
        check_sizes(self)
        layers = self.captured_layers
        if (self.version == 3) != bool(layers):
            raise ValueError("field 'captured_layers': EAGLE-3 reads some layers, EAGLE-1 none")
        if self.version == 1 and (self.projection == "own" or self.fc_norm or self.norm_before_fc or self.norm_output):
            raise ValueError("EAGLE-1 has the target's LM head and no norms of its own: projection 'shared', no norms")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fields 'fc_norm' and 'norm_before_fc': only one of them, as in speculators")
        if self.version == 1 and self.norm_before_residual:
            raise ValueError("field 'norm_before_residual': EAGLE-1 has no norm before its layer")
        width = self.target_hidden_size
        if width is not None and (type(width) is not int or width < 1):
            raise ValueError(f"field 'target_hidden_size' is {width!r}; it has to be a whole number above 0, or null")
        if width is not None and (self.version == 1 or not self.own_embeddings or self.projection == "shared"):
            raise ValueError(
                "field 'target_hidden_size': a drafter of another width is of version 3 and has embeddings and an LM "
                "head of its own"
            )
        if type(self.parallel) is not int or self.parallel < 0 or (self.parallel and self.version == 1):
            raise ValueError(f"field 'parallel' is {self.parallel!r}; it has to be a whole number, of EAGLE-1 0")
        mask = self.mask_token_id
        if self.parallel and (type(mask) is not int or not 0 <= mask < self.vocab_size):
            raise ValueError(f"field 'mask_token_id' is {mask!r}; it has to be a token of {self.vocab_size}")
        check_whole(self, ("num_layers",))
        if self.num_layers > (64 if self.version == 3 else 1):
            raise ValueError(f"field 'num_layers' is {self.num_layers}; it has to be at most 64, of EAGLE-1 one")
        check_size(self.draft_vocab_size, self.vocab_size)

    @classmethod
    def for_target(
        cls,
        config: Any,
        vocab_size: int,
        context: int,
        version: int,
        projection: Literal["own", "shared"],
        draft_vocab_size: int | None = None,
        captured_layers: Sequence[int] = (),
        intermediate_size: int | None = None,
        parallel: int = 0,
        **options: int,
    ) -> "EagleConfig":
        """The config that fits a target.

        Args:
            config: the target's text config of ``transformers``.
            vocab_size: rows of its LM head.
            context: :attr:`Target.context`; the drafter has as many positions.
            captured_layers: of EAGLE-3; :func:`layers_to_capture` if empty.
            intermediate_size: width of its MLP; the target's if None.

        Raises:
            ValueError: the target has no such layers.
        """
        count = config.num_hidden_layers
        layers = tuple(captured_layers) or (layers_to_capture(count) if version == 3 else ())
        check_captured(layers, count)
        own: dict[str, Any] = {**sizes_for(config, vocab_size, context, intermediate_size), **options}
        own |= {"parallel": parallel, "mask_token_id": vocab_size - 1 if parallel else None}
        return cls(version, projection, captured_layers=layers, draft_vocab_size=draft_vocab_size, **own)

    @property
    def outputs(self) -> int:
        """S: the number of tokens that it chooses from."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def feature_size(self) -> int:
        """W: the target's hidden width."""
        return self.target_hidden_size or self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"captured_layers": list(self.captured_layers)}


def check_sizes(config: Any) -> None:
    """Raises ValueError: a size in a drafter's config, its rotary parameters or its captured layers are impossible."""
    check_whole(config, SIZES)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"field 'num_attention_heads' is {config.num_attention_heads}; it has to be a multiple of "
            f"num_key_value_heads, {config.num_key_value_heads}"
        )
    if not isinstance(config.rope_parameters, dict):
        raise ValueError(f"field 'rope_parameters' is {config.rope_parameters!r}; it has to be an object")
    layers = config.captured_layers
    if any(type(layer) is not int or layer < 0 for layer in layers) or len(set(layers)) < len(layers):
        raise ValueError(f"field 'captured_layers' is {list(layers)!r}; they have to be distinct numbers of layers")


def check_captured(layers: Sequence[int], count: int) -> None:
    """Raises ValueError: a target of ``count`` layers has not all of these."""
    if any(layer >= count for layer in layers):
        raise ValueError(f"drafter.captured_layers={list(layers)}: the target has layers 0 to {count - 1}")


def sizes_for(config: Any, vocab_size: int, context: int, intermediate_size: int | None) -> dict[str, Any]:
    """The sizes and rotary positions that a drafter's layers take from a target; arguments as those of
    :meth:`EagleConfig.for_target`."""
    heads, width = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or width // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if width % heads:  # GLM-4.5: no Llama layer, as which servers load it, has so many
        heads = next(count for count in range(max(1, width // head_dim), 0, -1) if width % count == 0)
        kv_heads = math.gcd(heads, kv_heads)
    return {
        "hidden_size": width,
        "vocab_size": vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size or getattr(config, "intermediate_size", None) or 4 * width,
        "max_position_embeddings": context,
        "rope_parameters": _rope_parameters(config, head_dim),
        "rms_norm_eps": float(getattr(config, "rms_norm_eps", None) or 1e-6),
    }


def llama_config(config: Any) -> LlamaConfig:
    """The sizes and rotary positions in a drafter's config as a ``transformers`` config."""
    return LlamaConfig(
        num_hidden_layers=1,
        tie_word_embeddings=False,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        **{name: getattr(config, name) for name in SIZES},
    )


def _rope_parameters(config: Any, head_dim: int) -> dict[str, Any]:
    """Rotary parameters of a target's full-attention layers; the default ones for a target without rotary positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    if isinstance(rope.get("full_attention"), dict):  # some families have one for each kind of layer
        rope = rope["full_attention"]
    # The drafter rotates whole heads. Factors for the frequencies of a part of them (Phi-4-mini's longrope) do not fit.
    unfit = len(rope.get("short_factor") or ()) not in (0, head_dim // 2)
    kept = {"rope_theta"} if unfit else rope.keys() - {"partial_rotary_factor"}
    rope = {name: value for name, value in rope.items() if name in kept}
    theta = getattr(config, "rope_theta", None) or 10000.0
    return {"rope_type": "default", "rope_theta": theta} | rope


def layers_to_capture(count: int) -> tuple[int, ...]:
    """Layers of a target of ``count`` layers whose inputs EAGLE-3 reads: 2, n/2 and n − 3; in a target of fewer than
    seven, where these coincide, others, distinct ones."""
    if count >= 7:
        return 2, count // 2, count - 3
    return tuple(sorted({min(1, count - 1), count // 2, count - 1}))


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, inputs: int) -> None:
        super().__init__()
        width, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * width, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * width, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * width, config.hidden_size, bias=False)


class _Layer(nn.Module):
    """A layer; the ``first`` one reads pairs, a further one the output of the layer before it."""

    def __init__(self, config: EagleConfig, first: bool = True) -> None:
        super().__init__()
        d, eps, self.head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        pairs = first and config.version == 3
        if config.version == 3:
            self.input_layernorm = nn.RMSNorm(d, eps)  # of the first one's embeddings
        if pairs:
            self.hidden_norm = nn.RMSNorm(d, eps)  # of features
        self.self_attn = _Attention(config, 2 * d if pairs else d)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self.mlp = LlamaMLP(llama_config(config))

    def heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Keys]:
        """Rotated queries ``[B, H, T, D]``, and rotated keys and values, from the input ``[B, T, ·]`` of q, k and v."""
        own = self.self_attn
        made = (linear(x) for linear in (own.q_proj, own.k_proj, own.v_proj))
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in made)
        return rotate(q, cos, sin), (rotate(k, cos, sin), v)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output o ``[B, T, d]`` from the attention's ``[B, H, T, D]``."""
        out = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return out + self.mlp(self.post_attention_layernorm(out))


class Eagle(WithDraftVocabulary):
    """An EAGLE drafter, without the target's embeddings and LM head. Names of parameters are those of the published
    EAGLE-3 folders."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.config = config
        self.blocks = True  # FlexAttention in training, where it runs
        self.recompute = False  # the activations of unrolled steps in the backward pass, instead of keeping them
        d, eps, captured = config.hidden_size, config.rms_norm_eps, len(config.captured_layers)
        read = config.feature_size
        inputs = captured * read if captured else 2 * d
        self.fc = nn.Linear(inputs, d, bias=config.version == 1 and config.fc_bias)
        self.midlayer = _Layer(config)
        # By the numbers that published folders give them.
        self.layers = nn.ModuleDict({str(n): _Layer(config, first=False) for n in range(1, config.num_layers)})
        for layer in self.all_layers[1:]:  # they add nothing at first
            nn.init.zeros_(layer.self_attn.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        self.norm = nn.RMSNorm(d, eps) if config.version == 3 else None
        self.input_norm = nn.RMSNorm(captured * read, eps) if config.norm_before_fc else None
        norms = (nn.RMSNorm(read, eps) for _ in range(captured))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.mask_hidden: nn.Parameter | None = None  # in place of the features of drafts, before fc
        if config.parallel:
            self.mask_hidden = nn.Parameter(0.02 * torch.randn(inputs))
        self.embed_tokens = nn.Embedding(config.vocab_size, d) if config.own_embeddings else None
        self.lm_head = nn.Linear(d, config.outputs, bias=False) if config.projection == "own" else None
        with torch.device("cpu"):  # frequencies are computed, also where the weights are on the meta device
            self.rotary = LlamaRotaryEmbedding(llama_config(config))  # no parameters, nothing in the state dict

    @property
    def all_layers(self) -> list[_Layer]:
        """The first one, and those behind it."""
        return [self.midlayer, *cast(Iterable[_Layer], self.layers.values())]

    @classmethod
    def for_target(cls, target: Target, *shape: Any, **options: Any) -> "Eagle":
        """An untrained drafter for a target. Its own LM head has the target's rows, and its last norm begins as large
        as the target's: from 1 the Coder's learned more slowly (benchmarks/log/2026-11-28.md). A draft
        vocabulary is the first ids, until :meth:`draft_from` is called. Layers behind the first one add nothing yet, so
        that a trained drafter of one layer can be continued with more.
        ``shape``, ``options``: the arguments of :meth:`EagleConfig.for_target` from ``version`` on.
        Raises ValueError: the target has no such layers, or its LM head's rows cannot be taken."""
        made = EagleConfig.for_target(target.config, target.vocab_size, target.context, *shape, **options)
        eagle = cls(made).to(target.device)
        if eagle.norm is not None:
            nn.init.constant_(eagle.norm.weight, target.hidden_scale())  # as large as what its LM head reads
        eagle._start_head(target)
        return eagle

    @torch.no_grad()
    def _start_head(self, target: Target) -> None:
        if self.lm_head is not None and self.config.target_hidden_size is None:
            ids = torch.arange(self.config.vocab_size) if self.draft_vocab is None else self.draft_vocab
            self.lm_head.weight.copy_(head_rows(target.lm_head, ids.to(target.device)).weight)

    @classmethod
    def from_artifact(cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], where: str) -> "Eagle":
        """A drafter from its folder's config and weights; raises as :func:`with_weights`."""
        # Older folders lack what was added later, from fc_bias on.
        names = [*EagleConfig.__dataclass_fields__]
        fields = [name for name in names if name in config or names.index(name) < names.index("fc_bias")]
        return with_weights(lambda: cls(EagleConfig(**{name: config[name] for name in fields})), weights, where)

    def draft_head(self, lm_head: nn.Module) -> nn.Module:
        """Its own LM head, if it has one; else as :class:`WithDraftVocabulary`."""
        return super().draft_head(lm_head) if self.lm_head is None else self.lm_head

    def embeddings(self, target: nn.Module) -> nn.Module:
        """The token embeddings that it reads: its own, or the target's."""
        return target if self.embed_tokens is None else self.embed_tokens

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features as the drafter reads them, g: ``[…, F] → […, d]``.
        ``features``: the last hidden state, then the inputs of the captured layers; F = W · (1 + C)."""
        width = self.config.feature_size
        if self.config.version == 1:
            return features[..., :width]
        return self._fuse_captured(features[..., width:])

    def _fuse_captured(self, captured: Tensor) -> Tensor:
        width = self.config.feature_size
        if self.input_norm is not None:
            captured = self.input_norm(captured)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, captured.split(width, -1), strict=True)
            captured = torch.cat([norm(part) for norm, part in parts], -1)
        return self.fc(captured)

    def mask_pair(self, embed: nn.Module) -> tuple[Tensor, Tensor]:
        """The embedding and the feature of drafts that are not known yet (P-EAGLE), ``[d]`` each."""
        assert self.mask_hidden is not None and self.config.mask_token_id is not None
        token = torch.tensor(self.config.mask_token_id, device=self.mask_hidden.device)
        return embed(token), self._fuse_captured(self.mask_hidden.to(self.fc.weight.dtype))

    def attention_input(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Input of q, k and v, and the residual ``[…, d]``, of pairs (e, g): ``[…, d]`` each."""
        if self.config.version == 1:
            joined = self.fc(torch.cat((embeddings, hidden), -1))
            return joined, joined
        normed = self.midlayer.hidden_norm(hidden)
        pairs = torch.cat((self.midlayer.input_layernorm(embeddings), normed), -1)
        return pairs, normed if self.config.norm_before_residual else hidden

    def outputs(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """From the layer's output o: what the LM head reads, and what a draft continues with; ``[…, d]`` each."""
        if self.norm is None:
            return out, out
        normed = self.norm(out)
        return normed, normed if self.config.norm_output else out

    def unroll(self, *arguments: Any, **options: Any) -> Iterator[Tensor]:
        """What the LM head reads in each step of :meth:`unroll_pairs`, of the same arguments: ``[B, P, d]``."""
        return (for_head for _, for_head in self.unroll_pairs(*arguments, **options))

    def unroll_pairs(
        self,
        features: Tensor,
        embed: nn.Module,
        tokens: Tensor,
        steps: int,
        positions: Tensor | None = None,
        segment: Tensor | None = None,
        chosen: Tensor | None = None,
        counts: Sequence[int] | None = None,
        drafted: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Training-time test (arXiv 2503.01840 §3.2): K steps of drafting from many positions at once.

        In step i, index t has drafted x_{t+2} … x_{t+i+1}, the true tokens, and now predicts x_{t+i+2}. It sees the
        first step's pairs up to t, made of the target's features, and its own later ones. Those of P-EAGLE hold neither
        true tokens nor the drafter's own states.

        Args:
            features: ``[B, T, F]`` as :meth:`fuse` takes them, in the drafter's dtype.
            embed: the target's token embeddings; not read by a drafter that has its own.
            tokens: ``[B, T]`` of any integer dtype.
            positions: ``[B, T]``; counted from 0 if left out.
            segment: ``[B, T]``, which sample of its row a token belongs to; samples do not see each other.
            chosen: ``[B, P]`` int64, the indices that draft (:func:`marked_places`); all if left out. Of the others
                only the first step's keys and values are computed, and what those depend on.
            counts: how many of the chosen, from the first one on, each step runs: P, then never more than the step
                before; P in each if left out.
            drafted: ``[B, P, K]`` int64, the drafts that it reads in place of the true tokens; step i + 1 reads that of
                step i, which may be written once step i is yielded.

        Yields:
            For each step the hidden state of each pair that was run, g or the draft's own, and what the LM head reads:
            ``[B, P, d]`` each, with the step's own P.
        """
        rows, length = tokens.shape
        places = torch.arange(length, device=tokens.device).expand(rows, -1)
        positions = places if positions is None else positions
        dtype = features.dtype  # also of the residuals under autocast
        embed, hidden = self.embeddings(embed), self.fuse(features).to(dtype)
        following = F.pad(tokens[:, 1:].long(), (0, steps))  # x_{t+1}, and zeros behind the row's end
        x, residual = self.attention_input(embed(following[:, :length]).to(dtype), hidden)
        rotation, layers = self.rotary(x, positions), self.all_layers
        q, *firsts = layers[0].heads(x, *rotation)
        sees = block_mask if self.blocks and takes_blocks(q) else dense_mask
        everywhere: Any = sees(places, segment, length) if layers[1:] else None
        for layer, behind in itertools.pairwise(layers):
            residual = layer.finish(unrolled_attention(q, firsts[-1], (), everywhere), residual.to(dtype))
            q, first = behind.heads(behind.input_layernorm(residual), *rotation)
            firsts.append(first)
        if chosen is None:
            chosen = places
        else:
            at = torch.arange(rows, device=tokens.device)[:, None], chosen
            q = q.transpose(1, 2)[at].transpose(1, 2)
            residual, positions, hidden = residual[at], positions[at], hidden[at]
        counts = counts or [chosen.shape[1]] * steps
        masks = {count: sees(chosen[:, :count], segment, length) for count in dict.fromkeys(counts)}

        def run(step: int, hidden: Tensor, later: Sequence[Any]) -> tuple[Tensor, Tensor, Sequence[Any]]:
            some, mask = slice(counts[step]), masks[counts[step]]
            if not step:
                out = layers[-1].finish(unrolled_attention(q, firsts[-1], (), mask), residual.to(dtype))
                return *self.outputs(out), later
            hidden, before = hidden[:, some], following.gather(1, chosen[:, some] + step)
            if drafted is not None:
                before = drafted[:, some, step - 1]
            embeddings = embed(before).to(dtype)
            if self.mask_hidden is not None:
                embeddings, hidden = (each.to(dtype).expand_as(hidden) for each in self.mask_pair(embed))
            x, out = self.attention_input(embeddings, hidden)
            rotation, grown = self.rotary(x, positions[:, some] + step), list[list[Keys]]()
            for layer, first, keys in zip(layers, firsts, later, strict=True):
                own, new = layer.heads(layer.input_layernorm(out) if grown else x, *rotation)
                grown.append([*((k[:, :, some], v[:, :, some]) for k, v in keys), new])
                out = layer.finish(unrolled_attention(own, first, grown[-1], mask), out.to(dtype))
            return *self.outputs(out), grown

        if self.recompute and torch.is_grad_enabled():
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        later: Sequence[Any] = [[] for _ in layers]  # of each layer the keys of the steps after the first
        for step in range(steps):
            for_head, following_hidden, later = run(step, hidden, later)
            yield hidden[:, : counts[step]], for_head
            hidden = following_hidden
