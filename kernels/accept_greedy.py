"""Greedy acceptance: the path of a token tree that the target's argmax follows, and the state of the next step, in two
launches.

    agrees[i]   = tokens[i] is choice[parent[i]], and i is valid;  the root always agrees
    accepted[i] = i and all its ancestors agree
    node        = the deepest accepted node, of several the first

:func:`accept_greedy` replaces two dozen small operations on ``[B, N]`` and ``[B, N, N]`` tensors, each a launch of its
own. Equal siblings may both agree, so that a walk that takes the first child that agrees could end above the deepest
accepted node; here a node tests its ancestors' bits against those of the nodes that disagree. One program per row does
this without a loop over depths. :func:`advance` moves a step's state on to the accepted node.

Shape letters: B rows, N nodes, W 64-bit words, D depth of the deepest node, A = D + 1, F width of a feature.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor

from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton
from draftsmith.kernels.tree_attention import ancestor_mask


def accept_greedy_reference(
    choice: Tensor,
    best: Tensor,
    tokens: Tensor,
    parent: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    valid: Tensor,
    active: Tensor,
    committed: Tensor,
    max_depth: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The definition of :func:`accept_greedy`."""
    nodes = tokens.shape[1]
    if nodes == 1:  # the root alone
        zero, bonus, finite = torch.zeros_like(choice[:, 0]), choice[:, 0], best[:, 0].abs() < torch.inf
        committed[:, 0], committed[:, max_depth + 1] = torch.where(finite, active.long(), -1), bonus
        path = zero[:, None]
        if max_depth:
            committed[:, 1 : max_depth + 1] = tokens
            path = torch.arange(max_depth + 1, device=zero.device).expand(len(zero), -1)
        return path, zero, zero, bonus, finite
    mask, depth = ancestor_mask(ancestors, nodes) if mask is None else mask, depth.long()
    wrong = (tokens != choice.gather(1, parent.clamp(min=0).long())) | ~valid
    wrong[:, 0].fill_(False)
    rejected = (mask & wrong[:, None, :]).any(-1) | wrong  # padding may have no ancestors, not even itself
    length, node = depth.masked_fill(rejected, -1).max(-1)
    bonus = choice.gather(1, node[:, None])
    path, finite = accepted_path(mask, depth, node, best, max_depth)
    count = torch.where(finite, (length + 1) * active, -1)
    drafted = tokens.gather(1, path[:, 1:].clamp(max=nodes - 1))
    torch.cat([count[:, None], drafted, bonus], 1, out=committed[:, : max_depth + 2])
    return path, length, node, bonus[:, 0], finite


def accepted_path(mask: Tensor, depth: Tensor, node: Tensor, best: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """The path ``[B, A]`` to each row's ``node [B]``, and whether ``best [B, N]`` is finite on all of it, ``[B]``; the
    rest as in :func:`accept_greedy`, ``depth`` in int64."""
    rows, nodes = depth.shape
    on_path = mask.expand(rows, -1, -1).gather(1, node[:, None, None].expand(-1, 1, nodes)).squeeze(1)  # [B, N]
    number = torch.arange(max(nodes, max_depth + 2), device=node.device)
    path = number[: max_depth + 2].repeat(rows, 1)  # the last column: nodes off the path
    path.scatter_(1, torch.where(on_path, depth, max_depth + 1), number[:nodes].expand(rows, -1))
    return path[:, :-1], ((best.abs() < torch.inf) | ~on_path).all(-1)


@jit(do_not_specialize="nodes max_depth parent_row depth_row ancestors_row ancestors_node valid_row committed_row")
def _accept_greedy_kernel(
    inputs,
    outputs,
    nodes,
    max_depth,
    parent_row,
    depth_row,
    ancestors_row,
    ancestors_node,
    valid_row,
    committed_row,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """One program per row of the batch, one lane per node."""
    choice, best, tokens, parent, depth, ancestors, valid, active = inputs
    committed, path, length, node, bonus, finite = outputs
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    exists = n < nodes
    choice += row * nodes
    tokens += row * nodes
    ancestors += row * ancestors_row
    path += row * (max_depth + 1)
    committed += row * committed_row
    token = tl.load(tokens + n, mask=exists, other=0)
    above = tl.maximum(tl.load(parent + row * parent_row + n, mask=exists, other=0), 0)
    follows = token == tl.load(choice + above, mask=exists, other=0)
    is_valid = tl.load(valid + row * valid_row + n, mask=exists, other=0) != 0
    agrees = exists & ((follows & is_valid) | (n == 0))

    # The nodes that disagree as a bitset, word by word: the sum of distinct bits is their union.
    bit = tl.where(agrees, 0, 1).to(tl.int64) << (n % 64)
    rejecting = tl.zeros([BLOCK_N], tl.int64)  # by node: those among its ancestors
    for word in range(tl.cdiv(nodes, 64)):
        wrong = tl.sum(tl.where(n // 64 == word, bit, 0), 0)
        rejecting |= tl.load(ancestors + n * ancestors_node + word, mask=exists, other=0) & wrong
    accepted = agrees & (rejecting == 0)

    level = tl.load(depth + row * depth_row + n, mask=exists, other=0)
    deepest = tl.max(tl.where(accepted, level * BLOCK_N + (BLOCK_N - 1 - n), -1), 0)  # of equal depth the first
    accepted_length = deepest // BLOCK_N
    last = BLOCK_N - 1 - deepest % BLOCK_N
    next_root = tl.load(choice + last)

    own_word = tl.load(ancestors + last * ancestors_node + n // 64, mask=exists, other=0)
    on_path = exists & ((((own_word >> (n % 64)) & 1) != 0) | (n == 0))
    value = tl.load(best + row * nodes + n, mask=on_path, other=0.0).to(tl.float32)
    all_finite = tl.min(tl.where(tl.abs(value) < float("inf"), 1, 0), 0)
    count = tl.where(tl.load(active + row) != 0, accepted_length + 1, 0)

    # Depths 0 … length are written by the path's nodes, those beyond by the lanes below: every entry once.
    tl.store(path + level, n.to(tl.int64), mask=on_path)
    tl.store(committed + level, token, mask=on_path & (n > 0))
    d = tl.arange(0, BLOCK_A)
    beyond = (d > accepted_length) & (d <= max_depth)
    tl.store(path + d, d.to(tl.int64), mask=beyond)
    tl.store(committed + d, tl.load(tokens + tl.minimum(d, nodes - 1), mask=beyond, other=0), mask=beyond)
    tl.store(committed, tl.where(all_finite != 0, count, -1).to(tl.int64))
    tl.store(committed + max_depth + 1, next_root)
    tl.store(length + row, accepted_length.to(tl.int64))
    tl.store(node + row, last.to(tl.int64))
    tl.store(bonus + row, next_root)
    tl.store(finite + row, all_finite.to(tl.int8))


def accept_greedy(
    choice: Tensor,
    best: Tensor,
    tokens: Tensor,
    parent: Tensor,
    depth: Tensor,
    ancestors: Tensor,
    valid: Tensor,
    active: Tensor,
    committed: Tensor,
    max_depth: int,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The accepted path of each row's tree, and what the row commits.

    Parents precede their children. Rows may have any stride, 0 too (a tree of fixed shape); the last stride is 1.

    Args:
        choice: ``[B, N]`` int64, argmax of the target's logits after each node.
        best: ``[B, N]`` of any float dtype, the logit of ``choice``; NaN or infinite where the logits are not finite.
        tokens: ``[B, N]`` int64, the drafted tokens, the root first.
        parent: ``[B, N]`` int32, −1 at the root.
        depth: ``[B, N]`` int32, at most ``max_depth``.
        ancestors: ``[B, N, W]`` int64 bitsets, a node itself included; padding may have none.
        valid: ``[B, N]`` bool, False at padding, which is never accepted.
        active: ``[B]`` bool, False for a row that commits nothing.
        committed: ``[B, D + 2 or more]`` int64, written to: the number of tokens that the row commits, accepted ones
            and the bonus (−1 if the logits on its path are not finite), the D drafted tokens at ``path[1:]``, the
            bonus token. Columns behind stay as they are.
        max_depth: D.
        mask: ``[B or 1, N, N]`` bool, ``ancestors`` unpacked, if the caller has it; the kernel does without.

    Returns:
        path ``[B, A]`` int64 node numbers by depth, entry d beyond the accepted length being d; length ``[B]`` int64
        drafted tokens accepted; node ``[B]`` int64 the last accepted; bonus ``[B]`` int64 the target's token after it;
        finite ``[B]`` bool, whether ``best`` is finite at all nodes of the path.
    """
    if why_not_triton(choice):
        return accept_greedy_reference(
            choice, best, tokens, parent, depth, ancestors, valid, active, committed, max_depth, mask
        )
    rows, nodes = tokens.shape
    assert committed.shape[1] >= max_depth + 2
    assert committed.stride(-1) == 1
    choice, best, tokens = choice.contiguous(), best.contiguous(), tokens.contiguous()
    parent, depth, ancestors, valid, active = (dense(each) for each in (parent, depth, ancestors, valid, active))
    path = torch.empty(rows, max_depth + 1, dtype=torch.int64, device=choice.device)
    length, node, bonus = (torch.empty(rows, dtype=torch.int64, device=choice.device) for _ in range(3))
    finite = torch.empty(rows, dtype=torch.bool, device=choice.device)
    inputs = (choice, best, tokens, parent, depth, ancestors, valid.view(torch.int8), active.view(torch.int8))
    outputs = (committed, path, length, node, bonus, finite.view(torch.int8))
    strides = (parent.stride(0), depth.stride(0), *ancestors.stride()[:2], valid.stride(0), committed.stride(0))
    tile = {"BLOCK_N": next_power(nodes, 64), "BLOCK_A": next_power(max_depth + 1, 16)}
    with torch.cuda.device_of(choice):
        _accept_greedy_kernel[(rows,)](
            inputs, outputs, nodes, max_depth, *strides, **tile, num_warps=1 if nodes <= 64 else 4
        )
    return path, length, node, bonus, finite


def advance_reference(
    lengths: Tensor,
    root: Tensor,
    feature: Tensor,
    features: Tensor,
    node: Tensor,
    bonus: Tensor,
    length: Tensor,
    active: Tensor,
) -> None:
    """The definition of :func:`advance`."""
    lengths += (length + 1) * active
    root.copy_(bonus)
    feature.copy_(features[torch.arange(len(node), device=node.device), node])


@jit(do_not_specialize="node bonus length")
def _advance_kernel(
    state, features, node, bonus, length, active, width, feature_row, features_row, features_node, BLOCK: tl.constexpr
):
    """One program per row and block of the feature; the first of a row also writes its length and root."""
    lengths, root, feature = state
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = features + row * features_row + tl.load(node + row) * features_node
    tl.store(feature + row * feature_row + f, tl.load(source + f, mask=f < width), mask=f < width)
    if tl.program_id(1) == 0:
        count = tl.where(tl.load(active + row) != 0, tl.load(length + row) + 1, 0)
        tl.store(lengths + row, tl.load(lengths + row) + count)
        tl.store(root + row, tl.load(bonus + row))


def advance(
    lengths: Tensor,
    root: Tensor,
    feature: Tensor,
    features: Tensor,
    node: Tensor,
    bonus: Tensor,
    length: Tensor,
    active: Tensor,
) -> None:
    """Move a step's state on to the accepted node, in place.

        lengths += (length + 1) · active;   root ← bonus;   feature ← features[node]

    Args:
        lengths: ``[B]`` int64, cached tokens per row; written to.
        root: ``[B]`` int64, the last committed token; written to.
        feature: ``[B, F]``, the last stride is 1; written to.
        features: ``[B, N, F]`` of the same dtype, of this step's nodes.
        node, bonus, length: ``[B]`` int64, from :func:`accept_greedy` or another verdict.
        active: ``[B]`` bool, False for a row whose length stays as it is.
    """
    if why_not_triton(features):
        advance_reference(lengths, root, feature, features, node, bonus, length, active)
        return
    (rows, _, width), block = features.shape, 1024
    assert feature.shape == (rows, width) and feature.dtype == features.dtype
    features, node, bonus = dense(features), dense(node), dense(bonus)
    length, active = dense(length), dense(active)
    assert feature.stride(1) == 1 and lengths.is_contiguous() and root.is_contiguous()
    with torch.cuda.device_of(features):
        verdict = (node, bonus, length, active.view(torch.int8))
        sizes = (width, feature.stride(0), *features.stride()[:2])
        _advance_kernel[(rows, -(-width // block))](
            (lengths, root, feature), features, *verdict, *sizes, BLOCK=block, num_warps=4
        )
