"""Time spherical k-means on synthetic LM heads, beside scikit-learn's KMeans on the same unit vectors.

    python benchmarks/kmeans.py --vocabulary 49152 128256 262144 --hidden 576 --clusters 256 --out runs/clusters.json

The rows of a head are M random directions with noise, in bfloat16. Both begin with the same k-means++ centroids, whose
time is not counted, and do at most as many iterations; KMeans has neither unit centroids nor a limit of the sizes. The
objective is the mean cosine similarity of a row with its cluster's direction. Each runs once, in a process of its own;
memory is what its resident set grows by at most, beyond the head in bfloat16.
"""

import resource
import time
from typing import Any

from draftsmith.benchmarks.options import check_options, list_option, machine_options
from draftsmith.common.command import CommandLine, before_imports, run_command

PARSER = CommandLine(__doc__)
HEADS = "V, one or more (default: those of SmolLM2, Llama 3 and Gemma)"
list_option(PARSER, "--vocabulary", [49152, 128256, 262144], help=HEADS)
PARSER.add_argument("--hidden", type=int, default=576, help="d (default 576)")
PARSER.add_argument("--clusters", type=int, default=256, help="M (default 256)")
PARSER.add_argument("--iterations", type=int, default=20, help="at most (default 20)")
PARSER.add_argument("--balanced", type=float, help="largest size, in multiples of V / M; left out: any")
machine_options(PARSER, device=False)
if __name__ == "__main__":
    before_imports(PARSER)

import torch
from sklearn.cluster import KMeans, kmeans_plusplus
from torch import Tensor
from torch.nn import functional as F

from draftsmith.benchmarks.common import alone
from draftsmith.benchmarks.tables import facts_of, print_table, table_of, write_report
from draftsmith.train.clusters import SEEDING_ROWS, spherical_kmeans

METHODS = ("draftsmith", "scikit-learn")


def synthetic_head(vocabulary: int, hidden: int, clusters: int) -> Tensor:
    """``[V, d]`` bfloat16: directions with noise of the same length, and norms from 1 to 2."""
    drawn = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(clusters, hidden, generator=drawn), dim=1)
    head = torch.empty(vocabulary, hidden, dtype=torch.bfloat16)
    for part in head.split(1 << 14):
        chosen = torch.randint(clusters, (len(part),), generator=drawn)
        noise = torch.randn(part.shape, generator=drawn) / hidden**0.5
        part.copy_((directions[chosen] + noise) * (1 + torch.rand(len(part), 1, generator=drawn)))
    return head


def objective_of(head: Tensor, assignment: Tensor) -> float:
    """Mean cosine similarity of the rows with their cluster's direction: Σ_k ‖Σ_{i∈k} x_i‖ / V."""
    sums = torch.zeros(int(assignment.max()) + 1, head.shape[1], dtype=torch.float64)
    for rows, numbers in zip(head.split(4096), assignment.split(4096), strict=True):
        sums.index_add_(0, numbers, F.normalize(rows.double(), dim=1))
    return float(sums.norm(dim=1).sum()) / len(head)


def run(method: str, vocabulary: int, options: dict[str, Any], iterations: int) -> dict[str, float]:
    """One method on one head, in this process: seconds, MiB and objective."""
    torch.set_num_threads(options["threads"])
    head = synthetic_head(vocabulary, options["hidden"], options["clusters"])
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))  # both methods start alike
    sample = F.normalize(head[order[:SEEDING_ROWS]].float(), dim=1).numpy()
    seeds = kmeans_plusplus(sample, options["clusters"], random_state=0)[0]
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if method == "draftsmith":
        limits = {"max_iterations": iterations, "balanced": options["balanced"]}
        found = spherical_kmeans(head, options["clusters"], start=torch.from_numpy(seeds), **limits)
        assignment, done = found.assignment, len(found.objective)
    else:
        kmeans = KMeans(len(seeds), init=seeds, n_init=1, max_iter=iterations, tol=0.0)  # pyright: ignore[reportArgumentType]
        assignment = torch.from_numpy(kmeans.fit(F.normalize(head.float(), dim=1).numpy()).labels_).long()
        done = int(kmeans.n_iter_)
    seconds = time.perf_counter() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"seconds": seconds, "mib": grown, "iterations": done, "objective": objective_of(head, assignment)}


def main() -> None:
    args = PARSER.parse_args()
    check_options(args, "hidden", "clusters", "iterations")
    torch.set_num_threads(args.threads)  # which device_name names
    if args.balanced is not None and not args.balanced >= 1:
        PARSER.error(f"--balanced {args.balanced}: even clusters of equal size exceed it; give 1 or more")
    if args.clusters > SEEDING_ROWS:
        PARSER.error(f"--clusters {args.clusters}: at most {SEEDING_ROWS}, the rows that k-means++ sees")
    if min(args.vocabulary) < args.clusters:
        PARSER.error(f"--vocabulary {min(args.vocabulary)}: fewer rows than --clusters {args.clusters}")
    options, results = vars(args) | {"out": str(args.out)}, list[dict[str, Any]]()
    table = table_of("V", "", "seconds", "iterations", "MiB", "objective", left=2)
    for vocabulary in args.vocabulary:
        iterations = args.iterations
        for method in METHODS:
            found = alone(run, method, vocabulary, options, iterations)
            iterations = int(found["iterations"])
            results.append({"vocabulary": vocabulary, "method": method, **found})
            seconds, mib, objective = f"{found['seconds']:.1f}", f"{found['mib']:,.0f}", f"{found['objective']:.4f}"
            table.add_row(f"{vocabulary:,}", method, seconds, str(found["iterations"]), mib, objective)
    facts = facts_of(__file__, torch.device("cpu")) | {"options": options, "results": results}
    print_table(table, f"{facts['device']}, d = {args.hidden}, M = {args.clusters}")
    if args.out:
        write_report(args.out, facts)


if __name__ == "__main__":
    run_command(main)
