"""Cluster an LM head's rows by DynaSpec's spherical k-means, and by scikit-learn's methods on the same unit vectors.

    python benchmarks/clusters.py --target models/smollm2 --clusters 256 --out runs/bench/clusters.json

    draftsmith         train/clusters.py; «balanced»: no cluster above twice the mean size, as the recipes have it
    MiniBatchKMeans    scikit-learn's, Euclidean, 16,384 rows at a time
    KMeans             scikit-learn's, Euclidean, all rows

By seed (of the seeding): the mean cosine similarity of the rows with their cluster's direction, which k-means is to
raise; the largest cluster over the mean size; the mean silhouette of a sample of rows by cosine distance (1: compact
and apart, 0: between clusters); seconds. Between the first two seeds: the adjusted Rand index (1: the same clusters,
0: agreement by chance).
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from draftsmith.benchmarks.options import check_options, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command
from draftsmith.models.files.locate import known_folder
from draftsmith.models.options import choose_device


def parser() -> argparse.ArgumentParser:
    parser = CommandLine(__doc__)
    parser.add_argument("--target", required=True, metavar="FOLDER", help="a stored model")
    parser.add_argument("--clusters", type=int, default=256, metavar="M", help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="0, 1, …; at least 2 (%(default)s)")
    parser.add_argument("--sample", type=int, default=4096, help="rows of the silhouette (%(default)s)")
    machine_options(parser)
    return parser


if __name__ == "__main__":
    before_imports(parser(), lambda args: known_folder(args.target))

import numpy as np
import torch
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.metrics import adjusted_rand_score, silhouette_score
from torch.nn import functional as F

from draftsmith.benchmarks.tables import facts_of, print_table, table_of, write_report
from draftsmith.models.precision import say
from draftsmith.models.target import load_target
from draftsmith.train.clusters import spherical_kmeans

Labels = Callable[[int], np.ndarray]  # the clusters [V] of a seed


def methods(unit: torch.Tensor, clusters: int) -> dict[str, Labels]:
    """By name, of unit vectors ``[V, d]``."""
    rows = unit.cpu().numpy()

    def own(balanced: float | None) -> Labels:
        return lambda seed: spherical_kmeans(unit, clusters, seed=seed, balanced=balanced).assignment.cpu().numpy()

    return {
        "draftsmith": own(None),
        "draftsmith, balanced": own(2.0),
        "MiniBatchKMeans": lambda seed: MiniBatchKMeans(clusters, batch_size=16_384, random_state=seed).fit_predict(
            rows
        ),
        "KMeans": lambda seed: KMeans(clusters, random_state=seed).fit_predict(rows),
    }


def cohesion(unit: torch.Tensor, labels: np.ndarray, clusters: int) -> float:
    """The mean cosine similarity of the rows with the direction of their cluster's sum."""
    sums = torch.zeros(clusters, unit.shape[1], dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(labels).long(), unit.double().cpu())
    return float(sums.norm(dim=1).sum()) / len(unit)


def main() -> None:
    args = parser().parse_intermixed_args()
    check_options(args, "clusters", "seeds", "sample")
    if args.seeds < 2:
        raise ValueError(f"--seeds {args.seeds}: at least 2, whose clusters are compared")
    device = torch.device(choose_device(args.device))
    torch.set_num_threads(args.threads)
    target = load_target(args.target, dtype="float32", device=str(device), say=say)
    unit = F.normalize(target.lm_head.get_parameter("weight").detach().float(), dim=1)
    if not args.clusters < args.sample <= len(unit):
        raise ValueError(f"--sample {args.sample}: more than the clusters, at most the vocabulary of {len(unit):,}")
    facts = facts_of(__file__, device) | {"target": target.name, "vocab_size": len(unit), "clusters": args.clusters}
    facts["methods"] = {}
    table = table_of("method", "mean cosine", "largest over mean", "silhouette", "seconds", "Rand index, seeds 0 and 1")
    for name, labels_of in methods(unit, args.clusters).items():
        found, rows = [], list[dict[str, Any]]()
        for seed in range(args.seeds):
            began = time.perf_counter()
            found.append(labels_of(seed))
            seconds = time.perf_counter() - began
            largest = np.bincount(found[-1]).max() * args.clusters / len(unit)
            silhouette = silhouette_score(
                unit.cpu().numpy(), found[-1], metric="cosine", sample_size=args.sample, random_state=0
            )
            cosine = cohesion(unit, found[-1], args.clusters)
            rows.append(
                {"mean_cosine": cosine, "largest_over_mean": float(largest), "silhouette": float(silhouette)}
                | {"seconds": seconds}
            )
        same = float(adjusted_rand_score(found[0], found[1]))
        facts["methods"][name] = {"seeds": rows, "adjusted_rand_index": same}
        fields = (("mean_cosine", ".4f"), ("largest_over_mean", ".2f"), ("silhouette", ".3f"), ("seconds", ".1f"))
        table.add_row(name, *(", ".join(f"{row[key]:{form}}" for row in rows) for key, form in fields), f"{same:.3f}")
    print_table(table, f"{target.name}: {len(unit):,} rows, {args.clusters} clusters")
    if args.out:
        write_report(args.out, facts)


if __name__ == "__main__":
    run_command(main)
