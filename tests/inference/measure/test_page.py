"""The report's page: its texts and counts are the report's, and a browser shows it without errors."""

import json
from html.parser import HTMLParser

import pytest
from browser import luminances, open_page

from draftsmith.inference import decode
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.text import decode_text
from draftsmith.inference.load import load_drafter
from draftsmith.inference.measure.page import render_pages, tree_picture
from draftsmith.inference.measure.trace import acceptance_by_ranks, trace, traced
from draftsmith.inference.verify.sampling import Sampling

TARGET = "models/tiny-lm"
STARTS = ["def read_config(path):\n", 'print("</script><b>é€") # x', "class Reader:\n    def __init__(self):\n"]
HOSTILE = "<script>alert(1)</script>"
LENGTH = 80


class Spans(HTMLParser):
    """The text of each answer, and of every element with an id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.answers: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(dict(attributes).get("class") or tag)
        if self.open[-1] == "answer":
            self.answers.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        if "answer" in self.open:
            self.answers[-1] += data
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def loaded():
    return load_drafter("ngram", target_name=TARGET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of two drafters, made by the command."""
    folder = tmp_path_factory.mktemp("page")
    lines = [{"prompt": text, "kind": kind} for text, kind in zip(STARTS, ("code", HOSTILE, "code"), strict=True)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["ngram", "none", "--target", TARGET, "--prompts", folder / "prompts.jsonl", "--threads", 1]
    command += ["--max-new-tokens", LENGTH, "--check-lossless", "--report", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["decode.py", *map(str, command)])
        decode.main()
    return folder


@pytest.fixture(scope="module")
def answers(loaded):
    """What transformers' tokenizer makes of the texts of plain greedy decoding."""
    target, _ = loaded
    prompts = [target.tokenizer(text)["input_ids"] for text in STARTS]
    results = SpeculativeDecoder(target).generate(prompts, LENGTH, batch_size=1)
    return prompts, [decode_text(target.tokenizer, result.tokens) for result in results]


def test_the_first_prompts_of_each_kind():
    assert traced(["a", "a", "a", "b", None, "b", "b"]) == [0, 1, 3, 4, 5]
    assert traced([None] * 20) == list(range(8)), "without kinds, the first ones"
    assert len(traced([str(n // 2) for n in range(40)])) == 8
    kinds = ["a", "a", "a", "b", "b", "c"]
    assert traced(kinds, drafters=4) == [0, 1, 3, 5], "of several drafters fewer, first one of each kind"
    assert traced(kinds, drafters=40) == [0], "each drafter has a text"


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=0.1, seed=3)], ids=["greedy", "sample"])
@pytest.mark.parametrize("static", [False, True])
def test_a_trace_holds_the_trees_that_committed_the_text(loaded, answers, sampling, static):
    target, drafter = loaded
    decoder, prompts = SpeculativeDecoder(target, drafter, static=static), answers[0]
    options = {"mode": "sample", "sampling": sampling} if sampling else {}
    traces = [trace(decoder, prompt, LENGTH, **options) for prompt in prompts]
    accepted = 0
    for prompt, found in zip(prompts, traces, strict=True):
        (plain,) = SpeculativeDecoder(target, static=static).generate([prompt], LENGTH, **options)
        assert "".join(text for text, *_ in found.tokens) == decode_text(target.tokenizer, plain.tokens)
        assert len(found.tokens) == len(plain.tokens)
        texts = [target.tokenizer.decode([token]) for token in plain.tokens]
        at = 0  # of each step's root
        for number, step in enumerate(found.steps):
            assert [node[0] for node in step] == [-1, *(parent for parent, *_ in step[1:])]
            assert all(0 <= parent < place for place, (parent, *_) in enumerate(step) if place)
            path = [text for _, text, _, hit in step if hit]
            committed = [place for place, (*_, of, _) in enumerate(found.tokens) if of == number]
            assert path[: len(texts) - at] == texts[at : at + len(path)], (
                "the root and the accepted tokens are the text"
            )
            assert len(committed) == len(path) or number == len(found.steps) - 1, "as many, with the target's own"
            assert all(found.tokens[place][1] for place in committed[: len(path) - 1]), "drafted"
            at, accepted = at + len(path), accepted + len(path) - 1
    assert accepted > 1
    by_ranks = acceptance_by_ranks(traces)
    assert by_ranks[()] == (sum(len(each.steps) for each in traces),) * 2
    assert sum(hits for _, hits in by_ranks.values()) == accepted + by_ranks[()][1]
    assert all(hits <= by_ranks[path[:-1]][1] for path, (_, hits) in by_ranks.items() if path)


def test_tree_picture():
    held = {(): (10, 10), (0,): (10, 6), (1,): (9, 2), (0, 0): (8, 4), (0, 1): (8, 1), (1, 0): (3, 2)}
    picture = tree_picture(held)
    rows = {node["ranks"]: (node["x"], node["y"]) for node in picture["nodes"]}
    column = [rows[name][1] for name in ("root", "rank 1", "rank 1, 1")]
    assert len(set(column)) == 1, "first choices stand in one line"
    assert len({rows[name][1] for name in ("rank 1, 1", "rank 1, 2", "rank 2")}) == 3, "no two nodes at one place"
    assert rows["rank 2"][1] == rows["rank 2, 1"][1] and rows["rank 2"][0] < rows["rank 2, 1"][0]
    assert [round(node["share"], 2) for node in picture["nodes"]] == [1.0, 0.6, 0.4, 0.1, 0.2, 0.2]
    many = {(): (100, 100)} | {(rank,): (100, 99 - rank) for rank in range(60)}
    assert len(tree_picture(many)["nodes"]) == 41 and tree_picture(many)["left_out"] == 20
    assert "rank 41" not in {node["ranks"] for node in tree_picture(many)["nodes"]}, "the least accepted are left out"


@pytest.mark.parametrize("place", ["", "ngram", "none"])
def test_the_page_has_the_texts_and_nothing_of_theirs_runs(folder, answers, place):
    page = (folder / place / "report.html").read_text()
    parsed = Spans(page)
    assert parsed.answers == [answers[1][n] for n in (0, 1, 2)]
    assert len(parsed.scripts) == 2 and HOSTILE not in page and "&lt;script&gt;alert(1)" in page
    steps = json.loads(parsed.scripts[0])
    report = json.loads((folder / place / "report.json").read_text())
    assert len(steps) == report["prompts"] == 3
    drafted = sum(len(step) - 1 for text in steps for step in text)
    assert (drafted > 0) == (place != "none") == ('id="tree"' in page)
    assert "http" not in page.replace("http-equiv", ""), "no external file"


def test_in_a_browser(opened, folder, answers):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    open_page(opened, folder / "report.html")
    for plot in ("speed", "kinds", "depths", "positions", "lengths", "time", "tree"):
        size = opened.find_element(By.ID, plot).size
        assert size["width"] > 100 and size["height"] > 10, plot
    bars = opened.find_elements(By.CSS_SELECTOR, "#speed .bar")
    assert len(bars) == 3 and max(bar.size["width"] for bar in bars) > 150
    assert [each.get_attribute("textContent") for each in opened.find_elements(By.CLASS_NAME, "answer")] == answers[1]

    report = json.loads((folder / "report.json").read_text())
    cells = {
        name: opened.find_elements(By.CSS_SELECTOR, f"#{name} tr:nth-child(2) td") for name in ("depths", "positions")
    }
    shorter = [f"{tau:.2f}" for tau in report["mean_accepted_length_by_draft_length"]]
    assert [cell.text.split("\n")[1] for cell in cells["depths"][:7]] == shorter and "\n" not in cells["depths"][7].text
    assert [cell.text for cell in cells["positions"]] == [
        f"{tau:.2f}" for tau in report["by_position"]["mean_accepted_length"]
    ]

    panel = opened.find_element(By.ID, "panel")
    assert not panel.is_displayed()
    drafted = opened.find_element(By.CSS_SELECTOR, ".t.s1")
    colour = drafted.value_of_css_property("background-color")
    assert colour != "rgba(0, 0, 0, 0)", "drafted tokens have a colour"
    ActionChains(opened).scroll_to_element(drafted).move_to_element(drafted).perform()
    assert panel.is_displayed() and "✓ accepted" in panel.text
    steps = json.loads(opened.find_element(By.ID, "steps").get_attribute("textContent"))
    text = int(drafted.find_element(By.XPATH, "./ancestor::div[@data-text]").get_attribute("data-text"))
    nodes = steps[text][int(drafted.get_attribute("data-step"))]
    number = int(drafted.get_attribute("data-step")) + 1
    assert panel.text.startswith(f"step {number}: {len(nodes) - 1} drafted")
    assert len(panel.text.splitlines()) == 1 + len(nodes)

    first = opened.find_element(By.CSS_SELECTOR, ".t")
    opened.execute_script("arguments[0].focus()", first)
    assert "the prompt's pass" in panel.text
    first.send_keys(Keys.ARROW_RIGHT)
    assert panel.text.startswith("step 1:") and opened.switch_to.active_element != first
    opened.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not panel.is_displayed()
    opened.find_element(By.CSS_SELECTOR, "input[value=by-depth]").click()
    assert opened.find_element(By.ID, "texts").get_attribute("class") == "by-depth"
    assert drafted.value_of_css_property("background-color") != colour


def test_colours_follow_the_reader(opened, folder):
    open_page(opened, folder / "report.html")
    seen = luminances(opened)
    assert seen["light"][0] > 230 > 60 > seen["light"][1] and seen["dark"][0] < 60 < 200 < seen["dark"][1]


def test_pages_without_a_tokenizer_have_token_numbers(make_target):
    target = make_target("llama")
    decoder = SpeculativeDecoder(target)
    report = {
        "drafter": "none",
        "target": "tiny",
        "prompts": 1,
        "device": "cpu",
        "dtype": "float32",
        "mode": "greedy",
        "batch_size": 1,
        "mean_accepted_length": None,
        "tokens_per_second": 1.0,
        "baselines": {},
        "kinds": {},
        "lossless": None,
        "acceptance_per_position": [],
        "accepted_length_histogram": {},
        "steps": 3,
        "seconds": {"verify": 0.0},
        "command": "",
        "versions": {"torch": "2"},
    }
    (page,) = render_pages([report], [decoder], [[1, 2, 3]], [None], lambda _: {"max_new_tokens": 4})
    (result,) = decoder.generate([[1, 2, 3]], 4)
    assert Spans(page).answers == ["".join(f"⟨{token}⟩" for token in result.tokens)]


def test_what_was_measured_is_written_first(run_decode, tmp_path, monkeypatch):
    """An error, or Ctrl-C, while the page's texts are decoded loses nothing."""

    def fails(*_):
        raise ValueError("no more")

    monkeypatch.setattr("draftsmith.inference.measure.page.render_pages", fails)
    line = f"ngram --target {TARGET} --prompt x --raw --max-new-tokens 4 --baseline none --report {tmp_path}"
    with pytest.raises(ValueError, match="no more"):  # one of ours would be a line, see test_decode
        run_decode(line)
    assert json.loads((tmp_path / "report.json").read_text())["prompts"] == 1
    assert not (tmp_path / "report.html").exists()
