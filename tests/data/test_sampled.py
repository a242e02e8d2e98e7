"""Samples from the token ids that were sampled: every turn's thinking, exactly the tokens of decoding."""

import json

import pytest

from draftsmith.common.data_sections import Data, Source
from draftsmith.data import sampled
from draftsmith.data.tokenized import tokenized

pytestmark = pytest.mark.usefixtures("cache")
# As Qwen3's: what was thought before an earlier answer is dropped.
FORGETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% if loop.last and m['reasoning_content'] %}"
    "<think>{{ m['reasoning_content'] }}</think>{% endif %}{{ m['content'] }}!\n"
    "{% else %}U:{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
CHAT = [
    {"role": "user", "content": "six"},
    {"role": "assistant", "content": "42", "reasoning_content": "times seven"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "4", "reasoning_content": "twice"},
]


def data(**fields):
    return Data.model_validate({"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib"}], **fields})


@pytest.fixture
def ids(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def read(tmp_path, tokenizer):
    """read(rows, **fields) → (samples: ids and those of the labels; what is said of the rows)."""

    def read(rows, **fields):
        path = tmp_path / "shard-00000.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = tokenized(
            Source(source=str(path)), data(**{"template": FORGETS, "max_skipped": 1.0, **fields}), tokenizer
        )
        samples = []
        for begin, end in zip(found.starts, found.starts[1:], strict=False):
            tokens, marks = found.tokens[begin:end], found.supervised[begin:end]
            samples.append((tokens.tolist(), tokens[marks].tolist()))
        return samples, "\n".join(found.skipped.lines())

    return read


def pieces(ids, text):
    """The ids of a text written with other tokens than the tokenizer's own: one for each character."""
    return [one for character in text for one in ids(character)]


def test_every_turns_thinking_is_supervised(read, ids):
    """One sample for each answer, whose labels are the tokens that were sampled, not those of its text."""
    said = [pieces(ids, "<think>times seven</think>42!"), pieces(ids, "<think>twice</think>4!")]
    asked = [ids("U:six\nA:"), ids("U:six\nA:42!\nU:two\nA:")]
    row = {"messages": CHAT, "token_ids": [{"prompt": p, "answer": a} for p, a in zip(asked, said, strict=True)]}
    samples, lines = read([row])
    assert samples == [(p + a, a) for p, a in zip(asked, said, strict=True)] and lines == ""
    assert said[0] != ids("<think>times seven</think>42!")
    samples, _ = read([row], max_length=len(asked[1]) + 3)
    assert samples[1] == (asked[1] + said[1][:3], said[1][:3])


def test_answers_that_go_on_are_one_sample(read, ids):
    """Where the second prompt begins with the first one and its answer, the text is read once."""
    first, second = pieces(ids, "42!"), pieces(ids, "4!")
    prompt = ids("U:six\nA:")
    following = prompt + first + pieces(ids, "\nU:two\nA:")
    token_ids = [{"prompt": prompt, "answer": first}, {"prompt": following, "answer": second}]
    bare = [{name: m[name] for name in ("role", "content")} for m in CHAT]
    samples, lines = read([{"messages": bare, "token_ids": token_ids}])
    assert samples == [(following + second, first + second)]
    assert "1 of 2 answers, of those looked at, follow another prompt in their token ids than" in lines
    bare[1]["weight"] = 0
    samples, _ = read([{"messages": bare, "token_ids": token_ids}])
    assert samples == [(following + second, second)]
    bare[1] |= {"content": "", "weight": 1}  # its ids, the end of a turn say, are not learned
    samples, _ = read([{"messages": bare, "token_ids": token_ids}])
    assert samples == [(following + second, second)]


def test_ids_of_another_tokenizer_are_not_taken(read, ids, tokenizer):
    """The answers' texts are, as if there were none; a line says so."""
    chat = CHAT[:2]
    right = {"prompt": ids("U:six\nA:"), "answer": ids("<think>times seven</think>42!")}
    text, _ = read([{"messages": chat}])
    for said in ("<think>times seven</think>43!", "<think>times seven</think>4"):
        samples, lines = read([{"messages": chat, "token_ids": [right | {"answer": ids(said)}]}])
        assert samples == text and f"1 of 1 {sampled.OTHER_TOKENIZER}" in lines
    padded = [*right["answer"], len(tokenizer) + 3]  # a model's vocabulary may have more rows than its tokenizer
    assert read([{"messages": chat, "token_ids": [right | {"answer": padded}]}])[0] == [
        (right["prompt"] + padded, padded)
    ]
    samples, lines = read([{"messages": chat, "token_ids": [right]}], reasoning="drop")
    assert samples == [(ids("U:six\nA:42!\n"), ids("42!\n"))] and lines == "", "thinking is part of the ids"


@pytest.mark.parametrize(
    "token_ids, said",
    [
        ([], "not one for each of the assistant's messages"),
        ("1 2", "no list of objects"),
        ([[1], [2]], "no list of objects"),
        ([{"prompt": [1]}], "no list of objects"),
        ([{"prompt": [1], "answer": [2.0]}], "no list of objects"),
        ([{"prompt": [], "answer": [2]}], "no list of objects"),
        ([{"prompt": [1], "answer": [2]}] * 2, "not one for each of the assistant's messages"),
    ],
)
def test_what_cannot_be_read_is_skipped(read, ids, token_ids, said):
    good = {"messages": CHAT[:2]}
    samples, lines = read([good, {"messages": CHAT[:2], "token_ids": token_ids}])
    if token_ids == []:
        assert len(samples) == 2, "an empty list, as parquet has it, is none"
    else:
        assert len(samples) == 1 and "1 of 2 rows skipped: 1 × token_ids" in lines and said in lines


def test_shards_read_the_same_from_parquet(tmp_path, read, ids, tokenizer):
    import pandas

    row = {
        "messages": CHAT[:2],
        "token_ids": [{"prompt": ids("U:six\nA:"), "answer": pieces(ids, "<think>times seven</think>42!")}],
    }
    (sample,), _ = read([row])
    path = tmp_path / "a.parquet"
    pandas.DataFrame([row, row | {"token_ids": None}]).to_parquet(path)
    found = tokenized(Source(source=str(path)), data(template=FORGETS), tokenizer)
    assert found.tokens[: found.starts[1]].tolist() == sample[0] and len(found) == 2
