"""Clusters of a vocabulary for DynaSpec's shortlists (arXiv 2510.13847): spherical k-means on the rows of an LM head.

Rows and centroids are unit vectors. An iteration assigns each row to the centroid of the highest cosine similarity,
re-seeds the clusters left empty, and makes each centroid the re-normalised sum of its rows. The objective is the mean
cosine similarity of the rows with their centroids, then Σ_k ‖Σ_{i∈k} x_i‖ / V. No iteration lowers it: neither does an
assignment to the nearest centroids, nor the best unit vector for a cluster's rows, nor a row x that leaves a cluster of
sum S for an empty one (‖S − x‖ + ‖x‖ ≥ ‖S‖). A limit on the sizes can, and so can rounding; such an iteration is
dropped, and the run ends. A row of zeros has no direction: it seeds no cluster and has similarity 0.

Shape letters: V vocabulary, d hidden width, M clusters, R some of the rows.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import kmeans_plusplus
from sklearn.metrics import silhouette_score
from torch import Tensor
from torch.nn import functional as F

from draftsmith.common.files import write_json
from draftsmith.inference.measure.report import write_figure

SEEDING_ROWS = 16_384  # k-means++ sees at most so many
SILHOUETTE_ROWS = 4096  # a report's silhouette is that of at most so many
TINY = 1e-30  # rows of a smaller norm count as zeros
EXAMPLES, EXAMPLE_TOKENS = 12, 10  # clusters in a report, and tokens of each


@dataclass
class Clusters:
    """A partition of a vocabulary; its three fields are the state after an iteration, to continue from."""

    assignment: Tensor  # [V] int64
    centroids: Tensor  # [M, d] float32 unit vectors
    objective: list[float]  # after each iteration

    def __post_init__(self) -> None:
        self.sizes = torch.bincount(self.assignment, minlength=len(self.centroids))  # [M] int64
        self.order = self.assignment.argsort(stable=True)  # [V] int64: token ids by cluster, ascending in each
        self.starts = F.pad(self.sizes.cumsum(0), (1, 0))  # [M + 1]: cluster k is order[starts[k] : starts[k + 1]]

    def to(self, device: torch.device) -> "Clusters":
        return Clusters(self.assignment.to(device), self.centroids.to(device), self.objective)


class _Rows:
    """The rows of an LM head ``[V, d]`` as unit vectors, ``chunk`` at a time; rows of zeros stay zeros."""

    def __init__(self, weight: Tensor, chunk: int) -> None:
        if weight.ndim != 2 or not weight.is_floating_point():
            raise ValueError(f"the LM head is {list(weight.shape)} of {weight.dtype}; a matrix of floats is needed")
        norm = torch.cat([torch.linalg.vector_norm(p, dim=1, dtype=torch.float64) for p in weight.split(chunk)]).float()
        if len(wrong := norm.isfinite().logical_not().nonzero()):
            raise ValueError(f"row {int(wrong[0])} of the LM head holds inf or NaN; check the target's weights")
        self.weight, self.chunk = weight, chunk
        self.zeros = norm < TINY  # [V]
        self.norm = norm.masked_fill(self.zeros, math.inf)
        self.ids = torch.arange(len(weight), device=weight.device)

    def unit(self, ids: Tensor) -> Tensor:
        """``[R]`` int64 → ``[R, d]`` float32."""
        return self.weight[ids].float() / self.norm[ids, None]

    def nearest(self, ids: Tensor, centroids: Tensor, full: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The highest cosine similarity of rows ``[R]`` int64 with a centroid, and which one it is: ``[R]`` float32, −2
        for rows of zeros, so below all others; ``[R]`` int64. ``full [M]`` bool: clusters to leave out."""
        similarity, nearest = self.norm.new_empty(len(ids)), torch.empty_like(ids)
        for begin in range(0, len(ids), self.chunk):
            part = slice(begin, begin + self.chunk)
            products = self.unit(ids[part]) @ centroids.T  # [chunk, M]
            if full is not None:
                products.masked_fill_(full, -math.inf)
            similarity[part], nearest[part] = products.max(dim=1)
        return similarity.masked_fill(self.zeros[ids], -2.0), nearest


@torch.no_grad()
def spherical_kmeans(
    weight: Tensor,
    num_clusters: int,
    *,
    seed: int = 0,
    max_iterations: int = 50,
    tolerance: float = 1e-4,
    balanced: float | None = None,
    chunk: int = 4096,
    start: Clusters | Tensor | None = None,
    after: Callable[[Clusters], None] | None = None,
) -> Clusters:
    """Cluster the rows of an LM head by direction; the same arguments give the same clusters on the same device.

    Args:
        weight: ``[V, d]``, of any floating dtype, on any device.
        num_clusters: M. No cluster stays empty.
        seed: of k-means++.
        max_iterations: in all, those of ``start`` included.
        tolerance: stop once an iteration raises the objective by at most this share of it.
        balanced: no cluster has more than ``balanced`` × V / M rows (⌈V / M⌉ if that is more): those of a larger one
            farthest from its centroid go to their nearest cluster with room. The objective may be lower.
        chunk: rows at a time, for temporary tensors ``[chunk, M]`` and ``[chunk, d]``. Another value can change the
            result only where two centroids are equally near to within rounding.
        start: the state to continue from, as if there had been no break; or the initial centroids ``[M, d]``.
        after: called with the state after each iteration.

    Raises:
        ValueError: the weight is no matrix of finite floats, has fewer than M rows that are not zeros, or does not fit
            ``start``; ``balanced`` is below 1.
    """
    rows = _Rows(weight, chunk)
    most = len(weight) - int(rows.zeros.sum())
    if not 0 < num_clusters <= most:
        raise ValueError(f"{num_clusters} clusters of {most} rows that are not zeros; choose 1 to {most}")
    if balanced is not None and not balanced >= 1:
        raise ValueError(f"balanced is {balanced}: even clusters of equal size exceed this limit; choose 1 or more")
    equal = len(weight) / num_clusters
    limit = None if balanced is None else max(math.floor(balanced * equal), math.ceil(equal))
    if not isinstance(start, Clusters):
        seeds = _seeds(rows, num_clusters, seed) if start is None else start
        start = Clusters(torch.zeros_like(rows.ids), F.normalize(seeds.to(rows.norm), dim=1), [])
    state = start.to(weight.device)
    if state.centroids.shape != (num_clusters, weight.shape[1]) or len(state.assignment) != len(weight):
        raise ValueError("start is of another LM head or number of clusters; start without it")
    with torch.autocast(weight.device.type, enabled=False):
        while len(values := state.objective) < max_iterations:
            if len(values) > 1 and values[-1] <= (1 + tolerance) * values[-2]:
                break
            new = _iterate(rows, state, limit)
            if values and new.objective[-1] < values[-1]:
                break
            state = new
            if after:
                after(state)
    return state


def _seeds(rows: _Rows, num_clusters: int, seed: int) -> Tensor:
    """k-means++ on unit vectors, whose squared distance is 2 − 2 cos, of a sample of the rows: ``[M, d]``."""
    ids = rows.ids[~rows.zeros]
    shuffled = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    sample = rows.unit(ids[shuffled[: max(SEEDING_ROWS, num_clusters)].to(ids.device)])
    return torch.from_numpy(kmeans_plusplus(sample.cpu().numpy(), num_clusters, random_state=seed)[0])


def _iterate(rows: _Rows, state: Clusters, limit: int | None) -> Clusters:
    """One iteration: assign, re-seed, limit the sizes, update the centroids."""
    centroids = state.centroids.clone()
    similarity, assignment = rows.nearest(rows.ids, centroids)
    _reseed(rows, centroids, similarity, assignment)
    # Any cluster is equally near to rows of zeros; in the smallest one they cost a shortlist least.
    assignment[rows.zeros] = torch.bincount(assignment[~rows.zeros], minlength=len(centroids)).argmin()
    if limit is not None:
        _limit_sizes(rows, centroids, similarity, assignment, limit)
    # Segment sums over rows sorted by cluster: no atomic additions; in float64, so that the chunk does not matter.
    sums = torch.zeros_like(centroids, dtype=torch.float64)
    for ids in assignment.argsort(stable=True).split(rows.chunk):
        found, counts = assignment[ids].unique_consecutive(return_counts=True)
        sums[found] += torch.segment_reduce(rows.unit(ids).double(), "sum", lengths=counts, axis=0)
    lengths = sums.norm(dim=1)
    cancelled = (lengths < TINY)[:, None]  # opposite rows: all centroids are equally good, and the old one is kept
    centroids = torch.where(cancelled, centroids, (sums / lengths[:, None]).float())
    return Clusters(assignment, centroids, [*state.objective, float(lengths.sum()) / len(assignment)])


def _reseed(rows: _Rows, centroids: Tensor, similarity: Tensor, assignment: Tensor) -> None:
    """Move the rows of the lowest similarity into the empty clusters, one each, but none that is alone. In place."""
    sizes = torch.bincount(assignment[~rows.zeros], minlength=len(centroids)).tolist()
    empty = [cluster for cluster, size in enumerate(sizes) if size == 0]
    worst = similarity.masked_fill(rows.zeros, math.inf).argsort(stable=True).tolist() if empty else []
    for row in worst:
        if not empty:
            break
        giver = int(assignment[row])
        if sizes[giver] > 1:
            sizes[giver] -= 1
            assignment[row], similarity[row] = empty[0], 1.0
            centroids[empty.pop(0)] = rows.unit(rows.ids[row : row + 1])[0]


def _limit_sizes(rows: _Rows, centroids: Tensor, similarity: Tensor, assignment: Tensor, limit: int) -> None:
    """Move the rows of the lowest similarity out of clusters above the limit, each to the nearest cluster with room,
    until none is above. In place. A cluster that has been full gets no more rows, so that M rounds are enough."""
    for _ in range(len(centroids) + 1):
        order = similarity.argsort(descending=True, stable=True)
        order = order[assignment[order].argsort(stable=True)]  # by cluster, in it by similarity, then by id
        sizes = torch.bincount(assignment, minlength=len(centroids))
        ids = order[rows.ids - (sizes.cumsum(0) - sizes)[assignment[order]] >= limit]
        if not len(ids):
            return
        similarity[ids], assignment[ids] = rows.nearest(ids, centroids, full=sizes >= limit)
    raise AssertionError(f"clusters above {limit} rows are left")


@torch.no_grad()
def report(clusters: Clusters, weight: Tensor, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Write ``clusters.json``, also returned, and ``clusters.png``. Without a tokenizer, examples are ids alone.

    Cohesion: the mean cosine similarity of a cluster's rows with its centroid. ``objective_of_one_cluster``: of M = 1.
    ``silhouette``: by cosine distance, the mean over a sample of rows; None if these are of one cluster, or one each.
    Examples: the tokens nearest to the centroid, of clusters from the most to the least cohesive, and of the largest.
    """
    clusters = clusters.to(weight.device)
    rows, total = _Rows(weight, chunk=4096), weight.new_zeros(weight.shape[1], dtype=torch.float64)
    cosines = torch.empty(len(weight), dtype=torch.float64)
    for ids in rows.ids.split(rows.chunk):
        unit = rows.unit(ids).double()
        total += unit.sum(dim=0)
        cosines[ids.cpu()] = (unit * clusters.centroids[clusters.assignment[ids]]).sum(dim=1).cpu()
    cohesion = torch.bincount(clusters.assignment.cpu(), cosines) / clusters.sizes.cpu()
    ranked = cohesion.argsort(descending=True, stable=True)
    shown = ranked[torch.linspace(0, len(ranked) - 1, EXAMPLES).round().long()].tolist()
    values = {"sizes": clusters.sizes.tolist(), "cohesion": [round(value, 4) for value in cohesion.tolist()]}
    examples = []
    for number in dict.fromkeys([*shown, int(clusters.sizes.argmax())]):
        ids = clusters.order[clusters.starts[number] : clusters.starts[number + 1]].cpu()
        ids = ids[cosines[ids].argsort(descending=True, stable=True)[:EXAMPLE_TOKENS]].tolist()
        facts = {"cluster": number, "size": values["sizes"][number], "cohesion": values["cohesion"][number], "ids": ids}
        examples.append(facts | ({"tokens": [tokenizer.decode([i]) for i in ids]} if tokenizer is not None else {}))
    content = {
        "vocab_size": len(weight),
        "num_clusters": len(cohesion),
        "objective": [round(value, 6) for value in clusters.objective],
        "objective_of_one_cluster": round(float(total.norm()) / len(weight), 6),
        "silhouette": _silhouette(rows, clusters),
        **{k: {"min": min(v), "median": statistics.median(v), "max": max(v)} for k, v in values.items()},
        "clusters": values,
        "examples": examples,
    }
    write_json(folder / "clusters.json", content)
    _plot(content, folder / "clusters.png")
    return content


def _silhouette(rows: _Rows, clusters: Clusters) -> float | None:
    ids = rows.ids[~rows.zeros]
    sample = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:SILHOUETTE_ROWS].to(ids.device)]
    labels = clusters.assignment[sample].cpu().numpy()
    if not 1 < len(np.unique(labels)) < len(labels):
        return None
    return round(float(silhouette_score(rows.unit(sample).cpu().numpy(), labels, metric="cosine")), 4)


def _plot(content: dict[str, Any], path: Path) -> None:
    """A histogram of the sizes, and the cohesion of each cluster over its size."""
    from matplotlib.figure import Figure  # its import writes into the user's cache folder
    from matplotlib.ticker import LogLocator

    sizes, median = content["clusters"]["sizes"], content["sizes"]["median"]
    bins = np.geomspace(min(sizes) / 1.6, max(sizes) * 1.6, 33).tolist()
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(sizes, bins, color="#2f7d4f")
    left.axvline(median, color="#30343c", ls="--", label=f"median {median:,g}")
    right.scatter(sizes, content["clusters"]["cohesion"], s=12, color="#2f7d4f", alpha=0.7)
    for name, value in (("objective", content["objective"][-1]), ("one cluster", content["objective_of_one_cluster"])):
        right.axhline(value, color="#30343c", ls="--" if name == "objective" else ":", label=f"{name} {value:.3f}")
    for axis, title, what in ((left, "Sizes", "clusters"), (right, "Cohesion", "mean cosine with the centroid")):
        axis.set(title=f"{title} of the clusters", ylabel=what, xlabel="tokens in the cluster", xscale="log")
        axis.set_xlim(bins[0], bins[-1])
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.xaxis.set_minor_formatter("")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)
