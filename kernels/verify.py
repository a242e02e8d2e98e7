"""Sampling verification: which drafted tokens are accepted, and the bonus token drawn from the residual distribution.

    r ← p;  for each draw (x, q):  accept x iff u < r[x] / q[x],  else  r ← norm((r − q)+);  bonus ~ r

SpecInfer's multi-step speculative sampling (arXiv 2305.09781 §4.3) over an ordered list of draws. Three phases:

    A  the acceptance probability of every draw of every node; no uniform is needed, so all nodes run at once
    B  the walk down the tree, with the uniforms
    C  one draw from the residual of the node where the walk stopped, by inversion

Phase A keeps only scalars of each node: each draw's acceptance probability, the mass of (r − q)+ after it and, for
draws without replacement, the mass that q had left. Any r(x) can be recomputed from p(x), the earlier draws' q and
these scalars, so nothing of size V is written. Where every draw is one-hot, the residual after some of them is p
without their tokens, and one pass over V gives all acceptance probabilities.

A q over a reduced vocabulary is not widened: a map from the target's tokens to the entries of q is made before the
launch, and looked up wherever q is read; a token without an entry has probability 0.

Draws are tested in their order, and uniforms are arguments, so that the kernel and the reference can be compared token
for token. Sums are taken in another order than PyTorch's: a uniform within rounding of a boundary may
fall on the other side.

Shape letters: B rows, N nodes, K draws of a node, V vocabulary, Vq that of q, R rows of q, A depth of the
deepest node + 1.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

import torch
from torch import Tensor

from draftsmith.kernels.backend import constexpr, jit, next_power, tl, why_not_triton

# A draw's kind, written as numbers in the kernels: deterministic; independent; excluding the tokens that its node drew
# before from the same distribution.
ONE_HOT, IID, WITHOUT_REPLACEMENT = 0, 1, 2


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index per row by inversion of the cumulative sum: ``[B, V]`` weights that need not sum to 1, ``[B]`` uniforms
    in [0, 1) → ``[B]``. An index of weight 0 is never returned."""
    sums = weights.double().cumsum(-1)
    return (sums > uniform.double()[:, None] * sums[:, -1:]).int().argmax(-1)


def acceptances_reference(
    p: Tensor, tokens: Tensor, child: Tensor, kind: Tensor, q_row: Tensor, q: Tensor | None, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Phase A: the acceptance probability ``[B, N, K]`` of each draw, given that those before it were rejected (0 where
    there is no draw), and the residual distribution ``[B, N, V]`` after all of them. Arguments as in
    :func:`verify_sample`."""
    r = p
    if q is not None and ids is not None:  # over the target's vocabulary
        q = widened(q, ids, p.shape[-1])
    acceptances: list[Tensor] = []
    drawn: list[tuple[Tensor, Tensor, Tensor]] = []  # of earlier draws: token, row of q, whether without replacement
    for turn in range(child.shape[2]):
        exists, draw_kind, source = child[..., turn] >= 0, kind[..., turn], q_row[..., turn]
        token = tokens.gather(1, child[..., turn].clamp(min=0))[..., None]  # [B, N, 1]
        if q is None:
            acceptance, remaining = r.gather(-1, token)[..., 0], r.scatter(-1, token, 0.0)
        else:
            one_hot = torch.zeros_like(p).scatter_(-1, token, 1.0)
            draw_q = q.gather(1, source[..., None].expand(-1, -1, p.shape[-1]))
            shrinks = exists & (draw_kind == WITHOUT_REPLACEMENT)
            for earlier, earlier_row, earlier_shrinks in drawn:
                excluded = shrinks & earlier_shrinks & (earlier_row == source)
                draw_q = torch.where(excluded[..., None], draw_q.scatter(-1, earlier, 0.0), draw_q)
            if drawn:
                draw_q = torch.where(shrinks[..., None], draw_q / draw_q.sum(-1, keepdim=True), draw_q)
            drawn.append((token, source, shrinks))
            draw_q = torch.where((draw_kind == ONE_HOT)[..., None], one_hot, draw_q)
            acceptance = (r.gather(-1, token) / draw_q.gather(-1, token))[..., 0].clamp(max=1)
            remaining = (r - draw_q).clamp(min=0)
        mass = remaining.sum(-1, keepdim=True)
        acceptance = torch.where(mass[..., 0] > 0, acceptance, 1.0)  # r is q: accept, despite rounding
        acceptances.append(torch.where(exists, acceptance, 0.0))
        r = torch.where(exists[..., None] & (mass > 0), remaining / mass, r)
    return torch.stack(acceptances, -1) if acceptances else p.new_zeros(child.shape), r


def verify_sample_reference(
    p: Tensor, tokens: Tensor, child: Tensor, kind: Tensor, q_row: Tensor, q: Tensor | None, uniforms: Tensor,
    bonus_uniform: Tensor, max_depth: int, ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The definition of :func:`verify_sample`."""
    acceptance, residual = acceptances_reference(p, tokens, child, kind, q_row, q, ids)
    accepted = uniforms < acceptance
    node = torch.zeros(len(p), dtype=torch.int64, device=p.device)
    length = torch.zeros_like(node)
    path = torch.arange(max_depth + 1, device=p.device).repeat(len(p), 1)
    if child.shape[2]:
        turn = accepted.int().argmax(-1, keepdim=True)  # the first
        first = torch.where(accepted.any(-1), child.gather(-1, turn)[..., 0], -1)
        for depth in range(1, max_depth + 1):
            child_node = first.gather(1, node[:, None])[:, 0]
            advances = (child_node >= 0) & (length == depth - 1)
            node, length = torch.where(advances, child_node, node), length + advances
            path[:, depth] = torch.where(advances, node, depth)
    bonus = draw(residual[torch.arange(len(p), device=p.device), node], bonus_uniform)
    return path, length, node, bonus


@jit
def _pick(values, turns, turn):
    """Entry ``turn`` of a vector held in registers."""
    return tl.sum(tl.where(turns == turn, values, 0), 0)


@jit
def _draws_of(tokens, child, kind, q_row, batch, node, N, K, turns):
    """A node's draws as vectors over ``turns``: whether it exists, its token, kind and row of q."""
    place = (batch * N + node) * K + turns
    child_node = tl.load(child + place, mask=turns < K, other=-1)
    exists = child_node >= 0
    token = tl.load(tokens + batch * N + child_node, mask=exists, other=-1)
    draw_kind = tl.load(kind + place, mask=exists, other=0).to(tl.int32)
    draw_q_row = tl.load(q_row + place, mask=exists, other=-1)
    return exists, token, draw_kind, draw_q_row


@jit
def _q_at(q, entry, source, x, mask, V, VQ, entry_row, HAS_IDS: constexpr):
    """Row ``source`` of q at tokens x; 0 outside the mask, and where the token has no entry in a reduced vocabulary.

    entry: the row's map of the target's tokens to entries of q, −1 where there is none; the map of the next row of q is
    ``entry_row`` further (0: the same map).
    """
    if HAS_IDS:
        q_entry = tl.load(entry + source * entry_row + x, mask=mask, other=-1)
        values = tl.load(q + source * VQ + q_entry, mask=q_entry >= 0, other=0.0)
    else:
        values = tl.load(q + source * V + x, mask=mask, other=0.0)
    return values


@jit
def _remaining_q(q, entry, x, token, kind, q_row, turns, turn, source, V, VQ, entry_row, HAS_IDS: constexpr):
    """Row ``source`` of q at tokens x, without what the node drew from it before ``turn``."""
    earlier = (turns < turn) & (kind == 2) & (q_row == source)
    drawn = tl.sum(((x[:, None] == token[None, :]) & earlier[None, :]).to(tl.int32), 1) > 0
    return _q_at(q, entry, source, x, (x < V) & (drawn == 0), V, VQ, entry_row, HAS_IDS)


@jit
def _draw_distribution(q, entry, x, token, kind, q_row, scale, turns, turn, V, VQ, entry_row, HAS_IDS: constexpr):
    """The distribution of draw ``turn`` at tokens x. At a token drawn earlier without replacement it should be 0 and
    is not, which has no effect: r is 0 there, because that draw was rejected (r < q), so (r − q)+ is 0 either way."""
    if _pick(kind, turns, turn) == 0:
        values = (x == _pick(token, turns, turn)).to(tl.float32)
    else:
        values = _q_at(q, entry, _pick(q_row, turns, turn), x, x < V, V, VQ, entry_row, HAS_IDS)
        values = values / _pick(scale, turns, turn)
    return values


@jit
def _residual(
    p, q, entry, x, token, kind, q_row, scale, mass, turns, last, V, VQ, entry_row, HAS_IDS: constexpr
):  # fmt: skip
    """r before draw ``last`` at tokens x. Turns of mass 0 are skipped: there is no draw, or r equals q."""
    r = tl.load(p + x, mask=x < V, other=0.0)
    for turn in range(last):
        draw_mass = _pick(mass, turns, turn)
        if draw_mass > 0:
            draw_q = _draw_distribution(q, entry, x, token, kind, q_row, scale, turns, turn, V, VQ, entry_row, HAS_IDS)
            r = tl.maximum(r - draw_q, 0.0) / draw_mass
    return r


@jit
def _acceptances_kernel(
    p, tokens, child, kind, q_row, q, entry, acceptance, mass_out, scale_out, N, K, R, V, VQ, entry_batch, entry_row,
    HAS_IDS: constexpr, BLOCK_K: constexpr, BLOCK_V: constexpr,
):  # fmt: skip
    """Phase A, any draws: one node per program, a pass over V for every draw (and one before it for the remaining
    mass of q of a draw without replacement)."""
    node = tl.program_id(1)
    batch = tl.program_id(0).to(tl.int64)  # the axis that may be long
    turns = tl.arange(0, BLOCK_K)
    exists, token, draw_kind, draw_q_row = _draws_of(tokens, child, kind, q_row, batch, node, N, K, turns)
    p += (batch * N + node) * V
    q += batch * R * VQ
    entry += batch * entry_batch
    acceptances = tl.zeros([BLOCK_K], tl.float32)
    mass = tl.zeros([BLOCK_K], tl.float32)
    scale = tl.full([BLOCK_K], 1.0, tl.float32)
    draws = tl.max(tl.where(exists, turns + 1, 0), 0)
    for turn in range(draws):
        if _pick(exists.to(tl.int32), turns, turn) != 0:
            # The first draw from a distribution is not divided by a sum: q is used as given.
            source = _pick(draw_q_row, turns, turn)
            earlier = (turns < turn) & exists & (draw_kind == 2) & (draw_q_row == source)
            if (_pick(draw_kind, turns, turn) == 2) & (tl.sum(earlier.to(tl.int32), 0) > 0):
                remaining = tl.zeros([BLOCK_V], tl.float32)
                for start in range(0, V, BLOCK_V):
                    x = start + tl.arange(0, BLOCK_V)
                    remaining += _remaining_q(
                        q, entry, x, token, draw_kind, draw_q_row, turns, turn, source, V, VQ, entry_row, HAS_IDS
                    )  # fmt: skip
                scale = tl.where(turns == turn, tl.sum(remaining, 0), scale)
            draw_token = _pick(token, turns, turn)
            left = tl.zeros([BLOCK_V], tl.float32)
            r_at_token = tl.zeros([BLOCK_V], tl.float32)
            q_at_token = tl.zeros([BLOCK_V], tl.float32)
            for start in range(0, V, BLOCK_V):
                x = start + tl.arange(0, BLOCK_V)
                r = _residual(
                    p, q, entry, x, token, draw_kind, draw_q_row, scale, mass, turns, turn, V, VQ, entry_row, HAS_IDS
                )  # fmt: skip
                draw_q = _draw_distribution(
                    q, entry, x, token, draw_kind, draw_q_row, scale, turns, turn, V, VQ, entry_row, HAS_IDS
                )  # fmt: skip
                left += tl.maximum(r - draw_q, 0.0)
                r_at_token += tl.where(x == draw_token, r, 0.0)
                q_at_token += tl.where(x == draw_token, draw_q, 0.0)
            total = tl.sum(left, 0)
            r_x, q_x = tl.sum(r_at_token, 0), tl.sum(q_at_token, 0)
            # r(x) < q(x) is tested first, so that a draw of probability 0 divides by nothing.
            ratio = tl.where(r_x < q_x, r_x / tl.where(q_x > 0, q_x, 1.0), tl.where(r_x > 0, 1.0, 0.0))
            acceptances = tl.where(turns == turn, tl.where(total > 0, ratio, 1.0), acceptances)
            mass = tl.where(turns == turn, total, mass)
    place = (batch * N + node) * K + turns
    tl.store(acceptance + place, acceptances, mask=turns < K)
    tl.store(mass_out + place, mass, mask=turns < K)
    tl.store(scale_out + place, scale, mask=turns < K)


@jit
def _one_hot_acceptances_kernel(
    p, tokens, child, kind, q_row, acceptance, N, K, V, BLOCK_K: constexpr, BLOCK_V: constexpr
):  # fmt: skip
    """Phase A where all draws are one-hot: one node per program, one pass over V.

    The residual after the first k draws is p without their tokens. Its mass is that of the undrawn tokens plus that of
    the later draws' tokens, a sum without cancellation.
    """
    node = tl.program_id(1)
    batch = tl.program_id(0).to(tl.int64)  # the axis that may be long
    turns = tl.arange(0, BLOCK_K)
    exists, token, _, _ = _draws_of(tokens, child, kind, q_row, batch, node, N, K, turns)
    if tl.max(exists.to(tl.int32), 0) > 0:
        p += (batch * N + node) * V
        undrawn = tl.zeros([BLOCK_V], tl.float32)
        for start in range(0, V, BLOCK_V):
            x = start + tl.arange(0, BLOCK_V)
            drawn = tl.sum((x[:, None] == token[None, :]).to(tl.int32), 1) > 0  # no draw: token −1
            undrawn += tl.load(p + x, mask=(x < V) & (drawn == 0), other=0.0)
        same = (token[:, None] == token[None, :]) & exists[:, None]
        repeated = tl.sum((same & (turns[None, :] < turns[:, None])).to(tl.int32), 1) > 0  # a token tested before
        p_token = tl.load(p + token, mask=exists & (repeated == 0), other=0.0)
        residual = tl.sum(undrawn, 0)
        mass_after = residual + tl.sum(tl.where(turns[None, :] > turns[:, None], p_token[None, :], 0.0), 1)  # [BLOCK_K]
        before = tl.where(
            tl.sum((exists[None, :] & (turns[None, :] < turns[:, None])).to(tl.int32), 1) > 0, p_token + mass_after, 1.0
        )
        acceptances = tl.where(mass_after > 0, tl.minimum(p_token / tl.where(before > 0, before, 1.0), 1.0), 1.0)
        tl.store(acceptance + (batch * N + node) * K + turns, tl.where(exists, acceptances, 0.0), mask=turns < K)
    else:
        tl.store(acceptance + (batch * N + node) * K + turns, tl.zeros([BLOCK_K], tl.float32), mask=turns < K)


@jit
def _weights(
    p, q, entry, x, V, VQ, entry_row, token, kind, q_row, scale, mass, turns, draws, HAS_Q: constexpr,
    HAS_IDS: constexpr,
):  # fmt: skip
    """The residual at tokens x after all draws of a node were rejected."""
    if HAS_Q:
        weights = _residual(
            p, q, entry, x, token, kind, q_row, scale, mass, turns, draws, V, VQ, entry_row, HAS_IDS
        )  # fmt: skip
    else:
        drawn = tl.sum((x[:, None] == token[None, :]).to(tl.int32), 1) > 0
        weights = tl.load(p + x, mask=(x < V) & (drawn == 0), other=0.0)
    return weights


@jit
def _walk_and_draw_kernel(
    p, tokens, child, kind, q_row, q, entry, acceptance, mass_in, scale_in, uniforms, bonus_uniform, path, length_out,
    node_out, bonus, N, K, R, V, VQ, entry_batch, entry_row, max_depth, HAS_Q: constexpr, HAS_IDS: constexpr,
    BLOCK_K: constexpr, BLOCK_V: constexpr,
):  # fmt: skip
    """Phases B and C: one row per program."""
    batch = tl.program_id(0).to(tl.int64)
    turns = tl.arange(0, BLOCK_K)
    node = batch * 0
    length = batch * 0
    for depth in range(1, max_depth + 1):
        place = (batch * N + node) * K + turns
        acceptances = tl.load(acceptance + place, mask=turns < K, other=0.0)
        uniform = tl.load(uniforms + place, mask=turns < K, other=1.0)
        first = tl.min(tl.where(uniform < acceptances, turns, BLOCK_K), 0)
        advances = (first < BLOCK_K) & (length == depth - 1)
        child_node = tl.load(child + (batch * N + node) * K + first, mask=advances, other=0)
        node = tl.where(advances, child_node, node)
        length += advances.to(tl.int64)
        tl.store(path + batch * (max_depth + 1) + depth, tl.where(advances, node, depth))
    tl.store(path + batch * (max_depth + 1), batch * 0)
    tl.store(length_out + batch, length)
    tl.store(node_out + batch, node)

    exists, token, draw_kind, draw_q_row = _draws_of(tokens, child, kind, q_row, batch, node, N, K, turns)
    mass = tl.zeros([BLOCK_K], tl.float32)
    scale = mass
    if HAS_Q:
        place = (batch * N + node) * K + turns
        mass = tl.load(mass_in + place, mask=turns < K, other=0.0)
        scale = tl.load(scale_in + place, mask=turns < K, other=1.0)
        q += batch * R * VQ
        entry += batch * entry_batch
    draws = tl.max(tl.where(exists, turns + 1, 0), 0)
    p += (batch * N + node) * V
    total = tl.zeros([BLOCK_V], tl.float64)
    for start in range(0, V, BLOCK_V):
        x = start + tl.arange(0, BLOCK_V)
        total += _weights(
            p, q, entry, x, V, VQ, entry_row, token, draw_kind, draw_q_row, scale, mass, turns, draws, HAS_Q, HAS_IDS
        ).to(tl.float64)  # fmt: skip
    threshold = tl.load(bonus_uniform + batch).to(tl.float64) * tl.sum(total, 0)
    before = tl.sum(total, 0) * 0  # the sum of the blocks before
    first_above = V + tl.zeros([BLOCK_V], tl.int32)  # by lane, the first token whose cumulative sum is above it
    for start in range(0, V, BLOCK_V):
        x = start + tl.arange(0, BLOCK_V)
        w = _weights(
            p, q, entry, x, V, VQ, entry_row, token, draw_kind, draw_q_row, scale, mass, turns, draws, HAS_Q, HAS_IDS
        ).to(tl.float64)  # fmt: skip
        sums = before + tl.cumsum(w, 0)
        first_above = tl.minimum(first_above, tl.where((sums > threshold) & (w > 0), x, V))
        before += tl.sum(w, 0)
    bonus_token = tl.min(first_above, 0)
    tl.store(bonus + batch, tl.where(bonus_token < V, bonus_token, 0).to(tl.int64))


def entries_of(ids: Tensor, vocabulary: int) -> Tensor:
    """The entry of each of the target's tokens in a reduced vocabulary: ``ids [.., Vq]`` int64 (−1: none) → ``[.., V]``
    int32, −1 for tokens without one."""
    entries = torch.full((*ids.shape[:-1], vocabulary + 1), -1, dtype=torch.int32, device=ids.device)
    numbers = torch.arange(ids.shape[-1], dtype=torch.int32, device=ids.device).expand_as(ids)
    return entries.scatter_(-1, torch.where(ids < 0, vocabulary, ids), numbers)[..., :vocabulary]


def widened(q: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """A distribution over a reduced vocabulary, ``[B, R, Vq]`` with ``ids [B or 1, R or 1, Vq]`` (−1: no token), over
    the target's: ``[B, R, V]``."""
    wide = q.new_zeros(*q.shape[:2], vocabulary + 1)
    return wide.scatter_(2, torch.where(ids < 0, vocabulary, ids).expand_as(q), q)[..., :vocabulary]


def verify_tile(max_draws: int, vocabulary: int) -> dict[str, int]:
    """The kernels' block sizes for at most ``max_draws`` draws of a node (K)."""
    block_k = next_power(max_draws)
    # The comparison of x with all draws is a tile of 8192 elements at most.
    return {
        "BLOCK_K": block_k,
        "BLOCK_V": min(next_power(vocabulary), max(64, min(2048, 8192 // block_k))),
        "num_warps": 8,
    }


def verify_sample(
    p: Tensor, tokens: Tensor, child: Tensor, kind: Tensor, q_row: Tensor, q: Tensor | None, uniforms: Tensor,
    bonus_uniform: Tensor, max_depth: int, block: int = 0, ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Test each node's draws in order against the target's distribution; draw the bonus token from the residual.

    Args:
        p: ``[B, N, V]`` float32 the target's distribution after each node.
        tokens: ``[B, N]`` int64 of the nodes.
        child: ``[B, N, K]`` int64 the node a draw leads to; −1 where there is none.
        kind: ``[B, N, K]`` integers: 0 one-hot, 1 i.i.d., 2 without replacement of what the node drew before from the
            same distribution.
        q_row: ``[B, N, K]`` int64 row of ``q``; unused for one-hot draws.
        q: ``[B, R, Vq]`` float32 the distributions drawn from; None if all draws are one-hot.
        uniforms: ``[B, N, K]`` float32 in [0, 1), fresh.
        bonus_uniform: ``[B]`` float32 in [0, 1), fresh.
        max_depth: of the deepest node (A − 1).
        block: tokens of the vocabulary per tile; 0 chooses.
        ids: ``[B or 1, R or 1, Vq]`` int64 the target's token that each entry of ``q`` stands for, each at most once,
            −1 for padding of probability 0; None if they are the target's vocabulary (Vq = V).

    Returns:
        path ``[B, A]`` (node numbers by depth; entry d beyond the accepted length is d), length ``[B]``, the last
        accepted node ``[B]`` and the bonus token ``[B]``, all int64.
    """
    if why_not_triton(p):
        return verify_sample_reference(p, tokens, child, kind, q_row, q, uniforms, bonus_uniform, max_depth, ids)
    rows, nodes, vocabulary = p.shape
    max_draws = child.shape[2]
    p, tokens, child, kind, q_row, uniforms, bonus_uniform = (
        part.contiguous() for part in (p, tokens, child, kind, q_row, uniforms, bonus_uniform)
    )
    tile = verify_tile(max(max_draws, 1), vocabulary)
    if block:
        tile["BLOCK_V"] = block
    has_q = q is not None
    distributions = p if q is None else q.contiguous()  # p in place of q: never read
    has_ids = has_q and ids is not None
    entries, strides = distributions, [0, 0]  # as above
    if has_q and ids is not None:
        entries = entries_of(ids, vocabulary)
        strides = [0 if size == 1 else stride for size, stride in zip(ids.shape, entries.stride(), strict=True)][:2]
    sizes = (nodes, max_draws, distributions.shape[1], vocabulary, distributions.shape[2], *strides)
    acceptance = torch.empty(child.shape, dtype=torch.float32, device=p.device)
    mass, scale = torch.empty_like(acceptance), torch.empty_like(acceptance)
    path = torch.empty(rows, max_depth + 1, dtype=torch.int64, device=p.device)
    length, node, bonus = torch.empty(3, rows, dtype=torch.int64, device=p.device)
    with torch.cuda.device_of(p):
        if max_draws and has_q:
            _acceptances_kernel[(rows, nodes)](
                p, tokens, child, kind, q_row, distributions, entries, acceptance, mass, scale, *sizes, HAS_IDS=has_ids,
                **tile,
            )  # fmt: skip
        elif max_draws:
            _one_hot_acceptances_kernel[(rows, nodes)](
                p, tokens, child, kind, q_row, acceptance, nodes, max_draws, vocabulary, **tile
            )
        _walk_and_draw_kernel[(rows,)](
            p, tokens, child, kind, q_row, distributions, entries, acceptance, mass, scale, uniforms, bonus_uniform,
            path, length, node, bonus, *sizes, max_depth, HAS_Q=has_q, HAS_IDS=has_ids, **tile,
        )  # fmt: skip
    return path, length, node, bonus
