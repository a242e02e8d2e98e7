import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.train.recipe import Batch, Optim, Recipe, Stage, read_recipe, write_recipe

ROOT = Path(__file__).parents[2]
SHIPPED = {
    "tiny-distill.yaml": ("train/distill.py", "DistillRecipe"),
    "tiny-lm.yaml": ("train/lm.py", "LmRecipe"),
    "tiny-medusa.yaml": ("train/medusa.py", "MedusaRecipe"),
    "tiny-medusa2.yaml": ("train/medusa.py", "MedusaRecipe"),
    "vicuna7b.yaml": ("train/medusa.py", "MedusaRecipe"),
    "vicuna33b-distill.yaml": ("train/distill.py", "DistillRecipe"),
    "vicuna33b-self-distill.yaml": ("train/medusa.py", "MedusaRecipe"),
    "zephyr7b-distill.yaml": ("train/distill.py", "DistillRecipe"),
    "zephyr7b-self-distill.yaml": ("train/medusa.py", "MedusaRecipe"),
    "llama3-70b-distill.yaml": ("train/distill.py", "DistillRecipe"),
    "llama3-70b-zero3.yaml": ("train/medusa.py", "MedusaRecipe"),
    "llama3-8b.yaml": ("train/medusa.py", "MedusaRecipe"),
    "qwen3-8b.yaml": ("train/medusa.py", "MedusaRecipe"),
}
GOOD = """\
run: {name: x}
data: {train: [{source: stdlib}, {source: "package:rich", weight: 2.0}], validation: [{source: stdlib}]}
optim: {lr: 2e-3, betas: [0.9, 0.99]}
batch: {sequences: 8, accumulate: 2}
steps: 10
"""


class Toy(Recipe):
    optim: Optim
    batch: Batch
    steps: int
    stages: list[Stage] = []


@pytest.fixture
def read(tmp_path):
    """read(text, *overrides), with `old → new` pairs applied to the good recipe."""

    def read(*overrides: str, text: str = GOOD, replace: tuple[str, str] = ("", "")) -> Toy:
        assert replace[0] in text
        path = tmp_path / "toy.yaml"
        path.write_text(text.replace(*replace) if replace[0] else text)
        return read_recipe(path, Toy, overrides)

    return read


def test_numbers_and_lists(read):
    recipe = read()
    assert recipe.optim.lr == 2e-3 and isinstance(recipe.optim.lr, float)
    assert recipe.optim.betas == (0.9, 0.99)
    assert recipe.run.folder == Path("runs/x")
    assert [s.weight for s in recipe.data.train] == [1.0, 2.0]


@pytest.mark.parametrize("written, value", [("2e-3", 2e-3), ("2.0e-3", 2e-3), ("1E2", 100.0), (".5", 0.5), ("3", 3.0)])
def test_what_looks_like_a_number_is_one(read, written, value):
    assert read(f"optim.lr={written}").optim.lr == value


def test_what_does_not_look_like_a_number_is_text(read):
    for written in ("1e-3x", "v1.2", "2-3", "1.2.3"):
        assert read(f"run.name={written}").run.name == written
    with pytest.raises(ValueError, match="'run.name': input should be a valid string, got 100.0"):
        read("run.name=1e2")


def test_overrides(read):
    recipe = read(
        "optim.lr=1e-4", "data.train.1.weight=3.5", "precision.compile=true", "data.train.0.answers.prompts=9"
    )
    assert recipe.optim.lr == 1e-4
    assert [s.weight for s in recipe.data.train] == [1.0, 3.5]
    assert recipe.precision.compile is True
    assert recipe.data.train[0].answers is not None and recipe.data.train[0].answers.prompts == 9
    assert len(read("data.train=[{source: stdlib}]").data.train) == 1


def test_an_override_changes_one_of_what_an_anchor_names(read):
    """YAML hands the same mapping to both places."""
    ask = "{prompts: 4, prompt_tokens: 8, new_tokens: 8}"
    sources = f"[{{source: stdlib, answers: &ask {ask}}}, {{source: stdlib, answers: *ask}}]"
    data = f"data: {{train: {sources}, validation: [{{source: stdlib}}]}}"
    recipe = read("data.train.0.answers.prompts=9", text=GOOD.replace(GOOD.splitlines()[1], data))
    assert [source.answers.prompts for source in recipe.data.train] == [9, 4]


WRONG = {
    # a misspelt key, its nearest sibling
    "optim.lrr=1": "unknown key 'optim.lrr'; nearest valid key: optim.lr",
    "data.train.0.wieght=1.0": "unknown key 'data.train.0.wieght'; nearest valid key: data.train.0.weight",
    # a good key in the wrong section
    "run.warmup_steps=3": "unknown key 'run.warmup_steps'; nearest valid key: optim.warmup_steps",
    "batch.zzz=3": "unknown key 'batch.zzz'; valid keys here: sequences, accumulate",
    # types: nothing is converted
    "steps='10'": "'steps': input should be a valid integer, got '10'",
    "steps=1.5": "'steps': input should be a valid integer, got 1.5",
    "precision.compile=1": "'precision.compile': input should be a valid boolean, got 1",
    "optim.lr=-1.0": "'optim.lr': input should be greater than 0, got -1.0",
    "optim.schedule=sine": "'optim.schedule': input should be 'constant', 'linear' or 'cosine', got 'sine'",
    "data.train=[]": "'data.train': list should have at least 1 item",
    "data=3": "'data': ",
    # combinations
    "batch.accumulate=3": "'batch': sequences=8 is not a multiple of accumulate=3",
    "data.train.0.source=wikipedia": "source 'wikipedia' is neither 'stdlib', 'package:NAME', a file",
    # overrides that reach nowhere
    "data.train.7.weight=1.0": "'data.train.7.weight': the list has 2 entries, counted from 0",
    "data.train.x.weight=1.0": "the list has 2 entries, counted from 0",
    "steps.more=1": "'steps.more': 'steps' is a value, not a section",
    "steps": "'steps' is no override; write section.field=value",
    "=3": "'=3' is no override",
    "run.name={": "not valid YAML",
}


@pytest.mark.parametrize("override, message", WRONG.items())
def test_wrong_values_are_one_clear_line(read, override, message):
    with pytest.raises(ValueError) as caught:
        read(override)
    text = str(caught.value)
    assert message in text
    assert "\n" not in text
    assert override in text and (text.startswith("'") or "toy.yaml" in text)


def test_an_innocent_override_is_not_blamed(read):
    with pytest.raises(ValueError, match=r"toy\.yaml with optim\.lr=-1\.0: 'optim\.lr'"):
        read("run.seed=3", "optim.lr=-1.0", "steps=3")
    with pytest.raises(ValueError, match=r"toy\.yaml: 'optim\.clip': "):
        read("steps=3", replace=("lr: 2e-3", "lr: 2e-3, clip: -1.0"))


def test_a_key_of_a_list_is_suggested_as_an_override(read):
    with pytest.raises(ValueError, match=r"unknown key 'run\.weight'; nearest valid key: data\.train\.0\.weight"):
        read("run.weight=3")


def test_missing_key(read):
    with pytest.raises(ValueError, match=r"toy\.yaml: 'optim\.lr' is missing; add it$"):
        read(replace=("lr: 2e-3, ", ""))


def test_several_errors_are_counted(read):
    with pytest.raises(ValueError, match=r"\(and 1 more\)$"):
        read(replace=("lr: 2e-3", "lr: -1.0, clip: -1.0"))


@pytest.mark.parametrize(
    "text, message",
    [
        (GOOD + "steps: 11\n", "toy.yaml:6: not valid YAML: key 'steps' is given twice"),
        (GOOD.replace("{lr: 2e-3,", "{lr: 2e-3, lr: 1e-3,"), "key 'lr' is given twice"),
        ("run: {name: [\n", "not valid YAML"),
        ("- a\n", "a recipe is a mapping of sections (run, data, optim, …), got list"),
        ("", "a recipe is a mapping of sections (run, data, optim, …), got NoneType"),
    ],
)
def test_damaged_files(read, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(text=text)


def test_binary_file(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        read_recipe(tmp_path / "x.yaml", Toy)


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "tiny-medusa.yaml").write_text(GOOD)
    with pytest.raises(FileNotFoundError, match=r"tiny-meduza\.yaml: .* did you mean .*tiny-medusa\.yaml\?"):
        read_recipe(tmp_path / "tiny-meduza.yaml", Toy)
    with pytest.raises(FileNotFoundError, match="there is no such recipe$"):
        read_recipe(tmp_path / "nowhere" / "qqq.yaml", Toy)


def test_a_written_recipe_reads_back(read, tmp_path):
    recipe = read("data.train.0.answers.prompts=9", "optim.lr=1e-5")
    write_recipe(recipe, tmp_path / "resolved.yaml", "the command")
    assert (tmp_path / "resolved.yaml").read_text().startswith("# the command\n")
    assert read_recipe(tmp_path / "resolved.yaml", Toy) == recipe


def test_every_shipped_recipe_is_known():
    shipped = {path.name for path in (ROOT / "recipes").glob("*.yaml")}
    assert shipped == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_parse(name):
    script, recipe = SHIPPED[name]
    path = ROOT / "recipes" / name
    launcher = "python" if script == "train/distill.py" else "accelerate launch"
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# {launcher} ") and first.endswith(f" {script} recipes/{name}")
    module = importlib.import_module(f"draftsmith.{script.removesuffix('.py').replace('/', '.')}")
    assert read_recipe(path, getattr(module, recipe)).run.name


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["recipes/tiny-lm.yaml", "optim.lr=1e-3"], "unknown key 'optim'; nearest valid key: stages.0.optim"),
        (["recipes/tiny-ml.yaml"], "did you mean recipes/tiny-lm.yaml?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    if arguments[0] == "recipes/tiny-lm.yaml":
        arguments = [*arguments, f"run.output_dir={tmp_path}"]
    done = subprocess.run([sys.executable, "train/lm.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
