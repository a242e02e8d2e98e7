"""SIGINT and SIGKILL at random moments of a command's life: documented exit codes, one line, nothing lost.

Every moment is counted from the start of the process, imports included. Afterwards the same command (training: with
--resume) completes and leaves, bit for bit, what a run that nothing interrupted leaves.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.inference import calibrate, decode
from draftsmith.inference.verify.tree import read_tree
from draftsmith.train import distill, medusa, ssm

pytestmark = pytest.mark.whole_runs

ROOT = Path(__file__).parents[2]
ASK = {"prompts": 16, "prompt_tokens": 12, "new_tokens": 40, "batch_size": 4}
ONE = ["--prompt", "import os", "--max-new-tokens", "240", "--threads", "1"]
SEEDS = ["read the file", "import os", "def path value", "print line in config", "return", "for line in file"]


@dataclass
class World:
    """What the commands work on, and the exact results of runs that nothing interrupted."""

    folder: Path
    run: Callable[..., tuple[int, str, str]]  # run_main
    recipe: Path
    rounds: Path
    seeds: Path
    text: str = ""  # what decode.py prints


@pytest.fixture(scope="module")
def world(tiny_lm, tmp_path_factory, run_main):
    folder = tmp_path_factory.mktemp("interrupts")
    before = os.environ["DRAFTSMITH_CACHE"]
    os.environ["DRAFTSMITH_CACHE"] = str(folder / "cache")
    run = {"name": "whole", "output_dir": str(folder / "runs"), "seed": 3}
    training = {
        "run": run,
        "target": {"name": str(tiny_lm)},
        "drafter": {"num_draft_heads": 3},
        "data": {
            "train": [{"source": "package:yaml", "split": "train", "answers": ASK}],
            "validation": [{"source": "package:yaml", "split": "train", "answers": ASK | {"prompts": 8}}],
        },
        "stages": [{"name": "medusa-1", "batch": {"sequences": 4}, "steps": 60, "optim": {"lr": 1e-2}}],
        "precision": {"autocast": "none", "threads": 1},
        "checkpoint": {"every": 10, "keep": 1},
        "evaluate": {"every": 20},
    }
    (folder / "seeds.jsonl").write_text("".join(json.dumps({"turns": [text, text]}) + "\n" for text in SEEDS * 4))
    answering = {
        "run": run | {"output_dir": str(folder / "shards")},
        "target": {"name": str(tiny_lm)},
        "data": {"seeds": [{"source": str(folder / "seeds.jsonl")}]},
        "engine": {"batch_size": 2, "max_length": 250, "threads": 1},
        "decoding": {"mode": "greedy", "max_new_tokens": 40},
    }
    stage = {"batch": {"sequences": 4}, "steps": 20, "optim": {"lr": 1e-2}}
    boosting = training | {
        "run": run | {"name": "ensemble"},
        "drafter": {"layers": [0], "draft_vocab_size": 80},
        "boost": {"tokens": 1, "min_prompts": 1, "unit": "segment"},
        "stages": [{"name": f"ssm-{number}", **stage} for number in range(2)],
    }
    world = World(folder, run_main, *(folder / f"{script}.yaml" for script in ("medusa", "ssm", "distill")))
    world.rounds.write_text(yaml.safe_dump(boosting))
    world.recipe.write_text(yaml.safe_dump(training))
    world.seeds.write_text(yaml.safe_dump(answering))
    for main, *arguments in (
        (medusa.main, world.recipe),
        (distill.main, world.seeds),
        (calibrate.main, folder / "runs/whole"),
        (decode.main, folder / "runs/whole", *ONE),
    ):
        code, world.text, err = run_main(main, *arguments)
        assert code == 0, err
    yield world
    os.environ["DRAFTSMITH_CACHE"] = before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def half_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".tmp" in path.name]


def weights_of(*parts: str) -> list[str]:
    return [f"{part}/model.safetensors" for part in parts]


class Training:
    """train/medusa.py: the artifact, its checkpoints and its metrics are those of the whole run."""

    script, main = "train/medusa.py", medusa.main
    # provenance.json and recipe.yaml hold the command, the card the run's name; metrics.jsonl holds seconds.
    parts = (".", "held_out", "checkpoints/step-60", "checkpoints/best/medusa-1")
    same = ("config.json", "checkpoints/step-60/optimizer.safetensors", *weights_of(*parts))

    def __init__(self, world: World, name: str) -> None:
        self.folder, self.whole = world.folder / "runs" / name, world.folder / "runs/whole"
        self.arguments = [world.recipe, f"run.name={name}"]
        self.again = [*self.arguments, "--resume"]

    def check_between(self, out: str) -> None:
        pass

    def check(self, out: str) -> None:
        for name in self.same:
            assert (self.folder / name).read_bytes() == (self.whole / name).read_bytes(), name
        assert self.taus(self.folder) == self.taus(self.whole)

    @staticmethod
    def taus(folder: Path) -> dict[int, float]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["simulated_tau"] for line in lines if "simulated_tau" in line}


class Boosting(Training):
    """train/ssm.py: every SSM, its marks and the draft vocabulary are those of the whole run."""

    script, main = "train/ssm.py", ssm.main
    same = ("config.json", *weights_of(".", "held_out", "ssm-0", "ssm-1", "marks/0", "marks/1"))

    def __init__(self, world: World, name: str) -> None:
        self.folder, self.whole = world.folder / "runs" / name, world.folder / "runs/ensemble"
        if not self.whole.exists():
            code, _, err = world.run(ssm.main, world.rounds)
            assert code == 0, err
        self.arguments = [world.rounds, f"run.name={name}"]
        self.again = [*self.arguments, "--resume"]


class Answering:
    """train/distill.py: every prompt answered once, each line as in the whole run."""

    script, main = "train/distill.py", distill.main

    def __init__(self, world: World, name: str) -> None:
        self.folder, self.whole = world.folder / "shards" / name, world.folder / "shards/whole"
        self.arguments = self.again = [world.seeds, f"run.name={name}"]

    def check_between(self, out: str) -> None:
        pass

    def check(self, out: str) -> None:
        assert self.lines(self.folder) == self.lines(self.whole)
        counts = json.loads((self.folder / "manifest.json").read_text())["counts"]
        assert counts["done"] == counts["prompts"] == 4 * len(SEEDS)

    @staticmethod
    def lines(folder: Path) -> list[str]:
        return sorted(line for path in folder.glob("shard-*.jsonl") for line in path.read_text().splitlines())


class Calibration:
    """inference/calibrate.py: tree.json is the old one or a whole new one; nothing else in the folder changes."""

    script, main = "inference/calibrate.py", calibrate.main

    def __init__(self, world: World, name: str) -> None:
        self.folder = world.folder / "runs/whole"
        self.before = {name: held for name, held in contents(self.folder).items() if name != "tree.json"}
        prompts = world.folder / "prompts.jsonl"
        prompts.write_text('{"prompt": "import os"}\n')
        self.arguments = self.again = [self.folder, "--prompts", prompts, "--max-new-tokens", "60"]

    def check_between(self, out: str) -> None:
        self.check("")

    def check(self, out: str) -> None:
        assert read_tree(self.folder / "tree.json").num_nodes >= 2
        there = contents(self.folder)
        assert "calibration" in json.loads(there.pop("tree.json"))
        assert {name: held for name, held in there.items() if ".tmp" not in name} == self.before


class Decoding:
    """inference/decode.py: what was printed is the beginning of the text; nothing is written anywhere."""

    script, main = "inference/decode.py", decode.main

    def __init__(self, world: World, name: str) -> None:
        self.folder, self.text = world.folder / "runs/whole", world.text
        self.before = contents(self.folder)
        self.arguments = self.again = [self.folder, *ONE]

    def check_between(self, out: str) -> None:
        assert self.text.startswith(out.removesuffix("\n"))

    def check(self, out: str) -> None:
        assert out == self.text and len(out) > 10
        assert contents(self.folder) == self.before


@dataclass
class Life:
    """How a command ended: its exit code, output, seconds, and seconds from its first output."""

    code: int
    out: str
    err: str
    seconds: float
    working: float


def live(world: World, case: Any, moment: float | None = None, working: bool = False, what: int = 0) -> Life:
    """Run a command; send it a signal ``moment`` seconds after its start, or after its first output."""
    command = [sys.executable, case.script, *case.arguments]
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    out, err = world.folder / "out", world.folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr, env=os.environ | own)
        first = None
        while process.poll() is None:
            now = time.perf_counter()
            if first is None and out.stat().st_size:
                first = now
            since = first if working else began
            if moment is not None and since is not None and now - since >= moment:
                process.send_signal(what)
                process.wait(120)
                break
            time.sleep(0.002)
    end = time.perf_counter()
    texts = (path.read_bytes().decode("utf-8", "replace") for path in (out, err))
    return Life(process.returncode, *texts, end - began, end - (first or end))


def cut(world: World, kind: Any, name: str, moment: float, working: bool, what: signal.Signals) -> str:
    """Send a command a signal at a moment of its life, then run it again; returns how it ended the first time."""
    for attempt in range(6):  # a machine that is less busy than when it was timed is done before the moment comes
        one = kind(world, f"{kind.__name__.lower()}-{name}-{attempt}")
        life = live(world, one, moment * 0.6**attempt, working, what)
        if life.code != 0:
            break
    at = f"{what.name} {moment:.2f} s after {'its first output' if working else 'its start'}: {life.code} {life.err}"
    print(f"{one.script} {at.strip()}")
    if life.code == 0:  # it was over, or all but
        ended = "done already"
    elif what == signal.SIGKILL:
        assert life.code == -signal.SIGKILL, at
        ended = "killed"
    elif life.code == -signal.SIGINT:  # Python itself was starting, and knows nothing of us yet
        assert not working, at
        ended = "interrupted before our first line"
    else:
        assert life.code == 2 and "Traceback" not in life.err, at
        lines = [line for line in life.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and life.err.endswith(lines[0] + "\n"), at
        assert not half_files(one.folder), at
        ended = "interrupted"
    one.check_between(life.out)
    code, out, err = world.run(kind.main, *one.again)
    assert code == 0, f"{at}; then: {err}"
    one.check(out)
    assert not half_files(one.folder), at
    return ended


MOMENTS = [(case, what) for case in (Training, Boosting) for what in (signal.SIGINT, signal.SIGKILL)]


@pytest.mark.parametrize(("case", "what"), [*MOMENTS, (Decoding, signal.SIGINT)])
def test_a_moment_of_its_work(world, case, what):
    """A little after its first output; decoding writes nothing that being killed could leave half. While a command
    still imports: tests/train/test_folders.py."""
    assert cut(world, case, f"once-{what.name}", 0.1, True, what) in ("interrupted", "killed")


@pytest.mark.slow
@pytest.mark.parametrize("case", [Training, Boosting, Answering, Calibration, Decoding])
def test_twenty_moments(world, case):
    """Every other one anywhere in the command's life, the others after its first output."""
    timed = case(world, f"{case.__name__.lower()}-timed")
    whole = live(world, timed)
    assert whole.code == 0, whole.err
    timed.check(whole.out)
    chance, ends = random.Random(0), Counter()
    for number in range(20):
        working = number % 2 == 1
        share = (number // 2 + chance.random()) / 10 * 0.97
        moment = share * (whole.working if working else whole.seconds)
        ended = cut(world, case, f"cut-{number}", moment, working, chance.choice([signal.SIGINT, signal.SIGKILL]))
        assert share < 0.2 or ended != "interrupted before our first line"
        ends[ended] += 1
    print(f"{case.script} ({whole.working:.1f} of {whole.seconds:.1f} s after its first output): {dict(ends)}")
    assert ends["killed"] >= 5 and ends["interrupted"] >= 5
