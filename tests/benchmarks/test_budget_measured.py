"""benchmarks/budget.py: speed by kind, temperature and batch; benchmarks/roofline.py: nodes by calculated costs."""

import json

import pytest

from draftsmith.benchmarks import budget, roofline
from draftsmith.benchmarks.roofline import BATCHES, BEAM, LENGTHS, SHAPES, choice, levels_of


@pytest.fixture
def prompts(write_prompts):
    return write_prompts(["import os", "Hello, who are you?", "def f(x):", "And why?"], "code", "chat")


def test_speed_by_kind_and_batch(run_main, tiny_lm, prompts, tmp_path):
    out = tmp_path / "out.json"
    words = ["ngram:1-3", "--target", tiny_lm, "--prompts", prompts, "--out", out]
    words += "--batch-sizes 1 3 --fixed 1 4 --temperatures 0 0.7 --max-new-tokens 8 --rounds 2".split()
    words += "--threads 1 --device cpu".split()
    code, said, err = run_main(budget.main, *words, script="benchmarks/budget.py")
    assert code == 0 and "× plain" in said, err
    report = json.loads(out.read_text())
    assert report["planned"] == 4 and report["command"].startswith("python benchmarks/budget.py ")
    settings = [(row["temperature"], row["batch"], row["kind"]) for row in report["rows"]]
    assert settings == [(t, b, kind) for t in (0, 0.7) for b in (1, 3) for kind in ("chat", "code", "all")]
    for row in report["rows"]:
        assert row["tau"] >= 1 and row["nodes"] >= 0 and row["execution"].startswith("eager")
        assert list(row["speeds"]) == ["budget", "1 nodes", "4 nodes"]
        assert all(speed["speedup"] > 0 for speed in row["speeds"].values())
    err = run_main(budget.main, "none", "--target", tiny_lm, "--prompts", prompts, script="benchmarks/budget.py")[2]
    assert err.endswith("error: 'none' drafts nothing; give a drafter\n")


def test_groups_are_of_one_kind_and_fill_the_batch():
    kinds = ["code", "chat", "code", "code", "chat", "code", "code"]
    assert budget.groups_of([[1]] * 7, kinds, 1) == [("chat", [1, 4]), ("code", [0, 2]), ("code", [3, 5])]
    (chat, code) = budget.groups_of([[1]] * 7, kinds, 6)
    assert chat == ("chat", [1, 4] * 3) and code == ("code", [0, 2, 3, 5, 6, 0])


def test_the_roofline(run_main, tmp_path):
    """As rows fill, trees shrink; the best number of nodes is not missed by more than a few percent."""
    out = tmp_path / "roofline.json"
    code, said, err = run_main(roofline.main, "--ranks", 0.6, 0.2, "--depth", 3, "--nodes", 15, "--out", out)
    assert code == 0 and "7B, 32 K/V heads: nodes" in said, err
    for picture in (out.with_suffix(".png"), tmp_path / "roofline-itself.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    itself = json.loads((tmp_path / "roofline-itself.json").read_text())
    assert 2000 < itself["inflection"] < 2600  # 2 n P · BW / (F · K/V of a token), n = 4
    for gpus in ("A100", "H100"):  # as published, faster the more texts
        own = [each for each in itself["eight"] if each["gpus"] == gpus]
        for name in ("speedup", "published"):
            assert [each[name] for each in own] == sorted(each[name] for each in own)
    for name, cells in json.loads(out.read_text())["shapes"].items():
        shape = next(shape for shape in SHAPES if name.startswith(shape.name))
        assert all(cell["batch"] in BATCHES and cell["cached"] in LENGTHS for cell in cells)
        assert all(shape.fits(cell["batch"], cell["cached"]) and cell["speedup"] >= 1 for cell in cells)
        if "itself" in name:  # pays the more, the longer and the more texts there are
            speeds = {(cell["batch"], cell["cached"]): cell["speedup"] for cell in cells}
            assert speeds[1, 1024] < speeds[1, 65536] < speeds[8, 65536] and speeds[128, 1024] == 1 < speeds[32, 16384]
            assert all((cell["nodes"] > 1) == (cell["speedup"] > 1) for cell in cells)
            continue
        nodes = [cell["nodes"] for cell in cells if cell["cached"] == LENGTHS[0]]
        assert max(nodes[5:]) < nodes[0]
        assert nodes[0] == 15 and nodes[-1] < 8
    with pytest.raises(ValueError, match=r"^--ranks 0\.9 0\.2: must be above 0, and 1 at most together$"):
        roofline.check(roofline.parser().parse_args(["--ranks", "0.9", "0.2"]))


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_choice_is_near_the_best(rows):
    """Of all numbers of levels and nodes, by brute force."""
    shape, levels = SHAPES[1], levels_of([0.6, 0.2, 0.1], 4, 32)
    found = choice(shape, rows, 2048, levels, 32)
    plain, best = shape.seconds(rows, 2048, 1), 1.0
    for depth in range(1, 5):
        candidates = sorted((float(p) for level in levels[: depth + 1] for p in level), reverse=True)
        drafting = sum(shape.pass_seconds(rows, 2048, 1 if level == 0 else BEAM) for level in range(depth))
        for nodes in range(2, 33):
            speed = sum(candidates[:nodes]) / (drafting + shape.seconds(rows, 2048, nodes)) * plain
            best = max(best, speed)
    assert found["speedup"] > 0.95 * best
