"""Time and memory of k-means beside scikit-learn's: what is measured, the command, and what it refuses."""

import json

import pytest
import torch
from torch.nn import functional as F

from draftsmith.benchmarks import kmeans
from draftsmith.benchmarks.kmeans import objective_of, run, synthetic_head

pytestmark = pytest.mark.measurement

OPTIONS = {"hidden": 24, "clusters": 6, "threads": 1, "balanced": None}


def test_the_objective_is_the_mean_cosine():
    head, assignment = synthetic_head(500, 24, 6), torch.arange(500) % 6
    rows = F.normalize(head.double(), dim=1)
    means = F.normalize(torch.stack([rows[assignment == k].sum(0) for k in range(6)]), dim=1)
    assert objective_of(head, assignment) == pytest.approx(float((rows * means[assignment]).sum(1).mean()))


def test_both_methods_find_the_directions(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # of this process
    found = {method: run(method, 3000, OPTIONS, 20) for method in kmeans.METHODS}
    for each in found.values():
        assert each["objective"] > 0.6 and 1 < each["iterations"] <= 20 and each["seconds"] > 0 and each["mib"] >= 0
    assert found["draftsmith"]["objective"] == pytest.approx(found["scikit-learn"]["objective"], abs=0.03)
    assert objective_of(synthetic_head(3000, 24, 6), torch.arange(3000) % 6) < 0.3, "of no clusters"


@pytest.mark.slow  # two processes import torch
def test_the_command(run_main, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    out = tmp_path / "clusters.json"
    sizes = ("--vocabulary", 800, "--hidden", 16, "--clusters", 4, "--threads", 1)
    code, text, err = run_main(kmeans.main, *sizes, "--out", out)
    assert code == 0 and err == f"wrote {out}\n" and "d = 16, M = 4" in text
    results = json.loads(out.read_text())["results"]
    assert [r["method"] for r in results] == ["draftsmith", "scikit-learn"]
    assert results[1]["iterations"] <= results[0]["iterations"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--balanced", 0.5), "--balanced 0.5: even clusters of equal size exceed it"),
        (("--clusters", 900), "--vocabulary 800: fewer rows than --clusters 900"),
        (("--clusters", 20000, "--vocabulary", 30000), "--clusters 20000: at most 16384"),
    ],
)
def test_what_it_refuses(run_main, monkeypatch, options, message):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    code, _, err = run_main(kmeans.main, "--vocabulary", 800, "--threads", 1, *options)
    assert code == 2 and message in err and "Traceback" not in err
