"""The list of mutations follows the code: each old text is in its folder once, and the tests are there."""

from pathlib import Path

import pytest

from draftsmith.tools import mutations

ROOT = Path(__file__).parents[2]
ALL = mutations.read()


def test_how_many_there_are():
    assert len(ALL) >= 60 and len({each.old for each in ALL}) == len(ALL)


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.old[:40])
def test_each_can_be_made(each):
    assert each.old != each.new
    each.file(ROOT)  # refuses
    for test in each.test_paths(ROOT):
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text("utf-8") or not name, test


def test_a_text_that_is_not_there_once_is_refused():
    for old, count in (("no such line", 0), ("import torch\n", "")):
        with pytest.raises(ValueError, match=f"models/ holds this text {count}.* not once"):
            mutations.Mutation("models", (), old, "").file(ROOT)
    with pytest.raises(ValueError, match=r"test_medusa\.py: there are 2 such files of tests, not one"):
        mutations.Mutation("models", ("test_medusa.py",), "", "").test_paths(ROOT)
