"""Shortlists of a drafter's LM head: at each depth only some of its rows are computed, and the target still verifies
over its whole vocabulary.

    fr_spec      the most frequent tokens of a general corpus (FR-Spec, arXiv 2502.14856)
    vocab_trim   the most frequent tokens of the target's own text (VocabTrim, arXiv 2506.22694)
    dynaspec     clusters of tokens, chosen for each node by a small router (DynaSpec, arXiv 2510.13847)
    low_rank     the tokens that an approximation of the head of low rank finds for each node

All have one form: the head's rows are put in an order, and a shortlist of depth t has at most ``capacity[t]`` of them.
The first two order them by frequency. DynaSpec orders them by cluster, and takes the k_c(t) clusters of the highest
scores, as many as fit:

    s = W₂ · SiLU(W₁ · cat(norm(e), norm(h̃)) + b_t) + b₂        e: embedding of the node's token; b_t: of its depth

h̃ is what the drafter's layer continues from (§3 of the paper): the fused feature of the root, for deeper nodes their
parent's hidden state. Both are known before the layer runs, so the router can run at the same time.

A low-rank list reads what the LM head reads, x, after the layer. Its tokens are those of the ``capacity[t]`` highest
scores up · (down · x) of each node, where up · down is nearest to the head for such x (:func:`low_rank_factors`). The
head's own rows give their logits, so that with full rank a node's best tokens are those of the whole head.

Shape letters: P positions, S tokens that the drafter chooses from, M clusters, e width of embeddings, d of hidden
states, h of the router, K depths, r rank.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.kernels.backend import why_not_triton
from draftsmith.kernels.head_topk import MAX_COUNT, head_topk
from draftsmith.kernels.linear import linear
from draftsmith.kernels.shortlist_linear import Shortlist as Rows
from draftsmith.kernels.shortlist_linear import pack_shortlist
from draftsmith.models.options import ShortlistKind, ShortlistSchedule
from draftsmith.models.vocabulary import check_whole

DEPTHS = 6  # K: deeper nodes have the last one's shortlist
_ROWS = 1 << 14  # of an LM head that are converted at a time
_SIZES = {  # that a config has to give
    "dynaspec": ("num_clusters", "router_width", "embedding_size", "feature_size"),
    "low_rank": ("rank", "feature_size"),
}


def budget(most: int, schedule: ShortlistSchedule, depths: int = DEPTHS) -> tuple[int, ...]:
    """Clusters, or tokens, of the shortlists of depths 0 … depths − 1.

        fixed            k(t) = k_max
        position_aware   k(t) = k_max for t = 0 and 1;  max(1, ⌊k_max / (2 (t + 1))⌋) for t ≥ 2  (DynaSpec §3.3)

    ``most``: k_max."""
    if schedule == "fixed":
        return (most,) * depths
    return tuple(most if depth < 2 else max(1, most // (2 * (depth + 1))) for depth in range(depths))


@dataclass(frozen=True)
class ShortlistConfig:
    """The shape of a drafter's shortlists.

    outputs: S, rows of the drafter's LM head.
    capacity: tokens of a shortlist at most, of ``low_rank`` of each node, by depth; deeper nodes have the last one's.
    clusters: of ``dynaspec``, clusters wanted, by depth; ``num_clusters`` M, ``router_width`` h, ``embedding_size`` e
        and ``feature_size`` d.
    rank: of ``low_rank``, r; ``feature_size``: numbers that the LM head reads.
    """

    shortlist: ShortlistKind
    outputs: int
    capacity: tuple[int, ...]
    clusters: tuple[int, ...] = ()
    num_clusters: int = 0
    router_width: int = 0
    embedding_size: int = 0
    feature_size: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("capacity", "clusters"):
            if isinstance(getattr(self, name), list):  # from a file
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.shortlist not in get_args(ShortlistKind):
            raise ValueError(f"field 'shortlist' is {self.shortlist!r}; known: {', '.join(get_args(ShortlistKind))}")
        check_whole(self, ("outputs", *_SIZES.get(self.shortlist, ())))
        if self.shortlist == "low_rank" and self.rank > (most := min(self.outputs, self.feature_size)):
            raise ValueError(
                f"field 'rank' is {self.rank}; an LM head of {self.outputs} × {self.feature_size} has {most}"
            )
        lists = {"capacity": self.outputs}
        if self.shortlist == "dynaspec":
            lists["clusters"] = self.num_clusters
        for name, most in lists.items():
            values = getattr(self, name)
            whole = isinstance(values, tuple) and all(type(value) is int and 1 <= value <= most for value in values)
            if not whole or not values:
                shown = list(values) if isinstance(values, tuple) else values
                raise ValueError(f"field '{name}' is {shown!r}; it has to be a list of whole numbers from 1 to {most}")

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self) | {"capacity": list(self.capacity), "clusters": list(self.clusters)}
        return {name: value for name, value in fields.items() if value}

    def with_budget(self, k_max: int, schedule: ShortlistSchedule) -> "ShortlistConfig":
        """Of ``dynaspec``, with k_c(t) clusters at depth t, and room for as many tokens as these have on average."""
        clusters, mean = budget(k_max, schedule), self.outputs / self.num_clusters
        capacity = tuple(min(self.outputs, round(count * mean)) for count in clusters)
        return replace(self, clusters=clusters, capacity=capacity)

    @property
    def fewest(self) -> int:
        """Places of the shortest shortlist. Some may stay empty; in greedy mode a tree with more children than tokens
        has token 0, or by a kernel the list's first one, in their place, which is verified as any other."""
        return min(self.capacity)

    def tokens(self, depth: int) -> int:
        """The capacity of the shortlists of a depth."""
        return self.capacity[min(depth, len(self.capacity) - 1)]

    def wanted(self, depth: int) -> int:
        """The clusters wanted at a depth."""
        return self.clusters[min(depth, len(self.clusters) - 1)]


def head_rows_of(head: nn.Module) -> Tensor:
    """The rows of an LM head, ``[S, d]``, which shortlists choose from.
    Raises ValueError: it is quantised or no plain matrix."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError("shortlists need the rows of the LM head, and it is quantised or no plain matrix")
    return weight.detach()


def low_rank_factors(head: Tensor, rank: int, moment: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest matrix of rank r to an LM head W ``[S, d]``, for what it reads: down ``[r, d]`` and up ``[S, r]``,
    float32, minimise E‖W x − up · down · x‖² over x with E[x xᵀ] = ``moment``, ``[d, d]``. By the eigenvectors of
    M^½ WᵀW M^½, as S is many times d. With the identity for M, it is the truncated SVD of W."""
    gram = torch.zeros(head.shape[1], head.shape[1], dtype=torch.float64, device=head.device)
    for rows in head.split(_ROWS):
        gram.addmm_(rows.t().double(), rows.double())
    values, vectors = torch.linalg.eigh(moment.to(gram))
    scale = values.clamp(min=1e-6 * float(values[-1])).sqrt()  # so that directions never read have an inverse too
    root = (vectors * scale) @ vectors.t()
    best = torch.linalg.eigh(root @ gram @ root).eigenvectors[:, -rank:].flip(1)
    down = best.t() @ (vectors / scale) @ vectors.t()
    out = (root @ best).float()
    return down.float().contiguous(), torch.cat([rows.float() @ out for rows in head.split(_ROWS)])


class Router(nn.Module):
    """Scores of token clusters, from a node's token and the hidden state above it; formula in the module's docstring.

    The norms are root mean squares, without weights, so that the router does not depend on how large a drafter's
    hidden states are.
    """

    def __init__(self, embedding_size: int, feature_size: int, width: int, num_clusters: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(embedding_size + feature_size, width, bias=False)
        self.depth = nn.Embedding(DEPTHS, width)
        self.clusters = nn.Linear(width, num_clusters)
        nn.init.zeros_(self.depth.weight)

    def forward(self, embeddings: Tensor, hidden: Tensor, depth: Tensor | int) -> Tensor:
        """``[…, e]``, ``[…, d]``, depth ``[…]`` int64 or one number → scores ``[…, M]``."""
        x = torch.cat((_norm(embeddings), _norm(hidden)), -1)
        at = self.depth.weight[min(depth, DEPTHS - 1)] if isinstance(depth, int) else self.depth(depth)
        return self.clusters(F.silu(self.inputs(x.to(self.inputs.weight.dtype)) + at))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class ShortlistHead(nn.Module):
    """The order of a drafter's LM head and, of ``dynaspec``, the router, of ``low_rank`` the factors.

    order: ``[S]`` int64, the place in the drafter's vocabulary of each row: by cluster, or by falling frequency.
    starts: ``[M + 1]`` int64, the first row of each cluster, then S; empty without clusters.
    down, up: ``[r, d]`` and ``[S, r]`` as :func:`low_rank_factors`, the rows of ``up`` in this order.
    """

    down: Tensor
    up: Tensor

    def __init__(self, config: ShortlistConfig) -> None:
        super().__init__()
        self.config = config
        self.order: Tensor
        self.starts: Tensor
        self.register_buffer("order", torch.arange(config.outputs))
        self.register_buffer("starts", torch.zeros(config.num_clusters + 1 if config.num_clusters else 0).long())
        self.router: Router | None = None
        if config.shortlist == "dynaspec":
            self.router = Router(config.embedding_size, config.feature_size, config.router_width, config.num_clusters)
        if self.low_rank:
            self.register_buffer("down", torch.zeros(config.rank, config.feature_size))
            self.register_buffer("up", torch.zeros(config.outputs, config.rank))

    @property
    def low_rank(self) -> bool:
        """Whether the list follows from what the LM head reads."""
        return self.config.shortlist == "low_rank"

    @classmethod
    def from_artifact(cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], where: str) -> "ShortlistHead":
        """From a folder's config and weights. Raises ValueError: a field or tensor is missing, unknown or damaged."""
        names = ShortlistConfig.__dataclass_fields__
        missing = [name for name in ("shortlist", "outputs", "capacity") if name not in config]
        if missing:
            raise ValueError(f"{where}/config.json: field '{missing[0]}' is missing")
        try:
            shape = ShortlistConfig(**{name: config[name] for name in names if name in config})
        except ValueError as wrong:
            raise ValueError(f"{where}/config.json: {wrong}") from None
        head, file = cls(shape), f"{where}/model.safetensors"
        expected = {name: tuple(p.shape) for name, p in head.state_dict().items()}
        stored = {name: tuple(w.shape) for name, w in weights.items()}
        if expected != stored:
            name = sorted(name for name in expected | stored if expected.get(name) != stored.get(name))[0]
            raise ValueError(
                f"{file}: '{name}' is {stored.get(name, 'missing')} instead of {expected.get(name, 'absent')}, as "
                "config.json promises; fetch or train the drafter again"
            )
        order, starts = weights["order"].long(), weights["starts"].long()
        if not torch.equal(order.sort().values, torch.arange(shape.outputs)):
            raise ValueError(f"{file}: 'order' does not hold each row of the LM head once; fetch or train it again")
        if len(starts) and (int(starts[0]) or int(starts[-1]) != shape.outputs or bool((starts.diff() < 1).any())):
            raise ValueError(f"{file}: 'starts' does not ascend from 0 to {shape.outputs}; fetch or train it again")
        head.load_state_dict({name: w.long() if name in ("order", "starts") else w for name, w in weights.items()})
        return head.eval().requires_grad_(False)

    def rows(self, scores: Tensor, depth: int) -> Rows:
        """The rows of the clusters of the highest scores ``[B, M]``, as many as depth's shortlist wants and holds."""
        return pack_shortlist(scores, self.starts, self.config.wanted(depth), self.config.tokens(depth))

    def candidates(self, read: Tensor, depth: int) -> Tensor:
        """The rows of each node's highest scores: what the LM head reads, ``[P, d]``, → ``[P, k]`` int64, ascending."""
        low, count = linear(read.to(self.down.dtype), self.down), self.config.tokens(depth)
        if count > MAX_COUNT or why_not_triton(low):
            rows = linear(low, self.up).topk(count, -1).indices
        else:
            rows = head_topk(low, self.up, count)[1]
        return rows.sort(-1).values

    def of_level(self, read: Tensor, depth: int) -> Tensor:
        """The candidates of a level's nodes together, each row once: ``[B, n, d]`` → ``[B, min(n k, S)]`` int64,
        ascending, then padding (−1)."""
        outputs = self.config.outputs
        found = self.candidates(read.flatten(0, 1), depth).view(len(read), -1).sort(-1).values
        again = F.pad(found[:, 1:] == found[:, :-1], (1, 0))
        rows = found.masked_fill(again, outputs).sort(-1).values[:, :outputs]
        return torch.where(rows < outputs, rows, -1)

    def choose(self, embeddings: Tensor, hidden: Tensor, depth: int) -> Rows | None:
        """The rows that each of P nodes would have for itself, from ``[P, e]`` and ``[P, d]`` (of ``low_rank``, what
        the LM head reads); None if the list is the same for all nodes."""
        if self.low_rank:
            rows = self.candidates(hidden, depth)
            count = torch.full_like(rows[:, 0], rows.shape[1])
            return Rows(rows, count, torch.zeros_like(count))
        if self.router is None:
            return None
        return self.rows(self.router(embeddings, hidden, depth).float(), depth)

    def contains(self, tokens: Tensor, chosen: Rows | None, depth: int) -> Tensor:
        """Whether tokens are in the shortlists of nodes; for training and evaluation.
        ``tokens``: ``[P, R]`` int64 places in the drafter's vocabulary.
        ``chosen``: what :meth:`choose` returned.
        Returns ``[P, R]`` bool."""
        row = torch.empty_like(self.order)
        row[self.order] = torch.arange(len(row), device=row.device)
        row = row[tokens]
        if chosen is None:
            return row < self.config.tokens(depth)
        taken = torch.zeros(len(tokens), len(self.order) + 1, dtype=torch.bool, device=tokens.device)
        padded = torch.where(chosen.rows < 0, len(self.order), chosen.rows)
        return taken.scatter_(1, padded, value=True).gather(1, row)
