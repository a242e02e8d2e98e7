"""Sentences and words as tools/sentences.py counts them; the documents keep its limits."""

import pytest

from draftsmith.tools import sentences


@pytest.mark.parametrize(
    "text, counts",
    [
        ("One two three. Four five!\nSix, seven? Eight.", [3, 2, 2, 1]),
        ("It is 1.42 × (1.27–1.63) as fast, e.g. on a CPU, i.e. here. See Doe et al. (2024), cf. Fig. 3.", [12, 8]),
        ("Draws are i.i.d. Gumbel noise. n-grams need none.", [5, 3]),
        ("Run `python decode.py none. Or not` or `models.target` in config.json of v2.13.0. Then stop.", [8, 2]),
        ("``code`` and [a page. Of two](https://x.y/a.md#b. c) end here.", [4, 4]),
        ("A list:\n\n- one item\n- two items. With a second\n  line\n\n1. three", [2, 2, 2, 4, 1]),
        ("# A heading. No\n\n| a. b | c |\n|---|---|\n\n```bash\nno.\n```\n\n    nor this\n\nOnly <b>this</b>.", [2]),
        ("<!-- begin. -->\nHe asked: “Why?” and left.\n<!-- end -->\n![A picture. Of it](x.png)\n", [5]),
    ],
)
def test_counts(text, counts):
    assert [sentences.words(each) for each in sentences.sentences(text)] == counts


@pytest.mark.parametrize(
    "lengths, code, said", [([20], 0, ""), ([21], 1, ""), ([1] * 9 + [40], 0, ""), ([1] * 9 + [41], 1, "41 words: ")]
)
def test_limits(lengths, code, said, tmp_path, monkeypatch, run_main):
    """A mean of 20 words and a sentence of 40 are allowed; the second one is named."""
    (tmp_path / "README.md").write_text(" ".join("word " * (n - 1) + "word." for n in lengths))
    monkeypatch.setattr(sentences, "ROOT", tmp_path)
    got, out, _ = run_main(sentences.main)
    assert got == code and said in out and (len(out.splitlines()) == 2) == bool(said)


def test_the_documents_keep_the_limits(run_main):
    code, out, _ = run_main(sentences.main)
    assert code == 0, out
