"""Every shipped recipe that names something on the Hub, by its own first line and without --tiny, on a miniature Hub.

Downloads, templates, masks, training, export, upload, then calibrate.py and decode.py, for the repository layouts in
manifests/. Only sizes are overridden. The first command of all, vicuna7b's, is a real ``accelerate launch``; the others
that a plain ``python`` can run share a process, and all share the caches, as on a user's machine.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import miniatures
import pyarrow.parquet
import pytest
import yaml
from safetensors.torch import load_file
from server import TOKEN, USER, Hub
from transformers import AutoTokenizer

pytestmark = pytest.mark.whole_runs

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
# tests/train/test_shipped_recipes.py
NOTHING_OF_THE_HUB = {f"smollm2-{name}" for name in "distill dynaspec eagle3 medusa medusa2 ssm".split()}
NOTHING_OF_THE_HUB |= {f"tiny-{name}" for name in "distill draft dynaspec eagle1 eagle3 lm medusa medusa2 ssm".split()}
NOTHING_OF_THE_HUB |= {"tiny-dflash"}
STAGE = ["steps=4", "epochs=null", "batch={sequences: 4, accumulate: 2}"]
SIZES = ["target.dtype=float32", "data.max_length=224", "precision.autocast=none", "precision.threads=1"]
SIZES += ["checkpoint.every=4", "evaluate={every: 2, sequences: 8}", *(f"stages.0.{size}" for size in STAGE)]
JOINT = "precision.gradient_checkpointing=true"
SECOND = [f"stages.1.{size}" for size in STAGE]
OWN = ["data.validation.0.answers={prompts: 12, prompt_tokens: 190, new_tokens: 24, batch_size: 8}"]  # held out
ANSWERS = ["target.dtype=float32", "engine.batch_size=4", "engine.threads=1", "decoding.max_new_tokens=12"]
FEW = ["--max-new-tokens", "8"]  # timed by calibrate.py
ADAPTER = {"adapter/adapter_model.safetensors"}
USELESS = ("bard", "bing", "empty")  # rows that are skipped


class World:
    """A user's machine: the project, empty caches, a Hub, and one process for the commands that need none of their own.

    root: where the commands run; ``recipes``, ``train`` and ``inference`` are the project's, ``runs`` is here.
    """

    def __init__(self, root: Path, hub: Hub) -> None:
        self.root, self.hub = root, hub
        for name in ("recipes", "train", "inference", "data", "models"):
            (root / name).symlink_to(ROOT / name)
        left_out = ("HF_", "HUGGING", "TRANSFORMERS_", "DRAFTSMITH_", "WANDB_", "ACCELERATE_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
        environment |= {"HF_HOME": str(root / "hf"), "DRAFTSMITH_CACHE": str(root / "cache"), "NO_PROXY": "127.0.0.1"}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
        self.environment, command = environment, [sys.executable, Path(__file__).with_name("hub_commands.py")]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=root, env=environment, **pipes)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def python(self, *words: str, **environment: str | None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of ``python WORDS``."""
        assert self._process.stdin is not None and self._process.stdout is not None
        changed = {"HF_TOKEN": TOKEN} | environment
        self._process.stdin.write(json.dumps({"words": words, "environment": changed}) + "\n")
        self._process.stdin.flush()
        done = json.loads(self._process.stdout.readline())
        return done["code"], done["out"], done["err"]

    def launch(self, *words: str) -> tuple[int, str, str]:
        """The same of ``accelerate …``, in a process of its own."""
        command = [BIN / words[0], *words[1:]]
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("hub")
    miniatures.build(folder)
    with Hub(folder) as hub:
        hub.gated = {name: {TOKEN} for name, manifest in miniatures.manifests().items() if manifest.get("gated")}
        world = World(tmp_path_factory.mktemp("machine"), hub)
        yield world
        world.close()
        assert hub.unknown == [], "the miniature Hub lacks something"


def first_line(name: str) -> list[str]:
    return shlex.split(RECIPES[name].read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))


def succeed(done: tuple[int, str, str]) -> str:
    code, out, err = done
    assert code == 0, f"exit code {code}\n{out[-2000:]}\n{err[-4000:]}"
    return out


def train(world: World, name: str, *overrides: str, launched: bool = False) -> str:
    """A training recipe by its first line, uploaded at the end; returns what it printed."""
    words = first_line(name)
    assert words[:2] == ["accelerate", "launch"]
    more = [*SIZES, *overrides, f"export.push_to_hub={USER}/{name}"]
    if launched:
        return succeed(world.launch(*words, *more))
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    return succeed(world.python(*words[script:], *more))


def finish(world: World, name: str, weights: Sequence[str] = ("model.safetensors",), target: str | None = None) -> None:
    """Calibration, decoding, and decoding of what was uploaded. ``weights``: all of the drafter's files of weights;
    ``target``: None is the recipe's own."""
    run = world.root / "runs" / name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in lines)
    stored = world.hub.files(f"models/{USER}/{name}")
    assert {"config.json", "README.md"} <= set(stored)
    assert {file for file in stored if file.endswith(".safetensors")} == {*weights, *ADAPTER.intersection(stored)}
    assert all(stored[file].read_bytes() == (run / file).read_bytes() for file in weights)
    assert not any(file.startswith(("checkpoints", "held_out", "marks")) for file in stored)
    succeed(world.python("inference/calibrate.py", f"runs/{name}", "--nodes", "4", *FEW))
    assert (run / "tree.json").exists()
    for drafter in (f"runs/{name}", f"{USER}/{name}"):
        report = world.root / "report"
        words = [drafter, "--prompt", "A river of stone", "--max-new-tokens", "12", "--threads", "1"]
        succeed(world.python("inference/decode.py", *words, "--check-lossless", "--report", str(report)))
        found = json.loads((report / "report.json").read_text())
        assert found["lossless"]["passed"] and found["lossless"]["identical"] == found["prompts"] == 1
        assert found["target"] == (target or yaml.safe_load(RECIPES[name].read_text())["target"]["name"])


def supervised(world: World, name: str, target: str) -> list[list[str]]:
    """Of each held-out row, the texts between which nothing is supervised, without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(world.hub.folder / "models" / target)
    held_out = load_file(world.root / "runs" / name / "held_out" / "model.safetensors")
    found = []
    for tokens, marks in zip(held_out["tokens"].tolist(), held_out["supervised"].tolist(), strict=True):
        spans: list[list[int]] = []
        for at, token in enumerate(tokens):
            if marks[at] and not (at and marks[at - 1]):
                spans.append([])
            if marks[at]:
                spans[-1].append(token)
        found.append([tokenizer.decode(span, skip_special_tokens=True).strip() for span in spans])
    return found


def said(rows: list[list[tuple[str, str]]]) -> list[list[str]]:
    """What the assistant says in each chat."""
    return [[text for role, text in chat if role == "assistant"] for chat in rows]


def sharegpt_chats(numbers: range) -> list[list[tuple[str, str]]]:
    """The chats that a recipe has to take from ShareGPT: those of other assistants and the empty ones are no use."""
    return [miniatures.chat(n) for n in numbers if miniatures.ODD.get(n) not in USELESS]


def weights_of(repository: str) -> set[str]:
    """The weight files that have to be asked for: the safetensors; where there are none, the pickles."""
    names = miniatures.manifests()[repository]["files"]
    safe = {name for name in names if name.endswith(".safetensors")}
    return safe or {name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")}


def check_requests(world: World, target: str) -> None:
    """All of the weights were asked for, and nothing that is of no use."""
    asked = world.hub.requested(f"models/{target}")
    heavy = {name for name in asked if name.endswith((".safetensors", ".bin", ".pth", ".pt"))}
    assert heavy == weights_of(f"models/{target}")
    assert not any(name.startswith("original/") for name in asked)
    for how, name in world.hub.requests:
        assert name != f"models/{target}/original/tokenizer.model", how
    gets = [name for how, name in world.hub.requests if how == "GET" and name.startswith(f"models/{target}/")]
    assert len(gets) == len(set(gets)), "something was downloaded twice"


def test_how_many_there_are():
    assert len(RECIPES) == 55
    named = {name for path in RECIPES.values() for name in _named(yaml.safe_load(path.read_text()))}
    instead = {name: hub_id(name) for name in RECIPES if "target.name=" in RECIPES[name].read_text()}
    assert set(instead) - {"qwen2-7b-dynaspec"} == {name for name in RECIPES if name.startswith("qwen2.5-coder-")}
    named |= set(instead.values())
    assert named == {name.split("/", 1)[1] for name in miniatures.manifests()}, "each needs a manifest"
    tested = [name for name in RECIPES if any(_named(yaml.safe_load(RECIPES[name].read_text()))) or name in instead]
    assert len(tested) == 39 and set(tested) | NOTHING_OF_THE_HUB == set(RECIPES)


def hub_id(name: str) -> str:
    """The target on the Hub that a recipe's comment names."""
    (found,) = set(re.findall(r"^#.*\btarget\.name=(\S+)", RECIPES[name].read_text(encoding="utf-8"), re.MULTILINE))
    return found


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


def held_out_command(name: str) -> list[str]:
    """The second command in a training recipe's comment, that makes its held-out answers."""
    lines = RECIPES[name].read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("# python train/distill.py") and "run.name=" in line]
    return shlex.split(line.removeprefix("# python "))


def distil(world: World, name: str, trains: str, first: str, second: str, *overrides: str) -> None:
    """The answers that the recipe ``trains`` learns from, and its held-out ones; the slices of the seeds are sizes."""
    for words, split in ((first_line(name)[1:], first), (held_out_command(trains), second)):
        succeed(world.python(*words, *overrides, f"data.seeds.0.split={split}"))


def shards(world: World, run: str) -> list[list[dict[str, str]]]:
    """The chats that were answered."""
    files = sorted((world.root / "runs" / run).glob("shard-*.jsonl"))
    return [json.loads(line)["messages"] for file in files for line in file.read_text().splitlines()]


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


CODER = ["drafter.draft_vocab_size=200"]
COMMITTED = ["data.train.0.limit=60", "data.validation.0.limit=24"]  # of the answers in data/
FEW_SEEDS = ["data.seeds.0.limit=8", "data.written=0"]  # a random target writes no message that could be used


@pytest.fixture(scope="module")
def coder_eagle3(world: World) -> str:
    """The target's Hub id, after the EAGLE-3 recipe for it was run."""
    target = hub_id("qwen2.5-coder-0.5b-eagle3")
    train(world, "qwen2.5-coder-0.5b-eagle3", f"target.name={target}", *CODER, *COMMITTED, "drafter.unroll=2")
    return target


def test_coder_eagle3(world, coder_eagle3):
    """A recipe for the folder of `make coder` takes its target from the Hub by one field. What is supervised of the
    committed answers is the answers."""
    name = "qwen2.5-coder-0.5b-eagle3"
    check_requests(world, coder_eagle3)
    config = json.loads((world.root / "runs" / name / "config.json").read_text())
    assert config["fc_norm"] and config["norm_output"]
    rows = supervised(world, name, coder_eagle3)
    committed = pyarrow.parquet.read_table(ROOT / "data/coder-held-out.parquet").to_pylist()[:24]
    for answers, chat in zip(rows, committed, strict=True):  # a long question leaves none of its answer, here
        assert all(chat["messages"][1]["content"].startswith(text.rstrip("\ufffd")) for text in answers)
    assert sum(map(len, rows)) > 12 and max(map(len, rows)) == 1
    finish(world, name, target=coder_eagle3)


@pytest.mark.parametrize("family", ["medusa", "dflash"])
def test_coder_heads_and_blocks(world, family):
    name = f"qwen2.5-coder-0.5b-{family}"
    target = hub_id(name)
    train(world, name, f"target.name={target}", *CODER, *COMMITTED)
    finish(world, name, target=target)


def test_coder_peagle(world, coder_eagle3):
    """It begins with the EAGLE-3 drafter."""
    name = "qwen2.5-coder-0.5b-peagle"
    train(world, name, f"target.name={coder_eagle3}", *CODER, *COMMITTED, "drafter.unroll=2")
    finish(world, name, target=coder_eagle3)


def test_coder_dynaspec(world, coder_eagle3):
    """On the EAGLE-3 drafter, whose draft vocabulary is dropped."""
    name = "qwen2.5-coder-0.5b-dynaspec"
    sizes = ["drafter.num_clusters=8", "drafter.router_width=16", "drafter.positions=400"]
    train(world, name, f"target.name={hub_id(name)}", *COMMITTED, *sizes)
    finish(world, name, ["model.safetensors", "drafter/model.safetensors"], coder_eagle3)
    config = json.loads((world.root / "runs" / name / "config.json").read_text())
    assert config["outputs"] == config["vocab_size"], "all tokens"


def test_coder_distillation(world):
    """Both recipes for answers; the 1.5B's two drafters on such, by the commands in their comments."""
    target = hub_id("qwen2.5-coder-1.5b-distill")
    for name in ("qwen2.5-coder-0.5b-distill", "qwen2.5-coder-1.5b-distill"):
        words = [*first_line(name)[1:], f"target.name={hub_id(name)}", *ANSWERS, *FEW_SEEDS, "data.seeds.1.limit=8"]
        succeed(world.python(*words))
        chats = shards(world, name)
        assert len(chats) == 16 and all([m["role"] for m in chat] == ["user", "assistant"] for chat in chats)
    commands = [held_out_command(f"qwen2.5-coder-1.5b-{family}") for family in ("medusa", "eagle3")]
    assert commands[0] == commands[1]
    succeed(world.python(*commands[0], f"target.name={target}", *ANSWERS, *FEW_SEEDS))
    for family, more in (("medusa", []), ("eagle3", ["drafter.unroll=2"])):
        name = f"qwen2.5-coder-1.5b-{family}"
        train(world, name, f"target.name={target}", *CODER, *more)
        check_requests(world, target)
        assert supervised(world, name, target) == [
            [chat[-1]["content"].strip()] for chat in shards(world, "qwen2.5-coder-1.5b-held-out")
        ]
        finish(world, name, target=target)


OWN_ANSWERS = {
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-8b-thinking": "Qwen/Qwen3-8B",
    "qwen3-8b-non-thinking": "Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
THREE_SETS = ["backend=engine", *(f"data.seeds.{n}.split=train[:6]" for n in (1, 2))]


@pytest.mark.parametrize("stem", OWN_ANSWERS)
def test_own_answers(world, stem):
    """Prompts of three sets, answered by our engine in place of a server; then each drafter of the pair, on the token
    ids that the engine sampled."""
    target = OWN_ANSWERS[stem]
    drafters = [name for name in (f"{stem}-eagle3", f"{stem}-medusa") if name in RECIPES]
    drafters += ["qwen3-8b-dflash"] if stem == "qwen3-8b-non-thinking" else []
    commands = {" ".join(held_out_command(name)) for name in drafters}
    assert len(commands) == 1 and len(drafters) >= 2
    distilled = first_line(f"{stem}-distill")[1:]
    succeed(world.python(*distilled, *ANSWERS, *THREE_SETS, "data.seeds.0.split=train_sft[:6]"))
    succeed(world.python(*held_out_command(drafters[0]), *ANSWERS, *THREE_SETS, "data.seeds.0.split=test_sft[:6]"))
    lines = [
        json.loads(line)
        for file in sorted((world.root / "runs" / f"{stem}-held-out").glob("shard-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert {line["source"] for line in lines} == set(_sources(stem)) and len(lines) == 18
    sizes = {"eagle3": ["drafter.draft_vocab_size=200", "drafter.unroll=2"], "medusa": []}
    sizes["dflash"] = ["drafter.block_size=4", "drafter.captured_layers=null", "drafter.mask_token_id=null"]
    for name in drafters:
        moe = ["drafter.intermediate_size=96"] if name == "qwen3-30b-a3b-eagle3" else []
        out = train(world, name, *sizes[name.rpartition("-")[2]], *moe)
        assert "answers are encoded from their text" not in out and "follow another prompt" not in out
        check_requests(world, target)
        sampled = [ids["answer"] for line in lines for ids in line["token_ids"]]
        held_out = load_file(world.root / "runs" / name / "held_out" / "model.safetensors")
        assert int(held_out["supervised"].sum()) == sum(map(len, sampled))
        finish(world, name)


def _sources(stem: str) -> list[str]:
    return [seed["source"] for seed in yaml.safe_load(RECIPES[f"{stem}-distill"].read_text())["data"]["seeds"]]


def test_llama7b_68m_ssm(world):
    """The base of the SSMs is on the Hub, too, with pickled weights; every SSM is uploaded."""
    name, parts = "llama7b-68m-ssm", ["ssm-0", "ssm-1", "ssm-2"]
    ask = "{prompts: 24, prompt_tokens: 12, new_tokens: 12, batch_size: 8}"
    sources = [f"data.{part}.limit=40" for part in ("train.0", "train.1", "validation.0")]
    sources += [f"data.{part}.answers={ask}" for part in ("train.0", "train.1", "validation.0")]
    rounds = [f"stages.{n}.{size}" for n in range(3) for size in ("steps=4", "batch={sequences: 4, accumulate: 2}")]
    out = train(world, name, *rounds, *sources, "boost.min_prompts=4")
    assert all(f"{part}: " in out for part in parts)
    for model in ("huggyllama/llama-7b", "JackFram/llama-68m"):
        check_requests(world, model)
    finish(world, name, [f"{part}/model.safetensors" for part in parts])
    for part in parts:  # a complete model
        files = {file.removeprefix(f"{part}/") for file in world.hub.files(f"models/{USER}/{name}") if part in file}
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files
