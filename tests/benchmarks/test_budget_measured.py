"""Groups of benchmarks/budget.py; benchmarks/roofline.py: nodes by calculated costs."""

import json

import pytest

from draftsmith.benchmarks import budget, roofline
from draftsmith.benchmarks.roofline import BEAM, LENGTHS, SHAPES, choice, levels_of


def test_groups_are_of_one_kind_and_fill_the_batch():
    kinds = ["code", "chat", "code", "code", "chat", "code", "code"]
    assert budget.groups_of([[1]] * 7, kinds, 1) == [("chat", [1, 4]), ("code", [0, 2]), ("code", [3, 5])]
    (chat, code) = budget.groups_of([[1]] * 7, kinds, 6)
    assert chat == ("chat", [1, 4] * 3) and code == ("code", [0, 2, 3, 5, 6, 0])


def test_the_roofline(run_main, tmp_path):
    """As rows fill, trees shrink; self-speculation pays the more, the longer and the more texts there are."""
    out = tmp_path / "roofline.json"
    code, _, err = run_main(roofline.main, "--ranks", 0.6, 0.2, "--depth", 3, "--nodes", 15, "--out", out)
    itself = json.loads((tmp_path / "roofline-itself.json").read_text())
    assert code == 0 and 2000 < itself["inflection"] < 2600, err  # 2 n P · BW / (F · K/V of a token), n = 4
    for gpus in ("A100", "H100"):  # as published, faster the more texts
        own = [each for each in itself["eight"] if each["gpus"] == gpus]
        for name in ("speedup", "published"):
            assert [each[name] for each in own] == sorted(each[name] for each in own)
    for name, cells in json.loads(out.read_text())["shapes"].items():
        shape = next(shape for shape in SHAPES if name.startswith(shape.name))
        assert all(shape.fits(cell["batch"], cell["cached"]) and cell["speedup"] >= 1 for cell in cells)
        if "itself" in name:
            speeds = {(cell["batch"], cell["cached"]): cell["speedup"] for cell in cells}
            assert speeds[1, 1024] < speeds[1, 65536] < speeds[8, 65536] and speeds[128, 1024] == 1 < speeds[32, 16384]
            assert all((cell["nodes"] > 1) == (cell["speedup"] > 1) for cell in cells)
        else:
            nodes = [cell["nodes"] for cell in cells if cell["cached"] == LENGTHS[0]]
            assert max(nodes[5:]) < nodes[0] == 15 and nodes[-1] < 8


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
