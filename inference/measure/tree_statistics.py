"""Trees of ranks, and what held-out text says of them: which tree of N nodes is best, and its mean accepted length τ.

Path (r_1, r_2, …) stands for a drafter's r_1-th best token at depth 1, then its r_2-th best at depth 2, …. All that is
needed of a text is the rank that the drafter gives, at each depth, to the true token after the true ones before it:
``ranks [S, T, K]``. ``tokens, supervised [S, T]`` are as :func:`draftsmith.inference.engine.answers.answer` returns
them.

A path's probability is the share of positions where all its ranks are the true ones: joint counts, no independence
assumed (Medusa, arXiv 2401.10774 §2.3.3, assumes it). A child never outnumbers its parent, so the N most frequent
paths *are* the best tree of N nodes.

An ensemble of drafters has a tree for each of them: ``ranks [S, T, n, K]``. The n trees are merged, so a step accepts
as many tokens as the tree that reaches deepest.

Shape letters: S sequences, T tokens, K depths (draft heads), P positions, n drafters of an ensemble.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.inference.trees.independent import Confidence, IndependentTree
from draftsmith.inference.verify.tree import Ranks, Topology
from draftsmith.models.dflash import DFlash
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target
from draftsmith.models.unrolled import marked_places
from draftsmith.models.vocabulary import head_rows

MAX_RANK = 10  # ranks per depth that a tree may use
CANDIDATES = 24  # paths that a merge may choose from
SIMULATED_NODES = 16  # of the tree whose τ chooses a run's best weights
LOGITS = 512  # positions whose logits are in memory at once
AT_ONCE = 8192  # tokens of a forward pass, padding included, where nothing else is said
NODES = (2, 4, 8, 16, 32, 64)  # of the trees of ensembles whose expected τ tree.json records
_NO_POSITION = "no calibration position: no answer has {} tokens, one more than the drafts are deep; use longer answers"


def draft_labels(tokens: Tensor, supervised: Tensor, depth: int) -> Tensor:
    """The token that a draft of each depth has to be in order to be right: ``[S, T, K]`` int64. A step begins at
    position t if token t + 1, its root, is an answer's; its draft of depth k then has to be x_{t+k+1}. −1 where no step
    begins or where the same answer has no such token."""
    length = tokens.shape[1]
    labels = torch.full((*tokens.shape, depth), -1, dtype=torch.int64)
    reached = supervised[:, 1:].clone()  # every token up to the label is the same answer's
    for k in range(min(depth, length - 2)):
        reached = reached[:, : length - k - 2] & supervised[:, k + 2 :]
        labels[:, : length - k - 2, k] = torch.where(reached, tokens[:, k + 2 :].long(), -1)
    return labels


def label_ranks(best: Tensor, labels: Tensor) -> Tensor:
    """The place of each label ``[…]`` int64 (−1: none) among a drafter's best tokens ``[…, R]`` int64, the most likely
    first: ``[…]`` int64, :data:`MAX_RANK` if it is not among them, −1 where there is no label."""
    match = best == labels[..., None]
    ranks = torch.where(match.any(-1), match.int().argmax(-1), MAX_RANK)
    return torch.where(labels >= 0, ranks, -1)


def row_batches(
    tokens: Tensor, supervised: Tensor, positions: int = AT_ONCE, process: int = 0, processes: int = 1
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The rows ``[S, T]`` in batches of at most ``positions`` tokens, padding included, or of one row: rows of similar
    length together, cut behind the last label, the longest ones first.

    Yields (numbers of the rows ``[B]``, their tokens and labels ``[B, T']``) of the share of one of several processes.
    All of them get the same number of batches: a target that is spread over them runs in all of them at once. Where
    there is none left for a process, its last one is another's, without labels.
    """
    places = torch.arange(1, supervised.shape[1] + 1, device=supervised.device)
    lengths = (supervised * places).amax(1).clamp(min=min(2, len(places)))  # a label and the token before it
    order, batches, begin = lengths.argsort(descending=True, stable=True), list[Tensor](), 0
    while begin < len(order):
        rows = order[begin : begin + max(1, positions // int(lengths[order[begin]]))]
        batches.append(rows)
        begin += len(rows)
    for first in range(0, len(batches), processes):
        own = first + process < len(batches)
        rows = batches[first + process if own else -1]
        length = int(lengths[rows[0]])
        yield rows, tokens[rows, :length], supervised[rows, :length] & own


def in_batches(ranks_of: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, supervised: Tensor, *share: int) -> Tensor:
    """Ranks ``[S, T, …]`` int64 of all rows from a function that gives those of a batch, ``ranks_of(tokens,
    supervised)``; −1 at rows of other processes. ``share``: as :func:`row_batches` takes it."""
    ranks = None
    for rows, part, marks in row_batches(tokens, supervised, *share):
        found = ranks_of(part, marks).cpu()
        if ranks is None:
            ranks = torch.full((*tokens.shape, *found.shape[2:]), -1, dtype=torch.int64)
        ranks[rows, : part.shape[1]] = found
    assert ranks is not None, "there is no row"
    return ranks


def head_ranks(target: Target, heads: MedusaHeads, tokens: Tensor, supervised: Tensor) -> Tensor:
    """The rank that each Medusa head gives to the true token: ``[B, T, K]`` int64, at position t head k's rank of
    x_{t+k+1}; ``MAX_RANK`` if it is not among the best (nor among the draft vocabulary), −1 where there is no such
    label or where position t + 1 is no answer's token (no step begins there). All rows run at once;
    :func:`in_batches` bounds them."""
    return head_choices(target, heads, tokens, supervised, with_log_q=False)[0]


@torch.no_grad()
def head_choices(
    target: Target, heads: MedusaHeads, tokens: Tensor, supervised: Tensor, with_log_q: bool = True
) -> tuple[Tensor, Tensor]:
    """:func:`head_ranks`; and the log probabilities of each head's best tokens, ``[B, T, K, R]`` float32, best first,
    −∞ where no step begins, and everywhere unless they are asked for (R: :data:`MAX_RANK`, or as many as a head chooses
    from)."""
    num_heads, draft_head = heads.config.num_draft_heads, heads.draft_head(target.lm_head)
    begins, labels = F.pad(supervised[:, 1:], (0, 1)), draft_labels(tokens, supervised, num_heads)
    hidden = target.hidden(tokens.long().to(target.device))[begins.to(target.device)]  # [P, d]
    features = enumerate(heads.features(hidden.to(heads.weight.dtype)))
    logits = ((heads.head_logits(k, chunk, draft_head) for chunk in each.split(LOGITS)) for k, each in features)
    return _choices(logits, heads.tokens, labels, begins, min(MAX_RANK, heads.config.outputs), with_log_q)


def _choices(
    logits: Iterable[Iterable[Tensor]],
    tokens: Callable[[Tensor], Tensor],
    labels: Tensor,
    begins: Tensor,
    top: int,
    with_log_q: bool,
    after: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Ranks ``[B, T, K]`` and log q ``[B, T, K, R]`` of :func:`head_choices`, from the logits at the positions where a
    step begins, in chunks, by depth. ``tokens``: of places of the logits; ``after``: scales or caps these."""
    ranks, log_q = torch.full_like(labels, -1), torch.full((*labels.shape, top), -torch.inf)
    for k, chunks in enumerate(logits):
        best: list[Tensor] = []
        values: list[Tensor] = []
        for chunk in chunks:
            own = chunk if after is None else after(chunk)  # which does not change their order
            found = own.topk(top, -1)
            best.append(tokens(found.indices).cpu())
            if with_log_q:
                values.append((found.values.float() - own.float().logsumexp(-1, keepdim=True)).cpu())
        ranks[..., k][begins] = label_ranks(torch.cat(best), labels[..., k][begins])
        if with_log_q:
            log_q[..., k, :][begins] = torch.cat(values)
    return ranks, log_q


def eagle_ranks(target: Target, eagle: Eagle, tokens: Tensor, supervised: Tensor, depth: int) -> Tensor:
    """The rank that an EAGLE drafter gives to the true token at each depth, after the true ones before it, which it has
    drafted itself: the target's features end at the position where the step begins. Arguments and result are as those
    of :func:`head_ranks`; ``depth``: K.
    """
    return eagle_choices(target, eagle, tokens, supervised, depth, with_log_q=False)[0]


@torch.no_grad()
def eagle_choices(
    target: Target, eagle: Eagle, tokens: Tensor, supervised: Tensor, depth: int, with_log_q: bool = True
) -> tuple[Tensor, Tensor]:
    """:func:`eagle_ranks`, and log probabilities as those of :func:`head_choices`."""
    top, draft_head, embed = min(MAX_RANK, eagle.config.outputs), eagle.draft_head(target.lm_head), target.embeddings
    dtypes = eagle.fc.weight.dtype, next(draft_head.parameters()).dtype
    begins, labels = F.pad(supervised[:, 1:], (0, 1)), draft_labels(tokens, supervised, depth)
    rows, places = tokens.to(target.device), marked_places(begins)  # [B, P]
    begun = begins.gather(1, places)
    features = target.features(rows.long(), eagle.config.captured_layers).to(dtypes[0])
    outs = eagle.unroll(features, embed, rows, depth, chosen=places.to(rows.device))
    logits = ((draft_head(chunk) for chunk in out[begun.to(out.device)].to(dtypes[1]).split(LOGITS)) for out in outs)
    scaled = with_log_q and eagle.lm_head is None and target.changes_logits
    after = target.after_head if scaled else None

    def ids(chosen: Tensor) -> Tensor:
        return eagle.tokens(chosen.to(eagle.fc.weight.device))

    return _choices(logits, ids, labels, begins, top, with_log_q, after)


def block_ranks(target: Target, dflash: DFlash, tokens: Tensor, supervised: Tensor) -> Tensor:
    """The rank that a DFlash drafter's block gives to the true token at each of its drafts; the block begins with the
    token at t + 1. Arguments and result are as those of :func:`head_ranks`, K the drafts of a block."""
    return block_choices(target, dflash, tokens, supervised, with_log_q=False)[0]


@torch.no_grad()
def block_choices(
    target: Target, dflash: DFlash, tokens: Tensor, supervised: Tensor, with_log_q: bool = True
) -> tuple[Tensor, Tensor]:
    """:func:`block_ranks`, and log probabilities as those of :func:`head_choices`."""
    config, embed = dflash.config, target.embeddings
    depth, top, draft_head = config.num_draft_heads, min(MAX_RANK, config.outputs), dflash.draft_head(target.lm_head)
    dtypes = dflash.fc.weight.dtype, next(draft_head.parameters()).dtype
    begins, labels = F.pad(supervised[:, 1:], (0, 1)), draft_labels(tokens, supervised, depth)
    rows, places = tokens.to(target.device), marked_places(begins)  # [B, P]
    positions = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
    features = target.features(rows.long(), config.captured_layers).to(dtypes[0])
    context = dflash.context(features, positions)
    ranks = torch.full((*tokens.shape, depth), -1, dtype=torch.int64)
    log_q = torch.full((*ranks.shape, top), -torch.inf)
    at = torch.arange(len(tokens))[:, None]
    for part in places.split(max(1, rows.shape[1] // config.block_size), 1):  # as many slots as tokens
        begun, anchors = begins.gather(1, part), (part + 1).clamp(max=rows.shape[1] - 1).to(rows.device)
        mask, of_anchors = dflash.context_mask(anchors, None, context), (rows.gather(1, anchors), anchors)
        out = dflash.blocks(context, mask, embed, *of_anchors)[:, :, 1:][begun.to(rows.device)]  # [blocks, K, d]
        by_draft = out.to(dtypes[1]).transpose(0, 1)
        logits = ((draft_head(chunk) for chunk in each.split(LOGITS)) for each in by_draft)
        own = at.expand_as(part)[begun], part[begun]
        begins_all = torch.ones(len(own[0]), dtype=torch.bool)
        found = _choices(logits, dflash.tokens, labels[own], begins_all, top, with_log_q)
        ranks[own], log_q[own] = found
    return ranks, log_q


@torch.no_grad()
def next_token_ranks(model: Target, tokens: Tensor, supervised: Tensor, draft_vocab: Tensor | None = None) -> Tensor:
    """The rank that a causal LM of the target's vocabulary gives to each token of the answers, after the true ones
    before it: ``[B, T]`` int64, ``MAX_RANK`` if it is not among the best (nor among the ``draft_vocab [D]`` int64,
    ascending, if there is one), −1 where the token is no answer's, and at t = 0. All rows run at once, as in
    :func:`head_ranks`."""
    ranks = torch.full(tokens.shape, -1, dtype=torch.int64)
    # A scale or cap of the logits does not change their order.
    head = model.logits if draft_vocab is None else head_rows(model.lm_head, draft_vocab.to(model.device))
    rows, labelled = tokens.long(), supervised[:, 1:].cpu()
    hidden = model.hidden(rows.to(model.device))[:, :-1][labelled.to(model.device)]  # [P, d]
    best: list[Tensor] = []
    for chunk in hidden.split(LOGITS):
        logits = head(chunk)
        top = logits.topk(min(MAX_RANK, logits.shape[-1]), -1).indices
        best.append((top if draft_vocab is None else draft_vocab.to(top.device)[top]).cpu())
    ranks[:, 1:][labelled] = label_ranks(torch.cat(best), rows[:, 1:].cpu()[labelled])
    return ranks


def chained_ranks(next_ranks: Tensor, tokens: Tensor, supervised: Tensor, depth: int) -> Tensor:
    """What a model that drafts token by token gives at each depth, from :func:`next_token_ranks`: ``[S, T, K]`` int64
    as :func:`head_ranks`, at position t and depth k the rank of token t + k + 1."""
    labels = draft_labels(tokens, supervised, depth)
    ranks = torch.full_like(labels, -1)
    for k in range(min(depth, tokens.shape[1] - 2)):
        ranks[:, : -k - 2, k] = next_ranks[:, k + 2 :]
    return torch.where(labels >= 0, ranks, -1)


def path_counts(ranks: Tensor) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each rank path was right as a whole, and the number of positions that have a label at every depth."""
    full = ranks[(ranks >= 0).all(-1)]
    counts: Counter[tuple[int, ...]] = Counter()
    for row in full.tolist():
        for depth, rank in enumerate(row):
            if rank >= MAX_RANK:
                break
            counts[tuple(row[: depth + 1])] += 1
    return counts, len(full)


def best_tree(ranks: Tensor, nodes: int) -> Topology:
    """The tree of at most ``nodes`` nodes (root included) with the highest expected accepted length; a ValueError if
    there is no position to count on."""
    return best_trees(ranks[:, :, None], nodes)[0]


def selection_tree(ranks: Tensor) -> Topology:
    """The best tree of :data:`SIMULATED_NODES` nodes; where no draft was right yet, the likeliest token alone."""
    tree = best_tree(ranks, SIMULATED_NODES)
    return tree if tree.paths else Topology(((0,),))


def candidates(ranks: Tensor) -> list[dict[str, Any]]:
    """The most frequent paths and their frequencies: a merge with other drafters chooses its nodes from them."""
    counts, positions = path_counts(ranks)
    paths = best_tree(ranks, CANDIDATES + 1).paths
    return [{"path": list(path), "rate": round(counts[path] / positions, 4)} for path in paths]


def accuracy(ranks: Tensor) -> list[list[float]]:
    """By depth and rank, the share of labels that had this rank: ``[K][MAX_RANK]``."""
    return [
        [round(float((ranks[..., k] == r).sum() / (ranks[..., k] >= 0).sum()), 4) for r in range(MAX_RANK)]
        for k in range(ranks.shape[-1])
    ]


def top_shares(ranks: Tensor, top: int = 1) -> list[float]:
    """By depth, the share of labels among a drafter's ``top`` best tokens, of ranks ``[S, T, K]``."""
    return (((ranks < top) & (ranks >= 0)).sum((0, 1)) / (ranks >= 0).sum((0, 1))).tolist()


def head_facts(ranks: Tensor) -> dict[str, Any]:
    """What tree.json records of draft heads: the candidates of a merge and the heads' accuracy. ``[S, T, 1, K]``."""
    ranks = ranks[:, :, 0]
    return {"candidates": candidates(ranks), "accuracy_by_head_and_rank": accuracy(ranks)}


def simulate(topology: Topology, ranks: Tensor) -> float:
    """Mean accepted length τ (bonus token included) of a tree, by walking the sequences step by step. Exact for greedy
    decoding where the sequences are the target's own greedy answers; of another text it is the τ of decoding that text,
    which the target would not have written. ``ranks``: ``[S, T, K]``."""
    return simulate_ensemble((topology,), ranks[:, :, None])


# ---- dynamic trees of positions that are independent


def fit_confidence(ranks: Tensor, log_q: Tensor) -> Confidence:
    """How often tokens of each depth and rank are right where those before them are, by their probability q: of all
    exponents in tenths the one under which what happened is likeliest, each rank with the factor that makes the
    expected number of right ones the observed one (a Poisson regression). ``ranks [P, K]``, ``log_q [P, K, R]`` of
    positions at which a step begins."""
    power: list[float] = []
    factor: list[tuple[float, ...]] = []
    top = log_q.shape[2]
    reached = torch.ones(len(ranks), dtype=torch.bool)
    for rank, own in zip(ranks.unbind(1), log_q.double().unbind(1), strict=True):
        reached = reached & (rank >= 0)
        hits = F.one_hot(rank[reached].clamp(max=top), top + 1)[:, :top].double()  # [P', R]
        best = (-torch.inf, 1.0, torch.ones(top).double())
        for exponent in (tenths / 10 for tenths in range(21)):
            expected = (exponent * own[reached]).exp().sum(0)
            factors = (hits.sum(0) + 0.5) / (expected + 0.5)
            logs = factors.log() + exponent * own[reached]
            likelihood = float((hits * logs).sum() - (factors * expected).sum())
            best = max(best, (likelihood, exponent, factors), key=lambda each: each[0])
        power.append(best[1])
        factor.append(tuple(round(each, 4) for each in best[2].tolist()))
        reached = reached & (rank < top)
    return Confidence(tuple(power), tuple(factor))


def dynamic_depths(tree: IndependentTree, ranks: Tensor, log_q: Tensor) -> Tensor:
    """:func:`ensemble_depths` of dynamic trees: ``ranks [S, T, K]``, ``log_q [S, T, K, R]`` → ``[S, T]`` int64."""
    shape, begins = tree.shape, ranks[..., 0] >= 0
    accepted = torch.zeros(begins.shape, dtype=torch.int64)
    places = torch.arange(shape.top_k)
    found: list[Tensor] = []
    pairs = zip(ranks[begins].split(LOGITS), log_q[begins].split(LOGITS), strict=True)
    for true, own in pairs:
        own = tree.log_acceptance(own[:, : shape.depth, : shape.top_k])
        drafted = tree.grow(-torch.ones_like(true[:, 0]), own, places.expand_as(own))  # tokens are ranks
        parent, right = drafted.parent.long().clamp(min=0), drafted.depth == 0
        for depth in range(1, shape.depth + 1):
            agrees = drafted.valid & (drafted.depth == depth) & (drafted.tokens == true[:, depth - 1, None])
            right = right | (agrees & right.gather(1, parent))
        found.append((right * drafted.depth).amax(1).long())
    accepted[begins] = torch.cat(found) if found else accepted[begins]
    return accepted


# ---- ensembles


def best_trees(ranks: Tensor, nodes: int) -> tuple[Topology, ...]:
    """The trees of an ensemble's drafters, of together at most ``nodes`` nodes (the one root included):
    :func:`best_nodes` of ``ranks [S, T, n, K]``."""
    return trees_of(best_nodes(ranks, nodes), ranks.shape[2])


def trees_of(nodes: Sequence[tuple[int, Ranks]], count: int) -> tuple[Topology, ...]:
    """The trees of ``count`` drafters, of (drafter, path) for each node."""
    return tuple(Topology(tuple(path for drafter, path in nodes if drafter == number)) for number in range(count))


def best_nodes(ranks: Tensor, nodes: int) -> list[tuple[int, Ranks]]:
    """At most ``nodes`` − 1 nodes, (drafter, path), of the trees of an ensemble's drafters, chosen one after the other:
    the node that most positions accept which none of the trees reaches so deep yet. So the first ones are those of a
    smaller tree.

    The nodes of different trees that hold equal tokens become one when the trees are merged; which these are is not
    known from ranks ``[S, T, n, K]``, so all are counted. A ValueError if there is no position to count on.
    """
    full = ranks[(ranks >= 0).flatten(2).all(-1)].transpose(0, 1)  # [n, P, K]
    if not full.shape[1]:
        raise ValueError(_NO_POSITION.format(full.shape[2] + 1))
    reached = torch.zeros(full.shape[1], dtype=torch.int64)
    found: list[tuple[int, Ranks]] = []
    right: dict[tuple[int, tuple[int, ...]], Tensor] = {}  # (drafter, path) → positions where it is right
    queue: list[tuple[int, int, int, tuple[int, ...]]] = []  # (−gain, depth, drafter, path): a heap

    def gain(drafter: int, path: tuple[int, ...]) -> int:
        return int((reached[right[drafter, path]] < len(path)).sum())

    def add_children(drafter: int, path: tuple[int, ...], positions: Tensor) -> None:
        if len(path) == full.shape[2]:
            return
        of_next = full[drafter, positions, len(path)]
        for rank in range(MAX_RANK):
            child = (*path, rank)
            right[drafter, child] = positions[of_next == rank]
            if len(right[drafter, child]):
                heapq.heappush(queue, (-gain(drafter, child), len(child), drafter, child))

    for drafter in range(len(full)):
        add_children(drafter, (), torch.arange(full.shape[1]))
    while queue and len(found) < nodes - 1:
        known, depth, drafter, path = heapq.heappop(queue)
        now = gain(drafter, path)  # gains only fall
        if -known != now:
            heapq.heappush(queue, (-now, depth, drafter, path))
            continue
        found.append((drafter, path))
        positions = right[drafter, path]
        reached[positions] = reached[positions].clamp(min=depth)
        add_children(drafter, path, positions)
    return found


def simulate_ensemble(trees: Sequence[Topology], ranks: Tensor) -> float:
    """τ of an ensemble's merged trees, as :func:`simulate`; ``ranks``: ``[S, T, n, K]``."""
    return simulate_depths(ensemble_depths(trees, ranks), ranks[:, :, 0, 0] >= 0)


def ensemble_depths(trees: Sequence[Topology], ranks: Tensor) -> Tensor:
    """How many drafted tokens a step that begins at each position would accept: ``[S, T, n, K]`` → ``[S, T]`` int64."""
    accepted = torch.zeros(ranks.shape[:2], dtype=torch.int64)
    for number, tree in enumerate(trees):
        # By path, where its ranks are the true ones.
        right: dict[Ranks, Tensor] = {(): torch.ones_like(accepted, dtype=torch.bool)}
        for path in tree.paths:  # parents first
            right[path] = right[path[:-1]] & (ranks[:, :, number, len(path) - 1] == path[-1])
            accepted = torch.where(right[path], accepted.clamp(min=len(path)), accepted)
    return accepted


def simulate_depths(accepted: Tensor, begins: Tensor) -> float:
    """τ of the steps of :func:`simulated_steps`, 0 if there is none."""
    committed = [tokens for row in simulated_steps(accepted, begins) for _, tokens in row]
    return sum(committed) / len(committed) if committed else 0.0


def simulated_steps(accepted: Tensor, begins: Tensor) -> list[list[tuple[int, int]]]:
    """Of each text the steps, as the place where it begins and its committed tokens, if steps accept ``accepted
    [S, T]`` drafted tokens where they begin; ``begins [S, T]``: where one can."""
    found: list[list[tuple[int, int]]] = []
    for row, can in zip(accepted.tolist(), begins.tolist(), strict=True):
        places, steps = [t for t, at in enumerate(can) if at], list[tuple[int, int]]()
        t, end = (places[0], places[-1]) if places else (0, -1)
        while t <= end:
            if not can[t]:  # between two answers, or an answer's last token
                t += 1
                continue
            steps.append((t, min(row[t], end - t) + 1))  # a bonus token behind the text's end is not committed
            t += row[t] + 1
        found.append(steps)
    return found


def matched_answers(next_ranks: Tensor, supervised: Tensor, count: int) -> Tensor:
    """Which answers a model reproduces: those whose first ``count`` tokens (all of a shorter one) are its own greedy
    choices (SpecInfer, arXiv 2305.09781 §3; its greedy continuation is the answer's beginning then). ``next_ranks``
    ``[…, S, T]`` of :func:`next_token_ranks` → ``[…, A]`` bool, of the A answers in order of their rows; an answer is a
    run of supervised tokens."""
    marks = supervised.clone()
    marks[:, 0] = False  # no model predicts a text's first token
    starts = (marks & ~F.pad(marks[:, :-1], (1, 0))).nonzero()
    matched = torch.ones(*next_ranks.shape[:-2], len(starts), dtype=torch.bool)
    inside = torch.ones(len(starts), dtype=torch.bool)
    for shift in range(count):
        place = (starts[:, 1] + shift).clamp(max=marks.shape[1] - 1)
        inside = inside & marks[starts[:, 0], place] & (starts[:, 1] + shift < marks.shape[1])
        right = next_ranks[..., starts[:, 0], place] == 0
        matched &= right | ~inside
    return matched


def coverage(matched: Tensor) -> list[float]:
    """coverage@s: the share of answers that any of the first s drafters reproduces; ``[n, A]`` bool → n numbers."""
    return [round(float(matched[: s + 1].any(0).float().mean()), 4) for s in range(len(matched))]


def overlap(matched: Tensor) -> list[list[float]]:
    """Of the answers that either of two drafters reproduces, the share that both do: ``[n, A]`` bool → n × n; 1 where
    neither reproduces any."""
    both = (matched[:, None] & matched[None]).sum(-1)
    either = (matched[:, None] | matched[None]).sum(-1)
    return [
        [round(float(b) / float(e), 4) if e else 1.0 for b, e in zip(*rows, strict=True)]
        for rows in zip(both, either, strict=True)
    ]


def ensemble_facts(ranks: Tensor, matched: Tensor, mark_tokens: int) -> dict[str, Any]:
    """What tree.json records of an ensemble: ``ranks [S, T, n, K]``, matched answers ``[n, A]``."""
    taus = {nodes: round(simulate_ensemble(best_trees(ranks, nodes), ranks), 4) for nodes in NODES}
    return {
        "accuracy_by_ssm_depth_and_rank": [accuracy(of_ssm) for of_ssm in ranks.unbind(2)],
        "coverage": coverage(matched),
        "overlap": overlap(matched),
        "mark_tokens": mark_tokens,
        "answers": matched.shape[1],
        "mean_accepted_length_by_nodes": taus,
    }
