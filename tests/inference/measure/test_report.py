import io
import random
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from draftsmith.inference.commands import terminal
from draftsmith.inference.engine.engine import Generation
from draftsmith.inference.engine.text import decode_text
from draftsmith.inference.measure import report


def test_first_repeat():
    assert report.first_repeat([]) == 0
    assert report.first_repeat([1] * 8) == 8
    assert report.first_repeat([1] * 20) == 8  # tokens 1 to 9 hold the 8-gram twice
    assert report.first_repeat(range(100)) == 100
    assert report.first_repeat([*range(10), *range(10)]) == 17
    assert report.first_repeat([*range(8), 99, *range(7)]) == 16


def test_loop_begins():
    """With the second of at least three periods, of at most 64 tokens, that have at least 32 tokens in all."""
    start = [*range(100, 107)]
    assert report.loop_begins([]) == 0 and report.loop_begins(range(300)) == 300
    assert report.loop_begins([*start, *[1] * 32]) == 8
    assert report.loop_begins([*start, *[1] * 31]) == 38, "31 tokens are too few"
    for period in (2, 12, 64):
        loop = [*range(period)] * 3 + [*range(period)] * (32 // period)
        assert report.loop_begins([*start, *loop]) == 7 + period
        assert report.loop_begins([*start, *loop, *start]) == 7 + period, "a loop may end"
        assert report.loop_begins([*start, 0, *loop]) == 8 + period, "a repeated token before it does not count"
    assert report.loop_begins([*range(12)] * 3) == 12
    assert report.loop_begins([*range(12), *range(12), *range(11)]) == 35, "a period lacks its last token"
    assert report.loop_begins([*range(65)] * 4) == 260, "a period of 65 tokens is too long"
    assert report.loop_begins([*([5, 6, 7] * 8), *([5, 6, 8] * 20)]) == 27, "24 tokens are too few, 60 are a loop"


def test_repeated_rate():
    assert report.repeated_rate([1, 2, 3]) == (0, 0)
    assert report.repeated_rate([1, 2, 3, 4, 1, 2, 3, 4]) == (1, 5)
    assert report.repeated_rate([7] * 10) == (6, 7)
    assert report.repeated_rate([1, 2, 1, 2, 1], n=2) == (2, 4)


def test_acceptance():
    results = [
        Generation(list(range(100, 111)), [4, 1, 3, 2], "length", drafted=28),  # 1 + 10 tokens
        Generation([5, 6, 7], [2], "stop", drafted=7),
        Generation([9], [], "stop"),  # the prefill's token ended it
    ]
    counted = report.acceptance(results, max_depth=3)
    assert counted == {
        "new_tokens": 15,
        "steps": 5,
        "mean_accepted_length": 2.4,
        "acceptance_per_position": [0.8, 0.4, 0.2],
        "mean_accepted_length_by_draft_length": [1.8, 2.2, 2.4],
        "by_position": {"band_tokens": 64, "steps": [5], "mean_accepted_length": [2.4]},
        "accepted_length_histogram": {"1": 1, "2": 2, "3": 1, "4": 1},
        "repetition": {
            "repeated_4gram_rate": 0.0,
            "mean_accepted_length_before_first_loop": 2.4,
            "tokens_before_first_loop": 12,
        },
        "loops": {
            "looping_answers": 0,
            "mean_tokens_before": 5.0,
            "median_tokens_before": 3,
            "steps_before": 5,
            "mean_accepted_length_before": 2.4,
        },
        "spec_decode": {
            "num_drafts": 5,
            "num_draft_tokens": 35,
            "num_accepted_tokens": 7,
            "num_accepted_tokens_per_pos": [4, 2, 1],
        },
    }


def test_by_position():
    """A step counts in the band of 64 tokens in which it begins; the prefill's token is the first of an answer."""
    results = [Generation([*range(131)], [63, 60, 7]), Generation([*range(64)], [62, 1]), Generation([1], [])]
    found = report.by_position(results)
    assert found == {"band_tokens": 64, "steps": [3, 2], "mean_accepted_length": [42.0, 33.5]}
    jump = report.by_position([Generation([*range(200)], [130, 69])])
    assert jump["steps"] == [1, 0, 1] and jump["mean_accepted_length"] == [130.0, None, 69.0]
    assert report.by_position([])["steps"] == []


def test_tau_if_drafts_were_shorter():
    """Of each step the first k accepted tokens, and the target's own."""
    lengths = [10, 1, 4, 9, 2]
    found = report.acceptance([Generation([*range(27)], lengths)], 9)["mean_accepted_length_by_draft_length"]
    assert found == [sum(min(length, k + 1) for length in lengths) / 5 for k in range(1, 8)]


def test_acceptance_before_the_loop():
    """A step that reaches into the loop does not count."""
    looping = Generation([*range(10)] * 3 + [0, 1], [3, 4, 2, 3, 5, 6, 6, 2])  # a loop from its 11th token on
    other = Generation([*range(6)], [1, 4])
    loops = report.acceptance([looping, other], 5)["loops"]
    assert loops == {
        "looping_answers": 1,
        "mean_tokens_before": 8.0,
        "median_tokens_before": 8.0,
        "steps_before": 5,  # 1 + 3 + 4 + 2 = 10 tokens of the first answer
        "mean_accepted_length_before": 2.8,
    }


def test_acceptance_before_the_first_repeated_8_gram():
    tokens = [*range(10), *range(10)]  # the loop is evident at the 18th token: 17 lie before
    counted = report.acceptance([Generation(tokens, [2, 2, 3, 4, 4, 4])], 3)
    assert counted["mean_accepted_length"] == pytest.approx(19 / 6, abs=1e-4)
    assert counted["repetition"]["tokens_before_first_loop"] == 15  # with the prefill's 16, and 4 more are too many
    assert counted["repetition"]["mean_accepted_length_before_first_loop"] == 3.0
    assert counted["repetition"]["repeated_4gram_rate"] == round(7 / 17, 4)


def test_plain_decoding_and_nothing_at_all():
    plain = report.acceptance([Generation([1, 2, 3, 4], [1, 1, 1], "length")], max_depth=0)
    assert plain["mean_accepted_length"] == 1.0
    assert plain["acceptance_per_position"] == plain["spec_decode"]["num_accepted_tokens_per_pos"] == []
    assert plain["spec_decode"]["num_draft_tokens"] == plain["spec_decode"]["num_accepted_tokens"] == 0
    nothing = report.acceptance([Generation([1], [], "length")], max_depth=2)
    assert nothing["mean_accepted_length"] is None and nothing["steps"] == 0


TEXT = "naïve [bold] :x: → 日本語\n\t🙂🇮🇹 x = {'a': ﬁ}"


@pytest.fixture
def shown(monkeypatch):
    """What an answer writes to stdout: texts, each with the ``drafted_by`` of its last token."""

    def write(tokenizer, tokens, drafted_by):
        pieces = []
        monkeypatch.setattr(terminal, "write_text", lambda text, drafted: pieces.append((text, drafted)))
        answer = terminal.Answer(SimpleNamespace(tokenizer=tokenizer, stop_ids=frozenset()))
        answer.show(Generation(tokens, drafted_by=drafted_by))
        answer.end()
        return [piece for piece in pieces if piece[0]]

    return write


@pytest.mark.parametrize("cut", [0, 1, 2, 5])
def test_the_pieces_are_the_text(tiny_lm, shown, cut):
    """Characters of up to eight bytes lie over several tokens, and the last may lack some of its bytes."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    tokens = tokenizer(TEXT)["input_ids"]
    tokens = tokens[: len(tokens) - cut]
    assert any(tokenizer.decode(tokens[:n]).endswith("�") for n in range(len(tokens)))
    drafted_by = random.Random(cut).choices(range(4), k=len(tokens))
    pieces = shown(tokenizer, tokens, drafted_by)
    assert "".join(text for text, _ in pieces) == decode_text(tokenizer, tokens)
    if not cut:
        assert decode_text(tokenizer, tokens) == TEXT


def test_drafted_is_what_the_drafter_wrote(tiny_lm, shown):
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    tokens = [tokenizer(c)["input_ids"][0] for c in "abcdefgh"]
    pieces = shown(tokenizer, tokens, [0, 1, 3, 0, 0, 2, 0, 0])
    assert pieces == [("a", 0), ("b", 1), ("c", 3), ("d", 0), ("e", 0), ("f", 2), ("g", 0), ("h", 0)]


def report_of(drafter, target, results):
    """A report without baselines."""
    fields = {"drafter": drafter, "target": target, "prompts": len(results), "device": "cpu", "dtype": "float32"}
    timed = {"baselines": {}, "tokens_per_second": 10.0, "lossless": None}
    return {**fields, **timed, **report.acceptance(results, 3)}


def recorded(width):
    return Console(record=True, width=width, file=io.StringIO())


def test_table_and_plot_without_baselines_or_steps(tmp_path):
    lean = report_of("runs/[x]", "[t]", [Generation([1], [], "length")])
    console = recorded(120)
    report.print_table([lean], console)
    printed = console.export_text()
    assert "not compared" in printed and "runs/[x]" in printed and "[t]" in printed
    narrow = recorded(60)
    ratios = dict.fromkeys(report.SPEEDUPS.values(), 1.234)
    ratios |= {f"{name}_interval": [1.111, 1.345] for name in report.SPEEDUPS.values()}
    report.print_table([{**lean, **ratios, "drafter": "x" * 30, "timed_prompts": 9, "pairs": 9}], narrow)
    printed = narrow.export_text()
    assert "…xxxx" in printed and printed.count("1.11–1.34") == 2 and printed.count("…") == 1, "nothing else is cut"
    report.plot(lean, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["report.png"]


def test_table_and_plot_by_kind_of_text(tmp_path):
    looping = Generation([*range(10)] * 4, [3] * 13)
    short = Generation([1, 2, 3, 4], [2, 1])
    results = {"code": [looping, short], "[writing]": [Generation([1], [], "stop")]}
    kinds = {kind: report_of("", "", some) | {"speedup": None} for kind, some in results.items()}
    kinds["code"] |= {"speedup": 1.25, "speedup_interval": [1.125, 1.375], "mean_accepted_length_interval": [2.5, 3.0]}
    timed = {"timed_prompts": 3, "pairs": 3, "baselines": {"engine": {"tokens_per_second": 9.0}}, "kinds": kinds}
    both = [report_of(name, "t", [looping, short]) | timed for name in ("runs/a", "ngram")]
    console = recorded(80)
    report.print_table(both, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    for drafter in ("runs/a", "ngram"):
        at = lines.index([drafter, "2.80", "2.40", "1.25"], lines.index(["code,", "2", "prompts"]))
        assert lines[at + 1] == ["93", "87", "0", "2.50–3.00", "1.12–1.38"]
    assert lines.index(["[writing],", "1", "prompt"]) < lines.index(["runs/a", "–", "–", "–"])
    text = " ".join(word for line in lines for word in line)
    assert "Tokens before the first loop, mean (median): code 7 (7), 1 of 2 answers loop; [writing] 1 (1), 0 of" in text
    report.plot(both[0], tmp_path / "report.png")
    report.plot(both[0] | {"kinds": {}}, tmp_path / "without.png")
    sizes = [(tmp_path / name).read_bytes()[16:24] for name in ("report.png", "without.png")]
    width, height = (int.from_bytes(sizes[0][i : i + 4], "big") for i in (0, 4))
    assert sizes[1] == width.to_bytes(4, "big") + (height // 2).to_bytes(4, "big"), "a second row of axes"


def test_any_text_can_be_drawn(tmp_path, recwarn):
    """Names that would be formulas, or that the font has not."""
    names = [r"cat $\foo$", "中文", "عربي"]
    kinds = {name: report_of("", "", [Generation([1, 2, 3, 4], [2, 1])]) | {"speedup": 1.25} for name in names}
    each = report_of(r"runs/$\no$", r"a/$_{$", [Generation([1], [], "length")]) | {"kinds": kinds}
    reports = [each, each | {"drafter": "ngram"}]
    report.write_figures(reports, tmp_path)
    assert len([*tmp_path.rglob("report.json")]) == 3
    report.write_pages(reports, ["", "page"], tmp_path, recorded(80))
    assert len([*tmp_path.rglob("report.png")]) == 3 and not recwarn.list
    assert [path.read_text() for path in tmp_path.rglob("report.html")].count("page") == 1


def test_rows_have_the_name_that_was_typed():
    names = {"ngram": "ngram", "models/smollm2-medusa+ngram": "models/smollm2-medusa\n+ngram"}
    names |= {"runs/a+runs/b": "runs/a+runs/b", "x" * 30 + "+ngram": "…" + "x" * 20 + "\n+ngram"}
    assert {name: report._fitting_name(name) for name in names} == names


def test_figures_take_an_earlier_page_away(tmp_path):
    """It shows other ones, until the new page is written."""
    for name in ("report.html", "report.png", "notes.txt"):
        (tmp_path / name).write_text("old")
    report.write_figures([{"drafter": "ngram"}], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "report.json"]
