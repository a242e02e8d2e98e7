"""Growth of a dynamic tree (EAGLE-2, arXiv 2406.16858 §4): what stands between two forward passes of the drafter.

    expansion    value of a candidate = its node's value + min(log q, 0), −∞ if log q is NaN
                 frontier: the k new candidates of highest value, the next to be run
    re-ranking   the tree: the root and the N − 1 candidates of highest value of all levels, by number

Of equal values the lower number counts more. :func:`grow_level` replaces a dozen small operations and
:func:`select_tree` twenty, of which a GPU feels the launches more than the work. One program per row: a level has k²
candidates.

Shape letters: B rows, n nodes just run, k tokens that each proposes and nodes of a frontier, M candidates (root
included), N nodes of the tree, R nodes that are run, W and V 64-bit words.
"""
# ruff: noqa: ANN001, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.backend import jit, next_power, tl, why_not_triton


class Candidates(NamedTuple):
    """The candidates of each row, numbered level by level, ``[B, M]`` each: tokens int64, values (Σ log q along the
    path) float32, and the numbers of their parents int64. Number 0 is the root, its own parent, of value 0."""

    tokens: Tensor
    values: Tensor
    parents: Tensor


class Level(NamedTuple):
    """The nodes of a level that are run, as :func:`grow_level` takes and returns them: tokens ``[B, n]`` int64; their
    numbers among the candidates ``[B, n]`` int64; their values ``[B, n]`` float32; ancestor bitsets ``[B, n, W]`` int64
    over the nodes that are run, a node itself included; ``above [B, n]`` int64: the node of the level before that
    proposed each."""

    tokens: Tensor
    numbers: Tensor
    values: Tensor
    ancestors: Tensor
    above: Tensor


def descending(values: Tensor) -> Tensor:
    """Order ``[B, M]`` from the highest value down, of equal ones the first number first."""
    return values.sort(dim=1, descending=True, stable=True).indices


def grow_level_reference(
    level: Level, proposed: Tensor, log_q: Tensor, candidates: Candidates, count: int, run_bits: Tensor
) -> Level:
    """The definition of :func:`grow_level`."""
    log_q = log_q.float().clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    values, k = (level.values[..., None] + log_q).flatten(1), log_q.shape[2]
    if count == 1:
        for each, own in zip(candidates, (level.tokens, level.values, level.numbers), strict=True):
            each[:, :1] = own
    new = slice(count, count + values.shape[1])
    candidates.tokens[:, new], candidates.values[:, new] = proposed.flatten(1), values
    candidates.parents[:, new] = level.numbers[..., None].expand_as(log_q).flatten(1)
    best = descending(values)[:, : len(run_bits)] if len(run_bits) else level.numbers[:, :0]
    above = best // k
    ancestors = level.ancestors.gather(1, above[..., None].expand(-1, -1, run_bits.shape[1])) | run_bits
    return Level(proposed.flatten(1).gather(1, best), best + count, values.gather(1, best), ancestors, above)


@jit(do_not_specialize="count first nodes k frontier candidates_row")
def _grow_kernel(
    level,
    proposed,
    log_q,
    candidates,
    found,
    count,
    first,
    nodes,
    k,
    frontier,
    candidates_row,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row, one lane per new candidate; the frontier is found one by one."""
    tokens, numbers, values, ancestors = level
    all_tokens, all_values, all_parents = candidates
    next_tokens, next_numbers, next_values, next_ancestors, next_above = found
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < nodes * k
    own = tl.load(log_q + row * nodes * k + i, mask=exists, other=0.0).to(tl.float32)
    own = tl.where(own == own, tl.where(own > 0, 0.0, own), float("-inf"))
    value = tl.load(values + row * nodes + i // k, mask=exists, other=0.0) + own
    token = tl.load(proposed + row * nodes * k + i, mask=exists, other=0)
    place = row * candidates_row + count + i
    if count == 1:
        tl.store(all_tokens + row * candidates_row, tl.load(tokens + row))
        tl.store(all_values + row * candidates_row, 0.0)
        tl.store(all_parents + row * candidates_row, 0)
    tl.store(all_tokens + place, token, mask=exists)
    tl.store(all_values + place, value, mask=exists)
    tl.store(all_parents + place, tl.load(numbers + row * nodes + i // k, mask=exists, other=0), mask=exists)
    left = exists
    for j in range(frontier):
        best = tl.max(tl.where(left, value, float("-inf")), 0)
        at = tl.min(tl.where(left & (value == best), i, BLOCK), 0)
        left = left & (i != at)
        to = row * frontier + j
        tl.store(next_tokens + to, tl.load(proposed + row * nodes * k + at))
        tl.store(next_numbers + to, (count + at).to(tl.int64))
        tl.store(next_values + to, best)
        tl.store(next_above + to, (at // k).to(tl.int64))
        number = first + j
        for word in tl.static_range(WORDS):
            bit = tl.where(number // 64 == word, 1, 0).to(tl.int64) << (number % 64)
            seen = tl.load(ancestors + (row * nodes + at // k) * WORDS + word)
            tl.store(next_ancestors + to * WORDS + word, seen | bit)


def grow_level(
    level: Level, proposed: Tensor, log_q: Tensor, candidates: Candidates, count: int, run_bits: Tensor, first: int
) -> Level:
    """Write what a level's nodes propose to the candidates, and find the next level's frontier.

    Args:
        level: the nodes just run, n of them.
        proposed: ``[B, n, k]`` int64 tokens.
        log_q: ``[B, n, k]`` of any float dtype; −∞ and NaN: not a candidate, whose value is −∞.
        candidates: written to at ``count`` … ``count + n · k − 1``; after the root's pass (n = 1) at 0, too.
        count: candidates so far, the root included.
        run_bits: ``[k, W]`` int64, the own bits of the frontier's nodes; ``[0, W]`` after the last level.
        first: the first number of these nodes among those that are run.

    Returns:
        The k candidates of highest value; none after the last level.
    """
    if why_not_triton(log_q):
        return grow_level_reference(level, proposed, log_q, candidates, count, run_bits)
    (rows, nodes, k), (frontier, words) = log_q.shape, run_bits.shape
    proposed, log_q = proposed.contiguous(), log_q.contiguous()
    given = tuple(each.contiguous() for each in level[:4])
    tokens, numbers, above = (proposed.new_empty(rows, frontier) for _ in range(3))
    bits = proposed.new_empty(rows, frontier, words)
    found = Level(tokens, numbers, level.values.new_empty(rows, frontier), bits, above)
    sizes = (count, first, nodes, k, frontier, candidates.tokens.stride(0))
    block = {"WORDS": words, "BLOCK": next_power(nodes * k, 32), "num_warps": 4}
    with torch.cuda.device_of(log_q):
        _grow_kernel[(rows,)](given, proposed, log_q, tuple(candidates), tuple(found), *sizes, **block)
    return found


def select_tree_reference(
    candidates: Candidates, depths: Tensor, own_bits: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The definition of :func:`select_tree`."""
    (tokens, values, parents), nodes = candidates, len(own_bits)
    rows, count = tokens.shape
    order = descending(values)[:, :nodes]
    # Padding, whose values are −∞, gets numbers beyond the candidates'.
    kept = values.gather(1, order) > -torch.inf
    key = torch.where(kept, order, count).sort(1).values
    valid, chosen = key < count, key.clamp(max=count - 1)
    parent = torch.where(valid, torch.searchsorted(key, parents.gather(1, chosen)), 0)
    depth = torch.where(valid, depths[chosen], 1)
    above, ancestors = parent, own_bits.expand(rows, -1, -1)
    for _ in range(max_depth.bit_length()):  # in round i each node takes those of its 2^i-th ancestor
        ancestors = ancestors | ancestors.gather(1, above[..., None].expand_as(ancestors))
        above = above.gather(1, above)
    parent = parent.int()
    parent[:, 0].fill_(-1)
    acceptance = torch.where(valid, values.gather(1, chosen).exp(), 0.0)
    return tokens.gather(1, chosen), parent, depth, ancestors, valid, acceptance


@jit(do_not_specialize="count nodes max_depth candidates_row")
def _select_kernel(
    candidates,
    depths,
    found,
    scratch,
    count,
    nodes,
    max_depth,
    candidates_row,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per row, one lane per candidate. ``scratch [B, M]`` int32: each candidate's place in the tree."""
    all_tokens, all_values, all_parents = candidates
    tokens, parent, depth, ancestors, valid, acceptance = found
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    exists = i < count
    value = tl.load(all_values + row * candidates_row + i, mask=exists, other=float("-inf"))
    # A number whose order is that of the values, of equal ones the first first: the bits of a float that is not NaN
    # order as integers do, negative ones backwards; values are at most 0, and −0 is 0.
    bits = tl.where(value == 0, 0, tl.abs(value).to(tl.int32, bitcast=True)).to(tl.int64)
    key = -(bits << 32) - i.to(tl.int64)
    kept = exists & (value > float("-inf"))
    low = tl.min(tl.where(kept, key, 0), 0)
    high = low * 0  # the root's
    # The least key of which no more than N are at or above.
    for _ in range(64):
        middle = low + ((high - low) >> 1)
        many = tl.sum(tl.where(kept & (key >= middle), 1, 0), 0)
        low = tl.where(many > nodes, middle + 1, low)
        high = tl.where(many > nodes, high, middle)
    kept = kept & (key >= high)
    place = tl.cumsum(tl.where(kept, 1, 0), 0) - 1
    total = tl.sum(tl.where(kept, 1, 0), 0)
    tl.store(scratch + row * candidates_row + i, place, mask=kept)
    level = tl.load(depths + i, mask=kept, other=0)
    to = row * nodes + place
    tl.store(tokens + to, tl.load(all_tokens + row * candidates_row + i, mask=kept, other=0), mask=kept)
    tl.store(depth + to, level, mask=kept)
    tl.store(valid + to, tl.full([BLOCK], 1, tl.int8), mask=kept)
    tl.store(acceptance + to, tl.exp(value), mask=kept)
    n = tl.arange(0, BLOCK_N)
    padding = (n >= total) & (n < nodes)
    last = tl.load(all_tokens + row * candidates_row + count - 1)
    tl.store(tokens + row * nodes + n, tl.full([BLOCK_N], 0, tl.int64) + last, mask=padding)
    tl.store(depth + row * nodes + n, tl.full([BLOCK_N], 1, tl.int32), mask=padding)
    tl.store(valid + row * nodes + n, tl.full([BLOCK_N], 0, tl.int8), mask=padding)
    tl.store(acceptance + row * nodes + n, tl.full([BLOCK_N], 0.0, tl.float32), mask=padding)
    tl.store(parent + row * nodes + n, tl.full([BLOCK_N], 0, tl.int32), mask=padding)
    tl.debug_barrier()  # places of parents
    above = tl.load(all_parents + row * candidates_row + i, mask=kept, other=0)
    above = tl.load(scratch + row * candidates_row + above, mask=kept, other=0)
    tl.store(parent + to, tl.where(i == 0, -1, above), mask=kept)
    base = ancestors + row * nodes * WORDS
    for word in tl.static_range(WORDS):
        own = tl.where(place // 64 == word, 1, 0).to(tl.int64) << (place % 64)
        own_n = tl.where(n // 64 == word, 1, 0).to(tl.int64) << (n % 64)
        tl.store(base + n * WORDS + word, own_n | (1 if word == 0 else 0), mask=padding)
        tl.store(base + place * WORDS + word, own, mask=kept & (level == 0))
        for d in range(1, max_depth + 1):  # a node's bits are its own and its parent's
            tl.debug_barrier()
            mine = kept & (level == d)
            tl.store(
                base + place * WORDS + word, own | tl.load(base + above * WORDS + word, mask=mine, other=0), mask=mine
            )


def select_tree(
    candidates: Candidates, depths: Tensor, own_bits: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The tree of the likeliest candidates.

    Args:
        candidates: M of them; no value is above its parent's.
        depths: ``[M]`` int32 of the candidates, 0 of the root alone.
        own_bits: ``[N, V]`` int64, bit i in row i; N ≤ M.
        max_depth: of ``depths``.

    Returns:
        Of the N nodes, by their numbers as candidates, the root first: tokens ``[B, N]`` int64, parents int32 (−1 at
        the root), depths int32, ancestor bitsets ``[B, N, V]`` int64, valid bool, and exp(value) float32. Where fewer
        candidates have a value above −∞, invalid nodes come last: children of the root of value 0.
    """
    if why_not_triton(candidates.values):
        return select_tree_reference(candidates, depths, own_bits, max_depth)
    rows, count = candidates.tokens.shape
    nodes, words = own_bits.shape
    new = candidates.tokens.new_empty
    row = candidates.tokens.stride(0)
    parent, depth, scratch = (new(rows, width, dtype=torch.int32) for width in (nodes, nodes, row))
    valid, acceptance = new(rows, nodes, dtype=torch.bool), new(rows, nodes, dtype=torch.float32)
    found = (new(rows, nodes), parent, depth, new(rows, nodes, words), valid, acceptance)
    outputs = (*found[:4], valid.view(torch.int8), acceptance)
    block = {"WORDS": words, "BLOCK": next_power(count, 32), "BLOCK_N": next_power(nodes, 32), "num_warps": 4}
    with torch.cuda.device_of(candidates.values):
        sizes = (count, nodes, max_depth, row)
        _select_kernel[(rows,)](tuple(candidates), depths, outputs, scratch, *sizes, **block)
    return found
