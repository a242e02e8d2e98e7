import copy
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from draftsmith.common.data_sections import Data, Source
from draftsmith.data import tokenized as module
from draftsmith.data.rows import Skipped
from draftsmith.data.tokenized import read_template, tokenized

ROOT = Path(__file__).parents[2]
CHATS = [
    [{"role": "user", "content": f"Number {n}?"}, {"role": "assistant", "content": f"It is {n}."}] for n in range(5)
]


FINE, EMPTY = {"messages": CHATS[0]}, {"messages": []}
pytestmark = pytest.mark.usefixtures("cache")


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

    def read(name, **fields):
        return parts(tokenized(Source(source=str(tmp_path / name), **fields), data(), tokenizer), tokenizer)

    said = [f"It is {n}.<|end|>" for n in range(5)]
    expected = [(f"<|user|>\nNumber {n}?<|end|>\n<|assistant|>\n{said[n]}", said[n]) for n in range(5)]
    rows = [{"messages": chat} for chat in CHATS]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pandas.DataFrame({"messages": CHATS}).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("import os\n\n\nimport sys\n")
    assert read("a.jsonl") == read("a.json") == read("a.parquet") == expected
    assert read("a.txt") == [("import os\n\n\nimport sys\n",) * 2]
    assert read("a.jsonl", limit=2) == expected[:2]
    for split in ("train[:90%]", "train[-30%:]", "train[1:3]", "train[:-1]", "train[50%:]", "train[4:99]"):
        kept = read("a.jsonl", split=split)
        assert kept == read("a.json", split=split) == read("a.parquet", split=split) and 0 < len(kept) < 5
    assert read("a.jsonl", split="train[:50%]") == expected[:2] and read("a.jsonl", split="train[50%:]") == expected[2:]
    with pytest.raises(ValueError, match=r"'.*a\.jsonl \(train\[5:\]\)' is empty"):
        read("a.jsonl", split="train[5:]")


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
    monkeypatch.setattr(module, "encode", lambda *given, **more: made.append(1) or encode(*given, **more))

    def count(source, data, tokenizer=tokenizer):
        made.clear()
        samples = tokenized(source, data, tokenizer)
        return len(samples), len(made)

    assert count(source, data()) == (5, 5)
    assert count(source, data()) == (5, 0)
    assert count(source.model_copy(update={"weight": 7.0}), data(packing=True)) == (5, 0)
    assert count(source, data(max_length=40)) == (5, 5)
    other = copy.deepcopy(tokenizer)
    other.eos_token = "<|end|>"  # appended to completions, printed by templates; the same vocabulary
    assert count(source, data(), other) == (5, 5)
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

    def slowly(*given, **more):
        time.sleep(0.3)
        made.append(1)
        return encode(*given, **more)

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
    results = sorted(queue.get(timeout=300) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert results == [(5, 0), (5, 0), (5, 5)]


@pytest.mark.parametrize(
    "rows, fields, message",
    [
        (
            [FINE, {"question": "x"}, {"question": "y"}, EMPTY],
            {},
            "a.jsonl': 3 of 4 rows skipped: 2 × it has question; needed is one of messages, conversations, prompt and "
            "completion, or text (first: line 2); 1 × an empty conversation (first: line 4). That is more than "
            "data.max_skipped=0.1 of them; correct the data, or raise data.max_skipped",
        ),
        ([FINE, EMPTY], {"max_skipped": 0.0}, "1 of 2 rows skipped: 1 × an empty conversation"),
        ([EMPTY], {"max_skipped": 1.0}, "has no row left: 1 of 1 rows skipped: 1 × an empty conversation"),
        ([FINE], {"template": "{{ 1 / 0 }}"}, "a.jsonl': the chat template fails on this chat: Zero"),
        ([FINE] * 4, {"max_length": 4}, "4 of 4 samples have no label within 4 tokens; raise data.max_"),
        ([], {}, "a.jsonl'"),
    ],
)
def test_bad_data_is_one_line(tmp_path, tokenizer, rows, fields, message):
    source = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError) as error:
        tokenized(source, data(**fields), tokenizer)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_odd_rows_are_skipped_counted_and_remembered(tmp_path, tokenizer, cache, monkeypatch):
    """What is kept says the same as what was made; the bound is asked for each time."""
    chats = [{"messages": chat} for chat in CHATS * 4]
    bard = {"conversations": [{"from": "human", "value": "x"}, {"from": "bard", "value": "y"}]}
    source = write(tmp_path / "a.jsonl", [chats[0], bard, *chats[1:], bard, {"messages": []}])
    first = tokenized(source, data(max_skipped=0.2), tokenizer)
    unknown = next(reason for reason in first.skipped.reasons if "unknown speaker" in reason)
    assert first.skipped == Skipped(23, {unknown: (2, "line 2"), "an empty conversation": (1, "line 23")}, answers=20)
    assert parts(first, tokenizer) == parts(tokenized(write(tmp_path / "b.jsonl", chats), data(), tokenizer), tokenizer)
    monkeypatch.setattr(module, "encode", None)  # what is kept needs it no more
    again = tokenized(source, data(max_skipped=0.2), tokenizer)
    assert again.skipped == first.skipped and again.sha256() == first.sha256()
    with pytest.raises(ValueError, match=r"3 of 23 rows skipped: 2 × .* \(first: line 2\); 1 × an empty conversation"):
        tokenized(source, data(max_skipped=0.1), tokenizer)


@pytest.mark.parametrize("reason", [5, {"x": 1}, [], [None, 3]])
def test_invalid_finish_reasons_are_ignored(tmp_path, tokenizer, reason):
    source = write(tmp_path / "a.jsonl", [{"messages": CHATS[0], "finish_reason": reason}])
    assert parts(tokenized(source, data(), tokenizer), tokenizer)[0][1] == "It is 0.<|end|>"


@pytest.mark.parametrize("place", ["/proc/x", "file/x"])
def test_an_unwritable_cache(tmp_path, tokenizer, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / place))  # an absolute place stays itself
    with pytest.raises(ValueError, match=r"tokenized data cannot be kept here .*; set DRAFTSMITH_CACHE to another"):
        tokenized(write(tmp_path / "a.jsonl", [FINE]), data(), tokenizer)


def test_templates(tmp_path):
    assert read_template(None) is None
    assert read_template("{{ messages }}") == "{{ messages }}"
    (tmp_path / "x.jinja").write_text("{{ x }}")
    assert read_template(str(tmp_path / "x.jinja")) == "{{ x }}"
    for name in ("missing.jinja", "x" * 100_000, "\0"):
        with pytest.raises(FileNotFoundError, match="neither a Jinja template nor a file"):
            read_template(name)
    latin, broken = tmp_path / "latin.jinja", tmp_path / "broken.jinja"
    latin.write_bytes("{{ 'é' }}".encode("latin-1"))
    broken.write_text("{% for %}")
    (tmp_path / "notes.txt").write_text("not json")
    for template, message in (
        (str(tmp_path / "notes.txt"), r"notes\.txt: no chat template: no \{\{ … \}\} or \{% … %\} is in it"),
        (str(latin), r"latin\.jinja: not UTF-8 text"),
        (str(broken), r"broken\.jinja: no Jinja template \(line 1"),
        ("{% for %}", r"data\.template: no Jinja template \(line 1"),
    ):
        with pytest.raises(ValueError, match=message):
            read_template(template)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"source": "wikitext"}, "is neither 'stdlib', 'package:NAME', a file"),
        ({"source": "stdlib", "split": "dev"}, "has the splits train, validation and test, not 'dev'"),
        ({"source": "a.jsonl", "form": "chat"}, "'form' is for stdlib and package:NAME"),
        ({"source": "stdlib", "form": "chat", "answers": {"prompts": 3}}, "drop 'form' and 'limit', or 'answers'"),
        ({"source": "stdlib", "limit": 9, "answers": {"prompts": 3}}, "drop 'form' and 'limit', or 'answers'"),
        ({"source": "a.jsonl", "files": "a.jsonl"}, "'files' is for a Hub data set"),
        ({"source": "stdlib", "files": "a.jsonl"}, "'files' is for a Hub data set"),
        ({"source": "a.jsonl", "subset": "main"}, "'subset' is for a Hub data set"),
        ({"source": "a.jsonl", "split": "validation"}, r"split 'validation': a file's rows are train, or a part"),
        ({"source": "a.jsonl", "split": "train[:9]+train[10:]"}, "a file's rows are train, or a part of them"),
        ({"source": "a.jsonl", "split": "train[:9]", "streaming": True}, r"a stream has no part 'train\[:9\]'"),
    ],
)
def test_invalid_sources(fields, message):
    with pytest.raises(ValueError, match=message):
        Source.model_validate(fields)


@pytest.mark.parametrize("name, cut, rows", [("coder-train", 943, 4723), ("coder-held-out", 60, 244)])
def test_committed_answers_say_how_they_ended(name, cut, rows):
    """Without it, the end token would be supervised after answers that were cut, a fifth of them."""
    table = pyarrow.parquet.read_table(ROOT / f"data/{name}.parquet").to_pylist()
    assert [len(row["finish_reason"]) for row in table] == [1] * rows
    assert sum(row["finish_reason"] == ["length"] for row in table) == cut


@pytest.mark.parametrize("data, target", [("coder", "1d9614638d18024d"), ("smollm2", "b179c9523d0e6a0f")])
def test_committed_answers_are_the_targets_own_and_held_out(data, target):
    """They say whose they are; none is in the training data, too."""
    held_out = pyarrow.parquet.read_table(ROOT / f"data/{data}-held-out.parquet")
    assert held_out.schema.metadata[b"target.fingerprint"].decode().startswith(target)
    trained = [pyarrow.parquet.read_table(path).to_pylist() for path in (ROOT / "data").glob(f"{data}-train*.parquet")]
    chats = [json.dumps(row["messages"]) for row in held_out.to_pylist()]
    assert len({*chats}) == len(chats) and not {*chats} & {json.dumps(r["messages"]) for rows in trained for r in rows}


def test_the_number_of_processes_changes_nothing(tmp_path, tokenizer, monkeypatch):
    """Samples, their order, and the counts of rows that cannot be used, with the place of the first."""
    monkeypatch.setattr(module, "CHUNK", 3)
    made = [{"messages": CHATS[n % 5]} | ({"colour": n} if n % 4 == 3 else {}) for n in range(20)]
    made[7:7] = [EMPTY, EMPTY]
    made[15] = {"messages": 3}
    source = write(tmp_path / "a.jsonl", made)
    found = []
    for workers in (0, 3):
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / f"cache-{workers}"))
        before = set(psutil.Process().children())
        found.append(tokenized(source, data(workers=workers, max_skipped=0.5), tokenizer))
        assert workers or set(psutil.Process().children()) == before
    one, many = found
    assert one.sha256() == many.sha256() and len(one) == 19 and one.skipped == many.skipped
    assert (one.skipped.rows, one.skipped.count, one.skipped.answers) == (22, 3, 19)
    assert one.skipped.reasons["an empty conversation"] == (2, "line 8")
    assert one.skipped.unused["colour"][1] == "line 4"
    whole = module.encoded([(str(n), row) for n, row in enumerate(made)], source, data(), tokenizer, None)
    assert (whole.tokens == one.tokens).all() and (whole.starts == one.starts).all()


def test_an_error_of_all_rows_in_a_process(tmp_path, tokenizer, monkeypatch):
    """Is raised here, as it is; of several the first one."""
    monkeypatch.setattr(module, "CHUNK", 2)
    place = tmp_path / "a.jsonl"
    source = write(place, [{"messages": chat} for chat in CHATS * 3])
    encode = module.encode

    def broken(content, *arguments, **named):
        if "Number 3" in content[0]["content"]:
            raise ValueError("the template is broken")
        return encode(content, *arguments, **named)

    monkeypatch.setattr(module, "encode", broken)
    with pytest.raises(ValueError) as caught:
        tokenized(source, data(workers=2), tokenizer)
    assert str(caught.value) == f"data source '{place}': the template is broken (first: line 4)"
    monkeypatch.setattr(module, "encode", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ValueError, match=r"a process has ended abruptly, .*; set data\.workers=0"):
        tokenized(source, data(workers=2), tokenizer)
