"""A user's machine beside the miniature Hub, and what each training recipe is taken through there.

By its own first line, without --tiny: downloads, templates, masks, training, export, upload, then calibrate.py and
decode.py, for the repository layouts in manifests/. Only sizes are overridden. The commands that a plain ``python`` can
run share a process, and all share the caches, as on a user's machine.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import miniatures
import yaml
from safetensors.torch import load_file
from server import TOKEN, USER, Hub
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RECIPES = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
STAGE = ["steps=4", "epochs=null", "batch={sequences: 4, accumulate: 2}"]
SIZES = ["target.dtype=float32", "data.max_length=224", "precision.autocast=none", "precision.threads=1"]
SIZES += ["checkpoint.every=4", "evaluate={every: 2, sequences: 8}", *(f"stages.0.{size}" for size in STAGE)]
JOINT = "precision.gradient_checkpointing=true"
ANSWERS = ["target.dtype=float32", "engine.batch_size=4", "engine.threads=1", "decoding.max_new_tokens=12"]
FEW = ["--max-new-tokens", "8"]  # timed by calibrate.py
ADAPTER = {"adapter/adapter_model.safetensors"}


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


def hub_id(name: str) -> str:
    """The target on the Hub that a recipe's comment names."""
    (found,) = set(re.findall(r"^#.*\btarget\.name=(\S+)", RECIPES[name].read_text(encoding="utf-8"), re.MULTILINE))
    return found


def held_out_command(name: str) -> list[str]:
    """The second command in a training recipe's comment, that makes its held-out answers."""
    lines = RECIPES[name].read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith("# python train/distill.py") and "run.name=" in line]
    return shlex.split(line.removeprefix("# python "))


def shards(world: World, run: str) -> list[list[dict[str, str]]]:
    """The chats that were answered."""
    files = sorted((world.root / "runs" / run).glob("shard-*.jsonl"))
    return [json.loads(line)["messages"] for file in files for line in file.read_text().splitlines()]
