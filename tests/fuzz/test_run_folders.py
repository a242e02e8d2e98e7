"""Folders that nothing can be written into, and runs in which another command works: one line, and all files in them
stay as they are, whatever the command and its options."""

import contextlib
import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.common.files import check_file, write_json, write_text
from draftsmith.inference import calibrate
from draftsmith.models.artifact import write_drafter
from draftsmith.models.eagle import Eagle
from draftsmith.models.medusa import MedusaHeads
from draftsmith.train import medusa
from draftsmith.train.folders import held

ROOT = Path(__file__).parents[2]
TRAINING = {script: f"tiny-{script}" for script in ("medusa", "eagle", "ssm", "lm", "dynaspec", "distill")}
TRAINING["eagle"] += "3"
_OVERRIDES_MODES = 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def like_a_user() -> Iterator[None]:
    """Inside, the modes of files hold for root, too (in this thread, and in the processes that it starts)."""
    if os.geteuid() or not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, of this thread
    assert libc.capget(header, data) == 0
    before = data[0]
    data[0] = before & ~_OVERRIDES_MODES
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        data[0] = before
        assert libc.capset(header, data) == 0


@contextlib.contextmanager
def read_only(folder: Path, files: bool = True) -> Iterator[None]:
    """Inside, nothing can be made, replaced or deleted in a folder; with ``files``, none of its files be opened for
    writing either."""
    below = [path for path in folder.rglob("*") if files or path.is_dir()]
    modes = {path: path.stat().st_mode for path in (folder, *below)}
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~0o222)
        with like_a_user():
            with pytest.raises(PermissionError):
                (folder / "new").touch()  # or it would test nothing
            yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def tree(*folders: Path) -> dict[Path, tuple[int, int, bytes]]:
    """All that is in folders: mode, time and content."""
    found = {}
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            stat = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[path] = stat.st_mode, stat.st_mtime_ns if path.is_file() else 0, content
    return found


def main_of(script: str):
    return importlib.import_module(f"draftsmith.train.{script}").main


def make_run(folder: Path, script: str) -> Path:
    """What a run of a script leaves: its mark and lock, a checkpoint, a drafter; of distill.py, answers."""
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    write_json(folder / ".run", {"kind": script})
    if script == "distill":
        write_json(folder / "manifest.json", {"decides": {}})
        (folder / "shard-00000.jsonl").write_text('{"id": "a", "messages": [], "finish_reason": []}\n')
        return folder
    for name in ("checkpoints/step-1/state.json", "checkpoints/best/x/model.safetensors", "answers/train-0/asked.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    for name in ("config.json", "metrics.jsonl", "model.safetensors", "tree.json", "prompts.jsonl"):
        (folder / name).write_text("{}\n")
    return folder


def one_line(done: tuple[int, str, str], *said: str) -> None:
    code, out, err = done
    assert (code, out) == (2, ""), (out, err)
    *above, last = err.splitlines()
    assert last.startswith("error: ") and all(part in last for part in said), err
    assert all(line.startswith("precision: ") for line in above), err


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folders of a user: where a command runs, the home, the cache, and where runs are."""
    for name in ("here", "home", "cache", "runs"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here/prompts.jsonl").write_text('{"prompt": "import os"}\n')
    return tmp_path


# ---- nothing can be written


@pytest.mark.parametrize("options", [["--resume"], ["--restart"], []], ids=" ".join)
@pytest.mark.parametrize("files", [True, False], ids=["and its files", "not its files"])
@pytest.mark.parametrize("script", TRAINING)
def test_a_run_that_cannot_be_written(places, run_main, script, files, options):
    folder = make_run(places / "runs/x", script)
    recipe = [ROOT / f"recipes/{TRAINING[script]}.yaml", f"run.output_dir={places / 'runs'}", "run.name=x"]
    before = tree(places)
    with read_only(folder, files):
        done = run_main(main_of(script), *recipe, *options)
    one_line(done, str(folder))
    assert "cannot write" in done[2] or (not options and "holds a finished run" in done[2]), done
    assert tree(places) == before


def test_a_run_of_which_a_part_cannot_be_deleted(places, run_main):
    """--restart begins with nothing deleted, not with a drafter that is gone."""
    folder = make_run(places / "runs/x", "medusa")
    before = tree(places)
    with read_only(folder / "checkpoints"):
        recipe = [ROOT / "recipes/tiny-medusa.yaml", f"run.output_dir={places / 'runs'}", "run.name=x"]
        done = run_main(main_of("medusa"), *recipe, "--restart")
    one_line(done, str(folder / "checkpoints"), "cannot be emptied")
    assert tree(places) == before


@pytest.mark.parametrize("script", TRAINING)
def test_a_run_where_nothing_can_be_made(places, run_main, script):
    before = tree(places)
    recipe = [ROOT / f"recipes/{TRAINING[script]}.yaml", f"run.output_dir={places / 'runs/new'}", "run.name=x"]
    with read_only(places / "runs"):
        for options in ([], ["--resume"], ["--restart"], ["--tiny"]):
            one_line(run_main(main_of(script), *recipe, *options), str(places / "runs"), "cannot write")
    assert tree(places) == before


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    """``drafters["medusa"]``, ``drafters["eagle"]``: folders of drafters for the tiny target."""
    torch.manual_seed(0)
    modules = {"medusa": MedusaHeads.for_target(target, 2, 1, "shared"), "eagle": Eagle.for_target(target, 1, "shared")}
    found = {}
    for family, module in modules.items():
        folder = found[family] = tmp_path_factory.mktemp("drafters") / family
        write_drafter(folder, family, module.config.to_dict(), module.state_dict(), target, {})
        write_json(folder / "tree.json", {"paths": [[0], [0, 0]]})
    return found


DECODE = ["--target", "TARGET", "--max-new-tokens", "4", "--threads", "1"]
PROMPTS = ["--prompts", "prompts.jsonl"]
RECIPE = f"{ROOT}/recipes/tiny-medusa2.yaml"
# What writes: its module, its command line with OUT, and OUT below the folder that cannot be written.
WRITERS = {
    "a tree": ("inference.calibrate", ["OUT", *PROMPTS, "--target", "TARGET", "--seconds", "1"], "medusa"),
    "a tree of a merge": ("inference.calibrate", ["OUT+ngram", *PROMPTS, "--target", "TARGET"], "medusa"),
    "a report": ("inference.decode", ["none", *PROMPTS, *DECODE, "--report", "OUT"], "."),
    "a report in a new folder": ("inference.decode", ["none", *PROMPTS, *DECODE, "--report", "OUT"], "new/folder"),
    "a report in a run": ("inference.decode", ["MEDUSA", *PROMPTS, *DECODE, "--report", "OUT"], "medusa"),
    "answers": ("inference.decode", ["none", *PROMPTS, *DECODE, "--answers", "OUT"], "new/a.jsonl"),
    "a drafter's report": ("inference.decode", ["MEDUSA", "--prompt", "a", *DECODE, "--report", "OUT"], "medusa"),
    "a served drafter": ("models.export", ["EAGLE", "--to", "sglang", "--target", "TARGET", "--out", "OUT"], "served"),
    "a served one again": ("models.export", ["EAGLE", "--to", "sglang", "--target", "TARGET", "--out", "OUT"], "again"),
    "prompts": ("data.prompts", ["stdlib", "--tokenizer", "TARGET", "--count", "2", "--out", "OUT"], "p.jsonl"),
    "prompts again": ("data.prompts", ["stdlib", "--tokenizer", "TARGET", "--count", "2", "--out", "OUT"], "old.jsonl"),
    "evaluation prompts": ("data.prompts", ["rare", "--count", "2", "--out", "OUT"], "p.jsonl"),
    "clean rows": ("tools.overlap", ["prompts.jsonl", "--clean", "OUT"], "clean.jsonl"),
    "hashes": ("tools.overlap", ["prompts.jsonl", "--save", "OUT"], "hashes.safetensors"),
    "a model": ("models.fetch", ["--out", "OUT"], "smollm2"),
    "typical": ("benchmarks.typical", ["ngram", *PROMPTS, "--target", "TARGET", "--out", "OUT"], "typical"),
    "step_times": ("benchmarks.step_times", ["--target", "TARGET", "--nodes", "1", "--out", "OUT"], "x.json"),
    "a profile": ("benchmarks.step_times", ["--target", "TARGET", "--nodes", "1", "--profile", "OUT"], "x.txt"),
    "serving": ("benchmarks.serving", ["ngram", *PROMPTS, "--target", "TARGET", "--out", "OUT"], "x.json"),
    "medusa_stages": ("benchmarks.medusa_stages", [*PROMPTS, "--recipe", RECIPE, "--out", "OUT"], "runs"),
}


@pytest.mark.parametrize("module, words, below", WRITERS.values(), ids=WRITERS)
def test_an_output_that_cannot_be_written(places, tiny_lm, drafters, run_main, monkeypatch, module, words, below):
    folder = make_run(places / "runs/x", "medusa")
    check_file("--out", folder / "old.jsonl", ".jsonl")
    write_text(folder / "old.jsonl", "ours\n")
    (folder / "again").mkdir()
    write_json(folder / "again/provenance.json", {"max_logit_difference": 0.0})
    shutil.copytree(drafters["medusa"], folder / "medusa")
    monkeypatch.chdir(places / "here")
    names = {"TARGET": tiny_lm, "MEDUSA": drafters["medusa"], "EAGLE": drafters["eagle"]}
    names |= {"OUT": folder / below, "OUT+ngram": f"{folder / below}+ngram"}
    before, began = tree(places, drafters["medusa"], drafters["eagle"], tiny_lm), time.monotonic()
    main = importlib.import_module(f"draftsmith.{module}").main
    with read_only(folder):
        done = run_main(main, *(names.get(word, word) for word in words))
    one_line(done, str(folder), "cannot write")
    assert tree(places, drafters["medusa"], drafters["eagle"], tiny_lm) == before
    assert time.monotonic() - began < 20


# ---- another command works there


@pytest.mark.parametrize("options", [["--resume"], ["--restart"], [], ["--tiny"], ["--dry-run"]], ids=" ".join)
@pytest.mark.parametrize("script", TRAINING)
def test_a_run_in_which_another_command_works(places, run_main, script, options):
    """The folder of --tiny and that of --dry-run have names of their own; the latter is deleted in the end, but not
    while it is another command's. (distill.py --dry-run writes nothing.)"""
    recipe = ROOT / f"recipes/{TRAINING[script]}.yaml"
    small = {"--tiny": "x-tiny", "--dry-run": "x-dry-run"}
    folder = make_run(places / "runs" / small.get("".join(options), "x"), script)
    with held(folder, script):
        before = tree(places)
        code, out, err = run_main(main_of(script), recipe, f"run.output_dir={places / 'runs'}", "run.name=x", *options)
        assert tree(places) == before
    if options == ["--dry-run"] and script == "distill":
        assert code == 0, err
        return
    assert options == ["--dry-run"] or not out
    assert (code, err) == (
        2,
        f"error: {folder}: another command is working in this run; wait for it, or set run.name\n",
    )


@pytest.mark.parametrize("name", ["{}", "{}+ngram"])
def test_calibrating_where_another_command_works(places, tiny_lm, drafters, run_main, name):
    folder = shutil.copytree(drafters["medusa"], places / "runs/x")
    write_json(folder / ".run", {"kind": "medusa"})
    with held(folder, "medusa"):
        before = tree(places)
        done = run_main(calibrate.main, name.format(folder), *PROMPTS, "--target", tiny_lm)
        assert tree(places) == before
    assert done == (2, "", f"error: {folder}: another command is working in this run; wait until it has ended\n")


@pytest.fixture(scope="module")
def recipe(tiny_lm, tmp_path_factory):
    """A run of some seconds, with a checkpoint every few steps."""
    folder = tmp_path_factory.mktemp("live")
    source = {"source": str(folder / "text.txt")}
    (folder / "text.txt").write_text("import os\ndef read(path):\n    return path\n" * 40)
    stage = {"batch": {"sequences": 2}, "steps": 60, "optim": {"lr": 1e-3}}
    content = {
        "run": {"name": "x", "output_dir": str(folder / "runs")},
        "target": {"name": str(tiny_lm)},
        "drafter": {"num_draft_heads": 2},
        "data": {"train": [source], "validation": [source], "max_length": 64},
        "stages": [stage],
        "precision": {"autocast": "none", "threads": 1},
        "checkpoint": {"every": 5, "keep": 2},
        "evaluate": {"every": 20},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml"


@pytest.mark.whole_runs
def test_two_live_runs(recipe, run_main, monkeypatch):
    """A run that trains, halted after a checkpoint: all others are refused; then it ends as if nobody had come."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(recipe.parent / "cache"))
    assert run_main(medusa.main, recipe, "run.name=alone")[0] == 0
    folder = recipe.parent / "runs/x"
    command = [sys.executable, "train/medusa.py", recipe]
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not list(folder.glob("checkpoints/step-*")):
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.01)
        running.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        before = tree(folder)
        assert not (folder / "model.safetensors").exists(), "it is still training"
        for options in ([], ["--resume"], ["--restart"]):
            one_line(run_main(medusa.main, recipe, *options), f"{folder}: another command is working in this run")
        for script in set(TRAINING) - {"medusa"}:
            words = [ROOT / f"recipes/{TRAINING[script]}.yaml", f"run.output_dir={folder.parent}", "run.name=x"]
            one_line(run_main(main_of(script), *words, "--restart"), f"{folder}: is a run of train/medusa.py")
        one_line(run_main(calibrate.main, folder), "training has not finished")
        assert tree(folder) == before
    finally:
        running.send_signal(signal.SIGCONT)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    for name in ("model.safetensors", "held_out/model.safetensors", "checkpoints/step-60/model.safetensors"):
        assert (folder / name).read_bytes() == (recipe.parent / "runs/alone" / name).read_bytes(), name
