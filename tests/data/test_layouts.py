"""Rows as real data sets hold them: what is trained on is what the assistant wrote, and what is left out is said."""

import datetime
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given, settings
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftsmith.common.data_sections import Data, Source
from draftsmith.data import preview
from draftsmith.data.chat import encode, encode_prompt
from draftsmith.data.formats import Completion
from draftsmith.data.seeds import read_seeds
from draftsmith.data.streaming import StreamedRows
from draftsmith.data.tokenized import tokenized
from draftsmith.models.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TEMPLATES = {path.stem: path.read_text() for path in (ROOT / "tests/data/templates").glob("*.jinja")}
VICUNA = (ROOT / "recipes/templates/vicuna.jinja").read_text()
USER, CALL = {"role": "user", "content": "Add 2, 2."}, {"name": "add", "arguments": '{"a": 2, "b": 2}'}
ANSWER = {"role": "assistant", "content": "It is 4."}
pytestmark = pytest.mark.usefixtures("cache")


def data(**fields):
    return Data.model_validate(
        {"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib"}], "max_skipped": 1.0, **fields}
    )


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(source=str(path))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/tiny-lm")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]})
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


def labels(samples, tokenizer):
    """The labels of each sample as text."""
    pairs = zip(samples.starts, samples.starts[1:], strict=False)
    return [tokenizer.decode(samples.tokens[a:b][samples.supervised[a:b]].tolist()) for a, b in pairs]


def read(path, rows, tokenizer, **fields):
    """The labels of each sample, and what is said."""
    samples = tokenized(write(path / "a.jsonl", rows), data(max_unsupervised=1.0, **fields), tokenizer)
    return labels(samples, tokenizer), samples.skipped


@pytest.mark.parametrize("role", ["tool", "function", "developer", "system"])
def test_other_roles_are_never_the_assistants(tmp_path, tokenizer, role):
    chat = [USER, ANSWER, {"role": role, "content": "HIDDEN"}, USER, ANSWER]
    rows = [{"messages": chat}, {"messages": [USER, ANSWER]}]
    said, skipped = read(tmp_path, rows, tokenizer)
    assert said == ["It is 4.<|end|>It is 4.<|end|>", "It is 4.<|end|>"] and not skipped.count
    said, skipped = read(tmp_path, rows, tokenizer, template=VICUNA)
    refused = f"the chat template refuses this chat: this template has no place for the role '{role}'"
    assert len(said) == 1 and skipped.reasons == {refused: (1, "line 1")}


def test_a_template_that_gives_another_role_to_the_assistant_is_an_error(tmp_path, tokenizer):
    template = re.sub(r"\{%- elif turn\['role'\] != 'assistant' -%\}\s*\{\{.*?\}\}", "", VICUNA)
    chat = [USER, {"role": "tool", "content": "4"}, ANSWER]
    with pytest.raises(ValueError) as error:
        read(tmp_path, [{"messages": [USER, ANSWER]}] * 30 + [{"messages": chat}], tokenizer, template=template)
    line = template[: template.index("{%- generation")].count("\n") + 1
    assert f"a message of the role 'tool' as the assistant's words (its line {line})" in str(error.value)
    assert "(first: line 31)" in str(error.value)


CALLS = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "assistant", "content": "", "function_call": CALL},
    {"role": "assistant", "content": [{"type": "text", "text": "x", "image_url": None}]},
    {"role": "assistant", "content": ""},
]


@pytest.mark.parametrize("calls", [True, False])
def test_calls_are_rendered_or_the_row_is_skipped(tmp_path, tokenizer, calls):
    rows = [{"messages": [USER, answer]} for answer in CALLS]
    template = TEMPLATES["calls" if calls else "chatml"]
    said, skipped = read(tmp_path, rows, tokenizer, template=template)
    call = '<tool_call>add{"a": 2, "b": 2}</tool_call><|im_end|>'
    assert said == [call] * 4 * calls + ["x<|im_end|>"], "none is the end token alone"
    empty = {"no answer has a label, since nothing is written in them": (1, "line 6")}
    assert skipped.reasons == empty if calls else skipped.reasons == {
        "the chat template does not render 'tool_calls'": (4, "line 1"), **empty
    }  # fmt: skip


def test_parquet_gives_the_rows_of_json(tmp_path, tokenizer):
    """Arrow adds the fields of one message to all others, as nulls."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    rows = [{"messages": [USER, answer], "tools": tools, "system": "Be terse."} for answer in (*CALLS[:3], CALLS[4])]
    rows += [{"messages": [USER, {**ANSWER, "reasoning_content": "2+2", "weight": 1}]}, {"messages": [USER, ANSWER]}]
    texts = [row | {"messages": [dict(m) for m in row["messages"]]} for row in rows]
    texts[3]["messages"][1]["content"] = rows[3]["messages"][1]["content"] = "x"
    datasets.Dataset.from_list(texts).to_parquet(str(tmp_path / "a.parquet"))
    fields = data(template=TEMPLATES["calls"], max_length=999)
    stored = tokenized(Source(source=str(tmp_path / "a.parquet")), fields, tokenizer)
    plain = tokenized(write(tmp_path / "a.jsonl", rows), fields, tokenizer)
    assert stored.sha256() == plain.sha256() and len(plain) == 6 and not plain.skipped.count
    text = tokenizer.decode(plain.tokens[: plain.starts[1]].tolist())
    assert "Be terse." in text and '"name": "add"' in text
    assert stored.skipped.unused.keys() == plain.skipped.unused.keys()


def test_reasoning_is_kept_dropped_or_named(tmp_path, tokenizer):
    rows = [{"messages": [USER, {**ANSWER, name: "2+2"}]} for name in ("reasoning_content", "reasoning", "thinking")]
    rows += [{"messages": [USER, {"role": "assistant", "content": None, "reasoning": "cut while"}]}]
    said, skipped = read(tmp_path, rows, tokenizer, template=TEMPLATES["calls"])
    thought = "<think>\n2+2\n</think>\n\nIt is 4.<|im_end|>"
    assert said == [*[thought] * 3, "<think>\ncut while\n</think>\n\n<|im_end|>"] and not skipped.lines()
    said, skipped = read(tmp_path, rows, tokenizer, template=TEMPLATES["calls"], reasoning="drop")
    assert said == ["It is 4.<|im_end|>"] * 3 and skipped.count == 1 and not skipped.unused
    said, skipped = read(tmp_path, rows[:3], tokenizer, template=TEMPLATES["qwen3"])  # it has a variable of this name
    assert skipped.lines() == [
        "without an effect: reasoning_content (1 row, first: line 1), reasoning (1 row, first: line 2), "
        "thinking (1 row, first: line 3)"
    ]


def test_a_message_that_the_template_leaves_out_is_said(tmp_path, tokenizer):
    """Found by one rendering for each order of roles, said of all rows that have it."""
    system = {"role": "system", "content": "In French."}
    rows = [{"messages": chat} for chat in 12 * [[system, USER, ANSWER], [USER, system, USER, ANSWER], [USER, ANSWER]]]
    first = "{% for message in messages if message.role != 'system' or message == messages[0] %}"
    for template, said in (
        (
            TEMPLATES["chatml"].replace(
                "for message in messages", "for message in messages if message.role != 'system'"
            ),
            24,
        ),
        (TEMPLATES["chatml"].replace("{%- for message in messages %}", first), 12),
        (TEMPLATES["chatml"], 0),
    ):
        _, skipped = read(tmp_path, rows, tokenizer, template=template)
        assert skipped.unused == ({"system message": (said, f"line {1 if said == 24 else 2}")} if said else {})


def test_columns_beside_a_conversation(tmp_path, tokenizer):
    sharegpt = [{"from": "human", "value": "Hi"}, {"role": "assistant", "content": "Salut"}]  # entry 7: both in a row
    rows = [{"conversations": sharegpt, "system": "In French.", "tools": "[]", "id": 1, "score": 3}]
    rows += [{"messages": [{"role": "system", "content": "a"}, USER, ANSWER], "system": "b"}]
    rows += [{"messages": [USER, ANSWER], "tools": '[{"name": "add"}]'}, {"messages": [USER, ANSWER], "tools": "add"}]
    samples = tokenized(write(tmp_path / "a.jsonl", rows), data(), tokenizer)
    text = tokenizer.decode(samples.tokens[: samples.starts[1]].tolist())
    assert text == "<|system|>\nIn French.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nSalut<|end|>"
    assert samples.skipped.unused == {"score": (1, "line 1"), "tools": (1, "line 3")}
    assert sorted(samples.skipped.reasons) == [
        "the field 'system' and the first message are two different system messages",
        "tools is a text that is no JSON; a list of objects is needed",
    ]


@pytest.mark.parametrize("flag", [{"weight": 0}, {"loss": False}, {"train": False}, {"loss_mask": 0.0}])
@pytest.mark.parametrize("template", [None, TEMPLATES["chatml"]])
def test_turns_that_are_not_to_be_trained_on(tmp_path, tokenizer, flag, template):
    other = {"role": "assistant", "content": "Sure.", **dict.fromkeys(flag, 1)}
    rows = [{"messages": [USER, {**ANSWER, **flag}, USER, other]}, {"messages": [USER, {**ANSWER, **flag}]}]
    rows += [{"messages": [USER, {**ANSWER, **dict.fromkeys(flag, 0.5)}]}]
    said, skipped = read(tmp_path, rows, tokenizer, template=template)
    assert [re.sub("<.*", "", text) for text in said] == ["Sure."]
    [name] = flag
    assert skipped.lines()[1] == f"1 of 2 answers have no label, since '{name}' is 0 (first: line 1)"
    assert sorted(skipped.reasons) == [f"a turn's '{name}' is neither 0 nor 1", f"no answer has a label, since '{name}' is 0"]  # fmt: skip  # noqa: E501


MOVED = (  # Mistral's way: the system message stands in the last turn of the user
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if messages[0].role == 'system' and m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{{ messages[0].content }} {% endif %}{{ m.content }} [/INST]{% else %}{{ ' ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)


def test_every_answer_has_a_label_behind_its_prompt(tmp_path, tokenizer):
    turns = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(3)]
    chat = [{"role": "system", "content": "Be terse."}, *(m for turn in turns for m in turn)]
    samples = tokenized(write(tmp_path / "a.jsonl", [{"messages": chat}]), data(template=MOVED), tokenizer)
    assert labels(samples, tokenizer) == [" a2</s>", " a0</s>", " a1</s>"]
    first = samples.tokens[samples.starts[1] : samples.starts[2]].tolist()
    assert tokenizer.decode(first) == "<s>[INST] Be terse. q0 [/INST] a0</s>"
    [line] = samples.skipped.lines()
    assert line.startswith("2 of 3 answers are samples of their own") and line.endswith("(first: line 1)")


def test_labels_that_cannot_be_found_are_said(tmp_path, tokenizer):
    """The prompt of an earlier turn has what the turn itself has not."""
    opens = "{% if add_generation_prompt and messages | length < 2 %}<think>{% endif %}"
    chat = [USER, ANSWER, USER, ANSWER]
    _, skipped = read(tmp_path, [{"messages": chat}] * 2, tokenizer, template=TEMPLATES["chatml"] + opens)
    why = "the chat template renders their prompt differently from the turn"
    assert skipped.lines() == [f"2 of 4 answers have no label, since {why} (first: line 1)"]


def test_ids_that_decoding_would_not_have_are_said(tmp_path, tokenizer):
    """By its marks the template trains on an answer behind another prompt."""
    template = VICUNA.replace("-%}\n    {{- ' ASSISTANT:' -}}", "-%}\n    {{- ' ASSISTANT: <think>' -}}")
    assert template != VICUNA
    said, skipped = read(tmp_path, [{"messages": [USER, ANSWER]}] * 20, tokenizer, template=template)
    assert said == [" It is 4.</s>"] * 20
    assert any("20 of 20 answers follow another text than their prompt when decoding" in s for s in skipped.lines())


def test_answers_in_a_prompt_are_not_trained_on(tmp_path, tokenizer):
    """They may be another model's, or examples."""
    row = {"prompt": [USER, {**ANSWER, "content": "It is 5."}, USER], "completion": [ANSWER]}
    said, skipped = read(tmp_path, [row], tokenizer)
    assert said == ["It is 4.<|end|>"]
    assert any("since they are part of a prompt" in line for line in skipped.lines())


def test_why_the_last_answer_ended_may_be_a_text(tmp_path, tokenizer):
    rows = [{"messages": [USER, ANSWER, USER, ANSWER], "finish_reason": "length"}]
    assert read(tmp_path, rows, tokenizer)[0] == ["It is 4.<|end|>It is 4."]
    rows = [{"prompt": "a", "completion": " b", "finish_reason": "length"}, {"prompt": "a", "completion": " b</s>"}]
    assert read(tmp_path, rows, tokenizer)[0] == [" b", " b</s>"]


# ---- tokens


def sentencepiece(scheme, byte_fallback=True):
    """A small tokenizer with a space before each word, as sentencepiece's: other characters are written by bytes."""
    bpe = Tokenizer(BPE(unk_token="<unk>", byte_fallback=byte_fallback))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    texts = ["USER: ask it. ASSISTANT: answer it\n", "def f(x): return x"] * 9
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    state = json.loads(bpe.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # the bytes are none
    bpe = Tokenizer.from_str(json.dumps(state))
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def byte_level():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/tiny-lm")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "</s>"]})
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


KINDS = {"byte-level": byte_level(), **{scheme: sentencepiece(scheme) for scheme in ("first", "always", "never")}}
TEXTS = st.text(st.sampled_from("ab x  .,\n#é日😀(1"), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS.filter(str.strip)), min_size=1, max_size=3), ended=st.booleans())
def test_labels_are_the_answer_and_its_end(kind, texts, ended):
    """Behind the ids of the prompt when decoding."""
    tokenizer = KINDS[kind]
    chat = [{"role": r, "content": t} for turn in texts for r, t in zip(("user", "assistant"), turn, strict=True)]
    [sample] = encode(chat, tokenizer, VICUNA, 10_000, check=True).samples
    for number, (_, answer) in enumerate(texts):
        prompt = encode_prompt(chat[: 2 * number + 1], tokenizer, VICUNA)
        assert sample.ids[: len(prompt)] == prompt and not sample.supervised[len(prompt) - 1]
        end = len(prompt) + [*sample.supervised[len(prompt) :], False].index(False)
        before, after = (tokenizer.decode(sample.ids[:at]) for at in (len(prompt), end))
        assert after == before + " " + answer + "</s>"
    prompt, answer = texts[0]
    [sample] = encode(Completion(prompt, answer + "</s>" * ended), tokenizer, None, 10_000).samples
    ids = encode_prompt(prompt, tokenizer)
    assert sample.ids[: len(ids)] == ids and sample.supervised == [n >= len(ids) for n in range(len(sample.ids))]
    assert tokenizer.decode(sample.ids) == tokenizer.decode(ids) + answer + "</s>"
    assert sample.ids.count(tokenizer.bos_token_id) == (kind != "byte-level")


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_texts_begin_as_when_decoding(scheme):
    tokenizer = KINDS[scheme]
    [document] = encode("ask it", tokenizer, None, 99).samples
    assert document.ids == encode_prompt("ask it", tokenizer) and document.ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in document.ids, "one that a tokenizer adds would end every prompt"
    assert encode_prompt("<s>ask it", tokenizer).count(tokenizer.bos_token_id) == 1, "a chat rendered beforehand"


def test_ids_are_those_of_the_file(tmp_path):
    """Transformers 5 makes this class's tokenizer from vocab.json by its own rules."""
    source = ROOT / "models/tiny-lm"
    stored = json.loads((source / "tokenizer.json").read_text())
    digits = {"type": "Digits", "individual_digits": True}
    stored["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, stored["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    (tmp_path / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in stored["model"]["merges"]))
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for text in ("In 2024, 1000", "a <|end|> b"):
        ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
        assert load_tokenizer(str(tmp_path))(text)["input_ids"] == ids


# ---- dates

DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
)


def test_a_template_that_prints_the_date(tmp_path, tokenizer, monkeypatch):
    """Yesterday's rows are not taken, nor does a streamed run go on with other ones."""

    def on(day):
        class Day(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 11, day)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)

    def texts(**fields):
        samples = tokenized(source, data(template=DATED + TEMPLATES["chatml"], **fields), tokenizer)
        return tokenizer.decode(samples.tokens[: samples.starts[1]].tolist())[:11], samples.skipped.lines()

    def stream(**fields):
        settings = data(template=DATED + TEMPLATES["chatml"], **fields)
        StreamedRows(source.model_copy(update={"streaming": True}), settings, tokenizer, 1, tmp_path / "n", keep=True)

    source = write(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}] * 3)
    for day in (24, 25):
        on(day)
        text, [line] = texts()
        assert text == f"{day} Nov 2026" and line.startswith("3 of 3 answers stand under the date of today")
        assert "pin it by data.template_arguments={date_string: …}" in line
        if day == 24:
            stream()
            stream()
    with pytest.raises(ValueError, match=r"a\.jsonl': its chats were streamed with another date"):
        stream()
    stream(template_arguments={"date_string": "24 Nov 2026"})
    # An argument that the template does not read is not named: this one's text has "updated".
    source_of = "updated {{ strftime_now('%d %b %Y') }}"
    found = tokenized(source, data(template=source_of + TEMPLATES["chatml"]), tokenizer)
    assert "which the chat template prints; pin it by a data.template without it" in found.skipped.lines()[0]
    assert texts(template_arguments={"date_string": "24 Nov 2026"}) == ("24 Nov 2026", [])


# ---- seeds


def test_a_seed_ends_before_the_result_of_a_call(tmp_path, capsys):
    call = {"role": "assistant", "content": None, "function_call": CALL}
    for role in ("tool", "function"):
        row = {"messages": [USER, call, {"role": role, "name": "add", "content": "4"}, ANSWER, USER], "system": "Hm."}
        [seed], _ = read_seeds([write(tmp_path / "a.jsonl", [{**row, "tools": [{"name": "add"}], "id": 3}])])
        assert seed.messages == ({"role": "system", "content": "Hm."}, USER)
    said = " ".join(capsys.readouterr().out.split())
    assert "without an effect: name (1 row, first: line 1), tools (1 row, first: line 1)" in said


# ---- a mixture


def layouts(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows in the layouts of real data sets. The user's words are u0, u1, …, the assistant's a0, a1, …, and those that
    are not to be trained on x0, x1, …."""
    draw, number = random.Random(seed), iter(range(10**9))

    def turn(role):
        message = {"role": role, "content": f"{'a' if role == 'assistant' else 'u'}{next(number)} é日😀"}
        if role == "assistant":
            kind = draw.choice(["", "", "", "null", "parts", "call", "thought", "flag", "empty"])
            if kind == "null":
                message |= {"tool_calls": None, "reasoning_content": None, "weight": None}
            elif kind == "parts":
                message["content"] = [{"type": "text", "text": message["content"], "image_url": None}]
            elif kind == "call":
                message |= {"content": draw.choice([None, ""]), "tool_calls": [{"type": "function", "function": CALL}]}
            elif kind == "thought":
                message["reasoning"] = f"a{next(number)}"
            elif kind == "flag":
                message |= {"content": f"x{next(number)}", draw.choice(["weight", "loss", "train"]): 0}
            elif kind == "empty":
                message["content"] = ""
        return message

    for _ in range(count):
        chat = [turn("system")] if draw.random() < 0.2 else []
        for _ in range(draw.randint(1, 3)):
            chat += [turn("user"), turn("assistant")]
            if draw.random() < 0.15:
                chat += [turn(draw.choice(["tool", "function", "developer", "system"])), turn("assistant")]
        kind = draw.randrange(8)
        speakers = {"user": "human", "assistant": "gpt"}
        plain = [{**m, "from": speakers.get(m["role"], m["role"]), "value": m["content"]} for m in chat]
        plain = [{name: m[name] for name in m if name not in ("role", "content")} for m in plain]
        if kind == 0:
            yield {"conversations": plain, "system": "u"}
        elif kind == 1:
            yield {"prompt": chat[:-1], "completion": chat[-1:], "tools": [{"type": "function", "function": CALL}]}
        elif kind == 2:
            yield {"prompt": f"u{next(number)}", "completion": draw.choice([" a1", "a2", ""])}
        elif kind == 3:
            yield draw.choice([{"text": "a3"}, {"messages": []}, {"messages": "x"}, {"question": 1}, {"text": None}])
        else:
            yield {"messages": chat, "id": next(number), "finish_reason": draw.choice(["stop", ["length"], None])}


@pytest.mark.parametrize("name", ["chatml", "calls", "qwen3", "mistral", "vicuna", "tiny"])
def test_no_row_is_lost_in_silence(tmp_path, tokenizer, name, rows=250):
    template = {**TEMPLATES, "vicuna": VICUNA, "tiny": None}[name]
    given = list(layouts(rows))
    for row in given:  # one by one: what is in it decides what becomes of it
        samples = None
        try:
            samples = tokenized(
                write(tmp_path / "a.jsonl", [row]), data(template=template, max_unsupervised=1.0), tokenizer
            )
        except ValueError as error:
            assert "has no row left: 1 of 1 rows skipped" in str(error) and "\n" not in str(error)
            continue
        said = " ".join(labels(samples, tokenizer))
        assert not re.search(r"\b[ux]\d", said) and re.search(r"\ba\d|<tool_call>", said), (row, said)
        wanted = json.dumps(row["messages"]) if "messages" in row and isinstance(row["messages"], list) else ""
        for word in re.findall(r'(?<="content": ")a\d+', wanted):
            assert re.search(rf"\b{word}\b", said), (row, said)
    samples = tokenized(write(tmp_path / "a.jsonl", given), data(template=template, max_unsupervised=1.0), tokenizer)
    assert samples.skipped.rows == rows and 0 < samples.skipped.count < rows
    assert all(count and place.startswith("line") for count, place in samples.skipped.reasons.values())


def test_preview_says_what_becomes_of_each_row(tmp_path, run_main):
    source = write(tmp_path / "a.jsonl", layouts(100))
    sources = [{"source": source.source}]
    section = {"train": sources, "validation": sources, "max_skipped": 1.0}
    content = {"run": {"name": "x"}, "target": {"name": str(ROOT / "models/tiny-lm")}, "data": section}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    code, out, err = run_main(preview.main, tmp_path / "r.yaml", "--count", 1)
    assert (code, err) == (0, "") and " of 100 rows skipped:" in out
    [used], [skipped] = (re.findall(said, out) for said in (r"(\d+) samples, ", r"(\d+) of 100 rows skipped"))
    assert int(used) + int(skipped) == 100 and "answers have no label, since 'weight' is 0" in out
    assert "the chat template does not render 'tool_calls'" in out
    assert re.search(r"without an effect: .*reasoning \(\d+ rows?", " ".join(out.split()))
