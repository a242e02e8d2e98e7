"""The folder of a run: whose it is, that one command at a time works in it, what --restart deletes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import save_file
from training_runs import Runs

from draftsmith.common.recipe import write_recipe
from draftsmith.train import checkpoint, folders, lm, medusa, run
from draftsmith.train.folders import begin, held

ROOT = Path(__file__).parents[2]


def make_checkpoint(folder: Path, step: int) -> None:
    place = folder / "checkpoints" / f"step-{step}"
    place.mkdir(parents=True)
    (place / "state.json").write_text("{}")


def enter(folder: Path, kind: str) -> None:
    """A command that does nothing in the folder."""
    with held(folder, kind):
        pass


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_run(tmp_path):
    folder = tmp_path / "a/b"
    (folder / "features/0").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is no run but holds other things \(features\)"):
        enter(folder, "medusa")  # somebody's, which it would delete
    (folder / "features/0/asked.json").touch()  # another run's, to save time
    with held(folder, "medusa"):
        assert begin(folder, False, False) is False
        assert begin(folder, True, False) is False, "nothing there: it begins"
    assert json.loads((folder / ".run").read_text()) == {"kind": "medusa"}
    enter(folder, "medusa")
    with pytest.raises(ValueError, match=r"is a run of train/medusa\.py; train/lm\.py"):
        enter(folder, "lm")


def test_a_run_is_resumed_or_restarted_or_refused(tmp_path):
    make_checkpoint(tmp_path, 4)
    with pytest.raises(ValueError, match=r"holds an unfinished run at step-4; pass --resume .* --restart .*run\.name"):
        begin(tmp_path, False, False)
    with pytest.raises(ValueError, match="--resume and --restart exclude each other"):
        begin(tmp_path, True, True)
    assert begin(tmp_path, True, False) is True
    assert begin(tmp_path, True, False, main=False) is True
    for name in ("held_out", "tensorboard"):
        (tmp_path / name).mkdir()
    for name in ("model.safetensors", "metrics.jsonl", "prompts.jsonl", "checkpoints/notes", "wandb_id", "held_out/x"):
        (tmp_path / name).touch()
    (tmp_path / "checkpoints/.step-5.tmp").mkdir()
    with pytest.raises(ValueError, match="holds a finished run; pass"):
        begin(tmp_path, False, False)
    assert begin(tmp_path, False, True) is False
    assert names(tmp_path) == {"prompts.jsonl", "checkpoints"}, "what is no part of the run stays"
    assert names(tmp_path / "checkpoints") == {"notes"}
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="a finished run without checkpoints; pass --restart"):
        begin(tmp_path, True, False)


def old_run(folder: Path, script: str) -> None:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(f"# accelerate launch train/{script}.py x.yaml\nrun: {{}}\n")


def test_a_run_that_ended_before_its_first_checkpoint_leaves_no_lines(tmp_path):
    """What the next one makes anew; answers and hidden states, which say what they were made for, stay."""
    for resume in (False, True):
        for name in (
            "metrics.jsonl",
            "training.html",
            "wandb_id",
            "streams/0.json",
            "tensorboard/x",
            "answers/0.jsonl",
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("{}")
        assert not begin(tmp_path, resume, False)
        assert [path.name for path in tmp_path.iterdir()] == ["answers"] and list((tmp_path / "answers").iterdir())


def test_anything_else_is_refused_and_not_touched(tmp_path):
    old_run(tmp_path / "model", "lm")  # as models/tiny-lm: a model folder with its recipe, no checkpoints
    (tmp_path / "project").mkdir()
    for name in ("README.md", "a", "b", "manifest.json"):
        (tmp_path / "project" / name).write_text("[]")
    before = sorted(tmp_path.rglob("*"))
    for folder, files in (("project", r"README\.md, a, b, …"), ("model", r"recipe\.yaml"), (".", "model, project")):
        wanted = rf"is no run but holds other things \({files}\); train/lm\.py .*run\.name"
        with pytest.raises(ValueError, match=wanted):
            enter(tmp_path / folder, "lm")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_and_loops_are_not_folders(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        with pytest.raises(OSError):
            enter(tmp_path / name, "lm")
        (tmp_path / f"run-{name}").mkdir()
        (tmp_path / f"run-{name}/checkpoints").symlink_to(tmp_path / name)
        for options in ((True, False), (False, False)):
            with pytest.raises(OSError):
                begin(tmp_path / f"run-{name}", *options)


@pytest.mark.parametrize(
    "name", ["checkpoints", "answers", "part", "adapter", "features", "streams", "held_out", "tensorboard"]
)
def test_restart_follows_no_links(tmp_path, name):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    make_checkpoint(elsewhere, 3)
    (elsewhere / "x").mkdir()
    (elsewhere / "x/model.safetensors").touch()
    folder.mkdir()
    (folder / name).symlink_to(elsewhere)
    (folder / "model.safetensors").touch()
    config = {"drafter_type": "x", "parts": ["part"], "target": {"name_or_path": "t", "adapter": "adapter"}}
    (folder / "config.json").write_text(json.dumps(config))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"{name}: a link; --restart deletes nothing outside"):
        begin(folder, False, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_restart_follows_no_links_further_inside(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").touch()
    for place in ("checkpoints", "answers"):
        (folder / place).mkdir(parents=True)
    for link in ("checkpoints/step-3", "checkpoints/best", "answers/train-0", "metrics.jsonl"):
        (folder / link).symlink_to(elsewhere if "." not in link else elsewhere / "model.safetensors")
    assert begin(folder, False, True) is False
    assert names(elsewhere) == {"model.safetensors"}
    assert names(folder) == {"answers"}


def test_a_killed_removal_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)

    def killed(path, **options):
        if Path(path).exists():
            raise SystemExit

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(SystemExit):
        begin(tmp_path, False, True)
    monkeypatch.undo()
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-2"]
    assert begin(tmp_path, False, True) is False
    assert names(tmp_path) == set()


def test_a_run_goes_on_with_the_drafter_and_the_data_that_it_began_with(tmp_path):
    """Sections and free mappings count, set or not, and what an older version did not have; other sections do not."""
    ask = {"prompts": 4, "prompt_tokens": 8, "new_tokens": 8}

    def begin_with(data, **sections):
        recipe = recipe_of(run={"name": "x", "output_dir": str(tmp_path)}, data=data, **sections)
        write_recipe(recipe, recipe.run.folder / "recipe.yaml", "")
        return recipe

    def said(before, now, **sections):
        recipe = begin_with(now, **sections)
        begin_with(before)
        with pytest.raises(ValueError) as error:
            folders.check_unchanged(recipe)
        return (
            str(error.value)
            .removeprefix(f"{tmp_path / 'x'}: it began with ")
            .removesuffix("; set it back, or --restart")
        )

    (tmp_path / "x").mkdir()
    plain, answered = data_of(), data_of(train=[{"source": "stdlib", "answers": ask}])
    shown = "{batch_size: 64, new_tokens: 8, prompt_tokens: 8, prompts: 4}"
    assert said(plain, answered) == f"data.train.0.answers=null, not {shown}"
    assert said(answered, plain) == f"data.train.0.answers={shown}, not null"
    quiet = data_of(template_arguments={"enable_thinking": False})
    assert said(plain, quiet) == "data.template_arguments={}, not {enable_thinking: false}"
    assert said(quiet, plain) == "data.template_arguments={enable_thinking: false}, not {}"
    assert said(plain, data_of(train=[{"source": "stdlib"}] * 2)).startswith("data.train=[{")
    assert said(plain, plain, drafter={"num_layers": 2}) == "drafter.num_layers=1, not 2"
    recipe = begin_with(answered, evaluate={"every": 3})
    folders.check_unchanged(recipe.model_copy(update={"evaluate": recipe_of().evaluate}))
    file = tmp_path / "x/recipe.yaml"
    older = yaml.safe_load(file.read_text())
    del older["data"]["template_arguments"], older["data"]["train"][0]["answers"]["batch_size"]
    del older["drafter"]["draft_vocab_size"]
    file.write_text(yaml.safe_dump(older | {"data": older["data"] | {"no_longer": 1}}))
    folders.check_unchanged(recipe)
    for free in ({"workers": 2}, {"max_skipped": 0.5, "max_unsupervised": 0.5}):  # which let a stopped run go on
        folders.check_unchanged(recipe.model_copy(update={"data": recipe.data.model_copy(update=free)}))
    (was, now), data = ("{}", "{enable_thinking: false}"), recipe.data
    changed = data.model_copy(update={"template_arguments": {"enable_thinking": False}})
    with pytest.raises(ValueError, match=f"began with data.template_arguments={was}, not {now};"):
        folders.check_unchanged(recipe.model_copy(update={"data": changed}))
    file.write_text("")
    folders.check_unchanged(recipe)


# ---- the real commands


BLOCKED = """
import runpy, sys

slow, *sys.argv = sys.argv[1:]

class Block:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in slow.split():
            raise SystemExit(f"{name} is imported for --help")

sys.meta_path.insert(0, Block())
sys.path.insert(0, "train")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "script",
    [
        *(f"data/{name}.py" for name in ("prompts", "preview")),
        *(f"train/{name}.py" for name in ("medusa", "lm", "distill")),
        *(f"benchmarks/{name}.py" for name in ("medusa_step", "train_step", "medusa_stages", "unroll", "serving")),
    ],
)
@pytest.mark.parametrize("argument, code", [("--help", 0), ("--no-such-option", 2)])
def test_help_imports_nothing_slow(script, argument, code):
    slow = "torch transformers accelerate datasets numpy" + " rich pydantic" * (not script.startswith("data/"))
    command = [sys.executable, "-c", BLOCKED, slow, script, argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: there is no option --no-such-option") if code else "usage:" in done.stdout


@pytest.mark.whole_runs
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says which libraries a process has loaded")
@pytest.mark.parametrize(
    "script, library", [("medusa", "libtorch_python"), ("medusa", "tokenizers"), ("distill", "libtorch_python")]
)
def test_ctrl_c_while_importing(tmp_path, script, library):
    """When torch's library has just been loaded, or that of transformers' tokenizers, however long that takes."""
    command = [sys.executable, f"train/{script}.py", ROOT / f"recipes/tiny-{script}.yaml", f"run.output_dir={tmp_path}"]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while library not in Path(f"/proc/{started.pid}/maps").read_text():
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=300)
    assert (started.returncode, err) == (2, "error: interrupted; nothing was written yet\n")


# ---- said early


STAGE = {"optim": {"lr": 1e-3}, "batch": {"sequences": 1}, "steps": 3}


def data_of(**fields):
    return {"train": [{"source": "stdlib"}], "validation": [{"source": "stdlib"}], **fields}


def recipe_of(**sections):
    content = {"run": {"name": "x"}, "target": {"name": "t"}, "data": data_of(), "drafter": {}, "stages": [STAGE]}
    return medusa.MedusaRecipe.model_validate({**content, **sections})


def needs(field, package):
    return f"{field} needs another package: pip install {package}"


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"track": {"wandb": True}}, needs("track.wandb", "wandb")),
        ({"track": {"tensorboard": True}}, needs("track.tensorboard", "tensorboard")),
        ({"stages": [{**STAGE, "optim": {"lr": 1e-3, "eight_bit": True}}]}, needs("optim.eight_bit", "bitsandbytes")),
        ({"target": {"name": "t", "quantize": "8bit"}}, needs("target.quantize", "bitsandbytes")),
    ],
)
def test_what_is_missing(sections, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    recipe = recipe_of(**sections)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        folders.check(recipe, recipe.stages)
    folders.check(recipe_of(), recipe_of().stages)


def test_checkpoints_that_cannot_fit(tmp_path, monkeypatch):
    def room(steps=30, **checkpoints):
        recipe = recipe_of(checkpoint={"every": 10, "keep": 1, **checkpoints}, stages=[{**STAGE, "steps": steps}])
        folders.check_room(tmp_path, 1000, recipe, recipe.stages[0])

    def free(count):
        monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=count))

    # Weights, two moments, the best weights, of two checkpoints: a new one comes before the oldest goes; and the best.
    free(36_000)
    room()
    free(35_999)
    with pytest.raises(ValueError, match=r"2 checkpoints of 0 M .* 0\.0 GB are free; free some, lower"):
        room()
    room(steps=10)  # writes one
    make_checkpoint(tmp_path, 1)  # its two bytes are free again
    room()


def test_what_to_begin_with_is_checked_before_the_target_is_loaded(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(run, "load_target", None)
    medusa_runs = Runs(medusa.main, ROOT / "recipes/tiny-medusa.yaml", run_main)
    lm_runs = Runs(lm.main, ROOT / "recipes/tiny-lm.yaml", run_main)
    heads = {"drafter_type": "medusa", "num_draft_heads": 3, "num_layers": 1, "projection": "own"}
    wrong = {
        "nothing": (None, "no drafter there"),
        "list": ([], "a JSON object is needed"),
        "model": ({"model_type": "llama"}, "its drafter_type is None, not 'medusa'"),
        "heads": (heads, "its num_draft_heads is 3, the recipe's 4; set drafter.num_draft_heads"),
    }
    for name, (config, message) in wrong.items():
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
            save_file({"x": torch.zeros(1)}, tmp_path / name / "model.safetensors")
            (tmp_path / name / "tokenizer.json").touch()
        begun = f"init_from={tmp_path / name}"
        assert message in medusa_runs.refused("x", begun, "drafter.num_draft_heads=4", f"run.output_dir={tmp_path}")
    for name, message in {"nothing": "no model with its tokenizer", "model": "vocab_size None ≠ 4096"}.items():
        assert message in lm_runs.refused("y", f"init_from={tmp_path / name}", f"run.output_dir={tmp_path}")
