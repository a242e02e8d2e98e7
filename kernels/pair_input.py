"""The input of EAGLE's layer for the nodes of a level, in one launch: embeddings, hidden states, their norms, places.

    pairs[b, i]    = cat(norm(embedding[tokens[b, i]]) · w, norm(hidden[b, above[i]]) · w'),   norm(z) = z / rms(z)
    residual[b, i] = hidden[b, above[i]]
    positions[b, i] = min(lengths[b] + depth[b, i], last),   slots[b, i] = lengths[b] + first + i

Without weights (EAGLE-1) nothing is normed. Norms are computed in float32 and rounded once.

Shape letters: B rows, n nodes, m nodes of the level above, d hidden width, V rows of the embedding.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton

Norms = tuple[Tensor, Tensor, float]  # weights [d] of the embeddings' and the hidden states' norm, eps
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def pair_input_reference(
    tokens: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    above: Tensor | None,
    norms: Norms | None,
    lengths: Tensor,
    depth: Tensor,
    first: int,
    last: int,
) -> Inputs:
    """The definition of :func:`pair_input`."""
    hidden = hidden if above is None else hidden.index_select(1, above)
    parts = [F.embedding(tokens.clamp(min=0), embedding), hidden]
    if norms is not None:
        *weights, eps = norms
        parts = [
            F.rms_norm(part.float(), weight.shape, weight.float(), eps).to(hidden.dtype)
            for part, weight in zip(parts, weights, strict=True)
        ]
    positions = (lengths[:, None] + depth).clamp(max=last)
    slots = lengths[:, None] + torch.arange(first, first + tokens.shape[1], device=tokens.device)
    return torch.cat(parts, -1).flatten(0, 1), hidden.flatten(0, 1).clone(), positions, slots


@jit
def _normed(values, weight, place, inside, width, eps):
    if weight is not None:
        scale = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps) * scale
    return values


@jit(do_not_specialize="nodes first last tokens_row hidden_node depth_row")
def _pair_input_kernel(tensors, sizes, nodes, first, last, tokens_row, hidden_node, depth_row, BLOCK: tl.constexpr):
    """One program per node, whose vectors stay in registers."""
    width, eps, table_row, hidden_row = sizes
    tokens, embedding, hidden, above, embedding_norm, hidden_norm, lengths, depth, outputs = tensors
    pairs, residual, positions, slots = outputs
    number = tl.program_id(0).to(tl.int64)
    row, node = number // nodes, number % nodes
    place = tl.arange(0, BLOCK)
    inside = place < width
    token = tl.maximum(tl.load(tokens + row * tokens_row + node), 0)
    source = node
    if above is not None:
        source = tl.load(above + node)
    own = tl.load(hidden + row * hidden_row + source * hidden_node + place, mask=inside, other=0.0)
    embedded = tl.load(embedding + token * table_row + place, mask=inside, other=0.0).to(tl.float32)
    length = tl.load(lengths + row)
    tl.store(residual + number * width + place, own, mask=inside)
    embedded = _normed(embedded, embedding_norm, place, inside, width, eps)
    normed = _normed(own.to(tl.float32), hidden_norm, place, inside, width, eps)
    pairs += number * 2 * width + place
    tl.store(pairs, embedded.to(pairs.dtype.element_ty), mask=inside)
    tl.store(pairs + width, normed.to(pairs.dtype.element_ty), mask=inside)
    level = tl.load(depth + row * depth_row + node).to(tl.int64)
    tl.store(positions + number, tl.minimum(length + level, last))
    tl.store(slots + number, length + first + node)


def pair_input(
    tokens: Tensor,
    embedding: Tensor,
    hidden: Tensor,
    above: Tensor | None,
    norms: Norms | None,
    lengths: Tensor,
    depth: Tensor,
    first: int,
    last: int,
) -> Inputs:
    """The input of the layer for n nodes of each row.

    Args:
        tokens: ``[B, n]`` int64. A negative one (no token) is read as 0.
        embedding: ``[V, d]``; the last stride is 1.
        hidden: ``[B, m, d]`` of the same dtype.
        above: ``[n]`` int64, the place in ``hidden`` of each node's parent; None if it is the node's own (m = n).
        norms: weights ``[d]`` of the norms of embeddings and of hidden states, and their eps; None for no norms.
        lengths: ``[B]`` int64.
        depth: ``[B, n]`` int32.
        first: the number of the first node.
        last: the last position.

    Returns:
        pairs ``[B · n, 2d]``, residual ``[B · n, d]`` (a copy), positions and slots ``[B, n]`` int64.
    """
    if why_not_triton(hidden):
        return pair_input_reference(tokens, embedding, hidden, above, norms, lengths, depth, first, last)
    (rows, nodes), width = tokens.shape, hidden.shape[2]
    tokens, hidden, depth, lengths = dense(tokens), dense(hidden), dense(depth), dense(lengths)
    assert embedding.dtype == hidden.dtype and embedding.shape[1] == width and embedding.stride(1) == 1
    pairs, residual = hidden.new_empty(rows * nodes, 2 * width), hidden.new_empty(rows * nodes, width)
    positions, slots = tokens.new_empty((2, rows, nodes))
    embedding_norm, hidden_norm, eps = norms or (None, None, 0.0)
    block = next_power(width)
    outputs = (pairs, residual, positions, slots)
    tensors = (tokens, embedding, hidden, above, embedding_norm, hidden_norm, lengths, depth, outputs)
    sizes = (width, eps, embedding.stride(0), hidden.stride(0))
    changing = (nodes, first, last, tokens.stride(0), hidden.stride(1), depth.stride(0))
    with torch.cuda.device_of(hidden):
        _pair_input_kernel[(rows * nodes,)](
            tensors, sizes, *changing, BLOCK=block, num_warps=max(1, min(block // 256, 16))
        )
    return outputs
