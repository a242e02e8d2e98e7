"""Every shipped recipe that names something on the Hub, but those for the Coder and on own answers, on a miniature Hub.

The first command of all, vicuna7b's, is a real ``accelerate launch``.
"""

import json
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import miniatures
import pytest
import yaml
from recipe_runs import (
    ANSWERS,
    JOINT,
    RECIPES,
    SIZES,
    STAGE,
    World,
    check_requests,
    finish,
    first_line,
    held_out_command,
    hub_id,
    shards,
    succeed,
    supervised,
    train,
)
from safetensors.torch import load_file
from server import USER
from transformers import AutoTokenizer

pytestmark = pytest.mark.whole_runs

NOTHING_OF_THE_HUB = {f"smollm2-{name}" for name in "distill dynaspec eagle3 medusa medusa2 ssm".split()}
NOTHING_OF_THE_HUB |= {f"tiny-{name}" for name in "distill draft dynaspec eagle1 eagle3 lm medusa medusa2 ssm".split()}
NOTHING_OF_THE_HUB |= {"tiny-dflash"}
SECOND = [f"stages.1.{size}" for size in STAGE]
OWN = ["data.validation.0.answers={prompts: 12, prompt_tokens: 190, new_tokens: 24, batch_size: 8}"]  # held out
USELESS = ("bard", "bing", "empty")  # rows that are skipped


def said(rows: list[list[tuple[str, str]]]) -> list[list[str]]:
    """What the assistant says in each chat."""
    return [[text for role, text in chat if role == "assistant"] for chat in rows]


def sharegpt_chats(numbers: range) -> list[list[tuple[str, str]]]:
    """The chats that a recipe has to take from ShareGPT: those of other assistants and the empty ones are no use."""
    return [miniatures.chat(n) for n in numbers if miniatures.ODD.get(n) not in USELESS]


def test_how_many_there_are():
    assert len(RECIPES) == 55
    named = {name for path in RECIPES.values() for name in _named(yaml.safe_load(path.read_text()))}
    instead = {name: hub_id(name) for name in RECIPES if "target.name=" in RECIPES[name].read_text()}
    assert set(instead) - {"qwen2-7b-dynaspec"} == {name for name in RECIPES if name.startswith("qwen2.5-coder-")}
    named |= set(instead.values())
    assert named == {name.split("/", 1)[1] for name in miniatures.manifests()}, "each needs a manifest"
    tested = [name for name in RECIPES if any(_named(yaml.safe_load(RECIPES[name].read_text()))) or name in instead]
    assert len(tested) == 39 and set(tested) | NOTHING_OF_THE_HUB == set(RECIPES)


def _named(recipe: dict[str, Any]) -> Iterator[str]:
    """The Hub ids in a recipe."""
    data = recipe["data"]
    sources = [source["source"] for part in ("train", "validation", "seeds") for source in data.get(part, ())]
    base = recipe.get("drafter", {}).get("base", "")
    for name in [recipe.get("target", {}).get("name", ""), base, *sources]:
        if name.count("/") == 1 and not name.startswith(("data/", "models/", "runs/")):
            yield name


def check_prompts(world: World) -> None:
    """A row begins as the prompt does that Vicuna was trained with: with <s>, and the tokens of its text behind it."""
    tokenizer = AutoTokenizer.from_pretrained(world.hub.folder / "models" / "lmsys/vicuna-7b-v1.5")
    held_out = load_file(world.root / "runs" / "vicuna7b" / "held_out" / "model.safetensors")
    usual = miniatures.SYSTEM.removesuffix(" USER: ASSISTANT:")
    used = [n for n in range(500) if miniatures.ODD.get(n) not in USELESS]
    for row, number in zip(held_out["tokens"].tolist(), used, strict=False):
        system = "Be brief." if miniatures.ODD.get(number) == "system" else usual
        wanted = tokenizer(f"{system} USER: {miniatures.chat(number)[0][1]} ASSISTANT:")["input_ids"]
        assert wanted[0] == tokenizer.bos_token_id and row[: len(wanted)] == wanted


@pytest.fixture(scope="module")
def vicuna7b(world: World) -> str:
    """What its training printed."""
    return train(world, "vicuna7b", *SECOND, JOINT, launched=True)


def test_vicuna7b(world, vicuna7b):
    check_requests(world, "lmsys/vicuna-7b-v1.5")
    asked = world.hub.requested("datasets/Aeala/ShareGPT_Vicuna_unfiltered")
    assert {name for name in asked if name.endswith(".json")} == {"ShareGPT_V4.3_unfiltered_cleaned_split.json"}
    held_out = sharegpt_chats(range(500))[:256]
    assert supervised(world, "vicuna7b", "lmsys/vicuna-7b-v1.5") == said(held_out)
    for split, rows, speaker, empty in (("train[500:]", 140, 4, 31), ("train[:500]", 500, 8, 151)):
        (line,) = [line for line in vicuna7b.splitlines() if f"({split}): 2 of {rows} rows skipped: " in line]
        assert re.search(rf"1 × a turn is from an unknown speaker .*\(first: row {speaker}\)", line), line
        assert f"1 × an empty conversation (first: row {empty})" in line
    check_prompts(world)
    assert {"adapter/adapter_config.json", "chat_template.jinja"} <= set(world.hub.files(f"models/{USER}/vicuna7b"))


def test_vicuna7b_decodes(world, vicuna7b):
    finish(world, "vicuna7b")


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with OpenAI's protocol: its address, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"object": "list", "data": []})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", "content": f"{asked[-1]['messages'][-1]['content']} and more"}
            self.reply({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

        def reply(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def distil(world: World, name: str, trains: str, first: str, second: str, *overrides: str) -> None:
    """The answers that the recipe ``trains`` learns from, and its held-out ones; the slices of the seeds are sizes."""
    for words, split in ((first_line(name)[1:], first), (held_out_command(trains), second)):
        succeed(world.python(*words, *overrides, f"data.seeds.0.split={split}"))


def check_answers(world: World, run: str, asked: list[list[tuple[str, str]]]) -> None:
    """The user's turns are those of the seeds, and each has an answer of the target's own."""
    chats = shards(world, run)
    users = sorted([m["content"] for m in chat if m["role"] == "user"] for chat in chats)
    assert users == sorted([text for role, text in chat if role == "user"] for chat in asked)
    theirs = {text for chat in asked for role, text in chat if role == "assistant"}
    for chat in chats:
        roles = [m["role"] for m in chat if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert not theirs.intersection(m["content"] for m in chat)


def ultrachat(first: int, count: int) -> list[list[tuple[str, str]]]:
    return [miniatures.chat(first + n) for n in range(count)]


SHAREGPT = ("train[:12]", sharegpt_chats(range(12)), "train[496:506]", sharegpt_chats(range(496, 506)))
ULTRACHAT = ("train_sft[:12]", ultrachat(5000, 12), "test_sft[:8]", ultrachat(1000, 8))


@pytest.mark.parametrize(
    "stem, target, seeds",
    [("vicuna33b", "lmsys/vicuna-33b-v1.3", SHAREGPT), ("zephyr7b", "HuggingFaceH4/zephyr-7b-beta", ULTRACHAT)],
)
def test_self_distillation(world, stem, target, seeds):
    """Seeds of the Hub, answered by our engine; then joint training on the answers."""
    first, asked, second, held_out = seeds
    distil(world, f"{stem}-distill", f"{stem}-self-distill", first, second, *ANSWERS)
    check_answers(world, f"{stem}-distill", asked)
    manifest = json.loads((world.root / "runs" / f"{stem}-distill" / "manifest.json").read_text())
    skipped = [(reason.partition(" (")[0], rows) for reason, rows in manifest["rows_skipped"].items()]
    assert skipped == ([("a turn is from an unknown speaker", 1)] if seeds is SHAREGPT else [])
    check_answers(world, f"{stem}-held-out", held_out)
    train(world, f"{stem}-self-distill", JOINT)
    check_requests(world, target)
    answers = [[m for m in chat if m["role"] == "assistant"] for chat in shards(world, f"{stem}-held-out")]
    spoken = sorted(text for chat in answers for m in chat if (text := m["content"].strip()))
    rows = supervised(world, f"{stem}-self-distill", target)  # an answer that was cut is a sample of its own
    assert sorted(text for row in rows for text in row if text) == spoken
    finish(world, f"{stem}-self-distill")


def answer_for_llama3_70b(world: World, url: str) -> None:
    options = (f"endpoint.url={url}", "endpoint.concurrency=2")
    distil(world, "llama3-70b-distill", "llama3-70b-zero3", "train_sft[:12]", "test_sft[:8]", *options)


def train_llama3_70b(world: World, processes: int, *options: str) -> None:
    words = first_line("llama3-70b-zero3")
    words[words.index("--num_processes") + 1] = str(processes)  # instead of eight
    more = [f"export.push_to_hub={USER}/llama3-70b-zero3", *options]
    out, _, commands = succeed(world.launch(*words, *SIZES, JOINT, *more)).rpartition(", run: ")
    assert f"not uploaded to {USER}/llama3-70b-zero3" in out
    for command in commands.split(" && "):
        succeed(world.python(*shlex.split(command)[1:]))


def test_llama3_70b(world, endpoint):
    """Answers from a server, which knows the model by its name; then ZeRO-3."""
    url, asked = endpoint
    answer_for_llama3_70b(world, url)
    target = "meta-llama/Meta-Llama-3-70B-Instruct"
    assert {question["model"] for question in asked} == {target}
    assert world.hub.requested(f"models/{target}") == set(), "the server has the target"
    check_answers(world, "llama3-70b-held-out", ultrachat(1000, 8))
    train_llama3_70b(world, 1)
    check_requests(world, target)
    finish(world, "llama3-70b-zero3")


@pytest.mark.slow
def test_llama3_70b_by_two_processes(world, endpoint):
    answer_for_llama3_70b(world, endpoint[0])
    train_llama3_70b(world, 2, "--restart")
    finish(world, "llama3-70b-zero3")


def test_llama3_8b(world):
    words = first_line("llama3-8b")
    command = words[words.index("train/medusa.py") :]
    for token in (None, "hf_of_somebody_else"):
        code, _, err = world.python(*command, *SIZES, *OWN, HF_TOKEN=token)
        *notes, error = err.splitlines()
        assert code == 2 and error.startswith("error: ") and not any("Traceback" in note for note in notes), err
        assert f"{world.hub.endpoint}/meta-llama/Meta-Llama-3-8B-Instruct" in error and "licence" in error
        assert "hf auth login" in error
    assert world.hub.requested("models/meta-llama/Meta-Llama-3-8B-Instruct") == set()
    train(world, "llama3-8b", *OWN)
    check_requests(world, "meta-llama/Meta-Llama-3-8B-Instruct")
    asked = world.hub.requested("datasets/HuggingFaceH4/ultrachat_200k")
    assert {name.split("-")[0] for name in asked if name.endswith(".parquet")} >= {"data/train_sft", "data/test_sft"}
    check_held_out(world, "llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct")
    finish(world, "llama3-8b")


def check_held_out(world: World, name: str, target: str) -> None:
    """The target's own answers, one a row, and not those of the data set."""
    rows, theirs = supervised(world, name, target), {text for chat in said(ultrachat(1000, 40)) for text in chat}
    assert len(rows) >= 12 and all(len(row) == 1 for row in rows)
    assert not theirs & {text for (text,) in rows}


def test_qwen3_8b(world):
    """Its template renders earlier turns otherwise once they are history: each answer is a sample of its own, behind
    the prompt that decoding would give it."""
    train(world, "qwen3-8b", *OWN)
    check_requests(world, "Qwen/Qwen3-8B")
    check_held_out(world, "qwen3-8b", "Qwen/Qwen3-8B")
    finish(world, "qwen3-8b")


@pytest.mark.parametrize(
    "name, target", [("llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct"), ("qwen3-8b", "Qwen/Qwen3-8B")]
)
def test_eagle3(world, name, target):
    train(world, f"{name}-eagle3", "drafter.draft_vocab_size=200", "drafter.unroll=2", *OWN)
    check_requests(world, target)
    finish(world, f"{name}-eagle3")


@pytest.mark.parametrize(
    "stem, target", [("llama3-8b", "meta-llama/Meta-Llama-3-8B-Instruct"), ("qwen2-7b", "Qwen/Qwen2-7B-Instruct")]
)
def test_dynaspec(world, stem, target):
    """On the EAGLE-3 drafter of all tokens that the recipe's comment trains; it is uploaded as a part."""
    name = f"{stem}-dynaspec"
    comment = re.findall(r"^#   (.*)", RECIPES[name].read_text(encoding="utf-8"), re.MULTILINE)
    words = shlex.split("".join(line.removesuffix("\\") for line in comment))
    assert words[:2] == ["accelerate", "launch"]
    succeed(world.python(*words[2:], *SIZES, *OWN, "drafter.unroll=2"))
    train(world, name, "drafter.num_clusters=8", "drafter.router_width=16", "drafter.positions=400", *OWN)
    check_requests(world, target)
    finish(world, name, ["model.safetensors", "drafter/model.safetensors"])
    config = json.loads((world.root / "runs" / name / "config.json").read_text())
    assert config["outputs"] == config["vocab_size"], "all tokens"


def test_llama7b_68m_ssm(world):
    """The base of the SSMs is on the Hub, too, with pickled weights; every SSM is uploaded."""
    name, parts = "llama7b-68m-ssm", ["ssm-0", "ssm-1", "ssm-2"]
    ask = "{prompts: 24, prompt_tokens: 12, new_tokens: 12, batch_size: 8}"
    sources = [f"data.{part}.answers={ask}" for part in ("train.0", "train.1", "validation.0")]
    rounds = [f"stages.{n}.{size}" for n in range(3) for size in ("steps=4", "batch={sequences: 4, accumulate: 2}")]
    out = train(world, name, *rounds, *sources, "boost.min_prompts=4")
    assert all(f"{part}: " in out for part in parts)
    for model in ("huggyllama/llama-7b", "JackFram/llama-68m"):
        check_requests(world, model)
    finish(world, name, [f"{part}/model.safetensors" for part in parts])
    for part in parts:  # a complete model
        files = {file.removeprefix(f"{part}/") for file in world.hub.files(f"models/{USER}/{name}") if part in file}
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files
