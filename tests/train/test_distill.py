"""Self-distillation: the target's own answers, turn by turn, whole after kills, every prompt accounted for."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from draws import fixed_seed, occurs
from torch.distributed import TCPStore
from training_runs import FORKED, Killed, Runs, become, both, free_port, write_recipe
from transformers import AutoModelForCausalLM

from draftsmith.common.command import run_command
from draftsmith.common.data_sections import Data, Source
from draftsmith.data import endpoint, seeds, shards
from draftsmith.data.chat import encode_prompt, encode_user_turn
from draftsmith.data.rows import UnusableRow
from draftsmith.data.seeds import Conversation, RequestFailed, Seed, read_seed, read_seeds
from draftsmith.data.shards import Shards
from draftsmith.data.tokenized import tokenized
from draftsmith.inference.engine.engine import SpeculativeDecoder
from draftsmith.inference.engine.text import answer_text
from draftsmith.kernels import cpu
from draftsmith.models.adapter import add_lora, write_adapter
from draftsmith.models.artifact import write_drafter, write_json
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import load_target
from draftsmith.train import backends, distill, medusa, ranks

ROOT = Path(__file__).parents[2]
NEW = 12  # tokens of an answer
WORDS = "import os def read config path return value for line in file print".split()


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", endpoint.KEY):
        monkeypatch.delenv(name, raising=False)


def make_seeds(path, count):
    """Chats of one to three turns of the user, the second of every fifth behind a word of the system."""
    with fixed_seed("prompts after some of which self-talk is cut, and not after others"):
        chance = random.Random(1)
    rows = []
    for number in range(count):
        chat = [{"role": "system", "content": "Be brief."}] if number % 5 == 0 else []
        for _ in range(1 + number % 3):
            chat.append({"role": "user", "content": " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))})
            chat.append({"role": "assistant", "content": "SEED ANSWER"})
        rows.append({"messages": chat})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.fixture
def recipe(tiny_lm, tmp_path):
    make_seeds(tmp_path / "seeds.jsonl", 20)
    content = {
        "run": {"name": "whole", "output_dir": str(tmp_path)},
        "target": {"name": str(tiny_lm)},
        "data": {"seeds": [{"source": str(tmp_path / "seeds.jsonl")}]},
        "engine": {"batch_size": 4, "max_length": 250, "threads": 1},
        "decoding": {"mode": "greedy", "max_new_tokens": NEW},
    }
    (tmp_path / "turns.jinja").write_text(TURNS)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def run(recipe, run_main):
    """Runs of the recipe."""
    return Runs(distill.main, recipe, run_main)


# The bundled target, a model of Python code, seldom ends a user's turn; after one of these it soon writes "def".
TURNS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}return {{ m['content'] }}\n"
    "{% else %}class {{ m['content'] }}\ndef \n{% endif %}{% endfor %}{% if add_generation_prompt %}return {% endif %}"
)


def lines_of(folder):
    """id → line, of all shards; no id twice."""
    lines = [line for path in sorted(folder.glob("shard-*.jsonl")) for line in path.read_text().split("\n")[:-1]]
    found = {json.loads(line)["id"]: line for line in lines}
    assert len(found) == len(lines), "a prompt is answered twice"
    return found


def counts_of(folder):
    counts = json.loads((folder / "manifest.json").read_text())["counts"]
    assert counts["prompts"] == counts["done"] + sum(counts["failed"].values()) + counts["not_asked"]
    assert counts["done"] == len(lines_of(folder))
    path = folder / "failures.jsonl"
    failed = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert Counter(line["reason"] for line in failed) == counts["failed"]
    return counts


# ---- seeds


def test_seeds_of_every_format():
    user = {"role": "user", "content": "a"}
    system = {"role": "system", "content": "s"}
    said = {"role": "assistant", "content": "x"}
    assert read_seed({"messages": [system, user, said, user, said], "turns": None}) == (system, user, user)
    sharegpt = [{"from": "gpt", "value": "x"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "y"}]
    assert read_seed({"conversations": sharegpt}) == (user,)
    assert read_seed({"turns": ["a", "a"], "question_id": 3}) == (user, user)
    assert read_seed({"prompt": "a", "completion": "b"}) == (user,)
    assert read_seed({"prompt": [system, user], "completion": [said]}) == (system, user)
    assert read_seed({"messages": [user, said, {"role": "tool", "content": "3"}, user]}) == (user,)
    assert read_seed({"messages": [user, said, system]}) == (user,)
    for wrong, message in [
        ({"messages": [system, said]}, "the user asks nothing"),
        ({"messages": [{"role": "tool", "content": "3"}, user]}, "the user asks nothing"),
        ({"text": "a"}, "it has text; needed is one of"),
        ({"turns": "a"}, "turns is a text; a list of texts is needed"),
        ({"turns": []}, "turns is an empty list"),
        ({"turns": ["a", None]}, "one of the turns is null"),
    ]:
        with pytest.raises(UnusableRow, match=message):
            read_seed(wrong)


def test_ids_are_of_the_content_not_of_the_place(tmp_path):
    def ids(rows):
        path = tmp_path / "seeds.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found, skipped = read_seeds([Source(source=str(path))])
        return [seed.id for seed in found], skipped.count

    a, b = {"prompt": "a", "completion": "1"}, {"prompt": "b", "completion": "2"}
    (first, second, again), skipped = ids([a, b, a])
    assert skipped == 0 and len({first, second, again}) == 3, "equal prompts are two prompts"
    assert ids([b, a])[0] == [second, first]
    assert ids([a | {"completion": "else"}])[0] == [first]
    chat = {"messages": [{"role": "assistant", "content": "x"}]}
    with pytest.raises(ValueError, match="asks anything"):
        ids([chat])
    odd = {"messages": None, "conversations": "x"}
    assert ids([a, odd, b]) == ([first, second], 1), "an unusable row changes nothing about the others"
    with pytest.raises(ValueError, match=r"seeds\.jsonl': 2 of 3 rows skipped: 2 × conversations is a text; .* 2"):
        ids([a, odd, odd])


def test_seeds_of_several_sources_are_mixed(tmp_path):
    """Whenever a run is stopped, it has its share of each; the ids are those of each source alone."""
    made = []
    for name, count in (("chat", 60), ("code", 30), ("maths", 10)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{name} {n}"}) + "\n" for n in range(count)))
        made.append(Source(source=str(path)))
    found = read_seeds(made)[0]
    kinds = [Path(seed.source).stem for seed in found]
    assert Counter(kinds) == {"chat": 60, "code": 30, "maths": 10}
    for stop in (20, 50, 70):
        assert all(
            abs(count - share * stop) <= 1
            for count, share in zip(
                map(Counter(kinds[:stop]).get, ("chat", "code", "maths")), (0.6, 0.3, 0.1), strict=True
            )
        )
    assert [seed for seed in found if seed.source == made[1].source] == read_seeds(made[1:2])[0], "each in its order"


def test_self_talk_shows_the_model_both_sides():
    conversation = Conversation(Seed("i", "s", ({"role": "user", "content": "hi"},)), 2)
    assert conversation.pending == [{"role": "user", "content": "hi"}]
    conversation.add("hello", "stop")
    assert conversation.speaker == "user" and [m["content"] for m in conversation.pending] == ["hi", "hello"]
    (asked,) = seeds.ask_for_user_turn(conversation.pending)
    assert asked["content"] == f"{seeds.SELF_TALK_PROMPT}User: hi\nAssistant: hello\nUser:"
    conversation.add(" and how are you?\n", "stop")
    assert conversation.speaker == "assistant"
    assert [m["content"] for m in conversation.pending] == ["hi", "hello", "and how are you?"]
    conversation.add("fine", "length")
    conversation.add("  ", "stop")  # the user has nothing to say
    assert conversation.pending is None and conversation.failure is None
    assert conversation.finish_reasons == ["stop", "length"] and conversation.turn == 4
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_which_written_turns_are_kept():
    turns = seeds.WrittenTurns(["Who was Ada Lovelace?"])
    assert turns.rejection("Why is the sky blue?", "stop", True) is None
    assert turns.rejection("why is  the sky BLUE", "stop", True) == seeds.DUPLICATE
    assert turns.rejection("Who was Ada Lovelace", "stop", True) == seeds.DUPLICATE, "of an earlier command"
    assert turns.rejection("Why is the sky blue?", "stop", False) is None, "later in another conversation"
    assert turns.rejection("Tell me about the", "length", True) == seeds.CUT
    assert turns.rejection("go on", "stop", True) == seeds.SHORT
    assert turns.rejection("为什么天空是蓝色的？", "stop", True) is None, "no spaces, nine words"
    assert turns.rejection("你好", "stop", True) == seeds.SHORT
    assert turns.rejection("no no no no yes yes yes", "stop", True) == seeds.REPETITIVE
    begun = Conversation(seeds.written_seeds(3)[2], 1, turns)
    assert begun.seed.id == "target-000002" and begun.seed.turns == 1
    assert begun.speaker == "user" and begun.pending == []
    begun.add("why is the sky blue", "stop")
    assert begun.failure is not None and begun.failure.reason == seeds.DUPLICATE and begun.pending is None
    kept = Conversation(begun.seed, 0, turns)
    kept.add("Who painted this one?", "stop")
    assert kept.speaker == "assistant" and kept.pending == [{"role": "user", "content": "Who painted this one?"}]
    kept.add("I did.", "stop")
    assert kept.pending is None and kept.failure is None and len(kept.messages) == 2


def test_what_was_answered_before_a_turn_that_is_too_long_stands():
    asked = ({"role": "user", "content": "a"}, {"role": "system", "content": "s"}, {"role": "user", "content": "b"})
    conversation = Conversation(Seed("i", "s", asked), 0)
    conversation.add("x", "stop")
    conversation.fail(RequestFailed("too long"))
    assert conversation.failure is None and conversation.pending is None
    assert [m["content"] for m in conversation.messages] == ["a", "x"]
    for reason, retry in (
        ("empty answer", False),
        ("cut while thinking", False),
        ("chat template", False),
        ("http 500", True),
    ):
        talking = Conversation(Seed("i", "s", asked[:1]), 1)
        talking.add("x", "stop")
        talking.fail(RequestFailed(reason, retry=retry))  # of the user's turn
        assert talking.speaker == "user" and (talking.failure is None) == (not retry)
    for reason, heard in (("too long", 0), ("http 500", 1)):
        conversation = Conversation(Seed("i", "s", asked), 0)
        for _ in range(heard):
            conversation.add("x", "stop")
        conversation.fail(RequestFailed(reason))
        assert conversation.failure is not None and conversation.failure.reason == reason


# ---- shards


def test_shards_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "LINES", 3)
    made = Shards(tmp_path)
    for number in range(8):
        made.add(f"id{number}", [{"role": "user", "content": "ä\u2028"}], ["stop"], "s")
    made.fail("id9", "s", "timeout", "")
    assert [len((tmp_path / f"shard-0000{n}.jsonl").read_text().split("\n")) - 1 for n in range(3)] == [3, 3, 2]
    whole = (tmp_path / "shard-00002.jsonl").read_bytes()
    (tmp_path / "shard-00002.jsonl").write_bytes(whole + whole[:30])
    with (tmp_path / "failures.jsonl").open("a") as file:
        file.write('{"id": "torn')
    opened = Shards(tmp_path)
    assert set(opened.answers) == {f"id{n}" for n in range(8)} and opened.finish_reasons == {"stop": 8}
    assert (tmp_path / "shard-00002.jsonl").read_bytes() == whole
    assert set(opened.failures) == {"id9"}
    opened.add("id9", [], ["stop"], "s")
    assert not Shards(tmp_path).failures, "killed before it was tidied"
    opened.tidy()
    assert not (tmp_path / "failures.jsonl").exists() and set(lines_of(tmp_path)) == {f"id{n}" for n in range(8)} | {
        "id9"
    }
    (tmp_path / "shard-00001.jsonl").write_text('{"id": 3}\n')
    with pytest.raises(ValueError, match=r"shard-00001\.jsonl:1: damaged"):
        Shards(tmp_path)


# ---- the engine


def test_answers_are_the_targets_own_turn_by_turn(run, tiny_lm, greedy_texts, tmp_path):
    run("whole")
    target = load_target(str(tiny_lm))
    tokenizer = target.tokenizer
    found = {seed.id: seed for seed in read_seeds([Source(source=str(tmp_path / "seeds.jsonl"))])[0]}
    lines = {seed: json.loads(line) for seed, line in lines_of(tmp_path / "whole").items()}
    assert set(lines) == set(found) and len(found) == 20
    reasons = Counter()
    for seed, line in lines.items():
        assert line["source"] == str(tmp_path / "seeds.jsonl")
        messages, finish_reasons, token_ids = [], [], []
        for asked in found[seed].messages:
            messages.append(asked)
            if asked["role"] == "system":
                continue
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            (said,) = greedy_texts(target, [prompt], NEW)
            stop = next((place for place, token in enumerate(said) if token in target.stop_ids), None)
            token_ids.append({"prompt": prompt, "answer": said if stop is None else said[: stop + 1]})
            finish_reasons.append("length" if stop is None else "stop")
            messages.append({"role": "assistant", "content": tokenizer.decode(said[:stop], skip_special_tokens=True)})
        assert line["messages"] == messages and line["finish_reason"] == finish_reasons
        assert line["token_ids"] == token_ids, "as the engine had them"
        reasons.update(finish_reasons)
    assert {len(line["finish_reason"]) for line in lines.values()} == {1, 2, 3}
    manifest = json.loads((tmp_path / "whole/manifest.json").read_text())
    assert manifest["finish_reasons"] == reasons
    assert manifest["decides"]["target.fingerprint"] == target.fingerprint
    assert {"versions", "command", "recipe", "date"} <= set(manifest)
    assert counts_of(tmp_path / "whole") == {"prompts": 20, "done": 20, "failed": {}, "not_asked": 0, "ended_early": 0}
    older = manifest["decides"] | {"target.fingerprint": target.older_fingerprint}
    write_json(tmp_path / "whole/manifest.json", manifest | {"decides": older})
    before = lines_of(tmp_path / "whole")
    run("whole")
    assert lines_of(tmp_path / "whole") == before, "begun by an earlier version"
    assert json.loads((tmp_path / "whole/manifest.json").read_text())["decides"] == manifest["decides"]


def test_sampled_answers_do_not_depend_on_the_batch(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the source's name is part of the seeds' ids, and these of the random numbers

    def answers(name, *options):
        decoding = "mode: sample, temperature: 2.0, user_temperature: 0.3, user_tokens: 96"
        data = ["data.seeds.0.source=seeds.jsonl", f"data.template={tmp_path}/turns.jinja"]
        return lines_of(run(name, f"decoding={{{decoding}, max_new_tokens: {NEW}}}", "self_talk=1", *data, *options))

    alone = answers("one", "engine.batch_size=1")
    assert answers("many", "engine.batch_size=7") == alone
    assert answers("auto", "engine.batch_size=auto") == alone
    assert json.loads((tmp_path / "auto/manifest.json").read_text())["batch_size"] in range(1, 33)
    other = answers("other", "engine.batch_size=7", "run.seed=1")
    assert sum(alone[seed] != other[seed] for seed in alone) > 15
    roles = [[m["role"] for m in json.loads(line)["messages"] if m["role"] != "system"] for line in alone.values()]
    assert all(turns == ["user", "assistant"] * (len(turns) // 2) for turns in roles)
    turns = {seed.id: seed.turns for seed in read_seeds([Source(source="seeds.jsonl")])[0]}
    added = [len(roles) // 2 - turns[seed] for seed, roles in zip(alone, roles, strict=True)]
    # Of self-talk; a turn of the user that is cut is not used. An empty answer ends a conversation early.
    assert {0, 1} <= set(added) <= {-1, 0, 1}


def test_conversations_that_the_target_begins(run, tiny_lm, tmp_path):
    options = ["data.written=48", "decoding.user_tokens=32", f"data.template={tmp_path}/turns.jinja"]
    folder = run("begun", *options)
    conversations = [json.loads(line) for line in lines_of(folder).values()]
    begun = [c for c in conversations if c["source"] == "target"]
    failed = counts_of(folder)["failed"]
    assert begun and failed and set(failed) <= set(seeds.REJECTIONS) and len(begun) + sum(failed.values()) == 48
    # The user's turn is what the model writes where the template lets the user speak; the answer is plain greedy.
    target = load_target(str(tiny_lm))
    tokenizer = target.tokenizer
    prompt, closing = encode_user_turn([], tokenizer, TURNS)
    assert tokenizer.decode(prompt) == "class" and closing == "def"
    prompt, closing = encode_user_turn([{"role": "system", "content": "Be brief."}], tokenizer)
    assert tokenizer.decode(prompt) == "<|system|>\nBe brief.<|end|>\n<|user|>\n" and closing == "<|end|>"
    for conversation in begun:
        asked, answer = conversation["messages"]
        assert "def" not in asked["content"] and len(asked["content"]) > 5
        ids = encode_prompt([asked], tokenizer, TURNS)
        (found,) = SpeculativeDecoder(target, None).generate([ids], NEW)
        assert answer["content"] == answer_text(target, found.tokens)
    # A second command keeps them, and knows their turns; rejected turns are not written again.
    before = lines_of(folder)
    run("begun", *options)
    assert "to answer" not in run.out
    assert lines_of(folder) == before and counts_of(folder)["failed"] == failed
    assert Shards(folder).first_turns == [c["messages"][0]["content"] for c in begun]


def test_where_the_closing_is_a_stop_id_nothing_looks_for_it(run, tmp_path, monkeypatch):
    """The user's turns are those that a search for its text ends; another closing is searched for."""
    monkeypatch.chdir(tmp_path)
    asked, searched, serve = [], [], backends.serve_conversations

    def noted(decoder, conversations, next_request, *arguments, **named):
        def request(conversation):
            made = next_request(conversation)
            if made is None:
                return None
            asked.append((conversation.speaker == "user", *made.stop_strings))
            return replace(made, stop_strings=searched) if searched else made

        serve(decoder, conversations, request, *arguments, **named)

    monkeypatch.setattr(backends, "serve_conversations", noted)
    decoding = f"decoding={{mode: sample, temperature: 2.0, user_tokens: 96, max_new_tokens: {NEW}}}"
    options = [decoding, "self_talk=1", "data.seeds.0.source=seeds.jsonl"]
    found = lines_of(run("by-id", *options))
    assert {*asked} == {(True,), (False,)}
    turns = {seed.id: seed.turns for seed in read_seeds([Source(source="seeds.jsonl")])[0]}
    said = [
        sum(m["role"] == "user" for m in json.loads(line)["messages"]) - turns[seed] for seed, line in found.items()
    ]
    occurs(set(said) == {0, 1}, "turns of the user that end, and some that are cut")
    searched.append("<|end|>")
    assert lines_of(run("by-text", *options)) == found
    searched.clear()
    asked.clear()
    run("by-def", *options, f"data.template={tmp_path}/turns.jinja")
    assert {*asked} == {(True, "def"), (False,)}


def test_answers_end_where_the_template_ends_them(run, tiny_lm, tmp_path, monkeypatch):
    """Though the generation config has another end token: without a word of the user that the target made up."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_lm, tmp_path / "other-end")
    (tmp_path / "other-end/generation_config.json").write_text('{"eos_token_id": 0}')
    options = ["data.seeds.0.source=seeds.jsonl", "decoding={mode: sample, temperature: 2.0, max_new_tokens: 96}"]
    right = lines_of(run("right", *options))
    assert "warning" not in run.out
    reasons = [reason for line in right.values() for reason in json.loads(line)["finish_reason"]]
    occurs({*reasons} == {"stop", "length"}, "answers that end")
    assert lines_of(run("other", *options, "target.name=other-end")) == right
    assert (
        "warning: the chat template ends an answer with <|end|>, which is no eos_token_id of 'other-end' (those are "
        "[0]); texts end there as well" in run.out
    )
    template = TURNS.replace("{{ m['content'] }}\n{% else", "{{ m['content'] }}<|user|>\n{% else")
    (tmp_path / "turns.jinja").write_text(template)
    run("third", *options, "data.template=turns.jinja")
    assert "ends an answer with <|user|>, which is no eos_token_id" in run.out, "of the recipe's template"


def test_a_drafter_changes_nothing(run, tiny_lm, tmp_path, monkeypatch):
    """One that changes the target would, and is refused."""
    target, used = load_target(str(tiny_lm)), []
    heads = MedusaHeads.for_target(target, 2, 1, "shared")
    write_drafter(tmp_path / "drafter", "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
    write_json(tmp_path / "drafter/tree.json", {"paths": [[0], [1], [0, 0]]})

    def decoder(target, drafter):
        used.append(drafter)
        return SpeculativeDecoder(target, drafter)

    monkeypatch.setattr(backends, "SpeculativeDecoder", decoder)
    plain = lines_of(run("whole"))
    assert lines_of(run("drafted", f"engine.drafter={tmp_path / 'drafter'}")) == plain
    assert used[0] is None and used[1].num_nodes == 4
    add_lora(target, 2, 4.0, 0.0, ["q_proj"])
    write_adapter(tmp_path / "drafter", target)
    write_drafter(tmp_path / "drafter", "medusa", heads.config.to_dict(), heads.state_dict(), target, {})
    said = run.refused("refused", f"engine.drafter={tmp_path / 'drafter'}")
    assert "its adapter changes the target's answers" in said


def test_a_killed_run_goes_on(run, tmp_path, monkeypatch):
    whole, folder = lines_of(run("whole")), tmp_path / "killed"
    monkeypatch.setattr(shards, "LINES", 6)
    append = shards._append
    for kill in range(4):
        left = 2 + kill

        def torn(path, line):
            nonlocal left
            left -= 1
            if not left:
                with path.open("ab") as file:
                    file.write(json.dumps(line).encode()[:-6])
                raise Killed
            append(path, line)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(shards, "_append", torn)
            run("killed", f"engine.batch_size={3 + kill}")
    run("killed", "--resume")
    assert f"{20 - (1 + 2 + 3 + 4)} of 20 prompts to answer" in run.out
    assert lines_of(folder) == whole
    assert len(list(folder.glob("shard-*.jsonl"))) == 4
    assert counts_of(folder)["done"] == 20
    before = {path.name: path.read_bytes() for path in folder.glob("shard-*")}
    monkeypatch.setattr(backends, "load_drafter", None)  # nothing to ask: nothing to load
    run("killed")
    assert before == {path.name: path.read_bytes() for path in folder.glob("shard-*")}


# ---- several processes


def one_of_two(rank, _, store, recipe, name, overrides, deaths):
    """The command as one of two processes, which begin to decode at the same time. A process whose answer of the number
    in ``deaths`` is half written dies; what it prints goes to a file."""
    become(rank, store)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # which the launcher has
    folder, serve, append, appended = recipe.parent, backends.serve_conversations, shards._append, itertools.count()

    def together(*arguments, **named):
        (folder / f"{name}-ready-{rank}").touch()
        while len(list(folder.glob(f"{name}-ready-*"))) < 2:
            time.sleep(0.01)
        serve(*arguments, **named)

    def torn(path, line):
        if next(appended) == deaths[rank]:
            with path.open("ab") as file:
                file.write(json.dumps(line).encode()[:-6])
            os.kill(os.getpid(), signal.SIGKILL)
        append(path, line)

    backends.serve_conversations, shards._append, sys.argv = together, torn, ["", str(recipe), f"run.name={name}"]
    sys.argv += overrides
    with (folder / f"{name}-{rank}.txt").open("w") as file, redirect_stdout(file), redirect_stderr(file):
        run_command(distill.main)


@pytest.fixture
def two(recipe):
    """``two(name, *overrides)``: exit codes of the recipe's command in two processes, and what each printed."""

    def launch(name, *overrides, deaths=(None, None)):
        cpu.library()  # or both would compile it
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        codes = both(one_of_two, store.port, recipe, name, overrides, deaths)
        for path in recipe.parent.glob(f"{name}-ready-*"):
            path.unlink()
        return codes, [(recipe.parent / f"{name}-{rank}.txt").read_text() for rank in (0, 1)]

    return launch


@FORKED
def test_two_processes_answer_as_one(run, two, tmp_path):
    """Prompts without an answer too; each has shards of its own, and the first one speaks and writes the manifest."""
    rows = make_seeds(tmp_path / "seeds.jsonl", 30)
    long = [{"role": "user", "content": " ".join(WORDS * 8)}]
    rows += [{"messages": [*long, {"role": "user", "content": str(number)}]} for number in range(6)]
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["engine.max_length=90", "engine.batch_size=3"]
    whole, folder = run("whole", *options), tmp_path / "two"
    codes, (said, other) = two("two", *options)
    assert codes == [0, 0] and other == "" and "36 of 36 prompts to answer, by engine in 2 processes" in said
    assert "done: 30 of 36 prompts are answered" in said and "too long 6 times" in said
    assert lines_of(folder) == lines_of(whole) and counts_of(folder) == counts_of(whole)
    sizes = [len(path.read_text().splitlines()) for path in sorted(folder.glob("shard-*"))]
    assert len(sizes) == 2 and min(sizes) > 3, "one of them did next to nothing"
    made, alone = (json.loads((path / "manifest.json").read_text()) for path in (folder, whole))
    assert made["decides"] == alone["decides"] and made["finish_reasons"] == alone["finish_reasons"]
    assert not list(folder.glob("failures-*"))


@pytest.mark.whole_runs
@FORKED
def test_killed_processes_go_on_as_one_and_one_as_two(run, two, tmp_path):
    whole, folder = lines_of(run("whole")), tmp_path / "killed"
    assert two("killed", deaths=(2, 5))[0] == [-signal.SIGKILL] * 2
    run.killed((shards, "_append", 3), "killed")
    assert len(lines_of(folder)) == 2 + 5 + 3
    assert two("killed", deaths=(0, 1))[0] == [-signal.SIGKILL] * 2
    run("killed")
    assert "9 of 20 prompts to answer" in run.out
    assert lines_of(folder) == whole and counts_of(folder)["done"] == 20
    assert two("killed", "--restart")[0] == [0, 0] and lines_of(folder) == whole


@FORKED
def test_two_processes_begin_no_conversation_twice(two, tmp_path, monkeypatch):
    """A first message that the other process has written is not used."""
    sampling_of = backends.sampling_of

    def few_seeds(recipe, conversation):
        own = sampling_of(recipe, conversation)
        return replace(own, seed=own.seed % 12) if conversation.speaker == "user" else own

    monkeypatch.setattr(backends, "sampling_of", few_seeds)
    options = ["data.seeds.0.limit=2", "decoding.user_tokens=32", f"data.template={tmp_path}/turns.jinja"]
    codes, _ = two("begun", "data.written=36", *options)
    begun = [line for line in map(json.loads, lines_of(tmp_path / "begun").values()) if line["source"] == "target"]
    first = [seeds.WrittenTurns._key(line["messages"][0]["content"]) for line in begun]
    assert codes == [0, 0] and first and len(set(first)) == len(first)
    occurs(counts_of(tmp_path / "begun")["failed"].get(seeds.DUPLICATE, 0) > 0)


@FORKED
def test_a_process_that_fails_ends_the_launch(two, tmp_path, monkeypatch):
    """By one line, which names it; the answers are kept."""
    answer = backends.answer_text

    def fails(target, tokens):
        if os.environ.get("RANK") == "1" and next(answered) == 2:
            raise FloatingPointError("what is wrong")
        return answer(target, tokens)

    answered = itertools.count()
    monkeypatch.setattr(backends, "answer_text", fails)
    codes, (first, second) = two("two")
    assert codes == [1, 1] and "error" not in first and second == "error: rank 1 of 2: what is wrong\n"
    assert len(lines_of(tmp_path / "two")) >= 10, "the other one answered what was left"


def test_shards_of_several_processes(tmp_path, monkeypatch):
    """They fill those that are not full before new ones, and none writes into another's."""
    monkeypatch.setattr(shards, "LINES", 3)

    def write(processes, *counts):
        opened = [Shards(tmp_path, rank, processes) for rank in range(processes)]
        for rank, count in enumerate(counts):
            for number in range(count):
                opened[rank].add(f"{processes}.{rank}.{number}", [], ["stop"], "s")
            opened[rank].fail(f"failed.{rank}", "s", "timeout", f"{processes}")
        return [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("shard-*"))]

    assert write(1, 4) == [3, 1]
    assert write(2, 3, 4) == [3, 3, 1, 3, 1], "the first process: its own, and 2; the other: 3 and 5"
    assert {path.name for path in tmp_path.glob("failures*")} == {"failures.jsonl", "failures-1.jsonl"}
    opened = Shards(tmp_path)
    assert len(opened.answers) == 11 and set(opened.failures) == {"failed.0", "failed.1"}
    opened.tidy()
    assert {path.name for path in tmp_path.glob("failures*")} == {"failures.jsonl"}
    assert set(Shards(tmp_path).failures) == {"failed.0", "failed.1"}
    shards.remove_own(tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_process_asks_a_server_or_does_a_dry_run(ask, server, tmp_path, monkeypatch):
    for rank in (1, 0):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        ask("whole", "--dry-run")
        assert bool(ask.out) == (rank == 0) and not (tmp_path / "whole").exists()
        ask("whole")
        assert bool(server.requests) == (rank == 0)
    assert "one process asks the servers; the other 1 end" in ask.out and counts_of(tmp_path / "whole")["done"] == 20


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    assert ranks.own_device() is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert ranks.own_device() is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ranks.own_device() == "cuda:1"


def test_counts_of_all_processes():
    began = {"counts": {"done": 3, "failed": {"timeout": 1}}, "finish_reasons": {"stop": 3}}
    one = {"counts": {"done": 5, "failed": {}}, "finish_reasons": {"stop": 4, "length": 1}}
    two = {"counts": {"done": 4, "failed": {"timeout": 1, "too long": 2}}, "finish_reasons": {"stop": 4}}
    assert distill.summed(began, [one]) is one
    assert distill.summed(began, [one, two, began]) == {
        "counts": {"done": 6, "failed": {"timeout": 0, "too long": 2}},
        "finish_reasons": {"stop": 5, "length": 1},
    }


@pytest.mark.whole_runs
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_launched(run, recipe, launcher):
    """By the launcher, which ends one process where the other is killed."""
    words = {
        "accelerate": ["accelerate", "launch", "--quiet", "--multi_gpu", "--num_processes", "2", "--main_process_port"],
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port"],
    }[launcher]
    script = [str(free_port()), "train/distill.py", recipe, f"run.name={launcher}"]
    command = [Path(sys.executable).parent / words[0], *words[1:], *script]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    make_seeds(recipe.parent / "seeds.jsonl", 120)
    folder, whole = recipe.parent / launcher, lines_of(run("whole"))
    launch = partial(subprocess.Popen, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = launch(command)
    while not list(folder.glob("shard-*")):
        assert process.poll() is None, process.communicate()[0].decode()[-3000:]
        time.sleep(0.01)
    if launcher == "accelerate":
        workers = [one for one in psutil.Process(process.pid).children() if "train/distill.py" in one.cmdline()]
        workers[1].kill()  # the other one waits for it, however much it has answered
    out = process.communicate()[0].decode()
    if launcher == "accelerate":
        assert process.returncode != 0
        process = launch(command)
        out = process.communicate()[0].decode()
    assert process.returncode == 0 and "done: 120 of 120" in out, out[-3000:]
    assert lines_of(folder) == whole


def test_too_long_for_the_target(run, tmp_path):
    """A first turn that is too long fails; a later one ends its conversation."""
    long = " ".join(WORDS * 8)
    rows = [["short"], [long], ["short", long, "short"]]
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in rows))
    counts = counts_of(run("whole", "engine.max_length=80"))
    assert "too long 1 times" in run.out
    assert (counts["done"], counts["failed"], counts["ended_early"]) == (2, {"too long": 1}, 1)
    (tmp_path / "seeds.jsonl").write_text(json.dumps({"turns": [long]}) + "\n")
    said = run.refused("none", "engine.max_length=80", code=1)
    assert said.startswith("error: no answers: 0 of 1 prompts are answered")


def test_another_recipe_is_refused(run):
    folder = run("whole", "data.seeds.0.limit=3")
    (folder / "mine.txt").write_text("a file of somebody else's")
    before = lines_of(folder)
    assert run.refused("whole", "data.seeds.0.limit=3", f"decoding.max_new_tokens={NEW - 1}") == (
        f"error: {folder}: its answers belong to another recipe (decoding.max_new_tokens: {NEW} → {NEW - 1}); "
        "set run.name, or pass --restart to begin anew and delete them\n"
    )
    asks = run.refused("whole", "data.seeds.0.limit=3", "decoding.logprobs=0")
    assert lines_of(folder) == before and "(decoding.logprobs: null → 0)" in asks
    run("whole", "data.seeds.0.limit=3", "engine.batch_size=2")  # which is only how fast
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["decides"] |= {
        "target.name": "elsewhere",
        "target.attention": "flex_attention",
    }  # as earlier versions wrote them
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run("whole", "data.seeds.0.limit=3", "target.attention=sdpa")
    assert lines_of(folder) == before, "the same weights"
    run("whole", "decoding.max_new_tokens=3", "--restart")
    assert len(lines_of(folder)) == 20 and (folder / "mine.txt").exists()
    assert "exclude each other" in run.refused("whole", "--restart", "--resume")


def test_dry_run_writes_nothing(run):
    folder = run("whole", "--dry-run", "self_talk=2")
    turns = sum(1 + n % 3 for n in range(20))
    tokens = (turns + 2 * 20) * NEW + 2 * 20 * 128  # answers, and messages of the user
    assert f"20 prompts with {turns} turns" in run.out and f"{tokens:,} tokens in all" in run.out
    assert "<|system|>\nBe brief.<|end|>\n<|user|>\n" in run.out and run.out.rstrip().endswith("<|assistant|>")
    run("whole", "--dry-run", "backend=endpoint", "endpoint={url: 'http://localhost:1', model: m}")
    assert '"content": "Be brief."' in run.out and not folder.exists()
    asks = "decoding.logprobs=1", "backend=endpoint", "endpoint={url: 'http://localhost:1', model: m}"
    assert "decoding.logprobs is for backend engine; leave it out" in run.refused("whole", "--dry-run", *asks)


WRONG = {
    "data.seeds=[{source: stdlib}]": "seed source 'stdlib' needs conversations: set form: chat",
    "backend=endpoint": "backend endpoint needs the section 'endpoint'; add it",
    "target=null": "backend engine needs the section 'target'; add it",
    "engine.max_length=12": "decoding.max_new_tokens=12 leaves no room for a prompt within engine.max_length=12",
    "decoding.logprobs=21": "'decoding.logprobs': input should be less than or equal to 20",
    "endpoint={url: 'http://key@x/v1', model: m}": "'endpoint.url': a server's address is http",
    "data.template=nowhere.jinja": "neither a Jinja template nor a file",
}


@pytest.mark.parametrize("override, message", WRONG.items())
def test_bad_input_is_one_line(run, override, message):
    assert message in run.refused("whole", override)


@pytest.mark.parametrize("override", ["engine.drafter=/nowhere", "engine.drafter={here}"])
def test_the_drafter_is_checked_before_the_target_is_loaded(run, tmp_path, monkeypatch, override):
    def loaded(*arguments, **options):
        raise AssertionError("the target is loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    with pytest.raises(AssertionError, match="the target is loaded"):
        run("whole", "--restart")
    run.refused("other", override.format(here=tmp_path))


def test_a_template_that_refuses(run):
    refuses = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[-1].content }}"
    )
    counts = counts_of(run("whole", f"data.template={json.dumps(refuses)}"))
    assert "chat template 4 times" in run.out and counts["failed"] == {"chat template": 4}


def test_an_empty_answer_is_none(run, monkeypatch):
    """Of the engine, too: it would be trained on as an end token alone."""
    texts = iter([" \n", "", *["x"] * 99])
    monkeypatch.setattr(backends, "answer_text", lambda *_: next(texts))
    counts = counts_of(run("whole", "data.seeds.0.limit=4"))
    assert (counts["done"], counts["failed"]) == (2, {"empty answer": 2})


@pytest.mark.parametrize("opened", [True, False])
def test_an_answer_that_ends_inside_its_thinking(run, monkeypatch, opened):
    """It is none, whether the answer or the prompt begins the thinking; one that ended its thinking is cut as any."""
    texts = iter(["<think> a", "<think> a </think> b", *["x"] * 99])
    monkeypatch.setattr(backends, "answer_text", lambda *_: next(texts).removeprefix("" if opened else "<think>"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + "<think>" * (not opened)
    options = ["data.seeds.0.limit=3", "decoding.max_new_tokens=2", f"data.template={json.dumps(template)}"]
    counts = counts_of(run("whole", *options))
    wanted = 1 if opened else 2  # of an opened one, "x" is thinking too
    assert counts["failed"] == {"cut while thinking": wanted} and counts["done"] == 3 - wanted
    assert "a larger decoding.max_new_tokens" in run.out


def silent(messages):
    """A conversation whose answers are characters cut in the middle, which fit any token ids."""
    return [m | {"content": "\ufffd"} if m["role"] == "assistant" else m for m in messages]


def test_shards_are_training_data(run, run_main, tiny_lm, tmp_path):
    folder = run("whole", "decoding.logprobs=1")
    source = {"source": str(folder / "shard-00000.jsonl")}
    data = Data.model_validate({"train": [source], "validation": [source], "max_length": 250})
    target = load_target(str(tiny_lm))
    tokenizer = target.tokenizer
    sampled = tokenized(data.train[0], data, tokenizer)
    lines = [json.loads(line) for line in lines_of(folder).values()]
    for one in (one for line in lines for one in line["token_ids"]):
        found, prompt, answer = one["logprobs"], one["prompt"], one["answer"]
        logits = target.logits(target.hidden(torch.tensor([prompt + answer[:-1]])))[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
        assert found["mode"] == "raw_logprobs" and found["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert found["top_ids"] == [[token] for token in answer], "greedy answers"
    ids = [token for line in lines for one in line["token_ids"] for token in one["answer"]]
    assert sampled.tokens[sampled.supervised].tolist() == ids, "the tokens that were sampled"
    for line in lines:
        del line["token_ids"]  # as earlier versions wrote them: the answers' texts are encoded again
    Path(source["source"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = tokenized(data.train[0], data, tokenizer)
    answers = ""
    for line in lines:
        said = [m["content"] for m in line["messages"] if m["role"] == "assistant"]
        for answer, reason in zip(said, line["finish_reason"], strict=True):
            answers += answer + ("" if reason == "length" else "<|end|>")  # what was cut did not end
    assert tokenizer.decode(samples.tokens[samples.supervised].tolist()) == answers
    stage = {"steps": 1, "batch": {"sequences": 2}, "optim": {"lr": 1e-3}}
    drafter = write_recipe(tmp_path, tiny_lm, {"num_draft_heads": 2}, [stage], data=data.model_dump(mode="json"))
    train = Runs(medusa.main, drafter, run_main)
    train("drafter")
    wrong = lines[0] | {"token_ids": [{"prompt": [1], "answer": [5, 10**6]}] * 3}
    wrong["token_ids"] = wrong["token_ids"][: len(wrong["finish_reason"])]
    Path(source["source"]).write_text(json.dumps(wrong | {"messages": silent(wrong["messages"])}) + "\n")
    assert "token id 1000000 is outside the target's vocabulary of 300" in train.refused("wrong")


WRITING = ["smollm2-distill", "qwen2.5-coder-0.5b-distill", "qwen2.5-coder-1.5b-distill"]  # the target begins some


@pytest.mark.parametrize(
    "name", ["llama3-70b-distill", "tiny-distill", "vicuna33b-distill", "zephyr7b-distill", *WRITING]
)
def test_shipped_recipes_by_their_own_commands(tmp_path, run_main, monkeypatch, name):
    command = (ROOT / f"recipes/{name}.yaml").read_text().splitlines()[0].split()[1:]
    assert command == ["python", "train/distill.py", f"recipes/{name}.yaml"]
    options = ["--tiny", f"run.output_dir={tmp_path}"]
    monkeypatch.chdir(ROOT)
    code, _, err = run_main(distill.main, command[2], *options)
    assert code == 0, err
    counts, written = counts_of(tmp_path / f"{name}-tiny"), 2 * (name in WRITING)
    assert counts["prompts"] == 8 + written and counts["done"] >= 8


# ---- the endpoint


class Answering(BaseHTTPRequestHandler):
    """Answers a chat with what depends on it alone, after as many failures as the server's ``plan`` has for it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked, server = json.loads(body), self.server
        with server.lock:
            server.requests.append((self.path, asked, dict(self.headers), time.monotonic()))
            what = server.plan(asked)
        if what == "fine":
            said = f"{len(asked['messages'])}: {asked['messages'][-1]['content'][::-1]} \ud83d"
            choice = {"message": {"content": said}, "finish_reason": "stop"}
            what = (200, json.dumps({"choices": [choice]}).encode())
        if isinstance(what, tuple):
            self.answer(*what)
            return
        self.close_connection = True  # "drop": at once
        if what == "hang":
            server.released.wait(20)
        elif what == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"mess')
            self.wfile.flush()

    def answer(self, code, body, headers=()):
        self.send_response(code)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that has gone away."""


def started():
    made = Quiet(("127.0.0.1", 0), Answering)
    made.lock, made.released, made.requests, made.plan = threading.Lock(), threading.Event(), [], lambda asked: "fine"
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.released.set()
    made.shutdown()
    made.server_close()


server = pytest.fixture(started, name="server")
second = pytest.fixture(started, name="second")  # another one of the same model


@pytest.fixture
def ask(recipe, run, server):
    """ask(name, *overrides): a run against the server."""
    content = yaml.safe_load(recipe.read_text()) | {"backend": "endpoint", "target": None}
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    content["endpoint"] = {"url": url, "model": "m", "concurrency": 8, "retries": 2, "timeout": 1.0, "backoff": 0.01}
    recipe.write_text(yaml.safe_dump(content))
    return run


FAULTS = {
    "hang": "timeout",
    (429, b"slow down", (("Retry-After", "0"),)): "http 429",
    (500, b"oops"): "http 500",
    "cut": "connection",
    "drop": "connection",
    (200, b'{"choices": [{"message"'): "malformed answer",
    (200, b'{"error": "overloaded"}'): "malformed answer",
}


@pytest.mark.whole_runs
def test_an_unreliable_server(ask, server, tmp_path, monkeypatch):
    make_seeds(tmp_path / "seeds.jsonl", 60)
    given, times = Counter(), Counter()

    def plan(asked):
        """By the chat and how often it was asked, whatever the threads' order."""
        chat = json.dumps(asked["messages"])
        times[chat] += 1
        chance = random.Random(f"{chat}{times[chat]}")
        fault = chance.choice(list(FAULTS)) if chance.random() < 0.6 else "fine"
        given[fault] += 1
        return fault

    server.plan = plan
    folder = ask("whole")
    counts = counts_of(folder)
    occurs(all(given[fault] for fault in FAULTS))
    assert counts["not_asked"] == 0 and 5 < counts["done"] < 55
    assert set(counts["failed"]) <= set(FAULTS.values()) and "failed: " in ask.out
    occurs(set(counts["failed"]) == set(FAULTS.values()))
    failed = {json.loads(line)["id"] for line in (folder / "failures.jsonl").read_text().splitlines()}
    assert failed.isdisjoint(lines_of(folder)) and len(failed) + counts["done"] == 60
    first = lines_of(folder)

    server.plan, server.requests = lambda asked: "fine", []
    ask("whole", "endpoint.timeout=20.0")
    assert counts_of(folder) == {"prompts": 60, "done": 60, "failed": {}, "not_asked": 0, "ended_early": 0}
    assert not (folder / "failures.jsonl").exists()
    lines = lines_of(folder)
    assert {seed: lines[seed] for seed in first} == first, "what was answered is not asked again"
    by_id = {seed.id: seed for seed in read_seeds([Source(source=str(tmp_path / "seeds.jsonl"))])[0]}
    assert len(server.requests) == sum(by_id[seed].turns for seed in failed)
    for seed, line in lines.items():
        messages = []
        for message in by_id[seed].messages:
            messages.append(message)
            if message["role"] == "user":
                said = f"{len(messages)}: {message['content'][::-1]} ?"  # half a surrogate pair is no text
                messages.append({"role": "assistant", "content": said})
        assert json.loads(line)["messages"] == messages
    path, asked, _, _ = server.requests[0]
    assert path == "/v1/chat/completions"
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("m", NEW, 0)


NO_EFFECT = {
    **{"top_p": 1, "top_k": -1, "min_p": 0},
    **{"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
}
STATED = NO_EFFECT | {"return_token_ids": True}


@pytest.mark.parametrize(
    "options, other",
    [
        ([], {}),
        (["decoding.top_k=20"], {}),
        (["decoding.mode=sample", "decoding.top_p=0.9"], {"top_p": 0.9}),
        (["decoding={mode: sample, top_p: 0.95, top_k: 20}"], {"top_p": 0.95, "top_k": 20}),
    ],
)
def test_every_sampling_parameter_is_stated(ask, server, options, other):
    """Or servers take them from the model's generation_config.json, at temperature 0 too."""
    folder = ask("whole", "data.seeds.0.limit=2", *options)
    for _, asked, _, _ in server.requests:
        assert {name: asked[name] for name in NO_EFFECT} == NO_EFFECT | other
    assert "not_sent" not in json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize(
    "refused, answer, left_out",
    [
        (["top_k"], (400, b"x" * 500 + b" Unrecognized request argument supplied: top_k"), ["top_k"]),
        (["min_p"], (403, b'{"loc": ["body", "min_p"], "msg": "Extra inputs are not permitted"}'), ["min_p"]),
        (["min_p", "presence_penalty"], None, ["min_p", "presence_penalty"]),  # the first that is there, then the other
        (["top_k"], (400, b"invalid request"), ["min_p", "repetition_penalty", "return_token_ids", "top_k"]),
        (["min_p"], (422, b""), ["min_p", "repetition_penalty", "return_token_ids", "top_k"]),
        (["return_token_ids"], (400, b"unknown field: return_token_ids"), ["return_token_ids"]),
    ],
)
def test_what_a_server_refuses_is_left_out(ask, server, tmp_path, refused, answer, left_out):
    def plan(asked):
        there = [name for name in refused if name in asked]
        return (answer or (400, f"no {there[0]}".encode())) if there else "fine"

    server.plan = plan
    folder = ask("whole", "endpoint.concurrency=1", "data.seeds.0.limit=5")
    said = f"warning: http://127.0.0.1:{server.server_port}/v1/ refuses {', '.join(left_out)}: not sent any more"
    assert ask.out.count("warning: ") == 1 and said in ask.out
    assert counts_of(folder)["done"] == 5
    turns = sum(1 + n % 3 for n in range(5))
    assert len(server.requests) == turns + (len(refused) if answer is None else 1), "it is not asked with them again"
    assert STATED.keys() - server.requests[-1][1].keys() == {*left_out}
    server.plan = lambda asked: "fine"
    make_seeds(tmp_path / "seeds.jsonl", 6)
    ask("whole", "data.seeds.0.limit=5")
    assert json.loads((folder / "manifest.json").read_text())["not_sent"] == left_out, "by the first command"


def test_what_a_server_takes_is_not_left_out(ask, server):
    """A refusal of one prompt, after others were answered, costs no further request."""
    refused = []

    def plan(asked):
        refused[:] = refused or [asked["messages"][-1]] * (len(server.requests) > 1)
        return (400, b"bad request") if asked["messages"][-1] in refused else "fine"

    server.plan = plan
    folder = ask("one-refused", "endpoint.concurrency=1", "data.seeds.0.limit=5")
    assert counts_of(folder)["failed"] == {"http 400": 1} and "warning" not in ask.out
    assert [asked["messages"][-1] for asked in (request[1] for request in server.requests)].count(refused[0]) == 1


def told(message, finish_reason="stop"):
    return 200, json.dumps({"choices": [{"message": message, "finish_reason": finish_reason}]}).encode()


@pytest.mark.parametrize(
    "message, finish_reason, reason",
    [
        ({"content": None, "reasoning_content": "Let me see"}, "length", "cut while thinking"),
        ({"content": "", "reasoning": "Let me see"}, "length", "cut while thinking"),
        ({"content": None, "reasoning_content": "Let me see"}, "stop", "empty answer"),
        ({"content": None}, "stop", "empty answer"),
        ({"content": " \n"}, "stop", "empty answer"),
        ({"content": "", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls", "tool calls"),
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "stop", "parts other than text"),
        ({"content": "It is a"}, "content_filter", "broken off"),
    ],
)
def test_what_is_no_answer_is_asked_once(ask, server, tmp_path, message, finish_reason, reason):
    server.plan = lambda asked: told(message, finish_reason)
    said = ask.refused("whole", "data.seeds.0.limit=1", code=1)
    assert len(server.requests) == 1 and f"{reason} 1 times" in said and not lines_of(tmp_path / "whole")
    assert ("a larger decoding.max_new_tokens" in said) == ("enable_thinking" in said) == (reason[:3] == "cut")
    (line,) = (tmp_path / "whole/failures.jsonl").read_text().splitlines()
    assert ("Let me see" in line) == any("reasoning" in name for name in message)


def test_an_answer_that_the_server_ended_is_asked_for_again(ask, server):
    answers = iter([told({"content": "It"}, "abort"), told({"content": "It is"}, "error")])
    server.plan = lambda asked: next(answers, "fine")
    folder = ask("whole", "data.seeds.0.limit=1")
    assert len(server.requests) == 3 and counts_of(folder)["done"] == 1


def test_reasoning_is_kept_beside_the_answer(ask, server, tmp_path):
    """Not in what is asked next: servers' templates drop it, or they refuse it."""
    (tmp_path / "seeds.jsonl").write_text(json.dumps({"turns": ["a", "b"]}) + "\n")
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    answers = iter([{"content": "42", "reasoning_content": "6 × 7"}, {"content": parts, "tool_calls": None}])
    server.plan = lambda asked: told(next(answers))
    (line,) = lines_of(ask("whole")).values()
    assert [m for m in json.loads(line)["messages"] if m["role"] == "assistant"] == [
        {"role": "assistant", "content": "42", "reasoning_content": "6 × 7"},
        {"role": "assistant", "content": "42"},
    ]
    assert [m.keys() for m in server.requests[1][1]["messages"]] == [{"role", "content"}] * 3


def with_ids(asked, said="fine"):
    """vLLM's answer to a request for token ids: those of the prompt, and of what was written."""
    turns = len(asked["messages"])
    choice = {"message": {"content": said}, "finish_reason": "stop", "token_ids": [turns, 7, 2]}
    return 200, json.dumps({"choices": [choice], "prompt_token_ids": list(range(1, turns + 2))}).encode()


def test_a_servers_token_ids_are_kept(ask, server, tmp_path):
    """Of all answers of a conversation, or of none."""
    (tmp_path / "seeds.jsonl").write_text(
        json.dumps({"turns": ["a", "b"]}) + "\n" + json.dumps({"turns": ["c"]}) + "\n"
    )
    wrong = [{"token_ids": None}, {"token_ids": ["1"]}, {"token_ids": []}, {"token_ids": [True]}]

    def plan(asked):
        code, body = with_ids(asked)
        if asked["messages"][0]["content"] == "c":
            body = json.loads(body)
            body["choices"][0] |= wrong.pop()
            return code, json.dumps(body).encode()
        return code, body

    server.plan = plan
    for run in range(4):
        lines = [json.loads(line) for line in lines_of(ask(f"run{run}")).values()]
        found = {line["messages"][0]["content"]: line.get("token_ids") for line in lines}
        assert found == {
            "a": [{"prompt": [1, 2], "answer": [1, 7, 2]}, {"prompt": [1, 2, 3, 4], "answer": [3, 7, 2]}],
            "c": None,
        }
    assert all(asked["return_token_ids"] is True for _, asked, _, _ in server.requests)


def urls_of(*servers):
    return "endpoint.url=" + json.dumps([f"http://127.0.0.1:{one.server_port}/v1" for one in servers])


def test_several_servers_share_the_conversations(ask, server, second, tmp_path):
    """Each conversation stays with one of them, whose cache has its beginning."""
    make_seeds(tmp_path / "seeds.jsonl", 60)
    alone = lines_of(ask("alone"))
    server.requests = []
    assert lines_of(ask("both", urls_of(server, second))) == alone
    asked = [[request[1]["messages"] for request in one.requests] for one in (server, second)]
    assert sum(map(len, asked)) == sum(1 + n % 3 for n in range(60)) and min(map(len, asked)) > 10
    for chats in asked:
        assert all(chat[:-2] in chats for chat in chats if sum(m["role"] == "user" for m in chat) > 1)
    ask("alone", urls_of(second))
    assert "60 of 60 prompts are answered" in ask.out, "the servers' addresses may change"
    assert "the list is empty" in ask.refused("none", "endpoint.url=[]")


def test_a_server_that_stops_answering_loses_its_conversations_to_the_others(ask, server, second, tmp_path):
    make_seeds(tmp_path / "seeds.jsonl", 40)
    answers = iter(["fine"] * 5)
    second.plan = lambda asked: next(answers, (500, b"gone"))
    folder = ask("whole", urls_of(server, second), "endpoint.retries=1")
    assert counts_of(folder)["done"] == 40 and counts_of(folder)["failed"] == {}
    assert len(second.requests) > 5
    said = ask.refused("down", 'endpoint.url=["http://127.0.0.1:9/v1"]', code=1)
    assert "no server answers at 127.0.0.1:9" in said
    server.plan = second.plan = lambda asked: (400, b"the maximum context length is 9")
    server.requests, second.requests = [], []
    ask.refused("long", urls_of(server, second), "data.seeds.0.limit=1", code=1)
    assert len(server.requests) + len(second.requests) == 1, "what no server can answer is asked once"


def test_nobody_answers_what_is_left(ask, server, tmp_path):
    """Done before or not: a run that gets no answer fails, also if one prompt has only itself to blame."""
    plan = {"1": "fine", "2": (400, b"context length"), "3": (500, b"gone")}
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps({"prompt": name}) + "\n" for name in plan))
    server.plan = lambda asked: plan[asked["messages"][0]["content"]]
    ask("whole", "endpoint.retries=0")
    said = ask.refused("whole", "endpoint.retries=0", code=1)
    assert said.startswith("error: no more answers: 1 of 3")
    assert "http 500 1 times" in said and "too long 1 times" in said
    plan["3"] = "fine"
    ask("whole")
    ask("whole")
    assert "2 of 3 prompts are answered" in ask.out and "too long 1 times" in ask.out
    plan["2"] = told({"content": " "})
    for _ in range(2):
        ask("whole")  # another run gets no other answer
        assert "2 of 3 prompts are answered" in ask.out and "empty answer 1 times" in ask.out


def test_tiny_asks_no_server(ask, server, tmp_path):
    ask("whole", "--tiny")
    assert counts_of(tmp_path / "whole-tiny")["done"] == 8 and not server.requests


def test_a_servers_template_gets_its_arguments(ask, server):
    """Only where there are some, and they cannot change within a folder."""
    ask("plain")
    assert all("chat_template_kwargs" not in asked for _, asked, _, _ in server.requests)
    server.requests = []
    ask("off", "data.template_arguments={enable_thinking: false}")
    assert server.requests
    assert all(asked["chat_template_kwargs"] == {"enable_thinking": False} for _, asked, _, _ in server.requests)
    assert "template_arguments" in ask.refused("off", "data.template_arguments={enable_thinking: true}")


def test_sampled_requests_carry_their_own_seeds(ask, server):
    def seeds_of(*options):
        server.requests = []
        ask(*options, "decoding.mode=sample", "decoding.top_p=0.9")
        assert all((a["temperature"], a["top_p"]) == (0.3, 0.9) for _, a, _, _ in server.requests)
        return {json.dumps(a["messages"]): a["seed"] for _, a, _, _ in server.requests}

    one = seeds_of("a", "endpoint.concurrency=1")
    assert seeds_of("b") == one and len(set(one.values())) == len(one)
    assert seeds_of("c", "run.seed=1") != one


@pytest.mark.parametrize(
    "what, requests, reason",
    [
        ((404, b"no model m"), 1, "http 404"),
        ((401, b"bad key"), 1, "http 401"),
        ((408, b""), 3, "http 408"),
        ((503, b""), 3, "http 503"),
        ((307, b"", (("Location", "/else"),)), 1, "http 307"),
        ((302, b"", (("Location", "/else"),)), 1, "http 302"),
        ((400, b"the maximum context length is 9"), 1, "too long"),
        ((400, b"request (12 tokens) exceeds the available context size (9 tokens)"), 1, "too long"),  # llama.cpp
        ((400, b"bad temperature"), 2, "http 400"),  # the second time with the parameters of OpenAI's protocol alone
    ],
)
def test_which_failures_are_retried(ask, server, tmp_path, what, requests, reason):
    server.plan = lambda asked: what
    said = ask.refused("whole", "data.seeds.0.limit=1", code=1)
    assert len(server.requests) == requests and said.startswith("error: no answers: 0 of 1 prompts are answered")
    assert f"{reason} 1 times" in said and what[1].decode() in said
    assert counts_of(tmp_path / "whole")["failed"] == {reason: 1}


def test_a_limit_to_the_likeliest_tokens(ask, tmp_path):
    """It decides about the answers; folders of earlier versions, which had none, go on without."""
    folder = ask("whole", "decoding.mode=sample")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "decoding.top_k" not in manifest["decides"], "as earlier versions wrote it"
    ask("whole", "decoding.mode=sample")
    said = ask.refused("whole", "decoding.mode=sample", "decoding.top_k=20")
    assert "its answers belong to another recipe (decoding.top_k: null → 20)" in said


def test_retry_after_is_waited_for(ask, server):
    answers = iter([(429, b"", (("Retry-After", "0.4"),)), "fine"])
    server.plan = lambda asked: next(answers)
    ask("whole", "data.seeds.0.limit=1")
    first, second = (moment for *_, moment in server.requests)
    assert 0.4 <= second - first < 2
    assert endpoint._seconds("3") == 3 and endpoint._seconds("-3") == 0 and endpoint._seconds("soon") is None
    assert endpoint._seconds("Fri, 01 Jan 2100 00:00:00 GMT") > 1e6
    assert endpoint._seconds("Fri, 01 Jan 2010 00:00:00 GMT") == 0


def test_backoff_doubles(monkeypatch):
    pauses = []
    asked = endpoint.Server("http://127.0.0.1:9", "m", 1.0, 4, 2.0)
    monkeypatch.setattr(asked.stopped, "wait", pauses.append)
    with pytest.raises(RequestFailed) as error:
        asked.answer([])
    assert error.value.reason == "connection" and len(pauses) == 4
    assert all(0.5 * 2 * 2**n <= pause <= 1.5 * 2 * 2**n for n, pause in enumerate(pauses))
    assert pauses != [2 * 2**n for n in range(4)], "with jitter"


def test_a_server_that_is_down(ask, tmp_path):
    """It is said before anything is asked; what was not asked is no failure."""
    said = ask.refused("whole", "endpoint.url='http://127.0.0.1:9/v1'", code=1)
    assert said.startswith(
        "error: endpoint http://127.0.0.1:9/v1: no server answers at 127.0.0.1:9 (Connection refused); "
    )
    counts = counts_of(tmp_path / "whole")
    assert counts["failed"] == {} and counts["not_asked"] == 20
    assert counts_of(ask("whole"))["done"] == 20, "another address of the same model is no other recipe"


def test_a_server_that_fails_during_the_run(ask, server, tmp_path):
    answers = iter(["fine"] * 9)
    server.plan = lambda asked: next(answers, (500, b"gone"))
    said = ask.refused("whole", "endpoint.give_up=6", "endpoint.retries=0", "endpoint.concurrency=1", code=1)
    counts = counts_of(tmp_path / "whole")
    assert said.startswith("error: no more answers, endpoint.give_up prompts in a row: ")
    assert "http 500 6 times" in said and counts["done"] > 0 and counts["not_asked"] > 0


def test_the_key_is_sent_and_kept_nowhere(ask, server, monkeypatch):
    key = "sk-SECRET-123"
    monkeypatch.setenv(endpoint.KEY, key + "\n")
    chance = iter([(401, f"wrong key {key}".encode())])
    server.plan = lambda asked: next(chance, "fine")
    folder = ask("whole")
    assert all(headers["Authorization"] == f"Bearer {key}" for _, _, headers, _ in server.requests)
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"wrong key ***" in written
    assert "SECRET" not in ask.out and b"SECRET" not in written
    monkeypatch.setenv(endpoint.KEY, "sk-SECRET\nX: y")
    said = ask.refused("other")
    assert said.startswith("error: OPENAI_API_KEY: holds a line break") and "SECRET" not in ask.out + said
    monkeypatch.delenv(endpoint.KEY)
    server.requests = []
    ask("third")
    assert not any("Authorization" in headers for _, _, headers, _ in server.requests)


def test_ctrl_c_keeps_what_is_answered(ask, server, tmp_path):
    asked = iter(range(100))

    def plan(_):
        number = next(asked)
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)
        elif number > 7:
            time.sleep(0.5)  # the main thread hears of it in the meantime
        return "fine"

    server.plan = plan
    said = ask.refused("whole", "endpoint.concurrency=1", "endpoint.timeout=20.0")
    folder = tmp_path / "whole"
    done = counts_of(folder)["done"]
    assert 0 < done < 20
    assert said == f"error: stopped: {done} of 20 prompts are answered in {folder}; the same command goes on\n"
    server.plan = lambda asked: "fine"
    assert counts_of(ask("whole", "endpoint.timeout=20.0"))["done"] == 20
