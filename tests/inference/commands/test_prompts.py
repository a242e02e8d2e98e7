"""Prompts: what is read, what is refused and where, and the chat template."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from draftsmith.inference.commands.prompts import Prompt, encode_prompts, read_prompts, read_sets, with_later_turns

USER = {"role": "user", "content": "Hello"}


def test_read_prompts(tmp_path):
    path = tmp_path / "p.jsonl"
    chat = [USER, {"role": "assistant", "content": "Hi"}]
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    lines = [
        '\ufeff{"prompt": "a\u2028b\x85c\u2029 \\n d", "source": "x"}',  # line breaks to Python, but not to JSON Lines
        "",
        json.dumps({"messages": [*chat, {"role": "user", "content": "Bye"}]}),
        json.dumps({"id": "7", "messages": chat, "finish_reason": ["stop"]}),  # what distill.py writes
        '{"turns": ["first", "second"]}\r',
        json.dumps({"prompt": None, "messages": [{"role": "user", "content": parts}]}),
        '{"prompt": "\\ud83d\\ude42"}',
        json.dumps({"messages": [USER, {"role": "function", "content": "7"}]}),  # as in training data
        json.dumps({"prompt": [USER], "completion": chat[1:]}),
        json.dumps({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}),
        json.dumps({"prompt": "Hello", "messages": chat}),  # some data sets have both: the conversation is asked
    ]
    path.write_bytes("\n".join(lines).encode())
    assert read_prompts(path) == [
        Prompt("a\u2028b\x85c\u2029 \n d"),
        Prompt([*chat, {"role": "user", "content": "Bye"}]),
        Prompt([USER]),
        Prompt([{"role": "user", "content": "first"}], later=("second",)),
        Prompt([{"role": "user", "content": "one two"}]),
        Prompt("🙂"),
        Prompt([USER, {"role": "function", "content": "7"}]),
        *[Prompt([USER])] * 3,
    ]
    assert [prompt.where for prompt in read_prompts(path)][1:3] == [f"{path}:3", f"{path}:4"]


def test_kinds_of_text(tmp_path):
    path = tmp_path / "p.jsonl"
    kinds = ["code", "", None, 3, ["code"], "日本語"]
    more = '{"turns": ["a"]}\n{"prompt": "a", "kind": null, "category": "maths"}'
    path.write_text("".join(json.dumps({"prompt": "a", "kind": kind}) + "\n" for kind in kinds) + more)
    assert [prompt.kind for prompt in read_prompts(path)] == ["code", None, None, None, None, "日本語", None, "maths"]


def test_sets_of_prompts(tmp_path):
    """Of several files, the kind of a row without one is its file's name; a turn counts as a prompt."""
    rows = {
        "gsm8k": [{"turns": ["a"]}, {"turns": ["b"], "category": "sums"}, {"turns": ["c"]}],
        "mt-bench": [{"turns": ["d", "e", "f"]}, {"turns": ["g", "h"]}, {"turns": ["i"]}],
    }
    paths = [tmp_path / f"{name}.jsonl" for name in rows]
    for path, lines in zip(paths, rows.values(), strict=True):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_sets(paths, 4)
    assert [prompt.kind for prompt in found] == ["gsm8k", "sums", "gsm8k", "mt-bench", "mt-bench"]
    assert [prompt.later for prompt in found[3:]] == [("e", "f"), ()]
    assert [len(read_sets(paths, most)) for most in (1, 2, None)] == [2, 3, 6]
    assert read_sets(paths, 2)[-1].later == ("e",)
    assert [prompt.kind for prompt in read_sets(paths[:1])] == [None, "sums", None]


LINES = [
    ('{"prompt": null}', "it has nothing; needed is one of messages, conversations, turns or prompt"),
    ('{"prompt": 5}', "prompt is a number; a text or a list of messages is needed"),
    ('{"prompt": true}', "prompt is true; a text or a list of messages is needed"),
    ('{"prompt": ["a"]}', "a turn has no 'role' or no 'content'"),
    ('{"prompt": {}}', "prompt is an empty object; a text or a list"),
    ('{"prompt": ""}', "prompt is an empty text; a text or a list"),
    ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ('{"prompt": "a"', "not valid JSON"),
    ('{"text": "a"}', "it has text; needed is one of messages"),
    ('"prompt"', "a text instead of an object with fields"),
    ("null", "null instead of an object with fields"),
    ("[]", "an empty list instead of an object with fields"),
    ("NaN", "a number instead of an object with fields"),
    ("[" * 100_000, "nested too deeply"),
    ('{"a":' * 100_000, "nested too deeply"),
    ('{"messages": []}', "an empty conversation"),
    ('{"messages": "hello"}', "messages is a text; a list of messages is needed"),
    ('{"messages": ["hello"]}', "a turn has no 'role' or no 'content'"),
    ('{"messages": [{"role": "user"}]}', "a turn has no 'role' or no 'content'"),
    ('{"messages": [{"role": "user", "content": null}]}', "a turn's 'content' is null; a text is needed"),
    ('{"messages": [{"role": "user", "content": 7}]}', "a turn's 'content' is a number"),
    ('{"messages": [{"role": "user", "content": []}]}', "a turn's 'content' is an empty list"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "a turn's 'content' is a list"),
    ('{"messages": [{"role": "user", "content": ["a"]}]}', "a turn's 'content' is a list"),
    ('{"messages": [{"role": "bard", "content": "a"}]}', "a turn has an unknown role (known: system, developer, user"),
    ('{"messages": [{"role": 7, "content": "a"}]}', "a turn has an unknown role (known: system"),
    ('{"messages": [{"role": [], "content": "a"}]}', "a turn has an unknown role (known: system"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message but one of the assistant"),
    ('{"turns": []}', "turns is an empty list; a list of texts is needed"),
    ('{"turns": "abc"}', "turns is a text; a list of texts is needed"),
    ('{"turns": ["a", null]}', "one of the turns is null; a text is needed"),
]


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line[:40] for line, _ in LINES])
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}:3: ") and message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_invalid_files(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    for name, message in (
        ("missing.jsonl", "there is no such prompts file"),
        ("", "this is a folder"),
        ("empty.jsonl", "holds no prompt"),
        ("latin.jsonl", "not UTF-8 text"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_prompts(tmp_path / name)


def test_prompts_are_encoded_as_the_target_does(target):
    tokenizer = target.tokenizer
    assert Prompt("x = 1").encode(target) == tokenizer("x = 1")["input_ids"]
    text = tokenizer.decode(Prompt([USER]).encode(target))
    assert text == "<|user|>\nHello<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no user here') }}", "refuses this chat: no user here"),
        ("{{ 1 / 0 }}", "fails on this chat: ZeroDivisionError (division by zero)"),
        ("{{ messages[7].content.x }}", "refuses this chat: "),
        ("{% for %}", "refuses this chat: "),
        (None, "target '{}' has no chat template"),
    ],
)
def test_templates_that_refuse(target, monkeypatch, template, message):
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    with pytest.raises(ValueError) as error:
        encode_prompts([Prompt("fine"), Prompt([USER], "p.jsonl:2")], target)
    assert str(error.value).startswith("p.jsonl:2: ") and message.format(target.name) in str(error.value)
    assert "\n" not in str(error.value)
    assert 'give the text as it is (--raw, or lines of {"prompt": …})' in str(error.value)


def test_what_a_template_leaves_out_of_prompts_is_said(tmp_path, target, monkeypatch):
    """Tools reach a template that renders them; what none renders is one line."""
    system, tool = {"role": "system", "content": "Be terse."}, {"type": "function", "function": {"name": "add"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    rows = [{"messages": [system, USER], "tools": [tool]}, {"messages": [USER]}, {"messages": [USER, call, USER]}]
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "x", "tools": "[]"}])
    )
    given, template = (
        read_prompts(tmp_path / "p.jsonl"),
        "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    lines = []
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    assert "'name': 'add'" in target.tokenizer.decode(encode_prompts(given, target, lines.append)[0])
    where = f"(1 row, first: {tmp_path}/p.jsonl"
    assert lines == [f"warning: prompts: without an effect: tool_calls {where}:3)"]
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(target.tokenizer, "chat_template", users)
    encode_prompts(given[:2], target, lines.append)
    assert lines[1] == f"warning: prompts: without an effect: system message {where}:1), tools {where}:1)"


def test_prompts_leave_room_for_an_answer(target):
    assert len(encode_prompts([Prompt("é" * 127)], target)[0]) < target.context
    with pytest.raises(ValueError, match=r"^p.jsonl:7: this prompt has \d+ tokens; .* context of 256"):
        encode_prompts([Prompt("é" * 128, where="p.jsonl:7")], target)


def test_later_turns():
    asked = []

    def answers(prompts):
        asked.append([prompt.content[-1]["content"] for prompt in prompts])
        return [f"answer to {text}" for text in asked[-1]]

    def chat(*texts):
        return [{"role": "assistant" if text.startswith("answer") else "user", "content": text} for text in texts]

    given = [Prompt(chat("a"), "x:1", "maths", ("b", "c")), Prompt("raw"), Prompt(chat("d"), "x:3", None, ("e",))]
    found = with_later_turns(given, answers)
    assert asked == [["a", "d"], ["b"]], "those of a turn together"
    assert [prompt.content for prompt in found] == [
        chat("a"),
        chat("a", "answer to a", "b"),
        chat("a", "answer to a", "b", "answer to b", "c"),
        "raw",
        chat("d"),
        chat("d", "answer to d", "e"),
    ]
    assert [(prompt.where, prompt.kind) for prompt in found[:3]] == [("x:1", "maths")] * 3
    assert not found[2].later and with_later_turns([Prompt("raw")], answers) == [Prompt("raw")]


SPEED_BENCH = {"category": "coding", "sub_category": "python", "source": "x", "src_id": "1", "difficulty": "hard"}


def write_parquet(path, rows):
    """A file with SPEED-Bench's columns."""
    columns = {name: [value] * len(rows) for name, value in SPEED_BENCH.items()}
    columns["turns"] = pa.array(rows, pa.list_(pa.string()))
    columns |= {"question_id": [f"q{n}" for n in range(len(rows))], "multiturn": [len(row) > 1 for row in rows]}
    parquet.write_table(pa.table(columns), path)


def test_parquet(tmp_path):
    path = tmp_path / "test.parquet"
    write_parquet(path, [["Sort a list.\u2028", "In place."], ["é"]])
    found = read_prompts(path)
    first, second = ([{"role": "user", "content": text}] for text in ("Sort a list.\u2028", "é"))
    assert found == [Prompt(first, "", "coding", ("In place.",), "q0"), Prompt(second, "", "coding", (), "q1")]
    assert [prompt.where for prompt in found] == [f"{path}:1", f"{path}:2"]


def test_bad_parquet(tmp_path):
    path = tmp_path / "test.parquet"
    write_parquet(path, [["fine"], ["a", "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]])
    with pytest.raises(ValueError, match=rf"^{path}:2: SPEED-Bench holds this text back \('FULL .*prepare_data.py"):
        read_prompts(path)
    for rows, message in (([["a"], []], rf"^{path}:2: turns is an empty list"), ([], "holds no prompt")):
        write_parquet(path, rows)
        with pytest.raises(ValueError, match=message):
            read_prompts(path)
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=rf"^{path}: not a parquet file that can be read \([^\n]*\)$"):
        read_prompts(path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="there is no such prompts file"):
        read_prompts(path)


def test_question_ids(tmp_path):
    path = tmp_path / "question.jsonl"
    rows = [{"question_id": number, "turns": ["a", "b"]} for number in (81, "x", None, [1])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = with_later_turns(read_prompts(path), lambda asked: ["answer"] * len(asked))
    assert [prompt.question for prompt in found] == [81, 81, "x", "x", None, None, None, None]
