"""The page of a training run: it shows every metric, follows a run that is killed or fails, and a browser opens it."""

import json
import math
import re
import signal

import pytest
from browser import luminances, open_page
from safetensors.torch import load_file
from training_runs import before_call, metrics, write_recipe

from draftsmith.inference.drafters.medusa import MedusaDrafter
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.measure.tree_statistics import best_tree, head_ranks
from draftsmith.models.medusa import MedusaConfig, MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train import checkpoint, medusa
from draftsmith.train.page import POINTS, chart_of, grouped, text_of_ranks, thinned, ticks

MAIN = medusa.main
HEADS = {"num_draft_heads": 3, "num_layers": 1, "projection": "own"}
STATE = r"<b class=\"state-(\w+)\">\1</b>"


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    steps = {"steps": 20, "batch": {"sequences": 8}, "optim": {"lr": 0.02}}
    stages = [{"name": "first", **steps}, {"name": "second", **steps}]
    return write_recipe(
        tmp_path_factory.mktemp("page"),
        tiny_lm,
        HEADS,
        stages,
        checkpoint={"every": 5, "keep": 1},
        evaluate={"every": 10, "decode": 20},
    )


@pytest.fixture(scope="module")
def whole(train):
    return train("whole")


def page_of(folder):
    return (folder / "training.html").read_text()


def points_of(page):
    """chart → metric → [step, value]s, as the page's script reads them."""
    return json.loads(re.search(r'<script type="application/json" id="points">(.*?)</script>', page)[1])


def test_it_shows_every_metric(whole):
    charts, page = points_of(page_of(whole)), page_of(whole)
    shown = {name: dict(points) for chart in charts.values() for name, points in chart.items()}
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    logged = set().union(*lines) - {"step", "stage", "best"}
    assert set(shown) == logged and {"loss", "lr", "simulated_tau", "tau", "head3_held_out_top1"} <= logged
    for name in logged:
        wanted = metrics(whole, name)
        assert shown[name].keys() == wanted.keys()
        assert all(math.isclose(shown[name][step], wanted[step], rel_tol=1e-4) for step in wanted)
        assert page.count(f'data-metric="{name}"') == 2, "a line and its last value"
    assert list(charts)[:2] == ["τ", "loss"] and list(charts)[-2:] == ["tokens_per_second", "data_wait"]
    assert list(charts["head*_loss"]) == ["head1_loss", "head2_loss", "head3_loss"]
    assert re.findall(STATE, page) == ["finished"] and "of 40 steps" in page and "second begins" in page
    assert "num_draft_heads: 3" in page and json.loads((whole / "provenance.json").read_text())["device"] in page
    assert not re.search(r"https?://|src=|@import", page), "no external file"


def test_a_text_is_decoded_as_the_engine_does(whole, tiny_lm):
    """Held-out answers are the target's own: greedy decoding of their prompts takes the steps that are shown."""
    target, held_out = load_target(str(tiny_lm), dtype="float32"), load_file(whole / "held_out/model.safetensors")
    config = json.loads((whole / "config.json").read_text())
    heads = MedusaHeads(MedusaConfig(**{k: config[k] for k in MedusaConfig.__dataclass_fields__ if k in config}))
    heads.load_state_dict(load_file(whole / "model.safetensors"))
    tokens, supervised = held_out["tokens"], held_out["supervised"].bool()
    ranks = head_ranks(target, heads, tokens, supervised)
    tree, several = best_tree(ranks, 16), 0
    for row in range(len(tokens)):
        found = text_of_ranks(tokens[row], supervised[row], ranks[row], tree, target.tokenizer)
        (places,) = supervised[row].nonzero(as_tuple=True)
        prompt, answer = tokens[row, : places[0]].tolist(), tokens[row, places].tolist()
        drafter = MedusaDrafter(heads, tree, target)
        (result,) = SpeculativeDecoder(target, drafter).generate([prompt], len(answer))
        assert result.tokens == answer
        assert "".join(text for text, *_ in found["trace"].tokens) == target.tokenizer.decode(answer)
        taken = [sum(node[3] for node in step) for step in found["steps"]]
        known = [at for at, step in enumerate(found["steps"]) if len(step) == HEADS["num_draft_heads"] + 1]
        assert [taken[at] for at in known] == [result.accepted[at] for at in known]
        assert found["prompt"] == target.tokenizer.decode(prompt)[-240:]
        several += sum(count > 1 for count in taken)
    assert several, "some drafts are accepted"
    assert "held-out text 3" in page_of(whole) and "rank 1" in page_of(whole)


@pytest.mark.parametrize("call", [15, 33])
def test_a_killed_run_leaves_its_last_page(train, whole, call):
    folder = train.killed((medusa.Medusa1, "count", call), f"killed-{call}")
    page = page_of(folder)
    assert re.findall(STATE, page) == ["training"] and "to the end of the stage" in page
    assert f"stage {'first' if call < 20 else 'second'}, {1 + (call >= 20)} of 2" in page
    assert max(step for step, _ in points_of(page)["loss"]["loss"]) == call // 10 * 10
    train(f"killed-{call}", "--resume")
    resumed, wanted = points_of(page_of(folder)), points_of(page_of(whole))
    assert resumed["τ"] == wanted["τ"] and [step for step, _ in resumed["loss"]["loss"]] == [10, 20, 30, 40]
    assert re.findall(STATE, page_of(folder)) == ["finished"]


def test_a_run_that_fails_or_is_stopped_says_so(train):
    forward = medusa.Medusa1.forward

    def broken(self, batch, counts, step):
        loss, found = forward(self, batch, counts, step)
        return loss * (math.nan if step == 12 else 1.0), found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medusa.Medusa1, "forward", broken)
        assert "loss nan" in train.refused("failed", code=1)
    page = page_of(train.recipe.parent / "failed")
    assert re.findall(STATE, page) == ["failed"] and "Lower optim.lr" in page
    with pytest.MonkeyPatch.context() as patch:
        before_call(patch, medusa.Medusa1, "count", 12, lambda: signal.raise_signal(signal.SIGINT))
        train.run_main(train.main, train.recipe, "run.name=stopped")
    page = page_of(train.recipe.parent / "stopped")
    assert re.findall(STATE, page) == ["stopped"] and "--resume" in page and "stopped at step 13" in page
    train("stopped", "--restart", "stages.0.steps=2", "stages.1.steps=2")
    assert "of 4 steps" in page_of(train.recipe.parent / "stopped")


def test_a_page_that_cannot_be_written_stops_nothing(train):
    """A folder has its name: what is written beside it, the weights too, is that of any run."""
    with pytest.MonkeyPatch.context() as patch:
        folder = train.recipe.parent / "unwritten"
        before_call(patch, checkpoint, "write_tensors", 0, (folder / "training.html").mkdir)
        train("unwritten", "stages.0.steps=2", "stages.1.steps=2")
    assert train.out.count("training.html is not written (") == 5, "before and after each stage, and in the end"
    assert (folder / "model.safetensors").exists() and not list(folder.glob("training.html*/*"))


def test_charts():
    lines = [{"step": n, "stage": "s", "loss": 1.0 * n, "kl": math.inf if n < 5 else 0.0} for n in range(1, 1001)]
    charts = grouped(lines)
    assert len(charts["kl"]["kl"][0]) == 996, "what is not finite is left out"
    thin = thinned(charts["loss"]["loss"][0])
    assert len(thin) <= POINTS + 1 and thin[-1] == (1000, 1000.0) and thin[0] == (5, 3.0)
    drawn = chart_of("kl", charts["kl"], 1000)
    assert all(10 <= y <= 190 for y, _ in drawn["y"]), "a constant has an axis, too"
    for low, high in [(0, 1), (0.0012, 0.006), (6.2, 15), (30_000, 53_000), (-0.3, 0.9), (0, 7)]:
        found = ticks(low, high)
        assert 3 <= len(found) <= 7 and low <= min(found) and max(found) <= high * 1.001


def test_in_a_browser(opened, whole):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    open_page(opened, whole / "training.html")
    for name in set().union(*points_of(page_of(whole)).values()):
        group = opened.find_element(By.CSS_SELECTOR, f'g[data-metric="{name}"]')
        assert opened.execute_script("return arguments[0].getBBox().width", group) > 2, name
    svg = opened.find_element(By.CSS_SELECTOR, "[data-chart=loss] svg.chart")
    assert svg.size["width"] > 300 and svg.size["height"] > 100
    value, losses = opened.find_element(By.CSS_SELECTOR, 'b[data-metric="loss"]'), metrics(whole, "loss")
    assert float(value.text) == pytest.approx(losses[40], rel=1e-4)
    svg.send_keys(Keys.HOME)  # step 0, where only the evaluation is; the nearest loss is shown
    assert float(value.text) == pytest.approx(losses[10], rel=1e-4)
    svg.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert float(value.text) == pytest.approx(losses[20], rel=1e-4)
    assert opened.find_element(By.ID, "at").text == f"Step 20: loss {value.text}"
    svg.send_keys(Keys.ESCAPE)
    ActionChains(opened).move_to_element(svg).perform()
    assert float(value.text) == pytest.approx(losses[20], rel=1e-4), "the middle of 40 steps"
    seen = luminances(opened)
    assert seen["light"][0] > 230 > 60 > seen["light"][1] and seen["dark"][0] < 60 < 200 < seen["dark"][1]
    token = opened.find_element(By.CSS_SELECTOR, ".t")
    token.send_keys(Keys.ARROW_RIGHT)
    assert "of the next 3 tokens are drafted" in opened.find_element(By.ID, "panel").text
    assert "rank" in opened.find_element(By.ID, "panel").text
