"""DFlash as a drafter: one pass of its layers drafts a block, whose drafts fill a tree of ranks as Medusa heads do
(:mod:`draftsmith.models.dflash`).

The layers keep keys and values of the text's context features; those of token t are in slot t. Prompts need no pass
through the layers, nor does what a step commits: a context feature is a function of the target's features of one token.
A block is run behind the text, and its keys and values are overwritten: by the features of the tokens that are
committed, and by the next block.

Shape letters: B rows, T tokens, L layers, S slots of a block, K = S − 1 drafts, F features per token, d hidden width, H
query heads, G key/value heads, D head width, N nodes, C slots of the cache.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.inference.drafters.eagle import check_context, to_target
from draftsmith.inference.drafters.family import Loader
from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.cache import KVCache
from draftsmith.inference.engine.prompts import Chunk
from draftsmith.inference.engine.protocol import State
from draftsmith.inference.trees.dynamic import DynamicShape
from draftsmith.inference.trees.independent import Confidence, check_tree, read_independent
from draftsmith.inference.verify.tree import TokenTree, Topology
from draftsmith.inference.verify.verify import Verdict
from draftsmith.kernels.attention_plan import Plans
from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.linear import apply_linear
from draftsmith.kernels.tree_attention import TreeKeys, attention_items, runs_kernel, tree_bias
from draftsmith.models.dflash import DFlash
from draftsmith.models.lean import NO_KERNELS, Biases, Buffers, FusedBuffers, Layer, LeanDecoder, RMSNorm, can_fuse
from draftsmith.models.lean_from import packed_linears
from draftsmith.models.lean_native import NativeLayers
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target

HAS_TREE = True


class DFlashDrafter(MedusaDrafter):
    """A DFlash drafter for a target, in a tree of ranks; arguments as those of :class:`MedusaDrafter`.

    Args:
        dflash: is cast to the target's dtype and moved to its device.

    Raises:
        ValueError: it has fewer positions than the target, or the tree is deeper than a block or asks for a rank beyond
            the vocabulary.
    """

    def __init__(
        self,
        dflash: DFlash,
        tree: Topology | DynamicShape,
        target: Target,
        acceptances: Sequence[float] | None = None,
        confidence: Confidence | None = None,
    ) -> None:
        check_context(dflash, target)
        self.dflash, self.captures = to_target(dflash, target), dflash.config.captured_layers
        self.drafts = _Drafts(self.dflash)
        super().__init__(cast(MedusaHeads, self.drafts), tree, target, acceptances, confidence)
        self.layers = _Layers(self.dflash, target)

    def allocate(self, cache: KVCache, max_depth: int, static: bool) -> None:
        self.layers.allocate(cache.rows, cache.capacity, static)
        self.eager, self.rows = not static, torch.arange(cache.rows, device=self.device)

    def prefill(self, features: Tensor, chunk: Chunk) -> None:
        self.layers.append(features, chunk.rows, chunk.positions)

    def reuse(self, source: int, row: int, tokens: Sequence[int]) -> None:
        if source != row:
            self.layers.both[row, : len(tokens)] = self.layers.both[source, : len(tokens)]

    def propose(self, state: State) -> TokenTree:
        hidden = self.layers.run(state.root, state.length, state.plans)
        self.drafts.hidden = hidden[:, 1:].transpose(0, 1)
        return super().propose(state)

    def absorb(self, state: State, verdict: Verdict, tree: TokenTree, features: Tensor) -> None:
        """Keep the keys and values of the root and of the accepted path, whichever drafter of a merge proposed it."""
        count = 1 + int(verdict.length.max()) if self.eager else verdict.path.shape[1]
        path = verdict.path[:, :count].clamp(max=tree.tokens.shape[1] - 1)
        rows, slots = self.rows[:, None], state.length[:, None] + self.layers.numbers[:count]
        self.layers.append(features[rows, path], rows, slots)


class _Drafts:
    """The drafts of a block in place of Medusa heads, which read nothing more. hidden: ``[K, B, d]``, what the LM head
    reads of each, set before each step's tree is filled."""

    projection = None

    def __init__(self, dflash: DFlash) -> None:
        self.config, self.draft_vocab = dflash.config, dflash.draft_vocab
        self.draft_head, self.tokens = dflash.draft_head, dflash.tokens
        self.hidden = torch.empty(0)

    def to(self, *_: object) -> "_Drafts":
        return self

    def features(self, feature: Tensor, heads: int) -> Tensor:
        """Of the first ``heads`` drafts, as :meth:`MedusaHeads.features`."""
        return self.hidden[:heads]

    def logits(self, feature: Tensor, draft_head: nn.Module, heads: int) -> Tensor:
        """Of the first ``heads`` drafts, as :meth:`MedusaHeads.logits`."""
        return apply_linear(draft_head, self.hidden[:heads])


class _Layers:
    """The layers, with packed matrices of which the modules keep views, and their cache.

    both: keys and values of the cache, for writing: ``[B, C, L, 2, G, D]``.
    """

    def __init__(self, dflash: DFlash, target: Target) -> None:
        self.dflash, self.target, config = dflash, target, dflash.config
        heads, kv_heads, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps

        def norm(weight: Tensor) -> RMSNorm:
            return RMSNorm(weight.detach(), eps)

        layers = list[Layer]()
        for module in cast(Any, dflash.layers):
            attention, mlp = module.self_attn, module.mlp
            qkv, _ = packed_linears(attention, ["q_proj", "k_proj", "v_proj"], target)
            gate_up, _ = packed_linears(mlp, ["gate_proj", "up_proj"], target)
            out, _ = packed_linears(attention, ["o_proj"], target)
            down, _ = packed_linears(mlp, ["down_proj"], target)
            of_heads = attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(kv_heads, -1)
            scores = heads, kv_heads, config.head_dim**-0.5, 0, None, ""
            attended = norm(module.input_layernorm.weight), qkv, None, norm(torch.cat(of_heads)), out, None, None
            before_mlp = norm(module.post_attention_layernorm.weight)
            layers.append(Layer(*scores, *attended, before_mlp, gate_up, None, mlp.act_fn, down, None, None, 1.0))
        # Of all layers side by side, for context features: one product.
        self.keys_values = torch.cat([layer.qkv[:, heads * config.head_dim :] for layer in layers], 1)
        self.k_norms = torch.stack([module.k_norm.weight.detach() for module in dflash.attentions])[:, None]

        def rotary(kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
            like = torch.empty(0, dtype=target.dtype, device=target.device)
            return dflash.rotary.to(target.device)(like, positions)

        places = target.context, target.device
        self.lean = LeanDecoder(target.embeddings, 1.0, rotary, layers, norm(dflash.norm.weight), *places)

    def allocate(self, rows: int, capacity: int, static: bool) -> None:
        """Allocate the cache; arguments as those of :meth:`~draftsmith.inference.engine.protocol.Drafter.allocate`."""
        config, device, dtype, lean = self.dflash.config, self.target.device, self.target.dtype, self.lean
        slots = config.block_size
        self.eager, self.capacity = not static, capacity + slots
        size = (config.num_layers, 2, rows, config.num_key_value_heads, self.capacity, config.head_dim)
        storage = torch.zeros(size, dtype=dtype, device=device)
        self.both, self.storage = storage.permute(2, 4, 0, 1, 3, 5), storage
        self.kernel = runs_kernel(storage, config.head_dim)
        on_cpu = self.kernel and why_not_triton(storage)
        lean.native = NativeLayers(lean.layers, lean.norm) if on_cpu else None
        lean.not_fused = "" if self.kernel and not on_cpu and all(map(can_fuse, lean.layers)) else NO_KERNELS
        self.tables = lean.tables(self.capacity)
        self.numbers = torch.arange(self.capacity, device=device)
        self.masks = torch.full((rows, slots - 1), config.mask_token_id, dtype=torch.int64, device=device)
        # Each slot of a block sees all of them.
        self.ancestors = torch.full((rows, slots, 1), -1 if slots == 64 else (1 << slots) - 1, device=device)
        self.depth = self.numbers[:slots].int().expand(rows, -1).contiguous()
        self.mask = torch.ones(rows, slots, slots, dtype=torch.bool, device=device)
        self.buffers: Sequence[Buffers | FusedBuffers] | None = None

    def append(self, features: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Write keys and values of context features ``[…, F]`` of the tokens in these rows and slots, whose shapes
        broadcast to ``[…]``."""
        config = self.dflash.config
        shape = (config.num_layers, 2, config.num_key_value_heads, config.head_dim)
        read = features[..., config.hidden_size :]
        fused = self.dflash.hidden_norm(apply_linear(self.dflash.fc, read))
        made = (fused @ self.keys_values).unflatten(-1, shape)  # […, L, 2, G, D]
        keys = nn.functional.rms_norm(made[..., 0, :, :], (config.head_dim,), None, config.rms_norm_eps) * self.k_norms
        table = self.tables[""]
        cos, sin = table[slots.clamp(max=len(table) - 1)].unflatten(-1, (2, 1, 1, -1)).unbind(-4)
        made[..., 0, :, :] = keys * cos + keys.roll(config.head_dim // 2, -1) * sin
        self.both[rows, slots] = made

    def run(self, roots: Tensor, lengths: Tensor, plans: Plans | None) -> Tensor:
        """Run the blocks of ``roots [B]`` behind each row's first ``lengths [B]`` tokens: what the LM head reads
        ``[B, S, d]``."""
        config, slots = self.dflash.config, self.dflash.config.block_size
        tokens = torch.cat((roots[:, None], self.masks), 1)
        places = lengths[:, None] + self.numbers[:slots]
        seen = self.capacity if self.kernel or not self.eager else int(lengths.max()) + slots
        biases: Biases | None = None
        tree_keys = None
        if self.kernel:
            shape = len(roots), slots, config.num_attention_heads, config.num_key_value_heads, config.head_dim
            items = attention_items(*shape, seen, self.storage.dtype, self.storage.device)
            work = None if plans is None else plans.plan(slots, items)
            plan = {} if work is None else {0: work}
            tree_keys = TreeKeys(lengths, self.ancestors, self.depth, self.depth, plan)
        elif self.eager and len(roots) == 1:
            biases = {0: None}  # all slots are seen
        else:
            biases = {0: tree_bias(lengths, self.mask, self.depth, seen, 0, self.storage.dtype)}
        if self.buffers is None:
            self.buffers = self.lean.buffers(len(roots), slots, biases is not None, step=True)
        written = self.both.unbind(2)
        views = [
            (both, pair[0][:, :, :seen], pair[1][:, :, :seen]) for both, pair in zip(written, self.storage, strict=True)
        ]
        at = places.clamp(max=len(self.tables[""]) - 1), places
        masks: dict[str, Any] = {"biases": biases, "tree_keys": tree_keys, "buffers": self.buffers}
        return self.lean.forward(tokens, *at, views, self.tables, **masks)[0]


# ---- the family, as inference/drafters/family.py describes it


def open_drafter(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], tree: Path | None, merged: bool
) -> Loader:
    """The layers and their tree, checked against each other."""
    assert tree is not None
    given, acceptances, confidence = read_independent(tree, merged)
    dflash = DFlash.from_artifact(config, weights, str(folder))
    check_tree(given, dflash.config.num_draft_heads, dflash.config.outputs, f"{tree}: ")

    def build(target: Target, options: dict[str, Any]) -> DFlashDrafter:
        check_context(dflash, target, str(folder))
        return DFlashDrafter(dflash, given, target, acceptances, confidence)

    return Loader(build)
