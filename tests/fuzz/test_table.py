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
train/test_distill.py; full disks: common/test_files.py; rows: data/test_rows.py; templates: data/test_chat.py.
"""

import json
import re
import shutil
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

    def copy(self, of: Path, edit: Callable[[Path], object]) -> Path:
        """A copy of a model's or drafter's folder, edited."""
        folder = Path(shutil.copytree(of, self.tmp / "copy"))
        edit(folder)
        return folder

    def config(self, of: Path, change: Callable[[dict[str, Any]], object]) -> Path:
        """A copy of a folder with its config.json changed."""

        def edit(folder: Path) -> None:
            content = json.loads((folder / "config.json").read_text())
            change(content)
            (folder / "config.json").write_text(json.dumps(content))

        return self.copy(of, edit)

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


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def loop(world: World, name: str = "loop") -> Path:
    (world.tmp / name).symlink_to(world.tmp / name)
    return world.tmp / name


def bomb() -> str:
    """Ten levels of ten aliases."""
    levels = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    return "\n".join(levels)


DECODE = ["--max-new-tokens", "4", "--device", "cpu", "--threads", "1"]
DEEP = "[" * 100_000 + "]" * 100_000
decoding: Callable[[str], Any] = lambda *options: lambda w: [w.drafter, "--prompt", "a", *DECODE, *options]  # noqa: E731
prompted: Callable[[Any], Any] = lambda text: lambda w: [w.drafter, "--prompts", w.prompts(text), *DECODE]  # noqa: E731
training: Callable[..., Any] = lambda *overrides: lambda w: [w.recipe(), *overrides]  # noqa: E731
written: Callable[[str], Any] = lambda text: lambda w: [w.recipe(text=text)]  # noqa: E731


def of_target(change: Callable[[dict[str, Any]], object]) -> Callable[[World], list[Any]]:
    """Plain decoding with a target whose config is changed."""
    return lambda w: ["none", "--target", w.config(w.target, change), "--prompt", "a", *DECODE]


def of_files(edit: Callable[[Path], object]) -> Callable[[World], list[Any]]:
    """Plain decoding with a target whose files are changed."""
    return lambda w: ["none", "--target", w.copy(w.target, edit), "--prompt", "a", *DECODE]


def of_drafter(change: Callable[[dict[str, Any]], object]) -> Callable[[World], list[Any]]:
    return lambda w: [w.config(w.drafter, change), "--prompt", "a", *DECODE]


def of_tree(text: str) -> Callable[[World], list[Any]]:
    return lambda w: [w.drafter, "--prompt", "a", "--tree", w.file("tree.json", text), *DECODE]


def seeds(content: str | bytes, name: str = "seeds.jsonl") -> Callable[[World], list[Any]]:
    return lambda w: [w.recipe("distill", data={"seeds": [{"source": str(w.file(name, content))}]}), "--dry-run"]


def rows(content: str | bytes, name: str = "odd.jsonl") -> Callable[[World], list[Any]]:
    return lambda w: [w.recipe(), f"data.train=[{{source: {w.file(name, content)}}}]"]


# name, command, its arguments, exit code, what is said
TABLE: list[tuple[str, Callable[[], None], Callable[[World], list[Any]], int, str]] = [
    # run folders
    ("a name that leads out", medusa.main, training("run.name=.."), 2, "'run.name': the run's folder has to be inside"),
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
    ("a device that is none", decode.main, decoding("--device", "cudda"), 2, "device 'cudda'"),
    ("a device that is not there", decode.main, decoding("--device", "cuda:99"), 2, "cuda:99"),
    ("no device", decode.main, decoding("--device", ""), 2, "device ''"),
    ("calibrate: a device", calibrate.main, lambda w: [w.drafter, "--device", "gpu"], 2, "device 'gpu'"),
    ("bench: a device", bench.main, lambda w: ["--target", w.target, "--device", "gpu"], 2, "device 'gpu'"),
    # command lines
    ("top-k of 22 digits: all", decode.main, decoding("--mode", "sample", "--top-k", str(10**21)), 0, "ended by"),
    ("sampling in greedy mode", decode.main, decoding("--top-p", "0.5", "--mode", "greedy"), 2,
     "--top-p needs --mode sample"),
    ("a batch of 10¹²", decode.main, decoding("--batch-size", str(10**12)), 2, "--batch-size 1000000000000: must be"),
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
    ("a list as key", medusa.main, written("? [a, b]\n: 1\n"), 2, "a key is a word"),
    ("a date", medusa.main, written("2024-01-01: 1\n"), 2, "unknown key '2024-01-01'"),
    ("a date for a number", medusa.main, training("stages.0.steps=2024-01-01"), 2,
     "'stages.0.steps': input should be a valid integer"),
    ("deep nesting", medusa.main, written("x: " + "[" * 5000), 2, "recipe.yaml"),
    ("an alias bomb", medusa.main, written(bomb()), 2, "more than 10,000 values"),
    ("a tag", medusa.main, written("x: !!python/object/apply:os.system [ls]\n"), 2, "are not supported"),
    ("a binary tag", medusa.main, written("x: !!binary aGVsbG8=\n"), 2, "tags (!!binary) are not supported"),
    ("half a pair", medusa.main, written('x: "\\ud800"\n'), 2, "half of a surrogate pair"),
    ("a merge key", medusa.main, written("a: &a {b: 1}\nx:\n  <<: *a\n"), 2, "merge keys (<<) are not supported"),
    ("an anchor that is none", medusa.main, written("x: *nowhere\n"), 2, "found undefined alias 'nowhere'"),
    ("a key given twice", medusa.main, written("steps: 3\n"), 2, "steps"),
    ("two documents", medusa.main, written("---\nx: 1\n"), 2, "recipe.yaml"),
    ("no UTF-8", medusa.main, lambda w: [w.file("x.yaml", b"run: \xff\xfe\x00")], 2, "not UTF-8 text"),
    ("a folder", medusa.main, lambda w: [w.tmp], 2, "this is a folder; a recipe is needed"),
    ("a loop of links", medusa.main, lambda w: [loop(w)], 2, "a link that leads nowhere"),
    ("a device as recipe", medusa.main, lambda w: ["/dev/zero"], 2, "/dev/zero: not a file"),
    ("an empty recipe", medusa.main, lambda w: [w.file("x.yaml", "")], 2, "got nothing"),
    ("JSON too deep", medusa.main, lambda w: [w.file("x.yaml", DEEP)], 2, "x.yaml"),
    ("another optimizer", medusa.main, training("stages.0.optim.name=sgd"), 2, "'stages.0.optim.name'"),
    ("a batch of 10⁹", medusa.main, training("stages.0.batch.sequences=1000000000"), 2, "'stages.0.batch.sequences'"),
    ("a negative limit", medusa.main, training("data.train.0.limit=-1"), 2, "'data.train.0.limit'"),
    ("a weight of 0", medusa.main, training("data.train.0.weight=0"), 2, "'data.train.0.weight'"),
    ("a weight of nan", medusa.main, training("data.train.0.weight=.nan"), 2, "'data.train.0.weight'"),
    ("a seed of 2⁶³", medusa.main, training(f"run.seed={1 << 63}"), 2, "'run.seed'"),
    ("a learning rate of inf", medusa.main, training("stages.0.optim.lr=.inf"), 2, "'stages.0.optim.lr'"),
    ("betas of 1", medusa.main, training("stages.0.optim.betas=[1, 1]"), 2, "'stages.0.optim.betas"),
    ("one row of 10⁹ tokens", medusa.main, training("data.max_length=1000000000"), 2, "'data.max_length'"),
    ("a package elsewhere", medusa.main, training("data.train.0.source=package:../x"), 2, "after 'package:' comes"),
    ("heads to begin with", medusa.main, training("init_from=/nowhere"), 2, "/nowhere"),
    ("no Hub id", medusa.main, training("export.push_to_hub=a"), 2, "a Hub id is USER/NAME"),
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
    ("no prompts", decode.main, prompted(""), 2, "prompts.jsonl: holds no prompt"),
    ("a truncated line", decode.main, prompted('{"prompt": "a"}\n{"prom'), 2, "prompts.jsonl:2: not valid JSON"),
    ("a prompt of null", decode.main, prompted('{"prompt": null}'), 2, "prompts.jsonl:1: it has nothing; needed"),
    ("a prompt of 3", decode.main, prompted('{"prompt": 3}'), 2, "prompts.jsonl:1: prompt is a number"),
    ("an image", decode.main,
     prompted('{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}'), 2,
     "a turn's 'content' is a list"),
    ("an unknown role", decode.main, prompted('{"messages": [{"role": "bard", "content": "a"}]}'), 2,
     "a turn has an unknown role"),
    ("no content", decode.main, prompted('{"messages": [{"role": "user", "content": null}]}'), 2,
     "a turn's 'content' is null"),
    ("half a pair in a prompt", decode.main, prompted('{"prompt": "\\ud800"}'), 2, "half of a surrogate pair"),
    ("a deep prompt", decode.main, prompted(f'{{"prompt": {DEEP}}}'), 2, "prompts.jsonl:1: JSON nested too deeply"),
    ("prompts in latin-1", decode.main, prompted('{"prompt": "é"}'.encode("latin-1")), 2, "not UTF-8 text"),
    ("prompts behind a mark", decode.main, prompted(b'\xef\xbb\xbf{"prompt": "a"}'), 0, "1 prompt by"),
    ("prompts in a loop", decode.main, lambda w: [w.drafter, "--prompts", loop(w), *DECODE], 2, "loop"),
    ("prompts in a folder", decode.main, lambda w: [w.drafter, "--prompts", w.tmp, *DECODE], 2, "this is a folder"),
    # targets
    ("no weights", decode.main, of_files(remove("model.safetensors")), 2, "no weights here"),
    ("no tokenizer", decode.main, of_files(remove("tokenizer.json")), 2, "no tokenizer"),
    ("no config", decode.main, of_files(remove("config.json")), 2, "config.json"),
    ("an unknown family", decode.main, of_target(lambda c: c.update(model_type="x")), 2, "knows no model_type 'x'"),
    ("no family", decode.main, of_target(lambda c: c.pop("model_type")), 2, "no model_type here"),
    ("five heads", decode.main, of_target(lambda c: c.update(num_attention_heads=5)), 2, "copy"),
    ("no heads", decode.main, of_target(lambda c: c.update(num_attention_heads=0)), 2, "config.json"),
    ("10⁹ words", decode.main, of_target(lambda c: c.update(vocab_size=10**9)), 2, "weights of another shape"),
    ("no words", decode.main, of_target(lambda c: c.update(vocab_size=0)), 2, "no model can be made of it"),
    ("10⁹ layers", decode.main, of_target(lambda c: c.update(num_hidden_layers=10**9)), 2, "num_hidden_layers"),
    ("a deep config", decode.main, of_files(write("config.json", DEEP)), 2, "nested too deeply"),
    ("a tokenizer that is none", decode.main, of_files(write("tokenizer.json", "{")), 2, "tokenizer"),
    ("a target in a loop", decode.main, lambda w: ["none", "--target", loop(w), "--prompt", "a"], 2, "loop"),
    # drafters
    ("no target", decode.main, of_drafter(lambda c: c.pop("target")), 2, "field 'target' is None"),
    ("a list for a target", decode.main, of_drafter(lambda c: c.update(target=["x"])), 2, "field 'target' is ['x']"),
    ("another target", decode.main, of_drafter(lambda c: c["target"].update(fingerprint="0" * 64)), 0, "other weights"),
    ("no fingerprint", decode.main, of_drafter(lambda c: c["target"].pop("fingerprint")), 2, "no target.fingerprint"),
    ("10⁹ heads", decode.main, of_drafter(lambda c: c.update(num_draft_heads=10**9)), 2, "config.json promises"),
    ("a target as drafter", decode.main, lambda w: [w.target, "--prompt", "a", *DECODE], 2, "this is a model, not a"),
    ("no drafter", decode.main, lambda w: [w.tmp / "x", "--prompt", "a", *DECODE], 2, "there is no such folder"),
    ("no tree", decode.main, lambda w: [w.copy(w.drafter, remove("tree.json")), "--prompt", "a"], 2, "no tree.json"),
    # trees
    ("a tree of text", decode.main, of_tree("x"), 2, "neither JSON"),
    ("a deep tree", decode.main, of_tree(DEEP), 2, "tree.json"),
    ("a path without its parent", decode.main, of_tree("[[0], [1, 0]]"), 2, "path [1, 0] has no parent"),
    ("a tree deeper than the heads", decode.main, of_tree("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]"), 2,
     "the tree is 4 deep"),
    ("a rank beyond the words", decode.main, of_tree("[[300]]"), 2, "rank 300 of a vocabulary of 300"),
    ("10⁵ nodes", decode.main, of_tree(json.dumps([[n] for n in range(100_000)])), 2, "at most 4096"),
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
