"""Inputs that once ended in a traceback, a wrong result or a lost file, as a user gives them: the exit code and what
the one line says.

Tested elsewhere, each by the test named:
layouts of weights and tokenizers, weights missing, left over or of another shape, gated and private repositories, a
full disk while converting, unwritable caches: models/test_model_files.py; recipes on their data as the Hub has it:
hub/test_recipes_for_real.py; locks, links, folders of other runs, --help: train/test_run.py; interrupts:
test_interrupts.py; printed bytes, encodings of terminals, a closed stdout: inference/commands/test_terminal.py; the
cost of streamed text: inference/engine/test_text.py; arrow keys, closed stdin, lines too long for the context:
inference/test_decode.py; modes, stop strings and sampling parameters of the engine:
inference/engine/test_engine_inputs.py; NaN: inference/engine/test_engine_finite.py; endpoints: data/test_endpoint.py,
train/test_distill.py; full disks: common/test_files.py; rows: data/test_rows.py; templates: data/test_chat.py; what
recipes, prompts, targets, drafters and trees may not hold: common/test_recipe.py, inference/commands/test_prompts.py,
models/test_model_files.py, models/test_artifact.py, inference/verify/test_tree.py, and inference/test_decode.py.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.benchmarks import step_times as bench
from draftsmith.data import prompts as cutting
from draftsmith.inference import calibrate, decode
from draftsmith.train import distill, medusa

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}


@dataclass
class World:
    """A target, a drafter, prompts and recipes that work; ``tmp`` is of the test alone."""

    target: Path
    drafter: Path
    tmp: Path

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.tmp / name
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    @property
    def rows(self) -> Path:
        return self.file("rows.jsonl", f"{json.dumps(CHAT)}\n" * 4)

    def recipe(self, script: str = "medusa", text: str = "", **sections: Any) -> Path:
        """A recipe that works, some of its sections replaced, some text behind it."""
        source = {"source": str(self.rows)}
        run = {"name": "x", "output_dir": str(self.tmp / "runs")}
        stage = {"batch": {"sequences": 2}, "steps": 2, "optim": {"lr": 1e-3}}
        content: dict[str, Any] = {"run": run, "target": {"name": str(self.target)}}
        if script == "distill":
            content |= {"data": {"seeds": [source]}, "decoding": {"max_new_tokens": 4}}
            content |= {"engine": {"batch_size": 2, "max_length": 64, "threads": 1}}
        else:
            data = {"train": [source], "validation": [source], "max_length": 64}
            content |= {"drafter": {"num_draft_heads": 2}, "data": data, "stages": [stage]}
            content |= {"precision": {"autocast": "none", "threads": 1}}
        return self.file("recipe.yaml", yaml.safe_dump(content | sections) + text)

    def prompts(self, content: str | bytes = '{"prompt": "a"}') -> Path:
        return self.file("prompts.jsonl", content)


@pytest.fixture
def world(tiny_lm, drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return World(tiny_lm, drafter, tmp_path)


def loop(world: World, name: str = "loop") -> Path:
    (world.tmp / name).symlink_to(world.tmp / name)
    return world.tmp / name


DECODE = ["--max-new-tokens", "4", "--device", "cpu", "--threads", "1"]
decoding: Callable[[str], Any] = lambda *options: lambda w: [w.drafter, "--prompt", "a", *DECODE, *options]  # noqa: E731
prompted: Callable[[Any], Any] = lambda text: lambda w: [w.drafter, "--prompts", w.prompts(text), *DECODE]  # noqa: E731
training: Callable[..., Any] = lambda *overrides: lambda w: [w.recipe(), *overrides]  # noqa: E731
written: Callable[[str], Any] = lambda text: lambda w: [w.recipe(text=text)]  # noqa: E731


def seeds(content: str | bytes, name: str = "seeds.jsonl") -> Callable[[World], list[Any]]:
    return lambda w: [w.recipe("distill", data={"seeds": [{"source": str(w.file(name, content))}]}), "--dry-run"]


def rows(content: str | bytes, name: str = "odd.jsonl") -> Callable[[World], list[Any]]:
    return lambda w: [w.recipe(), f"data.train=[{{source: {w.file(name, content)}}}]"]


# name, command, its arguments, exit code, what is said
TABLE: list[tuple[str, Callable[[], None], Callable[[World], list[Any]], int, str]] = [
    # run folders
    (
        "a model's folder", medusa.main,
        lambda w: [w.recipe(), f"run.output_dir={w.target.parent}", f"run.name={w.target.name}", "--restart"],
        2, "is no run but holds other things",
    ),
    (
        "a project", medusa.main, lambda w: [w.recipe(), f"run.output_dir={ROOT.parent}", f"run.name={ROOT.name}"],
        2, "is no run but holds other things",
    ),
    ("a run in a loop", medusa.main, lambda w: [w.recipe(), f"run.output_dir={loop(w)}"], 2, "loop"),
    ("a report in a device", decode.main, decoding("--report", "/dev/null/x"), 2, "--report /dev/null/x: cannot write"),
    # devices
    ("a device that is not there", decode.main, decoding("--device", "cuda:99"), 2, "cuda:99"),
    ("no device", decode.main, decoding("--device", ""), 2, "device ''"),
    ("calibrate: a device", calibrate.main, lambda w: [w.drafter, "--device", "gpu"], 2, "device 'gpu'"),
    ("bench: a device", bench.main, lambda w: ["--target", w.target, "--device", "gpu"], 2, "device 'gpu'"),
    # command lines
    ("top-k of 22 digits: all", decode.main, decoding("--mode", "sample", "--top-k", str(10**21)), 0, "ended by"),
    ("an empty prompt", decode.main, lambda w: [w.drafter, "--prompt", "", *DECODE], 2, "--prompt: the text is empty"),
    ("half a pair", decode.main, lambda w: [w.drafter, "--prompt", "\udc80", *DECODE], 2, "--prompt: not UTF-8 text"),
    ("a package elsewhere", cutting.main,
     lambda w: ["package:../x", "--tokenizer", w.target, "--out", w.tmp / "y.jsonl"], 2, "package:../x"),
    # outputs
    ("prompts into a text", cutting.main,
     lambda w: ["stdlib", "--tokenizer", w.target, "--out", w.file("notes.md", "mine"), "--count", "1"], 2,
     "notes.md: name a .jsonl file"),
    # n-grams
    ("n-grams of any length", decode.main,
     lambda w: ["ngram:2-999999999", "--target", w.target, "--prompt", "a", *DECODE], 0, "ended by"),
    ("n-grams of more than the context", decode.main,
     lambda w: ["ngram:99999-999999999", "--target", w.target, "--prompt", "a", *DECODE], 2,
     "n-grams of at least 99999 tokens: the context of target"),
    # recipes
    ("a date", medusa.main, written("2024-01-01: 1\n"), 2, "unknown key '2024-01-01'"),
    ("a key given twice", medusa.main, written("steps: 3\n"), 2, "steps"),
    ("another optimizer", medusa.main, training("stages.0.optim.name=sgd"), 2, "'stages.0.optim.name'"),
    ("a weight of 0", medusa.main, training("data.train.0.weight=0"), 2, "'data.train.0.weight'"),
    ("a weight of nan", medusa.main, training("data.train.0.weight=.nan"), 2, "'data.train.0.weight'"),
    ("heads to begin with", medusa.main, training("init_from=/nowhere"), 2, "/nowhere"),
    # templates
    ("a template that is none", medusa.main, training("data.template='{% if %}'"), 2, "data.template"),
    (
        "a template that raises", medusa.main,
        training("data.template=\"{{ raise_exception('no') }}{% for m in messages %}{{ m.content }}{% endfor %}\""), 2,
        "no",
    ),
    # data
    ("truncated data", medusa.main, rows('{"text": "a"}\n{"text": \n{"te'), 2, "2 of 3 rows skipped"),
    # seeds
    ("seeds of nothing", distill.main, seeds(""), 2, "seeds.jsonl"),
    # prompts
    ("a truncated line", decode.main, prompted('{"prompt": "a"}\n{"prom'), 2, "prompts.jsonl:2: not valid JSON"),
    ("prompts behind a mark", decode.main, prompted(b'\xef\xbb\xbf{"prompt": "a"}'), 0, "1 prompt by"),
    ("prompts in a loop", decode.main, lambda w: [w.drafter, "--prompts", loop(w), *DECODE], 2, "loop"),
    # targets
    ("a target in a loop", decode.main, lambda w: ["none", "--target", loop(w), "--prompt", "a"], 2, "loop"),
]  # fmt: skip


@pytest.mark.parametrize("main, arguments, code, message", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_one_line(world, run_main, main, arguments, code, message):
    before = sorted(world.drafter.parent.rglob("*"))
    given = arguments(world)
    got, _, err = run_main(main, *given)
    assert got == code, err
    assert message in err
    if code:
        last = err.removesuffix("\n").rpartition("\n")[2]
        assert last.startswith(("error: ", "command: error: "))
        told = re.sub(r"\Aprecision: .*\n", "", err)  # where the target was loaded
        assert told.count("\n") == 1, err
    assert sorted(world.drafter.parent.rglob("*")) == before, "nothing is written beside the drafter"
    assert not list(world.tmp.rglob("*.tmp"))


def test_every_command_is_in_it():
    commands = "medusa distill prompts decode calibrate step_times"
    assert {main.__module__.rpartition(".")[2] for _, main, *_ in TABLE} == set(commands.split())
