"""Spherical k-means against its definition in float64, what no iteration may do, limits, resumption, the report."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from draws import SEED, occurs
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from sklearn.metrics import adjusted_rand_score
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.models.tokenizer import load_tokenizer
from draftsmith.train import checkpoint, clusters
from draftsmith.train.clusters import Clusters, report, spherical_kmeans


def make_weight(seed, rows=90, width=7):
    """Rows of very different norms; two of zeros, and three that repeat others' directions."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator) + 0.5
    weight *= 10 ** torch.empty(rows, 1).uniform_(-3, 3, generator=generator)
    weight[[4, 11]] = 0
    weight[[20, 21, 22]] = weight[23] * torch.tensor([[1.0], [2.0], [0.25]])  # exact in float32
    return weight


def unit_rows(weight):
    """In float64; rows of zeros stay zeros."""
    weight = weight.double().cpu().numpy()
    norm = np.linalg.norm(weight, axis=1, keepdims=True)
    return weight / np.where(norm == 0, 1, norm)


def reference(weight, centroids, iterations):
    """By the definition, in float64, one cluster and one row at a time: assignment, centroids and objective after each
    iteration, and the number of clusters that it finds empty."""
    rows, centroids, states, empty = unit_rows(weight), unit_rows(centroids), [], []
    directed = np.flatnonzero(np.linalg.norm(rows, axis=1))
    for _ in range(iterations):
        cosines = rows @ centroids.T
        assignment, best = cosines.argmax(1), cosines.max(1)
        empty.append(0)
        for cluster in range(len(centroids)):
            if not (assignment[directed] == cluster).any():
                empty[-1] += 1
                row = next(
                    row
                    for row in directed[best[directed].argsort(kind="stable")]
                    if (assignment[directed] == assignment[row]).sum() > 1
                )
                assignment[row], best[row] = cluster, 1
        zeros = np.setdiff1d(np.arange(len(rows)), directed)
        assignment[zeros] = np.bincount(assignment[directed], minlength=len(centroids)).argmin()
        centroids = np.stack([rows[assignment == k].sum(0) for k in range(len(centroids))])
        centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
        states.append((assignment, centroids, objective_of(rows, assignment, centroids)))
    return states, empty


def objective_of(rows, assignment, centroids):
    return float((rows * centroids[assignment]).sum(1).mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "seed, num_clusters, equal, empty",
    [  # at first, and later
        (0, 6, 0, [0, 0]),
        (1, 1, 0, [0, 0]),
        (2, 25, 0, [0, 0]),
        (3, 12, 5, [5, 0]),
        (4, 60, 20, [20, 3]),
        (20, 40, None, [2, 1]),
    ],
)
def test_equals_float64_reference(device, seed, num_clusters, equal, empty, dtype):
    weight = make_weight(seed).to(dtype)
    if equal is None:
        start = torch.randn(num_clusters, 7, generator=torch.Generator().manual_seed(seed)) + 0.5
    else:
        start = weight[torch.arange(num_clusters) + 25].float()
        start[:equal] = start[-1]  # all but the first one of them get no row
    states = []
    found = spherical_kmeans(
        weight.to(device), num_clusters, start=start, max_iterations=6, tolerance=0, chunk=16, after=states.append
    )
    expected, found_empty = reference(weight, start, len(states))
    assert len(states) == 6 or states[-1].objective[-1] == pytest.approx(states[-2].objective[-1], abs=1e-7)
    if dtype != torch.bfloat16 and not SEED:
        assert [found_empty[0], sum(found_empty[1:])] == empty
    for state, (assignment, centroids, _) in zip(states, expected, strict=True):
        assert state.assignment.tolist() == assignment.tolist()
        assert np.abs(state.centroids.cpu().double().numpy() - centroids).max() < 1e-6
    assert found.objective == pytest.approx([objective for _, _, objective in expected], abs=1e-6)
    assert found.assignment.dtype == torch.int64 and found.centroids.dtype == torch.float32
    assert (found.assignment.device.type, found.centroids.device.type) == (device.type, device.type)


@st.composite
def small_cases(draw):
    """Few small whole numbers: rows of zeros, equal rows, opposite rows; initial centroids that repeat."""
    width = draw(st.integers(1, 4))
    row = st.lists(st.integers(-2, 2), min_size=width, max_size=width)
    weight = torch.tensor(draw(st.lists(row, min_size=1, max_size=24)), dtype=torch.float32)
    directed = weight[weight.norm(dim=1) > 0]
    num_clusters = draw(st.integers(1, max(1, len(directed))))
    start = torch.tensor(draw(st.lists(row.filter(any), min_size=num_clusters, max_size=num_clusters)))
    return weight, num_clusters, start, draw(st.sampled_from([None, 1.0, 1.3, 2.5])), draw(st.integers(1, 30))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(case=small_cases())
def test_what_holds_for_every_weight(case):
    weight, num_clusters, start, balanced, chunk = case
    if not weight.any():
        with pytest.raises(ValueError, match=r"clusters of 0 rows that are not zeros"):
            spherical_kmeans(weight, num_clusters)
        return
    states = []
    found = spherical_kmeans(
        weight, num_clusters, start=start, balanced=balanced, chunk=chunk, tolerance=0, after=states.append
    )
    assert (np.diff(found.objective) >= 0).all()
    rows = unit_rows(weight)
    for number, state in enumerate(states):
        centroids = state.centroids.double().numpy()
        assert state.objective == found.objective[: number + 1]
        assert np.linalg.norm(centroids, axis=1) == pytest.approx(np.ones(num_clusters), abs=1e-6)
        owned = np.bincount(state.assignment[weight.norm(dim=1) > 0], minlength=num_clusters)
        assert owned.min() > 0 and state.sizes.sum() == len(weight)
        mean = objective_of(rows, state.assignment.numpy(), centroids)
        assert state.objective[-1] == pytest.approx(mean, abs=1e-6)
        if balanced:
            limit = max(int(balanced * len(weight) / num_clusters), math.ceil(len(weight) / num_clusters))
            assert state.sizes.max() <= limit
    if not balanced:
        # Neither re-seeding nor the update lowers what the assignment to the initial centroids has, …
        assert found.objective[0] >= (rows @ unit_rows(start).T).max(1).mean() - 1e-6
        # … and it did not end before its time: one more step by the definition gains nothing.
        nearest = (rows @ found.centroids.double().numpy().T).max(1).mean()
        assert len(found.objective) == 50 or nearest == pytest.approx(found.objective[-1], abs=1e-6)


def planted(rows=300, groups=12, width=20, seed=0):
    """Groups of rows around orthogonal directions, so narrow that k-means++ hardly ever begins twice in one."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randint(groups, (rows,), generator=generator)
    weight = torch.eye(width)[truth] + 0.003 * torch.randn(rows, width, generator=generator)
    return weight * torch.empty(rows, 1).uniform_(0.1, 9, generator=generator), truth


@pytest.mark.parametrize("sample", [16_384, 60])
def test_finds_planted_clusters(monkeypatch, device, sample):
    """k-means++ begins in every group, also when it sees a sample: M rows at random would miss some."""
    monkeypatch.setattr(clusters, "SEEDING_ROWS", sample)
    weight, truth = planted()
    weight[7:40:3] = 0
    seen = weight.norm(dim=1) > 0
    for seed in range(5):
        found = spherical_kmeans(weight.to(device), 12, seed=seed)
        assert adjusted_rand_score(truth[seen], found.assignment.cpu()[seen]) == 1
        assert found.objective[-1] > 0.95 * float(seen.double().mean())


def test_seeding_leaves_zeros_out():
    weight = torch.zeros(40, 6)
    weight[::8, :5] = torch.eye(5)
    seeds = clusters._seeds(clusters._Rows(weight, chunk=16), 5, seed=0)
    assert sorted(seeds.argmax(1).tolist()) == list(range(5)) and seeds.norm(dim=1).tolist() == [1] * 5


def test_seed(device):
    weight = make_weight(5, rows=400, width=12).to(device)
    first, again, other = (spherical_kmeans(weight, 20, seed=seed) for seed in (1, 1, 2))
    assert first.assignment.tolist() == again.assignment.tolist() and first.objective == again.objective
    assert first.centroids.equal(again.centroids)
    assert first.objective != other.objective


@pytest.mark.parametrize("balanced", [None, 1.2])
def test_chunk_does_not_matter(device, balanced):
    weight = make_weight(6, rows=200, width=16).to(device)
    whole, *others = (
        spherical_kmeans(weight, 9, chunk=chunk, start=weight[30:39], balanced=balanced) for chunk in (999, 1, 7, 200)
    )
    assert len(whole.objective) > 2
    for found in others:
        assert found.assignment.equal(whole.assignment)
        assert found.centroids.sub(whole.centroids).abs().max() < 1e-6
        assert found.objective == pytest.approx(whole.objective, abs=1e-9)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor computed."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and "split" not in str(func):  # views of the weight
                self.elements = max(self.elements, tensor.numel())
        return result


def test_chunk_bounds_memory():
    """Neither all similarities [V, M] nor a copy of all rows [V, d] are ever computed."""
    weight = torch.randn(2000, 48)
    with LargestTensor() as largest:
        spherical_kmeans(weight, 40, chunk=50, start=weight[:40], balanced=1.1, max_iterations=3)
    assert 40 * 50 <= largest.elements <= 50 * 48  # [chunk, d]; also above V


def test_autocast_changes_nothing():
    weight = make_weight(7, rows=400, width=32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = spherical_kmeans(weight, 40, start=weight[30:70])
    outside = spherical_kmeans(weight, 40, start=weight[30:70])
    assert inside.objective == outside.objective and inside.assignment.equal(outside.assignment)


@pytest.mark.parametrize(
    "rows, num_clusters, balanced, most",
    [(90, 6, 1.0, 15), (90, 7, 1.0, 13), (90, 7, 1.5, 19), (90, 90 - 2, 1.0, 2), (90, 4, 3.9, 87)],
)
def test_limit_on_sizes(device, rows, num_clusters, balanced, most):
    weight = make_weight(8, rows).to(device)
    weight[:, 0] += 10 * weight.norm(dim=1)  # one direction in common: without a limit, sizes differ much
    free = spherical_kmeans(weight, num_clusters)
    found = spherical_kmeans(weight, num_clusters, balanced=balanced)
    assert found.sizes.max() <= most
    occurs(found.sizes.max() == most or free.sizes.max() <= most)
    assert (np.diff(found.objective) >= 0).all()


@pytest.mark.fixed_seed("a draw in which an iteration would lower the objective")
@pytest.mark.parametrize("seed, kept", [(1, 4), (3, 3)])
def test_ends_before_an_iteration_that_lowers_the_objective(device, seed, kept):
    weight, states = make_weight(seed), []
    start = weight[25:31]
    found = spherical_kmeans(weight.to(device), 6, start=start, balanced=1, tolerance=0, after=states.append)
    assert len(found.objective) == len(states) == kept and (np.diff(found.objective) > 0).all()
    assert found is states[-1]


@pytest.mark.parametrize(
    "centroids, rows, expected",
    [
        # the two farthest of four leave; the nearest other cluster is full
        ((0, 60, 90), (5, 10, 15, 20, 55, 65), [0, 0, 2, 2, 1, 1]),
        # both go where one has room: the nearer one stays
        ((0, 60, 180), (5, 10, 15, 20, 58, 190), [0, 0, 2, 1, 1, 2]),
        # the second cluster is empty: the row at -80 becomes its centroid, too far for the one at 6, …
        ((0, 0, 70), (2, 4, 6, -80, 70), [0, 0, 2, 1, 2]),
        # … and stays there when two rows come
        ((0, 0, 180), (2, 4, -6, -8, -80, 180), [0, 0, 2, 1, 1, 2]),
    ],
)
def test_rows_leave_for_the_nearest_cluster_with_room(device, centroids, rows, expected):
    def at(degrees):
        angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
        return torch.stack([angles.cos(), angles.sin()], dim=1).float().to(device)

    found = spherical_kmeans(at(rows), 3, start=at(centroids), balanced=1, max_iterations=1)
    assert found.assignment.tolist() == expected


def test_zeros_and_duplicates(device):
    weight = torch.zeros(50, 4)
    weight[:30] = torch.tensor([1.0, 2, 3, 4])
    weight[30:34] = torch.eye(4)
    weight[34:36] = torch.tensor([[-1.0, 0, 0, 0], [1e-25, 0, 0, 0]])  # its square is 0 in float32
    found = spherical_kmeans(weight.to(device), 6, seed=0)
    assert found.centroids.isfinite().all() and all(map(math.isfinite, found.objective))
    assert len(set(found.assignment[:30].tolist())) == 1
    assert len(set(found.assignment[36:].tolist())) == 1
    assert found.assignment[35] == found.assignment[30]
    assert found.objective[-1] == pytest.approx(36 / 50, abs=1e-6)  # six directions, two of them opposite
    equal = spherical_kmeans(torch.ones(9, 3, device=device), 4)
    assert equal.sizes.min() == 1 and equal.objective[-1] == pytest.approx(1)
    # Zeros alone do not fill a cluster: (2, 1), the farthest from the other centroid, begins the first one.
    weight, start = torch.tensor([[0.0, 0], [0, 0], [1, 0], [2, 1], [3, 0]]), torch.tensor([[-1.0, 0], [1, 0]])
    filled = spherical_kmeans(weight.to(device), 2, start=start, max_iterations=1)
    assert filled.assignment.tolist() == [0, 0, 1, 0, 1]
    # Above the limit, zeros leave first, also where a row has a negative similarity.
    weight = torch.tensor([[1.0, 0], [1, 0.1], [-1, -0.3], [0, 0], [0, 0], [0, 0]])
    limited = spherical_kmeans(weight.to(device), 2, start=torch.eye(2), balanced=1, max_iterations=1)
    assert limited.assignment.tolist() == [0, 0, 1, 1, 1, 0]
    opposite = spherical_kmeans(torch.tensor([[1.0, 0], [-1.0, 0]], device=device), 1, start=torch.tensor([[0.0, 3]]))
    assert opposite.centroids.tolist() == [[0.0, 1.0]] and opposite.objective[-1] == 0


def test_order_and_starts(device):
    found = spherical_kmeans(make_weight(9).to(device), 8)
    assert found.starts.tolist() == [0, *np.cumsum(found.sizes.tolist())]
    for cluster in range(8):
        ids = found.order[found.starts[cluster] : found.starts[cluster + 1]].tolist()
        assert ids == [token for token, owner in enumerate(found.assignment.tolist()) if owner == cluster] != []


@pytest.mark.parametrize("balanced, tolerance, most", [(None, 0, 50), (None, 0, 5), (None, 1e-3, 50), (1.1, 0, 50)])
def test_continues_from_any_iteration(tmp_path, device, balanced, tolerance, most):
    weight = make_weight(10, rows=300, width=10).to(device)
    settings = {"balanced": balanced, "tolerance": tolerance, "seed": 3, "max_iterations": most}
    states = []
    whole = spherical_kmeans(weight, 15, after=states.append, **settings)
    assert len(states) > 3
    for state in states:
        objective = torch.tensor(state.objective, dtype=torch.float64)
        tensors = {"assignment": state.assignment, "centroids": state.centroids, "objective": objective}
        checkpoint.write_tensors(tmp_path, tensors)
        tensors = checkpoint.read_tensors(tmp_path)
        stored = Clusters(tensors["assignment"], tensors["centroids"], tensors["objective"].tolist())
        again = spherical_kmeans(weight, 15, start=stored, **settings)
        assert again.objective == whole.objective
        assert again.assignment.equal(whole.assignment) and again.centroids.equal(whole.centroids)


def test_iterations_and_tolerance():
    weight = make_weight(11, rows=300, width=10)
    gains = np.diff(objective := spherical_kmeans(weight, 15, tolerance=0).objective) / objective[:-1]
    assert len(objective) > 6
    assert spherical_kmeans(weight, 15, max_iterations=4, tolerance=0).objective == objective[:4]
    last = next(number for number, gain in enumerate(gains) if gain <= 2e-3) + 2
    assert spherical_kmeans(weight, 15, tolerance=2e-3).objective == objective[:last] != objective


@pytest.mark.parametrize(
    "weight, arguments, message",
    [
        (torch.ones(3), {}, r"the LM head is \[3\] of torch.float32; a matrix of floats is needed"),
        (torch.ones(3, 2, dtype=torch.int8), {}, r"\[3, 2\] of torch.int8"),
        (torch.tensor([[1.0], [math.inf]]), {}, r"row 1 of the LM head holds inf or NaN"),
        (torch.tensor([[1.0], [math.nan]]), {}, r"row 1 of the LM head holds inf or NaN"),
        (torch.eye(3)[:, :2], {"num_clusters": 3}, r"3 clusters of 2 rows that are not zeros; choose 1 to 2"),
        (torch.eye(3), {"num_clusters": 0}, r"0 clusters of 3 rows"),
        (torch.eye(3), {"balanced": 0.9}, r"balanced is 0.9: .* choose 1 or more"),
        (torch.eye(3), {"balanced": math.nan}, r"balanced is nan"),
        (torch.eye(3), {"start": torch.eye(3)}, r"start is of another LM head or number of clusters"),
        (torch.eye(3), {"start": torch.ones(2, 4)}, r"start is of another LM head"),
        (torch.eye(3), {"start": Clusters(torch.arange(4) * 0, torch.eye(3)[:2], [0.1])}, r"another LM head"),
    ],
)
def test_errors(weight, arguments, message):
    with pytest.raises(ValueError, match=message):
        spherical_kmeans(weight, **{"num_clusters": 2, **arguments})


def silhouette(rows, owner):
    """By definition, of unit rows and cosine distance: the mean of (b − a) / max(a, b), where a is the mean distance to
    the others of a row's cluster and b that to the nearest other cluster; 0 for a row alone."""
    distances, values = 1 - rows @ rows.T, []
    for row, own in enumerate(owner):
        means = {c: distances[row, owner == c].sum() / max(1, (owner == c).sum() - (c == own)) for c in set(owner)}
        a, b = means.pop(own), min(means.values())
        values.append((b - a) / max(a, b) if (owner == own).sum() > 1 else 0)
    return np.mean(values)


def test_silhouette(tmp_path):
    """By its definition; without the rows of zeros."""
    weight = make_weight(3)
    found = spherical_kmeans(weight, 7)
    kept = weight.norm(dim=1).numpy() > 0
    expected = silhouette(unit_rows(weight)[kept], found.assignment.numpy()[kept])
    assert report(found, weight, None, tmp_path)["silhouette"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("num_clusters, balanced", [(40, None), (9, 1.0), (1, None)])
def test_report(tmp_path, device, num_clusters, balanced):
    tokenizer = load_tokenizer(str(Path(__file__).parents[2] / "models/tiny-lm"))
    weight = make_weight(12, rows=len(tokenizer) + 3).to(device)  # with padding beyond the tokenizer's tokens
    found = spherical_kmeans(weight, num_clusters, balanced=balanced)
    content = report(found.to(torch.device("cpu")), weight, tokenizer, tmp_path)
    assert json.loads((tmp_path / "clusters.json").read_text()) == content
    rows, sizes = unit_rows(weight), found.sizes.tolist()
    cosines = (rows * found.centroids.double().cpu().numpy()[found.assignment.cpu()]).sum(1)
    owner = found.assignment.cpu().numpy()
    cohesion = [cosines[owner == cluster].mean() for cluster in range(num_clusters)]
    assert content["clusters"]["sizes"] == sizes
    assert content["sizes"] == {"min": min(sizes), "median": np.median(sizes), "max": max(sizes)}
    assert content["clusters"]["cohesion"] == pytest.approx(cohesion, abs=1e-4)
    assert content["cohesion"]["median"] == pytest.approx(np.median(cohesion), abs=1e-4)
    assert content["objective"] == pytest.approx(found.objective, abs=1e-6)
    single = spherical_kmeans(weight, 1).objective[-1]
    assert content["objective_of_one_cluster"] == pytest.approx(single, abs=1e-6)
    assert (content["silhouette"] is None) == (num_clusters == 1)
    shown = [example["cluster"] for example in content["examples"]]
    assert {np.argmax(cohesion), np.argmin(cohesion), np.argmax(sizes)} <= set(shown)
    assert len(shown) == len(set(shown)) >= min(num_clusters, 9)
    for example in content["examples"]:
        best = np.sort(cosines[owner == example["cluster"]])[::-1][:10]
        assert cosines[example["ids"]] == pytest.approx(best, abs=1e-9)
        assert example["size"] == sizes[example["cluster"]]
        assert example["tokens"] == [tokenizer.decode([token]) for token in example["ids"]]
    picture = imread(tmp_path / "clusters.png")
    green = picture[..., 1] > picture[..., [0, 2]].max(2) + 0.1
    left, right = np.array_split(green, 2, axis=1)
    assert picture.shape[:2] == (456, 1200) and left.sum() > 2000 and right.sum() > 20
    alone = report(found, weight, None, tmp_path)
    assert "tokens" not in alone["examples"][0] and alone["clusters"] == content["clusters"]
