"""Tree attention: Q tree nodes attend to a cached prefix and to their own ancestors (SpecInfer, arXiv 2305.09781 §4.2).

    out_i = softmax_j( q_i · k_j · scale + bias_ij ) v_j
    bias_ij = 0 if j < L (the prefix), or j − L is i or an ancestor of i; else −inf

Shape letters: B batch, Q queries, N tree nodes, W 64-bit words, Hq query heads, Hkv key/value heads, S cache slots
seen, D head width, L the cached length of a row. Node i of a row sits in slot L + i; its position is L + depth(i).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def ancestor_mask(ancestors: Tensor, num_nodes: int) -> Tensor:
    """Unpack ancestor bitsets.

    Args:
        ancestors: ``[B, N, W]`` int64; bit j of row i (word j // 64) says that node j is an ancestor of node i or i.

    Returns:
        ``[B, N, num_nodes]`` bool.
    """
    bit = torch.arange(num_nodes, device=ancestors.device)
    return (ancestors[..., bit // 64] >> (bit % 64)) & 1 != 0


def tree_bias(lengths: Tensor, mask: Tensor, depth: Tensor, slots: int, window: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of a tree behind each row's own prefix.

    Args:
        lengths: ``[B]`` int64, cached tokens per row (L).
        mask: ``[B, N, N]`` bool from :func:`ancestor_mask`.
        depth: ``[B, N]`` depth of each node, the root's being 0.
        slots: S, how many cache slots are looked at; at least max(L) + N.
        window: a node at position p sees keys at positions > p − window; 0 for no window.

    Returns:
        ``[B, 1, N, S]`` of ``dtype``: 0 or −inf. Every row sees at least itself.
    """
    num_nodes = mask.shape[1]
    offset = torch.arange(slots, device=lengths.device) - lengths[:, None]  # [B, S], ≥ 0 inside the tree
    inside = offset.clamp(0, num_nodes - 1)
    seen = mask.gather(2, inside[:, None, :].expand(-1, num_nodes, -1))
    seen = seen & (offset < num_nodes)[:, None] | (offset < 0)[:, None]
    if window:
        key_depth = torch.where(offset < 0, offset, depth.gather(1, inside).to(offset.dtype))  # position − L
        seen = seen & (depth[..., None] - key_depth[:, None] < window)
    return torch.zeros(seen.shape, dtype=dtype, device=lengths.device).masked_fill_(~seen, float("-inf"))[:, None]


def tree_bias_one_row(mask: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """:func:`tree_bias` for a single row without a window, whose prefix fills all slots but the tree's: L = S − N.

    Args:
        mask: ``[1, N, N]`` bool.

    Returns:
        ``[1, 1, N, S]``.
    """
    square = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return F.pad(square, (slots - mask.shape[1], 0))[:, None]


def causal_bias(start: int, queries: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The additive mask of a prompt's chunk ``[start, start + queries)`` over all slots up to its end.

    Returns:
        ``[1, 1, queries, start + queries]`` of ``dtype``: 0 or −inf.
    """
    distance = torch.arange(start, start + queries, device=device)[:, None] - torch.arange(
        start + queries, device=device
    )
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    return torch.zeros(distance.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))[None, None]


def tree_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """The definition, written out; heads of a group share keys and values.

    Args:
        q: ``[B, Hq, Q, D]``.
        k, v: ``[B, Hkv, S, D]``, the cache with the tree's own keys already in their slots.
        bias: ``[B or 1, 1, Q, S]`` additive, or None if every query sees every slot.
        scale: factor on q · k.
        softcap: scores become ``softcap · tanh(score / softcap)`` before the bias (Gemma 2).

    Returns:
        ``[B, Hq, Q, D]``.
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float | None = None
) -> Tensor:
    """:func:`tree_attention_reference` by PyTorch's fused attention, where that can express it (no soft cap)."""
    if softcap is not None:
        return tree_attention_reference(q, k, v, bias, scale, softcap)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
