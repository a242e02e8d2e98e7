"""Held-out conversations that the target answers itself, and what a run says of others."""

import json

import pyarrow.parquet
import pytest
from safetensors.torch import load_file
from training_runs import Runs, write_recipe

from draftsmith.common.data_sections import Data, Source
from draftsmith.data.chat import encode_prompt
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.models.target import load_target
from draftsmith.train import chat_answers, medusa
from draftsmith.train.samples import answered

TURNS = [["Who?", "Where?"], ["Why is that so? " * 30, "And then?"], ["When?"]]
STAGES = [{"name": "heads", "steps": 2, "batch": {"sequences": 4}, "optim": {"lr": 1e-3}}]


@pytest.fixture
def chats(tmp_path):
    """Conversations with answers of somebody else; one row asks nothing."""
    rows = [[turn for text in texts for turn in (("user", text), ("assistant", "Nobody knows."))] for texts in TURNS]
    rows.append([("assistant", "Hello")])
    path = tmp_path / "chats.jsonl"
    lines = [json.dumps({"messages": [{"role": role, "content": text} for role, text in row]}) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def source_of(path, **ask):
    return Source(source=str(path), answers={"prompts": 9, "prompt_tokens": 60, "new_tokens": 8, **ask})


def test_answers_are_the_targets_own_in_its_own_conversation(tiny_lm, chats, capsys):
    """Each is what plain decoding writes after the prompt, in which the answers before it are the target's."""
    target, done = load_target(str(tiny_lm), dtype="float32"), []
    made = chat_answers.answer_chats(target, source_of(chats), 0.5, done.append)
    assert done == [1, 2, 3], "conversations, also the one that is too long"
    rows = [row[marks].tolist() for row, marks in zip(made["tokens"], made["supervised"], strict=True)]
    place = 0
    for texts in (TURNS[0], TURNS[2]):
        messages = []
        for text in texts:
            messages.append({"role": "user", "content": text})
            prompt = encode_prompt(messages, target.tokenizer)
            (result,) = SpeculativeDecoder(target).generate([prompt], 8)
            assert rows[place] == result.tokens
            first = int(made["supervised"][place].int().argmax())
            assert made["tokens"][place, :first].tolist() == prompt
            said = target.tokenizer.decode(result.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
            place += 1
    assert place == len(rows) == 3
    wanted = "1 conversation of 3 ended before an answer, since its prompt has more than answers.prompt_tokens=60"
    assert wanted in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "ask, share, message",
    [
        ({"prompt_tokens": 3}, 0.5, "the target answers none of its 3 conversations; raise answers.prompt_tokens"),
        ({}, 0.0, "1 of 4 rows"),
    ],
)
def test_what_cannot_be_answered_is_said(tiny_lm, chats, ask, share, message):
    with pytest.raises(ValueError, match=message):
        chat_answers.answer_chats(load_target(str(tiny_lm)), source_of(chats, **ask), share)


def test_a_template_that_refuses_is_named(tiny_lm, chats):
    target = load_target(str(tiny_lm))
    target.tokenizer.chat_template = "{{ raise_exception('no users') }}"
    with pytest.raises(ValueError, match=r"answers none of its 3 conversations \(.*no users.*\); raise"):
        chat_answers.answer_chats(target, source_of(chats), 0.5)


def test_answers_are_kept_until_the_rows_or_the_template_change(tiny_lm, chats, tmp_path, monkeypatch):
    target, asked = load_target(str(tiny_lm)), []
    answer = chat_answers.answer_chats

    def counted(*arguments):
        asked.append(arguments)
        return answer(*arguments)

    monkeypatch.setattr("draftsmith.train.samples.answer_chats", counted)
    own = target.tokenizer.chat_template

    def made(template=None):
        return answered(source_of(chats), target, 0, tmp_path / "kept", template, 0.5)

    first, again = made(), made()
    assert first.sha256() == again.sha256() and len(asked) == 1 and len(first) == 3
    made("X" + own)
    assert len(asked) == 2 and target.tokenizer.chat_template == own
    lines = chats.read_text().splitlines()
    chats.write_text("\n".join([lines[2], *lines]) + "\n")
    assert len(made()) == 4 and len(asked) == 3


def test_only_held_out_conversations_are_answered_while_data_is_read(chats):
    held_out, plain = source_of(chats).model_dump(), {"source": str(chats)}
    assert Data(train=[plain], validation=[held_out]).validation[0].answers
    with pytest.raises(ValueError, match=r"training source .*chats\.jsonl': .*let train/distill\.py write them"):
        Data(train=[held_out], validation=[plain])


def test_checkpoints_are_selected_on_the_targets_own_answers(tiny_lm, chats, tmp_path, run_main):
    """The run's held-out rows are greedy decoding of their prompts; of another's answers the run says so, and of the
    target's own shards it does not."""
    (tmp_path / "shards").mkdir()
    shard = tmp_path / "shards/shard-00000.jsonl"
    shard.write_text(chats.read_text())
    ask = source_of(chats).answers.model_dump()
    recipe = write_recipe(tmp_path, tiny_lm, {"num_draft_heads": 3}, STAGES)
    train = Runs(medusa.main, recipe, run_main)

    def run(name, **source):  # one of the conversations is longer than the target's context
        cut = [] if "answers" in source else ["data.max_length=256", "data.max_unsupervised=0.9"]
        return train(name, f"data.validation=[{json.dumps(source)}]", "data.max_skipped=0.5", *cut)

    folder = run("own", source=str(chats), answers=ask)
    assert "not known to be" not in train.out and "the target answers 9 conversations from" in train.out
    held_out, target = load_file(folder / "held_out/model.safetensors"), load_target(str(tiny_lm), dtype="float32")
    for tokens, marks in zip(held_out["tokens"], held_out["supervised"].bool(), strict=True):
        begin = int(marks.int().argmax())
        (result,) = SpeculativeDecoder(target).generate([tokens[:begin].tolist()], 8)
        assert tokens[marks].tolist() == result.tokens
    assert len(held_out["tokens"]) == 3
    run("others", source=str(chats))
    assert "its answers are not known to be this target's own" in " ".join(train.out.split())
    for fingerprint, known in (("sha256:0", False), (target.fingerprint, True)):
        (shard.parent / "manifest.json").write_text(json.dumps({"decides": {"target.fingerprint": fingerprint}}))
        run(f"shards-{known}", source=f"{shard.parent}/shard-*.jsonl")
        assert ("not known to be" in train.out) != known
        rows = pyarrow.Table.from_pylist([json.loads(line) for line in chats.read_text().splitlines()[:2]])
        pyarrow.parquet.write_table(
            rows.replace_schema_metadata({"target.fingerprint": fingerprint}), tmp_path / "rows.parquet"
        )
        run(f"parquet-{known}", source=str(tmp_path / "rows.parquet"))
        assert ("not known to be" in train.out) != known
