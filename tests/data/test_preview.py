import json

import pytest
import yaml

from draftsmith.data import preview, sources
from draftsmith.train.tiny import SAMPLES


@pytest.fixture
def recipe(tmp_path, monkeypatch, tiny_lm, cache):
    documents = sources.documents
    monkeypatch.setattr(sources, "documents", lambda source, split: documents(source, split)[:9])  # quick to tokenize
    chat = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "naïve 日本"}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 4)
    content = {
        "run": {"name": "x"},
        "target": {"name": str(tiny_lm)},
        "drafter": {"anything": "the script checks this"},
        "data": {
            "train": [
                {"source": str(tmp_path / "a.jsonl")},
                {"source": "stdlib", "answers": {"prompts": 7, "prompt_tokens": 9, "new_tokens": 11}},
            ],
            "validation": [{"source": "stdlib", "split": "test"}],
        },
    }
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_preview(recipe, run_main):
    code, out, err = run_main(preview.main, recipe, "--count", 2)
    assert (code, err) == (0, "")
    assert "4 samples, " in out and "0 samples without a label" in out
    assert out.count("<|user|>\nOne?<|end|>\n<|assistant|>\n⟦naïve 日本<|end|>⟧") == 2
    assert "the target itself answers 7 prompts of 9 tokens with up to 11 tokens" in out


def test_of_a_streamed_source_the_first_rows(recipe, run_main, monkeypatch):
    monkeypatch.setattr(preview, "STREAMED", 3)
    code, out, _ = run_main(preview.main, recipe, "data.train.0.streaming=true")
    assert code == 0 and "streamed: its first 3 rows, at most\n3 samples, " in out


def test_validation_and_overrides(recipe, run_main):
    code, out, _ = run_main(preview.main, recipe, "--validation", "--count", 1, "data.max_length=20")
    assert code == 0 and "100.0% supervised" in out and "longest 20" in out and out.count("· sample") == 1


def test_a_recipe_without_a_target(recipe, run_main, tiny_lm):
    content = yaml.safe_load(recipe.read_text())
    del content["target"]
    recipe.write_text(yaml.safe_dump(content))
    code, _, err = run_main(preview.main, recipe)
    said = f"error: {recipe} has no target whose tokenizer could be used; pass --tokenizer FOLDER\n"
    assert (code, err) == (2, said)
    assert run_main(preview.main, recipe, "--tokenizer", tiny_lm)[0] == 0
    code, _, err = run_main(preview.main, SAMPLES.parents[1] / "recipes/tiny-distill.yaml")
    assert code == 2 and "has no data to train on; python train/distill.py " in err


def test_the_targets_revision_and_code(recipe, run_main, monkeypatch):
    asked, load = [], preview.load_tokenizer
    monkeypatch.setattr(preview, "load_tokenizer", lambda *given: asked.append(given) or load(given[0]))
    more = ("target.revision=v1", "target.trust_remote_code=true")
    name = yaml.safe_load(recipe.read_text())["target"]["name"]
    for tokenizer in ([], ["--tokenizer", name]):
        assert run_main(preview.main, recipe, *more, "--count", 1, *tokenizer)[0] == 0
    assert asked == [(name, "v1", True), (name,)]


def test_rows_that_were_skipped(recipe, run_main, tmp_path):
    path = tmp_path / "a.jsonl"
    bard = {"conversations": [{"from": "human", "value": "x"}, {"from": "bard", "value": "y"}]}
    path.write_text("{\n" + json.dumps(bard) + "\n" + path.read_text() * 10 + json.dumps(bard) + "\n")
    for _ in range(2):  # the second time from what is kept
        code, out, err = run_main(preview.main, recipe, "--count", 1)
        assert (code, err) == (0, "") and "40 samples, " in out
        table = "    rows  first   reason\n       2  line 2  a turn is from an unknown speaker"
        assert f"\n3 of 43 rows skipped:\n{table}" in out and "\n       1  line 1  not valid JSON\n" in out
    code, out, err = run_main(preview.main, recipe, "data.max_skipped=0.05")
    assert code == 2 and err.startswith(f"error: data source '{path}': 3 of 43 rows skipped: 2 × a turn is from")
    assert err.count("\n") == 1
