"""Sampling verification: which drafted tokens are accepted, and the bonus token drawn from the residual distribution.

    r ← p;  for each draw (x, q):  accept x iff u < r[x] / q[x],  else  r ← norm((r − q)+);  bonus ~ r

SpecInfer's multi-step speculative sampling (arXiv 2305.09781 §4.3) over an ordered list of draws. p is the target's
distribution with temperature, top-k, top-p and min-p. Three phases:

    A  the acceptance probability of every draw of every node; no uniform is needed, so all nodes run at once
    B  the walk down the tree, with the uniforms
    C  one draw from the residual of the node where the walk stopped, by inversion

Nothing of size V is written. p is computed where it is needed from the logits and a few numbers of each node, which
kernels/distribution.py finds in one pass over all nodes; where every draw is one-hot, the same launch does phase A.
Other draws have a kernel for phase A, which keeps each draw's acceptance probability, the mass of (r − q)+ after it
and, for draws without replacement, the mass that q had left: any r(x) follows from p(x), the earlier draws' q and
these. For phases B and C the vocabulary is cut into parts: programs of one launch walk down the tree, each for itself,
and sum the residual over their part; a second launch scans only the part in which the inverse of the cumulative sum
lies.

A q over a reduced vocabulary is not widened: a map from the target's tokens to the entries of q is made before the
launch, and looked up wherever q is read; a token without an entry has probability 0.

Draws are tested in their order, and uniforms are arguments, so that the kernels and the reference can be compared token
for token. Sums are taken in another order than PyTorch's: a uniform within rounding of a boundary may
fall on the other side.

Shape letters: B rows, N nodes, K draws of a node, V vocabulary, Vq that of q, R rows of q, A depth of the
deepest node + 1.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton
from draftsmith.kernels.distribution import (
    TargetNodes,
    at_node,
    distribution_reference,
    distribution_scalars,
    draws_at,
    p_at,
    pick,
    without_drawn,
)

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
    :func:`verify_logits`, p the target's distribution."""
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


def verify_logits_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    tokens: Tensor,
    child: Tensor,
    kind: Tensor,
    q_row: Tensor,
    q: Tensor | None,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    max_depth: int,
    ids: Tensor | None = None,
    uses: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The definition of :func:`verify_logits`."""
    p = distribution_reference(logits, temperature, top_k, top_p, min_p, uses)
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
    on_path = p[..., 0].isnan().gather(1, path.clamp(max=p.shape[1] - 1))  # [B, A]
    beyond = torch.arange(max_depth + 1, device=p.device) > length[:, None]
    return path, length, node, bonus, (~on_path | beyond).all(-1)


class _Drafts(NamedTuple):
    """What the kernels read of the draws; without q only tokens, children and acceptance probabilities.

    entry: ``[B or 1, R or 1, V]`` int32, the entry of q of each of the target's tokens, −1 where there is none; the map
        of the next row of q is ``entry_row`` further (0: the same map). None: q is over the target's vocabulary.
    acceptance, mass, scale: ``[B, N, K]``, of phase A.
    """

    tokens: Tensor
    child: Tensor
    acceptance: Tensor
    kind: Tensor | None = None
    q_row: Tensor | None = None
    q: Tensor | None = None
    entry: Tensor | None = None
    mass: Tensor | None = None
    scale: Tensor | None = None
    vocabulary: int = 0
    width: int = 0
    entry_row: int = 0


_SIZES = "N K R child_row child_node entry_batch"  # change from step to step

# In the kernels: ``first`` are the offsets of a row of the batch in q and in the entries; ``draws`` are a node's draws
# as vectors over turns: the turns, tokens, kinds and rows of q.


@jit
def _draws_of(drafts, batch, node, N, K, turns, child_row, child_node):
    """Whether each of a node's draws exists, and the draws."""
    child = drafts.child + batch * child_row + node * child_node
    exists, token = draws_at(drafts.tokens + batch * N, child, turns, K)
    if drafts.q is None:
        kind, q_row = token, token  # never read
    else:
        place = (batch * N + node) * K + turns
        kind = tl.load(drafts.kind + place, mask=exists, other=0).to(tl.int32)
        q_row = tl.load(drafts.q_row + place, mask=exists, other=-1)
    return exists, (turns, token, kind, q_row)


@jit
def _q_at(drafts, first, source, x, mask):
    """Row ``source`` of q at tokens x; 0 outside the mask, and where the token has no entry in a reduced vocabulary."""
    q = drafts.q + first[0] + source * drafts.width
    if drafts.entry is not None:
        entry = tl.load(drafts.entry + first[1] + source * drafts.entry_row + x, mask=mask, other=-1)
        values = tl.load(q + entry, mask=entry >= 0, other=0.0)
    else:
        values = tl.load(q + x, mask=mask, other=0.0)
    return values


@jit
def _remaining_q(drafts, first, x, draws, turn, source):
    """Row ``source`` of q at tokens x, without what the node drew from it before ``turn``."""
    turns, token, kind, q_row = draws
    earlier = (turns < turn) & (kind == 2) & (q_row == source)
    drawn = tl.sum(((x[:, None] == token[None, :]) & earlier[None, :]).to(tl.int32), 1) > 0
    return _q_at(drafts, first, source, x, (x < drafts.vocabulary) & (drawn == 0))


@jit
def _draw_distribution(drafts, first, x, draws, scale, turn):
    """The distribution of draw ``turn`` at tokens x. At a token drawn earlier without replacement it should be 0 and
    is not, which has no effect: r is 0 there, because that draw was rejected (r < q), so (r − q)+ is 0 either way."""
    turns, token, kind, q_row = draws
    if pick(kind, turns, turn) == 0:
        values = (x == pick(token, turns, turn)).to(tl.float32)
    else:
        values = _q_at(drafts, first, pick(q_row, turns, turn), x, x < drafts.vocabulary)
        values = values / pick(scale, turns, turn)
    return values


@jit
def _residual(target, node, drafts, first, x, draws, scale, mass, last):
    """r before draw ``last`` at tokens x. Turns of mass 0 are skipped: there is no draw, or r equals q."""
    r = p_at(target, node, x, x < drafts.vocabulary)
    for turn in range(last):
        draw_mass = pick(mass, draws[0], turn)
        if draw_mass > 0:
            r = tl.maximum(r - _draw_distribution(drafts, first, x, draws, scale, turn), 0.0) / draw_mass
    return r


@jit(do_not_specialize=_SIZES)
def _acceptances_kernel(
    target, drafts, N, K, R, child_row, child_node, entry_batch, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Phase A, any draws: one node per program, a pass over V for every draw (and one before it for the remaining
    mass of q of a draw without replacement)."""
    node = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(0).to(tl.int64)  # the axis that may be long
    turns = tl.arange(0, BLOCK_K)
    exists, draws = _draws_of(drafts, batch, node, N, K, turns, child_row, child_node)
    token, kind, q_row = draws[1], draws[2], draws[3]
    own = at_node(target, batch, node, N)
    first = (batch * R * drafts.width, batch * entry_batch)
    V = drafts.vocabulary
    acceptances = tl.zeros([BLOCK_K], tl.float32)
    mass = tl.zeros([BLOCK_K], tl.float32)
    scale = tl.full([BLOCK_K], 1.0, tl.float32)
    for turn in range(tl.max(tl.where(exists, turns + 1, 0), 0)):
        if pick(exists.to(tl.int32), turns, turn) != 0:
            # The first draw from a distribution is not divided by a sum: q is used as given.
            source = pick(q_row, turns, turn)
            earlier = (turns < turn) & exists & (kind == 2) & (q_row == source)
            if (pick(kind, turns, turn) == 2) & (tl.sum(earlier.to(tl.int32), 0) > 0):
                remaining = tl.zeros([BLOCK_V], tl.float32)
                for start in range(0, V, BLOCK_V):
                    remaining += _remaining_q(drafts, first, start + tl.arange(0, BLOCK_V), draws, turn, source)
                scale = tl.where(turns == turn, tl.sum(remaining, 0), scale)
            draw_token = pick(token, turns, turn)
            left = tl.zeros([BLOCK_V], tl.float32)
            r_at_token = tl.zeros([BLOCK_V], tl.float32)
            q_at_token = tl.zeros([BLOCK_V], tl.float32)
            for start in range(0, V, BLOCK_V):
                x = start + tl.arange(0, BLOCK_V)
                r = _residual(target, own, drafts, first, x, draws, scale, mass, turn)
                draw_q = _draw_distribution(drafts, first, x, draws, scale, turn)
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
    tl.store(drafts.acceptance + place, acceptances, mask=turns < K)
    tl.store(drafts.mass + place, mass, mask=turns < K)
    tl.store(drafts.scale + place, scale, mask=turns < K)


@jit
def _rejected(target, drafts, batch, node, N, K, R, child_row, child_node, entry_batch, turns):
    """What :func:`_weights` reads of a node where the walk stopped: its place, its draws, phase A's scales and masses,
    the number of draws. Of one-hot draws only the tokens are read."""
    exists, draws = _draws_of(drafts, batch, node, N, K, turns, child_row, child_node)
    scale = tl.zeros_like(turns).to(tl.float32)
    mass = scale
    if drafts.q is not None:
        place = (batch * N + node) * K + turns
        mass = tl.load(drafts.mass + place, mask=turns < K, other=0.0)
        scale = tl.load(drafts.scale + place, mask=turns < K, other=1.0)
    first = (batch * R * drafts.width, batch * entry_batch)
    count = tl.max(tl.where(exists, turns + 1, 0), 0)
    return at_node(target, batch, node, N), first, draws, scale, mass, count


@jit
def _weights(target, drafts, rejected, start, BLOCK_V: tl.constexpr):
    """The residual at tokens start, start + 1, … after all draws of a node were rejected."""
    node, first, draws, scale, mass, count = rejected
    x = start + tl.arange(0, BLOCK_V)
    if drafts.q is not None:
        weights = _residual(target, node, drafts, first, x, draws, scale, mass, count)
    else:
        weights = p_at(target, node, x, x < target.vocabulary)
        weights = without_drawn(weights, x, start, draws[1], draws[0], count, BLOCK_V)
    return weights.to(tl.float64)


@jit(do_not_specialize=_SIZES + " uniforms uniforms_row uniforms_node max_depth")
def _walk_kernel(
    target,
    drafts,
    uniforms,
    outputs,
    N,
    K,
    R,
    child_row,
    child_node,
    entry_batch,
    uniforms_row,
    uniforms_node,
    max_depth,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
):
    """Phase B, and phase C's sums: one program per row and part of the vocabulary, the first of which stores the walk.

    The sum of a part is float64, as the cumulative sum of the definition.
    """
    path, length_out, node_out, finite_out, sums = outputs
    part = tl.program_id(1)
    batch = tl.program_id(0).to(tl.int64)
    turns = tl.arange(0, BLOCK_K)
    node = batch * 0
    length = batch * 0
    normaliser = tl.load(target.scalars + batch * N * 4 + 3)  # NaN where the logits are not finite
    finite = normaliser == normaliser
    for depth in range(1, max_depth + 1):
        if length == depth - 1:
            acceptances = tl.load(drafts.acceptance + (batch * N + node) * K + turns, mask=turns < K, other=0.0)
            place = batch * uniforms_row + node * uniforms_node + turns
            uniform = tl.load(uniforms + place, mask=turns < K, other=1.0)
            first = tl.min(tl.where(uniform < acceptances, turns, BLOCK_K), 0)
            if first < BLOCK_K:
                node = tl.load(drafts.child + batch * child_row + node * child_node + first)
                length += 1
                normaliser = tl.load(target.scalars + (batch * N + node) * 4 + 3)
                finite = finite & (normaliser == normaliser)
        tl.store(path + batch * (max_depth + 1) + depth, tl.where(length == depth, node, depth), mask=part == 0)
    tl.store(path + batch * (max_depth + 1), batch * 0, mask=part == 0)
    tl.store(length_out + batch, length, mask=part == 0)
    tl.store(node_out + batch, node, mask=part == 0)
    tl.store(finite_out + batch, finite.to(tl.int8), mask=part == 0)

    rejected = _rejected(target, drafts, batch, node, N, K, R, child_row, child_node, entry_batch, turns)
    total = tl.zeros([BLOCK_V], tl.float64)
    for step in range(0, PART, BLOCK_V):
        total += _weights(target, drafts, rejected, part * PART + step, BLOCK_V)
    tl.store(sums + batch * tl.num_programs(1) + part, tl.sum(total, 0))


@jit(do_not_specialize=_SIZES + " bonus_row")
def _draw_kernel(
    target,
    drafts,
    tensors,
    N,
    K,
    R,
    child_row,
    child_node,
    entry_batch,
    bonus_row,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The draw of phase C: one row per program. The drawn token is the first whose cumulative sum exceeds u · total; it
    lies in the first part of the vocabulary whose cumulative sum does."""
    node_in, sums, bonus_uniform, bonus = tensors
    batch = tl.program_id(0).to(tl.int64)
    number, parts = tl.arange(0, BLOCK_P), tl.cdiv(target.vocabulary, PART)
    part_sums = tl.load(sums + batch * parts + number, mask=number < parts, other=0.0)
    after = tl.cumsum(part_sums, 0)
    threshold = tl.load(bonus_uniform + batch * bonus_row).to(tl.float64) * tl.max(after, 0)
    part = tl.min(tl.where((after > threshold) & (part_sums > 0), number, BLOCK_P), 0)
    bonus_token = batch * 0  # where the logits are not finite, no comparison is true
    if part < BLOCK_P:
        V, node = target.vocabulary, tl.load(node_in + batch)
        turns = tl.arange(0, BLOCK_K)
        rejected = _rejected(target, drafts, batch, node, N, K, R, child_row, child_node, entry_batch, turns)
        before = tl.sum(tl.where(number == part - 1, after, 0.0), 0)
        found = V + tl.zeros([BLOCK_V], tl.int32)  # by lane, the first token whose cumulative sum is above
        last = tl.zeros([BLOCK_V], tl.int32)  # by lane, the last token of positive weight
        for step in range(0, PART, BLOCK_V):
            start = part * PART + step
            x = start + tl.arange(0, BLOCK_V)
            weights = _weights(target, drafts, rejected, start, BLOCK_V)
            above = before + tl.cumsum(weights, 0) > threshold
            found = tl.minimum(found, tl.where(above & (weights > 0), x, V))
            last = tl.where(weights > 0, x, last)
            before += tl.sum(weights, 0)
        first = tl.min(found, 0)
        # The part's sum was taken in another order: its last token may miss the threshold by rounding.
        bonus_token = tl.where(first < V, first, tl.max(last, 0)).to(tl.int64)
    tl.store(bonus + batch, bonus_token)


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


PARTS = 64  # at most, of the vocabulary, for the draw of the bonus token


def verify_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    tokens: Tensor,
    child: Tensor,
    kind: Tensor,
    q_row: Tensor,
    q: Tensor | None,
    uniforms: Tensor,
    bonus_uniform: Tensor,
    max_depth: int,
    ids: Tensor | None = None,
    uses: tuple[bool, bool, bool] = (True, True, True),
    block: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Test each node's draws in order against the target's distribution; draw the bonus token from the residual.

    Args:
        logits: ``[B, N, V]`` the target's, of any float dtype, for the token after each node.
        temperature, top_p, min_p: ``[B]`` float32; temperature 0 is greedy, top-p 1 and min-p 0 keep all tokens.
        top_k: ``[B]`` int64; 0 keeps all.
        tokens: ``[B, N]`` int64 of the nodes.
        child: ``[B, N, K]`` int64 the node a draw leads to; −1 where there is none.
        kind: ``[B, N, K]`` integers: 0 one-hot, 1 i.i.d., 2 without replacement of what the node drew before from the
            same distribution.
        q_row: ``[B, N, K]`` int64 row of ``q``; unused for one-hot draws.
        q: ``[B, R, Vq]`` float32 the distributions drawn from; None if all draws are one-hot.
        uniforms: ``[B, N, K]`` float32 in [0, 1), fresh.
        bonus_uniform: ``[B]`` float32 in [0, 1), fresh.
        max_depth: of the deepest node (A − 1).
        ids: ``[B or 1, R or 1, Vq]`` int64 the target's token that each entry of ``q`` stands for, each at most once,
            −1 for padding of probability 0; None if they are the target's vocabulary (Vq = V).
        uses: whether some row has temperature 0, some row top-k or top-p, some row min-p; what is not in use is not
            read.
        block: tokens of the vocabulary per tile; 0 chooses.

    Returns:
        path ``[B, A]`` int64 (node numbers by depth; entry d beyond the accepted length is d), length ``[B]`` int64,
        the last accepted node ``[B]`` int64, the bonus token ``[B]`` int64, and finite ``[B]`` bool, False if the
        logits of a node of the path hold NaN or +∞, or −∞ only; the bonus token is then some token.
    """
    if why_not_triton(logits):
        draws = (tokens, child, kind, q_row, q, uniforms, bonus_uniform, max_depth, ids)
        return verify_logits_reference(logits, temperature, top_k, top_p, min_p, *draws, uses)
    rows, nodes, vocabulary = logits.shape
    max_draws, device = child.shape[2], logits.device
    logits = dense(logits)
    child, uniforms = (dense(child), dense(uniforms)) if max_draws else (child, uniforms)
    tokens, has_q = tokens.contiguous(), q is not None and max_draws > 0
    one_hot = (None, None) if has_q else (tokens, child)
    scalars, best, acceptance = distribution_scalars(
        logits, temperature, top_k, top_p, min_p, uses, *one_hot, block=block
    )
    target = TargetNodes(logits, scalars, best if uses[0] else None, vocabulary, *logits.stride()[:2])
    # One-hot draws cost little; a step, a prompt and a step of another tree then share a kernel.
    block_k = next_power(max(max_draws, 1), 1 if has_q else 16)
    # With q, the comparison of x with all draws is a tile of 4096 elements at most, which registers hold.
    most = max(64, min(1024, 4096 // block_k)) if has_q else 1024
    tile = {"BLOCK_K": block_k, "BLOCK_V": block or min(next_power(vocabulary), most), "num_warps": 8}
    drafts, num_q, entry_batch = _Drafts(tokens, child, acceptance), 1, 0
    if has_q and q is not None:
        acceptance, mass, scale = (torch.empty(child.shape, dtype=torch.float32, device=device) for _ in range(3))
        drafts = _Drafts(tokens, child, acceptance, kind.contiguous(), q_row.contiguous(), q.contiguous())
        _, num_q, width = q.shape
        drafts = drafts._replace(mass=mass, scale=scale, vocabulary=vocabulary, width=width)
        if ids is not None:
            entries = entries_of(ids, vocabulary)
            shared = zip(ids.shape, entries.stride(), strict=True)
            entry_batch, entry_row, _ = (0 if size == 1 else stride for size, stride in shared)
            drafts = drafts._replace(entry=entries, entry_row=entry_row)
    sizes = (nodes, max_draws, num_q, *child.stride()[:2], entry_batch)
    part = max(tile["BLOCK_V"], next_power(-(-vocabulary // PARTS)))
    parts = -(-vocabulary // part)
    sums = torch.empty(rows, parts, dtype=torch.float64, device=device)
    path = torch.empty(rows, max_depth + 1, dtype=torch.int64, device=device)
    length, node, bonus = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
    finite = torch.empty(rows, dtype=torch.int8, device=device)
    with torch.cuda.device_of(logits):
        if has_q:
            _acceptances_kernel[(rows, nodes)](target, drafts, *sizes, **tile)
        outputs, strides = (path, length, node, finite, sums), uniforms.stride()[:2]
        _walk_kernel[(rows, parts)](target, drafts, uniforms, outputs, *sizes, *strides, max_depth, PART=part, **tile)
        drawn = ((node, sums, bonus_uniform, bonus), *sizes, bonus_uniform.stride(0))
        _draw_kernel[(rows,)](target, drafts, *drawn, PART=part, BLOCK_P=next_power(parts), **tile)
    return path, length, node, bonus, finite.view(torch.bool)
