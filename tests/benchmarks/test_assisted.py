"""A draft model beside transformers' assisted generation, by the real command."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.benchmarks import assisted
from draftsmith.inference.engine.engine import Generation
from draftsmith.inference.measure.timing import Timed

pytestmark = pytest.mark.measurement


@pytest.fixture(scope="module")
def draft(tiny_lm, tmp_path_factory):
    """The tiny model with disturbed weights."""
    folder = tmp_path_factory.mktemp("draft") / "draft"
    shutil.copytree(tiny_lm, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    save_file(
        {name: w + 0.02 * w.std() * torch.randn_like(w) for name, w in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@pytest.fixture
def prompts(write_prompts):
    return write_prompts([f"licence {number} of the work" for number in range(6)])


def test_the_command(run_main, tiny_lm, draft, prompts, tmp_path):
    common = ["--target", tiny_lm, "--draft", draft, "--prompts", prompts, "--threads", 1, "--device", "cpu"]
    more = ["--max-new-tokens", 12, "--expansion", 2, 1, "--out", tmp_path / "out.json"]
    code, out, err = run_main(assisted.main, *common, *more)
    assert code == 0, err
    assert "assisted" in out and "6/6" in out
    found = json.loads((tmp_path / "out.json").read_text())
    methods = found["methods"]
    assert list(methods) == ["draft_model", "plain", "assisted", "generate"] and found["expansion"] == [2, 1]
    assert 1.5 < methods["draft_model"]["tau"] <= 3
    for row in methods.values():
        assert row["texts"] == 6 and row["different"] == 0
    ours, plain = methods["draft_model"], methods["plain"]
    ratio = ours["tokens_per_second"] / plain["tokens_per_second"]
    assert ours["speedup_vs_plain"] == pytest.approx(ratio, rel=1e-2)
    low, high = ours["speedup_vs_assisted_interval"]
    assert low <= ours["speedup_vs_assisted"] <= high


def test_wrong_options(run_main, tiny_lm, draft, prompts, tmp_path):
    common = ["--target", tiny_lm, "--prompts", prompts, "--threads", 1]
    for more, message in (
        (["--draft", draft, "--seconds", 0], "--seconds 0: must be above 0"),
        (["--draft", draft, "--out", tmp_path / "x.txt"], "name a .json file"),
        (["--draft", "models/tiny-lm"], "has another vocabulary than target"),
    ):
        code, _, err = run_main(assisted.main, *common, *more)
        assert code == 2 and message in err and err.strip().count("\n") <= 2, err


def test_other_text_is_counted():
    """A method whose text is not plain decoding's is not called identical."""
    timed = {}
    for name, tokens in (("draft_model", 5), ("plain", 5), ("assisted", 6), ("generate", 5)):
        timed[name] = Timed()
        run = Generation if name in ("draft_model", "plain") else None
        answer = [run([1, tokens], [1])] if run else [[1, tokens]]
        timed[name].run(lambda some, answer=answer: answer, [[1]], range(1), 0)
    rows = assisted.compare(timed)
    assert {name: row["different"] for name, row in rows.items()} == {
        "draft_model": 0,
        "plain": 0,
        "assisted": 1,
        "generate": 0,
    }
