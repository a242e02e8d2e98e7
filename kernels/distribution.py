"""The target's distribution as a few numbers of each node, and the uniforms of a step.

    p(x) = [s(x) ≥ floor] · exp(s(x)) / Z,    s(x) = (l(x) − max l) / T

``floor`` is that of top-k, top-p and min-p together, in this order:

    top-k    min {s : #(> s) < k}
    top-p    min {s : mass(> s) < top_p · mass of what top-k keeps}
    min-p    log(min_p), since the likeliest token has s = 0

Tokens that tie at the floor are all kept, and the likeliest token always is. Where the temperature is 0, p is one-hot
at the best token, the lowest id among equals. p can be recomputed anywhere from the logits and these numbers, so
nothing of size V is written, and nothing is sorted: floors are searched among the integers that order float32 numbers,
8 candidates in each pass over V. They are searched among logits and compared as s, because equal s may come from
different logits.

If a node's draws are all one-hot, their acceptance probabilities (phase A of kernels/multi_step.py) come from the pass
that sums Z: the residual after the first k draws is p without their tokens. Its mass is that of the undrawn tokens plus
that of the later draws' tokens, a sum without cancellation.

Uniforms are those of Philox 4×32-10 (Salmon et al., 2011).

Shape letters: B rows, N nodes, K draws of a node, V vocabulary.
"""
# ruff: noqa: ANN001, ANN201, ANN202  (a kernel's arguments are Triton's: pointers, scalars and constants)

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.kernels.backend import dense, jit, next_power, tl, why_not_triton

_LOW = 0xFFFFFFFF
# The lowest bits of a float32 number that are 0 if it was one of these.
LOW_BITS = {torch.bfloat16: 16, torch.float16: 13}


def philox_words(c0: Tensor, c1: Tensor, c2: Tensor, c3: int, key: Tensor) -> tuple[Tensor, ...]:
    """The four words of Philox 4×32-10 at counters (c0, c1, c2, c3), of each the lowest 32 bits, and keys of 64 bits:
    int64 tensors of shapes that broadcast."""
    c0, c1, c2, k0, k1 = torch.broadcast_tensors(c0 & _LOW, c1 & _LOW, c2 & _LOW, key & _LOW, (key >> 32) & _LOW)
    last = torch.full_like(c0, c3)
    for _ in range(10):
        low0, low2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit products; masks below remove the sign
        c0, c1, c2, last = (
            ((low2 >> 32) & _LOW) ^ c1 ^ k0,
            low2 & _LOW,
            ((low0 >> 32) & _LOW) ^ last ^ k1,
            low0 & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, last


def philox_uniforms_reference(seed: Tensor, step: Tensor, count: int, stream: int = 0) -> Tensor:
    """The definition of :func:`philox_uniforms`."""
    place = torch.arange(-(-count // 4), device=seed.device)[None]
    words = philox_words(place, step[:, None], step[:, None] >> 32, stream, seed[:, None])
    return (torch.stack(words, -1).flatten(1)[:, :count] >> 8).float() * 2.0**-24


@jit(do_not_specialize="count stream seed_row step_row")
def _philox_kernel(seed, step, uniforms, count, stream, seed_row, step_row, BLOCK: tl.constexpr):
    """One program per row and block of counters, each of which gives four uniforms."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(step + row * step_row)
    zero = place * 0
    c0, c1, c2, c3 = tl.philox(
        tl.load(seed + row * seed_row),
        place.to(tl.uint32),
        (zero + number).to(tl.uint32),
        (zero + (number >> 32)).to(tl.uint32),
        (zero + stream).to(tl.uint32),
    )
    first = uniforms + row * count + place * 4
    tl.store(first, (c0 >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=place * 4 < count)  # 2^-24
    tl.store(first + 1, (c1 >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=place * 4 + 1 < count)
    tl.store(first + 2, (c2 >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=place * 4 + 2 < count)
    tl.store(first + 3, (c3 >> 8).to(tl.float32) * 5.9604644775390625e-08, mask=place * 4 + 3 < count)


def philox_uniforms(seed: Tensor, step: Tensor, count: int, stream: int = 0) -> Tensor:
    """Uniforms from Philox 4×32-10 (Salmon et al., 2011), which depend only on seed, step, stream and column.

    A request's numbers are therefore independent of the other rows of its batch.

    Args:
        seed, step: ``[B]`` int64.
        stream: 0 for the verifier; each drafter that draws at random has its own (``State.stream``).

    Returns:
        ``[B, count]`` float32 in [0, 1).
    """
    if why_not_triton(seed) or not count:
        return philox_uniforms_reference(seed, step, count, stream)
    assert seed.dtype == step.dtype == torch.int64
    uniforms = torch.empty(len(seed), count, dtype=torch.float32, device=seed.device)
    counters = -(-count // 4)
    block = 128
    with torch.cuda.device_of(seed):
        _philox_kernel[(len(seed), -(-counters // block))](
            seed, step, uniforms, count, stream, seed.stride(0), step.stride(0), BLOCK=block, num_warps=4
        )
    return uniforms


def distribution_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uses: tuple[bool, bool, bool] = (True, True, True),
) -> Tensor:
    """The distribution ``[B, N, V]`` float32 that :func:`distribution_scalars` describes; NaN throughout where a
    node's logits hold NaN or +∞, or −∞ only. Arguments as there."""
    uses_greedy, uses_top, uses_min_p = uses

    def by_row(values: Tensor) -> Tensor:
        return values[:, None, None]

    x = logits.float()
    best = x.argmax(-1, keepdim=True) if uses_greedy else None
    # Subtract the maximum before dividing: no overflow at low temperatures.
    x = (x - x.amax(-1, keepdim=True)) / by_row(torch.where(temperature > 0, temperature, 1.0))
    if uses_top:
        ranked = x.sort(-1, descending=True).values
        vocabulary = x.shape[-1]
        last = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary) - 1
        floor = ranked.gather(-1, by_row(last).expand(-1, x.shape[1], 1))
        share = torch.where(ranked >= floor, ranked, -torch.inf).softmax(-1)
        before = share.cumsum(-1) - share  # sum of all that rank above
        # With top-p 1 all tokens are kept, even if rounding brings the sum to 1 early.
        cut = (before >= by_row(top_p)) & (by_row(top_p) < 1)
        kept = ~cut & (ranked >= floor)
        kept[..., 0].fill_(True)
        floor = torch.where(kept, ranked, torch.inf).amin(-1, keepdim=True)
        x = torch.where(x >= floor, x, -torch.inf)
    p = x.softmax(-1)
    if uses_min_p:
        p = torch.where(p < p.amax(-1, keepdim=True) * by_row(min_p), 0.0, p)  # keeps NaN
        p = torch.where(by_row(min_p) > 0, p / p.sum(-1, keepdim=True), p)
    if best is not None:
        one = torch.zeros_like(p).scatter_(-1, best, 1.0)
        p = torch.where((by_row(temperature) == 0) & ~p[..., :1].isnan(), one, p)
    return p


@jit
def weights_at(logits, x, inside, maximum, temperature, floor, best, GREEDY: tl.constexpr):
    """exp(s) of the tokens x that are kept, 0 of others and outside the mask. ``best``: −1 if the row samples."""
    scaled = tl.load(logits + x, mask=inside, other=float("-inf")).to(tl.float32) - maximum
    scaled = tl.div_rn(scaled, temperature)  # rounded as PyTorch does: a token ties in both or in neither
    weights = tl.where(scaled >= floor, tl.exp(scaled), 0.0)
    if GREEDY:
        weights = tl.where(best >= 0, tl.where(inside & (x == best), 1.0, 0.0), weights)
    return weights


class TargetNodes(NamedTuple):
    """What the kernels read of the target's distributions.

    logits: ``[B, N, V]``, the strides of its rows and nodes being ``row`` and ``node``, the last one 1.
    scalars, best: from :func:`distribution_scalars`; no ``best`` where no row has temperature 0.
    """

    logits: Tensor
    scalars: Tensor
    best: Tensor | None
    vocabulary: int
    row: int
    node: int


@jit
def at_node(target, batch, node, N):
    """A node of a :class:`TargetNodes`: the pointer to its logits, and its number."""
    return target.logits + batch * target.row + node * target.node, batch * N + node


@jit
def p_at(target, node, x, inside):
    """p of the tokens x of a node (of :func:`at_node`), 0 outside the mask."""
    logits, number = node
    scalars, best = target.scalars + number * 4, -1
    if target.best is not None:
        best = tl.load(target.best + number)
    maximum, temperature, floor = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    weights = weights_at(logits, x, inside, maximum, temperature, floor, best, target.best is not None)
    return weights / tl.load(scalars + 3)


@jit
def pick(values, turns, turn):
    """Entry ``turn`` of a vector held in registers."""
    return tl.sum(tl.where(turns == turn, values, 0), 0)


@jit
def draws_at(tokens, child, turns, K):
    """A node's draws as vectors over ``turns``: whether it exists, and its token, −1 if not. ``tokens`` are a row's,
    ``child`` is a node's."""
    child_node = tl.load(child + turns, mask=turns < K, other=-1)
    exists = child_node >= 0
    return exists, tl.load(tokens + child_node, mask=exists, other=-1)


@jit
def without_drawn(weights, x, start, token, turns, draws, BLOCK_V: tl.constexpr):
    """The weights of tokens x = start, start + 1, …, with 0 at drawn ones; few tiles hold one."""
    held = (token >= start) & (token < start + BLOCK_V)
    if tl.max(held.to(tl.int32), 0) > 0:
        for turn in range(draws):
            weights = tl.where(x == pick(token, turns, turn), 0.0, weights)
    return weights


@jit
def _key(value, LOW: tl.constexpr):
    """Integers in the order of float32 numbers whose LOW lowest bits are 0, without these bits."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW


@jit
def _number(key, LOW: tl.constexpr):
    """The float32 number of a key."""
    bits = key << LOW
    bits = tl.where(key < 0, (bits | ((1 << LOW) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@jit
def _search(
    logits,
    lowest,
    highest,
    bound,
    maximum,
    temperature,
    V,
    MASS: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The lowest key of lowest … highest above which there are fewer than ``bound`` tokens; with MASS, tokens whose
    exp(s) sum to less. True of ``highest``, which is the maximum's key, and not tested there."""
    while lowest < highest:
        step = (highest - lowest + 7) // 8
        keys = tl.minimum(lowest + step * tl.arange(0, 8), highest)  # [8] int64
        sums = tl.zeros([BLOCK_V, 8], tl.float32)  # counts are exact up to 2^24
        for start in tl.range(0, V, BLOCK_V, num_stages=4):  # the next tiles are on their way meanwhile
            x = start + tl.arange(0, BLOCK_V)
            value = tl.load(logits + x, mask=x < V, other=float("-inf")).to(tl.float32)
            above = _key(value, LOW)[:, None] > keys.to(tl.int32)[None, :]
            if MASS:
                weights = tl.exp(tl.div_rn(value - maximum, temperature))
                sums += tl.where(above, weights[:, None], 0.0)
            else:
                sums += above.to(tl.float32)
        fewer = tl.sum(sums, 0) < bound  # once true, true of all higher keys: sums of fewer terms in the same order
        highest = tl.min(tl.where(fewer, keys, highest), 0)
        lowest = tl.max(tl.where(fewer, lowest, keys + 1), 0)
    return highest.to(tl.int32)


@jit
def _top_floor(logits, maxima, maximum, temperature, top_k, top_p, V, LOW: tl.constexpr, BLOCK_V: tl.constexpr):
    """The floor of top-k and top-p. ``maxima``: the maximum of every BLOCK_V-th token, from each of the first."""
    highest = _key(maximum, LOW).to(tl.int64)
    lanes = tl.arange(0, BLOCK_V)
    least = tl.min(tl.where(lanes < V, maxima, maximum), 0)
    # At least as many tokens as there are lanes are as high as the least of the lanes' maxima.
    few = (top_k > 0) & (top_k <= tl.minimum(V, BLOCK_V))
    lowest = _key(tl.where(few, least, float("-inf")), LOW).to(tl.int64)
    all_kept = (top_k <= 0) | (top_k >= V)
    count = tl.minimum(top_k, V).to(tl.float32)
    key = _search(
        logits, lowest, tl.where(all_kept, lowest, highest), count, maximum, temperature, V, False, LOW, BLOCK_V
    )
    floor = tl.div_rn(_number(key, LOW) - maximum, temperature)
    if top_p < 1:
        masses = tl.zeros([BLOCK_V], tl.float32)
        for start in tl.range(0, V, BLOCK_V, num_stages=4):
            x = start + tl.arange(0, BLOCK_V)
            masses += weights_at(logits, x, x < V, maximum, temperature, floor, -1, False)
        mass = tl.sum(masses, 0)
        # More than 1 − top_p of the mass is at the new floor or below, and V tokens have V · exp(floor) at most. The
        # bound is lowered by more than rounding can be, so the floor found is that of a search from −∞.
        share = (1 - top_p) - 1e-5
        bound = tl.where(share > 0, tl.log(tl.maximum(share, 1e-6) * mass / V) * 1.0001 - 1e-3, float("-inf"))
        lowest = tl.maximum(key, _key(maximum + temperature * bound, LOW)).to(tl.int64)
        key = _search(logits, lowest, highest, top_p * mass, maximum, temperature, V, True, LOW, BLOCK_V)
        floor = tl.div_rn(_number(key, LOW) - maximum, temperature)
    return floor


@jit(do_not_specialize="N K child_row child_node")
def _distribution_kernel(
    target,
    settings,
    strides,
    drafts,
    N,
    K,
    child_row,
    child_node,
    LOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One node per program: the maximum, the floor, then Z and the acceptance probabilities.

    target: the :class:`TargetNodes` to be described. settings: temperature, top-k, top-p, min-p, None where not in use;
    ``strides``: their rows'.
    drafts: tokens, children, and where the acceptance probabilities go; None: there are no draws.
    """
    temperature, top_k, top_p, min_p = settings
    V = target.vocabulary
    node = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(0).to(tl.int64)  # the axis that may be long
    logits, place = at_node(target, batch, node, N)
    maxima = tl.full([BLOCK_V], float("-inf"), tl.float32)
    ids = tl.full([BLOCK_V], 0, tl.int32) + V  # of the maxima
    bad = tl.zeros([BLOCK_V], tl.int32)
    for start in tl.range(0, V, BLOCK_V, num_stages=4):
        x = start + tl.arange(0, BLOCK_V)
        value = tl.load(logits + x, mask=x < V, other=float("-inf")).to(tl.float32)
        bad |= ((value != value) | (value == float("inf"))).to(tl.int32)
        if target.best is not None:
            ids = tl.where(value > maxima, x, ids)
        maxima = tl.maximum(maxima, value)
    maximum = tl.max(maxima, 0)
    finite = (tl.max(bad, 0) == 0) & (maximum > float("-inf"))
    row_temperature = tl.load(temperature + batch * strides[0])
    node_best = -1
    if target.best is not None:
        node_best = tl.where(row_temperature == 0, tl.min(tl.where(maxima == maximum, ids, V), 0), -1)
    row_temperature = tl.where(row_temperature > 0, row_temperature, 1.0)
    floor = tl.full([], float("-inf"), tl.float32)
    normaliser = tl.full([], float("nan"), tl.float32)
    turns = tl.arange(0, BLOCK_K)
    exists = turns < 0
    token = turns.to(tl.int64) * 0 - 1
    if drafts is not None:
        exists, token = draws_at(drafts[0] + batch * N, drafts[1] + batch * child_row + node * child_node, turns, K)
    acceptances = tl.where(exists, 1.0, 0.0)  # of a node that is not finite, as in the definition
    if finite:
        if top_k is not None and node_best < 0:
            row_top_k, row_top_p = tl.load(top_k + batch * strides[1]), tl.load(top_p + batch * strides[2])
            floor = _top_floor(logits, maxima, maximum, row_temperature, row_top_k, row_top_p, V, LOW, BLOCK_V)
        if min_p is not None:
            row_min_p = tl.load(min_p + batch * strides[3])
            floor = tl.maximum(floor, tl.where(row_min_p > 0, tl.log(tl.maximum(row_min_p, 1.2e-38)), float("-inf")))
        draws = tl.max(tl.where(exists, turns + 1, 0), 0)
        undrawn = tl.zeros([BLOCK_V], tl.float32)
        for start in tl.range(0, V, BLOCK_V, num_stages=4):
            x = start + tl.arange(0, BLOCK_V)
            weights = weights_at(logits, x, x < V, maximum, row_temperature, floor, node_best, target.best is not None)
            if drafts is not None:
                weights = without_drawn(weights, x, start, token, turns, draws, BLOCK_V)
            undrawn += weights
        normaliser = tl.sum(undrawn, 0)
        if drafts is not None and draws > 0:
            same = (token[:, None] == token[None, :]) & exists[:, None]
            repeated = tl.sum((same & (turns[None, :] < turns[:, None])).to(tl.int32), 1) > 0  # a token tested before
            tested = exists & (repeated == 0)
            greedy: tl.constexpr = target.best is not None
            of_token = weights_at(logits, token, tested, maximum, row_temperature, floor, node_best, greedy)
            later = tl.sum(tl.where(turns[None, :] > turns[:, None], of_token[None, :], 0.0), 1)
            mass_after = normaliser + later
            ratio = of_token / tl.where(mass_after > 0, of_token + mass_after, 1.0)
            acceptances = tl.where(exists, tl.where(mass_after > 0, ratio, 1.0), 0.0)
            normaliser += tl.sum(of_token, 0)
    scalars = target.scalars + place * 4
    tl.store(scalars, maximum)
    tl.store(scalars + 1, row_temperature)
    tl.store(scalars + 2, floor)
    tl.store(scalars + 3, normaliser)
    if target.best is not None:
        tl.store(target.best + place, node_best)
    if drafts is not None:
        tl.store(drafts[2] + place * K + turns, acceptances, mask=turns < K)


def distribution_scalars(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uses: tuple[bool, bool, bool] = (True, True, True),
    tokens: Tensor | None = None,
    child: Tensor | None = None,
    block: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Everything that defines the target's distribution at each node beside the logits. Triton alone.

    Args:
        logits: ``[B, N, V]`` of any float dtype.
        temperature: ``[B]`` float32; 0: the best token alone.
        top_k: ``[B]`` int64; 0 keeps all.
        top_p: ``[B]`` float32 above 0; 1 keeps all.
        min_p: ``[B]`` float32; 0 keeps all.
        uses: whether some row has temperature 0, some row top-k or top-p, some row min-p; what is not in use is not
            read.
        tokens: ``[B, N]`` int64 of the nodes; None without one-hot draws.
        child: ``[B, N, K]`` int64 the node that each one-hot draw leads to, −1 where there is none; the last stride
            is 1.
        block: tokens of the vocabulary per tile; 0 chooses.

    Returns:
        scalars ``[B, N, 4]`` float32: the largest logit, the temperature (1 where it is 0), the floor, Z. Z is NaN
        where the logits hold NaN or +∞, or −∞ only.
        best ``[B, N]`` int32: the one token of nodes at temperature 0, −1 at others; written if ``uses[0]``.
        acceptance ``[B, N, K]`` float32: the acceptance probability of each one-hot draw, given that those before it
        were rejected, 0 where there is no draw; written if there are draws.
    """
    rows, nodes, vocabulary = logits.shape
    logits = dense(logits)
    max_draws = 0 if child is None else child.shape[2]
    scalars = torch.empty(rows, nodes, 4, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, nodes, dtype=torch.int32, device=logits.device)
    acceptance = torch.empty(rows, nodes, max_draws, dtype=torch.float32, device=logits.device)
    drafts, child_strides = None, (0, 0)
    if tokens is not None and child is not None and max_draws:
        child = dense(child)
        drafts, child_strides = (tokens.contiguous(), child, acceptance), child.stride()[:2]
    uses_greedy, uses_top, uses_min_p = uses
    settings = (temperature, *((top_k, top_p) if uses_top else (None, None)), min_p if uses_min_p else None)
    strides = tuple(0 if setting is None else setting.stride(0) for setting in settings)
    # A step has fewer nodes than a GPU has multiprocessors, so a program may take most of one. With top-k or top-p it
    # holds sums of 8 candidates for each token of the tile in registers; without, a thread loads 16 bytes at a time.
    block = block or min(next_power(vocabulary), 1024 if uses_top else 2048)
    target = TargetNodes(logits, scalars, best if uses_greedy else None, vocabulary, *logits.stride()[:2])
    tile = {"LOW": LOW_BITS.get(logits.dtype, 0), "BLOCK_K": next_power(max_draws or 1), "BLOCK_V": block}
    with torch.cuda.device_of(logits):
        _distribution_kernel[(rows, nodes)](
            target, settings, strides, drafts, nodes, max_draws, *child_strides, **tile, num_warps=8
        )
    return scalars, best, acceptance
