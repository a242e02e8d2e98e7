import json
import multiprocessing
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftsmith.data import tokenized as module
from draftsmith.data.tokenized import read_template, tokenized
from draftsmith.train.recipe import Data, Source

ROOT = Path(__file__).parents[2]
CHATS = [
    [{"role": "user", "content": f"Number {n}?"}, {"role": "assistant", "content": f"It is {n}."}] for n in range(5)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(folder))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "models/tiny-lm")


def data(**fields):
    return Data.model_validate({"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib"}], **fields})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(source=str(path))


def parts(samples, tokenizer):
    """(all of it, what is supervised) of each sample."""
    found = []
    for begin, end in zip(samples.starts, samples.starts[1:], strict=False):
        ids, marks = samples.tokens[begin:end], samples.supervised[begin:end]
        found.append((tokenizer.decode(ids.tolist()), tokenizer.decode(ids[marks].tolist())))
    return found


def test_files_of_every_kind(tmp_path, tokenizer):
    import pandas

    expected = [
        (f"<|user|>\nNumber {n}?<|end|>\n<|assistant|>\nIt is {n}.<|end|>", f"It is {n}.<|end|>") for n in range(5)
    ]
    lines = write(tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS])
    assert parts(tokenized(lines, data(), tokenizer), tokenizer) == expected
    (tmp_path / "a.json").write_text(json.dumps([{"messages": chat} for chat in CHATS]))
    assert parts(tokenized(Source(source=str(tmp_path / "a.json")), data(), tokenizer), tokenizer) == expected
    pandas.DataFrame({"messages": CHATS}).to_parquet(tmp_path / "a.parquet")
    assert parts(tokenized(Source(source=str(tmp_path / "a.parquet")), data(), tokenizer), tokenizer) == expected
    (tmp_path / "a.txt").write_text("import os\n\n\nimport sys\n")
    whole = ("import os\n\n\nimport sys\n",) * 2
    assert parts(tokenized(Source(source=str(tmp_path / "a.txt")), data(), tokenizer), tokenizer) == [whole]
    limited = lines.model_copy(update={"limit": 2})
    assert parts(tokenized(limited, data(), tokenizer), tokenizer) == expected[:2]


def test_several_files(tmp_path, tokenizer):
    """In the order of their names; a file more is other data. What their rows know of why an answer ended counts."""
    rows = [{"messages": chat, "finish_reason": ["length" if n == 3 else "stop"]} for n, chat in enumerate(CHATS)]
    write(tmp_path / "shard-1.jsonl", rows[3:])
    write(tmp_path / "shard-0.jsonl", rows[:2])
    for streaming in (False, True):
        source = Source(source=str(tmp_path / "shard-*.jsonl"), streaming=streaming, limit=9 if streaming else None)
        said = [mine for _, mine in parts(tokenized(source, data(), tokenizer), tokenizer)]
        assert said == ["It is 0.<|end|>", "It is 1.<|end|>", "It is 3.", "It is 4.<|end|>"]
    write(tmp_path / "shard-2.jsonl", rows[2:3])
    assert len(tokenized(Source(source=str(tmp_path / "shard-*.jsonl")), data(), tokenizer)) == 5
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        tokenized(Source(source=str(tmp_path / "nothing-*.jsonl")), data(), tokenizer)


def test_made_once_and_anew_when_something_changes(tmp_path, tokenizer, cache, monkeypatch):
    source = write(tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS])
    made = []
    encode = module.encode
    monkeypatch.setattr(module, "encode", lambda *arguments: made.append(1) or encode(*arguments))

    def count(source, data):
        made.clear()
        samples = tokenized(source, data, tokenizer)
        return len(samples), len(made)

    assert count(source, data()) == (5, 5)
    assert count(source, data()) == (5, 0)
    assert count(source.model_copy(update={"weight": 7.0}), data(packing=True)) == (5, 0)
    assert count(source, data(max_length=40)) == (5, 5)
    template = tokenizer.chat_template.replace("<|user|>", "<|system|>").replace("|>\n", "|>")
    assert count(source, data(template=template)) == (5, 5)
    write(tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS[1:]])
    assert count(source, data()) == (4, 4)
    for kept in cache.glob("*.safetensors"):
        kept.write_bytes(kept.read_bytes()[:100])
    assert count(source, data()) == (4, 4), "a damaged one is made anew"
    assert not list(cache.glob("*.tmp"))


def _slow(path, folder, queue):
    import os

    os.environ["DRAFTSMITH_CACHE"] = folder
    encode, made = module.encode, []

    def slowly(*arguments):
        time.sleep(0.3)
        made.append(1)
        return encode(*arguments)

    module.encode = slowly
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/tiny-lm")
    samples = tokenized(Source(source=path), data(), tokenizer)
    queue.put((len(samples), len(made)))


def test_one_process_makes_it_and_the_others_wait(tmp_path, cache):
    source = write(tmp_path / "a.jsonl", [{"messages": chat} for chat in CHATS])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_slow, args=(source.source, str(cache), queue)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    results = sorted(queue.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert results == [(5, 0), (5, 0), (5, 5)]


@pytest.mark.parametrize(
    "rows, fields, message",
    [
        (
            [{"messages": CHATS[0]}, {"question": "x"}],
            {},
            "a.jsonl', row 2: it has messages, question; needed",
        ),
        (
            [{"messages": CHATS[0]}] * 4,
            {"max_length": 4},
            "4 of 4 samples have no label within 4 tokens; raise data.max_",
        ),
        ([], {}, "a.jsonl'"),
    ],
)
def test_bad_data_is_said(tmp_path, tokenizer, rows, fields, message):
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as error:
        tokenized(source, data(**fields), tokenizer)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_missing_and_damaged_files(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        tokenized(Source(source=str(tmp_path / "a.jsonl")), data(), tokenizer)
    (tmp_path / "a.jsonl").write_text('{"messages": [')
    with pytest.raises(ValueError, match=r"a.jsonl' \(split train\): cannot be read"):
        tokenized(Source(source=str(tmp_path / "a.jsonl")), data(), tokenizer)
    with pytest.raises(ValueError, match=r"'nobody/nothing' \(split train\): cannot be read"):
        tokenized(Source(source="nobody/nothing"), data(), tokenizer)


def test_templates(tmp_path):
    assert read_template(None) is None
    assert read_template("{{ messages }}") == "{{ messages }}"
    (tmp_path / "x.jinja").write_text("{{ x }}")
    assert read_template(str(tmp_path / "x.jinja")) == "{{ x }}"
    with pytest.raises(FileNotFoundError, match="neither a Jinja template nor a file"):
        read_template("missing.jinja")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"source": "wikitext"}, "is neither 'stdlib', 'package:NAME', a file"),
        ({"source": "package:a b"}, "after 'package:' comes the name it is imported by"),
        ({"source": "stdlib", "split": "dev"}, "has the splits train, validation and test, not 'dev'"),
        ({"source": "a.jsonl", "form": "chat"}, "'form' is for stdlib and package:NAME"),
        ({"source": "a/b", "answers": {"prompts": 1}}, "'answers' is for stdlib and package:NAME"),
    ],
)
def test_sources_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        Source.model_validate(fields)
